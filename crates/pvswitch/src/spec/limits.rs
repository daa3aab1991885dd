//! Limits of a port's account: `limit-NAME=N`, an option of every kind of port.

use switch::account::{Account, NAMES};

/// The options, in the order of the entries ([`NAMES`]).
pub const LIMITS: [&str; NAMES.len()] = [
    "limit-mapped-bytes",
    "limit-mappings",
    "limit-descriptors",
    "limit-held-frames",
    "limit-held-bytes",
    "limit-messages",
    "limit-connections",
    "limit-announcements",
    "limit-log-lines",
];

/// Highest limit of what is no number of bytes: one a nanosecond, of a rate.
const COUNT_MAX: u64 = 1_000_000_000;
/// Highest number of bytes: what 57 bits address, the most of any processor.
const BYTES_MAX: u64 = 1 << 57;
/// Units of bytes, and the powers of two that they are.
const UNITS: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

/// Limits that are not the defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits([Option<u64>; NAMES.len()]);

impl Limits {
    /// Sets what `limit-NAME=N` says. False: there is no such option.
    ///
    /// # Errors
    /// The value is no number, or out of range; the error names the option and the range.
    pub fn set(&mut self, key: &str, value: &str) -> Result<bool, String> {
        let Some(at) = LIMITS.iter().position(|known| *known == key) else { return Ok(false) };
        self.0[at] = Some(amount(key, value)?);
        Ok(true)
    }

    /// The options that are set: name of the entry, and its limit.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        NAMES.into_iter().zip(self.0).filter_map(|(name, limit)| Some((name, limit?)))
    }

    /// Sets them in an account; the other limits stay.
    pub fn apply(&self, account: &Account) {
        for (name, limit) in self.all() {
            account.set_limit(name, limit);
        }
    }
}

fn is_bytes(name: &str) -> bool {
    name.ends_with("-bytes")
}

fn amount(key: &str, value: &str) -> Result<u64, String> {
    let unit = |(unit, shift): (char, u32)| {
        let digits = value.strip_suffix([unit, unit.to_ascii_lowercase()])?;
        Some((digits, shift))
    };
    let unit = UNITS.into_iter().filter(|_| is_bytes(key)).find_map(unit);
    let (digits, shift) = unit.unwrap_or((value, 0));
    let max = if is_bytes(key) { BYTES_MAX } else { COUNT_MAX };
    let number = digits.parse::<u64>().ok().and_then(|n| n.checked_mul(1 << shift));
    number.filter(|n| *n <= max).ok_or_else(|| {
        let units = if is_bytes(key) { " bytes, or so many K, M, G or T of them" } else { "" };
        format!("{key}={value}: use 0 to {}{units}", text(key, max))
    })
}

/// A limit of the entry `name`, as people write it.
pub fn text(name: &str, limit: u64) -> String {
    let whole = |(_, shift): &(char, u32)| limit > 0 && limit.trailing_zeros() >= *shift;
    match UNITS.into_iter().filter(|_| is_bytes(name)).find(whole) {
        Some((unit, shift)) => format!("{}{unit}", limit >> shift),
        None => limit.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(key: &str, value: &str) -> Result<u64, String> {
        let mut limits = Limits::default();
        assert!(limits.set(key, value)?, "{key}");
        let (name, limit) = limits.all().next().unwrap();
        assert_eq!(key, format!("limit-{name}"));
        Ok(limit)
    }

    #[test]
    fn every_entry_of_an_account_has_its_option() {
        let account = Account::default();
        let mut limits = Limits::default();
        for (option, name) in LIMITS.into_iter().zip(NAMES) {
            assert_eq!(option, format!("limit-{name}"));
            assert_eq!(limits.set(option, "7"), Ok(true));
        }
        assert_eq!(limits.set("limit-mapings", "7"), Ok(false));
        limits.apply(&account);
        assert!(account.entries().iter().all(|entry| entry.limit == 7));
    }

    #[test]
    fn bytes_have_units_and_nothing_else_has() {
        assert_eq!(set("limit-mapped-bytes", "8g"), Ok(8 << 30));
        assert_eq!(set("limit-mapped-bytes", "131072T"), Ok(1 << 57));
        assert_eq!(set("limit-held-bytes", "4096"), Ok(4096));
        assert_eq!(set("limit-messages", "0"), Ok(0));
        for value in ["131073T", "99999999999999T", "-1", "", "K", "4X", "1.5G"] {
            let error = set("limit-held-bytes", value).unwrap_err();
            let want = format!("limit-held-bytes={value}: use 0 to 131072T bytes, or so many K,");
            assert!(error.starts_with(&want), "{error}");
        }
        for value in ["4K", "1000000001", "-1", "many"] {
            let error = set("limit-mappings", value).unwrap_err();
            assert_eq!(error, format!("limit-mappings={value}: use 0 to 1000000000"));
        }
    }

    #[test]
    fn limits_are_written_as_they_are_read() {
        let bytes = [(1 << 42, "4T"), (512 << 10, "512K"), (1000, "1000"), (0, "0")];
        for (limit, want) in bytes {
            assert_eq!(text("held-bytes", limit), want);
        }
        assert_eq!(text("messages", 4096), "4096");
    }
}
