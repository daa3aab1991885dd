//! Real Xen, through the device nodes of Linux.

pub(super) mod sys;

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};

use shm::{Access, Domain, GRANT_LEN, Grants, Mapping, Piece};

use self::sys::{MappedGrant, MappedGrants, ioctl};
use super::{Channel, HostError, Pages};

const GNTDEV: &str = "/dev/xen/gntdev";
const GNTALLOC: &str = "/dev/xen/gntalloc";
const EVTCHN: &str = "/dev/xen/evtchn";

fn open(node: &str, module: &'static str) -> Result<OwnedFd, HostError> {
    let node = Path::new(node);
    crate::sys::open_device(node).map_err(|error| HostError::of_node(node, module, error))
}

fn evtchn() -> Result<OwnedFd, HostError> {
    open(EVTCHN, "xen-evtchn")
}

/// The back half's end.
pub struct Back {
    gntdev: Arc<Gntdev>,
    /// All domains share it, so that copies between them are one call.
    grants: Arc<dyn Grants>,
}

struct Gntdev {
    fd: OwnedFd,
    mapped: RwLock<MappedGrants>,
}

impl Gntdev {
    fn change(&self, change: impl FnOnce(&mut MappedGrants)) {
        change(&mut self.mapped.write().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Grants for Gntdev {
    fn copy(&self, pieces: &mut [Piece<'_>]) {
        let mapped = self.mapped.read().unwrap_or_else(PoisonError::into_inner);
        sys::grant_copy(self.fd.as_fd(), &mapped, pieces);
    }
}

impl Back {
    pub(super) fn open() -> Result<Self, HostError> {
        let fd = open(GNTDEV, "xen-gntdev")?;
        let gntdev = Arc::new(Gntdev { fd, mapped: RwLock::default() });
        // One for each channel will be needed; that there are any is told at once.
        evtchn()?;
        let grants = Arc::clone(&gntdev);
        Ok(Self { gntdev, grants })
    }

    pub(super) fn domain(&self, domid: u16) -> Arc<Domain> {
        Arc::new(Domain::new(domid, Arc::clone(&self.grants)))
    }

    /// One grant by a call and an mmap of its own, so that each goes by itself.
    pub(super) fn map(&self, domid: u16, gref: u32, access: Access) -> Result<Mapping, HostError> {
        let bad = |why: String| HostError::BadGrant { domid, gref, why };
        let gntdev = Arc::clone(&self.gntdev);
        let index = ioctl::map_grant_ref(gntdev.fd.as_fd(), domid, gref);
        let index = index.map_err(|error| bad(error.to_string()))?;
        let release = move || {
            // There is nobody to tell; the kernel gives it back with the descriptor.
            let _ = ioctl::unmap_grant_ref(gntdev.fd.as_fd(), index);
        };
        let fd = self.gntdev.fd.as_fd();
        let mapping = match Mapping::exact(fd, index, GRANT_LEN.into(), access) {
            Ok(mapping) => mapping,
            Err(error) => {
                release();
                return Err(bad(error.to_string()));
            }
        };
        let at = mapping.seg(0, GRANT_LEN).map_or(0, |page| page.as_iovec().iov_base.addr());
        self.gntdev.change(|mapped| mapped.insert(at, MappedGrant { domid, gref }));
        let gntdev = Arc::clone(&self.gntdev);
        let forget = move || gntdev.change(|mapped| mapped.remove(at));
        Ok(mapping.before_unmap(forget).on_unmap(release))
    }

    pub(super) fn bind(&self, domid: u16, port: u32) -> Result<Channel, HostError> {
        let fd = evtchn()?;
        let ours = ioctl::bind_interdomain(fd.as_fd(), domid, port);
        let why =
            |error: std::io::Error| HostError::BadPort { domid, port, why: error.to_string() };
        Ok(Channel::xen(fd, ours.map_err(why)?))
    }
}

/// The front half's end.
pub struct Front {
    gntalloc: Arc<OwnedFd>,
}

impl Front {
    pub(super) fn open() -> Result<Self, HostError> {
        let gntalloc = Arc::new(open(GNTALLOC, "xen-gntalloc")?);
        evtchn()?;
        Ok(Self { gntalloc })
    }

    pub(super) fn alloc(&self, pages: u32, domid: u16, readonly: bool) -> Result<Pages, HostError> {
        let flags = if readonly { 0 } else { ioctl::GNTALLOC_FLAG_WRITABLE };
        let advice =
            "raise gntalloc's limit (modprobe xen-gntalloc limit=8192), or use fewer queues";
        let full = |_| HostError::NoPages { pages, advice };
        let (index, grefs) =
            ioctl::alloc_gref(self.gntalloc.as_fd(), domid, flags, pages).map_err(full)?;
        let gntalloc = Arc::clone(&self.gntalloc);
        let release = move || {
            // The kernel keeps pages that the back end still maps (XSA-396).
            let _ = ioctl::dealloc_gref(gntalloc.as_fd(), index, pages);
        };
        let len = u64::from(pages) * u64::from(GRANT_LEN);
        match Mapping::exact(self.gntalloc.as_fd(), index, len, Access::Write) {
            Ok(mapping) => Pages::new(mapping.on_unmap(release), grefs),
            Err(error) => {
                release();
                Err(error.into())
            }
        }
    }

    pub(super) fn channel(&self, domid: u16) -> Result<(u32, Channel), HostError> {
        let fd = evtchn()?;
        let port = ioctl::bind_unbound_port(fd.as_fd(), domid);
        let at = || Path::new(EVTCHN).into();
        let port = port.map_err(|error| HostError::Os { at: at(), what: "bind", error })?;
        Ok((port, Channel::xen(fd, port)))
    }
}
