//! Rules of ports: sources that are never forwarded, port security, isolation, VLANs.

use super::*;
use crate::tenant::{Rules, Security, Tenants, Vlan};

fn access(vid: u16) -> Option<Rules> {
    Some(Rules { vlan: Vlan::Access(vid), ..Rules::default() })
}

fn trunk(vids: &[u16], native: Option<u16>) -> Option<Rules> {
    let vlan = Vlan::Trunk { vids: vids.iter().copied().collect(), native };
    Some(Rules { vlan, ..Rules::default() })
}

fn isolated() -> Option<Rules> {
    Some(Rules { isolated: true, ..Rules::default() })
}

fn locked(n: u8) -> Option<Rules> {
    let security = Some(Security::new(&[mac(n)], None, false, false));
    Some(Rules { security, ..Rules::default() })
}

fn rig(mode: Mode, rules: Vec<Option<Rules>>) -> Rig {
    let mut rig = Rig::new(mode, rules.len() as u16, 1);
    let rules = rules.into_iter().map(|rules| rules.map(Arc::new)).collect();
    rig.forwarder.set_tenants(Tenants::new(rules));
    rig
}

/// VLAN of the outermost tag of each frame that a port got; 0: untagged.
fn vids(rig: &Rig, port: usize) -> Vec<u16> {
    rig.got(port).iter().map(|frame| flow::vlan_id(frame)).collect()
}

#[test]
fn group_and_zero_source_addresses_are_always_dropped() {
    for rules in [None, locked(1)] {
        let mut rig = rig(Mode::Switch, vec![None, rules.clone(), None]);
        let port = usize::from(rules.is_some());
        for src in [[1, 0, 0x5e, 0, 0, 1], BROADCAST, [0; 6]] {
            rig.send(port, &[frame(mac(9), src, 1), frame(BROADCAST, src, 2)]);
        }
        assert!(rig.got(2).is_empty());
        let stats = rig.stats(port);
        assert_eq!(stats.drops_bad_source.get() + stats.drops_spoofed_mac.get(), 6);
        assert_eq!(rig.fdb.entries(1).len(), 0);
        rig.send(port, &[frame(BROADCAST, mac(1), 3)]);
        assert_eq!(serials(&rig.got(2)), [3]);
    }
}

#[test]
fn spoofed_address_is_neither_learned_nor_forwarded() {
    let mut rig = rig(Mode::Switch, vec![None, None, locked(2)]);
    rig.send(0, &[frame(BROADCAST, mac(1), 1)]);
    rig.got(2);
    rig.send(2, &[frame(BROADCAST, mac(1), 2), frame(mac(1), mac(2), 3)]);
    assert_eq!(serials(&rig.got(0)), [3]);
    assert_eq!(rig.stats(2).drops_spoofed_mac.get(), 1);
    rig.got(1);
    rig.send(1, &[frame(mac(1), mac(5), 4)]);
    assert_eq!(serials(&rig.got(0)), [4], "the address has not moved");
}

#[test]
fn rules_are_replaced_between_bursts() {
    let mut rig = rig(Mode::Switch, vec![None, locked(1)]);
    rig.send(1, &[frame(BROADCAST, mac(2), 1)]);
    rig.forwarder.set_tenants(None);
    rig.send(1, &[frame(BROADCAST, mac(2), 2)]);
    rig.forwarder.set_tenants(Tenants::new(vec![None, locked(1).map(Arc::new)]));
    // The address was learned a moment ago.
    rig.send(1, &[frame(BROADCAST, mac(2), 3)]);
    assert_eq!(serials(&rig.got(0)), [2]);
    assert_eq!(rig.stats(1).drops_spoofed_mac.get(), 2);
}

