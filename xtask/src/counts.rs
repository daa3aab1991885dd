//! `cargo xtask counts`: instructions of each frame on named paths, compared with a baseline that
//! is committed. More than 2 % more fails.
//!
//! Callgrind counts what `bench forward` executes in `Ingress::burst`, or in the worker's loop: of
//! one thread, on an emulated CPU, with the worker's clock in steps, so that neither other programs
//! nor the speed of the machine matter. Of the CPU's features only those matter by which the C
//! library selects its `memcpy`: it is made to select the one that every x86-64 CPU has. What
//! remains is the compiler, whose version is pinned, and the C library; the baseline names both.
//!
//! Where a path has more, the commits that may have done it are named; `--bisect`, and any run in
//! CI, counts some of them to find the one.
//!
//! `--stages WORDS` prints where the instructions of a case are, and the cache lines it misses, of
//! any case of the benchmark: by function, those inlined included in the one they are part of.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::bench;
use crate::command::succeed;

use self::blame::Suspects;

mod blame;
mod stages;

/// The baseline: paths, which are cases of the benchmark, and their counts.
pub const BASELINE: &str = "crates/guest/benches/counts.csv";
const USAGE: &str = "usage: cargo xtask counts\n       \
    [--bisect | --write | --baseline FILE | --stages WORDS...]\n\
    --bisect: builds commits since the baseline until it has found the one that made a path fail.\n\
    --write: makes the counts of this tree the baseline.\n\
    --stages: instructions and missed cache lines of each frame by function, of the cases of\n    \
    `bench forward` whose names contain all WORDS.";
const HEADER: &str = "path,instructions";
/// A count that exceeds the baseline by more, in per cent, fails.
const MORE_MAX: f64 = 2.0;
/// Frames, or polls, of each case: whole bursts.
const FRAMES: u32 = 6400;
/// The same of a benchmark that does not read `COUNTS`: of commits before this program.
const OLD_FRAMES: f64 = 100_000.0;
/// Has the C library use the functions of plain x86-64. Names differ between its versions.
const TUNABLES: &str = "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX2,-AVX,-AVX_Fast_Unaligned_Load,\
    -ERMS,-FSRM,-SSSE3,-SSE4_1,-SSE4_2,-Prefer_ERMS,-Prefer_FSRM,-Fast_Copy_Backward,\
    -AVX512F_Usable,-AVX2_Usable,-AVX_Usable";

/// Compares the counts of this tree with the baseline, or writes them; returns whether no path has
/// more than it may. The last line counts paths: `N passed, N failed, N skipped`.
///
/// # Errors
/// What is wrong with the arguments or the baseline; a program that cannot be built or run.
pub fn run(root: &Path, arguments: &[String]) -> Result<bool, String> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let in_ci = crate::command::in_ci();
    let (write, bisect, file) = match words[..] {
        [] => (false, in_ci, root.join(BASELINE)),
        ["--bisect"] => (false, true, root.join(BASELINE)),
        ["--write"] => (true, false, root.join(BASELINE)),
        ["--baseline", file] => (false, false, file.into()),
        ["--stages", ref of @ ..] if !of.is_empty() => return print_stages(root, of),
        _ => return Err(USAGE.into()),
    };
    let text = std::fs::read_to_string(&file);
    let text = text.map_err(|error| format!("{}: {error}", file.display()))?;
    let baseline = Baseline::parse(&text).map_err(|why| format!("{}: {why}", file.display()))?;
    if let Err(why) = can_count() {
        let (lines, passed) = not_counted(&why, baseline.paths.len(), in_ci);
        println!("{lines}");
        return Ok(passed && !write);
    }
    let bench = bench::build_bench(root)?;
    let mut counts = Vec::new();
    for (path, _) in &baseline.paths {
        let count = count(&bench, path)?;
        counts.push(count.ok_or_else(|| format!("{}: no case '{path}'", file.display()))?);
    }
    let made_by = made_by();
    if write {
        let paths = baseline.paths.into_iter().map(|(path, _)| path).zip(counts).collect();
        let text = Baseline { made_by, paths }.text();
        return std::fs::write(&file, text).map(|()| true).map_err(|error| error.to_string());
    }
    if made_by != baseline.made_by {
        println!("the baseline was counted with {}, this with {made_by}", baseline.made_by);
    }
    let results = baseline.paths.iter().zip(&counts);
    let commit = last_commit(root, &file);
    let results = results.map(|((path, before), now)| judge(path, *before, *now, &commit));
    let results: Vec<Verdict> = results.collect();
    results.iter().for_each(|verdict| println!("{}", verdict.line));
    let failed = results.iter().filter(|verdict| !verdict.passed).count();
    if failed > 0 {
        let suspects = Suspects::since(root, &commit);
        println!("{}", suspects.listed());
        let paths = baseline.paths.iter().zip(&results).filter(|(_, verdict)| !verdict.passed);
        match bisect {
            true => paths.for_each(|((path, before), _)| {
                println!("{}", search(root, &suspects, path, *before));
            }),
            false => println!("which of them: cargo xtask counts --bisect"),
        }
    }
    println!("{} passed, {failed} failed, 0 skipped", results.len() - failed);
    Ok(failed == 0)
}

