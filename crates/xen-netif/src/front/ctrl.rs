//! The control ring of a vif, and the requests over it: static grants, and a hash.
//!
//! ```text
//!   hash:    algorithm ──▶ key ──▶ table... (`hash`)
//!   keep:    limit of queue 0? ──▶ list, list... ──▶ limit of queue 1? ──▶ ...
//!   forget:  list, list... of queue 0 ──▶ list, list... of queue 1 ──▶ ...
//! ```
//! Each request waits for the response to the previous one: there is a single page for lists, which
//! belongs to the back end until it responds. After a refusal no more requests are sent; pages
//! without a static grant are copied by grant as usual. Responses are trusted only where that is
//! harmless: grants end with their memory, not when the back end reports that it unmapped them.

mod hash;

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use ring::xen::{
    Armed, CtrlRequest, CtrlResponse, FrontCtrl, GREF_ENTRY_LEN, GrefEntry, Malformed, PAGE_LEN,
    ctrl_status, ctrl_type,
};

use self::hash::{Hashing, Order};
use crate::back::CtrlKeys;
use crate::host::{Channel, Front, HostError, Pages};
use os::Until;

/// Maximum number of entries of one list, which is a page.
const LIST_MAX: usize = PAGE_LEN as usize / GREF_ENTRY_LEN;

/// The grants of one queue's pages.
#[derive(Debug, Default)]
pub(super) struct Grants {
    /// All grants that may be static, (reference, readonly), the most useful first.
    wanted: Vec<(u32, bool)>,
    /// Maximum that the back end keeps mapped, once it has reported it.
    most: Option<usize>,
    /// Number of grants kept mapped, from the first.
    kept: usize,
}

impl Grants {
    /// Grants of transmit buffers of `each` pages, which are read-only, and of rx pages. Pages used
    /// by every frame come first.
    pub fn new(tx: &[u32], each: u16, rx: &[u32]) -> Self {
        let each = usize::from(each);
        let page_of = |n: usize| tx.iter().skip(n).step_by(each).map(|gref| (*gref, true));
        let mut wanted = Vec::with_capacity(tx.len() + rx.len());
        let (mut first, mut rx) = (page_of(0), rx.iter().map(|gref| (*gref, false)));
        loop {
            let pair = [first.next(), rx.next()];
            if pair == [None, None] {
                break;
            }
            wanted.extend(pair.into_iter().flatten());
        }
        wanted.extend((1..each).flat_map(page_of));
        Self { wanted, most: None, kept: 0 }
    }
}

/// Static grants of a back end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Number kept mapped.
    pub grants: usize,
    /// Number available.
    pub of: usize,
    /// Number of refused requests.
    pub refusals: u64,
}

/// A request without a response.
#[derive(Clone, Copy, Debug)]
struct Pending {
    id: u16,
    kind: u16,
    about: About,
}

/// Subject of a request.
#[derive(Clone, Copy, Debug)]
enum About {
    /// A list of this many grants of a queue.
    Grants {
        queue: usize,
        entries: usize,
    },
    Hash,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    /// No more requests.
    Idle,
    /// Received frames are to be spread by a hash.
    Hash,
    /// Grants are to be kept mapped.
    Keep,
    /// All static grants are to be unmapped.
    Forget,
}

/// A vif's control ring.
pub struct Ctrl {
    ring: FrontCtrl,
    /// The ring and the list.
    pages: Pages,
    channel: Channel,
    queues: Vec<Grants>,
    hashing: Hashing,
    pending: Option<Pending>,
    next_id: u16,
    goal: Goal,
    refusals: u64,
}

impl Ctrl {
    /// Creates a ring for queues with these grants, and its keys.
    pub(super) fn new(
        front: &dyn Front,
        backend_domid: u16,
        queues: Vec<Grants>,
    ) -> Result<(Self, CtrlKeys), HostError> {
        let pages = front.alloc(2, backend_domid, false)?;
        let Some(area) = pages.area(0) else {
            return Err(HostError::NoPages { pages: 2, advice: "memory is short" });
        };
        let (port, channel) = front.channel(backend_domid)?;
        let (ring, ring_ref) = (FrontCtrl::new(area), pages.grefs[0]);
        let (pending, goal, next_id, refusals) = (None, Goal::Idle, 0, 0);
        let hashing = Hashing::new(u32::try_from(queues.len()).unwrap_or(u32::MAX).max(1));
        let ctrl = Self { ring, pages, channel, queues, hashing, pending, next_id, goal, refusals };
        Ok((ctrl, CtrlKeys { ring_ref, port }))
    }

    /// The pages, which the back end may have mapped.
    pub(super) fn into_pages(self) -> Pages {
        self.pages
    }

    /// Requests that the back end spreads received frames over the queues by a hash that it reports
    /// with each frame; see [`keep`](Self::keep) for the rest. Must be called again for a new back
    /// end.
    pub fn hash(&mut self) {
        self.goal = Goal::Hash;
        self.hashing.begin(matches!(self.pending, Some(Pending { about: About::Hash, .. })));
    }

    /// Whether received frames are spread by the hash.
    pub fn is_hashed(&self) -> bool {
        self.hashing.is_on
    }

    /// Requests that the back end keeps as many grants mapped as it allows. There are no responses
    /// before it is Connected. Then call [`step`](Self::step) or [`finish`](Self::finish).
    pub fn keep(&mut self) {
        self.goal = Goal::Keep;
    }

