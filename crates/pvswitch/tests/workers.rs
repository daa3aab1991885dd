//! Polling, placement and fairness: the switch as operators run it.

mod common;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use common::{Bystanders, Dir, Gen, Process, Switch, wait_for};
use serde_json::Value;

const POLICIES: [&str; 8] = [
    "event",
    "napi:8",
    "timer:1000",
    "timer:20000",
    "coalesce:200,16",
    "coalesce:200/pending",
    "spin",
    "adaptive:100",
];

/// Runs one test at a time: some use all CPUs.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A sender and a sink, on ports `NAMEs` and `NAMEd`, with addresses from `n`.
struct Flow {
    sender: Gen,
    sink: Gen,
    to: String,
    /// Frames received before its start.
    before: u64,
}

impl Flow {
    fn start(switch: &Switch, dir: &Dir, name: &str, n: u8, args: &[&str]) -> Self {
        let (from, to) = (format!("{name}s"), format!("{name}d"));
        for port in [&from, &to] {
            if switch.port("show", port).is_null() {
                switch.json(&["add-port", &dir.port(port, "")]);
            }
        }
        let (src, dst) = (format!("02:00:00:00:{n:02}:01"), format!("02:00:00:00:{n:02}:02"));
        let ring = ["--queue-size", "1024"];
        let sink = [&["--mode", "sink", "--mac", &dst], &ring[..]].concat();
        let sink = Gen::start(&dir.path(&to), &sink);
        switch.wait_up(&to, true);
        let before = switch.counter(&to, "egress", "frames");
        let send = [&["--mac", &src, "--peer", &dst], &ring[..], args].concat();
        let sender = Gen::start(&dir.path(&from), &send);
        switch.wait_up(&from, true);
        Self { sender, sink, to, before }
    }

    /// Stops it after some frames; checks that all arrived in order.
    fn end_whole(self, switch: &Switch) {
        let passed = || switch.counter(&self.to, "egress", "frames") - self.before;
        wait_for("frames", || passed() > 100);
        let sent = self.sender.end();
        let frames = sent["sent_frames"].as_u64().unwrap();
        wait_for("the last frames", || passed() >= frames);
        std::thread::sleep(Duration::from_millis(50));
        let got = self.sink.end();
        assert!(frames > 50, "{sent}");
        // Announcements of other guests are flooded.
        let own = n(&got, "received_frames") - n(&got, "foreign_frames");
        assert_eq!(own, frames, "{got} {}", switch.json(&["stats"]));
        assert_eq!((&got["lost_frames"], &got["late_frames"]), (&0.into(), &0.into()));
    }
}

fn queue(switch: &Switch, port: &str) -> Value {
    switch.port("stats", port)["ingress"][0].clone()
}

fn n(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or_else(|| panic!("no {key} in {value}"))
}

#[test]
fn policies_are_changed_while_frames_pass_and_none_is_lost() {
    let _alone = alone();
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[]);
    let flow = Flow::start(&switch, &dir, "a", 1, &["--rate", "3k"]);
    for policy in POLICIES {
        switch.json(&["set", "as", &format!("poll={policy}")]);
        switch.json(&["set", "ad/0", &format!("call={policy}")]);
        let before = n(&queue(&switch, "as"), "frames");
        wait_for(policy, || n(&queue(&switch, "as"), "frames") > before + 300);
        assert_eq!(queue(&switch, "as")["poll"], policy);
        assert_eq!(switch.port("stats", "ad")["egress"][0]["call"], policy);
    }
    // A queue that went cold under one policy is woken for the next.
    flow.end_whole(&switch);
    switch.json(&["set", "poll=spin", "call=event"]);
    assert_eq!(switch.json(&["show"])["poll"], "spin");
}

