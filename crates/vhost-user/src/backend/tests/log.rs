//! The dirty log of a guest that migrates.

use super::*;
use crate::message::{LogRegion, VRING_F_LOG};

const LOG_ALL: u64 = feature::VERSION_1 | feature::LOG_ALL | feature::PROTOCOL_FEATURES;
/// Bytes of a log for the rig's memory, which ends at 2 MiB.
const LEN: u64 = (GUEST + SIZE) / 4096 / 8;

/// A log and its contents.
fn file(len: u64) -> (OwnedFd, Arc<Mapping>) {
    let mapping = Arc::new(Mapping::memfd("log", len).unwrap());
    (mapping.fd().unwrap().try_clone_to_owned().unwrap(), mapping)
}

fn payload(size: u64, offset: u64) -> Vec<u8> {
    LogRegion { size, offset }.to_bytes()
}

/// Number of pages that are marked.
fn marked(log: &Mapping, len: u64) -> u32 {
    let mut bytes = vec![0; len as usize];
    log.seg(0, len as u32).unwrap().read(&mut bytes);
    bytes.iter().map(|byte| byte.count_ones()).sum()
}

impl Rig {
    fn set_log(&mut self) -> Arc<Mapping> {
        let (fd, log) = file(LEN);
        let reply = self.send(R::SET_LOG_BASE, payload(LEN, 0), vec![fd]).unwrap();
        // Without need_reply, too: QEMU waits for it.
        assert_eq!(reply, u(0));
        log
    }

    fn ring_log(&self, ring: u16) -> Option<(u64, u64)> {
        let log = self.fake.state().setups[&ring].log.clone();
        log.map(|log| (log.desc, log.device))
    }
}

/// QEMU, as in `vhost_migration_log`.
#[test]
fn logging_begins_and_ends_on_running_rings() {
    let mut rig = Rig::ready(feature::VERSION_1);
    rig.ring(0, 256, 0);
    rig.ring(1, 256, 0);
    for ring in [0, 1] {
        rig.ok(R::SET_VRING_ENABLE, st(ring, 1));
    }
    rig.fake.did();
    rig.set_log();
    assert_eq!(rig.fake.did(), [], "nothing is logged yet");
    rig.ok(R::SET_FEATURES, u(LOG_ALL));
    let on = [Did::Features(feature::VERSION_1), Did::SetLog(0, true), Did::SetLog(1, true)];
    assert_eq!(rig.fake.did(), on, "the guest's features stay");
    assert!(rig.backend.is_logging());
    assert_eq!(rig.ring_log(0), Some((GUEST, GUEST + 0x4000)));
    let flagged = VringAddr { flags: VRING_F_LOG, log: 0x12_3450, ..addr(0, USER) };
    rig.ok(R::SET_VRING_ADDR, flagged.to_bytes());
    assert_eq!(rig.fake.did(), [Did::SetLog(0, true)], "the ring is not restarted");
    assert_eq!(rig.ring_log(0), Some((GUEST, 0x12_3450)));
    // The last pass: rings stop, then logging.
    rig.ok(R::GET_VRING_BASE, st(1, 0));
    rig.fake.did();
    rig.ok(R::SET_FEATURES, u(feature::VERSION_1 | feature::PROTOCOL_FEATURES));
    let off = [Did::Features(feature::VERSION_1), Did::SetLog(0, false)];
    assert_eq!(rig.fake.did(), off);
    assert!(rig.ring_log(0).is_none() && !rig.backend.is_logging());
    // A ring that starts while logging is on logs from its start.
    rig.ok(R::SET_FEATURES, u(LOG_ALL));
    rig.send(R::SET_VRING_KICK, u(1), vec![event()]).unwrap();
    assert_eq!(rig.ring_log(1), Some((GUEST + 0x8000, GUEST + 0xc000)));
}

/// Cloud Hypervisor, as in `vu_common_ctrl`: a new log at each pass, whose predecessor it reads.
#[test]
fn log_is_replaced_at_each_pass_and_only_the_newest_is_charged() {
    let mut rig = Rig::ready(feature::VERSION_1);
    rig.ring(0, 256, 0);
    let used = rig.backend.account().mappings.used();
    let mut logs = vec![rig.set_log()];
    rig.ok(R::SET_FEATURES, u(LOG_ALL));
    for pass in 1..4 {
        logs.push(rig.set_log());
        assert_eq!(rig.backend.account().mappings.used(), used + 1);
        let mut state = rig.fake.state();
        let queue = state.queues.get_mut(&0).unwrap();
        queue.disarm();
        drop(state);
        let marks: Vec<_> = logs.iter().map(|log| marked(log, LEN)).collect();
        let newest: Vec<_> = (0..=pass).map(|i| u32::from(i > 0)).collect();
        assert_eq!(marks, newest, "one mark in each: none came later");
    }
}

