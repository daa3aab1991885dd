//! Packed virtqueue (virtio 1.3, 2.8).
//!
//! ```text
//!   one ring of descriptors, written by both sides in turn
//!   ┌────────┬────────┬────────┬────────┐   available: AVAIL = wrap, USED ≠ wrap
//!   │ used   │ used   │ avail  │ free   │   used:      AVAIL = USED = wrap
//!   └────────┴────────┴────────┴────────┘   wrap: a bit of each side, starts at 1, flips when
//!              ▲ used pos  ▲ avail pos            its position passes the end of the ring
//! ```
//! A position is a slot and a wrap bit; sizes need not be powers of two, so positions wrap by
//! comparison and never by mask.

mod device;
mod driver;
mod ledger;

pub(super) use device::PackedDevice;
pub(super) use driver::PackedDriver;
use ledger::Entry;
pub use ledger::Ledger;

use shm::sync::Ordering;
use shm::{Area, GuestMemory};

use super::{DESC_LEN, Features, Layout, LayoutError, SIZE_MAX, need_event};
use crate::index::{Idx, Untrusted};

const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

/// Offset of `flags` in a descriptor: its sync word.
const DESC_FLAGS: usize = 14;
/// Offset of `desc` (offset and wrap) in an event suppression structure.
const EVENT_OFF_WRAP: usize = 0;
/// Offset of `flags` in an event suppression structure.
const EVENT_FLAGS: usize = 2;
/// Size of an event suppression structure, in bytes.
const EVENT_LEN: usize = 4;
const EVENT_ENABLE: u16 = 0;
const EVENT_DISABLE: u16 = 1;
const EVENT_DESC: u16 = 2;

/// A position in the ring: slot and wrap bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pos {
    slot: u16,
    wrap: bool,
}

impl Pos {
    /// Decodes the 16 bits of an event word or of half a vring base.
    fn from_bits(bits: u16, size: u16) -> Option<Self> {
        let pos = Self { slot: bits & 0x7fff, wrap: bits >> 15 != 0 };
        (pos.slot < size).then_some(pos)
    }

    fn bits(self) -> u16 {
        self.slot | u16::from(self.wrap) << 15
    }

    /// Moves `n` slots forward, at most a whole ring.
    #[inline]
    fn advance(&mut self, n: u16, size: u16) {
        debug_assert!(n <= size && self.slot < size);
        // Both are at most 32768, so the sum fits.
        self.slot += n;
        if self.slot >= size {
            self.slot -= size;
            self.wrap = !self.wrap;
        }
    }

    /// Moves `n` slots back, at most a whole ring.
    fn rewind(&mut self, n: u16, size: u16) {
        debug_assert!(n <= size && self.slot < size);
        if n > self.slot {
            self.slot += size;
            self.wrap = !self.wrap;
        }
        self.slot -= n;
    }

    #[inline]
    fn offset(self) -> usize {
        DESC_LEN * usize::from(self.slot)
    }

    #[inline]
    fn is_available(self, flags: u16) -> bool {
        flags & (AVAIL | USED) == self.available_bits()
    }

    #[inline]
    fn is_used(self, flags: u16) -> bool {
        flags & (AVAIL | USED) == self.used_bits()
    }

    /// The bits that make a descriptor available at this position.
    #[inline]
    fn available_bits(self) -> u16 {
        if self.wrap { AVAIL } else { USED }
    }

    /// The bits that make a descriptor used at this position.
    #[inline]
    fn used_bits(self) -> u16 {
        if self.wrap { AVAIL | USED } else { 0 }
    }
}

/// The three parts of a ring and its fixed geometry.
pub(super) struct Parts {
    desc: Area,
    /// Driver event suppression: when the driver wants calls.
    driver: Area,
    /// Device event suppression: when the device wants kicks.
    device: Area,
    size: u16,
}

impl Parts {
    pub(super) fn new(memory: &GuestMemory, layout: &Layout) -> Result<Self, LayoutError> {
        let size = layout.size;
        if size == 0 || size > SIZE_MAX {
            return Err(LayoutError::Size(size));
        }
        let part = |part, addr: u64, align: u64, len| {
            if !addr.is_multiple_of(align) {
                return Err(LayoutError::Unaligned { part, addr });
            }
            Area::new(memory, addr, len).ok_or(LayoutError::Outside { part, addr })
        };
        Ok(Self {
            desc: part("desc", layout.desc, 16, usize::from(size) * DESC_LEN)?,
            driver: part("driver", layout.driver, 4, 4)?,
            device: part("device", layout.device, 4, 4)?,
            size,
        })
    }

