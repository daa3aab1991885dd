use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;

use proptest::prelude::*;
use shm::Seg;
use shm::sync::MutexGuard;

use super::*;
use crate::direct::Direct;
use crate::fair::Usage;
use crate::fdb::Mac;
use crate::frame::BURST_MAX;
use crate::poll::Policy;
use crate::stats::EgressStats;
use crate::vnet::{GSO_TCPV4, NEEDS_CSUM, Offloads, VnetHdr};

const SECOND: Ns = Ns::from_secs(1);
const MS: Ns = Ns::from_ms(1);
/// More than any ring of these tests holds.
const ENDLESS: usize = usize::MAX;

/// An egress queue in memory.
struct FakeEgress {
    takes: Offloads,
    /// Whether heads may be starts.
    starts: bool,
    /// Frames that fit.
    room: usize,
    /// Most frames for which it can report room.
    looks: usize,
    /// The frames for which room was last asked.
    asked: usize,
    /// Frames taken before the fault.
    fault_after: usize,
    got: Vec<Vec<u8>>,
    hdrs: Vec<VnetHdr>,
    flushed: usize,
    steer: Option<Arc<dyn Steer>>,
    stats: Arc<EgressStats>,
    /// Page faults in the peer's memory for each frame.
    faults: u64,
}

/// CPU time of a page fault.
const FAULT: Ns = Ns::from_us(15);

thread_local! {
    static USED: std::cell::Cell<Usage> = const { std::cell::Cell::new(ZERO) };
}
const ZERO: Usage = Usage { now: Ns::ZERO, cpu: Ns::ZERO, faults: 0, waits: 0 };

impl FakeEgress {
    fn take(&mut self, bytes: Vec<u8>, hdr: VnetHdr) -> Result<bool, Fault> {
        if self.got.len() >= self.fault_after {
            return Err(Fault("fake".into()));
        }
        if self.room == 0 {
            self.stats.full.add(1);
            return Ok(false);
        }
        let used @ Usage { cpu, faults, .. } = USED.get();
        USED.set(Usage { cpu: cpu + FAULT * self.faults, faults: faults + self.faults, ..used });
        self.room -= 1;
        self.stats.frames.add(1);
        self.stats.bytes.add(bytes.len() as u64);
        self.got.push(bytes);
        self.hdrs.push(hdr);
        Ok(true)
    }
}