    /// Requests that it unmaps all static grants; see [`keep`](Self::keep) for the rest. Its limit
    /// is queried again before the next `keep`, because the back end may have changed.
    pub fn forget(&mut self) {
        self.goal = Goal::Forget;
        self.queues.iter_mut().for_each(|queue| queue.most = None);
    }

    /// Grants kept mapped so far.
    pub fn kept(&self) -> Kept {
        let sum = |of: fn(&Grants) -> usize| self.queues.iter().map(of).sum();
        Kept { grants: sum(|q| q.kept), of: sum(|q| q.wanted.len()), refusals: self.refusals }
    }

    /// Handles a response and sends the next request. Returns whether there are no more.
    ///
    /// # Errors
    /// [`Malformed`]: the ring must be abandoned.
    pub fn step(&mut self) -> Result<bool, Malformed> {
        if let Some(pending) = self.pending {
            let Some(response) = self.ring.take()? else { return Ok(false) };
            if (response.id, response.kind) != (pending.id, pending.kind) {
                return Err(Malformed::ResponseId(response.id));
            }
            self.pending = None;
            self.handle_response(pending, response);
        }
        match self.goal {
            Goal::Idle => {}
            Goal::Hash => self.hash_next(),
            Goal::Keep => self.keep_next(),
            Goal::Forget => self.forget_next(),
        }
        Ok(self.pending.is_none())
    }

    /// Runs all steps, sleeping in between; false: the back end takes longer than `limit`.
    ///
    /// # Errors
    /// [`Malformed`]: the ring must be abandoned.
    pub fn finish(&mut self, limit: Duration) -> Result<bool, Malformed> {
        let deadline = Instant::now() + limit;
        while !self.step()? {
            if self.ring.arm() != Armed::Armed {
                continue;
            }
            // Events without responses do not extend the limit.
            let wait = os::wait(self.channel.fd().as_fd(), Until::Readable, deadline);
            if !wait.unwrap_or(false) || Instant::now() >= deadline {
                return self.step();
            }
            self.channel.ack();
        }
        Ok(true)
    }

    fn handle_response(&mut self, pending: Pending, response: CtrlResponse) {
        let done = response.status == ctrl_status::SUCCESS;
        let (queue, entries) = match pending.about {
            About::Grants { queue, entries } => (&mut self.queues[queue], entries),
            About::Hash => {
                let continues = self.hashing.handle_response(done.then_some(response.data));
                self.refusals += u64::from(!continues);
                return;
            }
        };
        match pending.kind {
            // Unmapped now, even if the back end had not mapped them.
            ctrl_type::DEL_GREF_MAPPING => queue.kept -= entries,
            ctrl_type::ADD_GREF_MAPPING if done => queue.kept += entries,
            ctrl_type::GET_GREF_MAPPING_SIZE if done => {
                let most = usize::try_from(response.data).unwrap_or(usize::MAX);
                queue.most = Some(most.min(queue.wanted.len()));
            }
            _ => {
                self.refusals += 1;
                if self.goal == Goal::Keep {
                    self.goal = Goal::Idle;
                }
            }
        }
    }

    fn hash_next(&mut self) {
        let Some(Order { kind, data, page }) = self.hashing.next() else { return };
        let data = if page.is_empty() { [data, 0, 0] } else { [self.list(&page), data, 0] };
        self.send(kind, data, About::Hash);
    }

    fn keep_next(&mut self) {
        for number in 0..self.queues.len() {
            let Grants { most, kept, .. } = self.queues[number];
            match most {
                None => return self.send_of(ctrl_type::GET_GREF_MAPPING_SIZE, number, 0..0),
                Some(most) if kept < most => {
                    let to = most.min(kept + LIST_MAX);
                    return self.send_of(ctrl_type::ADD_GREF_MAPPING, number, kept..to);
                }
                Some(_) => {}
            }
        }
    }

    fn forget_next(&mut self) {
        if let Some(number) = self.queues.iter().position(|queue| queue.kept > 0) {
            let kept = self.queues[number].kept;
            let from = kept.saturating_sub(LIST_MAX);
            self.send_of(ctrl_type::DEL_GREF_MAPPING, number, from..kept);
        }
    }

    /// Sends a request about a queue; `list`: the range of its grants.
    fn send_of(&mut self, kind: u16, queue: usize, list: std::ops::Range<usize>) {
        let entries = list.len();
        let entry = |(gref, readonly): &(u32, bool)| {
            GrefEntry { gref: *gref, readonly: *readonly, status: 0 }.encode()
        };
        let bytes: Vec<u8> = self.queues[queue].wanted[list].iter().flat_map(entry).collect();
        let number = u32::try_from(queue).expect("queue numbers are small");
        let data = match u32::try_from(entries).expect("entries of a page") {
            0 => [number, 0, 0],
            entries => [number, self.list(&bytes), entries],
        };
        self.send(kind, data, About::Grants { queue, entries });
    }

    /// Writes these bytes to the page for lists, which is not in use. Returns its grant.
    fn list(&self, bytes: &[u8]) -> u32 {
        let len = u32::try_from(bytes.len()).expect("a page");
        let page = self.pages.memory.seg_mut(PAGE_LEN.into(), len, &mut 0);
        page.expect("our own page").write(bytes);
        self.pages.grefs[1]
    }

    fn send(&mut self, kind: u16, data: [u32; 3], about: About) {
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        let put = self.ring.put(CtrlRequest { id, kind, data });
        assert!(put, "one request at a time");
        self.pending = Some(Pending { id, kind, about });
        self.ring.publish();
        if self.ring.notify_needed() {
            self.channel.notify();
        }
    }
}

#[cfg(test)]
mod tests;
