//! Memory that contradicts its table, that is truncated, or that is expensive to serve.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ring::virtq::Buf;
use rustix::fs::FallocateFlags;
use switch::vnet::VnetHdr;
use vhost_user::message::{FrontendReq as R, MemRegion};

use super::wire::{
    BUFFERS, FEATURES, GUEST, LEN, RX, Raw, SIZE, TX, USER, WRITE, addr, memfd, state, whole,
};
use crate::{Attack, Error};

/// Regions that a connection may add beside the one of its rings.
const REGIONS: u64 = 508;
/// Bytes of each added region.
const SMALL: u64 = 4096;
/// Length that a region may claim: more than any guest has.
const HUGE: u64 = 16 << 40;
/// Pieces of an expensive frame, each on its own page.
const PIECES: u64 = 128;
/// Memory size of a normal guest.
const LEAST: u64 = 1 << 30;

/// Adds adjacent regions of one file after the memory; returns how many the switch accepted.
fn add_regions(raw: &Raw, file: &File) -> u64 {
    (0..REGIONS)
        .take_while(|i| {
            let region = MemRegion {
                guest_addr: GUEST + LEN + i * SMALL,
                size: SMALL,
                user_addr: USER + LEN + i * SMALL,
                mmap_offset: i * SMALL,
            };
            let payload = region.to_single_bytes();
            raw.request(R::ADD_MEM_REG, payload, &[file.as_fd()]) == Some(true)
        })
        .count() as u64
}

/// Shares as many regions as are accepted on every port, then truncates one file and uses its ring.
pub fn many_regions(attack: &mut Attack<'_>) -> Result<(), Error> {
    while attack.on() {
        let mut held = Vec::new();
        for target in attack.targets.clone() {
            let Some(raw) = attack.raw_at(&target)? else { break };
            if !attack.on() {
                break;
            }
            if raw.negotiate(FEATURES) && raw.share() {
                let file = memfd(REGIONS * SMALL)?;
                attack.tally.attempts += add_regions(&raw, &file);
                raw.ring(RX);
                raw.ring(TX);
                held.push((raw, file));
            } else {
                attack.tally.turned_away += 1;
            }
        }
        for (raw, _) in &held {
            raw.chain(TX, &[(BUFFERS, 72, 0)]);
            raw.file.set_len(0)?;
            raw.kick();
        }
        attack.rest(Duration::from_millis(50));
        let closed = held.iter().filter(|(raw, _)| raw.is_closed(Duration::ZERO));
        attack.tally.ended += closed.count() as u64;
    }
    Ok(())
}

/// Chains whose buffers each span all of 508 adjacent regions.
pub fn spanning_chains(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.connect_and_start()? {
        let from = Instant::now();
        let file = memfd(REGIONS * SMALL)?;
        let added = add_regions(&raw, &file);
        attack.exclude_setup(from);
        let len = (added * SMALL) as u32;
        let Some(mut driver) = raw.driver(TX).filter(|_| added > 0) else { continue };
        raw.frame(BUFFERS, VnetHdr::NONE, attack.peer, attack.mac);
        let mut bufs = vec![Buf { addr: BUFFERS, len: 72, write: false }];
        bufs.resize(usize::from(SIZE) / 2, Buf { addr: GUEST + LEN, len, write: false });
        send_chains(attack, &raw, &mut driver, &bufs);
    }
    Ok(())
}

/// Sends a chain repeatedly.
pub fn send_chains(
    attack: &mut Attack<'_>,
    raw: &Raw,
    driver: &mut ring::virtq::DriverQueue,
    bufs: &[Buf],
) {
    while attack.on() && !raw.is_closed(Duration::ZERO) {
        match send_burst(attack, raw, driver, bufs, usize::MAX) {
            Some(0) => attack.rest(Duration::from_micros(100)),
            Some(_) => {}
            None => return,
        }
    }
}

/// Sends a chain while the ring has room, up to `most` times, and takes used ones back; returns how
/// often. `None`: the ring is broken.
pub fn send_burst(
    attack: &mut Attack<'_>,
    raw: &Raw,
    driver: &mut ring::virtq::DriverQueue,
    bufs: &[Buf],
    most: usize,
) -> Option<usize> {
    let mut sent = 0;
    while sent < most && driver.add(bufs).is_some() {
        sent += 1;
    }
    driver.publish();
    raw.kick();
    attack.tally.attempts += sent as u64;
    driver.take_used(usize::from(SIZE), &mut Vec::new()).is_ok().then_some(sent)
}

