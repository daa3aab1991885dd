//! Announcements of guests' addresses (SEND_RARP).

use switch::flow::rarp;
use switch::forward::{EgressQueue, Port};
use switch::stats::EgressStats;
use vhost_user::net::{Host, Pair};

use super::*;
use crate::limit::PortLog;
use crate::ports::{Guest, PortHost};

/// Accepts all frames, and keeps their heads.
#[derive(Default)]
struct Receive(Vec<Vec<u8>>);

impl Receives for Receive {
    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        self.0.extend(picks.iter().map(|pick| burst.head((*pick).into()).to_vec()));
        Ok(picks.len())
    }
}

/// A queue whose burst ends when the gate opens; its worker is blocked until then.
#[derive(Default)]
struct Gate {
    is_open: AtomicBool,
    entered: AtomicBool,
}

struct Gated(Arc<Gate>);

impl Transmits for Gated {
    fn burst(
        &mut self,
        _: usize,
        _: switch::time::Instant,
        _: &mut Burst<'static>,
        _: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        self.0.entered.store(true, Ordering::SeqCst);
        while !self.0.is_open.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(0)
    }
}

/// A guest at port 0, its front-end, two other guests, and port 3, which blocks their worker.
struct Announcer {
    rig: Rig,
    gate: Arc<Gate>,
    receivers: [Arc<Mutex<Fake<Receive>>>; 2],
    port: Arc<Port>,
    host: PortHost,
}

const MACS: [[u8; 6]; 3] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], [2, 0, 0, 0, 0, 3]];

impl Announcer {
    fn new() -> Self {
        let pool = pool_of(Mode::Switch, 1, Placement::Single, COSTS);
        let receivers =
            [(); 2].map(|()| Arc::new(Mutex::new(Lock::Egress, Fake(Receive::default()))));
        let port = |id: u16, queues| {
            let port = Arc::new(Port::new(PortId(id), id.to_string(), queues));
            port.set_active(port.egress.len() as u16);
            port
        };
        let guest = port(0, Vec::new());
        let mut table = vec![Some(Arc::clone(&guest))];
        for (id, receiver) in (1..).zip(&receivers) {
            let stats = Arc::new(EgressStats::default());
            let queue = EgressQueue::new(Arc::<Mutex<Fake<Receive>>>::clone(receiver), stats);
            table.push(Some(port(id, vec![queue])));
        }
        pool.set_table(&Arc::new(table));
        let (tuning, gate) = (Arc::new(Tuning::new(Policy::Event)), Arc::<Gate>::default());
        let host = PortHost::new(
            Arc::clone(&guest),
            vec![Pair::new()],
            vec![Arc::clone(&tuning)],
            Arc::clone(&pool),
            Arc::new(Mutex::new(Lock::Guest, Guest::default())),
            Arc::new(PortLog::new("guest", Arc::clone(&guest.account), Clock::start())),
        );
        let source =
            Source::new(PortId(3), 0, Arc::default(), Arc::new(Tuning::new(Policy::Event)));
        let ingress = Arc::new(Mutex::new(Lock::Ingress, Fake(Gated(Arc::clone(&gate)))));
        let name = token(PortId(3), 0, false);
        pool.serve(Served { token: name, source, ingress, kick: None, notifies: true });
        let rig = Rig { pool, guest: Arc::default(), kick: event(), tuning, stats: Arc::default() };
        Self { rig, gate, receivers, port: guest, host }
    }

    fn serve(&self) {
        let Rig { pool, guest, stats, tuning, .. } = &self.rig;
        let source = Source::new(PortId(0), 0, Arc::clone(stats), Arc::clone(tuning));
        let ingress = Arc::new(Mutex::new(Lock::Ingress, Fake(Transmit(Arc::clone(guest)))));
        let name = token(PortId(0), 0, false);
        pool.serve(Served { token: name, source, ingress, kick: None, notifies: true });
    }

