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
        let median = f64::midpoint(sorted[(count - 1) / 2], sorted[count / 2]);
        let mean = sorted.iter().sum::<f64>() / count as f64;
        let squares: f64 = sorted.iter().map(|value| (value - mean).powi(2)).sum();
        let deviation = if count > 1 { (squares / (count - 1) as f64).sqrt() } else { 0.0 };
        Some(Self { count, median, low, high, mean, deviation })
    }
}
