//! A hostile front end of a vif affects its own port only. Beside each attack a pair of other ports
//! keeps its traffic; afterwards the switch holds no resources of the guest, and the next guest of
//! the same vif is served.
//!
//! The front end is implemented in this file: its memory, its grant table, its rings, its keys.

mod common;

use std::cell::Cell;
use std::fs::Permissions;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::{Bystanders, Dir, Gen, Switch, pvswitch, wait_for};
use os::{Carries, Received, Until};
use ring::xen::{CtrlRequest, FrontCtrl, FrontRx, FrontTx, RxRequest, ctrl_type, status, tx_flag};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use shm::{Area, Mapping};
use xen_netif::store::Store;

/// Pages of a guest; page `n` is granted with reference `GREF + n`.
const PAGES: u32 = 64;
const GREF: u32 = 8;
/// Pages of the rings, and the first page of data.
const TX: usize = 0;
const RX: usize = 1;
const CTRL: usize = 2;
const DATA: u32 = 4;
/// Offset of a ring's `req_prod` and of its first slot.
const REQ_PROD: usize = 0;
const SLOTS: usize = 64;
const RING_SIZE: u32 = 256;

const FRONT: &str = "/local/domain/1/device/vif/0";
const BACK: &str = "/local/domain/0/backend/vif/1/0";

/// Our end of an event channel.
struct Channel {
    port: u32,
    to_back: OwnedFd,
    /// Kept open, as a guest does.
    _to_front: OwnedFd,
}

impl Channel {
    fn notify(&self) {
        os::signal(self.to_back.as_fd());
    }
}

/// A front end that does what a test requests.
struct Guest {
    memory: OwnedFd,
    mapping: Arc<Mapping>,
    /// tx, rx, ctrl.
    channels: Vec<Channel>,
    store: Store,
    tx_prod: u32,
    /// Number of keys that it still writes.
    writes: Cell<u32>,
    /// Last: dropping it ends the domain.
    socket: OwnedFd,
}

