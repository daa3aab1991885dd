//! Wire format of the slots (Xen's `io/netif.h`), with its constants.
//!
//! A slot is read into words once and decoded from these; it is written as whole words. No struct
//! is copied in its memory layout, so no padding can leak to a peer.

use super::{lo16, lo32};

/// Flags of a [`TxRequest`] (`NETTXF_*`).
pub mod tx_flag {
    /// The protocol checksum holds only the pseudo-header's sum; the receiver must complete it.
    pub const CSUM_BLANK: u16 = 1 << 0;
    /// The data has been validated against its protocol checksum.
    pub const DATA_VALIDATED: u16 = 1 << 1;
    /// The packet continues in the next request.
    pub const MORE_DATA: u16 = 1 << 2;
    /// Extra infos follow this first request.
    pub const EXTRA_INFO: u16 = 1 << 3;
}

/// Flags of an [`RxResponse`] (`NETRXF_*`). The first two are swapped against [`tx_flag`].
pub mod rx_flag {
    /// The data has been validated against its protocol checksum.
    pub const DATA_VALIDATED: u16 = 1 << 0;
    /// The protocol checksum holds only the pseudo-header's sum.
    pub const CSUM_BLANK: u16 = 1 << 1;
    /// The packet continues in the next response.
    pub const MORE_DATA: u16 = 1 << 2;
    /// Extra infos follow this first response.
    pub const EXTRA_INFO: u16 = 1 << 3;
    /// Deprecated: the response is a GSO prefix, not data.
    pub const GSO_PREFIX: u16 = 1 << 4;
}

/// Status of a response (`NETIF_RSP_*`).
pub mod status {
    /// Sent.
    pub const OKAY: i16 = 0;
    /// Not sent: the packet is invalid.
    pub const ERROR: i16 = -1;
    /// Not sent, though the packet is valid.
    pub const DROPPED: i16 = -2;
    /// No response at all: fills the slot of an extra info.
    pub const NULL: i16 = 1;
}

/// Types of GSO packets (`XEN_NETIF_GSO_TYPE_*`).
pub mod gso_type {
    /// TCP segments over IPv4.
    pub const TCPV4: u8 = 1;
    /// TCP segments over IPv6.
    pub const TCPV6: u8 = 2;
}

/// Requests of the control ring (`XEN_NETIF_CTRL_TYPE_*`).
pub mod ctrl_type {
    /// Query the supported hash types.
    pub const GET_HASH_FLAGS: u16 = 1;
    /// Set the hash types to calculate.
    pub const SET_HASH_FLAGS: u16 = 2;
    /// Set the hash key.
    pub const SET_HASH_KEY: u16 = 3;
    /// Query the maximum size of the table from hash to queue.
    pub const GET_HASH_MAPPING_SIZE: u16 = 4;
    /// Set the size of that table.
    pub const SET_HASH_MAPPING_SIZE: u16 = 5;
    /// Set entries of that table.
    pub const SET_HASH_MAPPING: u16 = 6;
    /// Set the hash algorithm.
    pub const SET_HASH_ALGORITHM: u16 = 7;
    /// Query how many grants of a queue may stay mapped.
    pub const GET_GREF_MAPPING_SIZE: u16 = 8;
    /// Map grants and keep them mapped.
    pub const ADD_GREF_MAPPING: u16 = 9;
    /// Unmap such grants.
    pub const DEL_GREF_MAPPING: u16 = 10;
}

/// Status of a control response (`XEN_NETIF_CTRL_STATUS_*`).
pub mod ctrl_status {
    /// Done.
    pub const SUCCESS: u32 = 0;
    /// The operation is not supported.
    pub const NOT_SUPPORTED: u32 = 1;
    /// The operation is supported, its parameter is not.
    pub const INVALID_PARAMETER: u32 = 2;
    /// More entries than the back half can hold.
    pub const BUFFER_OVERFLOW: u32 = 3;
}

/// Bytes of one tx slot.
pub const TX_SLOT_LEN: usize = 12;
/// Bytes of one rx slot.
pub const RX_SLOT_LEN: usize = 8;
/// Bytes of one control slot.
pub const CTRL_SLOT_LEN: usize = 16;
/// Bytes of a granted page: what an offset and a length may span (`XEN_PAGE_SIZE`).
pub const PAGE_LEN: u16 = 4096;

/// One buffer of a packet that a guest sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxRequest {
    /// Grant of the buffer's page.
    pub gref: u32,
    /// Offset in that page.
    pub offset: u16,
    /// [`tx_flag`]s.
    pub flags: u16,
    /// The front half's identifier, echoed in the response.
    pub id: u16,
    /// Length in bytes: of the whole packet in its first request, of the buffer in later ones.
    pub size: u16,
}

