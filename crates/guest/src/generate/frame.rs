//! Frames of `gen`: sizes, headers, and the stamp for loss, order and latency.

use std::str::FromStr;

use shm::Seg;
use switch::time::Instant;

/// Ethernet, IPv4 and UDP headers.
pub const HEADERS: usize = 14 + 20 + 8;
/// Offset of the UDP source port, which identifies the flow.
pub const SOURCE_PORT: usize = 14 + 20;
/// Mark, sequence number, time.
pub const STAMP: usize = 18;
/// Shortest frame that carries the stamp; also Ethernet's own minimum, without FCS.
pub const SIZE_MIN: u32 = (HEADERS + STAMP) as u32;
/// Longest frame: jumbo.
pub const SIZE_MAX: u32 = 9216;
/// First bytes of our stamps.
pub const MARK: [u8; 2] = *b"pv";

/// Frame sizes, in bytes without FCS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Size(pub Vec<u32>);

impl Size {
    /// The longest size.
    pub fn longest(&self) -> u32 {
        self.0.iter().max().copied().unwrap_or(SIZE_MIN)
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let error = || {
            format!(
                "invalid frame size '{s}': use N, MIN-MAX ({SIZE_MIN} to {SIZE_MAX}), imix, or \
                 imix:LETTERS (RFC 6985: a to i)"
            )
        };
        let one = |s: &str| {
            let n = s.parse().map_err(|_| error())?;
            if (SIZE_MIN..=SIZE_MAX).contains(&n) { Ok(n) } else { Err(error()) }
        };
        if s == "imix" {
            // 7 of 40, 4 of 576, 1 of 1500 bytes of IP: 64, 594 and 1518 with FCS.
            return Ok(Self([[60; 7].as_slice(), &[590; 4], &[1514]].concat()));
        }
        if let Some(letters) = s.strip_prefix("imix:") {
            let sizes: Option<Vec<u32>> = letters.chars().map(of_letter).collect();
            return sizes.filter(|sizes| !sizes.is_empty()).map(Self).ok_or_else(error);
        }
        match s.split_once('-') {
            None => Ok(Self(vec![one(s)?])),
            Some((min, max)) => {
                let (min, max) = (one(min)?, one(max)?);
                if min > max {
                    return Err(error());
                }
                // Not ascending: consecutive sizes differ, as in real traffic.
                let span = u64::from(max - min + 1);
                let step = |i: u64| min + (i * 40_503 % span) as u32;
                Ok(Self((0..span.min(1024)).map(step).collect()))
            }
        }
    }
}

/// The size of a letter of RFC 6985, section 4, without FCS.
fn of_letter(letter: char) -> Option<u32> {
    const SIZES: [u32; 9] = [64, 128, 256, 512, 1024, 1280, 1518, 2112, 9000];
    let at = u32::from(letter).checked_sub(u32::from('a'))?;
    SIZES.get(at as usize).map(|size| size - 4)
}

/// Address `n` of `count` from `mac` upwards, in turn.
pub fn nth(mac: [u8; 6], n: u32, count: u32) -> [u8; 6] {
    let word = u32::from_be_bytes([mac[2], mac[3], mac[4], mac[5]]);
    let word = word.wrapping_add(n % count.max(1)).to_be_bytes();
    [mac[0], mac[1], word[0], word[1], word[2], word[3]]
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
    // UDP over IPv4 may omit the checksum: zero.
    h[38..40].copy_from_slice(&(ip_len - 20).to_be_bytes());
    h
}

/// The first bytes of the payload.
pub fn stamp(seq: u64, now: Instant) -> [u8; STAMP] {
    let mut s = [0; STAMP];
    s[..2].copy_from_slice(&MARK);
    s[2..10].copy_from_slice(&seq.to_le_bytes());
    s[10..].copy_from_slice(&now.ns().to_le_bytes());
    s
}

/// Pattern that fills the frame of this number after its stamp, repeated.
pub fn fill(seq: u64) -> [u8; 256] {
    std::array::from_fn(|i| (i as u64).wrapping_add(seq) as u8)
}

