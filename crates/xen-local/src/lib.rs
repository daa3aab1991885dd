//! A vif without Xen: both halves on this machine, as separate processes, for tests and the lab.
//!
//! [`Back`] and [`Front`] are hosts of `xen-netif`, beside real Xen: grants lie in memfds, event
//! channels are pairs of eventfds, and [`store`] is a xenstore.
//!
//! ```text
//!   DIR/xenstored    the real wire protocol; who connects there acts for domain 1
//!   DIR/hypervisor   the front end hands over its memory and its grant table, and gets channels
//! ```
//! One DIR is one vif, between domain 0 (who makes the sockets) and domain 1, device 0. The host
//! plays the toolstack: it writes both directories when a front end comes, and removes them when
//! it goes and the back half has closed (or ten seconds later).
//!
//! The grant table has the entries of Xen's version 1, `{flags u16, domid u16, frame u32}`; frames
//! count pages of the memory. The back end reads an entry in one piece, and checks that one.
//!
//! What it does not do: a front end that revokes a grant while it is mapped is not held back; it
//! is its own memory, and stays mapped.

#![forbid(unsafe_code)]

mod back;
mod error;
mod front;
mod grants;
pub mod store;
#[cfg(test)]
mod tests;

pub use back::Back;
pub use error::Error;
pub use front::Front;

/// The two sockets in a directory.
const STORE: &str = "xenstored";
const HYPERVISOR: &str = "hypervisor";

/// Domain of the back end, and of the front end.
const BACK: u16 = 0;
const FRONT: u16 = 1;

/// `GTF_permit_access` and `GTF_readonly`.
const GTF_PERMIT_ACCESS: u16 = 1;
const GTF_READONLY: u16 = 4;
/// References that a front end does not use, as `GNTTAB_NR_RESERVED_ENTRIES`.
const GREF_RESERVED: u32 = 8;
/// Size of a table entry, in bytes.
const ENTRY: usize = 8;
/// Most pages a front end may bring: 1 GiB.
const PAGES_MAX: u32 = 1 << 18;
/// Most descriptors of one message.
const FDS_MAX: usize = 4;
/// Most channels at a time.
const PORTS_MAX: usize = 256;

/// A message over the hypervisor's socket: four words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Message {
    what: u32,
    a: u32,
    b: u32,
}

/// Front end, with its memory and its table: version, pages.
const HELLO: u32 = 1;
/// Answer: the front end's domain.
const WELCOME: u32 = 2;
/// Front end: a port, please. Answer: its number, with what to read and what to write.
const PORT: u32 = 3;
/// Front end: a port is closed.
const CLOSE: u32 = 4;
/// Of this protocol.
const VERSION: u32 = 1;

impl Message {
    fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        for (to, word) in bytes.chunks_exact_mut(4).zip([self.what, self.a, self.b]) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// `None` for what is no message.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; 16] = bytes.try_into().ok()?;
        let word = |at: usize| bytes[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
        Some(Self { what: word(0), a: word(4), b: word(8) })
    }
}
