//! The product's switch with simulated guests: its ports, its forwarder, and simulated workers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use switch::fdb::{Fdb, PortId};
use switch::forward::{EgressQueue, Forwarder, Port, Source, Table};
use switch::hold::HOLD_DEFAULT;
use switch::schedule::{self, Assignments, GiveAway, Placement};
use switch::stats::{EgressStats, IngressStats};
use switch::time::{Instant, Ns};
use switch::tuning::Drain;
use xen_netif::port::Vif;

use crate::balance::Balance;
use crate::finding::Finding;
use crate::flawed::Mistake;
use crate::frame::mac;
use crate::guest::{Link, Ring};
use crate::ledger::{Addressing, Ledger};
use crate::port::{self, Pair, Setup};
use crate::random::Random;
use crate::rules::{AllRules, PortRules, RATE_WAIT, is_on};
use crate::settings::{Operators, costs, delay_max, weight};
use crate::worker::{Name, Served, Then, Token, Worker, name_of, served, token};

pub(crate) struct Switching {
    pub workers: Vec<Worker>,
    pub ledger: Ledger,
    ports: Vec<Vec<Pair>>,
    table: Arc<Table>,
    /// The worker of each queue: the program's own table.
    assignments: Assignments,
    /// Cost of a burst per frame, for the queues of each port.
    frames: Vec<Ns>,
    mistake: Mistake,
    rules: AllRules,
    balance: Balance,
    /// Moves of queues between workers.
    pub moves: u64,
    /// Queues that were stopped while they moved.
    pub refused: u64,
    /// Moves requested to level shares.
    pub levelled: u64,
    /// Egress queues reported as stalled.
    pub stalled: BTreeSet<Name>,
    /// Number of such reports so far.
    pub reported: u64,
}

impl Switching {
    /// Creates the switch with a port for each of `links`. `tags`: the secrets of honest guests.
    pub fn new(
        links: &[Link],
        tags: Vec<Option<u64>>,
        addressing: Addressing,
        rules: AllRules,
        mistake: Mistake,
        operators: Operators,
        random: &mut Random,
    ) -> Self {
        let count = random.within(if operators.is_balanced() { 2 } else { 1 }..4) as usize;
        let pair = |link: &Link, q, vif: &Arc<Vif>, random: &mut Random| {
            let setup = Setup { mistake, policy: operators.policy(random) };
            Pair::new(link, q, vif, setup, random)
        };
        let ports: Vec<Vec<Pair>> = links
            .iter()
            .map(|link| {
                let vif = port::vif(link);
                (0..link.queues()).map(|q| pair(link, q, &vif, random)).collect()
            })
            .collect();
        let table = Arc::new(table(&ports, &rules, mistake));
        let fdb = Arc::new(Fdb::new(4096, [random.bits(), random.bits()], 300, 1024));
        if addressing.is_static {
            for port in 0..links.len() {
                fdb.add_static(mac(port), 0, PortId(port as u16), 0).expect("an empty table");
            }
        }
        let (flow_key, costs) = (random.bits(), costs(random));
        let tenants = rules.tenants().filter(|_| mistake != Mistake::IgnoresRules);
        let workers: Vec<Worker> = (0..count as u8)
            .map(|w| {
                let (fdb, to) = (Arc::clone(&fdb), Arc::clone(&table));
                let mut forwarder = Forwarder::new(addressing.mode, w, fdb, to, flow_key);
                forwarder.set_tenants(tenants.clone());
                Worker::new(w, forwarder, Arc::clone(&table), costs, mistake)
            })
            .collect();
        let both = |p: &Pair| (Arc::clone(&p.ingress_stats), Arc::clone(&p.egress_stats));
        let stats = ports.iter().map(|pairs| pairs.iter().map(both).collect()).collect();
        let ledger = Ledger::new(addressing, Arc::clone(&table), rules.clone(), tags, stats);
        let mut switching = Self {
            workers,
            ledger,
            ports,
            table,
            assignments: Assignments::new(count, operators.placement(random)),
            frames: Vec::new(),
            mistake,
            rules,
            balance: Balance::new(count),
            moves: 0,
            refused: 0,
            levelled: 0,
            stalled: BTreeSet::new(),
            reported: 0,
        };
        switching.serve_all(operators, random);
        switching
    }

