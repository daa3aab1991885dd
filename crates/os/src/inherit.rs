//! Descriptors that the process got at its start, by name: systemd's socket activation,
//! `sd_listen_fds(3)`.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::fd::{OwnedFd, RawFd};

/// The first such descriptor.
pub(crate) const FIRST: RawFd = 3;
/// Name of descriptors without a name.
const UNNAMED: &str = "unknown";

/// Error of the variables that describe inherited descriptors.
#[derive(Debug)]
pub enum InheritError {
    /// A variable is not a number.
    NotANumber {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
    },
    /// There are more or fewer names than descriptors.
    Names {
        /// `LISTEN_FDS`.
        descriptors: u32,
        /// Names in `LISTEN_FDNAMES`.
        names: usize,
    },
    /// A descriptor is not open.
    NotOpen {
        /// The descriptor.
        fd: RawFd,
        /// The system's error.
        error: io::Error,
    },
}

impl fmt::Display for InheritError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotANumber { variable, value } => write!(
                f,
                "{variable}='{}' is not a number: unset it, or set it as sd_listen_fds(3) says",
                value.escape_debug()
            ),
            Self::Names { descriptors, names } => write!(
                f,
                "LISTEN_FDNAMES has {names} names, LISTEN_FDS has {descriptors} descriptors: give \
                 each one name, separated by ':'"
            ),
            Self::NotOpen { fd, error } => write!(
                f,
                "descriptor {fd} of LISTEN_FDS was not passed to this process: {error}; correct \
                 LISTEN_FDS"
            ),
        }
    }
}

impl std::error::Error for InheritError {}

/// Takes the descriptors that were passed to this process, with their names. Empty from the second
/// call on, and if they were meant for another process. To be called before the process opens any
/// descriptor.
///
/// # Errors
/// [`InheritError`]: the environment is wrong.
pub fn inherited_by_name() -> Result<Vec<(String, OwnedFd)>, InheritError> {
    let text = |name: &str| std::env::var_os(name).map(OsString::into_string);
    // Not UTF-8: neither a number nor a name of ours.
    let text = |name: &str| text(name).map(|text| text.unwrap_or_else(|_| "?".into()));
    let (pid, fds) = (text("LISTEN_PID"), text("LISTEN_FDS"));
    let names = names(pid, fds, text("LISTEN_FDNAMES"), std::process::id())?;
    let taken = crate::sys::take_inherited(names.len())?;
    Ok(names.into_iter().zip(taken).collect())
}

/// Names of the descriptors of process `own`, from the values of the variables.
fn names(
    pid: Option<String>,
    fds: Option<String>,
    names: Option<String>,
    own: u32,
) -> Result<Vec<String>, InheritError> {
    let (Some(pid), Some(fds)) = (pid, fds) else { return Ok(Vec::new()) };
    let number = |variable, value: String| {
        value.parse::<u32>().map_err(|_| InheritError::NotANumber { variable, value })
    };
    if number("LISTEN_PID", pid)? != own {
        return Ok(Vec::new());
    }
    let descriptors = number("LISTEN_FDS", fds)?;
    let Some(names) = names else {
        return Ok((0..descriptors).map(|_| UNNAMED.into()).collect());
    };
    let names: Vec<String> = names.split(':').map(Into::into).collect();
    if names.len() == descriptors as usize {
        return Ok(names);
    }
    Err(InheritError::Names { descriptors, names: names.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pid: &str, fds: &str, named: Option<&str>) -> Result<Vec<String>, String> {
        let read = names(Some(pid.into()), Some(fds.into()), named.map(Into::into), 7);
        read.map_err(|error| error.to_string())
    }

    #[test]
    fn names_are_those_of_the_variables_and_only_for_this_process() {
        assert_eq!(read("7", "2", Some("a:b")).unwrap(), ["a", "b"]);
        assert_eq!(read("7", "2", None).unwrap(), [UNNAMED, UNNAMED]);
        assert!(read("8", "2", Some("a:b")).unwrap().is_empty());
        assert!(names(None, Some("1".into()), None, 7).unwrap().is_empty());
    }

    #[test]
    fn wrong_variables_are_named() {
        assert!(read("7", "2", Some("a")).unwrap_err().contains("has 1 names"));
        assert!(read("7", "-1", None).unwrap_err().contains("LISTEN_FDS='-1'"));
        assert!(read("me", "1", None).unwrap_err().contains("LISTEN_PID='me'"));
    }
}
