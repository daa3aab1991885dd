//! Frames from a port with rules (port security, VLANs, isolation) through the switch, in both
//! modes, to ports with rules: what arrives is compared with rules written down here once more, on
//! whole frames, after the receiver stored the checksum that it was asked for.
//!
//! ```text
//!   sender  receivers  { offload request (10 bytes)  length (2 bytes)  frame... } ...
//! ```

use std::net::IpAddr;
use std::sync::Arc;

use shm::Seg;
use shm::sync::{Lock, Mutex};
use switch::direct::Direct;
use switch::fdb::{Fdb, PortId};
use switch::forward::{EgressQueue, Forwarder, Mode, Port, Source, Table};
use switch::frame::Burst;
use switch::poll::Policy;
use switch::port::{Egress, Fault, Steer};
use switch::stats::{EgressStats, IngressStats};
use switch::tenant::{Rules, Security, Tenants, Vlan};
use switch::time::{Instant, Ns};
use switch::tuning::Tuning;
use switch::vnet::{GSO_TCPV4, NEEDS_CSUM, Offloads, VnetHdr};

use crate::Bytes;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const IP: [u8; 4] = [10, 0, 0, 1];
const IP6: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
/// Link-local address of an interface with MAC (RFC 4291, appendix A).
const LOCAL: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xfe, 0, 0, 1];
const FRAMES_MAX: usize = 8;
const PORTS: u16 = 3;

const VLAN: [u8; 2] = [0x81, 0];
const QINQ: [u8; 2] = [0x88, 0xa8];
const UDP: u8 = 17;
const ICMPV6: u8 = 58;

/// What an input reached.
#[derive(Debug, Default)]
pub struct Seen {
    /// Frames that arrived at a port.
    pub delivered: u64,
    /// Names of the counters of drops that are not 0.
    pub drops: Vec<&'static str>,
}

/// VLANs of a port.
#[derive(Clone, Copy)]
struct Vids {
    tagged: &'static [u16],
    untagged: Option<u16>,
}

/// The four kinds; 0: all VLANs, as they are.
const KINDS: [Option<Vids>; 4] = [
    None,
    Some(Vids { tagged: &[], untagged: Some(5) }),
    Some(Vids { tagged: &[5, 6], untagged: None }),
    Some(Vids { tagged: &[6], untagged: Some(5) }),
];

/// Rules as chosen by an input.
struct Given {
    locks_mac: bool,
    locks_ip: bool,
    has_ips: bool,
    dhcp_server: bool,
    router: bool,
    vlan: Option<Vids>,
    isolated: bool,
}

impl Given {
    fn sender(bits: u8) -> Self {
        let bit = |n: u8| bits >> n & 1 != 0;
        Self {
            locks_mac: bit(0),
            locks_ip: bit(1),
            has_ips: !bit(2),
            dhcp_server: bit(3),
            router: bit(4),
            vlan: KINDS[usize::from(bits >> 5 & 3)],
            isolated: bit(7),
        }
    }

    fn receiver(bits: u8) -> Self {
        let vlan = KINDS[usize::from(bits & 3)];
        Self { vlan, isolated: bits & 4 != 0, ..Self::sender(0) }
    }

    fn rules(&self) -> Rules {
        let both = [IpAddr::from(IP), IpAddr::from(IP6)];
        let ips = self.locks_ip.then_some(if self.has_ips { &both[..] } else { &[] });
        let macs = if self.locks_mac { &[MAC][..] } else { &[] };
        let is_open = !self.locks_mac && !self.locks_ip;
        let security = Security::new(macs, ips, self.dhcp_server, self.router);
        let vlan = match self.vlan {
            None => Vlan::Transparent,
            Some(Vids { tagged: [], untagged: Some(vid) }) => Vlan::Access(vid),
            Some(Vids { tagged, untagged }) => {
                Vlan::Trunk { vids: tagged.iter().copied().collect(), native: untagged }
            }
        };
        let security = (!is_open).then_some(security);
        Rules { security, vlan, isolated: self.isolated }
    }

    fn carries(&self, vid: u16) -> bool {
        self.vlan.is_none_or(|own| own.untagged == Some(vid) || own.tagged.contains(&vid))
    }
}

/// A receiver that keeps what it gets.
#[derive(Default)]
struct Sink {
    offloads: Offloads,
    got: Vec<(Vec<u8>, VnetHdr)>,
}

impl Egress for Sink {
    fn offloads(&self) -> Offloads {
        self.offloads
    }

