//! A directory handed to another process: its sockets, its front end, and the store's nodes.
//!
//! Connections to the store are not handed on: the front end connects again, and finds its keys.
//! Real Xen and its xenstored are no part of a switch, and need none of this.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use os::StateFile;
use serde::{Deserialize, Serialize};
use shm::sync::{Lock, Mutex};

use super::{
    Back, Guest, Imported, Keeping, Kept, Limits, Message, Port, RESUMED, Running, Server, Shared,
    register, spawn,
};
use crate::store::TreeState;
use crate::{Error, FRONT, HYPERVISOR, STORE};

/// State of a directory for another process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackState {
    /// Device and inode of the names of both sockets.
    made: [Option<(u64, u64)>; 2],
    created: bool,
    /// The store's nodes; without them, they are in its file.
    tree: Option<TreeState>,
    file: bool,
    /// Whether a front end is connected.
    front: bool,
    guest: Option<GuestState>,
}

/// The domain of a front end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct GuestState {
    pages: u32,
    /// Its event channels.
    ports: Vec<u32>,
    next_port: u32,
}

impl Back {
    /// Serves nothing from now on; what the front end sends waits.
    pub fn pause(&self) {
        let mut running = self.running();
        if matches!(*running, Running::Thread(_)) {
            os::signal(self.stop.as_fd());
            // It does not panic; an error would leave nothing to resume.
            if let Running::Thread(thread) = std::mem::replace(&mut *running, Running::Ended)
                && let Ok(host) = thread.join()
            {
                *running = Running::Paused(host);
            }
        }
        // Last: the other thread uses it.
        self.server.iter().for_each(Server::pause);
    }

    /// Serves the front end again after [`pause`](Self::pause), or that of another process, whose
    /// sockets' names are this one's from now on.
    ///
    /// # Errors
    /// Out of threads or descriptors.
    pub fn resume(&self) -> Result<(), Error> {
        let os = |what| move |error| Error::Os { at: self.dir.clone(), what, error };
        let server = self.server.as_ref().expect("until it is dropped");
        server.resume()?;
        let mut running = self.running();
        let host = match std::mem::replace(&mut *running, Running::Ended) {
            Running::Paused(host) => host,
            Running::Imported(Imported { front, killed }) => {
                if let Some(front) = front.as_ref().filter(|_| killed) {
                    let message = Message { what: RESUMED, a: 0, b: 0 };
                    let _ = os::send(front.as_fd(), &message.to_bytes(), &[]);
                }
                let [hypervisor, store] = &self.listeners;
                let store = store.adopt(&self.dir.join(STORE)).map_err(os("dup"))?;
                server.serve(store, FRONT);
                let listener = hypervisor.adopt(&self.dir.join(HYPERVISOR)).map_err(os("dup"))?;
                self.host(listener, front, true)?
            }
            other => {
                *running = other;
                return Ok(());
            }
        };
        *running = Running::Thread(spawn(host).map_err(os("thread"))?);
        Ok(())
    }

    /// Has its state kept for the next process: each change of the front end's domain is reported
    /// by [`changed`](Self::changed), and the front end waits until it is
    /// [confirmed](Self::confirm). The store writes its nodes down itself.
    ///
    /// # Errors
    /// Out of descriptors or memory.
    pub fn keep(&self) -> Result<(), Error> {
        let os = |what| move |error| Error::Os { at: self.dir.clone(), what, error };
        let file = StateFile::new().map_err(os("memfd"))?;
        let fd = file.as_fd().try_clone_to_owned().map_err(os("dup"))?;
        let (changed, kept) = (os::eventfd(), os::eventfd());
        let (changed, kept) = (changed.map_err(os("eventfd"))?, kept.map_err(os("eventfd"))?);
        if let Some(server) = &self.server {
            server.keep(file);
        }
        let _ = self.file.set(Arc::new(fd));
        let _ = self.shared.keeping.set(Keeping { changed, kept });
        Ok(())
    }

