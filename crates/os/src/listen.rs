//! Listening Unix sockets, whose names appear with their group and mode and with a listener.
//!
//! `bind` makes a name before the process listens, with a mode cut by the umask. So the socket has
//! a temporary name first, in the same directory:
//!
//! ```text
//!   bind .NAME.RANDOM, mode 0600 ─▶ group ─▶ mode ─▶ listen ─▶ rename to NAME
//! ```
//! The last step fails if NAME exists. The socket of a dead process is removed first, by one
//! process at a time. A name without a listener is thus always that of a dead process.

use std::ffi::{OsStr, OsString};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, FileType, FlockOperation, Gid, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;
use rustix::net::SocketFlags;

use crate::fd::set_nonblocking;
use crate::poll::{Until, wait};
use crate::socket::{Carries, PATH_MAX, SocketError, address, os, socket};
use crate::users::{Group, peer};

/// Limit of connections not accepted yet.
const BACKLOG: i32 = 128;
/// Attempts at a name that other processes make and remove meanwhile.
const TRIES: u32 = 16;
/// Attempts to lock a directory, and the pause after each.
const LOCK_TRIES: u32 = 200;
const LOCK_PAUSE: Duration = Duration::from_millis(1);
/// Bytes of a name that its temporary name repeats.
const REPEATED_MAX: usize = 40;
/// Permission to write for everyone.
const OTHERS_WRITE: u32 = 0o002;

/// Who may connect to a socket: those who may write to its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// Permission bits, independent of the umask.
    pub mode: u32,
    /// Group; `None`: that of the process.
    pub group: Option<Group>,
}

impl Permissions {
    /// Permits the user of the process, and root.
    pub const OWNER: Self = Self { mode: 0o600, group: None };

    /// Whether users other than the owner and the group's members may connect.
    pub fn is_for_all(&self) -> bool {
        self.mode & OTHERS_WRITE != 0
    }
}

/// Creates a directory in which those who have these permissions on a socket can reach it. Returns
/// whether it was created; an existing one is not changed.
///
/// # Errors
/// Errors of the system call.
pub fn create_directory(path: &Path, permissions: &Permissions) -> std::io::Result<bool> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => return Ok(false),
        result => result?,
    }
    if let Some(group) = &permissions.group {
        std::os::unix::fs::chown(path, None, Some(group.id))?;
    }
    // Whoever may write to a socket may list and search its directory.
    let others = (permissions.mode & 0o022) >> 1;
    let mode = 0o700 | others | (others << 2);
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    Ok(true)
}

/// A listening socket; its name is removed with it, unless it was inherited.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode of our name, so that another's is not removed; `None`: it was inherited.
    made: Option<Identity>,
    /// Its name belongs to another process.
    lent: bool,
}

/// Device and inode of a name.
type Identity = (u64, u64);

fn identity_of(stat: &Stat) -> Identity {
    (stat.st_dev, stat.st_ino)
}

/// Identity of what a path names; not of the target of a symbolic link.
fn identity(path: &Path) -> Option<Identity> {
    std::fs::symlink_metadata(path).ok().map(|m| (m.dev(), m.ino()))
}

/// Whether `fd` is a TCP socket that listens.
pub fn is_tcp_listener(fd: BorrowedFd<'_>) -> bool {
    use rustix::net::{AddressFamily, SocketType, sockopt};
    matches!(sockopt::socket_domain(fd), Ok(AddressFamily::INET | AddressFamily::INET6))
        && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
        && sockopt::socket_acceptconn(fd) == Ok(true)
}

