//! `cargo xtask book`: the documents as a book, in `target/book`, by mdBook.
//!
//! Documents link to each other and to files beside them, from where they are. So the pages are
//! copied with their folders, and mdBook reads the copy.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::links::{SUMMARY, check, links, target};
use crate::tidy::walk;

/// Makes the book; returns where it begins.
///
/// # Errors
/// mdBook is missing or fails, or a page cannot be copied.
pub fn make(root: &Path) -> Result<PathBuf, String> {
    let (out, source) = (root.join("target/book"), root.join("target/book-source"));
    let _ = fs::remove_dir_all(&source);
    let mut files = BTreeMap::new();
    walk(root, root, &mut files);
    if let Some((at, what)) = check(root, &files).first() {
        return Err(format!("{at}: {what}"));
    }
    let text = read(&root.join(SUMMARY))? + &design_notes(&files);
    // Links of the table, from the root.
    let summary = links(&text).iter().fold(text.clone(), |text, (_, link)| {
        let page = target(SUMMARY, link).unwrap_or_default();
        text.replace(&format!("]({link})"), &format!("]({})", page.display()))
    });
    let pages = links(&text).into_iter().filter_map(|(_, link)| target(SUMMARY, &link));
    let mut todo: Vec<PathBuf> = pages.collect();
    let mut done = BTreeSet::new();
    while let Some(path) = todo.pop() {
        let from = root.join(&path);
        if !from.is_file() || !done.insert(path.clone()) {
            continue;
        }
        let name = path.to_string_lossy().into_owned();
        let to = source.join("src").join(index(&name));
        let folder = to.parent().ok_or("a page without a folder")?;
        let copied = fs::create_dir_all(folder).and_then(|()| match name.ends_with(".md") {
            true => fs::read_to_string(&from).and_then(|text| fs::write(&to, index(&text))),
            false => fs::copy(&from, &to).map(drop),
        });
        copied.map_err(|error| format!("{name}: {error}"))?;
        // Pictures and examples, but no other pages.
        if name.ends_with(".md") {
            let beside = links(&read(&from)?).into_iter().filter_map(|(_, l)| target(&name, &l));
            todo.extend(beside.filter(|to| to.extension().is_none_or(|ending| ending != "md")));
        }
    }
    let write = |name: &str, text: String| {
        fs::write(source.join(name), text).map_err(|error| format!("{name}: {error}"))
    };
    write("src/SUMMARY.md", index(&summary))?;
    for name in ["book.toml", "book.css"] {
        write(name, read(&root.join("docs").join(name))?)?;
    }
    let mut command = Command::new("mdbook");
    command.arg("build").arg(&source).arg("--dest-dir").arg(&out);
    match command.status() {
        Ok(status) if status.success() => Ok(out.join("index.html")),
        Ok(status) => Err(format!("mdbook ended with {status}")),
        Err(error) => Err(format!("mdbook: {error}; install it: cargo install mdbook")),
    }
}

/// mdBook makes a README the index of its folder, but does not change links to it.
fn index(text: &str) -> String {
    text.replace("README.md", "index.md")
}

/// A chapter of all design notes.
fn design_notes(files: &BTreeMap<String, String>) -> String {
    let mut chapter = "\n# Decisions\n\n".to_owned();
    for (name, text) in files.iter().filter(|(name, _)| name.starts_with("docs/design/")) {
        let title = text.lines().next().unwrap_or_default().trim_start_matches(['#', ' ']);
        let path = name.trim_start_matches("docs/");
        chapter += &format!("- [{}]({path})\n", title.replace(['[', ']'], ""));
    }
    chapter
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}
