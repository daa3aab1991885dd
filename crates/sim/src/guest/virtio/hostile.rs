//! Protocol violations of a hostile guest, in its rings, buffers and frames.

use super::{GUEST_ADDR, POOL_LEN, POOLS, RING_LEN, SLOTS, Virtio, buf, write};
use crate::guest::{App, Kick, ROOM, Ring, forged_frame};
use crate::random::Random;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Offsets of the driver and device areas within a ring's memory.
const DRIVER: usize = 0x1000;
const DEVICE: usize = 0x1800;

/// Offset of a guest address from the start of memory.
fn offset(addr: u64) -> usize {
    (addr - GUEST_ADDR) as usize
}

impl Virtio {
    /// Sometimes commits a violation, and sometimes sends a needless kick.
    pub(super) fn inject_violation(
        &mut self,
        apps: &mut [App],
        random: &mut Random,
        kicks: &mut Vec<Kick>,
    ) {
        let q = random.index(self.pairs.len());
        let ring = if random.one_in(2) { Ring::Rx } else { Ring::Tx };
        if random.one_in(4) {
            let careful = self.careful;
            match random.within(0..16) {
                0 if !careful => self.scribble(random),
                1 if !careful => self.jump_index(q, ring, random),
                2 => self.corrupt_events(q, ring, random),
                _ => self.forge(&mut apps[q], q, ring, random),
            }
        }
        if random.one_in(4) {
            kicks.push((q, ring));
        }
    }

    fn ring_at(q: usize, ring: Ring) -> usize {
        (2 * q + usize::from(ring == Ring::Rx)) * RING_LEN as usize
    }

    fn size(&self, q: usize, ring: Ring) -> usize {
        usize::from(self.pairs[q].layouts[usize::from(ring == Ring::Rx)].0.size)
    }

    /// Writes a random value into its rings or tables.
    fn scribble(&self, random: &mut Random) {
        let rings = 2 * self.pairs.len() as u64 * RING_LEN;
        let len = if random.one_in(8) { SLOTS - GUEST_ADDR } else { rings };
        let at = random.within(0..len / 8) as usize * 8;
        // Mostly near the start of an area, which small rings use.
        let at = if random.one_in(8) { at } else { at & !0x7ff | at & 0xf8 };
        match random.within(0..4) {
            0 => self.rings.store_u64(at, random.bits()),
            1 => self.rings.store_u16(at + 6, random.bits() as u16),
            2 => self.rings.store_u16(at + 2, random.within(0..200) as u16),
            _ => self.rings.store_u32(at, random.within(0..0x2_0000) as u32),
        }
    }

    /// Moves the avail index: beyond the ring's size, or so that chains in flight become available
    /// again.
    fn jump_index(&self, q: usize, ring: Ring, random: &mut Random) {
        let (at, size) = (Self::ring_at(q, ring), self.size(q, ring));
        if self.features.packed {
            let flags = [1 << 7, 1 << 15][random.index(2)];
            for i in 0..size {
                self.rings.store_u16(at + 16 * i + 14, flags | random.within(0..8) as u16);
            }
            return;
        }
        let idx = self.rings.load_u16(at + DRIVER + 2);
        let by = match random.within(0..4) {
            0 => size as u16 + 1,
            1 => 0x8000,
            2 => random.bits() as u16,
            _ => 0_u16.wrapping_sub(1 + random.within(0..4) as u16),
        };
        self.rings.store_u16(at + DRIVER + 2, idx.wrapping_add(by));
    }

    /// Writes random event suppression values into the driver and device areas.
    fn corrupt_events(&self, q: usize, ring: Ring, random: &mut Random) {
        let (at, size) = (Self::ring_at(q, ring), self.size(q, ring));
        let (driver, device) = if self.features.packed {
            (random.index(2) * 2, random.index(2) * 2)
        } else {
            ([0, 4 + 2 * size][random.index(2)], [0, 4 + 8 * size][random.index(2)])
        };
        self.rings.store_u16(at + DRIVER + driver, random.bits() as u16);
        self.rings.store_u16(at + DEVICE + device, random.bits() as u16);
    }

