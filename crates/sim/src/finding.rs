//! Violations that a run may find.

use std::fmt;

/// A violation found by a run. The same seed reproduces it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A worker sleeps or a queue is cold although there is work, and no wake-up is in flight.
    LostWakeup(String),
    /// Everything is idle, and work is left.
    Hang(String),
    /// Work is not completed in time.
    Late(String),
    /// A frame that no guest sent, or that was altered or truncated.
    Corrupt(String),
    /// A frame overtook another one of its flow, or arrived twice.
    Reordered(String),
    /// A frame went back to its sender, or to a guest other than its destination.
    Misdelivered(String),
    /// Frames sent, delivered and dropped do not add up.
    Lost(String),
    /// The port of an honest guest was stopped.
    Blamed(String),
    /// A warm queue was not polled at its time, or its time is too late.
    PollMissed(String),
    /// A sleeping guest was not called in time for received frames.
    CallMissed(String),
    /// A queue is served by two workers, or by none.
    Ownership(String),
    /// A queue got more or less than its share of a worker's time.
    Unfair(String),
    /// One worker is overloaded, another is idle, and no queue moves.
    Unbalanced(String),
    /// A receiver's stall, or its end, was not reported exactly once.
    Stalled(String),
    /// Frames were taken from a drained queue.
    Drained(String),
    /// A worker repeatedly finds work without doing any.
    Spins(String),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LostWakeup(what) => write!(f, "lost wake-up: {what}"),
            Self::Hang(what) => write!(f, "hang: {what}"),
            Self::Late(what) => write!(f, "not completed in time: {what}"),
            Self::Corrupt(what) => write!(f, "corrupt: {what}"),
            Self::Reordered(what) => write!(f, "reordered or duplicated: {what}"),
            Self::Misdelivered(what) => write!(f, "misdelivered: {what}"),
            Self::Lost(what) => write!(f, "counts differ: {what}"),
            Self::Blamed(what) => write!(f, "honest port stopped: {what}"),
            Self::PollMissed(what) => write!(f, "not polled in time: {what}"),
            Self::CallMissed(what) => write!(f, "not called in time: {what}"),
            Self::Ownership(what) => write!(f, "queue without one owner: {what}"),
            Self::Unfair(what) => write!(f, "unfair: {what}"),
            Self::Unbalanced(what) => write!(f, "unbalanced: {what}"),
            Self::Stalled(what) => write!(f, "stalled: {what}"),
            Self::Drained(what) => write!(f, "taken from a drained queue: {what}"),
            Self::Spins(what) => write!(f, "spins: {what}"),
        }
    }
}

impl std::error::Error for Finding {}
