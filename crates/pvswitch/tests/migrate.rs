//! Live migration: a front-end in Cloud Hypervisor's order of messages copies a guest's memory by
//! the dirty log; addresses are withdrawn where a guest stops, and announced where it starts.

mod common;

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use common::{Dir, Gen, Switch, kill_and_wait, wait_for};
use ring::virtq::Buf;
use shm::{Area, GuestMemory, Mapping, Region};
use vhost_user::backend::PROTOCOL_FEATURES;
use vhost_user::feature;
use vhost_user::frontend::{self, Frontend, Params, Queue};
use vhost_user::message::{
    FrontendReq as R, LogRegion, MemRegion, Message, VringAddr, VringState, parse_u64,
};

const LEN: u64 = 0x20_0000;
const USER: u64 = 0x7000_0000;
const PAGE: u64 = 4096;
const LOG_LEN: u64 = LEN / PAGE / 8;
const SIZE: u16 = 256;
/// Buffers of the receive ring, one for each descriptor; they cross pages.
const BUFFERS: u64 = 0x1_0000;
const BUFFER_LEN: u64 = 1536;
const FRAME_LEN: usize = 700;
const GUEST: &str = "02:00:00:00:00:02";
/// LOG_SHMFD, REPLY_ACK, MQ and SLOTS: those of Cloud Hypervisor.
const FEATURES: u64 = feature::VERSION_1 | feature::MRG_RXBUF | feature::PROTOCOL_FEATURES;

/// A virtual machine with one connection, whose driver posts all of its buffers once.
struct Vm {
    front: UnixStream,
    mapping: Arc<Mapping>,
    memory: GuestMemory,
    event: OwnedFd,
}

/// Addresses of a ring's parts: descriptors, available ring, used ring.
fn parts(ring: u32) -> [u64; 3] {
    [0x1000, 0x2000, 0x3000].map(|part| part + u64::from(ring) * 0x4000)
}

impl Vm {
    fn new(dir: &Dir, port: &str) -> Self {
        let front = UnixStream::connect(dir.path(port)).unwrap();
        front.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mapping = Arc::new(Mapping::memfd("guest", LEN).unwrap());
        let region = Region {
            guest_addr: 0,
            user_addr: USER,
            len: LEN,
            offset: 0,
            mapping: Arc::clone(&mapping),
        };
        let memory = GuestMemory::new(vec![region]).unwrap();
        Self { front, mapping, memory, event: os::eventfd().unwrap() }
    }

    /// What the guest's driver does before its device starts.
    fn post(&self) {
        let [desc, avail, _] = parts(0).map(|at| Area::new(&self.memory, at, 0x1000).unwrap());
        for i in 0..SIZE {
            let at = usize::from(i) * 16;
            desc.store_u64(at, BUFFERS + u64::from(i) * BUFFER_LEN);
            desc.store_u32(at + 8, BUFFER_LEN as u32);
            // WRITE.
            desc.store_u16(at + 12, 2);
            avail.store_u16(4 + usize::from(i) * 2, i);
        }
        avail.store_u16(2, SIZE);
    }

    fn word(&self, addr: u64) -> u16 {
        Area::new(&self.memory, addr, 4).unwrap().load_u16(2)
    }

    fn used_idx(&self) -> u16 {
        self.word(parts(0)[2])
    }

    fn bytes(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.seg(addr, len as u32, &mut 0).unwrap().read(&mut bytes);
        bytes
    }

