//! The host behind a TAP: a pair of datagram sockets simulates each queue.
//!
//! ```text
//!   the host's socket ◀── frames with header ──▶ the switch's, read and written by the port
//!             ◀── EAGAIN for the sender when a send buffer is full ──▶
//! ```
//! Like a TAP, a datagram socket returns one frame per read, in order, and rejects those that do
//! not fit. One thread uses both ends, so that all timing is up to the simulation. Each frame that
//! arrives is an edge on the descriptor, which cannot be suppressed.

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

/// The switch's view of a TAP.
pub(crate) struct Link {
    /// Descriptors of its queues.
    pub queues: Vec<Arc<OwnedFd>>,
}

/// The host's end of all queues.
pub(crate) struct Tap {
    queues: Vec<UnixDatagram>,
}

/// Creates a TAP with a random number of queues and random limits of them.
pub(crate) fn new(random: &mut Random) -> (Tap, Link) {
    let queue = |random: &mut Random| {
        let (host, switch) = UnixDatagram::pair().expect("a pair of sockets");
        for end in [&host, &switch] {
            end.set_nonblocking(true).expect("a socket");
            // Room for at least four frames.
            let bytes = 4096 << random.within(0..6);
            set_socket_send_buffer_size(end, bytes).expect("a socket");
        }
        (host, Arc::new(OwnedFd::from(switch)))
    };
    let pairs = (0..random.within(1..PAIRS_MAX + 1)).map(|_| queue(random));
    let (host, queues) = pairs.unzip();
    (Tap { queues: host }, Link { queues })
}

/// Whether there is a frame to read.
pub(crate) fn is_readable(fd: &OwnedFd) -> bool {
    recv(fd, &mut [0_u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT).is_ok()
}

/// Whether a header requests no offload. A Xen guest's `DATA_VALID` is passed on; the kernel
/// ignores it.
fn is_plain(hdr: &[u8]) -> bool {
    hdr[0] & !DATA_VALID == 0 && hdr[1..10] == [0; 9]
}

impl Driver for Tap {
    fn kick_needed(&mut self, _: usize, ring: Ring) -> bool {
        // A TAP does not notify of room.
        ring == Ring::Tx
    }

    fn arm(&mut self, q: usize, ring: Ring) -> Armed {
        // It is called for each read and write.
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

    fn unfinished(&self, q: usize, note: &mut dyn FnMut(bool, String)) {
        note(self.has_received(q), "received frames not read".into());
    }

    fn has_room(&self, q: usize, _: u64) -> bool {
        !self.has_received(q)
    }

    fn misbehave(&mut self, _: &mut [App], _: &mut Random, _: &mut Vec<Kick>) {
        unreachable!("the host is trusted");
    }
}
