//! Numbers in human-readable form. No input gives a negative number or `NaN`.

/// Formats `amount` with three digits and a prefix: `0`, `950`, `12.3 k`, `3.21 M`.
pub fn si(amount: f64) -> String {
    let mut amount = sane(amount);
    if amount < 0.95 {
        return if amount < 0.05 { "0".into() } else { format!("{amount:.1}") };
    }
    let mut prefix = "";
    for next in [" k", " M", " G", " T"] {
        if amount < 999.5 {
            break;
        }
        amount /= 1000.0;
        prefix = next;
    }
    if prefix.is_empty() {
        return format!("{amount:.0}");
    }
    format!("{}{prefix}", three_digits(amount))
}

/// Formats a bit rate: `1.54 Gbit/s`.
pub fn bits(per_second: f64) -> String {
    let text = si(per_second);
    if text.contains(' ') { format!("{text}bit/s") } else { format!("{text} bit/s") }
}

/// Formats a time given in ns: `812 ns`, `25.8 us`, `9.53 ms`, `1.20 s`.
pub fn time_ns(ns: f64) -> String {
    let ns = sane(ns);
    if ns < 999.5 {
        return format!("{ns:.0} ns");
    }
    let (amount, unit) = match ns {
        n if n < 999.5e3 => (n / 1e3, "us"),
        n if n < 999.5e6 => (n / 1e6, "ms"),
        n => (n / 1e9, "s"),
    };
    format!("{} {unit}", three_digits(amount))
}

/// Formats a share of one core, given as a fraction: `0 %`, `0.4 %`, `38 %`, `150 %`.
pub fn percent(fraction: f64) -> String {
    let percent = sane(fraction) * 100.0;
    match percent {
        p if p <= 0.0 => "0 %".into(),
        p if p < 0.01 => "<0.01 %".into(),
        p if p < 0.995 => format!("{p:.2} %"),
        p if p < 9.95 => format!("{p:.1} %"),
        p => format!("{p:.0} %"),
    }
}

/// Formats `n` with its noun: `1 core`, `2 cores`.
pub fn plural(n: u64, word: &str) -> String {
    if n == 1 { format!("1 {word}") } else { format!("{n} {word}s") }
}

/// Returns `part / whole`, or 0 if the result is not a positive number.
pub fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { sane(part / whole) } else { 0.0 }
}

fn sane(n: f64) -> f64 {
    if n.is_finite() && n > 0.0 { n } else { 0.0 }
}

fn three_digits(n: f64) -> String {
    match n {
        n if n < 9.995 => format!("{n:.2}"),
        n if n < 99.95 => format!("{n:.1}"),
        n => format!("{n:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_keep_three_digits() {
        let cases = [
            (0.0, "0"),
            (0.04, "0"),
            (0.5, "0.5"),
            (1.0, "1"),
            (999.4, "999"),
            (999.6, "1.00 k"),
            (12_340.0, "12.3 k"),
            (999_600.0, "1.00 M"),
            (3_214_000.0, "3.21 M"),
            (1.5e9, "1.50 G"),
        ];
        for (n, text) in cases {
            assert_eq!(si(n), text);
        }
        assert_eq!(bits(1.544e9), "1.54 Gbit/s");
        assert_eq!(bits(12.0), "12 bit/s");
    }

    #[test]
    fn times_have_a_suitable_unit() {
        assert_eq!(time_ns(812.0), "812 ns");
        assert_eq!(time_ns(25_840.0), "25.8 us");
        assert_eq!(time_ns(999_700.0), "1.00 ms");
        assert_eq!(time_ns(1.2e9), "1.20 s");
    }

    #[test]
    fn small_shares_are_not_rounded_to_zero() {
        let all = [0.0, 0.000_01, 0.004, 0.05, 0.38, 1.5].map(percent);
        assert_eq!(all, ["0 %", "<0.01 %", "0.40 %", "5.0 %", "38 %", "150 %"]);
    }

    #[test]
    fn invalid_numbers_are_shown_as_zero() {
        for bad in [f64::NAN, f64::INFINITY, -1.0] {
            assert_eq!(
                (si(bad), time_ns(bad), percent(bad)),
                ("0".into(), "0 ns".into(), "0 %".into())
            );
        }
        assert_eq!(ratio(1.0, 0.0), 0.0);
        assert_eq!(ratio(1.0, -2.0), 0.0);
        assert_eq!(plural(1, "core") + &plural(2, "core"), "1 core2 cores");
    }
}
