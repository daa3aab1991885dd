//! Addresses, VLAN and flow of a frame, from its private head.
//!
//! Everything here reads the private copy of the first [`HEAD_LEN`](crate::frame::HEAD_LEN) bytes,
//! never guest memory, and accepts any bytes and any length: a short head is hashed as far as it
//! goes. Lengths beyond the head and checksums are not verified.

/// EtherType of an 802.1Q tag.
pub const ETHERTYPE_VLAN: u16 = 0x8100;
/// EtherType of an 802.1ad service tag (the outer tag of QinQ).
pub const ETHERTYPE_QINQ: u16 = 0x88a8;
/// EtherType of IPv4.
pub const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of IPv6.
pub const ETHERTYPE_IPV6: u16 = 0x86dd;

/// IP protocol number of TCP.
pub(crate) const PROTO_TCP: u8 = 6;
/// IP protocol number of UDP.
pub(crate) const PROTO_UDP: u8 = 17;

/// Most VLAN tags skipped.
const TAGS_MAX: usize = 2;
/// Most IPv6 extension headers skipped.
const EXTENSIONS_MAX: usize = 8;

/// Destination MAC; `None` if the head is shorter than that.
#[inline]
pub fn dst_mac(head: &[u8]) -> Option<[u8; 6]> {
    head.first_chunk().copied()
}

/// Source MAC; `None` if the head is shorter than that.
#[inline]
pub fn src_mac(head: &[u8]) -> Option<[u8; 6]> {
    head.get(6..)?.first_chunk().copied()
}

/// VLAN id of the outermost tag, 802.1Q or 802.1ad; 0 for a frame without one, and for a priority
/// tag, whose id is 0 (IEEE 802.1Q, 9.6).
#[inline]
pub fn vlan_id(head: &[u8]) -> u16 {
    match be16(head, 12) {
        Some(ETHERTYPE_VLAN | ETHERTYPE_QINQ) => be16(head, 14).unwrap_or(0) & 0xfff,
        _ => 0,
    }
}

/// Whether `mac` is a group address: multicast or broadcast.
#[inline]
pub fn is_multicast(mac: [u8; 6]) -> bool {
    mac[0] & 1 != 0
}

/// Whether `mac` is one of 01:80:c2:00:00:00 to 0f, which a bridge must not forward (IEEE 802.1Q,
/// table 8-1).
#[inline]
pub fn is_link_local(mac: [u8; 6]) -> bool {
    mac[..5] == [0x01, 0x80, 0xc2, 0, 0] && mac[5] < 16
}

/// Hash of the frame's flow, the same in both directions, to select a queue.
///
/// IPv4 and IPv6: addresses and protocol, and ports for protocols that begin with them (TCP, UDP,
/// DCCP, SCTP, UDP-Lite). Fragments: addresses only, as all but the first lack ports. Anything
/// else: MACs and EtherType. VLAN tags are ignored. All frames of a flow have the same hash, so a
/// flow stays in one queue and is never reordered; the one exception is a flow with both fragmented
/// and whole datagrams, which may use two queues.
///
/// `key` prevents guests from choosing collisions.
pub fn flow_hash(head: &[u8], key: u64) -> u32 {
    let keys = [
        key ^ 0x9e37_79b9_7f4a_7c15,
        key.rotate_left(23) ^ 0xd1b5_4a32_d192_ed03,
        key.rotate_left(41) ^ 0x8ebc_6af0_9c88_c6e3,
    ];
    let (from, to, common) = endpoints(head);
    // A sum is the same for both directions, and unlike XOR not 0 when both ends are equal.
    let both = from.hash(keys).wrapping_add(to.hash(keys));
    let hash = fold_mul(both ^ common, keys[2]);
    (hash >> 32) as u32 ^ hash as u32
}

/// `csum_start` and `csum_offset` of a TCP or UDP frame, as for a partial checksum. `None` for
/// anything else, fragments included.
pub fn csum_place(head: &[u8]) -> Option<(u16, u16)> {
    let (at, offset) = match transport(head, &network(head)?) {
        Transport::At { proto: PROTO_TCP, at } => (at, 16),
        Transport::At { proto: PROTO_UDP, at } => (at, 6),
        _ => return None,
    };
    Some((u16::try_from(at).ok()?, offset))
}

/// A reverse ARP request, 60 bytes: it shows a network where `mac` is now (RFC 903).
pub fn rarp(mac: [u8; 6]) -> [u8; 60] {
    let mut frame = [0_u8; 60];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac);
    // EtherType RARP; Ethernet, IPv4, lengths 6 and 4, operation 3: request reverse.
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac);
    frame[32..38].copy_from_slice(&mac);
    frame
}

/// One end of a flow.
#[derive(Default)]
struct End {
    address: [u64; 2],
    port: u16,
}

