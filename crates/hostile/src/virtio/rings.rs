//! Invalid rings, and invalid frames.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ring::virtq::Buf;
use switch::vnet::{GSO_ECN, GSO_TCPV4, NEEDS_CSUM, VnetHdr};

use super::memory::send_chains;
use super::wire::{
    AVAIL, BUFFERS, GUEST, INDIRECT, LEN, NEXT, RX, Raw, SIZE, TX, USED, WRITE, layout,
};
use crate::{Attack, Error};

/// An indirect table at its usual place.
const TABLE: u64 = BUFFERS + 0x8_0000;

fn entry(raw: &Raw, i: u16, addr: u64, len: u32, flags: u16) {
    let area = raw.area(TABLE, 16 * usize::from(SIZE));
    let at = 16 * usize::from(i);
    let (third, fourth) = if raw.packed { (i, flags) } else { (flags, i + 1) };
    area.store_u64(at, addr);
    area.store_u32(at + 8, len);
    area.store_u16(at + 12, third);
    area.store_u16(at + 14, fourth);
}

/// Chains with loops.
pub fn loops(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.break_rings(&[
        |raw| {
            raw.describe(TX, 0, BUFFERS, 100, NEXT, 0);
            raw.offer(TX, 1);
        },
        |raw| {
            raw.describe(TX, 1, BUFFERS, 0, NEXT, 0);
            raw.describe(TX, 0, BUFFERS, 0, NEXT, 1);
            raw.offer(TX, 1);
        },
        |raw| {
            (0..SIZE).for_each(|i| raw.describe(TX, i, BUFFERS, 1, NEXT, (i + 1) % SIZE));
            raw.offer(TX, 1);
        },
        |raw| {
            (0..SIZE).for_each(|i| raw.describe(RX, i, BUFFERS, 1, NEXT | WRITE, (i + 1) % SIZE));
            raw.offer(RX, 1);
        },
    ])
}

/// Descriptors, heads and tables out of range.
pub fn outside(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.break_rings(&[
        |raw| {
            raw.describe(TX, 0, BUFFERS, 100, NEXT, SIZE);
            raw.offer(TX, 1);
        },
        |raw| {
            raw.describe(TX, 0, BUFFERS, 100, NEXT, 0xffff);
            raw.offer(TX, 1);
        },
        |raw| {
            let avail = raw.area(layout(TX).driver, 8);
            avail.store_u16(4, SIZE);
            raw.describe(TX, 0, BUFFERS, 72, 0, SIZE);
            raw.offer(TX, 1);
        },
        |raw| raw.chain(TX, &[(0x10, 160, INDIRECT)]),
        |raw| raw.chain(TX, &[(GUEST + LEN - 16, 160, INDIRECT)]),
        |raw| raw.chain(TX, &[(u64::MAX - 15, 160, INDIRECT)]),
        |raw| raw.chain(TX, &[(GUEST + LEN - 8, 100, 0)]),
        |raw| raw.chain(TX, &[(u64::MAX - 8, u32::MAX, 0)]),
    ])
}

/// Illegal indirect tables: nested, of invalid lengths, inside a chain.
pub fn indirect(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.break_rings(&[
        |raw| raw.chain(TX, &[(TABLE, 24, INDIRECT)]),
        |raw| raw.chain(TX, &[(TABLE, 0, INDIRECT)]),
        |raw| raw.chain(TX, &[(TABLE, !15, INDIRECT)]),
        |raw| {
            entry(raw, 0, TABLE, 16, INDIRECT);
            raw.chain(TX, &[(TABLE, 16, INDIRECT)]);
        },
        |raw| {
            entry(raw, 0, BUFFERS, 72, NEXT | INDIRECT);
            entry(raw, 1, TABLE, 32, INDIRECT);
            raw.chain(TX, &[(TABLE, 32, INDIRECT)]);
        },
        |raw| raw.chain(TX, &[(TABLE, 32, INDIRECT | NEXT), (BUFFERS, 72, 0)]),
        |raw| raw.chain(TX, &[(TABLE, 32, INDIRECT | WRITE)]),
        // The table overlaps the ring's own descriptors.
        |raw| raw.chain(TX, &[(layout(TX).desc, 16, INDIRECT)]),
    ])
}

