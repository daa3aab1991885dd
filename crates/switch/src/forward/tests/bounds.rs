//! Issue 14, row 8: bounds on the work of one burst.

use super::*;
use crate::account::burst::{FLOOD_BYTES_MAX, FRAME_FLOOD_BYTES_MAX, MADE_MAX};
use crate::frame::GSO_LEN_MAX;

/// A frame and its header.
type Sent = (Vec<u8>, VnetHdr);

/// Sends one burst of `frames`; returns the number handled.
fn offer(rig: &mut Rig, port: usize, frames: &[Sent]) -> usize {
    let mut burst = Burst::default();
    for (i, (bytes, hdr)) in frames.iter().take(BURST_MAX).enumerate() {
        burst.segs.push(Seg::of(bytes));
        burst.push_at(i, 1, bytes.len() as u32, *hdr);
    }
    rig.forward(port, &mut burst);
    burst.frames.len() - burst.left()
}

/// Sends `frames` in as many bursts as needed; returns the number handled by each.
fn send_all(
    rig: &mut Rig,
    frames: &[Sent],
    mut after: impl FnMut(&mut Rig, &[Sent]),
) -> Vec<usize> {
    let (mut at, mut bursts) = (0, Vec::new());
    while at < frames.len() {
        let n = offer(rig, 0, &frames[at..]);
        assert!(n > 0, "a burst handles at least one frame");
        after(rig, &frames[at..at + n]);
        at += n;
        bursts.push(n);
    }
    bursts
}

/// A switch of `ports`, of which only the first `tso` accept offloads.
fn rig(mode: Mode, ports: u16, tso: u16) -> Rig {
    let rig = Rig::new(mode, ports, 1);
    for port in tso..ports {
        rig.port(port.into()).takes = Offloads::default();
    }
    rig
}

fn plain(dst: [u8; 6], len: usize, serial: u32) -> Sent {
    let mut bytes = frame(dst, mac(0), serial);
    bytes.resize(len.max(bytes.len()), 0);
    (bytes, VnetHdr::NONE)
}

fn drops_of(rig: &Rig) -> u64 {
    drops(rig.stats(0)) + (0..rig.egress.len()).map(|port| egress_drops(rig, port)).sum::<u64>()
}

#[test]
fn floods_of_small_segments_end_their_burst_before_the_bound() {
    let ports = 21;
    let mut rig = rig(Mode::Switch, ports, 0);
    let frames = vec![tso(BROADCAST, mac(0), 2000, 64); 64];
    let each = 2000_usize.div_ceil(64);
    let bursts = send_all(&mut rig, &frames, |rig, frames| {
        let made: usize = (1..21).map(|port| rig.got(port).len()).sum();
        assert_eq!(made, each * 20 * frames.len(), "all of each frame");
        assert!(made <= MADE_MAX, "{made} frames made in one burst");
    });
    assert_eq!((bursts.len(), drops_of(&rig)), (64, 0));
}

#[test]
fn flood_that_exceeds_the_bound_alone_loses_copies_at_its_sender() {
    let mut rig = rig(Mode::Switch, 21, 11);
    let (bytes, hdr) = tso(BROADCAST, mac(0), 60_000, 64);
    let each = 60_000_usize.div_ceil(64);
    assert_eq!(offer(&mut rig, 0, &[(bytes, hdr), plain(mac(9), 60, 1)]), 1);
    let made: Vec<_> = (1..21).map(|port| rig.got(port).len()).collect();
    assert_eq!(made[..10], [1; 10], "ports with the offload get it");
    assert_eq!(made[10..].iter().sum::<usize>(), each, "one of the others");
    assert!(each <= MADE_MAX && 2 * each > MADE_MAX);
    assert_eq!((rig.stats(0).drops_made_limit.get(), drops_of(&rig)), (9, 9));
    // For one port all are made: their number is bounded by the frame's length.
    rig.fdb.add_static(mac(20), 0, PortId(20), 0).unwrap();
    assert_eq!(offer(&mut rig, 0, &[tso(mac(20), mac(0), 60_000, 64)]), 1);
    assert_eq!(rig.got(20).len(), each);
    assert_eq!(drops_of(&rig), 9);
}

