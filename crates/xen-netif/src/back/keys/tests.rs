use super::super::fake::Fake;
use super::*;

const FRONT: &str = "/local/domain/1/device/vif/0";
const OFFER: Offer = Offer { queues: 4, without: 0 };

/// The keys of a front end with `queues` queues and split channels.
fn front(queues: u32) -> Fake {
    let mut store = Fake::default();
    store.set(&format!("{FRONT}/request-rx-copy"), "1");
    let flat = queues == 1;
    if !flat {
        store.set(&format!("{FRONT}/multi-queue-num-queues"), &queues.to_string());
    }
    for n in 0..queues {
        let dir = if flat { FRONT.into() } else { format!("{FRONT}/queue-{n}") };
        let keys = ["tx-ring-ref", "rx-ring-ref", "event-channel-tx", "event-channel-rx"];
        for (i, key) in (0_u32..).zip(keys) {
            store.set(&format!("{dir}/{key}"), &(100 * n + i).to_string());
        }
    }
    store
}

fn refused(store: &mut Fake, offer: &Offer) -> String {
    match read(store, FRONT, offer) {
        Err(ReadError::Refused(refused)) => refused.to_string(),
        other => panic!("not rejected: {other:?}"),
    }
}

#[test]
fn one_queue_is_flat_and_several_are_not() {
    let one = read(&mut front(1), FRONT, &OFFER).unwrap();
    assert_eq!(one.queues, [QueueKeys { tx_ref: 0, rx_ref: 1, tx_port: 2, rx_port: Some(3) }]);
    let three = read(&mut front(3), FRONT, &OFFER).unwrap();
    assert_eq!(three.queues.len(), 3);
    let last = QueueKeys { tx_ref: 200, rx_ref: 201, tx_port: 202, rx_port: Some(203) };
    assert_eq!(three.queues[2], last);
    assert_eq!((three.ctrl, three.features), (None, FrontFeatures::default()));
    let mut counted = front(1);
    counted.set(&format!("{FRONT}/multi-queue-num-queues"), "1");
    assert_eq!(read(&mut counted, FRONT, &OFFER).unwrap(), one);
}

#[test]
fn one_channel_for_both_rings() {
    let mut store = front(1);
    store.set(&format!("{FRONT}/event-channel"), "7");
    let whole = Offer { without: without("split-event-channels").unwrap(), ..OFFER };
    let request = read(&mut store, FRONT, &whole).unwrap();
    assert_eq!((request.queues[0].tx_port, request.queues[0].rx_port), (7, None));
    store.rm(&format!("{FRONT}/event-channel-tx"));
    let request = read(&mut store, FRONT, &OFFER).unwrap();
    assert_eq!((request.queues[0].tx_port, request.queues[0].rx_port), (7, None));
    store.rm(&format!("{FRONT}/event-channel"));
    assert!(refused(&mut store, &OFFER).ends_with("/event-channel is missing"));
}

#[test]
fn invalid_queue_counts() {
    for bad in ["0", "5", "4294967295"] {
        let mut store = front(1);
        store.set(&format!("{FRONT}/multi-queue-num-queues"), bad);
        let text = refused(&mut store, &OFFER);
        assert!(text.starts_with("22 ") && text.contains("1 to 4 are offered"), "{text}");
    }
    for bad in ["", "two", "-1", "4294967296", "2 2"] {
        let mut store = front(1);
        store.set(&format!("{FRONT}/multi-queue-num-queues"), bad);
        assert!(refused(&mut store, &OFFER).contains("not a number"), "{bad:?}");
    }
}

#[test]
fn every_missing_or_invalid_key_is_named() {
    for queues in [1, 2] {
        let all: Vec<_> = front(queues).nodes.keys().cloned().collect();
        let rings = all.iter().filter(|p| p.contains("ring-ref") || p.ends_with("-rx"));
        for path in rings {
            let mut store = front(queues);
            store.rm(path);
            assert_eq!(refused(&mut store, &OFFER), format!("22 {path} is missing"));
            store.set(path, "x\u{7}\n");
            let text = refused(&mut store, &OFFER);
            assert!(text.contains(&format!("{path} is 'x\\u{{7}}\\n', which is not a")), "{text}");
            store.set(path, &"9".repeat(4096));
            assert!(refused(&mut store, &OFFER).len() < 200, "messages are short");
        }
    }
}

#[test]
fn front_ends_without_rx_copy_are_rejected() {
    for bad in [None, Some("0"), Some("yes")] {
        let mut store = front(1);
        store.rm(&format!("{FRONT}/request-rx-copy"));
        if let Some(bad) = bad {
            store.set(&format!("{FRONT}/request-rx-copy"), bad);
        }
        assert!(refused(&mut store, &OFFER).starts_with("95 "));
    }
}

#[test]
fn control_ring_and_features() {
    let mut store = front(1);
    store.set(&format!("{FRONT}/ctrl-ring-ref"), "11");
    assert!(refused(&mut store, &OFFER).ends_with("/event-channel-ctrl is missing"));
    store.set(&format!("{FRONT}/event-channel-ctrl"), "12");
    for name in ["sg", "gso-tcpv4", "ipv6-csum-offload", "rx-notify", "smart-poll"] {
        store.set(&format!("{FRONT}/feature-{name}"), "1");
    }
    store.set(&format!("{FRONT}/feature-gso-tcpv6"), "0");
    store.set(&format!("{FRONT}/feature-no-csum-offload"), "garbage");
    let request = read(&mut store, FRONT, &OFFER).unwrap();
    assert_eq!(request.ctrl, Some(CtrlKeys { ring_ref: 11, port: 12 }));
    let names = ["sg", "gso-tcpv4", "ipv6-csum-offload", "rx-notify", "smart-poll"];
    assert_eq!(request.features.names(), names);
    let less = Offer { without: without("ctrl-ring+feature-smart-poll").unwrap(), ..OFFER };
    let request = read(&mut store, FRONT, &less).unwrap();
    assert!(request.ctrl.is_none() && !request.features.smart_poll);
}

#[test]
fn an_offer_has_0_and_1_and_no_feature_without_its_dependency() {
    let keys = |without: &str| -> Vec<(String, String)> {
        Offer { queues: 2, without: super::without(without).unwrap() }.keys()
    };
    let zeroes = |without: &str| -> Vec<String> {
        let keys = keys(without).into_iter().filter(|(_, value)| value == "0");
        keys.map(|(key, _)| key).collect()
    };
    assert_eq!(zeroes("smart-poll"), ["feature-smart-poll", "feature-rx-flip"]);
    let no_sg = ["feature-sg", "feature-gso-tcpv4", "feature-gso-tcpv6", "feature-rx-flip"];
    assert_eq!(zeroes("sg"), no_sg);
    assert_eq!(zeroes("multicast-control").len(), 3);
    assert!(keys("sg").contains(&("multi-queue-max-queues".into(), "2".into())));
    assert_eq!(without("sg+gso"), Err("gso".into()));
}

#[test]
fn loss_of_xenstore_is_not_the_guests_fault() {
    let total = {
        let mut store = front(2);
        read(&mut store, FRONT, &OFFER).unwrap();
        store.reads
    };
    for after in 1..=total {
        let mut store = front(2);
        store.fail_after = Some(after);
        assert!(matches!(read(&mut store, FRONT, &OFFER), Err(ReadError::Store(_))), "{after}");
    }
}

#[test]
fn mtus() {
    assert_eq!((mtu("68"), mtu("9216")), (Some(68), Some(9216)));
    assert_eq!((mtu("67"), mtu("9217"), mtu("70000"), mtu("x")), (None, None, None, None));
}
