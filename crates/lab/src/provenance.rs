//! The programs measured: their commit, how they were built, and their digests.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

/// Name of the program measured.
const PROGRAM: &str = "pvswitch";

/// The programs measured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Built {
    /// Commit of the program measured, followed by `+changes` if the tree that it is in has changes
    /// that are not committed.
    pub commit: String,
    /// How it was built, in its own words: profile, optimization, compiler, target, flags.
    pub how: String,
    /// SHA-256 of each program, by name.
    pub sha256: BTreeMap<String, String>,
}

impl Built {
    /// Describes `program`, by the tree it is in and its copies that run: the program and others of
    /// this workspace.
    pub fn of(program: &Path, copies: &[&Path]) -> Self {
        let first = copies.first().copied().unwrap_or(program);
        let version = output(Command::new(first).arg("--version")).unwrap_or_default();
        let how = version.lines().find_map(|line| line.strip_prefix("build: "));
        let folder = program.parent().unwrap_or(Path::new("."));
        let commit = commit(said(&version), tree(folder).as_ref());
        let named = copies.iter().filter_map(|path| {
            let name = path.file_name()?.to_string_lossy().into_owned();
            Some((name, sha256(path)?))
        });
        Self { commit, how: how.unwrap_or_default().into(), sha256: named.collect() }
    }

    /// Digest of the program measured.
    pub fn digest(&self) -> Option<&str> {
        self.sha256.get(PROGRAM).map(String::as_str)
    }
}

/// A checked-out tree of this project.
struct Tree {
    commit: String,
    has_changes: bool,
}

/// The tree that a folder is in, if it is one of this project.
fn tree(folder: &Path) -> Option<Tree> {
    let git = |args: &[&str]| {
        output(Command::new("git").arg("-C").arg(folder).arg("--no-optional-locks").args(args))
    };
    let top = git(&["rev-parse", "--show-toplevel"])?;
    if !Path::new(top.trim()).join("crates/pvswitch/Cargo.toml").exists() {
        return None;
    }
    let commit = git(&["rev-parse", "--short=12", "HEAD"])?.trim().to_string();
    let has_changes = !git(&["status", "--porcelain", "--untracked-files=no"])?.trim().is_empty();
    Some(Tree { commit, has_changes })
}

/// The commit that a program names in its version; test builds name none.
fn said(version: &str) -> Option<&str> {
    let (_, rest) = version.lines().next()?.split_once("(commit ")?;
    rest.split_once(')').map(|(commit, _)| commit).filter(|commit| *commit != "unknown")
}

fn commit(said: Option<&str>, tree: Option<&Tree>) -> String {
    let commit = said.or(tree.map(|tree| tree.commit.as_str())).unwrap_or("unknown");
    let changes = if tree.is_some_and(|tree| tree.has_changes) { "+changes" } else { "" };
    format!("{commit}{changes}")
}

/// SHA-256 of a file, by `sha256sum`; `None` if one of them is missing.
fn sha256(file: &Path) -> Option<String> {
    let text = output(Command::new("sha256sum").arg("-b").arg(file))?;
    text.split_whitespace().next().map(|digest| digest.trim_start_matches('\\').into())
}

/// Standard output of a command that succeeds.
fn output(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commit_is_the_programs_own_or_the_trees() {
        let tree = |has_changes| Tree { commit: "abc".into(), has_changes };
        let version = "pvswitch 0.1.0 (commit 123456)\nbuild: profile release, opt-level 3\n";
        assert_eq!(commit(said(version), Some(&tree(false))), "123456");
        assert_eq!(commit(said(version), Some(&tree(true))), "123456+changes");
        assert_eq!(commit(said("pvswitch 0.1.0 (debug build)"), Some(&tree(true))), "abc+changes");
        assert_eq!(commit(said("pvswitch 0.1.0 (commit unknown)"), None), "unknown");
        assert_eq!(commit(said(""), None), "unknown");
    }

    fn git(folder: &Path, args: &[&str]) {
        let identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"];
        let mut git = Command::new("git");
        assert!(output(git.arg("-C").arg(folder).args(identity).args(args)).is_some(), "{args:?}");
    }

    #[test]
    fn changes_of_a_tree_are_seen() {
        if output(Command::new("git").arg("--version")).is_none() {
            println!("skipped: git is not installed");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        let manifest = at.join("crates/pvswitch/Cargo.toml");
        std::fs::create_dir_all(manifest.parent().unwrap()).unwrap();
        std::fs::create_dir(at.join("target")).unwrap();
        git(at, &["init", "-q"]);
        std::fs::write(at.join("a"), "a").unwrap();
        git(at, &["add", "a"]);
        git(at, &["commit", "-q", "-m", "a"]);
        // A program may be in a repository of something else.
        assert!(tree(&at.join("target")).is_none());
        std::fs::write(&manifest, "").unwrap();
        let clean = tree(&at.join("target")).unwrap();
        assert!(clean.commit.len() == 12 && !clean.has_changes);
        std::fs::write(at.join("a"), "b").unwrap();
        assert!(tree(&at.join("target")).unwrap().has_changes);
    }

    #[test]
    fn digests_are_of_the_copies() {
        let folder = tempfile::tempdir().unwrap();
        let [program, absent, text] = ["pvswitch", "other", "text"].map(|n| folder.path().join(n));
        let script = "#!/bin/sh\necho 'pvswitch 1 (commit 123)'\necho 'build: profile x'\n";
        std::fs::write(&text, script).unwrap();
        // By another process: while a child of another thread has a descriptor of this one that is
        // open for writing, the file is not executed.
        let installed = Command::new("install").arg("-m755").arg(&text).arg(&program).status();
        assert!(installed.unwrap().success());
        let built = Built::of(&program, &[&program, &absent]);
        assert_eq!((built.commit.as_str(), built.how.as_str()), ("123", "profile x"));
        assert_eq!(built.sha256.len(), 1);
        let digest = built.digest().unwrap();
        assert!(digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()));
        // FIPS 180-2, appendix B.1.
        std::fs::write(&absent, "abc").unwrap();
        let digest = sha256(&absent).unwrap();
        assert_eq!(digest, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
