//! Tests with a datagram socket in place of the TAP: it also returns one frame per read, in order.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

use switch::frame::Burst;
use switch::port::Ingress;
use switch::stats::IngressStats;
use switch::time::Instant;
use switch::vnet::{Offloads, VnetHdr};

use super::*;
use crate::ingress::tests::TSO;
use crate::{Batching, TapFd};

/// A receiver with chains of `chain` bytes, all adjacent.
struct Receiver {
    memory: Vec<u8>,
    chain: usize,
    /// Number of used chains, and of all chains.
    next: usize,
    chains: usize,
    takes: Offloads,
    /// Maximum number of frames accepted at once.
    accepts: usize,
    got: Vec<(VnetHdr, Vec<u8>)>,
    lent: Vec<usize>,
}

impl Direct for Receiver {
    fn takes(&self) -> Offloads {
        self.takes
    }

    fn lend<'m>(&'m mut self, frames: usize, len: u32, lent: &mut Lent<'m>) {
        let all = self.chains - self.next;
        let (n, per) = if len as usize <= self.chain {
            (frames.min(all), 1)
        } else {
            (1.min(all), (len as usize).div_ceil(self.chain).min(all))
        };
        self.lent.push(n);
        let mut chains = self.memory.chunks_exact_mut(self.chain).skip(self.next);
        for _ in 0..n {
            chains.by_ref().take(per).for_each(|chain| lent.push(SegMut::of(chain)));
            lent.end_frame();
        }
    }

    fn accept(&mut self, came: &[DirectFrame]) -> usize {
        let n = came.len().min(self.accepts);
        for DirectFrame { len, hdr } in &came[..n] {
            let at = self.next * self.chain;
            self.got.push((*hdr, self.memory[at..at + *len as usize].to_vec()));
            self.next += (*len as usize).div_ceil(self.chain);
        }
        n
    }

    fn take_back(&mut self, i: usize, out: &mut [u8]) {
        let at = (self.next + i) * self.chain;
        out.copy_from_slice(&self.memory[at..at + out.len()]);
    }

    fn discard(&mut self, _: usize, _: u32) {}

    fn record_failure(&mut self, _: usize, _: u32) -> Result<(), Fault> {
        Err(Fault("gone".into()))
    }
}

struct Rig {
    ingress: TapIngress,
    stats: Arc<IngressStats>,
    sender: UnixDatagram,
    to: Receiver,
    scratch: Burst<'static>,
}

fn rig(chain: usize, chains: usize) -> Rig {
    let (sender, queue) = UnixDatagram::pair().unwrap();
    queue.set_nonblocking(true).unwrap();
    let stats = Arc::new(IngressStats::default());
    let fd = TapFd::new(Arc::new(OwnedFd::from(queue)), Batching::Plain);
    let ingress = TapIngress::new(fd, Offloads::ALL, Arc::clone(&stats)).unwrap();
    let (memory, takes, accepts) = (vec![0; chain * chains], Offloads::ALL, usize::MAX);
    let (next, got, lent) = (0, Vec::new(), Vec::new());
    let to = Receiver { memory, chain, next, chains, takes, accepts, got, lent };
    Rig { ingress, stats, sender, to, scratch: Burst::default() }
}

fn frame(len: usize, n: u8) -> Vec<u8> {
    (0..len).map(|i| (i * 7) as u8 ^ n).collect()
}

impl Rig {
    fn send(&mut self, hdr: VnetHdr, bytes: &[u8]) {
        self.sender.send(&[&hdr.bytes()[..], &[0, 0], bytes].concat()).unwrap();
    }

    /// A round as in a worker; returns the frames that were copied.
    fn round(&mut self) -> Vec<Vec<u8>> {
        if self.ingress.supports_direct() {
            self.ingress.read_into(64, &mut self.to).unwrap();
        }
        let mut shown = Vec::new();
        let burst = self.ingress.burst(64, Instant::START, &mut self.scratch, &mut |burst| {
            for frame in &burst.frames {
                let mut bytes = vec![0; frame.len as usize];
                let mut at = 0;
                burst.segs(frame).iter().for_each(|seg| at += seg.read(&mut bytes[at..]));
                shown.push(bytes);
            }
        });
        burst.unwrap();
        shown
    }

    /// Sends one long frame, after which more are expected.
    fn start(&mut self) {
        self.send(TSO, &frame(20_000, 0));
        assert_eq!(self.round().len(), 1, "not read directly");
    }
}

