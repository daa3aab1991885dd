//! Mirror of a port's frames, for a capture and for another port.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;

use shm::sync::{Lock, Mutex};

use super::Span;
use crate::fdb::PortId;
use crate::frame::Burst;
use crate::time::Instant;

/// A frame copied for a capture.
#[derive(Debug)]
pub struct Captured {
    /// Direction: from the port into the switch, or out of it.
    pub ingress: bool,
    /// Time of `forward`.
    pub at: Instant,
    /// The frame, before segmentation and checksums.
    pub bytes: Vec<u8>,
}

/// Sinks for copies of a port's frames: a capture, and a mirror port. Costs one load without. A
/// slow reader loses frames, which are counted, and never slows the switch.
#[derive(Debug)]
pub struct Mirror {
    /// Which there are, and the mirror port; 0: none.
    state: AtomicU32,
    sink: Mutex<Option<SyncSender<Captured>>>,
    /// Frames lost because the reader was too slow.
    pub lost: AtomicU64,
}

/// Bits of the state above the mirror port's id.
const CAPTURE: u32 = 1 << 16;
const INGRESS: u32 = 1 << 17;
const EGRESS: u32 = 1 << 18;
/// The port is a mirror port itself.
const RESERVED: u32 = 1 << 19;
const SPAN: u32 = INGRESS | EGRESS | 0xffff;

impl Default for Mirror {
    fn default() -> Self {
        let sink = Mutex::new(Lock::Capture, None);
        Self { state: AtomicU32::new(0), sink, lost: AtomicU64::new(0) }
    }
}

impl Mirror {
    fn change(&self, clear: u32, set: u32) {
        let change = |state: u32| Some(state & !clear | set);
        let _ = self.state.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change);
    }

    /// Starts a capture, or ends it with `None`.
    pub fn set(&self, sink: Option<SyncSender<Captured>>) {
        self.change(CAPTURE, if sink.is_some() { CAPTURE } else { 0 });
        *self.sink.lock() = sink;
    }

    pub(super) fn set_span(&self, span: Option<Span>) {
        let bits = span.map_or(0, |Span { to, ingress, egress }| {
            let way = |on: bool, bit: u32| if on { bit } else { 0 };
            u32::from(to.0) | way(ingress, INGRESS) | way(egress, EGRESS)
        });
        self.change(SPAN, bits);
    }

    pub(super) fn set_reserved(&self, reserved: bool) {
        self.change(RESERVED, if reserved { RESERVED } else { 0 });
    }

    /// Whether frames are copied, or the port is a mirror port.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.state.load(Ordering::Relaxed) != 0
    }

    /// Whether a capture is active.
    pub fn is_captured(&self) -> bool {
        self.state.load(Ordering::Relaxed) & CAPTURE != 0
    }

    /// Whether the port is a mirror port.
    #[inline]
    pub fn is_reserved(&self) -> bool {
        self.state.load(Ordering::Relaxed) & RESERVED != 0
    }

    /// The mirror port for frames of this direction.
    pub(super) fn span(&self, ingress: bool) -> Option<PortId> {
        let state = self.state.load(Ordering::Relaxed);
        let way = if ingress { INGRESS } else { EGRESS };
        (state & way != 0).then_some(PortId(state as u16))
    }

    #[cold]
    pub(super) fn copy(
        &self,
        burst: &Burst<'_>,
        picks: impl Iterator<Item = usize>,
        ingress: bool,
        at: Instant,
    ) {
        if !self.is_captured() {
            return;
        }
        let sink = self.sink.lock();
        let Some(sink) = sink.as_ref() else { return };
        for i in picks {
            // With the private head, by which it is forwarded.
            let bytes = burst.copy_of(i).into_vec();
            if sink.try_send(Captured { ingress, at, bytes }).is_err() {
                self.lost.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use shm::Seg;

    use super::*;
    use crate::frame::RETAGGED_LEN;
    use crate::vnet::VnetHdr;

    /// A guest that changes its frame after it was forwarded does not change what a capture shows.
    #[test]
    fn capture_shows_the_head_by_which_a_frame_was_forwarded() {
        let memory = [0xbb; 200];
        let mut burst = Burst::default();
        burst.segs.push(Seg::of(&memory));
        burst.push_parsed(&[0xaa; RETAGGED_LEN], 128, 200, VnetHdr::NONE);
        let (sink, captured) = std::sync::mpsc::sync_channel(1);
        let mirror = Mirror::default();
        mirror.set(Some(sink));
        mirror.copy(&burst, 0..1, true, Instant::START);
        let bytes = captured.recv().unwrap().bytes;
        assert_eq!((&bytes[..128], &bytes[128..]), (&[0xaa; 128][..], &[0xbb; 72][..]));
    }
}
