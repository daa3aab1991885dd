//! Cycles of imports between files of different folders.
//!
//! The files of a folder and the file of their parent module are one group: they may use each
//! other. Files of different groups may not, directly or indirectly. A file uses the paths of its
//! `use` declarations and code that begin with `crate`, `self`, `super` or one of its own modules.
//! Re-exports (`pub use`) are followed; tests in the file are ignored.

use std::collections::{BTreeMap, BTreeSet};

use crate::text::code_of;

/// Cycles of files that are not all in one folder.
pub fn cycles(files: &BTreeMap<String, String>) -> Vec<Vec<String>> {
    let roots = files.keys().filter_map(|name| {
        let folder = name.strip_suffix("/lib.rs").or_else(|| name.strip_suffix("/main.rs"))?;
        (folder.ends_with("/src")).then_some(folder)
    });
    let roots: BTreeSet<&str> = roots.collect();
    roots.into_iter().flat_map(|root| Crate::new(root, files).cycles()).collect()
}

/// Names from the root of a crate.
type Path = Vec<String>;

/// A file of a crate.
struct File {
    name: String,
    /// Its module.
    module: Path,
    /// Paths that it uses.
    uses: Vec<Path>,
    /// Its re-exports: name and original path.
    exports: BTreeMap<String, Path>,
}

struct Crate {
    files: Vec<File>,
    by_module: BTreeMap<Path, usize>,
}

impl Crate {
    fn new(root: &str, files: &BTreeMap<String, String>) -> Self {
        let of_crate = files.iter().filter_map(|(name, text)| {
            let inside = name.strip_prefix(root)?.strip_prefix('/')?.strip_suffix(".rs")?;
            let both = files.contains_key(&format!("{root}/lib.rs")) && inside == "main";
            (!both && !inside.starts_with("bin/")).then_some((name, inside, text))
        });
        let sources: Vec<_> = of_crate.collect();
        let modules: BTreeSet<Path> = sources.iter().map(|(_, at, _)| module(at)).collect();
        let read = |(name, at, text): (&String, &str, &String)| {
            let module = module(at);
            let code = without_tests(&code_of(text));
            let (uses, exports) = paths(&code, &module, &modules);
            File { name: name.clone(), module, uses, exports }
        };
        let files: Vec<File> = sources.into_iter().map(read).collect();
        let by_module = files.iter().enumerate().map(|(i, file)| (file.module.clone(), i));
        Self { by_module: by_module.collect(), files }
    }

    /// The file that defines the item of `path`.
    fn file(&self, path: &[String], depth: usize) -> Option<usize> {
        let (len, at) = (0..=path.len())
            .rev()
            .find_map(|len| Some((len, *self.by_module.get(&path[..len])?)))?;
        let export = path.get(len).and_then(|name| self.files[at].exports.get(name));
        match export {
            Some(elsewhere) if depth > 0 => {
                let whole = [elsewhere, &path[len + 1..]].concat();
                self.file(&whole, depth - 1)
            }
            _ => Some(at),
        }
    }

    fn cycles(&self) -> Vec<Vec<String>> {
        let used = |(i, file): (usize, &File)| {
            let files = file.uses.iter().filter_map(|path| self.file(path, 8));
            files.filter(|used| *used != i).collect::<BTreeSet<_>>()
        };
        let edges: Vec<_> = self.files.iter().enumerate().map(used).collect();
        let reach: Vec<_> = (0..edges.len()).map(|from| reachable(from, &edges)).collect();
        let mut found = BTreeSet::new();
        for (i, mine) in reach.iter().enumerate() {
            let cycle: Vec<_> =
                mine.iter().copied().filter(|j| *j == i || reach[*j].contains(&i)).collect();
            if mine.contains(&i) && cycle.len() > 1 {
                let mut names: Vec<_> = cycle.iter().map(|j| self.files[*j].name.clone()).collect();
                names.sort();
                if !is_one_group(&names) {
                    found.insert(names);
                }
            }
        }
        found.into_iter().collect()
    }
}

/// Files reachable from a file by at least one step.
fn reachable(from: usize, edges: &[BTreeSet<usize>]) -> BTreeSet<usize> {
    let mut found = BTreeSet::new();
    let mut next = vec![from];
    while let Some(at) = next.pop() {
        next.extend(edges[at].iter().copied().filter(|to| found.insert(*to)));
    }
    found
}

/// Whether one folder, with the file of its parent module, holds all of them.
fn is_one_group(names: &[String]) -> bool {
    let folder = |name: &str| name.rsplit_once('/').map_or("", |(folder, _)| folder).to_string();
    let own = |name: &str| name.strip_suffix(".rs").unwrap_or(name).to_string();
    let mut folders = names.iter().flat_map(|name| [folder(name), own(name)]);
    folders.any(|group| names.iter().all(|name| folder(name) == group || own(name) == group))
}

