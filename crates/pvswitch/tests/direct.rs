//! Frames from a real TAP, read directly into a guest's receive buffers where possible: each must
//! arrive once, complete and in order, for any layout of buffers.

#[path = "common/tap_guest.rs"]
mod tap_guest;

use std::sync::Arc;

use switch::forward::Mode;
use switch::tenant::{Rules, Security, Tenants};
use switch::vnet::{Offloads, VnetHdr};
use tap_guest::{KIND, Kind, World, plain, same, tso};
use uplink::Batching;

const BOTH: [Batching; 2] = [Batching::Auto, Batching::Plain];
/// The longest frame that the kernel forwards complete.
const LONGEST: usize = 65_535;

type Frames = Vec<(VnetHdr, Vec<u8>)>;

/// Sends `frames`, `n` at a time, with all buffers posted, and checks that each arrives unchanged.
/// Frames that exceed the guest's buffers are read privately.
fn pass(world: &mut World, frames: &Frames, n: usize) {
    for some in frames.chunks(n) {
        world.send(some);
        let mut found = Frames::new();
        for _ in 0..10_000 {
            world.guest.post(usize::MAX);
            world.round(true);
            found.extend(world.guest.take_received());
            if found.len() >= some.len() {
                break;
            }
        }
        check(some, &found);
    }
}

fn check(sent: &[(VnetHdr, Vec<u8>)], found: &[(VnetHdr, Vec<u8>)]) {
    assert_eq!(found.len(), sent.len());
    for (i, (sent, found)) in sent.iter().zip(found).enumerate() {
        let lens = (sent.1.len(), found.1.len());
        assert!(same(sent, found), "frame {i}: {:?} {:?} {lens:?}", sent.0, found.0);
    }
}

fn kinds() -> impl Iterator<Item = Kind> {
    // One buffer for header and frame, several, tiny ones, and one for the longest frame.
    let chains: [(&[u32], bool); 6] = [
        (&[1536], true),
        (&[4096], true),
        (&[12, 2048], true),
        (&[5, 5, 5, 600, 1000], true),
        (&[69_632], false),
        (&[12, 32_768, 32_800], false),
    ];
    chains.into_iter().flat_map(|(chain, mergeable)| {
        [false, true].map(|packed| {
            let mut kind = Kind { chain, mergeable, ..KIND };
            kind.features.packed = packed;
            kind
        })
    })
}

#[test]
fn port_with_rules_is_not_read_directly() {
    let locked = |last| {
        let security = Some(Security::new(&[[2, 0, 0, 0, 0, last]], None, false, false));
        Some(Arc::new(Rules { security, ..Rules::default() }))
    };
    for permitted in [true, false] {
        let Some(mut world) = World::new(KIND, Mode::Cross, Batching::Auto) else { return };
        let long: Frames = (0..20).map(|n| plain(9014, n)).collect();
        // After long frames, room for them is expected.
        pass(&mut world, &long, 20);
        pass(&mut world, &long, 1);
        let direct = world.seen.direct.get();
        assert!(direct > 0);
        // Frames come from address 1. Rules of the guest's port are about its own frames.
        let rules = if permitted { [None, locked(9)] } else { [locked(9), None] };
        world.forwarder.set_tenants(Tenants::new(rules.to_vec()));
        if permitted {
            pass(&mut world, &long, 20);
        } else {
            world.send(&long);
            world.guest.post(usize::MAX);
            while world.seen.drops_spoofed_mac.get() < 20 {
                world.round(true);
            }
            assert!(world.guest.take_received().is_empty());
        }
        assert_eq!(world.seen.direct.get(), direct);
        world.forwarder.set_tenants(None);
        pass(&mut world, &long, 20);
        pass(&mut world, &long, 1);
        assert!(world.seen.direct.get() > direct);
    }
}

