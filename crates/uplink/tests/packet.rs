//! Frames through packet sockets on a veth whose other end a kernel has, each test in network
//! namespaces of its own.

mod common;

use std::net::UdpSocket;
use std::num::NonZeroU16;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Netns, Port, bytes, poll_until, udp_frame, udp_payload};
use shm::Seg;
use switch::frame::Burst;
use switch::port::{Egress, Ingress};
use switch::stats::{EgressStats, IngressStats};
use switch::vnet::{NEEDS_CSUM, Offloads, VnetHdr};
use uplink::{
    LinkWatch, PACKET_OFFLOADS, PacketLink, PacketOptions, TapEgress, TapError, TapFd, TapIngress,
    packet_link,
};

/// `v0` in `ours` has packet sockets; `v1` in `host` is host 1, with host 2 as a static neighbour.
struct Wire {
    ours: Netns,
    host: Netns,
}

impl Wire {
    fn new() -> Option<Self> {
        let (ours, host) = (Netns::new()?, Netns::new()?);
        ours.ip(&format!("link add v0 type veth peer name v1 netns {}", host.0));
        ours.ip("link set v0 up");
        host.ip("link set v1 address 02:00:00:00:00:01 up");
        host.ip("addr add 10.9.0.1/24 dev v1");
        host.ip("neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev v1");
        Some(Self { ours, host })
    }

    fn open(&self, queues: u16) -> Vec<Arc<OwnedFd>> {
        open(&self.ours, "v0", queues).unwrap()
    }

    fn socket(&self, address: &str) -> UdpSocket {
        let socket = self.host.run(|| UdpSocket::bind(address).unwrap());
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        socket
    }
}

fn open(netns: &Netns, name: &str, queues: u16) -> Result<Vec<Arc<OwnedFd>>, TapError> {
    uplink::open_packet(&PacketOptions {
        name: name.into(),
        netns: Some(netns.0.clone()),
        queues: NonZeroU16::new(queues).unwrap(),
        blocked: false,
    })
}

fn port(socket: &Arc<OwnedFd>) -> Port {
    let seen = Arc::new(IngressStats::default());
    let sent = Arc::new(EgressStats::default());
    let fd = || TapFd::packet(Arc::clone(socket));
    let ingress = TapIngress::new(fd(), Offloads::ALL, Arc::clone(&seen)).unwrap();
    let egress = TapEgress::new(fd(), PACKET_OFFLOADS, Arc::clone(&sent));
    Port { ingress, egress, seen, sent }
}

/// Writes frames in groups; they must all fit.
fn put(port: &mut Port, frames: &[Vec<u8>]) {
    for group in frames.chunks(64) {
        let mut burst = Burst::default();
        for (i, frame) in group.iter().enumerate() {
            burst.segs.push(Seg::of(frame));
            burst.push_at(i, 1, frame.len() as u32, VnetHdr::NONE);
        }
        let picks: Vec<u16> = (0..group.len() as u16).collect();
        let end = Instant::now() + Duration::from_secs(5);
        let mut done = 0;
        while done < picks.len() {
            assert!(Instant::now() < end, "the socket stays full");
            done += port.egress.put(&burst, &picks[done..]).unwrap();
        }
    }
}

/// Reads until there are `count` UDP frames to port 4000, with their headers.
fn receive(port: &mut Port, count: usize) -> Vec<(VnetHdr, Vec<u8>)> {
    let got = std::cell::RefCell::new(Vec::new());
    let each = |burst: &mut Burst<'_>| {
        for i in 0..burst.frames.len() {
            let frame = bytes(burst, i);
            let at = if frame[12..14] == [0x81, 0] { 4 } else { 0 };
            if udp_payload(&[&frame[..12], &frame[12 + at..]].concat()).is_some() {
                got.borrow_mut().push((burst.frames[i].hdr, frame));
            }
        }
    };
    poll_until(&mut port.ingress, each, || got.borrow().len() >= count);
    got.into_inner()
}

fn number(payload: &[u8]) -> u32 {
    u32::from_be_bytes(payload[..4].try_into().unwrap())
}

