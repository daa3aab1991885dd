//! A process that does what a confined control thread may not: it starts programs, opens network
//! namespaces, and asks the machine's name service, whose modules are loaded as programs are.
//!
//! ```text
//!   control thread ── start KIND ARGUMENT, descriptor ──▶ helper    its standard input
//!                  ── end PID ──────────────────────────▶    or a descriptor of the process
//!                  ── namespace PATH ───────────────────▶
//!                  ── group NAME ───────────────────────▶
//!                  ◀───── number, text or descriptor ────
//! ```
//! It ends with the connection. Which programs there are is decided where it serves ([`serve`]).

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, getpgid, getpgrp, pidfd_open, pidfd_send_signal};

use crate::handover::{receive_state, send_state};
use crate::poll::poll_readable;
use crate::socket::socketpair;
use crate::sys::{group_id, is_net_namespace};

const VERSION: u32 = 1;
/// Longest time for a reply: of a name service, above all.
const REPLY_MAX: Duration = Duration::from_secs(60);
/// Longest time for the rest of a message.
const REST_MAX: Duration = Duration::from_secs(5);

const START: &str = "start";
const END: &str = "end";
const NAMESPACE: &str = "namespace";
const GROUP: &str = "group";

/// Connection of this process to its helper; `None`: it has none.
static HELPER: Mutex<Option<OwnedFd>> = Mutex::new(None);

/// What a request got.
struct Reply(String, Option<OwnedFd>);

/// Starts the helper: `command` runs [`serve`] with its standard input. Nothing if there is one.
///
/// # Errors
/// It cannot be started.
pub fn start_helper(mut command: Command) -> io::Result<()> {
    let mut helper = HELPER.lock().unwrap_or_else(PoisonError::into_inner);
    if helper.is_none() {
        let (ours, theirs) = socketpair()?;
        command.stdin(Stdio::from(theirs)).spawn()?;
        *helper = Some(ours);
    }
    Ok(())
}

/// A process that the helper has started.
#[derive(Debug)]
pub struct Program {
    /// Its id.
    pub pid: u32,
    /// Refers to it, and to no other that has its id later (pidfd); for [`end_process`].
    pub process: OwnedFd,
}

/// Has the helper run a program of this kind, with `stdin`.
///
/// # Errors
/// It cannot be started, or there is no helper.
pub fn start_program(kind: &str, argument: &str, stdin: OwnedFd) -> io::Result<Program> {
    let Reply(pid, process) = ask(&[START, kind, argument], Some(stdin.as_fd()))?;
    let (Ok(pid), Some(process)) = (pid.parse(), process) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    Ok(Program { pid, process })
}

/// Has the helper end a process that it has started, or that such a one has, if it runs still.
/// Returns its status, if it was started by the helper itself.
pub fn end_program(pid: u32) -> Option<String> {
    let got = ask(&[END, &pid.to_string()], None).ok()?;
    Some(got.0).filter(|status| !status.is_empty())
}

/// Has the helper end a process that another one has started, if it runs still.
pub fn end_process(process: BorrowedFd<'_>) {
    // Without a helper it stays; to end it is best effort.
    let _ = ask(&[END, ""], Some(process));
}

/// Opens a network namespace.
///
/// # Errors
/// Those of the system call; EINVAL: it is something else.
pub fn open_net_namespace(path: &Path) -> io::Result<File> {
    match (path.to_str(), has_helper()) {
        (Some(text), true) => {
            let got = ask(&[NAMESPACE, text], None)?;
            got.1.map(File::from).ok_or_else(|| io::ErrorKind::InvalidData.into())
        }
        _ => opened(path),
    }
}

