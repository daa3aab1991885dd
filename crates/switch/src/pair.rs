//! Queue pair of a guest.

use std::sync::Arc;

use shm::sync::{Lock, Mutex};

use crate::forward::EgressQueue;
use crate::port::Egress;
use crate::stats::{EgressStats, IngressStats};

/// An ingress queue and an egress queue of a port; they outlive the peer's connections.
pub struct Pair<I, E> {
    /// From the guest.
    pub ingress: Arc<Mutex<I>>,
    /// Its counters.
    pub ingress_stats: Arc<IngressStats>,
    /// To the guest.
    pub egress: Arc<Mutex<E>>,
    /// Its counters.
    pub egress_stats: Arc<EgressStats>,
}

impl<I, E> Clone for Pair<I, E> {
    fn clone(&self) -> Self {
        Self {
            ingress: Arc::clone(&self.ingress),
            ingress_stats: Arc::clone(&self.ingress_stats),
            egress: Arc::clone(&self.egress),
            egress_stats: Arc::clone(&self.egress_stats),
        }
    }
}

impl<I, E> Pair<I, E>
where
    I: From<Arc<IngressStats>>,
    E: From<Arc<EgressStats>>,
{
    /// Creates an unconnected pair with new counters.
    pub fn new() -> Self {
        let (ingress_stats, egress_stats) = <(Arc<IngressStats>, Arc<EgressStats>)>::default();
        Self {
            ingress: Arc::new(Mutex::new(Lock::Ingress, I::from(Arc::clone(&ingress_stats)))),
            ingress_stats,
            egress: Arc::new(Mutex::new(Lock::Egress, E::from(Arc::clone(&egress_stats)))),
            egress_stats,
        }
    }
}

impl<I, E> Default for Pair<I, E>
where
    I: From<Arc<IngressStats>>,
    E: From<Arc<EgressStats>>,
{
    fn default() -> Self {
        Self::new()
    }
}

impl<I, E: Egress + 'static> Pair<I, E> {
    /// Its egress queue, for a port.
    pub fn egress_queue(&self) -> EgressQueue {
        EgressQueue::new(self.egress.clone(), Arc::clone(&self.egress_stats))
    }
}
