//! Which events count as kicks, for policies and counters.

use super::*;

#[test]
fn first_frame_is_timed_from_its_kick() {
    let rig = Rig::new(Policy::Event, Guest::default());
    rig.wait_for_sleep();
    // Polled from now on; later frames are not preceded by a sleep.
    rig.tuning.set_poll(Policy::Spin);
    rig.pool.poll(TOKEN);
    rig.wait_for("polls", |rig| rig.bursts() > 1000);
    std::thread::sleep(Duration::from_millis(300));
    rig.guest.waiting.store(1, Ordering::SeqCst);
    rig.wait_for("a frame", |rig| rig.taken() == 1);
    assert_eq!((rig.stats.first_frames.get(), rig.stats.first_frame_ns_max.get()), (0, 0));
    // A kick without a frame, then a frame; then a kick with one.
    rig.tuning.set_poll(Policy::Timer { hz: 100 });
    rig.pool.poll(TOKEN);
    rig.wait_for_sleep();
    rig.tuning.set_poll(Policy::Spin);
    rig.kick();
    rig.wait_for("the kick", |rig| rig.stats.wakes.get() == 1);
    std::thread::sleep(Duration::from_millis(300));
    rig.guest.waiting.store(1, Ordering::SeqCst);
    rig.wait_for("a frame", |rig| rig.taken() == 2);
    assert_eq!(rig.stats.first_frames.get(), 0);
    rig.tuning.set_poll(Policy::Event);
    rig.wait_for_sleep();
    rig.guest.waiting.store(1, Ordering::SeqCst);
    rig.kick();
    rig.wait_for("a frame", |rig| rig.taken() == 3);
    rig.wait_for_sleep();
    let IngressStats { first_frames, first_frame_ns, first_frame_ns_max, .. } = &*rig.stats;
    assert_eq!((first_frames.get(), first_frame_ns.get()), (1, first_frame_ns_max.get()));
    assert!((1..300_000_000).contains(&first_frame_ns.get()), "{first_frame_ns:?} ns");
}

#[test]
fn polls_by_an_operator_are_not_counted_as_kicks() {
    let rig = Rig::new(Policy::Event, Guest::default());
    let counts = || (rig.stats.kicks.get(), rig.stats.wakes.get());
    rig.wait_for_sleep();
    for policy in ["spin", "adaptive", "event"] {
        let bursts = rig.bursts();
        rig.tuning.set_poll(policy.parse().unwrap());
        rig.pool.poll(TOKEN);
        rig.wait_for("a poll", |rig| rig.bursts() > bursts);
    }
    rig.wait_for_sleep();
    rig.drain(true);
    rig.wait_for("the queue to be drained", Rig::is_drained);
    let bursts = rig.bursts();
    rig.drain(false);
    rig.wait_for("a poll", |rig| rig.bursts() > bursts);
    assert_eq!(counts(), (0, 0));
    rig.wait_for_sleep();
    rig.kick();
    rig.wait_for("a kick", |_| counts() == (1, 1));
    // Not by its descriptor.
    rig.wait_for_sleep();
    rig.pool.kick(TOKEN);
    rig.wait_for("a kick", |_| counts() == (2, 2));
}
