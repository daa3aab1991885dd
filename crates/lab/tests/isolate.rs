//! The lab as a process: whatever becomes of it, nothing is left behind.
//!
//! This file is a program of its own, for the lab starts itself again: with `run` as its first
//! argument it is the lab with one study, otherwise it is the tests.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

use pvswitch_lab::Error;

/// The lab writes it when it has restored what it had changed.
const RETURNED: &str = "the lab has returned";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    if args.next().as_deref() == Some("run") {
        return the_lab(args.collect());
    }
    if let Err(why) = possible() {
        println!("skipped: no namespaces here: {why}");
        return ExitCode::SUCCESS;
    }
    let tests: [(&str, fn()); 6] = [
        ("a whole study", a_whole_study),
        ("others are seen from inside", others_are_seen_from_inside),
        ("a signal leaves what is done", a_signal_leaves_what_is_done),
        ("a second signal ends it at once", a_second_signal_ends_it_at_once),
        ("killed in the middle", killed_in_the_middle),
        ("the middle killed", the_one_in_between_killed),
    ];
    for (name, test) in tests {
        println!("{name}");
        test();
    }
    ExitCode::SUCCESS
}

/// `run OUT [AXIS=V,V]... [seconds=S]`
fn the_lab(args: Vec<String>) -> ExitCode {
    let mut ask = common::ask(Path::new(&args[0]));
    for arg in &args[1..] {
        match arg.strip_prefix("seconds=") {
            Some(seconds) => ask.seconds = seconds.parse().ok(),
            None => ask.only.push(arg.clone()),
        }
    }
    ask.judge = true;
    let ended = pvswitch_lab::run::run(&ask, common::STUDIES);
    eprintln!("{RETURNED}");
    match ended {
        Ok(status) => status.into(),
        Err(Error::Usage(what)) => {
            eprintln!("{what}");
            2.into()
        }
        Err(error) => {
            eprintln!("{error}");
            1.into()
        }
    }
}

fn possible() -> Result<(), String> {
    let mut command = Command::new("unshare");
    let arguments = ["--net", "--mount", "--pid", "--fork", "--mount-proc", "--map-root-user"];
    let output = command.args(arguments).arg("true").output().map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into())
    }
}

fn lab(out: &Path, only: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.arg("run").arg(out).args(only);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs until the cell that hangs has all its processes.
fn hanging(out: &Path) -> Child {
    let child = lab(out, &["poll=event,hang", "load=1"]).spawn().unwrap();
    let begin = Instant::now();
    while sleepers() < 2 {
        assert!(begin.elapsed() < Duration::from_secs(20), "the lab does not get to its cell");
        std::thread::sleep(Duration::from_millis(20));
    }
    child
}

/// Processes that the hanging cell starts, anywhere on this machine.
fn sleepers() -> usize {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = processes.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.filter(|line| *line == format!("sleep\0{}\0", common::SLEEP).as_bytes()).count()
}

fn nothing_is_left() {
    let begin = Instant::now();
    while sleepers() > 0 {
        assert!(begin.elapsed() < Duration::from_secs(5), "processes are left");
        std::thread::sleep(Duration::from_millis(20));
    }
    for path in ["/sys/class/net/pvlabtest1", "/run/netns/pvlabtest0"] {
        assert!(!Path::new(path).exists(), "{path} is left");
    }
}

fn runs(out: &Path) -> usize {
    let text = std::fs::read_to_string(out.join("runs.csv")).unwrap();
    text.lines().count() - 1
}

fn a_whole_study() {
    let out = common::folder("whole").join("out");
    let output = lab(&out, &["poll=event,never,absent"]).output().unwrap();
    let text = words(&output);
    // A cell failed: --assert fails.
    assert_eq!(output.status.code(), Some(1), "{text}");
    // Six with a result, and twelve attempts without one.
    assert_eq!(runs(&out), 18, "{text}");
    let file = std::fs::read_to_string(out.join("runs.csv")).unwrap();
    assert_eq!(file.matches(",broken by design,").count(), 6, "{file}");
    for word in ["FAILED: broken by design", "skipped: no-such-tool", "no-such-tool"] {
        assert!(text.contains(word), "{text}");
    }
    for file in ["report.html", "plan.toml", "machine.json", "summary.json"] {
        assert!(out.join(file).exists(), "{file}");
    }
    let output = lab(&common::folder("whole-2"), &["poll=event"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", words(&output));
}

/// Their processes are in no namespace of ours.
fn others_are_seen_from_inside() {
    let out = common::folder("others").join("out");
    let mut busy = Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
    let output = lab(&out, &["poll=event", "load=1", "seconds=0.5"]).output();
    busy.kill().unwrap();
    busy.wait().unwrap();
    let text = words(&output.unwrap());
    assert!(text.contains("(other programs used"), "{text}");
}

fn a_signal_leaves_what_is_done() {
    for (name, signal, status) in [("INT", 2, 130), ("TERM", 15, 143)] {
        let out = common::folder(&format!("signal-{signal}")).join("out");
        let child = hanging(&out);
        kill(name, child.id());
        let output = child.wait_with_output().unwrap();
        let text = words(&output);
        assert_eq!(output.status.code(), Some(status), "{text}");
        assert!(text.contains("interrupted: 2 of 8 runs done; the same command resumes"), "{text}");
        assert_eq!(runs(&out), 2);
        assert!(out.join("summary.json").exists());
        nothing_is_left();
    }
}

fn a_second_signal_ends_it_at_once() {
    let child = hanging(&common::folder("twice").join("out"));
    kill("INT", child.id());
    kill("TERM", child.id());
    let output = child.wait_with_output().unwrap();
    let text = words(&output);
    assert!(matches!(output.status.code(), Some(130 | 143)), "{text}");
    // Else huge pages that it has reserved stay reserved.
    assert!(text.contains(RETURNED), "{text}");
    nothing_is_left();
}

fn killed_in_the_middle() {
    let out = common::folder("killed").join("out");
    let mut child = hanging(&out);
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    nothing_is_left();
    assert_eq!(runs(&out), 2);
}

fn the_one_in_between_killed() {
    let child = hanging(&common::folder("between").join("out"));
    let between = children_of(child.id());
    assert_eq!(between.len(), 1);
    kill("KILL", between[0]);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(137), "{}", words(&output));
    nothing_is_left();
}

fn children_of(parent: u32) -> Vec<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let is_child = |path: &PathBuf| {
        let stat = std::fs::read_to_string(path.join("stat")).unwrap_or_default();
        let field = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1));
        field == Some(parent.to_string().as_str())
    };
    let found = processes.filter(is_child);
    found.filter_map(|path| path.file_name()?.to_str()?.parse().ok()).collect()
}

fn kill(signal: &str, pid: u32) {
    let status = Command::new("kill").args(["-s", signal, &pid.to_string()]).status().unwrap();
    assert!(status.success());
}
