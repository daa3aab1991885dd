//! Timing of `gen`: rates, bursts, alternating traffic and pauses.

use std::str::FromStr;
use switch::time::{Instant, Ns};

/// Delay that a sender makes up for in one burst; for longer delays it catches up at
/// [`CATCH_UP`] times its rate.
const CATCH_UP_WINDOW: Ns = Ns::from_us(10);
/// Factor over its rate of a sender that catches up.
const CATCH_UP: f64 = 4.0;

/// Parses a rate in frames per second: `1000`, `100k`, `1.5M`.
///
/// # Errors
/// It is invalid; the error says what to write.
pub fn parse_rate(s: &str) -> Result<f64, String> {
    let (digits, factor) = match s.char_indices().last() {
        Some((at, 'k' | 'K')) => (&s[..at], 1e3),
        Some((at, 'm' | 'M')) => (&s[..at], 1e6),
        _ => (s, 1.0),
    };
    let rate = digits.parse::<f64>().ok().map(|n| n * factor);
    rate.filter(|n| n.is_finite() && *n > 0.0)
        .ok_or_else(|| format!("invalid rate '{s}': use frames per second, 1000, 100k or 1.5M"))
}

/// `--burst N[,GAP_US]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Burst {
    /// Frames sent at once.
    pub frames: u32,
    /// Time from one burst to the next, in us; `None`: from `--rate`.
    pub gap_us: Option<u64>,
}

impl FromStr for Burst {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let error = || format!("invalid burst '{s}': use FRAMES, or FRAMES,GAP_US; at least 1");
        let (frames, gap) = s.split_once(',').map_or((s, None), |(n, gap)| (n, Some(gap)));
        let frames = frames.parse().ok().filter(|n| *n > 0).ok_or_else(error)?;
        let gap_us = gap.map(|gap| gap.parse().ok().filter(|n| *n > 0).ok_or_else(error));
        Ok(Self { frames, gap_us: gap_us.transpose()? })
    }
}

/// `--on-off ON_MS,OFF_MS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnOff {
    /// Time with traffic.
    pub on: Ns,
    /// Time without.
    pub off: Ns,
}

impl FromStr for OnOff {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let error = || format!("invalid times '{s}': use ON_MS,OFF_MS; at least 0.01");
        let number = |s: &str| {
            let ms = s.parse().ok().filter(|ms: &f64| (0.01..=1e9).contains(ms));
            ms.map(|ms| Ns::new((ms * 1e6) as u64)).ok_or_else(error)
        };
        let (on, off) = s.split_once(',').ok_or_else(error)?;
        Ok(Self { on: number(on)?, off: number(off)? })
    }
}

/// Computes how many frames are due.
#[derive(Clone, Debug)]
pub struct Pace {
    start: Instant,
    /// From one burst to the next, in ns; `None`: unlimited.
    period: Option<f64>,
    burst: u64,
    /// Time with traffic, and the whole period, in ns.
    on_off: Option<(u64, u64)>,
    /// Bursts started.
    begun: u64,
    /// Unsent frames of the last burst.
    left: u64,
    not_before: Instant,
}

impl Pace {
    /// Starts at `start`.
    ///
    /// # Errors
    /// Rate and burst are not compatible; the error says what to write.
    pub fn new(
        start: Instant,
        rate: Option<f64>,
        burst: Option<Burst>,
        on_off: Option<OnOff>,
    ) -> Result<Self, String> {
        let frames = burst.map_or(1, |b| u64::from(b.frames));
        let period = match (burst.and_then(|b| b.gap_us), rate) {
            (Some(_), Some(_)) => return Err("--burst N,GAP_US and --rate: give one".into()),
            (Some(gap), None) => Some(gap as f64 * 1e3),
            (None, Some(rate)) => Some(frames as f64 * 1e9 / rate),
            (None, None) if burst.is_some() => {
                return Err("--burst N: give it --rate, or a gap: --burst N,GAP_US".into());
            }
            (None, None) => None,
        };
        let on_off = on_off.map(|p| (p.on.get(), (p.on + p.off).get()));
        Ok(Self {
            start,
            period,
            burst: frames,
            on_off,
            begun: 0,
            left: 0,
            not_before: Instant::START,
        })
    }

    /// Time with traffic up to `now`; `None` while there is none.
    fn active(&self, now: Instant) -> Option<u64> {
        let since = (now - self.start).get();
        match self.on_off {
            None => Some(since),
            Some((on, both)) if since % both < on => Some(since / both * on + since % both),
            Some(_) => None,
        }
    }

    /// Frames that may be sent at `now`.
    pub fn due(&self, now: Instant) -> u64 {
        let Some(active) = self.active(now) else { return 0 };
        let Some(period) = self.period else { return u64::MAX };
        if self.left > 0 || now < self.not_before {
            return self.left;
        }
        let behind = ((active as f64 / period) as u64 + 1).saturating_sub(self.begun);
        let back = (now - self.not_before).min(CATCH_UP_WINDOW).get();
        behind.min((back as f64 / (period / CATCH_UP)) as u64 + 1) * self.burst
    }

    /// Records `frames` sent at `now`.
    pub fn record_sent(&mut self, frames: u64, now: Instant) {
        let Some(period) = self.period.filter(|_| frames > 0) else { return };
        if self.left > 0 {
            self.left = self.left.saturating_sub(frames);
            return;
        }
        let bursts = frames.div_ceil(self.burst);
        self.begun += bursts;
        self.left = bursts * self.burst - frames;
        self.not_before = now + Ns::new((period / CATCH_UP) as u64);
    }

