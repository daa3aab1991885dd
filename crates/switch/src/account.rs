//! Accounts: one per port, with limits on the resources that its peer uses.
//!
//! Guests share workers, a control thread and an address space. Every resource that a peer can make
//! the process use is charged to the account of its port, *before* the work is done. There are two
//! kinds of entry:
//!
//! * a [`Stock`] is held and released: mapped bytes, mappings, descriptors, held frames. It has its
//!   own limit and a share of a [`Budget`] of the process, of which a part is reserved for ports
//!   that use little, so that one port cannot prevent another from starting.
//! * a [`Rate`] is spent: messages, connections, announcements, log lines, flooded copies,
//!   addresses. It is a token bucket (GCRA, ITU-T I.371 annex A) with a rate and a burst.
//!
//! A [`Limiter`] is a tenant's rate of bits and frames, in one direction.
//!
//! The cost of a burst (descriptors walked, segments translated, frames made) is bounded by the
//! constants in [`burst`]; its time is charged by the worker ([`fair`](crate::fair)).
//!
//! Nothing here blocks, allocates on the burst path, or reads a clock.

mod bucket;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use self::bucket::{Limit, Limiter, RateLimits};
use crate::time::{Instant, Ns};

/// Limits on the cost of one burst, independent of its frames.
pub mod burst {
    /// Descriptors walked in one burst of one ring.
    pub const DESCS_MAX: usize = 1024;
    /// Segments of all frames of one burst: each may be on a page that is not resident yet.
    pub const TAKEN_SEGS_MAX: usize = 256;
    /// Segments of the buffers for one group of frames.
    pub const SEGS_MAX: usize = 1024;
    /// Frames made in one burst by segmentation and flooding, times their destination ports. A
    /// burst ends before the frame that would exceed this, unless that is its first.
    pub const MADE_MAX: usize = 1024;
    /// Bytes of flooded frames, times their destination ports; limits a burst in the same way.
    pub const FLOOD_BYTES_MAX: u64 = 1 << 20;
    /// Bytes of flooded copies in a burst of one frame, which loses further copies: enough for a
    /// full Ethernet frame to 4096 ports.
    pub const FRAME_FLOOD_BYTES_MAX: u64 = 8 << 20;
}

/// Limit of one resource for the whole process.
#[derive(Debug)]
pub struct Budget {
    limit: u64,
    /// The part reserved for ports that hold at most `small`.
    reserve: u64,
    small: u64,
    used: AtomicU64,
}

impl Budget {
    /// Creates a budget of `limit`. Its last quarter is reserved for ports that hold at most
    /// `small`.
    pub fn new(limit: u64, small: u64) -> Self {
        Self { limit, reserve: limit / 4, small, used: AtomicU64::new(0) }
    }

    /// Total held by all ports.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Limit of the total.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Takes `n` for a port that then holds `holds`; returns whether the budget permits it.
    fn take(&self, n: u64, holds: u64) -> bool {
        let limit = if holds <= self.small { self.limit } else { self.limit - self.reserve };
        add_below(&self.used, n, limit).is_ok()
    }
}

/// Adds `n` unless that exceeds `limit`; returns the new value, or the old one as the error.
fn add_below(used: &AtomicU64, n: u64, limit: u64) -> Result<u64, u64> {
    let add = |now: u64| now.checked_add(n).filter(|sum| *sum <= limit);
    used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).map(|was| was + n)
}

/// A resource that a port holds and releases.
#[derive(Debug)]
pub struct Stock {
    name: &'static str,
    limit: AtomicU64,
    used: AtomicU64,
    refused: AtomicU64,
    budget: Option<Arc<Budget>>,
}

/// A request over a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverLimit {
    /// Name of the entry.
    pub name: &'static str,
    /// Amount requested.
    pub wanted: u64,
    /// Amount that the port holds.
    pub used: u64,
    /// The limit exceeded.
    pub limit: u64,
    /// Whether that is the limit of the process, not of the port.
    pub process: bool,
}

impl fmt::Display for OverLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, wanted, used, limit, process } = self;
        let whose = if *process { "the budget of all ports" } else { "the port's limit" };
        write!(f, "{name}: {wanted} more than the {used} in use exceeds {whose} of {limit}")
    }
}

impl std::error::Error for OverLimit {}

/// A part of a [`Stock`], released when dropped.
#[derive(Debug)]
#[must_use = "it is released when dropped"]
pub struct Charge {
    stock: Arc<Stock>,
    amount: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.stock.give_back(self.amount);
    }
}

