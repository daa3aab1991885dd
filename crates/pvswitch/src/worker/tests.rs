mod due;
mod idle;
mod kicks;
mod weights;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use switch::fdb::Fdb;
use switch::forward::{Mode, Source};
use switch::poll::Costs;
use switch::port::{Fault, Ingress};
use switch::stats::IngressStats;
use switch::tuning::Tuning;

use super::*;
use crate::pool::{Common, Placement};

const TOKEN: u64 = 4;

/// What a guest's transmit queue is for a worker: frames that wait, and some that are held.
#[derive(Default)]
struct Guest {
    /// Frames it made available that were not taken.
    waiting: AtomicUsize,
    taken: AtomicUsize,
    /// Frames that its receivers have no room for.
    held: AtomicUsize,
    /// Whether they have.
    room: AtomicBool,
    bursts: AtomicUsize,
}

struct Transmit(Arc<Guest>);

impl Ingress for Transmit {
    fn burst(
        &mut self,
        max: usize,
        _now_ns: u64,
        _burst: &mut Burst<'static>,
        _forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        let Guest { waiting, taken, held, room, bursts } = &*self.0;
        bursts.fetch_add(1, Ordering::SeqCst);
        let old = held.load(Ordering::SeqCst);
        let new = waiting.load(Ordering::SeqCst).min(max.saturating_sub(old));
        waiting.fetch_sub(new, Ordering::SeqCst);
        taken.fetch_add(new, Ordering::SeqCst);
        if room.load(Ordering::SeqCst) {
            held.store(0, Ordering::SeqCst);
        }
        Ok(old + new)
    }

    fn held(&self) -> usize {
        self.0.held.load(Ordering::SeqCst)
    }

    fn arm(&mut self) -> bool {
        self.0.waiting.load(Ordering::SeqCst) == 0
    }

    fn disarm(&mut self) {}
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

const COSTS: Costs = Costs { wake_ns: 5000, wake_late_ns: 5000, nap_ns: 5000, nap_late_ns: 5000 };

fn pool(workers: u8, placement: Placement, costs: Costs) -> Arc<Pool> {
    let common = Common {
        fdb: Arc::new(Fdb::new(64, [1, 2], 300, 16)),
        mode: Mode::Switch,
        flow_key: 1,
        costs,
        reports: mpsc::channel().0,
        reports_wake: event(),
        epoch: Instant::now(),
    };
    Pool::start(workers, &[], placement, common).unwrap()
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
        let source = Source {
            port: PortId(0),
            queue: 0,
            stats: Arc::clone(&self.stats),
            tuning: Arc::clone(&self.tuning),
        };
        let ingress = Arc::new(Mutex::new(Transmit(Arc::clone(&self.guest))));
        let kick = Some(Arc::clone(&self.kick) as KickFd);
        self.pool.serve(Served { token: TOKEN, source, ingress, kick, notifies: true });
    }

    fn kick(&self) {
        vhost_user::sys::signal(self.kick.as_fd());
    }

    fn drain(&self, on: bool) {
        self.tuning.set_drain(on);
        self.pool.look(TOKEN);
    }

    fn wait_for(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !done(self) {
            assert!(Instant::now() < end, "waited in vain for {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Until its worker has nothing to do.
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
fn drained_queue_wakes_no_one_however_often_its_guest_kicks() {
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
        // Wake-ups from before the queue was drained may still be on their way.
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
        // And it is heard again.
        rig.guest.waiting.store(1, Ordering::SeqCst);
        rig.kick();
        rig.wait_for("a frame", |rig| rig.taken() == 506);
    }
}

#[test]
fn queue_is_not_drained_while_frames_of_it_are_held() {
    let held = Guest { held: AtomicUsize::new(3), ..Guest::default() };
    let rig = Rig::new(Policy::Event, held);
    rig.wait_for("held frames to be told", |rig| rig.tuning.held() == 3);
    rig.drain(true);
    rig.guest.waiting.store(7, Ordering::SeqCst);
    // They are tried every 12.5 ms.
    let bursts = || rig.guest.bursts.load(Ordering::SeqCst);
    let tried = bursts() + 4;
    rig.wait_for("tries", |_| bursts() >= tried);
    assert_eq!((rig.tuning.drain(), rig.tuning.held(), rig.taken()), (Drain::Asked, 3, 0));
    rig.guest.room.store(true, Ordering::SeqCst);
    rig.pool.wake(1);
    rig.wait_for("the queue to be drained", Rig::is_drained);
    assert_eq!((rig.tuning.held(), rig.taken()), (0, 0));
    rig.drain(false);
    rig.wait_for("the frames that waited", |rig| rig.taken() == 7);
}

#[test]
fn queue_that_is_taken_away_is_drained_and_stays_so_when_it_comes_back() {
    let held = Guest { held: AtomicUsize::new(3), ..Guest::default() };
    let rig = Rig::new(Policy::Event, held);
    rig.drain(true);
    rig.wait_for("held frames to be told", |rig| rig.tuning.held() == 3);
    rig.pool.drop_queue(TOKEN);
    rig.wait_for("the queue to be drained", Rig::is_drained);
    assert_eq!((rig.tuning.held(), rig.pool.serves(TOKEN)), (0, false));
    // Its guest was restarted: what was held is gone, new frames wait.
    rig.guest.held.store(0, Ordering::SeqCst);
    rig.guest.waiting.store(2, Ordering::SeqCst);
    let bursts = rig.guest.bursts.load(Ordering::SeqCst);
    rig.serve();
    rig.wait_for("a look", |rig| rig.guest.bursts.load(Ordering::SeqCst) > bursts);
    assert_eq!((rig.taken(), rig.is_drained()), (0, true));
    rig.drain(false);
    rig.wait_for("the frames that waited", |rig| rig.taken() == 2);
}
