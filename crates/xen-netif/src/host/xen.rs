//! Real Xen, through the device nodes of Linux.

pub(super) mod sys;
#[cfg(test)]
mod tests;

use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use shm::sync::{Lock, RwLock};
use shm::{Access, Domain, GRANT_LEN, Grants, Mapping, Piece, Private};

use self::sys::{GrantError, Granted, MappedGrants, ioctl};
use super::{Bound, Channel, HostError, Pages};
use crate::store::{Store, StoreError};

const GNTDEV: &str = "/dev/xen/gntdev";
const GNTALLOC: &str = "/dev/xen/gntalloc";
const EVTCHN: &str = "/dev/xen/evtchn";
/// Vifs of this domain's kernel back end.
const DEVICES: &str = "/sys/bus/xen-backend/devices";

fn open(node: &str, module: &'static str) -> Result<OwnedFd, HostError> {
    let node = Path::new(node);
    os::open_device(node).map_err(|error| HostError::of_node(node, module, error))
}

fn evtchn() -> Result<OwnedFd, HostError> {
    open(EVTCHN, "xen-evtchn")
}

/// Host interface of the back half.
pub struct Back {
    gntdev: Arc<Gntdev>,
    /// Shared by all domains, so that copies between them are one call.
    grants: Arc<dyn Grants>,
}

struct Gntdev {
    fd: OwnedFd,
    mapped: Arc<RwLock<MappedGrants>>,
    own: Option<Own>,
}

/// Grants our pages to our own domain: copies to and from them need no page-table walk, which costs
/// more than the copy.
struct Own {
    gntalloc: Arc<OwnedFd>,
    domid: u16,
}

impl Own {
    /// `None` if this domain has no gntalloc, or its id is unknown.
    fn open() -> Option<Self> {
        let gntalloc = Arc::new(open(GNTALLOC, "xen-gntalloc").ok()?);
        let domid = Store::of_this_domain().ok()?.read("domid").ok()??.parse().ok()?;
        Some(Self { gntalloc, domid })
    }
}

impl Grants for Gntdev {
    fn copy(&self, pieces: &mut [Piece<'_>]) {
        let mapped = self.mapped.read();
        sys::grant_copy(self.fd.as_fd(), &mapped, pieces);
    }
}

impl Gntdev {
    fn private(&self, len: usize) -> Option<Private> {
        let Own { gntalloc, domid } = self.own.as_ref()?;
        let pages = u32::try_from(len.div_ceil(GRANT_LEN as usize)).ok().filter(|n| *n > 0)?;
        sys::own_pages(gntalloc, *domid, pages, &self.mapped)
    }
}

impl Back {
    /// Opens the device nodes.
    ///
    /// # Errors
    /// [`HostError`]: a device node that is missing, or permission denied.
    pub fn open() -> Result<Self, HostError> {
        let fd = open(GNTDEV, "xen-gntdev")?;
        let gntdev = Arc::new(Gntdev {
            fd,
            mapped: Arc::new(RwLock::new(Lock::XenMapped, MappedGrants::default())),
            own: Own::open(),
        });
        // Each channel needs one later; a missing device is reported now.
        evtchn()?;
        let grants = Arc::clone(&gntdev);
        Ok(Self { gntdev, grants })
    }

    /// Maps one grant by a separate call and mmap, so that it can be unmapped alone.
    fn map(&self, domid: u16, gref: u32, access: Access) -> Result<Mapping, HostError> {
        let bad = |why: String| HostError::BadGrant { domid, gref, why };
        let gntdev = Arc::clone(&self.gntdev);
        let index = ioctl::map_grant_ref(gntdev.fd.as_fd(), domid, gref);
        let index = index.map_err(|error| bad(error.to_string()))?;
        let release = move || {
            // Errors cannot be handled; the kernel releases it with the descriptor.
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
        let granted = Granted { domid, grefs: [gref].into() };
        Ok(sys::register(mapping, &self.gntdev.mapped, granted).on_unmap(release))
    }
}

impl super::Back for Back {
    fn store(&self) -> Result<Store, StoreError> {
        Store::of_this_domain()
    }

    fn domain(&self, domid: u16) -> Result<Arc<Domain>, HostError> {
        Ok(Arc::new(Domain::new(domid, Arc::clone(&self.grants))))
    }

