//! What is remembered from frame to frame of a burst: most have the addresses of the one before.

use crate::fdb::PortId;
use crate::frame::Start;

/// Destination of the previous frame; its group, if all frames for that port are in it.
#[derive(Default)]
pub(super) struct LastGroup(pub Option<(PortId, Option<usize>)>);

impl LastGroup {
    /// Whether all frames for a port are in the group of the previous one.
    #[inline]
    pub fn is_all_of(&self, to: PortId) -> bool {
        matches!(self.0, Some((port, Some(_))) if port == to)
    }
}

/// Frames in sequence with one start: all are for one group, and nothing is learned from them.
#[derive(Default)]
pub(super) struct Run {
    start: Option<Start>,
    group: usize,
}

impl Run {
    #[inline]
    pub fn new(start: Option<Start>, group: usize) -> Self {
        Self { start, group }
    }

    /// The group of a frame with this start, if it continues the run.
    #[inline]
    pub fn group_of(&self, start: Option<Start>) -> Option<usize> {
        let is_in = start.is_some() && self.start == start;
        is_in.then_some(self.group)
    }
}
