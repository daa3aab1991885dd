//! The front end's side of a directory.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use os::{Carries, Received, Until};
use shm::sync::{Lock, Mutex, Ordering};
use shm::{Access, Area, GRANT_LEN, Mapping};
use xen_netif::host::{self, Channel, HostError, Pages};
use xen_netif::store::{Store, StoreError};

use super::{
    CLOSE, ENTRY, FDS_MAX, GREF_RESERVED, GTF_PERMIT_ACCESS, GTF_READONLY, HELLO, HYPERVISOR,
    Message, PORT, RESUMED, STORE, VERSION, WELCOME,
};
use crate::Error;

/// Pages of a front end: 128 MiB, allocated on use.
const PAGES: u32 = 1 << 15;
/// Maximum time to wait for the back end, which may still be closing the previous vif.
const REPLY_WAIT: Duration = Duration::from_secs(15);

/// Host interface of the front half.
pub struct Front(Arc<Inner>);

struct Inner {
    dir: PathBuf,
    socket: Mutex<OwnedFd>,
    memory: Mapping,
    grants: Arc<Table>,
}

/// The grant table, and which pages are in use. May outlive the connection, like pages.
struct Table {
    table: Area,
    used: Mutex<Vec<bool>>,
}

impl Front {
    /// Connects to the vif that the back end in `dir` serves.
    ///
    /// # Errors
    /// [`Error`]: no back end serves the directory, or it has another front end.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let socket = os::connect(&dir.join(HYPERVISOR), Carries::Messages)?;
        let memory = Mapping::memfd("xen-local", u64::from(PAGES) * u64::from(GRANT_LEN))?;
        let table_len = (PAGES + GREF_RESERVED) as usize * ENTRY;
        let mapping = Arc::new(Mapping::memfd("xen-local-grants", table_len as u64)?);
        let table = Area::of(&mapping, 0, table_len).expect("the mapping is that long");
        let used = Mutex::new(Lock::LocalPages, vec![false; PAGES as usize]);
        let grants = Arc::new(Table { table, used });
        let front = Inner {
            dir: dir.into(),
            socket: Mutex::new(Lock::LocalSocket, socket),
            memory,
            grants,
        };
        let hello = Message { what: HELLO, a: VERSION, b: PAGES };
        let fds: Vec<BorrowedFd<'_>> =
            [front.memory.fd(), mapping.fd()].into_iter().flatten().collect();
        front.call(hello, &fds, WELCOME)?;
        Ok(Self(Arc::new(front)))
    }
}

#[cfg(test)]
impl Front {
    /// Grants with these flags, as [`Table::granted`].
    pub(crate) fn granted(&self, flags: u16) -> Vec<u32> {
        self.0.grants.granted(flags)
    }
}

impl host::Front for Front {
    fn store(&self) -> Result<Store, StoreError> {
        Store::connect(&self.0.dir.join(STORE))
    }

    fn alloc(&self, pages: u32, domid: u16, readonly: bool) -> Result<Pages, HostError> {
        let advice = "use fewer queues";
        let full = HostError::NoPages { pages, advice };
        let n = pages as usize;
        let grants = Arc::clone(&self.0.grants);
        let first = grants.reserve(n).ok_or(full)?;
        let release = move || grants.release(first, n);
        let page = u64::from(GRANT_LEN);
        let mapping = match self.0.memory.fd() {
            Some(fd) => {
                Mapping::exact(fd, first as u64 * page, u64::from(pages) * page, Access::Write)
            }
            None => Err(shm::MapError::BadRange { offset: 0, len: 0 }),
        };
        let mapping = match mapping {
            Ok(mapping) => mapping.on_unmap(release),
            Err(error) => {
                release();
                return Err(error.into());
            }
        };
        // Cleared, so that the peer cannot read earlier data.
        for i in 0..n {
            if let Some(mut page) = mapping.seg_mut(i * GRANT_LEN as usize, GRANT_LEN) {
                page.write(&[0; GRANT_LEN as usize]);
            }
        }
        let flags = GTF_PERMIT_ACCESS | if readonly { GTF_READONLY } else { 0 };
        let grant = |i: usize| self.0.grants.grant(first + i, domid, flags);
        Pages::new(mapping, (0..n).map(grant).collect())
    }

