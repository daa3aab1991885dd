//! The back end's side of a directory: its sockets, its only guest, and the toolstack's tasks.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use os::{Carries, Epoll, Listener, Permissions, Received};
use shm::sync::{Lock, Mutex, MutexGuard};
use shm::{Access, Area, Domain, GRANT_LEN, Mapping, Private};
use xen_netif::host::{self, Bound, Channel, HostError};
use xen_netif::store::{Access as May, Perm, Store, StoreError};

use super::grants::{self, Memory};
use super::{
    BACK, CLOSE, ENTRY, FDS_MAX, FRONT, GREF_RESERVED, HELLO, HYPERVISOR, Message, PAGES_MAX, PORT,
    PORTS_MAX, RESUMED, STORE, VERSION, WELCOME,
};
use crate::Error;
use crate::store::{Limits, Server};

mod handover;

pub use handover::BackState;

/// Maximum time for the back half to close after its guest disconnected.
const CLOSE_WAIT: Duration = Duration::from_secs(10);

const FRONT_HOME: &str = "/local/domain/1";
const FRONT_DIR: &str = "/local/domain/1/device/vif/0";
const BACK_DIR: &str = "/local/domain/0/backend/vif/1/0";

/// Host interface of the back half. Its sockets are removed on drop.
pub struct Back {
    shared: Arc<Shared>,
    stop: Arc<OwnedFd>,
    running: Mutex<Running>,
    server: Option<Server>,
    /// Its listeners, for another process: the hypervisor's and the store's.
    listeners: [Kept; 2],
    /// The directory.
    dir: PathBuf,
    /// Whether the directory was created here, and is removed with the sockets.
    created: AtomicBool,
    /// The store's file, if it is kept for the next process.
    file: OnceLock<Arc<OwnedFd>>,
}

/// A listener's descriptor, and device and inode of its name.
#[derive(Clone)]
struct Kept {
    fd: Arc<OwnedFd>,
    made: Option<(u64, u64)>,
}

impl Kept {
    fn of(listener: &Listener) -> std::io::Result<Self> {
        let fd = Arc::new(listener.as_fd().try_clone_to_owned()?);
        Ok(Self { fd, made: listener.made() })
    }

    fn adopt(&self, path: &Path) -> std::io::Result<Listener> {
        let mut listener = Listener::adopt(self.fd.try_clone()?, path, self.made);
        listener.own();
        Ok(listener)
    }
}

/// The hypervisor's side of the front end, in its thread or not.
enum Running {
    /// Of another process, and not started.
    Imported(Imported),
    Thread(JoinHandle<Box<Host>>),
    Paused(Box<Host>),
    Ended,
}

/// The front end of another process.
struct Imported {
    front: Option<Arc<OwnedFd>>,
    /// Whether that process was killed, perhaps before it replied.
    killed: bool,
}

struct Shared {
    guest: Mutex<Option<Guest>>,
    keeping: OnceLock<Keeping>,
}

/// A front end gets its reply when the change is kept.
struct Keeping {
    /// Signalled when there is a change.
    changed: OwnedFd,
    /// Signalled when it is kept.
    kept: OwnedFd,
}

