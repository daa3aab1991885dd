//! Frames that are not segmented, because their headers do not match the request.

use super::*;

/// Segments `frame` as `spec` after `change` damaged it.
fn damaged(spec: &Spec, change: impl Fn(&mut Vec<u8>, &mut VnetHdr)) -> Option<Bad> {
    let mut frame = spec.partial(spec.frame(&[1; 3000]));
    let mut hdr = spec.hdr(1000);
    change(&mut frame, &mut hdr);
    run(&frame, 128, &[], &hdr, &CSUM_ONLY).err()
}

#[test]
fn headers_that_do_not_match_the_gso_type_are_refused() {
    let v4 = Spec::TCP;
    let v6 = Spec { v6: true, ip_options: 1, ..Spec::TCP };
    let udp = Spec { udp: true, ..Spec::TCP };
    let headers = Some(Bad::Headers);
    assert_eq!(damaged(&v4, |_, _| {}), None);
    assert_eq!(damaged(&v4, |f, _| f[14] = 0x44), headers, "IPv4 header too short");
    assert_eq!(damaged(&v4, |f, _| f[14] = 0x65), headers, "version");
    assert_eq!(damaged(&v4, |f, _| f[20] = 0x20), headers, "fragment");
    assert_eq!(damaged(&v4, |f, _| f[23] = 17), headers, "protocol");
    assert_eq!(damaged(&v4, |f, _| f[46] = 0x40), headers, "TCP header too short");
    assert_eq!(damaged(&v4, |f, _| f.truncate(60)), headers, "TCP header truncated");
    assert_eq!(damaged(&v4, |f, _| f.truncate(46)), headers, "TCP header truncated further");
    assert_eq!(damaged(&v4, |f, _| f.truncate(13)), headers, "no EtherType");
    assert_eq!(damaged(&v4, |_, h| h.gso_type = GSO_TCPV6), headers);
    assert_eq!(damaged(&v4, |_, h| h.gso_type = GSO_UDP_L4), headers);
    assert_eq!(damaged(&udp, |_, h| h.gso_type = GSO_TCPV4), headers);
    assert_eq!(damaged(&v4, |_, h| h.csum_start += 1), headers);
    assert_eq!(damaged(&v4, |_, h| h.csum_offset = 6), headers);
    assert_eq!(damaged(&v4, |_, h| h.gso_type = crate::vnet::GSO_UDP), headers);
    assert_eq!(damaged(&v6, |f, _| f[20] = 44), headers, "fragment");
    assert_eq!(damaged(&v6, |f, _| f[20] = 43), None, "routing header, no segments left");
    let routed = |f: &mut Vec<u8>, _: &mut VnetHdr| {
        f[20] = 43;
        f[57] = 1;
    };
    assert_eq!(damaged(&v6, routed), headers, "routing header, segments left");
    let far = Spec { v6: true, ip_options: 60, ..Spec::TCP };
    assert_eq!(damaged(&far, |_, _| {}), headers, "too long");
    let tags = Spec { tags: 2, ..Spec::TCP };
    assert_eq!(damaged(&tags, |f, _| f[20..22].copy_from_slice(&[0x81, 0])), headers);
}

#[test]
fn a_segment_longer_than_an_ip_packet_is_refused() {
    let mut frame = Spec::TCP.frame(&[1; 1000]);
    frame.resize(66_500, 1);
    let hdr = Spec::TCP.hdr(u16::MAX);
    assert_eq!(run(&frame, 128, &[], &hdr, &NOTHING), Err(Bad::TooLong));
    let hdr = VnetHdr { gso_size: u16::MAX - 52, ..hdr };
    assert_eq!(run(&frame, 128, &[], &hdr, &NOTHING).map(|made| made.len()), Ok(2));
}
