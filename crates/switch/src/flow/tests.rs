use super::*;
use etherparse::PacketBuilder;
use proptest::prelude::*;

const KEY: u64 = 0x0123_4567_89ab_cdef;
const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];

/// One frame of a flow; `back`: from the far end.
#[derive(Clone, Copy, Debug)]
struct Flow {
    v6: bool,
    tcp: bool,
    hosts: [u8; 2],
    ports: [u16; 2],
}

impl Flow {
    fn frame(self, back: bool, tags: u8, payload: &[u8]) -> Vec<u8> {
        let (a, b) = if back { (1, 0) } else { (0, 1) };
        let host = self.hosts;
        let eth = PacketBuilder::ethernet2(MACS[a], MACS[b]);
        let mut out = Vec::new();
        let v6 = |h: u8| [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, h];
        let ip = match (tags, self.v6) {
            (0, false) => eth.ipv4([10, 0, 0, host[a]], [10, 0, 0, host[b]], 64),
            (0, true) => eth.ipv6(v6(host[a]), v6(host[b]), 64),
            (_, false) => eth.single_vlan(5.try_into().unwrap()).ipv4(
                [10, 0, 0, host[a]],
                [10, 0, 0, host[b]],
                64,
            ),
            (_, true) => eth.single_vlan(5.try_into().unwrap()).ipv6(v6(host[a]), v6(host[b]), 64),
        };
        if self.tcp {
            let tcp = ip.tcp(self.ports[a], self.ports[b], 1, 1000);
            tcp.write(&mut out, payload).unwrap();
        } else {
            ip.udp(self.ports[a], self.ports[b]).write(&mut out, payload).unwrap();
        }
        out
    }
}

fn flow() -> impl Strategy<Value = Flow> {
    (any::<bool>(), any::<bool>(), any::<[u8; 2]>(), any::<[u16; 2]>())
        .prop_map(|(v6, tcp, hosts, ports)| Flow { v6, tcp, hosts, ports })
}

fn head(frame: &[u8]) -> &[u8] {
    &frame[..frame.len().min(128)]
}

proptest! {
    #[test]
    fn both_directions_and_every_payload_hash_alike(
        flow in flow(), tags in 0_u8..2, len in 0_usize..200
    ) {
        let want = flow_hash(head(&flow.frame(false, 0, &[])), KEY);
        let payload = vec![0xab; len];
        for back in [false, true] {
            prop_assert_eq!(flow_hash(head(&flow.frame(back, tags, &payload)), KEY), want);
        }
    }

    #[test]
    fn another_flow_or_key_has_another_hash(flow in flow(), port in any::<u16>()) {
        prop_assume!(port != flow.ports[0] && port != flow.ports[1]);
        let other = Flow { ports: [port, flow.ports[1]], ..flow };
        let hash = flow_hash(&flow.frame(false, 0, &[]), KEY);
        prop_assert_ne!(hash, flow_hash(&other.frame(false, 0, &[]), KEY));
        prop_assert_ne!(hash, flow_hash(&flow.frame(false, 0, &[]), KEY + 1));
    }

    #[test]
    fn any_bytes_are_tolerated(bytes in prop::collection::vec(any::<u8>(), 0..128), v6: bool) {
        let mut bytes = bytes;
        if bytes.len() > 15 {
            bytes[12..14].copy_from_slice(if v6 { &[0x86, 0xdd] } else { &[8, 0] });
            bytes[14] = if v6 { 0x60 } else { 0x40 | (bytes[14] & 15) };
        }
        for len in 0..=bytes.len() {
            flow_hash(&bytes[..len], KEY);
            vlan_id(&bytes[..len]);
            let _ = (dst_mac(&bytes[..len]), src_mac(&bytes[..len]));
        }
    }
}

