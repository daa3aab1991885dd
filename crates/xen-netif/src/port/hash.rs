//! The Toeplitz hash by which a guest's received frames are spread over its queues.
//!
//! A guest sets algorithm, types, key and table over the control ring
//! ([`control`](super::control)); ports read an immutable [`Steering`]. Limits are those of Linux's
//! netback.

use ring::xen::Hash;
use serde::{Deserialize, Serialize};
use switch::port::Steer;

/// Maximum length of a key, in bytes (`XEN_NETBK_MAX_HASH_KEY_SIZE`).
pub const KEY_LEN_MAX: usize = 40;
/// Maximum length of the table from hash to queue (`XEN_NETBK_MAX_HASH_MAPPING_SIZE`).
pub const MAPPING_MAX: usize = 128;

/// Types of hash, as bits (`XEN_NETIF_CTRL_HASH_TYPE_*`).
pub mod hash_type {
    /// IPv4 source and destination address.
    pub const IPV4: u32 = 1 << 0;
    /// IPv4 addresses and TCP ports.
    pub const IPV4_TCP: u32 = 1 << 1;
    /// IPv6 source and destination address.
    pub const IPV6: u32 = 1 << 2;
    /// IPv6 addresses and TCP ports.
    pub const IPV6_TCP: u32 = 1 << 3;
    /// All types.
    pub const ALL: u32 = IPV4 | IPV4_TCP | IPV6 | IPV6_TCP;
}

/// `XEN_NETIF_CTRL_HASH_ALGORITHM_*`.
pub mod algorithm {
    /// No hash.
    pub const NONE: u8 = 0;
    /// Toeplitz.
    pub const TOEPLITZ: u8 = 1;
}

/// Spread of a guest's received frames over its queues. Immutable once published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Steering {
    /// An [`algorithm`].
    pub algorithm: u8,
    /// [`hash_type`]s to calculate.
    pub types: u32,
    /// Unset bytes are zero.
    #[serde(with = "key")]
    pub key: [u8; KEY_LEN_MAX],
    /// Queue by hash modulo the table's length; empty: the hash modulo the number of queues.
    pub mapping: Vec<u32>,
}

impl Default for Steering {
    fn default() -> Self {
        Self {
            algorithm: algorithm::NONE,
            types: 0,
            key: [0; KEY_LEN_MAX],
            mapping: Vec::with_capacity(MAPPING_MAX),
        }
    }
}

/// A key as a list of its bytes: serde has no arrays of this length.
mod key {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::KEY_LEN_MAX;

    pub(super) fn serialize<S: Serializer>(
        key: &[u8; KEY_LEN_MAX],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        key.as_slice().serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<[u8; KEY_LEN_MAX], D::Error> {
        let bytes = Vec::<u8>::deserialize(from)?;
        bytes.try_into().map_err(|_| D::Error::custom("a key has 40 bytes"))
    }
}

impl Steering {
    /// Whether its table is valid for this number of queues.
    pub fn fits(&self, queues: usize) -> bool {
        self.mapping.len() <= MAPPING_MAX
            && self.mapping.iter().all(|queue| (*queue as usize) < queues)
    }

    /// Whether the guest configured a hash; otherwise the switch selects queues.
    #[inline]
    pub fn is_set(&self) -> bool {
        self.algorithm == algorithm::TOEPLITZ && self.types != 0
    }

    /// The hash of a frame, from its first bytes in private memory; `None` if no configured type
    /// matches.
    pub fn hash(&self, head: &[u8]) -> Option<Hash> {
        if !self.is_set() {
            return None;
        }
        let (kind, input, len) = input(head, self.types)?;
        let value = toeplitz(&self.key, &input[..len]);
        Some(Hash { kind, algorithm: self.algorithm, value })
    }

