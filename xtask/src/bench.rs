//! `cargo xtask bench --before COMMIT`: this tree beside another commit, run for run.
//!
//! Both are built in release form, the commit in a worktree under `target/before`. A pair is three
//! runs of `bench forward`: of the commit, of this tree, and of the commit again, which shows how
//! far equals differ. Each run has its own copy of the program: where a file lies in the page cache
//! is worth several per cent. Then empty polls of a worker that spins on two queues, as the daemon
//! itself counts them, and with valgrind the instructions of each frame in `Ingress::burst`.
//! `--counts` counts only these, as `cargo xtask counts` does: they do not depend on how busy the
//! machine is.
//!
//! `cargo xtask bench --results DIR` measures this tree only, and stores the runs as a folder of
//! results of the lab, from which documents take their figures.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::command::succeed;
use crate::counts;

use self::results::Run;

mod results;

const USAGE: &str = "usage: cargo xtask bench --before COMMIT [--pairs N | --counts] [--cpu N] \
    [WORDS...]\n       \
    cargo xtask bench --results DIR [--pairs N] [--cpu N] [WORDS...]\n\
    Cases of `bench forward` whose names contain all WORDS; 10 pairs on CPU 1 by default.\n\
    --counts: instructions of each frame only, as a Markdown table.\n\
    --results: of this tree only, into a new folder of results of the lab; a pair is one run.";
/// Turns of each case in a run.
const TURNS: &str = "5";
/// For how long polls are counted.
const POLLED: Duration = Duration::from_secs(2);

struct Options {
    /// Empty with `results`.
    before: String,
    results: Option<PathBuf>,
    pairs: usize,
    /// Instructions only.
    counts: bool,
    cpu: String,
    words: Vec<String>,
}

/// One build: the daemon and the benchmark.
struct Build {
    daemon: PathBuf,
    bench: PathBuf,
}

/// What was measured of one case: in each pair, of the commit, of this tree, of the commit again.
type Pairs = BTreeMap<String, Vec<[Option<f64>; 3]>>;

/// Runs it.
///
/// # Errors
/// What is wrong with the arguments; a program that cannot be built or run.
pub fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
    let options = parse(arguments)?;
    if let Some(out) = &options.results {
        return store(root, &options, arguments, out);
    }
    let folder = root.join("target/before").join(&options.before);
    if !folder.join("Cargo.toml").exists() {
        let add = ["worktree", "add", "--force", "--detach"];
        let mut git = Command::new("git");
        succeed(git.current_dir(root).args(add).arg(&folder).arg(&options.before))?;
    }
    let builds = [build(&folder)?, build(root)?];
    if options.counts {
        let cases = forward(&builds[1].bench, &options.words, &options.cpu, "1")?;
        return instructions(&builds, cases.iter().map(|(name, _)| name), &options);
    }
    let runs = [(&builds[0], "before"), (&builds[1], "now"), (&builds[0], "again")];

    let mut frames = Pairs::new();
    let mut polls = Pairs::new();
    for pair in 0..options.pairs {
        println!("pair {} of {}", pair + 1, options.pairs);
        for (i, (build, _)) in runs.iter().enumerate() {
            let copy = Copy::of(root, &build.bench)?;
            for (name, ns) in forward(&copy.0, &options.words, &options.cpu, TURNS)? {
                let all = frames.entry(name).or_insert_with(|| vec![[None; 3]; options.pairs]);
                all[pair][i] = Some(ns);
            }
            let copy = Copy::of(root, &build.daemon)?;
            let name = "empty poll of the daemon".to_string();
            let all = polls.entry(name).or_insert_with(|| vec![[None; 3]; options.pairs]);
            all[pair][i] = Some(empty_poll(&copy.0, &options.cpu)?);
        }
    }
    println!("\nns, median; rate of this tree over {}: median (least to greatest)", options.before);
    println!("{:40} {:>8} {:>8}  {:20} the commit over itself", "", "before", "now", "ratio");
    for (name, pairs) in frames.iter().chain(&polls) {
        println!("{}", row(name, pairs));
    }
    instructions(&builds, frames.keys(), &options)
}

