//! State that is kept outside this process, for the next one if this one is killed
//! ([0031](../../../../docs/design/0031-kill.md)).
//!
//! ```text
//!   record "switch"   offer without its ports' parts; sockets of the switch itself
//!   record "p" + id   a port's part of the offer: what only this thread changes; its descriptors
//!   file "live"       marks: what is being done; counters and addresses, every second of traffic
//! ```
//! A record is replaced as a whole: the new one is stored before the old one is deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use api::Request;
use os::{StateFile, Until, wait};
use serde::{Deserialize, Serialize};
use switch::account::defaults::MESSAGE_TIME;
use switch::time::Ns;
use vhost_user::backend::{Exported, export_fd};

use super::System;
use super::cut::Cut;
use super::handover::{Handed, PortHanded, VERSION, encode};
use super::upgrade::{counters, port_offer};
use crate::keeper::{DELETE, END, MOVED, PUT, post, post_within};

/// Start of every name in a store.
pub(super) const PREFIX: &str = "pvswitch-";
/// Names of records.
pub(super) const SWITCH: &str = "switch";
pub(super) const LIVE: &str = "live";

/// Marks in the live file: attempts to continue, ports whose messages are being handled, and the
/// request that is being run.
pub(super) const ATTEMPTS: u64 = 0;
pub(super) const BUSY: u64 = 4096;
pub(super) const REQUEST: u64 = 16_384;
pub(super) const REQUEST_MAX: usize = 4096;
/// Of panics: ports that were being served, a byte each, and the history of each port.
pub(super) const PANICKED: u64 = 24_576;
pub(super) const PANICS: u64 = 32_768;

/// Least time between two writes of counters and addresses, and the share of time for them.
const LIVE_EVERY: Duration = Duration::from_secs(1);
const LIVE_SHARE: u32 = 50;

/// Longest time for whoever keeps the state to read, for all changes of a round together.
const STORE_MAX: Duration = Duration::from_secs(5);
/// Time after which all is stored again that could not be, at first; it doubles up to the longest.
const RETRY: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// Index of a port's first descriptor.
pub(super) fn first(id: u16) -> u32 {
    (u32::from(id) + 1) << 16
}

/// Whether an error means that the store cannot be reached, not that it refuses a descriptor.
fn is_lost(error: &io::Error) -> bool {
    use io::ErrorKind as E;
    matches!(
        error.kind(),
        E::BrokenPipe | E::ConnectionReset | E::ConnectionRefused | E::TimedOut | E::NotFound
    )
}

fn log_failed(error: &dyn std::fmt::Display) {
    tracing::error!(
        "cannot keep the switch's state: {error}; if this process is killed, guests must reconnect"
    );
}

/// Where descriptors are kept.
enum Place {
    /// A keeper process.
    Keeper(OwnedFd),
    /// The service manager.
    Manager,
    /// A keeper process that has ended.
    Nobody,
}

/// A store of named descriptors.
pub(super) struct Store {
    place: Place,
    /// Names of each record's descriptors.
    records: BTreeMap<String, Vec<String>>,
    /// Names of descriptors that are outdated and could not be deleted.
    outdated: Vec<String>,
    /// Number of the next record.
    serial: u64,
    /// Until when changes of the present round may wait.
    until: Instant,
    /// Where this process ends, on demand.
    pub(super) cut: Cut,
}

/// A store as it is handed to another process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StoreState {
    /// The keeper's socket; `None`: the service manager.
    pub(super) keeper: Option<u32>,
    names: Vec<String>,
    serial: u64,
}

impl Store {
    /// A store with these names in it, all of a previous process.
    pub(super) fn new(keeper: Option<OwnedFd>, names: Vec<String>) -> Self {
        let serials = names.iter().filter_map(|name| name.rsplit('-').nth(1)?.parse::<u64>().ok());
        let serial = serials.max().unwrap_or(0) + 1;
        let place = keeper.map_or(Place::Manager, Place::Keeper);
        let records = BTreeMap::from([(String::new(), names)]);
        let until = Instant::now() + STORE_MAX;
        Self { place, records, outdated: Vec::new(), serial, until, cut: Cut::default() }
    }

