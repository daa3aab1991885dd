use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ::ring::virtq::{Chain, DeviceQueue, DriverQueue, Features, Layout, Taken};
use shm::{GuestMemory, Mapping, Region};
use switch::poll::Policy;
use switch::time::{Instant, Ns};
use vhost_user::frontend::Queue;

use super::*;
use crate::ring::{Buffers, HDR_LEN, Ring};
use crate::settings::{RX_BUFFER, Setting};

const MEMORY: u64 = 1 << 20;
const BUFFERS: u64 = 0x10000;
const SIZE: u16 = 8;
const MS: Ns = Ns::from_ms(1);

/// So long after the start.
fn after(time: Ns) -> Instant {
    Instant::START + time
}

/// The switch's half of one ring.
struct Device {
    queue: DeviceQueue,
    memory: Arc<GuestMemory>,
    kick: OwnedFd,
    call: OwnedFd,
    held: Vec<Chain>,
    /// Segments of the chains held, as (address, length).
    bufs: Vec<Vec<(u64, u32)>>,
}

impl Device {
    /// Takes all available chains; returns how many.
    fn take(&mut self) -> usize {
        let mut taken = Taken::with_capacity(64, SIZE);
        self.queue.take(&self.memory, 64, &mut taken).unwrap();
        for chain in &taken.chains {
            let bufs = [taken.reads(chain), taken.writes(chain)].concat();
            self.bufs.push(bufs.iter().map(|buf| (buf.addr, buf.len)).collect());
        }
        self.held.extend_from_slice(&taken.chains);
        taken.chains.len()
    }

    /// Uses the oldest chain, with `len` bytes written; returns whether it called.
    fn use_one(&mut self, len: u32) -> bool {
        let chain = self.held.remove(0);
        self.queue.put(&chain, len);
        self.queue.publish();
        let call = self.queue.call_needed();
        if call {
            os::signal(self.call.as_fd());
        }
        call
    }

    fn kicked(&self) -> bool {
        os::drain(self.kick.as_fd())
    }

    /// Takes what there is and uses up to `uses` chains; arms if there is nothing. Returns how many
    /// it took.
    fn step(&mut self, uses: u64, asleep: &mut bool) -> usize {
        let got = self.take();
        for _ in 0..uses.min(self.held.len() as u64) {
            self.use_one(0);
        }
        if got == 0 && self.held.is_empty() {
            *asleep = self.queue.arm() == ::ring::virtq::Armed::Armed;
        }
        got
    }

    /// Takes what there is, and uses one chain, or arms if there is none. Returns how many it took.
    fn use_or_arm(&mut self, asleep: &mut bool) -> usize {
        let got = self.take();
        if self.held.is_empty() {
            *asleep = self.queue.arm() == ::ring::virtq::Armed::Armed;
        } else {
            self.use_one(0);
        }
        got
    }
}

/// A generator of random numbers below its argument.
pub(crate) fn steps(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut random = seed * 2 + 1;
    move |n| {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (random >> 33) % n
    }
}

fn settings(kick: &str, sets: &[&str]) -> Settings {
    let sets: Vec<Setting> = sets.iter().map(|s| s.parse().unwrap()).collect();
    Settings::new(Policy::Event, kick.parse().unwrap(), &sets)
}

fn ring_pair(features: Features, settings: &Settings) -> (Queue, Device, Buffers) {
    let mapping = Arc::new(Mapping::memfd("guest", MEMORY).unwrap());
    let region = Region { guest_addr: 0x1000, user_addr: 0, len: MEMORY, offset: 0, mapping };
    let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
    let layout = Layout { size: SIZE, desc: 0x1000, driver: 0x2000, device: 0x3000 };
    let base = if features.packed { 0x8000_8000 } else { 65_533 };
    let driver = DriverQueue::new(&memory, &layout, features, base, None).unwrap();
    let queue = DeviceQueue::new(&memory, &layout, features, base).unwrap();
    let (kick, call) = (os::eventfd().unwrap(), os::eventfd().unwrap());
    let clone = |fd: &OwnedFd| fd.try_clone().unwrap();
    let (device_kick, device_call) = (clone(&kick), clone(&call));
    let mut device = Device {
        queue,
        memory,
        kick: device_kick,
        call: device_call,
        held: Vec::new(),
        bufs: Vec::new(),
    };
    // A new ring enables the first call, but not kicks.
    let _ = device.queue.call_needed();
    assert_eq!(device.queue.arm(), ::ring::virtq::Armed::Armed);
    let count = if settings.apart { SIZE / 2 } else { SIZE } + settings.full.queue();
    let Settings { apart, offset, .. } = *settings;
    let buffers = Buffers { base: BUFFERS, stride: RX_BUFFER.into(), count, apart, offset };
    (Queue { ring: 0, driver, kick, call }, device, buffers)
}

