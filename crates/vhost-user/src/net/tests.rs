use std::sync::Mutex;

use std::os::fd::OwnedFd;

use ring::virtq::{Buf, DriverQueue, Features, Layout};
use shm::{Mapping, Region};
use switch::fdb::{Fdb, PortId};
use switch::forward::{EgressQueue, Forwarder, Mode, Port, Source};
use switch::frame::Burst;
use switch::poll::Policy;
use switch::port::Ingress;
use switch::time::Instant;
use switch::tuning::Tuning;
use switch::vnet::VnetHdr;

use super::*;

/// A callback to the host.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Event {
    Started(u16, Side),
    Stopped(u16, Side),
    Kicked(u16, Side),
    Active(u16),
    Negotiated(u64),
    Announce([u8; 6]),
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<Event>>>);

impl Log {
    fn take(&self) -> Vec<Event> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }

    fn note(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }
}

impl Host for Log {
    fn start(&mut self, queue: u16, side: Side, _: Kick) {
        self.note(Event::Started(queue, side));
    }
    fn stop(&mut self, queue: u16, side: Side) {
        self.note(Event::Stopped(queue, side));
    }
    fn kick(&mut self, queue: u16, side: Side) {
        self.note(Event::Kicked(queue, side));
    }
    fn set_active(&mut self, queues: u16) {
        self.note(Event::Active(queues));
    }
    fn set_features(&mut self, features: u64) {
        self.note(Event::Negotiated(features));
    }
    fn announce(&mut self, mac: [u8; 6]) {
        self.note(Event::Announce(mac));
    }
}

fn options(pairs: u16) -> NetOptions {
    NetOptions { pairs, mtu: None, mac: None, without: 0 }
}

fn device(options: NetOptions) -> (NetDevice<Log>, Log) {
    let log = Log::default();
    let pairs = (0..options.pairs).map(|_| Pair::new()).collect();
    (NetDevice::new(options, pairs, log.clone()), log)
}

const BASE: u64 = 0x10_0000;
const LEN: u64 = 0x10_0000;

fn memory() -> Arc<GuestMemory> {
    let mapping = Arc::new(Mapping::memfd("net", LEN).unwrap());
    let region = Region { guest_addr: BASE, user_addr: BASE, len: LEN, offset: 0, mapping };
    Arc::new(GuestMemory::new(vec![region]).unwrap())
}

fn layout(ring: u16) -> Layout {
    let at = BASE + u64::from(ring) * 0x4000;
    Layout { size: 64, desc: at, driver: at + 0x1000, device: at + 0x2000 }
}

fn setup(ring: u16, base: u32) -> RingSetup {
    let kick = Kick::Fd(Arc::new(event()) as crate::device::KickFd);
    let features = Features::default();
    let layout = layout(ring);
    RingSetup { layout, features, base, ledger: None, log: None, kick, call: None, err: None }
}

fn event() -> OwnedFd {
    os::eventfd().unwrap()
}

#[test]
fn features_offered_follow_the_options() {
    let (plain, _) = device(options(1));
    assert_eq!(plain.features(), feature::BASE);
    assert_eq!(plain.queues_max(), 2);
    let mac = Some([2, 0, 0, 0, 0, 1]);
    let all = NetOptions { mtu: Some(9000), mac, without: feature::RING_PACKED, ..options(4) };
    let (all, _) = device(all);
    let more = feature::MQ | feature::CTRL_VQ | feature::MTU | feature::MAC;
    assert_eq!(all.features(), (feature::BASE | more) & !feature::RING_PACKED);
    assert_eq!(all.queues_max(), 8);
    let (without, _) = device(NetOptions { without: feature::MQ, ..options(4) });
    assert_eq!(without.features(), feature::BASE, "a control queue has no use without MQ");
}

#[test]
fn each_feature_is_one_offload() {
    type Get = fn(&Format) -> bool;
    let each: [(u64, Get); 13] = [
        (feature::CSUM, |f| f.sends.csum),
        (feature::HOST_TSO4, |f| f.sends.tso4),
        (feature::HOST_TSO6, |f| f.sends.tso6),
        (feature::HOST_ECN, |f| f.sends.ecn),
        (feature::HOST_USO, |f| f.sends.uso4 && f.sends.uso6),
        (feature::GUEST_CSUM, |f| f.takes.csum),
        (feature::GUEST_TSO4, |f| f.takes.tso4),
        (feature::GUEST_TSO6, |f| f.takes.tso6),
        (feature::GUEST_ECN, |f| f.takes.ecn),
        (feature::GUEST_USO4, |f| f.takes.uso4),
        (feature::GUEST_USO6, |f| f.takes.uso6),
        (feature::MRG_RXBUF, |f| f.mergeable),
        (feature::MRG_RXBUF, |f| f.hdr_len == 12),
    ];
    for (bit, _) in each {
        let (mut device, log) = device(options(1));
        device.set_features(bit);
        assert_eq!(log.take(), [Event::Negotiated(bit)]);
        for (other, get) in each {
            assert_eq!(get(&device.format()), bit == other, "bit {bit:#x}, that of {other:#x}");
        }
    }
    let (mut device, _) = device(options(1));
    assert_eq!(device.format().hdr_len, 10, "a legacy guest");
    device.set_features(feature::VERSION_1);
    assert_eq!((device.format().hdr_len, device.format().mergeable), (12, false));
}

