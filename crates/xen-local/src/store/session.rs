//! State of one client: its requests, watches and transactions, and its unsent data.
//!
//! It takes and returns bytes; sockets are handled by `connection`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use os::StateFile;

use super::tree::{Change, Transaction, Tree, View};
use super::{Limits, Usage};
use xen_netif::store::wire::{
    self, Access, Decoder, Errno, Kind, Message, Oversized, PAYLOAD_MAX, Perm,
};

/// Maximum length of unsent replies, in bytes; beyond it, no requests are read from the client.
const UNSENT_MAX: usize = 64 * 1024;
/// Maximum number of pending events of a domain's clients; beyond it, events only name the watched
/// node, so that there is at most one more for each watch.
const PENDING_MAX: usize = 1024;

/// Cause of events.
pub enum Fired {
    /// A change of a node.
    Node(Change),
    /// A change of domains: `@introduceDomain` or `@releaseDomain`.
    Special(&'static str),
}

struct Watch {
    /// Absolute or special path.
    path: String,
    /// Where the path as given by the client begins in it.
    name_at: usize,
    token: Vec<u8>,
    /// The event that names its node is pending.
    is_pending: bool,
}

impl Watch {
    /// Path as given by the client.
    fn name(&self) -> &str {
        self.path.get(self.name_at..).unwrap_or_default()
    }
}

/// A pending event. Most of many are of the first kind, which takes no memory of its own.
enum Event {
    /// It names the node of this watch.
    Watch(u64),
    /// It names another node: its payload.
    Change(Arc<[u8]>),
}

/// State of one client.
pub struct Session {
    domid: u16,
    limits: Limits,
    decoder: Decoder,
    /// Bytes to be sent next.
    pub unsent: Vec<u8>,
    /// By number, in the order in which they were registered.
    watches: BTreeMap<u64, Watch>,
    next_watch: u64,
    /// Pending events, in order and without duplicates.
    pending: VecDeque<Event>,
    is_pending: BTreeSet<Arc<[u8]>>,
    transactions: BTreeMap<u32, Transaction>,
    next_transaction: u32,
}

/// The tree, and other effects of requests.
pub struct World<'a> {
    pub tree: &'a mut Tree,
    pub fired: &'a mut Vec<Fired>,
    pub released: &'a mut Vec<u16>,
    /// Where the tree is kept, and the number of changes that are in it.
    pub file: Option<&'a mut StateFile>,
    pub saved: usize,
}

impl World<'_> {
    /// Writes the tree down if it has changed: before the client that changed it has a reply.
    pub fn save(&mut self) {
        if let Some(file) = &mut self.file
            && self.fired.len() != self.saved
        {
            self.tree.save(file);
            self.saved = self.fired.len();
        }
    }
}

impl Session {
    pub fn new(domid: u16, limits: Limits) -> Self {
        Self {
            domid,
            limits,
            decoder: Decoder::default(),
            unsent: Vec::new(),
            watches: BTreeMap::new(),
            next_watch: 0,
            pending: VecDeque::new(),
            is_pending: BTreeSet::new(),
            transactions: BTreeMap::new(),
            next_transaction: 1,
        }
    }

    pub fn domid(&self) -> u16 {
        self.domid
    }

    /// Number of its watches.
    pub fn watches(&self) -> usize {
        self.watches.len()
    }

    /// Whether requests are read from the client: it reads its replies.
    pub fn accepts_input(&self) -> bool {
        self.unsent.len() < UNSENT_MAX
    }

    /// Adds bytes received from the client.
    pub fn push(&mut self, bytes: &[u8]) {
        self.decoder.push(bytes);
    }

    /// Serves the next complete request; false: there is none.
    pub fn serve_next(&mut self, world: &mut World<'_>) -> Result<bool, Oversized> {
        let message = self.decoder.take()?;
        if let Some(message) = &message {
            self.serve(message, world);
        }
        Ok(message.is_some())
    }

    /// Appends the next event to the unsent bytes; false: there is none.
    pub fn next_event(&mut self) -> bool {
        let Some(event) = self.pending.pop_front() else { return false };
        let payload = match event {
            Event::Change(payload) => {
                self.is_pending.remove(&payload);
                payload.to_vec()
            }
            Event::Watch(number) => {
                let Some(watch) = self.watches.get_mut(&number) else { return true };
                watch.is_pending = false;
                payload(watch.name(), &watch.token)
            }
        };
        Message::new(Kind::WatchEvent, 0, 0, payload).encode(&mut self.unsent);
        true
    }

