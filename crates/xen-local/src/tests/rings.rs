//! Both halves of a vif, each with its own connection to the store: handshakes, rings, frames.

use ring::xen::{Multicast, RxPacket};
use shm::GRANT_LEN;
use switch::frame::{BURST_MAX, Burst};
use switch::port::{Egress, Ingress};
use switch::vnet::VnetHdr;
use xen_netif::back::{DomainStore, Handshake as BackHalf, Offer, Queues, Socket, VifId, without};
use xen_netif::front::{FrontOptions, FrontRings, Handshake, Kept, Queue, Sizes, Status};
use xen_netif::port::Pair;

use super::*;

const DIR: &str = "device/vif/0";
const SIZES: Sizes = Sizes { tx_buffers: 8, tx_pages_each: 2, rx_pages: 32 };

struct Nobody;

impl Queues for Nobody {
    fn start(&mut self, _: u16, _: Arc<OwnedFd>, _: Arc<OwnedFd>) {}
    fn stop(&mut self, _: u16) {}
    fn set_active(&mut self, _: u16) {}

    fn log(&self) -> Box<dyn FnMut(HostError) + Send> {
        Box::new(|error| panic!("{error}"))
    }
}

/// Both halves of a vif in a directory, each with its own connection to the store.
struct Bench {
    front: Handshake<FrontRings>,
    front_store: DomainStore,
    back: BackHalf<Socket<Nobody>>,
    back_store: DomainStore,
    pairs: Vec<Pair>,
    host: Arc<dyn host::Back>,
    /// Host interface of the front half, to grant other pages.
    guest: Arc<Front>,
    now: Instant,
}

impl Bench {
    fn offering(lacks: &str, options: FrontOptions) -> Self {
        Self::sized(lacks, options, SIZES)
    }

    fn sized(lacks: &str, options: FrontOptions, sizes: Sizes) -> Self {
        let dir = dir();
        let host = back(&dir);
        let guest = Arc::new(Front::open(&dir).unwrap());
        let front_store = DomainStore::new(guest.store().unwrap()).unwrap();
        let mut back_store = DomainStore::new(host.store().unwrap()).unwrap();
        let (pairs, id) = ([0; 2].map(|_| Pair::new()).to_vec(), VifId { domid: 1, devid: 0 });
        let socket = Socket::new(Arc::clone(&host), id, pairs.clone(), Nobody);
        let offer = Offer {
            queues: 2,
            without: if lacks.is_empty() { 0 } else { without(lacks).unwrap() },
        };
        let now = Instant::now();
        let mut back = BackHalf::new(id, offer, socket, now);
        back.start(&mut back_store, now).unwrap();
        let rings = FrontRings::new(Arc::<Front>::clone(&guest), 0, sizes);
        let front = Handshake::new(DIR.into(), options, rings);
        Self { front, front_store, back, back_store, pairs, host, guest, now }
    }

    fn run(&mut self) -> Status {
        let mut status = Status::Waiting;
        for _ in 0..8 {
            self.now += Duration::from_secs(1);
            status = self.front.poll(&mut self.front_store).unwrap();
            self.back.poll(&mut self.back_store, self.now).unwrap();
        }
        status
    }

    fn up(lacks: &str, options: FrontOptions) -> (Self, Queue) {
        let mut bench = Self::offering(lacks, options);
        assert_eq!(bench.run(), Status::Up);
        let mut queues = bench.front.rings().take().unwrap();
        assert!(bench.front.rings().take().is_none(), "they are taken once");
        let queue = queues.pop().unwrap();
        assert!(queues.is_empty());
        (bench, queue)
    }

    /// Returns frames sent by the front half on its first queue to it. Returns their number.
    fn turn_around(&mut self) -> usize {
        self.carry(0, 0)
    }

