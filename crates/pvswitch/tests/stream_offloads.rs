//! Offloads toward peers with a socket, which have no virtio-net header: frames to them are cut and
//! have all checksums; frames of them reach a guest with offloads as they are.

mod common;

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use common::{Dir, Switch, wait_for};
use ring::virtq::Buf;
use shm::GuestMemory;
use vhost_user::feature;
use vhost_user::frontend::{self, Frontend, Params, Queue};

const GUEST: u8 = 1;
const PEER: u8 = 2;
/// Bytes of Ethernet, IPv4 and TCP headers; those of the virtio-net header.
const HEADERS: usize = 54;
const HDR_LEN: usize = 12;
const MSS: usize = 1448;
/// The longest that IPv4's length permits.
const LONG: usize = 65_535 - 40;
const TCP: u8 = 6;
const PSH: u8 = 8;
const FIRST_SEQ: u32 = u32::MAX - 100_000;

/// The sum of the Internet checksum: 0xffff over what has the right one.
fn sum(parts: &[&[u8]]) -> u16 {
    let word = |w: &[u8]| u32::from(u16::from_be_bytes([w[0], w.get(1).copied().unwrap_or(0)]));
    let mut sum: u32 = parts.iter().flat_map(|part| part.chunks(2)).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn be16(frame: &[u8], at: usize) -> usize {
    u16::from_be_bytes([frame[at], frame[at + 1]]).into()
}

fn be32(frame: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(frame[at..at + 4].try_into().unwrap())
}

fn pseudo_header(frame: &[u8]) -> Vec<u8> {
    let len = ((frame.len() - 34) as u16).to_be_bytes();
    [&frame[26..34], &[0, TCP], &len].concat()
}

fn payload(seq: u32, len: usize) -> Vec<u8> {
    (0..len).map(|i| ((seq.wrapping_add(i as u32) as u64 * 2_654_435_761) >> 13) as u8).collect()
}

/// A TCP segment. Its checksum is that of the pseudo-header alone, as a guest leaves it to be
/// completed, or complete.
fn segment(from: u8, to: u8, seq: u32, len: usize, complete: bool) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, to, 2, 0, 0, 0, 0, from, 8, 0];
    let total = ((len + 40) as u16).to_be_bytes();
    frame.extend([0x45, 0, total[0], total[1], 0, 7, 0x40, 0, 64, TCP, 0, 0]);
    frame.extend([10, 0, 0, from, 10, 0, 0, to]);
    let checksum = !sum(&[&frame[14..34]]);
    frame[24..26].copy_from_slice(&checksum.to_be_bytes());
    frame.extend([0, 80, 0, 81]);
    frame.extend(seq.to_be_bytes());
    frame.extend([0, 0, 0, 1, 0x50, 0x10 | PSH, 1, 0, 0, 0, 0, 0]);
    frame.extend(payload(seq, len));
    let pseudo = pseudo_header(&frame);
    let checksum = if complete { !sum(&[&pseudo, &frame[34..]]) } else { sum(&[&pseudo]) };
    frame[50..52].copy_from_slice(&checksum.to_be_bytes());
    frame
}

/// A guest with a NIC that has offloads.
struct Guest {
    _frontend: Frontend,
    memory: Arc<GuestMemory>,
    at: u64,
    receive: Queue,
    send: Queue,
}

impl Guest {
    fn connect(dir: &Dir, features: u64) -> Self {
        let params = Params {
            features: feature::VERSION_1 | features,
            protocol_features: frontend::PROTOCOL_FEATURES,
            pairs: 1,
            queue_size: 64,
            base: None,
            indirect_entries: 0,
            buffer_bytes: 1 << 18,
            timeout: Duration::from_secs(20),
        };
        let stream = UnixStream::connect(dir.path("g")).unwrap();
        let (frontend, queues) = Frontend::start(stream, &params).unwrap();
        assert_eq!(frontend.features() & features, features);
        let (memory, at) = (Arc::clone(frontend.memory()), frontend.buffers().start);
        let [receive, send] = queues.try_into().ok().unwrap();
        Self { _frontend: frontend, memory, at, receive, send }
    }

    /// Sends one frame, to be completed and cut into segments of [`MSS`], and waits until its
    /// buffer is returned.
    fn send(&mut self, frame: &[u8]) {
        let gso: u8 = u8::from(frame.len() > HEADERS + MSS);
        let [low, high] = if gso > 0 { (MSS as u16).to_le_bytes() } else { [0; 2] };
        let hdr = [1, gso, HEADERS as u8, 0, low, high, 34, 0, 16, 0, 0, 0];
        let bytes = [&hdr, frame].concat();
        let buf = Buf { addr: self.at, len: bytes.len() as u32, write: false };
        self.memory.seg_mut(buf.addr, buf.len, &mut 0).unwrap().write(&bytes);
        exchange(&mut self.send, buf, || ());
    }

    /// Receives one frame, which `send` sends.
    fn receive(&mut self, send: impl FnOnce()) -> Vec<u8> {
        let buf = Buf { addr: self.at + (1 << 17), len: 1 << 16, write: true };
        let len = exchange(&mut self.receive, buf, send);
        let mut bytes = vec![0; len as usize];
        self.memory.seg(buf.addr, len, &mut 0).unwrap().read(&mut bytes);
        bytes
    }
}

