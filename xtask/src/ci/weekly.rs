//! Steps of the weekly form: what CI runs for a minute or in part, for long or in full.

use std::fmt::Write as _;

use super::{Counts, Kind, NO_ENV, Outcome, Step, step};

/// One after another: the soak and the racing guest are to have the machine for themselves. Times
/// are in `docs/reliability.md`.
pub(super) const STEPS: [Step; 12] = [
    // Ten minutes, and ten beside a hostile guest, migrations and upgrades.
    step("soak", 60, "xtask lab --default soak", NO_ENV, "crates/lab/Cargo.toml", Kind::Rigs),
    // 20 minutes for each kind of ring.
    step(
        "racing",
        90,
        "cargo test -p pvswitch --test hostile_gen racing_guest",
        &[("PVSWITCH_RACING", "1200")],
        "crates/pvswitch/tests/hostile_gen.rs",
        Kind::Tests,
    ),
    step(
        "stop",
        20,
        "cargo test -p pvswitch --test faults stopped_switch",
        &[("PVSWITCH_STOP_S", "60")],
        "crates/pvswitch/tests/faults.rs",
        Kind::Tests,
    ),
    // Fails at each allocation of a request in turn, not at some.
    step(
        "allocs",
        120,
        "cargo test -p pvswitch --test faults allocation",
        &[("PVSWITCH_ALLOCATIONS", "all")],
        "crates/pvswitch/tests/faults.rs",
        Kind::Tests,
    ),
    step(
        "sim",
        60,
        "cargo test --release -p pvswitch-sim --test seeds every_seed",
        &[("SEEDS", "20000")],
        "crates/sim/tests/seeds.rs",
        Kind::Tests,
    ),
    step(
        "cuts",
        40,
        "cargo test -p pvswitch --bin pvswitch switch_that_is_killed",
        &[("CUT_SEEDS", "0..3000")],
        "crates/pvswitch/src/run/cuts.rs",
        Kind::Tests,
    ),
    // All interleavings of models that have a bound of preemptions in CI.
    step(
        "models",
        60,
        "cargo test -p pvswitch-switch --lib --release --target-dir target/loom handover::models",
        &[
            ("RUSTFLAGS", "--cfg loom"),
            ("CARGO_PROFILE_RELEASE_LTO", "off"),
            ("PVSWITCH_MODELS", "all"),
        ],
        "crates/switch/src/handover/models.rs",
        Kind::Tests,
    ),
    step("prove", 60, "xtask prove", NO_ENV, "xtask/src/prove.rs", Kind::Rigs),
    step("sanitize", 90, "xtask sanitize", NO_ENV, "xtask/src/sanitize.rs", Kind::Rigs),
    step("fuzz", 240, "xtask fuzz --runs 1000000", NO_ENV, "fuzz/Cargo.toml", Kind::Rigs),
    step("static", 30, "xtask static --twice", NO_ENV, "Cargo.toml", Kind::Quiet),
    step("deny", 10, "xtask deny --advisories", NO_ENV, "deny.toml", Kind::Rigs),
];

/// The results in a table.
pub(super) fn table(outcomes: &[(&str, Outcome)]) -> String {
    let mut table = "\n| step | result | passed | failed | skipped | time |\n".to_string();
    table += "|---|---|---|---|---|---|\n";
    for (name, outcome) in outcomes {
        let Counts { passed, failed, skipped } = outcome.counts;
        let result = match (passed, failed) {
            (_, 1..) => "**failed**",
            (0, 0) => "skipped",
            _ => "passed",
        };
        let seconds = outcome.took.as_secs();
        let time = format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60);
        let _ = writeln!(table, "| {name} | {result} | {passed} | {failed} | {skipped} | {time} |");
    }
    table
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_table_has_a_row_for_each_step() {
        let outcome = |passed, failed, skipped| {
            let counts = Counts { passed, failed, skipped };
            Outcome { took: Duration::from_secs(3723), ..counts.into() }
        };
        let all = [("a", outcome(3, 0, 1)), ("b", outcome(3, 1, 0)), ("c", outcome(0, 0, 1))];
        let table = table(&all);
        for row in [
            "| a | passed | 3 | 0 | 1 | 1:02:03 |",
            "| b | **failed** | 3 | 1 | 0 | 1:02:03 |",
            "| c | skipped | 0 | 0 | 1 | 1:02:03 |",
        ] {
            assert!(table.lines().any(|line| line == row), "{table}");
        }
    }
}
