//! Comma-separated values (RFC 4180). Values contain no line break, so each record is one line, and
//! of a truncated file only the last line is incomplete.

/// Returns a line with its line break. Line breaks in values become blanks.
pub fn line<'a>(values: impl IntoIterator<Item = &'a str>) -> String {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    let flat = values.into_iter().map(|value| value.replace(['\n', '\r'], " "));
    writer.write_record(flat).expect("writing to memory cannot fail");
    let bytes = writer.into_inner().expect("writing to memory cannot fail");
    String::from_utf8(bytes).expect("the values were UTF-8")
}

/// Parses a line without its line break.
pub fn values(line: &str) -> Option<Vec<String>> {
    let reader = ::csv::ReaderBuilder::new().has_headers(false).from_reader(line.as_bytes());
    let record = reader.into_records().next()?.ok()?;
    Some(record.iter().map(String::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_round_trip() {
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
        assert_eq!(values(""), None);
    }
}
