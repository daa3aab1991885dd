//! Kills of a kept switch at each message to its keeper, with the program's own objects in one
//! process: its control thread is driven here, a kill unwinds it, and the next switch is made of
//! what the keeper has.
//!
//! A seed is a sequence of requests, of front-ends that connect, and of frames between two guests
//! that stay. Each may be killed before any of its messages, or between the last one and the reply.
//! Then the next switch is as the one before was without the request or with it, with it if all was
//! stored, and its guests get each frame once, in order, those sent before included.
//!
//! This is not in `crates/sim`, which does not use the program: what is kept, and when, is decided
//! here. Time is not simulated, and workers end between two rounds; that a worker is killed amid a
//! burst is in `ring/tests/ledger.rs`.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::Command;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use api::{PortText, Request};
use guest::{Connect, ConnectOptions, Guest, connect};
use serde_json::{Value, json};
use switch::poll::{Costs, Policy};
use switch::time::{self, Ns};

use super::cut::Killed;
use super::keep::ATTEMPTS;
use super::restore::{Contents, Start};
use super::tests::{Dir, options};
use super::{Attach, Event, PortState, System};
use crate::keeper::receive;

/// Seeds of a run without `CUT_SEEDS=FROM..TO`, and of one process: each kill leaves descriptors
/// and threads of a switch behind, which the end of its process would not.
const SEEDS: u64 = 180;
const SEEDS_OF_PROCESS: u64 = 30;
/// Steps of a seed.
const STEPS: u32 = 12;
const PATIENCE: Duration = Duration::from_secs(20);
const MACS: [[u8; 6]; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];
const SIZE: usize = 60;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

/// What a run reached.
#[derive(Debug, Default)]
struct Seen {
    kills: u32,
    /// Kills after which the switch was as before the request, and as after it.
    before: u32,
    after: u32,
    /// Kills between the last message and the reply.
    unreplied: u32,
    /// Kills amid handshakes, and those after which the front-end was served.
    handshakes: u32,
    served: u32,
    frames: u64,
}

impl Seen {
    fn add(&mut self, other: &Self) {
        self.kills += other.kills;
        self.before += other.before;
        self.after += other.after;
        self.unreplied += other.unreplied;
        self.handshakes += other.handshakes;
        self.served += other.served;
        self.frames += other.frames;
    }

    /// Each kind of kill occurs.
    fn check(&self) {
        let Self { before, after, unreplied, handshakes, served, .. } = self;
        assert!([before, after, unreplied, handshakes, served].iter().all(|n| **n > 0), "{self:?}");
    }
}

/// A keeper's side.
#[derive(Default)]
struct Keeper {
    held: BTreeMap<String, OwnedFd>,
    socket: Option<OwnedFd>,
}

impl Keeper {
    fn read(&mut self) {
        let Some(socket) = &self.socket else { return };
        while let Ok(Some(message)) = receive(socket.as_fd(), Instant::now()) {
            match message.fd {
                Some(fd) => drop(self.held.insert(message.text, fd)),
                None => drop(self.held.remove(&message.text)),
            }
        }
    }

    /// Starts a switch with what is held, or a new one.
    fn start(&mut self, dir: &Dir) -> System {
        self.read();
        let mut contents = Contents::default();
        for (name, fd) in &self.held {
            contents.add(name.clone(), fd.try_clone().unwrap());
        }
        if let Some(live) = contents.live() {
            // As a process that did not end soon after its start.
            live.mark(ATTEMPTS, &[0; 16]).unwrap();
        }
        let (ours, theirs) = os::socketpair().unwrap();
        self.socket = Some(theirs);
        let mut start = Start::default();
        let now = os::monotonic().as_nanos() as u64;
        start.continue_from(contents, Some(ours), now).unwrap();
        let is_request = |error: &String| error.contains("was killed while it ran the request");
        assert!(start.errors.iter().all(is_request), "{:?}", start.errors);
        let mut options = options(dir.0.join("ctl"));
        let mut inherited = super::Inherited::default();
        if let Some(takeover) = &mut start.takeover {
            (options.config, options.origin, ..) = takeover.configuration().unwrap();
            inherited = takeover.take_inherited().unwrap();
        }
        let mut system = System::new(options, inherited, start.keep.take()).unwrap();
        match start.takeover.take() {
            Some(takeover) => system.take_over(takeover).unwrap(),
            None => system.start_ports().unwrap(),
        }
        system.start_keeping();
        self.read();
        system
    }
}

