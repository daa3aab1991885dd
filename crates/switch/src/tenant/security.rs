//! Port security: the addresses that a port's peer may use, in Ethernet, ARP, IP and neighbour
//! discovery.
//!
//! XAPI's `locked` mode is the model, rule for rule. Differences, all stricter unless marked:
//!
//! * DHCP: a client without an address is 0.0.0.0, port 68, to port 67; XAPI accepts any source.
//! * DHCP servers are refused, over IPv6 too.
//! * Link-layer addresses in ND options and in ARP are checked in all messages that have them.
//! * Laxer: an IPv6 link-local address made from a locked MAC (EUI-64), duplicate address detection
//!   and multicast listener reports from `::`, and reverse ARP of a locked MAC, which hypervisors
//!   send for a guest that moved.
//!
//! Fragments: the first one must contain its transport header within the private bytes; later ones
//! pass by their addresses, as they are useless without the first. Neighbour discovery in fragments
//! is dropped (RFC 6980), as are extension headers beyond the private bytes (RFC 7113).

use std::net::IpAddr;

use crate::flow::{
    ETHERTYPE_IPV4, ETHERTYPE_IPV6, ETHERTYPE_QINQ, ETHERTYPE_VLAN, PROTO_TCP, PROTO_UDP, be16,
    be32, network, src_mac,
};
use crate::stats::{Counter, IngressStats};
use crate::vnet::{GSO_NONE, VnetHdr};

const ETHERTYPE_ARP: u16 = 0x0806;
const ETHERTYPE_RARP: u16 = 0x8035;
const PROTO_ICMPV6: u8 = 58;
/// Most IPv6 extension headers skipped.
const EXTENSIONS_MAX: usize = 8;

/// ND messages (RFC 4861, 4).
const ROUTER_SOLICITATION: u8 = 133;
const NEIGHBOUR_SOLICITATION: u8 = 135;
const NEIGHBOUR_ADVERTISEMENT: u8 = 136;

/// Addresses that a port's peer may use, and what else it may send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Security {
    /// MAC addresses; empty: any.
    macs: Vec<[u8; 6]>,
    v4: Vec<u32>,
    v6: Vec<u128>,
    /// Whether IP addresses are locked.
    locks_ip: bool,
    dhcp_server: bool,
    router: bool,
    /// `None`: no frame is usual.
    usual: Option<Usual>,
}

/// Bytes 6 to 29 of usual frames, as words in memory order: those of `mask` are those of `value`.
///
/// ```text
///   | source MAC | 0800 | 45 .. .... .... | fragment | .. .. checksum | source IP |
///   6            12     14                20         22               26          30
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Usual {
    mask: [u64; 3],
    value: [u64; 3],
}

/// Reason why a frame is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Source address in Ethernet.
    Mac,
    /// Source address in IPv4 or IPv6.
    Ip,
    /// Sender address in ARP.
    Arp,
    /// Address in neighbour discovery.
    Nd,
    /// Reply of a DHCP server.
    DhcpServer,
    /// Router advertisement, redirect, or another message of routers.
    Router,
    /// Protocol whose addresses are unknown.
    Protocol,
    /// The headers are malformed or beyond the private bytes, or the checksum would be written over
    /// them.
    Unchecked,
}

impl Refusal {
    /// The counter of frames refused for this reason.
    pub fn counter(self, stats: &IngressStats) -> &Counter {
        match self {
            Self::Mac => &stats.drops_spoofed_mac,
            Self::Ip => &stats.drops_spoofed_ip,
            Self::Arp => &stats.drops_spoofed_arp,
            Self::Nd => &stats.drops_spoofed_nd,
            Self::DhcpServer => &stats.drops_dhcp_server,
            Self::Router => &stats.drops_ra,
            Self::Protocol => &stats.drops_protocol,
            Self::Unchecked => &stats.drops_unchecked,
        }
    }
}

