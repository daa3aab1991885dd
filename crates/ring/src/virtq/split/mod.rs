//! Split virtqueue (virtio 1.3, 2.7).
//!
//! ```text
//!   descriptor table        available ring (driver writes)   used ring (device writes)
//!   16 B x size             flags idx ring[size] used_event  flags idx {id len}[size] avail_event
//! ```
//! Indices free-run through 16 bits; `& mask` makes a slot. Each side owns one index, and writes to
//! `*_event` the peer's index at which it wants the next notification.

mod device;
mod driver;

pub(super) use device::SplitDevice;
pub(super) use driver::SplitDriver;

use shm::sync::Ordering;
use shm::{Area, GuestMemory};

use super::{DESC_LEN, Features, Layout, LayoutError, SIZE_MAX};
use crate::index::{Idx, Untrusted};

/// Offset of `flags` in the available and the used ring.
const FLAGS: usize = 0;
/// Offset of `idx` in the available and the used ring.
const IDX: usize = 2;
/// Offset of `ring[0]` in the available and the used ring.
const RING: usize = 4;
/// Size of an element of the used ring, in bytes.
const USED_ELEM_LEN: usize = 8;
/// `VIRTQ_USED_F_NO_NOTIFY` and `VIRTQ_AVAIL_F_NO_INTERRUPT`.
const NO_NOTIFICATION: u16 = 1;

/// The three parts of a ring and its fixed geometry.
pub(super) struct Parts {
    desc: Area,
    avail: Area,
    used: Area,
    size: u16,
    mask: u16,
}

impl Parts {
    pub(super) fn new(
        memory: &GuestMemory,
        layout: &Layout,
        features: Features,
    ) -> Result<Self, LayoutError> {
        let size = layout.size;
        if !size.is_power_of_two() || size > SIZE_MAX {
            return Err(LayoutError::Size(size));
        }
        let n = usize::from(size);
        // The event words exist only when negotiated; a legacy ring may end where memory ends.
        let event = if features.event_idx { 2 } else { 0 };
        let part = |part, addr: u64, align: u64, len| {
            if !addr.is_multiple_of(align) {
                return Err(LayoutError::Unaligned { part, addr });
            }
            Area::new(memory, addr, len).ok_or(LayoutError::Outside { part, addr })
        };
        Ok(Self {
            desc: part("desc", layout.desc, 16, n * DESC_LEN)?,
            avail: part("driver", layout.driver, 2, RING + 2 * n + event)?,
            used: part("device", layout.device, 4, RING + 8 * n + event)?,
            size,
            mask: size - 1,
        })
    }

    /// Offset of the entry of `idx` in the available ring.
    #[inline]
    fn avail_entry(&self, idx: Idx<u16>) -> usize {
        RING + idx.slot(self.mask).offset(2)
    }

    /// Offset of the element of `idx` in the used ring.
    #[inline]
    fn used_element(&self, idx: Idx<u16>) -> usize {
        RING + idx.slot(self.mask).offset(USED_ELEM_LEN)
    }

    /// Offset of `used_event`, in the available ring.
    #[inline]
    fn used_event(&self) -> usize {
        RING + 2 * usize::from(self.size)
    }

    /// Offset of `avail_event`, in the used ring.
    #[inline]
    fn avail_event(&self) -> usize {
        RING + USED_ELEM_LEN * usize::from(self.size)
    }

    /// The parts of a modelled ring.
    #[cfg(loom)]
    pub(super) fn modelled(ring: &super::ModelledRing) -> Self {
        let (desc, avail, used) = (ring.desc.clone(), ring.driver.clone(), ring.device.clone());
        Self { desc, avail, used, size: ring.size, mask: ring.size - 1 }
    }
}

/// Loads an index that the peer writes.
#[inline]
fn load_idx(area: &Area, at: usize, ordering: Ordering) -> Untrusted<Idx<u16>> {
    Untrusted::<Idx<u16>>::index(area.sync_load(at, ordering))
}
