use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use shm::Seg;
use switch::frame::{Burst, FRAME_LEN_MAX};
use switch::port::{Egress, Fault, Ingress};
use switch::stats::{EgressStats, IngressStats};
use switch::time::Instant;
use switch::vnet::{Offloads, VnetHdr};

use super::*;
use crate::framing::{FRAME_MAX, Inbox};

fn framed(frame: &[u8]) -> Vec<u8> {
    [&(frame.len() as u32).to_be_bytes()[..], frame].concat()
}

/// A frame whose bytes depend on its number.
fn frame(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (number * 31 + i * 7) as u8).collect()
}

fn pair() -> (Socket, UnixStream) {
    let (ours, theirs) = os::socketpair().unwrap();
    let theirs = UnixStream::from(theirs);
    theirs.set_nonblocking(false).unwrap();
    (Arc::new(ours), theirs)
}

// ---- ingress ----

struct Reader {
    ingress: StreamIngress,
    stats: Arc<IngressStats>,
    frames: Vec<Vec<u8>>,
}

fn reader(unsent: &[u8]) -> (Reader, UnixStream) {
    let (ours, theirs) = pair();
    let stats = Arc::new(IngressStats::default());
    let mut ingress = StreamIngress::from(Arc::clone(&stats));
    ingress.connect(ours, unsent).unwrap();
    (Reader { ingress, stats, frames: Vec::new() }, theirs)
}

impl Reader {
    /// One burst of at most `max` frames, of which `left` are left.
    fn burst(&mut self, max: usize, left: usize) -> Result<usize, Fault> {
        let frames = &mut self.frames;
        self.ingress.burst(max, Instant::START, &mut Burst::default(), &mut |burst| {
            let count = burst.frames.len();
            burst.snapshot();
            frames.extend((0..count - left).map(|i| burst.copy_of(i).to_vec()));
            if left > 0 {
                burst.leave(count - left);
            }
        })
    }

    /// Bursts until there is nothing to do, or a fault.
    fn run(&mut self) -> Option<Fault> {
        loop {
            if let Err(fault) = self.burst(64, 0) {
                return Some(fault);
            }
            if self.ingress.arm() {
                return None;
            }
        }
    }
}

#[test]
fn frames_are_forwarded_however_the_stream_is_cut() {
    let (mut reader, mut peer) = reader(&[]);
    let frames: Vec<_> = (0..100).map(|n| frame(n, 14 + n * 61)).collect();
    let bytes: Vec<u8> = frames.iter().flat_map(|f| framed(f)).collect();
    for piece in bytes.chunks(1999) {
        peer.write_all(piece).unwrap();
        assert_eq!(reader.run(), None);
    }
    assert_eq!(reader.frames, frames);
    assert_eq!(reader.stats.frames.get(), 100);
    assert_eq!(reader.stats.bytes.get(), frames.iter().map(|f| f.len() as u64).sum::<u64>());
}

#[test]
fn burst_is_bounded_and_frames_that_are_left_come_again() {
    let (mut reader, mut peer) = reader(&[]);
    let frames: Vec<_> = (0..10).map(|n| frame(n, 60)).collect();
    peer.write_all(&frames.iter().flat_map(|f| framed(f)).collect::<Vec<_>>()).unwrap();
    assert_eq!(reader.burst(4, 0), Ok(4));
    assert!(!reader.ingress.arm(), "there are more");
    assert_eq!(reader.burst(4, 3), Ok(4));
    assert_eq!(reader.frames, frames[..5]);
    assert_eq!(reader.run(), None);
    assert_eq!((&reader.frames, reader.stats.frames.get()), (&frames, 10));
}

#[test]
fn frame_too_long_for_the_switch_is_dropped_alone() {
    let (mut reader, mut peer) = reader(&[]);
    let writer = std::thread::spawn(move || {
        for len in [60, FRAME_LEN_MAX as usize + 1, FRAME_MAX, FRAME_LEN_MAX as usize] {
            peer.write_all(&framed(&frame(1, len))).unwrap();
        }
    });
    let fault = loop {
        match reader.run() {
            None => std::thread::yield_now(),
            Some(fault) => break fault,
        }
    };
    writer.join().unwrap();
    assert_eq!(fault.0, End::Closed.to_string());
    assert_eq!(reader.frames.iter().map(Vec::len).collect::<Vec<_>>(), [60, 9234]);
    assert_eq!((reader.stats.drops_too_long.get(), reader.stats.frames.get()), (2, 2));
}

#[test]
fn peer_that_closes_loses_no_frame_that_it_sent() {
    let (mut reader, mut peer) = reader(&[]);
    peer.write_all(&[framed(&frame(1, 60)), framed(&frame(2, 70))[..50].to_vec()].concat())
        .unwrap();
    drop(peer);
    assert_eq!(reader.burst(64, 0), Ok(1));
    assert!(!reader.ingress.arm(), "the end is to be reported");
    assert!(reader.burst(64, 0).is_err());
    assert!(matches!(reader.ingress.disconnect(), Some(End::Closed)));
    assert_eq!((reader.burst(64, 0), reader.ingress.arm()), (Ok(0), true));
    assert_eq!(reader.frames, [frame(1, 60)]);
}

