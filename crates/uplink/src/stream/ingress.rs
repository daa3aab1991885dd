//! Ingress from a stream socket.

use std::ops::Range;
use std::sync::Arc;

use os::Received;
use shm::Seg;
use switch::direct::Direct;
use switch::frame::{Burst, FRAME_LEN_MAX};
use switch::port::{Fault, Ingress};
use switch::stats::IngressStats;
use switch::time::Instant;
use switch::vnet::VnetHdr;

use super::{End, Socket};
use crate::framing::{FRAME_MAX, Inbox, LENGTH_LEN};

/// Bytes read and not forwarded: a burst of full-sized frames, and room for the longest one.
const INBOX_BYTES: usize = 192 * 1024;

/// A stream socket as a source of frames.
///
/// Bytes are read in one system call for as many frames as there are, and only when no whole frame
/// is left of the last read. With EPOLLET the program must call [`Ingress::burst`] until
/// [`Ingress::arm`] returns true.
pub struct StreamIngress {
    link: Option<Link>,
    stats: Arc<IngressStats>,
    /// Frames shown in a burst, and the ends of those that are too long. Kept for their allocation.
    shown: Vec<Range<usize>>,
    too_long: Vec<usize>,
}

struct Link {
    socket: Socket,
    inbox: Inbox,
    end: Option<End>,
    /// The last read found nothing: what comes later is notified.
    is_empty: bool,
}

impl From<Arc<IngressStats>> for StreamIngress {
    fn from(stats: Arc<IngressStats>) -> Self {
        Self { link: None, stats, shown: Vec::new(), too_long: Vec::new() }
    }
}

impl StreamIngress {
    /// Reads from `socket`, which is non-blocking, from now on. `unsent`: bytes that another
    /// process read from it and did not forward.
    ///
    /// # Errors
    /// `unsent` is more than a process can have read.
    pub fn connect(&mut self, socket: Socket, unsent: &[u8]) -> Result<(), Fault> {
        let mut inbox = Inbox::new(INBOX_BYTES);
        let Some(room) = inbox.room().get_mut(..unsent.len()) else {
            return Err(Fault("its unread bytes are of another version".into()));
        };
        room.copy_from_slice(unsent);
        inbox.fill(unsent.len());
        self.link = Some(Link { socket, inbox, end: None, is_empty: false });
        Ok(())
    }

    /// Stops reading; returns why the connection ended, if it did by itself.
    pub fn disconnect(&mut self) -> Option<End> {
        self.link.take()?.end
    }

    /// Whether the connection has ended in a way that another process would not notice.
    pub fn has_ended(&self) -> bool {
        let end = self.link.as_ref().and_then(|link| link.end.as_ref());
        matches!(end, Some(End::Descriptors(_) | End::Os(_)))
    }

    /// Bytes that were read and not forwarded, for another process.
    pub fn unsent(&self) -> &[u8] {
        self.link.as_ref().map_or(&[], |link| link.inbox.unsent())
    }
}

impl Link {
    /// Reads what there is. False: nothing, or the connection has ended.
    fn read(&mut self) -> bool {
        let mut fds = Vec::new();
        let room = self.inbox.room();
        if self.end.is_some() || room.is_empty() {
            return false;
        }
        let received = os::recv((*self.socket).as_fd(), room, &mut fds, os::SCM_MAX_FD);
        let end = match received {
            _ if !fds.is_empty() => End::Descriptors(fds),
            Ok(Received::Bytes(len)) => {
                self.inbox.fill(len);
                self.is_empty = false;
                return true;
            }
            Ok(Received::Nothing) => {
                self.is_empty = true;
                return false;
            }
            Ok(Received::Closed) => End::Closed,
            Ok(Received::Truncated) => End::Descriptors(Vec::new()),
            Err(error) => End::Os(error),
        };
        self.end = Some(end);
        false
    }

    /// Whether its first frame has arrived, or its next bytes are none.
    fn has_frame(&self) -> bool {
        !matches!(self.inbox.frame(self.inbox.first()), Ok(None))
    }

    /// Collects up to `max` whole frames, and the ends of those that are too long to forward.
    /// Returns where the last one ends.
    fn collect(
        &mut self,
        max: usize,
        shown: &mut Vec<Range<usize>>,
        too_long: &mut Vec<usize>,
    ) -> usize {
        let mut at = self.inbox.first();
        while shown.len() + too_long.len() < max {
            match self.inbox.frame(at) {
                Ok(Some(frame)) => {
                    at = frame.end;
                    match frame.len() as u32 <= FRAME_LEN_MAX {
                        true => shown.push(frame),
                        false => too_long.push(at),
                    }
                }
                Ok(None) => break,
                Err(bad) => {
                    self.end.get_or_insert(End::BadLength(bad));
                    break;
                }
            }
        }
        at
    }
}

impl Ingress for StreamIngress {
    fn burst(
        &mut self,
        max: usize,
        _now: Instant,
        burst: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        let Self { link: Some(link), stats, shown, too_long } = self else { return Ok(0) };
        if !link.has_frame() {
            link.read();
        }
        shown.clear();
        too_long.clear();
        let mut end = link.collect(max, shown, too_long);
        let count = shown.len() + too_long.len();
        if count == 0 {
            return match &link.end {
                Some(end) => Err(Fault(end.to_string())),
                None => Ok(0),
            };
        }
        let mut left = 0;
        if !shown.is_empty() {
            let mut out = std::mem::take(burst).recycle();
            for (i, frame) in shown.iter().enumerate() {
                let bytes = link.inbox.of(frame);
                out.segs.push(Seg::of(bytes));
                out.push_at(i, 1, bytes.len() as u32, VnetHdr::NONE);
            }
            forward(&mut out);
            left = out.left();
            *burst = out.recycle();
        }
        let done = &shown[..shown.len() - left];
        if left > 0 {
            end = done.last().map_or(link.inbox.first(), |frame| frame.end);
        }
        stats.drops_too_long.add(too_long.iter().filter(|at| **at <= end).count() as u64);
        stats.frames.add(done.len() as u64);
        stats.bytes.add(done.iter().map(|frame| frame.len() as u64).sum());
        stats.bursts.add(1);
        link.inbox.remove_to(end);
        Ok(if left > 0 { max.max(count) } else { count })
    }

    fn supports_direct(&self) -> bool {
        false
    }

    fn read_into(&mut self, _: usize, _: &mut dyn Direct) -> Result<usize, Fault> {
        Ok(0)
    }

    fn arm(&mut self) -> bool {
        match &mut self.link {
            // The notification is of bytes, not of frames: there must be none left.
            Some(link) if !link.has_frame() && link.end.is_none() => {
                (std::mem::take(&mut link.is_empty) || !link.read()) && link.end.is_none()
            }
            Some(_) => false,
            None => true,
        }
    }

    fn due(&self) -> Option<Instant> {
        None
    }

    fn disarm(&mut self) {}
}

const _: () = assert!(INBOX_BYTES >= 2 * (LENGTH_LEN + FRAME_MAX));
