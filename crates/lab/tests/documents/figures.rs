//! Figures of a document against the queries behind them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use pvswitch_lab::store::Results;

use super::query::Query;

const BEGIN: &str = "<!--=";
const END: &str = "-->";
/// Heading of a table's column in which every number has a marker behind it.
const COLUMN: &str = "figure";

/// Reads results once, and counts what it checked.
pub struct Checker<F> {
    read: F,
    results: BTreeMap<String, Results>,
    pub checked: usize,
    /// What is to be written in place of wrong figures of the document: where, and what.
    fixes: Vec<(Range<usize>, String)>,
    /// Where the document has figures that a marker is behind.
    sourced: Vec<usize>,
    /// Folders whose noise floor was checked.
    noises: BTreeSet<String>,
}

impl<F: Fn(&str) -> Result<Results, String>> Checker<F> {
    pub fn new(read: F) -> Self {
        Self {
            read,
            results: BTreeMap::new(),
            checked: 0,
            fixes: Vec::new(),
            sourced: Vec::new(),
            noises: BTreeSet::new(),
        }
    }

    /// Folders that were quoted, and have a cell compared with itself (A/A) that was not.
    pub fn without_noise(&self) -> Vec<&str> {
        let quoted = self.results.iter().filter(|(_, results)| !results.controls.is_empty());
        let names = quoted.map(|(folder, _)| folder.as_str());
        names.filter(|folder| !self.noises.contains(*folder)).collect()
    }

    /// Returns the document with the figures of the runs in place of wrong ones, and the errors
    /// that remain.
    pub fn fix(&mut self, name: &str, text: &str) -> (String, Vec<String>) {
        self.check(name, text);
        let mut fixed = text.to_string();
        let mut fixes = std::mem::take(&mut self.fixes);
        fixes.sort_by_key(|(at, _)| at.start);
        for (at, figure) in fixes.into_iter().rev() {
            fixed.replace_range(at, &figure);
        }
        let wrong = self.check(name, &fixed);
        (fixed, wrong)
    }

    /// Returns the errors of a document, a line for each marker.
    pub fn check(&mut self, name: &str, text: &str) -> Vec<String> {
        let mut wrong = Vec::new();
        self.fixes.clear();
        self.sourced.clear();
        let (mut query, mut end) = (None, 0);
        for (at, _) in text.match_indices(BEGIN) {
            let line = 1 + text[..at].matches('\n').count();
            let Some((words, _)) = text[at + BEGIN.len()..].split_once(END) else {
                wrong.push(format!("{name}:{line}: the marker does not end"));
                break;
            };
            // Another block starts over; another row of a table has figures of its own.
            let block = text[..at].rfind("\n\n").map_or(0, |blank| blank + 2);
            let row = text[..at].rfind('\n').map_or(0, |end| end + 1);
            let begin = if text[row..].starts_with('|') { row } else { block }.max(end);
            let before = query.take().filter(|_| end > block);
            match self.figures(before, words, &text[begin..at], begin) {
                Ok((next, error)) => {
                    query = Some(next);
                    wrong.extend(error.map(|what| format!("{name}:{line}: {what}")));
                }
                Err(what) => wrong.push(format!("{name}:{line}: {what}")),
            }
            end = at + BEGIN.len() + words.len() + END.len();
        }
        wrong.extend(self.unsourced(name, text));
        wrong
    }

    /// Returns the errors of tables with a column [`COLUMN`]: numbers in it without a marker.
    fn unsourced(&self, name: &str, text: &str) -> Vec<String> {
        let mut wrong = Vec::new();
        let (mut column, mut offset) = (None, 0);
        for (n, line) in text.split_inclusive('\n').enumerate() {
            let start = offset;
            offset += line.len();
            if !line.starts_with('|') {
                column = None;
                continue;
            }
            let cells = cells(line);
            let Some(at) = column else {
                // 0 is before the first bar: a table without that column.
                let header = cells.iter().position(|(_, cell)| cell.trim() == COLUMN);
                column = Some(header.unwrap_or(0));
                continue;
            };
            let Some((begin, cell)) = cells.get(at).filter(|_| at > 0) else { continue };
            let bare = without_markers_and_links(cell);
            for (place, number) in numbers(&bare) {
                if !self.sourced.contains(&(start + begin + place.start)) {
                    wrong.push(format!("{name}:{}: {number}: no runs behind it", n + 1));
                }
            }
        }
        wrong
    }

