//! The program as a new user and an operator meets it: rows of issue 16's table, by number.

mod common;

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use common::{Dir, Gen, Process, Switch, pvswitch, signal, wait_for};
use rustix::process::Signal;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

fn stderr(out: &Output) -> String {
    String::from_utf8_lossy(&out.stderr).into()
}

fn stdout(out: &Output) -> String {
    String::from_utf8_lossy(&out.stdout).into()
}

/// A new pseudo-terminal: both ends.
fn terminal() -> (File, File) {
    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let slave = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    (master.into(), slave)
}

#[test]
fn row_6_errors_of_the_file_to_write_are_about_the_file() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &["n=null".into()]);
    let capture = |file: &str| {
        let mut command = pvswitch();
        command.args(["capture", "n", "--control", switch.control(), "-w", file]);
        command.output().unwrap()
    };
    let out = capture(&dir.text("none/x"));
    assert_eq!(out.status.code(), Some(1));
    let error = stderr(&out);
    assert!(error.contains("none/x: cannot write this file"), "{error}");
    assert!(error.contains("create it, or choose another path"), "{error}");
    assert!(stderr(&capture(&dir.text(""))).contains("cannot write this file"));
    // A port that does not exist leaves no file, and an existing one as it is.
    let wrong = |file: &str| {
        let args = ["capture", "m", "--control", switch.control(), "-w", file];
        pvswitch().args(args).output().unwrap()
    };
    assert!(stderr(&wrong(&dir.text("new"))).contains("no port 'm'"));
    assert!(!dir.path("new").exists());
    std::fs::write(dir.path("old"), "precious").unwrap();
    assert!(stderr(&wrong(&dir.text("old"))).contains("no port 'm'"));
    assert_eq!(std::fs::read(dir.path("old")).unwrap(), b"precious");
    let file = dir.text("x");
    let mut command = pvswitch();
    command.args(["capture", "n", "--control", switch.control(), "-w", &file]);
    let mut good = Process(command.spawn().unwrap());
    wait_for("a capture", || std::fs::metadata(&file).is_ok_and(|file| file.len() > 0));
    signal(&good.0, Signal::INT);
    assert_eq!(good.wait().code(), Some(0));
}

#[test]
fn row_6_a_setting_without_a_value_is_an_error() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", "")]);
    let out = switch.ctl(&["set", "a"]);
    assert_eq!(out.status.code(), Some(1));
    let error = stderr(&out);
    assert!(error.contains("no setting given: use KEY=VALUE; known here: poll, call"), "{error}");
    for (mac, want) in [
        ("01:00:5e:00:00:01", "is a multicast address"),
        ("ff:ff:ff:ff:ff:ff", "is the broadcast address"),
    ] {
        let error = stderr(&switch.ctl(&["fdb", "add", mac, "a"]));
        assert!(error.contains(want), "{error}");
    }
}

#[test]
fn row_7_tables_are_aligned_and_fit_100_columns() {
    let dir = Dir::new();
    let name = "a-long-name-015";
    let switch = Switch::start(&dir, &[], &[dir.port(name, ""), dir.port("b", "")]);
    for (mac, port) in [("02:00:00:00:00:01", "b"), ("02:00:00:00:00:02", name)] {
        assert!(switch.ctl(&["fdb", "add", mac, port, "--vlan", "7"]).status.success());
    }
    let fdb = stdout(&switch.ctl(&["fdb"]));
    let places: Vec<_> = fdb.lines().map(|line| line.find("PORT").or(line.find("  7  "))).collect();
    assert_eq!(places[0].map(|at| at - 5), places[1], "{fdb}");
    assert_eq!(places[1], places[2], "{fdb}");
    for what in ["stats", "show", "fdb"] {
        let text = stdout(&switch.ctl(&[what]));
        let wide = text.lines().filter(|line| !line.contains("vhost-user:"));
        assert!(wide.clone().all(|line| line.len() <= 100), "{text}");
        for one in ["1 ports", "1 workers", "1 queues"] {
            assert!(!text.contains(&format!(" {one}")), "{text}");
        }
    }
    assert!(switch.log().contains("switching between 2 ports with 1 worker,"), "{}", switch.log());
}

