//! The Universal Scalability Law (Gunther 1993), fitted to measurements: a model, not a finding.
//!
//! ```text
//! X(n) = lambda * n / (1 + sigma * (n - 1) + kappa * n * (n - 1))
//! ```
//!
//! `lambda` is what one worker does, `sigma` the part of the work that only one can do at a time,
//! `kappa` what each pair of workers costs in keeping up with each other. Least squares in X, by
//! Levenberg and Marquardt's method; neither `sigma` nor `kappa` is negative.

/// One fitted number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The number.
    pub value: f64,
    /// Its standard error; none where there are no more points than numbers, or where it is at its
    /// bound of 0.
    pub error: Option<f64>,
}

/// A fitted curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Law {
    /// Throughput of one.
    pub lambda: Estimate,
    /// Contention.
    pub sigma: Estimate,
    /// Coherency.
    pub kappa: Estimate,
    /// Standard error of the points around the curve; none where there are no more points than
    /// numbers.
    pub residual: Option<f64>,
    /// Part of the points' variance that the curve tells; 1 is all.
    pub r_squared: f64,
    /// How many points.
    pub points: usize,
}

/// `lambda`, `sigma`, `kappa`.
type Numbers = [f64; 3];
/// Which of them are fitted; the others are 0.
type Free = [bool; 3];

const STEPS_MAX: usize = 500;

/// The law that comes nearest to (workers, throughput); none of fewer than three numbers of
/// workers, or where one is below 1 or nothing was done.
pub fn fit(points: &[(f64, f64)]) -> Option<Law> {
    let sane = |(n, x): &(f64, f64)| *n >= 1.0 && n.is_finite() && *x > 0.0 && x.is_finite();
    let mut counts: Vec<f64> = points.iter().map(|(n, _)| *n).collect();
    counts.sort_by(f64::total_cmp);
    counts.dedup();
    if counts.len() < 3 || !points.iter().all(sane) {
        return None;
    }
    // The nearest of all curves that keep to the bounds has none, one or both of them at 0.
    let tries: [Free; 4] =
        [[true; 3], [true, true, false], [true, false, true], [true, false, false]];
    let fitted = tries.iter().map(|free| (*free, nearest(points, *free)));
    let allowed = fitted.filter(|(_, p)| p[0] > 0.0 && p[1] >= 0.0 && p[2] >= 0.0);
    let (free, numbers) =
        allowed.min_by(|(_, a), (_, b)| squares(points, a).total_cmp(&squares(points, b)))?;
    Some(describe(points, free, &numbers))
}

impl Law {
    /// Throughput of so many workers.
    pub fn at(&self, n: f64) -> f64 {
        throughput(&[self.lambda.value, self.sigma.value, self.kappa.value], n)
    }

    /// The number of workers beyond which more do less; none where there is no such number.
    pub fn peak(&self) -> Option<f64> {
        let (sigma, kappa) = (self.sigma.value, self.kappa.value);
        (kappa > 0.0).then(|| ((1.0 - sigma).max(0.0) / kappa).sqrt().max(1.0))
    }
}

fn throughput(&[lambda, sigma, kappa]: &Numbers, n: f64) -> f64 {
    lambda * n / (1.0 + sigma * (n - 1.0) + kappa * n * (n - 1.0))
}

fn squares(points: &[(f64, f64)], numbers: &Numbers) -> f64 {
    points.iter().map(|(n, x)| (x - throughput(numbers, *n)).powi(2)).sum()
}

/// How the throughput of `n` changes with each number.
fn slopes(&[lambda, sigma, kappa]: &Numbers, n: f64) -> Numbers {
    let below = 1.0 + sigma * (n - 1.0) + kappa * n * (n - 1.0);
    let by_below = -lambda * n / (below * below);
    [n / below, by_below * (n - 1.0), by_below * n * (n - 1.0)]
}

