//! Full destinations, and their senders.

use super::*;
use crate::hold::{PAUSE_WINDOW, WAIT_MAX};

fn to(port: u8, serials: std::ops::Range<u32>) -> Vec<Vec<u8>> {
    serials.map(|n| frame(mac(port), mac(0), n)).collect()
}

/// A switch of three whose addresses are known.
fn switch() -> Rig {
    let rig = Rig::new(Mode::Switch, 3, 1);
    (0..3).for_each(|n| rig.fdb.add_static(mac(n), 0, PortId(n.into()), 0).unwrap());
    rig
}

#[test]
fn frames_for_a_full_destination_are_held_in_order_and_their_sender_paused() {
    for mode in [Mode::Switch, Mode::Cross] {
        let mut rig = Rig::new(mode, 2, 1);
        rig.fdb.add_static(mac(1), 0, PortId(1), 0).unwrap();
        rig.port(1).room = 2;
        assert_eq!(rig.budget(0), BURST_MAX);
        rig.send(0, &to(1, 0..5));
        assert_eq!((rig.held(1), rig.budget(0)), (3, 0));
        assert_eq!(rig.egress(1).waiters.load(Ordering::Relaxed), 1 << 3, "ours is worker 3");
        assert!(
            rig.forwarder.is_blocked() && rig.forwarder.arm_blocked().full,
            "still full: sleep"
        );
        rig.port(1).room = 5;
        assert_eq!(rig.budget(0), 2, "the held frames first, then as many as fit");
        rig.send(0, &to(1, 5..7));
        assert_eq!((rig.held(1), rig.budget(0)), (0, 0));
        rig.port(1).room = ENDLESS;
        assert!(!rig.forwarder.arm_blocked().full, "it has room now");
        assert_eq!(rig.budget(0), BURST_MAX);
        rig.retry();
        assert!(!rig.forwarder.is_blocked());
        rig.send(0, &to(1, 7..8));
        assert_eq!(serials(&rig.got(1)), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!((rig.stats(0).holds.get(), rig.egress(1).stats.holds.get()), (3, 3));
    }
}

#[test]
fn paused_sender_waits_for_the_room_of_one_frame_and_not_of_a_burst() {
    let mut rig = switch();
    rig.port(1).room = 0;
    rig.send(0, &to(1, 0..1));
    rig.port(1).room = 1;
    // The held frame takes that room. A port notifies when it has the room it was last asked for.
    assert_eq!(rig.budget(0), 0);
    assert_eq!((rig.held(1), rig.port(1).asked), (0, 1));
    rig.port(1).room = ENDLESS;
    assert_eq!((rig.budget(0), rig.port(1).asked), (BURST_MAX, BURST_MAX));
}

#[test]
fn destination_is_armed_once_until_its_retry() {
    let mut rig = switch();
    rig.port(1).room = 0;
    rig.send(0, &to(1, 0..1));
    assert!(rig.forwarder.arm_blocked().full);
    // If armed again, it would report room.
    rig.port(1).room = 1;
    assert!(rig.forwarder.arm_blocked().full);
    rig.port(1).room = 0;
    rig.retry();
    rig.port(1).room = 1;
    assert!(!rig.forwarder.arm_blocked().full);
}

#[test]
fn segments_that_do_not_fit_are_held_and_follow_with_the_frames_behind_them() {
    let mut rig = Rig::new(Mode::Cross, 2, 1);
    rig.port(1).takes = Offloads::default();
    // The peer posts eight buffers at a time, in a larger ring.
    rig.port(1).room = 8;
    let (bytes, hdr) = tso(mac(1), mac(0), 44 * 1448, 1448);
    rig.send_all(0, vec![(bytes, hdr), (frame(mac(1), mac(0), 1), VnetHdr::NONE)]);
    let mut got = rig.got(1);
    assert_eq!((rig.held(1), got.len()), (2, 8));
    for round in 2..=5 {
        rig.port(1).room = 8;
        assert!(!rig.forwarder.arm_blocked().full, "it has room for a segment");
        rig.retry();
        got.extend(rig.got(1));
        assert_eq!((rig.held(1), got.len()), (2, 8 * round));
    }
    rig.port(1).room = 8;
    rig.retry();
    got.extend(rig.got(1));
    assert_eq!((rig.held(1), got.len()), (0, 45));
    let sequence = |bytes: &[u8]| u32::from_be_bytes(bytes[38..42].try_into().unwrap());
    let first = sequence(&got[0]);
    for (n, bytes) in (0..44).zip(&got) {
        assert_eq!((bytes.len(), sequence(bytes)), (54 + 1448, first.wrapping_add(n * 1448)));
    }
    assert_eq!(serial(&got[44]), 1);
    let stats = Arc::clone(&rig.port(1).stats);
    assert_eq!((stats.segmented.get(), stats.gso_segmented.get()), (44, 1));
    assert_eq!((stats.drops_no_room.get(), rig.stats(0).drops_no_room.get()), (0, 0));
}

/// Issue 14, row 3.
#[test]
fn sender_of_several_destinations_never_waits_for_one_of_them() {
    let mut rig = switch();
    rig.port(1).room = 0;
    let mut sent = 0;
    for burst in 0..1000 {
        // A frame every 45 ms, and a burst every 100 us.
        if burst % 450 == 0 {
            rig.port(1).room = 1;
        }
        assert_eq!(rig.budget(0), BURST_MAX, "burst {burst}");
        rig.send(0, &[to(1, 0..50), to(2, sent..sent + 14)].concat());
        sent += 14;
        rig.now += MS / 10;
    }
    assert_eq!(serials(&rig.got(2)), (0..sent).collect::<Vec<_>>());
    let held = rig.held(1) as u64;
    let (egress, sender) = (&rig.egress(1).stats, rig.stats(0));
    assert_eq!(held, 256);
    assert_eq!(egress.frames.get() + held + sender.drops_no_room.get(), 50_000);
    let lost = egress.lost_no_room.get() + egress.lost_aged.get();
    assert_eq!(lost, sender.drops_no_room.get(), "counted at both ends");
}

#[test]
fn sender_waits_while_all_its_destinations_are_full_and_takes_what_one_has_room_for() {
    let mut rig = switch();
    (1..3).for_each(|port| rig.port(port).room = 8);
    rig.send(0, &[to(1, 0..16), to(2, 16..32)].concat());
    assert_eq!((rig.held(1), rig.held(2), rig.budget(0)), (8, 8, 0));
    rig.port(2).room = 20;
    assert_eq!(rig.budget(0), 12, "the room of that one, less the held frames");
    rig.port(2).room = 0;
    assert_eq!(rig.budget(0), 0);
    // One of them is too slow: it is ignored now, and the other is not.
    rig.port(2).room = ENDLESS;
    assert_eq!(rig.budget(0), BURST_MAX);
    rig.now += 2 * SECOND;
    assert_eq!(rig.budget(0), BURST_MAX, "it has sent to none of them recently");
}

#[test]
fn sender_of_more_destinations_than_are_tracked_never_waits() {
    let mut rig = Rig::new(Mode::Switch, 12, 1);
    (0..12).for_each(|n| rig.fdb.add_static(mac(n), 0, PortId(n.into()), 0).unwrap());
    for port in 1..11 {
        rig.port(port).room = 0;
        rig.send(0, &to(port as u8, 0..2));
    }
    assert_eq!(rig.budget(0), BURST_MAX);
}

#[test]
fn sender_of_one_destination_waits_at_most_until_that_is_found_too_slow() {
    let mut rig = switch();
    rig.port(1).room = 0;
    rig.send(0, &to(1, 0..10));
    let start = rig.now;
    while rig.budget(0) == 0 {
        rig.now += MS;
        if (rig.now - start).times(MS).is_multiple_of(45) {
            rig.port(1).room += 1;
            rig.retry();
        }
    }
    let paused = rig.now - start;
    assert!(paused + 2 * MS >= PAUSE_WINDOW && paused <= PAUSE_WINDOW + 2 * MS);
    // Now it continues, even if its frames are dropped.
    for _ in 0..900 {
        rig.send(0, &to(1, 0..64));
        assert_eq!(rig.budget(0), BURST_MAX);
        rig.now += MS;
    }
}

#[test]
fn frame_held_too_long_is_dropped_even_if_its_destination_accepts_some() {
    let mut rig = switch();
    rig.port(1).room = 0;
    rig.send(0, &to(1, 0..64));
    for _ in 0..10 {
        rig.now += WAIT_MAX / 9;
        rig.port(1).room = 1;
        rig.retry();
    }
    assert_eq!((rig.held(1), serials(&rig.got(1)).len()), (0, 9));
    assert_eq!((rig.stats(0).drops_no_room.get(), rig.egress(1).stats.lost_aged.get()), (55, 55));
    assert!(!rig.forwarder.is_blocked());
}

#[test]
fn no_frames_are_held_with_a_limit_of_zero() {
    let mut rig = switch();
    rig.egress(1).set_hold_max(0);
    rig.port(1).room = 1;
    rig.send(0, &to(1, 0..5));
    assert_eq!((rig.held(1), rig.budget(0)), (0, BURST_MAX));
    assert_eq!((rig.stats(0).drops_no_room.get(), rig.egress(1).stats.lost_no_room.get()), (4, 4));
}

#[test]
fn full_destination_does_not_keep_frames_from_another() {
    let mut rig = switch();
    rig.port(1).room = 0;
    rig.send(0, &[to(1, 0..1), to(2, 1..2), to(1, 2..3)].concat());
    assert_eq!((serials(&rig.got(2)), rig.held(1)), (vec![1], 2));
}

#[test]
fn flooded_frames_are_held_too_but_pause_no_sender() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    rig.port(1).room = 1;
    rig.send(0, &(0..3).map(|n| frame(BROADCAST, mac(0), n)).collect::<Vec<_>>());
    assert_eq!((rig.held(1), rig.budget(0)), (2, BURST_MAX));
    rig.port(1).room = 1;
    rig.retry();
    rig.now += WAIT_MAX + Ns::new(1);
    rig.retry();
    assert_eq!((serials(&rig.got(1)), serials(&rig.got(2))), (vec![0, 1], vec![0, 1, 2]));
    assert_eq!((rig.port(1).stats.drops_aged.get(), rig.stats(0).drops_no_room.get()), (1, 0));
}

