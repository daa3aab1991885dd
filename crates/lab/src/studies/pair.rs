//! A guest that sends frames to another through a switch; common to `policies`, `latency` and
//! `idle`. Guests are generators, so that sizes and rates are exact.

use serde_json::Value;

use crate::error::Fail;
use crate::plan::Cell;
use crate::report::Verdict;
use crate::stage::{
    Class, Count, Gen, NicOptions, Port, Stage, Switch, SwitchOptions, Window, cpu_ns, sleep,
    waited_ns,
};
use crate::store::Results;
use crate::study::{Better, Figures, Measure};

/// Length of the warm-up before a window, in seconds.
pub const WARM_S: f64 = 0.3;
/// Length of the warm-up without traffic: `timer` stops after 0.1 s, and `adaptive` learns the cost
/// of sleeping.
pub const WARM_IDLE_S: f64 = 0.5;
/// Overhead of a run beyond its window: warm-up, start and end, in seconds.
pub const OVERHEAD_S: f64 = 1.0;

/// All poll policies, the base first.
pub const POLICIES: [&str; 10] = [
    "event",
    "napi",
    "timer:1000",
    "timer:20000",
    "coalesce:50,32",
    "coalesce:5/pending",
    "spin",
    "adaptive",
    "adaptive:0",
    "adaptive:200",
];
/// The policies that differ most.
pub const FEW: [&str; 4] = ["event", "timer:1000", "spin", "adaptive"];
/// The policies of [`FEW`] that are judged by counts, which do not apply to `spin`.
pub const JUDGED: [&str; 3] = ["event", "timer:1000", "adaptive"];

/// Measures of a pair.
pub const MEASURES: [Measure; 19] = [
    Measure::new("cpu", "%", Better::Less, "CPU time of the worker, of one CPU"),
    Measure::new(
        "p50",
        "us",
        Better::Less,
        "from one guest's ring to the other's program, half of all",
    ),
    Measure::new("p99", "us", Better::Less, "the same, 99 % of all"),
    Measure::new("p999", "us", Better::Less, "the same, 99.9 % of all"),
    Measure::new("delivered", "1/s", Better::More, "frames given to the receiver"),
    Measure::new("loss", "%", Better::Less, "frames that did not arrive, of those sent"),
    Measure::new("wakeups", "1/s", Better::Less, "sleeps and naps of the worker that ended"),
    Measure::new("kicks", "/frame", Better::Less, "notifications of both guests to the switch"),
    Measure::new("calls", "/frame", Better::Less, "notifications of the switch to both guests"),
    Measure::new("burst", "frames", Better::Neither, "frames taken at once"),
    Measure::new("frame_ns", "ns", Better::Less, "CPU time of the worker for each frame"),
    Measure::new("guests_cpu", "%", Better::Less, "CPU time of both guests, of one CPU"),
    Measure::new("waited", "%", Better::Neither, "time that the switch was runnable without a CPU"),
    Measure::new("sent", "", Better::Neither, "frames sent, warm-up included"),
    Measure::new("received", "", Better::Neither, "frames received, warm-up included"),
    Measure::new(
        "drops",
        "",
        Better::Neither,
        "frames of the sender in the switch's drop counters",
    ),
    Measure::new("unaccounted", "", Better::Less, "frames neither received nor in a drop counter"),
    Measure::new("woken", "", Better::Less, "sleeps and naps in the window, as counted"),
    Measure::new(
        "first_frame",
        "us",
        Better::Less,
        "the switch's part in the first frame after idle",
    ),
];

/// Returns options of a switch for a policy; `P+C` is poll policy P with call policy C.
pub fn switch_options(stage: &Stage, policy: &str) -> SwitchOptions {
    let (poll, call) = policy.split_once('+').unwrap_or((policy, "event"));
    SwitchOptions { call: call.into(), ..SwitchOptions::new(stage, poll) }
}

/// Returns the options of all guests, whatever the policy of the switch.
pub fn guest_options() -> NicOptions {
    NicOptions::new("event")
}

/// Returns the scheduling class of receivers: real-time if they share a CPU with a sender, which
/// spins until a frame is due. Otherwise a kernel with lazy preemption runs them at the next tick,
/// whose length would be the tail of every latency.
pub fn receiver_class(stage: &Stage) -> Class {
    if stage.guest_cpus.len() < 2 { Class::RealTime } else { Class::Normal }
}

