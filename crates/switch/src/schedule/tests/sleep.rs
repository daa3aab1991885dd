//! When a worker sleeps, until when, and what it does about full destinations around that.

use super::*;
use crate::hold::WAIT_MAX;

#[test]
fn worker_sleeps_until_the_earliest_of_what_is_to_be_done() {
    let mut worker = Worker::new();
    worker.pass(Ns::new(1_000));
    let (idle, _) = worker.add(0, Policy::Event, true);
    assert_eq!(worker.until_wait(), (None, false));
    assert!(idle.armed.load(Ordering::Relaxed));
    // A nap.
    let (napping, _) = worker.add(2, Policy::Coalesce { usecs: 50, frames: 9 }, true);
    napping.waiting.store(1, Ordering::Relaxed);
    assert_eq!(worker.until_wait(), (Some(Ns::new(50_000)), true));
    // Work that no kick announces.
    idle.due_ns.store(worker.now().ns() + 20_000, Ordering::Relaxed);
    worker.scheduler.kick(token(0), worker.now());
    assert_eq!(worker.until_wait(), (Some(Ns::new(20_000)), true));
    worker.pass(Ns::new(20_000));
    idle.due_ns.store(0, Ordering::Relaxed);
    worker.scheduler.record_wait(true);
    assert_eq!(worker.until_wait(), (Some(Ns::new(30_000)), true));
    let polls = worker.scheduler.find(token(0)).unwrap().served.source.stats.polls.get();
    assert_eq!(polls, 3);
}

#[test]
fn full_destinations_are_armed_before_sleep_and_retried_in_time() {
    let mut worker = Worker::new();
    worker.pass(Ns::new(1));
    let (guest, _) = worker.add(0, Policy::Event, true);
    let (receiver, port) = worker.receive();
    guest.waiting.store(4, Ordering::Relaxed);
    assert_eq!(worker.until_wait(), (Some(RETRY_INTERVAL), false));
    assert!(worker.log.iter().any(|effect| matches!(effect, Effect::ArmFull)));
    worker.log.clear();
    // Nothing ended the sleep.
    worker.pass(RETRY_INTERVAL);
    worker.scheduler.record_wait(true);
    worker.step();
    assert!(matches!(worker.log[0], Effect::Retry { all: true, why: Why::Late }));
    worker.until_wait();
    // Room that came before it was asked for.
    worker.pass(Ns::new(10));
    worker.scheduler.record_wait(true);
    guest.waiting.store(1, Ordering::Relaxed);
    worker.scheduler.kick(token(0), worker.now());
    receiver.room.store(9, Ordering::Relaxed);
    worker.log.clear();
    worker.until_wait();
    assert_eq!(port.egress[0].held_frames(), 0);
    assert_eq!(receiver.took.load(Ordering::Relaxed), 5);
}

#[test]
fn busy_worker_retries_full_destinations_that_do_not_notify() {
    let mut worker = Worker::new();
    let (guest, _) = worker.add(0, Policy::Event, true);
    worker.add(2, Policy::Spin, true);
    worker.receive();
    guest.waiting.store(4, Ordering::Relaxed);
    worker.round();
    let mut retries = 0;
    for _ in 0..100 {
        worker.pass(RETRY_INTERVAL / 10 + Ns::new(1));
        worker.log.clear();
        worker.round();
        let is_retry =
            |effect: &&Effect<Io>| matches!(effect, Effect::Retry { all: true, why: Why::Busy });
        retries += worker.log.iter().filter(is_retry).count();
    }
    assert!((9..=10).contains(&retries), "{retries}");
}

#[test]
fn idle_worker_kept_awake_by_a_receiver_that_does_not_notify_polls_kicks_and_retries_all() {
    let mut worker = Worker::new();
    let (guest, _) = worker.add(0, Policy::Event, true);
    let (receiver, port) = worker.receive();
    receiver.silent.store(true, Ordering::Relaxed);
    guest.waiting.store(4, Ordering::Relaxed);
    worker.round();
    let (mut polls, mut retries) = (0, 0);
    for _ in 0..100 {
        // As much as the clock moves while nothing is served.
        worker.pass(RETRY_INTERVAL / 10 + Ns::new(1));
        worker.log.clear();
        worker.round();
        assert!(!worker.log.iter().any(|effect| matches!(effect, Effect::Wait { .. })));
        let is_poll = |effect: &&Effect<Io>| matches!(effect, Effect::PollKicks);
        let is_retry = |effect: &&Effect<Io>| matches!(effect, Effect::Retry { all: true, .. });
        polls += worker.log.iter().filter(is_poll).count();
        retries += worker.log.iter().filter(is_retry).count();
    }
    assert!(polls >= 99, "{polls}");
    assert!((9..=10).contains(&retries), "{retries}");
    // Frames are held for so long, and no longer: then it sleeps.
    worker.pass(WAIT_MAX);
    assert_eq!(worker.until_wait(), (None, false));
    assert_eq!(port.egress[0].held_frames(), 0);
}

#[test]
fn drained_queue_is_muted_once_and_heard_again_when_it_is_polled() {
    let mut worker = Worker::new();
    let (guest, tuning) = worker.add(0, Policy::Event, true);
    worker.until_wait();
    tuning.set_drain(true);
    guest.waiting.store(3, Ordering::Relaxed);
    worker.log.clear();
    worker.scheduler.poll(token(0));
    worker.until_wait();
    assert_eq!(tuning.drain(), Drain::Done);
    for _ in 0..5 {
        worker.scheduler.kick(token(0), worker.now());
    }
    assert_eq!(worker.until_wait(), (None, false));
    let count = |worker: &Worker, is: fn(&Effect<Io>) -> bool| {
        worker.log.iter().filter(|effect| is(effect)).count()
    };
    assert_eq!(count(&worker, |effect| matches!(effect, Effect::Mute { .. })), 1);
    assert_eq!(count(&worker, |effect| matches!(effect, Effect::Unmute { .. })), 0);
    tuning.set_drain(false);
    worker.scheduler.poll(token(0));
    worker.until_wait();
    assert_eq!(count(&worker, |effect| matches!(effect, Effect::Unmute { .. })), 1);
    assert_eq!(guest.waiting.load(Ordering::Relaxed), 0);
}
