//! `pvswitch nic`, and its reports.

mod common;

use std::fs::File;
use std::io::BufRead;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Dir, Gen, Process, Switch, pvswitch, wait_for};
use serde_json::Value;
use xen_netif::store::Store;

/// Starts a NIC in a new network namespace, with output to this file; `None`, and the reason
/// printed, if this machine does not allow it.
fn nic(connect: &str, out: &str, args: &[&str]) -> Option<Process> {
    let mut unshare = vec!["--user", "--map-root-user", "--net"];
    if rustix::process::geteuid().is_root() {
        unshare.drain(..2);
    }
    let tried = Command::new("unshare").args(&unshare).arg("true").output();
    if !tried.as_ref().is_ok_and(|out| out.status.success()) {
        println!("skipped: unshare {unshare:?}: {tried:?}");
        return None;
    }
    let mut command = Command::new("unshare");
    command.args(&unshare).arg(env!("CARGO_BIN_EXE_pvswitch")).args(["nic", "--tap", "pvs0"]);
    command.args(["--connect", connect]).args(args).stdin(Stdio::null());
    let child = command.stdout(File::create(out).unwrap()).spawn().unwrap();
    Some(Process(child))
}

fn lines(out: &str) -> Vec<Value> {
    let file = std::io::BufReader::new(File::open(out).unwrap());
    let lines = file.lines().map(|line| serde_json::from_str(&line.unwrap()));
    lines.filter_map(Result::ok).collect()
}

#[test]
fn counters_are_printed_each_interval_and_at_the_end() {
    for kind in ["vhost-user", "xen-local"] {
        let dir = Dir::new();
        let at = |name: &str| format!("{kind}:{}", dir.text(name));
        let ports = [format!("a={}", at("a")), format!("b={}", at("b"))];
        let switch = Switch::start(&dir, &[], &ports);
        let out = dir.text("out");
        let args = ["--json", "--interval", "0.1", "--poll", "event"];
        let Some(mut nic) = nic(&at("b"), &out, &args) else { return };
        switch.wait_up("b", true);
        let send = ["--rate", "2k", "--duration", "0.3"];
        let sent = Gen::connect(&at("a"), &send).report()["sent_frames"].as_u64().unwrap();
        let received = |line: &Value| line["received_frames"].as_u64().unwrap();
        wait_for("a line with all frames", || lines(&out).iter().any(|l| received(l) >= sent));
        assert!(nic.end().success());
        let lines = lines(&out);
        assert!(lines.len() >= 3, "{kind}: {lines:?}");
        assert!(lines.is_sorted_by_key(received), "{lines:?}");
        let last = lines.last().unwrap();
        assert_eq!(last["tap"], "pvs0");
        assert!(last["calls_rx"].as_u64().unwrap() > 0, "{last}");
        assert!(last["sleeps"].as_u64().unwrap() > 0, "{last}");
        assert!(last["cpu_s"].as_f64().unwrap() > 0.0, "{last}");
        let features = last["features"].as_array().unwrap();
        assert!(!features.is_empty(), "{last}");
    }
}

#[test]
fn nic_keeps_its_settings_when_its_switch_restarts() {
    let dir = Dir::new();
    let at = format!("vhost-user:{}", dir.text("b"));
    let port = [format!("b={at},queues=2")];
    let mut switch = Switch::start(&dir, &[], &port);
    let (out, control) = (dir.text("out"), dir.text("guest"));
    let args = ["--json", "--queues", "2", "--control", &control];
    let Some(mut nic) = nic(&at, &out, &args) else { return };
    let ctl = |args: &[&str]| {
        let out = pvswitch().args(["ctl", "--json", "--control", &control]).args(args).output();
        serde_json::from_slice::<Value>(&out.unwrap().stdout).unwrap_or_default()
    };
    let connected = |is: bool| wait_for("its switch", || ctl(&["stats"])["connected"] == is);
    let policies = || {
        let stats = ctl(&["stats"]);
        assert_eq!(stats["guest"], "nic", "{stats}");
        [0, 1].map(|i| ["poll", "kick"].map(|key| stats["queues"][i][key].clone()))
    };
    connected(true);
    assert_eq!(policies(), [["adaptive", "event"]; 2]);
    assert_eq!(ctl(&["set", "poll=event", "kick=timer:2000"])["ok"], true);
    assert_eq!(ctl(&["set", "1", "poll=coalesce:50,8"])["ok"], true);
    let want = [["event", "timer:2000"], ["coalesce:50,8", "timer:2000"]];
    assert_eq!(policies(), want);
    switch.process.kill();
    connected(false);
    assert_eq!(ctl(&["set", "0", "kick=event"])["ok"], true);
    let _switch = Switch::start(&dir, &[], &port);
    connected(true);
    assert_eq!(policies(), [["event", "event"], want[1]]);
    assert!(nic.end().success());
    assert!(!dir.path("guest").exists(), "its socket is removed");
}

/// Runs a command in the NIC's namespace. Returns its output.
fn within(nic: &Process, script: &str) -> String {
    let mut command = Command::new("nsenter");
    command.args(["-t", &nic.0.id().to_string(), "-n"]);
    if !rustix::process::geteuid().is_root() {
        command.args(["-U", "--preserve-credentials"]);
    }
    let out = command.args(["bash", "-c", script]).output().unwrap();
    assert!(out.status.success(), "{command:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into()
}

#[test]
fn interface_has_the_carrier_of_its_vif() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[format!("a=xen-local:{}", dir.text("a"))]);
    let out = dir.text("out");
    let args = ["--poll", "event"];
    let Some(mut nic) = nic(&format!("xen-local:{}", dir.text("a")), &out, &args) else { return };
    switch.wait_up("a", true);
    let carrier = || !within(&nic, "ip link show pvs0").contains("NO-CARRIER");
    assert!(carrier());
    let store = Store::connect(&dir.path("a").join("xenstored")).unwrap();
    for (cut, there) in [("1", false), ("0", true), ("1", false), ("0", true)] {
        // As XAPI's toolstack disconnects a cable.
        store.write("/local/domain/1/device/vif/0/disconnect", cut).unwrap();
        wait_for(&format!("disconnect {cut}"), || carrier() == there);
    }
    assert!(nic.end().success());
}