impl Stock {
    /// Creates an empty stock with a limit, optionally a share of a budget of the process.
    pub fn new(name: &'static str, limit: u64, budget: Option<Arc<Budget>>) -> Self {
        let zero = || AtomicU64::new(0);
        Self { name, limit: AtomicU64::new(limit), used: zero(), refused: zero(), budget }
    }

    /// Charges `n`, to be released with [`give_back`](Self::give_back).
    ///
    /// # Errors
    /// [`OverLimit`]: nothing was charged, and the refusal was counted.
    pub fn take(&self, n: u64) -> Result<(), OverLimit> {
        let limit = self.limit.load(Ordering::Relaxed);
        let (name, wanted) = (self.name, n);
        let holds = add_below(&self.used, n, limit).map_err(|used| {
            self.refused.fetch_add(1, Ordering::Relaxed);
            OverLimit { name, wanted, used, limit, process: false }
        })?;
        if let Some(budget) = self.budget.as_ref().filter(|budget| !budget.take(n, holds)) {
            self.used.fetch_sub(n, Ordering::Relaxed);
            self.refused.fetch_add(1, Ordering::Relaxed);
            let (used, limit) = (holds - n, budget.limit);
            return Err(OverLimit { name, wanted, used, limit, process: true });
        }
        Ok(())
    }

    /// Releases `n`.
    pub fn give_back(&self, n: u64) {
        let was = self.used.fetch_sub(n, Ordering::Relaxed);
        assert!(was >= n, "more {} released than charged", self.name);
        if let Some(budget) = &self.budget {
            budget.used.fetch_sub(n, Ordering::Relaxed);
        }
    }

    /// Charges `n` for the lifetime of the result.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    pub fn charge(self: &Arc<Self>, n: u64) -> Result<Charge, OverLimit> {
        self.take(n)?;
        Ok(Charge { stock: Arc::clone(self), amount: n })
    }

    /// Amount held.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Number of refusals.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

/// A resource that a port spends at a limited rate.
#[derive(Debug)]
pub struct Rate {
    name: &'static str,
    /// Limit per second; 0: none permitted.
    limit: AtomicU64,
    /// Length of a burst at the limit: a change of the limit scales the burst.
    room: Ns,
    /// Time at which the bucket is full again (theoretical arrival time); an [`Instant`].
    full_ns: AtomicU64,
    spent: AtomicU64,
    refused: AtomicU64,
}

impl Rate {
    /// Creates a rate of `limit` per second with a burst of `burst`. A change of the limit scales
    /// the burst, which is at least one.
    pub fn new(name: &'static str, limit: u64, burst: u64) -> Self {
        let zero = || AtomicU64::new(0);
        let room = each(limit).unwrap_or(Ns::ZERO) * burst;
        let limit = AtomicU64::new(limit);
        Self { name, limit, room, full_ns: zero(), spent: zero(), refused: zero() }
    }

    /// Spends one, if available at `now` (any monotonic clock, always the same one). A refusal
    /// is counted.
    pub fn spend(&self, now: Instant) -> bool {
        self.spend_together(1, now)
    }

    /// Spends `count` that cannot be separated, if one is available at `now`: the others may exceed
    /// the burst, and delay later ones. A refusal is counted as `count`.
    pub fn spend_together(&self, count: u64, now: Instant) -> bool {
        let limit = self.limit.load(Ordering::Relaxed);
        let spend = |full: u64| {
            let each = each(limit)?;
            let full = Instant::from_ns(full).max(now);
            let is_available = full + each - now <= self.room.max(each);
            is_available.then_some((full + each * count).ns())
        };
        let spent = self.full_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend).is_ok();
        let total = if spent { &self.spent } else { &self.refused };
        total.fetch_add(count, Ordering::Relaxed);
        spent
    }

    /// Spends `count` more unconditionally, for work that was more expensive than expected.
    pub fn charge(&self, count: u64, now: Instant) {
        let limit = self.limit.load(Ordering::Relaxed);
        let add = each(limit).unwrap_or(Ns::ZERO) * count;
        let owe = |full: u64| Some((Instant::from_ns(full).max(now) + add).ns());
        let _ = self.full_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, owe);
        self.spent.fetch_add(count, Ordering::Relaxed);
    }

    /// Time at which one is available; not later than `now` if one is available now.
    pub fn next(&self, now: Instant) -> Instant {
        let limit = self.limit.load(Ordering::Relaxed);
        let Some(each) = each(limit) else { return Instant::NEVER };
        let full = Instant::from_ns(self.full_ns.load(Ordering::Relaxed)).max(now);
        (full + each - self.room.max(each)).max(now)
    }

    /// Number spent.
    pub fn spent(&self) -> u64 {
        self.spent.load(Ordering::Relaxed)
    }

    /// Number of refusals.
    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

