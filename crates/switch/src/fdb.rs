//! Forwarding database: the port of each MAC address in each VLAN.
//!
//! One table for all workers. Lookup and refresh take no lock; changes of the table (a new address,
//! a move, ageing) take one and are rare. Guests choose their MACs, so the hash is keyed, and each
//! port has a limit: a guest that floods addresses fills only its own share.
//!
//! ```text
//!   set                      key word     | 0 .. 0 |valid 60| vlan 59..48 | mac 47..0 |
//!   ┌─────────────────┐
//!   │ 8 key words     │ 64   value word   | valid 63 | static 62 | generation 61..48 |
//!   │ 8 value words   │ 64                | port 47..32 | last seen, s 31..0 |
//!   └─────────────────┘
//! ```
//!
//! An address may be in either of two sets, chosen by its hash; the second is used when the first
//! is full, so the table fills to nine tenths and more before both sets of an address are full.
//!
//! **A reader never gets another address's port**, which would be an isolation fault (`entry.rs`).
//!
//! The table reads no clock (seconds are passed in), and has no policy about which port may claim
//! an address: a guest that sends from another's MAC moves that entry, as in any learning switch,
//! unless the entry is static or the caller has [`Terms`].

mod entry;
mod flap;

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU32};

use shm::sync::{AtomicU64, Lock, Mutex, MutexGuard, Ordering};

use self::entry::{Value, Words};
use self::flap::{Claim, Moves};
pub use self::flap::{FLAP_MOVES, FLAP_WINDOW_S, Flap, Terms};
use crate::flow::{fold_mul, is_multicast};

/// A port's number in the switch.
#[derive(Default, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(
    /// Index into the switch's ports.
    pub u16,
);

impl fmt::Display for PortId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// MAC address; text form `02:00:00:00:00:01`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Mac(
    /// Bytes in wire order.
    pub [u8; 6],
);

impl fmt::Display for Mac {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(out, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

/// Error: not six pairs of hex digits separated by colons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParseMacError;

impl fmt::Display for ParseMacError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a MAC address; write it like 02:00:00:00:00:01")
    }
}

impl std::error::Error for ParseMacError {}

impl FromStr for Mac {
    type Err = ParseMacError;

    fn from_str(s: &str) -> Result<Self, ParseMacError> {
        let mut mac = [0; 6];
        let mut parts = s.split(':');
        for byte in &mut mac {
            let part = parts.next().ok_or(ParseMacError)?;
            if part.len() != 2 || !part.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(ParseMacError);
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| ParseMacError)?;
        }
        if parts.next().is_some() { Err(ParseMacError) } else { Ok(Self(mac)) }
    }
}

/// Result of [`Fdb::learn`] for a source address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Learned {
    /// It was in the table, at this port, and was refreshed.
    Known,
    /// It was added.
    New,
    /// It moved here from another port.
    Moved {
        /// The previous port.
        from: PortId,
    },
    /// Another port has it, and it stays there: it is locked, or flaps.
    Stays {
        /// Whether the frame is to be dropped.
        drop: bool,
    },
    /// The port is at its limit; nothing changed.
    LimitReached,
    /// No free entry, and no port has more than its fair share; nothing changed.
    TableFull,
    /// A static entry, which learning does not change.
    Static {
        /// Its port, possibly another one.
        at: PortId,
    },
    /// A group address or all zeros, which is not a valid source; nothing changed.
    Invalid,
}

/// One entry, as in `ctl fdb`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The address.
    pub mac: Mac,
    /// VLAN id; 0 for untagged.
    pub vlan: u16,
    /// Its port.
    pub port: PortId,
    /// Seconds since its last frame; for a static entry, since it was added.
    pub age_s: u32,
    /// Whether it was configured, not learned.
    pub is_static: bool,
    /// Whether it flaps.
    pub flap: Option<Flap>,
}

/// Error: no room for a static entry, as its sets are full of static entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableFull;

