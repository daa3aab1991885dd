//! Receivers that are expensive for their senders: few buffers, none, or none that fit.

use std::time::Duration;

use ring::virtq::{Buf, DriverQueue};
use rustix::fs::FallocateFlags;

use super::wire::{BUFFERS, GUEST, LEN, NEXT, RX, Raw, SIZE, TX, WRITE};
use crate::{Attack, Error};

/// Address of the receive buffers, after the transmit buffers.
const RECEIVED: u64 = BUFFERS + 0x10_0000;
/// Bytes of one buffer.
const BUFFER: u32 = 2048;
/// Bytes of all buffers in total: less than a frame of the study.
const SHORT: u16 = 600;

/// A receiver whose address the switch has learned, with its receive queue.
fn receiver(attack: &mut Attack<'_>) -> Result<Option<(Raw, DriverQueue)>, Error> {
    let Some(raw) = attack.connect_and_start()? else { return Ok(None) };
    if let Some(mut tx) = raw.driver(TX) {
        attack.announce(&raw, &mut tx);
    }
    let rx = raw.driver(RX);
    Ok(rx.map(|rx| (raw, rx)))
}

/// Has `post` add buffers every `pause`; counts connections that the switch ended.
fn receive(
    attack: &mut Attack<'_>,
    pause: Duration,
    mut post: impl FnMut(&mut Attack<'_>, &Raw, &mut DriverQueue) -> Result<(), Error>,
) -> Result<(), Error> {
    while let Some((raw, mut rx)) = receiver(attack)? {
        let mut used = Vec::new();
        while attack.on() && !raw.is_closed(Duration::ZERO) {
            post(attack, &raw, &mut rx)?;
            rx.publish();
            raw.kick();
            used.clear();
            if rx.take_used(usize::from(SIZE), &mut used).is_err() {
                break;
            }
            attack.rest(pause);
        }
        attack.tally.ended += u64::from(raw.is_closed(Duration::ZERO));
    }
    Ok(())
}

/// Posts `count` buffers every `pause`.
fn drip(attack: &mut Attack<'_>, count: u64, pause: Duration) -> Result<(), Error> {
    let mut next = 0_u64;
    receive(attack, pause, |attack, _, rx| {
        for _ in 0..count {
            let addr = RECEIVED + next % 256 * u64::from(BUFFER);
            next += 1;
            let posted = rx.add(&[Buf { addr, len: BUFFER, write: true }]).is_some();
            attack.tally.attempts += u64::from(posted);
        }
        Ok(())
    })
}

/// One buffer every 45 ms.
pub fn dripping(attack: &mut Attack<'_>) -> Result<(), Error> {
    drip(attack, 1, Duration::from_millis(45))
}

/// No buffer at all.
pub fn posts_none(attack: &mut Attack<'_>) -> Result<(), Error> {
    drip(attack, 0, Duration::from_millis(20))
}

/// Some thousand buffers a second, a tenth of the frames that arrive.
pub fn slow(attack: &mut Attack<'_>) -> Result<(), Error> {
    drip(attack, 2, Duration::from_millis(1))
}

/// Buffers of 1 to 13 bytes, around the header's length: a frame takes many.
pub fn tiny_buffers(attack: &mut Attack<'_>) -> Result<(), Error> {
    let mut n = 0_u64;
    receive(attack, Duration::from_micros(200), |attack, _, rx| {
        let len = [1, 11, 13, 2, 12][(n % 5) as usize];
        while rx.add(&[Buf { addr: RECEIVED + n % 4096, len, write: true }]).is_some() {
            n += 1;
            attack.tally.attempts += 1;
        }
        Ok(())
    })
}

/// Buffers of 127 one-byte pieces on distinct pages of a file, and one long one; the pages are
/// hole-punched repeatedly, so that each piece of a frame is a page fault of the switch.
pub fn punched(attack: &mut Attack<'_>) -> Result<(), Error> {
    const PIECES: u64 = 127;
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    let piece = |i: u64| Buf { addr: RECEIVED + i * 4096, len: 1, write: true };
    let mut bufs: Vec<_> = (0..PIECES).map(piece).collect();
    bufs.push(Buf { addr: RECEIVED + PIECES * 4096, len: BUFFER, write: true });
    receive(attack, Duration::from_micros(100), |attack, raw, rx| {
        rustix::fs::fallocate(&raw.file, punch, RECEIVED - GUEST, (PIECES + 1) * 4096)?;
        while rx.add(&bufs).is_some() {
            attack.tally.attempts += 1;
        }
        Ok(())
    })
}

/// An indirect table of `n` buffers of `len` bytes at `at`.
fn table(raw: &Raw, at: u64, n: u16, len: u32, write: u16) {
    let area = raw.area(at, 16 * usize::from(n));
    for i in 0..n {
        let here = 16 * usize::from(i);
        let flags = write | if !raw.packed && i + 1 < n { NEXT } else { 0 };
        let (third, fourth) = if raw.packed { (i, flags) } else { (flags, i + 1) };
        area.store_u64(here, RECEIVED);
        area.store_u32(here + 8, len);
        area.store_u16(here + 12, third);
        area.store_u16(here + 14, fourth);
    }
}

/// Chains of nearly twice the ring's size: direct descriptors, then an indirect table as long as
/// the ring, on `ring`.
fn long_chains(attack: &mut Attack<'_>, ring: u32) -> Result<(), Error> {
    let tables = GUEST + LEN - 0x2_0000;
    while let Some((raw, _)) = receiver(attack)? {
        let write = if ring == RX { WRITE } else { 0 };
        // All receive buffers in total are shorter than a frame.
        let len = |i: u16| u32::from(ring == TX || i < SHORT);
        table(&raw, tables, SIZE, len(SIZE), write);
        let direct = SIZE - 1;
        for round in 0_u16.. {
            for i in 0..direct {
                let last = if raw.packed { i } else { i + 1 };
                raw.describe(ring, i, RECEIVED, len(i), write | NEXT, last);
            }
            let bytes = 16 * u32::from(SIZE);
            raw.describe(ring, direct, tables, bytes, super::wire::INDIRECT, direct);
            if raw.packed && round > 0 {
                break;
            }
            raw.offer(ring, round.wrapping_add(1));
            attack.tally.attempts += 1;
            attack.rest(Duration::from_micros(200));
            if !attack.on() || raw.is_closed(Duration::ZERO) {
                break;
            }
        }
        attack.rest(Duration::from_millis(5));
        attack.tally.ended += u64::from(raw.is_closed(Duration::ZERO));
    }
    Ok(())
}

/// Such chains on the tx ring.
pub fn long_sent(attack: &mut Attack<'_>) -> Result<(), Error> {
    long_chains(attack, TX)
}

/// Such chains on the rx ring, too small for any frame.
pub fn never_fit(attack: &mut Attack<'_>) -> Result<(), Error> {
    long_chains(attack, RX)
}
