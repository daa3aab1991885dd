//! Arbitrary messages of guests to our store, and of a store to our client.
//!
//! ```text
//!   mode 0: records   (guest  type  transaction  length  payload)...   into an Exchange
//!   mode 1: raw bytes, of a guest                                      into an Exchange
//!   mode 2: raw bytes, of anyone                                       into a Decoder
//!   mode 3: pieces    (length  bytes)..., of a store                   into a Store, its client
//! ```
//! Two guests send, each with its own directory; a third has one that they may not read. No guest
//! exceeds a limit, each request is answered once and in order, and the third guest's data is never
//! sent to them. Every request of the client ends: the store sends pieces until one is a reply, or
//! disconnects.

use std::collections::{BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};

use xen_local::store::{Exchange, Limits, Usage};
use xen_netif::store::wire::{self, Decoder, HEADER_LEN, Header, Kind, Message, PAYLOAD_MAX};
use xen_netif::store::{Errno, Perm, Store};

use crate::Bytes;

/// Low limits, to be reached.
const LIMITS: Limits = Limits {
    nodes: 12,
    watches: 4,
    transactions: 3,
    touched: 16,
    value_len: 64,
    perms: 3,
    connections: 8,
    // Of the server's thread, which is not part of the protocol.
    cpu_per_mille: 1000,
};
/// Unsent bytes of a session (see its source): replies, and the longest of them.
const UNSENT_MAX: usize = 64 * 1024 + HEADER_LEN + PAYLOAD_MAX;
/// Pending events, and those of watches alone.
const EVENTS_MAX: usize = 1024 + 2 * LIMITS.watches;
/// Bytes sent at once.
const CHUNK: usize = 1024;
/// Bit of a record: the guest does not read its replies afterwards.
const UNREAD: u8 = 0x80;

/// Events of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Requests that were granted.
    pub granted: usize,
    /// Names of the errors in replies.
    pub errors: BTreeSet<&'static str>,
    /// Watch events received.
    pub events: usize,
    /// Connections closed because of an error.
    pub closed: usize,
    /// Valid messages of the store to the client.
    pub decoded: usize,
    /// Requests of the client with a reply.
    pub answered: usize,
}

/// Must not fail for any bytes.
pub fn run(data: &[u8]) {
    explore(data);
}

/// As [`run`]; returns what happened.
pub fn explore(data: &[u8]) -> Seen {
    let mut bytes = Bytes(data);
    match bytes.u8() % 4 {
        0 => records(bytes),
        1 => raw(bytes.0),
        2 => decode(bytes.0),
        _ => Seen { answered: ask(bytes), ..Seen::default() },
    }
}

/// State of a guest in the test.
struct Guest {
    client: usize,
    decoder: Decoder,
    /// Requests without a reply yet.
    asked: VecDeque<Header>,
    closed: bool,
}

struct Bench {
    store: Exchange,
    /// Data of the third guest.
    secret: String,
    guests: [Guest; 2],
    seen: Seen,
}

impl Bench {
    fn new(input: &[u8]) -> Self {
        // What no input can have in it: the store returns what a guest has sent.
        let mut hasher = DefaultHasher::new();
        input.hash(&mut hasher);
        let secret = format!("{:016x}", hasher.finish());
        let mut store = Exchange::new(LIMITS);
        let dom0 = store.connect(0);
        let ask = |store: &mut Exchange, kind, payload: String| {
            let mut bytes = Vec::new();
            Message::new(kind, 1, 0, payload.into_bytes()).encode(&mut bytes);
            assert!(store.send(dom0, &bytes));
            assert!(store.receive(dom0).ends_with(b"OK\0"));
        };
        for domid in 1..=3 {
            let home = format!("/local/domain/{domid}");
            ask(
                &mut store,
                Kind::Write,
                format!("{home}\0{}", if domid == 3 { &secret } else { "" }),
            );
            ask(&mut store, Kind::SetPerms, format!("{home}\0n{domid}\0"));
        }
        let guests = [1, 2].map(|domid| Guest {
            client: store.connect(domid),
            decoder: Decoder::default(),
            asked: VecDeque::new(),
            closed: false,
        });
        Self { store, secret, guests, seen: Seen::default() }
    }

    /// Sends bytes of one guest; with `unread` it does not read its replies.
    fn say(&mut self, guest: usize, bytes: &[u8], unread: bool) {
        let its = &mut self.guests[guest];
        let alive = self.store.send(its.client, bytes);
        if !alive {
            self.seen.closed += usize::from(!std::mem::replace(&mut its.closed, true));
            return;
        }
        self.check();
        if !unread {
            self.hear(guest);
        }
    }

