mod peer;

use std::sync::atomic::Ordering;

use ::ring::xen::{Gso, Multicast, ctrl_type, gso_type, rx_flag, status, tx_flag};
use switch::poll::Policy;
use switch::time::Ns;
use switch::vnet::{DATA_VALID, GSO_TCPV4, GSO_TCPV6, NEEDS_CSUM, Offloads, VnetHdr};

use self::peer::{Ends, Peer, args, reach};
use super::*;
use crate::connect::{Connect, ConnectError, ConnectOptions, Link, connect};
use crate::guest::tests::steps;
use crate::guest::{Guest, WaitFor, now};
use crate::tx::SleepMode;

/// A frame of Ethernet, IPv4 and TCP, `len` bytes in all, with distinct bytes.
fn tcp(len: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
    frame[12..26].copy_from_slice(&[8, 0, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0]);
    frame
}

/// The same over IPv6.
fn tcp6(len: usize) -> Vec<u8> {
    let mut frame = tcp(len);
    frame[12..22].copy_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0, 0, 20, 6, 64]);
    frame
}

const TSO: VnetHdr = VnetHdr {
    flags: NEEDS_CSUM,
    gso_type: GSO_TCPV4,
    hdr_len: 0,
    gso_size: 1448,
    csum_start: 34,
    csum_offset: 16,
};
const TSO6: VnetHdr = VnetHdr { gso_type: GSO_TCPV6, csum_start: 54, ..TSO };
const GSO: Gso = Gso { size: 1448, kind: gso_type::TCPV4, features: 0 };
const GSO6: Gso = Gso { kind: gso_type::TCPV6, ..GSO };

/// Sends a frame with a header, as a TAP writes both into a buffer.
fn send(guest: &mut Guest, hdr: &VnetHdr, frame: &[u8]) -> bool {
    assert!(guest.pairs[0].tx.room(1).unwrap() > 0);
    let i = guest.pairs[0].tx.free().next().unwrap();
    let mut to = guest.pairs[0].tx.memory(i).next().unwrap();
    to.write(&hdr.bytes());
    to.write(&[0, 0]);
    to.write(frame);
    let sent = guest.pairs[0].tx.send(i, (HDR_LEN + frame.len()) as u32);
    guest.pairs[0].tx.publish(usize::from(sent), now());
    sent
}

/// Received frames, as (header, bytes).
fn receive(guest: &mut Guest) -> Vec<(VnetHdr, Vec<u8>)> {
    let mut all = Vec::new();
    let frames = guest.pairs[0].rx.receive(64, |segs| {
        let mut bytes = vec![0; segs.iter().map(|seg| seg.len() as usize).sum()];
        let mut at = 0;
        segs.iter().for_each(|seg| at += seg.read(&mut bytes[at..]));
        let frame = bytes.split_off(HDR_LEN);
        assert_eq!(bytes[10..], [1, 0], "num_buffers is 1");
        all.push((VnetHdr::parse(bytes.first_chunk().unwrap()), frame));
    });
    assert_eq!(frames.unwrap(), all.len());
    guest.pairs[0].rx.refill();
    all
}

