//! A hostile front-end: whatever it does costs its own port only. Beside each attack another pair
//! of ports keeps its traffic, and the log has one line for it.

mod common;

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Bystanders, Dir, Gen, Switch, wait_for};
use ring::virtq::{Buf, DriverQueue, Features, Layout};
use shm::{Area, GuestMemory, Mapping, Region};
use switch::vnet::{GSO_TCPV4, NEEDS_CSUM, VnetHdr};
use vhost_user::backend::PROTOCOL_FEATURES;
use vhost_user::feature;
use vhost_user::message::{FrontendReq as R, MemRegion, Message, VringAddr, VringState};
use vhost_user::sys;

const GUEST: u64 = 0x1_0000_0000;
const USER: u64 = 0x7f00_0000_0000;
const LEN: u64 = 0x10_0000;
const SIZE: u16 = 256;
/// Where frames go.
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

/// A front-end that says whatever a test wants.
struct Raw {
    stream: UnixStream,
    /// Its memory; a file, because a memfd of ours cannot be truncated.
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
        let path = dir.path("memory");
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file.set_len(LEN).unwrap();
        let mapping = Arc::new(Mapping::new(file.as_fd(), 0, LEN).unwrap());
        let region = Region { guest_addr: GUEST, user_addr: USER, len: LEN, offset: 0, mapping };
        let memory = GuestMemory::new(vec![region]).unwrap();
        Self { stream, file, memory, event: sys::eventfd().unwrap() }
    }

    /// Negotiated, memory shared, both rings running and enabled.
    fn started(switch: &Switch, dir: &Dir, name: &str) -> Self {
        let raw = Self::connect(switch, dir, name);
        raw.negotiate();
        raw.share();
        (0..2).for_each(|ring| raw.ring(ring));
        switch.wait_up(name, true);
        raw
    }

    /// Sends; false when the switch closed.
    fn send(&self, request: R, payload: Vec<u8>, ack: bool, fds: &[BorrowedFd<'_>]) -> bool {
        let message = Message::request(request, payload, ack).to_bytes();
        sys::send(self.stream.as_fd(), &message, fds).is_ok()
    }

    /// Sends, and waits for the acknowledgement: 0 is yes. `None`: the switch closed.
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
        let region = MemRegion { guest_addr: GUEST, size: LEN, user_addr: USER, mmap_offset: 0 };
        let table = MemRegion::table_to_bytes(&[region]);
        self.must(R::SET_MEM_TABLE, table, &[self.file.as_fd()]);
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
        sys::signal(self.event.as_fd());
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

    /// Makes descriptor 0 (and so on, as many as `idx`) available on a ring, and kicks.
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

/// Two ports with traffic between them, and a switch for more.
fn rig(dir: &Dir) -> (Switch, Bystanders) {
    let switch = Switch::start(dir, &[], &[dir.port("x", ""), dir.port("y", "")]);
    let others = Bystanders::start(&switch, dir, "x", "y");
    (switch, others)
}

/// Lines of the log with this in them.
fn lines(switch: &Switch, what: &str) -> usize {
    switch.log().lines().filter(|line| line.contains(what)).count()
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Connections, until the switch has no descriptor left.
#[test]
fn switch_without_descriptors_rests_and_goes_on_when_there_are_some() {
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
    // Told once a second, not in a loop.
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
        others.go_on(&switch);
        switch.wait_up(&name, false);
        assert!(switch.port("show", &name)["faults"].as_u64().unwrap() >= 1, "{what}");
        let line = format!("port {name}: stopped, its guest broke the protocol: {what}");
        assert_eq!(lines(&switch, &line), 1, "{line}\n{}", switch.log());
        assert_eq!(lines(&switch, &format!("port {name}: stopped")), 1);
        // It may come back, and behave.
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
    // A frame that is flooded reaches it, from a guest that behaves.
    switch.json(&["add-port", &dir.port("z", "")]);
    let flood = ["--peer", "02:00:00:00:00:bb", "--rate", "100"];
    let _flood = Gen::start(&dir.path("z"), &flood);
    raw.closed();
    others.go_on(&switch);
    assert_eq!(lines(&switch, "broke the protocol: readable descriptor after a writable"), 1);
    others.end();
}

#[test]
fn bad_frames_are_counted_and_their_port_goes_on() {
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
        others.go_on(&switch);
    }
    let mut used = Vec::new();
    driver.take_used(100, &mut used).unwrap();
    assert_eq!(used.len(), frames.len(), "every buffer came back");
    assert!(switch.is_up("bad"));
    assert_eq!(switch.port("show", "bad")["faults"], 0);
    others.end();
}

#[test]
fn messages_that_make_no_sense_are_refused_or_end_the_connection() {
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
    // It still can behave.
    raw.ring(0);
    raw.ring(1);
    switch.wait_up("bad", true);
    for what in
        ["refused: ring 1 with queue size 0:", "avail address 0x7f0000100000 is in no region"]
    {
        assert!(lines(&switch, what) >= 1, "{what}\n{}", switch.log());
    }
    others.go_on(&switch);
    // A ring whose end lies outside is refused when it would start.
    let late = VringAddr { desc: USER + LEN - 16, ..addr(1) };
    assert_eq!(raw.ask(R::SET_VRING_ADDR, late.to_bytes(), &[]), Some(0), "its start is inside");
    let number = 1_u64.to_ne_bytes().to_vec();
    assert_eq!(raw.ask(R::SET_VRING_KICK, number, &[raw.event.as_fd()]), Some(1));
    others.go_on(&switch);
    others.end();
}

#[test]
fn garbage_and_floods_of_messages_cost_one_connection() {
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    for garbage in [&[0xff; 64][..], &[0; 64], &[1, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]] {
        let raw = Raw::connect(&switch, &dir, "bad");
        sys::send(raw.stream.as_fd(), garbage, &[]).unwrap();
        raw.closed();
        others.go_on(&switch);
    }
    // Half a message, and silence.
    let raw = Raw::connect(&switch, &dir, "half");
    sys::send(raw.stream.as_fd(), &[1, 0, 0, 0, 1], &[]).unwrap();
    others.go_on(&switch);
    // Questions whose answers are never read.
    let flood = Raw::connect(&switch, &dir, "flood");
    let ask = Message::request(R::GET_FEATURES, Vec::new(), false).to_bytes();
    wait_for("the switch to lose patience", || {
        (0..100).any(|_| sys::send(flood.stream.as_fd(), &ask, &[]).is_err())
    });
    others.go_on(&switch);
    // Descriptors without end.
    let fds = Raw::connect(&switch, &dir, "fds");
    let many = vec![fds.event.as_fd(); 32];
    let bytes = [3_u32, 1, 400].map(u32::to_ne_bytes).concat();
    sys::send(fds.stream.as_fd(), &bytes, &many).unwrap();
    let _ = sys::send(fds.stream.as_fd(), &[0], &many);
    fds.closed();
    others.end();
}

#[test]
fn log_is_bounded_whatever_a_front_end_does() {
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let began = Instant::now();
    for _ in 0..100 {
        let raw = Raw::connect(&switch, &dir, "bad");
        sys::send(raw.stream.as_fd(), &[0xff; 64], &[]).unwrap();
        raw.closed();
    }
    // Refused, a thousand times.
    let raw = Raw::connect(&switch, &dir, "bad2");
    raw.negotiate();
    for _ in 0..1000 {
        let state = VringState { index: 1, num: 0 }.to_bytes();
        assert_eq!(raw.ask(R::SET_VRING_NUM, state, &[]), Some(1));
    }
    let most = 16 + 2 * (began.elapsed().as_secs() as usize + 1);
    for port in ["bad:", "bad2:"] {
        let lines = lines(&switch, &format!("port {port}"));
        assert!((10..=most).contains(&lines), "{lines} lines, {most} at most");
    }
    std::thread::sleep(Duration::from_millis(600));
    drop(Raw::connect(&switch, &dir, "bad"));
    wait_for("the number of missing lines", || lines(&switch, "suppressed before)") > 0);
    others.end();
}

#[test]
fn guest_that_offers_nothing_modern_is_served_as_a_legacy_one() {
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let raw = Raw::connect(&switch, &dir, "old");
    // Neither VERSION_1 nor protocol features: nothing is acknowledged, rings start enabled.
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
    // Across the edge of two slots.
    driver.add(&[Buf { addr: GUEST + 50 * size - 30, len: 72, write: false }]).unwrap();
    driver.publish();
    raw.kick();
    wait_for("its frame", || switch.counter("slots", "ingress", "frames") == 1);
    others.end();
}

#[test]
fn receive_ring_that_is_kicked_in_band_wakes_who_waits_for_room() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[]);
    let raw = Raw::started(&switch, &dir, "x");
    // It has no descriptor to give: its kicks are messages, for both rings.
    for ring in 0..2_u64 {
        raw.must(R::SET_VRING_KICK, (ring | 1 << 8).to_ne_bytes().to_vec(), &[]);
    }
    let kicks = |way: &str| switch.counter("x", way, "kicks");
    let before = ["egress", "ingress"].map(kicks);
    for ring in 0..2 {
        raw.must(R::VRING_KICK, VringState { index: ring, num: 0 }.to_bytes(), &[]);
    }
    wait_for("both kicks to be heard", || {
        ["egress", "ingress"].map(kicks) == before.map(|n| n + 1)
    });
}

