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