impl Listener {
    /// Listens at `path`; a socket for datagrams receives. One left by a dead process is replaced.
    ///
    /// # Errors
    /// [`SocketError`] with the reason.
    pub fn bind(
        path: &Path,
        carries: Carries,
        permissions: &Permissions,
    ) -> Result<Self, SocketError> {
        let os = |error| os("listen", path, error);
        // Clients need this path, whatever ours is.
        address(path)?;
        let Some(name) = path.file_name() else {
            return Err(SocketError::NotASocket(path.into()));
        };
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let parent = parent.unwrap_or(Path::new("."));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = match rustix::fs::openat(CWD, parent, flags, Mode::empty()) {
            Ok(dir) => dir,
            Err(Errno::NOENT | Errno::NOTDIR) => return Err(SocketError::NoDirectory(path.into())),
            Err(Errno::ACCESS) => return Err(SocketError::NotAllowed(path.into())),
            Err(error) => return Err(os(error)),
        };
        let socket = socket(carries).map_err(os)?;
        // On Linux the name gets this mode, less the umask.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(os)?;
        let name = Name { path, carries, dir: dir.as_fd(), parent, last: name };
        let temporary = name.bind(&socket)?;
        let made = name.permit(&temporary.0, permissions)?;
        if carries != Carries::Datagrams {
            rustix::net::listen(&socket, BACKLOG).map_err(os)?;
        }
        name.place(&temporary.0)?;
        Ok(Self { socket, path: path.into(), made: Some(made), lent: false })
    }

    /// Uses a socket that listens already, inherited from the parent process, which keeps its name.
    /// `path` stands for it in messages and in [`is_at`](Self::is_at).
    ///
    /// # Errors
    /// [`SocketError::NotListening`]: it is something else.
    pub fn inherited(socket: OwnedFd, path: &Path) -> Result<Self, SocketError> {
        use rustix::net::{AddressFamily, SocketType, sockopt};
        let what = match sockopt::socket_domain(&socket) {
            Err(_) => Some("is not a socket"),
            Ok(AddressFamily::UNIX) => match sockopt::socket_type(&socket) {
                Ok(SocketType::STREAM) => match sockopt::socket_acceptconn(&socket) {
                    Ok(true) => None,
                    _ => Some("does not listen"),
                },
                _ => Some("is not a stream socket"),
            },
            Ok(_) => Some("is not a Unix socket"),
        };
        if let Some(what) = what {
            return Err(SocketError::NotListening { path: path.into(), what });
        }
        set_nonblocking(socket.as_fd());
        Ok(Self { socket, path: path.into(), made: None, lent: false })
    }

    /// Whether it was inherited: the parent process still uses it.
    pub fn is_inherited(&self) -> bool {
        self.made.is_none()
    }

    /// Uses a listening socket of another process, whose name at `path` has this device and inode
    /// (`None`: the name is a third's).
    /// The name is not removed with the listener before [`own`](Self::own).
    pub fn adopt(socket: OwnedFd, path: &Path, made: Option<(u64, u64)>) -> Self {
        Self { socket, path: path.into(), made, lent: true }
    }

    /// Makes the name this process's own: the other one has ended.
    pub fn own(&mut self) {
        self.lent = false;
    }

    /// Device and inode of its name; `None`: it was inherited, and the parent process keeps the
    /// name.
    pub fn made(&self) -> Option<(u64, u64)> {
        self.made
    }

    /// The path it listens at.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether `path` is a name of this socket.
    pub fn is_at(&self, path: &Path) -> bool {
        match self.made {
            Some(made) => identity(path) == Some(made),
            None => path == self.path,
        }
    }

    /// Changes who may connect from now on. Returns what was set before.
    ///
    /// # Errors
    /// [`SocketError::Replaced`]: its name is another file by now;
    /// [`SocketError::NotOfGroup`]: the process may not set the group. Nothing is changed.
    pub fn permit(&self, want: &Permissions) -> Result<Permissions, SocketError> {
        let error = |error| os("open", &self.path, error);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // By descriptor: the name could be another file between the check and the change.
        let file = rustix::fs::openat(CWD, &self.path, flags, Mode::empty()).map_err(error)?;
        let stat = rustix::fs::fstat(&file).map_err(error)?;
        if self.made != Some(identity_of(&stat)) || stat.st_nlink != 1 {
            return Err(SocketError::Replaced(self.path.clone()));
        }
        let own = rustix::process::getegid().as_raw();
        let group = want.group.clone().unwrap_or_else(|| Group { id: own, name: own.to_string() });
        set_permissions(&self.path, &file, &stat, &Permissions { group: Some(group), ..*want })?;
        let group = Group { id: stat.st_gid, name: stat.st_gid.to_string() };
        Ok(Permissions { mode: stat.st_mode & 0o7777, group: Some(group) })
    }

