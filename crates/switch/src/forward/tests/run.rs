//! Runs of frames with one start: both addresses, and a VLAN tag.

use super::*;
use crate::tenant::{Rules, Security, Tenants, Vlan};

/// What a burst did: frames of each queue of each port, and counters of the sender.
type Effect = (Vec<Vec<Vec<u8>>>, [u64; 9]);

/// Rules of the sender.
#[derive(Clone, Copy, Debug)]
enum Of {
    None,
    /// It may send from two addresses, and from one IP address.
    Locked,
    /// The same, with tags of two VLANs and without; others are in one of these, or behind a tag.
    LockedTrunk,
    Isolated,
}

fn tenants(of: Of) -> Option<Arc<Tenants>> {
    let security =
        Some(Security::new(&[mac(6), mac(7)], Some(&[[10, 0, 0, 1].into()]), false, false));
    let trunk = |native| Vlan::Trunk { vids: [5, 6].into_iter().collect(), native };
    let isolated = Rules { isolated: true, ..Rules::default() };
    let vlan = |vlan| Some(Rules { vlan, ..Rules::default() });
    let rules = match of {
        Of::None => return None,
        Of::Locked => vec![Some(Rules { security, ..Rules::default() })],
        Of::LockedTrunk => vec![
            Some(Rules { security, vlan: trunk(Some(7)), ..Rules::default() }),
            vlan(Vlan::Access(5)),
            vlan(Vlan::Access(7)),
            vlan(trunk(None)),
        ],
        Of::Isolated => vec![Some(isolated.clone()), Some(isolated)],
    };
    Tenants::new(rules.into_iter().map(|rules| rules.map(Arc::new)).collect())
}

/// Four ports: 1 and 2 are known in two VLANs, and two addresses are fixed at port 3.
fn rig(queues: u16, of: Of) -> Rig {
    let mut rig = Rig::new(Mode::Switch, 4, queues);
    for vlan in [None, Some(5)] {
        rig.send(1, &[tagged(BROADCAST, mac(1), vlan, 0, 0)]);
        rig.send(2, &[tagged(BROADCAST, mac(2), vlan, 0, 0)]);
    }
    rig.fdb.add_static(mac(3), 0, PortId(3), 0).unwrap();
    rig.fdb.add_static(mac(4), 0, PortId(3), 0).unwrap();
    rig.fdb.add_static(mac(2), 7, PortId(2), 0).unwrap();
    effect(&mut rig);
    rig.forwarder.set_tenants(tenants(of));
    rig
}

fn effect(rig: &mut Rig) -> Effect {
    let queues = rig.egress.iter().flatten();
    let got = queues.map(|queue| std::mem::take(&mut queue.lock().got)).collect();
    let stats = rig.stats(0);
    let counters = [
        &stats.drops_bad_source,
        &stats.drops_link_local,
        &stats.drops_runt,
        &stats.drops_same_port,
        &stats.mac_elsewhere,
        &stats.drops_spoofed_mac,
        &stats.drops_spoofed_ip,
        &stats.drops_vlan,
        &stats.drops_isolated,
    ];
    (got, counters.map(|counter| counter.get()))
}

fn of() -> impl Strategy<Value = Of> {
    prop::sample::select(vec![Of::None, Of::Locked, Of::LockedTrunk, Of::Isolated])
}

