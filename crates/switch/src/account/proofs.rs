//! One step of a stock and of a rate, from every state: what holds after it holds after every
//! sequence of steps. One thread.

use super::*;

/// A stock in a budget of which other ports hold a part, in any state that the steps can reach.
struct State {
    stock: Arc<Stock>,
    budget: Arc<Budget>,
    others: u64,
}

impl State {
    fn any() -> Self {
        let budget = Budget::new(kani::any(), kani::any());
        let (used, others): (u64, u64) = kani::any();
        kani::assume(used.checked_add(others).is_some_and(|sum| sum <= budget.limit));
        budget.used.store(used + others, Ordering::Relaxed);
        let budget = Arc::new(budget);
        // Below what is held where the limit was lowered since.
        let stock = Stock::new("mappings", kani::any(), Some(Arc::clone(&budget)));
        stock.used.store(used, Ordering::Relaxed);
        stock.refused.store(kani::any_where(|refused| *refused < u64::MAX), Ordering::Relaxed);
        Self { stock: Arc::new(stock), budget, others }
    }

    /// Whether a charge of `n` is within both limits, of which the process's leaves a quarter to
    /// ports that hold little.
    fn permits(&self, n: u64) -> bool {
        let Budget { limit, small, .. } = *self.budget;
        let holds = u128::from(self.stock.used()) + u128::from(n);
        let all = holds + u128::from(self.others);
        let reserve = if holds <= small.into() { 0 } else { limit / 4 };
        holds <= self.stock.limit.load(Ordering::Relaxed).into() && all <= (limit - reserve).into()
    }

    /// Nothing is lost, and the total stays within the budget.
    fn is_exact(&self, used: u64) -> bool {
        let all = self.budget.used();
        self.stock.used() == used && all == used + self.others && all <= self.budget.limit()
    }
}

#[kani::proof]
fn every_charge_is_refused_exactly_over_a_limit() {
    let state = State::any();
    let (n, used, refused) = (kani::any(), state.stock.used(), state.stock.refused());
    let permits = state.permits(n);
    match state.stock.take(n) {
        Ok(()) => {
            assert!(permits && state.is_exact(used + n) && state.stock.refused() == refused);
        }
        Err(over) => {
            assert!(!permits && state.is_exact(used) && state.stock.refused() == refused + 1);
            assert!((over.wanted, over.used) == (n, used));
        }
    }
    kani::cover!(permits);
    kani::cover!(!permits);
}

#[kani::proof]
fn every_release_is_exact() {
    let state = State::any();
    let used = state.stock.used();
    let n = kani::any_where(|n| *n <= used);
    state.stock.give_back(n);
    assert!(state.is_exact(used - n));
}

#[kani::proof]
fn every_charge_that_is_dropped_leaves_what_was_held() {
    let state = State::any();
    let (n, used) = (kani::any(), state.stock.used());
    drop(state.stock.charge(n));
    assert!(state.is_exact(used));
}

/// In the first 292 years of the clock.
fn any_time() -> Instant {
    Instant::from_ns(kani::any_where(|ns| *ns < 1 << 63))
}

/// One is spent exactly if the time by which the bucket is full again is then at most a burst away;
/// that time moves by what each costs. So the number spent in any span is at most the burst and
/// what the span is worth.
fn request(limit: u64) {
    let (full, now) = (any_time(), any_time());
    let rate = Rate {
        name: "messages",
        limit: AtomicU64::new(limit),
        room: Ns::new(kani::any()),
        full_ns: AtomicU64::new(full.ns()),
        spent: AtomicU64::new(0),
        refused: AtomicU64::new(0),
    };
    let due = rate.next(now);
    let is_spent = rate.spend(now);
    let after = Instant::from_ns(rate.full_ns.load(Ordering::Relaxed));
    assert!((rate.spent(), rate.refused()) == (is_spent.into(), (!is_spent).into()));
    let Some(each) = each(limit) else {
        return assert!(!is_spent && after == full && due == Instant::NEVER);
    };
    let next = full.max(now) + each;
    assert!(is_spent == (next - now <= rate.room.max(each)));
    assert!(after == if is_spent { next } else { full });
    // It says when one is available, and one is then: nothing is lost.
    assert!(is_spent == (due <= now));
    assert!(is_spent || rate.next(due) <= due);
}

// Not of any rate: a solver takes too long for divisions by it.
#[kani::proof]
fn every_request_at_none_a_second_is_refused() {
    request(0);
}

#[kani::proof]
fn every_request_at_one_a_second_is_refused_exactly_over_the_rate() {
    request(1);
}

#[kani::proof]
fn every_request_at_4000_a_second_is_refused_exactly_over_the_rate() {
    request(4000);
}

#[kani::proof]
fn every_request_at_a_million_a_second_is_refused_exactly_over_the_rate() {
    request(1_000_000);
}
