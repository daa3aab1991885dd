//! A receiver that migrates between two ports again and again, as a virtual machine does.
//!
//! It takes the part of the hypervisor too, in Cloud Hypervisor's order of messages: while the
//! guest receives, its memory is copied page by page, then pages that the dirty log marks, with a
//! new log for each pass; the rings are disabled, the last pages copied, and the rings started at
//! the other port from the copy. A page that differs then and was not marked is *missed*: a
//! hypervisor would have lost it.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;
use shm::{Area, GuestMemory, Mapping, Region};
use switch::time::Ns;
use vhost_user::backend::PROTOCOL_FEATURES;
use vhost_user::feature;
use vhost_user::message::{
    FrontendReq as R, LogRegion, MemRegion, Message, VringAddr, VringState, parse_u64,
};

use super::frame::is_whole;
use super::head_of;
use crate::error::Error;
use crate::guest::now;
use crate::ring::HDR_LEN;

/// Memory of the guest: rings, then a buffer for each descriptor of the receive ring.
const LEN: u64 = 0x20_0000;
const USER: u64 = 0x7000_0000;
const PAGE: u64 = 4096;
const LOG_LEN: u64 = LEN / PAGE / 8;
const SIZE: u16 = 256;
/// They cross pages, and the header before a frame does, too.
const BUFFERS: u64 = 0x1_0000 + 0xfd0;
const BUFFER_LEN: u64 = 1792;
/// First address after what the driver writes: descriptors and the available ring of queue 0. Its
/// own writes are no concern of the log: a hypervisor tracks a guest's writes by page faults.
const DRIVERS: u64 = 0x3000;
/// Flag of a descriptor: the device writes.
const WRITE: u16 = 2;
const FEATURES: u64 = feature::VERSION_1 | feature::MRG_RXBUF | feature::PROTOCOL_FEATURES;
/// Passes over marked pages while the guest runs.
const PASSES: u32 = 3;
/// Longest wait for the back-end to answer.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Longest sleep.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// Options of a migrating receiver.
#[derive(Clone, Debug)]
pub struct Migrate {
    /// Sockets of its two ports.
    pub targets: [String; 2],
    /// Its MAC address, announced at each start.
    pub mac: [u8; 6],
    /// Frames between two migrations, and received in each pass.
    pub every: u64,
    /// Compare each frame with its number.
    pub check: bool,
    /// Migrations; `None`: unlimited.
    pub migrations: Option<u64>,
    /// Duration; `None`: until `running` returns false.
    pub duration: Option<Duration>,
    /// Interval of reports.
    pub interval: Option<Duration>,
    /// Print totals as JSON.
    pub json: bool,
}

/// Counts of a run.
#[derive(Default)]
struct Totals {
    received: u64,
    corrupt: u64,
    migrations: u64,
    copied: u64,
    missed: u64,
}

impl Totals {
    fn print(&self, json: bool) {
        let Self { received, corrupt, migrations, copied, missed } = self;
        let value = json!({
            "mode": "migrate",
            "received_frames": received,
            "corrupt_frames": corrupt,
            "migrations": migrations,
            "copied_pages": copied,
            "missed_pages": missed,
        });
        match json {
            true => println!("{value}"),
            false => println!(
                "{migrations} migrations, {received} frames received, {corrupt} corrupt, {missed} \
                 pages written and not marked"
            ),
        }
    }
}

/// Receives, and migrates after each `every` frames, until `running` returns false.
///
/// # Errors
/// A port cannot be connected to, or ends the connection, or refuses a request.
pub fn run(options: &Migrate, running: &dyn Fn() -> bool) -> Result<(), Error> {
    let (started, mut totals) = (now(), Totals::default());
    let end = options.duration.map(|duration| started + Ns::from(duration));
    let mut due = options.interval.map(|interval| started + Ns::from(interval));
    let mut at = Vm::connect(&options.targets[0])?;
    at.post();
    at.start(options.mac)?;
    if !options.json {
        eprintln!("connected to {}", options.targets[0]);
    }
    let mut migration: Option<Migration> = None;
    let mut until = options.every;
    while running() && end.is_none_or(|end| now() < end) {
        at.receive(options.check, &mut totals)?;
        if due.is_some_and(|due| now() >= due) {
            totals.print(options.json);
            due = options.interval.map(|interval| now() + Ns::from(interval));
        }
        if options.migrations.is_some_and(|most| totals.migrations >= most) {
            break;
        }
        if totals.received < until {
            at.wait(SLEEP_MAX)?;
            continue;
        }
        until = totals.received + options.every;
        match migration.take() {
            None => {
                let to = (totals.migrations + 1) % 2;
                let to = Vm::connect(&options.targets[to as usize])?;
                migration = Some(Migration::begin(&at, to, &mut totals)?);
            }
            Some(mut under_way) if under_way.passes < PASSES => {
                under_way.pass(&at, &mut totals)?;
                migration = Some(under_way);
            }
            Some(under_way) => {
                at = under_way.end(at, &mut totals)?;
                at.start(options.mac)?;
                totals.migrations += 1;
            }
        }
    }
    totals.print(options.json);
    Ok(())
}

