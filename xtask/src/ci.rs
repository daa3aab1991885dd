//! `cargo xtask ci`: runs every step, also after a failure, so that one run reports all failures.
//! Each step shows its time and the CPU time of its processes.
//! The last line counts steps, studies of the lab and rigs: `N passed, N failed, N skipped`.
//!
//! `cargo xtask ci weekly`: the long forms, one after another, and a table of them at the end.
//!
//! Two steps at a time: those `beside` the others, one after another, build in release form.
//!
//! No step reads input. With `CI` set in the environment, a step that exceeds its time limit is
//! killed with its process group; otherwise an interrupt at the terminal ends all processes.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

mod weekly;

/// One step.
struct Step {
    name: &'static str,
    /// Time limit in CI, in minutes.
    limit_min: u64,
    /// Program and arguments; `cargo` is the cargo that runs this program, `xtask` this program.
    command: &'static str,
    env: &'static [(&'static str, &'static str)],
    /// The step is skipped if this file is missing.
    needs: &'static str,
    kind: Kind,
    /// It runs beside the others; its output is shown in one piece at its end.
    beside: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Its output is shown only if it fails.
    Quiet,
    /// Its output has result lines of Rust's test harness, which are summed up.
    Tests,
    /// Its output is shown at once, and ends with its counts: `N passed, N failed, N skipped`.
    Rigs,
}

const NO_ENV: &[(&str, &str)] = &[];

const STEPS: [Step; 16] = [
    // Without -p: with the features of all packages, as `cargo run` and `cargo build` do.
    step(
        "build",
        20,
        "cargo build --quiet --release --bin pvswitch",
        NO_ENV,
        "Cargo.toml",
        Kind::Quiet,
    )
    .beside(),
    step(
        "demo",
        5,
        "cargo run --quiet --release -- demo --plain --scene 0.3",
        NO_ENV,
        "Cargo.toml",
        Kind::Quiet,
    )
    .beside(),
    step("static", 10, "xtask static --check", NO_ENV, "Cargo.toml", Kind::Rigs).beside(),
    step("deny", 5, "xtask deny", NO_ENV, "deny.toml", Kind::Rigs).beside(),
    step("counts", 45, "xtask counts", NO_ENV, crate::counts::BASELINE, Kind::Rigs).beside(),
    step(
        "loom",
        20,
        "cargo test -p pvswitch-ring -p pvswitch-vhost-user --test loom* --release \
            --target-dir target/loom",
        &[("RUSTFLAGS", "--cfg loom"), ("CARGO_PROFILE_RELEASE_LTO", "off")],
        "crates/ring/tests/loom.rs",
        Kind::Tests,
    )
    .beside(),
    // Models of what is private: beside it, in modules of this name.
    step(
        "models",
        10,
        "cargo test -p pvswitch-shm -p pvswitch-switch --lib --release --target-dir target/loom \
            models",
        &[("RUSTFLAGS", "--cfg loom"), ("CARGO_PROFILE_RELEASE_LTO", "off")],
        "crates/switch/src/handover/models.rs",
        Kind::Tests,
    )
    .beside(),
    step("xen", 60, "rigs/run --quick xen", NO_ENV, "rigs/run", Kind::Rigs).beside(),
    step("lab", 30, "xtask lab", NO_ENV, "crates/lab/Cargo.toml", Kind::Rigs).beside(),
    step("fmt", 5, "cargo fmt --all --check", NO_ENV, "Cargo.toml", Kind::Quiet),
    step("tidy", 5, "xtask tidy", NO_ENV, "Cargo.toml", Kind::Quiet),
    step(
        "clippy",
        20,
        "cargo clippy --quiet --workspace --all-targets -- -D warnings",
        NO_ENV,
        "Cargo.toml",
        Kind::Quiet,
    ),
    // A racing guest for a minute: 20 s for each kind of ring.
    step("test", 40, "xtask test", &[("PVSWITCH_RACING", "20")], "Cargo.toml", Kind::Tests),
    step(
        "doc",
        10,
        "cargo doc --quiet --workspace --no-deps",
        &[("RUSTDOCFLAGS", "-D warnings")],
        "Cargo.toml",
        Kind::Quiet,
    ),
    step(
        "audit",
        15,
        "cargo test -p pvswitch-ring --features audit --test audit*",
        NO_ENV,
        "crates/ring/tests/audit.rs",
        Kind::Tests,
    ),
    // Two at a time, because most of them mostly wait; after the tests, because the virtual
    // machines of some take all CPUs.
    step("rigs", 40, "rigs/run --quick --jobs 2 --except xen", NO_ENV, "rigs/run", Kind::Rigs),
];

