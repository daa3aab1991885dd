//! Types of settings' values, their text forms, and errors in a text.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use super::rate::{self, Amounts};
use super::{list, policy};
use crate::Address;
use crate::near::did_you_mean;

/// Units of bytes, with their binary exponents.
const UNITS: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];
/// CPUs that a thread can be pinned to: those of `cpu_set_t`.
const CPUS_MAX: usize = 1024;
/// Longest duration, in seconds: thirty years. Beyond, clocks overflow.
const SECONDS_MAX: f64 = 1e9;

/// Longest explanation of a word that messages include.
const GLOSS_MAX: usize = 40;

/// Type of a setting's value.
#[derive(Clone, Copy, Debug)]
pub enum Type {
    /// A number: minimum and maximum.
    Number(u64, u64),
    /// A number of bytes up to this maximum, with or without a unit.
    Bytes(u64),
    /// One of several words.
    Choice(&'static [Choice]),
    /// A poll, call or kick policy ([`policy::FORMS`]).
    Policy,
    /// Permission bits of a socket, in octal; in the file a string or `0o660`.
    Mode,
    /// MAC addresses, separated by `+`, or `none`.
    Macs,
    /// IP addresses, separated by `+`, or `none`.
    Ips,
    /// A VLAN, or `none`.
    Vlan,
    /// VLANs and ranges of them, separated by `+`, or `none`.
    Vlans,
    /// Bits and frames per second, separated by `+`, or `none`.
    Rate,
    /// Bytes and frames at once, separated by `+`, or `none`.
    Burst,
    /// Names from a list, separated by `+`.
    Names(&'static [&'static str]),
    /// Numbers of CPUs, separated by `,`; in the file a list.
    Cpus,
    /// A duration in seconds.
    Seconds,
    /// An address to listen at.
    Address,
    /// Text; messages and help call it by this name: `PATH`.
    Text(&'static str),
    /// On the command line, an option without a value.
    Flag,
    /// A table of the file, or an option with its own syntax ([`crate::PortText`]).
    Table(&'static str),
}

/// A word that a setting accepts.
#[derive(Clone, Copy, Debug)]
pub struct Choice {
    /// The word.
    pub word: &'static str,
    /// The number after a colon: its name, minimum and maximum.
    pub number: Option<(&'static str, u32, u32)>,
    /// Its explanation; empty if the setting's own sentence explains it.
    pub help: &'static str,
    /// Markdown that follows `help` in the docs only.
    pub more: &'static str,
}

impl Choice {
    /// A word without a number.
    pub const fn word(word: &'static str, help: &'static str) -> Self {
        Self { word, number: None, help, more: "" }
    }

    /// A word with a number: `WORD:N`.
    pub const fn number(
        word: &'static str,
        name: &'static str,
        min: u32,
        max: u32,
        help: &'static str,
    ) -> Self {
        Self { word, number: Some((name, min, max)), help, more: "" }
    }

    /// Adds Markdown for the docs.
    pub const fn more(self, more: &'static str) -> Self {
        Self { more, ..self }
    }

    /// Syntax: `timer:HZ`.
    pub fn form(&self) -> String {
        match self.number {
            None => self.word.into(),
            Some((name, ..)) => format!("{}:{name}", self.word),
        }
    }
}

/// A setting's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A number, or a number of bytes.
    Number(u64),
    /// Permissions of a file.
    Mode(u64),
    /// A word, and the number after it.
    Choice(&'static str, Option<u32>),
    /// The text of a valid policy.
    Policy(String),
    /// MAC addresses.
    Macs(Vec<[u8; 6]>),
    /// IP addresses; `None`: any.
    Ips(Option<Vec<IpAddr>>),
    /// A VLAN.
    Vlan(Option<u16>),
    /// VLANs, in order.
    Vlans(Vec<u16>),
    /// Limits of bits and frames per second.
    Rate(Amounts),
    /// Limits of bytes and frames at once.
    Burst(Amounts),
    /// Names, spelt as in the list.
    Names(Vec<&'static str>),
    /// Numbers of CPUs.
    Cpus(Vec<usize>),
    /// A duration.
    Seconds(Duration),
    /// An address to listen at.
    Address(Address),
    /// Text.
    Text(String),
    /// An option without a value was given.
    Flag,
}

impl Type {
    /// Syntax of a value, as help and docs show it.
    pub fn form(&self) -> String {
        match self {
            Self::Choice(choices) => choices.iter().map(Choice::form).collect::<Vec<_>>().join("|"),
            _ => self.name().into(),
        }
    }

    /// Name of a value where its syntax is not shown.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Number(..) | Self::Bytes(_) => "N",
            Self::Choice(_) => "WORD",
            Self::Policy => "POLICY",
            Self::Mode => "MODE",
            Self::Macs => "MAC+...",
            Self::Ips => "ADDR+...|locked",
            Self::Vlan => "N",
            Self::Vlans => "N+M-K",
            Self::Rate => "RATE",
            Self::Burst => "N",
            Self::Names(_) => "FEATURE+...",
            Self::Cpus => "LIST",
            Self::Seconds => "SECS",
            Self::Address => "ADDR",
            Self::Text(what) | Self::Table(what) => what,
            Self::Flag => "",
        }
    }

    /// Whether the file must have a string for it: a number would be an error.
    pub fn is_text(&self) -> bool {
        matches!(
            self,
            Self::Policy
                | Self::Macs
                | Self::Ips
                | Self::Mode
                | Self::Names(_)
                | Self::Text(_)
                | Self::Table(_)
        )
    }

    /// Parses a value of setting `key`.
    ///
    /// # Errors
    /// The text is invalid; the error names the setting and the valid values.
    pub fn parse(&self, key: &str, text: &str) -> Result<Value, String> {
        let bad = |what: String| format!("{key}={text}: {what}");
        match self {
            Self::Number(min, max) => {
                let number = text.parse().ok().filter(|n| (min..=max).contains(&n));
                number.map(Value::Number).ok_or_else(|| bad(format!("use {min} to {max}")))
            }
            Self::Bytes(max) => {
                bytes(text).filter(|n| n <= max).map(Value::Number).ok_or_else(|| {
                    let max = bytes_text(*max);
                    bad(format!("use 0 to {max} bytes, with unit K, M, G, T or none"))
                })
            }
            Self::Choice(choices) => choice(key, text, choices),
            Self::Policy => match policy::check(text) {
                Ok(()) => Ok(Value::Policy(text.into())),
                Err(error) => Err(bad(error)),
            },
            Self::Mode => mode(text).map(Value::Mode).ok_or_else(|| {
                bad("use permissions in octal, with read and write for the owner: 0600 for the \
                     owner alone, 0660 for the group, 0666 for everyone"
                    .into())
            }),
            Self::Macs => list::macs(text).map(Value::Macs).map_err(bad),
            Self::Ips => list::ips(text).map(Value::Ips).map_err(bad),
            Self::Vlan => list::vlan(text).map(Value::Vlan).map_err(bad),
            Self::Vlans => list::vlans(text).map(Value::Vlans).map_err(bad),
            Self::Rate => rate::rate(text).map(Value::Rate).map_err(bad),
            Self::Burst => rate::burst(text).map(Value::Burst).map_err(bad),
            Self::Names(known) => names(text, known).map(Value::Names).map_err(|word| {
                let hint = hint(&word, known);
                format!("{key}: unknown feature '{word}'{hint}; known: {}", known.join(" "))
            }),
            Self::Cpus => cpus(text).map(Value::Cpus).map_err(bad),
            Self::Seconds => {
                let number = text.parse().map_err(|_| bad("not a number of seconds".into()))?;
                seconds(number).map(Value::Seconds)
            }
            Self::Address => text.parse().map(Value::Address),
            Self::Text(_) | Self::Table(_) => Ok(Value::Text(text.into())),
            Self::Flag => Ok(Value::Flag),
        }
    }
}

impl Value {
    /// A number, or the number after a word.
    pub fn number(&self) -> Option<u64> {
        match self {
            Self::Number(n) | Self::Mode(n) => Some(*n),
            Self::Choice(_, n) => n.map(u64::from),
            _ => None,
        }
    }

    /// The word of a choice.
    pub fn word(&self) -> Option<&'static str> {
        match self {
            Self::Choice(word, _) => Some(word),
            _ => None,
        }
    }

    /// MAC addresses; empty for other values.
    pub fn macs(&self) -> &[[u8; 6]] {
        if let Self::Macs(macs) = self { macs } else { &[] }
    }

    /// IP addresses; `None`: any, and for other values.
    pub fn ips(&self) -> Option<&[IpAddr]> {
        if let Self::Ips(ips) = self { ips.as_deref() } else { None }
    }

    /// A VLAN.
    pub fn vlan(&self) -> Option<u16> {
        if let Self::Vlan(vlan) = self { *vlan } else { None }
    }

    /// VLANs, in order; empty for other values.
    pub fn vlans(&self) -> &[u16] {
        if let Self::Vlans(vids) = self { vids } else { &[] }
    }

    /// A rate or a burst.
    pub fn amounts(&self) -> Option<Amounts> {
        if let Self::Rate(amounts) | Self::Burst(amounts) = self { Some(*amounts) } else { None }
    }

    /// Text, or the text of a policy.
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Policy(text) | Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// The text that [`Type::parse`] converts to this value.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let joined = |items: Vec<String>, between: &str| items.join(between);
        match self {
            Self::Number(n) => write!(f, "{n}"),
            Self::Mode(mode) => write!(f, "{mode:04o}"),
            Self::Choice(word, None) => f.write_str(word),
            Self::Choice(word, Some(n)) => write!(f, "{word}:{n}"),
            Self::Policy(text) | Self::Text(text) => f.write_str(text),
            Self::Macs(macs) => f.write_str(&list::macs_text(macs)),
            Self::Ips(ips) => f.write_str(&list::ips_text(ips.as_deref())),
            Self::Vlan(vlan) => f.write_str(&list::vlans_text(vlan.as_slice())),
            Self::Vlans(vids) => f.write_str(&list::vlans_text(vids)),
            Self::Rate(amounts) => f.write_str(&rate::rate_text(*amounts)),
            Self::Burst(amounts) => f.write_str(&rate::burst_text(*amounts)),
            Self::Names(names) => {
                f.write_str(&joined(names.iter().map(ToString::to_string).collect(), "+"))
            }
            Self::Cpus(cpus) => {
                f.write_str(&joined(cpus.iter().map(ToString::to_string).collect(), ","))
            }
            Self::Seconds(duration) => write!(f, "{}", duration.as_secs_f64()),
            Self::Address(address) => write!(f, "{address}"),
            Self::Flag => f.write_str("on"),
        }
    }
}

