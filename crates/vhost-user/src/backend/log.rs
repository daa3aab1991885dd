//! Dirty log: SET_LOG_BASE, SET_LOG_FD and VHOST_F_LOG_ALL (docs/design/0032).
//!
//! | set by | when the ring | logged |
//! |---|---|---|
//! | SET_LOG_BASE with its file | runs or not | where |
//! | LOG_ALL in SET_FEATURES | runs or not | whether |
//! | VHOST_VRING_F_LOG and `log` in SET_VRING_ADDR | runs or not | the device area's address |
//!
//! Each reaches running rings under their queues' locks: once a message is replied to, no worker
//! writes to what was before it.

use std::os::fd::AsFd;
use std::sync::Arc;

use ring::virtq::RingLog;
use shm::{DirtyLog, GuestMemory, Mapping, MarkAll};

use super::memory::check_kind;
use super::{Backend, Done, Handled, Payload, name, one_fd, short};
use crate::error::ProtocolError;
use crate::feature;
use crate::foreign::ForeignFd;
use crate::message::{FrontendReq, LogRegion, VRING_F_LOG};

/// The front-end's dirty log.
pub(super) struct Log {
    pub(super) dirty: Arc<DirtyLog>,
    pub(super) region: LogRegion,
    /// Its file, for another process that takes over.
    pub(super) fd: Arc<ForeignFd>,
    /// Nothing was logged for a time since it came: all rings were stopped, or the migration ended.
    /// The front-end may have read it for the last time. QEMU does, when a guest resets, and sends
    /// another one after the rings start again.
    pub(super) is_old: bool,
}

impl Backend {
    /// Handles SET_LOG_BASE. It is replied to always: QEMU waits for a reply without requesting it.
    /// A new log may come at each pass, after which the front-end reads the old one.
    pub(super) fn set_log_base(&mut self, payload: &[u8], fds: Vec<ForeignFd>) -> Handled {
        let request = FrontendReq::SET_LOG_BASE;
        let region = LogRegion::parse(payload).ok_or_else(|| short(request, payload))?;
        let log = self.map_log(region, one_fd(request, fds)?)?;
        // What was written since may be marked in a log that is not read any more.
        let had_none = self.log.as_ref().is_none_or(|log| log.is_old);
        let missed = had_none && self.runs();
        let old = self.log.replace(log);
        if missed {
            // QEMU starts rings of a guest that resets during a migration before it sends the log.
            self.mark_all();
        }
        self.refresh_logs();
        drop(old);
        Ok(Payload(0_u64.to_ne_bytes().to_vec()))
    }

    /// Handles SET_LOG_FD: a descriptor on which a back-end may signal writes to the log. It is
    /// checked and not used: a front-end reads the log at each pass, and a signal for each burst
    /// would cost its sender.
    pub(super) fn set_log_fd(&self, fds: Vec<ForeignFd>) -> Handled {
        let request = FrontendReq::SET_LOG_FD;
        Self::notifier(request, one_fd(request, fds)?)?;
        Ok(Done)
    }

    /// Maps and checks a log. It is charged like a memory region.
    pub(super) fn map_log(&self, region: LogRegion, fd: ForeignFd) -> Result<Log, ProtocolError> {
        let LogRegion { size, offset } = region;
        check_kind(FrontendReq::SET_LOG_BASE, &fd, self.permissions)?;
        let failed = ProtocolError::LogMap;
        let bytes = Mapping::len_for(fd.as_fd(), offset, size).map_err(failed)?;
        let over = ProtocolError::LogOverLimit;
        let bytes = self.account.mapped_bytes.charge(bytes as u64).map_err(over)?;
        let one = self.account.mappings.charge(1).map_err(over)?;
        let mapping = Mapping::new(fd.as_fd(), offset, size).map_err(failed)?;
        let mapping = Arc::new(mapping.on_unmap(move || drop((bytes, one))));
        let dirty = DirtyLog::new(&mapping, offset, size);
        let dirty = dirty.ok_or(ProtocolError::LogOffset { offset })?;
        check_len(&dirty, &self.memory)?;
        Ok(Log { dirty: Arc::new(dirty), region, fd: Arc::new(fd), is_old: false })
    }