    fn private(&self, len: usize) -> Option<Private> {
        self.gntdev.private(len)
    }

    fn map_page(
        &self,
        domid: u16,
        gref: u32,
        access: Access,
    ) -> Result<(Arc<Mapping>, usize), HostError> {
        Ok((Arc::new(self.map(domid, gref, access)?), 0))
    }

    fn bind(&self, domid: u16, port: u32) -> Result<Channel, HostError> {
        let fd = evtchn()?;
        let ours = ioctl::bind_interdomain(fd.as_fd(), domid, port);
        let why =
            |error: std::io::Error| HostError::BadPort { domid, port, why: error.to_string() };
        Ok(Channel::xen(fd, ours.map_err(why)?))
    }

    fn rebind(&self, domid: u16, port: u32, bound: Bound) -> Result<Channel, HostError> {
        // A port that can be bound is a new one of the guest, by the same number: it closed the
        // one to which the descriptor is bound.
        if let Ok(channel) = self.bind(domid, port) {
            return Ok(channel);
        }
        // A process killed after it consumed an event left the port masked.
        sys::evtchn_unmask(bound.0.as_fd(), bound.1);
        Ok(Channel::lent(bound))
    }

    fn unbind(&self, bound: &Bound) {
        let (fd, port) = bound;
        let _ = ioctl::unbind(fd.as_fd(), *port);
    }

    fn claimed_by(&self, domid: u16, devid: u32) -> Option<String> {
        claimed_by(Path::new(DEVICES), domid, devid)
    }

    fn send_online(&self, domid: u16, devid: u32) -> io::Result<bool> {
        send_online(Path::new(DEVICES), domid, devid)
    }
}

/// As xen-netback does when its interface exists.
fn send_online(devices: &Path, domid: u16, devid: u32) -> io::Result<bool> {
    let uevent = devices.join(format!("vif-{domid}-{devid}")).join("uevent");
    match std::fs::OpenOptions::new().write(true).open(uevent) {
        Ok(mut file) => file.write_all(b"online").map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// The driver of this domain's kernel that serves the vif, if any.
fn claimed_by(devices: &Path, domid: u16, devid: u32) -> Option<String> {
    let driver = devices.join(format!("vif-{domid}-{devid}")).join("driver");
    let driver = std::fs::read_link(driver).ok()?;
    let name = driver.file_name().unwrap_or(driver.as_os_str()).to_string_lossy().into_owned();
    Some(format!(
        "this kernel's driver '{name}' serves it; unbind it, or do not load the module xen-netback \
         (see docs/xen.md)"
    ))
}

/// Host interface of the front half.
pub struct Front {
    gntalloc: Arc<OwnedFd>,
}

impl Front {
    /// Opens the device nodes.
    ///
    /// # Errors
    /// [`HostError`]: a device node that is missing, or permission denied.
    pub fn open() -> Result<Self, HostError> {
        let gntalloc = Arc::new(open(GNTALLOC, "xen-gntalloc")?);
        evtchn()?;
        Ok(Self { gntalloc })
    }
}

impl super::Front for Front {
    fn store(&self) -> Result<Store, StoreError> {
        Store::of_this_domain()
    }

    fn alloc(&self, pages: u32, domid: u16, readonly: bool) -> Result<Pages, HostError> {
        let flags = if readonly { 0 } else { ioctl::GNTALLOC_FLAG_WRITABLE };
        let advice =
            "raise gntalloc's limit (modprobe xen-gntalloc limit=8192), or use fewer queues";
        match sys::fresh_pages(&self.gntalloc, domid, flags, pages) {
            Ok((mapping, grefs)) => Pages::new(mapping, grefs),
            Err(GrantError::Full) => Err(HostError::NoPages { pages, advice }),
            Err(GrantError::Map(error)) => Err(error.into()),
        }
    }

    fn channel(&self, domid: u16) -> Result<(u32, Channel), HostError> {
        let fd = evtchn()?;
        let port = ioctl::bind_unbound_port(fd.as_fd(), domid);
        let at = || Path::new(EVTCHN).into();
        let port = port.map_err(|error| HostError::Os { at: at(), what: "bind", error })?;
        Ok((port, Channel::xen(fd, port)))
    }
}
