//! CPU time, as the scheduler counts it, in ns.

use std::path::Path;

/// Time that all threads of a process have run; 0 of one that has ended.
///
/// What the kernel does for a process in interrupts that come meanwhile is in it, unless it was
/// built to count that apart.
pub fn cpu_ns(pid: u32) -> u64 {
    threads(pid, 0)
}

/// Time that they have waited for a CPU while they could run.
pub fn waited_ns(pid: u32) -> u64 {
    threads(pid, 1)
}

fn threads(pid: u32, field: usize) -> u64 {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return 0 };
    tasks.flatten().map(|task| schedstat(&task.path().join("schedstat"), field)).sum()
}

/// `ran waited slices`; 0 of a thread that has just ended.
fn schedstat(path: &Path, field: usize) -> u64 {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().nth(field).and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// Time that all CPUs together have not been idle: processes, kernel and interrupts.
pub fn busy_ns() -> u64 {
    const NS_PER_TICK: u64 = 10_000_000; // USER_HZ is 100 on every Linux there is
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = text.lines().next().unwrap_or("");
    let ticks = line.split_whitespace().skip(1).map(|word| word.parse().unwrap_or(0));
    // user nice system idle iowait irq softirq: the fourth and fifth are no work.
    let at_work = |(i, ticks): (usize, u64)| if matches!(i, 3 | 4) { 0 } else { ticks };
    ticks.take(7).enumerate().map(at_work).sum::<u64>() * NS_PER_TICK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_seen_in_both_counts() {
        let pid = std::process::id();
        let (own, all) = (cpu_ns(pid), busy_ns());
        let mut sum = 0_u64;
        // Longer than a tick of the kernel's clock.
        while cpu_ns(pid) < own + 50_000_000 {
            sum = std::hint::black_box(sum.wrapping_mul(31) + 1);
        }
        assert!(busy_ns() > all);
        assert_eq!(cpu_ns(u32::MAX), 0);
    }
}