/// The bytes of `head`, then `body` without its first `skip`.
fn bytes_of(head: &[u8], body: &[Seg<'_>], skip: usize) -> Vec<u8> {
    let mut all = Vec::new();
    for seg in body {
        let mut part = vec![0; seg.len() as usize];
        seg.read(&mut part);
        all.extend(part);
    }
    [head, &all[skip..]].concat()
}

impl Egress for FakeEgress {
    fn offloads(&self) -> Offloads {
        self.takes
    }

    fn accepts_granted(&self) -> bool {
        false
    }

    fn accepts_starts(&self) -> bool {
        self.starts
    }

    fn put(&mut self, burst: &Burst<'_>, picks: &[u16]) -> Result<usize, Fault> {
        for (done, pick) in picks.iter().enumerate() {
            let frame = &burst.frames[usize::from(*pick)];
            let head = burst.head(usize::from(*pick));
            let bytes = bytes_of(head, burst.segs(frame), head.len());
            match self.take(bytes, frame.hdr) {
                Ok(true) => {}
                Ok(false) => return Ok(done),
                Err(_) if done > 0 => return Ok(done),
                Err(fault) => return Err(fault),
            }
        }
        Ok(picks.len())
    }

    fn put_parts(&mut self, head: &[u8], body: &[Seg<'_>], hdr: &VnetHdr) -> Result<bool, Fault> {
        self.take(bytes_of(head, body, 0), *hdr)
    }

    fn room(&mut self, _: u32, limit: usize) -> Result<usize, Fault> {
        self.asked = limit;
        Ok(if self.room >= self.looks { limit } else { self.room.min(limit) })
    }

    fn steer(&self) -> Option<Arc<dyn Steer>> {
        self.steer.clone()
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        None
    }

    fn flush(&mut self) {
        self.flushed = self.got.len();
    }

    fn notify(&mut self) {}

    fn arm(&mut self) -> bool {
        self.room == 0
    }

    fn disarm(&mut self) {}
}

/// Ports, a forwarder, and a sender's port for each.
struct Rig {
    forwarder: Forwarder,
    fdb: Arc<Fdb>,
    table: Table,
    egress: Vec<Vec<Arc<Mutex<FakeEgress>>>>,
    sources: Vec<Source>,
    /// Findings that no test has taken.
    found: Findings,
    now: Instant,
}

fn burst_of(frames: &[(Vec<u8>, VnetHdr)]) -> Burst<'_> {
    assert!(frames.len() <= BURST_MAX);
    let mut burst = Burst::default();
    for (i, (bytes, hdr)) in frames.iter().enumerate() {
        burst.segs.push(Seg::of(bytes));
        burst.push_at(i, 1, bytes.len() as u32, *hdr);
    }
    burst
}

impl Rig {
    fn new(mode: Mode, ports: u16, queues: u16) -> Self {
        let fdb = Arc::new(Fdb::new(1024, [1, 2], 300, 4));
        let mut egress = Vec::new();
        let table: Table = (0..ports)
            .map(|id| {
                let fakes: Vec<_> = (0..queues).map(|_| fake()).collect();
                let queue = |(f, s): &(Arc<Mutex<FakeEgress>>, Arc<EgressStats>)| {
                    EgressQueue::new(f.clone(), Arc::clone(s))
                };
                let port =
                    Port::new(PortId(id), format!("p{id}"), fakes.iter().map(queue).collect());
                port.set_active(queues);
                egress.push(fakes.into_iter().map(|(fake, _)| fake).collect());
                Some(Arc::new(port))
            })
            .collect();
        let tuning = || Arc::new(Tuning::new(Policy::Event));
        let source = |id| Source::new(PortId(id), 0, Arc::default(), tuning());
        let shared = Arc::new(table.clone());
        Self {
            forwarder: Forwarder::new(mode, 3, Arc::clone(&fdb), shared, 7),
            fdb,
            table,
            egress,
            sources: (0..ports).map(source).collect(),
            found: Findings::default(),
            now: Instant::START + SECOND,
        }
    }

    /// One burst from `port`.
    fn send_all(&mut self, port: usize, frames: Vec<(Vec<u8>, VnetHdr)>) {
        self.forward(port, &mut burst_of(&frames));
    }

    fn forward(&mut self, port: usize, burst: &mut Burst<'_>) {
        self.found.merge(self.forwarder.forward(&self.sources[port], burst, self.now));
    }

    fn retry(&mut self) {
        self.found.merge(self.forwarder.retry(true, self.now));
    }

    /// Ports whose peers violated the protocol.
    fn faults(&mut self) -> Vec<PortId> {
        let events = std::mem::take(&mut self.found.events).into_iter();
        let port = |event| match event {
            PortEvent::Fault { port, .. } => Some(port),
            _ => None,
        };
        events.filter_map(port).collect()
    }

    fn send(&mut self, port: usize, frames: &[Vec<u8>]) {
        self.send_all(port, frames.iter().map(|f| (f.clone(), VnetHdr::NONE)).collect());
    }

    fn queue(&self, port: usize, queue: usize) -> MutexGuard<'_, FakeEgress> {
        self.egress[port][queue].lock()
    }

    fn port(&self, port: usize) -> MutexGuard<'_, FakeEgress> {
        self.queue(port, 0)
    }

    /// Frames from queue 0 of `port` since the last query.
    fn got(&self, port: usize) -> Vec<Vec<u8>> {
        let mut queue = self.port(port);
        assert_eq!(queue.flushed, queue.got.len(), "all are published");
        queue.flushed = 0;
        queue.hdrs.clear();
        std::mem::take(&mut queue.got)
    }

    fn egress(&self, port: usize) -> &EgressQueue {
        &self.table[port].as_ref().unwrap().egress[0]
    }

    /// Number of frames held for `port`.
    fn held(&self, port: usize) -> usize {
        let egress = self.egress(port);
        let account = &self.table[port].as_ref().unwrap().account;
        assert_eq!(account.held_frames.used(), egress.held_frames() as u64);
        egress.held_frames()
    }

    /// Number of frames that `port` may send next.
    fn budget(&mut self, port: usize) -> usize {
        let (frames, found) = self.forwarder.budget(&self.sources[port], BURST_MAX, self.now);
        self.found.merge(found);
        frames
    }

    fn stats(&self, port: usize) -> &IngressStats {
        &self.sources[port].stats
    }
}