impl Shared {
    fn new() -> Arc<Self> {
        let guest = Mutex::new(Lock::LocalGuest, None);
        Arc::new(Self { guest, keeping: OnceLock::new() })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Guest>> {
        self.guest.lock()
    }
}

struct Guest {
    socket: Arc<OwnedFd>,
    /// Its memory and its grant table.
    files: [Arc<OwnedFd>; 2],
    pages: u32,
    memory: Arc<Memory>,
    domain: Arc<Domain>,
    ports: BTreeMap<u32, Port>,
    next_port: u32,
}

/// An event channel allocated by the front end.
struct Port {
    to_front: Arc<OwnedFd>,
    to_back: Arc<OwnedFd>,
    /// As in Xen, it can be bound only once at a time.
    bound: Arc<AtomicBool>,
}

impl Drop for Guest {
    fn drop(&mut self) {
        grants::all().remove(&self.domain);
    }
}

fn spawn(mut host: Box<Host>) -> std::io::Result<JoinHandle<Box<Host>>> {
    let run = move || {
        host.run();
        host
    };
    std::thread::Builder::new().name("xen-local".into()).spawn(run)
}

impl Back {
    /// Serves `dir`, which is created if it does not exist. Its sockets, and the directory if it is
    /// created, have these permissions.
    ///
    /// # Errors
    /// [`Error`]: for instance another back end serves the directory.
    pub fn open(dir: &Path, permissions: &Permissions) -> Result<Self, Error> {
        let created = match os::create_directory(dir, permissions) {
            Ok(created) => created,
            Err(error) => return Err(Error::Directory { dir: dir.into(), error }),
        };
        // This socket first: it fails if another back end serves the directory.
        let opened = Listener::bind(&dir.join(HYPERVISOR), Carries::Messages, permissions)
            .map_err(Error::from)
            .and_then(|listener| Self::serve(dir, listener, permissions));
        match opened {
            Ok(back) => {
                back.created.store(created, Ordering::Relaxed);
                Ok(back)
            }
            Err(error) => {
                if created {
                    let _ = std::fs::remove_dir(dir);
                }
                Err(error)
            }
        }
    }

    fn serve(dir: &Path, listener: Listener, permissions: &Permissions) -> Result<Self, Error> {
        let os = |what| move |error| Error::Os { at: dir.into(), what, error };
        let server = Server::start(Limits::XENSTORED)?;
        let store = Listener::bind(&dir.join(STORE), Carries::Stream, permissions)?;
        let listeners = [Kept::of(&listener), Kept::of(&store)];
        let [hypervisor, of_store] = listeners;
        let listeners = [hypervisor.map_err(os("dup"))?, of_store.map_err(os("dup"))?];
        server.serve(store, FRONT);
        let mut back = Self {
            shared: Shared::new(),
            stop: Arc::new(os::eventfd().map_err(os("eventfd"))?),
            running: Mutex::new(Lock::LocalThreads, Running::Ended),
            server: Some(server),
            listeners,
            dir: dir.into(),
            created: AtomicBool::new(false),
            file: OnceLock::new(),
        };
        let host = back.host(listener, None, false)?;
        back.running =
            Mutex::new(Lock::LocalThreads, Running::Thread(spawn(host).map_err(os("thread"))?));
        Ok(back)
    }

    /// The hypervisor's side, with a front end's connection if there is one. `imported`: the store
    /// is another process's.
    fn host(
        &self,
        listener: Listener,
        front: Option<Arc<OwnedFd>>,
        imported: bool,
    ) -> Result<Box<Host>, Error> {
        let os = |what| move |error| Error::Os { at: self.dir.clone(), what, error };
        let epoll = Epoll::new().map_err(os("epoll"))?;
        epoll.add(self.stop.as_fd(), STOP).map_err(os("epoll"))?;
        epoll.add(listener.as_fd(), LISTENER).map_err(os("epoll"))?;
        if let Some(front) = &front {
            epoll.add(front.as_fd(), PEER).map_err(os("epoll"))?;
            epoll.change(listener.as_fd(), LISTENER, false, false).map_err(os("epoll"))?;
        }
        let server = self.server.as_ref().expect("until it is dropped");
        Ok(Box::new(Host {
            shared: Arc::clone(&self.shared),
            stop: Arc::clone(&self.stop),
            store: server.connect(BACK)?,
            mac: mac(&self.dir),
            epoll,
            listener,
            front,
            removes_back: imported,
        }))
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock()
    }
}

impl host::Back for Back {
    fn store(&self) -> Result<Store, StoreError> {
        match &self.server {
            Some(server) => server.connect(BACK),
            None => Err(StoreError::Gone("xen-local".into())),
        }
    }