const fn step(
    name: &'static str,
    limit_min: u64,
    command: &'static str,
    env: &'static [(&'static str, &'static str)],
    needs: &'static str,
    kind: Kind,
) -> Step {
    Step { name, limit_min, command, env, needs, kind, beside: false }
}

/// Results of steps, studies and rigs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// They passed.
    pub passed: u32,
    /// They failed.
    pub failed: u32,
    /// They were left out.
    pub skipped: u32,
}

const PASSED: Counts = Counts { passed: 1, failed: 0, skipped: 0 };
const FAILED: Counts = Counts { passed: 0, failed: 1, skipped: 0 };
const SKIPPED: Counts = Counts { passed: 0, failed: 0, skipped: 1 };

/// Result of a step.
struct Outcome {
    counts: Counts,
    /// Lines that name its failed rigs, studies or tests.
    parts: Vec<String>,
    took: Duration,
}

impl From<Counts> for Outcome {
    fn from(counts: Counts) -> Self {
        Self { counts, parts: Vec::new(), took: Duration::ZERO }
    }
}

impl Counts {
    /// Adds those of others.
    pub fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    /// Sums of the lines `test result: ok. 3 passed; 0 failed; 1 ignored; ...` of test programs.
    pub fn of_tests(output: &str) -> Self {
        let mut all = Self::default();
        for line in output.lines().filter(|line| line.starts_with("test result: ")) {
            let count = |word| {
                let (before, _) = line.split_once(word)?;
                before.rsplit(' ').next()?.parse().ok()
            };
            let count = |word| count(word).unwrap_or(0);
            let (passed, failed) = (count(" passed"), count(" failed"));
            all.add(Self { passed, failed, skipped: count(" ignored") });
        }
        all
    }

    /// Reads `N passed, N failed, N skipped`.
    fn parse(line: &str) -> Option<Self> {
        let mut parts = line.trim().split(", ");
        let mut next = |word| parts.next()?.strip_suffix(word)?.trim().parse().ok();
        let counts =
            Self { passed: next("passed")?, failed: next("failed")?, skipped: next("skipped")? };
        parts.next().is_none().then_some(counts)
    }
}

/// Names of all steps, and of those of the weekly form.
pub fn names() -> [Vec<&'static str>; 2] {
    [&STEPS[..], &weekly::STEPS].map(|steps| steps.iter().map(|step| step.name).collect())
}

/// Runs the steps named, or all, after `weekly` those of the weekly form; returns whether all
/// passed.
///
/// # Errors
/// A step that does not exist.
pub fn run(root: &Path, arguments: &[String]) -> Result<bool, String> {
    let [usual, long] = names();
    let is_weekly = arguments.first().is_some_and(|word| word == "weekly");
    let wanted = &arguments[usize::from(is_weekly)..];
    let (steps, known) = if is_weekly { (&weekly::STEPS[..], long) } else { (&STEPS[..], usual) };
    if let Some(unknown) = wanted.iter().find(|name| !known.contains(&name.as_str())) {
        return Err(format!("no step '{unknown}'; there are: {}", known.join(", ")));
    }
    let begun = Instant::now();
    let limited = crate::command::in_ci();
    let mut counts = Counts::default();
    let mut failures = Vec::new();
    let run_those = |beside: bool| -> Vec<(&str, Outcome)> {
        let wanted = |s: &&Step| wanted.is_empty() || wanted.iter().any(|name| name == s.name);
        let steps = steps.iter().filter(|step| step.beside == beside).filter(wanted);
        steps.map(|step| (step.name, step.run(root, limited))).collect()
    };
    let outcomes = std::thread::scope(|scope| {
        let beside = scope.spawn(|| run_those(true));
        let mut outcomes = run_those(false);
        outcomes.extend(beside.join().expect("it does not panic"));
        outcomes
    });
    if is_weekly {
        println!("{}", weekly::table(&outcomes));
    }
    for (name, outcome) in outcomes {
        if outcome.counts.failed > 0 {
            failures.push((name, outcome.parts));
        }
        counts.add(outcome.counts);
    }
    println!();
    // Failures again, for a reader of only the end of the output.
    for (step, parts) in failures {
        println!("failed: {step}");
        parts.iter().for_each(|part| println!("   {part}"));
    }
    println!("in {:.0} s", begun.elapsed().as_secs_f64());
    let Counts { passed, failed, skipped } = counts;
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    Ok(failed == 0)
}

