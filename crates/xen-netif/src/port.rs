//! The rings of a vif as ports of the switch (`io/netif.h`).
//!
//! [`XenIngress`] is the back half of a tx ring, [`XenEgress`] that of an rx ring. A guest's frames
//! are in pages that it granted, and are copied once, by one call per burst, directly to the
//! receiver: `shm::Copies` collects, the hypervisor copies. Pages with a static grant are mapped,
//! and used like any memory.
//!
//! Both exist before and after the guest is connected: the control thread *activates* them with a
//! ring and *deactivates* them, under their lock, between two bursts. State shared by the queues of
//! one vif is in a [`Vif`].
//!
//! A guest that [configured a hash](hash) receives each frame on the queue given by its table, and
//! its hash, from the burst after the configuration. Cross-connected ports, which do not read
//! headers, do neither.
//!
//! A front half that posts no pages does not affect other ports, by the switch's rules for any
//! receiver. These replace two timers of the kernel's netback:
//!
//! | | netback | here |
//! |---|---|---|
//! | frames held for it | 512 KiB of frames | some of each sender's, in its own ring |
//! | they are dropped (*drain*) | after 10 s | after 50 ms if it took none, else 1 s |
//! | without `feature-rx-notify` | after 30 ms | the same; its ring is polled meanwhile |
//! | new ones are dropped (*stall*) | after 60 s, by carrier off | from the first drop on |
//! | this ends | when it has posted enough pages | with the first frame that fits |
//! | reported to operators | by that, and in the log | after 60 s, in the log and by `ctl show` |
//! | without `feature-rx-notify` | never | never: its ring would have to be watched for the end |
//!
//! The kernel disables the carrier of its own interface, so that a bridge sends nothing to it; the
//! front half is not notified. Here this is not needed: posted pages are checked for each frame.
//!
//! Not supported: page flipping, XDP headroom, GSO prefix. The hash that a guest sends with a frame
//! is validated but not forwarded: the receiver's own table determines its hash.

pub mod control;
mod egress;
pub mod hash;
mod ingress;
mod offload;
mod pages;
mod vif;

pub use crate::host::Event;
pub use egress::XenEgress;
pub use ingress::XenIngress;
pub use pages::PageMapper;
pub use vif::{Rate, Vif};

use std::sync::Arc;

use ring::xen::{Malformed, SmartPoll};
use shm::Domain;
use switch::port::Fault;
use switch::vnet::Offloads;

use self::control::Orders;

/// Features of a front half; all absent by default, as without keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// `feature-sg`: frames in several slots.
    pub sg: bool,
    /// `feature-gso-tcpv4`.
    pub gso4: bool,
    /// `feature-gso-tcpv6`.
    pub gso6: bool,
    /// Not `feature-no-csum-offload`: partial checksums over IPv4.
    pub csum4: bool,
    /// `feature-ipv6-csum-offload`: over IPv6.
    pub csum6: bool,
    /// `feature-rx-notify`: it sends an event when it has posted pages.
    pub rx_notify: bool,
}

impl Peer {
    /// The features as offloads. These have no value for partial checksums over IPv6 only; such a
    /// guest gets none.
    fn offloads(&self) -> Offloads {
        Offloads {
            csum: self.csum4,
            csum_v4_only: !self.csum6,
            tso4: self.sg && self.gso4,
            tso6: self.sg && self.gso6,
            // No extra info says that CWR is only for the first segment.
            ..Offloads::default()
        }
    }
}

/// Resources that a ring is used with.
#[derive(Clone)]
pub struct Wiring {
    /// Its event channel.
    pub channel: Arc<dyn Event>,
    /// The domain whose grants its slots name.
    pub domain: Arc<Domain>,
    /// Features of the front half.
    pub peer: Peer,
    /// The flag in the rx ring's page, if both ends support `feature-smart-poll`.
    pub smart_poll: Option<Arc<SmartPoll>>,
    /// State shared by the queues of the vif.
    pub vif: Arc<Vif>,
    /// Settings made over the control ring; never any if the guest has none.
    pub orders: Arc<Orders>,
    /// The number of its queue.
    pub queue: usize,
}

impl Wiring {
    /// Notifies the front half of published responses: if `needed` or, with smart poll, if it does
    /// not poll. Returns the number of notifications. `responses`: whether there are any.
    fn notify(&self, responses: bool, needed: bool) -> u64 {
        let notify = self.smart_poll.as_ref().map_or(needed, |smart| responses && smart.claim());
        if notify {
            self.channel.notify();
        }
        u64::from(notify)
    }
}

fn fault(malformed: Malformed) -> Fault {
    Fault(malformed.to_string())
}

/// A port's queue pair; it exists without a guest, too.
pub type Pair = switch::pair::Pair<XenIngress, XenEgress>;

/// Returns when neither queue of `pair` uses a static grant that its guest has removed: waits for
/// bursts in progress.
pub fn release_grants(pair: &Pair) {
    pair.ingress.lock().release_grants();
    pair.egress.lock().release_grants();
}

#[cfg(test)]
mod tests;
