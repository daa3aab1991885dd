//! The control ring of a vif, and what is asked for over it: static grants, and a hash.
//!
//! ```text
//!   hash:    algorithm ──▶ key ──▶ table... (`hash`)
//!   keep:    how many of queue 0? ──▶ list, list... ──▶ how many of queue 1? ──▶ ...
//!   forget:  list, list... of queue 0 ──▶ list, list... of queue 1 ──▶ ...
//! ```
//! Each request waits for the answer to the one before it: there is one page for lists, and it is
//! the back end's until it answers. A back end that refuses is asked for no more; what it does not
//! keep mapped it copies by grant as ever. Its answers are believed as far as they cost nothing:
//! that it let go of a page ends no grant, its memory does.

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

/// Most entries of one list: a page's.
const LIST_MAX: usize = PAGE_LEN as usize / GREF_ENTRY_LEN;

/// The grants of one queue's pages.
#[derive(Debug, Default)]
pub(super) struct Grants {
    /// All that may stay mapped, (reference, readonly), the most useful first.
    wanted: Vec<(u32, bool)>,
    /// How many of them the back end would keep, once it said so.
    most: Option<usize>,
    /// How many it keeps, from the first on.
    kept: usize,
}

impl Grants {
    /// Of transmit buffers of `each` pages, which are for reading only, and of rx pages. First
    /// those that every frame is in.
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

/// What a back end keeps mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// So many grants.
    pub grants: usize,
    /// Of so many.
    pub of: usize,
    /// Requests that it refused.
    pub refusals: u64,
}

/// A request that was not answered yet.
#[derive(Clone, Copy, Debug)]
struct Asked {
    id: u16,
    kind: u16,
    about: About,
}

/// What a request is about.
#[derive(Clone, Copy, Debug)]
enum About {
    /// A list of so many grants of a queue.
    Grants {
        queue: usize,
        entries: usize,
    },
    Hash,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    /// Nothing more is asked.
    Rest,
    /// What we receive is to be spread by a hash.
    Hash,
    /// Grants are to stay mapped.
    Keep,
    /// None is.
    Forget,
}

/// A vif's control ring.
pub struct Ctrl {
    ring: FrontCtrl,
    /// The ring, and the list.
    pages: Pages,
    channel: Channel,
    queues: Vec<Grants>,
    hashing: Hashing,
    asked: Option<Asked>,
    next_id: u16,
    goal: Goal,
    refusals: u64,
}

