//! The folder of results. Results of another plan, version or machine are never overwritten.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use super::csv;
use super::{Done, Results, Void};
use crate::error::Error;
use crate::machine::{Features, Machine, Rivals};
use crate::plan::{Cell, Plan, Turn};
use crate::study::Study;

/// Columns of `runs.csv` between axes and measures.
const RUN_COLUMNS: [&str; 5] = ["repeat", "again", "distance_ns", "others_percent", "void"];
/// The same of versions without a control, which did not keep void runs in that file.
const OLD_COLUMNS: [&str; 3] = ["repeat", "distance_ns", "others_percent"];
const PLAN: &str = "plan.toml";
const RUNS: &str = "runs.csv";
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
    /// Those between axes and measures.
    of_run: &'static [&'static str],
}

/// A line of `runs.csv`.
struct Line {
    turn: Turn,
    /// The result, or why there is none.
    outcome: Result<Done, String>,
}

impl Columns {
    fn of(plan: &Plan, study: &dyn Study) -> Self {
        let axes = plan.axes.iter().map(|axis| axis.name.clone()).collect();
        let measures =
            study.facts().measures.iter().map(|measure| measure.name.to_string()).collect();
        Self { axes, measures, of_run: &RUN_COLUMNS }
    }

    fn header(&self) -> String {
        let (axes, measures) = (self.axes.iter(), self.measures.iter());
        let axes = axes.map(String::as_str).chain(self.of_run.iter().copied());
        csv::line(axes.chain(measures.map(String::as_str)))
    }

    /// Those of a file with this header; `None`: of another study or version. An earlier version
    /// may lack the last measures.
    fn of_header(self, header: &str) -> Option<Self> {
        let numbers = (1..=self.measures.len()).rev();
        let mut versions = numbers.flat_map(|n| {
            let measures = self.measures[..n].to_vec();
            let of = |of_run| Self { axes: self.axes.clone(), measures: measures.clone(), of_run };
            [&RUN_COLUMNS[..], &OLD_COLUMNS].map(of)
        });
        versions.find(|columns| columns.header().trim_end() == header)
    }

    fn line(&self, turn: &Turn, outcome: &Result<Done, String>) -> String {
        let mut values: Vec<String> =
            self.axes.iter().map(|axis| turn.cell.get(axis).to_string()).collect();
        values.extend([turn.repeat.to_string(), u32::from(turn.again).to_string()]);
        match outcome {
            Ok(done) => {
                let covariates = [format!("{:.0}", done.distance_ns), one_digit(done)];
                values.extend(covariates.into_iter().chain([String::new()]));
            }
            Err(why) => values.extend([String::new(), String::new(), why.clone()]),
        }
        let figure = |name| {
            let figure = outcome.as_ref().ok().and_then(|done| done.figures.get(name));
            figure.map_or(String::new(), ToString::to_string)
        };
        values.extend(self.measures.iter().map(figure));
        csv::line(values.iter().map(String::as_str))
    }

    fn parse(&self, line: &str) -> Option<Line> {
        let values = csv::values(line)?;
        if values.len() != self.axes.len() + self.of_run.len() + self.measures.len() {
            return None;
        }
        let (axes, rest) = values.split_at(self.axes.len());
        let (of_run, measures) = rest.split_at(self.of_run.len());
        let of_run = |name: &str| {
            let at = self.of_run.iter().position(|known| *known == name);
            at.map_or("", |at| &of_run[at])
        };
        let cell = Cell(self.axes.iter().cloned().zip(axes.iter().cloned()).collect());
        let repeat = of_run("repeat").parse().ok()?;
        let turn = Turn { cell: cell.clone(), repeat, again: of_run("again") == "1" };
        if !of_run("void").is_empty() {
            return Some(Line { turn, outcome: Err(of_run("void").into()) });
        }
        let mut figures = BTreeMap::new();
        for (name, value) in
            self.measures.iter().zip(measures).filter(|(_, value)| !value.is_empty())
        {
            figures.insert(name.clone(), value.parse().ok()?);
        }
        let distance_ns = of_run("distance_ns").parse().ok()?;
        let others_percent = of_run("others_percent").parse().ok()?;
        let done = Done { cell, repeat, distance_ns, others_percent, figures };
        Some(Line { turn, outcome: Ok(done) })
    }
}

fn one_digit(done: &Done) -> String {
    format!("{:.1}", done.others_percent)
}

const DIFFER: &str = "its columns differ from those of this version of pvswitch; nothing was \
                      changed: use another --out, or the version that wrote it";

/// Contents of `runs.csv`.
struct Read {
    lines: Vec<Line>,
    columns: Columns,
    /// Length of the complete lines if an incomplete one follows.
    whole: Option<u64>,
}

const EARLIER: &str = "measured by an earlier version, with fewer columns: 'lab report' reads \
                       it; to measure, use another --out";

