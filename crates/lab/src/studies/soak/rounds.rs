//! One round after the other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use api::{PortText, Request};
use hostile::Ring;
use serde_json::Value;

use super::super::hostile::{loopback, mixed};
use super::MEMORY_GROWN_MAX;
use super::ledger::Ledger;
use crate::error::Fail;
use crate::stage::{
    Gen, NicOptions, Port, Proto, START_MAX_S, Stage, Switch, SwitchOptions, sleep, wait_for,
};
use crate::study::Figures;

/// Guests, and numbers of their addresses: two that continue, one that sends to the added port, the
/// guest of that, and two that are killed.
const SENDER: usize = 0;
const RECEIVER: usize = 1;
const TO_ADDED: usize = 2;
const ADDED: usize = 3;
const KILLED_SENDER: usize = 4;
const KILLED_RECEIVER: usize = 5;
const HOSTILE: usize = 6;
/// One that migrates, and who sends to it.
const MIGRATING: usize = 7;
const TO_MIGRATING: usize = 8;
/// Names of the ports that stay.
const STAY: [(usize, &str); 6] = [
    (SENDER, "sender"),
    (RECEIVER, "receiver"),
    (TO_ADDED, "to-added"),
    (KILLED_SENDER, "killed-sender"),
    (KILLED_RECEIVER, "killed-receiver"),
    (TO_MIGRATING, "to-migrating"),
];
/// Its two ports.
const HOMES: &str = "home";
const NOWHERE: &str = "nowhere";
const ADDED_NAME: &str = "added";
/// Frames that a guest must get before the next step.
const FRAMES: u64 = 50;
/// What is selected in turn.
const POLLS: [&str; 6] =
    ["adaptive", "event", "timer:1000", "coalesce:50,32", "napi", "adaptive:200"];
const CALLS: [&str; 3] = ["event", "coalesce:50,32", "adaptive"];
/// Rules for the sender's port in turn, which its frames comply with.
const RULES: [&[&str]; 4] = [
    &["mac=02:00:00:09:00:00"],
    &["ip=10.9.0.0", "storm=100frames"],
    &["loop-guard=block", "rate-in=1gbit"],
    &["mac=none", "ip=none", "storm=none", "loop-guard=report", "rate-in=none"],
];
const PLACEMENTS: [&str; 4] = ["balanced", "single", "per-port", "group"];
/// Kinds of the added guest's ring: protocol, and options of its generator.
const RINGS: [(Proto, &[&str]); 4] = [
    (Proto::Virtio, &[]),
    (Proto::Virtio, &["--packed"]),
    (Proto::Xen, &[]),
    (Proto::Virtio, &["--in-order"]),
];
/// Rounds until each kind of ring, and each form of the file, was there: a cycle.
const CYCLE: u64 = RINGS.len() as u64;
/// Seconds from which on each process has seen all hostile cases before it is compared with
/// itself: a heap grows to what the most demanding of them needs, once. Shorter soaks have no time
/// for that.
const LONG_S: f64 = 600.0;
/// Names of the hostile guest's ports: most that a case takes, and for vhost-user and Xen.
const HOSTILE_PORTS: usize = 16;
const HOSTILE_NAMES: [&str; 2] = ["bad", "bad-vif"];
/// Options of these ports: the others' guests need some of the CPU.
const HOSTILE_OPTIONS: &str = ",storm=200frames,rate-in=20kframes,weight=1";
/// Time for each case.
const HOSTILE_S: f64 = 0.3;
/// An upgrade after so many seconds of rounds, at least one in all.
const UPGRADE_EVERY_S: f64 = 60.0;
/// Number of samples of what the switch uses, and seconds between two.
const LEAST_OF: u32 = 25;
const LEAST_EVERY_S: f64 = 0.02;
/// Lines of the switch's log in an error.
const LOG_LINES: usize = 30;
/// Longest wait for frames that were counted to be received, or held ones to be dropped: failing
/// that is a result.
const FRAMES_MAX_S: f64 = 20.0;

/// Resources of a process.
#[derive(Clone, Copy, Debug, Default)]
struct Resources {
    /// Anonymous memory in RAM, in KiB.
    memory: f64,
    descriptors: f64,
    threads: f64,
    mappings: f64,
}

/// Threads that close what peers sent and are not counted: one waits, and another is ready whenever
/// one closes. Guests that come and go keep both.
const CLOSERS: usize = 2;

