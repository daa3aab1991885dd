//! Faults of the machine and of the program itself: each costs what it hits, and nothing else
//! ([Faults](../../../docs/reliability.md#faults)).

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{
    Bystanders, Dir, Gen, Process, RECEIVER, Switch, pvswitch, sender_and_sink, signal, wait_for,
    wait_for_next, wait_until_settled,
};
use os::Received;
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, prlimit};
use serde_json::Value;

/// Ends the pair of ports `a` and `b`, which is still served by its first connections.
fn end_undisturbed(switch: &Switch, pair: Bystanders) {
    pair.wait_for_replies(switch);
    switch.check_connected_once(&["a", "b"]);
    pair.end();
}

/// Whether the program panics on demand; if not, prints that the test is skipped.
fn may_panic() -> bool {
    let may = cfg!(debug_assertions);
    if !may {
        println!("skipped: panics on demand need debug assertions");
    }
    may
}

/// A switch with ports `a` to `d` whose process panics at this place (`PVSWITCH_PANIC_AT`).
fn panicking(dir: &Dir, args: &[&str], at: &str) -> Switch {
    let mut command = pvswitch();
    command.args(["run", "--quiet", "--control", &dir.text("ctl")]).args(args);
    for name in ["a", "b", "c", "d"] {
        command.args(["--port", &dir.port(name, "")]);
    }
    command.env("PVSWITCH_PANIC_AT", at).stdout(Stdio::null());
    Switch::spawn(dir, command)
}

/// Number of panics while a port was served.
fn panics(switch: &Switch, port: &str) -> Value {
    switch.port("show", port)["errors"]["panic"].clone()
}

/// The guest of `c` sends to that of `d`, and the process panics at `at` each time: only `costs`
/// are disconnected, each time for longer.
fn panics_cost(at: &str, costs: &[&str]) {
    if !may_panic() {
        return;
    }
    let dir = Dir::new();
    let switch = panicking(&dir, &["--keep"], at);
    // No frame is flooded: learned addresses may be lost with the process.
    for (address, port) in [("02:00:00:00:00:a1", "a"), ("02:00:00:00:00:a2", "b"), (RECEIVER, "d")]
    {
        switch.json(&["fdb", "add", address, port]);
    }
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    let sinks = || Gen::start(&dir.path("d"), &["--mode", "sink", "--mac", RECEIVER]);
    let mut sink = sinks();
    let mut held_since = None;
    for n in 1..=3_u32 {
        if !sink.0.lives() {
            sink = sinks();
        }
        switch.wait_up("d", true);
        let (began, before) = (Instant::now(), switch.pid());
        // It waits until its port is served again.
        let mut guest = Gen::start(&dir.path("c"), &["--rate", "1k", "--peer", RECEIVER]);
        wait_for_next(&switch, before);
        if let Some(since) = held_since.replace(began) {
            let held = since.elapsed();
            assert!(held >= Duration::from_secs(1 << (n - 1)), "{held:?}\n{}", switch.log());
        }
        for port in ["a", "b", "c", "d"] {
            let expected = if costs.contains(&port) { n.into() } else { Value::Null };
            assert_eq!(panics(&switch, port), expected, "port {port}\n{}", switch.log());
        }
        let line = "the switch panicked while it served this port";
        assert_eq!(switch.log().matches(line).count(), costs.len() * n as usize);
        wait_for("the guest to be disconnected", || !guest.0.lives());
        if costs.contains(&"d") {
            wait_for("the receiver to be disconnected", || !sink.0.lives());
        }
        pair.wait_for_replies(&switch);
    }
    switch.check_connected_once(&["a", "b"]);
    assert_eq!(switch.is_up("d"), !costs.contains(&"d"));
    assert!(!switch.log().contains("connections are not restored"), "{}", switch.log());
    pair.end();
}

#[test]
fn panic_amid_a_burst_costs_its_port_only() {
    panics_cost("from:2", &["c"]);
}

#[test]
fn panic_during_a_delivery_costs_sender_and_receiver_only() {
    panics_cost("to:3", &["c", "d"]);
}

#[test]
fn panic_at_a_message_of_a_front_end_costs_its_port_only() {
    panics_cost("message:2", &["c"]);
}

