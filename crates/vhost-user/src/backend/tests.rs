use super::handover::{RegionState, RingState};
use super::*;
use crate::device::Call;
use crate::fake::{Did, FEATURES, Fake};
use crate::message::{MemRegion, NO_FD};
use FrontendReq as R;
use ProtocolError as E;
use shm::Mapping;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

mod fuse;
mod handover;
mod limits;
mod log;

const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7000_0000;
const SIZE: u64 = 0x10_0000;

struct Rig {
    backend: Backend,
    fake: Fake,
}

fn u(value: u64) -> Vec<u8> {
    value.to_ne_bytes().to_vec()
}

fn st(index: u32, num: u32) -> Vec<u8> {
    VringState { index, num }.to_bytes()
}

fn addr(index: u32, at: u64) -> VringAddr {
    VringAddr { index, flags: 0, desc: at, used: at + 0x4000, avail: at + 0x2000, log: 0 }
}

fn region(guest_addr: u64, user_addr: u64, size: u64) -> MemRegion {
    MemRegion { guest_addr, size, user_addr, mmap_offset: 0 }
}

fn memfd() -> OwnedFd {
    let mapping = Mapping::memfd("t", SIZE).unwrap();
    mapping.fd().unwrap().try_clone_to_owned().unwrap()
}

fn event() -> OwnedFd {
    os::eventfd().unwrap()
}

impl Rig {
    fn new() -> Self {
        Self::with(Account::default())
    }

    fn with(account: Account) -> Self {
        let fake = Fake::default();
        let account = Arc::new(account);
        let options = Options { protocol_features: PROTOCOL_FEATURES, account };
        Self { backend: Backend::new(Box::new(fake.clone()), options), fake }
    }

    /// Owner, all protocol features, the given features with bit 30, 1 MiB of memory.
    fn ready(features: u64) -> Self {
        let mut rig = Self::new();
        rig.ok(R::SET_OWNER, vec![]);
        rig.ok(R::SET_PROTOCOL_FEATURES, u(PROTOCOL_FEATURES.bits()));
        rig.ok(R::SET_FEATURES, u(features | feature::PROTOCOL_FEATURES));
        rig.table(&[region(GUEST, USER, SIZE)]).unwrap();
        rig.fake.did();
        rig
    }

    fn send(&mut self, request: R, payload: Vec<u8>, fds: Vec<OwnedFd>) -> Result<Vec<u8>, E> {
        let account = Arc::clone(self.backend.account());
        let outside = |fd| ForeignFd::new(fd, &account).unwrap();
        let fds = fds.into_iter().map(outside).collect();
        let outcome = self.backend.handle(&Message::request(request, payload, false), fds)?;
        assert!(outcome.refused.is_none(), "{:?}", outcome.refused);
        Ok(outcome.reply.map(|reply| reply.payload).unwrap_or_default())
    }

    fn ok(&mut self, request: R, payload: Vec<u8>) -> Vec<u8> {
        self.send(request, payload, vec![]).unwrap()
    }

    fn err(&mut self, request: R, payload: Vec<u8>, fds: usize) -> E {
        let fds = (0..fds).map(|_| event()).collect();
        let error = self.send(request, payload, fds).unwrap_err();
        assert!(error.to_string().len() > 20, "{error}");
        error
    }

    fn table(&mut self, regions: &[MemRegion]) -> Result<Vec<u8>, E> {
        let fds = regions.iter().map(|_| memfd()).collect();
        self.send(R::SET_MEM_TABLE, MemRegion::table_to_bytes(regions), fds)
    }

    fn ring(&mut self, index: u32, size: u32, base: u32) {
        let at = USER + u64::from(index) * 0x8000;
        self.ok(R::SET_VRING_NUM, st(index, size));
        self.ok(R::SET_VRING_BASE, st(index, base));
        self.ok(R::SET_VRING_ADDR, addr(index, at).to_bytes());
        self.send(R::SET_VRING_CALL, u(u64::from(index)), vec![event()]).unwrap();
        self.send(R::SET_VRING_KICK, u(u64::from(index)), vec![event()]).unwrap();
    }
}

fn start(ring: u16, base: u32) -> Did {
    let desc = GUEST + u64::from(ring) * 0x8000;
    Did::Start { ring, size: 256, base, desc, packed: false, kick: "fd" }
}