#[test]
fn isolated_ports_reach_only_others() {
    let mut rig = rig(Mode::Switch, vec![None, isolated(), isolated()]);
    for port in 0..3 {
        rig.send(port, &[frame(BROADCAST, mac(port as u8), port as u32)]);
    }
    assert_eq!(serials(&rig.got(0)), [1, 2]);
    assert_eq!(serials(&rig.got(1)), [0]);
    assert_eq!(serials(&rig.got(2)), [0]);
    // Known addresses; an unknown one is flooded.
    let to = |dst| [frame(mac(dst), mac(1), 10), frame(mac(9), mac(1), 11)];
    rig.send(1, &to(2));
    assert_eq!((rig.got(2).len(), serials(&rig.got(0))), (0, vec![11]));
    assert_eq!(rig.stats(1).drops_isolated.get(), 1);
    rig.send(1, &to(0));
    assert_eq!(serials(&rig.got(0)), [10, 11]);
    rig.send(0, &[frame(mac(2), mac(0), 12)]);
    assert_eq!(serials(&rig.got(2)), [12]);
}

#[test]
fn cross_connect_applies_the_rules_of_both_ports() {
    let mut rig = rig(
        Mode::Cross,
        vec![locked(0), None, isolated(), isolated(), access(5), trunk(&[5], None)],
    );
    rig.send(0, &[frame(mac(1), mac(0), 1), frame(mac(1), mac(7), 2), frame(mac(1), [0; 6], 3)]);
    assert_eq!(serials(&rig.got(1)), [1]);
    let stats = rig.stats(0);
    assert_eq!((stats.drops_spoofed_mac.get(), stats.drops_bad_source.get()), (1, 1));
    rig.send(1, &[frame(mac(0), mac(7), 4)]);
    assert_eq!(serials(&rig.got(0)), [4], "a port without rules");
    rig.send(2, &[frame(mac(1), mac(0), 5)]);
    assert_eq!((rig.got(3).len(), rig.stats(2).drops_isolated.get()), (0, 1));
    rig.send(4, &[frame(mac(1), mac(0), 6)]);
    assert_eq!(vids(&rig, 5), [5]);
    let both = [Some(5), Some(6), None].map(|vlan| tagged(mac(1), mac(0), vlan, 0, 7));
    rig.send(5, &both);
    assert_eq!((vids(&rig, 4), rig.stats(5).drops_vlan.get()), (vec![0], 2));
}

#[test]
fn floods_stay_in_their_vlan_and_leave_with_its_tag() {
    let rules =
        vec![access(5), access(5), access(6), trunk(&[5, 6], Some(7)), trunk(&[7], Some(5)), None];
    let mut rig = rig(Mode::Switch, rules);
    rig.send(0, &[frame(BROADCAST, mac(0), 1)]);
    let got = [1, 2, 3, 4, 5].map(|port| vids(&rig, port));
    assert_eq!(got, [vec![0], vec![], vec![5], vec![0], vec![5]]);
    // From the trunk: tagged, native, and not carried.
    let frames = [Some(6), None, Some(8)].map(|vlan| tagged(BROADCAST, mac(3), vlan, 0, 2));
    rig.send(3, &frames);
    let got = [0, 1, 2, 4, 5].map(|port| vids(&rig, port));
    assert_eq!(got, [vec![], vec![], vec![0], vec![7], vec![6, 7]]);
    assert_eq!(rig.stats(3).drops_vlan.get(), 1);
    // A port without VLANs is in all of them, and its untagged frames are in none.
    rig.send(5, &[frame(BROADCAST, mac(9), 3), tagged(BROADCAST, mac(9), Some(5), 0, 4)]);
    let got = [0, 1, 2, 3, 4].map(|port| vids(&rig, port));
    assert_eq!(got, [vec![0], vec![0], vec![], vec![5], vec![0]]);
}

#[test]
fn addresses_are_learned_per_vlan() {
    let mut rig = rig(Mode::Switch, vec![access(5), access(6), trunk(&[5, 6], None), access(6)]);
    rig.send(0, &[frame(BROADCAST, mac(1), 1)]);
    rig.send(1, &[frame(BROADCAST, mac(1), 2)]);
    assert_eq!(vids(&rig, 2), [5, 6]);
    rig.got(3);
    let to = |vid| tagged(mac(1), mac(2), Some(vid), 0, u32::from(vid));
    rig.send(2, &[to(5), to(6)]);
    assert_eq!((serials(&rig.got(0)), serials(&rig.got(1))), (vec![5], vec![6]));
    assert!(rig.got(3).is_empty());
    // A static address in a VLAN that its port does not carry.
    rig.fdb.add_static(mac(8), 6, PortId(0), 0).unwrap();
    rig.send(1, &[frame(mac(8), mac(1), 3)]);
    assert_eq!((rig.got(0).len(), rig.stats(1).drops_vlan.get()), (0, 1));
}