/// The time for one at `limit` per second. `None`: none is permitted.
fn each(limit: u64) -> Option<Ns> {
    1_000_000_000_u64.checked_div(limit).map(Ns::new)
}

/// One entry of an account, for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name in `ctl` and in the configuration.
    pub name: &'static str,
    /// Amount in use; for a rate: spent so far.
    pub used: u64,
    /// Limit; for a rate: per second.
    pub limit: u64,
    /// Number of refusals.
    pub refused: u64,
    /// Whether it is a rate.
    pub per_second: bool,
}

/// The budgets of the process, shared by the ports' stocks.
#[derive(Clone, Debug)]
pub struct Budgets {
    /// Bytes of address space for peers' memory.
    pub mapped_bytes: Arc<Budget>,
    /// Mappings (`vm.max_map_count`).
    pub mappings: Arc<Budget>,
    /// File descriptors (`RLIMIT_NOFILE`).
    pub descriptors: Arc<Budget>,
    /// Bytes of frames held for full destinations.
    pub held_bytes: Arc<Budget>,
}

impl Budgets {
    /// Creates the budgets of a process with `mapped_bytes` of address space, `mappings` and
    /// `descriptors` for its ports.
    pub fn new(mapped_bytes: u64, mappings: u64, descriptors: u64) -> Self {
        let budget = |limit, small| Arc::new(Budget::new(limit, small));
        Self {
            mapped_bytes: budget(mapped_bytes, 64 << 30),
            mappings: budget(mappings, 16),
            descriptors: budget(descriptors, 64),
            held_bytes: budget(64 << 20, 64 << 10),
        }
    }

    /// All budgets, with the name of the accounts' entries that share them.
    pub fn entries(&self) -> [(&'static str, &Budget); 4] {
        let Self { mapped_bytes, mappings, descriptors, held_bytes } = self;
        let [bytes, maps, fds, _, held, ..] = NAMES;
        [(bytes, mapped_bytes), (maps, mappings), (fds, descriptors), (held, held_bytes)]
    }
}

/// The names of an account's entries, in order: stocks, then rates.
pub const NAMES: [&str; 11] = [
    "mapped-bytes",
    "mappings",
    "descriptors",
    "held-frames",
    "held-bytes",
    "messages",
    "connections",
    "announcements",
    "log-lines",
    "flood-copies",
    "evpn-addresses",
];

/// A port's account.
#[derive(Debug)]
pub struct Account {
    /// Mapped bytes of the peer's memory, file offsets included.
    pub mapped_bytes: Arc<Stock>,
    /// Mappings of the peer's memory.
    pub mappings: Arc<Stock>,
    /// File descriptors from the peer, and those of its connections.
    pub descriptors: Arc<Stock>,
    /// Frames held because this port is full, over all queues.
    pub held_frames: Arc<Stock>,
    /// Bytes of the held frames.
    pub held_bytes: Arc<Stock>,
    /// Messages of the control protocol (vhost-user).
    pub messages: Rate,
    /// Connections accepted or made.
    pub connections: Rate,
    /// Announcements (SEND_RARP) flooded for the peer.
    pub announcements: Rate,
    /// Log lines caused by the peer.
    pub log_lines: Rate,
    /// Copies of flooded frames, except one of each frame.
    pub flood_copies: Rate,
    /// Addresses announced to other hosts by EVPN.
    pub evpn_addresses: Rate,
    /// Frames from the peer, over all its queues: none is taken without tokens.
    pub rate_in: Limiter,
    /// Frames to the peer, over all its queues: held without tokens.
    pub rate_out: Limiter,
    /// Frames that the peer floods: broadcast, multicast, unknown addresses.
    pub storm: [Limiter; 3],
}

/// Default limits, for a switch of up to 4096 ports.
pub mod defaults {
    use crate::time::Ns;

