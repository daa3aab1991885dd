//! A client of a store: one connection, one request at a time.
//!
//! Watch events may come at any moment, also before the answer to a request. Each sets the one bit
//! of its watch, so that a peer who rewrites its nodes all day costs no memory (XSA-349). A request
//! that picks up an event makes the client's descriptor readable by other means, so that whoever
//! sleeps on it misses nothing:
//!
//! ```text
//!   connection ─┐
//!               ├─ epoll ── as_fd()     readable: call events()
//!   eventfd ────┘  (a request met an event)
//! ```

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::error::StoreError;
use super::wire::{self, Decoder, Errno, Kind, Message, Perm};
use os::{Carries, Epoll, Received, Until};

/// Longest wait for an answer.
const ANSWER_WAIT: Duration = Duration::from_secs(10);
/// How often a transaction is tried.
const TRIES: u32 = 32;
/// Most reads of one look for events: a peer that keeps writing does not keep us.
const READS_MAX: u32 = 16;

/// Where xenstored listens in dom0, and what other domains have.
const SOCKETS: [&str; 2] = ["/run/xenstored/socket", "/var/run/xenstored/socket"];
const DEVICE: &str = "/dev/xen/xenbus";

/// A connection to a store. Requests wait for their answer; any thread may make them.
pub struct Store {
    name: String,
    fd: OwnedFd,
    /// Readable when a request picked up an event.
    picked_up: OwnedFd,
    /// Both of them.
    either: Epoll,
    link: Mutex<Link>,
}

struct Link {
    decoder: Decoder,
    next_req_id: u32,
    watches: Vec<Watch>,
    gone: bool,
}

struct Watch {
    path: String,
    token: String,
    /// Something happened there since the last look.
    pending: bool,
}

/// Requests that belong together: they take effect all at once, or not at all.
pub struct Transaction<'s> {
    store: &'s Store,
    /// 0: none, each request by itself.
    id: u32,
}

impl Store {
    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// [`StoreError::Socket`] says what stands in the way.
    pub fn connect(path: &Path) -> Result<Self, StoreError> {
        let fd = os::connect(path, Carries::Stream)?;
        Self::over(fd, path.display().to_string())
    }

