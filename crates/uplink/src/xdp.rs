//! AF_XDP sockets: the frames of an interface's queues, in memory shared with the kernel
//! ([0038](../../../docs/design/0038-af-xdp.md)).
//!
//! ```text
//!   interface, queue n ──▶ XDP program ──▶ map[n] ──▶ socket n: four rings, and a UMEM of chunks
//!                               └─▶ the kernel's stack, of queues that the port does not use
//! ```
//!
//! Each queue has a socket and a UMEM of its own, a part of one memfd, so that another process can
//! take all of it over. Some chunks are for receiving, and pass from the fill ring to the RX ring
//! and back; the others are for sending, and pass from a list to the TX ring, and back by the
//! completion ring. So the two directions share nothing but the socket; in copy mode not even that:
//! frames are sent by a second one, with the same UMEM, fill ring and completion ring. The kernel
//! calls the waiters of a socket for each frame that it has sent, and the first socket has some.

mod egress;
mod error;
mod ingress;
mod program;
mod ring;
mod sys;

use std::ffi::CString;
use std::io;
use std::num::NonZeroU16;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::sockopt::{
    set_xdp_rx_ring_size, set_xdp_tx_ring_size, set_xdp_umem_completion_ring_size,
    set_xdp_umem_fill_ring_size, set_xdp_umem_reg, xdp_mmap_offsets, xdp_options, xdp_statistics,
};
use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, SocketAddrXdpWithSharedUmem, XDP_PGOFF_RX_RING,
    XDP_PGOFF_TX_RING, XDP_UMEM_PGOFF_COMPLETION_RING, XDP_UMEM_PGOFF_FILL_RING, XdpMmapOffsets,
    XdpOptionsFlags, XdpRingOffset, XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use shm::{Access, Area, MapError, Mapping, Seg, SegMut};
use switch::stats::{EgressStats, IngressStats};

pub use self::egress::XdpEgress;
pub use self::error::XdpError;
pub use self::ingress::XdpIngress;
use self::program::{Attached, Refused};
use self::ring::{ADDRESS_LEN, Consumer, DESC_LEN, Producer};
use crate::netns::in_netns;
use crate::packet::{self, PacketLink, packet_carrier, packet_link};
use crate::tap::TapError;

/// Chunks of a queue to receive frames in, and entries of its RX ring.
const RX_CHUNKS: u32 = 2048;
/// Entries of a fill ring: the kernel shows a frame before it shows that it took the chunk's entry,
/// so that for a moment a chunk may have two.
const FILL_ENTRIES: u32 = 2 * RX_CHUNKS;
/// Chunks of a queue to send frames from, and entries of its completion ring.
const TX_CHUNKS: u32 = 1024;
/// Entries of a TX ring, for the same reason. The kernel reports room when half of it is free, and
/// so at any time.
const TX_ENTRIES: u32 = 2 * TX_CHUNKS;
/// Bytes that the kernel leaves free before a received frame (`XDP_PACKET_HEADROOM`).
const HEADROOM: u32 = 256;
/// Shorter and longer chunks. The kernel accepts none longer than a page.
const CHUNK_SHORT: u32 = 2048;
const CHUNK_LONG: u32 = 4096;
/// Bytes of a frame beyond its MTU: Ethernet's header, and one VLAN tag, or two.
const HEADER_LEN: u32 = 14;
const TAG_LEN: u32 = 4;
/// The longest MTU of which each frame fits a chunk, with two tags.
const MTU_MAX: u32 = CHUNK_LONG - HEADROOM - HEADER_LEN - 2 * TAG_LEN;
/// Bytes of frames, with the kernel's own of each, that an interface has not sent yet: more than
/// there are chunks.
const SEND_BYTES: i32 = 4 << 20;
/// A protocol that no frame has: a packet socket for it learns only of its interface.
const NO_PROTOCOL: u16 = 0xffff;
/// Tries to use what a process that has ended has not released yet, at this interval.
const BUSY_TRIES: u32 = 20;
const BUSY_INTERVAL: std::time::Duration = std::time::Duration::from_millis(5);