/// Ends a switch as a kill does: workers do not continue, and nothing is closed or removed.
fn kill(system: System) -> ManuallyDrop<System> {
    std::mem::forget(system.pool.freeze(PATIENCE).expect("workers end their rounds"));
    ManuallyDrop::new(system)
}

/// Ends connections of a killed switch that the next one did not take over: with its process, they
/// would be closed.
fn close_others(killed: &System, next: &System) {
    for (name, state) in &killed.ports {
        let is_taken = next.ports.get(name).is_some_and(|state| state.attach.is_connected());
        if let Attach::VhostUser(vhost) = &state.attach
            && let Some(connection) = vhost.connection.as_ref().filter(|_| !is_taken)
        {
            os::shutdown(connection.as_fd());
        }
    }
}

/// All that must continue, of the switch and its ports.
fn observe(system: &System) -> Value {
    let fdb = system.fdb();
    let statics = fdb["entries"].as_array().unwrap().iter().filter(|e| e["static"] == true);
    let statics = statics.map(|e| json!([e["mac"], e["vlan"], e["port"]]).to_string());
    // In no order.
    let statics: BTreeSet<_> = statics.collect();
    let ports = system.ports.values().map(|state| {
        let (show, stats) = (system.show_port(state), super::show::port_stats(state));
        let of = |name: &str| show[name].clone();
        let used = ["descriptors", "mappings", "mapped-bytes"];
        json!({
            "port": [of("name"), of("id"), of("kind"), of("rules"), of("faults")],
            "guest": [of("up"), of("connected"), of("connections"), of("features")],
            "used": used.map(|entry| show["account"][entry]["used"].clone()),
            "drain": of("drain") != "off",
            "queues": stats["ingress"].as_array().unwrap().iter()
                .map(|queue| json!([queue["weight"], queue["poll"]])).collect::<Vec<_>>(),
        })
    });
    let ports: Vec<Value> = ports.collect();
    json!({ "config": system.saved().unwrap(), "statics": statics, "ports": ports })
}

/// What is observed, without what a guest that connects or leaves changes at port `c`.
fn without_guest(mut observed: Value) -> Value {
    for port in observed["ports"].as_array_mut().unwrap() {
        if port["port"][0] == "c" {
            (port["guest"], port["used"]) = (Value::Null, Value::Null);
            port["port"][4] = Value::Null;
        }
    }
    observed
}

fn guest_of(dir: &Dir, name: &str, ring: u64) -> JoinHandle<Option<Guest>> {
    let options = ConnectOptions {
        connect: format!("vhost-user:{}", dir.0.join(name).display()),
        queues: 1,
        queue_size: 64,
        packed: ring & 1 != 0,
        in_order: ring & 2 != 0,
        poll: Some(Policy::Event),
        kick: Policy::Event,
        set: Vec::new(),
        costs: || Costs::TYPICAL,
    };
    let to = Connect::try_from(&options).unwrap();
    std::thread::spawn(move || connect(&to, None).ok())
}

/// One round of the control thread, which ends soon without an event.
fn round(system: &mut System) {
    system.suspended.push((Instant::now() + Duration::from_millis(1), Event::Link("none".into())));
    system.round().unwrap();
}

/// Two guests, of ports `a` and `b`.
struct Pair {
    guests: [Guest; 2],
    sent: u64,
    got: u64,
}

impl Pair {
    fn send(&mut self, frames: u64) {
        let tx = &mut self.guests[0].pairs[0].tx;
        for _ in 0..frames {
            assert_eq!(tx.room(1).unwrap(), 1);
            let mut frame = [0; SIZE];
            frame[..6].copy_from_slice(&MACS[1]);
            frame[6..12].copy_from_slice(&MACS[0]);
            frame[12..14].copy_from_slice(&[0x88, 0xb5]);
            frame[14..22].copy_from_slice(&self.sent.to_le_bytes());
            let at = tx.free().next().unwrap();
            tx.plain(at).write(&frame);
            assert!(tx.send(at, guest::HDR_LEN as u32 + SIZE as u32));
            self.sent += 1;
        }
        tx.publish(frames as usize, time::Instant::START + Ns::from(os::monotonic()));
    }