const EVENT: Features =
    Features { packed: false, event_idx: true, indirect: false, in_order: false };
const FLAGS: Features = Features { event_idx: false, ..EVENT };
const PACKED: Features = Features { packed: true, ..EVENT };

fn tx_pair(features: Features, kick: &str, sets: &[&str]) -> (Tx, Device) {
    let settings = settings(kick, sets);
    let (queue, device, buffers) = ring_pair(features, &settings);
    let memory = Arc::clone(&device.memory);
    (Tx::new(Ring::virtio(queue, memory, buffers), &settings), device)
}

fn send(tx: &mut Tx, frames: usize, now: Instant) {
    for _ in 0..frames {
        let i = tx.free().next().unwrap();
        tx.send(i, 72);
    }
    tx.publish(frames, now);
}

#[test]
fn before_tx_always_reclaims_buffers() {
    let (mut tx, mut device) = tx_pair(EVENT, "event", &["tx-completion=before-tx"]);
    send(&mut tx, 2, Instant::START);
    device.take();
    device.use_one(0);
    assert_eq!((tx.room(1).unwrap(), tx.in_flight()), (1, 1));
    assert_eq!((tx.counts.reclaims, tx.counts.reclaimed), (1, 1));
}

#[test]
fn orphan_reclaims_only_when_a_burst_finds_too_few_buffers() {
    let (mut tx, mut device) = tx_pair(EVENT, "event", &[]);
    send(&mut tx, 6, Instant::START);
    device.take();
    device.use_one(0);
    assert_eq!((tx.room(2).unwrap(), tx.in_flight()), (2, 6));
    assert_eq!((tx.room(3).unwrap(), tx.in_flight()), (3, 5));
    // A sleeper waits only if it has no room, for the next buffer.
    assert_eq!(tx.prepare_sleep(false).unwrap(), SleepMode::Unarmed);
    send(&mut tx, 3, Instant::START);
    assert_eq!(tx.room(1).unwrap(), 0);
    assert_eq!(tx.prepare_sleep(true).unwrap(), SleepMode::Armed);
    assert!(device.use_one(0));
    assert_eq!(tx.prepare_sleep(true).unwrap(), SleepMode::Awake);
    assert_eq!(tx.room(1).unwrap(), 1);
}

#[test]
fn the_completion_timer_runs_while_frames_are_in_flight_and_reclaims_at_ticks() {
    let (mut tx, mut device) = tx_pair(EVENT, "event", &["tx-completion=timer:1000"]);
    assert_eq!(tx.deadline(), None);
    send(&mut tx, 8, after(10 * MS + Ns::new(1)));
    device.take();
    device.use_one(0);
    assert_eq!((tx.room(1).unwrap(), tx.deadline()), (0, Some(after(11 * MS))));
    assert!(!tx.stop());
    assert_eq!(tx.prepare_sleep(true).unwrap(), SleepMode::Unarmed, "the tick ends the sleep");
    tx.tick(after(11 * MS - Ns::new(1))).unwrap();
    assert_eq!(tx.in_flight(), 8);
    tx.tick(after(11 * MS + Ns::new(7))).unwrap();
    assert_eq!((tx.in_flight(), tx.deadline()), (7, Some(after(12 * MS))));
    for _ in 0..7 {
        device.use_one(0);
    }
    tx.tick(after(12 * MS)).unwrap();
    assert_eq!((tx.in_flight(), tx.deadline()), (0, None));
}

