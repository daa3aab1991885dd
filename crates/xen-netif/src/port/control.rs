//! Service of the control ring: hash, queue table and static grants, as requested by a guest.
//!
//! ```text
//!   front ── control ring ──▶ Control (control thread) ── publishes ──▶ Orders ◀── read by ports
//! ```
//! Data of a guest is copied to private memory and validated before it replaces the current state:
//! a failed request changes nothing. Ports read complete tables only.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ring::xen::ctrl_status::{INVALID_PARAMETER as INVALID, NOT_SUPPORTED, SUCCESS};
use ring::xen::{
    Armed, BackCtrl, CtrlRequest, CtrlResponse, GREF_ENTRY_LEN, GrefEntry, Malformed, PAGE_LEN,
    ctrl_status, ctrl_type,
};
use serde::{Deserialize, Serialize};
use shm::sync::{Lock, Mutex};
use shm::{Domain, Seg, SegMut};

use super::hash::{KEY_LEN_MAX, MAPPING_MAX, Steering, algorithm, hash_type};
use crate::host::StaticPage;

/// Maximum number of static grants of one queue: two rings of buffers, twice.
pub const STATIC_GRANTS_MAX: usize = 1024;
/// Maximum span of references for lookup by an index.
const NEAR_MAX: u32 = 4 * STATIC_GRANTS_MAX as u32;
/// Maximum number of entries of one list of grants, which is a page.
const LIST_MAX: u32 = PAGE_LEN as u32 / GREF_ENTRY_LEN as u32;
/// Maximum number of entries of one part of the hash table, which is a page.
const PIECE_MAX: u32 = PAGE_LEN as u32 / 4;
/// Maximum work per call of `serve`, in requests; further requests wait for the next call.
const WORK_MAX: u32 = 128;
/// Number of grants whose mapping counts as one request: each may be a hypercall.
const GRANTS_EACH: u32 = 8;

/// The static grants of one queue. Other grants are copied by the hypervisor.
#[derive(Clone, Debug, Default)]
pub struct StaticGrants {
    pages: BTreeMap<u32, StaticPage>,
    /// The same, indexed by distance from the first reference, if they are close together, as with
    /// most guests: ports look up each slot, and an index takes 2 ns where the map takes 20.
    near: Vec<Option<StaticPage>>,
    first: u32,
}

impl StaticGrants {
    fn of(pages: BTreeMap<u32, StaticPage>) -> Self {
        let ends = pages.first_key_value().zip(pages.last_key_value());
        let (first, last) = ends.map_or((0, u32::MAX), |((first, _), (last, _))| (*first, *last));
        let near = if last - first < NEAR_MAX {
            (first..=last).map(|gref| pages.get(&gref).cloned()).collect()
        } else {
            Vec::new()
        };
        Self { pages, near, first }
    }

    /// The page of a grant, if it is static.
    #[inline]
    pub fn get(&self, gref: u32) -> Option<&StaticPage> {
        match self.near.get(gref.wrapping_sub(self.first) as usize) {
            Some(page) => page.as_ref(),
            None if self.near.is_empty() && !self.pages.is_empty() => self.pages.get(&gref),
            None => None,
        }
    }

    /// Number of static grants.
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether there are none, as with most guests.
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }
}

/// Settings made over a control ring, for the ports of its vif.
pub struct Orders {
    steering: Mutex<Arc<Steering>>,
    /// Indexed by queue.
    grants: Vec<Mutex<Arc<StaticGrants>>>,
    changes: AtomicU64,
}

impl Orders {
    /// Creates empty settings for a vif of `queues` queues.
    pub fn new(queues: usize) -> Self {
        let grants = (0..queues).map(|_| Mutex::new(Lock::XenStaticGrants, Arc::default()));
        Self {
            steering: Mutex::new(Lock::XenSteering, Arc::default()),
            grants: grants.collect(),
            changes: AtomicU64::new(0),
        }
    }

    /// Number of queues.
    pub fn queues(&self) -> usize {
        self.grants.len()
    }

    /// Number of changes; a port that caches a table compares it to see whether its copy is
    /// current.
    #[inline]
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Hash and table that spread frames over the queues.
    pub fn steering(&self) -> Arc<Steering> {
        Arc::clone(&self.steering.lock())
    }

    /// The static grants of `queue`; empty if it does not exist.
    pub fn grants(&self, queue: usize) -> Arc<StaticGrants> {
        let lock = |m: &Mutex<Arc<_>>| Arc::clone(&m.lock());
        self.grants.get(queue).map(lock).unwrap_or_default()
    }

