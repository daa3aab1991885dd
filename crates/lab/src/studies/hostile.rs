//! `hostile`: effects of a misbehaving peer on two honest guests.

mod tables;

use std::time::{Duration, Instant};

use hostile::{Case, Ring, cases, cases_of};
use serde_json::Value as Json;

use self::tables::{judged, priorities, table};
use super::pair::{self, number, receiver_class};
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::{Part, Verdict};
use crate::stage::{Gen, NicOptions, Place, Port, Proto, Stage, Switch, Window, sleep};
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

/// All cases of a ring in one run, one after the other.
const ALL: &str = "all";
/// Guests: who sends, who receives, and who misbehaves.
const SENDER: usize = 0;
const RECEIVER: usize = 1;
const ATTACKER: usize = 2;
/// The address behind the port that drops everything.
const NOWHERE: &str = "02:00:00:00:0f:ff";
/// Frames of every so many that go to the attacker as well.
const ASIDE: u32 = 4;
/// Ports of an attacker that plays all cases: what a case may take at most; of Xen's one for each,
/// because a vif that flapped is let wait.
const PORTS: usize = 16;
/// Time between two questions to the control socket.
const ASK_EVERY: Duration = Duration::from_millis(20);
/// An attack continues before and after what is measured of it.
const AROUND_S: f64 = 0.4;
/// The longest that all cases of a ring may take beyond their time.
const LATE_S: f64 = 90.0;

const ABOUT: &str = "\
Two honest guests, and one attacker. The first guest sends frames of 1,000 bytes at a constant \
rate, every byte a function of the frame's number; the second checks every byte, counts missing \
frames, and measures latency. The attacker is connected to its own ports: idle, it stays \
connected and sends nothing; busy, it does the same and polls its rings without pause, so that it \
uses as much of the guests' CPU as an attacker can; hostile, it repeats a case without pause (gen \
--mode hostile=CASE). Where the guests share a CPU, busy is the control for latency: what hostile \
adds to it is the switch's doing, what busy adds to idle is the scheduler's. \
Every fifth frame of the sender goes to the attacker; losses of these frames do not count. The \
control socket is queried throughout. Priority is that of the switch's worker: at normal, other \
processes on its CPU delay all guests while an attacker keeps it busy; at realtime, which needs \
root, what remains is the switch's doing. Case all runs all cases of a ring in turn and reports \
counts only.";

const CORRUPT: &str = "frames that it got and that were not as sent, and frames that the \
                       attacker's own receiver got with another address than the one looked up";

const MEASURES: [Measure; 15] = [
    Measure::new("lost", "", Better::Less, "frames that the honest receiver did not get"),
    Measure::new("corrupt", "", Better::Less, CORRUPT),
    Measure::new("rate", "1/s", Better::More, "frames that it got"),
    Measure::new("p50", "us", Better::Less, "from ring to program, half of its frames"),
    Measure::new("p99", "us", Better::Less, "the same, 99 % of them"),
    Measure::new("alive", "", Better::More, "1: the switch runs, and honest guests come up"),
    Measure::new("show", "ms", Better::Less, "longest answer of the control socket"),
    Measure::new("honest_faults", "", Better::Less, "faults counted at honest ports"),
    Measure::new("faults", "", Better::Neither, "faults counted at the attacker's ports"),
    Measure::new("drops", "", Better::Neither, "frames dropped at the attacker's ports, by cause"),
    Measure::new("lines", "1/s", Better::Less, "lines in the switch's log"),
    Measure::new("memory", "MiB", Better::Less, "most memory that the switch had"),
    Measure::new("attempts", "", Better::Neither, "times that the attacker misbehaved"),
    Measure::new("connections", "", Better::Neither, "connections that it made"),
    Measure::new("untried", "", Better::Less, "cases of which nothing could be tried"),
];

/// The study.
pub struct Hostile;

const FACTS: Facts = Facts {
    name: "hostile",
    about: "effects of a misbehaving peer on two honest guests, case by case",
    original: None,
    measures: &MEASURES,
    takes_proto: false,
    tools: &["ip"],
    together: None,
    // An honest pair keeps 95 % of its rate.
    margin: 1.053,
    control: &[("attack", "idle")],
};