#[test]
fn ring_starts_when_all_is_known_and_is_enabled_later() {
    let mut rig = Rig::ready(feature::VERSION_1);
    rig.ring(0, 256, 7);
    assert_eq!(rig.fake.did(), [start(0, 7), Did::Enable(0, false)]);
    rig.ok(R::SET_VRING_ENABLE, st(0, 1));
    assert_eq!(rig.fake.did(), [Did::Enable(0, true)]);
    assert_eq!(rig.ok(R::GET_VRING_BASE, st(0, 0)), st(0, 7));
    assert_eq!(rig.fake.did(), [Did::Stop(0)]);
    // Again, from its position, and still enabled; only the kick is needed.
    rig.send(R::SET_VRING_KICK, u(0), vec![event()]).unwrap();
    assert_eq!(rig.fake.did(), [start(0, 7), Did::Enable(0, true)]);
    rig.ok(R::RESET_OWNER, vec![]);
    assert_eq!(rig.fake.did(), [Did::Enable(0, false)]);
}

#[test]
fn order_of_the_ring_messages_does_not_matter() {
    let mut rig = Rig::new();
    rig.send(R::SET_VRING_KICK, u(1), vec![event()]).unwrap();
    rig.ok(R::SET_VRING_ADDR, addr(1, USER).to_bytes());
    rig.ok(R::SET_VRING_BASE, st(1, 0));
    rig.ok(R::SET_VRING_NUM, st(1, 256));
    assert_eq!(rig.fake.did(), []);
    rig.table(&[region(GUEST, USER, SIZE)]).unwrap();
    let start = Did::Start { ring: 1, size: 256, base: 0, desc: GUEST, packed: false, kick: "fd" };
    // Without protocol features a ring starts enabled.
    assert_eq!(rig.fake.did(), [Did::Memory(1), start, Did::Enable(1, true)]);
    rig.ok(R::SET_FEATURES, u(feature::PROTOCOL_FEATURES));
    assert_eq!(rig.fake.did(), [Did::Features(0), Did::Enable(1, false)]);
}

#[test]
fn ring_that_is_set_up_again_without_being_stopped() {
    let mut rig = Rig::ready(feature::VERSION_1);
    rig.ring(0, 256, 0);
    rig.fake.did();
    // Same values: nothing happens.
    rig.ok(R::SET_VRING_NUM, st(0, 256));
    rig.ok(R::SET_VRING_ADDR, VringAddr { flags: 1, ..addr(0, USER) }.to_bytes());
    assert_eq!(rig.fake.did(), []);
    // A new address: it stops, and waits for a new kick.
    rig.ok(R::SET_VRING_ADDR, addr(0, USER + 0x8000).to_bytes());
    rig.ok(R::SET_VRING_ADDR, addr(0, USER).to_bytes());
    assert_eq!(rig.fake.did(), [Did::Stop(0)]);
    rig.send(R::SET_VRING_KICK, u(0), vec![event()]).unwrap();
    assert_eq!(rig.fake.did(), [start(0, 0), Did::Enable(0, false)]);
    // As does a new base, or another size.
    rig.ok(R::SET_VRING_BASE, st(0, 5));
    rig.send(R::SET_VRING_KICK, u(0), vec![event()]).unwrap();
    assert_eq!(rig.fake.did(), [Did::Stop(0), start(0, 5), Did::Enable(0, false)]);
    rig.ok(R::SET_VRING_NUM, st(0, 128));
    assert_eq!(rig.fake.did(), [Did::Stop(0)]);
    // A new kick for a running ring restarts it at its position.
    rig.ok(R::SET_VRING_NUM, st(0, 256));
    rig.send(R::SET_VRING_KICK, u(0), vec![event()]).unwrap();
    rig.fake.did();
    rig.ok(R::SET_VRING_KICK, u(NO_FD));
    let poll =
        Did::Start { ring: 0, size: 256, base: 5, desc: GUEST, packed: false, kick: "in band" };
    assert_eq!(rig.fake.did(), [Did::Stop(0), poll, Did::Enable(0, false)]);
}

/// QEMU 7.2 stops a device in this order; the positions migrate with the guest.
#[test]
fn position_of_a_ring_is_known_after_a_reset() {
    for reset in [R::SET_STATUS, R::RESET_DEVICE] {
        let mut rig = Rig::ready(feature::VERSION_1);
        rig.ring(0, 256, 7);
        let payload = if reset == R::SET_STATUS { u(0) } else { vec![] };
        rig.ok(reset, payload);
        assert_eq!(rig.ok(R::GET_VRING_BASE, st(0, 0)), st(0, 7));
        // It is no setting of the next ring: that has none, and does not start.
        rig.fake.did();
        rig.ok(R::SET_VRING_NUM, st(0, 256));
        rig.ok(R::SET_VRING_ADDR, addr(0, USER).to_bytes());
        rig.send(R::SET_VRING_KICK, u(0), vec![event()]).unwrap();
        assert_eq!(rig.fake.did(), []);
    }
}

