//! `pvswitch check`, `ctl reload`, SIGHUP and `ctl save`.

mod common;

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Output;

use common::{Dir, Gen, Process, Switch, may_make_taps, pvswitch, signal, wait_for};
use rustix::process::Signal;
use serde_json::{Value, json};

/// A switch with a configuration file.
struct World {
    dir: Dir,
    switch: Switch,
}

impl World {
    /// `{dir}` in the text stands for the directory of sockets.
    fn new(text: &str) -> Self {
        Self::with(text, &[], &[])
    }

    fn with(text: &str, args: &[&str], ports: &[String]) -> Self {
        let dir = Dir::new();
        write(&dir, "x.toml", text);
        let file = dir.text("x.toml");
        let switch = Switch::start(&dir, &[&["--config", &file], args].concat(), ports);
        Self { dir, switch }
    }

    fn write(&self, text: &str) {
        write(&self.dir, "x.toml", text);
    }

    fn reload(&self, text: &str) -> Value {
        self.write(text);
        self.switch.json(&["reload"])
    }

    /// A reload that must fail and change nothing. Returns the message.
    fn refused(&self, text: &str) -> String {
        let before = self.state();
        self.write(text);
        let out = self.switch.ctl(&["reload"]);
        let error = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{error}");
        assert_eq!(self.state(), before, "after: {error}");
        error
    }

    /// All of the configuration that the program shows.
    fn state(&self) -> Value {
        let show = self.switch.json(&["show"]);
        let keys = ["name", "id", "kind", "queues", "connected", "connections", "faults"];
        let ports = show["ports"].as_array().unwrap().iter();
        let ports =
            ports.map(|port| keys.map(|key| port[key].clone()).into()).collect::<Vec<Value>>();
        // The kernel of a TAP sends frames at any time.
        let is_tap = |port: &&Value| port["kind"].as_str().unwrap().starts_with("tap");
        let taps = show["ports"].as_array().unwrap().iter().filter(is_tap);
        let taps: Vec<_> = taps.map(|port| &port["name"]).collect();
        let fdb = self.switch.json(&["fdb"]);
        let addresses = fdb["entries"].as_array().unwrap().iter();
        let addresses = addresses.filter(|entry| !taps.contains(&&entry["port"])).count();
        let files = std::fs::read_dir(self.dir.path("")).unwrap();
        let mut files: Vec<_> = files.map(|f| f.unwrap().file_name()).collect();
        files.sort_unstable();
        let files: Vec<_> = files.iter().map(|name| name.to_string_lossy()).collect();
        json!({
            "switch": [show["poll"], show["call"], show["placement"], show["pid"]],
            "ports": ports,
            "save": self.save(),
            "fdb": addresses,
            "tuning": self.tuning(),
            "files": files,
        })
    }

    /// Open descriptors; that of the last client may be among them.
    fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.switch.process.0.id())).unwrap().count()
    }

    fn save(&self) -> String {
        String::from_utf8(self.switch.ctl(&["save", "-"]).stdout).unwrap()
    }

    /// Options of all queues as the workers see them.
    fn tuning(&self) -> Value {
        let stats = self.switch.json(&["stats"]);
        let ports = stats["ports"].as_array().unwrap().iter().map(|port| {
            let queues = |way: &str, keys: [&str; 2]| {
                let queues = port[way].as_array().unwrap().iter();
                queues
                    .map(|queue| keys.map(|key| queue[key].clone()).into())
                    .collect::<Vec<Value>>()
            };
            let (ingress, egress) = (queues("ingress", ["poll", "weight"]), ["call", "hold"]);
            json!([port["name"], ingress, queues("egress", egress)])
        });
        ports.collect()
    }

    fn limit(&self, port: &str, name: &str) -> u64 {
        self.switch.port("show", port)["account"][name]["limit"].as_u64().unwrap()
    }
}

fn write(dir: &Dir, name: &str, text: &str) -> PathBuf {
    let (path, new) = (dir.path(name), dir.path("new"));
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&new, text.replace("{dir}", &dir.text(""))).unwrap();
    std::fs::rename(new, &path).unwrap();
    path
}

fn check(args: &[&str]) -> Output {
    pvswitch().arg("check").args(args).output().unwrap()
}

fn vhost(name: &str, options: &str) -> String {
    format!("[port.{name}]\nkind = \"vhost-user\"\nsocket = \"{{dir}}/{name}\"\n{options}\n")
}

/// Folder of the workspace.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().parent().unwrap()
}

#[test]
fn examples_are_valid() {
    let files = std::fs::read_dir(root().join("examples")).unwrap();
    let files = files.map(|entry| entry.unwrap().path());
    let files: Vec<_> =
        files.filter(|path| path.extension().is_some_and(|e| e == "toml")).collect();
    assert_eq!(files.len(), 4);
    for path in files {
        let out = check(&[&path.display().to_string()]);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.lines().count() <= 80, "{}", path.display());
    }
    let many = root().join("examples/many-tenants.toml").display().to_string();
    let out = check(&["--json", &many]);
    let shown: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(shown["ok"], true);
    assert_eq!((&shown["ports"], &shown["included"]), (&3.into(), &2.into()));
}

