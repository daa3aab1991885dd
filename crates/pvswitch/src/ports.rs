//! Ports as the control thread keeps them: sockets, connections, and queues that workers serve.

use std::collections::HashSet;
use std::sync::Arc;

use shm::sync::Mutex;
use switch::forward::{Port, Source};
use switch::port::Ingress;
use switch::schedule::token;
use switch::tuning::Tuning;
use vhost_user::device::Kick;
use vhost_user::feature;
use vhost_user::net::{Host, Pair, Side};

use crate::limit::PortLog;
use crate::pool::Pool;
use crate::worker::Served;

/// State of a vhost-user port's guest.
#[derive(Default)]
pub struct Guest {
    /// Negotiated feature bits; 0 before.
    pub features: u64,
}

/// Starts and stops a connection's queues at the workers. One per connection. Its drop stops
/// nothing: the device stops its rings first.
pub struct PortHost {
    port: Arc<Port>,
    pairs: Vec<Pair>,
    tuning: Vec<Arc<Tuning>>,
    pool: Arc<Pool>,
    guest: Arc<Mutex<Guest>>,
    log: Arc<PortLog>,
    /// Queues that workers serve or watch.
    served: HashSet<u64>,
    /// Number of active queues last reported, to log changes only.
    active: u16,
}

impl PortHost {
    /// For a port with `tuning` for each of its ingress queues.
    pub fn new(
        port: Arc<Port>,
        pairs: Vec<Pair>,
        tuning: Vec<Arc<Tuning>>,
        pool: Arc<Pool>,
        guest: Arc<Mutex<Guest>>,
        log: Arc<PortLog>,
    ) -> Self {
        Self { port, pairs, tuning, pool, guest, log, served: HashSet::new(), active: 0 }
    }
}

impl Host for PortHost {
    fn start(&mut self, queue: u16, side: Side, kick: Kick) {
        let token = token(self.port.id, queue, side == Side::Egress);
        let pair = &self.pairs[usize::from(queue)];
        let notifies = !matches!(kick, Kick::Poll);
        let kick = match kick {
            Kick::Fd(fd) => Some(fd),
            Kick::InBand | Kick::Poll => None,
        };
        match side {
            Side::Ingress => {
                let source = Source::new(
                    self.port.id,
                    queue,
                    Arc::clone(&pair.ingress_stats),
                    Arc::clone(&self.tuning[usize::from(queue)]),
                );
                let ingress: Arc<Mutex<dyn Ingress>> = pair.ingress.clone();
                self.pool.serve(Served { token, source, ingress, kick, notifies });
            }
            Side::Egress if notifies => {
                self.pool.watch(token, Arc::clone(&self.port), queue, kick);
            }
            Side::Egress => {}
        }
        self.served.insert(token);
    }

    fn stop(&mut self, queue: u16, side: Side) {
        let token = token(self.port.id, queue, side == Side::Egress);
        if self.served.remove(&token) {
            self.pool.drop_queue(token);
        }
    }

    fn kick(&mut self, queue: u16, side: Side) {
        self.pool.kick(token(self.port.id, queue, side == Side::Egress));
    }

    fn set_active(&mut self, queues: u16) {
        self.port.set_active(queues);
        if (self.active == 0) != (queues == 0) {
            let state = if queues > 0 { "up" } else { "down" };
            self.log.info(format_args!("{state}"));
        }
        self.active = queues;
    }

    fn set_features(&mut self, features: u64) {
        let mut guest = self.guest.lock();
        if guest.features != features {
            guest.features = features;
            let names = feature::names(features).join(" ");
            self.log.info(format_args!("guest negotiated {names}"));
        }
    }

    fn announce(&mut self, mac: [u8; 6]) {
        // The worker sends it when it serves the port's first queue, which pays for the time. At
        // most one is pending, so the worker's command list does not grow.
        let Some(tuning) = self.tuning.first() else { return };
        if tuning.announcement() != Some(mac)
            && self.port.account.announcements.spend(self.pool.now())
        {
            tuning.announce(mac);
            self.pool.poll(token(self.port.id, 0, false));
        }
    }
}