    /// Readable when the state has changed; `None`: it is not kept.
    pub fn changed(&self) -> Option<BorrowedFd<'_>> {
        self.shared.keeping.get().map(|keeping| keeping.changed.as_fd())
    }

    /// The state is kept, as of now.
    pub fn confirm(&self) {
        self.shared.keeping.get().into_iter().for_each(|keeping| os::signal(keeping.kept.as_fd()));
    }

    /// Returns its state for another process, and the descriptors. It is paused, or its changes are
    /// kept.
    pub fn export(&self) -> (BackState, Vec<Arc<OwnedFd>>) {
        let mut fds: Vec<_> = self.listeners.iter().map(|kept| Arc::clone(&kept.fd)).collect();
        fds.extend(self.file.get().cloned());
        let guest = self.shared.lock();
        let front = match &*self.running() {
            Running::Paused(host) => host.front.clone(),
            _ => guest.as_ref().map(|guest| Arc::clone(&guest.socket)),
        };
        let is_connected = front.is_some();
        fds.extend(front);
        let guest = guest.as_ref().filter(|_| is_connected);
        let guest = guest.map(|guest| {
            fds.extend(guest.files.iter().cloned());
            for port in guest.ports.values() {
                fds.extend([Arc::clone(&port.to_front), Arc::clone(&port.to_back)]);
            }
            let ports = guest.ports.keys().copied().collect();
            GuestState { pages: guest.pages, ports, next_port: guest.next_port }
        });
        let state = BackState {
            made: [self.listeners[0].made, self.listeners[1].made],
            created: self.created.load(Ordering::Relaxed),
            tree: self.server.as_ref().and_then(Server::export),
            file: self.file.get().is_some(),
            front: is_connected,
            guest,
        };
        (state, fds)
    }

    /// Makes the directory of another process, with its descriptors. It serves nothing before
    /// [`resume`](Self::resume). A front end whose state is invalid is left out: its connection
    /// closes.
    ///
    /// # Errors
    /// Its sockets are missing, or out of resources.
    pub fn import(dir: &Path, state: BackState, fds: Vec<OwnedFd>) -> Result<Self, Error> {
        let os = |what| move |error| Error::Os { at: dir.into(), what, error };
        let mut fds = fds.into_iter().map(Arc::new);
        let mut listener = |made| {
            let fd = fds.next().ok_or_else(|| Error::Gone(dir.into()))?;
            Ok::<_, Error>(Kept { fd, made })
        };
        let listeners = [listener(state.made[0])?, listener(state.made[1])?];
        let file = state.file.then(|| fds.next()).flatten();
        let killed = state.tree.is_none();
        let read = || TreeState::read(file?.try_clone().ok()?);
        let tree = state.tree.or_else(read);
        let front = state.front.then(|| fds.next()).flatten().filter(|_| tree.is_some());
        let had_guest = state.guest.is_some();
        let guest = state.guest.zip(front.clone());
        let guest = guest.and_then(|(guest, front)| import_guest(&guest, front, fds));
        let front = front.filter(|_| guest.is_some() == had_guest);
        let server = Server::import(Limits::XENSTORED, tree.unwrap_or_default())?;
        let back = Self {
            shared: Shared::new(),
            stop: Arc::new(os::eventfd().map_err(os("eventfd"))?),
            running: Mutex::new(Lock::LocalThreads, Running::Imported(Imported { front, killed })),
            server: Some(server),
            listeners,
            dir: dir.into(),
            created: AtomicBool::new(state.created),
            file: OnceLock::new(),
        };
        *back.shared.lock() = guest;
        Ok(back)
    }
}

fn import_guest(
    state: &GuestState,
    socket: Arc<OwnedFd>,
    mut fds: impl Iterator<Item = Arc<OwnedFd>>,
) -> Option<Guest> {
    let files = [fds.next()?, fds.next()?];
    let mut guest = register(state.pages, socket, files)?;
    for port in &state.ports {
        let (to_front, to_back) = (fds.next()?, fds.next()?);
        guest.ports.insert(*port, Port { to_front, to_back, bound: Arc::default() });
    }
    guest.next_port = state.next_port;
    Some(guest)
}
