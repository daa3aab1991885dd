use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::time::Duration;

use shm::Seg;
use switch::frame::{Burst, FRAME_LEN_MAX};
use switch::port::{Egress, Fault, Ingress};
use switch::stats::{EgressStats, IngressStats};
use switch::time::Instant;
use switch::vnet::VnetHdr;

use super::*;
use crate::stream::{End, Socket};

fn frame(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (number * 31 + i * 7) as u8).collect()
}

fn pair() -> (Socket, UnixDatagram) {
    let (ours, theirs) = UnixDatagram::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    (Arc::new(ours), theirs)
}

/// Ingress whose socket has any number of senders.
fn reader() -> (DgramIngress, Arc<IngressStats>, UnixDatagram) {
    let (ours, theirs) = pair();
    let stats = Arc::new(IngressStats::default());
    let mut ingress = DgramIngress::from(Arc::clone(&stats));
    ingress.connect(ours);
    (ingress, stats, theirs)
}

fn burst(
    ingress: &mut DgramIngress,
    max: usize,
    left: usize,
    frames: &mut Vec<Vec<u8>>,
) -> Result<usize, Fault> {
    ingress.burst(max, Instant::START, &mut Burst::default(), &mut |burst| {
        let count = burst.frames.len();
        burst.snapshot();
        frames.extend((0..count - left).map(|i| burst.copy_of(i).to_vec()));
        if left > 0 {
            burst.leave(count - left);
        }
    })
}

#[test]
fn datagrams_are_frames_and_others_are_dropped_by_cause() {
    let (mut ingress, stats, peer) = reader();
    let max = FRAME_LEN_MAX as usize;
    for len in [0, 4, 13, 14, 60, max, max + 1, 60_000] {
        peer.send(&frame(len, len)).unwrap();
    }
    let mut frames = Vec::new();
    assert_eq!(burst(&mut ingress, 64, 0, &mut frames), Ok(8));
    assert_eq!(frames, [14, 60, max].map(|len| frame(len, len)));
    assert_eq!((stats.drops_runt.get(), stats.drops_too_long.get()), (3, 2));
    assert_eq!((stats.frames.get(), stats.bytes.get()), (3, 14 + 60 + max as u64));
    assert!(ingress.arm());
    peer.send(&frame(1, 60)).unwrap();
    assert!(!ingress.arm(), "there is one");
    assert_eq!(burst(&mut ingress, 64, 0, &mut frames), Ok(1));
    assert_eq!(burst(&mut ingress, 64, 0, &mut frames), Ok(0));
    assert!(ingress.arm());
}

#[test]
fn frames_that_are_left_come_again_also_in_another_process() {
    let (mut ingress, stats, peer) = reader();
    let all: Vec<_> = (0..9).map(|n| frame(n, 60 + n)).collect();
    all.iter().for_each(|frame| assert_eq!(peer.send(frame).unwrap(), frame.len()));
    let mut frames = Vec::new();
    assert_eq!(burst(&mut ingress, 4, 3, &mut frames), Ok(4));
    assert!(!ingress.arm());
    assert_eq!(burst(&mut ingress, 2, 0, &mut frames), Ok(2));
    assert_eq!((&frames[..], stats.frames.get()), (&all[..3], 3));
    let unsent = ingress.unsent();
    assert_eq!(unsent, all[3..]);
    let (mut next, _, _peer) = reader();
    next.restore_unsent(&unsent);
    while !next.arm() {
        burst(&mut next, 64, 0, &mut frames).unwrap();
    }
    assert_eq!(frames, all);
}

#[test]
fn descriptors_end_the_queue_and_are_closed_by_the_program() {
    let (mut ingress, _, peer) = reader();
    let event = os::eventfd().unwrap();
    assert!(os::send(peer.as_fd(), &frame(1, 60), &[event.as_fd(); 5]).unwrap());
    let mut frames = Vec::new();
    assert_eq!(burst(&mut ingress, 64, 0, &mut frames), Ok(1));
    assert!(!ingress.arm());
    assert!(burst(&mut ingress, 64, 0, &mut frames).is_err());
    let end = ingress.disconnect();
    assert!(matches!(end, Some(End::Descriptors(fds)) if fds.len() == 5));
}

struct Writer {
    egress: DgramEgress,
    stats: Arc<EgressStats>,
    socket: Socket,
    waits_for: Socket,
}

fn writer() -> (Writer, UnixDatagram) {
    let (ours, theirs) = pair();
    let stats = Arc::new(EgressStats::default());
    let mut egress = DgramEgress::from(Arc::clone(&stats));
    let waits_for = egress.connect(ours.clone(), &[]).unwrap();
    theirs.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    (Writer { egress, stats, socket: ours, waits_for }, theirs)
}

impl Writer {
    fn put(&mut self, frames: &[Vec<u8>]) -> Result<usize, Fault> {
        let mut burst = Burst::default();
        frames.iter().for_each(|frame| burst.push_private(frame, VnetHdr::NONE));
        burst.snapshot();
        let picks: Vec<u16> = (0..frames.len() as u16).collect();
        let done = self.egress.put(&burst, &picks);
        self.egress.flush();
        done
    }

