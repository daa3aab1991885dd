//! Axes: their ranges and ticks. The distance of ticks is 1, 2 or 5 times a power of ten.

use super::words::number;

/// An axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Whether it is logarithmic.
    pub log: bool,
    /// Ticks: values and labels.
    pub ticks: Vec<(f64, String)>,
}

/// Approximate number of ticks.
const TICKS: f64 = 5.0;

impl Axis {
    /// Returns the position of a value, from 0 (lower end) to 1; `None` if it has none (zero on a
    /// logarithmic axis).
    pub fn at(&self, value: f64) -> Option<f32> {
        let share = if self.log {
            (value.log10() - self.low.log10()) / (self.high.log10() - self.low.log10())
        } else {
            (value - self.low) / (self.high - self.low)
        };
        share.is_finite().then_some(share as f32)
    }

    /// Clamps a value to the range of the axis.
    pub fn clamp(&self, value: f64) -> f64 {
        value.clamp(self.low, self.high)
    }

    /// Returns the axis of categories at 0, 1, ...
    pub fn of_categories(names: &[String]) -> Self {
        let ticks = names.iter().enumerate().map(|(n, name)| (n as f64, name.clone())).collect();
        Self { low: -0.5, high: names.len().max(1) as f64 - 0.5, log: false, ticks }
    }

    /// Returns an axis that covers all values. If all are positive, it starts at zero if zero is
    /// near (`zero`: at any distance).
    pub fn of_values(values: &[f64], log: bool, zero: bool) -> Self {
        let values = values.iter().copied().filter(|v| v.is_finite() && (!log || *v > 0.0));
        let (low, high) = values.fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(v), h.max(v)));
        match (low <= high, log) {
            (false, false) => Self::linear(0.0, 1.0, TICKS),
            (false, true) => Self::logarithmic(1.0, 10.0),
            (true, true) => Self::logarithmic(low, high),
            (true, false) => {
                let near = low > 0.0 && (zero || low <= (high - low) * 0.6);
                let low = if near { 0.0 } else { low };
                let high = if zero { high.max(0.0) } else { high };
                Self::linear(low, high, TICKS)
            }
        }
    }

    /// Returns an x axis. That of integers in a small range has a tick at each and ends at the
    /// extreme values, or at zero if that is near and meaningful (`zero`).
    pub fn of_x(values: &[f64], log: bool, zero: bool) -> Self {
        let mut axis = Self::of_values(values, log, false);
        let least = values.iter().copied().fold(f64::MAX, f64::min);
        let most = values.iter().copied().fold(f64::MIN, f64::max);
        let whole = values.iter().all(|v| v.fract() == 0.0);
        if log || !whole || values.is_empty() {
            return axis;
        }
        if least == most {
            (axis.low, axis.high) = (most - 1.0, most + 1.0);
        } else if most - axis.low.floor() <= 16.0 {
            (axis.low, axis.high) = (if zero { axis.low.floor() } else { least }, most);
        } else {
            return axis;
        }
        let ticks = (0..=(axis.high - axis.low) as u32).map(|n| axis.low + f64::from(n));
        axis.ticks = ticks.map(|value| (value, number(value, 0))).collect();
        axis
    }

    /// Returns two axes from zero with the same number of ticks, chosen so that both are well used.
    pub fn pair(left: &[f64], right: &[f64]) -> (Self, Self) {
        let most = |values: &[f64]| {
            let most = values.iter().copied().filter(|v| v.is_finite()).fold(0.0, f64::max);
            if most > 0.0 { most } else { 1.0 }
        };
        let (left, right) = (most(left), most(right));
        let filled = |most: f64, count: f64| most / (count * round_step(most / count));
        let better = |a: &f64, b: &f64| {
            let [a, b] = [a, b].map(|count| filled(left, *count) * filled(right, *count));
            a.total_cmp(&b)
        };
        let count = [4.0, 5.0, 6.0, 7.0, 8.0].into_iter().max_by(better).unwrap_or(TICKS);
        let axis = |most: f64| {
            let step = round_step(most / count);
            Self { low: 0.0, high: step * count, log: false, ticks: ticks(0.0, step, count) }
        };
        (axis(left), axis(right))
    }

    fn linear(low: f64, high: f64, count: f64) -> Self {
        let (low, high) = match (high - low, low) {
            (wide, _) if wide > 0.0 => (low, high),
            (_, 0.0) => (0.0, 1.0),
            _ => (low - low.abs() / 2.0, high + high.abs() / 2.0),
        };
        // The step that leaves the least of the axis unused; of equal ones, that of fewest ticks.
        let ends = |step: f64| ((low / step + 1e-9).floor(), (high / step - 1e-9).ceil());
        let unused = |step: &f64| {
            let (first, last) = ends(*step);
            (last - first) * step - (high - low)
        };
        let steps = [0.0, 1.0, 2.0, 3.0].map(|more| round_step((high - low) / (count + more)));
        let less = |a: &f64, b: &f64| (unused(a) * 1.000_001).total_cmp(&unused(b));
        let step = steps.into_iter().min_by(less).unwrap_or(1.0);
        let (first, last) = ends(step);
        let (low, high) = (first * step, last * step);
        Self { low, high, log: false, ticks: ticks(low, step, last - first) }
    }

    fn logarithmic(low: f64, high: f64) -> Self {
        let (first, last) = (low.log10().floor() as i32, high.log10().ceil() as i32);
        let powers = first - 1..=last.max(first + 1);
        let all: Vec<f64> = powers
            .flat_map(|power| [1.0, 2.0, 5.0].map(|factor| factor * 10f64.powi(power)))
            .collect();
        let below = |value: &&f64| **value <= low * (1.0 + 1e-9);
        let start = all.iter().filter(below).count().saturating_sub(1);
        let above = |value: &f64| *value >= high * (1.0 - 1e-9);
        let end = all.iter().position(above).unwrap_or(all.len() - 1);
        let end = end.max(start + 1).min(all.len() - 1);
        let shown = &all[start.min(end - 1)..=end];
        // All values over a few decades, over more only powers of ten, over many not all of these.
        let every = match shown.len() {
            ..=8 => 1,
            len => 3 * (len / 24 + 1),
        };
        let whole = |value: &f64| (value.log10() - value.log10().round()).abs() < 1e-9;
        let start = if every == 1 { 0 } else { shown.iter().position(whole).unwrap_or(0) };
        let ticked = shown.iter().skip(start).step_by(every);
        let ticks = ticked.map(|value| (*value, label(*value, *value, *value))).collect();
        Self { low: shown[0], high: shown[shown.len() - 1], log: true, ticks }
    }
}

