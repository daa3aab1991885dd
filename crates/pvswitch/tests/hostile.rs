//! A hostile front-end affects its own port only. Beside each attack another pair of ports keeps
//! its traffic, and the log has one line for it.

mod common;

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Bystanders, Dir, Gen, Switch, wait_for};
use ring::virtq::{Buf, DriverQueue, Features, Layout};
use rustix::fs::{MemfdFlags, memfd_create};
use shm::{Area, GuestMemory, Mapping, Region};
use switch::vnet::{GSO_TCPV4, NEEDS_CSUM, VnetHdr};
use vhost_user::backend::PROTOCOL_FEATURES;
use vhost_user::feature;
use vhost_user::message::{FrontendReq as R, MemRegion, Message, VringAddr, VringState};

const GUEST: u64 = 0x1_0000_0000;
const USER: u64 = 0x7f00_0000_0000;
const LEN: u64 = 0x10_0000;
const SIZE: u16 = 256;
/// Address of frames.
const BUFFERS: u64 = GUEST + 0x8_0000;

fn layout(ring: u32) -> Layout {
    let at = GUEST + u64::from(ring) * 0x4000;
    Layout { size: SIZE, desc: at, driver: at + 0x1000, device: at + 0x2000 }
}

fn addr(ring: u32) -> VringAddr {
    let Layout { desc, driver, device, .. } = layout(ring);
    let [desc, avail, used] = [desc, driver, device].map(|a| a - GUEST + USER);
    VringAddr { index: ring, flags: 0, desc, used, avail, log: 0 }
}

/// A front-end that sends arbitrary messages.
struct Raw {
    stream: UnixStream,
    /// Its memory; a memfd created by `Mapping` cannot be truncated.
    file: File,
    memory: GuestMemory,
    event: OwnedFd,
}

impl Raw {
    fn connect(switch: &Switch, dir: &Dir, name: &str) -> Self {
        if switch.port("show", name).is_null() {
            switch.json(&["add-port", &dir.port(name, "")]);
        }
        let stream = UnixStream::connect(dir.path(name)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        // Without seals: it is to be truncated.
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("hostile", flags).unwrap());
        file.set_len(LEN).unwrap();
        let mapping = Arc::new(Mapping::new(file.as_fd(), 0, LEN).unwrap());
        let region = Region { guest_addr: GUEST, user_addr: USER, len: LEN, offset: 0, mapping };
        let memory = GuestMemory::new(vec![region]).unwrap();
        Self { stream, file, memory, event: os::eventfd().unwrap() }
    }

    /// Connects, negotiates, shares memory, and enables both rings.
    fn started(switch: &Switch, dir: &Dir, name: &str) -> Self {
        let raw = Self::connect(switch, dir, name);
        raw.negotiate();
        raw.share();
        (0..2).for_each(|ring| raw.ring(ring));
        switch.wait_up(name, true);
        raw
    }

