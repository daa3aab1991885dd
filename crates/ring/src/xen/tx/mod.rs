//! The tx ring: what a guest sends.
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
    /// Where in the page.
    pub offset: u16,
    /// Bytes.
    pub len: u16,
}

/// What the packet is that [`BackTx::take`] took. Each is answered with one
/// [`put`](BackTx::put).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packet {
    /// A frame: its bytes lie in the slots.
    Frame,
    /// No frame: a change of the guest's list of multicast addresses. OKAY, or ERROR where the
    /// list is full.
    Multicast(Multicast),
    /// To be answered with ERROR.
    Refused(Refusal),
}

/// A change of the list of multicast addresses that a guest wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Multicast {
    /// It wants this one.
    Add([u8; 6]),
    /// It no longer does.
    Del([u8; 6]),
}

/// Why a packet is refused, though the ring is in order.
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

/// A packet, copied out and checked. Made once and used for every [`BackTx::take`].
#[derive(Clone, Debug, Default)]
pub struct TxPacket {
    /// [`tx_flag`](super::tx_flag)s of its first request.
    pub flags: u16,
    /// Bytes of all its buffers.
    pub len: u16,
    /// Ring slots it occupies, those of extra infos and empty ones included.
    pub ring_slots: u32,
    /// How to cut it, size and type checked.
    pub gso: Option<Gso>,
    /// The hash the guest calculated.
    pub hash: Option<Hash>,
    multicast: Option<Multicast>,
    slots: [TxSlot; SLOTS_MAX],
    count: usize,
}

impl TxPacket {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// The buffers of its bytes, in order; none of them empty.
    #[inline]
    pub fn slots(&self) -> &[TxSlot] {
        &self.slots[..self.count]
    }

    /// As before the first use, but for slots that `count` does not count.
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

    /// Of several extra infos of one type the last one counts; an addition to the multicast list
    /// before a deletion, as in Linux.
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