#[test]
fn headers_are_sent_as_flags_and_extra_infos() {
    let peer = Peer::new("");
    for (options, sets) in [("", vec![]), (",split=off", vec!["offset=6"])] {
        let to = peer.to(options, Some(Policy::Event), "event", &sets);
        let mut guest = reach(&to);
        let valid = VnetHdr { flags: DATA_VALID, ..VnetHdr::NONE };
        let blank = VnetHdr { gso_type: 0, gso_size: 0, ..TSO };
        let both = tx_flag::CSUM_BLANK | tx_flag::DATA_VALIDATED;
        for (hdr, len, flags, gso) in [
            (VnetHdr::NONE, 60, 0, None),
            (valid, 1514, tx_flag::DATA_VALIDATED, None),
            (blank, 1514, both, None),
            (TSO, 65_000, both, Some(GSO)),
            (TSO6, 65_000, both, Some(GSO6)),
        ] {
            let frame = if hdr == TSO6 { tcp6(len) } else { tcp(len) };
            assert!(send(&mut guest, &hdr, &frame));
            peer.with(|ends| {
                let (packet, bytes) = ends.take().unwrap();
                assert_eq!((packet.flags & both, packet.gso), (flags, gso));
                assert!(bytes == frame, "{len} bytes");
                ends.answer(status::OKAY);
            });
            guest.pairs[0].tx.reclaim().unwrap();
            assert_eq!((guest.pairs[0].tx.in_flight(), guest.pairs[0].tx.ring.lost()), (0, 0));
        }
        send(&mut guest, &VnetHdr::NONE, &tcp(60));
        peer.with(|ends| (ends.take().unwrap(), ends.answer(status::ERROR)));
        guest.pairs[0].tx.reclaim().unwrap();
        assert_eq!((guest.pairs[0].tx.in_flight(), guest.pairs[0].tx.ring.lost()), (0, 1));
    }
}

#[test]
fn headers_are_made_from_flags_and_extra_infos() {
    let peer = Peer::new("");
    let mut guest = peer.guest("");
    peer.with(|ends| {
        ends.give(0, None, &tcp(60), 4096);
        ends.give(rx_flag::DATA_VALIDATED, None, &tcp(1514), 4096);
        ends.give(rx_flag::CSUM_BLANK | rx_flag::DATA_VALIDATED, None, &tcp(9000), 4096);
        // Headers may be split over pages.
        ends.give(rx_flag::CSUM_BLANK, Some(GSO), &tcp(3000), 20);
    });
    let got = receive(&mut guest);
    let valid = VnetHdr { flags: DATA_VALID, ..VnetHdr::NONE };
    let blank = VnetHdr { gso_type: 0, gso_size: 0, ..TSO };
    let hdrs: Vec<_> = got.iter().map(|(hdr, _)| *hdr).collect();
    assert_eq!(hdrs[..3], [VnetHdr::NONE, valid, blank]);
    assert!([60, 1514, 9000].iter().zip(&got).all(|(len, (_, frame))| *frame == tcp(*len)));
    // A packet may not have 150 pages.
    assert_eq!((hdrs.len(), guest.pairs[0].rx.ring.lost()), (3, 1));
    for (gso, frame, want) in [(GSO, tcp(300), TSO), (GSO6, tcp6(300), TSO6)] {
        peer.with(|ends| ends.give(rx_flag::CSUM_BLANK, Some(gso), &frame, 20));
        assert_eq!(receive(&mut guest), [(want, frame)]);
    }
    peer.with(|ends| assert_eq!(ends.rx.available(), Ok(256), "every page is offered again"));
}

#[test]
fn a_blank_checksum_in_a_frame_without_one_drops_the_packet_and_leaks_no_page() {
    let peer = Peer::new("");
    let mut guest = peer.guest("");
    let mut arp = tcp(60);
    arp[13] = 6;
    for round in 1..20 {
        peer.with(|ends| {
            for _ in 0..60 {
                ends.give(rx_flag::CSUM_BLANK, None, &arp, 4096);
            }
        });
        assert_eq!(receive(&mut guest), []);
        assert_eq!(guest.pairs[0].rx.ring.lost(), 60 * round);
        // The ring re-offers the pages although no frame arrived.
        peer.with(|ends| assert_eq!(ends.rx.available(), Ok(256)));
    }
}

