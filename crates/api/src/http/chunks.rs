//! Decoding of a chunked body (RFC 9112, 7.1), as its bytes arrive.

use httparse::{Status, parse_chunk_size, parse_headers};

use super::{BODY_MAX, HEAD_MAX, HEADERS_MAX};
use crate::problem::Problem;

/// Longest line with a chunk's size, with its extensions.
const LINE_MAX: usize = 256;

/// Where the next byte belongs.
#[derive(Clone, Copy, Debug)]
enum At {
    /// The line with a chunk's size.
    Size,
    /// A chunk, of which this much is missing.
    Data(usize),
    /// The end of line after a chunk.
    End,
    /// The fields after the last chunk.
    Trailer,
}

/// A chunked body that is being received.
#[derive(Debug)]
pub struct Chunks {
    at: At,
    body: Vec<u8>,
}

fn invalid(what: &str) -> Problem {
    let detail = format!("the chunked body is invalid: {what}");
    Problem::new(400, detail, "encode it as in RFC 9112, section 7.1, or send Content-Length")
        .at("body")
}

impl Chunks {
    pub(super) fn new() -> Self {
        Self { at: At::Size, body: Vec::new() }
    }

    /// Number of bytes of the body so far.
    pub(super) fn kept(&self) -> usize {
        self.body.len()
    }

    /// Takes bytes from the front of `buffer`; returns the body once it is complete.
    ///
    /// # Errors
    /// It is malformed or too long; the connection has to end.
    pub(super) fn take(&mut self, buffer: &mut Vec<u8>) -> Result<Option<Vec<u8>>, Problem> {
        loop {
            match self.at {
                At::Size => match parse_chunk_size(&buffer[..buffer.len().min(LINE_MAX)]) {
                    Ok(Status::Complete((used, size))) => {
                        if size > (BODY_MAX - self.body.len()) as u64 {
                            return Err(super::decoder::too_large(None));
                        }
                        buffer.drain(..used);
                        self.at = if size == 0 { At::Trailer } else { At::Data(size as usize) };
                    }
                    Ok(Status::Partial) if buffer.len() < LINE_MAX => return Ok(None),
                    _ => return Err(invalid("a chunk has no size")),
                },
                At::Data(missing) => {
                    let n = missing.min(buffer.len());
                    self.body.extend(buffer.drain(..n));
                    if n < missing {
                        self.at = At::Data(missing - n);
                        return Ok(None);
                    }
                    self.at = At::End;
                }
                At::End => match buffer.get(..2) {
                    Some(b"\r\n") => {
                        buffer.drain(..2);
                        self.at = At::Size;
                    }
                    Some(_) => return Err(invalid("a chunk is longer than its size")),
                    None => return Ok(None),
                },
                At::Trailer => {
                    let mut fields = [httparse::EMPTY_HEADER; HEADERS_MAX];
                    let trailer = &buffer[..buffer.len().min(HEAD_MAX)];
                    return match parse_headers(trailer, &mut fields) {
                        Ok(Status::Complete((used, _))) => {
                            buffer.drain(..used);
                            Ok(Some(std::mem::take(&mut self.body)))
                        }
                        Ok(Status::Partial) if buffer.len() < HEAD_MAX => Ok(None),
                        _ => Err(invalid("its trailer is malformed or too long")),
                    };
                }
            }
        }
    }
}
