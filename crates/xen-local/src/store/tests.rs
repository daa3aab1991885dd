mod service;

use super::*;
use os::{Received, Until};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};
use xen_netif::store::wire::{Decoder, Errno, Header, Kind, Message};

const PATIENCE: Duration = Duration::from_secs(10);

fn server() -> Server {
    Server::start(Limits::XENSTORED).unwrap()
}

/// Dom0, and a guest with its own directory.
fn pair(server: &Server) -> (Store, Store) {
    let (dom0, guest) = (server.connect(0).unwrap(), server.connect(1).unwrap());
    dom0.mkdir("/local/domain/1").unwrap();
    dom0.set_perms("/local/domain/1", &[Perm::new(Access::None, 1)]).unwrap();
    (dom0, guest)
}

fn refused<R: std::fmt::Debug>(got: Result<R, StoreError>) -> Option<Errno> {
    got.unwrap_err().errno()
}

/// Waits for events of a store.
fn wait_events(store: &Store) -> Vec<(String, String)> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        assert!(os::wait(store.as_fd(), Until::Readable, deadline).unwrap(), "no event");
        let events = store.events().unwrap();
        if !events.is_empty() {
            return events;
        }
    }
}

/// A client that sends arbitrary messages.
struct Raw(OwnedFd, Decoder);

impl Raw {
    fn new(server: &Server, domid: u16) -> Self {
        let (ours, theirs) = os::socketpair().unwrap();
        server.shared.command(Command::Serve(theirs, domid));
        Self(ours, Decoder::default())
    }

    fn send(&self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            rest = &rest[os::write(self.0.as_fd(), rest).unwrap_or(rest.len())..];
        }
    }

    fn ask(&mut self, kind: u32, tx_id: u32, payload: &[u8]) -> Message {
        let header = Header { kind, req_id: 77, tx_id, len: payload.len() as u32 };
        self.send(&[&header.to_bytes(), payload].concat());
        self.receive().expect("a reply")
    }

    /// The next message; `None` if the server closed the connection.
    fn receive(&mut self) -> Option<Message> {
        loop {
            if let Some(message) = self.1.take().unwrap() {
                return Some(message);
            }
            let fd: BorrowedFd<'_> = self.0.as_fd();
            assert!(os::wait(fd, Until::Readable, Instant::now() + PATIENCE).unwrap());
            let mut buf = [0; 4096];
            match os::read(fd, &mut buf).unwrap() {
                Received::Bytes(n) => self.1.push(&buf[..n]),
                Received::Closed => return None,
                _ => {}
            }
        }
    }

    fn error(&mut self, kind: Kind, payload: &[u8]) -> Option<Errno> {
        let reply = self.ask(kind.to_wire(), 0, payload);
        assert_eq!(reply.header.req_id, 77);
        (reply.kind() == Some(Kind::Error)).then(|| Errno::from_wire(&reply.payload))
    }
}

#[test]
fn nodes_are_written_read_listed_and_removed() {
    let server = server();
    let store = server.connect(0).unwrap();
    store.write("/a/b/c", "1").unwrap();
    store.write("relative", "2").unwrap();
    assert_eq!(store.read("/a/b/c").unwrap().as_deref(), Some("1"));
    assert_eq!(store.read("/local/domain/0/relative").unwrap().as_deref(), Some("2"));
    assert_eq!(store.read("/a/b").unwrap().as_deref(), Some(""));
    assert_eq!(store.list("/").unwrap(), ["a", "local"]);
    store.rm("/a/b").unwrap();
    store.rm("/a/b").unwrap();
    assert_eq!(store.read("/a/b/c").unwrap(), None);
    assert!(store.list("/a").unwrap().is_empty());
    assert_eq!(refused(store.rm("/")), Some(Errno::Einval));
    assert_eq!(store.domain_path(7).unwrap(), "/local/domain/7");
}

#[test]
fn a_directory_longer_than_a_message_is_listed_in_parts() {
    let server = server();
    let store = server.connect(0).unwrap();
    let names: Vec<String> = (0..900).map(|i| format!("name-{i:04}")).collect();
    names.iter().for_each(|name| store.mkdir(&format!("/dir/{name}")).unwrap());
    assert_eq!(store.list("/dir").unwrap(), names);
}