#[test]
fn pages_that_were_written_before_the_log_came_are_all_marked() {
    let mut rig = Rig::ready(feature::VERSION_1);
    // QEMU starts a device during a migration in this order.
    rig.ok(R::SET_FEATURES, u(LOG_ALL));
    rig.ring(0, 256, 0);
    let log = rig.set_log();
    assert_eq!(marked(&log, LEN), (SIZE / 4096) as u32);
    // Of a log that follows another, nothing was missed.
    assert_eq!(marked(&rig.set_log(), LEN), 0);
    assert!(rig.ring_log(0).is_some());
}

/// QEMU, when a guest resets during a migration: it reads the log for the last time when all rings
/// have stopped, and sends another one after they have started again.
#[test]
fn pages_that_were_written_before_the_log_of_a_guest_that_resets_came_are_all_marked() {
    let resets: [&[R]; 3] = [&[], &[R::SET_STATUS], &[R::RESET_DEVICE]];
    for reset in resets {
        let mut rig = Rig::ready(feature::VERSION_1);
        rig.ring(0, 256, 0);
        rig.ring(1, 256, 0);
        rig.set_log();
        rig.ok(R::SET_FEATURES, u(LOG_ALL));
        // One ring stops and starts: what it wrote is in the log that is read.
        rig.ok(R::GET_VRING_BASE, st(1, 0));
        rig.send(R::SET_VRING_KICK, u(1), vec![event()]).unwrap();
        let old = rig.set_log();
        assert_eq!(marked(&old, LEN), 0);
        for ring in [0, 1] {
            rig.fake.state().queues.get_mut(&ring).unwrap().disarm();
            rig.ok(R::GET_VRING_BASE, st(ring.into(), 0));
        }
        assert_eq!(marked(&old, LEN), 2, "the last writes are in the log that is read then");
        for request in reset {
            rig.ok(*request, if *request == R::SET_STATUS { u(0) } else { vec![] });
        }
        rig.ok(R::SET_FEATURES, u(LOG_ALL));
        rig.ring(0, 256, 0);
        let log = rig.set_log();
        assert_eq!(marked(&log, LEN), (SIZE / 4096) as u32, "{reset:?}");
        assert_eq!(marked(&rig.set_log(), LEN), 0, "{reset:?}");
    }
}

#[test]
fn pages_that_were_written_before_the_log_of_the_next_migration_came_are_all_marked() {
    let mut rig = Rig::ready(feature::VERSION_1);
    rig.ring(0, 256, 0);
    rig.set_log();
    rig.ok(R::SET_FEATURES, u(LOG_ALL));
    rig.ok(R::SET_FEATURES, u(feature::VERSION_1 | feature::PROTOCOL_FEATURES));
    rig.ok(R::SET_FEATURES, u(LOG_ALL));
    assert_eq!(marked(&rig.set_log(), LEN), (SIZE / 4096) as u32);
}

#[test]
fn log_that_cannot_be_used_is_refused_and_the_old_one_stays() {
    let mut rig = Rig::ready(feature::VERSION_1);
    rig.ring(0, 256, 0);
    rig.set_log();
    rig.ok(R::SET_FEATURES, u(LOG_ALL));
    let used = rig.backend.account().mapped_bytes.used();
    rig.fake.did();
    let mut refused = |payload: Vec<u8>, fd: OwnedFd| {
        let error = rig.send(R::SET_LOG_BASE, payload, vec![fd]).unwrap_err();
        assert!(!error.is_fatal() && error.to_string().len() > 20, "{error}");
        error
    };
    let short = refused(payload(LEN - 1, 0), file(LEN).0);
    assert!(matches!(short, E::LogShort { has: 504, needs: 512 }), "{short}");
    assert!(short.to_string().contains("504 pages"), "{short}");
    assert!(matches!(refused(payload(LEN, 4096), file(4096).0), E::LogMap(_)));
    assert!(matches!(refused(payload(0, 0), file(LEN).0), E::LogMap(_)));
    assert!(matches!(refused(payload(u64::MAX, 4096), file(LEN).0), E::LogMap(_)));
    assert!(matches!(refused(payload(LEN, 8), file(4096).0), E::LogOffset { offset: 8 }));
    assert!(matches!(refused(payload(LEN, 0), event()), E::FdKind { .. }));
    assert!(matches!(refused(vec![0; 15], file(LEN).0), E::Payload { got: 15, .. }));
    assert!(matches!(rig.err(R::SET_LOG_BASE, payload(LEN, 0), 0), E::FdCount { want: 1, .. }));
    assert_eq!(rig.fake.did(), [], "no ring was touched");
    assert_eq!(rig.backend.account().mapped_bytes.used(), used);
    assert!(rig.backend.is_logging());
    // One byte more than the file has would be lost with it.
    assert!(matches!(
        rig.send(R::SET_LOG_BASE, payload(8192, 0), vec![file(LEN).0]),
        Err(E::LogMap(_))
    ));
}

