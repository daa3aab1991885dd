//! What a hypervisor does for the two halves: grants, event channels, and which store.
//!
//! * [`xen`]: real Xen, through /dev/xen/{gntdev,gntalloc,evtchn}
//! * [`local`]: this machine's own making, for machines without Xen: grants in memfds, channels in
//!   eventfds, and a [store of our own](crate::store::server)
//!
//! [`Back`] and [`Front`] are either; which one shows in nothing but how they are opened.

mod channel;
mod error;
pub mod local;
pub mod xen;

use std::path::Path;
use std::sync::Arc;

use shm::{Access, Area, Domain, GRANT_LEN, GuestMemory, Mapping, Private, Region, Seg, SegMut};
use switch::account::Charge;

pub use channel::{Channel, SharedChannel};
pub use error::HostError;

use crate::store::{Store, StoreError};

/// A granted page, as a length in memory.
const PAGE: usize = GRANT_LEN as usize;

/// What the back half of a vif needs.
pub enum Back {
    /// Real Xen.
    Xen(xen::Back),
    /// This machine's own making.
    Local(local::Back),
}

/// What the front half of a vif needs.
pub enum Front {
    /// Real Xen.
    Xen(xen::Front),
    /// This machine's own making.
    Local(local::Front),
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
    fn new(mapping: Mapping, grefs: Vec<u32>) -> Result<Self, HostError> {
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

impl Back {
    /// Real Xen.
    ///
    /// # Errors
    /// [`HostError`]: a device node that is missing, or not for us.
    pub fn open_xen() -> Result<Self, HostError> {
        xen::Back::open().map(Self::Xen)
    }

    /// This machine's own making, in the directory `dir`, which is made if it is not there.
    ///
    /// # Errors
    /// [`HostError`]: for instance another back end that serves there.
    pub fn open_local(dir: &Path) -> Result<Self, HostError> {
        local::Back::open(dir).map(Self::Local)
    }

    /// A connection to the store, as this back end's domain.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn store(&self) -> Result<Store, StoreError> {
        match self {
            Self::Xen(_) => Store::of_this_domain(),
            Self::Local(back) => back.store(),
        }
    }

    /// The domain that grants come from.
    ///
    /// # Errors
    /// [`HostError::NoDomain`], if it is not there (a real one is not asked).
    pub fn domain(&self, domid: u16) -> Result<Arc<Domain>, HostError> {
        match self {
            Self::Xen(back) => Ok(back.domain(domid)),
            Self::Local(back) => back.domain(domid),
        }
    }

    /// At least `len` bytes of private memory that copies to and from grants are faster with;
    /// `None` if any memory will do, or there is none of that kind.
    pub fn private(&self, len: usize) -> Option<Private> {
        match self {
            Self::Xen(back) => back.private(len),
            Self::Local(_) => None,
        }
    }

    /// Maps one granted page of a ring.
    ///
    /// # Errors
    /// [`HostError`]: for instance a grant that is not there, or for reading only.
    pub fn map(&self, domid: u16, gref: u32) -> Result<RingPage, HostError> {
        let (mapping, offset) = match self {
            Self::Xen(back) => (Arc::new(back.map(domid, gref, Access::Write)?), 0),
            Self::Local(back) => back.map(domid, gref, Access::Write)?,
        };
        Ok(RingPage { mapping, offset })
    }

    /// Maps pages that stay mapped: (grant reference, for reading only). All or none.
    ///
    /// # Errors
    /// [`HostError`]: it names the grant.
    pub fn map_static(
        &self,
        domid: u16,
        grants: &[(u32, bool)],
    ) -> Result<Vec<StaticPage>, HostError> {
        let map = |(gref, readonly): &(u32, bool)| {
            let access = if *readonly { Access::Read } else { Access::Write };
            let (mapping, offset) = match self {
                Self::Xen(back) => (Arc::new(back.map(domid, *gref, access)?), 0),
                Self::Local(back) => back.map(domid, *gref, access)?,
            };
            Ok(StaticPage::new(mapping, offset, *readonly))
        };
        grants.iter().map(map).collect()
    }

    /// Binds a domain's event channel.
    ///
    /// # Errors
    /// [`HostError`]: for instance a port that is not there.
    pub fn bind(&self, domid: u16, port: u32) -> Result<Channel, HostError> {
        match self {
            Self::Xen(back) => back.bind(domid, port),
            Self::Local(back) => back.bind(domid, port),
        }
    }
}

impl Front {
    /// Real Xen.
    ///
    /// # Errors
    /// [`HostError`]: a device node that is missing, or not for us.
    pub fn open_xen() -> Result<Self, HostError> {
        xen::Front::open().map(Self::Xen)
    }

    /// The vif that the back end in directory `dir` offers.
    ///
    /// # Errors
    /// [`HostError`]: nobody serves there, or another front end has it.
    pub fn open_local(dir: &Path) -> Result<Self, HostError> {
        local::Front::open(dir).map(Self::Local)
    }

    /// A connection to the store, as this front end's domain.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn store(&self) -> Result<Store, StoreError> {
        match self {
            Self::Xen(_) => Store::of_this_domain(),
            Self::Local(front) => front.store(),
        }
    }

    /// The numbers of this domain's vifs, in order; vif `N` is at `device/vif/N`.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn vifs(&self) -> Result<Vec<u16>, StoreError> {
        let names = self.store()?.list("device/vif")?;
        let mut vifs: Vec<u16> = names.iter().filter_map(|name| name.parse().ok()).collect();
        vifs.sort_unstable();
        Ok(vifs)
    }

    /// `pages` zeroed pages, granted to a back end.
    ///
    /// # Errors
    /// [`HostError`]: for instance no more pages.
    pub fn alloc(
        &self,
        pages: u32,
        backend_domid: u16,
        readonly: bool,
    ) -> Result<Pages, HostError> {
        match self {
            Self::Xen(front) => front.alloc(pages, backend_domid, readonly),
            Self::Local(front) => front.alloc(pages, backend_domid, readonly),
        }
    }

    /// A new event channel for a back end to bind: its port, and our end.
    ///
    /// # Errors
    /// [`HostError`].
    pub fn channel(&self, backend_domid: u16) -> Result<(u32, Channel), HostError> {
        match self {
            Self::Xen(front) => front.channel(backend_domid),
            Self::Local(front) => front.channel(),
        }
    }
}

#[cfg(test)]
mod tests;
