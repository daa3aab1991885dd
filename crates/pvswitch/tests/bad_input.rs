//! Invalid input of operators: exit status, and a message that says what, where and what to do.

mod common;

use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use common::{Dir, Switch, pvswitch, wait_for};
use serde_json::{Value, json};

const USAGE: i32 = 2;
const FAILURE: i32 = 1;

/// Runs `command`, which must exit by itself, and checks its status and message.
fn fails(mut command: Command, status: i32, wants: &[&str]) {
    let out = command.output().unwrap();
    let error = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(status), "{command:?}: {error}");
    for want in wants {
        assert!(error.contains(want), "{want:?} is not in the message of {command:?}: {error}");
    }
    assert!(!error.contains("panicked"), "{error}");
}

fn command(args: &[&str]) -> Command {
    let mut command = pvswitch();
    command.args(args);
    command
}

/// `run` with these arguments, a control socket in `dir`, and a duration in case it starts.
fn run(dir: &Dir, args: &[&str]) -> Command {
    let mut command = command(&["run", "--control", &dir.text("ctl")]);
    if !args.iter().any(|arg| arg.starts_with("--duration")) {
        command.args(["--duration", "5"]);
    }
    command.args(args);
    command
}

#[test]
fn invalid_socket_paths() {
    let dir = Dir::new();
    let _busy = UnixListener::bind(dir.path("busy")).unwrap();
    std::fs::write(dir.path("file"), "precious").unwrap();
    let port = |path: &str| format!("a=vhost-user:{path}");
    let busy = port(&dir.text("busy"));
    fails(run(&dir, &["--port", &busy]), FAILURE, &["/busy", "another process listens there"]);
    let file = port(&dir.text("file"));
    fails(
        run(&dir, &["--port", &file]),
        FAILURE,
        &["/file", "is not a socket; choose another path"],
    );
    assert_eq!(std::fs::read(dir.path("file")).unwrap(), b"precious");
    let missing = port(&dir.text("no/such/dir"));
    fails(run(&dir, &["--port", &missing]), FAILURE, &["directory does not exist; create it"]);
    let long = port(&format!("/tmp/{}", "x".repeat(110)));
    fails(run(&dir, &["--port", &long]), USAGE, &["115 bytes long", "use a shorter directory"]);
    fails(run(&dir, &["--port", "a=vhost-user:"]), USAGE, &["no socket path"]);
    let long = format!("/tmp/{}", "x".repeat(110));
    fails(command(&["run", "--control", &long]), FAILURE, &["use a shorter one"]);
}

#[test]
fn sockets_of_a_killed_switch_are_reused() {
    let dir = Dir::new();
    let ports = [dir.port("a", "")];
    let mut first = Switch::start(&dir, &[], &ports);
    let control = dir.text("ctl");
    let args = ["run", "--duration", "5", "--control", &control];
    fails(command(&args), FAILURE, &["/ctl", "another process listens there"]);
    first.process.kill();
    assert!(dir.path("a").exists());
    drop(Switch::start(&dir, &[], &ports));
}

#[test]
fn invalid_interfaces() {
    let dir = Dir::new();
    fails(run(&dir, &["--port", "t=tap:much-too-long-name"]), USAGE, &["1 to 15 characters"]);
    fails(run(&dir, &["--port", "t=tap:"]), USAGE, &["interface name ''"]);
    let root = rustix::process::getuid().is_root();
    let tun = std::path::Path::new("/dev/net/tun").exists();
    if !root || !tun {
        eprintln!("skipped: needs root and /dev/net/tun");
        return;
    }
    let lo = ["--port", "t=tap:lo"];
    fails(run(&dir, &lo), FAILURE, &["port 't'", "lo"]);
    let nowhere = ["--port", "t=tap:pvs-none,netns=/dev/null"];
    fails(run(&dir, &nowhere), FAILURE, &["port 't'", "/dev/null is not a network namespace"]);
    // Without root: the message names the missing capability.
    let control = std::env::temp_dir().join(format!("pvs-nobody-{}", std::process::id()));
    let mut nobody = command(&["run", "--duration", "5", "--port", "t=tap:pvs-none", "--control"]);
    nobody.arg(control).uid(65534).gid(65534);
    if nobody.status().is_err() {
        eprintln!("skipped: user nobody cannot run the program");
        return;
    }
    fails(nobody, FAILURE, &["port 't'", "CAP_NET_ADMIN"]);
    let mut nic = command(&["nic", "--connect", "vhost-user:/tmp/x", "--tap", "pvs-none"]);
    nic.uid(65534).gid(65534);
    fails(nic, FAILURE, &["CAP_NET_ADMIN"]);
}

