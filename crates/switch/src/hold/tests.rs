use super::*;

use crate::fdb::PortId;
use crate::time::{Instant, Ns};

const MS: Ns = Ns::from_ms(1);

/// So long after the start.
fn after(time: Ns) -> Instant {
    Instant::START + time
}

fn frame(len: usize, since: Instant, from: Option<&Arc<IngressStats>>) -> HeldFrame {
    HeldFrame {
        bytes: vec![0; len].into(),
        hdr: VnetHdr::NONE,
        part: 0,
        since,
        from: from.cloned(),
    }
}

#[test]
fn frames_are_charged_to_the_destination_and_released() {
    let account = Arc::new(Account::default());
    account.set_limit("held-bytes", 250);
    let mut hold = Hold::new(Arc::clone(&account));
    let used = || (account.held_frames.used(), account.held_bytes.used());
    for _ in 0..2 {
        assert!(hold.charge(100, 9));
        hold.push(frame(100, Instant::START, None));
    }
    assert!(!hold.charge(100, 9), "its bytes");
    assert!(!hold.charge(10, 2), "its frames");
    assert_eq!(used(), (2, 200));
    hold.remove(1);
    assert_eq!((used(), hold.len()), ((1, 100), 1));
    account.set_limit("held-frames", 1);
    assert!(!hold.charge(10, 9), "the port's frames");
    assert_eq!(account.held_frames.refused() + account.held_bytes.refused(), 2);
    drop(hold);
    assert_eq!(used(), (0, 0));
}

#[test]
fn frames_held_too_long_are_counted_at_both_ends() {
    let (stats, sender) = (EgressStats::default(), Arc::new(IngressStats::default()));
    let mut hold = Hold::new(Arc::default());
    for (since, from) in [(1, Some(&sender)), (2, None), (3, Some(&sender))] {
        assert!(hold.charge(60, 9));
        hold.push(frame(60, after(Ns::new(since)), from));
    }
    assert_eq!(hold.expire(after(Ns::new(1) + WAIT_MAX), false, &stats), 0);
    assert_eq!(hold.expire(after(Ns::new(3) + WAIT_MAX), false, &stats), 2);
    let counted = (sender.drops_no_room.get(), stats.lost_aged.get(), stats.drops_aged.get());
    assert_eq!((counted, hold.len()), ((1, 1, 1), 1));
    hold.clear(&stats);
    assert_eq!((stats.drops_held_down.get(), hold.len()), (1, 0));
}

#[test]
fn destinations_are_tracked_for_a_second_and_an_overflow_is_detected() {
    let sender = Backpressure::default();
    let second = Ns::from_secs(1);
    let at = |port| QueueId { port: PortId(port), queue: 0 };
    let second_queue = QueueId { queue: 1, ..at(2) };
    for ms in 1..5 {
        sender.record_destination(at(1), after(ms * MS));
    }
    sender.record_destination(at(2), after(6 * MS));
    sender.record_destination(second_queue, after(7 * MS));
    sender.record_destination(at(1), after(8 * MS));
    assert_eq!(sender.recent(after(9 * MS)), Some(vec![at(1), second_queue, at(2)]));
    assert_eq!(sender.recent(after(6 * MS + second)), Some(vec![at(1), second_queue]));
    // After an idle time it sends to another one.
    sender.record_destination(at(3), after(3 * second));
    assert_eq!(sender.recent(after(3 * second)), Some(vec![at(3)]));
    (10..18).for_each(|port| sender.record_destination(at(port), after(3 * second) + Ns::new(1)));
    assert_eq!(sender.recent(after(3 * second + Ns::new(1))), None);
    assert_eq!(sender.recent(after(4 * second + Ns::new(1))), Some(vec![]));
}

#[test]
fn no_sender_waits_for_a_destination_that_is_too_slow() {
    let meter = PauseMeter::default();
    let start = after(1_000 * MS);
    // A frame every 45 ms.
    let slow = (0..200).find(|ms| {
        meter.record_pause(ms / 45, start + *ms * MS);
        meter.is_slow(start + *ms * MS)
    });
    assert_eq!(slow, Some(51));
    assert!(meter.is_slow(start + 1050 * MS) && !meter.is_slow(start + 1051 * MS));
    // Again, for as long as a pause lasts.
    let from = start + 2000 * MS;
    let slow = (0..200).find(|ms| {
        meter.record_pause(100 + ms / 45, from + *ms * MS);
        meter.is_slow(from + *ms * MS)
    });
    assert_eq!(slow, Some(51));
}

#[test]
fn senders_wait_for_a_destination_that_is_slower_or_lost_its_cpu() {
    let meter = PauseMeter::default();
    for ms in 0..5000 {
        // A burst of frames every 40 ms.
        meter.record_pause(ms / 40 * 32, after(ms * MS));
        assert!(!meter.is_slow(after(ms * MS)), "{ms}");
    }
    // No pause for a while: that time does not count against it.
    meter.record_pause(10_000, after(9000 * MS));
    meter.record_pause(10_000, after(9049 * MS));
    assert!(!meter.is_slow(after(9049 * MS)));
}