#[test]
fn frames_pass_in_order_both_ways() {
    let Some(wire) = Wire::new() else { return };
    let mut port = port(&wire.open(1)[0]);
    let socket = wire.socket("10.9.0.1:4000");
    let frames: Vec<_> = (0..200_u32).map(|n| udp_frame(&n.to_be_bytes())).collect();
    put(&mut port, &frames);
    let mut buffer = [0; 2000];
    for n in 0..200 {
        let len = socket.recv(&mut buffer).unwrap();
        assert_eq!((len, number(&buffer)), (4, n));
    }
    assert_eq!((port.sent.frames.get(), port.sent.bytes.get()), (200, 200 * 46));
    for n in 0..200_u32 {
        let payload = [&n.to_be_bytes()[..], &[7; 1400]].concat();
        socket.send_to(&payload, "10.9.0.2:4000").unwrap();
    }
    for (n, (hdr, frame)) in (0..).zip(receive(&mut port, 200)) {
        let payload = udp_payload(&frame).unwrap();
        assert_eq!((payload.len(), number(payload)), (1404, n));
        // The kernel has left the checksum to us, as on a TAP.
        assert_eq!((hdr.flags & NEEDS_CSUM, hdr.csum_start), (NEEDS_CSUM, 34));
    }
    // Too long for the interface.
    let long = udp_frame(&[0; 1600]);
    put(&mut port, &[long]);
    assert_eq!(port.sent.drops_too_long.get(), 1);
}

#[test]
fn tags_are_kept_and_checksums_with_them() {
    let Some(wire) = Wire::new() else { return };
    let mut ours = port(&wire.open(1)[0]);
    let mut theirs = port(&open(&wire.host, "v1", 1).unwrap()[0]);
    let plain = udp_frame(&[7; 1000]);
    let with = |tags: &[u8]| [&plain[..12], tags, &plain[12..]].concat();
    // None, one, that of priority only, two, and two of 802.1ad.
    let tags: [&[u8]; 5] = [
        &[],
        &[0x81, 0, 0, 7],
        &[0x81, 0, 0xe0, 0],
        &[0x81, 0, 0, 7, 0x81, 0, 0, 8],
        &[0x88, 0xa8, 0, 9, 0x81, 0, 0, 8],
    ];
    for tags in tags {
        let frame = with(tags);
        let csum_start = 34 + tags.len() as u16;
        let hdr = VnetHdr { flags: NEEDS_CSUM, csum_start, csum_offset: 6, ..VnetHdr::NONE };
        let mut burst = Burst::default();
        burst.segs.push(Seg::of(&frame));
        burst.push_at(0, 1, frame.len() as u32, hdr);
        assert_eq!(ours.egress.put(&burst, &[0]), Ok(1));
        let got = std::cell::RefCell::new(Vec::new());
        let each = |burst: &mut Burst<'_>| {
            got.borrow_mut().push((burst.frames[0].hdr, bytes(burst, 0)));
        };
        poll_until(&mut theirs.ingress, each, || !got.borrow().is_empty());
        let (header, bytes) = &got.into_inner()[0];
        assert!(*bytes == frame, "{tags:?}: {:?}", &bytes[..24]);
        assert_eq!((header.flags & NEEDS_CSUM, header.csum_start), (NEEDS_CSUM, csum_start));
    }
    assert_eq!((ours.sent.frames.get(), theirs.seen.frames.get()), (5, 5));
}

