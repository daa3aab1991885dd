//! The product's switch with simulated guests: its ports, its forwarder, and simulated workers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use switch::fdb::{Fdb, PortId};
use switch::forward::{EgressQueue, Forwarder, Port, Source, Table};
use switch::hold::HOLD_DEFAULT;
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
use crate::settings::{Operators, costs, delay_max, weight};
use crate::worker::{Command, Name, Served, Then, Token, Worker, name_of, served};

pub(crate) struct Switching {
    pub workers: Vec<Worker>,
    pub ledger: Ledger,
    ports: Vec<Vec<Pair>>,
    table: Arc<Table>,
    /// The worker that serves each ingress queue.
    owners: BTreeMap<Name, usize>,
    mistake: Mistake,
    balance: Balance,
    /// Moves of queues between workers.
    pub moves: u64,
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
        mistake: Mistake,
        operators: Operators,
        random: &mut Random,
    ) -> Self {
        let count = random.within(if operators.is_balanced() { 2 } else { 1 }..4) as usize;
        let pair = |link: &Link, q, vif: &Arc<Vif>, random: &mut Random| {
            let policy = operators.policy(random);
            let setup = Setup { mistake, policy, watcher: random.index(count) };
            Pair::new(link, q, vif, setup, random)
        };
        let ports: Vec<Vec<Pair>> = links
            .iter()
            .map(|link| {
                let vif = port::vif(link);
                (0..link.queues()).map(|q| pair(link, q, &vif, random)).collect()
            })
            .collect();
        let table = Arc::new(table(&ports, mistake));
        let fdb = Arc::new(Fdb::new(4096, [random.bits(), random.bits()], 300, 1024));
        if addressing.is_static {
            for port in 0..links.len() {
                fdb.add_static(mac(port), 0, PortId(port as u16), 0).expect("an empty table");
            }
        }
        let (flow_key, costs) = (random.bits(), costs(random));
        let workers: Vec<Worker> = (0..count as u8)
            .map(|w| {
                let (fdb, to) = (Arc::clone(&fdb), Arc::clone(&table));
                let forwarder = Forwarder::new(addressing.mode, w, fdb, to, flow_key);
                Worker::new(w, forwarder, Arc::clone(&table), costs, mistake)
            })
            .collect();
        let both = |p: &Pair| (Arc::clone(&p.ingress_stats), Arc::clone(&p.egress_stats));
        let stats = ports.iter().map(|pairs| pairs.iter().map(both).collect()).collect();
        let ledger = Ledger::new(addressing, Arc::clone(&table), tags, stats);
        let mut switching = Self {
            workers,
            ledger,
            ports,
            table,
            owners: BTreeMap::new(),
            mistake,
            balance: Balance::new(count, operators.is_balanced()),
            moves: 0,
            levelled: 0,
            stalled: BTreeSet::new(),
            reported: 0,
        };
        switching.serve_all(operators, random);
        switching
    }

    /// Assigns each queue to a worker.
    fn serve_all(&mut self, operators: Operators, random: &mut Random) {
        for (port, pairs) in self.ports.iter().enumerate() {
            let weight = weight(random);
            // Frames of some guests are expensive to forward.
            let frame = Ns::new(match operators.is_flooded() {
                true => random.within(3000..7000),
                false if random.one_in(4) => random.within(0..500),
                false => 20,
            });
            for (queue, pair) in pairs.iter().enumerate() {
                pair.tuning.set_weight(weight);
                if random.one_in(2) {
                    self.table[port].as_ref().expect("ports stay").egress[queue]
                        .set_call(operators.policy(random));
                }
                let source = Source::new(
                    PortId(port as u16),
                    queue as u16,
                    Arc::clone(&pair.ingress_stats),
                    Arc::clone(&pair.tuning),
                );
                let name = (port, queue);
                let served = served(name, source, pair.ingress.clone(), frame);
                // Queues that move by load start on one worker.
                let all = if operators.is_balanced() { 1 } else { self.workers.len() };
                let to = random.index(all);
                self.owners.insert(name, to);
                self.workers[to].adopt(served, Instant::START);
            }
        }
    }

    /// Takes one step of a worker.
    pub fn step(&mut self, worker: usize, now: Instant) -> Result<Then, Finding> {
        for (load, worker) in self.balance.loads.iter_mut().zip(&self.workers) {
            load.1 = worker.sleeps_until_woken();
        }
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

    /// Delivers commands and queues of worker `from` to others; returns the workers to wake.
    pub fn dispatch(&mut self, from: usize) -> Vec<usize> {
        let mut woken = Vec::new();
        for (to, command) in std::mem::take(&mut self.workers[from].sends) {
            self.workers[to].commands.push(command);
            woken.push(to);
        }
        for (port, queue) in std::mem::take(&mut self.workers[from].unmuted) {
            // A descriptor that is readable when it is added is an event.
            if self.ports[port][queue].is_kicked() {
                self.workers[from].pending.insert(Token::Ingress(port, queue));
            }
        }
        for (token, to) in std::mem::take(&mut self.balance.moves) {
            let name = name_of(token);
            // One that was dropped meanwhile, or is there already, does not move.
            if self.owners.get(&name).is_some_and(|owner| *owner != to) {
                self.levelled += 1;
                woken.extend(self.give_away(name, to));
            }
        }
        for (served, to) in std::mem::take(&mut self.workers[from].given) {
            woken.extend(self.hand_over(from, to, served));
        }
        woken
    }

    /// Moves a queue that worker `from` stopped serving to worker `to`.
    fn hand_over(&mut self, from: usize, to: usize, served: Served) -> Option<usize> {
        let name = served.of.name;
        let token = Token::Ingress(name.0, name.1);
        // Dropped meanwhile.
        if self.owners.get(&name) != Some(&from) {
            return None;
        }
        self.moves += 1;
        if self.mistake == Mistake::LosesQueues && self.moves.is_multiple_of(7) {
            return None;
        }
        if self.mistake != Mistake::ForgetsOwner {
            self.owners.insert(name, to);
        }
        served.source.tuning.set_worker(to as u8);
        let worker = &mut self.workers[to];
        worker.commands.push(Command::Serve(served));
        // A descriptor that is readable when it is added is an event.
        if self.ports[name.0][name.1].is_kicked() {
            worker.pending.insert(token);
        }
        Some(to)
    }

    /// Sends a command to the worker that serves a queue; returns the worker to wake.
    fn command(&mut self, name: Name, command: Command) -> Option<usize> {
        let worker = *self.owners.get(&name)?;
        self.workers[worker].commands.push(command);
        Some(worker)
    }

    /// Requests the move of a queue; returns the worker to wake.
    pub fn give_away(&mut self, name: Name, to: usize) -> Option<usize> {
        self.command(name, Command::GiveAway(name, to % self.workers.len()))
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
        self.command(name, Command::Poll(name))
    }

    /// Begins or ends a drain of a queue, as an operator; returns the worker to wake.
    pub fn drain(&mut self, name: Name, on: bool) -> Option<usize> {
        self.ports[name.0][name.1].tuning.set_drain(on);
        self.command(name, Command::Poll(name))
    }

    /// Drain state of a queue; `None`: no worker serves it.
    pub fn drained(&self, name: Name) -> Option<Drain> {
        self.owners.get(&name).map(|_| self.ports[name.0][name.1].tuning.drain())
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
            let coming = worker.commands.iter().filter_map(|command| match command {
                Command::Serve(served) => Some(served.of.name),
                _ => None,
            });
            for name in worker.names().chain(coming) {
                if let Some(other) = served.insert(name, w) {
                    let what = format!("queue {name:?} is served by workers {w} and {other}");
                    return Err(Finding::Ownership(what));
                }
            }
        }
        let lost = self.owners.iter().find(|(name, _)| !served.contains_key(name));
        lost.map_or(Ok(()), |(name, _)| {
            Err(Finding::Ownership(format!("no worker serves queue {name:?}")))
        })
    }

    /// The worker that a kick of a ring reaches, and its token there.
    pub fn kick_target(&self, port: usize, queue: usize, ring: Ring) -> Option<(usize, Token)> {
        match ring {
            Ring::Tx => {
                let owner = *self.owners.get(&(port, queue))?;
                Some((owner, Token::Ingress(port, queue)))
            }
            Ring::Rx => Some((self.ports[port][queue].watcher, Token::Egress(port, queue))),
        }
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

    /// Longest pause of a queue by a rate limit.
    pub fn pause(&self, name: Name) -> Ns {
        self.ports[name.0][name.1].pause
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
            let name = (port, queue);
            woken.extend(self.command(name, Command::Drop(name)));
            self.owners.remove(&name);
        }
        woken
    }
}

fn table(ports: &[Vec<Pair>], mistake: Mistake) -> Table {
    let port = |i: usize| {
        let wrong = usize::from(mistake == Mistake::Misdelivers);
        let of = &ports[(i + wrong) % ports.len()];
        let queue = |p: &Pair| EgressQueue::new(p.egress.clone(), Arc::clone(&p.egress_stats));
        let queues: Vec<EgressQueue> = of.iter().cycle().take(ports[i].len()).map(queue).collect();
        let active = queues.len() as u16;
        let port = Port::new(PortId(i as u16), i.to_string(), queues);
        port.set_active(active);
        Some(Arc::new(port))
    };
    (0..ports.len()).map(port).collect()
}