/// Calls for `sent` frames: after how many uses, and how many buffers were then reclaimed.
fn calls(features: Features, completion: &str, sent: usize) -> Vec<(usize, u64)> {
    let set = format!("tx-completion={completion}");
    let (mut tx, mut device) = tx_pair(features, "event", &[&set]);
    send(&mut tx, sent, Instant::START);
    device.take();
    let mut calls = Vec::new();
    assert_eq!(tx.prepare_sleep(false).unwrap(), SleepMode::Armed);
    for used in 1..=sent {
        if device.use_one(0) {
            let _ = tx.prepare_sleep(false).unwrap();
            calls.push((used, tx.counts.reclaimed));
        }
    }
    calls
}

#[test]
fn on_empty_is_called_when_all_are_used() {
    assert_eq!(calls(EVENT, "on-empty", 5), [(5, 5)]);
    // Without event index each use calls, but all buffers are reclaimed at once.
    assert_eq!(calls(FLAGS, "on-empty", 3), [(1, 0), (2, 0), (3, 3)]);
}

#[test]
fn on_half_empty_is_called_when_half_are_free() {
    assert_eq!(calls(EVENT, "on-half-empty", 6), [(2, 2)]);
    assert_eq!(calls(EVENT, "on-half-empty", 8), [(4, 4)]);
    assert_eq!(calls(FLAGS, "on-half-empty", 6)[..2], [(1, 0), (2, 2)]);
    // With half of them free, no call is enabled.
    let (mut tx, _) = tx_pair(EVENT, "event", &["tx-completion=on-half-empty"]);
    send(&mut tx, 4, Instant::START);
    assert_eq!(tx.prepare_sleep(false).unwrap(), SleepMode::Unarmed);
}

#[test]
fn awake_senders_reclaim_at_the_same_points() {
    for (completion, point) in [("on-empty", 8), ("on-half-empty", 4), ("orphan", 1)] {
        let set = format!("tx-completion={completion}");
        let (mut tx, mut device) = tx_pair(EVENT, "event", &[&set]);
        send(&mut tx, 8, Instant::START);
        device.take();
        for used in 1..=point {
            device.use_one(0);
            let room = if used == point { point } else { 0 };
            assert_eq!(tx.room(8).unwrap(), room, "{completion} after {used}");
        }
    }
}

#[test]
fn every_completion_wakes_a_blocked_sender_on_every_ring() {
    for features in [EVENT, FLAGS, PACKED, Features { event_idx: false, ..PACKED }] {
        for completion in ["orphan", "before-tx", "timer:1000", "on-empty", "on-half-empty"] {
            let set = format!("tx-completion={completion}");
            let (mut tx, mut device) = tx_pair(features, "event", &[&set]);
            send(&mut tx, 8, Instant::START);
            device.take();
            let mut asleep = true;
            for used in 0..8 {
                // A call makes a sleeper poll; a deadline remains.
                if tx.room(1).unwrap() > 0 || tx.prepare_sleep(true).unwrap() == SleepMode::Awake {
                    asleep = tx.room(1).unwrap() == 0;
                    break;
                }
                let called = device.use_one(0);
                asleep = !called && tx.deadline().is_none();
                assert!(!asleep || used < 7, "{completion} {features:?} sleeps indefinitely");
            }
            tx.tick(after(2 * MS)).unwrap();
            assert!(!asleep || completion.starts_with("timer"), "{completion} {features:?}");
            assert!(tx.room(8).unwrap() > 0 || tx.prepare_sleep(true).unwrap() == SleepMode::Awake);
            assert!(tx.room(1).unwrap() > 0, "{completion} {features:?}");
        }
    }
}

