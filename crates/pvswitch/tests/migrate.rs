//! Live migration: a front-end in Cloud Hypervisor's order of messages copies a guest's memory by
//! the dirty log; addresses are withdrawn where a guest stops, and announced where it starts.

mod common;

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use common::{Dir, Gen, Switch, kill_and_wait, wait_for};
use guest::vm::{BUFFER_LEN, BUFFERS, LEN, PAGE, USER, Vm, marked, parts};
use ring::virtq::Buf;
use shm::{GuestMemory, Mapping};
use vhost_user::feature;
use vhost_user::frontend::{self, Frontend, Params, Queue};
use vhost_user::message::{FrontendReq as R, LogRegion, MemRegion, Message, VringState};

const FRAME_LEN: usize = 700;
const GUEST: &str = "02:00:00:00:00:02";

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
/// arrived. Then it continues to receive.
fn migrate(logged: bool) -> bool {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &["a", "b", "c"].map(|name| dir.port(name, "")));
    let [old, new] = ["b", "c"].map(|port| Vm::connect(&dir.path(port)).unwrap());
    old.post();
    old.start().unwrap();
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
    let mut log = old.new_log().unwrap();
    old.log(logged).unwrap();
    let logs = ["a", "b", "c"].map(|name| switch.port("show", name)["dirty_log"] == true);
    assert_eq!(logs, [false, logged, false]);
    let shown = String::from_utf8(switch.ctl(&["show"]).stdout).unwrap();
    assert_eq!(shown.contains("migrates: pages written"), logged, "{shown}");
    old.copy_all(&new);
    for pass in 1..=5_u16 {
        // Some in each pass, others while the log is replaced.
        let before = old.used_idx();
        allowed.store(30 + u32::from(pass) * 30, Ordering::Relaxed);
        wait_for("frames of this pass", || old.used_idx() >= (before + 10).max(pass * 30 + 10));
        let next = old.new_log().unwrap();
        old.copy_marked(&log, &new);
        log = next;
    }
    // The machine pauses under traffic, and the last pages are sent.
    old.enable(false).unwrap();
    let next = old.new_log().unwrap();
    old.copy_marked(&log, &new);
    assert_eq!(marked(&next).count(), 0, "nothing is written to a paused machine");
    stop.store(true, Ordering::Relaxed);
    let mut sender = sending.join().unwrap();
    let arrived = old.differences(&new).is_empty();
    let got = new.used_idx();
    drop(old);
    if !arrived {
        return false;
    }
    assert!((10..=200).contains(&got), "{got}");
    new.start().unwrap();
    // Frames that were sent in between are lost; what came before is whole.
    let first = sender.sent;
    (0..20).for_each(|_| sender.send());
    assert_eq!(new.used_idx(), got + 20, "buffers continue where they were");
    for i in 0..got + 20 {
        let element: [u8; 8] = new.bytes(parts(0)[2] + 4 + u64::from(i) * 8);
        let expected = [u32::from(i), FRAME_LEN as u32 + 12].map(u32::to_le_bytes).concat();
        assert_eq!(element[..], expected);
        let number = if i < got { i.into() } else { first + u32::from(i - got) };
        let bytes: [u8; FRAME_LEN] = new.bytes(BUFFERS + u64::from(i) * BUFFER_LEN + 12);
        assert!(bytes[..] == frame(number), "buffer {i}");
    }
    assert_eq!(switch.port("show", "c")["faults"], 0);
    true
}

#[test]
fn guest_of_cloud_hypervisor_arrives_whole_and_continues() {
    assert!(migrate(true));
}

/// Or the test above proves nothing.
#[test]
fn memory_that_is_copied_without_the_log_differs() {
    assert!(!migrate(false));
}

/// Memory of several steps, all of which are made without another message: the front-end of a
/// guest that continues has none to send.
#[test]
fn all_pages_of_large_memory_are_marked_while_the_front_end_sends_nothing() {
    const SIZE: u64 = 9 << 30;
    const AT: u64 = 4 << 30;
    const PAGES: u32 = ((SIZE + LEN) / PAGE) as u32;
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--keep"], &[dir.port("b", "")]);
    let vm = Vm::connect(&dir.path("b")).unwrap();
    vm.post();
    vm.start().unwrap();
    let more = Mapping::memfd("more", SIZE).unwrap();
    let region = MemRegion { guest_addr: AT, size: SIZE, user_addr: USER + AT, mmap_offset: 0 };
    vm.ask(R::ADD_MEM_REG, region.to_single_bytes(), &[more.fd().unwrap()]).unwrap();
    vm.log(true).unwrap();
    let region = LogRegion { size: (AT + SIZE) / PAGE / 8, offset: 0 };
    let log = Mapping::memfd("log", region.size).unwrap();
    vm.ask(R::SET_LOG_BASE, region.to_bytes(), &[log.fd().unwrap()]).unwrap();
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
    let vm = Vm::connect(&dir.path("b")).unwrap();
    vm.post();
    vm.start().unwrap();
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
            vm.enable(false).unwrap();
        }
        wait_for("the withdrawal", || places(&switch).is_empty());
        if times == 1 {
            for ring in [0, 1] {
                vm.number(R::SET_VRING_KICK, ring, &[vm.kick.as_fd()]).unwrap();
            }
        } else {
            vm.enable(true).unwrap();
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
    let pages = ["missed_pages", "late_pages"].map(number);
    assert_eq!((number("migrations"), pages), (4, [0, 0]), "{report}");
    assert_eq!(number("corrupt_frames"), 0, "{report}");
    assert!(number("received_frames") > 4 * 800, "{report}");
    assert_eq!(switch.port("show", "h0")["faults"], 0);
    drop(sender);
}
