//! Rates of ports and their bursts: parsing, and their text.
//!
//! A rate limits bits, frames or both: `100Mbit`, `20kframes`, `100Mbit+20kframes`. Prefixes of
//! rates are decimal (k, M, G), as for all link speeds; those of bytes are binary, as for all sizes
//! of this program.

use super::list::NONE;
use super::value::{bytes, bytes_text};

/// Highest rate of bits: 1 Tbit/s.
const BITS_MAX: u64 = 1_000_000_000_000;
/// Lowest rate of bits: a full Ethernet frame takes 12 s.
const BITS_MIN: u64 = 1_000;
/// Highest rate of frames.
const FRAMES_MAX: u64 = 1_000_000_000;
/// Largest burst, in bytes.
const BURST_MAX: u64 = 1 << 30;
/// Largest burst, in frames.
const BURST_FRAMES_MAX: u64 = 1_000_000;
/// Decimal prefixes.
const PREFIXES: [(char, u64); 3] = [('G', 1_000_000_000), ('M', 1_000_000), ('k', 1_000)];
const FRAMES: &str = "frames";
const BIT: &str = "bit";

/// Limits of bits or bytes, and of frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amounts {
    /// Bits per second of a rate, bytes of a burst; `None`: unlimited.
    pub data: Option<u64>,
    /// Frames, per second or at once; `None`: unlimited.
    pub frames: Option<u64>,
}

/// Parses one or two members, at most one of each kind.
fn amounts(
    text: &str,
    data: impl Fn(&str) -> Option<u64>,
    frames: impl Fn(u64) -> bool,
    form: &str,
) -> Result<Amounts, String> {
    let mut all = Amounts::default();
    if text == NONE {
        return Ok(all);
    }
    for member in text.split('+') {
        let (of, value) = match member.strip_suffix(FRAMES) {
            Some(count) => (&mut all.frames, decimal(count).filter(|n| frames(*n))),
            None => (&mut all.data, data(member)),
        };
        let value = value.ok_or_else(|| format!("'{member}': use {form}, or {NONE}"))?;
        if of.replace(value).is_some() {
            return Err(format!("two limits of one kind: use {form}, or {NONE}"));
        }
    }
    Ok(all)
}

/// Parses a rate.
///
/// # Errors
/// It is invalid; the error says what to write.
pub(super) fn rate(text: &str) -> Result<Amounts, String> {
    let bits = |member: &str| {
        let number = member.strip_suffix(BIT).unwrap_or(member);
        decimal(number).filter(|bits| (BITS_MIN..=BITS_MAX).contains(bits))
    };
    let form = "1kbit to 1000Gbit, 1frames to 1Gframes, or both, like 100Mbit+20kframes";
    amounts(text, bits, |frames| (1..=FRAMES_MAX).contains(&frames), form)
}

/// Parses a burst.
///
/// # Errors
/// As [`rate`].
pub(super) fn burst(text: &str) -> Result<Amounts, String> {
    let size = |member: &str| bytes(member).filter(|n| (1..=BURST_MAX).contains(n));
    let form = "1 to 1G bytes, 1frames to 1Mframes, or both, like 64K+100frames";
    amounts(text, size, |frames| (1..=BURST_FRAMES_MAX).contains(&frames), form)
}

/// Parses a number like `2.5G`.
fn decimal(text: &str) -> Option<u64> {
    let split = |(prefix, times): (char, u64)| {
        let either = [prefix.to_ascii_lowercase(), prefix.to_ascii_uppercase()];
        Some((text.strip_suffix(either)?, times))
    };
    let (digits, times) = PREFIXES.into_iter().find_map(split).unwrap_or((text, 1));
    let (whole, part) = digits.split_once('.').unwrap_or((digits, "0"));
    let number = |digits: &str| {
        let plain = (1..=12).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_digit());
        digits.parse::<u64>().ok().filter(|_| plain)
    };
    let over = 10_u64.pow(part.len().min(12) as u32);
    let part = number(part)?.checked_mul(times)?;
    number(whole)?.checked_mul(times)?.checked_add(part / over).filter(|_| part % over == 0)
}

