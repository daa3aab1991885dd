//! Several front halves behind a switch.

use switch::fdb::{Fdb, PortId};
use switch::forward::{
    EgressQueue, Findings, Forwarder, Mode, Port, PortEvent, STALLED_AFTER, Source, Table,
};
use switch::hold::WAIT_MAX;
use switch::poll::Policy;
use switch::time::Ns;
use switch::tuning::Tuning;

use super::*;

/// A sender, port 0, and its receivers; the MAC of port `n` ends in `n`.
struct Net {
    forwarder: Forwarder,
    table: Arc<Table>,
    source: Source,
    /// Findings that no test has taken.
    found: Findings,
    now: Instant,
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
        let receivers_ports = receivers.iter().enumerate().map(port);
        let table = Arc::new(std::iter::once(None).chain(receivers_ports).collect());
        let fdb = Arc::new(Fdb::new(64, [1, 2], 300, 4));
        for n in 1..=receivers.len() as u8 {
            fdb.learn([2, 0, 0, 0, 0, n], 0, PortId(n.into()), 1);
        }
        let tuning = Arc::new(Tuning::new(Policy::Event));
        let source = Source::new(PortId(0), 0, Arc::default(), tuning);
        let forwarder = Forwarder::new(Mode::Switch, 0, fdb, Arc::clone(&table), 7);
        Self { forwarder, table, source, found: Findings::default(), now: Instant::START + SECOND }
    }

    /// Serves the sender after `time`, and retries held frames. Returns the number still held.
    fn serve(&mut self, sender: &mut Guest, time: Ns) -> usize {
        self.now += time;
        let (forwarder, source, now) = (&mut self.forwarder, &self.source, self.now);
        let found = &mut self.found;
        let forward = |burst: &mut Burst<'_>| found.merge(forwarder.forward(source, burst, now));
        sender.burst(now, forward).unwrap();
        self.found.merge(forwarder.retry(true, now));
        let ports = self.table.iter().flatten();
        ports.map(|port| port.egress[0].held_frames()).sum()
    }

    fn drops(&self) -> u64 {
        self.source.stats.drops_no_room.get()
    }

    fn port(&self, n: usize) -> &Port {
        self.table[n].as_ref().unwrap()
    }

    /// How long port 1 has been stalled, and the reports since the last call.
    fn stalled(&mut self) -> (Option<Ns>, Vec<bool>) {
        let events = std::mem::take(&mut self.found.events).into_iter();
        let begins = events.map(|event| match event {
            PortEvent::Stalled { port: PortId(1), queue: 0, begins } => begins,
            other => panic!("{other:?}"),
        });
        let begins = begins.collect();
        (self.port(1).egress[0].stalled_for(self.now), begins)
    }

    /// Sends a frame to port 1, or to all ports, every second for this time.
    fn stream(&mut self, a: &mut Guest, flood: bool, lasts_s: u64) {
        for _ in 0..lasts_s {
            a.send(&if flood { flooded() } else { to(1, 60) }, &[60], 0, &[]);
            self.serve(a, SECOND);
            a.responses();
        }
    }
}

const SECOND: Ns = Ns::from_secs(1);

fn flooded() -> Vec<u8> {
    let mut bytes = to(1, 60);
    bytes[..6].fill(0xff);
    bytes
}

fn to(n: u8, len: usize) -> Vec<u8> {
    let mut bytes = tcp(len);
    bytes[..12].copy_from_slice(&[2, 0, 0, 0, 0, n, 2, 0, 0, 0, 0, 0]);
    bytes
}

#[test]
fn frames_for_a_front_half_short_of_a_page_are_dropped_until_it_recovers() {
    for peer in [ALL, Peer { rx_notify: false, ..ALL }] {
        let host = Arc::new(Host::default());
        let mut a = Guest::new(1, &host, ALL);
        let (mut b, mut c) = (Guest::new(2, &host, peer), Guest::new(3, &host, ALL));
        let mut net = Net::new(&[&b, &c]);
        // One page is posted, and two are needed.
        b.post(100..101);
        c.post(100..110);
        a.send(&to(1, 6000), &[4000, 2000], 0, &[]);
        assert_eq!(net.serve(&mut a, Ns::ZERO), 1);
        a.send(&to(2, 60), &[60], 0, &[]);
        assert_eq!(net.serve(&mut a, Ns::new(1)), 1);
        assert_eq!(c.take().unwrap().unwrap().1, to(2, 60), "others do not wait");
        // The worker sleeps until it is notified of a page.
        assert_eq!(net.forwarder.arm_blocked().full, peer.rx_notify);
        assert_eq!(a.responses(), [status::OKAY; 3], "no frame of the sender is held");
        assert_eq!((net.serve(&mut a, WAIT_MAX - Ns::new(1)), net.drops()), (1, 0));
        assert_eq!((net.serve(&mut a, Ns::new(1)), net.drops()), (0, 1));
        b.post(101..106);
        a.send(&to(1, 6000), &[4000, 2000], 0, &[]);
        a.send(&to(1, 61), &[61], 0, &[]);
        assert_eq!((net.serve(&mut a, Ns::new(1)), net.drops()), (0, 1));
        assert_eq!(b.take().unwrap().unwrap().1, to(1, 6000));
        assert_eq!(b.take().unwrap().unwrap().1, to(1, 61));
        (0..3).for_each(|_| a.send(&to(1, 6000), &[4000, 2000], 0, &[]));
        assert_eq!((net.serve(&mut a, Ns::new(1)), net.drops()), (2, 1));
    }
}

