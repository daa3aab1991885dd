//! The log: lines for people, JSON, or journald's fields; the same events and names in each.
//!
//! ```text
//!   human     2026-01-31T12:00:00.000000Z  INFO port vm1: up
//!   json      {"time":"2026-01-31T12:00:00.000000Z","level":"INFO","port":"vm1","message":"up"}
//!   journald  PRIORITY=6, SYSLOG_IDENTIFIER=pvswitch, PORT=vm1, MESSAGE=port vm1: up
//! ```

use std::fmt::{self, Write as _};
use std::io::{self, IsTerminal};
use std::os::unix::net::UnixDatagram;
use std::path::Path;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

/// journald's socket for its native protocol (systemd.journal-fields(7), sd_journal_send(3)).
const JOURNAL: &str = "/run/systemd/journal/socket";
/// Longest value of a field, in bytes; a datagram has to fit the socket's buffer.
const VALUE_MAX: usize = 8192;

/// Form of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Lines for people, on standard error.
    #[default]
    Human,
    /// One JSON object per line, on standard error.
    Json,
    /// journald's fields, sent to journald.
    Journald,
}

impl Format {
    /// The form of this name.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "human" => Some(Self::Human),
            "json" => Some(Self::Json),
            "journald" => Some(Self::Journald),
            _ => None,
        }
    }
}

/// Starts the log of this process.
///
/// # Errors
/// journald cannot be reached.
pub fn init(format: Format) -> io::Result<()> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // An error of the log itself cannot be reported.
        .log_internal_errors(false)
        .with_ansi(format == Format::Human && io::stderr().is_terminal())
        .event_format(format);
    match format {
        Format::Human | Format::Json => log.with_writer(io::stderr).init(),
        Format::Journald => {
            let journal = Journal::connect(JOURNAL.as_ref())?;
            log.with_writer(journal).init();
        }
    }
    Ok(())
}

/// An event: its message, and its fields in the order given.
#[derive(Default)]
struct Record {
    message: String,
    fields: Vec<(&'static str, String)>,
}

impl Visit for Record {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = clean(&format!("{value:?}"));
        match field.name() {
            "message" => self.message = text,
            name => self.fields.push((name, text)),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}

/// Text on one line, without control characters: some of it comes from guests.
fn clean(text: &str) -> String {
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        if clean.len() >= VALUE_MAX {
            break;
        }
        match c.is_control() {
            true => clean.extend(c.escape_default()),
            false => clean.push(c),
        }
    }
    clean
}

impl Record {
    fn of(event: &Event<'_>) -> Self {
        let mut record = Self::default();
        event.record(&mut record);
        record
    }

    /// For people: the port first, other fields last.
    fn text(&self) -> String {
        let mut text = String::new();
        for (_, port) in self.fields.iter().filter(|(name, _)| *name == "port") {
            let _ = write!(text, "port {port}: ");
        }
        text += &self.message;
        for (name, value) in self.fields.iter().filter(|(name, _)| *name != "port") {
            let _ = write!(text, " {name}={value}");
        }
        text
    }

    fn json(&self, time: &str, level: Level) -> String {
        let head = [("time", time), ("level", level.as_str())].into_iter();
        let fields = self.fields.iter().map(|(name, value)| (*name, value.as_str()));
        let all = head.chain(fields).chain([("message", self.message.as_str())]);
        let all = all.map(|(name, value)| (name.to_string(), Value::from(value)));
        Value::Object(all.collect::<Map<_, _>>()).to_string()
    }

    /// A datagram of journald's native protocol: a line for each field. Names are upper case.
    fn journal(&self, level: Level) -> String {
        let priority = match level {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        };
        let mut text = format!("PRIORITY={priority}\nSYSLOG_IDENTIFIER=pvswitch\n");
        for (name, value) in &self.fields {
            let _ = writeln!(text, "{}={value}", name.to_uppercase());
        }
        let _ = writeln!(text, "MESSAGE={}", self.text());
        text
    }
}

fn colour(level: Level) -> u8 {
    match level {
        Level::ERROR => 31,
        Level::WARN => 33,
        Level::INFO => 32,
        _ => 34,
    }
}

impl<S, N> FormatEvent<S, N> for Format
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut out: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let (record, level) = (Record::of(event), *event.metadata().level());
        let mut time = String::new();
        SystemTime.format_time(&mut Writer::new(&mut time))?;
        match self {
            Self::Human if out.has_ansi_escapes() => {
                let colour = colour(level);
                writeln!(
                    out,
                    "\x1b[2m{time}\x1b[0m \x1b[{colour}m{level:>5}\x1b[0m {}",
                    record.text()
                )
            }
            Self::Human => writeln!(out, "{time} {level:>5} {}", record.text()),
            Self::Json => writeln!(out, "{}", record.json(&time, level)),
            Self::Journald => out.write_str(&record.journal(level)),
        }
    }
}

