//! Frames through AF_XDP sockets on a veth, each test in network namespaces of its own.

mod common;

use std::net::UdpSocket;
use std::num::NonZeroU16;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Netns, bytes, udp_frame, udp_payload};
use switch::frame::Burst;
use switch::port::{Egress, Fault, Ingress};
use switch::stats::{EgressStats, IngressStats};
use switch::vnet::VnetHdr;
use uplink::{
    PacketLink, TapError, Xdp, XdpEgress, XdpError, XdpHanded, XdpIngress, XdpMode, XdpOptions,
    clear_packet_error, pin_xdp,
};

/// `v0` in `ours` has AF_XDP sockets; `v1` in `host` is host 1, with host 2 as a static neighbour.
struct Wire {
    ours: Netns,
    host: Netns,
}

impl Wire {
    fn new() -> Option<Self> {
        Self::with_queues(1)
    }

    fn with_queues(n: u16) -> Option<Self> {
        let (ours, host) = (Netns::new()?, Netns::new()?);
        let queues = format!("numtxqueues {n} numrxqueues {n}");
        ours.ip(&format!("link add v0 {queues} type veth peer name v1 {queues} netns {}", host.0));
        ours.ip("link set v0 up");
        host.ip("link set v1 address 02:00:00:00:00:01 up");
        host.ip("addr add 10.9.0.1/24 dev v1");
        host.ip("neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev v1");
        Some(Self { ours, host })
    }

    fn socket(&self, address: &str) -> UdpSocket {
        let socket = self.host.run(|| UdpSocket::bind(address).unwrap());
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        socket
    }
}

fn options(netns: &Netns, name: &str, queues: u16) -> XdpOptions {
    XdpOptions {
        name: name.into(),
        netns: Some(netns.0.clone()),
        queues: NonZeroU16::new(queues).unwrap(),
        mode: XdpMode::Auto,
        map: None,
    }
}

fn open(netns: &Netns, name: &str) -> Xdp {
    Xdp::open(&options(netns, name, 1), false).unwrap().0
}

struct Port {
    ingress: XdpIngress,
    egress: XdpEgress,
    seen: Arc<IngressStats>,
    sent: Arc<EgressStats>,
}

fn port(xdp: &Xdp, queue: usize) -> Port {
    let (seen, sent) = <(Arc<IngressStats>, Arc<EgressStats>)>::default();
    let ingress = xdp.ingress(queue, Arc::clone(&seen));
    let egress = xdp.egress(queue, Arc::clone(&sent)).unwrap();
    Port { ingress, egress, seen, sent }
}

impl Port {
    /// Puts one group, and has the kernel send it. Returns the number handled.
    fn try_put(&mut self, frames: &[Vec<u8>]) -> Result<usize, Fault> {
        let mut burst = Burst::default();
        for frame in frames {
            burst.push_private(frame, VnetHdr::NONE);
        }
        burst.snapshot();
        let picks: Vec<u16> = (0..frames.len() as u16).collect();
        let done = self.egress.put(&burst, &picks);
        self.egress.flush();
        self.egress.notify();
        done
    }

    /// Puts frames in groups; they must all fit in time.
    fn put(&mut self, frames: &[Vec<u8>]) {
        for group in frames.chunks(64) {
            let end = Instant::now() + Duration::from_secs(5);
            let mut done = 0;
            while done < group.len() {
                assert!(Instant::now() < end, "the socket stays full");
                done += self.try_put(&group[done..]).unwrap();
            }
        }
    }

    fn burst(&mut self, mut each: impl FnMut(&mut Burst<'_>)) -> Result<usize, Fault> {
        let start = switch::time::Instant::START;
        self.ingress.burst(64, start, &mut Burst::default(), &mut each)
    }

    /// The frames of one burst.
    fn take(&mut self) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        self.burst(|burst| all.extend((0..burst.frames.len()).map(|i| bytes(burst, i)))).unwrap();
        all
    }

    /// Reads until there are `count` UDP frames to port 4000.
    fn receive(&mut self, count: usize) -> Vec<Vec<u8>> {
        let (mut all, end) = (Vec::new(), Instant::now() + Duration::from_secs(60));
        while all.len() < count {
            assert!(Instant::now() < end, "{} of {count}", all.len());
            all.extend(self.take().into_iter().filter(|frame| udp_payload(frame).is_some()));
        }
        all
    }
}

