//! The server's side of one connection.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::SystemTime;

use super::decoder::{Decoder, Incoming, Step};
use super::{BODY_MAX, HEAD_MAX, Response};
use crate::problem::Problem;

/// Most bytes that are read before they are parsed.
const READ_MAX: usize = 16_384;
/// Most bytes that are read and ignored after the last reply, so that a client which is still
/// sending reads the reply.
const IGNORED_MAX: usize = 16 << 20;

/// Result of [`Session::receive`].
#[derive(Debug, PartialEq)]
pub enum Received {
    /// A request, to be replied to before the next one is received.
    Request(Incoming),
    /// Input that is no request. The reply, [`Problem`], has been written; the connection ends.
    Invalid(Problem),
    /// Nothing yet.
    Nothing,
    /// The connection has ended.
    Closed,
}

/// A connection of a client. It never blocks, and holds at most one request and one reply.
#[derive(Debug)]
pub struct Session {
    stream: UnixStream,
    decoder: Decoder,
    out: Vec<u8>,
    /// Bytes of `out` that are written.
    sent: usize,
    /// No further request is accepted.
    ends: bool,
    /// Bytes received since then.
    ignored: usize,
    /// Of the request that is being replied to: it was HEAD; the client may send another.
    is_head: bool,
    persists: bool,
    /// Bytes have been received since no request was found.
    is_fresh: bool,
}

impl Session {
    /// Serves a nonblocking connection.
    pub fn new(stream: UnixStream) -> Self {
        let (decoder, out) = (Decoder::default(), Vec::new());
        Self {
            stream,
            decoder,
            out,
            sent: 0,
            ends: false,
            ignored: 0,
            is_head: false,
            persists: true,
            is_fresh: false,
        }
    }

    /// The connection.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Bytes of replies that the client has not read.
    pub fn unread(&self) -> usize {
        self.out.len() - self.sent
    }

    /// Whether it waits for the client: to send the rest of a request, to read, or to close.
    pub fn is_waiting(&self) -> bool {
        self.unread() > 0 || self.ends || self.decoder.is_partial()
    }

    /// Whether no further request is received: the last reply is written.
    pub fn is_ending(&self) -> bool {
        self.ends
    }

    /// Whether a part of a request has been received.
    pub fn is_partial(&self) -> bool {
        !self.ends && self.decoder.is_partial()
    }

    /// Whether a further request may have been received already: call [`receive`](Self::receive),
    /// although the connection may not be readable.
    pub fn has_more(&self) -> bool {
        self.is_fresh && self.is_partial()
    }

    /// Reads and ignores input. Returns whether the client keeps the connection open.
    pub fn is_open(&mut self) -> bool {
        self.ignore() != Received::Closed
    }

    /// Receives a request, unless a reply is unread.
    pub fn receive(&mut self) -> Received {
        if self.unread() > 0 {
            return Received::Nothing;
        }
        if self.ends {
            return self.ignore();
        }
        // The rest of what was read, if the client sends ahead; else what has arrived.
        let mut may_read = true;
        loop {
            match self.decoder.take() {
                Step::Request(incoming) => {
                    self.is_head = incoming.method == "HEAD";
                    self.persists = incoming.persists;
                    return Received::Request(incoming);
                }
                Step::Invalid(problem) => {
                    (self.is_head, self.persists) = (false, false);
                    self.reply(&Response::from(&problem));
                    return Received::Invalid(problem);
                }
                Step::Continue => {
                    self.out.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
                    if !self.flush() {
                        return Received::Closed;
                    }
                    continue;
                }
                Step::Incomplete => {}
            }
            self.is_fresh = false;
            if !may_read {
                return Received::Nothing;
            }
            let mut bytes = [0; READ_MAX];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Received::Closed,
                Ok(n) => {
                    self.decoder.push(&bytes[..n]);
                    self.is_fresh = true;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Received::Nothing,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Received::Closed,
            }
            may_read = false;
        }
    }

    /// Reads what is sent after the last reply.
    fn ignore(&mut self) -> Received {
        let mut bytes = [0; READ_MAX];
        match self.stream.read(&mut bytes) {
            Ok(n @ 1..) => {
                self.ignored += n;
                if self.ignored > IGNORED_MAX { Received::Closed } else { Received::Nothing }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Received::Nothing,
            _ => Received::Closed,
        }
    }

    /// Writes the reply to the last request, as much as the connection accepts. Returns whether it
    /// is usable.
    pub fn reply(&mut self, response: &Response) -> bool {
        self.out = response.bytes(SystemTime::now(), !self.persists, self.is_head);
        self.sent = 0;
        self.ends = if response.streams { self.is_head } else { !self.persists };
        self.flush()
    }

    /// Replaces what is to be written; for streams.
    pub fn write(&mut self, bytes: &[u8]) {
        self.out.drain(..self.sent);
        self.sent = 0;
        self.out.extend_from_slice(bytes);
    }

    /// Ends the connection after this reply.
    pub fn end(&mut self, response: &Response) {
        self.persists = false;
        self.reply(response);
    }

    /// Writes as much as the connection accepts. Returns whether it is usable.
    pub fn flush(&mut self) -> bool {
        while self.sent < self.out.len() {
            match self.stream.write(&self.out[self.sent..]) {
                Ok(0) => return false,
                Ok(n) => self.sent += n,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return error.kind() == ErrorKind::WouldBlock,
            }
        }
        // A long reply's memory is returned.
        (self.out, self.sent) = (Vec::new(), 0);
        if self.ends {
            let _ = self.stream.shutdown(std::net::Shutdown::Write);
        }
        true
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

const _: () = assert!(READ_MAX >= HEAD_MAX && READ_MAX < BODY_MAX);