    /// Waits for all frames sent: each must come once, in order.
    fn receive(&mut self) {
        let end = Instant::now() + PATIENCE;
        let rx = &mut self.guests[1].pairs[0].rx;
        let mut last = false;
        loop {
            let (sent, got) = (self.sent, &mut self.got);
            rx.receive(64, |segs| {
                let mut frame = [0; guest::HDR_LEN + SIZE];
                segs.iter().fold(0, |at, seg| at + seg.read(&mut frame[at..]));
                let frame = &frame[guest::HDR_LEN..];
                if frame[12..14] == [0x88, 0xb5] {
                    let number = u64::from_le_bytes(frame[14..22].try_into().unwrap());
                    assert_eq!(number, *got, "each frame once, in order, of {sent}");
                    *got += 1;
                }
            })
            .unwrap();
            rx.refill();
            if last {
                return;
            }
            last = self.got == self.sent;
            assert!(Instant::now() < end, "{} of {} frames", self.got, self.sent);
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// A request of an operator.
fn request(random: &mut Random, dir: &Dir) -> Request {
    let name = ["n0", "n1", "s0", "s1"][random.below(4) as usize];
    let mac = format!("02:00:00:00:01:{:02x}", random.below(3));
    let vlan = random.below(2) as u16 * 7;
    match random.below(8) {
        0..=2 => {
            let kind = match name.starts_with('n') {
                true => "null".into(),
                false => format!("vhost-user:{}", dir.0.join(name).display()),
            };
            let hold = random.below(9);
            let text: PortText = format!("{name}={kind},hold={hold}").parse().unwrap();
            Request::add_port(&text)
        }
        3 => Request::DelPort { name: name.into() },
        4 => {
            let settings = [format!("weight={}", 1 + random.below(8)), "poll=timer:500".into()];
            Request::set(Some(["a", "b", name][random.below(3) as usize]), &settings).unwrap()
        }
        5 => Request::FdbAdd { mac, port: ["a", name][random.below(2) as usize].into(), vlan },
        6 => Request::FdbDel { mac, vlan },
        _ if random.below(2) == 0 => Request::Drain { name: name.into() },
        _ => Request::Resume { name: name.into() },
    }
}

/// How a step was killed.
fn killed(payload: Box<dyn Any + Send>) -> Killed {
    *payload.downcast().unwrap_or_else(|other| resume_unwind(other))
}

struct Run {
    dir: Dir,
    keeper: Keeper,
    /// `None` between a kill and the next start.
    system: Option<System>,
    pair: Pair,
    random: Random,
    seen: Seen,
}

impl Run {
    fn new(seed: u64) -> Self {
        let name = format!("pvs-cuts-{}-{seed}", std::process::id());
        let dir = Dir(std::env::temp_dir().join(name));
        std::fs::create_dir_all(&dir.0).unwrap();
        let (mut keeper, mut random) = (Keeper::default(), Random(seed));
        let mut system = keeper.start(&dir);
        for name in ["a", "b", "c"] {
            let text = format!("{name}=vhost-user:{}", dir.0.join(name).display());
            let text: PortText = text.parse().unwrap();
            system.respond(&Request::add_port(&text)).unwrap();
        }
        for (mac, port) in MACS.iter().zip(["a", "b"]) {
            let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
            system.respond(&Request::FdbAdd { mac, port: port.into(), vlan: 0 }).unwrap();
        }
        system.end_reply();
        let guests = ["a", "b"].map(|name| {
            let guest = guest_of(&dir, name, random.below(4));
            while !guest.is_finished() || !system.ports[name].port.active() == 0 {
                round(&mut system);
            }
            guest.join().unwrap().expect("it is served")
        });
        keeper.read();
        let (pair, seen) = (Pair { guests, sent: 0, got: 0 }, Seen::default());
        Self { dir, keeper, system: Some(system), pair, random, seen }
    }

    fn system(&mut self) -> &mut System {
        self.system.as_mut().expect("one runs")
    }

    /// Has the control thread act, and kills it at a message. Returns whether that was reached, and
    /// what the switch was like then.
    fn act(&mut self, cut: u32, act: impl FnOnce(&mut System)) -> Option<(Killed, Value)> {
        let system = self.system();
        system.keep.as_ref().unwrap().store.cut.set(Some(cut));
        match catch_unwind(AssertUnwindSafe(|| act(&mut *system))) {
            Ok(()) => {
                system.keep.as_ref().unwrap().store.cut.set(None);
                self.keeper.read();
                None
            }
            Err(payload) => Some((killed(payload), observe(system))),
        }
    }

    /// The next switch, of what the keeper has; some frames are sent in between.
    fn restart(&mut self) {
        let killed = kill(self.system.take().expect("one runs"));
        self.seen.kills += 1;
        let frames = self.random.below(20);
        self.pair.send(frames);
        let next = self.keeper.start(&self.dir);
        close_others(&killed, &next);
        self.system = Some(next);
    }

    fn exchange(&mut self) {
        self.pair.receive();
        let frames = self.random.below(20);
        self.pair.send(frames);
        self.pair.receive();
    }

    fn request(&mut self) {
        let request = request(&mut self.random, &self.dir);
        let before = observe(self.system());
        let cut = self.random.below(7) as u32;
        let cut = self.act(cut, |system| drop(system.respond(&request)));
        let Some((Killed { stored }, after)) = cut else {
            self.system().end_reply();
            return;
        };
        self.restart();
        let now = observe(self.system());
        self.seen.unreplied += u32::from(stored);
        self.seen.after += u32::from(now == after);
        self.seen.before += u32::from(now != after);
        let may_be_lost = !stored && now == before;
        assert!(
            now == after || may_be_lost,
            "{request:?}, stored: {stored}: {}",
            differ(&now, &after)
        );
    }

    /// A front-end connects to `c`, is killed in its handshake or not, and leaves.
    fn handshake(&mut self) {
        let before = without_guest(observe(self.system()));
        let (ring, cut) = (self.random.below(4), self.random.below(24) as u32);
        let guest = guest_of(&self.dir, "c", ring);
        let rounds = |system: &mut System| {
            while !guest.is_finished() {
                round(system);
            }
        };
        let is_killed = self.act(cut, rounds).is_some();
        if is_killed {
            self.restart();
            rounds(self.system());
        }
        let guest = guest.join().unwrap();
        self.seen.handshakes += u32::from(is_killed);
        self.seen.served += u32::from(is_killed && guest.is_some());
        drop(guest);
        let end = Instant::now() + PATIENCE;
        // Threads that close its descriptors may take a moment.
        let holds = |state: &PortState| {
            let account = super::accounts::account(state);
            let used = ["descriptors", "mappings", "mapped-bytes"];
            state.attach.is_connected() || used.iter().any(|entry| account[entry]["used"] != 0)
        };
        while holds(&self.system().ports["c"]) {
            round(self.system());
            assert!(Instant::now() < end, "its connection ends, and nothing of it is held");
        }
        let now = without_guest(observe(self.system()));
        assert!(now == before, "{}", differ(&now, &before));
    }
}

/// The parts that differ, for a message.
fn differ(now: &Value, expected: &Value) -> String {
    let parts =
        ["config", "statics", "ports"].into_iter().filter(|part| now[part] != expected[part]);
    parts.map(|part| format!("{part}: {}\nnot {}\n", now[part], expected[part])).collect()
}

fn run(seed: u64) -> Seen {
    let mut run = Run::new(seed);
    for _ in 0..STEPS {
        match run.random.below(4) {
            0 => run.handshake(),
            _ => run.request(),
        }
        run.exchange();
    }
    run.seen.frames = run.pair.got;
    let Run { dir, mut keeper, system, pair, seen, .. } = run;
    drop(pair);
    keeper.read();
    kill(system.expect("one runs"));
    drop(dir);
    seen
}

/// `CUT_SEEDS=FROM..TO`: these, in this process.
#[test]
fn switch_that_is_killed_at_any_message_continues_as_before_or_after_it() {
    super::setup::raise_descriptor_limit();
    let range = |text: &str| {
        let (from, to) = text.split_once("..")?;
        Some(from.parse::<u64>().ok()?..to.parse::<u64>().ok()?)
    };
    if let Ok(text) = std::env::var("CUT_SEEDS_OF_PROCESS") {
        let (seeds, mut all) = (range(&text).expect("FROM..TO"), Seen::default());
        for seed in seeds.clone() {
            println!("seed {seed}");
            all.add(&run(seed));
        }
        println!("{seeds:?}: {all:?}");
        if seeds.end - seeds.start == SEEDS_OF_PROCESS {
            all.check();
        }
        return;
    }
    let all = std::env::var("CUT_SEEDS").ok();
    let all = all.map_or(0..SEEDS, |text| range(&text).expect("CUT_SEEDS=FROM..TO"));
    let end = all.end;
    for from in all.step_by(SEEDS_OF_PROCESS as usize) {
        let to = end.min(from + SEEDS_OF_PROCESS);
        let mut process = Command::new(std::env::current_exe().unwrap());
        process.args(["run::cuts::switch_that_is_killed", "--nocapture"]);
        process.env("CUT_SEEDS_OF_PROCESS", format!("{from}..{to}"));
        let out = process.output().unwrap();
        let text = String::from_utf8_lossy(&out.stdout).into_owned();
        print!("{text}");
        let error = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "CUT_SEEDS={from}..{to}: {}\n{text}{error}", out.status);
    }
}
