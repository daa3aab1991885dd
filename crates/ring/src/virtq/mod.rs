//! Virtqueues (virtio 1.3, 2.6 to 2.8): device half and driver half, split and packed.
//!
//! ```text
//!            driver half (guest, nic, gen)            device half (the switch's ports)
//!   add ──▶ publish ──▶ kick_needed ── kick ──▶  take ──▶ (copy) ──▶ put ──▶ publish
//!   take_used ◀──────────────────────  call ◀── call_needed ◀─────────────────┘
//! ```
//!
//! The device half uses chains strictly in the order it took them, whether or not IN_ORDER was
//! negotiated: a back-end that dies can then resume from the used index alone, with no list of
//! requests in flight, and a packed ring needs no bookkeeping of skipped slots.

mod device;
mod driver;
mod indirect;
mod packed;
mod split;

pub use crate::Armed;
pub use device::{DeviceQueue, RingLog};
pub use driver::DriverQueue;
pub use indirect::IndirectPool;
pub use packed::Ledger;

use std::fmt;

use crate::bits::{index, lo32};
use crate::index::{Idx, Untrusted};

/// Largest queue size of either layout (virtio 1.3, 2.7 and 2.8).
pub const SIZE_MAX: u16 = 32768;

/// Negotiated features that change how a ring works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// VIRTIO_F_RING_PACKED.
    pub packed: bool,
    /// VIRTIO_F_EVENT_IDX; without it, the flags NO_NOTIFY and NO_INTERRUPT.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC.
    pub indirect: bool,
    /// VIRTIO_F_IN_ORDER.
    pub in_order: bool,
}

/// Location of a ring, in guest addresses. Fixed at activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Number of descriptors; split: a power of two; packed: any; at most [`SIZE_MAX`].
    pub size: u16,
    /// Descriptor table, or packed descriptor ring.
    pub desc: u64,
    /// Driver area: available ring, or driver event suppression.
    pub driver: u64,
    /// Device area: used ring, or device event suppression.
    pub device: u64,
}

/// A ring in a loom model: its areas, with their sync words, as both halves and the test see them.
#[cfg(loom)]
pub struct ModelledRing {
    /// Number of descriptors.
    pub size: u16,
    /// Area of [`Layout::desc`].
    pub desc: shm::Area,
    /// Area of [`Layout::driver`].
    pub driver: shm::Area,
    /// Area of [`Layout::device`].
    pub device: shm::Area,
}

#[cfg(loom)]
impl ModelledRing {
    /// A zeroed ring of `size`.
    pub fn new(size: u16, packed: bool) -> Self {
        use shm::Area;
        let n = usize::from(size);
        if packed {
            let flags: Vec<usize> = (0..n).map(|i| i * DESC_LEN + 14).collect();
            let event = || Area::modelled(4, &[0, 2]);
            let desc = Area::modelled(n * DESC_LEN, &flags);
            return Self { size, desc, driver: event(), device: event() };
        }
        let part = |entry| Area::modelled(6 + entry * n, &[0, 2, 4 + entry * n]);
        Self { size, desc: Area::modelled(n * DESC_LEN, &[]), driver: part(2), device: part(8) }
    }
}

/// Reason why a ring cannot be activated. All are the driver's or front-end's fault.
#[derive(Debug, PartialEq, Eq)]
pub enum LayoutError {
    /// The size is zero, too large, or (split) not a power of two.
    Size(u16),
    /// A part of the ring is not inside one memory region.
    Outside {
        /// Which part: `desc`, `driver` or `device`.
        part: &'static str,
        /// Its guest address.
        addr: u64,
    },
    /// A part of the ring is not aligned as the specification requires.
    Unaligned {
        /// Which part: `desc`, `driver` or `device`.
        part: &'static str,
        /// Its guest address.
        addr: u64,
    },
    /// The start index is outside the ring.
    Base(u32),
}

impl fmt::Display for LayoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Size(size) => write!(f, "queue size {size} is not legal for this ring"),
            Self::Outside { part, addr } => {
                write!(f, "ring {part} area at {addr:#x} is outside guest memory")
            }
            Self::Unaligned { part, addr } => {
                write!(f, "ring {part} area at {addr:#x} is not aligned")
            }
            Self::Base(base) => write!(f, "ring start index {base:#x} is outside the ring"),
        }
    }
}

impl std::error::Error for LayoutError {}

