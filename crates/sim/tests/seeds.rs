//! Seeds through the simulation. A failing one prints itself; `SEED=N cargo test -p pvswitch-sim`
//! runs that one alone, `SEEDS=N` so many from 0 on.

use sim::{Bug, Finding, Mini, Report, run};

/// Seeds of a plain run.
const SEEDS: u64 = 300;
/// Seeds in which a bug must show itself.
const CANARY_SEEDS: u64 = 40;

fn from_env(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")))
}

fn one(seed: u64, bug: Bug) -> Result<Report, Finding> {
    run(seed, |links| Mini::new(links, bug))
}

#[test]
fn every_seed_is_safe_and_drains() {
    let seeds = match from_env("SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..from_env("SEEDS").unwrap_or(SEEDS),
    };
    let alone = seeds.end - seeds.start == 1;
    let mut sum = Report::default();
    for seed in seeds {
        let report = match std::panic::catch_unwind(|| one(seed, Bug::None)) {
            Ok(Ok(report)) => report,
            Ok(Err(finding)) => panic!("SEED={seed} cargo test -p pvswitch-sim: {finding}"),
            Err(panic) => {
                eprintln!("SEED={seed} cargo test -p pvswitch-sim");
                std::panic::resume_unwind(panic);
            }
        };
        sum.honest += report.honest;
        sum.hostile += report.hostile;
        sum.stopped += report.stopped;
        sum.frames += report.frames;
        sum.drops += report.drops;
        sum.wakes += report.wakes;
        sum.events += report.events;
    }
    println!("{sum:?}");
    // The simulation reaches what it is for.
    assert!(alone || (sum.stopped > 0 && sum.drops > 0 && sum.frames > 0), "{sum:?}");
}

#[test]
fn a_seed_gives_the_same_run_twice() {
    for seed in 0..5 {
        assert_eq!(one(seed, Bug::None), one(seed, Bug::None));
    }
}

/// Finds `bug` in one of the canary seeds, as what it is.
fn assert_found(bug: Bug, is: fn(&Finding) -> bool) {
    let found: Vec<Finding> = (0..CANARY_SEEDS).filter_map(|seed| one(seed, bug).err()).collect();
    assert!(found.iter().any(is), "{bug:?}: {found:?}");
    assert!(found.iter().all(|f| !f.to_string().is_empty()));
}

#[test]
fn canary_arm_without_recheck_hangs() {
    assert_found(Bug::NeverRechecks, |f| matches!(f, Finding::Hang(_)));
}

#[test]
fn canary_forgotten_calls_hang() {
    assert_found(Bug::ForgetsCalls, |f| matches!(f, Finding::Hang(_)));
}

#[test]
fn canary_reordering_is_found() {
    assert_found(Bug::Reorders, |f| matches!(f, Finding::Reordered(_)));
}

#[test]
fn canary_uncounted_drops_are_found() {
    assert_found(Bug::DropsUncounted, |f| matches!(f, Finding::Lost(_)));
}

#[test]
fn canary_wrong_bytes_are_found() {
    assert_found(Bug::Corrupts, |f| matches!(f, Finding::Corrupt(_)));
}

#[test]
fn canary_stopping_the_wrong_guest_is_found() {
    assert_found(Bug::BlamesSender, |f| matches!(f, Finding::Blamed(_)));
}

#[test]
fn canary_never_sleeping_is_found() {
    assert_eq!(one(0, Bug::NeverSleeps), Err(Finding::Livelock));
}