impl Resources {
    /// Those of a process. Not counted is what each thread makes when it first notifies a guest: a
    /// mapping `[aio]`, and a descriptor of /dev/null.
    fn of(pid: u32) -> Self {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
        let list = |name: &str| {
            std::fs::read_dir(format!("/proc/{pid}/{name}")).into_iter().flatten().flatten()
        };
        let is_null = |link: &PathBuf| link == Path::new("/dev/null");
        let links = list("fd").filter_map(|entry| std::fs::read_link(entry.path()).ok());
        let status = read("status").unwrap_or_default();
        let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = anonymous.and_then(|kib| kib.trim().strip_suffix(" kB")?.parse().ok());
        // The allocator splits and joins its own mappings: those of guests have a file.
        let maps = read("maps").unwrap_or_default();
        let is_shared = |line: &&str| line.split(' ').nth(1) == Some("rw-s");
        let shared = maps.lines().filter(is_shared).filter(|line| !line.contains("[aio]"));
        let is_closer = |task: &std::fs::DirEntry| {
            std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name == "closer\n")
        };
        let (closers, others): (Vec<_>, Vec<_>) = list("task").partition(is_closer);
        let threads = others.len() + closers.len().saturating_sub(CLOSERS);
        Self {
            memory: kib.unwrap_or(0.0),
            descriptors: links.filter(|link| !is_null(link)).count() as f64,
            threads: threads as f64,
            mappings: shared.count() as f64,
        }
    }

    fn least(&self, other: &Self) -> Self {
        Self {
            memory: self.memory.min(other.memory),
            descriptors: self.descriptors.min(other.descriptors),
            threads: self.threads.min(other.threads),
            mappings: self.mappings.min(other.mappings),
        }
    }

    /// Whether nothing but memory, whose size depends on the allocator, is more than before.
    fn is_within(&self, before: &Self) -> bool {
        self.descriptors <= before.descriptors
            && self.threads <= before.threads
            && self.mappings <= before.mappings
    }
}

/// Counts of a soak.
#[derive(Default)]
struct Tally {
    added: u64,
    kills: u64,
    reboots: u64,
    attacks: u64,
    switched: u64,
    reloads: u64,
    upgrades: u64,
    migrations: u64,
    /// Pages written and not marked during migrations.
    missed: u64,
    /// Frames that a rule must drop.
    ruled_out: u64,
    /// Frames that guests and switch count differently.
    mismatch: u64,
    corrupt: u64,
}

/// A switch and its guests.
pub struct Rounds<'a> {
    stage: &'a Stage,
    switch: Switch,
    file: PathBuf,
    ports: Vec<Port>,
    /// What the guest that migrates connects to.
    home: Port,
    /// By number.
    guests: BTreeMap<usize, Gen>,
    /// Counters of removed ports.
    removed: Ledger,
    tally: Tally,
    /// What the hostile guest connects to.
    bad: [Port; 2],
    /// Its cases, in turn.
    cases: Vec<(Ring, &'static str)>,
    /// Whether there are a hostile guest, migrations and upgrades.
    beside: bool,
}

/// What more a process has than before.
#[derive(Clone, Copy, Debug, Default)]
struct Grown(Resources);

impl Grown {
    fn add(&mut self, before: &Resources, after: &Resources) {
        let Resources { memory, descriptors, threads, mappings } = &mut self.0;
        *memory = memory.max(after.memory - before.memory);
        *descriptors = descriptors.max(after.descriptors - before.descriptors);
        *threads = threads.max(after.threads - before.threads);
        *mappings = mappings.max(after.mappings - before.mappings);
    }
}

fn ring(number: usize) -> &'static [&'static str] {
    match number {
        RECEIVER | KILLED_SENDER => &["--packed"],
        KILLED_RECEIVER => &["--in-order"],
        _ => &[],
    }
}

fn proto(number: usize) -> Proto {
    if number == TO_ADDED { Proto::Xen } else { Proto::Virtio }
}

fn start(
    stage: &Stage,
    number: usize,
    port: &Port,
    more: &[&str],
    mode: &str,
) -> Result<Gen, Fail> {
    let more = more.iter().map(ToString::to_string).collect();
    Gen::start(stage, number, port, &NicOptions { more, ..NicOptions::new("event") }, mode)
}

fn name_of(number: usize) -> &'static str {
    STAY.iter().find(|(known, _)| *known == number).map_or(ADDED_NAME, |(_, name)| name)
}