    fn domain(&self, domid: u16) -> Result<Arc<Domain>, HostError> {
        let guest = self.shared.lock();
        let guest = guest.as_ref().filter(|_| domid == FRONT).ok_or(HostError::NoDomain(domid))?;
        Ok(Arc::clone(&guest.domain))
    }

    fn private(&self, _: usize) -> Option<Private> {
        None
    }

    /// The front end's memory, and the page's offset in it.
    fn map_page(
        &self,
        domid: u16,
        gref: u32,
        access: Access,
    ) -> Result<(Arc<Mapping>, usize), HostError> {
        let guest = self.shared.lock();
        let guest = guest.as_ref().filter(|_| domid == FRONT).ok_or(HostError::NoDomain(domid))?;
        match guest.memory.find(gref, access) {
            Ok(offset) => Ok((Arc::clone(guest.memory.mapping()), offset)),
            Err(why) => Err(HostError::BadGrant { domid, gref, why: why.into() }),
        }
    }

    fn bind(&self, domid: u16, port: u32) -> Result<Channel, HostError> {
        let guest = self.shared.lock();
        let guest = guest.as_ref().filter(|_| domid == FRONT).ok_or(HostError::NoDomain(domid))?;
        let bad = |why: &str| HostError::BadPort { domid, port, why: why.into() };
        let entry = guest.ports.get(&port).ok_or_else(|| bad("no such port"))?;
        if entry.bound.swap(true, Ordering::AcqRel) {
            return Err(bad("already bound"));
        }
        let bound = Arc::clone(&entry.bound);
        let channel = Channel::eventfds(Arc::clone(&entry.to_back), Arc::clone(&entry.to_front));
        Ok(channel.on_close(move || bound.store(false, Ordering::Release)))
    }

    /// Ports are bound again: what another process bound is not known here.
    fn rebind(&self, domid: u16, port: u32, _: Bound) -> Result<Channel, HostError> {
        self.bind(domid, port)
    }

    fn unbind(&self, _: &Bound) {}

    /// A directory has one back end: a second one cannot open it.
    fn claimed_by(&self, _: u16, _: u32) -> Option<String> {
        None
    }

    /// A directory has no toolstack.
    fn send_online(&self, _: u16, _: u32) -> std::io::Result<bool> {
        Ok(true)
    }
}

impl Drop for Back {
    fn drop(&mut self) {
        let owns = !matches!(*self.running(), Running::Imported(_));
        self.pause();
        *self.running() = Running::Ended;
        drop(self.shared.lock().take());
        self.server = None;
        if owns && self.created.load(Ordering::Relaxed) {
            // Fails if it contains other files.
            let _ = std::fs::remove_dir(&self.dir);
        }
    }
}

/// A MAC address derived from the directory's path, in Xen's range.
fn mac(dir: &Path) -> String {
    let dir = std::fs::canonicalize(dir).unwrap_or_else(|_| dir.into());
    let fnv = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
    let hash = dir.as_os_str().as_encoded_bytes().iter().fold(0x811c_9dc5, fnv);
    let [_, a, b, c] = hash.to_be_bytes();
    format!("00:16:3e:{a:02x}:{b:02x}:{c:02x}")
}

const STOP: u64 = 0;
const LISTENER: u64 = 1;
const PEER: u64 = 2;

/// State of the thread.
struct Host {
    shared: Arc<Shared>,
    stop: Arc<OwnedFd>,
    store: Store,
    mac: String,
    epoll: Epoll,
    listener: Listener,
    front: Option<Arc<OwnedFd>>,
    /// Whether the back half's directory may be left of a front end that disconnected. That of a
    /// new store is not ours: somebody else wrote it.
    removes_back: bool,
}

impl Host {
    /// Serves the front end until it is stopped.
    fn run(&mut self) {
        if self.front.is_none() && self.removes_back {
            self.remove_back();
        }
        // A failing epoll set is our bug; the front end notices that its connection closes.
        while let Ok(ready) = self.epoll.wait(None) {
            for ready in ready {
                match ready.tag {
                    STOP => {
                        os::drain(self.stop.as_fd());
                        return;
                    }
                    LISTENER => self.accept(),
                    _ if self.serve().is_none() => self.close(),
                    _ => {}
                }
            }
        }
    }