impl End {
    #[inline]
    fn hash(&self, keys: [u64; 3]) -> u64 {
        let address = fold_mul(self.address[0] ^ keys[0], self.address[1] ^ keys[1]);
        fold_mul(address ^ u64::from(self.port), keys[2])
    }
}

/// Both ends of the frame's flow, and their common part.
fn endpoints(head: &[u8]) -> (End, End, u64) {
    let Some(net) = network(head) else {
        return mac_endpoints(head, 0);
    };
    let Some((mut from, mut to)) = ip_endpoints(head, &net) else {
        return mac_endpoints(head, net.ethertype);
    };
    let proto = match transport(head, &net) {
        Transport::At { proto, at } => {
            // DCCP 33, SCTP 132, UDP-Lite 136.
            if matches!(proto, PROTO_TCP | PROTO_UDP | 33 | 132 | 136) {
                from.port = be16(head, at).unwrap_or(0);
                to.port = be16(head, at + 2).unwrap_or(0);
            }
            proto
        }
        Transport::Fragment | Transport::Unknown => 0,
    };
    (from, to, u64::from(net.ethertype) << 8 | u64::from(proto))
}

fn ip_endpoints(head: &[u8], net: &Network) -> Option<(End, End)> {
    let at = net.at;
    let end = |address| End { address, port: 0 };
    match net.ethertype {
        ETHERTYPE_IPV4 => {
            let address = |at| Some([0, u64::from(be32(head, at)?)]);
            Some((end(address(at + 12)?), end(address(at + 16)?)))
        }
        ETHERTYPE_IPV6 => {
            let address = |at| Some([be64(head, at)?, be64(head, at + 8)?]);
            Some((end(address(at + 8)?), end(address(at + 24)?)))
        }
        _ => None,
    }
}

fn mac_endpoints(head: &[u8], ethertype: u16) -> (End, End, u64) {
    let end = |mac: Option<[u8; 6]>| {
        let [a, b, c, d, e, f] = mac.unwrap_or_default();
        End { address: [1, u64::from_be_bytes([0, 0, a, b, c, d, e, f])], port: 0 }
    };
    (end(src_mac(head)), end(dst_mac(head)), u64::from(ethertype))
}

/// Network header, after the MACs and tags.
pub(crate) struct Network {
    /// EtherType after the tags.
    pub ethertype: u16,
    /// Offset of the network header.
    pub at: usize,
}

/// Finds the network header after at most two VLAN tags.
#[inline]
pub(crate) fn network(head: &[u8]) -> Option<Network> {
    let mut at = 12;
    for _ in 0..TAGS_MAX {
        match be16(head, at)? {
            ETHERTYPE_VLAN | ETHERTYPE_QINQ => at += 4,
            ethertype => return Some(Network { ethertype, at: at + 2 }),
        }
    }
    Some(Network { ethertype: be16(head, at)?, at: at + 2 })
}

/// Transport header, after the IP header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    /// A header of this protocol, at this offset; possibly beyond the end of the head.
    At { proto: u8, at: usize },
    /// A fragment of a datagram.
    Fragment,
    /// Not IP, or malformed, or the head is too short.
    Unknown,
}

/// Finds the transport header after IPv4 options or a bounded number of IPv6 extension headers.
pub(crate) fn transport(head: &[u8], net: &Network) -> Transport {
    let found = match net.ethertype {
        ETHERTYPE_IPV4 => transport_v4(head, net.at),
        ETHERTYPE_IPV6 => transport_v6(head, net.at),
        _ => None,
    };
    found.unwrap_or(Transport::Unknown)
}

fn transport_v4(head: &[u8], at: usize) -> Option<Transport> {
    let first = *head.get(at)?;
    let header_len = usize::from(first & 15) * 4;
    if first >> 4 != 4 || header_len < 20 {
        return None;
    }
    // More fragments, or an offset.
    if be16(head, at + 6)? & 0x3fff != 0 {
        return Some(Transport::Fragment);
    }
    Some(Transport::At { proto: *head.get(at + 9)?, at: at + header_len })
}

fn transport_v6(head: &[u8], at: usize) -> Option<Transport> {
    if *head.get(at)? >> 4 != 6 {
        return None;
    }
    let (mut proto, mut at) = (*head.get(at + 6)?, at + 40);
    for _ in 0..EXTENSIONS_MAX {
        match proto {
            // Hop-by-hop options, routing, destination options (RFC 8200, 4).
            0 | 43 | 60 => {
                proto = *head.get(at)?;
                at += (usize::from(*head.get(at + 1)?) + 1) * 8;
            }
            44 => return Some(Transport::Fragment),
            _ => return Some(Transport::At { proto, at }),
        }
    }
    None
}

/// Two bytes in network order.
#[inline]
pub(crate) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Four bytes in network order.
#[inline]
pub(crate) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[inline]
fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// Folds the two halves of a product: every bit of either factor affects the middle of the result.
#[inline]
pub(crate) fn fold_mul(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product >> 64) as u64 ^ product as u64
}

#[cfg(test)]
mod tests;
