//! Nanoseconds for one frame through the switch, in one thread: driver half, ingress, forwarder,
//! egress, driver half. `cargo bench -p pvswitch-vhost-user --bench forward`.
//!
//! One core does the guests' work too, and no line crosses to another core: this counts
//! instructions, not distances. `rigs/dpdk` measures what a deployment would see.

use std::sync::Arc;
use std::time::Instant;

use ring::virtq::{Buf, DeviceQueue, DriverQueue, Features, Layout, Used};
use shm::{GuestMemory, Mapping, Region};
use switch::fdb::{Fdb, PortId};
use switch::forward::{EgressQueue, Forwarder, Mode, Port, Source};
use switch::frame::{BURST_MAX, Burst, FRAME_LEN_MAX};
use switch::port::Ingress;
use switch::vnet::Offloads;
use vhost_user::net::Pair;
use vhost_user::port::Format;

const SIZE: u16 = 1024;
const BUFFER: u64 = 2048;
const BASE: u64 = 0x10_0000;

/// A guest: its memory and one ring, both halves.
struct Half {
    memory: Arc<GuestMemory>,
    driver: DriverQueue,
    buffers: u64,
}

fn half(features: Features) -> (Half, DeviceQueue) {
    let len = 0x4_0000 + u64::from(SIZE) * BUFFER;
    let mapping = Arc::new(Mapping::memfd("bench", len).expect("memory"));
    let region = Region { guest_addr: BASE, user_addr: 0, len, offset: 0, mapping };
    let memory = Arc::new(GuestMemory::new(vec![region]).expect("one region"));
    let layout =
        Layout { size: SIZE, desc: BASE, driver: BASE + 0x1_0000, device: BASE + 0x2_0000 };
    let base = if features.packed { 0x8000_8000 } else { 0 };
    let driver = DriverQueue::new(&memory, &layout, features, base, None).expect("driver half");
    let device = DeviceQueue::new(&memory, &layout, features, base).expect("device half");
    (Half { memory, driver, buffers: BASE + 0x4_0000 }, device)
}

fn run(name: &str, features: Features, mode: Mode, len: u32, csum: bool) {
    let offloads = if csum { Offloads::ALL } else { Offloads::default() };
    let format = Format {
        hdr_len: 12,
        mergeable: !features.in_order,
        sends: offloads,
        takes: offloads,
        frame_len_max: FRAME_LEN_MAX,
    };
    let (mut tx, tx_device) = half(features);
    let (mut rx, rx_device) = half(features);
    let (a, b) = (Pair::new(), Pair::new());
    let mut ingress = a.ingress.lock().expect("fresh");
    ingress.activate(tx_device, Arc::clone(&tx.memory), None, format);
    ingress.enable(true);
    let mut egress = b.egress.lock().expect("fresh");
    egress.activate(rx_device, Arc::clone(&rx.memory), None, format);
    egress.enable(true);
    drop(egress);
    let ports = [&a, &b].map(|pair| {
        let id = PortId(u16::from(std::ptr::eq(pair, &b)));
        let queue = EgressQueue::new(pair.egress.clone(), Arc::clone(&pair.egress_stats));
        let port = Port::new(id, "p".into(), vec![queue]);
        port.set_active(1);
        Some(Arc::new(port))
    });
    let fdb = Arc::new(Fdb::new(65536, [1, 2], 300, 4096));
    let macs = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];
    fdb.learn(macs[1], 0, PortId(1), 0);
    let mut forwarder = Forwarder::new(mode, 0, fdb, Arc::new(ports.into()), 3);
    let tuning = Arc::new(switch::tuning::Tuning::new(switch::poll::Policy::Spin));
    let stats = Arc::clone(&a.ingress_stats);
    let source = Source { port: PortId(0), queue: 0, stats, tuning };

    let addr = |half: &Half, i: u16| half.buffers + u64::from(i) * BUFFER;
    for i in 0..SIZE {
        let mut seg = tx.memory.seg_mut(addr(&tx, i), 64, &mut 0).expect("a buffer");
        seg.write(&[0; 12]);
        seg.write(&macs[1]);
        seg.write(&macs[0]);
        seg.write(&[0x08, 0]);
        let at = addr(&rx, i);
        rx.driver.add(&[Buf { addr: at, len: BUFFER as u32, write: true }]).expect("room");
    }
    rx.driver.publish();
    let mut scratch = Burst::default();
    let mut used: Vec<Used> = Vec::new();
    let (mut next, mut spent, mut frames) = (0_u16, 0_u128, 0_u64);
    let total = std::env::var("FRAMES").map_or(3_000_000, |n| n.parse().expect("a number"));
    while frames < total {
        for _ in 0..32 {
            let at = addr(&tx, next % SIZE);
            tx.driver.add(&[Buf { addr: at, len: 12 + len, write: false }]).expect("room");
            next = next.wrapping_add(1);
        }
        tx.driver.publish();
        let start = Instant::now();
        let n = ingress.burst(BURST_MAX, 1, &mut scratch, &mut |burst| {
            forwarder.forward(&source, burst, 1);
        });
        spent += start.elapsed().as_nanos();
        frames += n.expect("no fault") as u64;
        used.clear();
        tx.driver.take_used(64, &mut used).expect("well formed");
        used.clear();
        rx.driver.take_used(64, &mut used).expect("well formed");
        assert_eq!(used.len(), 32, "every frame arrives");
        for u in &used {
            let at = rx.buffers + u64::from(u.id) * BUFFER;
            rx.driver.add(&[Buf { addr: at, len: BUFFER as u32, write: true }]).expect("room");
        }
        rx.driver.publish();
    }
    println!("{name:36} {:6.1} ns a frame", spent as f64 / frames as f64);
}

fn main() {
    let only = std::env::args().skip(1).find(|a| !a.starts_with('-')).unwrap_or_default();
    let split = Features { event_idx: true, indirect: true, ..Features::default() };
    let packed = Features { packed: true, ..split };
    let in_order = Features { in_order: true, ..split };
    for (name, features) in [("split", split), ("packed", packed), ("in-order", in_order)] {
        for (mode_name, mode) in [("cross", Mode::Cross), ("switch", Mode::Switch)] {
            for csum in [false, true] {
                for len in [60, 1514] {
                    let offloads = if csum { "offloads" } else { "plain" };
                    let name = format!("{name} {mode_name} {offloads} {len}");
                    if name.contains(&only) {
                        run(&name, features, mode, len, csum);
                    }
                }
            }
        }
    }
}
