//! One round after the other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

use api::{PortText, Request};
use serde_json::Value;

use super::ledger::Ledger;
use crate::error::Fail;
use crate::stage::{
    Gen, NicOptions, Port, Proto, START_MAX_S, Stage, Switch, SwitchOptions, wait_for,
};
use crate::study::Figures;

/// Guests, and numbers of their addresses: two that go on, one that sends to the added port, the
/// guest of that, and two that are killed.
const SENDER: usize = 0;
const RECEIVER: usize = 1;
const TO_ADDED: usize = 2;
const ADDED: usize = 3;
const KILLED_SENDER: usize = 4;
const KILLED_RECEIVER: usize = 5;
/// Names of the ports that stay.
const STAY: [(usize, &str); 5] = [
    (SENDER, "sender"),
    (RECEIVER, "receiver"),
    (TO_ADDED, "to-added"),
    (KILLED_SENDER, "killed-sender"),
    (KILLED_RECEIVER, "killed-receiver"),
];
const NOWHERE: &str = "nowhere";
const ADDED_NAME: &str = "added";
/// Frames that a guest must get before the next step.
const FRAMES: u64 = 50;
/// What is selected in turn.
const POLLS: [&str; 6] =
    ["adaptive", "event", "timer:1000", "coalesce:50,32", "napi", "adaptive:200"];