    /// Resources that are subject to limits.
    pub fn usage(&self) -> Usage {
        let most =
            |of: fn(&Transaction) -> usize| self.transactions.values().map(of).max().unwrap_or(0);
        Usage {
            nodes: 0,
            watches: self.watches.len(),
            transactions: self.transactions.len(),
            touched: most(Transaction::touched),
            changed: most(Transaction::changed),
            events: self.pending.len(),
            unsent: self.unsent.len(),
            unread: self.decoder.unread(),
        }
    }

    // ---- events ----

    /// Number of its pending events.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Queues events of a change for matching watches. `elsewhere`: events pending for other
    /// clients of its domain.
    pub fn fire(&mut self, fired: &Fired, elsewhere: usize) {
        let (path, exact) = match fired {
            Fired::Node(change) if !self.may_read(change) => return,
            Fired::Node(change) => (change.path.as_str(), change.exact),
            Fired::Special(name) => (*name, true),
        };
        let matches = |w: &Watch| {
            if exact { w.path == path } else { wire::is_under(path, &w.path) }
        };
        let full = self.pending.len() + elsewhere >= PENDING_MAX;
        let home = self.home();
        for (number, watch) in self.watches.iter_mut().filter(|(_, watch)| matches(watch)) {
            let name = if watch.name().starts_with('/') {
                path
            } else {
                path.strip_prefix(home.as_str()).map_or(path, |p| p.trim_start_matches('/'))
            };
            if full || exact || name == watch.name() {
                if !std::mem::replace(&mut watch.is_pending, true) {
                    self.pending.push_back(Event::Watch(*number));
                }
                continue;
            }
            let payload: Arc<[u8]> = payload(name, &watch.token).into();
            if self.is_pending.insert(Arc::clone(&payload)) {
                self.pending.push_back(Event::Change(payload));
            }
        }
    }

    fn may_read(&self, change: &Change) -> bool {
        change.readers.iter().any(|perms| perms.access(self.domid).reads())
    }

    // ---- requests ----

    fn serve(&mut self, message: &Message, world: &mut World<'_>) {
        let header = message.header;
        let watch_before = self.next_watch;
        let done = match message.kind() {
            Some(kind) => self.request(kind, header.tx_id, &message.payload, world),
            None => Err(Errno::Enosys),
        };
        let too_long = |payload: &Vec<u8>| payload.len() > PAYLOAD_MAX;
        let done = match done {
            Ok(payload) if too_long(&payload) => Err(Errno::E2big),
            done => done,
        };
        let (kind, payload) = match done {
            Ok(payload) => (header.kind, payload),
            Err(error) => (Kind::Error.to_wire(), format!("{error}\0").into_bytes()),
        };
        let len = u32::try_from(payload.len()).unwrap_or(0);
        let header = wire::Header { kind, len, ..header };
        Message { header, payload }.encode(&mut self.unsent);
        // A new watch fires once, after the reply.
        if self.next_watch > watch_before
            && let Some(watch) = self.watches.get_mut(&watch_before)
        {
            watch.is_pending = true;
            self.pending.push_back(Event::Watch(watch_before));
        }
    }

    fn request(
        &mut self,
        kind: Kind,
        tx_id: u32,
        payload: &[u8],
        world: &mut World<'_>,
    ) -> Result<Vec<u8>, Errno> {
        if tx_id != 0 && !self.transactions.contains_key(&tx_id) {
            return Err(Errno::Enoent);
        }
        match kind {
            Kind::Directory
            | Kind::DirectoryPart
            | Kind::Read
            | Kind::GetPerms
            | Kind::Write
            | Kind::Mkdir
            | Kind::Rm
            | Kind::SetPerms => self.node(kind, tx_id, payload, world),
            Kind::Watch => self.watch(payload),
            Kind::Unwatch => self.unwatch(payload),
            Kind::ResetWatches => {
                self.watches.clear();
                self.transactions.clear();
                self.pending.clear();
                self.is_pending.clear();
                Ok(b"OK\0".to_vec())
            }
            Kind::TransactionStart => self.begin(tx_id),
            Kind::TransactionEnd => self.end(tx_id, payload, world),
            Kind::GetDomainPath => {
                Ok(format!("/local/domain/{}\0", number(&one(payload)?)?).into_bytes())
            }
            Kind::Introduce | Kind::Release | Kind::IsDomainIntroduced | Kind::Resume => {
                self.domain(kind, payload, world)
            }
            Kind::Control | Kind::SetTarget | Kind::WatchEvent | Kind::Error => Err(Errno::Enosys),
        }
    }

