//! Memory of a guest's slots: mapped pages, or grants.
//!
//! ```text
//!   slot's gref ── in the table of static grants ──▶ mapped: memcpy
//!        └──────── else ──────────────────────────▶ granted: the hypervisor copies
//! ```
//! A port caches the table and checks once per burst whether it is current. If a mapping cannot
//! serve an access, for instance a write to a page mapped read-only, the grant is used, and the
//! hypervisor decides.

use std::sync::Arc;

use shm::{Domain, Seg, SegMut};
use switch::account::{Charge, Stock};

use super::control::{StaticGrants, StaticHost};
use super::{Pair, Wiring};
use crate::host::{Back, HostError, StaticPage};

/// A guest's pages, as cached by a port.
#[derive(Clone)]
pub(super) struct Pages {
    domain: Arc<Domain>,
    grants: Arc<StaticGrants>,
    /// Number of changes when the table was read.
    changes: u64,
}

impl Pages {
    /// Reads the current table.
    pub fn new(wiring: &Wiring) -> Self {
        // In this order: later changes are noticed at the next check.
        let changes = wiring.orders.changes();
        let grants = wiring.orders.grants(wiring.queue);
        Self { domain: Arc::clone(&wiring.domain), grants, changes }
    }

    /// Reads the table again if it may have changed. Returns whether it did.
    #[inline]
    pub fn refresh(&mut self, wiring: &Wiring) -> bool {
        let changed = self.changes != wiring.orders.changes();
        if changed {
            *self = Self::new(wiring);
        }
        changed
    }

    /// Bytes to read; `None` if they are no part of a page, or `gref` is no grant.
    #[inline]
    pub fn seg(&self, gref: u32, offset: u16, len: u16) -> Option<Seg<'_>> {
        let mapped = self.grants.get(gref).and_then(|page| page.seg(offset, len));
        mapped.or_else(|| Seg::granted(&self.domain, gref, offset, len))
    }

    /// The first bytes of a page, to write; `None` as above.
    #[inline]
    pub fn seg_mut(&self, gref: u32, len: u16) -> Option<SegMut<'_>> {
        let mapped = self.grants.get(gref).and_then(|page| page.seg_mut(0, len));
        mapped.or_else(|| SegMut::granted(&self.domain, gref, 0, len))
    }
}

/// Maps the static grants of one vif.
pub struct PageMapper {
    host: Arc<dyn Back>,
    domid: u16,
    /// Its queue pairs.
    pairs: Vec<Pair>,
    /// Called if grants could not be mapped; a guest can cause any number of calls.
    failed: Box<dyn FnMut(HostError) + Send>,
    /// Account of mapped pages.
    mappings: Option<Arc<Stock>>,
}

impl PageMapper {
    /// Maps for domain `domid` with queue pairs `pairs`. `failed` gets the error if grants could
    /// not be mapped, and must limit its output.
    pub fn new(
        host: Arc<dyn Back>,
        domid: u16,
        pairs: Vec<Pair>,
        failed: impl FnMut(HostError) + Send + 'static,
    ) -> Self {
        Self { host, domid, pairs, failed: Box::new(failed), mappings: None }
    }

    /// Charges each mapped page to `mappings`; pages above its limit are not mapped.
    #[must_use]
    pub fn charged_to(self, mappings: &Arc<Stock>) -> Self {
        Self { mappings: Some(Arc::clone(mappings)), ..self }
    }

    /// Charges all pages, or none.
    fn charge(&self, pages: usize) -> Result<Vec<Charge>, HostError> {
        let Some(mappings) = &self.mappings else { return Ok(Vec::new()) };
        let over = |error| HostError::OverLimit { domid: self.domid, error };
        (0..pages).map(|_| mappings.charge(1).map_err(over)).collect()
    }

    fn map_charged(&self, grants: &[(u32, bool)]) -> Result<Vec<StaticPage>, HostError> {
        let mut charges = self.charge(grants.len())?.into_iter();
        let pages = self.host.map_static(self.domid, grants)?.into_iter();
        let paid = |page: StaticPage| match charges.next() {
            Some(charge) => page.with_charge(charge),
            None => page,
        };
        Ok(pages.map(paid).collect())
    }
}

impl StaticHost for PageMapper {
    fn map(&mut self, grants: &[(u32, bool)]) -> Option<Vec<StaticPage>> {
        self.map_charged(grants).map_err(&mut self.failed).ok()
    }

    fn wait_released(&mut self, queue: usize) {
        if let Some(pair) = self.pairs.get(queue) {
            super::release_grants(pair);
        }
    }
}
