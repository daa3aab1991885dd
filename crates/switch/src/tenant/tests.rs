use proptest::prelude::*;

use super::*;
use crate::frame::{HEAD_LEN, RETAGGED_LEN};
use crate::vnet::{NEEDS_CSUM, VnetHdr};

fn trunk(vids: &[u16], native: Option<u16>) -> Vlan {
    Vlan::Trunk { vids: vids.iter().copied().collect(), native }
}

/// Addresses, this tag if any, and a payload.
fn head(tag: Option<[u8; 4]>) -> Vec<u8> {
    [&[7; 12][..], tag.as_ref().map_or(&[], |tag| &tag[..]), &[8, 0, 1, 2, 3]].concat()
}

const UNTAGGED: Option<[u8; 4]> = None;
/// VLAN 5, priority 3.
const FIVE: Option<[u8; 4]> = Some([0x81, 0, 0x60, 5]);
/// Priority 3 alone.
const PRIORITY: Option<[u8; 4]> = Some([0x81, 0, 0x60, 0]);
/// A service tag.
const SERVICE: Option<[u8; 4]> = Some([0x88, 0xa8, 0, 5]);

#[test]
fn frames_are_in_the_vlan_of_their_tag_or_port() {
    let rows = [
        (Vlan::Transparent, [Some(0), Some(5), Some(0), Some(0)]),
        (Vlan::Access(5), [Some(5), None, Some(5), Some(5)]),
        (Vlan::Access(6), [Some(6), None, Some(6), Some(6)]),
        (trunk(&[5, 7], None), [None, Some(5), None, None]),
        (trunk(&[7], Some(9)), [Some(9), None, Some(9), Some(9)]),
        (trunk(&[7], Some(5)), [Some(5), Some(5), Some(5), Some(5)]),
    ];
    for (vlan, want) in rows {
        let got = [UNTAGGED, FIVE, PRIORITY, SERVICE].map(|tag| vlan.classify(&head(tag)));
        assert_eq!(got, want, "{vlan:?}");
    }
}

#[test]
fn frames_leave_with_the_tag_of_the_destination() {
    use Tagging::{Keep, Pop, Push, Rewrite};
    let rows = [
        (Vlan::Transparent, 0, [Keep, Keep, Keep]),
        (Vlan::Transparent, 5, [Push(5), Keep, Rewrite(5)]),
        (Vlan::Access(5), 5, [Keep, Pop, Pop]),
        (trunk(&[5], None), 5, [Push(5), Keep, Rewrite(5)]),
        (trunk(&[7], Some(5)), 5, [Keep, Pop, Pop]),
    ];
    for (vlan, vid, want) in rows {
        let got = [UNTAGGED, FIVE, PRIORITY].map(|tag| vlan.tagging(vid, &head(tag)));
        assert_eq!(got, want, "{vlan:?} {vid}");
        assert!(vlan.carries(vid));
    }
    assert!(!Vlan::Access(5).carries(6) && !trunk(&[5], Some(6)).carries(7));
    // A service tag is payload.
    assert_eq!(Vlan::Access(5).tagging(5, &head(SERVICE)), Keep);
    assert_eq!(trunk(&[5], None).tagging(5, &head(SERVICE)), Push(5));
}

#[test]
fn tags_keep_their_priority_and_move_offsets() {
    let hdr = VnetHdr { flags: NEEDS_CSUM, hdr_len: 54, csum_start: 34, ..VnetHdr::NONE };
    let apply = |tagging: Tagging, tag, hdr: &VnetHdr| {
        let mut out = [0; RETAGGED_LEN];
        let (len, hdr) = tagging.apply(&head(tag), hdr, &mut out)?;
        Some((out[..len].to_vec(), hdr.csum_start, hdr.hdr_len))
    };
    let pushed = apply(Tagging::Push(5), UNTAGGED, &hdr);
    assert_eq!(pushed, Some((head(Some([0x81, 0, 0, 5])), 38, 58)));
    assert_eq!(apply(Tagging::Pop, FIVE, &hdr), Some((head(UNTAGGED), 30, 50)));
    let rewritten = apply(Tagging::Rewrite(9), FIVE, &hdr);
    assert_eq!(rewritten, Some((head(Some([0x81, 0, 0x60, 9])), 34, 54)));
    assert_eq!(apply(Tagging::Push(5), UNTAGGED, &VnetHdr { csum_start: u16::MAX, ..hdr }), None);
    assert_eq!(Tagging::Pop.apply(&[7; 15], &VnetHdr::NONE, &mut [0; RETAGGED_LEN]), None);
}

#[test]
fn only_two_isolated_ports_do_not_reach_each_other() {
    let isolated = || Some(Arc::new(Rules { isolated: true, ..Rules::default() }));
    let tenants = Tenants::new(vec![isolated(), isolated(), None]).unwrap();
    let reaches = |from, to| tenants.reaches(PortId(from), PortId(to), 0);
    assert!(!reaches(0, 1) && !reaches(1, 0));
    assert!(reaches(0, 2) && reaches(2, 1) && reaches(2, 9));
    assert!(Tenants::new(vec![None, None]).is_none());
}

#[test]
fn addresses_of_a_port_are_those_that_its_rules_permit() {
    let (own, other) = ([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
    let security = Some(Security::new(&[own], None, false, false));
    let rules = Rules { security, vlan: Vlan::Access(5), isolated: false };
    assert!(rules.may_own(own, 5) && !rules.may_own(own, 6) && !rules.may_own(other, 5));
    assert!(Rules::default().may_own(other, 6));
}

proptest! {
    #[test]
    fn pop_undoes_push(
        bytes in prop::collection::vec(any::<u8>(), 12..=HEAD_LEN),
        vid in 1..4095_u16,
        csum_start in 14..u16::MAX - 4,
    ) {
        let hdr = VnetHdr { flags: NEEDS_CSUM, csum_start, ..VnetHdr::NONE };
        let (mut tagged, mut back) = ([0; RETAGGED_LEN], [0; RETAGGED_LEN]);
        let (len, moved) = Tagging::Push(vid).apply(&bytes, &hdr, &mut tagged).unwrap();
        prop_assert_eq!(Vlan::Transparent.classify(&tagged[..len]), Some(vid));
        let (len, again) = Tagging::Pop.apply(&tagged[..len], &moved, &mut back).unwrap();
        prop_assert_eq!(&back[..len], &bytes[..]);
        prop_assert_eq!(again, hdr);
    }

    #[test]
    fn set_of_ids_contains_what_was_put_in(vids in prop::collection::vec(any::<u16>(), 0..50)) {
        let set: Vids = vids.iter().copied().collect();
        for vid in 0..5000 {
            prop_assert_eq!(set.contains(vid), vid < 4096 && vids.contains(&vid));
        }
    }
}
