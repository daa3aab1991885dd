//! Guests: an application that sends, and a driver half for each ring.

use std::collections::VecDeque;
use std::sync::Arc;

use ring::virtq::Armed;

use crate::finding::Finding;
use crate::flawed::Mistake;
use crate::frame::{FIXED_LEN, Frame, To, mac};
use crate::hypervisor::Hypervisor;
use crate::random::Random;
use switch::time::Ns;

pub(crate) mod tap;
pub(crate) mod virtio;
pub(crate) mod xen;

/// One of the two rings of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ring {
    /// Frames that the guest sends.
    Tx,
    /// Frames that it receives.
    Rx,
}

/// The switch's view of a guest at connection.
pub(crate) enum Link {
    Virtio(virtio::Link),
    Xen(xen::Link),
    Tap(tap::Link),
}

impl Link {
    /// Number of queue pairs.
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
    /// Fast, follows the protocol.
    Honest,
    /// Follows the protocol, but is many times slower until healed.
    Slow,
    /// Follows the protocol, but stops taking frames at some time, until healed.
    Stalled,
    /// Violates the protocol until healed.
    Hostile,
}

/// A guest's next action after a step.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Again,
    Sleep,
}

/// A kick: queue pair and ring.
pub(crate) type Kick = (usize, Ring);

/// Most queue pairs of a guest.
pub(crate) const PAIRS_MAX: u64 = 3;
/// Most bytes of a frame with its header.
pub(crate) const ROOM: u64 = 4096;
/// Longest header of a frame.
pub(crate) const HDR_MAX: usize = 12;

/// A violation by the switch that a driver half found.
pub(crate) enum Broken {
    /// A ring is corrupt and cannot be used any more.
    Ring(Ring),
    /// A frame or its header is invalid.
    Frame(String),
}

/// The driver halves of all rings of a guest.
pub(crate) trait Driver {
    /// Whether the switch needs a kick for what was published on a ring.
    fn kick_needed(&mut self, q: usize, ring: Ring) -> bool;
    /// Requests a call, and re-checks.
    fn arm(&mut self, q: usize, ring: Ring) -> Armed;
    /// Suppresses calls.
    fn disarm(&mut self, q: usize);
    /// Takes used transmit buffers. Returns the number of frames that are complete, and whether
    /// there were any buffers.
    fn collect_tx(&mut self, q: usize) -> Result<(u64, bool), Broken>;
    /// Takes up to `budget` received buffers; returns whether there were any. Complete frames go
    /// into `inbox`.
    fn collect_rx(
        &mut self,
        q: usize,
        budget: usize,
        inbox: &mut Vec<Vec<u8>>,
    ) -> Result<bool, Broken>;
    /// Posts receive buffers; returns whether it published any.
    fn refill(&mut self, q: usize) -> bool;
    /// Adds a frame, to be made visible by `publish`; false: there is no room.
    fn send(&mut self, q: usize, frame: &[u8], random: &mut Random) -> bool;
    fn publish(&mut self, q: usize);
    /// Whether there are received frames that it has not taken.
    fn has_received(&self, q: usize) -> bool;
    /// Notes whatever differs from an idle state: each difference, and whether there is one.
    fn unfinished(&self, q: usize, note: &mut dyn FnMut(bool, String));
    /// Whether there certainly is room to receive a frame of `len` bytes.
    fn has_room(&self, q: usize, len: u64) -> bool;
    /// (Hostile) sometimes violates the protocol.
    fn misbehave(&mut self, apps: &mut [App], random: &mut Random, kicks: &mut Vec<Kick>);
}

/// The application's part of a queue.
#[derive(Default)]
pub(crate) struct App {
    /// Published without a check whether to kick yet: transmit and receive ring.
    pub kick_due: [bool; 2],
    /// Frames to send, oldest first: destination and flow.
    outbox: VecDeque<(To, u16)>,
    /// Frames sent and not yet recorded in the ledger.
    pub log: Vec<Frame>,
    pub sent: u64,
    pub sent_bytes: u64,
    /// Frames whose transmit buffers were returned.
    pub returned: u64,
    /// Frames received and not yet recorded in the ledger, in order.
    pub inbox: Vec<Vec<u8>>,
    pub received: u64,
    pub received_bytes: u64,
}

/// What distinguishes a guest from the others.
#[derive(Clone, Copy)]
pub(crate) struct Role {
    pub attached: Attached,
    pub kind: Kind,
    /// It has little room to receive.
    pub few_buffers: bool,
}

pub(crate) struct Guest {
    pub kind: Kind,
    /// A secret in each of its frames.
    pub tag: u64,
    pub apps: Vec<App>,
    driver: Box<dyn Driver>,
    pub attached: Attached,
    pub healed: bool,
    /// Arms transmit rings only when it is out of buffers.
    pub lazy: bool,
    index: usize,
    number: u64,
    /// (Slow) factor by which it is slower.
    slowness: u64,
    /// Most payload of most of its frames.
    payload_max: u64,
    /// (Stalled) number of frames after which it stops taking them.
    stall_after: u64,
    arming: bool,
    mistake: Mistake,
    /// (Hostile) its own driver half has lost track of a ring.
    out_of_sync: bool,
}

