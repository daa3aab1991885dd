//! Conversion of checksum and GSO between netif and the virtio-net header.
//!
//! netif only says *that* a checksum is blank, not where it is; its place is found in the headers,
//! in the private head. The two flag bits are swapped between tx and rx rings.

use ring::xen::{Gso, gso_type, rx_flag, tx_flag};
use switch::flow;
use switch::vnet::{
    DATA_VALID, GSO_ECN, GSO_NONE, GSO_TCPV4, GSO_TCPV6, NEEDS_CSUM, Offloads, VnetHdr,
};

/// Offloads that a guest may request of us.
const SENDS: Offloads = Offloads { ecn: false, uso4: false, uso6: false, ..Offloads::ALL };

/// Whether the head of a packet is needed for its virtio-net header.
pub(super) fn needs_head(flags: u16, gso: Option<Gso>) -> bool {
    flags & tx_flag::CSUM_BLANK != 0 || gso.is_some()
}

/// Whether a packet lacks the partial checksum that it should have. Some front halves forget the
/// flag; as in Linux, the checksum is then added, whatever the field contains.
pub(super) fn lacks_partial(flags: u16, gso: Option<Gso>) -> bool {
    gso.is_some() && flags & tx_flag::CSUM_BLANK == 0
}

/// The header of a packet sent with `flags`; `None` if it is invalid.
pub(super) fn from_tx(flags: u16, gso: Option<Gso>, head: &[u8], len: u32) -> Option<VnetHdr> {
    // A front end may set it (netif.h), and netback takes its word, too: a receiver behind another
    // port would get the same from Linux.
    let valid = if flags & tx_flag::DATA_VALIDATED != 0 { DATA_VALID } else { 0 };
    if !needs_head(flags, gso) {
        return Some(VnetHdr { flags: valid, ..VnetHdr::NONE });
    }
    let (csum_start, csum_offset) = flow::csum_place(head)?;
    let hdr = VnetHdr { flags: NEEDS_CSUM, csum_start, csum_offset, ..VnetHdr::NONE };
    let gso_type = match gso.map(|gso| gso.kind) {
        None => GSO_NONE,
        Some(gso_type::TCPV4) => GSO_TCPV4,
        Some(gso_type::TCPV6) => GSO_TCPV6,
        Some(_) => return None,
    };
    let hdr = VnetHdr { gso_type, gso_size: gso.map_or(0, |gso| gso.size), ..hdr };
    hdr.check(len, SENDS).ok()
}

/// Flags and GSO of a packet to a guest; `csum`: it accepts partial checksums.
pub(super) fn to_rx(hdr: &VnetHdr, csum: bool) -> (u16, Option<Gso>) {
    let blank = csum && hdr.flags & NEEDS_CSUM != 0;
    let flags = match (blank, hdr.flags & DATA_VALID != 0) {
        (true, _) => rx_flag::CSUM_BLANK | rx_flag::DATA_VALIDATED,
        (false, true) => rx_flag::DATA_VALIDATED,
        (false, false) => 0,
    };
    let kind = match hdr.gso_type & !GSO_ECN {
        GSO_TCPV4 => gso_type::TCPV4,
        GSO_TCPV6 => gso_type::TCPV6,
        _ => return (flags, None),
    };
    (flags, Some(Gso { size: hdr.gso_size, kind, features: 0 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ethernet, `tags`, and IPv4 with TCP, or IPv6 with UDP after a hop-by-hop header.
    fn packet(tags: usize, v6: bool) -> Vec<u8> {
        let mut p = vec![0; 12];
        (0..tags).for_each(|_| p.extend([0x81, 0, 0, 5]));
        if v6 {
            p.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 28, 0, 64]);
            p.extend([0; 32]);
            p.extend([17, 0, 0, 0, 0, 0, 0, 0]);
            p.extend([0; 20]);
        } else {
            p.extend([8, 0, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6]);
            p.extend([0; 10]);
            p.extend([0; 20]);
        }
        p
    }

    #[test]
    fn blank_checksum_is_found_after_tags_and_extension_headers() {
        let flags = tx_flag::CSUM_BLANK | tx_flag::DATA_VALIDATED;
        for tags in 0..3 {
            for (v6, start, offset) in [(false, 34, 16), (true, 62, 6)] {
                let head = packet(tags, v6);
                let hdr = from_tx(flags, None, &head, head.len() as u32).unwrap();
                let want = (NEEDS_CSUM, start + 4 * tags as u16, offset);
                assert_eq!((hdr.flags, hdr.csum_start, hdr.csum_offset), want);
            }
        }
    }

    #[test]
    fn blank_checksum_in_a_packet_without_one_is_rejected() {
        let mut arp = packet(0, false);
        (arp[12], arp[13]) = (8, 6);
        let mut fragment = packet(0, false);
        fragment[20] = 0x20;
        for head in [arp, fragment, vec![0; 14], packet(0, false)[..40].to_vec()] {
            assert_eq!(from_tx(tx_flag::CSUM_BLANK, None, &head, head.len() as u32), None);
            assert_eq!(from_tx(0, None, &head, 60), Some(VnetHdr::NONE));
        }
    }

    #[test]
    fn gso_needs_a_partial_checksum_with_any_flags() {
        let mut arp = packet(0, false);
        (arp[12], arp[13]) = (8, 6);
        let mut tcp6 = packet(0, true);
        tcp6[54] = 6;
        for (kind, head, want) in [
            (gso_type::TCPV4, packet(0, false), (GSO_TCPV4, 34)),
            (gso_type::TCPV6, tcp6, (GSO_TCPV6, 62)),
        ] {
            let gso = Some(Gso { size: 1448, kind, features: 0 });
            for flags in [0, tx_flag::CSUM_BLANK, tx_flag::DATA_VALIDATED] {
                let hdr = from_tx(flags, gso, &head, 3000).unwrap();
                assert_eq!((hdr.gso_type, hdr.csum_start), want);
                assert_eq!((hdr.gso_size, hdr.csum_offset, hdr.flags), (1448, 16, NEEDS_CSUM));
                assert_eq!(to_rx(&hdr, true), (3, gso));
                assert_eq!(lacks_partial(flags, gso), flags & tx_flag::CSUM_BLANK == 0);
            }
            assert_eq!(from_tx(0, gso, &arp, 3000), None);
        }
        assert!(!lacks_partial(0, None));
    }

    #[test]
    fn bits_are_swapped_between_the_rings() {
        let valid = from_tx(tx_flag::DATA_VALIDATED, None, &[], 60).unwrap();
        assert_eq!(to_rx(&valid, true).0, rx_flag::DATA_VALIDATED);
        assert_eq!((tx_flag::DATA_VALIDATED, rx_flag::DATA_VALIDATED), (2, 1));
        assert_eq!(to_rx(&VnetHdr::NONE, true), (0, None));
    }
}