/// Converts seconds to a duration.
///
/// # Errors
/// It is negative, or so long that clocks overflow.
pub fn seconds(secs: f64) -> Result<Duration, String> {
    let duration = Duration::try_from_secs_f64(secs).ok().filter(|_| secs <= SECONDS_MAX);
    duration.ok_or_else(|| format!("invalid duration {secs}: use seconds, 0 to {SECONDS_MAX}"))
}

fn choice(key: &str, text: &str, choices: &[Choice]) -> Result<Value, String> {
    let (word, number) = text.split_once(':').map_or((text, None), |(w, n)| (w, Some(n)));
    match choices.iter().find(|choice| choice.word == word) {
        Some(Choice { word, number: None, .. }) if number.is_none() => {
            Ok(Value::Choice(word, None))
        }
        Some(Choice { word, number: Some((name, min, max)), .. }) => {
            let number = number.and_then(|n| n.parse().ok()).filter(|n| (min..=max).contains(&n));
            number.map(|n| Value::Choice(word, Some(n))).ok_or_else(|| {
                format!("{key}={text}: use {word}:{name} with {name} from {min} to {max}")
            })
        }
        _ => {
            let forms: Vec<_> = choices.iter().map(Choice::form).collect();
            let others = forms.iter().map(String::as_str).filter(|form| *form != text);
            let hint = did_you_mean(text, others);
            let brief = |choice: &Choice| (1..=GLOSS_MAX).contains(&choice.help.len());
            let glosses = choices.iter().all(brief);
            let shown = forms.iter().zip(choices).map(|(form, choice)| match glosses {
                true => format!("{form} ({})", choice.help),
                false => form.clone(),
            });
            let shown: Vec<_> = shown.collect();
            Err(format!("{key}={text}{hint}: use {}", shown.join(", ")))
        }
    }
}

