//! `cargo xtask lab`: every study of the lab in its smallest form, judged by counts. The last line
//! counts studies: `N passed, N failed, N skipped`. Results stay in `target/lab/STUDY`.

use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Time for one study. The smallest form takes less than one minute on a machine of its own.
const STUDY_MAX: Duration = Duration::from_secs(150);
/// Time for all, so that what was too long is told before CI ends everything.
const ALL_MAX: Duration = Duration::from_secs(9 * 60 + 15);
/// How long a study may take to leave once it is asked to.
const LEAVE_MAX: Duration = Duration::from_secs(15);
/// Lines of a failed study's output that are shown.
const SHOWN_LINES: usize = 25;

/// What became of a study.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    Passed(String),
    Failed(String),
    Skipped(String),
}

/// Runs every study, or those named; whether none failed.
///
/// # Errors
/// The program cannot be built or started, or a study is unknown.
pub fn run(root: &Path, wanted: &[String]) -> Result<bool, String> {
    let mut build = Command::new(crate::tidy::cargo());
    build.args(["build", "--quiet", "--release", "--bin", "pvswitch", "--bin", "pvswitch-lab"]);
    let built = build.current_dir(root).stdin(Stdio::null()).status();
    if !built.map_err(|error| format!("cannot run cargo: {error}"))?.success() {
        return Err("pvswitch and pvswitch-lab cannot be built".into());
    }
    let begun = Instant::now();
    let listed = cargo(root).args(["lab", "list"]).output();
    let listed = listed.map_err(|error| format!("cannot run cargo: {error}"))?;
    if !listed.status.success() {
        return Err(format!("lab list: {}", String::from_utf8_lossy(&listed.stderr).trim()));
    }
    let studies = names(&String::from_utf8_lossy(&listed.stdout));
    if let Some(unknown) = wanted.iter().find(|name| !studies.contains(name)) {
        return Err(format!("no study '{unknown}'; there are: {}", studies.join(", ")));
    }
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for study in studies.iter().filter(|name| wanted.is_empty() || wanted.contains(name)) {
        println!("== {study}");
        let started = Instant::now();
        let left = ALL_MAX.saturating_sub(begun.elapsed());
        let verdict = if left.is_zero() {
            Verdict::Failed("not begun: those before it took all the time".into())
        } else {
            one(root, study, STUDY_MAX.min(left))?
        };
        let took = started.elapsed().as_secs_f64();
        match verdict {
            Verdict::Passed(what) => {
                passed += 1;
                println!("passed   {study} in {took:.0} s: {what}");
            }
            Verdict::Failed(what) => {
                failed += 1;
                println!("failed   {study} in {took:.0} s: {what}");
            }
            Verdict::Skipped(what) => {
                skipped += 1;
                println!("skipped  {study}: {what}");
            }
        }
    }
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    Ok(failed == 0)
}

/// The program; `lab` runs the other one beside it.
fn cargo(root: &Path) -> Command {
    let mut command = Command::new(crate::tidy::cargo());
    command.args(["run", "--quiet", "--release", "--"]).current_dir(root).stdin(Stdio::null());
    command
}

/// Names of the studies: what begins a line of `lab list`.
fn names(list: &str) -> Vec<String> {
    let lines = list.lines().filter(|line| !line.starts_with(char::is_whitespace));
    lines.filter_map(|line| line.split_whitespace().next()).map(String::from).collect()
}