/// Random steps of a sender and of a switch that both sleep when they may. Whenever both do, a
/// deadline must be set, or nothing may be left to do.
fn check_no_lost_wakeup(features: Features, kick: &str, sets: &[&str], seed: u64) {
    let what = format!("{features:?} --kick {kick} {sets:?} seed {seed}");
    let (mut tx, mut device) = tx_pair(features, kick, sets);
    let mut next = steps(seed);
    let (mut now, mut left) = (after(Ns::new(1)), 200);
    let (mut device_asleep, mut taken) = (false, 0);
    let mut rounds = 0;
    while taken < 200 {
        rounds += 1;
        assert!(rounds < 100_000, "{what}: the switch is not notified");
        now += Ns::from_us(next(3));
        // The switch: one step if it is awake.
        device_asleep &= !device.kicked();
        if !device_asleep && next(2) == 0 {
            taken += device.step(next(4), &mut device_asleep);
        }
        // In every second run the kick policy changes between two rounds.
        if seed % 2 == 1 && next(10) == 0 {
            let kicks = [kick, "event", "timer:1000", "coalesce:50,4"];
            tx.set_kick_policy(kicks[next(4) as usize].parse().unwrap());
        }
        // The sender: a burst, then a sleep if it may.
        tx.tick(now).unwrap();
        let want = (next(5) as usize).min(left);
        let room = tx.room(want).unwrap();
        if room > 0 {
            send(&mut tx, room, now);
            left -= room;
        }
        let blocked = want > 0 && room == 0;
        let retries = blocked && tx.stop();
        if !blocked && left > 0 || retries || tx.prepare_sleep(blocked).unwrap() == SleepMode::Awake
        {
            continue;
        }
        // It sleeps until called, or until its deadline.
        tx.ring.take_calls();
        let mut called = false;
        device_asleep &= !device.kicked();
        while !called && !device_asleep {
            taken += device.use_or_arm(&mut device_asleep);
            called = tx.ring.take_calls();
        }
        if !called {
            match tx.deadline() {
                Some(at) => now = now.max(at),
                None => assert!(!blocked && taken == 200, "{what}: both sleep"),
            }
        }
    }
    assert_eq!(left, 0, "{what}");
}

#[test]
fn nobody_sleeps_with_work_pending() {
    for features in [EVENT, FLAGS, PACKED, Features { in_order: true, ..EVENT }] {
        for kick in ["event", "timer:1000", "coalesce:50,4", "coalesce:50/pending"] {
            for completion in ["orphan", "before-tx", "timer:1000", "on-empty", "on-half-empty"] {
                for full in ["stop-before-full", "busy-retry", "queue:3"] {
                    let sets = [format!("tx-completion={completion}"), format!("tx-full={full}")];
                    for seed in 0..20 {
                        check_no_lost_wakeup(features, kick, &[&sets[0], &sets[1]], seed);
                    }
                }
            }
        }
    }
}

#[test]
fn a_full_ring_stops_a_sender_or_makes_it_retry() {
    let (mut tx, mut device) = tx_pair(EVENT, "event", &[]);
    send(&mut tx, 8, Instant::START);
    device.take();
    assert_eq!((tx.stop(), tx.stop()), (false, false));
    assert_eq!((tx.counts.stops, tx.counts.busy), (1, 0), "it stopped once");
    let (mut tx, mut device) = tx_pair(EVENT, "event", &["tx-full=busy-retry"]);
    send(&mut tx, 8, Instant::START);
    device.take();
    assert_eq!((tx.stop(), tx.stop()), (true, true));
    assert_eq!((tx.counts.stops, tx.counts.busy), (0, 2));
}