/// Idle guests, each at its own port.
pub struct Idle {
    /// Their ports.
    pub ports: Vec<Port>,
    guest: Port,
}

impl Idle {
    /// Returns `count` idle guests; they are not started.
    pub fn new(stage: &Stage, count: usize) -> Result<Self, Fail> {
        let (ports, guest) = Port::many(stage, "i", stage.proto, count)?;
        Ok(Self { ports, guest })
    }

    /// Starts one process for all of them; `None` if there are none.
    pub fn start(&self, stage: &Stage) -> Result<Option<Gen>, Fail> {
        if self.ports.is_empty() {
            return Ok(None);
        }
        let mode = format!("idle --count {}", self.ports.len());
        Gen::start(stage, 900, &self.guest, &guest_options(), &mode).map(Some)
    }
}

/// Number of sleeps and naps of all workers.
pub fn woken(count: &Count) -> f64 {
    let of = |name: &str| count.workers.get(name).copied().unwrap_or(0) as f64;
    of("sleeps") + of("naps")
}

/// CPU time of all workers, in per cent of one CPU.
pub fn worker_percent(count: &Count) -> f64 {
    count.percent(worker_ns(count))
}

fn worker_ns(count: &Count) -> u64 {
    count.workers.get("cpu_ns").copied().unwrap_or(0)
}

/// Returns a number of a guest's report; 0 if it is missing.
pub fn number(report: &Value, name: &str) -> f64 {
    report[name].as_f64().unwrap_or(0.0)
}

/// A sender and a receiver.
pub struct Pair<'a> {
    /// Poll policy of the switch.
    pub policy: &'a str,
    /// Options of the sender, as for `gen`: `--rate 1k`; empty: as fast as it can.
    pub traffic: &'a str,
    /// Further options of the switch.
    pub switch: &'a [&'a str],
    /// Whether the receiver polls, and is never notified.
    pub polled: bool,
    /// Number of idle ports beside it.
    pub idle: usize,
    /// Length of the warm-up before the window, in seconds.
    pub warm_s: f64,
}

impl<'a> Pair<'a> {
    /// Returns one with a receiver that is notified, no further options and no idle ports.
    pub fn new(policy: &'a str, traffic: &'a str) -> Self {
        Self { policy, traffic, switch: &[], polled: false, idle: 0, warm_s: WARM_S }
    }

    /// Runs the pair; returns the figures of a window of `seconds`.
    pub fn run(&self, stage: &Stage, seconds: f64) -> Result<Figures, Fail> {
        let port = |name| Port::guest(stage, name, stage.proto, "");
        let (from, to) = (port("g0"), port("g1"));
        let idle = Idle::new(stage, self.idle)?;
        let ports = [&[from.clone(), to.clone()], &idle.ports[..]].concat();
        let mut options = switch_options(stage, self.policy);
        options.more.extend(self.switch.iter().map(|&word| word.into()));
        let switch = Switch::start(stage, &options, &ports)?;
        let all = Window::open(&switch, &[])?;
        let _idle = idle.start(stage)?;
        let (receiver, class) = match self.polled {
            // At a higher priority the sender would have no CPU.
            true => (NicOptions::new("spin"), Class::Normal),
            false => (guest_options(), receiver_class(stage)),
        };
        let mut sink = Gen::start_as(stage, 1, &to, &receiver, "sink", class)?;
        switch.wait_up_while(1 + self.idle, || sink.check())?;
        // Without a duration: on a busy machine it may take long to connect.
        let mode = format!("send --peer {} {}", Gen::mac(1), self.traffic);
        let mut sender = Gen::start(stage, 0, &from, &guest_options(), &mode)?;
        switch.wait_up_while(2 + self.idle, || sender.check())?;
        sleep(self.warm_s);
        let guests_ns = || cpu_ns(sender.id()) + cpu_ns(sink.id());
        let before = (guests_ns(), waited_ns(switch.id()));
        let window = Window::open(&switch, &[])?;
        sleep(seconds);
        let count = window.close()?;
        let after = (guests_ns(), waited_ns(switch.id()));
        let sent = sender.end()?;
        sleep(0.1); // held frames and delayed calls
        let all = all.close()?;
        let received = sink.end()?;
        switch.check()?;
        let mut figures = of_window(&count);
        figures.extend(of_guests(&all, &sent, &received));
        figures.insert("guests_cpu", count.percent(after.0.saturating_sub(before.0)));
        figures.insert("waited", count.percent(after.1.saturating_sub(before.1)));
        Ok(figures)
    }