/// Modes of guests: at a rate that needs little CPU.
const SEND: &str = "send --check --size 64-1514 --rate 2k --tick 2000";
const MIGRATE: &str = "migrate --check --interval 0.2";
const SINK: &str = "sink --check --interval 0.2";

impl<'a> Rounds<'a> {
    /// Starts the switch, and the guests of the ports that stay.
    pub fn start(stage: &'a Stage, workers: usize, beside: bool) -> Result<Self, Fail> {
        loopback(stage);
        let ports = STAY.map(|(number, name)| Port::guest(stage, name, proto(number), ""));
        let [(of_bad, bad), (of_vif, bad_vif)] = [
            Port::many(stage, HOSTILE_NAMES[0], Proto::Virtio, HOSTILE_PORTS)?,
            Port::many(stage, HOSTILE_NAMES[1], Proto::Xen, HOSTILE_PORTS)?,
        ];
        let (homes, home) = Port::many(stage, HOMES, Proto::Virtio, 2)?;
        // As operators do for guests that they do not trust. Without it, such a guest sends on what
        // it received, changed, and honest receivers take that for corrupt frames of the sender.
        let own = format!("{HOSTILE_OPTIONS},mac={}", Gen::mac(HOSTILE));
        let limited = |port: Port| Port { spec: port.spec + &own, ..port };
        let bad_ports: Vec<_> = of_bad.into_iter().chain(of_vif).map(limited).collect();
        let ports = [&ports[..], &homes, &bad_ports, &[Port::null(NOWHERE)]].concat();
        let of_ring = |ring| hostile::cases_of(ring).map(move |case| (ring, case.name));
        let cases = Ring::ALL.into_iter().flat_map(of_ring).collect();
        let file = stage.folder().join(stage.unique("soak.toml"));
        write(&file, 0)?;
        let mut options = SwitchOptions { workers, ..SwitchOptions::new(stage, POLLS[0]) };
        options.more = vec!["--config".into(), file.display().to_string(), "--keep".into()];
        let switch = Switch::start(stage, &options, &ports)?;
        let (guests, removed, tally) = (BTreeMap::new(), Ledger::default(), Tally::default());
        let bad = [bad, bad_vif];
        let mut rounds =
            Self { stage, switch, file, ports, home, guests, removed, tally, bad, cases, beside };
        // Receivers first, which lose nothing then.
        for number in [RECEIVER, KILLED_RECEIVER, SENDER, TO_ADDED, KILLED_SENDER] {
            rounds.start_guest(number)?;
        }
        if beside {
            let guest = start(stage, MIGRATING, &rounds.home, &[], MIGRATE)?;
            rounds.guests.insert(MIGRATING, guest);
            rounds.wait_up(&format!("{HOMES}0"), true)?;
            rounds.start_guest(TO_MIGRATING)?;
        }
        Ok(rounds)
    }

    /// Starts the guest of a port that stays, and waits until it is connected.
    fn start_guest(&mut self, number: usize) -> Result<(), Fail> {
        let to = match number {
            SENDER => Some(RECEIVER),
            TO_ADDED => Some(ADDED),
            KILLED_SENDER => Some(KILLED_RECEIVER),
            TO_MIGRATING => Some(MIGRATING),
            _ => None,
        };
        let mode = to.map_or(SINK.into(), |to| format!("{SEND} --peer {}", Gen::mac(to)));
        let name = name_of(number);
        let port = self.ports.iter().find(|port| port.name == name).expect("a port that stays");
        let guest = start(self.stage, number, port, ring(number), &mode)?;
        self.guests.insert(number, guest);
        self.wait_up(name, true)
    }

    /// Makes rounds for so many seconds, with at least one upgrade among them if there are any.
    pub fn run(mut self, seconds: f64) -> Result<Figures, Fail> {
        let mut rounds = 0;
        match self.all_rounds(seconds, &mut rounds) {
            Ok((grown, memory)) => self.end(rounds, grown, memory),
            Err(fail) => Err(self.explained(fail, rounds)),
        }
    }