/// Whether one of our frames, after a header of `skip` bytes, is unmodified: its length matches
/// its headers, and its payload its number.
pub fn is_whole(segs: &[Seg<'_>], skip: usize, seq: u64) -> bool {
    let mut head = vec![0; skip + HEADERS + STAMP];
    let mut at = 0;
    for seg in segs {
        at += seg.read(&mut head[at..]);
    }
    let word = |at: usize| u16::from_be_bytes([head[skip + at], head[skip + at + 1]]);
    let len = segs.iter().map(|seg| seg.len() as usize).sum::<usize>();
    if at < head.len() || usize::from(word(16)) + 14 != len - skip || word(38) != word(16) - 20 {
        return false;
    }
    let filled = fill(seq);
    let (mut skipped, mut place, mut chunk) = (head.len(), 0, [0_u8; 256]);
    for seg in segs {
        let mut seg = *seg;
        let over = skipped.min(seg.len() as usize);
        skipped -= over;
        seg = seg.skip(over as u32);
        while !seg.is_empty() {
            let most = 256 - place % 256;
            let n = seg.read(&mut chunk[..most]);
            if chunk[..n] != filled[place % 256..][..n] {
                return false;
            }
            place += n;
            seg = seg.skip(n as u32);
        }
    }
    true
}

/// Frames to a second address, in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aside {
    /// Their destination.
    pub mac: [u8; 6],
    /// One is sent after this many others.
    pub every: u64,
}

/// Parses `MAC[,N]`.
///
/// # Errors
/// It is invalid; the error says what to write.
pub fn parse_also(s: &str) -> Result<Aside, String> {
    let (mac, every) = s.split_once(',').unwrap_or((s, "1"));
    let every = every.parse().ok().filter(|n| *n > 0);
    let every = every.ok_or_else(|| format!("'{s}': use MAC,N with N frames, 1 or more"))?;
    Ok(Aside { mac: api::mac(mac)?, every })
}

/// Reads a frame's bytes, as a receiving application does.
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
        let imix = "imix".parse::<Size>().unwrap().0;
        assert_eq!((imix.len(), imix.iter().sum::<u32>() + 12 * 4), (12, 7 * 64 + 4 * 594 + 1518));
        assert_eq!("imix:aagi".parse(), Ok(Size(vec![60, 60, 1514, 8996])));
        for bad in ["", "59", "9217", "100-60", "x", "60-", "imix:", "imix:j", "imix:aZ"] {
            assert!(bad.parse::<Size>().unwrap_err().contains("imix"), "{bad}");
        }
    }

    #[test]
    fn modified_frames_are_detected() {
        let size = 700;
        let mut frame = vec![9; 12];
        frame.extend(headers([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], size, 3));
        frame.extend(stamp(77, Instant::from_ns(5)));
        frame.extend(fill(77).into_iter().cycle().take((size - SIZE_MIN) as usize));
        let whole = |frame: &[u8], seq| {
            let (a, b) = frame.split_at(300);
            is_whole(&[Seg::of(a), Seg::of(&[]), Seg::of(b)], 12, seq)
        };
        assert!(whole(&frame, 77));
        assert!(!whole(&frame, 78));
        assert!(!whole(&frame[..frame.len() - 1], 77));
        for at in [72, 299, 300, frame.len() - 1] {
            frame[at] ^= 1;
            assert!(!whole(&frame, 77), "{at}");
            frame[at] ^= 1;
        }
        assert_eq!(parse_also("02:00:00:00:00:09,3").map(|also| also.every), Ok(3));
        assert!(parse_also("02:00:00:00:00:09,0").is_err() && parse_also("x").is_err());
    }

    #[test]
    fn ip_header_checksum_verifies() {
        let h = headers([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2], 60, 3);
        let sum: u32 =
            h[14..34].chunks(2).map(|c| u32::from(u16::from_be_bytes([c[0], c[1]]))).sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
    }
}
