//! Floods while ports come and go.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::*;

#[test]
fn copies_are_those_made_while_a_port_goes_up_and_down() {
    const BURSTS: u32 = 500;
    const CHANGES: u32 = 50;
    let mut rig = Rig::new(Mode::Switch, 4, 1);
    let port = Arc::clone(rig.table[2].as_ref().unwrap());
    let (ended, changes) = (AtomicBool::new(false), AtomicU32::new(0));
    let (mut bursts, mut delivered) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                port.set_active(0);
                port.set_active(1);
                changes.fetch_add(1, Ordering::Relaxed);
            }
        });
        // Some of them amid a burst, on any machine.
        while bursts < BURSTS || changes.load(Ordering::Relaxed) < CHANGES {
            rig.send(
                0,
                &(0..BURST_MAX as u32).map(|n| frame(BROADCAST, mac(0), n)).collect::<Vec<_>>(),
            );
            delivered += (1..4).map(|port| rig.got(port).len() as u64).sum::<u64>();
            bursts += 1;
        }
        ended.store(true, Ordering::Relaxed);
    });
    let frames = u64::from(bursts) * BURST_MAX as u64;
    let dropped: u64 =
        drops(rig.stats(0)) + (1..4).map(|port| egress_drops(&rig, port)).sum::<u64>();
    assert_eq!(frames + rig.stats(0).copies.get(), delivered + dropped);
}
