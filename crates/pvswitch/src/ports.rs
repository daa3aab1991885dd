//! Ports as the control thread keeps them: sockets, connections, and what workers were told.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use switch::forward::{Port, Source};
use switch::port::Ingress;
use switch::tuning::Tuning;
use vhost_user::device::Kick;
use vhost_user::feature;
use vhost_user::net::{Host, Pair, Side};

use crate::limit::PortLog;
use crate::pool::{Pool, token};
use crate::worker::Served;

/// What is known of a vhost-user port's guest.
#[derive(Default)]
pub struct Guest {
    /// Feature bits agreed on; 0 before.
    pub features: u64,
}

/// What a connection does to workers. One for each connection; its drop undoes nothing, the
/// device stops its rings first.
pub struct PortHost {
    port: Arc<Port>,
    pairs: Vec<Pair>,
    tuning: Vec<Arc<Tuning>>,
    pool: Arc<Pool>,
    guest: Arc<Mutex<Guest>>,
    log: Arc<PortLog>,
    /// Queues that workers were told of.
    told: HashSet<u64>,
    /// Last count told by `active`, to log changes once.
    up: u16,
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
        Self { port, pairs, tuning, pool, guest, log, told: HashSet::new(), up: 0 }
    }
}

impl Host for PortHost {
    fn started(&mut self, queue: u16, side: Side, kick: Kick) {
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
        self.told.insert(token);
    }

    fn stopped(&mut self, queue: u16, side: Side) {
        let token = token(self.port.id, queue, side == Side::Egress);
        if self.told.remove(&token) {
            self.pool.drop_queue(token);
        }
    }

    fn kicked(&mut self, queue: u16, side: Side) {
        self.pool.kicked(token(self.port.id, queue, side == Side::Egress));
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
        // Made and flooded in the turn of the port's first queue, whose time it takes. One waits at
        // most: the worker's list of commands grows by nothing.
        let Some(tuning) = self.tuning.first() else { return };
        if tuning.announcement() != Some(mac)
            && self.port.account.announcements.spend(self.pool.now())
        {
            tuning.announce(mac);
            self.pool.look(token(self.port.id, 0, false));
        }
    }
}
