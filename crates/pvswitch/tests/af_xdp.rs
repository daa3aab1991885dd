//! Ports on interfaces of the host by AF_XDP sockets: between two kernels, each at the other end of
//! a veth.

mod common;
#[path = "common/wires.rs"]
mod wires;

use std::net::UdpSocket;
use std::path::PathBuf;
use std::process::Command;

use common::{Dir, Switch, kill, pvswitch, upgrade, wait_for, wait_for_next};
use serde_json::json;
use wires::{
    Wires, connection, fails, follows_its_interface, ip, refuses_bad_interfaces, run, transfer,
    waits_for_its_interface, waits_for_its_namespace, within,
};

/// Wires whose kernels leave no checksum and no segmentation to the veth: AF_XDP has no offloads.
fn wires() -> Option<Wires> {
    let wires = Wires::new()?;
    let are_set = [&wires.a, &wires.b].iter().all(|netns| leave_nothing(netns));
    if !are_set {
        println!("skipped: no ethtool here");
    }
    are_set.then_some(wires)
}

fn leave_nothing(netns: &str) -> bool {
    let ethtool = within(netns, || {
        Command::new("ethtool").args(["-K", "v1", "tx", "off", "txvlan", "off"]).output()
    });
    ethtool.is_ok_and(|out| out.status.success())
}

#[test]
fn tcp_between_two_kernels_passes_and_lives_on_over_upgrades() {
    let Some(wires) = wires() else { return };
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &wires.ports("af-xdp", ""));
    let (mut client, mut server) = connection(&wires);
    transfer(&mut client, &mut server, 8 << 20);
    let frames = || switch.counter("a", "ingress", "frames");
    let before = frames();
    let mut next = Vec::new();
    for _ in 0..3 {
        next.push(upgrade(&switch));
        transfer(&mut client, &mut server, 1 << 20);
        transfer(&mut server, &mut client, 1 << 20);
    }
    assert!(frames() > before, "counters are handed on");
    let shown = switch.port("show", "a");
    assert_eq!(shown["kind"], "af-xdp:va");
    assert_eq!(shown["xdp"], json!({ "zero_copy": false, "generic": false }));
    let log = switch.log();
    assert!(
        log.contains("`va` is a veth") && log.contains("ethtool -K PEER tx off txvlan off"),
        "{log}"
    );
    switch.shut_down(&dir);
}

/// Segments of a guest with offloads are cut, and its checksums computed, for a port without.
#[test]
fn long_frames_of_a_port_with_offloads_are_cut_for_one_without() {
    let Some(wires) = wires() else { return };
    let dir = Dir::new();
    let [a, _] = wires.ports("af-packet", "");
    let [_, b] = wires.ports("af-xdp", "");
    // The kernel of `a` leaves checksums and segmentation to the switch.
    let on = ["-K", "v1", "tx", "on", "tso", "on", "gso", "on"];
    let done = within(&wires.a, || Command::new("ethtool").args(on).output());
    assert!(done.unwrap().status.success());
    let switch = Switch::start(&dir, &[], &[a, b]);
    let (mut client, mut server) = connection(&wires);
    transfer(&mut client, &mut server, 8 << 20);
    transfer(&mut server, &mut client, 8 << 20);
    let of = |what: &str| switch.counter("a", "ingress", what);
    assert!(of("bytes") / of("frames") > 1514, "{} in {}", of("bytes"), of("frames"));
    assert_eq!(switch.counter("b", "egress", "drops_too_long"), 0);
    switch.shut_down(&dir);
}

#[test]
fn killed_switch_opens_its_sockets_again() {
    let Some(wires) = wires() else { return };
    let dir = Dir::new();
    let switch = Switch::start(&dir, &["--keep"], &wires.ports("af-xdp", ""));
    let (mut client, mut server) = connection(&wires);
    transfer(&mut client, &mut server, 1 << 20);
    for _ in 0..2 {
        let before = switch.pid();
        kill(before);
        wait_for_next(&switch, before);
        transfer(&mut client, &mut server, 1 << 20);
        transfer(&mut server, &mut client, 1 << 20);
    }
}

#[test]
fn port_follows_its_interface_down_and_up_and_stays_down_when_it_is_removed() {
    let Some(wires) = wires() else { return };
    follows_its_interface(&wires, "af-xdp");
}

#[test]
fn port_whose_network_namespace_does_not_exist_yet_is_down_until_it_does() {
    let Some(wires) = wires() else { return };
    waits_for_its_namespace(&wires, "af-xdp");
}

#[test]
fn port_whose_interface_does_not_exist_yet_is_down_until_it_does() {
    let Some(wires) = wires() else { return };
    waits_for_its_interface(&wires, "af-xdp", leave_nothing);
}

#[test]
fn port_is_removed_and_added_while_another_keeps_its_traffic() {
    let Some(wires) = wires() else { return };
    let dir = Dir::new();
    let ports = wires.ports("af-xdp", "");
    let switch = Switch::start(&dir, &[], &ports);
    let ctl = |args: &[&str]| {
        let out = switch.ctl(args);
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    };
    for _ in 0..3 {
        ctl(&["del-port", "a"]);
        let shown =
            Command::new("ip").args(["-n", &wires.mid, "-d", "link", "show", "va"]).output();
        let shown = String::from_utf8(shown.unwrap().stdout).unwrap();
        assert!(switch.is_up("b") && !shown.contains(" xdp "), "{shown}");
        ctl(&["add-port", &ports[0]]);
    }
    let (mut client, mut server) = connection(&wires);
    transfer(&mut client, &mut server, 1 << 20);
    switch.shut_down(&dir);
}