    /// Checks the last figures of `text`, which begins at `offset` of its document; the query, for
    /// the marker behind it, and what is wrong.
    fn figures(
        &mut self,
        before: Option<Query>,
        words: &str,
        text: &str,
        offset: usize,
    ) -> Result<(Query, Option<String>), String> {
        let folder = match (Query::folder_in(words), &before) {
            (Some(folder), _) => folder.to_string(),
            (None, Some(before)) => before.folder.clone(),
            (None, None) => return Err("the first marker of a block names its results".into()),
        };
        if !self.results.contains_key(&folder) {
            self.results.insert(folder.clone(), (self.read)(&folder)?);
        }
        let results = &self.results[&folder];
        let query = before.unwrap_or_default().next(words, &results.plan.axes)?;
        let figures = query.figures(results)?;
        if query.is_noise() {
            self.noises.insert(folder);
        }
        let written = numbers(text);
        let words = words.trim();
        let Some(skip) = written.len().checked_sub(figures.len()) else {
            return Err(format!(
                "{} figures before '{words}': it gives {figures:?}",
                written.len()
            ));
        };
        self.sourced.extend(written[skip..].iter().map(|(at, _)| offset + at.start));
        let pairs = written[skip..].iter().zip(&figures);
        let wrong = pairs.filter(|((_, written), figure)| !is_rounded(written, **figure));
        let wrong: Vec<String> = wrong
            .map(|((at, written), figure)| {
                let at = offset + at.start..offset + at.end;
                self.fixes.push((at, rounded(written, *figure)));
                format!("{written} is {figure}")
            })
            .collect();
        if !wrong.is_empty() {
            let error = format!("{} by '{words}', which gives {figures:?}", wrong.join(", "));
            return Ok((query, Some(error)));
        }
        self.checked += figures.len();
        Ok((query, None))
    }
}

/// The cells of a table's row, with their places.
fn cells(line: &str) -> Vec<(usize, &str)> {
    let mut at = 0;
    let cells = line.split('|').map(|cell| {
        let begin = at;
        at += cell.len() + 1;
        (begin, cell)
    });
    cells.collect()
}

/// A cell with blanks for its markers and for the names of links, so that places stay.
fn without_markers_and_links(cell: &str) -> String {
    let mut bare = cell.to_string();
    let mut blank = |range: Range<usize>| {
        let blanks = " ".repeat(range.len());
        bare.replace_range(range, &blanks);
    };
    for (at, _) in cell.match_indices(BEGIN) {
        let end = cell[at..].find(END).map_or(cell.len(), |end| at + end + END.len());
        blank(at..end);
    }
    for (end, _) in cell.match_indices("](") {
        if let Some(at) = cell[..end].rfind('[') {
            blank(at..end);
        }
    }
    bare
}

/// Whether a number is another one with as many digits as it has.
fn is_rounded(written: &str, figure: f64) -> bool {
    let digits = written.split_once('.').map_or(0, |(_, digits)| digits.len());
    let number: f64 = written.replace(',', "").parse().expect("it is made of digits");
    let half = 0.5 * 0.1_f64.powi(i32::try_from(digits).unwrap_or(0));
    (number - figure).abs() <= half * (1.0 + 1e-9)
}