#[test]
fn idle_queue_is_cold_and_costs_nothing() {
    let _alone = alone();
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ",queues=2"), dir.port("b", "")]);
    for policy in ["event", "napi", "timer:1000", "coalesce:50,8", "adaptive"] {
        switch.json(&["set", &format!("poll={policy}")]);
        let flow = Flow::start(&switch, &dir, "c", 1, &["--rate", "2k"]);
        flow.end_whole(&switch);
        wait_for("all queues to be cold", || queue(&switch, "cs")["state"] == "cold");
        let sleeps = || {
            let stats = switch.json(&["stats"]);
            let worker = &stats["workers"][0];
            (n(worker, "sleeps"), n(worker, "naps"), n(worker, "rounds"))
        };
        // The smart poll stops by itself, a tenth of a second after the last frame.
        std::thread::sleep(Duration::from_millis(200));
        let before = sleeps();
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(sleeps(), before, "{policy}: woken without frames");
    }
}

#[test]
fn hot_queue_is_shown_as_hot_and_counters_add_up() {
    let _alone = alone();
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--poll", "spin"], &[]);
    let flow = Flow::start(&switch, &dir, "a", 1, &["--rate", "2k"]);
    wait_for("frames", || n(&queue(&switch, "as"), "frames") > 200);
    assert_eq!(queue(&switch, "as")["state"], "hot");
    switch.json(&["set", "as", "poll=event"]);
    let before = n(&queue(&switch, "as"), "wakes");
    wait_for("wake-ups", || n(&queue(&switch, "as"), "wakes") > before + 100);
    // A reply may be of the middle of a poll.
    wait_for("counters that add up", || {
        let q = queue(&switch, "as");
        n(&q, "polls") >= n(&q, "polls_empty") + n(&q, "bursts")
    });
    let q = queue(&switch, "as");
    assert!(n(&q, "sleeps") >= 100 && n(&q, "served_ns") > 0, "{q}");
    assert!(n(&q, "first_frames") >= 100, "{q}");
    assert!(n(&q, "first_frame_ns_max") >= n(&q, "first_frame_ns") / n(&q, "first_frames"), "{q}");
    flow.end_whole(&switch);
}

#[test]
fn calls_are_delayed_by_the_call_policy() {
    let _alone = alone();
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--call", "coalesce:5000,64"], &[]);
    let flow = Flow::start(&switch, &dir, "a", 1, &["--rate", "5k"]);
    let calls = || {
        let q = switch.port("stats", "ad")["egress"][0].clone();
        (n(&q, "calls"), n(&q, "calls_late"), n(&q, "frames"))
    };
    wait_for("frames", || calls().2 > 2000);
    let (count, late, frames) = calls();
    // 25 frames arrive in 5 ms; a suspended machine may bunch them, but not spread them.
    assert!(late > 0 && count * 10 < frames, "{count} calls, {late} delayed, {frames} frames");
    switch.json(&["set", "ad", "call=event"]);
    let (count, late, frames) = calls();
    wait_for("frames under the new policy", || calls().2 > frames + 1000);
    let (count_then, late_then, _) = calls();
    // One may have been under way.
    assert!(late_then <= late + 1, "{} calls are delayed still", late_then - late);
    assert!(count_then > count, "no calls");
    flow.end_whole(&switch);
}

#[test]
fn placement_and_ports_change_under_traffic() {
    let _alone = alone();
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--workers", "3", "--placement", "single"], &[]);
    let flows: Vec<_> = ["a", "b", "c"]
        .iter()
        .zip(1..)
        .map(|(name, n)| Flow::start(&switch, &dir, name, n, &["--rate", "2k"]))
        .collect();
    let workers = || ["as", "bs", "cs"].map(|port| n(&queue(&switch, port), "worker"));
    assert_eq!(workers(), [0, 0, 0]);
    for round in 0..3 {
        for (placement, spread) in
            [("group", true), ("per-port", true), ("balanced", true), ("single", false)]
        {
            switch.json(&["set", &format!("placement={placement}")]);
            wait_for(placement, || {
                let mut on = workers();
                on.sort_unstable();
                placement == "balanced" || (on[0] != on[2]) == spread
            });
            let name = format!("x{round}");
            let extra = Flow::start(&switch, &dir, &name, 9, &["--rate", "1k"]);
            let passed = || n(&queue(&switch, &format!("{name}s")), "frames");
            wait_for("an added port's frames", || passed() > 20);
            extra.end_whole_if(&switch, round % 2 == 0);
            for end in ["s", "d"] {
                switch.json(&["del-port", &format!("{name}{end}")]);
            }
        }
    }
    for flow in flows {
        flow.end_whole(&switch);
    }
}