    /// Accepts the next connection, non-blocking; `None` if there is none.
    ///
    /// # Errors
    /// [`SocketError::Os`], for example out of descriptors.
    pub fn accept(&self) -> Result<Option<OwnedFd>, SocketError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        match rustix::net::accept_with(&self.socket, flags) {
            Ok(socket) => Ok(Some(socket)),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(error) => Err(os("accept", &self.path, error)),
        }
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    /// [`SocketError::NoPeer`] after `timeout`; or as [`accept`](Self::accept).
    pub fn accept_within(&self, timeout: Duration) -> Result<OwnedFd, SocketError> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(socket) = self.accept()? {
                return Ok(socket);
            }
            let ready = wait(self.socket.as_fd(), Until::Readable, deadline);
            let os = |error| SocketError::Os { what: "accept", path: self.path.clone(), error };
            if !ready.map_err(os)? {
                return Err(SocketError::NoPeer(self.path.clone()));
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.made.is_some() && !self.lent && self.is_at(&self.path) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Sets group and mode of a file, which has `stat` now and is open by O_PATH.
fn set_permissions(
    path: &Path,
    file: &OwnedFd,
    stat: &Stat,
    want: &Permissions,
) -> Result<(), SocketError> {
    let at = format!("/proc/self/fd/{}", file.as_raw_fd());
    let chmod = |mode| {
        let set = std::fs::set_permissions(&at, std::fs::Permissions::from_mode(mode));
        set.map_err(|error| SocketError::Os { what: "chmod", path: path.into(), error })
    };
    let before = stat.st_mode & 0o7777;
    if let Some(group) = want.group.as_ref().filter(|group| group.id != stat.st_gid) {
        // Meanwhile what both modes permit: with the other group either would permit wrong users.
        let common = before & want.mode;
        if common != before {
            chmod(common)?;
        }
        let gid = Some(Gid::from_raw(group.id));
        let set = rustix::fs::chownat(file, "", None, gid, AtFlags::EMPTY_PATH);
        if set.is_err() && common != before {
            chmod(before)?;
        }
        match set {
            Err(Errno::PERM | Errno::INVAL) => {
                let group = group.name.clone();
                return Err(SocketError::NotOfGroup { path: path.into(), group });
            }
            result => result.map_err(|error| os("chown", path, error))?,
        }
    }
    chmod(want.mode)
}

/// A name for a socket.
struct Name<'a> {
    path: &'a Path,
    carries: Carries,
    /// The directory of the name, and its path.
    dir: BorrowedFd<'a>,
    parent: &'a Path,
    last: &'a OsStr,
}

/// A temporary name in a directory; removed on drop, with what it names then.
struct Temporary<'a>(OsString, BorrowedFd<'a>);

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        let _ = rustix::fs::unlinkat(self.1, &self.0, AtFlags::empty());
    }
}

impl<'a> Name<'a> {
    fn os(&self, error: Errno) -> SocketError {
        os("listen", self.path, error)
    }

