//! Direct reads into the guest's receive buffers (see `switch::direct`).
//!
//! Small frames get a chain each. If one chain does not hold the expected length, one frame at a
//! time gets as many as it needs: chains are used in the order taken, so chains that a frame leaves
//! over go to the next. Descriptors were copied and checked when the chains were taken; they are
//! not read again here. A buffer that is not in one region is not lent, nor those after it.

use ring::virtq::{Chain, Taken};
use shm::{GuestMemory, SegMut};
use switch::direct::{Direct, DirectFrame, Lent};
use switch::frame::{GSO_LEN_MAX, SEGS_MAX};
use switch::port::Fault;
use switch::vnet::Offloads;

use super::super::{Active, mark_written};
use super::{VirtioEgress, header_bytes, put_frame};

/// Distance of the bytes accessed to check whether memory is lost.
const PAGE: u32 = 4096;

impl VirtioEgress {
    /// Number of frames of `len` bytes there is room for, and of chains for each.
    fn room_for(&mut self, frames: usize, len: u32) -> Result<(usize, usize), Fault> {
        let Some(format) = self.ring.active.as_ref().map(|a| a.format) else { return Ok((0, 0)) };
        let total = u64::from(len) + u64::from(format.hdr_len);
        self.refill(frames)?;
        let chains = self.taken.chains[self.next..].iter().take(frames);
        let single = chains.take_while(|c| room(&self.taken, c) >= total).count();
        if single > 0 {
            return Ok((single, 1));
        }
        // Without MRG_RXBUF a frame must fit one chain.
        let mut per = if format.mergeable { self.at_hand(total) } else { Some(1) };
        if per.is_none() && self.take()? > 0 {
            per = self.at_hand(total);
        }
        let all = self.taken.chains.len() - self.next;
        let per = per.unwrap_or(all).min(all);
        Ok((per.min(1), per))
    }

    /// Number of the available chains that hold `total` bytes.
    fn at_hand(&self, total: u64) -> Option<usize> {
        let mut left = total;
        let chains = self.taken.chains[self.next..].iter();
        let fills = |chain| {
            left = left.saturating_sub(room(&self.taken, chain));
            left == 0
        };
        chains.map(fills).position(|full| full).map(|last| last + 1)
    }

    /// Calls `each` with the room after the header in the chains from `i` on, up to `len` bytes.
    fn each_seg(&mut self, i: usize, len: u32, each: impl FnMut(SegMut<'_>)) {
        let Some(Active { memory, hint, format, .. }) = &mut self.ring.active else { return };
        let chains = &self.taken.chains[self.next + i..];
        each_seg(memory, hint, &self.taken, chains, format.hdr_len..format.hdr_len + len, each);
    }

    /// Marks the room of a frame that the kernel wrote to, and that is not used.
    fn mark_room(&mut self, i: usize, len: u32) {
        let Some(Active { queue, format, .. }) = &mut self.ring.active else { return };
        let end = u64::from(format.hdr_len) + u64::from(len);
        if let Some(marks) = queue.marks() {
            mark_written(marks, &self.taken, &self.taken.chains[self.next + i..], end);
        }
    }
}

/// Writable bytes of a chain.
pub(super) fn room(taken: &Taken, chain: &Chain) -> u64 {
    taken.writes(chain).iter().map(|b| u64::from(b.len)).sum()
}

/// Calls `each` with the segments of bytes `range` of `chains`, up to the first buffer that is not
/// in one region.
fn each_seg<'m>(
    memory: &'m GuestMemory,
    hint: &mut usize,
    taken: &Taken,
    chains: &[Chain],
    range: std::ops::Range<u32>,
    mut each: impl FnMut(SegMut<'m>),
) {
    let (mut skip, mut left) = (range.start, range.end - range.start);
    for buf in chains.iter().flat_map(|c| taken.writes(c)) {
        let skipped = skip.min(buf.len);
        let n = left.min(buf.len - skipped);
        // Skipped bytes must be mapped, too: the header is written there.
        let Some(mut seg) = memory.seg_mut(buf.addr, skipped + n, hint) else { return };
        seg.advance(skipped);
        skip -= skipped;
        left -= n;
        if !seg.is_empty() {
            each(seg);
        }
        if left == 0 {
            return;
        }
    }
}

impl Direct for VirtioEgress {
    fn takes(&self) -> Offloads {
        self.ring.active.as_ref().map_or(Offloads::default(), |a| a.format.takes)
    }

