//! What a change that fails leaves of a TAP's `persist` and MTU.

mod common;

use std::process::Command;

use common::{Dir, Switch, may_make_taps, wait_for};
use rustix::process::{Pid, Resource, Rlimit, prlimit};

const NULL: &str = "[port.n]\nkind = \"null\"\n";
/// A port that fails, after all others.
const BAD: &str = "[port.z]\nkind = \"vhost-user\"\nsocket = \"/nonexistent/pvs/z\"\n";

/// An interface of this test, removed on drop.
struct Interface(String);

impl Interface {
    fn new(letter: char) -> Self {
        Self(format!("pvs{letter}{}", std::process::id() % 100_000))
    }

    /// Makes it as an administrator does: persistent, with an address.
    fn make(&self) {
        let ip = |args: &[&str]| {
            assert!(Command::new("ip").args(args).status().unwrap().success(), "{args:?}");
        };
        ip(&["tuntap", "add", "dev", &self.0, "mode", "tap", "multi_queue"]);
        ip(&["addr", "add", "198.51.100.7/24", "dev", &self.0]);
    }

    /// Whether it persists; `None`: there is no such interface.
    fn persists(&self) -> Option<bool> {
        let flags = std::fs::read_to_string(format!("/sys/class/net/{}/tun_flags", self.0)).ok()?;
        let flags = i32::from_str_radix(flags.trim().trim_start_matches("0x"), 16).unwrap();
        Some(flags & libc::IFF_PERSIST != 0)
    }

    fn has_address(&self) -> bool {
        let out = Command::new("ip").args(["-4", "addr", "show", "dev", &self.0]).output().unwrap();
        String::from_utf8(out.stdout).unwrap().contains("198.51.100.7")
    }

    fn mtu(&self) -> u32 {
        let mtu = std::fs::read_to_string(format!("/sys/class/net/{}/mtu", self.0)).unwrap();
        mtu.trim().parse().unwrap()
    }

    fn port(&self, persist: &str) -> String {
        let name = &self.0;
        format!("[port.t]\nkind = \"tap\"\ninterface = \"{name}\"\npersist = \"{persist}\"\n")
    }
}

impl Drop for Interface {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.0]).output();
    }
}

fn write(dir: &Dir, ports: &[&str]) {
    std::fs::write(dir.path("x.toml"), ports.concat()).unwrap();
}

/// A switch with a file of these ports.
fn start(dir: &Dir, ports: &[&str]) -> Switch {
    write(dir, ports);
    Switch::start(dir, &["--config", &dir.text("x.toml")], &[])
}

/// Reloads a file of these ports, which must fail, once by the last port and once by an MTU.
fn fail(switch: &Switch, dir: &Dir, tap: &str) {
    for (ports, want) in [
        ([NULL, tap, BAD], "directory does not exist"),
        ([NULL, tap, "mtu = 65535\n"], "cannot set MTU 65535"),
    ] {
        write(dir, &ports);
        let out = switch.ctl(&["reload"]);
        let error = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{error}");
        assert!(error.contains(want), "{error}");
    }
}

#[test]
fn a_reload_that_fails_leaves_no_new_interface_behind() {
    if !may_make_taps() {
        return;
    }
    let (dir, tap) = (Dir::new(), Interface::new('n'));
    let switch = start(&dir, &[NULL]);
    fail(&switch, &dir, &tap.port("on"));
    assert_eq!(tap.persists(), None);
    write(&dir, &[NULL, &tap.port("on")]);
    switch.json(&["reload"]);
    assert_eq!(tap.persists(), Some(true));
}

#[test]
fn a_reload_that_fails_removes_no_interface_of_the_administrator() {
    if !may_make_taps() {
        return;
    }
    let (dir, tap) = (Dir::new(), Interface::new('a'));
    tap.make();
    let mut switch = start(&dir, &[NULL]);
    fail(&switch, &dir, &tap.port("off"));
    assert_eq!((tap.persists(), tap.has_address()), (Some(true), true));
    write(&dir, &[NULL, &tap.port("off")]);
    switch.json(&["reload"]);
    assert_eq!((tap.persists(), tap.has_address()), (Some(false), true));
    assert_eq!(switch.process.end().code(), Some(0));
    wait_for("the interface to be removed with its port", || tap.persists().is_none());
}

#[test]
fn a_reload_that_fails_leaves_a_running_port_its_persistence() {
    if !may_make_taps() {
        return;
    }
    let (dir, tap) = (Dir::new(), Interface::new('r'));
    let mut switch = start(&dir, &[NULL, &tap.port("on")]);
    fail(&switch, &dir, &tap.port("off"));
    assert_eq!(tap.persists(), Some(true));
    assert_eq!(switch.process.end().code(), Some(0));
    assert_eq!(tap.persists(), Some(true), "as the last file that was applied says");
}

#[test]
fn a_port_that_cannot_be_added_leaves_the_persistence_of_its_interface() {
    if !may_make_taps() {
        return;
    }
    let (dir, new, old) = (Dir::new(), Interface::new('p'), Interface::new('q'));
    old.make();
    let switch = start(&dir, &[NULL]);
    for (port, want) in [
        (format!("t=tap:{},persist=on,mtu=65535", new.0), None),
        (format!("t=tap:{},persist=off,mtu=65535", old.0), Some(true)),
    ] {
        let out = switch.ctl(&["add-port", &port]);
        let error = String::from_utf8(out.stderr).unwrap();
        assert!(error.contains("cannot set MTU 65535"), "{error}");
        let interface = if want.is_none() { &new } else { &old };
        assert_eq!(interface.persists(), want, "{port}");
    }
}

#[test]
fn a_port_that_cannot_be_added_leaves_the_mtu_of_its_interface() {
    if !may_make_taps() {
        return;
    }
    let (dir, tap) = (Dir::new(), Interface::new('m'));
    tap.make();
    let switch = start(&dir, &[NULL]);
    let add = || switch.ctl(&["add-port", &format!("t=tap:{},mtu=1400", tap.0)]);
    // Its last step: the memory for frames, 4 MiB, which it is refused.
    let statm = std::fs::read_to_string(format!("/proc/{}/statm", switch.pid())).unwrap();
    let pages: u64 = statm.split(' ').next().unwrap().parse().unwrap();
    let limit = pages * rustix::param::page_size() as u64 + (1 << 20);
    let pid = Pid::from_raw(i32::try_from(switch.pid()).unwrap());
    let set = |current| prlimit(pid, Resource::As, Rlimit { current, maximum: None }).unwrap();
    set(Some(limit));
    let error = String::from_utf8(add().stderr).unwrap();
    set(None);
    assert!(error.contains("cannot allocate memory for frames"), "{error}");
    assert_eq!(tap.mtu(), 1500);
    let added = add();
    assert!(added.status.success(), "{}", String::from_utf8_lossy(&added.stderr));
    assert_eq!(tap.mtu(), 1400);
}
