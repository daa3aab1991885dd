//! `gen --mode pass`: both guests in one thread, for the most that a switch can do.
//!
//! ```text
//!   port 0 ── transmit queue ◀─ writes every byte of a frame ─┐
//!     │                                                       thread, one CPU
//!   switch, another CPU                                       │
//!     │                                                       │
//!   port 1 ── receive queue ──▶ reads every byte of a frame ──┘
//! ```
//! Other modes have a process for each guest, which on one CPU wait for each other, and stamps and
//! clocks for each frame: the guests are then slower than the switch. This thread does what a
//! driver must, never sleeps, and measures for how long it found nothing to do. No more frames are
//! under way than the receiver has buffers, so none is lost.

use std::ops::Range;
use std::time::Duration;

use serde_json::json;

use super::announce;
use super::frame::{HEADERS, STAMP, headers};
use crate::connect::{Connect, connect};
use crate::error::Error;
use crate::guest::{Guest, now};
use crate::ring::{HDR_LEN, Half, Malformed, Ring};
use shm::Seg;
use switch::time::Ns;

/// Frames sent, and received, in a turn.
const BATCH: u64 = 32;
/// Turns between two checks of the clock and of the signals.
const TURNS: u32 = 256;
/// Interval of checks that the switch is still there.
const CHECK_EVERY: Ns = Ns::from_ms(100);
/// Longest wait at the end for frames under way.
const DRAIN_MAX: Ns = Ns::from_secs(1);
/// Place of the frame's number, after the headers.
const NUMBER: Range<usize> = HDR_LEN + HEADERS..HDR_LEN + HEADERS + 8;
/// Length of the pieces in which a frame is read.
const CHUNK: usize = 512;

/// Options of the two guests.
#[derive(Clone, Debug)]
pub struct Pass {
    /// Their connection, without the target.
    pub to: Connect,
    /// Sockets of the sending and of the receiving port.
    pub targets: [String; 2],
    /// Bytes of each frame, without FCS.
    pub size: u32,
    /// MAC address of the sender.
    pub mac: [u8; 6],
    /// MAC address of the receiver.
    pub peer: [u8; 6],
    /// CPU to run on.
    pub cpu: Option<usize>,
    /// Frames to send; `None`: unlimited.
    pub frames: Option<u64>,
    /// Duration; `None`: until `running` returns false.
    pub duration: Option<Duration>,
    /// Print totals as JSON.
    pub json: bool,
}

/// Counters.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    sent: u64,
    received: u64,
    /// Frames that are not of our length, as others' are.
    foreign: u64,
    /// Frames whose number does not follow the one before.
    gaps: u64,
    next: u64,
    /// Time in turns with no frame to receive and no buffer to send one.
    idle: Ns,
}

/// Passes frames from one port to the other while `running` returns true; prints totals.
///
/// # Errors
/// A connection fails, or the switch ends it.
pub fn run(pass: &Pass, running: &dyn Fn() -> bool) -> Result<(), Error> {
    if !pass.to.is_virtio() {
        let what = "--mode pass: only with --connect vhost-user:SOCKET";
        return Err(Error::Usage(what.into()));
    }
    if pass.to.settings.apart {
        return Err(Error::Usage("--set header=apart: not with --mode pass".into()));
    }
    if pass.to.settings.full.queue() > 0 {
        return Err(Error::Usage("--set tx-full=queue: not with --mode pass".into()));
    }
    if let Some(cpu) = pass.cpu {
        super::pin(cpu)?;
    }
    let to = pass.to.clone().small();
    let [from, to] = pass.targets.each_ref().map(|target| to.at(target.into()));
    let mut from = connect(&from, Some(running))?;
    let mut to = connect(&to, Some(running))?;
    let most = from.pairs[0].tx.ring.longest();
    if pass.size > most {
        return Err(Error::Usage(format!("--size {}: {most} bytes at most", pass.size)));
    }
    announce(&mut to.pairs[0].tx, pass.peer);
    let mut totals = Totals::default();
    let (started, cpu_before) = (now(), os::process_cpu_time());
    let result = pass_frames(pass, &mut from, &mut to, &mut totals, running);
    let elapsed = now() - started;
    let seconds = elapsed.get() as f64 / 1e9;
    let report = json!({
        "mode": "pass",
        "features": from.link.features(),
        "duration_s": seconds,
        "sent_frames": totals.sent,
        "received_frames": totals.received,
        "received_pps": totals.received as f64 / seconds.max(1e-9),
        "foreign_frames": totals.foreign,
        "gaps": totals.gaps,
        "idle_s": totals.idle.get() as f64 / 1e9,
        "cpu_s": (os::process_cpu_time() - cpu_before).as_secs_f64(),
    });
    if pass.json {
        println!("{report}");
    } else {
        let Totals { sent, received, idle, .. } = totals;
        println!(
            "{seconds:.1} s: sent {sent}, received {received} ({:.3} M/s); {:.0} % without work",
            received as f64 / seconds.max(1e-9) / 1e6,
            100.0 * idle.get() as f64 / elapsed.get().max(1) as f64
        );
    }
    result
}

