//! Both halves of each Xen ring against a model without indices: queues of what was added,
//! published, taken and answered. Any order of operations, any start index.
#![allow(clippy::as_conversions)]

#[path = "common/xen.rs"]
mod common;

use std::collections::VecDeque;

use common::area;
use proptest::prelude::*;
use ring::xen::{
    Armed, BackCtrl, BackRx, BackTx, CTRL_SLOT_LEN, CtrlRequest, CtrlResponse, Extra, FrontCtrl,
    FrontRx, FrontTx, Gso, Hash, Multicast, Packet, RX_SLOT_LEN, RxPacket, RxRequest, RxResponse,
    TX_SLOT_LEN, TxPacket, TxRequest, TxResponse, TxSlot, rx_flag, status, tx_flag,
};

fn starts() -> impl Strategy<Value = u32> {
    prop_oneof![any::<u32>(), u32::MAX - 300..=u32::MAX, 0x7fff_ff00..0x8000_0100_u32, 0..4_u32]
}

#[derive(Clone, Debug)]
enum TxOp {
    Add { rest: Vec<u16>, extras: u8, first: u16 },
    Change(u8),
    Publish,
    Take(u8),
    Untake,
    Put(u8),
    Collect,
    BackArm,
    FrontArm(u8),
}

fn tx_op() -> impl Strategy<Value = TxOp> {
    let size = prop_oneof![4 => 1..=300_u16, 1 => Just(0)];
    prop_oneof![
        4 => (prop::collection::vec(size, 0..5), 0..4_u8, 0..2000_u16)
            .prop_map(|(rest, extras, first)| TxOp::Add { rest, extras, first }),
        2 => any::<u8>().prop_map(TxOp::Change),
        3 => Just(TxOp::Publish),
        3 => (1..5_u8).prop_map(TxOp::Take),
        1 => Just(TxOp::Untake),
        3 => (1..6_u8).prop_map(TxOp::Put),
        2 => Just(TxOp::Collect),
        2 => Just(TxOp::BackArm),
        2 => (1..8_u8).prop_map(TxOp::FrontArm),
    ]
}

const GSO: Gso = Gso { size: 1448, kind: 1, features: 0 };
const HASH: Hash = Hash { kind: 1, algorithm: 1, value: 0x1234_5678 };

/// What the front half sent, as the back half must see it.
#[derive(Clone, Debug)]
struct Sent {
    ids: Vec<(u16, bool)>,
    slots: Vec<TxSlot>,
    len: u16,
    extras: u8,
    change: Option<Multicast>,
    ring_slots: u32,
}

struct TxModel {
    front: FrontTx,
    back: BackTx,
    free: Vec<u16>,
    gref: u32,
    added: VecDeque<Sent>,
    published: VecDeque<Sent>,
    held: VecDeque<Sent>,
    answered: VecDeque<TxResponse>,
    /// Slots answered and not collected, extra infos included.
    answered_slots: u32,
    back_asleep: bool,
    front_asleep: Option<u32>,
    packet: TxPacket,
}

impl TxModel {
    fn new(size: usize, start: u32) -> Self {
        let area = area(size, TX_SLOT_LEN);
        let front = FrontTx::starting_at(area.clone(), start);
        Self {
            free: (0..size as u16).collect(),
            back: BackTx::attach(area).unwrap(),
            front,
            gref: 0,
            added: VecDeque::new(),
            published: VecDeque::new(),
            held: VecDeque::new(),
            answered: VecDeque::new(),
            answered_slots: 0,
            back_asleep: false,
            front_asleep: None,
            packet: TxPacket::new(),
        }
    }

    fn add(&mut self, rest: &[u16], extras: u8, first: u16) -> Result<(), TestCaseError> {
        if self.free.len() <= rest.len() {
            return Ok(());
        }
        let sum: u16 = rest.iter().sum::<u16>() + first;
        let (ids, slots, change, ring_slots) = (vec![], vec![], None, u32::from(extras));
        let mut sent = Sent { ids, slots, len: sum, extras, change, ring_slots };
        let mut requests = Vec::new();
        for (i, len) in [first].iter().chain(rest).copied().enumerate() {
            let id = self.free.pop().unwrap();
            self.gref += 1;
            let slot = TxSlot { gref: self.gref, offset: 4096 - len, len };
            if len > 0 {
                sent.slots.push(slot);
            }
            sent.ids.push((id, i > 0 && len == 0));
            sent.ring_slots += 1;
            let size = if i == 0 { sum } else { len };
            let flags = if i == 0 { tx_flag::DATA_VALIDATED } else { 0 };
            requests.push(TxRequest { gref: slot.gref, offset: slot.offset, flags, id, size });
        }
        let all = [Extra::Gso(GSO), Extra::Hash(HASH), Extra::Gso(GSO)];
        let room = self.front.room();
        if self.front.add(requests[0], &all[..usize::from(extras)], &requests[1..]) {
            prop_assert_eq!(self.front.room(), room - sent.ring_slots);
            self.added.push_back(sent);
        } else {
            prop_assert!(sent.ring_slots > room);
            self.free.extend(sent.ids.iter().rev().map(|(id, _)| id));
        }
        Ok(())
    }

