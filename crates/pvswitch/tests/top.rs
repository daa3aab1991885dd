//! `pvswitch top`.

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::process::Command;
use std::sync::{Arc, Mutex};

use common::{Dir, Gen, Process, Switch, pvswitch, signal, wait_for};
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

fn top(control: &str, args: &[&str]) -> Command {
    let mut command = pvswitch();
    command.args(["top", "--control", control]).args(args);
    command
}

#[test]
fn once_prints_workers_ports_and_queues_as_text() {
    let dir = Dir::new();
    let ports = [dir.port("sender", ",queues=2"), dir.port("taker", ""), "n=null".into()];
    let switch = Switch::start(&dir, &[], &ports);
    let _sink = Gen::start(&dir.path("taker"), &["--mode", "sink"]);
    switch.wait_up("taker", true);
    let _sender = Gen::start(&dir.path("sender"), &["--rate", "5k"]);
    wait_for("traffic", || switch.counter("taker", "egress", "frames") > 100);
    // With and without --once: there is no terminal.
    for args in [&["--once"][..], &["--interval", "0.5"]] {
        let out = top(switch.control(), args).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        assert!(!text.contains('\x1b') && !text.contains("NaN"), "{text}");
        let rows = |name: &str| {
            let rows = text.lines().filter(|line| line.split(' ').next() == Some(name));
            rows.map(|line| line.split_whitespace().collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        let (sender, taker) = (rows("sender"), rows("taker"));
        assert_eq!((sender.len(), taker.len(), rows("n").len()), (1 + 2, 1 + 1, 1), "{text}");
        let thousands = |cell: &str| cell.strip_suffix('k').and_then(|n| n.parse::<f64>().ok());
        assert_eq!(sender[0][1], "up", "{text}");
        assert!(thousands(sender[0][2]).is_some_and(|rate| rate > 1.0), "{text}");
        assert!(thousands(taker[0][4]).is_some_and(|rate| rate > 1.0), "{text}");
        let states = ["hot", "warm", "cold"];
        assert!(states.contains(&sender[1][2]) && sender[1][4] == "adaptive", "{text}");
        assert!(text.contains("\nWORKER") && text.contains("KICKS/s"), "{text}");
        assert!(text.contains(" HELD CONT/s "), "{text}");
    }
}

#[test]
fn missing_switch_and_invalid_intervals_are_reported() {
    let dir = Dir::new();
    let out = top(&dir.text("ctl"), &["--once"]).output().unwrap();
    let error = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(1), "{error}");
    assert!(error.contains("cannot reach a switch at"), "{error}");
    for interval in ["0", "-1", "nan", "1e9"] {
        let interval = format!("--interval={interval}");
        let out = top(&dir.text("ctl"), &["--once", &interval]).output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{interval}");
        assert!(String::from_utf8_lossy(&out.stderr).contains("use 0.1 to 3600 seconds"));
    }
}

/// `top` on a pseudo-terminal.
struct Screen {
    process: Process,
    master: File,
    slave: File,
    written: Arc<Mutex<String>>,
}

impl Screen {
    fn start(control: &str) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let slave = File::options().read(true).write(true).open(name).unwrap();
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&slave, size).unwrap();
        let master = File::from(master);
        let stdio = || slave.try_clone().unwrap();
        let mut command = top(control, &["--interval", "0.2"]);
        let child = command.stdin(stdio()).stdout(stdio()).stderr(stdio()).spawn().unwrap();
        let written = Arc::new(Mutex::new(String::new()));
        let (mut reader, text) = (master.try_clone().unwrap(), Arc::clone(&written));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n) = reader.read(&mut buffer) {
                text.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..n]));
            }
        });
        Self { process: Process(child), master, slave, written }
    }

    /// Waits for `what` in the output, and drops all output up to it.
    fn wait(&self, what: &str) {
        wait_for(&format!("'{what}' on the screen"), || {
            let mut written = self.written.lock().unwrap();
            let Some(at) = written.find(what) else { return false };
            written.drain(..at + what.len());
            true
        });
    }

    fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    fn is_raw(&self) -> bool {
        !tcgetattr(&self.slave).unwrap().local_modes.contains(LocalModes::ICANON)
    }

    /// Checks that it exited with success and restored the terminal.
    fn ended(mut self) {
        assert_eq!(self.process.wait().code(), Some(0));
        self.wait("\x1b[?1049l");
        assert!(!self.is_raw());
    }
}

