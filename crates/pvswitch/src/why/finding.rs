//! One reason why frames do not arrive.

use serde_json::{Value, json};

/// Importance of a finding; the most important comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// No frame arrives.
    Blocked,
    /// Frames are lost now.
    Losing,
    /// Some frames are refused, or go elsewhere.
    Limited,
    /// Frames were lost earlier, and none between the samples.
    Lost,
    /// Worth knowing.
    Note,
}

impl Rank {
    fn name(self) -> &'static str {
        match self {
            Self::Blocked => "blocked",
            Self::Losing => "losing",
            Self::Limited => "limited",
            Self::Lost => "lost",
            Self::Note => "note",
        }
    }
}

/// One reason, and what to do about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Finding {
    /// Importance.
    pub rank: Rank,
    /// Name for scripts: that of a counter, or a word.
    pub cause: String,
    /// Number of frames, of a cause that counts some.
    pub frames: Option<u64>,
    /// Frames per second between the samples.
    pub per_second: f64,
    /// Description of the finding.
    pub what: String,
    /// Remedy: what to do.
    pub remedy: String,
}

impl Finding {
    /// One that counts no frames.
    pub fn new(
        rank: Rank,
        cause: &str,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let (what, remedy) = (what.into(), remedy.into());
        Self { rank, cause: cause.into(), frames: None, per_second: 0.0, what, remedy }
    }

    /// For scripts.
    pub fn json(&self) -> Value {
        json!({
            "rank": self.rank.name(),
            "cause": self.cause,
            "frames": self.frames,
            "frames_per_second": self.per_second,
            "what": self.what,
            "remedy": self.remedy,
        })
    }
}