fn message(words: [u32; 4]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

impl Guest {
    /// A domain with a vif created by the toolstack.
    fn new(dir: &Path) -> Self {
        let mut socket = None;
        wait_for("the hypervisor", || {
            socket = os::connect(&dir.join("hypervisor"), Carries::Messages).ok();
            socket.is_some()
        });
        let socket = socket.unwrap();
        let memory = memfd_create("hostile", MemfdFlags::CLOEXEC).unwrap();
        let table = memfd_create("hostile-grants", MemfdFlags::CLOEXEC).unwrap();
        let len = u64::from(PAGES) * 4096;
        ftruncate(&memory, len).unwrap();
        ftruncate(&table, u64::from(PAGES + GREF) * 8).unwrap();
        // `{flags u16, domid u16, frame u32}`: in use, for domain 0.
        let table_bytes: Vec<u8> =
            (0..PAGES).flat_map(|frame| (1 | u64::from(frame) << 32).to_le_bytes()).collect();
        rustix::io::pwrite(&table, &table_bytes, u64::from(GREF) * 8).unwrap();
        let hello = message([1, 1, PAGES, 0]);
        os::send(socket.as_fd(), &hello, &[memory.as_fd(), table.as_fd()]).unwrap();
        let (answer, _) = receive_reply(&socket);
        assert_eq!(answer[0], 2, "welcome");
        let mapping = Arc::new(Mapping::new(memory.as_fd(), 0, len).unwrap());
        let store = Store::connect(&dir.join("xenstored")).unwrap();
        let (channels, writes) = (Vec::new(), Cell::new(u32::MAX));
        let mut guest = Self { memory, mapping, channels, store, tx_prod: 0, writes, socket };
        guest.channels = (0..3).map(|_| guest.channel()).collect();
        guest
    }

    /// Connects all rings.
    fn started(dir: &Path) -> Self {
        let guest = Self::new(dir);
        guest.offer_rings();
        guest.connect();
        guest
    }

    fn channel(&self) -> Channel {
        os::send(self.socket.as_fd(), &message([3, 0, 0, 0]), &[]).unwrap();
        let (words, fds) = receive_reply(&self.socket);
        let [to_front, to_back] = <[OwnedFd; 2]>::try_from(fds).unwrap();
        Channel { port: words[1], to_back, _to_front: to_front }
    }

    fn set(&self, key: &str, value: impl ToString) {
        let Some(left) = self.writes.get().checked_sub(1) else { return };
        self.writes.set(left);
        self.store.write(&format!("{FRONT}/{key}"), &value.to_string()).unwrap();
    }

    fn back_state(&self) -> String {
        self.store.read(&format!("{BACK}/state")).unwrap().unwrap_or_default()
    }

    fn wait_back(&self, state: &str) {
        wait_for(&format!("the back end in state {state}"), || self.back_state() == state);
    }

    /// Initializes empty rings, and writes their keys.
    fn offer_rings(&self) {
        FrontTx::new(self.area(TX));
        FrontRx::new(self.area(RX));
        FrontCtrl::new(self.area(CTRL));
        let names = [("tx-ring-ref", TX), ("rx-ring-ref", RX), ("ctrl-ring-ref", CTRL)];
        names.iter().for_each(|(key, page)| self.set(key, GREF + *page as u32));
        for (key, channel) in ["tx", "rx", "ctrl"].iter().zip(&self.channels) {
            self.set(&format!("event-channel-{key}"), channel.port);
        }
        ["request-rx-copy", "feature-rx-notify", "feature-sg"].iter().for_each(|k| self.set(k, 1));
    }

    fn connect(&self) {
        self.wait_back("2");
        self.set("state", 4);
        self.wait_back("4");
    }

    fn area(&self, page: usize) -> Area {
        Area::of(&self.mapping, page * 4096, 4096).unwrap()
    }

    /// Writes words to the next tx slot.
    fn slot(&mut self, words: [u32; 3]) {
        let at = SLOTS + 12 * (self.tx_prod % RING_SIZE) as usize;
        let area = self.area(TX);
        (0..3).for_each(|i| area.store_u32(at + 4 * i, words[i]));
        self.tx_prod = self.tx_prod.wrapping_add(1);
    }

    /// Writes a request to the next tx slot.
    fn request(&mut self, gref: u32, offset: u16, flags: u16, size: u16) {
        let id = self.tx_prod % RING_SIZE;
        let pair = |low: u32, high: u16| low | u32::from(high) << 16;
        self.slot([gref, pair(offset.into(), flags), pair(id, size)]);
    }

    /// Writes an extra info to the next tx slot.
    fn extra(&mut self, bytes: [u8; 8]) {
        let word = u64::from_le_bytes(bytes);
        self.slot([word as u32, (word >> 32) as u32, 0]);
    }

    /// Publishes the contents of the tx ring, and kicks.
    fn push(&self) {
        self.area(TX).sync_store_u32(REQ_PROD, self.tx_prod, Ordering::Release);
        self.channels[TX].notify();
    }

    /// The statuses of the last `n` slots of the tx ring, once all have responses.
    fn statuses(&self, n: u32) -> Vec<i16> {
        let area = self.area(TX);
        wait_for("answers", || area.sync_load_u32(8, Ordering::Acquire) == self.tx_prod);
        let answered = (0..n).map(|i| self.tx_prod.wrapping_sub(n - i) % RING_SIZE);
        answered.map(|i| area.load_u16(SLOTS + 12 * i as usize + 2) as i16).collect()
    }

    /// Writes a frame of 60 bytes to an unknown address in the first page of data.
    fn write_frame(&self, from: u8) {
        let frame = [[2, 0, 0, 0, 0, 0x99], [2, 0, 0, 0, 0, from]].concat();
        self.mapping.seg_mut(DATA as usize * 4096, 60).unwrap().write(&frame);
    }

    /// Checks that it is served: a frame is sent and gets a response.
    fn is_served(&mut self) {
        self.write_frame(0x98);
        self.request(GREF + DATA, 0, 0, 60);
        self.push();
        assert_eq!(self.statuses(1), [status::OKAY]);
    }
}

/// Receives a reply of the hypervisor.
fn receive_reply(socket: &OwnedFd) -> ([u32; 4], Vec<OwnedFd>) {
    let end = Instant::now() + Duration::from_secs(20);
    assert!(os::wait(socket.as_fd(), Until::Readable, end).unwrap(), "no reply");
    let (mut bytes, mut fds) = ([0; 16], Vec::new());
    let got = os::recv(socket.as_fd(), &mut bytes, &mut fds, 4).unwrap();
    assert_eq!(got, Received::Bytes(16));
    let word = |i: usize| u32::from_le_bytes(bytes[4 * i..4 * i + 4].try_into().unwrap());
    ([word(0), word(1), word(2), word(3)], fds)
}

/// Descriptors, and mappings of memory, that the switch holds: the minimum, as clients come and go;
/// without `/dev/null`, which each thread opens at its first `os::signal_event`.
fn holds(switch: &Switch) -> [usize; 2] {
    let proc = PathBuf::from(format!("/proc/{}", switch.process.0.id()));
    let mut least = [usize::MAX; 2];
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(5));
        let mapped = std::fs::read_to_string(proc.join("maps")).unwrap().matches("memfd:").count();
        let fds = std::fs::read_dir(proc.join("fd")).unwrap().map(|fd| fd.unwrap().path());
        let fds = fds.filter(|fd| !std::fs::read_link(fd).is_ok_and(|to| to.ends_with("null")));
        least = [least[0].min(fds.count()), least[1].min(mapped)];
    }
    least
}