    /// Before a new memory table is installed: a log in use must have its pages, too. QEMU sends a
    /// larger log first.
    pub(super) fn check_log(&self, memory: &GuestMemory) -> Result<(), ProtocolError> {
        match &self.log {
            Some(log) if self.logs_all() => check_len(&log.dirty, memory),
            _ => Ok(()),
        }
    }

    /// Whether writes are to be logged.
    pub(super) fn logs_all(&self) -> bool {
        self.features & feature::LOG_ALL != 0
    }

    /// After a ring stopped, or logging: if no ring runs that is logged, the log is an old one.
    pub(super) fn refresh_log_age(&mut self) {
        let is_used = self.logs_all() && self.runs();
        if let Some(log) = self.log.as_mut().filter(|_| !is_used) {
            log.is_old = true;
        }
    }

    fn runs(&self) -> bool {
        self.rings.iter().any(|ring| ring.running)
    }

    /// After a change of the features: a log that is left over from an earlier migration may be too
    /// short by now.
    pub(super) fn refresh_log_all(&mut self) {
        if self.check_log(&self.memory).is_err() {
            self.log = None;
        }
        self.refresh_logs();
    }

    /// Passes the log, or none, to all running rings.
    fn refresh_logs(&mut self) {
        (0..self.rings.len()).for_each(|ring| self.refresh_log(ring));
    }

    /// Passes the log, or none, to a ring if it runs.
    pub(super) fn refresh_log(&mut self, ring: usize) {
        let log = self.ring_log(ring);
        let v = &mut self.rings[ring];
        if v.running && (log.is_some() || v.logged) {
            v.logged = log.is_some();
            self.device.set_log(name(ring), log);
        }
    }

    /// Where writes to a ring are logged; `None`: not at all.
    pub(super) fn ring_log(&self, ring: usize) -> Option<RingLog> {
        let log = self.log.as_ref().filter(|_| self.logs_all())?;
        let addr = self.rings[ring].addr?;
        let layout = self.layout(ring, &addr, 1).ok()?;
        // A front-end that does not set the flag (Cloud Hypervisor) needs the ring's pages as much;
        // to mark them twice costs nothing. Without IOMMU both addresses are the guest's.
        let flagged = addr.flags & VRING_F_LOG != 0;
        let device = if flagged { addr.log } else { layout.device };
        Some(RingLog { log: Arc::clone(&log.dirty), desc: layout.desc, device })
    }

    /// Begins to mark every page: marks were missed, as those of the last bursts of a process that
    /// was killed.
    pub(super) fn mark_all(&mut self) {
        if let Some(log) = self.log.as_ref().filter(|_| self.logs_all()) {
            self.marking = Some(MarkAll::new(Arc::clone(&log.dirty), &self.memory));
            self.mark_more();
        }
    }

    /// Whether [`mark_more`](Self::mark_more) is to be called.
    pub fn is_marking(&self) -> bool {
        self.marking.is_some()
    }

    /// Marks some of the pages, if all are to be marked; returns whether some are left. A message
    /// that comes before the last step waits for all of them: the front-end may read the log after
    /// its reply.
    pub fn mark_more(&mut self) -> bool {
        if self.marking.as_mut().is_some_and(|all| !all.step()) {
            self.marking = None;
        }
        self.is_marking()
    }
}

fn check_len(dirty: &DirtyLog, memory: &GuestMemory) -> Result<(), ProtocolError> {
    let (has, needs) = (dirty.pages(), DirtyLog::pages_of(memory));
    if has < needs { Err(ProtocolError::LogShort { has, needs }) } else { Ok(()) }
}
