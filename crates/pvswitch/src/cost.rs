//! Costs of sleeping and of copying on this machine, measured at start.
//!
//! Sleeping is measured with two threads on the program's CPUs: one sleeps, on the first worker's
//! CPU if that is pinned, and the other wakes it.
//! A wake-up through an eventfd costs a few microseconds on bare metal and tens of microseconds in
//! a nested VM, where the interrupt and the halt exit the guest. A poll policy that assumed either
//! would be wrong on the other.

use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use switch::frame::BURST_BYTES;
use switch::poll::Costs;
use switch::time::Ns;

/// Sleeps of each kind.
const ROUNDS: usize = 48;
/// Fewest sleeps that give a median.
const ENOUGH: usize = 8;
/// Time for the sleeper to fall asleep.
const SETTLE: Duration = Duration::from_micros(60);
/// Length of a measured nap.
const NAP: Ns = Ns::from_us(50);
/// Copies of which the fastest is taken.
const COPIES: usize = 8;
/// Maximum time for the sleeps of one kind, on a busy machine.
const LONGEST: Duration = Duration::from_millis(200);

/// CPU time and lateness of each sleep of a kind.
type Sleeps = Vec<(Ns, Ns)>;

/// The costs of this machine; the first call measures them, in about 20 ms.
pub fn costs() -> Costs {
    costs_on(None)
}

static COSTS: OnceLock<Costs> = OnceLock::new();

/// Uses the costs of sleeping that a process before measured on this machine.
pub fn adopt(costs: Costs) {
    let _ = COSTS.set(Costs { copy: copy(), ..costs });
}

/// Time to copy as many bytes as a burst has at most.
fn copy() -> Ns {
    let from = vec![1_u8; BURST_BYTES as usize];
    let mut to = vec![0_u8; BURST_BYTES as usize];
    let one = |_| {
        let began = Instant::now();
        to.copy_from_slice(std::hint::black_box(&from));
        std::hint::black_box(&mut to);
        began.elapsed().into()
    };
    // The fastest lost no time to other threads.
    (0..COPIES).map(one).min().unwrap_or(Costs::TYPICAL.copy)
}

/// Measures as [`costs`] does, with the sleeper on this CPU if the process may use it.
pub fn costs_on(cpu: Option<usize>) -> Costs {
    *COSTS.get_or_init(|| {
        let (costs, doubt) = measure(LONGEST, cpu).unwrap_or_else(|error| {
            let doubt = format!("could not measure the cost of sleeping: {error}");
            (Costs::TYPICAL, Some(doubt))
        });
        if let Some(doubt) = doubt {
            tracing::warn!("{doubt}; policy 'adaptive' uses typical costs");
        }
        let costs = Costs { copy: copy(), ..costs };
        let us = Ns::from_us(1);
        tracing::debug!(
            "a wake-up costs {} us and is {} us late; a nap costs {} us and is {} us late; \
             a copy of {} KiB takes {} us",
            costs.wake.times(us),
            costs.wake_late.times(us),
            costs.nap.times(us),
            costs.nap_late.times(us),
            BURST_BYTES / 1024,
            costs.copy.times(us)
        );
        costs
    })
}

/// Measures the costs. Returns them with the reason to doubt them, if any.
fn measure(longest: Duration, cpu: Option<usize>) -> std::io::Result<(Costs, Option<String>)> {
    let cpus = Cpus::of(cpu)?;
    let naps = naps(longest, &cpus);
    if one_cpu(&std::fs::read_to_string("/sys/devices/system/cpu/online")?) {
        return Ok(evaluate(naps, None));
    }
    Ok(evaluate(naps, Some(wakes(longest, &cpus)?)))
}

/// Costs from measured sleeps; typical ones where these were too few. `None`: one CPU.
fn evaluate(naps: Sleeps, wakes: Option<Sleeps>) -> (Costs, Option<String>) {
    let usual = if wakes.is_some() { Costs::TYPICAL } else { Costs::ONE_CPU };
    let few = |n: &usize| *n < ENOUGH;
    let seen = (naps.len(), wakes.as_ref().map(Vec::len));
    let doubt = (few(&seen.0) || seen.1.as_ref().is_some_and(few)).then(|| {
        format!(
            "could not measure the cost of sleeping, the machine is busy: {} of {ROUNDS} naps \
             and {} of {ROUNDS} wake-ups ended in time",
            seen.0,
            seen.1.unwrap_or(ROUNDS)
        )
    });
    let (nap, nap_late) = medians(naps).unwrap_or((usual.nap, usual.nap_late));
    let wakes = medians(wakes.unwrap_or_default());
    let (wake, wake_late) = wakes.unwrap_or((usual.wake, usual.wake_late));
    (Costs { wake, wake_late, nap, nap_late, ..usual }, doubt)
}