    /// Makes available a buffer with one violation.
    fn forge(&mut self, app: &mut App, q: usize, ring: Ring, random: &mut Random) {
        let pair = &mut self.pairs[q];
        let (free, tx) = match ring {
            Ring::Tx => (&mut pair.tx_free, true),
            Ring::Rx => (&mut pair.rx_idle, false),
        };
        let Some(slot) = free.last().copied() else { return };
        let len = if tx { random.within(60..1500) } else { self.rx_len };
        let queue = if tx { &mut pair.tx } else { &mut pair.rx };
        let Some(id) = queue.add(&[buf(slot, len, !tx)]) else { return };
        queue.publish();
        free.pop();
        let flight = if tx { &mut pair.tx_flight } else { &mut pair.rx_flight };
        flight.insert(id, slot);
        app.kick_due[usize::from(!tx)] = true;
        let bytes = if tx { self.forged_bytes(len as usize, random) } else { Vec::new() };
        write(&self.memory, slot, &bytes);
        let start = Self::ring_at(q, ring);
        let mut slots = (0..self.size(q, ring)).map(|i| start + 16 * i);
        if let Some(at) = slots.find(|at| self.rings.load_u64(*at) == slot) {
            if self.careful || random.one_in(2) {
                self.bad_buffer(at, random);
            } else {
                self.bad_chain(at, q, ring, random);
            }
        }
    }

    /// Returns a forged frame with a header that may be random.
    fn forged_bytes(&self, len: usize, random: &mut Random) -> Vec<u8> {
        let hdr_len = self.format.hdr_len as usize;
        let mut bytes = vec![0; hdr_len];
        if random.one_in(4) {
            bytes.fill_with(|| random.bits() as u8);
        }
        bytes.extend(forged_frame(self.index, len - hdr_len, random));
        bytes
    }

    fn flags_at(&self, at: usize) -> usize {
        at + if self.features.packed { 14 } else { 12 }
    }

    fn flip_flags(&self, at: usize, flags: u16) {
        let at = self.flags_at(at);
        self.rings.store_u16(at, self.rings.load_u16(at) ^ flags);
    }

    /// Sets an address outside memory, or an invalid length.
    fn bad_buffer(&self, at: usize, random: &mut Random) {
        let addr = [0, GUEST_ADDR - 8, u64::MAX - 40, 1 << 40, SLOTS + ROOM / 2];
        let len = [0, 1, 9, 13, 25, 70_000, 1 << 31, u32::MAX];
        match random.within(0..3) {
            0 => self.rings.store_u64(at, addr[random.index(addr.len())]),
            1 => self.rings.store_u32(at + 8, len[random.index(len.len())]),
            _ => {}
        }
    }

    /// Makes an invalid chain: a loop, a wrong order of directions, an invalid table.
    fn bad_chain(&self, at: usize, q: usize, ring: Ring, random: &mut Random) {
        let size = self.size(q, ring) as u64;
        let table = POOLS + (2 * q as u64 + u64::from(ring == Ring::Rx)) * POOL_LEN;
        match random.within(0..7) {
            // Links to another descriptor: maybe itself, or outside the table.
            0 => {
                self.flip_flags(at, NEXT);
                let start = Self::ring_at(q, ring);
                let own = (at - start) as u16 / 16;
                let next = [own, size as u16, u16::MAX, random.within(0..size) as u16];
                if !self.features.packed {
                    self.rings.store_u16(at + 14, next[random.index(4)]);
                }
            }
            // A readable descriptor after a writable one.
            1 | 6 => {
                self.flip_flags(at, NEXT);
                if !self.features.packed {
                    let other = random.within(0..size) as usize;
                    self.rings.store_u16(at + 14, other as u16);
                    let flags = self.flags_at(Self::ring_at(q, ring) + 16 * other);
                    self.rings.store_u16(flags, 0);
                }
            }
            2 => self.flip_flags(at, WRITE),
            3 if !self.features.packed => {
                let entry = random.within(0..size) as usize;
                let at = Self::ring_at(q, ring) + DRIVER + 4 + 2 * entry;
                self.rings.store_u16(at, [size as u16, u16::MAX, 0][random.index(3)]);
            }
            _ => self.bad_table(at, table, random),
        }
    }

    /// Refers to an invalid indirect table.
    fn bad_table(&self, at: usize, table: u64, random: &mut Random) {
        let both = if random.one_in(4) { INDIRECT | NEXT } else { INDIRECT };
        self.flip_flags(at, both);
        let outside = [0, u64::MAX - 15, table + 4];
        let addr = if random.one_in(4) { outside[random.index(3)] } else { table };
        let len = [0, 15, 16, 17, 32, 48, 0x10_0000][random.index(7)];
        self.rings.store_u64(at, addr);
        self.rings.store_u32(at + 8, len);
        for entry in 0..4 {
            let at = offset(table) + 16 * entry;
            let flags = [0, NEXT, WRITE, INDIRECT][random.index(4)];
            self.rings.store_u64(at, SLOTS);
            self.rings.store_u32(at + 8, 100);
            self.rings.store_u16(self.flags_at(at), flags);
            if !self.features.packed {
                self.rings.store_u16(at + 14, random.within(0..5) as u16);
            }
        }
    }
}