#[test]
fn frames_of_the_host_itself_and_our_own_do_not_come_back() {
    let Some(wire) = Wire::new() else { return };
    wire.ours.ip("addr add 10.9.0.9/24 dev v0");
    wire.ours.ip("neigh add 10.9.0.1 lladdr 02:00:00:00:00:01 dev v0");
    for queues in [1, 2] {
        let mut ports: Vec<_> = wire.open(queues).iter().map(port).collect();
        let socket = wire.socket("10.9.0.1:4000");
        let of_host = wire.ours.run(|| UdpSocket::bind("10.9.0.9:4000").unwrap());
        let mut buffer = [0; 64];
        for n in 0..50_u32 {
            of_host.send_to(&n.to_be_bytes(), "10.9.0.1:4000").unwrap();
            put(&mut ports[0], &[udp_frame(&n.to_be_bytes())]);
            (0..2).for_each(|_| _ = socket.recv(&mut buffer).unwrap());
        }
        // What they receive is what host 1 sends after that, and nothing of the above.
        socket.send_to(b"last", "10.9.0.2:4000").unwrap();
        let mut all = Vec::new();
        let end = Instant::now() + Duration::from_secs(5);
        while all.is_empty() {
            assert!(Instant::now() < end);
            for port in &mut ports {
                let each = &mut |burst: &mut Burst<'_>| {
                    all.extend((0..burst.frames.len()).map(|i| bytes(burst, i)));
                };
                let mut burst = Burst::default();
                port.ingress.burst(64, switch::time::Instant::START, &mut burst, each).unwrap();
            }
        }
        assert_eq!(all.len(), 1);
        assert_eq!(udp_payload(&all[0]), Some(&b"last"[..]));
    }
}

#[test]
fn each_flow_is_received_by_one_queue_in_order_and_once() {
    const FLOWS: u16 = 32;
    const EACH: u32 = 20;
    let Some(wire) = Wire::new() else { return };
    let mut ports: Vec<_> = wire.open(4).iter().map(port).collect();
    let sockets: Vec<_> =
        (0..FLOWS).map(|n| wire.socket(&format!("10.9.0.1:{}", 6000 + n))).collect();
    for n in 0..EACH {
        for socket in &sockets {
            socket.send_to(&n.to_be_bytes(), "10.9.0.2:4000").unwrap();
        }
    }
    let mut queues_of = vec![Vec::new(); usize::from(FLOWS)];
    let mut next = vec![0; usize::from(FLOWS)];
    let end = Instant::now() + Duration::from_secs(5);
    while next.iter().sum::<u32>() < u32::from(FLOWS) * EACH {
        assert!(Instant::now() < end, "{next:?}");
        for (queue, port) in ports.iter_mut().enumerate() {
            let each = &mut |burst: &mut Burst<'_>| {
                for i in 0..burst.frames.len() {
                    let frame = bytes(burst, i);
                    let from = u16::from_be_bytes([frame[34], frame[35]]) - 6000;
                    let flow = usize::from(from);
                    assert_eq!(number(udp_payload(&frame).unwrap()), next[flow]);
                    next[flow] += 1;
                    queues_of[flow].push(queue);
                }
            };
            let mut burst = Burst::default();
            port.ingress.burst(64, switch::time::Instant::START, &mut burst, each).unwrap();
        }
    }
    assert!(queues_of.iter().all(|queues| queues.iter().all(|queue| *queue == queues[0])));
    let used = (0..4).filter(|queue| queues_of.iter().any(|queues| queues[0] == *queue)).count();
    assert!(used > 1, "the flows are spread");
}

#[test]
fn frames_that_are_not_read_in_time_are_counted() {
    const SENT: u64 = 40_000;
    let Some(wire) = Wire::new() else { return };
    let fd = &wire.open(1)[0];
    let mut port = port(fd);
    let socket = wire.socket("10.9.0.1:4000");
    for n in 0..SENT as u32 {
        socket.send_to(&n.to_be_bytes(), "10.9.0.2:4000").unwrap();
    }
    let lost = uplink::packet_losses(fd.as_fd());
    assert!(lost > 0 && lost < SENT, "{lost}");
    let got = receive(&mut port, (SENT - lost) as usize);
    assert_eq!(got.len() as u64 + lost, SENT);
    assert_eq!(port.seen.frames.get(), SENT - lost);
    assert_eq!(uplink::packet_losses(fd.as_fd()), 0, "each is counted once");
}

