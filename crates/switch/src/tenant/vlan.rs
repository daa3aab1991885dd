//! VLANs of a port: which it carries, and with which tag (IEEE 802.1Q).
//!
//! Only the outermost tag counts, and only with EtherType 0x8100: a service tag (0x88a8) and a
//! second tag are payload. A tag is changed in a private copy of the head; the rest of the frame
//! stays in the sender's memory:
//!
//! ```text
//!   untagged    | dst src |      | type ...        csum_start ──────▶
//!   tagged      | dst src | 8100 | tci | type ...      csum_start + 4 ──▶
//! ```

use crate::flow::{ETHERTYPE_VLAN, be16};
use crate::frame::RETAGGED_LEN;
use crate::vnet::{NEEDS_CSUM, VnetHdr};

/// Offset of a tag: after both addresses.
const TAG_AT: usize = 12;
/// Length of a tag.
const TAG_LEN: usize = 4;
/// VLAN ids: 12 bits.
const VIDS: usize = 4096;

/// A set of VLAN ids.
#[derive(Clone, PartialEq, Eq)]
pub struct Vids(Box<[u64; VIDS / 64]>);

impl FromIterator<u16> for Vids {
    /// Ids above 4095 are ignored.
    fn from_iter<I: IntoIterator<Item = u16>>(vids: I) -> Self {
        let mut set = Box::new([0; VIDS / 64]);
        for vid in vids.into_iter().map(usize::from).filter(|vid| *vid < VIDS) {
            set[vid / 64] |= 1 << (vid % 64);
        }
        Self(set)
    }
}

impl std::fmt::Debug for Vids {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_set().entries((0..VIDS as u16).filter(|vid| self.contains(*vid))).finish()
    }
}

impl Vids {
    /// Whether `vid` is in it.
    pub fn contains(&self, vid: u16) -> bool {
        self.0.get(usize::from(vid) / 64).is_some_and(|word| word & 1 << (vid % 64) != 0)
    }
}

/// VLANs of a port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Vlan {
    /// All VLANs, tags as they are; untagged frames are in VLAN 0.
    #[default]
    Transparent,
    /// One VLAN, without tags.
    Access(u16),
    /// Several VLANs, tagged; the native one without tags.
    Trunk {
        /// VLANs with tags.
        vids: Vids,
        /// VLAN of untagged frames; `None`: they are dropped.
        native: Option<u16>,
    },
}

/// The change of a frame's outermost tag for one destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tagging {
    /// None.
    Keep,
    /// A tag with this VLAN id is inserted.
    Push(u16),
    /// The tag gets this VLAN id; its priority stays.
    Rewrite(u16),
    /// The tag is removed.
    Pop,
}

/// Control field of the outermost tag.
#[inline]
pub(super) fn tci(head: &[u8]) -> Option<u16> {
    if be16(head, TAG_AT)? == ETHERTYPE_VLAN { be16(head, TAG_AT + 2) } else { None }
}

/// Offset of what follows the addresses, the outermost tag and the EtherType.
pub(super) fn end_of_tag(head: &[u8]) -> usize {
    TAG_AT + 2 + if tci(head).is_some() { TAG_LEN } else { 0 }
}

impl Vlan {
    /// VLAN of a frame that the port's peer sent; `None`: the port does not carry it. A priority
    /// tag, whose id is 0, is in the VLAN of untagged frames (IEEE 802.1Q, 6.9.1).
    pub fn classify(&self, head: &[u8]) -> Option<u16> {
        let tag = tci(head).map_or(0, |tci| tci & 0xfff);
        match self {
            Self::Transparent => Some(tag),
            _ if tag == 0 => self.untagged(),
            Self::Access(_) => None,
            Self::Trunk { .. } => self.carries(tag).then_some(tag),
        }
    }

    /// VLAN of untagged frames, if the port accepts them and has VLANs.
    pub fn untagged(&self) -> Option<u16> {
        match self {
            Self::Transparent => None,
            Self::Access(vid) => Some(*vid),
            Self::Trunk { native, .. } => *native,
        }
    }