fn opened(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    match is_net_namespace(file.as_fd()) {
        true => Ok(file),
        false => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}

/// Number of the group of this name.
pub(crate) fn group(name: &str) -> Option<u32> {
    match has_helper() {
        true => ask(&[GROUP, name], None).ok()?.0.parse().ok(),
        false => group_id(name),
    }
}

fn has_helper() -> bool {
    HELPER.lock().unwrap_or_else(PoisonError::into_inner).is_some()
}

fn ask(words: &[&str], fd: Option<BorrowedFd<'_>>) -> io::Result<Reply> {
    let helper = HELPER.lock().unwrap_or_else(PoisonError::into_inner);
    let lost = || io::Error::other("the helper process has ended: restart the switch");
    let socket = helper.as_ref().ok_or_else(lost)?.as_fd();
    if words.iter().any(|word| word.contains('\0')) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let fds: Vec<_> = fd.into_iter().collect();
    let end = Instant::now() + REPLY_MAX;
    let sent = send_state(socket, VERSION, words.join("\0").as_bytes(), &fds, end);
    let received = sent.and_then(|()| receive_state(socket, VERSION, end));
    let (text, mut fds) = received.map_err(|_| {
        // A reply that comes later is none to the next request.
        crate::socket::shutdown(socket);
        lost()
    })?;
    let text = String::from_utf8(text).map_err(|_| io::ErrorKind::InvalidData)?;
    match text.split_once('\0') {
        None => Ok(Reply(text, fds.pop())),
        Some((number, text)) => Err(match number.parse() {
            Ok(number) => io::Error::from_raw_os_error(number),
            Err(_) => io::Error::other(text),
        }),
    }
}

/// Serves the process at the other end of `socket` until its end. `command` is that of a kind and
/// argument.
///
/// # Errors
/// The other end sent something else.
pub fn serve(
    socket: BorrowedFd<'_>,
    command: impl Fn(&str, &str) -> io::Result<Command>,
) -> io::Result<()> {
    let mut children = BTreeMap::new();
    loop {
        poll_readable(&[socket], None);
        let Ok((text, mut fds)) = receive_state(socket, VERSION, Instant::now() + REST_MAX) else {
            return Ok(());
        };
        let text = String::from_utf8(text).map_err(|_| io::ErrorKind::InvalidData)?;
        let words: Vec<_> = text.split('\0').collect();
        let done = match words[..] {
            [START, kind, argument] => {
                fds.pop().ok_or(io::ErrorKind::InvalidData.into()).and_then(|stdin| {
                    let mut child = command(kind, argument)?.stdin(Stdio::from(stdin)).spawn()?;
                    let pid = child.id();
                    let process = opened_process(pid).inspect_err(|_| {
                        let _ = child.kill();
                        let _ = child.wait();
                    })?;
                    children.insert(pid, child);
                    Ok(Reply(pid.to_string(), Some(process)))
                })
            }
            [END, pid] => {
                let ended = fds.pop().map(|process| {
                    let _ = pidfd_send_signal(process, Signal::KILL);
                    String::new()
                });
                Ok(Reply(ended.unwrap_or_else(|| end(pid, &mut children)), None))
            }
            [NAMESPACE, path] => {
                opened(Path::new(path)).map(|file| Reply(String::new(), Some(file.into())))
            }
            [GROUP, name] => {
                let id = group_id(name).map(|id| id.to_string());
                Ok(Reply(id.unwrap_or_default(), None))
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        };
        let Reply(text, fd) = done.unwrap_or_else(|error| {
            let number = error.raw_os_error().map(|number| number.to_string());
            Reply(format!("{}\0{error}", number.unwrap_or_default()), None)
        });
        let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
        if send_state(socket, VERSION, text.as_bytes(), &fds, Instant::now() + REST_MAX).is_err() {
            return Ok(());
        }
    }
}

/// Ends a process, and returns its status if it is a child.
fn end(pid: &str, children: &mut BTreeMap<u32, Child>) -> String {
    let Ok(pid) = pid.parse::<u32>() else { return String::new() };
    let Some(mut child) = children.remove(&pid) else {
        end_other(pid);
        return String::new();
    };
    let ended = child.try_wait().ok().flatten().or_else(|| {
        let _ = child.kill();
        child.wait().ok()
    });
    ended.map_or_else(String::new, |status| status.to_string())
}

/// Ends a process that a child has started: only one of this process's group.
fn end_other(pid: u32) {
    if let Ok(process) = opened_process(pid)
        && getpgid(raw(pid)).is_ok_and(|group| group == getpgrp())
    {
        let _ = pidfd_send_signal(process, Signal::KILL);
    }
}

fn raw(pid: u32) -> Option<Pid> {
    i32::try_from(pid).ok().and_then(Pid::from_raw)
}

fn opened_process(pid: u32) -> io::Result<OwnedFd> {
    let pid = raw(pid).ok_or(io::ErrorKind::InvalidData)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

#[cfg(test)]
mod tests;
