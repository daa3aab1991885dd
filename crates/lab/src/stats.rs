//! Medians, spread, and whether two sets of runs differ.

/// What a set of values comes to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// How many.
    pub count: usize,
    /// The median.
    pub median: f64,
    /// The least.
    pub low: f64,
    /// The most.
    pub high: f64,
    /// A quarter is below.
    pub quartile_low: f64,
    /// A quarter is above.
    pub quartile_high: f64,
    /// The mean.
    pub mean: f64,
    /// One standard deviation of a sample; 0 of a single value.
    pub deviation: f64,
}

impl Summary {
    /// Of all values; none of none.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (count, low, high) = (sorted.len(), *sorted.first()?, *sorted.last()?);
        let mean = sorted.iter().sum::<f64>() / count as f64;
        let squares: f64 = sorted.iter().map(|value| (value - mean).powi(2)).sum();
        let deviation = if count > 1 { (squares / (count - 1) as f64).sqrt() } else { 0.0 };
        let part = |part| of_sorted(&sorted, part);
        Some(Self {
            count,
            median: part(0.5),
            low,
            high,
            quartile_low: part(0.25),
            quartile_high: part(0.75),
            mean,
            deviation,
        })
    }
}

/// The value that a part of all values, 0 to 1, is below: between two of them in proportion, as R
/// and `NumPy` do by default; none of none.
pub fn percentile(values: &[f64], part: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    (!sorted.is_empty()).then(|| of_sorted(&sorted, part))
}

fn of_sorted(sorted: &[f64], part: f64) -> f64 {
    let at = part.clamp(0.0, 1.0) * (sorted.len() - 1) as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    below + (above - below) * at.fract()
}

/// Jain's index of fairness: 1 where all have the same, 1/n where one of n has all; none of none.
pub fn jain(shares: &[f64]) -> Option<f64> {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    (squares > 0.0).then(|| sum * sum / (shares.len() as f64 * squares))
}

/// Up to so many values all orders are counted; beyond, the normal distribution is near enough.
const EXACT_MAX: usize = 40;

/// How often chance alone gives two sets of values at least as different as these: the test of
/// Mann and Whitney, two-sided. 1 where one of them is empty.
///
/// Exact up to 40 values, ties included: all ways to choose as many ranks are counted.
pub fn mann_whitney(a: &[f64], b: &[f64]) -> f64 {
    if a.is_empty() || b.is_empty() {
        return 1.0;
    }
    let ranks = doubled_ranks(a, b);
    let sum: usize = ranks[..a.len()].iter().sum();
    if ranks.len() <= EXACT_MAX {
        exact(&ranks, a.len(), sum)
    } else {
        normal(&ranks, a.len(), sum)
    }
}

/// The least that [`mann_whitney`] can give for so many values without ties: where every value of
/// one set is above all of the other.
pub fn mann_whitney_least(a: usize, b: usize) -> f64 {
    let orders = (1..=a).fold(1.0, |orders, i| orders * (b + i) as f64 / i as f64);
    f64::min(1.0, 2.0 / orders)
}

/// Twice the rank of each value among all, those of `a` first; ties share the mean of their ranks.
fn doubled_ranks(a: &[f64], b: &[f64]) -> Vec<usize> {
    let all = [a, b].concat();
    let rank = |value: &f64| {
        let below = all.iter().filter(|other| *other < value).count();
        let equal = all.iter().filter(|other| *other == value).count();
        2 * below + equal + 1
    };
    all.iter().map(rank).collect()
}

fn exact(ranks: &[usize], chosen: usize, sum: usize) -> f64 {
    let most: usize = ranks.iter().sum();
    // ways[k][s]: in how many ways k of the ranks seen so far add up to s.
    let mut ways = vec![vec![0.0_f64; most + 1]; chosen + 1];
    ways[0][0] = 1.0;
    for rank in ranks {
        for k in (1..=chosen).rev() {
            let (fewer, these) = ways.split_at_mut(k);
            for s in *rank..=most {
                these[0][s] += fewer[k - 1][s - rank];
            }
        }
    }
    // In whole numbers: twice the distance from the mean, times the number of values.
    let far = |s: usize| (s * ranks.len()).abs_diff(chosen * most);
    let all: f64 = ways[chosen].iter().sum();
    let as_far = ways[chosen].iter().enumerate().filter(|(s, _)| far(*s) >= far(sum));
    as_far.map(|(_, ways)| ways).sum::<f64>() / all
}

fn normal(ranks: &[usize], chosen: usize, sum: usize) -> f64 {
    let (n, a) = (ranks.len() as f64, chosen as f64);
    let b = n - a;
    let mut sorted = ranks.to_vec();
    sorted.sort_unstable();
    let ties: f64 = sorted
        .chunk_by(|x, y| x == y)
        .map(|tie| (tie.len() as f64).powi(3) - tie.len() as f64)
        .sum();
    let variance = a * b / 12.0 * (n + 1.0 - ties / (n * (n - 1.0)));
    if variance <= 0.0 {
        return 1.0;
    }
    let from_mean = (sum as f64 / 2.0 - a * (n + 1.0) / 2.0).abs();
    let z = (from_mean - 0.5).max(0.0) / variance.sqrt();
    f64::min(1.0, 2.0 * upper_tail(z))
}

/// Part of the normal distribution above `z` >= 0: Abramowitz and Stegun 26.2.17, to 7.5e-8.
fn upper_tail(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z);
    let terms = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let sum = terms.iter().rev().fold(0.0, |sum, term| (sum + term) * t);
    (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt() * sum
}

#[cfg(test)]
mod tests;