/// How frames pass between the driver and the UMEM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XdpMode {
    /// Without a copy if the driver offers that, or else with one.
    Auto,
    /// With a copy.
    Copy,
    /// Without one, or not at all.
    ZeroCopy,
}

/// Options for [`Xdp::open`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdpOptions {
    /// Name of the interface.
    pub name: String,
    /// Its network namespace: a name under /run/netns or a path; `None` for our own.
    pub netns: Option<String>,
    /// Number of its queues to use, from queue 0 on.
    pub queues: NonZeroU16,
    /// Whether frames are copied.
    pub mode: XdpMode,
    /// Pinned map of a program that another process attached; `None`: this one attaches its own.
    pub map: Option<PathBuf>,
}

/// Properties of open sockets that do not change, and that another process must know to take them
/// over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XdpShape {
    /// Bytes of a chunk.
    pub chunk_len: u32,
    /// The longest frame to send, in bytes, by the MTU when they were opened.
    pub frame_max: u32,
    /// Whether frames are not copied.
    pub is_zero_copy: bool,
    /// Whether our program runs behind the driver, not in it.
    pub is_generic: bool,
}

/// What one process hands to another.
#[derive(Debug)]
pub struct XdpHanded<Fd> {
    /// One for each queue.
    pub sockets: Vec<Fd>,
    /// One more for each, which sends; none: `sockets` send, too.
    pub senders: Vec<Fd>,
    /// The memory of all frames.
    pub memory: Fd,
    /// The map by which the program finds the sockets.
    pub map: Fd,
    /// The program's attachment, if it is ours.
    pub link: Option<Fd>,
    /// A socket that knows the interface's state.
    pub watcher: Fd,
}

impl<Fd> XdpHanded<Fd> {
    /// The socket that sends the frames of a queue.
    fn sender(&self, queue: usize) -> &Fd {
        self.senders.get(queue).unwrap_or(&self.sockets[queue])
    }
}

/// Open AF_XDP sockets of an interface.
pub struct Xdp {
    fds: XdpHanded<Arc<OwnedFd>>,
    mapping: Arc<Mapping>,
    rings: Vec<Rings>,
    shape: XdpShape,
}

impl Xdp {
    /// Opens sockets on an interface, promiscuous, which receive at once unless they are
    /// [blocked](Self::set_blocked). Also returns what an operator should know: sentences without
    /// a full stop.
    ///
    /// # Errors
    /// [`XdpError`] with what failed, where, and what to do.
    pub fn open(options: &XdpOptions, blocked: bool) -> Result<(Self, Vec<String>), XdpError> {
        match &options.netns {
            None => open_here(options, blocked),
            Some(netns) => in_netns(netns, || open_here(options, blocked))?,
        }
    }

