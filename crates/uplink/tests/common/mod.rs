//! Namespaces, taps and frames for tests.
#![allow(dead_code)]

use std::num::NonZeroU16;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use switch::frame::Burst;
use switch::port::Ingress;
use switch::stats::{EgressStats, IngressStats};
use uplink::{Batching, Create, Tap, TapEgress, TapFd, TapIngress, TapOptions};

/// A network namespace without IPv6 (which would send its own frames), removed when dropped.
pub struct Netns(pub String);

impl Netns {
    /// `None`, with the reason printed, if this machine does not permit it.
    pub fn new() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("pvs-tap-{}-{n}", std::process::id());
        match Command::new("ip").args(["netns", "add", &name]).output() {
            Ok(output) if output.status.success() => {}
            Ok(output) => {
                println!("skipped: ip netns add: {}", String::from_utf8_lossy(&output.stderr));
                return None;
            }
            Err(error) => {
                println!("skipped: ip is not installed ({error})");
                return None;
            }
        }
        let netns = Self(name);
        netns.run(|| {
            for scope in ["all", "default"] {
                let _ =
                    std::fs::write(format!("/proc/sys/net/ipv6/conf/{scope}/disable_ipv6"), "1");
            }
        });
        netns.ip("link set lo up");
        Some(netns)
    }

    pub fn ip(&self, args: &str) {
        let output = Command::new("ip").args(["-n", &self.0]).args(args.split(' ')).output();
        let output = output.unwrap();
        assert!(output.status.success(), "ip {args}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Runs `work` inside.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        uplink::in_netns(&self.0, work).unwrap()
    }

    /// A TAP named `t0`, up, with address 10.9.0.`host`/24 and MAC 02:00:00:00:00:`host`.
    pub fn tap(&self, host: u8, queues: u16) -> Tap {
        let tap = uplink::open(&TapOptions {
            name: "t0".into(),
            netns: Some(self.0.clone()),
            queues: NonZeroU16::new(queues).unwrap(),
            create: Create::IfMissing,
            up: true,
            mtu: None,
            mac: Some(mac(host)),
            queue_len: Some(2000),
        });
        self.ip(&format!("addr add 10.9.0.{host}/24 dev t0"));
        tap.unwrap()
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

pub fn mac(host: u8) -> [u8; 6] {
    [2, 0, 0, 0, 0, host]
}

/// Both directions of queue `n` of `tap`, with their counters.
pub struct Port {
    pub ingress: TapIngress,
    pub egress: TapEgress,
    pub seen: Arc<IngressStats>,
    pub sent: Arc<EgressStats>,
}

pub fn port(tap: &Tap, n: usize, batching: Batching) -> Port {
    let seen = Arc::new(IngressStats::default());
    let sent = Arc::new(EgressStats::default());
    let fd = || TapFd::new(Arc::clone(&tap.queues[n]), batching);
    let ingress = TapIngress::new(fd(), tap.offloads_read, Arc::clone(&seen)).unwrap();
    let egress = TapEgress::new(fd(), tap.offloads_write, Arc::clone(&sent));
    Port { ingress, egress, seen, sent }
}

/// An Ethernet + IPv4 + UDP frame from host 2 to host 1, port 4000, with `payload`.
pub fn udp_frame(payload: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    frame.extend_from_slice(&mac(1));
    frame.extend_from_slice(&mac(2));
    frame.extend_from_slice(&[8, 0]);
    let total = (28 + payload.len()) as u16;
    let mut ip = [0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 9, 0, 2, 10, 9, 0, 1];
    ip[2..4].copy_from_slice(&total.to_be_bytes());
    let words = ip.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])));
    let sum: u32 = words.sum();
    let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&sum.to_be_bytes());
    frame.extend_from_slice(&ip);
    frame.extend_from_slice(&5000_u16.to_be_bytes());
    frame.extend_from_slice(&4000_u16.to_be_bytes());
    frame.extend_from_slice(&(8 + payload.len() as u16).to_be_bytes());
    frame.extend_from_slice(&[0, 0]); // no UDP checksum
    frame.extend_from_slice(payload);
    frame
}

/// Whether `frame` is UDP over IPv4 to port 4000, and its payload.
pub fn udp_payload(frame: &[u8]) -> Option<&[u8]> {
    let ours = frame.len() >= 42
        && frame[12..14] == [8, 0]
        && frame[23] == 17
        && frame[36..38] == 4000_u16.to_be_bytes();
    ours.then(|| &frame[42..])
}

/// Polls `ingress` until `enough` returns true, for at most five seconds.
pub fn poll_until(
    ingress: &mut TapIngress,
    mut each: impl FnMut(&mut Burst<'_>),
    mut enough: impl FnMut() -> bool,
) {
    let patience = Duration::from_secs(5);
    let mut end = Instant::now() + patience;
    let mut burst = Burst::default();
    while !enough() {
        assert!(Instant::now() < end, "no more frames within five seconds");
        if ingress.burst(64, switch::time::Instant::START, &mut burst, &mut each).unwrap() > 0 {
            end = Instant::now() + patience;
        }
    }
}

/// The bytes of frame `i`.
pub fn bytes(burst: &Burst<'_>, i: usize) -> Vec<u8> {
    let frame = &burst.frames[i];
    let mut all = vec![0; frame.len as usize];
    let mut at = 0;
    for seg in burst.segs(frame) {
        at += seg.read(&mut all[at..]);
    }
    assert_eq!(at, all.len());
    all
}
