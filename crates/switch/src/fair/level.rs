//! Max-min fair shares over all workers: moves queues with backlog between workers so that each
//! port is served in proportion to its weight. Pure; time is passed in.
//!
//! A worker shares its time by [`Share`](super::Share), so its queues with backlog all reach one
//! *level*: time served per unit of weight. Workers' levels differ when one serves more weight than
//! another, though all are full. Once a period each worker reports the time that its queues with
//! backlog were served. From this each port's *lag* is computed: the time it was due, its max-min
//! share of the total, less the time it got. Queues move if that lowers the sum over queues of the
//! squared lag expected after `AHEAD`, each relative to what its queue is due. So an even split
//! stays, an uneven one is made even, and if no split is even (three floods on two workers) the
//! queues that lag take turns on the workers with less load.

use std::collections::HashMap;

use crate::time::{Instant, Ns};

/// Length of a period: there is at most one decision per period.
pub const PERIOD: Ns = Ns::from_ms(16);
/// Time constant in ns with which lags decay; lags are relative to what is due in it.
const FADE_NS: f64 = 1e9;
/// Time ahead for which lags are predicted, in parts of [`FADE_NS`].
const AHEAD: f64 = 0.05;
/// Minimum reduction of the sum of squares by a move, which costs cold caches and some system
/// calls. At this value, a port of three on two workers lags by 2 % of a second's share before a
/// move.
const GAIN: f64 = 0.002;
/// Lead of a port without backlog below which it is dropped, in ns.
const FORGOTTEN_NS: f64 = 1e5;
/// Most queues that one decision moves.
const MOVES_MAX: usize = 16;
/// Most queues that one decision considers; if there are more, a different part each time.
const CONSIDERED_MAX: usize = 256;
/// Number of queues up to which swaps of two queues are considered, too.
const SWAPPED_MAX: usize = 64;

/// Whether a queue has backlog: its worker never found it empty.
#[derive(Clone, Copy, Debug, Hash)]
pub struct Backlog {
    /// Start of the backlog; [`Instant::NEVER`]: none.
    since: Instant,
    /// The period of the sums.
    period: u64,
    served: Ns,
    length: Ns,
}

impl Default for Backlog {
    /// No backlog.
    fn default() -> Self {
        Self { since: Instant::NEVER, period: 0, served: Ns::ZERO, length: Ns::ZERO }
    }
}

impl Backlog {
    /// Records the end of a burst. `more`: it took frames, and the queue will be served again.
    #[inline]
    pub fn update(&mut self, more: bool, now: Instant) {
        if !more {
            self.since = Instant::NEVER;
        } else if self.since == Instant::NEVER {
            self.since = now;
        }
    }

    /// Records the end of a load measurement, in which the queue was served for `served`.
    pub fn add_measurement(&mut self, period: u64, began: Instant, now: Instant, served: Ns) {
        if self.period != period {
            (self.period, self.served, self.length) = (period, Ns::ZERO, Ns::ZERO);
        }
        if self.since <= began {
            self.served += served;
            self.length += now - began;
        }
    }

    /// Ends a period. Returns the time the queue was served while it had backlog, and the time it
    /// had backlog. `None`: less than half of the period.
    pub fn end(&mut self, period: u64, began: Instant, now: Instant) -> Option<(Ns, Ns)> {
        let (mut served, mut length) = (self.served, self.length);
        if self.period != period {
            (served, length) = (Ns::ZERO, Ns::ZERO);
        }
        (self.served, self.length) = (Ns::ZERO, Ns::ZERO);
        let all = now - began;
        if self.since <= began {
            // Measurements in which it was not served, because of its debt, count as well.
            length = all;
        }
        (length > all / 2).then_some((served, length))
    }
}

/// Report on a queue that had backlog.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// Identifies the queue.
    pub queue: u64,
    /// Its port.
    pub port: u32,
    /// The port's weight.
    pub weight: u32,
    /// Time it was served while it had backlog.
    pub served: Ns,
    /// Time it had backlog.
    pub length: Ns,
}

/// Report of a worker on a period.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// End of the period.
    pub now: Instant,
    /// Length of the period.
    pub length: Ns,
    /// Time spent on frames of all queues.
    pub busy: Ns,
    /// The queues that had backlog.
    pub claims: Vec<Claim>,
}

/// The latest report of a worker.
#[derive(Clone, Debug, Default)]
struct Latest {
    now: Instant,
    /// Whether it was reported after the last decision.
    fresh: bool,
    /// Fraction of its time available to queues with backlog.
    room: f64,
    /// Each claim with the fraction of time it was served.
    claims: Vec<(Claim, f64)>,
}

