use proptest::prelude::*;

use super::*;
use crate::frame::HEAD_LEN;
use crate::vnet::{GSO_TCPV4, GSO_UDP_L4, NEEDS_CSUM};

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const OTHER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];
const IP: [u8; 4] = [10, 0, 0, 1];
const OTHER_IP: [u8; 4] = [10, 0, 0, 9];
const ANY_IP: [u8; 4] = [0; 4];
const UDP: u8 = 17;
const TCP: u8 = 6;

fn ip6(last: u8) -> [u8; 16] {
    let mut ip = [0; 16];
    ip[..2].copy_from_slice(&[0xfd, 0]);
    ip[15] = last;
    ip
}

/// Link-local address of `mac`.
fn local(mac: [u8; 6]) -> [u8; 16] {
    link_local(mac).to_be_bytes()
}

fn eth(src: [u8; 6], kind: u16, body: &[u8]) -> Vec<u8> {
    [&[0xff; 6][..], &src, &kind.to_be_bytes(), body].concat()
}

/// An IPv4 packet from `src`; `fragment`: the field of flags and offset.
fn v4(src: [u8; 4], proto: u8, fragment: u16, body: &[u8]) -> Vec<u8> {
    let len = (20 + body.len()) as u16;
    let [len, fragment] = [len, fragment].map(u16::to_be_bytes);
    let head = [&[0x45, 0][..], &len, &[0, 0], &fragment, &[64, proto, 0, 0], &src, &[10, 0, 0, 2]];
    [&head.concat(), body].concat()
}

fn v6(src: [u8; 16], next: u8, body: &[u8]) -> Vec<u8> {
    let len = (body.len() as u16).to_be_bytes();
    [&[0x60, 0, 0, 0][..], &len, &[next, 255], &src, &ip6(2), body].concat()
}

fn udp(from: u16, to: u16) -> Vec<u8> {
    let [from, to] = [from, to].map(u16::to_be_bytes);
    [&from[..], &to, &[0, 12, 0, 0, 1, 2, 3, 4]].concat()
}

fn arp(op: u8, mac: [u8; 6], ip: [u8; 4]) -> Vec<u8> {
    [&[0, 1, 8, 0, 6, 4, 0, op][..], &mac, &ip, &[0; 6], &[10, 0, 0, 2]].concat()
}

/// A neighbour solicitation or advertisement, with a link-layer address or none.
fn nd(kind: u8, target: [u8; 16], mac: Option<[u8; 6]>) -> Vec<u8> {
    let option = mac.map(|mac| [&[if kind == 136 { 2 } else { 1 }, 1][..], &mac].concat());
    [&[kind, 0, 0, 0, 0, 0, 0, 0][..], &target, &option.unwrap_or_default()].concat()
}

fn icmp(kind: u8) -> Vec<u8> {
    vec![kind, 0, 0, 0, 0, 0, 0, 0]
}

/// XAPI's locked mode: one MAC, one address of each version.
fn locked() -> Security {
    Security::new(&[MAC], Some(&[IpAddr::from(IP), IpAddr::from(ip6(1))]), false, false)
}

fn check(rules: &Security, frame: &[u8]) -> Result<(), Refusal> {
    check_with(rules, frame, &VnetHdr::NONE)
}

fn check_with(rules: &Security, frame: &[u8], hdr: &VnetHdr) -> Result<(), Refusal> {
    let head = &frame[..frame.len().min(HEAD_LEN)];
    let checked = rules.check(head, frame.len() as u32, hdr);
    // The short check accepts only what the long one does.
    assert!(checked.is_ok() || !rules.is_usual(head, hdr));
    checked
}

