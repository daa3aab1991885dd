//! Queues paused because their destination is full.

use switch::forward::{EgressQueue, Port};
use switch::hold::PAUSE_WINDOW;
use switch::poll::State;
use switch::stats::EgressStats;
use switch::time::Ns;

use super::*;

/// A receiver with room for this many frames, and the number of frames received.
#[derive(Default)]
struct Receiver {
    room: AtomicUsize,
    took: AtomicUsize,
    /// Whether it is to notify when it has room.
    armed: AtomicBool,
}

struct Receive(Arc<Receiver>);

impl Receives for Receive {
    fn put(&mut self, _: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        let done = picks.len().min(self.0.room.load(Ordering::SeqCst));
        self.0.room.fetch_sub(done, Ordering::SeqCst);
        self.0.took.fetch_add(done, Ordering::SeqCst);
        Ok(done)
    }

    fn room(&mut self, limit: usize) -> usize {
        limit.min(self.0.room.load(Ordering::SeqCst))
    }

    fn arm(&mut self) -> bool {
        self.0.armed.store(true, Ordering::SeqCst);
        self.0.room.load(Ordering::SeqCst) == 0
    }

    fn disarm(&mut self) {
        self.0.armed.store(false, Ordering::SeqCst);
    }
}

/// A sender, port 0, cross-connected to a receiver, port 1.
struct Wired {
    rig: Rig,
    receiver: Arc<Receiver>,
    kick: Arc<OwnedFd>,
}

impl Wired {
    fn new(policy: &str) -> Self {
        Self::costing(COSTS, policy)
    }

    fn costing(costs: Costs, policy: &str) -> Self {
        let guest = Guest { is_shown: AtomicBool::new(true), ..Guest::default() };
        let rig = Rig::costing(costs, policy.parse().unwrap(), guest);
        let (receiver, kick) = (Arc::new(Receiver::default()), event());
        let queue = Arc::new(Mutex::new(Lock::Egress, Fake(Receive(Arc::clone(&receiver)))));
        let queue = EgressQueue::new(queue, Arc::new(EgressStats::default()));
        let port = Arc::new(Port::new(PortId(1), "r".into(), vec![queue]));
        port.set_active(1);
        let to = token(PortId(1), 0, true);
        rig.pool.watch(to, Arc::clone(&port), 0, Some(kick.clone()));
        rig.pool.set_table(&Arc::new(vec![None, Some(port)]));
        // A round that has begun continues with the table before, where a burst has no destination:
        // frames are sent only once the worker has ended it and run its commands.
        drop(rig.pool.freeze(Duration::from_secs(20)).expect("the worker ends its round"));
        Self { rig, receiver, kick }
    }

    fn send(&self, frames: usize) {
        self.rig.guest.waiting.fetch_add(frames, Ordering::SeqCst);
        self.rig.kick();
    }

    /// The receiver adds buffers, and notifies if requested.
    fn offer(&self, buffers: usize) {
        self.receiver.room.fetch_add(buffers, Ordering::SeqCst);
        if self.receiver.armed.load(Ordering::SeqCst) {
            os::signal(self.kick.as_fd());
        }
    }

    fn delivered(&self) -> usize {
        self.receiver.took.load(Ordering::SeqCst)
    }
}

#[test]
fn sender_of_a_full_destination_loses_nothing_and_resumes_when_there_is_room() {
    for policy in ["event", "napi:8", "timer:1000", "coalesce:200,16", "spin", "adaptive"] {
        let wired = Wired::new(policy);
        wired.send(1000);
        // Held frames are dropped after 200 ms: buffers are added steadily, as by a slow receiver.
        let mut offered = 0;
        while wired.delivered() < 1000 {
            wired.offer(20);
            offered += 20;
            let end = Instant::now() + Duration::from_secs(20);
            while wired.delivered() < offered.min(1000) && wired.rig.stats.drops_no_room.get() == 0
            {
                let all: Vec<_> = wired.rig.stats.all().filter(|(_, n)| *n > 0).collect();
                assert!(
                    Instant::now() < end,
                    "{policy}: {} of {offered}: {all:?}",
                    wired.delivered()
                );
                std::thread::yield_now();
            }
            // If this machine was suspended for that long, frames were dropped.
            if wired.rig.stats.drops_no_room.get() > 0 {
                break;
            }
        }
        let lost = wired.rig.stats.drops_no_room.get();
        assert_eq!(wired.rig.taken().min(1000), wired.rig.taken());
        assert!(lost > 0 || wired.delivered() == 1000, "{policy}");
    }
}

#[test]
fn paused_queue_takes_at_most_a_burst_and_its_worker_sleeps() {
    let wired = Wired::new("event");
    wired.send(1000);
    wired.rig.wait_for("a pause", |rig| rig.stats.pauses.get() > 0);
    let taken = wired.rig.taken();
    assert!(taken <= 64, "{taken}");
    let stats = &wired.rig.pool.workers()[0].stats;
    wired.rig.wait_for("sleep", |_| {
        let before = stats.sleeps.load(Ordering::SeqCst) + stats.naps.load(Ordering::SeqCst);
        before > 0
    });
}

#[test]
fn room_at_a_receiver_does_not_train_adaptive() {
    // After a frame it polls for as long as a sleep costs.
    let costs = Costs { wake: Ns::from_ms(20), ..COSTS };
    let wired = Wired::costing(costs, "adaptive");
    let cold = |rig: &Rig| rig.tuning.state() == State::Cold;
    let polls = |rig: &Rig| rig.stats.polls.get();
    wired.send(64);
    wired.rig.wait_for("frames", |rig| rig.taken() == 64);
    // One more frame, and the destination is full.
    let full = Instant::now();
    wired.send(1);
    wired.rig.wait_for("a pause", |rig| rig.stats.pauses.get() > 0);
    wired.rig.wait_for("the queue to be cold", cold);
    for _ in 0..10 {
        let before = polls(&wired.rig);
        wired.rig.pool.wake(1);
        std::thread::sleep(Duration::from_millis(1));
        wired.rig.wait_for("the queue to be cold", cold);
        let polled = polls(&wired.rig) - before;
        // Such a destination is not waited for any longer: this machine was too busy.
        if full.elapsed() > Duration::from(PAUSE_WINDOW) {
            break;
        }
        // Full destinations are also retried every 12.5 ms.
        assert!(polled < 50, "{polled} polls");
    }
}
