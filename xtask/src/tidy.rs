//! The house rules that neither rustc nor clippy know. `cargo test` and `cargo xtask tidy` both
//! call [`check`]; every offence is one line that says where, what, and what to do.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::circles::circles;
use crate::licence::is_permissive;
use crate::text::{code_of, has_word};

/// Which rooms each room may use. `sim` is for tests, and may be used by them anywhere.
const ARROWS: [(&str, &[&str]); 15] = [
    ("shm", &[]),
    ("ring", &["shm"]),
    ("switch", &["shm"]),
    ("os", &[]),
    ("api", &[]),
    ("vhost-user", &["ring", "switch", "shm", "os"]),
    ("xen-netif", &["ring", "switch", "shm", "os"]),
    ("xen-local", &["xen-netif", "ring", "switch", "shm", "os"]),
    ("uplink", &["switch", "shm", "os"]),
    (
        "guest",
        &["api", "vhost-user", "xen-local", "xen-netif", "uplink", "ring", "switch", "shm", "os"],
    ),
    ("hostile", &["vhost-user", "xen-netif", "ring", "switch", "shm", "os"]),
    ("lab", &["api", "hostile"]),
    (
        "pvswitch",
        &[
            "api",
            "guest",
            "hostile",
            "vhost-user",
            "xen-local",
            "xen-netif",
            "uplink",
            "ring",
            "switch",
            "shm",
            "os",
        ],
    ),
    ("sim", &["vhost-user", "xen-netif", "uplink", "ring", "switch", "shm", "os"]),
    ("xtask", &["api"]),
];
const TESTS_ONLY: &str = "sim";

/// Rooms that depend on nothing but these, and on loom where a model is built.
const SPARE: [&str; 3] = ["shm", "ring", "switch"];
const SPARE_MAY_USE: [&str; 3] = ["libc", "bitflags", "zerocopy"];

/// Rooms without any `unsafe`; the others deny it and allow it in `sys.rs`.
const FORBID_UNSAFE: [&str; 11] = [
    "ring",
    "switch",
    "vhost-user",
    "xen-local",
    "api",
    "guest",
    "hostile",
    "lab",
    "sim",
    "pvswitch",
    "xtask",
];

const FILE_LINES_MAX: usize = 800;
const LINE_COLUMNS_MAX: usize = 100;
const ARCHITECTURE: &str = "docs/ARCHITECTURE.md";
/// Its tables are made from the schema of settings.
pub const SETTINGS: &str = "docs/settings.md";
/// Documents that are to be read at a sitting: (folder or file, most lines).
const SHORT_DOCS: [(&str, usize); 2] = [("docs/design/", 80), (ARCHITECTURE, 200)];

/// What must not be in the code, and what to do in its place.
const BANNED_CODE: [(&str, &str); 5] = [
    (concat!("to", "do!"), "write it, or leave the branch out"),
    (concat!("unimple", "mented!"), "return an error that says so"),
    (concat!("db", "g!"), "use tracing"),
    (concat!("#[ig", "nore"), "a test that cannot run here prints `skipped: ` and why"),
    (concat!("should_", "panic"), "return the error and compare it"),
];
/// What must not be in comments either.
const BANNED_TEXT: [(&str, &str); 2] = [
    (concat!("FIX", "ME"), "fix it, or open an issue"),
    (concat!("XX", "X"), "say in words what is wrong"),
];