#[test]
fn frames_that_need_missing_offloads_are_dropped_and_counted() {
    let peer = Peer::new("sg+gso-tcpv4");
    let mut guest = peer.guest("");
    assert_eq!(guest.link.tx_offloads(), Offloads { csum: true, ..Offloads::default() });
    assert_eq!(guest.pairs[0].tx.ring.longest(), 4096 - 12);
    assert!(!send(&mut guest, &TSO, &tcp(3000)));
    assert!(!send(&mut guest, &VnetHdr::NONE, &tcp(4085)));
    assert!(send(&mut guest, &VnetHdr::NONE, &tcp(4084)));
    assert_eq!(
        (
            guest.pairs[0].tx.counts.refused,
            guest.pairs[0].tx.counts.frames,
            guest.pairs[0].tx.in_flight()
        ),
        (2, 1, 1)
    );
    let peer = Peer::new("");
    let guest = peer.guest("");
    let takes = Offloads { csum: true, tso4: true, tso6: true, ..Offloads::default() };
    assert_eq!((guest.link.tx_offloads(), guest.pairs[0].tx.ring.longest()), (takes, 65_535));
    for (lacks, takes, refused, sent) in [
        ("gso-tcpv4", Offloads { tso4: false, ..takes }, TSO, TSO6),
        ("gso-tcpv6", Offloads { tso6: false, ..takes }, TSO6, TSO),
    ] {
        let peer = Peer::new(lacks);
        let mut guest = peer.guest("");
        assert_eq!(guest.link.tx_offloads(), takes, "{lacks}");
        let frame = |hdr| if hdr == TSO6 { tcp6(3000) } else { tcp(3000) };
        assert!(!send(&mut guest, &refused, &frame(refused)), "{lacks}");
        assert!(send(&mut guest, &sent, &frame(sent)), "{lacks}");
    }
}

#[test]
fn every_completion_wakes_a_blocked_sender() {
    let peer = Peer::new("");
    for completion in ["orphan", "before-tx", "timer:1000", "on-empty", "on-half-empty"] {
        let set = format!("tx-completion={completion}");
        let to = peer.to("", Some(Policy::Event), "event", &[&set]);
        let mut guest = reach(&to);
        // Each takes a slot; there is room only if the longest frame would fit.
        while guest.pairs[0].tx.room(1).unwrap() > 0 {
            send(&mut guest, &VnetHdr::NONE, &tcp(60));
        }
        let sent = guest.pairs[0].tx.in_flight();
        assert!((230..=256).contains(&sent), "{sent} are in flight");
        assert_eq!(peer.with(Ends::take_all), usize::from(sent));
        let mut called_at = None;
        for used in 1..=sent {
            if guest.pairs[0].tx.prepare_sleep(true).unwrap() == SleepMode::Awake
                || guest.pairs[0].tx.room(1).unwrap() > 0
            {
                break;
            }
            if peer.with(|ends| ends.answer(status::OKAY)) {
                called_at.get_or_insert(used);
            }
        }
        guest.pairs[0].tx.tick(now() + Ns::from_ms(2)).unwrap();
        assert!(guest.pairs[0].tx.room(1).unwrap() > 0, "{completion}");
        match completion {
            "on-empty" => assert_eq!(called_at, Some(sent)),
            // A new ring is armed for the first.
            "timer:1000" => assert!(called_at.is_none_or(|used| used == 1)),
            _ => assert!(called_at.is_some(), "{completion}"),
        }
    }
}