/// Medians; `None` if there were too few sleeps. Never 0, which would mean a machine with one CPU.
fn medians(sleeps: Sleeps) -> Option<(Ns, Ns)> {
    if sleeps.len() < ENOUGH {
        return None;
    }
    let (costs, lates) = sleeps.into_iter().unzip();
    Some((median(costs).max(Ns::new(1)), median(lates)))
}

/// CPUs of the sleeper and of the thread that wakes it.
struct Cpus {
    sleeper: CpuSet,
    waker: CpuSet,
    /// Both threads share the only CPU.
    alone: bool,
}

impl Cpus {
    /// The sleeper on `cpu`, the waker on the other CPUs; or both on all.
    fn of(cpu: Option<usize>) -> std::io::Result<Self> {
        let all = sched_getaffinity(None)?;
        let (mut sleeper, mut waker) = (all, all);
        if let Some(cpu) = cpu.filter(|cpu| *cpu < CpuSet::MAX_CPU && all.is_set(*cpu)) {
            sleeper = CpuSet::new();
            sleeper.set(cpu);
            if all.count() > 1 {
                waker.unset(cpu);
            }
        }
        Ok(Self { sleeper, waker, alone: all.count() == 1 })
    }
}

fn keep_to(cpus: &CpuSet) {
    // Without affinity the result is nearly the same.
    let _ = sched_setaffinity(None, cpus);
}

/// Whether the machine, not only this process, has a single CPU, by the kernel's list of CPUs
/// online: `0`, `0-3`, `0,2`.
fn one_cpu(online: &str) -> bool {
    online.trim().parse::<u32>().is_ok()
}

/// CPU time of this thread.
fn cpu_time() -> Ns {
    os::thread_cpu_time().into()
}

fn median(mut all: Vec<Ns>) -> Ns {
    all.sort_unstable();
    all.get(all.len() / 2).copied().unwrap_or_default()
}

fn naps(longest: Duration, cpus: &Cpus) -> Sleeps {
    let nap = || {
        keep_to(&cpus.sleeper);
        os::precise_timers();
        let end = Instant::now() + longest;
        let mut sleeps = Vec::new();
        while sleeps.len() < ROUNDS && Instant::now() < end {
            let (cpu, start) = (cpu_time(), Instant::now());
            let _ = poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: NAP.get() as i64 }));
            sleeps.push((cpu_time() - cpu, Ns::from(start.elapsed()) - NAP));
        }
        sleeps
    };
    // In a separate thread: the affinity of this one stays.
    std::thread::scope(|scope| scope.spawn(nap).join().unwrap_or_default())
}

/// Result of the sleeper's last wake-up.
#[derive(Default)]
struct Woken {
    /// Time of the wake-up, and CPU time since the previous one, in ns; 0: still asleep.
    at_ns: AtomicU64,
    used_ns: AtomicU64,
    stop: AtomicBool,
}

