//! Frames through real TAP interfaces, each test in a network namespace of its own.

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Netns, Port, bytes, mac, poll_until, port, udp_frame, udp_payload};
use shm::{GuestMemory, Mapping, Region, Seg, SegMut};
use switch::frame::Burst;
use switch::port::{Egress, Ingress};
use switch::time::Instant;
use switch::vnet::{GSO_TCPV4, NEEDS_CSUM, VnetHdr};
use uplink::{Batching, TapFd, VNET_LEN};

const WAYS: [Batching; 3] = [Batching::Auto, Batching::Writes, Batching::Plain];

/// A namespace whose kernel is host 1, with host 2 as a static neighbour.
fn wire() -> Option<(Netns, uplink::Tap)> {
    let netns = Netns::new()?;
    let tap = netns.tap(1, 1);
    netns.ip("neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev t0");
    Some((netns, tap))
}

fn socket(netns: &Netns) -> UdpSocket {
    let socket = netns.run(|| UdpSocket::bind("10.9.0.1:4000").unwrap());
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    socket
}

/// A burst of frames in private memory.
fn burst_of<'m>(frames: impl IntoIterator<Item = &'m [u8]>) -> Burst<'m> {
    let mut burst = Burst::default();
    for frame in frames {
        push(&mut burst, &[Seg::of(frame)], VnetHdr::NONE);
    }
    burst
}

fn push<'m>(burst: &mut Burst<'m>, segs: &[Seg<'m>], hdr: VnetHdr) {
    let first = burst.segs.len();
    burst.segs.extend_from_slice(segs);
    burst.push_at(first, segs.len(), segs.iter().map(|s| s.len()).sum(), hdr);
}

fn number(payload: &[u8]) -> u32 {
    u32::from_be_bytes(payload[..4].try_into().unwrap())
}

#[test]
fn this_kernel_has_io_uring_on_tap() {
    let Some((_netns, tap)) = wire() else { return };
    let fd = TapFd::new(tap.queues[0].clone(), Batching::Auto);
    let disabled = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    if disabled.is_ok_and(|s| s.trim() != "0") {
        println!("skipped: io_uring is disabled here");
        return;
    }
    // Before Linux 6.4 it is for writes only.
    assert_ne!(fd.batching(), Batching::Plain);
    for batching in [Batching::Writes, Batching::Plain] {
        assert_eq!(TapFd::new(tap.queues[0].clone(), batching).batching(), batching);
    }
}

#[test]
fn descriptor_without_nowait_falls_back() {
    let file = std::fs::File::open("/proc/self/status").unwrap();
    let mut fd = TapFd::new(std::sync::Arc::new(file.into()), Batching::Auto);
    assert_eq!(fd.batching(), Batching::Plain);
    let mut memory = [[0; 8]; 4];
    let mut batch = fd.reads();
    for piece in &mut memory {
        batch.push(SegMut::of(piece));
        batch.end_frame();
    }
    assert_eq!(batch.run(), [Ok(8); 4]);
    assert_eq!(memory[0][..5], *b"Name:");
}

#[test]
fn frames_arrive_in_order_for_any_burst_size() {
    for batching in WAYS {
        let Some((netns, tap)) = wire() else { return };
        let Port { mut ingress, seen, .. } = port(&tap, 0, batching);
        let socket = socket(&netns);
        let mut next = 0_u32;
        for group in [1_u32, 2, 3, 10, 64, 65, 200, 500] {
            let first = next;
            for i in first..first + group {
                let mut payload = [0; 30];
                payload[..4].copy_from_slice(&i.to_be_bytes());
                assert_eq!(socket.send_to(&payload, "10.9.0.2:4000").unwrap(), 30);
            }
            let count = std::cell::Cell::new(first);
            let each = |burst: &mut Burst<'_>| {
                for i in 0..burst.frames.len() {
                    let frame = bytes(burst, i);
                    let Some(payload) = udp_payload(&frame) else { continue };
                    assert_eq!(number(payload), count.get(), "{batching:?}");
                    count.set(count.get() + 1);
                }
            };
            poll_until(&mut ingress, each, || count.get() == first + group);
            next = count.get();
        }
        // The queue is empty, which one poll detects.
        let mut burst = Burst::default();
        assert_eq!(ingress.burst(64, Instant::START, &mut burst, &mut |_| ()), Ok(0));
        assert!(ingress.arm(), "no frame left");
        assert!(seen.frames.get() >= u64::from(next));
    }
}