impl Study for Hostile {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let mut names: Vec<&str> = cases().map(|case| case.name).collect();
        let seconds = match scale {
            Scale::Smallest => 0.1,
            Scale::Quick => 0.2,
            Scale::Usual => 1.0,
            Scale::Full => 5.0,
        };
        let mut priorities = &["normal", "realtime"][..];
        if matches!(scale, Scale::Smallest | Scale::Quick) {
            // Counts alone, which do not depend on the priority.
            (names, priorities) = (vec![ALL], &priorities[..1]);
        }
        let mut attacks = &["idle", "hostile", "busy"][..];
        if scale == Scale::Usual {
            // The others double the time to that of a night each.
            (attacks, priorities) = (&attacks[..2], &priorities[..1]);
        }
        let axes = vec![
            Axis::new("ring", Ring::ALL),
            Axis::new("case", names),
            Axis::new("priority", priorities.iter().copied()),
            Axis::new("attack", attacks),
        ];
        let plan = Plan::new(FACTS.name, 1, seconds, axes).with_power(self, scale);
        match scale {
            // Judged by counts, which need no power.
            Scale::Quick => Plan { repeats: 5, ..plan },
            _ => plan,
        }
    }

    fn has(&self, cell: &Cell) -> bool {
        if cell.get("case") == ALL {
            // Reports counts only, for which idle is the control.
            return cell.get("attack") != "busy";
        }
        !played(cell).is_empty()
    }

    fn overhead_s(&self, cell: &Cell) -> f64 {
        match (cell.get("case"), cell.get("attack")) {
            // Each case takes a little longer than its time.
            (ALL, "hostile") => 2.0 + 0.2 * played(cell).len() as f64,
            _ => 2.0 + 2.0 * AROUND_S,
        }
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        match measure(run) {
            Err(Trouble::Switch(why)) => {
                // A result as any other: the switch ended, or let no honest guest come up.
                eprintln!("{}: {why}", run.cell);
                Ok(Figures::from([("alive", 0.0)]))
            }
            Err(Trouble::Lab(fail)) => Err(fail),
            Ok(figures) => Ok(figures),
        }
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let about = Part::Text { title: "How to read this".into(), body: ABOUT.into() };
        let every = priorities(results);
        let of = |ring| every.iter().filter_map(move |priority| table(results, ring, priority));
        let tables = Ring::ALL.into_iter().flat_map(of);
        std::iter::once(about).chain(tables.map(Part::Table)).collect()
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        Ring::ALL.into_iter().filter_map(|ring| judged(results, ring)).collect()
    }
}

/// Cases that a cell plays.
fn played(cell: &Cell) -> Vec<&'static Case> {
    let Ok(ring) = cell.get("ring").parse::<Ring>() else { return Vec::new() };
    let name = cell.get("case");
    cases_of(ring).filter(|case| name == ALL || case.name == name).collect()
}

/// Why there are no figures.
enum Trouble {
    /// What the switch did.
    Switch(String),
    /// What the lab could not do.
    Lab(Fail),
}

impl From<Fail> for Trouble {
    fn from(fail: Fail) -> Self {
        Self::Lab(fail)
    }
}

/// The ports of an attacker, and how it connects to them.
fn attacked(stage: &Stage, ring: Ring, played: &[&Case]) -> Result<(Vec<Port>, Port), Fail> {
    let proto = if ring == Ring::Xen { Proto::Xen } else { Proto::Virtio };
    let count = match played {
        [one] => usize::from(one.ports),
        all if ring == Ring::Xen => all.len(),
        _ => PORTS,
    };
    Port::many(stage, "bad", proto, count)
}

/// Sets up the loopback interface of the lab's own namespace: an attacker has TCP sockets. Where
/// that fails, its case says that it was not tried.
pub(super) fn loopback(stage: &Stage) {
    let args = ["link", "set", "lo", "up"].map(String::from);
    if let Ok(mut process) = stage.start("lo", "ip", &args, &Place::default()) {
        let _ = process.finish(10.0);
    }
}

fn guest(more: &[&str]) -> NicOptions {
    let more = more.iter().map(ToString::to_string).collect();
    NicOptions { more, ..pair::guest_options() }
}

/// What a cell asks for.
struct Wanted {
    ring: Ring,
    cases: Vec<&'static Case>,
    /// Whether the attacker plays them, or only connects.
    attacks: bool,
    /// All cases of the ring, one after the other.
    all: bool,
    /// Time for each case, in seconds.
    each_s: f64,
}

impl Wanted {
    fn of(run: &Run) -> Result<Self, Fail> {
        let all = run.cell.get("case") == ALL;
        Ok(Self {
            ring: run.cell.get("ring").parse().map_err(Fail::Cell)?,
            cases: played(run.cell),
            attacks: run.cell.get("attack") == "hostile",
            all,
            each_s: if all { run.seconds } else { run.seconds + 2.0 * AROUND_S },
        })
    }

    /// Mode of the attacker's generator.
    fn mode(&self, run: &Run, ports: usize) -> String {
        if !self.attacks {
            return format!("idle --count {ports}");
        }
        let case = run.cell.get(if self.all { "ring" } else { "case" });
        let each = self.each_s;
        format!("hostile={case} --count {ports} --peer {NOWHERE} --duration {each}")
    }