#[test]
fn a_guest_stays_within_its_permissions() {
    let server = server();
    let (dom0, guest) = pair(&server);
    dom0.write("/secret/key", "x").unwrap();
    dom0.set_perms("/secret", &[Perm::new(Access::None, 0)]).unwrap();
    dom0.set_perms("/secret/key", &[Perm::new(Access::None, 0)]).unwrap();
    dom0.write("/open", "y").unwrap();
    assert_eq!(refused(guest.read("/secret/key")), Some(Errno::Eacces));
    assert_eq!(refused(guest.read("/secret/nothing")), Some(Errno::Eacces));
    assert_eq!(refused(guest.list("/secret")), Some(Errno::Eacces));
    assert_eq!(guest.read("/open").unwrap().as_deref(), Some("y"));
    assert_eq!(refused(guest.write("/open", "z")), Some(Errno::Eacces));
    assert_eq!(refused(guest.rm("/open")), Some(Errno::Eacces));
    assert_eq!(refused(guest.mkdir("/mine")), Some(Errno::Eacces));
    assert_eq!(
        refused(guest.set_perms("/open", &[Perm::new(Access::Both, 1)])),
        Some(Errno::Eacces)
    );
    guest.write("data/x", "1").unwrap();
    let perms = guest.perms("/local/domain/1/data/x").unwrap();
    assert_eq!(perms, [Perm::new(Access::None, 1)]);
    let away = [Perm::new(Access::None, 2)];
    assert_eq!(refused(guest.set_perms("data/x", &away)), Some(Errno::Eperm));
    let other = server.connect(2).unwrap();
    assert_eq!(refused(other.read("/local/domain/1/data/x")), Some(Errno::Eacces));
    guest.set_perms("data/x", &[Perm::new(Access::None, 1), Perm::new(Access::Read, 2)]).unwrap();
    assert_eq!(other.read("/local/domain/1/data/x").unwrap().as_deref(), Some("1"));
    assert_eq!(refused(other.write("/local/domain/1/data/x", "")), Some(Errno::Eacces));
    for toolstack in [guest.introduce(5), guest.release(1)] {
        assert_eq!(refused(toolstack), Some(Errno::Eacces));
    }
}

#[test]
fn a_refused_permission_says_what_to_check() {
    let server = server();
    let (_dom0, guest) = pair(&server);
    let text = guest.write("/local/domain/0/x", "1").unwrap_err().to_string();
    assert!(text.contains("/local/domain/0/x") && text.contains("another domain"), "{text}");
}

#[test]
fn invalid_paths_are_rejected() {
    let server = server();
    let mut raw = Raw::new(&server, 1);
    let long = format!("/{}\0", "a".repeat(3072));
    for path in ["../0/x\0", "/a/../b\0", "/a//b\0", "/a/\0", "a b\0", "/\u{e9}\0", "/a", &long] {
        assert_eq!(raw.error(Kind::Read, path.as_bytes()), Some(Errno::Einval), "{path:?}");
        let write = [path.as_bytes(), b"x"].concat();
        assert!(raw.error(Kind::Write, &write).is_some(), "{path:?}");
    }
    assert_eq!(raw.error(Kind::Read, b"/\xff\0"), Some(Errno::Einval));
}

#[test]
fn conflicting_transactions_are_repeated() {
    let server = server();
    let (a, b) = (server.connect(0).unwrap(), server.connect(0).unwrap());
    a.write("/n", "0").unwrap();
    let mut rounds = 0;
    a.transaction(|t| {
        rounds += 1;
        let n: u32 = t.read("/n")?.unwrap_or_default().parse().unwrap();
        if rounds == 1 {
            b.write("/n", "5").unwrap();
        }
        t.write("/n", &(n + 1).to_string())
    })
    .unwrap();
    assert_eq!((rounds, b.read("/n").unwrap().as_deref()), (2, Some("6")));
    let always = a.transaction(|t| {
        let n = t.read("/n")?;
        b.write("/n", &format!("{}0", n.unwrap_or_default())).unwrap();
        t.write("/n", "1")
    });
    assert!(matches!(always, Err(StoreError::Conflict { .. })));
}

#[test]
fn a_transaction_is_visible_completely_or_not_at_all() {
    let server = server();
    let (a, b) = (server.connect(0).unwrap(), server.connect(0).unwrap());
    a.transaction(|t| {
        t.write("/x/1", "a")?;
        t.write("/x/2", "b")?;
        assert_eq!(t.list("/x")?, ["1", "2"]);
        assert_eq!(b.read("/x/1")?, None);
        Ok(())
    })
    .unwrap();
    assert_eq!(b.list("/x").unwrap(), ["1", "2"]);
    let dropped: Result<(), _> = a.transaction(|t| {
        t.rm("/x")?;
        assert_eq!(t.read("/x/1")?, None);
        t.read("/not a path").map(drop)
    });
    assert_eq!(refused(dropped), Some(Errno::Einval));
    assert_eq!(b.list("/x").unwrap(), ["1", "2"]);
}