/// Rounds up to 1, 2 or 5 times a power of ten.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|f| f * power >= least * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * power
}

/// Returns `count` + 1 ticks from `low`.
fn ticks(low: f64, step: f64, count: f64) -> Vec<(f64, String)> {
    let most = low.abs().max((low + step * count).abs());
    let values = (0..=count as u32).map(|n| low + step * f64::from(n));
    values.map(|value| (value, label(value, step, most))).collect()
}

/// Returns the label of a value: with the SI prefix of the axis's maximum, and decimal places that
/// distinguish multiples of `step`.
fn label(value: f64, step: f64, most: f64) -> String {
    const PREFIXES: [(f64, &str); 6] =
        [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k"), (1e-3, ""), (1e-6, "µ")];
    let prefix = PREFIXES.into_iter().find(|(from, _)| most >= *from * (1.0 - 1e-9));
    let (from, letter) = prefix.unwrap_or((1e-9, "n"));
    let unit = match letter {
        "k" => 1e3,
        "" => 1.0,
        _ => from,
    };
    let digits = (0..9).find(|digits| {
        let scaled = step / unit * 10f64.powi(*digits);
        (scaled - scaled.round()).abs() < 1e-6 * scaled
    });
    let shown = number(value / unit, digits.unwrap_or(0) as usize);
    if value == 0.0 { "0".into() } else { shown + letter }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(axis: &Axis) -> String {
        axis.ticks.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn ticks_are_one_two_or_five_apart() {
        for (values, wanted) in [
            (vec![1.0, 9.4], "0 2 4 6 8 10"),
            (vec![0.0, 941.2], "0 200 400 600 800 1000"),
            (vec![120.0, 47_000.0], "0 10k 20k 30k 40k 50k"),
            (vec![0.0, 2_300_000.0], "0 0.5M 1.0M 1.5M 2.0M 2.5M"),
            (vec![0.0, 0.012], "0 0.002 0.004 0.006 0.008 0.010 0.012"),
            (vec![0.0, 0.000_02], "0 5µ 10µ 15µ 20µ"),
            (vec![-3.0, 7.0], "\u{2212}4 \u{2212}2 0 2 4 6 8"),
            (vec![7.0], "0 1 2 3 4 5 6 7"),
            (vec![0.0], "0 0.2 0.4 0.6 0.8 1.0"),
            (vec![], "0 0.2 0.4 0.6 0.8 1.0"),
            (vec![f64::NAN, f64::INFINITY], "0 0.2 0.4 0.6 0.8 1.0"),
        ] {
            let axis = Axis::of_values(&values, false, true);
            assert_eq!(shown(&axis), wanted, "{values:?}");
            let inside = |v: &&f64| v.is_finite();
            for value in values.iter().filter(inside) {
                let at = axis.at(*value).unwrap();
                assert!((0.0..=1.0).contains(&at), "{value} at {at}");
            }
        }
    }

    #[test]
    fn logarithmic_axes_have_powers_of_ten() {
        for (values, wanted) in [
            (vec![1.0, 1000.0], "1 10 100 1000"),
            (vec![3.0, 40_000.0, 0.0], "10 100 1000 10k"),
            (vec![12.0, 70.0], "10 20 50 100"),
            (vec![5.0], "5 10"),
            (vec![0.002, 3.0], "0.01 0.1 1"),
            (vec![0.0, -4.0], "1 2 5 10"),
        ] {
            let axis = Axis::of_values(&values, true, true);
            assert_eq!(shown(&axis), wanted, "{values:?}");
            for value in values.iter().filter(|v| **v > 0.0) {
                let at = axis.at(*value).unwrap();
                assert!((-0.001..=1.001).contains(&at), "{value} at {at}");
            }
            assert_eq!(axis.at(-1.0), None);
        }
        let wide = Axis::of_values(&[1.0, 1e15], true, true);
        assert!(wide.ticks.len() <= 10 && wide.at(1e15).unwrap() <= 1.0, "{}", shown(&wide));
    }

    #[test]
    fn integers_have_a_tick_each() {
        let guests = Axis::of_x(&[1.0, 2.0, 8.0], false, true);
        assert_eq!(shown(&guests), "0 1 2 3 4 5 6 7 8");
        assert_eq!((guests.low, guests.high), (0.0, 8.0));
        assert_eq!(shown(&Axis::of_x(&[1.0, 4.0], false, false)), "1 2 3 4");
        assert_eq!(shown(&Axis::of_x(&[50.0, 1472.0, 1500.0], false, true)), "0 500 1000 1500");
        assert_eq!(shown(&Axis::of_x(&[3.0], false, true)), "2 3 4");
    }

    #[test]
    fn two_axes_share_their_ticks() {
        for (left, right) in [(9.4, 340.0), (0.7, 100.0), (12_000.0, 3.0), (1.0, 1.0)] {
            let (one, other) = Axis::pair(&[left], &[right]);
            assert_eq!(one.ticks.len(), other.ticks.len());
            assert!(one.high >= left && other.high >= right);
            assert!(one.high <= left * 2.5 && other.high <= right * 2.5, "{left} {right}");
        }
        let (one, _) = Axis::pair(&[0.0], &[]);
        assert_eq!(one.low, 0.0);
    }

    #[test]
    fn categories_are_centred() {
        let axis = Axis::of_categories(&["a".into(), "b".into()]);
        assert_eq!((axis.at(0.0), axis.at(1.0)), (Some(0.25), Some(0.75)));
        assert_eq!(axis.clamp(9.0), 1.5);
    }
}
