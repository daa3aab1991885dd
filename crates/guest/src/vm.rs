//! A receiver with the part of its hypervisor in a live migration, in Cloud Hypervisor's order of
//! messages: split rings, memory with a dirty log, and a driver that posts each buffer again.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shm::{Area, GuestMemory, Mapping, Region, Seg};
use vhost_user::backend::PROTOCOL_FEATURES;
use vhost_user::feature;
use vhost_user::message::{
    FrontendReq as R, LogRegion, MemRegion, Message, VringAddr, VringState, parse_u64,
};

use crate::error::Error;

/// Bytes of its memory: rings, then a buffer for each descriptor of the receive ring.
pub const LEN: u64 = 0x20_0000;
/// Where its hypervisor has it.
pub const USER: u64 = 0x7000_0000;
/// Bytes of a page.
pub const PAGE: u64 = 4096;
const LOG_LEN: u64 = LEN / PAGE / 8;
/// Descriptors of a ring.
pub const SIZE: u16 = 256;
/// Address of the first buffer. Buffers cross pages, and so does the header before a frame.
pub const BUFFERS: u64 = 0x1_0000 + 0xfd0;
/// Bytes of a buffer.
pub const BUFFER_LEN: u64 = 1792;
/// First address after what only the driver writes: descriptors and the available ring of queue 0.
const DRIVERS: u64 = 0x3000;
/// Flag of a descriptor: the device writes.
const WRITE: u16 = 2;
/// Those that it accepts.
const FEATURES: u64 = feature::VERSION_1 | feature::MRG_RXBUF | feature::PROTOCOL_FEATURES;
/// Longest wait for the back-end to answer.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A machine with one connection.
#[derive(Debug)]
pub struct Vm {
    /// The connection to the back-end.
    pub front: UnixStream,
    /// Notifications of the guest, of both rings.
    pub kick: OwnedFd,
    memory: GuestMemory,
    mapping: Arc<Mapping>,
    call: OwnedFd,
    /// Elements of the used ring that the driver has read.
    used: u16,
}

/// Addresses of a queue's parts: descriptors, available ring, used ring.
pub fn parts(queue: u32) -> [u64; 3] {
    [0x1000, 0x2000, 0x3000].map(|part| part + u64::from(queue) * 0x4000)
}

impl Vm {
    /// Connects to a port.
    ///
    /// # Errors
    /// Nobody listens, or there is no memory.
    pub fn connect(socket: &Path) -> Result<Self, Error> {
        let failed =
            |error: io::Error| Error::Failed(format!("--connect {}: {error}", socket.display()));
        let front = UnixStream::connect(socket).map_err(failed)?;
        front.set_read_timeout(Some(TIMEOUT))?;
        let memory = |error: &dyn std::fmt::Display| Error::Failed(format!("memory: {error}"));
        let mapping = Mapping::memfd("guest", LEN).map_err(|error| memory(&error))?;
        let mapping = Arc::new(mapping);
        let region = Region {
            guest_addr: 0,
            user_addr: USER,
            len: LEN,
            offset: 0,
            mapping: Arc::clone(&mapping),
        };
        let memory = GuestMemory::new(vec![region]).map_err(|error| memory(&error))?;
        let (kick, call) = (os::eventfd()?, os::eventfd()?);
        Ok(Self { front, kick, memory, mapping, call, used: 0 })
    }

    fn area(&self, part: usize) -> Area {
        Area::new(&self.memory, parts(0)[part], 0x1000).expect("in its memory")
    }

    /// Index of the receive ring's used elements.
    pub fn used_idx(&self) -> u16 {
        self.area(2).sync_load(2, Ordering::Acquire)
    }

    /// Makes all receive buffers available.
    pub fn post(&self) {
        let desc = self.area(0);
        for id in 0..SIZE {
            let at = usize::from(id) * 16;
            desc.store_u64(at, BUFFERS + u64::from(id) * BUFFER_LEN);
            desc.store_u32(at + 8, BUFFER_LEN as u32);
            desc.store_u16(at + 12, WRITE);
        }
        self.give(0..SIZE);
    }