#[test]
fn ring_stopped_and_started_again_is_still_listened_to() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--poll", "event"], &[dir.port("a", "")]);
    let raw = Raw::started(&switch, &dir, "a");
    raw.write(BUFFERS, &[0; 12 + 60]);
    raw.describe(1, 0, BUFFERS, 12 + 60, 0, 0);
    let frames = || switch.counter("a", "ingress", "frames");
    for _ in 0..20 {
        let before = frames();
        raw.ask(R::GET_VRING_BASE, VringState { index: 1, num: 0 }.to_bytes(), &[]).unwrap();
        raw.offer(1, 1);
        raw.ring(1);
        wait_for("what was there", || frames() == before + 1);
        wait_for("sleep", || switch.port("stats", "a")["ingress"][0]["state"] == "cold");
        // It is asked to notify, so nothing but this kick brings it back.
        raw.offer(1, 2);
        wait_for("what was kicked for", || frames() == before + 2);
    }
}

/// What `gen --mode hostile` prints, in JSON.
fn played(args: &[&str]) -> serde_json::Value {
    let output = common::pvswitch().arg("gen").args(args).arg("--json").output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn gen_lists_hostile_cases_and_reports_what_it_tried() {
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    switch.json(&["add-port", &dir.port("bad", "")]);
    let at = format!("vhost-user:{}", dir.text("bad"));
    let all = played(&["--connect", &at, "--mode", "hostile=list"]);
    let all = all.as_array().unwrap();
    let has = |name: &str| all.iter().any(|case| case["case"] == name);
    assert!(has("loops") && has("garbage") && !has("wraps") && !has("commits"));
    for (case, more) in [("outside", ""), ("garbage", ""), ("wraps", "--packed")] {
        let mode = format!("hostile={case}");
        let mut args = vec!["--connect", &at, "--mode", &mode, "--duration", "0.2"];
        args.extend(Some(more).filter(|more| !more.is_empty()));
        let told = played(&args);
        let told = &told["cases"][0];
        assert_eq!(told["case"], case);
        assert!(told["attempts"].as_u64().unwrap() > 0, "{told}");
        assert!(told["connections"].as_u64().unwrap() > 0, "{told}");
        others.go_on(&switch);
    }
    assert!(switch.port("show", "bad")["faults"].as_u64().unwrap() > 0);
    others.end();
}

#[test]
fn checked_frames_arrive_as_they_were_sent_and_those_aside_count_in_no_total() {
    let dir = Dir::new();
    let ports = ["a", "b", "c"].map(|name| dir.port(name, ""));
    let switch = Switch::start(&dir, &[], &ports);
    let (mac, also) = ("02:00:00:00:00:0b", "02:00:00:00:00:0c");
    let sink = Gen::start(&dir.path("b"), &["--mode", "sink", "--check", "--mac", mac]);
    let third = Gen::start(&dir.path("c"), &["--mode", "sink", "--mac", also]);
    switch.wait_up("b", true);
    switch.wait_up("c", true);
    wait_for("both addresses", || switch.json(&["fdb"]).to_string().matches("02:00").count() >= 2);
    let args = ["--check", "--size", "700", "--rate", "1k", "--peer", mac, "--duration", "0.5"];
    let also = format!("{also},4");
    let sent = Gen::start(&dir.path("a"), &[&args[..], &["--also", &also]].concat()).report();
    let (frames, aside) = (sent["sent_frames"].as_u64().unwrap(), &sent["aside_frames"]);
    assert!(aside.as_u64().unwrap().abs_diff(frames / 4) <= 1, "{sent}");
    wait_for("all frames", || switch.counter("b", "egress", "frames") >= frames);
    let got = sink.end();
    assert_eq!(got["corrupt_frames"], 0, "{got}");
    let ours = got["received_frames"].as_u64().unwrap() - got["foreign_frames"].as_u64().unwrap();
    assert_eq!(ours, frames);
    // And what the other one said of itself.
    let (foreign, aside) = (third.end()["foreign_frames"].as_u64().unwrap(), aside.as_u64());
    assert!((aside.unwrap()..=aside.unwrap() + 2).contains(&foreign), "{foreign} of {aside:?}");
}
