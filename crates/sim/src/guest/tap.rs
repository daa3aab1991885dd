//! The host behind a TAP: a pair of datagram sockets stands for each of its queues.
//!
//! ```text
//!   the host's socket ── frames with header ──▶ the switch's, read and written by the port
//!            ◀── EAGAIN to whom the other lets wait: send buffers have a bound ──▶
//! ```
//! A datagram socket gives one frame for each read, in order, and refuses what does not fit, as a
//! TAP does. Both ends are used by one thread, one call after the other, so that the world alone
//! decides when. A frame that arrives is an edge on the descriptor, each time; nobody can mute it.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

use ring::virtq::Armed;
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{RecvFlags, recv};
use switch::vnet::DATA_VALID;
use uplink::VNET_LEN;

use super::{App, Broken, Driver, Kick, PAIRS_MAX, ROOM, Ring};
use crate::random::Random;

/// What the switch learns of a TAP.
pub(crate) struct Link {
    /// Its queues' descriptors.
    pub queues: Vec<Arc<OwnedFd>>,
}

/// The host's end of all queues.
pub(crate) struct Tap {
    queues: Vec<UnixDatagram>,
}

/// A TAP of some queues, the bounds of which are anything.
pub(crate) fn new(random: &mut Random) -> (Tap, Link) {
    let queue = |random: &mut Random| {
        let (host, switch) = UnixDatagram::pair().expect("a pair of sockets");
        for end in [&host, &switch] {
            end.set_nonblocking(true).expect("a socket");
            // From four frames on.
            let bytes = 4096 << random.within(0..6);
            set_socket_send_buffer_size(end, bytes).expect("a socket");
        }
        (host, Arc::new(OwnedFd::from(switch)))
    };
    let pairs = (0..random.within(1..PAIRS_MAX + 1)).map(|_| queue(random));
    let (host, queues) = pairs.unzip();
    (Tap { queues: host }, Link { queues })
}

/// Whether there is anything to read.
pub(crate) fn is_readable(fd: &OwnedFd) -> bool {
    recv(fd, &mut [0_u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT).is_ok()
}

/// Whether a header asks for nothing. A guest's claim that a checksum is valid is passed on; the
/// kernel takes no notice of it.
fn is_plain(hdr: &[u8]) -> bool {
    hdr[0] & !DATA_VALID == 0 && hdr[1..10] == [0; 9]
}

impl Driver for Tap {
    fn kick_needed(&mut self, _: usize, ring: Ring) -> bool {
        // Nor does anyone learn that it made room.
        ring == Ring::Tx
    }

    fn arm(&mut self, q: usize, ring: Ring) -> Armed {
        // It is called for whatever is read or written.
        let pending = ring == Ring::Rx && self.has_received(q);
        if pending { Armed::WorkPending } else { Armed::Armed }
    }

    fn disarm(&mut self, _: usize) {}

    fn collect_tx(&mut self, _: usize) -> Result<(u64, bool), Broken> {
        Ok((0, false))
    }

    fn collect_rx(
        &mut self,
        q: usize,
        budget: usize,
        inbox: &mut Vec<Vec<u8>>,
    ) -> Result<bool, Broken> {
        let mut buffer = [0; VNET_LEN + ROOM as usize + 1];
        for i in 0..budget {
            match self.queues[q].recv(&mut buffer) {
                Ok(n) if n > VNET_LEN && n < buffer.len() && is_plain(&buffer) => {
                    inbox.push(buffer[VNET_LEN..n].to_vec());
                }
                Ok(n) => {
                    let hdr = &buffer[..n.min(VNET_LEN)];
                    return Err(Broken::Frame(format!("{n} bytes with header {hdr:?}")));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(i > 0),
                Err(_) => return Err(Broken::Ring(Ring::Rx)),
            }
        }
        Ok(budget > 0)
    }

    fn refill(&mut self, _: usize) -> bool {
        false
    }

    fn send(&mut self, q: usize, frame: &[u8], _: &mut Random) -> bool {
        let bytes = [&[0; VNET_LEN][..], frame].concat();
        self.queues[q].send(&bytes).is_ok()
    }

    fn publish(&mut self, _: usize) {}

    fn has_received(&self, q: usize) -> bool {
        recv(&self.queues[q], &mut [0_u8; 1][..], RecvFlags::PEEK).is_ok()
    }

    fn unfinished(&self, q: usize, note: &mut dyn FnMut(String)) {
        if self.has_received(q) {
            note("received frames not read".into());
        }
    }

    fn has_room(&self, q: usize, _: u64) -> bool {
        !self.has_received(q)
    }

    fn misbehave(&mut self, _: &mut [App], _: &mut Random, _: &mut Vec<Kick>) {
        unreachable!("the host is trusted");
    }
}
