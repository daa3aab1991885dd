//! A netlink socket that never waits.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_recv_buffer_size_force};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with,
};

use super::wire::{Heard, decode};

/// Room for messages that are not read yet, in bytes: thousands of changed addresses.
const QUEUED_LEN: usize = 4 << 20;
/// The kernel's dumps fill at most this many bytes per datagram.
const DATAGRAM_LEN: usize = 32 << 10;

/// The socket, which receives changes of interfaces and of neighbours.
pub(super) struct Netlink {
    fd: OwnedFd,
    buffer: Box<[u8]>,
}

impl Netlink {
    /// Opens it in the network namespace of this thread.
    pub(super) fn open() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        // Beyond the system's limit with CAP_NET_ADMIN only.
        if set_socket_recv_buffer_size_force(&fd, QUEUED_LEN).is_err() {
            set_socket_recv_buffer_size(&fd, QUEUED_LEN)?;
        }
        let groups = (libc::RTMGRP_LINK | libc::RTMGRP_NEIGH) as u32;
        bind(&fd, &SocketAddrNetlink::new(0, groups))?;
        Ok(Self { fd, buffer: vec![0; DATAGRAM_LEN].into() })
    }

    /// Sends requests, which the kernel runs before it returns.
    pub(super) fn send(&self, requests: &[u8]) -> io::Result<()> {
        send(&self.fd, requests, SendFlags::DONTWAIT).map(drop).map_err(Into::into)
    }

    /// Reads one datagram; false: there is none.
    ///
    /// # Errors
    /// Messages were lost.
    pub(super) fn receive(&mut self, heard: &mut Vec<(u32, Heard)>) -> io::Result<bool> {
        let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
        match recv(&self.fd, &mut self.buffer[..], flags) {
            Ok((_, len)) if len > self.buffer.len() => Err(Errno::MSGSIZE.into()),
            Ok((len, _)) => {
                decode(&self.buffer[..len], heard);
                Ok(true)
            }
            Err(Errno::AGAIN) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