    /// One front end at a time: others wait in the listener's queue.
    fn accept(&mut self) {
        if self.front.is_some() {
            return;
        }
        if let Ok(Some(socket)) = self.listener.accept()
            && self.epoll.add(socket.as_fd(), PEER).is_ok()
        {
            // This cannot fail for a descriptor in the set.
            let _ = self.epoll.change(self.listener.as_fd(), LISTENER, false, false);
            self.front = Some(Arc::new(socket));
        }
    }

    /// Handles one message of the front end; `None` if it must be disconnected.
    fn serve(&mut self) -> Option<()> {
        let socket = Arc::clone(self.front.as_ref()?);
        let (mut buf, mut fds) = ([0; 64], Vec::new());
        let n = match os::recv(socket.as_fd(), &mut buf, &mut fds, FDS_MAX).ok()? {
            Received::Bytes(n) => n,
            Received::Nothing => return Some(()),
            Received::Closed | Received::Truncated => return None,
        };
        let message = Message::from_bytes(&buf[..n])?;
        let mut guest = self.shared.lock();
        match (message.what, guest.as_mut()) {
            (HELLO, None) if message.a == VERSION => {
                let files = <[OwnedFd; 2]>::try_from(fds).ok()?;
                *guest = Some(register(message.b, socket, files.map(Arc::new))?);
                drop(guest);
                // On an error (quotas), the front end is disconnected.
                self.create().ok()?;
                self.wait_kept();
                self.reply(Message { what: WELCOME, a: FRONT.into(), b: 0 }, &[])
            }
            (PORT, Some(front)) if front.ports.len() < PORTS_MAX => {
                let to_front = Arc::new(os::eventfd().ok()?);
                let to_back = Arc::new(os::eventfd().ok()?);
                let port = front.next_port;
                // It may allocate and close them indefinitely; none has another one's number.
                front.next_port = port.checked_add(1)?;
                let fds = [Arc::clone(&to_front), Arc::clone(&to_back)];
                front.ports.insert(port, Port { to_front, to_back, bound: Arc::default() });
                drop(guest);
                self.wait_kept();
                let reply = Message { what: PORT, a: port, b: 0 };
                self.reply(reply, &fds.each_ref())
            }
            (CLOSE, Some(front)) => {
                front.ports.remove(&message.a);
                drop(guest);
                self.wait_kept();
                Some(())
            }
            _ => None,
        }
    }

    /// Waits until a change is kept for the next process, or this side is stopped.
    fn wait_kept(&self) {
        let Some(keeping) = self.shared.keeping.get() else { return };
        os::signal(keeping.changed.as_fd());
        os::poll_readable(&[keeping.kept.as_fd(), self.stop.as_fd()], None);
        os::drain(keeping.kept.as_fd());
    }

    fn reply(&self, message: Message, fds: &[&Arc<OwnedFd>]) -> Option<()> {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        let socket = self.front.as_ref()?;
        os::send(socket.as_fd(), &message.to_bytes(), &fds).ok()?.then_some(())
    }

    /// Creates a domain as a toolstack does.
    fn create(&self) -> Result<(), StoreError> {
        let guest = [Perm::new(May::None, FRONT), Perm::new(May::Read, BACK)];
        let ours = [Perm::new(May::None, BACK), Perm::new(May::Read, FRONT)];
        self.store.introduce(FRONT)?;
        self.store.transaction(|t| {
            t.rm(BACK_DIR)?;
            for (dir, perms) in [(FRONT_HOME, &ours), (BACK_DIR, &ours), (FRONT_DIR, &guest)] {
                t.mkdir(dir)?;
                t.set_perms(dir, perms)?;
            }
            t.write(&format!("{FRONT_HOME}/domid"), "1")?;
            let back = [
                ("frontend", FRONT_DIR),
                ("frontend-id", "1"),
                ("online", "1"),
                ("script", ""),
                ("type", "vif"),
                ("handle", "0"),
                ("mac", &self.mac),
                // There is no script to wait for.
                ("hotplug-status", "connected"),
                ("state", "1"),
            ];
            back.iter()
                .try_for_each(|(key, value)| t.write(&format!("{BACK_DIR}/{key}"), value))?;
            let front = [
                ("backend", BACK_DIR),
                ("backend-id", "0"),
                ("handle", "0"),
                ("mac", &self.mac),
                ("trusted", "1"),
                ("state", "1"),
            ];
            front.iter().try_for_each(|(key, value)| t.write(&format!("{FRONT_DIR}/{key}"), value))
        })
    }

