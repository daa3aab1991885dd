//! The product's switch on simulated guests: its ports, its forwarder, and workers that drive them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use ring::virtq::DeviceQueue;
use switch::fdb::{Fdb, PortId};
use switch::forward::{EgressQueue, Forwarder, Mode, Port, Source, Table};
use switch::hold::HOLD_DEFAULT;
use switch::poll::Policy;
use switch::stats::{EgressStats, IngressStats};
use switch::tuning::{Drain, Tuning};
use vhost_user::device::Call;
use vhost_user::port::{VirtioEgress, VirtioIngress};

use crate::finding::Finding;
use crate::flawed::{Flawed, Mistake};
use crate::frame::mac;
use crate::guest::{Link, Ring};
use crate::ledger::Ledger;
use crate::paced::{PAUSE_NS_MAX, Paced};
use crate::random::Random;
use crate::settings::{Operators, costs, delay_ns_max, weight};
use crate::worker::{Command, Name, Served, Then, Token, Worker, lock, served};

/// A ring's call descriptor, and how many calls its counter told of so far.
struct Calls {
    fd: File,
    seen: u64,
}

/// Both directions of a queue pair.
struct Pair {
    ingress: Arc<Mutex<Flawed<Paced<VirtioIngress>>>>,
    ingress_stats: Arc<IngressStats>,
    ingress_calls: Calls,
    egress: Arc<Mutex<Flawed<VirtioEgress>>>,
    egress_stats: Arc<EgressStats>,
    egress_calls: Calls,
    tuning: Arc<Tuning>,
    /// Which worker looks after kicks of the egress queue.
    watcher: usize,
}

pub(crate) struct Switching {
    pub workers: Vec<Worker>,
    pub ledger: Ledger,
    ports: Vec<Vec<Pair>>,
    table: Arc<Table>,
    /// Which worker serves an ingress queue.
    homes: BTreeMap<Name, usize>,
    /// Ingress queues whose kick descriptors were written to, and are never read.
    kicked: BTreeSet<Name>,
    mistake: Mistake,
    /// Queues that went from one worker to another.
    pub moves: u64,
    /// Egress queues that are reported to take nothing, and how many ever were.
    pub starved: BTreeSet<Name>,
    pub reported: u64,
}

fn call() -> (Call, Calls) {
    let fd: OwnedFd = os::eventfd().expect("an eventfd");
    let fd = Arc::new(fd);
    let file = File::from(fd.try_clone().expect("a descriptor"));
    (Call::Fd(fd), Calls { fd: file, seen: 0 })
}

impl Calls {
    /// Calls since the last look. What is counted must be what was made.
    fn new_since(&mut self, counted: u64) -> u64 {
        let new = counted - self.seen;
        if new > 0 {
            let mut made = [0; 8];
            self.fd.read_exact(&mut made).expect("as many calls as counted");
            assert_eq!(u64::from_ne_bytes(made), new, "as many calls as counted");
        }
        self.seen = counted;
        new
    }
}

impl Pair {
    fn new(
        (link, q): (&Link, usize),
        mistake: Mistake,
        policy: Policy,
        watcher: usize,
        random: &mut Random,
    ) -> Self {
        let ring = |ring: usize| {
            let (layout, base) = link.pairs[q][ring];
            DeviceQueue::new(&link.memory, &layout, link.features, base).expect("a legal layout")
        };
        let (ingress_stats, egress_stats) = <(Arc<IngressStats>, Arc<EgressStats>)>::default();
        let mut ingress = VirtioIngress::new(Arc::clone(&ingress_stats));
        let (to_call, ingress_calls) = call();
        ingress.activate(ring(0), Arc::clone(&link.memory), Some(to_call), link.format);
        ingress.enable(true);
        let mut egress = VirtioEgress::new(Arc::clone(&egress_stats));
        let (to_call, egress_calls) = call();
        egress.activate(ring(1), Arc::clone(&link.memory), Some(to_call), link.format);
        egress.enable(true);
        Self {
            ingress: Arc::new(Mutex::new(Flawed::new(Paced::new(ingress, random), mistake))),
            ingress_stats,
            ingress_calls,
            egress: Arc::new(Mutex::new(Flawed::new(egress, mistake))),
            egress_stats,
            egress_calls,
            tuning: Arc::new(Tuning::new(policy)),
            watcher,
        }
    }
}

