//! Queues whose port has a rate: when they are polled, and that idle ones are not.

use super::*;
use crate::account::{Limit, RateLimits};

/// A worker with a queue of port 0, which may send so many frames per second, and as many at once.
fn limited(per_second: u64, burst: u64) -> (Worker, Arc<Guest>, Arc<Tuning>, Arc<Port>) {
    let mut worker = Worker::new();
    worker.pass(Ns::from_secs(1));
    let port = Arc::new(Port::new(PortId(0), "s".into(), Vec::new()));
    let frames = Some(Limit { per_second, burst });
    port.set_rates(RateLimits { bits: None, frames }, RateLimits::default());
    worker.forwarder.set_table(Arc::new(vec![Some(Arc::clone(&port))]));
    let (guest, tuning) = worker.add(0, Policy::Event, true);
    tuning.set_has_rate(true);
    (worker, guest, tuning, port)
}

fn frames(worker: &Worker) -> u64 {
    // No port takes them.
    worker.scheduler.find(token(0)).unwrap().served.source.stats.drops_no_port.get()
}

#[test]
fn queue_is_polled_when_its_rate_permits_and_not_before() {
    let (mut worker, guest, _, _) = limited(1000, 16);
    guest.waiting.store(500, Ordering::Relaxed);
    // Sixteen at once; then one per millisecond, and a tenth of one to gather.
    let (timeout, naps) = worker.until_wait();
    assert_eq!((timeout, naps, frames(&worker)), (Some(Ns::from_us(100)), true, 16));
    assert!(!guest.armed.load(Ordering::Relaxed), "no kick is asked for");
    for n in 1..=50 {
        let due = worker.until_wait().0.unwrap();
        worker.pass(due);
        worker.scheduler.record_wait(true);
        let (timeout, naps) = worker.until_wait();
        assert_eq!((timeout, naps), (Some(Ns::from_ms(1)), true));
        assert_eq!(frames(&worker), 16 + n);
    }
    let stats = &worker.scheduler.find(token(0)).unwrap().served.source.stats;
    assert_eq!(stats.polls_empty.get(), 0);
}

#[test]
fn idle_queue_with_a_rate_is_armed_and_costs_no_wake_up() {
    for frames in [0, 3, 16] {
        let (mut worker, guest, _, _) = limited(1000, 16);
        guest.waiting.store(frames, Ordering::Relaxed);
        if frames == 16 {
            // Its tokens are spent: one poll after they are back finds nothing.
            let (timeout, naps) = worker.until_wait();
            assert_eq!((timeout, naps), (Some(Ns::from_us(100)), true));
            worker.pass(timeout.unwrap());
            worker.scheduler.record_wait(true);
        }
        assert_eq!(worker.until_wait(), (None, false), "{frames}");
        assert!(guest.armed.load(Ordering::Relaxed));
    }
}

#[test]
fn kicks_do_not_end_the_wait_for_the_rate_and_a_changed_rate_does() {
    let (mut worker, guest, tuning, port) = limited(10, 1);
    guest.waiting.store(50, Ordering::Relaxed);
    // Of a policy that polls early where it can.
    tuning.set_poll(Policy::Adaptive { latency_us: 50 });
    let gather = worker.until_wait().0.unwrap();
    worker.pass(gather);
    worker.scheduler.record_wait(true);
    let wait = worker.until_wait().0.unwrap();
    assert_eq!((wait, frames(&worker)), (Ns::from_ms(100), 2));
    let polls = |worker: &Worker| {
        let stats = &worker.scheduler.find(token(0)).unwrap().served.source.stats;
        stats.polls.get() + stats.rate_waits.get()
    };
    let before = polls(&worker);
    for n in 1..=9 {
        worker.pass(wait / 10);
        worker.scheduler.record_wait(true);
        worker.scheduler.kick(token(0), worker.now());
        let (timeout, _) = worker.until_wait();
        assert_eq!(timeout, Some(wait - wait / 10 * n));
    }
    assert_eq!(polls(&worker), before);
    let frames_per_s = Some(Limit { per_second: 1_000_000, burst: 100 });
    let none = RateLimits::default();
    port.set_rates(RateLimits { bits: None, frames: frames_per_s }, none);
    worker.scheduler.poll(token(0));
    worker.round();
    assert_eq!(frames(&worker), 50);
}

#[test]
fn drained_queue_with_a_rate_is_drained_at_once() {
    let (mut worker, guest, tuning, _) = limited(10, 1);
    guest.waiting.store(50, Ordering::Relaxed);
    worker.until_wait();
    tuning.set_drain(true);
    worker.scheduler.poll(token(0));
    worker.until_wait();
    assert_eq!(tuning.drain(), Drain::Done);
}

#[test]
fn queues_of_one_port_share_its_rate() {
    let (mut worker, guest, _, port) = limited(1000, 10);
    let (other, tuning) = worker.add(0, Policy::Event, true);
    tuning.set_has_rate(true);
    guest.waiting.store(5000, Ordering::Relaxed);
    other.waiting.store(5000, Ordering::Relaxed);
    let end = worker.now() + Ns::from_secs(1);
    while worker.now() < end {
        let (timeout, _) = worker.until_wait();
        worker.pass(timeout.unwrap());
        worker.scheduler.record_wait(true);
    }
    let left = [&guest, &other].map(|guest| guest.waiting.load(Ordering::Relaxed));
    let sent = 10_000 - left[0] - left[1];
    assert!((1000..=1011 + 2).contains(&sent), "{sent}");
    assert!(port.account.rate_in.is_on());
}
