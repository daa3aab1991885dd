//! Whom a worker charges for what it does: what a queue owes is in the rounds that it waits.

use switch::fair::QUANTUM_NS;
use switch::forward::{EgressQueue, Port};
use switch::stats::EgressStats;

use super::paused::{Receive, Receiver};
use super::*;
use crate::pool::token;

/// What one look takes, and how many rounds that is.
const LOOK: Duration = Duration::from_millis(2);
const ROUNDS: u64 = LOOK.as_nanos() as u64 / QUANTUM_NS as u64;

/// Never has frames, and looking takes long.
struct Vain;

impl Ingress for Vain {
    fn burst(
        &mut self,
        _: usize,
        _: u64,
        _: &mut Burst<'static>,
        _: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        spin(LOOK);
        Ok(0)
    }

    fn arm(&mut self) -> bool {
        true
    }

    fn disarm(&mut self) {}
}

/// A worker with queues that are never left alone, of ports from 0 on; whether each can notify.
fn worker<const N: usize>(queues: [bool; N]) -> Worker {
    let mut worker = worker_of(pool(1, Placement::Single, COSTS));
    for (port, notifies) in (0..).zip(queues) {
        let tuning = Arc::new(Tuning::new(Policy::Spin));
        let source = Source::new(PortId(port), 0, Arc::default(), tuning);
        let ingress = Arc::new(Mutex::new(Vain));
        let token = token(PortId(port), 0, false);
        worker.adopt(Served { token, source, ingress, kick: None, notifies });
    }
    worker
}

/// The rounds that the queue of each port is not served in, for what it owes.
fn owed(worker: &Worker) -> Vec<u64> {
    worker.queues.iter().map(|queue| queue.share.waits(1, 1)).collect()
}

/// Issue 14, row 13.
#[test]
fn look_in_vain_is_charged_to_a_queue_that_cannot_notify_and_to_no_other() {
    let mut worker = worker([true, false, true]);
    worker.process(worker.now());
    let owed = owed(&worker);
    assert!(owed[1] >= ROUNDS - 1, "{owed:?}");
    assert_eq!((owed[0], owed[2]), (0, 0), "an operator wants those polled");
    let served = |worker: &Worker, at: usize| worker.queues[at].served.source.stats.served_ns.get();
    assert!((0..3).all(|at| served(&worker, at) >= LOOK.as_nanos() as u64));
    // It is not looked at before the others had their time.
    let polls = |at: usize| worker.queues[at].served.source.stats.polls.get();
    let before = [0, 1, 2].map(polls);
    for _ in 0..3 {
        worker.process(worker.now());
    }
    let polls = |at: usize| worker.queues[at].served.source.stats.polls.get();
    assert_eq!([0, 1, 2].map(polls), [before[0] + 3, before[1], before[2] + 3]);
}

/// Issue 14, row 13.
#[test]
fn kicks_and_the_looks_in_vain_after_them_are_charged_to_who_kicked() {
    let mut worker = worker([true, true]);
    let kicker = token(PortId(1), 0, false);
    // The kicks alone.
    let kicks = 100 * u64::from(QUANTUM_NS) / KICK_NS;
    (0..kicks).for_each(|_| worker.kicked(kicker));
    assert_eq!(owed(&worker), [0, 100]);
    worker.queues[1].share = switch::fair::Share::default();
    // And one look for all of them: the next is the operator's again.
    worker.process(worker.now());
    let after = owed(&worker);
    assert!(after[0] == 0 && after[1] >= ROUNDS - 1, "{after:?}");
    worker.queues[1].share = switch::fair::Share::default();
    worker.process(worker.now());
    assert_eq!(owed(&worker), [0, 0]);
}

/// A sender at port 0, and its receiver at port 1, which has a queue of its own to send from.
fn pair() -> (Worker, Arc<Guest>, Arc<Receiver>, Arc<Port>) {
    let mut worker = worker([]);
    let guest = Arc::new(Guest { is_shown: AtomicBool::new(true), ..Guest::default() });
    for (port, guest) in [(0, Arc::clone(&guest)), (1, Arc::default())] {
        let tuning = Arc::new(Tuning::new(Policy::Spin));
        let source = Source::new(PortId(port), 0, Arc::default(), tuning);
        let ingress = Arc::new(Mutex::new(Transmit(guest)));
        let token = token(PortId(port), 0, false);
        worker.adopt(Served { token, source, ingress, kick: None, notifies: true });
    }
    let receiver = Arc::<Receiver>::default();
    let queue = Arc::new(Mutex::new(Receive(Arc::clone(&receiver))));
    let queue = EgressQueue::new(queue, Arc::new(EgressStats::default()));
    let port = Arc::new(Port::new(PortId(1), "r".into(), vec![queue]));
    port.set_active(1);
    worker.forwarder.set_table(Arc::new(vec![None, Some(Arc::clone(&port))]));
    let watched = Watched { port: Arc::clone(&port), queue: 0, kick: None };
    worker.watched.insert(token(PortId(1), 0, true), watched);
    (worker, guest, receiver, port)
}

/// Issue 14, rows 3 and 13, and "a full receiver's waiting frames to the receiver".
#[test]
fn delivery_of_held_frames_is_charged_to_the_receiver_that_was_full() {
    let (mut worker, guest, receiver, port) = pair();
    guest.waiting.store(4, Ordering::SeqCst);
    worker.process(worker.now());
    assert_eq!(port.egress[0].held_frames(), 4);
    // Whatever its burst took: from here on it owes nothing.
    worker.queues[0].share = switch::fair::Share::default();
    let egress = &port.egress[0].stats;
    let (before, busy) = (egress.served_ns.get(), worker.window.1);
    receiver.takes_ms.store(5, Ordering::SeqCst);
    receiver.room.store(4, Ordering::SeqCst);
    worker.kicked(token(PortId(1), 0, true));
    assert_eq!((receiver.took.load(Ordering::SeqCst), port.egress[0].held_frames()), (4, 0));
    assert!(egress.served_ns.get() - before >= 5_000_000, "{:?}", egress.served_ns);
    assert!(worker.window.1 - busy >= 5_000_000, "it is a part of the worker's load");
    // One round, however long it took: its guest can answer.
    assert_eq!(owed(&worker), [0, 1]);
}

/// Issue 14, row 13.
#[test]
fn kicks_for_room_are_charged_to_the_receiver_one_round_at_most() {
    let (mut worker, _, _, _) = pair();
    worker.process(worker.now());
    worker.queues.iter_mut().for_each(|queue| queue.share = switch::fair::Share::default());
    for _ in 0..10 * u64::from(QUANTUM_NS) / KICK_NS {
        worker.kicked(token(PortId(1), 0, true));
    }
    assert_eq!(owed(&worker), [0, 1]);
}

/// Issue 14, row 10.
#[test]
fn announcement_is_charged_to_the_queue_that_it_is_made_for() {
    let (mut worker, _, receiver, _) = pair();
    receiver.takes_ms.store(LOOK.as_millis() as u64, Ordering::SeqCst);
    receiver.room.store(1, Ordering::SeqCst);
    worker.queues[0].served.source.tuning.announce([2; 6]);
    worker.process(worker.now());
    assert_eq!(receiver.took.load(Ordering::SeqCst), 1);
    let owed = owed(&worker);
    assert!(owed[0] >= ROUNDS - 1 && owed[1] == 0, "{owed:?}");
}
