//! Policies of single queues, set at the start and changed under traffic, on both halves.

mod common;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Output;
use std::time::Duration;

use common::{Dir, Gen, Switch, pvswitch, wait_for};
use serde_json::Value;

const KINDS: [&str; 2] = ["vhost-user", "xen-local"];

fn ctl(control: &str, args: &[&str]) -> Output {
    pvswitch().args(["ctl", "--control", control]).args(args).output().unwrap()
}

fn json(control: &str, args: &[&str]) -> Value {
    let out = ctl(control, &[args, &["--json"]].concat());
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

/// Checks that a request is rejected with a message that contains `wants`.
fn refused(control: &str, args: &[&str], wants: &[&str]) {
    let out = ctl(control, args);
    let error = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(1), "{args:?}: {error}");
    for want in wants {
        assert!(error.contains(want), "{want:?} is not in the error for {args:?}: {error}");
    }
}

/// Waits until a guest is connected; returns its counters.
fn wait_connected(control: &str) -> Value {
    wait_for("the guest", || ctl(control, &["stats"]).status.success());
    wait_for("a connection", || json(control, &["stats"])["connected"] == true);
    json(control, &["stats"])
}

/// `key` of each queue in a reply.
fn each(queues: &Value, key: &str) -> Vec<Value> {
    queues.as_array().unwrap().iter().map(|queue| queue[key].clone()).collect()
}

#[test]
fn queues_of_the_switch_have_policies_of_their_own_by_option_and_by_file() {
    let dir = Dir::new();
    let socket = dir.text("b");
    let file = dir.text("x.toml");
    let text = format!(
        "poll = \"event\"\ncpus = [0]\n[port.b]\nkind = \"vhost-user\"\nsocket = \"{socket}\"\n\
         queues = 3\ncall = \"napi:8\"\n\"poll/1\" = \"spin\"\n\"call/2\" = \"coalesce:50,32\"\n"
    );
    std::fs::write(&file, text).unwrap();
    let ports =
        [dir.port("a", ",queues=3,poll/2=timer:500,call/0=coalesce:20/pending,poll=napi:4")];
    let switch = Switch::start(&dir, &["--config", &file], &ports);
    let policies = |name: &str| {
        let port = switch.port("stats", name);
        [each(&port["ingress"], "poll"), each(&port["egress"], "call")]
    };
    let want = [["napi:4", "napi:4", "timer:500"], ["coalesce:20/pending", "event", "event"]];
    assert_eq!(policies("a"), want);
    let want = [["event", "spin", "event"], ["napi:8", "napi:8", "coalesce:50,32"]];
    assert_eq!(policies("b"), want);
    // The same at run time, with the queue in the target.
    let add = format!("c=vhost-user:{},queues=2,poll/1=spin", dir.text("c"));
    switch.json(&["add-port", &add]);
    assert_eq!(policies("c")[0], ["event", "spin"]);
    switch.json(&["set", "a/1", "poll=spin", "call=timer:100"]);
    let want = [["napi:4", "spin", "timer:500"], ["coalesce:20/pending", "timer:100", "event"]];
    assert_eq!(policies("a"), want);
    let wants = ["'poll/1': for one queue use set a/1 poll=spin"];
    refused(switch.control(), &["set", "a", "poll/1=spin"], &wants);
    // The worker of `cpus = [0]`.
    let tid = switch.json(&["stats"])["workers"][0]["tid"].as_u64().unwrap();
    let status = format!("/proc/{}/task/{tid}/status", switch.process.0.id());
    let status = std::fs::read_to_string(status).unwrap();
    let allowed = status.lines().find(|line| line.starts_with("Cpus_allowed_list:")).unwrap();
    assert_eq!(allowed.split_whitespace().last(), Some("0"), "{allowed}");
}

