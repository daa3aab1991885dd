//! Statistics of pairs: runs of two cells in the same round, a ratio for each pair.
//!
//! The effect of a cell is the median of its ratios, with a bootstrap interval. Whether it differs
//! from 1 is tested by signs and ranks of the ratios' logarithms (Wilcoxon): whether `a` over `b`
//! or `b` over `a` was written down does not matter, and no distribution is assumed.

use super::{Summary, upper_tail};

/// Level of significance: samples differ if the p-value is lower.
pub const SIGNIFICANCE: f64 = 0.05;
/// Confidence of intervals.
pub const CONFIDENCE: f64 = 0.95;
/// Fewest values of an interval: of four, even their whole range covers the median in 7 of 8 cases
/// only.
pub const INTERVAL_MIN: usize = 5;
/// Most pairs for the exact test; beyond, the normal approximation is used.
const EXACT_MAX: usize = 100;

/// A figure of `count` values or pairs with its ends.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Number of values or pairs.
    pub count: usize,
    /// Their median.
    pub median: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Whether the ends are a 95 % interval of the median; otherwise, of too few values, the least
    /// and the greatest.
    pub interval: bool,
}

impl Estimate {
    /// Returns the estimate of the median of a sample; `None` if it is empty.
    pub fn of(values: &[f64]) -> Option<Self> {
        let Summary { count, median, low, high, .. } = Summary::of(values)?;
        let interval = median_interval(values);
        let (low, high) = interval.unwrap_or((low, high));
        Some(Self { count, median, low, high, interval: interval.is_some() })
    }

    /// Returns the estimate of the ratio of pairs; `None` without pairs, if a value is negative, or
    /// if the median or an end of it has no ratio, because the base is 0.
    pub fn of_pairs(pairs: &[(f64, f64)]) -> Option<Self> {
        if pairs.iter().any(|(ours, base)| *ours < 0.0 || *base < 0.0) {
            return None;
        }
        if pairs.iter().all(|(_, base)| *base == 0.0) {
            return None;
        }
        let ratios: Vec<f64> =
            pairs.iter().map(|(ours, base)| effect(*ours, *base).exp()).collect();
        let found = Self::of(&ratios)?;
        [found.median, found.low, found.high].iter().all(|v| v.is_finite()).then_some(found)
    }

    /// Returns it divided by a number.
    #[must_use]
    pub fn over(self, by: f64) -> Self {
        let Self { median, low, high, .. } = self;
        Self { median: median / by, low: low / by, high: high / by, ..self }
    }
}

/// Returns the logarithm of the ratio of a pair: 0 if both are equal, infinite if one of them is 0.
pub fn effect(ours: f64, base: f64) -> f64 {
    if ours == base { 0.0 } else { ours.ln() - base.ln() }
}

/// Returns the 95 % bootstrap interval of the median (percentile method); `None` of fewer than
/// [`INTERVAL_MIN`] values.
///
/// It is exact, without resampling: the distribution of the median of all resamples is known
/// (Hutson and Ernst, The exact bootstrap mean and variance of an L-estimator, JRSS B, 2000).
pub fn median_interval(values: &[f64]) -> Option<(f64, f64)> {
    if values.len() < INTERVAL_MIN {
        return None;
    }
    let mut medians = resampled_medians(values);
    medians.sort_by(|a, b| a.0.total_cmp(&b.0));
    let tail = (1.0 - CONFIDENCE) / 2.0;
    let mut below = 0.0;
    let (mut low, mut high) = (None, None);
    for (median, chance) in medians {
        below += chance;
        if low.is_none() && below > tail {
            low = Some(median);
        }
        if high.is_none() && below >= 1.0 - tail - 1e-12 {
            high = Some(median);
        }
    }
    Some((low?, high?))
}

/// Returns every median that a resample of a sample can have, with its probability.
fn resampled_medians(values: &[f64]) -> Vec<(f64, f64)> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    // at_most[k]: probability that at least half of the draws, the middle one included, are among
    // the k least values.
    let middle = n / 2 + 1;
    let at_most = |k: usize| at_least(n, middle, k as f64 / n as f64);
    if n % 2 == 1 {
        return (0..n).map(|k| (sorted[k], at_most(k + 1) - at_most(k))).collect();
    }
    // The two draws in the middle are values i and j: half of the draws are at most i, the others
    // at least j.
    let half = n / 2;
    let up_to = |k: usize| (k as f64 / n as f64).powi(i32::try_from(half).unwrap_or(i32::MAX));
    let ways = (1..=half).fold(1.0, |ways, i| ways * (half + i) as f64 / i as f64);
    let lower = |k: usize| at_least(n, half, k as f64 / n as f64);
    let mut medians = Vec::new();
    for i in 0..n {
        let mut same = lower(i + 1) - lower(i);
        for j in i + 1..n {
            let chance = ways * (up_to(i + 1) - up_to(i)) * (up_to(n - j) - up_to(n - j - 1));
            medians.push((f64::midpoint(sorted[i], sorted[j]), chance));
            same -= chance;
        }
        medians.push((sorted[i], same.max(0.0)));
    }
    medians
}

