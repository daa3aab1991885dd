//! Datagram sockets as the queues of a port: one frame a datagram, as QEMU's `-netdev dgram`.
//!
//! A port has two sockets: one with its name, from which it reads what anybody sends who may write
//! to it, and one connected to its peer's name. If both were one, the peer could not send after a
//! restart, as the kernel takes datagrams from the connected socket only.

mod egress;
mod ingress;
mod sys;

pub use self::egress::DgramEgress;
pub use self::ingress::DgramIngress;

/// Most datagrams of one system call.
const BATCH: usize = 64;

#[cfg(test)]
mod tests;
