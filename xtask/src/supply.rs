//! `cargo xtask deny` and `cargo xtask sbom`: the packages that the programs are made of.
//!
//! `tidy` checks licences and sources in every run, and needs no other program; `deny` checks the
//! same by cargo-deny, where that is installed, and known vulnerabilities if asked to.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::musl::{PROGRAMS, target};
use crate::tidy::packages::{list, metadata, text};

/// Runs cargo-deny with `deny.toml`; prints counts as a step of CI. `advisories`: also compares
/// with RustSec's database, which it downloads.
///
/// # Errors
/// cargo cannot be run; or cargo-deny is missing and advisories were asked for.
pub fn deny(root: &Path, advisories: bool) -> Result<bool, String> {
    let cargo = || {
        let mut command = Command::new(crate::tidy::cargo());
        command.current_dir(root).arg("deny");
        command
    };
    let found = cargo().arg("--version").output();
    if !found.is_ok_and(|out| out.status.success()) {
        let missing = "no cargo-deny: cargo install cargo-deny --locked";
        if advisories {
            return Err(missing.into());
        }
        println!("not checked: {missing}\n0 passed, 0 failed, 1 skipped");
        return Ok(true);
    }
    let mut command = cargo();
    command.args(["check", "licenses", "bans", "sources"]);
    command.args(advisories.then_some("advisories"));
    let passed = command.status().map_err(|error| format!("cargo: {error}"))?.success();
    println!("{} passed, {} failed, 0 skipped", u8::from(passed), u8::from(!passed));
    Ok(passed)
}

/// Writes `target/pvswitch.cdx.json`: the packages of the released programs as CycloneDX. The same
/// lock file makes the same bytes. Returns its path.
///
/// # Errors
/// cargo or a file.
pub fn sbom(root: &Path) -> Result<PathBuf, String> {
    let at = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    let lock = root.join("Cargo.lock");
    let lock = std::fs::read_to_string(&lock).map_err(|error| at(&lock, error))?;
    let bom = bom(&metadata(root, &target())?, &lock)?;
    let path = root.join("target/pvswitch.cdx.json");
    let bytes = serde_json::to_string_pretty(&bom).map_err(|error| error.to_string())? + "\n";
    std::fs::create_dir_all(root.join("target")).map_err(|error| at(&path, error))?;
    std::fs::write(&path, bytes).map_err(|error| at(&path, error))?;
    Ok(path)
}

/// The digests of packages in a lock file, by name and version.
fn digests(lock: &str) -> BTreeMap<String, String> {
    let value = |line: &str, key: &str| -> Option<String> {
        Some(line.strip_prefix(key)?.strip_prefix(" = \"")?.strip_suffix('"')?.into())
    };
    let (mut name, mut version) = (String::new(), String::new());
    let mut digests = BTreeMap::new();
    for line in lock.lines() {
        name = value(line, "name").unwrap_or(name);
        version = value(line, "version").unwrap_or(version);
        if let Some(digest) = value(line, "checksum") {
            digests.insert(format!("{name}@{version}"), digest);
        }
    }
    digests
}

/// Dependencies of each package, by id: of the program itself, and of its build.
type Edges<'a> = BTreeMap<&'a str, Vec<(&'a str, bool)>>;

fn edges(metadata: &Value) -> Edges<'_> {
    let mut all = Edges::new();
    for node in list(&metadata["resolve"], "nodes") {
        let mut deps = Vec::new();
        for dep in list(node, "deps") {
            // Of the program if empty; also of the build, or of tests.
            let kinds: Vec<&str> = list(dep, "dep_kinds").map(|kind| text(&kind["kind"])).collect();
            if kinds.iter().any(|kind| *kind != "dev") {
                deps.push((text(&dep["pkg"]), kinds.contains(&"")));
            }
        }
        all.insert(text(&node["id"]), deps);
    }
    all
}

