//! A front-end with arbitrary messages: its socket, its memory, and its rings.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use os::{Carries, Received};
use ring::virtq::{DriverQueue, Layout};
use rustix::fs::MemfdFlags;
use shm::{Area, GuestMemory, Mapping, Region};
use switch::vnet::VnetHdr;
use vhost_user::backend::PROTOCOL_FEATURES;
use vhost_user::feature;
use vhost_user::message::{
    FDS_MAX, FrontendReq as R, HEADER_LEN, Header, MemRegion, Message, VringAddr, VringState,
};

use crate::{Attack, Error, Ring};

/// First guest address.
pub const GUEST: u64 = 0x1_0000_0000;
/// First address in the front-end's address space.
pub const USER: u64 = 0x7f00_0000_0000;
/// Bytes of guest memory.
pub const LEN: u64 = 0x40_0000;
/// Size of the rings.
pub const SIZE: u16 = 1024;
/// Address of the buffers.
pub const BUFFERS: u64 = GUEST + 0x4_0000;
/// Index of the receive ring and of the transmit ring, as the guest sees it.
pub const RX: u32 = 0;
pub const TX: u32 = 1;

/// Descriptor flags.
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;
/// Descriptor flags of packed rings.
pub const AVAIL: u16 = 1 << 7;
pub const USED: u16 = 1 << 15;

/// Negotiated features.
pub const FEATURES: u64 = feature::VERSION_1
    | feature::CSUM
    | feature::HOST_TSO4
    | feature::MRG_RXBUF
    | feature::INDIRECT_DESC
    | feature::PROTOCOL_FEATURES;

/// Longest wait for a reply: while the control thread is busy, an attacker waits like every peer.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// Interval between two attempts to connect.
const RETRY: Duration = Duration::from_millis(5);

/// A connection with memory and rings.
pub struct Raw {
    pub stream: UnixStream,
    pub file: File,
    pub mapping: Arc<Mapping>,
    pub memory: GuestMemory,
    pub event: OwnedFd,
    pub packed: bool,
}

/// Layout of a ring.
pub fn layout(ring: u32) -> Layout {
    let at = GUEST + u64::from(ring) * 0x1_0000;
    Layout { size: SIZE, desc: at, driver: at + 0x8000, device: at + 0xc000 }
}

/// Addresses of a ring in the front-end's address space.
pub fn addr(ring: u32) -> VringAddr {
    let Layout { desc, driver, device, .. } = layout(ring);
    let [desc, avail, used] = [desc, driver, device].map(|a| a - GUEST + USER);
    VringAddr { index: ring, flags: 0, desc, used, avail, log: 0 }
}

/// Makes a memfd that can be truncated.
pub fn memfd(len: u64) -> Result<File, Error> {
    let file: File = rustix::fs::memfd_create("hostile", MemfdFlags::CLOEXEC)?.into();
    file.set_len(len)?;
    Ok(file)
}

/// All of the memory as one region.
pub fn whole() -> MemRegion {
    MemRegion { guest_addr: GUEST, size: LEN, user_addr: USER, mmap_offset: 0 }
}

pub fn state(index: u32, num: u32) -> Vec<u8> {
    VringState { index, num }.to_bytes()
}

impl Raw {
    /// Wraps a stream just connected.
    pub fn new(stream: UnixStream, packed: bool) -> Result<Self, Error> {
        // `reply` waits for its bytes.
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        let file = memfd(LEN)?;
        let other = |error: shm::MapError| Error::Os(std::io::Error::other(error.to_string()));
        let mapping = Arc::new(Mapping::new(file.as_fd(), 0, LEN).map_err(other)?);
        let region = Region {
            guest_addr: GUEST,
            user_addr: USER,
            len: LEN,
            offset: 0,
            mapping: Arc::clone(&mapping),
        };
        let memory = GuestMemory::new(vec![region]).expect("one region, well formed");
        Ok(Self { stream, file, mapping, memory, event: os::eventfd()?, packed })
    }