#[test]
fn nothing_is_lost_while_the_sender_runs_beside_the_reader() {
    const ALL: u32 = 60_000;
    for batching in WAYS {
        let Some((netns, tap)) = wire() else { return };
        let Port { mut ingress, .. } = port(&tap, 0, batching);
        let socket = socket(&netns);
        let next = std::sync::atomic::AtomicU32::new(0);
        let end = std::time::Instant::now() + Duration::from_secs(20);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for i in 0..ALL {
                    // At most as many as the interface queues. If the reader failed, it ends here.
                    while i.wrapping_sub(next.load(Ordering::Relaxed)) > 50 {
                        if std::time::Instant::now() > end {
                            return;
                        }
                        std::thread::yield_now();
                    }
                    socket.send_to(&i.to_be_bytes(), "10.9.0.2:4000").unwrap();
                }
            });
            let each = |burst: &mut Burst<'_>| {
                for i in 0..burst.frames.len() {
                    let frame = bytes(burst, i);
                    let Some(payload) = udp_payload(&frame) else { continue };
                    assert_eq!(number(payload), next.fetch_add(1, Ordering::Relaxed));
                }
            };
            poll_until(&mut ingress, each, || next.load(Ordering::Relaxed) == ALL);
        });
    }
}

#[test]
fn frames_are_delivered_in_order_from_any_segments() {
    for batching in WAYS {
        let Some((netns, tap)) = wire() else { return };
        let Port { mut egress, sent, .. } = port(&tap, 0, batching);
        let socket = socket(&netns);
        let mut number = 0_u32;
        for (group, snapshot) in [(1, true), (64, true), (64, false), (150, true), (7, false)] {
            let frames: Vec<Vec<u8>> = (0..group)
                .map(|i: u32| {
                    let mut payload = vec![i as u8; 4 + i as usize * 9];
                    payload[..4].copy_from_slice(&(number + i).to_be_bytes());
                    udp_frame(&payload)
                })
                .collect();
            let mut burst = Burst::default();
            for frame in &frames {
                // Cuts inside the header, inside the private copy, and at its end.
                let all = Seg::of(frame);
                let cuts = [all.take(5), all.skip(5).take(60), all.skip(65).take(63)];
                push(&mut burst, &[&cuts[..], &[all.skip(128)]].concat(), VnetHdr::NONE);
            }
            if snapshot {
                burst.snapshot();
            }
            let picks: Vec<u16> = (0..group as u16).collect();
            assert_eq!(egress.put(&burst, &picks), Ok(group as usize));
            egress.flush();
            let mut buffer = [0; 2048];
            for i in 0..group {
                let len = socket.recv(&mut buffer).unwrap();
                assert_eq!(len, 4 + i as usize * 9);
                assert_eq!(self::number(&buffer), number + i, "{batching:?}");
                assert!(buffer[4..len].iter().all(|b| *b == i as u8));
            }
            number += group;
        }
        assert_eq!(sent.frames.get(), u64::from(number));
        assert_eq!(sent.groups.get(), 5);
    }
}

#[test]
fn picked_and_made_frames_are_delivered_and_no_others() {
    let Some((netns, tap)) = wire() else { return };
    let Port { mut egress, sent, .. } = port(&tap, 0, Batching::Auto);
    let socket = socket(&netns);
    let frames: Vec<Vec<u8>> = (0..4_u8).map(|i| udp_frame(&[i; 200])).collect();
    let burst = burst_of(frames.iter().map(Vec::as_slice));
    assert_eq!(egress.put(&burst, &[1, 3]), Ok(2));
    let made = udp_frame(&[9; 300]);
    let body = Seg::of(&made[54..]);
    let put = egress.put_parts(&made[..54], &[body.take(17), body.skip(17)], &VnetHdr::NONE);
    assert_eq!(put, Ok(true));
    assert_eq!(egress.room(1514, 45), Ok(45));
    assert!(!egress.arm());
    let mut buffer = [0; 2048];
    for want in [1, 3, 9] {
        let len = socket.recv(&mut buffer).unwrap();
        assert!(buffer[..len].iter().all(|b| *b == want), "{want}");
    }
    assert_eq!(sent.bytes.get(), 2 * 242 + 342);
}