/// A number in the largest unit of which it is a whole number.
fn decimal_text(number: u64) -> String {
    let whole = |(_, times): &(char, u64)| number > 0 && number.is_multiple_of(*times);
    match PREFIXES.into_iter().find(whole) {
        Some((prefix, times)) => format!("{}{prefix}", number / times),
        None => number.to_string(),
    }
}

fn text(data: Option<String>, frames: Option<u64>) -> String {
    let frames = frames.map(|frames| decimal_text(frames) + FRAMES);
    let all: Vec<_> = data.into_iter().chain(frames).collect();
    if all.is_empty() { NONE.into() } else { all.join("+") }
}

/// The text of a rate.
pub(super) fn rate_text(rate: Amounts) -> String {
    text(rate.data.map(|bits| decimal_text(bits) + BIT), rate.frames)
}

/// The text of a burst.
pub(super) fn burst_text(burst: Amounts) -> String {
    text(burst.data.map(bytes_text), burst.frames)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both(data: u64, frames: u64) -> Amounts {
        let some = |n| Some(n).filter(|n| *n > 0);
        Amounts { data: some(data), frames: some(frames) }
    }

    #[test]
    fn rates_have_bits_frames_or_both() {
        for (given, want, shown) in [
            ("100Mbit", both(100_000_000, 0), "100Mbit"),
            ("100m", both(100_000_000, 0), "100Mbit"),
            ("2.5Gbit", both(2_500_000_000, 0), "2500Mbit"),
            ("1000000", both(1_000_000, 0), "1Mbit"),
            ("1000Gbit", both(1_000_000_000_000, 0), "1000Gbit"),
            ("20kframes", both(0, 20_000), "20kframes"),
            ("20kframes+64kbit", both(64_000, 20_000), "64kbit+20kframes"),
            ("1frames", both(0, 1), "1frames"),
            ("none", both(0, 0), "none"),
        ] {
            assert_eq!(rate(given), Ok(want), "{given}");
            assert_eq!(rate_text(want), shown);
            assert_eq!(rate(shown), Ok(want));
        }
        for (bad, part) in [
            ("", "''"),
            ("100Mbps", "'100Mbps'"),
            ("1001Gbit", "'1001Gbit'"),
            ("999bit", "'999bit'"),
            ("-1Mbit", "'-1Mbit'"),
            ("1e6", "'1e6'"),
            ("1.5bit", "'1.5bit'"),
            (".5G", "'.5G'"),
            ("0frames", "'0frames'"),
            ("2Gframes", "'2Gframes'"),
            ("1Mbit+", "''"),
            ("1Mbit+2Mbit", "two limits"),
            ("99999999999999999999G", "'9999"),
        ] {
            let error = rate(bad).unwrap_err();
            assert!(error.contains(part) && error.contains("100Mbit+20kframes"), "{bad}: {error}");
        }
    }

    #[test]
    fn bursts_have_bytes_frames_or_both() {
        for (given, want, shown) in [
            ("64K", both(65_536, 0), "64K"),
            ("1500", both(1500, 0), "1500"),
            ("100frames", both(0, 100), "100frames"),
            ("1M+1kframes", both(1 << 20, 1000), "1M+1kframes"),
            ("none", both(0, 0), "none"),
        ] {
            assert_eq!(burst(given), Ok(want), "{given}");
            assert_eq!(burst_text(want), shown);
            assert_eq!(burst(shown), Ok(want));
        }
        for bad in ["0", "2G", "64Kbit", "0frames", "2Mframes", "1K+1K", "x"] {
            let error = burst(bad).unwrap_err();
            assert!(error.contains("64K+100frames"), "{bad}: {error}");
        }
    }
}
