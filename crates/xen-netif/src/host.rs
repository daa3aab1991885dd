//! Interface to the hypervisor for both halves: grants, event channels and the store.
//!
//! A host is a [`Back`] and a [`Front`]. This crate implements them for real Xen in [`xen`], with
//! /dev/xen/{gntdev,gntalloc,evtchn}; the crate `xen-local` for machines without Xen.
//!
//! A host is called when rings are created and released, never per frame. Bursts use what it
//! returned: [`Channel`]s, mapped pages, and domains for grant copies in `shm`.

mod channel;
mod error;
pub mod xen;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use shm::{Access, Area, Domain, GRANT_LEN, GuestMemory, Mapping, Private, Region, Seg, SegMut};
use switch::account::Charge;

pub use channel::{Channel, Event, SharedChannel};
pub use error::HostError;

use crate::store::{Store, StoreError};

/// Size of a granted page.
const PAGE: usize = GRANT_LEN as usize;

/// A bound event channel that another process can use: the descriptor to which it is bound, and our
/// port.
pub type Bound = (Arc<OwnedFd>, u32);

/// Host interface of a vif's back half.
pub trait Back: Send + Sync {
    /// Connects to the store as this back end's domain.
    ///
    /// # Errors
    /// [`StoreError`].
    fn store(&self) -> Result<Store, StoreError>;

    /// The domain whose grants are copied.
    ///
    /// # Errors
    /// [`HostError::NoDomain`] if it does not exist (not checked on real Xen).
    fn domain(&self, domid: u16) -> Result<Arc<Domain>, HostError>;

    /// At least `len` bytes of private memory that makes grant copies faster; `None` if any memory
    /// is as fast, or none is left.
    fn private(&self, len: usize) -> Option<Private>;

    /// Maps one granted page. Returns the mapping and the page's offset in it.
    ///
    /// # Errors
    /// [`HostError`]: for instance a missing or read-only grant.
    fn map_page(
        &self,
        domid: u16,
        gref: u32,
        access: Access,
    ) -> Result<(Arc<Mapping>, usize), HostError>;

    /// Binds a domain's event channel.
    ///
    /// # Errors
    /// [`HostError`]: for instance a missing port.
    fn bind(&self, domid: u16, port: u32) -> Result<Channel, HostError>;

    /// Binds a domain's event channel that another process of this back end has bound. It stays
    /// bound when the channel is dropped, until [`unbind`](Self::unbind).
    ///
    /// # Errors
    /// As for [`bind`](Self::bind).
    fn rebind(&self, domid: u16, port: u32, bound: Bound) -> Result<Channel, HostError>;

    /// Unbinds an event channel for all processes, if it is bound.
    fn unbind(&self, bound: &Bound);

    /// The other back end that serves this vif, with advice; `None`: no other.
    fn claimed_by(&self, domid: u16, devid: u32) -> Option<String>;

    /// Has the kernel send the event `online` for a vif, on which toolstacks that use udev run
    /// their scripts. Returns false if the kernel does not know the vif yet.
    ///
    /// # Errors
    /// It cannot be sent.
    fn send_online(&self, domid: u16, devid: u32) -> io::Result<bool>;
}

/// Host interface of a vif's front half.
pub trait Front: Send + Sync {
    /// Connects to the store as this front end's domain.
    ///
    /// # Errors
    /// [`StoreError`].
    fn store(&self) -> Result<Store, StoreError>;

    /// Allocates `pages` zeroed pages, granted to a back end.
    ///
    /// # Errors
    /// [`HostError`]: for instance no free pages.
    fn alloc(&self, pages: u32, backend_domid: u16, readonly: bool) -> Result<Pages, HostError>;

    /// Allocates an event channel for a back end to bind. Returns its port and our end.
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

    /// Maps static grants: (grant reference, whether read-only). All or none.
    ///
    /// # Errors
    /// As [`map_page`](Back::map_page); it names the grant.
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

/// A mapped page of a ring. Its grant is released with the last [`Area`] of it.
pub struct RingPage {
    mapping: Arc<Mapping>,
    offset: usize,
}

impl RingPage {
    /// The page as an area.
    pub fn area(&self) -> Option<Area> {
        Area::of(&self.mapping, self.offset, PAGE)
    }

    /// Whether the peer revoked the memory: the port must be stopped.
    pub fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }
}

/// A statically granted page, to copy from and to. It is unmapped with its last clone.
#[derive(Clone, Debug)]
pub struct StaticPage {
    mapping: Arc<Mapping>,
    offset: usize,
    readonly: bool,
    /// Charge to its guest's account.
    _charge: Option<Arc<Charge>>,
}

impl StaticPage {
    /// The page at `offset` of `mapping`.
    pub fn new(mapping: Arc<Mapping>, offset: usize, readonly: bool) -> Self {
        Self { mapping, offset, readonly, _charge: None }
    }

    /// Keeps `charge` as long as the page is mapped.
    #[must_use]
    pub fn with_charge(self, charge: Charge) -> Self {
        Self { _charge: Some(Arc::new(charge)), ..self }
    }

    /// `len` bytes to read at `offset` of the page; `None` if they exceed it.
    #[inline]
    pub fn seg(&self, offset: u16, len: u16) -> Option<Seg<'_>> {
        self.mapping.seg(self.place(offset, len)?, len.into())
    }

    /// `len` bytes to write; `None` if they exceed the page, or it is read-only.
    #[inline]
    pub fn seg_mut(&self, offset: u16, len: u16) -> Option<SegMut<'_>> {
        let place = self.place(offset, len).filter(|_| !self.readonly)?;
        self.mapping.seg_mut(place, len.into())
    }

    /// Whether it may only be read.
    pub fn is_readonly(&self) -> bool {
        self.readonly
    }

    fn place(&self, offset: u16, len: u16) -> Option<usize> {
        let end = usize::from(offset) + usize::from(len);
        (end <= PAGE).then(|| self.offset + usize::from(offset))
    }
}

/// Our pages, granted to a back end. The grants end with the memory.
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

    /// Page `i` as an area.
    pub fn area(&self, i: usize) -> Option<Area> {
        let addr = u64::try_from(i).ok()?.checked_mul(GRANT_LEN.into())?;
        Area::new(&self.memory, addr, PAGE)
    }
}