    /// An error with what the switch logged of the guests that are not hostile.
    fn explained(&self, fail: Fail, rounds: u64) -> Fail {
        let Fail::Cell(what) = fail else { return fail };
        let log = self.switch.logged();
        let hostile = format!("port {}", HOSTILE_NAMES[0]);
        let is_ours = |line: &&str| !line.contains(&hostile);
        let lines = log.lines().filter(is_ours).collect::<Vec<_>>();
        let last = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n    | ");
        let upgrades = self.tally.upgrades;
        Fail::Cell(format!(
            "{what}\n    after {rounds} rounds and {upgrades} upgrades; the switch's log, without \
             the hostile guest's ports:\n    | {last}"
        ))
    }

    /// Returns by how much resources grew, and the memory at the end.
    fn all_rounds(&mut self, seconds: f64, rounds: &mut u64) -> Result<(Grown, f64), Fail> {
        let (begun, mut grown) = (Instant::now(), Grown::default());
        let warm = if self.beside && seconds >= LONG_S { self.cases.len() as u64 } else { CYCLE };
        let mut first = None;
        loop {
            // Each process begins as small as it gets.
            self.rounds(rounds, warm, 0.0)?;
            let before = first.map_or_else(|| self.least(), |first| self.settled(&first));
            // What is handed over may not grow either. The first process took over nothing.
            if self.tally.upgrades > 0 {
                grown.add(first.get_or_insert(before), &before);
            }
            let left = seconds - begun.elapsed().as_secs_f64();
            let (is_last, most) = match (self.beside, self.tally.upgrades) {
                (false, _) => (true, left),
                (true, 0) => (false, (seconds / 2.0).min(UPGRADE_EVERY_S)),
                (true, _) => (left <= UPGRADE_EVERY_S, left.min(UPGRADE_EVERY_S)),
            };
            self.rounds(rounds, CYCLE, most)?;
            let after = self.settled(&before);
            grown.add(&before, &after);
            if is_last {
                return Ok((grown, after.memory));
            }
            self.switch.upgrade()?;
            self.tally.upgrades += 1;
        }
    }

    /// Makes rounds for so many seconds, at least this many: whole cycles, so that the last one
    /// always ends alike.
    fn rounds(&mut self, made: &mut u64, least: u64, seconds: f64) -> Result<(), Fail> {
        let (begun, end) = (Instant::now(), *made + least);
        while *made < end || begun.elapsed().as_secs_f64() < seconds {
            for _ in 0..CYCLE {
                self.round(*made)?;
                *made += 1;
            }
        }
        Ok(())
    }

    /// What the switch uses at least in a short time: a migration has two connections.
    fn least(&self) -> Resources {
        let pid = self.switch.id();
        let mut least = Resources::of(pid);
        for _ in 0..LEAST_OF {
            sleep(LEAST_EVERY_S);
            least = least.least(&Resources::of(pid));
        }
        least
    }

    /// The same, once no more is used than before, or that cannot be expected any more.
    fn settled(&self, before: &Resources) -> Resources {
        let pid = self.switch.id();
        let mut least = Resources::of(pid);
        // Connections that ended are closed a little later, and memory is given back after that.
        let _ = wait_for("resources", FRAMES_MAX_S, || {
            least = least.least(&Resources::of(pid));
            Ok(least.is_within(before) && least.memory <= before.memory + MEMORY_GROWN_MAX)
        });
        self.least().least(&least)
    }

    fn round(&mut self, round: u64) -> Result<(), Fail> {
        let attacker = if self.beside { Some(self.attack(round)?) } else { None };
        let added = self.add_port(round)?;
        self.select(round)?;
        self.replace(KILLED_RECEIVER, round)?;
        self.replace(KILLED_SENDER, round)?;
        self.rule_out()?;
        self.remove_port(added)?;
        self.reload(round)?;
        if let Some(attacker) = attacker {
            self.wait_migration()?;
            self.end_attack(attacker)?;
        }
        // Through all of that.
        self.wait_frames(RECEIVER)?;
        self.switch.check()?;
        self.guests.values_mut().try_for_each(Gen::check)
    }

    /// Counters of a port, as in the reply to `stats`.
    fn stats(&self, name: &str) -> Result<Value, Fail> {
        self.switch.ask(&Request::PortStats { name: name.into() })
    }

    /// A counter of a port's first queue.
    fn counter(&self, name: &str, side: &str, counter: &str) -> Result<u64, Fail> {
        Ok(self.stats(name)?[side][0][counter].as_u64().unwrap_or(0))
    }

