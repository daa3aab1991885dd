//! Names the commit of a release for `--version`: from git or, in a tree without it, from the
//! environment variable PVSWITCH_COMMIT.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-env-changed=PVSWITCH_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    let var = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let release = var("PROFILE").is_some_and(|profile| profile == "release");
    let commit = var("PVSWITCH_COMMIT").or_else(|| if release { commit() } else { None });
    let version = var("CARGO_PKG_VERSION").unwrap_or_default();
    let version = match &commit {
        Some(commit) => format!("{version} (commit {commit})"),
        None if release => format!("{version} (commit unknown)"),
        // Not built again after each commit: it would name an old one.
        None => format!("{version} (debug build)"),
    };
    println!("cargo::rustc-env=PVSWITCH_COMMIT={}", commit.unwrap_or_default());
    println!("cargo::rustc-env=PVSWITCH_VERSION={version}");
}

/// The commit that is checked out.
fn commit() -> Option<String> {
    // The log of HEAD changes with every commit and checkout.
    for file in ["HEAD", "logs/HEAD"] {
        if let Some(path) = git(&["rev-parse", "--path-format=absolute", "--git-path", file]) {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}

fn git(args: &[&str]) -> Option<String> {
    let out = Command::new("git").args(args).output().ok().filter(|out| out.status.success())?;
    let text = String::from_utf8(out.stdout).ok()?;
    Some(text.trim().to_string()).filter(|text| !text.is_empty())
}
