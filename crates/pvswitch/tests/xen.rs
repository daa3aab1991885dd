//! Xen ports without Xen: both halves of a vif as separate processes, over `xen-local`.

mod common;

use std::time::Duration;

use common::{Bystanders, Dir, Gen, Process, Switch, pvswitch, signal, wait_for};
use rustix::process::Signal;

/// `NAME=xen-local:DIR/NAME`, with these options.
fn vif(dir: &Dir, name: &str, options: &str) -> String {
    format!("{name}=xen-local:{}{options}", dir.text(name))
}

/// A guest at port `name` of any kind.
fn guest(dir: &Dir, name: &str, kind: &str, args: &[&str]) -> Gen {
    // A directory accepts options of the front half.
    let (name, options) = name.split_once(',').unwrap_or((name, ""));
    let comma = if options.is_empty() { "" } else { "," };
    Gen::connect(&format!("{kind}:{}{comma}{options}", dir.text(name)), args)
}

/// Sends from one port to another, and checks that every frame arrives in order. Returns both
/// reports. A kind may include options of the guest.
fn send_all(from: &str, to: &str, args: &[&str]) -> [serde_json::Value; 2] {
    let dir = Dir::new();
    let [(from, from_options), (to, to_options)] =
        [from, to].map(|kind| kind.split_once(',').unwrap_or((kind, "")));
    let at = |name: &str, options: &str| {
        if options.is_empty() { name.into() } else { format!("{name},{options}") }
    };
    let port = |name: &str, kind: &str| format!("{name}={kind}:{}", dir.text(name));
    let ports = [port("a", from), port("b", to)];
    let switch = Switch::start(&dir, args, &ports);
    let sink = guest(&dir, &at("b", to_options), to, &["--mode", "sink"]);
    switch.wait_up("b", true);
    let send = ["--rate", "2k", "--frames", "800", "--size", "imix"];
    let sent = guest(&dir, &at("a", from_options), from, &send).report();
    let frames = sent["sent_frames"].as_u64().unwrap();
    let words = format!("{from} to {to} {args:?}");
    wait_for(&words, || switch.counter("b", "egress", "frames") == frames);
    std::thread::sleep(Duration::from_millis(50));
    let got = sink.end();
    assert_eq!(frames, 800, "{sent}");
    assert_eq!(got["received_frames"], frames, "{words}");
    assert_eq!(got["received_bytes"], sent["sent_bytes"], "{words}");
    assert_eq!((&got["lost_frames"], &got["late_frames"]), (&0.into(), &0.into()), "{words}");
    [sent, got]
}

#[test]
fn every_frame_arrives_in_order_between_vifs_and_virtio_guests() {
    let kinds = ["xen-local", "vhost-user"];
    for (from, to) in [(0, 0), (0, 1), (1, 0)] {
        send_all(kinds[from], kinds[to], &[]);
        send_all(kinds[from], kinds[to], &["--poll", "event", "--forward", "cross"]);
    }
    send_all(kinds[0], kinds[0], &["--poll", "spin"]);
    send_all(kinds[0], kinds[0], &["--poll", "timer:1000", "--call", "coalesce:100,32"]);
}

#[test]
fn every_frame_arrives_in_order_with_pages_that_stay_mapped() {
    for (from, to) in
        [("xen-local,static=on", "xen-local,static=on"), ("vhost-user", "xen-local,static=on")]
    {
        for report in send_all(from, to, &[]) {
            let names = report["features"].to_string();
            let xen = !names.contains("VERSION_1");
            assert_eq!(names.contains("static-grants"), xen, "{names}");
            let kept = report["static_grants"].as_u64().unwrap();
            assert!(if xen { kept >= 512 } else { kept == 0 }, "{report}");
            assert_eq!(report["static_grants_refused"], 0);
        }
    }
}

#[test]
fn frames_of_many_slots_are_echoed() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[vif(&dir, "a", ""), vif(&dir, "b", "")]);
    let echo = ["--mode", "echo", "--mac", "02:00:00:00:00:02", "--peer", "02:00:00:00:00:01"];
    let _echo = guest(&dir, "b", "xen-local", &echo);
    switch.wait_up("b", true);
    let args = ["--mode", "rr", "--size", "9000", "--rate", "500", "--duration", "0.5"];
    let report = guest(&dir, "a", "xen-local", &args).report();
    assert!(report["latency_samples"].as_u64().unwrap() > 20, "{report}");
    assert!(report["lost_frames"].as_u64().unwrap() <= 2, "{report}");
}