    /// Sends a message; false when the switch has closed the connection.
    fn send(&self, request: R, payload: Vec<u8>, ack: bool, fds: &[BorrowedFd<'_>]) -> bool {
        let message = Message::request(request, payload, ack).to_bytes();
        os::send(self.stream.as_fd(), &message, fds).is_ok()
    }

    /// Sends a message and waits for the acknowledgement, 0 for success; `None`: connection closed.
    fn ask(&self, request: R, payload: Vec<u8>, fds: &[BorrowedFd<'_>]) -> Option<u64> {
        self.send(request, payload, true, fds);
        let mut reply = [0; 20];
        (&self.stream).read_exact(&mut reply).ok()?;
        Some(u64::from_ne_bytes(*reply.last_chunk().unwrap()))
    }

    fn must(&self, request: R, payload: Vec<u8>, fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.ask(request, payload, fds), Some(0), "{request:?}");
    }

    fn negotiate(&self) {
        assert!(self.send(R::SET_OWNER, Vec::new(), false, &[]));
        let bits = PROTOCOL_FEATURES.bits().to_ne_bytes().to_vec();
        self.must(R::SET_PROTOCOL_FEATURES, bits, &[]);
        let features = feature::VERSION_1 | feature::CSUM | feature::HOST_TSO4;
        let features = features | feature::INDIRECT_DESC | feature::PROTOCOL_FEATURES;
        self.must(R::SET_FEATURES, features.to_ne_bytes().to_vec(), &[]);
    }

    fn share(&self) {
        assert_eq!(self.share_of(&self.file, LEN), Some(0));
    }

    /// Shares `size` bytes of `file` as all its memory. Returns the acknowledgement.
    fn share_of(&self, file: &File, size: u64) -> Option<u64> {
        let region = MemRegion { guest_addr: GUEST, size, user_addr: USER, mmap_offset: 0 };
        self.ask(R::SET_MEM_TABLE, MemRegion::table_to_bytes(&[region]), &[file.as_fd()])
    }

    fn ring(&self, ring: u32) {
        let state = |num| VringState { index: ring, num }.to_bytes();
        let number = u64::from(ring).to_ne_bytes().to_vec();
        self.must(R::SET_VRING_NUM, state(u32::from(SIZE)), &[]);
        self.must(R::SET_VRING_BASE, state(0), &[]);
        self.must(R::SET_VRING_ADDR, addr(ring).to_bytes(), &[]);
        self.must(R::SET_VRING_KICK, number, &[self.event.as_fd()]);
        self.must(R::SET_VRING_ENABLE, state(1), &[]);
    }

    fn kick(&self) {
        os::signal(self.event.as_fd());
    }

    fn desc(&self, ring: u32) -> Area {
        Area::new(&self.memory, layout(ring).desc, 16 * usize::from(SIZE)).unwrap()
    }

    /// Writes a descriptor of a ring.
    fn describe(&self, ring: u32, at: usize, addr: u64, len: u32, flags: u16, next: u16) {
        let desc = self.desc(ring);
        desc.store_u64(16 * at, addr);
        desc.store_u32(16 * at + 8, len);
        desc.store_u16(16 * at + 12, flags);
        desc.store_u16(16 * at + 14, next);
    }

    /// Makes descriptors 0 to `idx` - 1 available on a ring, and kicks.
    fn offer(&self, ring: u32, idx: u16) {
        let avail =
            Area::new(&self.memory, layout(ring).driver, 6 + 2 * usize::from(SIZE)).unwrap();
        avail.sync_store(2, idx, std::sync::atomic::Ordering::Release);
        self.kick();
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        self.memory.seg_mut(at, bytes.len() as u32, &mut 0).unwrap().write(bytes);
    }

    /// Waits until the switch has closed the connection.
    fn closed(&self) {
        let mut bytes = [0; 4096];
        loop {
            match (&self.stream).read(&mut bytes) {
                Ok(0) => return,
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return,
                Err(e) => panic!("not closed: {e}"),
            }
        }
    }
}

/// Two ports with traffic between them, and a switch with room for more.
fn rig(dir: &Dir) -> (Switch, Bystanders) {
    let switch = Switch::start(dir, &[], &[dir.port("x", ""), dir.port("y", "")]);
    let others = Bystanders::start(&switch, dir, "x", "y");
    (switch, others)
}

/// Number of lines of the log that contain `what`.
fn lines(switch: &Switch, what: &str) -> usize {
    switch.log().lines().filter(|line| line.contains(what)).count()
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Opens connections until the switch has no descriptor left.
#[test]
fn switch_out_of_descriptors_resumes_when_some_are_free() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ""), dir.port("b", "")]);
    let pid = rustix::process::Pid::from_child(&switch.process.0);
    let limit = rustix::process::Rlimit { current: Some(40), maximum: Some(40) };
    rustix::process::prlimit(Some(pid), rustix::process::Resource::Nofile, limit).unwrap();
    let mut clients = Vec::new();
    wait_for("no descriptor to be left", || {
        clients.push(UnixStream::connect(switch.control()).unwrap());
        switch.log().contains("accept")
    });
    // Logged once per second, not in a loop.
    let lines = switch.log().lines().count();
    std::thread::sleep(Duration::from_millis(500));
    assert!(switch.log().lines().count() <= lines + 1, "{}", switch.log());
    clients.clear();
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    pair.end();
}

