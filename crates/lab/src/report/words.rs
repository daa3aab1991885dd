//! Formats numbers, and escapes text for markup.

/// Escapes text for HTML and XML, also in quoted attributes. Characters that XML does not allow
/// (control characters) become U+FFFD.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            '\t' | '\n' => escaped.push(c),
            '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            c if c.is_control() => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

/// Formats a number with `digits` decimal places, and with thousands separators from 10,000; a dash
/// if it is not finite.
pub fn number(value: f64, digits: usize) -> String {
    if !value.is_finite() {
        return "\u{2014}".into();
    }
    let plain = format!("{:.*}", digits, value.abs());
    let (whole, fraction) = plain.split_once('.').unwrap_or((&plain, ""));
    let mut shown = String::new();
    if value < 0.0 && plain.bytes().any(|b| (b'1'..=b'9').contains(&b)) {
        shown.push('\u{2212}');
    }
    for (i, digit) in whole.chars().enumerate() {
        if whole.len() > 4 && i > 0 && (whole.len() - i) % 3 == 0 {
            shown.push(',');
        }
        shown.push(digit);
    }
    if !fraction.is_empty() {
        shown.push('.');
        shown.push_str(fraction);
    }
    shown
}

/// Formats a number with about four significant digits, for tooltips and descriptions of plots.
pub fn short(value: f64) -> String {
    let digits = match value.abs() {
        size if size == 0.0 || size >= 1000.0 => 0,
        size if size >= 100.0 => 1,
        size if size >= 10.0 => 2,
        size if size >= 0.1 => 3,
        _ => return small(value),
    };
    let shown = number(value, digits);
    if digits == 0 {
        return shown;
    }
    shown.trim_end_matches('0').trim_end_matches('.').into()
}

/// Formats a number with three significant digits and an SI prefix, for labels of bars.
pub fn brief(value: f64) -> String {
    let (unit, letter) = match value.abs() {
        size if size >= 1e9 => (1e9, "G"),
        size if size >= 1e6 => (1e6, "M"),
        size if size >= 1e4 => (1e3, "k"),
        size if size >= 1e3 || size == 0.0 => (1.0, ""),
        size if size < 0.1 => return short(value),
        _ => (1.0, ""),
    };
    let digits = match value.abs() / unit {
        size if size >= 100.0 || size.fract() == 0.0 => 0,
        size if size >= 10.0 => 1,
        _ => 2,
    };
    number(value / unit, digits) + letter
}

/// Formats a number below 0.1 with four significant digits.
fn small(value: f64) -> String {
    let digits = (4.0 - value.abs().log10().ceil()).clamp(0.0, 12.0);
    let shown = number(value, digits as usize);
    shown.trim_end_matches('0').trim_end_matches('.').into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_and_control_characters_are_escaped() {
        assert_eq!(escape("<a b=\"c\" d='e'>&"), "&lt;a b=&quot;c&quot; d=&#39;e&#39;&gt;&amp;");
        assert_eq!(
            escape("a\u{0}b\u{1b}c\u{ffff}\u{7f}\n"),
            "a\u{fffd}b\u{fffd}c\u{fffd}\u{fffd}\n"
        );
        assert_eq!(escape("µs → 5"), "µs → 5");
    }

    #[test]
    fn numbers_have_separators_and_signs() {
        assert_eq!(number(1234.5, 1), "1234.5");
        assert_eq!(number(12345.0, 0), "12,345");
        assert_eq!(number(-1_234_567.891, 2), "\u{2212}1,234,567.89");
        assert_eq!(number(-0.001, 2), "0.00");
        assert_eq!(number(f64::NAN, 2), "\u{2014}");
        assert_eq!(number(100.0, 0), "100");
    }

    #[test]
    fn brief_numbers_have_three_digits() {
        let shown = [0.0, 4.1, 12.34, 512.0, 9876.0, 98765.0, 1.234e6, 0.012, -0.5].map(brief);
        let wanted =
            ["0", "4.10", "12.3", "512", "9876", "98.8k", "1.23M", "0.012", "\u{2212}0.50"];
        assert_eq!(shown, wanted);
    }

    #[test]
    fn short_numbers_have_four_digits() {
        let shown: Vec<String> =
            [0.0, 1.0, 0.25, 12.3456, 123.456, 98765.4, 0.000_123_456, -2.5].map(short).into();
        assert_eq!(
            shown,
            ["0", "1", "0.25", "12.35", "123.5", "98,765", "0.0001235", "\u{2212}2.5"]
        );
    }
}