#[test]
fn down_interface_drops_and_counts_then_works_again() {
    for batching in WAYS {
        let Some((netns, tap)) = wire() else { return };
        let Port { mut egress, mut ingress, sent, .. } = port(&tap, 0, batching);
        netns.ip("link set t0 down");
        let frame = udp_frame(b"hello");
        let burst = burst_of([&frame[..], &frame]);
        assert_eq!(egress.put(&burst, &[0, 1]), Ok(2));
        assert_eq!((sent.drops_down.get(), sent.frames.get()), (2, 0));
        assert_eq!(ingress.burst(64, Instant::START, &mut Burst::default(), &mut |_| ()), Ok(0));
        netns.ip("link set t0 up");
        let socket = socket(&netns);
        assert_eq!(egress.put(&burst, &[0]), Ok(1));
        assert_eq!(socket.recv(&mut [0; 64]).unwrap(), 5);
    }
}

#[test]
fn removed_interface_is_a_fault_of_the_port() {
    for batching in WAYS {
        let Some((netns, tap)) = wire() else { return };
        let Port { mut egress, mut ingress, .. } = port(&tap, 0, batching);
        netns.ip("link del t0");
        let frame = udp_frame(b"hello");
        let fault = egress.put(&burst_of([&frame[..]]), &[0]).unwrap_err();
        assert!(fault.0.contains("removed"), "{fault}");
        let fault =
            ingress.burst(64, Instant::START, &mut Burst::default(), &mut |_| ()).unwrap_err();
        assert!(fault.0.contains("removed"), "{fault}");
    }
}

#[test]
fn sender_that_truncates_its_memory_loses_its_frame_only() {
    for batching in WAYS {
        let Some((netns, tap)) = wire() else { return };
        let Port { mut egress, sent, .. } = port(&tap, 0, batching);
        let socket = socket(&netns);
        let path = std::env::temp_dir().join(format!("pvs-uplink-{}", std::process::id()));
        let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.unwrap();
        std::fs::remove_file(&path).unwrap();
        file.set_len(65536).unwrap();
        let mapping = std::sync::Arc::new(Mapping::new(file.as_fd(), 0, 65536).unwrap());
        let region = Region { guest_addr: 0, user_addr: 0, len: 65536, offset: 0, mapping };
        let memory = GuestMemory::new(vec![region]).unwrap();
        let good = udp_frame(&[5; 600]);
        memory.seg_mut(0, 1000, &mut 0).unwrap().write(&good);
        let lost = memory.seg(0, good.len() as u32, &mut 0).unwrap();
        let mut burst = burst_of([&good[..]]);
        push(&mut burst, &[lost], VnetHdr::NONE);
        push(&mut burst, &[Seg::of(&good)], VnetHdr::NONE);
        burst.snapshot();
        file.set_len(0).unwrap();
        assert_eq!(egress.put(&burst, &[0, 1, 2]), Ok(3));
        assert_eq!((sent.drops_bad_addr.get(), sent.frames.get()), (1, 2), "{batching:?}");
        for _ in 0..2 {
            assert_eq!(socket.recv(&mut [0; 2048]).unwrap(), 600);
        }
    }
}