/// A sender and a switch that both sleep when they may, in random steps: whenever both do, a
/// deadline is set, or nothing is left to do.
fn check_no_lost_wakeup(peer: &Peer, kick: &str, completion: &str, seed: u64) {
    let what = format!("--kick {kick} tx-completion={completion} seed {seed}");
    let set = format!("tx-completion={completion}");
    let mut guest = reach(&peer.to("", None, kick, &[&set]));
    let mut next = steps(seed);
    const FRAMES: usize = 800;
    let (mut left, mut taken, mut switch_asleep) = (FRAMES, 0, false);
    let mut now = switch::time::Instant::from_ns(1);
    let mut rounds = 0;
    while taken < FRAMES {
        rounds += 1;
        assert!(rounds < 200_000, "{what}: the switch is not notified");
        now += Ns::from_us(next(3));
        let answers = next(60) as usize;
        peer.with(|ends| {
            switch_asleep &= !ends.tx_channel.ack();
            if !switch_asleep && next(2) == 0 {
                taken += ends.step(answers, &mut switch_asleep);
            }
        });
        guest.pairs[0].tx.tick(now).unwrap();
        let want = (next(64) as usize).min(left);
        let room = guest.pairs[0].tx.room(want).unwrap();
        for _ in 0..room {
            let i = guest.pairs[0].tx.free().next().unwrap();
            guest.pairs[0].tx.plain(i).write(&tcp(60));
            assert!(guest.pairs[0].tx.send(i, 72));
        }
        if room > 0 {
            guest.pairs[0].tx.publish(room, now);
            left -= room;
        }
        let blocked = want > 0 && room == 0;
        let retries = blocked && guest.pairs[0].tx.stop();
        if !blocked && left > 0
            || retries
            || guest.pairs[0].tx.prepare_sleep(blocked).unwrap() == SleepMode::Awake
        {
            continue;
        }
        // The guest sleeps: the switch continues until it sleeps, too, or has called.
        let called = peer.with(|ends| {
            switch_asleep &= !ends.tx_channel.ack();
            let mut called = guest.pairs[0].tx.ring.take_calls();
            while !called && !switch_asleep {
                taken += ends.answer_or_arm(&mut switch_asleep);
                called = guest.pairs[0].tx.ring.take_calls();
            }
            called
        });
        if !called {
            match guest.pairs[0].tx.deadline() {
                Some(at) => now = now.max(at),
                None => assert!(!blocked && taken == FRAMES, "{what}: both sleep"),
            }
        }
    }
    assert_eq!(left, 0, "{what}");
}

#[test]
fn nobody_sleeps_with_work_pending() {
    for kick in ["event", "timer:1000", "coalesce:50,4", "coalesce:50/pending"] {
        for completion in ["orphan", "before-tx", "timer:1000", "on-empty", "on-half-empty"] {
            // A new back end each time, because it limits the rate of connections.
            let peer = Peer::new("");
            (0..2).for_each(|seed| check_no_lost_wakeup(&peer, kick, completion, seed));
        }
    }
}

/// Sleeps as in a round, with the pair blocked or not; whether a notification ended the sleep.
fn sleeps_until_notified(guest: &mut Guest, blocked: bool, rx_blocked: bool) -> bool {
    const LONG: Ns = Ns::from_secs(20);
    let begun = now();
    guest.begin(begun).unwrap();
    (guest.pairs[0].blocked, guest.pairs[0].rx_blocked) = (blocked, rx_blocked);
    guest.end(begun);
    assert!(guest.wait(&WaitFor { until: Some(begun + LONG), ..WaitFor::default() }).unwrap());
    now() < begun + LONG / 2
}

#[test]
fn a_sleeper_is_called_for_frames_and_for_free_buffers() {
    for options in ["", ",split=off", ",smart-poll=on", ",smart-poll=on,split=off"] {
        let peer = Peer::new("");
        let mut guest = peer.guest(options);
        for round in 0..3 {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(30));
                    peer.with(|ends| ends.give(0, None, &tcp(60), 4096));
                });
                while receive(&mut guest).is_empty() {
                    assert!(sleeps_until_notified(&mut guest, false, false), "{options} {round}");
                }
            });
            while guest.pairs[0].tx.room(1).unwrap() > 0 {
                send(&mut guest, &VnetHdr::NONE, &tcp(60));
            }
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(30));
                    peer.with(|ends| {
                        ends.take_all();
                        // The other ring is served in between; its event may end the sleep.
                        ends.give(0, None, &tcp(60), 4096);
                        while ends.held > 0 {
                            ends.answer(status::OKAY);
                        }
                    });
                });
                while guest.pairs[0].tx.room(1).unwrap() == 0 {
                    // Received frames wait if their echoes need buffers.
                    let notified = sleeps_until_notified(&mut guest, true, round == 1);
                    assert!(notified, "{options} {round}");
                }
            });
            while receive(&mut guest).is_empty() {
                assert!(sleeps_until_notified(&mut guest, false, false), "{options} {round}");
            }
        }
    }
}