#[test]
fn invalid_settings_of_queues_are_rejected() {
    let dir = Dir::new();
    let file = dir.text("x.toml");
    for (text, wants) in [
        (
            "\"poll/2\" = \"spin\"",
            &["x.toml:5:1: port 'b': poll/2: there are 2 queue pairs, 0 to 1"],
        ),
        ("\"call/a\" = \"spin\"", &["call/a=spin: use call/QUEUE, a queue pair's number, 0 to"]),
        ("\"call/1\" = \"spn\"", &["call/1=spn: unknown policy 'spn': use one of event, napi"]),
        ("\"queues/1\" = 3", &["unknown field `queues/1`"]),
    ] {
        let port = "kind = \"tap\"\ninterface = \"t\"\nqueues = 2";
        std::fs::write(&file, format!("[port.b]\n{port}\n{text}\n")).unwrap();
        let out = pvswitch().args(["run", "--config", &file]).output().unwrap();
        let error = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{text}: {error}");
        assert!(wants.iter().all(|want| error.contains(want)), "{text}: {error}");
    }
    std::fs::write(&file, "control = \"/nowhere/x\"\ncpus = [0, 99999]\n").unwrap();
    let out = pvswitch().args(["run", "--config", &file]).output().unwrap();
    let error = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(2), "{error}");
    assert!(error.contains("x.toml:2:8: cpus=0,99999: there is no such CPU: 99999"), "{error}");
}

#[test]
fn policies_of_a_guest_change_while_frames_pass_and_none_is_lost() {
    for kind in KINDS {
        let dir = Dir::new();
        let at = |name: &str| format!("{kind}:{}", dir.text(name));
        let ports = ["a", "b"].map(|name| format!("{name}={},queues=2", at(name)));
        let switch = Switch::start(&dir, &[], &ports);
        let (takes, sends) = (dir.text("takes"), dir.text("sends"));
        // With its address known: flooded frames are not held for a full receiver.
        let mac = "02:00:00:00:00:02";
        let sink = ["--mode", "sink", "--mac", mac, "--queues", "2", "--control", &takes];
        let sink = Gen::connect(&at("b"), &sink);
        switch.wait_up("b", true);
        let send = ["--queues", "2", "--flows", "32", "--rate", "10k", "--control", &sends];
        let sender = Gen::connect(&at("a"), &send);
        wait_connected(&sends);
        wait_connected(&takes);
        let polls = ["spin", "napi:4", "timer:1000", "coalesce:200,16", "adaptive", "event"];
        for (i, poll) in polls.iter().enumerate() {
            let kick = ["timer:1000", "coalesce:500,64", "event"][i % 3];
            // All queues, then one of them to another policy.
            json(&takes, &["set", &format!("poll={poll}")]);
            json(&takes, &["set", "1", "poll=timer:2000"]);
            json(&sends, &["set", &format!("kick={kick}"), &format!("poll={poll}")]);
            json(&sends, &["set", "0", "kick=coalesce:100/pending"]);
            let stats = json(&takes, &["stats"]);
            assert_eq!(each(&stats["queues"], "poll"), [*poll, "timer:2000"], "{kind}: {stats}");
            let stats = json(&sends, &["stats"]);
            assert_eq!(each(&stats["queues"], "kick"), ["coalesce:100/pending", kick], "{stats}");
            let received = || each(&json(&takes, &["stats"])["queues"], "received_frames");
            let before = received();
            wait_for(&format!("{kind} frames on both queues with {poll} and {kick}"), || {
                let more = |(now, then): (&Value, &Value)| {
                    now.as_u64().unwrap() > then.as_u64().unwrap() + 50
                };
                received().iter().zip(&before).all(more)
            });
        }
        let sent = sender.end();
        let frames = sent["sent_frames"].as_u64().unwrap();
        // A receiver without a CPU may lose some at the switch, but none after delivery.
        let total = |name: &str, way: &str, key: &str| {
            let counts = each(&switch.port("stats", name)[way], key);
            counts.iter().map(|n| n.as_u64().unwrap()).sum::<u64>()
        };
        let given = || total("b", "egress", "frames");
        wait_for("the last frames to be given or dropped", || {
            given() + total("a", "ingress", "drops_no_room") == frames
        });
        wait_for("the last frames", || {
            let received = each(&json(&takes, &["stats"])["queues"], "received_frames");
            received.iter().map(|n| n.as_u64().unwrap()).sum::<u64>() == given()
        });
        let got = sink.end();
        assert_eq!(got["received_frames"], given(), "{kind}: {got}");
        assert_eq!(got["late_frames"], 0, "{kind}: {got}");
        assert_eq!(got["settings"]["poll"], "event", "its last settings: {got}");
    }
}