#[test]
fn small_jumbo_and_gso_frames_arrive_as_they_were_sent() {
    for (n, kind) in kinds().enumerate() {
        let Some(mut world) = World::new(kind, Mode::Cross, BOTH[n % 2]) else { return };
        let large: Frames = (0..40).map(|n| tso(LONGEST - n as usize * 97, n)).collect();
        pass(&mut world, &large, 40);
        pass(&mut world, &large, 1);
        assert!(world.seen.direct.get() > 30, "{kind:?}: {}", world.seen.direct.get());
        // Room for large frames is still expected, so these take the same path again.
        let mixed = (0..200).map(|n| match n % 5 {
            0 => tso(LONGEST - n as usize, n),
            1 => plain(9014, n),
            2 => plain(60, n),
            3 => plain(1514, n),
            _ => tso(3000 + n as usize * 50, n),
        });
        pass(&mut world, &mixed.collect(), 9);
        let jumbo: Frames = (0..200).map(|n| plain(9014 - n as usize % 7, n)).collect();
        pass(&mut world, &jumbo, 20);
        let direct = world.seen.direct.get();
        assert!(direct > 150, "{kind:?}: {direct}");
        assert_eq!(world.seen.frames.get(), 480);
        assert_eq!(world.got.frames.get(), 480);
        let drops: u64 = (world.seen.all().chain(world.got.all()))
            .filter(|(name, _)| name.starts_with("drops_"))
            .map(|(_, n)| n)
            .sum();
        assert_eq!(drops, 0, "{kind:?}");
    }
}

#[test]
fn small_frames_alone_are_read_privately() {
    let Some(mut world) = World::new(KIND, Mode::Cross, Batching::Auto) else { return };
    pass(&mut world, &(0..300).map(|n| plain(60 + n as usize, n)).collect(), 100);
    assert_eq!((world.seen.frames.get(), world.seen.direct.get()), (300, 0));
}

#[test]
fn frame_with_too_few_buffers_is_held_and_not_truncated() {
    for mergeable in [true, false] {
        let chain: &[u32] = if mergeable { &[1536] } else { &[69_632] };
        let kind = Kind { chain, mergeable, ..KIND };
        let Some(mut world) = World::new(kind, Mode::Cross, Batching::Auto) else { return };
        let frames: Frames = (0..60).map(|n| tso(LONGEST - n as usize * 501, n)).collect();
        let mut found = Frames::new();
        let mut sent = frames.iter();
        // Fewer buffers than a frame needs; sometimes none, sometimes enough for several frames.
        for round in 0..20_000 {
            if round % 3 == 0 {
                world.guest.post([0, 1, 7, 43, 90][round / 3 % 5]);
            }
            if round % 4 == 0 {
                world.send(sent.next());
            }
            world.round(true);
            if round % 5 == 0 {
                found.extend(world.guest.take_received());
            }
            if found.len() == frames.len() {
                break;
            }
        }
        check(&frames, &found);
        assert!(world.seen.direct.get() > 0);
        assert!(world.seen.holds.get() > 0, "some were held");
    }
}

#[test]
fn frame_larger_than_any_buffer_is_dropped_and_counted() {
    let kind = Kind { chain: &[4096], mergeable: false, ..KIND };
    let Some(mut world) = World::new(kind, Mode::Cross, Batching::Auto) else { return };
    let mut sent: Frames = (0..10).map(|n| plain(4000, n)).collect();
    pass(&mut world, &sent, 10);
    sent.insert(5, plain(9000, 77));
    world.send(&sent);
    world.guest.post(usize::MAX);
    world.drain();
    sent.remove(5);
    check(&sent, &world.guest.take_received());
    assert_eq!(world.got.drops_too_long.get(), 1);
}

#[test]
fn guest_that_disconnects_under_traffic_loses_only_its_frames() {
    for unheard in [false, true] {
        let Some(mut world) = World::new(KIND, Mode::Cross, Batching::Auto) else { return };
        let frames: Frames = (0..40).map(|n| tso(LONGEST - n as usize, n)).collect();
        pass(&mut world, &frames, 2);
        world.guest.post(3);
        world.send(&frames);
        world.round(true);
        world.round(true);
        if unheard {
            world.leave_unnoticed();
        } else {
            world.leave();
        }
        let before = world.guest.take_received().len() as u64;
        for _ in 0..200 {
            world.round(true);
        }
        assert_eq!(world.guest.take_received().len(), 0, "it has disconnected");
        let lost = world.seen.drops_no_port.get()
            + world.got.drops_down.get()
            + world.got.drops_held_down.get();
        assert_eq!(before + lost, 40, "each was delivered or counted");
        world.come(Kind { chain: &[4096], ..KIND });
        pass(&mut world, &frames, 2);
    }
}

