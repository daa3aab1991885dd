//! Settings of the driver half: `--set KEY=VALUE` of `nic` and `gen`.

use std::fmt;
use std::str::FromStr;

use api::PerQueue;
use api::schema::{Entry, Value, driver};
use switch::poll::Policy;

/// Most frames sent at once.
const TX_BURST_MAX: u8 = 64;
/// Bytes of a receive buffer: a page. Longer frames take several (MRG_RXBUF).
pub(super) const RX_BUFFER: u16 = 4096;

/// Times at which transmitted buffers are reclaimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// Before each burst is sent.
    BeforeTx,
    /// Only at ticks of a timer that runs while any is in flight.
    Timer {
        /// Ticks per second.
        hz: u32,
    },
    /// When all in flight are used; then a sleeping driver is called.
    OnEmpty,
    /// When half are free; then a sleeping driver is called.
    OnHalfEmpty,
    /// When a burst finds too few free; no sender waits for completion.
    Orphan,
}

/// Behaviour of a sender without a free buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// Stops taking frames, and sleeps until there is a buffer.
    Stop,
    /// Retries at once, indefinitely.
    BusyRetry,
    /// Puts up to so many frames into a queue beside the ring, then stops taking frames.
    Queue(u16),
}

impl Full {
    /// Frames that can wait beside the ring.
    pub fn queue(self) -> u16 {
        match self {
            Self::Queue(frames) => frames,
            Self::Stop | Self::BusyRetry => 0,
        }
    }
}

/// Times at which received buffers are returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refill {
    /// After each poll that found frames.
    AtOnce,
    /// When the switch has fewer than half of them.
    BelowHalf,
    /// In batches of this size.
    Batch(u16),
}

/// Means of suppressing notifications.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suppress {
    /// By index.
    EventIndex,
    /// By flags; virtqueues only.
    Flags,
    /// Not at all: calls are never suppressed; on Xen rings neither are kicks.
    None,
}

/// Settings of the driver half, except features with their own options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Poll policy of the receive ring.
    pub poll: Policy,
    /// Policy of notifications of transmitted frames.
    pub kick: Policy,
    /// `poll/QUEUE`: overrides for single queue pairs.
    pub poll_one: PerQueue<Policy>,
    /// `kick/QUEUE`.
    pub kick_one: PerQueue<Policy>,
    /// `tx-completion`.
    pub completion: Completion,
    /// `tx-full`.
    pub full: Full,
    /// `rx-refill`.
    pub refill: Refill,
    /// `header=apart`: in its own descriptor.
    pub apart: bool,
    /// `offset`: bytes left unused at the start of each buffer.
    pub offset: u8,
    /// `suppress`.
    pub suppress: Suppress,
    /// `indirect`.
    pub indirect: bool,
    /// `checks`.
    pub checks: bool,
    /// `tx-burst`: most frames sent at once.
    pub tx_burst: u8,
    /// `rx-buffer`: bytes of a receive buffer.
    pub rx_buffer: u16,
}

/// One `--set`: an entry of [`driver::TABLE`] and its value.
#[derive(Clone, Debug)]
pub struct Setting {
    entry: &'static Entry,
    queue: Option<usize>,
    value: Value,
}

impl Settings {
    /// The defaults, changed by `sets`; the last one of a key applies.
    pub fn new(poll: Policy, kick: Policy, sets: &[Setting]) -> Self {
        let mut settings = Self {
            poll,
            kick,
            poll_one: PerQueue::default(),
            kick_one: PerQueue::default(),
            completion: Completion::Orphan,
            full: Full::Stop,
            refill: Refill::AtOnce,
            apart: false,
            offset: 0,
            suppress: Suppress::EventIndex,
            indirect: true,
            checks: true,
            tx_burst: TX_BURST_MAX,
            rx_buffer: RX_BUFFER,
        };
        for Setting { entry, queue, value } in sets {
            match (queue, value.text()) {
                (Some(queue), Some(text)) if entry.name == "poll" => {
                    settings.poll_one.set_one(*queue, policy(text));
                }
                (Some(queue), Some(text)) => settings.kick_one.set_one(*queue, policy(text)),
                _ => settings.set(entry.name, value),
            }
        }
        settings
    }

    /// Applies a value of the schema.
    fn set(&mut self, key: &str, value: &Value) {
        let n = value.number().unwrap_or_default();
        match (key, value.word().unwrap_or_default()) {
            ("tx-completion", "before-tx") => self.completion = Completion::BeforeTx,
            ("tx-completion", "timer") => self.completion = Completion::Timer { hz: n as u32 },
            ("tx-completion", "on-empty") => self.completion = Completion::OnEmpty,
            ("tx-completion", "on-half-empty") => self.completion = Completion::OnHalfEmpty,
            ("tx-completion", _) => self.completion = Completion::Orphan,
            ("tx-full", "busy-retry") => self.full = Full::BusyRetry,
            ("tx-full", "queue") => self.full = Full::Queue(n as u16),
            ("tx-full", _) => self.full = Full::Stop,
            ("rx-refill", "below-half") => self.refill = Refill::BelowHalf,
            ("rx-refill", "batch") => self.refill = Refill::Batch(n as u16),
            ("rx-refill", _) => self.refill = Refill::AtOnce,
            ("header", word) => self.apart = word == "apart",
            ("offset", _) => self.offset = n as u8,
            ("suppress", "flags") => self.suppress = Suppress::Flags,
            ("suppress", "none") => self.suppress = Suppress::None,
            ("suppress", _) => self.suppress = Suppress::EventIndex,
            ("indirect", word) => self.indirect = word == "on",
            ("checks", word) => self.checks = word == "on",
            ("tx-burst", _) => self.tx_burst = n as u8,
            ("rx-buffer", _) => self.rx_buffer = n as u16,
            (key, _) => unreachable!("the driver half does not implement the setting {key}"),
        }
    }

