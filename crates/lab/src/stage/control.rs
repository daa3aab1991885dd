//! The control socket of a switch, kept open: no process is started for a question, so that
//! nobody who is measured is disturbed.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

/// Longest wait for an answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// A connection.
#[derive(Debug)]
pub struct Control(BufReader<UnixStream>);

impl Control {
    /// Connects to a socket that is there.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// The answer to `cmd`, which must be a good one; `more` holds its other fields.
    pub fn ask(&mut self, cmd: &str, more: Value) -> Result<Value, String> {
        let mut request = json!({ "cmd": cmd });
        if let (Some(all), Value::Object(more)) = (request.as_object_mut(), more) {
            all.extend(more);
        }
        let mut line = String::new();
        let answer = self.0.get_mut().write_all(format!("{request}\n").as_bytes());
        answer.and_then(|()| self.0.read_line(&mut line)).map_err(|e| format!("{cmd}: {e}"))?;
        let answer: Value = serde_json::from_str(&line).map_err(|e| format!("{cmd}: {e}"))?;
        match answer["ok"].as_bool() {
            Some(true) => Ok(answer),
            _ => Err(format!("{cmd}: {}", answer["error"].as_str().unwrap_or("no reason given"))),
        }
    }
}
