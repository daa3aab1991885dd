//! The wall clock jumps while the switch forwards: only dates change
//! ([Faults](../../../docs/reliability.md#faults)).

mod common;

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use common::{
    Dir, Gen, Process, Switch, lost, pvswitch, sender_and_sink, signal, wait_for,
    wait_until_settled,
};
use rustix::process::Signal;

const DAY_S: i64 = 86_400;
/// A time that no timer of the switch waits for.
const YEARS_S: i64 = 30 * 365 * DAY_S;
/// Most that dates may differ by from those expected, in seconds.
const NEAR_S: i64 = 3600;
const LIMITED: &str = "02:00:00:00:00:03";
const RATE: u64 = 500;
const BURST: u64 = 100;

/// A switch whose wall clock jumps (`jumping_clock.c`).
struct Clock {
    library: PathBuf,
    file: PathBuf,
}

impl Clock {
    /// Builds it in `dir`; `None`, and says so: there is no C compiler.
    fn build(dir: &Dir) -> Option<Self> {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/jumping_clock.c");
        let clock = Self { library: dir.path("clock.so"), file: dir.path("clock") };
        clock.set(0);
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"]);
        match cc.arg(&clock.library).arg(source).output() {
            Err(_) => {
                println!("skipped: no C compiler");
                None
            }
            Ok(done) => {
                let error = String::from_utf8_lossy(&done.stderr).into_owned();
                assert!(done.status.success(), "{error}");
                Some(clock)
            }
        }
    }

    /// Sets by how many seconds the clock is off.
    fn set(&self, ahead_s: i64) {
        let mut file = std::fs::File::options();
        let file = file.write(true).create(true).truncate(false).open(&self.file).unwrap();
        file.write_all_at(&ahead_s.to_ne_bytes(), 0).unwrap();
    }
}

fn now_s() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64
}

/// Seconds since 1970 of a log line's date: `2026-01-31T12:00:00.000000Z`.
fn date_s(line: &str) -> i64 {
    let of = |from: usize, to: usize| line[from..to].parse::<i64>().unwrap();
    let (year, month, day) = (of(0, 4), of(5, 7), of(8, 10));
    // Years begin in March: a leap day is the last day of one.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    let time = of(11, 13) * 3600 + of(14, 16) * 60 + of(17, 19);
    (days - 719_468) * DAY_S + time
}

/// Time of the first frame of a capture of `port`, in seconds since 1970.
fn captured_s(switch: &Switch, dir: &Dir, port: &str) -> i64 {
    let to = dir.text("x.pcap");
    let mut capture = pvswitch();
    capture.args(["capture", port, "--control", switch.control(), "-w", &to]);
    let mut capture = Process(capture.stderr(Stdio::null()).spawn().unwrap());
    let mut at_ns = None;
    wait_for("a frame", || {
        at_ns = first_frame_ns(&std::fs::read(&to).unwrap_or_default());
        at_ns.is_some()
    });
    signal(&capture.0, Signal::INT);
    assert!(capture.wait().success());
    std::fs::remove_file(&to).unwrap();
    (at_ns.unwrap() / 1_000_000_000) as i64
}

/// Time of the first Enhanced Packet Block (6) of a pcapng file, if there is one.
fn first_frame_ns(mut blocks: &[u8]) -> Option<u64> {
    let word =
        |bytes: &[u8], at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    while word(blocks, 0)? != 6 {
        blocks = blocks.get(word(blocks, 4)? as usize..)?;
    }
    Some(u64::from(word(blocks, 12)?) << 32 | u64::from(word(blocks, 16)?))
}

/// Age of an address in the FDB, in seconds.
fn age_s(switch: &Switch, mac: &str) -> Option<u64> {
    let fdb = switch.json(&["fdb"]);
    let mut entries = fdb["entries"].as_array().unwrap().iter();
    entries.find(|entry| entry["mac"] == mac)?["age_s"].as_u64()
}

/// Frames taken and copies made, less those delivered and dropped, of all ports.
fn unaccounted(switch: &Switch) -> i64 {
    let stats = switch.json(&["stats"]);
    let sum = |way: &str, counts: &dyn Fn(&str) -> bool| -> i64 {
        let ports = stats["ports"].as_array().unwrap().iter();
        let counters = ports.flat_map(|port| port[way][0].as_object().unwrap());
        let counters = counters.filter(|(name, _)| counts(name));
        counters.map(|(_, n)| n.as_i64().unwrap()).sum()
    };
    // What a sender loses at a full receiver is counted at both.
    let is_drop = |name: &str| name.starts_with("drops_") && name != "drops_no_room";
    let is_loss = |name: &str| name.starts_with("drops_") || name.starts_with("lost_");
    sum("ingress", &|name| ["frames", "copies"].contains(&name))
        - sum("egress", &|name| name == "frames" || is_loss(name))
        - sum("ingress", &is_drop)
}

