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
    /// Sends at multiples of this time only.
    tick: Option<Tick>,
}

/// Times at which a sender wakes, in time with traffic.
#[derive(Clone, Copy, Debug)]
struct Tick {
    /// From one to the next, in ns.
    every: u64,
    /// The first one at which more may be sent.
    next: u64,
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
            (Some(_), Some(_)) => return Err("--burst N,GAP_US and --rate: use one of them".into()),
            (Some(gap), None) => Some(gap as f64 * 1e3),
            (None, Some(rate)) => Some(frames as f64 * 1e9 / rate),
            (None, None) if burst.is_some() => {
                return Err("--burst N: add --rate, or a gap: --burst N,GAP_US".into());
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
            tick: None,
        })
    }

    /// Delays frames to multiples of `tick`: at each, all that became due since the last one
    /// are sent, at most [`CATCH_UP`] times the rate.
    ///
    /// # Errors
    /// There is no rate; or the tick is 0 or longer than a second.
    pub fn with_tick(mut self, tick: Option<Ns>) -> Result<Self, String> {
        let Some(tick) = tick else { return Ok(self) };
        if self.period.is_none() {
            return Err("--tick: add --rate, or --burst N,GAP_US".into());
        }
        if tick == Ns::ZERO || tick > Ns::from_secs(1) {
            return Err(format!("--tick {}: use 1 to 1000000 us", tick.get() / 1000));
        }
        self.tick = Some(Tick { every: tick.get(), next: 0 });
        Ok(self)
    }

    /// Bursts that are due at `active`, with ticks.
    fn due_at(&self, active: u64, period: f64, tick: Tick) -> u64 {
        let at = active / tick.every * tick.every;
        if active / tick.every < tick.next {
            return 0;
        }
        // Burst k is due at k periods, rounded up as in `next`.
        let due = (at as f64 / period) as u64 + 1;
        let due = due + u64::from(due as f64 * period <= at as f64);
        let most = (tick.every as f64 / period * CATCH_UP) as u64 + 1;
        due.saturating_sub(self.begun).min(most)
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
        if let Some(tick) = self.tick {
            return self.due_at(active, period, tick) * self.burst;
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
        if let (Some(tick), Some(active)) = (self.tick, self.active(now)) {
            // What a batch or the ring has no room for is sent next, without another tick.
            let bursts = self.due_at(active, period, tick).max(frames.div_ceil(self.burst));
            self.begun += bursts;
            self.left = bursts * self.burst - frames;
            self.tick = Some(Tick { next: active / tick.every + 1, ..tick });
            return;
        }
        let bursts = frames.div_ceil(self.burst);
        self.begun += bursts;
        self.left = bursts * self.burst - frames;
        self.not_before = now + Ns::new((period / CATCH_UP) as u64);
    }

    /// Returns the time at which the next frame is due; `now` if one is.
    pub fn next(&self, now: Instant) -> Instant {
        if self.due(now) > 0 {
            return now;
        }
        let since = (now - self.start).get();
        let due = |period: f64| {
            let at = (self.begun as f64 * period).ceil() as u64;
            self.tick.map_or(at, |tick| at.div_ceil(tick.every).max(tick.next) * tick.every)
        };
        let next = match (self.on_off, self.period) {
            (None, None) => now,
            (None, Some(period)) => self.start + Ns::new(due(period)),
            (Some((on, both)), period) => {
                // First in active time, then converted to the clock.
                let at = period.map_or(0, due);
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
    fn ticks_send_what_became_due_and_keep_the_rate() {
        let ticked = |rate: f64, burst, on_off, tick| {
            pace(Some(rate), burst, on_off).with_tick(Some(Ns::new(tick))).unwrap()
        };
        // A sender that wakes when it asked to, or somewhat later: frames leave within one wake.
        for (rate, tick) in [(20e3, 1_000_000), (33_333.0, 500_000), (700.0, 1_000_000)] {
            for late in [0, 70_000] {
                let mut pace = ticked(rate, None, None, tick);
                let (mut now, mut sent, mut wakes) = (0, 0_u64, 0_u64);
                while now < 1_000_000_000 {
                    wakes += 1;
                    loop {
                        // A batch, as a generator has it.
                        let n = pace.due(at(now)).min(16);
                        pace.record_sent(n, at(now));
                        sent += n;
                        if n == 0 {
                            break;
                        }
                    }
                    let next = pace.next(at(now));
                    assert!(next > at(now), "{rate}: {next:?} at {now}");
                    assert_eq!(next.ns() % tick, 0);
                    now = next.ns() + late;
                }
                let most = (1e9 / tick as f64).min(rate) as u64 + 1;
                assert!(wakes <= most, "{rate}: {wakes} wake-ups");
                assert!((sent as f64 / rate - 1.0).abs() < 0.01, "{rate}: {sent}");
            }
        }
        // After a second without a CPU, four times the rate.
        let mut late = ticked(20e3, None, None, 1_000_000);
        assert_eq!(late.due(at(1_000_000_000)), 81);
        late.record_sent(81, at(1_000_000_000));
        assert_eq!(late.due(at(1_000_500_000)), 0);
        assert_eq!(late.due(at(1_001_000_000)), 81);
        // Bursts stay whole; pauses have no ticks.
        let mut bursts = ticked(20e3, Some("8"), None, 1_000_000);
        assert_eq!(bursts.due(at(0)), 8);
        bursts.record_sent(8, at(0));
        assert_eq!(bursts.due(at(1_000_000)), 16);
        let pauses = run(&mut ticked(20e3, None, Some("3,7"), 1_000_000), 100_000, 100_000_000);
        // All but those of the last tick, at the end of the run.
        assert!((580..=600).contains(&pauses.len()), "{}", pauses.len());
        assert!(pauses.iter().all(|at| at % 10_000_000 < 3_000_000));
        // Without a rate there is nothing to delay.
        let refused = |pace: Pace, us| pace.with_tick(Some(Ns::from_us(us))).unwrap_err();
        assert!(refused(pace(None, None, None), 5).contains("--rate"));
        for us in [0, 1_000_001] {
            assert!(refused(pace(Some(1.0), None, None), us).contains("1 to 1000000"));
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
        assert!(Pace::new(at(0), Some(1.0), burst, None).unwrap_err().contains("use one of them"));
    }
}