    /// Blocks the sockets: our program drops the frames of their queues, that of another process
    /// does with them what it does without a socket; or unblocks them. Frames that were received
    /// before are [discarded](XdpIngress::discard) by the caller, first.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn set_blocked(&self, blocked: bool) -> io::Result<()> {
        for (queue, socket) in (0..).zip(&self.fds.sockets) {
            match blocked {
                true => sys::remove(self.fds.map.as_fd(), queue)?,
                false => sys::insert(self.fds.map.as_fd(), queue, socket.as_fd())?,
            }
        }
        Ok(())
    }

    /// Whether the interface is up and has carrier.
    pub fn has_carrier(&self) -> bool {
        packet_carrier(self.fds.watcher.as_fd())
    }

    /// Uses sockets that another process opened. Until [`XdpIngress::resume`] and
    /// [`XdpEgress::resume`], that process may use them.
    ///
    /// # Errors
    /// They are not such sockets.
    pub fn adopt(handed: XdpHanded<OwnedFd>, shape: XdpShape) -> Result<Self, XdpError> {
        let fds = XdpHanded {
            sockets: handed.sockets.into_iter().map(Arc::new).collect(),
            senders: handed.senders.into_iter().map(Arc::new).collect(),
            memory: Arc::new(handed.memory),
            map: Arc::new(handed.map),
            link: handed.link.map(Arc::new),
            watcher: Arc::new(handed.watcher),
        };
        let what = || "take over AF_XDP sockets";
        if !matches!(shape.chunk_len, CHUNK_SHORT | CHUNK_LONG) {
            return Err(os(what)(io::ErrorKind::InvalidData.into()));
        }
        let mapping = map(fds.memory.as_fd(), fds.sockets.len(), shape.chunk_len);
        let is_removed = packet_link(fds.watcher.as_fd()) == PacketLink::Removed;
        let rings = (0..fds.sockets.len()).map(|queue| match is_removed {
            true => Rings::unused(),
            false => Rings::map(fds.sockets[queue].as_fd())?.sent_by(fds.sender(queue).as_fd()),
        });
        let rings = rings.collect::<io::Result<_>>().map_err(|error| match error.kind() {
            io::ErrorKind::ResourceBusy => XdpError::OldKernel,
            _ => os(what)(error),
        })?;
        Ok(Self { fds, mapping: Arc::new(mapping.map_err(os(what))?), rings, shape })
    }

    /// Its properties.
    pub fn shape(&self) -> &XdpShape {
        &self.shape
    }

    /// Its descriptors, to keep and to hand on.
    pub fn descriptors(&self) -> &XdpHanded<Arc<OwnedFd>> {
        &self.fds
    }

    /// Makes a queue's ingress. Its socket becomes readable when there are frames.
    pub fn ingress(&self, queue: usize, stats: Arc<IngressStats>) -> XdpIngress {
        let (socket, rings) = (Arc::clone(&self.fds.sockets[queue]), &self.rings[queue]);
        let rx = Consumer::new(rings.rx.0.clone(), rings.rx.1, RX_CHUNKS);
        XdpIngress::new(rx, rings.fill(), self.umem(queue), socket, stats)
    }

    /// Makes a queue's egress.
    ///
    /// # Errors
    /// Out of descriptors.
    pub fn egress(&self, queue: usize, stats: Arc<EgressStats>) -> io::Result<XdpEgress> {
        let (socket, rings) = (Arc::clone(self.fds.sender(queue)), &self.rings[queue]);
        let tx = Producer::new(rings.tx.0.clone(), rings.tx.1, TX_ENTRIES);
        let (area, at) = &rings.completion;
        let completion = Consumer::new(area.clone(), *at, TX_CHUNKS);
        XdpEgress::new(tx, completion, self.umem(queue), socket, &self.shape, stats)
    }

    fn umem(&self, queue: usize) -> Umem {
        let (mapping, chunk_len) = (Arc::clone(&self.mapping), self.shape.chunk_len);
        Umem { mapping, at: queue * bytes_of_queue(chunk_len) as usize, chunk_len }
    }

    /// State of the interface.
    pub fn link(&self) -> PacketLink {
        packet_link(self.fds.watcher.as_fd())
    }

    /// A descriptor with a pending error when the interface goes down or is removed, until
    /// [`packet_link`](Self::link) is known and [`clear_packet_error`](crate::clear_packet_error)
    /// is called.
    pub fn watcher(&self) -> BorrowedFd<'_> {
        self.fds.watcher.as_fd()
    }

    /// Number of frames that the kernel has dropped since a queue's socket was opened, because
    /// there was no chunk for them, or they did not fit one.
    pub fn losses(&self, queue: usize) -> u64 {
        let all = xdp_statistics(&self.fds.sockets[queue]);
        all.map_or(0, |all| all.rx_dropped + all.rx_ring_full.unwrap_or(0))
    }
}

/// Pins the map of a new program on an interface at `DIR/map`, and its attachment at `DIR/link`:
/// for ports whose switch may not load programs. It stays until `DIR/link` is removed.
///
/// # Errors
/// [`XdpError`] with what failed, where, and what to do.
pub fn pin_xdp(name: &str, netns: Option<&str>, queues: u16, dir: &Path) -> Result<(), XdpError> {
    let pin = || {
        let watcher = watch(name, None)?;
        let ifindex = index(watcher.as_fd(), name, netns)?;
        let Attached { map, link, .. } = attach(name, ifindex, queues.into(), 0)?;
        for (object, file) in [(&map, "map"), (&link, "link")] {
            let path = dir.join(file);
            let failed = || {
                let path = path.display();
                format!("pin {path} (the directory must be in a bpffs: mount -t bpf bpf DIR)")
            };
            let pinned = sys::pin(object.as_fd(), &c_path(&path)?).map_err(os(failed));
            if pinned.is_err() && file == "link" {
                // A map whose program is gone is of no use.
                let _ = std::fs::remove_file(dir.join("map"));
            }
            pinned?;
        }
        Ok(())
    };
    match netns {
        None => pin(),
        Some(netns) => in_netns(netns, pin)?,
    }
}

