//! System calls of packet sockets: their options, and batches of frames.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;
use switch::vnet::{GSO_NONE, NEEDS_CSUM, VnetHdr};

/// Where a frame begins in its buffer: as behind the header of a TAP.
pub(super) const FRAME_AT: usize = 12;
/// Bytes of the virtio-net header of a packet socket: without `num_buffers`.
const HDR_LEN: usize = VnetHdr::LEN;
/// Bytes of the MAC addresses, before a tag.
const ADDRESSES_LEN: usize = 12;
/// Bytes of a VLAN tag.
const TAG_LEN: usize = 4;
/// Tag protocol where the kernel names none: 802.1Q.
const TPID_DEFAULT: u16 = 0x8100;
/// Instruction of a socket filter: the number of bytes of a frame to keep.
const BPF_RET_K: u16 = 0x06;
/// Words of control data of a frame: a header, and `tpacket_auxdata`.
const CONTROL_WORDS: usize = 6;

/// Memory of a batch. Its pointers are valid during [`Batch::receive`] only.
#[derive(Default)]
pub(crate) struct Batch {
    headers: Vec<libc::mmsghdr>,
    parts: Vec<[libc::iovec; 2]>,
    control: Vec<[u64; CONTROL_WORDS]>,
}

impl Batch {
    /// Receives a frame into each of `buffers`, as many as there are: the header, and from
    /// [`FRAME_AT`] on the frame, into which its VLAN tag is inserted. The results of frames are
    /// their lengths with header; a frame that does not fit has that of its buffer.
    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        buffers: &[libc::iovec],
        results: &mut [Result<u32, Errno>],
    ) {
        self.prepare(buffers);
        let len = buffers.len() as libc::c_uint;
        // The types of flags and lengths differ with the C library.
        let flags = (libc::MSG_DONTWAIT | libc::MSG_TRUNC) as _;
        let (fd, headers) = (socket.as_raw_fd(), self.headers.as_mut_ptr());
        let got = loop {
            // SAFETY: `len` headers name memory that lives, and is not used, during the call: the
            // parts, the control data, and the buffers, which the running batch borrows.
            let n = unsafe { libc::recvmmsg(fd, headers, len, flags, std::ptr::null_mut()) };
            match usize::try_from(n) {
                Ok(n) => break n,
                Err(_) => match last_error() {
                    Errno::INTR => {}
                    error => {
                        results.fill(Err(Errno::AGAIN));
                        results[0] = Err(error);
                        return;
                    }
                },
            }
        };
        let received = buffers.iter().zip(&self.headers).take(got);
        for ((buffer, header), result) in received.zip(&mut *results) {
            let len = FRAME_AT + (header.msg_len as usize).saturating_sub(HDR_LEN);
            let len = match tag(&header.msg_hdr) {
                Some(tag) if len < buffer.iov_len - TAG_LEN => {
                    if len >= FRAME_AT + ADDRESSES_LEN {
                        insert(tag, buffer, len);
                    }
                    len + TAG_LEN
                }
                _ => len,
            };
            *result = Ok(len.min(buffer.iov_len) as u32);
        }
        results[got..].fill(Err(Errno::AGAIN));
    }

    fn prepare(&mut self, buffers: &[libc::iovec]) {
        // SAFETY: all-zero is a valid header, of no message.
        let none = || unsafe { std::mem::zeroed::<libc::mmsghdr>() };
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        if self.headers.len() < buffers.len() {
            self.headers.resize_with(buffers.len(), none);
            self.parts.resize(buffers.len(), [empty; 2]);
            self.control.resize(buffers.len(), [0; CONTROL_WORDS]);
        }
        for (i, buffer) in buffers.iter().enumerate() {
            let frame_at = buffer.iov_base.cast::<u8>().wrapping_add(FRAME_AT).cast();
            self.parts[i] = [
                libc::iovec { iov_base: buffer.iov_base, iov_len: HDR_LEN },
                libc::iovec { iov_base: frame_at, iov_len: buffer.iov_len - FRAME_AT },
            ];
            let header = &mut self.headers[i].msg_hdr;
            header.msg_iov = self.parts[i].as_mut_ptr();
            header.msg_iovlen = 2;
            header.msg_control = self.control[i].as_mut_ptr().cast();
            header.msg_controllen = (CONTROL_WORDS * 8) as _;
        }
    }
}