    /// Opens the device node at `path`, such as /dev/xen/xenbus.
    ///
    /// # Errors
    /// [`StoreError`]: no such node, no permission, or what the system says.
    pub fn device(path: &Path) -> Result<Self, StoreError> {
        let name = path.display().to_string();
        let fd = os::open_device(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => StoreError::NoNode(path.into()),
            std::io::ErrorKind::PermissionDenied => StoreError::NotAllowed(path.into()),
            _ => StoreError::Os { name: name.clone(), what: "open", error },
        })?;
        Self::over(fd, name)
    }

    /// The store of this Xen domain: xenstored's socket where there is one, else the kernel's
    /// device. The device would not tell that xenstored is dead: its answers would not come.
    ///
    /// # Errors
    /// As [`connect`](Self::connect) and [`device`](Self::device).
    pub fn of_this_domain() -> Result<Self, StoreError> {
        match SOCKETS.iter().map(Path::new).find(|path| path.exists()) {
            Some(socket) => Self::connect(socket),
            None => Self::device(Path::new(DEVICE)),
        }
    }

    /// A connection that exists already, non-blocking; `name` is for messages.
    ///
    /// # Errors
    /// When descriptors ran out.
    pub fn over(fd: OwnedFd, name: String) -> Result<Self, StoreError> {
        let os = |error| StoreError::Os { name: name.clone(), what: "epoll", error };
        let picked_up = os::eventfd().map_err(os)?;
        let either = Epoll::new().map_err(os)?;
        either.add(fd.as_fd(), 0).map_err(os)?;
        either.add(picked_up.as_fd(), 1).map_err(os)?;
        let link =
            Link { decoder: Decoder::default(), next_req_id: 1, watches: Vec::new(), gone: false };
        Ok(Self { name, fd, picked_up, either, link: Mutex::new(link) })
    }

    /// The numbers of this domain's vifs, in order; vif `N` is at `device/vif/N`.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn vifs(&self) -> Result<Vec<u16>, StoreError> {
        let names = self.list("device/vif")?;
        let mut vifs: Vec<u16> = names.iter().filter_map(|name| name.parse().ok()).collect();
        vifs.sort_unstable();
        Ok(vifs)
    }

    /// The value of a node, `None` if there is no such node. Bytes that are no text are replaced.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn read(&self, path: &str) -> Result<Option<String>, StoreError> {
        self.outside().read(path)
    }

    /// Writes a node; it and those above are made as needed.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn write(&self, path: &str, value: &str) -> Result<(), StoreError> {
        self.outside().write(path, value)
    }

    /// Makes a node, and those above as needed.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn mkdir(&self, path: &str) -> Result<(), StoreError> {
        self.outside().mkdir(path)
    }

    /// Removes a node and all below. One that is not there is no error.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn rm(&self, path: &str) -> Result<(), StoreError> {
        self.outside().rm(path)
    }

    /// The names below a node; none if there is no such node.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn list(&self, dir: &str) -> Result<Vec<String>, StoreError> {
        self.outside().list(dir)
    }

    /// Who may do what with a node.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn perms(&self, path: &str) -> Result<Vec<Perm>, StoreError> {
        self.outside().perms(path)
    }

    /// Says who may do what with a node; the first entry names its owner.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn set_perms(&self, path: &str, perms: &[Perm]) -> Result<(), StoreError> {
        self.outside().set_perms(path, perms)
    }

    /// Asks to be told of changes of a node and of all below. The first event comes at once. The
    /// special nodes `@introduceDomain` and `@releaseDomain` tell of domains.
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
            self.forget(path, token);
        }
        done.map(drop)
    }

    /// No longer tells of changes there.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn unwatch(&self, path: &str, token: &str) -> Result<(), StoreError> {
        self.forget(path, token);
        self.request(Kind::Unwatch, "unwatch", 0, path, &[token.as_bytes(), &[0]]).map(drop)
    }

    fn forget(&self, path: &str, token: &str) {
        self.lock().watches.retain(|w| w.path != path || w.token != token);
    }

    /// The watches something happened under since the last call, as (path, token): each once,
    /// however often it happened. Does not wait.
    ///
    /// # Errors
    /// [`StoreError::Gone`] and its like, once all that came before has been told.
    pub fn events(&self) -> Result<Vec<(String, String)>, StoreError> {
        let mut link = self.lock();
        os::drain(self.picked_up.as_fd());
        let mut trouble = None;
        for _ in 0..READS_MAX {
            match self.receive(&mut link) {
                Ok(true) => while let Some(_late) = self.next_answer(&mut link)? {},
                Ok(false) => break,
                Err(error) => {
                    trouble = Some(error);
                    break;
                }
            }
        }
        if link.gone && trouble.is_none() {
            // Given up for what it said, though its end may still be open.
            trouble = Some(StoreError::Gone(self.name.clone()));
        }
        let mut told = Vec::new();
        for watch in link.watches.iter_mut().filter(|w| w.pending) {
            watch.pending = false;
            told.push((watch.path.clone(), watch.token.clone()));
        }
        match trouble {
            Some(error) if told.is_empty() => Err(error),
            _ => Ok(told),
        }
    }

    /// Runs `body` in a transaction until no one else was in the way. What `body` did besides is
    /// done again each time.
    ///
    /// # Errors
    /// What `body` fails with (nothing is changed then), [`StoreError::Conflict`] after many tries.
    pub fn transaction<R>(
        &self,
        mut body: impl FnMut(&Transaction<'_>) -> Result<R, StoreError>,
    ) -> Result<R, StoreError> {
        for _ in 0..TRIES {
            let begun = self.request(Kind::TransactionStart, "transaction", 0, "", &[])?;
            let text = String::from_utf8_lossy(&begun);
            let id = text.trim_end_matches('\0').parse::<u32>().ok().filter(|id| *id != 0);
            let id = id.ok_or_else(|| self.nonsense(format!("transaction {text:?}")))?;
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

    /// Where a domain's nodes are: `/local/domain/DOMID`.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn domain_path(&self, domid: u16) -> Result<String, StoreError> {
        let path = domid.to_string();
        let got = self.request(Kind::GetDomainPath, "domain path", 0, &path, &[])?;
        Ok(text(&got))
    }

    /// Tells the store of a domain (the toolstack's to do).
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn introduce(&self, domid: u16) -> Result<(), StoreError> {
        self.request(Kind::Introduce, "introduce", 0, &domid.to_string(), &[b"0\x001\0"]).map(drop)
    }

    /// Tells the store that a domain is gone (the toolstack's to do).
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn release(&self, domid: u16) -> Result<(), StoreError> {
        self.request(Kind::Release, "release", 0, &domid.to_string(), &[]).map(drop)
    }

    /// Whether the store knows the domain.
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
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn nonsense(&self, what: String) -> StoreError {
        StoreError::Nonsense { name: self.name.clone(), what }
    }

    /// One request whose payload is a path, its zero byte (for none, nothing), and `rest`.
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
        let req_id = link.next_req_id;
        link.next_req_id = req_id.wrapping_add(1);
        let mut bytes = Vec::with_capacity(wire::HEADER_LEN + payload.len());
        Message::new(kind, req_id, tx_id, payload).encode(&mut bytes);
        let answer = self.exchange(&mut link, &bytes, req_id)?;
        match answer.kind() {
            Some(Kind::Error) => {
                let error = Errno::from_wire(&answer.payload);
                Err(StoreError::Refused { what, path: path.into(), error })
            }
            Some(same) if same == kind => Ok(answer.payload),
            _ => Err(self.nonsense(format!("answer of kind {} to {kind:?}", answer.header.kind))),
        }
    }

    /// Sends a request and waits for its answer.
    fn exchange(&self, link: &mut Link, bytes: &[u8], req_id: u32) -> Result<Message, StoreError> {
        let deadline = Instant::now() + ANSWER_WAIT;
        self.send(link, bytes, deadline)?;
        loop {
            let mut found = None;
            // To the end of what came: an event behind the answer is to be noted now, for no one
            // will find the connection readable because of it.
            while let Some(answer) = self.next_answer(link)? {
                // Any other is late: its asker gave up.
                found = found.or((answer.header.req_id == req_id).then_some(answer));
            }
            if let Some(answer) = found {
                return Ok(answer);
            }
            if !self.receive(link)? {
                self.wait(Until::Readable, deadline)?;
            }
        }
    }

    fn send(&self, link: &mut Link, bytes: &[u8], deadline: Instant) -> Result<(), StoreError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let took = os::write(self.fd.as_fd(), rest).map_err(|error| {
                link.gone = true;
                match error.kind() {
                    std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset => {
                        StoreError::Gone(self.name.clone())
                    }
                    _ => StoreError::Os { name: self.name.clone(), what: "write", error },
                }
            })?;
            rest = &rest[took..];
            if took == 0 {
                let waited = self.wait(Until::Writable, deadline);
                if waited.is_err() && rest.len() < bytes.len() {
                    // Half a message is out; nothing sensible can follow it.
                    link.gone = true;
                }
                waited?;
            }
        }
        Ok(())
    }

    fn wait(&self, until: Until, deadline: Instant) -> Result<(), StoreError> {
        let name = || self.name.clone();
        match os::wait(self.fd.as_fd(), until, deadline) {
            Ok(true) => Ok(()),
            Ok(false) => Err(StoreError::Silent(name(), ANSWER_WAIT.as_secs())),
            Err(error) => Err(StoreError::Os { name: name(), what: "poll", error }),
        }
    }

    /// Reads once what is there; whether there was anything.
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

    /// The next message that is no event; events are noted on the way.
    fn next_answer(&self, link: &mut Link) -> Result<Option<Message>, StoreError> {
        loop {
            let message = match link.decoder.take() {
                Ok(Some(message)) => message,
                Ok(None) => return Ok(None),
                Err(wire::Oversized(len)) => {
                    link.gone = true;
                    return Err(self.nonsense(format!("a message of {len} bytes")));
                }
            };
            if message.kind() != Some(Kind::WatchEvent) {
                return Ok(Some(message));
            }
            self.note(link, &message.payload);
        }
    }

    /// Sets the bit of the watch an event is for. An event of a watch that is no more is nothing.
    fn note(&self, link: &mut Link, payload: &[u8]) {
        let Some([path, token, ..]) = wire::strings(payload).as_deref().map(|s| {
            [s.first().copied().unwrap_or_default(), s.get(1).copied().unwrap_or_default()]
        }) else {
            return;
        };
        let (path, token) = (String::from_utf8_lossy(path), String::from_utf8_lossy(token));
        let is_for = |w: &&mut Watch| w.token == token && wire::is_under(&path, &w.path);
        if let Some(watch) = link.watches.iter_mut().find(is_for) {
            watch.pending = true;
            os::signal(self.picked_up.as_fd());
        }
    }
}

