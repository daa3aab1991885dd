//! Connection to the control socket of a switch. It is kept open, so that a request starts no
//! process that would disturb a measurement.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

/// Longest wait for a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to a control socket.
#[derive(Debug)]
pub struct Control(BufReader<UnixStream>);

impl Control {
    /// Connects to an existing socket.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(REPLY_TIMEOUT))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Sends request `cmd` with the fields of `fields`; returns the reply, or the error in it.
    pub fn ask(&mut self, cmd: &str, fields: Value) -> Result<Value, String> {
        let mut request = json!({ "cmd": cmd });
        if let (Some(all), Value::Object(fields)) = (request.as_object_mut(), fields) {
            all.extend(fields);
        }
        let mut line = String::new();
        let sent = self.0.get_mut().write_all(format!("{request}\n").as_bytes());
        sent.and_then(|()| self.0.read_line(&mut line)).map_err(|e| format!("{cmd}: {e}"))?;
        let reply: Value = serde_json::from_str(&line).map_err(|e| format!("{cmd}: {e}"))?;
        match reply["ok"].as_bool() {
            Some(true) => Ok(reply),
            _ => Err(format!("{cmd}: {}", reply["error"].as_str().unwrap_or("no reason given"))),
        }
    }
}