/// Whether the rules accept a frame, and what their MACs, addresses and servers make of it.
type Row = (&'static str, Vec<u8>, Result<(), Refusal>);

fn ip_frame(packet: &[u8]) -> Vec<u8> {
    let kind = if packet[0] >> 4 == 4 { ETHERTYPE_IPV4 } else { ETHERTYPE_IPV6 };
    eth(MAC, kind, packet)
}

/// `create_vswitch_rules` of XAPI's `setup-vif-rules`, in its order.
fn xapi_rows() -> Vec<Row> {
    use Refusal::{Arp, Ip, Mac, Nd, Protocol, Router};
    let arp_frame = |src, body: Vec<u8>| eth(src, ETHERTYPE_ARP, &body);
    let six = |src, next, body: &[u8]| ip_frame(&v6(src, next, body));
    let mut rows = vec![
        ("DHCP: UDP to port 67", ip_frame(&v4(ANY_IP, UDP, 0, &udp(68, 67))), Ok(())),
        ("DHCP renewal from the own address", ip_frame(&v4(IP, UDP, 0, &udp(68, 67))), Ok(())),
        ("ARP probe", arp_frame(MAC, arp(1, MAC, ANY_IP)), Ok(())),
        ("ARP probe, another arp_sha", arp_frame(MAC, arp(1, OTHER_MAC, ANY_IP)), Err(Arp)),
        ("ARP request", arp_frame(MAC, arp(1, MAC, IP)), Ok(())),
        ("ARP reply", arp_frame(MAC, arp(2, MAC, IP)), Ok(())),
        ("ARP reply, another nw_src", arp_frame(MAC, arp(2, MAC, OTHER_IP)), Err(Arp)),
        ("ARP reply, another arp_sha", arp_frame(MAC, arp(2, OTHER_MAC, IP)), Err(Arp)),
        ("ARP reply, another dl_src", arp_frame(OTHER_MAC, arp(2, MAC, IP)), Err(Mac)),
        ("IPv4 from the address", ip_frame(&v4(IP, UDP, 0, &udp(1, 2))), Ok(())),
        ("IPv4, any protocol", ip_frame(&v4(IP, 132, 0, &[0; 8])), Ok(())),
        ("IPv4 from another", ip_frame(&v4(OTHER_IP, UDP, 0, &udp(1, 2))), Err(Ip)),
        ("IPv4, another dl_src", eth(OTHER_MAC, 0x800, &v4(IP, TCP, 0, &[0; 20])), Err(Mac)),
        ("solicitation", six(ip6(1), 58, &nd(135, ip6(2), Some(MAC))), Ok(())),
        (
            "solicitation, another nd_sll",
            six(ip6(1), 58, &nd(135, ip6(2), Some(OTHER_MAC))),
            Err(Nd),
        ),
        ("solicitation without nd_sll", six(ip6(1), 58, &nd(135, ip6(2), None)), Err(Nd)),
        ("solicitation from another", six(ip6(9), 58, &nd(135, ip6(2), Some(MAC))), Err(Ip)),
        ("advertisement", six(ip6(1), 58, &nd(136, ip6(1), Some(MAC))), Ok(())),
        ("advertisement of another", six(ip6(1), 58, &nd(136, ip6(9), Some(MAC))), Err(Nd)),
        ("advertisement from another", six(ip6(9), 58, &nd(136, ip6(9), Some(MAC))), Err(Ip)),
        ("icmp6 from the address", six(ip6(1), 58, &icmp(128)), Ok(())),
        ("tcp6 from the address", six(ip6(1), TCP, &[0; 20]), Ok(())),
        ("udp6 from the address", six(ip6(1), UDP, &udp(1, 2)), Ok(())),
        ("tcp6 from another", six(ip6(9), TCP, &[0; 20]), Err(Ip)),
    ];
    for kind in [134, 137, 146, 147, 151, 152, 153] {
        rows.push(("message of routers", six(ip6(1), 58, &icmp(kind)), Err(Router)));
    }
    rows.extend([
        ("everything else: IPv6 SCTP", six(ip6(1), 132, &[0; 12]), Err(Protocol)),
        ("everything else: an EtherType", eth(MAC, 0x88cc, &[0; 46]), Err(Protocol)),
        ("everything else: LLC", eth(MAC, 46, &[0xaa; 46]), Err(Protocol)),
    ]);
    rows
}

#[test]
fn locked_mode_of_xapi_row_by_row() {
    for (what, frame, want) in xapi_rows() {
        assert_eq!(check(&locked(), &frame), want, "{what}");
        // The same behind a tag, and two.
        for tags in [&[0x81, 0, 0, 5][..], &[0x88, 0xa8, 0, 5, 0x81, 0, 0, 6]] {
            let tagged = [&frame[..12], tags, &frame[12..]].concat();
            assert_eq!(check(&locked(), &tagged), want, "{what}, tagged");
        }
    }
}

/// Rules beyond XAPI's.
#[test]
fn own_rules_row_by_row() {
    use Refusal::{Arp, DhcpServer, Ip, Nd, Unchecked};
    let four = |src, body: &[u8]| ip_frame(&v4(src, UDP, 0, body));
    let six = |src, next, body: &[u8]| ip_frame(&v6(src, next, body));
    let none = [0; 16];
    let rarp = |mac, ip| eth(MAC, ETHERTYPE_RARP, &arp(3, mac, ip));
    let three_tags = [&eth(MAC, ETHERTYPE_VLAN, &[])[..], &[0, 5, 0x81, 0, 0, 6, 0x81, 0, 0, 7]];
    let rows: [Row; 27] = [
        ("DHCP from another source", four(OTHER_IP, &udp(68, 67)), Err(Ip)),
        ("DHCP from another port", four(ANY_IP, &udp(1068, 67)), Err(Ip)),
        ("no address, other traffic", four(ANY_IP, &udp(68, 53)), Err(Ip)),
        ("DHCP reply", four(IP, &udp(67, 68)), Err(DhcpServer)),
        ("DHCP reply from another port", four(IP, &udp(1067, 68)), Err(DhcpServer)),
        ("DHCP relay", four(IP, &udp(67, 67)), Err(DhcpServer)),
        ("DHCPv6 client", six(local(MAC), UDP, &udp(546, 547)), Ok(())),
        ("DHCPv6 reply", six(local(MAC), UDP, &udp(547, 546)), Err(DhcpServer)),
        ("link-local address", six(local(MAC), TCP, &[0; 20]), Ok(())),
        ("link-local address of another", six(local(OTHER_MAC), TCP, &[0; 20]), Err(Ip)),
        ("DAD", six(none, 58, &nd(135, ip6(1), None)), Ok(())),
        ("DAD, link-local", six(none, 58, &nd(135, local(MAC), None)), Ok(())),
        ("DAD of another address", six(none, 58, &nd(135, ip6(9), None)), Err(Nd)),
        ("DAD with an address", six(none, 58, &nd(135, ip6(1), Some(MAC))), Err(Nd)),
        ("router solicitation from ::", six(none, 58, &icmp(133)), Ok(())),
        ("advertisement from ::", six(none, 58, &nd(136, none, None)), Err(Ip)),
        (
            "listener report from ::",
            six(none, 0, &[&[58, 0, 5, 2, 0, 0, 1, 0], &icmp(143)[..]].concat()),
            Ok(()),
        ),
        ("ping from ::", six(none, 58, &icmp(128)), Err(Ip)),
        ("tcp6 from ::", six(none, TCP, &[0; 20]), Err(Ip)),
        (
            "advertisement with another MAC",
            six(ip6(1), 58, &nd(136, ip6(1), Some(OTHER_MAC))),
            Err(Nd),
        ),
        ("RARP of a moved guest", rarp(MAC, ANY_IP), Ok(())),
        ("RARP of another MAC", rarp(OTHER_MAC, ANY_IP), Err(Arp)),
        ("ARP, truncated", eth(MAC, ETHERTYPE_ARP, &arp(1, MAC, IP)[..27]), Err(Unchecked)),
        (
            "ARP of another hardware",
            eth(MAC, ETHERTYPE_ARP, &[&[0, 6], &arp(1, MAC, IP)[2..]].concat()),
            Err(Unchecked),
        ),
        ("IPv4, wrong version", eth(MAC, ETHERTYPE_IPV4, &[0x65; 40]), Err(Unchecked)),
        ("IPv6, wrong version", eth(MAC, ETHERTYPE_IPV6, &[0x45; 60]), Err(Unchecked)),
        ("three tags", [&three_tags.concat()[..], &[8, 0]].concat(), Err(Unchecked)),
    ];
    for (what, frame, want) in rows {
        assert_eq!(check(&locked(), &frame), want, "{what}");
    }
}

#[test]
fn servers_and_routers_are_permitted_by_option_and_their_addresses_stay_locked() {
    let server = Security::new(&[MAC], Some(&[IpAddr::from(IP), IpAddr::from(ip6(1))]), true, true);
    assert_eq!(check(&server, &ip_frame(&v4(IP, UDP, 0, &udp(67, 68)))), Ok(()));
    assert_eq!(check(&server, &ip_frame(&v4(OTHER_IP, UDP, 0, &udp(67, 68)))), Err(Refusal::Ip));
    let reply = |src| ip_frame(&v6(src, UDP, &udp(547, 546)));
    assert_eq!(check(&server, &reply(local(MAC))), Ok(()));
    assert_eq!(check(&server, &reply(ip6(9))), Err(Refusal::Ip));
    let advertisement = |src| ip_frame(&v6(src, 58, &icmp(134)));
    assert_eq!(check(&server, &advertisement(local(MAC))), Ok(()));
    assert_eq!(check(&server, &advertisement(local(OTHER_MAC))), Err(Refusal::Ip));
}

#[test]
fn locked_mac_without_addresses_permits_any_address_of_its_own() {
    let rules = Security::new(&[MAC, OTHER_MAC], None, false, false);
    let arp_of = |mac, ip| eth(MAC, ETHERTYPE_ARP, &arp(2, mac, ip));
    for frame in [
        ip_frame(&v4(OTHER_IP, 132, 0, &[0; 8])),
        ip_frame(&v6(ip6(9), 132, &[0; 12])),
        ip_frame(&v6(ip6(9), 58, &nd(136, ip6(8), Some(OTHER_MAC)))),
        ip_frame(&v6(ip6(9), 58, &nd(135, ip6(8), None))),
        arp_of(OTHER_MAC, OTHER_IP),
        eth(MAC, 0x88cc, &[0; 46]),
    ] {
        assert_eq!(check(&rules, &frame), Ok(()), "{frame:?}");
    }
    let third = [2, 0, 0, 0, 0, 7];
    assert_eq!(check(&rules, &arp_of(third, OTHER_IP)), Err(Refusal::Arp));
    assert_eq!(check(&rules, &eth(third, 0x88cc, &[0; 46])), Err(Refusal::Mac));
    let advertisement = ip_frame(&v6(ip6(9), 58, &nd(136, ip6(8), Some(third))));
    assert_eq!(check(&rules, &advertisement), Err(Refusal::Nd));
    assert_eq!(check(&rules, &ip_frame(&v6(ip6(9), 58, &icmp(134)))), Err(Refusal::Router));
    assert_eq!(check(&rules, &ip_frame(&v4(IP, UDP, 0, &udp(67, 68)))), Err(Refusal::DhcpServer));
}

/// `create_vswitch_rules` with no `ipv4_allowed` and no `ipv6_allowed`.
#[test]
fn locked_without_addresses_may_request_one_and_nothing_else() {
    let rules = Security::new(&[MAC], Some(&[]), false, false);
    let request = v4(ANY_IP, UDP, 0, &udp(68, 67));
    assert_eq!(check(&rules, &ip_frame(&request)), Ok(()));
    let probe = |mac| check(&rules, &eth(MAC, ETHERTYPE_ARP, &arp(1, mac, ANY_IP)));
    assert_eq!((probe(MAC), probe(OTHER_MAC)), (Ok(()), Err(Refusal::Arp)));
    for (what, frame, _) in xapi_rows() {
        let passes = what.starts_with("DHCP: UDP") || what == "ARP probe";
        assert_eq!(check(&rules, &frame).is_ok(), passes, "{what}");
    }
    // Discovery of an IPv6 address too: it has none.
    let solicitation = ip_frame(&v6([0; 16], 58, &nd(135, local(MAC), None)));
    assert_eq!(check(&rules, &solicitation), Err(Refusal::Ip));
}

#[test]
fn locked_addresses_without_a_mac_belong_to_any_source() {
    let rules = Security::new(&[], Some(&[IpAddr::from(IP), IpAddr::from(ip6(1))]), false, false);
    let from = |src, packet: &[u8]| check(&rules, &eth(src, ETHERTYPE_IPV6, packet));
    assert_eq!(from(OTHER_MAC, &v6(local(OTHER_MAC), TCP, &[0; 20])), Ok(()));
    assert_eq!(from(OTHER_MAC, &v6(local(MAC), TCP, &[0; 20])), Err(Refusal::Ip));
    let reply = |mac| check(&rules, &eth(OTHER_MAC, ETHERTYPE_ARP, &arp(2, mac, IP)));
    assert_eq!((reply(OTHER_MAC), reply(MAC)), (Ok(()), Err(Refusal::Arp)));
    // XAPI: without an IPv6 address there is no IPv6 at all.
    let v4_only = Security::new(&[MAC], Some(&[IpAddr::from(IP)]), false, false);
    for packet in [
        v6(local(MAC), TCP, &[0; 20]),
        v6([0; 16], 58, &nd(135, local(MAC), None)),
        v6(local(MAC), 58, &icmp(128)),
    ] {
        assert_eq!(check(&v4_only, &ip_frame(&packet)), Err(Refusal::Ip));
    }
}

#[test]
fn later_fragments_pass_by_address_and_first_ones_need_their_ports() {
    const MORE: u16 = 0x2000;
    let four =
        |src, fragment, body: &[u8]| check(&locked(), &ip_frame(&v4(src, UDP, fragment, body)));
    assert_eq!(four(IP, MORE, &udp(1, 2)), Ok(()));
    assert_eq!(four(IP, 5, &udp(67, 68)), Ok(()), "not ports");
    assert_eq!(four(OTHER_IP, 5, &udp(1, 2)), Err(Refusal::Ip));
    assert_eq!(four(ANY_IP, 5, &udp(68, 67)), Err(Refusal::Ip));
    assert_eq!(four(IP, MORE, &udp(67, 68)), Err(Refusal::DhcpServer));
    assert_eq!(four(IP, MORE, &[0, 67]), Err(Refusal::Unchecked), "ports in the next one");
    let six = |src, next, offset: u16, body: &[u8]| {
        let [high, low] = (offset << 3 | 1).to_be_bytes();
        let body = [&[next, 0, high, low, 0, 0, 0, 1], body].concat();
        check(&locked(), &ip_frame(&v6(src, 44, &body)))
    };
    assert_eq!(six(ip6(1), UDP, 0, &udp(1, 2)), Ok(()));
    assert_eq!(six(ip6(1), UDP, 9, &udp(1, 2)), Ok(()));
    assert_eq!(six(ip6(9), UDP, 9, &udp(1, 2)), Err(Refusal::Ip));
    assert_eq!(six(ip6(1), UDP, 0, &udp(547, 546)), Err(Refusal::DhcpServer));
    assert_eq!(six(ip6(1), 58, 0, &icmp(128)), Ok(()));
    assert_eq!(six(ip6(1), 58, 0, &nd(136, ip6(1), Some(MAC))), Err(Refusal::Unchecked));
    assert_eq!(six(ip6(1), 44, 0, &[UDP, 0, 0, 0, 0, 0, 0, 0]), Err(Refusal::Unchecked));
    let options = [&[UDP, 30, 0, 0, 0, 0, 0, 0][..], &[0; 240]].concat();
    assert_eq!(six(ip6(1), 60, 0, &options), Err(Refusal::Unchecked));
}

#[test]
fn extension_headers_are_followed_within_the_private_bytes_only() {
    // The chain ends at the last private byte, or beyond.
    let chain = |kind: u8, units: u8, inner: &[u8]| {
        let header =
            [&[58, units, 0, 0, 0, 0, 0, 0][..], &vec![0; usize::from(units) * 8]].concat();
        check(&locked(), &ip_frame(&v6(ip6(1), kind, &[&header, inner].concat())))
    };
    for kind in [0, 43, 60, 135] {
        assert_eq!(chain(kind, 0, &icmp(134)), Err(Refusal::Router), "{kind}");
        assert_eq!(chain(kind, 0, &icmp(128)), Ok(()));
        assert_eq!(chain(kind, 7, &icmp(128)), Ok(()), "its type is byte 118");
        assert_eq!(chain(kind, 9, &icmp(128)), Err(Refusal::Unchecked));
    }
    let auth = [&[58, 4][..], &[0; 22], &icmp(134)].concat();
    assert_eq!(check(&locked(), &ip_frame(&v6(ip6(1), 51, &auth))), Err(Refusal::Router));
    let mut long = vec![0; 8 * 9];
    long.extend(icmp(128));
    let many = ip_frame(&v6(ip6(1), 0, &long));
    assert_eq!(check(&locked(), &many), Err(Refusal::Unchecked), "nine headers");
    // Options of neighbour discovery that the private bytes do not show, or of length 0.
    let option = [nd(136, ip6(1), None), vec![14, 6], vec![0; 46], vec![2, 1], OTHER_MAC.to_vec()];
    let hidden = ip_frame(&v6(ip6(1), 58, &option.concat()));
    assert_eq!(check(&locked(), &hidden), Err(Refusal::Unchecked));
    let endless = [nd(136, ip6(1), None), vec![14, 0, 0, 0, 0, 0, 0, 0]].concat();
    assert_eq!(check(&locked(), &ip_frame(&v6(ip6(1), 58, &endless))), Err(Refusal::Unchecked));
}

/// A receiver that completes a checksum writes it where the sender's header says.
#[test]
fn checksum_is_not_written_over_what_was_checked() {
    let csum = |csum_start, csum_offset| VnetHdr {
        flags: NEEDS_CSUM,
        csum_start,
        csum_offset,
        ..VnetHdr::NONE
    };
    let tcp = ip_frame(&v4(IP, TCP, 0, &[0; 40]));
    let checked = |frame: &[u8], hdr: VnetHdr| check_with(&locked(), frame, &hdr);
    assert_eq!(checked(&tcp, csum(34, 16)), Ok(()));
    assert_eq!(checked(&tcp, csum(34, 4)), Ok(()), "the sequence number is its own affair");
    for (start, offset) in [(0, 6), (0, 26), (14, 12), (26, 0), (34, 0), (34, 2)] {
        assert_eq!(checked(&tcp, csum(start, offset)), Err(Refusal::Unchecked));
    }
    let arp_frame = eth(MAC, ETHERTYPE_ARP, &arp(1, MAC, IP));
    assert_eq!(checked(&arp_frame, csum(14, 14)), Err(Refusal::Unchecked));
    assert_eq!(checked(&arp_frame, csum(40, 0)), Err(Refusal::Unchecked));
    let neighbour = ip_frame(&v6(ip6(1), 58, &nd(136, ip6(1), Some(MAC))));
    assert_eq!(checked(&neighbour, csum(54, 2)), Ok(()));
    assert_eq!(checked(&neighbour, csum(54, 16)), Err(Refusal::Unchecked));
    let fragment = ip_frame(&v4(IP, TCP, 0x2000, &[0; 40]));
    assert_eq!(checked(&fragment, csum(34, 16)), Err(Refusal::Unchecked));
    let gso = VnetHdr { gso_type: GSO_TCPV4, gso_size: 8, ..csum(34, 16) };
    assert_eq!(checked(&tcp, gso), Ok(()));
    // Segmentation would write a header of TCP over that of IP.
    let early = VnetHdr { csum_start: 20, csum_offset: 30, ..gso };
    assert_eq!(checked(&tcp, early), Err(Refusal::Unchecked));
    let sctp = ip_frame(&v4(IP, 132, 0, &[0; 40]));
    let uso = VnetHdr { gso_type: GSO_UDP_L4, ..gso };
    assert_eq!(checked(&sctp, uso), Err(Refusal::Unchecked));
    // With MACs alone: anything after the type.
    let macs = Security::new(&[MAC], None, false, false);
    let other = eth(MAC, 0x88cc, &[0; 46]);
    assert_eq!(check_with(&macs, &other, &csum(14, 0)), Ok(()));
    assert_eq!(check_with(&macs, &other, &csum(0, 8)), Err(Refusal::Unchecked));
}

#[test]
fn each_refusal_has_a_counter_of_its_own() {
    use Refusal::{Arp, DhcpServer, Ip, Mac, Nd, Protocol, Router, Unchecked};
    let stats = IngressStats::default();
    for refusal in [Mac, Ip, Arp, Nd, DhcpServer, Router, Protocol, Unchecked] {
        refusal.counter(&stats).add(1);
    }
    let counted = stats.all().filter(|(_, n)| *n == 1).count();
    assert_eq!(counted, 8);
}

#[test]
fn usual_frames_need_the_short_check_only() {
    let usual = |rules: &Security, packet: &[u8]| rules.is_usual(&ip_frame(packet), &VnetHdr::NONE);
    for rules in [locked(), Security::new(&[MAC], None, false, false)] {
        assert!(usual(&rules, &v4(IP, UDP, 0, &udp(1, 2))));
        assert!(usual(&rules, &v4(IP, TCP, 0x4000, &[0; 20])));
        assert!(!usual(&rules, &v4(IP, UDP, 0, &udp(68, 67))));
        assert!(!usual(&rules, &v4(IP, UDP, 0x2000, &udp(1, 2))));
        assert!(!usual(&rules, &v6(ip6(1), UDP, &udp(1, 2))));
    }
    assert!(!usual(&locked(), &v4(OTHER_IP, TCP, 0, &[0; 20])));
    let six = Security::new(&[MAC], Some(&[IpAddr::from(ip6(1))]), false, false);
    assert!(!usual(&six, &v4(IP, TCP, 0, &[0; 20])), "no IPv4 address is permitted");
}

/// Addresses that a frame which passed claims, read in another way than by the rules: from the end
/// of the header chain of a frame that the generator made.
fn packet() -> impl Strategy<Value = Vec<u8>> {
    let mac = prop_oneof![Just(MAC), Just(OTHER_MAC)];
    let four = prop_oneof![Just(IP), Just(OTHER_IP), Just(ANY_IP)];
    let six = prop_oneof![
        Just(ip6(1)),
        Just(ip6(9)),
        Just([0; 16]),
        Just(local(MAC)),
        Just(local(OTHER_MAC))
    ];
    let ports = (prop::sample::select(vec![1, 67, 68, 546, 547]), 0..70_u16);
    (mac, four, six, ports, any::<(u8, u8, u16)>(), prop::collection::vec(any::<u8>(), 0..90))
        .prop_map(|(mac, four, six, (from, to), (kind, proto, field), junk)| match kind % 5 {
            0 => eth(mac, ETHERTYPE_ARP, &[arp(kind % 3, mac, four), junk].concat()),
            1 => eth(mac, ETHERTYPE_IPV4, &v4(four, UDP, 0, &[udp(from, to), junk].concat())),
            2 => eth(mac, ETHERTYPE_IPV4, &v4(four, proto, field, &junk)),
            3 => eth(mac, ETHERTYPE_IPV6, &v6(six, proto % 64, &junk)),
            _ => eth(mac, ETHERTYPE_IPV6, &v6(six, 58, &[vec![proto], junk].concat())),
        })
}

proptest! {
    /// Any bit may differ from a usual frame.
    #[test]
    fn usual_frames_pass_the_full_check(
        macs in prop::sample::subsequence(vec![MAC, OTHER_MAC], 0..=2),
        ips in prop::sample::subsequence(vec![IP, OTHER_IP], 0..=2),
        others in prop::sample::subsequence(vec![ip6(1)], 0..=1),
        any_ip in any::<bool>(),
        servers in any::<(bool, bool)>(),
        source in prop::sample::select(vec![(MAC, IP), (OTHER_MAC, OTHER_IP), (MAC, OTHER_IP)]),
        proto in prop::sample::select(vec![TCP, UDP, 1]),
        ports in (60..72_u16, 60..72_u16),
        flips in prop::collection::vec((6..42_usize, 0..8_u8), 0..3),
        len in 30..60_usize,
        flags in 0..2_u8,
    ) {
        let ips: Vec<IpAddr> = ips.into_iter().map(IpAddr::from)
            .chain(others.into_iter().map(IpAddr::from)).collect();
        let rules = Security::new(&macs, (!any_ip).then_some(&ips[..]), servers.0, servers.1);
        let packet = v4(source.1, proto, 0, &[udp(ports.0, ports.1), vec![0; 20]].concat());
        let mut frame = eth(source.0, ETHERTYPE_IPV4, &packet);
        flips.iter().for_each(|(at, bit)| frame[*at] ^= 1 << bit);
        frame.truncate(len);
        let hdr = VnetHdr { flags, ..VnetHdr::NONE };
        if rules.is_usual(&frame, &hdr) {
            prop_assert_eq!(check_with(&rules, &frame, &hdr), Ok(()));
            prop_assert!(macs.first().is_none_or(|mac| *mac == frame[6..12]));
            prop_assert!(frame[12..14] == [8, 0]);
        } else if flips.is_empty() && len >= 38 && flags == 0 && proto == TCP {
            // The short check is not always false.
            let firsts = macs.first().is_none_or(|mac| *mac == source.0)
                && (any_ip || ips.first() == Some(&IpAddr::from(source.1)));
            prop_assert!(!firsts);
        }
    }

    #[test]
    fn no_frame_panics_and_none_that_passes_has_another_source(
        frame in packet(),
        cut in 0..200_usize,
        hdr in any::<(u8, u8, u16, u16)>(),
    ) {
        let frame = &frame[..frame.len().min(cut)];
        let (flags, gso_type, csum_start, csum_offset) = hdr;
        let hdr = VnetHdr { flags, gso_type, csum_start, csum_offset, ..VnetHdr::NONE };
        let _ = check_with(&locked(), frame, &hdr);
        if check(&locked(), frame).is_ok() {
            prop_assert_eq!(&frame[6..12], &MAC);
            match &frame[12..14] {
                [8, 0] => {
                    let dhcp = frame[26..30] == ANY_IP && frame[34..38] == [0, 68, 0, 67];
                    prop_assert!(frame[26..30] == IP || dhcp);
                }
                [0x86, 0xdd] => {
                    let src = &frame[22..38];
                    prop_assert!(src == ip6(1) || src == local(MAC) || src == [0; 16]);
                }
                [8, 6] => prop_assert!(frame[28..32] == IP || frame[28..32] == ANY_IP),
                other => prop_assert!(false, "{:?} passed", other),
            }
        }
    }
}
