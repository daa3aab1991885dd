//! Figures and pictures in documents are those of the committed runs: they are made again from
//! `docs/results` and compared. `docs/results/README.md` says how a figure is marked.

mod figures;
mod query;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use figures::Checker;
use pvswitch_lab::store::{Results, plan_of};
use pvswitch_lab::{show, studies};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn names(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The folders of results.
fn folders() -> Vec<String> {
    let all = names(&root().join("docs/results")).into_iter();
    all.filter(|name| root().join("docs/results").join(name).is_dir()).collect()
}

fn read(folder: &str) -> Result<Results, String> {
    let path = root().join("docs/results").join(folder);
    let plan = plan_of(&path).map_err(|error| error.to_string())?;
    let study = studies::of(&plan, studies::ALL).map_err(|error| format!("{folder}: {error}"))?;
    Results::read(&path, plan, study, &mut |_| ()).map_err(|error| error.to_string())
}

/// Makes the report of committed runs, in a folder of its own.
fn report(folder: &str) -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("documents").join(folder);
    let _ = std::fs::remove_dir_all(&out);
    std::fs::create_dir_all(&out).unwrap();
    for file in ["plan.toml", "machine.json", "runs.csv"] {
        std::fs::copy(root().join("docs/results").join(folder).join(file), out.join(file)).unwrap();
    }
    show(std::slice::from_ref(&out), None, studies::ALL).unwrap();
    out
}

/// Every document with its path from the root.
fn documents() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for folder in ["", "docs", "docs/design"] {
        for name in names(&root().join(folder)).into_iter().filter(|name| name.ends_with(".md")) {
            let path = Path::new(folder).join(name);
            let text = std::fs::read_to_string(root().join(&path)).unwrap();
            found.push((path.display().to_string(), text));
        }
    }
    found
}

#[test]
fn every_folder_holds_runs_that_can_be_read() {
    let folders = folders();
    assert!(folders.len() > 20, "{folders:?}");
    for folder in folders {
        let results = read(&folder).unwrap();
        assert!(!results.runs.is_empty() && !results.machine.cpu.is_empty(), "{folder}");
    }
}

/// Files of a folder of results: those that are committed; without git's index, all that exist.
fn files(folder: &str) -> BTreeSet<String> {
    let path = root().join("docs/results").join(folder);
    if !root().join(".git").exists() {
        return names(&path);
    }
    let list = Command::new("git").args(["ls-files"]).current_dir(&path).output().unwrap();
    assert!(list.status.success(), "git: {}", String::from_utf8_lossy(&list.stderr));
    String::from_utf8(list.stdout).unwrap().lines().map(Into::into).collect()
}

/// Most bytes of a folder's histograms.
const HISTOGRAMS_MAX: u64 = 512 << 10;

/// A log of latencies, which other tools merge.
fn is_histogram(name: &str) -> bool {
    name.strip_prefix("latency/").is_some_and(|log| !log.contains('/') && log.ends_with(".hlog"))
}

/// Reports and plots, which `pvswitch lab report` makes in the same folder, are not committed.
#[test]
fn every_folder_holds_only_measured_files() {
    for folder in folders() {
        let mut files = files(&folder);
        // Of an export without git's index, the folder of the logs.
        files.retain(|name| !is_histogram(name) && name != "latency");
        let files = Vec::from_iter(files);
        assert_eq!(files, ["machine.json", "plan.toml", "runs.csv"], "docs/results/{folder}");
        let latency = std::fs::read_dir(root().join("docs/results").join(&folder).join("latency"));
        let sizes = latency.into_iter().flatten().flatten().map(|f| f.metadata().unwrap().len());
        let bytes = sizes.sum::<u64>();
        assert!(bytes <= HISTOGRAMS_MAX, "docs/results/{folder}/latency: {bytes} bytes");
    }
}

/// With `PVSWITCH_FIGURES=write` in the environment, wrong figures are replaced in the documents.
#[test]
fn figures_are_those_of_the_runs() {
    let mut checker = Checker::new(read);
    if std::env::var("PVSWITCH_FIGURES").is_ok_and(|what| what == "write") {
        for (name, text) in documents() {
            let (fixed, _) = checker.fix(&name, &text);
            if fixed != text {
                std::fs::write(root().join(name), fixed).unwrap();
            }
        }
    }
    checker.checked = 0;
    let wrong: Vec<String> =
        documents().iter().flat_map(|(name, text)| checker.check(name, text)).collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    assert!(checker.checked > 500, "only {} figures are marked", checker.checked);
    // The noise floor is printed where figures are: in one document at least.
    assert_eq!(checker.without_noise(), [""; 0]);
}

/// How long the five studies take is in the document as `lab list` prints it, on two CPUs.
#[test]
fn times_of_studies_are_those_of_the_list() {
    let list = pvswitch_lab::list(studies::ALL, false);
    let text = std::fs::read_to_string(root().join("docs/studies.md")).unwrap();
    for study in &studies::ALL[..5] {
        let name = study.facts().name;
        // With more CPUs it has more cells.
        if name == "threads" && std::thread::available_parallelism().unwrap().get() != 2 {
            println!("skipped: the time of 'threads' is of two CPUs");
            continue;
        }
        let mut lines = list.lines().skip_while(|line| !line.starts_with(name));
        let times = lines.find_map(|line| line.trim().strip_prefix("--smallest ")).unwrap();
        let times: Vec<&str> = times.split(", ").collect();
        let words = ["", "--quick ", "default ", "--full "];
        let times: Vec<&str> =
            times.iter().zip(words).map(|(time, word)| time.strip_prefix(word).unwrap()).collect();
        let row = text.lines().find(|line| line.starts_with(&format!("| `{name}` |"))).unwrap();
        let cells: Vec<&str> = row.split('|').skip(2).map(str::trim).take(4).collect();
        assert_eq!(cells, times, "docs/studies.md: {name}");
    }
}

/// `docs/pictures/FOLDER/NAME.svg` is the plot of that name in the report of that folder.
#[test]
fn pictures_are_those_of_the_report() {
    let pictures = root().join("docs/pictures");
    let all = names(&pictures).into_iter().filter(|name| pictures.join(name).is_dir());
    let mut count = 0;
    for folder in all {
        let plots = report(&folder).join("plots");
        for name in names(&pictures.join(&folder)) {
            let [kept, made] = [pictures.join(&folder), plots.clone()]
                .map(|at| std::fs::read_to_string(at.join(&name)).unwrap());
            let made_at = plots.join(&name);
            if std::env::var("PVSWITCH_FIGURES").is_ok_and(|what| what == "write") {
                std::fs::write(pictures.join(&folder).join(&name), &made).unwrap();
                count += 1;
                continue;
            }
            assert!(kept == made, "docs/pictures/{folder}/{name}: copy {}", made_at.display());
            count += 1;
        }
    }
    assert!(count > 0);
}
