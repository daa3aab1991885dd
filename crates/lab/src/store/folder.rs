//! The folder of results. Results of another plan, version or machine are never overwritten.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::csv;
use super::{Done, Results};
use crate::error::Error;
use crate::machine::Features;
use crate::machine::Machine;
use crate::plan::{Cell, Plan};
use crate::study::Study;

/// Columns of `runs.csv` between axes and measures.
const RUN_COLUMNS: [&str; 3] = ["repeat", "distance_ns", "others_percent"];
const PLAN: &str = "plan.toml";
const RUNS: &str = "runs.csv";
const FAILED: &str = "failed.csv";
const MACHINE: &str = "machine.json";
const SUMMARY: &str = "summary.json";

/// A folder of results, opened to add runs.
pub struct Folder {
    path: PathBuf,
    runs: File,
    columns: Columns,
    /// Locks the folder while open.
    _lock: File,
}

/// Columns of `runs.csv`.
#[derive(Clone, Debug)]
struct Columns {
    axes: Vec<String>,
    measures: Vec<String>,
}

impl Columns {
    fn of(plan: &Plan, study: &dyn Study) -> Self {
        let axes = plan.axes.iter().map(|axis| axis.name.clone()).collect();
        let measures =
            study.facts().measures.iter().map(|measure| measure.name.to_string()).collect();
        Self { axes, measures }
    }

    fn header(&self) -> String {
        let (axes, measures) = (self.axes.iter(), self.measures.iter());
        let axes = axes.map(String::as_str).chain(RUN_COLUMNS);
        csv::line(axes.chain(measures.map(String::as_str)))
    }

    fn line(&self, done: &Done) -> String {
        let mut values: Vec<String> =
            self.axes.iter().map(|axis| done.cell.get(axis).to_string()).collect();
        values.push(done.repeat.to_string());
        values.push(format!("{:.0}", done.distance_ns));
        values.push(format!("{:.1}", done.others_percent));
        let figure = |name| done.figures.get(name).map_or(String::new(), ToString::to_string);
        values.extend(self.measures.iter().map(figure));
        csv::line(values.iter().map(String::as_str))
    }

    fn parse(&self, line: &str) -> Option<Done> {
        let values = csv::values(line)?;
        if values.len() != self.axes.len() + RUN_COLUMNS.len() + self.measures.len() {
            return None;
        }
        let (axes, rest) = values.split_at(self.axes.len());
        let (of_run, measures) = rest.split_at(RUN_COLUMNS.len());
        let cell = Cell(self.axes.iter().cloned().zip(axes.iter().cloned()).collect());
        let mut figures = BTreeMap::new();
        for (name, value) in
            self.measures.iter().zip(measures).filter(|(_, value)| !value.is_empty())
        {
            figures.insert(name.clone(), value.parse().ok()?);
        }
        Some(Done {
            cell,
            repeat: of_run[0].parse().ok()?,
            distance_ns: of_run[1].parse().ok()?,
            others_percent: of_run[2].parse().ok()?,
            figures,
        })
    }
}

/// Contents of `runs.csv`.
struct Read {
    runs: Vec<Done>,
    /// Length of the complete lines if an incomplete one follows.
    whole: Option<u64>,
}

fn failed(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::Failed(format!("{}: {what}", path.display()))
}

fn read_runs(path: &Path, columns: &Columns) -> Result<Read, Error> {
    let bytes = fs::read(path).map_err(|error| failed(path, error))?;
    let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let text = std::str::from_utf8(&bytes[..end])
        .map_err(|_| failed(path, "damaged: not UTF-8; remove it, or use another --out"))?;
    let whole = (end < bytes.len()).then_some(end as u64);
    let mut lines = text.lines();
    match lines.next() {
        None => return Ok(Read { runs: Vec::new(), whole }),
        Some(header) if format!("{header}\n") == columns.header() => {}
        Some(_) => {
            let what = "its columns differ from those of this version of pvswitch; nothing was \
                        changed: use another --out, or the version that wrote it";
            return Err(failed(path, what));
        }
    }
    let mut runs = Vec::new();
    for (i, line) in lines.enumerate() {
        let run = columns.parse(line).ok_or_else(|| {
            failed(path, format!("line {}: not a run; remove the line, then resume", i + 2))
        })?;
        runs.push(run);
    }
    Ok(Read { runs, whole })
}

