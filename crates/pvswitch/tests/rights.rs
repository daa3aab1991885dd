//! Who may use which socket: modes and groups, another user's requests, names taken by others.

mod common;

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use common::{
    Bystanders, Dir, Gen, Process, Switch, kill_and_wait, pvswitch, wait_for, wait_for_next,
    wait_until_settled,
};

const NOBODY: u32 = 65534;
/// A group of nobody's, by number: it needs no name.
const GROUP: &str = "23456";
const GROUP_ID: u32 = 23456;

/// A directory that everyone can search; `None`: not root, so that no other user can be tried.
fn rooted() -> Option<Dir> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root, to act as another user");
        return None;
    }
    let dir = Dir::new();
    std::fs::set_permissions(dir.path(""), PermissionsExt::from_mode(0o755)).unwrap();
    // The program, where user nobody can run it.
    dir.install("program", env!("CARGO_BIN_EXE_pvswitch"));
    Some(dir)
}

/// Runs the program as user nobody, in this group.
fn other(dir: &Dir, group: u32, args: &[&str]) -> Output {
    other_command(dir, group, args).output().unwrap()
}

fn other_command(dir: &Dir, group: u32, args: &[&str]) -> Command {
    let mut command = Command::new(dir.path("program"));
    command.args(args).uid(NOBODY).gid(group).env_remove("RUST_LOG").env_remove("XDG_RUNTIME_DIR");
    command
}

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into()
}

fn mode(path: &Path) -> (u32, u32) {
    let metadata = std::fs::metadata(path).unwrap();
    (metadata.mode() & 0o777, metadata.gid())
}

/// Runs the program, which must fail with this status.
fn fails(command: &mut Command, status: i32, wants: &[&str]) {
    let out = command.output().unwrap();
    let error = stderr(&out);
    assert_eq!(out.status.code(), Some(status), "{error}");
    for want in wants {
        assert!(error.contains(want), "{want:?} is not in: {error}");
    }
}

/// Issue 16, row 10: sockets have a mode and a group of their own, whatever the umask is.
#[test]
fn sockets_have_their_own_mode_and_group_under_any_umask() {
    let dir = Dir::new();
    let http = format!("unix:{}", dir.text("http"));
    let ports = [
        dir.port("plain", ""),
        dir.port("open", ",socket-mode=0666"),
        format!("x=xen-local:{}", dir.text("x")),
        format!("y=xen-local:{},socket-mode=0660", dir.text("y")),
    ];
    for umask in ["0", "077"] {
        let mut shell = Command::new("sh");
        let run = r#"umask "$0" && exec "$@""#;
        shell.args(["-c", run, umask, env!("CARGO_BIN_EXE_pvswitch"), "run", "--quiet"]);
        let control = dir.text("ctl");
        shell.args(["--control", &control, "--http", &http, "--http-mode", "0660"]);
        shell.args(ports.iter().flat_map(|port| ["--port", port]));
        let mut switch = Process(shell.spawn().unwrap());
        wait_for("the switch", || dir.path("y/xenstored").exists() && dir.path("open").exists());
        let modes = ["ctl", "plain", "open", "http", "x/hypervisor", "x/xenstored", "y/xenstored"]
            .map(|name| (name, mode(&dir.path(name)).0));
        let want = [0o600, 0o600, 0o666, 0o660, 0o600, 0o600, 0o660];
        assert_eq!(modes.map(|(_, mode)| mode), want, "umask {umask}: {modes:?}");
        assert_eq!([mode(&dir.path("x")).0, mode(&dir.path("y")).0], [0o700, 0o750]);
        assert_eq!(switch.end().code(), Some(0));
        let left: Vec<_> = std::fs::read_dir(dir.path("")).unwrap().flatten().collect();
        assert!(left.is_empty(), "names that are left: {left:?}");
    }
}

/// Scheduling policy, nice value and real-time priority of a thread: proc(5), fields 41, 19, 40.
fn scheduled(pid: u64, tid: u64) -> [i64; 3] {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/stat")).unwrap();
    // Behind the name, which may have spaces: field 3 is the first.
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    [41, 19, 40].map(|field| fields[field - 3].parse().unwrap())
}

