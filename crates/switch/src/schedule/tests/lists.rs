//! What a worker keeps of its queues, and what a busy one spends on those that nothing comes to.

use super::*;

#[test]
fn busy_worker_pays_nothing_for_idle_queues() {
    // What a busy worker does between two polls for kicks, so many times; the shortest of several
    // tries, in ns.
    let rounds_among = |idle: u16| {
        let mut worker = Worker::new();
        let (busy, _) = worker.add(0, Policy::Spin, true);
        busy.waiting.store(usize::MAX / 2, Ordering::Relaxed);
        busy.takes_ns.store(1_000, Ordering::Relaxed);
        for port in 1..=idle {
            worker.add(port, Policy::Event, true);
        }
        worker.round();
        assert_eq!(worker.scheduler.hot.len(), 1);
        let mut best = u128::MAX;
        for _ in 0..5 {
            let start = std::time::Instant::now();
            for _ in 0..200 {
                worker.pass(WINDOW);
                worker.round();
            }
            worker.log.clear();
            best = best.min(start.elapsed().as_nanos());
        }
        best
    };
    let (few, many) = (rounds_among(1), rounds_among(20_000));
    assert!(many < few * 10, "{few} ns beside one, {many} ns beside 20,000");
}

#[test]
fn lists_of_queues_are_what_the_queues_say() {
    let mut worker = Worker::new();
    let guests: Vec<_> = (0..40).map(|port| worker.add(port, Policy::Event, true).0).collect();
    guests.iter().for_each(|guest| guest.takes_ns.store(300, Ordering::Relaxed));
    let (receiver, _) = worker.receive();
    let mut random = 1_u64;
    let mut draw = |n: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % n
    };
    let mut paused = 0;
    for _ in 0..3000 {
        guests[draw(40) as usize].waiting.store(draw(3) as usize, Ordering::Relaxed);
        receiver.room.store(draw(4) as usize / 3, Ordering::Relaxed);
        let of = draw(40);
        match draw(8) {
            0 => worker.scheduler.wake(1),
            1 => _ = worker.scheduler.kick(of, worker.now()),
            2 if worker.scheduler.queues.len() > 20 => worker.scheduler.give_away(of, 1),
            3 => worker.pass(WINDOW),
            4 => worker.scheduler.poll(of),
            _ => worker.round(),
        }
        if draw(2) == 0 {
            worker.settle();
        }
        let Scheduler { queues, hot, paused: pausing, served, by_token, .. } = &worker.scheduler;
        let of = |wanted: &dyn Fn(&Queue<Io>) -> bool| {
            (0..queues.len()).filter(|at| wanted(&queues[*at])).collect::<Vec<_>>()
        };
        let sorted = |list: &[usize]| {
            let mut list = list.to_vec();
            list.sort_unstable();
            list
        };
        assert_eq!(sorted(hot), of(&|queue| queue.listed));
        assert_eq!(sorted(pausing), of(&|queue| queue.paused));
        assert_eq!(sorted(served), of(&|queue| queue.busy > Ns::ZERO));
        assert!(queues.iter().enumerate().all(|(at, q)| by_token[&q.served.token] == at));
        paused += pausing.len();
    }
    assert!(worker.scheduler.queues.len() <= 20 && paused > 0);
}

#[test]
fn queues_that_are_given_away_leave_with_what_was_to_be_done_about_them() {
    let mut worker = Worker::new();
    for port in 0..4 {
        worker.add(port, Policy::ADAPTIVE, true);
    }
    // Each is to be disarmed; the last takes the place of the one that goes.
    worker.scheduler.give_away(token(1), 3);
    assert_eq!(worker.scheduler.leaving().map(|served| served.token).collect::<Vec<_>>(), [1]);
    worker.settle();
    let mut disarmed = Vec::new();
    for effect in &worker.log {
        match effect {
            Effect::Disarm { at } => disarmed.push(worker.scheduler.queue(*at).served.token),
            Effect::Give { queues, to } => {
                assert_eq!((queues.len(), queues[0].token, *to), (1, 1, 3));
            }
            other => panic!("{other:?}"),
        }
    }
    disarmed.sort_unstable();
    assert_eq!(disarmed, [0, 2, 3]);
    assert!(worker.scheduler.remove(token(1)).is_none());
    assert!(!worker.scheduler.kick(token(1), Instant::START));
}

#[test]
fn queue_that_is_kicked_while_it_is_polled_is_disarmed() {
    // Its ring is new: that of before was disarmed, or there was none.
    for (policy, times) in [(Policy::Spin, 1), (Policy::ADAPTIVE, 1), (Policy::Event, 0)] {
        let mut worker = Worker::new();
        worker.add(0, policy, true);
        worker.settle();
        worker.log.clear();
        assert!(worker.scheduler.kick(token(0), worker.now()));
        worker.settle();
        let disarms = worker.log.iter().filter(|effect| matches!(effect, Effect::Disarm { .. }));
        assert_eq!(disarms.count(), times, "{policy}");
    }
}
