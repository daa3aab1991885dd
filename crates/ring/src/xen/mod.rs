//! Rings of Xen's netif (`io/netif.h` and `io/ring.h`): tx, rx and control, both halves of each.
//!
//! ```text
//!        front half (guest, nic, gen)                    back half (the switch's ports)
//!   add, post ──▶ publish ──▶ notify_needed ── event ──▶  take ──▶ (copy) ──▶ put ──▶ publish
//!   take ◀───────────────────────── event ◀── notify_needed ◀───────────────────────────┘
//! ```
//!
//! `tx` and `rx` are as the guest sees them. Requests and responses share slots: a response goes
//! into a slot whose request has been taken. Ours always use the slot of their own request, in
//! order. That serves a front half that asserts the order (FreeBSD's) and one that finds buffers by
//! slot (Linux's), and after a back half's death the indices hold its whole state, unless it died
//! while it wrote responses: for that case it has a [`Ledger`].
//!
//! Polling needs no negotiation: a half that does not advance its *event* is not notified. `disarm`
//! relies on that and writes nothing; the peer passes a stale event once in 2^32.
//!
//! This module does not map or copy grants, does not use xenstore, and has no clock.

mod ctrl;
mod ledger;
mod page;
mod rx;
mod tx;
mod wire;

use std::fmt;

use crate::bits::{index, lo32};

pub use crate::Armed;
pub use ctrl::{BackCtrl, FrontCtrl};
pub use ledger::Ledger;
pub use page::SmartPoll;
pub use rx::{BackRx, FrontRx, RxPacket, RxRefusal, RxSlot};
pub use tx::{BackTx, FrontTx, Multicast, Packet, Refusal, TxPacket, TxSlot};
pub use wire::{
    CTRL_SLOT_LEN, CtrlRequest, CtrlResponse, Extra, GREF_ENTRY_LEN, GrefEntry, Gso, Hash,
    PAGE_LEN, RX_SLOT_LEN, RxRequest, RxResponse, TX_SLOT_LEN, TxRequest, TxResponse, ctrl_status,
    ctrl_type, gso_type, rx_flag, status, tx_flag,
};

/// Data slots of one packet that any back half accepts (`XEN_NETIF_NR_SLOTS_MIN`): the most that a
/// front half uses.
pub const SLOTS_PORTABLE: usize = 18;
/// Data slots of one packet that our back half accepts, as Linux's does.
pub const SLOTS_MAX: usize = 19;
/// Data slots from which a guest is treated as malicious; counts between the two get ERROR.
pub const SLOTS_FATAL: usize = 22;
/// Extra infos of one packet; a packet with more is refused.
pub const EXTRAS_MAX: usize = 18;

/// Reason why a back half cannot attach to a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachError {
    /// The area holds not even one slot.
    TooSmall,
    /// More requests than the ring holds: not a ring, or an overwritten one.
    Overflow {
        /// The front half's index.
        req_prod: u32,
        /// The back half's index.
        rsp_prod: u32,
        /// Largest legal distance between the two.
        size: u32,
    },
}

impl fmt::Display for AttachError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooSmall => write!(f, "the ring's page has no room for a slot"),
            Self::Overflow { req_prod, rsp_prod, size } => write!(
                f,
                "the ring has requests up to {req_prod} and responses up to {rsp_prod}, \
                 further apart than its {size} slots: the page granted is not a ring of netif"
            ),
        }
    }
}

impl std::error::Error for AttachError {}

/// A protocol violation by the peer. The ring must be stopped and its vif marked faulty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// `req_prod` moved by more than the ring holds, counting unanswered requests, or moved back.
    ReqProd {
        /// Index seen.
        seen: u32,
        /// Index up to which entries were taken.
        taken: u32,
    },
    /// A buffer that crosses the end of its page.
    CrossesPage {
        /// Where it begins.
        offset: u16,
        /// Its length in bytes.
        size: u16,
    },
    /// A packet of [`SLOTS_FATAL`] buffers.
    TooManySlots,
    /// A packet that fills the ring without an end marker, such as an unterminated list of extra
    /// infos.
    Endless,
    /// An extra info of an unknown type.
    ExtraType(u8),
    /// A GSO packet with a segment size of 0.
    GsoSize,
    /// A GSO packet of an unknown type.
    GsoType(u8),
    /// (Front half) `rsp_prod` moved past the requests made, or moved back.
    RspProd {
        /// Index seen.
        seen: u32,
        /// Index up to which entries were taken.
        taken: u32,
    },
    /// (Front half) a response to an id that is not in flight.
    ResponseId(u16),
    /// (Front half) more NULL responses than there were extra infos.
    NullResponse,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ReqProd { seen, taken } => {
                write!(f, "req_prod jumped to {seen}, with requests taken up to {taken}")
            }
            Self::CrossesPage { offset, size } => {
                write!(f, "a buffer of {size} bytes at {offset} crosses the end of its page")
            }
            Self::TooManySlots => write!(f, "a packet of {SLOTS_FATAL} slots or more"),
            Self::Endless => write!(f, "a packet without an end fills the whole ring"),
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
                write!(f, "the back end sent more NULL responses than there were extra infos")
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

/// Bits 0 to 15.
#[inline]
const fn lo16(word: u32) -> u16 {
    let b = word.to_le_bytes();
    u16::from_le_bytes([b[0], b[1]])
}