/// Sums of products of slopes, and of slopes with what is missing.
fn normal_equations(
    points: &[(f64, f64)],
    numbers: &Numbers,
    free: Free,
) -> ([Numbers; 3], Numbers) {
    let (mut matrix, mut right) = ([[0.0; 3]; 3], [0.0; 3]);
    for (n, x) in points {
        let slopes = slopes(numbers, *n);
        let missing = x - throughput(numbers, *n);
        for i in 0..3 {
            right[i] += slopes[i] * missing;
            for j in 0..3 {
                matrix[i][j] += slopes[i] * slopes[j];
            }
        }
    }
    for i in (0..3).filter(|i| !free[*i]) {
        right[i] = 0.0;
        matrix.iter_mut().for_each(|row| row[i] = 0.0);
        matrix[i] = [0.0; 3];
        matrix[i][i] = 1.0;
    }
    (matrix, right)
}

/// The least squares with these numbers free, bounds aside.
fn nearest(points: &[(f64, f64)], free: Free) -> Numbers {
    let best = points.iter().map(|(n, x)| x / n).fold(0.0, f64::max);
    let start = [best, 0.01, 1e-4];
    let mut numbers = [0, 1, 2].map(|i: usize| if free[i] { start[i] } else { 0.0 });
    let mut damping = 1e-3;
    for _ in 0..STEPS_MAX {
        let (mut matrix, right) = normal_equations(points, &numbers, free);
        for (i, row) in matrix.iter_mut().enumerate() {
            row[i] *= 1.0 + damping;
        }
        let Some(step) = solve(matrix, right) else { break };
        let next = [0, 1, 2].map(|i: usize| numbers[i] + step[i]);
        let still = (0..3).all(|i| step[i].abs() <= 1e-12 * numbers[i].abs().max(1e-12));
        // No curve with a pole among the points.
        let whole = points.iter().all(|(n, _)| throughput(&next, *n) > 0.0);
        if whole && squares(points, &next) <= squares(points, &numbers) {
            numbers = next;
            damping = f64::max(damping / 10.0, 1e-12);
        } else {
            damping *= 10.0;
        }
        if still || damping > 1e12 {
            break;
        }
    }
    numbers
}

/// Solves three linear equations; none where they say too little.
fn solve(mut matrix: [Numbers; 3], mut right: Numbers) -> Option<Numbers> {
    // Numbers differ by powers of ten: as parts of the diagonal they do not.
    let scale = [0, 1, 2].map(|i: usize| matrix[i][i].sqrt());
    if scale.iter().any(|s| *s <= 0.0 || !s.is_finite()) {
        return None;
    }
    for i in 0..3 {
        right[i] /= scale[i];
        for j in 0..3 {
            matrix[i][j] /= scale[i] * scale[j];
        }
    }
    for i in 0..3 {
        let pivot = (i..3).max_by(|a, b| matrix[*a][i].abs().total_cmp(&matrix[*b][i].abs()))?;
        if matrix[pivot][i].abs() < 1e-14 {
            return None;
        }
        matrix.swap(i, pivot);
        right.swap(i, pivot);
        for row in i + 1..3 {
            let (above, part) = (matrix[i], matrix[row][i] / matrix[i][i]);
            for (value, above) in matrix[row].iter_mut().zip(above) {
                *value -= part * above;
            }
            right[row] -= part * right[i];
        }
    }
    for i in (0..3).rev() {
        let known: f64 = (i + 1..3).map(|j| matrix[i][j] * right[j]).sum();
        right[i] = (right[i] - known) / matrix[i][i];
    }
    Some([0, 1, 2].map(|i: usize| right[i] / scale[i]))
}