fn fake() -> (Arc<Mutex<FakeEgress>>, Arc<EgressStats>) {
    let stats = Arc::new(EgressStats::default());
    let fake = FakeEgress {
        takes: Offloads::ALL,
        starts: true,
        room: ENDLESS,
        looks: ENDLESS,
        asked: 0,
        fault_after: ENDLESS,
        got: Vec::new(),
        hdrs: Vec::new(),
        flushed: 0,
        steer: None,
        stats: Arc::clone(&stats),
        faults: 0,
    };
    (Arc::new(Mutex::new(Lock::Egress, fake)), stats)
}

fn mac(n: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, n]
}

const BROADCAST: [u8; 6] = [0xff; 6];

/// UDP over IPv4 from `src` to `dst`, optionally tagged, identified by `serial` at its end.
fn tagged(dst: [u8; 6], src: [u8; 6], vlan: Option<u16>, flow: u16, serial: u32) -> Vec<u8> {
    let mut f = [dst, src].concat();
    if let Some(id) = vlan {
        f.extend([0x81, 0]);
        f.extend(id.to_be_bytes());
    }
    f.extend([8, 0, 0x45, 0, 0, 46, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    f.extend((1000 + flow).to_be_bytes());
    f.extend([0, 9, 0, 26, 0, 0]);
    f.extend([0; 14]);
    f.extend(serial.to_be_bytes());
    f
}

fn frame(dst: [u8; 6], src: [u8; 6], serial: u32) -> Vec<u8> {
    tagged(dst, src, None, 0, serial)
}

fn serial(frame: &[u8]) -> u32 {
    u32::from_be_bytes(*frame.last_chunk().unwrap())
}

fn serials(frames: &[Vec<u8>]) -> Vec<u32> {
    frames.iter().map(|f| serial(f)).collect()
}

/// A TCP frame of `payload` bytes with GSO segments of `mss`.
fn tso(dst: [u8; 6], src: [u8; 6], payload: usize, mss: u16) -> (Vec<u8>, VnetHdr) {
    let mut f = [dst, src].concat();
    f.extend([8, 0, 0x45, 0]);
    f.extend(((40 + payload) as u16).to_be_bytes());
    f.extend([0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    f.extend([0, 80, 0, 81, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 1, 0, 0, 0, 0, 0]);
    f.extend((0..payload).map(|i| i as u8));
    let hdr = VnetHdr {
        flags: NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54,
        gso_size: mss,
        csum_start: 34,
        csum_offset: 16,
    };
    (f, hdr)
}

#[test]
fn unknown_is_flooded_once_to_each_and_never_back_and_known_goes_to_one() {
    let mut rig = Rig::new(Mode::Switch, 4, 1);
    rig.send(1, &[frame(mac(9), mac(1), 1), frame(BROADCAST, mac(1), 2)]);
    for port in [0, 2, 3] {
        assert_eq!(serials(&rig.got(port)), [1, 2]);
    }
    assert!(rig.got(1).is_empty());
    rig.send(2, &[frame(mac(1), mac(2), 3)]);
    assert_eq!(serials(&rig.got(1)), [3]);
    assert!(rig.got(0).is_empty() && rig.got(3).is_empty());
    rig.send(1, &[frame(mac(2), mac(1), 4)]);
    assert_eq!(serials(&rig.got(2)), [4]);
}

#[test]
fn moved_address_is_followed_at_once() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    rig.send(1, &[frame(BROADCAST, mac(1), 1)]);
    rig.send(0, &[frame(mac(1), mac(5), 2)]);
    rig.send(2, &[frame(BROADCAST, mac(1), 3)]);
    (0..3).for_each(|p| drop(rig.got(p)));
    rig.send(0, &[frame(mac(1), mac(5), 4)]);
    assert_eq!(serials(&rig.got(2)), [4]);
    assert!(rig.got(1).is_empty());
}

#[test]
fn guest_that_reconnects_within_a_second_is_learned_again() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    rig.send(1, &[frame(BROADCAST, mac(1), 1)]);
    assert_eq!(rig.fdb.flush_learned(PortId(1)), 1, "it disconnects");
    rig.send(1, &[frame(BROADCAST, mac(1), 2)]);
    rig.send(0, &[frame(mac(1), mac(5), 3)]);
    assert_eq!(serials(&rig.got(1)), [3]);
    assert_eq!(serials(&rig.got(2)), [1, 2], "not flooded");
    // Whoever sends to it notices at once that it is gone.
    rig.fdb.flush_learned(PortId(1));
    rig.send(0, &[frame(mac(1), mac(5), 4)]);
    assert_eq!(serials(&rig.got(2)), [4]);
}

#[test]
fn idle_address_expires_and_is_flooded_to_again() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    rig.send(1, &[frame(BROADCAST, mac(1), 1)]);
    rig.now += 299 * SECOND;
    rig.send(0, &[frame(mac(1), mac(5), 2)]);
    assert_eq!((serials(&rig.got(1)), serials(&rig.got(2))), (vec![2], vec![1]));
    rig.now += 2 * SECOND;
    rig.send(0, &[frame(mac(1), mac(5), 3)]);
    assert_eq!((serials(&rig.got(1)), serials(&rig.got(2))), (vec![3], vec![3]));
}

#[test]
fn static_address_is_not_moved_by_frames() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    rig.fdb.add_static(Mac(mac(1)).0, 0, PortId(1), 0).unwrap();
    rig.send(2, &[frame(mac(7), mac(1), 1)]);
    (0..3).for_each(|p| drop(rig.got(p)));
    rig.send(0, &[frame(mac(1), mac(5), 2)]);
    assert_eq!(serials(&rig.got(1)), [2]);
    assert!(rig.got(2).is_empty());
}

