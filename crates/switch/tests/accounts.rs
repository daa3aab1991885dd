//! Every sequence of operations on small accounts: nothing is lost, and nothing is below zero.
//!
//! ```text
//!   port A ── Stock ──┐
//!                     ├── Budget of both
//!   port B ── Stock ──┘
//! ```
//! Beside the product's objects there is a plain count of what is held; in every state of every
//! sequence each stock and the budget must show exactly that, and a request is refused if, and only
//! if, a limit or the reserve says so.

use std::sync::Arc;

use switch::account::{Account, Budget, Charge, Rate, Stock};
use switch::time::{Instant, Ns};

/// The budget: 8, of which 2 are reserved for ports that hold at most 2.
const BUDGET: u64 = 8;
const SMALL: u64 = 2;
const LIMIT: u64 = 6;
const DEPTH: u32 = 6;

#[derive(Clone, Copy, Debug)]
enum Op {
    Take(usize, u64),
    /// Releases the oldest, or the latest charge.
    Release(usize, bool),
}

const OPS: [Op; 10] = [
    Op::Take(0, 1),
    Op::Take(0, 2),
    Op::Take(0, 5),
    Op::Take(0, u64::MAX),
    Op::Take(1, 1),
    Op::Take(1, 3),
    Op::Release(0, false),
    Op::Release(0, true),
    Op::Release(1, false),
    Op::Release(1, true),
];

fn run(sequence: &[Op]) -> u64 {
    let budget = Arc::new(Budget::new(BUDGET, SMALL));
    let stock = |name| Arc::new(Stock::new(name, LIMIT, Some(Arc::clone(&budget))));
    let stocks = [stock("a"), stock("b")];
    let mut held: [Vec<(u64, Charge)>; 2] = Default::default();
    let mut refused = [0, 0];
    for op in sequence {
        let sum = |held: &Vec<(u64, Charge)>| held.iter().map(|(n, _)| n).sum::<u64>();
        match *op {
            Op::Take(port, n) => {
                let holds = sum(&held[port]).checked_add(n).filter(|sum| *sum <= LIMIT);
                let all = sum(&held[0]) + sum(&held[1]);
                let permits = holds.is_some_and(|holds| {
                    all + n <= if holds <= SMALL { BUDGET } else { BUDGET - BUDGET / 4 }
                });
                match stocks[port].charge(n) {
                    Ok(charge) => {
                        assert!(permits, "{sequence:?}");
                        held[port].push((n, charge));
                    }
                    Err(over) => {
                        assert!(!permits, "{sequence:?}");
                        assert_eq!((over.wanted, over.process), (n, holds.is_some()));
                        refused[port] += 1;
                    }
                }
            }
            Op::Release(port, latest) if !held[port].is_empty() => {
                let at = if latest { held[port].len() - 1 } else { 0 };
                drop(held[port].remove(at));
            }
            Op::Release(..) => {}
        }
        for port in 0..2 {
            let stock = &stocks[port];
            assert_eq!((stock.used(), stock.refused()), (sum(&held[port]), refused[port]));
        }
        assert_eq!(budget.used(), sum(&held[0]) + sum(&held[1]), "{sequence:?}");
    }
    drop(held);
    assert_eq!((stocks[0].used(), stocks[1].used(), budget.used()), (0, 0, 0), "{sequence:?}");
    refused.iter().sum()
}

#[test]
fn every_sequence_of_charges_of_two_ports_is_accounted_exactly() {
    let mut refused = 0;
    for number in 0..OPS.len().pow(DEPTH) {
        let op = |i| OPS[number / OPS.len().pow(i) % OPS.len()];
        let sequence: [Op; DEPTH as usize] = std::array::from_fn(|i| op(i as u32));
        refused += run(&sequence);
    }
    assert!(refused > 0);
}

/// A limit below what is held refuses, and releases as before.
#[test]
fn every_limit_set_at_every_moment_keeps_what_is_held() {
    for held in 0..=6_u64 {
        for limit in 0..=7 {
            for more in 0..=7 {
                let account = Account::default();
                assert!(account.set_limit("mappings", 6));
                let charge = account.mappings.charge(held).unwrap();
                assert!(account.set_limit("mappings", limit));
                let taken = account.mappings.charge(more);
                assert_eq!(taken.is_ok(), held + more <= limit, "{held} {limit} {more}");
                drop(charge);
                assert_eq!(account.mappings.used(), taken.as_ref().map_or(0, |_| more));
                drop(taken);
                assert_eq!(account.mappings.used(), 0);
            }
        }
    }
}

/// Steps of time and requests in every order: a rate permits at most its burst and its rate in any
/// span, and one is available when it says so.
#[test]
fn every_sequence_of_requests_at_a_rate_stays_within_burst_and_rate() {
    const EACH: u64 = 1_000_000;
    const BURST: u64 = 3;
    for number in 0..3_u64.pow(10) {
        let rate = Rate::new("messages", 1_000_000_000 / EACH, BURST);
        let mut now = Instant::START + Ns::from_secs(1);
        let (mut spent, mut refused) = (Vec::new(), 0);
        for i in 0..10 {
            match number / 3_u64.pow(i) % 3 {
                0 => now += Ns::new(EACH / 2),
                1 => now += Ns::new(3 * EACH),
                _ => {
                    let due = rate.next(now) <= now;
                    assert_eq!(rate.spend(now), due);
                    if due { spent.push(now) } else { refused += 1 }
                }
            }
            assert_eq!((rate.spent(), rate.refused()), (spent.len() as u64, refused));
        }
        for (i, from) in spent.iter().enumerate() {
            for (n, to) in (1..).zip(&spent[i..]) {
                let span = (*to - *from).get();
                assert!(n <= BURST + span / EACH, "{number}: {n} in {span} ns");
            }
        }
        // Never lost: a burst is available after as long as it takes.
        now += Ns::new(BURST * EACH);
        assert_eq!((0..9).filter(|_| rate.spend(now)).count() as u64, BURST);
    }
}
