//! The control socket: one JSON object per line, each way, over a Unix stream socket.
//!
//! ```text
//!   → {"cmd":"stats"}                         ← {"ok":true, ...}
//!   → {"cmd":"add-port","port":"b=null"}      ← {"ok":false,"error":"..."}
//! ```
//! The reply to `capture` is one such line and then the pcapng stream.
//!
//! The switch supports all requests, `nic` and `gen` some of them.

use std::fmt::Display;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// A request.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "kebab-case")]
pub enum Request {
    /// Returns ports, their state and negotiated features.
    Show,
    /// Returns all counters.
    Stats,
    /// Adds a port, as `--port` does.
    AddPort {
        /// `NAME=KIND:ARG[,key=value]...`
        port: String,
    },
    /// Removes a port.
    DelPort {
        /// Its name.
        name: String,
    },
    /// Lists known addresses.
    Fdb,
    /// Sets a static address.
    FdbAdd {
        /// `02:00:00:00:00:01`
        mac: String,
        /// Port name.
        port: String,
        /// VLAN id, 0 for untagged.
        #[serde(default)]
        vlan: u16,
    },
    /// Removes an address.
    FdbDel {
        /// `02:00:00:00:00:01`
        mac: String,
        /// VLAN id, 0 for untagged.
        #[serde(default)]
        vlan: u16,
    },
    /// Copies a port's frames to this connection as pcapng.
    Capture {
        /// Port name.
        port: String,
    },
    /// Changes settings at run time.
    Set {
        /// Port, or `PORT/QUEUE`; none: the whole switch.
        #[serde(default)]
        target: Option<String>,
        /// `KEY=VALUE` each.
        settings: Vec<String>,
    },
    /// Stops or resumes taking frames from a port. The reply is immediate; repeat the request
    /// until the port is drained.
    Drain {
        /// Its name.
        name: String,
        /// Resume.
        #[serde(default)]
        off: bool,
    },
    /// Reads the configuration file again and applies what differs.
    Reload {
        /// Only reports what differs.
        #[serde(default)]
        dry_run: bool,
    },
    /// Hands the switch to a new process, without an interruption that guests notice.
    Upgrade {
        /// Path of the program; none: that of the running switch.
        #[serde(default)]
        program: Option<PathBuf>,
    },
    /// Returns the running configuration as a file.
    Config,
    /// Stops the switch.
    Shutdown,
}

impl Request {
    /// Names of requests that change nothing, and show no frames.
    pub const READS: [&str; 3] = ["show", "stats", "fdb"];

    /// Whether it changes the switch, or shows frames of guests: more than reading its state.
    pub fn changes(&self) -> bool {
        !Self::READS.contains(&&*self.name())
    }

    /// Whether only the switch's user and root may make it: it runs a program with the switch's
    /// rights.
    pub fn is_for_owner(&self) -> bool {
        matches!(self, Self::Upgrade { .. })
    }

    /// Its name on the wire.
    pub fn name(&self) -> String {
        let value = serde_json::to_value(self).unwrap_or_default();
        value["cmd"].as_str().unwrap_or_default().into()
    }
}

/// Longest request.
pub const REQUEST_MAX: usize = 4096;

/// Result of reading from a client.
pub enum Received {
    /// A request.
    Request(Request),
    /// A line that is not a request, and why; the client may continue.
    Unknown(String),
    /// Not a line; reply with [`MALFORMED`] and close.
    Malformed,
    /// Nothing yet.
    Nothing,
    /// The client closed the connection.
    Closed,
}

/// Reads one line from a nonblocking client.
pub fn receive(client: &mut BufReader<UnixStream>) -> Received {
    match client.fill_buf() {
        Ok([]) => Received::Closed,
        Ok(buffered) => match buffered.iter().position(|b| *b == b'\n') {
            Some(end) => {
                let request = serde_json::from_slice(&buffered[..end]);
                client.consume(end + 1);
                let unknown = |error| Received::Unknown(format!("unknown request: {error}"));
                request.map_or_else(unknown, Received::Request)
            }
            // Partial lines are not awaited: a request is far shorter than one write.
            None => Received::Malformed,
        },
        Err(error) if error.kind() == ErrorKind::WouldBlock => Received::Nothing,
        Err(_) => Received::Closed,
    }
}

/// The reply for a result.
pub fn reply<E: Display>(result: Result<Value, E>) -> Value {
    match result {
        Ok(mut value) => {
            value["ok"] = true.into();
            value
        }
        Err(error) => failure(&error.to_string()),
    }
}

