//! Comma-separated values (RFC 4180), each record one line of its file: no value of ours has a line
//! break in it, and a file that was cut off lacks the end of its last line only.

/// One line, with its end.
pub fn line<'a>(values: impl IntoIterator<Item = &'a str>) -> String {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    let flat = values.into_iter().map(|value| value.replace(['\n', '\r'], " "));
    writer.write_record(flat).expect("memory takes it");
    let bytes = writer.into_inner().expect("memory takes it");
    String::from_utf8(bytes).expect("what was text is text")
}

/// The values of one line without its end.
pub fn values(line: &str) -> Option<Vec<String>> {
    let reader = ::csv::ReaderBuilder::new().has_headers(false).from_reader(line.as_bytes());
    let record = reader.into_records().next()?.ok()?;
    Some(record.iter().map(String::from).collect())
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
        assert_eq!(values(""), None);
    }
}
