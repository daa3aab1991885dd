//! Processes and the folder they share. Both end with the values that stand for them.

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

/// Longest folder name that leaves room for the sockets' names in a socket address.
const DIR_LEN_MAX: usize = 70;
/// How long a process may take to end when asked to.
const END_MAX: Duration = Duration::from_secs(5);
/// The same in a virtual machine, when nobody is interested in it any more.
const FAR_END_MAX: Duration = Duration::from_millis(500);
/// Lines of a failed process's log that are shown.
const TAIL_LINES: usize = 6;

/// Lets so many seconds pass.
pub fn sleep(seconds: f64) {
    std::thread::sleep(Duration::from_secs_f64(seconds));
}

/// Waits until `done`, at most `seconds`; `what` is what is waited for.
pub fn wait_for(
    what: &str,
    seconds: f64,
    mut done: impl FnMut() -> Result<bool, Fail>,
) -> Result<(), Fail> {
    let by = Instant::now() + Duration::from_secs_f64(seconds);
    while !done()? {
        if Instant::now() > by {
            return Err(Fail::Cell(format!("waited {seconds:.0} s without result for {what}")));
        }
        std::thread::sleep(Duration::from_millis(3));
    }
    Ok(())
}

/// A private folder below the system's for temporary files, with a name short enough for sockets in
/// it; removed with all in it when dropped.
///
/// # Errors
/// It cannot be made.
pub fn folder() -> std::io::Result<TempDir> {
    let mut base = std::env::temp_dir();
    if base.as_os_str().len() > DIR_LEN_MAX - 32 {
        base = "/tmp".into();
    }
    tempfile::Builder::new().prefix("pvl-").tempdir_in(std::path::absolute(base)?)
}

/// Where a process runs.
#[derive(Clone, Copy, Default)]
pub struct Place<'a> {
    /// Its network namespace; the lab's own if none.
    pub netns: Option<&'a Namespace>,
    /// CPUs it may use; any if empty.
    pub cpus: &'a [usize],
}

