//! The demo's processes and the directory they share. Both end with the values that stand for
//! them, whichever way the demo ends.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Longest directory name that leaves room for the sockets' names in a socket address.
const DIR_LEN_MAX: usize = 80;
/// How long a process may take to end when asked to.
const END_MAX: Duration = Duration::from_secs(3);
/// Lines of a failed process's log that are shown.
const TAIL_LINES: usize = 6;

/// A private directory; removed with all in it when dropped.
pub struct Workdir(PathBuf);

impl Workdir {
    /// Makes one below the system's directory for temporary files.
    pub fn new() -> std::io::Result<Self> {
        let mut base = std::env::temp_dir();
        if base.as_os_str().len() > DIR_LEN_MAX - 32 {
            base = "/tmp".into();
        }
        let base = std::path::absolute(base)?;
        let mut last = std::io::Error::other("no free name");
        for n in 0..100 {
            let path = base.join(format!("pvswitch-demo-{}-{n}", std::process::id()));
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) => last = error,
            }
        }
        Err(std::io::Error::new(last.kind(), format!("{}: {last}", base.display())))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Workdir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process of our own program; killed when dropped.
pub struct Process {
    /// What it is called in messages.
    pub name: String,
    child: Child,
    out: PathBuf,
    log: PathBuf,
}

impl Process {
    /// Starts one. What it prints goes to files in `dir`.
    pub fn start(exe: &Path, dir: &Path, name: &str, args: &[String]) -> Result<Self, String> {
        let (out, log) = (dir.join(format!("{name}.out")), dir.join(format!("{name}.log")));
        let file = |path: &Path| {
            File::create(path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let child = Command::new(exe)
            .args(args)
            .env("RUST_LOG", "info")
            .stdin(Stdio::null())
            .stdout(file(&out)?)
            .stderr(file(&log)?)
            // Out of the terminal's reach: at Ctrl-C the demo stops, and then it stops the others.
            .process_group(0)
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", exe.display()))?;
        Ok(Self { name: name.into(), child, out, log })
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// An error, with the end of its log, if it has ended.
    pub fn check(&mut self) -> Result<(), String> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => {
                Err(format!("process '{}' ended early ({status}){}", self.name, self.tail()))
            }
            Err(error) => Err(format!("process '{}': {error}", self.name)),
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        // It may have ended; then there is nothing to tell it. Its id is not free before we wait.
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    /// Asks it to end, and waits until it has.
    pub fn end(mut self) -> Result<Self, String> {
        self.signal(Signal::TERM);
        let by = Instant::now() + END_MAX;
        while Instant::now() < by {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(2)),
                Ok(Some(status)) if status.success() => return Ok(self),
                Ok(Some(status)) => {
                    return Err(format!(
                        "process '{}' failed ({status}){}",
                        self.name,
                        self.tail()
                    ));
                }
                Err(error) => return Err(format!("process '{}': {error}", self.name)),
            }
        }
        Err(format!("process '{}' did not end when asked to{}", self.name, self.tail()))
    }

    /// The last whole line of JSON it printed.
    pub fn last_json(&self) -> Option<Value> {
        let text = std::fs::read_to_string(&self.out).ok()?;
        let whole = &text[..=text.rfind('\n')?];
        serde_json::from_str(whole.lines().last()?).ok()
    }

    /// The last lines of its log, to be put behind a message.
    fn tail(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<_> = text.lines().collect();
        let last = &lines[lines.len().saturating_sub(TAIL_LINES)..];
        if last.is_empty() {
            return "; it logged nothing".into();
        }
        let last: String = last.iter().map(|line| format!("\n    | {line}")).collect();
        format!("; the end of its log:{last}")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both do nothing to a process that has ended and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(dir: &Workdir, script: &str) -> Process {
        let args = ["-c", script].map(String::from);
        Process::start(Path::new("/bin/sh"), dir.path(), "sh", &args).unwrap()
    }

    #[test]
    fn a_process_that_fails_is_named_with_the_end_of_its_log() {
        let dir = Workdir::new().unwrap();
        let mut process = shell(&dir, "for i in 1 2 3 4 5 6 7; do echo line $i >&2; done; exit 3");
        let error = loop {
            if let Err(error) = process.check() {
                break error;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        assert!(error.contains("'sh'") && error.contains("| line 7"), "{error}");
        assert!(!error.contains("line 1"), "{error}");
    }

    #[test]
    fn only_whole_lines_are_read() {
        let dir = Workdir::new().unwrap();
        let script = r#"printf '{"a":1}\n{"a":2}\n{"a'; exec sleep 60"#;
        let process = shell(&dir, script);
        let by = Instant::now() + Duration::from_secs(10);
        while process.last_json().is_none_or(|json| json["a"] != 2) {
            assert!(Instant::now() < by);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn nothing_is_left_behind() {
        let dir = Workdir::new().unwrap();
        let path = dir.path().to_path_buf();
        let process = shell(&dir, "sleep 60");
        let proc = PathBuf::from(format!("/proc/{}", process.id()));
        assert!(path.exists() && proc.exists());
        drop(process);
        drop(dir);
        assert!(!path.exists() && !proc.exists());
    }
}