    /// Runs a request about one node.
    fn node(
        &mut self,
        kind: Kind,
        tx_id: u32,
        payload: &[u8],
        world: &mut World<'_>,
    ) -> Result<Vec<u8>, Errno> {
        let zero = payload.iter().position(|b| *b == 0).ok_or(Errno::Einval)?;
        let (path, rest) = (self.path(&payload[..zero])?, &payload[zero + 1..]);
        if tx_id != 0 {
            let transaction = self.transactions.get_mut(&tx_id).ok_or(Errno::Enoent)?;
            let (domid, limits) = (self.domid, self.limits);
            return node(
                &mut View { tree: world.tree, transaction, domid, limits },
                kind,
                &path,
                rest,
            );
        }
        let (domid, limits) = (self.domid, self.limits);
        // Without a transaction, the number of nodes is not limited: a removal may touch many.
        let limits = Limits { touched: usize::MAX, ..limits };
        let mut transaction = Transaction::default();
        let mut view = View { tree: world.tree, transaction: &mut transaction, domid, limits };
        let done = node(&mut view, kind, &path, rest)?;
        let changes = world.tree.commit(transaction, domid, limits)?;
        world.fired.extend(changes.into_iter().map(Fired::Node));
        Ok(done)
    }

    fn begin(&mut self, tx_id: u32) -> Result<Vec<u8>, Errno> {
        if tx_id != 0 {
            return Err(Errno::Ebusy);
        }
        if self.domid != 0 && self.transactions.len() >= self.limits.transactions {
            return Err(Errno::Enospc);
        }
        let mut id = self.next_transaction;
        while id == 0 || self.transactions.contains_key(&id) {
            id = id.wrapping_add(1);
        }
        self.next_transaction = id.wrapping_add(1);
        self.transactions.insert(id, Transaction::default());
        Ok(format!("{id}\0").into_bytes())
    }

    fn end(&mut self, tx_id: u32, payload: &[u8], world: &mut World<'_>) -> Result<Vec<u8>, Errno> {
        let commit = match payload {
            b"T\0" => true,
            b"F\0" => false,
            _ => return Err(Errno::Einval),
        };
        let transaction = self.transactions.remove(&tx_id).ok_or(Errno::Enoent)?;
        if commit {
            let changes = world.tree.commit(transaction, self.domid, self.limits)?;
            world.fired.extend(changes.into_iter().map(Fired::Node));
        }
        Ok(b"OK\0".to_vec())
    }

    fn watch(&mut self, payload: &[u8]) -> Result<Vec<u8>, Errno> {
        let (path, name_at, token) = self.parse_watch(payload)?;
        if self.watches.values().any(|w| w.path == path && w.token == token) {
            return Err(Errno::Eexist);
        }
        if self.domid != 0 && self.watches.len() >= self.limits.watches {
            return Err(Errno::E2big);
        }
        let watch = Watch { path, name_at, token, is_pending: false };
        self.watches.insert(self.next_watch, watch);
        self.next_watch += 1;
        Ok(b"OK\0".to_vec())
    }

    fn unwatch(&mut self, payload: &[u8]) -> Result<Vec<u8>, Errno> {
        let (path, _, token) = self.parse_watch(payload)?;
        let is_it = |(_, w): &(&u64, &Watch)| w.path == path && w.token == token;
        let number = *self.watches.iter().find(is_it).ok_or(Errno::Enoent)?.0;
        if self.watches.remove(&number).is_some_and(|watch| watch.is_pending) {
            self.pending.retain(|event| !matches!(event, Event::Watch(n) if *n == number));
        }
        Ok(b"OK\0".to_vec())
    }

    /// Parses a watch: its absolute path, where its path as given begins in it, and its token.
    fn parse_watch(&self, payload: &[u8]) -> Result<(String, usize, Vec<u8>), Errno> {
        let strings = wire::strings(payload).ok_or(Errno::Einval)?;
        let [name, token] = strings[..] else { return Err(Errno::Einval) };
        let special = [b"@introduceDomain".as_slice(), b"@releaseDomain"].contains(&name);
        let path = if special { text(name)? } else { self.path(name)? };
        // Events contain both.
        if name.len() + token.len() + 2 > PAYLOAD_MAX - wire::ABS_PATH_MAX {
            return Err(Errno::E2big);
        }
        let name_at = path.len() - name.len();
        Ok((path, name_at, token.to_vec()))
    }

