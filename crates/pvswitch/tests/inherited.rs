//! `fd=NAME`: descriptors that the parent process passed.

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Output};

use common::{Dir, tap_queue};

/// Network namespace of a test, removed on drop; `None`: not permitted on this machine.
struct Netns(String);

impl Netns {
    fn new(name: &str) -> Option<Self> {
        let name = format!("pvs-fd-{}-{name}", std::process::id());
        let made = Command::new("ip").args(["netns", "add", &name]).status();
        if !made.is_ok_and(|status| status.success()) {
            println!("skipped: ip netns add failed");
            return None;
        }
        Some(Self(name))
    }

    /// One queue of a TAP in it.
    fn tap(&self, name: &str) -> OwnedFd {
        tap_queue(name, Some(&self.0))
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

/// Runs a switch with `stdin` as descriptor 3, and without a descriptor 4, for a quarter of a
/// second if nothing is wrong.
fn run(stdin: impl Into<std::process::Stdio>, env: &str, arguments: &str, dir: &Dir) -> Output {
    let control = dir.path("control");
    let command = format!(
        "{env}; export LISTEN_PID LISTEN_FDS LISTEN_FDNAMES; exec \"$0\" run --quiet --duration \
         0.25 --control {} {arguments} 3<&0 4<&- </dev/null",
        control.display()
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", &command, env!("CARGO_BIN_EXE_pvswitch")]);
    shell.stdin(stdin).output().unwrap()
}

const OWN: &str = "LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=vm1";

fn refused(output: &Output, words: &[&str]) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{error}");
    words.iter().for_each(|word| assert!(error.contains(word), "'{word}' in: {error}"));
}

#[test]
fn inherited_listener_serves_a_port_and_keeps_its_name() {
    let dir = Dir::new();
    let path = dir.path("vm1.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let kept = listener.try_clone().unwrap();
    let output =
        run(std::os::fd::OwnedFd::from(listener), OWN, "--port vm1=vhost-user:fd=vm1", &dir);
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{log}");
    // Neither shut down nor removed: it is the parent process's.
    let _client = UnixStream::connect(&path).unwrap();
    kept.accept().unwrap();
}

#[test]
fn descriptors_of_other_kinds_and_names_are_refused() {
    let dir = Dir::new();
    let port = "--port vm1=vhost-user:fd=vm1";
    let null = || std::fs::File::open("/dev/null").unwrap();
    refused(&run(null(), OWN, port, &dir), &["vm1", "not a socket", "ListenStream="]);
    let (stream, _other) = UnixStream::pair().unwrap();
    let stream = std::os::fd::OwnedFd::from(stream);
    refused(&run(stream, OWN, port, &dir), &["vm1", "does not listen"]);
    let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    refused(&run(std::os::fd::OwnedFd::from(tcp), OWN, port, &dir), &["not a Unix socket"]);
    let other = "--port vm1=vhost-user:fd=vm2";
    refused(&run(null(), OWN, other, &dir), &["'vm2'", "there are: vm1", "FileDescriptorName=vm2"]);
    let foreign = "LISTEN_PID=1 LISTEN_FDS=1 LISTEN_FDNAMES=vm1";
    refused(&run(null(), foreign, port, &dir), &["'vm1'", "none was passed"]);
    let many = "LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=vm1:vm2";
    refused(&run(null(), many, port, &dir), &["has 2 names"]);
    let closed = "LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=vm1:vm2";
    refused(&run(null(), closed, port, &dir), &["descriptor 4", "was not passed"]);
}

#[test]
fn one_descriptor_serves_one_port() {
    let dir = Dir::new();
    let listener = UnixListener::bind(dir.path("vm1.sock")).unwrap();
    let ports = "--port vm1=vhost-user:fd=vm1 --port vm2=vhost-user:fd=vm1";
    let output = run(std::os::fd::OwnedFd::from(listener), OWN, ports, &dir);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("port 'vm2'") && error.contains("port 'vm1'"), "{error}");
}

/// The reply to GET /metrics.
fn metrics(mut stream: impl Read + Write) -> String {
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply
}

#[test]
fn http_is_served_at_an_inherited_tcp_or_unix_socket() {
    let dir = Dir::new();
    let env = OWN.replace("vm1", "web");
    let arguments = "--http fd=web --port a=null";
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = tcp.local_addr().unwrap();
    let client = std::thread::spawn(move || metrics(TcpStream::connect(at).unwrap()));
    let output = run(OwnedFd::from(tcp), &env, arguments, &dir);
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{log}");
    assert!(!log.contains("not used"), "{log}");
    assert!(client.join().unwrap().contains("pvswitch_port_info{port=\"a\""));

    let path = dir.path("web.sock");
    let unix = UnixListener::bind(&path).unwrap();
    let at = path.clone();
    let client = std::thread::spawn(move || metrics(UnixStream::connect(at).unwrap()));
    let output = run(OwnedFd::from(unix), &env, arguments, &dir);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(client.join().unwrap().contains("pvswitch_port_info{port=\"a\""));
    assert!(path.exists(), "the parent process keeps its name");

    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let output = run(OwnedFd::from(udp), &env, arguments, &dir);
    refused(&output, &["http", "'web'", "neither a listening TCP"]);
    let tcp = || OwnedFd::from(TcpListener::bind("127.0.0.1:0").unwrap());
    refused(&run(tcp(), OWN, arguments, &dir), &["http", "'web'", "there are: vm1"]);
    let output = run(tcp(), &env, &format!("{arguments} --http-mode 0660"), &dir);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("--http unix:PATH"), "{error}");
}

#[test]
fn inherited_tap_serves_a_port_from_another_network_namespace() {
    let Some(netns) = Netns::new("tap") else { return };
    let dir = Dir::new();
    let env = OWN.replace("vm1", "host");
    let port = "--port host=tap:fd=host";
    let output = run(netns.tap("t0"), &env, port, &dir);
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{log}");
    assert!(!log.contains("not used"), "{log}");
    // Not in this namespace: the switch has only its descriptor.
    assert!(!std::path::Path::new("/sys/class/net/t0").exists());

    let output = run(netns.tap("t0"), &env, &format!("{port},queues=2"), &dir);
    refused(&output, &["port 'host'", "1 descriptors are named 'host'", "set queues=1"]);
    let output = run(netns.tap("t0"), &env, &format!("{port} --port b=tap:fd=host"), &dir);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("fd=host is already used by port 'host'"), "{error}");
    let (stream, _other) = UnixStream::pair().unwrap();
    let output = run(OwnedFd::from(stream), &env, port, &dir);
    refused(&output, &["host", "is not a queue of a TAP", "store-tap"]);
    // The device, before an interface is attached to it.
    if let Ok(device) = std::fs::File::options().read(true).write(true).open("/dev/net/tun") {
        refused(&run(device, &env, port, &dir), &["host", "is not a queue of a TAP"]);
    }
    for option in ["netns=x", "mtu=9000", "persist=on", "evpn=br0"] {
        let output = run(netns.tap("t0"), &env, &format!("{port},{option}"), &dir);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("tap:fd=host is inherited"), "{error}");
    }
}

#[test]
fn store_tap_outside_a_unit_says_where_to_run_it() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pvswitch"));
    let output = command.args(["store-tap", "t0"]).env_remove("NOTIFY_SOCKET").output().unwrap();
    refused(&output, &["NOTIFY_SOCKET is not set", "ExecStartPre=+"]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_pvswitch"));
    let output = command.args(["store-tap", "t0", "--name", "a:b"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}