const CALLS: [&str; 3] = ["event", "coalesce:50,32", "adaptive"];
const PLACEMENTS: [&str; 4] = ["balanced", "single", "per-port", "group"];
/// Kinds of the added guest's ring: protocol, and options of its generator.
const RINGS: [(Proto, &[&str]); 4] = [
    (Proto::Virtio, &[]),
    (Proto::Virtio, &["--packed"]),
    (Proto::Xen, &[]),
    (Proto::Virtio, &["--in-order"]),
];
/// Rounds until each kind of ring, and each form of the file, was there.
const WARM_ROUNDS: u64 = RINGS.len() as u64;
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
        Self {
            memory: kib.unwrap_or(0.0),
            descriptors: links.filter(|link| !is_null(link)).count() as f64,
            threads: list("task").count() as f64,
            mappings: shared.count() as f64,
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
    switched: u64,
    reloads: u64,
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
    /// By number.
    guests: BTreeMap<usize, Gen>,
    /// Counters of removed ports.
    removed: Ledger,
    tally: Tally,
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
const SINK: &str = "sink --check --interval 0.2";

impl<'a> Rounds<'a> {
    /// Starts the switch, and the guests of the ports that stay.
    pub fn start(stage: &'a Stage, workers: usize) -> Result<Self, Fail> {
        let ports = STAY.map(|(number, name)| Port::guest(stage, name, proto(number), ""));
        let ports = [&ports[..], &[Port::null(NOWHERE)]].concat();
        let file = stage.folder().join(stage.unique("soak.toml"));
        write(&file, 0)?;
        let mut options = SwitchOptions { workers, ..SwitchOptions::new(stage, POLLS[0]) };
        options.more = vec!["--config".into(), file.display().to_string()];
        let switch = Switch::start(stage, &options, &ports)?;
        let (guests, removed, tally) = (BTreeMap::new(), Ledger::default(), Tally::default());
        let mut rounds = Self { stage, switch, file, ports, guests, removed, tally };
        // Receivers first, which lose nothing then.
        for number in [RECEIVER, KILLED_RECEIVER, SENDER, TO_ADDED, KILLED_SENDER] {
            rounds.start_guest(number)?;
        }
        Ok(rounds)
    }

    /// Starts the guest of a port that stays, and waits until it is connected.
    fn start_guest(&mut self, number: usize) -> Result<(), Fail> {
        let to = match number {
            SENDER => Some(RECEIVER),
            TO_ADDED => Some(ADDED),
            KILLED_SENDER => Some(KILLED_RECEIVER),
            _ => None,
        };
        let mode = to.map_or(SINK.into(), |to| format!("{SEND} --peer {}", Gen::mac(to)));
        let name = name_of(number);
        let port = self.ports.iter().find(|port| port.name == name).expect("a port that stays");
        let guest = start(self.stage, number, port, ring(number), &mode)?;
        self.guests.insert(number, guest);
        self.wait_up(name, true)
    }

    /// Makes rounds for so many seconds, at least one after the warm-up.
    pub fn run(mut self, seconds: f64) -> Result<Figures, Fail> {
        for round in 0..WARM_ROUNDS {
            self.round(round)?;
        }
        let before = Resources::of(self.switch.id());
        let begun = Instant::now();
        // Whole cycles, so that the last round ends as that of the warm-up.
        let mut rounds = 0;
        while rounds == 0 || begun.elapsed().as_secs_f64() < seconds {
            for round in 0..WARM_ROUNDS {
                self.round(WARM_ROUNDS + rounds + round)?;
            }
            rounds += WARM_ROUNDS;
        }
        self.end(rounds, before)
    }

    fn round(&mut self, round: u64) -> Result<(), Fail> {
        let added = self.add_port(round)?;
        self.select(round)?;
        self.replace(KILLED_RECEIVER)?;
        self.replace(KILLED_SENDER)?;
        self.remove_port(added)?;
        self.reload(round)?;
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
        let sends = [SENDER, TO_ADDED, KILLED_SENDER].contains(&number);
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
        Ok(())
    }

    /// Kills a guest amid its frames, and starts another in its place.
    fn replace(&mut self, number: usize) -> Result<(), Fail> {
        self.wait_frames(number)?;
        // SIGKILL.
        drop(self.guests.remove(&number));
        self.wait_up(name_of(number), false)?;
        self.start_guest(number)?;
        self.tally.kills += 1;
        self.wait_frames(number)
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
        let counted = self.counter(ADDED_NAME, "egress", "frames")?;
        self.end_receiver(guest, Some(counted))?;
        self.wait_up(ADDED_NAME, false)?;
        self.removed.add_port(&self.stats(ADDED_NAME)?);
        self.switch.ask(&Request::DelPort { name: ADDED_NAME.into() })?;
        self.tally.added += 1;
        Ok(())
    }

    /// Ends a receiver, once it has `counted` frames: those of its port, if it was there from the
    /// first one on.
    fn end_receiver(&mut self, mut guest: Gen, counted: Option<u64>) -> Result<(), Fail> {
        let received = |report: &Value| report["received_frames"].as_u64().unwrap_or(0);
        if let Some(counted) = counted {
            // A guest that does not get them differs.
            let _ = wait_for("a receiver's last frames", FRAMES_MAX_S, || {
                guest.check()?;
                Ok(guest.latest().is_ok_and(|report| received(&report) >= counted))
            });
        }
        let report = guest.end()?;
        let received = received(&report);
        self.tally.mismatch += received.abs_diff(counted.unwrap_or(received));
        self.tally.corrupt += report["corrupt_frames"].as_u64().unwrap_or(0);
        Ok(())
    }

    /// Writes the file anew and reloads it.
    fn reload(&mut self, round: u64) -> Result<(), Fail> {
        write(&self.file, round + 1)?;
        self.switch.ask(&Request::Reload { dry_run: false })?;
        self.tally.reloads += 1;
        Ok(())
    }

    /// Ends all guests and counts.
    fn end(mut self, rounds: u64, before: Resources) -> Result<Figures, Fail> {
        let all = [RECEIVER, KILLED_RECEIVER, SENDER, TO_ADDED, KILLED_SENDER];
        let stuck = all.into_iter().filter(|guest| self.wait_frames(*guest).is_err()).count();
        let pid = self.switch.id();
        // Connections that ended are closed a little later.
        let _ = wait_for("resources", FRAMES_MAX_S, || Ok(Resources::of(pid).is_within(&before)));
        let after = Resources::of(pid);
        for number in [SENDER, TO_ADDED, KILLED_SENDER] {
            let Some(guest) = self.guests.remove(&number) else { continue };
            let sent = guest.end()?["sent_frames"].as_u64().unwrap_or(0);
            // Others were there before it.
            if number != KILLED_SENDER {
                let taken = self.counter(name_of(number), "ingress", "frames")?;
                self.tally.mismatch += taken.abs_diff(sent);
            }
        }
        // What is held is delivered or dropped; what is not then is unaccounted for.
        let _ = wait_for("held frames", FRAMES_MAX_S, || Ok(self.ledger()?.unaccounted() == 0));
        for number in [RECEIVER, KILLED_RECEIVER] {
            let Some(guest) = self.guests.remove(&number) else { continue };
            let counted = self.counter(name_of(number), "egress", "frames")?;
            self.end_receiver(guest, (number == RECEIVER).then_some(counted))?;
        }
        self.switch.check()?;
        self.figures(rounds, stuck, before, after)
    }

    /// Counters of all ports, those removed included.
    fn ledger(&self) -> Result<Ledger, Fail> {
        Ok(self.removed.with(&self.switch.ask(&Request::Stats)?))
    }

    fn figures(
        &self,
        rounds: u64,
        stuck: usize,
        before: Resources,
        after: Resources,
    ) -> Result<Figures, Fail> {
        let ledger = self.ledger()?;
        let drops = ledger.drops();
        let sum = |wanted: &dyn Fn(&str) -> bool| {
            drops.iter().filter(|(name, _)| wanted(name)).map(|(_, n)| *n).sum::<u64>() as f64
        };
        let known = |name: &str| {
            name.starts_with("lost_") || ["drops_down", "drops_held_down"].contains(&name)
        };
        let tally = &self.tally;
        Ok(Figures::from([
            ("rounds", rounds as f64),
            ("frames", (ledger.taken() + ledger.copies()) as f64),
            ("delivered", ledger.delivered() as f64),
            ("unaccounted", ledger.unaccounted() as f64),
            ("lost_full", sum(&|name| name.starts_with("lost_"))),
            ("drops_down", sum(&|name| name == "drops_down")),
            ("drops_held_down", sum(&|name| name == "drops_held_down")),
            ("drops_other", sum(&|name| !known(name))),
            ("mismatch", tally.mismatch as f64),
            ("corrupt", tally.corrupt as f64),
            ("stuck", stuck as f64),
            ("added", tally.added as f64),
            ("kills", tally.kills as f64),
            ("switched", tally.switched as f64),
            ("reloads", tally.reloads as f64),
            ("memory", after.memory),
            ("memory_grown", after.memory - before.memory),
            ("descriptors_grown", after.descriptors - before.descriptors),
            ("threads_grown", after.threads - before.threads),
            ("mappings_grown", after.mappings - before.mappings),
        ]))
    }
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