    /// Asks the switch for its state until the window is over; returns the longest answer.
    fn watch(&self, run: &Run, switch: &Switch, attacker: &mut Gen) -> Result<Duration, Fail> {
        let begun = Instant::now();
        let most_s = match self.attacks && self.all {
            true => run.seconds * self.cases.len() as f64 + LATE_S,
            false => run.seconds,
        };
        let mut longest = Duration::ZERO;
        loop {
            let asked = Instant::now();
            switch.ask(&api::Request::Show)?;
            longest = longest.max(asked.elapsed());
            // All cases are over when their attacker is.
            let ended = self.attacks && self.all && attacker.check().is_err();
            if ended || begun.elapsed().as_secs_f64() > most_s {
                return Ok(longest);
            }
            std::thread::sleep(ASK_EVERY);
        }
    }

    /// What the attacker reports at its end.
    fn report(&self, attacker: Gen) -> Result<Json, Fail> {
        match (self.attacks, self.all) {
            (true, false) => attacker.report(self.each_s + LATE_S),
            (true, true) => attacker.report(1.0),
            (false, _) => attacker.end(),
        }
    }
}

fn measure(run: &Run) -> Result<Figures, Trouble> {
    let stage = run.stage;
    let wanted = Wanted::of(run)?;
    loopback(stage);
    let (ports, target) = attacked(stage, wanted.ring, &wanted.cases)?;
    let honest = ["g0", "g1"].map(|name| Port::guest(stage, name, Proto::Virtio, ""));
    let everyone = [&honest[..], &ports, &[Port::null("null")]].concat();
    let mut options = pair::switch_options(stage, "adaptive");
    options.more = vec!["--priority".into(), run.cell.get("priority").into()];
    let switch = Switch::start(stage, &options, &everyone)?;
    let dead = |fail: Fail| match switch.check() {
        Err(ended) => Trouble::Switch(ended.to_string()),
        Ok(()) => Trouble::Switch(fail.to_string()),
    };
    switch.add_static_mac(NOWHERE, "null")?;
    // An attacker that only connects sends nothing from which its address is learned.
    if !wanted.attacks {
        switch.add_static_mac(&Gen::mac(ATTACKER), &ports[0].name)?;
    }
    let roomy = guest(&["--queue-size", "1024"]);
    let first = receiver_class(stage);
    let sink = Gen::start_as(stage, RECEIVER, &honest[1], &roomy, "sink --check", first)?;
    switch.wait_up(2)?;
    let packed: &[&str] = if wanted.ring == Ring::Packed { &["--packed"] } else { &[] };
    let mut options = guest(packed);
    if run.cell.get("attack") == "busy" {
        options.poll = "spin".into();
    }
    let mode = wanted.mode(run, ports.len());
    let mut attacker = Gen::start(stage, ATTACKER, &target, &options, &mode)?;
    if wanted.attacks {
        sleep(AROUND_S);
    } else {
        switch.wait_up_while(2 + ports.len(), || attacker.check())?;
    }
    // It comes up beside the attack.
    let (rate, to) = (if wanted.all { 1000 } else { 10_000 }, Gen::mac(RECEIVER));
    let aside = Gen::mac(ATTACKER);
    let mode = format!("send --check --size 1000 --rate {rate} --peer {to} --also {aside},{ASIDE}");
    let sender = Gen::start(stage, SENDER, &honest[0], &roomy, &mode)?;
    wait_known(&switch, "g0").map_err(&dead)?;
    let window = Window::open(&switch, &[]).map_err(&dead)?;
    let longest = wanted.watch(run, &switch, &mut attacker).map_err(&dead)?;
    let count = window.close().map_err(&dead)?;
    let lines = switch.logged().lines().count();
    let sent = sender.end()?;
    settle(&switch).map_err(&dead)?;
    let got = sink.end()?;
    let did = wanted.report(attacker)?;
    switch.check().map_err(&dead)?;
    for name in untried(&did) {
        eprintln!("{}: case {name}: nothing was tried", run.cell);
    }
    let mut figures = of_pair(&sent, &got);
    figures.extend(of_switch(&switch).map_err(&dead)?);
    figures.extend(of_attacker(&did));
    *figures.entry("corrupt").or_default() += mixed(&did);
    figures.insert("show", longest.as_secs_f64() * 1e3);
    figures.insert("drops", count.drops("bad", "bad"));
    figures.insert("lines", count.per_second(lines as f64));
    Ok(figures)
}

/// Waits until a port has its guest.
fn wait_known(switch: &Switch, name: &str) -> Result<(), Fail> {
    crate::stage::wait_for(&format!("port {name} to be up"), crate::stage::START_MAX_S, || {
        Ok(switch.port(name)?["up"] == true)
    })
}

