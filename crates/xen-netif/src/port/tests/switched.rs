//! Several front halves behind a switch.

use switch::fdb::{Fdb, PortId};
use switch::forward::{EgressQueue, Forwarder, HOLD_NS_MAX, Mode, Port, Source};
use switch::poll::Policy;
use switch::tuning::Tuning;

use super::*;

/// A sender, port 0, and receivers behind it; the MAC of port `n` ends in `n`.
struct Net {
    forwarder: Forwarder,
    source: Source,
    now_ns: u64,
}

impl Net {
    fn new(receivers: &[&Guest]) -> Self {
        let port = |(id, guest): (usize, &&Guest)| {
            let Pair { egress, egress_stats, .. } = guest.pair.clone();
            let queue = EgressQueue::new(egress, egress_stats);
            let port = Port::new(PortId(id as u16 + 1), format!("p{id}"), vec![queue]);
            port.set_active(1);
            Some(Arc::new(port))
        };
        let table = std::iter::once(None).chain(receivers.iter().enumerate().map(port)).collect();
        let fdb = Arc::new(Fdb::new(64, [1, 2], 300, 4));
        for n in 1..=receivers.len() as u8 {
            fdb.learn([2, 0, 0, 0, 0, n], 0, PortId(n.into()), 1);
        }
        let tuning = Arc::new(Tuning::new(Policy::Event));
        let source = Source { port: PortId(0), queue: 0, stats: Arc::default(), tuning };
        let forwarder = Forwarder::new(Mode::Switch, 0, fdb, Arc::new(table), 7);
        Self { forwarder, source, now_ns: 1_000_000_000 }
    }

    /// Serves the sender after `ns`; how many frames it holds then.
    fn serve(&mut self, sender: &mut Guest, ns: u64) -> usize {
        self.now_ns += ns;
        let (forwarder, source, now_ns) = (&mut self.forwarder, &self.source, self.now_ns);
        sender.burst(now_ns, |burst| forwarder.forward(source, burst, now_ns)).unwrap();
        sender.pair.ingress.lock().unwrap().held()
    }

    fn drops(&self) -> u64 {
        self.source.stats.drops_no_room.get()
    }
}

fn to(n: u8, len: usize) -> Vec<u8> {
    let mut bytes = tcp(len);
    bytes[..12].copy_from_slice(&[2, 0, 0, 0, 0, n, 2, 0, 0, 0, 0, 0]);
    bytes
}

#[test]
fn front_that_always_lacks_a_page_is_given_up_and_comes_back() {
    for peer in [ALL, Peer { rx_notify: false, ..ALL }] {
        let host = Arc::new(Host::default());
        let mut a = Guest::new(1, &host, ALL);
        let (mut b, mut c) = (Guest::new(2, &host, peer), Guest::new(3, &host, ALL));
        let mut net = Net::new(&[&b, &c]);
        // One page is there, and two are needed.
        b.post(100..101);
        c.post(100..110);
        a.send(&to(1, 6000), &[4000, 2000], 0, &[]);
        assert_eq!(net.serve(&mut a, 0), 1);
        a.send(&to(2, 60), &[60], 0, &[]);
        assert_eq!(net.serve(&mut a, 1), 1);
        assert_eq!(c.take().unwrap().unwrap().1, to(2, 60), "others wait for no one");
        // Its sender sleeps until it is told of a page, if it ever is.
        assert_eq!(net.forwarder.arm_blocked(), peer.rx_notify);
        assert_eq!((net.serve(&mut a, HOLD_NS_MAX - 1), net.drops()), (1, 0));
        assert_eq!((net.serve(&mut a, 1), net.drops()), (0, 1));
        assert_eq!(a.responses(), [status::OKAY; 3], "in order");
        a.send(&to(1, 6000), &[4000, 2000], 0, &[]);
        assert_eq!((net.serve(&mut a, 1), net.drops()), (0, 2), "nothing waits any more");
        b.post(101..106);
        a.send(&to(1, 6000), &[4000, 2000], 0, &[]);
        a.send(&to(1, 61), &[61], 0, &[]);
        assert_eq!((net.serve(&mut a, 1), net.drops()), (0, 2));
        assert_eq!(b.take().unwrap().unwrap().1, to(1, 6000));
        assert_eq!(b.take().unwrap().unwrap().1, to(1, 61));
        // Back among those that are waited for.
        (0..3).for_each(|_| a.send(&to(1, 6000), &[4000, 2000], 0, &[]));
        assert_eq!((net.serve(&mut a, 1), net.drops()), (2, 2));
    }
}

/// No more is taken of a ring half of which waits for a front half without pages.
#[test]
fn held_frames_keep_half_of_their_senders_ring_closed() {
    let host = Arc::new(Host::default());
    let mut a = Guest::new(1, &host, ALL);
    let (b, mut c) = (Guest::new(2, &host, ALL), Guest::new(3, &host, ALL));
    let mut net = Net::new(&[&b, &c]);
    c.post(400..600);
    (0..60).for_each(|_| a.send(&to(1, 60), &[30, 30], 0, &[]));
    (0..8).for_each(|_| a.send(&to(2, 60), &[30, 30], 0, &[]));
    let mut got = || std::iter::from_fn(|| c.take()).count();
    assert_eq!((net.serve(&mut a, 0), got()), (60, 4), "of 256 slots 128 are open");
    for _ in 0..4 {
        assert_eq!((net.serve(&mut a, 1), got()), (60, 0), "and no more, though a burst has room");
    }
    assert!(a.pair.ingress.lock().unwrap().arm(), "that there is more is no reason to look");
    assert_eq!((net.drops(), a.responses()), (0, vec![]));
    assert_eq!(net.serve(&mut a, HOLD_NS_MAX), 0);
    assert_eq!((net.serve(&mut a, 1), got()), (0, 4));
    assert_eq!((net.drops(), a.responses().len()), (60, 136));
}