#[test]
fn panic_of_a_switch_that_is_not_kept_ends_it() {
    if !may_panic() {
        return;
    }
    let dir = Dir::new();
    let mut switch = panicking(&dir, &[], "from:2");
    let _guest = Gen::start(&dir.path("c"), &["--rate", "1k"]);
    let status = switch.process.wait();
    assert_eq!(status.signal(), Some(Signal::ABORT.as_raw()), "{status}");
    assert!(switch.log().contains("on demand: from port 2"), "{}", switch.log());
}

/// Changes a limit of a process; `None`: to its maximum.
fn limit(pid: u32, resource: Resource, current: Option<u64>) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap());
    let maximum = getrlimit(resource).maximum;
    let limit = Rlimit { current: current.or(maximum), maximum };
    prlimit(pid, resource, limit).unwrap();
}

fn text(out: &[u8]) -> String {
    String::from_utf8_lossy(out).into_owned()
}

/// The error of a request that must fail.
fn refused(switch: &Switch, args: &[&str]) -> String {
    let out = switch.ctl(args);
    assert_eq!(out.status.code(), Some(1), "{args:?}: {}", text(&out.stdout));
    text(&out.stderr)
}

fn capture(switch: &Switch, port: &str, to: &str) -> Command {
    let mut command = pvswitch();
    command.args(["capture", port, "--control", switch.control(), "-w", to]);
    command.stderr(Stdio::piped());
    command
}

/// Exit status and error of a program that must end by itself.
fn ended(mut command: Command) -> (Option<i32>, String) {
    let mut process = Process(command.spawn().unwrap());
    let status = process.wait();
    let error = std::io::read_to_string(process.0.stderr.take().unwrap()).unwrap();
    (status.code(), error)
}

/// Captures `port` until there is something in `to`, and ends it in order.
fn captures(switch: &Switch, port: &str, to: &str) {
    let mut capture = Process(capture(switch, port, to).spawn().unwrap());
    wait_for("a capture", || std::fs::metadata(to).is_ok_and(|file| file.len() > 0));
    signal(&capture.0, Signal::INT);
    assert!(capture.wait().success());
}

const ADDED: &str = "n";

/// A switch with a file, ports `a` and `b` in use, and a free one `c`; and the file with two more.
fn with_file(dir: &Dir, args: &[&str]) -> (Switch, Bystanders, Box<dyn Fn(bool)>) {
    with_file_and(dir, args, &[])
}

/// The same with environment variables.
fn with_file_and(
    dir: &Dir,
    args: &[&str],
    envs: &[(&str, &Path)],
) -> (Switch, Bystanders, Box<dyn Fn(bool)>) {
    let file = dir.path("c.toml");
    let port = |name: &str| {
        format!("[port.{name}]\nkind = \"vhost-user\"\nsocket = \"{}\"\n", dir.text(name))
    };
    let few: String = ["a", "b", "c"].map(port).concat();
    let more = format!("{few}{}{}", port(ADDED), port("n2"));
    let name = file.display().to_string();
    let write = move |is_more| std::fs::write(&file, if is_more { &more } else { &few }).unwrap();
    write(false);
    let mut command = pvswitch();
    command.args(["run", "--quiet", "--control", &dir.text("ctl"), "--config", &name]).args(args);
    command.envs(envs.iter().copied()).stdout(Stdio::null());
    let switch = Switch::spawn(dir, command);
    let pair = Bystanders::start(&switch, dir, "a", "b");
    (switch, pair, Box::new(write))
}

fn names(switch: &Switch) -> Vec<String> {
    let show = switch.json(&["show"]);
    let ports = show["ports"].as_array().unwrap().iter();
    ports.map(|port| port["name"].as_str().unwrap().into()).collect()
}

fn descriptors(pid: u32) -> u64 {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count() as u64
}