/// Returns the runs in a folder that a measurement of this plan can resume from; changes nothing.
///
/// # Errors
/// The folder has other contents.
pub fn existing_runs(path: &Path, plan: &Plan, study: &dyn Study) -> Result<Vec<Done>, Error> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let mut entries =
        fs::read_dir(path).map_err(|error| failed(path, format!("{error}; use another --out")))?;
    let file = path.join(PLAN);
    if !file.exists() {
        if entries.next().is_none() {
            return Ok(Vec::new());
        }
        let what = format!(
            "has files, but no {PLAN}: not results of the lab. Nothing was changed; \
             use another --out"
        );
        return Err(failed(path, what));
    }
    let existing = Plan::read(&file).map_err(|error| Error::Failed(error.to_string()))?;
    if let Some(difference) = existing.differs(plan) {
        let what = format!(
            "holds results of another plan: {difference}. Nothing was changed; use \
             another --out, or resume with --plan {}",
            file.display()
        );
        return Err(failed(path, what));
    }
    let runs = path.join(RUNS);
    if !runs.exists() {
        return Ok(Vec::new());
    }
    Ok(read_runs(&runs, &Columns::of(plan, study))?.runs)
}

impl Folder {
    /// Opens it to resume, or creates it; `say` gets messages about repairs.
    pub fn open(
        path: &Path,
        plan: &Plan,
        study: &dyn Study,
        machine: &Machine,
        say: &mut dyn FnMut(String),
    ) -> Result<(Self, Vec<Done>), Error> {
        existing_runs(path, plan, study)?;
        fs::create_dir_all(path).map_err(|error| failed(path, error))?;
        let plan_file = path.join(PLAN);
        if !plan_file.exists() {
            write(&plan_file, &plan.to_toml())?;
        }
        let lock = File::open(&plan_file).map_err(|error| failed(&plan_file, error))?;
        if lock.try_lock().is_err() {
            return Err(failed(
                path,
                "another run of the lab is using it; wait, or use another --out",
            ));
        }
        let columns = Columns::of(plan, study);
        let runs_file = path.join(RUNS);
        let mut runs = Vec::new();
        if runs_file.exists() {
            let read = read_runs(&runs_file, &columns)?;
            if let Some(whole) = read.whole {
                let kept = repair(&runs_file, whole)?;
                say(format!(
                    "{}: its last line was incomplete and removed; the original file: {}",
                    runs_file.display(),
                    kept.display()
                ));
            }
            runs = read.runs;
        }
        check_machine(path, machine, !runs.is_empty())?;
        let mut file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&runs_file)
            .map_err(|error| failed(&runs_file, error))?;
        if file.metadata().is_ok_and(|data| data.len() == 0) {
            file.write_all(columns.header().as_bytes())
                .map_err(|error| failed(&runs_file, error))?;
        }
        Ok((Self { path: path.into(), runs: file, columns, _lock: lock }, runs))
    }

    /// Adds a finished run and syncs it to disk.
    pub fn add(&mut self, done: &Done) -> Result<(), Error> {
        let unknown = done.figures.keys().find(|name| !self.columns.measures.contains(name));
        if let Some(name) = unknown {
            return Err(failed(&self.path, format!("the study has no measure '{name}'")));
        }
        let line = self.columns.line(done);
        let written = self.runs.write_all(line.as_bytes()).and_then(|()| self.runs.sync_data());
        written.map_err(|error| failed(&self.path.join(RUNS), error))
    }

    /// Adds a failed run.
    pub fn add_failed(&self, cell: &Cell, repeat: u32, why: &str) -> Result<(), Error> {
        let path = self.path.join(FAILED);
        let axes = self.columns.axes.iter().map(String::as_str);
        let mut text = String::new();
        if !path.exists() {
            text += &csv::line(axes.clone().chain(["repeat", "error"]));
        }
        let repeat = repeat.to_string();
        text += &csv::line(axes.map(|axis| cell.get(axis)).chain([repeat.as_str(), why]));
        let file = OpenOptions::new().create(true).append(true).open(&path);
        file.and_then(|mut file| file.write_all(text.as_bytes()))
            .map_err(|error| failed(&path, error))
    }

    /// Adds features that guests negotiated to `machine.json`.
    pub fn add_features(&self, features: Features) -> Result<(), Error> {
        let mut machine = read_machine(&self.path)?;
        for (kind, lists) in features {
            machine.features.entry(kind).or_default().extend(lists);
        }
        write_machine(&self.path, &machine)
    }
}