/// Words that the field does not use, and the field's own in their place: whole words, in any case,
/// in code, comments, strings and documents. Only words without another sense are listed.
const GLOSSARY: [(&str, &str); 24] = [
    ("told", NOTIFY),
    ("tells", NOTIFY),
    ("telling", NOTIFY),
    ("untold", NOTIFY),
    ("hush", "mute kicks"),
    ("deaf", "muted, or: the kick descriptor failed"),
    ("look again", RECHECK),
    ("looks again", RECHECK),
    ("looked again", RECHECK),
    ("look a last time", RECHECK),
    ("looks a last time", RECHECK),
    ("for ever", "indefinitely"),
    ("as they come", "out of order"),
    ("so far as", "up to, if"),
    ("in vain", "empty (poll), without effect, timed out"),
    ("obey", "run (commands), implement (a rule)"),
    ("obeys", "runs (commands), implements (a rule)"),
    ("vanish", "drop, disconnect, remove"),
    ("mend", "fix up, repair"),
    ("crowded", "overloaded (worker), full (queue)"),
    ("in rank before", "higher scheduling priority"),
    ("misdo", "protocol violation, invalid input"),
    ("wrongdoing", "protocol violation, invalid input"),
    ("turn about", "alternately"),
];
const NOTIFY: &str = "notify (a peer), report (to an operator), log, return, reject";
const RECHECK: &str = "re-check, poll again";
/// Where the glossary holds so far; to be extended.
const GLOSSARY_IN: [&str; 12] = [
    "crates/ring/",
    "crates/shm/",
    "crates/hostile/",
    "crates/vhost-user/",
    "crates/os/",
    "crates/uplink/",
    "crates/switch/",
    "docs/design/",
    "docs/threat-model.md",
    "docs/observability.md",
    "fuzz/",
    "rigs/",
];

/// Exceptions: (rule, file, reason).
const EXCEPTIONS: [(Rule, &str, &str); 3] = [
    (
        Rule::Unsafe,
        "crates/ring/tests/common/rcore.rs",
        "virtio-drivers asks its users for an unsafe trait; a test, not the room",
    ),
    (
        Rule::Length,
        "crates/shm/src/copy.rs",
        "one line inside proptest!, where rustfmt does not go",
    ),
    (
        Rule::Circles,
        "crates/lab/src/lib.rs",
        "its error and the paths of programs are at the root, which runs everything",
    ),
];

/// What was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    Arrows,
    Circles,
    Dependencies,
    Licences,
    Headers,
    Unsafe,
    Length,
    Words,
    Glossary,
    Paths,
    DeadFile,
    Documents,
}

/// One offence.
#[derive(Debug, PartialEq, Eq)]
pub struct Offence {
    pub rule: Rule,
    /// File or package, with a line if there is one.
    pub at: String,
    pub what: String,
}

impl std::fmt::Display for Offence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} [{:?}]", self.at, self.what, self.rule)
    }
}

fn offence(rule: Rule, at: impl Into<String>, what: impl Into<String>) -> Offence {
    Offence { rule, at: at.into(), what: what.into() }
}

/// The cargo that runs us.
pub fn cargo() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// All offences in the workspace at `root`.
pub fn check(root: &Path) -> Vec<Offence> {
    let mut found = Vec::new();
    match metadata(root) {
        Ok(metadata) => {
            let packages = packages(&metadata);
            found.extend(packages.iter().flat_map(Package::arrows));
            found.extend(packages.iter().flat_map(Package::spare));
            found.extend(packages.iter().filter_map(|p| p.header(root)));
            found.extend(licences(&metadata));
            let architecture = std::fs::read_to_string(root.join(ARCHITECTURE));
            found.extend(unnamed(&packages, &architecture.unwrap_or_default()));
        }
        Err(error) => found.push(offence(Rule::Arrows, "cargo metadata", error)),
    }
    let mut files = BTreeMap::new();
    walk(root, root, &mut files);
    for circle in circles(&files) {
        let what = format!(
            "{} use each other in a circle across folders: move what one needs of the other below \
             both",
            circle.join(", ")
        );
        found.push(offence(Rule::Circles, &circle[0], what));
    }
    found.extend(files.get(SETTINGS).and_then(|text| settings(text)));
    for (name, text) in &files {
        found.extend(paths(root, name, text));
        found.extend(document(name, text));
        found.extend(glossary(name, text));
        if name.ends_with(".rs") {
            found.extend(rust(name, text));
            found.extend(dead(name, &files));
        }
    }
    let excepted = |(rule, file, _): &(Rule, &str, &str), o: &Offence| {
        *rule == o.rule && o.at.starts_with(file)
    };
    let idle = EXCEPTIONS.iter().filter(|e| !found.iter().any(|o| excepted(e, o)));
    let idle = idle.map(|(rule, file, _)| {
        offence(*rule, *file, "needs no exception any more: remove it from xtask/src/tidy.rs")
    });
    let idle: Vec<_> = idle.collect();
    found.retain(|o| !EXCEPTIONS.iter().any(|e| excepted(e, o)));
    found.extend(idle);
    found
}

