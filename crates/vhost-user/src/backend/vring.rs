//! Messages about single rings, and the start of a ring.

use std::sync::Arc;

use ring::virtq::{Layout, SIZE_MAX};

use super::{Backend, Done, Handled, Payload, bad_value, no_fd, number, one_fd};
use crate::device::{Call, Kick, KickFd, RingSetup};
use crate::error::ProtocolError;
use crate::foreign::ForeignFd;
use crate::message::{FrontendReq, NO_FD, VringAddr, VringState};
use crate::{feature, ring_features};
use os::FdKind;

/// The front-end's settings of one ring.
#[derive(Default)]
pub(super) struct Vring {
    pub(super) size: Option<u16>,
    pub(super) addr: Option<VringAddr>,
    pub(super) base: Option<u32>,
    /// Where a reset stopped it. QEMU 7.2 resets the device before it sends GET_VRING_BASE: the
    /// position is part of a guest's state when it migrates.
    pub(super) reset_at: Option<u32>,
    pub(super) kick: Option<Kick>,
    pub(super) call: Notify,
    pub(super) err: Notify,
    /// `None`: the default at a ring's start.
    pub(super) enabled: Option<bool>,
    pub(super) running: bool,
    /// Whether its writes are logged.
    pub(super) logged: bool,
    /// Whether it ran in the process that it was imported from, and starts when its position is
    /// known.
    pub(super) resumes: bool,
}

impl Vring {
    /// Resets all but the call and error descriptors: a front-end that does not send these again
    /// would otherwise wait indefinitely.
    pub(super) fn reset(&mut self) {
        let was = std::mem::take(self);
        let reset_at = was.base.or(was.reset_at);
        *self = Self { call: was.call, err: was.err, reset_at, ..Self::default() };
    }
}

/// Means by which the front-end wants to be notified.
#[derive(Default)]
pub(super) enum Notify {
    /// Not set: in band if that is negotiated, otherwise not at all.
    #[default]
    Unset,
    /// Not at all: the driver polls.
    No,
    /// Through a descriptor.
    Fd(Arc<ForeignFd>),
}

impl Backend {
    /// Handles the messages that carry "a vring state description".
    pub(super) fn vring(&mut self, request: FrontendReq, state: VringState) -> Handled {
        use FrontendReq as R;
        let ring = self.ring(u64::from(state.index))?;
        match request {
            R::SET_VRING_NUM => self.set_num(ring, state.num),
            R::SET_VRING_BASE => {
                // A ring that is moved cannot continue. Front-ends that set a ring up again without
                // GET_VRING_BASE do this (User-Mode Linux, when its driver is reloaded).
                self.stop_running(ring);
                self.rings[ring].base = Some(state.num);
                self.start(ring)
            }
            R::GET_VRING_BASE => {
                self.stop(ring);
                let v = &self.rings[ring];
                let num = v.base.or(v.reset_at).unwrap_or(0);
                Ok(Payload(VringState { num, ..state }.to_bytes()))
            }
            R::SET_VRING_ENABLE => {
                if state.num > 1 {
                    return Err(bad_value(request, u64::from(state.num)));
                }
                self.enable(ring, state.num == 1);
                Ok(Done)
            }
            _ => {
                // "the ring is also started on the VHOST_USER_VRING_KICK message"
                self.rings[ring].kick.get_or_insert(Kick::InBand);
                self.start(ring)?;
                if self.rings[ring].running {
                    self.device.kick(name(ring));
                }
                Ok(Done)
            }
        }
    }

    pub(super) fn set_num(&mut self, ring: usize, size: u32) -> Handled {
        let bad = ProtocolError::QueueSize { ring: name(ring), size };
        let packed = self.features & feature::RING_PACKED != 0;
        let Some(size) = u16::try_from(size).ok().filter(|n| (1..=SIZE_MAX).contains(n)) else {
            return Err(bad);
        };
        if !packed && !size.is_power_of_two() {
            return Err(bad);
        }
        if self.rings[ring].size != Some(size) {
            self.stop_running(ring);
            self.rings[ring].size = Some(size);
        }
        self.start(ring)
    }

    pub(super) fn set_vring_addr(&mut self, addr: VringAddr) -> Handled {
        let ring = self.ring(u64::from(addr.index))?;
        let place = |a: &VringAddr| (a.desc, a.avail, a.used);
        if self.rings[ring].addr.as_ref().map(place) != Some(place(&addr)) {
            self.stop_running(ring);
        }
        self.rings[ring].addr = Some(addr);
        if self.serves(ring) && !self.slots.is_empty() {
            self.layout(ring, &addr, 1)?;
        }
        self.refresh_log(ring);
        self.start(ring)
    }