#[test]
fn link_local_same_port_and_runts_are_dropped_and_counted() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    rig.send(1, &[frame(BROADCAST, mac(1), 1), frame(BROADCAST, mac(2), 2)]);
    (0..3).for_each(|p| drop(rig.got(p)));
    let lldp = frame([1, 0x80, 0xc2, 0, 0, 0x0e], mac(1), 3);
    rig.send(1, &[lldp, frame(mac(2), mac(1), 4), vec![2; 11]]);
    assert!((0..3).all(|p| rig.got(p).is_empty()));
    let stats = rig.stats(1);
    assert_eq!(stats.drops_link_local.get(), 1);
    assert_eq!(stats.drops_same_port.get(), 1);
    assert_eq!(stats.drops_runt.get(), 1);
    rig.send(0, &[frame([1, 0x80, 0xc2, 0, 0, 0x10], mac(3), 5)]);
    assert_eq!(serials(&rig.got(2)), [5], "the block ends at 0f");
}

#[test]
fn one_port_fills_only_its_share_of_the_table() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    let many: Vec<_> = (0..40).map(|n| frame(BROADCAST, mac(100 + n), 0)).collect();
    rig.send(1, &many);
    assert_eq!(rig.fdb.learned_from(PortId(1)), 4);
    rig.send(2, &[frame(BROADCAST, mac(2), 0)]);
    assert_eq!(rig.fdb.lookup(mac(2), 0, 1), Some(PortId(2)), "others still learn");
}