#[test]
fn workers_alone_have_the_priority_that_the_switch_was_given() {
    let Some(dir) = rooted() else { return };
    let normal = scheduled(std::process::id().into(), std::process::id().into());
    let high = [normal[0], -20, normal[2]];
    let words = [
        ("auto", "normal", normal),
        ("normal", "normal", normal),
        ("high", "high", high),
        ("realtime", "realtime", [2, 0, 1]),
    ];
    for (word, chosen, want) in words {
        let args = ["--priority", word, "--workers", "2"];
        let switch = Switch::start(&dir, &args, &[dir.port("a", "")]);
        let show = switch.json(&["show"]);
        assert_eq!(show["priority"], chosen);
        let workers: Vec<_> = switch.json(&["stats"])["workers"].as_array().unwrap().clone();
        let of_workers: Vec<_> = workers.iter().map(|w| w["tid"].as_u64().unwrap()).collect();
        let pid = show["pid"].as_u64().unwrap();
        for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
            let tid = task.unwrap().file_name().to_str().unwrap().parse().unwrap();
            let want = if of_workers.contains(&tid) { want } else { normal };
            assert_eq!(scheduled(pid, tid)[..2], want[..2], "{word}: thread {tid} of {pid}");
            assert_eq!(scheduled(pid, tid)[2], want[2], "{word}: thread {tid} of {pid}");
        }
        assert_eq!(of_workers.len(), 2);
    }
}

#[test]
fn priority_that_the_process_may_not_give_is_an_error_that_says_what_permits_it() {
    let Some(dir) = rooted() else { return };
    let run = |word| ["run", "--quiet", "--priority", word, "--port", "n=null"];
    for (word, error, limit) in [
        ("realtime", "Operation not permitted", "LimitRTPRIO=1"),
        ("high", "Permission denied", "LimitNICE=-20"),
    ] {
        // Whatever limits this test has.
        let mut command = Command::new("prlimit");
        command.args(["--rtprio=0:0", "--nice=0:0"]).arg(dir.path("program")).args(run(word));
        command.uid(NOBODY).gid(GROUP_ID);
        fails(&mut command, 1, &[&format!("--priority {word}: {error}"), limit, "normal"]);
    }
    let mut command = pvswitch();
    fails(command.args(run("low")), 2, &["realtime"]);
}

#[test]
fn a_front_end_of_another_user_connects_by_the_group_of_the_socket() {
    let Some(dir) = rooted() else { return };
    let ports = [
        dir.port("a", &format!(",socket-group={GROUP}")),
        dir.port("b", ""),
        format!("x=xen-local:{},socket-group={GROUP}", dir.text("x")),
    ];
    let switch = Switch::start(&dir, &[], &ports);
    assert_eq!(mode(&dir.path("a")), (0o660, GROUP_ID));
    assert_eq!(mode(&dir.path("x")), (0o750, GROUP_ID));
    let connect = |kind: &str, name: &str| format!("{kind}:{}", dir.text(name));
    let attach = |to: &str| ["gen", "--mode", "sink", "--connect", to].map(String::from);
    for (kind, name) in [("vhost-user", "a"), ("xen-local", "x")] {
        let args = attach(&connect(kind, name));
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let child = other_command(&dir, GROUP_ID, &args).spawn().unwrap();
        let guest = Gen(Process(child));
        switch.wait_up(name, true);
        drop(guest);
        switch.wait_up(name, false);
    }
    // The other socket, and another group.
    for (name, group) in [("b", GROUP_ID), ("a", NOBODY)] {
        let to = connect("vhost-user", name);
        let out = other(&dir, group, &["gen", "--mode", "sink", "--connect", &to]);
        assert!(!out.status.success());
        assert!(stderr(&out).contains("permission denied"), "{}", stderr(&out));
    }
}