#[test]
fn invalid_options() {
    let dir = Dir::new();
    let bad: [(&[&str], &str); 20] = [
        (&["--poll", "evnt"], "unknown policy 'evnt': use one of event, napi[:BUDGET]"),
        (&["--workers", "0"], "1..=63"),
        (&["--workers", "64"], "1..=63"),
        (&["--placement", "everywhere"], "possible values: single, group, per-port"),
        (&["--forward", "bridge"], "possible values: switch, cross"),
        (&["--cpus", "99999"], "no such CPU"),
        (&["--cpus", "one"], "--cpus"),
        (&["--duration=-1"], "invalid duration"),
        (&["--duration=nan"], "invalid duration"),
        (&["--duration=1e19"], "invalid duration"),
        (&["--prot", "a=null"], "--port"),
        (&["--port", "null"], "use NAME=KIND:ARG"),
        (&["--port", "a=vhostuser:/tmp/a"], "did you mean 'vhost-user'?"),
        (&["--port", "a=pcap:/tmp/a"], "not supported by this version"),
        (&["--port", "a=xen:1"], "use xen:DOMID/DEVID"),
        (
            &["--port", "a=xen:auto,tap=tap0"],
            "tap=tap0: use off (its frames are switched), vif (its",
        ),
        (&["--port", "a=xen:1/0,tap=vif"], "use xen:auto,tap=vif"),
        (&["--port", "a=xen-local:"], "use xen-local:DIR"),
        (&["--port", "a=vhost-user:/tmp/a,queus=2"], "did you mean 'queues'?"),
        (&["--port", "a=null", "--port", "a=null"], "port 'a' exists already"),
    ];
    for (args, want) in bad {
        fails(run(&dir, args), USAGE, &[want]);
    }
    fails(command(&["run"]), USAGE, &["no ports: add --port"]);
    fails(command(&["rum"]), USAGE, &["'run'"]);
    fails(command(&[]), USAGE, &["Usage"]);
}

#[test]
fn configuration_errors_name_line_column_and_the_nearest_key() {
    let dir = Dir::new();
    let file = dir.text("x.toml");
    let bad: [(&str, &[&str]); 11] = [
        ("poll = \"event\"\nworkrs = 2\n", &["x.toml:2:1:", "did you mean `workers`?"]),
        ("\n  poll = \"evnt\"\n", &["x.toml:2:10:", "use one of event"]),
        ("[port.a]\nkind = \"vhost-usr\"\n", &["did you mean `vhost-user`?"]),
        ("[port.a]\nkind = \"vhost-user\"\nsokket = \"/tmp/a\"\n", &["did you mean `socket`?"]),
        ("[port.a]\nkind = \"vhost-user\"\n", &["socket"]),
        ("[port.a]\nkind=\"vhost-user\"\nsocket=\"/tmp/a\"\nqueues=99\n", &["port 'a'", "1 to 16"]),
        ("[port.a]\nkind = \"null\"\n[port.a]\nkind = \"null\"\n", &["x.toml:3:", "duplicate"]),
        ("workers = 200\n[port.a]\nkind = \"null\"\n", &["workers=200: use 1 to 63"]),
        ("forward = \"cros\"\n[port.a]\nkind = \"null\"\n", &["did you mean 'cross'?"]),
        ("placement = \"grup\"\n[port.a]\nkind = \"null\"\n", &["did you mean 'group'?"]),
        ("workers = \n", &["x.toml:1:"]),
    ];
    for (text, wants) in bad {
        std::fs::write(&file, text).unwrap();
        fails(run(&dir, &["--config", &file]), USAGE, wants);
    }
    let none = dir.text("none.toml");
    fails(run(&dir, &["--config", &none]), USAGE, &["cannot read configuration", "none.toml"]);
    std::fs::write(&file, "[port.a]\nkind = \"null\"\n").unwrap();
    let twice = ["--config", &file, "--port", "a=null"];
    fails(run(&dir, &twice), USAGE, &["port 'a' exists already: give each port its own name"]);
    std::fs::write(&file, "[static]\n\"02:00:00:00:00:01\" = \"b\"\n[port.bb]\nkind=\"null\"\n")
        .unwrap();
    fails(
        run(&dir, &["--config", &file]),
        USAGE,
        &["x.toml:2:1: ", "no port 'b' (did you mean 'bb'?)"],
    );
}

