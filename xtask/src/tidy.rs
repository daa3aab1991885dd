//! House rules that neither rustc nor clippy check. `cargo test` and `cargo xtask tidy` both
//! call [`check`]; every violation is one line that says where, what, and what to do.

mod locks;
pub mod packages;
mod parameters;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use crate::cycles::cycles;
use crate::text::{code_of, has_word};

const FILE_LINES_MAX: usize = 800;
const LINE_COLUMNS_MAX: usize = 100;
const ARCHITECTURE: &str = "docs/ARCHITECTURE.md";
/// The document with tables made from the schema of settings.
pub const SETTINGS: &str = "docs/settings.md";
/// Documents with a limit: (folder or file, most lines).
const SHORT_DOCS: [(&str, usize); 2] = [("docs/design/", 80), (ARCHITECTURE, 200)];

/// Words banned from code, and what to do instead.
const BANNED_CODE: [(&str, &str); 5] = [
    (concat!("to", "do!"), "write it, or leave the branch out"),
    (concat!("unimple", "mented!"), "return an error that says so"),
    (concat!("db", "g!"), "use tracing"),
    (concat!("#[ig", "nore"), "a test that cannot run here prints `skipped: ` and the reason"),
    (concat!("should_", "panic"), "return the error and compare it"),
];
/// Words banned from comments, too.
const BANNED_TEXT: [(&str, &str); 2] = [
    (concat!("FIX", "ME"), "fix it, or open an issue"),
    (concat!("XX", "X"), "describe the problem in words"),
];

/// Words to avoid, and the field's terms for them: whole words in any case, in code, comments,
/// strings and documents. Only words without another legitimate sense are listed.
const GLOSSARY: [(&str, &str); 87] = [
    ("told", NOTIFY),
    ("tells", NOTIFY),
    ("telling", NOTIFY),
    ("untold", NOTIFY),
    ("fn tell", NOTIFY),
    ("let tell", NOTIFY),
    ("hush", MUTE),
    ("hushed", MUTE),
    ("hushes", MUTE),
    ("deaf", "muted, or: the kick descriptor failed"),
    ("listen again", "unmute kicks"),
    ("listens again", "unmutes kicks"),
    ("look again", RECHECK),
    ("looks again", RECHECK),
    ("looked again", RECHECK),
    ("look a last time", RECHECK),
    ("looks a last time", RECHECK),
    ("for ever", "indefinitely"),
    ("as they come", "out of order"),
    ("so far as", "up to, if"),
    ("in vain", "empty (poll), without effect, timed out"),
    ("obey", RUN),
    ("obeys", RUN),
    ("obeyed", RUN),
    ("obeying", RUN),
    ("attend", POLL),
    ("attends", POLL),
    ("attended", POLL),
    ("attending", POLL),
    ("mind held", "retry held"),
    ("excuse", BACK_OFF),
    ("excuses", BACK_OFF),
    ("excused", BACK_OFF),
    ("vanish", DROP),
    ("vanishes", DROP),
    ("vanished", DROP),
    ("mend", REPAIR),
    ("mends", REPAIR),
    ("mended", REPAIR),
    ("fn bring", "fetch, advance to"),
    ("answer that is none", "malformed reply"),
    ("no length of time", "invalid duration"),
    ("be there and do nothing", "stay idle"),
    ("neither learned nor aged", "static"),
    ("the seed's rows", STUDY),
    ("the seed says", STUDY),
    ("crowd", OVERLOAD),
    ("crowds", OVERLOAD),
    ("crowded", OVERLOAD),
    ("crowding", OVERLOAD),
    ("starved", "stalled (receiver), without buffers"),
    ("stands at", POSITION),
    ("stand at", POSITION),
    ("stands still", "stalls"),
    ("stands in for", "replaces, substitutes for"),
    ("stand in for", "replace, substitute for"),
    ("stood", POSITION),
    ("silent guest", IDLE),
    ("silent guests", IDLE),
    ("silent port", IDLE),
    ("silent queue", IDLE),
    ("quiet guest", IDLE),
    ("quiet guests", IDLE),
    ("quiet port", IDLE),
    ("quiet queue", IDLE),
    ("in rank before", "higher scheduling priority"),
    ("misdo", VIOLATION),
    ("misdoes", VIOLATION),
    ("wrongdoing", VIOLATION),
    ("hostile word", VIOLATION),
    ("hostile words", VIOLATION),
    ("turn about", "alternately"),
    ("go on", CONTINUE),
    ("goes on", CONTINUE),
    ("going on", CONTINUE),
    ("went on", CONTINUE),
    ("anew", "again, from the start"),
    ("dry looks", "empty polls, exhausted"),
    ("starter", "parent process, helper process"),
    ("stand by for", STANDBY),
    ("stands by for", STANDBY),
    ("stand-by", STANDBY),
    ("take-over", "failover (of a pair), upgrade"),
    ("table of addresses", "FDB, address table"),
    ("hook of libvirt", "libvirt hook"),
    ("who pays", "which port is charged"),
    ("what happens beyond", "when the limit is reached"),
];
const NOTIFY: &str = "notify (a peer), report (to an operator), log, return, reject";
const POSITION: &str = "is at, is set to, position, offset; runnable (thread)";
const RECHECK: &str = "re-check, poll again";
const MUTE: &str = "mute kicks";
const RUN: &str = "run (commands), implement (a rule)";
const POLL: &str = "poll, serve";
const BACK_OFF: &str = "back off";
const DROP: &str = "drop, disconnect, remove";
const REPAIR: &str = "fix up, repair";
const STUDY: &str = "the original study (author, year, title)";
const OVERLOAD: &str = "overloaded (worker), full (queue)";
const CONTINUE: &str = "continue, resume, proceed";
const STANDBY: &str = "standby (noun and adjective)";
const IDLE: &str = "idle, at a low rate";
const VIOLATION: &str = "protocol violation, invalid input";
/// The wall clock, which jumps, and where it may be read: in log lines, captures and replies to
/// people. Everything else measures time on a monotonic clock.
const WALL_CLOCKS: [&str; 4] =
    ["SystemTime", "UNIX_EPOCH", "CLOCK_REALTIME", concat!("ClockId", "::Realtime")];