    fn lend<'m>(&'m mut self, frames: usize, len: u32, lent: &mut Lent<'m>) {
        // A fault is sticky, and is reported when a frame is put.
        let room = self.check_lost().and_then(|()| self.room_for(frames, len));
        let Ok((frames, per)) = room else { return };
        let Some(Active { memory, hint, format, .. }) = &mut self.ring.active else { return };
        let chains = &self.taken.chains[self.next..][..frames * per];
        for chains in chains.chunks_exact(per.max(1)) {
            let range = format.hdr_len..format.hdr_len + GSO_LEN_MAX;
            let mut segs = 0;
            each_seg(memory, hint, &self.taken, chains, range, |seg| {
                segs += 1;
                if segs <= SEGS_MAX {
                    lent.push(seg);
                }
            });
            if segs == 0 {
                return;
            }
            lent.end_frame();
        }
    }

    fn accept(&mut self, came: &[DirectFrame]) -> usize {
        let Self { ring, taken, next, stats, .. } = self;
        let active = &mut ring.active;
        let Some(Active { queue, memory, format, hint, .. }) = active else { return 0 };
        let mut bytes = 0;
        let mut done = 0;
        for DirectFrame { len, hdr } in came {
            let too_long = hdr.gso_size == 0 && *len > format.frame_len_max;
            if too_long || !format.takes.take(hdr) {
                break;
            }
            let chains = &taken.chains[*next..];
            let written = u64::from(*len) + u64::from(format.hdr_len);
            let (mut left, mut n) = (written, 0);
            while left > 0 {
                left = left.saturating_sub(room(taken, &chains[n]));
                n += 1;
            }
            let raw = header_bytes(hdr, format, n);
            write_header(memory, hint, taken, &chains[..n], &raw[..format.hdr_len as usize]);
            put_frame(queue, taken, &chains[..n], written);
            if let Some(marks) = queue.marks() {
                mark_written(marks, taken, &chains[..n], written);
            }
            *next += n;
            bytes += u64::from(*len);
            done += 1;
        }
        if done > 0 {
            stats.groups.add(1);
            stats.frames.add(done as u64);
            stats.bytes.add(bytes);
        }
        done
    }

    fn take_back(&mut self, i: usize, out: &mut [u8]) {
        let (mut at, len) = (0, out.len() as u32);
        self.each_seg(i, len, |seg| at += seg.as_seg().read(&mut out[at..]));
        self.mark_room(i, len);
    }

    fn discard(&mut self, i: usize, len: u32) {
        self.mark_room(i, len);
    }

    fn record_failure(&mut self, i: usize, len: u32) -> Result<(), Fault> {
        self.stats.drops_bad_addr.add(1);
        // The kernel failed on lost memory without SIGBUS; our own access marks the mapping lost.
        self.each_seg(i, len, |mut seg| {
            while !seg.is_empty() {
                seg.write(&[0]);
                seg.advance(PAGE - 1);
            }
        });
        self.mark_room(i, len);
        match &self.ring.active {
            Some(active) => active.lost().map_or(Ok(()), |why| Err(active.broken(why.into()))),
            None => Ok(()),
        }
    }
}

/// Writes the header at the start of a frame's room in `chains`.
fn write_header(
    memory: &GuestMemory,
    hint: &mut usize,
    taken: &Taken,
    chains: &[Chain],
    mut raw: &[u8],
) {
    each_seg(memory, hint, taken, chains, 0..raw.len() as u32, |mut seg| {
        let n = seg.write(&raw[..(seg.len() as usize).min(raw.len())]);
        raw = &raw[n as usize..];
    });
}