#[test]
fn broken_rings_stop_their_port_only() {
    type Attack = fn(&Raw);
    let attacks: [(&str, Attack); 7] = [
        ("descriptor chain is longer than the ring", |raw| {
            raw.describe(1, 0, BUFFERS, 100, NEXT, 0);
            raw.offer(1, 1);
        }),
        ("ring index jumped from 0 to 30000", |raw| raw.offer(1, 30_000)),
        ("descriptor index 256 is outside the table", |raw| {
            raw.describe(1, 0, BUFFERS, 100, NEXT, SIZE);
            raw.offer(1, 1);
        }),
        ("indirect table at 0x10 is outside guest memory", |raw| {
            raw.describe(1, 0, 0x10, 160, INDIRECT, 0);
            raw.offer(1, 1);
        }),
        ("indirect table of 24 bytes is not legal", |raw| {
            raw.describe(1, 0, BUFFERS, 24, INDIRECT, 0);
            raw.offer(1, 1);
        }),
        ("indirect table of 4112 bytes is not legal", |raw| {
            raw.describe(1, 0, BUFFERS, 4112, INDIRECT, 0);
            raw.offer(1, 1);
        }),
        ("front end truncated its memory", |raw| {
            raw.describe(1, 0, BUFFERS, 100, 0, 0);
            raw.file.set_len(0).unwrap();
            raw.kick();
        }),
    ];
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    for (n, (what, attack)) in attacks.into_iter().enumerate() {
        let name = format!("bad{n}");
        let raw = Raw::started(&switch, &dir, &name);
        eprintln!("{name}: {what}");
        attack(&raw);
        raw.closed();
        others.wait_for_replies(&switch);
        switch.wait_up(&name, false);
        assert!(switch.port("show", &name)["faults"].as_u64().unwrap() >= 1, "{what}");
        let line = format!("port {name}: stopped: its guest violated the protocol: {what}");
        assert_eq!(lines(&switch, &line), 1, "{line}\n{}", switch.log());
        assert_eq!(lines(&switch, &format!("port {name}: stopped")), 1);
        // Another, correct front-end is served afterwards.
        drop(Raw::started(&switch, &dir, &name));
    }
    others.end();
}

#[test]
fn broken_receive_ring_stops_its_port_only() {
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let raw = Raw::started(&switch, &dir, "bad");
    raw.describe(0, 0, BUFFERS, 100, NEXT | WRITE, 1);
    raw.describe(0, 1, BUFFERS, 100, 0, 0);
    raw.offer(0, 1);
    // It receives a flooded frame from a correct guest.
    switch.json(&["add-port", &dir.port("z", "")]);
    let flood = ["--peer", "02:00:00:00:00:bb", "--rate", "100"];
    let _flood = Gen::start(&dir.path("z"), &flood);
    raw.closed();
    others.wait_for_replies(&switch);
    assert_eq!(lines(&switch, "violated the protocol: readable descriptor after a writable"), 1);
    others.end();
}