    /// Waits until a receiver gets some more frames, or a sender sends them.
    fn wait_frames(&self, number: usize) -> Result<(), Fail> {
        let sends = [SENDER, TO_ADDED, KILLED_SENDER, TO_MIGRATING].contains(&number);
        let (name, side) = (name_of(number), if sends { "ingress" } else { "egress" });
        let before = self.counter(name, side, "frames")?;
        wait_for(&format!("{side} frames of port {name}"), START_MAX_S, || {
            Ok(self.counter(name, side, "frames")? >= before + FRAMES)
        })
    }

    fn wait_up(&self, name: &str, up: bool) -> Result<(), Fail> {
        wait_for(&format!("port {name}: up {up}"), START_MAX_S, || {
            Ok(self.switch.port(name)?["up"] == up)
        })
    }

    fn add_port(&mut self, round: u64) -> Result<Gen, Fail> {
        let (proto, options) = RINGS[(round % RINGS.len() as u64) as usize];
        let port = Port::guest(self.stage, ADDED_NAME, proto, "");
        let text: PortText = port.spec.parse().map_err(|error| Fail::Cell(format!("{error}")))?;
        self.switch.ask(&Request::add_port(&text))?;
        let guest = start(self.stage, ADDED, &port, options, SINK)?;
        self.wait_up(ADDED_NAME, true)?;
        self.switch.add_static_mac(&Gen::mac(ADDED), ADDED_NAME)?;
        self.wait_frames(ADDED)?;
        Ok(guest)
    }