/// The module of a file by its path in `src`, without `.rs`.
fn module(at: &str) -> Path {
    let mut path: Path = at.split('/').map(Into::into).collect();
    if matches!(path.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        path.pop();
    }
    path
}

/// Code without test modules.
fn without_tests(code: &str) -> String {
    let mut rest = code;
    let mut kept = String::with_capacity(code.len());
    while let Some(at) = rest.find("#[cfg(test)]") {
        let (before, test) = rest.split_at(at);
        kept += before;
        let item = test["#[cfg(test)]".len()..].trim_start();
        let body = item.strip_prefix("pub ").unwrap_or(item);
        rest = match item.find(['{', ';']) {
            Some(open) if body.starts_with("mod ") && item[open..].starts_with('{') => {
                &item[open + braces(&item[open..])..]
            }
            _ => item,
        };
    }
    kept + rest
}

/// Length of a block that begins at its opening brace.
fn braces(text: &str) -> usize {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return at + 1,
            '}' => depth -= 1,
            _ => {}
        }
    }
    text.len()
}

/// Paths that code of a module uses, from the root, and its re-exports.
fn paths(
    code: &str,
    module: &Path,
    modules: &BTreeSet<Path>,
) -> (Vec<Path>, BTreeMap<String, Path>) {
    let (mut uses, mut exports) = (Vec::new(), BTreeMap::new());
    let (code, inner) = inline_modules(code);
    for (name, body) in inner {
        // In an inline module, `super` is the file.
        uses.extend(paths(body, &[&module[..], &[name.into()]].concat(), modules).0);
    }
    let mut rest = String::new();
    let mut statements = Vec::new();
    let mut code = code.as_str();
    while let Some((before, declaration, after)) = next_use(code) {
        rest += before;
        rest.push(' ');
        let public = before.trim_end().ends_with("pub") || before.trim_end().ends_with(')');
        statements.push((public, declaration));
        code = after;
    }
    rest += code;
    for (public, declaration) in statements {
        for (name, path) in tree(declaration) {
            let Some(path) = absolute(&path, module, modules) else { continue };
            if public {
                exports.insert(name.clone(), path.clone());
            }
            if !public || has_name(&rest, &name) {
                uses.push(path);
            }
        }
    }
    uses.extend(in_code(&rest).iter().filter_map(|path| absolute(path, module, modules)));
    (uses, exports)
}

/// Code without its inline modules, and these by name.
fn inline_modules(code: &str) -> (String, Vec<(&str, &str)>) {
    let (mut outer, mut inner, mut rest) = (String::new(), Vec::new(), code);
    let header = |text: &str| {
        let after = text.strip_prefix("mod ")?;
        let name = after.split(|c: char| !is_word(c)).next()?;
        let open = after[name.len()..].trim_start();
        (!name.is_empty() && open.starts_with('{')).then_some(text.len() - open.len())
    };
    loop {
        let starts = rest.match_indices("mod ").map(|(at, _)| at);
        let word = |at: &usize| !rest[..*at].ends_with(is_word);
        let next = starts.filter(word).find_map(|at| Some((at, header(&rest[at..])?)));
        let Some((at, open)) = next else { break };
        let block = &rest[at + open..];
        let end = braces(block);
        let body = block[..end].trim_start_matches('{').trim_end_matches('}');
        inner.push((rest[at + 4..at + open].trim(), body));
        outer += &rest[..at];
        rest = &block[end..];
    }
    (outer + rest, inner)
}

/// The next `use` declaration: code before it, the declaration, code after it.
fn next_use(code: &str) -> Option<(&str, &str, &str)> {
    let starts = |at: usize| {
        let before = code[..at].trim_end();
        before.is_empty() || before.ends_with(['{', '}', ';', ']', ')']) || before.ends_with("pub")
    };
    let (at, _) = code.match_indices("use ").find(|(at, _)| starts(*at))?;
    let end = at + code[at..].find(';')?;
    Some((&code[..at], &code[at + 4..end], &code[end + 1..]))
}

/// The paths of a `use` declaration, each with its local name.
fn tree(text: &str) -> Vec<(String, Path)> {
    let text = text.trim();
    let Some(open) = text.find('{') else {
        let (path, name) = text.split_once(" as ").map_or((text, None), |(p, n)| (p, Some(n)));
        let path: Path = path.split("::").map(|part| part.trim().into()).collect();
        let last = path.last().cloned().unwrap_or_default();
        return vec![(name.map_or(last, |name| name.trim().into()), path)];
    };
    let before: Path = text[..open]
        .split("::")
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .map(Into::into)
        .collect();
    let inner = &text[open + 1..open + braces(&text[open..]) - 1];
    let mut found = Vec::new();
    for part in split(inner) {
        for (name, path) in tree(part) {
            if path == ["self"] {
                found.push((before.last().cloned().unwrap_or_default(), before.clone()));
            } else {
                found.push((name, [&before[..], &path].concat()));
            }
        }
    }
    found
}