#[test]
fn segments_for_one_port_end_a_burst_before_the_bound() {
    for mode in [Mode::Cross, Mode::Switch] {
        let mut rig = rig(mode, 2, 0);
        rig.fdb.add_static(mac(1), 0, PortId(1), 0).unwrap();
        let frames = vec![tso(mac(1), mac(0), 30_000, 100); 9];
        let bursts = send_all(&mut rig, &frames, |rig, frames| {
            assert_eq!(rig.got(1).len(), 300 * frames.len());
        });
        assert_eq!((bursts, drops_of(&rig)), (vec![3; 3], 0));
    }
}

#[test]
fn broadcasts_to_4096_ports_are_one_per_burst_and_reach_all() {
    let mut rig = rig(Mode::Switch, 4096, 4096);
    let frames: Vec<_> = (0..64).map(|n| plain(BROADCAST, 60, n)).collect();
    let bursts = send_all(&mut rig, &frames, |rig, frames| {
        for port in 1..4096 {
            assert_eq!(serials(&rig.got(port)), [serial(&frames[0].0)]);
        }
    });
    assert_eq!((bursts, drops_of(&rig)), (vec![1; 64], 0));
    // Full Ethernet frames reach all, too.
    assert_eq!(offer(&mut rig, 0, &[plain(BROADCAST, 1518, 1)]), 1);
    assert_eq!(drops_of(&rig), 0);
}

#[test]
fn floods_of_long_frames_end_their_burst_for_their_bytes() {
    let mut rig = rig(Mode::Switch, 41, 41);
    let frames: Vec<_> = (0..64).map(|n| plain(BROADCAST, 9000, n)).collect();
    let bursts = send_all(&mut rig, &frames, |rig, _| {
        let bytes: usize = (1..41).flat_map(|port| rig.got(port)).map(|f| f.len()).sum();
        assert!(bytes as u64 <= FLOOD_BYTES_MAX);
    });
    assert_eq!((bursts.len(), drops_of(&rig)), (32, 0));
    // The longest frame there is, to more ports than a burst has bytes for.
    let ports = FRAME_FLOOD_BYTES_MAX / u64::from(GSO_LEN_MAX) + 10;
    let mut rig = self::rig(Mode::Switch, ports as u16 + 1, u16::MAX);
    let long = tso(BROADCAST, mac(0), GSO_LEN_MAX as usize - 54, 1448);
    assert_eq!(offer(&mut rig, 0, &[long]), 1);
    assert_eq!((rig.stats(0).drops_made_limit.get(), drops_of(&rig)), (10, 10));
}

#[test]
fn floods_beyond_the_ports_rate_are_dropped_and_nothing_else_is() {
    let mut rig = rig(Mode::Switch, 21, 21);
    rig.fdb.add_static(mac(1), 0, PortId(1), 0).unwrap();
    let account = Arc::clone(&rig.table[0].as_ref().unwrap().account);
    assert!(account.set_limit("flood-copies", 100));
    let mut flooded = 0;
    for n in 0..100 {
        assert_eq!(offer(&mut rig, 0, &[plain(BROADCAST, 60, n), plain(mac(1), 60, n)]), 2);
        let got: Vec<_> = (1..21).map(|port| rig.got(port).len()).collect();
        assert_eq!(got[0], 1 + got[1], "its unicast frames arrive");
        assert!(got[1..].iter().all(|n| *n == got[1]), "all or none: {got:?}");
        flooded += got[1] as u64;
    }
    // 100 in the burst, by 19 each: the sixth one is the last, and owes the rest.
    assert_eq!(flooded, 6);
    assert_eq!(rig.stats(0).drops_flood_limit.get(), (100 - flooded) * 20);
    assert_eq!(account.flood_copies.refused(), (100 - flooded) * 19);
    // With one other port a flood is one copy, which is free.
    let mut pair = self::rig(Mode::Switch, 2, 2);
    assert!(pair.table[0].as_ref().unwrap().account.set_limit("flood-copies", 0));
    assert_eq!(offer(&mut pair, 0, &[plain(BROADCAST, 60, 1)]), 1);
    assert_eq!((pair.got(1).len(), drops_of(&pair)), (1, 0));
}