    fn announce(&mut self, macs: &[[u8; 6]]) {
        macs.iter().for_each(|mac| self.host.announce(*mac));
    }

    fn keep_busy(&self) {
        self.rig.wait_for("the worker to be busy", |_| self.gate.entered.load(Ordering::SeqCst));
    }

    fn got(&self) -> [Vec<Vec<u8>>; 2] {
        [0, 1].map(|i| self.receivers[i].lock().0.0.clone())
    }

    /// Waits until each of the others has `frames`.
    fn wait_for(&self, frames: &[[u8; 60]]) {
        let frames: Vec<_> = frames.iter().map(|frame| frame.to_vec()).collect();
        self.rig.wait_for("announcements", |_| {
            let got = self.got();
            got.iter().all(|got| got.len() >= frames.len())
        });
        assert_eq!(self.got(), [frames.clone(), frames]);
    }
}

impl std::ops::Drop for Announcer {
    fn drop(&mut self) {
        // Unblocks the worker, also if a test fails.
        self.gate.is_open.store(true, Ordering::SeqCst);
    }
}

/// Issue 14, row 10.
#[test]
fn address_is_announced_by_the_worker_of_its_port_and_charged_to_that_port() {
    let mut all = Announcer::new();
    all.serve();
    all.keep_busy();
    all.announce(&MACS[..1]);
    // Sent by the worker only, once it is free.
    all.wait_for(&[]);
    all.gate.is_open.store(true, Ordering::SeqCst);
    all.wait_for(&[rarp(MACS[0])]);
    let stats = Arc::clone(&all.rig.stats);
    all.rig.wait_for("its time to be counted", |_| stats.served_ns.get() > 0);
    assert_eq!((stats.frames.get(), stats.bytes.get()), (1, 60));
    assert_eq!(all.port.account.announcements.spent(), 1);
    let at = all.rig.pool.common.fdb.lookup(MACS[0], 0, 1);
    assert_eq!(at, Some(PortId(0)), "frames to the guest reach its port");
}

/// Issue 14, row 10.
#[test]
fn only_the_latest_announcement_of_a_port_is_pending() {
    let mut all = Announcer::new();
    all.serve();
    all.keep_busy();
    all.announce(&MACS);
    // The number of commands is unchanged: an announcement is pending already.
    all.announce(&MACS[2..]);
    assert_eq!(all.port.account.announcements.spent(), 3);
    // Above the rate, the pending announcement is not replaced.
    assert!(all.port.account.set_limit("announcements", 0));
    all.announce(&MACS[..2]);
    assert_eq!(all.port.account.announcements.refused(), 2);
    all.gate.is_open.store(true, Ordering::SeqCst);
    all.wait_for(&[rarp(MACS[2])]);
    all.rig.wait_for_sleep();
    assert_eq!(all.rig.stats.frames.get(), 1);
    all.wait_for(&[rarp(MACS[2])]);
}

/// Issue 14, row 10.
#[test]
fn address_is_announced_once_its_guest_is_served_and_not_while_it_is_drained() {
    let mut all = Announcer::new();
    all.gate.is_open.store(true, Ordering::SeqCst);
    // Its rings have not started.
    all.announce(&MACS[..1]);
    all.rig.wait_for_sleep();
    all.wait_for(&[]);
    all.serve();
    all.wait_for(&[rarp(MACS[0])]);
    let name = token(PortId(0), 0, false);
    all.rig.tuning.set_drain(true);
    all.rig.pool.poll(name);
    all.rig.wait_for("the queue to be drained", Rig::is_drained);
    all.announce(&MACS[1..2]);
    all.rig.wait_for_sleep();
    assert_eq!(all.rig.stats.frames.get(), 1);
    all.rig.tuning.set_drain(false);
    all.rig.pool.poll(name);
    all.wait_for(&[rarp(MACS[0]), rarp(MACS[1])]);
}