#[test]
fn states_are_shown() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[vif(&dir, "a", "")]);
    let state = |key: &str| switch.port("show", "a")["xen"][key].as_str().unwrap().to_string();
    assert_eq!(state("state"), "waiting for the toolstack to create vif 1/0");
    let sink = guest(&dir, "a", "xen-local", &["--mode", "sink"]);
    switch.wait_up("a", true);
    assert_eq!((state("state"), state("front")), ("connected".into(), "Connected".into()));
    let show = switch.ctl(&["show"]);
    let show = String::from_utf8_lossy(&show.stdout);
    assert!(
        show.contains("vif 1/0: connected (front Connected, back Connected, 1 queues)"),
        "{show}"
    );
    sink.end();
    switch.wait_up("a", false);
    wait_for("the vif to be removed", || state("state").starts_with("waiting for the toolstack"));
    assert!(switch.log().contains("port a: vif 1/0: connected"), "{}", switch.log());
}

#[test]
fn a_killed_guest_affects_no_other_and_can_reconnect() {
    let dir = Dir::new();
    let ports = [dir.port("a", ""), dir.port("b", ""), vif(&dir, "c", ""), vif(&dir, "d", "")];
    let switch = Switch::start(&dir, &["--workers", "2", "--placement", "per-port"], &ports);
    let others = Bystanders::start(&switch, &dir, "a", "b");
    let _sink = guest(&dir, "d", "xen-local", &["--mode", "sink", "--mac", "02:00:00:00:00:02"]);
    switch.wait_up("d", true);
    for _ in 0..3 {
        let before = switch.counter("c", "ingress", "frames");
        let mut sender = guest(&dir, "c", "xen-local", &["--rate", "20k"]);
        switch.wait_up("c", true);
        wait_for("traffic", || switch.counter("c", "ingress", "frames") > before + 100);
        sender.0.kill();
        switch.wait_up("c", false);
        others.wait_for_replies(&switch);
    }
    others.end();
    assert_eq!(switch.port("show", "c")["faults"], 0);
    assert!(switch.is_up("d"));
}

#[test]
fn vifs_are_added_and_removed_under_traffic() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ""), dir.port("b", "")]);
    let others = Bystanders::start(&switch, &dir, "a", "b");
    let spec = vif(&dir, "c", ",queues=2");
    for _ in 0..3 {
        assert!(switch.ctl(&["add-port", &spec]).status.success());
        let mut sender = guest(&dir, "c", "xen-local", &["--rate", "5k"]);
        switch.wait_up("c", true);
        wait_for("traffic", || switch.counter("c", "ingress", "frames") > 50);
        assert!(switch.ctl(&["del-port", "c"]).status.success());
        assert_eq!(sender.0.wait().code(), Some(1), "its back end was removed");
        assert!(!dir.path("c").exists(), "sockets and directory are removed with the port");
        others.wait_for_replies(&switch);
    }
    others.end();
}

/// Number of calls to a sink that received many small bursts, and the number of frames.
fn calls(port: &str, options: &str, poll: &str) -> (u64, u64, bool) {
    let dir = Dir::new();
    let ports = [dir.port("a", ""), vif(&dir, "b", port)];
    let switch = Switch::start(&dir, &["--poll", "event"], &ports);
    let args = ["--mode", "sink", "--poll", poll];
    let sink = guest(&dir, &format!("b{options}"), "xen-local", &args);
    switch.wait_up("b", true);
    let takes = switch.port("show", "b")["xen"]["takes"].to_string().contains("smart-poll");
    let send = ["--rate", "20k", "--burst", "1", "--duration", "1.5"];
    let sent = guest(&dir, "a", "vhost-user", &send).report()["sent_frames"].as_u64().unwrap();
    // A receiver without CPU time loses frames.
    wait_for("the frames", || switch.counter("a", "ingress", "frames") >= sent);
    let made = switch.counter("b", "egress", "calls");
    // The timer stops by itself: no more calls are sent, and the next frame causes one.
    std::thread::sleep(Duration::from_millis(400));
    let asleep = switch.counter("b", "egress", "calls");
    guest(&dir, "a", "vhost-user", &["--rate", "100", "--burst", "1", "--duration", "0.05"])
        .report();
    wait_for("a call to a guest that sleeps", || switch.counter("b", "egress", "calls") > asleep);
    sink.end();
    (made, sent, takes)
}

#[test]
fn smart_poll_replaces_events_if_both_sides_support_it() {
    let (events, _, takes) = calls(",smart-poll=on", "", "event");
    assert!(!takes, "the front half did not request it");
    let (polled, sent, takes) = calls(",smart-poll=on", ",smart-poll=on", "timer:1000");
    assert!(takes && sent > 1000);
    assert!(polled * 20 <= events, "{polled} calls, without smart poll {events}, {sent} frames");
    let (_, _, takes) = calls("", ",smart-poll=on", "timer:1000");
    assert!(!takes, "the back half did not offer it");
}

