//! `cargo xtask fuzz`: fuzz targets, guided by coverage, from the committed inputs on.
//!
//! By cargo-fuzz, with libFuzzer, on the nightly toolchain; one execution in [`ADDRESS`] with the
//! address and leak sanitizers, which take several times as long, and all with checks of overflow
//! and debug assertions. As many targets run at a time as there are CPUs. Inputs that reach
//! something new go to `fuzz/corpus/TARGET`, which is then minimised: it is to be committed, and
//! `cargo test -p pvswitch-fuzz` begins with it. An input that fails is in `fuzz/artifacts/TARGET`.
//! `fuzz/executions.csv`, to be committed too, counts the executions of each target over all runs,
//! also of runs that were interrupted.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::command::{cpus, in_parallel, nightly, succeed};

const USAGE: &str = "usage: cargo xtask fuzz [--runs N] [TARGET...]\n\
    needed: rustup toolchain install nightly; cargo install cargo-fuzz; a C++ compiler";
/// Executions of a target unless `--runs` says otherwise.
const RUNS: u64 = 10_000_000;
/// Executions of all targets so far, a line for each.
const RECORD: &str = "fuzz/executions.csv";
const COLUMNS: &str = "target,executions,inputs,edges,edges_all,features";
/// Executions after which a run is recorded, and begins again with what it found.
const SLICE: u64 = 500_000;
/// One execution in so many has the address sanitizer.
const ADDRESS: u64 = 20;
/// Longest input, in bytes.
const LEN_MAX: &str = "-max_len=4096";
/// Time between two lines about a target that runs.
const PROGRESS: Duration = Duration::from_secs(30);

/// Sanitizer of a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sanitizer {
    /// Accesses outside allocations, and leaks.
    Address,
    None,
}

/// Results of a target, by libFuzzer's words.
#[derive(Debug, Default, PartialEq, Eq)]
struct Found {
    /// Executions.
    runs: u64,
    /// Edges of the control flow that were reached, of the target with all its crates.
    edges: u64,
    /// All edges.
    edges_all: u64,
    /// Features: edges, how often they were taken, and values compared.
    features: u64,
}

/// Runs targets, all or those named; returns whether no input failed. Prints a table; the last line
/// counts targets: `N passed, N failed, N skipped`.
///
/// # Errors
/// What is wrong with the arguments, or which program is missing.
pub fn run(root: &Path, arguments: &[String]) -> Result<bool, String> {
    let all = targets(root)?;
    let (runs, names) = parse(arguments, &all)?;
    let mut version = fuzz(root, "--version");
    succeed(&mut version).map_err(|why| format!("{why}\n{USAGE}"))?;
    for sanitizer in [Sanitizer::Address, Sanitizer::None] {
        eprintln!("builds, sanitizer: {}", sanitizer.name());
        succeed(fuzz(root, "build").args(sanitizer.options(root)))?;
    }
    println!("| target | executions | inputs kept | edges reached | of | features |");
    println!("|---|---|---|---|---|---|");
    let record = Mutex::new(root.join(RECORD));
    let passed = in_parallel(&names, cpus(), |target| {
        let row = explore(root, target, runs, &record)?;
        let failed = format!("| {target} | **failed**: fuzz/artifacts/{target} | | | | |");
        println!("{}", row.as_ref().unwrap_or(&failed));
        Ok(row.is_some())
    })?;
    let failed = passed.iter().filter(|passed| !**passed).count();
    let passed = passed.len() - failed;
    println!("{passed} passed, {failed} failed, 0 skipped");
    Ok(failed == 0)
}

impl Sanitizer {
    fn name(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::None => "none",
        }
    }

    /// Options of cargo-fuzz. In one directory, each build would replace the other's programs.
    fn options(self, root: &Path) -> [std::ffi::OsString; 4] {
        let directory = root.join("target/fuzz").join(self.name());
        ["--sanitizer".into(), self.name().into(), "--target-dir".into(), directory.into()]
    }
}

/// Executes a target `runs` times; returns its row of the table, or `None` if an input failed.
fn explore(
    root: &Path,
    target: &str,
    runs: u64,
    record: &Mutex<PathBuf>,
) -> Result<Option<String>, String> {
    let corpus = root.join("fuzz/corpus").join(target);
    std::fs::create_dir_all(&corpus).map_err(|e| format!("{}: {e}", corpus.display()))?;
    seed(root, target, &corpus)?;
    let kept = || std::fs::read_dir(&corpus).map_or(0, Iterator::count) as u64;
    let add = |runs: u64, found: &Found| {
        let file = record.lock().expect("no thread panics");
        let reached = [kept(), found.edges, found.edges_all, found.features];
        add_to(&file, target, runs, reached)
    };
    let (mut last, mut done) = (Found::default(), 0);
    for (sanitizer, number) in slices(runs) {
        let Some(found) = execute(root, target, sanitizer, number)? else { return Ok(None) };
        done += found.runs;
        add(found.runs, &found)?;
        last = found;
    }
    // Inputs that reach an edge, not those that only take it more often: ten times as many.
    let mut minimise = fuzz(root, "cmin");
    minimise.args(Sanitizer::None.options(root)).args([target, "--", "-use_counters=0"]);
    succeed(&mut minimise)?;
    add(0, &last)?;
    let Found { edges, edges_all, features, .. } = last;
    Ok(Some(format!("| {target} | {done} | {} | {edges} | {edges_all} | {features} |", kept())))
}

