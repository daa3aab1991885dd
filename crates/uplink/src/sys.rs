//! Every system call of this crate that needs `unsafe`: interface ioctls, and batched reads and
//! writes.
//!
//! Batches: the caller names the memory of every frame, then [`ReadBatch::run`] or
//! [`WriteBatch::run`] hands all of them to the kernel in one io_uring_enter and returns when the
//! last one has completed. Each request carries RWF_NOWAIT, so it completes while it is submitted,
//! in order, with EAGAIN if it would wait: nothing is ever in flight between two calls, and frames
//! keep their order. Without io_uring the same batch is a loop of readv or writev.
//!
//! Before Linux 6.4 a TAP refuses RWF_NOWAIT. Reads are a loop there, for one that finds nothing
//! would stay in flight. A write completes while it is submitted without the flag, too: the
//! descriptor is non-blocking, and waits for room only where its send buffer has a bound, which no
//! one sets unasked; where someone did, writes are a loop as well.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, squeue, types};
use rustix::fs::OFlags;
use rustix::io::Errno;
use shm::{Seg, SegMut};

use crate::fd::Batching;
use crate::packet::sys::Batch;

/// Outcome for one frame: bytes moved, virtio-net header included, or why not.
pub type Io = Result<u32, Errno>;

/// Shortest batch that goes through a ring: fewer frames are cheaper one by one (example
/// `tap_rate`).
const RING_FRAMES_MIN: usize = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Op {
    Read,
    Write,
}

/// Batch memory and, where the kernel has it, an io_uring.
pub(crate) struct Engine {
    ring: Option<IoUring>,
    /// Whether the ring takes reads as well as writes, each with RWF_NOWAIT.
    nowait: bool,
    iovecs: Vec<libc::iovec>,
    /// For each frame, the end of its part of `iovecs`.
    ends: Vec<usize>,
    results: Vec<Io>,
    /// How frames of a packet socket are received.
    socket: Option<Box<Batch>>,
}

// SAFETY: the pointers in `iovecs`, and those in `socket`, are used only inside `run`, which is
// called through a batch that borrows the memory they name; between batches they are dead.
unsafe impl Send for Engine {}

impl Engine {
    /// Without io_uring.
    pub(crate) fn plain() -> Self {
        Self {
            ring: None,
            nowait: true,
            iovecs: Vec::new(),
            ends: Vec::new(),
            results: Vec::new(),
            socket: None,
        }
    }

    /// Reads from a packet socket, each frame into one piece of memory.
    pub(crate) fn of_socket(mut self) -> Self {
        self.socket = Some(Box::default());
        self
    }

    /// Whether it reads from a packet socket.
    pub(crate) fn is_socket(&self) -> bool {
        self.socket.is_some()
    }

    /// With a ring for writes to a packet socket, if this kernel lets us have one.
    pub(crate) fn with_ring_for_socket(fd: BorrowedFd<'_>, entries: u32) -> io::Result<Self> {
        Self::untried(fd, entries, true)
    }