/// Terabytes of a sparse file, on every port.
pub fn sparse(attack: &mut Attack<'_>) -> Result<(), Error> {
    while attack.on() {
        let mut held = Vec::new();
        for target in attack.targets.clone() {
            let Some(raw) = attack.raw_at(&target)? else { break };
            let file = memfd(0)?;
            // The rest of the address space is used up in smaller pieces.
            let mut size = HUGE;
            let negotiated = raw.negotiate(FEATURES);
            while negotiated && size >= LEAST && attack.on() {
                let region = MemRegion { guest_addr: 0, size, user_addr: 0, mmap_offset: 0 };
                let table = MemRegion::table_to_bytes(&[region]);
                // A file system's limit may be lower.
                let granted = file.set_len(size).is_ok().then(|| {
                    let answer = raw.request(R::SET_MEM_TABLE, table, &[file.as_fd()]);
                    attack.count_reply(answer);
                    answer
                });
                if matches!(granted, Some(Some(true) | None)) {
                    break;
                }
                size /= 2;
            }
            held.push(raw);
        }
        attack.rest(Duration::from_millis(100));
    }
    Ok(())
}

/// Frames of 128 one-byte pieces on distinct pages of a file, which are hole-punched repeatedly.
pub fn punched(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.connect_and_start()? {
        let Some(mut driver) = raw.driver(TX) else { continue };
        raw.frame(BUFFERS, VnetHdr::NONE, attack.peer, attack.mac);
        let piece = |i: u64| Buf { addr: BUFFERS + i * 4096, len: 1, write: false };
        let mut bufs = vec![Buf { addr: BUFFERS, len: 72, write: false }];
        bufs.extend((1..PIECES).map(piece));
        while attack.on() && !raw.is_closed(Duration::ZERO) {
            punch(&raw, PIECES)?;
            if send_burst(attack, &raw, &mut driver, &bufs, usize::MAX).is_none() {
                break;
            }
        }
    }
    Ok(())
}

/// Hole-punching as in [`punched`], without a frame or a kick: it costs the switch nothing, and is
/// a control for what [`punched`] costs others that share its CPU.
pub fn punching(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.connect_and_start()? {
        while attack.on() && !raw.is_closed(Duration::ZERO) {
            punch(&raw, PIECES)?;
            attack.tally.attempts += 1;
        }
    }
    Ok(())
}

/// Punches a hole where the buffers are, except in their first page.
fn punch(raw: &Raw, pages: u64) -> Result<(), Error> {
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(&raw.file, how, BUFFERS - GUEST + 4096, pages * 4096)?)
}

/// The receive buffers' file is truncated while the transmit ring is idle: frames are lost.
pub fn truncated_receive(attack: &mut Attack<'_>) -> Result<(), Error> {
    let len = 1_u64 << 30;
    while let Some(raw) = attack.connect_and_start()? {
        let file = memfd(len)?;
        let at = GUEST + LEN;
        let region = MemRegion { guest_addr: at, size: len, user_addr: USER + LEN, mmap_offset: 0 };
        raw.request(R::ADD_MEM_REG, region.to_single_bytes(), &[file.as_fd()]);
        let (Some(mut rx), Some(mut tx)) = (raw.driver(RX), raw.driver(TX)) else { continue };
        attack.announce(&raw, &mut tx);
        attack.rest(Duration::from_millis(20));
        file.set_len(0)?;
        let (mut used, mut next) = (Vec::new(), 0);
        while attack.on() && !raw.is_closed(Duration::ZERO) {
            while rx
                .add(&[Buf { addr: at + next % (len - 4096), len: 2048, write: true }])
                .is_some()
            {
                next += 4096;
                attack.tally.attempts += 1;
            }
            // Without a kick: nothing wakes the tx ring, whose turn would detect the loss.
            rx.publish();
            used.clear();
            if rx.take_used(usize::from(SIZE), &mut used).is_err() {
                break;
            }
            attack.rest(Duration::from_millis(1));
        }
        attack.tally.ended += u64::from(raw.is_closed(Duration::ZERO));
    }
    Ok(())
}

