//! One guest of a trial: it sends frames that are due, and receives those of the other one.

use hdrhistogram::Histogram;

use crate::error::Error;
use crate::generate::frame::{HEADERS, MARK, STAMP, headers, nth, stamp};
use crate::guest::{Guest, now};
use crate::ring::{HDR_LEN, Half, Malformed, Ring};
use switch::time::Instant;

/// Frames sent, and received, in a turn.
const BATCH: usize = 32;
/// Length of the pieces in which a frame is read.
const CHUNK: usize = 512;
/// Frames whose time of publication is known: more than rings and switch hold.
const KNOWN: u64 = 1 << 16;
/// Of so many frames one has its time in the switch recorded: the guests' CPU is short.
const RECORDED: u64 = 8;
/// Frames that a turn may take to announce addresses.
const ANNOUNCED_AT_ONCE: usize = 64;

/// Addresses, flows and sizes of the frames of one guest, all in turn.
#[derive(Clone, Debug)]
pub struct Flows {
    /// First address of the guest.
    pub mac: [u8; 6],
    /// First address of the other one.
    pub peer: [u8; 6],
    /// Number of addresses of each.
    pub addresses: u32,
    /// Number of UDP source ports.
    pub flows: u16,
    /// Sizes without FCS.
    pub sizes: Vec<u32>,
}

/// Numbers of an address and of a flow, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Path {
    address: u32,
    flow: u16,
}

impl Flows {
    /// Size of frame `n`.
    fn size(&self, n: u64) -> u32 {
        self.sizes[(n % self.sizes.len() as u64) as usize]
    }

    /// Which address and flow frame `n` has.
    fn path(&self, n: u64) -> Path {
        let address = (n % u64::from(self.addresses.max(1))) as u32;
        Path { address, flow: (n % u64::from(self.flows.max(1))) as u16 }
    }

    fn headers(&self, size: u32, path: Path) -> [u8; HEADERS] {
        let Path { address, flow } = path;
        headers(
            nth(self.mac, address, self.addresses),
            nth(self.peer, address, self.addresses),
            size,
            flow,
        )
    }
}

/// Whether ranges of `count` addresses from `a` and from `b` on have any in common.
pub fn overlap(a: [u8; 6], b: [u8; 6], count: u32) -> bool {
    let last = |mac: [u8; 6]| u32::from_be_bytes([mac[2], mac[3], mac[4], mac[5]]);
    let apart = last(a).wrapping_sub(last(b));
    a[..2] == b[..2] && apart.min(apart.wrapping_neg()) < count.max(1)
}

/// Totals of a receiver.
#[derive(Clone, Copy, Debug, Default)]
pub struct Received {
    /// Frames of the trial, those of the warm-up included.
    pub frames: u64,
    /// Frames after a later one of their flow.
    pub late: u64,
    /// Other frames.
    pub foreign: u64,
}

/// What a call has received.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counted {
    /// Frames of the window.
    pub frames: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Whether there was any frame.
    pub any: bool,
}

/// When frames were made available: stored by the sender, read for the receiver.
pub struct Published(Box<[Instant]>);

impl Published {
    fn new() -> Self {
        Self(vec![Instant::START; KNOWN as usize].into())
    }

    fn set(&mut self, numbers: std::ops::Range<u64>, at: Instant) {
        for number in numbers {
            self.0[(number % KNOWN) as usize] = at;
        }
    }

    fn of(&self, number: u64) -> Instant {
        self.0[(number % KNOWN) as usize]
    }
}

/// Latencies of frames, in ns.
#[derive(Clone, Debug)]
pub struct Latencies {
    /// From the time at which a frame was due.
    pub of_all: Histogram<u64>,
    /// From the publication of its descriptor to the end of the turn in which its used element was
    /// there: what the switch added. Of some frames.
    pub added: Histogram<u64>,
}

/// A guest. It uses its rings directly, as that of `--mode pass`.
pub struct End {
    guest: Guest,
    flows: Flows,
    /// Whether it sends.
    pub sends: bool,
    /// Frames sent, which are numbered from 0.
    pub sent: u64,
    /// When they were made available.
    pub published: Published,
    /// Totals of what was received.
    pub received: Received,
    announced: u32,
    /// Header of a packet, headers, stamp and payload of the next frame.
    bytes: Vec<u8>,
    /// Size and path of the headers in `bytes`.
    built: Option<(u32, Path)>,
    /// Buffers that the switch does not have.
    free: Vec<u16>,
    /// Buffers to return.
    done: Vec<u16>,
    /// Of each flow, the number after the highest one received.
    next: Vec<u64>,
    chunk: [u8; CHUNK],
}