/// Accounts of all workers' time, and decisions on moves.
#[derive(Clone, Debug)]
pub struct Leveller {
    workers: Vec<Latest>,
    /// Account of each port that has, or had, backlog.
    accounts: HashMap<u32, PortAccount>,
    decided: Instant,
    /// Number of decisions.
    turn: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct PortAccount {
    /// Time it was due less the time it got, in ns.
    lag_ns: f64,
    /// Queues with backlog at the last decision.
    queues: u32,
}

/// A port with backlog, during a decision.
struct Claimant {
    port: u32,
    weight: f64,
    queues: f64,
    served: f64,
    /// Time it is due, relative to one worker's time.
    due: f64,
    /// Its lag, relative to what it is due in [`FADE_NS`].
    lag: f64,
}

/// A queue with backlog, during a decision.
#[derive(Clone, Copy)]
struct Placed {
    queue: u64,
    from: usize,
    on: usize,
    /// Its share of its port's weight.
    weight: f64,
    /// Its contribution to [`Sum::linear`] and [`Sum::square`].
    linear: f64,
    square: f64,
}

/// Sums over a worker's queues with backlog, during a decision.
#[derive(Clone, Copy, Default)]
struct Sum {
    room: f64,
    weight: f64,
    linear: f64,
    square: f64,
}

impl Sum {
    fn with(mut self, queue: &Placed, sign: f64) -> Self {
        self.weight += sign * queue.weight;
        self.linear += sign * queue.linear;
        self.square += sign * queue.square;
        self
    }

    /// The part of the sum of squares that depends on the placement: the predicted lag of each
    /// queue is `lag + AHEAD * (1 - level * weight / due)`.
    fn cost(&self) -> f64 {
        // A weight added and subtracted again leaves a rounding error.
        if self.weight < 1e-6 {
            return 0.0;
        }
        let ahead = AHEAD * self.room / self.weight;
        ahead * ahead * self.square - 2.0 * ahead * self.linear
    }
}

impl Leveller {
    /// Creates the accounts for `workers` workers.
    pub fn new(workers: usize) -> Self {
        let workers = vec![Latest::default(); workers];
        Self { workers, accounts: HashMap::new(), decided: Instant::START, turn: 0 }
    }

    /// Takes the report of worker `me`; returns the queues to move, each with its new worker. They
    /// may be served by other workers than `me`. `asleep`: workers that sleep until woken; they
    /// need not report.
    pub fn report(
        &mut self,
        me: usize,
        report: Report,
        asleep: impl Fn(usize) -> bool,
    ) -> Vec<(u64, usize)> {
        let Some(latest) = self.workers.get_mut(me) else { return Vec::new() };
        let now = report.now;
        let part = |time: Ns, of: Ns| time.get() as f64 / of.get().max(1) as f64;
        let claims = report.claims.into_iter();
        latest.claims = claims.map(|claim| (claim, part(claim.served, claim.length))).collect();
        let claimed: Ns = latest.claims.iter().map(|(claim, _)| claim.served).sum();
        let others = part(report.busy - claimed, report.length);
        latest.room = (1.0 - others).clamp(0.01, 1.0);
        (latest.now, latest.fresh) = (now, true);
        let mut waits = false;
        for (i, worker) in self.workers.iter_mut().enumerate() {
            if asleep(i) && i != me {
                // Asleep: drop its last report.
                *worker = Latest { now, fresh: true, room: 1.0, claims: Vec::new() };
            }
            // A worker in a long nap, or without CPU, is left out of the decision.
            waits |= !worker.fresh && worker.now + PERIOD * 3 >= now;
        }
        if waits {
            return Vec::new();
        }
        let moves = self.decide(now);
        self.workers.iter_mut().for_each(|worker| worker.fresh = false);
        self.decided = now;
        self.turn += 1;
        moves
    }

    /// Ports of worker `me` with backlog on other workers, each with the number of its queues
    /// there.
    pub fn elsewhere(&self, me: usize) -> Vec<(u32, u32)> {
        let mut own: HashMap<u32, u32> = HashMap::new();
        for (claim, _) in self.workers.get(me).iter().flat_map(|latest| &latest.claims) {
            *own.entry(claim.port).or_default() += 1;
        }
        let others = own.into_iter().filter_map(|(port, own)| {
            // Count of the last decision: more queues may have been reported since.
            let others = self.accounts.get(&port)?.queues.saturating_sub(own);
            (others > 0).then_some((port, others))
        });
        others.collect()
    }

