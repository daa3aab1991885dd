//! Buckets in virtual time.

use proptest::prelude::*;

use super::*;

const SECOND: u64 = 1_000_000_000;

fn limiter(bits: Option<(u64, u64)>, frames: Option<(u64, u64)>) -> Limiter {
    let limit = |(per_second, burst)| Limit { per_second, burst };
    let limiter = Limiter::default();
    limiter.set(RateLimits { bits: bits.map(limit), frames: frames.map(limit) });
    limiter
}

fn at(ns: u64) -> Instant {
    Instant::from_ns(ns)
}

/// Takes bursts of at most 64 frames of `len` bytes whenever it may, for `ns`; each wake-up is late
/// by `late`. Returns frames and bytes taken, and the number of wake-ups.
fn drive(limiter: &Limiter, len: impl Fn(u64) -> u64, ns: u64, late: u64) -> (u64, u64, u64) {
    let (mut now, mut frames, mut bytes, mut wakes) = (SECOND, 0, 0, 0);
    while now < SECOND + ns {
        if let Some(due) = limiter.due(at(now)) {
            assert!(due > at(now), "it always continues");
            (now, wakes) = (due.ns() + late, wakes + 1);
            continue;
        }
        let burst = limiter.budget(64, at(now)) as u64;
        assert!((1..=64).contains(&burst));
        let taken = (0..burst).map(|i| len(frames + i)).sum();
        limiter.charge(burst, taken, at(now));
        (frames, bytes) = (frames + burst, bytes + taken);
    }
    (frames, bytes, wakes)
}

#[test]
fn unlimited_is_never_late_and_takes_all() {
    let limiter = limiter(None, None);
    assert!(!limiter.is_on() && limiter.admit(1, 1500, at(0)));
    assert_eq!((limiter.due(at(0)), limiter.budget(64, at(0))), (None, 64));
}

#[test]
fn debt_of_a_long_frame_is_paid_before_the_next() {
    // 64 KiB at 1 Mbit/s: half a second.
    let limiter = limiter(Some((1_000_000, 10_000)), None);
    let now = at(SECOND);
    assert!(limiter.admit(1, 65_536, now) && !limiter.admit(1, 60, now));
    let due = limiter.due(now).unwrap();
    let (owed, gather) = (65_536 * 8 * 1000 - 10_000_000, 100_000);
    assert_eq!(due - now, Ns::new(owed + gather));
    assert!(!limiter.admit(1, 60, now + Ns::new(owed - 1)));
    assert!(limiter.admit(1, 60, due));
}

#[test]
fn idle_time_gives_one_burst_and_a_new_limit_starts_full() {
    let limiter = limiter(None, Some((1000, 20)));
    let burst = |now| (0..100).filter(|_| limiter.admit(1, 60, at(now))).count();
    assert_eq!(burst(SECOND), 20);
    assert_eq!(burst(99 * SECOND), 20);
    limiter.set(RateLimits { bits: None, frames: Some(Limit { per_second: 10, burst: 5 }) });
    assert_eq!(burst(99 * SECOND), 5);
    limiter.set(RateLimits::default());
    assert_eq!(burst(99 * SECOND), 100);
}

#[test]
fn the_stricter_of_both_limits_applies() {
    // Frames of 100 bytes: 1250 per second by bits.
    for (frames, want) in [(500, 5000), (5000, 12_500)] {
        let limiter = limiter(Some((1_000_000, 12_000)), Some((frames, 10)));
        let (taken, ..) = drive(&limiter, |_| 100, 10 * SECOND, 0);
        assert!((want..want + 80).contains(&taken), "{taken}");
    }
}

#[test]
fn fast_rates_gather_frames_and_slow_ones_are_on_time() {
    for (bits, wakes_max) in [(10_000_000_000, 10_000), (100_000_000, 10_000), (1_000_000, 90)] {
        let limiter = limiter(Some((bits, bits / 100)), None);
        let (_, bytes, wakes) = drive(&limiter, |_| 1514, SECOND, 0);
        assert!(wakes <= wakes_max, "{bits}: {wakes}");
        let over = bytes * 8 - bits;
        assert!(over <= bits / 100 + 65 * 1514 * 8, "{bits}: {over}");
    }
}

