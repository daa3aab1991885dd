//! `run --keep` without a service manager: a small process that keeps the switch's descriptors.
//!
//! It starts the switch as a child, holds what the switch stores ([`crate::run`]), and starts the
//! next one when the switch is killed. It opens nothing of what it holds, so that no guest can harm
//! it ([0031](../../../docs/design/0031-kill.md)).
//!
//! ```text
//!   keeper ── HAVE name, descriptor ──▶ switch     what the one before stored, and what the
//!                                                  keeper's parent passed (`fd=NAME`)
//!   keeper ── GO, time of its end ────▶ switch
//!   keeper ◀─ PUT name, descriptor ──── switch
//!   keeper ◀─ DELETE name ───────────── switch
//!   keeper ◀─ MOVED pid, program ────── switch     `ctl upgrade`: another process is to serve
//!   keeper ◀─ END ───────────────────── switch     it ends in order
//! ```

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use os::{Received, Until, recv, send, wait};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::AnyError;
use crate::signals::readable_on;

/// Kinds of messages.
pub const HAVE: u8 = b'h';
pub const GO: u8 = b'g';
pub const PUT: u8 = b'p';
pub const DELETE: u8 = b'd';
pub const MOVED: u8 = b'm';
pub const END: u8 = b'e';

/// Bytes of every message: kind, text, zeroes.
const MESSAGE_LEN: usize = 512;
/// Longest time for the other side to read.
const SEND_MAX: Duration = Duration::from_secs(5);
/// A switch that ends within this time of its start has failed to start.
const QUICK: Duration = Duration::from_secs(1);
/// Most of these in a row.
const QUICK_MAX: u32 = 6;
/// Exit status of a panic.
const PANIC: i32 = 101;

/// A message between keeper and switch.
#[derive(Debug)]
pub struct Message {
    pub kind: u8,
    pub text: String,
    pub fd: Option<OwnedFd>,
}

/// Sends a message.
///
/// # Errors
/// The other side ended or does not read; the text is too long.
pub fn post(
    socket: BorrowedFd<'_>,
    kind: u8,
    text: &str,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    post_within(socket, kind, text, fd, SEND_MAX)
}