    fn decide(&mut self, now: Instant) -> Vec<(u64, usize)> {
        let (mut ports, index) = self.claimants();
        // The total served, shared out by weight: lags sum to 0.
        let served = ports.iter().map(|port| port.served).sum();
        share_out(&mut ports, served);
        let passed_ns = (now - self.decided).min(PERIOD * 4).get() as f64;
        self.book(&mut ports, passed_ns);
        let room = |latest: &Latest| if latest.fresh { latest.room } else { 0.0 };
        share_out(&mut ports, self.workers.iter().map(room).sum());
        ports.iter_mut().for_each(|port| port.lag /= port.due.max(1e-9) * FADE_NS);
        let mut queues = self.placed(&ports, &index);
        self.arrange(&mut queues);
        let moved = queues.iter().filter(|queue| queue.on != queue.from);
        moved.map(|queue| (queue.queue, queue.on)).collect()
    }

    fn fresh(&self) -> impl Iterator<Item = (usize, &Latest)> {
        self.workers.iter().enumerate().filter(|(_, latest)| latest.fresh)
    }

    /// The ports with backlog, and the index of each in that list.
    fn claimants(&self) -> (Vec<Claimant>, HashMap<u32, usize>) {
        let mut ports: Vec<Claimant> = Vec::new();
        let mut index = HashMap::new();
        for (claim, served) in self.fresh().flat_map(|(_, latest)| &latest.claims) {
            let at = *index.entry(claim.port).or_insert_with(|| {
                let weight = f64::from(claim.weight.max(1));
                let port = claim.port;
                ports.push(Claimant { port, weight, queues: 0.0, served: 0.0, due: 0.0, lag: 0.0 });
                ports.len() - 1
            });
            ports[at].queues += 1.0;
            ports[at].served += served;
        }
        (ports, index)
    }

    /// Adds the period to the accounts; `lag` is then in ns.
    fn book(&mut self, ports: &mut [Claimant], passed_ns: f64) {
        let fades = 1.0 - passed_ns / FADE_NS;
        for account in self.accounts.values_mut() {
            account.lag_ns *= fades;
            account.queues = 0;
        }
        for port in ports {
            let account = self.accounts.entry(port.port).or_default();
            account.lag_ns += (port.due - port.served) * passed_ns;
            account.queues = port.queues as u32;
            port.lag = account.lag_ns;
        }
        // A port without backlog has no lag. Its lead is kept for a while: a pause does not clear
        // it.
        self.accounts.retain(|_, account| account.queues > 0 || account.lag_ns < -FORGOTTEN_NS);
    }

    fn placed(&self, ports: &[Claimant], index: &HashMap<u32, usize>) -> Vec<Placed> {
        let mut queues = Vec::new();
        for (on, latest) in self.fresh() {
            for (claim, _) in &latest.claims {
                let port = &ports[index[&claim.port]];
                let per_level = port.weight / port.due.max(1e-9);
                queues.push(Placed {
                    queue: claim.queue,
                    from: on,
                    on,
                    weight: port.weight / port.queues,
                    linear: per_level * (port.lag + AHEAD) / port.queues,
                    square: per_level * per_level / port.queues,
                });
            }
        }
        queues
    }