/// Upper-layer header of an IP packet.
#[derive(Clone, Copy)]
enum Upper {
    /// At this offset, perhaps beyond the head.
    At { proto: u8, at: usize, fragment: bool },
    /// In an earlier fragment.
    Earlier { proto: u8 },
}

impl Security {
    /// Locks a port to these addresses. Without MACs, and with `None` for IP addresses, they are
    /// not locked; without a member in `ips` the peer has no address, and may request one by DHCP.
    pub fn new(macs: &[[u8; 6]], ips: Option<&[IpAddr]>, dhcp_server: bool, router: bool) -> Self {
        let (locks_ip, ips) = (ips.is_some(), ips.unwrap_or_default());
        let v4 = ips.iter().filter_map(|ip| if let IpAddr::V4(ip) = ip { Some(*ip) } else { None });
        let v6 = ips.iter().filter_map(|ip| if let IpAddr::V6(ip) = ip { Some(*ip) } else { None });
        let v4: Vec<u32> = v4.map(u32::from).collect();
        let is_usual_possible = !v4.is_empty() || !locks_ip;
        Self {
            macs: macs.to_vec(),
            usual: is_usual_possible.then(|| Usual::new(macs.first(), v4.first())),
            v4,
            v6: v6.map(u128::from).collect(),
            locks_ip,
            dhcp_server,
            router,
        }
    }

    /// Whether `mac` is an address of the peer.
    pub fn permits_mac(&self, mac: [u8; 6]) -> bool {
        self.macs.is_empty() || self.macs.contains(&mac)
    }

    /// Whether `mac` is one of the peer's addresses, and they are locked.
    pub fn locks_mac(&self, mac: [u8; 6]) -> bool {
        self.macs.contains(&mac)
    }

    /// Whether a frame is of the kind that most are, and permitted: untagged TCP or UDP over IPv4
    /// from the first addresses, without offloads, options, fragments or ports of DHCP. All such
    /// frames pass [`check`](Self::check).
    #[inline]
    pub(super) fn is_usual(&self, head: &[u8], hdr: &VnetHdr) -> bool {
        let (Some(usual), Some(head)) = (&self.usual, head.first_chunk()) else { return false };
        usual.matches(head) && hdr.is_plain()
    }

    /// Checks a frame of `len` bytes with this private head.
    ///
    /// # Errors
    /// [`Refusal`]: the frame is to be dropped.
    pub fn check(&self, head: &[u8], len: u32, hdr: &VnetHdr) -> Result<(), Refusal> {
        let src = src_mac(head).ok_or(Refusal::Unchecked)?;
        if !self.permits_mac(src) {
            return Err(Refusal::Mac);
        }
        let net = network(head).ok_or(Refusal::Unchecked)?;
        let packet = Packet { rules: self, head, src, at: net.at, hdr, len };
        match net.ethertype {
            ETHERTYPE_IPV4 => packet.check_v4(),
            ETHERTYPE_IPV6 => packet.check_v6(),
            ETHERTYPE_ARP | ETHERTYPE_RARP => packet.check_arp(),
            // More tags than are parsed.
            ETHERTYPE_VLAN | ETHERTYPE_QINQ => Err(Refusal::Unchecked),
            _ if self.locks_ip => Err(Refusal::Protocol),
            _ => packet.check_csum(net.at),
        }
    }
}

impl Usual {
    /// Frames from these addresses, or from any.
    fn new(mac: Option<&[u8; 6]>, ip: Option<&u32>) -> Self {
        let (mut mask, mut value) = ([0; 24], [0; 24]);
        let mut fix = |at: usize, bytes: &[u8], bits: &[u8]| {
            value[at - 6..][..bytes.len()].copy_from_slice(bytes);
            mask[at - 6..][..bits.len()].copy_from_slice(bits);
        };
        if let Some(mac) = mac {
            fix(6, mac, &[0xff; 6]);
        }
        // IPv4, header of 20 bytes.
        fix(12, &[8, 0, 0x45], &[0xff; 3]);
        // Neither more fragments nor an offset.
        fix(20, &[0, 0], &[0x3f, 0xff]);
        if let Some(ip) = ip {
            fix(26, &ip.to_be_bytes(), &[0xff; 4]);
        }
        Self { mask: words(&mask), value: words(&value) }
    }

