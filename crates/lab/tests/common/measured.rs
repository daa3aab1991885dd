//! What was measured by a program that is neither the lab nor a rig, as `pvswitch-lab import` reads
//! it: for benchmarks and tests of other packages, too.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};

/// All that was measured.
pub struct Measured<'a> {
    /// Name of what measured it.
    pub rig: &'a str,
    /// Command line that repeats it.
    pub command: String,
    /// Length of a run, in seconds.
    pub seconds: f64,
    /// The program measured.
    pub program: &'a Path,
    /// CPUs that it ran on; empty: any.
    pub cpus: Vec<u32>,
    /// What the runs are of.
    pub about: String,
    /// Name, unit, and what it is. Of all, less is better.
    pub measures: &'a [(&'a str, &'a str, &'a str)],
    /// Names with their values; values of the last are compared.
    pub axes: Vec<(&'a str, Vec<String>)>,
    /// The runs, in the order measured.
    pub runs: Vec<Run>,
}

/// One run.
pub struct Run {
    /// A value of each axis.
    pub cell: Vec<String>,
    /// The round, from 0.
    pub repeat: usize,
    /// Whether it is of the control, which is compared with the other run of that cell and round.
    pub again: bool,
    /// Figures by the names of measures.
    pub figures: Value,
}

impl Measured<'_> {
    /// Returns the contents of the file to import.
    pub fn json(&self) -> Value {
        let measures = self.measures.iter().map(|(name, unit, about)| {
            json!({ "name": name, "unit": unit, "better": "less", "about": about })
        });
        let axes = self.axes.iter().map(|(name, values)| json!({ "name": name, "values": values }));
        let runs = self.runs.iter().map(|run| {
            let names = self.axes.iter().map(|(name, _)| *name);
            let cell: BTreeMap<_, _> = names.zip(&run.cell).collect();
            let Run { repeat, again, figures, .. } = run;
            json!({ "cell": cell, "repeat": repeat, "again": again, "figures": figures })
        });
        json!({
            "rig": self.rig,
            "command": self.command,
            "seconds": self.seconds,
            "program": self.program,
            "switch_cpus": self.cpus,
            "guest_cpus": [],
            "facts": { "about": self.about, "measures": Vec::from_iter(measures) },
            "axes": Vec::from_iter(axes),
            "runs": Vec::from_iter(runs),
        })
    }
}