    /// With a ring of `entries` for `fd`, if this kernel lets us have one and can use it on `fd`
    /// without waiting; for writes only, if it can do no more. Finding out moves no frame.
    pub(crate) fn with_ring(fd: BorrowedFd<'_>, entries: u32) -> io::Result<Self> {
        let mut engine = Self::untried(fd, entries, true)?;
        // Reading zero bytes takes no frame off the queue, but fails where RWF_NOWAIT would.
        match engine.try_nothing(fd, Op::Read) {
            Ok(_) | Err(Errno::AGAIN) => Ok(engine),
            Err(Errno::OPNOTSUPP) => Self::with_ring_for_writes(fd, entries),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Creates an engine with a ring for writes only, without RWF_NOWAIT.
    pub(crate) fn with_ring_for_writes(fd: BorrowedFd<'_>, entries: u32) -> io::Result<Self> {
        let unsupported = || Err(io::ErrorKind::Unsupported.into());
        let waits = !rustix::fs::fcntl_getfl(fd)?.contains(OFlags::NONBLOCK);
        if waits || sndbuf(fd)? != libc::c_int::MAX {
            return unsupported();
        }
        let mut engine = Self::untried(fd, entries, false)?;
        // No frame is so short.
        match engine.try_nothing(fd, Op::Write) {
            Err(Errno::INVAL) => Ok(engine),
            _ => unsupported(),
        }
    }

    fn untried(fd: BorrowedFd<'_>, entries: u32, nowait: bool) -> io::Result<Self> {
        let ring = IoUring::builder().dontfork().setup_r_disabled().build(entries)?;
        let submitter = ring.submitter();
        submitter.register_files(&[fd.as_raw_fd()])?;
        submitter.register_restrictions(&mut restrictions())?;
        submitter.register_enable_rings()?;
        let mut engine = Self::plain();
        (engine.ring, engine.nowait) = (Some(ring), nowait);
        Ok(engine)
    }

    /// Moves as many frames of no bytes as make a batch for the ring; what came of the first.
    fn try_nothing(&mut self, fd: BorrowedFd<'_>, op: Op) -> Io {
        self.clear();
        for _ in 0..RING_FRAMES_MIN {
            self.iovecs.push(libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 });
            self.ends.push(self.iovecs.len());
        }
        self.run(fd, op)[0]
    }

    /// System calls for batches.
    pub(crate) fn batching(&self) -> Batching {
        match (&self.ring, self.nowait) {
            (None, _) => Batching::Plain,
            (Some(_), true) => Batching::Auto,
            (Some(_), false) => Batching::Writes,
        }
    }

    /// An empty batch of frames to read.
    pub(crate) fn reads<'e, 'm>(&'e mut self, fd: BorrowedFd<'e>) -> ReadBatch<'e, 'm> {
        self.clear();
        ReadBatch { engine: self, fd, _memory: PhantomData }
    }

    /// An empty batch of frames to write.
    pub(crate) fn writes<'e, 'm>(&'e mut self, fd: BorrowedFd<'e>) -> WriteBatch<'e, 'm> {
        self.clear();
        WriteBatch { engine: self, fd, _memory: PhantomData }
    }

    fn clear(&mut self) {
        self.iovecs.clear();
        self.ends.clear();
    }

    /// Moves every frame of the batch.
    fn run(&mut self, fd: BorrowedFd<'_>, op: Op) -> &[Io] {
        self.results.clear();
        self.results.resize(self.ends.len(), Err(Errno::CANCELED));
        if let Some(batch) = self.socket.as_mut().filter(|_| op == Op::Read) {
            assert_eq!(self.iovecs.len(), self.ends.len(), "one piece of memory for each frame");
            if !self.ends.is_empty() {
                batch.receive(fd, &self.iovecs, &mut self.results);
            }
            return &self.results;
        }
        let worth = self.ends.len() >= RING_FRAMES_MIN && (self.nowait || op == Op::Write);
        let ring = self.ring.as_mut().filter(|_| worth);
        let frames = Frames { iovecs: &self.iovecs, ends: &self.ends };
        let went = match ring {
            None => {
                run_plain(fd, op, frames, &mut self.results);
                Ok(())
            }
            Some(ring) => run_ring(ring, op, self.nowait, frames, &mut self.results),
        };
        if went.is_err() {
            // Nothing is in flight (see the module doc), and what was not submitted goes with the
            // ring. The unfinished frames stay CANCELED; the next batch is a plain one.
            self.ring = None;
        }
        &self.results
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A closed ring lets go of its files some time later; the TAP queue must be free at once.
        if let Some(ring) = &self.ring {
            let _ = ring.submitter().unregister_files();
        }
    }
}

/// Memory of the frames of a batch.
#[derive(Clone, Copy)]
struct Frames<'i> {
    iovecs: &'i [libc::iovec],
    /// Where each frame ends in these.
    ends: &'i [usize],
}

impl<'i> Frames<'i> {
    fn len(self) -> usize {
        self.ends.len()
    }

    /// Memory of frame `i`.
    fn iovecs_of(self, i: usize) -> &'i [libc::iovec] {
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        &self.iovecs[start..self.ends[i]]
    }
}

