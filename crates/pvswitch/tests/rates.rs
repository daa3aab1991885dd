//! Rates of ports of a running switch: frames wait or are dropped, and rates change while they do.

mod common;

use std::time::{Duration, Instant};

use common::{Dir, Gen, Switch, wait_for};

const MACS: [&str; 2] = ["02:00:00:00:00:01", "02:00:00:00:00:02"];

/// A switch with ports `a` and `b` with these options, and a receiver behind `b`.
fn start(dir: &Dir, args: &[&str], a: &str, b: &str) -> (Switch, Gen) {
    let switch = Switch::start(dir, args, &[dir.port("a", a), dir.port("b", b)]);
    let sink = Gen::start(&dir.path("b"), &["--mode", "sink", "--mac", MACS[1]]);
    switch.wait_up("b", true);
    wait_for("its announcement", || switch.counter("b", "ingress", "frames") > 0);
    (switch, sink)
}

fn send(dir: &Dir, frames: &str, more: &[&str]) -> Gen {
    let args = ["--mac", MACS[0], "--peer", MACS[1], "--frames", frames];
    Gen::start(&dir.path("a"), &[&args, more].concat())
}

#[test]
fn frames_from_a_guest_wait_for_its_rate_and_none_is_lost() {
    for (mode, rate) in [("switch", "rate-in=400frames"), ("cross", "rate-in=192kbit")] {
        let dir = Dir::new();
        let options =
            format!(",{rate},burst-in={}", if mode == "switch" { "8frames" } else { "480" });
        let (switch, _sink) = start(&dir, &["--forward", mode], &options, "");
        let got = || switch.counter("b", "egress", "frames");
        let (before, began) = (got(), Instant::now());
        // 60 bytes each: 480 bits.
        let sent = send(&dir, "600", &["--size", "60"]).report();
        wait_for("all frames", || got() >= before + 600);
        // The burst, one turn of 64 frames in debt, and 1.3 s for the others.
        let took = began.elapsed();
        assert!(took >= Duration::from_millis(1300), "{mode}: {took:?}");
        assert_eq!(sent["sent_frames"], 600, "{sent}");
        assert!(switch.counter("a", "ingress", "rate_waits") > 0);
        assert_eq!(switch.counter("b", "egress", "drops_rate"), 0);
    }
}

#[test]
fn frames_to_a_guest_beyond_its_rate_are_dropped_and_counted_at_it() {
    let dir = Dir::new();
    let (switch, _sink) = start(&dir, &[], "", ",rate-out=1frames,burst-out=50frames,hold=0");
    let seen = || {
        let egress = |counter| switch.counter("b", "egress", counter);
        (egress("frames"), egress("drops_rate"))
    };
    send(&dir, "500", &["--rate", "5k"]).report();
    wait_for("all frames", || seen().0 + seen().1 >= 500);
    let (got, dropped) = seen();
    // How long it takes is the machine's affair.
    assert!(got >= 40 && dropped >= 300, "{got} {dropped}");
    switch.json(&["set", "b", "rate-out=none", "burst-out=none"]);
    send(&dir, "500", &["--rate", "5k"]).report();
    wait_for("all frames", || seen().0 >= got + 500);
    assert_eq!(seen().1, dropped);
}

#[test]
fn frames_to_a_guest_beyond_its_rate_are_held_and_delivered_in_time() {
    let dir = Dir::new();
    let (switch, _sink) = start(&dir, &[], "", ",rate-out=100frames,burst-out=10frames");
    let egress = |counter| switch.counter("b", "egress", counter);
    let (before, began) = (egress("frames"), Instant::now());
    send(&dir, "150", &[]).report();
    wait_for("all frames", || egress("frames") >= before + 150);
    // The burst, and 1.4 s for the others.
    let took = began.elapsed();
    assert!(took >= Duration::from_millis(1300), "{took:?}");
    assert!(egress("holds") >= 100);
    assert_eq!((egress("drops_rate"), egress("lost_aged")), (0, 0));
}

#[test]
fn rate_changes_while_frames_wait_for_it() {
    let dir = Dir::new();
    let (switch, _sink) = start(&dir, &["--workers", "2"], ",rate-in=1kbit", "");
    let got = || switch.counter("b", "egress", "frames");
    // At 1 kbit/s it would take minutes.
    let sender = send(&dir, "3000", &["--size", "1000"]);
    wait_for("a wait", || switch.counter("a", "ingress", "rate_waits") > 0);
    let early = got();
    assert!(early < 200, "{early}");
    let refused = switch.ctl(&["set", "a", "burst-in=9frames"]);
    let error = String::from_utf8(refused.stderr).unwrap();
    assert!(error.contains("burst-in= in frames needs a rate"), "{error}");
    let shown = switch.port("show", "a")["rules"].clone();
    assert_eq!(shown, serde_json::json!({ "rate-in": "1kbit" }), "unchanged");
    switch.json(&["set", "a", "rate-in=10Gbit+1Gframes"]);
    assert_eq!(sender.report()["sent_frames"], 3000);
    wait_for("all frames", || got() >= 3000);
    let shown = String::from_utf8(switch.ctl(&["show"]).stdout).unwrap();
    assert!(shown.contains("rules    rate-in=10Gbit+1Gframes\n"), "{shown}");
}

#[test]
fn idle_port_with_rates_causes_no_wake_up() {
    let dir = Dir::new();
    let both = ",rate-in=1Mbit,rate-out=1Mbit+100frames";
    let (switch, _sink) = start(&dir, &[], both, both);
    let wakes = || {
        let all = switch.json(&["stats"]);
        let workers = all["workers"].as_array().unwrap().clone();
        let sum = |counter: &str| workers.iter().map(|w| w[counter].as_u64().unwrap()).sum::<u64>();
        sum("sleeps") + sum("naps")
    };
    let mut before = wakes();
    wait_for("a second without a wake-up", || {
        std::thread::sleep(Duration::from_secs(1));
        let after = wakes();
        std::mem::replace(&mut before, after) == after
    });
}

#[test]
fn flooded_frames_beyond_the_storm_limit_are_dropped_by_kind() {
    let dir = Dir::new();
    let (switch, _sink) = start(&dir, &[], ",storm=1frames,burst-storm=50frames", "");
    let seen = || {
        let got = switch.counter("b", "egress", "frames");
        (got, switch.counter("a", "ingress", "drops_storm_unknown"))
    };
    let before = seen();
    let unknown = ["--mac", MACS[0], "--peer", "02:00:00:00:00:99"];
    let flood = [&unknown[..], &["--frames", "500", "--rate", "5k"]].concat();
    Gen::start(&dir.path("a"), &flood).report();
    wait_for("all frames", || seen().0 - before.0 + seen().1 >= 500);
    assert!(seen().0 - before.0 >= 40 && seen().1 >= 300, "{:?}", seen());
    // A known address is not flooded.
    let (got, dropped) = seen();
    send(&dir, "500", &["--rate", "5k"]).report();
    wait_for("all frames", || seen().0 >= got + 500);
    assert_eq!(seen().1, dropped);
    switch.json(&["set", "a", "storm=none", "burst-storm=none"]);
    Gen::start(&dir.path("a"), &flood).report();
    wait_for("all frames", || seen().0 >= got + 1000);
    assert_eq!(seen().1, dropped);
}
