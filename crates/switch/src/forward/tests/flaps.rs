//! Addresses that flap: who is blocked, and for what.

use super::*;
use crate::fdb::FLAP_MOVES;
use crate::tenant::{Rules, Security, Tenants};

/// Guest 1 behind port 0 sends to all, and whatever is behind port 1 sends the same frame.
fn contest(rig: &mut Rig, times: u16) {
    for n in 0..u32::from(times) {
        rig.send(0, &[frame(BROADCAST, mac(1), n)]);
        rig.send(1, &[frame(BROADCAST, mac(1), n)]);
    }
}

fn flaps(rig: &mut Rig) -> Vec<(PortId, PortId)> {
    let events = std::mem::take(&mut rig.found.events).into_iter();
    let of = |event| match event {
        PortEvent::Flaps { port, flap, mac: Mac(address), .. } if address == mac(1) => {
            (port, flap.home)
        }
        other => panic!("{other:?}"),
    };
    events.map(of).collect()
}

fn counts(rig: &Rig, port: usize) -> [u64; 3] {
    let stats = rig.stats(port);
    [&stats.mac_moves, &stats.mac_flaps, &stats.drops_loop_guard].map(|counter| counter.get())
}

#[test]
fn flapping_address_is_reported_once_at_the_port_that_takes_it_and_nothing_is_dropped() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    contest(&mut rig, 50);
    assert_eq!(flaps(&mut rig), [(PortId(1), PortId(0))]);
    assert_eq!((counts(&rig, 0), counts(&rig, 1)), ([49, 0, 0], [50, 1, 0]));
    assert_eq!(rig.got(2).len(), 100);
}

#[test]
fn frames_of_another_worker_follow_an_address_that_moves_within_the_same_second() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    let (fdb, table) = (Arc::clone(&rig.fdb), Arc::new(rig.table.clone()));
    let mut other = Forwarder::new(Mode::Switch, 4, fdb, table, 7);
    for (n, home) in [0, 1, 0, 1].into_iter().enumerate() {
        rig.send(home, &[frame(BROADCAST, mac(9), 0)]);
        (0..3).for_each(|port| drop(rig.got(port)));
        let frames = [(frame(mac(9), mac(2), n as u32), VnetHdr::NONE)];
        let _ = other.forward(&rig.sources[2], &mut burst_of(&frames), rig.now);
        assert_eq!(serials(&rig.got(home)), [n as u32]);
        assert_eq!(rig.got(1 - home).len(), 0);
    }
}

#[test]
fn loop_guard_drops_frames_of_the_port_that_takes_it_and_none_of_its_home() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    for port in rig.table.iter().flatten() {
        port.set_loop_guard(60);
    }
    contest(&mut rig, 50);
    assert_eq!(flaps(&mut rig), [(PortId(1), PortId(0))]);
    let passed = u64::from(FLAP_MOVES);
    assert_eq!(counts(&rig, 1), [50, 1, 50 - passed]);
    assert_eq!(counts(&rig, 0)[2], 0);
    assert_eq!(rig.got(2).len() as u64, 50 + passed);
    // Frames for the address go to its home, and others of the same port pass.
    rig.send(1, &[frame(mac(1), mac(2), 1)]);
    rig.got(1);
    assert_eq!(serials(&rig.got(0)).last(), Some(&1));
    // It recovers by itself.
    rig.now += SECOND * 61;
    rig.send(1, &[frame(BROADCAST, mac(1), 7)]);
    assert_eq!(serials(&rig.got(2)), [7]);
    assert_eq!(counts(&rig, 1)[2], 50 - passed);
}

#[test]
fn locked_address_stays_at_its_owner_and_a_forger_is_dropped_if_asked() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    let locks = |mac| Rules {
        security: Some(Security::new(&[mac], None, false, false)),
        ..Rules::default()
    };
    let rules = vec![Some(Arc::new(locks(mac(1)))), None, Some(Arc::new(locks(mac(3))))];
    rig.forwarder.set_tenants(Tenants::new(rules));
    // The forger is first; the owner takes the address with its first frame.
    rig.send(1, &[frame(BROADCAST, mac(1), 0)]);
    contest(&mut rig, 20);
    rig.got(0);
    rig.send(2, &[frame(mac(1), mac(3), 1)]);
    assert_eq!((serials(&rig.got(0)), counts(&rig, 1)[2]), (vec![1], 0));
    assert_eq!(flaps(&mut rig), [(PortId(1), PortId(0))]);
    rig.table[1].as_ref().unwrap().set_loop_guard(1);
    rig.got(2);
    contest(&mut rig, 20);
    assert_eq!((rig.got(2).len(), counts(&rig, 1)[2]), (20, 20));
    assert_eq!(counts(&rig, 0), [1, 0, 0]);
}

#[test]
fn every_frame_from_an_address_that_stays_elsewhere_is_counted() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    rig.fdb.add_static(mac(1), 0, PortId(0), 0).unwrap();
    rig.send(0, &[frame(BROADCAST, mac(1), 0)]);
    let rules =
        Rules { security: Some(Security::new(&[mac(2)], None, false, false)), ..Rules::default() };
    rig.forwarder.set_tenants(Tenants::new(vec![Some(Arc::new(rules)), None, None]));
    rig.send(0, &[frame(BROADCAST, mac(2), 0)]);
    let count = |rig: &Rig, port: usize| rig.stats(port).mac_elsewhere.get();
    for (turn, forged) in [mac(1), mac(2)].into_iter().enumerate() {
        // In a row, one at a time, and between frames from its own address.
        rig.send(1, &[1, 2, 3].map(|n| frame(BROADCAST, forged, n)));
        rig.send(1, &[mac(9), forged, mac(9), forged].map(|src| frame(BROADCAST, src, 4)));
        rig.now += SECOND;
        rig.send(1, &[frame(BROADCAST, forged, 5)]);
        assert_eq!(count(&rig, 1), 6 * (turn as u64 + 1));
    }
    // The owner's own frames are not.
    assert_eq!((count(&rig, 0), rig.got(2).len()), (0, 2 + 16));
    assert!(rig.fdb.remove(mac(1), 0));
    rig.send(1, &[frame(BROADCAST, mac(1), 6)]);
    assert_eq!(count(&rig, 1), 12, "it is learned now");
}