const WALL_CLOCK_IN: [&str; 8] = [
    "crates/api/src/http",
    "crates/guest/src/generate",
    "crates/lab/",
    "crates/pvswitch/src/capture.rs",
    "crates/pvswitch/src/log.rs",
    "crates/pvswitch/src/run/events.rs",
    "crates/pvswitch/tests/clock.rs",
    "xtask/",
];
/// Where the glossary does not apply: texts of others, committed runs, and the glossary itself.
const GLOSSARY_NOT_IN: [&str; 3] = ["LICENSE-", "docs/results/lab-", "xtask/src/tidy.rs"];

/// Exceptions: (rule, file, reason).
const EXCEPTIONS: [(Rule, &str, &str); 2] = [
    (
        Rule::Unsafe,
        "crates/ring/tests/common/rcore.rs",
        "virtio-drivers requires its users to implement an unsafe trait; only a test",
    ),
    (
        Rule::Length,
        "crates/shm/src/copy.rs",
        "one line inside proptest!, which rustfmt does not format",
    ),
];

/// A house rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    Arrows,
    Cycles,
    Dependencies,
    Licences,
    Headers,
    Unsafe,
    Length,
    Words,
    Parameters,
    Clock,
    Locks,
    Glossary,
    Paths,
    DeadFile,
    Documents,
}

/// A violation of a rule.
#[derive(Debug, PartialEq, Eq)]
pub struct Violation {
    pub rule: Rule,
    /// File or package, with the line if known.
    pub at: String,
    pub what: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {} [{:?}]", self.at, self.what, self.rule)
    }
}

fn violation(rule: Rule, at: impl Into<String>, what: impl Into<String>) -> Violation {
    Violation { rule, at: at.into(), what: what.into() }
}