impl Flow {
    /// Stops it, or kills it.
    fn end_whole_if(mut self, switch: &Switch, well: bool) {
        if well {
            self.sender.0.lives();
            self.end_whole(switch);
        } else {
            self.sender.0.kill();
        }
    }
}

#[test]
fn overloaded_worker_gives_queues_away_and_idle_ones_return() {
    let _alone = alone();
    if std::thread::available_parallelism().is_ok_and(|n| n.get() < 2) {
        println!("skipped: one CPU");
        return;
    }
    let dir = Dir::new();
    // Many small frames at full speed: two queues that fully load a worker.
    let args = ["--workers", "2", "--poll", "spin"];
    let switch = Switch::start(&dir, &args, &[]);
    let flows = [("a", 1), ("b", 2)].map(|(name, n)| Flow::start(&switch, &dir, name, n, &[]));
    let on = || ["as", "bs"].map(|port| n(&queue(&switch, port), "worker"));
    wait_for("the two queues on separate workers", || on()[0] != on()[1]);
    assert!(n(&switch.json(&["stats"])["workers"][0], "moves") > 0);
    for flow in flows {
        drop::<Process>(flow.sender.0);
        drop::<Process>(flow.sink.0);
    }
    switch.json(&["set", "poll=event"]);
    let little = ["--rate", "500"];
    let flows = [("c", 3), ("d", 4)].map(|(name, n)| Flow::start(&switch, &dir, name, n, &little));
    wait_for("all queues on worker 0", || {
        let stats = switch.json(&["stats"]);
        n(&stats["workers"][1], "queues") == 0
    });
    for flow in flows {
        flow.end_whole(&switch);
    }
}

#[test]
fn flooding_guest_does_not_reduce_its_neighbours_share() {
    let _alone = alone();
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--poll", "spin"], &[dir.port("r", ""), dir.port("e", "")]);
    let quiet = Bystanders::start(&switch, &dir, "r", "e");
    // Jumbo frames: the flooder's bursts are the most expensive.
    let dear = Flow::start(&switch, &dir, "x", 1, &["--size", "9000"]);
    let cheap = Flow::start(&switch, &dir, "y", 2, &["--size", "60"]);
    wait_for("floods", || n(&queue(&switch, "xs"), "frames") > 10_000);
    quiet.wait_for_replies(&switch);
    let served = |port: &str| n(&queue(&switch, port), "served_ns");
    let before = ["xs", "ys"].map(served);
    std::thread::sleep(Duration::from_millis(500));
    let spent = [served("xs") - before[0], served("ys") - before[1]];
    println!("served for {spent:?} ns; the senders share their CPU with the switch here");
    assert!(spent.iter().all(|ns| *ns > 0));
    quiet.end();
    drop((dear, cheap));
}

