//! A client of a store: one connection, one request at a time.
//!
//! Watch events may arrive at any time, also before the reply to a request. Each sets a bit of its
//! watch, so a peer that rewrites its nodes in a loop costs no memory (XSA-349). A request that
//! receives an event makes the client's descriptor readable by an eventfd, so that a sleeping
//! thread misses no event:
//!
//! ```text
//!   connection ─┐
//!               ├─ epoll ── as_fd()     readable: call events()
//!   eventfd ────┘  (a request received an event)
//! ```

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use shm::sync::{Lock, Mutex, MutexGuard};

use super::error::StoreError;
use super::wire::{self, Decoder, Errno, Kind, Message, Perm};
use os::{Carries, Epoll, Received, Until};

/// Maximum time to wait for a reply, unless set otherwise.
const REPLY_WAIT: Duration = Duration::from_secs(10);
/// Maximum number of attempts of a transaction.
const TRIES: u32 = 32;
/// Maximum number of reads per call of `events`: a peer that keeps writing does not block us.
const READS_MAX: u32 = 16;

/// Sockets of xenstored in dom0, and the device of other domains.
const SOCKETS: [&str; 2] = ["/run/xenstored/socket", "/var/run/xenstored/socket"];
const DEVICE: &str = "/dev/xen/xenbus";

/// A connection to a store. Requests wait for their reply; any thread may send them.
pub struct Store {
    name: String,
    fd: OwnedFd,
    /// Readable when a request received an event.
    event_seen: OwnedFd,
    /// Waits for both.
    either: Epoll,
    link: Mutex<Link>,
}

struct Link {
    decoder: Decoder,
    next_req_id: u32,
    watches: Vec<Watch>,
    gone: bool,
    reply_wait: Duration,
    /// Time spent in requests since [`Store::take_spent`].
    spent: Duration,
    /// Request id of the probe without a reply yet.
    probe: Option<u32>,
}

struct Watch {
    path: String,
    token: String,
    /// An event arrived since the last call of `events`.
    pending: bool,
}

impl Link {
    /// A request as bytes, and its id.
    fn encode(&mut self, kind: Kind, tx_id: u32, payload: Vec<u8>) -> (u32, Vec<u8>) {
        let req_id = self.next_req_id;
        self.next_req_id = req_id.wrapping_add(1);
        let mut bytes = Vec::with_capacity(wire::HEADER_LEN + payload.len());
        Message::new(kind, req_id, tx_id, payload).encode(&mut bytes);
        (req_id, bytes)
    }
}

/// A transaction: its requests take effect together or not at all.
pub struct Transaction<'s> {
    store: &'s Store,
    /// 0: no transaction; each request takes effect alone.
    id: u32,
}

impl Store {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// [`StoreError::Socket`].
    pub fn connect(path: &Path) -> Result<Self, StoreError> {
        let fd = os::connect(path, Carries::Stream)?;
        Self::over(fd, path.display().to_string())
    }

