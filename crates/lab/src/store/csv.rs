//! Lines of comma-separated values, as RFC 4180 has them, but each one line of the file: no value
//! of ours has a line break in it.

use std::borrow::Cow;

/// One line, with its end.
pub fn line<'a>(values: impl IntoIterator<Item = &'a str>) -> String {
    let quoted: Vec<Cow<str>> = values.into_iter().map(quoted).collect();
    quoted.join(",") + "\n"
}

fn quoted(value: &str) -> Cow<'_, str> {
    let flat = if value.contains(['\n', '\r']) {
        Cow::Owned(value.replace(['\n', '\r'], " "))
    } else {
        Cow::Borrowed(value)
    };
    if flat.contains([',', '"']) {
        format!("\"{}\"", flat.replace('"', "\"\"")).into()
    } else {
        flat
    }
}

/// The values of one line without its end; none where quotes do not match.
pub fn values(line: &str) -> Option<Vec<String>> {
    let mut values = Vec::new();
    let mut rest = line;
    loop {
        let (value, after) = match rest.strip_prefix('"') {
            Some(quoted) => quoted_value(quoted)?,
            None => {
                let end = rest.find(',').unwrap_or(rest.len());
                (rest[..end].to_string(), &rest[end..])
            }
        };
        if value.contains('"') && !rest.starts_with('"') {
            return None;
        }
        values.push(value);
        match after.strip_prefix(',') {
            Some(next) => rest = next,
            None => return after.is_empty().then_some(values),
        }
    }
}

/// A value up to its closing quote, and what comes after that.
fn quoted_value(text: &str) -> Option<(String, &str)> {
    let (mut value, mut rest) = (String::new(), text);
    loop {
        let end = rest.find('"')?;
        value.push_str(&rest[..end]);
        rest = &rest[end + 1..];
        match rest.strip_prefix('"') {
            Some(next) => {
                value.push('"');
                rest = next;
            }
            None => return Some((value, rest)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for row in [
            vec!["a", "b"],
            vec!["", ""],
            vec!["coalesce:50,32", "say \"no\"", "x"],
            vec!["\"", ",", "\",\""],
        ] {
            let text = line(row.iter().copied());
            assert_eq!(text.matches('\n').count(), 1);
            assert_eq!(values(text.trim_end_matches('\n')).unwrap(), row);
        }
        assert_eq!(values(line(["two\nlines"]).trim_end()).unwrap(), ["two lines"]);
    }

    #[test]
    fn broken_quotes() {
        for text in ["\"a", "a\"b", "\"a\"b,c", "\"a\"\""] {
            assert_eq!(values(text), None, "{text}");
        }
    }
}
