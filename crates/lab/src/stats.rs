//! Medians, percentiles, fairness, and tests of whether samples differ: of [`paired`] runs, and of
//! runs of different folders.

pub mod paired;

/// Summary statistics of a sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// Number of values.
    pub count: usize,
    /// Median.
    pub median: f64,
    /// Minimum.
    pub low: f64,
    /// Maximum.
    pub high: f64,
    /// First quartile.
    pub quartile_low: f64,
    /// Third quartile.
    pub quartile_high: f64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Sample standard deviation; 0 for a single value.
    pub deviation: f64,
}

impl Summary {
    /// Returns the summary of a sample; `None` if it is empty.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (count, low, high) = (sorted.len(), *sorted.first()?, *sorted.last()?);
        let mean = sorted.iter().sum::<f64>() / count as f64;
        let squares: f64 = sorted.iter().map(|value| (value - mean).powi(2)).sum();
        let deviation = if count > 1 { (squares / (count - 1) as f64).sqrt() } else { 0.0 };
        let quantile = |p| of_sorted(&sorted, p);
        Some(Self {
            count,
            median: quantile(0.5),
            low,
            high,
            quartile_low: quantile(0.25),
            quartile_high: quantile(0.75),
            mean,
            deviation,
        })
    }
}

/// Returns the `p`-quantile (0 to 1) of a sample, with linear interpolation as by default in R and
/// `NumPy`; `None` if it is empty.
pub fn percentile(values: &[f64], p: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    (!sorted.is_empty()).then(|| of_sorted(&sorted, p))
}

fn of_sorted(sorted: &[f64], p: f64) -> f64 {
    let at = p.clamp(0.0, 1.0) * (sorted.len() - 1) as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    below + (above - below) * at.fract()
}

/// Returns Jain's fairness index: 1 if all shares are equal, 1/n if one of n has everything; `None`
/// if all are 0.
pub fn jain(shares: &[f64]) -> Option<f64> {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    (squares > 0.0).then(|| sum * sum / (shares.len() as f64 * squares))
}

/// Largest number of values for the exact test; beyond, the normal approximation is used.
const EXACT_MAX: usize = 40;

/// Returns the p-value of the two-sided Mann-Whitney U test; 1 if a sample is empty.
///
/// It is exact, with ties, for up to 40 values in total; beyond, a normal approximation with
/// continuity and tie correction.
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

/// Returns the smallest p-value of [`mann_whitney`] for sample sizes `a` and `b` without ties: that
/// of samples that do not overlap.
pub fn mann_whitney_min(a: usize, b: usize) -> f64 {
    let orders = (1..=a).fold(1.0, |orders, i| orders * (b + i) as f64 / i as f64);
    f64::min(1.0, 2.0 / orders)
}

/// Returns the median of all ratios of a value of `a` to one of `b`, the Hodges-Lehmann estimate of
/// the factor between two samples; `None` unless all of `a` are at least 0 and all of `b` above.
pub fn ratio(a: &[f64], b: &[f64]) -> Option<f64> {
    percentile(&ratios(a, b)?, 0.5)
}

/// Returns the 95 % confidence interval of [`ratio`], the factors that [`mann_whitney`] does not
/// reject at 5 %; `None` where there is no ratio, or too few values for any interval at that level.
pub fn ratio_interval(a: &[f64], b: &[f64]) -> Option<(f64, f64)> {
    let ratios = ratios(a, b)?;
    let outside = outside_interval(a.len(), b.len());
    let (low, high) = (outside.checked_sub(1)?, ratios.len().checked_sub(outside)?);
    (low <= high).then(|| (ratios[low], ratios[high]))
}

/// Returns all ratios, sorted.
fn ratios(a: &[f64], b: &[f64]) -> Option<Vec<f64>> {
    let has_ratios = a.iter().all(|value| *value >= 0.0) && b.iter().all(|value| *value > 0.0);
    let mut ratios: Vec<f64> = a.iter().flat_map(|a| b.iter().map(move |b| a / b)).collect();
    ratios.sort_by(f64::total_cmp);
    (has_ratios && !ratios.is_empty()).then_some(ratios)
}

/// Returns which ratio, counted from 1 at either end, bounds the 95 % interval of samples of `a`
/// and `b` values; 0: none does.
fn outside_interval(a: usize, b: usize) -> usize {
    const TAIL: f64 = 0.025;
    if a + b > EXACT_MAX {
        let (m, n) = (a as f64, b as f64);
        let middle = m * n / 2.0 - 1.959_964 * (m * n * (m + n + 1.0) / 12.0).sqrt();
        return middle.max(0.0) as usize;
    }
    // ways[k][u]: number of ways to choose k of the ranks so far whose U is u.
    let mut ways = vec![vec![0.0_f64; a * b + 1]; a + 1];
    ways[0][0] = 1.0;
    for rank in 0..a + b {
        for k in (1..=a).rev() {
            let Some(more) = rank.checked_sub(k - 1) else { continue };
            let (fewer, these) = ways.split_at_mut(k);
            for u in more..=a * b {
                these[0][u] += fewer[k - 1][u - more];
            }
        }
    }
    let all: f64 = ways[a].iter().sum();
    let mut below = 0.0;
    ways[a]
        .iter()
        .take_while(|ways| {
            below += **ways;
            below / all <= TAIL
        })
        .count()
}

/// Returns twice the rank of each value of `a`, then of `b`; ties share the mean of their ranks.
fn doubled_ranks(a: &[f64], b: &[f64]) -> Vec<usize> {
    let all = [a, b].concat();
    let rank = |value: &f64| {
        let below = all.iter().filter(|other| *other < value).count();
        let equal = all.iter().filter(|other| *other == value).count();
        2 * below + equal + 1
    };
    all.iter().map(rank).collect()
}

/// Counts all choices of `chosen` ranks whose sum deviates from the mean at least as far as `sum`.
fn exact(ranks: &[usize], chosen: usize, sum: usize) -> f64 {
    let most: usize = ranks.iter().sum();
    // ways[k][s]: number of ways in which k of the ranks so far add up to s.
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
    // Deviation from the mean, times the number of values to keep it an integer.
    let deviation = |s: usize| (s * ranks.len()).abs_diff(chosen * most);
    let all: f64 = ways[chosen].iter().sum();
    let extreme = ways[chosen].iter().enumerate().filter(|(s, _)| deviation(*s) >= deviation(sum));
    extreme.map(|(_, ways)| ways).sum::<f64>() / all
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

/// Returns the upper tail of the standard normal distribution at `z` >= 0 (Abramowitz and Stegun
/// 26.2.17, error below 7.5e-8).
fn upper_tail(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z);
    let terms = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let sum = terms.iter().rev().fold(0.0, |sum, term| (sum + term) * t);
    (-z * z / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt() * sum
}

#[cfg(test)]
mod tests;