#[test]
fn without_descriptors_all_is_refused_by_name_and_works_again_with_some() {
    const CAUSE: &str = "Too many open files";
    let dir = Dir::new();
    let (switch, pair, write) = with_file(&dir, &[]);
    let pid = switch.pid();
    // The requests that follow need more than their connection. Earlier ones are closing: the
    // least of many samples.
    let samples = (0..50).map(|_| {
        std::thread::sleep(Duration::from_millis(20));
        descriptors(pid)
    });
    limit(pid, Resource::Nofile, Some(samples.min().unwrap() + 1));
    let error = refused(&switch, &["add-port", &dir.port("x", "")]);
    assert!(error.contains(CAUSE), "{error}");
    write(true);
    let error = refused(&switch, &["reload"]);
    assert!(error.contains(CAUSE), "{error}");
    let (status, error) = ended(capture(&switch, "a", &dir.text("refused.pcap")));
    assert_eq!(status, Some(1), "{error}");
    assert!(error.contains(CAUSE), "{error}");
    assert!(!dir.path("refused.pcap").exists());
    // A guest's memory and rings are descriptors.
    let mut guest = Gen::start(&dir.path("c"), &["--mode", "sink"]);
    wait_for("the guest to be refused", || !guest.0.lives());
    wait_for("a client to be accepted", || switch.ctl(&["show"]).status.success());
    assert!(switch.log().contains("port c: front-end disconnected: "), "{}", switch.log());
    assert_eq!(names(&switch), ["a", "b", "c"]);
    pair.wait_for_replies(&switch);

    limit(pid, Resource::Nofile, None);
    assert!(switch.ctl(&["add-port", &dir.port("x", "")]).status.success());
    assert_eq!(switch.json(&["reload"])["added"][0], ADDED);
    captures(&switch, "a", &dir.text("a.pcap"));
    let guest = Gen::start(&dir.path("c"), &["--mode", "sink"]);
    switch.wait_up("c", true);
    guest.end();
    assert_eq!(switch.pid(), pid);
    end_undisturbed(&switch, pair);
}

/// Bytes of a process's address space.
fn address_space(pid: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    statm.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096
}

#[test]
fn without_address_space_guests_are_refused_and_the_rest_continues() {
    let dir = Dir::new();
    let (switch, pair, write) = with_file(&dir, &[]);
    let pid = switch.pid();
    // Room for the allocator, not for a guest's memory.
    limit(pid, Resource::As, Some(address_space(pid) + (1 << 20)));
    let mut guest = Gen::start(&dir.path("c"), &["--mode", "sink", "--queue-size", "1024"]);
    wait_for("the guest to be refused", || !guest.0.lives());
    assert!(switch.log().contains("Cannot allocate memory"), "{}", switch.log());
    assert!(switch.ctl(&["add-port", &dir.port("x", "")]).status.success());
    write(true);
    assert_eq!(switch.json(&["reload"])["added"][0], ADDED);
    pair.wait_for_replies(&switch);

    limit(pid, Resource::As, None);
    captures(&switch, "a", &dir.text("a.pcap"));
    let guest = Gen::start(&dir.path("c"), &["--mode", "sink", "--queue-size", "1024"]);
    switch.wait_up("c", true);
    guest.end();
    assert_eq!(switch.pid(), pid);
    end_undisturbed(&switch, pair);
}

/// The process that has no memory ends; a kept switch continues in the next one.
#[test]
fn allocation_that_fails_ends_the_process_and_guests_stay_connected() {
    let dir = Dir::new();
    let (switch, pair, _) = with_file(&dir, &["--keep"]);
    wait_until_settled(&switch);
    let before = switch.pid();
    // The allocator has no more than it has kept.
    limit(before, Resource::Data, Some(1 << 20));
    let few = std::fs::read_to_string(dir.path("c.toml")).unwrap();
    let (mut added, mut tried) = (0, 4000);
    wait_for("an allocation to fail", || {
        let port = |n| format!("[port.n{n}]\nkind = \"null\"\n");
        let more: String = (0..tried).map(port).collect();
        std::fs::write(dir.path("c.toml"), format!("{few}{more}")).unwrap();
        let out = switch.ctl(&["reload"]);
        if out.status.success() {
            (added, tried) = (tried, tried * 2);
            return false;
        }
        // A file that is too large to be read is refused.
        tried = (added + tried) / 2;
        let error = text(&out.stderr);
        assert!(error.contains("closed") || error.contains("out of memory"), "{error}");
        error.contains("closed")
    });
    wait_for_next(&switch, before);
    assert!(switch.log().contains("memory allocation of "), "{}", switch.log());
    assert!(switch.log().contains("was killed while it ran the request"), "{}", switch.log());
    // Nothing of the request took effect, nor was one before it lost.
    assert_eq!(names(&switch).len(), 3 + added);
    end_undisturbed(&switch, pair);
}

const REQUESTS: [&str; 6] = ["add-port", "connect", "reload", "capture", "show", "upgrade"];