    /// Bytes mapped: 4 TiB, more than the largest virtual machines have.
    pub const MAPPED_BYTES: u64 = 1 << 42;
    /// Mappings: twice the number of memory slots, for a table that replaces another.
    pub const MAPPINGS: u64 = 2 * 509;
    /// Descriptors: kick, call and err of 33 rings, memory files, and a few more.
    pub const DESCRIPTORS: u64 = 640;
    /// Frames held.
    pub const HELD_FRAMES: u64 = 1024;
    /// Bytes held: two of the longest bursts of a TAP, or four of a guest.
    pub const HELD_BYTES: u64 = 1 << 20;
    /// Messages per second, and burst. A front-end of 16 queue pairs needs about 150 to start.
    pub const MESSAGES: (u64, u64) = (4000, 8000);
    /// A longer message is charged one for each such time: at the default rate a tenth of a CPU.
    pub const MESSAGE_TIME: Ns = Ns::from_us(25);
    /// Connections per second, and burst.
    pub const CONNECTIONS: (u64, u64) = (10, 50);
    /// Announcements per second, and burst. QEMU sends five after a migration.
    pub const ANNOUNCEMENTS: (u64, u64) = (10, 20);
    /// Log lines per second, and burst.
    pub const LOG_LINES: (u64, u64) = (2, 16);
    /// Copies of flooded frames per second, and burst: a port sends 244 broadcasts per second to
    /// 4096 ports, or 10,000 to 100.
    pub const FLOOD_COPIES: (u64, u64) = (1_000_000, 1_000_000);
    /// Addresses announced by EVPN per second, and burst: as many as a port may have.
    pub const EVPN_ADDRESSES: (u64, u64) = (100, 4096);
}

impl Default for Account {
    /// An account with the default limits, without a budget of the process.
    fn default() -> Self {
        Self::with(None)
    }
}

impl Account {
    /// Creates an account with the default limits, as a share of `budgets`.
    pub fn new(budgets: &Budgets) -> Self {
        Self::with(Some(budgets))
    }

    fn with(budgets: Option<&Budgets>) -> Self {
        let [bytes, maps, fds, frames, held, rates @ ..] = NAMES;
        let [messages, connections, announcements, lines, copies, addresses] = rates;
        let of = |pick: fn(&Budgets) -> &Arc<Budget>| budgets.map(|all| Arc::clone(pick(all)));
        let stock = |name, limit, budget| Arc::new(Stock::new(name, limit, budget));
        let rate = |name, (limit, burst)| Rate::new(name, limit, burst);
        Self {
            mapped_bytes: stock(bytes, defaults::MAPPED_BYTES, of(|b| &b.mapped_bytes)),
            mappings: stock(maps, defaults::MAPPINGS, of(|b| &b.mappings)),
            descriptors: stock(fds, defaults::DESCRIPTORS, of(|b| &b.descriptors)),
            held_frames: stock(frames, defaults::HELD_FRAMES, None),
            held_bytes: stock(held, defaults::HELD_BYTES, of(|b| &b.held_bytes)),
            messages: rate(messages, defaults::MESSAGES),
            connections: rate(connections, defaults::CONNECTIONS),
            announcements: rate(announcements, defaults::ANNOUNCEMENTS),
            log_lines: rate(lines, defaults::LOG_LINES),
            flood_copies: rate(copies, defaults::FLOOD_COPIES),
            evpn_addresses: rate(addresses, defaults::EVPN_ADDRESSES),
            rate_in: Limiter::default(),
            rate_out: Limiter::default(),
            storm: Default::default(),
        }
    }

    fn stocks(&self) -> [&Stock; 5] {
        let Self { mapped_bytes, mappings, descriptors, held_frames, held_bytes, .. } = self;
        [mapped_bytes, mappings, descriptors, held_frames, held_bytes]
    }

    fn rates(&self) -> [&Rate; 6] {
        let Self { messages, connections, announcements, log_lines, .. } = self;
        let Self { flood_copies, evpn_addresses, .. } = self;
        [messages, connections, announcements, log_lines, flood_copies, evpn_addresses]
    }

    /// All entries.
    pub fn entries(&self) -> Vec<Entry> {
        let stocks = self.stocks().into_iter().map(|stock| Entry {
            name: stock.name,
            used: stock.used(),
            limit: stock.limit.load(Ordering::Relaxed),
            refused: stock.refused(),
            per_second: false,
        });
        let rates = self.rates().into_iter().map(|rate| Entry {
            name: rate.name,
            used: rate.spent(),
            limit: rate.limit.load(Ordering::Relaxed),
            refused: rate.refused(),
            per_second: true,
        });
        stocks.chain(rates).collect()
    }

    /// Sets the limit of the entry `name`, in its unit, for a rate per second; the amount in use
    /// does not change. False: unknown entry.
    pub fn set_limit(&self, name: &str, limit: u64) -> bool {
        let stock = self.stocks().into_iter().find(|s| s.name == name).map(|s| &s.limit);
        let found = stock.or(self.rates().into_iter().find(|r| r.name == name).map(|r| &r.limit));
        found.iter().for_each(|entry| entry.store(limit, Ordering::Relaxed));
        found.is_some()
    }
}

#[cfg(kani)]
mod proofs;
#[cfg(test)]
mod tests;