fn os<S: Into<String>>(what: impl Fn() -> S) -> impl Fn(io::Error) -> XdpError {
    move |error| XdpError::Os { what: what().into(), error }
}

fn c_path(path: &Path) -> Result<CString, XdpError> {
    let name = CString::new(path.as_os_str().as_bytes());
    name.map_err(|_| XdpError::BadMap { path: path.into(), what: "it has a zero byte".into() })
}

fn is_denied(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

/// Runs `work` again for a while if it fails because something is busy: a process that was just
/// killed releases its queues and its program a little later.
fn patiently<T>(work: impl Fn() -> Result<T, XdpError>) -> Result<T, XdpError> {
    let is_busy = |result: &Result<T, XdpError>| {
        matches!(result, Err(XdpError::HasProgram { .. } | XdpError::QueueBusy { .. }))
    };
    let mut result = work();
    for _ in 0..BUSY_TRIES {
        if !is_busy(&result) {
            break;
        }
        std::thread::sleep(BUSY_INTERVAL);
        result = work();
    }
    result
}

/// Bytes of the frames of a queue.
fn bytes_of_queue(chunk_len: u32) -> u64 {
    u64::from(RX_CHUNKS + TX_CHUNKS) * u64::from(chunk_len)
}

fn map(memory: BorrowedFd<'_>, queues: usize, chunk_len: u32) -> io::Result<Mapping> {
    let mapped = Mapping::new(memory, 0, queues as u64 * bytes_of_queue(chunk_len));
    mapped.map_err(|error| io::Error::other(error.to_string()))
}

/// Memory of the rings of a socket, and where words are in it.
struct Rings {
    rx: (Area, XdpRingOffset),
    fill: (Area, XdpRingOffset),
    tx: (Area, XdpRingOffset),
    completion: (Area, XdpRingOffset),
}

impl Rings {
    /// Maps those of a socket. Before Linux 6.4 only as long as it is not bound.
    fn map(socket: BorrowedFd<'_>) -> io::Result<Self> {
        let at = xdp_mmap_offsets(socket)?;
        Self::of(at, |offset, bytes| Mapping::exact(socket, offset, bytes, Access::Write))
    }

    /// With the TX ring of this socket in place of the first one's; mapped likewise.
    fn sent_by(mut self, sender: BorrowedFd<'_>) -> io::Result<Self> {
        let at = xdp_mmap_offsets(sender)?.tx;
        let map = |offset, bytes| Mapping::exact(sender, offset, bytes, Access::Write);
        self.tx = area(map, XDP_PGOFF_TX_RING, at, TX_ENTRIES, DESC_LEN)?;
        Ok(self)
    }

    /// In place of those of a socket that works no more: nothing comes, and nothing is sent.
    fn unused() -> io::Result<Self> {
        let at = XdpRingOffset { producer: 0, consumer: 64, desc: 128, flags: None };
        let at = XdpMmapOffsets { rx: at, tx: at, fr: at, cr: at };
        Self::of(at, |_, bytes| Mapping::memfd("pvswitch-rings", bytes))
    }

    fn of(
        at: XdpMmapOffsets,
        map: impl Fn(u64, u64) -> Result<Mapping, MapError>,
    ) -> io::Result<Self> {
        Ok(Self {
            rx: area(&map, XDP_PGOFF_RX_RING, at.rx, RX_CHUNKS, DESC_LEN)?,
            fill: area(&map, XDP_UMEM_PGOFF_FILL_RING, at.fr, FILL_ENTRIES, ADDRESS_LEN)?,
            tx: area(&map, XDP_PGOFF_TX_RING, at.tx, TX_ENTRIES, DESC_LEN)?,
            completion: area(&map, XDP_UMEM_PGOFF_COMPLETION_RING, at.cr, TX_CHUNKS, ADDRESS_LEN)?,
        })
    }

    fn fill(&self) -> Producer {
        Producer::new(self.fill.0.clone(), self.fill.1, FILL_ENTRIES)
    }
}

/// The `len` entries of a ring at an offset of its socket, and where words are in them.
fn area(
    map: impl Fn(u64, u64) -> Result<Mapping, MapError>,
    offset: u64,
    at: XdpRingOffset,
    len: u32,
    entry_len: usize,
) -> io::Result<(Area, XdpRingOffset)> {
    let bytes = ring::bytes(&at, len, entry_len);
    let mapping = map(offset, bytes).map_err(|error| match error {
        MapError::Os(error) => error,
        error => io::Error::other(error.to_string()),
    })?;
    let area = Area::of(&Arc::new(mapping), 0, bytes as usize);
    Ok((area.expect("it is writable, and begins with a page"), at))
}

/// A queue's part of the memory of frames: first the chunks to receive in, then those to send from.
struct Umem {
    mapping: Arc<Mapping>,
    /// Where it begins.
    at: usize,
    chunk_len: u32,
}

impl Umem {
    /// Address of the chunk that holds the byte at `addr`, if it is one to receive in.
    fn rx_chunk(&self, addr: u64) -> Option<u64> {
        let len = u64::from(self.chunk_len);
        (addr / len < u64::from(RX_CHUNKS)).then(|| addr - addr % len)
    }

    /// A received frame; `None`: it is not inside one such chunk.
    fn rx(&self, addr: u64, len: u32) -> Option<Seg<'_>> {
        let at = addr - self.rx_chunk(addr)?;
        let is_inside = at + u64::from(len) <= u64::from(self.chunk_len);
        is_inside.then(|| self.mapping.seg(self.at + addr as usize, len))?
    }

    /// Address of chunk number `chunk` to send from.
    fn tx_addr(&self, chunk: u32) -> u64 {
        u64::from(RX_CHUNKS + chunk) * u64::from(self.chunk_len)
    }

    /// Number of the chunk at `addr`; `None`: it is not one to send from.
    fn tx_chunk(&self, addr: u64) -> Option<u32> {
        let chunk = (addr / u64::from(self.chunk_len)).checked_sub(RX_CHUNKS.into())?;
        u32::try_from(chunk).ok().filter(|chunk| *chunk < TX_CHUNKS)
    }

    /// The bytes of that chunk.
    fn tx(&self, chunk: u32) -> SegMut<'_> {
        let at = self.at + self.tx_addr(chunk) as usize;
        self.mapping.seg_mut(at, self.chunk_len).expect("there are so many chunks")
    }
}

