//! The port of an interface: added at run time, or written to the switch's include directory
//! ([0029](../../../docs/design/0029-the-libvirt-hook-writes-files.md)).

use std::fs::{DirBuilder, File};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use api::control::ControlError;
use api::{Config, PortText, Request};
use rustix::fs::{FlockOperation, Mode, OFlags, Uid, fchown, flock, open};

use crate::attachment::Settings;

/// Held while files of the include directory change: a reload reads all of them. The hook of
/// libvirt uses the same one.
const LOCK: &str = ".ports.lock";

/// Makes the directory of sockets, in which the switch's user must be able to make some.
///
/// # Errors
/// The directory cannot be made, or is not one.
pub fn make_directory(settings: &Settings) -> Result<(), String> {
    let directory = &settings.directory;
    let error = |error: std::io::Error| format!("{}: {error}", directory.display());
    DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(error)?;
    let control = settings.control().map_err(|error| error.to_string())?;
    // The switch's user owns its socket. Without a switch, adding the port fails with the reason.
    let Ok(control) = std::fs::metadata(control) else { return Ok(()) };
    // By descriptor: the parent directory may be the switch's user's, who could put a link there.
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    let opened = open(directory, flags, Mode::empty()).map_err(|errno| error(errno.into()))?;
    let opened = File::from(opened);
    if opened.metadata().map_err(error)?.uid() != control.uid() {
        fchown(&opened, Some(Uid::from_raw(control.uid())), None)
            .map_err(|errno| error(errno.into()))?;
    }
    Ok(())
}

/// Makes the port of this specification.
///
/// # Errors
/// It is invalid, or the switch refuses it; nothing remains.
pub fn add(settings: &Settings, name: &str, port: &str) -> Result<(), String> {
    let text: PortText = port.parse().map_err(|error: api::PortError| error.to_string())?;
    let Some(directory) = &settings.ports else {
        let added = settings.call(&Request::add_port(&text));
        return added.map(drop).map_err(|error| error.to_string());
    };
    let text = Config { ports: vec![text], ..Config::default() }.to_toml();
    let path = path(directory, name);
    let error = |error: std::io::Error| {
        format!("{}: {error}; is it the include directory of the switch's file?", path.display())
    };
    let _lock = lock(directory).map_err(error)?;
    // A reload reads the old file or the new one.
    let new = directory.join(format!(".{name}.toml.new"));
    let written = File::options().write(true).create(true).truncate(true).mode(0o644).open(&new);
    let written = written.and_then(|mut file| file.write_all(text.as_bytes()));
    written.and_then(|()| std::fs::rename(&new, &path)).map_err(error)?;
    let reloaded = reload(settings);
    if reloaded.is_err() {
        // Otherwise the next reload, for another container, fails for the same reason.
        let _ = std::fs::remove_file(&path);
    }
    reloaded.map_err(|error| error.to_string())
}

/// Removes the port; one that does not exist is skipped.
///
/// # Errors
/// The switch does not remove it.
pub fn remove(settings: &Settings, name: &str) -> Result<(), String> {
    if let Some(directory) = &settings.ports
        && path(directory, name).exists()
    {
        let _lock = lock(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        let _ = std::fs::remove_file(path(directory, name));
        // If it fails, because of another file for example, the port is removed below.
        if reload(settings).is_ok() {
            return Ok(());
        }
    }
    match settings.call(&Request::DelPort { name: name.into() }) {
        // Without a switch there is no port.
        Ok(_) | Err(ControlError::Connect { .. }) => Ok(()),
        Err(error) if error.status() == Some(404) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

fn reload(settings: &Settings) -> Result<(), ControlError> {
    settings.call(&Request::Reload { dry_run: false }).map(drop)
}

fn path(directory: &Path, name: &str) -> PathBuf {
    directory.join(format!("{name}.toml"))
}

fn lock(directory: &Path) -> std::io::Result<File> {
    let mut options = File::options();
    let file = options.write(true).create(true).truncate(false).mode(0o600);
    let file = file.open(directory.join(LOCK))?;
    flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}
