//! Ports as the control thread keeps them: sockets, connections, and what workers were told.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};

use switch::fdb::PortId;
use switch::forward::{EgressQueue, Port, Source};
use switch::frame::Burst;
use switch::port::Ingress;
use switch::vnet::VnetHdr;
use vhost_user::device::Kick;
use vhost_user::feature;
use vhost_user::net::{Host, Pair, Side};

use crate::limit::PortLog;
use crate::worker::{Handle, Served};

/// Names a queue of a port to workers.
pub fn token(port: PortId, queue: u16, side: Side) -> u64 {
    let side = u64::from(side == Side::Egress);
    u64::from(port.0) << 32 | u64::from(queue) << 1 | side
}

/// What is known of a vhost-user port's guest.
#[derive(Default)]
pub struct Guest {
    /// Feature bits agreed on; 0 before.
    pub features: u64,
    /// MAC addresses to announce for the guest (SEND_RARP).
    pub announce: Vec<[u8; 6]>,
}

/// What a connection does to workers. One for each connection; its drop undoes nothing, the
/// device stops its rings first.
pub struct PortHost {
    port: Arc<Port>,
    pairs: Vec<Pair>,
    workers: Vec<Arc<Handle>>,
    guest: Arc<Mutex<Guest>>,
    log: Arc<PortLog>,
    kicks: HashMap<u64, Kick>,
    /// Last count told by `active`, to log changes once.
    up: u16,
}

impl PortHost {
    /// For a port whose queue `i` is served by `workers[i % workers.len()]`.
    pub fn new(
        port: Arc<Port>,
        pairs: Vec<Pair>,
        workers: Vec<Arc<Handle>>,
        guest: Arc<Mutex<Guest>>,
        log: Arc<PortLog>,
    ) -> Self {
        Self { port, pairs, workers, guest, log, kicks: HashMap::new(), up: 0 }
    }

    fn worker(&self, queue: u16) -> &Arc<Handle> {
        &self.workers[usize::from(queue) % self.workers.len()]
    }
}

fn fd(kick: &Kick) -> Option<BorrowedFd<'_>> {
    match kick {
        Kick::Fd(fd) => Some(fd.as_fd()),
        Kick::InBand | Kick::Poll => None,
    }
}

impl Host for PortHost {
    fn started(&mut self, queue: u16, side: Side, kick: Kick) {
        let token = token(self.port.id, queue, side);
        let pair = &self.pairs[usize::from(queue)];
        let result = match side {
            Side::Ingress => {
                let source =
                    Source { port: self.port.id, queue, stats: Arc::clone(&pair.ingress_stats) };
                let ingress: Arc<Mutex<dyn Ingress>> = pair.ingress.clone();
                let notifies = !matches!(kick, Kick::Poll);
                self.worker(queue).serve(Served { token, source, ingress, notifies }, fd(&kick))
            }
            Side::Egress => match fd(&kick) {
                Some(fd) => self.worker(queue).watch(token, Arc::clone(&self.port), queue, fd),
                None => Ok(()),
            },
        };
        if let Err(error) = result {
            // Without its kicks the ring would hang; the queue is still polled while hot.
            self.log.warn(format_args!("cannot wait for kicks: {error}"));
        }
        self.kicks.insert(token, kick);
    }

    fn stopped(&mut self, queue: u16, side: Side) {
        let token = token(self.port.id, queue, side);
        let Some(kick) = self.kicks.remove(&token) else { return };
        match side {
            Side::Ingress => self.worker(queue).drop_queue(token, fd(&kick)),
            Side::Egress => {
                if let Some(fd) = fd(&kick) {
                    self.worker(queue).unwatch(token, fd);
                }
            }
        }
    }

    fn kicked(&mut self, queue: u16, side: Side) {
        self.worker(queue).kicked(token(self.port.id, queue, side));
    }

    fn active(&mut self, queues: u16) {
        self.port.set_active(queues);
        if (self.up == 0) != (queues == 0) {
            let state = if queues > 0 { "up" } else { "down" };
            self.log.info(format_args!("{state}"));
        }
        self.up = queues;
    }

    fn negotiated(&mut self, features: u64) {
        let mut guest = self.guest.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if guest.features != features {
            guest.features = features;
            let names = feature::names(features).join(" ");
            self.log.info(format_args!("guest negotiated {names}"));
        }
    }

    fn announce(&mut self, mac: [u8; 6]) {
        let mut guest = self.guest.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        guest.announce.push(mac);
    }
}

/// The egress queues of vhost-user pairs.
pub fn egress_of(pairs: &[Pair]) -> Vec<EgressQueue> {
    let queue = |p: &Pair| EgressQueue::new(p.egress.clone(), Arc::clone(&p.egress_stats));
    pairs.iter().map(queue).collect()
}

/// A reverse ARP request that tells a network where `mac` is now (RFC 903), 60 bytes.
pub fn rarp(mac: [u8; 6]) -> [u8; 60] {
    let mut frame = [0_u8; 60];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&mac);
    // EtherType RARP; Ethernet, IPv4, lengths 6 and 4, operation 3: request reverse.
    frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[22..28].copy_from_slice(&mac);
    frame[32..38].copy_from_slice(&mac);
    frame
}

/// A burst of one private frame.
pub fn burst_of(frame: &[u8]) -> Burst<'_> {
    let mut burst = Burst::default();
    burst.segs.push(shm::Seg::of(frame));
    burst.push_at(0, 1, frame.len() as u32, VnetHdr::NONE);
    burst
}