#[test]
fn front_half_without_pages_is_stalled_after_a_time_until_it_posts_some() {
    for flood in [false, true] {
        let host = Arc::new(Host::default());
        let (mut a, mut b) = (Guest::new(1, &host, ALL), Guest::new(2, &host, ALL));
        let mut net = Net::new(&[&b]);
        b.post(100..101);
        net.stream(&mut a, flood, 1);
        net.stream(&mut a, flood, 1);
        let dropped = net.now;
        net.stream(&mut a, flood, 59);
        assert_eq!(net.stalled(), (None, vec![]), "{flood}");
        a.send(&if flood { flooded() } else { to(1, 60) }, &[60], 0, &[]);
        net.serve(&mut a, SECOND - Ns::new(1));
        assert_eq!(
            (net.now - dropped, net.stalled()),
            (STALLED_AFTER - Ns::new(1), (None, vec![]))
        );
        a.send(&if flood { flooded() } else { to(1, 60) }, &[60], 0, &[]);
        net.serve(&mut a, Ns::new(1));
        assert_eq!(net.stalled(), (Some(STALLED_AFTER), vec![true]));
        net.stream(&mut a, flood, 20);
        assert_eq!(net.stalled(), (Some(80 * SECOND), vec![]), "once");
        // It kicks without pages, then with some.
        assert!(!net.port(1).egress[0].end_stall());
        b.post(101..103);
        assert!(net.port(1).egress[0].end_stall());
        assert_eq!(net.stalled(), (None, vec![]), "without a frame");
        net.stream(&mut a, flood, 2);
        assert_eq!(net.stalled(), (None, vec![]));
        // Again, and a frame arrives before its kick.
        net.stream(&mut a, flood, 63);
        let (stalled, reports) = net.stalled();
        assert!(stalled >= Some(STALLED_AFTER) && reports == [true], "{stalled:?} {reports:?}");
        b.post(103..104);
        net.stream(&mut a, flood, 1);
        assert_eq!(net.stalled(), (None, vec![false]));
        assert!(!net.port(1).egress[0].end_stall(), "reported already");
    }
}

#[test]
fn front_half_without_traffic_is_not_stalled() {
    let host = Arc::new(Host::default());
    let (mut a, mut b) = (Guest::new(1, &host, ALL), Guest::new(2, &host, ALL));
    let mut net = Net::new(&[&b]);
    net.serve(&mut a, 1000 * SECOND);
    assert_eq!(net.stalled(), (None, vec![]));
    // Occasional frames are dropped, and others in between are accepted.
    for n in 0..20 {
        net.stream(&mut a, true, 1);
        b.post(100 + n..101 + n);
        net.stream(&mut a, true, 2);
        net.now += 50 * SECOND;
        assert_eq!(net.stalled(), (None, vec![]));
    }
    // A new driver: the state of the previous one is reset.
    b.post(120..121);
    net.stream(&mut a, true, 1);
    net.stream(&mut a, true, 10);
    [0, 1].into_iter().for_each(|queues| net.port(1).set_active(queues));
    net.stream(&mut a, true, 60);
    assert_eq!(net.stalled(), (None, vec![]));
    net.stream(&mut a, true, 1);
    assert_eq!(net.stalled(), (Some(STALLED_AFTER), vec![true]));
    [0, 1].into_iter().for_each(|queues| net.port(1).set_active(queues));
    assert_eq!(net.stalled(), (None, vec![]));
}

#[test]
fn front_half_is_stalled_although_it_rejects_filtered_frames() {
    let host = Arc::new(Host::default());
    let (mut a, b) = (Guest::new(1, &host, ALL), Guest::new(2, &host, ALL));
    let mut net = Net::new(&[&b]);
    b.vif.filter_multicast(true);
    let mut multicast = flooded();
    multicast[..6].copy_from_slice(&[1, 0, 0x5e, 0, 0, 9]);
    for reports in [vec![true], vec![]] {
        for _ in 0..61 {
            a.send(&multicast, &[60], 0, &[]);
            net.stream(&mut a, true, 1);
        }
        assert_eq!(net.stalled().1, reports);
    }
    assert_eq!(b.pair.egress_stats.drops_filtered.get(), 122);
}

#[test]
fn front_half_without_rx_notify_is_not_reported_as_stalled() {
    let host = Arc::new(Host::default());
    let peer = Peer { rx_notify: false, ..ALL };
    let (mut a, b) = (Guest::new(1, &host, ALL), Guest::new(2, &host, peer));
    let mut net = Net::new(&[&b]);
    net.stream(&mut a, true, 200);
    assert_eq!(net.stalled(), (None, vec![]));
}