    fn channel(&self, _: u16) -> Result<(u32, Channel), HostError> {
        let (reply, fds) = self.0.call(Message { what: PORT, a: 0, b: 0 }, &[], PORT)?;
        let port = reply.a;
        let Ok([read, write]) = <[OwnedFd; 2]>::try_from(fds) else {
            return Err(Error::Gone(self.0.dir.clone()).into());
        };
        // Channels are closed with the connection.
        let inner = Arc::downgrade(&self.0);
        let close = move || {
            let message = Message { what: CLOSE, a: port, b: 0 };
            if let Some(inner) = inner.upgrade() {
                let _ = os::send(inner.socket.lock().as_fd(), &message.to_bytes(), &[]);
            }
        };
        Ok((port, Channel::eventfds(Arc::new(read), Arc::new(write)).on_close(close)))
    }
}

impl Inner {
    /// Sends a message. Returns the reply and its descriptors.
    fn call(
        &self,
        message: Message,
        fds: &[BorrowedFd<'_>],
        want: u32,
    ) -> Result<(Message, Vec<OwnedFd>), Error> {
        let gone = || Error::Gone(self.dir.clone());
        let socket = self.socket.lock();
        // Processes that continued since the last request.
        while matches!(self.receive(&socket), Ok(Some((RESUMED_ALONE, _)))) {}
        let deadline = Instant::now() + REPLY_WAIT;
        let send = || match os::send(socket.as_fd(), &message.to_bytes(), fds) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::Timeout(self.dir.clone())),
            Err(_) => Err(gone()),
        };
        send()?;
        loop {
            let os = |error| Error::Os { at: self.dir.clone(), what: "poll", error };
            if !os::wait(socket.as_fd(), Until::Readable, deadline).map_err(os)? {
                return Err(Error::Timeout(self.dir.clone()));
            }
            match self.receive(&socket)? {
                Some((reply, fds)) if reply.what == want => return Ok((reply, fds)),
                // The domain exists: only its reply is missing.
                Some((RESUMED_ALONE, _)) if want == WELCOME => {
                    return Ok((RESUMED_ALONE, Vec::new()));
                }
                Some((RESUMED_ALONE, _)) => send()?,
                Some(_) => return Err(gone()),
                None => {}
            }
        }
    }

    /// Receives a message, if there is one.
    fn receive(&self, socket: &OwnedFd) -> Result<Option<(Message, Vec<OwnedFd>)>, Error> {
        let gone = || Error::Gone(self.dir.clone());
        let (mut buf, mut fds) = ([0; 64], Vec::new());
        match os::recv(socket.as_fd(), &mut buf, &mut fds, FDS_MAX).map_err(|_| gone())? {
            Received::Bytes(n) => {
                let message = Message::from_bytes(&buf[..n]).ok_or_else(gone)?;
                Ok(Some((message, fds)))
            }
            Received::Nothing => Ok(None),
            Received::Closed | Received::Truncated => Err(gone()),
        }
    }
}

/// The message of a process that continues.
const RESUMED_ALONE: Message = Message { what: RESUMED, a: 0, b: 0 };

impl Table {
    /// Reserves `n` contiguous pages. Returns the first.
    fn reserve(&self, n: usize) -> Option<usize> {
        let mut used = self.used.lock();
        let (mut first, mut run) = (0, 0);
        for (i, taken) in used.iter().enumerate() {
            if run == n {
                break;
            }
            (first, run) = if *taken { (i + 1, 0) } else { (first, run + 1) };
        }
        if run < n || n == 0 {
            return None;
        }
        used[first..first + n].fill(true);
        Some(first)
    }

    /// Grants in use with exactly these flags, in page order.
    #[cfg(test)]
    fn granted(&self, flags: u16) -> Vec<u32> {
        let is = |gref: &u32| {
            let at = *gref as usize * ENTRY;
            self.table.sync_load(at, Ordering::Acquire) == flags
        };
        (GREF_RESERVED..PAGES + GREF_RESERVED).filter(is).collect()
    }

    fn release(&self, first: usize, n: usize) {
        for page in first..first + n {
            self.table.sync_store((page + GREF_RESERVED as usize) * ENTRY, 0, Ordering::Release);
        }
        self.used.lock()[first..first + n].fill(false);
    }

    /// Grants a page. The flags are written last, so that an entry in use is complete.
    fn grant(&self, page: usize, domid: u16, flags: u16) -> u32 {
        let at = (page + GREF_RESERVED as usize) * ENTRY;
        self.table.store_u16(at + 2, domid);
        self.table.store_u32(at + 4, page as u32);
        self.table.sync_store(at, flags, Ordering::Release);
        page as u32 + GREF_RESERVED
    }
}