/// All that a ring may be used for: a thread without the right to open a file must not get it by
/// a ring.
fn restrictions() -> [Restriction; 6] {
    /// `IORING_UNREGISTER_FILES`
    const UNREGISTER_FILES: u8 = 3;
    let fixed = squeue::Flags::FIXED_FILE.bits();
    [
        Restriction::sqe_op(opcode::Read::CODE),
        Restriction::sqe_op(opcode::Write::CODE),
        Restriction::sqe_op(opcode::Readv::CODE),
        Restriction::sqe_op(opcode::Writev::CODE),
        Restriction::sqe_flags_required(fixed),
        Restriction::register_op(UNREGISTER_FILES),
    ]
}

fn run_plain(fd: BorrowedFd<'_>, op: Op, frames: Frames<'_>, results: &mut [Io]) {
    for i in 0..frames.len() {
        results[i] = loop {
            let result = vectored(fd, op, frames.iovecs_of(i));
            if result != Err(Errno::INTR) {
                break result;
            }
        };
        if op == Op::Read && results[i] == Err(Errno::AGAIN) {
            results[i..].fill(Err(Errno::AGAIN));
            break;
        }
    }
}

fn vectored(fd: BorrowedFd<'_>, op: Op, iov: &[libc::iovec]) -> Io {
    let count = libc::c_int::try_from(iov.len()).unwrap_or(libc::c_int::MAX);
    let n = match op {
        // SAFETY: the iovecs name memory the running batch borrows for writing.
        Op::Read => unsafe { libc::readv(fd.as_raw_fd(), iov.as_ptr(), count) },
        // SAFETY: the iovecs name memory the running batch borrows for reading.
        Op::Write => unsafe { libc::writev(fd.as_raw_fd(), iov.as_ptr(), count) },
    };
    // More than 4 GiB in one call is impossible (MAX_RW_COUNT).
    u32::try_from(n).map_err(|_| Errno::from_io_error(&io::Error::last_os_error()).unwrap())
}

fn run_ring(
    ring: &mut IoUring,
    op: Op,
    nowait: bool,
    frames: Frames<'_>,
    results: &mut [Io],
) -> io::Result<()> {
    let room = ring.params().sq_entries() as usize;
    let mut first = 0;
    while first < frames.len() {
        let last = frames.len().min(first + room);
        for i in first..last {
            let entry = request(op, nowait, frames.iovecs_of(i)).user_data(i as u64);
            // SAFETY: the memory of the request is borrowed by the running batch, and `frames`
            // does not change, until `complete` below has seen the request's completion.
            unsafe { ring.submission().push(&entry) }.expect("the queue is empty and has room");
        }
        complete(ring, last - first, results)?;
        first = last;
        // The queue was empty a moment ago; asking again would likely be a call for nothing.
        if op == Op::Read && results[last - 1] == Err(Errno::AGAIN) {
            results[last..].fill(Err(Errno::AGAIN));
            break;
        }
    }
    Ok(())
}

fn request(op: Op, nowait: bool, iov: &[libc::iovec]) -> squeue::Entry {
    let fd = types::Fixed(0);
    let count = u32::try_from(iov.len()).unwrap_or(u32::MAX);
    let flags = if nowait { libc::RWF_NOWAIT } else { 0 };
    // One piece needs no list of pieces, which the kernel would have to fetch.
    if let [one] = iov {
        let len = u32::try_from(one.iov_len).unwrap_or(u32::MAX);
        let at = one.iov_base.cast::<u8>();
        return match op {
            Op::Read => opcode::Read::new(fd, at, len).rw_flags(flags).build(),
            Op::Write => opcode::Write::new(fd, at, len).rw_flags(flags).build(),
        };
    }
    match op {
        Op::Read => opcode::Readv::new(fd, iov.as_ptr(), count).rw_flags(flags).build(),
        Op::Write => opcode::Writev::new(fd, iov.as_ptr(), count).rw_flags(flags).build(),
    }
}