    fn check(&self) {
        for guest in &self.guests {
            let Usage { nodes, watches, transactions, touched, changed, events, unsent, unread } =
                self.store.usage(guest.client);
            assert!(nodes <= LIMITS.nodes && watches <= LIMITS.watches, "{nodes} {watches}");
            assert!(transactions <= LIMITS.transactions, "{transactions} transactions");
            assert!(touched <= LIMITS.touched, "{touched} nodes touched");
            assert!(changed <= LIMITS.touched, "{changed} nodes changed");
            assert!(events <= EVENTS_MAX && unsent <= UNSENT_MAX, "{events} {unsent}");
            assert!(unread <= HEADER_LEN + PAYLOAD_MAX + CHUNK, "{unread} bytes unread");
        }
    }

    fn hear(&mut self, guest: usize) {
        let its = &mut self.guests[guest];
        its.decoder.push(&self.store.receive(its.client));
        while let Some(message) = its.decoder.take().expect("our store keeps to the protocol") {
            let text = String::from_utf8_lossy(&message.payload);
            assert!(!text.contains(&self.secret) || its.client == 0, "sent another guest's data");
            if message.kind() == Some(Kind::WatchEvent) && message.header.req_id == 0 {
                assert_eq!(wire::strings(&message.payload).map(|s| s.len()), Some(2));
                self.seen.events += 1;
                continue;
            }
            let asked = its.asked.pop_front().expect("a reply to a request");
            let Header { req_id, tx_id, kind, .. } = message.header;
            assert_eq!((req_id, tx_id), (asked.req_id, asked.tx_id));
            if message.kind() == Some(Kind::Error) {
                self.seen.errors.insert(Errno::from_wire(&message.payload).name());
            } else {
                assert_eq!(kind, asked.kind);
                self.seen.granted += 1;
            }
        }
        assert_eq!(its.decoder.unread(), 0, "whole messages");
    }

    fn finish(mut self) -> Seen {
        for guest in 0..self.guests.len() {
            // Requests that waited for unread replies.
            while !self.guests[guest].closed && !self.guests[guest].asked.is_empty() {
                let before = self.guests[guest].asked.len();
                self.say(guest, &[], false);
                if self.guests[guest].asked.len() == before {
                    break;
                }
            }
        }
        self.seen
    }
}

fn records(mut bytes: Bytes<'_>) -> Seen {
    let mut bench = Bench::new(bytes.0);
    let mut req_id = 0;
    while !bytes.0.is_empty() {
        let (who, kind, tx, len) = (bytes.u8(), bytes.u8(), bytes.u8(), bytes.u8());
        let payload = bytes.take(len.into());
        let guest = usize::from(who & 1);
        req_id += 1;
        let len = u32::try_from(payload.len()).expect("a byte's worth");
        let header = Header { kind: (kind % 24).into(), req_id, tx_id: (tx % 6).into(), len };
        let its = &mut bench.guests[guest];
        // A guest that does not read is not served at some point; then it reads its replies.
        if bench.store.usage(its.client).unsent >= 64 * 1024 {
            bench.hear(guest);
            bench.say(guest, &[], false);
        }
        bench.guests[guest].asked.push_back(header);
        bench.say(guest, &[&header.to_bytes()[..], payload].concat(), who & UNREAD != 0);
    }
    bench.finish()
}

/// Raw bytes: complete messages among them are answered.
fn raw(bytes: &[u8]) -> Seen {
    let mut bench = Bench::new(bytes);
    let mut mirror = Decoder::default();
    for chunk in bytes.chunks(CHUNK / 3) {
        mirror.push(chunk);
        while let Ok(Some(message)) = mirror.take() {
            bench.guests[0].asked.push_back(message.header);
        }
        bench.say(0, chunk, false);
    }
    bench.finish()
}

/// Checks that a decoder neither loses nor invents bytes.
fn decode(bytes: &[u8]) -> Seen {
    let (mut decoder, mut again, mut seen) = (Decoder::default(), Vec::new(), Seen::default());
    for chunk in bytes.chunks(7) {
        decoder.push(chunk);
        loop {
            match decoder.take() {
                Ok(Some(message)) => {
                    assert!(message.payload.len() <= PAYLOAD_MAX);
                    let _ = wire::strings(&message.payload).map(|all| {
                        all.iter().for_each(|s| assert!(Perm::parse(s).is_none_or(|p| same(p, s))));
                    });
                    let _ = Errno::from_wire(&message.payload);
                    message.encode(&mut again);
                    seen.decoded += 1;
                }
                Ok(None) => break,
                Err(wire::Oversized(len)) => {
                    assert!(len as usize > PAYLOAD_MAX);
                    assert!(bytes.starts_with(&again));
                    seen.closed = 1;
                    return seen;
                }
            }
        }
        assert!(decoder.unread() <= HEADER_LEN + PAYLOAD_MAX);
    }
    assert!(bytes.starts_with(&again) && again.len() + decoder.unread() == bytes.len());
    seen
}