/// Runs of a target, with their numbers of executions.
fn slices(runs: u64) -> Vec<(Sanitizer, u64)> {
    let address = runs / ADDRESS;
    let mut slices = Vec::new();
    for (sanitizer, mut left) in [(Sanitizer::Address, address), (Sanitizer::None, runs - address)]
    {
        while left > 0 {
            let number = left.min(SLICE);
            slices.push((sanitizer, number));
            left -= number;
        }
    }
    slices
}

/// Adds the executions of a target to those in `file`, and replaces what its last run reached:
/// inputs, edges, all edges, features.
fn add_to(file: &Path, target: &str, runs: u64, reached: [u64; 4]) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", file.display());
    let text = std::fs::read_to_string(file).map_err(failed)?;
    let text = recorded(&text, target, runs, reached)
        .ok_or_else(|| format!("{}: not of the columns {COLUMNS}", file.display()))?;
    std::fs::write(file, text).map_err(failed)
}

/// The record with that run; `None`: it has another form.
fn recorded(text: &str, target: &str, runs: u64, reached: [u64; 4]) -> Option<String> {
    let rows = text.strip_prefix(COLUMNS)?.trim_start().lines();
    let mut rows: BTreeMap<&str, Vec<u64>> = rows
        .map(|row| {
            let (target, counts) = row.split_once(',')?;
            let counts: Result<Vec<u64>, _> = counts.split(',').map(str::parse).collect();
            Some((target, counts.ok().filter(|counts| counts.len() == 5)?))
        })
        .collect::<Option<_>>()?;
    let row = rows.entry(target).or_insert_with(|| vec![0; 5]);
    row[0] += runs;
    row[1..].copy_from_slice(&reached);
    let mut text = format!("{COLUMNS}\n");
    for (target, counts) in rows {
        let counts: Vec<String> = counts.iter().map(u64::to_string).collect();
        let _ = writeln!(text, "{target},{}", counts.join(","));
    }
    Some(text)
}

/// Executions and targets.
fn parse(arguments: &[String], all: &[String]) -> Result<(u64, Vec<String>), String> {
    let (mut runs, mut names) = (RUNS, Vec::new());
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--runs" => {
                let number = words.next().and_then(|n| n.parse().ok()).filter(|n| *n > 0);
                runs = number.ok_or_else(|| format!("--runs: a number of executions\n{USAGE}"))?;
            }
            name if all.contains(word) => names.push(name.into()),
            name => return Err(format!("no target '{name}': {}\n{USAGE}", all.join(", "))),
        }
    }
    Ok((runs, if names.is_empty() { all.to_vec() } else { names }))
}

/// Names of all targets, in order.
fn targets(root: &Path) -> Result<Vec<String>, String> {
    let at = root.join("fuzz/targets");
    let entries = std::fs::read_dir(&at).map_err(|error| format!("{}: {error}", at.display()))?;
    let paths = entries.flatten().map(|entry| entry.path());
    let name = |path: std::path::PathBuf| Some(path.file_stem()?.to_str()?.to_string());
    let mut names: Vec<String> = paths.filter_map(name).collect();
    names.sort();
    Ok(names)
}

/// A command of `cargo fuzz` on the nightly toolchain.
fn fuzz(root: &Path, name: &str) -> Command {
    let mut command = nightly(root);
    command.args(["cargo", "fuzz", name]);
    // Linking each target as a release takes minutes, and executes few more inputs a second.
    command.envs([
        ("CARGO_PROFILE_RELEASE_LTO", "off"),
        ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16"),
    ]);
    command
}

/// Writes the start inputs, which are code, into the corpus.
fn seed(root: &Path, target: &str, corpus: &Path) -> Result<(), String> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root).args(["run", "--quiet", "-p", "pvswitch-fuzz", "--bin", target]);
    succeed(command.arg("--").arg("--seeds").arg(corpus)).map(drop)
}

/// Executes a target that often; `None`: an input failed.
fn execute(
    root: &Path,
    target: &str,
    sanitizer: Sanitizer,
    runs: u64,
) -> Result<Option<Found>, String> {
    let mut command = fuzz(root, "run");
    command.args(sanitizer.options(root));
    command.args([target, "--", LEN_MAX, "-print_final_stats=1", "-timeout=20"]);
    command.arg(format!("-runs={runs}"));
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    let name = format!("{command:?}");
    let failed = |error: std::io::Error| format!("cannot run {name}: {error}");
    let mut child = command.spawn().map_err(failed)?;
    let (mut log, mut shown) = (Vec::new(), Instant::now());
    for line in BufReader::new(child.stderr.take().expect("a pipe")).split(b'\n') {
        log.push(String::from_utf8_lossy(&line.map_err(failed)?).into_owned());
        if shown.elapsed() >= PROGRESS {
            shown = Instant::now();
            let line = log.last().expect("just pushed");
            eprintln!("{target}, sanitizer {}, {runs} executions: {line}", sanitizer.name());
        }
    }
    let status = child.wait().map_err(failed)?;
    let found = read(&log);
    if status.success() {
        return Ok(Some(found));
    }
    let begins = |line: &String| line.contains("ERROR:") || line.contains("panicked at");
    let reported = log.iter().position(begins);
    let last = log[reported.unwrap_or(log.len().saturating_sub(40))..].join("\n");
    if found.edges == 0 {
        return Err(format!("{name}: {status}\n{last}"));
    }
    eprintln!("{last}");
    Ok(None)
}

