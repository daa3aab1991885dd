//! The product's switch on simulated guests: its ports, its forwarder, and workers that drive them.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use ring::virtq::DeviceQueue;
use switch::fdb::{Fdb, PortId};
use switch::forward::{EgressQueue, Forwarder, Mode, Port, Source, Table};
use switch::poll::Policy;
use switch::stats::{EgressStats, IngressStats};
use switch::tuning::Tuning;
use vhost_user::device::Call;
use vhost_user::port::{VirtioEgress, VirtioIngress};
use vhost_user::sys;

use crate::flawed::{Flawed, Mistake};
use crate::frame::mac;
use crate::guest::{Link, Ring};
use crate::ledger::Ledger;
use crate::random::Random;
use crate::worker::{Polling, Served, Then, Token, Worker, lock};
use crate::world::Finding;

/// A ring's call descriptor, and how many calls its counter told of so far.
struct Calls {
    fd: File,
    seen: u64,
}

/// Both directions of a queue pair.
struct Pair {
    ingress: Arc<Mutex<Flawed<VirtioIngress>>>,
    ingress_stats: Arc<IngressStats>,
    ingress_calls: Calls,
    egress: Arc<Mutex<Flawed<VirtioEgress>>>,
    egress_stats: Arc<EgressStats>,
    egress_calls: Calls,
    /// Which worker serves its ingress queue, and which looks after kicks of the egress queue.
    workers: [usize; 2],
}

pub(crate) struct Switching {
    pub workers: Vec<Worker>,
    pub ledger: Ledger,
    ports: Vec<Vec<Pair>>,
    table: Arc<Table>,
}

fn call() -> (Call, Calls) {
    let fd: OwnedFd = sys::eventfd().expect("an eventfd");
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
    fn new(link: &Link, q: usize, mistake: Mistake, workers: [usize; 2]) -> Self {
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
            ingress: Arc::new(Mutex::new(Flawed::new(ingress, mistake))),
            ingress_stats,
            ingress_calls,
            egress: Arc::new(Mutex::new(Flawed::new(egress, mistake))),
            egress_stats,
            egress_calls,
            workers,
        }
    }
}

impl Switching {
    /// Serves `links`. `tags` are the secrets of the guests that keep the protocol.
    pub fn new(
        links: &[Link],
        tags: Vec<Option<u64>>,
        mode: Mode,
        static_addresses: bool,
        mistake: Mistake,
        random: &mut Random,
        polling: &dyn Fn(&mut Random) -> Box<dyn Polling>,
    ) -> Self {
        let count = random.within(1..4) as usize;
        let pair = |link: &Link, q, random: &mut Random| {
            Pair::new(link, q, mistake, [random.index(count), random.index(count)])
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
        let flow_key = random.bits();
        let mut workers: Vec<Worker> = (0..count as u8)
            .map(|w| {
                let (fdb, to) = (Arc::clone(&fdb), Arc::clone(&table));
                let forwarder = Forwarder::new(mode, w, fdb, to, flow_key);
                Worker::new(w, forwarder, Arc::clone(&table), mistake)
            })
            .collect();
        for (port, pairs) in ports.iter().enumerate() {
            for (q, pair) in pairs.iter().enumerate() {
                let stats = Arc::clone(&pair.ingress_stats);
                let tuning = Arc::new(Tuning::new(Policy::Event));
                let source = Source { port: PortId(port as u16), queue: q as u16, stats, tuning };
                let ingress = pair.ingress.clone();
                let served = Served::new(port, q, source, ingress, polling(random));
                workers[pair.workers[0]].queues.push(served);
            }
        }
        let both = |p: &Pair| (Arc::clone(&p.ingress_stats), Arc::clone(&p.egress_stats));
        let stats = ports.iter().map(|pairs| pairs.iter().map(both).collect()).collect();
        let ledger = Ledger::new(mode, Arc::clone(&table), tags, stats, static_addresses);
        Self { workers, ledger, ports, table }
    }

    /// A step of a worker.
    pub fn step(&mut self, worker: usize, now_ns: u64) -> Result<Then, Finding> {
        let then = self.workers[worker].step(now_ns, &mut self.ledger);
        self.ledger.finding.take().map_or(Ok(then), Err)
    }

    /// Whom a kick of a ring reaches, and as what.
    pub fn kicked(&self, port: usize, queue: usize, ring: Ring) -> (usize, Token) {
        let [ingress, egress] = self.ports[port][queue].workers;
        match ring {
            Ring::Tx => (ingress, Token::Ingress(port, queue)),
            Ring::Rx => (egress, Token::Egress(port, queue)),
        }
    }

    /// Calls to a port's guest since the last look.
    pub fn calls(&mut self, port: usize) -> u64 {
        let both = self.ports[port].iter_mut().map(|pair| {
            pair.ingress_calls.new_since(pair.ingress_stats.calls.get())
                + pair.egress_calls.new_since(pair.egress_stats.calls.get())
        });
        both.sum()
    }

    pub fn stats(&self, port: usize, queue: usize) -> (&IngressStats, &EgressStats) {
        let pair = &self.ports[port][queue];
        (&pair.ingress_stats, &pair.egress_stats)
    }

    /// Stops a port, as the control thread does when its guest broke the protocol.
    pub fn stop(&mut self, port: usize) {
        for worker in &mut self.workers {
            worker.forget(port);
        }
        self.table[port].as_ref().expect("ports stay").set_active(0);
        for pair in &self.ports[port] {
            lock(&pair.ingress).queue.deactivate();
            lock(&pair.egress).queue.deactivate();
        }
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