impl AsFd for Store {
    /// Readable when [`events`](Store::events) has something to tell.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.either.as_fd()
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Store({})", self.name)
    }
}

/// A payload that is one string.
fn text(payload: &[u8]) -> String {
    String::from_utf8_lossy(payload.strip_suffix(&[0]).unwrap_or(payload)).into_owned()
}

/// `Ok(None)` for a node that is not there.
fn unless_missing<R>(got: Result<R, StoreError>) -> Result<Option<R>, StoreError> {
    match got {
        Ok(got) => Ok(Some(got)),
        Err(error) if error.errno() == Some(Errno::Enoent) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Transaction<'_> {
    /// See [`Store::read`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn read(&self, path: &str) -> Result<Option<String>, StoreError> {
        let got = unless_missing(self.request(Kind::Read, "read", path, &[]))?;
        Ok(got.map(|value| String::from_utf8_lossy(&value).into_owned()))
    }

    /// See [`Store::write`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn write(&self, path: &str, value: &str) -> Result<(), StoreError> {
        self.request(Kind::Write, "write", path, &[value.as_bytes()]).map(drop)
    }

    /// See [`Store::mkdir`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn mkdir(&self, path: &str) -> Result<(), StoreError> {
        self.request(Kind::Mkdir, "mkdir", path, &[]).map(drop)
    }

    /// See [`Store::rm`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn rm(&self, path: &str) -> Result<(), StoreError> {
        unless_missing(self.request(Kind::Rm, "rm", path, &[])).map(drop)
    }

    /// See [`Store::list`].
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

    /// The names below a node that has more of them than a message holds. Each part begins with
    /// the node's generation: when that changes, the parts do not fit together.
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

    /// See [`Store::perms`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn perms(&self, path: &str) -> Result<Vec<Perm>, StoreError> {
        let got = self.request(Kind::GetPerms, "perms", path, &[])?;
        let perms = wire::strings(&got).and_then(|s| s.into_iter().map(Perm::parse).collect());
        perms.ok_or_else(|| self.store.nonsense(format!("permissions {:?}", text(&got))))
    }

    /// See [`Store::set_perms`].
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
