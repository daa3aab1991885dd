//! Connects a vif's rings to the queue pairs of a port.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ring::xen::{
    Armed, AttachError, BackCtrl, BackRx, BackTx, CTRL_SLOT_LEN, Ledger, Malformed, RX_SLOT_LEN,
    TX_SLOT_LEN,
};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use shm::{Area, Domain, Mapping, Private};
use switch::account::{Account, Charge};
use switch::serving::Serving;

use super::keys::{FrontFeatures, QueueKeys, Refused, Request};
use super::vif::{Interface, Plug, Settings, VifId};
use crate::host::{Back, Bound, Channel, HostError, RingPage, SharedChannel};
use crate::port::control::{Control, Orders, OrdersState};
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
    /// The interface of the host for the vif; by default it has none.
    fn interface(&self) -> Interface {
        Interface::None
    }
    /// Notes which port is served while what its guest wrote is read, until the note is dropped.
    fn serving(&self) -> Option<Serving> {
        None
    }
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
    /// Rings of another process, until they are adopted.
    kept: Option<KeptRings>,
    /// Adopted rings, until they are resumed.
    ready: Option<Ready>,
    /// Whether the progress of rings is written down.
    keeps: bool,
}

/// Rings of a vif for another process: what only the control thread changes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingsState {
    /// Our ports of the event channels, in the order in which they are bound, if they stay bound as
    /// long as a process has their descriptors: those, in the same order.
    ports: Vec<u32>,
    orders: OrdersState,
    /// Whether the last descriptor is that of the ledgers.
    ledgers: bool,
}

/// The same in the other process, with the descriptors.
#[derive(Debug, Default)]
pub struct KeptRings {
    /// The state.
    pub state: RingsState,
    /// Its descriptors.
    pub fds: Vec<Arc<OwnedFd>>,
}

impl KeptRings {
    fn bound(&self) -> Vec<Bound> {
        self.fds.iter().cloned().zip(self.state.ports.iter().copied()).collect()
    }
}

/// Memory for the progress of rings, for a successor of this process if it is killed.
struct Ledgers {
    file: Arc<OwnedFd>,
    mapping: Arc<Mapping>,
    _charges: [Option<Charge>; 2],
}

impl Ledgers {
    /// Bytes from one ring's ledger to the next.
    const STRIDE: usize = 4096;

    fn new(rings: usize, account: &Account) -> Option<Self> {
        let len = (rings * Self::STRIDE) as u64;
        Self::map(Arc::new(os::memfd("pvswitch-rings", len).ok()?), rings, account)
    }

    fn map(file: Arc<OwnedFd>, rings: usize, account: &Account) -> Option<Self> {
        let _charges = [account.descriptors.charge(1).ok(), account.mappings.charge(1).ok()];
        let len = (rings * Self::STRIDE) as u64;
        let mapping = Arc::new(Mapping::new(file.as_fd(), 0, len).ok()?);
        Some(Self { file, mapping, _charges })
    }

    /// Of ring `at`: tx and rx of each queue, then the control ring.
    fn of(&self, at: usize) -> Option<Ledger> {
        Area::of(&self.mapping, at * Self::STRIDE, Self::STRIDE).and_then(Ledger::new)
    }
}

/// Where another process continues with rings: what workers change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingPositions {
    /// Positions of the tx and the rx ring of each queue.
    queues: Vec<(u32, u32)>,
    /// Position of the control ring.
    ctrl: Option<u32>,
    /// Addresses of the guest's multicast list.
    multicast: Vec<[u8; 6]>,
}

/// Dropped only after the pairs have released them.
struct Rings {
    count: u16,
    /// Number of queues to which frames may be delivered.
    active: u16,
    vif: Arc<Vif>,
    orders: Arc<Orders>,
    ctrl: Option<Ctrl>,
    pages: Vec<RingPage>,
    /// Event channels that another process can use, with our ports.
    bound: Vec<Bound>,
    ledgers: Option<Ledgers>,
    /// Charge for `pages`.
    _charge: Charge,
}

struct Ctrl {
    control: Control,
    channel: Channel,
}

/// A ring's event channel, and the descriptor to wait for.
type End = (Arc<dyn Event>, Arc<OwnedFd>);

/// A queue's pages and channels; it is not served yet.
struct Queue {
    tx: Area,
    rx: Area,
    tx_end: End,
    rx_end: End,
}

/// A control ring's page and channel.
struct CtrlEnd {
    ring: Area,
    channel: Channel,
}