/// Indices that jump forward and back.
pub fn index_jumps(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.break_rings(&[
        |raw| raw.offer(TX, 30_000),
        |raw| raw.offer(TX, SIZE + 1),
        |raw| raw.offer(TX, 0xffff),
        |raw| raw.offer(RX, 30_000),
        |raw| {
            raw.chain(TX, &[(BUFFERS, 72, 0)]);
            raw.offer(TX, 5);
            raw.offer(TX, 2);
        },
    ])
}

/// Writable descriptors on the tx ring, readable ones on the rx ring.
pub fn directions(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.break_rings(&[
        |raw| raw.chain(TX, &[(BUFFERS, 72, WRITE)]),
        |raw| raw.chain(TX, &[(BUFFERS, 40, WRITE | NEXT), (BUFFERS, 40, 0)]),
        |raw| raw.chain(RX, &[(BUFFERS, 2048, 0)]),
        |raw| raw.chain(RX, &[(BUFFERS, 40, WRITE | NEXT), (BUFFERS, 2048, 0)]),
        |raw| raw.chain(TX, &[(BUFFERS, 72, 0xffff)]),
    ])
}

/// Invalid ids and wrap bits on a packed ring.
pub fn wraps(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.break_rings(&[
        // An id that no buffer has.
        |raw| {
            raw.describe(TX, 0, BUFFERS, 72, 0, 0xffff);
            raw.kick();
        },
        |raw| {
            (0..8).for_each(|i| raw.describe(TX, 7 - i, BUFFERS, 72, 0, SIZE + i));
            raw.kick();
        },
        // The same id repeatedly.
        |raw| {
            (0..SIZE).rev().for_each(|i| raw.describe(TX, i, BUFFERS, 72, 0, 7));
            raw.kick();
        },
        // Available in this lap and in the next, already used, both, neither.
        |raw| {
            for flags in [AVAIL | USED, USED, 0, AVAIL] {
                raw.describe(TX, 0, BUFFERS, 72, flags ^ AVAIL, 0);
                raw.describe(TX, 1, BUFFERS, 72, flags ^ AVAIL, 1);
                raw.kick();
            }
        },
        // A chain across the ring's end that never ends.
        |raw| {
            (0..SIZE).rev().for_each(|i| raw.describe(TX, i, BUFFERS, 1, NEXT, i));
            raw.kick();
        },
        // Invalid event suppression.
        |raw| {
            for at in [layout(TX).driver, layout(RX).driver] {
                raw.area(at, 4).store_u32(0, u32::MAX);
            }
            raw.chain(TX, &[(BUFFERS, 72, 0)]);
        },
    ])
}

/// A frame to send: its header, and the pieces it is split into.
struct Sent {
    hdr: VnetHdr,
    pieces: &'static [u32],
}

/// Sends invalid frames on one connection.
fn send_each(attack: &mut Attack<'_>, frames: &[Sent]) -> Result<(), Error> {
    while let Some(raw) = attack.connect_and_start()? {
        let Some(mut driver) = raw.driver(TX) else { continue };
        let mut used = Vec::new();
        for (n, sent) in frames.iter().cycle().enumerate() {
            let at = BUFFERS + (n % 64) as u64 * 0x1000;
            raw.frame(at, sent.hdr, attack.peer, attack.mac);
            let mut from = at;
            let pieces = sent.pieces.iter().map(|len| {
                let piece = Buf { addr: from, len: *len, write: false };
                from += u64::from(*len);
                piece
            });
            let bufs: Vec<Buf> = pieces.collect();
            if driver.add(&bufs).is_some() {
                attack.tally.attempts += 1;
            } else {
                attack.rest(Duration::from_micros(100));
            }
            driver.publish();
            raw.kick();
            used.clear();
            if driver.take_used(usize::from(SIZE), &mut used).is_err() {
                break;
            }
            if n % 64 == 0 && (!attack.on() || raw.is_closed(Duration::ZERO)) {
                break;
            }
        }
    }
    Ok(())
}

const CSUM: VnetHdr =
    VnetHdr { flags: NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..VnetHdr::NONE };
