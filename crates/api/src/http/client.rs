//! The client's side of a connection.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use httparse::Status;

use super::JSON;

/// Longest head of a reply, in bytes.
const REPLY_HEAD_MAX: usize = 16_384;
/// Longest body of a reply, in bytes.
const REPLY_MAX: usize = 256 << 20;
/// Longest wait for a part of a reply, if nothing else is set.
const REPLY_TIMEOUT: Duration = Duration::from_secs(15);

/// Bytes after the head of a reply, until the connection ends.
pub type Stream = BufReader<UnixStream>;

/// A connection to a server; it is kept for further requests.
#[derive(Debug)]
pub struct Client(BufReader<UnixStream>);

/// Head of a reply.
struct Head {
    status: u16,
    length: Option<usize>,
}

fn invalid(what: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what.into())
}

impl Client {
    /// Uses a connection; waits at most 15 s for a part of a reply, or as is set later.
    ///
    /// # Errors
    /// The time-out cannot be set.
    pub fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        stream.set_write_timeout(Some(REPLY_TIMEOUT))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// The connection.
    pub fn stream(&self) -> &UnixStream {
        self.0.get_ref()
    }

    /// Sends a request and receives the status and body of its reply.
    ///
    /// # Errors
    /// The connection failed, or the reply is not HTTP.
    pub fn call(
        &mut self,
        method: &str,
        target: &str,
        body: Option<&serde_json::Value>,
    ) -> io::Result<(u16, Vec<u8>)> {
        self.send(method, target, body)?;
        let head = self.head()?;
        let body = self.body(&head)?;
        Ok((head.status, body))
    }

    /// Sends a request whose reply is a stream; returns it, or else status and body of the reply.
    ///
    /// # Errors
    /// As [`call`](Self::call).
    pub fn open(
        mut self,
        method: &str,
        target: &str,
    ) -> io::Result<Result<Stream, (u16, Vec<u8>)>> {
        self.send(method, target, None)?;
        let head = self.head()?;
        if head.status == 200 {
            return Ok(Ok(self.0));
        }
        let body = self.body(&head)?;
        Ok(Err((head.status, body)))
    }

    fn send(
        &mut self,
        method: &str,
        target: &str,
        body: Option<&serde_json::Value>,
    ) -> io::Result<()> {
        let mut text = format!("{method} {target} HTTP/1.1\r\nHost: localhost\r\n");
        let body = body.map(serde_json::Value::to_string);
        if let Some(body) = &body {
            text += &format!("Content-Type: {JSON}\r\nContent-Length: {}\r\n", body.len());
        }
        text += "\r\n";
        text += body.as_deref().unwrap_or_default();
        self.0.get_mut().write_all(text.as_bytes())
    }

    fn head(&mut self) -> io::Result<Head> {
        loop {
            let head = self.one_head()?;
            // Interim replies are skipped.
            if head.status >= 200 {
                return Ok(head);
            }
        }
    }

    fn one_head(&mut self) -> io::Result<Head> {
        let mut bytes = Vec::new();
        while !bytes.ends_with(b"\r\n\r\n") {
            let line = (&mut self.0).take((REPLY_HEAD_MAX - bytes.len()) as u64);
            let n = { line }.read_until(b'\n', &mut bytes)?;
            if n == 0 || bytes.len() == REPLY_HEAD_MAX {
                let what = match bytes.is_empty() {
                    true => "the connection was closed",
                    false => {
                        "the reply is not HTTP: is it a socket of another program, or of a \
                              version before this one?"
                    }
                };
                return Err(invalid(what));
            }
        }
        let mut fields = [httparse::EMPTY_HEADER; 32];
        let mut head = httparse::Response::new(&mut fields);
        let parsed = head.parse(&bytes).map_err(|error| invalid(format!("reply: {error}")))?;
        let (Status::Complete(_), Some(status)) = (parsed, head.code) else {
            return Err(invalid("the reply's header section is incomplete"));
        };
        let length = head.headers.iter().find(|f| f.name.eq_ignore_ascii_case("content-length"));
        let length = length.map(|field| {
            let text = std::str::from_utf8(field.value).unwrap_or_default();
            text.trim().parse::<usize>().ok().filter(|length| *length <= REPLY_MAX)
        });
        let length = match length {
            Some(None) => return Err(invalid("the reply's Content-Length is invalid")),
            Some(Some(length)) => Some(length),
            None => None,
        };
        Ok(Head { status, length })
    }

    fn body(&mut self, head: &Head) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        match head.length {
            _ if head.status == 204 => {}
            Some(length) => {
                (&mut self.0).take(length as u64).read_to_end(&mut body)?;
                if body.len() < length {
                    return Err(ErrorKind::UnexpectedEof.into());
                }
            }
            None => drop((&mut self.0).take(REPLY_MAX as u64).read_to_end(&mut body)?),
        }
        Ok(body)
    }
}