fn pass_frames(
    pass: &Pass,
    from: &mut Guest,
    to: &mut Guest,
    totals: &mut Totals,
    running: &dyn Fn() -> bool,
) -> Result<(), Error> {
    let mut sender = Sender::new(pass, from.pairs[0].tx.ring.size());
    let mut receiver = Receiver { size: pass.size, done: Vec::new(), chunk: [0; CHUNK] };
    let end = pass.duration.map(|duration| now() + Ns::from(duration));
    let mut check_at = now() + CHECK_EVERY;
    let mut idle_since = None;
    while totals.sent < sender.frames {
        let at = now();
        if end.is_some_and(|end| at >= end) || !running() {
            break;
        }
        if at >= check_at {
            check_at = at + CHECK_EVERY;
            if from.is_gone() || to.is_gone() {
                return Err(Error::Failed("the switch closed the connection".into()));
            }
        }
        for _ in 0..TURNS {
            let sent = sender.send(&mut from.pairs[0].tx.ring, totals)?;
            let received = receiver.receive(&mut to.pairs[0].rx.ring, totals)?;
            // The clock is read where an idle time begins or ends, not in each turn.
            if !sent && !received {
                idle_since.get_or_insert_with(now);
            } else if let Some(since) = idle_since.take() {
                totals.idle += now() - since;
            }
        }
    }
    let end = now() + DRAIN_MAX;
    while totals.received < totals.sent && now() < end {
        receiver.receive(&mut to.pairs[0].rx.ring, totals)?;
        std::hint::spin_loop();
    }
    Ok(())
}

/// The first guest. It uses its ring directly: what [`Tx`](crate::tx::Tx) adds for policies is
/// not a driver's work.
struct Sender {
    /// Frames to send in all.
    frames: u64,
    /// Header and frame.
    bytes: Vec<u8>,
    /// Buffers that the switch does not have, in the order of their use.
    free: Vec<u16>,
    /// Frames sent at once.
    batch: u64,
    /// Their buffers.
    batch_buffers: Vec<u16>,
    /// Buffers of the ring, as of the receiver's.
    buffers: u64,
}

impl Sender {
    fn new(pass: &Pass, buffers: u16) -> Self {
        let mut bytes = vec![0; HDR_LEN];
        bytes.extend(headers(pass.mac, pass.peer, pass.size, 0));
        bytes.resize(HDR_LEN + pass.size as usize, 0xa5);
        Self {
            frames: pass.frames.unwrap_or(u64::MAX),
            bytes,
            free: (0..buffers).collect(),
            batch: BATCH.min(buffers.into()),
            batch_buffers: Vec::new(),
            buffers: buffers.into(),
        }
    }

    /// Sends a batch of frames, if there are buffers for it and the receiver will have some for all
    /// frames under way. Each has its number, so that no two are equal.
    fn send(&mut self, ring: &mut Ring, totals: &mut Totals) -> Result<bool, Malformed> {
        let batch = self.batch.min(self.frames - totals.sent);
        if totals.sent + batch > totals.received + self.buffers || batch == 0 {
            return Ok(false);
        }
        if (self.free.len() as u64) < batch {
            ring.reclaim(&mut self.free)?;
        }
        if (self.free.len() as u64) < batch {
            return Ok(false);
        }
        self.batch_buffers.extend(self.free.drain(..batch as usize));
        let len = self.bytes.len() as u32;
        for i in &self.batch_buffers {
            ring.to_write(*i, len).for_each(|to| to.prefetch(HDR_LEN as u32));
        }
        for i in &self.batch_buffers {
            if let Some(mut to) = ring.to_write(*i, len).next() {
                // The header of a plain frame is zeroes. As by DPDK's driver, it is stored only
                // where it differs: with `offset`, its line then stays in both caches.
                to.update_u64(0);
                to.update_u32(0);
                // The number directly into the buffer: a copy of bytes just stored waits until the
                // stores before are done, that is for the lines of earlier frames, one by one.
                to.reborrow().write(&self.bytes[HDR_LEN..]);
                to.advance((NUMBER.start - HDR_LEN) as u32);
                to.write(&totals.sent.to_le_bytes());
            }
            totals.sent += 1;
        }
        ring.add_all(&mut self.batch_buffers, len, false);
        ring.publish();
        ring.kick();
        Ok(true)
    }
}

/// The second guest.
struct Receiver {
    /// Length of our frames.
    size: u32,
    /// Buffers to return.
    done: Vec<u16>,
    /// Piece of a frame as it is read.
    chunk: [u8; CHUNK],
}

impl Receiver {
    /// Receives a batch of frames and returns their buffers; false: there is none.
    fn receive(&mut self, ring: &mut Ring, totals: &mut Totals) -> Result<bool, Malformed> {
        let Self { size, done, chunk } = self;
        let (half, memory, buffers, _) = ring.parts();
        let Half::Virtio(virtq) = half else { unreachable!("checked before") };
        let taken = virtq.take_used(BATCH as usize)?;
        for used in taken {
            buffers.read(memory, used.id, used.len).for_each(Seg::prefetch);
        }
        for used in taken {
            done.push(used.id);
            if used.len != *size + HDR_LEN as u32 {
                totals.foreign += 1;
                continue;
            }
            let mut first = true;
            for mut seg in buffers.read(memory, used.id, used.len) {
                while !seg.is_empty() {
                    let n = seg.read(chunk);
                    std::hint::black_box(&chunk);
                    seg = seg.skip(n as u32);
                    if std::mem::take(&mut first) {
                        let number = chunk[NUMBER].try_into().expect("of this length");
                        let number = u64::from_le_bytes(number);
                        totals.gaps += u64::from(number != totals.next);
                        totals.next = number.wrapping_add(1);
                    }
                }
            }
            totals.received += 1;
        }
        if done.is_empty() {
            return Ok(false);
        }
        let room = ring.room();
        ring.add_all(done, room, true);
        ring.publish();
        ring.kick();
        Ok(true)
    }
}

const _: () = assert!(HDR_LEN == size_of::<u64>() + size_of::<u32>());
const _: () = assert!(NUMBER.end - NUMBER.start <= STAMP, "every frame has room for its number");