// ---- opening ----

/// Opens in the namespace of the calling thread.
fn open_here(options: &XdpOptions, blocked: bool) -> Result<(Xdp, Vec<String>), XdpError> {
    let XdpOptions { name, netns, queues, .. } = options;
    let queues = queues.get();
    let watcher = watch(name, Some(NO_PROTOCOL))?;
    let ifindex = index(watcher.as_fd(), name, netns.as_deref())?;
    let what = |what: &'static str| move || format!("{what} interface `{name}`");
    let mtu = crate::sys::if_mtu(&watcher, name).map_err(os(what("get the MTU of")))?;
    if mtu > MTU_MAX {
        return Err(XdpError::MtuTooLong { name: name.clone(), mtu, mtu_max: MTU_MAX });
    }
    let known = sys::receive_queues(watcher.as_fd(), name);
    if let Some(given) = known.filter(|given| *given < u32::from(queues)) {
        let (name, given) = (name.clone(), given as u16);
        return Err(XdpError::TooManyQueues { name, wanted: queues, given });
    }
    let sockets = (0..queues).map(|_| socket(name)).collect::<Result<Vec<_>, _>>()?;
    // Before sockets are bound: whether their program is generic decides how.
    let (map, link, hook) = match &options.map {
        Some(path) => (open_map(path, queues)?, None, sys::Hook::Driver),
        None => {
            let count = known.unwrap_or(1).max(queues.into());
            let attached = patiently(|| attach(name, ifindex, count, queues))?;
            (attached.map, Some(Arc::new(attached.link)), attached.hook)
        }
    };
    let is_generic = hook == sys::Hook::Generic;
    let long = mtu + HEADER_LEN + 2 * TAG_LEN + HEADROOM > CHUNK_SHORT;
    let chunk_len = if long { CHUNK_LONG } else { CHUNK_SHORT };
    let bytes = bytes_of_queue(chunk_len);
    let memory = ::os::memfd("pvswitch-frames", bytes * u64::from(queues));
    let memory = memory.map_err(os(what("allocate memory for frames of")))?;
    let mapping = self::map(memory.as_fd(), queues.into(), chunk_len);
    let mapping = mapping.map_err(os(what("map memory for frames of")))?;
    let mut shape = XdpShape {
        chunk_len,
        frame_max: mtu + HEADER_LEN + TAG_LEN,
        is_zero_copy: true,
        is_generic,
    };
    let mode =
        if is_generic && options.mode == XdpMode::Auto { XdpMode::Copy } else { options.mode };
    let mut rings = Vec::new();
    for (queue, socket) in (0..).zip(&sockets) {
        let at = mapping.seg(usize::from(queue) * bytes as usize, bytes as u32);
        let umem = at.expect("it has a part for each queue");
        rings.push(set_up(socket.as_fd(), name, umem, chunk_len)?);
        patiently(|| bind(socket.as_fd(), name, ifindex, queue, mode))?;
        let flags = xdp_options(socket);
        let flags = flags.map_err(|error| os(what("query AF_XDP options of"))(error.into()))?;
        shape.is_zero_copy &= flags.contains(XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY);
        if !blocked {
            sys::insert(map.as_fd(), queue.into(), socket.as_fd())
                .map_err(|error| map_error(error, options, queue))?;
        }
    }
    let mut senders = Vec::new();
    if !shape.is_zero_copy {
        let shared = (0..).zip(&sockets).zip(rings);
        let second = shared.map(|((queue, socket), rings)| {
            let (sender, rings) = sender(socket.as_fd(), rings, name, ifindex, queue)?;
            senders.push(Arc::new(sender));
            Ok(rings)
        });
        rings = second.collect::<Result<_, XdpError>>()?;
    }
    let notes = notes(watcher.as_fd(), options, known, &shape);
    let fds = XdpHanded {
        sockets: sockets.into_iter().map(Arc::new).collect(),
        senders,
        memory: Arc::new(memory),
        map: Arc::new(map),
        link,
        watcher: Arc::new(watcher),
    };
    Ok((Xdp { fds, mapping: Arc::new(mapping), rings, shape }, notes))
}