    /// A change of the multicast list: a request without bytes, and an extra info.
    fn change(&mut self, n: u8) -> Result<(), TestCaseError> {
        let Some(id) = self.free.pop() else { return Ok(()) };
        let mac = [1, 0, 0x5e, 0, 0, n];
        let (extra, change) = match n % 2 {
            0 => (Extra::McastAdd(mac), Some(Multicast::Add(mac))),
            _ => (Extra::McastDel(mac), Some(Multicast::Del(mac))),
        };
        let room = self.front.room();
        if self.front.add(TxRequest { id, ..TxRequest::default() }, &[extra], &[]) {
            prop_assert_eq!(self.front.room(), room - 2);
            let ids = vec![(id, false)];
            let (slots, len, extras, ring_slots) = (vec![], 0, 1, 2);
            self.added.push_back(Sent { ids, slots, len, extras, change, ring_slots });
        } else {
            prop_assert!(room < 2);
            self.free.push(id);
        }
        Ok(())
    }

    fn take(&mut self) -> Result<bool, TestCaseError> {
        let Some(packet) = self.back.take(&mut self.packet).unwrap() else {
            prop_assert!(self.published.is_empty() && !self.back.is_partial());
            return Ok(false);
        };
        let sent = self.published.pop_front().unwrap();
        let got = &self.packet;
        prop_assert_eq!(got.ring_slots, sent.ring_slots);
        prop_assert_eq!(got.len, sent.len);
        if let Some(change) = sent.change {
            prop_assert_eq!(packet, Packet::Multicast(change));
        } else if sent.len < 14 {
            prop_assert_eq!(packet, Packet::Refused(ring::xen::Refusal::Short));
        } else {
            prop_assert_eq!(packet, Packet::Frame);
            prop_assert_eq!(got.slots(), &sent.slots[..]);
            prop_assert_eq!(got.gso, (sent.extras > 0).then_some(GSO));
            prop_assert_eq!(got.hash, (sent.extras > 1).then_some(HASH));
            prop_assert!(got.flags & tx_flag::DATA_VALIDATED != 0);
        }
        self.held.push_back(sent);
        Ok(true)
    }

    fn put(&mut self, n: u8) -> Result<(), TestCaseError> {
        let n = usize::from(n).min(self.held.len());
        for (i, sent) in self.held.drain(..n).enumerate() {
            let status = if i % 2 == 0 { status::OKAY } else { status::DROPPED };
            self.back.put(status);
            self.answered_slots += sent.ring_slots;
            let one = |&(id, empty)| TxResponse { id, status: if empty { 0 } else { status } };
            self.answered.extend(sent.ids.iter().map(one));
        }
        self.back.publish();
        let notify = self.back.notify_needed();
        prop_assert!(!self.back.notify_needed(), "nothing new");
        if let Some(at) = self.front_asleep.filter(|_| n > 0) {
            prop_assert_eq!(notify, self.answered_slots >= at, "lost or early notification");
            self.front_asleep = self.front_asleep.filter(|_| !notify);
        }
        Ok(())
    }

