//! `pvswitch ctl save`: the running configuration as a file.
//!
//! The switch returns the text; this process writes it, with the rights of its user.

use std::fs::{File, Permissions};
use std::io::{Error, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use api::Request;
use api::control::Client;
use serde_json::{Value, json};

use crate::error::{AnyError, Usage};

/// Permissions of a new file, less the umask.
const MODE: u32 = 0o644;

/// Why a file was not written.
#[derive(Debug, thiserror::Error)]
#[error("cannot save to {path}: {what}")]
struct SaveError {
    path: String,
    what: String,
}

/// Runs `pvswitch ctl save`.
pub fn command(control: &Path, file: Option<&Path>, json: bool) -> Result<(), AnyError> {
    let mut client = Client::connect(control)?;
    let answer = client.call(&Request::Config)?;
    let text = answer["config"]
        .as_str()
        .ok_or("the reply has no configuration; use the ctl of the version that runs the switch")?;
    if file == Some(Path::new("-")) {
        std::io::stdout().write_all(text.as_bytes())?;
        return Ok(());
    }
    let peer = rustix::net::sockopt::socket_peercred(client.stream())?.uid;
    if file.is_none() && peer != rustix::process::geteuid() {
        // It could name any file that we may write.
        let what =
            format!("the switch is run by user {}: name a file, ctl save FILE", peer.as_raw());
        return Err(Usage(what).into());
    }
    let path = match file {
        Some(file) => file.to_path_buf(),
        None => own_file(&answer).map_err(Usage)?,
    };
    let at = |what: String| SaveError { path: path.display().to_string(), what };
    write(&path, text).map_err(|error| at(error.to_string()))?;
    if json {
        let bytes = text.len();
        println!("{}", json!({ "ok": true, "file": path.display().to_string(), "bytes": bytes }));
    } else {
        println!("{}: saved", path.display());
    }
    Ok(())
}

/// The file that the switch was started from, if it may be overwritten.
fn own_file(answer: &Value) -> Result<PathBuf, String> {
    let name_one = "name a file, ctl save FILE";
    let own = answer["file"].as_str();
    let own = own.ok_or(format!("the switch was started without --config: {name_one}"))?;
    if let Some(include) = answer["include"].as_str() {
        return Err(format!(
            "{own} includes the files of {include}, which would no longer be read: {name_one}"
        ));
    }
    let ports = answer["command_line"].as_array().map(Vec::as_slice).unwrap_or_default();
    let ports: Vec<_> = ports.iter().filter_map(Value::as_str).collect();
    if !ports.is_empty() {
        return Err(format!(
            "the ports of the command line of `run` ({}) would be in {own}, too: {name_one}",
            ports.join(", ")
        ));
    }
    Ok(own.into())
}

/// Writes a file by way of a temporary one: a reader sees the earlier text or the whole new one.
fn write(path: &Path, text: &str) -> Result<(), Error> {
    // A link stays a link.
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.into());
    let mode = match std::fs::metadata(&path) {
        Ok(there) if !there.is_file() => return Err(Error::other("it is not a regular file")),
        Ok(there) => Some(there.permissions().mode() & 0o7777),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let name = path.file_name().ok_or_else(|| Error::other("it has no name"))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    // Neither read as an included file nor anything that exists (a power cut may leave one), and
    // removed on an error.
    let prefix = format!(".{}.", name.to_string_lossy());
    let create = |at: &Path| File::options().write(true).create_new(true).mode(MODE).open(at);
    let beside = tempfile::Builder::new().prefix(&prefix).suffix(".tmp").make_in(folder, create);
    let mut file = beside?;
    if let Some(mode) = mode {
        file.as_file().set_permissions(Permissions::from_mode(mode))?;
    }
    file.write_all(text.as_bytes())?;
    file.as_file().sync_all()?;
    file.persist(&path).map_err(|failed| failed.error)?;
    // The name, too, is on the disk before it is reported as saved.
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_keeps_its_mode() {
        let dir = std::env::temp_dir().join(format!("pvs-save-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (path, link) = (dir.join("x.toml"), dir.join("link.toml"));
        write(&path, "workers = 1\n").unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        write(&link, "workers = 2\n").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "workers = 2\n");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
        assert!(link.is_symlink());
        let error = write(Path::new("/dev/null"), "x").unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
        assert!(write(&dir.join("none/x.toml"), "x").is_err());
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 2, "no temporary file is left");
        std::fs::remove_dir_all(dir).unwrap();
    }
}