#[test]
fn requests_without_a_running_switch() {
    let dir = Dir::new();
    let nowhere = dir.text("ctl");
    for what in ["show", "stats", "fdb", "shutdown"] {
        let wants = ["cannot reach a switch at", "is `pvswitch run` running"];
        fails(command(&["ctl", "--control", &nowhere, what]), FAILURE, &wants);
    }
    fails(command(&["capture", "a", "--control", &nowhere]), FAILURE, &["cannot reach a switch"]);
    fails(command(&["ctl", "--control", &nowhere, "add-port", "nonsense"]), USAGE, &["NAME=KIND"]);
    fails(command(&["ctl", "stast"]), USAGE, &["'stats'"]);
}

#[test]
fn guests_that_cannot_connect() {
    let dir = Dir::new();
    let socket = format!("vhost-user:{}", dir.text("a"));
    let long = format!("vhost-user:/tmp/{}", "x".repeat(110));
    let file = format!("vhost-user:{},mode=server", dir.text("file"));
    std::fs::write(dir.path("file"), "precious").unwrap();
    let spec = "use vhost-user:SOCKET[,mode=client|server]";
    for connect in ["", "/tmp/a", "vhost-usr:/tmp/a", "vhost-user:", "vhost-user:/a,mode=x", &long]
    {
        fails(command(&["gen", "--connect", connect]), USAGE, &[spec]);
        fails(command(&["nic", "--tap", "x", "--connect", connect]), USAGE, &[spec]);
    }
    fails(
        command(&["gen", "--connect", &file]),
        FAILURE,
        &["is not a socket; choose another path"],
    );
    let many: Vec<_> = (0..65).map(|n| format!("01:00:5e:00:00:{n:02x}")).collect();
    for (groups, want) in [
        ("01:00:5e:00:00", "'01:00:5e:00:00' is not a MAC address; use multicast="),
        ("02:00:00:00:00:01", "is not a multicast address"),
        ("33:33:00:00:00:01+33:33:00:00:00:01", "is listed twice; list it once"),
        (&many.join("+"), "65 addresses, but back ends accept at most 64; list fewer"),
    ] {
        let connect = format!("xen-local:/tmp/x,multicast={groups}");
        let wants = ["--connect xen-local:/tmp/x,multicast=", want];
        fails(command(&["gen", "--connect", &connect]), USAGE, &wants);
        fails(command(&["nic", "--tap", "x", "--connect", &connect]), USAGE, &wants);
    }
    let bad: [(&[&str], &str); 43] = [
        (&["--queues", "0"], "0 is not in 1..=16"),
        (&["--queues", "17"], "17 is not in 1..=16"),
        (&["--burst", "0"], "FRAMES,GAP_US"),
        (&["--burst", "4"], "add --rate"),
        (&["--burst", "4,9", "--rate", "1k"], "use one of them"),
        (&["--on-off", "5"], "ON_MS,OFF_MS"),
        (&["--tick", "5"], "--tick: add --rate"),
        (&["--tick", "0", "--rate", "1k"], "0 is not in 1..=1000000"),
        (&["--tick", "1000001", "--rate", "1k"], "is not in 1..=1000000"),
        (&["--cpu", "99999"], "no such CPU"),
        (&["--count", "3"], "only with --mode idle"),
        (&["--count", "3", "--mode", "idle"], "write {} for the number"),
        (&["--mode", "idle", "--count", "0"], "1..=65536"),
        (&["--queue-size", "1", "--set", "header=apart"], "needs 2 descriptors"),
        (&["--queue-size", "0"], "1 to 32768"),
        (&["--queue-size", "100"], "a power of two unless --packed"),
        (&["--size", "20"], "invalid frame size '20'"),
        (&["--rate", "fast"], "invalid rate 'fast'"),
        (&["--mac", "nonsense"], "not a MAC address"),
        (&["--mode", "hostile=lops"], "no case 'lops' (did you mean 'loops'?)"),
        (&["--mode", "hostile=commits"], "no such case for split and socket"),
        (&["--also", "02:00:00:00:00:01,0"], "use MAC,N"),
        (&["--mode", "shout"], "possible values: send, sink, echo, rr, pass, trial, migrate, idle"),
        (&["--mode", "pass"], "for 2 ports write {} for the number"),
        (&["--mode", "pass", "--rate", "1k"], "--rate: not with --mode pass"),
        (&["--mode", "pass", "--replay"], "--replay: not with --mode pass"),
        (&["--mode", "pass", "--size", "imix"], "one size with --mode pass"),
        (&["--mode", "pass", "--hdr", "x"], "--hdr: not with --mode pass"),
        (&["--mode", "trial"], "for 2 ports write {} for the number"),
        (&["--mode", "trial", "--frames", "9"], "--frames: not with --mode trial"),
        (&["--mode", "trial", "--check"], "--check: not with --mode trial"),
        (&["--mode", "trial", "--warm-up=-1"], "for 2 ports write {}"),
        (&["--mode", "trial", "--addresses", "2"], "for 2 ports write {}"),
        (&["--mode", "sink", "--addresses", "2"], "--addresses: only with --mode send and trial"),
        (&["--addresses", "3", "--flows", "2"], "--flows: fewer than --addresses"),
        (&["--addresses", "70000"], "--addresses: at most 65535 with --mode send"),
        (&["--mode", "pass", "--both-ways"], "--both-ways: only with --mode trial"),
        (&["--mode", "idle", "--hdr", "x"], "--hdr: not with --mode idle"),
        (&["--mode", "echo", "--frames", "9"], "--frames: only with --mode send, sink and rr"),
        (&["--mode", "idle", "--frames", "9"], "--frames: only with --mode send, sink and rr"),
        (&["--interval=-1"], "invalid duration"),
        (&["--interval=0"], "--interval 0"),
        (&["--duration=nan"], "invalid duration"),
    ];
    for (args, want) in bad {
        fails(command(&[&["gen", "--connect", &socket], args].concat()), USAGE, &[want]);
    }
}

