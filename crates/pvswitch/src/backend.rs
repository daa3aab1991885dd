//! `pvswitch vhost-user-net`: the back-end program of one guest's device, by the conventions of
//! vhost-user.rst ("Backend program conventions").
//!
//! Management software starts such a program for each device, but a switch has many guests. So this
//! process adds a port to a running switch, and passes the guest's messages to it, with their
//! descriptors: memory, kicks and calls go directly between the guest and the switch, and the
//! process sleeps.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use api::control::{call, default_path};
use api::{PortText, Request};
use os::{Carries, FdKind, Listener, Permissions, Received, Until};
use vhost_user::message::{FDS_MAX, HEADER_LEN, Header, PAYLOAD_MAX};

use crate::cli::BackendArgs;
use crate::error::{AnyError, Usage};
use crate::signals;

/// Name of the subcommand, and of the program by the conventions.
pub const NAME: &str = "vhost-user-net";
/// Maximum time for the rest of a message, and for its receiver to take it.
const MESSAGE_MAX: Duration = Duration::from_secs(10);

/// The command line for clap: a program named `vhost-user-net` is that subcommand. `None`: the
/// capabilities are to be printed, whatever the other arguments are.
pub fn arguments(given: impl Iterator<Item = OsString>) -> Option<Vec<OsString>> {
    let mut args: Vec<OsString> = given.collect();
    let program = args.first().and_then(|path| Path::new(path).file_name());
    if program.is_some_and(|name| name == NAME) {
        args.insert(1, NAME.into());
    }
    let is_backend = args.get(1).is_some_and(|arg| arg == NAME);
    (!is_backend || !args.iter().any(|arg| arg == "--print-capabilities")).then_some(args)
}

/// Prints the capabilities.
pub fn print_capabilities() {
    println!("{}", serde_json::json!({ "type": "net" }));
}

/// Runs `pvswitch vhost-user-net`.
pub fn command(args: BackendArgs) -> Result<(), AnyError> {
    let control = args.control.map_or_else(default_path, Ok)?;
    let stop = signals::readable()?;
    let front = match (args.fd, args.socket_path) {
        (Some(number), None) => Front::Connected(connected(number)?),
        (None, Some(path)) => {
            Front::Listener(Listener::bind(&path, Carries::Stream, &Permissions::OWNER)?)
        }
        _ => return Err(Usage("give --fd N or --socket-path PATH".into()).into()),
    };
    let port = Port::add(control, args.port)?;
    let Some(guest) = front.guest(stop.as_fd())? else { return Ok(()) };
    let switch = os::connect(&port.socket, Carries::Stream)?;
    relay(guest.as_fd(), switch.as_fd(), stop.as_fd())
}

/// The socket that was inherited as this number.
fn connected(number: i32) -> Result<OwnedFd, AnyError> {
    let wrong = |what: &str| Usage(format!("--fd {number}: {what}; pass a connected Unix socket"));
    let fd = os::inherited(number).map_err(|error| wrong(&error.to_string()))?;
    if os::fd_kind(fd.as_fd()) != FdKind::UnixStream {
        return Err(wrong("not a Unix stream socket").into());
    }
    Ok(fd)
}

/// Where the guest comes from.
enum Front {
    Connected(OwnedFd),
    Listener(Listener),
}

impl Front {
    /// The guest's connection; `None`: a signal ended the program.
    fn guest(self, stop: BorrowedFd<'_>) -> Result<Option<OwnedFd>, AnyError> {
        let listener = match self {
            Self::Connected(fd) => return Ok(Some(fd)),
            Self::Listener(listener) => listener,
        };
        loop {
            if os::poll_readable(&[stop, listener.as_fd()], None)[0] {
                return Ok(None);
            }
            // The name is removed with the listener: there is one guest.
            if let Some(guest) = listener.accept()? {
                return Ok(Some(guest));
            }
        }
    }
}

/// A port of the switch, removed on drop.
struct Port {
    control: PathBuf,
    name: String,
    socket: PathBuf,
}

impl Port {
    /// Adds `NAME[,key=value]...`, with a socket beside the control socket.
    fn add(control: PathBuf, spec: Option<String>) -> Result<Self, AnyError> {
        let spec = spec.unwrap_or_else(|| format!("vhu-{}", std::process::id()));
        let (name, options) = spec.split_at(spec.find(',').unwrap_or(spec.len()));
        if name.is_empty() || name.contains(['/', '=']) {
            return Err(Usage(format!("--port {spec}: use NAME[,key=value]...")).into());
        }
        let directory = std::path::absolute(&control)?;
        let directory = directory.parent().unwrap_or(Path::new("/"));
        let socket = directory.join(format!("{name}.sock"));
        let port = format!("{name}=vhost-user:{}{options}", socket.display());
        let port: PortText =
            port.parse().map_err(|error| Usage(format!("--port {spec}: {error}")))?;
        call(&control, &Request::add_port(&port))?;
        Ok(Self { name: name.into(), control, socket })
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        let name = self.name.clone();
        if let Err(error) = call(&self.control, &Request::DelPort { name }) {
            tracing::warn!("port {} was not removed: {error}", self.name);
        }
    }
}

