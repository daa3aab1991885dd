//! The rings of a vif, with their pages and channels, for any host.
//!
//! ```text
//!   prepare ──▶ take, by the user ──▶ stop: no more use ──▶ release: grants end
//! ```
//! Queues are taken once, and are not created again: their user starts another handshake. Their
//! memory lives until the user has dropped it and [`release`](Rings::release) was called, after the
//! back end has unmapped it; the grants end with the memory.

use std::sync::Arc;

use shm::GuestMemory;

use super::ctrl::{Ctrl, Grants};
use super::{Agreed, Named, Rings, RxQueue, TxQueue};
use crate::back::{Failure, QueueKeys};
use crate::host::{Channel, Front, HostError, Pages};

/// Minimum number of transmit buffers if pages are short.
const TX_BUFFERS_MIN: u16 = 32;

/// Memory of a queue.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Number of transmit buffers; reduced if the host has fewer pages.
    pub tx_buffers: u16,
    /// Pages per buffer.
    pub tx_pages_each: u16,
    /// Number of receive pages.
    pub rx_pages: u16,
}

/// A prepared queue.
pub struct Queue {
    /// Its tx ring.
    pub tx: TxQueue,
    /// Its rx ring.
    pub rx: RxQueue,
    /// The transmit buffers, from address 0; readable by the back end.
    pub tx_memory: Arc<GuestMemory>,
    /// Number of transmit buffers.
    pub tx_buffers: u16,
    /// The receive pages, from address 0.
    pub rx_memory: Arc<GuestMemory>,
    /// The channel of the tx ring.
    pub tx_channel: Arc<Channel>,
    /// The channel of the rx ring; the same as the tx ring's if not split.
    pub rx_channel: Arc<Channel>,
}

/// Creates the rings of a vif.
pub struct FrontRings {
    front: Arc<dyn Front>,
    backend_domid: u16,
    sizes: Sizes,
    prepared: Option<Vec<Queue>>,
    ctrl: Option<Ctrl>,
    /// Pages that the back end may have mapped.
    held: Vec<Pages>,
    taken: bool,
    stopped: bool,
}

/// The two ring pages of a queue, and its rx pages.
struct Bare {
    rings: Pages,
    rx: Pages,
}

impl FrontRings {
    /// For a vif whose back end is in domain `backend_domid`. `sizes` apply to each queue.
    pub fn new(front: Arc<dyn Front>, backend_domid: u16, sizes: Sizes) -> Self {
        let (prepared, ctrl, held) = (None, None, Vec::new());
        Self { front, backend_domid, sizes, prepared, ctrl, held, taken: false, stopped: false }
    }

    /// The prepared queues, in order; only once.
    pub fn take(&mut self) -> Option<Vec<Queue>> {
        self.taken |= self.prepared.is_some();
        self.prepared.take()
    }

    /// Whether the taken queues must not be used any more.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// The control ring, if there is one.
    pub fn ctrl(&mut self) -> Option<&mut Ctrl> {
        self.ctrl.as_mut()
    }

    fn create(&mut self, agreed: &Agreed) -> Result<Named, HostError> {
        let bare: Vec<_> = (0..agreed.queues).map(|_| self.bare()).collect::<Result<_, _>>()?;
        let (tx_pages, tx_buffers) = self.tx_pages(bare.len())?;
        let each = self.sizes.tx_pages_each;
        let (ctrl, ctrl_keys) = if agreed.ctrl {
            let grants = |(bare, tx): (&Bare, &Pages)| Grants::new(&tx.grefs, each, &bare.rx.grefs);
            let grants = bare.iter().zip(&tx_pages).map(grants).collect();
            let (ctrl, keys) = Ctrl::new(&*self.front, self.backend_domid, grants)?;
            (Some(ctrl), Some(keys))
        } else {
            (None, None)
        };
        let (mut queues, mut keys, mut held) = (Vec::new(), Vec::new(), Vec::new());
        for (Bare { rings, rx }, tx) in bare.into_iter().zip(tx_pages) {
            let (queue, queue_keys) = self.queue(agreed, &rings, &rx, &tx, tx_buffers)?;
            queues.push(queue);
            keys.push(queue_keys);
            held.extend([rings, rx, tx]);
        }
        (self.prepared, self.ctrl, self.held) = (Some(queues), ctrl, held);
        Ok(Named { queues: keys, ctrl: ctrl_keys })
    }

    fn bare(&self) -> Result<Bare, HostError> {
        let alloc = |pages| self.front.alloc(pages, self.backend_domid, false);
        Ok(Bare { rings: alloc(2)?, rx: alloc(self.sizes.rx_pages.into())? })
    }

    /// Creates one queue from these pages.
    fn queue(
        &self,
        agreed: &Agreed,
        rings: &Pages,
        rx_pages: &Pages,
        tx_pages: &Pages,
        tx_buffers: u16,
    ) -> Result<(Queue, QueueKeys), HostError> {
        let to = self.backend_domid;
        let (Some(tx_page), Some(rx_page)) = (rings.area(0), rings.area(1)) else {
            return Err(HostError::NoPages { pages: 2, advice: "memory is short" });
        };
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
        let (tx_ref, rx_ref) = (rings.grefs[0], rings.grefs[1]);
        Ok((queue, QueueKeys { tx_ref, rx_ref, tx_port, rx_port }))
    }

    /// Allocates each queue's transmit buffers: as many as configured, or half, a quarter and so
    /// on. The limit of real Xen is a module parameter with a low default.
    fn tx_pages(&self, queues: usize) -> Result<(Vec<Pages>, u16), HostError> {
        let Sizes { tx_buffers: mut n, tx_pages_each: each, .. } = self.sizes;
        loop {
            let pages = u32::from(n) * u32::from(each);
            let alloc = |_| self.front.alloc(pages, self.backend_domid, true);
            match (0..queues).map(alloc).collect() {
                Err(HostError::NoPages { .. }) if n / 2 >= TX_BUFFERS_MIN => n /= 2,
                got => return got.map(|pages: Vec<_>| (pages, n)),
            }
        }
    }
}

impl Rings for FrontRings {
    fn prepare(&mut self, agreed: &Agreed) -> Result<Named, Failure> {
        if self.taken {
            // Their user has not noticed that they are stopped, and would consume events of new
            // ones.
            return Err(Failure("the previous queues are still in use".into()));
        }
        self.create(agreed).map_err(|error| Failure(error.to_string()))
    }

    fn stop(&mut self) {
        self.prepared = None;
        self.stopped |= self.taken;
        self.held.extend(self.ctrl.take().map(Ctrl::into_pages));
    }

    fn release(&mut self) {
        self.held.clear();
    }
}