    /// The settings for another process.
    pub fn export(&self) -> OrdersState {
        let pages = |queue| {
            let grants = self.grants(queue);
            grants.pages.iter().map(|(gref, page)| (*gref, page.is_readonly())).collect()
        };
        let steering = Steering::clone(&self.steering());
        OrdersState { steering, grants: (0..self.queues()).map(pages).collect() }
    }

    /// Sets what another process exported. Grants that cannot be mapped are copied by the
    /// hypervisor.
    pub fn import(&self, state: &OrdersState, host: &mut dyn StaticHost) {
        if state.steering.fits(self.queues()) {
            self.set(&self.steering, state.steering.clone());
        }
        for (place, grants) in self.grants.iter().zip(&state.grants) {
            let most = grants.len().min(STATIC_GRANTS_MAX);
            if let Some(pages) =
                Some(&grants[..most]).filter(|g| !g.is_empty()).and_then(|g| host.map(g))
            {
                let pages = grants.iter().map(|(gref, _)| *gref).zip(pages).collect();
                self.set(place, StaticGrants::of(pages));
            }
        }
    }

    /// Sets static grants as the control ring does.
    #[cfg(test)]
    pub(super) fn set_grants(
        &self,
        queue: usize,
        pages: impl IntoIterator<Item = (u32, StaticPage)>,
    ) {
        self.set(&self.grants[queue], StaticGrants::of(pages.into_iter().collect()));
    }

    /// Sets the steering as the control ring does.
    #[cfg(test)]
    pub(super) fn set_steering(&self, steering: Steering) {
        self.set(&self.steering, steering);
    }

    fn set<T>(&self, place: &Mutex<Arc<T>>, new: T) {
        // The old value is dropped outside the lock, because that may unmap pages.
        let old = std::mem::replace(&mut *place.lock(), Arc::new(new));
        self.changes.fetch_add(1, Ordering::Release);
        drop(old);
    }
}

impl fmt::Debug for Orders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let grants: Vec<_> = (0..self.queues()).map(|q| self.grants(q).len()).collect();
        f.debug_struct("Orders").field("grants", &grants).finish_non_exhaustive()
    }
}

/// Settings made over a control ring, for another process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrdersState {
    steering: Steering,
    /// Static grants of each queue, and whether they are read-only.
    grants: Vec<Vec<(u32, bool)>>,
}

/// Maps static grants.
pub trait StaticHost: Send {
    /// Maps all of `grants` (each with its readonly flag), or none and returns `None`. The host
    /// logs the reason; the guest only gets an error status.
    fn map(&mut self, grants: &[(u32, bool)]) -> Option<Vec<StaticPage>>;

    /// Returns when the ports of `queue` have released the previous table: only then may the guest
    /// be notified that a grant is unmapped.
    fn wait_released(&mut self, queue: usize);
}

/// Serves a vif's control ring.
pub struct Control {
    ring: BackCtrl,
    domain: Arc<Domain>,
    orders: Arc<Orders>,
    host: Option<Box<dyn StaticHost>>,
}

impl Control {
    /// Serves `ring` of `domain`, for the ports that read `orders`. Without a `host` there are no
    /// static grants.
    pub fn new(
        ring: BackCtrl,
        domain: Arc<Domain>,
        orders: Arc<Orders>,
        host: Option<Box<dyn StaticHost>>,
    ) -> Self {
        Self { ring, domain, orders, host }
    }

    /// Serves pending requests, up to the maximum. Returns whether to notify the front half.
    ///
    /// # Errors
    /// [`Malformed`]: the vif must be stopped.
    pub fn serve(&mut self) -> Result<bool, Malformed> {
        let mut left = WORK_MAX;
        while left > 0 {
            let Some(request) = self.ring.take()? else {
                break;
            };
            left = left.saturating_sub(work(&request));
            let reply = self.run(&request);
            let (status, data) = reply.map_or_else(|status| (status, 0), |data| (SUCCESS, data));
            let CtrlRequest { id, kind, .. } = request;
            self.ring.put(CtrlResponse { id, kind, status, data });
        }
        self.ring.publish();
        Ok(self.ring.notify_needed())
    }

    /// Where another process continues with the ring.
    pub fn position(&self) -> u32 {
        self.ring.position()
    }

