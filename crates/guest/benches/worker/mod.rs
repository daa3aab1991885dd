//! The worker's loop without its thread: scheduler, bursts and clock, on queues that have frames or
//! none.

use std::sync::Arc;

use shm::sync::Mutex;
use switch::account::{Limit, RateLimits};
use switch::fdb::{Fdb, PortId};
use switch::forward::{EgressQueue, Forwarder, Mode, Port, Source};
use switch::frame::Burst;
use switch::poll::{Costs, Policy};
use switch::port::Ingress;
use switch::schedule::{self, Effect, Scheduler, Served, Then};
use switch::time::{Instant, Ns};
use switch::tuning::Tuning;

use super::MACS;
use super::guests::{Guests, Lane};

type Queue = Arc<Mutex<dyn Ingress>>;

/// What a worker reads as its clock.
#[derive(Clone, Copy)]
pub enum Clock {
    /// The program's: [`std::time::Instant`] since its start.
    Real,
    /// As much later at each reading as a poll takes: what it does is then always the same.
    Steps,
}

/// Time of a poll, in ns.
const STEP_NS: u64 = 50;
/// Time until the next frames are sent to a worker that sleeps until a kick.
const GAP: Ns = Ns::from_us(100);

/// Rates of bits and of frames that no queue here reaches.
pub const RATES: RateLimits = {
    let limit = Some(Limit { per_second: 1_000_000_000_000, burst: 1_000_000_000_000 });
    RateLimits { bits: limit, frames: limit }
};

/// What the ports of a worker have in common.
#[derive(Clone, Copy)]
pub struct Terms {
    pub clock: Clock,
    /// All have rates, above what they need.
    pub rated: bool,
    pub policy: Policy,
}

impl Terms {
    /// Queues that are spun on, without rates.
    pub fn spin(clock: Clock) -> Self {
        Self { clock, rated: false, policy: Policy::Spin }
    }
}

/// A worker that serves one queue of each of its ports.
pub struct Worker {
    scheduler: Scheduler<Queue>,
    forwarder: Forwarder,
    scratch: Burst<'static>,
    clock: Clock,
    epoch: std::time::Instant,
    time: Instant,
    /// Number of bursts, and of their frames.
    bursts: u64,
    frames: u64,
    /// It sleeps, until a kick or, after this time, by itself.
    sleeps: Option<Option<Ns>>,
    pub guests: Vec<Box<dyn Guests>>,
}

impl Worker {
    /// The guest of the first port of each pair sends to the second.
    pub fn new(mode: Mode, pairs: Vec<(Lane, Lane)>, terms: Terms) -> Self {
        let mut all = Self::several(mode, vec![pairs], terms);
        all.pop().expect("one was made")
    }

    /// Workers of one switch, with these pairs each. The second guest of pair `n` of all has
    /// address [`receiver`]`(n)`.
    pub fn several(mode: Mode, workers: Vec<Vec<(Lane, Lane)>>, terms: Terms) -> Vec<Self> {
        let Terms { clock, rated, policy } = terms;
        let fdb = Arc::new(Fdb::new(65536, [1, 2], 300, 4096));
        let (mut table, mut made) = (Vec::new(), Vec::new());
        for (number, pairs) in (0..).zip(workers) {
            let mut scheduler = Scheduler::new(number, Costs::TYPICAL);
            let mut guests = Vec::new();
            for (a, b) in pairs {
                // A lane has what its first guest sends, and what its second one receives.
                let (egress, back) = (a.egress.expect("fresh"), b.egress.expect("fresh"));
                let ends =
                    [(a.ingress, a.ingress_stats, back), (b.ingress, b.ingress_stats, egress)];
                for (ingress, stats, egress) in ends {
                    let (id, tuning) = (PortId(table.len() as u16), Tuning::new(policy));
                    let port = active(id, egress);
                    if rated {
                        port.set_rates(RATES, RATES);
                        tuning.set_has_rate(true);
                    }
                    table.push(Some(Arc::new(port)));
                    let source = Source::new(id, 0, stats, Arc::new(tuning));
                    let token = u64::from(id.0);
                    let served = Served { token, source, notifies: true, of: ingress };
                    scheduler.add(served, Instant::START);
                }
                let pair = table.len() / 2 - 1;
                fdb.learn(receiver(pair), 0, PortId(2 * pair as u16 + 1), 0);
                guests.extend([a.guests, b.guests]);
            }
            made.push((number, scheduler, guests));
        }
        let table = Arc::new(table);
        let worker = |(number, scheduler, guests)| Self {
            scheduler,
            forwarder: Forwarder::new(mode, number, Arc::clone(&fdb), Arc::clone(&table), 3),
            scratch: Burst::default(),
            clock,
            epoch: std::time::Instant::now(),
            time: Instant::START,
            bursts: 0,
            frames: 0,
            sleeps: None,
            guests,
        };
        made.into_iter().map(worker).collect()
    }

