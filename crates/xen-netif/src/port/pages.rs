//! Where a guest's slots lie: in pages that stay mapped, or behind grants.
//!
//! ```text
//!   slot's gref ── in the table of static grants ──▶ mapped: memcpy
//!        └──────── else ──────────────────────────▶ granted: the hypervisor copies
//! ```
//! A port keeps the table from burst to burst and looks once a burst whether it is the latest. It
//! falls back to the grant for whatever a mapping does not serve, also for writing into a page
//! that stays mapped for reading only: whether the grant allows it, the hypervisor knows.

use std::sync::Arc;

use shm::{Domain, Seg, SegMut};
use switch::account::{Charge, Stock};

use super::control::{StaticGrants, StaticHost};
use super::{Pair, Wiring};
use crate::host::{Back, HostError, StaticPage};

/// A guest's pages, as a port keeps them.
#[derive(Clone)]
pub(super) struct Pages {
    domain: Arc<Domain>,
    grants: Arc<StaticGrants>,
    /// Changes of the orders before this was taken.
    changes: u64,
}

impl Pages {
    /// As they are now.
    pub fn new(wiring: &Wiring) -> Self {
        // In this order: what changes meanwhile is looked at again.
        let changes = wiring.orders.changes();
        let grants = wiring.orders.grants(wiring.queue);
        Self { domain: Arc::clone(&wiring.domain), grants, changes }
    }

    /// Lets go of a table that may not be the latest; whether it did.
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
    /// Its queues.
    pairs: Vec<Pair>,
    /// Is told why grants could not be mapped; a guest can have that as often as it likes.
    failed: Box<dyn FnMut(HostError) + Send>,
    /// What each page that stays mapped is charged to.
    mappings: Option<Arc<Stock>>,
}

impl PageMapper {
    /// For domain `domid`, whose queues are `pairs`. `failed` is told why grants could not be
    /// mapped, and bounds what it writes of that.
    pub fn new(
        host: Arc<dyn Back>,
        domid: u16,
        pairs: Vec<Pair>,
        failed: impl FnMut(HostError) + Send + 'static,
    ) -> Self {
        Self { host, domid, pairs, failed: Box::new(failed), mappings: None }
    }

    /// Charges each page that stays mapped to `mappings`, and maps none that cannot be paid for.
    #[must_use]
    pub fn charged_to(self, mappings: &Arc<Stock>) -> Self {
        Self { mappings: Some(Arc::clone(mappings)), ..self }
    }

    /// All or none, as the pages are mapped.
    fn charge(&self, pages: usize) -> Result<Vec<Charge>, HostError> {
        let Some(mappings) = &self.mappings else { return Ok(Vec::new()) };
        let over = |error| HostError::OverLimit { domid: self.domid, error };
        (0..pages).map(|_| mappings.charge(1).map_err(over)).collect()
    }

    fn map_charged(&self, grants: &[(u32, bool)]) -> Result<Vec<StaticPage>, HostError> {
        let mut charges = self.charge(grants.len())?.into_iter();
        let pages = self.host.map_static(self.domid, grants)?.into_iter();
        let paid = |page: StaticPage| match charges.next() {
            Some(charge) => page.paid_by(charge),
            None => page,
        };
        Ok(pages.map(paid).collect())
    }
}

impl StaticHost for PageMapper {
    fn map(&mut self, grants: &[(u32, bool)]) -> Option<Vec<StaticPage>> {
        self.map_charged(grants).map_err(&mut self.failed).ok()
    }

    fn settle(&mut self, queue: usize) {
        if let Some(pair) = self.pairs.get(queue) {
            super::forget_grants(pair);
        }
    }
}
