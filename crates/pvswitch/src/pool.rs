//! The worker pool: which worker serves which queue, and how queues move between workers.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use switch::fair::level::Leveller;
use switch::fdb::{Fdb, PortId};
use switch::forward::{Mode, Port, Table};
use switch::poll::Costs;
use switch::tenant::Tenants;
use switch::time::Instant;
use vhost_user::device::KickFd;

use crate::clock::Clock;
use crate::worker::{self, Frozen, Gate, Handle, Report, Served};

/// Which worker serves which queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Placement {
    /// One worker serves everything.
    Single,
    /// A port joins the worker with the fewest ports.
    Group,
    /// Each queue of each port goes to the next worker.
    PerPort,
    /// Queues move between workers by measured load.
    #[default]
    Balanced,
}

impl Placement {
    const ALL: [Self; 4] = [Self::Single, Self::Group, Self::PerPort, Self::Balanced];

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Single => "single",
            Self::Group => "group",
            Self::PerPort => "per-port",
            Self::Balanced => "balanced",
        }
    }

    /// The placement of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|placement| placement.name() == name)
    }
}

/// State shared by all workers.
pub struct Common {
    /// Learned addresses.
    pub fdb: Arc<Fdb>,
    /// Forwarding mode.
    pub mode: Mode,
    /// Key of the flow hash.
    pub flow_key: u64,
    /// Costs of sleeping on this machine.
    pub costs: Costs,
    /// Channel of reports to the control thread.
    pub reports: Sender<Report>,
    /// Wakes the reader of reports.
    pub reports_wake: Arc<OwnedFd>,
    /// Set by a worker that wakes up, which then wakes the reader of reports: counters are kept
    /// while there is traffic. `None`: they are not.
    pub active: Option<Arc<AtomicBool>>,
    /// The clock of policies and accounts.
    pub clock: Clock,
}

impl Common {
    /// Reports, once until counters are kept, that a worker has woken up.
    pub fn report_activity(&self) {
        if let Some(active) = &self.active
            && !active.load(Ordering::Relaxed)
            && !active.swap(true, Ordering::AcqRel)
        {
            os::signal(self.reports_wake.as_fd());
        }
    }
}

/// The worker threads, and which of them serves each queue.
pub struct Pool {
    /// State shared by all workers.
    pub common: Common,
    workers: Vec<Arc<Handle>>,
    /// Which worker serves or watches a queue, by token. This lock is held while a queue is given
    /// to a worker or taken from it, so a queue is never lost between two workers.
    homes: Mutex<HashMap<u64, usize>>,
    placement: AtomicU8,
    /// Service per worker and period, for fair shares over all workers.
    leveller: Mutex<Leveller>,
}

/// Token that identifies a queue of a port to workers.
pub fn token(port: PortId, queue: u16, egress: bool) -> u64 {
    u64::from(port.0) << 32 | u64::from(queue) << 1 | u64::from(egress)
}

fn port_of(token: u64) -> u64 {
    token >> 32
}

fn queue_of(token: u64) -> usize {
    (token as u32 >> 1) as usize
}

impl Pool {
    /// Starts `count` workers, pinned to `cpus` in turn, if there are any.
    pub fn start(
        count: u8,
        cpus: &[usize],
        placement: Placement,
        common: Common,
    ) -> std::io::Result<Arc<Self>> {
        let workers = (0..count).map(|i| Ok(Arc::new(Handle::new(i)?)));
        let workers = workers.collect::<std::io::Result<Vec<_>>>()?;
        let pool = Arc::new(Self {
            common,
            workers,
            homes: Mutex::default(),
            placement: AtomicU8::new(placement as u8),
            leveller: Mutex::new(Leveller::new(usize::from(count))),
        });
        for (i, _) in pool.workers.iter().enumerate() {
            let cpu = cpus.get(i % cpus.len().max(1)).copied();
            worker::spawn(i, cpu, Arc::clone(&pool))?;
        }
        Ok(pool)
    }

    /// Time on [`Common::clock`].
    #[inline]
    pub fn now(&self) -> Instant {
        self.common.clock.now()
    }

    /// All workers, by number.
    pub fn workers(&self) -> &[Arc<Handle>] {
        &self.workers
    }

    /// Placement of queues.
    pub fn placement(&self) -> Placement {
        Placement::ALL[usize::from(self.placement.load(Ordering::Relaxed)) % 4]
    }

    fn homes(&self) -> MutexGuard<'_, HashMap<u64, usize>> {
        self.homes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The worker for a queue, by the placement.
    fn place(&self, token: u64, homes: &HashMap<u64, usize>) -> usize {
        match self.placement() {
            // Balanced starts on one worker; an overloaded worker gives queues away.
            Placement::Single | Placement::Balanced => 0,
            Placement::PerPort => (port_of(token) as usize + queue_of(token)) % self.workers.len(),
            Placement::Group => {
                let siblings = homes.iter().find(|(t, _)| port_of(**t) == port_of(token));
                if let Some((_, worker)) = siblings {
                    return *worker;
                }
                let mut ports: Vec<_> = homes.iter().map(|(t, w)| (*w, port_of(*t))).collect();
                ports.sort_unstable();
                ports.dedup();
                let load = |w: &usize| ports.iter().filter(|(worker, _)| worker == w).count();
                (0..self.workers.len()).min_by_key(load).unwrap_or(0)
            }
        }
    }

