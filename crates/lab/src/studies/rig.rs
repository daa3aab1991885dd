//! Results of rigs: a rig of `rigs/` has measured them, the lab stores, judges and reports them.

use super::grid::shown;
use crate::error::Fail;
use crate::plan::{Cell, Plan, Scale};
use crate::report::{Part, Table, Value, Verdict};
use crate::store::Results;
use crate::study::{Facts, Figures, Measure, Run, Study};

/// Ratios within a twentieth of 1 do not matter: the least that a promise tolerates.
const MARGIN: f64 = 1.05;

/// The study of a rig's plan.
struct Rig {
    plan: Plan,
    facts: &'static Facts,
}

/// Returns the study that a rig's plan describes; `None`: it is no rig's. It is never freed: a
/// process reads a few plans.
pub fn of(plan: &Plan) -> Option<&'static dyn Study> {
    let rig = plan.rig.as_ref()?;
    let keep = |text: &str| -> &'static str { Box::leak(text.into()) };
    let measures = rig.measures.iter().map(|measure| {
        let (name, unit) = (keep(&measure.name), keep(&measure.unit));
        Measure::new(name, unit, measure.better, keep(&measure.about))
    });
    let facts = Facts {
        name: keep(&plan.study),
        about: keep(&rig.about),
        original: None,
        measures: Box::leak(measures.collect()),
        takes_proto: false,
        tools: &[],
        together: None,
        margin: MARGIN,
        control: &[],
    };
    Some(Box::leak(Box::new(Rig { plan: plan.clone(), facts: Box::leak(Box::new(facts)) })))
}

impl Study for Rig {
    fn facts(&self) -> &'static Facts {
        self.facts
    }

    fn plan(&self, _: Scale) -> Plan {
        self.plan.clone()
    }

    fn has(&self, _: &Cell) -> bool {
        true
    }

    fn overhead_s(&self, _: &Cell) -> f64 {
        0.0
    }

    fn run(&self, _: &Run) -> Result<Figures, Fail> {
        Err(Fail::Over("a rig measures this, not the lab: machine.json has its command".into()))
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let measures = self.facts.measures;
        let axes = self.plan.axes.iter().map(|axis| axis.name.clone());
        let named = measures.iter().map(|measure| match measure.unit {
            "" => measure.name.to_string(),
            unit => format!("{}, {unit}", measure.name),
        });
        let has = results.cells();
        let cells = self.plan.cells(self).into_iter().filter(|cell| has.contains(&cell));
        let rows = cells.map(|cell| {
            let values = cell.0.iter().map(|(_, value)| Value::Text(value.clone()));
            let figures = measures.iter().map(|m| shown(results.estimate(&cell, m.name)));
            values.chain(figures).collect()
        });
        let about = measures.iter().map(|measure| format!("{}: {}", measure.name, measure.about));
        vec![Part::Table(Table {
            title: "Measured".into(),
            note: about.collect::<Vec<_>>().join("; "),
            columns: axes.chain(named).collect(),
            rows: rows.collect(),
            command: results.command.clone(),
        })]
    }

    fn judge(&self, _: &Results) -> Vec<Verdict> {
        Vec::new()
    }
}
