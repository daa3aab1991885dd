//! The virtio-net header (virtio 1.3, 5.1.6), as offload metadata of a frame inside the switch.
//!
//! Every port uses it: virtio rings have it before each frame, as does a TAP with IFF_VNET_HDR. A
//! port without offloads uses [`VnetHdr::NONE`].

use crate::account::burst::MADE_MAX;

/// `flags`: store the checksum from `csum_start` on at `csum_start + csum_offset`.
pub const NEEDS_CSUM: u8 = 1;
/// `flags`: the checksum has been verified.
pub const DATA_VALID: u8 = 2;

/// `gso_type` without its ECN bit.
pub const GSO_NONE: u8 = 0;
/// TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// UDP fragmentation (UFO); never offered, so never legal.
pub const GSO_UDP: u8 = 3;
/// TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// UDP segmentation (USO), either IP version.
pub const GSO_UDP_L4: u8 = 5;
/// The TCP flow uses ECN: CWR is set in the first segment only.
pub const GSO_ECN: u8 = 0x80;

/// A virtio-net header without `num_buffers`, in host byte order. Its fields are in the order of
/// the wire, so that [`words`](Self::words) are loads.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VnetHdr {
    /// [`NEEDS_CSUM`], [`DATA_VALID`].
    pub flags: u8,
    /// One of the `GSO_` types, perhaps with [`GSO_ECN`].
    pub gso_type: u8,
    /// Length of all headers, as set by the sender; a hint, never trusted.
    pub hdr_len: u16,
    /// Payload of each segment, in bytes.
    pub gso_size: u16,
    /// Offset at which checksumming starts, from the start of the frame.
    pub csum_start: u16,
    /// Offset of the checksum, from `csum_start`.
    pub csum_offset: u16,
}

/// Reason to reject a header. The frame is dropped and counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadHdr {
    /// The checksum field would be outside the frame.
    CsumOutside,
    /// `gso_type` is unknown, or was not negotiated.
    GsoType,
    /// GSO without NEEDS_CSUM, with segment size zero, or with more segments than a burst may make
    /// ([`MADE_MAX`]).
    GsoSize,
}

/// Set of offloads that one side accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// Partial checksums (CSUM or GUEST_CSUM).
    pub csum: bool,
    /// Partial checksums over IPv4 only: Xen's netif negotiates them separately.
    pub csum_v4_only: bool,
    /// TCP segmentation over IPv4.
    pub tso4: bool,
    /// TCP segmentation over IPv6.
    pub tso6: bool,
    /// ECN in TCP segmentation.
    pub ecn: bool,
    /// UDP segmentation over IPv4.
    pub uso4: bool,
    /// UDP segmentation over IPv6.
    pub uso6: bool,
}

impl Offloads {
    /// All of them.
    pub const ALL: Self = Self {
        csum: true,
        csum_v4_only: false,
        tso4: true,
        tso6: true,
        ecn: true,
        uso4: true,
        uso6: true,
    };

    /// Whether all of `other` are included.
    pub fn cover(&self, other: &Self) -> bool {
        (self.csum || !other.csum)
            && (!self.csum_v4_only || !other.csum || other.csum_v4_only)
            && (self.tso4 || !other.tso4)
            && (self.tso6 || !other.tso6)
            && (self.ecn || !other.ecn)
            && (self.uso4 || !other.uso4)
            && (self.uso6 || !other.uso6)
    }

    /// The intersection with `other`.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self {
            csum: self.csum && other.csum,
            csum_v4_only: self.csum_v4_only || other.csum_v4_only,
            tso4: self.tso4 && other.tso4,
            tso6: self.tso6 && other.tso6,
            ecn: self.ecn && other.ecn,
            uso4: self.uso4 && other.uso4,
            uso6: self.uso6 && other.uso6,
        }
    }

    /// Whether a receiver that accepts these can take a frame with the checked header `hdr`
    /// unchanged, without parsing the frame: checksums and UDP segmentation must be accepted for
    /// both IP versions.
    #[inline]
    pub fn take(&self, hdr: &VnetHdr) -> bool {
        let gso = match hdr.gso_type & !GSO_ECN {
            GSO_NONE => true,
            GSO_TCPV4 => self.tso4,
            GSO_TCPV6 => self.tso6,
            _ => self.uso4 && self.uso6,
        };
        gso && (self.csum && !self.csum_v4_only || hdr.flags & NEEDS_CSUM == 0)
            && (self.ecn || hdr.gso_type & GSO_ECN == 0)
    }
}

