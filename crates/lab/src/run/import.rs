//! `import`: the runs of a rig as a folder of results.

use std::collections::BTreeMap;
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
/// The file is not of that form; the folder has other contents, or cannot be written.
pub fn import(file: &Path, out: &Path) -> Result<usize, Error> {
    let bad = |what: String| Error::usage(format!("import: {}: {what}", file.display()));
    let text = fs::read(file).map_err(|error| bad(error.to_string()))?;
    let Measured {
        rig,
        command,
        seconds,
        program,
        switch_cpus,
        guest_cpus,
        versions,
        facts,
        axes,
        runs,
    } = serde_json::from_slice(&text).map_err(|error| bad(error.to_string()))?;
    let repeats = runs.iter().map(|run| run.repeat + 1).max().unwrap_or(0);
    let mut plan = Plan::new(&format!("rig-{rig}"), repeats, seconds, axes);
    plan.rig = Some(facts);
    let study = rig::of(&plan).expect("it is a rig's");
    plan.check(study)?;
    let mut machine = Machine::here(&[], &switch_cpus, &guest_cpus);
    machine.versions.extend(versions);
    machine.built = Built::of(&program, &[&program]);
    machine.command = command;
    let (mut folder, there) =
        Folder::open(out, &plan, study, &machine, &mut |line| eprintln!("{line}"))?;
    if !there.is_empty() {
        let what = "holds results already: use another --out";
        return Err(Error::usage(format!("import: {}: {what}", out.display())));
    }
    let cells = plan.cells(study);
    for One { cell, repeat, distance_ns, others_percent, figures } in &runs {
        let value = |axis: &Axis| Some((axis.name.clone(), cell.get(&axis.name)?.clone()));
        let known = plan.axes.iter().map(value).collect::<Option<Vec<_>>>().map(Cell);
        let known = known.filter(|known| cells.contains(known) && cell.len() == plan.axes.len());
        let cell = known.ok_or_else(|| bad(format!("run of {cell:?}: not a cell of its axes")))?;
        let done = Done {
            cell: cell.clone(),
            repeat: *repeat,
            distance_ns: *distance_ns,
            others_percent: *others_percent,
            figures: figures.clone(),
        };
        folder.add(&Turn { cell, repeat: *repeat, again: false }, &Ok(done))?;
    }
    Ok(runs.len())
}
