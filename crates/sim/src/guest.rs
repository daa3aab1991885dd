//! Guests: an application that sends, and a driver half on each of their rings.

use std::collections::VecDeque;
use std::sync::Arc;

use ring::virtq::Armed;

use crate::finding::Finding;
use crate::flawed::Mistake;
use crate::frame::{FIXED_LEN, Frame, To, mac};
use crate::hypervisor::Hypervisor;
use crate::random::Random;

pub(crate) mod tap;
pub(crate) mod virtio;
pub(crate) mod xen;

/// One of the two rings of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ring {
    /// What the guest sends.
    Tx,
    /// What it receives.
    Rx,
}

/// What the switch learns of a guest when it connects.
pub(crate) enum Link {
    Virtio(virtio::Link),
    Xen(xen::Link),
    Tap(tap::Link),
}

impl Link {
    /// Queue pairs.
    pub fn queues(&self) -> usize {
        match self {
            Self::Virtio(link) => link.pairs.len(),
            Self::Xen(link) => link.queues.len(),
            Self::Tap(link) => link.queues.len(),
        }
    }
}

/// How a guest is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attached {
    Virtio,
    Xen,
    /// The host, behind a TAP.
    Tap,
}

/// How a guest behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Quick, and by the book.
    Honest,
    /// By the book, but many times slower, until healed.
    Slow,
    /// By the book, but takes no frames from some moment on, until healed.
    Deaf,
    /// Writes whatever it likes into its rings, until healed.
    Hostile,
}

/// What a guest does after a step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Again,
    Sleep,
}

/// A kick: which pair, which of its rings.
pub(crate) type Kick = (usize, Ring);

/// Most queue pairs of a guest.
pub(crate) const PAIRS_MAX: u64 = 3;
/// What no frame exceeds together with a header of its ring.
pub(crate) const ROOM: u64 = 4096;
/// The longest header of a ring.
pub(crate) const HDR_MAX: usize = 12;

/// What a driver half found broken.
pub(crate) enum Broken {
    /// A ring: it cannot be used any more.
    Ring(Ring),
    /// A frame that should not look like that.
    Frame(String),
}

/// A driver half on the rings of all queues of a guest.
pub(crate) trait Driver {
    /// Whether the switch wants to be kicked for what was published on a ring.
    fn kick_needed(&mut self, q: usize, ring: Ring) -> bool;
    /// Asks for a call, and looks again.
    fn arm(&mut self, q: usize, ring: Ring) -> Armed;
    /// Asks for no calls.
    fn disarm(&mut self, q: usize);
    /// Takes transmit buffers back: frames of which it has all, and whether there were any.
    fn collect_tx(&mut self, q: usize) -> Result<(u64, bool), Broken>;
    /// Takes up to `budget` buffers of received frames; whether there were any. Whole frames go
    /// into `inbox`.
    fn collect_rx(
        &mut self,
        q: usize,
        budget: usize,
        inbox: &mut Vec<Vec<u8>>,
    ) -> Result<bool, Broken>;
    /// Gives receive buffers out; whether it published any.
    fn refill(&mut self, q: usize) -> bool;
    /// Adds a frame, which is made known by `publish`; false: there is no room.
    fn send(&mut self, q: usize, frame: &[u8], random: &mut Random) -> bool;
    fn publish(&mut self, q: usize);
    /// Whether received frames wait that it has not looked at.
    fn has_received(&self, q: usize) -> bool;
    /// What is not as it is when nothing is under way.
    fn unfinished(&self, q: usize, note: &mut dyn FnMut(String));
    /// Whether there certainly is room for a frame of `len` bytes.
    fn has_room(&self, q: usize, len: u64) -> bool;
    /// (Hostile) breaks something, now and then.
    fn misbehave(&mut self, apps: &mut [App], random: &mut Random, kicks: &mut Vec<Kick>);
}

/// The application's part of a queue.
#[derive(Default)]
pub(crate) struct App {
    /// Published, and not yet looked whether a kick is wanted: transmit and receive ring.
    pub kick_due: [bool; 2],
    /// What the application wants sent, oldest first.
    outbox: VecDeque<(To, u16)>,
    /// Frames sent since the world last looked.
    pub log: Vec<Frame>,
    pub sent: u64,
    pub sent_bytes: u64,
    /// Transmit buffers that came back.
    pub returned: u64,
    /// What arrived since the world last looked, in order.
    pub inbox: Vec<Vec<u8>>,
    pub received: u64,
    pub received_bytes: u64,
}