/// Whether it holds no more than before, which may include a client of its control socket.
fn holds_at_most(switch: &Switch, before: [usize; 2]) -> bool {
    holds(switch).iter().zip(before).all(|(now, before)| *now <= before)
}

/// CPU time of a thread of the switch, by name.
fn cpu(switch: &Switch, thread: &str) -> Duration {
    let tasks = format!("/proc/{}/task", switch.process.0.id());
    let mut ticks = 0;
    for task in std::fs::read_dir(tasks).unwrap() {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
        let Some((name, rest)) = stat.rsplit_once(')') else { continue };
        if name.split_once('(').unwrap().1 == thread {
            let fields = rest.split_whitespace().skip(11).take(2);
            ticks += fields.map(|t| t.parse::<u64>().unwrap()).sum::<u64>();
        }
    }
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}

/// The control thread.
const CONTROL: &str = "pvswitch";

/// Two ports with traffic between them, and a switch with room for more.
fn rig(dir: &Dir) -> (Switch, Bystanders) {
    let switch = Switch::start(dir, &[], &[dir.port("x", ""), dir.port("y", "")]);
    let others = Bystanders::start(&switch, dir, "x", "y");
    (switch, others)
}

/// A vif of the switch, and the resources that the switch held before its guest connected.
struct Vif<'a> {
    switch: &'a Switch,
    name: &'a str,
    dir: PathBuf,
    before: [usize; 2],
}

impl<'a> Vif<'a> {
    fn add(switch: &'a Switch, dir: &Dir, name: &'a str) -> Self {
        switch.json(&["add-port", &format!("{name}=xen-local:{}", dir.text(name))]);
        let (dir, before) = (dir.path(name), holds(switch));
        Self { switch, name, dir, before }
    }

    fn xen(&self, key: &str) -> String {
        self.switch.port("show", self.name)["xen"][key].as_str().unwrap_or_default().into()
    }

    fn faults(&self) -> u64 {
        self.switch.port("show", self.name)["faults"].as_u64().unwrap()
    }

    /// Waits until no resources of the last guest are held, and checks that the next is served.
    fn recovers(&self) {
        wait_for("the vif to be removed", || self.xen("state").starts_with("waiting for the tool"));
        let what = "grants and channels to be given back";
        wait_for(what, || holds_at_most(self.switch, self.before));
        let faults = self.faults();
        let mut next = Guest::started(&self.dir);
        self.switch.wait_up(self.name, true);
        next.is_served();
        assert_eq!(self.faults(), faults);
    }
}

/// A vif `bad` beside two ports with traffic between them.
struct Scene<'a> {
    dir: &'a Dir,
    switch: &'a Switch,
    others: &'a Bystanders,
    vif: &'a Vif<'a>,
}

impl Scene<'_> {
    /// Checks something while another port floods frames to unknown addresses.
    fn under_flood(&self, rate: &str, check: impl FnOnce()) {
        let Self { dir, switch, .. } = self;
        switch.json(&["add-port", &dir.port("z", "")]);
        let unknown = ["--peer", "02:00:00:00:00:bb", "--rate", rate];
        let flood = Gen::start(&dir.path("z"), &unknown);
        check();
        flood.end();
        switch.json(&["del-port", "z"]);
    }
}