/// Makes a buffer available, and waits until it is used; returns the bytes written.
fn exchange(queue: &mut Queue, buf: Buf, meanwhile: impl FnOnce()) -> u32 {
    queue.driver.add(&[buf]).unwrap();
    queue.driver.publish();
    if queue.driver.kick_needed() {
        os::signal(queue.kick.as_fd());
    }
    meanwhile();
    let mut used = Vec::new();
    wait_for("the buffer", || {
        queue.driver.take_used(1, &mut used).unwrap();
        !used.is_empty()
    });
    used[0].len
}

/// Checks one frame that a peer got: complete, and the next of its stream. Returns its length.
fn check(frame: &[u8], seq: u32, id: Option<usize>, is_last: bool) -> usize {
    assert!(frame.len() <= HEADERS + MSS, "{} bytes", frame.len());
    assert_eq!(be16(frame, 16) + 14, frame.len(), "length of IPv4");
    assert_eq!(sum(&[&frame[14..34]]), 0xffff, "checksum of IPv4");
    assert_eq!(sum(&[&pseudo_header(frame), &frame[34..]]), 0xffff, "checksum of TCP");
    assert_eq!(be32(frame, 38), seq);
    assert_eq!(frame[47] & PSH != 0, is_last, "PSH is of the last segment");
    assert!(id.is_none_or(|id| be16(frame, 18) == id), "identification");
    let len = frame.len() - HEADERS;
    assert!(frame[HEADERS..] == payload(seq, len), "payload at {seq}");
    len
}

/// Long frames, and short ones with a checksum to complete, of a guest to a peer that reads one
/// frame at a time.
fn arrive_complete_and_cut(guest: &mut Guest, mut read: impl FnMut() -> Vec<u8>) {
    let mut seq = FIRST_SEQ;
    // Full ones, one of two segments, one of a byte in its last, single ones.
    for len in [LONG, LONG, MSS + 1, 2 * MSS, 10 * MSS + 1, MSS, 1, 0, LONG] {
        guest.send(&segment(GUEST, PEER, seq, len, false));
        let (end, mut id) = (seq.wrapping_add(len as u32), 7);
        loop {
            let frame = read();
            let left = end.wrapping_sub(seq) as usize;
            let got = check(&frame, seq, Some(id), left <= MSS);
            assert_eq!(got, left.min(MSS));
            (seq, id) = (seq.wrapping_add(got as u32), id + 1);
            if seq == end {
                break;
            }
        }
    }
}

fn features() -> u64 {
    let guest = feature::GUEST_CSUM | feature::GUEST_TSO4 | feature::GUEST_TSO6;
    feature::CSUM | feature::HOST_TSO4 | feature::HOST_TSO6 | guest
}

/// What the switch counted of the guest's frames.
fn check_counters(switch: &Switch) {
    let counter = |name| switch.counter("p", "egress", name);
    assert!(counter("segmented") >= 6, "{}", counter("segmented"));
    assert!(counter("checksummed") > 0);
    let lost = |name| switch.counter("g", "ingress", name);
    assert_eq!((lost("drops_no_room"), lost("drops_too_long")), (0, 0));
}

#[test]
fn frames_to_a_stream_are_complete_and_cut_and_those_of_it_arrive_as_they_are() {
    let dir = Dir::new();
    let ports = [dir.port("g", ""), format!("p=stream:{}", dir.text("p"))];
    let switch = Switch::start(&dir, &[], &ports);
    let mut guest = Guest::connect(&dir, features());
    let mut peer = UnixStream::connect(dir.path("p")).unwrap();
    peer.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    switch.wait_up("p", true);
    switch.wait_up("g", true);
    let mut reader = peer.try_clone().unwrap();
    arrive_complete_and_cut(&mut guest, || {
        let mut len = [0; 4];
        reader.read_exact(&mut len).unwrap();
        let mut frame = vec![0; u32::from_be_bytes(len) as usize];
        reader.read_exact(&mut frame).unwrap();
        frame
    });
    check_counters(&switch);
    // The longest that the switch forwards.
    for len in [0, 1, MSS, 9234 - HEADERS] {
        let frame = segment(PEER, GUEST, 1, len, true);
        let framed = [&(frame.len() as u32).to_be_bytes()[..], &frame].concat();
        let got = guest.receive(|| peer.write_all(&framed).unwrap());
        let (hdr, bytes) = got.split_at(HDR_LEN);
        assert_eq!(hdr[..10], [0; 10], "{len}: nothing to complete or to cut");
        assert!(bytes == frame, "{len}");
    }
}

#[test]
fn frames_to_a_datagram_socket_are_complete_and_cut_and_those_of_it_arrive_as_they_are() {
    let dir = Dir::new();
    let socket = dir.text("p");
    let ports = [dir.port("g", ""), format!("p=dgram:{socket},peer={socket}.peer")];
    let peer = UnixDatagram::bind(dir.path("p.peer")).unwrap();
    peer.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let switch = Switch::start(&dir, &[], &ports);
    let mut guest = Guest::connect(&dir, features());
    switch.wait_up("p", true);
    switch.wait_up("g", true);
    arrive_complete_and_cut(&mut guest, || {
        let mut frame = vec![0; 1 << 16];
        let len = peer.recv(&mut frame).unwrap();
        frame.truncate(len);
        frame
    });
    check_counters(&switch);
    for len in [0, 1, MSS, 9234 - HEADERS] {
        let frame = segment(PEER, GUEST, 1, len, true);
        let got = guest.receive(|| assert!(peer.send_to(&frame, &socket).is_ok()));
        assert_eq!(got[..10], [0; 10], "{len}: nothing to complete or to cut");
        assert!(got[HDR_LEN..] == frame, "{len}");
    }
}
