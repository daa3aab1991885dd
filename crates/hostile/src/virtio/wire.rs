//! A front-end that says whatever a case wants: its socket, its memory, and its rings.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ring::virtq::{DriverQueue, Layout};
use rustix::fs::MemfdFlags;
use shm::{Area, GuestMemory, Mapping, Region};
use switch::vnet::VnetHdr;
use vhost_user::backend::PROTOCOL_FEATURES;
use vhost_user::message::{
    FrontendReq as R, HEADER_LEN, Header, MemRegion, Message, VringAddr, VringState,
};
use vhost_user::{feature, sys};

use crate::{Attack, Error, Ring};

/// First guest address.
pub const GUEST: u64 = 0x1_0000_0000;
/// First address of the front-end's own.
pub const USER: u64 = 0x7f00_0000_0000;
/// Bytes of its memory.
pub const LEN: u64 = 0x40_0000;
/// Descriptors of its rings.
pub const SIZE: u16 = 1024;
/// Where what it sends lies, and what it receives.
pub const BUFFERS: u64 = GUEST + 0x4_0000;
/// Which ring receives, and which one sends, as the guest sees it.
pub const RX: u32 = 0;
pub const TX: u32 = 1;

/// Descriptor flags.
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;
/// Of packed rings.
pub const AVAIL: u16 = 1 << 7;
pub const USED: u16 = 1 << 15;

/// What is agreed on.
pub const FEATURES: u64 = feature::VERSION_1
    | feature::CSUM
    | feature::HOST_TSO4
    | feature::MRG_RXBUF
    | feature::INDIRECT_DESC
    | feature::PROTOCOL_FEATURES;

/// Longest wait for an answer: where the control thread stands, an attacker waits with everyone.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// Between two attempts to connect.
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

/// Where a ring lies.
pub fn layout(ring: u32) -> Layout {
    let at = GUEST + u64::from(ring) * 0x1_0000;
    Layout { size: SIZE, desc: at, driver: at + 0x8000, device: at + 0xc000 }
}

/// The same in the front-end's own addresses.
pub fn addr(ring: u32) -> VringAddr {
    let Layout { desc, driver, device, .. } = layout(ring);
    let [desc, avail, used] = [desc, driver, device].map(|a| a - GUEST + USER);
    VringAddr { index: ring, flags: 0, desc, used, avail, log: 0 }
}