#[test]
fn configuration_space_byte_by_byte() {
    let (plain, _) = device(options(1));
    let mut want = vec![0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0xdc, 5, 0xff, 0xff, 0xff, 0xff, 0xff];
    want.resize(24, 0);
    assert_eq!(plain.config(), want);
    let mac = Some([2, 1, 2, 3, 4, 5]);
    let (full, _) = device(NetOptions { mtu: Some(9000), mac, ..options(4) });
    assert_eq!(full.config()[..12], [2, 1, 2, 3, 4, 5, 1, 0, 4, 0, 0x28, 0x23]);
}

#[test]
fn mtu_bounds_the_frames_of_rings_started_after_it() {
    let (mut device, _) = device(options(1));
    assert_eq!(device.format().frame_len_max, FRAME_LEN_MAX);
    assert!(device.set_mtu(67).is_err() && device.set_mtu(9217).is_err());
    device.set_mtu(1500).unwrap();
    assert_eq!(device.format().frame_len_max, 1518);
    device.reset();
    assert_eq!(device.format().frame_len_max, FRAME_LEN_MAX);
}

#[test]
fn rings_start_and_stop_with_callbacks_to_the_host() {
    let (mut device, log) = device(options(2));
    let memory = memory();
    device.set_memory(Arc::clone(&memory));
    use Side::{Egress as E, Ingress as I};
    for (ring, active) in [(0, 0), (1, 1), (3, 1), (2, 1)] {
        drop(DriverQueue::new(&memory, &layout(ring), Features::default(), 5, None).unwrap());
        device.start(ring, setup(ring, 5)).unwrap();
        let side = if ring % 2 == 0 { E } else { I };
        assert_eq!(log.take(), [Event::Started(ring / 2, side), Event::Active(active)]);
        device.enable(ring, true);
        let up = [1, 1, 1, 2][usize::from(if ring == 2 { 3 } else { ring.min(2) })];
        assert_eq!(log.take(), [Event::Kicked(ring / 2, side), Event::Active(up)]);
    }
    device.kick(3);
    assert_eq!(log.take(), [Event::Kicked(1, I)]);
    // Queue 0 down: the switch may use none beyond it.
    device.enable(0, false);
    assert_eq!(log.take(), [Event::Active(0)]);
    assert_eq!((device.stop(0), device.stop(0)), (Some(5), None));
    log.take();
    device.send_rarp([2; 6]);
    assert_eq!(log.take(), [Event::Announce([2; 6])]);
    device.reset();
    let stopped: Vec<_> = log.take();
    for (queue, side) in [(0, I), (1, E), (1, I)] {
        assert!(stopped.contains(&Event::Stopped(queue, side)), "{stopped:?}");
    }
    assert_eq!(stopped.last(), Some(&Event::Active(0)));
}

#[test]
fn ring_that_was_enabled_before_a_reset_is_disabled_when_it_starts_again() {
    let pair = Pair::new();
    let log = Log::default();
    let mut device = NetDevice::new(options(1), vec![pair.clone()], log.clone());
    device.set_memory(memory());
    for ring in [0, 1] {
        device.start(ring, setup(ring, 0)).unwrap();
        device.enable(ring, true);
    }
    device.reset();
    log.take();
    for ring in [0, 1] {
        device.start(ring, setup(ring, 0)).unwrap();
    }
    assert!(!log.take().contains(&Event::Active(1)));
    assert!(!pair.egress.lock().is_up() && !pair.ingress.lock().is_up());
}

#[test]
fn ring_with_an_invalid_layout_stays_stopped() {
    let (mut device, log) = device(options(1));
    device.set_memory(memory());
    let mut bad = setup(1, 0);
    bad.layout.device = BASE + LEN;
    assert!(matches!(device.start(1, bad), Err(LayoutError::Outside { part: _, .. })));
    assert_eq!((log.take(), device.stop(1)), (vec![], None));
    log.take();
    // Beyond the pairs: a control queue that the front-end keeps to itself.
    device.start(2, setup(2, 0)).unwrap();
    device.enable(2, true);
    device.set_call(2, None);
    device.kick(2);
    assert_eq!((log.take(), device.stop(2)), (vec![], None));
}

