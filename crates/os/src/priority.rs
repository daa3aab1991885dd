//! How the kernel schedules a thread beside those of other processes.

use std::io;

use crate::sys::set_round_robin;

/// Scheduling priority of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// That of the thread which started it.
    #[default]
    Normal,
    /// Niceness -20: the kernel's scheduler prefers it to all others of ordinary processes.
    High,
    /// SCHED_RR with priority 1: it preempts all threads of ordinary processes.
    Realtime,
}

impl Priority {
    /// All, in the order of their priority.
    pub const ALL: [Self; 3] = [Self::Normal, Self::High, Self::Realtime];

    /// Its word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::High => "high",
            Self::Realtime => "realtime",
        }
    }

    /// The priority of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|priority| priority.name() == name)
    }

    /// [`Priority::High`] if the process may give it to its threads and was not started with a
    /// niceness of its own, otherwise [`Priority::Normal`].
    pub fn high_if_permitted() -> Self {
        let has_own = rustix::process::getpriority_process(None).is_ok_and(|nice| nice != 0);
        // On a thread of its own, whose end takes the priority with it.
        let is_permitted = || set_thread_priority(Self::High).is_ok();
        if !has_own && std::thread::spawn(is_permitted).join().unwrap_or(false) {
            Self::High
        } else {
            Self::Normal
        }
    }
}

/// Sets the priority of the calling thread. Processes and threads that it starts inherit
/// [`Priority::High`], and not [`Priority::Realtime`].
///
/// # Errors
/// EPERM, EACCES: without CAP_SYS_NICE, RLIMIT_NICE must be 40 for [`Priority::High`], and
/// RLIMIT_RTPRIO 1 or more for [`Priority::Realtime`].
pub fn set_thread_priority(priority: Priority) -> io::Result<()> {
    match priority {
        Priority::Normal => Ok(()),
        // Of the thread, as Linux has it, not of the process.
        Priority::High => Ok(rustix::process::setpriority_process(None, -20)?),
        Priority::Realtime => set_round_robin(1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_unique() {
        for priority in Priority::ALL {
            assert_eq!(Priority::named(priority.name()), Some(priority));
        }
        assert_eq!(Priority::named("low"), None);
    }

    #[test]
    fn high_priority_is_tried_on_another_thread_and_a_niceness_of_its_own_is_kept() {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let before = nice();
        let given = Priority::high_if_permitted();
        assert_eq!(nice(), before);
        std::thread::spawn(move || {
            let may = set_thread_priority(given);
            assert!(may.is_ok(), "{given:?}: {may:?}");
            rustix::process::setpriority_process(None, 7).unwrap();
            assert_eq!(Priority::high_if_permitted(), Priority::Normal);
        })
        .join()
        .unwrap();
    }
}