/// The cargo that runs this program.
pub fn cargo() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// All violations in the workspace at `root`.
pub fn check(root: &Path) -> Vec<Violation> {
    let mut found = packages::check(root);
    let mut files = BTreeMap::new();
    walk(root, root, &mut files);
    for cycle in cycles(&files) {
        let what = format!(
            "{} use each other in a cycle across folders: move what they share into a module \
             below both",
            cycle.join(", ")
        );
        found.push(violation(Rule::Cycles, &cycle[0], what));
    }
    found.extend(locks::check(&files));
    found.extend(files.get(SETTINGS).and_then(|text| settings(text)));
    for (name, text) in &files {
        found.extend(paths(root, name, text));
        found.extend(document(name, text));
        found.extend(glossary(name, text));
        if PROOFS.contains(&name.as_str()) {
            found.extend(named_tests(name, text, &files));
        }
        if name.ends_with(".rs") {
            found.extend(rust(name, text));
            found.extend(dead(name, &files));
        }
    }
    let excepted = |(rule, file, _): &(Rule, &str, &str), o: &Violation| {
        *rule == o.rule && o.at.starts_with(file)
    };
    let idle = EXCEPTIONS.iter().filter(|e| !found.iter().any(|o| excepted(e, o)));
    let idle = idle.map(|(rule, file, _)| {
        violation(*rule, *file, "no longer needs its exception: remove it from xtask/src/tidy.rs")
    });
    let idle: Vec<_> = idle.collect();
    found.retain(|o| !EXCEPTIONS.iter().any(|e| excepted(e, o)));
    found.extend(idle);
    found
}

/// Documents whose statements name their tests.
const PROOFS: [&str; 2] = ["docs/threat-model.md", "docs/reliability.md"];

/// Tests that a document names and no Rust file has, and rows of a table of defences without a
/// test or a word that says why there is none. Names of tests are sentences: three underscores.
fn named_tests(name: &str, text: &str, files: &BTreeMap<String, String>) -> Vec<Violation> {
    let mut found = Vec::new();
    let is_test = |word: &&str| {
        let plain = word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        plain && !word.ends_with('_') && word.matches('_').count() >= 3
    };
    let sources = || files.iter().filter(|(path, _)| path.ends_with(".rs"));
    let words = text.split('`').skip(1).step_by(2).map(|w| w.rsplit("::").next().unwrap_or(w));
    for word in words.filter(is_test) {
        let declared = [format!("fn {word}("), format!("fn {word}<")];
        if !sources().any(|(_, source)| declared.iter().any(|fun| source.contains(fun))) {
            found.push(violation(Rule::Documents, name, format!("there is no test `{word}`")));
        }
    }
    let why = ["`", "none", "below", "*argued only*"];
    let mut judged = false;
    for line in text.lines() {
        judged = line.starts_with('|') && (judged || line.trim_end().ends_with("| test |"));
        let cell = line.trim_end().trim_end_matches('|').rsplit(" | ").next().unwrap_or_default();
        let is_row = judged && !line.starts_with("|--") && !line.ends_with("| test |");
        if is_row && !why.iter().any(|word| cell.contains(word)) {
            found.push(violation(Rule::Documents, name, format!("no test in: {line}")));
        }
    }
    found
}