/// The descriptors of sockets, for another process.
fn handed(xdp: &Xdp) -> XdpHanded<OwnedFd> {
    let dup = |fd: &Arc<OwnedFd>| fd.try_clone().unwrap();
    let of = xdp.descriptors();
    XdpHanded {
        sockets: of.sockets.iter().map(dup).collect(),
        senders: of.senders.iter().map(dup).collect(),
        memory: dup(&of.memory),
        map: dup(&of.map),
        link: of.link.as_ref().map(dup),
        watcher: dup(&of.watcher),
    }
}

fn number(frame: &[u8]) -> u32 {
    u32::from_be_bytes(udp_payload(frame).unwrap()[..4].try_into().unwrap())
}

#[test]
fn frames_pass_in_order_both_ways() {
    let Some(wire) = Wire::new() else { return };
    let xdp = open(&wire.ours, "v0");
    assert!(!xdp.shape().is_generic && !xdp.shape().is_zero_copy);
    let mut port = port(&xdp, 0);
    let socket = wire.socket("10.9.0.1:4000");
    let frames: Vec<_> = (0..200_u32).map(|n| udp_frame(&n.to_be_bytes())).collect();
    port.put(&frames);
    let mut buffer = [0; 2000];
    for n in 0..200_u32 {
        let len = socket.recv(&mut buffer).unwrap();
        assert_eq!(buffer[..len], n.to_be_bytes());
    }
    assert_eq!((port.sent.frames.get(), port.sent.bytes.get()), (200, 200 * 46));
    for n in 0..200_u32 {
        let payload = [&n.to_be_bytes()[..], &[7; 1400]].concat();
        socket.send_to(&payload, "10.9.0.2:4000").unwrap();
    }
    for (n, frame) in (0..).zip(port.receive(200)) {
        assert_eq!((frame.len(), number(&frame)), (42 + 1404, n));
    }
    assert!(port.seen.bytes.get() >= 200 * (42 + 1404));
    // Too long for the interface.
    let mut group = vec![udp_frame(&[0; 1600]), udp_frame(b"next")];
    port.put(&group);
    assert_eq!((port.sent.drops_too_long.get(), port.sent.frames.get()), (1, 201));
    assert_eq!(socket.recv(&mut buffer).unwrap(), 4);
    // The longest, with a tag.
    group = vec![vec![0xff; 1518]];
    port.put(&group);
    assert_eq!(port.sent.drops_too_long.get(), 1);
}

/// Every chunk is used many times, by frames of all lengths, some of them larger than its half.
#[test]
fn every_frame_between_two_sockets_arrives_once_in_order_and_whole() {
    for mtu in [1500, 3400] {
        let Some(wire) = Wire::new() else { return };
        wire.ours.ip(&format!("link set v0 mtu {mtu}"));
        wire.host.ip(&format!("link set v1 mtu {mtu}"));
        let (a, b) = (open(&wire.ours, "v0"), open(&wire.host, "v1"));
        let mut ports = [port(&a, 0), port(&b, 0)];
        let frame = |n: usize| {
            let mut frame = udp_frame(&(n as u32).to_be_bytes());
            frame.resize(46 + n * 37 % (mtu - 32), n as u8);
            frame
        };
        let (mut sent, mut got) = ([0; 2], [0; 2]);
        while got[0].min(got[1]) < 10_000 {
            for i in 0..2 {
                // A veth drops what its other end does not take in time: of its ring, 256 frames.
                if sent[i] - got[i] < 128 {
                    let group: Vec<_> = (sent[i]..sent[i] + 1 + sent[i] % 64).map(frame).collect();
                    sent[i] += ports[i].try_put(&group).unwrap();
                }
                for each in
                    ports[1 - i].take().into_iter().filter(|frame| udp_payload(frame).is_some())
                {
                    assert!(each == frame(got[i]), "{i}: {} is not {}", number(&each), got[i]);
                    got[i] += 1;
                }
            }
        }
        for port in &ports {
            assert_eq!(port.sent.drops_no_room.get() + port.seen.drops_bad_addr.get(), 0);
        }
    }
}