#[test]
fn frames_the_kernel_rejects_are_dropped_and_counted() {
    let Some((netns, tap)) = wire() else { return };
    let Port { mut egress, sent, .. } = port(&tap, 0, Batching::Auto);
    let socket = socket(&netns);
    let good = udp_frame(&[5; 600]);
    let mut burst = burst_of([&good[..], &good[..9], &good[..]]);
    // A header length beyond the frame is only a hint; the frame is delivered.
    burst.frames[0].hdr.hdr_len = u16::MAX;
    // TCP segmentation requested for a UDP frame, whose checksum is elsewhere.
    let gso_type = GSO_TCPV4;
    let (gso_size, csum_start, csum_offset) = (100, 14, 16);
    let flags = NEEDS_CSUM;
    let hdr = VnetHdr { flags, gso_type, hdr_len: 54, gso_size, csum_start, csum_offset };
    push(&mut burst, &[Seg::of(&good)], hdr);
    burst.snapshot();
    assert_eq!(egress.put(&burst, &[0, 1, 2, 3]), Ok(4));
    assert_eq!(sent.frames.get() + sent.drops_too_long.get(), 4);
    assert!(sent.drops_too_long.get() >= 1);
    for _ in 0..2 {
        assert_eq!(socket.recv(&mut [0; 2048]).unwrap(), 600);
    }
}

#[test]
fn batches_read_and_write_memory_in_several_pieces() {
    for batching in WAYS {
        let Some((netns, tap)) = wire() else { return };
        let mut fd = TapFd::new(tap.queues[0].clone(), batching);
        let socket = socket(&netns);
        socket.send_to(&[7; 100], "10.9.0.2:4000").unwrap();
        socket.send_to(&[8; 50], "10.9.0.2:4000").unwrap();
        let mut header = [[0; VNET_LEN + 14]; 3];
        let mut short = [[0; 40]; 3];
        let mut long = [[0; 3000]; 3];
        let mut batch = fd.reads();
        for ((h, s), l) in header.iter_mut().zip(&mut short).zip(&mut long) {
            batch.push(SegMut::of(h));
            batch.push(SegMut::of(s));
            batch.push(SegMut::of(l));
            batch.end_frame();
        }
        let results = batch.run();
        assert_eq!(results[..2], [Ok(12 + 142), Ok(12 + 92)]);
        assert_eq!(
            results[2].map_err(std::io::Error::from).unwrap_err().kind(),
            std::io::ErrorKind::WouldBlock
        );
        assert_eq!(header[0][VNET_LEN..][..6], mac(2));
        assert_eq!(long[0][..142 - 14 - 40], [7; 88]);
        let frame = udp_frame(&[3; 99]);
        let mut batch = fd.writes();
        for cut in [1, 50] {
            batch.push(Seg::of(&[0; VNET_LEN]));
            batch.push(Seg::of(&frame[..cut]));
            batch.push(Seg::EMPTY);
            batch.push(Seg::of(&frame[cut..]));
            batch.end_frame();
        }
        let len = (VNET_LEN + frame.len()) as u32;
        assert_eq!(batch.run(), [Ok(len), Ok(len)]);
        assert!(fd.reads().run().is_empty() && fd.writes().run().is_empty());
        for _ in 0..2 {
            assert_eq!(socket.recv(&mut [0; 2048]).unwrap(), 99);
        }
    }
}