// ---- packages ----

fn metadata(root: &Path) -> Result<Value, String> {
    let host = Command::new("rustc").arg("-vV").output().map_err(|e| format!("rustc: {e}"))?;
    let host = String::from_utf8_lossy(&host.stdout).into_owned();
    let host = host.lines().find_map(|line| line.strip_prefix("host: ")).ok_or("rustc -vV")?;
    let output = Command::new(cargo())
        .args(["metadata", "--format-version", "1", "--locked", "--filter-platform", host])
        .current_dir(root)
        .output()
        .map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())
}

/// A package of the workspace.
struct Package {
    /// Its room: the folder's name.
    room: String,
    folder: PathBuf,
    dependencies: Vec<Dependency>,
}

struct Dependency {
    package: String,
    /// The room it is, if it is one of ours.
    room: Option<String>,
    for_tests: bool,
    /// `cfg(...)` it is limited to.
    target: String,
}

fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().map(Vec::as_slice).unwrap_or_default().iter()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn packages(metadata: &Value) -> Vec<Package> {
    let room_of =
        |folder: &Path| folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // What comes from a registry has a source.
    let ours = list(metadata, "packages").filter(|p| p["source"].is_null());
    let package = |p: &Value| {
        let manifest = PathBuf::from(text(&p["manifest_path"]));
        let folder = manifest.parent().unwrap_or(&manifest).to_path_buf();
        let dependency = |d: &Value| Dependency {
            package: text(&d["name"]).into(),
            room: d["path"].as_str().map(|path| room_of(Path::new(path))),
            for_tests: d["kind"] == "dev",
            target: text(&d["target"]).into(),
        };
        let dependencies = list(p, "dependencies").map(dependency).collect();
        Package { room: room_of(&folder), folder, dependencies }
    };
    ours.map(package).collect()
}

impl Package {
    fn arrows(&self) -> Vec<Offence> {
        let Some((_, allowed)) = ARROWS.iter().find(|(room, _)| *room == self.room) else {
            let what =
                "unknown room: say in xtask/src/tidy.rs what it may use (and in a design note)";
            return vec![offence(Rule::Arrows, &self.room, what)];
        };
        let rooms = self.dependencies.iter().filter_map(|d| d.room.as_ref().map(|room| (room, d)));
        let bad = rooms.filter(|(room, dependency)| {
            !(allowed.contains(&room.as_str()) || dependency.for_tests && *room == TESTS_ONLY)
        });
        bad.map(|(room, _)| {
            let what = format!("uses {room}: arrows go downward only, see {ARCHITECTURE}");
            offence(Rule::Arrows, &self.room, what)
        })
        .collect()
    }

    fn spare(&self) -> Vec<Offence> {
        if !SPARE.contains(&self.room.as_str()) {
            return Vec::new();
        }
        let foreign = self.dependencies.iter().filter(|d| d.room.is_none() && !d.for_tests);
        let bad = foreign.filter(|d| {
            let modelled = d.package == "loom" && d.target == "cfg(loom)";
            !modelled && !SPARE_MAY_USE.contains(&d.package.as_str())
        });
        bad.map(|d| {
            let what = format!("depends on {}: only {}", d.package, SPARE_MAY_USE.join(", "));
            offence(Rule::Dependencies, &self.room, what)
        })
        .collect()
    }

    /// The room's manifest or root file must say what becomes of `unsafe`.
    fn header(&self, root: &Path) -> Option<Offence> {
        let read = |name: &str| std::fs::read_to_string(self.folder.join(name)).unwrap_or_default();
        let manifest = read("Cargo.toml");
        let roots = code_of(&(read("src/lib.rs") + &read("src/main.rs")));
        let says = |level: &str| {
            roots.contains(&format!("#![{level}(unsafe_code)]"))
                || manifest.contains(&format!("unsafe_code = \"{level}\""))
        };
        let forbid = FORBID_UNSAFE.contains(&self.room.as_str());
        if says("forbid") || !forbid && says("deny") {
            return None;
        }
        let level = if forbid { "forbid" } else { "deny" };
        let at = self.folder.strip_prefix(root).unwrap_or(&self.folder).display().to_string();
        Some(offence(Rule::Headers, at, format!("add #![{level}(unsafe_code)] to its root")))
    }
}