/// Waits until what is held was delivered: nothing more comes to the receiver.
fn settle(switch: &Switch) -> Result<(), Fail> {
    let mut last = -1.0;
    crate::stage::wait_for("frames to be delivered", crate::stage::START_MAX_S, || {
        sleep(0.15);
        let now = Window::open(switch, &[])?.total("g1", "frames");
        let same = now == last;
        last = now;
        Ok(same)
    })
}

/// What the honest pair saw.
fn of_pair(sent: &Json, got: &Json) -> Figures {
    let received = number(got, "received_frames") - number(got, "foreign_frames");
    let mut figures = Figures::from([
        ("alive", 1.0),
        ("lost", number(sent, "sent_frames") - received),
        ("rate", received / number(sent, "duration_s").max(f64::MIN_POSITIVE)),
        ("corrupt", number(got, "corrupt_frames")),
    ]);
    if number(got, "latency_samples") > 0.0 {
        figures.insert("p50", number(got, "latency_ns_p50") / 1e3);
        figures.insert("p99", number(got, "latency_ns_p99") / 1e3);
    }
    figures
}

/// What the switch says of its ports, and what it took.
fn of_switch(switch: &Switch) -> Result<Figures, Fail> {
    let show = switch.ask(&api::Request::Show)?;
    let ports = || show["ports"].as_array().into_iter().flatten();
    let faults = |theirs: bool| -> f64 {
        let of = |port: &&Json| port["name"].as_str().unwrap_or("").starts_with("bad") == theirs;
        ports().filter(of).map(|port| number(port, "faults")).sum()
    };
    let status = std::fs::read_to_string(format!("/proc/{}/status", switch.id()));
    let status = status.unwrap_or_default();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let most = most.and_then(|line| line.trim().trim_end_matches(" kB").trim().parse::<f64>().ok());
    Ok(Figures::from([
        ("honest_faults", faults(false)),
        ("faults", faults(true)),
        ("memory", most.unwrap_or(0.0) / 1024.0),
    ]))
}

/// What the attacker says it did.
fn of_attacker(did: &Json) -> Figures {
    let cases = || did["cases"].as_array().into_iter().flatten();
    let sum = |key: &str| cases().map(|case| number(case, key)).sum::<f64>();
    Figures::from([
        ("attempts", sum("attempts")),
        ("connections", sum("connections")),
        ("untried", untried(did).len() as f64),
    ])
}

/// Frames that arrived at the attacker's own receiver with another address than the one that the
/// switch looked up: it read a header twice.
pub(super) fn mixed(did: &Json) -> f64 {
    let cases = did["cases"].as_array().into_iter().flatten();
    cases.map(|case| number(case, "mixed")).sum()
}

/// Cases that the attacker could not play at all.
fn untried(did: &Json) -> Vec<&str> {
    let cases = did["cases"].as_array().into_iter().flatten();
    let untried = cases.filter_map(|case| {
        let name = case["case"].as_str()?;
        // A receiver that posts nothing has nothing to try.
        let tried = number(case, "attempts") > 0.0 || name.ends_with("silent");
        (!tried || number(case, "connections") == 0.0).then_some(name)
    });
    untried.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn cell(ring: &str, case: &str, attack: &str) -> Cell {
        let pairs = [("ring", ring), ("case", case), ("attack", attack)];
        Cell(pairs.map(|(axis, value)| (axis.to_string(), value.to_string())).into())
    }

    #[test]
    fn a_cell_is_measured_where_its_case_is_one_of_its_ring() {
        assert!(Hostile.has(&cell("packed", "wraps", "idle")));
        assert!(!Hostile.has(&cell("split", "wraps", "idle")));
        assert!(Hostile.has(&cell("xen", ALL, "hostile")));
        assert_eq!(played(&cell("socket", "sparse", "idle")).len(), 1);
        assert!(played(&cell("no-ring", ALL, "idle")).is_empty());
    }

    #[test]
    fn a_pair_has_lost_what_was_sent_and_did_not_come() {
        let sent = json!({"sent_frames": 100});
        let got = json!({"received_frames": 99, "foreign_frames": 1, "corrupt_frames": 2});
        let figures = of_pair(&sent, &got);
        assert_eq!((figures["lost"], figures["corrupt"]), (2.0, 2.0));
        let did = json!({"cases": [
            {"case": "silent", "attempts": 0, "connections": 1},
            {"case": "loops", "attempts": 0, "connections": 1},
            {"case": "rarp", "attempts": 7, "connections": 1, "mixed": 3},
        ]});
        assert_eq!(mixed(&did), 3.0);
        let figures = of_attacker(&did);
        assert_eq!((figures["attempts"], figures["untried"]), (7.0, 1.0));
    }
}