/// Runs a test, at whose end the guest of the vif is gone: the next one is served, and the other
/// ports have lost nothing.
fn beside_others(test: impl FnOnce(&Scene<'_>)) {
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    let vif = Vif::add(&switch, &dir, "bad");
    test(&Scene { dir: &dir, switch: &switch, others: &others, vif: &vif });
    vif.recovers();
    others.end();
}

/// Number of lines of the log that contain `what`.
fn lines(switch: &Switch, what: &str) -> usize {
    switch.log().lines().filter(|line| line.contains(what)).count()
}

/// Number of lines of the log once it has the one of port `bad`'s connection: its guest may see the
/// new state before.
fn lines_once_connected(switch: &Switch) -> usize {
    wait_for("the log", || lines(switch, "port bad: vif 1/0: connected") == 1);
    switch.log().lines().count()
}

/// Runs `act` in a loop for a second, longer on a busy machine: at least so many times. Returns how
/// often.
fn storm(least: u32, mut act: impl FnMut(u32)) -> u32 {
    let end = Instant::now() + Duration::from_secs(1);
    let mut n = 0;
    while n < least || Instant::now() < end {
        act(n);
        n += 1;
    }
    n
}

/// Runs [`storm`], while the switch gets requests and bystanders' frames pass. Returns how often,
/// and the CPU time of the control thread in that time.
fn under_storm(
    switch: &Switch,
    others: &Bystanders,
    least: u32,
    act: impl FnMut(u32) + Send,
) -> (u32, Duration, Duration) {
    let before = (cpu(switch, CONTROL), Instant::now());
    let n = std::thread::scope(|scope| {
        let storm = scope.spawn(|| storm(least, act));
        while !storm.is_finished() {
            assert!(switch.ctl(&["show"]).status.success());
            others.wait_for_replies(switch);
        }
        storm.join().unwrap()
    });
    (n, cpu(switch, CONTROL) - before.0, before.1.elapsed())
}

#[test]
fn broken_rings_stop_their_port_only() {
    type Attack = fn(&mut Guest);
    let attacks: [(&str, Attack); 9] = [
        ("req_prod jumped to 30000, with requests taken up to 0", |guest| {
            guest.tx_prod = 30_000;
            guest.push();
        }),
        ("a buffer of 200 bytes at 4000 crosses the end of its page", |guest| {
            guest.request(GREF + DATA, 4000, 0, 200);
            guest.push();
        }),
        ("a packet of 22 slots or more", |guest| {
            guest.request(GREF + DATA, 0, tx_flag::MORE_DATA, 22 * 100);
            (1..22).for_each(|_| guest.request(GREF + DATA, 0, tx_flag::MORE_DATA, 100));
            guest.push();
        }),
        ("a packet without an end fills the whole ring", |guest| {
            guest.request(GREF + DATA, 0, tx_flag::EXTRA_INFO, 100);
            // Multicast, another follows.
            (1..RING_SIZE).for_each(|_| guest.extra([2, 1, 1, 0, 0x5e, 0, 0, 1]));
            guest.push();
        }),
        ("an extra info of unknown type 0", |guest| {
            guest.request(GREF + DATA, 0, tx_flag::EXTRA_INFO, 100);
            guest.extra([0; 8]);
            guest.push();
        }),
        ("a GSO packet with segments of 0 bytes", |guest| {
            guest.request(GREF + DATA, 0, tx_flag::EXTRA_INFO, 100);
            guest.extra([1, 0, 0, 0, 1, 0, 0, 0]);
            guest.push();
        }),
        ("a GSO packet of unknown type 7", |guest| {
            guest.request(GREF + DATA, 0, tx_flag::EXTRA_INFO, 100);
            guest.extra([1, 0, 100, 0, 7, 0, 0, 0]);
            guest.push();
        }),
        ("control ring: req_prod jumped to 30000, with requests taken up to 0", |guest| {
            guest.area(CTRL).sync_store_u32(REQ_PROD, 30_000, Ordering::Release);
            guest.channels[CTRL].notify();
        }),
        ("it revoked the memory of its rings", |guest| {
            guest.is_served();
            ftruncate(&guest.memory, 0).unwrap();
            guest.channels[TX].notify();
        }),
    ];
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    for (n, (what, attack)) in attacks.into_iter().enumerate() {
        let name = format!("bad{n}");
        eprintln!("{name}: {what}");
        let vif = Vif::add(&switch, &dir, &name);
        let mut guest = Guest::started(&vif.dir);
        switch.wait_up(&name, true);
        attack(&mut guest);
        switch.wait_up(&name, false);
        others.wait_for_replies(&switch);
        assert!(vif.faults() >= 1, "{what}");
        assert!(vif.xen("state").contains("the guest's driver violated the protocol"));
        assert_eq!(vif.xen("error"), what);
        let line = format!("port {name}: stopped: its guest violated the protocol: {what}");
        assert_eq!(lines(&switch, &line), 1, "{line}\n{}", switch.log());
        assert_eq!(lines(&switch, &format!("port {name}: stopped: its")), 1);
        // The carrier is reported as lost, and the state stays until it closes.
        let carrier = guest.store.read(&format!("{BACK}/carrier")).unwrap();
        assert_eq!((guest.back_state().as_str(), carrier.as_deref()), ("4", Some("0")));
        // Later changes to its rings have no effect.
        guest.channels.iter().for_each(Channel::notify);
        others.wait_for_replies(&switch);
        drop(guest);
        vif.recovers();
    }
    others.end();
}

#[test]
fn a_broken_receive_ring_stops_its_port_only() {
    beside_others(|scene| {
        let Scene { switch, others, vif, .. } = scene;
        let guest = Guest::started(&vif.dir);
        switch.wait_up("bad", true);
        guest.area(RX).sync_store_u32(REQ_PROD, 30_000, Ordering::Release);
        guest.channels[RX].notify();
        // It receives a flooded frame.
        scene.under_flood("100", || {
            switch.wait_up("bad", false);
            others.wait_for_replies(switch);
            let what =
                "violated the protocol: req_prod jumped to 30000, with requests taken up to 0";
            assert_eq!(lines(switch, what), 1, "{}", switch.log());
        });
    });
}

#[test]
fn refused_packets_get_responses_and_their_port_continues() {
    beside_others(|Scene { switch, others, vif, .. }| {
        let mut guest = Guest::started(&vif.dir);
        let counter = |name: &str| switch.counter("bad", "ingress", name);
        // A ring full of invalid grants: not in the table, and beyond it.
        for i in 0..RING_SIZE {
            let gref = if i % 2 == 0 { i % GREF } else { u32::MAX - i };
            guest.request(gref, 0, 0, 60);
        }
        guest.push();
        assert_eq!(guest.statuses(RING_SIZE), [status::ERROR; RING_SIZE as usize]);
        assert_eq!(counter("drops_bad_grant"), u64::from(RING_SIZE));
        others.wait_for_replies(switch);
        // Shorter than a header; more slots than allowed; a later slot longer than the packet.
        guest.request(GREF + DATA, 0, 0, 13);
        guest.push();
        assert_eq!((guest.statuses(1), counter("drops_runt")), (vec![status::ERROR], 1));
        guest.request(GREF + DATA, 0, tx_flag::MORE_DATA, 300);
        for i in 1..20 {
            guest.request(GREF + DATA, 0, tx_flag::MORE_DATA * u16::from(i < 19), 10);
        }
        guest.push();
        assert_eq!(guest.statuses(20), [status::ERROR; 20]);
        assert_eq!(counter("drops_too_many_segs"), 1);
        guest.request(GREF + DATA, 0, tx_flag::MORE_DATA, 100);
        guest.request(GREF + DATA, 0, 0, 101);
        guest.push();
        assert_eq!((guest.statuses(2), counter("drops_too_long")), (vec![status::ERROR; 2], 1));
        // Headers spread over many slots, some of them empty, are a valid packet.
        guest.write_frame(0x98);
        let before = counter("frames");
        guest.request(GREF + DATA, 0, tx_flag::MORE_DATA, 60);
        for n in 0..6 {
            guest.request(GREF + DATA, n, tx_flag::MORE_DATA, n % 2);
        }
        guest.request(GREF + DATA, 3, 0, 57);
        guest.push();
        assert_eq!(guest.statuses(8), [status::OKAY; 8]);
        assert_eq!(counter("frames"), before + 1);
        others.wait_for_replies(switch);
        assert!(switch.is_up("bad"));
        assert_eq!(vif.faults(), 0);
    });
}

#[test]
fn invalid_grants_of_receive_buffers_lose_only_the_guests_own_frames() {
    beside_others(|scene| {
        let Scene { switch, others, vif, .. } = scene;
        let guest = Guest::started(&vif.dir);
        let mut rx = FrontRx::new(guest.area(RX));
        for id in 0..64 {
            rx.post(RxRequest { id, gref: u32::MAX - u32::from(id) });
        }
        rx.publish();
        guest.channels[RX].notify();
        scene.under_flood("2k", || {
            wait_for("bad grants", || switch.counter("bad", "egress", "drops_bad_grant") >= 64);
            others.wait_for_replies(switch);
            assert!(switch.is_up("bad"));
            assert_eq!(vif.faults(), 0);
        });
    });
}

#[test]
fn a_storm_of_events_delays_no_other_port() {
    beside_others(|Scene { switch, others, vif, .. }| {
        let mut guest = Guest::started(&vif.dir);
        let log = lines_once_connected(switch);
        for (which, what) in [(TX, "tx"), (RX, "rx"), (CTRL, "ctrl")] {
            let channel = &guest.channels[which];
            let (n, control, time) = under_storm(switch, others, 1000, |_| channel.notify());
            eprintln!("{what}: {n} events, {control:?} of the control thread in {time:?}");
            assert!(control < time / 4, "{control:?} of {time:?}");
        }
        guest.is_served();
        assert_eq!(switch.log().lines().count(), log, "{}", switch.log());
    });
}

#[test]
fn a_flood_of_watch_events_is_read_at_a_limited_rate() {
    beside_others(|Scene { switch, others, vif, .. }| {
        let mut guest = Guest::started(&vif.dir);
        let log = lines_once_connected(switch);
        let store = &guest.store;
        let write = |n: u32| store.write(&format!("{FRONT}/feature-sg"), &n.to_string()).unwrap();
        let (n, control, time) = under_storm(switch, others, 200, write);
        eprintln!("{n} writes, {control:?} of the control thread in {time:?}");
        assert!(control < time / 2, "{control:?} of {time:?}");
        assert_eq!(switch.log().lines().count(), log, "{}", switch.log());
        // Keys that change the state, which is logged.
        let keys = [("state", "4"), ("disconnect", "1"), ("state", "7"), ("disconnect", "0")];
        let write = |n: u32| {
            let (key, value) = keys[n as usize % keys.len()];
            store.write(&format!("{FRONT}/{key}"), value).unwrap();
        };
        let (n, control, time) = under_storm(switch, others, 200, write);
        eprintln!("{n} changes, {control:?} of the control thread in {time:?}");
        assert!(control < time / 2, "{control:?} of {time:?}");
        let more = switch.log().lines().count() - log;
        assert!(more < 30, "{more} lines\n{}", switch.log());
        guest.set("disconnect", 0);
        guest.set("state", 4);
        guest.is_served();
        assert_eq!(lines(switch, "retrying"), 0, "xenstore still works\n{}", switch.log());
    });
}

#[test]
fn a_flood_of_control_requests_delays_no_other_port() {
    beside_others(|Scene { switch, others, vif, .. }| {
        let mut guest = Guest::started(&vif.dir);
        let log = lines_once_connected(switch);
        // Lists of 512 invalid grants, of an invalid queue, and invalid keys and tables.
        let list = GREF + DATA;
        let orders: [(u16, [u32; 3]); 6] = [
            (ctrl_type::ADD_GREF_MAPPING, [0, list, 512]),
            (ctrl_type::ADD_GREF_MAPPING, [17, list, u32::MAX]),
            (ctrl_type::DEL_GREF_MAPPING, [0, list, 512]),
            (ctrl_type::SET_HASH_KEY, [list, u32::MAX, 0]),
            (ctrl_type::SET_HASH_MAPPING, [list, 1024, u32::MAX]),
            (u16::MAX, [0; 3]),
        ];
        let mut ring = FrontCtrl::new(guest.area(CTRL));
        let (channel, mut answers) = (&guest.channels[CTRL], 0);
        let ask = |n: u32| {
            let (kind, data) = orders[n as usize % orders.len()];
            while ring.put(CtrlRequest { id: n as u16, kind, data }) {}
            ring.publish();
            channel.notify();
            while ring.take().unwrap().is_some() {
                answers += 1;
            }
        };
        let (_, control, time) = under_storm(switch, others, 300, ask);
        eprintln!("{answers} responses, {control:?} of the control thread in {time:?}");
        assert!(answers > 300, "{answers} responses are no flood");
        assert!(control < time / 4, "{control:?} of {time:?}");
        let more = switch.log().lines().count() - log;
        assert!(more < 30, "{more} lines\n{}", switch.log());
        guest.is_served();
        assert_eq!(vif.faults(), 0);
    });
}

#[test]
fn invalid_numbers_of_queues() {
    beside_others(|Scene { switch, others, vif, .. }| {
        let guest = Guest::new(&vif.dir);
        guest.offer_rings();
        for count in ["0", "17", "4294967296", "-1", "two"] {
            guest.wait_back("2");
            guest.set("multi-queue-num-queues", count);
            guest.set("state", 4);
            guest.wait_back("5");
            assert!(vif.xen("error").contains("multi-queue-num-queues is"), "{}", vif.xen("error"));
            assert!(vif.xen("state").starts_with("rejected"), "{}", vif.xen("state"));
            others.wait_for_replies(switch);
            guest.set("state", 6);
            guest.wait_back("6");
            guest.set("state", 1);
        }
        // No ring was mapped: it is served with one queue.
        let mut guest = guest;
        guest.set("multi-queue-num-queues", 1);
        guest.connect();
        guest.is_served();
    });
}

/// Only some resources of a queue are available: those acquired are released.
#[test]
fn invalid_keys_leave_no_resources_held() {
    let cases: [(&[(&str, u32)], &str); 8] = [
        (&[("tx-ring-ref", 0)], "grant 0 cannot be mapped: not in use"),
        (&[("rx-ring-ref", u32::MAX)], "grant 4294967295 cannot be mapped: no such entry"),
        (&[("ctrl-ring-ref", GREF + PAGES)], "cannot be mapped: no such entry"),
        (&[("event-channel-rx", 77)], "event channel 77 cannot be bound: no such port"),
        // An event channel that is in use must not be bound again.
        (&[("event-channel-tx", 2)], "event channel 2 cannot be bound: already bound"),
        (&[("event-channel-ctrl", 1)], "event channel 1 cannot be bound: already bound"),
        // A page of data is not a ring.
        (&[("tx-ring-ref", GREF + DATA)], "tx ring: "),
        (&[("multi-queue-num-queues", 2)], "queue-0/tx-ring-ref is missing"),
    ];
    let dir = Dir::new();
    let (switch, others) = rig(&dir);
    for (n, (keys, what)) in cases.into_iter().enumerate() {
        let name = format!("bad{n}");
        let vif = Vif::add(&switch, &dir, &name);
        let guest = Guest::new(&vif.dir);
        guest.area(DATA as usize).store_u32(REQ_PROD, 1000);
        guest.offer_rings();
        let connected = holds(&switch);
        keys.iter().for_each(|(key, value)| guest.set(key, *value));
        guest.wait_back("2");
        guest.set("state", 4);
        guest.wait_back("5");
        assert!(vif.xen("error").contains(what), "{what}: {}", vif.xen("error"));
        assert_eq!(lines(&switch, &format!("port {name}: vif 1/0: rejected")), 1);
        assert!(holds_at_most(&switch, connected), "{what}");
        others.wait_for_replies(&switch);
        drop(guest);
        vif.recovers();
    }
    others.end();
}

/// All three rings in one page: the effects are limited to this guest.
#[test]
fn overlapping_rings() {
    beside_others(|scene| {
        let Scene { switch, others, vif, .. } = scene;
        let mut guest = Guest::new(&vif.dir);
        guest.offer_rings();
        ["rx-ring-ref", "ctrl-ring-ref"].iter().for_each(|key| guest.set(key, GREF));
        guest.connect();
        switch.wait_up("bad", true);
        scene.under_flood("2k", || {
            for n in 0..10 {
                (0..20).for_each(|i| guest.request(GREF + (i + n) % 3, 0, 0, 60));
                guest.push();
                guest.channels.iter().for_each(Channel::notify);
                others.wait_for_replies(switch);
            }
        });
    });
}

#[test]
fn states_in_any_order() {
    beside_others(|Scene { switch, others, vif, .. }| {
        let mut guest = Guest::started(&vif.dir);
        let states = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "", "four"];
        for from in states {
            for to in states {
                guest.set("state", from);
                guest.set("state", to);
            }
            others.wait_for_replies(switch);
        }
        // And slowly, so that each state is read.
        for state in states.into_iter().rev() {
            guest.set("state", state);
            std::thread::sleep(Duration::from_millis(30));
        }
        others.wait_for_replies(switch);
        // A correct handshake still succeeds.
        guest.set("state", 6);
        guest.wait_back("6");
        guest.set("state", 1);
        guest.offer_rings();
        guest.tx_prod = 0;
        guest.connect();
        guest.is_served();
        assert_eq!(vif.faults(), 0);
        assert_eq!(lines(switch, "retrying"), 0, "xenstore still works\n{}", switch.log());
    });
}