/// Whether a parsed value prints as its text, except for leading zeroes.
fn same(perm: Perm, text: &[u8]) -> bool {
    Perm::parse(perm.to_string().as_bytes()) == Some(perm) && perm.to_string().len() <= text.len()
}

/// Runs a client of a store that sends only `bytes`; returns the number of requests with a reply.
fn ask(bytes: Bytes<'_>) -> usize {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("pvs-fuzz-{}-{n}", std::process::id()));
    let listener = UnixListener::bind(&path).expect("a socket");
    let store = Store::connect(&path);
    std::fs::remove_file(&path).expect("just made");
    let store = store.expect("a listener exists");
    let (theirs, _) = listener.accept().expect("a client");
    std::thread::scope(|scope| {
        let server = scope.spawn(|| answer(theirs, bytes));
        let done = [
            store.read("a").is_ok(),
            store.watch("a", "token").is_ok(),
            store.list("a").is_ok(),
            store.events().is_ok(),
            store.transaction(|t| t.write("a", "b")).is_ok(),
            store.read("b").is_ok(),
            store.events().is_ok(),
        ];
        drop(store);
        // The end of a scope waits for the closure only: the leak sanitizer does not see what an
        // ending thread still owns.
        server.join().expect("it does not panic");
        done.into_iter().filter(|done| *done).count()
    })
}

/// Runs the store's side.
fn answer(mut client: UnixStream, mut bytes: Bytes<'_>) {
    let (mut heard, mut said) = (Decoder::default(), Decoder::default());
    let mut buf = [0; 8192];
    while let Ok(n @ 1..) = client.read(&mut buf) {
        heard.push(&buf[..n]);
        while let Some(request) = heard.take().expect("our client keeps to the protocol") {
            let mut answered = false;
            while !answered {
                let len = bytes.u8();
                let piece = bytes.take(len.into());
                if piece.is_empty() || client.write_all(piece).is_err() {
                    return;
                }
                said.push(piece);
                loop {
                    match said.take() {
                        Ok(Some(message)) => {
                            let is_event = message.kind() == Some(Kind::WatchEvent);
                            answered |= !is_event && message.header.req_id == request.header.req_id;
                        }
                        Ok(None) => break,
                        Err(_) => return,
                    }
                }
            }
        }
    }
}

fn record(who: u8, kind: Kind, tx: u8, payload: &str) -> Vec<u8> {
    let (kind, len) = (kind.to_wire() as u8, payload.len() as u8);
    [&[who, kind, tx, len], payload.as_bytes()].concat()
}

/// A conversation with the server, as (who, kind, transaction, payload).
fn talk(talk: &[(u8, Kind, u8, &str)]) -> Vec<u8> {
    let records = talk.iter().flat_map(|(who, kind, tx, text)| record(*who, *kind, *tx, text));
    [0].into_iter().chain(records).collect()
}

