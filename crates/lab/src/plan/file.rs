//! `plan.toml`: reads, writes and checks plans.

use std::collections::BTreeSet;
use std::path::Path;

use super::{Axis, FORMAT, Plan, Scale};
use crate::error::Error;
use crate::study::Study;
use api::near::did_you_mean;

/// Most runs of a plan; more are probably an error.
const RUNS_MAX: usize = 1_000_000;
const SECONDS_MAX: f64 = 3600.0;

impl Plan {
    /// Reads a plan; [`Plan::check`] checks it against its study.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let at = path.display();
        let text = std::fs::read_to_string(path).map_err(|error| {
            Error::usage(format!("{at}: {error}; see --plan in lab run --help"))
        })?;
        let table: toml::Table = toml::from_str(&text).map_err(|error| {
            Error::usage(format!("{at}: not TOML: {}", error.to_string().trim()))
        })?;
        // First, so that a plan of another version gets this message and no other.
        match table.get("format").and_then(toml::Value::as_integer) {
            Some(format) if format == i64::from(FORMAT) => {}
            Some(format) => {
                return Err(Error::usage(format!(
                    "{at}: written by another version (format {format}; this one reads \
                     {FORMAT}): use that version, or measure again into another folder"
                )));
            }
            None => {
                let what =
                    format!("{at}: no 'format = {FORMAT}' in it: is this a plan of the lab?");
                return Err(Error::usage(what));
            }
        }
        toml::from_str(&text)
            .map_err(|error| Error::usage(format!("{at}: {}", error.to_string().trim())))
    }

    /// The plan as TOML.
    pub fn to_toml(&self) -> String {
        let body = toml::to_string(self).expect("numbers, strings and lists of them are TOML");
        format!("# Plan of a study: its cells are all combinations of the axes' values.\n{body}")
    }

    /// Checks that the study can measure it: its axes, in its order, with known values.
    pub fn check(&self, study: &dyn Study) -> Result<(), Error> {
        let bad = |what: String| Err(Error::usage(format!("plan of {}: {what}", self.study)));
        if self.study != study.facts().name {
            return bad(format!("it is no plan of {}", study.facts().name));
        }
        if self.repeats == 0 || self.repeats > 1000 {
            return bad(format!("repeats = {}: use 1 to 1000", self.repeats));
        }
        if !(self.seconds > 0.0 && self.seconds <= SECONDS_MAX) {
            return bad(format!(
                "seconds = {}: use more than 0, up to {SECONDS_MAX}",
                self.seconds
            ));
        }
        let known = known(study);
        let names: Vec<&str> = known.iter().map(|axis| axis.name.as_str()).collect();
        let given: Vec<&str> = self.axes.iter().map(|axis| axis.name.as_str()).collect();
        if let Some(name) = given.iter().find(|name| !names.contains(name)) {
            let hint = did_you_mean(name, names.iter().copied());
            return bad(format!("no axis '{name}'{hint}: it has {}", names.join(", ")));
        }
        if given != names {
            return bad(format!("its axes are {}, in this order, each once", names.join(", ")));
        }
        for (axis, known) in self.axes.iter().zip(&known) {
            axis.check(known).or_else(bad)?;
        }
        let combinations = self.axes.iter().map(|axis| axis.values.len());
        let runs = combinations.fold(self.repeats as usize, usize::saturating_mul);
        if runs > RUNS_MAX {
            return bad(format!("{runs} runs, {RUNS_MAX} at most: fewer values, or fewer repeats"));
        }
        if self.cells(study).is_empty() {
            return bad("not one combination of these values is a cell of this study".into());
        }
        Ok(())
    }

    /// Replaces the values of an axis, given as `AXIS=V,V`.
    pub fn restrict(&mut self, study: &dyn Study, only: &str) -> Result<(), Error> {
        let Some((name, values)) = only.split_once('=') else {
            let what = format!("--only {only}: use AXIS=VALUE[,VALUE]...");
            return Err(Error::usage(what));
        };
        let known = known(study);
        let Some(full) = known.iter().find(|axis| axis.name == name) else {
            let names: Vec<&str> = known.iter().map(|axis| axis.name.as_str()).collect();
            let hint = did_you_mean(name, names.iter().copied());
            return Err(Error::usage(format!(
                "--only {only}: {} has no axis '{name}'{hint}: it has {}",
                study.facts().name,
                names.join(", ")
            )));
        };
        let values = full.split(values);
        let axis = Axis { name: name.into(), values };
        axis.check(full).map_err(|what| Error::usage(format!("--only {only}: {what}")))?;
        let place = self.axes.iter_mut().find(|axis| axis.name == name);
        *place
            .ok_or_else(|| Error::usage(format!("--only {only}: the plan has no such axis")))? =
            axis;
        Ok(())
    }
}

impl Axis {
    /// Checks that all values are known; if all known ones are numbers, any number is valid.
    fn check(&self, known: &Self) -> Result<(), String> {
        let Self { name, values } = self;
        if values.is_empty() {
            return Err(format!("axis '{name}' has no values"));
        }
        let mut seen = BTreeSet::new();
        if let Some(value) = values.iter().find(|value| !seen.insert(*value)) {
            return Err(format!("axis '{name}': '{value}' is there twice"));
        }
        let number = |value: &String| value.parse::<f64>().is_ok_and(|n| n.is_finite() && n >= 0.0);
        let open = known.values.iter().all(number);
        let strange =
            values.iter().find(|value| !(known.values.contains(value) || open && number(value)));
        let Some(value) = strange else { return Ok(()) };
        let hint = did_you_mean(value, known.values.iter().map(String::as_str));
        let known = known.values.join(", ");
        Err(format!("axis '{name}': no value '{value}'{hint}: it has {known}"))
    }

    /// A list of values, some of which may have a comma themselves (`coalesce:50,32`).
    fn split(&self, list: &str) -> Vec<String> {
        let pieces: Vec<&str> = list.split(',').collect();
        let (mut values, mut at) = (Vec::new(), 0);
        while at < pieces.len() {
            let known = |end: &usize| self.values.contains(&pieces[at..*end].join(","));
            let end = (at + 1..=pieces.len()).rev().find(known).unwrap_or(at + 1);
            values.push(pieces[at..end].join(","));
            at = end;
        }
        values
    }
}

/// The axes of a study with the values that any of its scales has, or had in earlier versions.
fn known(study: &dyn Study) -> Vec<Axis> {
    let mut axes = study.plan(Scale::Full).axes;
    for scale in [Scale::Usual, Scale::Quick, Scale::Smallest] {
        for other in study.plan(scale).axes {
            if let Some(axis) = axes.iter_mut().find(|axis| axis.name == other.name) {
                let new = other.values.into_iter().filter(|value| !axis.values.contains(value));
                let new: Vec<String> = new.collect();
                axis.values.extend(new);
            }
        }
    }
    for axis in &mut axes {
        axis.values.extend(study.earlier_values(&axis.name).into_iter().map(String::from));
    }
    axes
}
