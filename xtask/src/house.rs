//! `cargo xtask house`: the size and shape of the tree, as tables for a design note.
//!
//! Lines of each crate, source and tests apart; packages that the daemon links and the size of its
//! release binary; files and functions that are long; cycles between files; lines of results.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::command::succeed;
use crate::cycles;
use crate::text::code_of;

/// Files with more lines are listed.
const FILE_LINES: usize = 500;
/// Functions with more lines are listed, from the signature to the closing brace.
const FUNCTION_LINES: usize = 60;

/// A function that is listed.
#[derive(Debug, PartialEq, Eq)]
struct Function {
    name: String,
    /// Line of its signature, from 1.
    at: usize,
    lines: usize,
}

/// Lines of a crate.
#[derive(Default)]
struct Lines {
    source: usize,
    tests: usize,
}

/// Prints the tables; `--lists` adds the names of long files and functions, `--binary` the size of
/// the daemon, which it builds. A folder may hold another tree, such as a worktree of an earlier
/// commit.
///
/// # Errors
/// Unknown arguments; the release binary cannot be built; packages cannot be listed.
pub fn run(root: &Path, words: &[String]) -> Result<(), String> {
    let (options, folders): (Vec<_>, Vec<_>) = words.iter().partition(|word| word.starts_with('-'));
    let has = |option: &str| options.iter().any(|word| *word == option);
    if folders.len() > 1 || options.iter().any(|word| *word != "--lists" && *word != "--binary") {
        return Err("usage: cargo xtask house [--lists] [--binary] [FOLDER]".into());
    }
    let root = folders.first().map_or(root, |folder| Path::new(folder));
    let mut files = BTreeMap::new();
    crate::tidy::walk(root, root, &mut files);
    let packages = packages(root)?;
    let files_long = long_files(&files);
    let functions_long = long_functions(&files);
    let results = files.iter().filter(|(name, _)| name.starts_with("docs/results/"));

    println!("| crate | source | tests |\n|---|---|---|");
    for (room, lines) in lines_of_crates(&files) {
        println!("| `{room}` | {} | {} |", lines.source, lines.tests);
    }
    println!("\n| | |\n|---|---|");
    println!("| packages that `pvswitch` links | {packages} |");
    if has("--binary") {
        println!("| stripped release binary of `pvswitch` | {} bytes |", binary_bytes(root)?);
    }
    println!("| files over {FILE_LINES} lines | {} |", files_long.len());
    println!("| functions over {FUNCTION_LINES} lines | {} |", functions_long.len());
    println!("| cycles across folders | {} |", cycles::cycles(&files).len());
    println!(
        "| lines below `docs/results` | {} |",
        results.map(|(_, t)| t.lines().count()).sum::<usize>()
    );
    if has("--lists") {
        print!("\n{}", listed(&files_long, &functions_long));
    }
    Ok(())
}

/// Long files and functions by name, the longest first.
fn listed(files: &[(&str, usize)], functions: &[(&str, Function)]) -> String {
    let mut text = String::new();
    for (name, lines) in files {
        let _ = writeln!(text, "{lines:4} lines  {name}");
    }
    text.push('\n');
    for (file, Function { name, at, lines }) in functions {
        let _ = writeln!(text, "{lines:4} lines  {file}:{at} {name}");
    }
    text
}

/// Lines of each crate, by folder. Tests are files in a `tests` folder or of that name, benches,
/// and test modules at the end of a file.
fn lines_of_crates(files: &BTreeMap<String, String>) -> BTreeMap<&str, Lines> {
    let mut crates: BTreeMap<&str, Lines> = BTreeMap::new();
    for (name, text) in rust(files) {
        let inside = name.strip_prefix("crates/").unwrap_or(name);
        let Some((room, path)) = inside.split_once('/') else { continue };
        let lines = crates.entry(room).or_default();
        let all = text.lines().count();
        let mut parts = path.split('/');
        if parts.any(|part| matches!(part, "tests" | "tests.rs" | "benches")) {
            lines.tests += all;
        } else {
            let mut before = text.lines();
            let source = before.position(|line| line == "mod tests {").map_or(all, |n| n - 1);
            lines.source += source;
            lines.tests += all - source;
        }
    }
    crates
}

/// Rust files.
fn rust(files: &BTreeMap<String, String>) -> impl Iterator<Item = (&str, &str)> {
    let rust = files.iter().filter(|(name, _)| name.ends_with(".rs"));
    rust.map(|(name, text)| (name.as_str(), text.as_str()))
}

fn long_files(files: &BTreeMap<String, String>) -> Vec<(&str, usize)> {
    let lengths = rust(files).map(|(name, text)| (name, text.lines().count()));
    let mut long: Vec<_> = lengths.filter(|(_, lines)| *lines > FILE_LINES).collect();
    long.sort_by_key(|(_, lines)| std::cmp::Reverse(*lines));
    long
}