#[test]
fn row_8_a_port_without_a_front_end_differs_from_one_without_a_driver() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--http", "0"], &[dir.port("a", ""), dir.port("b", "")]);
    let state = |name: &str| switch.port("show", name)["state"].as_str().unwrap().to_string();
    let row = |name: &str| {
        let text = stdout(&switch.ctl(&["show", name]));
        text.lines()
            .find(|line| line.starts_with(&format!("{name} ")))
            .expect("its row")
            .to_string()
    };
    assert_eq!(state("a"), "unconnected");
    assert!(row("a").contains(" unconnected "), "{}", row("a"));
    let idle = UnixStream::connect(dir.path("a")).unwrap();
    wait_for("the connection", || state("a") == "no-driver");
    assert!(row("a").contains(" no-driver "), "{}", row("a"));
    let metrics = metrics(&switch);
    for line in [
        r#"pvswitch_port_connected{port="a"} 1"#,
        r#"pvswitch_port_connected{port="b"} 0"#,
        r#"pvswitch_port_stalled_seconds{port="a"} 0"#,
        r#"pvswitch_fdb_entries{kind="learned"} 0"#,
        "pvswitch_fdb_capacity 65536",
    ] {
        assert!(metrics.lines().any(|other| other == line), "{line} is not in {metrics}");
    }
    let top = pvswitch().args(["top", "--once", "--control", switch.control()]).output().unwrap();
    assert!(stdout(&top).contains("no-driver") && stdout(&top).contains("unconnected"));
    drop(idle);
    wait_for("its end", || state("a") == "unconnected");
    let _sink = Gen::start(&dir.path("b"), &["--mode", "sink"]);
    wait_for("the driver", || state("b") == "up");
}

fn metrics(switch: &Switch) -> String {
    use std::io::{Read, Write};
    let url = switch.json(&["show"])["http"].as_str().unwrap().to_string();
    let address = url.trim_start_matches("http://").trim_end_matches('/');
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn row_8_one_port_can_be_shown() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("vm1", ""), dir.port("vm2", "")]);
    let text = stdout(&switch.ctl(&["show", "vm1"]));
    assert!(text.contains("vm1") && !text.contains("vm2"), "{text}");
    assert!(text.contains("addresses: 0 learned and 0 static, of at most 65536"), "{text}");
    assert!(text.contains("mapped-bytes") && text.contains("messages"), "its account: {text}");
    let stats = stdout(&switch.ctl(&["stats", "vm2"]));
    assert!(stats.contains("vm2") && !stats.contains("vm1"), "{stats}");
    let json = switch.json(&["show", "vm1"]);
    assert_eq!(json["ports"].as_array().unwrap().len(), 1);
    assert_eq!((&json["ports"][0]["addresses"], &json["fdb"]["learned"]), (&0.into(), &0.into()));
    for what in ["show", "stats"] {
        let out = switch.ctl(&[what, "vm3"]);
        assert_eq!(out.status.code(), Some(1));
        assert!(stderr(&out).contains("no port 'vm3' (did you mean 'vm"), "{}", stderr(&out));
    }
}

/// A receiver that is stopped and a sender that continues: the receiver shows the losses.
#[test]
fn row_8_a_full_receiver_shows_what_its_senders_lose() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("from", ""), dir.port("to", "")]);
    let sink = Gen::start(&dir.path("to"), &["--mode", "sink", "--mac", "02:00:00:00:00:02"]);
    switch.wait_up("to", true);
    assert!(switch.ctl(&["fdb", "add", "02:00:00:00:00:02", "to"]).status.success());
    signal(&sink.0.0, Signal::STOP);
    let sender = Gen::start(&dir.path("from"), &["--rate", "20k"]);
    wait_for("losses", || switch.counter("to", "egress", "lost_no_room") > 0);
    let text = stdout(&switch.ctl(&["stats", "to"]));
    assert!(text.contains("lost_no_room (of senders, to guest): "), "{text}");
    let top = pvswitch().args(["top", "--once", "--control", switch.control()]).output().unwrap();
    let top = stdout(&top);
    assert!(top.lines().any(|line| line.starts_with("to ") && line.contains("to:lost_")), "{top}");
    signal(&sink.0.0, Signal::CONT);
    drop(sender);
}