#[test]
fn smart_poll_needs_both_sides_and_suppresses_events() {
    let peer = Peer::new("");
    let to = peer.to(",smart-poll=on", None, "event", &[]);
    let mut guest = reach(&to);
    assert!(guest.link.features().contains(&"smart-poll"));
    assert_eq!(guest.settings.poll, Policy::Timer { hz: 1000 });
    while !guest.arm().unwrap() {}
    let events = (0..100).filter(|_| peer.with(|ends| ends.give(0, None, &tcp(60), 4096))).count();
    assert_eq!(events, 1, "the first event starts polling");
    assert!(!guest.arm().unwrap(), "the frames are found before a sleep");
    assert_eq!(receive(&mut guest).len() + receive(&mut guest).len(), 100);
    assert!(guest.arm().unwrap());
    assert!(peer.with(|ends| ends.give(0, None, &tcp(60), 4096)));
    // With one side only: events, with the policy for events.
    for (lacks, options) in [("smart-poll", ",smart-poll=on"), ("", "")] {
        let peer = Peer::new(lacks);
        let guest = reach(&peer.to(options, None, "event", &[]));
        assert!(!guest.link.features().contains(&"smart-poll"));
        assert_eq!(guest.settings.poll, Policy::ADAPTIVE);
        assert!(!peer.with(|ends| ends.smart));
    }
}

fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < end, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_closed_guest_frees_its_rings_for_the_next_one() {
    let peer = Peer::new("");
    for _ in 0..3 {
        let mut guest = peer.guest("");
        assert!(!guest.link.is_gone());
        assert!(peer.ends().is_some());
        drop(guest);
        assert!(peer.ends().is_none(), "the back end disconnected before the guest was dropped");
    }
}

#[test]
fn a_closed_back_end_is_gone_and_awaited() {
    let mut peer = Peer::new("");
    let mut guest = peer.guest("");
    peer.write_state("5");
    eventually("the link to end", || guest.link.is_gone());
    assert!(guest.link.is_gone(), "and stays gone");
    drop(guest);
    let mut guest = peer.guest("");
    assert!(!guest.link.is_gone());
    let dir = peer.dir.clone();
    peer.stop();
    drop(peer);
    eventually("the link to end", || guest.link.is_gone());
    drop(guest);
    // First there is no back end; later there is.
    let to = args(&format!("xen-local:{}", dir.display()), None, "event", &[]);
    let to = Connect::try_from(&to).unwrap();
    let error = connect(&to, None).err().unwrap();
    let ConnectError::Xen(error) = error else { panic!("{error}") };
    assert!(error.is_peer_absent(), "{error}");
    let later = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(150));
        Peer::at(dir, "")
    });
    let mut guest = reach(&to);
    let peer = later.join().unwrap();
    assert!(!guest.link.is_gone() && peer.ends().is_some());
}

#[test]
fn a_back_end_that_ignores_static_grants_is_used_without_them() {
    let peer = Peer::new("");
    let before = Instant::now();
    let mut guest = peer.guest(",static=on");
    assert!(before.elapsed() >= KEEP_MAX);
    let names = guest.link.features();
    assert!(names.contains(&"ctrl-ring") && !names.contains(&"static-grants"), "{names:?}");
    assert_eq!(guest.link.static_grants(), (0, 0));
    assert!(send(&mut guest, &VnetHdr::NONE, &tcp(100)));
    assert_eq!(peer.with(|ends| ends.take().unwrap().1), tcp(100));
    drop(guest);
    eventually("the back end to disconnect", || peer.ends().is_none());
    let peer = Peer::new("ctrl-ring");
    let mut guest = peer.guest(",static=on");
    assert!(!guest.link.features().contains(&"ctrl-ring"));
    assert!(send(&mut guest, &VnetHdr::NONE, &tcp(100)));
    assert_eq!(peer.with(|ends| ends.take().unwrap().1), tcp(100));
}