/// Memory truncated while rings run.
pub fn truncated(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.connect_and_start()? {
        raw.chain(TX, &[(BUFFERS, 100, 0)]);
        raw.file.set_len(0)?;
        raw.kick();
        attack.tally.attempts += 1;
        attack.tally.ended += u64::from(raw.is_closed(Duration::from_millis(50)));
    }
    Ok(())
}

/// Tables swapped while one thread truncates and restores their files, and rings are in use.
pub fn races(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.connect_and_start()? {
        let over = AtomicBool::new(false);
        let mut others = Vec::new();
        for target in attack.targets.clone().iter().skip(1) {
            others.extend(attack.raw_at(target)?);
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let _ = raw.file.set_len(0);
                    let _ = raw.file.set_len(LEN);
                    raw.kick();
                }
            });
            let table = MemRegion::table_to_bytes(&[whole()]);
            while attack.on() {
                for other in &others {
                    let fds = [other.file.as_fd()];
                    other.send(R::SET_MEM_TABLE, table.clone(), false, &fds);
                }
                let fds = [raw.file.as_fd()];
                if !attack.count_reply(raw.request(R::SET_MEM_TABLE, table.clone(), &fds)) {
                    break;
                }
            }
            over.store(true, Ordering::Relaxed);
        });
    }
    Ok(())
}

/// A frame across two regions that are far apart in the file.
pub fn across_regions(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.raw()? {
        let half = LEN / 2;
        let part = |i: u64, offset| MemRegion {
            guest_addr: GUEST + i * half,
            size: half,
            user_addr: USER + i * half,
            mmap_offset: offset,
        };
        // The second half maps the first one again, so that a linear read past the border is
        // visible.
        let table = MemRegion::table_to_bytes(&[part(0, 0), part(1, 0)]);
        let fds = [raw.file.as_fd(), raw.file.as_fd()];
        let up = raw.negotiate(FEATURES)
            && raw.request(R::SET_MEM_TABLE, table, &fds) == Some(true)
            && raw.ring(RX)
            && raw.ring(TX);
        let Some(mut driver) = raw.driver(TX).filter(|_| up) else {
            attack.tally.turned_away += 1;
            attack.rest(Duration::from_millis(5));
            continue;
        };
        let border = GUEST + half - 8;
        raw.frame(border, VnetHdr::NONE, attack.peer, attack.mac);
        let ends = [border, GUEST + LEN - 8, u64::MAX - 8, GUEST - 8];
        for addr in ends.into_iter().cycle() {
            driver.add(&[Buf { addr, len: 72, write: false }]);
            driver.publish();
            raw.kick();
            attack.tally.attempts += 1;
            let mut used = Vec::new();
            let broken = driver.take_used(usize::from(SIZE), &mut used).is_err();
            if broken || !attack.on() || raw.is_closed(Duration::ZERO) {
                break;
            }
        }
    }
    Ok(())
}

/// Invalid memory tables: sizes, offsets and numbers of regions.
pub fn bad_tables(attack: &mut Attack<'_>) -> Result<(), Error> {
    let w = whole();
    let region = |guest_addr, size, user_addr, mmap_offset| MemRegion {
        guest_addr,
        size,
        user_addr,
        mmap_offset,
    };
    let tables: [Vec<MemRegion>; 9] = [
        Vec::new(),
        vec![region(GUEST, 0, USER, 0)],
        vec![region(GUEST, u64::MAX, USER, 0)],
        vec![region(u64::MAX - 4095, 8192, USER, 0)],
        vec![region(GUEST, LEN, u64::MAX - 4095, 0)],
        vec![region(GUEST, LEN, USER, u64::MAX - 4095)],
        vec![region(GUEST, LEN, USER, 1)],
        vec![w, region(GUEST + 4096, LEN, USER + (1 << 40), 0)],
        vec![w, region(GUEST + (1 << 40), LEN, USER + 4096, 0)],
    ];
    'connection: while let Some(raw) = attack.raw()? {
        if !raw.negotiate(FEATURES) {
            attack.tally.turned_away += 1;
            continue;
        }
        for table in &tables {
            let fds = vec![raw.file.as_fd(); table.len()];
            let payload = MemRegion::table_to_bytes(table);
            if !attack.count_reply(raw.request(R::SET_MEM_TABLE, payload, &fds)) {
                continue 'connection;
            }
        }
        // More regions than descriptors, than payload bytes, and than the protocol allows.
        for count in [2_u32, 9, 0xffff, u32::MAX] {
            let mut payload = MemRegion::table_to_bytes(&[w]);
            payload[..4].copy_from_slice(&count.to_ne_bytes());
            if !attack.count_reply(raw.request(R::SET_MEM_TABLE, payload, &[raw.file.as_fd()])) {
                continue 'connection;
            }
        }
        // Removes unknown regions, and one region twice.
        for _ in 0..2 {
            let payload = w.to_single_bytes();
            if !attack.count_reply(raw.request(R::REM_MEM_REG, payload, &[])) {
                continue 'connection;
            }
        }
    }
    Ok(())
}