#[test]
fn frames_left_by_the_switch_are_passed_again() {
    let Some(wire) = Wire::new() else { return };
    let xdp = open(&wire.ours, "v0");
    let mut port = port(&xdp, 0);
    let socket = wire.socket("10.9.0.1:4000");
    for n in 0..6_u32 {
        socket.send_to(&n.to_be_bytes(), "10.9.0.2:4000").unwrap();
    }
    let end = Instant::now() + Duration::from_secs(5);
    let (mut got, mut bursts) = (Vec::new(), 0);
    while got.len() < 6 {
        assert!(Instant::now() < end);
        let mut is_more = false;
        let each = |burst: &mut Burst<'_>| {
            got.push(bytes(burst, 0));
            is_more = burst.frames.len() > 1;
            if is_more {
                burst.leave(1);
            }
        };
        bursts += usize::from(port.burst(each).unwrap() > 0);
        assert!(!is_more || !port.ingress.arm());
    }
    assert_eq!(bursts, 6);
    assert_eq!(got.iter().map(|frame| number(frame)).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(port.seen.frames.get(), 6);
}

#[test]
fn frames_that_are_not_read_in_time_are_counted() {
    const SENT: u64 = 6000;
    let Some(wire) = Wire::new() else { return };
    let xdp = open(&wire.ours, "v0");
    let mut port = port(&xdp, 0);
    let socket = wire.socket("10.9.0.1:4000");
    for n in 0..SENT as u32 {
        socket.send_to(&n.to_be_bytes(), "10.9.0.2:4000").unwrap();
    }
    let lost = xdp.losses(0);
    assert!(lost > 0 && lost < SENT, "{lost}");
    let all = std::iter::repeat_with(|| port.take().len()).take_while(|n| *n > 0).sum::<usize>();
    // Each chunk had a frame. The veth may have dropped some before they were counted.
    assert!(all == 2048 && lost <= SENT - 2048, "{all}, and {lost} lost");
    // All chunks are the kernel's again.
    for _ in 0..100 {
        for n in 0..50_u32 {
            socket.send_to(&n.to_be_bytes(), "10.9.0.2:4000").unwrap();
        }
        assert_eq!(port.receive(50).len(), 50);
    }
    assert_eq!(xdp.losses(0), lost);
}

/// The kernel and we use the rings at the same time, on two CPUs: afterwards each chunk is still
/// in one of them.
#[test]
fn no_chunk_is_lost_under_load() {
    let Some(wire) = Wire::new() else { return };
    let (ours, theirs) = (open(&wire.ours, "v0"), open(&wire.host, "v1"));
    let (mut to, mut from) = (port(&ours, 0), port(&theirs, 0));
    let group: Vec<_> = (0..64_u32).map(|n| udp_frame(&n.to_be_bytes())).collect();
    let is_done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // What is not taken in time is dropped; that is the sender's concern.
            (0..4000).for_each(|_| _ = from.try_put(&group).unwrap());
            is_done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        while !is_done.load(std::sync::atomic::Ordering::Relaxed) {
            to.take();
        }
    });
    assert!(to.seen.frames.get() > 0 && to.seen.drops_bad_addr.get() == 0);
    while !to.take().is_empty() {}
    let end = Instant::now() + Duration::from_secs(5);
    let lost = ours.losses(0);
    while ours.losses(0) == lost {
        assert!(Instant::now() < end, "the ring never fills");
        from.try_put(&group).unwrap();
    }
    let all = std::iter::repeat_with(|| to.take().len()).take_while(|n| *n > 0).sum::<usize>();
    assert_eq!(all, 2048);
    // And each to send from is free, or comes back.
    wait_until("all are free", || {
        from.egress.disarm();
        from.egress.room(60, 5000).unwrap() == 5000
    });
}

#[test]
fn each_queue_has_a_socket_and_frames_of_others_go_to_the_host() {
    let Some(wire) = Wire::with_queues(3) else { return };
    let (xdp, notes) = Xdp::open(&options(&wire.ours, "v0", 2), false).unwrap();
    let all = notes.join("; ");
    assert!(all.contains("`v0` has 3 receive queues and the port uses 2"), "{all}");
    assert!(all.contains("ethtool -L v0 combined 2") && all.contains("is a veth"), "{all}");
    let mut ports = [port(&xdp, 0), port(&xdp, 1)];
    let socket = wire.socket("10.9.0.1:4000");
    // A queue of one end sends to the queue of that number at the other.
    let theirs = Xdp::open(&options(&wire.host, "v1", 3), false).unwrap().0;
    for queue in 0..3 {
        let mut port = port(&theirs, queue);
        port.put(&[udp_frame(&(queue as u32).to_be_bytes())]);
    }
    for (n, port) in (0..).zip(&mut ports) {
        assert_eq!(number(&port.receive(1)[0]), n);
    }
    drop(socket);
    let error = Xdp::open(&options(&wire.ours, "v0", 4), false).err().unwrap().to_string();
    assert!(error.contains("queues=4 is more than interface `v0` has: set queues=3"), "{error}");
}