    /// Binds the socket to a temporary name. `ss` shows this name, so it repeats the final one.
    fn bind(&self, socket: &OwnedFd) -> Result<Temporary<'a>, SocketError> {
        let last = self.last.as_bytes();
        let repeated = OsStr::from_bytes(&last[..last.len().min(REPEATED_MAX)]);
        for _ in 0..TRIES {
            let mut name = OsString::from(".");
            name.push(repeated);
            name.push(format!(".{:08x}", RandomState::new().build_hasher().finish() as u32));
            let mut at = self.parent.join(&name);
            if at.as_os_str().len() > PATH_MAX {
                at = Path::new("/proc/self/fd").join(self.dir.as_raw_fd().to_string()).join(&name);
            }
            match rustix::net::bind(socket, &address(&at)?) {
                Ok(()) => return Ok(Temporary(name, self.dir)),
                Err(Errno::ADDRINUSE) => {}
                Err(Errno::NOENT) => return Err(SocketError::NoDirectory(self.path.into())),
                Err(Errno::ACCESS) => return Err(SocketError::NotAllowed(self.path.into())),
                Err(error) => return Err(self.os(error)),
            }
        }
        Err(self.os(Errno::ADDRINUSE))
    }

    /// Sets group and mode of the temporary name. Returns its identity.
    fn permit(&self, temporary: &OsStr, want: &Permissions) -> Result<Identity, SocketError> {
        let os = |error| self.os(error);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(self.dir, temporary, flags, Mode::empty()).map_err(os)?;
        let stat = rustix::fs::fstat(&file).map_err(os)?;
        // In a directory that others may rewrite, this could be another file by now.
        if FileType::from_raw_mode(stat.st_mode) != FileType::Socket || stat.st_nlink != 1 {
            return Err(self.os(Errno::STALE));
        }
        set_permissions(self.path, &file, &stat, want)?;
        Ok(identity_of(&stat))
    }

    /// Renames the temporary name to the final one, which must be free or of a dead process.
    fn place(&self, temporary: &OsStr) -> Result<(), SocketError> {
        let (dir, last) = (self.dir, self.last);
        let mut lock = None;
        for _ in 0..TRIES {
            let flags = RenameFlags::NOREPLACE;
            let placed = match rustix::fs::renameat_with(dir, temporary, dir, last, flags) {
                // The file system has no such rename.
                Err(Errno::INVAL | Errno::NOSYS) => {
                    rustix::fs::linkat(dir, temporary, dir, last, AtFlags::empty())
                }
                result => result,
            };
            match placed {
                Err(Errno::EXIST) => {}
                result => return result.map_err(|error| self.os(error)),
            }
            lock = lock.or_else(|| self.lock());
            if self.is_dead()? {
                let _ = rustix::fs::unlinkat(self.dir, self.last, AtFlags::empty());
            }
        }
        Err(SocketError::Busy { path: self.path.into(), pid: None })
    }

    /// Locks the directory, so that of processes that start at once only one removes a dead name.
    /// `None`: it may not be read, or another user keeps it locked; nothing else is at risk.
    fn lock(&self) -> Option<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(self.dir, ".", flags, Mode::empty()).ok()?;
        for _ in 0..LOCK_TRIES {
            if rustix::fs::flock(&dir, FlockOperation::NonBlockingLockExclusive).is_ok() {
                return Some(dir);
            }
            std::thread::sleep(LOCK_PAUSE);
        }
        None
    }

    /// Whether a dead process's socket has the final name; false: the name is free by now.
    fn is_dead(&self) -> Result<bool, SocketError> {
        let path = self.path;
        let os = |error| SocketError::Os { what: "listen", path: path.into(), error };
        let there = match std::fs::symlink_metadata(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            there => there.map_err(os)?,
        };
        let own = rustix::process::geteuid().as_raw();
        let shared = std::fs::metadata(self.parent).map_err(os)?.mode() & OTHERS_WRITE != 0;
        if shared && there.uid() != own {
            return Err(SocketError::Taken { path: path.into(), uid: there.uid() });
        }
        if !there.file_type().is_socket() {
            return Err(SocketError::NotASocket(path.into()));
        }
        let probe = socket(self.carries).map_err(|error| self.os(error))?;
        let pid = match rustix::net::connect(&probe, &address(path)?) {
            Err(Errno::CONNREFUSED) => return Ok(true),
            Err(Errno::NOENT) => return Ok(false),
            Ok(()) => peer(probe.as_fd()).ok().and_then(|peer| peer.pid),
            // AGAIN: a process listens, and its backlog is full. PROTOTYPE: a process listens with
            // the other type.
            Err(_) => None,
        };
        Err(SocketError::Busy { path: path.into(), pid })
    }
}

#[cfg(test)]
mod tests;