/// Submits what is queued and waits until all `left` requests have completed.
fn complete(ring: &mut IoUring, mut left: usize, results: &mut [Io]) -> io::Result<()> {
    while left > 0 {
        let submitted = ring.submit_and_wait(left);
        for cqe in ring.completion() {
            let slot = &mut results[cqe.user_data() as usize];
            *slot = u32::try_from(cqe.result()).map_err(|_| errno_of(cqe.result()));
            left -= 1;
        }
        match submitted {
            Ok(_) => {}
            // A signal, or the kernel is short of memory for requests: it takes the rest later.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => {}
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn errno_of(negative: i32) -> Errno {
    Errno::from_raw_os_error(negative.wrapping_neg())
}

/// Frames to read, each into memory that belongs to the batch until it has run.
pub struct ReadBatch<'e, 'm> {
    engine: &'e mut Engine,
    fd: BorrowedFd<'e>,
    _memory: PhantomData<SegMut<'m>>,
}

impl<'e, 'm> ReadBatch<'e, 'm> {
    /// The next piece of memory of the frame being described; its first [`crate::VNET_LEN`] bytes
    /// receive the virtio-net header.
    #[inline]
    pub fn push(&mut self, seg: SegMut<'m>) {
        self.engine.iovecs.push(seg.as_iovec());
    }

    /// Ends the description of a frame. What does not fit its memory is cut off, and the result
    /// is then the length of the memory.
    #[inline]
    pub fn end_frame(&mut self) {
        self.engine.ends.push(self.engine.iovecs.len());
    }

    /// Reads up to as many frames as were described, in one system call where possible. The
    /// result of frame `i` is at `i`, and frames that were read are in order. EAGAIN: the queue
    /// was empty at that moment. One may have come a moment later: look at every result.
    pub fn run(self) -> &'e [Io] {
        let fd = self.fd;
        self.engine.run(fd, Op::Read)
    }
}

/// Frames to write, each from memory that is borrowed until the batch has run.
pub struct WriteBatch<'e, 'm> {
    engine: &'e mut Engine,
    fd: BorrowedFd<'e>,
    _memory: PhantomData<Seg<'m>>,
}

impl<'e, 'm> WriteBatch<'e, 'm> {
    /// The next piece of the frame being described, which begins with the virtio-net header.
    /// Empty pieces are left out.
    #[inline]
    pub fn push(&mut self, seg: Seg<'m>) {
        if !seg.is_empty() {
            self.engine.iovecs.push(seg.as_iovec());
        }
    }

    /// Ends the description of a frame.
    #[inline]
    pub fn end_frame(&mut self) {
        self.engine.ends.push(self.engine.iovecs.len());
    }

    /// Writes the frames in order, in one system call where possible. The result of frame `i` is
    /// at `i`; a frame that fails does not stop those after it.
    pub fn run(self) -> &'e [Io] {
        let fd = self.fd;
        self.engine.run(fd, Op::Write)
    }
}

/// An interface request for `name`, which is shorter than IFNAMSIZ (checked by the caller).
fn request_for(name: &str) -> libc::ifreq {
    // SAFETY: all-zero is a valid ifreq.
    let mut ifr: libc::ifreq = unsafe { std::mem::zeroed() };
    assert!(name.len() < ifr.ifr_name.len(), "checked by `tap::open`");
    for (to, from) in ifr.ifr_name.iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    ifr
}

fn ioctl_ifreq(fd: impl AsFd, code: libc::Ioctl, mut ifr: libc::ifreq) -> io::Result<libc::ifreq> {
    // SAFETY: `code` is one of this file's, all of which take an ifreq.
    let rc = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), code, &raw mut ifr) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(ifr) }
}

/// TUNSETIFF: makes `fd` a queue of interface `name`, creating it if need be.
pub(crate) fn tun_attach(fd: impl AsFd, name: &str, flags: libc::c_int) -> io::Result<()> {
    let mut ifr = request_for(name);
    ifr.ifr_ifru.ifru_flags = flags as libc::c_short;
    ioctl_ifreq(fd, libc::TUNSETIFF, ifr).map(drop)
}