#[test]
fn a_restarted_back_end_gets_static_grants_again() {
    const GET: u16 = ctrl_type::GET_GREF_MAPPING_SIZE;
    const ADD: u16 = ctrl_type::ADD_GREF_MAPPING;
    const DEL: u16 = ctrl_type::DEL_GREF_MAPPING;
    let mut peer = Peer::new("");
    peer.raw.keeps.store(600, Ordering::Relaxed);
    let mut guest = peer.guest(",static=on");
    assert_eq!(guest.link.static_grants(), (600, 0));
    assert_eq!(peer.requests(), (vec![GET, ADD, ADD], 600));
    for keeps in [100, 700] {
        peer.raw.keeps.store(keeps, Ordering::Relaxed);
        peer.restart();
        eventually("the other to keep them", || {
            !guest.link.is_gone() && peer.requests().1 == keeps
        });
        assert_eq!(guest.link.static_grants().0, keeps as usize);
        let (requests, _) = peer.requests();
        let dels = requests.iter().take_while(|kind| **kind == DEL).count();
        assert!(
            dels > 0 && requests[dels] == GET && requests[dels + 1..].iter().all(|k| *k == ADD)
        );
    }
    assert!(send(&mut guest, &VnetHdr::NONE, &tcp(100)));
    assert_eq!(peer.with(|ends| ends.take().unwrap().1), tcp(100));
    assert_eq!(peer.raw.connects.load(Ordering::Relaxed), 3, "with the same rings");
}

const MDNS: [u8; 6] = [1, 0, 0x5e, 0, 0, 0xfb];
const ALL_NODES: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
const TWO_GROUPS: &str = ",multicast=01:00:5e:00:00:fb+33:33:00:00:00:01";

#[test]
fn the_multicast_list_is_sent_at_start_and_after_a_restart() {
    const TWO: [Multicast; 2] = [Multicast::Add(MDNS), Multicast::Add(ALL_NODES)];
    // With one event channel, and with smart poll, where answers may cause no event.
    for options in ["", ",split=off", ",smart-poll=on"] {
        let mut peer = Peer::new("");
        peer.raw.lists.store(64, Ordering::Relaxed);
        let mut guest = peer.guest(&format!("{TWO_GROUPS}{options}"));
        assert!(guest.link.features().contains(&"multicast"));
        assert_eq!(peer.raw.take_changes(), TWO);
        for _ in 0..2 {
            // After a frame that the previous back end did not answer.
            assert!(send(&mut guest, &VnetHdr::NONE, &tcp(100)));
            peer.restart();
            eventually("the connection", || peer.ends().is_some());
            peer.with(|ends| (ends.take_all(), ends.answer(status::OKAY)));
            let mut changes = Vec::new();
            eventually("the other to get the list", || {
                assert!(!guest.is_gone());
                changes.extend(peer.raw.take_changes());
                changes.len() >= 4
            });
            // The same xen-netback would list an address twice.
            let again = TWO.map(|add| match add {
                Multicast::Add(mac) | Multicast::Del(mac) => [Multicast::Del(mac), add],
            });
            assert_eq!(changes, again.concat());
            guest.pairs[0].tx.reclaim().unwrap();
            assert_eq!((guest.pairs[0].tx.in_flight(), guest.pairs[0].tx.ring.lost()), (0, 0));
        }
        assert_eq!(peer.raw.connects.load(Ordering::Relaxed), 3, "with the same rings");
        peer.with(|ends| ends.give(0, None, &tcp(60), 4096));
        assert_eq!(receive(&mut guest).len(), 1);
    }
}

#[test]
fn a_back_end_without_multicast_control_gets_no_list() {
    let peer = Peer::new("multicast-control");
    let mut guest = peer.guest(TWO_GROUPS);
    assert!(!guest.link.features().contains(&"multicast"));
    assert!(send(&mut guest, &VnetHdr::NONE, &tcp(100)));
    assert_eq!(peer.with(|ends| ends.take().unwrap().1), tcp(100), "the frame is the first packet");
}

