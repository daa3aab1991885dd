//! Names the commit of a release for `--version`: from git or, in a tree without it, from the
//! environment variable PVSWITCH_COMMIT. And how it is built, for its second line.

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
    println!("cargo::rustc-env=PVSWITCH_BUILD={}", built());
}

/// Profile, optimization, compiler, target, CPU features and flags, in one line.
fn built() -> String {
    let var = |name: &str| std::env::var(name).unwrap_or_default();
    let compiler = Command::new(var("RUSTC")).arg("--version").output();
    let compiler = compiler.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_string());
    let features = std::env::vars().filter_map(|(name, _)| {
        Some(name.strip_prefix("CARGO_FEATURE_")?.to_lowercase().replace('_', "-"))
    });
    let mut features: Vec<String> = features.collect();
    features.sort();
    // Not where the checkout lies: a program is the same wherever it is built.
    let flags = var("CARGO_ENCODED_RUSTFLAGS");
    let flags = flags.split('\u{1f}').filter(|flag| !flag.starts_with("--remap-path-prefix"));
    let flags = flags.collect::<Vec<&str>>().join(" ");
    let or_none = |text: String| if text.is_empty() { "none".into() } else { text };
    format!(
        "build: profile {}, opt-level {}, {}, {}, CPU features {}, features {}, flags {}",
        var("PROFILE"),
        var("OPT_LEVEL"),
        compiler.unwrap_or_default(),
        var("TARGET"),
        or_none(var("CARGO_CFG_TARGET_FEATURE")),
        or_none(features.join(",")),
        or_none(flags),
    )
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