    /// Makes buffers available.
    fn give(&self, ids: impl IntoIterator<Item = u16>) {
        let avail = self.area(1);
        let mut idx = avail.load_u16(2);
        for id in ids {
            avail.store_u16(4 + usize::from(idx % SIZE) * 2, id);
            idx = idx.wrapping_add(1);
        }
        avail.sync_store(2, idx, Ordering::Release);
    }

    /// Takes received frames, each with its virtio-net header, and makes their buffers available
    /// again.
    ///
    /// # Errors
    /// A used element is none of its buffers.
    pub fn receive(&mut self, mut frame: impl FnMut(Seg<'_>)) -> Result<(), Error> {
        let (used, seen) = (self.area(2), self.used_idx());
        let mut taken = Vec::new();
        while self.used != seen {
            let at = 4 + usize::from(self.used % SIZE) * 8;
            let (id, len) = (used.load_u32(at), used.load_u32(at + 4));
            let id = u16::try_from(id).ok().filter(|id| *id < SIZE);
            let Some(id) = id.filter(|_| u64::from(len) <= BUFFER_LEN) else {
                return Err(Error::Failed(format!("used element of {len} bytes is no buffer")));
            };
            let buffer = BUFFERS + u64::from(id) * BUFFER_LEN;
            frame(self.memory.seg(buffer, len, &mut 0).expect("in its memory"));
            self.used = self.used.wrapping_add(1);
            taken.push(id);
        }
        if !taken.is_empty() {
            self.give(taken);
            os::signal(self.kick.as_fd());
        }
        Ok(())
    }

    /// Waits for a notification, at most so long.
    ///
    /// # Errors
    /// The connection has ended.
    pub fn wait(&self, most: Duration) -> Result<(), Error> {
        let mut fds =
            [PollFd::new(&self.call, PollFlags::IN), PollFd::new(&self.front, PollFlags::RDHUP)];
        let most = Timespec { tv_sec: 0, tv_nsec: i64::from(most.subsec_nanos()) };
        match poll(&mut fds, Some(&most)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(io::Error::from(error).into()),
        }
        if !fds[1].revents().is_empty() {
            return Err(Error::Failed("the switch closed the connection".into()));
        }
        if !fds[0].revents().is_empty() {
            os::drain(self.call.as_fd());
        }
        Ok(())
    }

    /// Sends a request and waits for its acknowledgement.
    ///
    /// # Errors
    /// It is refused, or the connection ends.
    pub fn ask(&self, request: R, payload: Vec<u8>, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let message = Message::request(request, payload, true).to_bytes();
        os::send(self.front.as_fd(), &message, fds)?;
        let mut reply = [0; 20];
        (&self.front).read_exact(&mut reply)?;
        match parse_u64(&reply[12..]) {
            Some(0) => Ok(()),
            _ => Err(Error::Failed(format!("{request:?}: refused"))),
        }
    }

    /// The same, of a request whose payload is a number.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn number(&self, request: R, number: u64, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        self.ask(request, number.to_ne_bytes().to_vec(), fds)
    }

    fn state(&self, request: R, index: u32, num: u32) -> Result<(), Error> {
        self.ask(request, VringState { index, num }.to_bytes(), &[])
    }