    /// The poll policy of a queue pair.
    pub fn poll_of(&self, queue: usize) -> Policy {
        self.poll_one.of(queue).unwrap_or(self.poll)
    }

    /// The kick policy of a queue pair.
    pub fn kick_of(&self, queue: usize) -> Policy {
        self.kick_one.of(queue).unwrap_or(self.kick)
    }

    /// Changes policies of one queue pair, or of all.
    pub fn set_policies(
        &mut self,
        queue: Option<usize>,
        poll: Option<Policy>,
        kick: Option<Policy>,
    ) {
        let ours = [(&mut self.poll, &mut self.poll_one), (&mut self.kick, &mut self.kick_one)];
        for ((all, one), new) in ours.into_iter().zip([poll, kick]) {
            match (queue, new) {
                (Some(queue), Some(new)) => one.set_one(queue, new),
                (None, Some(new)) => (*all, *one) = (new, PerQueue::default()),
                (_, None) => {}
            }
        }
    }

    /// Keys and values, as on the command line, without overrides for single queues.
    pub fn pairs(&self) -> [(&'static str, String); 12] {
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
            ("rx-buffer", self.rx_buffer.to_string()),
        ]
    }
}

/// Parses a policy that the schema has checked.
pub(crate) fn policy(text: &str) -> Policy {
    text.parse().expect("the schema takes policies only")
}

impl FromStr for Setting {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let (entry, queue, value) = driver::parse(s)?;
        Ok(Self { entry, queue, value })
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
        match self {
            Self::Stop => f.write_str("stop-before-full"),
            Self::BusyRetry => f.write_str("busy-retry"),
            Self::Queue(frames) => write!(f, "queue:{frames}"),
        }
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
    fn settings_print_as_given_and_the_last_one_applies() {
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
            "rx-buffer=2048",
        ];
        let parsed: Vec<Setting> = sets.iter().map(|s| s.parse().unwrap()).collect();
        let settings = Settings::new(Policy::Event, Policy::Spin, &parsed);
        let said: Vec<_> =
            settings.pairs()[2..].iter().map(|(key, value)| format!("{key}={value}")).collect();
        assert_eq!(said, sets);
        for value in ["orphan", "before-tx", "on-empty", "on-half-empty"] {
            let set = format!("tx-completion={value}").parse().unwrap();
            let settings = Settings::new(Policy::Event, Policy::Event, &[parsed[0].clone(), set]);
            assert_eq!(settings.pairs()[2].1, value);
        }
        let queue =
            Settings::new(Policy::Event, Policy::Event, &["tx-full=queue:8".parse().unwrap()]);
        assert!(queue.pairs().contains(&("tx-full", "queue:8".into())));
        let none = Settings::new(Policy::Event, Policy::Event, &["suppress=none".parse().unwrap()]);
        assert!(none.pairs().contains(&("suppress", "none".into())));
        let defaults = Settings::new(Policy::Event, Policy::Event, &[]);
        let table = driver::TABLE.iter().filter(|entry| !entry.per_queue);
        let table: Vec<_> = table.map(|entry| (entry.name, entry.default.to_string())).collect();
        assert_eq!(defaults.pairs()[2..], table);
    }

    #[test]
    fn policies_of_queue_pairs_hold_until_all_are_set() {
        let sets = ["poll/1=timer:1000", "kick/0=coalesce:50,8", "poll/1=spin", "poll/15=event"];
        let sets: Vec<Setting> = sets.iter().map(|s| s.parse().unwrap()).collect();
        let mut settings = Settings::new(Policy::Event, Policy::Event, &sets);
        let polls = |settings: &Settings| [0, 1, 15].map(|queue| settings.poll_of(queue));
        assert_eq!(polls(&settings), [Policy::Event, Policy::Spin, Policy::Event]);
        let coalesce = Policy::Coalesce { usecs: 50, frames: 8 };
        assert_eq!((settings.kick_of(0), settings.kick_of(1)), (coalesce, Policy::Event));
        settings.set_policies(Some(0), Some(Policy::ADAPTIVE), None);
        assert_eq!(polls(&settings), [Policy::ADAPTIVE, Policy::Spin, Policy::Event]);
        settings.set_policies(None, Some(Policy::Spin), None);
        assert_eq!(polls(&settings), [Policy::Spin; 3]);
        assert_eq!(settings.kick_of(0), coalesce, "the other direction is unchanged");
    }

    #[test]
    fn invalid_settings_are_rejected_with_a_suggestion() {
        for (bad, hint) in [
            ("poll=spin", "use the option --poll spin, or --set poll/QUEUE=spin"),
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
            ("tx-full=retry", "use stop-before-full, busy-retry, queue:N"),
            ("tx-full=queue:0", "from 1 to 1024"),
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
            ("rx-buffer=2047", "2048 to 4096"),
        ] {
            let error = bad.parse::<Setting>().unwrap_err();
            assert!(error.contains(hint), "{bad}: {error}");
        }
    }
}