#[test]
fn guest_that_truncates_its_memory_loses_only_its_frames() {
    for batching in BOTH {
        let Some(mut world) = World::new(KIND, Mode::Cross, batching) else { return };
        let frames: Frames = (0..20).map(|n| tso(30_000, n)).collect();
        pass(&mut world, &frames, 2);
        world.guest.post(usize::MAX);
        world.send(&frames[..5]);
        // The ring stays mapped, the buffers are truncated.
        world.guest.file.set_len(0x1_0000).unwrap();
        world.round(true);
        // The kernel does not report the failed write; our first access finds it.
        assert!(world.guest.memory.is_lost());
        world.drain();
        world.leave();
        world.come(KIND);
        pass(&mut world, &frames, 2);
    }
}

#[test]
fn guest_with_fewer_offloads_gets_frames_that_need_no_others() {
    let none = Offloads::default();
    let tso4 = Offloads { csum: true, tso4: true, ..none };
    for (takes, longest) in [(none, 9014), (tso4, LONGEST)] {
        let kind = Kind { takes, chain: &[69_632], ..KIND };
        let Some(mut world) = World::new(kind, Mode::Cross, Batching::Auto) else { return };
        pass(&mut world, &(0..50).map(|n| plain(9014, n)).collect(), 10);
        world.send(&[tso(LONGEST, 1)]);
        world.guest.post(usize::MAX);
        world.drain();
        let found = world.guest.take_received();
        let payload: usize = found.iter().map(|(_, frame)| frame.len() - 54).sum();
        assert_eq!(payload, LONGEST - 54, "all of it, in {} frames", found.len());
        assert!(found.iter().all(|(hdr, frame)| takes.take(hdr) && frame.len() <= longest));
        assert!(world.seen.direct.get() > 40);
    }
}

#[test]
fn frames_queued_before_offloads_changed_are_segmented() {
    let Some(mut world) = World::new(KIND, Mode::Cross, Batching::Auto) else { return };
    let frames: Frames = (0..20).map(|n| tso(30_000, n)).collect();
    pass(&mut world, &frames, 2);
    world.send(&frames[..2]);
    world.leave();
    let none = Offloads::default();
    world.come(Kind { takes: none, ..KIND });
    let asks = uplink::request_offloads(&*world.tap.queues[0], &none).unwrap();
    world.set_offloads(asks);
    world.guest.post(usize::MAX);
    world.drain();
    let found = world.guest.take_received();
    assert!(found.iter().all(|(hdr, _)| hdr.is_plain()));
    let payload: usize = found.iter().map(|(_, frame)| frame.len() - 54).sum();
    assert_eq!(payload, 2 * (30_000 - 54));
    assert!(world.got.segmented.get() > 40, "in software, by the switch");
}

#[test]
fn learning_switch_and_capture_read_privately() {
    let frames: Frames = (0..20).map(|n| tso(30_000, n)).collect();
    let Some(mut world) = World::new(KIND, Mode::Switch, Batching::Auto) else { return };
    // A few at a time: these are flooded, and floods do not pause their sender.
    frames.chunks(4).for_each(|some| pass(&mut world, &some.to_vec(), 4));
    assert_eq!(world.seen.direct.get(), 0);
    for captured in [0, 1] {
        let Some(mut world) = World::new(KIND, Mode::Cross, Batching::Auto) else { return };
        pass(&mut world, &frames, 2);
        let direct = world.seen.direct.get();
        assert!(direct > 0);
        let (sink, source) = std::sync::mpsc::sync_channel(100);
        world.ports[captured].mirror.set(Some(sink));
        pass(&mut world, &frames, 2);
        assert_eq!(world.seen.direct.get(), direct);
        let seen: Vec<_> = source.try_iter().map(|c| c.bytes).collect();
        assert!(seen.iter().eq(frames.iter().map(|(_, bytes)| bytes)));
        world.ports[captured].mirror.set(None);
        pass(&mut world, &frames, 2);
        assert!(world.seen.direct.get() > direct);
    }
}
