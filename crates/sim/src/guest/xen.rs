//! A Xen guest: the front halves of its rings, and the pages that it grants.
//!
//! Each buffer is granted from its request to its response, with a reference that is not reused, so
//! that any earlier or later access finds no grant.

use std::collections::BTreeMap;
use std::sync::Arc;

use ring::virtq::Armed;
use ring::xen::{
    FrontRx, FrontTx, PAGE_LEN, RX_SLOT_LEN, RxPacket, RxRefusal, RxRequest, TX_SLOT_LEN,
    TxRequest, status,
};
use shm::{Area, Domain, Mapping};
use xen_netif::port::{Peer, Rate};

use super::{App, Broken, Driver, Kick, PAIRS_MAX, ROOM, Ring};
use crate::flawed::Mistake;
use crate::hypervisor::{Channel, Hypervisor};
use crate::random::Random;
use switch::time::Ns;

mod hostile;

/// The switch's view of such a guest.
pub(crate) struct Link {
    pub domain: Arc<Domain>,
    pub peer: Peer,
    pub rate: Option<Rate>,
    pub mtu: u16,
    /// For each queue, the page and event channel of the tx ring and of the rx ring.
    pub queues: Vec<[(Area, Arc<Channel>); 2]>,
}

/// Offset of the first slot of a ring; the indices precede it.
const SLOTS_AT: usize = 64;
const PAGE: usize = PAGE_LEN as usize;
/// Buffer pages per ring.
const PAGES: usize = 64;
/// Period of a rate limit, and most bytes per period.
pub(crate) const RATE: Ns = Ns::from_ms(1);
const RATE_BYTES: u64 = 200_000;

/// A transmit buffer in flight: page, grant, and number of its frame.
struct Sent {
    page: usize,
    gref: u32,
    frame: u64,
}

struct Queue {
    tx: FrontTx,
    rx: FrontRx,
    /// Pages of both rings, for violations.
    areas: [Area; 2],
    /// Free transmit pages, and free request ids.
    tx_idle: Vec<usize>,
    tx_ids: Vec<u16>,
    tx_flight: BTreeMap<u16, Sent>,
    /// For each frame in flight, the number of responses that are missing.
    awaited: BTreeMap<u64, usize>,
    frames: u64,
    rx_idle: Vec<usize>,
    /// Pages posted, by grant.
    rx_flight: BTreeMap<u32, usize>,
    packet: RxPacket,
}

pub(crate) struct Xen {
    index: usize,
    domid: u16,
    hypervisor: Arc<Hypervisor>,
    memory: Arc<Mapping>,
    queues: Vec<Queue>,
    next_gref: u32,
    careful: bool,
    mistake: Mistake,
    /// Most slots of a frame.
    tx_slots_max: usize,
    /// Number of idle receive buffers from which they are posted, and most posted in one step.
    rx_batch: usize,
    rx_refill_max: usize,
}

/// Creates a ring's page with a random number of slots: small rings fill up and wrap often.
fn area(slot_len: usize, random: &mut Random) -> Area {
    let page = Arc::new(Mapping::memfd("ring", u64::from(PAGE_LEN)).expect("a page"));
    let slots = 1 << random.within(0..7);
    Area::of(&page, 0, SLOTS_AT + slots * slot_len).expect("within the page")
}

/// Creates guest `index`; `few_buffers`: with little room to receive.
pub(crate) fn new(
    index: usize,
    careful: bool,
    few_buffers: bool,
    hypervisor: &Arc<Hypervisor>,
    mistake: Mistake,
    random: &mut Random,
) -> (Xen, Link) {
    let count = random.within(1..PAIRS_MAX + 1) as usize;
    let memory = Mapping::memfd("sim", (2 * count * PAGES * PAGE) as u64);
    let memory = Arc::new(memory.expect("memory for a guest"));
    let queues: Vec<Queue> = (0..count).map(|q| Queue::new(q, few_buffers, random)).collect();
    let link = Link {
        domain: hypervisor.domain(index as u16),
        peer: Peer {
            sg: random.one_in(2),
            csum4: random.one_in(2),
            csum6: random.one_in(2),
            rx_notify: !random.one_in(8),
            ..Peer::default()
        },
        rate: random.one_in(6).then(|| Rate {
            bytes: random.within(RATE_BYTES / 4..RATE_BYTES),
            usecs: RATE.times(Ns::from_us(1)),
        }),
        mtu: if random.one_in(4) { 1500 } else { 0 },
        queues: queues
            .iter()
            .map(|queue| queue.areas.clone().map(|area| (area, hypervisor.channel())))
            .collect(),
    };
    let guest = Xen {
        index,
        domid: index as u16,
        hypervisor: Arc::clone(hypervisor),
        memory,
        queues,
        next_gref: random.within(8..1000) as u32,
        careful,
        mistake,
        tx_slots_max: random.within(1..5) as usize,
        rx_batch: random.within(1..9) as usize,
        rx_refill_max: match random.within(0..4) {
            0 | 1 if !few_buffers => usize::MAX,
            n => n as usize % 2 + 1,
        },
    };
    (guest, link)
}