#[test]
fn check_warns_of_a_port_without_vlan_beside_ports_with_one() {
    let dir = Dir::new();
    let warned = |text: String| {
        let file = write(&dir, "x.toml", &text).display().to_string();
        let out = check(&[&file]);
        assert_eq!(out.status.code(), Some(0));
        let shown: Value = serde_json::from_slice(&check(&["--json", &file]).stdout).unwrap();
        let warnings = shown["warnings"].as_array().unwrap().len();
        let text = String::from_utf8(out.stderr).unwrap();
        assert_eq!(text.lines().count(), warnings, "{text}");
        text
    };
    let (access, trunk) = (vhost("a", "vlan = 5"), vhost("t", "trunk = [5, \"7-9\"]"));
    let text = warned(format!("{access}{trunk}{}", vhost("b", "")));
    assert!(text.contains("x.toml:9:7: port 'b' carries all VLANs, but port 'a'"), "{text}");
    assert_eq!(warned(format!("{access}{trunk}")), "");
    assert_eq!(warned(vhost("a", "") + &vhost("b", "")), "");
    // A mirror port receives copies only, and sends nothing.
    let mirrored = vhost("a", "vlan = 5\nmirror-to = \"m\"");
    assert_eq!(warned(mirrored + &vhost("m", "")), "");
}

#[test]
fn check_reports_all_errors_and_opens_nothing() {
    let dir = Dir::new();
    let valid = write(&dir, "x.toml", &vhost("a", ""));
    let out = check(&[&valid.display().to_string()]);
    assert_eq!(out.status.code(), Some(0));
    assert!(String::from_utf8(out.stdout).unwrap().ends_with("x.toml: valid, 1 port\n"));
    assert!(!dir.path("a").exists());
    let text = "workers = 0\n[port.a]\nkind = \"null\"\nwait = 3\n";
    let invalid = write(&dir, "y.toml", text).display().to_string();
    let out = check(&[&invalid]);
    assert_eq!(out.status.code(), Some(1));
    let error = String::from_utf8(out.stderr).unwrap();
    assert!(error.contains("y.toml:1:11: workers=0: use 1 to 63\n"), "{error}");
    assert!(error.contains("y.toml:4:1: port 'a': unknown field `wait`"), "{error}");
    let out = check(&["--json", &invalid]);
    assert_eq!(out.status.code(), Some(1));
    let shown: Value = serde_json::from_slice(&out.stdout).unwrap();
    let problems = shown["problems"].as_array().unwrap();
    assert_eq!((shown["ok"].clone(), problems.len()), (false.into(), 2));
    let at = |i: usize| (problems[i]["line"].clone(), problems[i]["column"].clone());
    assert_eq!((at(0), at(1)), ((1.into(), 11.into()), (4.into(), 1.into())));
    assert!(problems[0]["file"].as_str().unwrap().ends_with("y.toml"));
    // `run` reports the same.
    let out = pvswitch().args(["run", "--config", &invalid]).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8(out.stderr).unwrap().contains(error.trim()));
    for (args, status) in [
        (vec!["/nonexistent.toml"], 1),
        (vec![], 2),
        (vec!["--schema", "x"], 2),
        (vec!["a", "b"], 2),
    ] {
        assert_eq!(check(&args).status.code(), Some(status), "{args:?}");
    }
}

#[test]
fn the_committed_schema_is_what_check_prints() {
    let committed = std::fs::read_to_string(root().join(api::json_schema::PATH)).unwrap();
    let out = check(&["--schema"]);
    let printed = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success() && printed == committed, "run cargo xtask settings");
}