#[test]
fn next_process_continues_where_this_one_stopped() {
    let Some(wire) = Wire::new() else { return };
    let xdp = open(&wire.ours, "v0");
    let mut before = port(&xdp, 0);
    let socket = wire.socket("10.9.0.1:4000");
    let mut buffer = [0; 64];
    let mut sent = 0_u32;
    let mut through = |port: &mut Port, frames: u32| {
        for _ in 0..frames {
            socket.send_to(&sent.to_be_bytes(), "10.9.0.2:4000").unwrap();
            port.put(&[udp_frame(&sent.to_be_bytes())]);
            assert_eq!(socket.recv(&mut buffer).unwrap(), 4);
            assert_eq!(buffer[..4], sent.to_be_bytes());
            sent += 1;
        }
    };
    through(&mut before, 100);
    let mut all = before.take();
    // Prepared before the other has stopped.
    let next = Xdp::adopt(handed(&xdp), *xdp.shape()).unwrap();
    let mut after = port(&next, 0);
    through(&mut before, 100);
    after.ingress.resume();
    after.egress.resume(before.egress.free());
    drop((before, xdp));
    for _ in 0..30 {
        through(&mut after, 100);
        all.extend(after.receive(100));
    }
    all.extend(after.receive(3200 - all.len()));
    assert!(all.iter().map(|frame| number(frame)).eq(0..3200), "none is lost or twice");
    assert_eq!(next.losses(0), 0);
    // What another process claims is checked.
    after.egress.resume(&[0, 0, 7, 1024, u32::MAX]);
    assert_eq!(after.egress.free(), [0, 7]);
}

#[test]
fn process_whose_sockets_did_both_is_taken_over() {
    let Some(wire) = Wire::new() else { return };
    let xdp = open(&wire.ours, "v0");
    let mut handed = handed(&xdp);
    assert_eq!(handed.senders.len(), 1, "copy mode");
    handed.senders.clear();
    let next = Xdp::adopt(handed, *xdp.shape()).unwrap();
    drop(xdp);
    let mut port = port(&next, 0);
    let socket = wire.socket("10.9.0.1:4000");
    for sent in 0..3000_u32 {
        port.put(&[udp_frame(&sent.to_be_bytes())]);
        let mut buffer = [0; 64];
        assert_eq!(socket.recv(&mut buffer).unwrap(), 4);
        assert_eq!(buffer[..4], sent.to_be_bytes());
        socket.send_to(&buffer[..4], "10.9.0.2:4000").unwrap();
        assert_eq!(number(&port.receive(1)[0]), sent);
    }
}

#[test]
fn interface_that_is_down_comes_back_and_one_that_is_removed_does_not() {
    let Some(wire) = Wire::new() else { return };
    let xdp = open(&wire.ours, "v0");
    let mut port = port(&xdp, 0);
    let has_event = || os::poll_readable(&[xdp.watcher()], Some(Duration::ZERO))[0];
    assert_eq!((xdp.link(), has_event()), (PacketLink::Up, false));
    wire.ours.ip("link set v0 down");
    assert_eq!((xdp.link(), has_event()), (PacketLink::Down, true));
    clear_packet_error(xdp.watcher());
    assert!(!has_event());
    port.put(&[udp_frame(b"late")]);
    port.put(&[udp_frame(b"lost")]);
    assert_eq!(port.sent.drops_down.get(), 1);
    wire.ours.ip("link set v0 up");
    wire.host.ip("neigh replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev v1");
    assert_eq!(xdp.link(), PacketLink::Up);
    let socket = wire.socket("10.9.0.1:4000");
    port.put(&[udp_frame(b"hello")]);
    let mut buffer = [0; 64];
    while socket.recv(&mut buffer).unwrap() != 5 {
        assert_eq!(buffer[..4], *b"late");
    }
    socket.send_to(b"hello", "10.9.0.2:4000").unwrap();
    assert_eq!(port.receive(1).len(), 1);
    wire.ours.ip("link del v0");
    assert_eq!((xdp.link(), has_event()), (PacketLink::Removed, true));
    let _ = port.try_put(&[udp_frame(b"lost")]);
    let fault = port.try_put(&[udp_frame(b"lost")]).unwrap_err();
    assert!(fault.0.contains("removed"), "{fault}");
    assert_eq!(port.take().len(), 0);
    // The next process can take that over, too.
    let next = Xdp::adopt(handed(&xdp), *xdp.shape()).unwrap();
    assert_eq!(next.link(), PacketLink::Removed);
    let mut port = self::port(&next, 0);
    port.ingress.resume();
    port.egress.resume(&[0, 1]);
    let _ = port.try_put(&[udp_frame(b"lost")]);
    assert!(port.try_put(&[udp_frame(b"lost")]).is_err() && port.take().is_empty());
}

