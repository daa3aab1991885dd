use super::*;

fn near(a: f64, b: f64, tolerance: f64) {
    assert!((a - b).abs() <= tolerance, "{a} is not {b}");
}

#[test]
fn quartiles_are_those_of_r() {
    // quantile(c(1, 2, 3, 4)): 1.75, 2.5, 3.25.
    let summary = Summary::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
    assert_eq!((summary.quartile_low, summary.median, summary.quartile_high), (1.75, 2.5, 3.25));
    assert_eq!((summary.low, summary.high, summary.count, summary.mean), (1.0, 4.0, 4, 2.5));
    near(summary.deviation, 1.290_994, 1e-6);
    assert_eq!(Summary::of(&[]), None);
    let one = Summary::of(&[7.0]).unwrap();
    assert_eq!((one.median, one.quartile_low, one.deviation), (7.0, 7.0, 0.0));
}

#[test]
fn percentiles_are_interpolated() {
    let values: Vec<f64> = (1..=100).map(f64::from).collect();
    near(percentile(&values, 0.99).unwrap(), 99.01, 1e-9);
    assert_eq!(percentile(&values, 2.0), Some(100.0));
    assert_eq!(percentile(&[], 0.5), None);
}

#[test]
fn fairness_as_in_jain_chiu_and_hawe() {
    // DEC-TR-301 (1984): m/n if m of n users have equal shares and the others nothing.
    assert_eq!(jain(&[1.0, 1.0, 0.0, 0.0, 0.0]), Some(0.4));
    assert_eq!(jain(&[3.0; 7]), Some(1.0));
    // (1 + 3 + 5)^2 / (3 (1 + 9 + 25)).
    near(jain(&[1.0, 3.0, 5.0]).unwrap(), 81.0 / 105.0, 1e-12);
    assert_eq!(jain(&[]), None);
    assert_eq!(jain(&[0.0, 0.0]), None);
}

#[test]
fn hollander_and_wolfe_example_4_1() {
    // Hollander and Wolfe, Nonparametric Statistical Methods, example 4.1: permeability of the
    // human chorioamnion at term and at 12 to 26 weeks; W = 30 of 50 and 5, one-sided P = 0.1272.
    let at_term = [0.80, 0.83, 1.89, 1.04, 1.45, 1.38, 1.91, 1.64, 0.73, 1.46];
    let before = [1.15, 0.88, 0.90, 0.74, 1.21];
    near(mann_whitney(&at_term, &before), 2.0 * 0.1272, 2e-4);
}

#[test]
fn small_samples_match_the_table_of_mann_and_whitney() {
    // Table I (1947), n = 4, m = 4: P(U <= 0) = 0.014, P(U <= 1) = 0.029, P(U <= 2) = 0.057.
    let low = [1.0, 2.0, 3.0, 4.0];
    near(mann_whitney(&low, &[5.0, 6.0, 7.0, 8.0]), 2.0 / 70.0, 1e-12);
    near(mann_whitney(&[1.0, 2.0, 3.0, 5.0], &[4.0, 6.0, 7.0, 8.0]), 4.0 / 70.0, 1e-12);
    near(mann_whitney(&[1.0, 2.0, 3.0, 6.0], &[4.0, 5.0, 7.0, 8.0]), 8.0 / 70.0, 1e-12);
    // Symmetric.
    near(mann_whitney(&[5.0, 6.0, 7.0, 8.0], &low), 2.0 / 70.0, 1e-12);
}

#[test]
fn three_against_three_is_never_significant() {
    near(mann_whitney(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]), 0.1, 1e-12);
    near(mann_whitney_min(3, 3), 0.1, 1e-12);
    near(mann_whitney_min(4, 4), 2.0 / 70.0, 1e-12);
    assert_eq!(mann_whitney_min(0, 4), 1.0);
    assert_eq!(mann_whitney_min(1, 1), 1.0);
}

#[test]
fn intervals_of_ratios_exclude_1_where_the_test_rejects() {
    // Four against four: P(U <= 0) = 1/70, P(U <= 1) = 2/70 > 0.025, so that the interval is all.
    let (low, high) = ([1.0, 2.0, 3.0, 4.0], [8.0, 10.0, 12.0, 16.0]);
    assert_eq!(ratio_interval(&high, &low), Some((2.0, 16.0)));
    // Of 16 sorted ratios the eighth is 4, the ninth 5.
    assert_eq!(ratio(&high, &low), Some(4.5));
    // Bounds for five and five: U of 2 is rejected at 5 %, P = 0.032, 3 is not (Mann and Whitney).
    assert_eq!([outside_interval(5, 5), outside_interval(4, 4), outside_interval(3, 3)], [3, 1, 0]);
    assert_eq!(outside_interval(10, 10), 24);
    for (a, b) in [(5, 5), (7, 5), (10, 10), (12, 9)] {
        for shift in 0..40 {
            let base: Vec<f64> = (0..b).map(|i| 100.0 + f64::from(i * 37 % 41)).collect();
            let ours: Vec<f64> =
                (0..a).map(|i| 80.123 + f64::from(shift) + f64::from(i * 29 % 43)).collect();
            let (low, high) = ratio_interval(&ours, &base).unwrap();
            let rejected = mann_whitney(&ours, &base) < 0.05;
            assert_eq!(rejected, !(low..=high).contains(&1.0), "{a} {b} {shift}: {low} {high}");
            let ratio = ratio(&ours, &base).unwrap();
            assert!((low..=high).contains(&ratio));
        }
    }
    // Beyond 40 values: the normal approximation joins the exact bound.
    assert_eq!(outside_interval(20, 20), 128);
    assert!((134..=136).contains(&outside_interval(20, 21)), "{}", outside_interval(20, 21));
}

#[test]
fn samples_without_a_ratio() {
    assert_eq!(ratio(&[1.0], &[0.0]), None);
    assert_eq!(ratio(&[], &[1.0]), None);
    assert_eq!(ratio(&[-1.0], &[1.0]), None);
    assert_eq!(ratio(&[0.0, 4.0], &[2.0]), Some(1.0));
    assert_eq!(ratio_interval(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]), None);
}

#[test]
fn ties_and_empty_samples() {
    assert_eq!(mann_whitney(&[1.0; 5], &[1.0; 5]), 1.0);
    assert_eq!(mann_whitney(&[1.0; 30], &[1.0; 30]), 1.0);
    assert_eq!(mann_whitney(&[], &[1.0]), 1.0);
    // The 6 ways to choose two of 1, 2, 2, 3 have sums 3, 3, 4, 4, 5, 5; 4 of them are as extreme.
    near(mann_whitney(&[1.0, 2.0], &[2.0, 3.0]), 4.0 / 6.0, 1e-12);
}

#[test]
fn the_normal_approximation_agrees_with_the_exact_test() {
    near(upper_tail(1.959_964), 0.025, 1e-6);
    near(upper_tail(0.0), 0.5, 1e-7);
    let a: Vec<f64> = (0..20).map(|i| f64::from(i * 7 % 20)).collect();
    let b: Vec<f64> = a.iter().map(|value| value + 5.0).collect();
    let ranks = doubled_ranks(&a, &b);
    let sum = ranks[..20].iter().sum();
    near(exact(&ranks, 20, sum), normal(&ranks, 20, sum), 2e-3);
}
