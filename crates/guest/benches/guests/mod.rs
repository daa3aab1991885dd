//! Two guests, the first of which sends to the second: their halves of both rings.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ring::virtq::{Buf, DeviceQueue, DriverQueue, Features, Layout, RingLog, Used};
use ring::xen::{
    BackCtrl, BackRx, BackTx, CtrlRequest, FrontCtrl, GrefEntry, RxPacket, ctrl_status, ctrl_type,
};
use shm::sync::Mutex;
use shm::{DirtyLog, GuestMemory, Mapping, Private, Region};
use switch::forward::EgressQueue;
use switch::frame::FRAME_LEN_MAX;
use switch::port::Ingress;
use switch::stats::IngressStats;
use switch::vnet::{Offloads, VnetHdr};
use vhost_user::port::{Format, GuestQueue};
use xen_netif::front::{Agreed, RxQueue, TxQueue};
use xen_netif::host::{Back, Front, Pages};
use xen_netif::port::control::{Control, Orders};
use xen_netif::port::{Event, PageMapper, Pair, Peer, Vif, Wiring, XenIngress};

/// Frames per send.
pub const FRAMES: usize = 32;

/// A sending queue, a receiving queue, and the switch's halves of them.
pub struct Lane {
    pub ingress: Arc<Mutex<dyn Ingress>>,
    pub ingress_stats: Arc<IngressStats>,
    /// Until it is moved to a port.
    pub egress: Option<EgressQueue>,
    pub guests: Box<dyn Guests>,
}

/// The guests' work.
pub trait Guests: Send {
    /// Sends [`FRAMES`] frames from the first guest.
    fn send(&mut self);
    /// Whether the back end asked for a kick for these.
    fn kicks(&mut self) -> bool;
    /// Reclaims sent frames, and receives. Returns the number of frames received.
    fn take(&mut self) -> usize;
}