#[test]
fn a_guest_that_waits_for_its_switch_prints_what_to_start() {
    let dir = Dir::new();
    let mut waits = pvswitch();
    waits.args(["gen", "--connect", &format!("vhost-user:{}", dir.text("a"))]);
    let mut child = waits.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let advice = "no process listens there; start the other side first, or listen here \
                  (mode=server), and connect from there (mode=client)";
    assert!(line.contains("waiting for the switch") && line.contains(advice), "{line}");
}

#[test]
fn more_queues_than_a_port_has() {
    let dir = Dir::new();
    for (name, kind) in [("a", "vhost-user"), ("b", "xen-local")] {
        let at = format!("{kind}:{}", dir.text(name));
        for (options, wanted, has) in [("queues=1", "2", "1"), ("queues=2", "3", "2")] {
            let switch = Switch::start(&dir, &[], &[format!("{name}={at},{options}")]);
            let sink = ["gen", "--mode", "sink", "--connect", &at, "--queues"];
            let wants = if name == "a" {
                [format!("{wanted} queue pairs requested"), format!("has {has}: request fewer")]
            } else {
                [format!("{wanted} queues requested"), format!("has {has}: request fewer")]
            };
            let wants = wants.each_ref().map(String::as_str);
            fails(command(&[&sink[..], &[wanted]].concat()), FAILURE, &wants);
            // The port still works.
            let fits = command(&[&sink[..], &[has, "--duration", "0.1"]].concat()).output();
            assert!(fits.as_ref().is_ok_and(|out| out.status.success()), "{fits:?}");
            drop(switch);
        }
    }
}

