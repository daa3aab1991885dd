//! Whom a worker charges for what it does: what a queue owes is in the rounds that it waits.

use super::*;
use crate::account::{Limit, RateLimits};
use crate::fair::QUANTUM;
use crate::forward::SlowDelivery;

/// What one burst takes, and how many rounds that is.
const BURST: Ns = Ns::from_ms(2);
const ROUNDS: u64 = BURST.times(QUANTUM);

/// A worker with queues that are never left alone and take long to poll, of ports from 0 on;
/// whether each can notify.
fn worker<const N: usize>(queues: [bool; N]) -> Worker {
    let mut worker = Worker::new();
    for (port, notifies) in (0..).zip(queues) {
        let (guest, _) = worker.add(port, Policy::Spin, notifies);
        guest.takes_ns.store(BURST.get(), Ordering::Relaxed);
    }
    worker
}

/// Issue 14, row 13.
#[test]
fn empty_poll_is_charged_to_a_queue_that_cannot_notify_and_to_no_other() {
    let mut worker = worker([true, false, true]);
    worker.round();
    let owed = worker.owed();
    assert!(owed[1] >= ROUNDS - 1, "{owed:?}");
    assert_eq!((owed[0], owed[2]), (0, 0), "an operator wants those polled");
    let stats = |worker: &Worker| {
        let stats = worker.scheduler.queues.iter().map(|queue| &queue.served.source.stats);
        stats.map(|stats| (stats.served_ns.get(), stats.polls.get())).collect::<Vec<_>>()
    };
    assert_eq!(stats(&worker), [(BURST.get(), 1); 3]);
    // It is not polled before the others had their time.
    for _ in 0..3 {
        worker.round();
    }
    let polls: Vec<u64> = stats(&worker).into_iter().map(|(_, polls)| polls).collect();
    assert_eq!(polls, [4, 1, 4]);
}

/// Issue 14, row 13.
#[test]
fn kicks_and_the_empty_polls_after_them_are_charged_to_who_kicked() {
    let mut worker = worker([true, true]);
    // The kicks alone.
    for _ in 0..(100 * QUANTUM).times(KICK_COST) {
        assert!(worker.scheduler.kick(token(1), Instant::START));
    }
    assert_eq!(worker.owed(), [0, 100]);
    worker.clear_debt();
    // And one poll for all of them: the next is the operator's again.
    worker.round();
    let after = worker.owed();
    assert!(after[0] == 0 && after[1] >= ROUNDS - 1, "{after:?}");
    worker.clear_debt();
    worker.round();
    assert_eq!(worker.owed(), [0, 0]);
}

/// A sender at port 0, and its receiver at port 1, which has a queue of its own to send from.
fn pair() -> (Worker, Arc<Guest>, Arc<Receiver>, Arc<Port>) {
    let mut worker = worker([]);
    let (guest, _) = worker.add(0, Policy::Spin, true);
    worker.add(1, Policy::Spin, true);
    let (receiver, port) = worker.receive();
    (worker, guest, receiver, port)
}

/// Issue 14, rows 3 and 13, and "a full receiver's waiting frames to the receiver".
#[test]
fn delivery_of_held_frames_is_charged_to_the_receiver_that_was_full() {
    let (mut worker, guest, receiver, port) = pair();
    guest.waiting.store(4, Ordering::Relaxed);
    worker.round();
    assert_eq!(port.egress[0].held_frames(), 4);
    worker.clear_debt();
    let busy = worker.scheduler.window.1;
    receiver.takes_ns.store(5_000_000, Ordering::Relaxed);
    receiver.room.store(4, Ordering::Relaxed);
    worker.scheduler.kick_room(&port.egress[0], token(1));
    worker.settle();
    assert_eq!((receiver.took.load(Ordering::Relaxed), port.egress[0].held_frames()), (4, 0));
    assert_eq!(port.egress[0].stats.served_ns.get(), 5_000_000);
    assert_eq!(
        worker.scheduler.window.1 - busy,
        Ns::from_ms(5),
        "it is a part of the worker's load"
    );
    // One round, however long it took: its guest can answer.
    assert_eq!(worker.owed(), [0, 1]);
}

#[test]
fn delivery_of_frames_held_for_a_rate_is_charged_to_their_receiver() {
    let (mut worker, guest, receiver, port) = pair();
    let frames = Some(Limit { per_second: 10, burst: 1 });
    port.set_rates(RateLimits::default(), RateLimits { bits: None, frames });
    receiver.room.store(4, Ordering::Relaxed);
    guest.waiting.store(2, Ordering::Relaxed);
    worker.round();
    assert_eq!((receiver.took.load(Ordering::Relaxed), port.egress[0].held_frames()), (1, 1));
    worker.clear_debt();
    receiver.takes_ns.store(5_000_000, Ordering::Relaxed);
    let due = worker.forwarder.next_notification().expect("a time");
    worker.pass(due - worker.now());
    worker.round();
    assert_eq!((receiver.took.load(Ordering::Relaxed), port.egress[0].held_frames()), (2, 0));
    assert_eq!(port.egress[0].stats.served_ns.get(), 5_000_000);
    assert_eq!(worker.owed(), [0, 1], "one round at most");
}