/// A protocol violation by the peer. The ring must be stopped and its port marked faulty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// The producer index moved by more than the ring holds, counting the chains that we hold.
    IndexJump {
        /// Index seen (packed: position and wrap bit).
        seen: u16,
        /// Index up to which chains were taken.
        taken: u16,
    },
    /// A descriptor index or `next` outside the table.
    DescIndex(u16),
    /// A chain longer than the ring, its indirect table included, or than that table: a loop, or
    /// longer than a driver may make it (virtio 1.3, 2.7.5.3.1).
    ChainTooLong,
    /// A packed chain outside an indirect table, longer than a burst may be: its descriptors up to
    /// the first one too many.
    DirectTooLong(u16),
    /// INDIRECT set where the specification forbids it, or not negotiated.
    Indirect,
    /// An indirect table of length zero, or not a multiple of 16, or longer than allowed.
    IndirectLen(u32),
    /// An indirect table outside guest memory.
    IndirectOutside(u64),
    /// A readable descriptor after a writable one.
    ReadAfterWrite,
    /// (Driver half) the device used an id that is not in flight.
    UsedId(u32),
    /// (Driver half) the device claims to have written more than the buffer holds.
    UsedLen(u32),
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::IndexJump { seen, taken } => {
                write!(f, "ring index jumped from {taken} to {seen}, more than the ring holds")
            }
            Self::DescIndex(i) => write!(f, "descriptor index {i} is outside the table"),
            Self::ChainTooLong => write!(f, "descriptor chain is longer than the ring (a loop)"),
            Self::DirectTooLong(slots) => {
                write!(f, "descriptor chain of {slots} or more without an indirect table")
            }
            Self::Indirect => write!(f, "indirect descriptor where none is allowed"),
            Self::IndirectLen(len) => write!(f, "indirect table of {len} bytes is not legal"),
            Self::IndirectOutside(addr) => {
                write!(f, "indirect table at {addr:#x} is outside guest memory")
            }
            Self::ReadAfterWrite => write!(f, "readable descriptor after a writable one"),
            Self::UsedId(id) => write!(f, "device used id {id}, which is not in flight"),
            Self::UsedLen(len) => write!(f, "device wrote {len} bytes, more than the buffer holds"),
        }
    }
}

impl std::error::Error for Malformed {}

/// One buffer of a chain, copied out of its descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buf {
    /// Guest address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Whether the device may write it (else: read it).
    pub write: bool,
}

/// One chain: what the driver made available as one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The driver's identifier, returned in the used element.
    pub id: u16,
    /// Descriptors of the ring it occupies (an indirect one counts one).
    pub slots: u16,
    /// Index of its first buffer in [`Taken::bufs`].
    pub first: u32,
    /// Number of its buffers that the device reads; they come first.
    pub reads: u16,
    /// Number of its buffers that the device may write.
    pub writes: u16,
}

/// Chains taken in one burst, with their buffers. Allocated once; never grows.
#[derive(Debug)]
pub struct Taken {
    /// In ring order.
    pub chains: Vec<Chain>,
    /// All buffers; those of one chain are adjacent.
    pub bufs: Vec<Buf>,
    /// Bound on `bufs`; no chain of several descriptors is read beyond it.
    descs_max: usize,
    /// The next chain of the ring exceeded the bound.
    is_cut: bool,
    /// The WRITE flag is ignored on this queue, see [`Taken::for_reading`].
    write_ignored: bool,
}

impl Taken {
    /// Room for bursts of `chains`, of four descriptors on average or one as long as a ring of
    /// `size`.
    pub fn with_capacity(chains: usize, size: u16) -> Self {
        Self::bounded(chains, chains * 4 + usize::from(size))
    }

    /// Room for bursts of `chains` with `descs` descriptors in total. Both bound what a peer can
    /// make a burst cost, independent of the ring's size: the chain that would exceed `descs` is
    /// left for the next burst, and of one that exceeds it alone only the first `descs` buffers are
    /// taken. A packed chain outside an indirect table has its id at its end (2.8.6): one that
    /// exceeds `descs` alone is [`Malformed::DirectTooLong`].
    pub fn bounded(chains: usize, descs: usize) -> Self {
        // Chains of one descriptor are not counted before they are taken.
        let bufs = Vec::with_capacity(descs.max(1) + chains);
        let chains = Vec::with_capacity(chains);
        Self { chains, bufs, descs_max: descs.max(1), is_cut: false, write_ignored: false }
    }

    /// For a queue whose buffers are all read by the device: the WRITE flag is ignored. DPDK
    /// 22.11's virtio-user sets it on the header of packed indirect tables it transmits.
    #[must_use]
    pub fn for_reading(self) -> Self {
        Self { write_ignored: true, ..self }
    }

    /// The buffers of `chain` that the device reads.
    #[inline]
    pub fn reads(&self, chain: &Chain) -> &[Buf] {
        let first = index(chain.first);
        &self.bufs[first..first + usize::from(chain.reads)]
    }

    /// The buffers of `chain` that the device may write.
    #[inline]
    pub fn writes(&self, chain: &Chain) -> &[Buf] {
        let first = index(chain.first) + usize::from(chain.reads);
        &self.bufs[first..first + usize::from(chain.writes)]
    }

