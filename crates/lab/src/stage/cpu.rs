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