/// Returns the probability that at least `k` of `n` draws succeed, each with probability `p`.
fn at_least(n: usize, k: usize, p: f64) -> f64 {
    let mut ways = 1.0;
    let mut sum = 0.0;
    for i in 0..=n {
        if i > 0 {
            ways *= (n - i + 1) as f64 / i as f64;
        }
        if i >= k {
            let [i, rest] = [i, n - i].map(|n| i32::try_from(n).unwrap_or(i32::MAX));
            sum += ways * p.powi(i) * (1.0 - p).powi(rest);
        }
    }
    sum
}

/// Returns the p-value of Wilcoxon's two-sided signed-rank test of effects against 0; 1 if all are.
///
/// It is exact, with ties, for up to 100 effects; zeros are ranked, then left out (Pratt).
pub fn signed_rank(effects: &[f64]) -> f64 {
    f64::min(1.0, 2.0 * signed_rank_above(effects).min(signed_rank_above(&negated(effects))))
}

/// Returns the p-value of the one-sided test whether effects are above 0.
pub fn signed_rank_above(effects: &[f64]) -> f64 {
    let size = |effect: &f64| effect.abs();
    // Twice the rank, so that ties, which share the mean of their ranks, have whole ones.
    let rank = |effect: &f64| {
        let below = effects.iter().filter(|other| size(other) < size(effect)).count();
        let equal = effects.iter().filter(|other| size(other) == size(effect)).count();
        2 * below + equal + 1
    };
    let nonzero = || effects.iter().filter(|effect| **effect != 0.0);
    let ranks: Vec<usize> = nonzero().map(rank).collect();
    let sum: usize = nonzero().filter(|effect| **effect > 0.0).map(rank).sum();
    if ranks.len() > EXACT_MAX {
        let half = |value: usize| value as f64 / 2.0;
        let mean = ranks.iter().map(|rank| half(*rank)).sum::<f64>() / 2.0;
        let variance = ranks.iter().map(|rank| half(*rank).powi(2)).sum::<f64>() / 4.0;
        let z = (half(sum) - mean - 0.5) / variance.sqrt();
        return if z >= 0.0 { upper_tail(z) } else { 1.0 - upper_tail(-z) };
    }
    let most: usize = ranks.iter().sum();
    // ways[s]: probability that the ranks with a positive sign add up to s, if signs are chance.
    let mut ways = vec![0.0_f64; most + 1];
    ways[0] = 1.0;
    for rank in ranks {
        for s in (0..=most).rev() {
            let with = s.checked_sub(rank).map_or(0.0, |less| ways[less]);
            ways[s] = f64::midpoint(ways[s], with);
        }
    }
    ways[sum..].iter().sum::<f64>().min(1.0)
}

fn negated(effects: &[f64]) -> Vec<f64> {
    effects.iter().map(|effect| -effect).collect()
}

/// Returns the p-value of the test that effects lie within `-margin` to `margin`: two one-sided
/// tests (Schuirmann, 1987), each as [`signed_rank_above`]. A small value says that they do.
pub fn equivalent(effects: &[f64], margin: f64) -> f64 {
    let above = effects.iter().map(|effect| effect + margin).collect::<Vec<_>>();
    let below = effects.iter().map(|effect| margin - effect).collect::<Vec<_>>();
    signed_rank_above(&above).max(signed_rank_above(&below))
}

/// Returns the smallest p-value of [`signed_rank`] of so many pairs: that of equal signs.
pub fn signed_rank_min(pairs: usize) -> f64 {
    f64::min(1.0, 2.0 * 0.5_f64.powf(pairs as f64))
}

/// Returns the least number of pairs with which one of `tests` comparisons can be significant at
/// `level` after [`holm`]'s correction.
pub fn pairs_needed(tests: usize, level: f64) -> usize {
    let possible = |pairs: &usize| signed_rank_min(*pairs) * (tests.max(1) as f64) < level;
    (1..64).find(possible).unwrap_or(64)
}

/// Returns p-values corrected for as many tests, by Holm's step-down method (1979), in the order
/// given.
pub fn holm(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    let mut corrected = vec![1.0; values.len()];
    let mut least: f64 = 0.0;
    for (step, at) in order.into_iter().enumerate() {
        least = least.max(values[at] * (values.len() - step) as f64).min(1.0);
        corrected[at] = least;
    }
    corrected
}

#[cfg(test)]
mod tests;