/// Sends a message, and waits no longer than this for the other side to read.
///
/// # Errors
/// As for [`post`].
pub fn post_within(
    socket: BorrowedFd<'_>,
    kind: u8,
    text: &str,
    fd: Option<BorrowedFd<'_>>,
    limit: Duration,
) -> io::Result<()> {
    let mut bytes = [0; MESSAGE_LEN];
    bytes[0] = kind;
    let room = bytes[1..].get_mut(..text.len());
    let too_long = || io::Error::other("the text is too long");
    room.ok_or_else(too_long)?.copy_from_slice(text.as_bytes());
    let fds: Vec<_> = fd.into_iter().collect();
    let end = Instant::now() + limit;
    // Sent whole or not at all.
    while !send(socket, &bytes, &fds)? {
        if !wait(socket, Until::Writable, end)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

/// Receives a message, waiting until `end` at most; `None`: the other side ended.
///
/// # Errors
/// What came is not a message, or nothing came.
pub fn receive(socket: BorrowedFd<'_>, end: Instant) -> io::Result<Option<Message>> {
    let (mut bytes, mut fds) = ([0; MESSAGE_LEN], Vec::new());
    loop {
        match recv(socket, &mut bytes, &mut fds, 1)? {
            Received::Bytes(MESSAGE_LEN) => break,
            Received::Closed => return Ok(None),
            Received::Nothing if wait(socket, Until::Readable, end)? => {}
            Received::Nothing => return Err(io::ErrorKind::TimedOut.into()),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
    let text: Vec<u8> = bytes[1..].iter().copied().take_while(|byte| *byte != 0).collect();
    let text = String::from_utf8(text).map_err(|_| io::ErrorKind::InvalidData)?;
    Ok(Some(Message { kind: bytes[0], text, fd: fds.pop() }))
}

/// How a switch ended.
enum Ended {
    /// As it wanted to, or it never started.
    InOrder(Option<ExitStatus>),
    Killed(Option<ExitStatus>),
}

/// The switch that runs, as the keeper sees it.
struct Running {
    socket: OwnedFd,
    child: Child,
    /// Its process, which is not the child after `ctl upgrade`, and a descriptor that is readable
    /// when it has ended. The socket may be open elsewhere then: a program that was to take over
    /// has a copy.
    pid: u32,
    process: OwnedFd,
    /// Whether more messages can come.
    is_open: bool,
    /// Whether it handles signals. It stores nothing before that.
    handles: bool,
    in_order: bool,
}

/// Opens a process.
///
/// # Errors
/// It has ended.
pub fn open_process(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// Signals that are passed on, and where they arrive.
struct Signals([(UnixStream, Signal); 2]);

impl Signals {
    fn new() -> io::Result<Self> {
        let of = |from: &[i32], to| {
            let read = readable_on(from)?;
            read.set_nonblocking(true)?;
            Ok::<_, io::Error>((read, to))
        };
        Ok(Self([of(&[SIGTERM, SIGINT], Signal::TERM)?, of(&[SIGHUP], Signal::HUP)?]))
    }
}

struct Keeper {
    program: PathBuf,
    args: Vec<OsString>,
    kept: BTreeMap<String, OwnedFd>,
    /// Descriptors from our parent, for each process of the switch.
    passed: Vec<(String, OwnedFd)>,
    signals: Signals,
    /// Whether the switch is to stop, however it ends.
    stops: bool,
    /// Whether a SIGHUP is held for a switch that would be killed by it.
    hangup: bool,
}

/// Starts `run` with these arguments of the program under a keeper, and returns its exit status.
///
/// # Errors
/// It cannot be started, or is killed again and again.
pub fn command(args: impl Iterator<Item = OsString>) -> Result<ExitCode, AnyError> {
    let program = std::env::current_exe()?;
    let keep = |arg: OsString| if arg == "--keep" { "--kept".into() } else { arg };
    let args = args.map(keep).collect();
    let (kept, passed) = (BTreeMap::new(), os::inherited_by_name()?);
    let signals = Signals::new()?;
    let (stops, hangup) = (false, false);
    let mut keeper = Keeper { program, args, kept, passed, signals, stops, hangup };
    let (mut ended_at, mut quick) = (Duration::ZERO, 0);
    loop {
        let began = Instant::now();
        let mut running = keeper.start(ended_at)?;
        let ended = keeper.serve(&mut running)?;
        ended_at = os::monotonic();
        let status = match ended {
            Ended::InOrder(status) => {
                let code = status.map_or(Some(0), |status| status.code());
                // One that was starting was killed by the signal that is to stop it.
                let other = u8::from(!keeper.stops);
                return Ok(ExitCode::from(
                    code.and_then(|c| u8::try_from(c).ok()).unwrap_or(other),
                ));
            }
            Ended::Killed(status) => status,
        };
        let how = status.map_or_else(|| "was killed".into(), |status| status.to_string());
        eprintln!("pvswitch: the switch (process {}) ended: {how}; restarting it", running.pid);
        quick = if began.elapsed() < QUICK { quick + 1 } else { 0 };
        if quick == QUICK_MAX {
            return Err(format!(
                "the switch ended {QUICK_MAX} times within {} s of its start: see its log above; \
                 its state is discarded",
                QUICK.as_secs()
            )
            .into());
        }
    }
}

impl Keeper {
    fn start(&self, ended_at: Duration) -> Result<Running, AnyError> {
        let (socket, theirs) = os::socketpair()?;
        let mut command = Command::new(&self.program);
        let child = command.args(&self.args).stdin(Stdio::from(theirs)).spawn();
        let child = child.map_err(|e| format!("{}: {e}", self.program.display()))?;
        drop(command);
        // A switch that ends meanwhile is noticed below.
        let passed = self.passed.iter().map(|(name, fd)| (name, fd));
        for (name, fd) in self.kept.iter().chain(passed) {
            let _ = post(socket.as_fd(), HAVE, name, Some(fd.as_fd()));
        }
        let _ = post(socket.as_fd(), GO, &ended_at.as_nanos().to_string(), None);
        let pid = child.id();
        Ok(Running {
            socket,
            child,
            pid,
            process: open_process(pid)?,
            is_open: true,
            handles: false,
            in_order: false,
        })
    }

    /// Serves a switch until its end.
    fn serve(&mut self, running: &mut Running) -> Result<Ended, AnyError> {
        let mut epoll = self.watch(running)?;
        loop {
            for ready in epoll.wait(None)? {
                let signal = usize::try_from(ready.tag).ok().and_then(|at| self.signals.0.get(at));
                if let Some((from, signal)) = signal {
                    os::drain(from.as_fd());
                    match *signal {
                        Signal::HUP => self.hangup = true,
                        signal => {
                            self.stops = true;
                            running.signal(signal);
                        }
                    }
                }
            }
            let (before, was_open) = (running.pid, running.is_open);
            let has_ended = !os::poll_readable(&[running.process.as_fd()], Some(Duration::ZERO))
                .contains(&false);
            // After that: what it sent at last.
            self.handle_all(running);
            if running.pid == before && has_ended {
                return running.reap(self.stops);
            }
            if running.handles && std::mem::take(&mut self.hangup) {
                running.signal(Signal::HUP);
            }
            if (running.pid, running.is_open) != (before, was_open) {
                epoll = self.watch(running)?;
            }
        }
    }

    fn watch(&self, running: &Running) -> io::Result<os::Epoll> {
        let epoll = os::Epoll::new()?;
        for (at, (signal, _)) in (0..).zip(&self.signals.0) {
            epoll.add(signal.as_fd(), at)?;
        }
        if running.is_open {
            epoll.add(running.socket.as_fd(), 2)?;
        }
        epoll.add(running.process.as_fd(), 3)?;
        Ok(epoll)
    }

    /// Handles the messages that have come.
    fn handle_all(&mut self, running: &mut Running) {
        while running.is_open {
            match receive(running.socket.as_fd(), Instant::now()) {
                Ok(Some(message)) => self.handle(message, running),
                Err(e) if e.kind() == io::ErrorKind::TimedOut => return,
                Ok(None) | Err(_) => running.is_open = false,
            }
        }
    }

    fn handle(&mut self, message: Message, running: &mut Running) {
        match (message.kind, message.fd) {
            (PUT, Some(fd)) => {
                running.handles = true;
                drop(self.kept.insert(message.text, fd));
            }
            (DELETE, _) => drop(self.kept.remove(&message.text)),
            (END, _) => running.in_order = true,
            (MOVED, _) => {
                let Some((pid, program)) = message.text.split_once(' ') else { return };
                let Ok(pid) = pid.parse() else { return };
                // One that has ended already: the end of this one is noticed, and all is well.
                let Ok(process) = open_process(pid) else { return };
                (running.pid, running.process) = (pid, process);
                self.program = program.into();
                // The one before may have ended without reading its signal.
                if self.stops {
                    running.signal(Signal::TERM);
                }
            }
            _ => {}
        }
    }
}

impl Running {
    fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, signal);
        }
    }

    /// Waits for its process, which has ended, and returns how; `stops`: it was to end.
    fn reap(&mut self, stops: bool) -> Result<Ended, AnyError> {
        let own = match self.pid == self.child.id() {
            true => Some(self.child.wait()?),
            false => None,
        };
        // A status of its own: it failed to start, or was not killed.
        let exited = own.is_some_and(|s| s.code().is_some_and(|code| code != PANIC));
        let in_order = stops || self.in_order || exited;
        Ok(if in_order { Ended::InOrder(own) } else { Ended::Killed(own) })
    }
}