#[test]
fn repeated_changes_in_a_transaction_take_no_memory_and_notify_first_readers() {
    let mut store = Exchange::new(Limits::XENSTORED);
    let clients = [0, 1, 2, 3].map(|domid| store.connect(domid));
    let mut ask = |client: usize, kind: Kind, tx_id: u32, payload: &str| {
        let mut bytes = Vec::new();
        Message::new(kind, 9, tx_id, payload.into()).encode(&mut bytes);
        assert!(store.send(clients[client], &bytes));
        (store.receive(clients[client]), store.usage(clients[client]))
    };
    ask(0, Kind::Write, 0, "/local/domain/1\0");
    ask(0, Kind::SetPerms, 0, "/local/domain/1\0n1\0");
    ask(1, Kind::Write, 0, "x\0before");
    ask(1, Kind::SetPerms, 0, "x\0n1\0r2\0");
    for watcher in [2, 3] {
        ask(watcher, Kind::Watch, 0, "/local/domain/1/x\0t\0");
    }
    ask(1, Kind::TransactionStart, 0, "\0");
    // The third client may read it only in between, which is never visible.
    for (value, perms) in [("a", "n1\0r3\0"), ("b", "r1\0"), ("c", "n1\0")] {
        for _ in 0..1000 {
            ask(1, Kind::Write, 1, &format!("x\0{value}"));
            let (_, usage) = ask(1, Kind::SetPerms, 1, &format!("x\0{perms}"));
            assert_eq!((usage.transactions, usage.changed), (1, 1));
        }
    }
    assert!(ask(1, Kind::TransactionEnd, 1, "T\0").0.ends_with(b"OK\0"));
    let events = [2, 3].map(|watcher| {
        let (received, _) = ask(watcher, Kind::GetDomainPath, 0, "1\0");
        received.windows(5).filter(|w| w == b"/x\0t\0").count()
    });
    assert_eq!(events, [1, 0]);
}

#[test]
fn watches_report_changes_below_a_node_once() {
    let server = server();
    let (dom0, watcher) = (server.connect(0).unwrap(), server.connect(0).unwrap());
    watcher.watch("/w", "t").unwrap();
    watcher.watch("@releaseDomain", "gone").unwrap();
    let mut first = wait_events(&watcher);
    while first.len() < 2 {
        first.extend(wait_events(&watcher));
    }
    for _ in 0..100 {
        dom0.write("/w/a", "1").unwrap();
        dom0.write("/elsewhere", "1").unwrap();
    }
    // A request receives the events; the descriptor is still readable.
    watcher.read("/w/a").unwrap();
    assert_eq!(wait_events(&watcher), [("/w".to_string(), "t".to_string())]);
    dom0.introduce(9).unwrap();
    assert!(dom0.is_introduced(9).unwrap());
    dom0.release(9).unwrap();
    assert_eq!(wait_events(&watcher), [("@releaseDomain".to_string(), "gone".to_string())]);
    watcher.unwatch("/w", "t").unwrap();
    dom0.rm("/w").unwrap();
    watcher.read("/w").unwrap();
    assert!(watcher.events().unwrap().is_empty());
    assert_eq!(refused(watcher.unwatch("/w", "t")), Some(Errno::Enoent));
}

#[test]
fn removing_a_tree_fires_watches_inside_it() {
    let server = server();
    let (dom0, watcher) = (server.connect(0).unwrap(), server.connect(0).unwrap());
    dom0.write("/t/a/state", "1").unwrap();
    watcher.watch("/t/a/state", "s").unwrap();
    wait_events(&watcher);
    dom0.rm("/t").unwrap();
    assert_eq!(wait_events(&watcher), [("/t/a/state".to_string(), "s".to_string())]);
}

#[test]
fn changes_of_unreadable_nodes_are_not_reported() {
    let server = server();
    let (dom0, guest) = pair(&server);
    dom0.set_perms("/", &[Perm::new(Access::None, 0)]).unwrap();
    dom0.write("/hidden", "1").unwrap();
    guest.watch("/hidden", "h").unwrap();
    guest.watch("mine", "m").unwrap();
    let mut first = wait_events(&guest);
    while first.len() < 2 {
        first.extend(wait_events(&guest));
    }
    dom0.write("/hidden", "2").unwrap();
    guest.write("mine", "1").unwrap();
    assert_eq!(wait_events(&guest), [("mine".to_string(), "m".to_string())]);
}