/// The VLAN tag of a received frame, which the kernel has taken out of it.
fn tag(header: &libc::msghdr) -> Option<[u8; TAG_LEN]> {
    // SAFETY: the kernel has filled in the header and its control data.
    let at = unsafe { libc::CMSG_FIRSTHDR(header) };
    if at.is_null() {
        return None;
    }
    // SAFETY: it is a header within the control data.
    let cmsg = unsafe { at.read_unaligned() };
    if (cmsg.cmsg_level, cmsg.cmsg_type) != (libc::SOL_PACKET, libc::PACKET_AUXDATA) {
        return None;
    }
    // SAFETY: the data follow the header.
    let data = unsafe { libc::CMSG_DATA(at) }.cast::<libc::tpacket_auxdata>();
    // SAFETY: the kernel has written so much there.
    let data = unsafe { data.read_unaligned() };
    if data.tp_status & libc::TP_STATUS_VLAN_VALID == 0 {
        return None;
    }
    let named = data.tp_status & libc::TP_STATUS_VLAN_TPID_VALID != 0;
    let tpid = if named { data.tp_vlan_tpid } else { TPID_DEFAULT };
    let ([a, b], [c, d]) = (tpid.to_be_bytes(), data.tp_vlan_tci.to_be_bytes());
    Some([a, b, c, d])
}

/// Inserts a tag into a frame of `len` bytes with header, after its addresses.
fn insert(tag: [u8; TAG_LEN], buffer: &libc::iovec, len: usize) {
    let end = len + TAG_LEN;
    assert!(end <= buffer.iov_len && len >= FRAME_AT + ADDRESSES_LEN, "checked by the caller");
    // SAFETY: the running batch borrows the buffer, which has `end` bytes, for writing; the kernel
    // has written `len` of them, and those after were initialized by its owner.
    let bytes = unsafe { std::slice::from_raw_parts_mut(buffer.iov_base.cast::<u8>(), end) };
    let at = FRAME_AT + ADDRESSES_LEN;
    bytes.copy_within(at..len, at + TAG_LEN);
    bytes[at..at + TAG_LEN].copy_from_slice(&tag);
    let Some(header) = bytes.first_chunk_mut() else { return };
    let mut hdr = VnetHdr::parse(header);
    // Positions in it are those without the tag.
    if hdr.flags & NEEDS_CSUM != 0 {
        hdr.csum_start = hdr.csum_start.saturating_add(TAG_LEN as u16);
    }
    if hdr.gso_type != GSO_NONE {
        hdr.hdr_len = hdr.hdr_len.saturating_add(TAG_LEN as u16);
    }
    *header = hdr.bytes();
}

