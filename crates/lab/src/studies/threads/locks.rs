//! Measures of locks: how often each was taken, contended, and waited for.

use super::OWN;
use crate::stage::Count;
use crate::study::{Better, Figures, Measure};

/// Names of the measures of a lock: taken, contended, waited.
type Names = [&'static str; 3];

macro_rules! locks {
    ($($lock:literal),*) => {
        /// Locks that workers take often, by their name in `lock_counts`, and the sum of others.
        const LOCKS: &[(&str, Names)] = &[$((
            $lock,
            [
                concat!($lock, "_taken"),
                concat!($lock, "_contended"),
                concat!($lock, "_waited"),
            ],
        ),)*];
        const MEASURES: &[Measure] = &[$(
            Measure::new(
                concat!($lock, "_taken"),
                "1/k",
                Better::Neither,
                concat!("times a lock '", $lock, "' was taken, per 1000 frames"),
            ),
            Measure::new(
                concat!($lock, "_contended"),
                "1/million",
                Better::Less,
                concat!("times another thread had a lock '", $lock, "', per million frames"),
            ),
            Measure::new(
                concat!($lock, "_waited"),
                "ns/k",
                Better::Less,
                concat!("time waited for a lock '", $lock, "', per 1000 frames"),
            ),
        )*];
    };
}

/// The name of the sum of all locks that have no measure of their own.
const OTHERS: &str = "others";

locks!(
    "ingress",
    "egress",
    "hold",
    "fdb",
    "assignments",
    "leveller",
    "commands",
    "mappings",
    "others"
);

/// All measures of the study.
pub const ALL: [Measure; OWN.len() + MEASURES.len()] = {
    let mut all = [OWN[0]; OWN.len() + MEASURES.len()];
    let mut i = 0;
    while i < all.len() {
        all[i] = if i < OWN.len() { OWN[i] } else { MEASURES[i - OWN.len()] };
        i += 1;
    }
    all
};

/// Each lock with the names of its measures.
pub fn rows() -> impl Iterator<Item = (&'static str, Names)> {
    LOCKS.iter().copied()
}

/// Figures of all locks of a switch.
pub fn figures(count: &Count) -> Figures {
    let frames = count.egress("g", "frames").max(1.0);
    let mut figures = Figures::new();
    let mut contended_others = 0;
    for (lock, [taken, contended, waited]) in rows() {
        let is_own = |name: &str| name != OTHERS && LOCKS.iter().any(|(own, _)| *own == name);
        let here = |name: &str| if lock == OTHERS { !is_own(name) } else { name == lock };
        let counts = count.locks.iter().filter(|(name, _)| here(name)).map(|(_, counts)| counts);
        let mut sums = [0; 3];
        for counts in counts {
            for (sum, name) in sums.iter_mut().zip(["taken", "contended", "waited_ns"]) {
                *sum += counts.get(name).copied().unwrap_or(0);
            }
        }
        let [times, waits, ns] = sums;
        if lock != "egress" {
            contended_others += waits;
        }
        figures.extend([
            (taken, 1e3 * times as f64 / frames),
            (contended, 1e6 * waits as f64 / frames),
            (waited, 1e3 * ns as f64 / frames),
        ]);
    }
    figures.insert("contended_others", 1e6 * contended_others as f64 / frames);
    figures
}