/// Writes `summary.json` into a folder of results.
pub fn write_summary(path: &Path, summary: &serde_json::Value) -> Result<(), Error> {
    let text = serde_json::to_string_pretty(summary).unwrap_or_default() + "\n";
    write(&path.join(SUMMARY), &text)
}

/// Truncates the file after its last complete line; returns the path of a copy of the original.
fn repair(path: &Path, whole: u64) -> Result<PathBuf, Error> {
    let names = (1..).map(|n| path.with_extension(format!("csv.damaged-{n}")));
    let kept = names.into_iter().find(|name| !name.exists()).expect("numbers are unlimited");
    fs::copy(path, &kept).map_err(|error| failed(&kept, error))?;
    let file = OpenOptions::new().write(true).open(path);
    file.and_then(|file| file.set_len(whole)).map_err(|error| failed(path, error))?;
    Ok(kept)
}

/// Writes `machine.json` before the first run; compares it with `machine` afterwards.
fn check_machine(path: &Path, machine: &Machine, has_runs: bool) -> Result<(), Error> {
    let file = path.join(MACHINE);
    if let (true, Ok(existing)) = (has_runs, read_machine(path))
        && let Some(difference) = existing.differs(machine)
    {
        let what = format!(
            "holds results of another machine, or other settings of it: {difference}. \
             Nothing was changed; use another --out"
        );
        return Err(failed(path, what));
    }
    if has_runs && file.exists() {
        return Ok(());
    }
    write_machine(path, machine)
}

fn write_machine(path: &Path, machine: &Machine) -> Result<(), Error> {
    let text = serde_json::to_string_pretty(machine).unwrap_or_default() + "\n";
    write(&path.join(MACHINE), &text)
}

fn read_machine(path: &Path) -> Result<Machine, Error> {
    let file = path.join(MACHINE);
    let text = fs::read_to_string(&file).map_err(|error| failed(&file, error))?;
    serde_json::from_str(&text).map_err(|error| failed(&file, error))
}

/// Replaces a file atomically.
fn write(path: &Path, text: &str) -> Result<(), Error> {
    let new = path.with_extension("new");
    let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
    written.map_err(|error| failed(path, error))
}

impl Results {
    /// Reads a folder of results, complete or not; `say` gets messages about missing parts.
    pub fn read(
        path: &Path,
        plan: Plan,
        study: &dyn Study,
        say: &mut dyn FnMut(String),
    ) -> Result<Self, Error> {
        let file = path.join(RUNS);
        let Read { mut runs, whole } = read_runs(&file, &Columns::of(&plan, study))?;
        if whole.is_some() {
            say(format!("{}: its last line is incomplete and ignored", file.display()));
        }
        let mut seen = BTreeSet::new();
        runs.retain(|run| seen.insert((run.cell.clone(), run.repeat)));
        let machine = read_machine(path)?;
        let mut failed = read_failed(path, &plan);
        failed.retain(|(cell, repeat, _)| !seen.contains(&(cell.clone(), *repeat)));
        let failed = failed.into_iter().map(|(cell, _, why)| (cell, why)).collect();
        Ok(Self { command: machine.command.clone(), plan, runs, machine, failed })
    }
}

/// Reads `failed.csv`; unreadable lines are ignored, because nothing depends on them.
fn read_failed(path: &Path, plan: &Plan) -> Vec<(Cell, u32, String)> {
    let text = fs::read_to_string(path.join(FAILED)).unwrap_or_default();
    let parse = |line: &str| {
        let values = csv::values(line)?;
        let (axes, rest) = values.split_at_checked(plan.axes.len())?;
        let names = plan.axes.iter().map(|axis| axis.name.clone());
        let cell = Cell(names.zip(axes.iter().cloned()).collect());
        Some((cell, rest.first()?.parse().ok()?, rest.get(1)?.clone()))
    };
    text.lines().skip(1).filter_map(parse).collect()
}

/// Whether a folder holds results.
pub fn has_plan(path: &Path) -> bool {
    path.join(PLAN).exists()
}

/// Returns the plan of the results in a folder.
pub fn plan_of(path: &Path) -> Result<Plan, Error> {
    let file = path.join(PLAN);
    if !has_plan(path) {
        return Err(failed(path, format!("no {PLAN} in it: not results of the lab")));
    }
    Plan::read(&file).map_err(|error| Error::Failed(error.to_string()))
}
