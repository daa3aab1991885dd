//! How the kernel schedules a thread beside those of other processes.

use std::io;

use crate::sys::set_round_robin;

/// Scheduling priority of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// That of the thread which started it.
    #[default]
    Normal,
    /// SCHED_RR with priority 1: it preempts all threads of ordinary processes.
    Realtime,
}

impl Priority {
    /// All, in the order of their priority.
    pub const ALL: [Self; 2] = [Self::Normal, Self::Realtime];

    /// Its word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::Realtime => "realtime",
        }
    }

    /// The priority of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|priority| priority.name() == name)
    }
}

/// Sets the priority of the calling thread; processes and threads that it starts do not inherit
/// [`Priority::Realtime`].
///
/// # Errors
/// EPERM: without CAP_SYS_NICE, RLIMIT_RTPRIO must be 1 or more.
pub fn set_thread_priority(priority: Priority) -> io::Result<()> {
    match priority {
        Priority::Normal => Ok(()),
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
}
