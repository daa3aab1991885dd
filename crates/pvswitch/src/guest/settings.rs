//! What of the driver half can be set: `--set KEY=VALUE` of `nic` and `gen`.

use std::fmt;
use std::str::FromStr;

use lab::near::did_you_mean;
use switch::poll::{Policy, TIMER_HZ_MAX};

use crate::spec::Policies;

/// Most bytes that a buffer begins behind a page.
const OFFSET_MAX: u8 = 64;

/// Most frames that are ever sent at once.
const TX_BURST_MAX: u8 = 64;

/// When transmitted buffers are taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// Before each burst is sent.
    BeforeTx,
    /// At ticks of a timer that runs while any is in flight, and only then.
    Timer {
        /// Ticks a second.
        hz: u32,
    },
    /// When all that is in flight was used; a sleeper is called then.
    OnEmpty,
    /// When half of them are free again; a sleeper is called then.
    OnHalfEmpty,
    /// Given up when sent: nobody waits for them. When a burst finds too few free.
    Orphan,
}

/// What a sender without a free buffer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// Stops taking frames, and sleeps until there is a buffer.
    StopBeforeFull,
    /// Tries again at once, for ever.
    BusyRetry,
}

/// When received buffers are given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refill {
    /// After each look that found frames.
    AtOnce,
    /// When fewer than half of them are with the switch.
    BelowHalf,
    /// When so many are to be given back.
    Batch(u16),
}

/// How notifications are called off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suppress {
    /// By index.
    EventIndex,
    /// By flags, which virtqueues have.
    Flags,
    /// Not at all: the switch is told of all that is published. For Xen's rings, which have no
    /// flags.
    None,
}

/// How the driver half works, but for what is negotiated by options of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// When the receive ring is looked at.
    pub poll: Policy,
    /// When the switch is told of transmitted frames.
    pub kick: Policy,
    /// `poll/QUEUE`: where a queue pair has another.
    pub poll_one: Policies,
    /// `kick/QUEUE`.
    pub kick_one: Policies,
    /// `tx-completion`.
    pub completion: Completion,
    /// `tx-full`.
    pub full: Full,
    /// `rx-refill`.
    pub refill: Refill,
    /// `header=apart`: in a descriptor of its own.
    pub apart: bool,
    /// `offset`: bytes left free at the start of each buffer.
    pub offset: u8,
    /// `suppress`.
    pub suppress: Suppress,
    /// `indirect`.
    pub indirect: bool,
    /// `checks`.
    pub checks: bool,
    /// `tx-burst`: most frames sent at once.
    pub tx_burst: u8,
}

/// One `--set`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// `poll/QUEUE`.
    Poll(Policies),
    /// `kick/QUEUE`.
    Kick(Policies),
    /// `tx-completion`.
    TxCompletion(Completion),
    /// `tx-full`.
    TxFull(Full),
    /// `rx-refill`.
    RxRefill(Refill),
    /// `header`, true: apart.
    Header(bool),
    /// `offset`.
    Offset(u8),
    /// `suppress`.
    Suppress(Suppress),
    /// `indirect`.
    Indirect(bool),
    /// `checks`.
    Checks(bool),
    /// `tx-burst`.
    TxBurst(u8),
}

/// Each key with the forms of its values, the default first.
const KEYS: [(&str, &[&str]); 9] = [
    ("tx-completion", &["orphan", "before-tx", "timer:HZ", "on-empty", "on-half-empty"]),
    ("tx-full", &["stop-before-full", "busy-retry"]),
    ("rx-refill", &["at-once", "below-half", "batch:N"]),
    ("header", &["inline", "apart"]),
    ("offset", &["0 to 64"]),
    ("suppress", &["event-index", "flags", "none"]),
    ("indirect", &["on", "off"]),
    ("checks", &["on", "off"]),
    ("tx-burst", &["1 to 64"]),
];

