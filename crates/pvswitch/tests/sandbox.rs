//! Threads that serve peers are confined; which calls end the process is tested in `os`.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::{Dir, Gen, Process, Switch, pvswitch, sender_and_sink, wait_for};
use common::{may_make_taps, of_interface};
use guest::vm::Vm;

/// Threads of a process by name: whether filtered, whether without new privileges, and their
/// effective capabilities. Of several of one name the least confined.
fn threads(pid: u32) -> BTreeMap<String, (bool, bool, u64)> {
    let mut all = BTreeMap::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        // One that has ended meanwhile has no files.
        let Some((name, status)) = entry.ok().and_then(|entry| {
            let read = |file| std::fs::read_to_string(Path::new(&entry.path()).join(file)).ok();
            Some((read("comm")?, read("status")?))
        }) else {
            continue;
        };
        let field = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            line.unwrap_or_else(|| panic!("no {key}: {status}")).trim().to_string()
        };
        let capabilities = u64::from_str_radix(&field("CapEff:"), 16).unwrap();
        let of = (field("Seccomp:") == "2", field("NoNewPrivs:") == "1", capabilities);
        let least = all.entry(name.trim().to_string()).or_insert(of);
        *least = (least.0 && of.0, least.1 && of.1, least.2 | of.2);
    }
    all
}

/// Checks that no thread is less confined after a feature was used, whatever it has started.
fn check_confined(switch: &Switch, feature: &str) {
    let threads = threads(switch.pid());
    for name in SERVING.iter().filter(|name| **name != "capture") {
        assert_eq!(threads.get(*name), Some(&CONFINED), "{feature}, {name}: {threads:?}");
    }
    for (name, (filtered, unprivileged, _)) in &threads {
        assert!(*filtered && *unprivileged, "{feature}, {name}: {threads:?}");
    }
    assert!(!switch.log().contains("--sandbox"), "{feature}: {}", switch.log());
}

const CONFINED: (bool, bool, u64) = (true, true, 0);
const SERVING: [&str; 5] = ["worker0", "worker1", "closer", "http", "capture"];

fn start(dir: &Dir, args: &[&str]) -> Switch {
    let usual = ["--workers", "2", "--placement", "per-port", "--http", "127.0.0.1:0"];
    Switch::start(dir, &[&usual, args].concat(), &[dir.port("a", ""), dir.port("b", "")])
}

fn capture(switch: &Switch, dir: &Dir) -> Process {
    let mut command = pvswitch();
    command.args(["capture", "b", "--control", switch.control(), "-w", &dir.text("pcap")]);
    Process(command.spawn().unwrap())
}

#[test]
fn threads_that_serve_peers_are_confined_also_after_an_upgrade() {
    let dir = Dir::new();
    let switch = start(&dir, &[]);
    let (sender, sink) = sender_and_sink(&switch, &dir, &[]);
    for round in 0..2 {
        let capture = capture(&switch, &dir);
        wait_for("a capture", || threads(switch.pid()).contains_key("capture"));
        let threads = threads(switch.pid());
        for name in SERVING {
            assert_eq!(threads.get(name), Some(&CONFINED), "{name}, round {round}: {threads:?}");
        }
        let (filtered, unprivileged, capabilities) = threads["pvswitch"];
        assert!(filtered && unprivileged, "round {round}: {threads:?}");
        // CAP_SYS_MODULE, CAP_SYS_PTRACE, CAP_SYS_BOOT
        assert_eq!(capabilities & (1 << 16 | 1 << 19 | 1 << 22), 0, "{capabilities:x}");
        assert_eq!(switch.json(&["show"])["sandbox"], "on");
        switch.wait_for_frames("a", 1000);
        drop(capture);
        wait_for("the end of the capture", || !self::threads(switch.pid()).contains_key("capture"));
        if round == 0 {
            let before = switch.pid();
            assert!(switch.ctl(&["upgrade"]).status.success(), "{}", switch.log());
            wait_for("the new process", || switch.pid() != before);
        }
    }
    sender.end();
    drop(sink);
    assert!(!switch.log().contains("--sandbox"), "{}", switch.log());
    switch.shut_down(&dir);
}

