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
use crate::stream::{Room, Socket, append, append_parts};

/// A connected datagram socket as a destination of frames.
///
/// A group of frames is copied to private memory and sent with one system call. Frames that the
/// peer's socket has no room for do not fit now.
pub struct DgramEgress {
    link: Option<Link>,
    stats: Arc<EgressStats>,
}

struct Link {
    room: Room,
    outbox: Vec<u8>,
    ends: Vec<usize>,
    is_full: bool,
}

/// Result of a send.
enum Sent {
    /// So many were handled; the others do not fit now.
    Frames(usize),
    /// The peer has closed its socket.
    Gone,
}

impl From<Arc<EgressStats>> for DgramEgress {
    fn from(stats: Arc<EgressStats>) -> Self {
        Self { link: None, stats }
    }
}

impl DgramEgress {
    /// Sends to the peer of `socket` from now on. Returns the descriptor that becomes readable when
    /// there is room.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn connect(&mut self, socket: Socket) -> io::Result<Socket> {
        let room = Room::new(socket)?;
        let waits_for = room.waits_for();
        self.link = Some(Link { room, outbox: Vec::new(), ends: Vec::new(), is_full: false });
        Ok(waits_for)
    }

    /// Stops sending.
    pub fn disconnect(&mut self) {
        self.link = None;
    }
}

impl Link {
    fn is_free(&mut self) -> bool {
        self.is_full = self.is_full && !self.room.is_there();
        !self.is_full
    }

    /// Sends the frames in the outbox, which is empty then.
    fn send(&mut self, stats: &EgressStats) -> Sent {
        let mut done = 0;
        let result = loop {
            if done == self.ends.len() {
                break Sent::Frames(done);
            }
            let base = if done > 0 { self.ends[done - 1] } else { 0 };
            let ends: Vec<usize> = self.ends[done..].iter().map(|end| end - base).collect();
            match sys::send(self.room.socket(), &self.outbox[base..], &ends) {
                Ok(n) => {
                    stats.frames.add(n as u64);
                    stats.bytes.add(ends[n - 1] as u64);
                    done += n;
                }
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => {
                    self.is_full = true;
                    stats.full.add(1);
                    break Sent::Frames(done);
                }
                // Longer than the send buffer.
                Err(Errno::MSGSIZE) => {
                    stats.drops_too_long.add(1);
                    done += 1;
                }
                Err(_) if done == 0 => break Sent::Gone,
                // The next send has the same error.
                Err(_) => {
                    stats.drops_down.add((self.ends.len() - done) as u64);
                    break Sent::Frames(self.ends.len());
                }
            }
        };
        self.outbox.clear();
        self.ends.clear();
        result
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
        if !link.is_free() {
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
                Sent::Frames(n) => done += n,
                Sent::Gone if done == 0 => return Err(gone()),
                Sent::Gone => break,
            }
            if link.is_full {
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
        if !link.is_free() {
            return Ok(false);
        }
        append_parts(&mut link.outbox, head, body);
        link.ends.push(link.outbox.len());
        match link.send(&self.stats) {
            Sent::Frames(n) => Ok(n > 0),
            Sent::Gone => Err(gone()),
        }
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

    fn flush(&mut self) {}

    fn notify(&mut self) {}

    fn arm(&mut self) -> bool {
        let Some(link) = &mut self.link else { return false };
        link.room.request(true);
        let is_full = !link.is_free();
        link.room.request(is_full);
        is_full
    }

    fn disarm(&mut self) {
        if let Some(link) = &mut self.link {
            link.room.request(false);
        }
    }
}

fn gone() -> Fault {
    Fault("its peer has closed its socket".into())
}