    /// Sends a message; returns whether that succeeded.
    pub fn send(&self, request: R, payload: Vec<u8>, ack: bool, fds: &[BorrowedFd<'_>]) -> bool {
        let message = Message::request(request, payload, ack).to_bytes();
        matches!(os::send(self.stream.as_fd(), &message, fds), Ok(true))
    }

    /// Sends a message and waits for its acknowledgement. `None`: no reply.
    pub fn request(&self, request: R, payload: Vec<u8>, fds: &[BorrowedFd<'_>]) -> Option<bool> {
        if !self.send(request, payload, true, fds) {
            return None;
        }
        let payload = self.reply()?;
        Some(payload.iter().all(|byte| *byte == 0))
    }

    /// Reads the next reply; returns its payload.
    pub fn reply(&self) -> Option<Vec<u8>> {
        let mut head = [0; HEADER_LEN];
        (&self.stream).read_exact(&mut head).ok()?;
        let size = usize::try_from(Header::parse(&head).size).ok().filter(|size| *size <= 8192)?;
        let mut payload = vec![0; size];
        (&self.stream).read_exact(&mut payload).ok()?;
        Some(payload)
    }

    pub fn negotiate(&self, features: u64) -> bool {
        let packed = if self.packed { feature::RING_PACKED } else { 0 };
        let bits = PROTOCOL_FEATURES.bits().to_ne_bytes().to_vec();
        self.send(R::SET_OWNER, Vec::new(), false, &[])
            && self.request(R::SET_PROTOCOL_FEATURES, bits, &[]) == Some(true)
            && self.request(R::SET_FEATURES, (features | packed).to_ne_bytes().to_vec(), &[])
                == Some(true)
    }

    pub fn share(&self) -> bool {
        let table = MemRegion::table_to_bytes(&[whole()]);
        self.request(R::SET_MEM_TABLE, table, &[self.file.as_fd()]) == Some(true)
    }

    /// Sets up one ring.
    pub fn ring(&self, ring: u32) -> bool {
        let number = u64::from(ring).to_ne_bytes().to_vec();
        let kick = [self.event.as_fd()];
        self.place(ring, addr(ring), SIZE)
            && self.request(R::SET_VRING_KICK, number, &kick) == Some(true)
            && self.request(R::SET_VRING_ENABLE, state(ring, 1), &[]) == Some(true)
    }

    /// Sets up a ring without its kick fd.
    pub fn place(&self, ring: u32, addr: VringAddr, size: u16) -> bool {
        self.request(R::SET_VRING_NUM, state(ring, size.into()), &[]) == Some(true)
            && self.request(R::SET_VRING_BASE, state(ring, self.base()), &[]) == Some(true)
            && self.request(R::SET_VRING_ADDR, addr.to_bytes(), &[]) == Some(true)
    }

    /// Base of a fresh ring.
    pub fn base(&self) -> u32 {
        if self.packed { 0x8000_8000 } else { 0 }
    }

    /// A correct driver half, for a ring set up by [`ring`](Self::ring).
    pub fn driver(&self, ring: u32) -> Option<DriverQueue> {
        let packed = if self.packed { feature::RING_PACKED } else { 0 };
        let features = vhost_user::ring_features(FEATURES | packed);
        DriverQueue::new(&self.memory, &layout(ring), features, self.base(), None).ok()
    }

    pub fn kick(&self) {
        os::signal(self.event.as_fd());
    }

    /// Guest memory at `at`.
    pub fn area(&self, at: u64, len: usize) -> Area {
        Area::new(&self.memory, at, len).expect("inside the memory")
    }

    /// Writes one descriptor. `last` is `next` of a split ring, `id` of a packed one.
    pub fn describe(&self, ring: u32, i: u16, addr: u64, len: u32, flags: u16, last: u16) {
        let table = self.area(layout(ring).desc, 16 * usize::from(SIZE));
        let at = 16 * usize::from(i);
        let flags = if self.packed { flags ^ AVAIL } else { flags };
        let (third, fourth) = if self.packed { (last, flags) } else { (flags, last) };
        table.store_u64(at, addr);
        table.store_u32(at + 8, len);
        table.store_u16(at + 12, third);
        table.sync_store(at + 14, fourth, Ordering::Release);
    }

    /// Writes one chain to a fresh ring. Each descriptor: address, length, flags.
    pub fn chain(&self, ring: u32, parts: &[(u64, u32, u16)]) {
        for (i, (addr, len, flags)) in parts.iter().enumerate().rev() {
            let i = i as u16;
            let last = if self.packed { i } else { i + 1 };
            self.describe(ring, i, *addr, *len, *flags, last);
        }
        self.offer(ring, 1);
    }

    /// Sets a split ring's available index, and kicks. On a packed ring it only kicks.
    pub fn offer(&self, ring: u32, idx: u16) {
        if !self.packed {
            let avail = self.area(layout(ring).driver, 6 + 2 * usize::from(SIZE));
            avail.sync_store(2, idx, Ordering::Release);
        }
        self.kick();
    }

    pub fn write(&self, at: u64, bytes: &[u8]) {
        if let Some(mut seg) = self.memory.seg_mut(at, bytes.len() as u32, &mut 0) {
            seg.write(bytes);
        }
    }

    /// Writes a header and a UDP frame at `at`; returns its length without the payload.
    pub fn frame(&self, at: u64, hdr: VnetHdr, to: [u8; 6], from: [u8; 6]) -> u32 {
        let mut bytes = hdr.bytes().to_vec();
        bytes.extend([0; 2]);
        bytes.extend([to, from].concat());
        bytes.extend([8, 0, 0x45, 0, 0, 46, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 9, 9, 9, 10, 9, 9, 8]);
        bytes.resize(72, 0);
        // A TCP header of 20 bytes.
        bytes[12 + 34 + 12] = 0x50;
        self.write(at, &bytes);
        72
    }

    /// Whether the switch closes the connection within `time`. Data it sent is discarded.
    pub fn is_closed(&self, time: Duration) -> bool {
        let mut bytes = [0; 4096];
        let mut waited = false;
        loop {
            match os::recv(self.stream.as_fd(), &mut bytes, &mut Vec::new(), FDS_MAX) {
                Ok(Received::Bytes(_)) => {}
                Ok(Received::Nothing) if !waited => {
                    waited = true;
                    if !os::wait_readable(self.stream.as_fd(), time).unwrap_or(true) {
                        return false;
                    }
                }
                Ok(Received::Nothing) => return false,
                _ => return true,
            }
        }
    }
}

impl Attack<'_> {
    /// Whether its virtqueues are packed.
    pub fn packed(&self) -> bool {
        self.ring == Ring::Packed
    }

    /// Connects to `path`; `None` when time is over.
    pub fn stream(&mut self, path: &Path) -> Option<UnixStream> {
        while self.may_wait() {
            if let Ok(socket) = os::connect(path, Carries::Stream) {
                self.tally.connections += 1;
                return Some(socket.into());
            }
            self.rest(RETRY);
        }
        None
    }

    /// Connects to the first port, without a message.
    pub fn raw(&mut self) -> Result<Option<Raw>, Error> {
        let raw = self.raw_at(&self.target())?;
        self.begin();
        Ok(raw)
    }

    /// Connects to a port, without a message.
    pub fn raw_at(&mut self, target: &Path) -> Result<Option<Raw>, Error> {
        let packed = self.packed();
        self.stream(target).map(|stream| Raw::new(stream, packed)).transpose()
    }

    /// Connects and starts both rings; `None` when time is over.
    pub fn connect_and_start(&mut self) -> Result<Option<Raw>, Error> {
        while let Some(raw) = self.raw_at(&self.target())? {
            if raw.negotiate(FEATURES) && raw.share() && raw.ring(RX) && raw.ring(TX) {
                self.begin();
                return Ok(Some(raw));
            }
            self.tally.turned_away += 1;
            self.rest(RETRY);
        }
        if self.tally.connections == 0 {
            return Err(Error::NoConnection(self.target()));
        }
        Ok(None)
    }

    /// Counts the reply to an invalid request.
    pub fn count_reply(&mut self, answer: Option<bool>) -> bool {
        self.tally.attempts += 1;
        match answer {
            Some(true) => true,
            Some(false) => {
                self.tally.refused += 1;
                true
            }
            None => {
                self.tally.ended += 1;
                false
            }
        }
    }

    /// Runs all `ways` in turn, each on a fresh connection, until time is over.
    pub fn break_rings(&mut self, ways: &[fn(&Raw)]) -> Result<(), Error> {
        for way in ways.iter().cycle() {
            let Some(raw) = self.connect_and_start()? else { return Ok(()) };
            way(&raw);
            self.tally.attempts += 1;
            self.tally.ended += u64::from(raw.is_closed(Duration::from_millis(10)));
        }
        Ok(())
    }

    /// Sends a frame to an unused address, so that the switch learns ours.
    pub fn announce(&self, raw: &Raw, driver: &mut DriverQueue) {
        let len = raw.frame(BUFFERS, VnetHdr::NONE, self.peer, self.mac);
        driver.add(&[ring::virtq::Buf { addr: BUFFERS, len, write: false }]);
        driver.publish();
        raw.kick();
    }
}