#[test]
fn quotas_hold_for_guests() {
    let server = server();
    let (dom0, guest) = pair(&server);
    let full = (0..2000).find_map(|i| guest.mkdir(&format!("n{i}")).err());
    assert_eq!(full.and_then(|e| e.errno()), Some(Errno::Enospc));
    // Also in a transaction.
    let more = guest.transaction(|t| (0..50).try_for_each(|i| t.mkdir(&format!("m{i}"))));
    assert_eq!(refused(more), Some(Errno::Enospc));
    guest.rm("n0").unwrap();
    guest.mkdir("again").unwrap();
    assert_eq!(refused(guest.write("again", &"x".repeat(2049))), Some(Errno::Enospc));
    let many = [Perm::new(Access::None, 1); 6];
    assert_eq!(refused(guest.set_perms("again", &many)), Some(Errno::Enospc));
    let watches = (0..200).find_map(|i| guest.watch("again", &i.to_string()).err());
    assert_eq!(watches.and_then(|e| e.errno()), Some(Errno::E2big));
    let mut raw = Raw::new(&server, 1);
    let begun = (0..20).find_map(|_| raw.error(Kind::TransactionStart, b"\0"));
    assert_eq!(begun, Some(Errno::Enospc));
    // Domain 0 has no quotas, and all nodes are removed with the domain.
    dom0.introduce(1).unwrap();
    dom0.release(1).unwrap();
    assert_eq!(dom0.read("/local/domain/1").unwrap(), None);
}

#[test]
fn invalid_messages() {
    let server = server();
    let store = server.connect(0).unwrap();
    for kind in [20, 23, 0, 15, 16, 0xffff, u32::MAX] {
        let mut raw = Raw::new(&server, 1);
        let reply = raw.ask(kind, 0, b"/\0");
        assert_eq!(reply.kind(), Some(Kind::Error), "{kind}");
        assert_eq!(Errno::from_wire(&reply.payload), Errno::Enosys, "{kind}");
    }
    let mut raw = Raw::new(&server, 1);
    for kind in Kind::ALL {
        for payload in [&b""[..], b"\0", b"\0\0\0", b"x", &[0xff; 4096]] {
            let reply = raw.ask(kind.to_wire(), 0, payload);
            assert!(reply.kind().is_some(), "{kind:?}");
            let missing = raw.ask(kind.to_wire(), 0xdead, payload);
            assert_eq!(missing.kind(), Some(Kind::Error), "{kind:?}");
            // Watches on odd paths may have been registered; their events are not replies.
            raw.ask(Kind::ResetWatches.to_wire(), 0, b"\0");
        }
    }
    let mut oversized = Raw::new(&server, 1);
    oversized.send(&Header { kind: 2, req_id: 1, tx_id: 0, len: 4097 }.to_bytes());
    assert_eq!(oversized.receive(), None, "closed");
    let truncated = Raw::new(&server, 1);
    truncated.send(&Header { kind: 2, req_id: 1, tx_id: 0, len: 9 }.to_bytes()[..11]);
    drop(truncated);
    store.write("/alive", "1").unwrap();
}

#[test]
fn no_requests_are_read_from_a_client_that_reads_no_replies() {
    let server = server();
    let store = server.connect(0).unwrap();
    store.write("/big", &"x".repeat(4000)).unwrap();
    let raw = Raw::new(&server, 1);
    let header = Header { kind: Kind::Read.to_wire(), req_id: 1, tx_id: 0, len: 5 };
    let request = [&header.to_bytes()[..], b"/big\0"].concat();
    let end = Instant::now() + Duration::from_millis(300);
    let mut sent = 0;
    while Instant::now() < end {
        sent += os::write(raw.0.as_fd(), &request).unwrap();
    }
    // Each reply is 200 times as long as its request; only as many are accepted as the sockets
    // hold.
    assert!(sent < 2 << 20, "{sent} bytes of requests were taken");
    store.write("/alive", "1").unwrap();
}

#[test]
fn unread_events_are_limited() {
    let server = server();
    let dom0 = server.connect(0).unwrap();
    let mut lazy = Raw::new(&server, 1);
    assert_eq!(lazy.error(Kind::Watch, b"/f\0t\0"), None);
    for i in 0..1000 {
        dom0.write(&format!("/f/{}", "n".repeat(200 + i % 50)), "").unwrap();
        dom0.write(&format!("/f/{i}{}", "n".repeat(200)), "").unwrap();
    }
    lazy.send(&Header { kind: 10, req_id: 5, tx_id: 0, len: 2 }.to_bytes());
    lazy.send(b"1\0");
    let (mut events, mut last) = (0, Vec::new());
    while let Some(message) = lazy.receive() {
        if message.kind() == Some(Kind::GetDomainPath) {
            break;
        }
        events += 1;
        last = message.payload;
    }
    assert!((1..2000).contains(&events), "{events} events for 2000 changes");
    assert!(!last.is_empty());
}