pub(crate) struct Guest {
    pub kind: Kind,
    /// Its secret, in each of its frames.
    pub tag: u64,
    pub apps: Vec<App>,
    driver: Box<dyn Driver>,
    pub attached: Attached,
    pub healed: bool,
    /// Does not ask to be called when transmit buffers come back, unless it is out of them.
    pub lazy: bool,
    index: usize,
    number: u64,
    /// (Slow) how many times slower it is.
    slowness: u64,
    /// Most payload of its frames, but for few.
    payload_max: u64,
    /// (Deaf) frames it takes before it stops.
    hears: u64,
    arming: bool,
    mistake: Mistake,
    /// (Hostile) its own driver half has lost track.
    confused: bool,
}

impl Guest {
    /// `short`: of room for what it receives.
    pub fn new(
        index: usize,
        (attached, kind): (Attached, Kind),
        short: bool,
        hypervisor: &Arc<Hypervisor>,
        (mistake, random): (Mistake, &mut Random),
    ) -> (Self, Link) {
        let tag = random.bits();
        // Some are careful never to be stopped.
        let careful = tag & 3 == 0;
        let (driver, link): (Box<dyn Driver>, _) = match attached {
            Attached::Virtio => {
                let (driver, link) = virtio::new(index, careful, short, random);
                (Box::new(driver), Link::Virtio(link))
            }
            Attached::Xen => {
                let (driver, link) = xen::new(index, (careful, short), hypervisor, mistake, random);
                (Box::new(driver), Link::Xen(link))
            }
            Attached::Tap => {
                let (driver, link) = tap::new(random);
                (Box::new(driver), Link::Tap(link))
            }
        };
        let long = if attached == Attached::Tap { 3900 } else { 1430 };
        let guest = Self {
            kind,
            tag,
            apps: (0..link.queues()).map(|_| App::default()).collect(),
            driver,
            attached,
            healed: false,
            lazy: random.one_in(3),
            index,
            number: 0,
            slowness: [10, 30, 100][random.index(3)],
            payload_max: [50, 300, 1430, long][random.index(4)],
            hears: random.within(0..100),
            arming: false,
            mistake,
            confused: false,
        };
        (guest, link)
    }

    pub fn is_honest(&self) -> bool {
        self.kind != Kind::Hostile
    }

    /// How long a step takes, in ns.
    pub fn delay(&self, random: &mut Random) -> u64 {
        let factor = if self.kind == Kind::Slow && !self.healed { self.slowness } else { 1 };
        random.within(100..3000) * factor
    }

    /// The application wants `frames` frames sent.
    pub fn want(&mut self, to: To, flow: u16, frames: u64) {
        // A flow stays on one queue, as in any driver.
        let queues = self.apps.len();
        let app = &mut self.apps[usize::from(flow) % queues];
        app.outbox.extend((0..frames).map(|_| (to, flow)));
    }

    /// Something woke it.
    pub fn wake(&mut self) {
        self.arming = false;
    }

    /// One step. Kicks go into `kicks`.
    ///
    /// # Errors
    /// [`Finding`]: the switch broke a ring, or a header.
    pub fn step(&mut self, random: &mut Random, kicks: &mut Vec<Kick>) -> Result<Next, Finding> {
        if !self.is_honest() {
            if self.healed {
                return Ok(Next::Sleep);
            }
            self.driver.misbehave(&mut self.apps, random, kicks);
            if self.confused {
                return Ok(Next::Again);
            }
        }
        // Between publishing and looking whether a kick is wanted much may happen.
        if self.kick_one(kicks) {
            return Ok(Next::Again);
        }
        if self.arming {
            self.arming = false;
            if self.arm() == Armed::Armed && self.is_honest() {
                return Ok(Next::Sleep);
            }
            if random.one_in(2) {
                (0..self.apps.len()).for_each(|q| self.driver.disarm(q));
            }
            return Ok(Next::Again);
        }
        let mut busy = false;
        for q in 0..self.apps.len() {
            busy |= self.collect_tx(q)?;
            if !self.is_deaf() {
                busy |= self.collect_rx(q, random)?;
                if self.driver.refill(q) {
                    self.apps[q].kick_due[1] = true;
                    busy = true;
                }
            }
            busy |= self.send(q, random);
        }
        if random.one_in(2) {
            while self.kick_one(kicks) {}
        }
        self.arming = !busy;
        Ok(Next::Again)
    }

    fn is_deaf(&self) -> bool {
        let received: u64 = self.apps.iter().map(|app| app.received).sum();
        self.kind == Kind::Deaf && !self.healed && received >= self.hears
    }

    /// Kicks for one ring that it published something on, if that is wanted; false: for none.
    fn kick_one(&mut self, kicks: &mut Vec<Kick>) -> bool {
        for (q, app) in self.apps.iter_mut().enumerate() {
            for (ring, due) in [Ring::Tx, Ring::Rx].into_iter().zip(&mut app.kick_due) {
                if std::mem::take(due) {
                    if self.driver.kick_needed(q, ring) {
                        kicks.push((q, ring));
                    }
                    return true;
                }
            }
        }
        false
    }

