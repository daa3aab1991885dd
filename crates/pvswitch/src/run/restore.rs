//! The start of a process: a new switch, one that another process hands over, or one that a killed
//! process left in a store.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use os::{HandoverError, StateFile, unpack};
use vhost_user::backend::Descriptors;

use super::handover::{Handed, Offer, PortOffer, VERSION, decode};
use super::keep::{ATTEMPTS, BUSY, Keep, LIVE, PREFIX, REQUEST, REQUEST_MAX, SWITCH, Store};
use super::takeover::{Left, Source, Takeover};
use super::{RunError, manager, panics};
use crate::keeper::{GO, HAVE, receive};

/// Longest time for the keeper to send what it has.
const KEEPER_MAX: Duration = Duration::from_secs(10);
/// A process that lived no longer after it resumed was probably ended by what it restored.
const QUICK_NS: u64 = 1_000_000_000;
/// So many of them in a row, and connections are not restored.
const QUICK_MAX: u32 = 2;

/// State that a process has at its start.
#[derive(Default)]
pub struct Start {
    /// A switch to continue.
    pub takeover: Option<Takeover>,
    /// Store of the state, if it is kept.
    pub keep: Option<Keep>,
    /// Marks of the previous process, which the store has until ours are in it.
    pub(super) live_before: Option<StateFile>,
    /// Descriptors from the parent process that are not of the store.
    pub(super) activated: Vec<(String, OwnedFd)>,
    /// Errors from before there was a log.
    pub(super) errors: Vec<String>,
}

/// What is in a store: descriptors by record, and by serial number of its versions.
#[derive(Default)]
pub(super) struct Contents {
    records: BTreeMap<String, BTreeMap<u64, Vec<OwnedFd>>>,
    names: Vec<String>,
}

impl Contents {
    pub(super) fn add(&mut self, name: String, fd: OwnedFd) {
        let parts = name.strip_prefix(PREFIX).map(|name| name.split('-').collect::<Vec<_>>());
        if let Some([key, serial, _part]) = parts.as_deref()
            && let Ok(serial) = serial.parse()
        {
            let versions = self.records.entry((*key).into()).or_default();
            versions.entry(serial).or_default().push(fd);
        }
        self.names.push(name);
    }