#[test]
fn a_reload_applies_what_differs_and_nothing_else() {
    let first = format!(
        "poll = \"event\"\n[static]\n\"02:00:00:00:00:01\" = \"a\"\n{}{}{}{}",
        vhost("a", "weight = 2\n\"poll/0\" = \"spin\"\nlimit-messages = 50"),
        vhost("b", ""),
        vhost("c", ""),
        "[port.n]\nkind = \"null\"\n"
    );
    let world = World::new(&first);
    let switch = &world.switch;
    let ids = || {
        let show = switch.json(&["show"]);
        let ports = show["ports"].as_array().unwrap().iter();
        ports.map(|p| format!("{} {}", p["name"].as_str().unwrap(), p["id"])).collect::<Vec<_>>()
    };
    assert_eq!(ids(), ["a 0", "b 1", "c 2", "n 3"]);
    let nothing = switch.json(&["reload"]);
    assert_eq!((&nothing["added"], &nothing["changed"]), (&json!([]), &json!([])));
    let second = format!(
        "poll = \"napi:8\"\n[static]\n\"02:00:00:00:00:01\" = \"c\"\n\
         \"02:00:00:00:00:02/7\" = \"d\"\n{}{}{}{}",
        vhost("a", "hold = 3\n\"call/0\" = \"timer:500\""),
        vhost("c", "queues = 2\nweight = 5"),
        vhost("d", "mode = \"client\""),
        "[port.n]\nkind = \"null\"\n"
    );
    world.write(&second);
    let before = world.state();
    let dry = switch.json(&["reload", "--dry-run"]);
    assert_eq!(world.state(), before, "a dry run changed something");
    let done = switch.json(&["reload"]);
    for key in ["added", "removed", "replaced", "changed", "settings", "static", "static_removed"] {
        assert_eq!(dry[key], done[key], "{key}");
    }
    assert_eq!(done["added"], json!(["d"]));
    assert_eq!(done["removed"], json!(["b"]));
    let replaced = json!([{ "name": "c", "settings": [
        { "setting": "queues", "from": "1", "to": "2" },
        { "setting": "weight", "from": "1", "to": "5" },
    ]}]);
    assert_eq!(done["replaced"], replaced);
    assert_eq!(done["changed"][0]["name"], "a");
    assert_eq!(done["settings"], json!([{ "setting": "poll", "from": "event", "to": "napi:8" }]));
    assert_eq!(ids(), ["a 0", "c 2", "n 3", "d 4"]);
    let want = json!([
        ["a", [["napi:8", 1]], [["timer:500", 3]]],
        ["c", [["napi:8", 5], ["napi:8", 5]], [["event", 256], ["event", 256]]],
        ["n", [], [["event", 256]]],
        ["d", [["napi:8", 1]], [["event", 256]]],
    ]);
    assert_eq!(world.tuning(), want);
    assert_eq!(world.limit("a", "messages"), 4000, "the default again");
    let entries = switch.json(&["fdb"])["entries"].clone();
    let at = |mac: &str| {
        let entry = entries.as_array().unwrap().iter().find(|e| e["mac"] == mac).unwrap();
        (entry["port"].clone(), entry["vlan"].clone(), entry["static"].clone())
    };
    assert_eq!(at("02:00:00:00:00:01"), ("c".into(), 0.into(), true.into()));
    assert_eq!(at("02:00:00:00:00:02"), ("d".into(), 7.into(), true.into()));
    assert!(!world.dir.path("b").exists() && world.dir.path("c").exists());
    // As text.
    world.write(&first);
    let out = String::from_utf8(switch.ctl(&["reload"]).stdout).unwrap();
    for want in [
        "x.toml: reloaded\n",
        "removed   d\n",
        "added     b\n",
        "replaced  c: queues 2 -> 1, weight 5 -> 1\n",
        "changed   a: ",
        "limit-messages default (4000 per second, burst 8000) -> 50",
        "switch    poll napi:8 -> event\n",
        "static    02:00:00:00:00:01 set to a\n",
    ] {
        assert!(out.contains(want), "{want}: {out}");
    }
    assert_eq!(world.limit("a", "messages"), 50);
    let out = String::from_utf8(switch.ctl(&["reload"]).stdout).unwrap();
    assert!(out.ends_with("x.toml: no difference\n"), "{out}");
    assert_eq!(world.tuning()[0], json!(["a", [["spin", 2]], [["event", 256]]]));
}

#[test]
fn changes_at_run_time_are_undone_by_a_reload_and_kept_by_save() {
    let text = format!("{}{}", vhost("a", "weight = 2"), vhost("b", ""));
    let world = World::with(&text, &["--call", "timer:100"], &[]);
    let (switch, dir) = (&world.switch, &world.dir);
    let before = world.state();
    let change = |args: &[&str]| assert!(switch.ctl(args).status.success(), "{args:?}");
    change(&["add-port", &dir.port("x", ",queues=2,poll/1=spin")]);
    change(&["add-port", "y=null"]);
    change(&["del-port", "y"]);
    let out = switch.ctl(&["add-port", &dir.port("x", "").replacen('x', "z", 1)]);
    let error = String::from_utf8(out.stderr).unwrap();
    assert!(
        error.contains("port 'z': socket") && error.contains("is already used by port 'x'"),
        "{error}"
    );
    change(&["set", "a", "weight=7", "limit-messages=5"]);
    change(&["set", "x/1", "weight=3", "call=event"]);
    change(&["set", "placement=single", "poll=napi"]);
    change(&["fdb", "add", "02:00:00:00:00:09", "b", "--vlan", "3"]);
    let saved = world.save();
    for want in [
        "call = \"timer:100\"",
        "poll = \"napi\"",
        "placement = \"single\"",
        "\"02:00:00:00:00:09/3\" = \"b\"",
        "[port.x]",
        "weight = 7",
        "\"weight/1\" = 3",
        "limit-messages = 5",
    ] {
        assert!(saved.contains(want), "{want}: {saved}");
    }
    assert!(!saved.contains("poll/1") && !saved.contains("[port.y]"), "{saved}");
    let tuning = world.tuning();
    let elsewhere = Dir::new();
    let out = switch.ctl(&["save", &elsewhere.text("saved.toml")]);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let done = switch.json(&["reload"]);
    assert_eq!((&done["removed"], &done["added"]), (&json!(["x"]), &json!([])));
    let after = world.state();
    assert_eq!(after, before);
    // A new switch with the saved file is the same.
    let World { switch: mut first, dir } = world;
    assert!(first.process.end().success());
    let second = Switch::start(&dir, &["--config", &elsewhere.text("saved.toml")], &[]);
    let world = World { dir, switch: second };
    assert_eq!((world.tuning(), world.save()), (tuning, saved));
    assert_eq!(world.limit("a", "messages"), 5);
    // Into the file that it was started from, which stays the same.
    let out = String::from_utf8(world.switch.ctl(&["save"]).stdout).unwrap();
    assert!(out.ends_with("saved.toml: saved\n"), "{out}");
    let out = String::from_utf8(world.switch.ctl(&["reload"]).stdout).unwrap();
    assert!(out.ends_with("no difference\n"), "{out}");
}