/// Contents of the baseline.
#[derive(Debug, PartialEq)]
struct Baseline {
    /// Compiler and C library.
    made_by: String,
    paths: Vec<(String, f64)>,
}

impl Baseline {
    fn parse(text: &str) -> Result<Self, String> {
        let mut lines = text.lines();
        let made_by = lines.next().and_then(|line| line.strip_prefix("# "));
        let made_by = made_by.ok_or("line 1: no '# ' with the compiler's version")?.into();
        if lines.next() != Some(HEADER) {
            return Err(format!("line 2: not '{HEADER}'"));
        }
        let parsed = |line: &str| {
            let (path, count) = line.rsplit_once(',')?;
            let count = count.parse::<f64>().ok().filter(|count| *count > 0.0)?;
            Some((path.to_string(), count))
        };
        let mut paths = Vec::new();
        for (i, line) in lines.enumerate() {
            let path = parsed(line);
            paths.push(path.ok_or_else(|| format!("line {}: not PATH,NUMBER: {line}", i + 3))?);
        }
        if paths.is_empty() { Err("no paths".into()) } else { Ok(Self { made_by, paths }) }
    }

    fn text(&self) -> String {
        let mut text = format!("# {}\n{HEADER}\n", self.made_by);
        for (path, count) in &self.paths {
            let _ = writeln!(text, "{path},{count:.1}");
        }
        text
    }
}

/// Result of a path.
struct Verdict {
    passed: bool,
    line: String,
}

/// Judges a path; `commit` is that of the baseline.
fn judge(path: &str, before: f64, now: f64, commit: &str) -> Verdict {
    let percent = 100.0 * (now / before - 1.0);
    let passed = percent <= MORE_MAX;
    let what = format!("{path}: {now:.1} instructions, {before:.1} in the baseline");
    let line = if !passed {
        format!(
            "failed   {what} (commit {commit}), {percent:+.1} %, more than {MORE_MAX:+} %; if this \
             is intended: cargo xtask counts --write"
        )
    } else if percent < -MORE_MAX {
        format!(
            "passed   {what}, {percent:+.1} %: the baseline may be renewed, by cargo xtask counts \
             --write"
        )
    } else {
        format!("passed   {what}, {percent:+.1} %")
    };
    Verdict { passed, line }
}

/// What is printed where nothing can be counted, and whether that passes: not in CI, which has what
/// it needs.
fn not_counted(why: &str, paths: usize, in_ci: bool) -> (String, bool) {
    match in_ci && cfg!(target_arch = "x86_64") {
        true => (format!("failed   all paths: {why}\n0 passed, {paths} failed, 0 skipped"), false),
        false => {
            let skipped = format!("0 passed, 0 failed, {paths} skipped");
            (format!("skipped  ALL PATHS, NOTHING IS JUDGED: {why}\n{skipped}"), true)
        }
    }
}

/// Finds the commit with which a path became too expensive, and says so.
fn search(root: &Path, suspects: &Suspects, path: &str, before: f64) -> String {
    let found = suspects.first_bad(|commit| {
        let bench = bench::build_bench(&blame::checked_out(root, commit)?)?;
        // A case that a commit does not have costs it nothing.
        Ok(count(&bench, path)?.is_some_and(|now| !judge(path, before, now, commit).passed))
    });
    match found {
        Ok(commit) => format!("{path}: by {commit}"),
        Err(why) => format!("{path}: the commit was not found: {why}"),
    }
}

