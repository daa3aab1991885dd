//! What sleeping costs on this machine, measured at start.
//!
//! Two threads on the CPUs the program may use: one sleeps, the other notifies it while it sleeps.
//! A wake-up through an eventfd costs some microseconds on a bare machine and tens of them in a
//! nested virtual one, where the interrupt and the halt leave the guest; a poll policy that
//! assumed either would be wrong on the other.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use switch::poll::Costs;

/// Sleeps of each kind.
const ROUNDS: usize = 48;
/// Time for the sleeper to fall asleep.
const SETTLE: Duration = Duration::from_micros(60);
/// Length of a measured nap.
const NAP_NS: u64 = 50_000;
/// Longest time for all of it, on a machine that is busy with other things.
const LONGEST: Duration = Duration::from_millis(200);

/// The costs of this machine; measured by the first call, in some 20 ms.
pub fn costs() -> Costs {
    static COSTS: OnceLock<Costs> = OnceLock::new();
    *COSTS.get_or_init(|| {
        let costs = measure().unwrap_or(Costs::TYPICAL);
        tracing::debug!(
            "a wake-up costs {} us and comes {} us late; a nap costs {} us and ends {} us late",
            costs.wake_ns / 1000,
            costs.wake_late_ns / 1000,
            costs.nap_ns / 1000,
            costs.nap_late_ns / 1000
        );
        costs
    })
}

fn measure() -> std::io::Result<Costs> {
    let end = Instant::now() + LONGEST;
    precise_timers();
    let (nap_ns, nap_late_ns) = naps(end);
    if one_cpu(&std::fs::read_to_string("/sys/devices/system/cpu/online")?) {
        return Ok(Costs { nap_ns, nap_late_ns, ..Costs::ONE_CPU });
    }
    let (wake_ns, wake_late_ns) = wakes(end)?;
    Ok(Costs { wake_ns, wake_late_ns, nap_ns, nap_late_ns })
}

/// Whether the machine, not just this process, has but one CPU, by the kernel's list of those
/// online: `0`, `0-3`, `0,2`.
fn one_cpu(online: &str) -> bool {
    online.trim().parse::<u32>().is_ok()
}

/// Asks the kernel not to make this thread's timers late to save wake-ups.
pub fn precise_timers() {
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
}

/// CPU time of this thread, in ns.
fn cpu_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs()
}

fn median(mut all: Vec<u64>) -> u64 {
    all.sort_unstable();
    all.get(all.len() / 2).copied().unwrap_or(0)
}

fn ns(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

fn naps(end: Instant) -> (u64, u64) {
    let (mut costs, mut lates) = (Vec::new(), Vec::new());
    while costs.len() < ROUNDS && Instant::now() < end {
        let (cpu, start) = (cpu_ns(), Instant::now());
        let _ = poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: NAP_NS as i64 }));
        costs.push(cpu_ns() - cpu);
        lates.push(ns(start.elapsed()).saturating_sub(NAP_NS));
    }
    (median(costs), median(lates))
}

fn wakes(end: Instant) -> std::io::Result<(u64, u64)> {
    let kick: OwnedFd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
    let epoch = Instant::now();
    // When the sleeper woke last, and how much CPU time it has used, in ns; 0: it sleeps.
    let (woke, used) = (AtomicU64::new(0), AtomicU64::new(0));
    let stop = AtomicU64::new(0);
    let (mut costs, mut lates) = (Vec::new(), Vec::new());
    // On one CPU the sleeper runs when we let it, at the latest at the end of our time slice, and
    // of all others' if we come before them.
    let alone = rustix::thread::sched_getaffinity(None)?.count() == 1;
    let wait = if alone { std::thread::yield_now } else { std::hint::spin_loop };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            precise_timers();
            let mut cpu = cpu_ns();
            while stop.load(Ordering::Relaxed) == 0 {
                let mut fds = [PollFd::new(&kick, PollFlags::IN)];
                let most = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
                let _ = poll(&mut fds, Some(&most));
                if !fds[0].revents().is_empty() {
                    woke.store(ns(epoch.elapsed()).max(1), Ordering::Release);
                    vhost_user::sys::drain(kick.as_fd());
                    let now = cpu_ns();
                    used.store(now - cpu, Ordering::Release);
                    cpu = now;
                }
            }
        });
        while costs.len() < ROUNDS && Instant::now() < end {
            woke.store(0, Ordering::Relaxed);
            used.store(0, Ordering::Relaxed);
            std::thread::sleep(SETTLE);
            let (start, before) = (ns(epoch.elapsed()), cpu_ns());
            vhost_user::sys::signal(kick.as_fd());
            let mine = cpu_ns() - before;
            while used.load(Ordering::Acquire) == 0 && Instant::now() < end {
                wait();
            }
            costs.push(mine + used.load(Ordering::Acquire));
            lates.push(woke.load(Ordering::Acquire).saturating_sub(start));
        }
        stop.store(1, Ordering::Relaxed);
    });
    Ok((median(costs), median(lates)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_with_one_cpu_are_told_from_others() {
        assert!(one_cpu("0\n") && one_cpu("2"));
        assert!(!one_cpu("0-1\n") && !one_cpu("0,2") && !one_cpu(""));
    }

    #[test]
    fn a_machine_has_costs_and_they_are_measured_once() {
        let costs = costs();
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
        let wakes = [costs.wake_ns, costs.wake_late_ns];
        let wakes = wakes.into_iter().filter(|_| !one_cpu(&online));
        for ns in wakes.chain([costs.nap_ns, costs.nap_late_ns]) {
            assert!((100..50_000_000).contains(&ns), "{costs:?}");
        }
        assert_eq!(costs, super::costs());
    }
}