impl Switching {
    /// Serves `links`. `tags` are the secrets of the guests that keep the protocol; `spoofed`:
    /// others may send from their addresses.
    pub fn new(
        links: &[Link],
        tags: Vec<Option<u64>>,
        (mode, static_addresses, spoofed): (Mode, bool, bool),
        mistake: Mistake,
        operators: Operators,
        random: &mut Random,
    ) -> Self {
        let count = random.within(1..4) as usize;
        let pair = |link: &Link, q, random: &mut Random| {
            let (policy, watcher) = (operators.policy(random), random.index(count));
            Pair::new((link, q), mistake, policy, watcher, random)
        };
        let ports: Vec<Vec<Pair>> = links
            .iter()
            .map(|link| (0..link.pairs.len()).map(|q| pair(link, q, random)).collect())
            .collect();
        let table = Arc::new(table(&ports, mistake));
        let fdb = Arc::new(Fdb::new(4096, [random.bits(), random.bits()], 300, 1024));
        if static_addresses {
            for port in 0..links.len() {
                fdb.add_static(mac(port), 0, PortId(port as u16), 0).expect("an empty table");
            }
        }
        let (flow_key, costs) = (random.bits(), costs(random));
        let workers: Vec<Worker> = (0..count as u8)
            .map(|w| {
                let (fdb, to) = (Arc::clone(&fdb), Arc::clone(&table));
                let forwarder = Forwarder::new(mode, w, fdb, to, flow_key);
                Worker::new(w, forwarder, Arc::clone(&table), costs, mistake)
            })
            .collect();
        let both = |p: &Pair| (Arc::clone(&p.ingress_stats), Arc::clone(&p.egress_stats));
        let stats = ports.iter().map(|pairs| pairs.iter().map(both).collect()).collect();
        let ledger = Ledger::new(mode, Arc::clone(&table), tags, stats, static_addresses, spoofed);
        let mut switching = Self {
            workers,
            ledger,
            ports,
            table,
            homes: BTreeMap::new(),
            kicked: BTreeSet::new(),
            mistake,
            moves: 0,
            starved: BTreeSet::new(),
            reported: 0,
        };
        switching.serve_all(operators, random);
        switching
    }