/// The reply for an error.
pub fn failure(error: &str) -> Value {
    json!({ "ok": false, "error": error })
}

/// Error text for [`Received::Malformed`].
pub const MALFORMED: &str = "request is not one line of JSON";

/// A reply as bytes of the stream.
pub fn line(reply: &Value) -> Vec<u8> {
    let mut line = reply.to_string();
    line.push('\n');
    line.into_bytes()
}

/// Writes a reply.
///
/// # Errors
/// The stream does not accept all of it.
pub fn write(mut client: &UnixStream, reply: &Value) -> std::io::Result<()> {
    client.write_all(&line(reply))
}

/// Directory of the machine's switch: made by root, or by systemd (`RuntimeDirectory=pvswitch`).
pub const SYSTEM_DIR: &str = "/run/pvswitch";
/// Name of the control socket in it.
const SYSTEM_NAME: &str = "control.sock";
/// Name of the control socket in a user's runtime directory.
const USER_NAME: &str = "pvswitch.sock";

/// Where a process looks for the default path.
struct Places<'a> {
    /// Its effective user.
    uid: u32,
    /// [`SYSTEM_DIR`].
    system: &'a Path,
    /// `XDG_RUNTIME_DIR`, if it is set.
    user: Option<PathBuf>,
}

impl Places<'_> {
    fn of_this_process() -> Self {
        let user = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty());
        let uid = rustix::process::geteuid().as_raw();
        Self { uid, system: Path::new(SYSTEM_DIR), user: user.map(Into::into) }
    }

    /// Whether only this user, or root, can make names in `dir`. In a shared directory, another
    /// user could make the socket first.
    fn is_private(&self, dir: &Path) -> bool {
        std::fs::metadata(dir)
            .is_ok_and(|dir| dir.is_dir() && dir.uid() == self.uid && dir.mode() & 0o022 == 0)
    }

    /// Where this user's switch listens.
    fn listen_path(&self) -> Result<PathBuf, ControlError> {
        if self.uid == 0 {
            // An existing directory is not changed.
            let _ = std::fs::DirBuilder::new().mode(0o755).create(self.system);
        }
        if self.is_private(self.system) {
            return Ok(self.system.join(SYSTEM_NAME));
        }
        match self.user.as_deref().filter(|dir| self.is_private(dir)) {
            Some(dir) => Ok(dir.join(USER_NAME)),
            None => Err(ControlError::NoDefault),
        }
    }

    /// The socket of this user's switch or, if there is none, that of the machine's.
    fn find(&self) -> Result<PathBuf, ControlError> {
        let user = self.user.as_deref().filter(|dir| self.is_private(dir));
        let user = user.map(|dir| dir.join(USER_NAME));
        if let Some(path) = user.as_ref().filter(|path| path.exists()) {
            return Ok(path.clone());
        }
        let system = self.system.join(SYSTEM_NAME);
        // Without permission to search the directory, the error of a connection says so.
        let missing = |error: std::io::Error| error.kind() == std::io::ErrorKind::NotFound;
        if std::fs::symlink_metadata(&system).is_err_and(missing) && self.uid != 0 {
            return user.ok_or(ControlError::NoDefault);
        }
        Ok(system)
    }
}

/// Default path at which a switch listens: in a directory that only its user can write to.
///
/// # Errors
/// There is no such directory.
pub fn listen_path() -> Result<PathBuf, ControlError> {
    Places::of_this_process().listen_path()
}

/// Default path of the switch to connect to: this user's, else the machine's.
///
/// # Errors
/// There is neither, and no directory for one.
pub fn default_path() -> Result<PathBuf, ControlError> {
    Places::of_this_process().find()
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No switch listens.
    #[error(
        "cannot reach a switch at {path}: {error}; is `pvswitch run` running, with this --control?"
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// No path is given, and there is no default.
    #[error(
        "no control socket is given, and neither /run/pvswitch nor XDG_RUNTIME_DIR is a directory \
         that only this user can write to; give --control PATH in such a directory"
    )]
    NoDefault,
    /// The socket belongs to another user.
    #[error(
        "{path} is served by user {uid}, neither you nor root, and is not a socket of a group of \
         yours: refused; if that is your switch, run this as that user, or have it started with \
         --control-group"
    )]
    NotOurs {
        /// The socket.
        path: PathBuf,
        /// User of the process that listens there.
        uid: u32,
    },
    /// The connection failed.
    #[error("the switch did not answer: {0}")]
    Io(#[from] std::io::Error),
    /// The reply is malformed.
    #[error("the switch's answer is not JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The switch refused the request.
    #[error("{0}")]
    Refused(String),
}

