//! Threads that serve peers are confined; which calls end the process is tested in `os`.

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use common::{Dir, Gen, Process, Switch, pvswitch, sender_and_sink, wait_for};

/// Threads of a process by name: whether filtered, whether without new privileges, and their
/// effective capabilities.
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
        all.insert(name.trim().to_string(), of);
    }
    all
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
