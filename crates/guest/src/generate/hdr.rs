//! Histograms of latencies as HdrHistogram logs, which the tools of HdrHistogram read and merge.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, SystemTime};

use hdrhistogram::Histogram;
use hdrhistogram::serialization::V2DeflateSerializer;
use hdrhistogram::serialization::interval_log::IntervalLogWriterBuilder;

use crate::error::Error;

/// Unit of the column with the largest value, as in logs of other programs: ms. The values of the
/// histogram are in ns.
const NS_PER_MS: f64 = 1e6;

/// Writes a log with one interval, which began at `from` and took `took`.
///
/// # Errors
/// The file cannot be written; the error names it.
pub fn write(
    path: &Path,
    latency_ns: &Histogram<u64>,
    from: SystemTime,
    took: Duration,
) -> Result<(), Error> {
    let failed = |what: String| Error::Failed(format!("--hdr {}: {what}", path.display()));
    let text = log(latency_ns, from, took).map_err(&failed)?;
    let written = std::fs::File::create(path).and_then(|mut file| file.write_all(&text));
    written.map_err(|error| failed(error.to_string()))
}

/// The bytes of that log.
fn log(latency_ns: &Histogram<u64>, from: SystemTime, took: Duration) -> Result<Vec<u8>, String> {
    let (mut text, mut serializer) = (Vec::new(), V2DeflateSerializer::new());
    let since = from.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut log = IntervalLogWriterBuilder::new()
        .add_comment("latency in ns, from the time at which a frame was due")
        .with_start_time(from)
        .with_max_value_divisor(NS_PER_MS)
        .begin_log_with(&mut text, &mut serializer)
        .map_err(|error| error.to_string())?;
    log.write_histogram(latency_ns, since, took, None).map_err(|error| format!("{error:?}"))?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use hdrhistogram::serialization::Deserializer;
    use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};

    use super::*;
    use crate::generate::latency_histogram;

    #[test]
    fn logs_are_read_as_written_and_merged() {
        let (mut a, mut b) = (latency_histogram(), latency_histogram());
        for ns in 1..5_000 {
            a.record(ns * 37).unwrap();
            b.record(ns * 1_001).unwrap();
        }
        let from = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let mut merged = latency_histogram();
        for histogram in [&a, &b] {
            let text = log(histogram, from, Duration::from_secs(2)).unwrap();
            let entries: Vec<_> = IntervalLogIterator::new(&text).map(Result::unwrap).collect();
            let intervals = entries.iter().filter_map(|entry| match entry {
                LogEntry::Interval(interval) => Some(interval),
                _ => None,
            });
            let [interval] = intervals.collect::<Vec<_>>()[..] else { panic!("{entries:?}") };
            assert_eq!(interval.duration(), Duration::from_secs(2));
            let bytes = decoded(interval.encoded_histogram());
            let read: Histogram<u64> = Deserializer::new().deserialize(&mut &bytes[..]).unwrap();
            assert_eq!(read, *histogram);
            merged.add(read).unwrap();
        }
        assert_eq!(merged.len(), a.len() + b.len());
        assert_eq!(merged.max(), b.max());
    }

    /// Base64, as a log has it.
    fn decoded(text: &str) -> Vec<u8> {
        const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let value = |byte: u8| ALPHABET.iter().position(|known| *known == byte).unwrap_or(0) as u32;
        let bytes = text.trim_end_matches('=').as_bytes().chunks(4).flat_map(|four| {
            let word = four.iter().fold(0, |word, byte| word << 6 | value(*byte));
            let word = word << (6 * (4 - four.len()));
            word.to_be_bytes()[1..four.len()].to_vec()
        });
        bytes.collect()
    }

    #[test]
    fn a_file_that_cannot_be_written_is_named() {
        let path = Path::new("/proc/none/latency.hlog");
        let error = write(path, &latency_histogram(), SystemTime::now(), Duration::ZERO);
        assert!(error.unwrap_err().to_string().contains("--hdr /proc/none/latency.hlog"));
    }
}
