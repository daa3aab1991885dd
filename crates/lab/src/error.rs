//! Errors of commands, and of cells.

/// Why the lab did not do what it was asked. The text says what, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A mistake of the command line or of a plan.
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

/// Why a cell could not be measured. The text says what was wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum Fail {
    /// This cell has no result; others may.
    #[error("{0}")]
    Cell(String),
    /// Something is missing on this machine that this cell needs; the text names the package.
    #[error("{0}")]
    Missing(String),
    /// Nothing more can be measured.
    #[error("{0}")]
    Over(String),
}