impl fmt::Display for TableFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no room for another static entry: raise the capacity of the FDB")
    }
}

impl std::error::Error for TableFull {}

/// The forwarding table. Shared by all workers; every method takes `&self`.
pub struct Fdb {
    sets: Box<[Set]>,
    /// Learned addresses of each port, by port number. Written under `writer` only.
    learned: Box<[AtomicU32]>,
    /// Static entries. Written under `writer` only.
    statics: AtomicU32,
    /// Entries removed, or moved to another port, so far.
    removals: AtomicU64,
    /// Changes of addresses and their ports so far. Written under `writer` only.
    changes: AtomicU64,
    /// Whether the next change by learning is to be reported.
    reports: AtomicBool,
    writer: Mutex<Writer>,
    key: [u64; 2],
    ageing_s: AtomicU32,
    port_limit: u32,
    /// Time from which no address is blocked, in seconds.
    blocks_end_s: AtomicU32,
}

/// State of the holder of the lock.
struct Writer {
    /// Number of ports that have learned addresses.
    ports_active: u32,
}

/// Addresses in a set: one cache line of keys.
const WAYS: usize = 8;
/// Entries of a table unless configured otherwise.
pub const CAPACITY_DEFAULT: usize = 65_536;

#[derive(Default)]
#[repr(align(64))]
struct Line([AtomicU64; WAYS]);

#[derive(Default)]
struct Set {
    keys: Line,
    values: Line,
    /// Moves of addresses, used when they move only.
    moves: Line,
    /// The port that was refused last, of blocked addresses.
    refused: Line,
}

impl Fdb {
    /// Creates an empty table.
    ///
    /// `capacity`: entries, rounded up to a power of two, at least 8; 32 bytes each. `key`: random
    /// and secret. `ageing_s`: seconds after which an idle address is removed, 0 for never.
    /// `port_limit`: most addresses learned from one port; static entries do not count.
    pub fn new(capacity: usize, key: [u64; 2], ageing_s: u32, port_limit: u32) -> Self {
        let sets = capacity.div_ceil(WAYS).next_power_of_two();
        Self {
            sets: (0..sets).map(|_| Set::default()).collect(),
            learned: (0..=u16::MAX).map(|_| AtomicU32::new(0)).collect(),
            statics: AtomicU32::new(0),
            removals: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            reports: AtomicBool::new(false),
            writer: Mutex::new(Lock::Fdb, Writer { ports_active: 0 }),
            key,
            ageing_s: AtomicU32::new(ageing_s),
            port_limit,
            blocks_end_s: AtomicU32::new(0),
        }
    }

    /// Port of `mac` in `vlan` (0: untagged); `None` if it is unknown or expired: flood. Lock-free.
    #[inline]
    pub fn lookup(&self, mac: [u8; 6], vlan: u16, now_s: u32) -> Option<PortId> {
        let (_, value) = self.find(pack_key(mac, vlan))?;
        (!self.is_expired(value, now_s)).then(|| value.port())
    }

    /// Learns that `port` sent a frame from `mac` in `vlan` at `now_s`.
    ///
    /// For a known address: one lookup, and a store once a second. It takes the lock for a new or
    /// moved address, and never for a port at its limit.
    #[inline]
    pub fn learn(&self, mac: [u8; 6], vlan: u16, port: PortId, now_s: u32) -> Learned {
        self.learn_on(mac, vlan, port, now_s, |_| Terms::default())
    }

    /// Learns as [`learn`](Self::learn) does; `terms`: those on which the port takes the address
    /// from the one that has it.
    #[inline]
    pub fn learn_on(
        &self,
        mac: [u8; 6],
        vlan: u16,
        port: PortId,
        now_s: u32,
        terms: impl FnOnce(PortId) -> Terms,
    ) -> Learned {
        let key = pack_key(mac, vlan);
        match self.find(key) {
            Some((at, value)) if value.port() == port => self.refresh(at, value, now_s),
            Some((_, value)) if value.is_static() => Learned::Static { at: value.port() },
            _ if is_multicast(mac) || mac == [0; 6] => Learned::Invalid,
            _ if self.learned_from(port) >= self.port_limit => Learned::LimitReached,
            _ => self.learn_locked(key, port, now_s, terms),
        }
    }

