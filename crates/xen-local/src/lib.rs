//! A vif without Xen: both halves on this machine, as separate processes, for tests and the lab.
//!
//! [`Back`] and [`Front`] are hosts of `xen-netif`, an alternative to real Xen: grants are in
//! memfds, event channels are pairs of eventfds, and [`store`] is a xenstore.
//!
//! ```text
//!   DIR/xenstored    the real wire protocol; clients act for domain 1
//!   DIR/hypervisor   the front end sends its memory and its grant table, and gets channels
//! ```
//! A DIR is one vif, between domain 0 (which creates the sockets) and domain 1, device 0. The host
//! acts as the toolstack: it creates both directories when a front end connects, and removes them
//! when it has disconnected and the back half has closed (at most ten seconds later).
//!
//! The grant table has Xen's version 1 entries, `{flags u16, domid u16, frame u32}`; frames are
//! pages of the memory. The back end loads an entry once, and checks that copy.
//!
//! Not supported: revoking a grant while it is mapped. The page stays mapped; it is the front end's
//! own memory.

#![forbid(unsafe_code)]

mod back;
mod error;
mod front;
mod grants;
pub mod store;
#[cfg(test)]
mod tests;

pub use back::{Back, BackState};
pub use error::Error;
pub use front::Front;

/// The two sockets in a directory.
const STORE: &str = "xenstored";
const HYPERVISOR: &str = "hypervisor";

/// Domains of the back end and of the front end.
const BACK: u16 = 0;
const FRONT: u16 = 1;

/// `GTF_permit_access` and `GTF_readonly`.
const GTF_PERMIT_ACCESS: u16 = 1;
const GTF_READONLY: u16 = 4;
/// References that a front end does not use, as `GNTTAB_NR_RESERVED_ENTRIES`.
const GREF_RESERVED: u32 = 8;
/// Size of a table entry, in bytes.
const ENTRY: usize = 8;
/// Maximum number of pages of a front end: 1 GiB.
const PAGES_MAX: u32 = 1 << 18;
/// Maximum number of descriptors per message.
const FDS_MAX: usize = 4;
/// Maximum number of channels at a time.
const PORTS_MAX: usize = 256;

/// A message over the hypervisor's socket: four words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Message {
    what: u32,
    a: u32,
    b: u32,
}

/// From the front end, with its memory and its table: version, pages.
const HELLO: u32 = 1;
/// Reply: the front end's domain.
const WELCOME: u32 = 2;
/// From the front end: allocate a port. Reply: its number, and descriptors to read and to write.
const PORT: u32 = 3;
/// From the front end: a port was closed.
const CLOSE: u32 = 4;
/// From the back end: another process continues after the last one was killed. It has the front
/// end's domain, if there is one; a request without a reply is to be sent again.
const RESUMED: u32 = 5;
/// Version of this protocol.
const VERSION: u32 = 1;

impl Message {
    fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        for (to, word) in bytes.chunks_exact_mut(4).zip([self.what, self.a, self.b]) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// `None` if the message is invalid.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; 16] = bytes.try_into().ok()?;
        let word = |at: usize| bytes[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
        Some(Self { what: word(0), a: word(4), b: word(8) })
    }
}