#[test]
fn inner_and_service_tags_are_payload() {
    let mut rig = rig(Mode::Switch, vec![access(5), trunk(&[5], None), access(5)]);
    let plain = frame(BROADCAST, mac(0), 1);
    let with = |tags: &[u8]| [&plain[..12], tags, &plain[12..]].concat();
    let (outer, service, inner) = ([0x81, 0, 0, 5], [0x88, 0xa8, 0, 9], [0x81, 0, 0, 9]);
    rig.send(0, &[with(&service)]);
    assert_eq!(rig.got(2), [with(&service)]);
    assert_eq!(rig.got(1), [with(&[outer, service].concat())]);
    rig.send(1, &[with(&[outer, inner].concat()), with(&[outer, service].concat())]);
    assert_eq!(rig.got(0), [with(&inner), with(&service)]);
    rig.send(0, &[with(&inner)]);
    assert_eq!(rig.stats(0).drops_vlan.get(), 1, "tagged, at an access port");
}

/// Double tagging: the native VLAN's tag is removed, and the second would be the frame's VLAN.
#[test]
fn second_tag_does_not_reach_another_vlan_by_the_native_one() {
    let native = || trunk(&[9], Some(5));
    let mut rig = rig(Mode::Switch, vec![access(5), native(), access(9), access(5), native()]);
    let plain = frame(BROADCAST, mac(0), 1);
    let with = |tags: &[u8]| [&plain[..12], tags, &plain[12..]].concat();
    let (own, priority, other) = ([0x81, 0, 0, 5], [0x81, 0, 0, 0], [0x81, 0, 0, 9]);
    rig.send(0, &[with(&[priority, other].concat())]);
    assert_eq!((rig.got(1), rig.got(2), rig.got(4)), (vec![], vec![], vec![]));
    assert_eq!(rig.got(3), [with(&other)], "to an access port it is payload");
    assert_eq!(rig.stats(0).drops_vlan.get(), 2, "one for each trunk");
    rig.send(1, &[with(&[own, other].concat()), with(&[priority, other].concat())]);
    assert_eq!((rig.got(2), rig.got(4)), (vec![], vec![]));
    assert_eq!(rig.stats(1).drops_vlan.get(), 2);
    // Tagged, it keeps both tags; and one tag alone is removed.
    let mut rig = self::rig(Mode::Cross, vec![access(5), trunk(&[5], None)]);
    rig.send(0, &[with(&[priority, other].concat())]);
    assert_eq!(rig.got(1), [with(&[own, other].concat())]);
    let mut rig = self::rig(Mode::Cross, vec![access(5), native()]);
    rig.send(0, &[with(&priority), with(&[priority, other].concat())]);
    assert_eq!(rig.got(1), std::slice::from_ref(&plain));
    assert_eq!(rig.stats(0).drops_vlan.get(), 1);
}

/// A long frame with a tag, in two segments: private bytes end within its payload.
fn tagged_tso(vid: Option<u16>, payload: usize) -> (Vec<u8>, VnetHdr) {
    let (mut bytes, mut hdr) = tso(mac(1), mac(0), payload, 100);
    if let Some(vid) = vid {
        bytes.splice(12..12, [&[0x81, 0][..], &vid.to_be_bytes()].concat());
        hdr = VnetHdr { hdr_len: 58, csum_start: 38, ..hdr };
    }
    (bytes, hdr)
}

#[test]
fn offloads_pass_with_the_changed_tag() {
    let mut rig = rig(Mode::Cross, vec![access(5), trunk(&[5], None)]);
    rig.send_all(0, vec![tagged_tso(None, 1000)]);
    let (want, hdr) = tagged_tso(Some(5), 1000);
    let port = rig.port(1);
    assert_eq!((&port.got[0], port.hdrs[0]), (&want, hdr));
    drop(port);
    rig.send_all(1, vec![tagged_tso(Some(5), 1000)]);
    let (want, hdr) = tagged_tso(None, 1000);
    let port = rig.port(0);
    assert_eq!((&port.got[0], port.hdrs[0]), (&want, hdr));
}