impl Step {
    const fn beside(mut self) -> Self {
        self.beside = true;
        self
    }

    /// Runs it; `limited`: kills its process group after the time limit.
    fn run(&self, root: &Path, limited: bool) -> Outcome {
        if !root.join(self.needs).exists() {
            println!("-- {:8} skipped: there is no {}", self.name, self.needs);
            return SKIPPED.into();
        }
        let how = if self.beside { " (beside others)" } else { "" };
        println!("-- {:8} {}{how}", self.name, self.command);
        let begun = Instant::now();
        let mut cpu = Duration::ZERO;
        let ran = match self.kind {
            Kind::Rigs => self.stream(root, limited, &mut cpu),
            Kind::Quiet | Kind::Tests => self.capture(root, limited, &mut cpu),
        };
        let (took, cpu) = (begun.elapsed().as_secs_f64(), cpu.as_secs());
        let (mut outcome, words) = ran.unwrap_or_else(|error| (FAILED.into(), error));
        outcome.took = begun.elapsed();
        let verdict = if outcome.counts.failed > 0 { "FAILED" } else { "ok" };
        println!("   {:8} {verdict} in {took:.1} s, {cpu} s of CPU {words}", self.name);
        outcome
    }

    fn command(&self, root: &Path, limited: bool) -> Command {
        let mut words = self.command.split_whitespace();
        let program = words.next().expect("a command has a program");
        let mut command = match program {
            "cargo" => Command::new(crate::tidy::cargo()),
            // Not through cargo, which would wait for the build of a step beside it.
            "xtask" => Command::new(std::env::current_exe().unwrap_or_else(|_| "xtask".into())),
            path => Command::new(root.join(path)),
        };
        command.args(words).envs(self.env.iter().copied()).current_dir(root).stdin(Stdio::null());
        if limited {
            // Nothing is built a second time, and nobody looks at it with a debugger.
            command.env("CARGO_INCREMENTAL", "0");
            command.env("CARGO_PROFILE_DEV_DEBUG", "0").env("CARGO_PROFILE_RELEASE_DEBUG", "0");
            command.process_group(0);
        }
        command
    }

    /// Runs with output to a file, which is shown if the step fails.
    fn capture(
        &self,
        root: &Path,
        limited: bool,
        cpu: &mut Duration,
    ) -> Result<(Outcome, String), String> {
        let log = root.join("target").join("xtask").join(self.name).with_extension("log");
        let of_log = |error: std::io::Error| format!("{}: {error}", log.display());
        std::fs::create_dir_all(log.parent().expect("a folder")).map_err(of_log)?;
        let out = File::create(&log).map_err(of_log)?;
        let err = out.try_clone().map_err(of_log)?;
        let child = self.command(root, limited).stdout(out).stderr(err).spawn();
        let child = child.map_err(|error| format!("cannot run {}: {error}", self.command))?;
        let ended = self.wait(child, limited, cpu);
        let bytes = std::fs::read(&log).map_err(of_log)?;
        let text = String::from_utf8_lossy(&bytes);
        match ended {
            Ok(status) if status.success() => {
                let words = if self.kind == Kind::Tests { tests(&text) } else { String::new() };
                Ok((PASSED.into(), words))
            }
            ended => {
                for line in text.lines().filter(|line| !is_success(line)) {
                    println!("   {line}");
                }
                let parts = if self.kind == Kind::Tests { failed_tests(&text) } else { Vec::new() };
                Ok((Outcome { parts, ..FAILED.into() }, why(ended)))
            }
        }
    }