#[test]
fn interface_that_is_down_comes_back_and_one_that_is_removed_does_not() {
    let Some(wire) = Wire::new() else { return };
    let fd = &wire.open(1)[0];
    let mut port = port(fd);
    let burst = |port: &mut Port| {
        let start = switch::time::Instant::START;
        port.ingress.burst(64, start, &mut Burst::default(), &mut |_| ())
    };
    wire.ours.ip("link set v0 down");
    assert_eq!(packet_link(fd.as_fd()), PacketLink::Down);
    assert_eq!(burst(&mut port).unwrap_err().0, "the interface is down");
    put(&mut port, &[udp_frame(b"lost")]);
    assert_eq!(port.sent.drops_down.get(), 1);
    wire.ours.ip("link set v0 up");
    wire.host.ip("neigh replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev v1");
    assert_eq!(packet_link(fd.as_fd()), PacketLink::Up);
    uplink::clear_packet_error(fd.as_fd());
    let socket = wire.socket("10.9.0.1:4000");
    put(&mut port, &[udp_frame(b"hello")]);
    assert_eq!(socket.recv(&mut [0; 64]).unwrap(), 5);
    socket.send_to(b"hello", "10.9.0.2:4000").unwrap();
    assert_eq!(receive(&mut port, 1).len(), 1);

    wire.ours.ip("link set v0 name renamed");
    assert_eq!(packet_link(fd.as_fd()), PacketLink::Up);
    wire.ours.ip("link del renamed");
    assert_eq!(packet_link(fd.as_fd()), PacketLink::Removed);
    assert_eq!(burst(&mut port).unwrap_err().0, "the interface is down");
    let frame = udp_frame(b"hello");
    let mut all = Burst::default();
    all.segs.push(Seg::of(&frame));
    all.push_at(0, 1, frame.len() as u32, VnetHdr::NONE);
    let fault = port.egress.put(&all, &[0]).unwrap_err();
    assert!(fault.0.contains("removed"), "{fault}");
}

#[test]
fn blocked_socket_gets_no_frame_not_even_later() {
    let Some(wire) = Wire::new() else { return };
    // Sees that frames have arrived.
    let mut other = port(&wire.open(1)[0]);
    let options = PacketOptions {
        name: "v0".into(),
        netns: Some(wire.ours.0.clone()),
        queues: NonZeroU16::MIN,
        blocked: true,
    };
    let sockets = uplink::open_packet(&options).unwrap();
    let mut port = port(&sockets[0]);
    let socket = wire.socket("10.9.0.1:4000");
    let mut send = |numbers: std::ops::Range<u32>| {
        let count = numbers.len();
        numbers.for_each(|n| _ = socket.send_to(&n.to_be_bytes(), "10.9.0.2:4000").unwrap());
        assert_eq!(receive(&mut other, count).len(), count);
    };
    send(0..5);
    uplink::set_packet_blocked(sockets[0].as_fd(), false).unwrap();
    send(5..10);
    uplink::set_packet_blocked(sockets[0].as_fd(), true).unwrap();
    uplink::set_packet_blocked(sockets[0].as_fd(), true).unwrap();
    send(10..15);
    uplink::set_packet_blocked(sockets[0].as_fd(), false).unwrap();
    uplink::set_packet_blocked(sockets[0].as_fd(), false).unwrap();
    send(15..20);
    let got = receive(&mut port, 5);
    let numbers = got.iter().map(|(_, frame)| number(udp_payload(frame).unwrap()));
    assert!(numbers.eq(15..20), "{got:?}");
    // Frames that were read and not delivered are dropped on request.
    send(20..23);
    let read = std::cell::Cell::new(0);
    let leave = |burst: &mut Burst<'_>| {
        read.set(burst.frames.len());
        burst.leave(1);
    };
    poll_until(&mut port.ingress, leave, || read.get() == 3);
    port.ingress.discard();
    send(23..24);
    let got = receive(&mut port, 1);
    assert_eq!(number(udp_payload(&got[0].1).unwrap()), 23);
    assert_eq!(uplink::packet_losses(sockets[0].as_fd()), 0, "nobody missed them");
}