    /// Handles SET_VRING_KICK, SET_VRING_CALL and SET_VRING_ERR.
    pub(super) fn set_vring_fd(
        &mut self,
        request: FrontendReq,
        payload: &[u8],
        fds: Vec<ForeignFd>,
    ) -> Handled {
        let value = number(request, payload)?;
        if value & !(NO_FD | 0xff) != 0 {
            return Err(bad_value(request, value));
        }
        let ring = self.ring(value & 0xff)?;
        let fd = if value & NO_FD != 0 {
            no_fd(request, &fds)?;
            None
        } else {
            Some(Arc::new(Self::notifier(request, one_fd(request, fds)?)?))
        };
        match request {
            FrontendReq::SET_VRING_CALL => {
                self.rings[ring].call = fd.map_or(Notify::No, Notify::Fd);
                if self.rings[ring].running {
                    let call = self.call_for(ring, false);
                    self.device.set_call(name(ring), call);
                }
                Ok(Done)
            }
            FrontendReq::SET_VRING_ERR => {
                self.rings[ring].err = fd.map_or(Notify::No, Notify::Fd);
                self.restart(ring)
            }
            _ => {
                // A front-end that kicks in band sends no descriptor; to poll its ring would waste
                // a core.
                let without = if self.in_band() { Kick::InBand } else { Kick::Poll };
                let kick = fd.map_or(without, |fd| Kick::Fd(fd as KickFd));
                if matches!(kick, Kick::Poll) && !self.permissions.polled && self.serves(ring) {
                    self.stop(ring);
                    return Err(ProtocolError::Polled { ring: name(ring) });
                }
                self.pause(ring);
                self.rings[ring].kick = Some(kick);
                self.start(ring)
            }
        }
    }

    /// Checks the kind of a descriptor for notifications.
    pub(super) fn notifier(
        request: FrontendReq,
        fd: ForeignFd,
    ) -> Result<ForeignFd, ProtocolError> {
        if matches!(fd.kind(), FdKind::Event | FdKind::Pipe) {
            return Ok(fd);
        }
        let (kind, want) = (fd.kind(), "use an eventfd or a pipe");
        Err(ProtocolError::FdKind { request, kind, want })
    }

    /// Stores whether a ring is enabled, and updates the device.
    pub(super) fn enable(&mut self, ring: usize, on: bool) {
        self.rings[ring].enabled = Some(on);
        if self.rings[ring].running {
            self.device.enable(name(ring), on);
        }
    }

    /// After SET_FEATURES: rings without SET_VRING_ENABLE get the default.
    pub(super) fn refresh_enabled(&mut self) {
        for ring in 0..self.rings.len() {
            if self.rings[ring].running && self.rings[ring].enabled.is_none() {
                let on = self.is_enabled(ring);
                self.device.enable(name(ring), on);
            }
        }
    }

    /// After SET_BACKEND_REQ_FD: rings with in-band calls use the new channel.
    pub(super) fn refresh_calls(&mut self) {
        for ring in 0..self.rings.len() {
            let v = &self.rings[ring];
            if v.running && matches!(v.call, Notify::Unset) {
                let call = self.call_for(ring, false);
                self.device.set_call(name(ring), call);
            }
        }
    }

    /// "If VHOST_USER_F_PROTOCOL_FEATURES has not been negotiated, the ring starts directly in the
    /// enabled state" (Ring states).
    fn is_enabled(&self, ring: usize) -> bool {
        let starts_enabled = self.features & feature::PROTOCOL_FEATURES == 0;
        self.rings[ring].enabled.unwrap_or(starts_enabled)
    }

    /// Stops a ring and keeps its position. It starts again with the next SET_VRING_KICK.
    pub(super) fn stop(&mut self, ring: usize) {
        if self.rings[ring].running {
            self.pause(ring);
            self.refresh_log_age();
        }
        self.rings[ring].kick = None;
    }

    /// Stops a running ring whose setup has changed. Its memory may be reused by now, so it does
    /// not restart by itself.
    fn stop_running(&mut self, ring: usize) {
        if self.rings[ring].running {
            self.stop(ring);
        }
    }

    /// Stops a ring that will be restarted at once.
    fn pause(&mut self, ring: usize) {
        if std::mem::take(&mut self.rings[ring].running)
            && let Some(base) = self.device.stop(name(ring))
        {
            self.rings[ring].base = Some(base);
        }
    }

    /// Stops a ring if it runs, and starts it with the current settings.
    pub(super) fn restart(&mut self, ring: usize) -> Handled {
        self.pause(ring);
        self.start(ring)
    }

    /// Starts a ring if its settings are complete, it is served, and it does not run. A ring that
    /// cannot start stays stopped until the next SET_VRING_KICK.
    pub(super) fn start(&mut self, ring: usize) -> Handled {
        let started = self.try_start(ring);
        if started.is_err() {
            self.rings[ring].kick = None;
            self.refresh_log_age();
        }
        started.map(|()| Done)
    }

