//! The studies.

mod bulk;
mod coalescing;
mod copies;
mod fairness;
mod features;
mod grid;
mod hostile;
mod idle;
mod kinds;
mod latency;
mod limit;
mod ndr;
mod neighbours;
mod outages;
mod pair;
mod peers;
mod policies;
mod polling;
mod receivers;
pub(crate) mod rig;
mod sandbox;
mod soak;
mod threads;

use crate::error::Error;
use crate::plan::Plan;
use crate::study::{Studies, Study};
use api::near::did_you_mean;

/// All of them, in the order listed.
pub const ALL: &[&dyn Study] = &[
    &polling::Polling,
    &threads::Threads,
    &coalescing::Coalescing,
    &copies::Copies,
    &fairness::Fairness,
    &policies::Policies,
    &latency::Latency,
    &idle::Idle,
    &neighbours::Neighbours,
    &peers::Peers,
    &hostile::Hostile,
    &receivers::Receivers,
    &limit::Limit,
    &ndr::Ndr,
    &soak::Soak,
    &sandbox::Sandbox,
    &outages::Outages,
    &features::Features,
    &kinds::Kinds,
];

/// Returns the study of that name.
///
/// # Errors
/// There is none, with the names that there are.
pub fn named(name: &str, studies: Studies) -> Result<&'static dyn Study, Error> {
    studies.iter().find(|study| study.facts().name == name).copied().ok_or_else(|| {
        let names: Vec<&str> = studies.iter().map(|study| study.facts().name).collect();
        let hint = did_you_mean(name, names.iter().copied());
        Error::usage(format!("no study '{name}'{hint}: use one of {}", names.join(", ")))
    })
}

/// Returns the study of results with this plan: one of `studies`, or a rig.
///
/// # Errors
/// There is none, or the plan is not one of it.
pub fn of(plan: &Plan, studies: Studies) -> Result<&'static dyn Study, Error> {
    let study = match rig::of(plan) {
        Some(rig) => rig,
        None => named(&plan.study, studies)?,
    };
    plan.check(study)?;
    Ok(study)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Scale;
    use crate::stats::paired::{SIGNIFICANCE, pairs_needed};

    const MEASURED: [Scale; 3] = [Scale::Quick, Scale::Usual, Scale::Full];

    #[test]
    fn plans_have_rounds_enough_for_their_comparisons_and_claims() {
        for study in ALL {
            let name = study.facts().name;
            for scale in MEASURED {
                let plan = study.plan(scale);
                let repeats = plan.repeats as usize;
                let needed = pairs_needed(plan.comparisons(*study), SIGNIFICANCE);
                // Judged by counts only, the first in its quick form.
                let by_counts = name == "hostile" && scale == Scale::Quick || name == "soak";
                assert!(repeats >= needed || by_counts, "{name} {scale:?}: {needed} are needed");
                // Claims have one-sided tests, of half the value.
                let claims = study.claims(&plan).len();
                let needed = if claims > 0 { pairs_needed(claims, 2.0 * SIGNIFICANCE) } else { 0 };
                assert!(repeats >= needed, "{name} {scale:?}: {needed} for its claims");
            }
        }
    }

    #[test]
    fn the_five_studies_have_claims_for_cells_of_their_plans() {
        for study in &ALL[..5] {
            let name = study.facts().name;
            for scale in MEASURED {
                let plan = study.plan(scale);
                let cells = plan.cells(*study);
                let claims = study.claims(&plan);
                // Those of the threads are for four workers and more.
                let few_cpus = name == "threads" && crate::machine::allowed_cpus().len() < 4;
                assert!(!claims.is_empty() || few_cpus, "{name} {scale:?}");
                for claim in &claims {
                    assert!(cells.contains(&claim.cell), "{name} {scale:?}: {}", claim.cell);
                    assert!(cells.contains(&claim.base), "{name} {scale:?}: {}", claim.base);
                    let measure = |of: &crate::study::Measure| of.name == claim.measure;
                    assert!(
                        study.facts().measures.iter().any(measure),
                        "{name}: {}",
                        claim.measure
                    );
                }
            }
        }
    }

    #[test]
    fn the_control_is_the_base_of_a_group_under_load() {
        for study in ALL {
            let name = study.facts().name;
            assert_eq!(study.plan(Scale::Smallest).control_cell(*study), None, "{name}");
            // Judged by counts of one run: nothing is compared.
            let scales = if name == "soak" { &[][..] } else { &MEASURED };
            for scale in scales.iter().copied() {
                let plan = study.plan(scale);
                let control = plan.control_cell(*study).unwrap_or_else(|| panic!("{name}"));
                let base = plan.cells(*study).into_iter().find(|c| c.outer() == control.outer());
                assert_eq!(base, Some(control.clone()), "{name} {scale:?}");
                let named = study.facts().control.iter();
                let missing: Vec<_> = named
                    .filter(|(axis, value)| control.get(axis) != *value)
                    .filter(|(axis, value)| {
                        let axis = plan.axes.iter().find(|known| known.name == *axis);
                        axis.is_none_or(|axis| axis.values.iter().any(|known| known == value))
                    })
                    .collect();
                assert!(missing.is_empty(), "{name} {scale:?}: {control}: not {missing:?}");
                let again = plan.turns(*study).into_iter().filter(|turn| turn.again);
                assert_eq!(again.count(), plan.repeats as usize, "{name} {scale:?}");
            }
        }
    }
}