/// A sparse file of `len` bytes that can be truncated.
fn sparse(len: u64) -> File {
    let file = File::from(memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(len).unwrap();
    file
}

/// A number of kB in `/proc/PID/status`.
fn status(switch: &Switch, field: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/status", switch.process.0.id())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse().unwrap()
}

/// Issue 14, row 1: four truncated memfds read in one burst, at the limit of memory.
#[test]
fn memory_truncated_at_the_limit_of_data_costs_its_port_only() {
    const LARGE: u64 = 512 << 20;
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let raw = Raw::started(&switch, &dir, "bad");
    let mut driver =
        DriverQueue::new(&raw.memory, &layout(1), Features::default(), 0, None).unwrap();
    let files = [1, 2, 3, 4].map(|n| {
        let (guest_addr, user_addr) = (GUEST + n * LARGE, USER + n * LARGE);
        let region = MemRegion { guest_addr, size: LARGE, user_addr, mmap_offset: 0 };
        let file = sparse(LARGE);
        raw.must(R::ADD_MEM_REG, region.to_single_bytes(), &[file.as_fd()]);
        driver.add(&[Buf { addr: guest_addr, len: 72, write: false }]).unwrap();
        file
    });
    let most = (status(&switch, "VmData") << 10) + (64 << 20);
    let pid = rustix::process::Pid::from_child(&switch.process.0);
    let limit = rustix::process::Rlimit { current: Some(most), maximum: Some(most) };
    rustix::process::prlimit(Some(pid), rustix::process::Resource::Data, limit).unwrap();
    files.iter().for_each(|file| file.set_len(0).unwrap());
    driver.publish();
    raw.kick();
    raw.closed();
    others.wait_for_replies(&switch);
    assert_eq!(lines(&switch, "front end truncated its memory"), 1, "{}", switch.log());
    others.end();
}

/// Issue 14, row 6: its transmit ring is idle, and its rings are intact.
#[test]
fn receive_buffers_that_are_truncated_stop_their_port_only() {
    const MORE: u64 = 64 << 20;
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let raw = Raw::started(&switch, &dir, "bad");
    let buffers = sparse(MORE);
    let (guest_addr, user_addr) = (GUEST + LEN, USER + LEN);
    let region = MemRegion { guest_addr, size: MORE, user_addr, mmap_offset: 0 };
    raw.must(R::ADD_MEM_REG, region.to_single_bytes(), &[buffers.as_fd()]);
    let mut driver =
        DriverQueue::new(&raw.memory, &layout(0), Features::default(), 0, None).unwrap();
    for i in 0..u64::from(SIZE) {
        let addr = guest_addr + i * (MORE / u64::from(SIZE));
        driver.add(&[Buf { addr, len: 2000, write: true }]).unwrap();
    }
    driver.publish();
    raw.kick();
    switch.json(&["add-port", &dir.port("z", "")]);
    let flood = ["--peer", "02:00:00:00:00:bb", "--rate", "50"];
    let _flood = Gen::start(&dir.path("z"), &flood);
    wait_for("a frame", || switch.counter("bad", "egress", "frames") > 0);
    buffers.set_len(0).unwrap();
    raw.closed();
    others.wait_for_replies(&switch);
    let line = "port bad: stopped: its guest violated the protocol: front end truncated its memory";
    assert_eq!(lines(&switch, line), 1, "{}", switch.log());
    others.end();
}

/// Issue 14, row 1: more slots than the mappings of a process (`vm.max_map_count`, by default).
#[test]
fn front_ends_with_every_memory_slot_leave_an_honest_guest_room() {
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let mut raws = Vec::new();
    let mut refused = 0;
    for n in 0..130 {
        let raw = Raw::connect(&switch, &dir, &format!("s{n}"));
        raw.negotiate();
        for at in (0..509).map(|i| i * LEN) {
            let (guest_addr, user_addr) = (GUEST + at, USER + at);
            let region = MemRegion { guest_addr, size: 4096, user_addr, mmap_offset: 0 };
            let region = region.to_single_bytes();
            let reply = raw.ask(R::ADD_MEM_REG, region, &[raw.file.as_fd()]);
            refused += reply.unwrap_or(1); // `None`: out of descriptors, the connection ended
            let Some(_) = reply else { break };
        }
        raws.push(raw);
    }
    let most = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse();
    let most: u64 = most.unwrap();
    assert!(refused > 0 || most > 130 * 509, "{most}");
    let honest = Raw::started(&switch, &dir, "honest");
    let lost = Raw::started(&switch, &dir, "lost");
    lost.file.set_len(0).unwrap();
    lost.kick();
    lost.closed();
    others.wait_for_replies(&switch);
    assert!(switch.is_up("honest"));
    drop(honest);
    others.end();
}

/// Issue 14, row 7: 4 TiB each, the limit of a port, and more than that.
#[test]
fn sparse_memory_of_many_front_ends_leaves_an_honest_guest_room() {
    const TIB: u64 = 1 << 40;
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let mut raws = Vec::new();
    let mut refused = 0;
    for n in 0..26 {
        let raw = Raw::connect(&switch, &dir, &format!("s{n}"));
        raw.negotiate();
        assert_eq!(raw.share_of(&sparse(16 * TIB), 16 * TIB), Some(1));
        refused += raw.share_of(&sparse(4 * TIB), 4 * TIB).unwrap();
        raws.push(raw);
    }
    assert!((1..25).contains(&refused), "{refused} of {}", raws.len());
    let limit = |whose: &str| lines(&switch, whose);
    assert!(limit("mapped-bytes") >= raws.len(), "{}", switch.log());
    assert!(limit("exceeds the port's limit") > 0 && limit("exceeds the budget of all ports") > 0);
    let honest = Raw::connect(&switch, &dir, "honest");
    honest.negotiate();
    honest.file.set_len(1 << 30).unwrap();
    assert_eq!(honest.share_of(&honest.file, 1 << 30), Some(0));
    (0..2).for_each(|ring| honest.ring(ring));
    switch.wait_up("honest", true);
    others.end();
}

#[test]
fn bad_frames_are_counted_and_their_port_continues() {
    let plain = VnetHdr::NONE;
    let csum = VnetHdr { flags: NEEDS_CSUM, csum_start: 50, csum_offset: 40, ..plain };
    let gso = VnetHdr { gso_type: GSO_TCPV4, csum_start: 34, csum_offset: 16, ..csum };
    let other = VnetHdr { gso_type: 4, gso_size: 500, ..gso };
    let frames: [(&str, VnetHdr, u64, u32); 7] = [
        ("drops_bad_hdr", csum, BUFFERS, 72),
        ("drops_bad_hdr", gso, BUFFERS, 72),
        ("drops_bad_hdr", other, BUFFERS, 72),
        ("drops_runt", plain, BUFFERS, 11),
        ("drops_runt", plain, BUFFERS, 25),
        ("drops_bad_addr", plain, GUEST + LEN - 71, 72),
        ("drops_too_long", plain, BUFFERS, 10_000),
    ];
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let raw = Raw::started(&switch, &dir, "bad");
    let mut driver =
        DriverQueue::new(&raw.memory, &layout(1), Features::default(), 0, None).unwrap();
    for (counter, hdr, addr, len) in frames {
        let before = switch.counter("bad", "ingress", counter);
        raw.write(BUFFERS, &hdr.bytes());
        driver.add(&[Buf { addr, len, write: false }]).unwrap();
        driver.publish();
        raw.kick();
        wait_for(counter, || switch.counter("bad", "ingress", counter) == before + 1);
        others.wait_for_replies(&switch);
    }
    let mut used = Vec::new();
    driver.take_used(100, &mut used).unwrap();
    assert_eq!(used.len(), frames.len(), "every buffer was returned");
    assert!(switch.is_up("bad"));
    assert_eq!(switch.port("show", "bad")["faults"], 0);
    others.end();
}

#[test]
fn invalid_messages_are_refused_or_end_the_connection() {
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let raw = Raw::connect(&switch, &dir, "bad");
    raw.negotiate();
    raw.share();
    for size in [0, 100, 65_535, 65_536, u32::MAX] {
        let state = VringState { index: 1, num: size }.to_bytes();
        assert_eq!(raw.ask(R::SET_VRING_NUM, state, &[]), Some(1), "size {size}");
    }
    let outside = VringAddr { avail: USER + LEN, ..addr(1) };
    assert_eq!(raw.ask(R::SET_VRING_ADDR, outside.to_bytes(), &[]), Some(1));
    let no_ring = VringState { index: 77, num: 256 }.to_bytes();
    assert_eq!(raw.ask(R::SET_VRING_NUM, no_ring, &[]), Some(1));
    // Valid messages are still accepted.
    raw.ring(0);
    raw.ring(1);
    switch.wait_up("bad", true);
    for what in ["refused: ring 1: queue size 0 ", "avail address 0x7f0000100000 is in no region"] {
        assert!(lines(&switch, what) >= 1, "{what}\n{}", switch.log());
    }
    others.wait_for_replies(&switch);
    // A ring whose end is outside memory is refused when it starts.
    let late = VringAddr { desc: USER + LEN - 16, ..addr(1) };
    assert_eq!(raw.ask(R::SET_VRING_ADDR, late.to_bytes(), &[]), Some(0), "its start is inside");
    let number = 1_u64.to_ne_bytes().to_vec();
    assert_eq!(raw.ask(R::SET_VRING_KICK, number, &[raw.event.as_fd()]), Some(1));
    others.wait_for_replies(&switch);
    others.end();
}

#[test]
fn garbage_and_floods_of_messages_cost_one_connection() {
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    for garbage in [&[0xff; 64][..], &[0; 64], &[1, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]] {
        let raw = Raw::connect(&switch, &dir, "bad");
        os::send(raw.stream.as_fd(), garbage, &[]).unwrap();
        raw.closed();
        others.wait_for_replies(&switch);
    }
    // Half a message, and no more.
    let raw = Raw::connect(&switch, &dir, "half");
    os::send(raw.stream.as_fd(), &[1, 0, 0, 0, 1], &[]).unwrap();
    others.wait_for_replies(&switch);
    // Requests whose replies are never read.
    let flood = Raw::connect(&switch, &dir, "flood");
    let ask = Message::request(R::GET_FEATURES, Vec::new(), false).to_bytes();
    wait_for("the switch to close the connection", || {
        (0..100).any(|_| os::send(flood.stream.as_fd(), &ask, &[]).is_err())
    });
    others.wait_for_replies(&switch);
    // Endless descriptors.
    let fds = Raw::connect(&switch, &dir, "fds");
    let many = vec![fds.event.as_fd(); 32];
    let bytes = [3_u32, 1, 400].map(u32::to_ne_bytes).concat();
    os::send(fds.stream.as_fd(), &bytes, &many).unwrap();
    let _ = os::send(fds.stream.as_fd(), &[0], &many);
    fds.closed();
    others.end();
}

#[test]
fn log_lines_of_a_front_end_are_limited() {
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let began = Instant::now();
    for _ in 0..100 {
        let raw = Raw::connect(&switch, &dir, "bad");
        os::send(raw.stream.as_fd(), &[0xff; 64], &[]).unwrap();
        raw.closed();
    }
    // Refused a thousand times.
    let raw = Raw::connect(&switch, &dir, "bad2");
    raw.negotiate();
    for _ in 0..1000 {
        let state = VringState { index: 1, num: 0 }.to_bytes();
        assert_eq!(raw.ask(R::SET_VRING_NUM, state, &[]), Some(1));
    }
    let most = 16 + 2 * (began.elapsed().as_secs() as usize + 1);
    for port in ["bad:", "bad2:"] {
        let lines = lines(&switch, &format!("port {port}"));
        assert!((10..=most).contains(&lines), "{lines} lines, at most {most} expected");
    }
    std::thread::sleep(Duration::from_millis(600));
    drop(Raw::connect(&switch, &dir, "bad"));
    wait_for("the number of suppressed lines", || lines(&switch, "suppressed)") > 0);
    others.end();
}

#[test]
fn guest_without_version_1_is_served_as_legacy() {
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let raw = Raw::connect(&switch, &dir, "old");
    // Neither VERSION_1 nor protocol features: no acknowledgements, and rings start enabled.
    assert!(raw.send(R::SET_OWNER, Vec::new(), false, &[]));
    assert!(raw.send(R::SET_FEATURES, vec![0; 8], false, &[]));
    let region = MemRegion { guest_addr: GUEST, size: LEN, user_addr: USER, mmap_offset: 0 };
    let table = MemRegion::table_to_bytes(&[region]);
    assert!(raw.send(R::SET_MEM_TABLE, table, false, &[raw.file.as_fd()]));
    for ring in 0..2 {
        let state = |num| VringState { index: ring, num }.to_bytes();
        let number = u64::from(ring).to_ne_bytes().to_vec();
        assert!(raw.send(R::SET_VRING_NUM, state(SIZE.into()), false, &[]));
        assert!(raw.send(R::SET_VRING_BASE, state(0), false, &[]));
        assert!(raw.send(R::SET_VRING_ADDR, addr(ring).to_bytes(), false, &[]));
        assert!(raw.send(R::SET_VRING_KICK, number, false, &[raw.event.as_fd()]));
    }
    switch.wait_up("old", true);
    let mut driver =
        DriverQueue::new(&raw.memory, &layout(1), Features::default(), 0, None).unwrap();
    raw.write(BUFFERS + 10, &[[0xff; 6], [2, 0, 0, 0, 0, 9]].concat());
    driver.add(&[Buf { addr: BUFFERS, len: 70, write: false }]).unwrap();
    driver.publish();
    raw.kick();
    wait_for("its frame", || switch.counter("old", "ingress", "frames") == 1);
    assert_eq!(switch.counter("old", "ingress", "bytes"), 60, "a header of ten bytes");
    assert_eq!(switch.port("show", "old")["features"], serde_json::json!([]));
    others.end();
}

#[test]
fn memory_in_64_slots() {
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let raw = Raw::connect(&switch, &dir, "slots");
    raw.negotiate();
    let size = LEN / 64;
    for slot in 0..64 {
        let at = slot * size;
        let region =
            MemRegion { guest_addr: GUEST + at, size, user_addr: USER + at, mmap_offset: at };
        raw.must(R::ADD_MEM_REG, region.to_single_bytes(), &[raw.file.as_fd()]);
    }
    raw.ring(0);
    raw.ring(1);
    switch.wait_up("slots", true);
    let mut driver =
        DriverQueue::new(&raw.memory, &layout(1), Features::default(), 0, None).unwrap();
    // A frame that crosses two slots.
    driver.add(&[Buf { addr: GUEST + 50 * size - 30, len: 72, write: false }]).unwrap();
    driver.publish();
    raw.kick();
    wait_for("its frame", || switch.counter("slots", "ingress", "frames") == 1);
    others.end();
}

#[test]
fn in_band_kick_of_a_receive_ring_retries_held_frames() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[]);
    let raw = Raw::started(&switch, &dir, "x");
    let kicks = |n: u64| {
        wait_for("kicks of both rings", || {
            ["egress", "ingress"].map(|way| switch.counter("x", way, "kicks")) == [n, n]
        });
    };
    // Enabling a ring counts as a kick: kicks of a disabled ring were lost.
    kicks(1);
    // It has no kick descriptors: its kicks are messages, for both rings.
    for ring in 0..2_u64 {
        raw.must(R::SET_VRING_KICK, (ring | 1 << 8).to_ne_bytes().to_vec(), &[]);
    }
    kicks(2);
    for ring in 0..2 {
        raw.must(R::VRING_KICK, VringState { index: ring, num: 0 }.to_bytes(), &[]);
    }
    kicks(3);
}