    /// Adds a static entry for `mac` in `vlan` at `port`: it does not age, and learning does not
    /// move it. Replaces an earlier entry of `mac`; evicts a learned entry if necessary.
    ///
    /// # Errors
    /// [`TableFull`]: both sets of `mac` are full of static entries; nothing changed.
    pub fn add_static(
        &self,
        mac: [u8; 6],
        vlan: u16,
        port: PortId,
        now_s: u32,
    ) -> Result<(), TableFull> {
        let key = pack_key(mac, vlan);
        let mut writer = self.lock();
        let value = Value::new(port, now_s).with_static();
        if let Some((at, old)) = self.find(key) {
            self.put_value(&mut writer, at, old, value);
            return Ok(());
        }
        let place = self.vacant(key).or_else(|| {
            let learned = |(_, value): &(At, Value)| !value.is_static();
            self.places(key).filter(learned).min_by_key(|(_, value)| value.seen_s())
        });
        let (at, _) = place.ok_or(TableFull)?;
        self.replace(&mut writer, at, key, value);
        Ok(())
    }

    /// Number of entries removed, or moved to another port, so far: what a caller knows of entries
    /// is out of date once it has changed.
    #[inline]
    pub fn removals(&self) -> u64 {
        self.removals.load(Ordering::Acquire)
    }

    /// Number of changes so far: addresses added, moved, removed.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Has the next change by learning reported, once: see
    /// [`take_report`](Self::take_report).
    pub fn request_report(&self) {
        self.reports.store(true, Ordering::Release);
    }

    /// Whether the change that the caller made by learning is to be reported; true once for each
    /// [`request_report`](Self::request_report).
    #[cold]
    pub fn take_report(&self) -> bool {
        self.reports.load(Ordering::Relaxed) && self.reports.swap(false, Ordering::AcqRel)
    }

    /// Removes `mac` in `vlan`, static or learned. Returns whether it existed.
    pub fn remove(&self, mac: [u8; 6], vlan: u16) -> bool {
        let mut writer = self.lock();
        let found = self.find(pack_key(mac, vlan));
        if let Some((at, _)) = found {
            self.vacate(&mut writer, at);
        }
        found.is_some()
    }

    /// Removes all entries of `port`, static ones too, when the port is removed. Returns their
    /// number. Frames of that port that other workers still handle may be learned afterwards: stop
    /// its ingress first.
    pub fn flush_port(&self, port: PortId) -> usize {
        self.forget_home(port);
        self.sweep(|value| value.port() == port)
    }

    /// Removes the learned entries of `port`, as when its link goes down. Returns their number.
    pub fn flush_learned(&self, port: PortId) -> usize {
        self.forget_home(port);
        self.sweep(|value| value.port() == port && !value.is_static())
    }

    /// Moves the learned entries of `from` to `to`, whose limit holds: those beyond are removed.
    /// For a port, another one, that takes the place of the first. Returns how many moved.
    pub fn move_learned(&self, from: PortId, to: PortId) -> usize {
        self.forget_home(from);
        let is_its = |value: Value| value.is_valid() && !value.is_static() && value.port() == from;
        let mut moved = 0;
        for at in self.all_places().filter(|at| is_its(self.value(*at))) {
            let mut writer = self.lock();
            let value = self.value(at);
            if !is_its(value) {
                continue;
            }
            if self.learned_from(to) < self.port_limit {
                self.put_value(&mut writer, at, value, Value::new(to, value.seen_s()));
                moved += 1;
            } else {
                self.vacate(&mut writer, at);
            }
        }
        moved
    }