#[test]
fn save_overwrites_only_what_it_is_allowed_to() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", "")]);
    let fails = |switch: &Switch, args: &[&str], want: &str| {
        let out = switch.ctl(args);
        let error = String::from_utf8(out.stderr).unwrap();
        assert!(!out.status.success() && error.contains(want), "{args:?}: {error}");
    };
    fails(&switch, &["save"], "started without --config: name a file");
    fails(&switch, &["save", "/dev/null"], "not a regular file");
    fails(&switch, &["save", &dir.text("no/x.toml")], "cannot save to");
    fails(&switch, &["reload"], "started without --config FILE");
    signal(&switch.process.0, Signal::HUP);
    wait_for("the log", || switch.log().contains("SIGHUP ignored: there is no configuration file"));
    drop(switch);
    let include = format!("include = \"x.d\"\n{}", vhost("m", ""));
    std::fs::create_dir_all(dir.path("x.d")).unwrap();
    let file = write(&dir, "x.toml", &include).display().to_string();
    let switch = Switch::start(&dir, &["--config", &file], &[]);
    fails(&switch, &["save"], "includes the files of");
    assert!(switch.ctl(&["save", &dir.text("all.toml")]).status.success());
    assert_eq!(check(&[&dir.text("all.toml")]).status.code(), Some(0));
    // A port of the command line would be added twice at the next start.
    drop(switch);
    let file = dir.text("all.toml");
    let switch = Switch::start(&dir, &["--config", &file], &[dir.port("c1", "")]);
    fails(&switch, &["save"], "the ports of the command line of `run` (c1) would be in");
    // In cross mode a file connects ports in the order of their names.
    drop(switch);
    let ports = [dir.port("b", ""), dir.port("a", "")];
    let switch = Switch::start(&dir, &["--forward", "cross"], &ports);
    fails(&switch, &["save", "-"], "forward=cross connects the ports of a file in the order");
}

#[test]
fn save_does_not_let_a_switch_of_another_user_choose_the_file() {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::process::CommandExt as _;
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return;
    }
    let dir = Dir::new();
    let all = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(dir.path(""), all).unwrap();
    let control = dir.text("ctl");
    let file = write(&dir, "x.toml", "[port.n]\nkind = \"null\"\n").display().to_string();
    let mut nobody = pvswitch();
    nobody.args(["run", "--quiet", "--control", &control, "--config", &file]);
    let Ok(child) = nobody.uid(65534).gid(65534).spawn() else {
        eprintln!("skipped: user nobody cannot run the program");
        return;
    };
    let _switch = Process(child);
    let ctl = |args: &[&str]| pvswitch().args(["ctl", "--control", &control]).args(args).output();
    wait_for("the switch", || ctl(&["show"]).unwrap().status.success());
    let out = ctl(&["save"]).unwrap();
    let error = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(2), "{error}");
    assert!(error.contains("the switch is run by user 65534: name a file"), "{error}");
    assert!(ctl(&["save", &dir.text("y.toml")]).unwrap().status.success());
}

