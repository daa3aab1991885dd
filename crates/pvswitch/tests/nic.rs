//! `pvswitch nic`, and what it tells of its work.

mod common;

use std::fs::File;
use std::io::BufRead;
use std::process::{Command, Stdio};

use common::{Dir, Gen, Process, Switch, wait_for};
use serde_json::Value;

/// A NIC in a network namespace of its own, which prints to this file; none, and the reason
/// printed, where this machine does not let us.
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
fn what_a_nic_counts_is_told_each_interval_and_at_the_end() {
    for kind in ["vhost-user", "xen-local"] {
        let dir = Dir::new();
        let at = |name: &str| format!("{kind}:{}", dir.text(name));
        let ports = [format!("a={}", at("a")), format!("b={}", at("b"))];
        let switch = Switch::start(&dir, &[], &ports);
        let out = dir.text("out");
        let told = ["--json", "--interval", "0.1", "--poll", "event"];
        let Some(mut nic) = nic(&at("b"), &out, &told) else { return };
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
