//! Addresses that flap: that move back and forth between ports.
//!
//! Each entry has one more word, used when its address moves, and kept until the entry is removed:
//!
//! ```text
//!   | used 63 | reported 62 | blocked 61 | moves 60..48 | home 47..32 | time, s 31..0 |
//! ```
//!
//! *Home* is the port that had the address before the first of its moves. Only moves away from home
//! count: whoever forges an address must not have its owner's frames count as moves. An address
//! with more than [`FLAP_MOVES`] of them within [`FLAP_WINDOW_S`] *flaps*. A move that is refused
//! returns the address to its home. *Time* is when the moves began, or when the block ends.
//!
//! In a loop through two ports, frames of a sender behind one of them come back at the other, which
//! is refused; but what was flooded to the other comes back at the first, its home, endlessly. So
//! frames with a blocked source are not flooded to the port that was refused last: one of the two.

use std::sync::atomic::Ordering;

use super::{At, Fdb, PortId, Value, Writer, pack_key};

/// Moves of an address away from its home that are not flapping: a guest that migrates moves once,
/// and a fail-over a few times.
pub const FLAP_MOVES: u16 = 5;
/// Time in which these are counted, in seconds.
pub const FLAP_WINDOW_S: u32 = 10;
/// Time after which an address is at home where it moved to, in seconds: the usual ageing time.
const HOME_S: u32 = 300;

/// On what terms a port takes an address from another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// The other port's `mac=` lists the address, and this port's does not: it never moves.
    pub is_locked: bool,
    /// Whether this port's `mac=` lists the address: it always moves, and this is its home.
    pub is_owner: bool,
    /// Seconds for which an address that flaps is not taken; 0: it moves nevertheless.
    pub block_s: u32,
}

/// Result of a claim to an address that another port has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Claim {
    /// It moves.
    Move,
    /// It does not; the frame may pass.
    Keep,
    /// It does not, and the frame is to be dropped.
    Refuse,
}

/// An address that flaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flap {
    /// The port that had it before.
    pub home: PortId,
    /// Moves away from there, since they began.
    pub moves: u16,
    /// Seconds until it may move again; 0: it may.
    pub blocked_s: u32,
}

/// The word of an entry.
#[derive(Clone, Copy)]
pub(super) struct Moves(pub u64);

impl Moves {
    const USED: u64 = 1 << 63;
    const REPORTED: u64 = 1 << 62;
    const BLOCKED: u64 = 1 << 61;
    const COUNT: u64 = 0x1fff << 48;

    fn new(home: PortId, since_s: u32) -> Self {
        Self(Self::USED | u64::from(home.0) << 32 | u64::from(since_s))
    }

    fn has(self, flag: u64) -> bool {
        self.0 & flag != 0
    }

    fn home(self) -> PortId {
        PortId((self.0 >> 32) as u16)
    }

    fn count(self) -> u16 {
        ((self.0 & Self::COUNT) >> 48) as u16
    }

    fn time_s(self) -> u32 {
        self.0 as u32
    }

    /// One more move; the count stays at its maximum.
    fn counted(self) -> Self {
        if self.has(Self::COUNT) && self.0 & Self::COUNT == Self::COUNT {
            return self;
        }
        Self(self.0 + (1 << 48))
    }

    fn blocked_until(self, until_s: u32) -> Self {
        Self(self.0 & !u64::from(u32::MAX) | Self::BLOCKED | u64::from(until_s))
    }

    /// The state for a move at `now_s` from the port `from`.
    fn at(self, from: PortId, now_s: u32) -> Self {
        let age_s = now_s.saturating_sub(self.time_s());
        if !self.has(Self::USED) {
            return Self::new(from, now_s);
        }
        if self.has(Self::BLOCKED) {
            return if now_s < self.time_s() { self } else { Self::new(self.home(), now_s) };
        }
        if age_s <= FLAP_WINDOW_S {
            return self;
        }
        Self::new(if age_s <= HOME_S { self.home() } else { from }, now_s)
    }

    fn flap(self, now_s: u32) -> Option<Flap> {
        let is_blocked = self.has(Self::BLOCKED);
        let flaps = match is_blocked {
            true => now_s < self.time_s(),
            false => now_s.saturating_sub(self.time_s()) <= FLAP_WINDOW_S,
        };
        (flaps && self.count() > FLAP_MOVES).then(|| Flap {
            home: self.home(),
            moves: self.count(),
            blocked_s: if is_blocked { self.time_s() - now_s } else { 0 },
        })
    }
}

