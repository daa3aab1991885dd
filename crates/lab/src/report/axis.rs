//! Axes: from where to where, and which values are marked. Marks are 1, 2 or 5 times a power of
//! ten apart.

use super::words::number;

/// One axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Axis {
    /// Its least value.
    pub low: f64,
    /// Its greatest.
    pub high: f64,
    /// Whether equal lengths are equal ratios.
    pub log: bool,
    /// Values marked, and how they are written.
    pub marks: Vec<(f64, String)>,
}

/// Marks that an axis should have, about.
const MARKS: f64 = 5.0;

impl Axis {
    /// How far along the axis a value is, from 0 to 1; none where the axis has no such value.
    pub fn at(&self, value: f64) -> Option<f32> {
        let share = if self.log {
            (value.log10() - self.low.log10()) / (self.high.log10() - self.low.log10())
        } else {
            (value - self.low) / (self.high - self.low)
        };
        share.is_finite().then_some(share as f32)
    }

    /// Where the same end of the axis is nearest to a value.
    pub fn within(&self, value: f64) -> f64 {
        value.clamp(self.low, self.high)
    }

    /// Of places 0, 1, ... with names.
    pub fn of_categories(names: &[String]) -> Self {
        let marks = names.iter().enumerate().map(|(n, name)| (n as f64, name.clone())).collect();
        Self { low: -0.5, high: names.len().max(1) as f64 - 0.5, log: false, marks }
    }

    /// That shows all these values; with zero, where nothing is below it and it is not far away
    /// (`zero`: however far away it is).
    pub fn of_values(values: &[f64], log: bool, zero: bool) -> Self {
        let values = values.iter().copied().filter(|v| v.is_finite() && (!log || *v > 0.0));
        let (low, high) = values.fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(v), h.max(v)));
        match (low <= high, log) {
            (false, false) => Self::linear(0.0, 1.0, MARKS),
            (false, true) => Self::logarithmic(1.0, 10.0),
            (true, true) => Self::logarithmic(low, high),
            (true, false) => {
                let near = low > 0.0 && (zero || low <= (high - low) * 0.6);
                let low = if near { 0.0 } else { low };
                let high = if zero { high.max(0.0) } else { high };
                Self::linear(low, high, MARKS)
            }
        }
    }

    /// Of whole numbers or the like: ends where the values do, or at zero where that is near and
    /// has a meaning (`zero`).
    pub fn of_places(values: &[f64], log: bool, zero: bool) -> Self {
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
        let marks = (0..=(axis.high - axis.low) as u32).map(|n| axis.low + f64::from(n));
        axis.marks = marks.map(|value| (value, number(value, 0))).collect();
        axis
    }

    /// Two axes that share their marks' places, both from zero, as far as neither becomes small.
    pub fn pair(left: &[f64], right: &[f64]) -> (Self, Self) {
        let most = |values: &[f64]| {
            let most = values.iter().copied().filter(|v| v.is_finite()).fold(0.0, f64::max);
            if most > 0.0 { most } else { 1.0 }
        };
        let (left, right) = (most(left), most(right));
        let filled = |most: f64, count: f64| most / (count * step_of(most / count));
        let better = |a: &f64, b: &f64| {
            let [a, b] = [a, b].map(|count| filled(left, *count) * filled(right, *count));
            a.total_cmp(&b)
        };
        let count = [4.0, 5.0, 6.0, 7.0, 8.0].into_iter().max_by(better).unwrap_or(MARKS);
        let axis = |most: f64| {
            let step = step_of(most / count);
            Self { low: 0.0, high: step * count, log: false, marks: marks(0.0, step, count) }
        };
        (axis(left), axis(right))
    }

    fn linear(low: f64, high: f64, count: f64) -> Self {
        let (low, high) = match (high - low, low) {
            (wide, _) if wide > 0.0 => (low, high),
            (_, 0.0) => (0.0, 1.0),
            _ => (low - low.abs() / 2.0, high + high.abs() / 2.0),
        };
        // Of a few steps, the one that leaves the least room unused; of equals, the fewest marks.
        let ends = |step: f64| ((low / step + 1e-9).floor(), (high / step - 1e-9).ceil());
        let unused = |step: &f64| {
            let (first, last) = ends(*step);
            (last - first) * step - (high - low)
        };
        let steps = [0.0, 1.0, 2.0, 3.0].map(|more| step_of((high - low) / (count + more)));
        let less = |a: &f64, b: &f64| (unused(a) * 1.000_001).total_cmp(&unused(b));
        let step = steps.into_iter().min_by(less).unwrap_or(1.0);
        let (first, last) = ends(step);
        let (low, high) = (first * step, last * step);
        Self { low, high, log: false, marks: marks(low, step, last - first) }
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
        // All of a few decades; of more the powers of ten; of many not even all of those.
        let every = match shown.len() {
            ..=8 => 1,
            len => 3 * (len / 24 + 1),
        };
        let whole = |value: &f64| (value.log10() - value.log10().round()).abs() < 1e-9;
        let start = if every == 1 { 0 } else { shown.iter().position(whole).unwrap_or(0) };
        let marked = shown.iter().skip(start).step_by(every);
        let marks = marked.map(|value| (*value, written(*value, *value, *value))).collect();
        Self { low: shown[0], high: shown[shown.len() - 1], log: true, marks }
    }
}