impl Read {
    /// The turns that have a result.
    fn done(&self) -> Vec<Turn> {
        let done = self.lines.iter().filter(|line| line.outcome.is_ok());
        done.map(|line| line.turn.clone()).collect()
    }
}

fn failed(path: &Path, what: impl std::fmt::Display) -> Error {
    Error::Failed(format!("{}: {what}", path.display()))
}

fn read_runs(path: &Path, columns: Columns) -> Result<Read, Error> {
    let bytes = fs::read(path).map_err(|error| failed(path, error))?;
    let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let text = std::str::from_utf8(&bytes[..end])
        .map_err(|_| failed(path, "damaged: not UTF-8; remove it, or use another --out"))?;
    let whole = (end < bytes.len()).then_some(end as u64);
    let mut lines = text.lines();
    let columns = match lines.next() {
        None => return Ok(Read { lines: Vec::new(), columns, whole }),
        Some(header) => columns.of_header(header).ok_or_else(|| failed(path, DIFFER))?,
    };
    let mut read = Vec::new();
    for (i, line) in lines.enumerate() {
        let run = columns.parse(line).ok_or_else(|| {
            failed(path, format!("line {}: not a run; remove the line, then resume", i + 2))
        })?;
        read.push(run);
    }
    Ok(Read { lines: read, columns, whole })
}

/// Returns the runs in a folder that a measurement of this plan can resume from; changes nothing.
///
/// # Errors
/// The folder has other contents.
pub fn existing_runs(path: &Path, plan: &Plan, study: &dyn Study) -> Result<Vec<Turn>, Error> {
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
    let columns = Columns::of(plan, study);
    let read = read_runs(&runs, columns.clone())?;
    if read.columns.header() != columns.header() {
        return Err(failed(&runs, EARLIER));
    }
    Ok(read.done())
}

impl Folder {
    /// Opens it to resume, or creates it; `say` gets messages about repairs.
    pub fn open(
        path: &Path,
        plan: &Plan,
        study: &dyn Study,
        machine: &Machine,
        say: &mut dyn FnMut(String),
    ) -> Result<(Self, Vec<Turn>), Error> {
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
        let (mut runs, mut has_runs) = (Vec::new(), false);
        if runs_file.exists() {
            let read = read_runs(&runs_file, columns.clone())?;
            if let Some(whole) = read.whole {
                let kept = repair(&runs_file, whole)?;
                say(format!(
                    "{}: its last line was incomplete and removed; the original file: {}",
                    runs_file.display(),
                    kept.display()
                ));
            }
            has_runs = !read.lines.is_empty();
            runs = read.done();
        }
        check_machine(path, machine, has_runs)?;
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

    /// Adds a run, or why it has no result, and syncs it to disk.
    pub fn add(&mut self, turn: &Turn, outcome: &Result<Done, String>) -> Result<(), Error> {
        let mut names = outcome.iter().flat_map(|done| done.figures.keys());
        if let Some(name) = names.find(|name| !self.columns.measures.contains(name)) {
            return Err(failed(&self.path, format!("the study has no measure '{name}'")));
        }
        let line = self.columns.line(turn, outcome);
        let written = self.runs.write_all(line.as_bytes()).and_then(|()| self.runs.sync_data());
        written.map_err(|error| failed(&self.path.join(RUNS), error))
    }

    /// Adds features that guests negotiated, and command lines of other switches, to
    /// `machine.json`.
    pub fn add_seen(&self, features: Features, rivals: Rivals) -> Result<(), Error> {
        let mut machine = read_machine(&self.path)?;
        for (name, commands) in rivals {
            machine.rivals.entry(name).or_default().extend(commands);
        }
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
    if let (true, Ok(existing)) = (has_runs, read_machine(path)) {
        let refused = |of: &str, difference: String| {
            let what = format!(
                "holds results of {of}: {difference}. Nothing was changed; use another --out"
            );
            Err(failed(path, what))
        };
        if let Some(difference) = existing.differs(machine) {
            return refused("another machine, or other settings of it", difference);
        }
        if let Some(difference) = existing.differs_in_program(machine) {
            return refused("another program", difference);
        }
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
        let Read { lines, whole, .. } = read_runs(&file, Columns::of(&plan, study))?;
        if whole.is_some() {
            say(format!("{}: its last line is incomplete and ignored", file.display()));
        }
        let (mut runs, mut controls, mut void) = (Vec::new(), Vec::new(), Vec::new());
        let mut seen = BTreeSet::new();
        for Line { turn, outcome } in lines {
            match outcome {
                // The first result of a turn counts.
                Ok(_) if !seen.insert(turn.clone()) => {}
                Ok(done) if turn.again => controls.push(done),
                Ok(done) => runs.push(done),
                Err(why) => void.push(Void { turn, why, repeated: false }),
            }
        }
        for attempt in &mut void {
            attempt.repeated = seen.contains(&attempt.turn);
        }
        let machine = read_machine(path)?;
        Ok(Self { command: machine.command.clone(), plan, runs, machine, controls, void })
    }
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