    /// Whether the next chain of the ring would exceed the bound on descriptors.
    #[inline]
    pub fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Removes the first `n` chains, which were used or returned.
    pub fn forget_first(&mut self, n: usize) {
        let Some(next) = self.chains.get(n) else { return self.clear() };
        let bufs = next.first;
        self.is_cut &= n == 0;
        self.chains.drain(..n);
        self.bufs.drain(..index(bufs));
        self.chains.iter_mut().for_each(|chain| chain.first -= bufs);
    }

    /// Removes all chains.
    pub fn clear(&mut self) {
        self.chains.clear();
        self.bufs.clear();
        self.is_cut = false;
    }

    /// Decides whether another descriptor of a chain may be read.
    #[inline]
    fn next_desc(&mut self) -> NextDesc {
        if self.bufs.len() < self.descs_max {
            return NextDesc::Read;
        }
        if self.chains.is_empty() {
            return NextDesc::Skip;
        }
        self.is_cut = true;
        NextDesc::Leave
    }

    /// Adds one buffer to the chain under construction, keeping reads before writes.
    #[inline]
    fn push(&mut self, chain: &mut Chain, buf: Buf) -> Result<(), Malformed> {
        if buf.write && !self.write_ignored {
            chain.writes += 1;
        } else if chain.writes > 0 {
            return Err(Malformed::ReadAfterWrite);
        } else {
            chain.reads += 1;
        }
        self.bufs.push(buf);
        Ok(())
    }

    /// Adds a chain of one descriptor for each of the `ids`, whose buffers were added from the
    /// `first` one on, all of them with WRITE or none.
    #[inline]
    fn push_singles(&mut self, ids: impl Iterator<Item = u16>, first: usize, write: bool) {
        let writes = u16::from(write && !self.write_ignored);
        let mut next = u32::try_from(first).expect("bounded by burst and ring size");
        self.chains.extend(ids.map(|id| {
            let first = next;
            next += 1;
            Chain { id, slots: 1, first, reads: 1 - writes, writes }
        }));
    }

    /// Starts a chain after the last buffer.
    #[inline]
    fn begin(&self, id: u16) -> Chain {
        let first = u32::try_from(self.bufs.len()).expect("bounded by burst and ring size");
        Chain { id, slots: 0, first, reads: 0, writes: 0 }
    }

    /// Removes the buffers of a chain that was abandoned.
    fn forget(&mut self, chain: &Chain) {
        self.bufs.truncate(index(chain.first));
    }
}

/// What to do with a further descriptor of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NextDesc {
    /// Read it.
    Read,
    /// The chain alone exceeds the bound: do not take its buffers from here on.
    Skip,
    /// The chain exceeds the bound together with others: leave it for the next burst.
    Leave,
}

/// A used chain, returned to the driver half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The id that `add` gave.
    pub id: u16,
    /// Bytes the device says it wrote; at most what the chain can hold, so 0 if it is only read. An
    /// in-order device may report it only for the last chain of a batch; the others have 0.
    pub len: u32,
}

// Descriptor flags, both layouts (virtio 1.3, 2.7.5 and 2.8).
const DESC_NEXT: u16 = 1;
const DESC_WRITE: u16 = 2;
const DESC_INDIRECT: u16 = 4;
/// Size of a descriptor, in bytes.
const DESC_LEN: usize = 16;

/// Whether an index that moved from `old` to `new` passed `event` (virtio 1.3, 2.7.7.1):
/// all free-running, so the distances are compared, not the indices.
#[inline]
const fn need_event(event: Untrusted<Idx<u16>>, new: Idx<u16>, old: Idx<u16>) -> bool {
    event.hint_until(new.minus(1)) < new.since(old)
}

/// Bits 0 to 15.
#[inline]
const fn lo16(word: u64) -> u16 {
    let b = word.to_le_bytes();
    u16::from_le_bytes([b[0], b[1]])
}

#[cfg(kani)]
mod proofs;

#[cfg(test)]
mod tests {
    use super::*;

    /// The same rule by iteration: did `event + 1` appear among the published indices?
    fn need_event_by_walking(event: u16, new: u16, old: u16) -> bool {
        let mut at = old;
        while at != new {
            at = at.wrapping_add(1);
            if at == event.wrapping_add(1) {
                return true;
            }
        }
        false
    }

    #[test]
    fn event_rule_equals_the_walked_rule_from_every_start_near_the_wrap() {
        for old in (0..40_u16).chain(65500..=65535).chain(32750..32790) {
            for moved in 0..70_u16 {
                let new = old.wrapping_add(moved);
                for event in 0..140_u16 {
                    let event = old.wrapping_add(event).wrapping_sub(70);
                    let (from, to) = (Idx::<u16>::new(old), Idx::<u16>::new(new));
                    assert_eq!(
                        need_event(Untrusted::<Idx<u16>>::index(event), to, from),
                        need_event_by_walking(event, new, old),
                        "event {event} new {new} old {old}"
                    );
                }
            }
        }
    }
}