#[test]
fn errors_of_a_connection_name_the_cause() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[vif(&dir, "a", "")]);
    let fails = |args: &[&str]| {
        let out = pvswitch().args(args).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{args:?}");
        String::from_utf8_lossy(&out.stderr).into_owned()
    };
    let control = dir.text("other");
    let run = ["run", "--quiet", "--control", &control, "--port"];
    let second = fails(&[&run[..], &[&vif(&dir, "b", "").replace("/b", "/a")]].concat());
    assert!(second.contains("port 'b'") && second.contains("another"), "{second}");
    if !std::path::Path::new("/dev/xen").exists() {
        let real = fails(&[&run[..], &["x=xen:1/0"]].concat());
        assert!(real.contains("port 'x'") && real.contains("/dev/xen/gntdev"), "{real}");
        let auto = fails(&[&run[..], &["x=xen:auto"]].concat());
        assert!(auto.contains("/dev/xen/gntdev") && auto.contains("xen-local"), "{auto}");
        let nic = fails(&["gen", "--connect", "xen:0"]);
        assert!(nic.contains("/dev/xen/gntalloc"), "{nic}");
    }
    // A second guest at the same vif.
    let _first = guest(&dir, "a", "xen-local", &["--mode", "sink"]);
    switch.wait_up("a", true);
    let at = format!("xen-local:{}", dir.text("a"));
    let late = fails(&["gen", "--connect", &at, "--mode", "sink", "--duration", "1"]);
    assert!(late.contains("serve another front end"), "{late}");
}

/// `disconnect`, which a toolstack writes to disconnect a cable.
#[test]
fn frames_of_a_guest_whose_link_is_down_are_dropped() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[vif(&dir, "a", ""), vif(&dir, "b", "")]);
    let _sink = guest(&dir, "b", "xen-local", &["--mode", "sink"]);
    switch.wait_up("b", true);
    let _sender = guest(&dir, "a", "xen-local", &["--rate", "5k"]);
    let got = || switch.counter("b", "egress", "frames");
    let dropped = || switch.counter("a", "ingress", "drops_down");
    let state = || switch.port("show", "a")["xen"]["state"].as_str().unwrap().to_string();
    let store = xen_netif::store::Store::connect(&dir.path("a").join("xenstored")).unwrap();
    let set = |value| store.write("/local/domain/1/device/vif/0/disconnect", value).unwrap();
    let carrier = || store.read("/local/domain/0/backend/vif/1/0/carrier").unwrap().unwrap();
    for _ in 0..2 {
        let before = got();
        wait_for("frames", || got() > before + 100);
        set("1");
        wait_for("the link to go down", || state() == "connected, link set down by the toolstack");
        assert_eq!(carrier(), "0");
        let (before, lost) = (got(), dropped());
        wait_for("dropped frames", || dropped() > lost + 500);
        assert_eq!(got(), before);
        let learned = String::from_utf8(switch.ctl(&["fdb"]).stdout).unwrap();
        assert!(!learned.contains("02:00:00:00:00:01"), "{learned}");
        set("0");
        wait_for("the link to come up", || state() == "connected");
        assert_eq!(carrier(), "1");
    }
    assert_eq!(switch.port("show", "a")["faults"], 0);
}

#[test]
fn a_capture_of_a_vif_contains_the_frames_sent_by_its_guest() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[vif(&dir, "a", ""), vif(&dir, "b", "")]);
    let _sink = guest(&dir, "b", "xen-local", &["--mode", "sink"]);
    switch.wait_up("b", true);
    let file = dir.path("a.pcapng");
    let mut command = pvswitch();
    command.args(["capture", "a", "--control", switch.control(), "-w"]).arg(&file);
    let mut capture = Process(command.spawn().unwrap());
    wait_for("the file's header", || std::fs::metadata(&file).is_ok_and(|m| m.len() > 0));
    let send = ["--rate", "2k", "--duration", "0.4"];
    let sent = guest(&dir, "a", "xen-local", &send).report();
    signal(&capture.0, Signal::INT);
    assert_eq!(capture.wait().code(), Some(0));
    let bytes = std::fs::read(&file).unwrap();
    let frames = bytes.windows(12).filter(|w| *w == [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1]).count();
    // The bytes were copied from the pages when the frame passed.
    assert!(frames as u64 >= sent["sent_frames"].as_u64().unwrap() * 9 / 10, "{frames} frames");
}