#[test]
fn kicks_of_a_restarted_ring_are_handled() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--poll", "event"], &[dir.port("a", "")]);
    let raw = Raw::started(&switch, &dir, "a");
    raw.write(BUFFERS, &[0; 12 + 60]);
    raw.describe(1, 0, BUFFERS, 12 + 60, 0, 0);
    let frames = || switch.counter("a", "ingress", "frames");
    for _ in 0..20 {
        let before = frames();
        // A driver that sets up a ring again starts with an empty one.
        let used = Area::new(&raw.memory, layout(1).device, 8).unwrap();
        raw.ask(R::GET_VRING_BASE, VringState { index: 1, num: 0 }.to_bytes(), &[]).unwrap();
        used.store_u16(2, 0);
        raw.offer(1, 1);
        raw.ring(1);
        wait_for("what was there", || frames() == before + 1);
        wait_for("sleep", || switch.port("stats", "a")["ingress"][0]["state"] == "cold");
        // It is requested to notify, so only this kick wakes the worker.
        raw.offer(1, 2);
        wait_for("what was kicked for", || frames() == before + 2);
    }
}

/// A socket whose close lingers: its peer never reads the remaining data.
struct Lingers {
    socket: OwnedFd,
    /// Keeps the other end open.
    _peer: std::net::TcpStream,
}

