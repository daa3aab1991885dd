//! Frames that tell who sent them, and whether they arrived whole.

/// Length of the virtio-net header before each frame.
pub const HDR_LEN: usize = 12;
/// From the destination MAC to the end of the tag, flow and number.
const FIXED_LEN: usize = 14 + 16;
/// Most bytes of a frame with its header; what fits a receive buffer.
pub const ROOM: usize = 2048;

/// What a frame says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Receiver, as an index of guests.
    pub to: usize,
    /// Sender, likewise.
    pub from: usize,
    /// The sender's secret; no other guest can write it.
    pub tag: u64,
    /// Number within the flow, from 0 on.
    pub number: u64,
    /// Payload bytes after the fixed part.
    pub payload: usize,
}

/// The MAC of guest `index`.
fn mac(index: usize) -> [u8; 6] {
    [2, 0, 0, 0, 0, index as u8]
}

/// The guest that a frame (without virtio-net header) is for.
pub fn destination(frame: &[u8]) -> Option<usize> {
    let mac = frame.get(..6)?;
    (mac[..5] == [2, 0, 0, 0, 0]).then(|| usize::from(mac[5]))
}

impl Frame {
    /// The bytes, virtio-net header included.
    pub fn bytes(&self) -> Vec<u8> {
        let mut b = vec![0; HDR_LEN];
        b.extend(mac(self.to));
        b.extend(mac(self.from));
        b.extend([0x88, 0xb5]);
        b.extend(self.tag.to_le_bytes());
        b.extend(self.number.to_le_bytes());
        b.extend((0..self.payload).map(|i| self.payload_byte(i)));
        b
    }

    fn payload_byte(&self, i: usize) -> u8 {
        (self.tag ^ self.number.wrapping_mul(13)).wrapping_add(i as u64 * 7) as u8
    }

    /// Reads what [`bytes`](Self::bytes) made; `None` when it is not exactly that.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let frame = bytes.get(HDR_LEN..)?;
        let le = |at: usize| {
            frame.get(at..at + 8).map(|b| u64::from_le_bytes(b.try_into().expect("8 bytes")))
        };
        let parsed = Self {
            to: destination(frame)?,
            from: destination(frame.get(6..)?)?,
            tag: le(14)?,
            number: le(22)?,
            payload: frame.len().checked_sub(FIXED_LEN)?,
        };
        (parsed.bytes()[HDR_LEN..] == *frame).then_some(parsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_reads_what_bytes_made_and_nothing_else() {
        let frame = Frame { to: 3, from: 7, tag: 0x1234_5678_9abc, number: 5, payload: 100 };
        let mut bytes = frame.bytes();
        assert_eq!(Frame::parse(&bytes), Some(frame));
        assert_eq!(Frame::parse(&bytes[..20]), None);
        *bytes.last_mut().unwrap() ^= 1;
        assert_eq!(Frame::parse(&bytes), None);
    }
}