/// Frames with one start; often with the addresses of other runs, but in another VLAN, or of
/// another flow. Some have another's IP address.
fn run() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let link_local = [1, 0x80, 0xc2, 0, 0, 0x0e];
    let to = prop_oneof![
        8 => Just(mac(1)),
        3 => (1..7_u8).prop_map(mac),
        1 => Just(BROADCAST),
        1 => Just(link_local),
    ];
    let from = prop_oneof![
        8 => Just(mac(7)),
        4 => (2..8_u8).prop_map(mac),
        1 => Just(BROADCAST),
    ];
    let vlan = prop_oneof![Just(None), Just(Some(5)), Just(Some(6)), Just(Some(0x2005))];
    let cut = prop_oneof![8 => Just(60), 1 => 10..20_usize];
    let spoofed = prop::collection::vec(prop::bool::weighted(0.2), 1..6);
    (to, from, vlan, 0..3_u16, cut, spoofed).prop_map(|(to, from, vlan, flow, cut, spoofed)| {
        let frame = |spoofed: bool| {
            let mut frame = tagged(to, from, vlan, flow, 0);
            let ip = frame.len() - 34;
            assert_eq!(frame[ip..ip + 4], [10, 0, 0, 1]);
            frame[ip + 3] += u8::from(spoofed);
            frame.truncate(cut);
            frame
        };
        spoofed.into_iter().map(frame).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]
    /// The frames one by one take the generic path, with whole heads.
    #[test]
    fn burst_has_the_effect_of_its_frames_one_by_one(
        queues in 1..3_u16,
        starts in prop::bool::weighted(0.7),
        sends_by_one in any::<bool>(),
        of in of(),
        runs in prop::collection::vec(run(), 1..12),
    ) {
        let frames = runs.concat();
        let (mut together, mut apart) = (rig(queues, of), rig(queues, of));
        together.egress.iter().flatten().for_each(|queue| queue.lock().starts = starts);
        for rig in [&together, &apart] {
            rig.table[0].as_ref().unwrap().set_active(if sends_by_one { 1 } else { queues });
        }
        together.send(0, &frames);
        for frame in &frames {
            let mut burst = Burst::of(frame);
            burst.snapshot();
            apart.forward(0, &mut burst);
        }
        prop_assert_eq!(effect(&mut together), effect(&mut apart));
        let addresses = |rig: &Rig| rig.fdb.entries(1).len();
        prop_assert_eq!(addresses(&together), addresses(&apart));
    }
}

#[test]
fn vlans_are_kept_and_learned_apart() {
    let mut rig = Rig::new(Mode::Switch, 4, 1);
    rig.send(1, &[tagged(BROADCAST, mac(1), Some(5), 0, 1)]);
    rig.send(2, &[tagged(BROADCAST, mac(1), Some(6), 0, 2)]);
    (0..4).for_each(|p| drop(rig.got(p)));
    let five = tagged(mac(1), mac(9), Some(5), 0, 3);
    rig.send(0, &[five.clone(), tagged(mac(1), mac(9), Some(6), 0, 4), frame(mac(1), mac(9), 5)]);
    assert_eq!((rig.got(1)[0].clone(), serials(&rig.got(2))), (five, vec![4, 5]));
    assert_eq!(serials(&rig.got(3)), [5], "untagged: unknown there");
}

#[test]
fn frames_of_a_run_are_learned_from_once_and_counted_each() {
    let mut rig = rig(1, Of::None);
    let fixed_elsewhere = frame(mac(1), mac(3), 1);
    rig.send(0, &[fixed_elsewhere.clone(), fixed_elsewhere.clone(), fixed_elsewhere]);
    assert_eq!(rig.stats(0).mac_elsewhere.get(), 3);
    assert_eq!(rig.got(1).len(), 3);
    let (vlan, other) =
        (tagged(mac(1), mac(7), Some(5), 0, 2), tagged(mac(1), mac(7), Some(6), 0, 2));
    rig.send(0, &[vlan.clone(), vlan.clone(), other.clone(), other]);
    assert_eq!(rig.got(1).len(), 4);
    assert_eq!(rig.got(2).len(), 2, "in that VLAN it is unknown");
}

/// A frame's start does not determine its flow.
#[test]
fn flows_of_a_sender_with_one_queue_are_spread_over_its_receivers_queues() {
    let mut rig = Rig::new(Mode::Switch, 2, 2);
    rig.table[0].as_ref().unwrap().set_active(1);
    rig.send(1, &[frame(BROADCAST, mac(1), 0)]);
    effect(&mut rig);
    let frames: Vec<_> = (0..32).map(|flow| tagged(mac(1), mac(7), None, flow, 0)).collect();
    rig.send(0, &frames);
    let got = effect(&mut rig).0.iter().map(Vec::len).collect::<Vec<_>>();
    assert!(got[2] > 0 && got[3] > 0 && got[2] + got[3] == 32, "{got:?}");
}
