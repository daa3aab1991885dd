//! The XDP program of a port: redirects each frame to the socket of its queue.
//!
//! Eight instructions, in the words of the kernel's documentation (`bpf/standardization`). What
//! becomes of a frame if the map has no socket for its queue is an argument (Linux 5.3): one of the
//! port's queues is blocked, and its frames are dropped; those of the others are the host's.
//!
//! ```text
//!   r2 = *(u32 *)(r1 + 16)      xdp_md.rx_queue_index
//!   r3 = XDP_PASS
//!   if r2 >= queues goto +1     queues of the port, whose map is ours alone; else 0
//!   r3 = XDP_DROP
//!   r1 = map                    two slots: a 64-bit constant, replaced by the map
//!   call bpf_redirect_map
//!   exit                        with its result
//! ```

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::sys;

/// Offset of `rx_queue_index` in `struct xdp_md`.
const RX_QUEUE_INDEX: i16 = 16;
/// The verdict with which the kernel's own stack gets a frame.
const XDP_PASS: i32 = 2;
/// The one with which it is dropped.
const XDP_DROP: i32 = 1;
/// Number of the helper function `bpf_redirect_map`.
const REDIRECT_MAP: i32 = 51;
/// In place of a source register: the constant is the descriptor of a map.
const PSEUDO_MAP_FD: u8 = 1;

/// Encodes an instruction as it is in memory.
fn instruction(code: u8, to: u8, from: u8, offset: i16, constant: i32) -> u64 {
    let registers = if cfg!(target_endian = "big") { to << 4 | from } else { to | from << 4 };
    let ([a, b], [c, d, e, f]) = (offset.to_ne_bytes(), constant.to_ne_bytes());
    u64::from_ne_bytes([code, registers, a, b, c, d, e, f])
}

/// Loads the program for `map`. Frames of the first `own` queues without a socket are dropped.
pub(super) fn load(map: BorrowedFd<'_>, own: u16) -> io::Result<OwnedFd> {
    let program = [
        instruction(0x61, 2, 1, RX_QUEUE_INDEX, 0),
        instruction(0xb7, 3, 0, 0, XDP_PASS),
        instruction(0x35, 2, 0, 1, own.into()),
        instruction(0xb7, 3, 0, 0, XDP_DROP),
        instruction(0x18, 1, PSEUDO_MAP_FD, 0, map.as_raw_fd()),
        0,
        instruction(0x85, 0, 0, 0, REDIRECT_MAP),
        instruction(0x95, 0, 0, 0, 0),
    ];
    sys::load(&program, c"Dual MIT/GPL")
}

/// A loaded program on an interface. It is detached when `link` is closed.
pub(super) struct Attached {
    pub map: OwnedFd,
    pub link: OwnedFd,
    pub hook: sys::Hook,
}

/// Why there is no program on the interface.
pub(super) enum Refused {
    /// This process may not load one.
    Load(io::Error),
    /// The interface does not take it.
    Attach(io::Error),
}

/// Loads the program, for `queues` queues, and attaches it: in the driver, if that supports it, or
/// behind it. Frames of the first `own` queues never go to the host.
pub(super) fn attach(ifindex: u32, queues: u32, own: u16) -> Result<Attached, Refused> {
    let map = sys::create_map(queues).map_err(Refused::Load)?;
    let program = load(map.as_fd(), own).map_err(Refused::Load)?;
    let on = |hook| sys::attach(program.as_fd(), ifindex, hook);
    let (link, hook) = match on(sys::Hook::Driver) {
        Ok(link) => (link, sys::Hook::Driver),
        // Another program is there: the other hook is refused for the same reason.
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            return Err(Refused::Attach(error));
        }
        Err(_) => (on(sys::Hook::Generic).map_err(Refused::Attach)?, sys::Hook::Generic),
    };
    Ok(Attached { map, link, hook })
}