#[test]
fn a_guest_killed_in_its_handshake_leaves_no_resources_held() {
    beside_others(|Scene { switch, others, vif, .. }| {
        for _ in 0..3 {
            let before = switch.counter("bad", "ingress", "frames");
            let mut sender = Gen::connect(&format!("xen-local:{}", vif.dir.display()), &[]);
            switch.wait_up("bad", true);
            wait_for("frames", || switch.counter("bad", "ingress", "frames") > before + 100);
            sender.0.kill();
            vif.recovers();
            others.wait_for_replies(switch);
        }
        assert_eq!(vif.faults(), 0);
    });
}

#[test]
fn a_handshake_that_ends_after_any_of_its_writes_leaves_no_resources_held() {
    beside_others(|Scene { others, switch, vif, .. }| {
        // The last one is the state with which it connects.
        for writes in 0..=10 {
            let guest = Guest::new(&vif.dir);
            guest.writes.set(writes);
            guest.offer_rings();
            guest.wait_back("2");
            guest.set("state", 4);
            assert_eq!(guest.writes.get(), 0, "{writes}");
            drop(guest);
            vif.recovers();
        }
        others.wait_for_replies(switch);
    });
}

#[test]
fn missing_permission_and_closed_connections_are_reported() {
    let dir = Dir::new();
    let vif = format!("a=xen-local:{}", dir.text("a"));
    let mut switch = Switch::start(&dir, &[], &[vif]);
    let at = format!("xen-local:{}", dir.text("a"));
    let mut other = pvswitch();
    other.args(["gen", "--connect", &at, "--mode", "sink", "--duration", "1"]);
    if rustix::process::geteuid().is_root() {
        other.uid(65_534).gid(65_534);
    } else {
        std::fs::set_permissions(dir.path("a"), Permissions::from_mode(0o000)).unwrap();
    }
    let refused = other.output().unwrap();
    std::fs::set_permissions(dir.path("a"), Permissions::from_mode(0o755)).unwrap();
    assert_eq!(refused.status.code(), Some(1));
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        text.contains("hypervisor: permission denied; run as root, or as the owner of the socket"),
        "{text}"
    );
    // Xenstore and the other end disconnect without notice.
    let mut guest = Gen::connect(&at, &["--mode", "sink"]);
    // Its handshake ends after that of the switch: with its first frame, at the latest.
    wait_for("its first frame", || switch.counter("a", "ingress", "frames") > 0);
    switch.process.kill();
    assert_eq!(guest.0.wait().code(), Some(1));
    let text = std::io::read_to_string(guest.0.0.stderr.take().unwrap()).unwrap();
    assert!(text.contains("pvswitch: the switch closed the connection"), "{text}");
    // The next guest is not affected by what it left.
    let next = Switch::start(&dir, &[], &[format!("a=xen-local:{}", dir.text("a"))]);
    let _guest = Gen::connect(&at, &["--mode", "sink"]);
    next.wait_up("a", true);
}