#[test]
fn without_in_band_notifications_no_descriptor_means_polling() {
    let mut rig = Rig::new();
    rig.table(&[region(GUEST, USER, SIZE)]).unwrap();
    rig.ring(0, 256, 0);
    rig.fake.did();
    rig.ok(R::SET_VRING_KICK, u(NO_FD));
    let poll = Did::Start { ring: 0, size: 256, base: 0, desc: GUEST, packed: false, kick: "poll" };
    assert_eq!(rig.fake.did(), [Did::Stop(0), poll, Did::Enable(0, true)]);
    assert!(rig.fake.state().setups[&0].call.is_some());
    rig.ok(R::SET_VRING_CALL, u(NO_FD));
    assert_eq!(rig.fake.did(), [Did::SetCall(0, false)]);
    rig.send(R::SET_VRING_CALL, u(0), vec![event()]).unwrap();
    assert_eq!(rig.fake.did(), [Did::SetCall(0, true)]);
    rig.send(R::SET_VRING_ERR, u(0), vec![event()]).unwrap();
    assert!(matches!(rig.fake.state().setups[&0].err, Some(Call::ForeignFd(_))));
}

#[test]
fn running_rings_continue_at_their_position_in_memory_that_changes() {
    let mut rig = Rig::ready(feature::VERSION_1);
    rig.ring(0, 256, 9);
    rig.ok(R::SET_VRING_ENABLE, st(0, 1));
    rig.fake.did();
    let more = region(GUEST + SIZE, USER + SIZE, SIZE);
    rig.table(&[region(GUEST, USER, SIZE), more]).unwrap();
    let replaced = [Did::Replace { ring: 0, base: 9, desc: GUEST }];
    assert_eq!(rig.fake.did(), [&[Did::Memory(2)][..], &replaced[..]].concat());
    let slot = region(GUEST + 2 * SIZE, USER + 2 * SIZE, SIZE).to_single_bytes();
    rig.send(R::ADD_MEM_REG, slot.clone(), vec![memfd()]).unwrap();
    assert_eq!(rig.fake.did(), [&[Did::Memory(3)][..], &replaced[..]].concat());
    // One descriptor is tolerated here, and closed.
    rig.send(R::REM_MEM_REG, slot.clone(), vec![event()]).unwrap();
    assert_eq!(rig.fake.did(), [&[Did::Memory(2)][..], &replaced[..]].concat());
    assert!(matches!(rig.err(R::REM_MEM_REG, slot.clone(), 0), E::NoSuchRegion { .. }));
    assert!(matches!(rig.err(R::REM_MEM_REG, slot, 2), E::FdCount { .. }));
    // A table without the ring's memory: it stops permanently.
    let error = rig.table(&[more]).unwrap_err();
    assert!(matches!(error, E::RingOutside { ring: 0, part: "desc", .. }), "{error}");
    assert_eq!(rig.fake.did(), [Did::Memory(1), Did::Stop(0)]);
    rig.table(&[region(GUEST, USER, SIZE)]).unwrap();
    assert_eq!(rig.fake.did(), [Did::Memory(1)]);
}

#[test]
fn five_hundred_and_nine_slots() {
    let mut rig = Rig::ready(feature::VERSION_1);
    assert_eq!(rig.ok(R::GET_MAX_MEM_SLOTS, vec![]), u(509));
    let slot = |i: u64| region(GUEST + i * SIZE, USER + i * SIZE, 0x1000).to_single_bytes();
    for i in 1..509 {
        rig.send(R::ADD_MEM_REG, slot(i), vec![memfd()]).unwrap();
    }
    let error = rig.send(R::ADD_MEM_REG, slot(509), vec![memfd()]).unwrap_err();
    assert!(matches!(error, E::NoSlot), "{error}");
    rig.ok(R::REM_MEM_REG, slot(7));
    rig.send(R::ADD_MEM_REG, slot(509), vec![memfd()]).unwrap();
    assert_eq!(rig.fake.state().memory.regions().len(), 509);
}