impl Lingers {
    fn new() -> Self {
        use rustix::net::sockopt;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        while std::io::Write::write(&mut &socket, &[0; 65536]).is_ok() {}
        socket.set_nonblocking(false).unwrap();
        sockopt::set_socket_linger(&socket, Some(Duration::from_secs(3600))).unwrap();
        Self { socket: socket.into(), _peer: peer }
    }

    /// Sends the socket, and leaves the switch with its last descriptor: the last to close lingers,
    /// so the switch would be blocked until this test closes its end.
    fn give(
        self,
        switch: &Switch,
        to: impl FnOnce() -> UnixStream,
        request: R,
    ) -> std::net::TcpStream {
        let process = &switch.process.0;
        common::signal(process, rustix::process::Signal::STOP);
        wait_for("the descriptor to be received", || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.id())).unwrap();
            stat.rsplit(')').next().unwrap().trim().starts_with('T')
        });
        let message = Message::request(request, payload_of(request), false).to_bytes();
        let sent = os::send(to().as_fd(), &message, &[self.socket.as_fd()]);
        if sent.is_err() {
            // This end must not linger.
            std::mem::forget(self.socket);
            panic!("{sent:?}");
        }
        drop(self.socket);
        common::signal(&switch.process.0, rustix::process::Signal::CONT);
        self._peer
    }
}