/// Messages as on the wire, as (kind, request, transaction, payload).
fn encoded(talk: &[(Kind, u32, u32, &str)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (kind, req_id, tx_id, text) in talk {
        Message::new(*kind, *req_id, *tx_id, text.as_bytes().into()).encode(&mut bytes);
    }
    bytes
}

/// Requests of two domains for nodes, permissions and watches.
fn nodes() -> Vec<u8> {
    use Kind::*;
    talk(&[
        (0, Watch, 0, "a\0t\0"),
        (0, Watch, 0, "a\0t\0"),
        (0, Watch, 0, "@releaseDomain\0s\0"),
        (0, Write, 0, "a/b/c\0value"),
        (0, Read, 0, "a/b/c\0"),
        (0, Read, 0, "a/none\0"),
        (0, Directory, 0, "a\0"),
        (0, DirectoryPart, 0, "a\x000\0"),
        (0, SetPerms, 0, "a/b\0b1\0r2\0"),
        (0, SetPerms, 0, "a/b\0b2\0"),
        (1, Watch, 0, "/local/domain/1/a\0u\0"),
        (1, Read, 0, "/local/domain/1/a/b\0"),
        (1, Read, 0, "/local/domain/3\0"),
        (0, GetPerms, 0, "a/b\0"),
        (0, Rm, 0, "a\0"),
        (0, Unwatch, 0, "a\0t\0"),
        (1, ResetWatches, 0, ""),
        (1, GetDomainPath, 0, "7\0"),
        (1, Introduce, 0, "5\x000\x000\0"),
        (1, Control, 0, "help\0"),
    ])
}

/// Transactions, some that conflict, and some of a client that reads no replies.
fn transactions() -> Vec<u8> {
    use Kind::*;
    talk(&[
        (0, TransactionStart, 0, "\0"),
        (0, TransactionStart, 1, "\0"),
        (0, Write, 1, "x\x001"),
        (0, Write, 1, "x\x002"),
        (0, Write, 0, "x\x003"),
        (0, TransactionEnd, 1, "T\0"),
        (0, TransactionStart, 0, "\0"),
        (0, Mkdir, 2, "y/z\0"),
        (0, Rm, 2, "y\0"),
        (0, TransactionEnd, 2, "T\0"),
        (0, TransactionEnd, 2, "F\0"),
        (UNREAD, TransactionStart, 0, "\0"),
        (UNREAD, TransactionStart, 0, "\0"),
        (0, TransactionStart, 0, "\0"),
        (0, TransactionStart, 0, "\0"),
    ])
}

/// What a server sends: replies, some of another kind than the request, and events.
fn replies() -> [Vec<u8>; 7] {
    use Kind::*;
    [
        encoded(&[(WatchEvent, 0, 0, "a\0token\0"), (Read, 1, 0, "value")]),
        encoded(&[(Watch, 2, 0, "OK\0"), (WatchEvent, 0, 0, "a\0token\0")]),
        encoded(&[(Directory, 3, 0, "x\0y\0")]),
        encoded(&[(TransactionStart, 4, 0, "1\0")]),
        encoded(&[(Write, 5, 1, "OK\0")]),
        encoded(&[(TransactionEnd, 6, 1, "OK\0"), (Read, 1, 0, "late")]),
        encoded(&[(Error, 7, 0, "ENOENT\0")]),
    ]
}

/// Message sequences as start inputs.
pub fn seeds() -> Vec<Vec<u8>> {
    use Kind::*;
    let name = |n: u8, kind, text: String| record(n & 1, kind, 0, &text);
    let many = |kind: Kind, text: &dyn Fn(u8) -> String| -> Vec<u8> {
        let all = (0..40).flat_map(|n| name(0, kind, text(n)));
        [0].into_iter().chain(all).collect()
    };
    let again: Vec<u8> = record(0, TransactionStart, 0, "\0")
        .into_iter()
        .chain((0..40).flat_map(|n| record(0, Write, 1, &format!("x\0{n}"))))
        .chain((0..40).flat_map(|n| record(0, SetPerms, 1, &format!("x\0b1\0r{n}\0"))))
        .chain(record(0, TransactionEnd, 1, "T\0"))
        .collect();
    let guest = encoded(&[
        (Write, 1, 0, "k\0v"),
        (Watch, 2, 0, "k\0t\0"),
        (TransactionStart, 3, 0, "\0"),
        (Write, 4, 1, "k\0w"),
        (TransactionEnd, 5, 1, "T\0"),
    ]);
    let messages = replies();
    let piece = |bytes: &[u8]| [&[bytes.len() as u8], bytes].concat();
    // In one piece each, and in two.
    let whole: Vec<u8> = messages.iter().flat_map(|bytes| piece(bytes)).collect();
    let halves = |bytes: &Vec<u8>| {
        let (first, rest) = bytes.split_at(bytes.len() / 3);
        [piece(first), piece(rest)].concat()
    };
    let halves: Vec<u8> = messages.iter().flat_map(halves).collect();
    let oversized = Header { kind: 2, req_id: 1, tx_id: 0, len: u32::MAX }.to_bytes();
    vec![
        nodes(),
        transactions(),
        many(Write, &|n| format!("n{n}\0{n}")),
        many(Watch, &|n| format!("n{n}\0t\0")),
        many(Mkdir, &|n| format!("a/b/c/d/e/f/g/h/i/j/k/l/{n}\0")),
        [&[0][..], &again].concat(),
        [&[1][..], &guest].concat(),
        [&[1][..], &guest, &oversized].concat(),
        [&[2][..], &guest, &messages.concat()].concat(),
        [&[2][..], &guest, &oversized].concat(),
        [&[3][..], &whole].concat(),
        [&[3][..], &halves].concat(),
        [&[3][..], &piece(&oversized)].concat(),
    ]
}
