//! Memory messages: SET_MEM_TABLE, ADD_MEM_REG and REM_MEM_REG.

use std::os::fd::AsFd;
use std::sync::Arc;

use shm::{GuestMemory, Mapping, Region};

use super::handover::{Exported, RegionState, export_fd};
use super::{Backend, Done, Handled, Permissions, one_fd, short};
use crate::error::ProtocolError;
use crate::foreign::ForeignFd;
use crate::message::{FrontendReq, MemRegion, REGIONS_MAX};
use os::FdKind;

/// Memory slots offered (GET_MAX_MEM_SLOTS): what QEMU and rust-vmm can use.
pub const SLOTS_MAX: usize = 509;

/// A region and its count of additions. QEMU adds and removes every region once for each queue
/// pair; it is removed when the count reaches 0.
#[derive(Clone)]
pub(super) struct Slot {
    region: Region,
    times: u32,
    /// Its file, for another process that takes over.
    fd: Arc<ForeignFd>,
}

impl Slot {
    /// Its state; the descriptor is added to `fds`.
    pub(super) fn export<'a>(&'a self, fds: &mut Exported<'a>) -> RegionState {
        let Region { guest_addr, user_addr, len, offset, .. } = self.region;
        let fd = export_fd(fds, (*self.fd).as_fd());
        let times = self.times;
        RegionState { guest_addr, size: len, user_addr, mmap_offset: offset, times, fd }
    }

    fn is(&self, it: &MemRegion) -> bool {
        let r = &self.region;
        (r.guest_addr, r.user_addr, r.len) == (it.guest_addr, it.user_addr, it.size)
    }
}

impl Backend {
    pub(super) fn set_mem_table(&mut self, payload: &[u8], fds: Vec<ForeignFd>) -> Handled {
        let request = FrontendReq::SET_MEM_TABLE;
        let count = MemRegion::announced(payload).ok_or_else(|| short(request, payload))?;
        let want = usize::try_from(count).unwrap_or(usize::MAX);
        if want == 0 || want > REGIONS_MAX {
            return Err(ProtocolError::RegionCount(count));
        }
        let regions = MemRegion::parse_table(payload).ok_or_else(|| short(request, payload))?;
        if fds.len() != want {
            return Err(ProtocolError::FdCount { request, want, got: fds.len() });
        }
        fds.iter().try_for_each(|fd| check_kind(request, fd, self.permissions))?;
        let slots = regions.iter().zip(fds).map(|(region, fd)| self.map(region, fd));
        let slots = slots.collect::<Result<Vec<Slot>, ProtocolError>>()?;
        self.install(slots)
    }

    pub(super) fn add_mem_reg(&mut self, payload: &[u8], fds: Vec<ForeignFd>) -> Handled {
        let request = FrontendReq::ADD_MEM_REG;
        let region = MemRegion::parse_single(payload).ok_or_else(|| short(request, payload))?;
        let fd = one_fd(request, fds)?;
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.is(&region)) {
            slot.times = slot.times.saturating_add(1);
            return Ok(Done);
        }
        if self.slots.len() >= SLOTS_MAX {
            return Err(ProtocolError::NoSlot);
        }
        check_kind(request, &fd, self.permissions)?;
        let slot = self.map(&region, fd)?;
        let mut slots = self.slots.clone();
        slots.push(slot);
        self.install(slots)
    }

    pub(super) fn rem_mem_reg(&mut self, payload: &[u8], fds: Vec<ForeignFd>) -> Handled {
        let request = FrontendReq::REM_MEM_REG;
        let gone = MemRegion::parse_single(payload).ok_or_else(|| short(request, payload))?;
        // "For compatibility with existing incorrect implementations, the back-end MAY accept
        // messages with one file descriptor. [...] MUST close it without using it otherwise."
        if fds.len() > 1 {
            return Err(ProtocolError::FdCount { request, want: 0, got: fds.len() });
        }
        let at = self.slots.iter().position(|slot| slot.is(&gone));
        let at = at.ok_or(ProtocolError::NoSuchRegion { guest_addr: gone.guest_addr })?;
        if self.slots[at].times > 1 {
            self.slots[at].times -= 1;
            return Ok(Done);
        }
        let mut slots = self.slots.clone();
        slots.remove(at);
        self.install(slots)
    }

    /// Installs a new table, if it is valid. Running rings continue in it: the same memory may be
    /// at another address or in another file. One whose areas are not in it stops.
    pub(super) fn install(&mut self, slots: Vec<Slot>) -> Handled {
        let regions = slots.iter().map(|slot| slot.region.clone()).collect();
        let memory = GuestMemory::new(regions).map_err(ProtocolError::Table)?;
        self.check_log(&memory)?;
        let memory = Arc::new(memory);
        self.slots = slots;
        let old = std::mem::replace(&mut self.memory, Arc::clone(&memory));
        self.device.set_memory(memory);
        let mut result = Ok(Done);
        for ring in 0..self.rings.len() {
            if let Err(error) = self.renew(ring) {
                result = Err(error);
            }
        }
        // Not unmapped under the lock of a queue.
        drop(old);
        result
    }

    /// Maps a region of a table from another process, with its count of additions.
    pub(super) fn import_slot(
        &self,
        region: &MemRegion,
        fd: ForeignFd,
        times: u32,
    ) -> Result<Slot, ProtocolError> {
        check_kind(FrontendReq::ADD_MEM_REG, &fd, self.permissions)?;
        Ok(Slot { times: times.max(1), ..self.map(region, fd)? })
    }

    /// Maps a region. It is charged before the mapping and until its last user drops it: during a
    /// replacement both tables are charged.
    fn map(&self, region: &MemRegion, fd: ForeignFd) -> Result<Slot, ProtocolError> {
        let MemRegion { guest_addr, size, user_addr, mmap_offset } = *region;
        let failed = |error| ProtocolError::Map { guest_addr, error };
        let bytes = Mapping::len_for(fd.as_fd(), mmap_offset, size).map_err(failed)?;
        let over = |error| ProtocolError::OverLimit { guest_addr, error };
        let bytes = self.account.mapped_bytes.charge(bytes as u64).map_err(over)?;
        let one = self.account.mappings.charge(1).map_err(over)?;
        let mapping = Mapping::new(fd.as_fd(), mmap_offset, size).map_err(failed)?;
        let mapping = Arc::new(mapping.on_unmap(move || drop((bytes, one))));
        let region = Region { guest_addr, user_addr, len: size, offset: mmap_offset, mapping };
        Ok(Slot { region, times: 1, fd: Arc::new(fd) })
    }
}

/// Checks the kind of a memory file. On any file but the kernel's own shared memory, `fstat`,
/// `mmap` and reads may block as long as its server likes.
pub(super) fn check_kind(
    request: FrontendReq,
    fd: &ForeignFd,
    permissions: Permissions,
) -> Result<(), ProtocolError> {
    let kind = fd.kind();
    if kind == FdKind::Memory || permissions.any_memory {
        return Ok(());
    }
    let want =
        "use a memfd, or a file on tmpfs (/dev/shm) or hugetlbfs; memory=any accepts any file";
    Err(ProtocolError::FdKind { request, kind, want })
}
