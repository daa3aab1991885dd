//! Malformed messages, and messages in the wrong state.

use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use vhost_user::feature;
use vhost_user::message::{FrontendReq as R, MemRegion, Message};

use super::wire::{BUFFERS, FEATURES, GUEST, RX, Raw, SIZE, TX, USER, memfd, state, whole};
use crate::{Attack, Error};

/// Wait for the switch to end the connection.
const SEE: Duration = Duration::from_millis(10);
/// Boundary values.
const BORDERS: [u64; 10] = [
    0,
    1,
    0x100,
    0x1_0000,
    0x7fff_ffff,
    0x8000_0000,
    u32::MAX as u64,
    1 << 40,
    u64::MAX - 1,
    u64::MAX,
];

/// Malformed messages: sizes, versions, replies, noise.
pub fn garbage(attack: &mut Attack<'_>) -> Result<(), Error> {
    let words = |words: [u32; 3]| words.map(u32::to_ne_bytes).concat();
    let garbage = [
        vec![0xff; 64],
        vec![0; 64],
        words([1, 1, u32::MAX]),
        words([1, 1, 4097]),
        words([1, 1, 0x8000_0000]),
        words([1, 0, 0]),
        words([1, 2, 0]),
        words([1, 3, 0]),
        words([1, 5, 0]),
        words([1, 0xffff_fff9, 0]),
        words([0, 1, 0]),
        words([u32::MAX, 1, 0]),
        // Half a header, half a payload.
        vec![1, 0, 0, 0, 1],
        [words([5, 9, 40]), vec![0; 8]].concat(),
    ];
    for bytes in garbage.iter().cycle() {
        let Some(raw) = attack.raw()? else { return Ok(()) };
        let _ = os::send(raw.stream.as_fd(), bytes, &[]);
        attack.tally.attempts += 1;
        attack.tally.ended += u64::from(raw.is_closed(SEE));
    }
    Ok(())
}

/// A payload of `n` bytes that repeats a boundary value.
fn payload(n: usize, border: u64) -> Vec<u8> {
    border.to_ne_bytes().into_iter().cycle().take(n).collect()
}

/// Advances a connection to `state`: no message, negotiated, memory shared, rings running.
fn advance_to(raw: &Raw, state: usize) -> bool {
    (state < 1 || raw.negotiate(FEATURES))
        && (state < 2 || raw.share())
        && (state < 3 || raw.ring(RX) && raw.ring(TX))
}

/// Every request in every state, with payloads of all lengths and with boundary values.
pub fn every_message(attack: &mut Attack<'_>) -> Result<(), Error> {
    let lengths = [0, 4, 8, 12, 16, 24, 40, 56, 264, 4096];
    let file = memfd(4096)?;
    let mut n = 0_usize;
    loop {
        let Some(raw) = attack.raw()? else { return Ok(()) };
        if !advance_to(&raw, n % 4) {
            attack.tally.turned_away += 1;
            attack.rest(Duration::from_millis(1));
        }
        // Until the connection is ended, 64 more.
        for _ in 0..64 {
            n += 1;
            let request = (n * 7 % 48) as u32;
            let payload = payload(lengths[n * 3 % lengths.len()], BORDERS[n % BORDERS.len()]);
            let message = Message::request(request, payload, n.is_multiple_of(3)).to_bytes();
            let fds = [file.as_fd(), raw.event.as_fd()];
            let fds = &fds[..n % 3];
            if os::send(raw.stream.as_fd(), &message, fds).is_err() {
                break;
            }
            attack.tally.attempts += 1;
        }
        attack.tally.ended += u64::from(raw.is_closed(SEE));
    }
}

/// A message, then the end of the connection inside the next one.
pub fn half_messages(attack: &mut Attack<'_>) -> Result<(), Error> {
    let table = MemRegion::table_to_bytes(&[whole()]);
    let message = Message::request(R::SET_MEM_TABLE, table, true).to_bytes();
    for len in (1..message.len()).cycle() {
        let Some(raw) = attack.raw()? else { return Ok(()) };
        let up = len % 2 == 0 && advance_to(&raw, 3);
        let _ = os::send(raw.stream.as_fd(), &message[..len], &[raw.file.as_fd()]);
        attack.tally.attempts += 1;
        if up {
            raw.chain(TX, &[(BUFFERS, 72, 0)]);
        }
    }
    Ok(())
}

/// Invalid ring sizes and bases.
pub fn bad_sizes(attack: &mut Attack<'_>) -> Result<(), Error> {
    'connection: while let Some(raw) = attack.raw()? {
        if !advance_to(&raw, 2) {
            attack.tally.turned_away += 1;
            continue;
        }
        for size in [0, 3, 100, 65_535, 65_536, u32::MAX] {
            if !attack.count_reply(raw.request(R::SET_VRING_NUM, state(TX, size), &[])) {
                continue 'connection;
            }
        }
        for base in [u32::from(SIZE), 0xffff, 0x8000, 0x7fff_8000, u32::MAX] {
            let number = u64::from(TX).to_ne_bytes().to_vec();
            let continues =
                attack.count_reply(raw.request(R::SET_VRING_BASE, state(TX, base), &[]))
                    && attack.count_reply(raw.request(
                        R::SET_VRING_KICK,
                        number,
                        &[raw.event.as_fd()],
                    ));
            if !continues {
                continue 'connection;
            }
        }
    }
    Ok(())
}

