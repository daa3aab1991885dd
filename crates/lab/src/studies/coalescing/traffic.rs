//! What is measured: bulk and pings between a kernel's guest and the host, and frames between two
//! generators.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::setting::{Setting, Timeout};
use crate::error::Fail;
use crate::stage::{
    Count, Gen, Link, Nic, NicOptions, Ping, Port, Stage, Switch, SwitchOptions, Window, Wire,
    sleep,
};
use crate::studies::bulk::{Bulk, go_without};
use crate::study::Figures;

/// 1 GB, in bits.
const GB_BITS: f64 = 8e9;
/// As many as the seed sent.
const PINGS: f64 = 1e6;
/// Pings that tell how many fill a window; they warm up, too.
const PINGS_FIRST: u32 = 200;
/// Segments are cut by whoever sends them, and not put together again.
const WITHOUT: &str = "tso gso gro";
/// Bytes of a write, as the original study's.
const WRITE: u32 = 65_536;
/// Longest frame that an MTU of 1500 lets pass.
const FRAME_MAX: f64 = 1514.0;
/// Frames before a window, and after it, in seconds.
const AROUND_S: f64 = 0.3;

fn nic() -> NicOptions {
    NicOptions { without: WITHOUT.into(), ..NicOptions::new("event") }
}

fn switch(stage: &Stage, timeout: &Timeout) -> SwitchOptions {
    SwitchOptions { call: timeout.call.into(), ..SwitchOptions::new(stage, "event") }
}

fn outside(timeout: &Timeout) -> String {
    format!(",poll={}", timeout.outside)
}

/// What both kinds of traffic with a guest of a kernel have in common.
fn counted(count: &Count) -> Figures {
    let frames = count.egress("g", "frames");
    let both = frames + count.ingress("g", "frames");
    BTreeMap::from([
        ("frames_per_call", frames / count.egress("g", "calls")),
        ("frames", count.per_second(frames)),
        ("guests_cpu", count.percent(count.roles_ns.iter().skip(1).sum())),
        ("switch_cpu", count.percent(count.switch_ns)),
        ("kicks_per_1000", 1e3 * count.kicks("g") / both),
        ("calls_per_1000", 1e3 * count.calls("g") / both),
    ])
}

/// An error if segments were left for others to cut: frames would say little then.
fn check_lengths(count: &Count) -> Result<(), Fail> {
    let mean = |bytes: f64, frames: f64| if frames > 0.0 { bytes / frames } else { 0.0 };
    let sent = mean(count.ingress("g", "bytes"), count.ingress("g", "frames"));
    let got = mean(count.egress("g", "bytes"), count.egress("g", "frames"));
    if sent.max(got) > FRAME_MAX {
        let what = format!("frames of {:.0} bytes with an MTU of 1500", sent.max(got));
        return Err(Fail::Cell(format!("{what}: segmentation offload is not off")));
    }
    Ok(())
}

/// TCP between the host and a guest, as much as passes.
pub fn tcp(stage: &Stage, seconds: f64, name: &str, from_guests: bool) -> Result<Figures, Fail> {
    let timeout = Timeout::of(name)?;
    let bulk = Bulk {
        proto: stage.proto,
        guests: 1,
        port: "",
        outside: &outside(timeout),
        nic: nic(),
        switch: switch(stage, timeout),
        link: Link::Free,
        from_guests,
        udp: false,
        len: WRITE,
        bits_per_s: 0.0,
        streams: 1,
        ping: false,
    };
    let done = bulk.run(stage, seconds)?;
    check_lengths(&done.count)?;
    let mut figures = counted(&done.count);
    figures.insert("seconds_1_gb", GB_BITS / done.arrived_bits_per_s);
    figures.insert("retransmits", done.count.per_second(done.retransmits));
    Ok(figures)
}

