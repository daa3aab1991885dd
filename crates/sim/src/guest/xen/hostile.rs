//! Protocol violations of a hostile Xen guest, in its rings, grants and frames.

use ring::xen::{RxRequest, TX_SLOT_LEN, TxRequest, tx_flag};

use super::{PAGE, SLOTS_AT, Sent, Xen};
use crate::guest::{App, Kick, Ring, forged_frame};
use crate::random::Random;

/// Offsets of the indices in a ring's page.
const REQ_PROD: usize = 0;
const REQ_EVENT: usize = 4;
const RSP_EVENT: usize = 12;
/// References that are never granted.
const NO_GRANTS: [u32; 3] = [0, 1, u32::MAX];

impl Xen {
    /// Sometimes commits a violation, and sometimes sends a needless kick.
    pub(super) fn inject_violation(
        &mut self,
        apps: &mut [App],
        random: &mut Random,
        kicks: &mut Vec<Kick>,
    ) {
        let q = random.index(self.queues.len());
        let ring = if random.one_in(2) { Ring::Rx } else { Ring::Tx };
        if random.one_in(4) {
            match random.within(0..16) {
                0 if !self.careful => self.scribble(q, ring, random),
                1 if !self.careful => self.jump_index(q, ring, random),
                2 => self.corrupt_events(q, ring, random),
                3 => self.revoke_in_use(q, ring, random),
                4..=7 => self.post_bad_grant(&mut apps[q], q, random),
                _ => self.forge(&mut apps[q], q, random),
            }
        }
        if random.one_in(4) {
            kicks.push((q, ring));
        }
    }

    /// Writes a random value into a ring.
    fn scribble(&self, q: usize, ring: Ring, random: &mut Random) {
        let area = &self.queues[q].areas[usize::from(ring == Ring::Rx)];
        let at = random.within(0..area.len() as u64 / 4) as usize * 4;
        let word =
            if random.one_in(2) { random.bits() as u32 } else { random.bits() as u32 & 0xff };
        area.store_u32(at, word);
    }

    /// Moves `req_prod`: beyond the ring's size, or back.
    fn jump_index(&self, q: usize, ring: Ring, random: &mut Random) {
        let queue = &self.queues[q];
        let (area, size) = match ring {
            Ring::Tx => (&queue.areas[0], queue.tx.size()),
            Ring::Rx => (&queue.areas[1], queue.rx.size()),
        };
        let by = match random.within(0..4) {
            0 => size + 1,
            1 => 1 << 31,
            2 => random.bits() as u32,
            _ => 0_u32.wrapping_sub(1 + random.within(0..4) as u32),
        };
        area.store_u32(REQ_PROD, area.load_u32(REQ_PROD).wrapping_add(by));
    }

    /// Writes a random event index: its own, or the back half's.
    fn corrupt_events(&self, q: usize, ring: Ring, random: &mut Random) {
        let area = &self.queues[q].areas[usize::from(ring == Ring::Rx)];
        area.store_u32([REQ_EVENT, RSP_EVENT][random.index(2)], random.bits() as u32);
    }

    /// Revokes a grant in use.
    fn revoke_in_use(&self, q: usize, ring: Ring, random: &mut Random) {
        let queue = &self.queues[q];
        let gref = match ring {
            Ring::Tx => queue.tx_flight.values().next().map(|sent| sent.gref),
            Ring::Rx => queue.rx_flight.keys().nth(random.index(2)).copied(),
        };
        gref.into_iter().for_each(|gref| self.revoke(gref));
    }

    /// Posts a receive buffer that is not granted, or granted read-only.
    fn post_bad_grant(&mut self, app: &mut App, q: usize, random: &mut Random) {
        let Some(page) = self.queues[q].rx_idle.pop() else { return };
        let gref = if random.one_in(2) { self.grant(page, true) } else { random.bits() as u32 };
        let queue = &mut self.queues[q];
        if !queue.rx.post(RxRequest { id: page as u16, gref }) {
            queue.rx_idle.push(page);
            return;
        }
        queue.rx_flight.insert(gref, page);
        queue.rx.publish();
        app.kick_due[1] = true;
    }

    /// Sends a packet with one violation.
    fn forge(&mut self, app: &mut App, q: usize, random: &mut Random) {
        let queue = &mut self.queues[q];
        if queue.tx.room() == 0 {
            return;
        }
        let (Some(page), Some(id)) = (queue.tx_idle.pop(), queue.tx_ids.pop()) else { return };
        let at = (queue.areas[0].load_u32(REQ_PROD) % queue.tx.size()) as usize;
        let frame = queue.frames;
        let bytes = forged_frame(self.index, random.within(14..1500) as usize, random);
        let gref = self.grant(page, true);
        let seg = self.memory.seg_mut(page * PAGE, bytes.len() as u32);
        seg.expect("a page of its own").write(&bytes);
        let size = bytes.len() as u16;
        let mut request = TxRequest { gref, offset: 0, flags: 0, id, size };
        match random.within(0..8) {
            0 => request.gref = NO_GRANTS[random.index(3)],
            1 => request.size = random.within(0..14) as u16,
            2 if !self.careful => request.offset = random.within(3000..70_000) as u16,
            3 if !self.careful => request.size = random.bits() as u16,
            4 => {
                request.flags = [tx_flag::CSUM_BLANK, tx_flag::DATA_VALIDATED][random.index(2)];
            }
            _ => {}
        }
        let queue = &mut self.queues[q];
        if !queue.tx.add(request, &[], &[]) {
            return;
        }
        queue.tx_flight.insert(id, Sent { page, gref, frame });
        queue.awaited.insert(frame, 1);
        queue.frames += 1;
        if !self.careful && random.one_in(5) {
            // Announces another request, or an extra info, that does not follow.
            let flags = [tx_flag::MORE_DATA, tx_flag::EXTRA_INFO][random.index(2)];
            let word = SLOTS_AT + TX_SLOT_LEN * at + 4;
            let area = &queue.areas[0];
            area.store_u32(word, area.load_u32(word) | u32::from(flags) << 16);
        }
        queue.tx.publish();
        app.kick_due[0] = true;
    }
}