impl TxRequest {
    /// Decodes the three words of a slot.
    #[inline]
    pub(super) const fn decode(words: [u32; 3]) -> Self {
        let [gref, place, name] = words;
        let (offset, flags) = (lo16(place), lo16(place >> 16));
        Self { gref, offset, flags, id: lo16(name), size: lo16(name >> 16) }
    }

    /// Encodes the three words of its slot.
    #[inline]
    pub(super) fn encode(self) -> [u32; 3] {
        [self.gref, pair(self.offset, self.flags), pair(self.id, self.size)]
    }

    /// Whether its buffer, with a length of `size` bytes, crosses the end of its page.
    #[inline]
    pub(super) fn crosses_page(&self, size: u16) -> bool {
        u32::from(self.offset) + u32::from(size) > u32::from(PAGE_LEN)
    }
}

/// Response to one [`TxRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TxResponse {
    /// Same as in the request.
    pub id: u16,
    /// A [`status`].
    pub status: i16,
}

impl TxResponse {
    #[inline]
    pub(super) const fn decode(word: u32) -> Self {
        Self { id: lo16(word), status: signed(lo16(word >> 16)) }
    }

    #[inline]
    pub(super) fn encode(self) -> u32 {
        pair(self.id, unsigned(self.status))
    }
}

/// A page that a guest posts to receive into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxRequest {
    /// The front half's identifier, echoed in the response.
    pub id: u16,
    /// Grant of the page.
    pub gref: u32,
}

impl RxRequest {
    #[inline]
    pub(super) const fn decode(word: u64) -> Self {
        Self { id: lo16(lo32(word)), gref: lo32(word >> 32) }
    }

    #[inline]
    pub(super) fn encode(self) -> u64 {
        u64::from(self.id) | u64::from(self.gref) << 32
    }
}

/// Response to one [`RxRequest`]: what was put into its page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxResponse {
    /// Same as in the request of this slot.
    pub id: u16,
    /// Offset of the bytes in the page.
    pub offset: u16,
    /// [`rx_flag`]s.
    pub flags: u16,
    /// Number of bytes in this page, or, if negative, a [`status`].
    pub status: i16,
}

impl RxResponse {
    #[inline]
    pub(super) const fn decode(word: u64) -> Self {
        let (first, second) = (lo32(word), lo32(word >> 32));
        Self {
            id: lo16(first),
            offset: lo16(first >> 16),
            flags: lo16(second),
            status: signed(lo16(second >> 16)),
        }
    }

    #[inline]
    pub(super) fn encode(self) -> u64 {
        let first = pair(self.id, self.offset);
        let second = pair(self.flags, unsigned(self.status));
        u64::from(first) | u64::from(second) << 32
    }
}

/// Extra info of a packet, in a slot between its first and later requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extra {
    /// The packet must be segmented.
    Gso(Gso),
    /// Not a packet: the guest joins this multicast address.
    McastAdd([u8; 6]),
    /// Not a packet: the guest leaves this multicast address.
    McastDel([u8; 6]),
    /// The packet's hash.
    Hash(Hash),
}

/// Segmentation of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gso {
    /// Payload of each segment, in bytes.
    pub size: u16,
    /// A [`gso_type`].
    pub kind: u8,
    /// `XEN_NETIF_GSO_FEAT_*`; none are defined yet.
    pub features: u16,
}

/// A packet's hash, which saves the peer its calculation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hash {
    /// Hash type, as its bit number.
    pub kind: u8,
    /// Hash algorithm.
    pub algorithm: u8,
    /// Hash value.
    pub value: u32,
}

/// Types of extra infos on the wire (`XEN_NETIF_EXTRA_TYPE_*`).
const EXTRA_GSO: u8 = 1;
const EXTRA_MCAST_ADD: u8 = 2;
const EXTRA_MCAST_DEL: u8 = 3;
const EXTRA_HASH: u8 = 4;
/// `XEN_NETIF_EXTRA_FLAG_MORE`.
const EXTRA_MORE: u8 = 1;

