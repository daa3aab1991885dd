use super::*;
use proptest::prelude::*;

/// A second after the start.
const SECOND: Instant = Instant::from_ns(1_000_000_000);

#[test]
fn stock_is_charged_up_to_its_limit_and_released() {
    let stock = Arc::new(Stock::new("mappings", 10, None));
    let first = stock.charge(6).unwrap();
    let error = stock.charge(5).unwrap_err();
    let over = OverLimit { name: "mappings", wanted: 5, used: 6, limit: 10, process: false };
    assert_eq!((error, stock.used(), stock.refused()), (over, 6, 1));
    assert!(error.to_string().contains("mappings: 5 more than the 6 in use"), "{error}");
    drop(first);
    assert_eq!(stock.used(), 0);
    assert!(stock.take(10).is_ok() && stock.take(u64::MAX).is_err());
    stock.give_back(10);
}

#[test]
fn one_port_cannot_use_up_what_others_need_to_start() {
    let budget = Arc::new(Budget::new(100, 5));
    let stock = || Arc::new(Stock::new("mappings", 1000, Some(Arc::clone(&budget))));
    let (greedy, honest) = (stock(), stock());
    let taken: Vec<_> = (0..).map_while(|_| greedy.charge(1).ok()).collect();
    assert_eq!((taken.len(), budget.used()), (75, 75), "a quarter is left");
    let error = greedy.charge(1).unwrap_err();
    assert!(error.process && error.to_string().contains("all ports of 100"), "{error}");
    let first = honest.charge(5).unwrap();
    assert!(honest.charge(1).is_err(), "the reserve is only for small amounts");
    drop((taken, first));
    assert_eq!((budget.used(), greedy.used(), honest.used()), (0, 0, 0));
}

#[test]
fn rate_permits_a_burst_and_then_its_limit_per_second() {
    let rate = Rate::new("messages", 10, 5);
    let spend = |from: u64, to: u64| {
        (from..to).filter(|ms| rate.spend(Instant::START + Ns::from_ms(*ms))).count()
    };
    assert_eq!(spend(1000, 1050), 5);
    assert_eq!(spend(1050, 3050), 20);
    assert_eq!((rate.spent(), rate.refused()), (25, 2025));
    // It returns when one is available again.
    let now = Instant::START + Ns::from_ms(3050);
    let next = rate.next(now);
    assert!(next > now && !rate.spend(next - Ns::new(1)) && rate.spend(next));
    // After an idle time a burst is available again, not more.
    assert_eq!((0..20).filter(|_| rate.spend(SECOND + Ns::from_secs(99))).count(), 5);
    let none = Rate::new("messages", 0, 5);
    assert!(!none.spend(SECOND) && none.next(SECOND) == Instant::NEVER);
}

#[test]
fn limits_are_set_by_name_while_they_are_in_use() {
    let account = Account::new(&Budgets::new(1 << 46, 60_000, 100_000));
    assert_eq!(account.entries().iter().map(|entry| entry.name).collect::<Vec<_>>(), NAMES);
    for name in NAMES {
        assert!(account.set_limit(name, 3), "{name}");
    }
    assert!(account.entries().iter().all(|entry| entry.limit == 3));
    assert!(!account.set_limit("mapings", 3));
    let held = account.mappings.charge(3).unwrap();
    account.set_limit("mappings", 1);
    assert!(account.mappings.charge(1).is_err());
    drop(held);
    assert!(account.mappings.charge(1).is_ok());
}

#[test]
fn burst_of_a_rate_follows_its_limit() {
    let account = Account::default();
    let (limit, burst) = defaults::MESSAGES;
    for (limit, burst) in [(limit, burst), (limit / 100, burst / 100), (1, burst / limit)] {
        assert!(account.set_limit("messages", limit));
        let now = SECOND + Ns::new(account.messages.full_ns.load(Ordering::Relaxed));
        let spent = (0..2 * burst).filter(|_| account.messages.spend(now)).count() as u64;
        assert_eq!(spent, burst, "at {limit} a second");
    }
    // At least one, if the burst is less than a second.
    let slow = Rate::new("messages", 1000, 10);
    slow.limit.store(1, Ordering::Relaxed);
    assert_eq!((0..20).filter(|_| slow.spend(SECOND)).count(), 1);
}

#[test]
fn expensive_work_delays_the_next_spend() {
    let rate = Rate::new("messages", 1000, 10);
    assert!(rate.spend(SECOND));
    rate.charge(500, SECOND);
    assert_eq!(rate.spent(), 501);
    assert!(!rate.spend(SECOND));
    // Half a second for the charge, less the burst.
    let next = rate.next(SECOND);
    assert_eq!(next, SECOND + Ns::from_ms(500 + 1 + 1 - 10));
    assert!(!rate.spend(next - Ns::new(1)) && rate.spend(next));
}

#[test]
fn what_is_spent_together_needs_one_and_owes_the_rest() {
    let rate = Rate::new("flood-copies", 1000, 10);
    assert!(rate.spend_together(500, SECOND));
    assert!(!rate.spend_together(3, SECOND));
    assert_eq!((rate.spent(), rate.refused()), (500, 3));
    let next = rate.next(SECOND);
    assert_eq!(next, SECOND + Ns::from_ms(500 + 1 - 10));
    assert!(!rate.spend_together(7, next - Ns::new(1)) && rate.spend_together(7, next));
}

#[test]
fn budgets_are_named_like_the_entries_that_share_them() {
    let budgets = Budgets::new(1 << 46, 60_000, 100_000);
    let account = Account::new(&budgets);
    for (name, budget) in budgets.entries() {
        let stock = account.stocks().into_iter().find(|stock| stock.name == name).unwrap();
        assert!(std::ptr::eq(&raw const **stock.budget.as_ref().unwrap(), budget), "{name}");
    }
}

proptest! {
    #[test]
    fn no_second_has_more_than_its_rate_and_a_burst(
        limit in 1_u64..1000,
        burst in 1_u64..50,
        gaps in prop::collection::vec(0_u64..20_000_000, 1..500),
    ) {
        let rate = Rate::new("messages", limit, burst);
        let (mut now, mut spent) = (SECOND, Vec::new());
        for gap in gaps {
            now += Ns::new(gap);
            let next = rate.next(now);
            let got = rate.spend(now);
            prop_assert_eq!(got, next <= now);
            if got {
                spent.push(now);
            }
        }
        for (i, start) in spent.iter().enumerate() {
            let end = *start + Ns::from_secs(1);
            let within = spent[i..].iter().filter(|at| **at < end).count() as u64;
            prop_assert!(within <= limit + burst + 1, "{} in a second", within);
        }
    }

    #[test]
    fn budget_is_what_its_stocks_hold(
        steps in prop::collection::vec((0_usize..3, 1_u64..40, any::<bool>()), 1..200),
    ) {
        let budget = Arc::new(Budget::new(100, 10));
        let stocks: Vec<_> =
            (0..3).map(|_| Arc::new(Stock::new("x", 60, Some(Arc::clone(&budget))))).collect();
        let mut held: Vec<Vec<Charge>> = (0..3).map(|_| Vec::new()).collect();
        for (who, n, back) in steps {
            if back {
                held[who].pop();
            } else if let Ok(charge) = stocks[who].charge(n) {
                held[who].push(charge);
            }
            let all: u64 = stocks.iter().map(|stock| stock.used()).sum();
            prop_assert_eq!(all, budget.used());
            prop_assert!(all <= 100 && stocks.iter().all(|stock| stock.used() <= 60));
        }
    }
}
