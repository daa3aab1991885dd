//! One queue, its peer and the program's scheduler in virtual time. Frames pass the program's
//! forwarder to another peer, which is notified by the same policy.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use shm::Seg;
use switch::direct::Direct;
use switch::fdb::PortId;
use switch::forward::{EgressQueue, Port, Table};
use switch::frame::Burst;
use switch::poll::{Costs, Policy};
use switch::port::{Egress, Fault, Ingress, Steer};
use switch::schedule::{self, BurstResult};
use switch::stats::EgressStats;
use switch::time::{Instant, Ns};
use switch::vnet::{Offloads, VnetHdr};

use crate::load::Load;
use crate::virtual_worker::{self, Clock, Guest, Hands, Kicks, Mistake, POLL, Queue, Worker};

/// Entries of the ring; frames that arrive while it is full are lost.
const RING: usize = 256;
/// Time of one frame.
const FRAME: Ns = Ns::new(60);

static BYTES: [u8; 60] = [2; 60];

/// Results of a run.
#[derive(Default)]
pub struct Seen {
    pub length_ns: u64,
    pub served: u64,
    /// Time awake, apart from frames, in ns.
    pub polled_ns: u64,
    /// Sleeps without a time-out.
    pub sleeps: u64,
    /// Sleeps ended by a notification.
    pub wakes: u64,
    pub naps: u64,
    /// Notifications of the next peer.
    pub calls: u64,
    /// Times from a frame's arrival until it was taken, in ns.
    pub late: Vec<u32>,
    /// Times from its forwarding until the next peer was notified, in ns.
    pub notified: Vec<u32>,
    pub left: usize,
    pub lost: u64,
    /// Changes between naps and empty polls.
    pub turns: u64,
}

impl Seen {
    /// Converts `n` in the run's length to a rate per second.
    pub fn second(&self, n: u64) -> u64 {
        n * 1_000_000 / (self.length_ns / 1000)
    }

    /// CPU time, in ns.
    pub fn cpu_ns(&self, costs: Costs) -> u64 {
        let waits = costs.wake * self.wakes + costs.nap * self.naps;
        self.polled_ns + self.served * FRAME.get() + waits.get()
    }
}

/// What both sides of the switch share with their peers.
struct Outside {
    load: Load,
    /// Arrival time of each waiting frame.
    ring: VecDeque<Instant>,
    kicks: Kicks,
    /// Forwarding times of frames without a notification yet.
    unnotified: Vec<Instant>,
    seen: Seen,
}

type Shared = Arc<Mutex<Outside>>;

fn lock(outside: &Shared) -> MutexGuard<'_, Outside> {
    outside.lock().expect("one thread")
}

/// Runs `policy` on both sides of the switch for `length_ns`.
pub fn run(policy: Policy, costs: Costs, mistake: Mistake, load: Load, length_ns: u64) -> Seen {
    let outside = Arc::new(Mutex::new(Outside {
        load,
        ring: VecDeque::new(),
        kicks: Kicks::default(),
        unnotified: Vec::new(),
        seen: Seen { length_ns, ..Seen::default() },
    }));
    let clock = Clock::default();
    let receive = Receive(Arc::clone(&outside), clock.clone());
    let egress = EgressQueue::new(
        Arc::new(shm::sync::Mutex::new(shm::sync::Lock::Egress, receive)),
        Arc::<EgressStats>::default(),
    );
    egress.set_call(policy);
    let receiver = Port::new(PortId(1), "receiver".into(), vec![egress]);
    receiver.set_active(1);
    let table: Table = vec![None, Some(Arc::new(receiver))];
    let mut worker = Worker::new(0, costs, table, clock.clone());
    worker.mistake = mistake;
    let end = Instant::from_ns(length_ns);
    let transmit = Transmit { outside: Arc::clone(&outside), clock, policy, end };
    worker.scheduler.add(virtual_worker::served(0, 0, policy, transmit), Instant::START);
    worker.run_until(end);
    let Worker { counts, clock, .. } = worker;
    let mut outside = lock(&outside);
    let mut seen = std::mem::take(&mut outside.seen);
    let awake = (clock.now() - Instant::START) - counts.slept;
    seen.polled_ns = (awake - FRAME * seen.served).get();
    (seen.sleeps, seen.wakes, seen.naps) = (counts.sleeps, counts.wakes, counts.naps);
    (seen.turns, seen.left) = (counts.turns, outside.ring.len());
    seen
}

impl Outside {
    /// When the next frame arrives.
    fn next(&self) -> Instant {
        Instant::from_ns(self.load.peek())
    }

    /// Adds frames that have arrived by `now`.
    fn come(&mut self, now: Instant) {
        while self.next() <= now {
            if self.ring.len() < RING {
                let at = self.next();
                self.kicks.frame_came(at, !self.ring.is_empty());
                self.ring.push_back(at);
            } else {
                self.seen.lost += 1;
            }
            self.load.pop();
        }
    }