/// For `--help`.
pub const HELP: &str = "\
Driver settings (--set KEY=VALUE, may be repeated; default first):
  tx-completion=orphan|before-tx|timer:HZ|on-empty|on-half-empty
                                        when transmitted buffers are taken back
  tx-full=stop-before-full|busy-retry   what a sender without a free buffer does
  rx-refill=at-once|below-half|batch:N  when received buffers are given back
  header=inline|apart                   header before the frame, or in a descriptor of its own
  offset=N                              bytes left free at the start of each buffer, 0 to 64
  suppress=event-index|flags|none       how notifications are called off
  indirect=on|off                       tables for chains of several descriptors
  checks=on|off                         checks of what the switch says it used
  tx-burst=N                            most frames sent, and told of, at once, 1 to 64 (64)
  poll/QUEUE=POLICY, kick/QUEUE=POLICY  --poll and --kick of one queue pair, from 0 on
  With Xen's rings only the first three, tx-burst, policies, suppress=none, which is for them
  alone, and offset, which is for transmitted frames.
Policies (--poll, --kick): event, napi[:BUDGET], timer[:HZ], coalesce:USECS,FRAMES,
  coalesce:USECS/pending, spin, adaptive[:LATENCY_US]";

impl Settings {
    /// The defaults, changed by `sets`; the last one of a key counts.
    pub fn new(poll: Policy, kick: Policy, sets: &[Setting]) -> Self {
        let mut s = Self {
            poll,
            kick,
            poll_one: Policies::default(),
            kick_one: Policies::default(),
            completion: Completion::Orphan,
            full: Full::StopBeforeFull,
            refill: Refill::AtOnce,
            apart: false,
            offset: 0,
            suppress: Suppress::EventIndex,
            indirect: true,
            checks: true,
            tx_burst: TX_BURST_MAX,
        };
        for set in sets {
            match *set {
                Setting::Poll(one) => s.poll_one.extend(&one),
                Setting::Kick(one) => s.kick_one.extend(&one),
                Setting::TxCompletion(completion) => s.completion = completion,
                Setting::TxFull(full) => s.full = full,
                Setting::RxRefill(refill) => s.refill = refill,
                Setting::Header(apart) => s.apart = apart,
                Setting::Offset(offset) => s.offset = offset,
                Setting::Suppress(suppress) => s.suppress = suppress,
                Setting::Indirect(on) => s.indirect = on,
                Setting::Checks(on) => s.checks = on,
                Setting::TxBurst(frames) => s.tx_burst = frames,
            }
        }
        s
    }

    /// The poll policy of a queue pair.
    pub fn poll_of(&self, queue: usize) -> Policy {
        self.poll_one.of(queue).unwrap_or(self.poll)
    }

    /// The kick policy of a queue pair.
    pub fn kick_of(&self, queue: usize) -> Policy {
        self.kick_one.of(queue).unwrap_or(self.kick)
    }

    /// Changes policies, of one queue pair or of all.
    pub fn follow(&mut self, queue: Option<usize>, poll: Option<Policy>, kick: Option<Policy>) {
        let ours = [(&mut self.poll, &mut self.poll_one), (&mut self.kick, &mut self.kick_one)];
        for ((all, one), new) in ours.into_iter().zip([poll, kick]) {
            match (queue, new) {
                (Some(queue), Some(new)) => one.set_one(queue, new),
                (None, Some(new)) => (*all, *one) = (new, Policies::default()),
                (_, None) => {}
            }
        }
    }

