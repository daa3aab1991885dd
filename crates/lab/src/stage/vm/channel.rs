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

/// Commands that run in a guest at once.
pub(super) const CHANNELS: u32 = 8;
/// Longest wait for an idle guest's answer.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(60);
/// How long after a request the guest is sent an empty one. User-Mode Linux takes no notice of what
/// lay in a terminal before it was opened, and now and then sleeps on with a signal unread, until
/// more comes.
const NUDGE: Duration = Duration::from_millis(500);

/// What a channel is called at both ends.
pub(super) fn name(n: u32) -> String {
    format!("channel{n}")
}

/// What the names of a channel's pipes begin with.
pub(super) fn base(folder: &Path, n: u32) -> PathBuf {
    folder.join(name(n))
}

/// The two pipes of a channel: to the guest, and from it.
pub(super) fn pipes(folder: &Path, n: u32) -> [PathBuf; 2] {
    ["in", "out"].map(|way| base(folder, n).with_extension(way))
}

const NO_WAIT: i32 = OFlags::NONBLOCK.bits() as i32;

/// Makes the pipes of a guest.
pub(super) fn make(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    for path in (1..=CHANNELS).flat_map(|n| pipes(folder, n)) {
        mkfifoat(CWD, &path, Mode::from_raw_mode(0o600))?;
    }
    Ok(())
}

/// A channel that nobody else uses meanwhile.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) to: File,
    from: File,
    unread: Vec<u8>,
}

impl Drop for Channel {
    /// Gives it back now, and not when a process that is just being started closes the copy that
    /// it has of this descriptor until it runs its own program.
    fn drop(&mut self) {
        let _ = flock(&self.to, FlockOperation::Unlock);
    }
}

impl Channel {
    /// The first free one of a guest, with nothing left in it of who had it before.
    pub fn take(folder: &Path) -> Result<Self, String> {
        Self::take_within(folder, ANSWER_MAX)
    }

    /// The same, of a guest that may need so long to answer.
    fn take_within(folder: &Path, longest: Duration) -> Result<Self, String> {
        let ended = |error: std::io::Error| format!("the guest has ended ({error})");
        for n in 1..=CHANNELS {
            let [to, from] = pipes(folder, n);
            // Without a wait for someone who reads it: a guest has it open for as long as it lives.
            let to =
                OpenOptions::new().write(true).custom_flags(NO_WAIT).open(to).map_err(ended)?;
            if flock(&to, FlockOperation::NonBlockingLockExclusive).is_err() {
                continue;
            }
            let from =
                OpenOptions::new().read(true).custom_flags(NO_WAIT).open(from).map_err(ended)?;
            let mut channel = Self { to, from, unread: Vec::new() };
            channel.reset(Instant::now() + longest)?;
            return Ok(channel);
        }
        Err(format!("a guest runs {CHANNELS} commands at once, no more"))
    }

    fn reset(&mut self, by: Instant) -> Result<(), String> {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let number = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
        // The line before it may have been cut off.
        self.send(&json!({})).and_then(|()| self.send(&json!({ "reset": number })))?;
        while self.answer(Some(by))?["done"] != number {}
        Ok(())
    }

    /// Sends a request; short, so it goes as a whole.
    pub fn send(&mut self, request: &Value) -> Result<(), String> {
        let sent = self.to.write_all(format!("{request}\n").as_bytes());
        sent.map_err(|error| format!("the guest takes no commands: {error}"))
    }

    /// The next answer.
    pub fn answer(&mut self, by: Option<Instant>) -> Result<Value, String> {
        loop {
            if let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return Ok(serde_json::from_slice(&line).unwrap_or(Value::Null));
            }
            let left = by.map(|by| by.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Err("the guest does not answer".into());
            }
            let left = left.map_or(NUDGE, |left| left.min(NUDGE));
            let left = Timespec::try_from(left).ok();
            let mut ready = [PollFd::new(&self.from, PollFlags::IN)];
            match poll(&mut ready, left.as_ref()) {
                Ok(0) => {
                    self.send(&json!({}))?;
                    continue;
                }
                Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(format!("a guest's channel: {error}")),
            }
            let mut bytes = [0; 16384];
            match self.from.read(&mut bytes) {
                Ok(0) => return Err("the guest has ended".into()),
                Ok(n) => self.unread.extend_from_slice(&bytes[..n]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(format!("a guest's channel: {error}")),
            }
        }
    }
}

/// A file of a guest's, which may need so long to answer at first.
pub(super) fn read(folder: &Path, file: &str, longest: Duration) -> Result<String, String> {
    let mut channel = Channel::take_within(folder, longest)?;
    channel.send(&json!({ "read": file }))?;
    let by = Instant::now() + ANSWER_MAX;
    let mut text = String::new();
    loop {
        let answer = channel.answer(Some(by))?;
        text += answer["out"].as_str().unwrap_or("");
        if answer["exit"].is_number() {
            return Ok(text);
        }
    }
}

/// Runs a command in a guest: what it says we say, how it ends we end, and what we are asked to
/// do by a signal it is asked.
pub fn relay(folder: &Path, words: &[String]) -> Result<u8, Error> {
    let failed = |what: String| Error::failed(what);
    let mut channel = Channel::take(folder).map_err(failed)?;
    let mut signals =
        Signals::new([SIGINT, SIGTERM]).map_err(|error| failed(format!("signals: {error}")))?;
    let mut to = channel.to.try_clone().map_err(|error| failed(error.to_string()))?;
    channel.send(&json!({ "run": words })).map_err(failed)?;
    std::thread::spawn(move || {
        for signal in signals.forever() {
            let _ = to.write_all(format!("{}\n", json!({ "signal": signal })).as_bytes());
        }
    });
    loop {
        let answer = channel.answer(None).map_err(failed)?;
        let written = if let Some(text) = answer["out"].as_str() {
            std::io::stdout().write_all(text.as_bytes()).and_then(|()| std::io::stdout().flush())
        } else if let Some(text) = answer["err"].as_str() {
            std::io::stderr().write_all(text.as_bytes())
        } else if let Some(code) = answer["exit"].as_u64() {
            return Ok(u8::try_from(code).unwrap_or(1));
        } else {
            Ok(())
        };
        written.map_err(|error| failed(format!("a command's output: {error}")))?;
    }
}