    /// The queue of a frame with this hash, out of `queues`. Frames without a hash are treated as
    /// hash 0.
    pub fn queue(&self, hash: Option<Hash>, queues: u32) -> u32 {
        let value = hash.map_or(0, |hash| hash.value);
        let queues = queues.max(1);
        let Ok(len @ 1..) = u32::try_from(self.mapping.len()) else {
            return value % queues;
        };
        // Validated when set; after a reconnect with fewer queues no table is set.
        self.mapping[(value % len) as usize] % queues
    }
}

impl Steer for Steering {
    fn queue(&self, head: &[u8], queues: u16) -> u16 {
        let queue = Self::queue(self, self.hash(head), queues.into());
        u16::try_from(queue).unwrap_or(0)
    }
}

const IPPROTO_TCP: u8 = 6;
const ETHERTYPE_IPV4: u16 = 0x0800;
const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_VLAN: u16 = 0x8100;
const ETHERTYPE_QINQ: u16 = 0x88a8;
/// Length of the longest input: IPv6 addresses and ports.
const INPUT_LEN_MAX: usize = 36;

/// The type of `types` that matches the frame (its number), the input of the hash, and its length.
fn input(head: &[u8], types: u32) -> Option<(u8, [u8; INPUT_LEN_MAX], usize)> {
    let mut at = 12;
    let mut ethertype = word(head, at)?;
    for _ in 0..2 {
        if ethertype == ETHERTYPE_VLAN || ethertype == ETHERTYPE_QINQ {
            at += 4;
            ethertype = word(head, at)?;
        }
    }
    let ip = head.get(at + 2..)?;
    let (addresses, ports, with_ports, without) = match ethertype {
        ETHERTYPE_IPV4 => (ip.get(12..20)?, ipv4_ports(ip), 1_u8, 0_u8),
        ETHERTYPE_IPV6 => (ip.get(8..40)?, ipv6_ports(ip), 3, 2),
        _ => return None,
    };
    let mut input = [0; INPUT_LEN_MAX];
    let len = addresses.len();
    input[..len].copy_from_slice(addresses);
    // The most specific type that matches and is set.
    if let Some(ports) = ports.filter(|_| types & 1 << with_ports != 0) {
        input[len..len + 4].copy_from_slice(ports);
        return Some((with_ports, input, len + 4));
    }
    (types & 1 << without != 0).then_some((without, input, len))
}

/// The TCP ports; a fragment has none.
fn ipv4_ports(ip: &[u8]) -> Option<&[u8]> {
    let len = usize::from(ip.first()? & 15) * 4;
    let fragment = word(ip, 6)? & 0x3fff != 0;
    if ip[9] != IPPROTO_TCP || fragment || len < 20 {
        return None;
    }
    ip.get(len..len + 4)
}

/// The TCP ports after extension headers.
fn ipv6_ports(ip: &[u8]) -> Option<&[u8]> {
    const HOP_BY_HOP: u8 = 0;
    const ROUTING: u8 = 43;
    const DESTINATION: u8 = 60;
    let (mut next, mut at) = (*ip.get(6)?, 40);
    for _ in 0..8 {
        match next {
            IPPROTO_TCP => return ip.get(at..at + 4),
            HOP_BY_HOP | ROUTING | DESTINATION => {
                next = *ip.get(at)?;
                at += 8 + 8 * usize::from(*ip.get(at + 1)?);
            }
            _ => return None,
        }
    }
    None
}

fn word(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]))
}

/// The hash of `data`: the exclusive or, over all bits set, of the 32 key bits at that position.
/// The key is padded with zeroes.
pub fn toeplitz(key: &[u8], data: &[u8]) -> u32 {
    let byte = |i: usize| u64::from(key.get(i).copied().unwrap_or(0));
    // The key's 8 bytes from the current byte of data; the upper half is XORed for a bit.
    let mut window = (0..8).fold(0, |window, i| window << 8 | byte(i));
    let mut hash = 0;
    for (i, data) in data.iter().enumerate() {
        for bit in (0..8).rev() {
            if data >> bit & 1 != 0 {
                hash ^= window;
            }
            window <<= 1;
        }
        window |= byte(i + 8);
    }
    (hash >> 32) as u32
}

#[cfg(test)]
mod tests;