#[test]
fn a_back_end_that_ignores_the_multicast_list_is_used() {
    let peer = Peer::new("");
    let before = Instant::now();
    let mut guest = peer.guest(TWO_GROUPS);
    assert!(before.elapsed() >= groups::ANSWER_MAX);
    assert!(send(&mut guest, &VnetHdr::NONE, &tcp(100)));
    peer.with(|ends| {
        assert_eq!(ends.take_all(), 3);
        (0..3).for_each(|_| _ = ends.answer(status::OKAY));
    });
    guest.pairs[0].tx.reclaim().unwrap();
    assert_eq!(guest.pairs[0].tx.in_flight(), 0);
}

#[test]
fn refused_multicast_groups_are_recorded() {
    let peer = Peer::new("");
    peer.raw.lists.store(1, Ordering::Relaxed);
    let mut guest = peer.guest(TWO_GROUPS);
    let Link::Xen(link) = &guest.link else { panic!("a vif") };
    assert_eq!(link.groups.refused, [ALL_NODES]);
    assert!(send(&mut guest, &VnetHdr::NONE, &tcp(100)));
    assert_eq!(peer.with(|ends| ends.take().unwrap().1), tcp(100));
    assert_eq!(guest.pairs[0].tx.ring.lost(), 0, "list changes are not lost frames");
}

#[test]
fn an_absent_back_end_is_awaited_and_named() {
    let dir = std::env::temp_dir().join(format!("pvs-vif-none-{}", std::process::id()));
    let _host = xen_local::Back::open(&dir, &os::Permissions::OWNER).unwrap();
    let to = args(&format!("xen-local:{}", dir.display()), None, "event", &[]);
    let error = connect(&Connect::try_from(&to).unwrap(), None).err().unwrap();
    let what = "its back end /local/domain/0/backend/vif/1/0 is in state Initialising";
    assert!(error.to_string().contains(what), "{error}");
    let ConnectError::Xen(error) = error else { panic!("{error}") };
    assert!(error.is_peer_absent());
}

#[test]
fn too_many_queues_create_no_ring_and_change_no_state() {
    let peer = Peer::new("");
    let mut to = peer.to("", None, "event", &[]);
    to.queues = 2;
    let end = Instant::now() + Duration::from_secs(20);
    for _ in 0..3 {
        // The back end may first have to write its offer.
        let error = connect(&to, Some(&|| Instant::now() < end)).err().unwrap();
        let ConnectError::Xen(error) = error else { panic!("{error}") };
        assert!(matches!(error, XenError::Queues { wanted: 2, has: 1 }), "{error}");
        assert!(!error.is_peer_absent() && error.to_string().contains("--queues 1"), "{error}");
    }
    let target = Target::parse(&peer.dir.display().to_string(), false).unwrap();
    let mut link = XenLink::begin(&target, 2, sizes(32, 1500, &to.settings)).unwrap();
    while link.within(Duration::from_millis(10)).is_err_and(|error| error.is_peer_absent()) {
        assert!(Instant::now() < end, "one queue is offered");
    }
    assert!(matches!(link.within(Duration::ZERO), Err(XenError::Queues { .. })));
    assert_eq!(peer.reads_state().as_deref(), Some("1"), "as created by its toolstack");
    drop(link);
    assert_eq!(peer.raw.connects.load(Ordering::Relaxed), 0);
    let guest = peer.guest("");
    assert_eq!(peer.raw.connects.load(Ordering::Relaxed), 1);
    drop(guest);
}

