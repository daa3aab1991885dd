//! What a busy worker spends on queues that nothing comes to.

use super::*;
use crate::pool::token;

fn worker(workers: u8) -> Worker {
    worker_of(pool(workers, Placement::Balanced, COSTS))
}

fn give(worker: &mut Worker, port: u16, policy: Policy) -> Arc<Guest> {
    let guest = Arc::new(Guest::default());
    let source = Source::new(PortId(port), 0, Arc::default(), Arc::new(Tuning::new(policy)));
    worker.adopt(Served {
        token: token(PortId(port), 0, false),
        source,
        ingress: Arc::new(Mutex::new(Transmit(Arc::clone(&guest)))),
        kick: None,
        notifies: true,
    });
    guest
}

/// What the loop of a worker does between two looks for kicks, so many times; the shortest of
/// several tries, in ns.
fn rounds_ns(worker: &mut Worker) -> u128 {
    let mut best = u128::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        for _ in 0..200 {
            let now = worker.now();
            worker.process(now);
            worker.measure(now);
            worker.retry_busy(now);
        }
        best = best.min(start.elapsed().as_nanos());
    }
    best
}

#[test]
fn busy_worker_pays_nothing_for_idle_queues() {
    let rounds_among = |idle: u16| {
        let mut worker = worker(2);
        let busy = give(&mut worker, 0, Policy::Spin);
        busy.waiting.store(usize::MAX / 2, Ordering::SeqCst);
        for port in 1..=idle {
            give(&mut worker, port, Policy::Event);
        }
        worker.process(0);
        assert_eq!(worker.hot.len(), 1);
        rounds_ns(&mut worker)
    };
    let (few, many) = (rounds_among(1), rounds_among(20_000));
    assert!(many < few * 10, "{few} ns beside one, {many} ns beside 20,000");
}

#[test]
fn lists_of_queues_are_what_the_queues_say() {
    let mut worker = worker(2);
    let guests: Vec<_> = (0..40).map(|port| give(&mut worker, port, Policy::Event)).collect();
    let mut random = 1_u64;
    let mut draw = |n: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % n
    };
    for _ in 0..3000 {
        let guest = &guests[draw(40) as usize];
        guest.waiting.store(draw(3) as usize, Ordering::SeqCst);
        match draw(8) {
            0 => worker.retry(true, worker.now()),
            1 => worker.kicked(token(PortId(draw(40) as u16), 0, false)),
            2 if worker.queues.len() > 20 => {
                let at = draw(worker.queues.len() as u64) as usize;
                worker.give(vec![at, 0], 1);
            }
            3 => worker.measure(worker.now()),
            _ => _ = worker.process(worker.now()),
        }
        let of = |wanted: &dyn Fn(&Queue) -> bool| {
            (0..worker.queues.len()).filter(|at| wanted(&worker.queues[*at])).collect::<Vec<_>>()
        };
        let sorted = |list: &[usize]| {
            let mut list = list.to_vec();
            list.sort_unstable();
            list
        };
        assert_eq!(sorted(&worker.hot), of(&|queue| queue.listed));
        assert_eq!(sorted(&worker.paused), of(&|queue| queue.paused));
        assert_eq!(sorted(&worker.served), of(&|queue| queue.busy_ns > 0));
    }
    assert!(worker.queues.len() <= 21);
}
