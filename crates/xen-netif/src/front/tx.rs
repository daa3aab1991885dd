//! The tx ring of one queue, with the pages granted for it: buffers with enough pages for the
//! longest frame. Changes of the multicast list are sent over it, too, without a buffer.

use ring::xen::{
    Armed, Extra, FrontRx, FrontTx, Gso, Malformed, Multicast, PAGE_LEN, SLOTS_PORTABLE, TxRequest,
    gso_type, status, tx_flag,
};
use shm::Area;
use switch::vnet::{DATA_VALID, GSO_NONE, GSO_TCPV4, GSO_TCPV6, NEEDS_CSUM, VnetHdr};

use super::Agreed;

/// Reason to reject a frame; its buffer is free at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Shorter than an Ethernet header.
    Short,
    /// Longer than a request can express or, without sg, than a page.
    Long,
    /// Needs an offload that the back end does not support.
    Offload,
}

/// Sends from contiguous buffers in granted pages.
pub struct TxQueue {
    ring: FrontTx,
    /// Grants of the pages, in order.
    grefs: Vec<u32>,
    pages_each: u16,
    agreed: Agreed,
    free_ids: Vec<u16>,
    /// The buffer of each id that is in flight and not in `changes`.
    buffer_of: Vec<u16>,
    /// Changes of the multicast list without a response, by id.
    changes: Vec<(u16, Multicast)>,
    refused: Vec<[u8; 6]>,
    /// Number of responses outstanding for each buffer.
    awaited: Vec<u16>,
    in_flight: usize,
    /// Frames with an error response.
    pub errors: u64,
    /// Frames with a dropped response.
    pub dropped: u64,
}

impl TxQueue {
    /// Creates a ring in `area`. The pages of `grefs` form buffers of `pages_each`.
    pub fn new(area: Area, grefs: Vec<u32>, pages_each: u16, agreed: &Agreed) -> Self {
        assert!((1..SLOTS_PORTABLE).contains(&usize::from(pages_each)));
        let ring = FrontTx::new(area);
        let ids = u16::try_from(ring.size()).expect("a page holds 256 slots");
        let buffers = grefs.len() / usize::from(pages_each);
        Self {
            ring,
            grefs,
            pages_each,
            agreed: *agreed,
            free_ids: (0..ids).rev().collect(),
            buffer_of: vec![0; usize::from(ids)],
            changes: Vec::new(),
            refused: Vec::new(),
            awaited: vec![0; buffers],
            in_flight: 0,
            errors: 0,
            dropped: 0,
        }
    }

    /// Whether the back end accepts frames in several slots.
    pub fn has_sg(&self) -> bool {
        self.agreed.sg
    }

    /// Number of frames of any length that the ring has room for.
    pub fn frames_free(&self) -> usize {
        // One more slot for the GSO extra info.
        self.ring.room() as usize / (usize::from(self.pages_each) + 1)
    }

    /// Sends the `len` bytes at `offset` of `buffer`, which must be free.
    ///
    /// # Errors
    /// [`Refused`]: the frame was not sent.
    pub fn send(
        &mut self,
        buffer: u16,
        offset: u16,
        len: u32,
        hdr: &VnetHdr,
    ) -> Result<(), Refused> {
        assert_eq!(self.awaited[usize::from(buffer)], 0, "buffer {buffer} is in flight");
        let size = u16::try_from(len).map_err(|_| Refused::Long)?;
        if size < 14 {
            return Err(Refused::Short);
        }
        let end = u32::from(offset) + len;
        let page = u32::from(PAGE_LEN);
        if end > page * u32::from(self.pages_each) || (end > page && !self.agreed.sg) {
            return Err(Refused::Long);
        }
        let (flags, gso) = self.request_flags(hdr)?;
        let mut requests = [TxRequest::default(); SLOTS_PORTABLE];
        let (mut at, mut n) = (u32::from(offset), 0);
        while at < end {
            let index = usize::from(buffer) * usize::from(self.pages_each) + n;
            let to = end.min((at / page + 1) * page);
            requests[n] = TxRequest {
                gref: self.grefs[index],
                offset: (at % page) as u16,
                flags: if n == 0 { flags } else { 0 },
                id: self.free_ids.pop().expect("as many ids as slots"),
                // The first request has the length of the packet.
                size: if n == 0 { size } else { (to - at) as u16 },
            };
            self.buffer_of[usize::from(requests[n].id)] = buffer;
            (at, n) = (to, n + 1);
        }
        let extra = gso.map(Extra::Gso);
        let added = self.ring.add(requests[0], extra.as_slice(), &requests[1..n]);
        assert!(added, "callers check the room first");
        self.awaited[usize::from(buffer)] = n as u16;
        self.in_flight += 1;
        Ok(())
    }

