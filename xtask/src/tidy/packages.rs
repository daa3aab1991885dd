//! Rules of packages: what they depend on, their licences, and their headers.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::{ARCHITECTURE, Rule, Violation, cargo, violation};
use crate::licence::is_permissive;
use crate::text::{code_of, has_word};

/// Crates (by folder name: rooms) that each crate may use. Tests of any crate may use `sim`.
const ARROWS: [(&str, &[&str]); 17] = [
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
    ("lab", &["api", "hostile", "switch", "shm"]),
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
    (
        "fuzz",
        &["api", "xen-netif", "xen-local", "vhost-user", "uplink", "ring", "switch", "shm", "os"],
    ),
    ("plugin", &["api"]),
    ("xtask", &["api"]),
];
/// A crate's folder, and those of the crates that it may use.
pub fn rooms_below(room: &'static str) -> Vec<&'static str> {
    let below = ARROWS.iter().find(|(name, _)| *name == room).map_or(&[][..], |(_, below)| below);
    std::iter::once(room).chain(below.iter().copied()).collect()
}

const TESTS_ONLY: &str = "sim";

/// Rooms that may depend only on these foreign crates, and on loom for models.
const SPARE: [&str; 3] = ["shm", "ring", "switch"];
/// Where packages may come from: neither another registry nor a repository.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";
const SPARE_MAY_USE: [&str; 3] = ["libc", "bitflags", "zerocopy"];

/// Rooms without any `unsafe`; the others deny it and allow it in `sys.rs`.
const FORBID_UNSAFE: [&str; 12] = [
    "ring",
    "switch",
    "vhost-user",
    "xen-local",
    "api",
    "guest",
    "hostile",
    "lab",
    "plugin",
    "sim",
    "pvswitch",
    "xtask",
];

/// All violations of packages of the workspace at `root`.
pub fn check(root: &Path) -> Vec<Violation> {
    let host = Command::new("rustc").arg("-vV").output().map(|out| out.stdout);
    let host = String::from_utf8_lossy(&host.unwrap_or_default()).into_owned();
    let host = host.lines().find_map(|line| line.strip_prefix("host: ")).unwrap_or_default();
    let metadata = match metadata(root, host) {
        Ok(metadata) => metadata,
        Err(error) => return vec![violation(Rule::Arrows, "cargo metadata", error)],
    };
    let packages = packages(&metadata);
    let mut found: Vec<_> = packages.iter().flat_map(Package::arrows).collect();
    found.extend(packages.iter().flat_map(Package::spare));
    found.extend(packages.iter().filter_map(|p| p.header(root)));
    found.extend(licences(&metadata));
    let config = std::fs::read_to_string(root.join("deny.toml")).unwrap_or_default();
    found.extend(build_scripts(&metadata, &array(&config, "allow-build-scripts")));
    let architecture = std::fs::read_to_string(root.join(ARCHITECTURE));
    found.extend(unnamed(&packages, &architecture.unwrap_or_default()));
    found
}

/// What cargo reports of the workspace and all packages it needs for `target`.
///
/// # Errors
/// cargo's.
pub fn metadata(root: &Path, target: &str) -> Result<Value, String> {
    let output = Command::new(cargo())
        .args(["metadata", "--format-version", "1", "--locked", "--filter-platform", target])
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
    /// Its room: the name of its folder.
    room: String,
    folder: PathBuf,
    dependencies: Vec<Dependency>,
}

struct Dependency {
    package: String,
    /// Its room, if it is one of ours.
    room: Option<String>,
    for_tests: bool,
    /// Its `cfg(...)` condition; empty: none.
    target: String,
}

/// The elements of an array in an object; none if there is no such array.
pub fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().map(Vec::as_slice).unwrap_or_default().iter()
}

/// A string; empty if it is none.
pub fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn packages(metadata: &Value) -> Vec<Package> {
    let room_of =
        |folder: &Path| folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // Packages from a registry have a source.
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
    fn arrows(&self) -> Vec<Violation> {
        let Some((_, allowed)) = ARROWS.iter().find(|(room, _)| *room == self.room) else {
            let what = "unknown crate: list its dependencies in xtask/src/tidy/packages.rs, with a \
                 design note";
            return vec![violation(Rule::Arrows, &self.room, what)];
        };
        let rooms = self.dependencies.iter().filter_map(|d| d.room.as_ref().map(|room| (room, d)));
        let bad = rooms.filter(|(room, dependency)| {
            !(allowed.contains(&room.as_str()) || dependency.for_tests && *room == TESTS_ONLY)
        });
        bad.map(|(room, _)| {
            let what = format!("uses {room}: dependencies go downward only, see {ARCHITECTURE}");
            violation(Rule::Arrows, &self.room, what)
        })
        .collect()
    }

    fn spare(&self) -> Vec<Violation> {
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
            violation(Rule::Dependencies, &self.room, what)
        })
        .collect()
    }

    /// Requires that the manifest or root file forbids or denies `unsafe`.
    fn header(&self, root: &Path) -> Option<Violation> {
        let read = |name: &str| std::fs::read_to_string(self.folder.join(name)).unwrap_or_default();
        let manifest = read("Cargo.toml");
        let roots = code_of(&(read("src/lib.rs") + &read("src/main.rs")));
        let has = |level: &str| {
            roots.contains(&format!("#![{level}(unsafe_code)]"))
                || manifest.contains(&format!("unsafe_code = \"{level}\""))
        };
        let forbid = FORBID_UNSAFE.contains(&self.room.as_str());
        if has("forbid") || !forbid && has("deny") {
            return None;
        }
        let level = if forbid { "forbid" } else { "deny" };
        let at = self.folder.strip_prefix(root).unwrap_or(&self.folder).display().to_string();
        Some(violation(Rule::Headers, at, format!("add #![{level}(unsafe_code)] to its root")))
    }
}

