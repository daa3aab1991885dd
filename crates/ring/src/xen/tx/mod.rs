//! Tx ring: the packets that a guest sends.
//!
//! ```text
//!   first request   [extra info]...   later request ...
//!   total size                        own size           first's own = total - sum of later
//! ```
//! Each slot is answered: data with its id, extra infos with NULL.

mod back;
mod front;

pub use back::BackTx;
pub use front::FrontTx;

use super::wire::{Extra, Gso, Hash};
use super::{Malformed, SLOTS_MAX, gso_type};

/// One buffer of a packet; never empty, never beyond its page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TxSlot {
    /// Grant of the page.
    pub gref: u32,
    /// Offset in the page.
    pub offset: u16,
    /// Length in bytes.
    pub len: u16,
}

/// Kind of packet that [`BackTx::take`] took. Each is answered with one [`put`](BackTx::put).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packet {
    /// A frame: its bytes are in the slots.
    Frame,
    /// Not a frame: a change of the guest's multicast list. Answered OKAY, or ERROR if the list is
    /// full.
    Multicast(Multicast),
    /// Refused; to be answered with ERROR.
    Refused(Refusal),
}

/// A change of the guest's list of multicast addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Multicast {
    /// Add this address.
    Add([u8; 6]),
    /// Remove this address.
    Del([u8; 6]),
}

/// Reason to refuse a packet on an intact ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// More than [`SLOTS_MAX`] buffers.
    Slots,
    /// More than [`EXTRAS_MAX`](super::EXTRAS_MAX) extra infos.
    Extras,
    /// A later buffer is larger than what remains of the packet: a front half's sum of sizes
    /// overflowed.
    Size,
    /// Shorter than an Ethernet header.
    Short,
}

/// A packet, copied out and checked. Allocated once and reused by every [`BackTx::take`].
#[derive(Clone, Debug, Default)]
pub struct TxPacket {
    /// [`tx_flag`](super::tx_flag)s of its first request.
    pub flags: u16,
    /// Bytes of all its buffers.
    pub len: u16,
    /// Ring slots it occupies, those of extra infos and empty ones included.
    pub ring_slots: u32,
    /// Segmentation, with size and type checked.
    pub gso: Option<Gso>,
    /// The hash the guest calculated.
    pub hash: Option<Hash>,
    multicast: Option<Multicast>,
    slots: [TxSlot; SLOTS_MAX],
    count: usize,
}

impl TxPacket {
    /// Creates an empty packet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The buffers with its bytes, in order; none is empty.
    #[inline]
    pub fn slots(&self) -> &[TxSlot] {
        &self.slots[..self.count]
    }

    /// Resets to the empty packet; slots beyond `count` keep stale contents.
    #[inline]
    fn clear(&mut self) {
        (self.flags, self.len, self.ring_slots, self.count) = (0, 0, 0, 0);
        (self.gso, self.hash, self.multicast) = (None, None, None);
    }

    #[inline]
    fn push(&mut self, slot: TxSlot) {
        self.slots[self.count] = slot;
        self.count += 1;
    }

    /// Adds an extra info. Of several of one type the last one counts; an addition to the multicast
    /// list before a deletion, as in Linux.
    fn extra(&mut self, extra: Extra) {
        match extra {
            Extra::Gso(gso) => self.gso = Some(gso),
            Extra::McastAdd(addr) => self.multicast = Some(Multicast::Add(addr)),
            Extra::McastDel(addr) => {
                if !matches!(self.multicast, Some(Multicast::Add(_))) {
                    self.multicast = Some(Multicast::Del(addr));
                }
            }
            Extra::Hash(hash) => self.hash = Some(hash),
        }
    }

    fn check_gso(&self) -> Result<(), Malformed> {
        match self.gso {
            Some(Gso { size: 0, .. }) => Err(Malformed::GsoSize),
            Some(Gso { kind, .. }) if kind != gso_type::TCPV4 && kind != gso_type::TCPV6 => {
                Err(Malformed::GsoType(kind))
            }
            _ => Ok(()),
        }
    }
}