    /// After a change of the memory table: continues a ring that runs in the new one, without a
    /// moment in which its port is down, or starts it.
    pub(super) fn renew(&mut self, ring: usize) -> Handled {
        if !self.rings[ring].running {
            return self.start(ring);
        }
        let renewed = self.try_renew(ring);
        if renewed.is_err() {
            self.stop(ring);
        }
        renewed.map(|()| Done)
    }

    fn try_renew(&mut self, ring: usize) -> Result<(), ProtocolError> {
        let Some(setup) = self.setup(ring)? else {
            self.pause(ring);
            return Ok(());
        };
        self.rings[ring].logged = setup.log.is_some();
        let replaced = self.device.replace(name(ring), setup);
        replaced.map_err(|error| ProtocolError::Layout { ring: name(ring), error })
    }

    /// What a ring is to be started with; `None`: its settings are incomplete, or it is not served.
    fn setup(&mut self, ring: usize) -> Result<Option<RingSetup>, ProtocolError> {
        let v = &self.rings[ring];
        let (Some(size), Some(addr), Some(base), Some(kick)) = (v.size, v.addr, v.base, &v.kick)
        else {
            return Ok(None);
        };
        if self.slots.is_empty() || !self.serves(ring) {
            return Ok(None);
        }
        let kick = kick.clone();
        self.make_ledgers();
        Ok(Some(RingSetup {
            layout: self.layout(ring, &addr, size)?,
            features: ring_features(self.features),
            base,
            ledger: self.ledger(ring),
            log: self.ring_log(ring),
            kick,
            call: self.call_for(ring, false),
            err: self.call_for(ring, true),
        }))
    }

    fn try_start(&mut self, ring: usize) -> Result<(), ProtocolError> {
        if self.rings[ring].running {
            return Ok(());
        }
        let Some(setup) = self.setup(ring)? else { return Ok(()) };
        let logged = setup.log.is_some();
        let started = self.device.start(name(ring), setup);
        started.map_err(|error| ProtocolError::Layout { ring: name(ring), error })?;
        self.rings[ring].running = true;
        self.rings[ring].logged = logged;
        let on = self.is_enabled(ring);
        self.device.enable(name(ring), on);
        Ok(())
    }

    /// Translates ring addresses from the front-end's address space to guest addresses.
    pub(super) fn layout(
        &self,
        ring: usize,
        addr: &VringAddr,
        size: u16,
    ) -> Result<Layout, ProtocolError> {
        let guest = |part, user_addr| {
            let outside = ProtocolError::RingOutside { ring: name(ring), part, user_addr };
            self.memory.user_to_guest(user_addr).ok_or(outside)
        };
        Ok(Layout {
            size,
            desc: guest("desc", addr.desc)?,
            driver: guest("avail", addr.avail)?,
            device: guest("used", addr.used)?,
        })
    }

    /// Call for used buffers, or for a broken ring.
    pub(super) fn call_for(&self, ring: usize, broken: bool) -> Option<Call> {
        let v = &self.rings[ring];
        match if broken { &v.err } else { &v.call } {
            Notify::Fd(fd) => Some(Call::ForeignFd(Arc::clone(fd))),
            Notify::No => None,
            Notify::Unset => {
                let to = Arc::clone(self.requests.as_ref().filter(|_| self.in_band())?);
                Some(Call::InBand { to, ring: name(ring), broken })
            }
        }
    }

    /// Checks a ring index from a message.
    pub(super) fn ring(&self, index: u64) -> Result<usize, ProtocolError> {
        let at = usize::try_from(index).ok().filter(|at| *at < self.rings.len());
        let at = at.ok_or(ProtocolError::Ring { index, pairs: self.device.queues_max() / 2 })?;
        // A front-end that passes our features on unchanged, and the control queue to us: its guest
        // would wait for a reply to its first control command indefinitely.
        let several = self.features & feature::MQ != 0;
        if at >= 2 && several && !self.protocol.contains(crate::message::ProtocolFeatures::MQ) {
            return Err(ProtocolError::OnePair { index });
        }
        Ok(at)
    }

    /// Whether a ring is a data ring. With a control queue and without MQ, ring 2 is the control
    /// queue (virtio 1.3, 5.1.2); with MQ it comes after the last pair.
    fn serves(&self, ring: usize) -> bool {
        let control_at_2 = self.features & (feature::CTRL_VQ | feature::MQ) == feature::CTRL_VQ;
        let queues = usize::from(self.device.queues_max());
        ring < if control_at_2 { queues.min(2) } else { queues }
    }
}

/// A ring's index as used by messages and devices; there are at most 33.
pub(super) fn name(ring: usize) -> u16 {
    u16::try_from(ring).expect("few rings")
}
