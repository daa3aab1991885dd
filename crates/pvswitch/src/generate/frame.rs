//! The frames that `gen` sends: sizes, headers, and the stamp that tells loss, order and latency.

use std::str::FromStr;

use shm::Seg;

/// Ethernet, IPv4 and UDP headers.
pub const HEADERS: usize = 14 + 20 + 8;
/// Where the UDP source port is, which tells flows apart.
pub const SOURCE_PORT: usize = 14 + 20;
/// Mark, sequence number, time.
pub const STAMP: usize = 18;
/// Shortest frame that carries the stamp; also Ethernet's own minimum, without FCS.
pub const SIZE_MIN: u32 = (HEADERS + STAMP) as u32;
/// Longest frame: jumbo.
pub const SIZE_MAX: u32 = 9216;
/// What our stamps begin with.
pub const MARK: [u8; 2] = *b"pv";

/// Frame sizes, in bytes without FCS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Size(pub Vec<u32>);

impl Size {
    /// The longest of them.
    pub fn longest(&self) -> u32 {
        self.0.iter().max().copied().unwrap_or(SIZE_MIN)
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let error = || {
            format!("'{s}' is no frame size: use N, MIN-MAX ({SIZE_MIN} to {SIZE_MAX}), or imix")
        };
        let one = |s: &str| {
            let n = s.parse().map_err(|_| error())?;
            if (SIZE_MIN..=SIZE_MAX).contains(&n) { Ok(n) } else { Err(error()) }
        };
        if s == "imix" {
            // The usual simple IMIX, 7:4:1, less the FCS.
            return Ok(Self([[60; 7].as_slice(), &[566; 4], &[1514]].concat()));
        }
        match s.split_once('-') {
            None => Ok(Self(vec![one(s)?])),
            Some((min, max)) => {
                let (min, max) = (one(min)?, one(max)?);
                if min > max {
                    return Err(error());
                }
                // Spread out, not ascending: neighbours differ as they do in real traffic.
                let span = u64::from(max - min + 1);
                let step = |i: u64| min + (i * 40_503 % span) as u32;
                Ok(Self((0..span.min(1024)).map(step).collect()))
            }
        }
    }
}

/// Ethernet, IPv4 and UDP headers of a frame of `size` bytes.
pub fn headers(src: [u8; 6], dst: [u8; 6], size: u32, flow: u16) -> [u8; HEADERS] {
    let mut h = [0; HEADERS];
    h[..6].copy_from_slice(&dst);
    h[6..12].copy_from_slice(&src);
    h[12..14].copy_from_slice(&[8, 0]);
    let ip_len = (size - 14) as u16;
    h[14..16].copy_from_slice(&[0x45, 0]);
    h[16..18].copy_from_slice(&ip_len.to_be_bytes());
    // Not fragmented; TTL 64; UDP.
    h[20..24].copy_from_slice(&[0x40, 0, 64, 17]);
    // 10.x.y.z from the MACs' last bytes.
    h[26..30].copy_from_slice(&[10, src[3], src[4], src[5]]);
    h[30..34].copy_from_slice(&[10, dst[3], dst[4], dst[5]]);
    let sum: u32 = h[14..34].chunks(2).map(|c| u32::from(u16::from_be_bytes([c[0], c[1]]))).sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = !(((sum & 0xffff) + (sum >> 16)) as u16);
    h[24..26].copy_from_slice(&sum.to_be_bytes());
    h[34..36].copy_from_slice(&10_000_u16.wrapping_add(flow).to_be_bytes());
    h[36..38].copy_from_slice(&9_u16.to_be_bytes());
    // UDP over IPv4 may go without checksum: zero.
    h[38..40].copy_from_slice(&(ip_len - 20).to_be_bytes());
    h
}

/// The first bytes of the payload.
pub fn stamp(seq: u64, now: u64) -> [u8; STAMP] {
    let mut s = [0; STAMP];
    s[..2].copy_from_slice(&MARK);
    s[2..10].copy_from_slice(&seq.to_le_bytes());
    s[10..].copy_from_slice(&now.to_le_bytes());
    s
}

/// Reads a frame's bytes, as whoever receives it would.
pub fn touch(segs: &[Seg<'_>]) {
    let mut chunk = [0_u8; 512];
    for seg in segs {
        let mut seg = *seg;
        while !seg.is_empty() {
            let n = seg.read(&mut chunk);
            std::hint::black_box(&chunk);
            seg = seg.skip(n as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!("60".parse(), Ok(Size(vec![60])));
        let spread: Size = "60-1514".parse().unwrap();
        assert!(spread.0.iter().all(|s| (60..=1514).contains(s)) && spread.0.len() == 1024);
        assert_eq!("imix".parse::<Size>().unwrap().0.len(), 12);
        for bad in ["", "59", "9217", "100-60", "x", "60-"] {
            assert!(bad.parse::<Size>().unwrap_err().contains("imix"), "{bad}");
        }
    }

    #[test]
    fn ip_header_checksum_verifies() {
        let h = headers([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], 60, 3);
        let sum: u32 =
            h[14..34].chunks(2).map(|c| u32::from(u16::from_be_bytes([c[0], c[1]]))).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
    }
}