/// Measures one anew, in no more than `limit`.
fn one(root: &Path, study: &str, limit: Duration) -> Result<Verdict, String> {
    let out = Path::new("target/lab").join(study);
    let log = root.join("target/lab").join(study).with_extension("log");
    let says = |error: std::io::Error| format!("{}: {error}", log.display());
    std::fs::create_dir_all(root.join("target/lab")).map_err(says)?;
    // The lab would go on with what is there.
    match std::fs::remove_dir_all(root.join(&out)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(says(error)),
        _ => {}
    }
    let file = File::create(&log).map_err(says)?;
    let mut command = cargo(root);
    command.args(["lab", "run", study, "--smallest", "--assert", "--out"]).arg(&out);
    let ended = wait(command.stdout(file.try_clone().map_err(says)?).stderr(file), limit)?;
    let text = String::from_utf8_lossy(&std::fs::read(&log).map_err(says)?).into_owned();
    let verdict = judged(&text, ended);
    if let Verdict::Failed(_) = verdict {
        let lines: Vec<&str> = text.lines().collect();
        for line in &lines[lines.len().saturating_sub(SHOWN_LINES)..] {
            println!("   {line}");
        }
    }
    Ok(verdict)
}

/// Waits for it; none if it had to be ended. It is asked first, so that it takes away what it made.
fn wait(command: &mut Command, limit: Duration) -> Result<Option<ExitStatus>, String> {
    let mut child = command.spawn().map_err(|error| format!("cannot run cargo: {error}"))?;
    let end = Instant::now() + limit;
    let mut asked = false;
    loop {
        if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
            return Ok((!asked).then_some(status));
        }
        if !asked && Instant::now() >= end {
            asked = true;
            let kill = format!("kill -s TERM {}", child.id());
            let _ = Command::new("sh").args(["-c", &kill]).stderr(Stdio::null()).status();
        }
        if asked && Instant::now() >= end + LEAVE_MAX {
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What its output and status say.
fn judged(text: &str, ended: Option<ExitStatus>) -> Verdict {
    let find = |words: &str| text.lines().find(|line| line.contains(words)).map(str::trim);
    let Some(status) = ended else {
        return Verdict::Failed("it took too long".into());
    };
    if status.success() {
        let held = text.lines().filter(|line| line.starts_with("holds: ")).count();
        let less = find(" runs skipped: ").map_or_else(String::new, |what| format!("; {what}"));
        return Verdict::Passed(format!("{held} expectations hold{less}"));
    }
    if let Some(what) = find("no namespaces for the guests") {
        return Verdict::Skipped(what.into());
    }
    if let Some(what) = find("DOES NOT HOLD: ").or_else(|| find(" runs failed, ")) {
        return Verdict::Failed(what.into());
    }
    // Without a tool there may be nothing left to judge.
    match find(" runs skipped: ") {
        Some(what) => {
            let tool = find(": cells that need it are skipped").unwrap_or(what);
            Verdict::Skipped(tool.into())
        }
        None => Verdict::Failed(status.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn judge(text: &str, code: i32) -> Verdict {
        judged(text, Some(ExitStatus::from_raw(code << 8)))
    }

    #[test]
    fn studies_are_what_begins_a_line() {
        let list =
            "polling     what it gives\n            after a seed\nidle        what it costs\n";
        assert_eq!(names(list), ["polling", "idle"]);
    }

    #[test]
    fn a_study_is_judged_by_what_it_says() {
        let good = judge("holds: a\nholds: b\n", 0);
        assert_eq!(good, Verdict::Passed("2 expectations hold".into()));
        let bad = judge("holds: a\nDOES NOT HOLD: b\n3 runs skipped: x\n", 1);
        assert_eq!(bad, Verdict::Failed("DOES NOT HOLD: b".into()));
        assert!(matches!(judge("2 runs failed, see failed.csv", 1), Verdict::Failed(_)));
        assert!(matches!(judge("panicked", 101), Verdict::Failed(_)));
        assert!(matches!(judged("holds: a\n", None), Verdict::Failed(_)));
    }

    #[test]
    fn what_this_machine_lacks_is_no_failure() {
        let refused =
            "error: no namespaces for the guests: unshare: not permitted.\nRun it as root";
        assert!(matches!(judge(refused, 1), Verdict::Skipped(what) if what.contains("not perm")));
        let tool = "iperf3 is not installed: cells that need it are skipped\n4 runs skipped: x\n";
        assert!(matches!(judge(tool, 1), Verdict::Skipped(what) if what.contains("iperf3")));
    }
}
