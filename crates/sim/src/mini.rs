//! A small back-end: one worker, burst by burst, holds a frame for a full guest for a while.

use std::sync::Arc;

use ring::virtq::{Armed, Buf, DeviceQueue, Malformed, Taken};
use shm::{GuestMemory, Seg};

use crate::frame::{HDR_LEN, ROOM, destination};
use crate::guest::{Link, Ring};
use crate::{Backend, Count, Turn};

/// How long a frame waits for room in its destination, in ns.
const HOLD_NS: u64 = 50_000;
/// Chains per turn.
const BURST: usize = 4;

/// A mistake to make on purpose; the simulation must notice each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// None.
    None,
    /// Arms and does not look again.
    NeverRechecks,
    /// Does not call when buffers come back.
    ForgetsCalls,
    /// Delivers the second frame of a burst before the first.
    Reorders,
    /// Drops now and then, and tells no one.
    DropsUncounted,
    /// Delivers one wrong byte now and then.
    Corrupts,
    /// Stops the sender when the destination breaks the protocol.
    BlamesSender,
    /// Never sleeps.
    NeverSleeps,
}

/// A back-end with as little in it as the simulation needs.
pub struct Mini {
    ports: Vec<Port>,
    bug: Bug,
    state: State,
    taken: Taken,
    room: Taken,
    /// Frames seen so far; spaces the bugs out.
    seen: u64,
}

enum State {
    /// Looks at port `at` next; `found`: something was done in this round.
    Poll {
        at: usize,
        found: bool,
    },
    Arm,
}

struct Port {
    memory: Arc<GuestMemory>,
    tx: DeviceQueue,
    rx: DeviceQueue,
    /// Its next frame waits for room at another port, since when.
    blocked: Option<(usize, u64)>,
    count: Count,
}

enum Delivery {
    Done,
    Full,
    Dropped,
}

impl Mini {
    /// Serves `links`, making the mistake `bug`.
    pub fn new(links: &[Link], bug: Bug) -> Self {
        let port = |link: &Link| {
            let half = |(layout, base)| {
                DeviceQueue::new(&link.memory, &layout, link.features, base).expect("legal layout")
            };
            Port {
                memory: Arc::clone(&link.memory),
                tx: half(link.tx),
                rx: half(link.rx),
                blocked: None,
                count: Count::default(),
            }
        };
        Self {
            ports: links.iter().map(port).collect(),
            bug,
            state: State::Poll { at: 0, found: false },
            taken: Taken::with_capacity(BURST, 64),
            room: Taken::with_capacity(1, 64),
            seen: 0,
        }
    }

    /// Whether a bug strikes at the frame at hand.
    fn strikes(&self, bug: Bug) -> bool {
        self.bug == bug && self.seen.is_multiple_of(7)
    }

    fn stop(&mut self, port: usize, fault: Malformed) {
        self.ports[port].count.fault.get_or_insert(fault.to_string());
    }

    /// Serves port `from` once; true when there was something to do.
    fn serve(&mut self, from: usize, now_ns: u64, calls: &mut Vec<(usize, Ring)>) -> bool {
        if self.ports[from].count.fault.is_some() {
            return false;
        }
        let mut taken = std::mem::replace(&mut self.taken, Taken::with_capacity(0, 0));
        let port = &mut self.ports[from];
        let memory = Arc::clone(&port.memory);
        let max = if port.blocked.is_some() { 1 } else { BURST };
        let busy = match port.tx.take(&memory, max, &mut taken) {
            Ok(0) => {
                // A hostile guest may take a frame back that we hold for want of room.
                port.blocked = None;
                false
            }
            Ok(_) => self.burst(from, now_ns, &memory, &mut taken, calls),
            Err(fault) => {
                self.stop(from, fault);
                true
            }
        };
        self.taken = taken;
        busy
    }

    /// Forwards a burst of port `from`; true when any of it moved.
    fn burst(
        &mut self,
        from: usize,
        now_ns: u64,
        memory: &GuestMemory,
        taken: &mut Taken,
        calls: &mut Vec<(usize, Ring)>,
    ) -> bool {
        if self.bug == Bug::Reorders && taken.chains.len() > 1 {
            taken.chains.swap(0, 1);
        }
        let mut touched = Vec::new();
        let mut moved = 0;
        for chain in &taken.chains {
            self.seen += 1;
            let bytes = gather(memory, taken.reads(chain));
            let to = bytes.as_ref().and_then(|b| destination(&b[HDR_LEN..]));
            let to = to.filter(|to| *to < self.ports.len() && *to != from);
            let outcome = match (bytes, to) {
                (Some(bytes), Some(to)) => self.deliver(from, to, &bytes, &mut touched),
                _ => Delivery::Dropped,
            };
            match outcome {
                Delivery::Full if !self.gave_up(from, to, now_ns) => break,
                Delivery::Done => self.ports[from].count.forwarded += 1,
                _ if self.bug == Bug::DropsUncounted => {}
                _ => self.ports[from].count.dropped += 1,
            }
            let port = &mut self.ports[from];
            port.count.taken += 1;
            port.blocked = None;
            port.tx.put(chain, 0);
            moved += 1;
        }
        let port = &mut self.ports[from];
        port.tx.untake(&taken.chains[moved..]);
        port.tx.publish();
        if port.tx.call_needed() && self.bug != Bug::ForgetsCalls {
            calls.push((from, Ring::Tx));
        }
        for to in touched {
            let port = &mut self.ports[to];
            port.rx.publish();
            if port.rx.call_needed() && self.bug != Bug::ForgetsCalls {
                calls.push((to, Ring::Rx));
            }
        }
        moved > 0
    }

