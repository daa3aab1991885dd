//! Queues of the switch's ports: the product's own, of each kind.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ring::virtq::DeviceQueue;
use ring::xen::{BackRx, BackTx};
use shm::Private;
use shm::sync::{Lock, Mutex};
use switch::poll::Policy;
use switch::port::{Egress, Ingress};
use switch::stats::{EgressStats, IngressStats};
use switch::time::Ns;
use switch::tuning::Tuning;
use switch::vnet::Offloads;
use uplink::{Batching, TapEgress, TapFd, TapIngress};
use vhost_user::device::Call;
use vhost_user::port::{GuestQueue, VirtioEgress, VirtioIngress};
use xen_netif::port::control::Orders;
use xen_netif::port::{Vif, Wiring, XenEgress, XenIngress};

use crate::around::Around;
use crate::flawed::{Flaw, Flawed, Mistake};
use crate::guest::{Attached, Link, Ring, tap, virtio, xen};
use crate::hypervisor::Channel;
use crate::paced::{PAUSE_MAX, Pace};
use crate::random::Random;

/// The switch's side of a queue pair.
pub(crate) struct Pair {
    pub ingress: Arc<Mutex<dyn Ingress>>,
    pub ingress_stats: Arc<IngressStats>,
    pub egress: Arc<Mutex<dyn Egress>>,
    pub egress_stats: Arc<EgressStats>,
    pub tuning: Arc<Tuning>,
    /// Longest pause by a rate limit of the guest.
    pub pause: Ns,
    wires: Wires,
    /// Deactivates its rings.
    stop: Box<dyn Fn()>,
}

/// How a [`Pair`] is polled, and its deliberate mistake.
#[derive(Clone, Copy)]
pub(crate) struct Setup {
    pub mistake: Mistake,
    pub policy: Policy,
}

/// Parts of a [`Pair`] that depend on the kind of port.
struct Made {
    ingress: Arc<Mutex<dyn Ingress>>,
    egress: Arc<Mutex<dyn Egress>>,
    pause: Ns,
    wires: Wires,
    stop: Box<dyn Fn()>,
}

/// Transport of kicks and calls.
enum Wires {
    /// Calls by descriptors.
    Virtio {
        calls: [Calls; 2],
        /// The kick descriptor was written; it is never read.
        kicked: bool,
    },
    /// Event channels of the tx and the rx ring, for both.
    Xen([Arc<Channel>; 2]),
    /// A readable descriptor is a kick; frames read or written are calls: `seen` counts those
    /// reported so far.
    Tap { fd: Arc<OwnedFd>, seen: [u64; 2] },
}

/// A ring's call descriptor, and the number of calls read from it.
struct Calls {
    fd: File,
    seen: u64,
}

/// Translates the mistake of one kind of port for the queues of a port of kind `attached`.
fn at(mistake: Mistake, attached: Attached) -> Mistake {
    match (mistake, attached) {
        (Mistake::XenNeverArms, Attached::Xen) => Mistake::NeverArms,
        (Mistake::XenNeverRechecks, Attached::Xen) | (Mistake::TapNeverRechecks, Attached::Tap) => {
            Mistake::NeverRechecks
        }
        (Mistake::XenNeverRechecksRoom, Attached::Xen)
        | (Mistake::TapAwaitsRoom, Attached::Tap) => Mistake::NeverRechecksRoom,
        _ => mistake,
    }
}

type Stats = (Arc<IngressStats>, Arc<EgressStats>);

impl Pair {
    /// Creates queue pair `q` of a guest; `vif` is shared by all those of a Xen guest.
    pub fn new(link: &Link, q: usize, vif: &Arc<Vif>, setup: Setup, random: &mut Random) -> Self {
        let Setup { mistake, policy } = setup;
        let stats = Stats::default();
        let Made { ingress, egress, pause, wires, stop } = match link {
            Link::Virtio(link) => virtio(link, q, &stats, mistake, random),
            Link::Xen(link) => xen(link, q, vif, &stats, mistake),
            Link::Tap(link) => tap(link, q, &stats, mistake),
        };
        let (ingress_stats, egress_stats) = stats;
        let tuning = Arc::new(Tuning::new(policy));
        Self { ingress, ingress_stats, egress, egress_stats, tuning, pause, wires, stop }
    }

    /// Delivers a kick; false: it is masked and stays pending.
    pub fn kick(&mut self, ring: Ring) -> bool {
        match &mut self.wires {
            Wires::Virtio { kicked, .. } => *kicked |= ring == Ring::Tx,
            Wires::Xen(channels) => return channels[usize::from(ring == Ring::Rx)].raise(),
            Wires::Tap { .. } => {}
        }
        true
    }

    /// The ring of a pending kick that is unmasked now.
    pub fn take_deferred_kick(&self) -> Option<Ring> {
        let Wires::Xen(channels) = &self.wires else { return None };
        let deferred = channels.iter().position(|channel| channel.take_deferred())?;
        Some([Ring::Tx, Ring::Rx][deferred])
    }

    /// Whether the ingress queue's descriptor is readable: adding it to an epoll set is an event.
    pub fn is_kicked(&self) -> bool {
        match &self.wires {
            Wires::Virtio { kicked, .. } => *kicked,
            Wires::Xen([tx, _]) => tx.is_raised(),
            Wires::Tap { fd, .. } => tap::is_readable(fd),
        }
    }

