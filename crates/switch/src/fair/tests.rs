use super::*;

/// Serves queues with backlog for `rounds`; each burst of queue `i` costs `cost[i]`.
fn serve(cost: &[u64], weight: &[u32], rounds: usize) -> Vec<u64> {
    let mut shares = vec![Share::default(); cost.len()];
    let mut spent = vec![0; cost.len()];
    for _ in 0..rounds {
        for (i, share) in shares.iter_mut().enumerate() {
            share.grant(weight[i], 1);
            while share.has_credit() {
                share.charge(Ns::new(cost[i]));
                spent[i] += cost[i];
            }
        }
    }
    spent
}

#[test]
fn dear_and_cheap_bursts_get_the_same_time() {
    let spent = serve(&[500, 3_000, 900_000], &[1, 1, 1], 100_000);
    let mean = spent.iter().sum::<u64>() / 3;
    for ns in spent {
        assert!(ns.abs_diff(mean) * 100 < mean, "{ns} of {mean}");
    }
}

#[test]
fn weights_are_kept() {
    let spent = serve(&[700, 700], &[1, 3], 10_000);
    let ratio = spent[1] as f64 / spent[0] as f64;
    assert!((2.9..3.1).contains(&ratio), "{ratio}");
}

#[test]
fn credit_is_not_hoarded_and_debt_is_forgiven_when_no_one_waits() {
    let mut share = Share::default();
    for _ in 0..100 {
        share.grant(1, 1);
    }
    share.charge(QUANTUM);
    assert!(!share.has_credit());
    share.charge(Ns::MAX);
    share.clear_debt();
    share.grant(1, 1);
    assert!(share.has_credit());
}

#[test]
fn worker_that_was_stopped_in_a_turn_charges_little_of_that_time() {
    let mut share = Share::default();
    share.charge(Ns::from_secs(60));
    assert_eq!(share.owed(), Ns::from_ms(100));
    // Turns of milliseconds, as of page faults, are charged in full.
    let mut share = Share::default();
    (0..8).for_each(|_| share.charge(Ns::from_ms(25)));
    assert_eq!(share.owed(), Ns::from_ms(200));
}

#[test]
fn what_a_guest_receives_costs_it_one_turn_at_most() {
    let mut share = Share::default();
    share.grant(1, 1);
    share.charge_outside_turn(QUANTUM / 2);
    assert!(share.has_credit(), "half of its turn");
    for time in [2 * QUANTUM, Ns::from_secs(1), Ns::MAX] {
        share.charge_outside_turn(time);
        assert_eq!(share.rounds_in_debt(1, 1), 1, "{time:?}");
    }
    // The debt for its own bursts does not change.
    share.charge(9 * QUANTUM);
    share.charge_outside_turn(Ns::MAX);
    assert_eq!(share.rounds_in_debt(1, 1), 10);
}

#[test]
fn long_bursts_are_halved_to_single_frames_and_grow_again_when_they_are_short() {
    let mut pace = Pace::default();
    assert_eq!(pace.record(64, LONG, None, Instant::START, LONG), Ns::ZERO);
    assert_eq!(pace.frames(), BURST_MAX, "not long");
    // A burst holds two expensive frames only.
    pace.record(2, Ns::from_us(2_600), None, Instant::START + Ns::from_ms(9), LONG);
    assert_eq!(pace.frames(), BURST_MAX, "the worker may have lost its CPU");
    pace.record(2, Ns::from_us(2_600), None, Instant::START + Ns::from_ms(10), LONG);
    assert_eq!(pace.frames(), 1);
    for ms in 11..100 {
        pace.record(1, Ns::from_us(1_300), None, Instant::START + Ns::from_ms(ms), LONG);
        assert_eq!(pace.frames(), 1, "while they are expensive");
    }
    let mut bursts = 0;
    let mut now = Instant::START + Ns::from_ms(100);
    while pace.frames() < BURST_MAX {
        let frames = pace.frames();
        now += Ns::from_ms(1);
        pace.record(frames, Ns::from_us(5), None, now, LONG);
        assert!(pace.frames() == frames || pace.frames() == 2 * frames);
        bursts += 1;
    }
    assert!((30..40).contains(&bursts), "{bursts} ms");
    // Long enough by itself.
    pace.record(64, Ns::from_ms(10), None, now, LONG);
    assert_eq!(pace.frames(), 32);
}

