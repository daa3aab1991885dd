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
    sum.seen += report.seen;
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
        "ingress rate_waits",
        "egress drops_rate",
        "ingress drops_spoofed_mac",
        "ingress drops_isolated",
    ] {
        assert!(sum.counters[counter] > 0, "no {counter}");
    }
    let done = [("sleeps", sum.sleeps), ("naps", sum.naps), ("moves", sum.moves)];
    for (what, n) in done.into_iter().chain([
        ("moves by load", sum.by_load),
        ("moves that level shares", sum.levelled),
        ("queues stopped while they moved", sum.refused),
        ("changes of the placement", sum.placements),
        ("restarts of queues", sum.restarts),
        ("settings changed", sum.tunes),
        ("drains", sum.drains),
        ("stalled", sum.stalled),
        ("armed queues that were due", sum.seen.dues),
        ("bursts that ended at a rate", sum.seen.rate_dues),
        ("bursts that a rate kept short", sum.seen.rate_cuts),
        ("held frames that a rate permitted", sum.seen.rate_deliveries),
        ("announcements", sum.seen.announcements),
        ("bursts of watched queues", sum.seen.watched),
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

/// Defines a canary, a test that asserts that the seeds find a mistake, for each of the lines. A
/// mistake without one does not compile.
macro_rules! canaries {
    ($($name:ident: $mistake:ident is found as $finding:pat,)*) => {
        $(
            #[test]
            fn $name() {
                assert_found(Mistake::$mistake, |finding| matches!(finding, $finding));
            }
        )*

        const _: fn(Mistake) = |mistake| match mistake {
            Mistake::None $(| Mistake::$mistake)* => {}
        };
    };
}

canaries! {
    canary_arm_without_recheck_is_found: NeverRechecks is found as Finding::LostWakeup(_),
    canary_sleep_without_arming_is_found: NeverArms is found as Finding::LostWakeup(_),
    canary_room_without_recheck_is_found: NeverRechecksRoom is found as Finding::LostWakeup(_),
    canary_busy_worker_without_retries_is_found:
        BusyForgetsHeld is found as Finding::Hang(_) | Finding::Late(_),
    canary_omitted_calls_are_found: ForgetsCalls is found as Finding::Hang(_),
    canary_reordering_is_found: Reorders is found as Finding::Reordered(_),
    canary_uncounted_drops_are_found: DropsUncounted is found as Finding::Lost(_),
    canary_duplicates_are_found: Duplicates is found as Finding::Lost(_),
    canary_wrong_bytes_are_found: Corrupts is found as Finding::Corrupt(_),
    canary_wrong_ports_are_found: Misdelivers is found as Finding::Misdelivered(_),
    canary_stop_of_the_wrong_port_is_found: BlamesSender is found as Finding::Blamed(_),
    canary_never_sleeping_is_found: NeverSleeps is found as Finding::Spins(_),
    canary_sleep_sometimes_without_nap_timer_is_found:
        NapsForever is found as Finding::PollMissed(_),
    canary_sleep_without_nap_timer_is_found: ForgetsNaps is found as Finding::PollMissed(_),
    canary_omitted_delayed_calls_are_found: ForgetsLateCalls is found as Finding::CallMissed(_),
    canary_moved_queue_not_polled_is_found: AdoptsCold is found as Finding::LostWakeup(_),
    canary_moved_queue_with_kicks_to_old_worker_is_found:
        ForgetsOwner is found as Finding::LostWakeup(_),
    canary_queues_lost_in_a_move_are_found: LosesQueues is found as Finding::Ownership(_),
    canary_stopped_queue_handed_over_is_found: HandsOverStopped is found as Finding::Ownership(_),
    canary_forgiven_debt_is_found: IgnoresDebt is found as Finding::Unfair(_),
    canary_rate_that_is_due_later_ignored_is_found:
        IgnoresRateDue is found as Finding::Spins(_) | Finding::LostWakeup(_),
    canary_rules_not_applied_are_found: IgnoresRules is found as Finding::Misdelivered(_),
    canary_destinations_retried_only_when_notified_are_found:
        NeverRetries is found as Finding::Late(_) | Finding::Hang(_),
    canary_paused_queues_not_resumed_are_found: ForgetsPaused is found as Finding::LostWakeup(_),
    canary_retry_only_after_a_timeout_is_found:
        RetriesAfterTimeoutOnly is found as Finding::Late(_),
    canary_tap_armed_after_a_short_read_without_recheck_is_found:
        TapNeverRechecks is found as Finding::LostWakeup(_),
    canary_wait_for_a_full_tap_to_notify_is_found: TapAwaitsRoom is found as Finding::LostWakeup(_),
    canary_direct_reads_not_published_are_found: ForgetsDirectFlush is found as Finding::Hang(_),
    canary_driver_sleep_without_arming_is_found: DriverNeverArms is found as Finding::CallMissed(_),
    canary_tx_ring_without_req_event_is_found: XenNeverArms is found as Finding::LostWakeup(_),
    canary_tx_ring_without_recheck_is_found: XenNeverRechecks is found as Finding::LostWakeup(_),
    canary_full_rx_ring_without_recheck_is_found:
        XenNeverRechecksRoom is found as Finding::LostWakeup(_),
    canary_events_never_acknowledged_are_found: XenNeverAcks is found as Finding::LostWakeup(_),
    canary_events_not_sent_are_found: XenDropsEvents is found as Finding::CallMissed(_),
    canary_page_used_after_its_response_is_found:
        XenUsesAfterResponse is found as Finding::Corrupt(_),
    canary_front_half_sleep_without_rsp_event_is_found:
        XenForgetsRspEvent is found as Finding::CallMissed(_),
    canary_overloaded_worker_that_keeps_its_queues_is_found:
        NeverBalances is found as Finding::Unbalanced(_),
}