/// Sends `datagrams` from the NIC's namespace, each of a separate flow.
fn send_from(nic: &Process, datagrams: u32) {
    let script = format!(
        "ip addr add 10.9.0.1/24 dev pvs0 && \
         ip neigh add 10.9.0.2 lladdr 02:00:00:00:00:09 dev pvs0 && \
         for port in $(seq {datagrams}); do echo > /dev/udp/10.9.0.2/$port; done"
    );
    within(nic, &script);
}

#[test]
fn only_listed_multicast_groups_reach_the_interface() {
    let dir = Dir::new();
    let at = |name: &str| format!("xen-local:{}", dir.text(name));
    let ports = ["a", "b"].map(|name| format!("{name}={}", at(name)));
    let mut switch = Switch::start(&dir, &[], &ports);
    let (ours, out) = (dir.text("ours"), dir.text("out"));
    let listed = format!("{},multicast=01:00:5e:00:00:fb+33:33:00:00:00:01", at("b"));
    let args = ["--json", "--poll", "event"];
    let Some(sender) = nic(&at("a"), &ours, &args) else { return };
    let Some(mut receiver) = nic(&listed, &out, &args) else { return };
    switch.wait_up("a", true);
    // Neighbour discovery is multicast, too.
    let quiet = "echo 1 > /proc/sys/net/ipv6/conf/pvs0/disable_ipv6";
    within(&sender, &format!("{quiet}; ip addr add 10.9.0.1/24 dev pvs0"));
    within(&sender, "ip route add 224.0.0.0/4 dev pvs0");
    let send = |to: &str| {
        within(&sender, &format!("for i in $(seq 20); do echo > /dev/udp/{to}/9; done"));
    };
    // In the second round, a new back end has no list yet.
    for round in 0..2 {
        ["a", "b"].iter().for_each(|name| switch.wait_up(name, true));
        let counter = |name| switch.counter("b", "egress", name);
        // The list is applied a moment after the port is up.
        wait_for("the listed group", || {
            let before = counter("frames");
            send("224.0.0.251");
            std::thread::sleep(Duration::from_millis(20));
            counter("frames") >= before + 20
        });
        let [passed, dropped] = ["frames", "drops_filtered"].map(counter);
        send("224.0.0.251");
        wait_for("all frames of the group", || counter("frames") >= passed + 20);
        // The kernel may send a frame of another group meanwhile.
        assert!(counter("drops_filtered") < dropped + 20, "round {round}");
        let passed = counter("frames");
        send("224.0.0.99");
        wait_for("all frames of the other group", || counter("drops_filtered") >= dropped + 20);
        // The kernel repeats the ARP request of the round before, each second.
        assert!(counter("frames") < passed + 20, "round {round}");
        // Broadcast: an ARP request.
        send(&format!("10.9.0.{}", 77 + round));
        wait_for("a broadcast", || counter("frames") > passed);
        if round == 0 {
            switch.process.kill();
            switch = Switch::start(&dir, &[], &ports);
        }
    }
    assert!(receiver.end().success());
    let lines = lines(&out);
    let says = |line: &Value| line["features"].to_string().contains("\"multicast\"");
    assert!(lines.len() == 2 && lines.iter().all(says), "{lines:?}");
}

#[test]
fn each_queue_of_the_interface_has_a_queue_pair() {
    for kind in ["vhost-user", "xen-local"] {
        let dir = Dir::new();
        let at = |name: &str| format!("{kind}:{}", dir.text(name));
        let ports = ["a", "b"].map(|name| format!("{name}={},queues=2", at(name)));
        let switch = Switch::start(&dir, &[], &ports);
        let out = dir.text("out");
        let args = ["--json", "--queues", "2", "--poll", "event"];
        let Some(mut nic) = nic(&at("b"), &out, &args) else { return };
        switch.wait_up("b", true);
        let frames = |way: &str| {
            let queues = switch.port("stats", "b")[way].as_array().unwrap().clone();
            [0, 1].map(|i| queues[i]["frames"].as_u64().unwrap())
        };
        let send = ["--queues", "2", "--flows", "32", "--rate", "2k", "--duration", "0.3"];
        let sent = Gen::connect(&at("a"), &send).report()["sent_frames"].as_u64().unwrap();
        wait_for("all frames", || frames("egress").iter().sum::<u64>() >= sent);
        send_from(&nic, 200);
        wait_for("all datagrams", || frames("ingress").iter().sum::<u64>() >= 200);
        let (ingress, egress) = (frames("ingress"), frames("egress"));
        assert!(ingress.iter().chain(&egress).all(|n| *n > 20), "{kind}: {ingress:?} {egress:?}");
        assert!(nic.end().success());
        let lines = lines(&out);
        let last = lines.last().unwrap();
        for (key, least) in [("received_frames", egress), ("sent_frames", ingress)] {
            let queues = [0, 1].map(|i| last["queues"][i][key].as_u64().unwrap());
            // The kernel may have sent more in the meantime.
            assert!(queues.iter().zip(least).all(|(n, least)| *n >= least), "{kind}: {last}");
            assert_eq!(last[key], queues.iter().sum::<u64>(), "{kind}: {last}");
        }
    }
}