#[test]
fn ring_continues_at_its_position_in_new_memory() {
    let pair = Pair::new();
    let log = Log::default();
    let mut device = NetDevice::new(options(1), vec![pair.clone()], log);
    device.set_features(feature::VERSION_1 | feature::MRG_RXBUF);
    let memory = memory();
    device.set_memory(Arc::clone(&memory));
    device.start(1, setup(1, 0)).unwrap();
    device.enable(1, true);
    let mut driver = DriverQueue::new(&memory, &layout(1), Features::default(), 0, None).unwrap();
    let burst = || {
        let mut shown = 0;
        let forward = &mut |burst: &mut Burst<'_>| shown = burst.frames.len();
        pair.ingress.lock().burst(64, Instant::from_ns(1), &mut Burst::default(), forward).unwrap();
        shown
    };
    let send = |driver: &mut DriverQueue, n: usize| {
        for _ in 0..n {
            driver.add(&[Buf { addr: BASE + 0x8000, len: 72, write: false }]).unwrap();
        }
        driver.publish();
    };
    send(&mut driver, 3);
    assert_eq!(burst(), 3);
    send(&mut driver, 2);
    device.set_memory(Arc::clone(&memory));
    device.replace(1, setup(1, 0)).unwrap();
    assert_eq!(burst(), 2);
    // A layout that is not in the new memory: it can be stopped, at its position.
    let mut bad = setup(1, 0);
    bad.layout.device = BASE + LEN;
    assert!(device.replace(1, bad).is_err());
    assert_eq!(device.stop(1), Some(5));
    let mut used = Vec::new();
    driver.take_used(usize::MAX, &mut used).unwrap();
    assert_eq!(used.len(), 5);
    assert!(!pair.egress.lock().is_up());
}

/// A guest whose memory grows while it is slow.
#[test]
fn held_frame_is_delivered_in_new_memory_and_the_port_is_never_down() {
    let (pair, log) = (Pair::new(), Log::default());
    let mut device = NetDevice::new(options(1), vec![pair.clone()], log.clone());
    device.set_features(feature::VERSION_1 | feature::MRG_RXBUF);
    let old = memory();
    device.set_memory(Arc::clone(&old));
    device.start(0, setup(0, 0)).unwrap();
    device.enable(0, true);
    let stats = Arc::clone(&pair.egress_stats);
    let egress = EgressQueue::new(pair.egress.clone(), Arc::clone(&stats));
    let port = Arc::new(Port::new(PortId(1), "b".into(), vec![egress]));
    port.set_active(1);
    let table = Arc::new(vec![None, Some(Arc::clone(&port))]);
    let fdb = Arc::new(Fdb::new(8, [1, 2], 0, 8));
    let mut forwarder = Forwarder::new(Mode::Switch, 0, fdb, table, 3);
    let tuning = Arc::new(Tuning::new(Policy::Event));
    let from = Source::new(PortId(0), 0, Arc::default(), tuning);
    let now = Instant::from_ns(1);
    let bytes = [&[0xff; 6][..], &[2; 6], &[8; 48]].concat();
    let mut burst = Burst::default();
    burst.push_private(&bytes, VnetHdr::NONE);
    let _ = forwarder.forward(&from, &mut burst, now);
    assert_eq!(port.egress[0].held_frames(), 1, "there is no buffer");
    log.take();
    let new = memory();
    device.set_memory(Arc::clone(&new));
    device.replace(0, setup(0, 0)).unwrap();
    assert_eq!(log.take(), [Event::Kicked(0, Side::Egress)]);
    let content = |memory: &GuestMemory, at, len| {
        let mut bytes = vec![0; len as usize];
        memory.seg(at, len, &mut 0).unwrap().read(&mut bytes);
        bytes
    };
    let before = content(&old, BASE, LEN as u32);
    let mut driver = DriverQueue::new(&new, &layout(0), Features::default(), 0, None).unwrap();
    driver.add(&[Buf { addr: BASE + 0x8000, len: 100, write: true }]).unwrap();
    driver.publish();
    let _ = forwarder.retry(true, now);
    assert_eq!((port.egress[0].held_frames(), stats.frames.get()), (0, 1));
    assert_eq!(stats.drops_held_down.get() + stats.drops_down.get(), 0);
    assert_eq!(content(&new, BASE + 0x8000 + 12, 60), bytes);
    assert!(content(&old, BASE, LEN as u32) == before, "nothing is written to the old memory");
}