    /// Sends a request and waits for its acknowledgement.
    fn ask(&self, request: R, payload: Vec<u8>, fds: &[BorrowedFd<'_>]) {
        let message = Message::request(request, payload, true).to_bytes();
        os::send(self.front.as_fd(), &message, fds).unwrap();
        let mut reply = [0; 20];
        (&self.front).read_exact(&mut reply).unwrap();
        assert_eq!(parse_u64(&reply[12..]), Some(0), "{request:?}");
    }

    fn number(&self, request: R, number: u64, fds: &[BorrowedFd<'_>]) {
        self.ask(request, number.to_ne_bytes().to_vec(), fds);
    }

    fn state(&self, request: R, index: u32, num: u32) {
        self.ask(request, VringState { index, num }.to_bytes(), &[]);
    }

    /// `setup_vhost_user`: the base of a ring is its available index, also after a restore.
    fn start(&self) {
        let owner = Message::request(R::SET_OWNER, Vec::new(), false).to_bytes();
        os::send(self.front.as_fd(), &owner, &[]).unwrap();
        self.number(R::SET_PROTOCOL_FEATURES, PROTOCOL_FEATURES.bits(), &[]);
        self.number(R::SET_FEATURES, FEATURES, &[]);
        let region = MemRegion { guest_addr: 0, size: LEN, user_addr: USER, mmap_offset: 0 };
        let table = MemRegion::table_to_bytes(&[region]);
        self.ask(R::SET_MEM_TABLE, table, &[self.mapping.fd().unwrap()]);
        for ring in [0, 1] {
            self.state(R::SET_VRING_NUM, ring, SIZE.into());
        }
        for ring in [0, 1] {
            let [desc, avail, used] = parts(ring).map(|at| USER + at);
            // Cloud Hypervisor sets no flag.
            let addr = VringAddr { index: ring, flags: 0, desc, used, avail, log: 0 };
            self.ask(R::SET_VRING_ADDR, addr.to_bytes(), &[]);
            self.state(R::SET_VRING_BASE, ring, self.word(parts(ring)[1]).into());
            self.number(R::SET_VRING_CALL, ring.into(), &[self.event.as_fd()]);
            self.number(R::SET_VRING_KICK, ring.into(), &[self.event.as_fd()]);
        }
        self.enable(true);
    }

    fn enable(&self, on: bool) {
        [0, 1].into_iter().for_each(|ring| self.state(R::SET_VRING_ENABLE, ring, on.into()));
    }

    /// `update_log_base`: another log; returns it.
    fn new_log(&self) -> Mapping {
        let log = Mapping::memfd("vhost_user_dirty_log", LOG_LEN).unwrap();
        let payload = LogRegion { size: LOG_LEN, offset: 0 }.to_bytes();
        self.ask(R::SET_LOG_BASE, payload, &[log.fd().unwrap()]);
        log
    }

    /// Copies the pages that a log has marked; returns their number.
    fn copy_dirty(&self, log: &Mapping, to: &Self) -> usize {
        let mut bits = vec![0; LOG_LEN as usize];
        log.seg(0, LOG_LEN as u32).unwrap().read(&mut bits);
        let marked = |page: &u64| bits[(page / 8) as usize] >> (page % 8) & 1 != 0;
        (0..LEN / PAGE).filter(marked).map(|page| self.copy(page * PAGE, PAGE, to)).count()
    }

    fn copy(&self, addr: u64, len: u64, to: &Self) {
        let bytes = self.bytes(addr, len as usize);
        to.memory.seg_mut(addr, len as u32, &mut 0).unwrap().write(&bytes);
    }
}

/// The sender: frames with numbers to the guest.
struct Sender {
    _frontend: Frontend,
    memory: Arc<GuestMemory>,
    at: u64,
    queue: Queue,
    sent: u32,
}

fn frame(number: u32) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x88, 0xb5];
    frame.extend(number.to_be_bytes());
    frame.extend((frame.len()..FRAME_LEN).map(|i| (i as u32 ^ number.wrapping_mul(97)) as u8));
    frame
}

impl Sender {
    fn new(dir: &Dir, port: &str) -> Self {
        let params = Params {
            features: feature::VERSION_1,
            protocol_features: frontend::PROTOCOL_FEATURES,
            pairs: 1,
            queue_size: 64,
            base: None,
            indirect_entries: 0,
            buffer_bytes: 4096,
            timeout: Duration::from_secs(20),
        };
        let stream = UnixStream::connect(dir.path(port)).unwrap();
        let (frontend, mut queues) = Frontend::start(stream, &params).unwrap();
        let (memory, at) = (Arc::clone(frontend.memory()), frontend.buffers().start);
        let queue = queues.pop().unwrap();
        Self { _frontend: frontend, memory, at, queue, sent: 0 }
    }

