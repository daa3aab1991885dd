mod announce;
mod due;
mod fakes;
mod faults;
mod kicks;
mod layouts;
mod paused;
mod shares;
mod weights;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use os::Priority;
use rustix::event::{EventfdFlags, eventfd};
use shm::sync::{Lock, Mutex};
use switch::fdb::Fdb;
use switch::forward::{Mode, Source};
use switch::poll::{Costs, Policy};
use switch::port::Fault;
use switch::schedule::{Placement, token};
use switch::stats::IngressStats;
use switch::time::Ns;
use switch::tuning::{Drain, Tuning};
use switch::vnet::VnetHdr;

use self::fakes::{Fake, Receives, Transmits};
use super::*;
use crate::clock::Clock;
use crate::pool::Common;

const TOKEN: u64 = 4;

/// State of a guest's transmit queue.
#[derive(Default)]
struct Guest {
    /// Number of frames available and not taken.
    waiting: AtomicUsize,
    taken: AtomicUsize,
    /// Its frames are passed to the switch; those of other guests are dropped.
    is_shown: AtomicBool,
    bursts: AtomicUsize,
}

/// Busy-waits for this long.
fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

static FRAME: [u8; 60] = [2; 60];

struct Transmit(Arc<Guest>);

impl Transmits for Transmit {
    fn burst(
        &mut self,
        max: usize,
        _now: switch::time::Instant,
        burst: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        let Guest { waiting, taken, is_shown, bursts } = &*self.0;
        bursts.fetch_add(1, Ordering::SeqCst);
        let new = waiting.load(Ordering::SeqCst).min(max);
        waiting.fetch_sub(new, Ordering::SeqCst);
        taken.fetch_add(new, Ordering::SeqCst);
        if is_shown.load(Ordering::SeqCst) && new > 0 {
            for i in 0..new {
                burst.segs.push(shm::Seg::of(&FRAME));
                burst.push_at(i, 1, FRAME.len() as u32, VnetHdr::NONE);
            }
            forward(burst);
            *burst = std::mem::take(burst).recycle();
        }
        Ok(new)
    }

    fn arm(&mut self) -> bool {
        self.0.waiting.load(Ordering::SeqCst) == 0
    }
}

/// A worker with one queue.
struct Rig {
    pool: Arc<Pool>,
    guest: Arc<Guest>,
    kick: Arc<OwnedFd>,
    tuning: Arc<Tuning>,
    stats: Arc<IngressStats>,
}

fn event() -> Arc<OwnedFd> {
    Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap())
}

const COSTS: Costs = {
    let time = Ns::from_us(5);
    Costs { wake: time, wake_late: time, nap: time, nap_late: time, copy: time }
};

fn pool(workers: u8, placement: Placement, costs: Costs) -> Arc<Pool> {
    pool_of(Mode::Cross, workers, placement, costs)
}

fn pool_of(mode: Mode, workers: u8, placement: Placement, costs: Costs) -> Arc<Pool> {
    reporting(mpsc::channel().0, mode, workers, placement, costs)
}

fn reporting(
    reports: mpsc::Sender<Report>,
    mode: Mode,
    workers: u8,
    placement: Placement,
    costs: Costs,
) -> Arc<Pool> {
    let common = Common {
        fdb: Arc::new(Fdb::new(64, [1, 2], 300, 16)),
        mode,
        flow_key: 1,
        costs,
        reports,
        reports_wake: event(),
        active: None,
        clock: Clock::start(),
    };
    Pool::start(workers, &[], placement, Priority::Normal, common).unwrap()
}

/// A worker run by the test itself.
fn worker_of(pool: Arc<Pool>) -> Worker {
    // The threads have ended; the pool keeps its queues and loads.
    pool.stop();
    Worker::new(Arc::new(Handle::new(0).unwrap()), pool)
}

/// Runs a worker's round, up to the next one or to sleep.
fn round(worker: &mut Worker) {
    let mut begun = false;
    loop {
        match worker.scheduler.next(worker.now(), &worker.forwarder) {
            Effect::RunCommands if begun => return,
            Effect::Wait { .. } => return,
            effect => {
                begun |= matches!(effect, Effect::RunCommands);
                worker.carry_out(effect);
            }
        }
    }
}

impl Rig {
    fn new(policy: Policy, guest: Guest) -> Self {
        Self::costing(COSTS, policy, guest)
    }