/// Its time is known to the caller, who charges it; and no sender's turn is shorter by it.
#[test]
fn slow_delivery_of_held_frames_is_charged_once() {
    let (mut worker, guest, receiver, port) = pair();
    guest.waiting.store(4, Ordering::Relaxed);
    worker.round();
    worker.clear_debt();
    // A page fault for each microsecond.
    worker.forwarder.set_usage(|| {
        let ns = SLOW_NS.with(|ns| ns.replace(ns.get() + 5_000_000));
        let (time, faults) = (Ns::new(ns), ns / 1_000);
        Usage { now: time, cpu: time, faults, ..Usage::default() }
    });
    receiver.takes_ns.store(5_000_000, Ordering::Relaxed);
    receiver.room.store(4, Ordering::Relaxed);
    worker.scheduler.kick_room(&port.egress[0], token(1));
    worker.settle();
    assert!(SLOW_NS.get() > 0, "it was measured");
    assert_eq!(port.egress[0].stats.served_ns.get(), 5_000_000);
    assert_eq!(worker.owed(), [0, 1]);
}

thread_local! {
    static SLOW_NS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Issue 14, row 13.
#[test]
fn kicks_for_room_are_charged_to_the_receiver_one_round_at_most() {
    let (mut worker, _, _, port) = pair();
    worker.round();
    worker.clear_debt();
    for _ in 0..(10 * QUANTUM).times(KICK_COST) {
        worker.scheduler.kick_room(&port.egress[0], token(1));
    }
    assert_eq!(worker.owed(), [0, 1]);
}

/// Issue 14, row 10.
#[test]
fn announcement_is_charged_to_the_queue_that_it_is_made_for() {
    let (mut worker, _, receiver, _) = pair();
    receiver.takes_ns.store(BURST.get(), Ordering::Relaxed);
    receiver.room.store(1, Ordering::Relaxed);
    worker.scheduler.queues[0].served.source.tuning.announce([2; 6]);
    worker.round();
    assert_eq!(receiver.took.load(Ordering::Relaxed), 1);
    let owed = worker.owed();
    assert!(owed[0] >= ROUNDS - 1 && owed[1] == 0, "{owed:?}");
}

#[test]
fn rounds_in_which_all_owe_time_are_skipped_together() {
    let mut worker = worker([false, false]);
    let floods = &worker.scheduler.queues;
    let polls = |worker: &Worker| {
        let queues = worker.scheduler.queues.iter();
        queues.map(|queue| queue.served.source.stats.polls.get()).sum::<u64>()
    };
    assert_eq!(floods.len(), 2);
    worker.round();
    assert_eq!(polls(&worker), 2);
    // One round in which no queue is served; then the next burst, though they owe 200 rounds.
    worker.round();
    assert_eq!(polls(&worker), 2);
    worker.round();
    assert!(polls(&worker) > 2);
}

/// Issue 14, row 9.
#[test]
fn slow_delivery_is_charged_to_its_receiver_and_not_to_its_sender() {
    let mut worker = worker([true, true]);
    let at = loop {
        if let Effect::Serve { at, .. } = worker.scheduler.next(worker.now(), &worker.forwarder) {
            break at;
        }
    };
    worker.pass(BURST);
    let receiver = 1 - at;
    let slow = SlowDelivery { port: PortId(receiver as u16), queue: 0, took: BURST };
    let findings = Findings { slow: [slow].into_iter().collect(), ..Findings::default() };
    let took = BurstResult { frames: 1, findings, ..BurstResult::default() };
    assert_eq!(worker.scheduler.record_burst(&took), Then::Over);
    let _ = worker.scheduler.next(worker.now(), &worker.forwarder);
    let owed = worker.owed();
    assert_eq!((owed[at], owed[receiver]), (0, 1), "one round at most");
    assert!(!worker.scheduler.queues[at].pace.is_watched());
}

#[test]
fn debt_outlives_a_restart_of_the_ring_and_credit_does_not() {
    let mut worker = worker([true, true, true]);
    for _ in 0..(100 * QUANTUM).times(KICK_COST) {
        assert!(worker.scheduler.kick(token(1), Instant::START));
    }
    let owed = worker.owed();
    assert_eq!(owed, [0, 100, 0]);
    worker.scheduler.queues[2].share.grant(1, 1);
    for restarted in [1, 2] {
        let served = worker.scheduler.remove(token(restarted)).unwrap();
        worker.scheduler.add(served, Instant::START);
    }
    let share = |port| worker.scheduler.find(token(port)).unwrap().share;
    assert_eq!(share(1).rounds_in_debt(1, 1), 100);
    assert!(!share(2).has_credit());
}