#[test]
fn a_flow_stays_on_one_of_the_enabled_queues() {
    let mut rig = Rig::new(Mode::Switch, 2, 4);
    let frames = |from| {
        let one = |n: u32| tagged(BROADCAST, mac(1), None, (n % 20) as u16, from + n);
        (0..60).map(one).collect::<Vec<_>>()
    };
    for round in 0..4 {
        rig.send(0, &frames(60 * round));
    }
    let mut queue_of = HashMap::new();
    let mut used = [0; 4];
    for (queue, used) in used.iter_mut().enumerate() {
        for f in &rig.queue(1, queue).got {
            assert_eq!(*queue_of.entry(serial(f) % 20).or_insert(queue), queue);
            *used += 1;
        }
    }
    assert!(used.iter().all(|n| *n > 0), "spread over all: {used:?}");
    rig.table[1].as_ref().unwrap().set_active(1);
    let before = rig.port(1).got.len();
    rig.send(0, &frames(900));
    assert_eq!(rig.port(1).got.len(), before + 60, "one queue is left");
}

#[test]
fn frames_to_a_flow_use_the_queue_it_is_sent_on() {
    // No two of these have the same place in the table.
    const OTHERS: u16 = 200;
    let mut rig = Rig::new(Mode::Switch, 2, 4);
    let sent_on = |flow: u16| (flow * 3 + flow / 4) % 4;
    let send = |rig: &mut Rig, flow: u16, queue: u16| {
        rig.sources[1].queue = queue;
        rig.send(1, &[tagged(mac(1), mac(2), None, OTHERS + flow, 0)]);
    };
    let come = |rig: &mut Rig, flows: std::ops::Range<u16>| {
        for flow in flows {
            rig.send(0, &[tagged(mac(2), mac(1), None, OTHERS + flow, flow.into())]);
        }
        [0, 1, 2, 3].map(|queue| serials(&std::mem::take(&mut rig.queue(1, queue).got)))
    };
    // Flows from 20 on are first seen towards the port: these keep their queue.
    let by_hash = come(&mut rig, 20..40);
    for flow in 0..40 {
        send(&mut rig, flow, sent_on(flow));
    }
    let steered = [0, 1, 2, 3].map(|queue| {
        (0..20).filter(|flow| sent_on(*flow) == queue).map(u32::from).collect::<Vec<_>>()
    });
    assert_eq!(come(&mut rig, 0..20), steered);
    assert_eq!(come(&mut rig, 20..40), by_hash);
    // So do the others, even if sent on another queue now, until they were idle.
    for later in [1, 4, 5] {
        rig.now += later * SECOND;
        let moved = |flow| if later == 5 { sent_on(flow) } else { 3 - sent_on(flow) };
        (0..40).for_each(|flow| send(&mut rig, flow, moved(flow)));
        assert_eq!(come(&mut rig, 0..20), steered, "{later} s later");
        assert_eq!(come(&mut rig, 20..40) == by_hash, later < 5);
    }
    // Those on queues that are no longer enabled use their hash.
    rig.table[1].as_ref().unwrap().set_active(2);
    let came = come(&mut rig, 0..20);
    assert!((0..2).all(|queue| steered[queue].iter().all(|flow| came[queue].contains(flow))));
    assert_eq!((came[0].len() + came[1].len(), came[2].len() + came[3].len()), (20, 0));
}

#[test]
fn flooded_frames_that_reach_no_port_are_counted() {
    let rig = &mut Rig::new(Mode::Switch, 3, 1);
    rig.table[1].as_ref().unwrap().set_active(0);
    let send = |rig: &mut Rig| {
        rig.send(0, &[frame(BROADCAST, mac(0), 1), frame(mac(9), mac(0), 2)]);
        rig.stats(0).drops_no_port.get()
    };
    assert_eq!(send(rig), 0);
    assert_eq!(serials(&rig.got(2)), [1, 2]);
    rig.table[2].as_ref().unwrap().set_active(0);
    assert_eq!(send(rig), 2);
}

#[test]
fn cross_wires_pairs_and_counts_what_has_no_partner() {
    let mut rig = Rig::new(Mode::Cross, 5, 1);
    for port in 0..5 {
        // To itself, to a group, link-local: nothing is parsed.
        let to = [mac(port), BROADCAST, [1, 0x80, 0xc2, 0, 0, 0], mac(9), mac(9)];
        rig.send(port.into(), &[frame(to[usize::from(port)], mac(port), port.into())]);
    }
    let got: Vec<_> = (0..5).map(|p| serials(&rig.got(p))).collect();
    assert_eq!(got, [vec![1], vec![0], vec![3], vec![2], vec![]]);
    assert_eq!(rig.stats(4).drops_no_port.get(), 1);
    rig.table[1].as_ref().unwrap().set_active(0);
    rig.send(0, &[frame(mac(1), mac(0), 9)]);
    assert_eq!(rig.stats(0).drops_no_port.get(), 1);
    rig.send(2, &[Vec::new()]);
    assert_eq!(rig.stats(2).drops_runt.get(), 1);
    assert!(rig.got(3).is_empty());
}