    /// Delivers frames sent on queue `from` to queue `to`.
    fn carry(&mut self, from: usize, to: usize) -> usize {
        let mut ingress = self.pairs[from].ingress.lock();
        let mut egress = self.pairs[to].egress.lock();
        let mut frames = 0;
        let mut forward = |burst: &mut Burst<'_>| {
            burst.snapshot();
            let picks: Vec<u16> = (0..burst.frames.len() as u16).collect();
            frames = egress.put(burst, &picks).unwrap();
            egress.flush();
            egress.notify();
        };
        ingress
            .burst(BURST_MAX, switch::time::Instant::START, &mut Burst::default(), &mut forward)
            .unwrap();
        frames
    }

    /// Runs both halves on the control ring until the front half has no more requests.
    fn settle(&mut self) -> Kept {
        while !self.front.rings().ctrl().unwrap().step().unwrap() {
            assert_eq!(self.back.plug().serve_control(), Ok(false));
        }
        self.front.rings().ctrl().unwrap().kept()
    }

    fn keep(&mut self) -> Kept {
        self.front.rings().ctrl().unwrap().keep();
        self.settle()
    }

    /// Number of copies by grant in the back half.
    fn copies(&self) -> u64 {
        grants::all().copies(&self.host.domain(1).unwrap())
    }

    /// Read-only grants in use in the front half, in page order.
    fn readonly(&self) -> Vec<u32> {
        self.guest.granted(GTF_PERMIT_ACCESS | GTF_READONLY)
    }

    /// Whether a back end can map the grant in this key.
    fn mapped(&self, key: &str) -> bool {
        let gref: u32 = self.host_key(key).parse().unwrap();
        self.host.map(1, gref).is_ok()
    }

    fn host_key(&self, key: &str) -> String {
        let store = self.host.store().unwrap();
        store.read(&format!("/local/domain/1/{DIR}/{key}")).unwrap().unwrap_or_default()
    }
}

const PLAIN: FrontOptions = FrontOptions {
    queues: 1,
    fewest: 1,
    split: true,
    ctrl: false,
    smart_poll: false,
    hash: false,
    multicast: false,
};

fn send(queue: &mut Queue, buffer: u16, len: u32) {
    let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
    let base = u64::from(buffer) * u64::from(SIZES.tx_pages_each) * u64::from(GRANT_LEN);
    queue.tx_memory.seg_mut(base + 12, len, &mut 0).unwrap().write(&bytes);
    queue.tx.send(buffer, 12, len, &VnetHdr::NONE).unwrap();
    queue.tx.publish();
    if queue.tx.notify_needed() {
        queue.tx_channel.notify();
    }
}

fn receive(queue: &mut Queue) -> Vec<u8> {
    let (mut packet, mut bytes) = (RxPacket::new(), Vec::new());
    assert_eq!(queue.rx.take(&mut packet, 64), Ok(true));
    for slot in &packet.slots {
        let at = u64::from(slot.request.id) * u64::from(GRANT_LEN) + u64::from(slot.offset);
        let mut part = vec![0; slot.len.into()];
        queue.rx_memory.seg(at, slot.len.into(), &mut 0).unwrap().read(&mut part);
        bytes.extend(part);
        queue.rx.post(slot.request.id);
    }
    queue.rx.publish();
    bytes
}

#[test]
fn frames_are_echoed_with_split_and_shared_channels() {
    for (split, lacks) in [(true, ""), (false, ""), (true, "split-event-channels")] {
        let (mut bench, mut queue) = Bench::up(lacks, FrontOptions { split, ..PLAIN });
        let apart = split && lacks.is_empty();
        assert_eq!(Arc::ptr_eq(&queue.tx_channel, &queue.rx_channel), !apart);
        for len in [60, 4084, 5000] {
            send(&mut queue, 3, len);
            assert_eq!(bench.turn_around(), 1);
            let bytes = receive(&mut queue);
            assert_eq!(bytes.len(), len as usize);
            assert!(bytes.iter().enumerate().all(|(i, b)| *b == (i % 251) as u8));
            let mut free = Vec::new();
            assert_eq!((queue.tx.reclaim(&mut free), free), (Ok(1), vec![3]));
        }
        queue.rx_channel.ack();
        assert_eq!(queue.rx.arm(), ring::xen::Armed::Armed);
        send(&mut queue, 0, 60);
        bench.turn_around();
        assert!(queue.rx_channel.ack(), "an event was sent");
    }
}

#[test]
fn grants_last_until_the_back_end_unmapped_and_end_with_the_memory() {
    let (mut bench, queue) = Bench::up("", PLAIN);
    assert!(bench.mapped("tx-ring-ref") && bench.mapped("rx-ring-ref"));
    // The user drops the rings first: the back end may still have their memory mapped.
    drop(queue);
    assert!(bench.mapped("tx-ring-ref"));
    bench.front.leave();
    assert_eq!(bench.run(), Status::Over);
    assert!(!bench.mapped("tx-ring-ref") && !bench.mapped("rx-ring-ref"));
    let (mut bench, queue) = Bench::up("", PLAIN);
    bench.front.leave();
    assert_eq!(bench.run(), Status::Over);
    assert!(bench.front.rings().is_stopped());
    assert!(bench.mapped("tx-ring-ref"), "the user still has them");
    drop(queue);
    assert!(!bench.mapped("tx-ring-ref"));
}