impl Queue {
    fn new(q: usize, few_buffers: bool, random: &mut Random) -> Self {
        let areas = [area(TX_SLOT_LEN, random), area(RX_SLOT_LEN, random)];
        // Starts before and after the wrap.
        let mut start = || (random.within(0..8) as u32).wrapping_sub(5);
        let tx = FrontTx::starting_at(areas[0].clone(), start());
        let rx = FrontRx::starting_at(areas[1].clone(), start());
        let most = if few_buffers { 4 } else { PAGES };
        let rx_pages = most.min(rx.size() as usize);
        let first = 2 * q * PAGES;
        Self {
            tx_idle: (first..first + PAGES).collect(),
            tx_ids: (0..tx.size() as u16).collect(),
            tx_flight: BTreeMap::new(),
            awaited: BTreeMap::new(),
            frames: 0,
            rx_idle: (first + PAGES..first + PAGES + rx_pages).collect(),
            rx_flight: BTreeMap::new(),
            packet: RxPacket::new(),
            tx,
            rx,
            areas,
        }
    }
}

impl Xen {
    fn grant(&mut self, page: usize, readonly: bool) -> u32 {
        let gref = self.next_gref;
        self.next_gref += 1;
        self.hypervisor.grant((self.domid, gref), &self.memory, page * PAGE, readonly);
        gref
    }

    fn revoke(&self, gref: u32) {
        self.hypervisor.revoke((self.domid, gref));
    }

    /// Reads the frame in the slots of `packet`.
    fn read(&self, packet: &RxPacket) -> Vec<u8> {
        let mut bytes = Vec::new();
        for slot in &packet.slots {
            let page = usize::from(slot.request.id) * PAGE + usize::from(slot.offset);
            let at = bytes.len();
            bytes.resize(at + usize::from(slot.len), 0);
            let seg = self.memory.seg(page, slot.len.into()).expect("a page of its own");
            seg.read(&mut bytes[at..]);
        }
        bytes
    }
}

impl Driver for Xen {
    fn kick_needed(&mut self, q: usize, ring: Ring) -> bool {
        match ring {
            Ring::Tx => self.queues[q].tx.notify_needed(),
            Ring::Rx => self.queues[q].rx.notify_needed(),
        }
    }

    fn arm(&mut self, q: usize, ring: Ring) -> Armed {
        let queue = &mut self.queues[q];
        match ring {
            Ring::Rx if self.mistake == Mistake::XenForgetsRspEvent => {
                if queue.rx.has_responses() {
                    Armed::WorkPending
                } else {
                    Armed::Armed
                }
            }
            Ring::Tx => queue.tx.arm(),
            Ring::Rx => queue.rx.arm(),
        }
    }

    fn disarm(&mut self, q: usize) {
        self.queues[q].rx.disarm();
        self.queues[q].tx.disarm();
    }

    fn collect_tx(&mut self, q: usize) -> Result<(u64, bool), Broken> {
        let (mut frames, mut busy) = (0, false);
        loop {
            let queue = &mut self.queues[q];
            let response = queue.tx.take_response().map_err(|_| Broken::Ring(Ring::Tx))?;
            let Some(response) = response else { return Ok((frames, busy)) };
            busy = true;
            let Some(Sent { page, gref, frame }) = queue.tx_flight.remove(&response.id) else {
                continue;
            };
            queue.tx_ids.push(response.id);
            queue.tx_idle.push(page);
            let left = queue.awaited.get_mut(&frame).expect("a frame in flight");
            *left -= 1;
            if *left == 0 {
                queue.awaited.remove(&frame);
                frames += 1;
            }
            self.revoke(gref);
            if response.status != status::OKAY {
                let what = format!("status {} for a frame sent", response.status);
                return Err(Broken::Frame(what));
            }
        }
    }