#[test]
fn frames_left_for_the_next_burst_are_captured_once() {
    let mut rig = rig(Mode::Switch, 21, 0);
    let (sink, captured) = sync_channel(1000);
    rig.table[0].as_ref().unwrap().mirror.set(Some(sink));
    let frames = vec![tso(BROADCAST, mac(0), 2000, 64); 8];
    let bursts = send_all(&mut rig, &frames, |_, _| {});
    assert_eq!((bursts.len(), captured.try_iter().count()), (8, 8));
}

#[test]
fn flood_from_the_only_port_costs_nothing() {
    let mut rig = rig(Mode::Switch, 1, 0);
    let frames = vec![tso(BROADCAST, mac(0), 60_000, 64); 64];
    assert_eq!(offer(&mut rig, 0, &frames), 64);
    assert_eq!((drops_of(&rig), rig.stats(0).drops_no_port.get()), (64, 64));
}

/// A frame to send: destination, payload, segment size (0: no GSO).
fn sent() -> impl Strategy<Value = (u8, usize, u16)> {
    let to = prop_oneof![4 => 1_u8..30, 2 => Just(99), 1 => Just(100)];
    let payload = prop_oneof![4 => 40_usize..1500, 2 => 1500_usize..9000, 1 => 9000_usize..60_000];
    (to, payload, prop_oneof![2 => Just(0_u16), 2 => 64_u16..1500])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]
    /// For any frames to any number of ports: a burst of several frames makes at most its bound,
    /// one of a single frame at most its own bound, and every copy is delivered or counted.
    #[test]
    fn burst_makes_a_bounded_number_of_frames(
        ports in 2_u16..60,
        tsos in 0_u16..60,
        sent in prop::collection::vec(sent(), 1..64),
        mode in prop_oneof![3 => Just(Mode::Switch), 1 => Just(Mode::Cross)],
    ) {
        let mut rig = rig(mode, ports, tsos.min(ports));
        for port in 1..ports.min(30) {
            rig.fdb.add_static(mac(port as u8), 0, PortId(port), 0).unwrap();
        }
        let frames: Vec<_> = sent.iter().map(|(to, payload, mss)| {
            let dst = if *to == 100 { BROADCAST } else { mac(*to) };
            let payload = if *mss == 0 { (*payload).min(9000) } else { *payload };
            match mss {
                0 => plain(dst, payload, 0),
                mss => tso(dst, mac(0), payload, *mss),
            }
        }).collect();
        let mut lost = 0;
        let takes: Vec<_> = (0..usize::from(ports)).map(|p| rig.port(p).takes).collect();
        send_all(&mut rig, &frames, |rig, frames| {
            let (mut unicast, mut want, mut whole) = (0, 0, 0);
            for (bytes, hdr) in frames {
                let flood = mode == Mode::Switch
                    && rig.fdb.lookup(*bytes.first_chunk().unwrap(), 0, 1).is_none();
                let to = match (mode, flood) {
                    (Mode::Cross, _) => vec![1],
                    (_, true) => (1..usize::from(ports)).collect(),
                    _ => vec![usize::from(bytes[5])],
                };
                for port in to {
                    let made = match offload::needs_work(bytes, hdr, &takes[port]) {
                        true => offload::segments(hdr, bytes.len() as u32, 54),
                        false => 1,
                    };
                    want += made;
                    whole += usize::from(flood);
                    unicast += if !flood && hdr.gso_size == 0 { made } else { 0 };
                }
            }
            let got: usize = (1..usize::from(ports)).map(|port| rig.got(port).len()).sum();
            let dropped = rig.stats(0).drops_made_limit.get() - lost;
            lost += dropped;
            // Plain frames for one port are copied, not made. A flooded frame also goes unchanged
            // to all ports that accept it, besides the frames made for others.
            assert!(got <= unicast + MADE_MAX + usize::from(ports), "{got} frames in a burst");
            assert!(dropped == 0 && got == want || dropped > 0 && got < want);
            assert!(dropped as usize <= whole);
        });
        prop_assert_eq!(drops_of(&rig), lost);
    }
}