#[test]
fn stopped_receiver_does_not_slow_other_guests() {
    let _alone = alone();
    let dir = Dir::new();
    let ports = ["r", "e", "s", "d"].map(|name| dir.port(name, ",hold=16"));
    let switch = Switch::start(&dir, &[], &ports);
    let quiet = Bystanders::eager(&switch, &dir, "r", "e");
    let sink = Gen::start(&dir.path("d"), &["--mode", "sink", "--mac", "02:00:00:00:00:02"]);
    switch.wait_up("d", true);
    let _flood = Gen::start(&dir.path("s"), &["--rate", "50k"]);
    let answers = || quiet.replies(&switch, Duration::from_millis(250));
    let (mut while_it_takes, mut while_it_does_not) = (0, 0);
    // Alternately: other load on the machine affects both, though not evenly. A sender that waited
    // for the stopped receiver left the others a thousandth.
    for _ in 0..10 {
        let taken = switch.counter("d", "egress", "frames");
        wait_for("frames", || switch.counter("d", "egress", "frames") > taken + 1000);
        while_it_takes += answers();
        let dropped = switch.counter("s", "ingress", "drops_no_room");
        common::signal(&sink.0.0, rustix::process::Signal::STOP);
        wait_for("drops", || switch.counter("s", "ingress", "drops_no_room") > dropped + 1000);
        while_it_does_not += answers();
        common::signal(&sink.0.0, rustix::process::Signal::CONT);
    }
    println!("replies: {while_it_takes} while it receives, {while_it_does_not} while stopped");
    assert!(
        while_it_does_not * 10 >= while_it_takes,
        "{while_it_does_not} answers, else {while_it_takes}"
    );
    assert!(switch.counter("s", "ingress", "holds") > 0);
    quiet.end();
}

#[test]
fn invalid_settings_change_nothing() {
    let _alone = alone();
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ",queues=2")]);
    let errors = [
        (&["set", "a", "pol=spin"][..], "did you mean 'poll'?"),
        (&["set", "a", "poll=spn"], "poll=spn: unknown policy 'spn'"),
        (&["set", "a", "poll=timer:0"], "use 1 to 20000"),
        (&["set", "a", "weight=0"], "use 1 to 100"),
        (&["set", "a", "hold=1025"], "use 0 to 1024"),
        (&["set", "a", "placement=single"], "unknown setting 'placement'"),
        (&["set", "weight=3"], "'weight' is a setting of a port: use set PORT weight=VALUE"),
        (&["set", "wait=3"], "known here: poll, call, placement"),
        (&["set", "workers=3"], "'workers' cannot be changed at run time: change the file"),
        (&["set", "a", "queues=4"], "'queues' cannot be changed at run time: change it in the"),
        (&["set", "a", "mtu=1500"], "use ctl del-port a and ctl add-port"),
        (&["set", "placement=balance"], "did you mean 'balanced'?"),
        (&["set", "b", "poll=spin"], "no port 'b'"),
        (&["set", "a/2", "poll=spin"], "use a queue from a/0 to a/1"),
        (&["set", "a", "poll=spin", "weight=0"], "use 1 to 100"),
    ];
    for (args, want) in errors {
        let out = switch.ctl(args);
        let error = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{error}");
        assert!(error.contains(want), "{args:?}: {error}");
    }
    // Wrong whatever the switch has.
    for (args, want) in [
        (["set", "a", "poll"], "use KEY=VALUE"),
        (["set", "a/x", "poll=spin"], "queues are numbered from 0"),
    ] {
        let out = switch.ctl(&args);
        let error = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(2), "{error}");
        assert!(error.contains(want), "{args:?}: {error}");
    }
    for q in switch.port("stats", "a")["ingress"].as_array().unwrap() {
        assert_eq!((&q["poll"], &q["weight"]), (&"adaptive".into(), &1.into()));
    }
    switch.json(&["set", "a/1", "poll=spin", "weight=7", "hold=0"]);
    let a = switch.port("stats", "a");
    assert_eq!(
        (&a["ingress"][0]["poll"], &a["ingress"][1]["poll"]),
        (&"adaptive".into(), &"spin".into())
    );
    assert_eq!((&a["ingress"][1]["weight"], &a["egress"][1]["hold"]), (&7.into(), &0.into()));
}
