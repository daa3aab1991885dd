//! A rate limit of a guest: frames beyond it must wait, and no kick announces them when they are
//! due.

use switch::frame::Burst;
use switch::port::{Fault, Ingress};
use switch::time::{Instant, Ns};

use crate::around::{Forward, Hooks};
use crate::random::Random;

/// Longest pause of a rate-limited queue.
pub(crate) const PAUSE_MAX: Ns = Ns::from_us(60);

/// Rate limit of a queue's guest.
pub(crate) struct Pace {
    /// Frames per period, and the pause after each period; `None`: no limit.
    limit: Option<(usize, Ns)>,
    /// Frames left in this period.
    left: usize,
    /// Start of the next period.
    next: Instant,
    /// The last burst took nothing because of the limit.
    limited: bool,
}

impl Pace {
    pub fn new(random: &mut Random) -> Self {
        let limit = random
            .one_in(8)
            .then(|| (random.within(3..100) as usize, random.time(Ns::from_us(1)..PAUSE_MAX)));
        let left = limit.map_or(usize::MAX, |(frames, _)| frames);
        Self { limit, left, next: Instant::START, limited: false }
    }
}

impl Hooks for Pace {
    fn burst(
        &mut self,
        queue: &mut (impl Ingress + ?Sized),
        max: usize,
        now: Instant,
        burst: &mut Burst<'static>,
        forward: &mut Forward<'_>,
    ) -> Result<usize, Fault> {
        let Some((frames, pause)) = self.limit else {
            return queue.burst(max, now, burst, forward);
        };
        self.limited = self.left == 0 && now < self.next;
        if self.limited {
            return Ok(0);
        }
        if self.left == 0 {
            self.left = frames;
        }
        let took = queue.burst(max.min(self.left), now, burst, forward)?;
        self.left -= took.min(self.left);
        self.next = now + pause;
        Ok(took)
    }

    fn arm(&mut self, queue: &mut (impl Ingress + ?Sized)) -> bool {
        // Frames that may not be taken yet are no work, nor are those that arrive meanwhile.
        self.limited || queue.arm()
    }

    fn due(&self, _: &(impl Ingress + ?Sized)) -> Option<Instant> {
        self.limited.then_some(self.next)
    }
}