/// Frames taken, and the copies made of them, are frames delivered and dropped.
#[test]
fn held_frame_that_cannot_be_segmented_is_counted_at_its_sender_or_at_the_receiver_of_a_flood() {
    for dst in [BROADCAST, mac(1)] {
        let mut rig = Rig::new(Mode::Switch, 3, 1);
        rig.send(1, &[frame(BROADCAST, mac(1), 0)]);
        rig.got(2);
        let (mut bytes, hdr) = tso(dst, mac(0), 3000, 1448);
        bytes[14] = 0;
        rig.port(1).takes = Offloads::default();
        rig.port(1).room = 0;
        let first = frame(dst, mac(0), 1);
        rig.send_all(0, vec![(first, VnetHdr::NONE), (bytes, hdr)]);
        assert_eq!(rig.held(1), 2);
        rig.got(1);
        rig.port(1).room = ENDLESS;
        rig.retry();
        assert_eq!((rig.held(1), serials(&rig.got(1))), (0, vec![1]));
        let is_flood = u64::from(dst == BROADCAST);
        assert_eq!(rig.stats(0).drops_bad_gso.get(), 1 - is_flood);
        assert_eq!(rig.egress(1).stats.drops_bad_gso.get(), is_flood);
    }
}

#[test]
fn frames_held_for_a_port_that_goes_down_are_dropped() {
    let mut rig = switch();
    rig.port(1).room = 0;
    rig.send(0, &to(1, 0..5));
    rig.table[1].as_ref().unwrap().set_active(0);
    assert_eq!((rig.held(1), rig.egress(1).stats.drops_held_down.get()), (0, 5));
    assert!(!rig.forwarder.arm_blocked().full);
    rig.retry();
    assert!(!rig.forwarder.is_blocked());
    assert_eq!(rig.budget(0), BURST_MAX);
}