/// A connection to journald. Each event is one write, and one datagram.
struct Journal(UnixDatagram);

impl Journal {
    fn connect(path: &Path) -> io::Result<Self> {
        let socket = UnixDatagram::unbound()?;
        let error = |error| {
            let path = path.display();
            io::Error::other(format!(
                "no log: cannot connect to journald at {path}: {error}; use --log-format human \
                 or json"
            ))
        };
        socket.connect(path).map_err(error)?;
        // A journald that hangs loses lines, and does not stop the switch.
        socket.set_nonblocking(true)?;
        Ok(Self(socket))
    }
}

impl io::Write for &Journal {
    fn write(&mut self, datagram: &[u8]) -> io::Result<usize> {
        let _ = self.0.send(datagram);
        Ok(datagram.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Journal {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// What the same three events are in a format.
    fn logged(format: Format, ansi: bool) -> String {
        let lines = Lines::default();
        let writer = lines.clone();
        let log = tracing_subscriber::fmt()
            .with_ansi(ansi)
            .event_format(format)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(log, || {
            let (port, error) = ("vm1", "line\nwith \x1b[31mcolours \"quoted\"");
            tracing::info!(port, "up");
            tracing::warn!(port, queue = 2, "its guest said: {error}");
            tracing::error!("stopping");
        });
        let text = lines.0.lock().unwrap().clone();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn lines_for_people_begin_with_the_port() {
        let text = logged(Format::Human, false);
        let lines: Vec<_> = text.lines().map(|line| line.split_once("Z ").unwrap().1).collect();
        let want = [
            " INFO port vm1: up",
            r#" WARN port vm1: its guest said: line\nwith \u{1b}[31mcolours "quoted" queue=2"#,
            "ERROR stopping",
        ];
        assert_eq!(lines, want);
        let coloured = logged(Format::Human, true);
        assert!(coloured.contains("\x1b[33m WARN\x1b[0m port vm1: its guest"), "{coloured}");
    }

    #[test]
    fn json_has_one_object_per_line_with_the_same_names() {
        let text = logged(Format::Json, false);
        let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        assert_eq!(lines.len(), 3, "{text}");
        let words = ["level", "port", "message"].map(|key| lines[0][key].as_str().unwrap());
        assert_eq!(words, ["INFO", "vm1", "up"]);
        let time = lines[0]["time"].as_str().unwrap();
        assert!(time.len() == 27 && time.ends_with('Z'), "{time}");
        assert_eq!((&lines[1]["queue"], lines[2].get("port")), (&"2".into(), None));
    }

    #[test]
    fn journald_gets_priorities_and_a_field_for_each_name() {
        let text = logged(Format::Journald, false);
        let want = "PRIORITY=6\nSYSLOG_IDENTIFIER=pvswitch\nPORT=vm1\nMESSAGE=port vm1: up\n";
        assert!(text.starts_with(want), "{text}");
        assert!(text.contains("PRIORITY=4\nSYSLOG_IDENTIFIER=pvswitch\nPORT=vm1\nQUEUE=2\n"));
        assert!(text.ends_with("PRIORITY=3\nSYSLOG_IDENTIFIER=pvswitch\nMESSAGE=stopping\n"));
    }

    #[test]
    fn long_values_are_cut_and_a_missing_journald_is_an_error() {
        assert_eq!(clean(&"x".repeat(VALUE_MAX + 10)).len(), VALUE_MAX);
        let error = Journal::connect("/nonexistent/socket".as_ref()).err().unwrap().to_string();
        assert!(error.contains("cannot connect to journald at /nonexistent/socket"), "{error}");
        assert!(error.contains("--log-format human or json"), "{error}");
    }
}
