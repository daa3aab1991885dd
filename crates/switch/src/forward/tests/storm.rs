//! Limits of flooded frames.

use super::*;
use crate::account::{Limit, RateLimits};

const GROUP: [u8; 6] = [1, 0, 0x5e, 0, 0, 7];

fn frames(per_second: u64, burst: u64) -> RateLimits {
    RateLimits { bits: None, frames: Some(Limit { per_second, burst }) }
}

fn rig() -> Rig {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    rig.send(1, &[frame(BROADCAST, mac(2), 0)]);
    rig.got(0);
    rig.got(2);
    rig
}

/// Sends as many frames to each kind of destination, from port 0; returns how many port 1 got of
/// each: all, a group, an unknown address, its own.
fn send(rig: &mut Rig, each: u32) -> [usize; 4] {
    [BROADCAST, GROUP, mac(9), mac(2)].map(|to| {
        let all: Vec<_> = (0..each).map(|n| frame(to, mac(1), n)).collect();
        rig.send(0, &all);
        rig.got(1).len()
    })
}

fn drops(rig: &Rig) -> [u64; 3] {
    let stats = rig.stats(0);
    let kinds =
        [&stats.drops_storm_broadcast, &stats.drops_storm_multicast, &stats.drops_storm_unknown];
    kinds.map(|counter| counter.get())
}

#[test]
fn each_kind_of_flood_has_its_limit_and_its_counter_and_known_addresses_have_none() {
    let mut rig = rig();
    let (broadcast, multicast, unknown) = (frames(10, 2), frames(10, 4), frames(10, 8));
    let port = Arc::clone(rig.table[0].as_ref().unwrap());
    port.set_storm(StormLimits { broadcast, multicast, unknown });
    assert_eq!((send(&mut rig, 20), drops(&rig)), ([2, 4, 8, 20], [18, 16, 12]));
    rig.now += Ns::from_ms(100);
    assert_eq!(send(&mut rig, 20), [1, 1, 1, 20]);
    // Another port has no limit.
    rig.send(1, &(0..20).map(|n| frame(BROADCAST, mac(2), n)).collect::<Vec<_>>());
    assert_eq!(rig.got(0).len(), 20);
    port.set_storm(StormLimits { unknown: frames(10, 1), ..StormLimits::default() });
    assert_eq!(send(&mut rig, 20), [20, 20, 1, 20]);
    port.set_storm(StormLimits::default());
    assert_eq!(send(&mut rig, 20), [20; 4]);
}

#[test]
fn dropped_floods_are_not_charged_as_copies_and_those_left_for_later_are_charged_once() {
    let mut rig = rig();
    let port = Arc::clone(rig.table[0].as_ref().unwrap());
    port.set_storm(StormLimits { broadcast: frames(10, 2), ..StormLimits::default() });
    let copies = port.account.flood_copies.spent();
    rig.send(0, &(0..9).map(|n| frame(BROADCAST, mac(1), n)).collect::<Vec<_>>());
    assert_eq!(port.account.flood_copies.spent() - copies, 2, "one of each frame is free");
    // Frames of 64 KiB: the burst ends before its bound of flooded bytes.
    port.set_storm(StormLimits { broadcast: frames(10, 60), ..StormLimits::default() });
    let long = (0..12).map(|n| [frame(BROADCAST, mac(1), n), vec![0; 60_000]].concat());
    let long: Vec<_> = long.collect();
    let mut burst = Burst::default();
    for (i, bytes) in long.iter().enumerate() {
        burst.segs.push(Seg::of(bytes));
        burst.push_at(i, 1, bytes.len() as u32, VnetHdr::NONE);
    }
    rig.forward(0, &mut burst);
    let taken = 12 - burst.left();
    assert!(burst.left() > 0, "the burst was cut");
    let left = (0..60).filter(|_| port.account.storm[0].admit(1, 60, rig.now)).count();
    assert_eq!(left, 60 - taken);
}
