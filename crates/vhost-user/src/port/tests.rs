use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use ring::virtq::{DriverQueue, Features, IndirectPool, Layout};
use shm::{Area, Mapping, Region};
use switch::vnet::{GSO_TCPV4, NEEDS_CSUM};

use ring::virtq::Buf;
use shm::Seg;
use switch::frame::{
    BURST_BYTES, Burst, FRAME_LEN_MAX, GSO_LEN_MAX, HEAD_LEN, SEGS_MAX, START_LEN,
};
use switch::port::{Egress, Ingress};
use switch::stats::{EgressStats, IngressStats};
use switch::time::Instant;
use switch::vnet::VnetHdr;

use super::*;

/// Size of two adjacent regions that start at `BASE`.
const HALF: u64 = 0x40_0000;
const BASE: u64 = 0x1000_0000;
const EDGE: u64 = BASE + HALF;
/// Address of the buffers.
const BUFFERS: u64 = BASE + 0x10_0000;
const SIZE: u16 = 128;
const LAYOUT: Layout =
    Layout { size: SIZE, desc: BASE, driver: BASE + 0x2000, device: BASE + 0x4000 };
const NOW: Instant = Instant::from_ns(1_000_000_000);

fn files() -> (Arc<GuestMemory>, [File; 2]) {
    let mut regions = Vec::new();
    let files = [0, 1].map(|i| {
        let name =
            format!("pvswitch-port-{}-{:?}-{i}", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name);
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file.set_len(HALF).unwrap();
        let mapping = Arc::new(Mapping::new(file.as_fd(), 0, HALF).unwrap());
        let guest_addr = BASE + i * HALF;
        regions.push(Region { guest_addr, user_addr: guest_addr, len: HALF, offset: 0, mapping });
        file
    });
    (Arc::new(GuestMemory::new(regions).unwrap()), files)
}

/// Every kind of ring.
fn kinds() -> impl Iterator<Item = Features> {
    (0..16).map(|n| Features {
        packed: n & 1 != 0,
        event_idx: n & 2 != 0,
        indirect: n & 4 != 0,
        in_order: n & 8 != 0,
    })
}

fn format() -> Format {
    Format {
        hdr_len: 12,
        mergeable: true,
        sends: Offloads::ALL,
        takes: Offloads::ALL,
        frame_len_max: FRAME_LEN_MAX,
    }
}

fn write(memory: &GuestMemory, addr: u64, bytes: &[u8]) {
    let n = memory.span(addr, bytes.len() as u32).unwrap();
    let (now, rest) = bytes.split_at(n as usize);
    memory.seg_mut(addr, n, &mut 0).unwrap().write(now);
    if !rest.is_empty() {
        write(memory, addr + u64::from(n), rest);
    }
}

fn read(memory: &GuestMemory, addr: u64, len: u32) -> Vec<u8> {
    let n = memory.span(addr, len).unwrap();
    let mut bytes = vec![0; n as usize];
    memory.seg(addr, n, &mut 0).unwrap().read(&mut bytes);
    if n < len {
        bytes.extend(read(memory, addr + u64::from(n), len - n));
    }
    bytes
}

/// A guest's side of one ring, for tests of both directions.
struct Guest {
    driver: DriverQueue,
    memory: Arc<GuestMemory>,
    files: [File; 2],
    call: Arc<OwnedFd>,
    /// Address of the next buffer.
    at: u64,
}

impl Guest {
    fn new(features: Features) -> (Self, DeviceQueue) {
        let (memory, files) = files();
        let base = if features.packed { 0x8000_8000 } else { 0 };
        let pool = IndirectPool::new(&memory, BASE + 0x6000, SIZE, 16);
        let driver = DriverQueue::new(&memory, &LAYOUT, features, base, pool).unwrap();
        let device = DeviceQueue::new(&memory, &LAYOUT, features, base).unwrap();
        let call = Arc::new(os::eventfd().unwrap());
        (Self { driver, memory, files, call, at: BUFFERS }, device)
    }