/// Steers everything to this queue.
struct To(u16);

impl Steer for To {
    fn queue(&self, head: &[u8], _: u16) -> u16 {
        assert!(head.len() >= 14);
        self.0
    }
}

#[test]
fn peer_with_its_own_steering_is_queried_with_each_group() {
    let mut rig = Rig::new(Mode::Switch, 2, 4);
    let flows = |dst| (0..16).map(|n| tagged(dst, mac(0), None, n, n.into())).collect::<Vec<_>>();
    let spread = |rig: &Rig| (0..4).map(|q| rig.queue(1, q).got.len()).collect::<Vec<_>>();
    for queue in 0..4 {
        // An invalid queue is mapped to a valid one.
        rig.queue(1, queue).steer = Some(Arc::new(To(6)));
    }
    rig.send(0, &flows(BROADCAST));
    let first = spread(&rig);
    assert!(first.iter().filter(|n| **n > 0).count() > 1, "chosen by the switch: {first:?}");
    rig.send(0, &flows(BROADCAST));
    rig.send(0, &flows(mac(1)));
    let after = spread(&rig);
    assert_eq!(after[2], first[2] + 32);
    assert_eq!(after.iter().sum::<usize>(), 48);
    (0..4).for_each(|queue| rig.queue(1, queue).steer = None);
    rig.send(0, &flows(mac(1)));
    rig.send(0, &flows(mac(1)));
    assert_eq!(
        spread(&rig),
        (0..4).map(|q| { 2 * first[q] + if q == 2 { 48 } else { 0 } }).collect::<Vec<_>>()
    );
    // A port with one queue is not queried.
    rig.queue(1, 0).steer = Some(Arc::new(To(3)));
    rig.table[1].as_ref().unwrap().set_active(1);
    let before = spread(&rig)[0];
    rig.send(0, &flows(mac(1)));
    rig.send(0, &flows(mac(1)));
    assert_eq!(spread(&rig)[0], before + 32);
}

#[test]
fn floods_to_many_ports_and_queues_keep_one_group_for_each() {
    let mut rig = Rig::new(Mode::Switch, 40, 3);
    let flooded = |n: u32| tagged(BROADCAST, mac(0), None, (n % 7) as u16, n);
    rig.send(0, &(0..20).map(flooded).collect::<Vec<_>>());
    for port in 1..40 {
        let stats = |q: usize| rig.queue(port, q).got.len();
        assert_eq!((0..3).map(stats).sum::<usize>(), 20);
    }
    assert!(rig.forwarder.groups_used <= 39 * 3);
}

#[test]
fn one_flood_is_segmented_for_the_plain_port_only() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    rig.port(1).takes = Offloads::default();
    let (bytes, hdr) = tso(BROADCAST, mac(0), 3000, 1448);
    rig.send_all(0, vec![(bytes.clone(), hdr)]);
    assert_eq!(rig.port(2).hdrs, [hdr]);
    assert_eq!(rig.got(2), [bytes]);
    assert_eq!(rig.port(1).hdrs, [VnetHdr::NONE; 3]);
    assert_eq!(rig.port(1).stats.segmented.get(), 3);
    let lens: Vec<_> = rig.got(1).iter().map(Vec::len).collect();
    assert_eq!(lens, [54 + 1448, 54 + 1448, 54 + 104]);
}

#[test]
fn frame_that_cannot_be_segmented_is_counted_at_its_sender() {
    let mut rig = Rig::new(Mode::Cross, 2, 1);
    rig.port(1).takes = Offloads::default();
    let (mut bytes, hdr) = tso(mac(1), mac(0), 3000, 1448);
    bytes[14] = 0;
    rig.send_all(0, vec![(bytes, hdr)]);
    assert_eq!((rig.stats(0).drops_bad_gso.get(), rig.got(1).len()), (1, 0));
}