fn unnamed(packages: &[Package], architecture: &str) -> Vec<Offence> {
    let missing = packages.iter().filter(|p| !has_word(architecture, &format!("`{}`", p.room)));
    missing
        .map(|p| offence(Rule::Documents, ARCHITECTURE, format!("does not name `{}`", p.room)))
        .collect()
}

fn licences(metadata: &Value) -> Vec<Offence> {
    let foreign = list(metadata, "packages").filter(|p| !p["source"].is_null());
    let judge = |p: &Value| {
        let (name, licence) = (text(&p["name"]), text(&p["license"]));
        let what = match is_permissive(licence) {
            Some(true) => return None,
            Some(false) => format!("licence {licence} is not permissive"),
            None => format!("licence '{licence}' is no expression we know"),
        };
        Some(offence(Rule::Licences, name, what))
    };
    foreign.filter_map(judge).collect()
}

// ---- files ----

/// Every text file of the checkout that is ours, by its path from the root.
fn walk(root: &Path, folder: &Path, files: &mut BTreeMap<String, String>) {
    const GENERATED: [&str; 8] =
        ["target", "__pycache__", "corpus", "artifacts", "out", ".git", ".cache", "node_modules"];
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        let name = entry.file_name();
        if GENERATED.iter().any(|g| name == *g) {
            continue;
        }
        if path.is_dir() {
            walk(root, &path, files);
        } else if let Ok(text) = std::fs::read_to_string(&path) {
            let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
            files.insert(name, text);
        }
    }
}

fn rust(name: &str, text: &str) -> Vec<Offence> {
    let mut found = Vec::new();
    let lines = text.lines().count();
    if lines > FILE_LINES_MAX {
        let what = format!("{lines} lines, {FILE_LINES_MAX} at most: it holds two rooms");
        found.push(offence(Rule::Length, name, what));
    }
    let may_be_unsafe = name.starts_with("crates/shm/")
        || Path::new(name).file_name().is_some_and(|n| n == "sys.rs");
    let code = code_of(text);
    for (n, (line, code)) in text.lines().zip(code.lines()).enumerate() {
        let at = format!("{name}:{}", n + 1);
        let columns = line.chars().count();
        if columns > LINE_COLUMNS_MAX {
            let what = format!("{columns} columns, {LINE_COLUMNS_MAX} at most");
            found.push(offence(Rule::Length, &at, what));
        }
        if !may_be_unsafe && (has_word(code, "unsafe") || code.contains("allow(unsafe_code)")) {
            found.push(offence(Rule::Unsafe, &at, "unsafe belongs into shm, or a sys.rs"));
        }
        let code_words = BANNED_CODE.iter().filter(|(word, _)| has_word(code, word));
        let text_words = BANNED_TEXT.iter().filter(|(word, _)| has_word(line, word));
        for (word, instead) in code_words.chain(text_words) {
            found.push(offence(Rule::Words, &at, format!("{word}: {instead}")));
        }
    }
    found
}

/// Folders of somebody's machine.
fn paths(root: &Path, name: &str, text: &str) -> Vec<Offence> {
    let root = root.to_string_lossy();
    let mut banned = vec![concat!("/ho", "me/"), concat!("/Us", "ers/"), concat!("/ro", "ot/")];
    if root.matches('/').count() >= 2 {
        banned.push(&root);
    }
    let mut found = Vec::new();
    for (n, line) in text.lines().enumerate() {
        if let Some(path) = banned.iter().find(|path| line.contains(**path)) {
            let what = format!("{path}: a path of one machine; make it relative or a setting");
            found.push(offence(Rule::Paths, format!("{name}:{}", n + 1), what));
        }
    }
    found
}

/// Words for which the glossary has the field's own.
fn glossary(name: &str, text: &str) -> Vec<Offence> {
    let mut found = Vec::new();
    if !GLOSSARY_IN.iter().any(|place| name.starts_with(place)) {
        return found;
    }
    for (n, line) in text.lines().enumerate() {
        // The sentences of specifications are theirs.
        if line.trim_start().starts_with("//= ") {
            continue;
        }
        let line = line.to_lowercase();
        for (word, instead) in GLOSSARY.iter().filter(|(word, _)| has_word(&line, word)) {
            let at = format!("{name}:{}", n + 1);
            found.push(offence(Rule::Glossary, at, format!("{word}: say {instead}")));
        }
    }
    found
}