#[test]
fn threads_that_share_a_bucket_share_its_rate() {
    let limiter = limiter(None, Some((1, 1000)));
    let all: usize = std::thread::scope(|scope| {
        let take = || (0..2000).filter(|_| limiter.admit(1, 60, at(SECOND))).count();
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(take)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    // Each may pass the check once before another's charge is visible.
    assert!((1000..=1003).contains(&all), "{all}");
}

proptest! {
    /// The division of 64 bits gives what that of 128 bits does.
    #[test]
    fn numbers_are_scaled_exactly(
        a in any::<u64>(),
        b in any::<u64>(),
        shift in 0..64_u32,
        more in any::<u64>(),
        by in 1..u64::MAX,
    ) {
        let (a, by) = (a >> shift, (by >> (63 - shift)).max(1));
        let want = (u128::from(a) * u128::from(b) + u128::from(more)) / u128::from(by);
        prop_assert_eq!(u128::from(scaled(a, b, more, by)), want.min(u128::from(u64::MAX)));
    }

    /// A burst that there are tokens for as a whole has them frame by frame, to the last but one
    /// token; one more token than there are is not there.
    #[test]
    fn whole_burst_has_tokens_if_its_frames_have(
        per_second in 1_000_u64..100_000_000_000,
        burst in 12_000_u64..10_000_000_000,
        spent in 0_u64..20_000_000,
        lens in proptest::collection::vec(60_u64..65_536, 1..64),
        later in 0_u64..100_000_000,
    ) {
        let limiter = limiter(Some((per_second, burst)), None);
        let now = at(SECOND + later);
        limiter.charge(1, spent / 8, at(SECOND));
        let (n, bytes) = (lens.len() as u64, lens.iter().sum::<u64>());
        let left = limiter.bits.available(now).unwrap();
        // Tokens that are lost in rounding to the parts of a nanosecond.
        let rounding = per_second.div_ceil(SECOND * PARTS) + 1;
        prop_assert!(!limiter.bits.has(left + rounding, now));
        prop_assert!(left <= rounding || limiter.bits.has(left - rounding, now));
        if limiter.has(n, bytes, now) {
            prop_assert!(bytes * 8 <= left);
            let all = lens.iter().map(|len| (1, *len));
            prop_assert_eq!(limiter.prefix(all, now), lens.len());
            prop_assert!(limiter.budget(lens.len(), now) >= 1);
        }
    }

    /// A backlogged queue gets its rate: no less, and no more than a burst and one turn above.
    #[test]
    fn backlog_is_served_at_the_rate(
        kbits in 1_u64..10_000_000,
        burst_part in 2_u64..1000,
        seed in any::<u64>(),
        late in 0_u64..50_000,
    ) {
        let bits = kbits * 1000;
        let burst = (bits / burst_part).max(24_000);
        let limiter = limiter(Some((bits, burst)), None);
        let len = |i: u64| 60 + (i ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) % 1455;
        // A second of a fast rate has millions of frames; a few of a slow one take long.
        let ns = (200_000 * 8000).clamp(SECOND / 100, 100 * SECOND).min(4_000_000_000_000 / kbits);
        let (_, bytes, _) = drive(&limiter, len, ns, late);
        let want = u128::from(bits) * u128::from(ns) / u128::from(SECOND);
        let got = u128::from(bytes) * 8;
        let most = want + u128::from(burst) + 64 * 1514 * 8 + want / 1000;
        prop_assert!(got <= most, "{got} of {most}");
        // Tokens beyond a full bucket are lost if a wake-up is later than the burst lasts.
        if burst * SECOND / bits > 4 * late.max(1) {
            prop_assert!(got + want / 1000 >= want, "{got} of {want}");
        }
    }
}
