//! Processes and their folder: dropping their values kills the process or removes the folder.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::Namespace;
use super::installed::{need, search_path};
use crate::error::Fail;

/// Longest folder name that leaves room for a socket's name in `sun_path`.
const DIR_LEN_MAX: usize = 70;
/// Longest wait for something to start or to appear, in seconds: guests on a busy machine are slow.
pub const START_MAX_S: f64 = 60.0;
/// Longest wait for a process to end after `SIGTERM`.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// The same for a command in a virtual machine, when its process is dropped.
const VM_END_TIMEOUT: Duration = Duration::from_millis(500);
/// Lines of a failed process's log that are included in the error.
const TAIL_LINES: usize = 6;

/// Sleeps for some seconds.
pub fn sleep(seconds: f64) {
    std::thread::sleep(Duration::from_secs_f64(seconds));
}

/// Polls `done` until it is true, for at most `seconds`; `what` describes it in the error.
pub fn wait_for(
    what: &str,
    seconds: f64,
    mut done: impl FnMut() -> Result<bool, Fail>,
) -> Result<(), Fail> {
    let by = Instant::now() + Duration::from_secs_f64(seconds);
    while !done()? {
        if Instant::now() > by {
            return Err(Fail::Cell(format!("timed out after {seconds:.0} s waiting for {what}")));
        }
        std::thread::sleep(Duration::from_millis(3));
    }
    Ok(())
}

/// Creates a private temporary folder with a path short enough for Unix sockets; it is removed when
/// dropped.
///
/// # Errors
/// The folder cannot be created.
pub fn folder() -> std::io::Result<TempDir> {
    let mut base = std::env::temp_dir();
    if base.as_os_str().len() > DIR_LEN_MAX - 32 {
        base = "/tmp".into();
    }
    tempfile::Builder::new().prefix("pvl-").tempdir_in(std::path::absolute(base)?)
}

/// Place where a process runs: namespace and CPUs.
#[derive(Clone, Copy, Default)]
pub struct Place<'a> {
    /// Its network namespace; `None`: the lab's own.
    pub netns: Option<&'a Namespace>,
    /// CPUs it may use; empty: any.
    pub cpus: &'a [usize],
}

impl Place<'_> {
    /// Waits until commands can run there.
    fn wait_ready(&self) -> Result<(), Fail> {
        self.netns.map_or(Ok(()), Namespace::wait_ready)
    }

    /// Returns the command that runs `program` there. `nsenter` and `taskset` exec it, so it has
    /// the child's process id.
    fn command(&self, program: &str, args: &[String]) -> Command {
        let mut words = Vec::new();
        let vm = self.netns.and_then(Namespace::vm);
        if let Some(vm) = vm {
            words.extend(vm.command_prefix());
        } else if let Some(netns) = self.netns {
            words.extend(["nsenter".into(), format!("--net={}", netns.path()), "--".into()]);
        }
        // The CPUs of a virtual machine are set when it is started.
        if !self.cpus.is_empty() && vm.is_none() {
            words.extend(["taskset".into(), "--cpu-list".into(), crate::machine::list(self.cpus)]);
        }
        words.push(program.into());
        let mut command = Command::new(&words[0]);
        if let Ok(path) = std::env::join_paths(search_path()) {
            command.env("PATH", path);
        }
        command.args(&words[1..]).args(args).stdin(Stdio::null());
        command
    }
}

/// Runs a program and returns its standard output; fails if its exit status is not 0.
pub(super) fn output(program: &str, args: &[String], place: &Place) -> Result<String, Fail> {
    need(program)?;
    place.wait_ready()?;
    let done = place.command(program, args).output();
    let what = || format!("{program} {}", args.join(" "));
    let done = done.map_err(|error| Fail::Cell(format!("{}: {error}", what())))?;
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    let error = String::from_utf8_lossy(&done.stderr);
    Err(Fail::Cell(format!("{}: {} ({})", what(), error.trim(), done.status)))
}

/// A process; killed when dropped.
#[derive(Debug)]
pub struct Process {
    /// Its name in messages.
    pub name: String,
    child: Child,
    out: PathBuf,
    log: PathBuf,
    /// The command runs in a virtual machine and must be ended there.
    in_vm: bool,
}

