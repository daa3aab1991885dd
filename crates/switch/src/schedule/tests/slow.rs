//! Queues whose guest's memory makes single frames take long.

use super::*;

/// Serves for `time`, a kick for each queue in each millisecond. Returns the longest
/// time for which the honest one, the last, waited.
fn serve(worker: &mut Worker, guests: &[Arc<Guest>], time: Ns) -> Ns {
    let end = worker.now() + time;
    let (mut waited, mut before) = (Ns::ZERO, worker.now());
    let mut kicked = worker.now();
    while worker.now() < end {
        if worker.now() - kicked >= Ns::from_ms(1) {
            kicked = worker.now();
            for (port, guest) in guests.iter().enumerate() {
                guest.waiting.store(1, Ordering::Relaxed);
                worker.scheduler.kick(token(port as u16), kicked);
            }
        }
        if !worker.step() {
            worker.scheduler.record_wait(true);
            worker.pass(Ns::from_us(100));
        }
        worker.pass(Ns::new(100));
        if guests.last().is_some_and(|honest| honest.waiting.load(Ordering::Relaxed) == 0) {
            before = worker.now();
        }
        waited = waited.max(worker.now() - before);
    }
    waited
}

#[test]
fn slow_queues_together_take_a_small_part_of_the_time_however_often_they_kick() {
    let mut worker = Worker::new();
    let guests: Vec<_> = (0..5).map(|port| worker.add(port, Policy::Event, true).0).collect();
    for (port, guest) in guests.iter().enumerate() {
        let takes = if port < 4 { Ns::from_us(3_000) } else { Ns::from_us(1) };
        guest.takes_ns.store(takes.get(), Ordering::Relaxed);
    }
    // Until all four are known.
    let _ = serve(&mut worker, &guests, Ns::from_secs(8));
    let (before, time) = (served(&worker), Ns::from_secs(60));
    let waited = serve(&mut worker, &guests, time);
    let slow = served(&worker) - before;
    assert!(slow * 500 < time.get(), "{slow} ns of {time:?}");
    assert!(slow > 0, "slow queues are served, too");
    assert!(waited < Ns::from_ms(5), "{waited:?}: one long burst at a time");
}

/// Time, in ns, that the slow queues were served for.
fn served(worker: &Worker) -> u64 {
    let slow = worker.scheduler.queues.iter().take(4);
    slow.map(|queue| queue.served.source.stats.served_ns.get()).sum()
}

#[test]
fn slow_queue_that_its_guest_restarts_stays_slow() {
    let mut worker = Worker::new();
    let guests: Vec<_> = (0..2).map(|port| worker.add(port, Policy::Event, true).0).collect();
    guests[0].takes_ns.store(Ns::from_us(3_000).get(), Ordering::Relaxed);
    guests[1].takes_ns.store(Ns::from_us(1).get(), Ordering::Relaxed);
    // Until it is known.
    let _ = serve(&mut worker, &guests, Ns::from_secs(8));
    let slow = |worker: &Worker| {
        worker.scheduler.find(token(0)).unwrap().served.source.stats.served_ns.get()
    };
    let (before, time) = (slow(&worker), Ns::from_secs(20));
    for _ in 0..time.times(Ns::from_ms(5)) {
        let served = worker.scheduler.remove(token(0)).unwrap();
        worker.scheduler.add(served, worker.now());
        let waited = serve(&mut worker, &guests, Ns::from_ms(5));
        assert!(waited < Ns::from_ms(5), "{waited:?}: one long burst at a time");
    }
    let slow = slow(&worker) - before;
    assert!(slow * 500 < time.get(), "{slow} ns of {time:?}");
    assert!(slow > 0, "it is served, too");
}
