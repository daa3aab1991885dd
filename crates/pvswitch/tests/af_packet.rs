//! Ports on interfaces of the host by packet sockets: between two kernels, each at the other end of
//! a veth.

mod common;
#[path = "common/wires.rs"]
mod wires;

use std::net::UdpSocket;
use std::process::Command;

use common::{Dir, Switch, upgrade, wait_for};
use wires::{
    Wires, connection, fails, follows_its_interface, ip, refuses_bad_interfaces, run, transfer,
    waits_for_its_interface, waits_for_its_namespace, within,
};

/// Bytes of a port's frames, and their number, of all queues.
fn received(switch: &Switch, port: &str) -> (u64, u64) {
    let stats = switch.port("stats", port);
    let sum = |key: &str| {
        stats["ingress"].as_array().unwrap().iter().map(|q| q[key].as_u64().unwrap()).sum::<u64>()
    };
    (sum("bytes"), sum("frames"))
}

#[test]
fn tcp_between_two_kernels_passes_in_long_frames_and_over_an_upgrade() {
    for options in ["", ",queues=2"] {
        let Some(wires) = Wires::new() else { return };
        let dir = Dir::new();
        let switch = Switch::start(&dir, &[], &wires.ports("af-packet", options));
        let (mut client, mut server) = connection(&wires);
        transfer(&mut client, &mut server, 32 << 20);
        transfer(&mut server, &mut client, 1 << 20);
        let (bytes, frames) = received(&switch, "a");
        // Longer by average than any frame of one segment; how long depends on losses.
        assert!(bytes > 32 << 20 && bytes / frames > 1514, "{bytes} bytes in {frames} frames");
        let _next = upgrade(&switch);
        transfer(&mut client, &mut server, 1 << 20);
        assert!(received(&switch, "a").0 > bytes, "counters are handed on");
        assert_eq!(switch.port("show", "a")["kind"], "af-packet:va");
        switch.shut_down(&dir);
    }
}

#[test]
fn port_follows_its_interface_down_and_up_and_stays_down_when_it_is_removed() {
    let Some(wires) = Wires::new() else { return };
    follows_its_interface(&wires, "af-packet");
}

#[test]
fn port_whose_network_namespace_does_not_exist_yet_is_down_until_it_does() {
    let Some(wires) = Wires::new() else { return };
    waits_for_its_namespace(&wires, "af-packet");
}

#[test]
fn port_whose_interface_does_not_exist_yet_is_down_until_it_does() {
    let Some(wires) = Wires::new() else { return };
    waits_for_its_interface(&wires, "af-packet", |_| true);
}

#[test]
fn frames_that_the_switch_does_not_take_are_counted() {
    let Some(wires) = Wires::new() else { return };
    let dir = Dir::new();
    let switch = Switch::start(&dir, &[], &wires.ports("af-packet", ""));
    wait_for("the drain", || switch.json(&["drain", "a"])["drain"] == "drained");
    assert!(ip(&format!("-n {} neigh add 10.8.0.9 lladdr 02:00:00:00:00:09 dev v1", wires.a)));
    let socket = within(&wires.a, || UdpSocket::bind("10.8.0.1:0").unwrap());
    let lost = || switch.counter("a", "ingress", "drops_not_read");
    wait_for("a loss", || {
        (0..5000).for_each(|_| _ = socket.send_to(&[0; 1400], "10.8.0.9:9").unwrap());
        lost() > 0
    });
    let why = String::from_utf8(switch.ctl(&["why", "a", "--seconds", "0"]).stdout).unwrap();
    assert!(why.contains("drops_not_read") && why.contains("faster than they were read"), "{why}");
}

#[test]
fn interfaces_that_cannot_be_used_are_errors_with_a_remedy() {
    let Some(wires) = Wires::new() else { return };
    refuses_bad_interfaces(&wires, "af-packet");
    let all = run("x=af-packet:lo");
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-net_raw", "--inh-caps", "-net_raw"]);
    command.arg(all.get_program()).args(all.get_args());
    if Command::new("setpriv").arg("--version").output().is_ok() {
        let want = "open a packet socket on interface `lo`: CAP_NET_RAW is required";
        fails(&mut command, want);
    }
}