#[test]
fn slow_machine_is_no_reason_for_short_bursts() {
    assert_eq!(long(Ns::from_us(20)), LONG);
    let slow = long(Ns::from_us(330));
    for (long, frames) in [(LONG, 1), (slow, BURST_MAX)] {
        let mut pace = Pace::default();
        // 256 KiB in four frames take four copies, and as long in other work.
        for ms in 1..100 {
            let burst = pace.frames().min(4);
            let took = Ns::from_us(660) * burst as u64;
            pace.record(burst, took, None, Instant::START + Ns::from_ms(3 * ms), long);
        }
        assert_eq!(pace.frames(), frames, "{long:?}");
    }
}

#[test]
fn long_bursts_within_their_share_of_time_leave_the_limit_and_more_of_them_do_not() {
    let mut pace = Pace::default();
    let mut now = Instant::START;
    for _ in 0..500 {
        now += Ns::from_ms(10);
        pace.record(64, Ns::from_us(500), None, now, LONG);
        assert_eq!(pace.frames(), BURST_MAX, "a twentieth of the time");
    }
    for _ in 0..20 {
        now += Ns::from_us(1_000);
        pace.record(64, Ns::from_us(250), None, now, LONG);
    }
    assert!(pace.frames() < BURST_MAX, "a quarter of the time");
}

#[test]
fn page_faults_that_blocked_count_by_the_clock() {
    let before = Usage { now: Ns::from_ms(10), cpu: Ns::from_ms(2), faults: 7, waits: 3 };
    let (now, cpu) = (Ns::from_ms(14), Ns::from_ms(3));
    let spent = |faults, waits| Usage { now, cpu, faults, waits }.since(before);
    assert_eq!(spent(135, 3), Spent { time: Ns::from_ms(1), faults: 128 });
    assert_eq!(spent(7, 5), Spent { time: Ns::from_ms(1), faults: 0 }, "a lock of ours");
    let slow = Spent { time: Ns::from_ms(4), faults: SLOW_FAULTS };
    assert_eq!(spent(8, 4), slow, "one fault");
    assert_eq!(spent(8, 9), slow, "and locks of ours");
    assert!(is_slow_delivery(1, 1500, slow));
}

/// What a burst used: time on its sender's memory and in total, and page faults.
fn used(own: Ns, all: Ns, faults: u64) -> Option<BurstUsage> {
    Some(BurstUsage { own: Spent { time: own, faults }, all: Spent { time: all, faults } })
}

/// Issue 14, row 9.
#[test]
fn single_frames_slow_by_the_senders_memory_make_a_queue_wait() {
    let mut pace = Pace::default();
    let mut now = Instant::START + Ns::from_ms(1);
    let long = Ns::from_ms(3);
    // Not yet measured, then not yet of single frames.
    while pace.frames() > 1 {
        now += long;
        assert_eq!(pace.record(2, long, None, now, LONG), Ns::ZERO);
    }
    let other = [used(LONG, long, 128), used(long, long, SLOW_FAULTS - 1)];
    for used in other {
        assert_eq!(pace.record(1, long, used, now, LONG), Ns::ZERO, "not by its memory");
        assert!(!pace.is_slow(now));
    }
    let waits = long * (SLOW_SHARE - 1);
    assert_eq!(pace.record(1, long, used(long, long, 128), now, LONG), waits);
    assert!(pace.is_slow(now));
    // Short bursts let the limit grow, but the next long one needs no proof.
    let short = used(Ns::new(400), Ns::new(500), 0);
    for _ in 0..100 {
        now += Ns::from_ms(6);
        assert_eq!(pace.record(1, Ns::new(500), short, now, LONG), Ns::ZERO);
    }
    assert_eq!(pace.frames(), BURST_MAX / 2);
    assert!(pace.is_watched(), "the next burst is measured, too");
    assert_eq!(pace.record(32, long, used(long, long, 128), now, LONG), waits);
    assert_eq!(pace.frames(), 1);
    // Forgotten.
    now += SLOW_FOR + Ns::new(1);
    assert!(!pace.is_slow(now));
    while pace.is_watched() {
        now += Ns::from_ms(6);
        let _ = pace.record(1, Ns::new(500), short, now, LONG);
    }
}