/// A packet socket that receives no frame, and knows the state of an interface if it is bound, by
/// a protocol.
fn watch(name: &str, protocol: Option<u16>) -> Result<OwnedFd, XdpError> {
    let what = || format!("watch interface `{name}`");
    let denied = || XdpError::NoSocket { name: name.into() };
    let failed = |error| if is_denied(&error) { denied() } else { os(what)(error) };
    let socket = packet::sys::socket().map_err(failed)?;
    let Some(protocol) = protocol else { return Ok(socket) };
    let Some(index) = packet::sys::index(socket.as_fd(), name).map_err(os(what))? else {
        return Ok(socket);
    };
    let is_ethernet = packet::sys::bind(socket.as_fd(), index, protocol).map_err(os(what))?;
    if !is_ethernet {
        return Err(TapError::NotEthernet { name: name.into() }.into());
    }
    // Frames to guests have other addresses than the interface.
    packet::sys::set_promiscuous(socket.as_fd(), index).map_err(os(what))?;
    Ok(socket)
}

fn index(socket: BorrowedFd<'_>, name: &str, netns: Option<&str>) -> Result<u32, XdpError> {
    let index = packet::sys::index(socket, name).map_err(os(|| format!("find interface `{name}`")));
    let none = || TapError::NoLink { name: name.into(), netns: netns.map(Into::into) };
    Ok(index?.ok_or_else(none)?.unsigned_abs())
}