    /// Removes the learned entries of `port` that `keep` rejects, by address and VLAN, as when its
    /// rules change. Returns their number.
    pub fn retain_learned(&self, port: PortId, keep: impl Fn([u8; 6], u16) -> bool) -> usize {
        let mut removed = 0;
        for entry in self.entries(0).iter().filter(|e| e.port == port && !e.is_static) {
            if !keep(entry.mac.0, entry.vlan) {
                removed += usize::from(self.remove_learned(entry.mac.0, entry.vlan, port));
            }
        }
        removed
    }

    /// Removes `mac` in `vlan` if it was learned from `port`. Returns whether it was.
    pub fn remove_learned(&self, mac: [u8; 6], vlan: u16, port: PortId) -> bool {
        let mut writer = self.lock();
        let found = self.find(pack_key(mac, vlan));
        let found = found.filter(|(_, value)| value.port() == port && !value.is_static());
        if let Some((at, _)) = found {
            self.vacate(&mut writer, at);
        }
        found.is_some()
    }

    /// Removes expired addresses. Returns their number. Call it about once a second;
    /// [`lookup`](Self::lookup) ignores expired addresses in any case, but until removed they take
    /// up space and count towards their port's limit.
    pub fn age(&self, now_s: u32) -> usize {
        self.sweep(|value| self.is_expired(value, now_s))
    }

    /// Sets the seconds after which an idle address is removed; 0 for never.
    pub fn set_ageing(&self, ageing_s: u32) {
        self.ageing_s.store(ageing_s, Ordering::Relaxed);
    }

    /// Number of learned addresses of `port` in the table.
    #[inline]
    pub fn learned_from(&self, port: PortId) -> u32 {
        self.learned[usize::from(port.0)].load(Ordering::Relaxed)
    }

    /// Number of learned addresses in the table, of all ports.
    pub fn learned(&self) -> u32 {
        self.learned.iter().map(|of_port| of_port.load(Ordering::Relaxed)).sum()
    }

    /// Number of static entries in the table.
    pub fn statics(&self) -> u32 {
        self.statics.load(Ordering::Relaxed)
    }

    /// Most addresses learned from one port.
    pub fn port_limit(&self) -> u32 {
        self.port_limit
    }

    /// Capacity in entries.
    pub fn capacity(&self) -> usize {
        self.sets.len() * WAYS
    }

    /// All entries at `now_s`, in no order. Allocates.
    pub fn entries(&self, now_s: u32) -> Vec<Entry> {
        let all = self.all_places().filter_map(|at| {
            let key = self.sets[at.set].keys.0[at.way].load(Ordering::Acquire);
            let value = self.words(at).read(key)?;
            (!self.is_expired(value, now_s)).then(|| Entry {
                mac: unpack_mac(key),
                vlan: (key >> 48) as u16 & 0xfff,
                port: value.port(),
                age_s: now_s.saturating_sub(value.seen_s()),
                is_static: value.is_static(),
                flap: self.flap_at(at, now_s),
            })
        });
        all.collect()
    }
}

/// Lookup, by readers without the lock and by its holder.
impl Fdb {
    #[inline]
    fn find(&self, key: u64) -> Option<(At, Value)> {
        let [first, second] = self.sets_of(key);
        self.find_in(first, key).or_else(|| self.find_in(second, key))
    }

    #[inline]
    fn find_in(&self, set: usize, key: u64) -> Option<(At, Value)> {
        let mut hits = 0_u32;
        // All eight, without a branch for each: the position of the key is not predictable.
        for (way, word) in self.sets[set].keys.0.iter().enumerate() {
            hits |= u32::from(word.load(Ordering::Relaxed) == key) << way;
        }
        if hits == 0 {
            return None;
        }
        let at = At { set, way: hits.trailing_zeros() as usize % WAYS };
        Some((at, self.words(at).read(key)?))
    }