#[test]
fn a_slot_added_once_for_each_queue_pair_needs_as_many_removals() {
    let mut rig = Rig::ready(feature::VERSION_1);
    let slot = region(GUEST + SIZE, USER + SIZE, SIZE).to_single_bytes();
    for _ in 0..4 {
        rig.send(R::ADD_MEM_REG, slot.clone(), vec![memfd()]).unwrap();
    }
    assert_eq!(rig.fake.state().memory.regions().len(), 2);
    for left in [2, 2, 2, 1] {
        rig.ok(R::REM_MEM_REG, slot.clone());
        assert_eq!(rig.fake.state().memory.regions().len(), left);
    }
    assert!(matches!(rig.err(R::REM_MEM_REG, slot, 0), E::NoSuchRegion { .. }));
}

#[test]
fn user_mode_linux_announces_one_region_and_sends_two_slots() {
    let mut rig = Rig::new();
    let mut payload = MemRegion::table_to_bytes(&[region(0x50_0000, 0x50_0000, SIZE)]);
    payload.extend_from_slice(&[0; 32]);
    assert_eq!(payload.len(), 72);
    rig.send(R::SET_MEM_TABLE, payload, vec![memfd()]).unwrap();
    assert_eq!(rig.fake.did(), [Did::Memory(1)]);
}

#[test]
fn user_mode_linux_gets_a_reply_to_the_message_that_negotiates_replies() {
    let mut rig = Rig::new();
    let bits = ProtocolFeatures::REPLY_ACK | ProtocolFeatures::BACKEND_REQ;
    let message = Message::request(R::SET_PROTOCOL_FEATURES, u(bits.bits()), true);
    let reply = rig.backend.handle(&message, vec![]).unwrap().reply.unwrap();
    assert_eq!(reply, Message::reply(R::SET_PROTOCOL_FEATURES.into(), u(0)));
    assert_eq!(rig.backend.protocol_features(), bits);
}

#[test]
fn control_queue_rings_are_accepted_and_not_served() {
    let mut rig = Rig::ready(feature::VERSION_1 | feature::CTRL_VQ);
    rig.ring(2, 256, 0);
    rig.ok(R::SET_VRING_ENABLE, st(2, 1));
    assert_eq!(rig.fake.did(), []);
    assert_eq!(rig.ok(R::GET_VRING_BASE, st(2, 0)), st(2, 0));
    let mut rig = Rig::ready(feature::VERSION_1 | feature::CTRL_VQ | feature::MQ);
    rig.ring(2, 256, 0);
    assert_eq!(rig.fake.did(), [start(2, 0), Did::Enable(2, false)]);
    rig.ok(R::SET_VRING_NUM, st(32, 64));
    rig.ok(R::SET_VRING_BASE, st(32, 0));
    rig.ok(R::SET_VRING_ADDR, addr(32, USER).to_bytes());
    rig.send(R::SET_VRING_KICK, u(32), vec![event()]).unwrap();
    assert_eq!(rig.fake.did(), []);
    assert!(matches!(rig.err(R::SET_VRING_NUM, st(33, 64), 0), E::Ring { index: 33, pairs: 16 }));
}

#[test]
fn front_end_without_protocol_feature_mq_has_one_pair() {
    let mut rig = Rig::new();
    rig.ok(R::SET_PROTOCOL_FEATURES, u(ProtocolFeatures::CONFIG.bits()));
    let both = feature::CTRL_VQ | feature::MQ;
    rig.ok(R::SET_FEATURES, u(feature::VERSION_1 | feature::PROTOCOL_FEATURES | both));
    rig.ok(R::SET_VRING_NUM, st(1, 64));
    assert!(matches!(rig.err(R::SET_VRING_NUM, st(2, 64), 0), E::OnePair { index: 2 }));
}

#[test]
fn packed_rings_of_any_size_and_split_rings_of_powers_of_two() {
    let mut rig = Rig::ready(feature::VERSION_1);
    for size in [0, 3, 255, 32769, 65536, u32::MAX] {
        assert!(matches!(rig.err(R::SET_VRING_NUM, st(0, size), 0), E::QueueSize { .. }));
    }
    let mut rig = Rig::ready(feature::VERSION_1 | feature::RING_PACKED);
    for size in [0, 32769] {
        assert!(matches!(rig.err(R::SET_VRING_NUM, st(0, size), 0), E::QueueSize { .. }));
    }
    rig.ring(0, 255, 0x8000_8000);
    let start =
        Did::Start { ring: 0, size: 255, base: 0x8000_8000, desc: GUEST, packed: true, kick: "fd" };
    assert_eq!(rig.fake.did()[0], start);
}