    /// Flags and GSO of a frame; netif only says that a checksum is blank, not where it is.
    fn request_flags(&self, hdr: &VnetHdr) -> Result<(u16, Option<Gso>), Refused> {
        let blank = hdr.flags & NEEDS_CSUM != 0;
        let flags = match (blank, hdr.flags & DATA_VALID != 0) {
            (true, _) => tx_flag::CSUM_BLANK | tx_flag::DATA_VALIDATED,
            (false, true) => tx_flag::DATA_VALIDATED,
            (false, false) => 0,
        };
        // The vnet header shows IPv6 only with GSO: other frames need both features.
        let (kind, accepted) = match hdr.gso_type {
            GSO_NONE => (None, !blank || (self.agreed.csum4 && self.agreed.csum6)),
            GSO_TCPV4 => (Some(gso_type::TCPV4), self.agreed.gso_tcpv4 && self.agreed.csum4),
            GSO_TCPV6 => (Some(gso_type::TCPV6), self.agreed.gso_tcpv6 && self.agreed.csum6),
            _ => (None, false),
        };
        //= netif.h: GSO takes csum_blank, and a size.
        if !accepted || (kind.is_some() && (!blank || hdr.gso_size == 0)) {
            return Err(Refused::Offload);
        }
        Ok((flags, kind.map(|kind| Gso { size: hdr.gso_size, kind, features: 0 })))
    }

    /// Requests a change of the list of multicast addresses that we receive; false: not sent, the
    /// ring has no room. The response is handled by [`reclaim`](Self::reclaim).
    pub fn change(&mut self, change: Multicast) -> bool {
        let extra = match change {
            Multicast::Add(mac) => Extra::McastAdd(mac),
            Multicast::Del(mac) => Extra::McastDel(mac),
        };
        let Some(&id) = self.free_ids.last() else { return false };
        //= netif.h: a dummy request, it names no page.
        let dummy = TxRequest { id, ..TxRequest::default() };
        let added = self.ring.add(dummy, &[extra], &[]);
        if added {
            self.free_ids.pop();
            self.changes.push((id, change));
        }
        added
    }

    /// Whether a change has no response yet.
    pub fn is_changing(&self) -> bool {
        !self.changes.is_empty()
    }

    /// Takes the addresses that the back end did not add since the last call.
    pub fn take_refused(&mut self) -> Vec<[u8; 6]> {
        std::mem::take(&mut self.refused)
    }

    /// Adds to `free` the buffers with all responses. Returns their number.
    ///
    /// # Errors
    /// [`Malformed`]: the ring must be abandoned.
    pub fn reclaim(&mut self, free: &mut Vec<u16>) -> Result<usize, Malformed> {
        let before = free.len();
        while let Some(response) = self.ring.take_response()? {
            self.free_ids.push(response.id);
            // Usually empty.
            if let Some(at) = self.changes.iter().position(|(id, _)| *id == response.id) {
                if let (_, Multicast::Add(mac)) = self.changes.swap_remove(at)
                    && response.status != status::OKAY
                {
                    self.refused.push(mac);
                }
                continue;
            }
            self.errors += u64::from(response.status == status::ERROR);
            self.dropped += u64::from(response.status == status::DROPPED);
            let buffer = self.buffer_of[usize::from(response.id)];
            // The ring guarantees one response per id.
            let awaited = &mut self.awaited[usize::from(buffer)];
            *awaited -= 1;
            if *awaited == 0 {
                free.push(buffer);
                self.in_flight -= 1;
            }
        }
        Ok(free.len() - before)
    }

    /// Publishes sent frames to the back end.
    pub fn publish(&mut self) {
        self.ring.publish();
    }

    /// Whether the back end must be notified of them.
    #[must_use]
    pub fn notify_needed(&mut self) -> bool {
        self.ring.notify_needed()
    }

    /// Whether `frames` frames have responses, as far as one load shows: exact for all frames in
    /// flight, otherwise by slots, of which each frame has at least one.
    pub fn has_used_many(&self, frames: usize) -> bool {
        self.ring.has_responses_many(self.slots_of(frames))
    }

    /// Requests an event when `frames` frames have responses, or earlier, before sleeping. Only
    /// [`Armed::Armed`] allows sleep.
    pub fn arm_after(&mut self, frames: usize) -> Armed {
        // An event before there is room for one more frame is of no use.
        let lacking = (u32::from(self.pages_each) + 1).saturating_sub(self.ring.room());
        self.ring.arm_after(self.slots_of(frames).max(lacking))
    }

    /// Minimum number of slots with responses if `frames` frames have them.
    fn slots_of(&self, frames: usize) -> u32 {
        let all = self.ring.size() - self.ring.room();
        if frames >= self.in_flight { all } else { all.min(frames as u32) }
    }

    /// With smart poll: clears the flag in the page of `rx` and re-checks both rings, before
    /// sleeping.
    pub fn stop_polling(&self, rx: &FrontRx) -> Armed {
        rx.stop_polling(&self.ring)
    }
}

#[cfg(test)]
pub(in crate::front) mod tests;
