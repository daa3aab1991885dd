//! Durations and instants as distinct types. Nothing here reads a clock.
//!
//! All arithmetic saturates: the time since a later instant is zero (clocks of two CPUs may differ
//! slightly), and [`Instant::NEVER`] plus any duration is [`Instant::NEVER`].

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub, SubAssign};
use std::time::Duration;

/// A duration, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Ns(u64);

impl Ns {
    /// No time.
    pub const ZERO: Self = Self(0);
    /// The longest duration, 584 years.
    pub const MAX: Self = Self(u64::MAX);

    /// Duration of `ns` nanoseconds.
    #[inline]
    pub const fn new(ns: u64) -> Self {
        Self(ns)
    }

    /// Duration of `us` microseconds.
    #[inline]
    pub const fn from_us(us: u64) -> Self {
        Self(us.saturating_mul(1_000))
    }

    /// Duration of `ms` milliseconds.
    #[inline]
    pub const fn from_ms(ms: u64) -> Self {
        Self(ms.saturating_mul(1_000_000))
    }

    /// Duration of `secs` seconds.
    #[inline]
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000_000_000))
    }

    /// The number of nanoseconds.
    #[inline]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Quotient of two durations, rounded down; a `part` of zero counts as 1 ns.
    #[inline]
    pub const fn times(self, part: Self) -> u64 {
        match part.0 {
            0 => self.0,
            part => self.0 / part,
        }
    }

    /// `self * times / over` without intermediate overflow; an `over` of 0 counts as 1.
    #[inline]
    pub fn scale(self, times: u64, over: u64) -> Self {
        let scaled = u128::from(self.0) * u128::from(times) / u128::from(over.max(1));
        Self(u64::try_from(scaled).unwrap_or(u64::MAX))
    }
}

/// An instant of a monotonic clock, in nanoseconds since the clock's start. All instants of one
/// switch are of the same clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct Instant(u64);

impl Instant {
    /// The start of the clock.
    pub const START: Self = Self(0);
    /// Later than anything that happens.
    pub const NEVER: Self = Self(u64::MAX);

    /// The instant this many nanoseconds after the start.
    #[inline]
    pub const fn from_ns(ns: u64) -> Self {
        Self(ns)
    }

    /// Nanoseconds since the start.
    #[inline]
    pub const fn ns(self) -> u64 {
        self.0
    }

    /// Number of whole periods since the start.
    #[inline]
    pub const fn periods(self, period: Ns) -> u64 {
        Ns(self.0).times(period)
    }
}

impl fmt::Display for Ns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ns", self.0)
    }
}

impl fmt::Display for Instant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ns", self.0)
    }
}

impl Add for Ns {
    type Output = Self;

    #[inline]
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Sub for Ns {
    type Output = Self;

    #[inline]
    fn sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl AddAssign for Ns {
    #[inline]
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl SubAssign for Ns {
    #[inline]
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}

impl Mul<u64> for Ns {
    type Output = Self;

    #[inline]
    fn mul(self, times: u64) -> Self {
        Self(self.0.saturating_mul(times))
    }
}

impl Mul<Ns> for u64 {
    type Output = Ns;

    #[inline]
    fn mul(self, length: Ns) -> Ns {
        length * self
    }
}

impl Div<u64> for Ns {
    type Output = Self;

    /// Panics where `parts` is zero.
    #[inline]
    fn div(self, parts: u64) -> Self {
        Self(self.0 / parts)
    }
}

impl Sum for Ns {
    fn sum<I: Iterator<Item = Self>>(lengths: I) -> Self {
        lengths.fold(Self::ZERO, Add::add)
    }
}

impl From<Duration> for Ns {
    fn from(duration: Duration) -> Self {
        Self::from_secs(duration.as_secs()) + Self(duration.subsec_nanos().into())
    }
}

impl From<Ns> for Duration {
    fn from(length: Ns) -> Self {
        Self::from_nanos(length.0)
    }
}

impl Sub for Instant {
    type Output = Ns;

    /// The time since `earlier`; zero if that is later.
    #[inline]
    fn sub(self, earlier: Self) -> Ns {
        Ns(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Ns> for Instant {
    type Output = Self;

    #[inline]
    fn add(self, length: Ns) -> Self {
        Self(self.0.saturating_add(length.0))
    }
}

impl Sub<Ns> for Instant {
    type Output = Self;

    #[inline]
    fn sub(self, length: Ns) -> Self {
        Self(self.0.saturating_sub(length.0))
    }
}

impl AddAssign<Ns> for Instant {
    #[inline]
    fn add_assign(&mut self, length: Ns) {
        *self = *self + length;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saturates_at_both_ends() {
        let (start, second) = (Instant::START, Ns::from_secs(1));
        assert_eq!(Instant::NEVER + second, Instant::NEVER);
        assert_eq!((start - second, start - (start + second)), (start, Ns::ZERO));
        assert_eq!((start + second) - start, second);
        assert_eq!(
            (Ns::MAX + second, Ns::ZERO - second, Ns::MAX * 2),
            (Ns::MAX, Ns::ZERO, Ns::MAX)
        );
        assert_eq!(Ns::from_secs(u64::MAX), Ns::MAX);
        assert_eq!((second.times(Ns::from_ms(3)), Ns::new(7).times(Ns::ZERO)), (333, 7));
        assert_eq!(Ns::from(Duration::MAX), Ns::MAX);
        assert_eq!(Duration::from(Ns::from_us(1500)), Duration::from_micros(1500));
    }
}