#[test]
fn ring_addresses_outside_memory_and_rings_that_do_not_fit() {
    let mut rig = Rig::ready(feature::VERSION_1);
    let good = addr(0, USER);
    let outside = USER + SIZE;
    for (bad, name) in [
        (VringAddr { desc: outside, ..good }, "desc"),
        (VringAddr { avail: USER - 1, ..good }, "avail"),
        (VringAddr { used: u64::MAX, ..good }, "used"),
    ] {
        let error = rig.err(R::SET_VRING_ADDR, bad.to_bytes(), 0);
        assert!(matches!(error, E::RingOutside { part, .. } if part == name), "{error}");
    }
    rig.ok(R::SET_VRING_NUM, st(0, 256));
    rig.ok(R::SET_VRING_BASE, st(0, 0));
    rig.ok(R::SET_VRING_ADDR, addr(0, USER + SIZE - 0x5000).to_bytes());
    rig.ok(R::SET_VRING_ADDR, VringAddr { desc: USER + 8, ..good }.to_bytes());
    let error = rig.err(R::SET_VRING_KICK, u(0), 1);
    assert!(matches!(error, E::Layout { ring: 0, .. }), "{error}");
    rig.ok(R::SET_VRING_ADDR, good.to_bytes());
    assert_eq!(rig.fake.did(), []);
    rig.ok(R::SET_VRING_BASE, st(0, 0x1_0000));
    assert!(matches!(rig.err(R::SET_VRING_KICK, u(0), 1), E::Layout { .. }));
}

#[test]
fn invalid_tables() {
    let mut rig = Rig::new();
    let one = [region(GUEST, USER, SIZE)];
    let bytes = MemRegion::table_to_bytes(&one);
    let short = bytes[..39].to_vec();
    assert!(matches!(rig.err(R::SET_MEM_TABLE, short, 1), E::Payload { got: 39, .. }));
    assert!(matches!(rig.err(R::SET_MEM_TABLE, vec![1], 0), E::Payload { .. }));
    let empty = MemRegion::table_to_bytes(&[]);
    assert!(matches!(rig.err(R::SET_MEM_TABLE, empty, 0), E::RegionCount(0)));
    let nine: Vec<_> = (0..9).map(|i| region(i * SIZE, USER + i * SIZE, SIZE)).collect();
    assert!(matches!(rig.table(&nine).unwrap_err(), E::RegionCount(9)));
    assert!(matches!(
        rig.err(R::SET_MEM_TABLE, bytes.clone(), 0),
        E::FdCount { want: 1, got: 0, .. }
    ));
    assert!(matches!(
        rig.err(R::SET_MEM_TABLE, bytes.clone(), 2),
        E::FdCount { want: 1, got: 2, .. }
    ));
    let error = rig.err(R::SET_MEM_TABLE, bytes, 1);
    assert!(matches!(error, E::FdKind { kind: FdKind::Event, .. }), "{error}");
    let twice = [one[0], region(GUEST + 0x1000, USER + SIZE, SIZE)];
    assert!(matches!(rig.table(&twice).unwrap_err(), E::Table(_)));
    let wraps = [region(u64::MAX - 0xfff, USER, SIZE)];
    assert!(matches!(rig.table(&wraps).unwrap_err(), E::Table(_)));
    let beyond = [region(GUEST, USER, SIZE + 1)];
    assert!(matches!(rig.table(&beyond).unwrap_err(), E::Map { .. }));
    for mmap_offset in [SIZE, 1 << 50, u64::MAX] {
        let far = [MemRegion { mmap_offset, ..one[0] }];
        assert!(matches!(rig.table(&far).unwrap_err(), E::Map { .. }));
    }
    assert_eq!(rig.fake.did(), []);
}

