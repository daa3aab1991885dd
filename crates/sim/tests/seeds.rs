//! Runs the simulation with many seeds. Failing seeds are printed. `SEED=N cargo test -p
//! pvswitch-sim` runs a single one; `SEEDS=N` runs the first N.

use std::ops::Range;

use sim::{Finding, Mistake, Report, run};

/// Number of seeds without a mistake.
const SEEDS: u64 = 320;
/// Number of seeds within which a mistake must be found.
const CANARY_SEEDS: u64 = 3 * SEEDS;

fn from_env(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")))
}

fn one(seed: u64, mistake: Mistake) -> Result<Report, Finding> {
    run(seed, mistake)
}

fn add(sum: &mut Report, report: Report) {
    sum.honest += report.honest;
    sum.hostile += report.hostile;
    sum.frames += report.frames;
    sum.wakes += report.wakes;
    sum.sleeps += report.sleeps;
    sum.naps += report.naps;
    sum.moves += report.moves;
    sum.by_load += report.by_load;
    sum.levelled += report.levelled;
    sum.refused += report.refused;
    sum.placements += report.placements;
    sum.restarts += report.restarts;
    sum.tunes += report.tunes;
    sum.drains += report.drains;
    sum.stalled += report.stalled;
    sum.events += report.events;
    for (why, n) in report.faults {
        *sum.faults.entry(why).or_default() += n;
    }
    for (name, n) in report.counters {
        *sum.counters.entry(name).or_default() += n;
    }
}

/// Runs `seeds`; returns the sum of the reports, and the failures.
fn all(seeds: Range<u64>) -> (Report, Vec<String>) {
    let (mut sum, mut failed) = (Report::default(), Vec::new());
    for seed in seeds {
        match std::panic::catch_unwind(|| one(seed, Mistake::None)) {
            Ok(Ok(report)) => add(&mut sum, report),
            Ok(Err(finding)) => failed.push(format!("SEED={seed}: {finding}")),
            // The panic message was printed.
            Err(_) => failed.push(format!("SEED={seed}: panic")),
        }
        if failed.len() >= 20 {
            break;
        }
    }
    (sum, failed)
}

#[test]
fn every_seed_is_safe_and_drains() {
    let seeds = match from_env("SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..from_env("SEEDS").unwrap_or(SEEDS),
    };
    let alone = seeds.end - seeds.start == 1;
    let (sum, failed) = all(seeds);
    println!("{sum:#?}");
    let repeat = "repeat one with SEED=N cargo test -p pvswitch-sim every_seed";
    assert!(failed.is_empty(), "{repeat}\n{}", failed.join("\n"));
    if alone {
        return;
    }
    // Coverage: each of these must occur in some seed.
    for counter in [
        "ingress holds",
        "ingress drops_no_room",
        "ingress pauses",
        "egress lost_no_room",
        "egress lost_aged",
        "egress drops_held_down",
        "ingress drops_bad_addr",
        "ingress drops_bad_hdr",
        "ingress drops_runt",
        "ingress drops_too_long",
        "egress drops_no_room",
        "egress drops_too_long",
        "egress drops_bad_addr",
        "egress drops_down",
        "egress full",
        "egress calls_late",
        "egress drops_bad_grant",
        "ingress drops_bad_grant",
        "ingress direct",
    ] {
        assert!(sum.counters[counter] > 0, "no {counter}");
    }
    let done = [("sleeps", sum.sleeps), ("naps", sum.naps), ("moves", sum.moves)];
    for (what, n) in done.into_iter().chain([
        ("moves by load", sum.by_load),
        ("moves to level shares", sum.levelled),
        ("queues stopped while they moved", sum.refused),
        ("changes of the placement", sum.placements),
        ("restarts of queues", sum.restarts),
        ("settings changed", sum.tunes),
        ("drains", sum.drains),
        ("stalled", sum.stalled),
    ]) {
        assert!(n > 0, "no {what}");
    }
    for fault in [
        "ring index jumped",
        "is outside the table",
        "is longer than the ring",
        "indirect descriptor where none",
        "bytes is not legal",
        "is outside guest memory",
        "readable descriptor after",
        "req_prod jumped",
        "crosses the end of its page",
        "extra info of unknown type",
    ] {
        assert!(sum.faults.keys().any(|why| why.contains(fault)), "no fault: {fault}");
    }
}

#[test]
fn a_seed_is_reproducible() {
    for seed in 0..5 {
        assert_eq!(one(seed, Mistake::None), one(seed, Mistake::None));
    }
}

/// Asserts that one of the canary seeds finds `mistake`, as the expected kind of finding.
fn assert_found(mistake: Mistake, is: fn(&Finding) -> bool) {
    let seeds = from_env("SEEDS").unwrap_or(CANARY_SEEDS);
    let mut others = Vec::new();
    let found = (0..seeds).find_map(|seed| {
        let finding = one(seed, mistake).err()?;
        let it = is(&finding).then(|| format!("{mistake:?}: {finding}, by seed {seed}"));
        others.push(finding.to_string());
        it
    });
    println!("{}", found.unwrap_or_else(|| panic!("{mistake:?}: {others:#?}")));
}

#[test]
fn canary_arm_without_recheck_is_found() {
    assert_found(Mistake::NeverRechecks, |f| matches!(f, Finding::LostWakeup(_)));
}

#[test]
fn canary_sleep_without_arming_is_found() {
    assert_found(Mistake::NeverArms, |f| matches!(f, Finding::LostWakeup(_)));
}

#[test]
fn canary_room_without_recheck_is_found() {
    assert_found(Mistake::NeverRechecksRoom, |f| matches!(f, Finding::LostWakeup(_)));
}

