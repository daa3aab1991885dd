//! Policies and their text form on the command line.

use std::fmt;
use std::str::FromStr;

use crate::frame::BURST_MAX;

/// Highest frequency of `timer`, in Hz: beyond it the timer costs more than the polls it saves.
pub const TIMER_HZ_MAX: u32 = 20_000;
/// Latency target of `adaptive`, in us.
pub const DEFAULT_LATENCY_US: u32 = 50;
/// Longest delay of `coalesce`, and longest latency target, in us: a second.
const USECS_MAX: u32 = 1_000_000;

/// When a queue is polled (poll policy), or its peer notified (call policy).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Always armed; notifies at once.
    Event,
    /// A notification starts polling, at most `budget` frames a round; a round with fewer ends it.
    Napi {
        /// Frames per round, 1 to 64.
        budget: u16,
    },
    /// Smart poll: polls at a fixed rate from the first traffic on, until idle for
    /// [`TIMER_IDLE`](super::TIMER_IDLE).
    Timer {
        /// Polls per second, 1 to [`TIMER_HZ_MAX`].
        hz: u32,
    },
    /// Waits at most `usecs` after the first frame, or until `frames` are pending.
    Coalesce {
        /// Delay in us; 0: none.
        usecs: u32,
        /// Number of frames that end the delay, at least 1.
        frames: u16,
    },
    /// Delay that shrinks with the pending frames: `usecs` divided by their number.
    CoalescePending {
        /// Delay of one frame, in us; 0: none.
        usecs: u32,
    },
    /// Polls constantly.
    Spin,
    /// Hot, warm or cold by measured cost ([`Adaptive`](super::Adaptive)).
    Adaptive {
        /// Latency that may be traded for CPU, in us; 0: none.
        latency_us: u32,
    },
}

impl Policy {
    /// Default policy.
    pub const ADAPTIVE: Self = Self::Adaptive { latency_us: DEFAULT_LATENCY_US };
}

impl Default for Policy {
    fn default() -> Self {
        Self::ADAPTIVE
    }
}

/// Text forms of policies, for error messages and help.
pub const POLICIES: [&str; 7] = [
    "event",
    "napi[:BUDGET]",
    "timer[:HZ]",
    "coalesce:USECS,FRAMES",
    "coalesce:USECS/pending",
    "spin",
    "adaptive[:LATENCY_US]",
];

fn number(name: &str, s: &str, min: u32, max: u32) -> Result<u32, String> {
    let n = s.parse().ok().filter(|n| (min..=max).contains(n));
    n.ok_or_else(|| format!("{name} '{s}': use {min} to {max}"))
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let (name, arg) = s.split_once(':').map_or((s, None), |(n, a)| (n, Some(a)));
        let unknown = || format!("unknown policy '{s}': use one of {}", POLICIES.join(", "));
        match (name, arg) {
            ("event", None) => Ok(Self::Event),
            ("spin", None) => Ok(Self::Spin),
            ("napi", None) => Ok(Self::Napi { budget: BURST_MAX as u16 }),
            ("napi", Some(n)) => {
                let budget = number("napi budget", n, 1, BURST_MAX as u32)? as u16;
                Ok(Self::Napi { budget })
            }
            ("timer", None) => Ok(Self::Timer { hz: 1000 }),
            ("timer", Some(n)) => {
                Ok(Self::Timer { hz: number("timer frequency", n, 1, TIMER_HZ_MAX)? })
            }
            ("coalesce", Some(arg)) => {
                if let Some(usecs) = arg.strip_suffix("/pending") {
                    let usecs = number("coalesce delay", usecs, 0, USECS_MAX)?;
                    return Ok(Self::CoalescePending { usecs });
                }
                let (usecs, frames) = arg.split_once(',').ok_or_else(unknown)?;
                let usecs = number("coalesce delay", usecs, 0, USECS_MAX)?;
                let frames = number("coalesce frames", frames, 1, u32::from(u16::MAX))? as u16;
                Ok(Self::Coalesce { usecs, frames })
            }
            ("adaptive", None) => Ok(Self::default()),
            ("adaptive", Some(n)) => {
                Ok(Self::Adaptive { latency_us: number("adaptive latency", n, 0, USECS_MAX)? })
            }
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Event => f.write_str("event"),
            Self::Napi { budget } => write!(f, "napi:{budget}"),
            Self::Timer { hz } => write!(f, "timer:{hz}"),
            Self::Coalesce { usecs, frames } => write!(f, "coalesce:{usecs},{frames}"),
            Self::CoalescePending { usecs } => write!(f, "coalesce:{usecs}/pending"),
            Self::Spin => f.write_str("spin"),
            Self::ADAPTIVE => f.write_str("adaptive"),
            Self::Adaptive { latency_us } => write!(f, "adaptive:{latency_us}"),
        }
    }
}

impl Policy {
    /// Encodes it as one word, so that it can be changed while a worker reads it.
    pub fn to_bits(self) -> u64 {
        let (kind, a, b) = match self {
            Self::Event => (0, 0, 0),
            Self::Napi { budget } => (1, 0, budget),
            Self::Timer { hz } => (2, hz, 0),
            Self::Coalesce { usecs, frames } => (3, usecs, frames),
            Self::CoalescePending { usecs } => (4, usecs, 0),
            Self::Spin => (5, 0, 0),
            Self::Adaptive { latency_us } => (6, latency_us, 0),
        };
        u64::from(a) | u64::from(b) << 32 | kind << 48
    }

    /// Decodes the word of [`to_bits`](Self::to_bits).
    pub fn from_bits(bits: u64) -> Self {
        let (a, b) = (bits as u32, (bits >> 32) as u16);
        match bits >> 48 {
            0 => Self::Event,
            1 => Self::Napi { budget: b },
            2 => Self::Timer { hz: a },
            3 => Self::Coalesce { usecs: a, frames: b },
            4 => Self::CoalescePending { usecs: a },
            5 => Self::Spin,
            _ => Self::Adaptive { latency_us: a },
        }
    }
}