fn unnamed(packages: &[Package], architecture: &str) -> Vec<Violation> {
    let missing = packages.iter().filter(|p| !has_word(architecture, &format!("`{}`", p.room)));
    missing
        .map(|p| violation(Rule::Documents, ARCHITECTURE, format!("does not name `{}`", p.room)))
        .collect()
}

fn licences(metadata: &Value) -> Vec<Violation> {
    let foreign = list(metadata, "packages").filter(|p| !p["source"].is_null());
    let judge = |p: &Value| {
        let (name, licence) = (text(&p["name"]), text(&p["license"]));
        let what = match is_permissive(licence) {
            _ if p["source"] != REGISTRY => format!("comes from {}", text(&p["source"])),
            Some(true) => return None,
            Some(false) => format!("licence {licence} is not permissive"),
            None => format!("licence '{licence}' is not a valid expression"),
        };
        Some(violation(Rule::Licences, name, what))
    };
    foreign.filter_map(judge).collect()
}

/// The strings of an array in a file of TOML that we write ourselves; none if it has no such array.
pub fn array<'a>(toml: &'a str, key: &str) -> Vec<&'a str> {
    let from = toml.split_once(&format!("\n{key} = [")).map(|(_, rest)| rest).unwrap_or_default();
    let inner = from.split_once(']').map(|(inner, _)| inner).unwrap_or_default();
    inner.split('"').skip(1).step_by(2).collect()
}

fn build_scripts(metadata: &Value, allowed: &[&str]) -> Vec<Violation> {
    let foreign = list(metadata, "packages").filter(|p| !p["source"].is_null());
    let runs = |p: &&Value| {
        list(p, "targets").any(|target| list(target, "kind").any(|kind| kind == "custom-build"))
    };
    let names: BTreeSet<&str> = foreign.filter(runs).map(|p| text(&p["name"])).collect();
    let bad = names.into_iter().filter(|name| !allowed.contains(name));
    let what = "runs code when it is built: read its build.rs, then list it in deny.toml";
    bad.map(|name| violation(Rule::Dependencies, name, what)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn room(room: &str, dependencies: Value) -> Package {
        let manifest = format!("/x/crates/{room}/Cargo.toml");
        let package = json!({"manifest_path": manifest, "dependencies": dependencies});
        packages(&json!({ "packages": [package] })).remove(0)
    }

    #[test]
    fn dependencies_upward_or_sideways_are_violations() {
        let uses = |path: &str, kind: Value| json!([{"name": "y", "path": path, "kind": kind}]);
        assert_eq!(room("ring", uses("/x/crates/shm", Value::Null)).arrows(), []);
        assert_eq!(room("ring", uses("/x/crates/switch", Value::Null)).arrows().len(), 1);
        assert_eq!(room("uplink", uses("/x/crates/vhost-user", Value::Null)).arrows().len(), 1);
        assert_eq!(room("ring", uses("/x/crates/sim", json!("dev"))).arrows(), []);
        assert_eq!(room("ring", uses("/x/crates/sim", Value::Null)).arrows().len(), 1);
        assert_eq!(room("attic", json!([])).arrows().len(), 1);
    }

    #[test]
    fn spare_rooms_have_few_foreign_dependencies() {
        let on = |name: &str, target: &str| json!([{"name": name, "target": target}]);
        assert_eq!(room("shm", on("libc", "")).spare(), []);
        assert_eq!(room("shm", on("loom", "cfg(loom)")).spare(), []);
        assert_eq!(room("shm", on("loom", "")).spare().len(), 1);
        assert_eq!(room("ring", on("serde", "")).spare().len(), 1);
        assert_eq!(room("uplink", on("serde", "")).spare(), []);
    }

    #[test]
    fn packages_that_run_code_when_built_are_listed() {
        let package = |name: &str, kind: &str| {
            let targets = json!([{"kind": ["lib"]}, {"kind": [kind]}]);
            json!({"name": name, "source": REGISTRY, "targets": targets})
        };
        let packages = [package("y", "custom-build"), package("z", "example")];
        let metadata = json!({ "packages": packages });
        let config = "[bans.build]\nallow-build-scripts = [\n    \"x\",\n    \"y\",\n]\n";
        let allowed = array(config, "allow-build-scripts");
        assert_eq!(allowed, ["x", "y"]);
        assert_eq!(build_scripts(&metadata, &allowed), []);
        assert_eq!(build_scripts(&metadata, &["x"]).len(), 1);
    }

    #[test]
    fn unnamed_crates_and_unknown_licences_are_violations() {
        let packages = [room("shm", json!([]))];
        assert_eq!(unnamed(&packages, "the room `shm` holds"), []);
        assert_eq!(unnamed(&packages, "shmem").len(), 1);
        let foreign = |licence: &str, source: &str| {
            let package = json!({"name": "z", "source": source, "license": licence});
            json!({ "packages": [package] })
        };
        assert_eq!(licences(&foreign("MIT OR Apache-2.0", REGISTRY)), []);
        assert_eq!(licences(&foreign("GPL-3.0-only", REGISTRY)).len(), 1);
        assert_eq!(licences(&foreign("", REGISTRY)).len(), 1);
        assert_eq!(licences(&foreign("MIT", "git+https://example.org/z#5a")).len(), 1);
        assert_eq!(licences(&foreign("MIT", "registry+https://example.org/index")).len(), 1);
    }
}