    /// Selects the next policies and placement.
    fn select(&mut self, round: u64) -> Result<(), Fail> {
        let of = |all: &[&'static str]| all[(round % all.len() as u64) as usize];
        let settings = [("placement", of(&PLACEMENTS)), ("poll", of(&POLLS)), ("call", of(&CALLS))];
        for (key, value) in settings {
            self.switch.set(None, &[format!("{key}={value}").as_str()])?;
            self.tally.switched += 1;
        }
        let rules = RULES[(round % RULES.len() as u64) as usize];
        self.switch.set(Some(name_of(SENDER)), rules)?;
        self.tally.switched += 1;
        Ok(())
    }

    /// Kills a guest amid its frames, or has it end its connection in order, and starts it again.
    fn replace(&mut self, number: usize, round: u64) -> Result<(), Fail> {
        self.wait_frames(number)?;
        let guest = self.guests.remove(&number);
        match guest {
            Some(guest) if round % 2 == 1 => {
                self.tally.corrupt += corrupt(&guest.end()?);
                self.tally.reboots += 1;
            }
            // SIGKILL.
            guest => {
                drop(guest);
                self.tally.kills += 1;
            }
        }
        self.wait_up(name_of(number), false)?;
        self.start_guest(number)?;
        self.wait_frames(number)
    }

    /// Has a rule forbid a sender's address until frames of it were dropped.
    fn rule_out(&mut self) -> Result<(), Fail> {
        const CAUSE: &str = "drops_spoofed_mac";
        let name = name_of(KILLED_SENDER);
        let before = self.counter(name, "ingress", CAUSE)?;
        self.switch.set(Some(name), &[&format!("mac={}", Gen::mac(SENDER))])?;
        wait_for("frames that a rule forbids", START_MAX_S, || {
            Ok(self.counter(name, "ingress", CAUSE)? >= before + FRAMES)
        })?;
        self.switch.set(Some(name), &["mac=none"])?;
        self.tally.ruled_out += self.counter(name, "ingress", CAUSE)? - before;
        self.wait_frames(KILLED_RECEIVER)
    }

    /// The report of the guest that migrates.
    fn migrating(&self) -> Value {
        self.guests.get(&MIGRATING).and_then(|guest| guest.latest().ok()).unwrap_or(Value::Null)
    }

    /// Waits until the guest that migrates does so once more, and receives.
    fn wait_migration(&mut self) -> Result<(), Fail> {
        let migrations = |report: &Value| report["migrations"].as_u64().unwrap_or(0);
        let before = migrations(&self.migrating());
        wait_for("a migration", START_MAX_S, || {
            // Migrations are counted after their guest has started again.
            Ok(migrations(&self.migrating()) > before)
        })?;
        self.guests.get_mut(&MIGRATING).map_or(Ok(()), Gen::check)
    }

    /// Starts the next case of the hostile guest.
    fn attack(&self, round: u64) -> Result<Gen, Fail> {
        let (ring, case) = self.cases[(round % self.cases.len() as u64) as usize];
        let port = &self.bad[usize::from(ring == Ring::Xen)];
        let more: &[&str] = if ring == Ring::Packed { &["--packed"] } else { &[] };
        let mode = format!("hostile={case} --count {HOSTILE_PORTS} --duration {HOSTILE_S}");
        start(self.stage, HOSTILE, port, more, &mode)
    }

    /// Waits until the hostile guest ends, and its ports are as before.
    fn end_attack(&mut self, attacker: Gen) -> Result<(), Fail> {
        self.tally.corrupt += mixed(&attacker.report(START_MAX_S)?) as u64;
        self.tally.attacks += 1;
        let is_bad = |port: &Value| {
            let name = port["name"].as_str().unwrap_or_default();
            HOSTILE_NAMES.iter().any(|bad| name.starts_with(bad)) && port["up"] == true
        };
        wait_for("the hostile guest's ports to be down", START_MAX_S, || {
            let show = self.switch.ask(&Request::Show)?;
            Ok(!show["ports"].as_array().into_iter().flatten().any(is_bad))
        })
    }

    /// Ends the added guest and removes its port.
    fn remove_port(&mut self, guest: Gen) -> Result<(), Fail> {
        // Frames of its sender go elsewhere, once those of bursts that had begun are delivered.
        self.switch.add_static_mac(&Gen::mac(ADDED), NOWHERE)?;
        let sender = name_of(TO_ADDED);
        let bursts = self.counter(sender, "ingress", "bursts")?;
        wait_for("two bursts of its sender", START_MAX_S, || {
            Ok(self.counter(sender, "ingress", "bursts")? >= bursts + 2)
        })?;
        wait_for("held frames of the added port", START_MAX_S, || {
            Ok(self.counter(ADDED_NAME, "egress", "held")? == 0)
        })?;
        self.end_receiver(ADDED_NAME, guest, true)?;
        self.removed.add_port(&self.stats(ADDED_NAME)?);
        self.switch.ask(&Request::DelPort { name: ADDED_NAME.into() })?;
        self.tally.added += 1;
        Ok(())
    }

    /// Ends the receiver at a port, once it has the frames that were delivered there. `every`: it
    /// was there from the first one on, and is compared with those counted before and after.
    fn end_receiver(&mut self, name: &str, mut guest: Gen, every: bool) -> Result<(), Fail> {
        let received = |report: &Value| report["received_frames"].as_u64().unwrap_or(0);
        let counted = self.counter(name, "egress", "frames")?;
        if every {
            // A guest that does not get them differs.
            let _ = wait_for("a receiver's last frames", FRAMES_MAX_S, || {
                guest.check()?;
                Ok(guest.latest().is_ok_and(|report| received(&report) >= counted))
            });
        }
        let report = guest.end()?;
        if every {
            self.wait_up(name, false)?;
            // Other guests continue to flood frames.
            let all = self.counter(name, "egress", "frames")?;
            let received = received(&report);
            self.tally.mismatch += received.abs_diff(received.clamp(counted, all));
        }
        self.tally.corrupt += corrupt(&report);
        Ok(())
    }

    /// Rewrites the file and reloads it.
    fn reload(&mut self, round: u64) -> Result<(), Fail> {
        write(&self.file, round + 1)?;
        self.switch.ask(&Request::Reload { dry_run: false })?;
        self.tally.reloads += 1;
        Ok(())
    }

    /// Ends all guests and counts.
    fn end(mut self, rounds: u64, grown: Grown, memory: f64) -> Result<Figures, Fail> {
        let all = [RECEIVER, KILLED_RECEIVER, SENDER, TO_ADDED, KILLED_SENDER, TO_MIGRATING];
        let there = all.into_iter().filter(|guest| self.guests.contains_key(guest));
        let stuck = there.filter(|guest| self.wait_frames(*guest).is_err()).count();
        for number in [SENDER, TO_ADDED, KILLED_SENDER, TO_MIGRATING] {
            let Some(guest) = self.guests.remove(&number) else { continue };
            let sent = guest.end()?["sent_frames"].as_u64().unwrap_or(0);
            // Others were there before it.
            if number != KILLED_SENDER {
                let taken = self.counter(name_of(number), "ingress", "frames")?;
                // The switch announces addresses of `mac=`.
                let account = &self.stats(name_of(number))?["account"];
                let announced = account["announcements"]["used"].as_u64().unwrap_or(0);
                self.tally.mismatch += taken.abs_diff(sent + announced);
            }
        }
        // What is held is delivered or dropped; what is not then is unaccounted for.
        let _ = wait_for("held frames", FRAMES_MAX_S, || Ok(self.ledger()?.unaccounted() == 0));
        for number in [RECEIVER, KILLED_RECEIVER] {
            let Some(guest) = self.guests.remove(&number) else { continue };
            self.end_receiver(name_of(number), guest, number == RECEIVER)?;
        }
        if let Some(guest) = self.guests.remove(&MIGRATING) {
            let report = guest.end()?;
            self.tally.corrupt += corrupt(&report);
            self.tally.migrations = report["migrations"].as_u64().unwrap_or(0);
            let pages = ["missed_pages", "late_pages"].map(|name| report[name].as_u64());
            self.tally.missed = pages.into_iter().flatten().sum();
        }
        self.switch.check()?;
        self.figures(rounds, stuck, grown, memory)
    }

    /// Counters of all ports, those removed included.
    fn ledger(&self) -> Result<Ledger, Fail> {
        Ok(self.removed.with(&self.switch.ask(&Request::Stats)?))
    }

    fn figures(
        &self,
        rounds: u64,
        stuck: usize,
        grown: Grown,
        memory: f64,
    ) -> Result<Figures, Fail> {
        let ledger = self.ledger()?;
        let drops = ledger.drops();
        let sum = |wanted: &dyn Fn(&str) -> bool| {
            drops.iter().filter(|(name, _)| wanted(name)).map(|(_, n)| *n).sum::<u64>() as f64
        };
        let known = |name: &str| {
            name.starts_with("lost_") || ["drops_down", "drops_held_down"].contains(&name)
        };
        let (tally, Grown(grown)) = (&self.tally, grown);
        let others = sum(&|name| !known(name));
        Ok(Figures::from([
            ("rounds", rounds as f64),
            ("frames", (ledger.taken() + ledger.copies()) as f64),
            ("delivered", ledger.delivered() as f64),
            ("unaccounted", ledger.unaccounted() as f64),
            ("lost_full", sum(&|name| name.starts_with("lost_"))),
            ("drops_down", sum(&|name| name == "drops_down")),
            ("drops_held_down", sum(&|name| name == "drops_held_down")),
            ("drops_rules", tally.ruled_out as f64),
            ("drops_other", others - tally.ruled_out as f64),
            ("mismatch", tally.mismatch as f64),
            ("corrupt", tally.corrupt as f64),
            ("stuck", stuck as f64),
            ("added", tally.added as f64),
            ("kills", tally.kills as f64),
            ("reboots", tally.reboots as f64),
            ("attacks", tally.attacks as f64),
            ("switched", tally.switched as f64),
            ("reloads", tally.reloads as f64),
            ("upgrades", tally.upgrades as f64),
            ("migrations", tally.migrations as f64),
            ("missed", tally.missed as f64),
            ("memory", memory),
            ("memory_grown", grown.memory),
            ("descriptors_grown", grown.descriptors),
            ("threads_grown", grown.threads),
            ("mappings_grown", grown.mappings),
        ]))
    }
}

/// Frames in a receiver's report that were not as sent.
fn corrupt(report: &Value) -> u64 {
    report["corrupt_frames"].as_u64().unwrap_or(0)
}

/// Writes one of two files, which differ in a port and in a setting of another. Neither has a
/// guest: frames to them would be lost with their counters.
fn write(file: &Path, round: u64) -> Result<(), Fail> {
    let address = |number: usize, port: &str| format!("\"{}\" = \"{port}\"\n", Gen::mac(number));
    let mut text = String::from("[static]\n");
    text += &address(RECEIVER, "receiver");
    text += &address(KILLED_RECEIVER, "killed-receiver");
    text += &address(ADDED, NOWHERE);
    let mut add = |name: &str, more: &str| {
        let socket = file.with_extension(name).display().to_string();
        text += &format!("\n[port.{name}]\nkind = \"vhost-user\"\nsocket = \"{socket}\"\n{more}");
    };
    add("changed", &format!("weight = {}\n", 1 + round % 2));
    if round % 2 == 1 {
        add("of-file", "");
    }
    let new = file.with_extension("new");
    let written = std::fs::write(&new, text).and_then(|()| std::fs::rename(&new, file));
    written.map_err(|error| Fail::Over(format!("{}: {error}", file.display())))
}
