//! Requests from the bytes of a connection.

use httparse::{Error, Header, Status};

use super::chunks::Chunks;
use super::{BODY_MAX, HEAD_MAX, HEADERS_MAX};
use crate::problem::Problem;

/// A request as received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incoming {
    /// `GET`, or any other token.
    pub method: String,
    /// Path and query, as sent.
    pub target: String,
    /// Media type of the body, if given.
    pub media_type: Option<String>,
    /// Its body.
    pub body: Vec<u8>,
    /// Whether the client may send another request.
    pub persists: bool,
}

/// State of a connection's input.
#[derive(Debug, PartialEq)]
pub enum Step {
    /// More bytes are needed.
    Incomplete,
    /// More bytes are needed, and the client waits for `100 Continue`.
    Continue,
    /// A request.
    Request(Incoming),
    /// No request; the connection has to end after the reply.
    Invalid(Problem),
}

/// How a body ends.
#[derive(Debug)]
enum Body {
    Length(usize),
    Chunked(Chunks),
}

/// Splits bytes into requests. It holds at most one request, and what was last received.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// A request whose body is being received.
    pending: Option<(Incoming, Body)>,
    /// Nothing more is parsed.
    failed: bool,
}

pub(super) fn too_large(length: Option<u64>) -> Problem {
    let what = length.map_or_else(String::new, |length| format!(" of {length} bytes"));
    let detail = format!("a body{what} is too large: at most {BODY_MAX} bytes are accepted");
    Problem::new(413, detail, format!("send at most {BODY_MAX} bytes")).at("body")
}

/// An error in the head.
fn malformed(what: &str) -> Problem {
    let remedy = "send HTTP/1.1, as curl --unix-socket and pvswitch ctl do";
    Problem::new(400, format!("not an HTTP/1.1 request: {what}"), remedy)
}

fn too_long(status: u16, what: &str) -> Problem {
    let remedy = "send a shorter target, and fewer and shorter fields";
    Problem::new(status, format!("{what} is longer than {HEAD_MAX} bytes"), remedy).at("header")
}

fn header(name: &str, what: String, remedy: &str) -> Problem {
    Problem::new(400, what, remedy).at(format!("header.{name}"))
}