#[test]
fn a_kick_policy_of_one_queue_affects_only_that_queue() {
    let dir = Dir::new();
    let ports = [dir.port("a", ",queues=2"), "n=null".into()];
    let switch = Switch::start(&dir, &["--poll", "event"], &ports);
    let control = dir.text("guest");
    let send = ["--queues", "2", "--flows", "2", "--rate", "4k", "--control", &control];
    let late = ["--set", "kick/1=coalesce:1000000,1000"];
    let sender = Gen::start(&dir.path("a"), &[&send[..], &late].concat());
    wait_connected(&control);
    let counted = |key| each(&json(&control, &["stats"])["queues"], key);
    let number = |value: &Value| value.as_u64().unwrap();
    wait_for("frames", || number(&counted("sent_frames")[1]) > 200);
    let kicks: Vec<_> = counted("kicks_tx").iter().map(number).collect();
    assert!(kicks[0] > 20, "one per burst: {kicks:?}");
    assert!(kicks[1] < 4, "none before a second or a thousand frames: {kicks:?}");
    // Delayed kicks are sent with the change, and for each burst afterwards.
    json(&control, &["set", "1", "kick=event"]);
    wait_for("kicks", || number(&counted("kicks_tx")[1]) > 20);
    assert_eq!(counted("kick"), ["event", "event"]);
    let sent = sender.end();
    let taken: u64 = each(&switch.port("stats", "a")["ingress"], "frames").iter().map(number).sum();
    assert_eq!(sent["sent_frames"], taken);
}

#[test]
fn a_guest_does_not_kick_a_queue_that_is_polled_without_end() {
    let dir = Dir::new();
    let ports = [dir.port("a", ",poll=spin"), "n=null".into()];
    let switch = Switch::start(&dir, &[], &ports);
    // The ring of each guest is new, and its queue has been polled all the time.
    for ring in [&["--packed"][..], &["--set", "suppress=flags"], &[]] {
        let frames = ["--frames", "200000"];
        let sent = Gen::start(&dir.path("a"), &[ring, &frames].concat()).report();
        let kicks = sent["kicks_tx"].as_u64().unwrap();
        // Each fills the ring at most until the worker is running.
        assert!(kicks <= 256, "{ring:?}: {kicks} kicks, bursts of up to 64 frames: {sent}");
        switch.wait_up("a", false);
    }
}

#[test]
fn an_idle_guest_sleeps_and_replies_to_requests() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", "")]);
    let control = dir.text("guest");
    let sink = ["--mode", "sink", "--poll", "event", "--control", &control];
    let _sink = Gen::start(&dir.path("a"), &sink);
    switch.wait_up("a", true);
    let idle = wait_connected(&control);
    assert_eq!((&idle["guest"], &idle["ok"]), (&"gen".into(), &true.into()));
    assert_eq!(each(&idle["queues"], "state"), ["cold"], "{idle}");
    json(&control, &["set", "poll=spin"]);
    wait_for("polls", || {
        let stats = json(&control, &["stats"]);
        stats["polls"].as_u64() > Some(1000) && each(&stats["queues"], "state") == ["hot"]
    });
    // Under a timer nothing is polled for long without frames.
    json(&control, &["set", "poll=timer:1000"]);
    wait_for("its sleep", || each(&json(&control, &["stats"])["queues"], "state") == ["cold"]);
    let polls = || json(&control, &["stats"])["polls"].as_u64();
    let before = polls();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(polls(), before);
    let text = ctl(&control, &["stats"]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("timer:1000") && text.contains("cold"), "{text}");
}