fn describe(points: &[(f64, f64)], free: Free, numbers: &Numbers) -> Law {
    let fitted = free.iter().filter(|free| **free).count();
    let left = squares(points, numbers);
    let spare = points.len().saturating_sub(fitted);
    let variance = (spare > 0).then(|| left / spare as f64);
    let (matrix, _) = normal_equations(points, numbers, free);
    let estimate = |i: usize| {
        let mut unit = [0.0; 3];
        unit[i] = 1.0;
        let error = variance.zip(solve(matrix, unit)).map(|(v, column)| (v * column[i]).sqrt());
        Estimate { value: numbers[i], error: error.filter(|_| free[i]) }
    };
    let mean = points.iter().map(|(_, x)| x).sum::<f64>() / points.len() as f64;
    let all: f64 = points.iter().map(|(_, x)| (x - mean).powi(2)).sum();
    Law {
        lambda: estimate(0),
        sigma: estimate(1),
        kappa: estimate(2),
        residual: variance.map(f64::sqrt),
        r_squared: if all > 0.0 { 1.0 - left / all } else { 1.0 },
        points: points.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: f64, b: f64, part: f64) {
        assert!((a - b).abs() <= part * b.abs(), "{a} is not {b}");
    }

    /// SPEC SDM91 on a `SPARCcenter` 2000: Gunther, Guerrilla Capacity Planning (2007);
    /// the fit is that of the package `usl` of R, version 2, with its errors.
    const SDM91: [(f64, f64); 7] = [
        (1.0, 64.9),
        (18.0, 995.9),
        (36.0, 1652.4),
        (72.0, 1853.2),
        (108.0, 1828.9),
        (144.0, 1775.0),
        (216.0, 1702.2),
    ];
    /// A ray tracer: the same book, the same package.
    const TRACER: [(f64, f64); 11] = [
        (1.0, 20.0),
        (4.0, 78.0),
        (8.0, 130.0),
        (12.0, 170.0),
        (16.0, 190.0),
        (20.0, 200.0),
        (24.0, 210.0),
        (28.0, 230.0),
        (32.0, 260.0),
        (48.0, 280.0),
        (64.0, 310.0),
    ];

    #[test]
    fn the_books_example_as_the_package_usl_of_r_fits_it() {
        let law = fit(&SDM91).unwrap();
        near(law.sigma.value, 0.027_728_5, 1e-4);
        near(law.sigma.error.unwrap(), 0.009_121_7, 1e-3);
        near(law.kappa.value, 0.000_104_4, 1e-3);
        near(law.kappa.error.unwrap(), 0.000_019_9, 5e-3);
        near(law.lambda.value, 89.995_233, 1e-4);
        near(law.lambda.error.unwrap(), 14.213_489_4, 1e-3);
        near(law.peak().unwrap(), 96.5, 2e-3);
        assert!(law.r_squared > 0.98 && law.residual.unwrap() > 50.0, "{law:?}");
    }

    #[test]
    fn where_coherency_would_be_negative_it_is_none() {
        let law = fit(&TRACER).unwrap();
        near(law.sigma.value, 0.057_771, 1e-3);
        near(law.lambda.value, 21.848_843, 1e-4);
        assert_eq!(law.kappa, Estimate { value: 0.0, error: None });
        assert_eq!(law.peak(), None);
    }

    #[test]
    fn a_curve_of_the_law_is_found_again() {
        for numbers in [[1000.0, 0.05, 0.02], [3.5e6, 0.3, 0.0], [7.0, 0.0, 0.01], [1.0, 0.0, 0.0]]
        {
            let points: Vec<(f64, f64)> =
                (1..=8).map(f64::from).map(|n| (n, throughput(&numbers, n))).collect();
            let law = fit(&points).unwrap();
            near(law.lambda.value, numbers[0], 1e-6);
            assert!((law.sigma.value - numbers[1]).abs() < 1e-6, "{numbers:?}: {law:?}");
            assert!((law.kappa.value - numbers[2]).abs() < 1e-6, "{numbers:?}: {law:?}");
            near(law.at(5.0), throughput(&numbers, 5.0), 1e-6);
        }
    }

    #[test]
    fn better_than_linear_is_taken_for_linear() {
        let law = fit(&[(1.0, 10.0), (2.0, 22.0), (4.0, 48.0), (8.0, 99.0)]).unwrap();
        assert_eq!((law.sigma.value, law.kappa.value), (0.0, 0.0));
    }

    #[test]
    fn too_little_to_fit() {
        assert_eq!(fit(&[(1.0, 1.0), (2.0, 2.0), (2.0, 2.1)]), None);
        assert_eq!(fit(&[(0.0, 1.0), (1.0, 2.0), (2.0, 2.1)]), None);
        assert_eq!(fit(&[(1.0, 0.0), (2.0, 0.0), (3.0, 0.0)]), None);
        let exact = fit(&[(1.0, 10.0), (2.0, 18.0), (3.0, 24.0)]).unwrap();
        assert_eq!((exact.residual, exact.sigma.error), (None, None));
    }
}