    fn import(state: StoreState, keeper: Option<OwnedFd>) -> Self {
        let mut store = Self::new(keeper, state.names);
        store.serial = store.serial.max(state.serial);
        store
    }

    fn export<'a>(&'a self, fds: &mut Exported<'a>) -> Option<StoreState> {
        let keeper = match &self.place {
            Place::Keeper(socket) => Some(export_fd(fds, socket.as_fd())),
            Place::Manager => None,
            Place::Nobody => return None,
        };
        let names = self.records.values().flatten().chain(&self.outdated).cloned().collect();
        Some(StoreState { keeper, names, serial: self.serial })
    }

    pub(super) fn is_managed(&self) -> bool {
        matches!(self.place, Place::Manager)
    }

    /// Begins a round of changes.
    pub(super) fn begin(&mut self) {
        self.until = Instant::now() + STORE_MAX;
    }

    /// Whether a change need not wait now.
    fn is_reading(&self) -> bool {
        match &self.place {
            Place::Keeper(socket) => {
                wait(socket.as_fd(), Until::Writable, Instant::now()).unwrap_or(false)
            }
            Place::Manager => super::manager::is_reading(),
            Place::Nobody => false,
        }
    }

    fn put_fd(&self, name: &str, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.cut.pass();
        let limit = self.until.saturating_duration_since(Instant::now());
        match &self.place {
            Place::Keeper(socket) => post_within(socket.as_fd(), PUT, name, Some(fd), limit),
            Place::Manager => super::manager::store(name, fd, limit),
            Place::Nobody => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn delete(&self, name: &str) -> io::Result<()> {
        self.cut.pass();
        let limit = self.until.saturating_duration_since(Instant::now());
        match &self.place {
            Place::Keeper(socket) => post_within(socket.as_fd(), DELETE, name, None, limit),
            Place::Manager => super::manager::unstore(name, limit),
            Place::Nobody => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Deletes all of these, or notes which are left.
    fn delete_all(&mut self, names: &[String]) -> io::Result<()> {
        for (at, name) in names.iter().enumerate() {
            if let Err(error) = self.delete(name) {
                self.outdated.extend_from_slice(&names[at..]);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Replaces a record by these descriptors.
    pub(super) fn put(&mut self, key: &str, parts: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut names = Vec::new();
        let serial = self.serial;
        self.serial += 1;
        for (part, fd) in parts.iter().enumerate() {
            let name = format!("{PREFIX}{key}-{serial}-{part}");
            let put = self.put_fd(&name, *fd);
            names.push(name);
            if put.is_err() {
                self.delete_all(&names)?;
                return put;
            }
        }
        let old = self.records.insert(key.into(), names).unwrap_or_default();
        self.delete_all(&old)
    }

    fn remove(&mut self, key: &str) -> io::Result<()> {
        let old = self.records.remove(key).unwrap_or_default();
        self.delete_all(&old)
    }

    /// Removes all records; first that of the switch, without which none is restored.
    fn empty(&mut self) -> io::Result<()> {
        let mut names = std::mem::take(&mut self.outdated);
        names.extend(std::mem::take(&mut self.records).into_values().flatten());
        let switch = format!("{PREFIX}{SWITCH}-");
        names.sort_by_key(|name| !name.starts_with(&switch));
        self.delete_all(&names)
    }

    /// Removes what a previous process stored.
    pub(super) fn remove_foreign(&mut self) -> io::Result<()> {
        self.remove("")
    }
}

/// State that is kept, and which of it has changed.
pub struct Keep {
    pub(super) store: Store,
    pub(super) live: StateFile,
    /// Ports whose records are outdated.
    touched: BTreeSet<String>,
    /// Whether that of the switch is.
    switch: bool,
    /// Whether a request is marked whose reply was not given yet.
    replies: bool,
    /// Ids of ports with a record.
    ports: BTreeSet<u16>,
    /// Records of the previous process are removed when ours are complete.
    is_first: bool,
    /// If the store failed: when all is stored again, and the time from now to then.
    retry: Option<(Instant, Duration)>,
    /// Whether frames may have passed since the counters were written. Set by workers.
    active: Arc<AtomicBool>,
    /// When they are written next, and what they were.
    due: Option<Instant>,
    written: u64,
}

impl Keep {
    /// # Errors
    /// Out of descriptors or memory.
    pub(super) fn new(store: Store) -> io::Result<Self> {
        Ok(Self {
            store,
            live: StateFile::new()?,
            touched: BTreeSet::new(),
            switch: true,
            replies: false,
            ports: BTreeSet::new(),
            is_first: true,
            retry: None,
            active: Arc::new(AtomicBool::new(false)),
            due: None,
            written: 0,
        })
    }

    /// The store of the process that hands over.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub(super) fn import(state: StoreState, keeper: Option<OwnedFd>) -> io::Result<Self> {
        Self::new(Store::import(state, keeper))
    }

    pub(super) fn export<'a>(&'a self, fds: &mut Exported<'a>) -> Option<StoreState> {
        self.store.export(fds)
    }

    fn is_failed(&self) -> bool {
        self.retry.is_some() || matches!(self.store.place, Place::Nobody)
    }

    /// Removes all records from a store that does not work, because they are outdated from now on.
    fn fail(&mut self, pause: Duration) {
        let _ = self.store.empty();
        self.retry = Some((Instant::now() + pause, pause));
    }

    /// Flag that workers set when they wake up.
    pub(super) fn active(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.active)
    }

    /// The socket of the keeper, if there is one.
    pub(super) fn keeper(&self) -> Option<BorrowedFd<'_>> {
        match &self.store.place {
            Place::Keeper(socket) => Some(socket.as_fd()),
            Place::Manager | Place::Nobody => None,
        }
    }

    fn mark_busy(&self, id: u16, busy: bool) {
        let _ = self.live.mark(BUSY + u64::from(id), &[busy.into()]);
    }

    fn mark_request(&self, text: &str) {
        let text = &text.as_bytes()[..text.len().min(REQUEST_MAX)];
        // The length last; a shorter text leaves the end of a longer one.
        let _ = self.live.mark(REQUEST, &[0; 4]);
        let _ = self.live.mark(REQUEST + 4, text);
        let _ = self.live.mark(REQUEST, &(text.len() as u32).to_le_bytes());
    }
}

impl System {
    /// Notes that a port's record is outdated.
    pub(super) fn touch(&mut self, name: &str) {
        if let Some(keep) = &mut self.keep
            && !keep.touched.contains(name)
        {
            keep.touched.insert(name.into());
        }
    }

    /// Notes that the record of the switch is outdated.
    pub(super) fn touch_switch(&mut self) {
        self.keep.iter_mut().for_each(|keep| keep.switch = true);
    }

    /// Notes that all records are outdated.
    pub(super) fn touch_all(&mut self) {
        if let Some(keep) = &mut self.keep {
            keep.switch = true;
            keep.touched.extend(self.ports.keys().cloned());
        }
    }

    /// Marks, before a front-end's message is read, that it was not handled to its end.
    pub(super) fn begin_message(&mut self, name: &str) {
        if let (Some(keep), Some(state)) = (&self.keep, self.ports.get(name)) {
            keep.mark_busy(state.port.id.0, true);
        }
        self.touch(name);
    }

    /// Marks what request is being run. Whoever changes something of a port's record
    /// [touches](Self::touch) it.
    pub(super) fn begin_request(&mut self, request: &Request) {
        if let Some(keep) = &mut self.keep {
            keep.mark_request(&serde_json::to_string(request).unwrap_or_default());
            keep.replies = true;
            keep.switch = true;
            keep.store.cut.begin();
        }
    }

    /// Notes that the reply to a request was given.
    pub(super) fn end_reply(&mut self) {
        if let Some(keep) = &mut self.keep
            && std::mem::take(&mut keep.replies)
        {
            keep.mark_request("");
        }
    }

    /// Stores what has changed.
    pub(super) fn keep_changes(&mut self) {
        let Some(mut keep) = self.keep.take() else { return };
        if self.stop || self.handed_over {
            // An end in order, or what is stored is the other process's.
            self.keep = Some(keep);
            return;
        }
        if keep.is_failed() {
            keep.touched.clear();
            self.retry_keep(&mut keep);
        } else {
            keep.store.begin();
            if let Err(error) = self.store_changes(&mut keep) {
                log_failed(&error);
                keep.fail(RETRY);
            }
            if keep.replies {
                keep.store.cut.end();
            }
        }
        self.keep = Some(keep);
    }

    /// Stores all again, if that is due.
    fn retry_keep(&mut self, keep: &mut Keep) {
        let now = Instant::now();
        let Some((_, pause)) = keep.retry.take_if(|(at, _)| *at <= now) else { return };
        keep.store.begin();
        let stored = match keep.store.is_reading() {
            true => keep.store.empty().and_then(|()| {
                (keep.is_first, keep.switch) = (true, true);
                keep.touched.extend(self.ports.keys().cloned());
                keep.ports.clear();
                self.store_changes(keep)
            }),
            false => Err(io::ErrorKind::TimedOut.into()),
        };
        match stored {
            Ok(()) => tracing::info!("the switch's state is kept again"),
            Err(_) => keep.fail((pause * 2).min(RETRY_MAX)),
        }
    }

    /// Whether the next process could continue if this one is killed: `on`, `failed` or `off`.
    pub(super) fn keeps(&self) -> &'static str {
        match &self.keep {
            None => "off",
            Some(keep) if keep.is_failed() => "failed",
            Some(_) => "on",
        }
    }

    fn store_changes(&mut self, keep: &mut Keep) -> io::Result<()> {
        if keep.is_first {
            keep.store.put(LIVE, &[keep.live.as_fd()])?;
        }
        for name in std::mem::take(&mut keep.touched) {
            let began = Instant::now();
            self.export_local(&name, true);
            let Some(state) = self.ports.get(&name) else { continue };
            let id = state.port.id.0;
            let mut fds = Exported { first: first(id), ..Exported::default() };
            let offer = port_offer(state, &self.xen, &mut fds, false);
            let key = format!("p{id}");
            let stored = os::pack(VERSION, &encode(&offer, &[]), &fds.fds).and_then(|parts| {
                let parts: Vec<_> = parts.iter().map(AsFd::as_fd).collect();
                keep.store.put(&key, &parts)
            });
            match stored {
                Ok(()) => drop(keep.ports.insert(id)),
                Err(error) if is_lost(&error) => return Err(error),
                Err(error) => {
                    // A guest's sockets can hold sockets, deeper than the kernel sends them on.
                    keep.store.remove(&key)?;
                    keep.ports.remove(&id);
                    if let Some(log) = state.log() {
                        log.warn(format_args!("not kept: {error}"));
                    }
                }
            }
            // Front-ends cause this by messages.
            let time = Ns::from(began.elapsed()).times(MESSAGE_TIME);
            state.port.account.messages.charge(time, self.pool.now());
            keep.mark_busy(id, false);
            self.export_local(&name, false);
        }
        if std::mem::take(&mut keep.switch) {
            let mut fds = Exported::default();
            let offer = self.switch_offer(&mut fds);
            let parts = os::pack(VERSION, &encode(&offer, &[]), &fds.fds)?;
            let parts: Vec<_> = parts.iter().map(AsFd::as_fd).collect();
            keep.store.put(SWITCH, &parts)?;
        }
        // Only now: until then, they are ports of the switch that is stored.
        let ids: BTreeSet<u16> = self.ports.values().map(|state| state.port.id.0).collect();
        for gone in keep.ports.difference(&ids) {
            keep.store.remove(&format!("p{gone}"))?;
        }
        keep.ports.retain(|id| ids.contains(id));
        if std::mem::take(&mut keep.is_first) {
            keep.store.remove_foreign()?;
        }
        Ok(())
    }

    /// Starts to keep state: everything is stored.
    pub(super) fn start_keeping(&mut self) {
        let Some(keep) = &self.keep else { return };
        if let Some(keeper) = keep.keeper() {
            let watched = keeper.try_clone_to_owned().map_err(super::os("keeper"));
            let watched =
                watched.and_then(|fd| self.watch(fd.as_fd(), super::Event::Keeper).map(|_| fd));
            match watched {
                Ok(fd) => self.keeper = Some(fd),
                Err(error) => tracing::error!("{error}"),
            }
        }
        self.touch_all();
        self.keep_changes();
        self.write_live();
    }

    /// Informs the keeper or the service manager which process serves the switch from now on, and
    /// does not wait: no frame passes meanwhile. What that process stores comes after this.
    ///
    /// # Errors
    /// They do not read.
    pub(super) fn report_move(&mut self, pid: u32, program: &Path) -> io::Result<()> {
        let Some(keeper) = self.keep.as_ref().and_then(Keep::keeper) else {
            return self.manager.report_main_pid(pid);
        };
        let moved = format!("{pid} {}", program.display());
        post_within(keeper, MOVED, &moved, None, Duration::ZERO)
    }

    /// The keeper has ended: there is nothing to say to it, so it did not just write.
    pub(super) fn lose_keeper(&mut self) {
        if let Some(fd) = self.keeper.take() {
            self.unwatch(fd.as_fd(), &super::Event::Keeper);
        }
        if let Some(keep) = &mut self.keep {
            log_failed(&"the keeper process has ended");
            (keep.store.place, keep.retry) = (Place::Nobody, None);
        }
    }

    /// Ends in order: nothing is to be kept.
    pub(super) fn end_keeping(&mut self) {
        let Some(mut keep) = self.keep.take() else { return };
        if let Some(keeper) = keep.keeper() {
            let _ = post(keeper, END, "", None);
            return;
        }
        keep.store.begin();
        let _ = keep.store.empty();
    }

    // ---- counters and addresses ----

    /// Time at which counters are to be written, or all is stored again.
    pub(super) fn live_due(&self) -> Option<Instant> {
        let keep = self.keep.as_ref()?;
        keep.due.into_iter().chain(keep.retry.map(|(at, _)| at)).min()
    }

    /// Begins to write counters every second, if a worker has woken up.
    pub(super) fn begin_live(&mut self) {
        if let Some(keep) = &mut self.keep
            && keep.due.is_none()
            && keep.active.load(Ordering::Acquire)
        {
            keep.due = Some(Instant::now() + LIVE_EVERY);
        }
    }

    /// Writes counters if they are due; without traffic since the last time, until a worker wakes
    /// up, no more: an idle switch has no wake-up.
    pub(super) fn tick_live(&mut self) {
        let now = Instant::now();
        let sum = match &self.keep {
            Some(keep) if keep.due.is_some_and(|at| at <= now) => self.traffic(),
            _ => return,
        };
        let is_idle = self.keep.as_ref().is_some_and(|keep| keep.written == sum);
        if !is_idle {
            self.write_live();
        }
        let again = is_idle && {
            if let Some(keep) = &self.keep {
                keep.active.store(false, Ordering::SeqCst);
            }
            self.traffic() != sum
        };
        let Some(keep) = &mut self.keep else { return };
        if again {
            keep.active.store(true, Ordering::Release);
        }
        let wait = LIVE_EVERY.max(now.elapsed() * LIVE_SHARE);
        keep.due = (!is_idle || again).then(|| now + wait);
    }

    /// A number that changes with every poll and frame.
    fn traffic(&self) -> u64 {
        let of = |state: &super::PortState| {
            let ingress = state.ingress.iter().map(|q| q.stats.polls.get() + q.stats.frames.get());
            let egress = state.port.egress.iter().map(|q| q.stats.frames.get());
            ingress.chain(egress).fold(0_u64, u64::wrapping_add)
        };
        self.ports.values().map(of).fold(0, u64::wrapping_add)
    }

    fn write_live(&mut self) {
        let Some(mut keep) = self.keep.take() else { return };
        keep.written = self.traffic();
        let ports = self.ports.values().map(|state| PortHanded {
            name: state.spec.name.clone(),
            ingress: state.ingress.iter().map(|q| counters(q.stats.all())).collect(),
            egress: state.port.egress.iter().map(|q| counters(q.stats.all())).collect(),
            ..PortHanded::default()
        });
        let stopped_ns = os::monotonic().as_nanos() as u64;
        let handed = Handed { stopped_ns, ports: ports.collect(), addresses: self.learned() };
        // The one before stays valid.
        let _ = keep.live.write(VERSION, &encode(&handed, &[]));
        self.keep = Some(keep);
    }
}