    /// Keys and values, as they are given on the command line; not those of single queues.
    pub fn pairs(&self) -> [(&'static str, String); 11] {
        let on = |on: bool| if on { "on" } else { "off" }.to_string();
        [
            ("poll", self.poll.to_string()),
            ("kick", self.kick.to_string()),
            ("tx-completion", self.completion.to_string()),
            ("tx-full", self.full.to_string()),
            ("rx-refill", self.refill.to_string()),
            ("header", if self.apart { "apart" } else { "inline" }.into()),
            ("offset", self.offset.to_string()),
            ("suppress", self.suppress.to_string()),
            ("indirect", on(self.indirect)),
            ("checks", on(self.checks)),
            ("tx-burst", self.tx_burst.to_string()),
        ]
    }
}

impl FromStr for Setting {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let (key, value) = s.split_once('=').unwrap_or((s, ""));
        if let Some(word @ ("poll" | "kick")) = key.split('/').next() {
            if word == key {
                let one = format!("--set {key}/QUEUE={value} for one queue pair");
                return Err(format!("{key} of all queues is an option: --{key} {value}, or {one}"));
            }
            let mut one = Policies::default();
            one.set(key, value)?;
            return Ok(if word == "poll" { Self::Poll(one) } else { Self::Kick(one) });
        }
        let names = || KEYS.iter().map(|(name, _)| *name);
        let Some((key, values)) = KEYS.into_iter().find(|(name, _)| *name == key) else {
            let hint = did_you_mean(key, names());
            let known: Vec<_> = names().chain(["poll/QUEUE", "kick/QUEUE"]).collect();
            return Err(format!("unknown setting '{key}'{hint}; known: {}", known.join(", ")));
        };
        let bad = || {
            let hint = did_you_mean(value, values.iter().copied().filter(|v| *v != value));
            format!("{key}={value}{hint}: use {}", values.join(", "))
        };
        let (word, arg) = value.split_once(':').map_or((value, None), |(w, a)| (w, Some(a)));
        let number = |most: u32| {
            arg.and_then(|n| n.parse().ok())
                .filter(|n| (1..=most).contains(n))
                .ok_or_else(|| format!("{key}={value}: use {word}:N with N from 1 to {most}"))
        };
        let switch = |on: &str, off: &str| match value {
            v if v == on => Ok(true),
            v if v == off => Ok(false),
            _ => Err(bad()),
        };
        Ok(match (key, word, arg) {
            ("tx-completion", "orphan", None) => Self::TxCompletion(Completion::Orphan),
            ("tx-completion", "before-tx", None) => Self::TxCompletion(Completion::BeforeTx),
            ("tx-completion", "on-empty", None) => Self::TxCompletion(Completion::OnEmpty),
            ("tx-completion", "on-half-empty", None) => Self::TxCompletion(Completion::OnHalfEmpty),
            ("tx-completion", "timer", _) => {
                Self::TxCompletion(Completion::Timer { hz: number(TIMER_HZ_MAX)? })
            }
            ("tx-full", "stop-before-full", None) => Self::TxFull(Full::StopBeforeFull),
            ("tx-full", "busy-retry", None) => Self::TxFull(Full::BusyRetry),
            ("rx-refill", "at-once", None) => Self::RxRefill(Refill::AtOnce),
            ("rx-refill", "below-half", None) => Self::RxRefill(Refill::BelowHalf),
            ("rx-refill", "batch", _) => {
                let n = number(32768)?;
                Self::RxRefill(Refill::Batch(u16::try_from(n).map_err(|_| bad())?))
            }
            ("header", ..) => Self::Header(switch("apart", "inline")?),
            ("offset", ..) => {
                let n = value.parse().ok().filter(|n| *n <= OFFSET_MAX);
                Self::Offset(n.ok_or_else(bad)?)
            }
            ("suppress", "event-index", None) => Self::Suppress(Suppress::EventIndex),
            ("suppress", "flags", None) => Self::Suppress(Suppress::Flags),
            ("suppress", "none", None) => Self::Suppress(Suppress::None),
            ("indirect", ..) => Self::Indirect(switch("on", "off")?),
            ("checks", ..) => Self::Checks(switch("on", "off")?),
            ("tx-burst", ..) => {
                let n = value.parse().ok().filter(|n| (1..=TX_BURST_MAX).contains(n));
                Self::TxBurst(n.ok_or_else(bad)?)
            }
            _ => return Err(bad()),
        })
    }
}

impl fmt::Display for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BeforeTx => f.write_str("before-tx"),
            Self::Timer { hz } => write!(f, "timer:{hz}"),
            Self::OnEmpty => f.write_str("on-empty"),
            Self::OnHalfEmpty => f.write_str("on-half-empty"),
            Self::Orphan => f.write_str("orphan"),
        }
    }
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::StopBeforeFull => "stop-before-full",
            Self::BusyRetry => "busy-retry",
        })
    }
}

impl fmt::Display for Refill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtOnce => f.write_str("at-once"),
            Self::BelowHalf => f.write_str("below-half"),
            Self::Batch(n) => write!(f, "batch:{n}"),
        }
    }
}