#[test]
fn members_of_the_control_group_read_and_may_not_change() {
    let Some(dir) = rooted() else { return };
    let args = ["--control-group", GROUP];
    let switch = Switch::start(&dir, &args, &["n=null".into()]);
    let control = dir.text("ctl");
    let ctl = |group: u32, args: &[&str]| {
        other(&dir, group, &[&["ctl", "--control", &control][..], args].concat())
    };
    for what in [&["show"][..], &["stats"], &["fdb"]] {
        let out = ctl(GROUP_ID, what);
        assert!(out.status.success(), "{what:?}: {}", stderr(&out));
    }
    let top = other(&dir, GROUP_ID, &["top", "--once", "--control", &control]);
    assert!(top.status.success(), "{}", stderr(&top));
    let changes: [&[&str]; 7] = [
        &["add-port", "m=null"],
        &["del-port", "n"],
        &["fdb", "add", "02:00:00:00:00:01", "n"],
        &["fdb", "del", "02:00:00:00:00:01"],
        &["set", "poll=event"],
        &["drain", "n"],
        &["shutdown"],
    ];
    for change in changes {
        let error = stderr(&ctl(GROUP_ID, change));
        let only = format!("refused: user {NOBODY} may only read (show, stats, ");
        let want =
            format!("). Allowed: root; with --control-write group, members of group {GROUP} too");
        assert!(error.contains(&only) && error.contains(&want), "{change:?}: {error}");
    }
    let capture = other(&dir, GROUP_ID, &["capture", "n", "-w", "-", "--control", &control]);
    assert!(stderr(&capture).contains("capture refused"), "{}", stderr(&capture));
    assert_eq!(switch.json(&["show"])["ports"].as_array().unwrap().len(), 1, "nothing changed");
    // No member: the system refuses the connection.
    let out = ctl(NOBODY, &["show"]);
    assert!(stderr(&out).contains("start the switch with --control-group"), "{}", stderr(&out));
}

#[test]
fn members_of_the_control_group_change_if_they_are_allowed_to() {
    let Some(dir) = rooted() else { return };
    let args = ["--control-group", GROUP, "--control-mode", "0666", "--control-write", "group"];
    let switch = Switch::start(&dir, &args, &["n=null".into()]);
    let control = dir.text("ctl");
    let add = |group: u32, port: &str| {
        let args = ["ctl", "--control", &control, "add-port", port];
        other(&dir, group, &args)
    };
    let out = add(GROUP_ID, "m=null");
    assert!(out.status.success(), "{}", stderr(&out));
    assert_eq!(switch.json(&["show"])["ports"].as_array().unwrap().len(), 2);
    // The mode admits everyone, to read.
    let error = stderr(&add(NOBODY, "o=null"));
    assert!(error.contains(&format!("Allowed: root and members of group {GROUP}")), "{error}");
    assert!(other(&dir, NOBODY, &["ctl", "--control", &control, "show"]).status.success());
}

/// A supplementary group counts as the first one does.
#[test]
fn supplementary_groups_count() {
    let Some(dir) = rooted() else { return };
    let args = ["--control-group", GROUP, "--control-write", "group"];
    let switch = Switch::start(&dir, &args, &["n=null".into()]);
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--groups", GROUP]);
    command.arg(dir.path("program")).args(["ctl", "--control", switch.control(), "del-port", "n"]);
    match command.output() {
        Ok(out) => assert!(out.status.success(), "{}", stderr(&out)),
        Err(error) => eprintln!("skipped: setpriv: {error}"),
    }
}

