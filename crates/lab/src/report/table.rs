//! Tables as HTML: sortable columns, published figures shaded, and the reasons of missing values
//! below the table.

use std::fmt::Write as _;

use super::words::{escape, number};
use super::{Plot, Point, Series, Table, Value};
use crate::stats::paired::{Estimate, INTERVAL_MIN};

/// Contents of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    /// Text, aligned left.
    Words,
    /// Numbers, aligned right.
    Figures,
    /// Only figures of an original study.
    Original,
}

/// Returns the table with its notes; `small` describes the ranges in small print.
pub fn html(table: &Table, name: &str, small: &str) -> String {
    let columns: Vec<Column> = (0..table.columns.len()).map(|n| column(table, n)).collect();
    let mut reasons: Vec<&str> = Vec::new();
    let title = escape(&table.title);
    let dense = match table.columns.len() {
        ..=7 => "",
        8..=12 => " dense",
        _ => " denser",
    };
    let mut html = format!(
        "<div class=\"box\" role=\"region\" tabindex=\"0\" aria-label=\"{title}\">\n\
         <table id=\"{name}-table\" class=\"sorts{dense}\">\n<caption class=\"unseen\">{title}\
         </caption>\n<thead><tr>"
    );
    for (name, column) in table.columns.iter().zip(&columns) {
        let kind = match column {
            Column::Words => "",
            Column::Figures => "n",
            Column::Original => "n original",
        };
        let long = if name.chars().count() > 14 { " long" } else { "" };
        let name = escape(name);
        let _ = write!(html, "<th scope=\"col\" class=\"{kind}{long}\"><span>{name}</span></th>");
    }
    html.push_str("</tr></thead>\n<tbody>\n");
    for row in &table.rows {
        html.push_str("<tr>");
        for (n, (value, column)) in row.iter().zip(&columns).enumerate() {
            cell(&mut html, value, n == 0, *column, &mut reasons);
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</tbody>\n</table>\n</div>\n");
    notes(&mut html, table, &reasons, small);
    html
}

fn column(table: &Table, n: usize) -> Column {
    let values = || table.rows.iter().filter_map(|row| row.get(n));
    let words = values().any(|value| matches!(value, Value::Text(_)));
    let original = values().any(|value| matches!(value, Value::Original(..)));
    let ours = values().any(|value| matches!(value, Value::Number(..) | Value::Spread(..)));
    match (words, ours, original) {
        (true, ..) => Column::Words,
        (false, false, true) => Column::Original,
        (false, ..) => Column::Figures,
    }
}

fn cell<'a>(
    html: &mut String,
    value: &'a Value,
    first: bool,
    column: Column,
    reasons: &mut Vec<&'a str>,
) {
    let (open, close) = if first { ("th scope=\"row\"", "th") } else { ("td", "td") };
    let right = if column == Column::Words { "" } else { "n" };
    let exact = |value: f64| if value.is_finite() { format!("{value}") } else { String::new() };
    let _ = match value {
        Value::Text(text) => {
            let long = if text.chars().count() > 36 { " long" } else { "" };
            write!(html, "<{open} class=\"{right}{long}\">{}</{close}>", escape(text))
        }
        Value::Number(value, digits) => {
            let (exact, shown) = (exact(*value), number(*value, *digits));
            write!(html, "<{open} class=\"n\" data-v=\"{exact}\">{shown}</{close}>")
        }
        Value::Spread(of, digits) => {
            let [shown, low, high] = [of.median, of.low, of.high].map(|v| number(v, *digits));
            let (exact, n) = (exact(of.median), of.count);
            let ends = match (n, of.interval) {
                (1, _) => String::new(),
                (_, true) => format!("<span class=\"range\">{low}\u{2013}{high}</span> "),
                (_, false) => format!("<span class=\"range few\">{low}\u{2013}{high}</span> "),
            };
            write!(
                html,
                "<{open} class=\"n\" data-v=\"{exact}\">{shown} {ends}<span class=\"count\">\
                 n\u{a0}{n}</span></{close}>"
            )
        }
        Value::Original(value, digits) => {
            let (exact, shown) = (exact(*value), number(*value, *digits));
            write!(html, "<{open} class=\"n original\" data-v=\"{exact}\">{shown}</{close}>")
        }
        Value::Missing(why) => {
            let mark = footnote(why, reasons);
            let why = escape(why);
            write!(
                html,
                "<{open} class=\"{right} missing\" title=\"{why}\">\u{2014}{mark}</{close}>"
            )
        }
    };
}

/// Returns the footnote reference of a reason; equal reasons share a number.
fn footnote<'a>(why: &'a str, reasons: &mut Vec<&'a str>) -> String {
    if why.is_empty() {
        return String::new();
    }
    let known = reasons.iter().position(|reason| *reason == why);
    let index = known.unwrap_or_else(|| {
        reasons.push(why);
        reasons.len() - 1
    });
    format!("<sup>{}</sup>", index + 1)
}

