//! Figures of a document against the queries behind them.

use std::collections::BTreeMap;

use pvswitch_lab::store::Results;

use super::query::Query;

const BEGIN: &str = "<!--=";
const END: &str = "-->";

/// Reads results once, and counts what it checked.
pub struct Checker<F> {
    read: F,
    results: BTreeMap<String, Results>,
    pub checked: usize,
}

impl<F: Fn(&str) -> Result<Results, String>> Checker<F> {
    pub fn new(read: F) -> Self {
        Self { read, results: BTreeMap::new(), checked: 0 }
    }

    /// Returns the errors of a document, a line for each marker.
    pub fn check(&mut self, name: &str, text: &str) -> Vec<String> {
        let mut wrong = Vec::new();
        let (mut query, mut end) = (None, 0);
        for (at, _) in text.match_indices(BEGIN) {
            let line = 1 + text[..at].matches('\n').count();
            let Some((words, _)) = text[at + BEGIN.len()..].split_once(END) else {
                wrong.push(format!("{name}:{line}: the marker does not end"));
                break;
            };
            // Another block begins anew; another row of a table has figures of its own.
            let block = text[..at].rfind("\n\n").map_or(0, |blank| blank + 2);
            let row = text[..at].rfind('\n').map_or(0, |end| end + 1);
            let begin = if text[row..].starts_with('|') { row } else { block }.max(end);
            let before = query.take().filter(|_| end > block);
            match self.figures(before, words, &text[begin..at]) {
                Ok(next) => query = Some(next),
                Err(what) => wrong.push(format!("{name}:{line}: {what}")),
            }
            end = at + BEGIN.len() + words.len() + END.len();
        }
        wrong
    }

    /// Checks the last figures of `text`; the query, for the marker behind it.
    fn figures(&mut self, before: Option<Query>, words: &str, text: &str) -> Result<Query, String> {
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
        let written = numbers(text);
        let words = words.trim();
        let Some(skip) = written.len().checked_sub(figures.len()) else {
            return Err(format!(
                "{} figures before '{words}': it gives {figures:?}",
                written.len()
            ));
        };
        let pairs = written[skip..].iter().zip(&figures);
        let wrong: Vec<String> = pairs
            .filter(|(written, figure)| !is_rounded(written, **figure))
            .map(|(written, figure)| format!("{written} is {figure}"))
            .collect();
        if !wrong.is_empty() {
            return Err(format!("{} by '{words}', which gives {figures:?}", wrong.join(", ")));
        }
        self.checked += figures.len();
        Ok(query)
    }
}

/// Whether a number is another one with as many digits as it has.
fn is_rounded(written: &str, figure: f64) -> bool {
    let digits = written.split_once('.').map_or(0, |(_, digits)| digits.len());
    let number: f64 = written.replace(',', "").parse().expect("it is made of digits");
    let half = 0.5 * 0.1_f64.powi(i32::try_from(digits).unwrap_or(0));
    (number - figure).abs() <= half * (1.0 + 1e-9)
}

/// The numbers of a text: `0.5`, `12,000`. Not those that are part of a word (`p99`, `10k`), nor in
/// `code`, nor where a link goes.
fn numbers(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let text = without_links(text);
    for plain in text.split('`').step_by(2) {
        let chars: Vec<char> = plain.chars().collect();
        let mut at = 0;
        while at < chars.len() {
            let begin = at;
            let word = |c: char| c.is_alphanumeric() || c == '_';
            while at < chars.len() && (word(chars[at]) || is_inner(&chars, at)) {
                at += 1;
            }
            let token: String = chars[begin..at].iter().collect();
            if !token.is_empty() && token.chars().all(|c| c.is_ascii_digit() || ".,".contains(c)) {
                found.push(token);
            }
            at = at.max(begin + 1);
        }
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

fn without_links(text: &str) -> String {
    let mut parts = text.split("](");
    let first = parts.next().unwrap_or_default().to_string();
    parts.fold(first, |text, part| text + "](" + part.split_once(')').map_or("", |(_, rest)| rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_that_stand_alone() {
        let text =
            "p99 of 0.5 (12,000-1.25), 10k, **3** / 4 %, [0012](design/0012-x.md), `7 8`, 9.";
        assert_eq!(numbers(text), ["0.5", "12,000", "1.25", "3", "4", "0012", "9"]);
        assert_eq!(numbers("1,2 and 1,234 and 12,3456"), ["1", "2", "1,234", "12", "3456"]);
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
        assert_eq!(says(&format!("2 runs<!--= {COPIES} variant=* runs -->")), [""; 0]);
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
        wrong("3<!--= lab-copies", "does not end");
    }
}