/// Started by `setpriv` (docs/install.md): no thread has the user or a capability of root, also
/// after an upgrade and a kill, and guests are served.
#[test]
fn unprivileged_switch_serves_guests_over_an_upgrade_and_a_kill() {
    let Some(dir) = rooted() else { return };
    if let Err(error) = Command::new("setpriv").arg("--version").output() {
        return eprintln!("skipped: setpriv: {error}");
    }
    chown(dir.path(""), Some(NOBODY), None).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
    command.args(["--bounding-set", "-all", "--inh-caps", "-all"]).arg(dir.path("program"));
    command.args(["run", "--quiet", "--keep", "--control", &dir.text("ctl")]);
    for name in ["a", "b"] {
        command.args(["--port", &dir.port(name, "")]);
    }
    let switch = Switch::spawn(&dir, command);
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    let check = |pid: u32| {
        let mut threads = 0;
        for thread in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
            // One that has ended meanwhile has no file.
            let Ok(status) = std::fs::read_to_string(thread.path().join("status")) else {
                continue;
            };
            let rights =
                |line: &&str| ["Uid:", "Gid:", "Cap"].iter().any(|key| line.starts_with(key));
            for line in status.lines().filter(rights) {
                let values = line.split_whitespace().skip(1);
                let none = values.clone().all(|value| value == "0000000000000000");
                assert!(none || values.clone().all(|value| value == "65534"), "{status}");
            }
            threads += 1;
        }
        assert!(threads > 0);
    };
    check(switch.process.0.id());
    let before = switch.pid();
    check(before);
    assert!(switch.ctl(&["add-port", &dir.port("c", "")]).status.success());
    assert!(switch.ctl(&["upgrade"]).status.success(), "{}", switch.log());
    let upgraded = wait_for_next(&switch, before);
    check(upgraded);
    pair.wait_for_replies(&switch);
    wait_until_settled(&switch);
    kill_and_wait(&switch);
    check(switch.pid());
    pair.wait_for_replies(&switch);
    switch.check_connected_once(&["a", "b"]);
    let guest = Gen::start(&dir.path("c"), &["--mode", "sink"]);
    switch.wait_up("c", true);
    guest.end();
    pair.end();
}

#[test]
fn a_switch_of_another_user_is_trusted_through_its_group_only() {
    let Some(dir) = rooted() else { return };
    std::fs::create_dir(dir.path("run")).unwrap();
    chown(dir.path("run"), Some(NOBODY), None).unwrap();
    let control = dir.text("run/ctl");
    let run = ["run", "--port", "n=null", "--control", &control, "--control-mode"];
    for (mode, trusted) in [("0660", true), ("0602", false)] {
        let args = [&run[..], &[mode]].concat();
        let _switch = Process(other_command(&dir, GROUP_ID, &args).spawn().unwrap());
        wait_for("its socket", || UnixStream::connect(&control).is_ok());
        let mut client = Command::new(dir.path("program"));
        client.args(["ctl", "--control", &control, "show"]).uid(65533).gid(GROUP_ID);
        let out = client.output().unwrap();
        let error = stderr(&out);
        assert_eq!(out.status.success(), trusted, "{error}");
        assert!(trusted || error.contains("Permission denied") || error.contains("refused: if"));
    }
}

#[test]
fn a_name_that_someone_else_took_is_refused() {
    let Some(dir) = rooted() else { return };
    std::fs::create_dir(dir.path("shared")).unwrap();
    std::fs::set_permissions(dir.path("shared"), PermissionsExt::from_mode(0o1777)).unwrap();
    let name = dir.text("shared/a");
    drop(UnixListener::bind(&name).unwrap());
    chown(&name, Some(NOBODY), None).unwrap();
    let taken = ["shared/a", "a file of user 65534 has that name", "directory of your own"];
    let (control, port) = (dir.text("ctl"), format!("a=vhost-user:{name}"));
    let run = ["run", "--duration", "5", "--control"];
    fails(pvswitch().args(run).args([&control, "--port", &port]), 1, &taken);
    fails(pvswitch().args(run).args([&name, "--port", "n=null"]), 1, &taken);
    let http = format!("unix:{name}");
    fails(pvswitch().args(run).args([&control, "--port", "n=null", "--http", &http]), 1, &taken);
}

/// Issue 16, row 6: a socket of this switch is not that of another process.
#[test]
fn a_second_port_on_an_own_socket_names_the_first() {
    let dir = Dir::new();
    let http = format!("unix:{}", dir.text("http"));
    let switch = Switch::start(&dir, &["--http", &http], &[dir.port("a", "")]);
    for (name, by) in [("a", "port 'a'"), ("ctl", "the control socket"), ("http", "--http")] {
        let port = format!("b=vhost-user:{}", dir.text(name));
        let error = stderr(&switch.ctl(&["add-port", &port]));
        let want = format!("port 'b': socket {} is already used by {by}", dir.text(name));
        assert!(error.contains(&want), "{error}");
    }
    let x = format!("=xen-local:{}", dir.text("x"));
    assert!(switch.ctl(&["add-port", &format!("x{x}")]).status.success());
    let error = stderr(&switch.ctl(&["add-port", &format!("y{x}")]));
    assert!(error.contains("is already used by port 'x'"), "{error}");
}