impl VnetHdr {
    /// Header of a frame without offloads.
    pub const NONE: Self =
        Self { flags: 0, gso_type: 0, hdr_len: 0, gso_size: 0, csum_start: 0, csum_offset: 0 };
    /// Length in bytes on a ring of a legacy guest without MRG_RXBUF.
    pub const LEN: usize = 10;

    /// Decodes the wire format (little-endian).
    #[inline]
    pub fn parse(b: &[u8; Self::LEN]) -> Self {
        let le = |i: usize| u16::from_le_bytes([b[i], b[i + 1]]);
        Self {
            flags: b[0],
            gso_type: b[1],
            hdr_len: le(2),
            gso_size: le(4),
            csum_start: le(6),
            csum_offset: le(8),
        }
    }

    /// Bits of `flags` in the first of its [`words`](Self::words).
    pub const FLAGS: u64 = 0xff;

    /// Encodes as little-endian words: the first eight bytes, and the last two.
    #[inline]
    pub fn words(&self) -> (u64, u16) {
        let word = u64::from(self.flags)
            | u64::from(self.gso_type) << 8
            | u64::from(self.hdr_len) << 16
            | u64::from(self.gso_size) << 32
            | u64::from(self.csum_start) << 48;
        (word, self.csum_offset)
    }

    /// Encodes the wire format (little-endian).
    #[inline]
    pub fn bytes(&self) -> [u8; Self::LEN] {
        let (word, last) = self.words();
        Self::bytes_of(word, last)
    }