/// Measures this tree, and stores the runs in the new folder `out`.
fn store(root: &Path, options: &Options, arguments: &[String], out: &Path) -> Result<(), String> {
    if out.exists() {
        return Err(format!("--results: {} exists: use a new folder", out.display()));
    }
    println!("building {}", root.display());
    let lab = built(root, &["build", "--release", "--bin", "pvswitch-lab"], "pvswitch-lab")?;
    let bench = build_bench(root)?;
    let mut runs = Vec::new();
    for round in 0..options.pairs {
        println!("run {} of {}", round + 1, options.pairs);
        let copy = Copy::of(root, &bench)?;
        let cases = forward(&copy.0, &options.words, &options.cpu, TURNS)?.into_iter();
        let before = runs.len();
        runs.extend(cases.filter_map(|(name, ns)| Run::of(&name, round, false, ns)));
        // The control: the first case once more.
        if let Some(words) = runs.get(before).map(|first| first.words().map(String::from)) {
            let again = forward(&copy.0, &words, &options.cpu, TURNS)?.into_iter();
            let again = again.filter(|(name, _)| name.split_whitespace().eq(&words));
            runs.extend(again.filter_map(|(name, ns)| Run::of(&name, round, true, ns)));
        }
    }
    if runs.is_empty() {
        let words = options.words.join(" ");
        return Err(format!("no case RING FORWARD FEATURE SIZE contains '{words}'"));
    }
    let file = root.join("target").join(format!("bench-{}.json", std::process::id()));
    let text = results::measured(&runs, &bench, &options.cpu, arguments).to_string();
    std::fs::write(&file, text).map_err(|error| format!("{}: {error}", file.display()))?;
    let said = succeed(Command::new(lab).arg("import").arg(&file).arg("--out").arg(out));
    let _ = std::fs::remove_file(&file);
    println!("{}", said?.trim_end());
    Ok(())
}

fn parse(arguments: &[String]) -> Result<Options, String> {
    let mut options = Options {
        before: String::new(),
        results: None,
        pairs: 10,
        counts: false,
        cpu: "1".into(),
        words: Vec::new(),
    };
    let mut left = arguments.iter();
    while let Some(word) = left.next() {
        let mut value =
            || left.next().ok_or_else(|| format!("{word}: a value is missing\n{USAGE}"));
        match word.as_str() {
            "--before" => options.before = value()?.clone(),
            "--results" => options.results = Some(value()?.into()),
            "--counts" => options.counts = true,
            "--cpu" => options.cpu = value()?.clone(),
            "--pairs" => {
                let n = value()?;
                let pairs = n.parse().ok().filter(|n| *n > 0);
                options.pairs =
                    pairs.ok_or_else(|| format!("--pairs {n}: not a number above 0"))?;
            }
            _ if word.starts_with('-') => return Err(format!("{word}: unknown\n{USAGE}")),
            _ => options.words.push(word.clone()),
        }
    }
    if options.before.is_empty() != options.results.is_some()
        || (options.before.is_empty() && options.counts)
    {
        return Err(USAGE.into());
    }
    Ok(options)
}

fn build(folder: &Path) -> Result<Build, String> {
    println!("building {}", folder.display());
    let daemon = built(folder, &["build", "--release", "--bin", "pvswitch"], "pvswitch")?;
    Ok(Build { daemon, bench: build_bench(folder)? })
}

/// Builds the benchmark of a tree.
pub fn build_bench(folder: &Path) -> Result<PathBuf, String> {
    if folder.join("crates/guest/benches/program").exists() {
        // Not by its package alone, which would have other features of its dependencies.
        let features = ["--features", "pvswitch-guest/bench", "--bin", "forward"];
        return built(folder, &[&["build", "--release"], &features[..]].concat(), "forward");
    }
    // Commits before it was moved.
    let here = folder.join("crates/guest/benches").exists();
    let package = if here { "pvswitch-guest" } else { "pvswitch" };
    built(folder, &["bench", "--no-run", "-p", package, "--bench", "forward"], "forward")
}