#[test]
fn sandbox_off_is_a_warning_and_no_thread_is_confined() {
    let dir = Dir::new();
    let switch = start(&dir, &["--sandbox", "off"]);
    let threads = threads(switch.pid());
    for name in SERVING.iter().filter(|name| **name != "capture") {
        assert!(!threads[*name].0 && !threads[*name].1, "{name}: {threads:?}");
    }
    assert_eq!(switch.json(&["show"])["sandbox"], "off");
    assert!(switch.log().contains("--sandbox off: threads that serve peers"), "{}", switch.log());
}

/// Guests whose descriptors and memory come and go: their closes are on a confined thread, also
/// those that a worker causes.
#[test]
fn guests_come_and_go_within_the_sandbox() {
    let dir = Dir::new();
    let switch = start(&dir, &[]);
    for ring in [&[][..], &["--packed"], &["--in-order"]] {
        let mut guests = Vec::new();
        let sink = [ring, &["--mode", "sink"]].concat();
        guests.push(Gen::start(&dir.path("b"), &sink));
        switch.wait_up("b", true);
        guests.push(Gen::start(&dir.path("a"), &[ring, &["--rate", "20k"]].concat()));
        switch.wait_up("a", true);
        switch.wait_for_frames("a", 500);
        // Killed while frames are under way.
        guests.iter_mut().for_each(|guest| guest.0.kill());
        switch.wait_up("a", false);
        switch.wait_up("b", false);
        for port in ["a", "b"] {
            wait_for("the descriptors to be closed", || {
                switch.port("show", port)["account"]["descriptors"]["used"] == 0
            });
        }
    }
    let closers = threads(switch.pid());
    assert_eq!(closers.get("closer"), Some(&CONFINED), "{closers:?}");
}

/// Sends to all others from a guest of port `a`, until as many frames went out of `port`.
fn flood(switch: &Switch, dir: &Dir, port: &str) {
    let frames = || switch.counter(port, "egress", "frames");
    // Of this sender: one that has just begun is not yet ready to be terminated.
    let before = frames();
    let sender = Gen::start(&dir.path("a"), &["--rate", "1k"]);
    wait_for("frames", || frames() > before + 100);
    sender.end();
}

#[test]
fn ports_of_a_reload_work_within_the_sandbox() {
    let dir = Dir::new();
    let file = dir.text("x.toml");
    let port = |name: &str| {
        let socket = dir.text(name);
        format!("[port.{name}]\nkind = \"vhost-user\"\nsocket = \"{socket}\"\n")
    };
    std::fs::write(&file, "").unwrap();
    let switch = start(&dir, &["--config", &file]);
    check_confined(&switch, "start");
    std::fs::write(&file, port("c") + &port("d")).unwrap();
    assert_eq!(switch.json(&["reload"])["added"].as_array().unwrap().len(), 2);
    let _sinks = ["c", "d"].map(|name| {
        let sink = Gen::start(&dir.path(name), &["--mode", "sink"]);
        switch.wait_up(name, true);
        sink
    });
    flood(&switch, &dir, "c");
    std::fs::write(&file, port("d")).unwrap();
    assert_eq!(switch.json(&["reload"])["removed"].as_array().unwrap().len(), 1);
    flood(&switch, &dir, "d");
    check_confined(&switch, "reload");
    switch.shut_down(&dir);
}

#[test]
fn new_ports_of_guests_and_xen_work_within_the_sandbox() {
    let dir = Dir::new();
    let switch = start(&dir, &[]);
    for kind in ["vhost-user", "xen-local"] {
        let at = format!("{kind}:{}", dir.text("c"));
        switch.json(&["add-port", &format!("c={at}")]);
        let sink = Gen::connect(&at, &["--mode", "sink"]);
        switch.wait_up("c", true);
        flood(&switch, &dir, "c");
        check_confined(&switch, kind);
        sink.end();
        switch.json(&["del-port", "c"]);
        check_confined(&switch, kind);
    }
    switch.shut_down(&dir);
}