impl Process {
    /// Starts a process; its standard output and standard error go to files in `dir`.
    ///
    /// # Errors
    /// The program is not installed, or cannot be started.
    pub fn start(
        dir: &Path,
        name: &str,
        program: &str,
        args: &[String],
        place: &Place,
    ) -> Result<Self, Fail> {
        need(program)?;
        place.wait_ready()?;
        let (out, log) = (dir.join(format!("{name}.out")), dir.join(format!("{name}.log")));
        let file = |path: &Path| {
            File::create(path).map_err(|error| Fail::Over(format!("{}: {error}", path.display())))
        };
        let child = place
            .command(program, args)
            .env("RUST_LOG", "info")
            // Some programs end when their standard input is closed.
            .stdin(Stdio::piped())
            .stdout(file(&out)?)
            .stderr(file(&log)?)
            // Ctrl-C must reach the lab only, which then ends its processes.
            .process_group(0)
            .spawn()
            .map_err(|error| Fail::Cell(format!("cannot start {program}: {error}")))?;
        let in_vm = place.netns.is_some_and(|netns| netns.vm().is_some());
        Ok(Self { name: name.into(), child, out, log, in_vm })
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Fails, with the end of its log, if the process has ended.
    pub fn check(&mut self) -> Result<(), Fail> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(self.fail(&format!("ended early ({status})"))),
            Err(error) => Err(self.fail(&format!("cannot be waited for ({error})"))),
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        // Fails if it has ended. Its id is not reused before it is waited for.
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    /// Sends `SIGTERM` and waits for the process to end; returns its exit status.
    pub fn end(&mut self) -> Result<ExitStatus, Fail> {
        self.signal(Signal::TERM);
        let by = Instant::now() + END_TIMEOUT;
        loop {
            // Read before `try_wait`: the machine may be suspended in between.
            let late = Instant::now() >= by;
            match self.child.try_wait() {
                Ok(None) if late => return Err(self.fail("did not exit after SIGTERM")),
                Ok(None) => std::thread::sleep(Duration::from_millis(2)),
                Ok(Some(status)) => return Ok(status),
                Err(error) => return Err(self.fail(&format!("cannot be waited for ({error})"))),
            }
        }
    }

    /// Waits at most `seconds` for the process to exit; fails if its exit status is not 0.
    pub fn finish(&mut self, seconds: f64) -> Result<(), Fail> {
        let what = format!("process '{}' to end{}", self.name, self.tail());
        let mut status = None;
        wait_for(&what, seconds, || {
            status = self.child.try_wait().map_err(|error| Fail::Cell(error.to_string()))?;
            Ok(status.is_some())
        })?;
        match status {
            Some(status) if !status.success() => Err(self.fail(&format!("failed ({status})"))),
            _ => Ok(()),
        }
    }

    /// Path of its log (standard error).
    pub(super) fn log(&self) -> &Path {
        &self.log
    }

    /// Returns its standard output so far.
    pub fn printed(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.out).unwrap_or_default()).into_owned()
    }

    /// Returns its log (standard error) so far.
    pub fn logged(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Returns the last complete line that it printed, as JSON.
    pub fn last_json(&self) -> Result<Value, Fail> {
        let text = self.printed();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let last = whole.lines().last().unwrap_or("");
        serde_json::from_str(last).map_err(|error| self.fail(&format!("printed no JSON ({error})")))
    }

    /// Returns an error about the process, with the end of its log.
    pub fn fail(&self, what: &str) -> Fail {
        Fail::Cell(format!("process '{}' {what}{}", self.name, self.tail()))
    }

    /// Returns the last lines of its log to append to a message; of its output if the log is empty.
    fn tail(&self) -> String {
        let mut text = self.logged();
        if text.trim().is_empty() {
            text = self.printed();
        }
        let lines: Vec<_> = text.lines().collect();
        let last = &lines[lines.len().saturating_sub(TAIL_LINES)..];
        if last.is_empty() {
            return "; its log is empty".into();
        }
        let last: String = last.iter().map(|line| format!("\n    | {line}")).collect();
        format!("; the end of its log:{last}")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.in_vm && matches!(self.child.try_wait(), Ok(None)) {
            self.signal(Signal::TERM);
            let by = Instant::now() + VM_END_TIMEOUT;
            while Instant::now() < by && matches!(self.child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        // Both are no-ops if the process was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(dir: &TempDir, script: &str) -> Process {
        let args = ["-c", script].map(String::from);
        Process::start(dir.path(), "sh", "sh", &args, &Place::default()).unwrap()
    }

    #[test]
    fn an_error_has_the_name_of_the_process_and_the_end_of_its_log() {
        let dir = folder().unwrap();
        let mut process = shell(&dir, "for i in 1 2 3 4 5 6 7; do echo line $i >&2; done; exit 3");
        let error = process.finish(10.0).unwrap_err().to_string();
        assert!(error.contains("'sh'") && error.contains("| line 7"), "{error}");
        assert!(!error.contains("line 1"), "{error}");
        assert!(process.check().unwrap_err().to_string().contains("ended early"));
    }

    #[test]
    fn waiting_for_a_process_times_out() {
        let dir = folder().unwrap();
        let mut process = shell(&dir, "exec sleep 60");
        let error = process.finish(0.05).unwrap_err().to_string();
        assert!(error.contains("timed out") && error.contains("'sh' to end"), "{error}");
        process.end().unwrap();
    }

    #[test]
    fn an_incomplete_line_is_ignored() {
        let dir = folder().unwrap();
        let process = shell(&dir, r#"printf '{"a":1}\n{"a":2}\n{"a'; exec sleep 60"#);
        let second = || Ok(process.last_json().is_ok_and(|json| json["a"] == 2));
        wait_for("two lines", 10.0, second).unwrap();
    }

    #[test]
    fn a_missing_program_is_reported() {
        let missing = need("no-such-program").unwrap_err();
        assert!(matches!(&missing, Fail::Missing(words) if words.contains("no-such-program")));
        assert!(need("sh").is_ok());
    }

    #[test]
    fn dropping_removes_process_and_folder() {
        let dir = folder().unwrap();
        let path = dir.path().to_path_buf();
        let process = shell(&dir, "exec sleep 60");
        let proc = PathBuf::from(format!("/proc/{}", process.id()));
        assert!(path.exists() && proc.exists());
        drop(process);
        drop(dir);
        assert!(!path.exists() && !proc.exists());
    }

    #[test]
    fn a_process_is_pinned_to_its_cpus() {
        let dir = folder().unwrap();
        let args = ["-c", "grep Cpus_allowed_list /proc/self/status"].map(String::from);
        let place = Place { netns: None, cpus: &[0] };
        let mut process = Process::start(dir.path(), "sh", "sh", &args, &place).unwrap();
        process.finish(10.0).unwrap();
        assert_eq!(process.printed().trim(), "Cpus_allowed_list:\t0");
    }
}
