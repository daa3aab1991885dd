//! Clocks, CPU time and timers of threads.

use std::num::NonZeroU64;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Time of the machine's monotonic clock, which all processes share.
#[inline]
pub fn monotonic() -> Duration {
    of(ClockId::Monotonic)
}

/// CPU time of this process, user and system.
pub fn process_cpu_time() -> Duration {
    of(ClockId::ProcessCPUTime)
}

/// CPU time of this thread, user and system.
pub fn thread_cpu_time() -> Duration {
    of(ClockId::ThreadCPUTime)
}

#[inline]
fn of(clock: ClockId) -> Duration {
    let t = clock_gettime(clock);
    Duration::new(t.tv_sec.unsigned_abs(), u32::try_from(t.tv_nsec).unwrap_or(0))
}

/// Asks the kernel not to delay this thread's timers to save wake-ups (PR_SET_TIMERSLACK; 50 us by
/// default).
pub fn precise_timers() {
    // Without it, naps are longer.
    let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_faults_of_a_thread_are_counted() {
        let before = crate::thread_counts().faults;
        let pages = vec![1_u8; 64 << 20];
        let after = crate::thread_counts().faults;
        assert_eq!(pages[pages.len() / 2], 1);
        // Pages may be large.
        assert!(after >= before + 32, "{before} {after}");
    }

    #[test]
    fn waits_of_a_thread_are_counted() {
        let before = crate::thread_counts().waits;
        std::thread::sleep(Duration::from_millis(1));
        assert!(crate::thread_counts().waits > before);
    }

    #[test]
    fn clocks_advance_with_the_work_of_this_thread() {
        let before = [monotonic(), process_cpu_time(), thread_cpu_time()];
        while thread_cpu_time() < before[2] + Duration::from_millis(2) {}
        let after = [monotonic(), process_cpu_time(), thread_cpu_time()];
        let passed = [0, 1, 2].map(|i| after[i] - before[i]);
        assert!(passed.iter().all(|time| *time >= Duration::from_millis(2)), "{passed:?}");
        assert!(passed[1] >= passed[2] - Duration::from_millis(1), "{passed:?}");
    }
}