    /// Opens the device node at `path`, such as /dev/xen/xenbus.
    ///
    /// # Errors
    /// [`StoreError`]: no such node, no permission, or an error of the system.
    pub fn device(path: &Path) -> Result<Self, StoreError> {
        let name = path.display().to_string();
        let fd = os::open_device(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => StoreError::NoNode(path.into()),
            std::io::ErrorKind::PermissionDenied => StoreError::NotAllowed(path.into()),
            _ => StoreError::Os { name: name.clone(), what: "open", error },
        })?;
        Self::over(fd, name)
    }

    /// The store of this Xen domain: xenstored's socket if it exists, otherwise the kernel's
    /// device. The device does not report that xenstored has died: replies just do not arrive.
    ///
    /// # Errors
    /// As [`connect`](Self::connect) and [`device`](Self::device).
    pub fn of_this_domain() -> Result<Self, StoreError> {
        match SOCKETS.iter().map(Path::new).find(|path| path.exists()) {
            Some(socket) => Self::connect(socket),
            None => Self::device(Path::new(DEVICE)),
        }
    }

    /// Uses an existing non-blocking connection; `name` is for messages.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn over(fd: OwnedFd, name: String) -> Result<Self, StoreError> {
        let os = |error| StoreError::Os { name: name.clone(), what: "epoll", error };
        let event_seen = os::eventfd().map_err(os)?;
        let either = Epoll::new().map_err(os)?;
        either.add(fd.as_fd(), 0).map_err(os)?;
        either.add(event_seen.as_fd(), 1).map_err(os)?;
        let link = Link {
            decoder: Decoder::default(),
            next_req_id: 1,
            watches: Vec::new(),
            gone: false,
            reply_wait: REPLY_WAIT,
            spent: Duration::ZERO,
            probe: None,
        };
        Ok(Self { name, fd, event_seen, either, link: Mutex::new(Lock::XenStore, link) })
    }

    /// Sets the maximum time to wait for a reply, 10 s by default. A request without one closes
    /// the connection: later requests fail at once.
    pub fn set_reply_wait(&self, wait: Duration) {
        self.lock().reply_wait = wait;
    }

    /// Time that requests took since the last call.
    pub fn take_spent(&self) -> Duration {
        std::mem::take(&mut self.lock().spent)
    }

    /// Sends a request whose reply [`Self::has_replied`] reports. Does not block.
    ///
    /// # Errors
    /// [`StoreError`]: the connection cannot take a request.
    pub fn probe(&self) -> Result<(), StoreError> {
        let mut link = self.lock();
        let (req_id, bytes) = link.encode(Kind::Read, 0, b"domid\0".to_vec());
        link.probe = Some(req_id);
        self.send(&mut link, &bytes, Instant::now())
    }

    /// Whether the probe has its reply, an error of the store included. Does not block.
    ///
    /// # Errors
    /// [`StoreError::Gone`] and similar.
    pub fn has_replied(&self) -> Result<bool, StoreError> {
        let mut link = self.lock();
        for _ in 0..READS_MAX {
            while let Some(reply) = self.next_reply(&mut link)? {
                link.probe.take_if(|probe| *probe == reply.header.req_id);
            }
            if link.probe.is_none() || !self.receive(&mut link)? {
                break;
            }
        }
        Ok(link.probe.is_none())
    }

    /// The numbers of this domain's vifs, sorted; vif `N` is at `device/vif/N`.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn vifs(&self) -> Result<Vec<u16>, StoreError> {
        let names = self.list("device/vif")?;
        let mut vifs: Vec<u16> = names.iter().filter_map(|name| name.parse().ok()).collect();
        vifs.sort_unstable();
        Ok(vifs)
    }

    /// The value of a node; `None` if it does not exist. Invalid UTF-8 is replaced.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn read(&self, path: &str) -> Result<Option<String>, StoreError> {
        self.outside().read(path)
    }

    /// Writes a node; it and its parents are created as needed.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn write(&self, path: &str, value: &str) -> Result<(), StoreError> {
        self.outside().write(path, value)
    }

    /// Creates a node and its parents as needed.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn mkdir(&self, path: &str) -> Result<(), StoreError> {
        self.outside().mkdir(path)
    }

    /// Removes a node and its children, if it exists.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn rm(&self, path: &str) -> Result<(), StoreError> {
        self.outside().rm(path)
    }

    /// The names of a node's children; empty if it does not exist.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn list(&self, dir: &str) -> Result<Vec<String>, StoreError> {
        self.outside().list(dir)
    }

    /// The permissions of a node.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn perms(&self, path: &str) -> Result<Vec<Perm>, StoreError> {
        self.outside().perms(path)
    }

    /// Sets the permissions of a node; the first entry names its owner.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn set_perms(&self, path: &str, perms: &[Perm]) -> Result<(), StoreError> {
        self.outside().set_perms(path, perms)
    }

    /// Registers a watch on a node and its children. The first event arrives at once. The special
    /// nodes `@introduceDomain` and `@releaseDomain` report domains.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn watch(&self, path: &str, token: &str) -> Result<(), StoreError> {
        if self.lock().watches.iter().any(|w| w.path == path && w.token == token) {
            return Ok(());
        }
        let watch = Watch { path: path.into(), token: token.into(), pending: false };
        self.lock().watches.push(watch);
        let done = self.request(Kind::Watch, "watch", 0, path, &[token.as_bytes(), &[0]]);
        if done.is_err() {
            self.remove_watch(path, token);
        }
        done.map(drop)
    }

    /// Removes a watch.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn unwatch(&self, path: &str, token: &str) -> Result<(), StoreError> {
        self.remove_watch(path, token);
        self.request(Kind::Unwatch, "unwatch", 0, path, &[token.as_bytes(), &[0]]).map(drop)
    }

    fn remove_watch(&self, path: &str, token: &str) {
        self.lock().watches.retain(|w| w.path != path || w.token != token);
    }

    /// The watches with events since the last call, as (path, token), each once. Does not block.
    ///
    /// # Errors
    /// [`StoreError::Gone`] and similar, after all earlier events were returned.
    pub fn events(&self) -> Result<Vec<(String, String)>, StoreError> {
        let mut link = self.lock();
        os::drain(self.event_seen.as_fd());
        let mut failure = None;
        for _ in 0..READS_MAX {
            match self.receive(&mut link) {
                Ok(true) => while let Some(_late) = self.next_reply(&mut link)? {},
                Ok(false) => break,
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        if link.gone && failure.is_none() {
            // Abandoned after a protocol error; the connection may still be open.
            failure = Some(StoreError::Gone(self.name.clone()));
        }
        let mut events = Vec::new();
        for watch in link.watches.iter_mut().filter(|w| w.pending) {
            watch.pending = false;
            events.push((watch.path.clone(), watch.token.clone()));
        }
        match failure {
            Some(error) if events.is_empty() => Err(error),
            _ => Ok(events),
        }
    }

    /// Runs `body` in a transaction, repeatedly until there is no conflict. Side effects of `body`
    /// are repeated each time.
    ///
    /// # Errors
    /// Errors of `body` (nothing is changed then), [`StoreError::Conflict`] after many attempts.
    pub fn transaction<R>(
        &self,
        mut body: impl FnMut(&Transaction<'_>) -> Result<R, StoreError>,
    ) -> Result<R, StoreError> {
        for _ in 0..TRIES {
            let begun = self.request(Kind::TransactionStart, "transaction", 0, "", &[])?;
            let text = String::from_utf8_lossy(&begun);
            let id = text.trim_end_matches('\0').parse::<u32>().ok().filter(|id| *id != 0);
            let id = id.ok_or_else(|| self.malformed(format!("transaction {text:?}")))?;
            let done = body(&Transaction { store: self, id });
            let verdict: &[u8] = if done.is_ok() { b"T\0" } else { b"F\0" };
            let end = self.end(id, verdict);
            match (done, end) {
                (Ok(done), Ok(())) => return Ok(done),
                (Err(error), _) | (_, Err(error)) if error.errno() == Some(Errno::Eagain) => {}
                (Err(error), _) | (_, Err(error)) => return Err(error),
            }
        }
        Err(StoreError::Conflict { name: self.name.clone(), tries: TRIES })
    }

    fn end(&self, id: u32, verdict: &[u8]) -> Result<(), StoreError> {
        self.raw(Kind::TransactionEnd, "transaction", id, "", verdict.to_vec()).map(drop)
    }

    /// The directory of a domain's nodes: `/local/domain/DOMID`.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn domain_path(&self, domid: u16) -> Result<String, StoreError> {
        let path = domid.to_string();
        let got = self.request(Kind::GetDomainPath, "domain path", 0, &path, &[])?;
        Ok(text(&got))
    }

    /// Introduces a domain to the store (as a toolstack does).
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn introduce(&self, domid: u16) -> Result<(), StoreError> {
        self.request(Kind::Introduce, "introduce", 0, &domid.to_string(), &[b"0\x001\0"]).map(drop)
    }

    /// Reports to the store that a domain was destroyed (as a toolstack does).
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn release(&self, domid: u16) -> Result<(), StoreError> {
        self.request(Kind::Release, "release", 0, &domid.to_string(), &[]).map(drop)
    }

    /// Whether the domain was introduced.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn is_introduced(&self, domid: u16) -> Result<bool, StoreError> {
        let path = domid.to_string();
        let got = self.request(Kind::IsDomainIntroduced, "is introduced", 0, &path, &[])?;
        Ok(text(&got) == "T")
    }

    fn outside(&self) -> Transaction<'_> {
        Transaction { store: self, id: 0 }
    }

    fn lock(&self) -> MutexGuard<'_, Link> {
        self.link.lock()
    }

    fn malformed(&self, what: String) -> StoreError {
        StoreError::Malformed { name: self.name.clone(), what }
    }

    /// Sends a request with a path, its zero byte, and `rest` as payload.
    fn request(
        &self,
        kind: Kind,
        what: &'static str,
        tx_id: u32,
        path: &str,
        rest: &[&[u8]],
    ) -> Result<Vec<u8>, StoreError> {
        if path.contains('\0') || path.len() > wire::ABS_PATH_MAX {
            return Err(StoreError::BadPath(path.into()));
        }
        let payload = [path.as_bytes(), &[0]].into_iter().chain(rest.iter().copied());
        self.raw(kind, what, tx_id, path, payload.collect::<Vec<_>>().concat())
    }

    fn raw(
        &self,
        kind: Kind,
        what: &'static str,
        tx_id: u32,
        path: &str,
        payload: Vec<u8>,
    ) -> Result<Vec<u8>, StoreError> {
        if payload.len() > wire::PAYLOAD_MAX {
            let (len, max) = (payload.len(), wire::PAYLOAD_MAX);
            return Err(StoreError::TooLong { path: path.into(), len, max });
        }
        let mut link = self.lock();
        if link.gone {
            return Err(StoreError::Gone(self.name.clone()));
        }
        let (req_id, bytes) = link.encode(kind, tx_id, payload);
        let begun = Instant::now();
        let reply = self.exchange(&mut link, &bytes, req_id);
        link.spent += begun.elapsed();
        if matches!(reply, Err(StoreError::Timeout(..))) {
            // The next one would wait as long, and a caller may have many.
            link.gone = true;
        }
        let reply = reply?;
        match reply.kind() {
            Some(Kind::Error) => {
                let error = Errno::from_wire(&reply.payload);
                Err(StoreError::Refused { what, path: path.into(), error })
            }
            Some(same) if same == kind => Ok(reply.payload),
            _ => Err(self.malformed(format!("reply of kind {} to {kind:?}", reply.header.kind))),
        }
    }

    /// Sends a request and waits for its reply.
    fn exchange(&self, link: &mut Link, bytes: &[u8], req_id: u32) -> Result<Message, StoreError> {
        let deadline = Instant::now() + link.reply_wait;
        self.send(link, bytes, deadline)?;
        loop {
            let mut found = None;
            // Decodes all data received: an event after the reply must be recorded now, because the
            // connection will not become readable for it.
            while let Some(reply) = self.next_reply(link)? {
                // Others are replies to no request, or to a probe.
                found = found.or((reply.header.req_id == req_id).then_some(reply));
            }
            if let Some(reply) = found {
                return Ok(reply);
            }
            if !self.receive(link)? {
                self.wait(link, Until::Readable, deadline)?;
            }
        }
    }

    fn send(&self, link: &mut Link, bytes: &[u8], deadline: Instant) -> Result<(), StoreError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let written = os::write(self.fd.as_fd(), rest).map_err(|error| {
                link.gone = true;
                match error.kind() {
                    std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset => {
                        StoreError::Gone(self.name.clone())
                    }
                    _ => StoreError::Os { name: self.name.clone(), what: "write", error },
                }
            })?;
            rest = &rest[written..];
            if written == 0 {
                let waited = self.wait(link, Until::Writable, deadline);
                if waited.is_err() && rest.len() < bytes.len() {
                    // A partial message was sent; the connection is unusable.
                    link.gone = true;
                }
                waited?;
            }
        }
        Ok(())
    }

    fn wait(&self, link: &Link, until: Until, deadline: Instant) -> Result<(), StoreError> {
        let name = || self.name.clone();
        match os::wait(self.fd.as_fd(), until, deadline) {
            Ok(true) => Ok(()),
            Ok(false) => Err(StoreError::Timeout(name(), link.reply_wait.as_secs())),
            Err(error) => Err(StoreError::Os { name: name(), what: "poll", error }),
        }
    }

    /// Reads available data once. Returns whether there was any.
    fn receive(&self, link: &mut Link) -> Result<bool, StoreError> {
        let mut buf = [0; 16 * 1024];
        match os::read(self.fd.as_fd(), &mut buf) {
            Ok(Received::Bytes(n)) => {
                link.decoder.push(&buf[..n]);
                Ok(true)
            }
            Ok(Received::Nothing) => Ok(false),
            Ok(Received::Closed | Received::Truncated) => {
                link.gone = true;
                Err(StoreError::Gone(self.name.clone()))
            }
            Err(error) => {
                link.gone = true;
                Err(StoreError::Os { name: self.name.clone(), what: "read", error })
            }
        }
    }

    /// The next message that is not an event; events are recorded.
    fn next_reply(&self, link: &mut Link) -> Result<Option<Message>, StoreError> {
        loop {
            let message = match link.decoder.take() {
                Ok(Some(message)) => message,
                Ok(None) => return Ok(None),
                Err(wire::Oversized(len)) => {
                    link.gone = true;
                    return Err(self.malformed(format!("a message of {len} bytes")));
                }
            };
            if message.kind() != Some(Kind::WatchEvent) {
                return Ok(Some(message));
            }
            self.record_event(link, &message.payload);
        }
    }

    /// Sets the bit of an event's watch. Events of removed watches are ignored.
    fn record_event(&self, link: &mut Link, payload: &[u8]) {
        let Some([path, token, ..]) = wire::strings(payload).as_deref().map(|s| {
            [s.first().copied().unwrap_or_default(), s.get(1).copied().unwrap_or_default()]
        }) else {
            return;
        };
        let (path, token) = (String::from_utf8_lossy(path), String::from_utf8_lossy(token));
        let is_for = |w: &&mut Watch| w.token == token && wire::is_under(&path, &w.path);
        if let Some(watch) = link.watches.iter_mut().find(is_for) {
            watch.pending = true;
            os::signal(self.event_seen.as_fd());
        }
    }
}

