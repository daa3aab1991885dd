//! Two TAP interfaces joined by one thread, with no switch between: `wire NETNS_A NETNS_B [plain]`
//! makes `wire0` in both namespaces and moves frames until killed. Prints the rate in each
//! direction once a second.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use switch::frame::Burst;
use switch::port::{Egress, Ingress};
use switch::stats::{EgressStats, IngressStats};
use uplink::{Batching, Create, TapEgress, TapFd, TapIngress, TapOptions};

struct End {
    ingress: TapIngress,
    egress: TapEgress,
    seen: Arc<IngressStats>,
}

fn end(netns: &str, batching: Batching) -> Result<End, Box<dyn std::error::Error>> {
    let (name, queues, netns) = ("wire0".to_string(), NonZeroU16::MIN, Some(netns.to_string()));
    let (mtu, mac, queue_len, create, up) = (None, None, Some(1000), Create::IfMissing, true);
    let tap = uplink::open(&TapOptions { name, netns, queues, create, up, mtu, mac, queue_len })?;
    let fd = || TapFd::new(Arc::clone(&tap.queues[0]), batching);
    let seen = Arc::new(IngressStats::default());
    let ingress = TapIngress::new(fd(), tap.offloads_read, Arc::clone(&seen))?;
    let egress = TapEgress::new(fd(), tap.offloads_write, Arc::new(EgressStats::default()));
    Ok(End { ingress, egress, seen })
}

/// Moves one burst from `from` to `to`; returns the number of frames.
fn pass(from: &mut End, to: &mut End, burst: &mut Burst<'static>) -> usize {
    let picks: [u16; 64] = std::array::from_fn(|i| i as u16);
    let shown = from.ingress.burst(64, switch::time::Instant::START, burst, &mut |burst| {
        burst.snapshot();
        let n = burst.frames.len();
        to.egress.put(burst, &picks[..n]).expect("the interface exists");
    });
    shown.expect("the interface exists")
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().collect();
    let [_, a, b, rest @ ..] = &args[..] else { return Err("usage: wire NETNS_A NETNS_B".into()) };
    let batching = if rest.is_empty() { Batching::Auto } else { Batching::Plain };
    let (mut a, mut b) = (end(a, batching)?, end(b, batching)?);
    let mut burst = Burst::default();
    let mut printed = Instant::now();
    let mut last = [0; 4];
    loop {
        let frames = pass(&mut a, &mut b, &mut burst) + pass(&mut b, &mut a, &mut burst);
        if frames == 0 {
            std::thread::sleep(Duration::from_micros(20));
        }
        if printed.elapsed() >= Duration::from_secs(1) {
            printed = Instant::now();
            let seen = [&a.seen, &b.seen];
            let now = [0, 1, 2, 3].map(|i| match i & 1 {
                0 => seen[i / 2].frames.get(),
                _ => seen[i / 2].bytes.get() * 8 / 1_000_000,
            });
            let d: [u64; 4] = std::array::from_fn(|i| now[i] - last[i]);
            println!("{} frames/s {} Mbit/s, back {} frames/s {} Mbit/s", d[0], d[1], d[2], d[3]);
            last = now;
        }
    }
}
