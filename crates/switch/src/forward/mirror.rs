//! Mirror of a port's frames, for a capture.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, PoisonError};

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

/// Sink for copies of a port's frames during a capture. Costs one load without a capture. A slow
/// reader loses frames, which are counted, and never slows the switch.
#[derive(Debug, Default)]
pub struct Mirror {
    on: AtomicBool,
    sink: Mutex<Option<SyncSender<Captured>>>,
    /// Frames lost because the reader was too slow.
    pub lost: AtomicU64,
}

impl Mirror {
    /// Starts a capture, or ends it with `None`.
    pub fn set(&self, sink: Option<SyncSender<Captured>>) {
        self.on.store(sink.is_some(), Ordering::Relaxed);
        *self.sink.lock().unwrap_or_else(PoisonError::into_inner) = sink;
    }

    /// Whether a capture is active.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    #[cold]
    pub(super) fn copy(
        &self,
        burst: &Burst<'_>,
        picks: impl Iterator<Item = usize>,
        ingress: bool,
        at: Instant,
    ) {
        let sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(sink) = sink.as_ref() else { return };
        for i in picks {
            let frame = &burst.frames[i];
            let mut bytes = vec![0; frame.len as usize];
            let mut done = 0;
            for seg in burst.segs(frame) {
                done += seg.read(&mut bytes[done..]);
            }
            if sink.try_send(Captured { ingress, at, bytes }).is_err() {
                self.lost.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}