#[test]
fn what_was_not_negotiated_or_offered_is_refused() {
    let mut rig = Rig::new();
    let gated = [
        (R::GET_QUEUE_NUM, 0),
        (R::SEND_RARP, 2),
        (R::NET_SET_MTU, 4),
        (R::SET_BACKEND_REQ_FD, 5),
        (R::SET_CONFIG, 9),
        (R::RESET_DEVICE, 13),
        (R::VRING_KICK, 14),
        (R::GET_MAX_MEM_SLOTS, 15),
        (R::ADD_MEM_REG, 15),
        (R::REM_MEM_REG, 15),
        (R::GET_STATUS, 16),
        (R::SET_STATUS, 16),
    ];
    for (request, want) in gated {
        let error = rig.err(request, u(0), 0);
        assert!(matches!(error, E::NotNegotiated { bit, .. } if bit == want), "{error}");
    }
    for request in [R::POSTCOPY_ADVISE, R::GET_INFLIGHT_FD] {
        assert!(matches!(rig.err(request, u(0), 0), E::NotOffered(_)));
    }
    let bits = u(1 << 31 | feature::VERSION_1);
    assert!(matches!(rig.err(R::SET_FEATURES, bits, 0), E::Features { extra: 0x8000_0000 }));
    assert!(matches!(
        rig.err(R::SET_PROTOCOL_FEATURES, u(1 << 19), 0),
        E::ProtocolFeatures { extra: 0x8_0000 }
    ));
    assert!(matches!(rig.err(R::SET_FEATURES, vec![0; 7], 0), E::Payload { got: 7, .. }));
    assert!(matches!(rig.err(R::GET_FEATURES, vec![], 1), E::FdCount { want: 0, got: 1, .. }));
    let in_band = ProtocolFeatures::INBAND_NOTIFICATIONS | ProtocolFeatures::REPLY_ACK;
    let error = rig.err(R::SET_PROTOCOL_FEATURES, u(in_band.bits()), 0);
    assert!(matches!(error, E::InBand) && error.is_fatal());
    assert_eq!(rig.fake.did(), []);
}

#[test]
fn values_that_messages_do_not_allow() {
    let mut rig = Rig::ready(feature::VERSION_1);
    assert!(matches!(rig.err(R::SET_VRING_ENABLE, st(0, 2), 0), E::Value { .. }));
    assert!(matches!(rig.err(R::SET_VRING_KICK, u(0x200), 1), E::Value { .. }));
    assert!(matches!(rig.err(R::SET_VRING_KICK, u(NO_FD), 1), E::FdCount { want: 0, .. }));
    assert!(matches!(rig.err(R::SET_VRING_CALL, u(0), 0), E::FdCount { want: 1, .. }));
    assert!(matches!(rig.err(R::SET_VRING_ERR, u(0), 2), E::FdCount { want: 1, got: 2, .. }));
    assert!(matches!(rig.err(R::SET_VRING_CALL, u(200), 1), E::Ring { index: 200, .. }));
    assert!(matches!(rig.err(R::SET_STATUS, u(0x100), 0), E::Value { .. }));
    assert!(matches!(rig.err(R::NET_SET_MTU, u(0x1_0000), 0), E::Value { .. }));
    assert!(matches!(rig.err(R::NET_SET_MTU, u(60), 0), E::Mtu { mtu: 60, .. }));
    assert!(matches!(rig.err(R::SET_VRING_ADDR, vec![0; 39], 0), E::Payload { .. }));
    assert!(matches!(rig.err(R::GET_VRING_BASE, st(99, 0), 0), E::Ring { .. }));
}

#[test]
fn need_reply_keeps_the_connection_if_the_reply_is_a_number() {
    let mut rig = Rig::ready(feature::VERSION_1);
    let ask = |rig: &mut Rig, request: u32, payload| {
        rig.backend.handle(&Message::request(request, payload, true), vec![])
    };
    let good = ask(&mut rig, R::SET_VRING_NUM.into(), st(0, 256)).unwrap();
    assert_eq!(good.reply.unwrap().payload, u(0));
    for (request, payload) in [
        (R::SET_VRING_NUM.into(), st(0, 0)),
        (R::SET_LOG_BASE.into(), u(0)),
        (R::POSTCOPY_END.into(), vec![]),
        (77, vec![]),
    ] {
        let bad = ask(&mut rig, request, payload).unwrap();
        assert_eq!(bad.reply, Some(Message::reply(request, u(1))));
        assert!(bad.refused.is_some());
    }
    // A 1 would be interpreted as the base; after a framing error the stream is unusable.
    assert!(ask(&mut rig, R::GET_VRING_BASE.into(), st(99, 0)).is_err());
    let bits = ProtocolFeatures::INBAND_NOTIFICATIONS.bits();
    assert!(ask(&mut rig, R::SET_PROTOCOL_FEATURES.into(), u(bits)).is_err());
    // Without need_reply the same faults close.
    let error = rig.backend.handle(&Message::request(77_u32, vec![], false), vec![]).unwrap_err();
    assert!(matches!(error, E::UnknownRequest(77)));
    assert!(matches!(rig.err(R::SET_VRING_NUM, st(0, 0), 0), E::QueueSize { .. }));
}