    /// Calls of each direction since the last call of this.
    pub fn calls(&mut self) -> [u64; 2] {
        let counted = [self.ingress_stats.calls.get(), self.egress_stats.calls.get()];
        match &mut self.wires {
            Wires::Virtio { calls: [ingress, egress], .. } => {
                [ingress.new_since(counted[0]), egress.new_since(counted[1])]
            }
            Wires::Xen(channels) => std::array::from_fn(|i| channels[i].take_events()),
            Wires::Tap { seen, .. } => {
                let now = [self.ingress_stats.frames.get(), self.egress_stats.frames.get()];
                let before = std::mem::replace(seen, now);
                [0, 1].map(|i| u64::from(now[i] > before[i]))
            }
        }
    }

    pub fn stop(&self) {
        (self.stop)();
    }
}

fn call() -> (Call, Calls) {
    let fd: OwnedFd = os::eventfd().expect("an eventfd");
    let fd = Arc::new(fd);
    let file = File::from(fd.try_clone().expect("a descriptor"));
    (Call::Fd(fd), Calls { fd: file, seen: 0 })
}

impl Calls {
    /// Calls since the last time. The number counted must be the number made.
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

fn virtio(
    link: &virtio::Link,
    q: usize,
    stats: &Stats,
    mistake: Mistake,
    random: &mut Random,
) -> Made {
    let mistake = at(mistake, Attached::Virtio);
    let ring = |ring: usize| {
        let (layout, base) = link.pairs[q][ring];
        DeviceQueue::new(&link.memory, &layout, link.features, base).expect("a valid layout")
    };
    let mut ingress = VirtioIngress::new(Arc::clone(&stats.0));
    let (to_call, ingress_calls) = call();
    ingress.activate(ring(0), Arc::clone(&link.memory), Some(to_call), link.format);
    ingress.enable(true);
    let mut egress = VirtioEgress::new(Arc::clone(&stats.1));
    let (to_call, egress_calls) = call();
    egress.activate(ring(1), Arc::clone(&link.memory), Some(to_call), link.format);
    egress.enable(true);
    let paced = Around { queue: Box::new(ingress), hooks: Pace::new(random) };
    let ingress = Around { queue: Box::new(paced), hooks: Flaw(mistake) };
    let ingress = Arc::new(Mutex::new(Lock::Ingress, ingress));
    let egress = Arc::new(Mutex::new(Lock::Egress, Flawed::new(egress, mistake)));
    let (of_ingress, of_egress) = (Arc::clone(&ingress), Arc::clone(&egress));
    let stop = move || {
        of_ingress.lock().queue.queue.deactivate();
        of_egress.lock().queue.deactivate();
    };
    let calls = [ingress_calls, egress_calls];
    Made {
        ingress,
        egress,
        pause: PAUSE_MAX,
        wires: Wires::Virtio { calls, kicked: false },
        stop: Box::new(stop),
    }
}

/// State shared by the queues of a Xen guest.
pub(crate) fn vif(link: &Link) -> Arc<Vif> {
    let vif = Vif::new();
    if let Link::Xen(link) = link {
        vif.set_rate(link.rate);
        vif.set_mtu(link.mtu);
    }
    Arc::new(vif)
}

fn xen(link: &xen::Link, q: usize, vif: &Arc<Vif>, stats: &Stats, mistake: Mistake) -> Made {
    let mistake = at(mistake, Attached::Xen);
    let [(tx, tx_channel), (rx, rx_channel)] = &link.queues[q];
    let orders = Arc::new(Orders::new(link.queues.len()));
    let wiring = |channel: &Arc<Channel>| Wiring {
        channel: Arc::<Channel>::clone(channel),
        domain: Arc::clone(&link.domain),
        peer: link.peer,
        smart_poll: None,
        vif: Arc::clone(vif),
        orders: Arc::clone(&orders),
        queue: q,
    };
    let mut ingress = XenIngress::new(Arc::clone(&stats.0));
    let arena = Private::plain(XenIngress::ARENA_LEN).expect("memory");
    ingress.activate(BackTx::attach(tx.clone()).expect("a fresh ring"), wiring(tx_channel), arena);
    let mut egress = XenEgress::new(Arc::clone(&stats.1));
    egress.activate(BackRx::attach(rx.clone()).expect("a fresh ring"), wiring(rx_channel));
    let ingress = Around { queue: Box::new(ingress), hooks: Flaw(mistake) };
    let ingress = Arc::new(Mutex::new(Lock::Ingress, ingress));
    let egress = Arc::new(Mutex::new(Lock::Egress, Flawed::new(egress, mistake)));
    let (of_ingress, of_egress) = (Arc::clone(&ingress), Arc::clone(&egress));
    let stop = move || {
        of_ingress.lock().queue.deactivate();
        of_egress.lock().queue.deactivate();
    };
    Made {
        ingress,
        egress,
        pause: link.rate.map_or(Ns::ZERO, |_| 2 * xen::RATE),
        wires: Wires::Xen([tx_channel, rx_channel].map(Arc::clone)),
        stop: Box::new(stop),
    }
}

fn tap(link: &tap::Link, q: usize, stats: &Stats, mistake: Mistake) -> Made {
    let mistake = at(mistake, Attached::Tap);
    let fd = &link.queues[q];
    let end = || TapFd::new(Arc::clone(fd), Batching::Plain);
    let ingress = TapIngress::new(end(), Offloads::default(), Arc::clone(&stats.0));
    let ingress = ingress.expect("memory for its buffers");
    let egress = TapEgress::new(end(), Offloads::default(), Arc::clone(&stats.1));
    let ingress = Around { queue: Box::new(ingress), hooks: Flaw(mistake) };
    Made {
        ingress: Arc::new(Mutex::new(Lock::Ingress, ingress)),
        egress: Arc::new(Mutex::new(Lock::Egress, Flawed::new(egress, mistake))),
        pause: Ns::ZERO,
        wires: Wires::Tap { fd: Arc::clone(fd), seen: [0; 2] },
        stop: Box::new(|| unreachable!("the host is trusted")),
    }
}