    #[inline]
    fn words(&self, at: At) -> Words<'_> {
        let set = &self.sets[at.set];
        Words { key: &set.keys.0[at.way], value: &set.values.0[at.way] }
    }

    /// The two sets of `key`; the same twice in a table of one set.
    #[inline]
    fn sets_of(&self, key: u64) -> [usize; 2] {
        let once = fold_mul(key ^ self.key[0], self.key[1] | 1);
        let hash = fold_mul(once ^ self.key[1], 0x9e37_79b9_7f4a_7c15);
        let mask = self.sets.len() - 1;
        let first = hash as usize & mask;
        let second = (hash >> 32) as usize & mask;
        if first == second { [first, (first ^ 1) & mask] } else { [first, second] }
    }

    #[inline]
    fn is_expired(&self, value: Value, now_s: u32) -> bool {
        let ageing_s = self.ageing_s.load(Ordering::Relaxed);
        // Workers' clocks differ a little: an entry seen in the future is fresh.
        let age_s = now_s.saturating_sub(value.seen_s());
        ageing_s != 0 && age_s > ageing_s && !value.is_static()
    }

    #[inline]
    fn refresh(&self, at: At, value: Value, now_s: u32) -> Learned {
        if value.is_static() {
            return Learned::Static { at: value.port() };
        }
        if value.seen_s() < now_s {
            self.words(at).refresh(value, now_s);
        }
        Learned::Known
    }

    fn value(&self, at: At) -> Value {
        self.words(at).value()
    }

    /// All places of `key`, with their values.
    fn places(&self, key: u64) -> impl Iterator<Item = (At, Value)> + '_ {
        let [first, second] = self.sets_of(key);
        let sets = [first, second].into_iter().take(if first == second { 1 } else { 2 });
        let all = sets.flat_map(|set| (0..WAYS).map(move |way| At { set, way }));
        all.map(|at| (at, self.value(at)))
    }

    fn vacant(&self, key: u64) -> Option<(At, Value)> {
        self.places(key).find(|(_, value)| !value.is_valid())
    }

    fn all_places(&self) -> impl Iterator<Item = At> + use<> {
        (0..self.sets.len()).flat_map(|set| (0..WAYS).map(move |way| At { set, way }))
    }
}

/// Changes, under the lock.
impl Fdb {
    /// No code under the lock panics, and the words are atomic.
    fn lock(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock()
    }

    /// The slow path of [`learn`](Self::learn). Re-checks everything: another worker may have been
    /// first.
    #[cold]
    fn learn_locked(
        &self,
        key: u64,
        port: PortId,
        now_s: u32,
        terms: impl FnOnce(PortId) -> Terms,
    ) -> Learned {
        let mut writer = self.lock();
        let new = Value::new(port, now_s);
        let found = self.find(key);
        if let Some((at, value)) = found
            && (value.is_static() || value.port() == port)
        {
            return self.refresh(at, value, now_s);
        }
        if self.learned_from(port) >= self.port_limit {
            return Learned::LimitReached;
        }
        if let Some((at, value)) = found {
            // An expired address has no port; it did not move.
            if self.is_expired(value, now_s) {
                self.put_value(&mut writer, at, value, new);
                self.set_moves(at, Moves(0));
                return Learned::New;
            }
            let from = value.port();
            match self.claim(&mut writer, at, port, now_s, terms(from)) {
                Claim::Move => self.put_value(&mut writer, at, value, new),
                Claim::Keep => return Learned::Stays { drop: false },
                Claim::Refuse => return Learned::Stays { drop: true },
            }
            return Learned::Moved { from };
        }
        let Some(at) = self.place_for(&writer, key, port, now_s) else {
            return Learned::TableFull;
        };
        self.replace(&mut writer, at, key, new);
        Learned::New
    }

