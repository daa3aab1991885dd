//! Results of each policy with each load on two machines, in virtual time, as the program's
//! scheduler and forwarder follow it: `policies.txt`. A change of a policy changes that file;
//! `BLESS=1 cargo test -p pvswitch-switch --test policies` rewrites it.

mod load;
#[path = "../common/virtual_worker.rs"]
mod virtual_worker;
mod world;

use std::fmt::{self, Display, Formatter};

use load::{Load, Shape, Think};
use switch::poll::{Costs, DEFAULT_LATENCY_US, Policy};
use switch::time::Ns;
use virtual_worker::{Mistake, POLL};
use world::Seen;

/// Costs on bare metal, and in a nested virtual machine.
const MACHINES: [(&str, Costs); 2] = [
    ("bare", Costs::TYPICAL),
    (
        "nested",
        Costs {
            wake: Ns::from_us(22),
            wake_late: Ns::from_us(32),
            nap: Ns::from_us(33),
            nap_late: Ns::from_us(37),
            ..Costs::TYPICAL
        },
    ),
];
const POLICIES: [&str; 12] = [
    "event",
    "napi",
    "timer:1000",
    "timer:20000",
    "coalesce:50,32",
    "coalesce:1/pending",
    "coalesce:2/pending",
    "coalesce:5/pending",
    "spin",
    "adaptive",
    "adaptive:0",
    "adaptive:200",
];
const MS: u64 = 1_000_000;

/// A load, and the length of its run in ns.
struct Case {
    name: String,
    shape: Shape,
    length_ns: u64,
}

/// The loads, for a machine where polling for `spin_ns` costs as much as a wake-up.
fn cases(spin_ns: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut case = |name: String, shape, ms| cases.push(Case { name, shape, length_ns: ms * MS });
    case("nothing".into(), Shape::None, 1000);
    for (load, rate, ms) in [
        ("1k", 1_000, 1000),
        ("10k", 10_000, 600),
        ("30k", 30_000, 300),
        ("100k", 100_000, 300),
        ("1M", 1_000_000, 100),
        ("8M", 8_000_000, 20),
        ("20M", 20_000_000, 10),
    ] {
        let gap = 1_000_000_000 / rate;
        case(format!("{load} even"), Shape::Even(gap), ms);
        case(format!("{load} poisson"), Shape::Poisson(gap), ms);
        if (10_000..20_000_000).contains(&rate) {
            for (half, time) in [(MS / 2, "0.5"), (MS, "1"), (5 * MS, "5")] {
                let name = format!("{load} on/off {time} ms");
                case(name, Shape::OnOff { gap: gap / 2, half }, ms);
            }
            let trains = Shape::Trains { frames: 32, period: 32 * gap };
            case(format!("{load} trains of 32"), trains, ms);
        }
    }
    for n in [1, 8] {
        let mut rr = |name: &str, think| {
            case(format!("rr {n} {name}"), Shape::Closed(n, think), 300);
        };
        rr("1us", Think::For(1_000));
        rr("3us", Think::For(3_000));
        rr("break-even+", Think::For(spin_ns + 200));
        rr("~break-even/3", Think::Mean(spin_ns / 3));
        rr("~break-even", Think::Mean(spin_ns));
        rr("~break-even*3", Think::Mean(spin_ns * 3));
        rr("100us", Think::For(100_000));
        rr("turns of 4", Think::Turns([(4, spin_ns / 4), (4, spin_ns * 4)]));
        rr("calm, then 3us", Think::Turns([(100, MS), (20_000, 3_000)]));
    }
    cases
}

fn run(policy: &str, costs: Costs, mistake: Mistake, case: &Case) -> Seen {
    let policy: Policy = policy.parse().unwrap();
    world::run(policy, costs, mistake, Load::new(case.shape, 1), case.length_ns)
}

/// Percentile, in us.
fn part(times: &mut [u32], part: f64) -> f64 {
    if times.is_empty() {
        return 0.0;
    }
    let n = ((times.len() - 1) as f64 * part) as usize;
    f64::from(*times.select_nth_unstable(n).1) / 1000.0
}

