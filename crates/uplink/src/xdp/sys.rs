//! System calls for XDP programs and their maps: bpf(2), and what ethtool knows of an interface.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Commands of bpf(2).
const MAP_CREATE: libc::c_long = 0;
const MAP_UPDATE_ELEM: libc::c_long = 2;
const MAP_DELETE_ELEM: libc::c_long = 3;
const PROG_LOAD: libc::c_long = 5;
const OBJ_PIN: libc::c_long = 6;
const OBJ_GET: libc::c_long = 7;
const OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const LINK_CREATE: libc::c_long = 28;
/// Type of a map of AF_XDP sockets.
pub(super) const MAP_TYPE_XSKMAP: u32 = 17;
const PROG_TYPE_XDP: u32 = 6;
/// What a link attaches: an XDP program to an interface.
const ATTACH_XDP: u32 = 37;
/// Requests of SIOCETHTOOL.
const GET_DRIVER: u32 = 0x3;
const GET_FLAGS: u32 = 0x25;
const GET_GRO: u32 = 0x2b;
const GET_CHANNELS: u32 = 0x3c;
/// Flag of `GET_FLAGS`: the interface takes VLAN tags out of received frames.
const FLAG_RX_VLAN: u32 = 1 << 8;

/// Where an XDP program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hook {
    /// In the driver (`XDP_FLAGS_DRV_MODE`).
    Driver = 1 << 2,
    /// Behind it, on the kernel's packet buffers (`XDP_FLAGS_SKB_MODE`).
    Generic = 1 << 1,
}

#[repr(C)]
#[derive(Default)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
}

#[repr(C)]
#[derive(Default)]
struct MapUpdate {
    map: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
#[derive(Default)]
struct ProgLoad {
    prog_type: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    ifindex: u32,
    expected_attach: u32,
}

#[repr(C)]
#[derive(Default)]
struct Object {
    path: u64,
    fd: u32,
    flags: u32,
}

#[repr(C)]
#[derive(Default)]
struct Info {
    fd: u32,
    len: u32,
    info: u64,
}

/// The first fields of `bpf_map_info`; those of other objects differ.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MapInfo {
    pub map_type: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    pub max_entries: u32,
}

#[repr(C)]
#[derive(Default)]
struct LinkCreate {
    prog: u32,
    ifindex: u32,
    attach: u32,
    flags: u32,
}

fn number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().unsigned_abs()
}

/// Address of something that the kernel reads or writes during a call.
fn address<T: ?Sized>(of: *const T) -> u64 {
    of.cast::<u8>().expose_provenance() as u64
}

/// One call. `attributes` is that of `command`, and all that it refers to lives.
fn bpf<T>(command: libc::c_long, attributes: &mut T) -> io::Result<i32> {
    let at = std::ptr::from_mut(attributes);
    // SAFETY: the kernel reads and writes at most `size_of::<T>()` bytes of the attributes, and
    // what they refer to, which the callers below borrow during the call.
    let rc = unsafe { libc::syscall(libc::SYS_bpf, command, at, size_of::<T>()) };
    i32::try_from(rc).ok().filter(|rc| *rc >= 0).ok_or_else(io::Error::last_os_error)
}