/// All that rings need, mapped and bound; nothing in them was read or written.
struct Ready {
    queues: Vec<Queue>,
    ctrl: Option<CtrlEnd>,
    peer: Peer,
    smart_poll: bool,
    domain: Arc<Domain>,
    orders: Arc<Orders>,
    pages: Vec<RingPage>,
    bound: Vec<Bound>,
    ledgers: Option<Ledgers>,
    charge: Charge,
}

/// Binds the channels of one request, in order.
struct Binder<'a> {
    host: &'a Arc<dyn Back>,
    domid: u16,
    /// Descriptors and ports of another process's channels, in the same order.
    kept: std::vec::IntoIter<Bound>,
    bound: Vec<Bound>,
}

impl Binder<'_> {
    fn bind(&mut self, port: u32) -> Result<Channel, Refused> {
        let channel = match self.kept.next() {
            Some(kept) => self.host.rebind(self.domid, port, kept),
            None => self.host.bind(self.domid, port),
        };
        let channel = channel.map_err(|e| bad_host(&e))?;
        self.bound.extend(channel.bound());
        Ok(channel)
    }

    fn queue(&mut self, keys: &QueueKeys, pages: &mut Vec<RingPage>) -> Result<Queue, Refused> {
        let (tx, rx) = (self.page(keys.tx_ref, pages)?, self.page(keys.rx_ref, pages)?);
        let channel = self.bind(keys.tx_port)?;
        let (tx_end, rx_end): (End, End) = match keys.rx_port {
            Some(port) => {
                let rx = self.bind(port)?;
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

    fn page(&self, gref: u32, pages: &mut Vec<RingPage>) -> Result<Area, Refused> {
        let page = self.host.map(self.domid, gref).map_err(|e| bad_host(&e))?;
        let area = page.area().ok_or_else(|| Refused::invalid(format!("grant {gref} is short")))?;
        pages.push(page);
        Ok(area)
    }
}

/// Attaches to rings: at known positions, where a ledger says, or where their responses end.
struct Attacher<'a> {
    at: Option<&'a RingPositions>,
    ledgers: Option<&'a Ledgers>,
    queues: usize,
}

impl Attacher<'_> {
    fn ledger(&self, ring: usize) -> Option<Ledger> {
        self.ledgers?.of(ring)
    }

    fn position(&self, ring: usize, page: &Area, slot_len: usize) -> Option<u32> {
        let known = match self.at {
            Some(at) if ring == 2 * self.queues => at.ctrl,
            Some(at) => {
                at.queues.get(ring / 2).map(|at| if ring.is_multiple_of(2) { at.0 } else { at.1 })
            }
            None => None,
        };
        known.or_else(|| self.ledger(ring)?.recover(page.clone(), slot_len))
    }

    fn queue(&self, i: usize, queue: &Queue) -> Result<(BackTx, BackRx), Refused> {
        let (tx, rx) = (queue.tx.clone(), queue.rx.clone());
        let tx = match self.position(2 * i, &tx, TX_SLOT_LEN) {
            Some(at) => BackTx::attach_at(tx, at),
            None => BackTx::attach(tx),
        };
        let rx = match self.position(2 * i + 1, &rx, RX_SLOT_LEN) {
            Some(at) => BackRx::attach_at(rx, at),
            None => BackRx::attach(rx),
        };
        let mut tx = tx.map_err(|e| bad_ring("tx", e))?;
        let mut rx = rx.map_err(|e| bad_ring("rx", e))?;
        self.ledger(2 * i).into_iter().for_each(|ledger| tx.keep(ledger));
        self.ledger(2 * i + 1).into_iter().for_each(|ledger| rx.keep(ledger));
        Ok((tx, rx))
    }

    fn ctrl(&self, page: &Area) -> Result<BackCtrl, Refused> {
        let ring = 2 * self.queues;
        let attached = match self.position(ring, page, CTRL_SLOT_LEN) {
            Some(at) => BackCtrl::attach_at(page.clone(), at),
            None => BackCtrl::attach(page.clone()),
        };
        let mut attached = attached.map_err(|e| bad_ring("control", e))?;
        self.ledger(ring).into_iter().for_each(|ledger| attached.keep(ledger));
        Ok(attached)
    }
}

impl<Q: Queues> Socket<Q> {
    /// Creates a socket without rings.
    pub fn new(host: Arc<dyn Back>, id: VifId, pairs: Vec<Pair>, queues: Q) -> Self {
        // Without an account, mappings are counted but not limited.
        let account = Account::default();
        account.set_limit("mappings", u64::MAX);
        let account = Arc::new(account);
        Self {
            host,
            id,
            pairs,
            queues,
            account,
            rings: None,
            settings: None,
            kept: None,
            ready: None,
            keeps: false,
        }
    }

