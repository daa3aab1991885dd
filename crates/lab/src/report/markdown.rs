//! The report's verdicts and tables as text, for documents.

use std::fmt::Write as _;

use super::words::number;
use super::{Document, Part, Table, Value};

/// All of it but plots.
pub fn text(document: &Document) -> String {
    let mut text = format!("# {}\n\n{}\n", document.title, document.question);
    if !document.command.is_empty() {
        let _ = write!(text, "\n```text\n{}\n```\n", document.command);
    }
    for one in &document.conclusions {
        let word = match one.concludes {
            Some(true) => "concludes",
            Some(false) => "CANNOT TELL",
            None => "",
        };
        let _ = write!(text, "\n* {word}{}{}", if word.is_empty() { "" } else { ": " }, one.what);
    }
    for verdict in &document.verdicts {
        let word = match verdict.holds {
            Some(true) => "holds",
            Some(false) => "DOES NOT HOLD",
            None => "inconclusive",
        };
        let _ = write!(text, "\n* {word}: {}", verdict.what);
    }
    for part in &document.parts {
        match part {
            Part::Table(it) => table(&mut text, it),
            Part::Text { title, body } => {
                let _ = write!(text, "\n\n## {title}\n\n{body}\n");
            }
            Part::Plot(_) => {}
        }
    }
    text.push('\n');
    text
}

fn table(text: &mut String, table: &Table) {
    let _ = write!(text, "\n\n## {}\n\n", table.title);
    if !table.note.is_empty() {
        let _ = write!(text, "{}\n\n", table.note);
    }
    let names: Vec<String> = table.columns.iter().map(|name| plain(name)).collect();
    let _ = writeln!(text, "| {} |", names.join(" | "));
    let _ = writeln!(text, "|{}", "---|".repeat(names.len()));
    for row in &table.rows {
        let cells: Vec<String> = row.iter().map(cell).collect();
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    }
}

fn cell(value: &Value) -> String {
    match value {
        Value::Text(words) => plain(words),
        Value::Number(n, digits) | Value::Original(n, digits) => number(*n, *digits),
        Value::Spread(of, digits) => {
            let [median, low, high] = [of.median, of.low, of.high].map(|n| number(n, *digits));
            match (of.count, of.interval) {
                (1, _) => format!("{median} (n 1)"),
                (n, true) => format!("{median} ({low}-{high}, n {n})"),
                (n, false) => format!("{median} (range {low}-{high}, n {n})"),
            }
        }
        Value::Missing(_) => "-".into(),
    }
}

/// On one line, and without what ends a cell.
fn plain(words: &str) -> String {
    words.replace('|', "\\|").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Verdict;
    use crate::stats::paired::Estimate;

    #[test]
    fn tables_and_verdicts_are_text() {
        let of = Estimate { count: 10, median: 1.0, low: 0.9, high: 1.25, interval: true };
        let few = Estimate { count: 3, interval: false, ..of };
        let one = Estimate { count: 1, low: 1.0, high: 1.0, ..few };
        let [spread, few, one] = [of, few, one].map(|of| Value::Spread(of, 2));
        let table = Table {
            title: "A table".into(),
            columns: ["case", "rate", "few", "one", "none"].map(String::from).into(),
            rows: vec![vec![
                Value::Text("a|b".into()),
                spread,
                few,
                one,
                Value::Missing("why".into()),
            ]],
            ..Table::default()
        };
        let verdict = Verdict { what: "it is so".into(), holds: Some(true) };
        let (verdicts, parts) = (vec![verdict], vec![Part::Table(table)]);
        let document = Document { title: "t".into(), verdicts, parts, ..Document::default() };
        let text = text(&document);
        assert!(text.contains("* holds: it is so"));
        assert!(text.contains("| case | rate | few | one | none |\n|---|---|---|---|---|\n"));
        let row =
            "| a\\|b | 1.00 (0.90-1.25, n 10) | 1.00 (range 0.90-1.25, n 3) | 1.00 (n 1) | - |";
        assert!(text.contains(row), "{text}");
    }
}