/// Ring numbers that are valid only when truncated to 8 or 16 bits.
pub fn no_such_rings(attack: &mut Attack<'_>) -> Result<(), Error> {
    'connection: while let Some(raw) = attack.raw()? {
        if !advance_to(&raw, 3) {
            attack.tally.turned_away += 1;
            continue;
        }
        for index in [2, 77, 0x100, 0x101, 0x8000, 0x1_0001, u32::MAX] {
            let number = u64::from(index).to_ne_bytes().to_vec();
            for request in [R::SET_VRING_NUM, R::SET_VRING_BASE, R::SET_VRING_ENABLE] {
                if !attack.count_reply(raw.request(request, state(index, 1), &[])) {
                    continue 'connection;
                }
            }
            for request in [R::SET_VRING_CALL, R::SET_VRING_KICK, R::SET_VRING_ERR] {
                let fds = [raw.event.as_fd()];
                if !attack.count_reply(raw.request(request, number.clone(), &fds)) {
                    continue 'connection;
                }
            }
        }
    }
    Ok(())
}

/// Dirty logs of extreme sizes and offsets, then many that are valid, each truncated in use.
pub fn dirty_log(attack: &mut Attack<'_>) -> Result<(), Error> {
    // Enough for 32 GiB.
    const LEN: u64 = 1 << 20;
    let small = memfd(4096)?;
    'connection: while let Some(raw) = attack.raw()? {
        if !advance_to(&raw, 3) {
            attack.tally.turned_away += 1;
            continue;
        }
        let set = |size: u64, offset: u64, file: &File| {
            let payload = [size.to_ne_bytes(), offset.to_ne_bytes()].concat();
            raw.request(R::SET_LOG_BASE, payload, &[file.as_fd()])
        };
        for (size, offset) in [(4096, u64::MAX - 4095), (u64::MAX, 4096), (1 << 62, 1 << 62)] {
            if !attack.count_reply(set(size, offset, &small)) {
                continue 'connection;
            }
        }
        let packed = if raw.packed { feature::RING_PACKED } else { 0 };
        let bits = (FEATURES | feature::LOG_ALL | packed).to_ne_bytes().to_vec();
        if !attack.count_reply(raw.request(R::SET_FEATURES, bits, &[])) {
            continue 'connection;
        }
        for _ in 0..16 {
            let log = memfd(LEN)?;
            if !attack.count_reply(set(LEN, 0, &log)) {
                continue 'connection;
            }
            raw.chain(TX, &[(BUFFERS, 72, 0)]);
            let _ = log.set_len(0);
            raw.kick();
        }
    }
    Ok(())
}

/// In-flight regions, repeatedly.
pub fn in_flight(attack: &mut Attack<'_>) -> Result<(), Error> {
    let file = memfd(1 << 20)?;
    'connection: while let Some(raw) = attack.raw()? {
        if !advance_to(&raw, 1) {
            attack.tally.turned_away += 1;
            continue;
        }
        for n in 0..64_u64 {
            // mmap_size, mmap_offset, num_queues and queue_size.
            let queues = [0xffff_u16.to_ne_bytes(), 0xffff_u16.to_ne_bytes(), [0; 2], [0; 2]];
            let size = BORDERS[n as usize % BORDERS.len()];
            let payload = [&size.to_ne_bytes()[..], &n.to_ne_bytes(), &queues.concat()].concat();
            let fds = [file.as_fd()];
            let continues =
                attack.count_reply(raw.request(R::GET_INFLIGHT_FD, payload.clone(), &[]))
                    && attack.count_reply(raw.request(R::SET_INFLIGHT_FD, payload, &fds));
            if !continues {
                continue 'connection;
            }
        }
    }
    Ok(())
}

/// Sessions of a crypto device, which this back-end is not.
pub fn crypto(attack: &mut Attack<'_>) -> Result<(), Error> {
    'connection: while let Some(raw) = attack.raw()? {
        if !advance_to(&raw, 3) {
            attack.tally.turned_away += 1;
            continue;
        }
        for n in 0..16 {
            for request in [R::CREATE_CRYPTO_SESSION, R::CLOSE_CRYPTO_SESSION] {
                let payload = payload(8 << (n % 9), BORDERS[n % BORDERS.len()]);
                if !attack.count_reply(raw.request(request, payload, &[])) {
                    continue 'connection;
                }
            }
        }
    }
    Ok(())
}

/// The size of a ring changed while it runs, and its memory removed.
pub fn changed_while_running(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.connect_and_start()? {
        let region = MemRegion { guest_addr: GUEST, size: 4096, user_addr: USER, mmap_offset: 0 };
        let file = memfd(4096)?;
        let table = MemRegion::table_to_bytes(&[region]);
        raw.chain(TX, &[(BUFFERS, 72, 0)]);
        for size in [2_u32, 32_768, 256] {
            attack.count_reply(raw.request(R::SET_VRING_NUM, state(TX, size), &[]));
            raw.kick();
        }
        attack.count_reply(raw.request(R::SET_FEATURES, FEATURES.to_ne_bytes().to_vec(), &[]));
        attack.count_reply(raw.request(R::SET_MEM_TABLE, table, &[file.as_fd()]));
        attack.count_reply(raw.request(R::REM_MEM_REG, region.to_single_bytes(), &[]));
        raw.kick();
        attack.tally.ended += u64::from(raw.is_closed(SEE));
    }
    Ok(())
}