/// Collects our text files, by path from the root.
pub fn walk(root: &Path, folder: &Path, files: &mut BTreeMap<String, String>) {
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

fn rust(name: &str, text: &str) -> Vec<Violation> {
    let mut found = Vec::new();
    let lines = text.lines().count();
    if lines > FILE_LINES_MAX {
        let what = format!("{lines} lines, {FILE_LINES_MAX} at most: split it");
        found.push(violation(Rule::Length, name, what));
    }
    let may_be_unsafe = name.starts_with("crates/shm/")
        || Path::new(name).file_name().is_some_and(|n| n == "sys.rs");
    let code = code_of(text);
    found.extend(parameters::check(name, &code));
    for (n, (line, code)) in text.lines().zip(code.lines()).enumerate() {
        let at = format!("{name}:{}", n + 1);
        let columns = line.chars().count();
        if columns > LINE_COLUMNS_MAX {
            let what = format!("{columns} columns, {LINE_COLUMNS_MAX} at most");
            found.push(violation(Rule::Length, &at, what));
        }
        if !may_be_unsafe && (has_word(code, "unsafe") || code.contains("allow(unsafe_code)")) {
            found.push(violation(Rule::Unsafe, &at, "unsafe belongs in shm, or a sys.rs"));
        }
        let clock = WALL_CLOCKS.iter().find(|word| has_word(code, word));
        if let Some(clock) = clock.filter(|_| !WALL_CLOCK_IN.iter().any(|at| name.starts_with(at)))
        {
            let what = format!("{clock} jumps: measure time with Instant or os::monotonic");
            found.push(violation(Rule::Clock, &at, what));
        }
        let code_words = BANNED_CODE.iter().filter(|(word, _)| has_word(code, word));
        let text_words = BANNED_TEXT.iter().filter(|(word, _)| has_word(line, word));
        for (word, instead) in code_words.chain(text_words) {
            found.push(violation(Rule::Words, &at, format!("{word}: {instead}")));
        }
    }
    found
}

/// Finds paths of one developer's machine.
fn paths(root: &Path, name: &str, text: &str) -> Vec<Violation> {
    let root = root.to_string_lossy();
    let mut banned = vec![concat!("/ho", "me/"), concat!("/Us", "ers/"), concat!("/ro", "ot/")];
    if root.matches('/').count() >= 2 {
        banned.push(&root);
    }
    let mut found = Vec::new();
    for (n, line) in text.lines().enumerate() {
        if let Some(path) = banned.iter().find(|path| line.contains(**path)) {
            let what = format!("{path}: a path of one machine; make it relative or a setting");
            found.push(violation(Rule::Paths, format!("{name}:{}", n + 1), what));
        }
    }
    found
}

/// Finds words that the glossary replaces.
fn glossary(name: &str, text: &str) -> Vec<Violation> {
    let mut found = Vec::new();
    if GLOSSARY_NOT_IN.iter().any(|place| name.starts_with(place)) {
        return found;
    }
    for (n, line) in text.lines().enumerate() {
        // Quotes of specifications are verbatim.
        if line.trim_start().starts_with("//= ") {
            continue;
        }
        // Names are made of words, too.
        let line = line.to_lowercase().replace('_', " ");
        for (word, instead) in GLOSSARY.iter().filter(|(word, _)| has_word(&line, word)) {
            let at = format!("{name}:{}", n + 1);
            found.push(violation(Rule::Glossary, at, format!("{word}: use {instead}")));
        }
    }
    found
}

/// Finds a source file that no parent declares as a module.
fn dead(name: &str, files: &BTreeMap<String, String>) -> Option<Violation> {
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
    (!named).then(|| violation(Rule::DeadFile, name, format!("no parent has `mod {module};`")))
}

/// Compares the tables of settings with the schema.
fn settings(text: &str) -> Option<Violation> {
    let what = match api::docs::fill(text) {
        Ok(made) if made == text => return None,
        Ok(_) => "its tables differ from the schema: run cargo xtask settings".into(),
        Err(why) => why,
    };
    Some(violation(Rule::Documents, SETTINGS, what))
}

fn document(name: &str, text: &str) -> Option<Violation> {
    let (_, max) = SHORT_DOCS.iter().find(|(place, _)| name.starts_with(place))?;
    let lines = text.lines().count();
    let mut what = String::new();
    let _ = write!(what, "{lines} lines, {max} at most: leave out what the code shows better");
    (lines > *max).then(|| violation(Rule::Documents, name, what))
}

#[cfg(test)]
mod tests {
    #[test]
    fn tests_that_documents_name_exist_and_every_row_has_one() {
        let files = [("a.rs".into(), "fn a_row_has_one() {}\nfn as_for_all<T>() {}".into())].into();
        let table = "| hazard | defence | test |\n|---|---|---|\n";
        let good = format!("{table}| x | y | `a_row_has_one` |\n| x | y | none |\n\n`a b_c_d_e`");
        assert_eq!(super::named_tests("d", &good, &files), []);
        let gone = format!("{table}| x | y | `crate` `tests::a_row_has_two` |\n");
        assert_eq!(super::named_tests("d", &gone, &files).len(), 1);
        let bare = format!("{table}| x | `y` | later |\n");
        assert_eq!(super::named_tests("d", &bare, &files).len(), 1);
    }

    use super::*;

    #[test]
    fn the_workspace_is_tidy() {
        let found = check(&crate::root());
        let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert!(lines.is_empty(), "\n{}", lines.join("\n"));
    }

    fn rules(name: &str, text: &str) -> Vec<Rule> {
        rust(name, text).iter().map(|o| o.rule).collect()
    }

    #[test]
    fn every_rule_about_source_is_checked() {
        let name = "crates/ring/src/x.rs";
        assert_eq!(rules(name, "fn f() {} // unsafe is a word here\n"), []);
        assert_eq!(rules(name, "fn f() { unsafe { g() } }\n"), [Rule::Unsafe]);
        assert_eq!(rules("crates/uplink/src/sys.rs", "fn f() { unsafe { g() } }\n"), []);
        assert_eq!(rules(name, "fn f((a, b): (u8, u8)) {}\n"), [Rule::Parameters]);
        assert_eq!(rules(name, &"fn f() {}\n".repeat(FILE_LINES_MAX + 1)), [Rule::Length]);
        assert_eq!(rules(name, &"é".repeat(LINE_COLUMNS_MAX)), []);
        assert_eq!(rules(name, &"x".repeat(LINE_COLUMNS_MAX + 1)), [Rule::Length]);
        for clock in WALL_CLOCKS {
            let read = format!("fn f() {{ g({clock}) }}\n");
            assert_eq!(rules(name, &read), [Rule::Clock], "{clock}");
            assert_eq!(rules("crates/pvswitch/src/log.rs", &read), [], "{clock}");
        }
        for (word, _) in BANNED_CODE {
            assert_eq!(rules(name, word), [Rule::Words], "{word}");
            assert_eq!(rules(name, &format!("// {word}")), [], "{word}");
        }
        for (word, _) in BANNED_TEXT {
            assert_eq!(rules(name, &format!("// {word}: later")), [Rule::Words], "{word}");
        }
    }

    #[test]
    fn glossary_words_are_violations_where_it_applies() {
        let count = |name: &str, text: &str| glossary(name, text).len();
        assert_eq!(count("crates/ring/src/x.rs", "/// Peers are Told.\nfn told() {}\n"), 2);
        assert_eq!(count("docs/design/0001-x.md", "It waits for ever, and looks again.\n"), 2);
        assert_eq!(count("crates/ring/src/x.rs", "//= virtio-v1.3 2.7: the driver is told.\n"), 0);
        assert_eq!(count("crates/ring/src/x.rs", "fn controlled(untolded: u8) {}\n"), 0);
        assert_eq!(count("crates/ring/src/x.rs", "fn it_is_told_for_ever() {}\n"), 2);
        assert_eq!(count("LICENSE-MIT", "Peers are told.\n"), 0);
        assert_eq!(count("docs/results/lab-x/plan.toml", "\"told\"\n"), 0);
        assert_eq!(count("packaging/x.service", "# Peers are told.\n"), 1);
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
    fn tables_that_differ_from_the_schema_are_violations() {
        let text = std::fs::read_to_string(crate::root().join(SETTINGS)).unwrap();
        assert_eq!(settings(&text), None);
        assert!(settings(&text.replacen("`spin`", "`spun`", 1)).is_some());
        assert!(settings(&text.replacen("schema: run", "schema: ran", 1)).is_some());
    }

    #[test]
    fn files_without_a_mod_declaration_are_dead() {
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
