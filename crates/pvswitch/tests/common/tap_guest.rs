//! A TAP cross-connected to a guest's ring in one thread: frames written to one interface of a
//! bridge leave by the other, enter the port, and end in the guest's memory.
#![allow(dead_code)]

use std::collections::HashMap;
use std::fs::File;
use std::num::NonZeroU16;
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use ring::virtq::{Buf, DeviceQueue, DriverQueue, Features, Layout};
use shm::sync::{Lock, Mutex};
use shm::{GuestMemory, Mapping, Region, Seg};
use switch::fdb::{Fdb, PortId};
use switch::forward::{EgressQueue, Forwarder, Mode, Port, Source};
use switch::frame::{Burst, FRAME_LEN_MAX};
use switch::port::Ingress;
use switch::stats::{EgressStats, IngressStats};
use switch::time::{Instant, Ns};
use switch::vnet::{GSO_NONE, GSO_TCPV4, NEEDS_CSUM, Offloads, VnetHdr};
use uplink::{Batching, Create, NullEgress, Tap, TapFd, TapIngress, TapOptions};
use vhost_user::net::Pair;
use vhost_user::port::{Format, GuestQueue};

pub const SIZE: u16 = 256;
const BASE: u64 = 0x10_0000;
const BUFFERS: u64 = BASE + 0x1_0000;
const MEMORY_LEN: u64 = 0x1_0000 + SIZE as u64 * 0x1_2000;

/// A network namespace, removed on drop.
pub struct Netns(String);

