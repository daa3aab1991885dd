//! The program as a process, for tests.
#![allow(dead_code)]

use std::fs::File;
use std::num::NonZeroU16;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Maximum time to wait for any condition; machines can be busy.
const PATIENCE: Duration = Duration::from_secs(20);

/// A directory for sockets; removed on drop.
pub struct Dir(PathBuf);

impl Dir {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("pvs-{}-{n}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Copies a program to a file of this name. Another process does: a descriptor of this one
    /// may be in a child of another thread, and a file that is open for writing is not executed.
    pub fn install(&self, name: &str, program: impl AsRef<Path>) -> PathBuf {
        let path = self.path(name);
        let mut command = Command::new("install");
        let status = command.arg("-m755").arg(program.as_ref()).arg(&path).status().unwrap();
        assert!(status.success(), "install: {status}");
        path
    }

    /// Makes a script that is executable.
    pub fn script(&self, name: &str, text: &str) -> String {
        let source = self.path(&format!("{name}.text"));
        std::fs::write(&source, text).unwrap();
        self.install(name, source).display().to_string()
    }

    /// `NAME=vhost-user:DIR/NAME`, with these options.
    pub fn port(&self, name: &str, options: &str) -> String {
        format!("{name}=vhost-user:{}{options}", self.text(name))
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn pvswitch() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pvswitch"));
    command.env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Waits for `what` to become true.
pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    loop {
        // The last attempt begins after that time: the machine may have stopped during one.
        let is_last = Instant::now() >= end;
        if done() {
            return;
        }
        assert!(!is_last, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

pub fn signal(child: &Child, signal: Signal) {
    let _ = kill_process(Pid::from_child(child), signal);
}

/// A process, killed on drop.
pub struct Process(pub Child);

impl Process {
    /// Terminates it with a signal, and waits.
    pub fn end(&mut self) -> ExitStatus {
        signal(&self.0, Signal::TERM);
        self.wait()
    }

    pub fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        wait_for("a process to end", || {
            status = self.0.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    pub fn lives(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A running `pvswitch run`.
pub struct Switch {
    pub process: Process,
    /// Whether the process is the keeper of the switch.
    is_kept: bool,
    control: String,
    log: PathBuf,
}

impl Switch {
    /// Starts it with `args` and these ports, and waits until it replies.
    pub fn start(dir: &Dir, args: &[&str], ports: &[String]) -> Self {
        let mut command = pvswitch();
        command.args(["run", "--quiet", "--control", &dir.text("ctl")]).args(args);
        command.args(ports.iter().flat_map(|p| ["--port", p])).stdout(Stdio::null());
        Self::spawn(dir, command)
    }

    /// Starts it by this command, whose control socket is `ctl` in `dir`.
    pub fn spawn(dir: &Dir, mut command: Command) -> Self {
        let (control, log) = (dir.text("ctl"), dir.path("log"));
        let file = File::options().create(true).append(true).open(&log).unwrap();
        let child = command.stderr(file).spawn().unwrap();
        let is_kept = command.get_args().any(|arg| arg == "--keep");
        let mut switch = Self { process: Process(child), is_kept, control, log };
        wait_for("the switch", || {
            assert!(switch.process.lives(), "it ended: {}", switch.log());
            switch.ctl(&["show"]).status.success()
        });
        switch
    }

    pub fn ctl(&self, args: &[&str]) -> Output {
        pvswitch().args(["ctl", "--control", &self.control]).args(args).output().unwrap()
    }

    /// The reply to a request that must succeed.
    pub fn json(&self, args: &[&str]) -> Value {
        let out = self.ctl(&[args, &["--json"]].concat());
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        serde_json::from_slice(&out.stdout).unwrap()
    }

    pub fn control(&self) -> &str {
        &self.control
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap()
    }

    /// A port's entry in `ctl show` or `ctl stats`.
    pub fn port(&self, what: &str, name: &str) -> Value {
        let all = self.json(&[what]);
        let ports = all["ports"].as_array().unwrap();
        ports.iter().find(|p| p["name"] == name).unwrap_or(&Value::Null).clone()
    }

    pub fn is_up(&self, name: &str) -> bool {
        self.port("show", name)["up"] == true
    }

    pub fn wait_up(&self, name: &str, up: bool) {
        wait_for(&format!("port {name} to be up: {up}"), || self.is_up(name) == up);
    }

    /// The process that serves it, which is not `process` after an upgrade or under a keeper.
    pub fn pid(&self) -> u32 {
        u32::try_from(self.json(&["show"])["pid"].as_u64().unwrap()).unwrap()
    }

    /// Waits for `more` frames of a port's sender.
    pub fn wait_for_frames(&self, port: &str, more: u64) {
        let before = self.counter(port, "ingress", "frames");
        wait_for("frames", || self.counter(port, "ingress", "frames") > before + more);
    }

    /// Checks that the guests of these ports connected once, and that nothing failed.
    pub fn check_connected_once(&self, ports: &[&str]) {
        for port in ports {
            let show = self.port("show", port);
            assert_eq!((&show["connections"], &show["faults"]), (&1.into(), &0.into()), "{show}");
        }
    }

    /// Ends it by request, and waits until the sockets of `control` and port `a` are removed.
    pub fn shut_down(&self, dir: &Dir) {
        assert!(self.ctl(&["shutdown"]).status.success());
        let are_there = || dir.path("a").exists() || dir.path("ctl").exists();
        wait_for("the sockets to be removed", || !are_there());
    }

    /// A counter of a port's first queue; `way` is `ingress` or `egress`.
    pub fn counter(&self, name: &str, way: &str, counter: &str) -> u64 {
        self.port("stats", name)[way][0][counter].as_u64().unwrap()
    }
}

impl Drop for Switch {
    /// A keeper that is killed leaves its switch at work: it ends in order.
    fn drop(&mut self) {
        let end = Instant::now() + PATIENCE;
        while self.is_kept && self.process.lives() && Instant::now() < end {
            signal(&self.process.0, Signal::TERM);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A `pvswitch gen` that prints a report at its end.
pub struct Gen(pub Process);

impl Gen {
    pub fn start(socket: &Path, args: &[&str]) -> Self {
        let connect = format!("vhost-user:{}", socket.display());
        Self::connect(&connect, args)
    }

    pub fn connect(connect: &str, args: &[&str]) -> Self {
        let mut command = pvswitch();
        command.args(["gen", "--json", "--connect", connect]).args(args);
        if !args.contains(&"--poll") {
            command.args(["--poll", "event"]);
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(Process(command.spawn().unwrap()))
    }

    /// Waits for its end. Returns the report.
    pub fn report(mut self) -> Value {
        let status = self.0.wait();
        let text = std::io::read_to_string(self.0.0.stdout.take().unwrap()).unwrap();
        let mut error = || std::io::read_to_string(self.0.0.stderr.take().unwrap()).unwrap();
        assert!(status.success(), "gen ended with {status}: {text}{}", error());
        serde_json::from_str(text.lines().last().unwrap()).unwrap()
    }

    /// Terminates it. Returns the report.
    pub fn end(self) -> Value {
        signal(&self.0.0, Signal::TERM);
        self.report()
    }
}

/// Addresses of [`sender_and_sink`].
pub const SENDER: &str = "02:00:00:00:00:01";
pub const RECEIVER: &str = "02:00:00:00:00:02";

/// A guest of port `a` that sends 20,000 frames per second to one of port `b`, both with these
/// options.
pub fn sender_and_sink(switch: &Switch, dir: &Dir, guest: &[&str]) -> (Gen, Gen) {
    // Room for 0.4 s: a receiver that does not run for longer loses frames, as any slow one does.
    let ring = [guest, &["--queue-size", "8192"]].concat();
    let sink_args = [&ring[..], &["--mode", "sink", "--mac", RECEIVER]].concat();
    let sink = Gen::start(&dir.path("b"), &sink_args);
    switch.wait_up("b", true);
    let to = ["--mac", SENDER, "--peer", RECEIVER, "--rate", "20k", "--size", "imix"];
    let sender = Gen::start(&dir.path("a"), &[&ring[..], &to].concat());
    switch.wait_up("a", true);
    (sender, sink)
}

/// A switch of two workers with 98 idle guests, and ports `a` and `b`.
pub fn hundred_ports(dir: &Dir, args: &[&str]) -> (Switch, Gen) {
    let mut ports: Vec<_> = (0..98).map(|n| dir.port(&format!("p{n}"), "")).collect();
    ports.extend([dir.port("a", ""), dir.port("b", "")]);
    let switch = Switch::start(dir, &[args, &["--workers", "2"]].concat(), &ports);
    let idle = ["--mode", "idle", "--count", "98", "--queue-size", "8"];
    let idle = Gen::start(&dir.path("p{}"), &idle);
    wait_for("the idle guests", || {
        let show = switch.json(&["show"]);
        let ports = show["ports"].as_array().unwrap();
        ports.iter().filter(|port| port["up"] == true).count() == 98
    });
    (switch, idle)
}

/// `gen rr` and `gen echo`, to check that a pair keeps its traffic. Addresses end in a1 and a2.
pub struct Bystanders {
    rr: Gen,
    _echo: Gen,
    port: &'static str,
}

impl Bystanders {
    pub fn start(switch: &Switch, dir: &Dir, rr: &'static str, echo: &'static str) -> Self {
        Self::asking(switch, dir, [rr, echo], &["--rate", "2k"])
    }

    /// Sends each request at once after the last reply: their number shows the latency.
    pub fn eager(switch: &Switch, dir: &Dir, rr: &'static str, echo: &'static str) -> Self {
        Self::asking(switch, dir, [rr, echo], &[])
    }

    fn asking(switch: &Switch, dir: &Dir, ports: [&'static str; 2], how: &[&str]) -> Self {
        let [rr, echo] = ports;
        let (one, two) = ("02:00:00:00:00:a1", "02:00:00:00:00:a2");
        let echo_to = ["--mode", "echo", "--mac", two, "--peer", one];
        let echo_gen = Gen::start(&dir.path(echo), &echo_to);
        switch.wait_up(echo, true);
        let args = ["--mode", "rr", "--mac", one, "--peer", two];
        let rr_gen = Gen::start(&dir.path(rr), &[&args, how].concat());
        switch.wait_up(rr, true);
        let pair = Self { rr: rr_gen, _echo: echo_gen, port: rr };
        pair.wait_for_replies(switch);
        pair
    }

    /// Number of replies in this time.
    pub fn replies(&self, switch: &Switch, time: Duration) -> u64 {
        let answers = || switch.counter(self.port, "egress", "frames");
        let before = answers();
        std::thread::sleep(time);
        answers() - before
    }

    /// Waits for twenty more replies.
    pub fn wait_for_replies(&self, switch: &Switch) {
        let before = switch.counter(self.port, "egress", "frames");
        wait_for("replies to bystanders", || {
            switch.counter(self.port, "egress", "frames") >= before + 20
        });
    }

    /// Checks that few were lost: a busy machine may lose one occasionally.
    pub fn end(self) {
        let report = self.rr.end();
        let lost = report["lost_frames"].as_u64().unwrap();
        assert!(lost <= report["sent_frames"].as_u64().unwrap() / 20 + 2, "{report}");
    }
}

/// The process that took over; killed on drop.
pub struct Successor(pub u32);

impl Drop for Successor {
    fn drop(&mut self) {
        if let Some(pid) = i32::try_from(self.0).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Upgrades to this program itself, and waits until the new process replies.
pub fn upgrade(switch: &Switch) -> Successor {
    let before = switch.pid();
    let answer = switch.json(&["upgrade", env!("CARGO_BIN_EXE_pvswitch")]);
    let next = u32::try_from(answer["pid"].as_u64().unwrap()).unwrap();
    let next = Successor(next);
    wait_for("the new process", || switch.ctl(&["show"]).status.success());
    let show = switch.json(&["show"]);
    assert_eq!(show["pid"], next.0, "{show}");
    assert_eq!(show["taken_over"]["from_pid"], before, "{show}");
    next
}

pub fn kill(pid: u32) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
}

/// Waits until a process other than `before` serves the switch, and returns its id.
pub fn wait_for_next(switch: &Switch, before: u32) -> u32 {
    let mut next = before;
    wait_for("the next process", || {
        let out = switch.ctl(&["show", "--json"]);
        let show: Value = serde_json::from_slice(&out.stdout).unwrap_or_default();
        next = show["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).unwrap_or(before);
        next != before
    });
    next
}

/// Kills the switch, and waits for the next process.
pub fn kill_and_wait(switch: &Switch) {
    let before = switch.pid();
    kill(before);
    wait_for_next(switch, before);
    let show = switch.json(&["show"]);
    assert_eq!(show["taken_over"]["from_pid"], before, "{show}");
    assert_eq!(show["taken_over"]["killed"], true, "{show}");
}

/// Frames for the guest of `port` that were dropped because it did not take them in time.
pub fn lost(switch: &Switch, port: &str) -> u64 {
    ["lost_no_room", "lost_aged"].iter().map(|cause| switch.counter(port, "egress", cause)).sum()
}

/// `kill_and_wait` once no frame waits for the guest of `port`; returns how many were lost that
/// the next process does not know of: it has the counters of up to a second before.
pub fn kill_and_count(switch: &Switch, port: &str) -> u64 {
    let mut known = 0;
    wait_for("no frame to wait", || {
        known = lost(switch, port);
        switch.counter(port, "egress", "held") == 0
    });
    kill_and_wait(switch);
    known.saturating_sub(lost(switch, port))
}

/// Kills a kept switch three times, `step_ms` later each time, while the guests of `names` connect:
/// none is left hanging, each comes up or ends and its port takes the next one.
pub fn kill_while_connecting(
    switch: &Switch,
    names: [&str; 4],
    step_ms: u64,
    start: impl Fn(&str) -> Gen,
) {
    for round in 0..3 {
        wait_until_settled(switch);
        let before = switch.pid();
        let mut guests = names.map(&start);
        std::thread::sleep(Duration::from_millis(step_ms * round));
        kill(before);
        wait_for_next(switch, before);
        for (name, guest) in names.iter().zip(&mut guests) {
            wait_for("each guest", || switch.is_up(name) || !guest.0.lives());
        }
        guests.iter_mut().for_each(|guest| guest.0.kill());
        names.iter().for_each(|name| switch.wait_up(name, false));
    }
}

/// Waits until the process is old enough not to count as one that its state ends.
pub fn wait_until_settled(switch: &Switch) {
    wait_for("a while", || switch.json(&["show"])["uptime_s"].as_u64().unwrap() >= 2);
}

/// Whether TAP interfaces can be made here; if not, prints that the test is skipped.
pub fn may_make_taps() -> bool {
    let may = Path::new("/dev/net/tun").exists() && rustix::process::geteuid().is_root();
    if !may {
        println!("skipped: TAP interfaces need root and /dev/net/tun");
    }
    may
}

/// The queue of a new TAP interface, which is up.
pub fn tap_queue(name: &str, netns: Option<&str>) -> OwnedFd {
    let tap = uplink::open(&uplink::TapOptions {
        name: name.into(),
        netns: netns.map(String::from),
        queues: NonZeroU16::MIN,
        create: uplink::Create::IfMissing,
        up: true,
        mtu: None,
        mac: None,
        queue_len: None,
    });
    tap.unwrap().queues[0].try_clone().unwrap()
}

/// A number that the kernel has of an interface.
pub fn of_interface(name: &str, what: &str) -> u64 {
    let text = std::fs::read_to_string(format!("/sys/class/net/{name}/{what}"));
    text.unwrap().trim().parse().unwrap()
}