#[test]
fn reports_are_limited_by_the_log_lines_of_the_port_that_takes_addresses() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    let port = Arc::clone(rig.table[1].as_ref().unwrap());
    while port.account.log_lines.spend(rig.now) {}
    contest(&mut rig, 50);
    assert!(flaps(&mut rig).is_empty());
    assert_eq!(counts(&rig, 1)[1], 1, "counted nevertheless");
}

/// These ports are bridged: what leaves by one comes back by the others. Returns the number of
/// turns until nothing comes back, up to 1000.
fn turn_loop(rig: &mut Rig, ports: &[usize]) -> usize {
    for turn in 0..1000 {
        let left: Vec<_> = ports.iter().map(|port| rig.got(*port)).collect();
        let all: usize = left.iter().map(Vec::len).sum();
        if all == 0 {
            return turn;
        }
        // It multiplies, in a loop through more than two.
        if all > 500 {
            break;
        }
        for (out, frames) in ports.iter().zip(left) {
            for port in ports.iter().filter(|port| *port != out) {
                frames.iter().for_each(|frame| rig.send(*port, std::slice::from_ref(frame)));
            }
        }
    }
    1000
}

#[test]
fn broadcast_in_a_loop_ends_with_the_guard_and_circulates_without() {
    for ports in [&[1, 2][..], &[1, 2, 3], &[1, 2, 3, 4, 5]] {
        for (guarded, behind) in [(false, false), (true, false), (true, true)] {
            let mut rig = Rig::new(Mode::Switch, 7, 1);
            for port in ports.iter().filter(|_| guarded) {
                rig.table[*port].as_ref().unwrap().set_loop_guard(60);
            }
            // From a guest at port 0, or a host in the loop, whose frame enters by all.
            let enters = if behind { ports } else { &[0] };
            let send = |rig: &mut Rig, n| {
                enters.iter().for_each(|port| rig.send(*port, &[frame(BROADCAST, mac(1), n)]));
            };
            send(&mut rig, 0);
            let turns = turn_loop(&mut rig, ports);
            let what = format!("{ports:?} {guarded} {behind}: {turns}");
            assert_eq!(turns < 2 * usize::from(FLAP_MOVES), guarded, "{what}");
            if !guarded {
                continue;
            }
            // From now on it goes into the loop once by each port but one, or as often as it comes
            // back at its home, once; and to everybody else once.
            rig.got(0);
            rig.got(6);
            send(&mut rig, 1);
            let copies: usize = ports.iter().map(|port| rig.port(*port).got.len()).sum();
            assert_eq!(copies, ports.len() - 1 - usize::from(behind), "{what}");
            assert_eq!(turn_loop(&mut rig, ports), usize::from(copies > 0), "{what}");
            assert_eq!(rig.got(0).len(), usize::from(behind), "{what}");
            assert_eq!(serials(&rig.got(6)), [1], "{what}");
            // A sender that repeats itself is heard again.
            rig.now += Ns::from_ms(200);
            send(&mut rig, 1);
            turn_loop(&mut rig, ports);
            assert_eq!(serials(&rig.got(6)), [1], "{what}");
            // Without the guard, though the address is still blocked.
            for port in ports {
                rig.table[*port].as_ref().unwrap().set_loop_guard(0);
            }
            send(&mut rig, 2);
            assert_eq!(turn_loop(&mut rig, ports), 1000, "{what}");
        }
    }
}

#[test]
fn many_frames_in_a_loop_of_three_ports_all_end() {
    let ports = [1, 2, 3];
    let mut rig = Rig::new(Mode::Switch, 5, 1);
    ports.iter().for_each(|port| rig.table[*port].as_ref().unwrap().set_loop_guard(60));
    // A host in the loop: each frame enters by all ports.
    let send = |rig: &mut Rig, n| {
        ports.iter().for_each(|port| rig.send(*port, &[frame(BROADCAST, mac(1), n)]));
    };
    send(&mut rig, 0);
    assert!(turn_loop(&mut rig, &ports) < 1000);
    rig.now += Ns::from_ms(200);
    rig.got(4);
    let dropped = |rig: &Rig| ports.iter().map(|port| counts(rig, *port)[2]).sum::<u64>();
    // As many as are remembered, and more.
    let most = crate::forward::flood::FRAMES as u32;
    for n in 0..most + 50 {
        send(&mut rig, n);
    }
    assert_eq!(serials(&rig.got(4)), (0..most).collect::<Vec<_>>());
    let before = dropped(&rig);
    let copies: usize = ports.iter().map(|port| rig.port(*port).got.len()).sum();
    assert_eq!(copies as u32, most, "each leaves by one port");
    for (port, others) in [(1, [2, 3]), (2, [1, 3]), (3, [1, 2])] {
        for frame in rig.got(port) {
            others.iter().for_each(|other| rig.send(*other, std::slice::from_ref(&frame)));
        }
    }
    let after = dropped(&rig);
    assert_eq!(after - before, 2 * u64::from(most), "none is flooded again");
    assert!(rig.got(4).is_empty());
    // Another port's frames, and later ones, are not affected.
    rig.now += Ns::from_ms(200);
    send(&mut rig, 1000);
    assert_eq!(serials(&rig.got(4)), [1000]);
}