/// TUNGETIFF: name and flags (`IFF_*`) of the interface that `fd` is a queue of.
pub(crate) fn tun_interface(fd: impl AsFd) -> io::Result<(String, libc::c_int)> {
    let ifr = ioctl_ifreq(fd, libc::TUNGETIFF, request_for(""))?;
    // SAFETY: TUNGETIFF filled in the flags.
    let flags = unsafe { ifr.ifr_ifru.ifru_flags };
    let name = ifr.ifr_name.iter().map(|c| c.to_ne_bytes()[0]).take_while(|b| *b != 0);
    let name = name.collect::<Vec<u8>>();
    Ok((String::from_utf8_lossy(&name).into_owned(), flags.into()))
}

/// TUNSETVNETHDRSZ: bytes of virtio-net header before each frame.
pub(crate) fn tun_set_vnet_len(fd: impl AsFd, len: usize) -> io::Result<()> {
    ioctl_int(fd, libc::TUNSETVNETHDRSZ, len as libc::c_int)
}

/// TUNSETVNETLE: the virtio-net header is little-endian whatever the machine is.
pub(crate) fn tun_set_vnet_le(fd: impl AsFd) -> io::Result<()> {
    ioctl_int(fd, libc::TUNSETVNETLE, 1)
}

/// TUNSETPERSIST: whether the interface stays when its last queue is closed.
pub(crate) fn tun_set_persist(fd: impl AsFd, on: bool) -> io::Result<()> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: TUNSETPERSIST takes its argument by value.
    let rc = unsafe { libc::ioctl(fd, libc::TUNSETPERSIST, libc::c_ulong::from(on)) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// TUNSETCARRIER: whether the interface's cable is plugged in, as programs see it.
pub(crate) fn tun_set_carrier(fd: impl AsFd, on: bool) -> io::Result<()> {
    ioctl_int(fd, libc::TUNSETCARRIER, on.into())
}

/// Bytes that may wait in the interface for whoever is to take them.
fn sndbuf(fd: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    let mut len: libc::c_int = 0;
    // SAFETY: the call writes one int.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETSNDBUF, &raw mut len) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(len) }
}

fn ioctl_int(fd: impl AsFd, code: libc::Ioctl, mut value: libc::c_int) -> io::Result<()> {
    // SAFETY: `code` is one of the three above, which read one int.
    let rc = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), code, &raw mut value) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// TUNSETOFFLOAD: what the kernel may leave undone in frames we read.
