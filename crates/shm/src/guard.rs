//! SIGBUS guard: a peer that truncates its memory loses its port, the process survives.
//!
//! A peer may truncate the file behind a mapping at any time, and the next access then raises
//! SIGBUS. The handler finds the mapping that holds the address, maps a substitute over all of it
//! (all, because hugetlbfs mappings can only be replaced in large pages), and returns: the access
//! is repeated and reads zeroes. The peer's port checks the mapping once per burst and stops. A
//! SIGBUS anywhere else keeps its default action.
//!
//! All resources of the handler are allocated before the first mapping ([`prepare`]), so that it
//! needs no call that can fail (docs/design/0014):
//!
//! * The substitute is one sparse memfd, mapped shared. Unlike private memory it counts neither
//!   against RLIMIT_DATA nor as memory committed. A mapping is replaced from the file offset that
//!   equals its own address, so no two of them share pages. The range is one mapping before and
//!   after: it counts neither against `vm.max_map_count` nor against RLIMIT_AS.
//! * Linux refuses even that if a process has one mapping more than `vm.max_map_count`, which it
//!   allows to happen. For this case there are spare mappings to unmap.
//! * Mappings are found in an immutable tree. An update copies the path from the root to the
//!   changed node; replaced nodes are freed when no handler runs (`Published`).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering};

use crate::sync::{Lock, StaticMutex};

use crate::mapping::MapError;
use crate::published::Published;
use crate::sys;

/// Length of the substitute: more than any address of a process (56 bits with five levels of page
/// tables), so that each address is a valid offset.
const SUBSTITUTE_LEN: u64 = 1 << 57;
/// Spare mappings to unmap when the limit of mappings prevents a replacement.
const SPARES: usize = 16;
/// Faults of one mapping after which the process is ended: each thread may fault once on a lost
/// mapping, and again only if the system has no page for the substitute.
const FAULTS_MAX: u32 = 4096;

/// State of a watched mapping; remains readable after.
pub(crate) struct Watched {
    /// Number of faults.
    faults: Arc<AtomicU32>,
}

impl Watched {
    pub(crate) fn is_lost(&self) -> bool {
        self.faults.load(Ordering::Relaxed) > 0
    }
}

/// Number of mappings lost in this process so far. When it changes, each port checks its own
/// memory, after an acquire fence.
#[inline]
pub fn mappings_lost() -> usize {
    LOST.load(Ordering::Relaxed)
}

static LOST: AtomicUsize = AtomicUsize::new(0);
/// The substitute's descriptor; -1 before `prepare`.
static SUBSTITUTE: AtomicI32 = AtomicI32::new(-1);
/// Addresses of single pages; 0: unmapped.
static SPARE: [AtomicUsize; SPARES] = [const { AtomicUsize::new(0) }; SPARES];
/// The tree that handlers search.
#[cfg(not(loom))]
static ROOT: Published<Node> = Published::new();
#[cfg(loom)]
loom::lazy_static! {
    static ref ROOT: Published<Node> = Published::new();
}
/// Whether the guard's resources are allocated.
static READY: StaticMutex<bool> = StaticMutex::new(Lock::MappingsReady, false);

/// A treap: ordered by address, and by weight from the root down. The ranges are disjoint.
type Tree = Option<Arc<Node>>;

#[derive(Clone)]
struct Node {
    start: usize,
    end: usize,
    faults: Arc<AtomicU32>,
    weight: u64,
    below: Tree,
    above: Tree,
}

