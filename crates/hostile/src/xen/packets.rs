//! Invalid rings, packets and grants.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ring::xen::{FrontRx, RxPacket, RxRequest, tx_flag};
use rustix::fs::ftruncate;

use super::guest::{
    CTRL, DATA, GREF, Guest, PAGES, REQ_PROD, RING_SIZE, RSP_PROD, RX, SLOTS, TX, entry,
};
use crate::race::Random;
use crate::{Attack, Error};

const ANSWERS: Duration = Duration::from_millis(20);

/// Indices that jump, on all three rings.
pub fn index_jumps(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.break_vifs(&[
        |guest| {
            guest.tx_prod = 30_000;
            guest.push();
        },
        |guest| {
            guest.tx_prod = u32::MAX;
            guest.push();
        },
        |guest| {
            guest.tx_prod = RING_SIZE + 1;
            guest.push();
        },
        |guest| {
            guest.area(RX).sync_store_u32(REQ_PROD, 30_000, Ordering::Release);
            guest.channels[RX].notify();
        },
        |guest| {
            guest.area(CTRL).sync_store_u32(REQ_PROD, 30_000, Ordering::Release);
            guest.channels[CTRL].notify();
        },
    ])
}

/// Packets that stop a vif, and continued use of its ring.
pub fn fatal(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.break_vifs(&[
        |guest| {
            guest.request(GREF + DATA, 4000, 0, 200);
            guest.push();
            // Continues.
            (0..64).for_each(|_| guest.request(GREF + DATA, 0, 0, 60));
            guest.push();
        },
        |guest| {
            guest.request(GREF + DATA, 0xffff, 0, 0xffff);
            guest.push();
        },
    ])
}

/// Packets of too many slots.
pub fn too_many_slots(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.break_vifs(&[
        |guest| {
            guest.request(GREF + DATA, 0, tx_flag::MORE_DATA, 22 * 100);
            (1..22).for_each(|_| guest.request(GREF + DATA, 0, tx_flag::MORE_DATA, 100));
            guest.push();
        },
        |guest| {
            guest.request(GREF + DATA, 0, tx_flag::MORE_DATA, 300);
            for i in 1..20 {
                guest.request(GREF + DATA, 0, tx_flag::MORE_DATA * u16::from(i < 19), 10);
            }
            guest.push();
        },
        |guest| {
            (0..RING_SIZE).for_each(|_| guest.request(GREF + DATA, 0, tx_flag::MORE_DATA, 1));
            guest.push();
        },
    ])
}

/// Extra infos: unknown, missing, endless, with GSO size 0.
pub fn extras(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.break_vifs(&[
        |guest| {
            guest.request(GREF + DATA, 0, tx_flag::EXTRA_INFO, 100);
            (1..RING_SIZE).for_each(|_| guest.extra([2, 1, 1, 0, 0x5e, 0, 0, 1]));
            guest.push();
        },
        |guest| {
            guest.request(GREF + DATA, 0, tx_flag::EXTRA_INFO, 100);
            guest.extra([0; 8]);
            guest.push();
        },
        |guest| {
            guest.request(GREF + DATA, 0, tx_flag::EXTRA_INFO, 100);
            guest.extra([0xff; 8]);
            guest.push();
        },
        |guest| {
            guest.request(GREF + DATA, 0, tx_flag::EXTRA_INFO, 100);
            guest.extra([1, 0, 0, 0, 1, 0, 0, 0]);
            guest.push();
        },
        |guest| {
            guest.request(GREF + DATA, 0, tx_flag::EXTRA_INFO, 100);
            guest.extra([1, 0, 100, 0, 7, 0, 0, 0]);
            guest.push();
        },
        // Announces another one that does not follow.
        |guest| {
            guest.request(GREF + DATA, 0, tx_flag::EXTRA_INFO | tx_flag::MORE_DATA, 100);
            guest.push();
        },
    ])
}

/// A whole ring of invalid grants.
pub fn bad_grants(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.with_vifs(|_, guest| {
        for i in 0..RING_SIZE {
            let gref = [i % GREF, u32::MAX - i, GREF + PAGES, 0][i as usize % 4];
            guest.request(gref, 0, 0, 60);
        }
        guest.push();
        guest.answered(ANSWERS);
    })
}

/// All slots of all packets in one page, overlapping each other and the ring.
pub fn overlapping_grants(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.with_vifs(|attack, guest| {
        guest.frame(DATA, attack.peer, attack.mac);
        for n in 0..12_u16 {
            guest.request(GREF + DATA, 0, tx_flag::MORE_DATA, 60 + 16 * 20);
            for i in 0..16 {
                let more = tx_flag::MORE_DATA * u16::from(i < 15);
                guest.request(GREF + u32::from(n % 3), i * 20, more, 20);
            }
        }
        guest.push();
        guest.answered(ANSWERS);
    })
}

/// A thread rewrites slots and pages between two reads of them.
pub fn double_fetch(attack: &mut Attack<'_>) -> Result<(), Error> {
    rewritten(attack, |guest, n| {
        let area = guest.area(TX);
        let slot = SLOTS + 12 * (n % u64::from(RING_SIZE)) as usize;
        area.store_u32(slot, GREF + (n >> 7) as u32 % PAGES);
        area.store_u32(slot + 4, (n >> 11) as u32 & 0x0004_0fff);
        area.store_u32(slot + 8, (n >> 13) as u32 & 0x0fff_00ff);
        guest.area(DATA as usize).store_u64((n as usize % 8) * 8, n);
    })
}

