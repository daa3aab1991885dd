//! Wire format (vhost-user.rst, "Message Specification").
//!
//! ```text
//!   0        4        8        12
//!   ┌────────┬────────┬────────┬──────────────┐  all integers in native byte order;
//!   │request │ flags  │ size   │ payload      │  descriptors are ancillary data
//!   └────────┴────────┴────────┴──────────────┘
//! ```
//! Request numbers and protocol feature bits are those of the `vhost` crate. The framing is our
//! own: a payload may be longer than its contents announce (User-Mode Linux always sends two region
//! slots).

pub use vhost::vhost_user::message::{
    BackendReq, FrontendReq, VhostUserProtocolFeatures as ProtocolFeatures,
};

/// Bytes of the header.
pub const HEADER_LEN: usize = 12;
/// Largest payload accepted. The longest message of the specification that we serve, SET_MEM_TABLE
/// with eight regions, has 264 bytes.
pub const PAYLOAD_MAX: usize = 4096;
/// Most descriptors accepted with one message; the specification allows 8.
pub const FDS_MAX: usize = 32;
/// Most regions in SET_MEM_TABLE (vhost-user.rst, "Multiple memory regions description").
pub const REGIONS_MAX: usize = 8;
/// Most bytes of configuration space in one message.
pub const CONFIG_MAX: usize = 256;
/// Bit 8 of the payload of SET_VRING_KICK, SET_VRING_CALL and SET_VRING_ERR: no descriptor.
pub const NO_FD: u64 = 1 << 8;

const VERSION_MASK: u32 = 0x3;
const VERSION: u32 = 0x1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// One message, without its descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The request, as a number: a peer may send any.
    pub request: u32,
    /// Version, reply and need_reply bits.
    pub flags: u32,
    /// Bytes after the header.
    pub payload: Vec<u8>,
}

impl Message {
    /// A request; `need_reply` only once REPLY_ACK is negotiated.
    pub fn request(request: impl Into<u32>, payload: Vec<u8>, need_reply: bool) -> Self {
        let flags = VERSION | if need_reply { NEED_REPLY } else { 0 };
        Self { request: request.into(), flags, payload }
    }

    /// The reply to a request.
    pub fn reply(request: u32, payload: Vec<u8>) -> Self {
        Self { request, flags: VERSION | REPLY, payload }
    }

    /// Whether the sender waits for an acknowledgement (REPLY_ACK).
    pub fn needs_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }

    /// Whether this is a reply.
    pub fn is_reply(&self) -> bool {
        self.flags & REPLY != 0
    }

    /// Encodes header and payload.
    pub fn to_bytes(&self) -> Vec<u8> {
        let size = u32::try_from(self.payload.len()).expect("our payloads are short");
        let mut bytes = Vec::with_capacity(HEADER_LEN + self.payload.len());
        for word in [self.request, self.flags, size] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes.extend_from_slice(&self.payload);
        bytes
    }
}

/// A header, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The request's number.
    pub request: u32,
    /// Flags, unchecked.
    pub flags: u32,
    /// Payload bytes that follow, unchecked.
    pub size: u32,
}

impl Header {
    /// Decodes the 12 bytes.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Self {
        let mut rest = Reader(bytes);
        let mut word = || rest.u32().expect("three words in a header");
        Self { request: word(), flags: word(), size: word() }
    }

    /// Whether the version is 1.
    pub fn version_ok(&self) -> bool {
        self.flags & VERSION_MASK == VERSION
    }

    /// Whether the reply bit is set.
    pub fn is_reply(&self) -> bool {
        self.flags & REPLY != 0
    }
}

/// Takes integers off the front of a payload; `None` when it ends too early.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn u32(&mut self) -> Option<u32> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_ne_bytes(*word))
    }

    fn u64(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_ne_bytes(*word))
    }
}

/// Decodes a `u64` payload.
pub fn parse_u64(payload: &[u8]) -> Option<u64> {
    Reader(payload).u64()
}

/// "A vring state description": an index and a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringState {
    /// The ring's index.
    pub index: u32,
    /// Its size, base or enable state.
    pub num: u32,
}