#[test]
fn a_restarted_back_end_stops_the_taken_queue_and_gets_no_other() {
    let (mut bench, queue) = Bench::up("", PLAIN);
    assert!(!bench.front.rings().is_stopped());
    let store = bench.host.store().unwrap();
    let mut looks = ["5", "6", "2"].map(|state| {
        store.write("/local/domain/0/backend/vif/1/0/state", state).unwrap();
        let status = bench.front.poll(&mut bench.front_store);
        assert!(bench.front.rings().is_stopped());
        status
    });
    assert_eq!(looks[..2], [Ok(Status::Waiting), Ok(Status::Waiting)]);
    assert!(looks[2].as_mut().unwrap_err().0.contains("still in use"));
    drop(queue);
    assert!(bench.front.rings().take().is_none());
}

#[test]
fn a_back_end_restarted_before_the_queue_is_taken_gets_another() {
    let mut bench = Bench::offering("", PLAIN);
    assert_eq!(bench.run(), Status::Up);
    let store = bench.host.store().unwrap();
    for state in ["5", "6", "2", "4"] {
        store.write("/local/domain/0/backend/vif/1/0/state", state).unwrap();
        bench.front.poll(&mut bench.front_store).unwrap();
    }
    assert!(bench.front.rings().take().is_some() && !bench.front.rings().is_stopped());
}

#[test]
fn transmit_buffers_are_read_only_and_fewer_if_pages_are_short() {
    // The host has 32768 pages: enough for a quarter of the buffers.
    let sizes = Sizes { tx_buffers: 4096, tx_pages_each: 17, ..SIZES };
    let mut bench = Bench::sized("", PLAIN, sizes);
    assert_eq!(bench.run(), Status::Up);
    assert_eq!(bench.front.rings().take().unwrap()[0].tx_buffers, 1024);
    let grefs = bench.readonly();
    assert_eq!(grefs.len(), 1024 * 17);
    assert!(bench.host.map(1, grefs[0]).is_err(), "read-only");

    let sizes = Sizes { tx_buffers: 256, tx_pages_each: 17, ..SIZES };
    let mut bench = Bench::sized("", PLAIN, sizes);
    let _kept = bench.guest.alloc(32_000, 0, true).unwrap();
    assert_eq!(bench.run(), Status::Up);
    assert_eq!(bench.front.rings().take().unwrap()[0].tx_buffers, 32, "as many as fit");

    let mut bench = Bench::sized("", PLAIN, sizes);
    let _kept = bench.guest.alloc(32_700, 0, true).unwrap();
    bench.back.poll(&mut bench.back_store, bench.now).unwrap();
    let why = bench.front.poll(&mut bench.front_store).unwrap_err().to_string();
    assert!(why.contains("cannot grant"), "{why}");
}

const STATICS: FrontOptions = FrontOptions { ctrl: true, ..PLAIN };
/// Buffers of two slots, and the rx pages.
const ALL_KEPT: Kept = Kept { grants: 8 * 2 + 32, of: 8 * 2 + 32, refusals: 0 };

#[test]
fn frames_with_static_grants_are_not_copied_by_grant() {
    let (mut bench, mut queue) = Bench::up("", STATICS);
    let round = |bench: &mut Bench, queue: &mut Queue| {
        let before = bench.copies();
        for len in [60, 4084, 5000] {
            send(queue, 3, len);
            assert_eq!(bench.turn_around(), 1);
            let bytes = receive(queue);
            assert_eq!(bytes.len(), len as usize);
            assert!(bytes.iter().enumerate().all(|(i, b)| *b == (i % 251) as u8));
            assert_eq!(queue.tx.reclaim(&mut Vec::new()), Ok(1));
        }
        bench.copies() - before
    };
    assert!(round(&mut bench, &mut queue) >= 6, "by grant, both ways");
    assert_eq!(bench.keep(), ALL_KEPT);
    assert_eq!(round(&mut bench, &mut queue), 0, "not one");
    bench.front.rings().ctrl().unwrap().forget();
    assert_eq!(bench.settle().grants, 0);
    assert!(round(&mut bench, &mut queue) >= 6, "by grant again");
    // Again, as the same back end may be requested again.
    assert_eq!(bench.keep(), ALL_KEPT);
    assert_eq!(round(&mut bench, &mut queue), 0);
}