const GSO: VnetHdr = VnetHdr { gso_type: GSO_TCPV4, gso_size: 1000, ..CSUM };

/// Valid frames as fast as the ring takes them, as an honest guest may send: a control for the
/// cases below.
pub fn flooding(attack: &mut Attack<'_>) -> Result<(), Error> {
    send_each(attack, &[Sent { hdr: VnetHdr::NONE, pieces: &[72] }])
}

/// Checksum offsets outside the frame.
pub fn checksums(attack: &mut Attack<'_>) -> Result<(), Error> {
    let hdr = |csum_start, csum_offset| Sent {
        hdr: VnetHdr { csum_start, csum_offset, ..CSUM },
        pieces: &[72],
    };
    let frames = [hdr(0xffff, 0), hdr(50, 40), hdr(0xfff0, 0x20), hdr(59, 0), hdr(0, 0xffff)];
    send_each(attack, &frames)
}

/// Invalid offloads: GSO size 0, unknown types, no checksum, wrong lengths.
pub fn offloads(attack: &mut Attack<'_>) -> Result<(), Error> {
    let sent = |hdr| Sent { hdr, pieces: &[72] };
    let frames = [
        sent(VnetHdr { gso_size: 0, ..GSO }),
        sent(VnetHdr { gso_size: 1, ..GSO }),
        sent(VnetHdr { gso_type: 0x7f, ..GSO }),
        sent(VnetHdr { gso_type: GSO_TCPV4 | GSO_ECN | 0x60, ..GSO }),
        sent(VnetHdr { flags: 0, ..GSO }),
        sent(VnetHdr { flags: 0xff, ..GSO }),
        sent(VnetHdr { hdr_len: 0xffff, ..GSO }),
        sent(VnetHdr { hdr_len: 1, csum_start: 60, ..GSO }),
    ];
    send_each(attack, &frames)
}

/// Headers split over many descriptors, chains that are too short, and empty pieces.
pub fn short_pieces(attack: &mut Attack<'_>) -> Result<(), Error> {
    let sent = |pieces| Sent { hdr: VnetHdr::NONE, pieces };
    let frames = [
        sent(&[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 60]),
        sent(&[5, 5, 1, 61]),
        sent(&[12, 60]),
        sent(&[11]),
        sent(&[1]),
        sent(&[25]),
        sent(&[12, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 46]),
        sent(&[0]),
        sent(&[0, 0, 0, 0]),
        sent(&[12, 0, 0, 60, 0]),
    ];
    send_each(attack, &frames)
}

/// Chains of as many one-byte pieces as are legal.
pub fn many_pieces(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.connect_and_start()? {
        let Some(mut driver) = raw.driver(TX) else { continue };
        raw.frame(BUFFERS, VnetHdr::NONE, attack.peer, attack.mac);
        let bufs = vec![Buf { addr: BUFFERS, len: 1, write: false }; usize::from(SIZE) - 1];
        send_chains(attack, &raw, &mut driver, &bufs);
    }
    Ok(())
}

/// A thread rewrites descriptors, indices and frames while they are used.
pub fn rewritten(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.connect_and_start()? {
        let over = AtomicBool::new(false);
        let mut attempts = 0;
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut n = 0_u64;
                while !over.load(Ordering::Relaxed) {
                    n = n
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963);
                    let [a, b, c, d] = [n >> 17, n >> 29, n >> 41, n >> 52];
                    let i = (a % 8) as u16;
                    let ring = (b & 1) as u32;
                    let flags = [0, NEXT, WRITE, INDIRECT][(c % 4) as usize];
                    raw.describe(ring, i, BUFFERS + d, (n >> 33 & 0xff) as u32, flags, i);
                    raw.write(BUFFERS, &n.to_ne_bytes());
                }
                n
            });
            let mut idx = 0_u16;
            while attack.on() && !raw.is_closed(Duration::ZERO) {
                idx = idx.wrapping_add(1);
                raw.offer(TX, idx);
                raw.offer(RX, idx);
                attempts += 1;
            }
            over.store(true, Ordering::Relaxed);
            let _ = writer.join();
        });
        attack.tally.attempts += attempts;
        attack.tally.ended += u64::from(raw.is_closed(Duration::ZERO));
    }
    Ok(())
}