    /// Runs a toolstack's request; reserved for domain 0.
    fn domain(
        &mut self,
        kind: Kind,
        payload: &[u8],
        world: &mut World<'_>,
    ) -> Result<Vec<u8>, Errno> {
        if self.domid != 0 {
            return Err(Errno::Eacces);
        }
        let strings = wire::strings(payload).ok_or(Errno::Einval)?;
        let domid = number(strings.first().ok_or(Errno::Einval)?)?;
        match kind {
            Kind::IsDomainIntroduced => {
                let known = domid == 0 || world.tree.is_introduced(domid);
                return Ok(if known { b"T\0".to_vec() } else { b"F\0".to_vec() });
            }
            Kind::Introduce => {
                if domid == 0 || strings.len() != 3 {
                    return Err(Errno::Einval);
                }
                if world.tree.introduce(domid) {
                    world.fired.push(Fired::Special("@introduceDomain"));
                }
            }
            _ if !world.tree.is_introduced(domid) => return Err(Errno::Enoent),
            Kind::Release => {
                world.released.push(domid);
                world.fired.push(Fired::Special("@releaseDomain"));
            }
            // Suspend and resume have no effect here.
            _ => {}
        }
        Ok(b"OK\0".to_vec())
    }

    fn home(&self) -> String {
        format!("/local/domain/{}", self.domid)
    }

    /// The absolute path of a path given by a client.
    fn path(&self, name: &[u8]) -> Result<String, Errno> {
        let path = if name.starts_with(b"/") {
            text(name)?
        } else if name.len() > wire::REL_PATH_MAX {
            return Err(Errno::Einval);
        } else if name.is_empty() {
            self.home()
        } else {
            format!("{}/{}", self.home(), text(name)?)
        };
        if wire::is_node(path.as_bytes()) { Ok(path) } else { Err(Errno::Einval) }
    }
}

/// Payload of an event.
fn payload(path: &str, token: &[u8]) -> Vec<u8> {
    [path.as_bytes(), &[0], token, &[0]].concat()
}

fn text(bytes: &[u8]) -> Result<String, Errno> {
    String::from_utf8(bytes.to_vec()).map_err(|_| Errno::Einval)
}

/// A payload of one string.
fn one(payload: &[u8]) -> Result<Vec<u8>, Errno> {
    let strings = wire::strings(payload).ok_or(Errno::Einval)?;
    strings.first().map(|s| s.to_vec()).ok_or(Errno::Einval)
}

fn number(digits: &[u8]) -> Result<u16, Errno> {
    let digits = std::str::from_utf8(digits).map_err(|_| Errno::Einval)?;
    digits.parse().map_err(|_| Errno::Einval)
}

/// Runs a request about one node.
fn node(view: &mut View<'_>, kind: Kind, path: &str, rest: &[u8]) -> Result<Vec<u8>, Errno> {
    let done = match kind {
        Kind::Read => return Ok(view.get(path, Access::Read)?.value.clone()),
        Kind::Directory => {
            let node = view.get(path, Access::Read)?;
            return Ok(node
                .children
                .iter()
                .flat_map(|n| [n.as_bytes(), &[0]])
                .flatten()
                .copied()
                .collect());
        }
        Kind::DirectoryPart => return directory_part(view, path, rest),
        Kind::GetPerms => {
            let node = view.get(path, Access::Read)?;
            return Ok(node.perms.iter().flat_map(|p| format!("{p}\0").into_bytes()).collect());
        }
        Kind::Write => view.write(path, rest),
        Kind::Mkdir => view.mkdir(path),
        Kind::Rm => view.rm(path),
        _ => {
            let perms = wire::strings(rest).ok_or(Errno::Einval)?;
            let perms: Option<Vec<Perm>> = perms.into_iter().map(Perm::parse).collect();
            view.set_perms(path, perms.ok_or(Errno::Einval)?)
        }
    };
    done.map(|()| b"OK\0".to_vec())
}

/// As many names from an offset on as fit, after the node's generation; an empty name ends them.
fn directory_part(view: &mut View<'_>, path: &str, rest: &[u8]) -> Result<Vec<u8>, Errno> {
    let offset = std::str::from_utf8(&one(rest)?).ok().and_then(|o| o.parse::<usize>().ok());
    let mut offset = offset.ok_or(Errno::Einval)?;
    let node = view.get(path, Access::Read)?;
    let mut part = format!("{}\0", node.generation).into_bytes();
    let mut names = node.children.iter().peekable();
    while let Some(name) = names.peek() {
        let len = name.len() + 1;
        if offset > 0 {
            offset = offset.checked_sub(len).ok_or(Errno::Einval)?;
        } else if part.len() + len + 1 > PAYLOAD_MAX {
            return Ok(part);
        } else {
            part.extend_from_slice(name.as_bytes());
            part.push(0);
        }
        names.next();
    }
    part.push(0);
    Ok(part)
}
