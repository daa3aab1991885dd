use super::*;
use crate::machine::Machine;
use crate::plan::{Axis, Plan};
use crate::store::Done;

/// None whose ratios are speed-ups.
const STUDY: &dyn Study = crate::studies::ALL[0];

fn cell(value: &str) -> Cell {
    Cell(vec![("variant".into(), value.into())])
}

/// Results in which `after` has these ratios to `before`, a round each.
fn results(ratios: &[f64]) -> Results {
    let run = |value: &str, repeat: usize, figure: f64| Done {
        cell: cell(value),
        repeat: repeat as u32,
        distance_ns: 0.0,
        others_percent: 0.0,
        figures: [("cpu".to_string(), figure)].into(),
    };
    let runs = ratios.iter().enumerate().flat_map(|(repeat, ratio)| {
        let base = 100.0 + 7.0 * repeat as f64;
        [run("before", repeat, base), run("after", repeat, base * ratio)]
    });
    Results {
        plan: Plan::new("none", 1, 1.0, vec![Axis::new("variant", ["before", "after"])]),
        runs: runs.collect(),
        command: String::new(),
        machine: Machine::default(),
        controls: Vec::new(),
        void: Vec::new(),
    }
}

fn claim(ratio: f64) -> Claim {
    Claim::of_ratio("it".into(), [cell("after"), cell("before")], "cpu", ratio, 1.05)
}

fn state(ratios: &[f64], claimed: f64) -> State {
    judge(&results(ratios), STUDY, vec![claim(claimed)])[0].state
}

#[test]
fn half_of_an_effect_confirms_it_and_less_refutes_it() {
    // Half of a halving is a factor of 0.707.
    assert_eq!(claim(0.5).expect, Expect::Beyond(0.5_f64.sqrt()));
    assert_eq!(state(&[0.52, 0.6, 0.48, 0.65, 0.55, 0.58], 0.5), State::Confirmed);
    assert_eq!(state(&[0.9, 0.95, 0.8, 1.0, 0.97, 0.88], 0.5), State::Refuted);
    assert_eq!(state(&[0.6, 0.8, 0.65, 0.9, 0.7, 0.72], 0.5), State::NotConfirmed);
    // A gain, as well; and the opposite of what was claimed is a refutation.
    assert_eq!(state(&[3.0, 2.9, 3.1, 2.5, 2.7, 2.8], 3.7), State::Confirmed);
    assert_eq!(state(&[1.1, 1.2, 1.0, 1.3, 1.1, 0.8], 3.7), State::Refuted);
    // Four pairs show nothing, whatever they are.
    assert_eq!(state(&[0.1; 4], 0.5), State::TooFew);
    assert_eq!(state(&[], 0.5), State::NotMeasured);
}

#[test]
fn no_change_is_shown_and_not_assumed() {
    assert_eq!(claim(1.02).expect, Expect::Within(1.05));
    assert_eq!(state(&[1.01, 0.99, 1.02, 0.98, 1.0, 1.03], 1.0), State::Confirmed);
    assert_eq!(state(&[1.2, 1.3, 1.15, 1.22, 1.4, 1.1], 1.0), State::Refuted);
    assert_eq!(state(&[0.7, 0.8, 0.75, 0.82, 0.6, 0.9], 1.0), State::Refuted);
    // No significant difference is not yet no change.
    assert_eq!(state(&[1.2, 0.8, 1.1, 0.9, 1.3, 0.7], 1.0), State::NotConfirmed);
}

#[test]
fn more_claims_need_more_pairs() {
    let ratios = [0.52, 0.6, 0.48, 0.65, 0.55, 0.58];
    let many = vec![claim(0.5); 8];
    let states = |claims| -> Vec<State> {
        judge(&results(&ratios), STUDY, claims).iter().map(|found| found.state).collect()
    };
    assert_eq!(states(many), [State::TooFew; 8]);
    // What was not measured is no test.
    let absent = Claim { measure: "none", ..claim(0.5) };
    let mut some = vec![absent; 8];
    some.push(claim(0.5));
    assert_eq!(states(some)[7..], [State::NotMeasured, State::Confirmed]);
}
