//! How the kernel schedules a thread beside those of other processes.

use std::io;

use crate::sys::set_round_robin;

/// Lowest nice value.
const NICE_MIN: i32 = -20;

/// Scheduling priority of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// That of the thread which started it.
    #[default]
    Normal,
    /// Nice -20: it gets nearly all of a CPU that others compete for.
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

    /// What permits it, for a process without CAP_SYS_NICE.
    pub const fn permitted_by(self) -> &'static str {
        match self {
            Self::Normal => "nothing",
            Self::High => "RLIMIT_NICE 40 (systemd: LimitNICE=-20; shell: ulimit -e 40)",
            Self::Realtime => {
                "RLIMIT_RTPRIO 1 (systemd: LimitRTPRIO=1, RestrictRealtime=no; shell: ulimit -r 1)"
            }
        }
    }
}

/// Sets the priority of the calling thread; processes and threads that it starts do not inherit
/// [`Priority::Realtime`].
///
/// # Errors
/// EPERM, EACCES: see [`Priority::permitted_by`].
pub fn set_thread_priority(priority: Priority) -> io::Result<()> {
    match priority {
        Priority::Normal => Ok(()),
        // Of this thread alone: setpriority(2), "C library/kernel differences".
        Priority::High => Ok(rustix::process::setpriority_process(None, NICE_MIN)?),
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
    fn priority_is_of_the_calling_thread_alone() {
        let nice = || rustix::process::getpriority_process(None).unwrap();
        let before = nice();
        let raised = std::thread::spawn(move || {
            set_thread_priority(Priority::High).map(|()| nice()).map_err(|error| error.kind())
        });
        match raised.join().unwrap() {
            Ok(nice) => assert_eq!(nice, NICE_MIN),
            // Without the right.
            Err(kind) => assert_eq!(kind, io::ErrorKind::PermissionDenied),
        }
        assert_eq!(nice(), before);
        set_thread_priority(Priority::Normal).unwrap();
        assert_eq!(nice(), before);
    }
}
