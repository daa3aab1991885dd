//! The host's end of a guest's channels: pairs of named pipes, each for one command at a time.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, mkfifoat};
use rustix::io::Errno;
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::error::Error;

/// Number of commands that can run in a guest at once.
pub(super) const CHANNELS: u32 = 8;
/// Longest wait for a reply of a running guest.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(60);
/// Time without reply after which the guest is sent an empty request. User-Mode Linux ignores input
/// that a terminal had before it was opened, and sometimes sleeps although input is pending, until
/// more arrives.
const NUDGE_INTERVAL: Duration = Duration::from_millis(500);

/// Name of a channel at both ends.
pub(super) fn name(n: u32) -> String {
    format!("channel{n}")
}

/// Path of a channel's pipes without their extensions.
pub(super) fn base(folder: &Path, n: u32) -> PathBuf {
    folder.join(name(n))
}

/// Paths of the pipes of a channel: to the guest, and from it.
pub(super) fn pipes(folder: &Path, n: u32) -> [PathBuf; 2] {
    ["in", "out"].map(|end| base(folder, n).with_extension(end))
}

const NONBLOCK: i32 = OFlags::NONBLOCK.bits() as i32;

/// Creates the pipes of a guest.
pub(super) fn create(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    for path in (1..=CHANNELS).flat_map(|n| pipes(folder, n)) {
        mkfifoat(CWD, &path, Mode::from_raw_mode(0o600))?;
    }
    Ok(())
}

/// A channel that is locked for its owner.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) to: File,
    from: File,
    unread: Vec<u8>,
}

impl Drop for Channel {
    /// Unlocks the channel explicitly: a child between fork and exec may have inherited the
    /// descriptor, and its copy would keep the lock.
    fn drop(&mut self) {
        let _ = flock(&self.to, FlockOperation::Unlock);
    }
}

impl Channel {
    /// Takes the first free channel of a guest and resets it: ends a command of its last owner and
    /// discards replies to it.
    pub fn take(folder: &Path) -> Result<Self, String> {
        Self::take_within(folder, REPLY_TIMEOUT)
    }

    /// The same, for a guest that may take up to `timeout` to reply.
    fn take_within(folder: &Path, timeout: Duration) -> Result<Self, String> {
        let ended = |error: std::io::Error| format!("the guest has ended ({error})");
        for n in 1..=CHANNELS {
            let [to, from] = pipes(folder, n);
            // Fails without a reader: a guest has both pipes open until it ends.
            let to =
                OpenOptions::new().write(true).custom_flags(NONBLOCK).open(to).map_err(ended)?;
            if flock(&to, FlockOperation::NonBlockingLockExclusive).is_err() {
                continue;
            }
            let from =
                OpenOptions::new().read(true).custom_flags(NONBLOCK).open(from).map_err(ended)?;
            let mut channel = Self { to, from, unread: Vec::new() };
            channel.reset(Instant::now() + timeout)?;
            return Ok(channel);
        }
        Err(format!("the guest already runs {CHANNELS} commands, the maximum"))
    }

    fn reset(&mut self, by: Instant) -> Result<(), String> {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let number = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        // The empty request ends an incomplete line of the last owner.
        self.send(&json!({})).and_then(|()| self.send(&json!({ "reset": number })))?;
        while self.reply(Some(by))?["done"] != number {}
        Ok(())
    }

    /// Sends a request. It is shorter than `PIPE_BUF`, so the write is atomic.
    pub fn send(&mut self, request: &Value) -> Result<(), String> {
        let sent = self.to.write_all(format!("{request}\n").as_bytes());
        sent.map_err(|error| format!("the guest does not accept commands: {error}"))
    }

    /// Returns the next reply; fails at time `by`, if given.
    pub fn reply(&mut self, by: Option<Instant>) -> Result<Value, String> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return Ok(serde_json::from_slice(&line).unwrap_or(Value::Null));
            }
            let left = by.map(|by| by.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err("the guest does not reply".into());
            }
            let left = left.map_or(NUDGE_INTERVAL, |left| left.min(NUDGE_INTERVAL));
            let left = Timespec::try_from(left).ok();
            let mut ready = [PollFd::new(&self.from, PollFlags::IN)];
            match poll(&mut ready, left.as_ref()) {
                Ok(0) => {
                    self.send(&json!({}))?;
                    continue;
                }
                Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(format!("the guest's channel: {error}")),
            }
            let mut bytes = [0; 16384];
            match self.from.read(&mut bytes) {
                Ok(0) => return Err("the guest has ended".into()),
                Ok(n) => self.unread.extend_from_slice(&bytes[..n]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(format!("the guest's channel: {error}")),
            }
        }
    }
}

/// Returns a file of a guest, which may take up to `timeout` for its first reply.
pub(super) fn read(folder: &Path, file: &str, timeout: Duration) -> Result<String, String> {
    let mut channel = Channel::take_within(folder, timeout)?;
    channel.send(&json!({ "read": file }))?;
    let by = Instant::now() + REPLY_TIMEOUT;
    let mut text = String::new();
    loop {
        let reply = channel.reply(Some(by))?;
        text += reply["out"].as_str().unwrap_or("");
        if reply["exit"].is_number() {
            return Ok(text);
        }
    }
}

/// Runs a command in a guest: relays its output and signals to it; returns its exit status.
pub fn relay(folder: &Path, command: &[String]) -> Result<u8, Error> {
    let failed = |what: String| Error::failed(what);
    let mut channel = Channel::take(folder).map_err(failed)?;
    let mut signals =
        Signals::new([SIGINT, SIGTERM]).map_err(|error| failed(format!("signals: {error}")))?;
    let mut to = channel.to.try_clone().map_err(|error| failed(error.to_string()))?;
    channel.send(&json!({ "run": command })).map_err(failed)?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            let _ = to.write_all(format!("{}\n", json!({ "signal": signal })).as_bytes());
        }
    });
    loop {
        let reply = channel.reply(None).map_err(failed)?;
        let written = if let Some(text) = reply["out"].as_str() {
            std::io::stdout().write_all(text.as_bytes()).and_then(|()| std::io::stdout().flush())
        } else if let Some(text) = reply["err"].as_str() {
            std::io::stderr().write_all(text.as_bytes())
        } else if let Some(code) = reply["exit"].as_u64() {
            return Ok(u8::try_from(code).unwrap_or(1));
        } else {
            Ok(())
        };
        written.map_err(|error| failed(format!("output of the command: {error}")))?;
    }
}
