//! Issue 14, row 9: receivers whose memory makes deliveries long by page faults.

use super::*;
use crate::fair::{SLOW_DELIVERIES, SLOW_FOR, slow_rest};

/// Two receivers behind port 0; port 1 is a guest with 128 absent pages for each frame.
fn rig() -> Rig {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    (0..3).for_each(|n| rig.fdb.add_static(mac(n), 0, PortId(n.into()), 0).unwrap());
    rig.forwarder.set_usage(|| USED.get());
    rig.port(1).faults = 128;
    rig
}

/// A frame for each receiver in turn.
fn both(serials: std::ops::Range<u32>) -> Vec<Vec<u8>> {
    let each = |n| [frame(mac(1), mac(0), n), frame(mac(2), mac(0), n)];
    serials.flat_map(each).collect()
}

/// One burst whose deliveries are measured.
fn send_measured(rig: &mut Rig, frames: &[Vec<u8>]) {
    send_all_measured(rig, &frames.iter().map(|f| (f.clone(), VnetHdr::NONE)).collect::<Vec<_>>());
}

fn send_all_measured(rig: &mut Rig, frames: &[(Vec<u8>, VnetHdr)]) {
    let found = rig.forwarder.forward_measured(&rig.sources[0], &mut burst_of(frames), rig.now);
    rig.found.merge(found);
}

/// Slow deliveries since the last query.
fn slow(rig: &mut Rig) -> Vec<SlowDelivery> {
    std::mem::take(&mut rig.found.slow).into_iter().collect()
}

/// So many long deliveries to port 1 that the next one makes it slow.
fn send_long(rig: &mut Rig) {
    for n in 1..SLOW_DELIVERIES {
        send_measured(rig, &[frame(mac(1), mac(0), n)]);
        assert!(!rig.egress(1).is_slow(rig.now));
    }
    assert_eq!(slow(rig).len(), SLOW_DELIVERIES as usize - 1);
    rig.got(1);
}

#[test]
fn receiver_is_slow_after_several_long_deliveries_in_a_row_only() {
    let mut rig = rig();
    for _ in 0..10 {
        send_long(&mut rig);
        rig.now += SLOW_FOR;
    }
    send_long(&mut rig);
    rig.now += SLOW_FOR - MS;
    send_measured(&mut rig, &[frame(mac(1), mac(0), 9)]);
    assert!(rig.egress(1).is_slow(rig.now));
    rig.now += SLOW_FOR;
    assert!(!rig.egress(1).is_slow(rig.now));
}

#[test]
fn receiver_with_absent_pages_gets_one_frame_in_its_part_of_the_time_and_others_get_all() {
    let mut rig = rig();
    send_long(&mut rig);
    let before = rig.egress(1).stats.served_ns.get();
    send_measured(&mut rig, &both(0..4));
    assert_eq!((rig.got(1).len(), rig.got(2).len()), (4, 4), "not known before");
    let took = FAULT * 128 * 4;
    let delivery = SlowDelivery { port: PortId(1), queue: 0, took };
    assert_eq!(slow(&mut rig), [delivery], "the receiver pays");
    assert_eq!(rig.egress(1).stats.served_ns.get() - before, took.get());
    // Without measuring, before its time, for longer than a frame may be held.
    for _ in 0..10 {
        rig.now += MS * 100;
        rig.send(0, &both(4..8));
        assert_eq!((rig.got(1).len(), rig.got(2).len(), rig.held(1)), (0, 4, 0));
        assert_eq!(rig.budget(0), BURST_MAX, "the sender does not wait for it");
    }
    assert_eq!((rig.stats(0).drops_no_room.get(), rig.egress(1).stats.lost_slow.get()), (40, 40));
    rig.send(0, &[frame(BROADCAST, mac(0), 9)]);
    assert_eq!((rig.got(1).len(), rig.got(2).len()), (0, 1));
    assert_eq!(rig.egress(1).stats.drops_slow.get(), 1);
    // In its time: one frame.
    rig.now += slow_rest(took);
    rig.send(0, &both(10..14));
    assert_eq!((serials(&rig.got(1)), rig.got(2).len()), (vec![10], 4));
    let took = FAULT * 128;
    assert_eq!(slow(&mut rig), [SlowDelivery { took, ..delivery }]);
}

#[test]
fn all_slow_receivers_together_have_one_part_of_the_time() {
    let mut rig = rig();
    rig.port(2).faults = 128;
    (0..SLOW_DELIVERIES).for_each(|_| send_measured(&mut rig, &both(0..1)));
    let mut got = [rig.got(1).len(), rig.got(2).len()];
    let mut spent = Ns::ZERO;
    let time = SECOND * 60;
    let end = rig.now + time;
    slow(&mut rig);
    while rig.now < end {
        rig.now += MS;
        rig.send(0, &both(0..2));
        got = [got[0] + rig.got(1).len(), got[1] + rig.got(2).len()];
        slow(&mut rig).iter().for_each(|slow| spent += slow.took);
    }
    assert!(spent * 1000 < time, "{spent:?} of {time:?}");
    assert!(got[0] + got[1] > 20, "{got:?}: they get some");
}

#[test]
fn held_frames_of_a_receiver_that_becomes_slow_are_dropped() {
    let mut rig = rig();
    send_long(&mut rig);
    rig.port(1).room = 0;
    rig.send(0, &both(0..8));
    assert_eq!(rig.held(1), 8);
    rig.port(1).room = 3;
    rig.retry();
    assert_eq!((rig.got(1).len(), rig.held(1)), (3, 5), "delivered, and measured");
    rig.now += MS;
    rig.port(1).room = ENDLESS;
    rig.retry();
    assert_eq!((rig.got(1).len(), rig.held(1), rig.forwarder.is_blocked()), (0, 0, false));
    assert_eq!(rig.egress(1).stats.lost_aged.get(), 5);
    assert_eq!(rig.stats(0).drops_no_room.get(), 5);
}

#[test]
fn receiver_recovers_when_its_pages_are_there() {
    let mut rig = rig();
    send_long(&mut rig);
    send_measured(&mut rig, &both(0..1));
    rig.port(1).faults = 0;
    rig.now += slow_rest(FAULT * 128);
    rig.send(0, &both(1..5));
    assert_eq!(rig.got(1).len(), 5, "one by one, all short");
    rig.now += SLOW_FOR;
    assert!(!rig.egress(1).is_slow(rig.now));
    rig.port(1).room = 0;
    rig.send(0, &both(5..9));
    assert_eq!((rig.held(1), rig.egress(1).stats.lost_slow.get()), (4, 0));
}

#[test]
fn fresh_memory_of_an_honest_receiver_makes_it_not_slow() {
    let mut rig = rig();
    let (long, hdr) = tso(mac(1), mac(0), 64_000, 1460);
    // Each page of the buffers for the first time.
    for (bytes, faults) in [(long, 16), (frame(mac(1), mac(0), 0), 2)] {
        rig.port(1).faults = faults;
        send_all_measured(&mut rig, &vec![(bytes, hdr); 4]);
        assert!(!rig.egress(1).is_slow(rig.now), "{faults} faults a frame");
    }
    assert_eq!(slow(&mut rig), []);
}
