//! The control socket: one JSON object per line, each way, over a Unix stream socket.
//!
//! ```text
//!   → {"cmd":"stats"}                         ← {"ok":true, ...}
//!   → {"cmd":"add-port","port":"b=null"}      ← {"ok":false,"error":"..."}
//! ```
//! The reply to `capture` is one such line and then the pcapng stream.
//!
//! The switch supports all requests, `nic` and `gen` some of them.

use std::fmt::Display;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// A request.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "cmd", rename_all = "kebab-case")]
pub enum Request {
    /// Returns ports, their state and negotiated features.
    Show,
    /// Returns all counters.
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
    /// Lists known addresses.
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
    /// Changes settings at run time.
    Set {
        /// Port, or `PORT/QUEUE`; none: the whole switch.
        #[serde(default)]
        target: Option<String>,
        /// `KEY=VALUE` each.
        settings: Vec<String>,
    },
    /// Stops or resumes taking frames from a port. The reply is immediate; repeat the request
    /// until the port is drained.
    Drain {
        /// Its name.
        name: String,
        /// Resume.
        #[serde(default)]
        off: bool,
    },
    /// Reads the configuration file again and applies what differs.
    Reload {
        /// Only reports what differs.
        #[serde(default)]
        dry_run: bool,
    },
    /// Returns the running configuration as a file.
    Config,
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

/// Result of reading from a client.
pub enum Received {
    /// A request.
    Request(Request),
    /// A line that is not a request, and why; the client may continue.
    Unknown(String),
    /// Not a line; reply with [`MALFORMED`] and close.
    Malformed,
    /// Nothing yet.
    Nothing,
    /// The client closed the connection.
    Closed,
}

/// Reads one line from a nonblocking client.
pub fn receive(client: &mut BufReader<UnixStream>) -> Received {
    match client.fill_buf() {
        Ok([]) => Received::Closed,
        Ok(buffered) => match buffered.iter().position(|b| *b == b'\n') {
            Some(end) => {
                let request = serde_json::from_slice(&buffered[..end]);
                client.consume(end + 1);
                let unknown = |error| Received::Unknown(format!("unknown request: {error}"));
                request.map_or_else(unknown, Received::Request)
            }
            // Partial lines are not awaited: a request is far shorter than one write.
            None => Received::Malformed,
        },
        Err(error) if error.kind() == ErrorKind::WouldBlock => Received::Nothing,
        Err(_) => Received::Closed,
    }
}

/// The reply for a result.
pub fn reply<E: Display>(result: Result<Value, E>) -> Value {
    match result {
        Ok(mut value) => {
            value["ok"] = true.into();
            value
        }
        Err(error) => failure(&error.to_string()),
    }
}

/// The reply for an error.
pub fn failure(error: &str) -> Value {
    json!({ "ok": false, "error": error })
}

/// Error text for [`Received::Malformed`].
pub const MALFORMED: &str = "request is not one line of JSON";

/// A reply as bytes of the stream.
pub fn line(reply: &Value) -> Vec<u8> {
    let mut line = reply.to_string();
    line.push('\n');
    line.into_bytes()
}

/// Writes a reply.
///
/// # Errors
/// The stream does not accept all of it.
pub fn write(mut client: &UnixStream, reply: &Value) -> std::io::Result<()> {
    client.write_all(&line(reply))
}

/// Default path of the socket: in a directory that only its user can write to.
///
/// # Errors
/// There is no such directory. In a shared one, another user could create the socket first.
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
    /// No path is given, and there is no default.
    #[error(
        "no control socket is given and XDG_RUNTIME_DIR is not set; give --control PATH, in a \
         directory that only you can write to"
    )]
    NoDefault,
    /// The socket belongs to another user.
    #[error(
        "{path} is served by user {uid}, neither you nor root: refused; if that is your switch, \
         run this as that user"
    )]
    NotOurs {
        /// The socket.
        path: PathBuf,
        /// User of the process that listens there.
        uid: u32,
    },
    /// The connection failed.
    #[error("the switch did not answer: {0}")]
    Io(#[from] std::io::Error),
    /// The reply is malformed.
    #[error("the switch's answer is not JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The switch refused the request.
    #[error("{0}")]
    Refused(String),
}

/// Refuses a socket of another user, whose replies cannot be trusted. Root may use any user's
/// switch.
fn check_owner(path: &Path, stream: &UnixStream) -> Result<(), ControlError> {
    let own = rustix::process::geteuid();
    let peer = rustix::net::sockopt::socket_peercred(stream).map_err(std::io::Error::from)?.uid;
    if own.is_root() || peer == own || peer.is_root() {
        return Ok(());
    }
    Err(ControlError::NotOurs { path: path.into(), uid: peer.as_raw() })
}

/// Sends one request; returns the reply, and the connection.
///
/// # Errors
/// There is no switch, or it refused the request.
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
    let mut reply = String::new();
    reader.read_line(&mut reply)?;
    let reply: Value = serde_json::from_str(&reply)?;
    if reply["ok"] == Value::Bool(true) {
        return Ok((reply, reader));
    }
    let error = reply["error"].as_str().unwrap_or("no reason given");
    Err(ControlError::Refused(error.into()))
}
