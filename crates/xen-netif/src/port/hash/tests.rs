use super::*;

/// Microsoft's key and vectors ("Verifying the RSS Hash Calculation").
const KEY: [u8; 40] = [
    0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
    0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c,
    0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
];

fn steering(types: u32) -> Steering {
    Steering { algorithm: algorithm::TOEPLITZ, types, key: KEY, ..Steering::default() }
}

fn ethernet(ethertype: u16, ip: &[u8]) -> Vec<u8> {
    let mut frame = vec![2; 12];
    frame.extend(ethertype.to_be_bytes());
    frame.extend(ip);
    frame
}

fn ipv4(proto: u8, fragment: u16, options: usize) -> Vec<u8> {
    let mut ip = vec![0x45 + u8::try_from(options).unwrap(), 0, 0, 60, 0, 0];
    ip.extend(fragment.to_be_bytes());
    ip.extend([64, proto, 0, 0]);
    ip.extend([66, 9, 149, 187, 161, 142, 100, 80]);
    ip.extend(vec![1; 4 * options]);
    ip.extend(2794_u16.to_be_bytes());
    ip.extend(1766_u16.to_be_bytes());
    ip
}

fn ipv6(next: u8, behind: &[u8]) -> Vec<u8> {
    let mut ip = vec![0x60, 0, 0, 0, 0, 40, next, 64];
    let source: std::net::Ipv6Addr = "3ffe:2501:200:1fff::7".parse().unwrap();
    let destination: std::net::Ipv6Addr = "3ffe:2501:200:3::1".parse().unwrap();
    ip.extend(source.octets());
    ip.extend(destination.octets());
    ip.extend(behind);
    ip.extend(2794_u16.to_be_bytes());
    ip.extend(1766_u16.to_be_bytes());
    ip
}

fn value(types: u32, frame: &[u8]) -> Option<(u8, u32)> {
    steering(types).hash(frame).map(|h| (h.kind, h.value))
}

#[test]
fn known_hashes() {
    let v4 = ethernet(ETHERTYPE_IPV4, &ipv4(6, 0, 0));
    assert_eq!(value(hash_type::ALL, &v4), Some((1, 0x51cc_c178)));
    assert_eq!(value(hash_type::IPV4, &v4), Some((0, 0x323e_8fc2)));
    let v6 = ethernet(ETHERTYPE_IPV6, &ipv6(6, &[]));
    assert_eq!(value(hash_type::ALL, &v6), Some((3, 0x4020_7d3d)));
    assert_eq!(value(hash_type::IPV6, &v6), Some((2, 0x2cc1_8cd5)));
}

#[test]
fn most_specific_configured_type_is_used() {
    let tcp = ethernet(ETHERTYPE_IPV4, &ipv4(6, 0, 0));
    let udp = ethernet(ETHERTYPE_IPV4, &ipv4(17, 0, 0));
    let kind = |types, frame: &[u8]| value(types, frame).map(|v| v.0);
    assert_eq!(kind(hash_type::IPV4 | hash_type::IPV4_TCP, &udp), Some(0));
    assert_eq!(kind(hash_type::IPV4_TCP, &udp), None);
    assert_eq!(kind(hash_type::IPV6 | hash_type::IPV6_TCP, &tcp), None);
    assert_eq!(kind(0, &tcp), None);
    let off = Steering { algorithm: algorithm::NONE, ..steering(hash_type::ALL) };
    assert_eq!(off.hash(&tcp), None);
}

#[test]
fn fragments_have_no_ports_and_options_are_skipped() {
    for fragment in [0x2000, 1, 0x1fff] {
        let frame = ethernet(ETHERTYPE_IPV4, &ipv4(6, fragment, 0));
        assert_eq!(value(hash_type::ALL, &frame), Some((0, 0x323e_8fc2)), "{fragment:#x}");
    }
    // "Don't fragment" is not a fragment.
    let whole = ethernet(ETHERTYPE_IPV4, &ipv4(6, 0x4000, 0));
    assert_eq!(value(hash_type::ALL, &whole), Some((1, 0x51cc_c178)));
    let options = ethernet(ETHERTYPE_IPV4, &ipv4(6, 0, 3));
    assert_eq!(value(hash_type::ALL, &options), Some((1, 0x51cc_c178)));
    let routing =
        ethernet(ETHERTYPE_IPV6, &ipv6(43, &[6, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]));
    assert_eq!(value(hash_type::ALL, &routing), Some((3, 0x4020_7d3d)));
    let fragment = ethernet(ETHERTYPE_IPV6, &ipv6(44, &[6, 0, 0, 0, 0, 0, 0, 0]));
    assert_eq!(value(hash_type::ALL, &fragment), Some((2, 0x2cc1_8cd5)));
}

