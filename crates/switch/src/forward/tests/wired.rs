//! Ports that are wired to each other.

use super::*;
use crate::tenant::{Rules, Security, Tenants};

/// A switch with ports 0, 1 and 2, and 3 wired to 4.
fn rig(mode: Mode) -> Rig {
    let rig = Rig::new(mode, 5, 1);
    for (port, to) in [(3, 4), (4, 3)] {
        rig.table[port].as_ref().unwrap().wire(Some(PortId(to)));
    }
    rig
}

/// Number of frames that each port got.
fn got(rig: &Rig) -> Vec<usize> {
    (0..5).map(|port| rig.got(port).len()).collect()
}

#[test]
fn wired_ports_exchange_all_frames_and_take_no_part_in_the_switch() {
    let mut rig = rig(Mode::Switch);
    // The same addresses on both sides, in both directions: nothing is learned.
    for to in [BROADCAST, mac(1), mac(2), mac(9)] {
        rig.send(3, &[frame(to, mac(1), 0)]);
        assert_eq!(got(&rig), [0, 0, 0, 0, 1], "{to:?}");
        rig.send(4, &[frame(to, mac(1), 0), frame(to, mac(2), 1)]);
        assert_eq!(got(&rig), [0, 0, 0, 2, 0], "{to:?}");
    }
    assert_eq!(rig.fdb.learned(), 0);
    // Floods of others do not reach them.
    rig.send(0, &[frame(BROADCAST, mac(1), 0), frame(mac(7), mac(1), 1)]);
    assert_eq!(got(&rig), [0, 2, 2, 0, 0]);
    rig.send(1, &[frame(mac(1), mac(2), 0)]);
    assert_eq!(got(&rig), [1, 0, 0, 0, 0]);
}

#[test]
fn static_address_does_not_lead_to_a_wired_port() {
    let mut rig = rig(Mode::Switch);
    rig.fdb.add_static(mac(7), 0, PortId(3), 0).unwrap();
    rig.send(0, &[frame(mac(7), mac(1), 0)]);
    assert_eq!(got(&rig), [0, 1, 1, 0, 0]);
}

#[test]
fn port_without_its_partner_keeps_its_frames_from_all_others() {
    for mode in [Mode::Switch, Mode::Cross] {
        let mut rig = Rig::new(mode, 5, 1);
        let port = |rig: &Rig, at: usize| Arc::clone(rig.table[at].as_ref().unwrap());
        port(&rig, 3).wire(None);
        assert!(port(&rig, 3).is_wired() && port(&rig, 3).wired_to().is_none());
        rig.send(3, &[frame(BROADCAST, mac(1), 0)]);
        // One that is not wired back is not its partner.
        port(&rig, 3).wire(Some(PortId(4)));
        rig.send(3, &[frame(BROADCAST, mac(1), 0)]);
        port(&rig, 4).wire(Some(PortId(2)));
        rig.send(3, &[frame(BROADCAST, mac(1), 0)]);
        assert_eq!(got(&rig), [0; 5], "{mode:?}");
        assert_eq!(rig.stats(3).drops_no_port.get(), 3);
        port(&rig, 4).wire(Some(PortId(3)));
        port(&rig, 4).set_active(0);
        rig.send(3, &[frame(BROADCAST, mac(1), 0)]);
        assert_eq!((got(&rig), rig.stats(3).drops_no_port.get()), (vec![0; 5], 4));
    }
}

#[test]
fn cross_connect_skips_wired_ports() {
    let mut rig = rig(Mode::Cross);
    rig.send(0, &[frame(mac(2), mac(1), 0)]);
    assert_eq!(got(&rig), [0, 1, 0, 0, 0]);
    // The partner of port 2 by its number is wired to another.
    rig.send(2, &[frame(mac(2), mac(1), 0)]);
    assert_eq!((got(&rig), rig.stats(2).drops_no_port.get()), (vec![0; 5], 1));
    rig.send(3, &[frame(mac(2), mac(1), 0)]);
    rig.send(4, &[frame(mac(2), mac(1), 0)]);
    assert_eq!(got(&rig), [0, 0, 0, 1, 1]);
}

#[test]
fn rules_of_a_wired_port_apply() {
    let mut rig = rig(Mode::Switch);
    let security = Some(Security::new(&[mac(1)], None, false, false));
    let rules = Arc::new(Rules { security, ..Rules::default() });
    rig.forwarder.set_tenants(Tenants::new(vec![None, None, None, Some(rules)]));
    rig.send(3, &[frame(mac(9), mac(1), 0), frame(mac(9), mac(2), 1)]);
    assert_eq!(got(&rig), [0, 0, 0, 0, 1]);
    assert_eq!(rig.stats(3).drops_spoofed_mac.get(), 1);
    rig.send(4, &[frame(mac(1), mac(2), 0)]);
    assert_eq!(got(&rig), [0, 0, 0, 1, 0]);
}