impl fmt::Display for Suppress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EventIndex => "event-index",
            Self::Flags => "flags",
            Self::None => "none",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_said_as_they_are_given_and_the_last_one_counts() {
        let sets = [
            "tx-completion=timer:20000",
            "tx-full=busy-retry",
            "rx-refill=batch:16",
            "header=apart",
            "offset=2",
            "suppress=flags",
            "indirect=off",
            "checks=off",
            "tx-burst=1",
        ];
        let parsed: Vec<Setting> = sets.iter().map(|s| s.parse().unwrap()).collect();
        let settings = Settings::new(Policy::Event, Policy::Spin, &parsed);
        let said: Vec<_> =
            settings.pairs()[2..].iter().map(|(key, value)| format!("{key}={value}")).collect();
        assert_eq!(said, sets);
        for value in ["orphan", "before-tx", "on-empty", "on-half-empty"] {
            let set = format!("tx-completion={value}").parse().unwrap();
            let settings = Settings::new(Policy::Event, Policy::Event, &[parsed[0], set]);
            assert_eq!(settings.pairs()[2].1, value);
        }
        let none = Settings::new(Policy::Event, Policy::Event, &["suppress=none".parse().unwrap()]);
        assert!(none.pairs().contains(&("suppress", "none".into())));
        let defaults = Settings::new(Policy::Event, Policy::Event, &[]);
        for ((key, value), (known, values)) in defaults.pairs()[2..].iter().zip(KEYS) {
            assert!(
                *key == known && (values[0] == value || matches!(*key, "offset" | "tx-burst")),
                "{key}={value}"
            );
        }
    }

    #[test]
    fn queue_pairs_may_have_policies_of_their_own_until_all_are_given_one() {
        let sets = ["poll/1=timer:1000", "kick/0=coalesce:50,8", "poll/1=spin", "poll/15=event"];
        let sets: Vec<Setting> = sets.iter().map(|s| s.parse().unwrap()).collect();
        let mut settings = Settings::new(Policy::Event, Policy::Event, &sets);
        let polls = |settings: &Settings| [0, 1, 15].map(|queue| settings.poll_of(queue));
        assert_eq!(polls(&settings), [Policy::Event, Policy::Spin, Policy::Event]);
        let coalesce = Policy::Coalesce { usecs: 50, frames: 8 };
        assert_eq!((settings.kick_of(0), settings.kick_of(1)), (coalesce, Policy::Event));
        settings.follow(Some(0), Some(Policy::ADAPTIVE), None);
        assert_eq!(polls(&settings), [Policy::ADAPTIVE, Policy::Spin, Policy::Event]);
        settings.follow(None, Some(Policy::Spin), None);
        assert_eq!(polls(&settings), [Policy::Spin; 3]);
        assert_eq!(settings.kick_of(0), coalesce, "the other direction is as it was");
    }

    #[test]
    fn bad_settings_are_told_with_the_nearest_good_one() {
        for (bad, hint) in [
            ("poll=spin", "is an option: --poll spin, or --set poll/QUEUE=spin"),
            ("kick/16=spin", "use kick/QUEUE, a queue pair's number, 0 to 15"),
            ("poll/0=spn", "poll/0=spn: unknown policy 'spn'"),
            ("call/0=spin", "known: tx-completion"),
            ("tx-complete=orphan", "did you mean 'tx-completion'?"),
            ("headr=apart", "did you mean 'header'?"),
            ("nonsense", "known: tx-completion, tx-full"),
            ("tx-completion", "use orphan, before-tx"),
            ("tx-completion=orpan", "did you mean 'orphan'?"),
            ("tx-completion=timer", "from 1 to 20000"),
            ("tx-completion=timer:20001", "from 1 to 20000"),
            ("tx-completion=orphan:3", "use orphan"),
            ("tx-full=retry", "use stop-before-full, busy-retry"),
            ("rx-refill=below-halve", "did you mean 'below-half'?"),
            ("rx-refill=batch:0", "from 1 to 32768"),
            ("rx-refill=at-once:1", "use at-once"),
            ("header=apar", "did you mean 'apart'?"),
            ("offset=65", "0 to 64"),
            ("offset=-1", "0 to 64"),
            ("suppress=flag", "did you mean 'flags'?"),
            ("indirect=yes", "use on, off"),
            ("checks=", "use on, off"),
            ("tx-burst=0", "1 to 64"),
            ("tx-burst=65", "1 to 64"),
        ] {
            let error = bad.parse::<Setting>().unwrap_err();
            assert!(error.contains(hint), "{bad}: {error}");
        }
    }
}