impl Place<'_> {
    /// Waits until commands can run there.
    fn ready(&self) -> Result<(), Fail> {
        self.netns.map_or(Ok(()), Namespace::ready)
    }

    /// `program`, to be started there. Both helpers turn into it, so that its process id is the
    /// child's.
    fn command(&self, program: &str, args: &[String]) -> Command {
        let mut words = Vec::new();
        let vm = self.netns.and_then(Namespace::vm);
        if let Some(vm) = vm {
            words.extend(vm.words());
        } else if let Some(netns) = self.netns {
            words.extend(["nsenter".into(), format!("--net={}", netns.path()), "--".into()]);
        }
        // A virtual machine has the CPUs that it was started on.
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

/// Runs a program to its end, which must be a good one; what it printed.
pub(super) fn output(program: &str, args: &[String], place: &Place) -> Result<String, Fail> {
    need(program)?;
    place.ready()?;
    let done = place.command(program, args).output();
    let what = || format!("{program} {}", args.join(" "));
    let done = done.map_err(|error| Fail::Cell(format!("{}: {error}", what())))?;
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    Err(Fail::Cell(format!("{}: {} ({})", what(), said.trim(), done.status)))
}

/// A process; killed when dropped.
#[derive(Debug)]
pub struct Process {
    /// What it is called in messages.
    pub name: String,
    child: Child,
    out: PathBuf,
    log: PathBuf,
    /// What it stands for runs in a virtual machine, and has to be ended there.
    far: bool,
}

impl Process {
    /// Starts one. What it prints goes to files in `dir`.
    ///
    /// # Errors
    /// [`Fail`]: it is not installed, or could not be started.
    pub fn start(
        dir: &Path,
        name: &str,
        program: &str,
        args: &[String],
        place: &Place,
    ) -> Result<Self, Fail> {
        need(program)?;
        place.ready()?;
        let (out, log) = (dir.join(format!("{name}.out")), dir.join(format!("{name}.log")));
        let file = |path: &Path| {
            File::create(path).map_err(|error| Fail::Over(format!("{}: {error}", path.display())))
        };
        let child = place
            .command(program, args)
            .env("RUST_LOG", "info")
            // Kept open, and silent: some end with their input.
            .stdin(Stdio::piped())
            .stdout(file(&out)?)
            .stderr(file(&log)?)
            // Out of the terminal's reach: at Ctrl-C the lab stops, and then it stops the others.
            .process_group(0)
            .spawn()
            .map_err(|error| Fail::Cell(format!("cannot start {program}: {error}")))?;
        let far = place.netns.is_some_and(|netns| netns.vm().is_some());
        Ok(Self { name: name.into(), child, out, log, far })
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// An error, with the end of its log, if it has ended.
    pub fn check(&mut self) -> Result<(), Fail> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(self.fail(&format!("ended early ({status})"))),
            Err(error) => Err(self.fail(&format!("cannot be waited for ({error})"))),
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        // It may have ended; then there is nothing to tell it. Its id is not free before we wait.
        let _ = kill_process(Pid::from_child(&self.child), signal);
    }

    /// Asks it to end, and waits until it has; how it did.
    pub fn end(&mut self) -> Result<ExitStatus, Fail> {
        self.signal(Signal::TERM);
        let by = Instant::now() + END_MAX;
        loop {
            // Asked for before the look: the machine may have stood still between.
            let late = Instant::now() >= by;
            match self.child.try_wait() {
                Ok(None) if late => return Err(self.fail("did not end when asked to")),
                Ok(None) => std::thread::sleep(Duration::from_millis(2)),
                Ok(Some(status)) => return Ok(status),
                Err(error) => return Err(self.fail(&format!("cannot be waited for ({error})"))),
            }
        }
    }

    /// Waits until it ends by itself, at most `seconds`, with success.
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

    /// The file of what it logs.
    pub(super) fn log(&self) -> &Path {
        &self.log
    }

    /// What it printed.
    pub fn printed(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.out).unwrap_or_default()).into_owned()
    }

    /// What it logged.
    pub fn logged(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// The last whole line of JSON it printed.
    pub fn last_json(&self) -> Result<Value, Fail> {
        let text = self.printed();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let last = whole.lines().last().unwrap_or("");
        serde_json::from_str(last).map_err(|error| self.fail(&format!("printed no JSON ({error})")))
    }

    /// An error about it, with the end of its log.
    pub fn fail(&self, what: &str) -> Fail {
        Fail::Cell(format!("process '{}' {what}{}", self.name, self.tail()))
    }

    /// The last lines of its log, to be put behind a message; of what it printed, if it has none.
    fn tail(&self) -> String {
        let mut text = self.logged();
        if text.trim().is_empty() {
            text = self.printed();
        }
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
        if self.far && matches!(self.child.try_wait(), Ok(None)) {
            self.signal(Signal::TERM);
            let by = Instant::now() + FAR_END_MAX;
            while Instant::now() < by && matches!(self.child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        // Both do nothing to a process that has ended and was waited for.
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
    fn a_process_that_fails_is_named_with_the_end_of_its_log() {
        let dir = folder().unwrap();
        let mut process = shell(&dir, "for i in 1 2 3 4 5 6 7; do echo line $i >&2; done; exit 3");
        let error = process.finish(10.0).unwrap_err().to_string();
        assert!(error.contains("'sh'") && error.contains("| line 7"), "{error}");
        assert!(!error.contains("line 1"), "{error}");
        assert!(process.check().unwrap_err().to_string().contains("ended early"));
    }

    #[test]
    fn a_process_that_does_not_end_is_waited_for_in_vain() {
        let dir = folder().unwrap();
        let mut process = shell(&dir, "exec sleep 60");
        let error = process.finish(0.05).unwrap_err().to_string();
        assert!(error.contains("without result") && error.contains("'sh' to end"), "{error}");
        process.end().unwrap();
    }

    #[test]
    fn only_whole_lines_are_read() {
        let dir = folder().unwrap();
        let process = shell(&dir, r#"printf '{"a":1}\n{"a":2}\n{"a'; exec sleep 60"#);
        let second = || Ok(process.last_json().is_ok_and(|json| json["a"] == 2));
        wait_for("two lines", 10.0, second).unwrap();
    }

    #[test]
    fn a_missing_program_is_told_with_its_package() {
        let missing = need("no-such-program").unwrap_err();
        assert!(matches!(&missing, Fail::Missing(words) if words.contains("no-such-program")));
        assert!(need("sh").is_ok());
    }

    #[test]
    fn nothing_is_left_behind() {
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
    fn cpus_are_those_given() {
        let dir = folder().unwrap();
        let args = ["-c", "grep Cpus_allowed_list /proc/self/status"].map(String::from);
        let place = Place { netns: None, cpus: &[0] };
        let mut process = Process::start(dir.path(), "sh", "sh", &args, &place).unwrap();
        process.finish(10.0).unwrap();
        assert_eq!(process.printed().trim(), "Cpus_allowed_list:\t0");
    }
}