    /// Gives every queue to a worker.
    fn serve_all(&mut self, operators: Operators, random: &mut Random) {
        for (port, pairs) in self.ports.iter().enumerate() {
            let weight = weight(random);
            // Some guests' frames are dear.
            let frame_ns = if random.one_in(4) { random.within(0..500) } else { 20 };
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
                let served = served(name, source, pair.ingress.clone(), frame_ns);
                let to = random.index(self.workers.len());
                self.homes.insert(name, to);
                self.workers[to].adopt(served, 0);
            }
        }
    }

    /// A step of a worker.
    pub fn step(&mut self, worker: usize, now_ns: u64) -> Result<Then, Finding> {
        let then = self.workers[worker].step(now_ns, &mut self.ledger);
        let finding = self.ledger.finding.take().or(self.workers[worker].finding.take());
        for (name, begins) in std::mem::take(&mut self.workers[worker].starved) {
            let is_new =
                if begins { self.starved.insert(name) } else { self.starved.remove(&name) };
            if !is_new {
                let what = format!("queue {name:?} is reported twice ({begins})");
                return Err(Finding::Starved(what));
            }
            self.reported += u64::from(begins);
        }
        finding.map_or(Ok(then), Err)
    }

    /// Passes on what worker `from` has for others; returns whom to wake.
    pub fn pass(&mut self, from: usize) -> Vec<usize> {
        let mut woken = Vec::new();
        for (to, command) in std::mem::take(&mut self.workers[from].sends) {
            self.workers[to].commands.push(command);
            woken.push(to);
        }
        for (port, queue) in std::mem::take(&mut self.workers[from].unmuted) {
            // A descriptor that is readable when it is added is an event.
            if self.kicked.contains(&(port, queue)) {
                self.workers[from].pending.insert(Token::Ingress(port, queue));
            }
        }
        for (served, to) in std::mem::take(&mut self.workers[from].given) {
            woken.extend(self.hand_over(from, to, served));
        }
        woken
    }

    /// Moves a queue that worker `from` has stopped serving to worker `to`.
    fn hand_over(&mut self, from: usize, to: usize, served: Served) -> Option<usize> {
        let name = served.of.name;
        let token = Token::Ingress(name.0, name.1);
        // Dropped meanwhile: the command is on its way.
        if self.homes.get(&name) != Some(&from) {
            return None;
        }
        self.moves += 1;
        if self.mistake == Mistake::LosesQueues && self.moves.is_multiple_of(7) {
            return None;
        }
        if self.mistake != Mistake::ForgetsHome {
            self.homes.insert(name, to);
        }
        served.source.tuning.set_worker(to as u8);
        let worker = &mut self.workers[to];
        worker.commands.push(Command::Serve(served));
        // A descriptor that is readable when it is added is an event.
        if self.kicked.contains(&name) {
            worker.pending.insert(token);
        }
        Some(to)
    }

    /// Sends a command to the worker that serves a queue; returns whom to wake.
    fn command(&mut self, name: Name, command: Command) -> Option<usize> {
        let worker = *self.homes.get(&name)?;
        self.workers[worker].commands.push(command);
        Some(worker)
    }

    /// Asks for a queue to be moved; returns whom to wake.
    pub fn away(&mut self, name: Name, to: usize) -> Option<usize> {
        self.command(name, Command::Away(name, to % self.workers.len()))
    }

    /// An operator changes something about a queue; returns whom to wake.
    pub fn tune(
        &mut self,
        (port, queue): Name,
        operators: Operators,
        random: &mut Random,
    ) -> Option<usize> {
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
        self.command((port, queue), Command::Poll((port, queue)))
    }

    /// An operator has a queue drained, or ends that; returns whom to wake.
    pub fn drain(&mut self, name: Name, on: bool) -> Option<usize> {
        self.ports[name.0][name.1].tuning.set_drain(on);
        self.command(name, Command::Poll(name))
    }

    /// Whether a queue is drained; `None`: no worker has it.
    pub fn drained(&self, name: Name) -> Option<Drain> {
        self.homes.get(&name).map(|_| self.ports[name.0][name.1].tuning.drain())
    }

    /// A name for `n`, whatever it is.
    pub fn name(&self, port: usize, n: usize) -> Name {
        (port, n % self.ports[port].len())
    }

    /// The longest that any look or call may be put off, as things are, in ns.
    pub fn delay_ns_max(&self) -> u64 {
        let looks = self.ports.iter().flatten().map(|pair| pair.tuning.poll());
        let queues = self.table.iter().flatten().flat_map(|port| &port.egress);
        let calls = queues.map(EgressQueue::call);
        let [looks, calls] = [looks.map(delay_ns_max).max(), calls.map(delay_ns_max).max()]
            .map(Option::unwrap_or_default);
        looks.max(PAUSE_NS_MAX) + calls
    }

    /// A queue must be served by the worker that is its home, and by no other.
    pub fn check_homes(&self) -> Result<(), Finding> {
        let mut served = BTreeMap::new();
        for (w, worker) in self.workers.iter().enumerate() {
            let coming = worker.commands.iter().filter_map(|command| match command {
                Command::Serve(served) => Some(served.of.name),
                _ => None,
            });
            for name in worker.names().chain(coming) {
                if let Some(other) = served.insert(name, w) {
                    let what = format!("queue {name:?} is served by workers {w} and {other}");
                    return Err(Finding::Homeless(what));
                }
            }
        }
        let lost = self.homes.iter().find(|(name, _)| !served.contains_key(name));
        lost.map_or(Ok(()), |(name, _)| {
            Err(Finding::Homeless(format!("no worker serves queue {name:?}")))
        })
    }

    /// Whom a kick of a ring reaches, and as what.
    pub fn kicked(&self, port: usize, queue: usize, ring: Ring) -> Option<(usize, Token)> {
        match ring {
            Ring::Tx => {
                let home = *self.homes.get(&(port, queue))?;
                Some((home, Token::Ingress(port, queue)))
            }
            Ring::Rx => Some((self.ports[port][queue].watcher, Token::Egress(port, queue))),
        }
    }

    /// A guest writes to a kick descriptor.
    pub fn kick(&mut self, port: usize, queue: usize, ring: Ring) {
        if ring == Ring::Tx {
            self.kicked.insert((port, queue));
        }
    }

    /// Calls to a port's guest since the last look.
    pub fn calls(&mut self, port: usize) -> u64 {
        let mut all = 0;
        for (q, pair) in self.ports[port].iter_mut().enumerate() {
            all += pair.ingress_calls.new_since(pair.ingress_stats.calls.get());
            let new = pair.egress_calls.new_since(pair.egress_stats.calls.get());
            if new > 0 {
                self.ledger.egress(port, q).call_by_ns = u64::MAX;
            }
            all += new;
        }
        all
    }

    pub fn stats(&self, port: usize, queue: usize) -> (&IngressStats, &EgressStats) {
        let pair = &self.ports[port][queue];
        (&pair.ingress_stats, &pair.egress_stats)
    }

    /// Length of the frame that has waited longest for a queue.
    pub fn held_len(&self, port: usize, queue: usize) -> Option<u32> {
        self.table[port].as_ref().expect("ports stay").egress[queue].held_len()
    }

    /// Stops a port, as the control thread does when its guest broke the protocol; returns whom to
    /// wake.
    pub fn stop(&mut self, port: usize, now_ns: u64) -> Vec<usize> {
        self.table[port].as_ref().expect("ports stay").set_active(0);
        self.ledger.sync(None, now_ns);
        let mut woken = Vec::new();
        self.starved.retain(|(of, _)| *of != port);
        for queue in 0..self.ports[port].len() {
            let pair = &self.ports[port][queue];
            lock(&pair.ingress).queue.queue.deactivate();
            lock(&pair.egress).queue.deactivate();
            let name = (port, queue);
            woken.extend(self.command(name, Command::Drop(name)));
            self.homes.remove(&name);
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
