//! The wire protocol of xenstore, as specified in `io/xs_wire.h` and `docs/misc/xenstore.txt`.
//!
//! ```text
//!   0      4        8       12      16                16 + len
//!   ├ type ┼ req_id ┼ tx_id ┼ len   ┼ payload ... ────┤    words in native byte order
//! ```
//! Payloads are strings that end in zero bytes; the last one of WRITE and READ is raw bytes.

use std::fmt;

/// Maximum length of a payload, in bytes (`XENSTORE_PAYLOAD_MAX`).
pub const PAYLOAD_MAX: usize = 4096;
/// Maximum length of an absolute path, in bytes (`XENSTORE_ABS_PATH_MAX`).
pub const ABS_PATH_MAX: usize = 3072;
/// Maximum length of a relative path, in bytes (`XENSTORE_REL_PATH_MAX`).
pub const REL_PATH_MAX: usize = 2048;
/// Length of a message's header, in bytes.
pub const HEADER_LEN: usize = 16;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $value:literal,)*) => {
        /// Type of a message (`enum xsd_sockmsg_type`).
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        pub enum Kind {
            $($(#[$doc])* $name = $value,)*
        }

        impl Kind {
            /// All types.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The type with this number, if it is known.
            pub fn from_wire(value: u32) -> Option<Self> {
                match value {
                    $($value => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Number of the type.
            pub fn to_wire(self) -> u32 {
                match self {
                    $(Self::$name => $value,)*
                }
            }
        }
    };
}

kinds! {
    /// Debugging of the daemon.
    Control = 0,
    /// Lists children.
    Directory = 1,
    /// Reads a value.
    Read = 2,
    /// Gets permissions.
    GetPerms = 3,
    /// Registers a watch.
    Watch = 4,
    /// Removes a watch.
    Unwatch = 5,
    /// Begins a transaction.
    TransactionStart = 6,
    /// Commits or aborts a transaction.
    TransactionEnd = 7,
    /// Introduces a domain.
    Introduce = 8,
    /// Reports that a domain was destroyed.
    Release = 9,
    /// Gets the directory of a domain.
    GetDomainPath = 10,
    /// Writes a value.
    Write = 11,
    /// Creates a node.
    Mkdir = 12,
    /// Removes a node and its children.
    Rm = 13,
    /// Sets permissions.
    SetPerms = 14,
    /// Event of a watch.
    WatchEvent = 15,
    /// Reply to a failed request.
    Error = 16,
    /// Queries whether a domain was introduced.
    IsDomainIntroduced = 17,
    /// Resumes a domain after suspend.
    Resume = 18,
    /// Lets a domain act for another.
    SetTarget = 19,
    /// Removes all watches and aborts all transactions of the connection.
    ResetWatches = 21,
    /// Lists children in parts.
    DirectoryPart = 22,
}

macro_rules! errors {
    ($($name:ident = $text:literal,)*) => {
        /// Error of a refused request (`xsd_errors`).
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs, reason = "the names of errno.h")]
        pub enum Errno {
            $($name,)*
        }

        impl Errno {
            /// All errors.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// Name on the wire.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

errors! {
    Einval = "EINVAL",
    Eacces = "EACCES",
    Eexist = "EEXIST",
    Eisdir = "EISDIR",
    Enoent = "ENOENT",
    Enomem = "ENOMEM",
    Enospc = "ENOSPC",
    Eio = "EIO",
    Enotempty = "ENOTEMPTY",
    Enosys = "ENOSYS",
    Erofs = "EROFS",
    Ebusy = "EBUSY",
    Eagain = "EAGAIN",
    Eisconn = "EISCONN",
    E2big = "E2BIG",
    Eperm = "EPERM",
}

impl Errno {
    /// The error named by a payload; EIO if it is unknown.
    pub fn from_wire(payload: &[u8]) -> Self {
        let name = payload.strip_suffix(&[0]).unwrap_or(payload);
        Self::ALL.iter().copied().find(|e| e.name().as_bytes() == name).unwrap_or(Self::Eio)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Header of a message. `kind` is not validated: a peer may send any number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Number of the [`Kind`].
    pub kind: u32,
    /// Chosen by the sender of a request, repeated in the reply.
    pub req_id: u32,
    /// Transaction, or 0.
    pub tx_id: u32,
    /// Length of the payload, in bytes.
    pub len: u32,
}

impl Header {
    /// Encodes it for the wire.
    pub fn to_bytes(self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let words = [self.kind, self.req_id, self.tx_id, self.len];
        for (to, word) in bytes.chunks_exact_mut(4).zip(words) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    /// Decodes it from the wire; any bytes are valid.
    pub fn from_bytes(bytes: [u8; HEADER_LEN]) -> Self {
        let mut words = bytes.chunks_exact(4).map(|w| w.try_into().map_or(0, u32::from_ne_bytes));
        let mut next = || words.next().unwrap_or(0);
        Self { kind: next(), req_id: next(), tx_id: next(), len: next() }
    }
}

/// A complete message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its header.
    pub header: Header,
    /// Its payload.
    pub payload: Vec<u8>,
}

impl Message {
    /// Creates a message; `payload` is truncated to the maximum, which callers check.
    pub fn new(kind: Kind, req_id: u32, tx_id: u32, mut payload: Vec<u8>) -> Self {
        payload.truncate(PAYLOAD_MAX);
        let len = u32::try_from(payload.len()).unwrap_or(0);
        Self { header: Header { kind: kind.to_wire(), req_id, tx_id, len }, payload }
    }

    /// Its type, if it is known.
    pub fn kind(&self) -> Option<Kind> {
        Kind::from_wire(self.header.kind)
    }

    /// Appends it to `out`, encoded for the wire.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.header.to_bytes());
        out.extend_from_slice(&self.payload);
    }
}

/// A payload longer than [`PAYLOAD_MAX`]: the rest of the stream cannot be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Oversized(pub u32);

/// Decodes messages from a byte stream.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
    /// Number of bytes already decoded.
    done: usize,
}

impl Decoder {
    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.done);
        self.done = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Number of bytes not decoded yet.
    pub fn unread(&self) -> usize {
        self.bytes.len() - self.done
    }

    /// Takes the next message, if it is complete.
    ///
    /// # Errors
    /// [`Oversized`]: the connection must be closed.
    pub fn take(&mut self) -> Result<Option<Message>, Oversized> {
        let rest = &self.bytes[self.done..];
        let Some((head, rest)) = rest.split_first_chunk::<HEADER_LEN>() else { return Ok(None) };
        let header = Header::from_bytes(*head);
        let len = usize::try_from(header.len).unwrap_or(usize::MAX);
        if len > PAYLOAD_MAX {
            return Err(Oversized(header.len));
        }
        let Some(payload) = rest.get(..len) else { return Ok(None) };
        let payload = payload.to_vec();
        self.done += HEADER_LEN + len;
        Ok(Some(Message { header, payload }))
    }
}

/// The strings of a payload, each terminated by a zero byte; `None` if the last one is not.
pub fn strings(payload: &[u8]) -> Option<Vec<&[u8]>> {
    if payload.is_empty() {
        return Some(Vec::new());
    }
    Some(payload.strip_suffix(&[0])?.split(|b| *b == 0).collect())
}

/// Access of a domain to a node (`r`, `w`, `b`, `n` on the wire).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// No access.
    None,
    /// Read access.
    Read,
    /// Write access.
    Write,
    /// Read and write access.
    Both,
}

/// An entry of a node's permissions. The first entry names the owner, who has full access, and the
/// access of domains without an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Perm {
    /// The access.
    pub access: Access,
    /// The domain.
    pub domid: u16,
}

impl Perm {
    /// Creates an entry.
    pub const fn new(access: Access, domid: u16) -> Self {
        Self { access, domid }
    }

    /// Parses an entry from the wire, such as `r5`.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let (letter, domid) = text.split_first()?;
        let access = match letter {
            b'n' => Access::None,
            b'r' => Access::Read,
            b'w' => Access::Write,
            b'b' => Access::Both,
            _ => return None,
        };
        let digits = std::str::from_utf8(domid).ok()?;
        // Rust's parser also accepts a plus sign.
        let plain = digits.bytes().all(|b| b.is_ascii_digit());
        Some(Self { access, domid: digits.parse().ok().filter(|_| plain)? })
    }
}