    /// Whether no position has passed the end of the ring yet, of a ring that starts at base 0.
    ///
    /// User-Mode Linux starts packed rings at base 0, wrap bits clear, and then makes its first
    /// descriptors available with the wrap bit set. A real base 0, after an odd number of laps, has
    /// a descriptor with USED set: the last chain or batch used before the end of the ring is
    /// marked so at its first slot, until that is made available for the next lap, which sets it,
    /// too. Not slot 0 alone is to be looked at: a chain, or a batch that is used in order, may
    /// have reached over it from the lap before, and is marked where it began.
    pub(super) fn is_in_first_lap(&self) -> bool {
        let flags_at = |slot| self.desc.sync_load(slot * DESC_LEN + DESC_FLAGS, Ordering::Acquire);
        (0..usize::from(self.size)).all(|slot| flags_at(slot) & USED == 0)
    }

    /// The parts of a modelled ring.
    #[cfg(loom)]
    pub(super) fn modelled(ring: &super::ModelledRing) -> Self {
        let (desc, driver, device) = (ring.desc.clone(), ring.driver.clone(), ring.device.clone());
        Self { desc, driver, device, size: ring.size }
    }
}

/// Requests in `area` a notification when the peer passes `pos`.
fn event_arm(area: &Area, features: Features, pos: Pos) {
    if features.event_idx {
        area.sync_store(EVENT_OFF_WRAP, pos.bits(), Ordering::Relaxed);
        // The peer must not pair DESC with an old position.
        area.sync_store(EVENT_FLAGS, EVENT_DESC, Ordering::Release);
    } else {
        area.sync_store(EVENT_FLAGS, EVENT_ENABLE, Ordering::Relaxed);
    }
}

/// Suppresses notifications in `area`.
fn event_disarm(area: &Area) {
    area.sync_store(EVENT_FLAGS, EVENT_DISABLE, Ordering::Relaxed);
}

/// Whether the owner of `area` wants a notification after `moved` slots, up to `now`.
fn event_wanted(area: &Area, now: Pos, moved: u16, size: u16) -> bool {
    match area.sync_load(EVENT_FLAGS, Ordering::Acquire) {
        EVENT_DISABLE => false,
        EVENT_DESC => {
            is_passed(area.sync_load(EVENT_OFF_WRAP, Ordering::Relaxed), now, moved, size)
        }
        // ENABLE, or an invalid value: a spurious notification harms only that peer.
        _ => true,
    }
}

/// Whether the position in an event word is among the last `moved` slots before `now`.
#[inline]
fn is_passed(bits: u16, now: Pos, moved: u16, size: u16) -> bool {
    let (mut event, wrap) = (bits & 0x7fff, bits >> 15 != 0);
    if wrap != now.wrap {
        event = event.wrapping_sub(size);
    }
    let (event, now) = (Untrusted::<Idx<u16>>::index(event), Idx::<u16>::new(now.slot));
    moved >= size || need_event(event, now, now.minus(moved))
}

#[cfg(kani)]
mod proofs;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advance_and_rewind_are_inverse_from_every_position() {
        for size in [1_u16, 2, 3, 5, 8, 32768] {
            for slot in (0..size.min(9)).chain(size.saturating_sub(9)..size) {
                for wrap in [false, true] {
                    for n in (0..=size.min(9)).chain(size.saturating_sub(9)..=size) {
                        let start = Pos { slot, wrap };
                        let mut pos = start;
                        pos.advance(n, size);
                        assert!(pos.slot < size);
                        assert_eq!(Pos::from_bits(pos.bits(), size), Some(pos));
                        pos.rewind(n, size);
                        assert_eq!(pos, start, "size {size} n {n}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_descriptor_is_never_available_and_used_at_once() {
        for wrap in [false, true] {
            let pos = Pos { slot: 0, wrap };
            assert!(pos.is_available(pos.available_bits()) && !pos.is_used(pos.available_bits()));
            assert!(pos.is_used(pos.used_bits()) && !pos.is_available(pos.used_bits()));
            // A descriptor used or available a lap ago is neither now.
            let before = Pos { slot: 0, wrap: !wrap };
            assert!(!pos.is_available(before.used_bits()) && !pos.is_used(before.available_bits()));
            assert!(!pos.is_used(before.used_bits()));
            assert!(!pos.is_available(before.available_bits()));
        }
    }
}
