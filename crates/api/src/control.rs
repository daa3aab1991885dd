//! The control socket: where it is, and requests to it.

use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::http::{self, Stream};
use crate::problem::Problem;
use crate::request::Request;
use crate::routes::to_http;

/// Directory of the machine's switch: made by root, or by systemd (`RuntimeDirectory=pvswitch`).
pub const SYSTEM_DIR: &str = "/run/pvswitch";
/// Name of the control socket in it.
const SYSTEM_NAME: &str = "control.sock";
/// Name of the control socket in a user's runtime directory.
const USER_NAME: &str = "pvswitch.sock";

/// Longest wait for a reply to a query, and to a change.
const QUERY_MAX: Duration = Duration::from_secs(15);
const CHANGE_MAX: Duration = Duration::from_secs(60);

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

/// Error of a request.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No switch listens, or the socket is not open to this user.
    #[error("cannot reach a switch at {path}: {error}; {}", remedy(error))]
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
        "refused: {path} is served by user {uid}, who is neither you nor root, and you are not \
         in the socket's group; if it is your switch, run this as that user, or start the switch \
         with --control-group"
    )]
    NotOurs {
        /// The socket.
        path: PathBuf,
        /// User of the process that listens there.
        uid: u32,
    },
    /// It does not reply; `remedy`: what to do.
    #[error("no reply from the switch within {seconds} s: {remedy}")]
    NoReply {
        /// How long that was waited for.
        seconds: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// The connection failed.
    #[error("no reply from the switch: {0}; see its log")]
    Io(#[from] std::io::Error),
    /// The reply is malformed.
    #[error("the switch's reply is not JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The request was refused.
    #[error("{0}")]
    Refused(Box<Problem>),
}

fn remedy(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::PermissionDenied => {
            "permission denied on its socket or a directory above it: run this as root or as \
             the switch's user, or start the switch with --control-group"
        }
        _ => "is `pvswitch run` running, with this --control?",
    }
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

impl ControlError {
    /// The status of a refusal.
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Refused(problem) => Some(problem.status),
            _ => None,
        }
    }

    /// A refusal by the client itself: what it asked for is not in the reply.
    pub fn missing(detail: impl Into<String>) -> Self {
        Self::Refused(Problem::new(404, detail, "see the list of ports").into())
    }
}

/// A connection to a switch, or to a guest.
#[derive(Debug)]
pub struct Client(http::Client);

impl Client {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// There is no switch, or it is another user's.
    pub fn connect(path: &Path) -> Result<Self, ControlError> {
        let stream = UnixStream::connect(path)
            .map_err(|error| ControlError::Connect { path: path.into(), error })?;
        check_owner(path, &stream)?;
        Ok(Self(http::Client::new(stream)?))
    }

    /// The connection.
    pub fn stream(&self) -> &UnixStream {
        self.0.stream()
    }

    /// Sends a request and returns the reply: null if it has no content.
    ///
    /// # Errors
    /// The request was refused, or the connection failed.
    pub fn call(&mut self, request: &Request) -> Result<Value, ControlError> {
        self.call_within(request, reply_limit(request))
    }

    fn call_within(&mut self, request: &Request, limit: Duration) -> Result<Value, ControlError> {
        self.stream().set_read_timeout(Some(limit))?;
        self.stream().set_write_timeout(Some(limit))?;
        let (method, target, body) = to_http(request);
        let reply = self.0.call(method, &target, body.as_ref());
        let (status, body) = reply.map_err(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => ControlError::NoReply {
                seconds: limit.as_secs(),
                remedy: match is_query(request) {
                    true => "it is busy or stopped; see its log",
                    false => {
                        "the request may still take effect: check with `pvswitch ctl show`, and \
                         see the switch's log"
                    }
                },
            },
            _ => error.into(),
        })?;
        match status {
            200..300 if body.is_empty() => Ok(Value::Null),
            200..300 => Ok(serde_json::from_slice(&body)?),
            status => Err(refused(status, &body)),
        }
    }

    /// Sends a request whose reply is a stream, and returns the stream.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn open(self, request: &Request) -> Result<Stream, ControlError> {
        let (method, target, _) = to_http(request);
        self.0.open(method, &target)?.map_err(|(status, body)| refused(status, &body))
    }
}

/// Whether a request changes nothing.
fn is_query(request: &Request) -> bool {
    to_http(request).0 == "GET"
}

/// Longest wait for a part of a reply. What changes the switch may itself take long, or waits for
/// an upgrade before it, which takes up to 10 s.
fn reply_limit(request: &Request) -> Duration {
    match request {
        Request::Why { seconds, .. } => QUERY_MAX + Duration::from_secs_f64(seconds.max(0.0)),
        request if is_query(request) => QUERY_MAX,
        _ => CHANGE_MAX,
    }
}

fn refused(status: u16, body: &[u8]) -> ControlError {
    let unknown = || {
        let text = String::from_utf8_lossy(body);
        Problem::new(status, format!("refused with HTTP status {status}: {text}"), "")
    };
    ControlError::Refused(serde_json::from_slice(body).unwrap_or_else(|_| unknown()).into())
}

/// Sends one request; returns the reply.
///
/// # Errors
/// There is no switch, or it refused the request.
pub fn call(path: &Path, request: &Request) -> Result<Value, ControlError> {
    Client::connect(path)?.call(request)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_change_without_a_reply_may_still_take_effect() {
        let dir = std::env::temp_dir().join(format!("pvswitch-reply-{}", std::process::id()));
        let _listener = std::os::unix::net::UnixListener::bind(&dir).unwrap();
        let error = |request: &Request| {
            // Queued at the listener, which accepts none.
            let client = UnixStream::connect(&dir).unwrap();
            let mut client = Client(http::Client::new(client).unwrap());
            client.call_within(request, Duration::from_millis(1)).unwrap_err().to_string()
        };
        let reload = Request::Reload { dry_run: false };
        assert_eq!(
            error(&reload),
            "no reply from the switch within 0 s: the request may still take effect: check with \
             `pvswitch ctl show`, and see the switch's log"
        );
        let show = "no reply from the switch within 0 s: it is busy or stopped; see its log";
        assert_eq!(error(&Request::Show), show);
        std::fs::remove_file(&dir).unwrap();
    }

    #[test]
    fn changes_are_waited_for_longer_and_by_the_libvirt_hook_longest() {
        let limits = [
            Request::Show,
            Request::Why { name: "a".into(), seconds: 10.0 },
            Request::Reload { dry_run: false },
            Request::Upgrade { program: None },
        ];
        assert_eq!(limits.map(|request| reply_limit(&request).as_secs()), [15, 25, 60, 60]);
        let hook = include_str!("../../../plugins/libvirt/qemu");
        let limit = hook.lines().find_map(|line| line.strip_prefix("RELOAD_TIMEOUT_S = "));
        assert!(limit.unwrap().parse::<u64>().unwrap() > CHANGE_MAX.as_secs());
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