impl AsFd for Store {
    /// Readable when [`events`](Store::events) has events.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.either.as_fd()
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Store({})", self.name)
    }
}

/// A payload that is a single string.
fn text(payload: &[u8]) -> String {
    String::from_utf8_lossy(payload.strip_suffix(&[0]).unwrap_or(payload)).into_owned()
}

/// `Ok(None)` if the node does not exist.
fn unless_missing<R>(got: Result<R, StoreError>) -> Result<Option<R>, StoreError> {
    match got {
        Ok(got) => Ok(Some(got)),
        Err(error) if error.errno() == Some(Errno::Enoent) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Transaction<'_> {
    /// Reads a node in this transaction, as [`Store::read`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn read(&self, path: &str) -> Result<Option<String>, StoreError> {
        let got = unless_missing(self.request(Kind::Read, "read", path, &[]))?;
        Ok(got.map(|value| String::from_utf8_lossy(&value).into_owned()))
    }

    /// Writes a node in this transaction, as [`Store::write`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn write(&self, path: &str, value: &str) -> Result<(), StoreError> {
        self.request(Kind::Write, "write", path, &[value.as_bytes()]).map(drop)
    }

    /// Creates a node in this transaction, as [`Store::mkdir`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn mkdir(&self, path: &str) -> Result<(), StoreError> {
        self.request(Kind::Mkdir, "mkdir", path, &[]).map(drop)
    }

    /// Removes a node in this transaction, as [`Store::rm`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn rm(&self, path: &str) -> Result<(), StoreError> {
        unless_missing(self.request(Kind::Rm, "rm", path, &[])).map(drop)
    }

    /// Lists children of a node in this transaction, as [`Store::list`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn list(&self, dir: &str) -> Result<Vec<String>, StoreError> {
        let got = match unless_missing(self.request(Kind::Directory, "list", dir, &[])) {
            Ok(got) => got.unwrap_or_default(),
            Err(error) if error.errno() == Some(Errno::E2big) => self.list_in_parts(dir)?,
            Err(error) => return Err(error),
        };
        let names = got.split(|b| *b == 0).filter(|name| !name.is_empty());
        Ok(names.map(|name| String::from_utf8_lossy(name).into_owned()).collect())
    }

    /// The names of a node's children if they exceed one message. Each part begins with the node's
    /// generation: when it changes, the parts are inconsistent.
    fn list_in_parts(&self, dir: &str) -> Result<Vec<u8>, StoreError> {
        for _ in 0..TRIES {
            let mut names = Vec::new();
            let mut first = None;
            loop {
                let offset = format!("{}\0", names.len());
                let rest = [offset.as_bytes()];
                let part = self.request(Kind::DirectoryPart, "list", dir, &rest)?;
                let zero = part.iter().position(|b| *b == 0);
                let (generation, part) = part.split_at(zero.map_or(part.len(), |at| at + 1));
                if first.get_or_insert_with(|| generation.to_vec()) != generation {
                    break;
                }
                names.extend_from_slice(part);
                // An empty name ends the list.
                if part.len() < 2 || part.ends_with(&[0, 0]) {
                    return Ok(names);
                }
            }
        }
        Err(StoreError::Conflict { name: self.store.name.clone(), tries: TRIES })
    }

    /// Returns permissions of a node in this transaction, as [`Store::perms`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn perms(&self, path: &str) -> Result<Vec<Perm>, StoreError> {
        let got = self.request(Kind::GetPerms, "perms", path, &[])?;
        let perms = wire::strings(&got).and_then(|s| s.into_iter().map(Perm::parse).collect());
        perms.ok_or_else(|| self.store.malformed(format!("permissions {:?}", text(&got))))
    }

    /// Sets permissions of a node in this transaction, as [`Store::set_perms`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn set_perms(&self, path: &str, perms: &[Perm]) -> Result<(), StoreError> {
        let perms: String = perms.iter().map(|p| format!("{p}\0")).collect();
        self.request(Kind::SetPerms, "set perms", path, &[perms.as_bytes()]).map(drop)
    }

    fn request(
        &self,
        kind: Kind,
        what: &'static str,
        path: &str,
        rest: &[&[u8]],
    ) -> Result<Vec<u8>, StoreError> {
        self.store.request(kind, what, self.id, path, rest)
    }
}