    /// Takes frames that arrived by `now`.
    fn take(&mut self, max: usize, now: Instant) -> usize {
        self.come(now);
        let frames = self.ring.len().min(max);
        for came in self.ring.drain(..frames) {
            self.seen.late.push(u32::try_from((now - came).get()).unwrap_or(u32::MAX));
        }
        self.seen.served += frames as u64;
        frames
    }

    /// The next peer is notified.
    fn notify(&mut self, now: Instant) {
        self.seen.calls += 1;
        for passed in self.unnotified.drain(..) {
            self.seen.notified.push(u32::try_from((now - passed).get()).unwrap_or(u32::MAX));
            self.load.record_reply(now.ns());
        }
    }
}

/// The queue that is polled.
struct Transmit {
    outside: Shared,
    clock: Clock,
    policy: Policy,
    end: Instant,
}

impl Transmit {
    /// Polls an empty ring until a frame arrives: many polls, of which none changes anything.
    fn poll_on(&self) {
        let (now, outside) = (self.clock.now(), lock(&self.outside));
        let until = outside.next().min(self.end);
        if outside.ring.is_empty() && until > now {
            self.clock.pass(POLL * (until - now).get().div_ceil(POLL.get()));
        }
    }
}

impl Guest for Transmit {
    fn serve(&mut self, queue: &Queue<Self>, max: usize, hands: &mut Hands<'_>) -> BurstResult {
        let Hands { forwarder, scratch, time, .. } = hands;
        let source = &queue.served.source;
        let took = schedule::burst(source, max, self, forwarder, scratch, *time, None);
        source.stats.bytes.add((took.frames * BYTES.len()) as u64);
        if took.frames == 0 && self.policy == Policy::Spin {
            self.poll_on();
        }
        took
    }

    fn arm(&mut self, disarms: bool, _: &Clock) -> bool {
        schedule::arm(self, disarms).0
    }

    fn disarm(&mut self) {
        lock(&self.outside).kicks.disarm();
    }

    fn kick_at(&self) -> Instant {
        let outside = lock(&self.outside);
        outside.kicks.at(outside.next(), !outside.ring.is_empty())
    }

    fn take_kick(&mut self) {
        let mut outside = lock(&self.outside);
        outside.come(self.clock.now());
        outside.kicks.take();
    }
}

impl Ingress for Transmit {
    fn burst(
        &mut self,
        max: usize,
        now: Instant,
        burst: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        let frames = lock(&self.outside).take(max, now);
        self.clock.pass(POLL + FRAME * frames as u64);
        if frames > 0 {
            for i in 0..frames {
                burst.segs.push(Seg::of(&BYTES));
                burst.push_at(i, 1, BYTES.len() as u32, VnetHdr::NONE);
            }
            forward(burst);
            *burst = std::mem::take(burst).recycle();
        }
        Ok(frames)
    }

    fn supports_direct(&self) -> bool {
        false
    }

    fn read_into(&mut self, _: usize, _: &mut dyn Direct) -> Result<usize, Fault> {
        Ok(0)
    }

    fn arm(&mut self) -> bool {
        self.clock.pass(POLL);
        let mut outside = lock(&self.outside);
        // A frame that is there before the peer can see what is asked for causes no kick, nor does
        // any later one.
        outside.come(self.clock.now());
        outside.kicks.arm();
        outside.ring.is_empty()
    }

    fn due(&self) -> Option<Instant> {
        None
    }

    fn disarm(&mut self) {
        lock(&self.outside).kicks.disarm();
    }
}

/// The next peer, which always has room.
struct Receive(Shared, Clock);

impl Egress for Receive {
    fn offloads(&self) -> Offloads {
        Offloads::ALL
    }

    fn accepts_granted(&self) -> bool {
        false
    }

    fn put(&mut self, _: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        let times = std::iter::repeat_n(self.1.now(), picks.len());
        lock(&self.0).unnotified.extend(times);
        Ok(picks.len())
    }

    fn put_parts(&mut self, _: &[u8], _: &[Seg<'_>], _: &VnetHdr) -> Result<bool, Fault> {
        unreachable!("no frame is made by the switch")
    }

    fn room(&mut self, _: u32, limit: usize) -> Result<usize, Fault> {
        Ok(limit)
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        None
    }

    fn steer(&self) -> Option<Arc<dyn Steer>> {
        None
    }

    fn flush(&mut self) {}

    fn notify(&mut self) {
        lock(&self.0).notify(self.1.now());
    }

    fn arm(&mut self) -> bool {
        unreachable!("it is never full")
    }

    fn disarm(&mut self) {}
}
