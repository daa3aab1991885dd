//! Reported faults and the connections that they belong to.

use switch::forward::{EgressQueue, Port, PortEvent};
use switch::stats::EgressStats;

use super::*;

/// Reports a fault when it gets a frame.
struct Broken;

impl Receives for Broken {
    fn put(&mut self, _: &Burst<'_>, _: &[u16]) -> Result<usize, Fault> {
        Err(Fault("broken".into()))
    }

    fn arm(&mut self) -> bool {
        true
    }
}

/// Sends a frame to a receiver whose connection ends during the burst.
struct Late(Arc<Port>);

impl Transmits for Late {
    fn burst(
        &mut self,
        _: usize,
        _: switch::time::Instant,
        burst: &mut Burst<'static>,
        forward: &mut dyn FnMut(&mut Burst<'_>),
    ) -> Result<usize, Fault> {
        burst.segs.push(shm::Seg::of(&FRAME));
        burst.push_at(0, 1, FRAME.len() as u32, VnetHdr::NONE);
        forward(burst);
        *burst = std::mem::take(burst).recycle();
        self.0.end_epoch();
        Ok(1)
    }
}

/// Issue 14, row 14.
#[test]
fn late_fault_is_not_charged_to_the_next_connection() {
    let (reports, reported) = mpsc::channel();
    let mut worker = worker_of(reporting(reports, Mode::Cross, 1, Placement::Single, COSTS));
    let queue = EgressQueue::new(
        Arc::new(Mutex::new(Lock::Egress, Fake(Broken))),
        Arc::<EgressStats>::default(),
    );
    let port = Arc::new(Port::new(PortId(1), "r".into(), vec![queue]));
    port.set_active(1);
    worker.forwarder.set_table(Arc::new(vec![None, Some(Arc::clone(&port))]));
    let source = Source::new(PortId(0), 0, Arc::default(), Arc::new(Tuning::new(Policy::Event)));
    let ingress = Arc::new(Mutex::new(Lock::Ingress, Fake(Late(Arc::clone(&port)))));
    let token = token(PortId(0), 0, false);
    worker.adopt(Served { token, source, ingress, kick: None, notifies: true }.placed(1));
    let epoch = port.epoch();
    round(&mut worker);
    let mut faults = 0;
    for report in reported.try_iter() {
        let Report::Port(PortEvent::Fault { port: id, epoch: of, .. }) = report else { continue };
        assert_eq!((id, of), (PortId(1), epoch));
        assert_ne!(of, port.epoch());
        faults += 1;
    }
    assert!(faults > 0);
}
