use proptest::prelude::*;

use super::*;

fn frame() -> impl Strategy<Value = Frame> {
    let from = proptest::option::of(any::<(u16, u16)>());
    (any::<[u8; 10]>(), any::<usize>(), any::<usize>(), from)
        .prop_map(|(hdr, at, len, from)| Frame { hdr, at, len, from })
}

fn counters() -> impl Strategy<Value = Vec<Counters>> {
    let counter = ("[a-z_]{1,12}", any::<u64>());
    proptest::collection::vec(proptest::collection::vec(counter, 0..5), 0..3)
}

fn frames() -> impl Strategy<Value = Vec<Vec<Frame>>> {
    proptest::collection::vec(proptest::collection::vec(frame(), 0..3), 0..3)
}

fn port() -> impl Strategy<Value = PortHanded> {
    let positions = proptest::collection::vec(any::<(u16, u32)>(), 0..4);
    let stream = any::<((usize, usize), (usize, usize), bool)>()
        .prop_map(|(unread, unsent, ended)| StreamHanded { unread, unsent, ended });
    let free = proptest::collection::vec(any::<u32>(), 0..4);
    let queue = (free, any::<u64>());
    let queue = queue.prop_map(|(free, counted)| XdpQueueHanded { free, counted });
    let xdp = proptest::collection::vec(queue, 0..3);
    let flows = any::<(usize, usize)>();
    (positions, counters(), counters(), frames(), frames(), stream, xdp, flows).prop_map(
        |(positions, ingress, egress, held, unsent, stream, xdp, flows)| PortHanded {
            name: "p".into(),
            positions,
            vif: None,
            ingress,
            egress,
            held,
            unsent,
            stream,
            xdp,
            flows,
        },
    )
}

fn handed() -> impl Strategy<Value = Handed> {
    let addresses = proptest::collection::vec(any::<Address>(), 0..4);
    (any::<u64>(), proptest::collection::vec(port(), 0..4), addresses)
        .prop_map(|(stopped_ns, ports, addresses)| Handed { stopped_ns, ports, addresses })
}

fn offer() -> impl Strategy<Value = Offer> {
    let name = "[a-z]{1,8}";
    let errors = proptest::collection::btree_map("[a-z_]{1,9}", any::<u64>(), 0..3);
    let tap = proptest::option::of((proptest::collection::vec(any::<u32>(), 0..3), any::<bool>()));
    let port = (name, any::<u16>(), errors, tap, any::<bool>()).prop_map(
        |(name, id, errors, tap, drain)| PortOffer {
            name,
            id,
            errors,
            tap,
            drain,
            connection: Some(ConnectionState::default()),
            ..PortOffer::default()
        },
    );
    (any::<u32>(), proptest::collection::vec(port, 0..4), any::<Option<u64>>()).prop_map(
        |(pid, ports, duration_left_ms)| Offer { pid, ports, duration_left_ms, ..Offer::default() },
    )
}

proptest! {
    #[test]
    fn messages_are_read_as_they_were_written(
        handed in handed(),
        offer in offer(),
        bytes in proptest::collection::vec(any::<u8>(), 0..64),
    ) {
        let all = encode(&handed, &bytes);
        prop_assert_eq!(decode::<Handed>(&all).unwrap(), (handed, &bytes[..]));
        let all = encode(&offer, &bytes);
        prop_assert_eq!(decode::<Offer>(&all).unwrap(), (offer, &bytes[..]));
    }

    #[test]
    fn damaged_messages_are_refused_without_a_panic(
        handed in handed(),
        cut in any::<prop::sample::Index>(),
        noise in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let all = encode(&handed, &[]);
        let cut = cut.index(all.len());
        prop_assert!(matches!(decode::<Handed>(&all[..cut]), Err(HandoverError::Foreign)));
        let _ = decode::<Handed>(&noise);
        let _ = decode::<Offer>(&noise);
    }
}
