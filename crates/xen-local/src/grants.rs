//! Grants of front ends on this machine: looked up in their tables, copied by memcpy.

use std::sync::{Arc, OnceLock, Weak};

use shm::sync::{Lock, RwLock};
use shm::{Access, Area, Domain, Failed, GRANT_LEN, Grants, Mapping, Piece, Seg, SegMut, Side};

use super::{BACK, ENTRY, GTF_PERMIT_ACCESS, GTF_READONLY};

/// Memory and grant table of a front end.
pub struct Memory {
    memory: Arc<Mapping>,
    table: Area,
    entries: u32,
    pages: u32,
    /// Number of copies by grant.
    #[cfg(test)]
    copies: std::sync::atomic::AtomicU64,
}

impl Memory {
    pub fn new(memory: Arc<Mapping>, table: Area, entries: u32, pages: u32) -> Self {
        Self {
            memory,
            table,
            entries,
            pages,
            #[cfg(test)]
            copies: Default::default(),
        }
    }

    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.memory
    }

    /// The offset of a grant's page in the memory, or why it cannot be accessed like this.
    pub fn find(&self, gref: u32, access: Access) -> Result<usize, &'static str> {
        if gref >= self.entries {
            return Err("no such entry in the grant table");
        }
        // In one load: the entry that is checked is the one that is used.
        let entry = self.table.load_u64(gref as usize * ENTRY);
        let (flags, domid, frame) = (entry as u16, (entry >> 16) as u16, (entry >> 32) as u32);
        if flags & 3 != GTF_PERMIT_ACCESS {
            return Err("not in use");
        }
        if domid != BACK {
            return Err("granted to another domain");
        }
        if access == Access::Write && flags & GTF_READONLY != 0 {
            return Err("granted read-only");
        }
        if frame >= self.pages {
            return Err("a frame outside the domain's memory");
        }
        Ok(frame as usize * GRANT_LEN as usize)
    }

    fn seg(&self, gref: u32, offset: u16, len: u32) -> Option<Seg<'_>> {
        self.count();
        let page = self.find(gref, Access::Read).ok()?;
        self.memory.seg(page + inside(offset, len)?, len)
    }

    fn seg_mut(&self, gref: u32, offset: u16, len: u32) -> Option<SegMut<'_>> {
        self.count();
        let page = self.find(gref, Access::Write).ok()?;
        self.memory.seg_mut(page + inside(offset, len)?, len)
    }

    fn count(&self) {
        #[cfg(test)]
        self.copies.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }
}

/// The offset, if this many bytes from it are inside the page.
fn inside(offset: u16, len: u32) -> Option<usize> {
    (u32::from(offset).checked_add(len)? <= GRANT_LEN).then_some(usize::from(offset))
}

/// All front ends of this process, in any directory: copies between them are one batch. The number
/// of a domain here is its index; front ends themselves are always domain 1.
pub struct AllGrants(RwLock<Vec<Slot>>);

struct Slot {
    memory: Option<Arc<Memory>>,
    /// The index is not reused while this is referenced.
    domain: Weak<Domain>,
}

/// The only list of this process.
pub fn all() -> &'static Arc<AllGrants> {
    static ALL: OnceLock<Arc<AllGrants>> = OnceLock::new();
    ALL.get_or_init(|| Arc::new(AllGrants(RwLock::new(Lock::LocalGrants, Vec::new()))))
}

impl AllGrants {
    /// Adds a domain; `None` if there are no more numbers.
    pub fn add(self: &Arc<Self>, memory: Arc<Memory>) -> Option<Arc<Domain>> {
        let mut slots = self.0.write();
        let free = |s: &Slot| s.memory.is_none() && s.domain.strong_count() == 0;
        let at = slots.iter().position(free).unwrap_or(slots.len());
        let id = u16::try_from(at).ok()?;
        let host: Arc<dyn Grants> = Arc::<Self>::clone(self);
        let domain = Arc::new(Domain::new(id, host));
        let slot = Slot { memory: Some(memory), domain: Arc::downgrade(&domain) };
        match slots.get_mut(at) {
            Some(free) => *free = slot,
            None => slots.push(slot),
        }
        Some(domain)
    }

    /// Number of copies by grant from and to the domain's pages.
    #[cfg(test)]
    pub fn copies(&self, domain: &Domain) -> u64 {
        let slots = self.0.read();
        let memory = slots[usize::from(domain.id())].memory.as_ref().expect("the domain exists");
        memory.copies.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Removes a domain: all later copies from or to it fail.
    pub fn remove(&self, domain: &Domain) {
        let mut slots = self.0.write();
        if let Some(slot) = slots.get_mut(usize::from(domain.id())) {
            slot.memory = None;
        }
    }
}

impl Grants for AllGrants {
    fn copy(&self, pieces: &mut [Piece<'_>]) {
        let slots = self.0.read();
        let memory = |domain: &Domain| {
            slots.get(usize::from(domain.id())).and_then(|slot| slot.memory.as_deref())
        };
        for piece in pieces {
            let len = piece.len();
            let from = match piece.src() {
                Side::Mapped(seg) => Some(seg),
                Side::Granted { domain, gref, offset } => {
                    memory(domain).and_then(|m| m.seg(gref, offset, len))
                }
            };
            let Some(from) = from else {
                piece.set(Err(Failed::Source));
                continue;
            };
            let to = match piece.dst() {
                Side::Mapped(seg) => Some(seg),
                Side::Granted { domain, gref, offset } => {
                    memory(domain).and_then(|m| m.seg_mut(gref, offset, len))
                }
            };
            let done = to.is_some_and(|mut to| to.copy_from(from) == len);
            piece.set(if done { Ok(()) } else { Err(Failed::Destination) });
        }
    }
}
