//! Rings of Xen's netif (`io/netif.h` and `io/ring.h`): tx, rx and control, both halves of each.
//!
//! ```text
//!        front half (guest, nic, gen)                    back half (the switch's ports)
//!   add, post ──▶ publish ──▶ notify_needed ── event ──▶  take ──▶ (copy) ──▶ put ──▶ publish
//!   take ◀───────────────────────── event ◀── notify_needed ◀───────────────────────────┘
//! ```
//!
//! `tx` and `rx` are as the guest sees them. Requests and responses share slots: an answer goes
//! into a slot whose request has been taken, and ours always into the slot of its own request, in
//! order; a front half that asserts the order (FreeBSD's) or finds buffers by slot (Linux's) is
//! served alike, and a back half that dies leaves nothing behind that an index does not tell.
//!
//! Neither half ever polls because a feature said so: who leaves its *event* behind is not
//! notified. `disarm` is that, and writes nothing; the peer passes a stale event once in 2^32.
//!
//! What it does not do: it maps and copies no grant, knows no xenstore, and has no clock.

mod ctrl;
mod page;
mod rx;
mod tx;
mod wire;

use std::fmt;

pub use crate::Armed;
pub use ctrl::{BackCtrl, FrontCtrl};
pub use page::SmartPoll;
pub use rx::{BackRx, FrontRx, RxPacket, RxRefusal, RxSlot};
pub use tx::{BackTx, FrontTx, Multicast, Packet, Refusal, TxPacket, TxSlot};
pub use wire::{
    CTRL_SLOT_LEN, CtrlRequest, CtrlResponse, Extra, GREF_ENTRY_LEN, GrefEntry, Gso, Hash,
    PAGE_LEN, RX_SLOT_LEN, RxRequest, RxResponse, TX_SLOT_LEN, TxRequest, TxResponse, ctrl_status,
    ctrl_type, gso_type, rx_flag, status, tx_flag,
};

/// Data slots of one packet that any back half takes (`XEN_NETIF_NR_SLOTS_MIN`), so the most that
/// a front half uses.
pub const SLOTS_PORTABLE: usize = 18;
/// Data slots of one packet that ours takes, as Linux's does.
pub const SLOTS_MAX: usize = 19;
/// Data slots from which on a guest is not mistaken but malicious; those between are answered
/// with ERROR.
pub const SLOTS_FATAL: usize = 22;
/// Extra infos of one packet; with more it is refused.
pub const EXTRAS_MAX: usize = 18;

/// Why a back half cannot attach to a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachError {
    /// The area holds not even one slot.
    TooSmall,
    /// There are more requests than the ring holds: no ring, or one that was overwritten.
    Overflow {
        /// The front half's index.
        req_prod: u32,
        /// The back half's.
        rsp_prod: u32,
        /// What lies between them is at most this.
        size: u32,
    },
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooSmall => write!(f, "the page of the ring holds no slot"),
            Self::Overflow { req_prod, rsp_prod, size } => write!(
                f,
                "the ring has requests up to {req_prod} and responses up to {rsp_prod}, \
                 further apart than its {size} slots: the page granted is not a ring of netif"
            ),
        }
    }
}

impl std::error::Error for AttachError {}

/// A peer broke the ring protocol. The ring is to be stopped and its vif told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// `req_prod` moved by more than the ring holds, counting what is not answered, or back.
    ReqProd {
        /// Index seen.
        seen: u32,
        /// Index up to which we had taken.
        taken: u32,
    },
    /// A buffer that leaves its page.
    CrossesPage {
        /// Where it begins.
        offset: u16,
        /// Its bytes.
        size: u16,
    },
    /// A packet of [`SLOTS_FATAL`] buffers.
    TooManySlots,
    /// A packet that fills the ring and does not end: extra infos without end.
    Endless,
    /// An extra info of a type that does not exist.
    ExtraType(u8),
    /// Segments of no bytes.
    GsoSize,
    /// Segments of an unknown protocol.
    GsoType(u8),
    /// (Front half) `rsp_prod` moved by more than was asked, or back.
    RspProd {
        /// Index seen.
        seen: u32,
        /// Index up to which we had taken.
        taken: u32,
    },
    /// (Front half) a response to an id that is not in flight.
    ResponseId(u16),
    /// (Front half) more responses that tell of no buffer than there were extra infos.
    NullResponse,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ReqProd { seen, taken } => {
                write!(f, "req_prod jumped to {seen}, with requests taken up to {taken}")
            }
            Self::CrossesPage { offset, size } => {
                write!(f, "a buffer of {size} bytes at {offset} leaves its page")
            }
            Self::TooManySlots => write!(f, "a packet of {SLOTS_FATAL} slots or more"),
            Self::Endless => write!(f, "a packet without end: it fills the whole ring"),
            Self::ExtraType(kind) => write!(f, "an extra info of unknown type {kind}"),
            Self::GsoSize => write!(f, "a GSO packet with segments of 0 bytes"),
            Self::GsoType(kind) => write!(f, "a GSO packet of unknown type {kind}"),
            Self::RspProd { seen, taken } => {
                write!(f, "rsp_prod jumped to {seen}, with responses taken up to {taken}")
            }
            Self::ResponseId(id) => {
                write!(f, "the back end answered request {id}, which is not in flight")
            }
            Self::NullResponse => {
                write!(f, "the back end did not tell what became of a buffer")
            }
        }
    }
}

impl std::error::Error for Malformed {}

/// A page in a loom model, with its sync words, as both halves and the test see it.
#[cfg(loom)]
pub fn modelled_page(slots: usize, slot_len: usize) -> shm::Area {
    use page::{REQ_EVENT, REQ_PROD, RSP_EVENT, RSP_PROD, SLOTS, SMARTPOLL_ACTIVE};
    let words = [REQ_PROD, REQ_EVENT, RSP_PROD, RSP_EVENT];
    shm::Area::modelled_words(SLOTS + slots * slot_len, &[], &words, &[SMARTPOLL_ACTIVE])
}

/// An in-memory index; `u32` fits `usize` on every machine we build for.
#[inline]
fn index(i: u32) -> usize {
    usize::try_from(i).expect("usize holds 32 bits")
}

/// Bits 0 to 15.
#[inline]
const fn lo16(word: u32) -> u16 {
    let b = word.to_le_bytes();
    u16::from_le_bytes([b[0], b[1]])
}

/// Bits 0 to 31.
#[inline]
const fn lo32(word: u64) -> u32 {
    let b = word.to_le_bytes();
    u32::from_le_bytes([b[0], b[1], b[2], b[3]])
}