    /// Destroys the domain of a disconnected front end. The next one is accepted after the back
    /// half closed.
    fn close(&mut self) {
        self.front = None;
        if self.shared.lock().take().is_some() {
            let _ = self.store.rm(FRONT_HOME);
            let _ = self.store.release(FRONT);
            self.wait_kept();
            self.remove_back();
        }
        let _ = self.epoll.change(self.listener.as_fd(), LISTENER, true, false);
    }

    /// Removes the back half's directory, if there is one, when it has closed.
    fn remove_back(&mut self) {
        let exists = matches!(self.store.read(&format!("{BACK_DIR}/frontend")), Ok(Some(_)));
        self.removes_back = exists && !self.wait_closed();
        if exists && !self.removes_back {
            let _ = self.store.rm(BACK_DIR);
        }
    }

    /// Waits for the back half to close for a limited time, as a toolstack does; false: this side
    /// was stopped.
    fn wait_closed(&self) -> bool {
        const TOKEN: &str = "close";
        let state = format!("{BACK_DIR}/state");
        let begun = |state: Option<String>| state.is_some_and(|s| s != "6" && s != "1");
        let Ok(epoll) = Epoll::new() else { return true };
        let added = [self.stop.as_fd(), self.store.as_fd()];
        if added.into_iter().zip(0..).any(|(fd, tag)| epoll.add(fd, tag).is_err())
            || self.store.write(&format!("{BACK_DIR}/online"), "0").is_err()
            || self.store.watch(&state, TOKEN).is_err()
        {
            return true;
        }
        let deadline = Instant::now() + CLOSE_WAIT;
        let mut stopped = false;
        while !stopped && begun(self.store.read(&state).unwrap_or(None)) {
            let left = deadline.saturating_duration_since(Instant::now());
            let ready = epoll.wait(Some(left)).unwrap_or_default();
            stopped = ready.iter().any(|r| r.tag == STOP);
            if left.is_zero() || self.store.events().is_err() {
                break;
            }
        }
        let _ = self.store.unwatch(&state, TOKEN);
        !stopped
    }
}

/// Maps a front end's memory and table; `None` if they are invalid.
fn register(pages: u32, socket: Arc<OwnedFd>, files: [Arc<OwnedFd>; 2]) -> Option<Guest> {
    let [memory, table] = &files;
    if pages == 0 || pages > PAGES_MAX {
        return None;
    }
    // A file on a user's file system could block each access.
    if !os::is_memory(memory.as_fd()) || !os::is_memory(table.as_fd()) {
        return None;
    }
    let entries = pages + GREF_RESERVED;
    let len = u64::from(pages) * u64::from(GRANT_LEN);
    let memory = Arc::new(Mapping::new(memory.as_fd(), 0, len).ok()?);
    let table_len = entries as usize * ENTRY;
    let table = Arc::new(Mapping::new(table.as_fd(), 0, table_len as u64).ok()?);
    let table = Area::of(&table, 0, table_len)?;
    let memory = Arc::new(Memory::new(memory, table, entries, pages));
    let domain = grants::all().add(Arc::clone(&memory))?;
    Some(Guest { socket, files, pages, memory, domain, ports: BTreeMap::new(), next_port: 1 })
}