/// A client and its connection, which no server serves.
struct Alone {
    ours: OwnedFd,
    connection: Connection,
}

impl Alone {
    fn new(domid: u16) -> Self {
        let (ours, theirs) = os::socketpair().unwrap();
        Self { ours, connection: Connection::new(theirs, domid, true, Limits::XENSTORED) }
    }

    /// Sends a request and has it served; returns what it changed.
    fn request(&mut self, tree: &mut Tree, kind: Kind, payload: &str) -> Vec<Fired> {
        let len = payload.len() as u32;
        let header = Header { kind: kind.to_wire(), req_id: 1, tx_id: 0, len };
        let bytes = [&header.to_bytes()[..], payload.as_bytes()].concat();
        os::write(self.ours.as_fd(), &bytes).unwrap();
        let (mut fired, released) = (Vec::new(), &mut Vec::new());
        let mut world = World { tree, fired: &mut fired, released, file: None, saved: 0 };
        assert!(self.connection.serve(&mut world, true));
        fired
    }
}

/// No client reads its events: all of a domain together have a limited number, and one more for
/// each watch.
#[test]
fn unread_events_of_all_clients_of_a_domain_are_limited_together() {
    const CLIENTS: u64 = 20;
    let mut tree = Tree::new(&[Perm::new(Access::Read, 0)]);
    let mut dom0 = Alone::new(0);
    let (mut peers, mut clients) = (Vec::new(), BTreeMap::new());
    for tag in 0..CLIENTS {
        let mut client = Alone::new(1);
        client.request(&mut tree, Kind::Watch, "/f\0t\0");
        peers.push(client.ours);
        clients.insert(tag, client.connection);
    }
    for n in 0..2000 {
        let fired = dom0.request(&mut tree, Kind::Write, &format!("/f/{n}\0"));
        Raw(dom0.ours.try_clone().unwrap(), Decoder::default()).receive().expect("a reply");
        for tag in 0..CLIENTS {
            for change in &fired {
                let elsewhere = pending_elsewhere(&clients, tag);
                clients.get_mut(&tag).unwrap().fire(change, elsewhere);
            }
        }
    }
    let all: usize = clients.values().map(Connection::pending).sum();
    assert!((1000..=1024 + CLIENTS as usize).contains(&all), "{all} events");
}

#[test]
fn the_end_of_a_server_is_reported_and_removes_its_socket() {
    let dir = std::env::temp_dir().join(format!("pvswitch-store-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("xenstored");
    let server = server();
    server.listen(&path, 0, &os::Permissions::OWNER).unwrap();
    let text = self::server().listen(&path, 0, &os::Permissions::OWNER).unwrap_err().to_string();
    assert!(text.contains("this process listens there already"), "{text}");
    let store = Store::connect(&path).unwrap();
    store.write("/a", "1").unwrap();
    drop(server);
    assert!(!path.exists());
    assert!(store.read("/a").unwrap_err().is_gone());
    assert!(matches!(store.events(), Err(StoreError::Gone(_))));
    let text = Store::connect(&path).unwrap_err().to_string();
    assert!(text.contains("no process listens there; start the other side first"), "{text}");
    let text = Store::device(&path).unwrap_err().to_string();
    assert!(text.contains("modprobe xenfs"), "{text}");
    std::fs::remove_dir_all(dir).unwrap();
}

#[test]
fn an_abandoned_connection_is_reported_to_waiting_threads() {
    let (ours, theirs) = os::socketpair().unwrap();
    let store = Store::over(ours, "invalid".into()).unwrap();
    assert!(store.events().unwrap().is_empty());
    let header = Header { kind: 2, req_id: 1, tx_id: 0, len: 4097 };
    assert_eq!(os::write(theirs.as_fd(), &header.to_bytes()).unwrap(), 16);
    assert!(store.read("x").is_err());
    // The other end is open, but sends nothing more.
    assert!(matches!(store.events(), Err(StoreError::Gone(_))));
    assert!(matches!(store.read("x"), Err(StoreError::Gone(_))));
    drop(theirs);
}