/// The same frames as without VLANs, but for the tag: lengths, identification, sequence, checksums.
#[test]
fn software_segmentation_is_the_same_with_a_changed_tag() {
    let segments = |rules: Vec<Option<Rules>>, from: usize, vid| {
        let mut rig = rig(Mode::Cross, rules);
        rig.port(1 - from).takes = Offloads::default();
        rig.send_all(from, vec![tagged_tso(vid, 1000)]);
        let got = rig.got(1 - from);
        assert_eq!(rig.egress(1 - from).stats.segmented.get(), 10);
        got
    };
    let plain = segments(vec![None, None], 0, None);
    assert_eq!(plain.len(), 10);
    let vlans = || vec![access(5), trunk(&[5], None)];
    let pushed = segments(vlans(), 0, None);
    let popped = segments(vlans(), 1, Some(5));
    for ((plain, mut pushed), popped) in plain.into_iter().zip(pushed).zip(popped) {
        let tag: Vec<u8> = pushed.drain(12..16).collect();
        assert_eq!(tag, [0x81, 0, 0, 5]);
        assert_eq!((&pushed, &popped), (&plain, &plain));
        let mut sum = offload::Sum::default();
        let tcp = &plain[34..];
        sum.add(&plain[26..34]);
        sum.add(&[0, 6]);
        sum.add(&(tcp.len() as u16).to_be_bytes());
        sum.add(tcp);
        assert_eq!(sum.finish_zero(), [0, 0], "the checksum is right");
    }
}

#[test]
fn retagged_frames_are_held_for_a_full_port_and_keep_their_order() {
    let mut rig = rig(Mode::Switch, vec![access(5), trunk(&[5], None)]);
    rig.port(1).room = 1;
    let frames: Vec<_> = (1..4).map(|n| frame(BROADCAST, mac(0), n)).collect();
    rig.send(0, &frames);
    assert_eq!((serials(&rig.got(1)), rig.held(1)), (vec![1], 2));
    rig.port(1).room = ENDLESS;
    rig.retry();
    let got = rig.got(1);
    assert_eq!(serials(&got), [2, 3]);
    assert!(got.iter().all(|frame| flow::vlan_id(frame) == 5));
}

/// Found by fuzzing (`tenant_rules`): between two trunks the tag stays as it is, and a receiver
/// that stores the checksum over it, or over the EtherType of an untagged frame, finds another
/// VLAN.
#[test]
fn checksum_that_the_receiver_would_store_over_a_tag_is_refused() {
    // The VLAN that untagged frames have at the receiver, whose tag is kept or pushed.
    for (to, untagged) in [(trunk(&[6], Some(5)), 0), (trunk(&[5, 6], None), 5)] {
        for mode in [Mode::Switch, Mode::Cross] {
            let mut rig = rig(mode, vec![trunk(&[6], Some(5)), to.clone()]);
            for at in 0..22 {
                for (csum_start, csum_offset) in [(at, 0), (0, at)] {
                    let (flags, hdr) = (NEEDS_CSUM, VnetHdr::NONE);
                    let hdr = VnetHdr { flags, csum_start, csum_offset, ..hdr };
                    let six = tagged(BROADCAST, mac(0), Some(6), 0, 1);
                    rig.send_all(0, vec![(six, hdr), (frame(BROADCAST, mac(0), 2), hdr)]);
                    let passed = [(18, 6), (14, untagged)].into_iter();
                    let passed = passed.filter(|(end, _)| csum_start >= *end).map(|(_, vid)| vid);
                    let passed: Vec<u16> = passed.collect();
                    assert_eq!(vids(&rig, 1), passed, "checksum at {csum_start} + {csum_offset}");
                }
            }
            assert_eq!(rig.stats(0).drops_unchecked.get(), 18 + 14 + 22 + 22);
        }
    }
}