fn bom(metadata: &Value, lock: &str) -> Result<Value, String> {
    let packages: BTreeMap<&str, &Value> =
        list(metadata, "packages").map(|package| (text(&package["id"]), package)).collect();
    let is_macro = |id: &str| {
        let targets = packages.get(id).map(|package| list(package, "targets"));
        targets.is_some_and(|mut all| all.any(|t| list(t, "kind").any(|k| k == "proc-macro")))
    };
    let edges = edges(metadata);
    let roots: Vec<&str> = packages
        .iter()
        .filter(|(_, p)| p["source"].is_null() && PROGRAMS.contains(&text(&p["name"])))
        .map(|(id, _)| *id)
        .collect();
    if roots.len() != PROGRAMS.len() {
        return Err(format!("not all of {} are packages", PROGRAMS.join(", ")));
    }
    // What is linked, and what only the build needs: procedural macros, and all that these use.
    let (mut linked, mut reached) = (BTreeSet::new(), BTreeSet::new());
    let mut next: Vec<(&str, bool)> = roots.iter().map(|id| (*id, true)).collect();
    while let Some((id, is_linked)) = next.pop() {
        let is_new = reached.insert(id) | (is_linked && linked.insert(id));
        if is_new {
            let deps = edges.get(id).map(Vec::as_slice).unwrap_or_default();
            let is_linked = |dep: &(&str, bool)| is_linked && dep.1 && !is_macro(dep.0);
            next.extend(deps.iter().map(|dep| (dep.0, is_linked(dep))));
        }
    }
    let digests = digests(lock);
    let purl = |id: &str| {
        let package = packages[id];
        format!("pkg:cargo/{}@{}", text(&package["name"]), text(&package["version"]))
    };
    let component = |id: &str| {
        let (package, own) = (packages[id], PROGRAMS.contains(&text(&packages[id]["name"])));
        let (name, version) = (text(&package["name"]), text(&package["version"]));
        // `/` was once written for OR.
        let licence = text(&package["license"]).replace('/', " OR ");
        let mut component = json!({
            "type": if own { "application" } else { "library" },
            "bom-ref": purl(id),
            "name": name,
            "version": version,
            "scope": if linked.contains(id) { "required" } else { "excluded" },
            "licenses": [{ "expression": licence }],
            "purl": purl(id),
        });
        if let Some(digest) = digests.get(&format!("{name}@{version}")) {
            component["hashes"] = json!([{ "alg": "SHA-256", "content": digest }]);
        } else if !package["source"].is_null() {
            return Err(format!("{name} {version} has no checksum in Cargo.lock"));
        }
        Ok(component)
    };
    let components = reached.iter().map(|id| component(id)).collect::<Result<Vec<_>, _>>()?;
    let dependency = |id: &&str| {
        let deps = edges.get(id).map(Vec::as_slice).unwrap_or_default();
        let on: BTreeSet<String> = deps.iter().map(|dep| purl(dep.0)).collect();
        json!({ "ref": purl(id), "dependsOn": on })
    };
    let version = text(&packages[roots[0]]["version"]);
    let release = format!("pkg:generic/pvswitch@{version}");
    let programs: Vec<String> = roots.iter().map(|id| purl(id)).collect();
    let own = json!({ "ref": release, "dependsOn": programs });
    let dependencies: Vec<Value> = reached.iter().map(dependency).chain([own]).collect();
    Ok(json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": { "component": {
            "type": "application",
            "bom-ref": release,
            "name": "pvswitch",
            "version": version,
            "licenses": [{ "expression": text(&packages[roots[0]]["license"]) }],
        } },
        "components": components,
        "dependencies": dependencies,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of this tree, by name.
    fn components(bom: &Value) -> BTreeMap<&str, &Value> {
        list(bom, "components").map(|component| (text(&component["name"]), component)).collect()
    }

    #[test]
    fn every_package_of_the_programs_is_listed_with_licence_and_digest() {
        let root = crate::root();
        let lock = std::fs::read_to_string(root.join("Cargo.lock")).unwrap();
        let bom = bom(&metadata(&root, &target()).unwrap(), &lock).unwrap();
        let all = components(&bom);
        for (name, component) in &all {
            assert!(!text(&component["licenses"][0]["expression"]).is_empty(), "{name}");
            let ours = name.starts_with("pvswitch");
            let digest = text(&component["hashes"][0]["content"]);
            assert_eq!(digest.len(), if ours { 0 } else { 64 }, "{name}");
        }
        let scope = |name: &str| all.get(name).map(|component| text(&component["scope"]));
        for linked in ["pvswitch", "pvswitch-plugin", "pvswitch-shm", "pvswitch-hostile", "libc"] {
            assert_eq!(scope(linked), Some("required"), "{linked}");
        }
        // It runs in the compiler; of the tests and of other programs nothing is listed.
        assert_eq!(scope("syn"), Some("excluded"));
        for absent in ["proptest", "pvswitch-sim", "pvswitch-lab", "resvg", "xtask"] {
            assert_eq!(scope(absent), None, "{absent}");
        }
        let refs: BTreeSet<_> = list(&bom, "dependencies").map(|d| text(&d["ref"])).collect();
        for dependency in list(&bom, "dependencies") {
            assert!(list(dependency, "dependsOn").all(|on| refs.contains(text(on))));
        }
    }

    #[test]
    fn package_without_a_digest_is_an_error() {
        let package = |name: &str, source: Value| {
            json!({ "id": name, "name": name, "version": "1.0.0", "license": "MIT/Apache-2.0",
                    "source": source, "targets": [] })
        };
        let deps = json!([{ "pkg": "x", "dep_kinds": [{ "kind": null }] }]);
        let metadata = json!({
            "packages": [
                package("pvswitch", Value::Null),
                package("pvswitch-plugin", Value::Null),
                package("x", json!("registry")),
            ],
            "resolve": { "nodes": [{ "id": "pvswitch", "deps": deps }] },
        });
        let lock = |name: &str| {
            format!("[[package]]\nname = \"{name}\"\nversion = \"1.0.0\"\nchecksum = \"5a\"\n")
        };
        assert!(bom(&metadata, &lock("y")).unwrap_err().contains("x 1.0.0"));
        let bom = bom(&metadata, &lock("x")).unwrap();
        let x = components(&bom)["x"];
        assert_eq!(text(&x["hashes"][0]["content"]), "5a");
        assert_eq!(text(&x["licenses"][0]["expression"]), "MIT OR Apache-2.0");
    }
}