#[test]
fn frames_beyond_the_ring_wait_in_the_queue_and_stay_in_order() {
    let (mut tx, mut device) = tx_pair(EVENT, "event", &["tx-full=queue:3"]);
    assert_eq!(tx.room(64).unwrap(), 11);
    send(&mut tx, 11, Instant::START);
    assert_eq!((device.take(), tx.in_flight(), tx.counts.queued), (8, 11, 3));
    assert_eq!(tx.room(1).unwrap(), 0);
    // A sender without another frame waits for the ring, too: the queue needs its room.
    assert_eq!(tx.prepare_sleep(false).unwrap(), SleepMode::Armed);
    assert!(device.use_one(0) && device.kicked());
    assert!(!device.use_one(0));
    assert_eq!(device.queue.arm(), ::ring::virtq::Armed::Armed);
    tx.tick(after(Ns::new(1))).unwrap();
    assert!(device.kicked(), "those moved to the ring");
    assert_eq!((device.take(), tx.in_flight()), (2, 9));
    // The next one waits behind the last of the queue.
    send(&mut tx, 1, Instant::START);
    assert_eq!((device.take(), tx.counts.queued), (0, 4));
    for _ in 0..8 {
        device.use_one(0);
    }
    assert_eq!((tx.room(64).unwrap(), device.take()), (9, 2));
    let sent: Vec<u64> = device.bufs.iter().map(|bufs| bufs[0].0).collect();
    let buffer = |i: u64| BUFFERS + i * u64::from(RX_BUFFER);
    // The last frame has one of the buffers that were free again: that used last.
    let order = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1].map(buffer);
    assert_eq!(sent, order);
}

/// Every other setting suppresses calls while the driver is awake.
#[test]
fn a_driver_that_suppresses_nothing_is_called_at_each_use_on_both_rings() {
    let packed = Features { packed: true, ..FLAGS };
    for (features, set) in [FLAGS, packed]
        .into_iter()
        .flat_map(|features| ["suppress=none", "suppress=flags"].map(|set| (features, set)))
    {
        let settings = settings("event", &[set]);
        let (tx, mut tx_device, buffers) = ring_pair(features, &settings);
        let (rx, mut rx_device, rx_buffers) = ring_pair(features, &settings);
        let tx = Ring::virtio(tx, Arc::clone(&tx_device.memory), buffers);
        let rx = Ring::virtio(rx, Arc::clone(&rx_device.memory), rx_buffers);
        let mut pair = Pair::new(tx, rx, &settings);
        send(&mut pair.tx, 8, Instant::START);
        assert_eq!((tx_device.take(), rx_device.take()), (8, 8));
        for i in 0..8 {
            let called = [tx_device.use_one(0), rx_device.use_one(72)];
            assert_eq!(called, [set == "suppress=none"; 2], "{features:?} {set}: use {i}");
            if i == 3 {
                pair.tx.reclaim().unwrap();
                pair.rx.receive(64, |_| {}).unwrap();
                // As a driver does that polls.
                pair.tx.ring.disarm();
                pair.rx.ring.disarm();
            }
        }
        let calls = if set == "suppress=none" { 8 } else { 0 };
        for ring in [&mut pair.tx.ring, &mut pair.rx.ring] {
            ring.take_calls();
            assert_eq!(ring.calls, calls, "{features:?} {set}");
        }
    }
}

#[test]
fn kicks_are_delayed_by_the_policy_and_no_longer() {
    let (mut tx, device) = tx_pair(EVENT, "event", &[]);
    send(&mut tx, 1, Instant::START);
    assert!(device.kicked());
    for (kick, at) in
        [("coalesce:100,4", MS / 10), ("coalesce:100/pending", MS / 10), ("timer:1000", MS)]
            .map(|(kick, time)| (kick, after(time)))
    {
        let (mut tx, mut device) = tx_pair(EVENT, kick, &[]);
        send(&mut tx, 1, Instant::START);
        assert_eq!((device.kicked(), tx.deadline()), (false, Some(at)), "{kick}");
        tx.tick(at - Ns::new(1)).unwrap();
        assert!(!device.kicked());
        tx.tick(at).unwrap();
        assert_eq!((device.kicked(), tx.deadline()), (true, None), "{kick}");
        // A sender that waits for room kicks at once, because the switch may sleep.
        device.take();
        assert_eq!(::ring::virtq::Armed::Armed, device.queue.arm());
        send(&mut tx, 1, at);
        assert!(!device.kicked());
        tx.stop();
        assert_eq!((device.kicked(), tx.deadline()), (true, None), "{kick}");
    }
    let (mut tx, device) = tx_pair(EVENT, "coalesce:100,4", &[]);
    send(&mut tx, 3, Instant::START);
    assert!(!device.kicked());
    send(&mut tx, 1, after(Ns::new(1)));
    assert!(device.kicked());
    assert_eq!(tx.ring.kicks, 1);
}