/// Number of frames that the program on `v0` dropped in its first queue.
fn dropped(netns: &Netns) -> u64 {
    let out = netns.run(|| Command::new("ethtool").args(["-S", "v0"]).output().unwrap());
    let text = String::from_utf8(out.stdout).unwrap();
    let line = text.lines().find_map(|line| line.trim().strip_prefix("rx_queue_0_xdp_drops: "));
    line.map_or(0, |count| count.parse().unwrap())
}

#[test]
fn blocked_sockets_get_no_frame_not_even_later() {
    let Some(wire) = Wire::new() else { return };
    if Command::new("ethtool").arg("--version").output().is_err() {
        return println!("skipped: no ethtool here");
    }
    let (xdp, _) = Xdp::open(&options(&wire.ours, "v0", 1), true).unwrap();
    let mut port = port(&xdp, 0);
    let socket = wire.socket("10.9.0.1:4000");
    let send = |text: &str| _ = socket.send_to(text.as_bytes(), "10.9.0.2:4000").unwrap();
    assert!(xdp.has_carrier());
    for round in 1..=3 {
        // The kernel of the host may send frames of its own, too.
        let before = dropped(&wire.ours);
        (0..5).for_each(|_| send("blocked"));
        wait_until("frames to be dropped", || dropped(&wire.ours) >= before + 5);
        assert!(port.take().is_empty());
        // By this process or the next.
        let next = Xdp::adopt(handed(&xdp), *xdp.shape()).unwrap();
        next.set_blocked(false).unwrap();
        send("passes");
        assert_eq!(udp_payload(&port.receive(1)[0]).unwrap(), b"passes", "round {round}");
        send("received and not read");
        wait_until("a frame", || !port.ingress.arm());
        xdp.set_blocked(true).unwrap();
        xdp.set_blocked(true).unwrap();
        port.ingress.discard();
        assert!(port.take().is_empty());
    }
}

/// What `ip link` says of an interface.
fn shown(netns: &Netns, name: &str) -> String {
    let args = ["-n", &netns.0, "-d", "link", "show", name];
    String::from_utf8(Command::new("ip").args(args).output().unwrap().stdout).unwrap()
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(5);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
    }
}

#[test]
fn program_goes_with_its_sockets_and_the_interface_is_promiscuous_until_then() {
    let Some(wire) = Wire::new() else { return };
    let xdp = open(&wire.ours, "v0");
    let is_used = || {
        let shown = shown(&wire.ours, "v0");
        (shown.contains(" xdp "), shown.contains("promiscuity 1"))
    };
    assert_eq!(is_used(), (true, true));
    let error = Xdp::open(&options(&wire.ours, "v0", 1), false).err().unwrap();
    assert!(matches!(&error, XdpError::HasProgram { .. }), "{error}");
    assert!(error.to_string().contains("ip link set v0 xdp off"), "{error}");
    drop(xdp);
    // A child of another test has them, too, until it runs its program.
    wait_until("it is free", || is_used() == (false, false));
    drop(open(&wire.ours, "v0"));
}

