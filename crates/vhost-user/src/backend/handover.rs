//! A front-end's state handed to another process: export here, import there.
//!
//! The state is imported by the same checks as a front-end's messages. Rings that run are set up
//! without their positions, which the exporting process still changes; [`Backend::resume`] starts
//! them.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use switch::account::{Account, OverLimit};

use super::log::Log;
use super::vring::{Notify, Vring};
use super::{Backend, FrontendReq, Options, Permissions};
use crate::device::{BackendRequests, Device, Kick, KickFd};
use crate::error::ProtocolError;
use crate::foreign::ForeignFd;
use crate::message::{LogRegion, MemRegion, VringAddr};

/// State of one front-end. Descriptors are indices into the list that goes with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendState {
    pub(super) features: u64,
    pub(super) protocol: u64,
    pub(super) status: u8,
    pub(super) mtu: Option<u16>,
    pub(super) regions: Vec<RegionState>,
    pub(super) rings: Vec<RingState>,
    pub(super) requests: Option<u32>,
    /// Memory with the progress of packed rings.
    #[serde(default)]
    pub(super) ledgers: Option<u32>,
    #[serde(default)]
    pub(super) log: Option<LogState>,
}

/// The dirty log of a guest that migrates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LogState {
    pub(super) size: u64,
    pub(super) offset: u64,
    pub(super) fd: u32,
    /// All pages are to be marked, and some are not yet.
    #[serde(default)]
    pub(super) marking: bool,
}

/// A memory region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RegionState {
    pub(super) guest_addr: u64,
    pub(super) size: u64,
    pub(super) user_addr: u64,
    pub(super) mmap_offset: u64,
    pub(super) times: u32,
    pub(super) fd: u32,
}

/// Settings of one ring.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RingState {
    pub(super) size: Option<u16>,
    /// desc, avail, used, log; flags.
    pub(super) addr: Option<([u64; 4], u32)>,
    /// Of a ring that does not run.
    base: Option<u32>,
    kick: Option<Signal>,
    call: Option<Signal>,
    err: Option<Signal>,
    enabled: Option<bool>,
    running: bool,
}

/// How one side notifies the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Signal {
    /// Not at all.
    Never,
    /// By messages.
    InBand,
    /// By a descriptor.
    Fd(u32),
}

/// Error of an import.
#[derive(Debug)]
pub enum ImportError {
    /// A descriptor is missing, or is used twice.
    Descriptor(u32),
    /// The state has more rings than the device.
    Rings(usize),
    /// A limit of the port.
    OverLimit(OverLimit),
    /// A part of the state is refused as a message would be.
    Refused(ProtocolError),
}

impl fmt::Display for ImportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Descriptor(at) => write!(f, "descriptor {at} is missing, or is used twice"),
            Self::Rings(rings) => write!(f, "{rings} rings are more than the device has"),
            Self::OverLimit(over) => write!(f, "{over}"),
            Self::Refused(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for ImportError {}

impl From<ProtocolError> for ImportError {
    fn from(error: ProtocolError) -> Self {
        Self::Refused(error)
    }
}

/// Descriptors that come with a state; each is taken once.
#[derive(Default)]
pub struct Descriptors(BTreeMap<u32, OwnedFd>);

impl Descriptors {
    /// Descriptors in the order of their indices.
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        let mut all = Self::default();
        all.add(0, fds);
        all
    }

    /// Adds descriptors whose indices begin at `first`.
    pub fn add(&mut self, first: u32, fds: Vec<OwnedFd>) {
        self.0.extend((first..).zip(fds));
    }

    /// Takes one.
    ///
    /// # Errors
    /// [`ImportError::Descriptor`].
    pub fn take(&mut self, at: u32) -> Result<OwnedFd, ImportError> {
        self.0.remove(&at).ok_or(ImportError::Descriptor(at))
    }

    pub(crate) fn foreign(
        &mut self,
        at: u32,
        account: &Arc<Account>,
    ) -> Result<ForeignFd, ImportError> {
        ForeignFd::new(self.take(at)?, account).map_err(ImportError::OverLimit)
    }
}

/// Descriptors that go with a state, and the index of the first.
#[derive(Default)]
pub struct Exported<'a> {
    /// Index of the first.
    pub first: u32,
    /// In the order of their indices.
    pub fds: Vec<BorrowedFd<'a>>,
}