    /// Has each queue served or watched by a worker.
    fn serve_all(&mut self, operators: Operators, random: &mut Random) {
        let expensive = operators.is_expensive().then(|| random.index(self.ports.len()));
        for port in 0..self.ports.len() {
            let weight = weight(random);
            // Frames of some guests are expensive to forward.
            let frame = Ns::new(match operators.is_flooded() {
                // Floods last for several periods of shares over all workers.
                true => random.within(12_000..24_000),
                false if expensive == Some(port) => random.within(15_000..30_000),
                false if random.one_in(4) => random.within(0..500),
                false => 20,
            });
            self.frames.push(frame);
            for queue in 0..self.ports[port].len() {
                let tuning = &self.ports[port][queue].tuning;
                tuning.set_weight(weight);
                tuning.set_has_rate(is_on(&self.rules.of(port).rate_in));
                if random.one_in(2) {
                    self.table[port].as_ref().expect("ports stay").egress[queue]
                        .set_call(operators.policy(random));
                }
                let (worker, served) = self.place((port, queue));
                self.workers[worker].adopt(served, Instant::START);
                self.assignments.place(watched_token((port, queue)));
            }
        }
    }

    /// Assigns an ingress queue; returns its worker, and the queue for it.
    fn place(&mut self, name: Name) -> (usize, Served) {
        let (port, queue) = name;
        let pair = &self.ports[port][queue];
        let source = Source::new(
            PortId(port as u16),
            queue as u16,
            Arc::clone(&pair.ingress_stats),
            Arc::clone(&pair.tuning),
        );
        let assignment = self.assignments.place(token(name));
        pair.tuning.set_worker(assignment.worker as u8);
        let served =
            served(name, source, pair.ingress.clone(), self.frames[port], assignment.generation);
        (assignment.worker, served)
    }

    /// Takes one step of a worker.
    pub fn step(&mut self, worker: usize, now: Instant) -> Result<Then, Finding> {
        for (load, worker) in self.balance.loads.iter_mut().zip(&self.workers) {
            load.1 = worker.sleeps_until_woken();
        }
        self.balance.is_on = self.assignments.placement().moves_by_load(self.workers.len());
        let then = self.workers[worker].step(now, &mut self.ledger, &mut self.balance);
        let finding = self.ledger.finding.take().or(self.workers[worker].finding.take());
        for (name, begins) in std::mem::take(&mut self.workers[worker].stalled) {
            let is_new =
                if begins { self.stalled.insert(name) } else { self.stalled.remove(&name) };
            if !is_new {
                let what = format!("queue {name:?} is reported twice (begins: {begins})");
                return Err(Finding::Stalled(what));
            }
            self.reported += u64::from(begins);
        }
        finding.map_or(Ok(then), Err)
    }

    /// Hands over the queues that a worker gave away in its last step. Others acted meanwhile, as
    /// they do while a thread waits for the lock. Returns the workers to wake.
    pub fn hand_over_given(&mut self, from: usize) -> Vec<usize> {
        let given = std::mem::take(&mut self.workers[from].given);
        given.into_iter().filter_map(|(served, to)| self.hand_over(from, to, served)).collect()
    }

    /// Has the workers that worker `from` wakes retry; returns the workers to wake.
    pub fn dispatch(&mut self, from: usize) -> Vec<usize> {
        let mut woken = Vec::new();
        for to in std::mem::take(&mut self.workers[from].wakes) {
            self.workers[to].retries = true;
            woken.push(to);
        }
        for (port, queue) in std::mem::take(&mut self.workers[from].unmuted) {
            // A descriptor that is readable when it is added is an event.
            if self.ports[port][queue].is_kicked() {
                self.workers[from].pending.insert(Token::Ingress(port, queue));
            }
        }
        for (token, to) in std::mem::take(&mut self.balance.moves) {
            let moved = self.request_move(name_of(token), to);
            self.levelled += u64::from(moved.is_some());
            woken.extend(moved);
        }
        woken
    }

    /// Moves a queue that worker `from` stopped serving to worker `to`.
    fn hand_over(&mut self, from: usize, to: usize, served: Served) -> Option<usize> {
        let before = self.assignments.clone();
        let mut generation = served.of.generation;
        if let Some(assignment) = self.assignments.assignment(served.token)
            && self.mistake == Mistake::HandsOverStopped
        {
            generation = assignment.generation;
        }
        let Some(to) = self.assignments.hand_over(served.token, generation, from, to) else {
            self.refused += 1;
            if self.assignments.worker(served.token).is_none() {
                served.mark_stopped();
            }
            return None;
        };
        self.moves += 1;
        if self.mistake == Mistake::LosesQueues && self.moves.is_multiple_of(7) {
            return None;
        }
        if self.mistake == Mistake::ForgetsOwner {
            self.assignments = before;
        }
        Some(self.serve(to, served))
    }

    /// Sends a queue to a worker; returns the worker to wake.
    fn serve(&mut self, to: usize, served: Served) -> usize {
        let (port, queue) = served.of.name;
        served.source.tuning.set_worker(to as u8);
        let worker = &mut self.workers[to];
        drop(worker.commands.begin(served.token, served));
        // A descriptor that is readable when it is added is an event.
        if self.ports[port][queue].is_kicked() {
            worker.pending.insert(Token::Ingress(port, queue));
        }
        to
    }