    /// Opens the newest version of a record that is whole.
    fn open(&self, key: &str) -> Result<(Vec<u8>, Vec<OwnedFd>), HandoverError> {
        let mut why = HandoverError::Damaged;
        for parts in self.records.get(key).into_iter().flat_map(|of| of.values().rev()) {
            let parts: Vec<BorrowedFd<'_>> = parts.iter().map(AsFd::as_fd).collect();
            match unpack(VERSION, &parts) {
                Ok(opened) => return Ok(opened),
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    pub(super) fn live(&self) -> Option<StateFile> {
        let (_, fds) = self.records.get(LIVE)?.last_key_value()?;
        Some(StateFile::open(fds.first()?.try_clone().ok()?))
    }
}

impl Start {
    /// A new switch, without a store.
    ///
    /// # Errors
    /// The variables for inherited descriptors are wrong.
    pub fn new() -> Result<Self, RunError> {
        Ok(Self { activated: inherited()?, ..Self::default() })
    }

    /// A switch that another process hands over on standard input.
    ///
    /// # Errors
    /// As for [`Takeover::receive`].
    pub fn takeover() -> Result<Self, RunError> {
        Ok(Self { takeover: Some(Takeover::receive()?), ..Self::default() })
    }

    /// A switch that is kept by the process at standard input, or (`managed`) by the service
    /// manager: the one that was left, or a new one.
    ///
    /// # Errors
    /// The keeper cannot be reached, or a resource is missing.
    pub fn kept(managed: bool) -> Result<Self, RunError> {
        let mut start = Self::default();
        let mut contents = Contents::default();
        let mut ended_ns = os::monotonic().as_nanos() as u64;
        let mut keeper = None;
        if managed {
            for (name, fd) in inherited()? {
                match name.starts_with(PREFIX) {
                    true => contents.add(name, fd),
                    false => start.activated.push((name, fd)),
                }
            }
        } else {
            let read = read_keeper(&mut contents, &mut start.activated);
            let (socket, at) = read.map_err(|error| {
                let what = "--kept is for `run --keep`, which starts this program";
                RunError::Request(format!("{what}: {error}"))
            })?;
            ended_ns = if at == 0 { ended_ns } else { at };
            keeper = Some(socket);
        }
        start.continue_from(contents, keeper, ended_ns)?;
        Ok(start)
    }

    /// Continues what is in a store, or begins a new switch with that store.
    pub(super) fn continue_from(
        &mut self,
        mut contents: Contents,
        keeper: Option<OwnedFd>,
        ended_ns: u64,
    ) -> Result<(), RunError> {
        let mut store = Store::new(keeper, std::mem::take(&mut contents.names));
        if !contents.records.is_empty() {
            match restore(&contents, ended_ns, &mut self.errors) {
                Ok(takeover) => self.takeover = Some(takeover),
                Err(error) => {
                    contents = Contents::default();
                    self.errors.push(format!(
                        "the state of the previous process cannot be used: {error}; the switch \
                         starts without it, guests must reconnect"
                    ));
                    store.clear().map_err(super::os("store"))?;
                }
            }
        }
        let keep = Keep::new(store).map_err(super::os("store"))?;
        if let Some(old) = contents.live() {
            let mut mark = [0; 16];
            old.marks(ATTEMPTS, &mut mark);
            let _ = keep.live.mark(ATTEMPTS, &mark);
            panics::carry(&old, &keep.live);
            self.live_before = Some(old);
        }
        self.keep = Some(keep);
        Ok(())
    }

    /// Starts over, without what was left.
    pub fn discard(&mut self, why: &dyn std::fmt::Display) {
        self.takeover = None;
        self.errors.push(format!("the state of the previous process cannot be used: {why}"));
        if let Some(Err(error)) = self.keep.as_mut().map(|keep| keep.store.clear()) {
            self.errors.push(format!("cannot empty the store: {error}"));
        }
    }
}

impl Store {
    /// Removes all that a previous process stored, and waits until it is closed: its sockets would
    /// accept connections.
    fn clear(&mut self) -> io::Result<()> {
        self.begin();
        self.remove_foreign()?;
        if self.is_managed() { manager::barrier() } else { Ok(()) }
    }
}

fn inherited() -> Result<Vec<(String, OwnedFd)>, RunError> {
    os::inherited_by_name().map_err(|error| RunError::Request(error.to_string()))
}

/// Receives what the keeper has on standard input: the store's contents, and descriptors of the
/// keeper's parent. Returns its socket, and when the process before ended (0: there was none).
fn read_keeper(
    contents: &mut Contents,
    activated: &mut Vec<(String, OwnedFd)>,
) -> io::Result<(OwnedFd, u64)> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    let null = std::fs::File::open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    let end = Instant::now() + KEEPER_MAX;
    loop {
        let message = receive(socket.as_fd(), end)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        match (message.kind, message.fd) {
            (HAVE, Some(fd)) if message.text.starts_with(PREFIX) => contents.add(message.text, fd),
            (HAVE, Some(fd)) => activated.push((message.text, fd)),
            (GO, _) => return Ok((socket, message.text.parse().unwrap_or(0))),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Makes a takeover of what a killed process left.
fn restore(
    contents: &Contents,
    ended_ns: u64,
    errors: &mut Vec<String>,
) -> Result<Takeover, HandoverError> {
    let (bytes, fds) = contents.open(SWITCH)?;
    let mut offer = decode::<Offer>(&bytes)?.0;
    let mut all = Descriptors::new(fds);
    let mut left = Left { ended_ns, ..Left::default() };
    for port in &mut offer.ports {
        let record = match contents.open(&format!("p{}", port.id)) {
            Ok((bytes, fds)) => decode::<PortOffer>(&bytes).map(|(record, _)| (record, fds)),
            Err(error) => Err(error),
        };
        match record {
            // Another one had this id before.
            Ok((record, _)) if record.name != port.name => {}
            Ok((record, fds)) => {
                all.add(super::keep::first(port.id), fds);
                *port = record;
            }
            Err(error) => {
                errors
                    .push(format!("port '{}': its kept state cannot be used: {error}", port.name));
            }
        }
    }
    if let Some(mut live) = contents.live() {
        read_marks(&live, &offer, &mut left, errors);
        let handed = live.read(VERSION);
        let handed = handed.and_then(|bytes| Some(decode::<Handed>(&bytes).ok()?.0));
        left.handed = handed.unwrap_or_default();
    }
    Ok(Takeover { source: Source::Store(Box::new(left)), offer, fds: all })
}

/// Reads what the killed process was doing, and counts this attempt.
fn read_marks(live: &StateFile, offer: &Offer, left: &mut Left, errors: &mut Vec<String>) {
    let ids: BTreeSet<u16> = offer.ports.iter().map(|port| port.id).collect();
    for id in ids.iter().copied() {
        let mut busy = [0];
        live.marks(BUSY + u64::from(id), &mut busy);
        if busy != [0] {
            left.lost.insert(id, "the process was killed while it handled a message");
        }
    }
    left.panicked = panics::read(live, &ids, os::monotonic());
    for id in left.panicked.keys() {
        left.lost.insert(*id, "the process panicked while it served this port");
    }
    let (mut len, mut text) = ([0; 4], vec![0; REQUEST_MAX]);
    live.marks(REQUEST, &mut len);
    live.marks(REQUEST + 4, &mut text);
    text.truncate(u32::from_le_bytes(len) as usize);
    if !text.is_empty() {
        errors.push(format!(
            "the previous process was killed while it ran the request {}: check whether it took \
             effect",
            String::from_utf8_lossy(&text).escape_debug()
        ));
    }
    // Number of processes that resumed and ended soon, and when the last one resumed.
    let mut mark = [0; 16];
    live.marks(ATTEMPTS, &mut mark);
    let [quick, began] = [0, 8].map(|at| u64::from_le_bytes(std::array::from_fn(|i| mark[at + i])));
    let now = os::monotonic().as_nanos() as u64;
    // A panic is not due to the other ports, and its own are held down.
    let is_contained = !left.panicked.is_empty();
    let is_quick = began != 0 && now.saturating_sub(began) < QUICK_NS && !is_contained;
    let quick = if is_quick { quick + 1 } else { 0 };
    if quick >= u64::from(QUICK_MAX) {
        errors.push(format!(
            "the process ended {QUICK_MAX} times within {} s of its start: connections are not \
             restored, guests must reconnect",
            QUICK_NS / 1_000_000_000
        ));
        left.lost = ids.into_iter().map(|id| (id, "the process ended too often")).collect();
    }
    let mark = [quick.to_le_bytes(), now.to_le_bytes()].concat();
    let _ = live.mark(ATTEMPTS, &mark);
}

#[cfg(test)]
mod tests {
    use super::super::handover::encode;
    use super::*;

    fn add(contents: &mut Contents, name: &str, parts: Vec<OwnedFd>) {
        for (part, fd) in parts.into_iter().enumerate() {
            contents.add(format!("{PREFIX}{name}-{part}"), fd);
        }
    }

    fn sealed(offer: &Offer) -> Vec<OwnedFd> {
        os::pack(VERSION, &encode(offer, &[]), &[]).unwrap()
    }

    fn offer(pid: u32, ports: &[(&str, u16)]) -> Offer {
        let port = |(name, id): &(&str, u16)| PortOffer {
            name: (*name).into(),
            id: *id,
            ..PortOffer::default()
        };
        Offer { pid, ports: ports.iter().map(port).collect(), ..Offer::default() }
    }

    fn pid(contents: &Contents) -> Result<u32, HandoverError> {
        restore(contents, 0, &mut Vec::new()).map(|takeover| takeover.offer.pid)
    }

    #[test]
    fn newest_whole_record_counts() {
        let mut contents = Contents::default();
        assert!(matches!(pid(&contents), Err(HandoverError::Damaged)));
        add(&mut contents, "switch-7", sealed(&offer(7, &[])));
        assert_eq!(pid(&contents).unwrap(), 7);
        // Stored, and the one before not deleted yet.
        add(&mut contents, "switch-10", sealed(&offer(10, &[])));
        assert_eq!(pid(&contents).unwrap(), 10);
        // Stored in part.
        let events: Vec<_> = (0..200).map(|_| os::eventfd().unwrap()).collect();
        let fds: Vec<_> = events.iter().map(AsFd::as_fd).collect();
        let mut parts = os::pack(VERSION, &encode(&offer(11, &[]), &[]), &fds).unwrap();
        assert_eq!(parts.len(), 2);
        parts.truncate(1);
        add(&mut contents, "switch-11", parts);
        assert_eq!(pid(&contents).unwrap(), 10);
        // Other descriptors do no harm.
        contents.add(format!("{PREFIX}switch-12-0"), os::eventfd().unwrap());
        contents.add(format!("{PREFIX}x"), os::eventfd().unwrap());
        assert_eq!(pid(&contents).unwrap(), 10);
        assert_eq!(contents.names.len(), 5);
    }

    /// Whatever message to the keeper is the last before a kill: what was answered is there, and
    /// nothing older.
    #[test]
    fn store_that_is_cut_after_any_message_has_what_was_answered() {
        let events: Vec<_> = (0..130).map(|_| os::eventfd().unwrap()).collect();
        let many: Vec<_> = events.iter().map(AsFd::as_fd).collect();
        let mut cuts = 0;
        for seed in 0..2000_u32 {
            // Which records have many descriptors, and so several parts.
            let mut bits = seed.wrapping_mul(0x9e37_79b9) >> 7;
            let (ours, theirs) = os::socketpair().unwrap();
            let mut store = Store::new(Some(ours), Vec::new());
            let (mut held, mut answered) = (BTreeMap::<String, OwnedFd>::new(), None);
            for n in 1..=2 + seed % 4 {
                let fds = if bits & 1 == 0 { &[][..] } else { &many };
                bits >>= 1;
                let parts = os::pack(VERSION, &encode(&offer(n, &[]), &[]), fds).unwrap();
                let parts: Vec<_> = parts.iter().map(AsFd::as_fd).collect();
                store.put(SWITCH, &parts).unwrap();
                let mut found = answered;
                while let Ok(Some(message)) = receive(theirs.as_fd(), Instant::now()) {
                    match message.fd {
                        Some(fd) => drop(held.insert(message.text, fd)),
                        None => drop(held.remove(&message.text)),
                    }
                    let mut contents = Contents::default();
                    for (name, fd) in &held {
                        contents.add(name.clone(), fd.try_clone().unwrap());
                    }
                    found = pid(&contents).ok();
                    let valid = found == answered || found == Some(n);
                    assert!(valid, "seed {seed}: {found:?}, answered {answered:?}, record {n}");
                    cuts += 1;
                }
                assert_eq!(found, Some(n), "seed {seed}");
                answered = found;
            }
        }
        assert!(cuts > 10_000, "{cuts}");
    }

    #[test]
    fn record_of_another_version_is_refused() {
        let mut contents = Contents::default();
        let parts = os::pack(VERSION + 1, &encode(&offer(1, &[]), &[]), &[]).unwrap();
        add(&mut contents, "switch-1", parts);
        assert!(matches!(pid(&contents), Err(HandoverError::Version { .. })));
    }

    #[test]
    fn port_whose_record_is_damaged_or_of_another_is_restored_without_it() {
        let mut contents = Contents::default();
        add(&mut contents, "switch-1", sealed(&offer(1, &[("a", 0), ("b", 1), ("c", 2)])));
        let record = |name: &str, id| {
            let port = PortOffer { name: name.into(), id, faults: 5, ..PortOffer::default() };
            encode(&port, &[])
        };
        add(&mut contents, "p0-2", os::pack(VERSION, &record("a", 0), &[]).unwrap());
        add(&mut contents, "p1-3", os::pack(VERSION, &record("old", 1), &[]).unwrap());
        add(&mut contents, "p2-4", os::pack(VERSION, b"not a record", &[]).unwrap());
        let mut errors = Vec::new();
        let takeover = restore(&contents, 0, &mut errors).unwrap();
        let faults: Vec<_> = takeover.offer.ports.iter().map(|p| (&*p.name, p.faults)).collect();
        assert_eq!(faults, [("a", 5), ("b", 0), ("c", 0)]);
        assert!(matches!(&errors[..], [error] if error.contains("port 'c'")), "{errors:?}");
    }

    #[test]
    fn marks_of_the_killed_process_decide_what_is_lost() {
        let live = StateFile::new().unwrap();
        let offer = offer(1, &[("a", 0), ("b", 9)]);
        let read = |live: &StateFile| {
            let (mut left, mut errors) = (Left::default(), Vec::new());
            read_marks(live, &offer, &mut left, &mut errors);
            (left.lost.into_keys().collect::<Vec<_>>(), errors)
        };
        assert_eq!(read(&live), (vec![], vec![]));
        live.mark(BUSY + 9, &[1]).unwrap();
        let (lost, errors) = read(&live);
        assert_eq!((lost, errors.len()), (vec![9], 0));
        // It has gone on and ended soon twice by now: this is the third attempt.
        let (lost, errors) = read(&live);
        assert_eq!((lost, errors.len()), (vec![0, 9], 1), "{errors:?}");
        live.mark(REQUEST + 4, b"some\nrequest").unwrap();
        live.mark(REQUEST, &12_u32.to_le_bytes()).unwrap();
        let (_, errors) = read(&live);
        assert!(errors[0].contains("some\\nrequest"), "{errors:?}");
    }
}