/// Adds a descriptor to a list; returns its index.
pub fn export_fd<'a>(fds: &mut Exported<'a>, fd: BorrowedFd<'a>) -> u32 {
    fds.fds.push(fd);
    fds.first + u32::try_from(fds.fds.len() - 1).expect("far fewer descriptors")
}

impl Backend {
    /// Returns the state without positions of running rings; descriptors are added to `fds`.
    pub fn export<'a>(&'a self, fds: &mut Exported<'a>) -> BackendState {
        let regions = self.slots.iter().map(|slot| slot.export(fds)).collect();
        let rings = self.rings.iter().map(|ring| export_ring(ring, fds)).collect();
        BackendState {
            features: self.features,
            protocol: self.protocol.bits(),
            status: self.status,
            mtu: self.mtu,
            regions,
            rings,
            requests: self.requests.as_ref().map(|channel| export_fd(fds, channel.as_fd())),
            ledgers: self.ledgers.as_ref().map(|ledgers| export_fd(fds, ledgers.as_fd())),
            log: self.log.as_ref().map(|log| {
                let LogRegion { size, offset } = log.region;
                let fd = export_fd(fds, (*log.fd).as_fd());
                LogState { size, offset, fd, marking: self.is_marking() }
            }),
        }
    }

    /// Positions of running rings in the form of VRING_BASE, by index. No worker may serve a ring
    /// from here until the other process has taken over or failed; then it continues.
    pub fn positions(&mut self) -> Vec<(u16, u32)> {
        let running = (0_u16..).zip(&self.rings).filter(|(_, ring)| ring.running);
        let running: Vec<u16> = running.map(|(at, _)| at).collect();
        let at = |ring: u16| Some((ring, self.device.position(ring)?));
        running.into_iter().filter_map(at).collect()
    }

    /// Creates the state of a connection that another process served. Rings that ran start with
    /// [`resume`](Self::resume).
    ///
    /// # Errors
    /// [`ImportError`].
    pub fn import(
        device: Box<dyn Device>,
        options: Options,
        permissions: Permissions,
        state: &BackendState,
        fds: &mut Descriptors,
    ) -> Result<Self, ImportError> {
        let mut backend = Self::new(device, options).with_permissions(permissions);
        if state.features != 0 {
            backend.set_features(state.features)?;
        }
        backend.set_protocol_features(state.protocol)?;
        backend.status = state.status;
        if let Some(mtu) = state.mtu {
            backend.set_mtu(mtu)?;
        }
        if !state.regions.is_empty() {
            backend.import_regions(&state.regions, fds)?;
        }
        if let Some(at) = state.requests {
            let fd = fds.foreign(at, &backend.account)?;
            backend.set_requests(fd)?;
        }
        if let Some(at) = state.ledgers {
            // Without it, packed rings of a killed process cannot continue; those of `ctl upgrade`
            // do.
            backend.import_ledgers(fds.take(at)?);
        }
        if let Some(LogState { size, offset, fd, marking }) = state.log {
            let fd = fds.foreign(fd, &backend.account)?;
            let log = backend.map_log(LogRegion { size, offset }, fd)?;
            // It is not known whether it was: if another one comes, all pages are marked once.
            backend.log = Some(Log { is_old: true, ..log });
            if marking {
                backend.mark_all();
            }
        }
        if state.rings.len() > backend.rings.len() {
            return Err(ImportError::Rings(state.rings.len()));
        }
        for (at, ring) in state.rings.iter().enumerate() {
            backend.import_ring(at, ring, fds)?;
        }
        Ok(backend)
    }

    fn import_regions(
        &mut self,
        regions: &[RegionState],
        fds: &mut Descriptors,
    ) -> Result<(), ImportError> {
        if regions.len() > super::SLOTS_MAX {
            return Err(ProtocolError::NoSlot.into());
        }
        let mut slots = Vec::with_capacity(regions.len());
        for region in regions {
            let fd = fds.foreign(region.fd, &self.account)?;
            let at = MemRegion {
                guest_addr: region.guest_addr,
                size: region.size,
                user_addr: region.user_addr,
                mmap_offset: region.mmap_offset,
            };
            slots.push(self.import_slot(&at, fd, region.times)?);
        }
        self.install(slots)?;
        Ok(())
    }

    fn import_ring(
        &mut self,
        at: usize,
        state: &RingState,
        fds: &mut Descriptors,
    ) -> Result<(), ImportError> {
        use FrontendReq as R;
        let mut ring = Vring { enabled: state.enabled, ..Vring::default() };
        ring.base = state.base.filter(|_| !state.running);
        ring.resumes = state.running;
        ring.kick = match state.kick {
            None => None,
            Some(Signal::Never) => Some(Kick::Poll),
            Some(Signal::InBand) => Some(Kick::InBand),
            Some(Signal::Fd(fd)) => {
                let fd = fds.foreign(fd, &self.account)?;
                Some(Kick::Fd(Arc::new(Self::notifier(R::SET_VRING_KICK, fd)?) as KickFd))
            }
        };
        let mut notify = |signal, request| {
            Ok::<_, ImportError>(match signal {
                None | Some(Signal::InBand) => Notify::Unset,
                Some(Signal::Never) => Notify::No,
                Some(Signal::Fd(fd)) => {
                    let fd = fds.foreign(fd, &self.account)?;
                    Notify::Fd(Arc::new(Self::notifier(request, fd)?))
                }
            })
        };
        ring.call = notify(state.call, R::SET_VRING_CALL)?;
        ring.err = notify(state.err, R::SET_VRING_ERR)?;
        self.rings[at] = ring;
        if let Some(size) = state.size {
            self.set_num(at, size.into())?;
        }
        if let Some(([desc, avail, used, log], flags)) = state.addr {
            let index = at as u32;
            let addr = VringAddr { index, flags, desc, used, avail, log };
            self.set_vring_addr(addr)?;
            if state.running {
                self.layout(at, &addr, state.size.unwrap_or(1))?;
            }
        }
        Ok(())
    }

    /// Starts imported rings of a killed process: split ones at their used index, packed ones where
    /// their ledger says. Front-ends are notified, which the killed process may have missed to do.
    ///
    /// # Errors
    /// As [`resume`](Self::resume); a packed ring without a ledger.
    pub fn resume_killed(&mut self) -> Result<(), ProtocolError> {
        let mut positions = Vec::new();
        for ring in 0..self.rings.len() {
            if self.rings[ring].resumes {
                positions.push((ring as u16, self.recover(ring)?));
            }
        }
        self.mark_all();
        self.resume(&positions)?;
        for (ring, _) in positions {
            if let Some(call) = self.call_for(ring.into(), false) {
                call.signal();
            }
        }
        Ok(())
    }

    /// Starts imported rings at these positions.
    ///
    /// # Errors
    /// The position of a ring is not valid, or that of a running ring is missing.
    pub fn resume(&mut self, positions: &[(u16, u32)]) -> Result<(), ProtocolError> {
        for (at, base) in positions {
            let at = self.ring(u64::from(*at))?;
            if std::mem::take(&mut self.rings[at].resumes) {
                self.rings[at].base = Some(*base);
                self.start(at)?;
            }
        }
        match self.rings.iter().position(|ring| ring.resumes) {
            Some(missing) => Err(ProtocolError::Ring {
                index: missing as u64,
                pairs: self.device.queues_max() / 2,
            }),
            None => Ok(()),
        }
    }
}

fn export_ring<'a>(ring: &'a Vring, fds: &mut Exported<'a>) -> RingState {
    let kick = ring.kick.as_ref().map(|kick| match kick {
        Kick::Fd(fd) => Signal::Fd(export_fd(fds, fd.as_fd())),
        Kick::InBand => Signal::InBand,
        Kick::Poll => Signal::Never,
    });
    let mut notify = |notify: &'a Notify| match notify {
        Notify::Unset => None,
        Notify::No => Some(Signal::Never),
        Notify::Fd(fd) => Some(Signal::Fd(export_fd(fds, (**fd).as_fd()))),
    };
    let running = ring.running || ring.resumes;
    RingState {
        size: ring.size,
        addr: ring.addr.map(|a| ([a.desc, a.avail, a.used, a.log], a.flags)),
        base: ring.base.filter(|_| !running),
        kick,
        call: notify(&ring.call),
        err: notify(&ring.err),
        enabled: ring.enabled,
        running,
    }
}

impl AsFd for BackendRequests {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel_fd()
    }
}