#[test]
fn invalid_driver_settings() {
    let dir = Dir::new();
    let socket = format!("vhost-user:{}", dir.text("a"));
    let replay: [(&[&str], &str); 5] = [
        (&["--mode", "echo"], "only with --mode send and --mode sink"),
        (&["--rate", "5k"], "cannot be used with '--rate"),
        (&["--packed"], "cannot be used with '--packed'"),
        (&["--set", "tx-full=queue:1"], "--set tx-full=queue: not with --replay"),
        (&["--connect", "xen-local:/nowhere"], "only with --connect vhost-user:SOCKET"),
    ];
    for (args, want) in replay {
        let to: &[&str] = if args[0] == "--connect" { &[] } else { &["--connect", &socket] };
        fails(command(&[&["gen", "--replay"], to, args].concat()), USAGE, &[want]);
    }
    let bad: [(&[&str], &str); 11] = [
        (&["--set", "tx-complete=orphan"], "did you mean 'tx-completion'?"),
        (&["--set", "nonsense=1"], "known: tx-completion, tx-full, rx-refill, header, offset"),
        (&["--set", "tx-completion=on-half"], "use orphan, before-tx, timer:HZ, on-empty"),
        (&["--set", "tx-completion=timer:20001"], "from 1 to 20000"),
        (&["--set", "offset=65"], "0 to 64"),
        (&["--set", "suppress=flag"], "did you mean 'flags'?"),
        (&["--set", "checks"], "use on, off"),
        (&["--set", "tx-burst=0"], "1 to 64"),
        (&["--set", "rx-buffer=1500"], "2048 to 4096"),
        (&["--poll", "tmer"], "use one of event, napi"),
        (&["--kick", "coalesce:5"], "coalesce:USECS,FRAMES"),
    ];
    for (args, want) in bad {
        fails(command(&[&["gen", "--connect", &socket], args].concat()), USAGE, &[want]);
        let nic = ["nic", "--tap", "pvs-none", "--connect", &socket];
        fails(command(&[&nic, args].concat()), USAGE, &[want]);
    }
}