#[test]
fn length_of_4_gib_ends_the_connection_after_the_frames_before_it() {
    for bad in [0, 13, FRAME_MAX as u32 + 1, u32::MAX] {
        let (mut reader, mut peer) = reader(&[]);
        peer.write_all(&[framed(&frame(1, 60)), bad.to_be_bytes().to_vec()].concat()).unwrap();
        assert_eq!(reader.burst(64, 0), Ok(1));
        let fault = reader.burst(64, 0).unwrap_err();
        assert!(fault.0.contains(&format!("a frame of {bad} bytes")), "{fault}");
        let end = reader.ingress.disconnect().unwrap();
        assert_eq!(end.cause(), Some("bad_length"));
    }
}

#[test]
fn descriptors_end_the_connection_and_are_closed_by_the_program() {
    let (mut reader, peer) = reader(&[]);
    let event = os::eventfd().unwrap();
    assert!(os::send(peer.as_fd(), &framed(&frame(1, 60)), &[event.as_fd(); 3]).unwrap());
    assert!(reader.burst(64, 0).is_err());
    let end = reader.ingress.disconnect();
    assert!(matches!(end, Some(End::Descriptors(fds)) if fds.len() == 3));
}

#[test]
fn part_of_a_frame_continues_in_another_process() {
    let (mut first, mut peer) = reader(&[]);
    let frames = [frame(1, 60), frame(2, 1514)];
    let bytes = frames.iter().flat_map(|f| framed(f)).collect::<Vec<_>>();
    peer.write_all(&bytes[..500]).unwrap();
    assert_eq!(first.run(), None);
    assert_eq!(first.ingress.unsent(), &bytes[64..500]);
    let (mut second, mut peer) = reader(first.ingress.unsent());
    peer.write_all(&bytes[500..]).unwrap();
    assert_eq!(second.run(), None);
    assert_eq!([first.frames, second.frames].concat(), frames);
    let (ours, _theirs) = pair();
    let too_many = vec![0; 1 << 20];
    assert!(second.ingress.connect(ours, &too_many).is_err());
}

// ---- egress ----

struct Writer {
    socket: Socket,
    egress: StreamEgress,
    stats: Arc<EgressStats>,
    waits_for: Socket,
}

fn writer(unsent: &[u8]) -> (Writer, UnixStream) {
    let (ours, theirs) = pair();
    // As small as the system permits.
    rustix::net::sockopt::set_socket_send_buffer_size((*ours).as_fd(), 1).unwrap();
    let stats = Arc::new(EgressStats::default());
    let mut egress = StreamEgress::from(Arc::clone(&stats));
    let waits_for = egress.connect(Arc::clone(&ours), unsent).unwrap();
    (Writer { socket: ours, egress, stats, waits_for }, theirs)
}

impl Writer {
    fn put(&mut self, frames: &[Vec<u8>]) -> usize {
        let mut burst = Burst::default();
        frames.iter().for_each(|frame| burst.push_private(frame, VnetHdr::NONE));
        burst.snapshot();
        let picks: Vec<u16> = (0..frames.len() as u16).collect();
        let done = self.egress.put(&burst, &picks).unwrap();
        self.egress.flush();
        done
    }

    fn has_room_event(&self) -> bool {
        os::wait_readable((*self.waits_for).as_fd(), Duration::ZERO).unwrap()
    }
}

/// The other end of a writer.
struct Peer {
    stream: UnixStream,
    inbox: Inbox,
    frames: Vec<Vec<u8>>,
}

impl Peer {
    fn new(stream: UnixStream) -> Self {
        stream.set_nonblocking(true).unwrap();
        Self { stream, inbox: Inbox::new(1 << 20), frames: Vec::new() }
    }

    /// Reads what there is.
    fn read(&mut self) {
        while let Ok(len @ 1..) = self.stream.read(self.inbox.room()) {
            self.inbox.fill(len);
            let mut at = self.inbox.first();
            while let Some(frame) = self.inbox.frame(at).unwrap() {
                self.frames.push(self.inbox.of(&frame).to_vec());
                at = frame.end;
            }
            self.inbox.remove_to(at);
        }
    }

    /// Reads until it has `count` frames; what the writer has left follows by itself.
    fn read_until(&mut self, count: usize, writer: &mut Writer) {
        let end = std::time::Instant::now() + Duration::from_secs(20);
        while self.frames.len() < count {
            assert!(std::time::Instant::now() < end, "{} of {count}", self.frames.len());
            self.read();
            if writer.has_room_event() {
                writer.egress.disarm();
            }
        }
    }
}