    fn step(&mut self, op: &TxOp) -> Result<(), TestCaseError> {
        match op {
            TxOp::Add { rest, extras, first } => self.add(rest, *extras, *first)?,
            TxOp::Change(n) => self.change(*n)?,
            TxOp::Publish => {
                let news = !self.added.is_empty();
                self.front.publish();
                self.published.append(&mut self.added);
                let notify = self.front.notify_needed();
                if self.back_asleep {
                    prop_assert_eq!(notify, news, "lost or needless notification");
                    self.back_asleep = !notify;
                }
            }
            TxOp::Take(n) => {
                for _ in 0..*n {
                    if !self.take()? {
                        break;
                    }
                }
                self.back_asleep &= self.published.is_empty();
            }
            TxOp::Untake => {
                if let Some(sent) = self.held.pop_back() {
                    self.back.untake(1);
                    self.published.push_front(sent);
                    self.back_asleep = false;
                }
            }
            TxOp::Put(n) => self.put(*n)?,
            TxOp::Collect => {
                while let Some(got) = self.front.take_response().unwrap() {
                    prop_assert_eq!(Some(got), self.answered.pop_front());
                    self.free.push(got.id);
                }
                prop_assert!(self.answered.is_empty() && !self.front.has_responses());
                (self.answered_slots, self.front_asleep) = (0, None);
            }
            TxOp::BackArm => {
                let armed = self.back.arm() == Armed::Armed;
                prop_assert_eq!(armed, self.published.is_empty());
                self.back_asleep = armed;
            }
            TxOp::FrontArm(n) => {
                let on = |all: &VecDeque<Sent>| all.iter().map(|s| s.ring_slots).sum::<u32>();
                let most = on(&self.published) + on(&self.held) + self.answered_slots;
                // Limited to the number outstanding.
                let armed = self.front.arm_after(u32::from(*n)) == Armed::Armed;
                let n = u32::from(*n).min(most).max(1);
                prop_assert_eq!(armed, self.answered_slots < n);
                self.front_asleep = armed.then_some(n);
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn tx_what_one_half_adds_the_other_takes(
        log in 0..8_u32,
        start in starts(),
        ops in prop::collection::vec(tx_op(), 1..150),
    ) {
        let mut model = TxModel::new(1 << log, start);
        for op in &ops {
            model.step(op)?;
        }
    }
}

#[derive(Clone, Debug)]
enum RxOp {
    Post(u8),
    PostAndPublish(u8),
    Put { lens: Vec<u16>, extras: u8 },
    TakeBack(u8),
    Collect,
    BackArm(u8),
    FrontArm(u8),
}

fn rx_op() -> impl Strategy<Value = RxOp> {
    prop_oneof![
        1 => (1..9_u8).prop_map(RxOp::Post),
        3 => (1..9_u8).prop_map(RxOp::PostAndPublish),
        4 => (prop::collection::vec(14..=4096_u16, 1..5), 0..3_u8)
            .prop_map(|(lens, extras)| RxOp::Put { lens, extras }),
        1 => (1..5_u8).prop_map(RxOp::TakeBack),
        3 => Just(RxOp::Collect),
        2 => (1..6_u8).prop_map(RxOp::BackArm),
        2 => (1..6_u8).prop_map(RxOp::FrontArm),
    ]
}

/// Buffers with lengths, spare buffers, number of extra infos.
type Filled = (Vec<(RxRequest, u16)>, Vec<RxRequest>, u8);

struct RxModel {
    front: FrontRx,
    back: BackRx,
    gref: u32,
    posted: VecDeque<RxRequest>,
    published: VecDeque<RxRequest>,
    /// Packets put and not collected.
    filled: VecDeque<Filled>,
    filled_slots: u32,
    back_asleep: Option<usize>,
    front_asleep: Option<u32>,
}

impl RxModel {
    fn new(size: usize, start: u32) -> Self {
        let area = area(size, RX_SLOT_LEN);
        let front = FrontRx::starting_at(area.clone(), start);
        Self {
            back: BackRx::attach(area).unwrap(),
            front,
            gref: 0,
            posted: VecDeque::new(),
            published: VecDeque::new(),
            filled: VecDeque::new(),
            filled_slots: 0,
            back_asleep: None,
            front_asleep: None,
        }
    }

    fn post(&mut self, n: u8) {
        for _ in 0..n {
            self.gref += 1;
            let request = RxRequest { id: self.gref as u16, gref: self.gref };
            if self.front.post(request) {
                self.posted.push_back(request);
            } else {
                assert_eq!(self.front.room(), 0);
            }
        }
    }

    fn publish(&mut self) -> Result<(), TestCaseError> {
        let news = !self.posted.is_empty();
        self.front.publish();
        self.published.append(&mut self.posted);
        let notify = self.front.notify_needed();
        if let Some(need) = self.back_asleep.filter(|_| news) {
            prop_assert_eq!(notify, self.published.len() >= need, "lost or early notification");
            self.back_asleep = self.back_asleep.filter(|_| !notify);
        }
        Ok(())
    }

    fn put(&mut self, lens: &[u16], extras: u8) -> Result<(), TestCaseError> {
        let need = lens.len() + usize::from(extras);
        prop_assert_eq!(self.back.available().unwrap() as usize, self.published.len());
        if self.published.len() < need {
            return Ok(());
        }
        self.back_asleep = None;
        let (mut slots, mut spare) = (vec![], vec![]);
        for (i, len) in lens.iter().enumerate() {
            let request = self.back.take().unwrap();
            prop_assert_eq!(Some(request), self.published.pop_front());
            let more = if i + 1 < lens.len() { rx_flag::MORE_DATA } else { 0 };
            let extra = if i == 0 && extras > 0 { rx_flag::EXTRA_INFO } else { 0 };
            let (offset, flags) = (4096 - len, more | extra);
            let (id, status) = (request.id, *len as i16);
            self.back.put(RxResponse { id, offset, flags, status });
            slots.push((request, *len));
            let all = [Extra::Gso(GSO), Extra::Hash(HASH)];
            for e in 0..if i == 0 { extras } else { 0 } {
                spare.push(self.back.take().unwrap());
                prop_assert_eq!(spare.last().copied(), self.published.pop_front());
                self.back.put_extra(all[usize::from(e)], e + 1 < extras);
            }
        }
        self.filled_slots += need as u32;
        self.filled.push_back((slots, spare, extras));
        self.back.publish();
        let notify = self.back.notify_needed();
        if let Some(at) = self.front_asleep {
            prop_assert_eq!(notify, self.filled_slots >= at, "lost or early notification");
            self.front_asleep = self.front_asleep.filter(|_| !notify);
        }
        Ok(())
    }

    fn step(&mut self, op: &RxOp) -> Result<(), TestCaseError> {
        match op {
            RxOp::Post(n) => self.post(*n),
            RxOp::PostAndPublish(n) => {
                self.post(*n);
                self.publish()?;
            }
            RxOp::Put { lens, extras } => self.put(lens, *extras)?,
            RxOp::TakeBack(n) => {
                let n = u32::from(*n).min(self.back.available().unwrap());
                for i in 0..n as usize {
                    prop_assert_eq!(self.back.take(), Some(self.published[i]));
                }
                prop_assert_eq!(self.back.held(), n);
                self.back.untake(n);
            }
            RxOp::Collect => {
                let mut packet = RxPacket::new();
                while let Some(verdict) = self.front.take(&mut packet).unwrap() {
                    let (slots, spare, extras) = self.filled.pop_front().unwrap();
                    prop_assert_eq!(verdict, Ok(()));
                    let got: Vec<_> = packet.slots.iter().map(|s| (s.request, s.len)).collect();
                    prop_assert_eq!(&got, &slots);
                    prop_assert_eq!(&packet.spare, &spare);
                    prop_assert_eq!(packet.gso, (extras > 0).then_some(GSO));
                    prop_assert_eq!(packet.hash, (extras > 1).then_some(HASH));
                    prop_assert_eq!(packet.len, slots.iter().map(|s| u32::from(s.1)).sum::<u32>());
                }
                prop_assert!(self.filled.is_empty());
                (self.filled_slots, self.front_asleep) = (0, None);
            }
            RxOp::BackArm(need) => {
                let need = usize::from(*need).min(self.back.size() as usize);
                let armed = self.back.arm(need as u32) == Armed::Armed;
                prop_assert_eq!(armed, self.published.len() < need);
                self.back_asleep = armed.then_some(need);
            }
            RxOp::FrontArm(n) => {
                let most = self.published.len() as u32 + self.filled_slots;
                // Limited to the number outstanding.
                let armed = self.front.arm_after(u32::from(*n)) == Armed::Armed;
                let n = u32::from(*n).min(most).max(1);
                prop_assert_eq!(armed, self.filled_slots < n);
                self.front_asleep = armed.then_some(n);
            }
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn rx_what_one_half_offers_the_other_fills(
        log in 0..8_u32,
        start in starts(),
        ops in prop::collection::vec(rx_op(), 1..150),
    ) {
        let mut model = RxModel::new(1 << log, start);
        for op in &ops {
            model.step(op)?;
        }
    }

    #[test]
    fn ctrl_every_request_is_answered(
        start in starts(),
        rounds in prop::collection::vec((1..8_u16, any::<[u32; 3]>()), 1..60),
    ) {
        let area = area(4, CTRL_SLOT_LEN);
        let mut front = FrontCtrl::starting_at(area.clone(), start);
        let mut back = BackCtrl::attach(area).unwrap();
        for (n, data) in rounds {
            prop_assert_eq!(back.arm(), Armed::Armed);
            let asked: Vec<_> = (0..n)
                .map(|id| CtrlRequest { id, kind: id + 1, data })
                .filter(|request| front.put(*request))
                .collect();
            prop_assert_eq!(asked.len(), usize::from(n.min(4)));
            front.publish();
            prop_assert!(front.notify_needed());
            prop_assert_eq!(front.arm(), Armed::Armed);
            for request in &asked {
                prop_assert_eq!(back.take(), Ok(Some(*request)));
                let CtrlRequest { id, kind, data } = *request;
                back.put(CtrlResponse { id, kind, status: data[1], data: data[2] });
            }
            prop_assert_eq!(back.take(), Ok(None));
            back.publish();
            prop_assert!(back.notify_needed());
            for CtrlRequest { id, kind, data } in asked {
                let answer = CtrlResponse { id, kind, status: data[1], data: data[2] };
                prop_assert_eq!(front.take(), Ok(Some(answer)));
            }
            prop_assert_eq!(front.take(), Ok(None));
            prop_assert_eq!(front.room(), 4);
        }
    }
}
