//! Connection of a back-end: the protocol on its socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use switch::account::Charge;
use switch::account::defaults::MESSAGE_TIME;
use switch::time::{Instant, Ns};

use crate::backend::{Backend, BackendState, Descriptors, Exported, ImportError, export_fd};
use crate::device::Device;
use crate::error::{ConnectionError, ProtocolError};
use crate::foreign::{self, ForeignFd};
use crate::message::{FDS_MAX, HEADER_LEN, Header, Message, PAYLOAD_MAX};
use os::Received;

/// Messages handled in one call of [`Connection::on_readable`]: a front-end that floods its socket
/// does not monopolise the thread that serves all.
const BURST_MESSAGES: usize = 32;
/// Refusals kept for counters and log: those of one turn.
const REFUSALS_MAX: usize = BURST_MESSAGES;

/// One front-end's connection. Register it (it is [`AsFd`]) level-triggered, and call
/// [`on_readable`](Self::on_readable) when it is readable.
pub struct Connection {
    stream: Socket,
    backend: Backend,
    assembly: Assembly,
    refusals: Vec<ProtocolError>,
}

/// The connection's socket. Closing it also closes descriptors queued in it.
struct Socket {
    fd: ForeignFd,
    /// Another process uses it.
    lent: bool,
}

impl Drop for Socket {
    fn drop(&mut self) {
        if !self.lent {
            // The close may be delayed; the shutdown is visible to the front-end now.
            os::shutdown(self.fd.as_fd());
        }
    }
}

/// State of a connection handed to another process. Descriptors are indices into the list that
/// goes with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionState {
    /// State of the protocol.
    pub backend: BackendState,
    socket: u32,
    received: Vec<u8>,
    received_fds: Vec<u32>,
}

/// Time of the next read from a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// When it is readable.
    Ready,
    /// Its front-end exceeds its message rate: not before this time. Or pages are left to be
    /// marked ([`Backend::is_marking`]): at this time, readable or not.
    Rest(Instant),
}

/// Delay of reads while unpaid descriptors wait to be closed.
const UNPAID_REST: Ns = Ns::from_ms(10);

/// A message being received. Never reads beyond its end, so that descriptors belong to the message
/// they came with.
#[derive(Default)]
struct Assembly {
    head: [u8; HEADER_LEN],
    payload: Vec<u8>,
    /// Bytes of header and payload received.
    got: usize,
    fds: Vec<ForeignFd>,
}

impl Assembly {
    /// Buffer for the next bytes; empty when the message is complete.
    fn room(&mut self) -> &mut [u8] {
        match self.got.checked_sub(HEADER_LEN) {
            None => &mut self.head[self.got..],
            Some(got) => &mut self.payload[got..],
        }
    }

    /// Counts received bytes; checks the header when it is complete. Returns whether the message is
    /// complete.
    fn advance(&mut self, bytes: usize) -> Result<bool, ProtocolError> {
        self.got += bytes;
        if self.got == HEADER_LEN {
            let header = Header::parse(&self.head);
            let Header { request, flags, size } = header;
            if !header.version_ok() {
                return Err(ProtocolError::Version { flags });
            }
            if header.is_reply() {
                return Err(ProtocolError::UnexpectedReply { request });
            }
            let len = usize::try_from(size).ok().filter(|len| *len <= PAYLOAD_MAX);
            let len = len.ok_or(ProtocolError::TooLong { request, size })?;
            self.payload = vec![0; len];
        }
        Ok(self.got >= HEADER_LEN && self.room().is_empty())
    }

    fn take(&mut self) -> (Message, Vec<ForeignFd>) {
        let whole = std::mem::take(self);
        let header = Header::parse(&whole.head);
        let message =
            Message { request: header.request, flags: header.flags, payload: whole.payload };
        (message, whole.fds)
    }
}

impl Connection {
    /// Creates a connection on a stream just accepted or connected, and charges its descriptor.
    pub fn new(stream: UnixStream, backend: Backend) -> Self {
        let charge = backend.account().descriptors.charge(1).ok();
        Self::charged(stream, charge, backend)
    }

    /// Creates a connection on a stream that was charged before it was accepted.
    pub fn charged(stream: UnixStream, charge: Option<Charge>, backend: Backend) -> Self {
        let stream = Socket {
            fd: ForeignFd::charged(stream.into(), charge, backend.account()),
            lent: false,
        };
        Self { stream, backend, assembly: Assembly::default(), refusals: Vec::new() }
    }