impl Fdb {
    /// Whether the address flaps at `now_s`; with the first such result for these moves, `true`.
    pub fn flap(&self, mac: [u8; 6], vlan: u16, now_s: u32) -> Option<(Flap, bool)> {
        let _writer = self.lock();
        let (at, _) = self.find(pack_key(mac, vlan))?;
        let moves = self.moves_at(at);
        let flap = moves.flap(now_s)?;
        self.set_moves(at, Moves(moves.0 | Moves::REPORTED));
        Some((flap, !moves.has(Moves::REPORTED)))
    }

    /// The port that a blocked address was refused last, to which its frames are not flooded.
    #[inline]
    pub fn refused(&self, mac: [u8; 6], vlan: u16, now_s: u32) -> Option<PortId> {
        if now_s >= self.blocks_end_s.load(Ordering::Relaxed) {
            return None;
        }
        let (at, _) = self.find(pack_key(mac, vlan))?;
        let is_blocked = self.flap_at(at, now_s).is_some_and(|flap| flap.blocked_s > 0);
        let refused = self.sets[at.set].refused.0[at.way].load(Ordering::Relaxed);
        is_blocked.then_some(PortId(refused as u16))
    }

    /// Decides whether the address at `at` moves to another port. Under the lock.
    pub(super) fn claim(
        &self,
        writer: &mut Writer,
        at: At,
        to: PortId,
        now_s: u32,
        terms: Terms,
    ) -> Claim {
        let from = self.value(at).port();
        let mut moves = self.moves_at(at).at(from, now_s);
        let Terms { is_locked, is_owner, block_s } = terms;
        if is_owner && moves.home() != to {
            moves = Moves::new(to, now_s);
        } else if is_locked && moves.home() != from {
            moves = Moves::new(from, now_s);
        }
        if moves.home() == to {
            self.set_moves(at, moves);
            return Claim::Move;
        }
        moves = moves.counted();
        let flaps = moves.count() > FLAP_MOVES;
        if flaps && block_s > 0 && !moves.has(Moves::BLOCKED) {
            moves = moves.blocked_until(now_s.saturating_add(block_s));
            self.blocks_end_s.fetch_max(moves.time_s(), Ordering::Relaxed);
        }
        self.set_moves(at, moves);
        if moves.has(Moves::BLOCKED) {
            self.sets[at.set].refused.0[at.way].store(u64::from(to.0), Ordering::Relaxed);
        }
        match (is_locked, block_s) {
            (true, 0) => Claim::Keep,
            (true, _) => Claim::Refuse,
            (false, 1..) if flaps => {
                self.send_home(writer, at, moves.home(), now_s);
                Claim::Refuse
            }
            _ => Claim::Move,
        }
    }

    /// Returns an address to its home, if that has room in its share of the table.
    fn send_home(&self, writer: &mut Writer, at: At, home: PortId, now_s: u32) {
        let value = self.value(at);
        if value.port() != home && self.learned_from(home) < self.port_limit {
            self.put_value(writer, at, value, Value::new(home, now_s));
        }
    }

    /// Forgets that addresses were at home at a port, which is removed or down.
    pub(super) fn forget_home(&self, port: PortId) {
        let is_its = |at: &At| {
            let moves = self.moves_at(*at);
            moves.has(Moves::USED) && moves.home() == port
        };
        for at in self.all_places().filter(is_its) {
            let _writer = self.lock();
            if is_its(&at) {
                self.set_moves(at, Moves(0));
            }
        }
    }

    pub(super) fn flap_at(&self, at: At, now_s: u32) -> Option<Flap> {
        self.moves_at(at).flap(now_s)
    }

    fn moves_at(&self, at: At) -> Moves {
        Moves(self.sets[at.set].moves.0[at.way].load(Ordering::Relaxed))
    }

    /// Under the lock.
    pub(super) fn set_moves(&self, at: At, moves: Moves) {
        self.sets[at.set].moves.0[at.way].store(moves.0, Ordering::Relaxed);
    }
}