impl Extra {
    /// Decodes the first 8 bytes of a slot: the extra info, and whether another follows it.
    ///
    /// # Errors
    /// The type, if it is unknown.
    #[inline]
    pub(super) const fn decode(word: u64) -> Result<(Self, bool), u8> {
        let [kind, flags, a, b, c, d, e, f] = word.to_le_bytes();
        let extra = match kind {
            EXTRA_GSO => {
                let (size, features) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([e, f]));
                Self::Gso(Gso { size, kind: c, features })
            }
            EXTRA_MCAST_ADD => Self::McastAdd([a, b, c, d, e, f]),
            EXTRA_MCAST_DEL => Self::McastDel([a, b, c, d, e, f]),
            EXTRA_HASH => {
                let value = u32::from_le_bytes([c, d, e, f]);
                Self::Hash(Hash { kind: a, algorithm: b, value })
            }
            unknown => return Err(unknown),
        };
        Ok((extra, flags & EXTRA_MORE != 0))
    }

    /// Encodes the 8 bytes of its slot; `more`: another extra info follows it.
    #[inline]
    pub(super) fn encode(self, more: bool) -> u64 {
        let (kind, [a, b, c, d, e, f]) = match self {
            Self::Gso(Gso { size, kind, features }) => {
                let ([a, b], [e, f]) = (size.to_le_bytes(), features.to_le_bytes());
                (EXTRA_GSO, [a, b, kind, 0, e, f])
            }
            Self::McastAdd(addr) => (EXTRA_MCAST_ADD, addr),
            Self::McastDel(addr) => (EXTRA_MCAST_DEL, addr),
            Self::Hash(Hash { kind, algorithm, value }) => {
                let [c, d, e, f] = value.to_le_bytes();
                (EXTRA_HASH, [kind, algorithm, c, d, e, f])
            }
        };
        u64::from_le_bytes([kind, if more { EXTRA_MORE } else { 0 }, a, b, c, d, e, f])
    }
}

/// A query or command of the front half on the control ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CtrlRequest {
    /// The front half's identifier, echoed in the response.
    pub id: u16,
    /// A [`ctrl_type`].
    pub kind: u16,
    /// Meaning depends on the type.
    pub data: [u32; 3],
}

impl CtrlRequest {
    #[inline]
    pub(super) fn decode(first: u64, second: u64) -> Self {
        let head = lo32(first);
        let data = [lo32(first >> 32), lo32(second), lo32(second >> 32)];
        Self { id: lo16(head), kind: lo16(head >> 16), data }
    }

    #[inline]
    pub(super) fn encode(self) -> (u64, u64) {
        let [a, b, c] = self.data.map(u64::from);
        (u64::from(pair(self.id, self.kind)) | a << 32, b | c << 32)
    }
}

/// Response to a [`CtrlRequest`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CtrlResponse {
    /// Same as in the request.
    pub id: u16,
    /// Same as in the request.
    pub kind: u16,
    /// A [`ctrl_status`].
    pub status: u32,
    /// Meaning depends on the type.
    pub data: u32,
}

impl CtrlResponse {
    #[inline]
    pub(super) const fn decode(first: u64, data: u32) -> Self {
        let head = lo32(first);
        Self { id: lo16(head), kind: lo16(head >> 16), status: lo32(first >> 32), data }
    }

    #[inline]
    pub(super) fn encode(self) -> (u64, u32) {
        (u64::from(pair(self.id, self.kind)) | u64::from(self.status) << 32, self.data)
    }
}

/// Bytes of an entry of the lists of [`ctrl_type::ADD_GREF_MAPPING`] and `DEL_GREF_MAPPING`.
pub const GREF_ENTRY_LEN: usize = 8;

/// One entry of such a list (`struct xen_netif_gref`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrefEntry {
    /// The grant.
    pub gref: u32,
    /// `XEN_NETIF_CTRLF_GREF_readonly`: the back half may not write to it.
    pub readonly: bool,
    /// Written by the back half: a [`ctrl_status`].
    pub status: u16,
}

impl GrefEntry {
    /// Decodes the 8 bytes of an entry.
    pub fn decode(bytes: [u8; GREF_ENTRY_LEN]) -> Self {
        let word = u64::from_le_bytes(bytes);
        let rest = lo32(word >> 32);
        Self { gref: lo32(word), readonly: rest & 1 != 0, status: lo16(rest >> 16) }
    }

    /// Encodes the 8 bytes of an entry.
    pub fn encode(self) -> [u8; GREF_ENTRY_LEN] {
        let rest = pair(u16::from(self.readonly), self.status);
        (u64::from(self.gref) | u64::from(rest) << 32).to_le_bytes()
    }
}

/// Slots of a ring of `len` bytes after its header, rounded down to a power of two (`__RING_SIZE`).
pub(super) fn ring_size(len: usize, slot_len: usize) -> u32 {
    let slots = len.saturating_sub(super::page::SLOTS) / slot_len;
    let slots = u32::try_from(slots).unwrap_or(u32::MAX);
    slots.checked_ilog2().map_or(0, |log| 1 << log)
}

/// Joins two halves of a word, the low one first.
#[inline]
fn pair(low: u16, high: u16) -> u32 {
    u32::from(low) | u32::from(high) << 16
}

#[inline]
const fn signed(bits: u16) -> i16 {
    i16::from_le_bytes(bits.to_le_bytes())
}

#[inline]
const fn unsigned(value: i16) -> u16 {
    u16::from_le_bytes(value.to_le_bytes())
}