/// A frame of the guest with address 10.0.0.1; `id` is that of IPv4.
fn packet(kind: u8, id: u8) -> Vec<u8> {
    let (src, dst) = (if kind == 1 { mac(9) } else { mac(1) }, mac(if kind == 2 { 3 } else { 2 }));
    let mut bytes = [dst, src].concat();
    if kind == 3 {
        bytes.extend([0x81, 0, 0, 5]);
    }
    let (ip, fragment) = (if kind == 4 { 9 } else { 1 }, if kind == 5 { 0x20 } else { 0 });
    let proto = if kind == 6 { 6 } else { 17 };
    bytes.extend([8, 0, 0x45, 0, 0, 46, 0, id, fragment, 0, 64, proto, 0, 0]);
    bytes.extend([10, 0, 0, ip, 10, 0, 0, 2]);
    // Port 67 is that of a DHCP server.
    bytes.extend([0, if kind == 7 { 67 } else { 7 }, 0, 9]);
    bytes.resize(if kind == 8 { 36 } else { 60 }, 0);
    bytes
}

proptest! {
    /// Frames in sequence with the same addresses are permitted or refused each by itself.
    #[test]
    fn burst_of_a_port_with_rules_is_forwarded_as_its_frames_alone(
        sent in prop::collection::vec(
            (prop_oneof![4 => Just(0), 1 => 1..9_u8], any::<u8>()),
            1..40,
        ),
        locks in any::<bool>(),
        vlan in prop_oneof![Just(Vlan::Transparent), Just(Vlan::Access(5))],
    ) {
        let security = Security::new(&[mac(1)], Some(&[[10, 0, 0, 1].into()]), false, false);
        let to = Some(Rules { vlan, ..Rules::default() });
        let own = Rules { security: locks.then_some(security), ..to.clone().unwrap() };
        let sent: Vec<_> = sent.into_iter().map(|(kind, id)| packet(kind, id)).collect();
        let forwarded = |at_once: usize| {
            let mut rig = rig(Mode::Switch, vec![Some(own.clone()), to.clone(), to.clone()]);
            for port in [1, 2] {
                rig.send(port, &[frame(BROADCAST, mac(port as u8 + 1), 0)]);
            }
            let _ = [0, 1, 2].map(|port| rig.got(port));
            sent.chunks(at_once).for_each(|burst| rig.send(0, burst));
            let counted: Vec<_> = rig.stats(0).all().collect();
            ([1, 2].map(|port| rig.got(port)), counted)
        };
        prop_assert_eq!(forwarded(sent.len()), forwarded(1));
    }

    /// Each frame reaches exactly the ports that its VLAN and isolation permit, or is counted.
    #[test]
    fn floods_reach_members_only(
        kinds in prop::collection::vec((0..4_u8, 1..4_u16, any::<bool>()), 4),
        from in 0..4_usize,
        vid in prop::option::of(0..4_u16),
    ) {
        let rules: Vec<_> = kinds.iter().map(|(kind, vid, isolated)| {
            let vlan = match kind {
                0 => Vlan::Transparent,
                1 => Vlan::Access(*vid),
                2 => Vlan::Trunk { vids: [*vid, 3].into_iter().collect(), native: None },
                _ => Vlan::Trunk { vids: [1, 2].into_iter().collect(), native: Some(*vid) },
            };
            Some(Rules { vlan, isolated: *isolated, security: None })
        }).collect();
        let mut rig = rig(Mode::Switch, rules.clone());
        let sent = tagged(BROADCAST, mac(0), vid, 0, 1);
        rig.send(from, std::slice::from_ref(&sent));
        let own = rules[from].as_ref().unwrap();
        let in_vlan = own.vlan.classify(&sent);
        prop_assert_eq!(rig.stats(from).drops_vlan.get(), u64::from(in_vlan.is_none()));
        for (port, to) in rules.iter().flatten().enumerate() {
            let member = in_vlan.is_some_and(|vid| to.vlan.carries(vid));
            let want = port != from && member && !(own.isolated && to.isolated);
            let got = rig.got(port);
            prop_assert_eq!(got.len(), usize::from(want));
            for frame in got {
                // Back at the port that sent it, it would be in the same VLAN.
                prop_assert_eq!(to.vlan.classify(&frame), in_vlan);
                prop_assert_eq!(serial(&frame), 1);
            }
        }
    }
}