/// Copies of memory so far.
struct Migration {
    to: Vm,
    log: Mapping,
    passes: u32,
}

impl Migration {
    fn begin(from: &Vm, to: Vm, totals: &mut Totals) -> Result<Self, Error> {
        let log = from.new_log()?;
        from.number(R::SET_FEATURES, FEATURES | feature::LOG_ALL, &[])?;
        let pages = 0..LEN / PAGE;
        totals.copied += pages.end;
        pages.for_each(|page| from.copy(page, &to));
        Ok(Self { to, log, passes: 0 })
    }

    /// Copies the pages marked since the last pass.
    fn pass(&mut self, from: &Vm, totals: &mut Totals) -> Result<(), Error> {
        let log = std::mem::replace(&mut self.log, from.new_log()?);
        totals.copied += from.copy_marked(&log, &self.to);
        self.passes += 1;
        Ok(())
    }

    /// Stops the guest, and returns it as it is at its new place, not yet started there.
    fn end(mut self, from: Vm, totals: &mut Totals) -> Result<Vm, Error> {
        from.enable(false)?;
        self.pass(&from, totals)?;
        // Its connection ends once the copy is complete.
        let pages = (0..LEN / PAGE).filter(|page| from.page(*page) != self.to.page(*page));
        let (drivers, missed): (Vec<_>, Vec<_>) = pages.partition(|page| page * PAGE < DRIVERS);
        totals.missed += missed.len() as u64;
        for page in drivers.into_iter().chain(missed) {
            from.copy(page, &self.to);
        }
        (self.to.used, self.to.avail) = (from.used, from.avail);
        from.front.shutdown(std::net::Shutdown::Both)?;
        Ok(self.to)
    }
}

/// A virtual machine with one connection: split rings, and a driver that posts each buffer again.
struct Vm {
    front: UnixStream,
    mapping: Arc<Mapping>,
    memory: GuestMemory,
    kick: OwnedFd,
    call: OwnedFd,
    /// Elements of the used ring that were read, and entries of the available ring that were
    /// written.
    used: u16,
    avail: u16,
}

/// Addresses of a queue's parts: descriptors, available ring, used ring.
fn parts(queue: u32) -> [u64; 3] {
    [0x1000, 0x2000, 0x3000].map(|part| part + u64::from(queue) * 0x4000)
}

impl Vm {
    fn connect(socket: &str) -> Result<Self, Error> {
        let failed = |error: io::Error| Error::Failed(format!("--connect {socket}: {error}"));
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
        Ok(Self { front, mapping, memory, kick, call, used: 0, avail: 0 })
    }

    fn area(&self, part: usize) -> Area {
        Area::new(&self.memory, parts(0)[part], 0x1000).expect("in its memory")
    }

    /// Makes all receive buffers available.
    fn post(&mut self) {
        let desc = self.area(0);
        for id in 0..SIZE {
            let at = usize::from(id) * 16;
            desc.store_u64(at, BUFFERS + u64::from(id) * BUFFER_LEN);
            desc.store_u32(at + 8, BUFFER_LEN as u32);
            desc.store_u16(at + 12, WRITE);
            self.give(id);
        }
        self.area(1).sync_store(2, self.avail, Ordering::Release);
    }

    /// Writes an entry of the available ring.
    fn give(&mut self, id: u16) {
        self.area(1).store_u16(4 + usize::from(self.avail % SIZE) * 2, id);
        self.avail = self.avail.wrapping_add(1);
    }