#[test]
fn bursts_are_measured_by_part_for_a_time_after_page_faults_alone() {
    let mut pace = Pace::default();
    let by_part = |pace: &Pace| pace.meter(&Usage::default).map(|meter| meter.by_part);
    let (long, mut now) = (Ns::from_ms(1), Instant::START + Ns::from_ms(1));
    assert_eq!(by_part(&pace), None);
    let mut record = |pace: &mut Pace, took, faults| {
        now += Ns::from_ms(2);
        let all = Spent { time: took, faults };
        let used = pace.meter(&Usage::default).map(|_| BurstUsage { own: Spent::default(), all });
        assert_eq!(pace.record(1, took, used, now, LONG), Ns::ZERO, "{used:?}");
        now
    };
    // Long frames whose pages are there, as GSO frames on a slow machine.
    for _ in 0..1000 {
        record(&mut pace, long, SLOW_FAULTS - 1);
        assert_ne!(by_part(&pace), Some(true));
    }
    assert_eq!(by_part(&pace), Some(false));
    record(&mut pace, LONG, 128);
    assert_eq!(by_part(&pace), Some(false), "not long");
    let mut last = record(&mut pace, long, SLOW_FAULTS);
    assert_eq!(by_part(&pace), Some(true));
    // The pages are there again, but it may be a guest that alternates.
    let until = last + SLOW_FOR;
    while last < until {
        assert_eq!(by_part(&pace), Some(true), "{last:?}");
        last = record(&mut pace, long, 0);
    }
    assert_eq!(by_part(&pace), Some(false));
}

#[test]
fn a_worker_that_loses_its_cpu_makes_no_queue_slow() {
    // To another thread, or to another virtual machine, which counts as CPU time.
    for measured in [Ns::from_us(10), Ns::from_ms(3)] {
        let mut pace = Pace::default();
        let mut now = Instant::START + Ns::from_ms(1);
        let wall = Ns::from_ms(3);
        for _ in 0..1000 {
            now += wall * 2;
            let used = pace.is_watched().then(|| used(measured, measured, 0)).flatten();
            let frames = pace.frames().min(64);
            assert_eq!(pace.record(frames, wall, used, now, LONG), Ns::ZERO);
            assert!(pace.frames() >= BURST_MAX / 4 || measured == wall, "{}", pace.frames());
        }
    }
}

#[test]
fn minutes_of_long_bursts_are_forgotten_within_a_tenth_of_a_second() {
    let mut pace = Pace::default();
    let mut now = Instant::START;
    for _ in 0..60_000 {
        now += Ns::from_ms(2);
        pace.record(64, Ns::from_ms(2), None, now, LONG);
    }
    assert_eq!(pace.frames(), 1);
    for _ in 0..20 {
        now += Ns::from_ms(5) + Ns::new(1);
        pace.record(1, Ns::from_us(5), None, now, LONG);
    }
    pace.record(64, Ns::from_us(500), None, now, LONG);
    assert_eq!(pace.frames(), BURST_MAX, "one after 0.1 s");
}