/// Builds a program in a tree.
fn built(folder: &Path, words: &[&str], target: &str) -> Result<PathBuf, String> {
    let mut cargo = Command::new(crate::tidy::cargo());
    let json = ["--message-format", "json-render-diagnostics"];
    let cargo = cargo.current_dir(folder).args(words).args(json);
    // Of its own: this program runs under cargo.
    let messages = succeed(cargo.env_remove("CARGO_TARGET_DIR"))?;
    let messages = messages.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    let of_target = messages.filter(|message| message["target"]["name"] == target);
    let mut programs = of_target.filter_map(|m| m["executable"].as_str().map(PathBuf::from));
    programs.next().ok_or_else(|| format!("{}: {words:?} built no {target}", folder.display()))
}

/// A program's copy, in a fresh file.
struct Copy(PathBuf);

impl Copy {
    fn of(root: &Path, program: &Path) -> Result<Self, String> {
        let path = root.join("target").join(format!("bench-{}", std::process::id()));
        let copied = std::fs::copy(program, &path);
        copied.map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// One run of the benchmark: cases and their ns.
fn forward(
    bench: &Path,
    words: &[String],
    cpu: &str,
    turns: &str,
) -> Result<Vec<(String, f64)>, String> {
    let mut command = Command::new("taskset");
    command.args(["-c", cpu]).arg(bench).args(words).env("TURNS", turns);
    Ok(succeed(&mut command)?.lines().filter_map(case).collect())
}

/// Reads `NAME  12.3 ns a frame (...`.
pub fn case(line: &str) -> Option<(String, f64)> {
    let (before, _) = line.split_once(" ns a")?;
    let (name, ns) = before.rsplit_once(' ')?;
    Some((name.trim().into(), ns.parse().ok()?))
}

/// Ended with the run.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Nanoseconds for each poll of two queues of guests that only receive.
fn empty_poll(daemon: &Path, cpu: &str) -> Result<f64, String> {
    let at = |name: &str| daemon.with_extension(name).display().to_string();
    let (a, b, control) = (at("a"), at("b"), at("ctl"));
    let start = |words: &[&str]| {
        let mut command = Command::new(daemon);
        command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().map(Running).map_err(|error| format!("{}: {error}", daemon.display()))
    };
    let spins = ["run", "--quiet", "--forward", "cross", "--poll", "spin", "--workers", "1"];
    let ports = [format!("a=vhost-user:{a}"), format!("b=vhost-user:{b}")];
    let more = ["--cpus", cpu, "--control", &control, "--port", &ports[0], "--port", &ports[1]];
    let _switch = start(&[&spins[..], &more].concat())?;
    let stats = || {
        let mut ctl = Command::new(daemon);
        ctl.args(["ctl", "--control", &control, "stats", "--json"]).stderr(Stdio::null());
        let stats = serde_json::from_slice::<Value>(&ctl.output().ok()?.stdout).ok()?;
        let ports = stats["ports"].as_array()?;
        let queues = ports.iter().flat_map(|port| port["ingress"].as_array().into_iter().flatten());
        let polls: u64 = queues.filter_map(|queue| queue["polls"].as_u64()).sum();
        Some((Instant::now(), polls))
    };
    wait_for("a control socket", || stats().is_some())?;
    let sink = |socket: &str| {
        start(&["gen", "--mode", "sink", "--connect", &format!("vhost-user:{socket}")])
    };
    let _guests = [sink(&a)?, sink(&b)?];
    let mut last = 0;
    wait_for("polls of two guests", || {
        let now = stats().map_or(0, |(_, polls)| polls);
        now - std::mem::replace(&mut last, now) > 100_000
    })?;
    let before = stats().ok_or("no counters")?;
    std::thread::sleep(POLLED);
    let after = stats().ok_or("no counters")?;
    Ok((after.0 - before.0).as_nanos() as f64 / (after.1 - before.1).max(1) as f64)
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) -> Result<(), String> {
    let end = Instant::now() + Duration::from_secs(20);
    while !done() {
        if Instant::now() > end {
            return Err(format!("{what}: none within 20 s"));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn row(name: &str, pairs: &[[Option<f64>; 3]]) -> String {
    let of = |i: usize| median(pairs.iter().filter_map(|pair| pair[i]).collect());
    let ratio = |i: usize| {
        let ratios = pairs.iter().filter_map(|pair| Some(pair[0]? / pair[i]?));
        let mut ratios: Vec<f64> = ratios.collect();
        ratios.sort_by(f64::total_cmp);
        let (Some(least), Some(most)) = (ratios.first(), ratios.last()) else {
            return "-".to_string();
        };
        format!("{:.3} ({least:.2} to {most:.2})", median(ratios.clone()).unwrap_or(0.0))
    };
    let ns = |value: Option<f64>| value.map_or("-".into(), |ns| format!("{ns:.1}"));
    format!("{name:40} {:>8} {:>8}  {:20} {}", ns(of(0)), ns(of(1)), ratio(1), ratio(2))
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (low, high) =
        (values.get(values.len().checked_sub(1)? / 2)?, values.get(values.len() / 2)?);
    Some(f64::midpoint(*low, *high))
}

/// Prints the instructions of each case, see [`counts`].
fn instructions<'a>(
    builds: &[Build; 2],
    cases: impl Iterator<Item = &'a String>,
    options: &Options,
) -> Result<(), String> {
    if let Err(why) = counts::can_count() {
        let what = format!("instructions: not counted: {why}");
        // Where they are all that is asked for, it fails.
        return if options.counts {
            Err(what)
        } else {
            println!("\n{what}");
            Ok(())
        };
    }
    println!("\n| {:40} | {:>9} | {:>9} | {:>6} |", "instructions", "before", "now", "change");
    println!("|---|---|---|---|");
    for name in cases.filter(|name| options.words.iter().all(|word| name.contains(word))) {
        let (before, now) =
            (counts::count(&builds[0].bench, name)?, counts::count(&builds[1].bench, name)?);
        println!("{}", row_of_counts(name, before, now));
    }
    Ok(())
}

/// A row of a Markdown table.
fn row_of_counts(name: &str, before: Option<f64>, now: Option<f64>) -> String {
    let shown = |count: Option<f64>| count.map_or("-".into(), |count| format!("{count:.0}"));
    let change = before.zip(now).filter(|(before, _)| *before > 0.0);
    let change = change.map(|(before, now)| format!("{:+.1} %", 100.0 * (now / before - 1.0)));
    let change = change.unwrap_or("-".into());
    format!("| {name:40} | {:>9} | {:>9} | {change:>6} |", shown(before), shown(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_benchmark_are_parsed() {
        let line = "split cross plain 60                       52.1 ns a frame (51-53), 19.19 M/s";
        assert_eq!(case(line), Some(("split cross plain 60".into(), 52.1)));
        assert_eq!(case("warning: unused"), None);
    }

    #[test]
    fn pairs_stay_pairs() {
        let pairs = [[Some(10.0), Some(5.0), Some(10.0)], [Some(30.0), Some(10.0), Some(20.0)]];
        let row = row("a", &pairs);
        assert!(
            row.contains("2.500 (2.00 to 3.00)") && row.ends_with("1.250 (1.00 to 1.50)"),
            "{row}"
        );
        let one_side = [[None, Some(5.0), None]];
        assert!(super::row("a", &one_side).ends_with('-'));
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(Vec::new()), None);
    }

    #[test]
    fn counts_are_rows_of_a_table() {
        let row = row_of_counts("split cross plain 60", Some(200.0), Some(190.4));
        assert!(row.ends_with("|       200 |       190 | -4.8 % |"), "{row}");
        assert!(
            row_of_counts("vif", None, Some(1.0)).ends_with("|         - |         1 |      - |")
        );
    }

    #[test]
    fn arguments_are_checked() {
        let parse = |words: &str| parse(&words.split(' ').map(String::from).collect::<Vec<_>>());
        assert_eq!(parse("--before HEAD --pairs 3 split 60").unwrap().words, ["split", "60"]);
        assert!(parse("--before HEAD --counts plain").unwrap().counts);
        assert!(parse("--results there --pairs 3 switch").unwrap().results.is_some());
        for bad in [
            "",
            "--before",
            "--before HEAD --pairs 0",
            "--before HEAD --turns 3",
            "--before HEAD --results there",
            "--results there --counts",
        ] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