#[test]
fn invalid_permissions_name_setting_and_remedy() {
    let dir = Dir::new();
    let control = dir.text("ctl");
    let run = |args: &[&str]| {
        let mut command = pvswitch();
        command.args(["run", "--duration", "5", "--port", "n=null", "--control", &control]);
        command.args(args);
        command
    };
    let port = |options: &str| dir.port("a", options);
    fails(&mut run(&["--port", &port(",socket-mode=rw")]), 2, &["socket-mode=rw: use", "0660"]);
    let client = port(",mode=client,socket-group=kvm");
    fails(&mut run(&["--port", &client]), 2, &["socket-group: with mode=client"]);
    let none = port(",socket-group=pvs-none");
    let wants = ["port 'a': socket-group=pvs-none: this machine has no such group", "getent"];
    fails(&mut run(&["--port", &none]), 1, &wants);
    fails(&mut run(&["--control-mode", "660000"]), 2, &["control-mode=660000: use permissions"]);
    fails(&mut run(&["--control-group", "pvs-none"]), 1, &["control-group=pvs-none: this"]);
    fails(&mut run(&["--control-write", "group"]), 2, &["name the group with --control-group"]);
    fails(&mut run(&["--http", "0", "--http-mode", "0660"]), 2, &["use --http unix:PATH"]);
    let file = dir.text("x.toml");
    for (text, wants) in [
        ("control-mode = 660\n", ["x.toml:1:16:", "expected a string in octal, such as \"0660\""]),
        ("control-mode = 0o060\n", ["x.toml:1:16:", "control-mode=060: use permissions in octal"]),
        ("control-groop = \"kvm\"\n", ["x.toml:1:1:", "did you mean `control-group`?"]),
        ("control-write = \"all\"\n", ["x.toml:1:17:", "use owner (its user and root), group ("]),
    ] {
        std::fs::write(&file, text).unwrap();
        fails(&mut run(&["--config", &file]), 2, &wants);
    }
}

#[test]
fn http_on_a_unix_socket_has_the_same_rules_and_a_warning_for_all() {
    let dir = Dir::new();
    let http = format!("unix:{}", dir.text("http"));
    let file = dir.text("x.toml");
    std::fs::write(&file, format!("http = \"{http}\"\nhttp-mode = 0o666\n")).unwrap();
    let switch = Switch::start(&dir, &["--config", &file], &["n=null".into()]);
    assert_eq!(mode(&dir.path("http")).0, 0o666);
    let log = switch.log();
    assert!(log.contains("can be read by every user of this machine"), "{log}");
    let mut stream = UnixStream::connect(dir.path("http")).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.contains("pvswitch_uptime_seconds"), "{text}");
    drop(switch);
    let quiet = Switch::start(&dir, &["--http", &http], &["n=null".into()]);
    assert_eq!(mode(&dir.path("http")).0, 0o600);
    assert_eq!(quiet.log().matches("can be read by every").count(), 1, "{}", quiet.log());
}

/// The last close of a file may block for as long as its sender likes.
#[test]
fn descriptors_are_refused_at_the_control_and_http_sockets() {
    let dir = Dir::new();
    let http = dir.text("http");
    let switch = Switch::start(&dir, &["--http", &format!("unix:{http}")], &[dir.port("x", "")]);
    let (any, _other) = UnixStream::pair().unwrap();
    if !os::refuse_descriptors(any.as_fd()) {
        eprintln!("skipped: not before Linux 6.16");
        return;
    }
    for path in [switch.control(), &http] {
        let client = UnixStream::connect(path).unwrap();
        let sent = os::send(client.as_fd(), b"G", &[any.as_fd()]);
        let error = sent.expect_err("nothing here takes a descriptor");
        assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "{path}");
    }
    switch.json(&["show"]);
}