    /// Has the next request that is adopted continue with another process's rings.
    #[must_use]
    pub fn with_kept(mut self, kept: Option<KeptRings>) -> Self {
        self.kept = kept;
        self
    }

    /// Has the progress of rings written down (`keeps`), so that a successor can continue if this
    /// process is killed.
    #[must_use]
    pub fn keeping(mut self, keeps: bool) -> Self {
        self.keeps = keeps;
        self
    }

    /// Returns the state of rings that run for another process, and its descriptors.
    pub fn export(&self) -> Option<(RingsState, Vec<&Arc<OwnedFd>>)> {
        let rings = self.rings.as_ref()?;
        let ports = rings.bound.iter().map(|(_, port)| *port).collect();
        let mut fds: Vec<_> = rings.bound.iter().map(|(fd, _)| fd).collect();
        fds.extend(rings.ledgers.as_ref().map(|ledgers| &ledgers.file));
        let (orders, ledgers) = (rings.orders.export(), rings.ledgers.is_some());
        Some((RingsState { ports, orders, ledgers }, fds))
    }

    /// Where another process continues with the rings. No worker may serve them from here until the
    /// other process has taken over or failed; then this one continues.
    pub fn positions(&self) -> Option<RingPositions> {
        let rings = self.rings.as_ref()?;
        let pairs = self.pairs.iter().take(rings.count.into());
        let of = |pair: &Pair| {
            let tx = pair.ingress.lock().position()?;
            Some((tx, pair.egress.lock().position()?))
        };
        let ctrl = rings.ctrl.as_ref().map(|ctrl| ctrl.control.position());
        let multicast = rings.vif.multicast();
        Some(RingPositions { queues: pairs.map(of).collect::<Option<_>>()?, ctrl, multicast })
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

    /// Maps and binds all that a request names, or nothing.
    fn ready(&self, request: &Request) -> Result<Ready, Refused> {
        // Two pages per queue, and one for the control ring.
        let all = 2 * request.queues.len() as u64 + u64::from(request.ctrl.is_some());
        let over = |error| bad_host(&HostError::OverLimit { domid: self.id.domid, error });
        let charge = self.account.mappings.charge(all).map_err(over)?;
        let kept = self.kept.as_ref().map(KeptRings::bound).unwrap_or_default();
        let mut pages = Vec::new();
        let domain = self.host.domain(self.id.domid).map_err(|e| bad_host(&e))?;
        let mut binder = Binder {
            host: &self.host,
            domid: self.id.domid,
            kept: kept.into_iter(),
            bound: Vec::new(),
        };
        let queues = request.queues.iter().map(|q| binder.queue(q, &mut pages));
        let queues: Vec<Queue> = queues.collect::<Result<_, _>>()?;
        let ctrl = request.ctrl.as_ref().map(|keys| {
            let ring = binder.page(keys.ring_ref, &mut pages)?;
            Ok(CtrlEnd { ring, channel: binder.bind(keys.port)? })
        });
        let ctrl = ctrl.transpose()?;
        let orders = Arc::new(Orders::new(queues.len()));
        if let Some(kept) = &self.kept {
            orders.import(&kept.state.orders, &mut self.mapper());
        }
        let (peer, smart_poll) = (peer(&request.features), request.features.smart_poll);
        let bound = binder.bound;
        let ledgers = self.keeps.then(|| self.ledgers(2 * queues.len() + 1)).flatten();
        Ok(Ready { queues, ctrl, peer, smart_poll, domain, orders, pages, bound, ledgers, charge })
    }

    /// Those of another process, or new ones.
    fn ledgers(&self, rings: usize) -> Option<Ledgers> {
        let kept = self.kept.as_ref().filter(|kept| kept.state.ledgers);
        match kept.and_then(|kept| kept.fds.last()) {
            Some(file) => Ledgers::map(Arc::clone(file), rings, &self.account),
            None => Ledgers::new(rings, &self.account),
        }
    }

    fn mapper(&self) -> PageMapper {
        let (host, pairs) = (Arc::clone(&self.host), self.pairs.clone());
        let mapper = PageMapper::new(host, self.id.domid, pairs, self.queues.log());
        mapper.charged_to(&self.account.mappings)
    }

    /// Attaches to rings, where their responses end or at these positions, and starts queues.
    fn run(&mut self, ready: Ready, at: Option<&RingPositions>) -> Result<(), Refused> {
        let Ready { queues, ctrl, peer, smart_poll, domain, orders, pages, .. } = ready;
        let Ready { bound, ledgers, charge, .. } = ready;
        // All of them first: none is served if one is invalid.
        let attach = Attacher { at, ledgers: ledgers.as_ref(), queues: queues.len() };
        let attached = queues.iter().enumerate().map(|(i, queue)| attach.queue(i, queue));
        let attached: Vec<_> = attached.collect::<Result<_, _>>()?;
        let ctrl = ctrl.map(|CtrlEnd { ring, channel }| {
            let ring = attach.ctrl(&ring)?;
            let (domain, orders) = (Arc::clone(&domain), Arc::clone(&orders));
            let control = Control::new(ring, domain, orders, Some(Box::new(self.mapper())));
            Ok(Ctrl { control, channel })
        });
        let ctrl = ctrl.transpose()?;
        let vif = Arc::new(Vif::new());
        match at {
            Some(at) => vif.set_multicast(at.multicast.clone()),
            // The list of a killed process is lost: everything is delivered.
            None if self.kept.is_some() => vif.lose_multicast(),
            None => {}
        }
        // Before the first burst.
        self.settings.iter().for_each(|settings| apply(&vif, None, settings));
        let count = u16::try_from(queues.len()).expect("16 at most");
        let rings = queues.into_iter().zip(attached);
        for ((number, pair), (queue, (tx, rx))) in (0..count).zip(&self.pairs).zip(rings) {
            let Queue { tx_end, rx_end, .. } = queue;
            let smart_poll = smart_poll.then(|| Arc::new(rx.smart_poll()));
            let wiring = |channel| Wiring {
                channel,
                domain: Arc::clone(&domain),
                peer,
                smart_poll: smart_poll.clone(),
                vif: Arc::clone(&vif),
                orders: Arc::clone(&orders),
                queue: usize::from(number),
            };
            pair.ingress.lock().activate(tx, wiring(tx_end.0), self.arena());
            pair.egress.lock().activate(rx, wiring(rx_end.0));
            // An earlier back half may have ended between publishing and notifying.
            pair.ingress.lock().renotify();
            pair.egress.lock().renotify();
            self.queues.start(number, tx_end.1, rx_end.1);
        }
        let active = 0;
        self.rings = Some(Rings {
            count,
            active,
            vif,
            orders,
            ctrl,
            pages,
            bound,
            ledgers,
            _charge: charge,
        });
        Ok(())
    }

    /// Starts or stops delivery, as set.
    fn open(&mut self) {
        let Some(rings) = &mut self.rings else { return };
        let link = rings.vif.has_link();
        if !link {
            // Bursts in progress may have seen the link up; addresses they learned are flushed
            // below.
            self.pairs.iter().for_each(|pair| drop(pair.ingress.lock()));
        }
        let active = if link { rings.count } else { 0 };
        if std::mem::replace(&mut rings.active, active) != active {
            self.queues.set_active(active);
        }
    }

    fn end(&mut self) {
        let Some(rings) = self.rings.take() else { return };
        // After bursts in progress: addresses they learned are flushed below.
        for pair in self.pairs.iter().take(rings.count.into()) {
            pair.ingress.lock().deactivate();
        }
        self.queues.set_active(0);
        for (queue, pair) in (0..rings.count).zip(&self.pairs) {
            self.queues.stop(queue);
            pair.egress.lock().deactivate();
        }
        // Those of another process stay bound with its descriptors.
        rings.bound.iter().for_each(|bound| self.host.unbind(bound));
    }
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

    fn interface(&mut self) -> Interface {
        self.queues.interface()
    }

    fn connect(&mut self, request: &Request) -> Result<(), Refused> {
        self.end();
        // They cannot be bound while another process's descriptors are.
        self.release_kept();
        let ready = self.ready(request)?;
        self.run(ready, None)
    }

    fn adopt(&mut self, request: &Request) -> Result<(), Refused> {
        if self.kept.is_none() {
            return Err(Refused::invalid("its rings were not kept".into()));
        }
        self.ready = Some(self.ready(request)?);
        Ok(())
    }

    fn resume(&mut self, at: Option<&RingPositions>) -> Result<(), Refused> {
        let Some(ready) = self.ready.take() else {
            return Err(Refused::invalid("its rings were not adopted".into()));
        };
        self.run(ready, at)?;
        self.kept = None;
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
        self.ready = None;
        self.end();
    }

    fn release_kept(&mut self) {
        if let Some(kept) = self.kept.take() {
            kept.bound().iter().for_each(|bound| self.host.unbind(bound));
        }
    }

    fn serving(&self) -> Option<Serving> {
        self.queues.serving()
    }
}

impl<Q: Queues> Drop for Socket<Q> {
    fn drop(&mut self) {
        self.end();
    }
}