impl Node {
    fn new(start: usize, end: usize, faults: Arc<AtomicU32>) -> Self {
        // Addresses are the kernel's choice, so any good hash will do (splitmix64).
        let mut weight = (start as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
        weight = (weight ^ (weight >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        weight = (weight ^ (weight >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Self { start, end, faults, weight: weight ^ (weight >> 31), below: None, above: None }
    }

    fn over(&self, below: Tree, above: Tree) -> Tree {
        Some(Arc::new(Self { below, above, ..self.clone() }))
    }

    /// Finds the range that holds `addr`. Async-signal-safe: reads only.
    fn find(&self, addr: usize) -> Option<&Self> {
        let mut at = Some(self);
        while let Some(node) = at {
            let next = match addr {
                _ if addr < node.start => &node.below,
                _ if addr >= node.end => &node.above,
                _ => return Some(node),
            };
            at = next.as_deref();
        }
        None
    }
}

/// Splits a tree into the ranges that start before `start`, and the rest.
fn split(tree: &Tree, start: usize) -> (Tree, Tree) {
    let Some(node) = tree else { return (None, None) };
    if node.start < start {
        let (low, high) = split(&node.above, start);
        (node.over(node.below.clone(), low), high)
    } else {
        let (low, high) = split(&node.below, start);
        (low, node.over(high, node.above.clone()))
    }
}

/// Joins two trees; all of `high` is above `low`.
fn join(low: &Tree, high: &Tree) -> Tree {
    match (low, high) {
        (None, one) | (one, None) => one.clone(),
        (Some(l), Some(h)) if l.weight > h.weight => l.over(l.below.clone(), join(&l.above, high)),
        (Some(_), Some(h)) => h.over(join(low, &h.below), h.above.clone()),
    }
}

fn with(tree: &Tree, new: &Node) -> Tree {
    match tree {
        Some(node) if node.weight > new.weight => {
            if new.start < node.start {
                node.over(with(&node.below, new), node.above.clone())
            } else {
                node.over(node.below.clone(), with(&node.above, new))
            }
        }
        _ => {
            let (below, above) = split(tree, new.start);
            new.over(below, above)
        }
    }
}

fn without(tree: &Tree, start: usize) -> Tree {
    let node = tree.as_ref()?;
    match start {
        _ if start < node.start => node.over(without(&node.below, start), node.above.clone()),
        _ if start > node.start => node.over(node.below.clone(), without(&node.above, start)),
        _ => join(&node.below, &node.above),
    }
}

/// Allocates the guard's resources, once. A program that maps peers' memory calls this at its
/// start, so that a missing resource is reported then; otherwise the first mapping calls it.
///
/// # Errors
/// [`MapError::Unguarded`]: no memory of peers can be mapped, because the process could not
/// survive losing it.
pub fn prepare() -> Result<(), MapError> {
    let mut ready = READY.lock();
    // Miri has no signals, and no file to truncate.
    if !*ready && !cfg!(miri) {
        let made = sys::substitute_fd(SUBSTITUTE_LEN).and_then(|fd| {
            rehearse(&fd)?;
            install().map_err(|error| ("sigaction", error))?;
            spares()?;
            Ok(fd)
        });
        let fd = made.map_err(|(what, error)| MapError::Unguarded { what, error })?;
        SUBSTITUTE.store(fd.into_raw_fd(), Ordering::Release);
        *ready = true;
    }
    Ok(())
}

/// Does once what the handler does, so that a denial by a seccomp filter or a security module is
/// detected before a fault.
fn rehearse(fd: &OwnedFd) -> Result<(), (&'static str, io::Error)> {
    let page = sys::page_len();
    let at = sys::anonymous(page).map_err(|error| ("mmap", error))?;
    let replaced = replace(at.as_ptr() as usize, page, fd.as_raw_fd());
    let done = if replaced {
        // SAFETY: our own page, mapped for reading and writing.
        unsafe { at.as_ptr().write_volatile(1) };
        sys::punch(fd.as_raw_fd(), at.as_ptr() as usize, page).map_err(|error| ("fallocate", error))
    } else {
        Err(("mmap of the substitute", io::Error::last_os_error()))
    };
    sys::unmap_anonymous(at, page);
    done
}

fn spares() -> Result<(), (&'static str, io::Error)> {
    let page = sys::page_len();
    let first = sys::spares(SPARES).map_err(|error| ("spare mappings", error))?;
    for (i, spare) in SPARE.iter().enumerate() {
        spare.store(first.as_ptr() as usize + i * page, Ordering::Release);
    }
    Ok(())
}

fn install() -> io::Result<()> {
    // SAFETY: all-zero is a valid sigaction (default action, empty mask).
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as extern "C" fn(_, _, _) as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_ONSTACK;
    // SAFETY: `action` is initialised and the handler is async-signal-safe: it reads immutable
    // memory and makes plain system calls.
    let done = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Registers `len` bytes at `start`, which are mapped and not yet accessed. [`prepare`] must have
/// succeeded before.
pub(crate) fn watch(start: usize, len: usize) -> Watched {
    let faults = Arc::new(AtomicU32::new(0));
    let node = Node::new(start, start + len, Arc::clone(&faults));
    ROOT.update(|tree| with(tree, &node));
    Watched { faults }
}

/// Unregisters the mapping at `start`, which is still mapped but no longer accessed. False: its
/// substitute still holds what was written to it.
pub(crate) fn forget(start: usize, len: usize, watched: &Watched) -> bool {
    // After a model has failed, nothing is modelled any more.
    if !cfg!(loom) || !std::thread::panicking() {
        ROOT.update(|tree| without(tree, start));
    }
    // Free memory and data before the address can be reused.
    !watched.is_lost() || sys::punch(SUBSTITUTE.load(Ordering::Acquire), start, len).is_ok()
}

/// Maps the substitute `fd` over `len` bytes at `start`. Async-signal-safe.
fn replace(start: usize, len: usize, fd: i32) -> bool {
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_FIXED | libc::MAP_SHARED | libc::MAP_NORESERVE;
    let at = start as *mut libc::c_void;
    // SAFETY: the caller's range is one whole mapping that we own, and stays mapped by this.
    let got = unsafe { libc::mmap(at, len, prot, flags, fd, start as libc::off_t) };
    if got == libc::MAP_FAILED {
        return false;
    }
    // Avoids large pages, as few pages are touched. A kernel without large pages refuses this.
    // SAFETY: advice on the mapping made above.
    unsafe { libc::madvise(at, len, libc::MADV_NOHUGEPAGE) };
    true
}

/// Replaces the mapping of `node` by the substitute. Async-signal-safe.
fn substitute(node: &Node) -> bool {
    // Marked lost before anything can be written to the substitute.
    match node.faults.fetch_add(1, Ordering::Relaxed) {
        0 => _ = LOST.fetch_add(1, Ordering::Release),
        FAULTS_MAX.. => return false,
        // Another thread did this already, or does so now: repeating it changes nothing.
        _ => {}
    }
    let fd = SUBSTITUTE.load(Ordering::Acquire);
    while !replace(node.start, node.end - node.start, fd) {
        let spare = SPARE.iter().map(|spare| spare.swap(0, Ordering::AcqRel)).find(|at| *at != 0);
        let Some(at) = spare.and_then(|at| NonNull::new(at as *mut u8)) else { return false };
        sys::unmap_anonymous(at, sys::page_len());
    }
    true
}

extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let info = unsafe { &*info };
    // SAFETY: always valid in the thread that calls it.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let saved = unsafe { *errno };
    // Raised by an access of this thread: beyond the end of the file, with no large page left
    // (hugetlbfs raises the same), or to a page with a memory error.
    let by_access = matches!(info.si_code, libc::BUS_ADRERR | libc::BUS_MCEERR_AR);
    let survived = by_access && {
        // SAFETY: SIGBUS of these causes fills si_addr.
        let addr = unsafe { info.si_addr() } as usize;
        // The mapping found is the one accessed: ranges in a tree are disjoint, as a mapping is
        // added after its mmap and removed before its munmap; and the interrupted access holds its
        // mapping (each view borrows or owns it), so that it is in the tree and stays there and
        // mapped until this handler returns. A node's range never changes. So no other memory is
        // replaced.
        ROOT.read(|root| root.and_then(|root| root.find(addr)).is_some_and(substitute))
    };
    // SAFETY: as above.
    unsafe { *errno = saved };
    if survived {
        return;
    }
    // Not ours: the default action.
    // SAFETY: SIG_DFL is always a valid disposition.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    // A faulting access is repeated, and ends the process as without a handler. A signal that was
    // sent, or that reports something not accessed, is not repeated: send it again.
    if info.si_code <= 0 || info.si_code == libc::BUS_MCEERR_AO {
        // SAFETY: a plain system call.
        unsafe { libc::raise(libc::SIGBUS) };
    }
}

#[cfg(all(test, not(miri)))]
mod tests;