#[test]
fn new_tap_works_within_the_sandbox() {
    if !may_make_taps() {
        return;
    }
    let dir = Dir::new();
    let switch = start(&dir, &[]);
    let tap = format!("pvssbx{}", std::process::id() % 100_000);
    switch.json(&["add-port", &format!("h=tap:{tap}")]);
    switch.wait_up("h", true);
    flood(&switch, &dir, "h");
    wait_for("frames in the host", || of_interface(&tap, "statistics/rx_packets") > 100);
    check_confined(&switch, "TAP");
    switch.json(&["del-port", "h"]);
    check_confined(&switch, "TAP");
    switch.shut_down(&dir);
}

#[test]
fn guest_migrates_within_the_sandbox() {
    let dir = Dir::new();
    let switch = start(&dir, &[]);
    switch.json(&["add-port", &dir.port("c", "")]);
    let [old, new] = ["b", "c"].map(|port| Vm::connect(&dir.path(port)).unwrap());
    old.post();
    old.start().unwrap();
    let log = old.new_log().unwrap();
    old.log(true).unwrap();
    old.copy_all(&new);
    let sender = Gen::start(&dir.path("a"), &["--rate", "200"]);
    wait_for("frames", || old.used_idx() >= 10);
    assert_eq!(switch.port("show", "b")["dirty_log"], true);
    check_confined(&switch, "dirty log");
    old.enable(false).unwrap();
    assert!(old.copy_marked(&log, &new) > 0);
    assert!(old.differences(&new).is_empty());
    drop(old);
    new.start().unwrap();
    switch.wait_up("c", true);
    sender.end();
    check_confined(&switch, "migration");
    switch.shut_down(&dir);
}

/// Runs a switch for a second in a container whose filter refuses a call: exit status and log.
fn run_without(call: i64, sandbox: &'static str) -> (Option<i32>, String) {
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch, apply_filter};
    let dir = Dir::new();
    let control = dir.text("ctl");
    // The process inherits the filter of the thread that starts it.
    let thread = std::thread::spawn(move || {
        let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
        let rules = [(call, Vec::new())].into_iter().collect();
        let arch = TargetArch::try_from(std::env::consts::ARCH).unwrap();
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch).unwrap();
        let filter: BpfProgram = filter.try_into().unwrap();
        apply_filter(&filter).unwrap();
        let mut command = pvswitch();
        command.args(["run", "--port", "n=null", "--duration", "1", "--control", &control]);
        command.args(["--sandbox", sandbox]).output().unwrap()
    });
    let out = thread.join().unwrap();
    assert!(!dir.path("ctl").exists());
    (out.status.code(), String::from_utf8(out.stderr).unwrap())
}

#[test]
fn a_system_that_refuses_filters_is_an_error_and_not_a_silent_run_without() {
    let (status, error) = run_without(libc::SYS_seccomp, "on");
    assert_eq!(status, Some(1), "{error}");
    for word in ["--sandbox on", "Operation not permitted", "container", "--sandbox off"] {
        assert!(error.contains(word), "{word}: {error}");
    }
    assert_eq!(run_without(libc::SYS_seccomp, "off").0, Some(0));
}

#[test]
fn a_system_without_landlock_is_an_error_and_seccomp_does_without() {
    let (status, error) = run_without(libc::SYS_landlock_create_ruleset, "on");
    assert_eq!(status, Some(1), "{error}");
    for word in ["--sandbox on", "files", "Landlock", "lsm=", "--sandbox seccomp"] {
        assert!(error.contains(word), "{word}: {error}");
    }
    let (status, log) = run_without(libc::SYS_landlock_create_ruleset, "seccomp");
    assert_eq!(status, Some(0), "{log}");
    assert!(log.contains("--sandbox seccomp: files are protected"), "{log}");
}

#[test]
fn an_invalid_word_is_named() {
    let out = pvswitch().args(["run", "--port", "n=null", "--sandbox", "yes"]).output().unwrap();
    let error = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(2), "{error}");
    assert!(error.contains("sandbox") && error.contains("off"), "{error}");
}
