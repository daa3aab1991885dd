use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::vnet::{NEEDS_CSUM, VnetHdr};

fn vlan() -> impl Strategy<Value = Vlan> {
    let ids = prop::collection::vec(1..6_u16, 0..3);
    (0..3_u8, 1..6_u16, ids, any::<bool>()).prop_map(|(kind, vid, vids, has_native)| match kind {
        0 => Vlan::Transparent,
        1 => Vlan::Access(vid),
        _ => Vlan::Trunk { vids: vids.into_iter().collect(), native: has_native.then_some(vid) },
    })
}

const IPS: [IpAddr; 1] = [IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1))];

/// Rules of four ports; those of the last one are short or absent.
fn tenants() -> impl Strategy<Value = Arc<Tenants>> {
    let own = [2, 0, 0, 0, 0, 1];
    let security = (any::<bool>(), any::<bool>()).prop_map(move |(locks_mac, locks_ip)| {
        let ips: Option<&[IpAddr]> = locks_ip.then_some(&IPS);
        let macs = if locks_mac { vec![own] } else { Vec::new() };
        Security::new(&macs, ips, false, false)
    });
    let rules = (vlan(), any::<bool>(), prop::option::of(security))
        .prop_map(|(vlan, isolated, security)| Rules { vlan, isolated, security });
    prop::collection::vec(prop::option::weighted(0.9, rules.prop_map(Arc::new)), 4)
        .prop_filter_map("no rules", Tenants::new)
}

/// A frame of 60 bytes or less, of which most are permitted by some rules.
fn head() -> impl Strategy<Value = Vec<u8>> {
    let tag = prop::option::of((prop::sample::select(vec![0x81_u8, 0x88]), 0..7_u8));
    let places = (1..3_u8, 1..3_u8, prop::sample::select(vec![6_u8, 17, 1]));
    (tag, places, prop::sample::select(vec![60_usize, 40, 14, 13, 12])).prop_map(
        |(tag, (mac, ip, proto), len)| {
            let mut head = vec![2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, mac];
            if let Some((first, vid)) = tag {
                head.extend([first, if first == 0x88 { 0xa8 } else { 0 }, 0x60, vid]);
            }
            head.extend([8, 0, 0x45, 0, 0, 46, 0, 0, 0x40, 0, 64, proto, 0, 0]);
            head.extend([10, 0, 0, ip, 10, 0, 0, 9, 0, 7, 0, 9]);
            head.resize(60, 0);
            head.truncate(len);
            head
        },
    )
}

proptest! {
    /// What is found once per burst decides as the rules do for each frame alone: the frame's
    /// VLAN, its destinations, and whether a tag may have to change.
    #[test]
    fn frames_of_a_burst_are_decided_as_each_alone(
        tenants in tenants(),
        from in 0..5_u16,
        frames in prop::collection::vec((head(), 0..5_u16, prop::option::of(0..40_u16)), 1..20),
    ) {
        let (port, stats) = (PortId(from), IngressStats::default());
        let mut sender = tenants.sender(port);
        let (mut has_tagged, mut vlan, mut unchecked, mut isolated) = (false, 0, 0, 0);
        for (head, to, summed) in &frames {
            let frame = Frame {
                seg_first: 0,
                seg_count: 1,
                len: head.len() as u32,
                hdr: summed.map_or(VnetHdr::NONE, |csum_start| VnetHdr {
                    flags: NEEDS_CSUM,
                    csum_start,
                    ..VnetHdr::NONE
                }),
            };
            let has_tag = head.get(12..16).is_some_and(|tag| tag[..2] == [0x81, 0]);
            let over_tag = summed.is_some_and(|start| start < if has_tag { 18 } else { 14 });
            let rules = tenants.of(port).cloned().unwrap_or_default();
            let admitted = sender.admit(head, &frame, &stats);
            let vid = rules.vlan.classify(head);
            let checked = rules.security.as_ref()
                .map_or(Ok(()), |rules| rules.check(head, frame.len, &frame.hdr));
            let is_permitted = vid.is_some() && checked.is_ok() && !over_tag;
            prop_assert_eq!(admitted.map(|admitted| admitted.vid), vid.filter(|_| is_permitted));
            vlan += u64::from(vid.is_none());
            unchecked += u64::from(vid.is_some() && !is_permitted);
            let Some(Admitted { key, vid }) = admitted else { continue };
            let is_transparent = rules.vlan == Vlan::Transparent;
            prop_assert_eq!(key, if is_transparent { vlan_id(head) } else { vid });
            has_tagged |= has_tag;

            let to = PortId(*to);
            let reaches = sender.may_reach(to, vid, &stats);
            prop_assert_eq!(reaches, tenants.reaches(port, to, vid));
            let is_isolated = tenants.isolates(port, to);
            isolated += u64::from(is_isolated);
            vlan += u64::from(!is_isolated && !reaches);
        }
        prop_assert_eq!(sender.has_tagged(), has_tagged);
        prop_assert_eq!((stats.drops_vlan.get(), stats.drops_isolated.get()), (vlan, isolated));
        let all: u64 = stats.all().map(|(_, n)| n).sum();
        prop_assert_eq!(all, vlan + isolated + unchecked);
    }

    /// The change of tag found once for a burst without tags is that of each of its frames.
    #[test]
    fn untagged_frames_need_the_same_change(head in head(), from in vlan(), to in vlan()) {
        if tci(&head).is_none() {
            let same = crate::tenant::untagged_tagging(&from, &to);
            prop_assert_eq!(crate::tenant::tagging(&from, &to, &head), same);
        }
    }
}