impl Decoder {
    /// Appends received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        if !self.failed {
            self.buffer.extend_from_slice(bytes);
        }
    }

    /// Whether a request has begun and is not complete.
    pub fn is_partial(&self) -> bool {
        !self.failed && (self.pending.is_some() || !self.buffer.is_empty())
    }

    /// Whether the head of a request has been received, and its body is not complete.
    pub fn has_head(&self) -> bool {
        self.pending.is_some()
    }

    /// Number of received bytes that it keeps.
    pub fn kept(&self) -> usize {
        let body = match &self.pending {
            Some((_, Body::Chunked(chunks))) => chunks.kept(),
            _ => 0,
        };
        self.buffer.len() + body
    }

    /// Takes the next request.
    pub fn take(&mut self) -> Step {
        if self.failed {
            return Step::Incomplete;
        }
        let step = self.step();
        match step {
            Ok(step) => step,
            Err(problem) => {
                self.failed = true;
                (self.buffer, self.pending) = (Vec::new(), None);
                Step::Invalid(problem)
            }
        }
    }

    fn step(&mut self) -> Result<Step, Problem> {
        let mut waits = false;
        if self.pending.is_none() {
            // RFC 9112, 2.2: empty lines before a request are ignored.
            let empty = self.buffer.iter().take_while(|byte| b"\r\n".contains(byte)).count();
            self.buffer.drain(..empty);
            match self.head()? {
                Some(continues) => waits = continues,
                None => return Ok(Step::Incomplete),
            }
        }
        let buffer = &mut self.buffer;
        let complete = match &mut self.pending {
            Some((_, Body::Length(length))) if buffer.len() >= *length => {
                Some(buffer.drain(..*length).collect())
            }
            Some((_, Body::Chunked(chunks))) => chunks.take(buffer)?,
            _ => None,
        };
        Ok(match (complete, waits) {
            (Some(body), _) => {
                let pending = self.pending.take();
                pending.map_or(Step::Incomplete, |(incoming, _)| {
                    Step::Request(Incoming { body, ..incoming })
                })
            }
            (None, true) => Step::Continue,
            (None, false) => Step::Incomplete,
        })
    }

    /// Parses the head of a request. Returns whether its client waits for `100 Continue`.
    fn head(&mut self) -> Result<Option<bool>, Problem> {
        // The same problem is found if more of the head has arrived, or less.
        let buffer = &self.buffer[..self.buffer.len().min(HEAD_MAX)];
        let mut fields = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut head = httparse::Request::new(&mut fields);
        let used = match head.parse(buffer) {
            Ok(Status::Complete(used)) => used,
            Ok(Status::Partial) if buffer.len() < HEAD_MAX => return Ok(None),
            Ok(Status::Partial) if !buffer.contains(&b'\n') => {
                return Err(too_long(414, "the request line"));
            }
            Ok(Status::Partial) => return Err(too_long(431, "the header section")),
            Err(Error::TooManyHeaders) => {
                let what = format!("more than {HEADERS_MAX} header fields");
                return Err(Problem::new(431, what, "send fewer fields").at("header"));
            }
            Err(Error::Version) if version(buffer).starts_with(b"HTTP/2") => {
                let what = "HTTP/2 and later versions are not supported";
                return Err(Problem::new(505, what, "use HTTP/1.1"));
            }
            Err(error) => return Err(malformed(&error.to_string())),
        };
        let method = head.method.unwrap_or_default().to_string();
        let target = head.path.unwrap_or_default().to_string();
        let is_1_1 = head.version == Some(1);
        let fields = &*head.headers;
        let body = body_of(fields)?;
        let hosts = all(fields, "host").count();
        if hosts > 1 || is_1_1 && hosts == 0 {
            // RFC 9112, 3.2
            let what = format!("{hosts} Host fields: HTTP/1.1 requires exactly one");
            return Err(header("host", what, "send `Host: localhost`"));
        }
        let has = |name, word: &str| {
            let mut words = all(fields, name).flat_map(|value| value.split(','));
            words.any(|given| given.trim().eq_ignore_ascii_case(word))
        };
        let expects =
            all(fields, "expect").any(|value| !value.eq_ignore_ascii_case("100-continue"));
        if expects {
            let what = "only `Expect: 100-continue` is supported";
            return Err(Problem::new(417, what, "omit the field").at("header.expect"));
        }
        let waits = is_1_1 && has("expect", "100-continue");
        let persists = if is_1_1 { !has("connection", "close") } else { false };
        let media_type = all(fields, "content-type").next().map(Into::into);
        let incoming = Incoming { method, target, media_type, body: Vec::new(), persists };
        self.pending = Some((incoming, body));
        self.buffer.drain(..used);
        Ok(Some(waits))
    }
}

/// The last word of the first line.
fn version(buffer: &[u8]) -> &[u8] {
    let line = buffer.split(|byte| *byte == b'\n').next().unwrap_or_default();
    line.split(|byte| *byte == b' ').nth(2).unwrap_or_default()
}

/// Values of the fields of this name.
fn all<'a>(fields: &'a [Header<'_>], name: &'a str) -> impl Iterator<Item = &'a str> {
    let named = fields.iter().filter(move |field| field.name.eq_ignore_ascii_case(name));
    named.map(|field| std::str::from_utf8(field.value).unwrap_or_default().trim())
}

/// How the body ends (RFC 9112, 6.3): the rules that keep one request from being read as two.
fn body_of(fields: &[Header<'_>]) -> Result<Body, Problem> {
    let codings: Vec<_> = all(fields, "transfer-encoding").collect();
    let lengths: Vec<_> = all(fields, "content-length").collect();
    match (&codings[..], &lengths[..]) {
        ([], []) => Ok(Body::Length(0)),
        ([], [text]) => {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            let length = text.parse::<u64>().ok().filter(|_| digits);
            let Some(length) = length else {
                let what = format!("Content-Length '{}' is not a number", text.escape_debug());
                let remedy = "send the number of bytes of the body";
                return Err(header("content-length", what, remedy).of(*text));
            };
            match usize::try_from(length).ok().filter(|length| *length <= BODY_MAX) {
                Some(length) => Ok(Body::Length(length)),
                None => Err(too_large(Some(length))),
            }
        }
        ([coding], []) if coding.eq_ignore_ascii_case("chunked") => {
            Ok(Body::Chunked(Chunks::new()))
        }
        ([..], []) => {
            let what = format!("Transfer-Encoding '{}' is not supported", codings.join(", "));
            Err(header("transfer-encoding", what, "use chunked, or Content-Length"))
        }
        _ => {
            let what = "ambiguous body length: Content-Length twice, or with \
                        Transfer-Encoding";
            Err(header("content-length", what.into(), "send one Content-Length"))
        }
    }
}
