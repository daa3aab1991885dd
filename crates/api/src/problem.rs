//! An error of the interface as a document: what is wrong, where, and what to do (RFC 9457,
//! `application/problem+json`).

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Media type.
pub const MEDIA_TYPE: &str = "application/problem+json";

/// Longest value that is repeated in an error, in bytes.
const VALUE_MAX: usize = 200;

/// Reason why a request was refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// HTTP status.
    pub status: u16,
    /// The status in words.
    pub title: String,
    /// One text with error, place and remedy, as `ctl` prints it.
    pub detail: String,
    /// Place: `path.name`, `query.vlan`, `header.content-length`, `body.weight`, or `body`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field: Option<String>,
    /// The value there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<Box<Value>>,
    /// Remedy: what to do.
    pub remedy: String,
    /// Errors of a configuration file: file, line, column, what.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problems: Option<Box<Value>>,
}

impl Problem {
    /// An error without a place.
    pub fn new(status: u16, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        let (detail, remedy) = (detail.into(), remedy.into());
        let title = reason(status).into();
        Self { status, title, detail, field: None, value: None, remedy, problems: None }
    }

    /// Adds where it is.
    #[must_use]
    pub fn at(mut self, field: impl Into<String>) -> Self {
        self.field = Some(field.into());
        self
    }

    /// Adds the value there, unless it is long.
    #[must_use]
    pub fn of(mut self, value: impl Into<Value>) -> Self {
        let value = value.into();
        self.value = (value.to_string().len() <= VALUE_MAX).then(|| value.into());
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.detail)
    }
}

impl std::error::Error for Problem {}

/// Statuses that are used, and their words (RFC 9110, 15).
pub const STATUSES: [(u16, &str); 19] = [
    (100, "Continue"),
    (200, "OK"),
    (201, "Created"),
    (204, "No Content"),
    (400, "Bad Request"),
    (403, "Forbidden"),
    (404, "Not Found"),
    (405, "Method Not Allowed"),
    (408, "Request Timeout"),
    (409, "Conflict"),
    (413, "Content Too Large"),
    (414, "URI Too Long"),
    (415, "Unsupported Media Type"),
    (417, "Expectation Failed"),
    (422, "Unprocessable Content"),
    (431, "Request Header Fields Too Large"),
    (500, "Internal Server Error"),
    (503, "Service Unavailable"),
    (505, "HTTP Version Not Supported"),
];

/// A status in words.
pub fn reason(status: u16) -> &'static str {
    let known = STATUSES.iter().find(|(known, _)| *known == status);
    known.map_or("Unknown", |(_, reason)| reason)
}