/// A figure with as many digits as a number has, and with as many as it needs to have any.
fn rounded(written: &str, figure: f64) -> String {
    let digits = written.split_once('.').map_or(0, |(_, digits)| digits.len());
    let shown = format!("{figure:.digits$}");
    let has_any = shown.bytes().any(|c| (b'1'..=b'9').contains(&c)) || figure == 0.0;
    let shown = if has_any { shown } else { format!("{figure:.*}", digits + 2) };
    let (whole, rest) = shown.split_once('.').unwrap_or((&shown, ""));
    let mut grouped = String::new();
    for (i, digit) in whole.chars().enumerate() {
        if whole.len() > 4 && i > 0 && (whole.len() - i) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    if rest.is_empty() { grouped } else { format!("{grouped}.{rest}") }
}

/// The numbers of a text, with their places: `0.5`, `12,000`. Not those that are part of a word
/// (`p99`, `10k`), nor in `code`, nor where a link goes.
fn numbers(text: &str) -> Vec<(Range<usize>, String)> {
    let mut found = Vec::new();
    let plain = plain(text);
    let places: Vec<(usize, char)> = plain.char_indices().collect();
    let chars: Vec<char> = places.iter().map(|(_, c)| *c).collect();
    let mut at = 0;
    while at < chars.len() {
        let begin = at;
        let word = |c: char| c.is_alphanumeric() || c == '_';
        while at < chars.len() && (word(chars[at]) || is_inner(&chars, at)) {
            at += 1;
        }
        let token: String = chars[begin..at].iter().collect();
        if !token.is_empty() && token.chars().all(|c| c.is_ascii_digit() || ".,".contains(c)) {
            let end = places.get(at).map_or(plain.len(), |(end, _)| *end);
            found.push((places[begin].0..end, token));
        }
        at = at.max(begin + 1);
    }
    found
}

/// Whether a point or comma is inside of a number.
fn is_inner(chars: &[char], at: usize) -> bool {
    let digit = |at: usize| chars.get(at).is_some_and(char::is_ascii_digit);
    let before = at > 0 && digit(at - 1);
    match chars[at] {
        '.' => before && digit(at + 1),
        ',' => before && (1..=3).all(|n| digit(at + n)) && !digit(at + 4),
        _ => false,
    }
}

/// The text with blanks for code and for where links go, so that places stay.
fn plain(text: &str) -> String {
    let blank = |text: &str| " ".repeat(text.len());
    let mut links = text.split("](");
    let mut plain = links.next().unwrap_or_default().to_string();
    for part in links {
        let (target, rest) = part.split_once(')').unwrap_or((part, ""));
        plain += &(blank("](") + &blank(target));
        plain += &(blank(&part[target.len()..part.len() - rest.len()]) + rest);
    }
    let parts = plain.split('`').enumerate();
    let parts: Vec<String> =
        parts.map(|(n, part)| if n % 2 == 0 { part.into() } else { blank(part) }).collect();
    parts.join("`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_that_stand_alone() {
        let text =
            "p99 of 0.5 (12,000-1.25), 10k, **3** / 4 %, [0012](design/0012-x.md), `7 8`, 9.";
        let words = |text: &str| -> Vec<String> {
            let found = numbers(text).into_iter();
            // Each is where it is said to be.
            found.map(|(at, number)| (text[at] == number).then_some(number).unwrap()).collect()
        };
        assert_eq!(words(text), ["0.5", "12,000", "1.25", "3", "4", "0012", "9"]);
        assert_eq!(words("1,2 and 1,234 and 12,3456"), ["1", "2", "1,234", "12", "3456"]);
    }

    #[test]
    fn a_number_is_as_exact_as_it_is_written() {
        assert!(is_rounded("1.9", 1.8501) && is_rounded("1.9", 1.95) && is_rounded("2", 1.5));
        assert!(!is_rounded("1.9", 1.8499) && !is_rounded("1.90", 1.88));
        assert!(is_rounded("12,345", 12_345.4));
    }

    /// What a checker says of the text, with the committed runs of `lab-copies`.
    fn says(text: &str) -> Vec<String> {
        Checker::new(super::super::read).check("doc.md", text)
    }

    const COPIES: &str = "lab-copies mode=bridge filter=off pair=a-b copies";

    #[test]
    fn figures_are_compared_in_their_order() {
        assert_eq!(says(&format!("From 3 to 1<!--= {COPIES} variant=before,after -->.")), [""; 0]);
        // What the marker before said holds, but for what the next one says.
        let two =
            format!("It was 3<!--= {COPIES} variant=before -->, is 1<!--= variant=after -->,");
        let three = format!("{two} 0.33<!--= over variant=before -->,");
        assert_eq!(says(&three), [""; 0]);
        assert_eq!(says(&format!("{three} still 1<!--= over nothing -->.")), [""; 0]);
        assert_eq!(
            says(&format!("1 to 3<!--= {COPIES} variant=before,after between -->")),
            [""; 0]
        );
        assert_eq!(says(&format!("22 runs<!--= {COPIES} variant=* runs -->")), [""; 0]);
    }

    #[test]
    fn noise_is_that_of_the_report_and_needs_no_cell() {
        let noise = super::super::read("lab-copies").unwrap().noise("kb_per_s").unwrap();
        let [median, low, high] =
            [noise.median, noise.low, noise.high].map(|figure| format!("{figure:.3}"));
        let text =
            |low: &str| format!("{median} ({low}-{high}<!--= lab-copies kb_per_s noise -->)");
        assert_eq!(says(&text(&low)), [""; 0]);
        assert_eq!(says(&text("7.777")).len(), 1);
        let none = says("1, 2, 3<!--= lab-copies weather noise -->");
        assert!(none[0].contains("lab-copies: no A/A of 'weather'"), "{none:?}");
        let none = says("1, 2, 3<!--= lab-soak-hour frames noise -->");
        assert!(none[0].contains("lab-soak-hour: no A/A of 'frames'"), "{none:?}");
    }

    #[test]
    fn wrong_figures_are_replaced_with_as_many_digits() {
        let text = format!("`9` from 2.00 to **7**<!--= {COPIES} variant=before,after -->.");
        let mut checker = Checker::new(super::super::read);
        let (fixed, wrong) = checker.fix("doc.md", &text);
        assert_eq!(wrong, [""; 0]);
        assert!(fixed.starts_with("`9` from 3.00 to **1**<!--= "), "{fixed}");
        // What is no figure is not made one.
        let (same, wrong) = checker.fix("doc.md", "3<!--= lab-of-nobody x -->");
        assert_eq!((same.as_str(), wrong.len()), ("3<!--= lab-of-nobody x -->", 1));
        assert_eq!(
            (rounded("1,234", 54_321.0), rounded("0.01", 0.0004)),
            ("54,321".into(), "0.0004".into())
        );
    }

    #[test]
    fn numbers_of_a_column_of_figures_have_runs_behind_them() {
        let row =
            |cell: &str| says(&format!("| n | figure | x |\n|---|---|---|\n| 7 | {cell} | 8 |\n"));
        let sourced = format!("1<!--= {COPIES} variant=after -->");
        assert_eq!(row(&sourced), [""; 0]);
        assert_eq!(row(&format!("at 10k, [0008](x/0008.md), `2`: {sourced}")), [""; 0]);
        assert_eq!(row(&format!("{sourced}, n 22")), ["doc.md:3: 22: no runs behind it"]);
        assert_eq!(row("**4** of 5").len(), 2);
        assert_eq!(says("| n | ours |\n|---|---|\n| 7 | 6 |\n"), [""; 0]);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        let wrong = |text: &str, word: &str| {
            let said = says(text);
            assert!(said.len() == 1 && said[0].contains(word), "{word}: {said:?}");
        };
        wrong(&format!("x\n4 to 1<!--= {COPIES} variant=before,after -->"), "doc.md:2: 4 is 3 by");
        wrong(
            &format!("| 3 | 9 |\n| 1<!--= {COPIES} variant=before,after --> |"),
            "1 figures before",
        );
        wrong("3<!--= variant=before -->", "names its results");
        wrong(
            &format!("3<!--= {COPIES} variant=before -->\n\n1<!--= variant=after -->"),
            "names its",
        );
        wrong(&format!("3<!--= {COPIES} -->"), "say variant=VALUE");
        wrong(
            &format!("3<!--= {COPIES} variant=during -->"),
            "variant=during: it has before, after",
        );
        wrong(&format!("3<!--= {COPIES} weather=fine -->"), "no axis 'weather'");
        wrong(&format!("3<!--= {COPIES} variant=before sheep -->"), "no 'sheep' of mode=bridge");
        wrong("3<!--= lab-of-nobody x -->", "lab-of-nobody");
        wrong(
            "1.78<!--= lab-threads-trunk size=1500 placement=balanced workers=2 over workers=1 \
             frames -->",
            "no speed-up: Jain's index 0.912",
        );
        wrong("3<!--= lab-copies", "does not end");
    }
}
