//! Cost of a frame in a TAP queue, by batch size: `unshare -n target/release/examples/tap_rate`.

use std::net::UdpSocket;
use std::num::NonZeroU16;
use std::process::Command;
use std::time::Instant;

use shm::{Seg, SegMut};
use uplink::{Batching, Create, TapFd, TapOptions, VNET_LEN};

const QUEUED: usize = 4000;

fn read_all(fd: &mut TapFd, memory: &mut [Vec<u8>], n: usize) -> usize {
    let mut frames = 0;
    loop {
        let mut batch = fd.reads();
        for buffer in &mut memory[..n] {
            batch.push(SegMut::of(buffer));
            batch.end_frame();
        }
        match batch.run().iter().filter(|r| r.is_ok()).count() {
            0 => return frames,
            got => frames += got,
        }
    }
}

fn write_all(fd: &mut TapFd, frame: &[u8], n: usize) -> usize {
    for _ in 0..QUEUED / n {
        let mut batch = fd.writes();
        for _ in 0..n {
            batch.push(Seg::of(frame));
            batch.end_frame();
        }
        assert!(batch.run().iter().all(Result::is_ok));
    }
    QUEUED / n * n
}

fn timed(work: impl FnOnce() -> usize) -> (usize, u128) {
    let start = Instant::now();
    (work(), start.elapsed().as_nanos())
}

/// Nanoseconds for each frame, the best of all rounds.
fn best(mut round: impl FnMut() -> (usize, u128)) -> u128 {
    (0..25).map(|_| round()).map(|(frames, ns)| ns / frames.max(1) as u128).min().unwrap()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (name, queues) = ("rate0".to_string(), NonZeroU16::MIN);
    let (netns, mtu, mac, create, up) = (None, None, None, Create::IfMissing, true);
    let queue_len = Some(QUEUED as u32 + 96);
    let options = TapOptions { name, netns, queues, create, up, mtu, mac, queue_len };
    let tap = uplink::open(&options)?;
    let neighbour = "neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev rate0";
    for args in ["addr add 10.9.0.1/24 dev rate0", neighbour] {
        Command::new("ip").args(args.split(' ')).status()?;
    }
    let socket = UdpSocket::bind("10.9.0.1:0")?;
    let mut memory = vec![vec![0; 1600]; 64];
    println!("frame  batch      empty ns   read ns  write ns");
    for (len, n) in [64, 1514].into_iter().flat_map(|l| [1, 2, 4, 8, 16, 64].map(|n| (l, n))) {
        for batching in [Batching::Plain, Batching::Writes, Batching::Auto] {
            let mut fd = TapFd::new(tap.queues[0].clone(), batching);
            let empty =
                best(|| timed(|| (0..99).map(|_| 1 + read_all(&mut fd, &mut memory, n)).sum()));
            let read = best(|| {
                (0..QUEUED)
                    .for_each(|_| drop(socket.send_to(&[0; 1472][..len - 42], "10.9.0.2:9")));
                timed(|| read_all(&mut fd, &mut memory, n))
            });
            // To an unknown address: the kernel drops it at once.
            let frame = [&[0; VNET_LEN][..], &[2; 12], &[8, 0], &vec![0; len - 14]].concat();
            let write = best(|| timed(|| write_all(&mut fd, &frame, n)));
            println!("{len:5}  {n:2} {batching:6?} {empty:9} {read:9} {write:9}");
        }
    }
    Ok(())
}