    /// Runs with output shown at once, or at the end of a step beside others; takes counts from the
    /// last line that has them.
    fn stream(
        &self,
        root: &Path,
        limited: bool,
        cpu: &mut Duration,
    ) -> Result<(Outcome, String), String> {
        let mut child = self
            .command(root, limited)
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("cannot run {}: {error}", self.command))?;
        let out = child.stdout.take().expect("piped");
        let at_once = !self.beside;
        let reader = std::thread::spawn(move || {
            let (mut counts, mut parts, mut later) = (None, Vec::new(), String::new());
            for line in BufReader::new(out).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line);
                match Counts::parse(&line) {
                    // Not printed: the last line of all steps is the only one with counts.
                    Some(n) => counts = Some(n),
                    None if at_once => println!("   {line}"),
                    None => later += &format!("   {line}\n"),
                }
                if line.starts_with("failed ") {
                    parts.push(line.into_owned());
                }
            }
            print!("{later}");
            (counts, parts)
        });
        let ended = self.wait(child, limited, cpu);
        if matches!(&ended, Ok(status) if status.success() || status.code() == Some(1)) {
            let (counts, parts) = reader.join().unwrap_or_default();
            if let Some(n) =
                counts.filter(|n| matches!(&ended, Ok(s) if s.success()) || n.failed > 0)
            {
                let words = format!("({}/{}/{})", n.passed, n.failed, n.skipped);
                return Ok((Outcome { parts, ..n.into() }, words));
            }
        }
        Err(why(ended))
    }

    /// Waits; `limited`: kills the step's process group after the time limit. `cpu`: time of the
    /// child and of the processes that it waited for.
    fn wait(
        &self,
        mut child: Child,
        limited: bool,
        cpu: &mut Duration,
    ) -> Result<ExitStatus, String> {
        let end = Instant::now() + Duration::from_secs(self.limit_min * 60);
        loop {
            *cpu = cpu_time(child.id()).unwrap_or(*cpu);
            match child.try_wait() {
                Ok(Some(status)) => return Ok(status),
                Ok(None) if limited && Instant::now() >= end => {
                    end_group(&mut child);
                    return Err(format!("ended after {} minutes", self.limit_min));
                }
                Ok(None) => std::thread::sleep(Duration::from_millis(50)),
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}

/// CPU time of a process, which may have ended but was not waited for, and of those it waited for.
fn cpu_time(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field, in brackets, may contain spaces; utime to cstime are fields 14 to 17.
    let fields = stat.rsplit_once(')')?.1.split_whitespace();
    let ticks: u64 = fields.skip(11).take(4).map_while(|n| n.parse::<u64>().ok()).sum();
    Some(Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second()))
}

/// Whether a line of a test harness reports success.
fn is_success(line: &str) -> bool {
    let passed = line.starts_with("test ") && line.ends_with(" ... ok");
    let empty = line.is_empty() || line == "successes:";
    passed || empty || line.starts_with("running ") || line.starts_with("test result: ok.")
}

fn why(ended: Result<ExitStatus, String>) -> String {
    ended.map_or_else(|error| error, |status| status.to_string())
}

/// Ends a child and its process group: by SIGTERM, then by SIGKILL.
fn end_group(child: &mut Child) {
    for signal in ["TERM", "KILL"] {
        let kill = format!("kill -s {signal} -- -{}", child.id());
        let _ = Command::new("sh").args(["-c", &kill]).stderr(Stdio::null()).status();
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end {
            if matches!(child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The number of tests that passed, and those that were skipped, each reason once.
fn tests(text: &str) -> String {
    let left_out: BTreeSet<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix("skipped: "))
        .map(|why| format!("\n     left out: {why}"))
        .collect();
    let passed = Counts::of_tests(text).passed;
    format!("({passed} tests){}", left_out.into_iter().collect::<String>())
}

/// The most lines of a failed test's output that are repeated.
const FAILED_TEST_LINES: usize = 12;

/// Failed tests in the output of test harnesses, each with the first lines of what it printed.
fn failed_tests(text: &str) -> Vec<String> {
    let mut parts = Vec::new();
    let (mut are_failures, mut left) = (false, 0);
    for line in text.lines() {
        match line {
            "failures:" => (are_failures, left) = (true, 0),
            "successes:" => are_failures = false,
            _ if line.starts_with("test result: ") => are_failures = false,
            _ if !are_failures => {}
            _ if line.starts_with("---- ") => {
                parts.push(line.into());
                left = FAILED_TEST_LINES;
            }
            "" => {}
            _ if left > 0 => {
                parts.push(format!("   {line}"));
                left -= 1;
            }
            _ => {}
        }
    }
    // A program that ended without results: its name.
    parts.extend(text.lines().filter(|line| line.starts_with("failed: ")).map(Into::into));
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_tests_are_listed_with_what_they_printed() {
        let text = "test a ... ok\ntest b ... FAILED\n\nsuccesses:\n\n---- a stdout ----\nx\n\n\
                    successes:\n    a\n\nfailures:\n\n---- b stdout ----\n\
                    thread 'b' panicked at b.rs:1:2:\nlate\n\n\nfailures:\n    b\n\n\
                    test result: FAILED. 1 passed; 1 failed\nfailed: c\n";
        let parts =
            ["---- b stdout ----", "   thread 'b' panicked at b.rs:1:2:", "   late", "failed: c"];
        assert_eq!(failed_tests(text), parts);
    }

    #[test]
    fn results_are_summed_over_test_programs() {
        let text = "running 3 tests\n\
            test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 30 filtered out\n\
            test result: FAILED. 1 passed; 4 failed; 0 ignored; 0 measured; 0 filtered out\n";
        assert_eq!(Counts::of_tests(text), Counts { passed: 3, failed: 4, skipped: 1 });
        assert_eq!(Counts::of_tests("error: no tests"), Counts::default());
    }

    #[test]
    fn only_lines_of_three_counts_are_parsed() {
        let n = Counts { passed: 12, failed: 0, skipped: 3 };
        assert_eq!(Counts::parse("12 passed, 0 failed, 3 skipped\n"), Some(n));
        for line in ["", "1 passed", "1 passed, 2 failed, 3 skipped, 4", "a passed, 0 failed, 0 x"]
        {
            assert_eq!(Counts::parse(line), None, "{line}");
        }
    }

    #[test]
    fn test_results_are_summed_up() {
        let text = "test result: ok. 3 passed; 0 failed; 0 ignored\nskipped: no tun\n\
                    test result: ok. 4 passed; 0 failed; 0 ignored\nskipped: no tun\n";
        assert_eq!(tests(text), "(7 tests)\n     left out: no tun");
    }

    /// Outcome of a rig runner that runs `script`.
    fn rigs(name: &str, script: &str, limited: bool) -> Outcome {
        let root = std::env::temp_dir().join(format!("xtask-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&root).unwrap();
        std::fs::write(root.join("script"), script).unwrap();
        std::os::unix::fs::symlink("/bin/sh", root.join("sh")).unwrap();
        let step = step("rigs", 0, "sh script", NO_ENV, "script", Kind::Rigs);
        let outcome = step.run(&root, limited);
        std::fs::remove_dir_all(&root).unwrap();
        outcome
    }

    #[test]
    fn rigs_without_counts_have_failed() {
        let n = |passed, failed, skipped| Counts { passed, failed, skipped };
        let script = |words: &str, status: u8| format!("echo == a\necho {words}\nexit {status}\n");
        let rigs = |name: &str, script: &str, limited| rigs(name, script, limited).counts;
        assert_eq!(rigs("good", &script("3 passed, 0 failed, 2 skipped", 0), false), n(3, 0, 2));
        assert_eq!(rigs("bad", &script("3 passed, 1 failed, 0 skipped", 1), false), n(3, 1, 0));
        assert_eq!(rigs("status", &script("3 passed, 0 failed, 0 skipped", 1), false), FAILED);
        assert_eq!(rigs("none", &script("bye", 0), false), FAILED);
        assert_eq!(rigs("long", "sleep 60\n", true), FAILED);
    }

    #[test]
    fn failed_rigs_are_listed_at_the_end() {
        let script = "echo failed '  ' b in 3 s: late\necho passed c\n\
                      echo 1 passed, 1 failed, 0 skipped\nexit 1\n";
        assert_eq!(rigs("again", script, false).parts, ["failed    b in 3 s: late"]);
    }

    #[test]
    fn cpu_time_includes_that_of_children() {
        let work = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done";
        let mut child = Command::new("sh");
        child.args(["-c", &format!("({work}); read line")]).stdin(Stdio::piped());
        let mut child = child.spawn().unwrap();
        let begun = Instant::now();
        while cpu_time(child.id()).unwrap().is_zero() {
            assert!(begun.elapsed() < Duration::from_secs(60), "no CPU time is counted");
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(cpu_time(child.id()), None);
    }

    #[test]
    fn unknown_steps_are_rejected() {
        let error = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(ToString::to_string).collect();
            run(Path::new("."), &words).unwrap_err()
        };
        let usual = error(&["fmd"]);
        assert!(usual.contains("no step 'fmd'") && usual.contains("fmt"), "{usual}");
        let weekly = error(&["weekly", "fmt"]);
        assert!(weekly.contains("no step 'fmt'") && weekly.contains("soak"), "{weekly}");
    }
}