/// A source file that no other one names as its module.
fn dead(name: &str, files: &BTreeMap<String, String>) -> Option<Offence> {
    let (folder, file) = name.rsplit_once('/')?;
    let in_src = name.starts_with("crates/") && name.contains("/src/");
    if !in_src || ["lib.rs", "main.rs"].contains(&file) {
        return None;
    }
    let (folder, module) = match file {
        "mod.rs" => folder.rsplit_once('/')?,
        _ => (folder, file.strip_suffix(".rs")?),
    };
    let parents = ["lib.rs", "main.rs", "mod.rs"].map(|parent| format!("{folder}/{parent}"));
    let named = parents.iter().chain([&format!("{folder}.rs")]).any(|parent| {
        files.get(parent).is_some_and(|text| has_word(text, &format!("mod {module};")))
    });
    (!named).then(|| offence(Rule::DeadFile, name, format!("no parent says `mod {module};`")))
}

/// Tables of settings that are not as the schema makes them.
fn settings(text: &str) -> Option<Offence> {
    let what = match api::docs::filled(text) {
        Ok(made) if made == text => return None,
        Ok(_) => "its tables differ from the schema: run cargo xtask settings".into(),
        Err(why) => why,
    };
    Some(offence(Rule::Documents, SETTINGS, what))
}

