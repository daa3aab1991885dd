//! A simulated hypervisor for Xen guests: grants and event channels.
//!
//! ```text
//!   raise ──▶ masked? ── no ──▶ event, masked
//!                └────── yes ─▶ pending ── ack ──▶ unmasked; if pending, another event
//! ```
//! As in Xen, an event channel is masked from an event to its `ack`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use shm::{Domain, Failed, Grants, Mapping, Piece, Side};
use xen_netif::port::Event;

use crate::flawed::Mistake;

/// Identifies a grant: domain and reference.
type Name = (u16, u32);

/// A granted page.
#[derive(Clone)]
struct Grant {
    memory: Arc<Mapping>,
    at: usize,
    readonly: bool,
}

/// The grants of all domains.
#[derive(Default)]
pub(crate) struct Hypervisor {
    grants: Mutex<BTreeMap<Name, Grant>>,
    /// Accesses without a matching grant.
    refused: Mutex<Vec<Name>>,
    /// The page written last.
    written: Mutex<Option<Name>>,
    mistake: Mistake,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("one thread")
}

impl Hypervisor {
    pub fn new(mistake: Mistake) -> Arc<Self> {
        Arc::new(Self { mistake, ..Self::default() })
    }

    /// Returns domain `id`.
    pub fn domain(self: &Arc<Self>, id: u16) -> Arc<Domain> {
        let host: Arc<dyn Grants> = Arc::<Self>::clone(self);
        Arc::new(Domain::new(id, host))
    }

    /// Creates an event channel.
    pub fn channel(&self) -> Arc<Channel> {
        Arc::new(Channel { mistake: self.mistake, ..Channel::default() })
    }

    pub fn grant(&self, name: Name, memory: &Arc<Mapping>, at: usize, readonly: bool) {
        let grant = Grant { memory: Arc::clone(memory), at, readonly };
        let before = lock(&self.grants).insert(name, grant);
        assert!(before.is_none(), "a grant reference is not reused");
    }

    pub fn revoke(&self, name: Name) {
        lock(&self.grants).remove(&name);
    }

    /// Number of pages that a domain grants.
    pub fn grants(&self, domid: u16) -> usize {
        lock(&self.grants).range((domid, 0)..=(domid, u32::MAX)).count()
    }

    /// Takes the accesses without a matching grant since the last call.
    pub fn take_refused(&self) -> Vec<Name> {
        std::mem::take(&mut lock(&self.refused))
    }

    fn find(&self, domain: &Domain, gref: u32, write: bool) -> Option<Grant> {
        self.find_named((domain.id(), gref), write)
    }

    fn find_named(&self, name: Name, write: bool) -> Option<Grant> {
        let grant = lock(&self.grants).get(&name).cloned().filter(|g| !(write && g.readonly));
        if grant.is_none() {
            lock(&self.refused).push(name);
        }
        grant
    }

    fn copy_one(&self, piece: &mut Piece<'_>) -> Result<(), Failed> {
        let len = piece.len();
        let held;
        let from = match piece.src() {
            Side::Mapped(seg) => seg,
            Side::Granted { domain, gref, offset } => {
                held = self.find(domain, gref, false).ok_or(Failed::Source)?;
                held.memory.seg(held.at + usize::from(offset), len).ok_or(Failed::Source)?
            }
        };
        match piece.dst() {
            Side::Mapped(mut to) => to.copy_from(from),
            Side::Granted { domain, gref, offset } => {
                let page = self.find(domain, gref, true).ok_or(Failed::Destination)?;
                *lock(&self.written) = Some((domain.id(), gref));
                let to = page.memory.seg_mut(page.at + usize::from(offset), len);
                to.ok_or(Failed::Destination)?.copy_from(from)
            }
        };
        Ok(())
    }
}

impl Grants for Hypervisor {
    fn copy(&self, pieces: &mut [Piece<'_>]) {
        if let Some(written) = lock(&self.written).take()
            && self.mistake == Mistake::XenUsesAfterResponse
        {
            self.find_named(written, true);
        }
        for piece in pieces {
            let result = self.copy_one(piece);
            piece.set(result);
        }
    }
}

/// An event channel.
#[derive(Default)]
pub(crate) struct Channel {
    /// Events for the front half since last taken.
    events: AtomicU64,
    /// An event for the back half is not acknowledged yet.
    masked: AtomicBool,
    /// Another event was raised meanwhile.
    pending: AtomicBool,
    /// The pending event is to be delivered.
    deferred: AtomicBool,
    mistake: Mistake,
}

impl Channel {
    /// Delivers an event to the back half; false: masked, so it stays pending.
    pub fn raise(&self) -> bool {
        let masked = self.masked.swap(true, Ordering::Relaxed);
        self.pending.fetch_or(masked, Ordering::Relaxed);
        !masked
    }

    /// Whether an event is not acknowledged yet.
    pub fn is_raised(&self) -> bool {
        self.masked.load(Ordering::Relaxed)
    }

    /// Whether a pending event was unmasked since the last call, and is to be delivered.
    pub fn take_deferred(&self) -> bool {
        self.deferred.swap(false, Ordering::Relaxed)
    }

    /// Takes the number of events for the front half since the last call.
    pub fn take_events(&self) -> u64 {
        self.events.swap(0, Ordering::Relaxed)
    }
}

impl Event for Channel {
    fn notify(&self) {
        if self.mistake == Mistake::XenDropsEvents {
            return;
        }
        self.events.fetch_add(1, Ordering::Relaxed);
    }

    fn ack(&self) {
        if self.mistake == Mistake::XenNeverAcks {
            return;
        }
        self.masked.store(false, Ordering::Relaxed);
        let pending = self.pending.swap(false, Ordering::Relaxed);
        self.deferred.fetch_or(pending, Ordering::Relaxed);
    }
}