#[test]
fn unsupported_requests_to_a_guest_are_rejected_with_the_supported_ones() {
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &[dir.port("a", ",queues=2")]);
    let control = dir.text("guest");
    let args = ["--mode", "sink", "--queues", "2", "--control", &control];
    let _sink = Gen::start(&dir.path("a"), &args);
    switch.wait_up("a", true);
    wait_connected(&control);
    let wants = ["is for a switch", &control, "pvswitch gen", "use stats, or set [QUEUE]"];
    for args in [&["show"][..], &["fdb"], &["shutdown"], &["drain", "a"], &["del-port", "a"]] {
        refused(&control, args, &wants);
    }
    refused(&control, &["set", "call=spin"], &["unknown setting 'call'", "known here: poll, kick"]);
    refused(&control, &["set", "kik=spin"], &["did you mean 'kick'?"]);
    refused(&control, &["set", "poll=spn"], &["poll=spn: unknown policy 'spn': use one of event"]);
    refused(&control, &["set", "kick=timer:0"], &["kick=timer:0: timer frequency '0': use 1 to"]);
    let wants = ["'2': name a queue pair, 0 to 1, or none for all of them"];
    refused(&control, &["set", "2", "poll=spin"], &wants);
    for port in ["a", "a/0"] {
        refused(&control, &["set", port, "poll=spin"], &["is for a switch", "set [QUEUE] poll="]);
    }
    // A request with an invalid part changes nothing.
    refused(&control, &["set", "poll=spin", "kick=spn"], &["kick=spn"]);
    assert_eq!(each(&json(&control, &["stats"])["queues"], "poll"), ["event", "event"]);
    // Invalid requests and idle clients do not stop it.
    let say = |text: &str| {
        let mut client = UnixStream::connect(&control).unwrap();
        client.write_all(text.as_bytes()).unwrap();
        client
    };
    let mut answer = String::new();
    say("nonsense\n").read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{answer}");
    assert!(answer.contains("not an HTTP/1.1 request"), "{answer}");
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
    let last = "POST /v1/stats HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let mut answers = String::new();
    let three = get("/v1/stat") + &get("/v1/stats") + last;
    say(&three).read_to_string(&mut answers).unwrap();
    let statuses: Vec<_> = answers.lines().filter(|l| l.starts_with("HTTP/1.1 ")).collect();
    let want = ["404 Not Found", "200 OK", "405 Method Not Allowed"];
    assert_eq!(statuses, want.map(|status| format!("HTTP/1.1 {status}")), "{answers}");
    assert!(answers.contains("\r\nAllow: GET, HEAD\r\n"), "{answers}");
    let idle: Vec<_> = (0..20).map(|_| say("")).collect();
    std::thread::sleep(Duration::from_millis(50));
    drop(idle);
    wait_for("an answer", || ctl(&control, &["stats"]).status.success());
}

#[test]
fn invalid_control_sockets_and_modes() {
    let dir = Dir::new();
    let connect = format!("vhost-user:{}", dir.text("a"));
    let nowhere = dir.text("no/such/dir/x");
    let without = "not supported with --mode idle and hostile, which have no policies";
    let cases: [(&[&str], i32, &str); 6] = [
        (&["--mode", "idle", "--control", "x"], 2, without),
        (&["--mode", "hostile", "--control", "x"], 2, without),
        (&["--mode", "sink", "--replay", "--control", "x"], 2, "not supported with --replay"),
        (&["--control", &nowhere], 1, "--control: "),
        (&["--set", "poll/1=spin"], 2, "--set poll/1: there is one queue pair, number 0"),
        (&["--queues", "2", "--set", "kick/2=spin"], 2, "there are 2 queue pairs, 0 to 1"),
    ];
    for (args, status, want) in cases {
        let out = pvswitch().args(["gen", "--connect", &connect]).args(args).output().unwrap();
        let error = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(status), "{args:?}: {error}");
        assert!(error.contains(want), "{args:?}: {error}");
    }
}

#[test]
fn a_guest_waiting_for_its_switch_replies_and_keeps_its_settings() {
    let dir = Dir::new();
    let control = dir.text("guest");
    let args = ["--mode", "sink", "--control", &control];
    let _sink = Gen::start(&dir.path("a"), &args);
    wait_for("the guest", || ctl(&control, &["stats"]).status.success());
    assert_eq!(json(&control, &["stats"])["connected"], false);
    json(&control, &["set", "poll=coalesce:100,8"]);
    json(&control, &["set", "0", "kick=timer:50"]);
    let _switch = Switch::start(&dir, &[], &[dir.port("a", "")]);
    let stats = wait_connected(&control);
    assert_eq!(each(&stats["queues"], "poll"), ["coalesce:100,8"]);
    assert_eq!(each(&stats["queues"], "kick"), ["timer:50"]);
}
