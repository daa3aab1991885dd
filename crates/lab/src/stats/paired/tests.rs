use super::*;

fn near(a: f64, b: f64, tolerance: f64) {
    assert!((a - b).abs() <= tolerance, "{a} is not {b}");
}

/// Pseudo-random numbers (a linear congruential generator), so that a failure repeats.
struct Numbers(u64);

impl Numbers {
    fn unit(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A value around 0, with long tails and without symmetry: the median of its law is 0.
    fn skewed(&mut self) -> f64 {
        let u = self.unit();
        if u < 0.5 { u - 0.5 } else { (u - 0.5) * 8.0 * (0.2 + u) }
    }
}

#[test]
fn hollander_and_wolfe_example_3_1() {
    // Hollander and Wolfe, Nonparametric Statistical Methods, example 3.1: Hamilton depression
    // scale of nine patients before and after; V = 40, one-sided P = 0.01953 (R: ?wilcox.test).
    // In thousandths.
    let before = [1830.0, 500.0, 1620.0, 2480.0, 1680.0, 1880.0, 1550.0, 3060.0, 1300.0];
    let after = [878.0, 647.0, 598.0, 2050.0, 1060.0, 1290.0, 1060.0, 3140.0, 1290.0];
    let effects: Vec<f64> = before.iter().zip(after).map(|(a, b)| a - b).collect();
    near(signed_rank_above(&effects), 0.019_531_25, 1e-9);
    near(signed_rank(&effects), 0.039_062_5, 1e-9);
    near(signed_rank(&negated(&effects)), 0.039_062_5, 1e-9);
}

#[test]
fn tails_are_those_of_the_table() {
    // Wilcoxon's table, n = 10: P(T <= 8) = 0.0244; critical value at 5 % two-sided: 8.
    let with_sum = |low: &[f64]| -> Vec<f64> {
        (1..=10)
            .map(|rank| f64::from(rank) * if low.contains(&f64::from(rank)) { -1.0 } else { 1.0 })
            .collect()
    };
    near(signed_rank(&with_sum(&[1.0, 7.0])), 2.0 * 25.0 / 1024.0, 1e-12);
    near(signed_rank(&with_sum(&[])), signed_rank_min(10), 1e-12);
    near(signed_rank_min(5), 0.0625, 1e-12);
    assert_eq!((signed_rank(&[]), signed_rank(&[0.0; 6]), signed_rank_min(0)), (1.0, 1.0, 1.0));
    // Infinite effects (a base of 0) have the highest ranks, and no other meaning.
    near(signed_rank(&[f64::INFINITY; 6]), signed_rank_min(6), 1e-12);
}

/// The probability by trying all signs, as a test of the sums.
fn by_all_signs(effects: &[f64]) -> f64 {
    let size = |at: usize| effects[at].abs();
    let rank = |at: usize| {
        let below = (0..effects.len()).filter(|other| size(*other) < size(at)).count() as f64;
        let equal = (0..effects.len()).filter(|other| size(*other) == size(at)).count() as f64;
        below + f64::midpoint(1.0, equal)
    };
    let seen: f64 = (0..effects.len()).filter(|at| effects[*at] > 0.0).map(rank).sum();
    let all = 1_u32 << effects.len();
    let nonzero = |at: &usize| effects[*at] != 0.0;
    let sum = |signs: u32| -> f64 {
        (0..effects.len()).filter(nonzero).filter(|at| signs >> at & 1 == 1).map(rank).sum()
    };
    f64::from((0..all).filter(|signs| sum(*signs) >= seen - 1e-9).count() as u32) / f64::from(all)
}

#[test]
fn sums_of_ranks_are_those_of_all_signs_with_ties_and_zeros() {
    let mut numbers = Numbers(7);
    for case in 0..60 {
        let count = 1 + case % 11;
        // Whole numbers of a small range: many ties, some zeros.
        let effects: Vec<f64> = (0..count).map(|_| (numbers.unit() * 9.0).floor() - 4.0).collect();
        near(signed_rank_above(&effects), by_all_signs(&effects), 1e-9);
    }
}

#[test]
fn many_pairs_are_tested_by_the_normal_approximation() {
    // scipy 1.17.1: wilcoxon(e, method='approx', correction=True, zero_method='pratt',
    // alternative='greater').
    let effects: Vec<f64> = (0..120).map(|i| (f64::from(i * 37 % 121) - 50.0) / 100.0).collect();
    near(signed_rank_above(&effects), 0.002_527_086, 3e-5);
    near(signed_rank(&effects), 0.005_054_172, 6e-5);
}

#[test]
fn equivalence_is_two_one_sided_tests() {
    // scipy 1.17.1: wilcoxon(d + log(1.05), alternative='greater') and wilcoxon(log(1.05) - d).
    let effects: Vec<f64> = [101.0, 98.0, 103.0, 99.0, 102.0, 97.0, 100.5, 104.0, 96.5, 101.5]
        .iter()
        .map(|value| effect(*value, 100.0))
        .collect();
    near(equivalent(&effects, 1.05_f64.ln()), 0.000_976_562_5, 1e-9);
    near(signed_rank(&effects), 0.921_875, 1e-9);
    // A margin that is narrower than the scatter: nothing can be said.
    assert!(equivalent(&effects, 1.005_f64.ln()) > 0.05);
    // Equal values are equivalent, and never so with less than five pairs.
    near(equivalent(&[0.0; 10], 0.01), 0.5_f64.powi(10), 1e-12);
    assert!(equivalent(&[0.0; 4], 0.01) > 0.05 && equivalent(&[0.0; 5], 0.01) < 0.05);
    // What is beyond the margin is not within it.
    assert!(equivalent(&[0.2; 20], 0.1) > 0.99);
}

#[test]
fn holms_example() {
    // Holm, A simple sequentially rejective multiple test procedure (1979); as p.adjust of R.
    let corrected = holm(&[0.01, 0.04, 0.03, 0.005]);
    for (found, wanted) in corrected.iter().zip([0.03, 0.06, 0.06, 0.02]) {
        near(*found, wanted, 1e-12);
    }
    assert_eq!(holm(&[]), [0.0; 0]);
    assert_eq!(holm(&[0.7, 0.9]), [1.0, 1.0]);
}

#[test]
fn corrected_values_keep_their_order_and_are_never_smaller() {
    let mut numbers = Numbers(3);
    for _ in 0..200 {
        let values: Vec<f64> = (0..9).map(|_| numbers.unit()).collect();
        let corrected = holm(&values);
        for (i, j) in (0..9).flat_map(|i| (0..9).map(move |j| (i, j))) {
            assert!(corrected[i] >= values[i] && corrected[i] <= 1.0);
            assert!(values[i] > values[j] || corrected[i] <= corrected[j]);
        }
        let least = values.iter().copied().fold(1.0, f64::min);
        near(corrected.iter().copied().fold(1.0, f64::min), (9.0 * least).min(1.0), 1e-12);
    }
}

#[test]
fn pairs_needed_are_the_least_that_can_be_significant() {
    assert_eq!([1, 25, 26, 80].map(|tests| pairs_needed(tests, 0.05)), [6, 10, 11, 12]);
    for tests in 1..300 {
        let pairs = pairs_needed(tests, 0.05);
        let least = |pairs| holm(&vec![signed_rank_min(pairs); tests])[0];
        assert!(least(pairs) < 0.05 && least(pairs - 1) >= 0.05, "{tests}");
    }
}

#[test]
fn the_bootstrap_is_that_of_all_resamples() {
    for values in [&[3.0, 1.0, 4.0, 1.5, 9.0][..], &[2.0, 7.0, 1.0, 8.0, 2.5, 8.5]] {
        let n = values.len();
        let mut all: Vec<f64> = Vec::new();
        for code in 0..n.pow(n as u32) {
            let draws = (0..n).map(|at| values[code / n.pow(at as u32) % n]);
            all.push(Summary::of(&draws.collect::<Vec<_>>()).unwrap().median);
        }
        let medians = resampled_medians(values);
        near(medians.iter().map(|(_, chance)| chance).sum(), 1.0, 1e-9);
        for (median, _) in &medians {
            let counted = all.iter().filter(|m| (*m - median).abs() < 1e-9).count() as f64;
            let same = medians.iter().filter(|(m, _)| (m - median).abs() < 1e-9);
            near(same.map(|(_, chance)| chance).sum(), counted / all.len() as f64, 1e-9);
        }
    }
}

#[test]
fn intervals_are_those_of_resampling() {
    // scipy 1.17.1: bootstrap((v,), median, n_resamples=400000, method='percentile').
    let values = [0.91, 0.97, 1.02, 1.05, 1.08, 1.11, 1.19, 1.2, 1.33, 1.5];
    let (low, high) = median_interval(&values).unwrap();
    near(low, 1.01, 1e-9);
    near(high, 1.26, 1e-9);
    let (low, high) = median_interval(&values[..7]).unwrap();
    near(low, 0.97, 1e-9);
    near(high, 1.11, 1e-9);
    assert_eq!(median_interval(&values[..4]), None);
    assert_eq!(median_interval(&[2.0; 5]), Some((2.0, 2.0)));
}

/// They print ratios themselves, with a resampling of their own.
#[test]
fn intervals_of_rigs_are_the_same() {
    let values = [0.91, 0.97, 1.02, 1.05, 1.08, 1.11, 1.19, 1.2, 1.33, 1.5];
    let program = "import sys; sys.path.insert(0, sys.argv[1]); import rig\n\
         values = [float(word) for word in sys.argv[2:]]\n\
         for n in range(4, 11): print(*(rig.median_interval(values[:n]) or ()))";
    let lib = concat!(env!("CARGO_MANIFEST_DIR"), "/../../rigs/lib");
    let mut python = std::process::Command::new("python3");
    python.args(["-B", "-c", program, lib]).args(values.map(|value| value.to_string()));
    let output = match python.output() {
        Ok(output) => output,
        Err(error) => return println!("skipped: python3: {error}"),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 7, "{text}");
    for (n, line) in (4..).zip(text.lines()) {
        let ends: Vec<f64> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
        match (median_interval(&values[..n]), &ends[..]) {
            (None, []) => {}
            (Some((low, high)), [least, greatest]) => {
                near(*least, low, 1e-9);
                near(*greatest, high, 1e-9);
            }
            other => panic!("{n}: {other:?}"),
        }
    }
}

#[test]
fn intervals_cover_the_true_median_about_as_often_as_they_say() {
    let mut numbers = Numbers(11);
    for (pairs, least) in [(5, 0.90), (10, 0.91), (15, 0.91), (30, 0.92)] {
        let covered = (0..2000)
            .filter(|_| {
                let values: Vec<f64> = (0..pairs).map(|_| numbers.skewed()).collect();
                let (low, high) = median_interval(&values).unwrap();
                low <= 0.0 && 0.0 <= high
            })
            .count() as f64
            / 2000.0;
        assert!((least..=0.985).contains(&covered), "{pairs} pairs: {covered}");
    }
}

#[test]
fn of_equal_cases_few_differ() {
    // 400 tables of 10 comparisons each, none of which is there: at most 5 % of the tables, with
    // the scatter of 400, may report one.
    let mut numbers = Numbers(5);
    let reported = (0..400)
        .filter(|_| {
            let table: Vec<f64> = (0..10)
                .map(|_| {
                    let effects: Vec<f64> =
                        (0..12).map(|_| numbers.skewed() - numbers.skewed()).collect();
                    signed_rank(&effects)
                })
                .collect();
            holm(&table).iter().any(|p| *p < 0.05)
        })
        .count();
    assert!(reported <= 32, "{reported} of 400");
}

#[test]
fn ratios_are_those_of_pairs_and_turn_with_them() {
    let pairs = [(2.0, 1.0), (6.0, 2.0), (16.0, 4.0), (5.0, 1.0), (12.0, 2.0)];
    let found = Estimate::of_pairs(&pairs).unwrap();
    near(found.median, 4.0, 1e-9);
    assert!(found.interval && found.count == 5);
    let turned = pairs.map(|(a, b)| (b, a));
    let back = Estimate::of_pairs(&turned).unwrap();
    near(back.median, 0.25, 1e-9);
    near(back.low, 1.0 / found.high, 1e-9);
    near(back.high, 1.0 / found.low, 1e-9);
    // A drift that both runs of a pair share does not matter.
    let drifted = pairs.map(|(a, b)| (a * b, b * b));
    near(Estimate::of_pairs(&drifted).unwrap().median, 4.0, 1e-9);
    // Of few, the ends are the least and the greatest.
    let few = Estimate::of_pairs(&pairs[..3]).unwrap();
    assert!(!few.interval);
    near(few.low, 2.0, 1e-9);
    near(few.high, 4.0, 1e-9);
}

#[test]
fn pairs_without_a_ratio() {
    assert_eq!(Estimate::of_pairs(&[]), None);
    assert_eq!(Estimate::of_pairs(&[(1.0, 0.0), (0.0, 0.0)]), None);
    assert_eq!(Estimate::of_pairs(&[(-1.0, 1.0)]), None);
    // One base of 0 among others leaves a median, but no upper end of the range.
    assert_eq!(Estimate::of_pairs(&[(1.0, 1.0), (1.0, 1.0), (1.0, 0.0)]), None);
    let found = Estimate::of_pairs(&[(0.0, 2.0), (0.0, 4.0)]).unwrap();
    assert_eq!((found.median, found.low, found.high), (0.0, 0.0, 0.0));
    assert_eq!(effect(0.0, 0.0), 0.0);
}