    /// Whether the frame that waits for `to` has waited for too long; notes since when it waits.
    fn gave_up(&mut self, from: usize, to: Option<usize>, now_ns: u64) -> bool {
        let to = to.expect("only a known destination is full");
        let (_, since) = *self.ports[from].blocked.get_or_insert((to, now_ns));
        now_ns >= since + HOLD_NS
    }

    /// Copies one frame into the receive ring of port `to`.
    fn deliver(
        &mut self,
        from: usize,
        to: usize,
        bytes: &[u8],
        touched: &mut Vec<usize>,
    ) -> Delivery {
        if self.strikes(Bug::DropsUncounted) || self.ports[to].count.fault.is_some() {
            return Delivery::Dropped;
        }
        let wrong = self.strikes(Bug::Corrupts);
        let port = &mut self.ports[to];
        let chain = match port.rx.take(&port.memory, 1, &mut self.room) {
            Ok(0) => return Delivery::Full,
            Ok(_) => self.room.chains[0],
            Err(fault) => {
                let guilty = if self.bug == Bug::BlamesSender { from } else { to };
                self.stop(guilty, fault);
                return Delivery::Dropped;
            }
        };
        if !scatter(&port.memory, self.room.writes(&chain), bytes, wrong) {
            port.rx.untake(&[chain]);
            return Delivery::Dropped;
        }
        port.rx.put(&chain, bytes.len() as u32);
        port.count.delivered += 1;
        if !touched.contains(&to) {
            touched.push(to);
        }
        Delivery::Done
    }

    /// Asks for kicks wherever something may come; true when all is quiet.
    fn arm(&mut self) -> bool {
        let mut quiet = true;
        for i in 0..self.ports.len() {
            if self.ports[i].count.fault.is_some() {
                continue;
            }
            let waits_for = match self.ports[i].blocked {
                None => &mut self.ports[i].tx,
                Some((to, _)) if self.ports[to].count.fault.is_some() => return false,
                Some((to, _)) => &mut self.ports[to].rx,
            };
            quiet &= waits_for.arm() == Armed::Armed;
        }
        quiet || self.bug == Bug::NeverRechecks
    }
}

impl Backend for Mini {
    fn wake(&mut self) {
        for port in &mut self.ports {
            port.tx.disarm();
            port.rx.disarm();
        }
        self.state = State::Poll { at: 0, found: false };
    }

    fn turn(&mut self, now_ns: u64, calls: &mut Vec<(usize, Ring)>) -> Turn {
        match self.state {
            State::Poll { at, found } if at < self.ports.len() => {
                let found = self.serve(at, now_ns, calls) || found;
                self.state = State::Poll { at: at + 1, found };
            }
            State::Poll { found, .. } => {
                let again = found || self.bug == Bug::NeverSleeps;
                self.state = if again { State::Poll { at: 0, found: false } } else { State::Arm };
            }
            State::Arm => {
                if self.arm() {
                    let live = self.ports.iter().filter(|p| p.count.fault.is_none());
                    let until = live.filter_map(|p| p.blocked).map(|(_, since)| since + HOLD_NS);
                    return Turn::Sleep(until.min());
                }
                self.wake();
            }
        }
        Turn::Again
    }

    fn count(&self, guest: usize) -> Count {
        self.ports[guest].count.clone()
    }
}

/// The bytes of a chain; `None` when they lie outside memory or make no frame.
fn gather(memory: &GuestMemory, bufs: &[Buf]) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    for buf in bufs {
        let seg = memory.seg(buf.addr, buf.len, &mut 0)?;
        let at = bytes.len();
        bytes.resize(at + (buf.len as usize).min(ROOM), 0);
        seg.read(&mut bytes[at..]);
        if bytes.len() > ROOM {
            return None;
        }
    }
    (bytes.len() >= HDR_LEN + 14).then_some(bytes)
}

/// Writes a frame into a chain; false when it does not fit, or the chain lies outside memory.
fn scatter(memory: &GuestMemory, bufs: &[Buf], bytes: &[u8], wrong: bool) -> bool {
    let mut bytes = bytes.to_vec();
    if wrong {
        *bytes.last_mut().expect("a frame") ^= 1;
    }
    let mut left = Seg::of(&bytes);
    for buf in bufs {
        let Some(mut to) = memory.seg_mut(buf.addr, buf.len, &mut 0) else {
            return false;
        };
        let n = to.copy_from(left);
        left = left.skip(n);
    }
    left.is_empty()
}
