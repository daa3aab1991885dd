//! `fd=NAME`: descriptors that the program's starter passed.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Output};

/// A directory, removed on drop.
struct Dir(PathBuf);

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn dir(name: &str) -> Dir {
    let dir = std::env::temp_dir().join(format!("pvs-fd-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    Dir(dir)
}

/// Runs a switch with `stdin` as descriptor 3, and without a descriptor 4, for a quarter of a
/// second if nothing is wrong.
fn run(stdin: impl Into<std::process::Stdio>, env: &str, arguments: &str, dir: &Dir) -> Output {
    let control = dir.0.join("control");
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
    let dir = dir("serves");
    let path = dir.0.join("vm1.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let kept = listener.try_clone().unwrap();
    let output =
        run(std::os::fd::OwnedFd::from(listener), OWN, "--port vm1=vhost-user:fd=vm1", &dir);
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{log}");
    // Neither shut down nor removed: it is the starter's.
    let _client = UnixStream::connect(&path).unwrap();
    kept.accept().unwrap();
}

#[test]
fn descriptors_of_other_kinds_and_names_are_refused() {
    let dir = dir("kinds");
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
    let dir = dir("twice");
    let listener = UnixListener::bind(dir.0.join("vm1.sock")).unwrap();
    let ports = "--port vm1=vhost-user:fd=vm1 --port vm2=vhost-user:fd=vm1";
    let output = run(std::os::fd::OwnedFd::from(listener), OWN, ports, &dir);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("port 'vm2'") && error.contains("port 'vm1'"), "{error}");
}
