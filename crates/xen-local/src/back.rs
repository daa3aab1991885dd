//! The back end's side of a directory: its sockets, its only guest, and the toolstack's tasks.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use os::{Carries, Epoll, Listener, Permissions, Received};
use shm::{Access, Area, Domain, GRANT_LEN, Mapping, Private};
use xen_netif::host::{self, Channel, HostError};
use xen_netif::store::{Access as May, Perm, Store, StoreError};

use super::grants::{self, Memory};
use super::{
    BACK, CLOSE, ENTRY, FDS_MAX, FRONT, GREF_RESERVED, HELLO, HYPERVISOR, Message, PAGES_MAX, PORT,
    PORTS_MAX, STORE, VERSION, WELCOME,
};
use crate::Error;
use crate::store::{Limits, Server};

/// Maximum time for the back half to close after its guest disconnected.
const CLOSE_WAIT: Duration = Duration::from_secs(10);

const FRONT_HOME: &str = "/local/domain/1";
const FRONT_DIR: &str = "/local/domain/1/device/vif/0";
const BACK_DIR: &str = "/local/domain/0/backend/vif/1/0";

/// Host interface of the back half. Its sockets are removed on drop.
pub struct Back {
    shared: Arc<Shared>,
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    server: Option<Server>,
    /// The directory, if it was created here.
    created: Option<PathBuf>,
}

#[derive(Default)]
struct Shared(Mutex<Option<Guest>>);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Option<Guest>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Guest {
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

impl Back {
    /// Serves `dir`, which is created if it does not exist. Its sockets, and the directory if it is
    /// created, have these permissions.
    ///
    /// # Errors
    /// [`Error`]: for instance another back end serves the directory.
    pub fn open(dir: &Path, permissions: &Permissions) -> Result<Self, Error> {
        let created = match os::create_directory(dir, permissions) {
            Ok(created) => created.then(|| dir.to_path_buf()),
            Err(error) => return Err(Error::Directory { dir: dir.into(), error }),
        };
        let os = |what| move |error| Error::Os { at: dir.into(), what, error };
        let stop = Arc::new(os::eventfd().map_err(os("eventfd"))?);
        let mut back = Self { shared: Arc::default(), stop, thread: None, server: None, created };
        // This socket first: it fails if another back end serves the directory.
        let listener = Listener::bind(&dir.join(HYPERVISOR), Carries::Messages, permissions)?;
        let server = Server::start(Limits::XENSTORED)?;
        server.listen(&dir.join(STORE), FRONT, permissions)?;
        let epoll = Epoll::new().map_err(os("epoll"))?;
        epoll.add(back.stop.as_fd(), STOP).map_err(os("epoll"))?;
        epoll.add(listener.as_fd(), LISTENER).map_err(os("epoll"))?;
        let host = Host {
            shared: Arc::clone(&back.shared),
            stop: Arc::clone(&back.stop),
            store: server.connect(BACK)?,
            mac: mac(dir),
            epoll,
            listener,
            front: None,
        };
        back.server = Some(server);
        let thread = std::thread::Builder::new().name("xen-local".into());
        back.thread = Some(thread.spawn(move || host.run()).map_err(os("thread"))?);
        Ok(back)
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

    /// A directory has one back end: a second one cannot open it.
    fn claimed_by(&self, _: u16, _: u32) -> Option<String> {
        None
    }
}

impl Drop for Back {
    fn drop(&mut self) {
        os::signal(self.stop.as_fd());
        if let Some(thread) = self.thread.take() {
            // It does not panic; an error would leave nothing to stop.
            let _ = thread.join();
        }
        self.server = None;
        if let Some(dir) = &self.created {
            // Fails if it contains other files.
            let _ = std::fs::remove_dir(dir);
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
    front: Option<OwnedFd>,
}

impl Host {
    fn run(mut self) {
        // A failing epoll set is our bug; the front end notices that its connection closes.
        while let Ok(ready) = self.epoll.wait(None) {
            for ready in ready {
                match ready.tag {
                    STOP => return drop(self.shared.lock().take()),
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
            self.front = Some(socket);
        }
    }

    /// Handles one message of the front end; `None` if it must be disconnected.
    fn serve(&mut self) -> Option<()> {
        let socket = self.front.as_ref()?;
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
                *guest = Some(register(message.b, fds)?);
                drop(guest);
                // On an error (quotas), the front end is disconnected.
                self.create().ok()?;
                self.reply(Message { what: WELCOME, a: FRONT.into(), b: 0 }, &[])
            }
            (PORT, Some(front)) if front.ports.len() < PORTS_MAX => {
                let to_front = Arc::new(os::eventfd().ok()?);
                let to_back = Arc::new(os::eventfd().ok()?);
                let port = front.next_port;
                front.next_port += 1;
                let fds = [Arc::clone(&to_front), Arc::clone(&to_back)];
                front.ports.insert(port, Port { to_front, to_back, bound: Arc::default() });
                drop(guest);
                let reply = Message { what: PORT, a: port, b: 0 };
                self.reply(reply, &fds.each_ref())
            }
            (CLOSE, Some(front)) => {
                front.ports.remove(&message.a);
                Some(())
            }
            _ => None,
        }
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
            self.wait_closed();
            let _ = self.store.rm(BACK_DIR);
        }
        let _ = self.epoll.change(self.listener.as_fd(), LISTENER, true, false);
    }

    /// Waits for the back half to close, if there is one, for a limited time, as a toolstack does.
    fn wait_closed(&self) {
        const TOKEN: &str = "close";
        let state = format!("{BACK_DIR}/state");
        let begun = |state: Option<String>| state.is_some_and(|s| s != "6" && s != "1");
        let Ok(epoll) = Epoll::new() else { return };
        let added = [self.stop.as_fd(), self.store.as_fd()];
        if added.into_iter().zip(0..).any(|(fd, tag)| epoll.add(fd, tag).is_err())
            || self.store.write(&format!("{BACK_DIR}/online"), "0").is_err()
            || self.store.watch(&state, TOKEN).is_err()
        {
            return;
        }
        let deadline = Instant::now() + CLOSE_WAIT;
        while begun(self.store.read(&state).unwrap_or(None)) {
            let left = deadline.saturating_duration_since(Instant::now());
            let ready = epoll.wait(Some(left)).unwrap_or_default();
            if left.is_zero() || ready.iter().any(|r| r.tag == STOP) || self.store.events().is_err()
            {
                break;
            }
        }
        let _ = self.store.unwatch(&state, TOKEN);
    }
}

/// Maps a front end's memory and table; `None` if they are invalid.
fn register(pages: u32, fds: Vec<OwnedFd>) -> Option<Guest> {
    let [memory, table] = <[OwnedFd; 2]>::try_from(fds).ok()?;
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
    Some(Guest { memory, domain, ports: BTreeMap::new(), next_port: 1 })
}
