//! The demo's processes, and the folder for their sockets and logs. Both are cleaned up on drop.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::Fail;

/// Longest folder name that leaves room for file names in a socket address.
const FOLDER_LEN_MAX: usize = 70;
/// Maximum time for a process to exit after SIGTERM.
const END_MAX: Duration = Duration::from_secs(5);
/// Lines shown of the log of a failed process.
const LOG_LINES: usize = 6;

/// A private folder in the directory for temporary files; removed on drop.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// Creates a folder with a name short enough for sockets in it.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub fn new() -> std::io::Result<Self> {
        let mut base = std::path::absolute(std::env::temp_dir())?;
        if base.as_os_str().len() > FOLDER_LEN_MAX - 32 {
            base = "/tmp".into();
        }
        for n in 0.. {
            let path = base.join(format!("pvd-{}-{n}", std::process::id()));
            // Fails if the name exists, even as a link: the folder is private.
            match DirBuilder::new().mode(0o700).create(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                made => return made.map(|()| Self(path)),
            }
        }
        unreachable!("the range is unbounded")
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A process of this program; killed on drop.
#[derive(Debug)]
pub struct Process {
    name: &'static str,
    child: Child,
    out: PathBuf,
    log: PathBuf,
}

impl Process {
    /// Starts `program`; its output is written to files in `dir`.
    pub fn start(
        dir: &Path,
        name: &'static str,
        program: &Path,
        args: &[String],
    ) -> Result<Self, Fail> {
        let file = |path: &Path| {
            File::create(path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let (out, log) = (dir.join(format!("{name}.out")), dir.join(format!("{name}.log")));
        let child = Command::new(program)
            .args(args)
            .env("RUST_LOG", "info")
            .stdin(Stdio::null())
            .stdout(file(&out)?)
            .stderr(file(&log)?)
            // In a separate process group: at Ctrl-C the demo stops its processes in order.
            .process_group(0)
            .spawn()
            .map_err(|error| format!("cannot start {}: {error}", program.display()))?;
        Ok(Self { name, child, out, log })
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        // The id is not reused before the process is waited for.
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    /// Returns an error with the end of its log if it has exited.
    pub fn check(&mut self) -> Result<(), Fail> {
        match self.try_wait()? {
            Some(status) => Err(self.fail(&format!("ended early ({status})"))),
            None => Ok(()),
        }
    }

    /// Stops it with SIGTERM and waits. Returns an error unless it exits with success.
    pub fn end(&mut self) -> Result<(), Fail> {
        self.signal(Signal::TERM);
        let by = Instant::now() + END_MAX;
        loop {
            // Read before the check: this process may be suspended in between.
            let late = Instant::now() >= by;
            match self.try_wait()? {
                None if late => return Err(self.fail("did not exit after SIGTERM")),
                None => std::thread::sleep(Duration::from_millis(2)),
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(self.fail(&format!("failed ({status})"))),
            }
        }
    }

    /// Returns the last complete line of JSON that it printed.
    pub fn last_json(&self) -> Result<Value, Fail> {
        let text = read(&self.out);
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let last = whole.lines().last().unwrap_or("");
        serde_json::from_str(last).map_err(|error| self.fail(&format!("printed no JSON ({error})")))
    }

    /// Returns its exit status; `None`: it runs.
    fn try_wait(&mut self) -> Result<Option<ExitStatus>, Fail> {
        let status = self.child.try_wait();
        status.map_err(|error| self.fail(&format!(": waiting failed ({error})")))
    }

    /// An error about it, with the end of its log, or of its output if it logged nothing.
    fn fail(&self, what: &str) -> Fail {
        let mut text = read(&self.log);
        if text.trim().is_empty() {
            text = read(&self.out);
        }
        let lines: Vec<_> = text.lines().collect();
        let last = &lines[lines.len().saturating_sub(LOG_LINES)..];
        let mut why = format!("process '{}' {what}", self.name);
        why += if last.is_empty() { "; it logged nothing" } else { "; end of its log:" };
        last.iter().for_each(|line| why += &format!("\n    | {line}"));
        why.into()
    }
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both have no effect on a process that has exited and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(folder: &Folder, script: &str) -> Process {
        let args = ["-c", script].map(String::from);
        Process::start(folder.path(), "shell", Path::new("/bin/sh"), &args).unwrap()
    }

    fn wait_for(what: impl Fn() -> bool) {
        let by = Instant::now() + Duration::from_secs(10);
        while !what() {
            assert!(Instant::now() < by);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn text(fail: Fail) -> String {
        match fail {
            Fail::Failed(what) => what,
            Fail::Interrupted => panic!("it was not interrupted"),
        }
    }

    #[test]
    fn failed_process_is_reported_with_the_end_of_its_log() {
        let folder = Folder::new().unwrap();
        let script = "for i in 1 2 3 4 5 6 7; do echo line $i >&2; done; exit 3";
        let mut process = shell(&folder, script);
        wait_for(|| read(&process.log).contains("line 7"));
        let error = text(process.end().unwrap_err());
        assert!(error.contains("'shell'") && error.contains("| line 7"), "{error}");
        assert!(!error.contains("line 1"), "{error}");
        assert!(text(process.check().unwrap_err()).contains("ended early"));
        let missing = Process::start(folder.path(), "none", Path::new("/no/such/program"), &[]);
        assert!(text(missing.unwrap_err()).contains("/no/such/program"));
    }

    #[test]
    fn only_complete_lines_are_read() {
        let folder = Folder::new().unwrap();
        let process = shell(&folder, r#"printf '{"a":1}\n{"a":2}\n{"a'; exec sleep 60"#);
        wait_for(|| process.last_json().is_ok_and(|json| json["a"] == 2));
    }

    #[test]
    fn nothing_is_left_behind() {
        let folder = Folder::new().unwrap();
        let other = Folder::new().unwrap();
        assert_ne!(folder.path(), other.path());
        let path = folder.path().to_path_buf();
        let process = shell(&folder, "exec sleep 60");
        let proc = PathBuf::from(format!("/proc/{}", process.id()));
        assert!(path.exists() && proc.exists());
        drop((process, folder));
        assert!(!path.exists() && !proc.exists());
    }
}