/// Start of a frame to an address: IPv4 and UDP, of flow `flow`. Each pair has a source address of
/// its own: one used by several ports would move between them with each burst.
fn head(to: [u8; 6], flow: u16, len: u16) -> Vec<u8> {
    let mut from = super::MACS[0];
    from[3..5].copy_from_slice(&to[3..5]);
    let mut head = [to, from].concat();
    head.extend([0x08, 0, 0x45, 0]);
    head.extend((len - 14).to_be_bytes());
    head.extend([0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    head.extend(flow.to_be_bytes());
    head.extend([0, 9]);
    head.extend((len - 34).to_be_bytes());
    head.extend([0, 0]);
    head
}

// ---- virtio ----

const BUFFER: u64 = 2048;
const BASE: u64 = 0x10_0000;

/// A guest: its memory, and the driver half of one ring.
struct Half {
    memory: Arc<GuestMemory>,
    driver: DriverQueue,
    buffers: u64,
}

impl Half {
    fn addr(&self, i: u16) -> u64 {
        self.buffers + u64::from(i) * BUFFER
    }
}

struct Virtio {
    tx: Half,
    rx: Half,
    size: u16,
    len: u32,
    next: u16,
    used: Vec<Used>,
}

fn half(features: Features, size: u16, logged: bool) -> (Half, DeviceQueue) {
    let len = 0x4_0000 + u64::from(size) * BUFFER;
    let mapping = Arc::new(Mapping::memfd("bench", len).expect("memory"));
    let region = Region { guest_addr: BASE, user_addr: 0, len, offset: 0, mapping };
    let memory = Arc::new(GuestMemory::new(vec![region]).expect("one region"));
    let layout = Layout { size, desc: BASE, driver: BASE + 0x1_0000, device: BASE + 0x2_0000 };
    let base = if features.packed { 0x8000_8000 } else { 0 };
    let driver = DriverQueue::new(&memory, &layout, features, base, None).expect("driver half");
    let mut device = DeviceQueue::new(&memory, &layout, features, base).expect("device half");
    if logged {
        let mapping = Arc::new(Mapping::memfd("log", 1 << 12).expect("memory"));
        let log = Arc::new(DirtyLog::new(&mapping, 0, 1 << 12).expect("a log"));
        device.set_log(Some(RingLog { log, desc: layout.desc, device: layout.device }));
    }
    (Half { memory, driver, buffers: BASE + 0x4_0000 }, device)
}

/// Queue `queue` of two virtio guests, whose rings have `size` descriptors.
pub fn virtio(features: Features, offloads: bool, queue: u16, size: u16, len: u16) -> Lane {
    lane(features, offloads, queue, [size, len], false, super::MACS[1])
}

/// The same without offloads, with another address of the second guest.
pub fn virtio_to(to: [u8; 6], features: Features, size: u16, len: u16) -> Lane {
    lane(features, false, 0, [size, len], false, to)
}

/// The same of two guests that migrate.
pub fn migrating(features: Features, size: u16, len: u16) -> Lane {
    lane(features, false, 0, [size, len], true, super::MACS[1])
}

fn lane(
    features: Features,
    offloads: bool,
    queue: u16,
    [size, len]: [u16; 2],
    logged: bool,
    to: [u8; 6],
) -> Lane {
    let offloads = if offloads { Offloads::ALL } else { Offloads::default() };
    let format = Format {
        hdr_len: 12,
        mergeable: !features.in_order,
        sends: offloads,
        takes: offloads,
        frame_len_max: FRAME_LEN_MAX,
    };
    let (tx, tx_device) = half(features, size, logged);
    let (mut rx, rx_device) = half(features, size, logged);
    let (a, b) = (vhost_user::net::Pair::new(), vhost_user::net::Pair::new());
    let mut ingress = a.ingress.lock();
    ingress.activate(tx_device, Arc::clone(&tx.memory), None, format);
    ingress.enable(true);
    drop(ingress);
    let mut egress = b.egress.lock();
    egress.activate(rx_device, Arc::clone(&rx.memory), None, format);
    egress.enable(true);
    drop(egress);
    for i in 0..size {
        let mut seg = tx.memory.seg_mut(tx.addr(i), 64, &mut 0).expect("a buffer");
        seg.write(&[0; 12]);
        seg.write(&head(to, queue << 10 | i, len));
        rx.driver.add(&[Buf { addr: rx.addr(i), len: BUFFER as u32, write: true }]).expect("room");
    }
    rx.driver.publish();
    let guests = Virtio { tx, rx, size, len: u32::from(len), next: 0, used: Vec::new() };
    Lane {
        ingress: a.ingress.clone(),
        ingress_stats: a.ingress_stats,
        egress: Some(EgressQueue::new(b.egress.clone(), b.egress_stats)),
        guests: Box::new(guests),
    }
}

impl Guests for Virtio {
    fn send(&mut self) {
        for _ in 0..FRAMES {
            let addr = self.tx.addr(self.next % self.size);
            self.tx.driver.add(&[Buf { addr, len: 12 + self.len, write: false }]).expect("room");
            self.next = self.next.wrapping_add(1);
        }
        self.tx.driver.publish();
    }

    fn kicks(&mut self) -> bool {
        self.tx.driver.kick_needed()
    }

    fn take(&mut self) -> usize {
        self.used.clear();
        self.tx.driver.take_used(usize::from(self.size), &mut self.used).expect("well formed");
        self.used.clear();
        self.rx.driver.take_used(usize::from(self.size), &mut self.used).expect("well formed");
        for used in &self.used {
            let addr = self.rx.buffers + u64::from(used.id) * BUFFER;
            self.rx.driver.add(&[Buf { addr, len: BUFFER as u32, write: true }]).expect("room");
        }
        self.rx.driver.publish();
        self.used.len()
    }
}

// ---- Xen ----

/// Slots of a ring, and number of buffers.
pub const SLOTS: u16 = 256;

/// A channel without a peer that sleeps.
struct Quiet;

impl Event for Quiet {
    fn notify(&self) {}
    fn ack(&self) {}
}

struct Xen {
    tx: TxQueue,
    rx: RxQueue,
    free: Vec<u16>,
    packet: RxPacket,
    len: u32,
    _keeps: Arc<Keeps>,
}

/// Resources of both guests, in drop order.
struct Keeps {
    _pages: Vec<Pages>,
    _domains: [Domain; 2],
}

struct Dir(std::path::PathBuf);

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A domain with its front end and its back end.
struct Domain {
    front: xen_local::Front,
    back: Arc<dyn Back>,
    _dir: Dir,
}

fn domain() -> Domain {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("pvs-bench-{}-{n}", std::process::id()));
    let back = Arc::new(xen_local::Back::open(&dir, &os::Permissions::OWNER).expect("a directory"));
    let front = xen_local::Front::open(&dir).expect("a back end");
    Domain { front, back, _dir: Dir(dir) }
}

/// Has the back end map these grants permanently, over the control ring.
fn keep(domain: &Domain, orders: &Arc<Orders>, pairs: &[Pair], grants: &[(usize, Vec<u32>)]) {
    let pages = domain.front.alloc(2, 0, false).expect("pages");
    let mut front = FrontCtrl::new(pages.area(0).expect("a page"));
    let ring = domain.back.map(1, pages.grefs[0]).expect("granted").area().expect("a page");
    let granter = domain.back.domain(1).expect("a domain");
    let mapper = PageMapper::new(Arc::clone(&domain.back), 1, pairs.to_vec(), |e| panic!("{e}"));
    let ring = BackCtrl::attach(ring).expect("a fresh ring");
    let mut control = Control::new(ring, granter, Arc::clone(orders), Some(Box::new(mapper)));
    for (queue, grefs) in grants {
        let entry = |gref: &u32| GrefEntry { gref: *gref, readonly: false, status: 0 }.encode();
        let list: Vec<u8> = grefs.iter().flat_map(entry).collect();
        let mut page = pages.memory.seg_mut(4096, list.len() as u32, &mut 0).expect("a page");
        page.write(&list);
        let data = [*queue as u32, pages.grefs[1], grefs.len() as u32];
        let request = CtrlRequest { id: 1, kind: ctrl_type::ADD_GREF_MAPPING, data };
        assert!(front.put(request));
        front.publish();
        control.serve().expect("well formed");
        let answer = front.take().expect("well formed").expect("an answer");
        assert_eq!(answer.status, ctrl_status::SUCCESS);
    }
}

/// What the ends of a vif agree on.
pub fn agreed(queues: u16, statics: bool) -> Agreed {
    Agreed {
        queues,
        split: true,
        ctrl: statics,
        smart_poll: false,
        multicast: false,
        sg: true,
        gso_tcpv4: true,
        gso_tcpv6: true,
        csum4: true,
        csum6: true,
        trusted: true,
    }
}

/// All queues of two vifs. Grants are copied by memcpy or, with `statics`, stay mapped.
pub fn vif(queues: u16, statics: bool, len: u16) -> Vec<Lane> {
    let [a, b] = [domain(), domain()];
    let agreed = agreed(queues, statics);
    let peer = Peer { sg: true, gso4: true, gso6: true, csum4: true, csum6: true, rx_notify: true };
    let orders = [0; 2].map(|_| Arc::new(Orders::new(queues.into())));
    let vifs = [0; 2].map(|_| Arc::new(Vif::new()));
    let (mut pages, mut made, mut grants) = (Vec::new(), Vec::new(), [Vec::new(), Vec::new()]);
    let pairs = [0; 2].map(|_| (0..queues).map(|_| Pair::new()).collect::<Vec<_>>());
    for (queue, (from, to)) in pairs[0].iter().zip(&pairs[1]).enumerate() {
        let wiring = |side: usize, domain: &Domain| Wiring {
            channel: Arc::new(Quiet),
            domain: domain.back.domain(1).expect("a domain"),
            peer,
            smart_poll: None,
            vif: Arc::clone(&vifs[side]),
            orders: Arc::clone(&orders[side]),
            queue,
        };
        let ring = |domain: &Domain| {
            let page = domain.front.alloc(1, 0, false).expect("a page");
            let buffers = domain.front.alloc(SLOTS.into(), 0, false).expect("pages");
            let theirs = domain.back.map(1, page.grefs[0]).expect("granted");
            (page, buffers, theirs.area().expect("a page"))
        };
        let (page, buffers, theirs) = ring(&a);
        let tx = TxQueue::new(page.area(0).expect("a page"), buffers.grefs.clone(), 1, &agreed);
        for i in 0..SLOTS {
            let at = u64::from(i) * 4096;
            let mut seg = buffers.memory.seg_mut(at, 64, &mut 0).expect("a page");
            seg.write(&head(super::MACS[1], (queue as u16) << 10 | i, len));
        }
        let attached = BackTx::attach(theirs).expect("a fresh ring");
        let arena = Private::plain(XenIngress::ARENA_LEN).expect("memory");
        from.ingress.lock().activate(attached, wiring(0, &a), arena);
        grants[0].push((queue, buffers.grefs.clone()));
        pages.extend([page, buffers]);
        let (page, buffers, theirs) = ring(&b);
        let rx = RxQueue::new(page.area(0).expect("a page"), buffers.grefs.clone());
        let attached = BackRx::attach(theirs).expect("a fresh ring");
        to.egress.lock().activate(attached, wiring(1, &b));
        grants[1].push((queue, buffers.grefs.clone()));
        pages.extend([page, buffers]);
        made.push((tx, rx));
    }
    if statics {
        keep(&a, &orders[0], &pairs[0], &grants[0]);
        keep(&b, &orders[1], &pairs[1], &grants[1]);
    }
    let keeps = Arc::new(Keeps { _pages: pages, _domains: [a, b] });
    let lane = |(queue, (tx, rx)): (usize, (TxQueue, RxQueue))| Lane {
        ingress: pairs[0][queue].ingress.clone(),
        ingress_stats: Arc::clone(&pairs[0][queue].ingress_stats),
        egress: Some(EgressQueue::new(
            pairs[1][queue].egress.clone(),
            Arc::clone(&pairs[1][queue].egress_stats),
        )),
        guests: Box::new(Xen {
            tx,
            rx,
            free: (0..SLOTS).collect(),
            packet: RxPacket::new(),
            len: len.into(),
            _keeps: Arc::clone(&keeps),
        }),
    };
    made.into_iter().enumerate().map(lane).collect()
}

impl Guests for Xen {
    fn send(&mut self) {
        for _ in 0..FRAMES {
            let buffer = self.free.pop().expect("more buffers than frames");
            self.tx.send(buffer, 0, self.len, &VnetHdr::NONE).expect("room");
        }
        self.tx.publish();
    }

    fn kicks(&mut self) -> bool {
        self.tx.notify_needed()
    }

    fn take(&mut self) -> usize {
        self.tx.reclaim(&mut self.free).expect("well formed");
        assert_eq!((self.tx.errors, self.tx.dropped), (0, 0));
        let mut frames = 0;
        while self.rx.take(&mut self.packet, 1).expect("well formed") {
            frames += 1;
            for slot in &self.packet.slots {
                self.rx.post(slot.request.id);
            }
        }
        self.rx.publish();
        frames
    }
}
