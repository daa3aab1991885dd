//! A guest's hash: the queue of each frame, and the hash that the guest gets with it.

use ring::xen::Hash;
use switch::fdb::{Fdb, PortId};
use switch::forward::{EgressQueue, Forwarder, Mode, Port, Source};
use switch::poll::Policy;
use switch::tuning::Tuning;

use super::*;
use crate::port::hash::{KEY_LEN_MAX, Steering, algorithm, hash_type};

fn toeplitz(mapping: &[u32]) -> Steering {
    let mut key = [0; KEY_LEN_MAX];
    key.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 37 + 11) as u8);
    let types = hash_type::IPV4 | hash_type::IPV4_TCP;
    Steering { algorithm: algorithm::TOEPLITZ, types, key, mapping: mapping.to_vec() }
}

/// A frame of flow `n`.
fn flow(n: u8, len: usize) -> Vec<u8> {
    let mut bytes = tcp(len);
    bytes[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
    bytes[29] = n;
    bytes
}

#[test]
fn guest_that_configured_a_hash_gets_it_with_each_frame() {
    let (mut a, mut b) = two();
    b.orders.set_steering(toeplitz(&[]));
    b.post(100..120);
    let gso = Gso { size: 1448, kind: gso_type::TCPV4, features: 0 };
    a.send(&flow(1, 9000), &[4000, 4000, 1000], tx_flag::CSUM_BLANK, &[Extra::Gso(gso)]);
    a.send(&flow(2, 60), &[60], 0, &[]);
    let mut arp = flow(3, 60);
    (arp[12], arp[13]) = (8, 6);
    a.send(&arp, &[60], 0, &[]);
    assert_eq!(carry(&mut a, &mut b), 3);
    let want = |n| toeplitz(&[]).hash(&flow(n, 60)).unwrap();
    let got: Vec<_> = std::iter::from_fn(|| b.take()).map(Result::unwrap).collect();
    assert_eq!((got[0].0.hash, got[0].0.gso), (Some(want(1)), Some(gso)), "both extra infos");
    assert_eq!((got[1].0.hash, got[1].0.gso), (Some(want(2)), None));
    assert_eq!(got[2].0.hash, None, "no configured type matches");
    assert!(want(1).value != want(2).value && (want(1).kind, want(1).algorithm) == (1, 1));
    assert_eq!([9000, 60, 60], [0, 1, 2].map(|i: usize| got[i].1.len()));
    // Five slots, two, and one.
    assert_eq!(b.pair.egress.lock().room(1500, 99), Ok(6));
    b.orders.set_steering(Steering::default());
    a.send(&flow(1, 60), &[60], 0, &[]);
    assert_eq!(carry(&mut a, &mut b), 1);
    assert_eq!(b.take().unwrap().unwrap().0.hash, None, "no longer configured");
    assert_eq!(b.pair.egress.lock().room(1500, 99), Ok(11));
}

#[test]
fn frame_is_held_until_there_is_a_slot_for_its_hash() {
    let (mut a, mut b) = two();
    b.orders.set_steering(toeplitz(&[]));
    b.post(100..101);
    a.send(&flow(1, 60), &[60], 0, &[]);
    assert_eq!(carry(&mut a, &mut b), 0);
    assert!(b.pair.egress.lock().arm(), "one slot is too few");
    b.post(101..102);
    assert!(!b.pair.egress.lock().arm());
    a.send(&flow(1, 60), &[60], 0, &[]);
    assert_eq!(carry(&mut a, &mut b), 1);
    assert!(matches!(b.take().unwrap().unwrap().0.hash, Some(Hash { algorithm: 1, .. })));
}

#[test]
fn frames_go_to_the_queue_given_by_the_guests_table() {
    const QUEUES: usize = 3;
    let host = Arc::new(Host::default());
    let mut a = Guest::new(1, &host, ALL);
    let orders = Arc::new(Orders::new(QUEUES));
    let mut queues: Vec<Guest> =
        (0..QUEUES).map(|q| Guest::queue(2, &host, ALL, Arc::clone(&orders), q)).collect();
    let egress = queues.iter().map(|queue| {
        let Pair { egress, egress_stats, .. } = queue.pair.clone();
        EgressQueue::new(egress, egress_stats)
    });
    let port = |id, egress: Vec<_>| {
        let active = egress.len() as u16;
        let port = Port::new(PortId(id), format!("p{id}"), egress);
        port.set_active(active);
        Some(Arc::new(port))
    };
    let table = Arc::new(vec![port(0, Vec::new()), port(1, egress.collect())]);
    let fdb = Arc::new(Fdb::new(64, [1, 2], 300, 4));
    let mut forwarder = Forwarder::new(Mode::Switch, 0, fdb, table, 7);
    let tuning = Arc::new(Tuning::new(Policy::Event));
    let source = Source::new(PortId(0), 0, Arc::default(), tuning);
    let mut send = |queues: &mut [Guest]| {
        for (q, queue) in queues.iter_mut().enumerate() {
            queue.post((0..40).map(|n| 300 + 100 * q as u32 + n + 1));
        }
        (0..16).for_each(|n| a.send(&flow(n, 60), &[60], 0, &[]));
        a.burst(at(0), |burst| _ = forwarder.forward(&source, burst, at(0))).unwrap();
        assert_eq!(a.responses(), [status::OKAY; 16]);
        let flows = |queue: &mut Guest| {
            let frames = std::iter::from_fn(|| queue.take());
            frames.map(|frame| frame.unwrap().1[29]).collect::<Vec<_>>()
        };
        queues.iter_mut().map(flows).collect::<Vec<_>>()
    };
    let free = send(&mut queues);
    assert!(
        free.iter().filter(|got| !got.is_empty()).count() > 1,
        "chosen by the switch: {free:?}"
    );
    // The table has no queue 1; then only queue 1.
    let steering = toeplitz(&[2, 0, 0, 2, 2]);
    orders.set_steering(steering.clone());
    send(&mut queues);
    let table: [Vec<u8>; QUEUES] = std::array::from_fn(|q| {
        let goes =
            |n: &u8| steering.mapping[steering.hash(&flow(*n, 60)).unwrap().value as usize % 5];
        (0..16).filter(|n| goes(n) == q as u32).collect()
    });
    assert!(!table[0].is_empty() && !table[2].is_empty());
    assert_eq!(send(&mut queues), table);
    orders.set_steering(toeplitz(&[1]));
    send(&mut queues);
    assert_eq!(send(&mut queues)[1].len(), 16);
    orders.set_steering(Steering::default());
    send(&mut queues);
    assert_eq!(send(&mut queues), free);
}
