//! Connects a vif's rings to the queue pairs of a port.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ring::xen::{Armed, AttachError, BackCtrl, BackRx, BackTx, Malformed};
use rustix::io::Errno;
use shm::Private;
use switch::account::{Account, Charge};

use super::keys::{CtrlKeys, FrontFeatures, QueueKeys, Refused, Request};
use super::vif::{Plug, Settings, VifId};
use crate::host::{Back, Channel, HostError, RingPage, SharedChannel};
use crate::port::control::{Control, Orders};
use crate::port::{Event, PageMapper, Pair, Peer, Vif, Wiring, XenIngress};

/// Callbacks to a port's owner.
pub trait Queues {
    /// Starts a queue. `tx` becomes readable when its front half sends, `rx` when it posts pages:
    /// edge-triggered, to be waited for and not read.
    fn start(&mut self, queue: u16, tx: Arc<OwnedFd>, rx: Arc<OwnedFd>);
    /// Stops a queue.
    fn stop(&mut self, queue: u16);
    /// Sets the number of queues, from the first, to which frames may be delivered.
    fn set_active(&mut self, queues: u16);
    /// Returns a function that logs why static grants could not be mapped; a guest can cause any
    /// number of calls.
    fn log(&self) -> Box<dyn FnMut(HostError) + Send>;
}

/// The queue pairs of one port, and the rings connected to them.
pub struct Socket<Q: Queues> {
    host: Arc<dyn Back>,
    id: VifId,
    pairs: Vec<Pair>,
    queues: Q,
    account: Arc<Account>,
    rings: Option<Rings>,
    /// Settings of the current rings, or of the next ones.
    settings: Option<Settings>,
}

/// Dropped only after the pairs have released them.
struct Rings {
    count: u16,
    /// Number of queues to which frames may be delivered.
    active: u16,
    vif: Arc<Vif>,
    ctrl: Option<Ctrl>,
    pages: Vec<RingPage>,
    /// Charge for `pages`.
    _charge: Charge,
}

struct Ctrl {
    control: Control,
    channel: Channel,
}

/// A ring's event channel, and the descriptor to wait for.
type End = (Arc<dyn Event>, Arc<OwnedFd>);

/// A complete queue.
struct Queue {
    tx: BackTx,
    rx: BackRx,
    tx_end: End,
    rx_end: End,
}

impl<Q: Queues> Socket<Q> {
    /// Creates a socket without rings.
    pub fn new(host: Arc<dyn Back>, id: VifId, pairs: Vec<Pair>, queues: Q) -> Self {
        // Without an account, mappings are counted but not limited.
        let account = Account::default();
        account.set_limit("mappings", u64::MAX);
        let account = Arc::new(account);
        Self { host, id, pairs, queues, account, rings: None, settings: None }
    }

    /// Private memory of one ingress queue: of the kind that the host copies to fastest, if it has
    /// any left.
    fn arena(&self) -> Private {
        let preferred = self.host.private(XenIngress::ARENA_LEN);
        preferred.or_else(|| Private::plain(XenIngress::ARENA_LEN).ok()).unwrap_or_default()
    }

    /// Charges mappings of its guest to `account`.
    #[must_use]
    pub fn charged_to(mut self, account: Arc<Account>) -> Self {
        self.account = account;
        self
    }

    /// Readable when the control ring is to be served ([`serve_control`](Self::serve_control)).
    pub fn control(&self) -> Option<Arc<OwnedFd>> {
        Some(self.rings.as_ref()?.ctrl.as_ref()?.channel.fd())
    }

    /// Serves at most a ring of control requests. Returns whether there are more: it must then be
    /// called again, without an event.
    ///
    /// # Errors
    /// [`Malformed`]: a protocol violation by the guest.
    pub fn serve_control(&mut self) -> Result<bool, Malformed> {
        let Some(ctrl) = self.rings.as_mut().and_then(|r| r.ctrl.as_mut()) else {
            return Ok(false);
        };
        // Before the ring is read: a later event is then delivered again.
        ctrl.channel.ack();
        if ctrl.control.serve()? {
            ctrl.channel.notify();
        }
        Ok(ctrl.control.arm() != Armed::Armed)
    }

    /// Whether the peer revoked a ring's memory.
    pub fn is_lost(&self) -> bool {
        self.rings.as_ref().is_some_and(|r| r.pages.iter().any(RingPage::is_lost))
    }

    fn queue(&self, keys: &QueueKeys, pages: &mut Vec<RingPage>) -> Result<Queue, Refused> {
        let tx = BackTx::attach(self.page(keys.tx_ref, pages)?).map_err(|e| bad_ring("tx", e))?;
        let rx = BackRx::attach(self.page(keys.rx_ref, pages)?).map_err(|e| bad_ring("rx", e))?;
        let bind = |port| self.host.bind(self.id.domid, port).map_err(|e| bad_host(&e));
        let channel = bind(keys.tx_port)?;
        let (tx_end, rx_end): (End, End) = match keys.rx_port {
            Some(port) => {
                let rx = bind(port)?;
                let (tx_fd, rx_fd) = (channel.fd(), rx.fd());
                ((Arc::new(channel), tx_fd), (Arc::new(rx), rx_fd))
            }
            None => {
                let [tx, rx] = SharedChannel::pair(channel).map_err(|e| bad_host(&e))?;
                let (tx_fd, rx_fd) = (tx.fd(), rx.fd());
                ((Arc::new(tx), tx_fd), (Arc::new(rx), rx_fd))
            }
        };
        Ok(Queue { tx, rx, tx_end, rx_end })
    }