#[test]
fn the_same_address_on_two_ports_of_a_vlan_is_a_warning_of_check_and_start() {
    const MAC: &str = "mac = \"02:00:00:00:00:07\"";
    let dir = Dir::new();
    let port = |name: &str, options: &str| {
        let socket = format!("socket = \"/x/{name}\"");
        format!(
            "[port.{name}]
kind = \"vhost-user\"
{socket}
{MAC}
{options}
"
        )
    };
    let of = |a: &str, b: &str| port("a", a) + &port("b", b);
    let warned = |text: String| {
        std::fs::write(dir.path("x.toml"), text).unwrap();
        let out = command(&["check", &dir.text("x.toml")]).output().unwrap();
        assert_eq!(out.status.code(), Some(0));
        let text = String::from_utf8(out.stderr).unwrap();
        text.matches("port 'b': mac=02:00:00:00:00:07 is also set for port 'a'").count()
    };
    for (a, b, warnings) in [
        ("", "", 1),
        ("vlan = 5", "vlan = 5", 1),
        ("trunk = [4, 5]", "vlan = 5", 1),
        ("trunk = [4]\nnative = 5", "vlan = 5", 1),
        ("trunk = [4, 5]", "trunk = \"1-9\"", 1),
        ("vlan = 5", "vlan = 6", 0),
        ("vlan = 5", "", 0),
        ("trunk = [4, 5]", "trunk = [6]\nnative = 7", 0),
    ] {
        assert_eq!(warned(of(a, b)), warnings, "{a} {b}");
    }
    let ports = ["a", "b"].map(|name| dir.port(name, ",vlan=5,mac=02:00:00:00:00:07"));
    let switch = Switch::start(&dir, &[], &ports);
    wait_for("the warning", || switch.log().contains("is also set for port 'a', in the same VLAN"));
}

#[test]
fn changes_at_run_time_return_and_log_the_warnings_of_check() {
    let dir = Dir::new();
    let file = dir.text("x.toml");
    let port = |name: &str| {
        let socket = dir.text(name);
        let mac = "02:00:00:00:00:07";
        format!("[port.{name}]\nkind = \"vhost-user\"\nsocket = \"{socket}\"\nmac = \"{mac}\"\n")
    };
    std::fs::write(&file, port("a")).unwrap();
    let switch = Switch::start(&dir, &["--config", &file], &[]);
    let logged = || switch.log().matches("is also set for port").count();
    let what = |warnings: &Value| {
        let one = warnings.as_array().filter(|all| all.len() == 1).expect("one warning");
        one[0]["what"].as_str().unwrap().to_string()
    };

    let mut both = port("a") + &port("b");
    std::fs::write(&file, &both).unwrap();
    let dry = switch.json(&["reload", "--dry-run"]);
    assert_eq!(logged(), 0, "nothing was changed");
    let reply = switch.json(&["reload"]);
    assert_eq!(reply["warnings"], dry["warnings"]);
    assert!(what(&reply["warnings"]).contains("port 'b': mac=02:00:00:00:00:07 is also set"));
    let place = ["file", "line"].map(|key| reply["warnings"][0][key].clone());
    assert_eq!(place, [json!(file), json!(8)]);
    wait_for("the warning", || logged() == 1);

    let third = dir.port("c", ",mac=02:00:00:00:00:07,vlan=5");
    let reply = switch.json(&["add-port", &third]);
    // The others carry all VLANs, beside this one.
    assert_eq!(reply["warnings"].as_array().unwrap().len(), 2, "{reply}");
    let out = switch.ctl(&["set", "c", "vlan=none"]);
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.success() && text.starts_with("warning: port 'c': mac=02:"), "{text}");
    wait_for("the warning", || logged() == 2);
    // None is new: 204, without a body.
    assert_eq!(switch.json(&["set", "c", "weight=2"]), json!({ "ok": true }));
    assert_eq!(logged(), 2);

    both += "isolated = 7\n";
    std::fs::write(&file, both).unwrap();
    assert_eq!(switch.ctl(&["reload"]).status.code(), Some(1));
    assert_eq!(logged(), 2);
}

#[test]
fn port_without_its_option_is_an_error_with_a_hint() {
    let run = |arg: &str| {
        let out = command(&["run", arg]).output().unwrap();
        assert_eq!(out.status.code(), Some(USAGE));
        String::from_utf8(out.stderr).unwrap()
    };
    for port in ["vm1=vhost-user:/run/vm1.sock,queues=2", "n=null"] {
        let error = run(port);
        assert!(error.contains(&format!("tip: to add a port, use '--port {port}'")), "{error}");
    }
    for other in ["vm1", "poll=spin", "--prot=n=null"] {
        let error = run(other);
        assert!(!error.contains("to add a port"), "{error}");
    }
}