    fn call(&self) -> Option<Call> {
        Some(Call::Fd(Arc::clone(&self.call)))
    }

    fn place(&mut self, len: u32) -> u64 {
        let at = self.at;
        // Gaps, so that parts are not adjacent by chance.
        self.at += u64::from(len) + 64;
        at
    }

    fn used(&mut self) -> Vec<(u16, u32)> {
        let mut used = Vec::new();
        self.driver.take_used(usize::MAX, &mut used).unwrap();
        used.iter().map(|u| (u.id, u.len)).collect()
    }
}

/// A transmit queue.
struct Tx {
    guest: Guest,
    ingress: VirtioIngress,
    stats: Arc<IngressStats>,
    scratch: Burst<'static>,
    now: Instant,
}

/// A frame as the switch saw it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    bytes: Vec<u8>,
    hdr: VnetHdr,
}

impl Tx {
    fn with(features: Features, format: Format) -> Self {
        let (guest, device) = Guest::new(features);
        let stats = Arc::new(IngressStats::default());
        let mut ingress = VirtioIngress::new(Arc::clone(&stats));
        ingress.activate(device, Arc::clone(&guest.memory), guest.call(), format);
        ingress.enable(true);
        Self { guest, ingress, stats, scratch: Burst::default(), now: NOW }
    }

    fn new() -> Self {
        Self::with(Features::default(), format())
    }