/// Grants revoked and given again while they are copied from.
pub fn revoked(attack: &mut Attack<'_>) -> Result<(), Error> {
    rewritten(attack, |guest, n| {
        let bytes = if n & 4096 == 0 { [0; 8] } else { entry((n >> 20) as u32 % (2 * PAGES)) };
        let _ = rustix::io::pwrite(&guest.table, &bytes, u64::from(GREF + DATA) * 8);
    })
}

/// Sends frames while a thread changes their slots and pages.
fn rewritten(attack: &mut Attack<'_>, change: impl Fn(&Guest, u64) + Sync) -> Result<(), Error> {
    while let Some(mut guest) = attack.vif()? {
        let over = AtomicBool::new(false);
        guest.frame(DATA, attack.peer, attack.mac);
        (0..RING_SIZE).for_each(|_| guest.request(GREF + DATA, 0, 0, 60));
        let mut prod = 0_u32;
        let guest = &guest;
        let attempts = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut random = Random(1);
                while !over.load(Ordering::Relaxed) {
                    change(guest, random.next());
                }
            });
            let area = guest.area(TX);
            let mut attempts = 0;
            while attack.on() && !guest.is_disconnected() {
                for _ in 0..100 {
                    let done = area.sync_load_u32(RSP_PROD, Ordering::Acquire);
                    if prod.wrapping_sub(done) < RING_SIZE / 2 {
                        prod = prod.wrapping_add(32);
                        attempts += 32;
                        area.sync_store_u32(REQ_PROD, prod, Ordering::Release);
                        guest.channels[TX].notify();
                    } else {
                        std::thread::yield_now();
                    }
                }
            }
            over.store(true, Ordering::Relaxed);
            attempts
        });
        attack.tally.attempts += attempts;
        attack.tally.ended += u64::from(attack.on());
    }
    Ok(())
}

/// Headers split over many slots, the first shorter than any header.
pub fn split_headers(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.with_vifs(|attack, guest| {
        guest.frame(DATA, attack.peer, attack.mac);
        for first in [1_u16, 13, 14, 20] {
            guest.request(GREF + DATA, 0, tx_flag::MORE_DATA, 60);
            let mut at = first;
            while at < 60 {
                let size = (60 - at).min(5);
                let more = tx_flag::MORE_DATA * u16::from(at + size < 60);
                guest.request(GREF + DATA, at, more, size);
                at += size;
            }
        }
        guest.push();
        guest.answered(ANSWERS);
    })
}

/// Eighteen slots with fewer bytes in total than the headers.
pub fn tiny_slots(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.with_vifs(|attack, guest| {
        guest.frame(DATA, attack.peer, attack.mac);
        for _ in 0..10 {
            guest.request(GREF + DATA, 0, tx_flag::MORE_DATA, 60);
            for i in 0..17_u16 {
                guest.request(GREF + DATA, i * 3, tx_flag::MORE_DATA * u16::from(i < 16), 3);
            }
        }
        guest.push();
        guest.answered(ANSWERS);
    })
}

/// Empty slots: the first, the last, and all.
pub fn empty_slots(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.with_vifs(|attack, guest| {
        guest.frame(DATA, attack.peer, attack.mac);
        for _ in 0..10 {
            guest.request(GREF + DATA, 0, 0, 0);
            guest.request(GREF + DATA, 0, tx_flag::MORE_DATA, 60);
            (0..8).for_each(|_| guest.request(GREF + DATA, 0, tx_flag::MORE_DATA, 0));
            guest.request(GREF + DATA, 0, 0, 0);
        }
        guest.push();
        guest.answered(ANSWERS);
    })
}

/// Memory of the rings and of the grant table truncated.
pub fn truncated(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.break_vifs(&[
        |guest| {
            guest.request(GREF + DATA, 0, 0, 60);
            guest.push();
            let _ = ftruncate(&guest.memory, 0);
            guest.channels[TX].notify();
        },
        |guest| {
            let _ = ftruncate(&guest.table, 0);
            guest.request(GREF + DATA, 0, 0, 60);
            guest.push();
        },
    ])
}

/// Posts `count` rx requests every `pause`.
fn drip(attack: &mut Attack<'_>, count: u32, pause: Duration, good: bool) -> Result<(), Error> {
    while let Some(mut guest) = attack.vif()? {
        let mut rx = FrontRx::new(guest.area(RX));
        guest.frame(DATA, attack.peer, attack.mac);
        guest.request(GREF + DATA, 0, 0, 60);
        guest.push();
        let (mut n, mut packet) = (0_u32, RxPacket::new());
        while attack.on() && !guest.is_disconnected() {
            while let Ok(Some(_)) = rx.take(&mut packet) {}
            for _ in 0..count.min(rx.room()) {
                let page = DATA + 1 + n % (PAGES - DATA - 1);
                let gref = if good { GREF + page } else { u32::MAX - n };
                let posted = rx.post(RxRequest { id: (n % RING_SIZE) as u16, gref });
                n = n.wrapping_add(1);
                attack.tally.attempts += u64::from(posted);
            }
            rx.publish();
            guest.channels[RX].notify();
            attack.rest(pause);
        }
    }
    Ok(())
}

/// One page every 45 ms.
pub fn dripping(attack: &mut Attack<'_>) -> Result<(), Error> {
    drip(attack, 1, Duration::from_millis(45), true)
}

/// No page at all.
pub fn posts_none(attack: &mut Attack<'_>) -> Result<(), Error> {
    drip(attack, 0, Duration::from_millis(20), true)
}

/// Some thousand pages a second.
pub fn slow(attack: &mut Attack<'_>) -> Result<(), Error> {
    drip(attack, 2, Duration::from_millis(1), true)
}

/// Invalid grants on the rx ring.
pub fn receive_bad_grants(attack: &mut Attack<'_>) -> Result<(), Error> {
    drip(attack, 64, Duration::from_millis(1), false)
}
