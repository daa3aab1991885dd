//! `pvswitch vhost-user-net`: the conventions for back-end programs of vhost-user.

mod common;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::{Command, Output, Stdio};

use common::{Dir, Gen, Process, Switch, pvswitch, wait_for};

const ECHO: [&str; 6] = ["--mode", "echo", "--mac", "02:00:00:00:00:02", "--peer", ASKS];
const ASKS: &str = "02:00:00:00:00:01";

/// A switch with an echo behind port `b`.
fn world() -> (Dir, Switch, Gen) {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("b", "")]);
    let echo = Gen::start(&dir.path("b"), &ECHO);
    switch.wait_up("b", true);
    (dir, switch, echo)
}

fn backend(switch: &Switch, args: &[&str]) -> Command {
    let mut command = pvswitch();
    command.args(["vhost-user-net", "--control", switch.control()]).args(args);
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// A guest asks the echo, and gets replies.
fn ask(socket: &std::path::Path) -> u64 {
    let how = ["--mode", "rr", "--mac", ASKS, "--peer", "02:00:00:00:00:02", "--frames", "500"];
    let report = Gen::start(socket, &how).report();
    report["received_frames"].as_u64().unwrap()
}

fn names(switch: &Switch) -> Vec<String> {
    let show = switch.json(&["show"]);
    let ports = show["ports"].as_array().unwrap().iter();
    ports.map(|port| port["name"].as_str().unwrap().into()).collect()
}

/// The program ends with status 0 once its guest has gone, and its port with it.
fn ended(switch: &Switch, mut program: Process) {
    let status = program.wait();
    assert!(status.success(), "{status}");
    assert_eq!(names(switch), ["b"]);
}

#[test]
fn guest_of_a_socket_path_reaches_others_on_the_switch() {
    let (dir, switch, _echo) = world();
    let socket = dir.text("guest.sock");
    let args = ["--socket-path", &socket, "--port", "web,weight=3"];
    let program = Process(backend(&switch, &args).spawn().unwrap());
    wait_for("its socket", || names(&switch) == ["b", "web"]);
    assert_eq!(ask(&dir.path("guest.sock")), 500);
    ended(&switch, program);
    assert!(!dir.path("guest.sock").exists() && !dir.path("web.sock").exists());
}

#[test]
fn guest_of_an_inherited_descriptor_reaches_others_on_the_switch() {
    let (dir, switch, _echo) = world();
    let listener = UnixListener::bind(dir.path("guest.sock")).unwrap();
    let front = std::thread::scope(|scope| {
        let front = scope.spawn(|| ask(&dir.path("guest.sock")));
        let guest = OwnedFd::from(listener.accept().unwrap().0);
        // As management software does it: descriptor 7 of a program named by the conventions.
        let link = dir.path("vhost-user-net");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_pvswitch"), &link).unwrap();
        let script = "exec \"$0\" --fd=7 --control \"$1\" 7<&0 0</dev/null";
        let mut program = Command::new("sh");
        program.args(["-c", script]).arg(link).arg(switch.control()).stdin(guest);
        let program = Process(program.spawn().unwrap());
        let replies = front.join().unwrap();
        ended(&switch, program);
        replies
    });
    assert_eq!(front, 500);
}

#[test]
fn signal_ends_it_and_the_switch_that_ends_is_an_error() {
    let (dir, switch, _echo) = world();
    let socket = dir.text("guest.sock");
    let start = || Process(backend(&switch, &["--socket-path", &socket]).spawn().unwrap());
    // Without a guest, and with one.
    let mut program = start();
    wait_for("its port", || names(&switch).len() == 2);
    assert!(program.end().success());
    assert_eq!(names(&switch), ["b"]);
    let mut program = start();
    wait_for("its port", || names(&switch).len() == 2);
    let name = names(&switch)[1].clone();
    assert!(name.starts_with("vhu-"), "{name}");
    let _guest = Gen::start(&dir.path("guest.sock"), &["--mode", "sink"]);
    switch.wait_up(&name, true);
    assert!(switch.ctl(&["del-port", &name]).status.success());
    assert_eq!(program.wait().code(), Some(1));
}

#[test]
fn capabilities_name_the_type_of_device() {
    let args = ["vhost-user-net", "--print-capabilities", "--virgl", "--fd=99"];
    let out = pvswitch().args(args).output().unwrap();
    assert!(out.status.success());
    let value: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(value, serde_json::json!({"type": "net"}));
    // The descriptor file names the same type, and the program by its conventional name.
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../plugins/qemu/50-pvswitch-net.json");
    let file: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    assert_eq!(
        (&file["type"], &file["binary"]),
        (&"net".into(), &"/usr/libexec/vhost-user-net".into())
    );
}

#[test]
fn bad_arguments_are_refused_and_leave_no_port() {
    let (dir, switch, _echo) = world();
    let run = |args: &[&str]| -> Output { backend(&switch, args).output().unwrap() };
    let socket = dir.text("guest.sock");
    let path = ["--socket-path", &socket];
    for (args, status, reason) in [
        (vec![], 2, "--fd"),
        (vec!["--fd=3", "--socket-path=/x"], 2, "cannot be used with"),
        (vec!["--fd=99"], 2, "--fd 99: Bad file descriptor"),
        (vec!["--fd=2"], 2, "--fd 2: not a Unix stream socket"),
        (vec!["--fd=x"], 2, "invalid value"),
        (vec!["--socket-path=/nonexistent/x"], 1, "/nonexistent"),
        ([&path[..], &["--port", "b"]].concat(), 1, "'b'"),
        ([&path[..], &["--port", "../b"]].concat(), 2, "NAME[,key=value]"),
        ([&path[..], &["--port", "x,wieght=3"]].concat(), 2, "wieght"),
    ] {
        let out = run(&args);
        let error = String::from_utf8(out.stderr).unwrap();
        assert!(error.contains(reason) && out.status.code() == Some(status), "{args:?}: {error}");
        assert_eq!(names(&switch), ["b"], "{args:?}");
    }
}