    /// Moves queues, best move first, while a move gains enough.
    fn arrange(&self, queues: &mut [Placed]) {
        let room = |latest: &Latest| Sum { room: latest.room, ..Sum::default() };
        let mut sums: Vec<Sum> = self.workers.iter().map(room).collect();
        for queue in &*queues {
            sums[queue.on] = sums[queue.on].with(queue, 1.0);
        }
        let fresh: Vec<usize> = self.fresh().map(|(worker, _)| worker).collect();
        let step = queues.len().div_ceil(CONSIDERED_MAX).max(1);
        let considered: Vec<usize> = (self.turn % step..queues.len()).step_by(step).collect();
        for _ in 0..MOVES_MAX {
            let (first, second) = (one(queues, &considered, &sums, &fresh), swap(queues, &sums));
            let better = |a: &(f64, _), b: &(f64, _)| a.0.total_cmp(&b.0);
            let Some((_, changes)) = [first, second].into_iter().flatten().min_by(better) else {
                break;
            };
            for (at, to) in changes {
                let queue = &mut queues[at];
                sums[queue.on] = sums[queue.on].with(queue, -1.0);
                sums[to] = sums[to].with(queue, 1.0);
                queue.on = to;
            }
        }
    }
}

/// Sets the time each port is due of `room`: its max-min share by weight. A port cannot be served
/// by more workers than it has queues.
fn share_out(ports: &mut [Claimant], mut room: f64) {
    let mut order: Vec<usize> = (0..ports.len()).collect();
    let full_at = |at: &usize| ports[*at].queues / ports[*at].weight;
    order.sort_by(|a, b| full_at(a).total_cmp(&full_at(b)));
    let mut weight: f64 = order.iter().map(|at| ports[*at].weight).sum();
    for at in order {
        let port = &mut ports[at];
        port.due = (room.max(0.0) * port.weight / weight).min(port.queues);
        room -= port.due;
        weight -= port.weight;
    }
}

/// Queues with their new workers, and the change of the cost.
type Change = (f64, Vec<(usize, usize)>);

/// The best move of a queue, if it gains enough.
fn one(queues: &[Placed], of: &[usize], sums: &[Sum], workers: &[usize]) -> Option<Change> {
    let costs: Vec<f64> = sums.iter().map(Sum::cost).collect();
    let mut best = (-GAIN, None);
    for &at in of {
        let queue = &queues[at];
        let left = sums[queue.on].with(queue, -1.0).cost() - costs[queue.on];
        for &to in workers.iter().filter(|to| **to != queue.on) {
            let cost = left + sums[to].with(queue, 1.0).cost() - costs[to];
            if cost < best.0 {
                best = (cost, Some((at, to)));
            }
        }
    }
    best.1.map(|change| (best.0, vec![change]))
}

/// The best exchange of two queues, if it gains enough for two moves.
fn swap(queues: &[Placed], sums: &[Sum]) -> Option<Change> {
    if queues.len() > SWAPPED_MAX {
        return None;
    }
    let costs: Vec<f64> = sums.iter().map(Sum::cost).collect();
    let mut best = (-2.0 * GAIN, None);
    for (a, first) in queues.iter().enumerate() {
        for (b, second) in queues[..a].iter().enumerate() {
            let (i, j) = (first.on, second.on);
            if i == j {
                continue;
            }
            let cost = sums[i].with(first, -1.0).with(second, 1.0).cost() - costs[i]
                + sums[j].with(second, -1.0).with(first, 1.0).cost()
                - costs[j];
            if cost < best.0 {
                best = (cost, Some([(a, j), (b, i)]));
            }
        }
    }
    best.1.map(|changes| (best.0, changes.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The period number `end`, in which `queues` queues of port 7 had backlog.
    fn report(end: u64, queues: u64) -> Report {
        report_of(end, queues, |_| 7)
    }

    fn report_of(end: u64, queues: u64, port: impl Fn(u64) -> u32) -> Report {
        let claim = |queue| Claim {
            queue,
            port: port(queue),
            weight: 1,
            served: PERIOD / queues.max(1),
            length: PERIOD,
        };
        let claims = (0..queues).map(claim).collect();
        Report { now: Instant::START + end * PERIOD, length: PERIOD, busy: PERIOD, claims }
    }

    #[test]
    fn queues_that_are_reported_before_the_next_decision_are_not_elsewhere() {
        let mut leveller = Leveller::new(2);
        let awake = |_| false;
        // Worker 0 has none, worker 1 has two.
        leveller.report(0, report(1, 0), awake);
        leveller.report(1, report(1, 2), awake);
        assert_eq!(leveller.elsewhere(0), []);
        // Worker 1 decided; now worker 0 has three, and worker 1 did not report yet.
        leveller.report(0, report(2, 3), awake);
        assert_eq!(leveller.elsewhere(0), []);
        leveller.report(1, report(2, 2), awake);
        assert_eq!((leveller.elsewhere(0), leveller.elsewhere(1)), (vec![(7, 2)], vec![(7, 3)]));
    }

    #[test]
    fn worker_without_a_report_neither_loses_queues_nor_gets_any() {
        let mut leveller = Leveller::new(2);
        for period in 10..100 {
            let report = report_of(period, 4, |queue| queue as u32);
            let moves = leveller.report(0, report, |_| false);
            assert_eq!(moves, []);
        }
    }

    #[test]
    fn backlog_is_what_was_never_found_empty() {
        let ms = |ms| Instant::START + Ns::from_ms(ms);
        let spent = Ns::new(500);
        let mut backlog = Backlog::default();
        assert_eq!(backlog.end(0, ms(0), ms(16)), None);
        backlog.update(true, ms(16));
        backlog.add_measurement(1, ms(16), ms(17), spent);
        // While it pays its debt it is not served, and has backlog.
        assert_eq!(backlog.end(1, ms(16), ms(32)), Some((spent, Ns::from_ms(16))));
        backlog.update(false, ms(33));
        backlog.add_measurement(2, ms(32), ms(33), spent);
        backlog.update(true, ms(33));
        backlog.add_measurement(2, ms(33), ms(45), Ns::new(700));
        assert_eq!(backlog.end(2, ms(32), ms(45)), Some((Ns::new(700), Ns::from_ms(12))));
        backlog.update(false, ms(50));
        assert_eq!(backlog.end(3, ms(45), ms(61)), None);
    }
}