/// Parts between commas outside braces.
fn split(text: &str) -> Vec<&str> {
    let (mut depth, mut from, mut parts) = (0, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[from..]);
    parts.retain(|part| !part.trim().is_empty());
    parts
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn has_name(code: &str, name: &str) -> bool {
    code.split(|c: char| !is_word(c)).any(|word| word == name)
}

/// Paths of at least two names in code.
fn in_code(code: &str) -> Vec<Path> {
    let pieces = code.split(|c: char| !is_word(c) && c != ':');
    let paths = pieces.filter(|piece| piece.contains("::") && !piece.starts_with(':'));
    paths.map(|path| path.split("::").map(Into::into).collect()).collect()
}

/// A path from the root; `None`: it is outside the crate.
fn absolute(path: &[String], module: &Path, modules: &BTreeSet<Path>) -> Option<Path> {
    let mut base = module.clone();
    let mut rest = path;
    match rest.first()?.as_str() {
        "crate" => base.clear(),
        "self" => {}
        "super" => {
            base.pop()?;
        }
        first => {
            base.push(first.into());
            if !modules.contains(&base) {
                return None;
            }
        }
    }
    rest = &rest[1..];
    while rest.first().is_some_and(|part| part == "super") {
        base.pop()?;
        rest = &rest[1..];
    }
    base.extend_from_slice(rest);
    Some(base)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let named =
            files.iter().map(|(name, text)| (format!("crates/x/src/{name}"), (*text).into()));
        cycles(&named.collect())
    }

    #[test]
    fn files_of_one_folder_and_their_parent_may_use_each_other() {
        assert!(of(&[("lib.rs", "mod a; use a::A;"), ("a.rs", "use crate::B;")]).is_empty());
        let siblings = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use crate::b::B;"),
            ("b.rs", "use super::a::A;"),
        ];
        assert!(of(&siblings).is_empty());
        let child = [("lib.rs", "mod a;"), ("a.rs", "mod b; b::f();"), ("a/b.rs", "use super::A;")];
        assert!(of(&child).is_empty());
    }

    #[test]
    fn cycles_are_found_in_every_form_of_use() {
        for (one, two) in [
            ("use crate::b::c::C;", "use crate::a::A;"),
            ("fn f() { crate::b::c::g() }", "use crate::{a::{self, A}, z};"),
            ("use crate::b::C as D;", "fn g() { super::super::a::f() }"),
            ("use super::b::{X, c::C};", "impl crate::a::A for C {}"),
        ] {
            let files = [
                ("lib.rs", "mod a; mod b;"),
                ("a.rs", one),
                ("b.rs", "mod c; pub use self::c::C;"),
                ("b/c.rs", two),
            ];
            let found = of(&files);
            assert_eq!(found, [["crates/x/src/a.rs", "crates/x/src/b/c.rs"]], "{one} {two}");
        }
    }

    #[test]
    fn a_cycle_through_several_files_is_one() {
        let files = [
            ("main.rs", "mod a; mod b; a::f();"),
            ("a.rs", "use crate::b::B;"),
            ("b.rs", "mod c; use self::c::C;"),
            ("b/c.rs", "use crate::Usage;"),
        ];
        let found = of(&files);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].len(), 4, "{found:?}");
    }

    #[test]
    fn inline_modules_belong_to_their_file() {
        let files = |inner: &'static str| {
            [("lib.rs", "mod a; fn f() { a::b::g() }"), ("a.rs", "pub mod b;"), ("a/b.rs", inner)]
        };
        assert!(of(&files("fn g() {} mod c { use super::g; }")).is_empty());
        assert_eq!(of(&files("fn g() {} mod c { use crate::f; }")).len(), 1);
        assert_eq!(of(&files("fn g() {} pub mod c { use super::super::super::f; }")).len(), 1);
    }

    #[test]
    fn tests_re_exports_and_other_crates_make_no_cycle() {
        let files = [
            ("lib.rs", "mod a; mod b; pub use a::A;"),
            ("a.rs", "use std::b::c; #[cfg(test)] mod tests { use crate::b::c::C; }"),
            ("b.rs", "mod c; #[cfg(test)] mod tests;"),
            ("b/c.rs", "use crate::A; // use crate::b::tests"),
            ("b/tests.rs", "use super::c::C; use crate::a;"),
        ];
        assert_eq!(of(&files), Vec::<Vec<String>>::new());
        let used = [
            ("lib.rs", "mod a; pub use a::b::B; fn f(b: B) {}"),
            ("a.rs", "mod b;"),
            ("a/b.rs", "use crate::f;"),
        ];
        assert_eq!(of(&used).len(), 1, "a re-export that is used counts");
    }
}
