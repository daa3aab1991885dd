//! A virtio-net header and a frame: an accepted header must be valid.
//!
//! ```text
//!   offloads  header (10 bytes)  frame...
//! ```

use switch::vnet::{
    BadHdr, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, NEEDS_CSUM, Offloads, VnetHdr,
};

use crate::Bytes;

/// Must not fail for any bytes.
pub fn run(data: &[u8]) {
    let _ = explore(data);
}

/// As [`run`]; returns the checked header.
///
/// # Errors
/// [`BadHdr`], for a header that was refused.
pub fn explore(data: &[u8]) -> Result<VnetHdr, BadHdr> {
    let mut bytes = Bytes(data);
    let bits = bytes.u8();
    let may = Offloads {
        csum: bits & 1 != 0,
        csum_v4_only: bits & 64 != 0,
        tso4: bits & 2 != 0,
        tso6: bits & 4 != 0,
        ecn: bits & 8 != 0,
        uso4: bits & 16 != 0,
        uso6: bits & 32 != 0,
    };
    let mut raw = [0; VnetHdr::LEN];
    let given = bytes.take(VnetHdr::LEN);
    raw[..given.len()].copy_from_slice(given);
    let hdr = VnetHdr::parse(&raw);
    assert_eq!(hdr.bytes(), raw);
    let len = bytes.0.len() as u32;
    let checked = hdr.check(len, may)?;
    assert_eq!(checked.check(len, may), Ok(checked), "a checked header passes again");
    assert_eq!(checked.is_plain(), hdr.is_plain());
    if checked.flags & NEEDS_CSUM != 0 {
        let at = u32::from(checked.csum_start) + u32::from(checked.csum_offset);
        assert!(may.csum && at + 2 <= len, "the checksum is inside the frame");
    }
    let gso = checked.gso_type & !GSO_ECN;
    if gso != GSO_NONE {
        assert!(checked.gso_size > 0 && checked.flags & NEEDS_CSUM != 0);
    }
    match gso {
        GSO_NONE => assert_eq!(checked.gso_size, 0),
        GSO_TCPV4 => assert!(may.tso4),
        GSO_TCPV6 => assert!(may.tso6),
        GSO_UDP_L4 => assert!(may.uso4 || may.uso6),
        other => panic!("GSO type {other} was accepted"),
    }
    assert!(checked.gso_type & GSO_ECN == 0 || may.ecn);
    Ok(checked)
}

/// Valid headers as start inputs.
pub fn seeds() -> Vec<Vec<u8>> {
    let tso = |gso_type| VnetHdr {
        flags: NEEDS_CSUM,
        gso_type,
        hdr_len: 54,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
    };
    let all = [GSO_NONE, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, GSO_TCPV4 | GSO_ECN].map(tso);
    let input = |hdr: VnetHdr| {
        let mut bytes = vec![0xff];
        bytes.extend(hdr.bytes());
        bytes.extend([0; 90]);
        bytes
    };
    all.into_iter().chain([VnetHdr::NONE]).map(input).collect()
}
