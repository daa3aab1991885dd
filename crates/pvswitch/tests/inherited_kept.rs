//! `fd=NAME`: descriptors that the parent process passed serve each process that follows the
//! first, after `ctl upgrade` and after a kill.

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::Command;

use common::{
    Dir, Gen, Switch, kill_and_wait, may_make_taps, of_interface, sender_and_sink, tap_queue,
    upgrade, wait_for, wait_until_settled,
};

/// Starts a switch with two descriptors, 3 and 4, of these names.
fn start(dir: &Dir, fds: [(&str, OwnedFd); 2], args: &[&str], ports: &[String]) -> Switch {
    let [(third, stdin), (fourth, stdout)] = fds;
    let script = format!(
        "export LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES={third}:{fourth}; \
         exec \"$0\" run --quiet \"$@\" 3<&0 4<&1 </dev/null >/dev/null"
    );
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_pvswitch")]).args(args);
    command.args(ports.iter().flat_map(|port| ["--port", port])).env_remove("RUST_LOG");
    command.stdin(stdin).stdout(stdout);
    Switch::spawn(dir, command)
}

/// A switch whose control socket and port `a` are sockets of its parent process.
fn with_sockets(dir: &Dir, args: &[&str]) -> (Switch, [UnixListener; 2]) {
    let own = ["a", "ctl"].map(|name| UnixListener::bind(dir.path(name)).unwrap());
    let fd = |of: &UnixListener| OwnedFd::from(of.try_clone().unwrap());
    let fds = [("vm1", fd(&own[0])), ("control", fd(&own[1]))];
    let ports = ["a=vhost-user:fd=vm1".into(), dir.port("b", "")];
    (start(dir, fds, &[args, &["--control", "fd=control"]].concat(), &ports), own)
}

/// Replaces the process three times: guests stay connected, and a port that is removed and added
/// again gets its socket, which is still the parent process's at the end.
fn sockets_serve_each_process(args: &[&str], mut replace: impl FnMut(&Switch)) {
    let dir = Dir::new();
    let (switch, own) = with_sockets(&dir, args);
    let (sender, sink) = sender_and_sink(&switch, &dir, &[]);
    for _ in 0..2 {
        switch.wait_for_frames("a", 1000);
        replace(&switch);
    }
    switch.wait_for_frames("a", 1000);
    switch.check_connected_once(&["a", "b"]);
    sender.end();
    let add = ["add-port", "a=vhost-user:fd=vm1"];
    assert!(!switch.ctl(&add).status.success(), "the port exists");
    switch.json(&["del-port", "a"]);
    switch.json(&add);
    replace(&switch);
    let sender = Gen::start(&dir.path("a"), &["--rate", "1k"]);
    switch.wait_up("a", true);
    switch.wait_for_frames("a", 100);
    sender.end();
    sink.end();
    assert!(!switch.log().contains("ERROR"), "{}", switch.log());
    assert!(switch.ctl(&["shutdown"]).status.success());
    wait_for("its end", || !dir.path("b").exists());
    for (name, listener) in ["a", "ctl"].iter().zip(&own) {
        let _client = std::os::unix::net::UnixStream::connect(dir.path(name)).unwrap();
        listener.accept().unwrap();
    }
}

#[test]
fn sockets_serve_after_upgrades() {
    let mut living = Vec::new();
    sockets_serve_each_process(&[], |switch| living.push(upgrade(switch)));
}

#[test]
fn sockets_serve_after_upgrades_of_a_kept_switch() {
    let mut living = Vec::new();
    sockets_serve_each_process(&["--keep"], |switch| living.push(upgrade(switch)));
}

#[test]
fn sockets_serve_after_kills_of_a_kept_switch() {
    sockets_serve_each_process(&["--keep"], |switch| {
        wait_until_settled(switch);
        kill_and_wait(switch);
    });
}

/// The reply to GET /metrics.
fn metrics(at: std::net::SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(at)?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    Ok(reply)
}

#[test]
fn tap_and_tcp_socket_serve_after_upgrades_and_kills() {
    if !may_make_taps() {
        return;
    }
    let dir = Dir::new();
    let name = format!("pvsst{}", std::process::id() % 100_000);
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = tcp.local_addr().unwrap();
    let fds = [("host", tap_queue(&name, None)), ("web", OwnedFd::from(tcp))];
    let args = ["--keep", "--http", "fd=web", "--forward", "cross", "--control", &dir.text("ctl")];
    let ports = [dir.port("a", ""), "h=tap:fd=host".into()];
    let switch = start(&dir, fds, &args, &ports);
    let received = || of_interface(&name, "statistics/rx_packets");
    let before = received();
    let sender = Gen::start(&dir.path("a"), &["--rate", "5k"]);
    switch.wait_up("a", true);
    let mut living = Vec::new();
    for killed in [false, true, false] {
        switch.wait_for_frames("a", 500);
        wait_until_settled(&switch);
        if killed {
            kill_and_wait(&switch);
        } else {
            living.push(upgrade(&switch));
        }
        let own = "pvswitch_port_info{port=\"h\"";
        match killed {
            // The kernel closes what a killed process has accepted.
            true => wait_for("a reply", || metrics(at).is_ok_and(|reply| reply.contains(own))),
            false => assert!(metrics(at).unwrap().contains(own)),
        }
    }
    switch.wait_for_frames("a", 500);
    let sent = sender.end()["sent_frames"].as_u64().unwrap();
    wait_for("all frames", || received() - before >= sent);
    // A kill may deliver a burst twice.
    assert!(received() - before <= sent + 64, "{} of {sent}", received() - before);
    switch.check_connected_once(&["a"]);
}