#[test]
fn a_reload_that_fails_changes_nothing() {
    let first = format!(
        "[static]\n\"02:00:00:00:00:01\" = \"a\"\n{}{}{}",
        vhost("a", "weight = 2"),
        vhost("b", ""),
        vhost("c", "")
    );
    let world = World::new(&first);
    let front = UnixStream::connect(world.dir.path("a")).unwrap();
    wait_for("a front-end", || world.switch.port("show", "a")["connected"] == true);
    let descriptors = world.descriptors();
    // Everything changes, and the last port has no directory for its socket.
    let last = "[port.z]\nkind = \"vhost-user\"\nsocket = \"{dir}/none/z\"\n";
    let all = format!(
        "poll = \"spin\"\n[static]\n\"02:00:00:00:00:01\" = \"z\"\n\
         \"02:00:00:00:00:02\" = \"c\"\n{}{}{}{}{last}",
        vhost("a", "weight = 3\nqueues = 2"),
        vhost("c", "hold = 1"),
        vhost("d", ""),
        "[port.l]\nkind = \"xen-local\"\ndirectory = \"{dir}/l\"\n",
    );
    let error = world.refused(&all.replace("{dir}/l\"", "{dir}/local/l\""));
    assert!(error.contains("cannot create: No such file"), "{error}");
    let error = world.refused(&all);
    assert!(error.contains("directory does not exist"), "{error}");
    // A second listener of another process.
    let _busy = std::os::unix::net::UnixListener::bind(world.dir.path("busy")).unwrap();
    let error = world.refused(&all.replace("{dir}/none/z", "{dir}/busy"));
    assert!(error.contains("another process listens there"), "{error}");
    for (from, to, want) in [
        ("weight = 2", "weight = 200", "x.toml:6:10: port 'a': weight=200: use 1 to 100"),
        ("weight = 2", "weigth = 2", "did you mean `weight`?"),
        ("weight = 2", "weight = [2]", "invalid type: array"),
        ("[static]", "workers = 2\n[static]", "a restart of the switch is needed for workers"),
        (
            "[static]",
            "http = 1\nageing = 5\n[static]",
            "http (default (not served) -> 127.0.0.1:1),",
        ),
        ("[static]", "forward = \"cross\"\n[static]", "forward (switch -> cross)"),
        ("= \"a\"", "= \"q\"", "static address 02:00:00:00:00:01: no port 'q'"),
        ("[port.b]", "[port.a]", "duplicate key"),
        ("{dir}/b", "{dir}/a", "is already used by port 'a'"),
        ("[port.b]", "[port.'../b']", "port '../b': name '../b' must be"),
    ] {
        let error = world.refused(&first.replacen(from, to, 1));
        assert!(error.contains(want), "{to}: {error}");
    }
    let error = world.refused("");
    assert!(error.contains("is empty; if it is still being written"), "{error}");
    std::fs::remove_file(world.dir.path("x.toml")).unwrap();
    let out = world.switch.ctl(&["reload"]);
    let error = String::from_utf8(out.stderr).unwrap();
    assert!(error.contains("cannot read configuration"), "{error}");
    // The file cut anywhere is read or rejected; then the whole file is no difference.
    for cut in (1..first.len()).step_by(29) {
        world.write(&first[..cut]);
        world.switch.ctl(&["reload", "--dry-run"]);
    }
    world.write(&first);
    let out = String::from_utf8(world.switch.ctl(&["reload"]).stdout).unwrap();
    assert!(out.ends_with("no difference\n"), "{out}");
    wait_for("descriptors to be closed", || world.descriptors() <= descriptors);
    assert_eq!(world.switch.port("show", "a")["connections"], 1, "that of the test");
    drop(front);
}

