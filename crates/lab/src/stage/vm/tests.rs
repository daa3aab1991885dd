//! Tests of both ends of a channel, without a guest.

use std::fs::OpenOptions;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use super::super::folder as new_folder;
use super::agent;
use super::channel::{self, Channel};
use super::*;

/// Serves the guest's end of the first channel.
fn guest(folder: &Path) {
    channel::create(folder).unwrap();
    let [to, from] = channel::pipes(folder, 1);
    let open = |path| OpenOptions::new().read(true).write(true).open(path).unwrap();
    let (requests, replies) = (open(to), open(from));
    std::thread::spawn(move || agent::Channel::new(replies).serve(requests));
}

/// Runs a script; returns its output and exit status.
fn run(channel: &mut Channel, script: &str) -> (String, u64) {
    channel.send(&json!({ "run": ["sh", "-c", script] })).unwrap();
    let by = Some(Instant::now() + Duration::from_secs(20));
    let mut output = String::new();
    loop {
        let reply = channel.reply(by).unwrap();
        for key in ["out", "err"] {
            output += reply[key].as_str().unwrap_or("");
        }
        if let Some(code) = reply["exit"].as_u64() {
            return (output, code);
        }
    }
}

#[test]
fn commands_run_in_the_guest_one_at_a_time() {
    let dir = new_folder().unwrap();
    let folder = dir.path().join("vm");
    guest(&folder);
    let mut channel = Channel::take(&folder).unwrap();
    assert_eq!(run(&mut channel, "echo one; echo two >&2; exit 7").1, 7);
    assert_eq!(run(&mut channel, "echo \"$TMPDIR\""), ("/run\n".into(), 0));
    assert_eq!(run(&mut channel, "kill -TERM $$").1, 143);
    let (long, code) = run(&mut channel, "seq 20000");
    assert_eq!((long.lines().count(), code), (20_000, 0));
    channel.send(&json!({ "run": ["/no/such/program"] })).unwrap();
    assert!(channel.reply(None).unwrap()["err"].as_str().unwrap().contains("/no/such/program"));
    assert_eq!(channel.reply(None).unwrap()["exit"], 127);
    drop(channel);
    assert_eq!(
        channel::read(&folder, "/proc/version", channel::REPLY_TIMEOUT).unwrap().lines().count(),
        1
    );
}

#[test]
fn a_signal_reaches_the_command() {
    let dir = new_folder().unwrap();
    let folder = dir.path().join("vm");
    guest(&folder);
    let mut channel = Channel::take(&folder).unwrap();
    let script = "trap 'kill $!; echo stopped; exit 3' TERM; sleep 60 & echo up; wait";
    channel.send(&json!({ "run": ["sh", "-c", script] })).unwrap();
    assert_eq!(channel.reply(None).unwrap()["out"], "up\n");
    channel.send(&json!({ "signal": 15 })).unwrap();
    assert_eq!(channel.reply(None).unwrap()["out"], "stopped\n");
    assert_eq!(channel.reply(None).unwrap()["exit"], 3);
}

#[test]
fn taking_a_channel_ends_the_command_of_a_killed_user() {
    let dir = new_folder().unwrap();
    let folder = dir.path().join("vm");
    guest(&folder);
    let mut channel = Channel::take(&folder).unwrap();
    channel.send(&json!({ "run": ["sh", "-c", "echo left; exec sleep 60"] })).unwrap();
    drop(channel);
    let start = Instant::now();
    let mut channel = Channel::take(&folder).unwrap();
    assert_eq!(run(&mut channel, "echo new"), ("new\n".into(), 0));
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_dropped_channel_is_free_although_a_child_inherited_it() {
    let dir = new_folder().unwrap();
    let folder = dir.path().join("vm");
    guest(&folder);
    let channel = Channel::take(&folder).unwrap();
    // Like a child between fork and exec.
    let copy = channel.to.try_clone().unwrap();
    drop(channel);
    // The guest serves no other channel.
    let mut channel = Channel::take(&folder).unwrap();
    assert_eq!(run(&mut channel, "echo new"), ("new\n".into(), 0));
    drop(copy);
}

#[test]
fn the_end_of_a_guest_is_reported() {
    let dir = new_folder().unwrap();
    let folder = dir.path().join("vm");
    channel::create(&folder).unwrap();
    assert!(Channel::take(&folder).unwrap_err().contains("has ended"));
}

#[test]
fn a_serial_port_is_found_by_its_name() {
    let dir = new_folder().unwrap();
    for (n, name) in [(1, "channel1\n"), (2, "channel10\n")] {
        let port = dir.path().join(format!("vport0p{n}"));
        std::fs::create_dir(&port).unwrap();
        std::fs::write(port.join("name"), name).unwrap();
        std::fs::write(port.join("dev"), format!("241:{n}\n")).unwrap();
    }
    assert_eq!(agent::port_device(dir.path(), "channel1"), Some((241, 1)));
    assert_eq!(agent::port_device(dir.path(), "channel10"), Some((241, 2)));
    assert_eq!(agent::port_device(dir.path(), "channel2"), None);
    assert_eq!(agent::port_device(&dir.path().join("none"), "channel1"), None);
}

#[test]
fn a_setup_is_passed_on_the_kernel_command_line() {
    let setup = Setup {
        address: "10.9.0.10/16".into(),
        mac: "02:00:00:09:00:00".into(),
        mtu: 9000,
        without: "tso gso".into(),
        modules: vec!["/a/b.ko".into(), "/c.ko".into()],
    };
    let args = setup.args();
    assert!(args.iter().all(|word| !word.contains(' ')));
    assert_eq!(Setup::parse(&args), setup);
    let plain = Setup { mtu: 1500, ..Setup::default() };
    assert_eq!(Setup::parse(&plain.args()), plain);
}

#[test]
fn options_that_a_stock_driver_lacks_are_named() {
    let lacks = |change: &dyn Fn(&mut NicOptions)| {
        let mut options = NicOptions::new("event");
        change(&mut options);
        unsupported(&options)
    };
    assert_eq!(lacks(&|_| ()), None);
    assert_eq!(lacks(&|options| options.without = "tso".into()), None);
    let poll = lacks(&|options| options.poll = "timer:1000".into());
    assert_eq!(poll.unwrap(), "poll policy 'timer:1000'");
    let smart = lacks(&|options| options.connect = ",smart-poll=on".into());
    assert_eq!(smart.unwrap(), "option 'smart-poll=on'");
    assert!(lacks(&|options| options.set = vec!["budget=1".into()]).is_some());
    assert!(lacks(&|options| options.more = vec!["--packed".into()]).is_some());
    assert!(lacks(&|options| options.kick = "timer".into()).is_some());
}