#[test]
fn long_frames_are_read_directly_into_the_receiver() {
    let mut rig = rig(2048, 200);
    rig.start();
    for n in 1..9 {
        rig.send(TSO, &frame(20_000 + usize::from(n), n));
        assert_eq!(rig.round().len(), 0);
    }
    let want: Vec<_> = (1..9).map(|n| (TSO, frame(20_000 + usize::from(n), n))).collect();
    assert!(rig.to.got == want);
    assert_eq!((rig.stats.direct.get(), rig.stats.frames.get()), (8, 9));
    assert_eq!(rig.stats.bytes.get(), 9 * 20_000 + 36);
    assert!(rig.round().is_empty() && rig.ingress.arm(), "found empty");
}

#[test]
fn several_frames_in_one_batch_where_a_chain_holds_one() {
    let mut rig = rig(70_000, 40);
    rig.start();
    for _ in 0..4 {
        (0..6).for_each(|n| rig.send(TSO, &frame(3000, n)));
        assert!(rig.round().is_empty());
    }
    assert_eq!(rig.to.got.len(), 24);
    assert!(rig.to.got.iter().zip(0..).all(|(got, n)| got.1 == frame(3000, n % 6)));
    assert!(rig.to.lent.iter().any(|n| *n > 2), "{:?}", rig.to.lent);
}

#[test]
fn frame_longer_than_its_room_is_reassembled_and_copied() {
    let mut rig = rig(1000, 30);
    rig.start();
    // 30 chains hold it; the next finds 9, then none.
    let frames: Vec<_> = (1..4).map(|n| frame(20_500, n)).collect();
    frames.iter().for_each(|bytes| rig.send(TSO, bytes));
    let mut shown = rig.round();
    shown.extend(rig.round());
    assert!(rig.to.got == [(TSO, frames[0].clone())]);
    assert!(shown == frames[1..]);
    assert_eq!((rig.stats.direct.get(), rig.stats.frames.get()), (1, 4));
}

#[test]
fn frames_after_a_refused_or_invalid_one_keep_their_order() {
    let mut rig = rig(70_000, 40);
    rig.start();
    (0..8).for_each(|n| rig.send(TSO, &frame(3000, n)));
    rig.round();
    rig.to.got.clear();
    rig.to.accepts = 1;
    (0..3).for_each(|n| rig.send(TSO, &frame(3000, n)));
    rig.send(VnetHdr { gso_size: 0, ..TSO }, &frame(3000, 3));
    (4..6).for_each(|n| rig.send(TSO, &frame(3000, n)));
    let mut went = Vec::new();
    for _ in 0..3 {
        let shown = rig.round();
        went.extend(rig.to.got.drain(..).map(|(_, bytes)| bytes));
        went.extend(shown);
    }
    assert_eq!(went.iter().map(|bytes| bytes[0]).collect::<Vec<_>>(), [0, 1, 2, 4, 5]);
    assert!(went.iter().all(|bytes| *bytes == frame(3000, bytes[0])));
    assert_eq!(rig.stats.drops_bad_hdr.get(), 1);
}

#[test]
fn receiver_without_the_offloads_is_not_read_into() {
    let mut rig = rig(2048, 200);
    rig.start();
    rig.to.takes = Offloads { tso6: false, ..Offloads::ALL };
    rig.send(TSO, &frame(20_000, 1));
    assert_eq!(rig.round().len(), 1);
    assert!(rig.to.lent.is_empty());
    rig.ingress.set_offloads(rig.to.takes);
    rig.send(TSO, &frame(20_000, 2));
    assert_eq!((rig.round().len(), rig.to.got.len()), (0, 1));
}

#[test]
fn small_frames_are_read_privately_again() {
    let mut rig = rig(2048, 4000);
    rig.start();
    let mut direct = 0;
    for n in 0..400 {
        rig.send(VnetHdr::NONE, &frame(100, n as u8));
        direct += usize::from(rig.round().is_empty());
    }
    assert!((10..300).contains(&direct), "{direct}");
    assert_eq!(rig.to.got.len(), direct);
}

#[test]
fn frame_without_a_buffer_is_first_in_the_next_burst() {
    let mut rig = rig(2048, 200);
    rig.start();
    rig.to.chains = 0;
    rig.send(TSO, &frame(20_000, 1));
    rig.send(TSO, &frame(20_000, 2));
    assert!(rig.round() == [frame(20_000, 1), frame(20_000, 2)]);
    rig.to.chains = 200;
    assert!(rig.ingress.supports_direct());
}
