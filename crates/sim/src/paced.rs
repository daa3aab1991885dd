//! An ingress queue whose guest may send only so many frames at a time, and then no more for a
//! while: what waits meanwhile is announced by no kick.

use switch::direct::Direct;
use switch::frame::Burst;
use switch::port::{Fault, Ingress};

use crate::random::Random;

/// The longest time without frames, in ns.
pub(crate) const PAUSE_NS_MAX: u64 = 60_000;

/// A queue, and what its guest may send.
pub(crate) struct Paced<Q> {
    pub queue: Q,
    /// Frames that may be taken, and for how long none may after that many; `None`: no limit.
    limit: Option<(usize, u64)>,
    /// Frames that may be taken still.
    left: usize,
    /// When more may be taken.
    next_ns: u64,
    /// A burst took nothing because of that.
    limited: bool,
}

impl<Q> Paced<Q> {
    pub fn new(queue: Q, random: &mut Random) -> Self {
        let limit = random
            .one_in(8)
            .then(|| (random.within(3..100) as usize, random.within(1_000..PAUSE_NS_MAX)));
        let left = limit.map_or(usize::MAX, |(frames, _)| frames);
        Self { queue, limit, left, next_ns: 0, limited: false }
    }
}

impl<Q: Ingress> Ingress for Paced<Q> {
    fn burst(
        &mut self,
        max: usize,
        now_ns: u64,
        burst: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        let Some((frames, pause_ns)) = self.limit else {
            return self.queue.burst(max, now_ns, burst, forward);
        };
        self.limited = self.left == 0 && now_ns < self.next_ns;
        if self.limited {
            return Ok(0);
        }
        if self.left == 0 {
            self.left = frames;
        }
        let took = self.queue.burst(max.min(self.left), now_ns, burst, forward)?;
        self.left -= took.min(self.left);
        self.next_ns = now_ns + pause_ns;
        Ok(took)
    }

    fn goes_direct(&self) -> bool {
        self.queue.goes_direct()
    }

    fn burst_into(&mut self, max: usize, to: &mut dyn Direct) -> Result<usize, Fault> {
        self.queue.burst_into(max, to)
    }

    fn arm(&mut self) -> bool {
        // What is there counts for nothing until then, and so does what comes meanwhile.
        self.limited || self.queue.arm()
    }

    fn due(&self) -> Option<u64> {
        self.limited.then_some(self.next_ns)
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }
}