    /// Requests an event for the next request, and re-checks. Only [`Armed::Armed`] allows sleep.
    pub fn arm(&mut self) -> Armed {
        self.ring.arm()
    }

    /// Whether requests are pending.
    pub fn has_work(&self) -> bool {
        self.ring.has_work()
    }

    /// Runs a request. Returns the data of its response, or an error status.
    fn run(&mut self, request: &CtrlRequest) -> Result<u32, u32> {
        let [a, b, c] = request.data;
        match request.kind {
            ctrl_type::SET_HASH_ALGORITHM => self.set_algorithm(a),
            ctrl_type::GET_HASH_FLAGS => self.hash_flags(),
            ctrl_type::SET_HASH_FLAGS => self.set_hash_flags(a),
            ctrl_type::SET_HASH_KEY => self.set_key(a, b),
            ctrl_type::GET_HASH_MAPPING_SIZE => Ok(MAPPING_MAX as u32),
            ctrl_type::SET_HASH_MAPPING_SIZE => self.set_mapping_size(a),
            ctrl_type::SET_HASH_MAPPING => self.set_mapping(a, b, c),
            ctrl_type::GET_GREF_MAPPING_SIZE => {
                self.static_queue(a).map(|_| STATIC_GRANTS_MAX as u32)
            }
            ctrl_type::ADD_GREF_MAPPING => self.add_grants(a, b, c),
            ctrl_type::DEL_GREF_MAPPING => self.del_grants(a, b, c),
            _ => Err(NOT_SUPPORTED),
        }
    }

    /// Publishes a changed copy of the steering.
    fn steer(&self, change: impl FnOnce(&mut Steering)) {
        let mut new = Steering::clone(&self.orders.steering());
        change(&mut new);
        self.orders.set(&self.orders.steering, new);
    }

    fn set_algorithm(&self, wanted: u32) -> Result<u32, u32> {
        let known = [algorithm::NONE, algorithm::TOEPLITZ];
        let wanted = known.into_iter().find(|known| u32::from(*known) == wanted);
        let wanted = wanted.ok_or(INVALID)?;
        self.steer(|s| s.algorithm = wanted);
        Ok(0)
    }

    /// "A valid hash algorithm must be selected before this operation can succeed."
    fn hash_flags(&self) -> Result<u32, u32> {
        let chosen = self.orders.steering().algorithm != algorithm::NONE;
        if chosen { Ok(hash_type::ALL) } else { Err(NOT_SUPPORTED) }
    }

    fn set_hash_flags(&self, types: u32) -> Result<u32, u32> {
        let chosen = self.orders.steering().algorithm != algorithm::NONE;
        if types & !hash_type::ALL != 0 || !chosen {
            return Err(INVALID);
        }
        self.steer(|s| s.types = types);
        Ok(0)
    }

    fn set_key(&self, gref: u32, len: u32) -> Result<u32, u32> {
        let mut key = [0; KEY_LEN_MAX];
        let len = len as usize;
        self.read(gref, key.get_mut(..len).ok_or(ctrl_status::BUFFER_OVERFLOW)?)?;
        self.steer(|s| s.key = key);
        Ok(0)
    }

    fn set_mapping_size(&self, size: u32) -> Result<u32, u32> {
        let size = size as usize;
        if size > MAPPING_MAX {
            return Err(INVALID);
        }
        self.steer(|s| s.mapping = vec![0; size]);
        Ok(0)
    }

    /// Replaces `len` entries from `offset`.
    fn set_mapping(&self, gref: u32, len: u32, offset: u32) -> Result<u32, u32> {
        let end = offset.checked_add(len).filter(|_| len <= PIECE_MAX).ok_or(INVALID)?;
        if end as usize > MAPPING_MAX {
            return Err(ctrl_status::BUFFER_OVERFLOW);
        }
        if end as usize > self.orders.steering().mapping.len() {
            return Err(INVALID);
        }
        let mut bytes = [0; MAPPING_MAX * 4];
        let bytes = &mut bytes[..len as usize * 4];
        self.read(gref, bytes)?;
        let words = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let queues: Vec<u32> = words.collect();
        if queues.iter().any(|queue| *queue as usize >= self.orders.queues()) {
            return Err(INVALID);
        }
        self.steer(|s| s.mapping[offset as usize..end as usize].copy_from_slice(&queues));
        Ok(0)
    }