    /// Starts the rings: the base of one is its available index, also after a restore.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn start(&self) -> Result<(), Error> {
        let owner = Message::request(R::SET_OWNER, Vec::new(), false).to_bytes();
        os::send(self.front.as_fd(), &owner, &[])?;
        self.number(R::SET_PROTOCOL_FEATURES, PROTOCOL_FEATURES.bits(), &[])?;
        self.number(R::SET_FEATURES, FEATURES, &[])?;
        let region = MemRegion { guest_addr: 0, size: LEN, user_addr: USER, mmap_offset: 0 };
        let memory = self.mapping.fd().expect("a memfd");
        self.ask(R::SET_MEM_TABLE, MemRegion::table_to_bytes(&[region]), &[memory])?;
        for queue in [0, 1] {
            self.state(R::SET_VRING_NUM, queue, SIZE.into())?;
            let [desc, avail, used] = parts(queue).map(|at| USER + at);
            let addr = VringAddr { index: queue, flags: 0, desc, used, avail, log: 0 };
            self.ask(R::SET_VRING_ADDR, addr.to_bytes(), &[])?;
            let avail = Area::new(&self.memory, parts(queue)[1], 4).expect("in its memory");
            self.state(R::SET_VRING_BASE, queue, avail.load_u16(2).into())?;
            self.number(R::SET_VRING_CALL, queue.into(), &[self.call.as_fd()])?;
            self.number(R::SET_VRING_KICK, queue.into(), &[self.kick.as_fd()])?;
        }
        self.enable(true)
    }

    /// Announces an address, as QEMU has it done after a migration.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn announce(&self, mac: [u8; 6]) -> Result<(), Error> {
        self.ask(R::SEND_RARP, mac.into_iter().chain([0; 2]).collect(), &[])
    }

    /// Enables or disables both rings.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn enable(&self, on: bool) -> Result<(), Error> {
        [0, 1].into_iter().try_for_each(|queue| self.state(R::SET_VRING_ENABLE, queue, on.into()))
    }

    /// Has written pages marked in the log, or not.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn log(&self, on: bool) -> Result<(), Error> {
        self.number(R::SET_FEATURES, if on { FEATURES | feature::LOG_ALL } else { FEATURES }, &[])
    }

    /// Replaces the dirty log; returns the new one.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn new_log(&self) -> Result<Mapping, Error> {
        let log = Mapping::memfd("dirty-log", LOG_LEN)
            .map_err(|error| Error::Failed(format!("dirty log: {error}")))?;
        let payload = LogRegion { size: LOG_LEN, offset: 0 }.to_bytes();
        self.ask(R::SET_LOG_BASE, payload, &[log.fd().expect("a memfd")])?;
        Ok(log)
    }

    /// Copies all pages.
    pub fn copy_all(&self, to: &Self) -> usize {
        self.copy(0..LEN / PAGE, to)
    }

    /// Copies the pages that a log has marked; returns their number.
    pub fn copy_marked(&self, log: &Mapping, to: &Self) -> usize {
        self.copy(marked(log), to)
    }

    fn copy(&self, pages: impl Iterator<Item = u64>, to: &Self) -> usize {
        let copy = |page| {
            let seg = to.memory.seg_mut(page * PAGE, PAGE as u32, &mut 0);
            seg.expect("in its memory").write(&self.page(page));
        };
        pages.map(copy).count()
    }

    /// Pages whose contents differ from a copy's, without those that only the driver writes: a
    /// hypervisor finds its writes by page faults, not by the log.
    pub fn differences(&self, copy: &Self) -> Vec<u64> {
        let pages = DRIVERS / PAGE..LEN / PAGE;
        pages.filter(|page| self.page(*page) != copy.page(*page)).collect()
    }

    /// Continues as the driver of another machine, whose memory was copied to this one.
    pub fn restore(&mut self, from: &Self) {
        self.used = from.used;
    }

    fn page(&self, page: u64) -> [u8; PAGE as usize] {
        self.bytes(page * PAGE)
    }

    /// Bytes of its memory.
    pub fn bytes<const N: usize>(&self, addr: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory.seg(addr, N as u32, &mut 0).expect("in its memory").read(&mut bytes);
        bytes
    }
}

/// Pages that a log has marked.
pub fn marked(log: &Mapping) -> impl Iterator<Item = u64> {
    let mut bits = [0; LOG_LEN as usize];
    log.seg(0, LOG_LEN as u32).expect("its length").read(&mut bits);
    (0..LEN / PAGE).filter(move |page| bits[(page / 8) as usize] >> (page % 8) & 1 != 0)
}
