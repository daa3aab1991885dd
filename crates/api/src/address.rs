//! An address to listen at.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::inherited::inherited;

/// Address at which a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// Host and port.
    Tcp(String, u16),
    /// A Unix socket.
    Unix(PathBuf),
    /// A listening socket that the parent process passed, by name.
    Inherited(String),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let bad = || {
            format!(
                "invalid listening address '{s}': use HOST:PORT, PORT alone for 127.0.0.1, \
                 unix:PATH, or fd=NAME"
            )
        };
        if let Some(name) = inherited(s) {
            return name.map(|name| Self::Inherited(name.into()));
        }
        if let Some(path) = s.strip_prefix("unix:") {
            return if path.is_empty() { Err(bad()) } else { Ok(Self::Unix(path.into())) };
        }
        let (host, port) = s.rsplit_once(':').unwrap_or(("", s));
        let port = port.parse().map_err(|_| bad())?;
        let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(host) => host,
            // An IPv6 address without brackets is ambiguous.
            None if host.contains([':', '[', ']', '/']) => return Err(bad()),
            None if host.is_empty() => "127.0.0.1",
            None => host,
        };
        Ok(Self::Tcp(host.into(), port))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Inherited(name) => write!(f, "fd={name}"),
        }
    }
}