#[test]
fn rounds_that_are_skipped_are_those_in_which_nothing_was_served() {
    for owes in [0, 1, 9_999, 10_000, 10_001, 3_000_000, u64::MAX >> 1] {
        for (weight, queues) in [(1, 1), (3, 2), (1, 7)] {
            let mut share = Share::default();
            share.charge(Ns::new(owes));
            let waits = share.rounds_in_debt(weight, queues);
            let mut skipped = share;
            skipped.skip(waits, weight, queues);
            assert_eq!(skipped.rounds_in_debt(weight, queues), 0, "{owes} {weight} {queues}");
            skipped.grant(weight, queues);
            assert!(skipped.has_credit());
            if waits > 0 {
                share.skip(waits - 1, weight, queues);
                share.grant(weight, queues);
                assert!(!share.has_credit(), "{owes}: one round earlier");
            }
        }
    }
}

#[test]
fn queues_of_one_port_share_its_quantum() {
    let mut share = Share::default();
    share.grant(1, 4);
    share.charge(QUANTUM / 4);
    assert!(!share.has_credit());
}

fn give(queues: &[usize], to: usize) -> Option<Move> {
    Some(Move::Queues(queues.to_vec(), to))
}

#[test]
fn overloaded_worker_moves_the_queue_that_evens_out_most() {
    assert_eq!(balance(0, &[1000, 0], &[600, 400]), give(&[1], 1));
    assert_eq!(balance(0, &[900, 300, 100], &[500, 380, 20]), give(&[1], 2));
    // No move helps one heavy queue, or two workers that are both full.
    assert_eq!(balance(0, &[1000, 0], &[1000]), None);
    assert_eq!(balance(0, &[1000, 0], &[990, 10]), None);
    assert_eq!(balance(0, &[1000, 950], &[500, 500]), None);
}

#[test]
fn nearly_idle_workers_fold_onto_the_first_and_none_folds_upward() {
    assert_eq!(balance(1, &[200, 100], &[100]), Some(Move::All(0)));
    assert_eq!(balance(2, &[450, 200, 100], &[100]), Some(Move::All(1)));
    assert_eq!(balance(0, &[0, 0], &[0]), None);
    assert_eq!(balance(1, &[450, 100], &[100]), None);
    // None of its queues was served.
    assert_eq!(balance(1, &[0, 0], &[]), Some(Move::All(0)));
}

#[test]
fn overloaded_worker_moves_half_of_many_light_queues() {
    let halves: Vec<usize> = (0..50).rev().collect();
    assert_eq!(balance(0, &[1000, 0], &[10; 100]), give(&halves, 1));
    // Sixty that fill a worker: 31 times 16 is half of it.
    let half: Vec<usize> = (0..31).rev().collect();
    assert_eq!(balance(0, &[1000, 0], &[16; 60]), give(&half, 1));
    // Not heavier ones, which would take as many moves one by one.
    assert_eq!(balance(0, &[990, 0], &[33; 30]).unwrap(), give(&half[16..], 1).unwrap());
    // Those that were not served stay.
    let mut some = [0; 100];
    (some[3], some[70], some[71]) = (15, 15, 15);
    assert_eq!(balance(0, &[900, 100, 400], &some), give(&[71, 70, 3], 1));
}

#[test]
fn idle_neighbours_of_a_flooder_leave_it() {
    let mut queues = [12; 9];
    queues[4] = 900;
    assert_eq!(balance(0, &[996, 0], &queues), give(&[8, 7, 6, 5, 3, 2, 1, 0], 1));
    // And they do not move back, nor does the flooder follow them.
    assert_eq!(balance(1, &[900, 96], &[12; 8]), None);
    assert_eq!(balance(0, &[1000, 96], &[1000]), None);
    // All of them together are too light, or the other worker is nearly as loaded.
    assert_eq!(balance(0, &[1000, 0], &[980, 10, 10]), None);
    assert_eq!(balance(0, &[1000, 900], &[10; 100]), None);
}