/// One line of the table; times in us, CPU in percent of a core, the rest per second.
struct Row {
    policy: &'static str,
    served: u64,
    cpu: f64,
    polled: f64,
    late_p50: f64,
    late_p99: f64,
    late_max: f64,
    notify_p99: f64,
    turns: u64,
    seen: Seen,
}

impl Row {
    fn new(policy: &'static str, costs: Costs, mut seen: Seen) -> Self {
        let percent = |ns: u64| ns as f64 * 100.0 / seen.length_ns as f64;
        Self {
            policy,
            served: seen.second(seen.served),
            cpu: percent(seen.cpu_ns(costs)),
            polled: percent(seen.polled_ns),
            late_p50: part(&mut seen.late, 0.5),
            late_p99: part(&mut seen.late, 0.99),
            late_max: part(&mut seen.late, 1.0),
            notify_p99: part(&mut seen.notified, 0.99),
            turns: seen.turns,
            seen,
        }
    }

    /// CPU per frame served: closed loads serve varying numbers.
    fn cpu_per_frame(&self) -> f64 {
        self.cpu / self.served.max(1) as f64
    }
}

impl Display for Row {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { policy, served, cpu, polled, seen, .. } = self;
        write!(f, "{policy:18} {served:8} {cpu:6.2} {polled:6.2} {:6}", seen.second(seen.sleeps))?;
        write!(f, " {:6} {:6}", seen.second(seen.wakes), seen.second(seen.naps))?;
        write!(f, " {:7} {:6.1} {:6.1}", seen.second(seen.calls), self.late_p50, self.late_p99)?;
        write!(f, " {:6.1} {:6.1} {:4}", self.late_max, self.notify_p99, seen.left)?;
        write!(f, " {:7} {:5}", seen.second(seen.lost), self.turns)
    }
}

/// All policies under one load.
struct Block {
    machine: &'static str,
    costs: Costs,
    case: Case,
    rows: Vec<Row>,
}

impl Block {
    fn row(&self, policy: &str) -> &Row {
        self.rows.iter().find(|row| row.policy == policy).unwrap()
    }

    fn name(&self) -> String {
        format!("{}, {}", self.machine, self.case.name)
    }

    /// CPU per frame of `adaptive` relative to the better of `event` and `spin`.
    fn ratio(&self) -> f64 {
        let better = ["event", "spin"].map(|p| self.row(p).cpu_per_frame());
        // A thousandth of a core is negligible.
        let nothing = 0.1 / self.row("spin").served.max(1) as f64;
        self.row("adaptive").cpu_per_frame() / better[0].min(better[1]).max(nothing)
    }

    /// Latest time that `adaptive` may serve a frame, in us.
    fn target(&self) -> f64 {
        let late = self.costs.nap_late.max(self.costs.wake_late);
        f64::from(DEFAULT_LATENCY_US) + late.get() as f64 / 1000.0
    }

    /// The cheapest policy of those that serve in time and as many frames as `adaptive`.
    fn cheapest(&self) -> &Row {
        let adaptive = self.row("adaptive");
        let least = self.target().max(adaptive.late_p99) + 1.0;
        let fits = |row: &&Row| {
            row.late_p99 + row.notify_p99 <= least && row.served >= adaptive.served * 9 / 10
        };
        let by_cpu = |a: &&Row, b: &&Row| a.cpu_per_frame().total_cmp(&b.cpu_per_frame());
        self.rows.iter().filter(fits).min_by(by_cpu).unwrap_or(adaptive)
    }

    fn summary(&self) -> String {
        let [event, spin, adaptive] = ["event", "spin", "adaptive"].map(|p| self.row(p));
        let cheapest = self.cheapest();
        format!(
            "{:30} {:6.2} {:6.2} {:6.2} {:5.2} {:5.2} {:7.1} {:7.1} {:7.1} {:5}  {}",
            self.name(),
            event.cpu,
            spin.cpu,
            adaptive.cpu,
            self.ratio(),
            adaptive.served as f64 / spin.served.max(1) as f64,
            event.late_p99,
            spin.late_p99,
            adaptive.late_p99,
            adaptive.turns,
            cheapest.policy,
        )
    }

