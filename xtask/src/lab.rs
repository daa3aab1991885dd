//! `cargo xtask lab`: runs every study in its smallest form, judged by counts, with the programs
//! that the tests use; with `--default`, those named in the form that has no name, for its time.
//! The last line counts studies: `N passed, N failed, N skipped`. Results
//! remain in `target/lab/STUDY`.

use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Time limit of one study. The smallest form takes less than a minute on an idle machine.
const STUDY_MAX: Duration = Duration::from_secs(150);
/// Time limit of all studies; less than that of the CI step, which prints no counts.
const ALL_MAX: Duration = Duration::from_secs(20 * 60);
/// Time for a study to clean up after SIGTERM.
const CLEANUP_MAX: Duration = Duration::from_secs(15);
/// Lines shown of a failed study's output.
const SHOWN_LINES: usize = 25;

/// Result of a study.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Verdict {
    Passed(String),
    Failed(String),
    Skipped(String),
}

/// Time limit of one study, and of all, in its default form: those that are named, such as `soak`.
const DEFAULT_MAX: Duration = Duration::from_secs(60 * 60);

/// A form of studies.
struct Form {
    /// What `lab run` takes for it.
    word: Option<&'static str>,
    /// Time limit of one study.
    study_max: Duration,
    /// Time limit of all studies.
    all_max: Duration,
}

const SMALLEST: Form = Form { word: Some("--smallest"), study_max: STUDY_MAX, all_max: ALL_MAX };
const DEFAULT: Form = Form { word: None, study_max: DEFAULT_MAX, all_max: DEFAULT_MAX };

/// Runs every study, or those named; returns whether none failed.
///
/// # Errors
/// The program cannot be built or started, or a study is unknown, or none is named in default form.
pub fn run(root: &Path, arguments: &[String]) -> Result<bool, String> {
    let (form, wanted) = match arguments {
        [word, names @ ..] if word == "--default" => (&DEFAULT, names),
        names => (&SMALLEST, names),
    };
    if form.word.is_none() && wanted.is_empty() {
        return Err("--default: name the studies; all of them take a day".into());
    }
    let program = crate::test::program(root, "pvswitch")?;
    crate::test::program(root, "pvswitch-lab")?;
    let begun = Instant::now();
    let listed = lab(&program, root).arg("list").output();
    let listed = listed.map_err(|error| format!("cannot run {}: {error}", program.display()))?;
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
        let left = form.all_max.saturating_sub(begun.elapsed());
        let verdict = if left.is_zero() {
            Verdict::Failed("not started: the time limit of all studies is exceeded".into())
        } else {
            one(root, &program, study, form, form.study_max.min(left))?
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

/// `pvswitch lab`, which runs pvswitch-lab.
fn lab(program: &Path, root: &Path) -> Command {
    let mut command = Command::new(program);
    command.arg("lab").current_dir(root).stdin(Stdio::null());
    command
}

/// Names of the studies: the first words of unindented lines of `lab list`.
fn names(list: &str) -> Vec<String> {
    let lines = list.lines().filter(|line| !line.starts_with(char::is_whitespace));
    lines.filter_map(|line| line.split_whitespace().next()).map(String::from).collect()
}

/// Runs one study from the start, in at most `limit`.
fn one(
    root: &Path,
    program: &Path,
    study: &str,
    form: &Form,
    limit: Duration,
) -> Result<Verdict, String> {
    let out = Path::new("target/lab").join(study);
    let log = root.join("target/lab").join(study).with_extension("log");
    let of_log = |error: std::io::Error| format!("{}: {error}", log.display());
    std::fs::create_dir_all(root.join("target/lab")).map_err(of_log)?;
    // The lab would resume existing results.
    match std::fs::remove_dir_all(root.join(&out)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(of_log(error)),
        _ => {}
    }
    let file = File::create(&log).map_err(of_log)?;
    let mut command = lab(program, root);
    command.args(["run", study]).args(form.word).args(["--assert", "--out"]).arg(&out);
    let ended = wait(command.stdout(file.try_clone().map_err(of_log)?).stderr(file), limit)?;
    let text = String::from_utf8_lossy(&std::fs::read(&log).map_err(of_log)?).into_owned();
    let verdict = judge(&text, ended);
    if let Verdict::Failed(_) = verdict {
        let lines: Vec<&str> = text.lines().collect();
        for line in &lines[lines.len().saturating_sub(SHOWN_LINES)..] {
            println!("   {line}");
        }
    }
    Ok(verdict)
}

/// Waits for a command; `None`: it exceeded `limit`. SIGTERM comes first, so that it cleans up.
fn wait(command: &mut Command, limit: Duration) -> Result<Option<ExitStatus>, String> {
    let mut child = command.spawn().map_err(|error| format!("cannot run pvswitch lab: {error}"))?;
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
        if asked && Instant::now() >= end + CLEANUP_MAX {
            let _ = child.kill();
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The verdict by output and exit status.
fn judge(text: &str, ended: Option<ExitStatus>) -> Verdict {
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
    // Without a tool, there may be no run to judge.
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

    fn judge_exit(text: &str, code: i32) -> Verdict {
        judge(text, Some(ExitStatus::from_raw(code << 8)))
    }

    #[test]
    fn names_of_studies_are_not_indented() {
        let list =
            "polling     what it shows\n            after a study\nidle        what it costs\n";
        assert_eq!(names(list), ["polling", "idle"]);
    }

    #[test]
    fn a_study_is_judged_by_its_output() {
        let good = judge_exit("holds: a\nholds: b\n", 0);
        assert_eq!(good, Verdict::Passed("2 expectations hold".into()));
        let bad = judge_exit("holds: a\nDOES NOT HOLD: b\n3 runs skipped: x\n", 1);
        assert_eq!(bad, Verdict::Failed("DOES NOT HOLD: b".into()));
        assert!(matches!(judge_exit("2 runs failed, see column", 1), Verdict::Failed(_)));
        assert!(matches!(judge_exit("panicked", 101), Verdict::Failed(_)));
        assert!(matches!(judge("holds: a\n", None), Verdict::Failed(_)));
    }

    #[test]
    fn missing_privileges_and_tools_are_skipped() {
        let refused =
            "error: no namespaces for the guests: unshare: not permitted.\nRun it as root";
        let skipped = judge_exit(refused, 1);
        assert!(matches!(skipped, Verdict::Skipped(what) if what.contains("not perm")));
        let tool = "iperf3 is not installed: cells that need it are skipped\n4 runs skipped: x\n";
        assert!(matches!(judge_exit(tool, 1), Verdict::Skipped(what) if what.contains("iperf3")));
    }
}