    /// Has the worker that serves a queue poll it; returns the worker to wake.
    fn poll(&mut self, name: Name) -> Option<usize> {
        let worker = self.assignments.worker(token(name))?;
        self.workers[worker].commands.poll(token(name));
        Some(worker)
    }

    fn give_away(&mut self, GiveAway { token, from, to }: GiveAway) -> usize {
        self.workers[from].commands.give_away(token, to);
        from
    }

    /// Requests the move of a queue, as by load; returns the worker to wake.
    pub fn request_move(&mut self, name: Name, to: usize) -> Option<usize> {
        let request = self.assignments.request_move(token(name), to % self.workers.len())?;
        Some(self.give_away(request))
    }

    /// Changes the placement of all queues, as an operator; returns the workers to wake.
    pub fn set_placement(&mut self, placement: Placement) -> Vec<usize> {
        let moves = self.assignments.set_placement(placement);
        moves.into_iter().map(|request| self.give_away(request)).collect()
    }

    /// Stops serving a queue, and serves it again, as when its guest restarts the ring; returns the
    /// workers to wake.
    pub fn restart(&mut self, name: Name) -> Vec<usize> {
        let Some(before) = self.drop_queue(name) else { return Vec::new() };
        let (worker, served) = self.place(name);
        let mut wakes = vec![before, self.serve(worker, served)];
        let follow = self
            .assignments
            .assignment(token(name))
            .and_then(|assignment| assignment.follow(token(name)));
        wakes.extend(follow.map(|request| self.give_away(request)));
        wakes
    }

    /// Stops serving a queue; returns the worker to wake.
    fn drop_queue(&mut self, name: Name) -> Option<usize> {
        let worker = self.assignments.remove(token(name))?;
        if let Some(served) = self.workers[worker].commands.drop_queue(token(name)) {
            served.mark_stopped();
        }
        Some(worker)
    }

    /// Changes a setting of a queue, as an operator; returns the worker to wake.
    pub fn tune(&mut self, name: Name, operators: Operators, random: &mut Random) -> Option<usize> {
        let (port, queue) = name;
        if random.one_in(3) {
            let port = self.table[port].as_ref().expect("ports stay");
            if random.one_in(4) {
                port.egress[queue]
                    .set_hold_max(random.within(0..2 * u64::from(HOLD_DEFAULT)) as u16);
            } else {
                port.egress[queue].set_call(operators.policy(random));
            }
            return None;
        }
        operators.tune(&self.ports[port][queue].tuning, random);
        self.poll(name)
    }

    /// Begins or ends a drain of a queue, as an operator; returns the worker to wake.
    pub fn drain(&mut self, name: Name, on: bool) -> Option<usize> {
        self.ports[name.0][name.1].tuning.set_drain(on);
        self.poll(name)
    }

    /// Drain state of a queue; `None`: no worker serves it.
    pub fn drained(&self, name: Name) -> Option<Drain> {
        self.assignments.worker(token(name)).map(|_| self.ports[name.0][name.1].tuning.drain())
    }

    /// The queue of `port` with index `n`, modulo their number.
    pub fn name(&self, port: usize, n: usize) -> Name {
        (port, n % self.ports[port].len())
    }

    /// Longest delay of any poll and call under the current settings.
    pub fn delay_max(&self) -> Ns {
        let pairs = || self.ports.iter().flatten();
        let polls = pairs().map(|pair| pair.tuning.poll());
        let queues = self.table.iter().flatten().flat_map(|port| &port.egress);
        let calls = queues.map(EgressQueue::call);
        let [polls, calls] =
            [polls.map(delay_max).max(), calls.map(delay_max).max()].map(Option::unwrap_or_default);
        let pauses = pairs().map(|pair| pair.pause).max().unwrap_or_default();
        polls.max(pauses) + calls
    }

    /// Checks that each queue is served by exactly one worker.
    pub fn check_owners(&self) -> Result<(), Finding> {
        let mut served = BTreeMap::new();
        for (w, worker) in self.workers.iter().enumerate() {
            for name in worker.names() {
                if let Some(other) = served.insert(name, w) {
                    let what = format!("queue {name:?} is served by workers {w} and {other}");
                    return Err(Finding::Ownership(what));
                }
            }
        }
        let leaving: BTreeSet<Name> = self.workers.iter().flat_map(Worker::leaving).collect();
        let is_served = |name: &Name| served.contains_key(name) || leaving.contains(name);
        let is_assigned = |name: &Name| self.assignments.assignment(token(*name)).is_some();
        let ports = self.ports.iter().enumerate();
        let mut all = ports.flat_map(|(port, pairs)| (0..pairs.len()).map(move |q| (port, q)));
        all.find(|name| is_assigned(name) && !is_served(name)).map_or(Ok(()), |name| {
            Err(Finding::Ownership(format!("no worker serves queue {name:?}")))
        })
    }

