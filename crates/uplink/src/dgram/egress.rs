//! Egress to a datagram socket.

use std::io;
use std::sync::Arc;

use rustix::io::Errno;
use shm::Seg;
use switch::direct::Direct;
use switch::frame::Burst;
use switch::port::{Egress, Fault, Steer};
use switch::stats::EgressStats;
use switch::vnet::{Offloads, VnetHdr};

use super::{BATCH, sys};
use crate::stream::{Room, SEGMENTS_BYTES, Socket, append, append_parts};

/// A connected datagram socket as a destination of frames.
///
/// A group of frames is copied to private memory and sent with one system call. Frames that the
/// peer's socket has no room for do not fit now. But segments made of one frame stay together:
/// those without room count as taken, and are sent when there is room.
pub struct DgramEgress {
    link: Option<Link>,
    stats: Arc<EgressStats>,
}

struct Link {
    room: Room,
    outbox: Vec<u8>,
    /// Ends in `outbox` of its frames, the first `sent` of which were sent or dropped.
    ends: Vec<usize>,
    sent: usize,
    is_full: bool,
}

/// The peer has closed its socket. Nothing of the outbox was sent, and it is empty.
struct Gone;

impl From<Arc<EgressStats>> for DgramEgress {
    fn from(stats: Arc<EgressStats>) -> Self {
        Self { link: None, stats }
    }
}

impl DgramEgress {
    /// Sends to the peer of `socket` from now on. `unsent`: segments that another process took, and
    /// had no room for, as [`unsent`](Self::unsent) returned them. Returns the descriptor that
    /// becomes readable when there is room.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn connect(&mut self, socket: Socket, mut unsent: &[u8]) -> io::Result<Socket> {
        let room = Room::new(socket)?;
        let waits_for = room.waits_for();
        let (outbox, ends) = (Vec::new(), Vec::new());
        let mut link = Link { room, outbox, ends, sent: 0, is_full: !unsent.is_empty() };
        while let Some((len, rest)) = unsent.split_first_chunk()
            && let Some((frame, rest)) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)
        {
            link.outbox.extend(frame);
            link.ends.push(link.outbox.len());
            unsent = rest;
        }
        link.request_room();
        self.link = Some(link);
        Ok(waits_for)
    }

    /// Segments that count as taken and had no room, each after its length of four bytes, for
    /// another process.
    pub fn unsent(&self) -> Vec<u8> {
        let Some(link) = &self.link else { return Vec::new() };
        let frames =
            (link.sent..link.ends.len()).map(|i| &link.outbox[link.start(i)..link.ends[i]]);
        let framed = |frame: &[u8]| [&(frame.len() as u32).to_be_bytes(), frame].concat();
        frames.flat_map(framed).collect()
    }

    /// Stops sending.
    pub fn disconnect(&mut self) {
        self.link = None;
    }
}

impl Link {
    /// Where a frame begins in the outbox.
    fn start(&self, frame: usize) -> usize {
        if frame > 0 { self.ends[frame - 1] } else { 0 }
    }

    fn left(&self) -> usize {
        self.ends.len() - self.sent
    }

    fn clear(&mut self) {
        self.outbox.clear();
        self.ends.clear();
        self.sent = 0;
    }

    /// Has segments sent when there is room, even if no frame follows.
    fn request_room(&mut self) {
        if self.left() > 0 {
            self.room.request(true);
        }
    }

    /// Whether frames can be sent now, after what had no room.
    fn is_free(&mut self, stats: &EgressStats) -> bool {
        self.is_full = self.is_full && !self.room.is_there();
        let left = self.left();
        if !self.is_full && left > 0 && self.send(stats).is_err() {
            // The next send has the same error.
            stats.drops_down.add(left as u64);
        }
        !self.is_full
    }

    /// Sends the frames in the outbox. What is left there does not fit now.
    fn send(&mut self, stats: &EgressStats) -> Result<(), Gone> {
        while self.left() > 0 {
            let base = self.start(self.sent);
            let ends: Vec<usize> = self.ends[self.sent..].iter().map(|end| end - base).collect();
            match sys::send(self.room.socket(), &self.outbox[base..], &ends) {
                Ok(n) => {
                    stats.frames.add(n as u64);
                    stats.bytes.add(ends[n - 1] as u64);
                    self.sent += n;
                }
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => {
                    self.is_full = true;
                    stats.full.add(1);
                    return Ok(());
                }
                // Longer than the send buffer.
                Err(Errno::MSGSIZE) => {
                    stats.drops_too_long.add(1);
                    self.sent += 1;
                }
                Err(_) if self.sent == 0 => {
                    self.clear();
                    return Err(Gone);
                }
                // The next send has the same error.
                Err(_) => {
                    stats.drops_down.add(self.left() as u64);
                    break;
                }
            }
        }
        self.clear();
        Ok(())
    }
}

impl Egress for DgramEgress {
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
        if !link.is_free(&self.stats) {
            self.stats.full.add(1);
            return Ok(0);
        }
        let mut done = 0;
        for part in picks.chunks(BATCH) {
            for pick in part {
                append(&mut link.outbox, burst, usize::from(*pick));
                link.ends.push(link.outbox.len());
            }
            match link.send(&self.stats) {
                Ok(()) => done += part.len() - link.left(),
                Err(Gone) if done == 0 => return Err(gone()),
                Err(Gone) => break,
            }
            if link.is_full {
                link.clear();
                break;
            }
        }
        Ok(done)
    }

    fn put_parts(&mut self, head: &[u8], body: &[Seg<'_>], _: &VnetHdr) -> Result<bool, Fault> {
        let Some(link) = &mut self.link else {
            self.stats.drops_down.add(1);
            return Ok(true);
        };
        if link.outbox.len() >= SEGMENTS_BYTES {
            return Ok(false);
        }
        append_parts(&mut link.outbox, head, body);
        link.ends.push(link.outbox.len());
        if link.is_full {
            return Ok(true);
        }
        link.send(&self.stats).map(|()| true).map_err(|Gone| gone())
    }

    fn room(&mut self, _len: u32, limit: usize) -> Result<usize, Fault> {
        let is_free = self.link.as_mut().is_none_or(|link| link.is_free(&self.stats));
        Ok(if is_free { limit } else { 0 })
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        None
    }

    fn steer(&self) -> Option<Arc<dyn Steer>> {
        None
    }

    fn flush(&mut self) {
        if let Some(link) = &mut self.link {
            link.request_room();
        }
    }

    fn notify(&mut self) {}

    fn arm(&mut self) -> bool {
        let Some(link) = &mut self.link else { return false };
        link.room.request(true);
        let is_full = !link.is_free(&self.stats);
        link.room.request(is_full);
        is_full
    }

    fn disarm(&mut self) {
        if let Some(link) = &mut self.link {
            // It has room: what waits for it comes first.
            link.is_free(&self.stats);
            let unsent = link.left() > 0;
            link.room.request(unsent);
        }
    }
}

fn gone() -> Fault {
    Fault("its peer has closed its socket".into())
}
