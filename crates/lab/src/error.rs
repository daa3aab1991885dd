//! Errors of commands, and of cells.

/// Error of the lab. The text says what, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An invalid command line or plan.
    #[error("{0}")]
    Usage(String),
    /// Anything else.
    #[error("{0}")]
    Failed(String),
}

impl Error {
    pub(crate) fn usage(what: impl Into<String>) -> Self {
        Self::Usage(what.into())
    }

    pub(crate) fn failed(what: impl Into<String>) -> Self {
        Self::Failed(what.into())
    }
}

/// Failure to measure a cell. The text says what was wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Fail {
    /// This cell has no result; others may have.
    #[error("{0}")]
    Cell(String),
    /// This cell needs something that this machine lacks; the text names the package.
    #[error("{0}")]
    Missing(String),
    /// No further cell can be measured.
    #[error("{0}")]
    Over(String),
}