/// Of UDP fragmentation, which a TAP accepts from its writer: no interface segments it before.
#[test]
fn frames_whose_gso_type_has_no_header_are_dropped_and_others_pass() {
    /// VIRTIO_NET_HDR_GSO_UDP
    const UFO: u8 = 3;
    let Some(netns) = Netns::new() else { return };
    let tap = netns.tap(1, 1);
    let mut port = port(&open(&netns, "t0", 1).unwrap()[0]);
    let write = |gso_type, gso_size, frame: &[u8]| {
        let hdr = VnetHdr {
            flags: NEEDS_CSUM,
            gso_type,
            hdr_len: 42,
            gso_size,
            csum_start: 34,
            csum_offset: 6,
        };
        let mut bytes = hdr.bytes().to_vec();
        bytes.resize(uplink::VNET_LEN, 0);
        bytes.extend(frame);
        assert_eq!(rustix::io::write(&*tap.queues[0], &bytes).unwrap(), bytes.len());
    };
    for n in 0..100_u32 {
        write(UFO, 1472, &udp_frame(&[0; 3000]));
        write(0, 0, &udp_frame(&n.to_be_bytes()));
        write(UFO, 1472, &udp_frame(&[0; 3000]));
    }
    for (n, (_, frame)) in (0..).zip(receive(&mut port, 100)) {
        assert_eq!(number(udp_payload(&frame).unwrap()), n);
    }
    let drops = &port.seen.drops_bad_hdr;
    poll_until(&mut port.ingress, |_| {}, || drops.get() == 200);
    let (start, mut burst) = (switch::time::Instant::START, Burst::default());
    assert_eq!(port.ingress.burst(64, start, &mut burst, &mut |_| {}).unwrap(), 0);
    assert!(port.ingress.arm(), "all are read");
}

#[test]
fn change_of_carrier_is_notified_and_seen() {
    let Some(wire) = Wire::new() else { return };
    let sockets = wire.open(1);
    let watch = LinkWatch::open(Some(&wire.ours.0)).unwrap();
    let carrier = || uplink::packet_carrier(sockets[0].as_fd());
    let wait = |wanted: bool| {
        let end = Instant::now() + Duration::from_secs(5);
        while carrier() != wanted {
            assert!(Instant::now() < end, "carrier: {wanted}");
            os::poll_readable(&[watch.as_fd()], Some(Duration::from_secs(5)));
            watch.clear();
        }
    };
    wait(true);
    wire.host.ip("link set v1 down");
    wait(false);
    assert_eq!(packet_link(sockets[0].as_fd()), PacketLink::Up, "it is set up all the same");
    wire.host.ip("link set v1 up");
    wait(true);
    wire.ours.ip("link set v0 down");
    wait(false);
    let find = |name| uplink::find_interface(name, Some(&wire.ours.0));
    let is_missing = |name| matches!(find(name), Err(TapError::NoLink { .. }));
    assert!(find("v0").is_ok() && is_missing("v9"));
    let nowhere = uplink::find_interface("lo", Some("no-such-netns"));
    assert!(matches!(nowhere, Err(TapError::NoNetns { .. })));
    wire.ours.ip("link del v0");
    assert!(!carrier() && is_missing("v0"));
    let error = LinkWatch::open(Some("no-such-netns")).err().unwrap();
    assert!(matches!(error, TapError::NoNetns { .. }), "{error}");
}

#[test]
fn interfaces_that_cannot_be_used_are_errors_that_say_why() {
    let Some(wire) = Wire::new() else { return };
    let error = |name: &str| open(&wire.ours, name, 1).unwrap_err().to_string();
    assert!(error("v9").contains("`v9` does not exist: name one of `ip -n"), "{}", error("v9"));
    assert!(error("lo").contains("`lo` is not an Ethernet interface"), "{}", error("lo"));
    let options = PacketOptions {
        name: "v0".into(),
        netns: Some("no-such-netns".into()),
        queues: NonZeroU16::MIN,
        blocked: false,
    };
    assert!(matches!(uplink::open_packet(&options), Err(TapError::NoNetns { .. })));
    // Frames to other stations are received, until the sockets are closed.
    let flags = || {
        let args = ["-n", &wire.ours.0, "-d", "link", "show", "v0"];
        String::from_utf8(Command::new("ip").args(args).output().unwrap().stdout).unwrap()
    };
    let sockets = wire.open(2);
    assert!(flags().contains("promiscuity 2"), "{}", flags());
    drop(sockets);
    // A child of another test has them, too, until it runs its program.
    let end = Instant::now() + Duration::from_secs(5);
    while !flags().contains("promiscuity 0") {
        assert!(Instant::now() < end, "{}", flags());
    }
}
