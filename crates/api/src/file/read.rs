//! Reading of configuration files: regular files of bounded size.

use std::fs::{DirEntry, File};
use std::io::{Error, Read as _};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::Problem;

/// Most bytes of a file and the files that it includes: 4096 ports with a dozen options each fit.
pub(super) const BYTES_MAX: u64 = 4 << 20;
/// Most files that are included.
const FILES_MAX: usize = 4096;

fn problem(path: &Path, what: impl std::fmt::Display) -> Problem {
    let what = format!("cannot read configuration {}: {what}", path.display());
    Problem::new(Some(path), what)
}

/// Reads a file; its bytes are subtracted from `room`.
pub(super) fn text(path: &Path, room: &mut u64) -> Result<String, Problem> {
    let wrong = |what: &dyn std::fmt::Display| problem(path, what);
    // Without O_NONBLOCK, opening a FIFO waits for a writer.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let fd = rustix::fs::open(path, flags, Mode::empty());
    let mut file = File::from(fd.map_err(|error| wrong(&Error::from(error)))?);
    let is_file = file.metadata().map_err(|error| wrong(&error))?.is_file();
    if !is_file {
        return Err(wrong(&"it is not a regular file"));
    }
    let mut text = String::new();
    let read = (&mut file).take(*room + 1).read_to_string(&mut text);
    let bytes = read.map_err(|error| wrong(&error))? as u64;
    *room = room.checked_sub(bytes).ok_or_else(|| {
        let max = BYTES_MAX >> 20;
        wrong(&format!("a configuration has at most {max} MiB, including included files"))
    })?;
    Ok(text)
}

/// The files to include: `*.toml` in order of their names, without hidden ones.
pub(super) fn directory(path: &Path) -> Result<Vec<PathBuf>, Problem> {
    let wrong = |error: Error| problem(path, format!("{error}; it is the `include` directory"));
    let name = |entry: Result<DirEntry, Error>| entry.map(|entry| entry.file_name());
    let names = std::fs::read_dir(path).map_err(wrong)?.map(name);
    let mut names = names.collect::<Result<Vec<_>, _>>().map_err(wrong)?;
    names.retain(|name| {
        let name = name.as_encoded_bytes();
        name.ends_with(b".toml") && !name.starts_with(b".")
    });
    if names.len() > FILES_MAX {
        return Err(problem(path, format!("it has more than {FILES_MAX} files")));
    }
    names.sort_unstable();
    Ok(names.into_iter().map(|name| path.join(name)).collect())
}