fn document(name: &str, text: &str) -> Option<Offence> {
    let (_, max) = SHORT_DOCS.iter().find(|(place, _)| name.starts_with(place))?;
    let lines = text.lines().count();
    let mut what = String::new();
    let _ = write!(what, "{lines} lines, {max} at most: leave out what the code says better");
    (lines > *max).then(|| offence(Rule::Documents, name, what))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_workspace_is_tidy() {
        let found = check(&crate::root());
        let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert!(lines.is_empty(), "\n{}", lines.join("\n"));
    }

    fn room(room: &str, dependencies: Value) -> Package {
        let manifest = format!("/x/crates/{room}/Cargo.toml");
        let package = json!({"manifest_path": manifest, "dependencies": dependencies});
        packages(&json!({ "packages": [package] })).remove(0)
    }

    #[test]
    fn arrows_that_go_up_or_sideways_are_told() {
        let uses = |path: &str, kind: Value| json!([{"name": "y", "path": path, "kind": kind}]);
        assert_eq!(room("ring", uses("/x/crates/shm", Value::Null)).arrows(), []);
        assert_eq!(room("ring", uses("/x/crates/switch", Value::Null)).arrows().len(), 1);
        assert_eq!(room("uplink", uses("/x/crates/vhost-user", Value::Null)).arrows().len(), 1);
        assert_eq!(room("ring", uses("/x/crates/sim", json!("dev"))).arrows(), []);
        assert_eq!(room("ring", uses("/x/crates/sim", Value::Null)).arrows().len(), 1);
        assert_eq!(room("attic", json!([])).arrows().len(), 1);
    }

    #[test]
    fn spare_rooms_stay_spare() {
        let on = |name: &str, target: &str| json!([{"name": name, "target": target}]);
        assert_eq!(room("shm", on("libc", "")).spare(), []);
        assert_eq!(room("shm", on("loom", "cfg(loom)")).spare(), []);
        assert_eq!(room("shm", on("loom", "")).spare().len(), 1);
        assert_eq!(room("ring", on("serde", "")).spare().len(), 1);
        assert_eq!(room("uplink", on("serde", "")).spare(), []);
    }

    #[test]
    fn crates_and_licences_that_are_not_named() {
        let packages = [room("shm", json!([]))];
        assert_eq!(unnamed(&packages, "the room `shm` holds"), []);
        assert_eq!(unnamed(&packages, "shmem").len(), 1);
        let foreign = |licence: &str| {
            let package = json!({"name": "z", "source": "registry", "license": licence});
            json!({ "packages": [package] })
        };
        assert_eq!(licences(&foreign("MIT OR Apache-2.0")), []);
        assert_eq!(licences(&foreign("GPL-3.0-only")).len(), 1);
        assert_eq!(licences(&foreign("")).len(), 1);
    }

    fn rules(name: &str, text: &str) -> Vec<Rule> {
        rust(name, text).iter().map(|o| o.rule).collect()
    }

    #[test]
    fn source_that_breaks_each_rule() {
        let name = "crates/ring/src/x.rs";
        assert_eq!(rules(name, "fn f() {} // unsafe is a word here\n"), []);
        assert_eq!(rules(name, "fn f() { unsafe { g() } }\n"), [Rule::Unsafe]);
        assert_eq!(rules("crates/uplink/src/sys.rs", "fn f() { unsafe { g() } }\n"), []);
        assert_eq!(rules(name, &"fn f() {}\n".repeat(FILE_LINES_MAX + 1)), [Rule::Length]);
        assert_eq!(rules(name, &"é".repeat(LINE_COLUMNS_MAX)), []);
        assert_eq!(rules(name, &"x".repeat(LINE_COLUMNS_MAX + 1)), [Rule::Length]);
        for (word, _) in BANNED_CODE {
            assert_eq!(rules(name, word), [Rule::Words], "{word}");
            assert_eq!(rules(name, &format!("// {word}")), [], "{word}");
        }
        for (word, _) in BANNED_TEXT {
            assert_eq!(rules(name, &format!("// {word}: later")), [Rule::Words], "{word}");
        }
    }

    #[test]
    fn words_of_the_house_are_refused_where_the_glossary_holds() {
        let count = |name: &str, text: &str| glossary(name, text).len();
        assert_eq!(count("crates/ring/src/x.rs", "/// Peers are Told.\nfn told() {}\n"), 2);
        assert_eq!(count("docs/design/0001-x.md", "It waits for ever, and looks again.\n"), 2);
        assert_eq!(count("crates/ring/src/x.rs", "//= virtio-v1.3 2.7: the driver is told.\n"), 0);
        assert_eq!(count("crates/ring/src/x.rs", "fn controlled(untolded: u8) {}\n"), 0);
        assert_eq!(count("crates/lab/src/x.rs", "/// Peers are told.\n"), 0);
        for (word, _) in GLOSSARY {
            assert_eq!(count("rigs/x.md", word), 1, "{word}");
        }
    }

    #[test]
    fn paths_of_a_machine_and_long_documents() {
        let root = Path::new("/some/where");
        let at = |text: &str| paths(root, "a.md", text).len();
        assert_eq!(
            [at("see /tmp/x"), at("see /some/where/x"), at(concat!("/Us", "ers/me"))],
            [0, 1, 1]
        );
        assert!(document("docs/design/0001-x.md", &"a\n".repeat(81)).is_some());
        assert!(document("docs/design/0001-x.md", &"a\n".repeat(80)).is_none());
        assert!(document("docs/settings.md", &"a\n".repeat(999)).is_none());
    }

    #[test]
    fn tables_that_differ_from_the_schema() {
        let text = std::fs::read_to_string(crate::root().join(SETTINGS)).unwrap();
        assert_eq!(settings(&text), None);
        assert!(settings(&text.replacen("`spin`", "`spun`", 1)).is_some());
        assert!(settings(&text.replacen("schema: run", "schema: ran", 1)).is_some());
    }

    #[test]
    fn files_that_no_one_names() {
        let files = |parent: &str, text: &str| BTreeMap::from([(parent.into(), text.into())]);
        let alive = |name: &str, parent: &str| dead(name, &files(parent, "pub mod x;")).is_none();
        assert!(alive("crates/a/src/x.rs", "crates/a/src/lib.rs"));
        assert!(alive("crates/a/src/x/mod.rs", "crates/a/src/main.rs"));
        assert!(alive("crates/a/src/b/x.rs", "crates/a/src/b.rs"));
        assert!(alive("crates/a/src/b/x.rs", "crates/a/src/b/mod.rs"));
        assert!(!alive("crates/a/src/y.rs", "crates/a/src/lib.rs"));
        assert!(alive("crates/a/src/lib.rs", "nothing"));
    }
}
