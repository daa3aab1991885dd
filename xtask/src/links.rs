//! Links of the documents: every relative link leads to a file, and its anchor to a heading. Every
//! document is a page of the book, in `docs/SUMMARY.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// The table of contents. Design notes are added to it.
pub const SUMMARY: &str = "docs/SUMMARY.md";
/// Documents that are no pages: the table itself, and those of developers.
const NO_PAGES: [&str; 4] = [SUMMARY, "docs/design/", "docs/pictures/", "docs/results/"];

/// What is wrong with the links of all documents: (where, what).
pub fn check(root: &Path, files: &BTreeMap<String, String>) -> Vec<(String, String)> {
    let documents = files.iter().filter(|(name, _)| name.ends_with(".md"));
    let mut found = Vec::new();
    for (name, text) in documents {
        for (line, link) in links(text) {
            if let Some(what) = broken(root, files, name, &link) {
                found.push((format!("{name}:{line}"), what));
            }
        }
    }
    let Some(summary) = files.get(SUMMARY) else { return found };
    let pages: BTreeSet<_> =
        links(summary).iter().filter_map(|(_, link)| target(SUMMARY, link)).collect();
    let documents = files.keys().filter(|name| name.starts_with("docs/") && name.ends_with(".md"));
    let missing = documents.filter(|name| {
        !NO_PAGES.iter().any(|no| name.starts_with(no)) && !pages.contains(Path::new(name))
    });
    found.extend(
        missing.map(|name| (name.clone(), format!("is in no chapter: add it to {SUMMARY}"))),
    );
    found
}

/// Links of a document, with their lines; not those in blocks of code and in quotes of code.
pub fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut in_code = false;
    for (n, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code || line.starts_with("    ") {
            continue;
        }
        // Every second piece is code.
        let plain: String = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        for part in plain.split("](").skip(1) {
            if let Some((link, _)) = part.split_once(')') {
                found.push((n + 1, link.into()));
            }
        }
    }
    found
}

/// The file that a relative link of a document leads to, from the root; `None`: not a file.
pub fn target(from: &str, link: &str) -> Option<PathBuf> {
    let path = link.split('#').next().unwrap_or_default();
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    if path.is_empty() {
        return Some(from.into());
    }
    let mut whole = PathBuf::new();
    for part in Path::new(from).parent()?.join(path).components() {
        match part {
            Component::ParentDir if !whole.pop() => return None,
            Component::ParentDir | Component::CurDir => {}
            other => whole.push(other),
        }
    }
    Some(whole)
}

fn broken(root: &Path, files: &BTreeMap<String, String>, from: &str, link: &str) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let Some(path) = target(from, link) else {
        return Some(format!("link {link} leads out of the project"));
    };
    if !root.join(&path).exists() {
        return Some(format!("link {link}: there is no {}", path.display()));
    }
    let (_, anchor) = link.split_once('#')?;
    let text = files.get(path.to_str()?)?;
    let is_page = path.extension().is_some_and(|ending| ending == "md");
    let found = !is_page || anchors(text).contains(anchor);
    (!found).then(|| format!("link {link}: {} has no heading #{anchor}", path.display()))
}

/// Anchors of a document's headings, as GitHub and mdBook make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut in_code = false;
    for line in text.lines() {
        in_code ^= line.trim_start().starts_with("```");
        let heading = line.trim_start_matches('#');
        if in_code || heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let name = heading.trim().to_lowercase();
        let name = name.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        let name: String = name.map(|c| if c == ' ' { '-' } else { c }).collect();
        let again = (1..).map(|n| format!("{name}-{n}"));
        let name = std::iter::once(name.clone()).chain(again).find(|name| !found.contains(name));
        found.extend(name);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(all: &[(&str, &str)]) -> BTreeMap<String, String> {
        all.iter().map(|(name, text)| ((*name).into(), (*text).into())).collect()
    }

    fn documents() -> BTreeMap<String, String> {
        let mut files = BTreeMap::new();
        crate::tidy::walk(&crate::root(), &crate::root(), &mut files);
        files
    }

    #[test]
    fn links_of_the_documents_lead_somewhere() {
        let found = check(&crate::root(), &documents());
        let lines: Vec<_> = found.iter().map(|(at, what)| format!("{at}: {what}")).collect();
        assert!(lines.is_empty(), "\n{}", lines.join("\n"));
    }

    /// `operator.rs` of `pvswitch` checks the TOML blocks.
    #[test]
    fn blocks_of_json_in_pages_for_guests_are_valid() {
        let files = documents();
        let pages = files.iter().filter(|(name, _)| name.starts_with("docs/guests/"));
        let blocks = pages.flat_map(|(name, text)| {
            let blocks = text.split("```json\n").skip(1).map(|rest| rest.split("```").next());
            blocks.map(move |block| (name, block.unwrap_or_default()))
        });
        let blocks: Vec<_> = blocks.collect();
        assert!(blocks.len() >= 2);
        for (name, block) in blocks {
            let parsed = serde_json::from_str::<serde_json::Value>(block);
            assert!(parsed.is_ok(), "{name}: {parsed:?}\n{block}");
        }
    }

    #[test]
    fn links_in_code_are_none() {
        let text = "[a](b.md)\n```text\n[c](d)\n```\n    [e](f)\n`[g](h)` and [i](j#k)\n";
        assert_eq!(links(text), [(1, "b.md".into()), (6, "j#k".into())]);
    }

    #[test]
    fn missing_files_and_headings_are_found() {
        let root = crate::root();
        let text = "[a](README.md) [b](x.md) [c](../y) [d](#one-two) [e](#one) [f](https://x/y#z)";
        let found = check(&root, &files(&[("README.md", &format!("# One, `two`\n{text}\n"))]));
        let whats: Vec<_> = found.iter().map(|(_, what)| what.split(':').next().unwrap()).collect();
        assert_eq!(whats, ["link x.md", "link ../y leads out of the project", "link #one"]);
        assert_eq!(found[0].0, "README.md:2");
    }

    #[test]
    fn equal_headings_are_numbered() {
        let wanted = ["a", "a-1", "b--c"].map(String::from);
        assert_eq!(anchors("# A\n```sh\n# no\n```\n## A\n### B & C\n"), wanted.into());
    }

    #[test]
    fn documents_outside_the_table_of_contents_are_found() {
        let all = files(&[
            (SUMMARY, "- [a](ARCHITECTURE.md)"),
            ("docs/ARCHITECTURE.md", ""),
            ("docs/xen.md", ""),
        ]);
        let found = check(&crate::root(), &all);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].0, "docs/xen.md");
    }
}
