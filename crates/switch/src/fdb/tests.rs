use std::collections::HashMap;
use std::sync::atomic::AtomicBool;

use super::*;
use proptest::prelude::*;

const KEY: [u64; 2] = [0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210];

fn mac(i: u32) -> [u8; 6] {
    let [a, b, c, d] = i.to_be_bytes();
    [2, 0, a, b, c, d]
}

fn port(i: u16) -> PortId {
    PortId(i)
}

#[derive(Clone, Debug)]
enum Op {
    Learn { mac: u32, vlan: u16, port: u16 },
    Lookup { mac: u32, vlan: u16 },
    AddStatic { mac: u32, vlan: u16, port: u16 },
    Remove { mac: u32, vlan: u16 },
    FlushPort(u16),
    FlushLearned(u16),
    MoveLearned { from: u16, to: u16 },
    Wait(u32),
    Age,
    SetAgeing(u32),
}

fn op() -> impl Strategy<Value = Op> {
    let p = 0_u16..4;
    let at = || (0_u32..24, 0_u16..2);
    let at_port = || (0_u32..24, 0_u16..2, 0_u16..4);
    prop_oneof![
        20 => at_port().prop_map(|(mac, vlan, port)| Op::Learn { mac, vlan, port }),
        10 => at().prop_map(|(mac, vlan)| Op::Lookup { mac, vlan }),
        2 => at_port().prop_map(|(mac, vlan, port)| Op::AddStatic { mac, vlan, port }),
        2 => at().prop_map(|(mac, vlan)| Op::Remove { mac, vlan }),
        1 => p.clone().prop_map(Op::FlushPort),
        1 => p.clone().prop_map(Op::FlushLearned),
        1 => (p.clone(), p).prop_map(|(from, to)| Op::MoveLearned { from, to }),
        5 => (0_u32..5).prop_map(Op::Wait),
        2 => Just(Op::Age),
        1 => (0_u32..20).prop_map(Op::SetAgeing),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Known {
    port: u16,
    seen: u32,
    is_static: bool,
}

/// Expected results of a table that is never full.
struct Oracle {
    known: HashMap<(u32, u16), Known>,
    ageing: u32,
    limit: usize,
}

impl Oracle {
    fn learned_from(&self, port: u16) -> usize {
        self.known.values().filter(|k| k.port == port && !k.is_static).count()
    }

    fn expired(&self, known: &Known, now: u32) -> bool {
        !known.is_static && self.ageing != 0 && now - known.seen > self.ageing
    }

    fn learn(&mut self, at: (u32, u16), from: u16, now: u32) -> Learned {
        let old = self.known.get(&at).copied();
        if let Some(k) = old.filter(|k| k.is_static) {
            return Learned::Static { at: port(k.port) };
        }
        let new = Known { port: from, seen: now, is_static: false };
        if old.is_some_and(|k| k.port == from) {
            self.known.insert(at, new);
            return Learned::Known;
        }
        if self.learned_from(from) >= self.limit {
            return Learned::LimitReached;
        }
        self.known.insert(at, new);
        match old {
            Some(k) if !self.expired(&k, now) => Learned::Moved { from: port(k.port) },
            _ => Learned::New,
        }
    }

    fn lookup(&self, at: (u32, u16), now: u32) -> Option<PortId> {
        let known = self.known.get(&at)?;
        (!self.expired(known, now)).then_some(port(known.port))
    }

    fn retain(&mut self, keep: impl Fn(&Known) -> bool) -> usize {
        let before = self.known.len();
        self.known.retain(|_, k| keep(k));
        before - self.known.len()
    }
}

/// Runs `ops` against table and oracle. A table that may get full may have fewer entries than the
/// oracle, but no others.
fn model(capacity: usize, limit: u32, key: [u64; 2], ops: &[Op]) {
    let ageing = 10;
    let fdb = Fdb::new(capacity, key, ageing, limit);
    let mut oracle = Oracle { known: HashMap::new(), ageing, limit: limit as usize };
    let mut now = 100;
    for op in ops {
        step(&fdb, &mut oracle, &mut now, op);
        // Entries evicted for lack of space are removed here too.
        fdb.set_ageing(0);
        let there: HashMap<_, _> =
            fdb.entries(now).into_iter().map(|e| ((e.mac.0, e.vlan), e)).collect();
        fdb.set_ageing(oracle.ageing);
        if capacity >= 1024 {
            assert_eq!(there.len(), oracle.known.len());
        }
        oracle.known.retain(|(m, vlan), _| there.contains_key(&(mac(*m), *vlan)));
        assert_eq!(there.len(), oracle.known.len(), "no entry that was never learned");
        for ((m, vlan), known) in &oracle.known {
            let entry = there[&(mac(*m), *vlan)];
            let got = (entry.port.0, entry.age_s, entry.is_static);
            assert_eq!(got, (known.port, now - known.seen, known.is_static));
        }
        for p in 0..4 {
            let learned = oracle.learned_from(p);
            assert!(learned <= limit as usize);
            assert_eq!(fdb.learned_from(port(p)) as usize, learned);
        }
        let active = (0..4).filter(|p| oracle.learned_from(*p) > 0).count();
        assert_eq!(fdb.lock().ports_active as usize, active);
        let statics = oracle.known.values().filter(|known| known.is_static).count();
        assert_eq!(fdb.statics() as usize, statics);
    }
}

fn step(fdb: &Fdb, oracle: &mut Oracle, now: &mut u32, op: &Op) {
    match *op {
        Op::Learn { mac: m, vlan, port: p } => {
            let before = oracle.known.clone();
            let want = oracle.learn((m, vlan), p, *now);
            let got = fdb.learn(mac(m), vlan, port(p), *now);
            if got == Learned::TableFull {
                assert_eq!(want, Learned::New);
                assert!(oracle.known.len() > 8, "there was room");
                oracle.known = before;
            } else {
                assert_eq!(got, want);
            }
        }
        Op::Lookup { mac: m, vlan } => {
            assert_eq!(fdb.lookup(mac(m), vlan, *now), oracle.lookup((m, vlan), *now));
        }
        Op::AddStatic { mac: m, vlan, port: p } => {
            if fdb.add_static(mac(m), vlan, port(p), *now).is_ok() {
                let known = Known { port: p, seen: *now, is_static: true };
                oracle.known.insert((m, vlan), known);
            }
        }
        Op::Remove { mac: m, vlan } => {
            assert_eq!(fdb.remove(mac(m), vlan), oracle.known.remove(&(m, vlan)).is_some());
        }
        Op::FlushPort(p) => {
            assert_eq!(fdb.flush_port(port(p)), oracle.retain(|k| k.port != p));
        }
        Op::FlushLearned(p) => {
            let want = oracle.retain(|k| k.port != p || k.is_static);
            assert_eq!(fdb.flush_learned(port(p)), want);
        }
        Op::MoveLearned { from, to } if from != to => {
            let is_its = |k: &Known| k.port == from && !k.is_static;
            let all = oracle.known.values().filter(|k| is_its(k)).count();
            let room = oracle.limit - oracle.learned_from(to);
            let gone = |(m, vlan): &(u32, u16)| fdb.lookup(mac(*m), *vlan, 0).is_none();
            assert_eq!(fdb.move_learned(port(from), port(to)), all.min(room));
            // Which of them have no room is not said.
            oracle.known.retain(|at, k| !is_its(k) || !gone(at));
            oracle.known.values_mut().filter(|k| is_its(k)).for_each(|k| k.port = to);
        }
        Op::MoveLearned { .. } => {}
        Op::Wait(s) => *now += s,
        Op::Age => {
            let ageing = oracle.ageing;
            let keep = |k: &Known| k.is_static || ageing == 0 || *now - k.seen <= ageing;
            assert_eq!(fdb.age(*now), oracle.retain(keep));
        }
        Op::SetAgeing(s) => {
            fdb.set_ageing(s);
            oracle.ageing = s;
        }
    }
}

proptest! {
    #[test]
    fn a_table_with_space_does_what_a_map_does(
        key: [u64; 2], limit in 1_u32..30, ops in prop::collection::vec(op(), 0..300)
    ) {
        model(1024, limit, key, &ops);
    }

    #[test]
    fn a_full_table_evicts_but_is_never_wrong(
        key: [u64; 2], two_sets: bool, ops in prop::collection::vec(op(), 0..300)
    ) {
        model(if two_sets { 16 } else { 8 }, 9, key, &ops);
    }

    #[test]
    fn macs_print_and_parse(bytes: [u8; 6]) {
        prop_assert_eq!(Mac(bytes).to_string().parse(), Ok(Mac(bytes)));
    }
}

#[test]
fn bad_macs_are_refused() {
    for text in [
        "",
        "02:00:00:00:00",
        "02:00:00:00:00:01:02",
        "2:0:0:0:0:1",
        "02-00-00-00-00-01",
        "02:00:00:00:00:0g",
        "02:00:00:00:00:+1",
        "020000000001",
    ] {
        assert_eq!(text.parse::<Mac>(), Err(ParseMacError), "{text}");
    }
    assert!("02:00:00:AA:bb:01".parse::<Mac>().is_ok());
}

#[test]
fn group_and_zero_sources_are_never_learned() {
    let fdb = Fdb::new(64, KEY, 300, 10);
    assert_eq!(fdb.learn([0xff; 6], 0, port(1), 0), Learned::Invalid);
    assert_eq!(fdb.learn([0; 6], 0, port(1), 0), Learned::Invalid);
    assert_eq!(fdb.lookup([0xff; 6], 0, 0), None);
    assert!(fdb.entries(0).is_empty());
}

#[test]
fn clocks_may_differ_and_wrap_nothing() {
    let fdb = Fdb::new(64, KEY, 300, 10);
    fdb.learn(mac(1), 0, port(u16::MAX), 1000);
    assert_eq!(fdb.learn(mac(1), 0, port(u16::MAX), 990), Learned::Known, "a slower worker");
    assert_eq!(fdb.lookup(mac(1), 0, 990), Some(port(u16::MAX)));
    assert_eq!(fdb.lookup(mac(1), 0, 1300), Some(port(u16::MAX)));
    assert_eq!(fdb.lookup(mac(1), 0, 1301), None);
    assert_eq!(fdb.learn(mac(1), 0, port(u16::MAX), u32::MAX), Learned::Known, "fresh again");
    assert_eq!(fdb.lookup(mac(1), 0, u32::MAX), Some(port(u16::MAX)));
}

#[test]
fn vlans_are_apart() {
    let fdb = Fdb::new(64, KEY, 300, 10);
    fdb.learn(mac(1), 0, port(1), 0);
    fdb.learn(mac(1), 4095, port(2), 0);
    assert_eq!(fdb.lookup(mac(1), 0, 0), Some(port(1)));
    assert_eq!(fdb.lookup(mac(1), 4095, 0), Some(port(2)));
    assert_eq!(fdb.lookup(mac(1), 1, 0), None);
}

#[test]
fn static_entries_win_until_only_they_are_left() {
    let fdb = Fdb::new(8, KEY, 300, 100);
    for i in 0..8 {
        assert_eq!(fdb.learn(mac(i), 0, port(1), i), Learned::New);
    }
    for i in 0..8 {
        assert_eq!(fdb.add_static(mac(100 + i), 0, port(2), 10), Ok(()));
        assert_eq!(fdb.lookup(mac(i), 0, 10), None, "the oldest was evicted");
        assert_eq!(fdb.learned_from(port(1)), 7 - i);
    }
    assert_eq!(fdb.add_static(mac(200), 0, port(2), 10), Err(TableFull));
    assert_eq!(fdb.learn(mac(200), 0, port(1), 10), Learned::TableFull);
    assert_eq!(fdb.learn(mac(100), 0, port(3), 10), Learned::Static { at: port(2) });
    assert_eq!(fdb.lookup(mac(100), 0, u32::MAX), Some(port(2)), "does not age");
    assert_eq!(fdb.flush_port(port(2)), 8);
}

#[test]
fn a_flooding_port_is_limited_and_displaces_no_one() {
    let fdb = Fdb::new(4096, KEY, 300, 1000);
    for p in 1..=4 {
        for i in 0..100 {
            let address = mac(u32::from(p) * 1000 + i);
            assert_eq!(fdb.learn(address, 0, port(p), 0), Learned::New);
        }
    }
    let mut new = 0;
    for i in 0..200_000 {
        match fdb.learn(mac(1_000_000 + i), 0, port(9), 1) {
            Learned::New => new += 1,
            other => assert_eq!(other, Learned::LimitReached),
        }
    }
    assert_eq!((new, fdb.learned_from(port(9))), (1000, 1000));
    for p in 1..=4 {
        for i in 0..100 {
            let address = mac(u32::from(p) * 1000 + i);
            assert_eq!(fdb.lookup(address, 0, 1), Some(port(p)));
        }
    }
    // After ageing the flooder gets its share again, not more.
    assert_eq!(fdb.age(302), 1400);
    assert_eq!(fdb.learned_from(port(9)), 0);
}

#[test]
fn newcomers_get_a_fair_share_of_a_full_table() {
    // Four hoarders may take all of it; then 12 others arrive, each with 50 addresses, less than
    // the fair share of 64.
    let fdb = Fdb::new(1024, KEY, 0, 1024);
    for i in 0..20_000 {
        fdb.learn(mac(i), 0, port(i as u16 % 4), i);
    }
    let total: u32 = (0..4).map(|p| fdb.learned_from(port(p))).sum();
    assert!(total > 950, "two sets fill the table: {total}");
    let mut missing = 0;
    for p in 10..22 {
        for i in 0..50 {
            let address = mac(1_000_000 + u32::from(p) * 1000 + i);
            missing += u32::from(fdb.learn(address, 0, port(p), 30_000) != Learned::New);
        }
    }
    assert_eq!(missing, 0);
    for p in 10..22 {
        assert_eq!(fdb.learned_from(port(p)), 50, "and keep them");
    }
}

#[test]
fn a_hoarder_replaces_its_own_oldest() {
    let fdb = Fdb::new(8, KEY, 0, 100);
    fdb.learn(mac(50), 0, port(2), 0);
    for i in 0..20 {
        assert_eq!(fdb.learn(mac(i), 0, port(1), 10 + i), Learned::New);
    }
    assert_eq!(fdb.lookup(mac(50), 0, 30), Some(port(2)), "older, but within its share");
    assert_eq!(fdb.lookup(mac(19), 0, 30), Some(port(1)));
    assert_eq!(fdb.lookup(mac(12), 0, 30), None);
}

#[test]
fn a_key_read_with_another_generation_is_ignored() {
    // A reader that is interrupted between its two loads.
    let fdb = Fdb::new(8, KEY, 300, 100);
    fdb.learn(mac(1), 0, port(1), 0);
    let (at, value) = fdb.find(pack_key(mac(1), 0)).unwrap();
    let word = &fdb.sets[at.set].values.0[at.way];
    word.store(value.next_generation().0, Ordering::Relaxed);
    assert_eq!(fdb.lookup(mac(1), 0, 0), None, "not valid");
    assert_eq!(Value(Value::GENERATION | Value::VALID).next_generation().0, 0, "wraps");
}

#[test]
fn readers_never_see_the_port_of_another_address() {
    // One set, 64 addresses that expire at once: entries are reused constantly. Address i is only
    // ever at ports i and i + 100.
    let fdb = Fdb::new(8, KEY, 1, 1000);
    let (now, stop) = (AtomicU32::new(10), AtomicBool::new(false));
    let found = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let mut readers = Vec::new();
        for _ in 0..2 {
            readers.push(scope.spawn(|| {
                let mut i = 0;
                while !stop.load(Ordering::Relaxed) {
                    i = (i + 1) % 64;
                    // Time zero: nothing counts as expired.
                    if let Some(p) = fdb.lookup(mac(i), 0, 0) {
                        assert_eq!(u32::from(p.0) % 100, i);
                        found.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }));
        }
        let writers: Vec<_> = (0..2_u16)
            .map(|w| {
                let (fdb, now) = (&fdb, &now);
                scope.spawn(move || {
                    for n in 0..300_000_u32 {
                        let i = n.wrapping_mul(0x9e37_79b9) >> 26;
                        let at = now.fetch_add(2, Ordering::Relaxed);
                        fdb.learn(mac(i), 0, port(i as u16 + 100 * w), at);
                        if n % 64 == 0 {
                            fdb.remove(mac(i), 0);
                        }
                    }
                })
            })
            .collect();
        let ok = writers.into_iter().all(|w| w.join().is_ok());
        stop.store(true, Ordering::Relaxed);
        assert!(ok && readers.into_iter().all(|r| r.join().is_ok()));
    });
    assert!(found.load(Ordering::Relaxed) > 0);
    fdb.set_ageing(0);
    let entries = fdb.entries(0);
    for p in 0..200 {
        let want = entries.iter().filter(|e| e.port == port(p)).count();
        assert_eq!(fdb.learned_from(port(p)) as usize, want, "counts are exact");
    }
}

#[test]
fn workers_that_learn_the_same_address_agree() {
    // A worker that misses an address added concurrently may get the limit's error.
    let fdb = Fdb::new(1024, KEY, 300, 101);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for now in 0..200 {
                    for i in 0..100 {
                        let learned = fdb.learn(mac(i), 0, port(1), now);
                        assert!(matches!(learned, Learned::New | Learned::Known));
                    }
                }
            });
        }
    });
    assert_eq!((fdb.entries(199).len(), fdb.learned_from(port(1))), (100, 100));
}

mod flap;
