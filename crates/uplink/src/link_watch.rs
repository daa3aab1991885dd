//! Notification of changes of interfaces.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};

use crate::in_netns;
use crate::tap::TapError;

/// Most messages dropped per call: many interfaces that change must not keep the caller.
const DROPS_MAX: usize = 64;

/// A descriptor that becomes readable when any interface of a network namespace changes: it is
/// made, removed, set up or down, or has its carrier lost or found.
///
/// It does not say what has changed: the caller asks for the state of the interfaces that it uses.
/// So no message is decoded, and none that is lost matters.
pub struct LinkWatch(OwnedFd);

impl LinkWatch {
    /// Begins to watch the interfaces of the namespace `netns`; `None`: the current one.
    ///
    /// # Errors
    /// [`TapError`]: there is no such namespace, or the system refuses.
    pub fn open(netns: Option<&str>) -> Result<Self, TapError> {
        let socket = match netns {
            None => open(),
            Some(netns) => in_netns(netns, open)?,
        };
        let os = |error| TapError::Os { what: "watch the interfaces of the host".into(), error };
        socket.map(Self).map_err(os)
    }

    /// Drops what was notified so far: later changes make the descriptor readable again.
    pub fn clear(&self) {
        let mut start = [0_u8; 16];
        for _ in 0..DROPS_MAX {
            match recv(&self.0, &mut start[..], RecvFlags::DONTWAIT) {
                // Lost ones are like those that were read.
                Ok(_) | Err(Errno::NOBUFS | Errno::INTR) => {}
                Err(_) => break,
            }
        }
    }
}

fn open() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
    bind(&socket, &SocketAddrNetlink::new(0, libc::RTMGRP_LINK as u32))?;
    Ok(socket)
}

impl AsFd for LinkWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