    fn has_room_event(&self) -> bool {
        os::wait_readable((*self.waits_for).as_fd(), Duration::ZERO).unwrap()
    }
}

fn receive(peer: &UnixDatagram) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 16];
    let len = peer.recv(&mut bytes).unwrap();
    bytes.truncate(len);
    bytes
}

#[test]
fn frames_beyond_the_room_do_not_fit_and_room_is_notified() {
    let (mut writer, peer) = writer();
    let frames: Vec<_> = (0..300).map(|n| frame(n, 1514)).collect();
    let (mut done, mut got, mut fulls) = (0, Vec::new(), 0);
    while done < frames.len() {
        let end = frames.len().min(done + 64);
        done += writer.put(&frames[done..end]).unwrap();
        if done < end {
            fulls += 1;
            assert_eq!((writer.put(&frames[done..end]), writer.egress.room(60, 8)), (Ok(0), Ok(0)));
            assert!(writer.egress.arm() && !writer.has_room_event());
            got.extend((got.len()..done).map(|_| receive(&peer)).collect::<Vec<_>>());
            assert!(writer.has_room_event());
            writer.egress.disarm();
            assert!(!writer.has_room_event());
            assert_eq!(writer.egress.room(60, 8), Ok(8));
            assert!(!writer.egress.arm());
        }
    }
    got.extend((got.len()..300).map(|_| receive(&peer)).collect::<Vec<_>>());
    assert!(fulls > 0 && got == frames);
    assert_eq!((writer.stats.frames.get(), writer.stats.bytes.get()), (300, 300 * 1514));
}

#[test]
fn segments_and_pieces_are_one_datagram() {
    let (mut writer, peer) = writer();
    let (head, body) = ([1; 54], [2; 1460]);
    let parts = [Seg::of(&body[..100]), Seg::of(&body[100..])];
    assert_eq!(writer.egress.put_parts(&head, &parts, &VnetHdr::NONE), Ok(true));
    assert_eq!(receive(&peer), [&head[..], &body].concat());
    let long = frame(1, 9000);
    let mut burst = Burst::default();
    [&long[..20], &long[20..]].iter().for_each(|piece| burst.segs.push(Seg::of(piece)));
    burst.push_at(0, 2, 9000, VnetHdr::NONE);
    burst.snapshot();
    assert_eq!(writer.egress.put(&burst, &[0]), Ok(1));
    assert_eq!(receive(&peer), long);
}

/// More segments than a socket holds datagrams: a frame delivered in part would be sent again as a
/// whole.
#[test]
fn segments_of_a_frame_are_sent_or_wait_together() {
    const SEGMENTS: u8 = 200;
    let (mut writer, peer) = writer();
    let body = [2; 1000];
    let segment = |n: u8| [&[n; 54][..], &body].concat();
    for n in 0..SEGMENTS {
        let put = writer.egress.put_parts(&[n; 54], &[Seg::of(&body)], &VnetHdr::NONE);
        assert_eq!(put, Ok(true));
    }
    writer.egress.flush();
    let sent = writer.stats.frames.get();
    assert!((1..SEGMENTS.into()).contains(&sent), "{sent}");
    // Nothing overtakes them.
    assert_eq!((writer.put(&[frame(1, 60)]), writer.egress.room(60, 8)), (Ok(0), Ok(0)));
    // Another process sends some of the others, this one the rest.
    let unsent = writer.egress.unsent();
    let left = usize::from(SEGMENTS) - sent as usize;
    assert_eq!(unsent.len(), left * (4 + 1054));
    let socket = writer.socket.clone();
    writer.waits_for = writer.egress.connect(socket, &unsent).unwrap();
    for n in 0..SEGMENTS {
        // The worker that watches for room disarms the queue then.
        if writer.has_room_event() {
            writer.egress.disarm();
        }
        assert!(receive(&peer) == segment(n), "segment {n}");
    }
    assert!(!writer.has_room_event(), "no more is requested");
    assert_eq!(writer.stats.frames.get(), u64::from(SEGMENTS));
    assert_eq!((writer.put(&[frame(1, 60)]), writer.egress.room(60, 8)), (Ok(1), Ok(8)));
    // Of one that is gone, those that wait are counted.
    assert_eq!(receive(&peer), frame(1, 60));
    for n in 0..SEGMENTS {
        _ = writer.egress.put_parts(&[n; 54], &[Seg::of(&body)], &VnetHdr::NONE);
    }
    drop(peer);
    assert!(writer.put(&[frame(1, 60)]).is_err());
    let stats = &writer.stats;
    let (frames, lost) = (stats.frames.get() - u64::from(SEGMENTS) - 1, stats.drops_down.get());
    assert_eq!(frames + lost, u64::from(SEGMENTS));
}

#[test]
fn peer_that_closes_its_socket_is_reported() {
    let (mut writer, peer) = writer();
    drop(peer);
    assert!(writer.put(&[frame(1, 60)]).is_err());
    assert!(writer.egress.put_parts(&[0; 54], &[], &VnetHdr::NONE).is_err());
    writer.egress.disconnect();
    assert_eq!(writer.put(&[frame(1, 60), frame(2, 60)]), Ok(2));
    assert_eq!(writer.stats.drops_down.get(), 2);
}