    fn arm(&mut self) -> Armed {
        let deaf = self.is_deaf();
        let mut all = Armed::Armed;
        if self.mistake == Mistake::DriverNeverArms {
            return all;
        }
        for (q, app) in self.apps.iter().enumerate() {
            let waits = !self.lazy || self.healed || !app.outbox.is_empty();
            let pending = !deaf && self.driver.arm(q, Ring::Rx) == Armed::WorkPending
                || waits && self.driver.arm(q, Ring::Tx) == Armed::WorkPending;
            if pending {
                all = Armed::WorkPending;
            }
        }
        all
    }

    /// Its driver half says that the switch broke something.
    fn broken(&mut self, q: usize, what: Broken) -> Result<bool, Finding> {
        if self.is_honest() {
            let what = match what {
                Broken::Ring(ring) => {
                    format!("ring {ring:?} {q} of guest {} is broken", self.index)
                }
                Broken::Frame(what) => format!("guest {} got {what}", self.index),
            };
            return Err(Finding::Corrupt(what));
        }
        self.confused |= matches!(what, Broken::Ring(_));
        Ok(true)
    }

    /// Takes transmit buffers back.
    fn collect_tx(&mut self, q: usize) -> Result<bool, Finding> {
        match self.driver.collect_tx(q) {
            Ok((frames, busy)) => {
                self.apps[q].returned += frames;
                Ok(busy)
            }
            Err(broken) => self.broken(q, broken),
        }
    }

    /// Takes received frames.
    fn collect_rx(&mut self, q: usize, random: &mut Random) -> Result<bool, Finding> {
        let budget = random.within(1..9) as usize;
        let app = &mut self.apps[q];
        let before = app.inbox.len();
        let busy = self.driver.collect_rx(q, budget, &mut app.inbox);
        for frame in &app.inbox[before..] {
            app.received += 1;
            app.received_bytes += frame.len() as u64;
        }
        busy.or_else(|broken| self.broken(q, broken))
    }

    /// Sends what the application wants sent, as far as there is room.
    fn send(&mut self, q: usize, random: &mut Random) -> bool {
        let app = &mut self.apps[q];
        let mut busy = false;
        while let Some(&(to, flow)) = app.outbox.front() {
            let room = ROOM as usize - HDR_MAX - FIXED_LEN;
            let max = if random.one_in(8) { room as u64 } else { self.payload_max };
            let payload = random.within(0..max) as usize;
            let (from, tag, number) = (self.index, self.tag, self.number);
            let frame = Frame { to, from, flow, tag, number, payload };
            let bytes = frame.bytes();
            if !self.driver.send(q, &bytes, random) {
                break;
            }
            app.outbox.pop_front();
            app.log.push(frame);
            self.number += 1;
            app.sent += 1;
            app.sent_bytes += bytes.len() as u64;
            busy = true;
        }
        if busy {
            self.driver.publish(q);
            app.kick_due[0] = true;
        }
        busy
    }

    /// Whether received frames wait that it has not looked at, and that it asked to be told of.
    pub fn waits_for_call(&self, q: usize) -> bool {
        !self.is_deaf() && self.driver.has_received(q)
    }

    /// What it still waits for; `None` when it has everything back.
    pub fn unfinished(&self) -> Option<String> {
        let mut left = Vec::new();
        for (q, app) in self.apps.iter().enumerate() {
            let mut note = |what: String| left.push(format!("{what} on queue {q}"));
            if !app.outbox.is_empty() {
                note(format!("{} frames not sent", app.outbox.len()));
            }
            self.driver.unfinished(q, &mut note);
        }
        (!left.is_empty()).then(|| left.join(", "))
    }

    /// Whether it certainly has room for a frame of `len` bytes on queue `q`.
    pub fn has_room(&self, q: usize, len: u64) -> bool {
        self.driver.has_room(q, len)
    }
}

/// A frame that lies about its sender, its type and its contents.
fn lie(index: usize, len: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len).map(|_| random.bits() as u8).collect();
    let mut address = || match random.within(0..8) {
        0 => [0; 6],
        1 => [0xff; 6],
        2 => [1, 0x80, 0xc2, 0, 0, random.within(0..32) as u8],
        3 => mac(index),
        4 => random.bits().to_le_bytes()[..6].try_into().expect("6 bytes"),
        _ => mac(random.within(0..6) as usize),
    };
    let kinds: [u16; 4] = [0x0800, 0x86dd, 0x8100, 0x88a8];
    let start = [&address()[..], &address(), &kinds[random.index(4)].to_be_bytes()].concat();
    let n = len.min(start.len());
    bytes[..n].copy_from_slice(&start[..n]);
    bytes
}