    fn costing(costs: Costs, policy: Policy, guest: Guest) -> Self {
        let pool = pool(1, Placement::Single, costs);
        let (guest, kick, tuning) = (Arc::new(guest), event(), Arc::new(Tuning::new(policy)));
        let rig = Self { pool, guest, kick, tuning, stats: Arc::default() };
        rig.serve();
        rig
    }

    fn serve(&self) {
        let source = Source::new(PortId(0), 0, Arc::clone(&self.stats), Arc::clone(&self.tuning));
        let ingress = Arc::new(Mutex::new(Lock::Ingress, Fake(Transmit(Arc::clone(&self.guest)))));
        let kick = Some(Arc::clone(&self.kick) as KickFd);
        self.pool.serve(Served { token: TOKEN, source, ingress, kick, notifies: true });
    }

    fn kick(&self) {
        os::signal(self.kick.as_fd());
    }

    fn drain(&self, on: bool) {
        self.tuning.set_drain(on);
        self.pool.poll(TOKEN);
    }

    fn wait_for(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !done(self) {
            assert!(Instant::now() < end, "timed out waiting for {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until its worker is idle.
    fn wait_for_sleep(&self) {
        let stats = &self.pool.workers()[0].stats;
        self.wait_for("the worker to sleep", |_| {
            let before = stats.rounds.load(Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(20));
            stats.asleep.load(Ordering::SeqCst) && stats.rounds.load(Ordering::SeqCst) == before
        });
    }

    fn bursts(&self) -> usize {
        self.guest.bursts.load(Ordering::SeqCst)
    }

    fn taken(&self) -> usize {
        self.guest.taken.load(Ordering::SeqCst)
    }

    fn is_drained(&self) -> bool {
        self.tuning.drain() == Drain::Done
    }
}

impl std::ops::Drop for Rig {
    fn drop(&mut self) {
        self.pool.stop();
    }
}

#[test]
fn kicks_of_a_drained_queue_wake_no_worker() {
    for policy in ["event", "napi:8", "timer:1000", "coalesce:200,16", "spin", "adaptive"] {
        let rig = Rig::new(policy.parse().unwrap(), Guest::default());
        rig.guest.waiting.store(5, Ordering::SeqCst);
        rig.kick();
        rig.wait_for("frames", |rig| rig.taken() == 5);
        rig.drain(true);
        rig.wait_for("the queue to be drained", Rig::is_drained);
        let stats = &rig.pool.workers()[0].stats;
        let counts = || {
            let Guest { bursts, taken, .. } = &*rig.guest;
            let rounds = stats.rounds.load(Ordering::SeqCst);
            (rounds, bursts.load(Ordering::SeqCst), taken.load(Ordering::SeqCst))
        };
        // Wake-ups from before the drain may still be pending.
        rig.wait_for("rest", |_| {
            let before = counts();
            std::thread::sleep(Duration::from_millis(20));
            stats.asleep.load(Ordering::SeqCst) && counts() == before
        });
        let before = counts();
        for _ in 0..500 {
            rig.guest.waiting.fetch_add(1, Ordering::SeqCst);
            rig.kick();
            std::thread::sleep(Duration::from_micros(50));
        }
        assert_eq!(counts(), before, "{policy}");
        rig.drain(false);
        rig.wait_for("the frames that waited", |rig| rig.taken() == 505);
        // Its kicks are handled again.
        rig.guest.waiting.store(1, Ordering::SeqCst);
        rig.kick();
        rig.wait_for("a frame", |rig| rig.taken() == 506);
    }
}

#[test]
fn queue_stays_drained_when_it_is_dropped_and_served_again() {
    let rig = Rig::new(Policy::Event, Guest::default());
    rig.drain(true);
    rig.pool.drop_queue(TOKEN);
    rig.wait_for("the queue to be drained", Rig::is_drained);
    assert!(!rig.pool.serves(TOKEN));
    // Its guest restarts, with new frames pending.
    rig.guest.waiting.store(2, Ordering::SeqCst);
    let polls = rig.stats.polls.get();
    rig.serve();
    rig.wait_for("a poll", |rig| rig.stats.polls.get() > polls);
    assert_eq!((rig.taken(), rig.is_drained()), (0, true));
    rig.drain(false);
    rig.wait_for("the frames that waited", |rig| rig.taken() == 2);
}