#[test]
fn fault_of_one_egress_is_reported_and_others_get_their_frames() {
    let mut rig = Rig::new(Mode::Switch, 4, 1);
    rig.port(1).fault_after = 0;
    rig.send(0, &[frame(BROADCAST, mac(0), 0), frame(BROADCAST, mac(0), 1)]);
    assert_eq!(rig.faults(), [PortId(1)]);
    assert_eq!(rig.port(1).stats.drops_down.get(), 2);
    assert_eq!((serials(&rig.got(2)), serials(&rig.got(3))), (vec![0, 1], vec![0, 1]));
}

#[test]
fn fault_after_delivered_frames_counts_those_once() {
    let mut rig = Rig::new(Mode::Cross, 2, 1);
    rig.port(1).takes = Offloads::default();
    rig.port(1).fault_after = 1;
    let segmented = tso(mac(1), mac(0), 3000, 1448);
    rig.send_all(0, vec![(frame(mac(1), mac(0), 0), VnetHdr::NONE), segmented]);
    assert_eq!(rig.faults().len(), 1);
    assert_eq!((rig.got(1).len(), rig.port(1).stats.drops_down.get()), (1, 1));
}

#[test]
fn capture_copies_both_directions_and_loses_rather_than_blocks() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    let (sink, captured) = sync_channel(3);
    let mirror = &rig.table[1].as_ref().unwrap().mirror;
    mirror.set(Some(sink));
    assert!(mirror.is_on());
    rig.send(1, &[frame(mac(9), mac(1), 1)]);
    rig.send(0, &[frame(mac(1), mac(0), 2), frame(mac(9), mac(0), 3), frame(mac(1), mac(0), 4)]);
    let seen: Vec<_> = captured.try_iter().map(|c| (c.ingress, serial(&c.bytes))).collect();
    assert_eq!(seen, [(true, 1), (false, 2), (false, 3)]);
    let mirror = &rig.table[1].as_ref().unwrap().mirror;
    assert_eq!(mirror.lost.load(Ordering::Relaxed), 1);
    mirror.set(None);
    assert!(!mirror.is_on());
    assert_eq!(serials(&rig.got(1)), [2, 3, 4], "the port loses nothing");
    rig.send(1, &[frame(mac(9), mac(1), 5)]);
    assert!(captured.try_recv().is_err());
}

#[test]
fn held_frames_are_captured_once_at_each_end() {
    let mut rig = Rig::new(Mode::Cross, 2, 1);
    let (sink, captured) = sync_channel(10);
    for port in 0..2 {
        rig.table[port].as_ref().unwrap().mirror.set(Some(sink.clone()));
    }
    rig.port(1).room = 0;
    rig.send(0, &[frame(mac(1), mac(0), 1)]);
    rig.send(0, &[frame(mac(1), mac(0), 2)]);
    rig.port(1).room = ENDLESS;
    rig.retry();
    let seen: Vec<_> = captured.try_iter().map(|c| (c.ingress, serial(&c.bytes))).collect();
    assert_eq!(seen, [(true, 1), (true, 2), (false, 1), (false, 2)]);
}

#[test]
fn frames_to_a_removed_port_are_dropped_or_flooded() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    rig.send(1, &[frame(BROADCAST, mac(1), 1)]);
    (0..3).for_each(|p| drop(rig.got(p)));
    rig.table[1] = None;
    rig.forwarder.set_table(Arc::new(rig.table.clone()));
    rig.send(0, &[frame(mac(1), mac(0), 2)]);
    assert_eq!((rig.got(1).len(), serials(&rig.got(2))), (0, vec![2]));
}

/// One step of the property test.
#[derive(Clone, Debug)]
enum Op {
    /// A burst from a port: (destination, flow) of each frame.
    Send(usize, Vec<(u8, u16)>),
    /// A destination's room becomes this.
    Room(usize, usize),
    /// This many ms pass.
    Wait(u64),
    /// A port goes down or comes up.
    Active(usize, bool),
    /// Held frames are retried.
    Retry,
}