/// Passes messages both ways until the guest closes or a signal arrives.
fn relay(
    guest: BorrowedFd<'_>,
    switch: BorrowedFd<'_>,
    stop: BorrowedFd<'_>,
) -> Result<(), AnyError> {
    loop {
        let ready = os::poll_readable(&[stop, guest, switch], None);
        if ready[0] {
            return Ok(());
        }
        if ready[1] && !pass(guest, switch).map_err(|error| format!("the guest: {error}"))? {
            return Ok(());
        }
        if ready[2] && !pass(switch, guest).map_err(|error| format!("the switch: {error}"))? {
            return Err("the switch closed the connection".into());
        }
    }
}

/// Passes one message on, with its descriptors. Returns false if the sender has closed.
fn pass(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<bool> {
    let deadline = Instant::now() + MESSAGE_MAX;
    let (mut bytes, mut fds) = ([0; HEADER_LEN + PAYLOAD_MAX], Vec::new());
    let (header, rest) = bytes.split_at_mut(HEADER_LEN);
    if !fill(from, header, &mut fds, deadline)? {
        return Ok(false);
    }
    let header: &[u8; HEADER_LEN] = (&*header).try_into().expect("of this length");
    let size = Header::parse(header).size as usize;
    if size > PAYLOAD_MAX {
        let what = format!("a message of {size} bytes, at most {PAYLOAD_MAX} are accepted");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    if size > 0 && !fill(from, &mut rest[..size], &mut fds, deadline)? {
        return Ok(false);
    }
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    // A socket that is ready to be written to has room for any message.
    let ready = os::wait(to, Until::Writable, deadline)?;
    if !ready || !os::send(to, &bytes[..HEADER_LEN + size], &fds)? {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "its peer does not read"));
    }
    Ok(true)
}

/// Reads until `bytes` is full. Returns false if the sender has closed.
fn fill(
    from: BorrowedFd<'_>,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    deadline: Instant,
) -> io::Result<bool> {
    let mut done = 0;
    while done < bytes.len() {
        match os::recv(from, &mut bytes[done..], fds, FDS_MAX)? {
            Received::Bytes(n) => done += n,
            Received::Closed => return Ok(false),
            Received::Truncated => {
                let what = format!("more than {FDS_MAX} descriptors with a message");
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            }
            Received::Nothing if os::wait(from, Until::Readable, deadline)? => {}
            Received::Nothing => {
                let what = format!("incomplete message after {MESSAGE_MAX:?}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Option<Vec<OsString>> {
        arguments(args.iter().map(Into::into))
    }

    #[test]
    fn program_named_after_the_device_is_the_subcommand() {
        let path = "/usr/libexec/vhost-user-net";
        assert_eq!(parse(&[path, "--fd", "3"]).unwrap()[1..], ["vhost-user-net", "--fd", "3"]);
        assert_eq!(parse(&["pvswitch", "run"]).unwrap(), ["pvswitch", "run"]);
        assert_eq!(parse(&["pvswitch"]).unwrap(), ["pvswitch"]);
        assert_eq!(parse(&[]).unwrap(), [""; 0]);
    }

    #[test]
    fn capabilities_are_printed_whatever_else_is_given() {
        assert_eq!(parse(&["pvswitch", NAME, "--print-capabilities", "--x"]), None);
        assert_eq!(parse(&["/x/vhost-user-net", "--fd=9", "--print-capabilities"]), None);
        assert!(parse(&["pvswitch", "run", "--print-capabilities"]).is_some());
    }

    #[test]
    fn messages_pass_whole_with_their_descriptors() {
        let ((guest, near), (far, switch)) = (os::socketpair().unwrap(), os::socketpair().unwrap());
        let event = os::eventfd().unwrap();
        let mut message = [1_u32, 1, 8].map(u32::to_ne_bytes).concat();
        message.extend([7; 8]);
        // In two pieces, the first with a descriptor.
        assert!(os::send(guest.as_fd(), &message[..5], &[event.as_fd()]).unwrap());
        let rest = message.clone();
        let end = guest.try_clone().unwrap();
        let late = std::thread::spawn(move || os::send(end.as_fd(), &rest[5..], &[]).unwrap());
        assert!(pass(near.as_fd(), far.as_fd()).unwrap() && late.join().unwrap());
        let (mut got, mut fds) = ([0; 64], Vec::new());
        let n = os::recv(switch.as_fd(), &mut got, &mut fds, FDS_MAX).unwrap();
        assert_eq!((n, fds.len()), (Received::Bytes(message.len()), 1));
        assert_eq!(got[..message.len()], message);
        let long = [1_u32, 1, 5000].map(u32::to_ne_bytes).concat();
        assert!(os::send(guest.as_fd(), &long, &[]).unwrap());
        let error = pass(near.as_fd(), far.as_fd()).unwrap_err().to_string();
        assert!(error.contains("a message of 5000 bytes, at most 4096"), "{error}");
        drop((guest, switch));
        assert!(!pass(near.as_fd(), far.as_fd()).unwrap());
    }
}
