//! `pvswitch demo` as a new user runs it: it succeeds, prints its results and cleans up.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const EXE: &str = env!("CARGO_BIN_EXE_pvswitch");
/// A demo of short scenes takes a few seconds; more on a busy machine.
const TIME_MAX: Duration = Duration::from_secs(120);

/// A directory for one test's temporary files.
fn scratch(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("pvd-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

fn demo(dir: &Path, args: &[&str]) -> Child {
    let mut command = Command::new(EXE);
    command.arg("demo").args(args).env("TMPDIR", dir);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for its end and returns its output, which fits a pipe.
fn finish(mut child: Child) -> (Output, String) {
    let by = Instant::now() + TIME_MAX;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > by {
            let _ = child.kill();
            panic!("the demo took longer than {TIME_MAX:?}");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output, text)
}

/// Processes whose command line contains `dir`.
fn processes(dir: &Path) -> Vec<String> {
    let own = dir.display().to_string();
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = entries.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(&own)).collect()
}

fn nothing_left(dir: &Path) {
    let left: Vec<_> = std::fs::read_dir(dir).unwrap().flatten().map(|e| e.path()).collect();
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(processes(dir), Vec::<String>::new());
    std::fs::remove_dir(dir).unwrap();
}

#[test]
fn shows_every_scene_and_leaves_nothing_behind() {
    let dir = scratch("all");
    let (output, text) = finish(demo(&dir, &["--scene", "0.3", "--plain"]));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    for scene in [
        "scene 1 of 5: idle",
        "scene 2 of 5: full speed",
        "scene 3 of 5: request and response",
        "scene 4 of 5: sleep or poll",
        "scene 5 of 5: hostile guests",
        "Results",
        "Next steps",
    ] {
        assert!(text.contains(scene), "no '{scene}' in:\n{text}");
    }
    for figure in ["NaN", "inf", "-0", "failed", "\x1b"] {
        assert!(!text.contains(figure), "'{figure}' in:\n{text}");
    }
    // Frames were delivered at both sizes and under each policy.
    let results: Vec<_> = text.lines().filter_map(|l| l.trim().strip_prefix("=> ")).collect();
    assert_eq!(results.len(), 8, "{text}");
    for result in &results[1..3] {
        let rate = result.split(": ").nth(1).unwrap();
        assert!(!rate.starts_with("0 "), "{result}");
    }
    for policy in ["event", "adaptive", "spin"] {
        assert!(results.iter().any(|r| r.starts_with(policy)), "{policy}: {text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 110), "{text}");
    nothing_left(&dir);
}

#[test]
fn an_interrupt_ends_it_at_once_with_the_results_so_far() {
    let dir = scratch("int");
    let child = demo(&dir, &["--scene", "30", "--plain"]);
    let by = Instant::now() + TIME_MAX;
    // Waits until the switch and four guests are running.
    while processes(&dir).len() < 5 {
        assert!(Instant::now() < by, "{:?}", processes(&dir));
        std::thread::sleep(Duration::from_millis(10));
    }
    let asked = Instant::now();
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let (output, text) = finish(child);
    assert!(output.status.success() && text.contains("None yet"), "{text}");
    assert!(asked.elapsed() < Duration::from_secs(20));
    nothing_left(&dir);
}

#[test]
fn failed_process_is_reported_with_its_log_and_the_next_scene_begins() {
    let dir = scratch("fail");
    let child = demo(&dir, &["--scene", "0.3", "--plain"]);
    // Kills the first scene's switch as soon as it is running.
    let by = Instant::now() + TIME_MAX;
    let switch = loop {
        assert!(Instant::now() < by);
        let of = |pid: &u32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            line.contains("\0run\0") && line.contains(&dir.display().to_string())
        };
        let entries = std::fs::read_dir("/proc").unwrap().flatten();
        let mut pids = entries.filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
        match pids.find(of) {
            Some(pid) => break pid,
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    Command::new("kill").args(["-KILL", &switch.to_string()]).status().unwrap();
    let (output, text) = finish(child);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("Failed: idle") && text.contains("'switch' ended early"), "{text}");
    assert!(text.contains("scene 5 of 5"), "{text}");
    nothing_left(&dir);
}

#[test]
fn invalid_scene_lengths_are_rejected() {
    for length in ["0", "-1", "nan", "1e9"] {
        let output = Command::new(EXE).args(["demo", "--scene"]).arg(length).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{length}");
    }
}