/// A few frames that wait hold up the answers of all that came behind them.
#[test]
fn few_held_frames_are_given_up_before_they_hold_up_their_senders_ring() {
    let host = Arc::new(Host::default());
    let mut a = Guest::new(1, &host, ALL);
    let (b, mut c) = (Guest::new(2, &host, ALL), Guest::new(3, &host, ALL));
    let mut net = Net::new(&[&b, &c]);
    c.post(400..620);
    (0..3).for_each(|_| a.send(&to(1, 60), &[60], 0, &[]));
    (0..190).for_each(|_| a.send(&to(2, 60), &[60], 0, &[]));
    assert_eq!((net.serve(&mut a, 0), a.responses().len()), (3, 0));
    // All in a few ns: nobody waits for a time to pass.
    for _ in 0..6 {
        net.serve(&mut a, 1);
    }
    assert_eq!(std::iter::from_fn(|| c.take()).count(), 190);
    assert_eq!((net.drops(), a.responses().len()), (3, 193));
}

/// A UDP frame over IPv6 to port 1, its checksum blank: the pseudo-header's sum, and complete.
fn udp6(blank: bool) -> Vec<u8> {
    let mut bytes = to(1, 60);
    bytes.truncate(12);
    bytes.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 108, 17, 64]);
    bytes.extend((0..32).map(|i| i * 7));
    bytes.extend([0, 1, 0, 2, 0, 108, 0, 0]);
    bytes.extend((0..100).map(|i| i * 2));
    let mut sum = switch::offload::Sum::default();
    sum.add(&bytes[22..54]);
    sum.add(&[0, 108, 0, 17]);
    let field = if blank {
        sum.fold()
    } else {
        sum.add(&bytes[54..]);
        sum.finish()
    };
    bytes[60..62].copy_from_slice(&field);
    bytes
}

#[test]
fn front_that_takes_blank_checksums_over_one_version_gets_the_others_complete() {
    let host = Arc::new(Host::default());
    let gso = Gso { size: 1448, kind: gso_type::TCPV4, features: 0 };
    let blank = rx_flag::CSUM_BLANK | rx_flag::DATA_VALIDATED;
    // What netif's oldest front halves take, all, nothing, and only the newer.
    for (csum4, csum6) in [(true, false), (true, true), (false, false), (false, true)] {
        let mut a = Guest::new(1, &host, ALL);
        let mut b = Guest::new(2, &host, Peer { csum4, csum6, ..ALL });
        let mut net = Net::new(&[&b]);
        b.post(100..110);
        a.send(&udp6(true), &[50, 112], tx_flag::CSUM_BLANK, &[]);
        a.send(&to(1, 2000), &[2000], tx_flag::CSUM_BLANK, &[Extra::Gso(gso)]);
        assert_eq!(net.serve(&mut a, 0), 0);
        let (packet, bytes) = b.take().unwrap().unwrap();
        let takes6 = csum4 && csum6;
        assert!(bytes == udp6(takes6), "{csum4} {csum6}");
        assert_eq!(packet.flags & 3, if takes6 { blank } else { 0 });
        let (packet, bytes) = b.take().unwrap().unwrap();
        let whole = (Some(gso), blank, 2000);
        let first = (None, 0, 1448 + 54);
        let want = if csum4 { whole } else { first };
        assert_eq!((packet.gso, packet.flags & 3, bytes.len()), want);
    }
}

#[test]
fn frames_for_the_host_are_copied_with_one_call_once_that_is_known() {
    let (mut a, _) = two();
    let mut calls_of = |fetches: bool| {
        let before = a.host.calls.load(Ordering::Relaxed);
        let frame = tcp(900);
        a.send(&frame, &[500, 400], 0, &[]);
        let mut scratch = Burst::default();
        let mut ingress = a.pair.ingress.lock().unwrap();
        let seen = ingress.burst(64, 1, &mut scratch, &mut |burst| {
            burst.snapshot();
            assert_eq!(burst.head(0)[..64], frame[..64]);
            if fetches {
                burst.fetch(0..1);
                let mut bytes = vec![0; 900];
                assert_eq!(burst.segs(&burst.frames[0])[0].read(&mut bytes), 900);
                assert_eq!(bytes, frame);
            }
        });
        assert_eq!(seen.unwrap(), 1);
        drop(ingress);
        assert_eq!(a.responses(), [status::OKAY; 2]);
        a.host.calls.load(Ordering::Relaxed) - before
    };
    for _ in 0..4 {
        assert_eq!(calls_of(true), 2, "the head, and the frame");
    }
    assert_eq!((calls_of(true), calls_of(true)), (1, 1));
    assert_eq!(calls_of(false), 1, "ahead, and in vain");
    assert_eq!((calls_of(false), calls_of(true)), (1, 2), "the head alone");
}