    /// Makes a chain of `bytes`, header included, split into descriptors at `cuts`.
    fn chain(&mut self, bytes: &[u8], cuts: &[usize]) {
        let mut bufs = Vec::new();
        let mut rest = bytes;
        for cut in cuts.iter().copied().chain([usize::MAX]) {
            let (part, later) = rest.split_at(cut.min(rest.len()));
            let addr = self.guest.place(part.len() as u32);
            write(&self.guest.memory, addr, part);
            bufs.push(Buf { addr, len: part.len() as u32, write: false });
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        self.raw(&bufs);
    }

    fn raw(&mut self, bufs: &[Buf]) {
        self.guest.driver.add(bufs).unwrap();
        self.guest.driver.publish();
    }

    fn send(&mut self, hdr: VnetHdr, bytes: &[u8]) {
        self.chain(&[&hdr.bytes()[..], &[0, 0], bytes].concat(), &[12]);
    }

    /// One burst.
    fn burst(&mut self) -> Result<Vec<Seen>, Fault> {
        let mut seen = Vec::new();
        let shown = self.ingress.burst(64, self.now, &mut self.scratch, &mut |burst| {
            for i in 0..burst.frames.len() {
                let frame = burst.frames[i];
                let mut bytes = Vec::new();
                for seg in burst.segs(&frame) {
                    let mut part = vec![0; seg.len() as usize];
                    seg.read(&mut part);
                    bytes.extend(part);
                }
                assert_eq!(bytes.len(), frame.len as usize);
                seen.push(Seen { bytes, hdr: frame.hdr });
            }
        })?;
        assert!(shown >= seen.len());
        Ok(seen)
    }

    fn all(&mut self) -> Vec<Seen> {
        self.burst().unwrap()
    }

    /// Expects that the next frame is refused, counted as `counter`, and returned.
    fn refused(mut self, counter: fn(&IngressStats) -> u64) {
        assert_eq!(self.all(), []);
        assert_eq!(counter(&self.stats), 1);
        let drops = self.stats.all().filter(|(n, _)| n.starts_with("drops_"));
        assert_eq!(drops.map(|(_, n)| n).sum::<u64>(), 1, "only this counter");
        assert_eq!(self.guest.used().len(), 1, "the buffer was returned");
        self.send(VnetHdr::NONE, &frame(60, 1));
        assert_eq!(self.all().len(), 1, "the port continues");
    }
}

fn frame(len: usize, n: u8) -> Vec<u8> {
    (0..len).map(|i| (i * 7) as u8 ^ n).collect()
}

const TSO: VnetHdr = VnetHdr {
    flags: NEEDS_CSUM,
    gso_type: GSO_TCPV4,
    hdr_len: 54,
    gso_size: 1000,
    csum_start: 34,
    csum_offset: 16,
};

#[test]
fn frames_arrive_whole_for_any_split_of_their_chain() {
    let bytes = frame(200, 3);
    let cuts: [&[usize]; 7] =
        [&[], &[12], &[1; 12], &[3, 4, 2, 1, 1, 1, 20, 0, 5], &[11, 2], &[0, 12, 0], &[10, 100]];
    for features in kinds() {
        let mut tx = Tx::with(features, format());
        for cut in cuts {
            tx.chain(&[&TSO.bytes()[..], &[9, 9], &bytes[..]].concat(), cut);
        }
        let seen = tx.all();
        assert_eq!(seen, vec![Seen { bytes: bytes.clone(), hdr: TSO }; cuts.len()]);
        assert_eq!(tx.guest.used().len(), cuts.len(), "{features:?}");
        assert_eq!((tx.stats.frames.get(), tx.stats.bytes.get()), (7, 1400));
        assert_eq!(tx.burst(), Ok(vec![]));
    }
}

#[test]
fn legacy_header_has_ten_bytes() {
    let mut tx = Tx::with(Features::default(), Format { hdr_len: 10, ..format() });
    let bytes = frame(60, 1);
    tx.chain(&[&TSO.bytes(), &bytes[..]].concat(), &[10]);
    tx.chain(&[&TSO.bytes(), &bytes[..]].concat(), &[4, 3]);
    let seen = Seen { bytes, hdr: TSO };
    assert_eq!(tx.all(), [seen.clone(), seen]);
}

#[test]
fn longest_gso_frame_in_one_descriptor() {
    let mut tx = Tx::new();
    let bytes = frame(GSO_LEN_MAX as usize, 1);
    tx.send(TSO, &bytes);
    assert_eq!(tx.all()[0].bytes, bytes);
}

#[test]
fn burst_of_long_frames_is_cut_and_the_rest_comes_next() {
    for features in kinds() {
        let mut tx = Tx::with(features, format());
        let long = BURST_BYTES as usize / 4;
        for n in 0..6 {
            tx.send(TSO, &frame(long - 100, n));
        }
        let mut order = Vec::new();
        for most in [4, 2] {
            let mut shown = 0;
            let more = tx.ingress.burst(64, NOW, &mut tx.scratch, &mut |burst| {
                shown = burst.frames.len();
                for i in 0..shown {
                    let mut first = [0];
                    burst.segs(&burst.frames[i])[0].read(&mut first);
                    order.push(first[0]);
                }
            });
            assert_eq!(shown, most, "{features:?}");
            assert_eq!(more, Ok(if most == 4 { 64 } else { 2 }), "whether the ring has more");
        }
        assert_eq!(order, [0, 1, 2, 3, 4, 5]);
        assert_eq!(tx.guest.used().len(), 6);
    }
}

#[test]
fn buffer_across_two_regions() {
    for start in [EDGE - 5, EDGE - 12, EDGE - 40, EDGE - 71] {
        let mut tx = Tx::new();
        let bytes = frame(60, 1);
        write(&tx.guest.memory, start, &[&TSO.bytes()[..], &[0, 0], &bytes[..]].concat());
        tx.raw(&[Buf { addr: start, len: 72, write: false }]);
        assert_eq!(tx.all(), [Seen { bytes, hdr: TSO }]);
    }
}

#[test]
fn buffers_outside_memory_are_refused() {
    let outside = [0, BASE - 1, BASE + 2 * HALF - 71, BASE + 2 * HALF, u64::MAX - 71, u64::MAX];
    for addr in outside {
        let mut tx = Tx::new();
        tx.raw(&[Buf { addr, len: 72, write: false }]);
        tx.refused(|s| s.drops_bad_addr.get());
    }
    let mut tx = Tx::new();
    let good = Buf { addr: BUFFERS, len: 72, write: false };
    tx.raw(&[good, Buf { addr: 0, len: 1, write: false }]);
    tx.refused(|s| s.drops_bad_addr.get());
}

#[test]
fn frames_too_short_too_long_or_too_scattered_are_refused() {
    for len in [0, 1, 9, 11, 12, 25] {
        let mut tx = Tx::new();
        tx.raw(&[Buf { addr: BUFFERS, len, write: false }]);
        tx.refused(|s| s.drops_runt.get());
    }
    // Empty, and outside memory: it gets no segment.
    let mut tx = Tx::new();
    tx.raw(&[Buf { addr: 0, len: 0, write: false }]);
    tx.refused(|s| s.drops_runt.get());
    let mut tx = Tx::new();
    tx.send(VnetHdr::NONE, &frame(FRAME_LEN_MAX as usize + 1, 1));
    tx.refused(|s| s.drops_too_long.get());
    let mut tx = Tx::new();
    tx.send(TSO, &frame(GSO_LEN_MAX as usize + 1, 1));
    tx.refused(|s| s.drops_too_long.get());
    let mut tx = Tx::new();
    let whole = Buf { addr: BASE, len: 0x40_0000, write: false };
    tx.raw(&[whole; 100]);
    tx.refused(|s| s.drops_too_long.get());
}

#[test]
fn more_segments_than_the_switch_takes_are_refused() {
    let (memory, _files) = files();
    let layout = Layout { size: 512, driver: BASE + 0x4000, device: BASE + 0x8000, ..LAYOUT };
    let mut driver = DriverQueue::new(&memory, &layout, Features::default(), 0, None).unwrap();
    let device = DeviceQueue::new(&memory, &layout, Features::default(), 0).unwrap();
    let mut tx = Tx::new();
    tx.ingress.deactivate();
    tx.ingress.activate(device, memory, None, format());
    tx.ingress.enable(true);
    driver.add(&[Buf { addr: BUFFERS, len: 4, write: false }; SEGS_MAX + 1]).unwrap();
    driver.add(&[Buf { addr: BUFFERS, len: 4, write: false }; SEGS_MAX - 1]).unwrap();
    driver.publish();
    assert_eq!((tx.all().len(), tx.all().len()), (1, 0));
    assert_eq!(tx.stats.drops_too_many_segs.get(), 1);
}

#[test]
fn invalid_offload_requests_are_refused() {
    let bad = [
        VnetHdr { csum_start: 100, csum_offset: 99, gso_type: 0, ..TSO },
        VnetHdr { csum_start: u16::MAX, csum_offset: u16::MAX, ..TSO },
        VnetHdr { gso_size: 0, ..TSO },
        VnetHdr { flags: 0, ..TSO },
        VnetHdr { gso_type: 3, ..TSO },
        VnetHdr { gso_type: 77, ..TSO },
    ];
    for hdr in bad {
        let mut tx = Tx::new();
        tx.send(hdr, &frame(200, 1));
        tx.refused(|s| s.drops_bad_hdr.get());
    }
    for sends in [Offloads { tso4: false, ..Offloads::ALL }, Offloads::default()] {
        let mut tx = Tx::with(Features::default(), Format { sends, ..format() });
        tx.send(TSO, &frame(200, 1));
        tx.refused(|s| s.drops_bad_hdr.get());
    }
}

#[test]
fn buffers_are_used_in_order_within_the_burst_invalid_ones_too() {
    for features in kinds() {
        let mut tx = Tx::with(features, format());
        for n in 0..3 {
            tx.chain(&[&[0; 12], &frame(60, n)[..]].concat(), &[]);
            tx.raw(&[Buf { addr: 0x10, len: 100, write: false }]);
        }
        assert_eq!(tx.all().len(), 3);
        assert_eq!(tx.guest.used().iter().map(|u| u.1).collect::<Vec<_>>(), [0; 6]);
        assert_eq!(tx.stats.drops_bad_addr.get(), 3);
    }
}

#[test]
fn deactivated_ring_continues_at_its_position() {
    for features in kinds() {
        let mut tx = Tx::with(features, format());
        for n in 0..3 {
            tx.chain(&[&[0; 12], &frame(60, n)[..]].concat(), &[]);
        }
        tx.all();
        tx.chain(&[&[0; 12], &frame(60, 3)[..]].concat(), &[]);
        let base = if features.packed { 0x8003_8003 } else { 3 };
        assert_eq!(tx.ingress.deactivate(), Some(base));
        assert_eq!((tx.ingress.deactivate(), tx.guest.used().len()), (None, 3));
        let device = DeviceQueue::new(&tx.guest.memory, &LAYOUT, features, base).unwrap();
        tx.ingress.activate(device, Arc::clone(&tx.guest.memory), None, format());
        assert!(!tx.ingress.is_up(), "until it is enabled");
        tx.ingress.enable(true);
        assert_eq!(tx.all()[0].bytes, frame(60, 3));
    }
}

#[test]
fn disabled_ring_is_not_read() {
    let mut tx = Tx::new();
    tx.ingress.enable(false);
    tx.send(VnetHdr::NONE, &frame(60, 1));
    assert_eq!((tx.all().len(), tx.ingress.arm(), tx.ingress.is_up()), (0, true, false));
    tx.ingress.enable(true);
    assert_eq!((tx.all().len(), tx.ingress.is_up()), (1, true));
}

#[test]
fn one_call_for_a_burst_and_none_while_the_driver_polls() {
    for features in kinds() {
        let mut tx = Tx::with(features, format());
        tx.guest.driver.disarm();
        // The first burst of an event index ring may call: the event is not known yet.
        tx.send(VnetHdr::NONE, &frame(60, 1));
        tx.all();
        tx.guest.used();
        os::drain(tx.guest.call.as_fd());
        let before = tx.stats.calls.get();
        for _ in 0..2 {
            (0..10).for_each(|n| tx.send(VnetHdr::NONE, &frame(60, n)));
            assert_eq!((tx.all().len(), tx.guest.used().len()), (10, 10));
        }
        assert_eq!(tx.stats.calls.get(), before, "{features:?}");
        assert!(!os::drain(tx.guest.call.as_fd()));
        let _ = tx.guest.driver.arm();
        (0..10).for_each(|n| tx.send(VnetHdr::NONE, &frame(60, n)));
        tx.all();
        assert_eq!(tx.stats.calls.get(), before + 1, "{features:?}");
        assert!(os::drain(tx.guest.call.as_fd()));
    }
}

#[test]
fn new_call_descriptor_is_signalled_once() {
    let mut tx = Tx::new();
    let call = Arc::new(os::eventfd().unwrap());
    tx.ingress.set_call(Some(Call::Fd(Arc::clone(&call))));
    assert!(os::drain(call.as_fd()));
    tx.ingress.set_call(None);
    tx.send(VnetHdr::NONE, &frame(60, 1));
    assert_eq!((tx.all().len(), tx.stats.calls.get()), (1, 0));
}

#[test]
fn malformed_ring_is_a_fault_after_the_good_chains() {
    let mut tx = Tx::new();
    tx.send(VnetHdr::NONE, &frame(60, 1));
    tx.send(VnetHdr::NONE, &frame(60, 2));
    // The second chain (descriptors 2 and 3) continues at a descriptor out of range.
    let desc = Area::new(&tx.guest.memory, BASE, 16 * usize::from(SIZE)).unwrap();
    desc.store_u16(2 * 16 + 14, SIZE);
    assert_eq!(tx.all().len(), 1);
    let fault = tx.burst().unwrap_err();
    assert_eq!(fault.0, format!("descriptor index {SIZE} is outside the table"));
    assert!(!tx.ingress.arm(), "it is reported until the ring is stopped");
}

mod bounds;
mod dirty;
mod egress;
mod truncated;