    /// Starts serving a queue.
    pub fn serve(&self, served: Served) {
        let mut homes = self.homes();
        let to = self.place(served.token, &homes);
        homes.insert(served.token, to);
        self.workers[to].serve(served);
    }

    /// Stops serving a queue. It may be served for one more round.
    pub fn drop_queue(&self, token: u64) {
        if let Some(worker) = self.homes().remove(&token) {
            self.workers[worker].drop_queue(token);
        }
    }

    /// Watches an egress queue for kicks of its peer, by this descriptor or by
    /// [`kick`](Self::kick): its peer has posted buffers.
    pub fn watch(&self, token: u64, port: Arc<Port>, queue: u16, kick: Option<KickFd>) {
        let mut homes = self.homes();
        let to = self.place(token, &homes);
        homes.insert(token, to);
        self.workers[to].watch(token, port, queue, kick);
    }

    /// Whether a worker serves this queue.
    pub fn serves(&self, token: u64) -> bool {
        self.homes().contains_key(&token)
    }

    /// Delivers a kick that did not arrive by the queue's descriptor.
    pub fn kick(&self, token: u64) {
        if let Some(worker) = self.homes().get(&token) {
            self.workers[*worker].kick(token);
        }
    }

    /// Has a queue's worker poll it: its settings changed.
    pub fn poll(&self, token: u64) {
        if let Some(worker) = self.homes().get(&token) {
            self.workers[*worker].poll(token);
        }
    }

    /// Replaces the port table.
    pub fn set_table(&self, table: &Arc<Table>) {
        for worker in &self.workers {
            worker.set_table(Arc::clone(table));
        }
    }

    /// Replaces the rules of ports; `None`: no port has any.
    pub fn set_tenants(&self, tenants: &Option<Arc<Tenants>>) {
        for worker in &self.workers {
            worker.set_tenants(tenants.clone());
        }
    }

    /// Places every queue again; service continues.
    pub fn set_placement(&self, placement: Placement) {
        let homes = self.homes();
        // Under the lock: queues handed over later follow this placement.
        self.placement.store(placement as u8, Ordering::Relaxed);
        let mut placed = HashMap::new();
        let mut tokens: Vec<_> = homes.iter().map(|(token, home)| (*token, *home)).collect();
        // Egress queues are only watched; their worker does not matter.
        tokens.retain(|(token, _)| token & 1 == 0);
        tokens.sort_unstable();
        for (token, home) in tokens {
            let to = match placement {
                // Queues stay; load decides from now on.
                Placement::Balanced => home,
                _ => self.place(token, &placed),
            };
            placed.insert(token, to);
            if to != home {
                self.workers[home].give_away(token, to);
            }
        }
    }

    /// Moves a queue from worker `from`, which has stopped serving it, to worker `to`.
    pub fn hand_over(&self, from: usize, to: usize, served: Served) {
        let mut homes = self.homes();
        // Dropped in the meantime: the command is on its way.
        if homes.get(&served.token) != Some(&from) {
            return;
        }
        let to = match self.placement() {
            Placement::Balanced => to,
            _ => {
                homes.remove(&served.token);
                self.place(served.token, &homes)
            }
        };
        homes.insert(served.token, to);
        self.workers[to].serve(served);
    }

    /// Ends a period of a worker by `level`, which gets the accounts of all workers and a predicate
    /// of sleeping workers, and returns the queues to move. Not called while another worker does
    /// so: the period is then extended by one measurement.
    pub fn level(
        &self,
        level: impl FnOnce(&mut Leveller, &dyn Fn(usize) -> bool) -> Vec<(u64, usize)>,
    ) {
        // Does not block: the holder of the lock may have lost its CPU.
        let mut leveller = match self.leveller.try_lock() {
            Ok(leveller) => leveller,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        let moves = level(&mut leveller, &|w| self.workers[w].stats.asleep.load(Ordering::Relaxed));
        drop(leveller);
        if !moves.is_empty() {
            let homes = self.homes();
            for (token, to) in moves {
                // Queues that were dropped in the meantime or are already moving are skipped.
                if let Some(home) = homes.get(&token).filter(|home| **home != to) {
                    self.workers[*home].give_away(token, to);
                }
            }
        }
    }

    /// Wakes the workers (one bit each) that hold frames for a destination that has room.
    pub fn wake(&self, workers: u64) {
        for (i, worker) in self.workers.iter().enumerate() {
            if workers & 1 << i != 0 {
                worker.retry();
            }
        }
    }

    /// Has all workers wait between two rounds, until the result is dropped. `None`: one did not
    /// end its round within `limit`; all go on.
    pub fn freeze(&self, limit: Duration) -> Option<Frozen> {
        let gate = Arc::new(Gate::default());
        self.workers.iter().for_each(|worker| worker.freeze(Arc::clone(&gate)));
        Frozen::wait(gate, self.workers.len(), limit)
    }

    /// Ends all threads and waits for them.
    pub fn stop(&self) {
        for worker in &self.workers {
            worker.stop();
        }
    }

    /// Sends a report to the control thread.
    pub fn report(&self, report: Report) {
        // The control thread ends only with the program.
        let _ = self.common.reports.send(report);
        os::signal(self.common.reports_wake.as_fd());
    }
}