impl fmt::Display for Perm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let letter = match self.access {
            Access::None => 'n',
            Access::Read => 'r',
            Access::Write => 'w',
            Access::Both => 'b',
        };
        write!(f, "{letter}{}", self.domid)
    }
}

impl Access {
    /// Whether it allows reading.
    pub fn reads(self) -> bool {
        matches!(self, Self::Read | Self::Both)
    }

    /// Whether it allows writing.
    pub fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Both)
    }
}

/// Whether `path` is a valid absolute path: letters, digits and `-/_@`, without empty names. Names
/// contain no dots, so there is no parent reference.
pub fn is_node(path: &[u8]) -> bool {
    let Some(rest) = path.strip_prefix(b"/") else { return false };
    let name = |part: &[u8]| {
        !part.is_empty() && part.iter().all(|b| b.is_ascii_alphanumeric() || b"-_@".contains(b))
    };
    path.len() <= ABS_PATH_MAX && (rest.is_empty() || rest.split(|b| *b == b'/').all(name))
}

/// Whether `path` is `parent` or below it.
pub fn is_under(path: &str, parent: &str) -> bool {
    if parent == "/" {
        return path.starts_with('/');
    }
    path.strip_prefix(parent).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The parent of `path`; `None` for the root.
pub fn parent(path: &str) -> Option<&str> {
    match path.rsplit_once('/')? {
        (_, "") => None,
        ("", _) => Some("/"),
        (parent, _) => Some(parent),
    }
}

#[cfg(test)]
mod tests;
