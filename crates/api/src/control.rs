//! The control socket: one JSON object a line, each way, over a Unix stream socket.
//!
//! ```text
//!   → {"cmd":"stats"}                         ← {"ok":true, ...}
//!   → {"cmd":"add-port","port":"b=null"}      ← {"ok":false,"error":"..."}
//! ```
//! `capture` answers with one such line and then the pcapng stream itself.
//!
//! A switch answers all of it, and a guest of ours a part.

use std::fmt::Display;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// What can be asked.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "kebab-case")]
pub enum Request {
    /// Ports, their state and what was negotiated.
    Show,
    /// All counters.
    Stats,
    /// Adds a port, as `--port` does.
    AddPort {
        /// `NAME=KIND:ARG[,key=value]...`
        port: String,
    },
    /// Removes a port.
    DelPort {
        /// Its name.
        name: String,
    },
    /// Lists the addresses known.
    Fdb,
    /// Sets a static address.
    FdbAdd {
        /// `02:00:00:00:00:01`
        mac: String,
        /// Port name.
        port: String,
        /// VLAN id, 0 for untagged.
        #[serde(default)]
        vlan: u16,
    },
    /// Removes an address.
    FdbDel {
        /// `02:00:00:00:00:01`
        mac: String,
        /// VLAN id, 0 for untagged.
        #[serde(default)]
        vlan: u16,
    },
    /// Copies a port's frames to this connection as pcapng.
    Capture {
        /// Port name.
        port: String,
    },
    /// Changes settings while traffic flows.
    Set {
        /// Port, or `PORT/QUEUE`; none: of the whole switch.
        #[serde(default)]
        target: Option<String>,
        /// `KEY=VALUE` each.
        settings: Vec<String>,
    },
    /// Takes no more frames from a port, or takes them again. Answered at once; to be asked again
    /// until the port is drained.
    Drain {
        /// Its name.
        name: String,
        /// Take them again.
        #[serde(default)]
        off: bool,
    },
    /// Stops the switch.
    Shutdown,
}

impl Request {
    /// Its name on the wire.
    pub fn name(&self) -> String {
        let value = serde_json::to_value(self).unwrap_or_default();
        value["cmd"].as_str().unwrap_or_default().into()
    }
}

/// Longest request.
pub const REQUEST_MAX: usize = 4096;

/// What a client sent.
pub enum Heard {
    /// A request.
    Request(Request),
    /// A line that is none, and why; it may ask on.
    Unknown(String),
    /// What cannot be a line.
    Garbage,
    /// Nothing yet.
    Nothing,
    /// It is gone.
    End,
}

/// Takes one line from a client that does not block.
pub fn hear(client: &mut BufReader<UnixStream>) -> Heard {
    match client.fill_buf() {
        Ok([]) => Heard::End,
        Ok(buffered) => match buffered.iter().position(|b| *b == b'\n') {
            Some(end) => {
                let request = serde_json::from_slice(&buffered[..end]);
                client.consume(end + 1);
                let unknown = |error| Heard::Unknown(format!("unknown request: {error}"));
                request.map_or_else(unknown, Heard::Request)
            }
            // Half a line is not worth waiting for: requests are far shorter than a packet.
            None => Heard::Garbage,
        },
        Err(error) if error.kind() == ErrorKind::WouldBlock => Heard::Nothing,
        Err(_) => Heard::End,
    }
}

/// The answer to what was done, or was not and why.
pub fn answered<E: Display>(result: Result<Value, E>) -> Value {
    match result {
        Ok(mut value) => {
            value["ok"] = true.into();
            value
        }
        Err(error) => failure(&error.to_string()),
    }
}

/// The answer that says what is wrong.
pub fn failure(error: &str) -> Value {
    json!({ "ok": false, "error": error })
}

/// [`Heard::Garbage`] is answered with it.
pub const GARBAGE: &str = "request is not one line of JSON";

/// An answer as it goes out.
pub fn line(answer: &Value) -> Vec<u8> {
    let mut line = answer.to_string();
    line.push('\n');
    line.into_bytes()
}

/// Writes an answer as far as the stream lets us.
pub fn write(mut client: &UnixStream, answer: &Value) -> std::io::Result<()> {
    client.write_all(&line(answer))
}

/// Where the socket is unless it is given: in a directory that only its user can write to.
///
/// # Errors
/// There is none. In a directory of everybody's, somebody else could take the name first.
pub fn default_path() -> Result<PathBuf, ControlError> {
    if let Some(dir) = std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()) {
        return Ok(Path::new(&dir).join("pvswitch.sock"));
    }
    if rustix::process::geteuid().is_root() {
        return Ok("/run/pvswitch.sock".into());
    }
    Err(ControlError::NoDefault)
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// No switch listens.
    #[error(
        "cannot reach a switch at {path}: {error}; is `pvswitch run` running, with this --control?"
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// Neither given nor to be guessed.
    #[error(
        "no control socket is given and XDG_RUNTIME_DIR is not set; give --control PATH, in a \
         directory that only you can write to"
    )]
    NoDefault,
    /// Somebody else's.
    #[error(
        "{path} is served by user {uid}, neither you nor root: refused; if that is your switch, \
         run this as that user"
    )]
    NotOurs {
        /// The socket.
        path: PathBuf,
        /// Whose process listens there.
        uid: u32,
    },
    /// The connection broke.
    #[error("the switch did not answer: {0}")]
    Io(#[from] std::io::Error),
    /// The answer makes no sense.
    #[error("the switch's answer is not JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The switch said no.
    #[error("{0}")]
    Refused(String),
}

/// A socket that somebody else made under the name of ours could answer anything. Root may ask any
/// user's switch.
fn check_owner(path: &Path, stream: &UnixStream) -> Result<(), ControlError> {
    let own = rustix::process::geteuid();
    let peer = rustix::net::sockopt::socket_peercred(stream).map_err(std::io::Error::from)?.uid;
    if own.is_root() || peer == own || peer.is_root() {
        return Ok(());
    }
    Err(ControlError::NotOurs { path: path.into(), uid: peer.as_raw() })
}

/// Sends one request; returns the answer, and the connection behind it.
pub fn call(
    path: &Path,
    request: &Request,
) -> Result<(Value, BufReader<UnixStream>), ControlError> {
    let stream = UnixStream::connect(path)
        .map_err(|error| ControlError::Connect { path: path.into(), error })?;
    check_owner(path, &stream)?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let mut line = serde_json::to_string(request)?;
    line.push('\n');
    (&stream).write_all(line.as_bytes())?;
    let mut reader = BufReader::new(stream);
    let mut answer = String::new();
    reader.read_line(&mut answer)?;
    let answer: Value = serde_json::from_str(&answer)?;
    if answer["ok"] == Value::Bool(true) {
        return Ok((answer, reader));
    }
    let error = answer["error"].as_str().unwrap_or("no reason given");
    Err(ControlError::Refused(error.into()))
}