/// Asks for one of [`REQUESTS`] for the `n`th time, of a switch that may end meanwhile; whether it
/// was done. `write` is that of [`with_file`].
fn ask(switch: &Switch, dir: &Dir, write: &dyn Fn(bool), what: &str, n: u64) -> bool {
    let succeeds = |args: &[&str]| switch.ctl(args).status.success();
    match what {
        "add-port" => {
            let added = succeeds(&["add-port", &dir.port("x", "")]);
            // After a kill it may have been added without a reply.
            added | succeeds(&["del-port", "x"])
        }
        "connect" => {
            let is_up = || {
                let out = switch.ctl(&["show", "--json"]);
                let show: Value = serde_json::from_slice(&out.stdout).ok()?;
                let port = show["ports"].as_array()?.iter().find(|port| port["name"] == "c")?;
                port["up"].as_bool()
            };
            let mut guest = Gen::start(&dir.path("c"), &["--mode", "sink"]);
            let mut served = false;
            wait_for("the guest to be served or refused", || {
                served |= is_up() == Some(true);
                served || !guest.0.lives()
            });
            guest.0.kill();
            wait_for("the guest to be gone", || is_up() == Some(false));
            served
        }
        "reload" => {
            write(n.is_multiple_of(2));
            succeeds(&["reload"])
        }
        "capture" => {
            let to = dir.text("x.pcap");
            let mut capture = Process(capture(switch, "a", &to).spawn().unwrap());
            let has = || std::fs::metadata(&to).is_ok_and(|file| file.len() > 0);
            wait_for("a capture, or its end", || has() || !capture.lives());
            let is_capturing = has();
            capture.kill();
            let _ = std::fs::remove_file(&to);
            is_capturing
        }
        "show" => ["show", "stats", "fdb"].iter().all(|what| succeeds(&[what])),
        "upgrade" => succeeds(&["upgrade"]),
        _ => panic!("{what}"),
    }
}

/// Whatever is asked of a kept switch without memory, and whether it refuses that, does it or ends:
/// guests stay connected, and with memory it is done.
#[test]
fn nothing_that_is_asked_without_memory_costs_a_connection() {
    let dir = Dir::new();
    let (switch, pair, write) = with_file(&dir, &["--keep"]);
    for what in REQUESTS {
        wait_until_settled(&switch);
        let before = switch.pid();
        limit(before, Resource::Data, Some(1 << 20));
        for n in 0..if what == "upgrade" { 1 } else { 10 } {
            ask(&switch, &dir, &write, what, n);
        }
        wait_for("a reply", || switch.ctl(&["show"]).status.success());
        let pid = switch.pid();
        println!("{what}: {}", if pid == before { "continued" } else { "ended, and continued" });
        limit(pid, Resource::Data, None);
        wait_for(what, || ask(&switch, &dir, &write, what, 0));
        pair.wait_for_replies(&switch);
        switch.check_connected_once(&["a", "b"]);
    }
    pair.end();
}

/// As the number of an allocation: the first on a call path of which none has failed.
const NEW_PATH: u64 = u64::MAX;
/// As a process: the next one that starts.
const NEXT: u64 = u64::MAX;

/// An allocator of which one call fails (`failing_malloc.c`).
struct FailingMalloc {
    library: PathBuf,
    file: PathBuf,
}

impl FailingMalloc {
    /// Builds it in `dir`; `None`, and says so: there is no C compiler.
    fn build(dir: &Dir) -> Option<Self> {
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/failing_malloc.c");
        let (library, file) = (dir.path("malloc.so"), dir.path("malloc"));
        std::fs::write(&file, [0; 16 + (8 << 16)]).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"]).arg(&library);
        match cc.arg(source).output() {
            Err(_) => {
                println!("skipped: no C compiler");
                None
            }
            Ok(done) => {
                assert!(done.status.success(), "{}", text(&done.stderr));
                Some(Self { library, file })
            }
        }
    }

    fn envs(&self) -> [(&str, &Path); 2] {
        [("LD_PRELOAD", &self.library), ("FAILING_MALLOC", &self.file)]
    }

    /// Has the `n`th allocation of this process fail, or the first on a [`NEW_PATH`]; 0: none.
    fn fail(&self, pid: u64, n: u64) {
        let file = File::options().write(true).open(&self.file).unwrap();
        // Not of another process in between.
        for (value, at) in [(0, 8), (pid, 0), (n, 8)] {
            file.write_all_at(&value.to_ne_bytes(), at).unwrap();
        }
    }