fn long_functions(files: &BTreeMap<String, String>) -> Vec<(&str, Function)> {
    let all =
        rust(files).flat_map(|(name, text)| functions(text).into_iter().map(move |f| (name, f)));
    let mut long: Vec<_> = all.filter(|(_, f)| f.lines > FUNCTION_LINES).collect();
    long.sort_by_key(|(_, f)| std::cmp::Reverse(f.lines));
    long
}

/// All functions of formatted code: a body ends at the brace with the indentation of the
/// signature.
fn functions(text: &str) -> Vec<Function> {
    let code = code_of(text);
    let code: Vec<&str> = code.lines().collect();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let begun = code.iter().enumerate().filter_map(|(i, line)| {
        let rest = line.trim_start();
        let (before, after) = rest.split_once("fn ")?;
        let qualified = before.split_whitespace().all(|word| {
            ["pub", "const", "unsafe", "extern"].contains(&word) || word.starts_with("pub(")
        });
        let name: String = after.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        (qualified && !name.is_empty()).then_some((i, name))
    });
    let ended = |(i, name): (usize, String)| {
        let end = (i..code.len()).find(|j| {
            let line = code[*j].trim_end();
            indent(line) == indent(code[i]) && line.ends_with(['}', ';'])
        })?;
        Some(Function { name, at: i + 1, lines: end - i + 1 })
    };
    begun.filter_map(ended).collect()
}

/// Number of packages that the daemon is linked from, itself included.
fn packages(root: &Path) -> Result<usize, String> {
    let words = ["tree", "-p", "pvswitch", "-e", "normal", "--prefix", "none", "--locked"];
    let tree = succeed(Command::new(crate::tidy::cargo()).args(words).current_dir(root))?;
    // A package that is repeated is marked.
    let names = tree.lines().map(|line| line.trim_end_matches(" (*)"));
    Ok(names.filter(|line| !line.is_empty()).collect::<BTreeSet<_>>().len())
}

/// Size of the stripped release binary.
fn binary_bytes(root: &Path) -> Result<u64, String> {
    let mut build = Command::new(crate::tidy::cargo());
    build.args(["build", "--release", "--bin", "pvswitch", "--message-format", "json"]);
    let messages = succeed(build.current_dir(root))?;
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut programs = messages.filter_map(|m| m["executable"].as_str().map(String::from));
    let program = programs.next().ok_or("cargo build: no executable")?;
    let stripped = root.join("target").join(format!("house-{}", std::process::id()));
    succeed(Command::new("strip").arg("-o").arg(&stripped).arg(&program))?;
    let bytes = std::fs::metadata(&stripped).map(|file| file.len());
    let _ = std::fs::remove_file(&stripped);
    bytes.map_err(|error| format!("{}: {error}", stripped.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_end_at_their_own_brace() {
        let text = [
            "impl A {",
            "    pub(crate) const fn one(",
            "        &self,",
            "    ) -> u8 {",
            "        if x {",
            "        }",
            "        1",
            "    }",
            "",
            "    fn declared(",
            "        &self,",
            "    );",
            "}",
            "// fn none() {",
            "fn short() {}",
        ];
        let text = text.join("\n");
        let found = functions(&text);
        let shape: Vec<_> = found.iter().map(|f| (f.name.as_str(), f.at, f.lines)).collect();
        assert_eq!(shape, [("one", 2, 7), ("declared", 10, 3), ("short", 15, 1)]);
    }

    #[test]
    fn test_modules_and_folders_are_tests() {
        let with_tests = "fn f() {}\n\n#[cfg(test)]\nmod tests {\n    use super::*;\n}\n";
        let files = [
            ("crates/ring/src/lib.rs", with_tests),
            ("crates/ring/src/x/tests.rs", "fn t() {}\n"),
            ("crates/ring/tests/y.rs", "fn t() {}\n"),
            ("crates/ring/README.md", "text\n"),
        ];
        let files = files.map(|(name, text)| (name.to_string(), text.to_string())).into();
        let crates = lines_of_crates(&files);
        assert_eq!((crates["ring"].source, crates["ring"].tests), (2, 6));
    }

    #[test]
    fn only_long_ones_are_listed() {
        let long = format!("fn long() {{\n{}}}\n", "    x();\n".repeat(FUNCTION_LINES));
        let short = format!("fn short() {{\n{}}}\n", "    x();\n".repeat(FUNCTION_LINES - 2));
        let file = "\n".repeat(FILE_LINES + 1);
        let files = [("a.rs", long), ("b.rs", short), ("c.rs", file)];
        let files = files.map(|(name, text)| (name.to_string(), text)).into();
        let text = listed(&long_files(&files), &long_functions(&files));
        assert_eq!(text, " 501 lines  c.rs\n\n  62 lines  a.rs:1 long\n");
    }
}