#[test]
fn a_vif_used_by_the_kernel_or_another_process_is_rejected() {
    let devices = std::env::temp_dir().join(format!("pvs-vifs-{}", std::process::id()));
    std::fs::create_dir_all(devices.join("vif-3")).unwrap();
    assert!(not_the_kernels(&devices, 3).is_ok(), "no driver uses it");
    std::os::unix::fs::symlink("../../drivers/vif", devices.join("vif-3/driver")).unwrap();
    let error = not_the_kernels(&devices, 3).unwrap_err();
    assert!(error.to_string().contains("echo vif-3 > /sys/bus/xen/drivers/vif/unbind"), "{error}");
    assert!(!error.is_peer_absent());
    std::fs::remove_dir_all(devices).unwrap();
    // A name of this process only: other tests may run at the same time.
    let devid = (std::process::id() % 60_000) as u16;
    let first = claim(devid).unwrap();
    let error = claim(devid).unwrap_err();
    assert!(error.to_string().contains("another pvswitch"), "{error}");
    drop(first);
    assert!(claim(devid).is_ok());
    let none = XenError::NoVif { devid: 2, have: vec![0, 1] };
    assert!(none.to_string().contains("no vif 2 (it has: 0, 1)"), "{none}");
}

#[test]
fn targets_are_parsed_and_errors_say_what_to_write() {
    let to = |connect: &str| Connect::try_from(&args(connect, None, "event", &[]));
    let target = |connect: &str| to(connect).unwrap().target.to_string();
    assert_eq!(target("xen-local:/tmp/a,split=off"), "xen-local:/tmp/a");
    assert_eq!(target("xen:3,smart-poll=on"), "xen:3");
    let plain = Target {
        vif: Vif::Device(7),
        split: true,
        smart_poll: false,
        statics: false,
        hash: false,
        multicast: vec![],
    };
    assert_eq!(Target::parse("7", true), Ok(plain.clone()), "options are off by default");
    let all =
        "7,split=off,smart-poll=on,static=on,hash=on,multicast=01:00:5e:00:00:FB+33:33:0:0:0:1";
    assert!(Target::parse(all, true).unwrap_err().contains("'33:33:0:0:0:1' is not a MAC address"));
    let all = "7,split=off,smart-poll=on,static=on,hash=on,multicast=01:00:5e:00:00:FB";
    let (split, on, multicast) = (false, true, vec![MDNS]);
    let set = Target { split, smart_poll: on, statics: on, hash: on, multicast, ..plain };
    assert_eq!(Target::parse(all, true), Ok(set));
    for (bad, hint) in [
        ("xn-local:/tmp/a", "unknown kind 'xn-local' (did you mean 'xen-local'?)"),
        ("xen-local:", "use xen-local:DIR"),
        ("xen:eth0", "'eth0' is not the number of a vif"),
        ("xen:65536", "not the number"),
        ("xen-local:/tmp/a,slpit=off", "unknown option 'slpit' (did you mean 'split'?)"),
        ("xen-local:/tmp/a,queues=2", "known: split, smart-poll, static, hash, multicast"),
        ("xen:0,multicast=", "'' is not a MAC address; use multicast=01:00:5e:00:00:fb+33"),
        ("xen:0,multicast=02:00:00:00:00:01", "'02:00:00:00:00:01' is not a multicast address"),
        ("xen:0,multicast=ff:ff:ff:ff:ff:ff", "is broadcast, which is always received; omit it"),
        ("xen:0,multicast=33:33:00:00:00:01+33:33:00:00:00:01", "is listed twice; list it once"),
        ("xen:0,split=no", "use split=on or split=off"),
        ("vhost-user:/tmp/a,mode=listen", "use vhost-user:SOCKET[,mode=client|server]"),
    ] {
        let error = to(bad).unwrap_err();
        assert!(error.contains(hint) && error.contains(bad), "{bad}: {error}");
    }
    let with = |sets: &[&str]| args("xen:0", None, "event", sets);
    for (args, hint) in [
        (ConnectOptions { packed: true, ..with(&[]) }, "--packed: not supported by Xen rings"),
        (ConnectOptions { queue_size: 19, ..with(&[]) }, "use 20 to 256"),
        (with(&["header=apart"]), "--set header=apart"),
        (with(&["checks=off"]), "--set checks=off"),
        (with(&["rx-buffer=2048"]), "--set rx-buffer"),
        (with(&["tx-full=queue:2"]), "--set tx-full=queue"),
    ] {
        let error = Connect::try_from(&args).unwrap_err();
        assert!(error.contains(hint), "{error}");
    }
}