/// One call that returns a new descriptor.
fn bpf_fd<T>(command: libc::c_long, attributes: &mut T) -> io::Result<OwnedFd> {
    let fd = bpf(command, attributes)?;
    // SAFETY: the descriptor is new, and nobody else's. bpf(2) sets close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes a map of AF_XDP sockets, for queues 0 to `queues`.
pub(super) fn create_map(queues: u32) -> io::Result<OwnedFd> {
    let (map_type, key_size, value_size) = (MAP_TYPE_XSKMAP, 4, 4);
    bpf_fd(MAP_CREATE, &mut MapCreate { map_type, key_size, value_size, max_entries: queues })
}

/// Has the map redirect frames of `queue` to `socket`, until that is closed.
pub(super) fn insert(map: BorrowedFd<'_>, queue: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
    let value = number(socket);
    let (key, value) = (address(&raw const queue), address(&raw const value));
    bpf(MAP_UPDATE_ELEM, &mut MapUpdate { map: number(map), key, value, ..MapUpdate::default() })?;
    Ok(())
}

/// Has the map redirect no frames of `queue` any more.
pub(super) fn remove(map: BorrowedFd<'_>, queue: u32) -> io::Result<()> {
    let key = address(&raw const queue);
    let entry = &mut MapUpdate { map: number(map), key, ..MapUpdate::default() };
    match bpf(MAP_DELETE_ELEM, entry) {
        // It did not redirect them.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        result => result.map(drop),
    }
}

/// Loads an XDP program.
pub(super) fn load(instructions: &[u64], license: &CStr) -> io::Result<OwnedFd> {
    bpf_fd(
        PROG_LOAD,
        &mut ProgLoad {
            prog_type: PROG_TYPE_XDP,
            count: instructions.len() as u32,
            instructions: address(instructions),
            license: address(license),
            name: *b"pvswitch\0\0\0\0\0\0\0\0",
            expected_attach: ATTACH_XDP,
            ..ProgLoad::default()
        },
    )
}

/// Attaches an XDP program to an interface, until the returned link is closed.
pub(super) fn attach(program: BorrowedFd<'_>, ifindex: u32, hook: Hook) -> io::Result<OwnedFd> {
    let (prog, attach, flags) = (number(program), ATTACH_XDP, hook as u32);
    bpf_fd(LINK_CREATE, &mut LinkCreate { prog, ifindex, attach, flags })
}

/// Gives an object a name in a bpffs.
pub(super) fn pin(object: BorrowedFd<'_>, path: &CStr) -> io::Result<()> {
    let path = address(path);
    bpf(OBJ_PIN, &mut Object { path, fd: number(object), flags: 0 }).map(drop)
}

/// Opens the object of this name.
pub(super) fn pinned(path: &CStr) -> io::Result<OwnedFd> {
    bpf_fd(OBJ_GET, &mut Object { path: address(path), ..Object::default() })
}

/// What the kernel knows of a map.
pub(super) fn map_info(map: BorrowedFd<'_>) -> io::Result<MapInfo> {
    let mut info = MapInfo::default();
    let (len, at) = (size_of::<MapInfo>() as u32, address(&raw mut info));
    bpf(OBJ_GET_INFO_BY_FD, &mut Info { fd: number(map), len, info: at })?;
    Ok(info)
}

// ---- ethtool ----

/// Sends a request, in place; false: the interface has nothing to say to it.
fn ethtool<T>(socket: BorrowedFd<'_>, name: &str, request: &mut T) -> bool {
    // SAFETY: all-zero is a valid ifreq.
    let mut ifreq: libc::ifreq = unsafe { std::mem::zeroed() };
    // The terminator stays.
    let last = ifreq.ifr_name.len() - 1;
    for (to, from) in ifreq.ifr_name[..last].iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    ifreq.ifr_ifru.ifru_data = std::ptr::from_mut(request).cast();
    let code = libc::SIOCETHTOOL as libc::Ioctl;
    // SAFETY: the kernel reads and writes the structure of the request, which is `T`.
    unsafe { libc::ioctl(socket.as_raw_fd(), code, &raw mut ifreq) == 0 }
}

/// Number of receive queues in use; `None`: the driver does not say, as those with one.
pub(super) fn receive_queues(socket: BorrowedFd<'_>, name: &str) -> Option<u32> {
    // cmd; max_rx, max_tx, max_other, max_combined; the same, in use
    let mut channels = [0_u32; 9];
    channels[0] = GET_CHANNELS;
    let is_known = ethtool(socket, name, &mut channels);
    is_known.then(|| channels[5].saturating_add(channels[8])).filter(|queues| *queues > 0)
}

fn value(socket: BorrowedFd<'_>, name: &str, what: u32) -> u32 {
    let mut request = [what, 0];
    if ethtool(socket, name, &mut request) { request[1] } else { 0 }
}

/// Whether the interface takes VLAN tags out of received frames, where no XDP program sees them.
pub(super) fn removes_tags(socket: BorrowedFd<'_>, name: &str) -> bool {
    value(socket, name, GET_FLAGS) & FLAG_RX_VLAN != 0
}

/// Whether received frames are merged before a generic XDP program sees them.
pub(super) fn merges_frames(socket: BorrowedFd<'_>, name: &str) -> bool {
    value(socket, name, GET_GRO) != 0
}

/// Whether the interface is one end of a veth.
pub(super) fn is_veth(socket: BorrowedFd<'_>, name: &str) -> bool {
    #[repr(C)]
    struct Driver {
        command: u32,
        name: [u8; 32],
        rest: [u8; 160],
    }
    let mut driver = Driver { command: GET_DRIVER, name: [0; 32], rest: [0; 160] };
    ethtool(socket, name, &mut driver) && driver.name.starts_with(b"veth\0")
}

/// Permits so many bytes of frames that the interface has not sent yet.
pub(super) fn set_send_bytes(socket: BorrowedFd<'_>, bytes: i32) {
    // Beyond the system's limit only with CAP_NET_ADMIN. Whatever is permitted suffices.
    for name in [libc::SO_SNDBUF, libc::SO_SNDBUFFORCE] {
        let (at, len) = (std::ptr::from_ref(&bytes).cast(), size_of::<i32>() as libc::socklen_t);
        // SAFETY: the kernel reads `len` bytes of `bytes`.
        unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, at, len) };
    }
}