    /// Sends one frame, and waits until the switch has returned its buffer.
    fn send(&mut self) {
        let bytes = [&[0; 12], &frame(self.sent)[..]].concat();
        let len = bytes.len() as u32;
        self.memory.seg_mut(self.at, len, &mut 0).unwrap().write(&bytes);
        self.queue.driver.add(&[Buf { addr: self.at, len, write: false }]).unwrap();
        self.queue.driver.publish();
        if self.queue.driver.kick_needed() {
            os::signal(self.queue.kick.as_fd());
        }
        let mut used = Vec::new();
        wait_for("the frame to be taken", || {
            self.queue.driver.take_used(1, &mut used).unwrap();
            !used.is_empty()
        });
        self.sent += 1;
    }
}

/// Migrates a guest from port `b` to port `c` while it receives; returns whether its memory
/// arrived. Then it goes on to receive.
fn migrate(logged: bool) -> bool {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &["a", "b", "c"].map(|name| dir.port(name, "")));
    let (old, new) = (Vm::new(&dir, "b"), Vm::new(&dir, "c"));
    old.post();
    old.start();
    let mut sender = Sender::new(&dir, "a");
    (0..10).for_each(|_| sender.send());
    assert_eq!(old.used_idx(), 10);
    // It sends while pages are copied, up to a number.
    let allowed = Arc::new(AtomicU32::new(30));
    let stop = Arc::new(AtomicBool::new(false));
    let sending = {
        let (stop, allowed) = (Arc::clone(&stop), Arc::clone(&allowed));
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                if sender.sent < allowed.load(Ordering::Relaxed) {
                    sender.send();
                } else {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            sender
        })
    };
    let mut log = old.new_log();
    if logged {
        old.number(R::SET_FEATURES, FEATURES | feature::LOG_ALL, &[]);
    }
    let logs = ["a", "b", "c"].map(|name| switch.port("show", name)["dirty_log"] == true);
    assert_eq!(logs, [false, logged, false]);
    let shown = String::from_utf8(switch.ctl(&["show"]).stdout).unwrap();
    assert_eq!(shown.contains("migrates: pages written"), logged, "{shown}");
    old.copy(0, LEN, &new);
    for pass in 1..=5_u16 {
        // Some in each pass, others while the log is replaced.
        let before = old.used_idx();
        allowed.store(30 + u32::from(pass) * 30, Ordering::Relaxed);
        wait_for("frames of this pass", || old.used_idx() >= (before + 10).max(pass * 30 + 10));
        let next = old.new_log();
        old.copy_dirty(&log, &new);
        log = next;
    }
    // The machine pauses under traffic, and the last pages are sent.
    old.enable(false);
    let next = old.new_log();
    old.copy_dirty(&log, &new);
    assert_eq!(old.copy_dirty(&next, &new), 0, "nothing is written to a paused machine");
    stop.store(true, Ordering::Relaxed);
    let mut sender = sending.join().unwrap();
    let arrived = old.bytes(0, LEN as usize) == new.bytes(0, LEN as usize);
    let got = new.used_idx();
    drop(old);
    if !arrived {
        return false;
    }
    assert!((10..=200).contains(&got), "{got}");
    new.start();
    // Frames that were sent in between are lost; what came before is whole.
    let first = sender.sent;
    (0..20).for_each(|_| sender.send());
    assert_eq!(new.used_idx(), got + 20, "buffers go on where they were");
    for i in 0..got + 20 {
        let used = Area::new(&new.memory, parts(0)[2] + 4 + u64::from(i) * 8, 8);
        let used = used.map(|area| (area.load_u32(0), area.load_u32(4)));
        let number = if i < got { i.into() } else { first + u32::from(i - got) };
        if let Some(used) = used {
            assert_eq!(used, (i.into(), FRAME_LEN as u32 + 12));
        }
        let bytes = new.bytes(BUFFERS + u64::from(i) * BUFFER_LEN + 12, FRAME_LEN);
        assert!(bytes == frame(number), "buffer {i}");
    }
    assert_eq!(switch.port("show", "c")["faults"], 0);
    true
}

#[test]
fn guest_of_cloud_hypervisor_arrives_whole_and_goes_on() {
    assert!(migrate(true));
}

/// Or the test above proves nothing.
#[test]
fn memory_that_is_copied_without_the_log_differs() {
    assert!(!migrate(false));
}

