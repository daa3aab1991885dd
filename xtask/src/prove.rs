//! `cargo xtask prove`: proofs by Kani, of all cases within the bounds that each states.
//!
//! A proof is a function in a module `proofs` beside what it is about (`cfg(kani)`). Kani has one
//! thread: atomics are plain memory to it, and what threads see of each other is loom's.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::ci::Counts;

const USAGE: &str = "usage: cargo xtask prove [PART-OF-A-NAME...]\n\
    needed: cargo install --locked kani-verifier && cargo kani setup";
/// Packages with proofs.
const PACKAGES: [&str; 2] = ["pvswitch-ring", "pvswitch-switch"];
/// A solver that takes longer has failed.
const LIMIT: &str = "20m";

/// Result of one proof.
#[derive(Debug, PartialEq)]
struct Proof {
    name: String,
    holds: bool,
    /// Time of the solver, in words.
    took: String,
}

/// Runs the proofs whose names contain one of the words, or all; returns whether each holds. Prints
/// a table; the last line counts them: `N passed, N failed, N skipped`.
///
/// # Errors
/// Kani is missing, or code does not compile for it, or no proof has such a name.
pub fn run(root: &Path, words: &[String]) -> Result<bool, String> {
    let mut all = Counts::default();
    println!("| proof | result | time of the solver |");
    println!("|---|---|---|");
    for package in PACKAGES {
        let ran = kani(root, package, words)?;
        let output = String::from_utf8_lossy(&ran.stdout);
        let proofs = read(&output);
        if !ran.status.success() && proofs.iter().all(|proof| proof.holds) && words.is_empty() {
            return Err(format!("{package}: {}{output}", String::from_utf8_lossy(&ran.stderr)));
        }
        if proofs.iter().any(|proof| !proof.holds) {
            eprintln!("{output}");
        }
        for Proof { name, holds, took } in proofs {
            println!(
                "| `{package} {name}` | {} | {took} |",
                if holds { "holds" } else { "FAILED" }
            );
            let counts = if holds { (1, 0) } else { (0, 1) };
            all.add(Counts { passed: counts.0, failed: counts.1, skipped: 0 });
        }
    }
    let Counts { passed, failed, skipped } = all;
    if passed + failed == 0 {
        return Err(format!("no proof has such a name\n{USAGE}"));
    }
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    Ok(failed == 0)
}

fn kani(root: &Path, package: &str, words: &[String]) -> Result<Output, String> {
    let mut command = Command::new("cargo");
    command.current_dir(root).args(["kani", "--package", package, "--output-format", "terse"]);
    command.args(["-Z", "unstable-options", "--harness-timeout", LIMIT]);
    command.arg("--target-dir").arg(root.join("target/kani"));
    for word in words {
        command.args(["--harness", word]);
    }
    // Kani selects its own toolchain.
    for name in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    let ran = command.stdin(Stdio::null()).output();
    let ran = ran.map_err(|error| format!("cannot run cargo kani: {error}\n{USAGE}"))?;
    let errors = String::from_utf8_lossy(&ran.stderr);
    if errors.contains("no such command: `kani`") {
        return Err(format!("cargo-kani is not installed\n{USAGE}"));
    }
    Ok(ran)
}

/// Proofs of an output, each of `Checking harness NAME...`, its result, and its time. One without a
/// result, because Kani ended, does not hold.
fn read(output: &str) -> Vec<Proof> {
    let mut proofs: Vec<Proof> = Vec::new();
    for line in output.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("Checking harness ") {
            let name = name.trim_end_matches('.').into();
            proofs.push(Proof { name, holds: false, took: "-".into() });
        }
        let Some(proof) = proofs.last_mut() else { continue };
        if let Some(result) = line.strip_prefix("VERIFICATION:- ") {
            proof.holds = result.starts_with("SUCCESSFUL");
        } else if let Some(took) = line.strip_prefix("Verification Time: ") {
            proof.took = took.into();
        }
    }
    proofs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_those_of_the_proof_before_them() {
        let output = "Kani Rust Verifier 0.67.0 (cargo plugin)\n\
            Checking harness a::proofs::one...\n\nVERIFICATION:- SUCCESSFUL\n\
            Verification Time: 0.02s\n\nChecking harness a::proofs::two...\n\
            VERIFICATION:- FAILED\nVerification Time: 1.5s\n\nChecking harness three...\n";
        let proof =
            |name: &str, holds, took: &str| Proof { name: name.into(), holds, took: took.into() };
        let read = read(output);
        assert_eq!(read[0], proof("a::proofs::one", true, "0.02s"));
        assert_eq!(read[1], proof("a::proofs::two", false, "1.5s"));
        assert_eq!(read[2..], [proof("three", false, "-")]);
    }
}