/// Queues on workers whose loads are measured with an error.
struct Workers {
    wants: Vec<u32>,
    on: Vec<usize>,
    workers: usize,
    seed: u64,
}

impl Workers {
    fn new(wants: Vec<u32>, workers: usize) -> Self {
        Self { on: vec![0; wants.len()], wants, workers, seed: 1 }
    }

    /// Time that a worker's queues get: all they need, or each its share.
    fn served(&mut self, worker: usize) -> Vec<(usize, u32)> {
        let mine: Vec<usize> = (0..self.on.len()).filter(|q| self.on[*q] == worker).collect();
        let wanted: u32 = mine.iter().map(|q| self.wants[*q]).sum();
        let part = |n: u32| if wanted > 1000 { n * 1000 / wanted } else { n };
        let wrong = |n: u32, seed: &mut u64| {
            *seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            n * (90 + (*seed >> 33) as u32 % 21) / 100
        };
        let wants = mine.iter().map(|q| (*q, part(self.wants[*q])));
        wants.map(|(q, n)| (q, wrong(n, &mut self.seed))).collect()
    }

    /// One decision of each worker; returns the number of queues moved.
    fn decide(&mut self) -> usize {
        let mut moved = 0;
        for me in 0..self.workers {
            let loads: Vec<Vec<(usize, u32)>> = (0..self.workers).map(|w| self.served(w)).collect();
            let of = |queues: &Vec<(usize, u32)>| queues.iter().map(|(_, n)| n).sum::<u32>();
            let workers: Vec<u32> = loads.iter().map(|q| of(q).min(1000)).collect();
            let queues: Vec<u32> = loads[me].iter().map(|(_, n)| *n).collect();
            let (given, to) = match balance(me, &workers, &queues) {
                Some(Move::Queues(given, to)) => (given, to),
                Some(Move::All(to)) => ((0..queues.len()).collect(), to),
                None => continue,
            };
            moved += given.len();
            given.into_iter().for_each(|at| self.on[loads[me][at].0] = to);
        }
        moved
    }

    fn counts(&self) -> Vec<usize> {
        (0..self.workers).map(|w| self.on.iter().filter(|on| **on == w).count()).collect()
    }
}

#[test]
fn light_queues_spread_stay_and_fold() {
    // Total load of the sixty, and the fewest and most that a worker may end up with.
    for (wants, workers, least, most) in
        [(16, 2, 25, 35), (25, 2, 25, 35), (33, 3, 15, 25), (50, 4, 11, 19), (66, 4, 11, 19)]
    {
        let mut machine = Workers::new(vec![wants; 60], workers);
        for _ in 0..30 {
            machine.decide();
        }
        let counts = machine.counts();
        let used = counts.iter().filter(|n| **n > 0);
        assert!(used.clone().count() >= 2, "{wants}: {counts:?}");
        assert!(used.clone().all(|n| (least..=most).contains(n)), "{wants}: {counts:?}");
        let moved: usize = (0..1000).map(|_| machine.decide()).sum();
        assert!(moved <= 20, "{wants} on {workers}: {moved} needless moves of queues");
        // Nearly all become idle.
        machine.wants.fill(3);
        for _ in 0..10 {
            machine.decide();
        }
        assert_eq!(machine.counts()[0], 60, "{wants}: folded");
    }
}

#[test]
fn a_move_is_not_undone_by_the_next_decision() {
    // After (600, 400) nothing moves; at 500 on one worker nothing is overloaded.
    assert_eq!(balance(0, &[600, 400], &[600]), None);
    assert_eq!(balance(1, &[600, 400], &[400]), None);
    assert_eq!(balance(0, &[500, 0], &[300, 200]), None);
    assert_eq!(balance(0, &[504, 496], &[16; 31]), None);
}