    /// Returns the state, with a message of which a part was received; descriptors are added to
    /// `fds`. No message may be handled from here until another process has taken over or failed.
    pub fn export<'a>(&'a self, fds: &mut Exported<'a>) -> ConnectionState {
        let Assembly { head, payload, got, fds: with } = &self.assembly;
        let received = head.iter().chain(payload).take(*got).copied().collect();
        ConnectionState {
            backend: self.backend.export(fds),
            socket: export_fd(fds, self.stream.fd.as_fd()),
            received,
            received_fds: with.iter().map(|fd| export_fd(fds, fd.as_fd())).collect(),
        }
    }

    /// Whether a part of a message was received.
    pub fn is_within_message(&self) -> bool {
        self.assembly.got > 0
    }

    /// Creates a connection that another process serves; `backend` is made from the state's. Until
    /// [`own`](Self::own), its end leaves the front-end connected to the other process.
    ///
    /// # Errors
    /// [`ImportError`].
    pub fn import(
        backend: Backend,
        state: &ConnectionState,
        fds: &mut Descriptors,
    ) -> Result<Self, ImportError> {
        let account = Arc::clone(backend.account());
        let stream = Socket { fd: fds.foreign(state.socket, &account)?, lent: true };
        let mut assembly = Assembly::default();
        for byte in &state.received {
            let room = assembly.room();
            let first = room.first_mut().ok_or(ProtocolError::Truncated { got: 0 })?;
            *first = *byte;
            assembly.advance(1)?;
        }
        for at in &state.received_fds {
            assembly.fds.push(fds.foreign(*at, &account)?);
        }
        Ok(Self { stream, backend, assembly, refusals: Vec::new() })
    }

    /// Makes the connection this process's own: the other one has ended.
    pub fn own(&mut self) {
        self.stream.lent = false;
    }

    /// The protocol's state, to resume it.
    pub fn backend_mut(&mut self) -> &mut Backend {
        &mut self.backend
    }

    /// The protocol's state.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Returns the refusals since the last call that did not close the connection; complete if
    /// called after each turn.
    pub fn take_refusals(&mut self) -> Vec<ProtocolError> {
        std::mem::take(&mut self.refusals)
    }

    /// Closes the socket, stops and resets the device, and returns it for the next connection.
    pub fn close(self) -> Box<dyn Device> {
        self.backend.close()
    }

    /// Reads and handles available messages, without waiting, and without a rate limit.
    ///
    /// # Errors
    /// [`ConnectionError`] when the connection has ended; call [`close`](Self::close) then.
    pub fn on_readable(&mut self) -> Result<(), ConnectionError> {
        self.read(None).map(|_| ())
    }

    /// Reads and handles available messages at `now`, any monotonic time. Messages are charged
    /// to the account before they are read; beyond the rate, nothing is read.
    ///
    /// # Errors
    /// As [`on_readable`](Self::on_readable).
    pub fn on_readable_at(&mut self, now: Instant) -> Result<Turn, ConnectionError> {
        self.read(Some(now))
    }

    fn read(&mut self, now: Option<Instant>) -> Result<Turn, ConnectionError> {
        for _ in 0..BURST_MESSAGES {
            if let Some(now) = now {
                // Room is kept for the descriptors of one message.
                if foreign::unpaid() > 0 {
                    return Ok(Turn::Rest(now + UNPAID_REST));
                }
                // A read that finds nothing is charged like one that does.
                let messages = &self.backend.account().messages;
                if !messages.spend(now) {
                    return Ok(Turn::Rest(messages.next(now)));
                }
            }
            if self.backend.is_marking() {
                let began = std::time::Instant::now();
                let more = self.backend.mark_more();
                self.charge(began, now);
                match now.filter(|_| more) {
                    // Others are served before the next step.
                    Some(now) => return Ok(Turn::Rest(self.backend.account().messages.next(now))),
                    None => continue,
                }
            }
            if !self.read_message()? {
                return Ok(Turn::Ready);
            }
            let (message, fds) = self.assembly.take();
            let began = std::time::Instant::now();
            let outcome = self.backend.handle(&message, fds)?;
            self.charge(began, now);
            if let Some(error) = outcome.refused
                && self.refusals.len() < REFUSALS_MAX
            {
                self.refusals.push(error);
            }
            if let Some(reply) = outcome.reply
                && !self.reply(&reply)?
            {
                return Err(ConnectionError::NotReading);
            }
        }
        Ok(Turn::Ready)
    }

    /// Charges the time of a long message, or of a step, to the account.
    fn charge(&self, began: std::time::Instant, now: Option<Instant>) {
        if let Some(now) = now {
            let messages = Ns::from(began.elapsed()).times(MESSAGE_TIME);
            self.backend.account().messages.charge(messages, now);
        }
    }

    /// Reads up to the end of one message; returns whether it is complete.
    fn read_message(&mut self) -> Result<bool, ConnectionError> {
        loop {
            let mut fds = Vec::new();
            let got = os::recv(self.stream.fd.as_fd(), self.assembly.room(), &mut fds, FDS_MAX);
            // Before anything else: descriptors over the limit are also closed on the port's lane.
            let account = self.backend.account();
            let fds: Vec<_> = fds.into_iter().map(|fd| ForeignFd::new(fd, account)).collect();
            let mut over = None;
            for fd in fds {
                match fd {
                    Ok(fd) => self.assembly.fds.push(fd),
                    Err(error) => over = Some(error),
                }
            }
            if let Some(over) = over {
                return Err(ConnectionError::OverLimit(over));
            }
            match got? {
                Received::Nothing => return Ok(false),
                Received::Truncated => return Err(ProtocolError::TooManyFds.into()),
                Received::Closed if self.assembly.got == 0 => return Err(ConnectionError::Closed),
                Received::Closed => {
                    return Err(ProtocolError::Truncated { got: self.assembly.got }.into());
                }
                Received::Bytes(bytes) => {
                    if self.assembly.fds.len() > FDS_MAX {
                        return Err(ProtocolError::TooManyFds.into());
                    }
                    if self.assembly.advance(bytes)? {
                        return Ok(true);
                    }
                }
            }
        }
    }

    /// Sends a reply; `false` if the socket is full.
    fn reply(&self, reply: &Message) -> Result<bool, ConnectionError> {
        match os::send(self.stream.fd.as_fd(), &reply.to_bytes(), &[]) {
            Ok(sent) => Ok(sent),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(ConnectionError::Closed),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.fd.as_fd()
    }
}

#[cfg(test)]
mod tests;