pub(crate) fn tun_set_offload(fd: impl AsFd, bits: libc::c_uint) -> io::Result<()> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    let rc = unsafe { libc::ioctl(fd, libc::TUNSETOFFLOAD, libc::c_ulong::from(bits)) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Whether interface `name` exists in the network namespace of `socket`.
pub(crate) fn if_exists(socket: impl AsFd, name: &str) -> io::Result<bool> {
    match ioctl_ifreq(socket, libc::SIOCGIFINDEX as libc::Ioctl, request_for(name)) {
        Ok(_) => Ok(true),
        Err(e) if e.raw_os_error() == Some(libc::ENODEV) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Sets the interface up.
pub(crate) fn if_set_up(socket: impl AsFd, name: &str) -> io::Result<()> {
    let mut ifr = ioctl_ifreq(&socket, libc::SIOCGIFFLAGS as libc::Ioctl, request_for(name))?;
    // SAFETY: SIOCGIFFLAGS filled in the flags.
    let flags = unsafe { ifr.ifr_ifru.ifru_flags };
    let up = libc::IFF_UP as libc::c_short;
    if flags & up != 0 {
        // Setting takes CAP_NET_ADMIN even where nothing changes.
        return Ok(());
    }
    ifr.ifr_ifru.ifru_flags = flags | up;
    ioctl_ifreq(&socket, libc::SIOCSIFFLAGS as libc::Ioctl, ifr).map(drop)
}

/// The interface's MTU.
pub(crate) fn if_mtu(socket: impl AsFd, name: &str) -> io::Result<u32> {
    let ifr = ioctl_ifreq(socket, libc::SIOCGIFMTU as libc::Ioctl, request_for(name))?;
    // SAFETY: SIOCGIFMTU filled in the MTU.
    let mtu = unsafe { ifr.ifr_ifru.ifru_mtu };
    Ok(u32::try_from(mtu).unwrap_or(0))
}

/// Sets the interface's MTU.
pub(crate) fn if_set_mtu(socket: impl AsFd, name: &str, mtu: u32) -> io::Result<()> {
    let mut ifr = request_for(name);
    ifr.ifr_ifru.ifru_mtu = libc::c_int::try_from(mtu).unwrap_or(libc::c_int::MAX);
    ioctl_ifreq(socket, libc::SIOCSIFMTU as libc::Ioctl, ifr).map(drop)
}

/// The interface's MAC address.
pub(crate) fn if_mac(socket: impl AsFd, name: &str) -> io::Result<[u8; 6]> {
    let ifr = ioctl_ifreq(socket, libc::SIOCGIFHWADDR as libc::Ioctl, request_for(name))?;
    // SAFETY: SIOCGIFHWADDR filled in the address.
    let addr = unsafe { ifr.ifr_ifru.ifru_hwaddr };
    Ok(std::array::from_fn(|i| addr.sa_data[i].to_ne_bytes()[0]))
}

/// Sets the interface's MAC address.
pub(crate) fn if_set_mac(socket: impl AsFd, name: &str, mac: [u8; 6]) -> io::Result<()> {
    let mut ifr = request_for(name);
    let mut data = [0; 14];
    for (to, from) in data.iter_mut().zip(mac) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let sa_family = libc::ARPHRD_ETHER;
    ifr.ifr_ifru.ifru_hwaddr = libc::sockaddr { sa_family, sa_data: data };
    ioctl_ifreq(socket, libc::SIOCSIFHWADDR as libc::Ioctl, ifr).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where writes might have to wait for room, they are not handed over without saying that
    /// they must not.
    #[test]
    fn interface_whose_send_buffer_is_bounded_is_written_one_by_one() {
        let device = os::open_device(std::path::Path::new("/dev/net/tun"));
        let tap = device.and_then(|tap| {
            let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
            tun_attach(&tap, "pvsndbuf%d", flags).map(|()| tap)
        });
        let Ok(tap) = tap else {
            println!("skipped: no TAP for us here: {tap:?}");
            return;
        };
        let ring = || Engine::with_ring_for_writes(tap.as_fd(), 8).map(|e| e.batching());
        match ring() {
            Ok(batching) => assert_eq!(batching, Batching::Writes),
            // No io_uring here, whatever the bound.
            Err(error) => println!("skipped: {error}"),
        }
        ioctl_int(&tap, libc::TUNSETSNDBUF, 1 << 20).unwrap();
        assert_eq!(ring().unwrap_err().kind(), io::ErrorKind::Unsupported);
    }

    #[test]
    fn a_ring_reads_and_writes_its_interface_only() {
        let (ours, theirs) = os::socketpair().unwrap();
        let Ok(mut engine) = Engine::untried(ours.as_fd(), 8, false) else {
            println!("skipped: no io_uring here");
            return;
        };
        let ring = engine.ring.as_mut().unwrap();
        let mut result = |entry: squeue::Entry| {
            // SAFETY: the memory of the requests outlives the ring's use of it below.
            unsafe { ring.submission().push(&entry) }.unwrap();
            ring.submit_and_wait(1).unwrap();
            ring.completion().next().unwrap().result()
        };
        let (mut byte, path) = ([7_u8], c"/dev/null");
        let open = opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path.as_ptr()).build();
        let at = byte.as_mut_ptr();
        let other = opcode::Write::new(types::Fd(theirs.as_raw_fd()), at, 1).build();
        let own = opcode::Write::new(types::Fixed(0), at, 1).build();
        let denied = -libc::EACCES;
        assert_eq!([open, other, own].map(&mut result), [denied, denied, 1]);
        let more = engine.ring.as_ref().unwrap().submitter().register_eventfd(-1);
        assert_eq!(more.unwrap_err().raw_os_error(), Some(libc::EACCES));
    }
}
