//! Floods of valid operations: messages, connections, notifications, and GSO frames.

use std::os::fd::AsFd;
use std::time::Duration;

use ring::virtq::Buf;
use switch::vnet::{GSO_TCPV4, NEEDS_CSUM, VnetHdr};
use vhost_user::message::{FrontendReq as R, MemRegion, Message};

use super::memory::send_burst;
use super::wire::{BUFFERS, FEATURES, INDIRECT, RX, Raw, TX, addr, state, whole};
use crate::{Attack, Error};

/// Sends `messages` in turn as fast as they are accepted, reading replies, until time is over.
fn flood(
    attack: &mut Attack<'_>,
    messages: impl Fn(&Raw, u64) -> (R, Vec<u8>, bool),
) -> Result<(), Error> {
    while let Some(raw) = attack.connect_and_start()? {
        let mut n = 0;
        while attack.on() {
            let (request, payload, with_event) = messages(&raw, n);
            let event = raw.event.as_fd();
            let fds = [if request == R::SET_MEM_TABLE { raw.file.as_fd() } else { event }];
            let fds = if with_event { &fds[..] } else { &[] };
            if raw.send(request, payload, false, fds) {
                n += 1;
                attack.tally.attempts += 1;
            } else if raw.is_closed(Duration::from_millis(1)) {
                attack.tally.ended += 1;
                break;
            }
        }
    }
    Ok(())
}

/// SET_VRING_KICK of both rings.
pub fn kicks_set(attack: &mut Attack<'_>) -> Result<(), Error> {
    flood(attack, |_, n| (R::SET_VRING_KICK, (n % 2).to_ne_bytes().to_vec(), true))
}

/// SET_MEM_TABLE, repeatedly.
pub fn tables(attack: &mut Attack<'_>) -> Result<(), Error> {
    let table = MemRegion::table_to_bytes(&[whole()]);
    flood(attack, move |_, _| (R::SET_MEM_TABLE, table.clone(), true))
}

/// SEND_RARP, with a new address each time.
pub fn rarp(attack: &mut Attack<'_>) -> Result<(), Error> {
    flood(attack, |_, n| {
        let mac = 0x0002_u64 | (n & 0xffff_ffff) << 16;
        (R::SEND_RARP, mac.to_ne_bytes().to_vec(), false)
    })
}

/// Rings disabled and enabled.
pub fn toggles(attack: &mut Attack<'_>) -> Result<(), Error> {
    flood(attack, |_, n| (R::SET_VRING_ENABLE, state((n % 2) as u32, (n / 2 % 2) as u32), false))
}

/// Requests whose replies are not read.
pub fn questions(attack: &mut Attack<'_>) -> Result<(), Error> {
    let request_bytes = Message::request(R::GET_FEATURES, Vec::new(), false).to_bytes();
    while let Some(raw) = attack.raw()? {
        while attack.on() {
            match os::send(raw.stream.as_fd(), &request_bytes, &[]) {
                Ok(true) => attack.tally.attempts += 1,
                Ok(false) => attack.rest(Duration::from_millis(1)),
                Err(_) => {
                    attack.tally.ended += 1;
                    break;
                }
            }
        }
    }
    Ok(())
}

/// Connections that close without a message, many at a time.
pub fn connections(attack: &mut Attack<'_>) -> Result<(), Error> {
    let target = attack.target();
    let mut held = Vec::new();
    while let Some(stream) = attack.stream(&target) {
        attack.tally.attempts += 1;
        held.push(stream);
        if held.len() == 64 {
            held.clear();
        }
    }
    Ok(())
}

/// Connections that start rings, break them, and reconnect at once.
pub fn returns(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.connect_and_start()? {
        raw.chain(TX, &[(0x10, 160, INDIRECT)]);
        attack.tally.attempts += 1;
        attack.tally.ended += u64::from(raw.is_closed(Duration::from_millis(10)));
    }
    Ok(())
}

/// Kicks without new buffers.
pub fn notifications(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.connect_and_start()? {
        while attack.on() && !raw.is_closed(Duration::ZERO) {
            (0..1000).for_each(|_| raw.kick());
            attack.tally.attempts += 1000;
        }
    }
    Ok(())
}

/// Writes a broadcast GSO frame of 64-byte segments; returns its length.
fn small_segments(attack: &Attack<'_>, raw: &Raw, len: u32) -> u32 {
    let hdr = VnetHdr {
        flags: NEEDS_CSUM,
        gso_type: GSO_TCPV4,
        hdr_len: 54,
        gso_size: 64,
        csum_start: 34,
        csum_offset: 16,
    };
    raw.frame(BUFFERS, hdr, [0xff; 6], attack.mac);
    raw.write(BUFFERS + 12 + 16, &((len - 14) as u16).to_be_bytes());
    12 + len
}

/// Frames of 64 KiB in segments of 64 bytes, to all ports.
pub fn segments(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.connect_and_start()? {
        let Some(mut driver) = raw.driver(TX) else { continue };
        let len = small_segments(attack, &raw, 65_000);
        let chain = [Buf { addr: BUFFERS, len, write: false }];
        while attack.on() && !raw.is_closed(Duration::ZERO) {
            match send_burst(attack, &raw, &mut driver, &chain, 64) {
                Some(0) => attack.rest(Duration::from_micros(100)),
                Some(_) => {}
                None => break,
            }
        }
    }
    Ok(())
}

/// Rings started and stopped at full speed.
pub fn restarts(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.raw()? {
        if !(raw.negotiate(FEATURES) && raw.share()) {
            attack.tally.turned_away += 1;
            attack.rest(Duration::from_millis(5));
            continue;
        }
        while attack.on() {
            let up = raw.ring(RX) && raw.ring(TX);
            let down = [RX, TX].iter().all(|ring| {
                raw.send(R::GET_VRING_BASE, state(*ring, 0), false, &[]) && raw.reply().is_some()
            });
            attack.tally.attempts += 1;
            if !up || !down {
                attack.tally.ended += 1;
                break;
            }
            // Its size and its addresses change while it runs.
            raw.request(R::SET_VRING_NUM, state(TX, 64), &[]);
            raw.request(R::SET_VRING_ADDR, addr(RX).to_bytes(), &[]);
        }
    }
    Ok(())
}