fn payload_of(request: R) -> Vec<u8> {
    let region = MemRegion { guest_addr: GUEST, size: LEN, user_addr: USER, mmap_offset: 0 };
    match request {
        R::SET_MEM_TABLE => MemRegion::table_to_bytes(&[region]),
        R::SET_VRING_KICK | R::SET_VRING_CALL | R::SET_VRING_ERR => 1_u64.to_ne_bytes().to_vec(),
        _ => Vec::new(),
    }
}

/// Issue 14, row 2.
#[test]
fn sockets_that_linger_as_descriptors_delay_no_one() {
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let requests = [
        R::SET_VRING_KICK,
        R::SET_VRING_CALL,
        R::SET_VRING_ERR,
        R::SET_MEM_TABLE,
        R::SET_BACKEND_REQ_FD,
        R::SET_OWNER,
    ];
    let mut peers = Vec::new();
    for (n, request) in requests.into_iter().enumerate() {
        let raw = Raw::started(&switch, &dir, &format!("bad{n}"));
        // Queued in a connection that is rejected as the second one: it closes with the connection.
        let second = || UnixStream::connect(dir.path(&format!("bad{n}"))).unwrap();
        peers.push(Lingers::new().give(&switch, second, R::SET_OWNER));
        peers.push(Lingers::new().give(&switch, || raw.stream.try_clone().unwrap(), request));
        raw.closed();
    }
    // The control thread replies in the meantime, and unclosed descriptors stay charged.
    let asked = Instant::now();
    (0..20).for_each(|_| drop(switch.json(&["show"])));
    assert!(asked.elapsed() < Duration::from_secs(15), "{:?}", asked.elapsed());
    others.wait_for_replies(&switch);
    switch.json(&["add-port", &dir.port("late", "")]);
    let late = Raw::started(&switch, &dir, "late");
    drop(late);
    others.end();
    drop(peers);
}

