//! What a hypervisor does for the two halves: grants, event channels, and which store.
//!
//! A host is a [`Back`] and a [`Front`]. Those of this crate are [`xen`]'s: real Xen, through
//! /dev/xen/{gntdev,gntalloc,evtchn}. The crate `xen-local` has others, for machines without Xen.
//!
//! A host is called when rings are made and ended, never for a frame: what a burst uses is what
//! it handed out, which are [`Channel`]s, mapped pages, and domains for `shm`'s copies by grant.

mod channel;
mod error;
pub mod xen;

use std::sync::Arc;

use shm::{Access, Area, Domain, GRANT_LEN, GuestMemory, Mapping, Private, Region, Seg, SegMut};
use switch::account::Charge;

pub use channel::{Channel, Event, SharedChannel};
pub use error::HostError;

use crate::store::{Store, StoreError};

/// A granted page, as a length in memory.
const PAGE: usize = GRANT_LEN as usize;

/// What the back half of a vif needs.
pub trait Back: Send + Sync {
    /// A connection to the store, as this back end's domain.
    ///
    /// # Errors
    /// [`StoreError`].
    fn store(&self) -> Result<Store, StoreError>;

    /// The domain that grants come from.
    ///
    /// # Errors
    /// [`HostError::NoDomain`], if it does not exist (real Xen is not asked).
    fn domain(&self, domid: u16) -> Result<Arc<Domain>, HostError>;

    /// At least `len` bytes of private memory that copies to and from grants are faster with;
    /// `None` if any memory will do, or there is none of that kind.
    fn private(&self, len: usize) -> Option<Private>;

    /// Maps one granted page; returns the mapping and the page's offset in it.
    ///
    /// # Errors
    /// [`HostError`]: for instance a grant that does not exist, or for reading only.
    fn map_page(
        &self,
        domid: u16,
        gref: u32,
        access: Access,
    ) -> Result<(Arc<Mapping>, usize), HostError>;

    /// Binds a domain's event channel.
    ///
    /// # Errors
    /// [`HostError`]: for instance a port that does not exist.
    fn bind(&self, domid: u16, port: u32) -> Result<Channel, HostError>;

    /// Which other back end serves this vif, and what to do about it; `None`: no other.
    fn claimed(&self, domid: u16, devid: u32) -> Option<String>;
}

/// What the front half of a vif needs.
pub trait Front: Send + Sync {
    /// A connection to the store, as this front end's domain.
    ///
    /// # Errors
    /// [`StoreError`].
    fn store(&self) -> Result<Store, StoreError>;

    /// `pages` zeroed pages, granted to a back end.
    ///
    /// # Errors
    /// [`HostError`]: for instance no more pages.
    fn alloc(&self, pages: u32, backend_domid: u16, readonly: bool) -> Result<Pages, HostError>;

    /// A new event channel for a back end to bind: its port, and our end.
    ///
    /// # Errors
    /// [`HostError`].
    fn channel(&self, backend_domid: u16) -> Result<(u32, Channel), HostError>;
}

impl dyn Back {
    /// Maps one granted page of a ring.
    ///
    /// # Errors
    /// As [`map_page`](Back::map_page).
    pub fn map(&self, domid: u16, gref: u32) -> Result<RingPage, HostError> {
        let (mapping, offset) = self.map_page(domid, gref, Access::Write)?;
        Ok(RingPage { mapping, offset })
    }

    /// Maps pages that stay mapped: (grant reference, for reading only). All or none.
    ///
    /// # Errors
    /// As [`map_page`](Back::map_page): it names the grant.
    pub fn map_static(
        &self,
        domid: u16,
        grants: &[(u32, bool)],
    ) -> Result<Vec<StaticPage>, HostError> {
        let map = |(gref, readonly): &(u32, bool)| {
            let access = if *readonly { Access::Read } else { Access::Write };
            let (mapping, offset) = self.map_page(domid, *gref, access)?;
            Ok(StaticPage::new(mapping, offset, *readonly))
        };
        grants.iter().map(map).collect()
    }
}

/// A granted page of a ring, mapped. Its grant is given back when no [`Area`] of it is left.
pub struct RingPage {
    mapping: Arc<Mapping>,
    offset: usize,
}

impl RingPage {
    /// Its words.
    pub fn area(&self) -> Option<Area> {
        Area::of(&self.mapping, self.offset, PAGE)
    }

    /// Whether the peer took the memory away: stop the port.
    pub fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }
}

/// A granted page that stays mapped, to copy from and to. The mapping goes with its last clone.
#[derive(Clone, Debug)]
pub struct StaticPage {
    mapping: Arc<Mapping>,
    offset: usize,
    readonly: bool,
    /// What its guest pays for it.
    _charge: Option<Arc<Charge>>,
}

impl StaticPage {
    /// The page at `offset` of `mapping`.
    pub fn new(mapping: Arc<Mapping>, offset: usize, readonly: bool) -> Self {
        Self { mapping, offset, readonly, _charge: None }
    }

    /// It is paid for by `charge`, which lasts as long as the page.
    #[must_use]
    pub fn paid_by(self, charge: Charge) -> Self {
        Self { _charge: Some(Arc::new(charge)), ..self }
    }

    /// `len` bytes to read at `offset` of the page; `None` if they leave it.
    #[inline]
    pub fn seg(&self, offset: u16, len: u16) -> Option<Seg<'_>> {
        self.mapping.seg(self.place(offset, len)?, len.into())
    }

    /// `len` bytes to write; `None` if they leave the page, or it may not be written.
    #[inline]
    pub fn seg_mut(&self, offset: u16, len: u16) -> Option<SegMut<'_>> {
        let place = self.place(offset, len).filter(|_| !self.readonly)?;
        self.mapping.seg_mut(place, len.into())
    }

    fn place(&self, offset: u16, len: u16) -> Option<usize> {
        let end = usize::from(offset) + usize::from(len);
        (end <= PAGE).then(|| self.offset + usize::from(offset))
    }
}

/// Pages of ours, granted to a back end. The grants end with the memory.
pub struct Pages {
    /// The memory; page `i` is at address `i * 4096`.
    pub memory: Arc<GuestMemory>,
    /// The grant reference of each page.
    pub grefs: Vec<u32>,
}

impl Pages {
    /// The pages of `mapping`, with the grant reference of each.
    ///
    /// # Errors
    /// [`HostError::Table`].
    pub fn new(mapping: Mapping, grefs: Vec<u32>) -> Result<Self, HostError> {
        let len = mapping.len() as u64;
        let mapping = Arc::new(mapping);
        let region = Region { guest_addr: 0, user_addr: 0, len, offset: 0, mapping };
        let memory = GuestMemory::new(vec![region]).map_err(HostError::Table)?;
        Ok(Self { memory: Arc::new(memory), grefs })
    }

    /// The words of page `i`.
    pub fn area(&self, i: usize) -> Option<Area> {
        let addr = u64::try_from(i).ok()?.checked_mul(GRANT_LEN.into())?;
        Area::new(&self.memory, addr, PAGE)
    }
}