    /// Whether the port carries VLAN `vid`.
    pub fn carries(&self, vid: u16) -> bool {
        match self {
            Self::Transparent => true,
            Self::Access(own) => *own == vid,
            Self::Trunk { vids, native } => *native == Some(vid) || vids.contains(vid),
        }
    }

    /// The change of tag that a frame of VLAN `vid` needs when it leaves by this port.
    pub fn tagging(&self, vid: u16, head: &[u8]) -> Tagging {
        let untagged = match self {
            Self::Transparent => vid == 0,
            Self::Access(_) => true,
            Self::Trunk { native, .. } => *native == Some(vid),
        };
        match (untagged, tci(head)) {
            // A priority tag of a frame without a VLAN stays.
            (true, None) => Tagging::Keep,
            (true, Some(_)) if *self == Self::Transparent => Tagging::Keep,
            (true, Some(_)) => Tagging::Pop,
            (false, None) => Tagging::Push(vid),
            (false, Some(tci)) if tci & 0xfff == vid => Tagging::Keep,
            (false, Some(_)) => Tagging::Rewrite(vid),
        }
    }
}

impl Vlan {
    /// Whether the change would leave a trunk's peer with a second tag as the outermost one, in the
    /// place of the native VLAN's: the frame would change its VLAN, by the sender's choice.
    pub(crate) fn exposes_tag(&self, tagging: Tagging, head: &[u8]) -> bool {
        tagging == Tagging::Pop
            && matches!(self, Self::Trunk { .. })
            && be16(head, TAG_AT + TAG_LEN) == Some(ETHERTYPE_VLAN)
    }
}

impl Tagging {
    /// Writes `head` with the changed tag to `out`. Returns its length, and the offload request
    /// with offsets moved; `None`: the head is too short, or an offset would not be in 16 bits.
    pub(crate) fn apply(
        self,
        head: &[u8],
        hdr: &VnetHdr,
        out: &mut [u8; RETAGGED_LEN],
    ) -> Option<(usize, VnetHdr)> {
        let (addresses, rest) = head.split_at_checked(TAG_AT)?;
        let rest = match self {
            Self::Pop | Self::Rewrite(_) => rest.split_at_checked(TAG_LEN)?.1,
            Self::Keep | Self::Push(_) => rest,
        };
        out[..TAG_AT].copy_from_slice(addresses);
        let mut at = TAG_AT;
        if let Self::Push(vid) | Self::Rewrite(vid) = self {
            let priority = if self == Self::Push(vid) { 0 } else { tci(head)? & 0xf000 };
            out[at..at + 2].copy_from_slice(&ETHERTYPE_VLAN.to_be_bytes());
            out[at + 2..at + 4].copy_from_slice(&(priority | vid).to_be_bytes());
            at += TAG_LEN;
        }
        out.get_mut(at..at + rest.len())?.copy_from_slice(rest);
        let hdr = if hdr.is_plain() { *hdr } else { self.shift(hdr)? };
        Some((at + rest.len(), hdr))
    }

    /// Moves the offsets of an offload request, which are behind the tag in an
    /// [admitted](super::Sender::admit) frame.
    fn shift(self, hdr: &VnetHdr) -> Option<VnetHdr> {
        let moved = |offset: u16| match self {
            Self::Push(_) => offset.checked_add(TAG_LEN as u16),
            Self::Pop => offset.checked_sub(TAG_LEN as u16),
            Self::Keep | Self::Rewrite(_) => Some(offset),
        };
        let csum_start = if hdr.flags & NEEDS_CSUM != 0 { moved(hdr.csum_start)? } else { 0 };
        // A hint of the sender: 0, or the length of all headers.
        let hdr_len = moved(hdr.hdr_len).filter(|_| hdr.hdr_len > 0).unwrap_or(0);
        Some(VnetHdr { csum_start, hdr_len, ..*hdr })
    }

    /// Change of the frame's length in bytes.
    pub(crate) fn grown(self, len: u32) -> u32 {
        match self {
            Self::Push(_) => len + TAG_LEN as u32,
            Self::Pop => len.saturating_sub(TAG_LEN as u32),
            Self::Keep | Self::Rewrite(_) => len,
        }
    }
}