/// A UDP frame over IPv6 to port 1 with a blank checksum (the sum of the pseudo-header), or
/// complete.
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
fn front_half_with_blank_checksums_of_one_ip_version_gets_others_complete() {
    let host = Arc::new(Host::default());
    let gso = Gso { size: 1448, kind: gso_type::TCPV4, features: 0 };
    let blank = rx_flag::CSUM_BLANK | rx_flag::DATA_VALIDATED;
    // Features of netif's oldest front halves, all, none, and only the newer one.
    for (csum4, csum6) in [(true, false), (true, true), (false, false), (false, true)] {
        let mut a = Guest::new(1, &host, ALL);
        let mut b = Guest::new(2, &host, Peer { csum4, csum6, ..ALL });
        let mut net = Net::new(&[&b]);
        b.post(100..110);
        a.send(&udp6(true), &[50, 112], tx_flag::CSUM_BLANK, &[]);
        a.send(&to(1, 2000), &[2000], tx_flag::CSUM_BLANK, &[Extra::Gso(gso)]);
        assert_eq!(net.serve(&mut a, Ns::ZERO), 0);
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
fn frames_for_the_host_are_copied_with_one_call_after_some_bursts() {
    let (mut a, _) = two();
    let mut calls_of = |fetches: bool| {
        let before = a.host.calls.load(Ordering::Relaxed);
        let frame = tcp(900);
        a.send(&frame, &[500, 400], 0, &[]);
        let mut scratch = Burst::default();
        let mut ingress = a.pair.ingress.lock();
        let seen = ingress.burst(64, at(1), &mut scratch, &mut |burst| {
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
    assert_eq!(calls_of(false), 1, "fetched ahead, for no use");
    assert_eq!((calls_of(false), calls_of(true)), (1, 2), "only the head");
}

/// A guest that has sent five frames to segment, each followed by a packet without a frame of these
/// slots, the switch, and two receivers without pages: two such frames, 225 segments for each
/// receiver, fill a burst. The guest's rate permits 200,000 bytes.
fn five_frames_beside(slots: &[usize]) -> (Guest, Net, [Guest; 2]) {
    let host = Arc::new(Host::default());
    let plain = Peer { gso4: false, csum4: false, ..ALL };
    let mut a = Guest::new(1, &host, ALL);
    let others = [2, 3].map(|domain| Guest::new(domain, &host, plain));
    let net = Net::new(&[&others[0], &others[1]]);
    a.vif.set_rate(Some(Rate { bytes: 200_000, usecs: 1_000_000 }));
    let mut bytes = to(1, 18_000);
    bytes[..6].fill(0xff);
    let gso = Extra::Gso(Gso { size: 80, kind: gso_type::TCPV4, features: 0 });
    for _ in 0..5 {
        a.send(&bytes, &[4000, 4000, 4000, 4000, 2000], tx_flag::CSUM_BLANK, &[gso]);
        a.send(&vec![0; slots.iter().sum()], slots, 0, &[]);
    }
    (a, net, others)
}

#[test]
fn charge_of_a_returned_packet_without_a_frame_is_given_back() {
    // Longer than any frame.
    let (mut a, mut net, _others) = five_frames_beside(&[4000, 4000, 2000]);
    for dropped in [2, 4, 5] {
        net.serve(&mut a, Ns::new(1));
        assert_eq!(a.pair.ingress_stats.drops_too_long.get(), dropped);
    }
    let rest = (200_000 - 5 * (18_000 + 10_000)) as u16;
    assert!(a.vif.charge(rest + 100, net.now).is_err());
    assert_eq!(a.vif.charge(rest, net.now), Ok(()));
}

/// Issue 14, row 8.
#[test]
fn unprocessed_frames_of_a_burst_are_returned_to_the_ring() {
    // A runt.
    let (mut a, mut net, _others) = five_frames_beside(&[10]);
    let stats = Arc::clone(&a.pair.ingress_stats);
    let mut answers = Vec::new();
    for (frames, runts) in [(2, 2), (4, 4), (5, 5)] {
        assert_eq!(
            net.serve(&mut a, Ns::new(1)) as u64,
            2 * frames,
            "for both receivers, which have no pages"
        );
        assert_eq!((stats.frames.get(), stats.bytes.get()), (frames, 18_000 * frames));
        assert_eq!(stats.drops_runt.get(), runts);
        answers.extend(a.responses());
        assert_eq!(answers.len() as u64, 7 * frames, "responses in processing order");
    }
    let ends = [status::OKAY, status::NULL].into_iter().chain([status::OKAY; 4]);
    let packet: Vec<_> = ends.chain([status::ERROR]).collect();
    assert_eq!(answers, packet.repeat(5), "in order");
    assert_eq!(net.source.stats.drops_made_limit.get(), 0);
    // Returned frames were charged once: the others have as many tokens as without them.
    let rest = 200_000 - 5 * 18_000;
    assert_eq!(a.vif.charge(60_000, net.now), Ok(()));
    assert!(a.vif.charge((rest - 60_000 + 100) as u16, net.now).is_err());
    assert_eq!(a.vif.charge((rest - 60_000) as u16, net.now), Ok(()));
}