impl Ctrl {
    /// A fresh ring for queues with these grants, and its keys.
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
        let (asked, goal, next_id, refusals) = (None, Goal::Rest, 0, 0);
        let hashing = Hashing::new(u32::try_from(queues.len()).unwrap_or(u32::MAX).max(1));
        let ctrl = Self { ring, pages, channel, queues, hashing, asked, next_id, goal, refusals };
        Ok((ctrl, CtrlKeys { ring_ref, port }))
    }

    /// The pages, which the back end may have mapped.
    pub(super) fn into_pages(self) -> Pages {
        self.pages
    }

    /// Has the back end spread what we receive over the queues by a hash that it tells with each
    /// frame, as far as it can; otherwise as [`keep`](Self::keep). Another back end is to
    /// be asked again.
    pub fn hash(&mut self) {
        self.goal = Goal::Hash;
        self.hashing.begin(matches!(self.asked, Some(Asked { about: About::Hash, .. })));
    }

    /// Whether it does.
    pub fn is_hashed(&self) -> bool {
        self.hashing.is_on
    }

    /// Has the back end keep as many grants mapped as it would. Before it is Connected it answers
    /// nothing. To be followed by [`step`](Self::step) or [`finish`](Self::finish).
    pub fn keep(&mut self) {
        self.goal = Goal::Keep;
    }

    /// Has it let go of all that it keeps; otherwise as [`keep`](Self::keep). How many it would
    /// keep is asked again before it is to keep any: it may be another one by then.
    pub fn forget(&mut self) {
        self.goal = Goal::Forget;
        self.queues.iter_mut().for_each(|queue| queue.most = None);
    }

    /// What it keeps by now.
    pub fn kept(&self) -> Kept {
        let sum = |of: fn(&Grants) -> usize| self.queues.iter().map(of).sum();
        Kept { grants: sum(|q| q.kept), of: sum(|q| q.wanted.len()), refusals: self.refusals }
    }

    /// Takes an answer and asks what is next; whether there is nothing more to ask.
    ///
    /// # Errors
    /// [`Malformed`]: the ring is to be abandoned.
    pub fn step(&mut self) -> Result<bool, Malformed> {
        if let Some(asked) = self.asked {
            let Some(answer) = self.ring.take()? else { return Ok(false) };
            if (answer.id, answer.kind) != (asked.id, asked.kind) {
                return Err(Malformed::ResponseId(answer.id));
            }
            self.asked = None;
            self.hear(asked, answer);
        }
        match self.goal {
            Goal::Rest => {}
            Goal::Hash => self.hash_next(),
            Goal::Keep => self.keep_next(),
            Goal::Forget => self.forget_next(),
        }
        Ok(self.asked.is_none())
    }

    /// Goes all the way, sleeping in between; false: the back end takes longer than `limit`.
    ///
    /// # Errors
    /// [`Malformed`]: the ring is to be abandoned.
    pub fn finish(&mut self, limit: Duration) -> Result<bool, Malformed> {
        let deadline = Instant::now() + limit;
        while !self.step()? {
            if self.ring.arm() != Armed::Armed {
                continue;
            }
            // Events without answers are no reason to wait longer.
            let wait = os::wait(self.channel.fd().as_fd(), Until::Readable, deadline);
            if !wait.unwrap_or(false) || Instant::now() >= deadline {
                return self.step();
            }
            self.channel.ack();
        }
        Ok(true)
    }

    fn hear(&mut self, asked: Asked, answer: CtrlResponse) {
        let done = answer.status == ctrl_status::SUCCESS;
        let (queue, entries) = match asked.about {
            About::Grants { queue, entries } => (&mut self.queues[queue], entries),
            About::Hash => {
                let goes_on = self.hashing.hear(done.then_some(answer.data));
                self.refusals += u64::from(!goes_on);
                return;
            }
        };
        match asked.kind {
            // Whether it knew of them or not: it was told.
            ctrl_type::DEL_GREF_MAPPING => queue.kept -= entries,
            ctrl_type::ADD_GREF_MAPPING if done => queue.kept += entries,
            ctrl_type::GET_GREF_MAPPING_SIZE if done => {
                let most = usize::try_from(answer.data).unwrap_or(usize::MAX);
                queue.most = Some(most.min(queue.wanted.len()));
            }
            _ => {
                self.refusals += 1;
                if self.goal == Goal::Keep {
                    self.goal = Goal::Rest;
                }
            }
        }
    }

    fn hash_next(&mut self) {
        let Some(Order { kind, data, page }) = self.hashing.next() else { return };
        let data = if page.is_empty() { [data, 0, 0] } else { [self.list(&page), data, 0] };
        self.ask(kind, data, About::Hash);
    }

    fn keep_next(&mut self) {
        for number in 0..self.queues.len() {
            let Grants { most, kept, .. } = self.queues[number];
            match most {
                None => return self.ask_of(ctrl_type::GET_GREF_MAPPING_SIZE, number, 0..0),
                Some(most) if kept < most => {
                    let to = most.min(kept + LIST_MAX);
                    return self.ask_of(ctrl_type::ADD_GREF_MAPPING, number, kept..to);
                }
                Some(_) => {}
            }
        }
    }

    fn forget_next(&mut self) {
        if let Some(number) = self.queues.iter().position(|queue| queue.kept > 0) {
            let kept = self.queues[number].kept;
            let from = kept.saturating_sub(LIST_MAX);
            self.ask_of(ctrl_type::DEL_GREF_MAPPING, number, from..kept);
        }
    }

    /// Asks something of a queue; `list`: which of its grants it is about.
    fn ask_of(&mut self, kind: u16, queue: usize, list: std::ops::Range<usize>) {
        let entries = list.len();
        let entry = |(gref, readonly): &(u32, bool)| {
            GrefEntry { gref: *gref, readonly: *readonly, status: 0 }.encode()
        };
        let bytes: Vec<u8> = self.queues[queue].wanted[list].iter().flat_map(entry).collect();
        let number = u32::try_from(queue).expect("a vif has few queues");
        let data = match u32::try_from(entries).expect("a page's") {
            0 => [number, 0, 0],
            entries => [number, self.list(&bytes), entries],
        };
        self.ask(kind, data, About::Grants { queue, entries });
    }

    /// Puts these bytes into the page for lists, which is nobody's now; its grant.
    fn list(&self, bytes: &[u8]) -> u32 {
        let len = u32::try_from(bytes.len()).expect("a page");
        let page = self.pages.memory.seg_mut(PAGE_LEN.into(), len, &mut 0);
        page.expect("a page of our own").write(bytes);
        self.pages.grefs[1]
    }

    fn ask(&mut self, kind: u16, data: [u32; 3], about: About) {
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        let put = self.ring.put(CtrlRequest { id, kind, data });
        assert!(put, "one request at a time");
        self.asked = Some(Asked { id, kind, about });
        self.ring.publish();
        if self.ring.notify_needed() {
            self.channel.notify();
        }
    }
}

#[cfg(test)]
mod tests;
