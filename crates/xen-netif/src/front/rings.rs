//! The rings of a vif with one queue, with their pages and channels, of either host.
//!
//! ```text
//!   prepare ──▶ take: the user's ──▶ stop: not to be used any more ──▶ release: grants end
//! ```
//! One queue is taken, and no other is made after it: who had it begins a handshake of its own.
//! Memory lives until both the user has let go and [`release`](Rings::release) was called, which is
//! when the back end has; the grants end with it.

use std::sync::Arc;

use shm::GuestMemory;

use super::{Agreed, Named, Rings, RxQueue, TxQueue};
use crate::back::{Failure, QueueKeys};
use crate::host::{Channel, Front, HostError, Pages};

/// Fewest transmit buffers that are made do with where pages are short.
const TX_BUFFERS_MIN: u16 = 32;

/// How much memory a queue gets.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Transmit buffers; fewer are made where the host has fewer pages.
    pub tx_buffers: u16,
    /// Pages of each.
    pub tx_pages_each: u16,
    /// Pages to receive into.
    pub rx_pages: u16,
}

/// A queue that was prepared.
pub struct Queue {
    /// Its tx ring.
    pub tx: TxQueue,
    /// Its rx ring.
    pub rx: RxQueue,
    /// The transmit buffers, from address 0 on; the back end can read them.
    pub tx_memory: Arc<GuestMemory>,
    /// How many there are.
    pub tx_buffers: u16,
    /// The pages received into, from address 0 on.
    pub rx_memory: Arc<GuestMemory>,
    /// The channel of the tx ring.
    pub tx_channel: Arc<Channel>,
    /// The channel of the rx ring; the same one where they are not split.
    pub rx_channel: Arc<Channel>,
}

/// What the rings of a vif with one queue are made of.
pub struct OneQueue {
    front: Front,
    backend_domid: u16,
    sizes: Sizes,
    prepared: Option<Queue>,
    /// What the back end may have mapped.
    held: Vec<Pages>,
    taken: bool,
    stopped: bool,
}

impl OneQueue {
    /// For a vif whose back end is in domain `backend_domid`.
    pub fn new(front: Front, backend_domid: u16, sizes: Sizes) -> Self {
        let (prepared, held) = (None, Vec::new());
        Self { front, backend_domid, sizes, prepared, held, taken: false, stopped: false }
    }

    /// The queue that was prepared, once.
    pub fn take(&mut self) -> Option<Queue> {
        self.taken |= self.prepared.is_some();
        self.prepared.take()
    }

    /// Whether the queue that was taken is not to be used any more.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    fn make(&mut self, agreed: &Agreed) -> Result<(Queue, QueueKeys), HostError> {
        let to = self.backend_domid;
        let rings = self.front.alloc(2, to, false)?;
        let (Some(tx_page), Some(rx_page)) = (rings.area(0), rings.area(1)) else {
            return Err(HostError::NoPages { pages: 2, advice: "memory is short" });
        };
        let rx_pages = self.front.alloc(self.sizes.rx_pages.into(), to, false)?;
        let (tx_pages, tx_buffers) = self.tx_pages()?;
        let (tx_port, tx_channel) = self.front.channel(to)?;
        let tx_channel = Arc::new(tx_channel);
        let (rx_port, rx_channel) = if agreed.split {
            let (port, channel) = self.front.channel(to)?;
            (Some(port), Arc::new(channel))
        } else {
            (None, Arc::clone(&tx_channel))
        };
        let each = self.sizes.tx_pages_each;
        let queue = Queue {
            tx: TxQueue::new(tx_page, tx_pages.grefs.clone(), each, agreed),
            rx: RxQueue::new(rx_page, rx_pages.grefs.clone()),
            tx_memory: Arc::clone(&tx_pages.memory),
            tx_buffers,
            rx_memory: Arc::clone(&rx_pages.memory),
            tx_channel,
            rx_channel,
        };
        let keys = QueueKeys { tx_ref: rings.grefs[0], rx_ref: rings.grefs[1], tx_port, rx_port };
        self.held = vec![rings, rx_pages, tx_pages];
        Ok((queue, keys))
    }

    /// Pages of as many buffers as wanted, or of a half, a quarter...: real Xen's limit is a
    /// parameter of a module, and low unless it is set.
    fn tx_pages(&self) -> Result<(Pages, u16), HostError> {
        let Sizes { tx_buffers: mut n, tx_pages_each: each, .. } = self.sizes;
        loop {
            let pages = u32::from(n) * u32::from(each);
            match self.front.alloc(pages, self.backend_domid, true) {
                Err(HostError::NoPages { .. }) if n / 2 >= TX_BUFFERS_MIN => n /= 2,
                got => return got.map(|pages| (pages, n)),
            }
        }
    }
}

impl Rings for OneQueue {
    fn prepare(&mut self, agreed: &Agreed) -> Result<Named, Failure> {
        if self.taken {
            // Its user has yet to learn that it is stopped, and would find another's events.
            return Err(Failure("the queue before this one is still in use".into()));
        }
        let (queue, keys) = self.make(agreed).map_err(|error| Failure(error.to_string()))?;
        self.prepared = Some(queue);
        Ok(Named { queues: vec![keys], ctrl: None })
    }

    fn stop(&mut self) {
        self.prepared = None;
        self.stopped |= self.taken;
    }

    fn release(&mut self) {
        self.held.clear();
    }
}

#[cfg(test)]
mod tests;