    fn now(&self) -> Instant {
        match self.clock {
            Clock::Real => Instant::START + Ns::from(self.epoch.elapsed()),
            Clock::Steps => self.time + Ns::from(std::time::Duration::from_nanos(STEP_NS)),
        }
    }

    /// Reads the clock: time since the last step is no turn's.
    pub fn wake(&mut self) {
        if matches!(self.clock, Clock::Real) {
            self.time = self.now();
        }
    }

    /// Serves `count` bursts, empty or not.
    #[inline(never)]
    pub fn run_bursts(&mut self, count: u64) {
        let end = self.bursts + count;
        while self.bursts < end {
            self.step();
        }
    }

    /// Serves until `count` more frames were taken.
    #[inline(never)]
    pub fn run_frames(&mut self, count: u64) {
        let end = self.frames + count;
        while self.frames < end {
            self.step();
        }
    }

    /// Serves the [`FRAMES`](super::guests::FRAMES) that the first guest sent, and `kicks` for, and
    /// continues until it sleeps.
    #[inline(never)]
    pub fn run_until_asleep(&mut self, count: u64, kicks: bool) {
        let end = self.frames + count;
        if kicks {
            self.sleep(GAP);
            assert!(self.scheduler.kick(0, self.time), "it is served here");
        }
        while self.frames < end || self.sleeps.is_none() {
            if let Some(timeout) = self.sleeps {
                self.sleep(timeout.expect("a queue with frames sleeps"));
            }
            self.step();
        }
    }

    /// If it sleeps, that is over after this time.
    fn sleep(&mut self, time: Ns) {
        if self.sleeps.take().is_some() {
            self.time += time;
            self.scheduler.record_wait(true);
        }
    }

    fn step(&mut self) {
        match self.scheduler.next(self.time, &self.forwarder) {
            Effect::Serve { at, max } => self.serve(at, max),
            Effect::NotifyDue { rests } => _ = self.forwarder.notify_due(self.time, rests),
            Effect::PollKicks | Effect::Pause => self.time = self.now(),
            Effect::ArmFull => self.scheduler.record_arm_full(self.forwarder.arm_blocked()),
            Effect::Wait { timeout, .. } => self.sleeps = Some(timeout),
            Effect::Disarm { at } => {
                let of = &self.scheduler.queue(at).served.of;
                of.lock().disarm();
            }
            _ => {}
        }
    }

    fn serve(&mut self, at: usize, max: usize) {
        let mut next = Some((at, max));
        while let Some((at, max)) = next {
            self.burst(at, max);
            next = self.scheduler.next_burst(self.time);
        }
    }

    fn burst(&mut self, at: usize, max: usize) {
        let Served { source, of, .. } = &self.scheduler.queue(at).served;
        let mut ingress = of.lock();
        let (forwarder, scratch) = (&mut self.forwarder, &mut self.scratch);
        let taken =
            schedule::burst(source, max, &mut *ingress, forwarder, scratch, self.time, None);
        drop(ingress);
        if self.scheduler.record_burst(&taken) == Then::Arm {
            let queue = self.scheduler.queue(at);
            let disarms = queue.poller().disarms();
            let mut ingress = queue.served.of.lock();
            let (nothing, due) = schedule::arm(&mut *ingress, disarms);
            drop(ingress);
            self.scheduler.record_arm(nothing, due);
        }
        self.bursts += 1;
        self.frames += taken.frames as u64;
        self.time = self.now();
    }
}

/// Address of the receiver of a pair.
pub fn receiver(pair: usize) -> [u8; 6] {
    let [high, low] = (pair as u16).to_be_bytes();
    let mac = MACS[1];
    [mac[0], mac[1], mac[2], high, low, mac[5]]
}

fn active(id: PortId, egress: EgressQueue) -> Port {
    let port = Port::new(id, "p".into(), vec![egress]);
    port.set_active(1);
    port
}