    /// Promises that `adaptive` breaks under this load.
    fn broken(&self) -> Vec<String> {
        let [event, spin, adaptive] = ["event", "spin", "adaptive"].map(|p| self.row(p));
        let name = self.name();
        let mut broken = Vec::new();
        let mut check = |holds: bool, what: String| {
            if !holds {
                broken.push(format!("{name}: {what}"));
            }
        };
        let ratio = self.ratio();
        if DEARER.iter().any(|(dearer, _)| name == *dearer) {
            let as_spin = adaptive.cpu_per_frame() <= spin.cpu_per_frame() * 1.1;
            check(as_spin && ratio > 1.1, format!("{ratio:.2} times the better: no exception"));
        } else {
            check(ratio <= 1.1, format!("{ratio:.2} times the CPU of the better"));
        }
        let busy = spin.late_p99 * 1.1;
        let latest = self.target().max(busy) + 1.0;
        check(adaptive.late_p99 <= latest, format!("p99 {:.1} us", adaptive.late_p99));
        let at_load = AT_LOAD.iter().any(|load| self.case.name == *load);
        if at_load {
            let gathers = GATHERED.iter().any(|load| self.case.name == *load);
            // The last part: one or two polls.
            let most = busy + 0.2 + if gathers { GATHER_US } else { 0.0 };
            check(adaptive.late_p99 <= most, format!("p99 {:.1} us", adaptive.late_p99));
            check(!gathers || adaptive.late_p99 > busy + 0.2, "it does not gather".into());
        }
        let least = if at_load { spin.served } else { event.served.min(spin.served) };
        let served = adaptive.served;
        check(served * 10 >= least * 9, format!("{served} frames/s, not {least}"));
        let turns_max = 8 + 40 * self.case.length_ns / 1_000_000_000;
        check(adaptive.turns <= turns_max, format!("it flaps: {} turns", adaptive.turns));
        if self.case.name.contains("on/off") {
            let best = self.cheapest();
            let twice = adaptive.cpu_per_frame() <= 2.0 * best.cpu_per_frame();
            check(twice, format!("more than twice the CPU of {}", best.policy));
        }
        broken
    }
}

/// Loads for which `adaptive` must be like `spin`.
const AT_LOAD: [&str; 8] = [
    "8M even",
    "8M poisson",
    "20M even",
    "20M poisson",
    "rr 1 1us",
    "rr 1 3us",
    "rr 8 1us",
    "rr 8 3us",
];

/// Those whose frames wait for a full burst, so that p99 is above `spin`'s, and how long they wait
/// at most, in us.
const GATHERED: [&str; 2] = ["8M even", "8M poisson"];
const GATHER_US: f64 = 8.0;

/// Loads for which `event` is cheaper by more than a tenth, and the reason why `adaptive` is like
/// `spin`.
const DEARER: [(&str, &str); 3] = [
    ("nested, 8M trains of 32", "the ring overflows during a sleep: frames are lost"),
    ("nested, rr 8 ~break-even*3", "sleeps serve a quarter less"),
    ("nested, rr 8 100us", "sleeps serve a fifth less"),
];

const HEAD: &str = "\
Results of each policy with each load, in virtual time. Written by
BLESS=1 cargo test -p pvswitch-switch --test policies
A poll takes 100 ns, a frame 60 ns, a poll of kicks, each 20 us, 300 ns; the ring has 256 entries.
Machines: bare (a wake-up costs 6 us and comes 5 us late, a nap 4 and 5), nested (22 and 32, 33 and
37).
Loads, frames/s: even; poisson; on/off: twice the rate for a time, then idle for as long; trains.
rr N T: N requests in flight, each sent a time T after the last reply; ~T: random with that mean;
break-even: polling for this time costs as much as a wake-up.
";
const SUMMARY: &str = concat!(
    "\nadaptive against event and spin. CPU in percent of a core; ratio: CPU per frame against\n",
    "that of the better of the two; serve: frames against spin; p99 us: from a frame's arrival\n",
    "until it is taken; turns: changes between naps and empty polls; cheapest: of all policies\n",
    "that serve as many frames in time.\n",
    "                                  CPU    CPU    CPU                  p99     p99     p99\n",
    "load                            event   spin  adapt ratio serve   event    spin   adapt",
    " turns  cheapest\n",
);
const TABLE: &str = concat!(
    "\nAll policies. polled: time awake without frames; sleeps: without a time-out; wakes: those\n",
    "that a notification ended; naps: with a time-out; late us: from a frame's arrival until it\n",
    "is taken; notify: from there until the next peer is notified; left: frames at the end;\n",
    "turns in all; the rest per second.\n",
    "                                                                   late   late   late",
    " notify\n",
    "policy               served    CPU polled sleeps  wakes   naps   calls    p50    p99    max",
    "    p99 left    lost turns\n",
);

