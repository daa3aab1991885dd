//! HTTP/1.1 on the control socket: parsing and formatting, without a thread or a clock.
//!
//! ```text
//!   bytes ─▶ Decoder ─▶ Incoming ─▶ routes ─▶ Request ─▶ the program
//!                                                           │
//!   bytes ◀── Session ◀── Response ◀────── routes ◀─────────┘
//! ```
//! [`Session`] is the server's side of one connection, [`Client`] the other side. All lengths are
//! bounded, and no call blocks.

mod chunks;
mod client;
mod decoder;
mod session;
#[cfg(test)]
mod tests;

use std::time::SystemTime;

pub use self::client::{Client, Stream};
pub use self::decoder::{Decoder, Incoming, Step};
pub use self::session::{Received, Session};
use crate::problem::{self, Problem, reason};

/// Longest head of a request, in bytes.
pub const HEAD_MAX: usize = 8192;
/// Most header fields of a request.
pub const HEADERS_MAX: usize = 32;
/// Longest body of a request, in bytes.
pub const BODY_MAX: usize = 65_536;

/// Media type of requests and replies.
pub const JSON: &str = "application/json";
/// Media type of a stream of events (HTML, 9.2).
pub const EVENTS: &str = "text/event-stream";
/// Media type of a capture.
pub const PCAPNG: &str = "application/x-pcapng";

/// A reply.
#[derive(Clone, Debug, PartialEq)]
pub struct Response {
    /// Its status.
    pub status: u16,
    /// Media type of the body; empty: there is none.
    pub media_type: &'static str,
    /// Further header fields.
    pub headers: Vec<(&'static str, String)>,
    /// Its content.
    pub body: Vec<u8>,
    /// The body follows and ends with the connection.
    pub streams: bool,
}

impl Response {
    /// A document.
    pub fn json(status: u16, body: &serde_json::Value) -> Self {
        let mut text = body.to_string();
        text.push('\n');
        Self { body: text.into_bytes(), ..Self::of(status, JSON) }
    }

    /// A reply without a body.
    pub fn empty(status: u16) -> Self {
        Self::of(status, "")
    }

    /// A reply whose body the caller writes until it closes the connection.
    pub fn stream(media_type: &'static str) -> Self {
        Self { streams: true, ..Self::of(200, media_type) }
    }

    fn of(status: u16, media_type: &'static str) -> Self {
        Self { status, media_type, headers: Vec::new(), body: Vec::new(), streams: false }
    }

    /// Returns the bytes to send at `now`; `closes`: the connection ends with it; `head`: the
    /// body is omitted (HEAD).
    pub fn bytes(&self, now: SystemTime, closes: bool, head: bool) -> Vec<u8> {
        let mut text = format!(
            "HTTP/1.1 {} {}\r\nDate: {}\r\nServer: pvswitch/{}\r\nCache-Control: no-store\r\n",
            self.status,
            reason(self.status),
            httpdate::fmt_http_date(now),
            env!("CARGO_PKG_VERSION"),
        );
        if !self.media_type.is_empty() {
            text += &format!("Content-Type: {}\r\n", self.media_type);
        }
        // RFC 9110, 8.6: no Content-Length with 204.
        if !self.streams && self.status != 204 {
            text += &format!("Content-Length: {}\r\n", self.body.len());
        }
        if closes || self.streams {
            text += "Connection: close\r\n";
        }
        for (name, value) in &self.headers {
            text += &format!("{name}: {value}\r\n");
        }
        text += "\r\n";
        let mut bytes = text.into_bytes();
        if !head {
            bytes.extend_from_slice(&self.body);
        }
        bytes
    }
}

impl From<&Problem> for Response {
    fn from(problem: &Problem) -> Self {
        let body = serde_json::to_value(problem).unwrap_or_default();
        Self { media_type: problem::MEDIA_TYPE, ..Self::json(problem.status, &body) }
    }
}