    /// Takes received frames, and makes their buffers available again.
    fn receive(&mut self, check: bool, totals: &mut Totals) -> Result<(), Error> {
        let used = self.area(2);
        let seen = used.sync_load(2, Ordering::Acquire);
        if seen == self.used {
            return Ok(());
        }
        while self.used != seen {
            let at = 4 + usize::from(self.used % SIZE) * 8;
            let (id, len) = (used.load_u32(at), used.load_u32(at + 4));
            let id = u16::try_from(id).ok().filter(|id| *id < SIZE);
            let id = id.filter(|_| u64::from(len) <= BUFFER_LEN);
            let Some(id) = id else {
                return Err(Error::Failed(format!("used element of {len} bytes is no buffer")));
            };
            let buffer = BUFFERS + u64::from(id) * BUFFER_LEN;
            let seg = self.memory.seg(buffer, len, &mut 0).expect("in its memory");
            let (head, ours) = head_of(&[seg]);
            let seq =
                u64::from_le_bytes(std::array::from_fn(|i| head[HDR_LEN + super::HEADERS + 2 + i]));
            totals.received += u64::from(ours);
            totals.corrupt += u64::from(check && ours && !is_whole(&[seg], HDR_LEN, seq));
            self.used = self.used.wrapping_add(1);
            self.give(id);
        }
        self.area(1).sync_store(2, self.avail, Ordering::Release);
        os::signal(self.kick.as_fd());
        Ok(())
    }

    /// Waits for a notification, or that the connection ends.
    fn wait(&self, most: Duration) -> Result<(), Error> {
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
            let _ = rustix::io::read(&self.call, &mut [0; 8][..]);
        }
        Ok(())
    }

    /// Sends a request and waits for its acknowledgement.
    fn ask(&self, request: R, payload: Vec<u8>, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let message = Message::request(request, payload, true).to_bytes();
        os::send(self.front.as_fd(), &message, fds)?;
        let mut reply = [0; 20];
        (&self.front).read_exact(&mut reply)?;
        match parse_u64(&reply[12..]) {
            Some(0) => Ok(()),
            _ => Err(Error::Failed(format!("{request:?}: refused"))),
        }
    }

    fn number(&self, request: R, number: u64, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        self.ask(request, number.to_ne_bytes().to_vec(), fds)
    }

    fn state(&self, request: R, index: u32, num: u32) -> Result<(), Error> {
        self.ask(request, VringState { index, num }.to_bytes(), &[])
    }

    /// Starts the rings: the base of one is its available index, also after a restore. Then the
    /// address is announced, as QEMU has it done.
    fn start(&self, mac: [u8; 6]) -> Result<(), Error> {
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
            let base = if queue == 0 { self.avail } else { 0 };
            self.state(R::SET_VRING_BASE, queue, base.into())?;
            self.number(R::SET_VRING_CALL, queue.into(), &[self.call.as_fd()])?;
            self.number(R::SET_VRING_KICK, queue.into(), &[self.kick.as_fd()])?;
        }
        self.enable(true)?;
        let payload = mac.into_iter().chain([0; 2]).collect();
        self.ask(R::SEND_RARP, payload, &[])
    }

    fn enable(&self, on: bool) -> Result<(), Error> {
        [0, 1].into_iter().try_for_each(|queue| self.state(R::SET_VRING_ENABLE, queue, on.into()))
    }

    /// Replaces the dirty log; returns the new one.
    fn new_log(&self) -> Result<Mapping, Error> {
        let log = Mapping::memfd("dirty-log", LOG_LEN)
            .map_err(|error| Error::Failed(format!("dirty log: {error}")))?;
        let payload = LogRegion { size: LOG_LEN, offset: 0 }.to_bytes();
        self.ask(R::SET_LOG_BASE, payload, &[log.fd().expect("a memfd")])?;
        Ok(log)
    }

    /// Copies the pages that a log has marked; returns their number.
    fn copy_marked(&self, log: &Mapping, to: &Self) -> u64 {
        let mut bits = [0; LOG_LEN as usize];
        log.seg(0, LOG_LEN as u32).expect("its length").read(&mut bits);
        let marked = |page: &u64| bits[(page / 8) as usize] >> (page % 8) & 1 != 0;
        (0..LEN / PAGE).filter(marked).map(|page| self.copy(page, to)).count() as u64
    }

    fn page(&self, page: u64) -> [u8; PAGE as usize] {
        let mut bytes = [0; PAGE as usize];
        let seg = self.memory.seg(page * PAGE, PAGE as u32, &mut 0).expect("in its memory");
        seg.read(&mut bytes);
        bytes
    }

    fn copy(&self, page: u64, to: &Self) {
        let seg = to.memory.seg_mut(page * PAGE, PAGE as u32, &mut 0);
        seg.expect("in its memory").write(&self.page(page));
    }
}