#[test]
fn grants_kept_by_a_back_end_end_when_it_unmaps_them() {
    for forget in [true, false] {
        let (mut bench, queue) = Bench::up("", STATICS);
        assert_eq!(bench.keep(), ALL_KEPT);
        let readonly = bench.readonly();
        let grefs = [readonly[0], readonly[15]];
        let is_granted =
            |bench: &Bench| grefs.map(|gref| bench.host.map_static(1, &[(gref, true)]).is_ok());
        drop(queue);
        assert_eq!(is_granted(&bench), [true; 2]);
        if forget {
            bench.front.rings().ctrl().unwrap().forget();
            assert_eq!(bench.settle().grants, 0);
        }
        // A back end without such a request unmaps them with the rings.
        assert!(bench.mapped("ctrl-ring-ref"));
        bench.front.leave();
        assert_eq!(bench.run(), Status::Over);
        assert_eq!(is_granted(&bench), [false; 2]);
        assert!(!bench.mapped("ctrl-ring-ref"));
        assert!(bench.front.rings().ctrl().is_none());
    }
}

#[test]
fn without_a_control_ring_no_grant_is_kept() {
    let (mut bench, mut queue) = Bench::up("ctrl-ring", STATICS);
    assert!(!bench.front.agreed().unwrap().ctrl);
    assert!(bench.front.rings().ctrl().is_none());
    assert_eq!(bench.host_key("ctrl-ring-ref"), "");
    send(&mut queue, 0, 60);
    assert_eq!((bench.turn_around(), receive(&mut queue).len()), (1, 60));
}

#[test]
fn pages_above_the_back_ends_limit_are_copied_by_grant() {
    // Of 1200 tx pages and 32 rx pages it keeps 1024.
    let mut bench = Bench::sized("", STATICS, Sizes { tx_buffers: 600, ..SIZES });
    assert_eq!(bench.run(), Status::Up);
    let mut queue = bench.front.rings().take().unwrap().pop().unwrap();
    let kept = bench.keep();
    assert_eq!(kept, Kept { grants: 1024, of: 1232, refusals: 0 });
    let before = bench.copies();
    send(&mut queue, 599, 60);
    assert_eq!((bench.turn_around(), receive(&mut queue).len()), (1, 60));
    assert_eq!(bench.copies(), before, "the first page of each buffer is kept");
    send(&mut queue, 598, 5000);
    assert_eq!((bench.turn_around(), receive(&mut queue).len()), (1, 5000));
    assert!(bench.copies() > before);
}

#[test]
fn each_of_two_queues_uses_its_own_rings() {
    for options in [STATICS, FrontOptions { split: false, ..PLAIN }] {
        let mut bench = Bench::offering("", FrontOptions { queues: 2, ..options });
        assert_eq!(bench.run(), Status::Up);
        assert_eq!(bench.front.agreed().unwrap().queues, 2);
        assert_eq!(bench.host_key("multi-queue-num-queues"), "2");
        assert_eq!(bench.host_key("tx-ring-ref"), "");
        assert!(["0", "1"].iter().all(|n| bench.mapped(&format!("queue-{n}/tx-ring-ref"))));
        assert!(["0", "1"].iter().all(|n| bench.mapped(&format!("queue-{n}/rx-ring-ref"))));
        let mut queues = bench.front.rings().take().unwrap();
        assert_eq!(queues.len(), 2);
        let mut copies = [0; 2];
        for kept in [false, options.ctrl] {
            if kept {
                assert_eq!(bench.keep().grants, 2 * ALL_KEPT.grants);
            }
            let before = bench.copies();
            for (from, to) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                send(&mut queues[from], 5, 5000);
                assert_eq!(bench.carry(1 - from, to), 0, "nothing was sent there");
                assert_eq!(bench.carry(from, to), 1);
                let bytes = receive(&mut queues[to]);
                assert!(bytes.len() == 5000 && bytes[4999] == (4999 % 251) as u8);
                let mut free = Vec::new();
                assert_eq!((queues[from].tx.reclaim(&mut free), free), (Ok(1), vec![5]));
            }
            copies[usize::from(kept)] = bench.copies() - before;
        }
        assert!(copies[0] >= 8 && copies[1] == 0, "{copies:?}");
        drop(queues);
        bench.front.leave();
        assert_eq!(bench.run(), Status::Over);
        assert!(!bench.mapped("queue-1/tx-ring-ref"));
    }
}