const ENTERED: &str = "\x1b[?1049h";

#[test]
fn terminal_is_restored_on_quit_and_on_a_signal() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &["n=null".into()]);
    for end in ["q", "\x03", ""] {
        let mut screen = Screen::start(switch.control());
        screen.wait(ENTERED);
        screen.wait("WORKER");
        assert!(screen.is_raw());
        match end {
            "" => signal(&screen.process.0, Signal::TERM),
            key => screen.press(key),
        }
        screen.ended();
    }
}

#[test]
fn restart_of_the_switch_is_shown() {
    let dir = Dir::new();
    let mut switch = Switch::start(&dir, &[], &["first=null".into()]);
    let mut screen = Screen::start(switch.control());
    screen.wait("first");
    screen.press("\r");
    screen.wait("To the guest");
    screen.press("?");
    // On its first line: the page is longer than the screen.
    screen.wait("Ctrl-C");
    screen.press("qt");
    switch.process.kill();
    screen.wait("NO REPLY");
    let _switch = Switch::start(&dir, &[], &["second=null".into()]);
    screen.wait("second");
    screen.press("q");
    screen.ended();
}

#[test]
fn frames_that_are_held_are_a_gauge_and_contended_locks_a_rate() {
    let dir = Dir::new();
    let switch = Switch::start(
        &dir,
        &["--workers", "2", "--placement", "per-port"],
        &[dir.port("a", ""), dir.port("c", ""), dir.port("sink", ",queues=1")],
    );
    let (mac, control) = ("02:00:00:00:00:77", dir.text("guest"));
    // Polls are a second apart at first, and no burst waits for them: frames are held.
    let args = ["--mode", "sink", "--mac", mac, "--queue-size", "64", "--poll", "timer:20"];
    let _sink = Gen::start(&dir.path("sink"), &[&args[..], &["--control", &control]].concat());
    switch.wait_up("sink", true);
    let send = ["--peer", mac, "--rate", "20k"];
    let _senders = ["a", "c"].map(|name| {
        let sender = Gen::start(&dir.path(name), &send);
        switch.wait_up(name, true);
        sender
    });
    let column = |name: &str| {
        let out = top(switch.control(), &["--once", "--interval", "0.1"]).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        let mut lines = text.lines().skip_while(|line| !line.contains(" HELD CONT/s "));
        let at = lines.next().unwrap().find(name).unwrap();
        let cells = lines.take(3).map(|line| line[..at + name.len()].split(' ').next_back());
        cells.map(|cell| cell.unwrap().to_string()).collect::<Vec<_>>()
    };
    wait_for("held frames", || {
        let held = column("HELD");
        // Ports are in the order in which they were added; nothing is sent to the senders.
        assert_eq!(held[..2], ["0", "0"], "{held:?}");
        held[2].parse::<u64>().is_ok_and(|n| (1..=256).contains(&n))
    });
    let contended = column("CONT/s");
    assert_eq!(contended[..2], ["0", "0"], "nothing is sent to the senders: {contended:?}");
    assert_ne!(contended[2], "-");
}

#[test]
fn stats_as_text_include_the_state_of_queues() {
    let dir = Dir::new();
    let ports = [dir.port("a", ",poll=event"), dir.port("b", "")];
    let switch = Switch::start(&dir, &[], &ports);
    let _sink = Gen::start(&dir.path("b"), &["--mode", "sink"]);
    switch.wait_up("b", true);
    let _sender = Gen::start(&dir.path("a"), &["--rate", "100"]);
    let frames = || switch.counter("a", "ingress", "first_frames");
    wait_for("first frames", || frames() > 3);
    let text = String::from_utf8(switch.ctl(&["stats"]).stdout).unwrap();
    let line = text.lines().find(|l| l.contains("queue 0: ") && l.contains("event")).expect(&text);
    assert!(line.contains("worker 0") && line.contains("first frame after "), "{text}");
    assert!(text.lines().next().unwrap().ends_with("HELD"), "{text}");
}