/// Reads libFuzzer's log.
fn read(log: &[String]) -> Found {
    let mut found = Found::default();
    for line in log {
        let after = |word: &str| {
            let (_, rest) = line.split_once(word)?;
            rest.trim_start().split(|c: char| !c.is_ascii_digit()).next()?.parse::<u64>().ok()
        };
        if line.starts_with("INFO: Loaded") && line.contains("counters)") {
            found.edges_all = after("(").unwrap_or(found.edges_all);
        }
        found.edges = after(" cov: ").unwrap_or(found.edges);
        found.features = after(" ft: ").unwrap_or(found.features);
        found.runs = after("stat::number_of_executed_units:").unwrap_or(found.runs);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_from_the_log() {
        let log = "INFO: Running with entropic power schedule (0xFF, 100).\n\
            INFO: Loaded 1 modules   (24613 inline 8-bit counters): 24613 [0x5, 0x6), \n\
            INFO: Loaded 1 PC tables (24613 PCs): 24613 [0x7,0x8), \n\
            #2\tINITED cov: 17 ft: 18 corp: 1/1b exec/s: 0 rss: 40Mb\n\
            #4096\tpulse  cov: 321 ft: 1002 corp: 73/2Kb lim: 43 exec/s: 2048 rss: 51Mb\n\
            Done 5000 runs in 3 second(s)\n\
            stat::number_of_executed_units: 5000\n";
        let log: Vec<String> = log.lines().map(str::to_string).collect();
        let found = Found { runs: 5000, edges: 321, edges_all: 24_613, features: 1002 };
        assert_eq!(read(&log), found);
        assert_eq!(read(&["error: no such target".into()]), Found::default());
    }

    #[test]
    fn one_execution_in_twenty_has_the_address_sanitizer() {
        use Sanitizer::{Address, None};
        assert_eq!(
            slices(1_100_000),
            [(Address, 55_000), (None, SLICE), (None, SLICE), (None, 45_000)]
        );
        assert_eq!(slices(19), [(None, 19)]);
        assert_eq!(slices(RUNS).iter().map(|(_, number)| number).sum::<u64>(), RUNS);
    }

    #[test]
    fn executions_add_up_and_what_was_reached_is_replaced() {
        let first = recorded(&format!("{COLUMNS}\n"), "b", 5, [1, 2, 3, 4]).unwrap();
        assert_eq!(first, format!("{COLUMNS}\nb,5,1,2,3,4\n"));
        let both = recorded(&first, "a", 7, [1, 1, 1, 1]).unwrap();
        let both = recorded(&both, "b", 10, [9, 8, 7, 6]).unwrap();
        assert_eq!(both, format!("{COLUMNS}\na,7,1,1,1,1\nb,15,9,8,7,6\n"));
        for bad in [
            "",
            "target\n",
            &format!("{COLUMNS}\nb,5,1,2,3\n"),
            &format!("{COLUMNS}\nb,x,1,2,3,4\n"),
        ] {
            assert_eq!(recorded(bad, "b", 1, [0; 4]), None, "{bad}");
        }
    }

    #[test]
    fn the_committed_record_has_every_target() {
        let text = std::fs::read_to_string(crate::root().join(RECORD)).unwrap();
        for target in targets(&crate::root()).unwrap() {
            assert!(text.contains(&format!("\n{target},")), "{target}: {RECORD}");
            assert!(recorded(&text, &target, 1, [0; 4]).is_some());
        }
    }

    #[test]
    fn words_are_targets_or_a_number_of_executions() {
        let all = ["a".to_string(), "b".into()];
        let words = |words: &[&str]| words.iter().map(|&word| word.into()).collect::<Vec<_>>();
        assert_eq!(parse(&[], &all), Ok((RUNS, all.to_vec())));
        assert_eq!(parse(&words(&["--runs", "5", "b"]), &all), Ok((5, words(&["b"]))));
        for bad in [&["c"][..], &["--runs"], &["--runs", "0"], &["--runs", "many"]] {
            assert!(parse(&words(bad), &all).unwrap_err().contains("usage"), "{bad:?}");
        }
    }

    #[test]
    fn every_target_is_a_program_of_the_package() {
        let root = crate::root();
        let manifest = std::fs::read_to_string(root.join("fuzz/Cargo.toml")).unwrap();
        let names = targets(&root).unwrap();
        assert!(names.len() >= 9);
        for name in names {
            assert!(manifest.contains(&format!("name = \"{name}\"")), "{name}");
        }
    }
}
