//! Which commit made a path more expensive: those that changed the code that is counted since the
//! baseline, and a search among them.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::command::succeed;
use crate::tidy::packages::rooms_below;

/// The crate whose benchmark is counted.
const CRATE: &str = "guest";
/// What else decides what is compiled.
const BUILD: [&str; 3] = ["Cargo.toml", "Cargo.lock", "rust-toolchain.toml"];
/// Worktree of the commits that are counted, so that each build reuses the one before.
const TREE: &str = "target/before/counts";
/// Commits listed.
const LISTED: usize = 10;

/// Commits since the baseline that changed what is counted, the oldest first, each with its
/// subject, and whether the tree has changes beyond the last one.
pub struct Suspects {
    pub commits: Vec<String>,
    pub is_changed: bool,
}

impl Suspects {
    /// Asks git for those after commit `baseline`; none if it cannot say.
    pub fn since(root: &Path, baseline: &str) -> Self {
        let crates = rooms_below(CRATE).into_iter().map(|room| format!("crates/{room}"));
        let paths: Vec<String> = crates.chain(BUILD.map(String::from)).collect();
        let lines = |words: &[&str]| -> Vec<String> {
            let said = succeed(git(root).args(words).arg("--").args(&paths)).unwrap_or_default();
            said.lines().map(String::from).collect()
        };
        let range = format!("{baseline}..HEAD");
        let commits = lines(&["log", "--reverse", "--first-parent", "--format=%h %s", &range]);
        Self { commits, is_changed: !lines(&["status", "--porcelain"]).is_empty() }
    }

    /// Returns lines that name them.
    pub fn listed(&self) -> String {
        let Self { commits, is_changed } = self;
        let mut lines =
            vec![format!("since the baseline, {} commits changed what is counted:", commits.len())];
        let more = commits.len().saturating_sub(LISTED);
        if more > 0 {
            lines.push(format!("   {more} older ones, and"));
        }
        lines.extend(commits[more..].iter().map(|commit| format!("   {commit}")));
        if *is_changed {
            lines.push("   changes that are not committed".into());
        }
        lines.join("\n")
    }

    /// Finds the first commit that is bad, and names it; the tree is bad, and the baseline is not.
    ///
    /// # Errors
    /// That of `is_bad`.
    pub fn first_bad(
        &self,
        mut is_bad: impl FnMut(&str) -> Result<bool, String>,
    ) -> Result<String, String> {
        let (mut good, mut bad) = (0, self.commits.len());
        while good < bad {
            let middle = usize::midpoint(good, bad);
            let id = self.commits[middle].split(' ').next().unwrap_or_default();
            if is_bad(id)? { bad = middle } else { good = middle + 1 }
        }
        let commit = self.commits.get(bad).cloned();
        Ok(commit.unwrap_or_else(|| "changes that are not committed".into()))
    }
}

/// Checks out a commit in a worktree of its own; returns its folder.
///
/// # Errors
/// What git says.
pub fn checked_out(root: &Path, commit: &str) -> Result<PathBuf, String> {
    let tree = root.join(TREE);
    if !tree.join("Cargo.toml").exists() {
        let add = ["worktree", "add", "--force", "--detach"];
        succeed(git(root).args(add).arg(&tree).arg(commit))?;
    }
    succeed(git(&tree).args(["checkout", "--quiet", "--force", "--detach", commit]))?;
    Ok(tree)
}

fn git(folder: &Path) -> Command {
    let mut git = Command::new("git");
    git.current_dir(folder);
    git
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suspects(count: usize) -> Suspects {
        let commits = (0..count).map(|i| format!("c{i} what it changed")).collect();
        Suspects { commits, is_changed: false }
    }

    #[test]
    fn the_first_bad_commit_is_found_with_few_builds() {
        for count in 1..40 {
            for first in 0..=count {
                let mut builds = 0;
                let found = suspects(count).first_bad(|id| {
                    builds += 1;
                    Ok(id[1..].parse::<usize>().unwrap() >= first)
                });
                let wanted = match first == count {
                    true => "changes that are not committed".to_string(),
                    false => format!("c{first} what it changed"),
                };
                assert_eq!(found.unwrap(), wanted);
                assert!(builds <= count.ilog2() + 1, "{count} commits: {builds} builds");
            }
        }
        assert_eq!(suspects(3).first_bad(|_| Err("no build".into())), Err("no build".into()));
    }

    #[test]
    fn commits_that_may_have_done_it_are_named() {
        let few = Suspects { is_changed: true, ..suspects(2) }.listed();
        for part in ["2 commits", "c0 what", "c1 what", "not committed"] {
            assert!(few.contains(part), "{few}");
        }
        let many = suspects(12).listed();
        assert!(many.contains("2 older ones") && !many.contains("c1 what"), "{many}");
        assert!(many.contains("c2 what") && many.contains("c11 what"), "{many}");
    }

    #[test]
    fn crates_below_the_benchmark_are_counted() {
        let rooms = rooms_below(CRATE);
        for room in ["guest", "switch", "ring", "shm", "vhost-user"] {
            assert!(rooms.contains(&room), "{room}");
        }
        assert!(!rooms.contains(&"lab") && !rooms.contains(&"pvswitch"));
    }
}
