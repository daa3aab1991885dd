//! Memory for the progress of packed rings: a successor of this process, if it is killed, maps it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ring::virtq::Ledger;
use shm::{Area, Mapping};
use switch::account::{Account, Charge};

use super::Backend;
use crate::error::ProtocolError;
use crate::ring_features;

/// Bytes from one ring's ledger to the next; pages that no ring uses take no memory.
const STRIDE: usize = Ledger::LEN.next_multiple_of(4096);

/// The ledgers of a connection's rings, by index.
pub(super) struct Ledgers {
    file: OwnedFd,
    mapping: Arc<Mapping>,
    _charges: [Option<Charge>; 2],
}

impl Ledgers {
    fn new(rings: usize, account: &Account) -> Option<Self> {
        let file = os::memfd("pvswitch-rings", (rings * STRIDE) as u64).ok()?;
        Self::map(file, rings, account)
    }

    fn map(file: OwnedFd, rings: usize, account: &Account) -> Option<Self> {
        let charges = [account.descriptors.charge(1).ok(), account.mappings.charge(1).ok()];
        let mapping = Arc::new(Mapping::new(file.as_fd(), 0, (rings * STRIDE) as u64).ok()?);
        Some(Self { file, mapping, _charges: charges })
    }

    fn of(&self, ring: usize) -> Option<Ledger> {
        Area::of(&self.mapping, ring * STRIDE, Ledger::LEN).and_then(Ledger::new)
    }
}

impl AsFd for Ledgers {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Backend {
    /// Writes the progress of packed rings down, so that a successor can continue if this process
    /// is killed. To be called before any ring starts.
    #[must_use]
    pub fn with_ledgers(mut self) -> Self {
        self.keeps = true;
        self
    }

    /// Before a ring starts. Without memory, a killed process costs the connection.
    pub(super) fn make_ledgers(&mut self) {
        if self.keeps && self.ledgers.is_none() && ring_features(self.features).packed {
            self.ledgers = Ledgers::new(self.rings.len(), &self.account);
        }
    }

    pub(super) fn import_ledgers(&mut self, file: OwnedFd) {
        self.ledgers = Ledgers::map(file, self.rings.len(), &self.account);
    }

    /// The ledger of a packed ring, if there are any.
    pub(super) fn ledger(&self, ring: usize) -> Option<Ledger> {
        let ledgers = self.ledgers.as_ref().filter(|_| ring_features(self.features).packed)?;
        ledgers.of(ring)
    }

    /// Position of a ring that a killed process served.
    pub(super) fn recover(&self, ring: usize) -> Result<u32, ProtocolError> {
        if !ring_features(self.features).packed {
            // It starts at its used index, whatever is said here.
            return Ok(0);
        }
        let missing =
            ProtocolError::Ring { index: ring as u64, pairs: self.device.queues_max() / 2 };
        let v = &self.rings[ring];
        let (Some(ledger), Some(addr)) = (self.ledger(ring), &v.addr) else {
            return Err(missing);
        };
        let layout = self.layout(ring, addr, v.size.unwrap_or(1))?;
        let position = ledger.recover(&self.memory, &layout);
        position.map_err(|error| ProtocolError::Layout { ring: ring as u16, error })
    }
}
