//! Traffic of the study: TCP and pings between a guest with a kernel and the host, and frames
//! between two generators.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::setting::{Setting, Timed};
use crate::error::Fail;
use crate::stage::{
    Count, Gen, Link, Nic, NicOptions, Ping, Port, Stage, Switch, SwitchOptions, Window, Wire,
    sleep,
};
use crate::studies::bulk::{Bulk, disable_offloads};
use crate::study::Figures;

/// 1 GB, in bits.
const GB_BITS: f64 = 8e9;
/// Pings of the original study.
const PINGS: f64 = 1e6;
/// Pings of the warm-up, whose rate sets the number of pings that fill a window.
const PINGS_FIRST: u32 = 200;
/// Offloads to turn off: senders segment, receivers do not merge segments.
const WITHOUT: &str = "tso gso gro";
/// Bytes of a write, as in the original study.
const WRITE: u32 = 65_536;
/// Longest frame with an MTU of 1500, in bytes.
const FRAME_MAX: f64 = 1514.0;
/// Traffic before and after a window, in seconds.
const MARGIN_S: f64 = 0.3;

fn nic(timed: &Timed) -> NicOptions {
    let set = if timed.suppresses { Vec::new() } else { vec!["suppress=none".into()] };
    NicOptions { set, without: WITHOUT.into(), ..NicOptions::new("event") }
}

fn switch(stage: &Stage, timed: &Timed) -> SwitchOptions {
    SwitchOptions { call: timed.call(), ..SwitchOptions::new(stage, "event") }
}

fn outside(timed: &Timed) -> String {
    format!(",poll={}", timed.timeout.outside)
}

/// Returns the figures that TCP and pings have in common.
fn common(count: &Count) -> Figures {
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

/// Fails if frames exceed the MTU: with segmentation offload, counts of frames mean little.
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

/// Measures TCP between the host and a guest.
pub fn tcp(stage: &Stage, seconds: f64, name: &str, from_guests: bool) -> Result<Figures, Fail> {
    let timed = Timed::of(name)?;
    let bulk = Bulk {
        proto: stage.proto,
        guests: 1,
        port: "",
        outside: &outside(&timed),
        nic: nic(&timed),
        switch: switch(stage, &timed),
        link: Link::Tap,
        from_guests,
        udp: false,
        len: WRITE,
        bits_per_s: 0.0,
        streams: 1,
        ping: false,
    };
    let done = bulk.run(stage, seconds)?;
    check_lengths(&done.count)?;
    let mut figures = common(&done.count);
    figures.insert("seconds_1_gb", GB_BITS / done.arrived_bits_per_s);
    figures.insert("retransmits", done.count.per_second(done.retransmits));
    Ok(figures)
}

/// Measures pings from the host, each sent after the reply to the previous one.
pub fn pings(stage: &Stage, seconds: f64, name: &str) -> Result<Figures, Fail> {
    let timed = Timed::of(name)?;
    let wire = Wire::new(stage, Link::Tap)?;
    let port = Port::guest(stage, "g0", stage.proto, "");
    let ports = [wire.port(&outside(&timed)), port.clone()];
    let switch = Switch::start(stage, &switch(stage, &timed), &ports)?;
    wire.up()?;
    let guest = Nic::start(stage, 0, &port, &nic(&timed))?;
    switch.wait_up(ports.len())?;
    Ping::until_answered(&wire.netns, &guest.address)?;
    disable_offloads(&wire, std::slice::from_ref(&guest), WITHOUT)?;
    let all_cpus = stage.all_cpus();
    let flood =
        |count| Ping::flood(stage, &wire.netns.on(&all_cpus), &guest.address, count)?.report();
    let first = flood(PINGS_FIRST)?;
    let each = first.seconds.max(1e-3) / f64::from(PINGS_FIRST);
    let window = Window::open(&switch, &[&wire.netns, &guest.netns])?;
    let pings = flood((seconds / each).clamp(10.0, PINGS) as u32)?;
    let count = window.close()?;
    guest.check()?;
    let mut figures = common(&count);
    let answered = pings.received as f64;
    figures.insert("seconds_1m_pings", PINGS * pings.seconds / answered);
    figures.insert("lost", 100.0 * (1.0 - answered / pings.sent as f64));
    figures.insert("round_trip", pings.mean_us);
    Ok(figures)
}

/// Measures frames of 60 bytes between generators, at `rate` per second or unlimited.
pub fn frames(stage: &Stage, seconds: f64, name: &str, rate: Option<u32>) -> Result<Figures, Fail> {
    let setting = Setting::of(name)?;
    setting.check(stage.proto)?;
    let ports = ["p0", "p1"].map(|name| Port::guest(stage, name, stage.proto, ""));
    let switch = Switch::start(stage, &setting.of_switch(stage), &ports)?;
    switch.add_static_mac(&Gen::mac(1), "p1")?;
    let options = setting.of_drivers();
    let sink = Gen::start(stage, 1, &ports[1], &options, "sink")?;
    if stage.guest_cpus.len() < 2 {
        set_real_time(sink.id());
    }
    switch.wait_up(1)?;
    let rate = rate.map_or_else(String::new, |rate| format!(" --rate {rate}"));
    let long = seconds + 2.0 * MARGIN_S;
    let mode = format!("send --peer {} --duration {long}{rate}", Gen::mac(1));
    let sender = Gen::start(stage, 0, &ports[0], &options, &mode)?;
    switch.wait_up(2)?;
    sleep(MARGIN_S);
    let window = Window::open(&switch, &[])?;
    sleep(seconds);
    let count = window.close()?;
    let sent = sender.report(long + 20.0)?;
    // Wait until delayed calls have delivered the last frames.
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

/// Gives a process real-time priority, if permitted: on a CPU that both guests share, the receiver
/// must preempt the sender, or the scheduler's time slices are measured.
fn set_real_time(pid: u32) {
    let args = ["--rr", "--all-tasks", "--pid", "1", &pid.to_string()].map(String::from);
    let _ = Command::new("chrt").args(args).stdout(Stdio::null()).stderr(Stdio::null()).status();
}
