use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;

use shm::Seg;
use shm::sync::{Lock, Mutex};

use super::*;
use crate::direct::{Direct, DirectFrame, Lent};
use crate::fdb::Fdb;
use crate::forward::{EgressQueue, Events, Mode, Port};
use crate::frame::Burst;
use crate::port::{Egress, Fault, Steer};
use crate::vnet::{Offloads, VnetHdr};

/// A receiver that counts.
#[derive(Default)]
struct Receiver {
    lends: bool,
    asked: usize,
    flushed: usize,
}

impl Egress for Receiver {
    fn offloads(&self) -> Offloads {
        Offloads::ALL
    }

    fn accepts_granted(&self) -> bool {
        false
    }

    fn put(&mut self, _: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        Ok(picks.len())
    }

    fn put_parts(&mut self, _: &[u8], _: &[Seg<'_>], _: &VnetHdr) -> Result<bool, Fault> {
        Ok(true)
    }

    fn room(&mut self, _: u32, limit: usize) -> Result<usize, Fault> {
        Ok(limit)
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        self.asked += 1;
        if self.lends { Some(self) } else { None }
    }

    fn steer(&self) -> Option<Arc<dyn Steer>> {
        None
    }

    fn flush(&mut self) {
        self.flushed += 1;
    }

    fn notify(&mut self) {}

    fn arm(&mut self) -> bool {
        true
    }

    fn disarm(&mut self) {}
}

impl Direct for Receiver {
    fn takes(&self) -> Offloads {
        Offloads::ALL
    }

    fn lend<'m>(&'m mut self, _: usize, _: u32, _: &mut Lent<'m>) {}

    fn accept(&mut self, came: &[DirectFrame]) -> usize {
        came.len()
    }

    fn take_back(&mut self, _: usize, _: &mut [u8]) {}

    fn discard(&mut self, _: usize, _: u32) {}

    fn record_failure(&mut self, _: usize, _: u32) -> Result<(), Fault> {
        Ok(())
    }
}

/// A sender that reports a fixed number of frames read.
struct Sender {
    direct: bool,
    reads: Result<usize, Fault>,
    asked: usize,
}

impl Ingress for Sender {
    fn burst(
        &mut self,
        _: usize,
        _: Instant,
        _: &mut Burst<'static>,
        _: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        Ok(0)
    }

    fn supports_direct(&self) -> bool {
        self.direct
    }

    fn read_into(&mut self, max: usize, _: &mut dyn Direct) -> Result<usize, Fault> {
        assert_eq!(max, BURST_MAX);
        self.asked += 1;
        self.reads.clone()
    }

    fn arm(&mut self) -> bool {
        true
    }

    fn due(&self) -> Option<Instant> {
        None
    }

    fn disarm(&mut self) {}
}

struct Rig {
    forwarder: Forwarder,
    ports: Vec<Arc<Port>>,
    receivers: Vec<Arc<Mutex<Receiver>>>,
    sender: Sender,
}

/// Ports 0 and 1, each with two queues.
fn rig(mode: Mode) -> Rig {
    let lends =
        || Arc::new(Mutex::new(Lock::Egress, Receiver { lends: true, ..Receiver::default() }));
    let receivers: Vec<_> = (0..4).map(|_| lends()).collect();
    let port = |(id, queues): (usize, &[Arc<Mutex<Receiver>>])| {
        let queue = |q: &Arc<Mutex<Receiver>>| EgressQueue::new(q.clone(), Arc::default());
        let port = Port::new(PortId(id as u16), "p".into(), queues.iter().map(queue).collect());
        port.set_active(2);
        Arc::new(port)
    };
    let ports: Vec<_> = receivers.chunks(2).enumerate().map(port).collect();
    let table = Arc::new(ports.iter().cloned().map(Some).collect());
    let fdb = Arc::new(Fdb::new(64, [1, 2], 300, 4));
    let sender = Sender { direct: true, reads: Ok(3), asked: 0 };
    Rig { forwarder: Forwarder::new(mode, 0, fdb, table, 7), ports, receivers, sender }
}

impl Rig {
    /// One round of the sender, queue `queue` of port 0; returns the number of direct reads.
    fn round(&mut self, queue: u16) -> usize {
        self.findings(queue).0
    }

    /// The same, with what it found.
    fn findings(&mut self, queue: u16) -> (usize, Findings) {
        let tuning = Arc::new(crate::tuning::Tuning::new(crate::poll::Policy::Event));
        let from = Source::new(PortId(0), queue, Arc::default(), tuning);
        let before = self.sender.asked;
        let found = self.forwarder.direct(&from, &mut self.sender, Instant::START);
        (self.sender.asked - before, found)
    }

    fn flushed(&self) -> Vec<usize> {
        self.receivers.iter().map(|r| r.lock().flushed).collect()
    }
}

#[test]
fn direct_read_uses_the_partners_queue_of_the_cross_connect() {
    let mut rig = rig(Mode::Cross);
    assert_eq!((rig.round(0), rig.round(1), rig.round(2)), (1, 1, 1));
    assert_eq!(rig.flushed(), [0, 0, 2, 1]);
    rig.ports[1].set_active(1);
    assert_eq!(rig.round(1), 1);
    assert_eq!(rig.flushed(), [0, 0, 3, 1]);
}

#[test]
fn nothing_is_read_without_a_known_receiver_or_during_a_capture() {
    assert_eq!(rig(Mode::Switch).round(0), 0);
    let mut rig = rig(Mode::Cross);
    rig.sender.direct = false;
    assert_eq!(rig.round(0), 0);
    rig.sender.direct = true;
    for port in 0..2 {
        let (sink, _source) = sync_channel(1);
        rig.ports[port].mirror.set(Some(sink));
        assert_eq!(rig.round(0), 0);
        rig.ports[port].mirror.set(None);
    }
    rig.ports[1].set_active(0);
    assert_eq!(rig.round(0), 0);
    assert_eq!(rig.receivers[2].lock().asked, 0, "not called at all");
    rig.ports[1].set_active(2);
    rig.receivers[2].lock().lends = false;
    assert_eq!(rig.round(0), 0);
    let table = Arc::new(vec![Some(Arc::clone(&rig.ports[0]))]);
    rig.forwarder.set_table(table);
    assert_eq!(rig.round(0), 0, "no partner");
}

#[test]
fn frames_read_are_published_and_wake_waiting_workers() {
    let mut rig = rig(Mode::Cross);
    let egress = &Arc::clone(&rig.ports[1]).egress[0];
    egress.waiters.store(1 << 9, Ordering::Relaxed);
    rig.sender.reads = Ok(0);
    assert_eq!(rig.findings(0), (1, Findings::default()));
    assert_eq!(rig.flushed(), [0; 4]);
    rig.sender.reads = Ok(1);
    assert_eq!(rig.findings(0), (1, Findings { wake: 1 << 9, ..Findings::default() }));
    assert_eq!(rig.flushed(), [0, 0, 1, 0]);
}

#[test]
fn fault_is_reported_for_the_receiver() {
    let mut rig = rig(Mode::Cross);
    rig.sender.reads = Err(Fault("gone".into()));
    let epoch = rig.ports[1].epoch();
    let fault = PortEvent::Fault { port: PortId(1), epoch, fault: Fault("gone".into()) };
    assert_eq!(
        rig.findings(0),
        (1, Findings { events: Events::from_iter([fault]), ..Findings::default() })
    );
    assert_eq!(rig.flushed(), [0, 0, 1, 0], "frames before it are published");
}