#[test]
fn row_9_a_capture_is_not_written_to_a_terminal_and_prints_a_count() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ""), dir.port("b", "")]);
    let (_master, slave) = terminal();
    let mut command = pvswitch();
    command.args(["capture", "b", "--control", switch.control()]).stdout(slave);
    let out = command.stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(2), "{}", stderr(&out));
    assert!(stderr(&out).contains("use -w FILE, or a pipe: pvswitch capture b | wireshark"));
    let _sink = Gen::start(&dir.path("b"), &["--mode", "sink"]);
    switch.wait_up("b", true);
    let file = dir.text("b.pcapng");
    let mut command = pvswitch();
    command.args(["capture", "b", "--control", switch.control(), "-w", &file]);
    let child = command.stderr(Stdio::piped()).spawn().unwrap();
    wait_for("the file's header", || std::fs::metadata(&file).is_ok_and(|m| m.len() > 0));
    Gen::start(&dir.path("a"), &["--frames", "100", "--rate", "5k"]).report();
    wait_for("frames", || switch.counter("b", "egress", "frames") >= 100);
    std::thread::sleep(Duration::from_millis(300));
    signal(&child, Signal::INT);
    let out = child.wait_with_output().unwrap();
    let text = stderr(&out);
    assert!(out.status.success(), "{text}");
    let frames = text.strip_prefix("captured ").and_then(|rest| rest.split(' ').next());
    let frames = frames.and_then(|n| n.parse::<u64>().ok()).expect(&text);
    assert!((100..=110).contains(&frames) && text.contains(" frames to "), "{text}");
}

#[test]
fn row_9_the_version_names_the_build() {
    let out = pvswitch().arg("--version").output().unwrap();
    let text = stdout(&out);
    let version = concat!("pvswitch ", env!("CARGO_PKG_VERSION"), " (");
    assert!(text.starts_with(version), "{text}");
    assert!(text.contains("(commit ") || text.contains("(debug build)"), "{text}");
    let build = text.lines().nth(1).expect(&text);
    assert!(build.starts_with("build: profile "), "{text}");
    for part in [", opt-level ", ", rustc 1.", "-linux-", ", CPU features ", ", flags "] {
        assert!(build.contains(part), "{text}");
    }
    // The short form is one line.
    let short = stdout(&pvswitch().arg("-V").output().unwrap());
    assert_eq!(short.lines().collect::<Vec<_>>(), [text.lines().next().unwrap()]);
}

/// Every TOML example of the documents is a valid file, with ports or an include directory.
#[test]
fn row_9_toml_examples_of_the_documents_are_valid() {
    let dir = Dir::new();
    std::fs::create_dir(dir.path("pvswitch.d")).unwrap();
    let documents = [
        "README.md",
        "docs/settings.md",
        "docs/configuration.md",
        "docs/install.md",
        "docs/guests/libvirt.md",
    ];
    for document in documents {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");
        let text = std::fs::read_to_string(format!("{path}{document}")).unwrap();
        let examples: Vec<_> = text.split("```toml\n").skip(1).collect();
        assert!(!examples.is_empty(), "{document} has no TOML example");
        for example in examples {
            let (example, _) = example.split_once("```").unwrap();
            let file = dir.path("example.toml");
            std::fs::write(&file, example).unwrap();
            let parsed = api::file::File::load(&file).map_err(|error| error.to_string());
            let has_ports = !parsed.expect("valid").config.ports.is_empty();
            assert!(has_ports || example.contains("include = "), "{document}: {example}");
        }
    }
}

/// A TAP that is to persist keeps its address while the switch is restarted.
#[test]
fn row_10_a_persistent_tap_keeps_its_address_over_a_restart() {
    let tap = format!("pvsk{}", std::process::id() % 100_000);
    let ip = |args: &[&str]| Command::new("ip").args(args).output();
    let root = rustix::process::geteuid().is_root();
    if !root || !std::path::Path::new("/dev/net/tun").exists() || ip(&["link"]).is_err() {
        eprintln!("skipped: needs root, /dev/net/tun and ip");
        return;
    }
    let dir = Dir::new();
    let port = [format!("host=tap:{tap},persist=on")];
    let mut switch = Switch::start(&dir, &[], &port);
    let add = ip(&["addr", "add", "198.51.100.1/24", "dev", &tap]).unwrap();
    assert!(add.status.success(), "{}", stderr(&add));
    assert_eq!(switch.process.end().code(), Some(0));
    let address = || stdout(&ip(&["-4", "addr", "show", "dev", &tap]).unwrap());
    assert!(address().contains("198.51.100.1/24"), "{}", address());
    let mut switch = Switch::start(&dir, &[], &port);
    wait_for("the interface", || address().contains("198.51.100.1/24"));
    assert_eq!(switch.process.end().code(), Some(0));
    // Off again: the interface goes with the switch.
    let mut switch = Switch::start(&dir, &[], &[format!("host=tap:{tap},persist=off")]);
    assert!(address().contains("198.51.100.1/24"));
    assert_eq!(switch.process.end().code(), Some(0));
    wait_for("its end", || !ip(&["link", "show", &tap]).unwrap().status.success());
}
