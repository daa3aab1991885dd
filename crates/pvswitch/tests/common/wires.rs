//! Two kernels, each at the other end of a veth, and a switch between them.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Namespaces `a` and `b` with a veth each, `v1`, whose other ends `va` and `vb` are in `mid`.
pub struct Wires {
    pub mid: String,
    pub a: String,
    pub b: String,
}

pub fn ip(args: &str) -> bool {
    Command::new("ip").args(args.split(' ')).output().is_ok_and(|out| out.status.success())
}

impl Wires {
    /// `None`: this machine does not permit namespaces.
    pub fn new() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = |end: &str| format!("pvs-wire-{}-{n}-{end}", std::process::id());
        let all = Self { mid: name("mid"), a: name("a"), b: name("b") };
        if ![&all.mid, &all.a, &all.b].iter().all(|netns| ip(&format!("netns add {netns}"))) {
            println!("skipped: no network namespaces here");
            return None;
        }
        for (netns, side, host) in [(&all.a, "va", 1), (&all.b, "vb", 2)] {
            let do_it = |args: &str| assert!(ip(args), "ip {args}");
            do_it(&format!("-n {} link add {side} type veth peer name v1 netns {netns}", all.mid));
            do_it(&format!("-n {} link set {side} up", all.mid));
            do_it(&format!("-n {netns} link set v1 address 02:00:00:00:00:0{host} up"));
            do_it(&format!("-n {netns} addr add 10.8.0.{host}/24 dev v1"));
        }
        Some(all)
    }

    /// Ports `a` and `b` of this kind at the ends of the wires.
    pub fn ports(&self, kind: &str, options: &str) -> [String; 2] {
        ["a", "b"].map(|port| format!("{port}={kind}:v{port},netns={}{options}", self.mid))
    }
}

impl Drop for Wires {
    fn drop(&mut self) {
        for netns in [&self.mid, &self.a, &self.b] {
            ip(&format!("netns del {netns}"));
        }
    }
}

pub fn within<T: Send>(netns: &str, work: impl FnOnce() -> T + Send) -> T {
    uplink::in_netns(netns, work).unwrap()
}

/// Bytes that no other position has.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len as u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// A TCP connection from `a` to `b`.
pub fn connection(wires: &Wires) -> (TcpStream, TcpStream) {
    let listener = within(&wires.b, || TcpListener::bind("10.8.0.2:5000").unwrap());
    let client = within(&wires.a, || TcpStream::connect("10.8.0.2:5000").unwrap());
    let (server, _) = listener.accept().unwrap();
    for end in [&client, &server] {
        end.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    }
    (client, server)
}

/// Sends through the connection and checks what arrives.
pub fn transfer(from: &mut TcpStream, to: &mut TcpStream, len: usize) {
    let sent = pattern(len);
    std::thread::scope(|scope| {
        scope.spawn(|| from.write_all(&sent).unwrap());
        let mut got = vec![0; len];
        to.read_exact(&mut got).unwrap();
        assert!(got == sent);
    });
}