fn blocks(machine: &'static str, costs: Costs) -> Vec<Block> {
    let block = |case: Case| {
        let row = |policy| Row::new(policy, costs, run(policy, costs, Mistake::Not, &case));
        Block { machine, costs, rows: POLICIES.map(row).into(), case }
    };
    cases(costs.wake.get()).into_iter().map(block).collect()
}

#[test]
fn policies_do_what_the_table_says_and_adaptive_what_it_promises() {
    let blocks: Vec<Block> = std::thread::scope(|scope| {
        let machines = MACHINES.map(|(name, costs)| scope.spawn(move || blocks(name, costs)));
        machines.into_iter().flat_map(|machine| machine.join().unwrap()).collect()
    });
    let mut text = HEAD.to_owned() + SUMMARY;
    for block in &blocks {
        text += &(block.summary().trim_end().to_owned() + "\n");
    }
    text += TABLE;
    for block in &blocks {
        text += &format!("\n{}\n", block.name());
        for row in &block.rows {
            text += &format!("{row}\n");
        }
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/policies.txt");
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    let broken: Vec<String> = blocks.iter().flat_map(Block::broken).collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    let mut lines = kept.lines().zip(text.lines()).filter(|(kept, now)| kept != now);
    if let Some((kept, now)) = lines.next() {
        let more = lines.count();
        panic!("policies.txt has\n{kept}\nbut the result is\n{now}\n({more} more lines; {BLESS})");
    }
    assert_eq!(kept.lines().count(), text.lines().count(), "{BLESS}");
}

const BLESS: &str = "if that is intended: BLESS=1 cargo test -p pvswitch-switch --test policies";

/// A frame that arrives while the worker arms waits indefinitely without a re-check: the column
/// `left` shows it.
#[test]
fn canary_frames_are_left_without_a_recheck() {
    let costs = Costs::TYPICAL;
    let mut cases = cases(costs.wake.get());
    // A timer stops after 100 ms without a frame: one of these arrives just then.
    cases.extend((0..25_000).map(|n| {
        let gap = 100 * MS + n * (POLL.get() - 1);
        Case { name: format!("every {gap} ns"), shape: Shape::Even(gap), length_ns: 250 * MS }
    }));
    for name in POLICIES.iter().filter(|policy| **policy != "spin") {
        let left = |mistake, case: &Case| run(name, costs, mistake, case).left;
        let stuck =
            |case: &&Case| left(Mistake::IgnoresRecheck, case) > 0 && left(Mistake::Not, case) == 0;
        let shown = cases.iter().find(stuck);
        println!("{name}: frames are left with {}", shown.map_or("none", |case| &case.name));
        assert!(shown.is_some(), "{name}");
    }
}

/// Effects that are carried out wrongly break promises of `adaptive`.
#[test]
fn canary_forgotten_calls_and_endless_naps_break_promises() {
    let costs = Costs::TYPICAL;
    for (mistake, load) in
        [(Mistake::ForgetsLateCalls, "rr 8 1us"), (Mistake::NapsForever, "100k even")]
    {
        let broken = |mistake| {
            let cases = cases(costs.wake.get());
            let case = cases.into_iter().find(|case| case.name == load).unwrap();
            let row = |policy| {
                let mistake = if policy == "adaptive" { mistake } else { Mistake::Not };
                Row::new(policy, costs, run(policy, costs, mistake, &case))
            };
            let rows = ["event", "spin", "adaptive"].map(row).into();
            Block { machine: "bare", costs, case, rows }.broken()
        };
        assert_eq!(broken(Mistake::Not), [""; 0], "{load}");
        let broken = broken(mistake);
        println!("{mistake:?}: {broken:?}");
        assert!(!broken.is_empty(), "{mistake:?}, {load}");
    }
}