/// The commit that changed the baseline last.
fn last_commit(root: &Path, file: &Path) -> String {
    let mut git = Command::new("git");
    git.current_dir(root).args(["log", "-1", "--format=%h", "--"]).arg(file);
    let said = git.stderr(Stdio::null()).output().map(|output| output.stdout).unwrap_or_default();
    let said = String::from_utf8_lossy(&said).trim().to_string();
    if said.is_empty() { "unknown".into() } else { said }
}

/// Versions of what counts depend on.
fn made_by() -> String {
    let first = |program: &str, argument: &str| {
        let output = Command::new(program).arg(argument).stdin(Stdio::null()).output();
        let text = output.map(|output| output.stdout).unwrap_or_default();
        String::from_utf8_lossy(&text).lines().next().unwrap_or_default().trim().to_string()
    };
    format!("{}; {}", first("rustc", "--version"), first("getconf", "GNU_LIBC_VERSION"))
}

/// Whether instructions can be counted here, or why not.
///
/// # Errors
/// What is missing.
pub fn can_count() -> Result<(), String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("the counts are of x86-64".into());
    }
    let version = Command::new("valgrind").arg("--version").stdout(Stdio::null()).status();
    match version {
        Ok(status) if status.success() => Ok(()),
        _ => Err("valgrind is not installed (package valgrind)".into()),
    }
}

/// Instructions of one case for each frame in `Ingress::burst`, or for each poll or frame in the
/// worker's loop; `None`: this benchmark does not have the case.
///
/// # Errors
/// Valgrind cannot be run.
pub fn count(bench: &Path, name: &str) -> Result<Option<f64>, String> {
    let (printed, said) = callgrind(bench, name, &["--callgrind-out-file=/dev/null"])?;
    let within = within(name);
    let frames = printed.lines().find_map(frames_of);
    let refs = said.lines().find_map(|line| line.split_once("refs:").map(|(_, n)| n));
    let refs = refs.and_then(|n| n.trim().replace(',', "").parse::<f64>().ok());
    if frames.is_some() && refs.is_none_or(|refs| refs == 0.0) {
        return Err(format!("{name}: nothing was counted within {within}: has it no symbols?"));
    }
    Ok(refs.zip(frames).map(|(refs, frames)| refs / frames))
}

/// Prints where the instructions of each case are whose name contains all words; returns true.
fn print_stages(root: &Path, words: &[&str]) -> Result<bool, String> {
    can_count()?;
    let bench = bench::build_bench(root)?;
    // The benchmark names those that it would run.
    let mut command = Command::new(&bench);
    let said = succeed(command.args(words).env("TURNS", "1").env("COUNTS", "64"))?;
    let names = said.lines().filter_map(|line| line.strip_suffix(" counted"));
    let names: Vec<&str> = names.filter_map(|line| Some(line.rsplit_once(' ')?.0.trim())).collect();
    if names.is_empty() {
        return Err(format!("no case contains '{}'", words.join(" ")));
    }
    let out = root.join("target").join(format!("callgrind-{}.out", std::process::id()));
    for name in names {
        let file = format!("--callgrind-out-file={}", out.display());
        let ran = callgrind(&bench, name, &[&stages::CACHES[..], &[file.as_str()]].concat());
        let text = std::fs::read_to_string(&out);
        let _ = std::fs::remove_file(&out);
        let (printed, _) = ran?;
        let text = text.map_err(|error| format!("{}: {error}", out.display()))?;
        let costs =
            stages::read(&text).ok_or_else(|| format!("{name}: valgrind wrote another format"))?;
        let frames =
            printed.lines().find_map(frames_of).ok_or_else(|| format!("no case {name}"))?;
        println!("{}", stages::table(name, costs, frames));
    }
    Ok(true)
}

/// The function in which a case is counted.
fn within(name: &str) -> &'static str {
    match name.split(' ').next() {
        Some("worker") => "*Worker*run_*",
        Some("xen") => "*Rings*run_*",
        _ => "*Ingress>::burst*",
    }
}