#[test]
fn jumps_of_the_wall_clock_change_dates_only() {
    let dir = Dir::new();
    let Some(clock) = Clock::build(&dir) else { return };
    let began = Instant::now();
    let mut command = pvswitch();
    command.args(["run", "--quiet", "--control", &dir.text("ctl")]);
    command.args(["--port", &dir.port("a", ",poll=timer:1000")]);
    command.args(["--port", &dir.port("b", ",call=coalesce:500,32")]);
    let rate = format!(",rate-in={RATE}frames,burst-in={BURST}frames");
    command.args(["--port", &dir.port("c", &rate), "--port", &dir.port("d", "")]);
    command.env("LD_PRELOAD", &clock.library).env("JUMPING_CLOCK", &clock.file);
    command.stdout(Stdio::null());
    let switch = Switch::spawn(&dir, command);
    let (sender, sink) = sender_and_sink(&switch, &dir, &[]);
    // Sends nothing but the announcement of its address.
    let idle = ["--mode", "sink", "--mac", LIMITED];
    let idle = Gen::start(&dir.path("d"), &idle);
    switch.wait_up("d", true);
    let limited = ["--mac", "02:00:00:00:00:04", "--peer", LIMITED, "--size", "60"];
    let limited = Gen::start(&dir.path("c"), &limited);
    switch.wait_for_frames("c", 2 * BURST);
    wait_until_settled(&switch);
    let empty = || switch.counter("a", "ingress", "polls_empty");
    let frames = || switch.counter("c", "ingress", "frames");
    let (first, since) = ((empty(), frames()), Instant::now());
    for (n, ahead_s) in
        [YEARS_S, 0, -YEARS_S, -NEAR_S * 30, YEARS_S, -YEARS_S, 0].iter().enumerate()
    {
        clock.set(*ahead_s);
        switch.wait_for_frames("a", 200);
        switch.wait_for_frames("c", 20);
        // Dates are those of the clock.
        let (name, expected) = (format!("n{n}"), now_s() + ahead_s);
        switch.json(&["add-port", &format!("{name}=null:")]);
        switch.json(&["del-port", &name]);
        let log = switch.log();
        let line = log.lines().rfind(|line| line.contains(&name)).unwrap_or_default();
        for date in [date_s(line), captured_s(&switch, &dir, "a")] {
            assert!((date - expected).abs() < NEAR_S, "{date}, not {expected}: {line}");
        }
        // Times are not.
        let up = switch.json(&["show"])["uptime_s"].as_u64().unwrap();
        assert!(up <= began.elapsed().as_secs(), "{up} s");
        let age = age_s(&switch, LIMITED).expect("an address does not age by a jump");
        assert!(age <= began.elapsed().as_secs() + 1, "{age} s");
    }
    // One poll without a frame in each millisecond at most, and no frame beyond the rate.
    let (polls, passed) = (empty() - first.0, frames() - first.1);
    let took = since.elapsed();
    assert!(u128::from(polls) <= took.as_millis() + 100, "{polls} polls in {took:?}");
    let most = (took + Duration::from_secs(1)).as_secs() * RATE + BURST + 64;
    assert!(passed <= most, "{passed} frames in {took:?}");

    let sent = sender.end()["sent_frames"].as_u64().unwrap();
    limited.end();
    let lost = || lost(&switch, "b");
    wait_for("all frames", || switch.counter("b", "egress", "frames") + lost() >= sent);
    wait_for("no frame to be held", || unaccounted(&switch) == 0);
    let got = sink.end();
    let is = |what: &str| got[what].as_u64().unwrap();
    assert_eq!((is("lost_frames"), is("corrupt_frames")), (lost(), 0), "{got}");
    idle.end();
    assert_eq!(unaccounted(&switch), 0);
    switch.check_connected_once(&["a", "b", "c", "d"]);
    let log = switch.log();
    assert!(!log.contains("ERROR") && !log.contains("WARN"), "{log}");
}