fn wakes(longest: Duration, cpus: &Cpus) -> std::io::Result<Sleeps> {
    let kick = os::eventfd()?;
    let (epoch, woken) = (Instant::now(), Woken::default());
    let sleep = || {
        keep_to(&cpus.sleeper);
        os::precise_timers();
        let mut cpu = cpu_time();
        while !woken.stop.load(Ordering::Relaxed) {
            let mut fds = [PollFd::new(&kick, PollFlags::IN)];
            let most = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            let _ = poll(&mut fds, Some(&most));
            if !fds[0].revents().is_empty() {
                woken.at_ns.store(Ns::from(epoch.elapsed()).get().max(1), Ordering::Release);
                os::drain(kick.as_fd());
                let now = cpu_time();
                woken.used_ns.store((now - cpu).get().max(1), Ordering::Release);
                cpu = now;
            }
        }
    };
    // On one CPU, the sleeper runs when this thread yields, at the latest after its time slice and
    // those of other threads.
    let wait = if cpus.alone { std::thread::yield_now } else { std::hint::spin_loop };
    let wake = || {
        keep_to(&cpus.waker);
        os::precise_timers();
        let end = Instant::now() + longest;
        let mut sleeps = Vec::new();
        while sleeps.len() < ROUNDS && Instant::now() < end {
            woken.at_ns.store(0, Ordering::Relaxed);
            woken.used_ns.store(0, Ordering::Relaxed);
            std::thread::sleep(SETTLE);
            let (start, before) = (Ns::from(epoch.elapsed()), cpu_time());
            os::signal(kick.as_fd());
            let mine = cpu_time() - before;
            while woken.used_ns.load(Ordering::Acquire) == 0 && Instant::now() < end {
                wait();
            }
            let used = Ns::new(woken.used_ns.load(Ordering::Acquire));
            if used == Ns::ZERO {
                // Cut off: no result.
                break;
            }
            let late = Ns::new(woken.at_ns.load(Ordering::Acquire)) - start;
            sleeps.push((mine + used, late));
        }
        woken.stop.store(true, Ordering::Relaxed);
        sleeps
    };
    Ok(std::thread::scope(|scope| {
        scope.spawn(sleep);
        scope.spawn(wake).join().unwrap_or_default()
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_with_one_cpu_are_recognized() {
        assert!(one_cpu("0\n") && one_cpu("2"));
        assert!(!one_cpu("0-1\n") && !one_cpu("0,2") && !one_cpu(""));
    }

    #[test]
    fn a_machine_has_costs_and_they_are_measured_once() {
        let costs = costs();
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
        let wakes = [costs.wake, costs.wake_late];
        let wakes = wakes.into_iter().filter(|_| !one_cpu(&online));
        for cost in wakes.chain([costs.nap, costs.nap_late]) {
            assert!((100..50_000_000).contains(&cost.get()), "{costs:?}");
        }
        assert!((1000..1_000_000_000).contains(&costs.copy.get()), "{costs:?}");
        assert_eq!(costs, super::costs());
    }

    #[test]
    fn too_few_sleeps_give_typical_costs() {
        let all = |n, (cost, late)| vec![(Ns::new(cost), Ns::new(late)); n];
        let (costs, doubt) = evaluate(all(48, (7, 8)), Some(all(48, (9, 10))));
        let seen = Costs {
            wake: Ns::new(9),
            wake_late: Ns::new(10),
            nap: Ns::new(7),
            nap_late: Ns::new(8),
            ..Costs::TYPICAL
        };
        assert_eq!((costs, doubt), (seen, None));
        // Naps took all the time, or wake-ups were never completed.
        for wakes in [0, ENOUGH - 1] {
            let (costs, doubt) = evaluate(all(48, (7, 8)), Some(all(wakes, (9, 10))));
            let Costs { wake, wake_late, .. } = Costs::TYPICAL;
            assert_eq!(costs, Costs { wake, wake_late, ..seen });
            let want = format!("48 of 48 naps and {wakes} of 48 wake-ups");
            assert!(doubt.unwrap().contains(&want), "{want}");
        }
        let (costs, doubt) = evaluate(all(3, (7, 8)), Some(all(ENOUGH, (0, 0))));
        // A clock that is too coarse does not make it a machine with one CPU, either.
        assert_eq!(costs, Costs { wake: Ns::new(1), wake_late: Ns::ZERO, ..Costs::TYPICAL });
        assert!(doubt.is_some());
        let (costs, doubt) = evaluate(all(48, (7, 8)), None);
        assert_eq!((costs.wake, costs.nap, doubt), (Ns::ZERO, Ns::new(7), None));
    }

    #[test]
    fn rounds_that_were_cut_off_give_no_costs() {
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap();
        let (costs, doubt) = measure(Duration::ZERO, None).unwrap();
        let usual = if one_cpu(&online) { Costs::ONE_CPU } else { Costs::TYPICAL };
        assert_eq!((costs, doubt.is_some()), (usual, true));
        let cpus = Cpus::of(None).unwrap();
        for us in (20..2000).step_by(20) {
            let sleeps = wakes(Duration::from_micros(us), &cpus).unwrap();
            assert!(
                sleeps.iter().all(|(cost, late)| *cost > Ns::ZERO && *late > Ns::ZERO),
                "{sleeps:?}"
            );
        }
    }

    #[test]
    fn sleeper_runs_on_the_first_workers_cpu() {
        let all = sched_getaffinity(None).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).unwrap();
        let Cpus { sleeper, waker, alone } = Cpus::of(Some(first)).unwrap();
        assert!(sleeper.is_set(first) && sleeper.count() == 1);
        assert_eq!((alone, waker.is_set(first)), (all.count() == 1, all.count() == 1));
        for none in [None, Some(CpuSet::MAX_CPU)] {
            assert_eq!(Cpus::of(none).unwrap().sleeper, all);
        }
        let (costs, _) = measure(LONGEST, Some(first)).unwrap();
        assert!(costs.nap > Ns::ZERO);
        assert_eq!(sched_getaffinity(None).unwrap(), all, "the caller's affinity is unchanged");
    }
}