    /// When the next frame is due; `now` if one is.
    pub fn next(&self, now: Instant) -> Instant {
        if self.due(now) > 0 {
            return now;
        }
        let since = (now - self.start).get();
        let next = match (self.on_off, self.period) {
            (None, None) => now,
            (None, Some(period)) => {
                self.start + Ns::new((self.begun as f64 * period).ceil() as u64)
            }
            (Some((on, both)), period) => {
                // First in active time, then converted to the clock.
                let at = period.map_or(0, |period| (self.begun as f64 * period).ceil() as u64);
                let cycle = if since % both < on { since / both } else { since / both + 1 };
                let at = at.max(cycle * on);
                self.start + Ns::new(at / on * both + at % on)
            }
        };
        next.max(self.not_before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many nanoseconds after the start.
    fn at(ns: u64) -> Instant {
        Instant::from_ns(ns)
    }

    /// Send times of a sender that wakes every `every` ns until `end`.
    fn run(pace: &mut Pace, every: u64, end: u64) -> Vec<u64> {
        let mut sent = Vec::new();
        let mut now = 0;
        while now < end {
            let n = pace.due(at(now)).min(64);
            if n == 0 {
                let next = pace.next(at(now));
                assert!(next > at(now), "at {now} nothing is due, but {next:?} is next");
            }
            pace.record_sent(n, at(now));
            sent.extend((0..n).map(|_| now));
            now += every;
        }
        sent
    }

    fn pace(rate: Option<f64>, burst: Option<&str>, on_off: Option<&str>) -> Pace {
        let (burst, on_off) =
            (burst.map(|s| s.parse().unwrap()), on_off.map(|s| s.parse().unwrap()));
        Pace::new(at(0), rate, burst, on_off).unwrap()
    }

    #[test]
    fn rates() {
        assert_eq!(parse_rate("1.5M"), Ok(1.5e6));
        assert_eq!(parse_rate("100k"), Ok(1e5));
        for bad in ["", "k", "-1", "0", "fast", "inf"] {
            assert!(parse_rate(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn rates_are_kept() {
        for rate in [10.0, 1e3, 33_333.0, 1e6, 2e6] {
            let second = 1_000_000_000;
            let sent = run(&mut pace(Some(rate), None, None), 300, second);
            assert!((sent.len() as f64 / rate - 1.0).abs() < 0.01, "{rate}: {}", sent.len());
        }
    }

    #[test]
    fn delayed_sender_catches_up_gradually() {
        let mut pace = pace(Some(10_000.0), None, None);
        run(&mut pace, 1_000, 10_000_000);
        // Asleep until 20 ms: 100 frames behind.
        let mut now = 20_000_000;
        let mut last = 0;
        while now < 40_000_000 {
            let n = pace.due(at(now));
            assert!(n <= 1);
            if n > 0 {
                assert!(now - last >= 24_000);
                last = now;
            }
            pace.record_sent(n, at(now));
            now += 1_000;
        }
        assert_eq!(pace.begun, 400);
    }

    #[test]
    fn bursts_are_sent_at_once_at_fixed_intervals() {
        for mut pace in [pace(Some(4e3), Some("4"), None), pace(None, Some("4,1000"), None)] {
            let sent = run(&mut pace, 1_000, 10_000_000);
            assert_eq!(sent.len(), 40);
            assert_eq!(sent[..5], [0, 0, 0, 0, 1_000_000]);
        }
        // Frames that do not fit follow later.
        let mut pace = pace(None, Some("100,1000"), None);
        assert_eq!(pace.due(at(0)), 100);
        pace.record_sent(64, at(0));
        assert_eq!((pace.due(at(100)), pace.next(at(100))), (36, at(100)));
        pace.record_sent(36, at(100));
        assert_eq!((pace.due(at(200)), pace.next(at(200))), (0, at(1_000_000)));
    }

    #[test]
    fn traffic_alternates_with_pauses() {
        let mut pace = pace(Some(1e6), None, Some("1,9"));
        let sent = run(&mut pace, 500, 30_000_000);
        assert!((2_990..=3_010).contains(&sent.len()), "{}", sent.len());
        assert!(sent.iter().all(|at| at % 10_000_000 < 1_000_000));
        assert_eq!(pace.next(at(31_500_000)), at(40_000_000));
        let flood = super::tests::pace(None, None, Some("2,3"));
        assert_eq!((flood.due(at(1_999_999)), flood.due(at(2_000_000))), (u64::MAX, 0));
        assert_eq!(
            (flood.next(at(2_000_000)), flood.next(at(6_000_000))),
            (at(5_000_000), at(6_000_000))
        );
        let short = super::tests::pace(None, None, Some("0.5,0.25"));
        assert_eq!((short.next(at(500_000)), short.next(at(750_000))), (at(750_000), at(750_000)));
    }

    #[test]
    fn invalid_values_are_rejected() {
        for bad in ["", "0", "x", "4,", "4,0", "4,5,6", "-1"] {
            assert!(bad.parse::<Burst>().unwrap_err().contains("FRAMES,GAP_US"), "{bad}");
        }
        for bad in ["", "5", "0,5", "5,0", "0.001,5", "inf,5", "NaN,5", "a,b", "1,2,3"] {
            assert!(bad.parse::<OnOff>().unwrap_err().contains("ON_MS,OFF_MS"), "{bad}");
        }
        let burst = Some("4".parse().unwrap());
        assert!(Pace::new(at(0), None, burst, None).unwrap_err().contains("--rate"));
        let burst = Some("4,9".parse().unwrap());
        assert!(Pace::new(at(0), Some(1.0), burst, None).unwrap_err().contains("give one"));
    }
}
