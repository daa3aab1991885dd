//! Rates of frames to a port, and what frames with offloads count.

use super::*;
use crate::account::{Limit, RateLimits};
use crate::hold::RATE_WAIT_MAX;
use crate::offload::on_wire;

fn frames(per_second: u64, burst: u64) -> RateLimits {
    RateLimits { bits: None, frames: Some(Limit { per_second, burst }) }
}

fn bits(per_second: u64, burst: u64) -> RateLimits {
    RateLimits { bits: Some(Limit { per_second, burst }), frames: None }
}

fn set(rig: &Rig, port: usize, to_peer: RateLimits) {
    rig.table[port].as_ref().unwrap().set_rates(RateLimits::default(), to_peer);
}

fn numbered(to: [u8; 6], range: std::ops::Range<u32>) -> Vec<Vec<u8>> {
    range.map(|n| frame(to, mac(1), n)).collect()
}

impl Rig {
    /// Sleeps until the next time that the forwarder wants to be called at; false: there is none.
    fn nap(&mut self) -> bool {
        let Some(at) = self.forwarder.next_notification() else { return false };
        self.now = self.now.max(at);
        self.found.merge(self.forwarder.notify_due(self.now, false));
        true
    }
}

#[test]
fn frames_beyond_the_rate_of_their_receiver_are_held_in_order_and_dropped_beyond_its_hold_queue() {
    for mode in [Mode::Switch, Mode::Cross] {
        let mut rig = Rig::new(mode, 3, 1);
        rig.send(1, &[frame(BROADCAST, mac(2), 0)]);
        rig.got(0);
        rig.got(2);
        set(&rig, 1, frames(10, 4));
        rig.egress(1).set_hold_max(3);
        rig.send(0, &numbered(mac(2), 0..6));
        assert_eq!((serials(&rig.got(1)), rig.held(1)), (vec![0, 1, 2, 3], 2), "{mode:?}");
        rig.now += Ns::from_ms(200);
        assert!(rig.nap());
        assert_eq!(serials(&rig.got(1)), [4, 5]);
        assert!(!rig.nap(), "no wake-up without frames");
        rig.send(0, &numbered(mac(2), 6..14));
        assert_eq!((rig.got(1).len(), rig.held(1)), (0, 3));
        assert_eq!(rig.egress(1).stats.drops_rate.get(), 5);
        assert_eq!(rig.stats(0).drops_no_room.get(), 0, "no loss of a full queue");
        assert_eq!((rig.budget(0), rig.forwarder.is_blocked()), (BURST_MAX, false), "no pause");
        // Held for longer than for a full queue.
        rig.now += Ns::from_ms(350);
        rig.nap();
        assert_eq!(serials(&rig.got(1)), [6, 7, 8]);
        rig.send(0, &numbered(mac(2), 14..17));
        set(&rig, 1, RateLimits::default());
        rig.send(0, &numbered(mac(2), 17..19));
        assert_eq!(serials(&rig.got(1)).last_chunk(), Some(&[17, 18]));
        assert_eq!((rig.held(1), rig.egress(1).stats.drops_rate.get()), (0, 5));
    }
}

/// At 10 frames a second, those beyond 20 are held for more than 2 s.
#[test]
fn frames_held_too_long_are_counted_by_what_held_them() {
    let mut rig = Rig::new(Mode::Switch, 2, 1);
    rig.send(1, &[frame(BROADCAST, mac(2), 0)]);
    set(&rig, 1, frames(10, 1));
    rig.send(0, &numbered(mac(2), 0..32));
    let mut got = rig.got(1).len();
    while rig.nap() {
        got += rig.got(1).len();
    }
    let stats = &rig.egress(1).stats;
    let counted =
        (stats.drops_rate_aged.get(), stats.lost_aged.get(), rig.stats(0).drops_no_room.get());
    assert_eq!((counted, got), ((32 - got as u64, 0, 0), 21), "its rate");
    // Its ring is full in this case.
    rig.queue(1, 0).room = 0;
    rig.send(0, &numbered(mac(2), 32..35));
    rig.now += RATE_WAIT_MAX + Ns::from_ms(200);
    rig.send(0, &numbered(mac(2), 35..36));
    let stats = &rig.egress(1).stats;
    assert_eq!((stats.lost_aged.get(), rig.stats(0).drops_no_room.get()), (3, 3));
    assert_eq!((stats.drops_rate_aged.get(), stats.drops_rate.get()), (32 - got as u64, 0));
}

/// The seeds found that they were held until its guest came back.
#[test]
fn frames_beyond_the_rate_of_a_port_that_is_down_are_dropped() {
    let mut rig = Rig::new(Mode::Cross, 2, 1);
    set(&rig, 1, frames(10, 2));
    rig.send(0, &numbered(mac(2), 0..5));
    assert_eq!((rig.got(1).len(), rig.held(1)), (2, 3));
    let port = Arc::clone(rig.table[1].as_ref().unwrap());
    port.set_active(0);
    assert_eq!((rig.held(1), rig.egress(1).stats.drops_held_down.get()), (0, 3));
    // A burst that found the port up puts its frames now.
    port.set_active(1);
    rig.send(0, &numbered(mac(2), 5..7));
    port.active.store(0, Ordering::Release);
    assert_eq!(rig.held(1), 2);
    assert!(rig.nap());
    assert_eq!((rig.held(1), rig.egress(1).stats.drops_held_down.get()), (0, 5));
    assert!(!rig.nap(), "nobody waits for it");
}

