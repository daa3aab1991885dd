//! Announcements out of one port.

use super::*;
use crate::flow::be16;
use crate::tenant::{Rules, Tenants, Vlan};

#[test]
fn addresses_are_announced_with_the_tags_that_the_port_has() {
    let rig = Rig::new(Mode::Switch, 2, 1);
    let port: &Port = rig.table[1].as_ref().unwrap();
    let mac = |n| Mac(mac(n));
    let all = [(mac(1), 0), (mac(2), 5), (mac(3), 7), (mac(4), 9)];
    let trunk = Vlan::Trunk { vids: [5, 7].into_iter().collect(), native: Some(7) };
    for (carries, want) in [
        (Vlan::Transparent, &[(1, 0), (2, 5), (3, 7), (4, 9)][..]),
        (Vlan::Access(5), &[(2, 0)]),
        (trunk, &[(2, 5), (3, 0)]),
    ] {
        assert_eq!(port.announce(&all, &carries).unwrap(), 4);
        let got: Vec<(u8, u16)> = rig.got(1).iter().map(|frame| sender_and_tag(frame)).collect();
        assert_eq!(got, want, "{carries:?}");
    }
    assert!(rig.got(0).is_empty(), "nobody else hears of them");
}

/// The last byte of the announced address, and the tag.
fn sender_and_tag(frame: &[u8]) -> (u8, u16) {
    let tag = be16(frame, 14).filter(|_| frame[12..14] == [0x81, 0]).unwrap_or(0);
    let at = if tag > 0 { 16 } else { 12 };
    assert_eq!(
        ([0xff; 6], &frame[at..at + 2]),
        (frame[..6].try_into().unwrap(), &[0x80, 0x35][..])
    );
    (frame[11], tag)
}

#[test]
fn addresses_that_do_not_fit_are_left_and_a_port_that_is_down_takes_none() {
    let rig = Rig::new(Mode::Switch, 2, 1);
    let port: &Port = rig.table[1].as_ref().unwrap();
    let all: Vec<_> = (0..100).map(|n| (Mac([2, 0, 0, 0, 0, n]), u16::from(n % 2))).collect();
    rig.port(1).room = 3;
    // Every other one is in a VLAN that the port does not carry.
    let carries = Vlan::Access(1);
    assert_eq!(port.announce(&all, &carries).unwrap(), 7, "three, and those between");
    assert_eq!(port.announce(&all[7..], &carries).unwrap(), 0);
    rig.port(1).room = 1000;
    assert_eq!(port.announce(&all, &carries).unwrap(), BURST_MAX);
    assert_eq!(rig.got(1).len(), 3 + BURST_MAX / 2);
    port.set_active(0);
    assert_eq!(port.announce(&all, &carries).unwrap(), 0);
    port.set_active(1);
    rig.port(1).fault_after = 0;
    assert!(port.announce(&all, &carries).is_err());
}

/// A port with these VLANs announces an address of its guest to another one, which carries all.
fn announced(vlan: Vlan) -> Vec<u16> {
    let mut rig = Rig::new(Mode::Switch, 2, 1);
    let rules = Arc::new(Rules { vlan, ..Rules::default() });
    rig.forwarder.set_tenants(Tenants::new(vec![Some(rules), None]));
    let found = rig.forwarder.announce(&rig.sources[0], mac(1), rig.now);
    rig.found.merge(found);
    let got: Vec<_> = rig.got(1).iter().map(|frame| sender_and_tag(frame)).collect();
    assert_eq!(rig.stats(0).frames.get(), got.len() as u64, "as frames of its own");
    let vlans: Vec<u16> = got.iter().map(|(_, vlan)| *vlan).collect();
    for vlan in &vlans {
        assert_eq!(rig.fdb.lookup(mac(1), *vlan, 1), Some(PortId(0)), "frames reach it there");
    }
    vlans
}

#[test]
fn addresses_of_a_trunk_are_announced_in_each_of_its_vlans() {
    let trunk = |vids: &[u16], native| Vlan::Trunk { vids: vids.iter().copied().collect(), native };
    assert_eq!(announced(Vlan::Transparent), [0]);
    assert_eq!(announced(Vlan::Access(5)), [5]);
    assert_eq!(announced(trunk(&[5, 7], None)), [5, 7]);
    assert_eq!(announced(trunk(&[5, 7], Some(7))), [7, 5]);
}

#[test]
fn addresses_of_a_trunk_with_many_vlans_are_announced_in_some() {
    let mut rig = Rig::new(Mode::Switch, 2, 1);
    let vlan = Vlan::Trunk { vids: (1..4095).collect(), native: Some(4000) };
    let rules = Arc::new(Rules { vlan, ..Rules::default() });
    rig.forwarder.set_tenants(Tenants::new(vec![Some(rules), None]));
    let found = rig.forwarder.announce(&rig.sources[0], mac(1), rig.now);
    rig.found.merge(found);
    let got: Vec<_> = rig.got(1).iter().map(|frame| sender_and_tag(frame).1).collect();
    assert_eq!(got, std::iter::once(4000).chain(1..64).collect::<Vec<_>>());
}
