//! Frames that identify their sender, and whose contents can be verified.

/// Ethernet, IPv4 and UDP headers, so that the switch sees flows; tag and number follow.
const HEADERS_LEN: usize = 14 + 20 + 8;
/// Length of all that precedes the payload.
pub const FIXED_LEN: usize = HEADERS_LEN + 16;

/// Destination of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum To {
    /// One guest, by index.
    One(usize),
    /// Broadcast.
    All,
}

/// Contents of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    pub to: To,
    /// Index of the sender.
    pub from: usize,
    /// Flow between sender and destination: the UDP source port.
    pub flow: u16,
    /// Secret of the sender.
    pub tag: u64,
    /// Sequence number among all frames of the sender, from 0.
    pub number: u64,
    /// Length of the payload, after the fixed part.
    pub payload: usize,
}

/// MAC address of guest `index`.
pub fn mac(index: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, index as u8]
}

/// The guest whose MAC address is at the start of `bytes`.
pub fn guest_of(bytes: &[u8]) -> Option<usize> {
    let mac = bytes.get(..6)?;
    (mac[..5] == [2, 0, 0, 0, 0]).then(|| usize::from(mac[5]))
}

impl Frame {
    /// Encodes the frame, from the destination MAC on.
    pub fn bytes(&self) -> Vec<u8> {
        let mut b = Vec::with_capacity(FIXED_LEN + self.payload);
        let (to_mac, to_ip) = match self.to {
            To::One(to) => (mac(to), [10, 0, 0, to as u8]),
            To::All => ([0xff; 6], [0xff; 4]),
        };
        let udp_len = (FIXED_LEN - 34 + self.payload) as u16;
        b.extend(to_mac);
        b.extend(mac(self.from));
        b.extend([0x08, 0x00, 0x45, 0]);
        b.extend((udp_len + 20).to_be_bytes());
        b.extend([0, 0, 0, 0, 64, 17, 0, 0]);
        b.extend([10, 0, 0, self.from as u8]);
        b.extend(to_ip);
        b.extend(self.flow.to_be_bytes());
        b.extend(4789_u16.to_be_bytes());
        b.extend(udp_len.to_be_bytes());
        b.extend([0, 0]);
        b.extend(self.tag.to_le_bytes());
        b.extend(self.number.to_le_bytes());
        let seed = self.tag ^ self.number.wrapping_mul(13);
        b.extend((0..self.payload as u64).map(|i| seed.wrapping_add(i * 7) as u8));
        b
    }

    /// Decodes a frame; `None` unless it is exactly what [`bytes`](Self::bytes) encodes.
    pub fn parse(frame: &[u8]) -> Option<Self> {
        let le = |at: usize| {
            frame.get(at..at + 8).map(|b| u64::from_le_bytes(b.try_into().expect("8 bytes")))
        };
        let to = if frame.get(..6)? == [0xff; 6] { To::All } else { To::One(guest_of(frame)?) };
        let parsed = Self {
            to,
            from: guest_of(frame.get(6..)?)?,
            flow: u16::from_be_bytes(frame.get(34..36)?.try_into().expect("2 bytes")),
            tag: le(HEADERS_LEN)?,
            number: le(HEADERS_LEN + 8)?,
            payload: frame.len().checked_sub(FIXED_LEN)?,
        };
        (parsed.bytes() == frame).then_some(parsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_accepts_only_what_bytes_encodes() {
        for to in [To::One(3), To::All] {
            let tag = 0x1234_5678_9abc;
            let frame = Frame { to, from: 7, flow: 9, tag, number: 5, payload: 100 };
            let mut bytes = frame.bytes();
            assert_eq!(Frame::parse(&bytes), Some(frame));
            assert_eq!(Frame::parse(&bytes[..20]), None);
            *bytes.last_mut().unwrap() ^= 1;
            assert_eq!(Frame::parse(&bytes), None);
        }
    }
}
