//! `import`: the runs of a rig as a folder of results.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::Error;
use crate::machine::Machine;
use crate::plan::{Axis, Cell, Plan, RigFacts, Turn};
use crate::provenance::Built;
use crate::store::{Done, Folder};
use crate::studies::rig;

/// What a rig has measured.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Measured {
    /// Name of the rig.
    rig: String,
    /// Command line that repeats it.
    command: String,
    /// Length of a run, in seconds.
    seconds: f64,
    /// The program measured.
    program: PathBuf,
    switch_cpus: Vec<usize>,
    guest_cpus: Vec<usize>,
    /// Versions of other programs, by name.
    #[serde(default)]
    versions: BTreeMap<String, String>,
    facts: RigFacts,
    /// As in a plan: the values of the last are compared.
    axes: Vec<Axis>,
    runs: Vec<One>,
}

/// One run.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct One {
    cell: BTreeMap<String, String>,
    /// The round, from 0.
    repeat: u32,
    /// Of the control, which is compared with the other run of that cell and round.
    #[serde(default)]
    again: bool,
    #[serde(default)]
    distance_ns: f64,
    #[serde(default)]
    others_percent: f64,
    figures: BTreeMap<String, f64>,
}

/// Writes what a rig has measured, as JSON in `file`, into the new folder `out`; returns the number
/// of runs.
///
/// # Errors
/// The file is not of that form, or has two runs of a cell in one round; the folder has other
/// contents, or cannot be written.
pub fn import(file: &Path, out: &Path) -> Result<usize, Error> {
    let bad = |what: String| Error::usage(format!("import: {}: {what}", file.display()));
    let text = fs::read(file).map_err(|error| bad(error.to_string()))?;
    let measured: Measured =
        serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
    let rounds = measured.runs.iter().map(|run| run.repeat.saturating_add(1));
    let repeats = rounds.max().unwrap_or(0);
    let name = format!("rig-{}", measured.rig);
    let mut plan = Plan::new(&name, repeats, measured.seconds, measured.axes);
    plan.rig = Some(measured.facts);
    let study = rig::of(&plan).expect("it is a rig's");
    plan.check(study)?;
    let cells = plan.cells(study);
    let (mut runs, mut turns) = (Vec::new(), BTreeSet::new());
    for One { cell, repeat, again, distance_ns, others_percent, figures } in measured.runs {
        let value = |axis: &Axis| Some((axis.name.clone(), cell.get(&axis.name)?.clone()));
        let known = plan.axes.iter().map(value).collect::<Option<Vec<_>>>().map(Cell);
        let known = known.filter(|known| cells.contains(known) && cell.len() == plan.axes.len());
        let cell = known.ok_or_else(|| bad(format!("run of {cell:?}: not a cell of its axes")))?;
        let measures = study.facts().measures;
        if let Some(name) = figures.keys().find(|name| measures.iter().all(|m| m.name != **name)) {
            return Err(bad(format!("run of {cell}: no measure '{name}'")));
        }
        let turn = Turn { cell: cell.clone(), repeat, again };
        if !turns.insert(turn.clone()) {
            return Err(bad(format!("run of {cell}: round {repeat} has it already")));
        }
        runs.push((turn, Done { cell, repeat, distance_ns, others_percent, figures }));
    }
    let mut machine = Machine::here(&[], &measured.switch_cpus, &measured.guest_cpus);
    machine.versions.extend(measured.versions);
    machine.built = Built::of(&measured.program, &[&measured.program]);
    machine.command = measured.command;
    let (mut folder, there) =
        Folder::open(out, &plan, study, &machine, &mut |line| eprintln!("{line}"))?;
    if !there.is_empty() {
        let what = "holds results already: use another --out";
        return Err(Error::usage(format!("import: {}: {what}", out.display())));
    }
    let count = runs.len();
    for (turn, run) in runs {
        folder.add(&turn, &Ok(run))?;
    }
    Ok(count)
}
