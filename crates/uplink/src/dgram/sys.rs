//! Batches of datagrams: recvmmsg and sendmmsg.
#![allow(unsafe_code)]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

use super::BATCH;

/// Descriptors that a datagram can carry (SCM_MAX_FD).
const FDS: usize = 253;
/// Words of control data of one datagram: a header, and the descriptors.
const CONTROL_WORDS: usize = size_of::<libc::cmsghdr>() / 8 + (FDS * 4).div_ceil(8);

/// A received datagram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Datagram {
    /// Bytes in its buffer.
    pub len: usize,
    /// Whether it was longer than that.
    pub is_cut: bool,
}

/// Receives up to [`BATCH`] datagrams without waiting, the first into the first `stride` bytes of
/// `buffers`, and so on. Their descriptors are added to `fds`: to close them may block. Returns
/// their number.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    buffers: &mut [u8],
    stride: usize,
    out: &mut [Datagram; BATCH],
    fds: &mut Vec<OwnedFd>,
) -> Result<usize, Errno> {
    let mut control = [const { MaybeUninit::<[u64; CONTROL_WORDS]>::uninit() }; BATCH];
    let mut iovecs = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; BATCH];
    // SAFETY: all-zero is a valid header, of no datagram.
    let mut headers: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
    let mut count = 0;
    for (i, buffer) in buffers.chunks_exact_mut(stride).take(BATCH).enumerate() {
        iovecs[i] = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: stride };
        let header = &mut headers[i].msg_hdr;
        header.msg_iov = &raw mut iovecs[i];
        header.msg_iovlen = 1;
        header.msg_control = control[i].as_mut_ptr().cast();
        header.msg_controllen = (CONTROL_WORDS * 8) as _;
        count += 1;
    }
    // The types of flags and lengths differ with the C library.
    let flags = (libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) as _;
    let len = count as libc::c_uint;
    let got = loop {
        let headers = headers.as_mut_ptr();
        // SAFETY: the first `len` headers name memory that lives, and is not used, during the call.
        let n = unsafe {
            libc::recvmmsg(socket.as_raw_fd(), headers, len, flags, std::ptr::null_mut())
        };
        match usize::try_from(n) {
            Ok(n) => break n,
            Err(_) => match last_error() {
                Errno::INTR => {}
                error => return Err(error),
            },
        }
    };
    for (header, out) in headers[..got].iter().zip(out) {
        let is_cut = header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
        *out = Datagram { len: header.msg_len as usize, is_cut };
        if header.msg_hdr.msg_controllen > 0 {
            take_descriptors(&header.msg_hdr, fds);
        }
    }
    Ok(got)
}

/// Takes the descriptors of a received message.
fn take_descriptors(header: &libc::msghdr, fds: &mut Vec<OwnedFd>) {
    // SAFETY: the kernel has filled in the header and its control data.
    let mut at = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !at.is_null() {
        // SAFETY: it is a header within the control data.
        let cmsg = unsafe { at.read_unaligned() };
        if (cmsg.cmsg_level, cmsg.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            let bytes = (cmsg.cmsg_len as usize).saturating_sub(size_of::<libc::cmsghdr>());
            // SAFETY: the data follow the header.
            let data = unsafe { libc::CMSG_DATA(at) }.cast::<libc::c_int>();
            for i in 0..bytes / size_of::<libc::c_int>() {
                // SAFETY: the kernel has written so many descriptors there.
                let fd = unsafe { data.add(i) };
                // SAFETY: as above.
                let fd = unsafe { fd.read_unaligned() };
                // SAFETY: they are new, and of nobody else.
                fds.push(unsafe { OwnedFd::from_raw_fd(fd) });
            }
        }
        // SAFETY: both are of the same message.
        at = unsafe { libc::CMSG_NXTHDR(header, at) };
    }
}

/// Sends datagrams without waiting, each a part of `bytes` that ends at one of `ends`, at most
/// [`BATCH`]. Returns the number sent; an error is that of the first one.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], ends: &[usize]) -> Result<usize, Errno> {
    let mut iovecs = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; BATCH];
    // SAFETY: all-zero is a valid header, of an empty datagram.
    let mut headers: [libc::mmsghdr; BATCH] = unsafe { std::mem::zeroed() };
    let mut start = 0;
    let ends = &ends[..ends.len().min(BATCH)];
    for (i, end) in ends.iter().enumerate() {
        let datagram = &bytes[start..*end];
        // The kernel reads it only.
        let at = datagram.as_ptr().cast_mut().cast();
        iovecs[i] = libc::iovec { iov_base: at, iov_len: datagram.len() };
        headers[i].msg_hdr.msg_iov = &raw mut iovecs[i];
        headers[i].msg_hdr.msg_iovlen = 1;
        start = *end;
    }
    let len = ends.len() as libc::c_uint;
    let flags = (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as _;
    loop {
        let headers = headers.as_mut_ptr();
        // SAFETY: the first `len` headers name memory that lives during the call.
        let n = unsafe { libc::sendmmsg(socket.as_raw_fd(), headers, len, flags) };
        match usize::try_from(n) {
            Ok(n) => return Ok(n),
            Err(_) => match last_error() {
                Errno::INTR => {}
                error => return Err(error),
            },
        }
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}