#[test]
fn configuration_is_read_in_windows_and_never_written() {
    let mut rig = Rig::ready(feature::VERSION_1);
    let ask = |offset, size| {
        ConfigWindow { offset, size, flags: 0, bytes: vec![0; size as usize] }.to_bytes()
    };
    let reply = rig.ok(R::GET_CONFIG, ask(8, 4));
    assert_eq!(ConfigWindow::parse(&reply).unwrap().bytes, [16, 0, 220, 5]);
    let reply = rig.ok(R::GET_CONFIG, ask(10, 6));
    assert_eq!(ConfigWindow::parse(&reply).unwrap().bytes, [220, 5, 0, 0, 0, 0]);
    for window in [ask(250, 7), ask(0, 0), vec![0; 5]] {
        let message = Message::request(R::GET_CONFIG, window, false);
        let outcome = rig.backend.handle(&message, vec![]).unwrap();
        assert_eq!(outcome.reply.unwrap().payload, []);
        assert!(outcome.refused.is_some());
    }
    let message = Message::request(R::SET_CONFIG, ask(0, 6), true);
    let outcome = rig.backend.handle(&message, vec![]).unwrap();
    assert_eq!(outcome.reply.unwrap().payload, u(1));
    let message = Message::request(R::SET_CONFIG, ask(0, 6), false);
    let outcome = rig.backend.handle(&message, vec![]).unwrap();
    assert!(outcome.reply.is_none() && matches!(outcome.refused, Some(E::ConfigReadOnly)));
}

#[test]
fn the_device_as_a_whole() {
    let mut rig = Rig::ready(feature::VERSION_1);
    assert_eq!(
        rig.ok(R::GET_FEATURES, vec![]),
        u(FEATURES | feature::PROTOCOL_FEATURES | feature::LOG_ALL)
    );
    assert_eq!(rig.ok(R::GET_PROTOCOL_FEATURES, vec![]), u(PROTOCOL_FEATURES.bits()));
    assert_eq!(PROTOCOL_FEATURES.bits(), 0x1_e23f);
    assert_eq!(rig.ok(R::GET_QUEUE_NUM, vec![]), u(32));
    assert_eq!(rig.backend.features(), feature::VERSION_1);
    rig.ok(R::NET_SET_MTU, u(9000));
    rig.ok(R::SEND_RARP, vec![2, 0, 0, 0, 0, 9, 0, 0]);
    assert_eq!(rig.fake.did(), [Did::Mtu(9000), Did::Rarp([2, 0, 0, 0, 0, 9])]);
    rig.ok(R::SET_STATUS, u(15));
    assert_eq!(rig.ok(R::GET_STATUS, vec![]), u(15));
    rig.ring(0, 256, 3);
    rig.ok(R::SET_VRING_ENABLE, st(0, 1));
    rig.fake.did();
    for reset in [R::SET_STATUS, R::RESET_DEVICE] {
        rig.ok(reset, u(0));
        assert_eq!(rig.fake.did(), [Did::Stop(0), Did::Reset]);
        assert_eq!(rig.ok(R::GET_STATUS, vec![]), u(0));
        // Set up again: disabled, and the call fd is still known.
        rig.ring(0, 256, 0);
        assert_eq!(rig.fake.did(), [start(0, 0), Did::Enable(0, false)]);
    }
    let device = rig.backend.close();
    assert_eq!(device.queues_max(), 32);
    assert_eq!(rig.fake.did(), [Did::Stop(0), Did::Reset]);
}

#[test]
fn in_band_kicks_start_rings_and_calls_go_to_the_front_end() {
    let mut rig = Rig::ready(feature::VERSION_1);
    let (read, write) = UnixStream::pair().unwrap();
    rig.send(R::SET_BACKEND_REQ_FD, vec![], vec![write.into()]).unwrap();
    rig.ok(R::SET_VRING_NUM, st(1, 256));
    rig.ok(R::SET_VRING_BASE, st(1, 0));
    rig.ok(R::VRING_KICK, st(1, 0));
    assert_eq!(rig.fake.did(), [], "no kick for a stopped ring");
    rig.ok(R::SET_VRING_ADDR, addr(1, USER).to_bytes());
    rig.ok(R::VRING_KICK, st(1, 0));
    let start =
        Did::Start { ring: 1, size: 256, base: 0, desc: GUEST, packed: false, kick: "in band" };
    assert_eq!(rig.fake.did(), [start, Did::Enable(1, false), Did::Kick(1)]);
    let setup = rig.fake.state().setups[&1].clone();
    // Another channel while the ring runs.
    let (_other, write) = UnixStream::pair().unwrap();
    rig.send(R::SET_BACKEND_REQ_FD, vec![], vec![write.into()]).unwrap();
    assert_eq!(rig.fake.did(), [Did::SetCall(1, true)]);
    rig.backend.requests = Some(match &setup.call {
        Some(Call::InBand { to, .. }) => Arc::clone(to),
        other => panic!("{other:?}"),
    });
    setup.call.unwrap().signal();
    setup.err.unwrap().signal();
    rig.backend.requests().unwrap().notify_config_change();
    let mut bytes = [0; 64];
    let n = rustix::io::read(&read, &mut bytes).unwrap();
    let call = Message::request(4_u32, st(1, 0), false).to_bytes();
    let err = Message::request(5_u32, st(1, 0), false).to_bytes();
    let config = Message::request(2_u32, vec![], false).to_bytes();
    assert_eq!(bytes[..n], [call, err, config].concat());
}