fn socket(name: &str) -> Result<OwnedFd, XdpError> {
    let (family, flags) = (AddressFamily::XDP, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
    let socket = rustix::net::socket_with(family, SocketType::RAW, flags, None);
    socket.map_err(|error| match error {
        Errno::PERM | Errno::ACCESS => XdpError::NoSocket { name: name.into() },
        Errno::AFNOSUPPORT => XdpError::NoKernel,
        _ => os(|| format!("open an AF_XDP socket on interface `{name}`"))(error.into()),
    })
}

fn attach(name: &str, ifindex: u32, queues: u32, own: u16) -> Result<Attached, XdpError> {
    program::attach(ifindex, queues, own).map_err(|refused| match refused {
        Refused::Load(error) | Refused::Attach(error) if is_denied(&error) => {
            XdpError::NoProgram { name: name.into() }
        }
        Refused::Attach(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            XdpError::HasProgram { name: name.into() }
        }
        Refused::Load(error) => os(|| format!("load an XDP program for `{name}`"))(error),
        Refused::Attach(error) => os(|| format!("attach an XDP program to `{name}`"))(error),
    })
}

/// Opens a pinned map and checks that it has places for all queues.
fn open_map(path: &Path, queues: u16) -> Result<OwnedFd, XdpError> {
    let bad = |what: String| XdpError::BadMap { path: path.into(), what };
    let map = sys::pinned(&c_path(path)?).map_err(|error| match error.raw_os_error() {
        Some(libc::EPERM) => {
            bad("no permission to open it: make it this user's (chown), and have \
                                  kernel.unprivileged_bpf_disabled=0 before Linux 6.0"
                .into())
        }
        _ => bad(format!("cannot open it: {error}")),
    })?;
    // Other objects have a type there, too, but of their own kind.
    let info = sys::map_info(map.as_fd()).unwrap_or_default();
    if info.map_type != sys::MAP_TYPE_XSKMAP {
        return Err(bad("what is pinned there is not an XSKMAP".into()));
    }
    if info.max_entries < queues.into() {
        return Err(bad(format!("it has {} entries, not {queues}", info.max_entries)));
    }
    Ok(map)
}

fn map_error(error: io::Error, options: &XdpOptions, queue: u16) -> XdpError {
    let what = format!("cannot add the socket of queue {queue}: {error}");
    match &options.map {
        Some(path) => XdpError::BadMap { path: path.clone(), what },
        None => {
            XdpError::Os { what: format!("add a socket of `{}` to a map", options.name), error }
        }
    }
}

/// Gives a socket its memory and its rings, and all chunks to receive in to the kernel.
fn set_up(
    socket: BorrowedFd<'_>,
    name: &str,
    umem: Seg<'_>,
    chunk_len: u32,
) -> Result<Rings, XdpError> {
    let what = || format!("set up an AF_XDP socket on interface `{name}`");
    let memory = umem.as_iovec();
    let region = XdpUmemReg {
        addr: memory.iov_base.expose_provenance() as u64,
        len: memory.iov_len as u64,
        chunk_size: chunk_len,
        headroom: 0,
        flags: XdpUmemRegFlags::empty(),
        tx_metadata_len: 0,
    };
    set_xdp_umem_reg(socket, region).map_err(|error| match error {
        Errno::NOBUFS => XdpError::NoMemory { name: name.into(), bytes: region.len },
        _ => os(what)(error.into()),
    })?;
    let fail = |error: Errno| os(what)(error.into());
    set_xdp_umem_fill_ring_size(socket, FILL_ENTRIES).map_err(fail)?;
    set_xdp_umem_completion_ring_size(socket, TX_CHUNKS).map_err(fail)?;
    set_xdp_rx_ring_size(socket, RX_CHUNKS).map_err(fail)?;
    set_xdp_tx_ring_size(socket, TX_ENTRIES).map_err(fail)?;
    sys::set_send_bytes(socket, SEND_BYTES);
    let rings = Rings::map(socket).map_err(os(what))?;
    let mut fill = rings.fill();
    assert!(fill.room(RX_CHUNKS) >= RX_CHUNKS, "a new ring is empty");
    for chunk in 0..RX_CHUNKS {
        fill.put_address(u64::from(chunk) * u64::from(chunk_len));
    }
    fill.publish();
    Ok(rings)
}

fn bind(
    socket: BorrowedFd<'_>,
    name: &str,
    ifindex: u32,
    queue: u16,
    mode: XdpMode,
) -> Result<(), XdpError> {
    let flags = match mode {
        XdpMode::Auto => SocketAddrXdpFlags::empty(),
        XdpMode::Copy => SocketAddrXdpFlags::XDP_COPY,
        XdpMode::ZeroCopy => SocketAddrXdpFlags::XDP_ZEROCOPY,
    };
    let flags = flags | SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP;
    let address = SocketAddrXdp::new(flags, ifindex, queue.into());
    rustix::net::bind(socket, &address).map_err(|error| match error {
        Errno::BUSY => XdpError::QueueBusy { name: name.into(), queue },
        Errno::OPNOTSUPP if mode == XdpMode::ZeroCopy => XdpError::NoZeroCopy { name: name.into() },
        // virtio-net without `iommu_platform=on`.
        Errno::INVAL if mode == XdpMode::ZeroCopy && queue == 0 => {
            XdpError::NoZeroCopy { name: name.into() }
        }
        Errno::INVAL if queue > 0 => {
            XdpError::TooManyQueues { name: name.into(), wanted: queue + 1, given: queue }
        }
        _ => {
            let what = || format!("bind an AF_XDP socket to queue {queue} of interface `{name}`");
            os(what)(error.into())
        }
    })
}

/// A second socket for a queue, which sends from the memory of the first.
fn sender(
    socket: BorrowedFd<'_>,
    rings: Rings,
    name: &str,
    ifindex: u32,
    queue: u32,
) -> Result<(OwnedFd, Rings), XdpError> {
    let what = || format!("set up a second AF_XDP socket on queue {queue} of interface `{name}`");
    let sender = self::socket(name)?;
    set_xdp_tx_ring_size(&sender, TX_ENTRIES).map_err(|error| os(what)(error.into()))?;
    sys::set_send_bytes(sender.as_fd(), SEND_BYTES);
    let rings = rings.sent_by(sender.as_fd()).map_err(os(what))?;
    // All other properties are those of the first.
    let addr = SocketAddrXdp::new(SocketAddrXdpFlags::XDP_SHARED_UMEM, ifindex, queue);
    let address = SocketAddrXdpWithSharedUmem { addr, shared_umem_fd: socket };
    rustix::net::bind(&sender, &address).map_err(|error| os(what)(error.into()))?;
    Ok((sender, rings))
}

/// What is unusual, and what the interface does to frames before they are here.
fn notes(
    socket: BorrowedFd<'_>,
    options: &XdpOptions,
    queues: Option<u32>,
    shape: &XdpShape,
) -> Vec<String> {
    let (name, used) = (&options.name, u32::from(options.queues.get()));
    let mut notes = Vec::new();
    if shape.is_generic {
        notes.push(format!(
            "the driver of `{name}` does not support XDP programs: this one runs in generic \
             mode, which is slower"
        ));
    }
    if shape.is_generic && sys::merges_frames(socket, name) {
        notes.push(format!(
            "`{name}` merges received frames, and those that do not fit a chunk are lost: disable \
             that (ethtool -K {name} gro off)"
        ));
    }
    if let Some(queues) = queues.filter(|queues| *queues > used) {
        notes.push(format!(
            "`{name}` has {queues} receive queues and the port uses {used}: frames of the others \
             go to the host; set queues={queues}, or give it fewer (ethtool -L {name} combined \
             {used})"
        ));
    }
    if sys::is_veth(socket, name) {
        notes.push(format!(
            "`{name}` is a veth: the kernel at its other end must compute checksums, and insert \
             VLAN tags, itself (ethtool -K PEER tx off txvlan off)"
        ));
    } else if sys::removes_tags(socket, name) {
        notes.push(format!(
            "`{name}` removes VLAN tags from received frames, which then have none here: disable \
             that (ethtool -K {name} rxvlan off)"
        ));
    }
    notes
}