impl VringState {
    /// Decodes the payload.
    pub fn parse(payload: &[u8]) -> Option<Self> {
        let mut r = Reader(payload);
        Some(Self { index: r.u32()?, num: r.u32()? })
    }

    /// Encodes the payload.
    pub fn to_bytes(self) -> Vec<u8> {
        [self.index.to_ne_bytes(), self.num.to_ne_bytes()].concat()
    }
}

/// "A vring address description". Addresses are in the front-end's address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VringAddr {
    /// The ring's index.
    pub index: u32,
    /// Bit 0: log writes to the used ring.
    pub flags: u32,
    /// Descriptor table.
    pub desc: u64,
    /// Used ring, or device event suppression.
    pub used: u64,
    /// Available ring, or driver event suppression.
    pub avail: u64,
    /// Guest address for logging.
    pub log: u64,
}

impl VringAddr {
    /// Decodes the payload.
    pub fn parse(payload: &[u8]) -> Option<Self> {
        let mut r = Reader(payload);
        let (index, flags) = (r.u32()?, r.u32()?);
        let (desc, used, avail, log) = (r.u64()?, r.u64()?, r.u64()?, r.u64()?);
        Some(Self { index, flags, desc, used, avail, log })
    }

    /// Encodes the payload.
    pub fn to_bytes(self) -> Vec<u8> {
        let mut bytes = [self.index.to_ne_bytes(), self.flags.to_ne_bytes()].concat();
        for word in [self.desc, self.used, self.avail, self.log] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes
    }
}

/// Bit 0 of [`VringAddr::flags`], VHOST_VRING_F_LOG: writes to the used ring are logged at
/// [`VringAddr::log`].
pub const VRING_F_LOG: u32 = 1;

/// "Log description": a dirty log in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogRegion {
    /// Length in bytes; eight pages a byte.
    pub size: u64,
    /// Offset in its file, in bytes.
    pub offset: u64,
}

impl LogRegion {
    /// Decodes the payload.
    pub fn parse(payload: &[u8]) -> Option<Self> {
        let mut r = Reader(payload);
        Some(Self { size: r.u64()?, offset: r.u64()? })
    }

    /// Encodes the payload.
    pub fn to_bytes(self) -> Vec<u8> {
        [self.size.to_ne_bytes(), self.offset.to_ne_bytes()].concat()
    }
}

/// One memory region, as SET_MEM_TABLE and ADD_MEM_REG carry it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemRegion {
    /// First guest physical address.
    pub guest_addr: u64,
    /// Length in bytes.
    pub size: u64,
    /// First address in the front-end's address space.
    pub user_addr: u64,
    /// Offset in its file, in bytes.
    pub mmap_offset: u64,
}

impl MemRegion {
    fn read(r: &mut Reader<'_>) -> Option<Self> {
        let (guest_addr, size, user_addr, mmap_offset) = (r.u64()?, r.u64()?, r.u64()?, r.u64()?);
        Some(Self { guest_addr, size, user_addr, mmap_offset })
    }

    fn write(self, bytes: &mut Vec<u8>) {
        for word in [self.guest_addr, self.size, self.user_addr, self.mmap_offset] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
    }

    /// Decodes the payload of ADD_MEM_REG or REM_MEM_REG: eight bytes of padding, one region.
    pub fn parse_single(payload: &[u8]) -> Option<Self> {
        let mut r = Reader(payload);
        r.u64()?;
        Self::read(&mut r)
    }

    /// The payload of ADD_MEM_REG or REM_MEM_REG.
    pub fn to_single_bytes(self) -> Vec<u8> {
        let mut bytes = vec![0; 8];
        self.write(&mut bytes);
        bytes
    }

    /// The number of regions a SET_MEM_TABLE payload announces.
    pub fn announced(payload: &[u8]) -> Option<u32> {
        Reader(payload).u32()
    }