impl End {
    pub fn new(guest: Guest, flows: Flows, sends: bool) -> Self {
        let longest = flows.sizes.iter().max().copied().unwrap_or(0) as usize;
        let mut bytes = vec![0xa5; HDR_LEN + longest.max(CHUNK)];
        bytes[..HDR_LEN].fill(0);
        Self {
            free: (0..guest.pairs[0].tx.ring.size()).collect(),
            next: vec![0; usize::from(flows.flows.max(1))],
            guest,
            flows,
            sends,
            sent: 0,
            published: Published::new(),
            received: Received::default(),
            announced: 0,
            bytes,
            built: None,
            done: Vec::new(),
            chunk: [0; CHUNK],
        }
    }

    pub fn features(&self) -> Vec<&'static str> {
        self.guest.link.features()
    }

    pub fn is_gone(&mut self) -> bool {
        self.guest.is_gone()
    }

    /// Announces some more addresses; returns whether the switch has taken all of them.
    pub fn announce(&mut self) -> Result<bool, Error> {
        let left = (self.flows.addresses.max(1) - self.announced) as usize;
        let room = self.room(left.min(ANNOUNCED_AT_ONCE))?;
        let ring = &mut self.guest.pairs[0].tx.ring;
        for i in self.free.drain(self.free.len() - room..) {
            let frame =
                switch::flow::rarp(nth(self.flows.mac, self.announced, self.flows.addresses));
            self.announced += 1;
            if let Some(mut to) = ring.to_write(i, (HDR_LEN + frame.len()) as u32).next() {
                to.write(&[0; HDR_LEN]);
                to.write(&frame);
            }
            let sent = ring.add(i, (HDR_LEN + frame.len()) as u32, false);
            assert!(sent, "shorter than the longest frame");
        }
        if room > 0 {
            ring.publish();
        }
        ring.kick();
        ring.reclaim(&mut self.free)?;
        let all = self.announced >= self.flows.addresses;
        Ok(all && self.free.len() == usize::from(self.guest.pairs[0].tx.ring.size()))
    }

    /// Number of free buffers, at most `want`.
    fn room(&mut self, want: usize) -> Result<usize, Malformed> {
        if self.free.len() < want {
            self.guest.pairs[0].tx.ring.reclaim(&mut self.free)?;
        }
        Ok(self.free.len().min(want))
    }

    /// Sends frames up to number `due`, at most a batch; `when` returns the time at which a frame
    /// was due. Returns whether any was sent.
    pub fn send(&mut self, due: u64, when: impl Fn(u64) -> Instant) -> Result<bool, Malformed> {
        let want = due.saturating_sub(self.sent).min(BATCH as u64) as usize;
        if !self.sends || want == 0 {
            return Ok(false);
        }
        let room = self.room(want)?;
        if room == 0 {
            return Ok(false);
        }
        let rest = self.free.len() - room;
        let first = self.sent;
        for at in (rest..self.free.len()).rev() {
            let (size, path) = (self.flows.size(self.sent), self.flows.path(self.sent));
            if self.built != Some((size, path)) {
                let headers = self.flows.headers(size, path);
                self.bytes[HDR_LEN..HDR_LEN + HEADERS].copy_from_slice(&headers);
                self.built = Some((size, path));
            }
            let stamp = stamp(self.sent, when(self.sent));
            self.bytes[HDR_LEN + HEADERS..HDR_LEN + HEADERS + STAMP].copy_from_slice(&stamp);
            let ring = &mut self.guest.pairs[0].tx.ring;
            let (i, len) = (self.free[at], HDR_LEN as u32 + size);
            if let Some(mut to) = ring.to_write(i, len).next() {
                to.write(&self.bytes[..len as usize]);
            }
            let sent = ring.add(i, len, false);
            assert!(sent, "a plain frame, no longer than the longest");
            self.sent += 1;
        }
        self.free.truncate(rest);
        let ring = &mut self.guest.pairs[0].tx.ring;
        self.published.set(first..self.sent, now());
        ring.publish();
        ring.kick();
        Ok(true)
    }

    /// Receives a batch, and returns its buffers. Frames whose number is `first` or higher are
    /// counted, and their latency recorded, with what the sender published.
    pub fn receive(
        &mut self,
        at: Instant,
        first: u64,
        mut record: Option<(&mut Latencies, &Published)>,
    ) -> Result<Counted, Malformed> {
        let Self { guest, flows, received, done, next, chunk, .. } = self;
        let ring: &mut Ring = &mut guest.pairs[0].rx.ring;
        let (half, memory, buffers, _) = ring.parts();
        let Half::Virtio(virtq) = half else { unreachable!("checked before") };
        let mut counted = Counted::default();
        for used in virtq.take_used(BATCH)? {
            done.push(used.id);
            counted.any = true;
            let mut stamp = None;
            for mut seg in buffers.read(memory, used.id, used.len) {
                while !seg.is_empty() {
                    let n = seg.read(chunk);
                    std::hint::black_box(&chunk);
                    seg = seg.skip(n as u32);
                    stamp = stamp.or_else(|| of_frame(&chunk[..n]));
                }
            }
            let Some((number, due)) = stamp.filter(|_| used.len as usize >= HDR_LEN) else {
                received.foreign += 1;
                continue;
            };
            received.frames += 1;
            let flow = &mut next[usize::from(flows.path(number).flow)];
            received.late += u64::from(number < *flow);
            *flow = number.saturating_add(1).max(*flow);
            if number < first {
                continue;
            }
            counted.frames += 1;
            counted.bytes += u64::from(used.len) - HDR_LEN as u64;
            let Some((latencies, published)) = &mut record else { continue };
            latencies.of_all.saturating_record((at - due).get().max(1));
            if number.is_multiple_of(RECORDED) {
                let added = at - published.of(number);
                latencies.added.saturating_record(added.get().max(1));
            }
        }
        if counted.any {
            let room = ring.room();
            for i in done.drain(..) {
                let added = ring.add(i, room, true);
                assert!(added, "a receive buffer is never refused");
            }
            ring.publish();
            ring.kick();
        }
        Ok(counted)
    }
}