    fn accepts_granted(&self) -> bool {
        false
    }

    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        for pick in picks.iter().map(|pick| usize::from(*pick)) {
            let frame = &burst.frames[pick];
            let head = burst.head(pick);
            let bytes = joined(head, burst.segs(frame), head.len());
            assert_eq!(bytes.len(), frame.len as usize);
            self.got.push((bytes, frame.hdr));
        }
        Ok(picks.len())
    }

    fn put_parts(&mut self, head: &[u8], body: &[Seg<'_>], hdr: &VnetHdr) -> Result<bool, Fault> {
        self.got.push((joined(head, body, 0), *hdr));
        Ok(true)
    }

    fn room(&mut self, _: u32, limit: usize) -> Result<usize, Fault> {
        Ok(limit)
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
        false
    }

    fn disarm(&mut self) {}
}

/// `head`, then the segments without their first `skip` bytes.
fn joined(head: &[u8], body: &[Seg<'_>], skip: usize) -> Vec<u8> {
    let mut all = Vec::new();
    for seg in body {
        let at = all.len();
        all.resize(at + seg.len() as usize, 0);
        seg.read(&mut all[at..]);
    }
    [head, &all[skip..]].concat()
}

/// Must not fail for any bytes.
pub fn run(data: &[u8]) {
    explore(data);
}

/// As [`run`]; returns what was reached.
pub fn explore(data: &[u8]) -> Seen {
    let mut bytes = Bytes(data);
    let (sender, others) = (Given::sender(bytes.u8()), bytes.u8());
    let given = [sender, Given::receiver(others & 7), Given::receiver(others >> 3 & 7)];
    let mode = if others & 0x40 != 0 { Mode::Cross } else { Mode::Switch };
    let offloads = if others & 0x80 != 0 { Offloads::ALL } else { Offloads::default() };
    let mut frames = Vec::new();
    while !bytes.0.is_empty() && frames.len() < FRAMES_MAX {
        let mut raw = [0; VnetHdr::LEN];
        let request = bytes.take(VnetHdr::LEN);
        raw[..request.len()].copy_from_slice(request);
        let len = usize::from(bytes.u16());
        let frame = bytes.take(len).to_vec();
        // Ports check requests before the switch gets a frame.
        if let Ok(hdr) = VnetHdr::parse(&raw).check(frame.len() as u32, Offloads::ALL) {
            frames.push((frame, hdr));
        }
    }
    let stats = Arc::new(IngressStats::default());
    let got = forwarded(mode, offloads, &given, &frames, &stats);
    for (receiver, got) in given[1..].iter().zip(&got) {
        for (frame, hdr) in got {
            let src = &frame[6..12];
            assert!(src[0] & 1 == 0 && src != [0; 6], "source is an address of one station");
            check(&given[0], receiver, frame);
            if hdr.flags & NEEDS_CSUM == 0 {
                continue;
            }
            // Senders choose what they have summed up: the type of a tag, or anything.
            for csum in [VLAN, [0xa5; 2]] {
                let mut stored = frame.clone();
                let at = usize::from(hdr.csum_start) + usize::from(hdr.csum_offset);
                stored[at..at + 2].copy_from_slice(&csum);
                check(&given[0], receiver, &stored);
            }
        }
    }
    let drops = [
        ("ip", &stats.drops_spoofed_ip),
        ("mac", &stats.drops_spoofed_mac),
        ("arp", &stats.drops_spoofed_arp),
        ("nd", &stats.drops_spoofed_nd),
        ("dhcp_server", &stats.drops_dhcp_server),
        ("ra", &stats.drops_ra),
        ("protocol", &stats.drops_protocol),
        ("unchecked", &stats.drops_unchecked),
        ("isolated", &stats.drops_isolated),
        ("vlan", &stats.drops_vlan),
    ];
    let drops = drops.iter().filter(|(_, counter)| counter.get() > 0).map(|(name, _)| *name);
    let delivered = got.iter().map(|got| got.len() as u64).sum();
    Seen { delivered, drops: drops.collect() }
}

/// What ports 1 and 2 get of frames from port 0.
fn forwarded(
    mode: Mode,
    offloads: Offloads,
    given: &[Given],
    frames: &[(Vec<u8>, VnetHdr)],
    stats: &Arc<IngressStats>,
) -> Vec<Vec<(Vec<u8>, VnetHdr)>> {
    let sinks = [(); PORTS as usize];
    let sinks =
        sinks.map(|()| Arc::new(Mutex::new(Lock::Egress, Sink { offloads, got: Vec::new() })));
    let port = |id: u16| {
        let queue = EgressQueue::new(sinks[usize::from(id)].clone(), Arc::<EgressStats>::default());
        let port = Port::new(PortId(id), format!("p{id}"), vec![queue]);
        port.set_active(1);
        Some(Arc::new(port))
    };
    let table: Table = (0..PORTS).map(port).collect();
    let fdb = Arc::new(Fdb::new(64, [1, 2], 300, 64));
    let mut forwarder = Forwarder::new(mode, 0, fdb, Arc::new(table), 7);
    forwarder.set_tenants(Tenants::new(
        given.iter().map(|given| Some(Arc::new(given.rules()))).collect(),
    ));
    let tuning = Arc::new(Tuning::new(Policy::Event));
    let source = Source::new(PortId(0), 0, Arc::clone(stats), tuning);
    let mut burst = Burst::default();
    for (frame, hdr) in frames {
        burst.push_private(frame, *hdr);
    }
    let findings = forwarder.forward(&source, &mut burst, Instant::START + Ns::from_secs(1));
    assert!(findings.events.is_empty(), "no port is at fault");
    drop(findings);
    sinks[1..].iter().map(|sink| std::mem::take(&mut sink.lock().got)).collect()
}

/// Requires that a frame was permitted to get from `sender` to `receiver`.
fn check(sender: &Given, receiver: &Given, frame: &[u8]) {
    assert!(!(sender.isolated && receiver.isolated), "both ports are isolated");
    let (src, rest) = (&frame[6..12], &frame[12..]);
    assert!(!sender.locks_mac || src == MAC, "another MAC address as source");
    let has_tag = rest.starts_with(&VLAN) && rest.len() >= 4;
    let tag = has_tag.then(|| be16(rest, 2) & 0xfff).filter(|vid| *vid != 0);
    let vid = match receiver.vlan {
        None => tag.unwrap_or(0),
        // What is behind its tag, which was removed, is payload.
        Some(Vids { tagged: [], untagged }) => untagged.expect("an access port"),
        Some(Vids { tagged, untagged }) => match tag {
            Some(vid) => {
                assert!(tagged.contains(&vid), "tag {vid} is not of the trunk");
                vid
            }
            None => untagged.expect("an untagged frame needs a native VLAN"),
        },
    };
    assert!(sender.carries(vid), "VLAN {vid} is not the sender's");
    if sender.locks_ip || sender.locks_mac {
        let mut packet = rest;
        while packet.starts_with(&VLAN) || packet.starts_with(&QINQ) {
            packet = &packet[4..];
        }
        check_packet(sender, src, packet);
    }
}

/// The same of what follows the addresses and tags.
fn check_packet(sender: &Given, src: &[u8], packet: &[u8]) {
    let (ethertype, packet) = packet.split_at(2);
    let is_mac = |mac: &[u8]| mac == src || sender.locks_mac && mac == MAC;
    match ethertype {
        [8, 0] => {
            let proto = packet[9];
            let header = usize::from(packet[0] & 15) * 4;
            let is_first = packet[6] & 0x1f == 0 && packet[7] == 0;
            let ports = (proto == UDP && is_first)
                .then(|| (be16(packet, header), be16(packet, header + 2)));
            if let Some((from, to)) = ports {
                assert!(sender.dhcp_server || from != 67 && to != 68, "a DHCP server");
            }
            let is_own = sender.has_ips && packet[12..16] == IP;
            let is_dhcp = packet[12..16] == [0; 4] && ports == Some((68, 67));
            assert!(!sender.locks_ip || is_own || is_dhcp, "another IPv4 address as source");
        }
        [0x86, 0xdd] => {
            let (ip, next) = (&packet[8..24], packet[6]);
            if next == UDP {
                let (from, to) = (be16(packet, 40), be16(packet, 42));
                assert!(sender.dhcp_server || from != 547 && to != 546, "a DHCP server");
            }
            if next == ICMPV6 {
                let kind = packet[40];
                assert!(sender.router || kind != 134 && kind != 137, "a router");
            }
            let is_local = if sender.locks_mac { ip == LOCAL } else { ip == local(src) };
            let is_own = sender.has_ips && (ip == IP6 || is_local || ip == [0; 16]);
            assert!(!sender.locks_ip || is_own, "another IPv6 address as source");
        }
        [8, 6] | [0x80, 0x35] => {
            assert!(is_mac(&packet[8..14]), "another MAC address in ARP");
            let is_own = packet[14..18] == [0; 4] || sender.has_ips && packet[14..18] == IP;
            assert!(!sender.locks_ip || is_own, "another IP address in ARP");
        }
        other => assert!(!sender.locks_ip, "protocol {other:02x?} has unknown addresses"),
    }
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn local(mac: &[u8]) -> [u8; 16] {
    let mut ip = LOCAL;
    ip[8..11].copy_from_slice(&mac[..3]);
    ip[8] ^= 2;
    ip[13..].copy_from_slice(&mac[3..]);
    ip
}

/// Frames of every kind with a rule, from its own and other addresses, with all rules, and few.
pub fn seeds() -> Vec<Vec<u8>> {
    let frames = [
        (ipv4(IP, UDP, &udp(1000, 2000)), VnetHdr::NONE),
        (ipv4([10, 0, 0, 9], UDP, &udp(1000, 2000)), VnetHdr::NONE),
        (ipv4([0; 4], UDP, &udp(68, 67)), VnetHdr::NONE),
        (ipv4(IP, UDP, &udp(67, 68)), VnetHdr::NONE),
        (arp(IP), VnetHdr::NONE),
        (arp([10, 0, 0, 9]), VnetHdr::NONE),
        (ipv6(IP6, UDP, &udp(1000, 2000)), VnetHdr::NONE),
        (ipv6(LOCAL, ICMPV6, &[134, 0, 0, 0, 0, 0, 0, 0]), VnetHdr::NONE),
        (ipv6(IP6, ICMPV6, &solicitation(MAC)), VnetHdr::NONE),
        (ipv6(IP6, ICMPV6, &solicitation([2, 0, 0, 0, 0, 9])), VnetHdr::NONE),
        (ethernet([0x88, 0xcc], &[0; 46]), VnetHdr::NONE),
        (ipv4(IP, 6, &[0x50; 120]), TSO),
        (tagged(5, &ipv4(IP, UDP, &udp(1000, 2000))), VnetHdr::NONE),
        (tagged(6, &tagged(5, &arp(IP))), VnetHdr::NONE),
        (tagged(7, &arp(IP)), VnetHdr::NONE),
        (ethernet([8, 0], &[0x45]), VnetHdr::NONE),
        ([&[0xff; 6][..], &[2, 0, 0, 0, 0, 9], &[8, 0], &[0x45; 46]].concat(), VnetHdr::NONE),
        (tagged(6, &arp(IP)), summed(14)),
        (arp(IP), summed(12)),
    ];
    let rules =
        [[0x03, 0x80], [0x07, 0x00], [0x23, 0x49], [0x43, 0x12], [0x60, 0x9b], [0x81, 0xc4]];
    let input = |rules: [u8; 2], frames: &[(Vec<u8>, VnetHdr)]| {
        let each = frames.iter().flat_map(|(frame, hdr)| {
            [&hdr.bytes()[..], &(frame.len() as u16).to_le_bytes(), frame].concat()
        });
        rules.into_iter().chain(each).collect()
    };
    let halves = frames.chunks(FRAMES_MAX);
    halves.flat_map(|half| rules.map(|rules| input(rules, half))).collect()
}

const TSO: VnetHdr = VnetHdr {
    flags: NEEDS_CSUM,
    gso_type: GSO_TCPV4,
    hdr_len: 54,
    gso_size: 40,
    csum_start: 34,
    csum_offset: 16,
};

/// A checksum at this offset.
fn summed(at: u16) -> VnetHdr {
    VnetHdr { flags: NEEDS_CSUM, csum_start: at, ..VnetHdr::NONE }
}

fn ethernet(ethertype: [u8; 2], body: &[u8]) -> Vec<u8> {
    [&[0xff; 6][..], &MAC, &ethertype, body].concat()
}

fn tagged(vid: u16, frame: &[u8]) -> Vec<u8> {
    [&frame[..12], &VLAN, &vid.to_be_bytes(), &frame[12..]].concat()
}

fn udp(from: u16, to: u16) -> Vec<u8> {
    [&from.to_be_bytes()[..], &to.to_be_bytes(), &[0, 12, 0, 0, 1, 2, 3, 4]].concat()
}

fn ipv4(src: [u8; 4], proto: u8, body: &[u8]) -> Vec<u8> {
    let len = (20 + body.len() as u16).to_be_bytes();
    let head = [&[0x45, 0][..], &len, &[0; 4], &[64, proto, 0, 0], &src, &[10, 0, 0, 2]];
    ethernet([8, 0], &[&head.concat(), body].concat())
}

fn ipv6(src: [u8; 16], next: u8, body: &[u8]) -> Vec<u8> {
    let len = (body.len() as u16).to_be_bytes();
    let head = [&[0x60, 0, 0, 0][..], &len, &[next, 255], &src, &IP6];
    ethernet([0x86, 0xdd], &[&head.concat(), body].concat())
}

fn arp(ip: [u8; 4]) -> Vec<u8> {
    let body = [&[0, 1, 8, 0, 6, 4, 0, 1][..], &MAC, &ip, &[0; 6], &[10, 0, 0, 2]];
    ethernet([8, 6], &body.concat())
}

/// A neighbour solicitation with a source link-layer address.
fn solicitation(mac: [u8; 6]) -> Vec<u8> {
    [&[135, 0, 0, 0, 0, 0, 0, 0][..], &IP6, &[1, 1], &mac].concat()
}