#[test]
fn log_beyond_the_limit_of_the_port_is_refused() {
    let account = Account::default();
    account.set_limit("mapped-bytes", SIZE);
    let mut rig = Rig::with(account);
    rig.ok(R::SET_PROTOCOL_FEATURES, u(PROTOCOL_FEATURES.bits()));
    rig.table(&[region(GUEST, USER, SIZE)]).unwrap();
    let error = rig.send(R::SET_LOG_BASE, payload(LEN, 0), vec![file(LEN).0]).unwrap_err();
    assert!(matches!(error, E::LogOverLimit(_)) && error.to_string().contains("mapped-bytes"));
}

#[test]
fn memory_that_outgrows_its_log_is_refused_while_it_is_logged() {
    let mut rig = Rig::ready(feature::VERSION_1);
    rig.ring(0, 256, 0);
    rig.set_log();
    let more = region(GUEST + SIZE, USER + SIZE, SIZE).to_single_bytes();
    let add = |rig: &mut Rig| rig.send(R::ADD_MEM_REG, more.clone(), vec![memfd()]);
    rig.ok(R::SET_FEATURES, u(LOG_ALL));
    assert!(matches!(add(&mut rig), Err(E::LogShort { .. })));
    assert!(rig.ring_log(0).is_some(), "the old table and log stay");
    // A log that is left from an earlier migration is no obstacle, and is not used again.
    rig.ok(R::SET_FEATURES, u(feature::VERSION_1 | feature::PROTOCOL_FEATURES));
    add(&mut rig).unwrap();
    rig.ok(R::SET_FEATURES, u(LOG_ALL));
    assert!(rig.ring_log(0).is_none() && !rig.backend.is_logging());
}

#[test]
fn log_needs_its_protocol_feature_and_its_signal_is_checked() {
    let mut rig = Rig::new();
    for request in [R::SET_LOG_BASE, R::SET_LOG_FD] {
        assert!(matches!(rig.err(request, u(0), 1), E::NotNegotiated { bit: 1, .. }));
    }
    let mut rig = Rig::ready(feature::VERSION_1);
    rig.send(R::SET_LOG_FD, vec![], vec![event()]).unwrap();
    assert!(matches!(rig.send(R::SET_LOG_FD, vec![], vec![memfd()]), Err(E::FdKind { .. })));
    assert!(matches!(rig.err(R::SET_LOG_FD, vec![], 0), E::FdCount { .. }));
}

#[test]
fn another_process_continues_with_the_log() {
    for killed in [false, true] {
        let mut old = Rig::ready(feature::VERSION_1);
        old.ring(0, 256, 0);
        let log = old.set_log();
        old.ok(R::SET_FEATURES, u(LOG_ALL));
        let (state, fds) = old.exported();
        let mut new = handover::import(&state, fds).unwrap();
        assert_eq!(new.exported().0, state);
        let before = marked(&log, LEN);
        if killed {
            new.backend.resume_killed().unwrap();
            // The last marks of the killed process are not known.
            assert_eq!(marked(&log, LEN), (SIZE / 4096) as u32);
        } else {
            new.backend.resume(&old.backend.positions()).unwrap();
            assert_eq!(marked(&log, LEN), before);
        }
        assert_eq!(new.ring_log(0), Some((GUEST, GUEST + 0x4000)));
        let mut state = new.fake.state();
        state.queues.get_mut(&0).unwrap().disarm();
        assert!(marked(&log, LEN) > 0);
    }
}

/// A memory of several steps, whose log came late.
fn marking() -> (Rig, Arc<Mapping>) {
    let mut rig = Rig::ready(feature::VERSION_1);
    let memory = Mapping::memfd("t", LARGE).unwrap();
    let fd = memory.fd().unwrap().try_clone_to_owned().unwrap();
    let table = MemRegion::table_to_bytes(&[region(0, USER, LARGE)]);
    rig.send(R::SET_MEM_TABLE, table, vec![fd]).unwrap();
    rig.ok(R::SET_FEATURES, u(LOG_ALL));
    rig.ring(0, 256, 0);
    let (fd, log) = file(LARGE_LOG);
    rig.send(R::SET_LOG_BASE, payload(LARGE_LOG, 0), vec![fd]).unwrap();
    (rig, log)
}

const LARGE: u64 = 7 << 30;
const LARGE_LOG: u64 = LARGE / 4096 / 8;
const PAGES: u32 = (LARGE / 4096) as u32;

#[test]
fn message_waits_for_pages_that_are_being_marked() {
    let (mut rig, log) = marking();
    assert!(rig.backend.is_marking());
    let first = marked(&log, LARGE_LOG);
    assert!((1..PAGES).contains(&first), "{first}");
    assert!(rig.backend.mark_more());
    rig.ok(R::GET_VRING_BASE, st(0, 0));
    assert_eq!(marked(&log, LARGE_LOG), PAGES);
    assert!(!rig.backend.is_marking() && !rig.backend.mark_more());
}

#[test]
fn another_process_marks_the_pages_that_are_left() {
    let (old, log) = marking();
    let (state, fds) = old.exported();
    let mut new = handover::import(&state, fds).unwrap();
    assert!(new.backend.is_marking());
    while new.backend.mark_more() {}
    assert_eq!(marked(&log, LARGE_LOG), PAGES);
}