const PORTS: usize = 4;

fn op() -> impl Strategy<Value = Op> {
    // Destinations: a port's address, an unknown one, broadcast.
    let frames = prop::collection::vec((0_u8..6, 0_u16..3), 0..12);
    prop_oneof![
        6 => (0..PORTS, frames).prop_map(|(p, f)| Op::Send(p, f)),
        3 => (0..PORTS, 0_usize..20).prop_map(|(p, n)| Op::Room(p, n)),
        2 => (1_u64..150).prop_map(Op::Wait),
        1 => (0..PORTS, any::<bool>()).prop_map(|(p, up)| Op::Active(p, up)),
        2 => Just(Op::Retry),
    ]
}

/// All drop counters that name frames of `from`.
fn drops(stats: &IngressStats) -> u64 {
    stats.all().filter(|(name, _)| name.starts_with("drops_")).map(|(_, n)| n).sum()
}

fn egress_drops(rig: &Rig, port: usize) -> u64 {
    let stats = &rig.table[port].as_ref().unwrap().egress[0].stats;
    stats.all().filter(|(name, _)| name.starts_with("drops_")).map(|(_, n)| n).sum()
}

/// Runs `ops` and checks after each step that every copy of every frame is delivered, held or
/// counted as dropped, once, and that each port gets the frames of a flow in order.
fn model(mode: Mode, ops: &[Op]) -> Result<(), TestCaseError> {
    let mut rig = Rig::new(mode, PORTS as u16, 1);
    for n in 0..PORTS as u8 {
        rig.fdb.add_static(mac(n), 0, PortId(n.into()), 0).unwrap();
    }
    let (mut serial_next, mut copies) = (0_u32, 0_u64);
    let mut last_of: HashMap<(usize, usize, u16, u8), u32> = HashMap::new();
    let mut delivered = 0_u64;
    for op in ops {
        match op {
            Op::Room(port, room) => rig.port(*port).room = *room,
            Op::Wait(ms) => rig.now += *ms * MS,
            Op::Retry => rig.retry(),
            Op::Active(port, up) => {
                rig.table[*port].as_ref().unwrap().set_active(u16::from(*up));
            }
            Op::Send(port, frames) => {
                let mut burst = Vec::new();
                for (to, flow) in frames {
                    let dst = if *to == 5 { BROADCAST } else { mac(*to) };
                    burst.push(tagged(dst, mac(*port as u8), None, *flow, serial_next));
                    serial_next += 1;
                    let others = (0..PORTS).filter(|p| p != port);
                    let up = |p: &usize| rig.table[*p].as_ref().unwrap().active() > 0;
                    let flooded = mode == Mode::Switch && *to >= 4;
                    copies += if flooded { others.filter(up).count().max(1) as u64 } else { 1 };
                }
                rig.send(*port, &burst);
            }
        }
        for port in 0..PORTS {
            for f in rig.got(port) {
                delivered += 1;
                let flow = u16::from_be_bytes([f[34], f[35]]);
                let key = (port, usize::from(f[11]), flow, f[5]);
                let last = last_of.insert(key, serial(&f));
                prop_assert!(last.is_none_or(|last| last < serial(&f)), "order in {:?}", key);
            }
        }
        let held: usize = (0..PORTS).map(|p| rig.held(p)).sum();
        let dropped: u64 = (0..PORTS).map(|p| drops(rig.stats(p)) + egress_drops(&rig, p)).sum();
        prop_assert_eq!(copies, delivered + held as u64 + dropped);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]
    #[test]
    fn every_frame_is_accounted_for_once_and_flows_keep_their_order(
        cross in any::<bool>(),
        ops in prop::collection::vec(op(), 1..60),
    ) {
        model(if cross { Mode::Cross } else { Mode::Switch }, &ops)?;
    }
}

mod announce;
mod bounds;
mod flaps;
mod flood;
mod full;
mod granted;
mod rates;
mod run;
mod slow;
mod span;
mod storm;
mod tenants;
mod wired;