/// 1, 2 or 5 times a power of ten, no less than asked.
fn step_of(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|f| f * power >= least * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * power
}

/// `count` steps and their ends.
fn marks(low: f64, step: f64, count: f64) -> Vec<(f64, String)> {
    let most = low.abs().max((low + step * count).abs());
    let values = (0..=count as u32).map(|n| low + step * f64::from(n));
    values.map(|value| (value, written(value, step, most))).collect()
}

/// A value with the prefix that fits the greatest of its axis and digits that tell `step`.
fn written(value: f64, step: f64, most: f64) -> String {
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
        axis.marks.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn marks_are_one_two_or_five_apart() {
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
        assert!(wide.marks.len() <= 10 && wide.at(1e15).unwrap() <= 1.0, "{}", shown(&wide));
    }

    #[test]
    fn whole_numbers_are_all_marked() {
        let guests = Axis::of_places(&[1.0, 2.0, 8.0], false, true);
        assert_eq!(shown(&guests), "0 1 2 3 4 5 6 7 8");
        assert_eq!((guests.low, guests.high), (0.0, 8.0));
        assert_eq!(shown(&Axis::of_places(&[1.0, 4.0], false, false)), "1 2 3 4");
        assert_eq!(
            shown(&Axis::of_places(&[50.0, 1472.0, 1500.0], false, true)),
            "0 500 1000 1500"
        );
        assert_eq!(shown(&Axis::of_places(&[3.0], false, true)), "2 3 4");
    }

    #[test]
    fn two_axes_share_their_marks() {
        for (left, right) in [(9.4, 340.0), (0.7, 100.0), (12_000.0, 3.0), (1.0, 1.0)] {
            let (one, other) = Axis::pair(&[left], &[right]);
            assert_eq!(one.marks.len(), other.marks.len());
            assert!(one.high >= left && other.high >= right);
            assert!(one.high <= left * 2.5 && other.high <= right * 2.5, "{left} {right}");
        }
        let (one, _) = Axis::pair(&[0.0], &[]);
        assert_eq!(one.low, 0.0);
    }

    #[test]
    fn categories_stand_in_the_middle_of_their_room() {
        let axis = Axis::of_categories(&["a".into(), "b".into()]);
        assert_eq!((axis.at(0.0), axis.at(1.0)), (Some(0.25), Some(0.75)));
        assert_eq!(axis.within(9.0), 1.5);
    }
}