/// Issue 14, row 10.
#[test]
fn messages_above_the_rate_are_delayed_and_the_connection_stays() {
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let raw = Raw::started(&switch, &dir, "bad");
    let message = Message::request(R::SET_OWNER, Vec::new(), false).to_bytes();
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        // Full: it is not read.
        if !os::send(raw.stream.as_fd(), &message, &[]).unwrap() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    others.wait_for_replies(&switch);
    assert!(switch.is_up("bad"));
    assert_eq!(lines(&switch, "port bad: front-end disconnected"), 0, "{}", switch.log());
    others.end();
}

/// Issue 14, row 14.
#[test]
fn fault_of_both_rings_is_counted_once() {
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    for n in 1..=3 {
        let raw = Raw::started(&switch, &dir, "bad");
        // The worker reports it repeatedly until the rings are stopped.
        raw.offer(1, 30_000);
        for _ in 0..100 {
            raw.kick();
        }
        raw.closed();
        switch.wait_up("bad", false);
        wait_for("the fault", || switch.port("show", "bad")["faults"] == n);
        others.wait_for_replies(&switch);
        assert_eq!(switch.port("show", "bad")["faults"], n);
    }
    others.end();
}

/// Issue 14, row 12.
#[test]
fn control_socket_is_private_and_a_slow_reader_delays_no_one() {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let mode = std::fs::metadata(switch.control()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // Each client sends requests until its socket is full, and reads nothing.
    let mut slow = Vec::new();
    for _ in 0..100 {
        let client = UnixStream::connect(switch.control()).unwrap();
        client.set_nonblocking(true).unwrap();
        for _ in 0..200 {
            if (&client).write_all(b"GET /v1/stats HTTP/1.1\r\nHost: x\r\n\r\n").is_err() {
                break;
            }
        }
        slow.push(client);
    }
    let asked = Instant::now();
    (0..20).for_each(|_| drop(switch.json(&["show"])));
    assert!(asked.elapsed() < Duration::from_secs(15), "{:?}", asked.elapsed());
    others.wait_for_replies(&switch);
    others.end();
}