/// Rings outside memory, overlapping, and not aligned.
pub fn bad_places(attack: &mut Attack<'_>) -> Result<(), Error> {
    let right = addr(TX);
    let end = USER + LEN;
    let wrong = [
        vhost_user::message::VringAddr { avail: end, ..right },
        vhost_user::message::VringAddr { used: end - 8, ..right },
        vhost_user::message::VringAddr { desc: end - 16, ..right },
        vhost_user::message::VringAddr { desc: right.desc + 1, ..right },
        vhost_user::message::VringAddr { avail: right.desc, used: right.desc, ..right },
        vhost_user::message::VringAddr { desc: u64::MAX - 15, ..right },
        vhost_user::message::VringAddr { flags: 1, log: u64::MAX - 7, ..right },
        vhost_user::message::VringAddr { index: 0x100, ..right },
        vhost_user::message::VringAddr { index: u32::MAX, ..right },
    ];
    for place in wrong.iter().cycle() {
        let Some(raw) = attack.raw()? else { return Ok(()) };
        if !(raw.negotiate(FEATURES) && raw.share()) {
            attack.tally.turned_away += 1;
            continue;
        }
        raw.request(R::SET_VRING_NUM, state(TX, SIZE.into()), &[]);
        raw.request(R::SET_VRING_BASE, state(TX, raw.base()), &[]);
        let number = u64::from(TX).to_ne_bytes().to_vec();
        if attack.count_reply(raw.request(R::SET_VRING_ADDR, place.to_bytes(), &[]))
            && attack.count_reply(raw.request(R::SET_VRING_KICK, number, &[raw.event.as_fd()]))
        {
            raw.request(R::SET_VRING_ENABLE, state(TX, 1), &[]);
            raw.chain(TX, &[(BUFFERS, 72, 0)]);
            attack.tally.ended += u64::from(raw.is_closed(Duration::from_millis(10)));
        }
    }
    Ok(())
}

/// Chains whose buffers overlap the rings: received frames overwrite these.
pub fn overlapping(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(raw) = attack.connect_and_start()? {
        let Some(mut tx) = raw.driver(TX) else { continue };
        attack.announce(&raw, &mut tx);
        let parts: Vec<(u64, u32, u16)> =
            (0..8).map(|i| (GUEST + i * 0x8000, 0x8000, WRITE | super::wire::NEXT)).collect();
        let mut last = parts.clone();
        if let Some(last) = last.last_mut() {
            last.2 = WRITE;
        }
        raw.chain(RX, &last);
        // And all buffers the same.
        let same = [Buf { addr: BUFFERS, len: 36, write: false }; 2];
        raw.frame(BUFFERS, VnetHdr::NONE, attack.peer, attack.mac);
        let rounds = attack.tally.attempts;
        while attack.on() && !raw.is_closed(Duration::ZERO) && attack.tally.attempts < rounds + 500
        {
            let mut used = Vec::new();
            tx.add(&same);
            tx.publish();
            raw.kick();
            attack.tally.attempts += 1;
            if tx.take_used(usize::from(SIZE), &mut used).is_err() {
                break;
            }
            attack.rest(Duration::from_micros(100));
        }
    }
    Ok(())
}