/// A file without a name that may be truncated.
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
    /// On a stream just connected.
    pub fn new(stream: UnixStream, packed: bool) -> Result<Self, Error> {
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
        Ok(Self { stream, file, mapping, memory, event: sys::eventfd()?, packed })
    }

    /// Sends; whether it went.
    pub fn send(&self, request: R, payload: Vec<u8>, ack: bool, fds: &[BorrowedFd<'_>]) -> bool {
        let message = Message::request(request, payload, ack).to_bytes();
        matches!(sys::send(self.stream.as_fd(), &message, fds), Ok(true))
    }

    /// Sends, and waits for the acknowledgement; whether it is yes. `None`: none came.
    pub fn ask(&self, request: R, payload: Vec<u8>, fds: &[BorrowedFd<'_>]) -> Option<bool> {
        if !self.send(request, payload, true, fds) {
            return None;
        }
        let payload = self.reply()?;
        Some(payload.iter().all(|byte| *byte == 0))
    }

    /// The next reply's payload.
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
            && self.ask(R::SET_PROTOCOL_FEATURES, bits, &[]) == Some(true)
            && self.ask(R::SET_FEATURES, (features | packed).to_ne_bytes().to_vec(), &[])
                == Some(true)
    }

    pub fn share(&self) -> bool {
        let table = MemRegion::table_to_bytes(&[whole()]);
        self.ask(R::SET_MEM_TABLE, table, &[self.file.as_fd()]) == Some(true)
    }

    /// Sets one ring up; the size, where it lies and its kick can be others'.
    pub fn ring(&self, ring: u32) -> bool {
        let number = u64::from(ring).to_ne_bytes().to_vec();
        let kick = [self.event.as_fd()];
        self.place(ring, addr(ring), SIZE)
            && self.ask(R::SET_VRING_KICK, number, &kick) == Some(true)
            && self.ask(R::SET_VRING_ENABLE, state(ring, 1), &[]) == Some(true)
    }

    /// All about a ring but its kick.
    pub fn place(&self, ring: u32, addr: VringAddr, size: u16) -> bool {
        self.ask(R::SET_VRING_NUM, state(ring, size.into()), &[]) == Some(true)
            && self.ask(R::SET_VRING_BASE, state(ring, self.base()), &[]) == Some(true)
            && self.ask(R::SET_VRING_ADDR, addr.to_bytes(), &[]) == Some(true)
    }

    /// Where a fresh ring starts.
    pub fn base(&self) -> u32 {
        if self.packed { 0x8000_8000 } else { 0 }
    }

    /// A driver's half that behaves, for a ring as [`ring`](Self::ring) sets it up.
    pub fn driver(&self, ring: u32) -> Option<DriverQueue> {
        let packed = if self.packed { feature::RING_PACKED } else { 0 };
        let features = vhost_user::ring_features(FEATURES | packed);
        DriverQueue::new(&self.memory, &layout(ring), features, self.base(), None).ok()
    }

    pub fn kick(&self) {
        sys::signal(self.event.as_fd());
    }

    /// A part of a ring, or of anything else.
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

    /// One chain on a fresh ring, its descriptors in order: address, length, flags.
    pub fn chain(&self, ring: u32, parts: &[(u64, u32, u16)]) {
        for (i, (addr, len, flags)) in parts.iter().enumerate().rev() {
            let i = i as u16;
            let last = if self.packed { i } else { i + 1 };
            self.describe(ring, i, *addr, *len, *flags, last);
        }
        self.offer(ring, 1);
    }

    /// Makes so many heads available on a split ring, and kicks. A packed ring's are already.
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

    /// A header and a UDP frame from `from` to `to` at `at`; bytes it has without the payload.
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

    /// Whether the switch has closed, waiting for it as long as `time`. What it sent is read away.
    pub fn is_closed(&self, time: Duration) -> bool {
        let mut bytes = [0; 4096];
        let mut waited = false;
        loop {
            match sys::recv(self.stream.as_fd(), &mut bytes, &mut Vec::new()) {
                Ok(sys::Received::Bytes(_)) => {}
                Ok(sys::Received::Nothing) if !waited => {
                    waited = true;
                    if !sys::wait_readable(self.stream.as_fd(), time).unwrap_or(true) {
                        return false;
                    }
                }
                Ok(sys::Received::Nothing) => return false,
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

    /// A connection to `path`; `None` when time is over.
    pub fn stream(&mut self, path: &Path) -> Option<UnixStream> {
        while self.waits() {
            if let Ok(stream) = sys::connect(path) {
                self.tally.connections += 1;
                return Some(stream);
            }
            self.rest(RETRY);
        }
        None
    }

    /// A connection to the first port, with nothing said yet.
    pub fn raw(&mut self) -> Result<Option<Raw>, Error> {
        let raw = self.raw_at(&self.target())?;
        self.begins();
        Ok(raw)
    }

    /// A connection to a port, with nothing said yet.
    pub fn raw_at(&mut self, target: &Path) -> Result<Option<Raw>, Error> {
        let packed = self.packed();
        self.stream(target).map(|stream| Raw::new(stream, packed)).transpose()
    }

    /// A connection with both rings running; `None` when time is over.
    pub fn started(&mut self) -> Result<Option<Raw>, Error> {
        while let Some(raw) = self.raw_at(&self.target())? {
            if raw.negotiate(FEATURES) && raw.share() && raw.ring(RX) && raw.ring(TX) {
                self.begins();
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

    /// Notes an answer to a request that should not be granted.
    pub fn answered(&mut self, answer: Option<bool>) -> bool {
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

    /// Breaks rings in all these ways in turn, each on a fresh connection, until time is over.
    pub fn break_rings(&mut self, ways: &[fn(&Raw)]) -> Result<(), Error> {
        for way in ways.iter().cycle() {
            let Some(raw) = self.started()? else { return Ok(()) };
            way(&raw);
            self.tally.attempts += 1;
            self.tally.ended += u64::from(raw.is_closed(Duration::from_millis(10)));
        }
        Ok(())
    }

    /// Tells the switch where we are: a frame to nobody.
    pub fn announce(&self, raw: &Raw, driver: &mut DriverQueue) {
        let len = raw.frame(BUFFERS, VnetHdr::NONE, self.peer, self.mac);
        driver.add(&[ring::virtq::Buf { addr: BUFFERS, len, write: false }]);
        driver.publish();
        raw.kick();
    }
}