    fn collect_rx(
        &mut self,
        q: usize,
        budget: usize,
        inbox: &mut Vec<Vec<u8>>,
    ) -> Result<bool, Broken> {
        let mut busy = false;
        for _ in 0..budget {
            let queue = &mut self.queues[q];
            let mut packet = std::mem::take(&mut queue.packet);
            let taken = queue.rx.take(&mut packet);
            let bytes = self.read(&packet);
            let done = packet.slots.drain(..).map(|slot| slot.request);
            let done: Vec<RxRequest> = done.chain(packet.spare.drain(..)).collect();
            let queue = &mut self.queues[q];
            queue.packet = packet;
            let Some(verdict) = taken.map_err(|_| Broken::Ring(Ring::Rx))? else { break };
            busy = true;
            for RxRequest { gref, .. } in done {
                self.revoke(gref);
                let queue = &mut self.queues[q];
                queue.rx_idle.extend(queue.rx_flight.remove(&gref));
            }
            match verdict {
                Ok(()) => inbox.push(bytes),
                // The sender revoked the grant of the frame meanwhile.
                Err(RxRefusal::Status(status::ERROR)) => {}
                Err(why) => return Err(Broken::Frame(format!("an invalid packet: {why:?}"))),
            }
        }
        Ok(busy)
    }

    fn refill(&mut self, q: usize) -> bool {
        let queue = &self.queues[q];
        if queue.rx_idle.is_empty()
            || queue.rx_idle.len() < self.rx_batch && !queue.rx_flight.is_empty()
        {
            return false;
        }
        for _ in 0..self.rx_refill_max {
            let Some(page) = self.queues[q].rx_idle.pop() else { break };
            let gref = self.grant(page, false);
            let queue = &mut self.queues[q];
            // Responses are matched by slot: any id will do.
            let posted = queue.rx.post(RxRequest { id: page as u16, gref });
            assert!(posted, "no more pages than slots");
            queue.rx_flight.insert(gref, page);
        }
        self.queues[q].rx.publish();
        true
    }

    fn send(&mut self, q: usize, frame: &[u8], random: &mut Random) -> bool {
        let queue = &self.queues[q];
        let most = self.tx_slots_max.min(queue.tx.size() as usize);
        let pieces = random.within(1..most as u64 + 1) as usize;
        let piece = frame.len().div_ceil(pieces);
        let pieces = frame.len().div_ceil(piece);
        if (queue.tx.room() as usize) < pieces || queue.tx_idle.len() < pieces {
            return false;
        }
        let mut requests = Vec::new();
        for part in frame.chunks(piece) {
            let page = self.queues[q].tx_idle.pop().expect("as many as pieces");
            let id = self.queues[q].tx_ids.pop().expect("as many as slots");
            let gref = self.grant(page, true);
            let offset = random.within(0..(PAGE - part.len()) as u64 + 1) as usize;
            let seg = self.memory.seg_mut(page * PAGE + offset, part.len() as u32);
            seg.expect("a page of its own").write(part);
            // The size of the first request is that of the packet.
            let size = if requests.is_empty() { frame.len() } else { part.len() } as u16;
            requests.push(TxRequest { gref, offset: offset as u16, flags: 0, id, size });
            let queue = &mut self.queues[q];
            queue.tx_flight.insert(id, Sent { page, gref, frame: queue.frames });
        }
        let queue = &mut self.queues[q];
        let added = queue.tx.add(requests[0], &[], &requests[1..]);
        assert!(added, "there is room");
        queue.awaited.insert(queue.frames, requests.len());
        queue.frames += 1;
        true
    }

    fn publish(&mut self, q: usize) {
        self.queues[q].tx.publish();
    }

    fn has_received(&self, q: usize) -> bool {
        self.queues[q].rx.has_responses()
    }

    fn unfinished(&self, q: usize, note: &mut dyn FnMut(bool, String)) {
        let queue = &self.queues[q];
        let flight = queue.tx_flight.len();
        note(flight > 0, format!("{flight} transmit buffers not returned"));
        note(queue.tx.has_responses(), "transmit responses not taken".into());
        note(queue.rx.has_responses(), "received frames not taken".into());
        note(queue.rx.is_partial(), "an incomplete frame".into());
        let (free, size) = (queue.tx.room(), queue.tx.size());
        note(free != size, format!("{free} of {size} slots free"));
        if q == 0 {
            // Only those of posted receive buffers are left.
            let grants = self.hypervisor.grants(self.domid);
            let posted: usize = self.queues.iter().map(|queue| queue.rx_flight.len()).sum();
            note(grants != posted, format!("{grants} grants for {posted} buffers"));
        }
    }

    fn has_room(&self, q: usize, len: u64) -> bool {
        let queue = &self.queues[q];
        let need = len.div_ceil(ROOM);
        !queue.rx.has_responses() && queue.rx_flight.len() as u64 >= need
    }

    fn misbehave(&mut self, apps: &mut [App], random: &mut Random, kicks: &mut Vec<Kick>) {
        self.inject_violation(apps, random, kicks);
    }
}
