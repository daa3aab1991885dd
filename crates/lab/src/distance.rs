//! Distance of two CPUs: the round trip of one cache line between them.
//!
//! On a shared machine the distance changes within minutes, and with it every figure of a ring
//! between the CPUs; so this probe brackets each run.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_setaffinity};

/// Round trips of one sample, and samples.
const ROUNDS: u32 = 1000;
const SAMPLES: usize = 9;
/// Time limit, in case the other CPU is busy; samples until then are used.
const LIMIT: Duration = Duration::from_millis(200);
/// Ends the other side; no round has this number.
const OVER: u32 = u32::MAX;

/// A line of its own, whatever the length of a line.
#[repr(align(128))]
struct Ball(AtomicU32);

/// The median round trip in ns between two CPUs; `None`: they are the same, or not permitted.
pub fn between(here: usize, there: usize) -> Option<f64> {
    if here == there || here.max(there) >= CpuSet::MAX_CPU {
        return None;
    }
    let ball = Ball(AtomicU32::new(0));
    let (ball, ready) = (&ball.0, std::sync::Barrier::new(2));
    std::thread::scope(|scope| {
        let answer = scope.spawn(|| {
            let pinned = pin(there);
            ready.wait();
            pinned && answer(ball)
        });
        let throw = scope.spawn(|| {
            let pinned = pin(here);
            ready.wait();
            if !pinned {
                ball.store(OVER, Ordering::Release);
                return None;
            }
            throw(ball)
        });
        let ns = throw.join().ok().flatten();
        (answer.join().unwrap_or(false)).then_some(ns).flatten()
    })
}

/// Binds this thread to a CPU; returns whether that is permitted.
pub fn pin(cpu: usize) -> bool {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).is_ok()
}

/// Adds one to every odd number, until it is over.
fn answer(ball: &AtomicU32) -> bool {
    loop {
        let seen = ball.load(Ordering::Acquire);
        if seen == OVER {
            return true;
        }
        if seen % 2 == 1 {
            // May meet OVER, which has to stay.
            let _ = ball.compare_exchange(seen, seen + 1, Ordering::AcqRel, Ordering::Acquire);
        }
        std::hint::spin_loop();
    }
}

fn throw(ball: &AtomicU32) -> Option<f64> {
    let start = Instant::now();
    let mut samples = Vec::with_capacity(SAMPLES);
    let mut number = 0;
    'samples: while samples.len() < SAMPLES {
        let begin = Instant::now();
        for _ in 0..ROUNDS {
            ball.store(number + 1, Ordering::Release);
            number += 2;
            let mut spins = 0_u32;
            while ball.load(Ordering::Acquire) != number {
                spins += 1;
                if spins.is_multiple_of(4096) && start.elapsed() > LIMIT {
                    break 'samples;
                }
                std::hint::spin_loop();
            }
        }
        samples.push(begin.elapsed().as_secs_f64() * 1e9 / f64::from(ROUNDS));
    }
    ball.store(OVER, Ordering::Release);
    // The median: one time slice given to another program must not look like distance.
    samples.sort_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_cpu_has_no_distance() {
        assert_eq!(between(0, 0), None);
        assert_eq!(between(0, CpuSet::MAX_CPU), None);
    }

    #[test]
    fn two_cpus_are_some_way_apart_and_the_probe_is_short() {
        let begin = Instant::now();
        // None where a test machine has one CPU.
        if let Some(ns) = between(0, 1) {
            assert!(ns > 5.0, "{ns}: no line travels that fast");
        }
        assert!(begin.elapsed() < Duration::from_secs(5));
    }
}
