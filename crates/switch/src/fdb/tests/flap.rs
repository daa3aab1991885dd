//! Addresses that move between ports.

use super::*;

const BLOCK: Terms = Terms { is_locked: false, is_owner: false, block_s: 60 };
const LOCKED: Terms = Terms { is_locked: true, is_owner: false, block_s: 0 };
const OWNER: Terms = Terms { is_locked: false, is_owner: true, block_s: 0 };
const REFUSED: Learned = Learned::Stays { drop: true };

fn moved(from: u16) -> Learned {
    Learned::Moved { from: port(from) }
}

struct Rig(Fdb);

impl Rig {
    /// The address is at port 0.
    fn new() -> Self {
        let fdb = Fdb::new(1024, [1, 2], 300, 4);
        assert_eq!(fdb.learn(mac(1), 0, port(0), 100), Learned::New);
        Self(fdb)
    }

    fn send(&self, from: u16, now_s: u32, terms: Terms) -> Learned {
        self.0.learn_on(mac(1), 0, port(from), now_s, |_| terms)
    }

    /// Sends from each of these ports in turn, more often than an address may move.
    fn contest(&self, ports: [u16; 2], now_s: u32, terms: [Terms; 2]) {
        for _ in 0..3 * FLAP_MOVES {
            self.send(ports[0], now_s, terms[0]);
            self.send(ports[1], now_s, terms[1]);
        }
    }

    fn at(&self, now_s: u32) -> Option<u16> {
        self.0.lookup(mac(1), 0, now_s).map(|port| port.0)
    }

    fn flap(&self, now_s: u32) -> Option<(u16, u16, u32)> {
        let entry = self.0.entries(now_s).into_iter().find(|e| e.mac.0 == mac(1)).unwrap();
        entry.flap.map(|flap| (flap.home.0, flap.moves, flap.blocked_s))
    }
}

#[test]
fn moves_away_from_home_count_and_returns_do_not() {
    let rig = Rig::new();
    for n in 1..=FLAP_MOVES {
        assert_eq!(rig.send(1, 101, Terms::default()), moved(0));
        assert_eq!((rig.flap(101), rig.0.flap(mac(1), 0, 101)), (None, None), "{n}");
        assert_eq!(rig.send(0, 101, BLOCK), moved(1), "home is not refused");
    }
    assert_eq!(rig.send(1, 102, Terms::default()), moved(0));
    let flap = Flap { home: port(0), moves: FLAP_MOVES + 1, blocked_s: 0 };
    assert_eq!(rig.0.flap(mac(1), 0, 102), Some((flap, true)));
    assert_eq!(rig.0.flap(mac(1), 0, 102), Some((flap, false)), "reported once");
    assert_eq!(rig.flap(111), Some((0, FLAP_MOVES + 1, 0)));
    assert_eq!(rig.flap(112), None, "the window is over");
}

#[test]
fn address_that_flaps_is_returned_home_and_recovers_after_the_time() {
    let rig = Rig::new();
    rig.contest([1, 2], 100, [BLOCK, BLOCK]);
    assert_eq!(rig.at(100), Some(0));
    for from in [1, 2] {
        assert_eq!(rig.send(from, 159, BLOCK), REFUSED);
    }
    assert_eq!((rig.at(159), rig.send(0, 159, BLOCK)), (Some(0), Learned::Known));
    assert_eq!(rig.flap(159).map(|flap| flap.2), Some(1));
    assert_eq!(rig.flap(160), None);
    assert_eq!(rig.send(2, 160, BLOCK), moved(0), "a guest that migrated");
    assert_eq!(rig.at(160), Some(2));
}

#[test]
fn home_stays_while_moves_continue_and_follows_an_address_that_remained() {
    let rig = Rig::new();
    assert_eq!(rig.send(1, 100, BLOCK), moved(0));
    // The thief waits for a new window: its owner's return is still none of the moves.
    rig.contest([0, 1], 150, [BLOCK, BLOCK]);
    assert_eq!((rig.at(150), rig.send(1, 150, BLOCK)), (Some(0), REFUSED));
    // It migrated, and was used there.
    let rig = Rig::new();
    assert_eq!(rig.send(1, 100, BLOCK), moved(0));
    for now_s in (200..600).step_by(100) {
        assert_eq!(rig.send(1, now_s, BLOCK), Learned::Known);
    }
    rig.contest([0, 1], 501, [BLOCK, BLOCK]);
    assert_eq!((rig.at(501), rig.send(0, 501, BLOCK)), (Some(1), REFUSED));
}

#[test]
fn locked_address_never_moves_and_its_owner_always_takes_it() {
    let rig = Rig::new();
    assert_eq!(rig.send(1, 100, LOCKED), Learned::Stays { drop: false });
    assert_eq!(rig.send(1, 100, Terms { block_s: 1, ..LOCKED }), REFUSED, "at the first frame");
    assert_eq!(rig.at(100), Some(0));
    // Another port was first, and is at home until the owner comes.
    let rig = Rig::new();
    rig.contest([2, 0], 100, [OWNER, BLOCK]);
    rig.send(2, 100, OWNER);
    assert_eq!((rig.at(100), rig.send(0, 100, BLOCK)), (Some(2), REFUSED));
}

#[test]
fn home_at_a_port_that_is_removed_or_down_is_forgotten() {
    for remove in [Fdb::flush_port, Fdb::flush_learned] {
        let rig = Rig::new();
        assert_eq!(rig.send(1, 100, BLOCK), moved(0));
        remove(&rig.0, port(0));
        rig.contest([2, 1], 100, [BLOCK, BLOCK]);
        assert_eq!((rig.at(100), rig.send(2, 100, BLOCK)), (Some(1), REFUSED));
    }
}

#[test]
fn entry_that_is_removed_takes_its_moves_with_it() {
    let rig = Rig::new();
    rig.contest([1, 0], 100, [BLOCK, BLOCK]);
    assert!(rig.flap(100).is_some() && rig.0.remove(mac(1), 0));
    assert_eq!(rig.send(1, 100, BLOCK), Learned::New);
    assert_eq!(rig.flap(100), None);
}

#[test]
fn returned_address_does_not_exceed_its_ports_limit() {
    let rig = Rig::new();
    for i in 2..5 {
        assert_eq!(rig.0.learn(mac(i), 0, port(0), 100), Learned::New);
    }
    rig.send(1, 100, BLOCK);
    assert_eq!(rig.0.learn(mac(5), 0, port(0), 100), Learned::New, "the share is used up");
    rig.contest([2, 1], 100, [BLOCK, BLOCK]);
    assert!(rig.at(100).is_some_and(|at| at != 0));
    assert_eq!(rig.0.learned_from(port(0)), 4);
}