#[test]
fn fragments_follow_their_addresses() {
    let one = Flow { v6: false, tcp: false, hosts: [1, 2], ports: [1000, 2000] };
    let two = Flow { ports: [3, 4], ..one };
    let fragment = |flow: Flow, bits: u16| {
        let mut frame = flow.frame(false, 0, &[0; 64]);
        frame[20..22].copy_from_slice(&bits.to_be_bytes());
        flow_hash(&frame, KEY)
    };
    assert_eq!(fragment(one, 0x2000), fragment(two, 0x00b9), "first and a later fragment");
    assert_ne!(fragment(one, 0), fragment(two, 0));
    assert_eq!(fragment(one, 0), fragment(one, 0x4000), "do not fragment is not a fragment");
}

#[test]
fn ipv6_extensions_are_skipped() {
    let flow = Flow { v6: true, tcp: false, hosts: [1, 2], ports: [1000, 2000] };
    let plain = flow.frame(false, 0, &[]);
    let extended = |kinds: &[u8]| {
        let mut frame = plain[..54].to_vec();
        let mut at = 20;
        for kind in kinds {
            let next = std::mem::replace(&mut frame[at], *kind);
            at = frame.len();
            frame.extend([next, 0, 0, 0, 0, 0, 0, 0]);
        }
        frame.extend(&plain[54..]);
        flow_hash(&frame, KEY)
    };
    let want = flow_hash(&plain, KEY);
    assert_eq!(extended(&[0, 60, 43]), want);
    assert_eq!(extended(&[44]), extended(&[44, 60]), "fragments: addresses only");
    assert_ne!(extended(&[44]), want);
    let endless = [60; EXTENSIONS_MAX + 1];
    assert_ne!(extended(&endless), want, "bounded");
}

#[test]
fn frames_without_ip_hash_by_mac_and_ethertype() {
    let arp = |from: usize, ethertype: u16| {
        let mut frame = [MACS[1 - from], MACS[from]].concat();
        frame.extend(ethertype.to_be_bytes());
        flow_hash(&frame, KEY)
    };
    assert_eq!(arp(0, 0x0806), arp(1, 0x0806));
    assert_ne!(arp(0, 0x0806), arp(0, 0x0807));
}

#[test]
fn hashes_spread_over_queues() {
    let mut queues = [0_u32; 16];
    for port in 0..16_000_u16 {
        let flow = Flow { v6: false, tcp: true, hosts: [1, 2], ports: [port, 80] };
        queues[flow_hash(&flow.frame(false, 0, &[]), KEY) as usize % 16] += 1;
    }
    assert!(queues.iter().all(|n| (800..1200).contains(n)), "{queues:?}");
}

#[test]
fn tags_are_read_outermost_first() {
    let frame = |tail: &[u8]| [&[0; 12], tail].concat();
    assert_eq!(vlan_id(&frame(&[0x08, 0, 0, 5])), 0);
    assert_eq!(vlan_id(&frame(&[0x81, 0, 0xe0, 5, 8, 0])), 5);
    assert_eq!(vlan_id(&frame(&[0x88, 0xa8, 0x0f, 0xff, 0x81, 0, 0, 7])), 0xfff);
    assert_eq!(vlan_id(&frame(&[0x81, 0])), 0, "short");
    assert_eq!(network(&frame(&[0x88, 0xa8, 0, 1, 0x81, 0, 0, 7, 8, 0])).unwrap().at, 22);
    let three = [0x81, 0, 0, 1, 0x81, 0, 0, 2, 0x81, 0, 0, 3, 8, 0];
    assert_eq!(network(&frame(&three)).unwrap().ethertype, ETHERTYPE_VLAN, "two at most");
}

#[test]
fn group_addresses_are_recognised() {
    assert!(is_multicast([0xff; 6]) && is_multicast([1, 0, 0, 0, 0, 0]));
    assert!(!is_multicast([2, 0, 0, 0, 0, 0]));
    assert!(is_link_local([1, 0x80, 0xc2, 0, 0, 0x0f]));
    assert!(!is_link_local([1, 0x80, 0xc2, 0, 0, 0x10]));
    assert!(!is_link_local([1, 0x80, 0xc2, 0, 1, 0]));
}