    /// The allocations left until the one that fails.
    fn left(&self) -> u64 {
        let mut left = [0; 8];
        File::open(&self.file).unwrap().read_exact_at(&mut left, 8).unwrap();
        u64::from_ne_bytes(left)
    }
}

/// If an allocation of a request fails, guests stay connected, nothing or all of the request had an
/// effect, and it is done when it is asked again: the first, second, fourth and so on; with
/// `PVSWITCH_ALLOCATIONS=all` the first on each call path, for most of an hour.
fn allocations_fail(what: &str) {
    allocations_fail_in(what, |switch| switch.pid().into());
}

/// The same in this process.
fn allocations_fail_in(what: &str, process: fn(&Switch) -> u64) {
    let dir = Dir::new();
    let Some(malloc) = FailingMalloc::build(&dir) else { return };
    let (switch, pair, write) = with_file_and(&dir, &["--keep"], &malloc.envs());
    let ask = |n| ask(&switch, &dir, &write, what, n);
    // A first time, and a time to count.
    assert!(ask(0));
    // A capture whose reader was killed ends later, and a port has one at a time.
    wait_for("the end of a capture", || !has_thread(&switch, "capture"));
    const MANY: u64 = 1 << 40;
    malloc.fail(process(&switch), MANY);
    assert!(ask(1));
    let all = MANY - malloc.left();
    malloc.fail(0, 0);
    let each = std::env::var("PVSWITCH_ALLOCATIONS").is_ok_and(|value| value == "all");
    let (mut tried, mut failed, mut without) = (0, 0, 0);
    // What is asked alternates.
    while if each { without < 2 } else { 1 << tried <= all } {
        wait_until_settled(&switch);
        malloc.fail(process(&switch), if each { NEW_PATH } else { 1 << tried });
        ask(tried);
        wait_for("a reply", || switch.ctl(&["show"]).status.success());
        let is_done = malloc.left() == 0;
        malloc.fail(0, 0);
        failed += u64::from(is_done);
        without = if is_done { 0 } else { without + 1 };
        let ports = names(&switch);
        let whole = [&["a", "b", "c"][..], &["a", "b", "c", "x"], &["a", "b", "c", ADDED, "n2"]];
        assert!(whole.iter().any(|whole| ports == *whole), "{ports:?}");
        wait_for(what, || ask(tried));
        pair.wait_for_replies(&switch);
        switch.check_connected_once(&["a", "b"]);
        tried += 1;
    }
    let ended = switch.log().matches("memory allocation of ").count();
    println!("{what}: {all} allocations, {failed} of which failed, {ended} ended the process");
    assert!(ended > 0);
    pair.end();
}

#[test]
fn an_allocation_for_a_new_port_fails() {
    allocations_fail("add-port");
}

#[test]
fn an_allocation_for_a_guest_that_connects_fails() {
    allocations_fail("connect");
}

#[test]
fn an_allocation_for_a_reload_fails() {
    allocations_fail("reload");
}

#[test]
fn an_allocation_for_a_capture_fails() {
    allocations_fail("capture");
}

#[test]
fn an_allocation_for_a_query_fails() {
    allocations_fail("show");
}

#[test]
fn an_allocation_for_an_upgrade_fails() {
    allocations_fail("upgrade");
}

#[test]
fn an_allocation_of_the_process_that_takes_over_fails() {
    allocations_fail_in("upgrade", |_| NEXT);
}

#[test]
fn capture_to_a_full_disk_is_an_error_and_the_switch_continues() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ""), dir.port("b", "")]);
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    let fails = |command: Command, cause: &str| {
        let (status, error) = ended(command);
        assert_eq!(status, Some(1), "{error}");
        assert!(error.contains(cause) && error.contains("middle of a frame"), "{error}");
    };
    let ends = || wait_for("the end of the capture", || !has_thread(&switch, "capture"));
    let full = "-w /dev/full: cannot write this file: No space left on device";
    fails(capture(&switch, "a", "/dev/full"), full);
    ends();
    // A file of 32 KiB at most, in a unit of 512 bytes or of 1024.
    let file = dir.text("part.pcap");
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 32; exec \"$@\"", "sh"]);
    let command = capture(&switch, "a", &file);
    limited.arg(command.get_program()).args(command.get_args()).stderr(Stdio::piped());
    fails(limited, "File too large (os error 27); raise the limit");
    let len = std::fs::metadata(&file).unwrap().len();
    assert!([16 << 10, 32 << 10].contains(&len), "{len}");
    // The port is not captured any more, and nothing was lost.
    ends();
    captures(&switch, "a", &dir.text("a.pcap"));
    end_undisturbed(&switch, pair);
}