impl Netns {
    /// `None`, and the reason printed, if this machine does not allow it.
    pub fn new() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let netns = Self(format!("pvs-dir-{}-{n}", std::process::id()));
        for args in ["netns add", "-n"] {
            let mut command = Command::new("ip");
            command.args(args.split(' ')).arg(&netns.0);
            if args == "-n" {
                command.args(["link", "add", "br0", "type", "bridge", "mcast_snooping", "0"]);
            }
            let error = command.output().map_or_else(
                |error| error.to_string(),
                |o| if o.status.success() { String::new() } else { format!("{o:?}") },
            );
            if !error.is_empty() {
                println!("skipped: {command:?}: {error}");
                return None;
            }
        }
        let _ = uplink::in_netns(&netns.0, || {
            for scope in ["all", "default"] {
                let path = format!("/proc/sys/net/ipv6/conf/{scope}/disable_ipv6");
                let _ = std::fs::write(path, "1");
            }
        });
        netns.ip("link set br0 up");
        Some(netns)
    }

    fn ip(&self, args: &str) {
        let output = Command::new("ip").args(["-n", &self.0]).args(args.split(' ')).output();
        let output = output.unwrap();
        assert!(output.status.success(), "ip {args}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn tap(&self, name: &str) -> Tap {
        let tap = uplink::open(&TapOptions {
            name: name.into(),
            netns: Some(self.0.clone()),
            queues: NonZeroU16::MIN,
            create: Create::IfMissing,
            up: true,
            mtu: Some(9000),
            mac: None,
            queue_len: Some(1000),
        });
        self.ip(&format!("link set {name} master br0"));
        tap.unwrap()
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

/// Layout of a guest's ring.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub features: Features,
    pub mergeable: bool,
    pub takes: Offloads,
    /// Lengths of the buffers of each chain.
    pub chain: &'static [u32],
}

pub const KIND: Kind = Kind {
    features: Features { packed: false, event_idx: true, indirect: false, in_order: false },
    mergeable: true,
    takes: Offloads::ALL,
    chain: &[1600],
};

/// The guest's side of its receive ring.
pub struct Guest {
    pub memory: Arc<GuestMemory>,
    pub file: File,
    driver: DriverQueue,
    kind: Kind,
    /// Chains by id, and slots without a chain.
    posted: HashMap<u16, Vec<Buf>>,
    free: Vec<u64>,
}

impl Guest {
    fn new(kind: Kind) -> (Self, DeviceQueue) {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("pvs-dir-{}-{n}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        file.set_len(MEMORY_LEN).unwrap();
        let mapping = Arc::new(Mapping::new(file.as_fd(), 0, MEMORY_LEN).unwrap());
        let region =
            Region { guest_addr: BASE, user_addr: BASE, len: MEMORY_LEN, offset: 0, mapping };
        let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
        let layout =
            Layout { size: SIZE, desc: BASE, driver: BASE + 0x4000, device: BASE + 0x8000 };
        let base = if kind.features.packed { 0x8000_8000 } else { 0 };
        let driver = DriverQueue::new(&memory, &layout, kind.features, base, None).unwrap();
        let device = DeviceQueue::new(&memory, &layout, kind.features, base).unwrap();
        let free = (0..u64::from(SIZE)).map(|i| BUFFERS + i * 0x1_2000).collect();
        (Self { memory, file, driver, kind, posted: HashMap::new(), free }, device)
    }

    /// Posts up to `n` chains. Returns their number.
    pub fn post(&mut self, n: usize) -> usize {
        let mut posted = 0;
        while posted < n && usize::from(self.driver.free()) >= self.kind.chain.len() {
            let Some(place) = self.free.pop() else { break };
            let mut addr = place;
            let buf = |len: &u32| {
                let buf = Buf { addr, len: *len, write: true };
                // A gap, so that parts are not adjacent by chance.
                addr += u64::from(*len) + 16;
                buf
            };
            let bufs: Vec<Buf> = self.kind.chain.iter().map(buf).collect();
            let id = self.driver.add(&bufs).expect("there is room");
            self.posted.insert(id, bufs);
            posted += 1;
        }
        self.driver.publish();
        posted
    }

    /// Takes the frames published since the last call, with their headers; posts no chains.
    pub fn take_received(&mut self) -> Vec<(VnetHdr, Vec<u8>)> {
        let mut used = Vec::new();
        self.driver.take_used(usize::MAX, &mut used).unwrap();
        let mut parts = used.iter().map(|used| {
            let bufs = self.posted.remove(&used.id).expect("posted");
            self.free.push(bufs[0].addr);
            let mut bytes = Vec::new();
            for buf in bufs {
                let mut part = vec![0; buf.len as usize];
                self.memory.seg(buf.addr, buf.len, &mut 0).unwrap().read(&mut part);
                bytes.extend(part);
            }
            assert!(used.len as usize <= bytes.len());
            bytes.truncate(used.len as usize);
            bytes
        });
        let mut frames = Vec::new();
        while let Some(first) = parts.next() {
            let (hdr, frame) = first.split_at(12);
            let chains = usize::from(u16::from_le_bytes([hdr[10], hdr[11]]));
            assert!(chains > 0);
            let more = parts.by_ref().take(chains - 1).flatten();
            let frame = frame.iter().copied().chain(more).collect();
            frames.push((VnetHdr::parse(hdr.first_chunk().unwrap()), frame));
        }
        frames
    }

    /// Returns all used chains to the ring unread. Returns their number.
    pub fn recycle(&mut self) -> usize {
        let mut used = Vec::new();
        self.driver.take_used(usize::MAX, &mut used).unwrap();
        // All are taken first: then their ids are free and may be reused.
        let chains = used.iter().map(|u| self.posted.remove(&u.id).expect("posted"));
        let chains: Vec<_> = chains.collect();
        for bufs in chains {
            let id = self.driver.add(&bufs).expect("it was posted before");
            self.posted.insert(id, bufs);
        }
        self.driver.publish();
        used.len()
    }
}

/// The bridge, the TAP's queue as a source, the switch, and the guest.
pub struct World {
    pub guest: Guest,
    pub ingress: TapIngress,
    pub seen: Arc<IngressStats>,
    pub got: Arc<EgressStats>,
    pub ports: [Arc<Port>; 2],
    pub tap: Tap,
    pub forwarder: Forwarder,
    pair: Pair,
    into: TapFd,
    source: Source,
    scratch: Burst<'static>,
    now: Instant,
    _netns: Netns,
}

impl World {
    pub fn new(kind: Kind, mode: Mode, batching: Batching) -> Option<Self> {
        let netns = Netns::new()?;
        let (outside, tap) = (netns.tap("outside"), netns.tap("inside"));
        let asks = uplink::request_offloads(&*tap.queues[0], &kind.takes).unwrap();
        let seen = Arc::new(IngressStats::default());
        let fd = TapFd::new(Arc::clone(&tap.queues[0]), batching);
        let mut ingress = TapIngress::new(fd, tap.offloads_read, Arc::clone(&seen)).unwrap();
        ingress.set_offloads(asks);
        let into = TapFd::new(Arc::clone(&outside.queues[0]), Batching::Plain);
        let pair = Pair::new();
        let got = Arc::clone(&pair.egress_stats);
        let none = Arc::new(EgressStats::default());
        let null = Arc::new(Mutex::new(Lock::Egress, NullEgress::new(Arc::clone(&none))));
        let ports = [
            Port::new(PortId(0), "tap".into(), vec![EgressQueue::new(null, none)]),
            Port::new(
                PortId(1),
                "guest".into(),
                vec![EgressQueue::new(pair.egress.clone(), Arc::clone(&got))],
            ),
        ]
        .map(Arc::new);
        ports[0].set_active(1);
        let table = Arc::new(ports.iter().cloned().map(Some).collect());
        let fdb = Arc::new(Fdb::new(1024, [1, 2], 300, 100));
        let tuning = Arc::new(switch::tuning::Tuning::new(switch::poll::Policy::Event));
        let source = Source::new(PortId(0), 0, Arc::clone(&seen), tuning);
        let forwarder = Forwarder::new(mode, 0, fdb, table, 3);
        let (guest, device) = Guest::new(kind);
        let scratch = Burst::default();
        let (now, _netns) = (Instant::from_ns(1_000_000_000), netns);
        let mut world = Self {
            guest,
            ingress,
            seen,
            got,
            ports,
            tap,
            forwarder,
            pair,
            into,
            source,
            scratch,
            now,
            _netns,
        };
        world.connect(device);
        Some(world)
    }

    fn connect(&mut self, device: DeviceQueue) {
        let Kind { mergeable, takes, .. } = self.guest.kind;
        let frame_len_max = FRAME_LEN_MAX;
        let format =
            Format { hdr_len: 12, mergeable, sends: Offloads::default(), takes, frame_len_max };
        let mut egress = self.pair.egress.lock();
        egress.activate(device, Arc::clone(&self.guest.memory), None, format);
        egress.enable(true);
        self.ports[1].set_active(1);
    }

    /// Disconnects the guest between two rounds.
    pub fn leave(&mut self) {
        self.ports[1].set_active(0);
        self.pair.egress.lock().deactivate();
    }

    /// Disconnects the guest at the ring; the switch is not notified.
    pub fn leave_unnoticed(&mut self) {
        self.pair.egress.lock().deactivate();
    }

    /// Connects another guest.
    pub fn come(&mut self, kind: Kind) {
        let (guest, device) = Guest::new(kind);
        self.guest = guest;
        self.connect(device);
    }

    /// Writes frames into the bridge.
    pub fn send<'f>(&mut self, frames: impl IntoIterator<Item = &'f (VnetHdr, Vec<u8>)>) {
        for (hdr, frame) in frames {
            let mut writes = self.into.writes();
            let hdr = hdr.bytes();
            writes.push(Seg::of(&hdr));
            writes.push(Seg::of(&[0; 2]));
            writes.push(Seg::of(frame));
            writes.end_frame();
            assert_eq!(writes.run(), [Ok(12 + frame.len() as u32)]);
        }
    }

    /// Runs one round of a worker. Returns the number of frames; `direct`: whether it may read
    /// directly into the guest's buffers.
    pub fn round(&mut self, direct: bool) -> usize {
        let Self { ingress, forwarder, source, scratch, .. } = self;
        self.now += Ns::from_us(1);
        let now = self.now;
        let _ = forwarder.retry(true, now);
        let max = forwarder.budget(source, 64, now).0;
        if max == 0 {
            return 0;
        }
        if direct {
            let _ = forwarder.direct(source, ingress, now);
        }
        let forward = &mut |burst: &mut Burst<'_>| _ = forwarder.forward(source, burst, now);
        ingress.burst(max, now, scratch, forward).unwrap()
    }

    /// Records the `offloads` requested from the kernel.
    pub fn set_offloads(&mut self, offloads: Offloads) {
        self.ingress.set_offloads(offloads);
    }

    /// Runs rounds until no more frames arrive.
    pub fn drain(&mut self) {
        while self.round(true) > 0 {}
    }
}

/// A frame of `len` bytes without offloads, identified by `n`.
pub fn plain(len: usize, n: u32) -> (VnetHdr, Vec<u8>) {
    let mut frame = vec![0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 0x88, 0xb5];
    frame.extend(n.to_be_bytes());
    frame.extend((18..len).map(|i| (i as u32 * 31 + n * 7) as u8));
    (VnetHdr::NONE, frame)
}

/// TCP over IPv4 of `len` bytes, for segments of 1448 bytes.
pub fn tso(len: usize, n: u32) -> (VnetHdr, Vec<u8>) {
    let (_, mut frame) = plain(len, n);
    frame[12..14].copy_from_slice(&[8, 0]);
    let mut ip = [0x45, 0, 0, 0, 0, 1, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    ip[2..4].copy_from_slice(&((len - 14) as u16).to_be_bytes());
    let words = ip.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])));
    let sum: u32 = words.sum();
    ip[10..12].copy_from_slice(&(!((sum & 0xffff) + (sum >> 16)) as u16).to_be_bytes());
    frame[14..34].copy_from_slice(&ip);
    let tcp = [0, 80, 0, 81, 0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x18, 1, 0, 0, 0, 0, 0];
    frame[34..54].copy_from_slice(&tcp);
    frame[54..58].copy_from_slice(&n.to_be_bytes());
    let (flags, gso_type, gso_size) = (NEEDS_CSUM, GSO_TCPV4, 1448);
    (VnetHdr { flags, gso_type, hdr_len: 54, gso_size, csum_start: 34, csum_offset: 16 }, frame)
}

/// Whether they are equal, except for fields that the kernel may change: it computes `hdr_len`
/// itself.
pub fn same(sent: &(VnetHdr, Vec<u8>), found: &(VnetHdr, Vec<u8>)) -> bool {
    let hdr = VnetHdr { hdr_len: found.0.hdr_len, ..sent.0 };
    let gso = sent.0.gso_type != GSO_NONE;
    sent.1 == found.1 && if gso { hdr == found.0 } else { found.0.is_plain() }
}