#[test]
fn driver_without_xdp_gets_a_generic_program() {
    let Some(wire) = Wire::new() else { return };
    wire.ours.ip("link add br0 address 02:00:00:00:00:02 type bridge");
    wire.ours.ip("link set br0 up");
    wire.ours.ip("link set v0 master br0");
    let (xdp, notes) = Xdp::open(&options(&wire.ours, "br0", 1), false).unwrap();
    assert!(xdp.shape().is_generic && !xdp.shape().is_zero_copy);
    assert!(notes.iter().any(|note| note.contains("runs in generic mode")), "{notes:?}");
    assert!(notes.iter().any(|note| note.contains("ethtool -K br0 gro off")), "{notes:?}");
    let mut port = port(&xdp, 0);
    let socket = wire.socket("10.9.0.1:4000");
    wait_until("the bridge forwards", || {
        port.put(&[udp_frame(b"hello")]);
        let _ = socket.set_read_timeout(Some(Duration::from_millis(50)));
        socket.recv(&mut [0; 64]).is_ok()
    });
    socket.send_to(&[9; 1000], "10.9.0.2:4000").unwrap();
    assert_eq!(udp_payload(&port.receive(1)[0]), Some(&[9; 1000][..]));
    let options = XdpOptions { mode: XdpMode::ZeroCopy, ..options(&wire.ours, "br0", 1) };
    drop((port, xdp));
    wait_until("there is no zero-copy", || {
        matches!(Xdp::open(&options, false), Err(XdpError::NoZeroCopy { .. }))
    });
}

/// A bpffs of its own.
struct Bpffs(PathBuf);

impl Bpffs {
    fn new() -> Option<Self> {
        let path = std::env::temp_dir().join(format!("pvs-xdp-bpf-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        let done = Command::new("mount").args(["-t", "bpf", "none"]).arg(&path).status();
        if done.is_ok_and(|status| status.success()) {
            return Some(Self(path));
        }
        println!("skipped: no bpffs can be mounted here");
        None
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn pinned_map_of_another_process_is_used_and_checked() {
    let (Some(wire), Some(bpffs)) = (Wire::with_queues(2), Bpffs::new()) else { return };
    let with = |file: &str, queues: u16| {
        let map = Some(bpffs.0.join(file));
        Xdp::open(&XdpOptions { map, ..options(&wire.ours, "v0", queues) }, false)
    };
    let fails = |file: &str, queues: u16, why: &str| {
        let error = with(file, queues).err().unwrap().to_string();
        assert!(error.contains(&format!("map={}/{file}", bpffs.0.display())), "{error}");
        assert!(error.contains(why), "{error}");
    };
    fails("map", 1, "cannot open it");
    pin_xdp("v0", Some(&wire.ours.0), 1, &bpffs.0).unwrap();
    fails("link", 1, "is not an XSKMAP");
    fails("map", 2, "it has 1 entries, not 2");
    let xdp = with("map", 1).unwrap().0;
    assert!(xdp.descriptors().link.is_none());
    let mut used = port(&xdp, 0);
    // The map has queue 0 only, and the flow decides about the queue.
    let send = || {
        for _ in 0..32 {
            wire.socket("10.9.0.1:0").send_to(b"hello", "10.9.0.2:4000").unwrap();
        }
    };
    send();
    assert!(!used.receive(1).is_empty());
    let error = with("map", 1).err().unwrap();
    assert!(
        error.to_string().contains("queue 0 of interface `v0` is in use by another"),
        "{error}"
    );
    drop((used, xdp));
    // The program stays, and serves the next socket.
    let mut next = None;
    wait_until("the queue is free", || {
        next = with("map", 1).ok();
        next.is_some()
    });
    let mut next = port(&next.unwrap().0, 0);
    send();
    assert!(!next.receive(1).is_empty());
    std::fs::remove_file(bpffs.0.join("link")).unwrap();
    wait_until("it is detached", || !shown(&wire.ours, "v0").contains(" xdp "));
}

#[test]
fn interfaces_that_cannot_be_used_are_errors_that_say_why() {
    let Some(wire) = Wire::new() else { return };
    let error =
        |name: &str| Xdp::open(&options(&wire.ours, name, 1), false).err().unwrap().to_string();
    assert!(error("v9").contains("`v9` does not exist: name one of `ip -n"), "{}", error("v9"));
    assert!(error("lo").contains("`lo` is not an Ethernet interface"), "{}", error("lo"));
    wire.ours.ip("link set v0 mtu 9000");
    let long = error("v0");
    assert!(long.contains("MTU of 9000") && long.contains("ip link set v0 mtu 3818"), "{long}");
    wire.ours.ip("link set v0 mtu 1500");
    let none = XdpOptions { netns: Some("no-such-netns".into()), ..options(&wire.ours, "v0", 1) };
    let error = Xdp::open(&none, false).err().unwrap();
    assert!(matches!(error, XdpError::Interface(TapError::NoNetns { .. })), "{error}");
}
