//! The worker pool: threads, and the commands that follow from where queues are served.
//!
//! [`Assignments`] decides which worker serves which queue, and how queues move between workers.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

use os::Priority;
use shm::sync::{Lock, Mutex, MutexGuard};
use switch::fair::level::Leveller;
use switch::fdb::Fdb;
use switch::forward::{Mode, Port, Table};
use switch::handover::{Frozen, Gate};
use switch::poll::Costs;
use switch::schedule::{Assignments, GiveAway, Placement};
use switch::tenant::Tenants;
use switch::time::Instant;
use vhost_user::device::KickFd;

use crate::clock::Clock;
use crate::worker::{self, Handle, Placed, Report, Served};

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

/// Why workers cannot start.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A thread or its descriptors cannot be made.
    #[error("worker thread: {0}")]
    Thread(#[from] std::io::Error),
    /// The process may not give them this priority.
    #[error(
        "--priority {name}: {1}: use --priority normal, or permit it by CAP_SYS_NICE or {limit}",
        name = .0.name(), limit = limit(*.0)
    )]
    Priority(Priority, std::io::Error),
    /// They cannot be confined.
    #[error("--sandbox on: {0}; or run without: --sandbox {word}", word = without(.0))]
    Confine(#[from] os::ConfineError),
}

/// The limit that permits a priority.
fn limit(priority: Priority) -> &'static str {
    match priority {
        Priority::Realtime => {
            "RLIMIT_RTPRIO 1 (systemd: LimitRTPRIO=1, RestrictRealtime=no; shell: ulimit -r 1)"
        }
        Priority::High | Priority::Normal => {
            "RLIMIT_NICE 40 (systemd: LimitNICE=-20; shell: ulimit -e 40)"
        }
    }
}

/// The word of `--sandbox` that does without what is missing.
fn without(error: &os::ConfineError) -> &'static str {
    match error {
        os::ConfineError::Files(_) => "seccomp",
        _ => "off",
    }
}

/// The worker threads, and which of them serves each queue.
pub struct Pool {
    /// State shared by all workers.
    pub common: Common,
    workers: Vec<Arc<Handle>>,
    /// Which worker serves or watches a queue. This lock is held until the commands that follow
    /// from a change were sent.
    assignments: Mutex<Assignments>,
    /// The placement in `assignments`, for readers without the lock.
    placement: AtomicU8,
    /// Service per worker and period, for fair shares over all workers.
    leveller: Mutex<Leveller>,
}

impl Pool {
    /// Starts `count` workers, pinned to `cpus` in turn, if there are any.
    ///
    /// # Errors
    /// A thread cannot be started, may not have this priority, or cannot be confined.
    pub fn start(
        count: u8,
        cpus: &[usize],
        placement: Placement,
        priority: Priority,
        common: Common,
    ) -> Result<Arc<Self>, PoolError> {
        let workers = (0..count).map(|i| Ok(Arc::new(Handle::new(i)?)));
        let workers = workers.collect::<std::io::Result<Vec<_>>>()?;
        let pool = Arc::new(Self {
            common,
            workers,
            assignments: Mutex::new(
                Lock::Assignments,
                Assignments::new(usize::from(count), placement),
            ),
            placement: AtomicU8::new(placement as u8),
            leveller: Mutex::new(Lock::Leveller, Leveller::new(usize::from(count))),
        });
        for (i, _) in pool.workers.iter().enumerate() {
            let cpu = cpus.get(i % cpus.len().max(1)).copied();
            if let Err(error) = worker::spawn(i, cpu, priority, Arc::clone(&pool)) {
                pool.stop();
                return Err(error);
            }
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

    fn assignments(&self) -> MutexGuard<'_, Assignments> {
        self.assignments.lock()
    }

    /// Starts serving a queue.
    pub fn serve(&self, served: Served) {
        let mut assignments = self.assignments();
        let (token, assignment) = (served.token, assignments.place(served.token));
        self.workers[assignment.worker].serve(served.placed(assignment.generation));
        self.give_away(assignment.follow(token));
    }

    /// Stops serving a queue. It may be served for one more round.
    pub fn drop_queue(&self, token: u64) {
        let mut assignments = self.assignments();
        if let Some(worker) = assignments.remove(token) {
            self.workers[worker].drop_queue(token);
        }
    }

    /// Watches an egress queue for kicks of its peer, by this descriptor or by
    /// [`kick`](Self::kick): its peer has posted buffers.
    pub fn watch(&self, token: u64, port: Arc<Port>, queue: u16, kick: Option<KickFd>) {
        let mut assignments = self.assignments();
        let assignment = assignments.place(token);
        self.workers[assignment.worker].watch(token, port, queue, kick);
    }

    /// Whether a worker serves this queue.
    pub fn serves(&self, token: u64) -> bool {
        self.assignments().worker(token).is_some()
    }

    /// Delivers a kick that did not arrive by the queue's descriptor.
    pub fn kick(&self, token: u64) {
        let assignments = self.assignments();
        if let Some(worker) = assignments.worker(token) {
            self.workers[worker].kick(token);
        }
    }

    /// Has a queue's worker poll it: its settings changed.
    pub fn poll(&self, token: u64) {
        let assignments = self.assignments();
        if let Some(worker) = assignments.worker(token) {
            self.workers[worker].poll(token);
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
        let mut assignments = self.assignments();
        self.placement.store(placement as u8, Ordering::Relaxed);
        self.give_away(assignments.set_placement(placement));
    }

    fn give_away(&self, moves: impl IntoIterator<Item = GiveAway>) {
        for GiveAway { token, from, to } in moves {
            self.workers[from].give_away(token, to);
        }
    }

    /// Moves a queue from worker `from`, which has stopped serving it, to worker `to`.
    pub fn hand_over(&self, from: usize, to: usize, served: Placed) {
        let mut assignments = self.assignments();
        match assignments.hand_over(served.token, served.of.generation, from, to) {
            Some(to) => self.workers[to].serve(served),
            // Stopped meanwhile, and not started again.
            None if assignments.worker(served.token).is_none() => served.mark_stopped(),
            None => {}
        }
    }

    /// Ends a period of a worker by `level`, which gets the accounts of all workers and a predicate
    /// of sleeping workers, and returns the queues to move. Not called while another worker does
    /// so: the period is then extended by one measurement.
    pub fn level(
        &self,
        level: impl FnOnce(&mut Leveller, &dyn Fn(usize) -> bool) -> Vec<(u64, usize)>,
    ) {
        // Does not block: the holder of the lock may have lost its CPU.
        let Some(mut leveller) = self.leveller.try_lock() else { return };
        let moves = level(&mut leveller, &|w| self.workers[w].stats.asleep.load(Ordering::Relaxed));
        drop(leveller);
        if !moves.is_empty() {
            let assignments = self.assignments();
            let moves =
                moves.into_iter().filter_map(|(token, to)| assignments.request_move(token, to));
            self.give_away(moves);
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
    /// end its round within `limit`; all continue.
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