/// Refuses a socket of another user, whose replies cannot be trusted. Root may use any user's
/// switch; members of a group may use one that was opened to their group.
fn check_owner(path: &Path, stream: &UnixStream) -> Result<(), ControlError> {
    let own = rustix::process::geteuid();
    let peer = rustix::net::sockopt::socket_peercred(stream).map_err(std::io::Error::from)?.uid;
    if own.is_root() || peer == own || peer.is_root() || is_for_our_group(path) {
        return Ok(());
    }
    Err(ControlError::NotOurs { path: path.into(), uid: peer.as_raw() })
}

/// Whether the socket is for a group of this process, in a directory that not everyone can write
/// to: only a member of the group can have made it.
fn is_for_our_group(path: &Path) -> bool {
    let shared = path.parent().and_then(|dir| std::fs::metadata(dir).ok());
    let shared = shared.is_none_or(|dir| dir.mode() & 0o002 != 0);
    let mut groups = rustix::process::getgroups().unwrap_or_default();
    groups.push(rustix::process::getegid());
    std::fs::metadata(path).is_ok_and(|socket| {
        let ours = groups.iter().any(|group| group.as_raw() == socket.gid());
        ours && socket.mode() & 0o020 != 0 && !shared
    })
}

/// Sends one request; returns the reply, and the connection.
///
/// # Errors
/// There is no switch, or it refused the request.
pub fn call(
    path: &Path,
    request: &Request,
) -> Result<(Value, BufReader<UnixStream>), ControlError> {
    let stream = UnixStream::connect(path)
        .map_err(|error| ControlError::Connect { path: path.into(), error })?;
    check_owner(path, &stream)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut line = serde_json::to_string(request)?;
    line.push('\n');
    (&stream).write_all(line.as_bytes())?;
    let mut reader = BufReader::new(stream);
    let mut reply = String::new();
    reader.read_line(&mut reply)?;
    let reply: Value = serde_json::from_str(&reply)?;
    if reply["ok"] == Value::Bool(true) {
        return Ok((reply, reader));
    }
    let error = reply["error"].as_str().unwrap_or("no reason given");
    Err(ControlError::Refused(error.into()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn requests_that_show_frames_or_are_new_need_the_right_to_change() {
        let reads = [Request::Show, Request::Stats, Request::Fdb];
        assert!(reads.iter().all(|request| !request.changes()));
        let port = "a".to_string();
        assert!(Request::Capture { port: port.clone() }.changes());
        assert!(Request::Drain { name: port.clone(), off: false }.changes());
        assert!(Request::FdbDel { mac: port, vlan: 0 }.changes() && Request::Shutdown.changes());
    }

    #[test]
    fn the_default_path_is_in_a_directory_of_its_user_alone() {
        let uid = rustix::process::geteuid().as_raw();
        let dir = std::env::temp_dir().join(format!("pvswitch-api-{}", std::process::id()));
        let (system, user) = (dir.join("system"), dir.join("user"));
        let chmod = |path: &Path, mode| {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let make = |path: &Path, mode| {
            std::fs::create_dir_all(path).unwrap();
            chmod(path, mode);
        };
        make(&user, 0o700);
        let nobody = 65534;
        let places = |uid, user: &Path| Places { uid, system: &system, user: Some(user.into()) };
        let own = || places(uid, &user);
        if uid != 0 {
            assert_eq!(own().listen_path().unwrap(), user.join(USER_NAME));
            chmod(&user, 0o777);
            assert!(matches!(own().listen_path(), Err(ControlError::NoDefault)), "world-writable");
            chmod(&user, 0o700);
        }
        assert!(matches!(places(nobody, &user).listen_path(), Err(ControlError::NoDefault)));
        assert!(matches!(places(nobody, &user).find(), Err(ControlError::NoDefault)));
        make(&system, 0o755);
        assert_eq!(own().listen_path().unwrap(), system.join(SYSTEM_NAME));
        assert!(matches!(places(nobody, &user).listen_path(), Err(ControlError::NoDefault)));
        // Clients prefer their own switch to the machine's.
        std::fs::write(system.join(SYSTEM_NAME), "").unwrap();
        assert_eq!(own().find().unwrap(), system.join(SYSTEM_NAME));
        assert_eq!(places(nobody, &user).find().unwrap(), system.join(SYSTEM_NAME));
        std::fs::write(user.join(USER_NAME), "").unwrap();
        assert_eq!(own().find().unwrap(), user.join(USER_NAME));
        std::fs::remove_dir_all(dir).unwrap();
    }
}