#[test]
fn only_listed_multicast_is_received() {
    let mac = |n| [1, 0, 0x5e, 0, 0, n];
    let frame = |queue: &mut Queue, to: [u8; 6]| {
        queue.tx.reclaim(&mut Vec::new()).unwrap();
        queue.tx_memory.seg_mut(0, 60, &mut 0).unwrap().write(&[&to[..], &[0; 54]].concat());
        queue.tx.send(0, 0, 60, &VnetHdr::NONE).unwrap();
        queue.tx.publish();
    };
    // (offered, requested): without both, all multicast is received.
    for (lacks, multicast) in [("", true), ("", false), ("multicast-control", true)] {
        let (mut bench, mut queue) = Bench::up(lacks, FrontOptions { multicast, ..PLAIN });
        let filters = multicast && lacks.is_empty();
        assert_eq!(bench.front.agreed().unwrap().multicast, filters);
        for n in 0..65 {
            assert!(queue.tx.change(Multicast::Add(mac(n))));
        }
        assert!(queue.tx.change(Multicast::Del(mac(9))));
        queue.tx.publish();
        while queue.tx.is_changing() {
            assert_eq!(bench.turn_around(), 0, "no frames");
            queue.tx.reclaim(&mut Vec::new()).unwrap();
        }
        assert_eq!(queue.tx.take_refused(), [mac(64)], "the list has 64 entries");
        for (to, listed) in [
            (mac(3), true),
            (mac(9), false),
            (mac(64), false),
            (mac(77), false),
            ([0xff; 6], true),
            ([2, 0, 0, 0, 0, 1], true),
        ] {
            frame(&mut queue, to);
            bench.turn_around();
            let came = queue.rx.has_used();
            assert_eq!(came, listed || !filters, "{to:x?}, {lacks:?}");
            assert!(!came || receive(&mut queue)[..6] == to);
        }
    }
}

/// Sends Ethernet, IPv4 and TCP of this flow. Returns the frame.
///
/// Flows differ in many bits: Toeplitz is linear, and with one key in 64 the last bit of the hash
/// does not depend on any of six bits.
fn flow(queue: &mut Queue, buffer: u16, number: u64) -> Vec<u8> {
    queue.tx.reclaim(&mut Vec::new()).unwrap();
    let mut frame = vec![0; 60];
    frame[12..24].copy_from_slice(&[8, 0, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 6]);
    frame[26..30].copy_from_slice(&[10, 0, 0, 1]);
    let spread = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
    frame[30..38].copy_from_slice(&spread);
    let base = u64::from(buffer) * u64::from(SIZES.tx_pages_each) * u64::from(GRANT_LEN);
    queue.tx_memory.seg_mut(base, 60, &mut 0).unwrap().write(&frame);
    queue.tx.send(buffer, 0, 60, &VnetHdr::NONE).unwrap();
    queue.tx.publish();
    frame
}

#[test]
fn with_a_hash_each_frame_arrives_on_the_queue_given_by_the_table() {
    let mut bench = Bench::offering("", FrontOptions { queues: 2, hash: true, ..PLAIN });
    assert_eq!(bench.run(), Status::Up);
    assert!(bench.front.agreed().unwrap().ctrl, "it needs a control ring");
    let mut queues = bench.front.rings().take().unwrap();
    let steer = |bench: &Bench| bench.pairs[0].egress.lock().steer();
    flow(&mut queues[0], 0, 1);
    assert_eq!((bench.carry(0, 0), receive(&mut queues[0]).len()), (1, 60));
    assert!(steer(&bench).is_none(), "unless requested");
    bench.front.rings().ctrl().unwrap().hash();
    assert_eq!(bench.settle().refusals, 0);
    assert!(bench.front.rings().ctrl().unwrap().is_hashed());
    // The burst in which the port reads it.
    for to in 0..2 {
        flow(&mut queues[0], 0, 1);
        assert_eq!((bench.carry(0, to), receive(&mut queues[to]).len()), (1, 60));
    }
    let (mut came, mut packet) = ([0; 2], RxPacket::new());
    for number in 0..40 {
        let frame = flow(&mut queues[0], 0, number);
        let to = usize::from(steer(&bench).unwrap().queue(&frame, 2));
        assert_eq!(bench.carry(0, to), 1);
        assert_eq!(queues[to].rx.take(&mut packet, 64), Ok(true));
        let hash = packet.hash.expect("it is sent with the frame");
        assert_eq!((hash.kind, hash.algorithm), (1, 1), "IPv4 and TCP, Toeplitz");
        assert_eq!(hash.value as usize % 128 % 2, to, "our table: {hash:?}");
        came[to] += 1;
        packet.slots.iter().for_each(|slot| queues[to].rx.post(slot.request.id));
        queues[to].rx.publish();
    }
    assert!(came.iter().all(|frames| *frames > 5), "{came:?}");
}