    /// Encodes [`words`](Self::words), of which some bits may be cleared.
    #[inline]
    pub fn bytes_of(word: u64, last: u16) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[..8].copy_from_slice(&word.to_le_bytes());
        b[8..].copy_from_slice(&last.to_le_bytes());
        b
    }

    /// Whether the frame has no offloads: a complete frame of at most the MTU.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.flags & NEEDS_CSUM == 0 && self.gso_type == GSO_NONE
    }

    /// Offset of the checksum that the receiver has to store, which may be anywhere in the frame;
    /// `None`: the frame has no offloads.
    #[inline]
    pub(crate) fn csum_at(&self) -> Option<usize> {
        let at = usize::from(self.csum_start) + usize::from(self.csum_offset);
        (!self.is_plain()).then_some(at)
    }

    /// Checks the header of a frame of `len` bytes against the negotiated offloads, and returns it
    /// with all ignored fields set to zero. [`DATA_VALID`] is kept: a port whose peer may not set
    /// it clears it before.
    ///
    /// # Errors
    /// [`BadHdr`]: the frame must be dropped.
    #[inline]
    pub fn check(self, len: u32, may: Offloads) -> Result<Self, BadHdr> {
        // The usual frame has no offloads.
        if self.flags & NEEDS_CSUM == 0 && self.gso_type == GSO_NONE {
            return Ok(Self { flags: self.flags & DATA_VALID, ..Self::NONE });
        }
        self.check_offload(len, may)
    }

    fn check_offload(self, len: u32, may: Offloads) -> Result<Self, BadHdr> {
        let mut hdr = Self { flags: self.flags & (NEEDS_CSUM | DATA_VALID), ..self };
        if hdr.flags & NEEDS_CSUM != 0 {
            let end = u32::from(hdr.csum_start) + u32::from(hdr.csum_offset) + 2;
            if !may.csum || end > len {
                return Err(BadHdr::CsumOutside);
            }
        }
        let known = match hdr.gso_type & !GSO_ECN {
            GSO_NONE => hdr.gso_type == GSO_NONE,
            GSO_TCPV4 => may.tso4,
            GSO_TCPV6 => may.tso6,
            GSO_UDP_L4 => (may.uso4 || may.uso6) && hdr.gso_type & GSO_ECN == 0,
            _ => false,
        };
        // A driver may set the ECN bit only if it negotiated ECN.
        if !known || (hdr.gso_type & GSO_ECN != 0 && !may.ecn) {
            return Err(BadHdr::GsoType);
        }
        if hdr.gso_type == GSO_NONE {
            hdr.gso_size = 0;
        } else if hdr.gso_size == 0 || hdr.flags & NEEDS_CSUM == 0 {
            return Err(BadHdr::GsoSize);
        }
        // At least a UDP header precedes the payload.
        let payload = len.saturating_sub(u32::from(hdr.csum_start) + 8);
        if hdr.gso_size > 0 && payload.div_ceil(hdr.gso_size.into()) > MADE_MAX as u32 {
            return Err(BadHdr::GsoSize);
        }
        Ok(hdr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::GSO_LEN_MAX;

    const TSO: VnetHdr = VnetHdr {
        flags: NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54,
        gso_size: 1448,
        csum_start: 34,
        csum_offset: 16,
    };

    #[test]
    fn bytes_and_parse_are_inverse() {
        assert_eq!(VnetHdr::parse(&TSO.bytes()), TSO);
    }

    #[test]
    fn offloads_not_negotiated_are_refused() {
        assert_eq!(TSO.check(3000, Offloads::ALL), Ok(TSO));
        let no_tso = Offloads { tso4: false, ..Offloads::ALL };
        assert_eq!(TSO.check(3000, no_tso), Err(BadHdr::GsoType));
        let ecn = VnetHdr { gso_type: GSO_TCPV4 | GSO_ECN, ..TSO };
        assert!(ecn.check(3000, Offloads::ALL).is_ok());
        assert_eq!(ecn.check(3000, Offloads { ecn: false, ..Offloads::ALL }), Err(BadHdr::GsoType));
        assert_eq!(
            VnetHdr { gso_type: GSO_UDP, ..TSO }.check(3000, Offloads::ALL),
            Err(BadHdr::GsoType)
        );
    }

    #[test]
    fn checksum_beyond_the_frame_is_refused() {
        let hdr = VnetHdr { gso_type: 0, gso_size: 0, ..TSO };
        assert!(hdr.check(52, Offloads::ALL).is_ok());
        assert_eq!(hdr.check(51, Offloads::ALL), Err(BadHdr::CsumOutside));
        let far = VnetHdr { csum_start: u16::MAX, csum_offset: u16::MAX, ..hdr };
        assert_eq!(far.check(65000, Offloads::ALL), Err(BadHdr::CsumOutside));
    }

    #[test]
    fn gso_without_size_or_checksum_is_refused() {
        let zero = VnetHdr { gso_size: 0, ..TSO };
        assert_eq!(zero.check(3000, Offloads::ALL), Err(BadHdr::GsoSize));
        let bare = VnetHdr { flags: 0, ..TSO };
        assert_eq!(bare.check(3000, Offloads::ALL), Err(BadHdr::GsoSize));
    }

    /// Issue 14, row 8.
    #[test]
    fn gso_size_that_makes_more_segments_than_a_burst_may_is_refused() {
        let of = |gso_size| VnetHdr { gso_size, ..TSO };
        // The longest frame, in the smallest useful segments: payload from byte 54 on.
        assert!(of(64).check(GSO_LEN_MAX, Offloads::ALL).is_ok());
        for (size, len) in [(63, GSO_LEN_MAX), (1, 3000), (32, 34_000)] {
            assert_eq!(of(size).check(len, Offloads::ALL), Err(BadHdr::GsoSize));
        }
        assert!(of(1).check(1000, Offloads::ALL).is_ok());
        assert!(of(u16::MAX).check(60, Offloads::ALL).is_ok());
    }

    #[test]
    fn frame_passes_unchanged_only_to_a_receiver_with_all_its_offloads() {
        let all = Offloads::ALL;
        let udp = VnetHdr { gso_type: GSO_UDP_L4, ..TSO };
        let ecn = VnetHdr { gso_type: GSO_TCPV6 | GSO_ECN, ..TSO };
        let csum = VnetHdr { gso_type: GSO_NONE, gso_size: 0, ..TSO };
        for hdr in [TSO, udp, ecn, csum, VnetHdr::NONE] {
            assert!(all.take(&hdr));
        }
        let lacks = [
            (TSO, Offloads { tso4: false, ..all }),
            (TSO, Offloads { csum: false, ..all }),
            (csum, Offloads { csum: false, ..all }),
            (csum, Offloads { csum_v4_only: true, ..all }),
            (udp, Offloads { uso4: false, ..all }),
            (udp, Offloads { uso6: false, ..all }),
            (ecn, Offloads { tso6: false, ..all }),
            (ecn, Offloads { ecn: false, ..all }),
        ];
        for (hdr, lacking) in lacks {
            assert!(!lacking.take(&hdr), "{hdr:?} {lacking:?}");
            assert!(all.cover(&lacking) && !lacking.cover(&all) && lacking.cover(&lacking));
            assert_eq!(all.and(&lacking), lacking);
        }
        let verified = VnetHdr { flags: DATA_VALID, ..VnetHdr::NONE };
        assert!(Offloads::default().take(&verified));
    }

    #[test]
    fn fields_without_their_flag_are_cleared() {
        let junk = VnetHdr {
            flags: 0xfc,
            gso_type: 0,
            hdr_len: 9,
            gso_size: 9,
            csum_start: 9,
            csum_offset: 9,
        };
        assert_eq!(junk.check(60, Offloads::default()), Ok(VnetHdr::NONE));
    }
}