fn notes(html: &mut String, table: &Table, reasons: &[&str], small: &str) {
    let any = |wanted: fn(&Value) -> bool| table.rows.iter().flatten().any(wanted);
    let mut keys: Vec<String> = Vec::new();
    if any(|value| matches!(value, Value::Original(..))) {
        keys.push(
            "<span class=\"key original\">shaded, in italics</span>: as its source printed it"
                .into(),
        );
    }
    if any(|value| matches!(value, Value::Spread(of, _) if of.interval)) {
        keys.push(format!("<span class=\"range\">small</span>: {small}"));
    }
    if any(|value| matches!(value, Value::Spread(of, _) if !of.interval && of.count > 1)) {
        keys.push(format!(
            "<span class=\"range few\">small, in italics</span>: least and most of fewer than \
             {INTERVAL_MIN}, too few for an interval"
        ));
    }
    if any(|value| matches!(value, Value::Spread(..))) {
        keys.push("<span class=\"count\">n</span>: runs or pairs".into());
    }
    if !keys.is_empty() {
        let _ = writeln!(html, "<p class=\"keys\">{}</p>", keys.join(" \u{00b7} "));
    }
    if !reasons.is_empty() {
        html.push_str("<ol class=\"reasons\">\n");
        for reason in reasons {
            let _ = writeln!(html, "<li>{}</li>", escape(reason));
        }
        html.push_str("</ol>\n");
    }
}

/// Returns the data of a plot as a table.
pub fn of_plot(plot: &Plot) -> Table {
    let points = || plot.series.iter().flat_map(|s| &s.points);
    let mut xs: Vec<f64> = points().map(|p| p.x).filter(|x| x.is_finite()).collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    let mut columns = vec![plot.x.clone()];
    columns.extend(plot.series.iter().map(|series| {
        let unit = if series.right { &plot.right } else { &plot.y };
        if unit.is_empty() { series.name.clone() } else { format!("{}: {unit}", series.name) }
    }));
    let x_digits = digits(xs.iter().copied());
    let mut rows = Vec::new();
    for x in xs {
        let category = plot.categories.get(x as usize).filter(|_| x >= 0.0);
        let mut row = vec![match category {
            Some(name) => Value::Text(name.clone()),
            None => Value::Number(x, x_digits),
        }];
        row.extend(plot.series.iter().map(|series| value_at(series, x)));
        rows.push(row);
    }
    let title = format!("Figures of: {}", plot.title);
    Table { title, columns, rows, ..Table::default() }
}

/// Returns the value of a series at `x`.
fn value_at(series: &Series, x: f64) -> Value {
    let digits = digits(series.points.iter().map(|p| p.y));
    match series.points.iter().find(|p| p.x == x && p.y.is_finite()) {
        None => Value::Missing(String::new()),
        Some(p) if p.count > 0 || p.low < p.y || p.high > p.y => {
            let Point { y: median, low, high, count, interval, .. } = *p;
            Value::Spread(Estimate { count, median, low, high, interval }, digits)
        }
        Some(p) => Value::Number(p.y, digits),
    }
}

/// Decimal places for four significant digits of the largest number.
fn digits(values: impl Iterator<Item = f64> + Clone) -> usize {
    let finite = values.filter(|value| value.is_finite());
    let most = finite.clone().map(f64::abs).fold(0.0, f64::max);
    match most {
        most if most >= 1000.0 || finite.clone().all(|value| value.fract() == 0.0) => 0,
        most => (3.0 - most.log10().floor()).clamp(0.0, 9.0) as usize,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_a_plot_have_four_significant_digits() {
        assert_eq!(digits([1.0, 12.0].into_iter()), 0);
        assert_eq!(digits([1.0, 12.5, f64::NAN].into_iter()), 2);
        assert_eq!(digits([0.0123].into_iter()), 5);
        assert_eq!(digits([54321.5].into_iter()), 0);
        assert_eq!(digits([].into_iter()), 0);
    }

    #[test]
    fn figures_of_a_plot_are_sorted_by_x() {
        let of = |median: f64, error: f64| {
            let (low, high) = (median - error, median + error);
            Estimate { count: 5, median, low, high, interval: true }
        };
        let point = |x: f64, y: f64, error: f64| match error {
            0.0 => Point::at(x, y),
            _ => Point::of(x, of(y, error)),
        };
        let series = |name: &str, points: Vec<Point>| Series {
            name: name.into(),
            points,
            ..Series::default()
        };
        let plot = Plot {
            x: "guests".into(),
            y: "Gbit/s".into(),
            series: vec![
                series("a", vec![point(2.0, 3.5, 0.5), point(1.0, 2.0, 0.0)]),
                series("b", vec![point(3.0, 7.0, 0.0)]),
            ],
            ..Plot::default()
        };
        let table = of_plot(&plot);
        assert_eq!(table.columns, ["guests", "a: Gbit/s", "b: Gbit/s"]);
        let none = || Value::Missing(String::new());
        let spread = Value::Spread(of(3.5, 0.5), 3);
        assert_eq!(
            table.rows,
            [
                vec![Value::Number(1.0, 0), Value::Number(2.0, 3), none()],
                vec![Value::Number(2.0, 0), spread, none()],
                vec![Value::Number(3.0, 0), none(), Value::Number(7.0, 0)],
            ]
        );
    }
}