/// Whenever `ctl save` is killed, the file is the earlier one or the whole new one.
#[test]
fn save_that_is_killed_leaves_a_whole_file() {
    const EARLIER: &str = "# earlier\n";
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ""), dir.port("b", "")]);
    let file = dir.path("saved.toml");
    let save = || {
        let mut save = pvswitch();
        save.args(["ctl", "--control", switch.control(), "save"]).arg(&file);
        Process(save.stdout(Stdio::null()).spawn().unwrap())
    };
    let begun = Instant::now();
    assert!(save().wait().success());
    let (whole, took) = (std::fs::read_to_string(&file).unwrap(), begun.elapsed());
    let mut saved = 0;
    for n in 0..40 {
        std::fs::write(&file, EARLIER).unwrap();
        let mut save = save();
        std::thread::sleep(took * n / 30);
        save.kill();
        let left = std::fs::read_to_string(&file).unwrap();
        assert!(left == EARLIER || left == whole, "{left}");
        saved += u32::from(left == whole);
    }
    println!("saved {saved} times of 40");
    assert!(save().wait().success());
    assert_eq!(std::fs::read_to_string(&file).unwrap(), whole);
    // A new file, by a name without a folder.
    let mut save = pvswitch();
    save.args(["ctl", "--control", switch.control(), "save", "new.toml"]);
    let out = save.current_dir(dir.path("")).output().unwrap();
    assert!(out.status.success(), "{}", text(&out.stderr));
    assert_eq!(std::fs::read_to_string(dir.path("new.toml")).unwrap(), whole);
}

fn has_thread(switch: &Switch, name: &str) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", switch.pid())).unwrap();
    let of = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    tasks.flatten().filter_map(of).any(|comm| comm.trim() == name)
}

/// How long a process is stopped; `PVSWITCH_STOP_S=60`: a minute.
fn stop_time() -> Duration {
    let seconds = std::env::var("PVSWITCH_STOP_S").ok().and_then(|s| s.parse().ok());
    Duration::from_secs(seconds.unwrap_or(3))
}

#[test]
fn stopped_switch_continues_with_exact_counts_and_without_catching_up() {
    let dir = Dir::new();
    // A thousand polls a second while there are frames.
    let ports = [dir.port("a", ",poll=timer:1000"), dir.port("b", "")];
    let switch = Switch::start(&dir, &[], &ports);
    let (sender, sink) = sender_and_sink(&switch, &dir, &[]);
    switch.wait_for_frames("a", 1000);
    let empty = || switch.counter("a", "ingress", "polls_empty");
    let log = switch.log();
    let (first, began) = (empty(), Instant::now());
    signal(&switch.process.0, Signal::STOP);
    let stopped = Instant::now();
    std::thread::sleep(stop_time());
    let stopped = stopped.elapsed();
    signal(&switch.process.0, Signal::CONT);
    switch.wait_for_frames("a", 1000);
    // At most one poll without a frame in each millisecond that it ran; not those that it missed.
    let polls = u128::from(empty() - first);
    let ran = began.elapsed() - stopped;
    assert!(polls <= ran.as_millis() + 100, "{polls} polls without a frame in {ran:?}");
    assert_eq!(switch.log(), log);
    let sent = sender.end();
    let drops = |way, port: &str| -> u64 {
        let stats = switch.port("stats", port);
        let counters = stats[way][0].as_object().unwrap().iter();
        let drops = counters.filter(|(name, _)| name.starts_with("drops_"));
        drops.map(|(_, n)| n.as_u64().unwrap()).sum()
    };
    let sent = sent["sent_frames"].as_u64().unwrap();
    let dropped = || drops("egress", "b") + drops("ingress", "a");
    wait_for("all frames", || switch.counter("b", "egress", "frames") + dropped() >= sent);
    let received = sink.end()["received_frames"].as_u64().unwrap();
    assert_eq!(received + dropped(), sent);
    switch.check_connected_once(&["a", "b"]);
}

/// Bytes of a message's header, and where its length is.
const HEADER: usize = 12;