    /// The index of a queue that may have static grants.
    fn static_queue(&self, queue: u32) -> Result<usize, u32> {
        if self.host.is_none() {
            return Err(NOT_SUPPORTED);
        }
        let queue = queue as usize;
        if queue < self.orders.queues() { Ok(queue) } else { Err(INVALID) }
    }

    /// Adds all grants of a list, or none.
    fn add_grants(&mut self, queue: u32, gref: u32, len: u32) -> Result<u32, u32> {
        let queue = self.static_queue(queue)?;
        let list = self.list(gref, len)?;
        let mut new = self.orders.grants(queue).pages.clone();
        if new.len() + list.len() > STATIC_GRANTS_MAX {
            return Err(INVALID);
        }
        // A duplicate in the list, or with the table, is ambiguous.
        let mut grants: Vec<_> = list.iter().map(|e| (e.gref, e.readonly)).collect();
        grants.sort_unstable();
        let twice = grants.windows(2).any(|pair| pair[0].0 == pair[1].0);
        if twice || grants.iter().any(|(gref, _)| new.contains_key(gref)) {
            return Err(INVALID);
        }
        if grants.is_empty() {
            return Ok(0);
        }
        let host = self.host.as_mut().ok_or(NOT_SUPPORTED)?;
        let pages = host.map(&grants).ok_or(INVALID)?;
        if pages.len() != grants.len() {
            return Err(INVALID);
        }
        new.extend(grants.iter().map(|(gref, _)| *gref).zip(pages));
        self.orders.set(&self.orders.grants[queue], StaticGrants::of(new));
        Ok(0)
    }

    /// Removes the grants of a list that exist; each entry gets a status. Returns their number.
    fn del_grants(&mut self, queue: u32, gref: u32, len: u32) -> Result<u32, u32> {
        let queue = self.static_queue(queue)?;
        let mut list = self.list(gref, len)?;
        let mut new = self.orders.grants(queue).pages.clone();
        let mut removed = 0;
        for entry in &mut list {
            let found = new.remove(&entry.gref).is_some();
            removed += u32::from(found);
            let status = if found { SUCCESS } else { INVALID };
            entry.status = u16::try_from(status).expect("small");
        }
        if removed > 0 {
            // Kept until the ports have released it, so that pages are unmapped here.
            let old = self.orders.grants(queue);
            self.orders.set(&self.orders.grants[queue], StaticGrants::of(new));
            if let Some(host) = &mut self.host {
                host.wait_released(queue);
            }
            drop(old);
        }
        let bytes: Vec<u8> = list.into_iter().flat_map(GrefEntry::encode).collect();
        self.write(gref, &bytes)?;
        Ok(removed)
    }

    /// Copies a list of grants to private memory.
    fn list(&self, gref: u32, len: u32) -> Result<Vec<GrefEntry>, u32> {
        if len > LIST_MAX {
            return Err(INVALID);
        }
        let mut bytes = vec![[0; GREF_ENTRY_LEN]; len as usize];
        self.read(gref, bytes.as_flattened_mut())?;
        Ok(bytes.into_iter().map(GrefEntry::decode).collect())
    }

    /// Fills `out` from the start of a granted page; at most a page.
    fn read(&self, gref: u32, out: &mut [u8]) -> Result<(), u32> {
        if out.is_empty() {
            return Ok(());
        }
        let len = u16::try_from(out.len()).map_err(|_| INVALID)?;
        let from = Seg::granted(&self.domain, gref, 0, len).ok_or(INVALID)?;
        if from.read(out) == out.len() { Ok(()) } else { Err(INVALID) }
    }

    /// Writes `bytes` to the start of a granted page.
    fn write(&self, gref: u32, bytes: &[u8]) -> Result<(), u32> {
        if bytes.is_empty() {
            return Ok(());
        }
        let len = u16::try_from(bytes.len()).map_err(|_| INVALID)?;
        let mut to = SegMut::granted(&self.domain, gref, 0, len).ok_or(INVALID)?;
        if to.write(bytes) as usize == bytes.len() { Ok(()) } else { Err(INVALID) }
    }
}

/// Maximum cost of a request.
fn work(request: &CtrlRequest) -> u32 {
    let [_, _, len] = request.data;
    match request.kind {
        ctrl_type::ADD_GREF_MAPPING | ctrl_type::DEL_GREF_MAPPING => {
            1 + len.min(LIST_MAX) / GRANTS_EACH
        }
        _ => 1,
    }
}

#[cfg(test)]
mod tests;