#[test]
fn frames_arrive_whole_and_in_order_from_any_pieces_of_memory() {
    let (mut writer, peer) = writer(&[]);
    let mut peer = Peer::new(peer);
    let long = frame(1, 1400);
    let mut burst = Burst::default();
    let pieces = [&long[..20], &long[20..300], &long[300..]];
    pieces.iter().for_each(|piece| burst.segs.push(Seg::of(piece)));
    burst.push_at(0, 3, 1400, VnetHdr::NONE);
    burst.push_private(&long[..60], VnetHdr::NONE);
    burst.snapshot();
    assert_eq!(writer.egress.put(&burst, &[1, 0]), Ok(2));
    peer.read();
    assert_eq!(peer.frames, [long[..60].to_vec(), long.clone()]);
    assert_eq!((writer.stats.frames.get(), writer.stats.bytes.get()), (2, 1460));
    assert_eq!(writer.egress.offloads(), Offloads::default());
}

#[test]
fn frames_beyond_the_room_do_not_fit_and_the_rest_of_one_follows() {
    let (mut writer, peer) = writer(&[]);
    let mut peer = Peer::new(peer);
    let frames: Vec<_> = (0..400).map(|n| frame(n, 1514)).collect();
    let (mut done, mut fulls) = (0, 0);
    while done < frames.len() {
        let end = frames.len().min(done + 64);
        done += writer.put(&frames[done..end]);
        if done < end {
            fulls += 1;
            assert_eq!(writer.put(&frames[done..end]), 0, "it is full");
            assert_eq!(writer.egress.room(60, 8), Ok(0));
            assert!(writer.egress.arm() && !writer.has_room_event());
            peer.read_until(done, &mut writer);
            assert!(writer.egress.unsent().is_empty());
            assert_eq!(writer.egress.room(60, 8), Ok(8));
            assert!(!writer.egress.arm() && !writer.has_room_event(), "no more is requested");
        }
    }
    peer.read_until(400, &mut writer);
    assert!(fulls > 3 && peer.frames == frames, "{fulls}");
    assert_eq!((writer.stats.frames.get(), writer.stats.bytes.get()), (400, 400 * 1514));
    assert!(writer.stats.full.get() >= fulls);
}

#[test]
fn segments_of_a_frame_are_sent_together_or_wait_together() {
    let (mut writer, peer) = writer(&[]);
    let mut peer = Peer::new(peer);
    let (head, body) = ([1; 54], vec![2; 1460]);
    for _ in 0..45 {
        let body = [Seg::of(&body[..1000]), Seg::of(&body[1000..])];
        assert_eq!(writer.egress.put_parts(&head, &body, &VnetHdr::NONE), Ok(true));
    }
    peer.read();
    assert!(peer.frames.is_empty(), "nothing is sent before the flush");
    writer.egress.flush();
    assert!(!writer.egress.unsent().is_empty() && writer.egress.room(60, 1) == Ok(0));
    peer.read_until(45, &mut writer);
    assert!(peer.frames.iter().all(|frame| *frame == [&head[..], &body].concat()));
    assert_eq!((writer.stats.frames.get(), writer.egress.room(60, 5)), (45, Ok(5)));
}

#[test]
fn rest_of_a_frame_continues_in_another_process() {
    let (mut first, peer) = writer(&[]);
    let mut peer = Peer::new(peer);
    let frames: Vec<_> = (0..64).map(|n| frame(n, 9000)).collect();
    let done = first.put(&frames);
    assert!(done < 64 && !first.egress.unsent().is_empty());
    let unsent = first.egress.unsent().to_vec();
    first.egress.disconnect();
    let mut second = first;
    let socket = Arc::clone(&second.socket);
    second.waits_for = second.egress.connect(socket, &unsent).unwrap();
    peer.read_until(done, &mut second);
    assert_eq!(peer.frames, frames[..done]);
    assert_eq!(second.put(&frames[done..][..1]), 1);
    peer.read_until(done + 1, &mut second);
}

#[test]
fn peer_that_reads_no_more_ends_nothing_but_its_frames() {
    let (mut writer, peer) = writer(&[]);
    drop(peer);
    assert_eq!(writer.put(&[frame(1, 60), frame(2, 60)]), 2);
    assert_eq!(writer.put(&[frame(1, 60)]), 1);
    assert_eq!((writer.stats.drops_down.get(), writer.stats.frames.get()), (3, 0));
    assert_eq!((writer.egress.room(60, 3), writer.egress.arm()), (Ok(3), false));
    writer.egress.disconnect();
    assert_eq!(writer.put(&[frame(1, 60)]), 1);
    assert_eq!(writer.egress.put_parts(&[0; 54], &[], &VnetHdr::NONE), Ok(true));
    assert_eq!((writer.stats.drops_down.get(), writer.egress.arm()), (5, false));
}

#[test]
fn full_socket_whose_peer_closes_does_not_stay_full() {
    let (mut writer, peer) = writer(&[]);
    let frames: Vec<_> = (0..64).map(|n| frame(n, 9000)).collect();
    assert!(writer.put(&frames) < 64 && writer.egress.arm());
    drop(peer);
    assert!(writer.has_room_event());
    writer.egress.disarm();
    assert_eq!((writer.egress.unsent().len(), writer.put(&frames[..1])), (0, 1));
    assert_eq!(writer.stats.drops_down.get(), 1);
}