/// A new socket, non-blocking, that receives nothing yet.
pub(crate) fn socket() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
    // SAFETY: the call takes numbers only.
    let fd = unsafe { libc::socket(libc::AF_PACKET, kind, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn set<T>(socket: BorrowedFd<'_>, level: i32, name: i32, value: &T) -> io::Result<()> {
    let (at, len) = (std::ptr::from_ref(value).cast(), size_of::<T>() as libc::socklen_t);
    // SAFETY: the kernel reads `len` bytes of `value`.
    let rc = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, at, len) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// `T` is made of integers.
fn get<T: Copy>(socket: BorrowedFd<'_>, name: i32, mut value: T) -> io::Result<T> {
    let mut len = size_of::<T>() as libc::socklen_t;
    let (at, len) = ((&raw mut value).cast(), &raw mut len);
    // SAFETY: the kernel writes at most `len` bytes to `value`, and the length.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_PACKET, name, at, len) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

/// Sets all options that precede [`bind`].
pub(crate) fn set_up(socket: BorrowedFd<'_>, receive: i32, send: i32) -> io::Result<()> {
    for name in [libc::PACKET_VNET_HDR, libc::PACKET_AUXDATA, libc::PACKET_IGNORE_OUTGOING] {
        set(socket, libc::SOL_PACKET, name, &1_i32)?;
    }
    let sizes = [
        (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF, receive),
        (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF, send),
    ];
    for (forced, limited, bytes) in sizes {
        // Beyond the system's limit only with CAP_NET_ADMIN.
        if set(socket, libc::SOL_SOCKET, forced, &bytes).is_err() {
            set(socket, libc::SOL_SOCKET, limited, &bytes)?;
        }
    }
    Ok(())
}

fn request(name: &[u8]) -> libc::ifreq {
    // SAFETY: all-zero is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The terminator stays.
    let last = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..last].iter_mut().zip(name) {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    request
}

fn ioctl(socket: BorrowedFd<'_>, code: libc::c_ulong, request: &mut libc::ifreq) -> io::Result<()> {
    // SAFETY: `code` is one of this file's, all of which take an ifreq.
    let rc = unsafe { libc::ioctl(socket.as_raw_fd(), code as libc::Ioctl, &raw mut *request) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Number of an interface; `None`: there is none of this name.
pub(crate) fn index(socket: BorrowedFd<'_>, name: &str) -> io::Result<Option<i32>> {
    let mut request = request(name.as_bytes());
    match ioctl(socket, libc::SIOCGIFINDEX, &mut request) {
        // SAFETY: SIOCGIFINDEX filled in the number.
        Ok(()) => Ok(Some(unsafe { request.ifr_ifru.ifru_ifindex })),
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Receives frames of an interface and of a protocol (`ETH_P_ALL`: any) from now on. Returns
/// whether these are Ethernet's.
pub(crate) fn bind(socket: BorrowedFd<'_>, index: i32, protocol: u16) -> io::Result<bool> {
    // SAFETY: all-zero is a valid address, of no interface.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = protocol.to_be();
    address.sll_ifindex = index;
    let len = size_of_val(&address) as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of the address.
    let rc = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(address_of(socket)?.sll_hatype == libc::ARPHRD_ETHER)
}

fn address_of(socket: BorrowedFd<'_>) -> io::Result<libc::sockaddr_ll> {
    // SAFETY: all-zero is a valid address, of no interface.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    let mut len = size_of_val(&address) as libc::socklen_t;
    let (at, len) = ((&raw mut address).cast(), &raw mut len);
    // SAFETY: the kernel writes at most `len` bytes to the address, and the length.
    let rc = unsafe { libc::getsockname(socket.as_raw_fd(), at, len) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(address) }
}

/// Receives frames to other stations, too, until the socket is closed.
pub(crate) fn set_promiscuous(socket: BorrowedFd<'_>, index: i32) -> io::Result<()> {
    let request = libc::packet_mreq {
        mr_ifindex: index,
        mr_type: libc::PACKET_MR_PROMISC as u16,
        mr_alen: 0,
        mr_address: [0; 8],
    };
    set(socket, libc::SOL_PACKET, libc::PACKET_ADD_MEMBERSHIP, &request)
}

/// Which sockets share the frames of an interface.
pub(crate) enum Fanout {
    /// This one alone, until others join.
    New,
    /// Those of this number.
    Join(u16),
}

/// Has sockets share frames, all of a flow to the same. Returns the number of their group.
pub(crate) fn fanout(socket: BorrowedFd<'_>, group: Fanout) -> io::Result<u16> {
    let how = libc::PACKET_FANOUT_HASH | libc::PACKET_FANOUT_FLAG_IGNORE_OUTGOING;
    let value = match group {
        Fanout::New => (how | libc::PACKET_FANOUT_FLAG_UNIQUEID) << 16,
        Fanout::Join(id) => u32::from(id) | how << 16,
    };
    set(socket, libc::SOL_PACKET, libc::PACKET_FANOUT, &value)?;
    Ok(get(socket, libc::PACKET_FANOUT, 0_u32)? as u16)
}

/// Has the kernel drop every frame that comes to a socket, before it is queued, or no longer.
pub(crate) fn set_blocked(socket: BorrowedFd<'_>, blocked: bool) -> io::Result<()> {
    if !blocked {
        return match set(socket, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, &0_i32) {
            // There was no filter.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            result => result,
        };
    }
    // `ret #0`: keep no byte of the frame.
    let mut program = [libc::sock_filter { code: BPF_RET_K, jt: 0, jf: 0, k: 0 }];
    let filter = libc::sock_fprog { len: 1, filter: program.as_mut_ptr() };
    set(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, &filter)
}

/// Reads a queued frame, and drops it. False: there is none.
pub(crate) fn drop_frame(socket: BorrowedFd<'_>) -> bool {
    // Without room for its header the kernel reports an error in place of the frame.
    let mut start = [0_u8; HDR_LEN];
    loop {
        match rustix::net::recv(socket, &mut start[..], rustix::net::RecvFlags::DONTWAIT) {
            // Its interface was down before, which is reported once; or it has no header.
            Ok(_) | Err(Errno::NETDOWN | Errno::INVAL) => return true,
            Err(Errno::INTR) => {}
            Err(_) => return false,
        }
    }
}

/// Flags (`IFF_`) of the interface of a socket.
///
/// # Errors
/// There is none any more.
pub(crate) fn flags(socket: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    let mut request = request(b"");
    request.ifr_ifru.ifru_ifindex = address_of(socket)?.sll_ifindex;
    // It may have another name than before.
    ioctl(socket, libc::SIOCGIFNAME, &mut request)?;
    ioctl(socket, libc::SIOCGIFFLAGS, &mut request)?;
    // SAFETY: SIOCGIFFLAGS filled in the flags.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    Ok(flags.into())
}

/// Frames dropped since the last call because the socket was full.
pub(crate) fn drops(socket: BorrowedFd<'_>) -> io::Result<u32> {
    let none = libc::tpacket_stats { tp_packets: 0, tp_drops: 0 };
    get(socket, libc::PACKET_STATISTICS, none).map(|stats| stats.tp_drops)
}

fn last_error() -> Errno {
    Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)
}