#[test]
fn canary_busy_worker_without_retries_is_found() {
    assert_found(Mistake::BusyForgetsHeld, |f| matches!(f, Finding::Hang(_) | Finding::Late(_)));
}

#[test]
fn canary_omitted_calls_are_found() {
    assert_found(Mistake::ForgetsCalls, |f| matches!(f, Finding::Hang(_)));
}

#[test]
fn canary_reordering_is_found() {
    assert_found(Mistake::Reorders, |f| matches!(f, Finding::Reordered(_)));
}

#[test]
fn canary_uncounted_drops_are_found() {
    assert_found(Mistake::DropsUncounted, |f| matches!(f, Finding::Lost(_)));
}

#[test]
fn canary_duplicates_are_found() {
    assert_found(Mistake::Duplicates, |f| matches!(f, Finding::Lost(_)));
}

#[test]
fn canary_wrong_bytes_are_found() {
    assert_found(Mistake::Corrupts, |f| matches!(f, Finding::Corrupt(_)));
}

#[test]
fn canary_wrong_ports_are_found() {
    assert_found(Mistake::Misdelivers, |f| matches!(f, Finding::Misdelivered(_)));
}

#[test]
fn canary_stop_of_the_wrong_port_is_found() {
    assert_found(Mistake::BlamesSender, |f| matches!(f, Finding::Blamed(_)));
}

#[test]
fn canary_never_sleeping_is_found() {
    assert_found(Mistake::NeverSleeps, |f| matches!(f, Finding::Spins(_)));
}

#[test]
fn canary_sleep_sometimes_without_nap_timer_is_found() {
    assert_found(Mistake::NapsForever, |f| matches!(f, Finding::PollMissed(_)));
}

#[test]
fn canary_sleep_without_nap_timer_is_found() {
    assert_found(Mistake::ForgetsNaps, |f| matches!(f, Finding::PollMissed(_)));
}

#[test]
fn canary_omitted_delayed_calls_are_found() {
    assert_found(Mistake::ForgetsLateCalls, |f| matches!(f, Finding::CallMissed(_)));
}

#[test]
fn canary_moved_queue_not_polled_is_found() {
    assert_found(Mistake::AdoptsCold, |f| matches!(f, Finding::LostWakeup(_)));
}

#[test]
fn canary_moved_queue_with_kicks_to_old_worker_is_found() {
    assert_found(Mistake::ForgetsOwner, |f| matches!(f, Finding::LostWakeup(_)));
}

#[test]
fn canary_queues_lost_in_a_move_are_found() {
    assert_found(Mistake::LosesQueues, |f| matches!(f, Finding::Ownership(_)));
}

#[test]
fn canary_stopped_queue_handed_over_is_found() {
    assert_found(Mistake::HandsOverStopped, |f| matches!(f, Finding::Ownership(_)));
}

#[test]
fn canary_forgiven_debt_is_found() {
    assert_found(Mistake::IgnoresDebt, |f| matches!(f, Finding::Unfair(_)));
}

#[test]
fn canary_destinations_retried_only_when_notified_are_found() {
    assert_found(Mistake::NeverRetries, |f| matches!(f, Finding::Late(_) | Finding::Hang(_)));
}

#[test]
fn canary_paused_queues_not_resumed_are_found() {
    assert_found(Mistake::ForgetsPaused, |f| matches!(f, Finding::LostWakeup(_)));
}

#[test]
fn canary_retry_only_after_a_timeout_is_found() {
    assert_found(Mistake::RetriesAfterTimeoutOnly, |f| matches!(f, Finding::Late(_)));
}

#[test]
fn canary_tap_armed_after_a_short_read_without_recheck_is_found() {
    assert_found(Mistake::TapNeverRechecks, |f| matches!(f, Finding::LostWakeup(_)));
}

#[test]
fn canary_wait_for_a_full_tap_to_notify_is_found() {
    assert_found(Mistake::TapAwaitsRoom, |f| matches!(f, Finding::LostWakeup(_)));
}

#[test]
fn canary_direct_reads_not_published_are_found() {
    assert_found(Mistake::ForgetsDirectFlush, |f| matches!(f, Finding::Hang(_)));
}

#[test]
fn canary_driver_sleep_without_arming_is_found() {
    assert_found(Mistake::DriverNeverArms, |f| matches!(f, Finding::CallMissed(_)));
}

#[test]
fn canary_tx_ring_without_req_event_is_found() {
    assert_found(Mistake::XenNeverArms, |f| matches!(f, Finding::LostWakeup(_)));
}

#[test]
fn canary_tx_ring_without_recheck_is_found() {
    assert_found(Mistake::XenNeverRechecks, |f| matches!(f, Finding::LostWakeup(_)));
}

#[test]
fn canary_full_rx_ring_without_recheck_is_found() {
    assert_found(Mistake::XenNeverRechecksRoom, |f| matches!(f, Finding::LostWakeup(_)));
}

#[test]
fn canary_events_never_acknowledged_are_found() {
    assert_found(Mistake::XenNeverAcks, |f| matches!(f, Finding::LostWakeup(_)));
}

#[test]
fn canary_events_not_sent_are_found() {
    assert_found(Mistake::XenDropsEvents, |f| matches!(f, Finding::CallMissed(_)));
}

#[test]
fn canary_page_used_after_its_response_is_found() {
    assert_found(Mistake::XenUsesAfterResponse, |f| matches!(f, Finding::Corrupt(_)));
}

#[test]
fn canary_front_half_sleep_without_rsp_event_is_found() {
    assert_found(Mistake::XenForgetsRspEvent, |f| matches!(f, Finding::CallMissed(_)));
}

#[test]
fn canary_overloaded_worker_that_keeps_its_queues_is_found() {
    assert_found(Mistake::NeverBalances, |f| matches!(f, Finding::Unbalanced(_)));
}