    fn page(&self, gref: u32, pages: &mut Vec<RingPage>) -> Result<shm::Area, Refused> {
        let page = self.host.map(self.id.domid, gref).map_err(|e| bad_host(&e))?;
        let area = page.area().ok_or_else(|| Refused::invalid(format!("grant {gref} is short")))?;
        pages.push(page);
        Ok(area)
    }

    fn ctrl(
        &self,
        keys: &CtrlKeys,
        orders: &Arc<Orders>,
        pages: &mut Vec<RingPage>,
    ) -> Result<Ctrl, Refused> {
        let ring = BackCtrl::attach(self.page(keys.ring_ref, pages)?);
        let ring = ring.map_err(|e| bad_ring("control", e))?;
        let domain = self.host.domain(self.id.domid).map_err(|e| bad_host(&e))?;
        let channel = self.host.bind(self.id.domid, keys.port).map_err(|e| bad_host(&e))?;
        let (host, pairs) = (Arc::clone(&self.host), self.pairs.clone());
        let mapper = PageMapper::new(host, self.id.domid, pairs, self.queues.log());
        let mapper = mapper.charged_to(&self.account.mappings);
        let control = Control::new(ring, domain, Arc::clone(orders), Some(Box::new(mapper)));
        Ok(Ctrl { control, channel })
    }

    /// Starts or stops delivery, as set.
    fn open(&mut self) {
        let Some(rings) = &mut self.rings else { return };
        let link = rings.vif.has_link();
        if !link {
            // Bursts in progress may have seen the link up; addresses they learned are flushed
            // below.
            self.pairs.iter().for_each(|pair| drop(lock(&pair.ingress)));
        }
        let active = if link { rings.count } else { 0 };
        if std::mem::replace(&mut rings.active, active) != active {
            self.queues.set_active(active);
        }
    }

    fn end(&mut self) {
        let Some(rings) = self.rings.take() else { return };
        self.queues.set_active(0);
        for (queue, pair) in (0..rings.count).zip(&self.pairs) {
            self.queues.stop(queue);
            lock(&pair.ingress).deactivate();
            lock(&pair.egress).deactivate();
        }
    }
}

fn lock<T>(queue: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn bad_ring(which: &str, error: AttachError) -> Refused {
    Refused::invalid(format!("{which} ring: {error}"))
}

fn bad_host(error: &HostError) -> Refused {
    Refused { errno: Errno::IO, text: error.to_string() }
}

/// Applies changed settings to the vif shared by its queues.
fn apply(vif: &Vif, old: Option<Settings>, new: &Settings) {
    vif.set_link(new.link);
    // Resets the token bucket.
    if old.is_none_or(|old| old.rate != new.rate) {
        vif.set_rate(new.rate);
    }
    vif.filter_multicast(new.multicast_control);
    vif.set_mtu(new.mtu.unwrap_or(0));
}

/// A front end's features as options of its port.
fn peer(features: &FrontFeatures) -> Peer {
    Peer {
        sg: features.sg,
        gso4: features.gso_tcpv4,
        gso6: features.gso_tcpv6,
        csum4: !features.no_csum_offload,
        csum6: features.ipv6_csum_offload,
        rx_notify: features.rx_notify,
    }
}

impl<Q: Queues> Plug for Socket<Q> {
    fn claimed_by(&mut self) -> Option<String> {
        self.host.claimed_by(self.id.domid, self.id.devid)
    }

    fn connect(&mut self, request: &Request) -> Result<(), Refused> {
        self.end();
        // Two pages per queue, and one for the control ring.
        let all = 2 * request.queues.len() as u64 + u64::from(request.ctrl.is_some());
        let over = |error| bad_host(&HostError::OverLimit { domid: self.id.domid, error });
        let charge = self.account.mappings.charge(all).map_err(over)?;
        let mut pages = Vec::new();
        let domain = self.host.domain(self.id.domid).map_err(|e| bad_host(&e))?;
        let queues: Vec<Queue> =
            request.queues.iter().map(|q| self.queue(q, &mut pages)).collect::<Result<_, _>>()?;
        let ctrl = request.ctrl.as_ref();
        let orders = Arc::new(Orders::new(queues.len()));
        let ctrl = ctrl.map(|c| self.ctrl(c, &orders, &mut pages)).transpose()?;
        let vif = Arc::new(Vif::new());
        // Before the first burst.
        self.settings.iter().for_each(|settings| apply(&vif, None, settings));
        let count = u16::try_from(queues.len()).expect("16 at most");
        for ((number, pair), queue) in (0..count).zip(&self.pairs).zip(queues) {
            let Queue { tx, rx, tx_end, rx_end } = queue;
            let smart_poll = request.features.smart_poll.then(|| Arc::new(rx.smart_poll()));
            let wiring = |channel| Wiring {
                channel,
                domain: Arc::clone(&domain),
                peer: peer(&request.features),
                smart_poll: smart_poll.clone(),
                vif: Arc::clone(&vif),
                orders: Arc::clone(&orders),
                queue: usize::from(number),
            };
            lock(&pair.ingress).activate(tx, wiring(tx_end.0), self.arena());
            lock(&pair.egress).activate(rx, wiring(rx_end.0));
            self.queues.start(number, tx_end.1, rx_end.1);
        }
        self.rings = Some(Rings { count, active: 0, vif, ctrl, pages, _charge: charge });
        Ok(())
    }

    fn set(&mut self, settings: &Settings) {
        let old = self.settings.replace(*settings);
        if let Some(rings) = &self.rings {
            apply(&rings.vif, old, settings);
            self.open();
        }
    }

    fn disconnect(&mut self) {
        self.end();
    }
}

impl<Q: Queues> Drop for Socket<Q> {
    fn drop(&mut self) {
        self.end();
    }
}