    /// Whether the first bytes of a frame are those of a usual one.
    #[inline]
    fn matches(&self, head: &[u8; 38]) -> bool {
        let word = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let Some(fixed) = head[6..].first_chunk() else { return false };
        let (words, Self { mask, value }) = (words(fixed), self);
        let differs = (words[0] ^ value[0]) & mask[0]
            | (words[1] ^ value[1]) & mask[1]
            | (words[2] ^ value[2]) & mask[2];
        let proto = head[23];
        // 67 and 68 are the only ports with a rule.
        let has_usual_ports = proto == PROTO_TCP
            || proto == PROTO_UDP && !matches!(word(34), 67 | 68) && !matches!(word(36), 67 | 68);
        differs == 0 && has_usual_ports
    }
}

/// A frame that is being checked.
struct Packet<'a> {
    rules: &'a Security,
    head: &'a [u8],
    /// Source MAC.
    src: [u8; 6],
    /// Offset of the network header.
    at: usize,
    hdr: &'a VnetHdr,
    len: u32,
}

impl Packet<'_> {
    /// Whether the peer may use `mac` within this frame: as the frame's own source or, if MACs are
    /// locked, another of them.
    fn is_own(&self, mac: [u8; 6]) -> bool {
        mac == self.src || self.rules.macs.contains(&mac)
    }

    fn has_v4(&self, ip: u32) -> bool {
        !self.rules.locks_ip || self.rules.v4.contains(&ip)
    }

    fn has_v6(&self, ip: u128) -> bool {
        let Security { macs, v6, locks_ip, .. } = self.rules;
        let local = |mac: &[u8; 6]| link_local(*mac) == ip;
        let is_local = || if macs.is_empty() { local(&self.src) } else { macs.iter().any(local) };
        !locks_ip || v6.contains(&ip) || (!v6.is_empty() && is_local())
    }

    /// Requires that a checksum is stored at `first` or later: at an earlier place it would change
    /// what was checked.
    fn check_csum(&self, first: usize) -> Result<(), Refusal> {
        let precedes = self.hdr.csum_at().is_some_and(|at| at < first);
        if precedes { Err(Refusal::Unchecked) } else { Ok(()) }
    }

    /// Requires that there is no offload request: nothing of the frame may change.
    fn check_no_offload(&self) -> Result<(), Refusal> {
        if self.hdr.is_plain() { Ok(()) } else { Err(Refusal::Unchecked) }
    }

    fn check_arp(&self) -> Result<(), Refusal> {
        let body = self.head.get(self.at..self.at + 28).ok_or(Refusal::Unchecked)?;
        // Ethernet and IPv4, addresses of 6 and 4 bytes.
        if body[..6] != [0, 1, 8, 0, 6, 4] {
            return Err(Refusal::Unchecked);
        }
        self.check_no_offload()?;
        let mac = *body[8..].first_chunk().ok_or(Refusal::Unchecked)?;
        let ip = be32(body, 14).ok_or(Refusal::Unchecked)?;
        // 0: a probe for the sender's own future address (RFC 5227, 1.1).
        if self.is_own(mac) && (ip == 0 || self.has_v4(ip)) { Ok(()) } else { Err(Refusal::Arp) }
    }

    fn check_v4(&self) -> Result<(), Refusal> {
        let (ip, upper) = self.v4().ok_or(Refusal::Unchecked)?;
        let ports = self.check_upper(upper)?;
        if let Some((from, to)) = ports
            && !self.rules.dhcp_server
            && (from == 67 || to == 68)
        {
            return Err(Refusal::DhcpServer);
        }
        let is_dhcp_client = ip == 0 && ports == Some((68, 67));
        if self.has_v4(ip) || is_dhcp_client { Ok(()) } else { Err(Refusal::Ip) }
    }

    fn check_v6(&self) -> Result<(), Refusal> {
        let (ip, upper) = self.v6().ok_or(Refusal::Unchecked)?;
        let (Upper::At { proto, .. } | Upper::Earlier { proto }) = upper;
        if self.rules.locks_ip && ![PROTO_TCP, PROTO_UDP, PROTO_ICMPV6].contains(&proto) {
            return Err(Refusal::Protocol);
        }
        let ports = self.check_upper(upper)?;
        if let Some((from, to)) = ports
            && !self.rules.dhcp_server
            && (from == 547 || to == 546)
        {
            return Err(Refusal::DhcpServer);
        }
        if let Upper::At { proto: PROTO_ICMPV6, at, fragment } = upper {
            return self.check_icmp(ip, at, fragment);
        }
        if self.has_v6(ip) { Ok(()) } else { Err(Refusal::Ip) }
    }

    /// Checks that offloads change no address or port. Returns the UDP ports.
    fn check_upper(&self, upper: Upper) -> Result<Option<(u16, u16)>, Refusal> {
        let Upper::At { proto, at, fragment } = upper else {
            return self.check_no_offload().map(|()| None);
        };
        if fragment {
            self.check_no_offload()?;
        }
        let has_ports = matches!(proto, PROTO_TCP | PROTO_UDP);
        if self.hdr.gso_type != GSO_NONE && (!has_ports || usize::from(self.hdr.csum_start) != at) {
            return Err(Refusal::Unchecked);
        }
        let first = if has_ports { at + 4 } else { at };
        self.check_csum(first)?;
        if proto != PROTO_UDP {
            return Ok(None);
        }
        let port = |at| be16(self.head, at).ok_or(Refusal::Unchecked);
        Ok(Some((port(at)?, port(at + 2)?)))
    }

    fn check_icmp(&self, ip: u128, at: usize, fragment: bool) -> Result<(), Refusal> {
        let kind = *self.head.get(at).ok_or(Refusal::Unchecked)?;
        // RFC 6980, 5: nodes ignore fragmented neighbour discovery, but not all do.
        if fragment && (133..=137).contains(&kind) {
            return Err(Refusal::Unchecked);
        }
        // Nothing of the message but its checksum may change.
        if self.hdr.csum_at().is_some_and(|field| field != at + 2) {
            return Err(Refusal::Unchecked);
        }
        // Router advertisement, redirect, mobile prefixes, multicast routers.
        if matches!(kind, 134 | 137 | 146 | 147 | 151..=153) && !self.rules.router {
            return Err(Refusal::Router);
        }
        // Messages of nodes without an address: discovery, and multicast listener reports.
        let unspecified = ip == 0;
        let joins = matches!(kind, NEIGHBOUR_SOLICITATION | ROUTER_SOLICITATION | 131 | 132 | 143);
        let has_ip = if unspecified { joins && !self.rules.v6.is_empty() } else { self.has_v6(ip) };
        if self.rules.locks_ip && !has_ip {
            return Err(Refusal::Ip);
        }
        match kind {
            ROUTER_SOLICITATION => self.link_layer(at + 8).map(drop),
            NEIGHBOUR_SOLICITATION => {
                let has_source = self.link_layer(at + 24)?;
                let target = self.target(at)?;
                let lacks_source = self.rules.locks_ip && !has_source;
                match unspecified {
                    // Duplicate address detection has no source link-layer address (RFC 4861, 4.3).
                    true if has_source || !self.has_v6(target) => Err(Refusal::Nd),
                    false if lacks_source => Err(Refusal::Nd),
                    _ => Ok(()),
                }
            }
            NEIGHBOUR_ADVERTISEMENT => {
                self.link_layer(at + 24)?;
                let is_own = !self.rules.locks_ip || self.target(at)? == ip;
                if is_own { Ok(()) } else { Err(Refusal::Nd) }
            }
            _ => Ok(()),
        }
    }

    fn target(&self, at: usize) -> Result<u128, Refusal> {
        address_v6(self.head, at + 8).ok_or(Refusal::Unchecked)
    }

    /// Checks the link-layer addresses in the options from `at` on; returns whether there is one.
    fn link_layer(&self, mut at: usize) -> Result<bool, Refusal> {
        let payload = be16(self.head, self.at + 4).ok_or(Refusal::Unchecked)?;
        let end = (self.at + 40 + usize::from(payload)).min(self.len as usize);
        let mut found = false;
        while at < end {
            let [kind, words] =
                *self.head.get(at..).and_then(|b| b.first_chunk()).unwrap_or(&[0; 2]);
            if words == 0 {
                return Err(Refusal::Unchecked);
            }
            // Source, or target, link-layer address.
            if matches!(kind, 1 | 2) {
                let mac = self.head.get(at + 2..).and_then(|b| b.first_chunk());
                let mac = *mac.ok_or(Refusal::Unchecked)?;
                if words != 1 || !self.is_own(mac) {
                    return Err(Refusal::Nd);
                }
                found = true;
            }
            at += usize::from(words) * 8;
        }
        Ok(found)
    }

    /// Source address and upper-layer header; `None`: malformed or beyond the head.
    fn v4(&self) -> Option<(u32, Upper)> {
        let (head, at) = (self.head, self.at);
        let first = *head.get(at)?;
        let header_len = usize::from(first & 15) * 4;
        if first >> 4 != 4 || header_len < 20 {
            return None;
        }
        let (fragment, proto) = (be16(head, at + 6)?, *head.get(at + 9)?);
        let upper = match fragment & 0x1fff {
            0 => Upper::At { proto, at: at + header_len, fragment: fragment & 0x2000 != 0 },
            _ => Upper::Earlier { proto },
        };
        Some((be32(head, at + 12)?, upper))
    }

    /// The same for IPv6.
    fn v6(&self) -> Option<(u128, Upper)> {
        let head = self.head;
        if *head.get(self.at)? >> 4 != 6 {
            return None;
        }
        let src = address_v6(head, self.at + 8)?;
        let (mut proto, mut at, mut fragment) = (*head.get(self.at + 6)?, self.at + 40, false);
        for _ in 0..EXTENSIONS_MAX {
            let units = || head.get(at + 1).map(|len| usize::from(*len));
            let len = match proto {
                // Hop-by-hop, routing, destination options, mobility, host identity, shim6.
                0 | 43 | 60 | 135 | 139 | 140 => (units()? + 1) * 8,
                // Authentication (RFC 4302, 2.2).
                51 => (units()? + 2) * 4,
                44 if fragment => return None,
                44 => {
                    fragment = true;
                    if be16(head, at + 2)? & 0xfff8 != 0 {
                        return Some((src, Upper::Earlier { proto: *head.get(at)? }));
                    }
                    8
                }
                _ => return Some((src, Upper::At { proto, at, fragment })),
            };
            proto = *head.get(at)?;
            at += len;
        }
        None
    }
}

/// 24 bytes as words in memory order.
#[inline]
fn words(bytes: &[u8; 24]) -> [u64; 3] {
    let word = |at| bytes[at..].first_chunk().map_or(0, |word| u64::from_ne_bytes(*word));
    [word(0), word(8), word(16)]
}

/// The link-local address of an interface (RFC 4291, appendix A).
fn link_local([a, b, c, d, e, f]: [u8; 6]) -> u128 {
    let id = u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f]);
    0xfe80 << 112 | u128::from(id)
}

fn address_v6(head: &[u8], at: usize) -> Option<u128> {
    Some(u128::from_be_bytes(*head.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests;
