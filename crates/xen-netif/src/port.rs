//! The rings of a vif as ports of the switch (`io/netif.h`).
//!
//! [`XenIngress`] is the back half of a tx ring, [`XenEgress`] that of an rx ring. What a guest
//! sends lies in pages it granted, and is copied once, by one call for a burst, straight to where
//! the receiver wants it: `shm::Copies` gathers, the hypervisor copies. Pages that a guest has
//! mapped for good, as static grants, are memory as any.
//!
//! Both stay in place while the guest comes and goes: they are *activated* with a ring and
//! *deactivated* again under their lock, by the control thread, between two bursts. What the queues
//! of one vif share, they share in a [`Vif`].
//!
//! A guest that [chose a hash](hash) gets each frame on the queue that its table says, from the
//! burst after the one that learned of it, and the hash with it; cross-connected ports, where no
//! one looks at frames, do neither.
//!
//! A front half that offers no pages costs others nothing, by the switch's own rules for any
//! receiver, which do what the kernel's netback has two timers for:
//!
//! | | netback | here |
//! |---|---|---|
//! | what waits for it | 512 KiB of frames | some of each sender's, in its own ring |
//! | those are dropped (*drain*) | after 10 s | after 50 ms if it took none, else 1 s |
//! | without `feature-rx-notify` | after 30 ms | the same; its ring is looked at meanwhile |
//! | new ones are dropped (*stall*) | after 60 s, by carrier off | from the first drop on |
//! | that ends | when it has offered enough pages | with the first frame that fits |
//! | an operator is told | by that, and in the log | after 60 s, in the log and by `ctl show` |
//! | without `feature-rx-notify` | never | never: its ring would have to be watched for the end |
//!
//! The kernel takes the carrier off its own interface, so that a bridge sends nothing there; no
//! front half is told. Here nothing has to be: the pages are looked at for each frame.
//!
//! What it does not do: no page flipping, no XDP headroom, no GSO prefix. The hash that a guest
//! sends with a frame is checked and not passed on: the receiver's own table says what it gets.

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

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ring::xen::{Malformed, SmartPoll};
use shm::Domain;
use switch::port::Fault;
use switch::vnet::Offloads;

use self::control::Orders;

/// What a front half takes; all absent by default, as where it wrote no key.
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
    /// `feature-rx-notify`: it notifies when it has offered pages.
    pub rx_notify: bool,
}

impl Peer {
    /// The same in the switch's words. Those know no one who takes partial checksums over IPv6
    /// alone; such a one gets none.
    fn takes(&self) -> Offloads {
        Offloads {
            csum: self.csum4,
            csum_v4_only: !self.csum6,
            tso4: self.sg && self.gso4,
            tso6: self.sg && self.gso6,
            // No extra info says that CWR is for the first segment alone.
            ..Offloads::default()
        }
    }
}

/// What a ring is used with.
#[derive(Clone)]
pub struct Wiring {
    /// Its event channel.
    pub channel: Arc<dyn Event>,
    /// Whose grants its slots name.
    pub domain: Arc<Domain>,
    /// What the front half takes.
    pub peer: Peer,
    /// The flag of the rx ring's page, where `feature-smart-poll` was agreed on.
    pub smart_poll: Option<Arc<SmartPoll>>,
    /// What its queues share.
    pub vif: Arc<Vif>,
    /// What the guest ordered over its control ring; of a guest without one, nothing ever.
    pub orders: Arc<Orders>,
    /// The number of its queue.
    pub queue: usize,
}

impl Wiring {
    /// Tells the front half of `answers` that were published: if `needed` or, with smart poll, if
    /// it does not poll. Returns how many notifications that made.
    fn tell(&self, answers: bool, needed: bool) -> u64 {
        let tell = self.smart_poll.as_ref().map_or(needed, |smart| answers && smart.claim());
        if tell {
            self.channel.notify();
        }
        u64::from(tell)
    }
}

fn fault(malformed: Malformed) -> Fault {
    Fault(malformed.to_string())
}

/// The queues of a port; they outlive what is connected to them.
pub type Pair = switch::pair::Pair<XenIngress, XenEgress>;

/// Returns once neither queue of `pair` uses a static grant that its guest has taken back: waits
/// for the bursts in progress.
pub fn forget_grants(pair: &Pair) {
    lock(&pair.ingress).forget_grants();
    lock(&pair.egress).forget_grants();
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic elsewhere is our bug and ends the program; the guard is as good as any.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