/// Parses names: in either case, with `-` or `_`, with or without the prefix `feature-` of Xen's
/// keys. The error is the first unknown name.
fn names(text: &str, known: &[&'static str]) -> Result<Vec<&'static str>, String> {
    let plain = |word: &str| word.to_ascii_lowercase().replace('_', "-");
    text.split('+')
        .map(|word| {
            let wanted = plain(word);
            let wanted = wanted.strip_prefix("feature-").unwrap_or(&wanted);
            let found = known.iter().copied().find(|name| plain(name) == wanted);
            found.ok_or_else(|| word.to_string())
        })
        .collect()
}

/// The nearest of names that all have the same case.
fn hint(word: &str, known: &[&'static str]) -> String {
    let upper = known.iter().any(|name| name.contains(|c: char| c.is_ascii_uppercase()));
    let word = if upper { word.to_ascii_uppercase() } else { word.to_ascii_lowercase() };
    did_you_mean(&word, known.iter().copied())
}

fn cpus(text: &str) -> Result<Vec<usize>, String> {
    let one = |part: &str| {
        let cpu: usize = part.parse().map_err(|_| "use numbers of CPUs, 1 or 1,2".to_string())?;
        if cpu < CPUS_MAX { Ok(cpu) } else { Err(format!("there is no such CPU: {cpu}")) }
    };
    text.split(',').filter(|part| !part.is_empty()).map(one).collect()
}

/// Permission bits of a socket that its owner can use.
fn mode(text: &str) -> Option<u64> {
    const OWNER: u64 = 0o600;
    let octal = (3..=4).contains(&text.len()) && text.bytes().all(|b| (b'0'..=b'7').contains(&b));
    let mode = u64::from_str_radix(text, 8).ok().filter(|_| octal)?;
    (mode <= 0o777 && mode & OWNER == OWNER).then_some(mode)
}

/// Parses a number of bytes.
pub(super) fn bytes(text: &str) -> Option<u64> {
    let unit = |(unit, shift): (char, u32)| {
        let digits = text.strip_suffix([unit, unit.to_ascii_lowercase()])?;
        Some((digits, shift))
    };
    let (digits, shift) = UNITS.into_iter().find_map(unit).unwrap_or((text, 0));
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Formats a number of bytes, in the largest unit of which it is a whole number.
pub fn bytes_text(bytes: u64) -> String {
    let whole = |(_, shift): &(char, u32)| bytes > 0 && bytes.trailing_zeros() >= *shift;
    match UNITS.into_iter().find(whole) {
        Some((unit, shift)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: Type = Type::Bytes(1 << 57);

    #[test]
    fn only_numbers_of_bytes_accept_units() {
        let bytes = |text: &str| BYTES.parse("limit-held-bytes", text);
        assert_eq!(bytes("8g"), Ok(Value::Number(8 << 30)));
        assert_eq!(bytes("131072T"), Ok(Value::Number(1 << 57)));
        assert_eq!(bytes("4096"), Ok(Value::Number(4096)));
        for text in ["131073T", "99999999999999T", "-1", "", "K", "4X", "1.5G"] {
            let error = bytes(text).unwrap_err();
            let want = format!("limit-held-bytes={text}: use 0 to 131072T bytes, with unit K,");
            assert!(error.starts_with(&want), "{error}");
        }
        for text in ["4K", "1000000001", "-1", "many"] {
            let error = Type::Number(0, 1_000_000_000).parse("limit-mappings", text).unwrap_err();
            assert_eq!(error, format!("limit-mappings={text}: use 0 to 1000000000"));
        }
        let written = [(1 << 42, "4T"), (512 << 10, "512K"), (1000, "1000"), (0, "0")];
        for (n, want) in written {
            assert_eq!(bytes_text(n), want);
        }
    }

    #[test]
    fn modes_are_octal_and_leave_the_owner_its_socket() {
        let mode = |text: &str| Type::Mode.parse("socket-mode", text);
        for (text, want) in [("0660", 0o660), ("600", 0o600), ("0777", 0o777)] {
            assert_eq!(mode(text), Ok(Value::Mode(want)));
            assert_eq!(mode(&Value::Mode(want).to_string()), Ok(Value::Mode(want)));
        }
        for text in ["", "66", "0060", "0400", "1660", "00660", "0668", "rw", "+660", "0o660"] {
            let error = mode(text).unwrap_err();
            let want = format!("socket-mode={text}: use permissions in octal, with read and write");
            assert!(error.starts_with(&want), "{error}");
        }
    }

    #[test]
    fn words_may_have_a_number() {
        const WORDS: Type = Type::Choice(&[
            Choice::word("orphan", ""),
            Choice::number("timer", "HZ", 1, 20_000, ""),
        ]);
        assert_eq!(WORDS.form(), "orphan|timer:HZ");
        assert_eq!(WORDS.parse("k", "timer:5"), Ok(Value::Choice("timer", Some(5))));
        for (text, want) in [
            ("orpan", "k=orpan (did you mean 'orphan'?): use orphan, timer:HZ"),
            ("orphan:1", "use orphan, timer:HZ"),
            ("timer", "k=timer: use timer:HZ with HZ from 1 to 20000"),
            ("timer:0", "with HZ from 1 to 20000"),
            ("", "k=: use orphan, timer:HZ"),
        ] {
            let error = WORDS.parse("k", text).unwrap_err();
            assert!(error.contains(want), "{text}: {error}");
        }
    }

    #[test]
    fn words_are_shown_with_short_explanations() {
        const WORDS: Type =
            Type::Choice(&[Choice::word("shared", "memfd"), Choice::word("any", "any file")]);
        let error = WORDS.parse("memory", "some").unwrap_err();
        assert_eq!(error, "memory=some: use shared (memfd), any (any file)");
    }

    #[test]
    fn names_accept_either_case_and_separator() {
        let virtio = Type::Names(&["EVENT_IDX", "IN_ORDER"]);
        let both = Value::Names(vec!["EVENT_IDX", "IN_ORDER"]);
        assert_eq!(virtio.parse("without", "event-idx+IN_ORDER"), Ok(both));
        let error = virtio.parse("without", "event-id").unwrap_err();
        assert!(
            error.contains("'event-id' (did you mean 'EVENT_IDX'?); known: EVENT_IDX"),
            "{error}"
        );
        let xen = Type::Names(&["sg", "ctrl-ring"]);
        assert_eq!(xen.parse("without", "feature-sg"), Ok(Value::Names(vec!["sg"])));
        assert!(xen.parse("without", "ctrl-rings").unwrap_err().contains("'ctrl-ring'?"));
    }

    #[test]
    fn invalid_durations_and_cpus_are_rejected() {
        let error = |value: Type, text: &str| value.parse("k", text).unwrap_err();
        for text in ["-1", "nan", "1e19"] {
            assert!(error(Type::Seconds, text).contains("invalid duration"), "{text}");
        }
        assert!(error(Type::Seconds, "x").contains("not a number of seconds"));
        assert!(error(Type::Cpus, "99999").contains("there is no such CPU: 99999"));
        assert!(error(Type::Cpus, "one").contains("use numbers of CPUs"));
        assert_eq!(Type::Cpus.parse("cpus", "0,2"), Ok(Value::Cpus(vec![0, 2])));
    }
}