    /// Selects a vacant place; else the oldest expired entry; else the oldest entry of a port with
    /// more than its fair share of the table: of any such port if `port` has less than that, of
    /// `port` itself if it has more.
    fn place_for(&self, writer: &Writer, key: u64, port: PortId, now_s: u32) -> Option<At> {
        if let Some((at, _)) = self.vacant(key) {
            return Some(at);
        }
        let oldest = |wanted: &dyn Fn(Value) -> bool| {
            let learned = |(_, value): &(At, Value)| !value.is_static() && wanted(*value);
            let found = self.places(key).filter(learned).min_by_key(|(_, value)| value.seen_s());
            found.map(|(at, _)| at)
        };
        let mine = self.learned_from(port);
        let ports = writer.ports_active + u32::from(mine == 0);
        let share = u32::try_from(self.capacity()).unwrap_or(u32::MAX) / ports.max(1);
        let too_many = |value: Value| {
            let owner = value.port();
            self.learned_from(owner) > share && (mine < share || owner == port)
        };
        oldest(&|value| self.is_expired(value, now_s)).or_else(|| oldest(&too_many))
    }

    /// Replaces the entry by another address, and counts both.
    fn replace(&self, writer: &mut Writer, at: At, key: u64, value: Value) {
        self.vacate(writer, at);
        self.words(at).fill(key, value);
        self.count(writer, value, true);
    }

    /// Removes the entry, if there is one.
    fn vacate(&self, writer: &mut Writer, at: At) {
        let old = self.words(at).vacate();
        if old.is_valid() {
            self.removals.fetch_add(1, Ordering::Release);
            self.count(writer, old, false);
        }
        self.set_moves(at, Moves(0));
    }

    /// Changes port or kind of an entry that keeps its address.
    fn put_value(&self, writer: &mut Writer, at: At, old: Value, new: Value) {
        self.words(at).put(old, new);
        if old.port() != new.port() {
            // What callers know of its port is out of date.
            self.removals.fetch_add(1, Ordering::Release);
        }
        self.count(writer, old, false);
        self.count(writer, new, true);
    }

    /// Updates the counts of learned addresses.
    fn count(&self, writer: &mut Writer, value: Value, added: bool) {
        self.changes.fetch_add(1, Ordering::Release);
        if value.is_static() {
            let before = self.statics.load(Ordering::Relaxed);
            let after = if added { before + 1 } else { before - 1 };
            return self.statics.store(after, Ordering::Relaxed);
        }
        let count = &self.learned[usize::from(value.port().0)];
        let before = count.load(Ordering::Relaxed);
        assert!(added || before > 0, "a learned address was not counted");
        let after = if added { before + 1 } else { before - 1 };
        count.store(after, Ordering::Relaxed);
        match (before, after) {
            (0, _) => writer.ports_active += 1,
            (_, 0) => writer.ports_active -= 1,
            _ => {}
        }
    }

    /// Vacates all entries that are `gone`. Reads without the lock and takes it per entry, so that
    /// learning workers do not wait for the whole table.
    fn sweep(&self, gone: impl Fn(Value) -> bool) -> usize {
        let gone = |at| {
            let value = self.value(at);
            value.is_valid() && gone(value)
        };
        let mut swept = 0;
        for at in self.all_places().filter(|at| gone(*at)) {
            let mut writer = self.lock();
            if gone(at) {
                self.vacate(&mut writer, at);
                swept += 1;
            }
        }
        swept
    }
}

/// Position of an entry.
#[derive(Clone, Copy)]
struct At {
    set: usize,
    way: usize,
}

/// Packs a key word; its layout is in the module's documentation. Never zero.
#[inline]
pub(crate) fn pack_key(mac: [u8; 6], vlan: u16) -> u64 {
    // Low bytes first: compiles to two loads; the other order would need single bytes.
    let [a, b, c, d, e, f] = mac;
    let low = u64::from(u32::from_le_bytes([a, b, c, d]));
    let high = u64::from(u16::from_le_bytes([e, f]));
    1 << 60 | u64::from(vlan & 0xfff) << 48 | high << 32 | low
}

fn unpack_mac(key: u64) -> Mac {
    let [a, b, c, d, e, f, _, _] = key.to_le_bytes();
    Mac([a, b, c, d, e, f])
}

#[cfg(test)]
mod tests;
