//! Copies for mirror ports.

use super::*;
use crate::tenant::{Rules, Tenants, Vlan};

/// Ports 0 and 1 are guests whose addresses are known; port 2 is the mirror port of port 0.
fn rig(ingress: bool, egress: bool) -> Rig {
    let mut rig = Rig::new(Mode::Switch, 4, 1);
    rig.send(0, &[frame(BROADCAST, mac(1), 0)]);
    rig.send(1, &[frame(BROADCAST, mac(2), 0)]);
    mirror(&rig, Some(Span { to: PortId(2), ingress, egress }));
    (0..4).for_each(|port| drop(rig.got(port)));
    rig
}

fn mirror(rig: &Rig, span: Option<Span>) {
    rig.table[0].as_ref().unwrap().set_span(span);
    rig.table[2].as_ref().unwrap().set_reserved(span.is_some());
}

fn both(rig: &mut Rig) {
    rig.send(0, &[frame(mac(2), mac(1), 1), frame(mac(2), mac(1), 2)]);
    rig.send(1, &[frame(mac(1), mac(2), 3)]);
}

#[test]
fn every_frame_of_each_chosen_direction_is_copied_once_and_delivered() {
    for (ingress, egress, want) in
        [(true, true, &[1, 2, 3][..]), (true, false, &[1, 2]), (false, true, &[3])]
    {
        let mut rig = rig(ingress, egress);
        both(&mut rig);
        assert_eq!(serials(&rig.got(2)), want);
        assert_eq!((serials(&rig.got(1)), serials(&rig.got(0))), (vec![1, 2], vec![3]));
        assert_eq!(rig.egress(2).stats.mirrored.get(), want.len() as u64);
        mirror(&rig, None);
        both(&mut rig);
        assert!(rig.got(2).is_empty());
    }
}

#[test]
fn mirror_port_gets_nothing_else_and_may_send_nothing() {
    let mut rig = rig(true, true);
    // A flood from elsewhere, and one of the mirrored port.
    rig.send(1, &[frame(BROADCAST, mac(2), 1)]);
    rig.send(0, &[frame(BROADCAST, mac(1), 2)]);
    assert_eq!(serials(&rig.got(2)), [1, 2], "out of the switch to port 0, and in from it");
    rig.got(0);
    rig.got(1);
    rig.send(2, &[frame(mac(1), mac(9), 3), frame(BROADCAST, mac(9), 4)]);
    assert_eq!(rig.stats(2).drops_mirror_port.get(), 2);
    assert!(rig.got(0).is_empty() && rig.got(1).is_empty() && rig.got(2).is_empty());
    // A static address of it.
    rig.fdb.add_static(mac(9), 0, PortId(2), 0).unwrap();
    rig.send(1, &[frame(mac(9), mac(2), 5)]);
    assert_eq!((rig.got(2).len(), rig.stats(1).drops_mirror_port.get()), (0, 1));
}

#[test]
fn full_or_absent_mirror_port_loses_copies_and_no_frame() {
    let mut rig = rig(true, true);
    rig.port(2).room = 1;
    both(&mut rig);
    assert_eq!(serials(&rig.got(2)), [1]);
    assert_eq!(rig.egress(2).stats.drops_mirror.get(), 2);
    assert_eq!((rig.got(1).len(), rig.got(0).len(), rig.held(2)), (2, 1, 0));
    assert_eq!(rig.budget(0), BURST_MAX, "nobody waits for it");
    rig.table[2].as_ref().unwrap().set_active(0);
    both(&mut rig);
    assert_eq!((rig.got(1).len(), rig.got(0).len()), (2, 1));
    assert_eq!(rig.egress(2).stats.drops_down.get(), 3);
    let mut table = rig.table.clone();
    table[2] = None;
    rig.forwarder.set_table(Arc::new(table));
    both(&mut rig);
    assert_eq!((rig.got(1).len(), rig.got(0).len()), (2, 1));
}

#[test]
fn copies_of_a_burst_are_bounded_and_those_beyond_are_counted() {
    let mut rig = rig(true, false);
    let long: Vec<_> = (0..32).map(|n| (tso(mac(2), mac(1), 60_000, 1448).0, n)).collect();
    rig.send_all(0, long.into_iter().map(|(bytes, _)| (bytes, VnetHdr::NONE)).collect());
    let (got, lost) = (rig.got(2).len(), rig.egress(2).stats.drops_mirror.get());
    assert_eq!((got, lost), ((1 << 20) / 60_054, 32 - (1 << 20) / 60_054));
    assert_eq!(rig.got(1).len(), 32);
}

#[test]
fn held_frames_are_copied_when_they_are_delivered() {
    let mut rig = rig(false, true);
    rig.port(0).room = 0;
    rig.send(1, &[frame(mac(1), mac(2), 1)]);
    assert!(rig.got(2).is_empty() && rig.held(0) == 1);
    rig.port(0).room = ENDLESS;
    rig.retry();
    assert_eq!((serials(&rig.got(0)), serials(&rig.got(2))), (vec![1], vec![1]));
}

#[test]
fn copies_have_the_tags_that_the_mirrored_ports_peer_sent_or_gets() {
    let mut rig = Rig::new(Mode::Switch, 3, 1);
    let rules = |vlan| Some(Arc::new(Rules { vlan, ..Rules::default() }));
    let trunk = Vlan::Trunk { vids: [7].into_iter().collect(), native: None };
    rig.forwarder.set_tenants(Tenants::new(vec![rules(trunk), rules(Vlan::Access(7)), None]));
    mirror(&rig, Some(Span { to: PortId(2), ingress: true, egress: true }));
    let from_trunk = tagged(mac(2), mac(1), Some(7), 0, 1);
    rig.send(0, std::slice::from_ref(&from_trunk));
    rig.send(1, &[tagged(mac(1), mac(2), None, 0, 2)]);
    let got = rig.got(2);
    assert_eq!(got[0], from_trunk);
    assert_eq!(got[1], tagged(mac(1), mac(2), Some(7), 0, 2));
}

#[test]
fn frame_with_offloads_is_copied_as_the_mirror_port_takes_it() {
    let mut rig = rig(true, false);
    rig.port(2).takes = Offloads::default();
    rig.send_all(0, vec![tso(mac(2), mac(1), 3000, 1448)]);
    assert_eq!((rig.got(1).len(), rig.got(2).len()), (1, 3));
}