/// Number of a frame of the trial and the time at which it was due, from its first bytes with the
/// header of the packet; `None`: another frame.
fn of_frame(bytes: &[u8]) -> Option<(u64, Instant)> {
    let stamp = bytes.get(HDR_LEN + HEADERS..HDR_LEN + HEADERS + STAMP)?;
    let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|b| stamp[i + b]));
    (stamp[..2] == MARK).then(|| (word(2), Instant::from_ns(word(10))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_flows_and_sizes_take_turns() {
        let flows = Flows {
            mac: [2, 0, 0, 0, 0, 1],
            peer: [2, 1, 0, 0, 255, 255],
            addresses: 3,
            flows: 2,
            sizes: vec![60, 1514],
        };
        let frames: Vec<_> = (0..7).map(|n| (flows.path(n), flows.size(n))).collect();
        assert_eq!(frames[5], (Path { address: 2, flow: 1 }, 1514));
        assert_eq!(frames[6], (Path { address: 0, flow: 0 }, 60));
        let headers = flows.headers(60, Path { address: 1, flow: 1 });
        assert_eq!(headers[..6], [2, 1, 0, 1, 0, 0], "the next one, with a carry");
        assert_eq!(headers[6..12], [2, 0, 0, 0, 0, 2]);
    }

    #[test]
    fn times_of_publication_are_those_of_the_last_frames() {
        let mut published = Published::new();
        published.set(0..KNOWN, Instant::from_ns(5));
        published.set(KNOWN..KNOWN + 2, Instant::from_ns(9));
        let at = [KNOWN + 1, 2, KNOWN - 1].map(|number| published.of(number));
        assert_eq!(at, [9, 5, 5].map(Instant::from_ns));
    }

    #[test]
    fn ranges_that_share_an_address_overlap() {
        let mac = |last: u8| [2, 0, 0, 0, 1, last];
        assert!(overlap(mac(1), mac(1), 1) && overlap(mac(1), mac(4), 4));
        assert!(overlap(mac(4), mac(1), 4));
        assert!(!overlap(mac(1), mac(4), 3) && !overlap(mac(4), mac(1), 3));
        assert!(!overlap([2, 1, 0, 0, 1, 1], mac(1), 9));
    }

    #[test]
    fn only_frames_with_a_stamp_are_of_the_trial() {
        let mut frame = vec![0; HDR_LEN + HEADERS];
        frame.extend(stamp(77, Instant::from_ns(5)));
        assert_eq!(of_frame(&frame), Some((77, Instant::from_ns(5))));
        assert_eq!(of_frame(&frame[..frame.len() - 1]), None);
        frame[HDR_LEN + HEADERS] ^= 1;
        assert_eq!(of_frame(&frame), None);
    }
}
