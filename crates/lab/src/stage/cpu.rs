//! CPU time as counted by the scheduler, in ns.

use std::path::Path;

/// CPU time of all threads of a process, in ns; 0 if it has ended.
///
/// It includes interrupts that were handled while a thread ran, unless the kernel was built with
/// `CONFIG_IRQ_TIME_ACCOUNTING`.
pub fn cpu_ns(pid: u32) -> u64 {
    sum_schedstat(pid, 0)
}

/// Time that all threads of a process were runnable and waited for a CPU, in ns.
pub fn waited_ns(pid: u32) -> u64 {
    sum_schedstat(pid, 1)
}

/// Sum of a field of `schedstat` over all threads.
fn sum_schedstat(pid: u32, field: usize) -> u64 {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return 0 };
    tasks.flatten().map(|task| schedstat(&task.path().join("schedstat"), field)).sum()
}

/// Reads `ran waited slices`; 0 if the thread has ended meanwhile.
fn schedstat(path: &Path, field: usize) -> u64 {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().nth(field).and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// What the kernel counts of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// Times it gave up its CPU.
    pub voluntary: u64,
    /// Times the kernel took its CPU away.
    pub involuntary: u64,
    /// Times it got a CPU.
    pub slices: u64,
}

impl std::ops::Sub for Switches {
    type Output = Self;

    fn sub(self, before: Self) -> Self {
        Self {
            voluntary: self.voluntary.saturating_sub(before.voluntary),
            involuntary: self.involuntary.saturating_sub(before.involuntary),
            slices: self.slices.saturating_sub(before.slices),
        }
    }
}

/// Context switches of a thread of a process, from its start; none if it has ended.
pub fn switches(pid: u32, tid: u32) -> Switches {
    let schedstat_of = format!("/proc/{pid}/task/{tid}/schedstat");
    Switches {
        voluntary: status(pid, tid, "voluntary_ctxt_switches"),
        involuntary: status(pid, tid, "nonvoluntary_ctxt_switches"),
        slices: schedstat(Path::new(&schedstat_of), 2),
    }
}

/// Whether another process traces a thread of a process.
pub fn is_traced(pid: u32, tid: u32) -> bool {
    status(pid, tid, "TracerPid") != 0
}

/// A number in a thread's `status`; 0 if it has ended.
fn status(pid: u32, tid: u32, name: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/status"));
    let text = text.unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

/// Sum of the busy time of all CPUs (processes, kernel and interrupts), in ns.
pub fn busy_ns() -> u64 {
    const NS_PER_TICK: u64 = 10_000_000; // USER_HZ of x86 and Arm
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = text.lines().next().unwrap_or("");
    let ticks = line.split_whitespace().skip(1).map(|word| word.parse().unwrap_or(0));
    // user nice system idle iowait irq softirq
    let busy = |(i, ticks): (usize, u64)| if matches!(i, 3 | 4) { 0 } else { ticks };
    ticks.take(7).enumerate().map(busy).sum::<u64>() * NS_PER_TICK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_sleeps_gives_up_its_cpu_each_time() {
        let tid = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
        let pid = std::process::id();
        let before = switches(pid, tid);
        for _ in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let counted = switches(pid, tid) - before;
        assert!(counted.voluntary >= 20 && counted.slices >= 20, "{counted:?}");
        assert_eq!(switches(u32::MAX, 1), Switches::default());
        // One that computes has its CPU taken away, as there are others, or at least no sleep.
        let before = switches(pid, tid);
        let end = cpu_ns(pid) + 20_000_000;
        while cpu_ns(pid) < end {
            std::hint::black_box(());
        }
        let counted = switches(pid, tid) - before;
        assert!(counted.voluntary < 20, "{counted:?}");
        assert!(counted.slices <= counted.voluntary + counted.involuntary + 1, "{counted:?}");
    }

    #[test]
    fn work_increases_both_counters() {
        let pid = std::process::id();
        let (own, all) = (cpu_ns(pid), busy_ns());
        let mut sum = 0_u64;
        // Longer than a tick.
        while cpu_ns(pid) < own + 50_000_000 {
            sum = std::hint::black_box(sum.wrapping_mul(31) + 1);
        }
        assert!(busy_ns() > all);
        assert_eq!(cpu_ns(u32::MAX), 0);
    }
}
