use super::*;
use proptest::prelude::*;

#[test]
fn valid_and_invalid_paths() {
    for good in ["/", "/a", "/local/domain/1/device/vif/0", "/a-b_c@d/9"] {
        assert!(is_node(good.as_bytes()), "{good}");
    }
    for bad in ["", "a", "//", "/a/", "/a//b", "/../a", "/a/.", "/a b", "/a\0b", "/é", "@x"] {
        assert!(!is_node(bad.as_bytes()), "{bad}");
    }
    assert!(is_node(format!("/{}", "a".repeat(ABS_PATH_MAX - 1)).as_bytes()));
    assert!(!is_node(format!("/{}", "a".repeat(ABS_PATH_MAX)).as_bytes()));
}

#[test]
fn paths_below_others() {
    assert!(is_under("/a/b", "/a") && is_under("/a", "/a") && is_under("/a", "/"));
    assert!(!is_under("/ab", "/a") && !is_under("/a", "/a/b"));
    assert_eq!([parent("/a/b"), parent("/a"), parent("/")], [Some("/a"), Some("/"), None]);
}

#[test]
fn oversized_length_is_reported_before_the_payload_arrives() {
    let header = Header { kind: 2, req_id: 1, tx_id: 0, len: 4097 };
    let mut decoder = Decoder::default();
    decoder.push(&header.to_bytes());
    assert_eq!(decoder.take(), Err(Oversized(4097)));
}

#[test]
fn numbers_are_those_of_the_header() {
    // enum xsd_sockmsg_type: 20 was XS_RESTRICT, which was removed.
    let numbers: Vec<u32> = Kind::ALL.iter().map(|k| k.to_wire()).collect();
    let want: Vec<u32> = (0..=22).filter(|n| *n != 20).collect();
    assert_eq!(numbers, want);
    assert_eq!([Kind::from_wire(20), Kind::from_wire(23), Kind::from_wire(0xffff)], [None; 3]);
}

#[test]
fn invalid_permissions() {
    for bad in ["", "r", "x1", "r-1", "r+1", "r65536", "r1 ", "1r"] {
        assert_eq!(Perm::parse(bad.as_bytes()), None, "{bad}");
    }
    assert_eq!(Errno::from_wire(b"EWHAT\0"), Errno::Eio);
}

proptest! {
    #[test]
    fn messages_are_decoded_from_any_fragments(
        messages in prop::collection::vec((0_u32..30, any::<u32>(), any::<u32>(),
            prop::collection::vec(any::<u8>(), 0..200)), 0..12),
        cuts in prop::collection::vec(1_usize..50, 1..20),
    ) {
        let mut bytes = Vec::new();
        let messages: Vec<Message> = messages.into_iter().map(|(kind, req_id, tx_id, payload)| {
            let len = payload.len() as u32;
            Message { header: Header { kind, req_id, tx_id, len }, payload }
        }).collect();
        messages.iter().for_each(|m| m.encode(&mut bytes));
        let (mut decoder, mut got) = (Decoder::default(), Vec::new());
        let (mut rest, mut cuts) = (&bytes[..], cuts.iter().cycle());
        while !rest.is_empty() {
            let (now, later) = rest.split_at((*cuts.next().unwrap()).min(rest.len()));
            rest = later;
            decoder.push(now);
            while let Some(message) = decoder.take().unwrap() {
                got.push(message);
            }
        }
        prop_assert_eq!(got, messages);
    }

    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut decoder = Decoder::default();
        decoder.push(&bytes);
        while let Ok(Some(message)) = decoder.take() {
            let _ = strings(&message.payload);
        }
        let _ = (is_node(&bytes), Perm::parse(&bytes), Errno::from_wire(&bytes));
    }

    #[test]
    fn permissions_survive_the_wire(letter in 0_usize..4, domid in any::<u16>()) {
        let access = [Access::None, Access::Read, Access::Write, Access::Both][letter];
        let perm = Perm::new(access, domid);
        prop_assert_eq!(Perm::parse(perm.to_string().as_bytes()), Some(perm));
    }
}
