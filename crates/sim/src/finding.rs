//! What a run may find wrong.

use std::fmt;

/// What a run found wrong. The seed brings it back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Someone sleeps who has something to do, and nothing is on its way to wake him.
    Asleep(String),
    /// All is quiet, and something is not done.
    Hang(String),
    /// It does not come to rest in time.
    Late(String),
    /// A frame that no guest sent, or not as it was sent, or half of one.
    Corrupt(String),
    /// A frame overtook another of its flow, or arrived twice.
    Reordered(String),
    /// A frame went back to its sender, or to a guest that it is not for.
    Misdelivered(String),
    /// What was sent, delivered and dropped does not add up.
    Lost(String),
    /// A guest that kept the protocol was stopped.
    Blamed(String),
    /// A queue that naps was not looked at when its time had come, or has none.
    Overslept(String),
    /// A guest sleeps, and was not told in time of frames that arrived.
    Uncalled(String),
    /// A queue is served by two workers, or by none.
    Homeless(String),
    /// A queue got more or less than its share of a worker's time.
    Unfair(String),
    /// A worker has too much to do, another nothing, and no queue moves.
    Unbalanced(String),
    /// A receiver that takes nothing for a minute, or does again, was not reported once.
    Starved(String),
    /// Frames were taken from a queue that is drained.
    Drained(String),
    /// A worker finds work again and again, and does none.
    Spins(String),
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Asleep(what) => write!(f, "asleep: {what}"),
            Self::Hang(what) => write!(f, "all is quiet, but {what}"),
            Self::Late(what) => write!(f, "does not come to rest in time: {what}"),
            Self::Corrupt(what) => write!(f, "corrupt: {what}"),
            Self::Reordered(what) => write!(f, "reordered or duplicated: {what}"),
            Self::Misdelivered(what) => write!(f, "misdelivered: {what}"),
            Self::Lost(what) => write!(f, "does not add up: {what}"),
            Self::Blamed(what) => write!(f, "stopped without cause: {what}"),
            Self::Overslept(what) => write!(f, "overslept: {what}"),
            Self::Uncalled(what) => write!(f, "not called in time: {what}"),
            Self::Homeless(what) => write!(f, "not served by one worker: {what}"),
            Self::Unfair(what) => write!(f, "unfair: {what}"),
            Self::Unbalanced(what) => write!(f, "unbalanced: {what}"),
            Self::Starved(what) => write!(f, "starved: {what}"),
            Self::Drained(what) => write!(f, "taken from a drained queue: {what}"),
            Self::Spins(what) => write!(f, "spins: {what}"),
        }
    }
}

impl std::error::Error for Finding {}