/// Runs a case once in callgrind; returns what the benchmark and valgrind printed.
fn callgrind(bench: &Path, name: &str, options: &[&str]) -> Result<(String, String), String> {
    let mut valgrind = Command::new("valgrind");
    valgrind.arg("--tool=callgrind").args(options);
    valgrind.arg(format!("--toggle-collect={}", within(name))).arg(bench).arg(name);
    valgrind.env("TURNS", "1").env("COUNTS", FRAMES.to_string()).env("GLIBC_TUNABLES", TUNABLES);
    let ran = valgrind.stdin(Stdio::null()).output();
    let ran = ran.map_err(|error| format!("valgrind: {error}"))?;
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    if !ran.status.success() {
        return Err(format!("valgrind: {name}: {}\n{said}", ran.status));
    }
    Ok((String::from_utf8_lossy(&ran.stdout).into_owned(), said))
}

/// Frames of a case, by the line that it prints.
fn frames_of(line: &str) -> Option<f64> {
    match line.strip_suffix(" counted") {
        Some(rest) => rest.rsplit_once(' ')?.1.parse().ok(),
        None => bench::case(line).map(|_| OLD_FRAMES),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# rustc 1.95.0; glibc 2.36\npath,instructions\nsplit cross 60,680.4\n\
                        xen rings,1000.0\n";

    #[test]
    fn a_baseline_is_written_as_it_was_read() {
        let baseline = Baseline::parse(TEXT).unwrap();
        assert_eq!(baseline.paths[1], ("xen rings".into(), 1000.0));
        assert_eq!(baseline.text(), TEXT);
        for (bad, why) in [
            ("path,instructions\na,1\n", "line 1"),
            ("# rustc\na,1\n", "line 2"),
            ("# rustc\npath,instructions\n", "no paths"),
            ("# rustc\npath,instructions\na,1\nb\n", "line 4"),
            ("# rustc\npath,instructions\na,0\n", "line 3"),
        ] {
            let error = Baseline::parse(bad).unwrap_err();
            assert!(error.contains(why), "{bad}: {error}");
        }
    }

    #[test]
    fn two_per_cent_more_than_the_baseline_fail() {
        let verdict = judge("split cross 60", 1000.0, 1020.1, "abc123");
        assert!(!verdict.passed);
        for part in ["failed ", "split cross 60", "1020.1", "1000.0", "commit abc123", "+2.0 %"] {
            assert!(verdict.line.contains(part), "{}", verdict.line);
        }
        let verdict = judge("a", 1000.0, 1019.9, "abc123");
        assert!(verdict.passed && !verdict.line.contains("renewed"), "{}", verdict.line);
        let verdict = judge("a", 1000.0, 979.0, "abc123");
        assert!(verdict.passed && verdict.line.contains("may be renewed"), "{}", verdict.line);
    }

    #[test]
    fn without_valgrind_ci_fails_and_others_skip_loudly() {
        let (lines, passed) = not_counted("no valgrind", 7, true);
        assert_eq!(passed, !cfg!(target_arch = "x86_64"));
        assert!(passed || lines.ends_with("0 passed, 7 failed, 0 skipped"), "{lines}");
        let (lines, passed) = not_counted("no valgrind", 7, false);
        assert!(passed && lines.contains("NOTHING IS JUDGED: no valgrind"), "{lines}");
        assert!(lines.ends_with("0 passed, 0 failed, 7 skipped"), "{lines}");
    }

    #[test]
    fn the_committed_baseline_has_the_main_paths() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let text = std::fs::read_to_string(root.join(BASELINE)).unwrap();
        let baseline = Baseline::parse(&text).unwrap();
        for words in ["split", "packed", "in-order", "cross", "switch", "xen", "worker", "vlan"] {
            assert!(baseline.paths.iter().any(|(path, _)| path.contains(words)), "{words}");
        }
    }

    #[test]
    fn frames_are_those_that_the_benchmark_names() {
        assert_eq!(frames_of("split cross plain 60  6400 counted"), Some(6400.0));
        let old = "split cross plain 60     52.1 ns a frame (51-53), 19.19 M/s";
        assert_eq!(frames_of(old), Some(OLD_FRAMES));
        assert_eq!(frames_of("warning: unused"), None);
    }
}
