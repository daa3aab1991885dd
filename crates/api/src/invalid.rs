//! An invalid setting or option.

/// An invalid member of an object, or option of a port.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Invalid {
    /// Its key; `None`: the object as a whole.
    pub key: Option<String>,
    /// Description of the error, and what to write.
    pub what: String,
}

impl Invalid {
    /// An invalid member.
    pub fn new(key: &str, what: impl Into<String>) -> Self {
        Self { key: Some(key.into()), what: what.into() }
    }

    /// An invalid object.
    pub fn whole(what: impl Into<String>) -> Self {
        Self { key: None, what: what.into() }
    }
}