#[test]
fn frames_that_the_switch_does_not_take_are_counted() {
    let Some(wires) = wires() else { return };
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &wires.ports("af-xdp", ""));
    wait_for("the drain", || switch.json(&["drain", "a"])["drain"] == "drained");
    assert!(ip(&format!("-n {} neigh add 10.8.0.9 lladdr 02:00:00:00:00:09 dev v1", wires.a)));
    let socket = within(&wires.a, || UdpSocket::bind("10.8.0.1:0").unwrap());
    let lost = || switch.counter("a", "ingress", "drops_not_read");
    for _ in 0..3000 {
        socket.send_to(&[0; 1400], "10.8.0.9:9").unwrap();
    }
    wait_for("a loss", || lost() > 0);
    // When a later frame has passed, the kernel has taken or dropped all of them.
    switch.json(&["drain", "a", "--off"]);
    let _connection = connection(&wires);
    let all = lost();
    assert_eq!(lost(), all, "each is counted once");
    let _next = upgrade(&switch);
    assert_eq!(lost(), all, "by one process or the next");
}

/// A bpffs at a path, in a mount namespace of the processes that use it.
fn with_bpffs(dir: &Dir, command: &str) -> Command {
    let mut all = Command::new("unshare");
    let mount = format!("mount -t bpf none {} && {command}", dir.text("bpf"));
    all.args(["--mount", "sh", "-c", &mount]);
    all
}

#[test]
fn switch_without_the_right_to_load_programs_uses_a_pinned_map() {
    let Some(wires) = wires() else { return };
    let dir = Dir::new();
    std::fs::create_dir(dir.path("bpf")).unwrap();
    if !with_bpffs(&dir, "true").status().is_ok_and(|status| status.success()) {
        return println!("skipped: no bpffs can be mounted here");
    }
    let program = PathBuf::from(pvswitch().get_program());
    let (program, bpf) = (program.display(), dir.text("bpf"));
    let mid = format!("/run/netns/{}", wires.mid);
    // Inside the namespace of the interfaces: to enter it takes CAP_SYS_ADMIN.
    let drop = "setpriv --bounding-set -all,+net_raw --inh-caps -all,+net_raw";
    let limit = "ulimit -l $(ulimit -H -l)";
    let mut command = with_bpffs(
        &dir,
        &format!(
            "{limit} && {program} pin-xdp va {bpf} --netns {mid} && \
             exec nsenter --net={mid} {drop} {program} run --control {} --duration 600 \
             --port a=af-xdp:va,map={bpf}/map --port b=af-packet:vb",
            dir.text("control")
        ),
    );
    let log = std::fs::File::create(dir.path("log")).unwrap();
    let mut child = command.stderr(log).spawn().unwrap();
    let control = dir.path("control");
    wait_for("the switch", || {
        assert!(
            child.try_wait().unwrap().is_none(),
            "{}",
            std::fs::read_to_string(dir.path("log")).unwrap()
        );
        control.exists()
    });
    let (mut client, mut server) = connection(&wires);
    transfer(&mut client, &mut server, 1 << 20);
    transfer(&mut server, &mut client, 1 << 20);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn interfaces_that_cannot_be_used_are_errors_with_a_remedy() {
    let Some(wires) = wires() else { return };
    let [a, _] = wires.ports("af-xdp", "");
    refuses_bad_interfaces(&wires, "af-xdp");
    fails(
        &mut run(&format!("{a},queues=2")),
        "queues=2 is more than interface `va` has: set queues=1",
    );
    fails(&mut run(&format!("{a},mode=zero-copy")), "`va` has no zero-copy");
    fails(&mut run(&format!("{a},map=/nonexistent")), "map=/nonexistent: cannot open it");
    // With fewer rights. None of them may enter the namespace: `mid` is entered before.
    let without = |capabilities: &str, port: &str| {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", wires.mid)).arg("setpriv");
        command.args(["--bounding-set", capabilities, "--inh-caps", capabilities]);
        command.arg(pvswitch().get_program()).args(["run", "--quiet", "--port", port]);
        command
    };
    if Command::new("setpriv").arg("--version").output().is_ok() {
        fails(&mut without("-net_raw", "x=af-xdp:va"), "CAP_NET_RAW is required");
        let want = "CAP_BPF and CAP_NET_ADMIN are required";
        fails(&mut without("-bpf,-sys_admin,-net_admin", "x=af-xdp:va"), want);
        fails(&mut without("-bpf,-sys_admin", "x=af-xdp:va"), want);
    }
    // Nothing of them stays.
    let switch_dir = Dir::new();
    let switch = Switch::start(&switch_dir, &[], &wires.ports("af-xdp", ""));
    let add = switch.ctl(&["add-port", &a.replace("a=", "c=").replace("va", "vx")]);
    assert!(!add.status.success() && switch.is_up("a") && switch.is_up("b"));
    switch.shut_down(&switch_dir);
}