impl Guest {
    /// Creates guest `index`.
    pub fn new(
        index: usize,
        role: Role,
        hypervisor: &Arc<Hypervisor>,
        mistake: Mistake,
        random: &mut Random,
    ) -> (Self, Link) {
        let Role { attached, kind, few_buffers } = role;
        let tag = random.bits();
        // Some hostile guests commit only violations for which their port is not stopped.
        let careful = tag & 3 == 0;
        let (driver, link): (Box<dyn Driver>, _) = match attached {
            Attached::Virtio => {
                let (driver, link) = virtio::new(index, careful, few_buffers, random);
                (Box::new(driver), Link::Virtio(link))
            }
            Attached::Xen => {
                let (driver, link) =
                    xen::new(index, careful, few_buffers, hypervisor, mistake, random);
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
            stall_after: random.within(0..100),
            arming: false,
            mistake,
            out_of_sync: false,
        };
        (guest, link)
    }

    pub fn is_honest(&self) -> bool {
        self.kind != Kind::Hostile
    }

    /// Random duration of a step.
    pub fn delay(&self, random: &mut Random) -> Ns {
        let factor = if self.kind == Kind::Slow && !self.healed { self.slowness } else { 1 };
        Ns::new(random.within(100..3000)) * factor
    }

    /// Queues `frames` frames of the application.
    pub fn enqueue(&mut self, to: To, flow: u16, frames: u64) {
        // A flow stays on one queue, as in any driver.
        let queues = self.apps.len();
        let app = &mut self.apps[usize::from(flow) % queues];
        app.outbox.extend((0..frames).map(|_| (to, flow)));
    }

    /// Wakes it.
    pub fn wake(&mut self) {
        self.arming = false;
    }

    /// Takes one step. Kicks go into `kicks`.
    ///
    /// # Errors
    /// [`Finding`]: the switch corrupted a ring or a frame.
    pub fn step(&mut self, random: &mut Random, kicks: &mut Vec<Kick>) -> Result<Next, Finding> {
        if !self.is_honest() {
            if self.healed {
                return Ok(Next::Sleep);
            }
            self.driver.misbehave(&mut self.apps, random, kicks);
            if self.out_of_sync {
                return Ok(Next::Again);
            }
        }
        // A step of its own: others may act between publishing and the check whether to kick.
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
            if !self.is_stalled() {
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

    fn is_stalled(&self) -> bool {
        let received: u64 = self.apps.iter().map(|app| app.received).sum();
        self.kind == Kind::Stalled && !self.healed && received >= self.stall_after
    }

    /// Kicks for one ring with new publications, if needed; false: there is no such ring.
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
        let stalled = self.is_stalled();
        let mut all = Armed::Armed;
        if self.mistake == Mistake::DriverNeverArms {
            return all;
        }
        for (q, app) in self.apps.iter().enumerate() {
            let waits = !self.lazy || self.healed || !app.outbox.is_empty();
            let pending = !stalled && self.driver.arm(q, Ring::Rx) == Armed::WorkPending
                || waits && self.driver.arm(q, Ring::Tx) == Armed::WorkPending;
            if pending {
                all = Armed::WorkPending;
            }
        }
        all
    }

    /// Handles a violation that its driver half found.
    fn handle_broken(&mut self, q: usize, what: Broken) -> Result<bool, Finding> {
        if self.is_honest() {
            let what = match what {
                Broken::Ring(ring) => {
                    format!("ring {ring:?} {q} of guest {} is broken", self.index)
                }
                Broken::Frame(what) => format!("guest {} received {what}", self.index),
            };
            return Err(Finding::Corrupt(what));
        }
        self.out_of_sync |= matches!(what, Broken::Ring(_));
        Ok(true)
    }

    /// Takes used transmit buffers.
    fn collect_tx(&mut self, q: usize) -> Result<bool, Finding> {
        match self.driver.collect_tx(q) {
            Ok((frames, busy)) => {
                self.apps[q].returned += frames;
                Ok(busy)
            }
            Err(broken) => self.handle_broken(q, broken),
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
        busy.or_else(|broken| self.handle_broken(q, broken))
    }

    /// Sends queued frames while there is room.
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

    /// Whether there are received frames for which it needs a call.
    pub fn waits_for_call(&self, q: usize) -> bool {
        !self.is_stalled() && self.driver.has_received(q)
    }

    /// Describes what is left; `None`: it is idle.
    pub fn unfinished(&self) -> Option<String> {
        let mut left = Vec::new();
        for (q, app) in self.apps.iter().enumerate() {
            let mut note = |differs: bool, what: String| {
                left.extend(differs.then(|| format!("{what} on queue {q}")));
            };
            note(!app.outbox.is_empty(), format!("{} frames not sent", app.outbox.len()));
            self.driver.unfinished(q, &mut note);
        }
        (!left.is_empty()).then(|| left.join(", "))
    }

    /// Whether it certainly has room to receive a frame of `len` bytes on queue `q`.
    pub fn has_room(&self, q: usize, len: u64) -> bool {
        self.driver.has_room(q, len)
    }
}

/// Returns a frame with forged addresses and type, and random contents.
fn forged_frame(index: usize, len: usize, random: &mut Random) -> Vec<u8> {
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
