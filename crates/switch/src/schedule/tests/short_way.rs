//! [`Scheduler::next_burst`] is what [`Scheduler::next`] would return.

use super::*;

/// Effects and bursts of some queues, in order, whose frames and kicks come from a fixed seed.
fn decisions(by_next_burst: bool) -> Vec<String> {
    let mut worker = Worker::new();
    let policies = [Policy::Spin, Policy::Napi { budget: 8 }, Policy::Adaptive { latency_us: 50 }];
    for (port, policy) in (0..6).zip(policies.into_iter().cycle()) {
        worker.add(port, policy, true);
    }
    let Worker { scheduler, forwarder, .. } = &mut worker;
    let (mut now, mut random, mut log, mut next) = (Instant::from_ns(1), 1_u64, Vec::new(), None);
    let mut short = 0;
    while log.len() < 5_000 {
        let (at, max) = match next.take() {
            Some(burst) => burst,
            None => match scheduler.next(now, forwarder) {
                Effect::Serve { at, max } => (at, max),
                effect => {
                    log.push(format!("{effect:?}"));
                    match effect {
                        Effect::Wait { timeout, .. } => {
                            now += timeout.unwrap_or(Ns::from_us(50));
                            scheduler.kick(token(log.len() as u16 % 6), now);
                            scheduler.record_wait(true);
                        }
                        Effect::Pause => now += Ns::new(100),
                        Effect::ArmFull => scheduler.record_arm_full(forwarder.arm_blocked()),
                        _ => {}
                    }
                    continue;
                }
            },
        };
        log.push(format!("burst of queue {at}, {max}"));
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let frames = [0, (random >> 60) as usize][usize::from(random >> 50 & 1 == 1)].min(max);
        // Some of what comes in between is carried out before the next burst.
        match random >> 40 & 15 {
            0 => _ = scheduler.kick(token((random >> 32 & 7) as u16), now),
            1 => scheduler.wake(1 << 3),
            _ => {}
        }
        now += Ns::new(300 + 1_000 * frames as u64);
        let took = BurstResult { frames, ..BurstResult::default() };
        if scheduler.record_burst(&took) == Then::Arm {
            scheduler.record_arm(true, None);
        }
        if by_next_burst {
            next = scheduler.next_burst(now);
            short += usize::from(next.is_some());
        }
    }
    assert!(!by_next_burst || short > 1_000, "{short} bursts the short way");
    log
}

#[test]
fn bursts_the_short_way_are_the_same() {
    assert_eq!(decisions(true), decisions(false));
}