#[test]
fn delayed_kicks_are_made_when_the_policy_changes() {
    let (mut tx, device) = tx_pair(EVENT, "coalesce:1000,64", &[]);
    tx.set_kick_policy("timer:1000".parse().unwrap());
    assert_eq!((tx.ring.kicks, tx.deadline()), (0, None), "no kick was delayed");
    send(&mut tx, 1, Instant::START);
    assert_eq!((device.kicked(), tx.deadline()), (false, Some(after(MS))));
    tx.set_kick_policy(Policy::Event);
    assert_eq!((device.kicked(), tx.deadline()), (true, None));
}

#[test]
fn header_and_offset_settings_define_the_layout_of_buffers() {
    let (mut tx, mut device) = tx_pair(EVENT, "event", &["offset=6"]);
    send(&mut tx, 1, Instant::START);
    device.take();
    assert_eq!(device.bufs[0], [(BUFFERS + 6, 72)]);
    let ip = BUFFERS + 6 + HDR_LEN as u64 + 14;
    assert_eq!(ip % 16, 0);
    let (mut tx, mut device) = tx_pair(EVENT, "event", &["offset=2", "header=apart"]);
    assert_eq!(tx.ring.size(), SIZE / 2, "two descriptors per frame");
    let mut to = tx.plain(0);
    to.write(&[7; 60]);
    send(&mut tx, 1, Instant::START);
    device.take();
    assert_eq!(device.bufs[0], [(BUFFERS, 12), (BUFFERS + 64 + 2, 60)]);
    let frame = device.memory.seg(BUFFERS + 66, 60, &mut 0).unwrap();
    assert_eq!(frame.first::<60>(), Some([7; 60]));
}

fn rx_pair(sets: &[&str]) -> (Rx, Device) {
    let settings = settings("event", sets);
    let (queue, mut device, buffers) = ring_pair(EVENT, &settings);
    // Small frames only; otherwise a ring of eight would always be refilled at once.
    let buffers = Buffers { stride: 69_632, count: buffers.count, ..buffers };
    let memory = Arc::clone(&device.memory);
    let rx = Rx::new(Ring::virtio(queue, memory, buffers), &settings);
    assert_eq!(device.take(), usize::from(buffers.count));
    assert!(device.kicked());
    assert_eq!(::ring::virtq::Armed::Armed, device.queue.arm());
    (rx, device)
}

#[test]
fn buffers_are_returned_at_once_below_half_or_in_batches() {
    for (refill, at) in
        [("at-once", vec![1, 2, 3, 4, 5, 6]), ("below-half", vec![5]), ("batch:3", vec![3, 6])]
    {
        let (mut rx, mut device) = rx_pair(&[&format!("rx-refill={refill}")]);
        let mut refills = Vec::new();
        for frame in 1..=6 {
            device.use_one(72);
            assert_eq!(rx.receive(64, |segs| assert_eq!(segs[0].len(), 72)), Ok(1));
            let before = rx.counts.refills;
            rx.refill();
            if rx.counts.refills > before {
                refills.push(frame);
                assert!(device.kicked(), "{refill}");
                device.take();
                assert_eq!(::ring::virtq::Armed::Armed, device.queue.arm());
            }
        }
        assert_eq!(refills, at, "{refill}");
        assert_eq!(rx.counts.polls, 6);
    }
}

#[test]
fn a_separate_header_is_received_as_its_own_segment() {
    let (mut rx, mut device) = rx_pair(&["header=apart", "offset=2"]);
    assert_eq!(device.bufs[0][0], (BUFFERS, 12));
    assert_eq!(device.bufs[0][1].0, BUFFERS + 66);
    device.use_one(72);
    let mut lens = Vec::new();
    rx.receive(64, |segs| lens.extend(segs.iter().map(|seg| seg.len()))).unwrap();
    assert_eq!(lens, [12, 60]);
}