/// Memory of several steps, all of which are made without another message: the front-end of a
/// guest that goes on has none to send.
#[test]
fn all_pages_of_large_memory_are_marked_while_the_front_end_sends_nothing() {
    const SIZE: u64 = 9 << 30;
    const AT: u64 = 4 << 30;
    const PAGES: u32 = ((SIZE + LEN) / PAGE) as u32;
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--keep"], &[dir.port("b", "")]);
    let vm = Vm::new(&dir, "b");
    vm.post();
    vm.start();
    let more = Mapping::memfd("more", SIZE).unwrap();
    let region = MemRegion { guest_addr: AT, size: SIZE, user_addr: USER + AT, mmap_offset: 0 };
    vm.ask(R::ADD_MEM_REG, region.to_single_bytes(), &[more.fd().unwrap()]);
    vm.number(R::SET_FEATURES, FEATURES | feature::LOG_ALL, &[]);
    let region = LogRegion { size: (AT + SIZE) / PAGE / 8, offset: 0 };
    let log = Mapping::memfd("log", region.size).unwrap();
    vm.ask(R::SET_LOG_BASE, region.to_bytes(), &[log.fd().unwrap()]);
    let marked = || {
        let mut bits = vec![0; region.size as usize];
        log.seg(0, region.size as u32).unwrap().read(&mut bits);
        bits.iter().map(|byte| byte.count_ones()).sum::<u32>()
    };
    wait_for("all marks", || marked() == PAGES);
    log.seg_mut(0, region.size as u32).unwrap().zero();
    kill_and_wait(&switch);
    wait_for("all marks of the next process", || marked() == PAGES);
    assert_eq!(switch.port("show", "b")["connections"], 1);
    switch.shut_down(&dir);
}

/// Ports of the entries of an address.
fn places(switch: &Switch) -> Vec<String> {
    let fdb = switch.json(&["fdb"]);
    let entries = fdb["entries"].as_array().unwrap().iter();
    entries.filter(|e| e["mac"] == GUEST).map(|e| e["port"].as_str().unwrap().into()).collect()
}

#[test]
fn locked_address_is_announced_where_its_guest_starts_and_withdrawn_where_it_stops() {
    let dir = Dir::new();
    let ports = [dir.port("a", ""), dir.port("b", &format!(",mac={GUEST}"))];
    let switch = Switch::start(&dir, &[], &ports);
    let _observer = Sender::new(&dir, "a");
    let vm = Vm::new(&dir, "b");
    vm.post();
    vm.start();
    for times in 1..4 {
        wait_for("the announcement", || places(&switch) == ["b"]);
        // One frame for the observer, who has no buffers for it.
        wait_for("the frame", || switch.counter("b", "ingress", "frames") == times);
        // QEMU stops rings, Cloud Hypervisor disables them.
        if times == 1 {
            for ring in [0, 1] {
                let get = VringState { index: ring, num: 0 }.to_bytes();
                let get = Message::request(R::GET_VRING_BASE, get, false).to_bytes();
                os::send(vm.front.as_fd(), &get, &[]).unwrap();
                (&vm.front).read_exact(&mut [0; 20]).unwrap();
            }
        } else {
            vm.enable(false);
        }
        wait_for("the withdrawal", || places(&switch).is_empty());
        if times == 1 {
            for ring in [0, 1] {
                vm.number(R::SET_VRING_KICK, ring, &[vm.event.as_fd()]);
            }
        } else {
            vm.enable(true);
        }
    }
}

/// The generator's own migrations, with frames of all sizes, there and back.
#[test]
fn a_generator_migrates_there_and_back_and_misses_no_page() {
    let dir = Dir::new();
    let ports = ["a", "h0", "h1"].map(|name| dir.port(name, ""));
    let switch = Switch::start(&dir, &[], &ports);
    let guest = ["--mode", "migrate", "--check", "--frames", "4", "--mac", GUEST];
    let guest = Gen::start(&dir.path("h{}"), &guest);
    switch.wait_up("h0", true);
    let sender = ["--check", "--size", "64-1514", "--rate", "5k", "--peer", GUEST];
    let sender = Gen::start(&dir.path("a"), &sender);
    let report = guest.report();
    let number = |name: &str| report[name].as_u64().unwrap();
    assert_eq!((number("migrations"), number("missed_pages")), (4, 0), "{report}");
    assert_eq!(number("corrupt_frames"), 0, "{report}");
    assert!(number("received_frames") > 4 * 800, "{report}");
    assert_eq!(switch.port("show", "h0")["faults"], 0);
    drop(sender);
}