    /// Decodes the announced regions of SET_MEM_TABLE. Bytes beyond them are ignored: User-Mode
    /// Linux always sends two slots.
    pub fn parse_table(payload: &[u8]) -> Option<Vec<Self>> {
        let mut r = Reader(payload);
        let count = usize::try_from(r.u64()? & 0xffff_ffff).ok()?;
        // Not allocated before the length is checked: `count` is from the peer.
        if count > payload.len() / 32 {
            return None;
        }
        (0..count).map(|_| Self::read(&mut r)).collect()
    }

    /// The payload of SET_MEM_TABLE.
    pub fn table_to_bytes(regions: &[Self]) -> Vec<u8> {
        let count = u32::try_from(regions.len()).expect("a handful of regions");
        let mut bytes = [count.to_ne_bytes(), [0; 4]].concat();
        regions.iter().for_each(|region| region.write(&mut bytes));
        bytes
    }
}

/// "Virtio device config space": a window of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigWindow {
    /// First byte.
    pub offset: u32,
    /// Length in bytes.
    pub size: u32,
    /// 1: live migration.
    pub flags: u32,
    /// The bytes received.
    pub bytes: Vec<u8>,
}

impl ConfigWindow {
    /// Decodes the payload.
    pub fn parse(payload: &[u8]) -> Option<Self> {
        let mut r = Reader(payload);
        let (offset, size, flags) = (r.u32()?, r.u32()?, r.u32()?);
        Some(Self { offset, size, flags, bytes: r.0.to_vec() })
    }

    /// Encodes the payload.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(12 + self.bytes.len());
        for word in [self.offset, self.size, self.flags] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes.extend_from_slice(&self.bytes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_messages_decode_to_the_same() {
        let message = Message::request(FrontendReq::SET_FEATURES, vec![1, 2, 3], true);
        let bytes = message.to_bytes();
        let header = Header::parse(bytes[..HEADER_LEN].try_into().unwrap());
        assert_eq!(header, Header { request: 2, flags: 9, size: 3 });
        assert!(header.version_ok() && !header.is_reply() && message.needs_reply());
        assert!(Message::reply(1, Vec::new()).is_reply());

        let state = VringState { index: 3, num: 256 };
        assert_eq!(VringState::parse(&state.to_bytes()), Some(state));
        let addr = VringAddr { index: 1, flags: 2, desc: 3, used: 4, avail: 5, log: 6 };
        assert_eq!(VringAddr::parse(&addr.to_bytes()), Some(addr));
        let region = MemRegion { guest_addr: 1, size: 2, user_addr: 3, mmap_offset: 4 };
        assert_eq!(MemRegion::parse_single(&region.to_single_bytes()), Some(region));
        let table = [region, MemRegion { guest_addr: 9, ..region }];
        let bytes = MemRegion::table_to_bytes(&table);
        assert_eq!(MemRegion::parse_table(&bytes).as_deref(), Some(&table[..]));
        let log = LogRegion { size: 1, offset: 2 };
        assert_eq!(LogRegion::parse(&log.to_bytes()), Some(log));
        let config = ConfigWindow { offset: 0, size: 2, flags: 0, bytes: vec![7, 8] };
        assert_eq!(ConfigWindow::parse(&config.to_bytes()), Some(config));
    }

    #[test]
    fn short_payloads_are_none_and_long_tables_are_read() {
        assert_eq!(parse_u64(&[0; 7]), None);
        assert_eq!(VringState::parse(&[0; 7]), None);
        assert_eq!(VringAddr::parse(&[0; 39]), None);
        assert_eq!(LogRegion::parse(&[0; 15]), None);
        assert_eq!(MemRegion::parse_single(&[0; 39]), None);
        assert_eq!(ConfigWindow::parse(&[0; 11]), None);
        let region = MemRegion { guest_addr: 1, size: 2, user_addr: 3, mmap_offset: 4 };
        let mut bytes = MemRegion::table_to_bytes(&[region]);
        assert_eq!(MemRegion::parse_table(&bytes[..bytes.len() - 1]), None);
        bytes.extend_from_slice(&[0; 32]);
        assert_eq!(bytes.len(), 72);
        assert_eq!(MemRegion::parse_table(&bytes), Some(vec![region]));
        bytes[..4].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert_eq!(MemRegion::parse_table(&bytes), None);
    }
}
