//! A guest that may send only so many frames at a time, and then no more for a while: what waits
//! meanwhile is announced by no kick.

use switch::frame::Burst;
use switch::port::{Fault, Ingress};

use crate::around::{Forward, Hooks};
use crate::random::Random;

/// The longest time without frames, in ns.
pub(crate) const PAUSE_NS_MAX: u64 = 60_000;

/// What the guest of a queue may send.
pub(crate) struct Pace {
    /// Frames that may be taken, and for how long none may after that many; `None`: no limit.
    limit: Option<(usize, u64)>,
    /// Frames that may be taken still.
    left: usize,
    /// When more may be taken.
    next_ns: u64,
    /// A burst took nothing because of that.
    limited: bool,
}

impl Pace {
    pub fn new(random: &mut Random) -> Self {
        let limit = random
            .one_in(8)
            .then(|| (random.within(3..100) as usize, random.within(1_000..PAUSE_NS_MAX)));
        let left = limit.map_or(usize::MAX, |(frames, _)| frames);
        Self { limit, left, next_ns: 0, limited: false }
    }
}

impl Hooks for Pace {
    fn burst(
        &mut self,
        queue: &mut (impl Ingress + ?Sized),
        (max, now_ns): (usize, u64),
        burst: &mut Burst<'static>,
        forward: &mut Forward<'_>,
    ) -> Result<usize, Fault> {
        let Some((frames, pause_ns)) = self.limit else {
            return queue.burst(max, now_ns, burst, forward);
        };
        self.limited = self.left == 0 && now_ns < self.next_ns;
        if self.limited {
            return Ok(0);
        }
        if self.left == 0 {
            self.left = frames;
        }
        let took = queue.burst(max.min(self.left), now_ns, burst, forward)?;
        self.left -= took.min(self.left);
        self.next_ns = now_ns + pause_ns;
        Ok(took)
    }

    fn arm(&mut self, queue: &mut (impl Ingress + ?Sized)) -> bool {
        // What is there counts for nothing until then, and so does what comes meanwhile.
        self.limited || queue.arm()
    }

    fn due(&self, _: &(impl Ingress + ?Sized)) -> Option<u64> {
        self.limited.then_some(self.next_ns)
    }
}