#[test]
fn vlan_tags_are_skipped() {
    let ip = ipv4(6, 0, 0);
    let tagged = |tags: &[u16]| {
        let mut frame = vec![2; 12];
        for tag in tags {
            frame.extend(tag.to_be_bytes());
            frame.extend([0, 7]);
        }
        frame.extend(ETHERTYPE_IPV4.to_be_bytes());
        frame.extend(&ip);
        frame
    };
    for tags in [&[ETHERTYPE_VLAN][..], &[ETHERTYPE_QINQ, ETHERTYPE_VLAN]] {
        assert_eq!(value(hash_type::ALL, &tagged(tags)), Some((1, 0x51cc_c178)));
    }
}

#[test]
fn frames_of_any_length_do_not_panic() {
    let behind = [43, 255, 0, 0, 0, 0, 0, 0];
    for frame in [
        ethernet(ETHERTYPE_IPV4, &ipv4(6, 0, 10)),
        ethernet(ETHERTYPE_IPV6, &ipv6(43, &behind)),
        ethernet(ETHERTYPE_VLAN, &[0, 0, 0x86, 0xdd, 0x60]),
        ethernet(0x0806, &[0; 28]),
    ] {
        for len in 0..=frame.len() {
            let _ = value(hash_type::ALL, &frame[..len]);
        }
    }
    let mut bad = ipv4(6, 0, 0);
    bad[0] = 0x41;
    assert_eq!(value(hash_type::ALL, &ethernet(ETHERTYPE_IPV4, &bad)), Some((0, 0x323e_8fc2)));
}

#[test]
fn key_is_padded_with_zeroes_and_an_empty_one_hashes_to_zero() {
    let data = [0xff; 36];
    assert_eq!(toeplitz(&[], &data), 0);
    let mut long = [0; 40];
    long[..16].copy_from_slice(&KEY[..16]);
    assert_eq!(toeplitz(&KEY[..16], &data), toeplitz(&long, &data));
    assert_ne!(toeplitz(&KEY, &data), toeplitz(&long, &data));
}

/// The rule of netif.h implemented differently, with the key as one long shift register.
#[test]
fn hash_equals_that_of_the_shift_register() {
    for len in [0, 1, 8, 12, 32, 36] {
        for key_len in [0, 1, 4, 16, 39, 40] {
            let data: Vec<u8> = (0..len).map(|i| (i * 37 + 11) as u8).collect();
            let mut register: Vec<bool> = Vec::new();
            for byte in KEY[..key_len].iter().copied().chain([0; 80]) {
                register.extend((0..8).rev().map(|bit| byte >> bit & 1 != 0));
            }
            let mut want = 0_u32;
            for bit in 0..8 * len {
                if data[bit / 8] >> (7 - bit % 8) & 1 != 0 {
                    want ^= register[bit..bit + 32].iter().fold(0, |w, b| w << 1 | u32::from(*b));
                }
            }
            assert_eq!(toeplitz(&KEY[..key_len], &data), want, "{len} {key_len}");
        }
    }
}

#[test]
fn queues_by_table_or_modulo() {
    let hash = |value| Some(Hash { kind: 0, algorithm: 1, value });
    let mut s = steering(hash_type::ALL);
    assert_eq!((s.queue(hash(7), 4), s.queue(None, 4), s.queue(hash(7), 0)), (3, 0, 0));
    s.mapping = vec![2, 0, 1];
    assert_eq!((s.queue(hash(4), 3), s.queue(hash(5), 3), s.queue(None, 3)), (0, 1, 2));
    assert_eq!(s.queue(None, 1), 0, "always an existing queue");
}
