//! Egress to a stream socket.

use std::io;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::SendFlags;
use shm::Seg;
use switch::direct::Direct;
use switch::frame::Burst;
use switch::port::{Egress, Fault, Steer};
use switch::stats::EgressStats;
use switch::vnet::{Offloads, VnetHdr};

use super::{Room, Socket};
use crate::framing::FRAME_MAX;

/// Bytes of frames sent with one system call, without the last frame.
const SEND_BYTES: usize = 128 * 1024;
/// Bytes of segments that may wait for [`Egress::flush`], or for room: those of a GSO frame, with
/// their headers.
pub(crate) const SEGMENTS_BYTES: usize = 256 * 1024;

/// A stream socket as a destination of frames.
///
/// A group of frames is copied to private memory and sent with one system call: a sender that
/// truncates its memory cannot damage the stream. A frame of which the socket took a part counts as
/// delivered, and its rest is sent when there is room; those after it do not fit now.
pub struct StreamEgress {
    link: Option<Link>,
    stats: Arc<EgressStats>,
}

struct Link {
    room: Room,
    /// Bytes to send, after `sent` bytes that were sent.
    outbox: Vec<u8>,
    sent: usize,
    /// The last send found no room.
    is_full: bool,
    /// The peer reads no more: what is sent is dropped.
    is_broken: bool,
    /// Ends in `outbox` of the frames of a group. Kept for their allocation.
    ends: Vec<usize>,
}

impl From<Arc<EgressStats>> for StreamEgress {
    fn from(stats: Arc<EgressStats>) -> Self {
        Self { link: None, stats }
    }
}

impl StreamEgress {
    /// Sends to `socket`, which is non-blocking, from now on. `unsent`: the end of what another
    /// process sent, which had no room. Returns the descriptor that becomes readable when there is
    /// room.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn connect(&mut self, socket: Socket, unsent: &[u8]) -> io::Result<Socket> {
        let room = Room::new(socket)?;
        let waits_for = room.waits_for();
        let mut link = Link {
            room,
            outbox: unsent.to_vec(),
            sent: 0,
            is_full: !unsent.is_empty(),
            is_broken: false,
            ends: Vec::new(),
        };
        link.request_room();
        self.link = Some(link);
        Ok(waits_for)
    }

    /// Stops sending.
    pub fn disconnect(&mut self) {
        self.link = None;
    }

    /// Bytes of frames that count as delivered and had no room, for another process.
    pub fn unsent(&self) -> &[u8] {
        self.link.as_ref().map_or(&[], |link| &link.outbox[link.sent..])
    }
}

impl Link {
    fn has_unsent(&self) -> bool {
        self.sent < self.outbox.len()
    }

    /// Sends what there is room for. True: all was sent.
    fn send(&mut self) -> bool {
        while self.has_unsent() && !self.is_broken {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(self.room.socket(), &self.outbox[self.sent..], flags) {
                Ok(len) => self.sent += len,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => {
                    self.is_full = true;
                    return false;
                }
                // The ingress queue reports the end, after all that the peer sent before it.
                Err(_) => self.is_broken = true,
            }
        }
        self.outbox.clear();
        (self.sent, self.is_full) = (0, false);
        true
    }

    /// Has the rest of a frame sent when there is room, even if no frame follows.
    fn request_room(&mut self) {
        if self.has_unsent() {
            self.room.request(true);
        }
    }

    /// Whether frames can be sent now, after what has no room yet.
    fn is_free(&mut self) -> bool {
        if self.is_full && self.room.is_there() {
            self.is_full = false;
        }
        !self.is_full && (!self.has_unsent() || self.send())
    }

    fn add_length(&mut self, len: u32) {
        self.outbox.extend(len.to_be_bytes());
    }

    /// Adds frames `picks` up to [`SEND_BYTES`], and sends them. Returns the number added, and of
    /// those that were sent, at least in part.
    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> (usize, usize) {
        let base = self.outbox.len();
        self.ends.clear();
        for pick in picks {
            self.add_length(burst.frames[usize::from(*pick)].len);
            append(&mut self.outbox, burst, usize::from(*pick));
            self.ends.push(self.outbox.len());
            if self.outbox.len() - base >= SEND_BYTES {
                break;
            }
        }
        let added = self.ends.len();
        if self.send() {
            return (added, added);
        }
        let starts = std::iter::once(base).chain(self.ends.iter().copied()).take(added);
        let begun = starts.take_while(|start| *start < self.sent).count();
        // Those that were not begun do not fit now.
        self.outbox.truncate(begun.checked_sub(1).map_or(base, |last| self.ends[last]));
        (added, begun)
    }
}