/// Reads exactly `bytes`; false: the peer closed.
fn read_exactly(from: &UnixStream, bytes: &mut [u8], fds: &mut Vec<std::os::fd::OwnedFd>) -> bool {
    let mut at = 0;
    while at < bytes.len() {
        match os::recv(from.as_fd(), &mut bytes[at..], fds, 64) {
            Ok(Received::Bytes(n)) => at += n,
            Ok(Received::Nothing) => drop(os::poll_readable(&[from.as_fd()], None)),
            _ => return false,
        }
    }
    true
}

/// Passes the messages of a front-end on to a switch, up to `whole` messages and then `bytes` of
/// the next, and what the switch replies back. Returns the lengths of the messages passed on.
fn relay(front: UnixStream, switch: UnixStream, whole: usize, bytes: usize) -> Vec<usize> {
    let (mut replies, mut to) = (switch.try_clone().unwrap(), front.try_clone().unwrap());
    let back = std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(n @ 1..) = replies.read(&mut bytes) {
            if to.write_all(&bytes[..n]).is_err() {
                break;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
    });
    let mut lengths = Vec::new();
    loop {
        let (mut message, mut fds) = (vec![0; HEADER], Vec::new());
        let is_last = lengths.len() == whole;
        if is_last && bytes == 0 || !read_exactly(&front, &mut message, &mut fds) {
            break;
        }
        let len = u32::from_ne_bytes(message[8..].try_into().unwrap());
        message.resize(HEADER + len as usize, 0);
        if !read_exactly(&front, &mut message[HEADER..], &mut fds) {
            break;
        }
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let part = if is_last { &message[..bytes] } else { &message[..] };
        if !matches!(os::send(switch.as_fd(), part, &fds), Ok(true)) || is_last {
            break;
        }
        lengths.push(message.len());
    }
    let _ = switch.shutdown(std::net::Shutdown::Both);
    back.join().unwrap();
    lengths
}

/// Descriptors and mappings of peers' memory of the switch, without the `/dev/null` that each
/// thread opens once, to signal with.
fn holds(switch: &Switch) -> [u64; 2] {
    let pid = switch.process.0.id();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let fds = fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
    let fds = fds.filter(|to| to != Path::new("/dev/null")).count();
    [fds as u64, maps.lines().filter(|line| line.contains("memfd:")).count() as u64]
}

#[test]
fn front_end_that_ends_at_any_message_or_within_it_leaves_nothing() {
    let dir = Dir::new();
    let ports = [dir.port("a", ""), dir.port("b", ""), dir.port("c", ",queues=2")];
    let switch = Switch::start(&dir, &[], &ports);
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    let before = holds(&switch);
    let listener = UnixListener::bind(dir.path("relay")).unwrap();
    let start = |args: &[&str]| {
        let guest = Gen::start(&dir.path("relay"), args);
        (guest, listener.accept().unwrap().0, UnixStream::connect(dir.path("c")).unwrap())
    };
    let is_free = || {
        let show = switch.port("show", "c");
        let used = |entry: &str| show["account"][entry]["used"] == 0;
        show["up"] == false && ["descriptors", "mappings", "mapped-bytes"].into_iter().all(used)
    };
    for ring in [&[][..], &["--packed", "--queues", "2"]] {
        let (mut guest, front, to) = start(ring);
        let all = std::thread::spawn(move || relay(front, to, usize::MAX, 0));
        switch.wait_up("c", true);
        switch.wait_for_frames("c", 20);
        guest.0.kill();
        let lengths = all.join().unwrap();
        assert!(lengths.len() > 20, "{lengths:?}");
        wait_for("the port to be free", is_free);
        for (whole, len) in lengths.iter().enumerate() {
            let part = if whole % 2 == 0 { 1 + whole % (HEADER - 1) } else { len - 1 };
            for bytes in [0, part] {
                let (_guest, front, to) = start(ring);
                let passed = relay(front, to, whole, bytes);
                assert_eq!(passed, lengths[..whole], "the same handshake");
                wait_for("the port to be free", is_free);
            }
        }
        pair.wait_for_replies(&switch);
        // The next front-end is served.
        let guest = Gen::start(&dir.path("c"), ring);
        switch.wait_up("c", true);
        switch.wait_for_frames("c", 20);
        guest.end();
        wait_for("the port to be free", is_free);
    }
    wait_for("nothing more to be held than before", || {
        holds(&switch).iter().zip(before).all(|(now, before)| *now <= before)
    });
    switch.check_connected_once(&["a", "b"]);
    pair.end();
}
