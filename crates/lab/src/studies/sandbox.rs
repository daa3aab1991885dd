//! `sandbox`: costs of confined threads.

use super::grid::shown;
use super::pair::{self, MEASURES, Pair};
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::{Part, Table, Value, Verdict};
use crate::stats::paired::Estimate;
use crate::store::{Comparison, Results};
use crate::study::{Facts, Figures, Run, Study};

/// Smallest part of the rate without that a confined switch must reach.
const KEPT_MIN: f64 = 0.98;
/// Name of the traffic without a rate.
const FLOOD: &str = "flood";

const ABOUT: &str = "\
A guest sends frames of 60 bytes to another, with --sandbox off and on, in turn. With the policy \
event the worker makes the most system calls: a wait for each kick, and a call of the guest. With \
spin it makes next to none. The kernel looks up each call in the thread's list of permitted ones.";

/// The study.
pub struct Sandbox;

const FACTS: Facts = Facts {
    name: "sandbox",
    about: "costs of confined threads: system calls that are checked against a list",
    original: None,
    measures: &MEASURES,
    takes_proto: true,
    tools: &[],
    together: None,
    margin: 1.0 / KEPT_MIN,
    control: &[("traffic", "100k")],
};

impl Study for Sandbox {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let traffic = ["100k", "10k", FLOOD];
        let (traffic, policies, seconds): (&[&str], &[&str], f64) = match scale {
            Scale::Smallest => (&traffic[..1], &["event"], 0.5),
            Scale::Quick => (&traffic[..1], &["event", "spin"], 1.0),
            Scale::Usual => (&traffic, &["event", "spin"], 2.0),
            Scale::Full => (&traffic, &["event", "adaptive", "spin"], 10.0),
        };
        let axes = vec![
            Axis::new("traffic", traffic),
            Axis::new("policy", policies),
            Axis::new("sandbox", ["off", "on"]),
        ];
        Plan::new(FACTS.name, 1, seconds, axes).with_power(self, scale)
    }

    fn has(&self, _cell: &Cell) -> bool {
        true
    }

    fn overhead_s(&self, _cell: &Cell) -> f64 {
        pair::OVERHEAD_S
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let traffic = match run.cell.get("traffic") {
            FLOOD => String::new(),
            rate => format!("--rate {rate}"),
        };
        let policy = run.cell.get("policy");
        let switch = ["--sandbox", run.cell.get("sandbox")];
        Pair { switch: &switch, ..Pair::new(policy, &traffic) }.run(run.stage, run.seconds)
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let about = Part::Text { title: "How to read this".into(), body: ABOUT.into() };
        let tables = [
            ("Frames delivered a second", "delivered"),
            ("CPU time of the worker for each frame, ns", "frame_ns"),
            ("Latency, p50, us", "p50"),
            ("Latency, p99, us", "p99"),
        ];
        let tables = tables.iter().filter_map(|(title, measure)| table(results, title, measure));
        std::iter::once(about).chain(tables).collect()
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        [kept(results), pair::accounted(results)].into_iter().flatten().collect()
    }
}

/// Judges the rates of floods; an interval with the least in it cannot tell.
fn kept(results: &Results) -> Option<Verdict> {
    let compared = results.compare("delivered", &Sandbox).into_iter();
    let floods: Vec<_> = compared.filter(|of| of.cell.get("traffic") == FLOOD).collect();
    let words = |of: &Comparison| {
        let ratio = of.ratio?;
        let policy = of.cell.get("policy");
        Some(format!("{policy} {:.3} ({:.3}-{:.3})", ratio.median, ratio.low, ratio.high))
    };
    let all: Vec<_> = floods.iter().filter_map(words).collect();
    let ratios: Vec<Estimate> = floods.iter().filter_map(|of| of.ratio).collect();
    let known = ratios.iter().filter(|ratio| ratio.interval).count() == floods.len();
    let keeps = known && ratios.iter().all(|ratio| ratio.low >= KEPT_MIN);
    let loses = known && ratios.iter().any(|ratio| ratio.high < KEPT_MIN);
    (!all.is_empty()).then(|| Verdict {
        what: format!(
            "floods: a confined switch has {:.0} % or more of the rate without: {}",
            100.0 * KEPT_MIN,
            all.join(", ")
        ),
        holds: (keeps || loses).then_some(keeps),
    })
}

fn table(results: &Results, title: &str, measure: &str) -> Option<Part> {
    let mut rows = Vec::new();
    for comparison in results.compare(measure, &Sandbox) {
        let of = |sandbox: &str| {
            let here = |cell: &Cell| {
                cell.outer() == &comparison.cell.0[..] && cell.get("sandbox") == sandbox
            };
            shown(Estimate::of(&results.values(here, measure)))
        };
        rows.push(vec![
            Value::Text(comparison.cell.get("traffic").into()),
            Value::Text(comparison.cell.get("policy").into()),
            of("off"),
            of("on"),
            Value::estimate(comparison.ratio, 3, "nothing to compare with"),
        ]);
    }
    let columns = ["traffic", "policy", "off", "on", "on, of off"];
    (!rows.is_empty()).then(|| {
        Part::Table(Table {
            title: title.into(),
            note: String::new(),
            columns: columns.map(Into::into).to_vec(),
            rows,
            command: "pvswitch lab run sandbox".into(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_switch_without_a_sandbox_is_the_base() {
        for scale in [Scale::Smallest, Scale::Quick, Scale::Usual, Scale::Full] {
            let cells = Sandbox.plan(scale).cells(&Sandbox);
            for pair in cells.chunks(2) {
                let words: Vec<_> = pair.iter().map(|cell| cell.get("sandbox")).collect();
                assert_eq!(words, ["off", "on"]);
                assert_eq!(pair[0].outer(), pair[1].outer());
            }
        }
    }
}