impl Egress for StreamEgress {
    fn offloads(&self) -> Offloads {
        Offloads::default()
    }

    fn accepts_granted(&self) -> bool {
        false
    }

    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        self.stats.groups.add(1);
        let Some(link) = &mut self.link else {
            self.stats.drops_down.add(picks.len() as u64);
            return Ok(picks.len());
        };
        if !link.is_free() {
            self.stats.full.add(1);
            return Ok(0);
        }
        let mut done = 0;
        while done < picks.len() {
            let (added, sent) = link.put(burst, &picks[done..]);
            let len = |pick: &u16| u64::from(burst.frames[usize::from(*pick)].len);
            let bytes = picks[done..][..sent].iter().map(len).sum();
            count(&self.stats, link.is_broken, sent as u64, bytes);
            done += sent;
            if sent < added {
                self.stats.full.add(1);
                break;
            }
        }
        link.request_room();
        Ok(done)
    }

    fn put_parts(&mut self, head: &[u8], body: &[Seg<'_>], _: &VnetHdr) -> Result<bool, Fault> {
        let Some(link) = &mut self.link else {
            self.stats.drops_down.add(1);
            return Ok(true);
        };
        if link.outbox.len() >= SEGMENTS_BYTES && !link.send() {
            self.stats.full.add(1);
            return Ok(false);
        }
        let len = head.len() as u32 + body.iter().map(|seg| seg.len()).sum::<u32>();
        link.add_length(len);
        append_parts(&mut link.outbox, head, body);
        count(&self.stats, link.is_broken, 1, u64::from(len));
        Ok(true)
    }

    fn room(&mut self, _len: u32, limit: usize) -> Result<usize, Fault> {
        Ok(if self.link.as_mut().is_none_or(Link::is_free) { limit } else { 0 })
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        None
    }

    fn steer(&self) -> Option<Arc<dyn Steer>> {
        None
    }

    fn flush(&mut self) {
        if let Some(link) = &mut self.link {
            // Segments that `put_parts` added.
            if link.has_unsent() && !link.is_full {
                link.send();
            }
            link.request_room();
        }
    }

    fn notify(&mut self) {}

    fn arm(&mut self) -> bool {
        let Some(link) = &mut self.link else { return false };
        link.room.request(true);
        if link.is_full && !link.room.is_there() {
            return true;
        }
        link.room.request(link.has_unsent());
        false
    }

    fn disarm(&mut self) {
        if let Some(link) = &mut self.link {
            // It has room: the rest of a frame comes first.
            link.is_free();
            let unsent = link.has_unsent();
            link.room.request(unsent);
        }
    }
}

/// Appends a frame of a burst: its head as it was parsed, and the rest as it is now.
pub(crate) fn append(outbox: &mut Vec<u8>, burst: &Burst<'_>, pick: usize) {
    let frame = &burst.frames[pick];
    let begins = outbox.len();
    outbox.extend(burst.head(pick));
    let mut at = outbox.len();
    outbox.resize(begins + frame.len as usize, 0);
    let mut skip = (at - begins) as u32;
    for seg in burst.segs(frame) {
        let rest = seg.skip(skip);
        skip -= skip.min(seg.len());
        at += rest.read(&mut outbox[at..]);
    }
}

/// Appends a frame in parts.
pub(crate) fn append_parts(outbox: &mut Vec<u8>, head: &[u8], body: &[Seg<'_>]) {
    outbox.extend(head);
    for seg in body {
        let at = outbox.len();
        outbox.resize(at + seg.len() as usize, 0);
        seg.read(&mut outbox[at..]);
    }
}

/// Counts frames that were sent, or dropped because the peer reads no more.
fn count(stats: &EgressStats, is_broken: bool, frames: u64, bytes: u64) {
    if is_broken {
        stats.drops_down.add(frames);
    } else {
        stats.frames.add(frames);
        stats.bytes.add(bytes);
    }
}

/// Frames of the switch are shorter than the framing permits.
const _: () = assert!((switch::frame::FRAME_LEN_MAX as usize) < FRAME_MAX);