/// Issue 14, row 2.
#[test]
fn descriptors_of_a_kind_that_may_block_are_refused() {
    let mut rig = Rig::ready(feature::VERSION_1);
    rig.backend =
        rig.backend.with_permissions(Permissions { polled: false, ..Permissions::default() });
    let tcp = || {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        OwnedFd::from(std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap())
    };
    let file = || {
        let at = std::env::current_exe().unwrap();
        OwnedFd::from(std::fs::File::open(at).unwrap())
    };
    let datagram = || OwnedFd::from(std::os::unix::net::UnixDatagram::unbound().unwrap());
    let one = MemRegion::table_to_bytes(&[region(GUEST, USER, SIZE)]);
    let single = region(GUEST + SIZE, USER + SIZE, SIZE).to_single_bytes();
    for of in [&tcp as &dyn Fn() -> OwnedFd, &file, &datagram] {
        for (request, payload) in [
            (R::SET_MEM_TABLE, one.clone()),
            (R::ADD_MEM_REG, single.clone()),
            (R::SET_VRING_KICK, u(0)),
            (R::SET_VRING_CALL, u(0)),
            (R::SET_VRING_ERR, u(0)),
            (R::SET_BACKEND_REQ_FD, vec![]),
        ] {
            let error = rig.send(request, payload, vec![of()]).unwrap_err();
            assert!(matches!(error, E::FdKind { kind: FdKind::Other, .. }), "{error}");
        }
    }
    // Memory in any file is a setting; a file that cannot be mapped is still refused.
    rig.backend = rig.backend.with_permissions(Permissions { any_memory: true, polled: false });
    let error = rig.send(R::SET_MEM_TABLE, one, vec![tcp()]).unwrap_err();
    assert!(matches!(error, E::Map { .. }), "{error}");
}

/// Issue 14, row 13.
#[test]
fn ring_without_a_kick_is_refused_if_the_operator_forbids_polling() {
    let mut rig = Rig::ready(feature::VERSION_1);
    rig.backend =
        rig.backend.with_permissions(Permissions { polled: false, ..Permissions::default() });
    rig.ok(R::SET_PROTOCOL_FEATURES, u(0));
    rig.ring(1, 256, 0);
    rig.fake.did();
    let error = rig.err(R::SET_VRING_KICK, u(1 | NO_FD), 0);
    assert!(matches!(error, E::Polled { ring: 1 }), "{error}");
    assert_eq!(rig.fake.did(), [Did::Stop(1)]);
}

#[test]
fn in_band_calls_on_a_full_channel_stay_pending() {
    let (read, write) = UnixStream::pair().unwrap();
    let requests = BackendRequests::new(ForeignFd::new(write.into(), &Arc::default()).unwrap());
    for _ in 0..10_000 {
        requests.notify(3, false);
    }
    requests.notify(40, false);
    assert!(requests.flush(), "still pending");
    let mut all = vec![0; 1 << 20];
    while os::wait_readable(read.as_fd(), Duration::ZERO).unwrap() {
        rustix::io::read(&read, &mut all[..]).unwrap();
    }
    assert!(!requests.flush());
    let n = rustix::io::read(&read, &mut all[..]).unwrap();
    let [three, forty] = [3, 40].map(|ring| Message::request(4_u32, st(ring, 0), false).to_bytes());
    assert_eq!(all[..n], [three, forty].concat());
    drop(read);
    requests.notify(1, false);
    assert!(!requests.flush(), "nothing is pending for a closed peer");
}