    /// Runs a pair without traffic; returns the figures of a window of `seconds`.
    pub fn idle(stage: &Stage, policy: &str, seconds: f64) -> Result<Figures, Fail> {
        let ports = ["g0", "g1"].map(|name| Port::guest(stage, name, stage.proto, ""));
        let switch = Switch::start(stage, &switch_options(stage, policy), &ports)?;
        let sink = |i: usize| Gen::start(stage, i, &ports[i], &guest_options(), "sink");
        let _guests = [sink(0)?, sink(1)?];
        switch.wait_up(2)?;
        sleep(WARM_IDLE_S);
        let window = Window::open(&switch, &[])?;
        sleep(seconds);
        let count = window.close()?;
        switch.check()?;
        Ok(of_window(&count))
    }
}

/// Returns figures of the switch's counters.
pub fn of_window(count: &Count) -> Figures {
    let frames = count.ingress("g", "frames");
    let mut figures = Figures::from([
        ("cpu", worker_percent(count)),
        ("delivered", count.per_second(count.egress("g", "frames"))),
        ("wakeups", count.per_second(woken(count))),
        ("woken", woken(count)),
    ]);
    if frames > 0.0 {
        figures.extend([
            ("frame_ns", worker_ns(count) as f64 / frames),
            ("burst", frames / count.ingress("g", "bursts").max(1.0)),
            ("calls", count.calls("g") / frames),
        ]);
    }
    figures
}

/// Returns figures of the guests' counters, and accounts for every frame.
fn of_guests(all: &Count, sent: &Value, received: &Value) -> Figures {
    let (frames, got) = (number(sent, "sent_frames"), number(received, "received_frames"));
    let drops = all.drops("g0", "g1");
    let kicks = number(sent, "kicks") + number(received, "kicks");
    let mut figures = Figures::from([
        ("loss", 100.0 * (frames - got) / frames.max(1.0)),
        ("kicks", kicks / frames.max(1.0)),
        ("sent", frames),
        ("received", got),
        ("drops", drops),
        ("unaccounted", frames - got - drops),
    ]);
    let firsts = all.ingress("g", "first_frames");
    if firsts > 0.0 {
        figures.insert("first_frame", all.ingress("g", "first_frame_ns") / firsts / 1e3);
    }
    if number(received, "latency_samples") > 0.0 {
        for (name, of) in
            [("p50", "latency_ns_p50"), ("p99", "latency_ns_p99"), ("p999", "latency_ns_p999")]
        {
            figures.insert(name, number(received, of) / 1e3);
        }
    }
    figures
}

/// Judges that every frame sent is received or in exactly one drop counter.
pub fn accounted(results: &Results) -> Option<Verdict> {
    let unaccounted = results.values(|_| true, "unaccounted");
    let frames: f64 = results.values(|_| true, "sent").iter().sum();
    let wrong = unaccounted.iter().filter(|n| **n != 0.0).count();
    (!unaccounted.is_empty()).then(|| Verdict {
        what: format!(
            "every frame is received, or in one drop counter: {frames} frames in {} runs, {wrong} \
             runs in which that is not so",
            unaccounted.len()
        ),
        holds: Some(wrong == 0),
    })
}

/// Judges that a worker without traffic sleeps, with any policy but `spin`.
pub fn nothing_wakes(
    results: &Results,
    what: &str,
    quiet: impl Fn(&Cell) -> bool,
) -> Option<Verdict> {
    let wanted = |cell: &Cell| quiet(cell) && !cell.get("policy").starts_with("spin");
    let woken = results.values(wanted, "woken");
    let most = woken.iter().copied().max_by(f64::total_cmp)?;
    Some(Verdict {
        what: format!(
            "{what}: the worker is not woken once in {} windows of {} s; most in one: {most}",
            woken.len(),
            results.plan.seconds
        ),
        holds: Some(most == 0.0),
    })
}