    /// The worker that a kick of a ring reaches, and its token there.
    pub fn kick_target(&self, port: usize, queue: usize, ring: Ring) -> Option<(usize, Token)> {
        let (of_ring, token) = match ring {
            Ring::Tx => (token((port, queue)), Token::Ingress(port, queue)),
            Ring::Rx => (watched_token((port, queue)), Token::Egress(port, queue)),
        };
        Some((self.assignments.worker(of_ring)?, token))
    }

    /// Delivers a guest's kick; false: it is masked and stays pending.
    pub fn kick(&mut self, port: usize, queue: usize, ring: Ring) -> bool {
        self.ports[port][queue].kick(ring)
    }

    /// Pending kicks that were unmasked, and are to be delivered now.
    pub fn deferred_kicks(&self) -> Vec<(usize, usize, Ring)> {
        let ports = self.ports.iter().enumerate();
        let pairs = ports.flat_map(|(port, pairs)| {
            pairs.iter().enumerate().map(move |(queue, pair)| (port, queue, pair))
        });
        let deferred = |(port, queue, pair): (usize, usize, &Pair)| {
            pair.take_deferred_kick().map(|ring| (port, queue, ring))
        };
        pairs.filter_map(deferred).collect()
    }

    /// Number of calls to a port's guest since the last time.
    pub fn calls(&mut self, port: usize) -> u64 {
        let mut all = 0;
        for (q, pair) in self.ports[port].iter_mut().enumerate() {
            let [ingress, new] = pair.calls();
            all += ingress;
            if new > 0 {
                self.ledger.egress(port, q).call_by = Instant::NEVER;
            }
            all += new;
        }
        all
    }

    /// Longest pause of a queue by a rate limit, of its guest or its port.
    pub fn pause(&self, name: Name) -> Ns {
        let wait = if is_on(&self.rules.of(name.0).rate_in) { RATE_WAIT } else { Ns::ZERO };
        self.ports[name.0][name.1].pause.max(wait)
    }

    pub fn rules(&self, port: usize) -> &PortRules {
        self.rules.of(port)
    }

    /// Has a guest's address announced; returns the worker to wake.
    pub fn announce(&mut self, port: usize) -> Option<usize> {
        self.ports[port][0].tuning.announce(mac(port));
        self.poll((port, 0))
    }

    pub fn stats(&self, port: usize, queue: usize) -> (&IngressStats, &EgressStats) {
        let pair = &self.ports[port][queue];
        (&pair.ingress_stats, &pair.egress_stats)
    }

    /// Length of the oldest frame held for a queue.
    pub fn held_len(&self, port: usize, queue: usize) -> Option<u32> {
        self.table[port].as_ref().expect("ports stay").egress[queue].held_len()
    }

    /// Stops a port, as the control thread does after a fault of its guest; returns the workers to
    /// wake.
    pub fn stop(&mut self, port: usize, now: Instant) -> Vec<usize> {
        self.table[port].as_ref().expect("ports stay").set_active(0);
        self.ledger.sync(None, now);
        let mut woken = Vec::new();
        self.stalled.retain(|(of, _)| *of != port);
        for queue in 0..self.ports[port].len() {
            let pair = &self.ports[port][queue];
            pair.stop();
            woken.extend(self.drop_queue((port, queue)));
            self.assignments.remove(watched_token((port, queue)));
        }
        woken
    }
}

/// Token of an egress queue.
fn watched_token(name: Name) -> u64 {
    let (port, queue) = name;
    schedule::token(PortId(port as u16), queue as u16, true)
}

fn table(ports: &[Vec<Pair>], rules: &AllRules, mistake: Mistake) -> Table {
    let port = |i: usize| {
        let wrong = usize::from(mistake == Mistake::Misdelivers);
        let of = &ports[(i + wrong) % ports.len()];
        let queue = |p: &Pair| EgressQueue::new(p.egress.clone(), Arc::clone(&p.egress_stats));
        let queues: Vec<EgressQueue> = of.iter().cycle().take(ports[i].len()).map(queue).collect();
        let active = queues.len() as u16;
        let port = Port::new(PortId(i as u16), i.to_string(), queues);
        port.set_active(active);
        let PortRules { rate_in, rate_out, .. } = rules.of(i);
        port.set_rates(*rate_in, *rate_out);
        Some(Arc::new(port))
    };
    (0..ports.len()).map(port).collect()
}