/// A sender with a window: each frame delivered lets it send another. Dropping what is beyond the
/// rate would leave it idle.
#[test]
fn sender_with_a_window_gets_the_rate() {
    for (rate, window) in [(1_000_000, 12), (100_000_000, 64), (10_000_000_000, 256)] {
        let mut rig = Rig::new(Mode::Cross, 2, 1);
        set(&rig, 1, bits(rate, rate / 1000 + 12_000));
        let (start, mut sent, mut acked) = (rig.now, 0_u32, 0_usize);
        let bytes = |n| [frame(mac(2), mac(1), n), vec![0; 1450]].concat();
        let len = bytes(0).len() as u64;
        let frames_in_1_s = rate / 8 / len;
        let all = frames_in_1_s.clamp(100, 20_000) as usize;
        while acked < all {
            while (sent as usize) < acked + window {
                let n = (acked + window - sent as usize).min(BURST_MAX) as u32;
                let burst: Vec<_> = (sent..sent + n).map(bytes).collect();
                rig.send(0, &burst);
                sent += n;
            }
            let got = rig.got(1).len();
            acked += got;
            assert!(got > 0 || rig.nap(), "it stalls");
        }
        let took = (rig.now - start).get() as f64 / 1e9;
        let part = (acked as u64 * len * 8) as f64 / took / rate as f64;
        let burst = (rate / 1000 + 12_000) as f64 / (all as u64 * len * 8) as f64;
        assert!((0.98..1.02 + burst).contains(&part), "{rate}: {part}");
        assert_eq!(rig.egress(1).stats.drops_rate.get(), 0);
    }
}

#[test]
fn flood_reaches_other_ports_at_their_own_rates() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    set(&rig, 1, frames(10, 1));
    rig.send(0, &numbered(BROADCAST, 0..3));
    assert_eq!((serials(&rig.got(1)), serials(&rig.got(2))), (vec![0], vec![0, 1, 2]));
}

#[test]
fn queues_of_a_port_share_its_rate() {
    let mut rig = Rig::new(Mode::Switch, 2, 4);
    set(&rig, 1, frames(10, 8));
    rig.send(0, &(0..64).map(|n| tagged(BROADCAST, mac(1), None, n, 0)).collect::<Vec<_>>());
    let got: usize = (0..4).map(|queue| rig.queue(1, queue).got.len()).sum();
    assert_eq!(got, 8);
}

#[test]
fn frame_with_gso_counts_all_its_bytes_with_the_headers_of_each_segment() {
    let (bytes, hdr) = tso(mac(2), mac(1), 14_480, 1448);
    let len = bytes.len() as u32;
    assert_eq!(on_wire(&bytes[..128], len, &hdr), (10, 14_480 + 540));
    assert_eq!(on_wire(&bytes[..128], len, &VnetHdr::NONE), (1, 14_534));
    // Headers that cannot be parsed.
    assert_eq!(on_wire(&[], len, &hdr), (10, 14_480 + 540));
    let mut rig = Rig::new(Mode::Cross, 2, 1);
    // Room for one segment less; the debt is for all.
    set(&rig, 1, bits(15_020 * 8, 8));
    rig.send_all(0, vec![(bytes.clone(), hdr), (bytes.clone(), hdr)]);
    rig.now += Ns::from_ms(999);
    rig.send_all(0, vec![(bytes.clone(), hdr)]);
    assert_eq!((rig.got(1).len(), rig.held(1)), (1, 2));
    rig.now += Ns::from_ms(1);
    rig.send_all(0, vec![(bytes, hdr)]);
    assert_eq!((rig.got(1).len(), rig.held(1)), (1, 2));
}

#[test]
fn frames_that_are_left_are_charged_when_they_are_taken() {
    let rig = Rig::new(Mode::Switch, 2, 1);
    rig.table[0].as_ref().unwrap().set_rates(frames(10, 8), RateLimits::default());
    let all = numbered(mac(2), 0..6);
    let mut burst = Burst::default();
    for (i, bytes) in all.iter().enumerate() {
        burst.segs.push(Seg::of(bytes));
        burst.push_at(i, 1, bytes.len() as u32, VnetHdr::NONE);
    }
    burst.leave(2);
    let (source, now) = (rig.sources[0].clone(), rig.now);
    rig.forwarder.charge_rate(&source, &burst, now);
    assert_eq!(rig.forwarder.rate_budget(&source, 64, now), Ok(6));
    rig.table[0].as_ref().unwrap().account.rate_in.charge(6, 360, now);
    assert!(rig.forwarder.rate_budget(&source, 64, now).is_err());
    assert_eq!(rig.stats(0).rate_waits.get(), 1);
}