#[test]
fn sighup_reloads_the_file() {
    let world = World::new(&vhost("a", ""));
    world.write(&(vhost("a", "weight = 4") + &vhost("b", "")));
    signal(&world.switch.process.0, Signal::HUP);
    wait_for("the new port", || world.switch.port("show", "b")["name"] == "b");
    assert_eq!(world.tuning()[0], json!(["a", [["adaptive", 4]], [["event", 256]]]));
    assert!(world.switch.log().contains("ports added: 1, changed: 1"), "{}", world.switch.log());
    world.write("workers = x\n");
    signal(&world.switch.process.0, Signal::HUP);
    let wanted = "SIGHUP: nothing was changed: ";
    wait_for("an error", || world.switch.log().contains(wanted));
    assert!(world.switch.log().contains("x.toml:1:"), "{}", world.switch.log());
    // On the socket, programs get the position.
    let mut socket = UnixStream::connect(world.switch.control()).unwrap();
    let request = "POST /v1/reload HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    socket.write_all(request.as_bytes()).unwrap();
    let reply = std::io::read_to_string(socket).unwrap();
    assert!(reply.starts_with("HTTP/1.1 422 "), "{reply}");
    let reply: Value = serde_json::from_str(reply.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!((&reply["status"], &reply["problems"][0]["line"]), (&422.into(), &1.into()));
}

#[test]
fn ports_of_the_command_line_and_of_the_include_directory() {
    let dir = Dir::new();
    let file = write(&dir, "x.toml", "include = \"x.d\"\nweight = 1\n");
    let text = file.display().to_string();
    assert_eq!(check(&[&text]).status.code(), Some(1), "an unknown key, and no directory");
    write(&dir, "x.toml", "include = \"x.d\"\n");
    write(&dir, "x.d/a.toml", &vhost("a", ""));
    let own = [dir.port("cmd", ",weight=3")];
    let switch = Switch::start(&dir, &["--config", &text], &own);
    let world = World { dir, switch };
    write(&world.dir, "x.d/b.toml", &vhost("b", ""));
    let done = world.switch.json(&["reload"]);
    assert_eq!((&done["added"], &done["removed"]), (&json!(["b"]), &json!([])));
    std::fs::remove_file(world.dir.path("x.d/a.toml")).unwrap();
    let done = world.switch.json(&["reload"]);
    assert_eq!((&done["added"], &done["removed"]), (&json!([]), &json!(["a"])));
    // The command line takes precedence: its port cannot be in the file, too.
    write(&world.dir, "x.d/c.toml", &vhost("cmd", ""));
    let out = world.switch.ctl(&["reload", "--json"]);
    let error = String::from_utf8(out.stderr).unwrap();
    assert!(error.contains("c.toml:1:7: port 'cmd' exists already"), "{error}");
    std::fs::remove_dir_all(world.dir.path("x.d")).unwrap();
    let error = String::from_utf8(world.switch.ctl(&["reload"]).stderr).unwrap();
    assert!(error.contains("it is the `include` directory"), "{error}");
    assert_eq!(world.switch.json(&["show"])["ports"].as_array().unwrap().len(), 2);
}

#[test]
fn a_replaced_port_keeps_its_socket_and_ports_may_exchange_theirs() {
    let text = format!("{}{}", vhost("a", ""), vhost("b", ""));
    let world = World::new(&text);
    let inode = |name: &str| {
        use std::os::unix::fs::MetadataExt as _;
        std::fs::metadata(world.dir.path(name)).unwrap().ino()
    };
    let inodes = [inode("a"), inode("b")];
    let sink = Gen::start(&world.dir.path("a"), &["--mode", "sink"]);
    world.switch.wait_up("a", true);
    world.reload(&format!("{}{}", vhost("a", "mtu = 1400"), vhost("b", "")));
    assert!(!world.switch.is_up("a"), "its guest has been disconnected");
    drop(sink);
    // Exchanged, and a third port takes over the name of the first.
    let swapped = text
        .replace("{dir}/a", "{dir}/x")
        .replace("{dir}/b", "{dir}/a")
        .replace("{dir}/x", "{dir}/b");
    world.reload(&swapped);
    assert_eq!([inode("a"), inode("b")], inodes);
    for (socket, port) in [("a", "b"), ("b", "a")] {
        let _sink = Gen::start(&world.dir.path(socket), &["--mode", "sink"]);
        world.switch.wait_up(port, true);
    }
    // Renamed: the socket goes to another port.
    let done = world.reload(&vhost("a", "").replace("[port.a]", "[port.c]"));
    assert_eq!((&done["added"], &done["removed"]), (&json!(["c"]), &json!(["a", "b"])));
    assert!(!world.dir.path("b").exists() && inode("a") == inodes[0]);
    let _sink = Gen::start(&world.dir.path("a"), &["--mode", "sink"]);
    world.switch.wait_up("c", true);
    // The other end listens from now on: our socket is removed.
    world.reload(&vhost("a", "mode = \"client\"").replace("[port.a]", "[port.c]"));
    assert!(!world.dir.path("a").exists());
}

#[test]
fn rules_of_a_port_follow_the_file_while_its_guest_stays_connected() {
    let world = World::new(&vhost("a", ""));
    let guest = Gen::start(&world.dir.path("a"), &["--mode", "sink"]);
    world.switch.wait_up("a", true);
    let rules = || world.switch.json(&["show"])["ports"][0]["rules"].clone();
    assert_eq!(rules(), Value::Null);
    let reply = world.reload(&vhost("a", "ip = \"10.0.0.1\"\nisolated = true\nvlan = 7"));
    assert_eq!(reply["changed"][0]["name"], "a", "{reply}");
    assert_eq!(reply["replaced"], json!([]), "{reply}");
    assert_eq!(rules(), json!({ "ip": "10.0.0.1", "isolated": "on", "vlan": "7" }));
    let error = world.refused(&vhost("a", "vlan = 7\ntrunk = \"8+9\""));
    assert!(error.contains("trunk"), "{error}");
    world.reload(&vhost("a", ""));
    assert_eq!(rules(), Value::Null);
    assert!(world.switch.is_up("a"));
    drop(guest);
}

#[test]
fn a_socket_that_stays_gets_its_new_permissions() {
    use std::os::unix::fs::MetadataExt;
    let of = |world: &World, name: &str| {
        let stat = std::fs::metadata(world.dir.path(name)).unwrap();
        (stat.ino(), stat.mode() & 0o7777)
    };
    let open = "socket-mode = \"0666\"";
    let world = World::new(&(vhost("a", "") + &vhost("b", "")));
    let (inode, mode) = of(&world, "a");
    assert_eq!(mode, 0o600);
    world.reload(&(vhost("a", open) + &vhost("b", "")));
    assert_eq!(of(&world, "a"), (inode, 0o666), "the same socket");
    world.reload(&(vhost("a", "") + &vhost("b", "")));
    assert_eq!(of(&world, "a"), (inode, 0o600));

    // Another file in the place of one of two sockets: neither is changed.
    std::fs::remove_file(world.dir.path("b")).unwrap();
    std::fs::write(world.dir.path("b"), "").unwrap();
    let foreign = of(&world, "b");
    let error = world.refused(&(vhost("a", open) + &vhost("b", open)));
    assert!(error.contains("/b") && error.contains("another file"), "{error}");
    assert_eq!((of(&world, "a"), of(&world, "b")), ((inode, 0o600), foreign));
}

#[test]
fn ports_of_other_kinds_are_replaced_and_undone() {
    let local = |name: &str, dir: &str, options: &str| {
        format!("[port.{name}]\nkind = \"xen-local\"\ndirectory = \"{{dir}}/{dir}\"\n{options}\n")
    };
    let world = World::new(&(local("l", "one", "") + "[port.n]\nkind = \"null\"\n"));
    let connect = |dir: &str| {
        let at = format!("xen-local:{}", world.dir.text(dir));
        let gen_ = Gen::connect(&at, &["--mode", "sink"]);
        world.switch.wait_up("l", true);
        drop(gen_);
    };
    connect("one");
    // The same directory with other options, another directory, and the kinds exchanged.
    world.reload(&(local("l", "one", "queues = 2") + "[port.n]\nkind = \"null\"\n"));
    connect("one");
    world.reload(&(local("l", "two", "") + "[port.n]\nkind = \"null\"\n"));
    connect("two");
    let bad = "[port.z]\nkind = \"vhost-user\"\nsocket = \"{dir}/none/z\"\n";
    world.refused(&(local("l", "three", "") + &local("m", "two", "") + bad));
    connect("two");
    let done = world.reload(&("[port.l]\nkind = \"null\"\n".to_string() + &local("n", "two", "")));
    let kinds: Vec<_> =
        done["replaced"].as_array().unwrap().iter().map(|r| &r["settings"][0]).collect();
    assert_eq!(kinds[0], &json!({ "setting": "kind", "from": "xen-local", "to": "null" }));
    assert_eq!(kinds[1], &json!({ "setting": "kind", "from": "null", "to": "xen-local" }));
    let at = format!("xen-local:{}", world.dir.text("two"));
    let _sink = Gen::connect(&at, &["--mode", "sink"]);
    world.switch.wait_up("n", true);
}

#[test]
fn cross_connected_ports_keep_their_peers() {
    let ports = ["a", "b", "c", "d"].map(|name| vhost(name, ""));
    let world = World::new(&format!("forward = \"cross\"\n{}", ports.concat()));
    let with = |ports: &[&str]| {
        format!("forward = \"cross\"\n{}", ports.iter().map(|p| vhost(p, "")).collect::<String>())
    };
    let error = world.refused(&with(&["b", "c", "d"]));
    assert!(error.contains("port 'b' would be connected to another port"), "{error}");
    world.reload(&with(&["a", "c", "cc", "d"]).replace("port.c]", "port.b]"));
    world.reload(&with(&["a", "b", "c", "d", "e", "f"]));
    let show = world.switch.json(&["show"]);
    let names: Vec<_> =
        show["ports"].as_array().unwrap().iter().map(|p| p["name"].clone()).collect();
    assert_eq!(names, ["a", "b", "c", "d", "e", "f"]);
}

#[test]
fn taps_are_replaced_with_the_interface_in_place() {
    if !may_make_taps() {
        return;
    }
    let name = format!("pvsr{}", std::process::id() % 100_000);
    let tap = |options: &str| {
        format!(
            "[port.n]\nkind = \"null\"\n\
             [port.t]\nkind = \"tap\"\ninterface = \"{name}\"\n{options}\n"
        )
    };
    let sys = |what: &str| {
        let text = std::fs::read_to_string(format!("/sys/class/net/{name}/{what}"));
        text.map(|text| text.trim().to_string()).unwrap_or_default()
    };
    let world = World::new(&tap("mtu = 1400"));
    let index = sys("ifindex");
    assert_eq!(sys("mtu"), "1400");
    let bad = "[port.z]\nkind = \"vhost-user\"\nsocket = \"{dir}/none/z\"\n";
    world.refused(&(tap("mtu = 1300\nqueues = 2") + bad));
    assert_eq!((sys("mtu"), sys("ifindex")), ("1400".into(), index.clone()));
    let error = world.refused(&tap("mtu = 65535"));
    assert!(error.contains("port 't': cannot set MTU 65535"), "{error}");
    world.reload(&tap("mtu = 1300\nqueues = 2"));
    // The interface has not gone: addresses and routes are still there.
    assert_eq!((sys("mtu"), sys("ifindex")), ("1300".into(), index));
    assert_eq!(world.switch.port("show", "t")["queues"], 2);
    world.reload("[port.n]\nkind = \"null\"\n");
    wait_for("the interface to be removed with its port", || sys("ifindex").is_empty());
}

#[test]
fn reloads_and_changes_at_the_same_time_leave_a_state_that_one_of_them_made() {
    let text = (0..8).map(|n| vhost(&format!("p{n}"), "")).collect::<String>();
    let world = World::new(&text);
    std::thread::scope(|scope| {
        for n in 0..3 {
            let switch = &world.switch;
            scope.spawn(move || {
                for i in 0..15 {
                    let weight = format!("weight={}", i % 7 + 2);
                    assert!(switch.ctl(&["set", &format!("p{n}"), &weight]).status.success());
                    let _ = switch.ctl(&["add-port", &format!("r{n}=null")]);
                    assert!(switch.ctl(&["set", "poll=napi"]).status.success());
                }
            });
        }
        for _ in 0..20 {
            assert!(world.switch.ctl(&["reload"]).status.success());
        }
    });
    world.switch.json(&["reload"]);
    let out = String::from_utf8(world.switch.ctl(&["reload"]).stdout).unwrap();
    assert!(out.ends_with("no difference\n"), "{out}");
    let names = world.switch.json(&["show"])["ports"].as_array().unwrap().len();
    assert_eq!(names, 8);
    for port in world.tuning().as_array().unwrap() {
        assert_eq!(port[1], json!([["adaptive", 1]]));
    }
}

/// A 100-port file in which one port changes reloads without a lost frame elsewhere.
#[test]
fn a_reload_of_one_port_of_a_hundred_loses_no_frame_of_others() {
    const FRAMES: u64 = 40_000;
    const IDLE: usize = 16;
    let port = |n: usize| vhost(&format!("p{n}"), "");
    // p0 and p1 carry traffic, p2 to p17 have idle guests, p99 changes.
    let others = (0..99).map(port).collect::<String>();
    let forms = [
        vhost("p99", ""),
        vhost("p99", "weight = 9"),
        vhost("p99", "queues = 4\nmtu = 2000"),
        vhost("p99", "\"poll/0\" = \"napi\"\nlimit-messages = 9"),
        vhost("p99", "").replace("{dir}/p99", "{dir}/other"),
        vhost("p99", "mode = \"client\""),
        "[port.p99]\nkind = \"null\"\n".into(),
        String::new(),
    ];
    let world = World::with(&(others.clone() + &forms[0]), &["--workers", "2"], &[]);
    let (switch, dir) = (&world.switch, &world.dir);
    let idle: Vec<_> = (2..2 + IDLE)
        .map(|n| Gen::start(&dir.path(&format!("p{n}")), &["--mode", "idle"]))
        .collect();
    (2..2 + IDLE).for_each(|n| switch.wait_up(&format!("p{n}"), true));
    let (one, two) = ("02:00:00:00:00:01", "02:00:00:00:00:02");
    let sink = ["--mode", "sink", "--check", "--mac", two, "--peer", one];
    let sink = Gen::start(&dir.path("p1"), &sink);
    switch.wait_up("p1", true);
    assert!(switch.ctl(&["fdb", "add", two, "p1"]).status.success());
    let static_address = format!("[static]\n\"{two}\" = \"p1\"\n");
    let frames = FRAMES.to_string();
    let send = ["--check", "--rate", "8k", "--size", "imix", "--frames", &frames];
    let sender = Gen::start(&dir.path("p0"), &[&send[..], &["--mac", one, "--peer", two]].concat());
    let taken = || switch.counter("p0", "ingress", "frames");
    wait_for("traffic", || taken() > 100);
    let before = world.save();
    let mut reloads = 0;
    // Each form, however slow the machine; and for as long as there is traffic.
    while reloads < forms.len() || taken() < FRAMES - 4000 {
        let form = &forms[reloads % forms.len()];
        let done = world.reload(&format!("{static_address}{others}{form}"));
        let touched = ["added", "removed", "replaced", "changed"].map(|key| done[key].clone());
        for name in touched.iter().flat_map(|list| list.as_array().unwrap()) {
            let name = name["name"].as_str().or(name.as_str());
            assert_eq!(name, Some("p99"), "{done}");
        }
        reloads += 1;
    }
    world.reload(&format!("{static_address}{others}{}", forms[0]));
    let sent = sender.report();
    assert_eq!(sent["sent_frames"], FRAMES);
    wait_for("all frames", || switch.counter("p1", "egress", "frames") >= FRAMES);
    let port = switch.port("stats", "p0");
    let got = sink.end();
    println!("{reloads} reloads: {} of {FRAMES} frames received", got["received_frames"]);
    assert_eq!(got["received_frames"], FRAMES, "{got} {port}");
    for key in ["lost_frames", "late_frames", "corrupt_frames"] {
        assert_eq!(got[key], 0, "{got}");
    }
    for n in 0..2 + IDLE {
        let port = switch.port("show", &format!("p{n}"));
        assert_eq!((&port["connections"], &port["faults"]), (&1.into(), &0.into()), "{port}");
    }
    assert_eq!(world.save(), before);
    drop(idle);
}