/// Moves frames from `from` to `to` until `stop`; returns the length of the longest one.
fn forward(mut from: Port, mut to: Port, stop: &AtomicBool) -> u32 {
    let mut burst = Burst::default();
    let mut longest = 0;
    while !stop.load(Ordering::Relaxed) {
        let shown = from.ingress.burst(64, Instant::START, &mut burst, &mut |burst| {
            burst.snapshot();
            let picks: Vec<u16> = (0..burst.frames.len() as u16).collect();
            let done = to.egress.put(burst, &picks).unwrap();
            assert_eq!(done, picks.len());
            longest = burst.frames.iter().map(|f| f.len).max().unwrap_or(0).max(longest);
        });
        if shown.unwrap() == 0 {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
    assert_eq!(from.seen.drops_bad_hdr.get(), 0);
    assert_eq!(from.seen.drops_too_long.get(), 0);
    longest
}

#[test]
fn tcp_between_two_kernels_passes_whole_gso_frames() {
    for batching in WAYS {
        let (Some(one), Some(two)) = (Netns::new(), Netns::new()) else { return };
        let taps = [one.tap(1, 1), two.tap(2, 1)];
        let stop = AtomicBool::new(false);
        let listener = two.run(|| TcpListener::bind("10.9.0.2:4000").unwrap());
        let longest = std::thread::scope(|scope| {
            let [there, back] = [(0, 1), (1, 0)].map(|(from, to)| {
                let (from, to) = (port(&taps[from], 0, batching), port(&taps[to], 0, batching));
                let stop = &stop;
                scope.spawn(move || forward(from, to, stop))
            });
            let receiver = scope.spawn(move || {
                let mut sum = 0_u64;
                let mut all = 0;
                let mut buffer = vec![0; 1 << 18];
                let (mut stream, _) = listener.accept().unwrap();
                loop {
                    let n = stream.read(&mut buffer).unwrap();
                    if n == 0 {
                        return (all, sum);
                    }
                    all += n;
                    sum += buffer[..n].iter().map(|b| u64::from(*b)).sum::<u64>();
                }
            });
            let mut stream = one.run(|| TcpStream::connect("10.9.0.2:4000").unwrap());
            let data: Vec<u8> = (0..1_000_003_u32).map(|i| (i % 251) as u8).collect();
            for _ in 0..40 {
                stream.write_all(&data).unwrap();
            }
            drop(stream);
            let sum: u64 = data.iter().map(|b| u64::from(*b)).sum();
            assert_eq!(receiver.join().unwrap(), (40 * data.len(), 40 * sum));
            stop.store(true, Ordering::Relaxed);
            there.join().unwrap().max(back.join().unwrap())
        });
        assert!(longest > 60_000, "longest frame: {longest}");
    }
}

#[test]
fn queues_of_one_interface_work_side_by_side() {
    let Some(netns) = Netns::new() else { return };
    let tap = netns.tap(1, 4);
    assert_eq!(tap.queues.len(), 4);
    netns.ip("neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev t0");
    let mut ports: Vec<Port> = (0..4).map(|n| port(&tap, n, Batching::Auto)).collect();
    // Many flows, so that the kernel spreads them.
    for _ in 0..64 {
        let socket = netns.run(|| UdpSocket::bind("10.9.0.1:0").unwrap());
        socket.send_to(&[1; 10], "10.9.0.2:4000").unwrap();
    }
    let mut got = Vec::new();
    for port in &mut ports {
        let mut burst = Burst::default();
        while port.ingress.burst(64, Instant::START, &mut burst, &mut |_| ()).unwrap() > 0 {}
        got.push(port.seen.frames.get());
    }
    assert_eq!(got.iter().sum::<u64>(), 64, "{got:?}");
    assert!(got.iter().filter(|n| **n > 0).count() > 1, "{got:?}");
    let socket = socket(&netns);
    for (i, port) in ports.iter_mut().enumerate() {
        let frame = udp_frame(&[i as u8; 20]);
        assert_eq!(port.egress.put(&burst_of([&frame[..]]), &[0]), Ok(1));
        assert_eq!(socket.recv(&mut [0; 64]).unwrap(), 20);
    }
}

#[test]
fn small_frames_leave_the_staging_memory_alone() {
    let resident = || {
        let text = std::fs::read_to_string("/proc/self/statm").unwrap();
        text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    let Some((netns, tap)) = wire() else { return };
    let before = resident();
    let mut ports: Vec<Port> = (0..16).map(|_| port(&tap, 0, Batching::Auto)).collect();
    let socket = socket(&netns);
    for port in &mut ports {
        let mut burst = Burst::default();
        for i in 0..2000_u32 {
            socket.send_to(&i.to_be_bytes(), "10.9.0.2:4000").unwrap();
            if i % 100 == 99 {
                while port.ingress.burst(64, Instant::START, &mut burst, &mut |_| ()).unwrap() > 0 {
                }
            }
        }
    }
    let each = (resident().saturating_sub(before)) / ports.len();
    println!("{each} bytes per port");
    // Other tests of this process run concurrently; the promise is 2 MiB.
    assert!(each < 1 << 20, "{each} bytes per port");
}
