//! Reported faults and the connections that they belong to.

use switch::forward::{EgressQueue, Port, PortEvent};
use switch::port::{Egress, Steer};
use switch::stats::EgressStats;
use switch::vnet::Offloads;

use super::*;
use crate::pool::token;

/// Reports a fault when it gets a frame.
struct Broken;

impl Egress for Broken {
    fn offloads(&self) -> Offloads {
        Offloads::ALL
    }

    fn takes_granted(&self) -> bool {
        false
    }

    fn put(&mut self, _: &Burst<'_>, _: &[u16]) -> Result<usize, Fault> {
        Err(Fault("broken".into()))
    }

    fn put_made(&mut self, _: &[u8], _: &[shm::Seg<'_>], _: &VnetHdr) -> Result<bool, Fault> {
        Ok(true)
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

    fn notify(&mut self) {}

    fn arm(&mut self) -> bool {
        true
    }

    fn disarm(&mut self) {}
}

/// Sends a frame to a receiver whose connection ends during the burst.
struct Late(Arc<Port>);

impl Ingress for Late {
    fn burst(
        &mut self,
        _: usize,
        _: u64,
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

    fn goes_direct(&self) -> bool {
        false
    }

    fn burst_into(&mut self, _: usize, _: &mut dyn Direct) -> Result<usize, Fault> {
        Ok(0)
    }

    fn arm(&mut self) -> bool {
        true
    }

    fn due(&self) -> Option<u64> {
        None
    }

    fn disarm(&mut self) {}
}

/// Issue 14, row 14.
#[test]
fn late_fault_is_not_charged_to_the_next_connection() {
    let (reports, reported) = mpsc::channel();
    let mut worker = worker_of(reporting(reports, Mode::Cross, 1, Placement::Single, COSTS));
    let queue = EgressQueue::new(Arc::new(Mutex::new(Broken)), Arc::<EgressStats>::default());
    let port = Arc::new(Port::new(PortId(1), "r".into(), vec![queue]));
    port.set_active(1);
    worker.forwarder.set_table(Arc::new(vec![None, Some(Arc::clone(&port))]));
    let source = Source::new(PortId(0), 0, Arc::default(), Arc::new(Tuning::new(Policy::Event)));
    let ingress = Arc::new(Mutex::new(Late(Arc::clone(&port))));
    let token = token(PortId(0), 0, false);
    worker.adopt(Served { token, source, ingress, kick: None, notifies: true });
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