/// Pings of the host, the next one when the last is answered.
pub fn pings(stage: &Stage, seconds: f64, name: &str) -> Result<Figures, Fail> {
    let timeout = Timeout::of(name)?;
    let wire = Wire::new(stage, Link::Free)?;
    let port = Port::guest(stage, "g0", stage.proto, "");
    let ports = [wire.port(&outside(timeout)), port.clone()];
    let switch = Switch::start(stage, &switch(stage, timeout), &ports)?;
    wire.up()?;
    let guest = Nic::start(stage, 0, &port, &nic())?;
    switch.wait_up(ports.len())?;
    Ping::until_answered(&wire.netns, &guest.address)?;
    go_without(&wire, std::slice::from_ref(&guest), WITHOUT)?;
    let all_cpus = stage.all_cpus();
    let flood =
        |count| Ping::flood(stage, &wire.netns.on(&all_cpus), &guest.address, count)?.report();
    let first = flood(PINGS_FIRST)?;
    let each = first.seconds.max(1e-3) / f64::from(PINGS_FIRST);
    let window = Window::open(&switch, &[&wire.netns, &guest.netns])?;
    let pings = flood((seconds / each).clamp(10.0, PINGS) as u32)?;
    let count = window.close()?;
    guest.check()?;
    let mut figures = counted(&count);
    let answered = pings.received as f64;
    figures.insert("seconds_1m_pings", PINGS * pings.seconds / answered);
    figures.insert("lost", 100.0 * (1.0 - answered / pings.sent as f64));
    figures.insert("round_trip", pings.mean_us);
    Ok(figures)
}

/// Frames of 60 bytes from one generator to another, as many as pass or at a rate.
pub fn frames(stage: &Stage, seconds: f64, name: &str, rate: Option<u32>) -> Result<Figures, Fail> {
    let setting = Setting::of(name)?;
    setting.check(stage.proto)?;
    let ports = ["p0", "p1"].map(|name| Port::guest(stage, name, stage.proto, ""));
    let switch = Switch::start(stage, &setting.of_switch(stage), &ports)?;
    switch.address(&Gen::mac(1), "p1")?;
    let options = setting.of_drivers();
    let sink = Gen::start(stage, 1, &ports[1], &options, "sink")?;
    if stage.guest_cpus.len() < 2 {
        goes_first(sink.id());
    }
    switch.wait_up(1)?;
    let rate = rate.map_or_else(String::new, |rate| format!(" --rate {rate}"));
    let long = seconds + 2.0 * AROUND_S;
    let mode = format!("send --peer {} --duration {long}{rate}", Gen::mac(1));
    let sender = Gen::start(stage, 0, &ports[0], &options, &mode)?;
    switch.wait_up(2)?;
    sleep(AROUND_S);
    let window = Window::open(&switch, &[])?;
    sleep(seconds);
    let count = window.close()?;
    let sent = sender.report(long + 20.0)?;
    // The last frames, which a policy of calls may still be holding back.
    let mut before = Value::Null;
    for _ in 0..50 {
        let now = switch.snapshot(&[])?.stats["ports"][1]["egress"][0]["frames"].clone();
        if now == before {
            break;
        }
        before = now;
        sleep(0.05);
    }
    let got = sink.end()?;
    Ok(of_generators(&count, &sent, &got))
}

fn of_generators(count: &Count, sent: &Value, got: &Value) -> Figures {
    let n = |report: &Value, key: &str| report[key].as_f64().unwrap_or(0.0);
    let both = |key: &str| n(sent, key) + n(got, key);
    let frames = n(got, "received_frames");
    BTreeMap::from([
        ("frames", frames / n(sent, "duration_s")),
        ("frames_per_call", frames / n(got, "calls_rx")),
        ("guest_ns", 1e9 * both("cpu_s") / frames),
        ("switch_ns", count.switch_ns as f64 / count.egress("p1", "frames")),
        ("kicks_per_1000", 1e3 * both("kicks") / frames),
        ("calls_per_1000", 1e3 * (both("calls_rx") + both("calls_tx")) / frames),
        ("tx_calls_per_1000", 1e3 * n(sent, "calls_tx") / frames),
        ("rx_kicks_per_1000", 1e3 * n(got, "kicks_rx") / frames),
        ("latency_p50", n(got, "latency_ns_p50") / 1e3),
        ("latency_p99", n(got, "latency_ns_p99") / 1e3),
        ("lost", 100.0 * (1.0 - frames / n(sent, "sent_frames"))),
    ])
}

/// On a CPU that both guests share, who receives must not wait for who sends, or it is their turns
/// that are measured. Without the right to do so all is as it was.
fn goes_first(pid: u32) {
    let args = ["--rr", "--all-tasks", "--pid", "1", &pid.to_string()].map(String::from);
    let _ = Command::new("chrt").args(args).stdout(Stdio::null()).stderr(Stdio::null()).status();
}