#[test]
fn fault_of_a_destination_drops_its_held_frames() {
    let mut rig = switch();
    rig.port(1).room = 1;
    rig.send(0, &to(1, 0..5));
    rig.port(1).fault_after = 1;
    rig.port(1).room = ENDLESS;
    rig.retry();
    assert_eq!((rig.faults(), rig.held(1)), (vec![PortId(1)], 0));
    assert_eq!(rig.egress(1).stats.drops_held_down.get(), 4);
}

/// A held frame is the one parsed, whatever the sender writes there later.
#[test]
fn held_frame_is_a_private_copy() {
    let mut rig = switch();
    rig.port(1).room = 0;
    let mut bytes = frame(mac(1), mac(0), 7);
    bytes.resize(3000, 9);
    let mut burst = Burst::default();
    for part in [&bytes[..70], &bytes[70..1000], &bytes[1000..]] {
        burst.segs.push(Seg::of(part));
    }
    burst.push_at(0, 3, 3000, VnetHdr::NONE);
    rig.forward(0, &mut burst);
    drop(burst);
    let sent = std::mem::take(&mut bytes);
    rig.port(1).room = 1;
    rig.retry();
    assert_eq!(rig.got(1), [sent]);
}

/// Issue 14, row 15.
#[test]
fn counters_of_a_full_queue_add_up_with_concurrent_floods() {
    const FRAMES: u64 = 20_000;
    let (fake, stats) = fake();
    fake.lock().room = 0;
    let egress = EgressQueue::new(fake, Arc::clone(&stats));
    let port = Arc::new(Port::new(PortId(2), "full".into(), vec![egress]));
    port.set_active(1);
    let table: Arc<Table> = Arc::new(vec![None, None, Some(port)]);
    let fdb = Arc::new(Fdb::new(1024, [1, 2], 300, 4));
    let senders: Vec<_> = (0..2_u16)
        .map(|id| {
            let (table, fdb) = (Arc::clone(&table), Arc::clone(&fdb));
            std::thread::spawn(move || {
                let tuning = Arc::new(Tuning::new(Policy::Event));
                let source = Source::new(PortId(id), 0, Arc::default(), tuning);
                let mut forwarder = Forwarder::new(Mode::Switch, id as u8, fdb, table, 7);
                let (unicast, flood) = (frame(mac(2), mac(0), 0), frame(BROADCAST, mac(0), 1));
                for n in 0..FRAMES / 2 {
                    let mut burst = Burst::default();
                    for (i, bytes) in [&unicast, &flood].into_iter().enumerate() {
                        burst.segs.push(Seg::of(bytes));
                        burst.push_at(i, 1, bytes.len() as u32, VnetHdr::NONE);
                    }
                    let _ = forwarder.forward(
                        &source,
                        &mut burst,
                        Instant::START + SECOND + Ns::new(n),
                    );
                }
                (source.stats.holds.get(), source.stats.drops_no_room.get())
            })
        })
        .collect();
    let ends: Vec<_> = senders.into_iter().map(|thread| thread.join().unwrap()).collect();
    let held = |pick: fn(&(u64, u64)) -> u64| ends.iter().map(pick).sum::<u64>();
    assert_eq!(stats.holds.get(), held(|end| end.0));
    // mac(2) is unknown: all are floods.
    assert_eq!((stats.lost_no_room.get(), held(|end| end.1)), (0, 0));
    assert_eq!(stats.holds.get() + stats.drops_no_room.get(), 2 * FRAMES);
}
