//! What a hypervisor does for Xen guests, in virtual time: grants and event channels.
//!
//! ```text
//!   notify ──▶ masked? ── no ──▶ an event, and masked
//!                └────── yes ─▶ pending ── ack ──▶ unmasked; if pending, another event
//! ```
//! An event channel tells once, and again only when what it told was taken (`ack`), as Xen's does.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use shm::{Domain, Failed, Grants, Mapping, Piece, Side};
use xen_netif::port::Event;

use crate::flawed::Mistake;
use crate::worker::lock;

/// Names a grant: domain and reference.
type Name = (u16, u32);

/// A granted page.
#[derive(Clone)]
struct Grant {
    memory: Arc<Mapping>,
    at: usize,
    readonly: bool,
}

/// Grants of all domains.
#[derive(Default)]
pub(crate) struct Hypervisor {
    grants: Mutex<BTreeMap<Name, Grant>>,
    /// Uses of pages that were not granted, or not like that.
    refused: Mutex<Vec<Name>>,
    /// The page that was written last.
    written: Mutex<Option<Name>>,
    mistake: Mistake,
}

impl Hypervisor {
    pub fn new(mistake: Mistake) -> Arc<Self> {
        Arc::new(Self { mistake, ..Self::default() })
    }

    /// Domain `id`.
    pub fn domain(self: &Arc<Self>, id: u16) -> Arc<Domain> {
        let host: Arc<dyn Grants> = Arc::<Self>::clone(self);
        Arc::new(Domain::new(id, host))
    }

    /// A new event channel, closed.
    pub fn channel(&self) -> Arc<Channel> {
        Arc::new(Channel { mistake: self.mistake, ..Channel::default() })
    }

    pub fn grant(&self, name: Name, (memory, at): (&Arc<Mapping>, usize), readonly: bool) {
        let grant = Grant { memory: Arc::clone(memory), at, readonly };
        let before = lock(&self.grants).insert(name, grant);
        assert!(before.is_none(), "a reference is used once");
    }

    pub fn revoke(&self, name: Name) {
        lock(&self.grants).remove(&name);
    }

    /// How many pages a domain grants.
    pub fn grants(&self, domid: u16) -> usize {
        lock(&self.grants).range((domid, 0)..=(domid, u32::MAX)).count()
    }

    /// The pages that were used without a grant since this was last asked.
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

    fn one(&self, piece: &mut Piece<'_>) -> Result<(), Failed> {
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
            && self.mistake == Mistake::XenTouchesAnswered
        {
            self.find_named(written, true);
        }
        for piece in pieces {
            let result = self.one(piece);
            piece.set(result);
        }
    }
}

/// An event channel, as the back half has it.
#[derive(Default)]
pub(crate) struct Channel {
    /// Events to the front half.
    told: AtomicU64,
    /// An event to the back half was not taken.
    masked: AtomicBool,
    /// Another came since.
    pending: AtomicBool,
    /// It is to be told now.
    again: AtomicBool,
    mistake: Mistake,
}

impl Channel {
    /// The front half's event arrives. False: the back half has not taken the one before.
    pub fn raise(&self) -> bool {
        let masked = self.masked.swap(true, Ordering::Relaxed);
        self.pending.fetch_or(masked, Ordering::Relaxed);
        !masked
    }

    /// Whether an event that came was not taken.
    pub fn is_raised(&self) -> bool {
        self.masked.load(Ordering::Relaxed)
    }

    /// Whether an event that had to wait is on its way now.
    pub fn take_again(&self) -> bool {
        self.again.swap(false, Ordering::Relaxed)
    }

    /// Events to the front half since the last look.
    pub fn take_told(&self) -> u64 {
        self.told.swap(0, Ordering::Relaxed)
    }
}

impl Event for Channel {
    fn notify(&self) {
        if self.mistake == Mistake::XenDropsEvents {
            return;
        }
        self.told.fetch_add(1, Ordering::Relaxed);
    }

    fn ack(&self) {
        if self.mistake == Mistake::XenNeverAcks {
            return;
        }
        self.masked.store(false, Ordering::Relaxed);
        let pending = self.pending.swap(false, Ordering::Relaxed);
        self.again.fetch_or(pending, Ordering::Relaxed);
    }
}
