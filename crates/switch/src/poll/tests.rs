use super::*;

const COSTS: Costs = Costs::TYPICAL;

/// So many nanoseconds after the start.
fn at(ns: u64) -> Instant {
    Instant::from_ns(ns)
}

fn adaptive(latency_us: u32) -> Poller {
    Poller::new(Policy::Adaptive { latency_us }, COSTS, Instant::START)
}

/// Feeds `p` frames every `gap` ns for `until` ns as a worker would, with a poll every 100 ns while
/// hot; returns (time polled, wakes, naps).
fn feed(p: &mut Poller, gap: u64, until: u64) -> (u64, u64, u64) {
    let (gap, until, poll) = (Ns::new(gap), at(until), Ns::new(100));
    let (mut now, mut arrival) = (Instant::START, Instant::START + gap);
    let (mut polled, mut wakes, mut naps) = (0, 0, 0);
    while now < until {
        let mut frames = 0;
        while arrival <= now && frames < p.budget() {
            frames += 1;
            arrival += gap;
        }
        match p.next(frames, now) {
            Action::Poll => {
                now += poll;
                polled += 100;
            }
            Action::Until(until) => {
                assert!(until > now);
                now = until + COSTS.nap_late;
                naps += 1;
            }
            Action::Arm if arrival <= now => now += poll,
            Action::Arm => {
                now = arrival + COSTS.wake_late;
                wakes += 1;
                p.wake(now);
            }
        }
    }
    (polled, wakes, naps)
}

#[test]
fn event_always_arms_and_spin_never_does() {
    let mut event = Poller::new(Policy::Event, COSTS, Instant::START);
    assert!(!event.disarms());
    assert_eq!((event.next(9, at(0)), event.next(0, at(1))), (Action::Arm, Action::Arm));
    let mut spin = Poller::new(Policy::Spin, COSTS, Instant::START);
    assert_eq!((spin.next(0, at(0)), spin.next(0, Instant::NEVER)), (Action::Poll, Action::Poll));
}

#[test]
fn napi_polls_while_its_budget_is_used_up() {
    let mut p = Poller::new(Policy::Napi { budget: 16 }, COSTS, Instant::START);
    assert_eq!(p.budget(), 16);
    assert_eq!((p.next(16, at(0)), p.next(15, at(1))), (Action::Poll, Action::Arm));
}

#[test]
fn timer_polls_at_ticks_and_stops_a_tenth_of_a_second_after_the_last_frame() {
    let mut p = Poller::new(Policy::Timer { hz: 1000 }, COSTS, Instant::START);
    p.wake(at(1_234_567));
    assert_eq!(p.next(1, at(1_234_567)), Action::Until(at(2_000_000)));
    assert_eq!(p.next(0, at(2_000_100)), Action::Until(at(3_000_000)));
    assert_eq!(p.next(64, at(3_000_000)), Action::Poll);
    assert_eq!(p.next(0, at(3_000_100)), Action::Until(at(4_000_000)));
    assert_eq!(p.next(0, at(103_000_000)), Action::Arm);
}

#[test]
fn queues_of_one_frequency_share_their_ticks() {
    assert_eq!(tick_after(at(10), 20_000), at(50_000));
    assert_eq!(tick_after(at(49_999), 20_000), at(50_000));
    assert_eq!(tick_after(at(50_000), 20_000), at(100_000));
}

#[test]
fn coalesce_waits_its_delay_but_not_after_enough_frames() {
    let mut p = Poller::new(Policy::Coalesce { usecs: 30, frames: 8 }, COSTS, Instant::START);
    assert_eq!(p.next(7, at(1000)), Action::Until(at(31_000)));
    assert_eq!(p.next(8, at(31_000)), Action::Poll);
    assert_eq!(p.next(0, at(31_100)), Action::Arm);
    let mut p = Poller::new(Policy::CoalescePending { usecs: 30 }, COSTS, Instant::START);
    assert_eq!(
        (p.next(1, at(0)), p.next(6, at(0))),
        (Action::Until(at(30_000)), Action::Until(at(5_000)))
    );
    let mut p = Poller::new(Policy::CoalescePending { usecs: 0 }, COSTS, Instant::START);
    assert_eq!((p.next(1, at(0)), p.next(0, at(0))), (Action::Poll, Action::Arm));
}

#[test]
fn adaptive_at_little_traffic_costs_what_event_costs() {
    let (polled, wakes, naps) = feed(&mut adaptive(50), 1_000_000, 1_000_000_000);
    assert!(polled < 200_000 && naps == 0 && wakes > 950, "{polled} {wakes} {naps}");
}

#[test]
fn adaptive_naps_at_rates_between() {
    let (polled, wakes, naps) = feed(&mut adaptive(50), 10_000, 1_000_000_000);
    assert!(polled < 40_000_000 && wakes < 3_000, "{polled} {wakes} {naps}");
    assert!((16_000..19_000).contains(&naps), "{naps}");
    // With a latency target of 0 it may not.
    let (polled, _, naps) = feed(&mut adaptive(0), 10_000, 100_000_000);
    assert!(naps == 0 && polled > 50_000_000, "{polled}");
}

#[test]
fn adaptive_at_full_load_polls() {
    let (polled, wakes, naps) = feed(&mut adaptive(50), 100, 100_000_000);
    assert!(polled > 98_000_000 && wakes + naps < 10, "{polled} {wakes} {naps}");
}

#[test]
fn adaptive_does_not_nap_between_a_request_and_its_reply() {
    // The next frame comes 3 us after the one before was taken: naps would slow it down.
    let mut p = adaptive(50);
    let (mut now, mut arrival) = (Instant::START, Instant::START);
    let (mut naps, mut served) = (0_u64, 0_u64);
    while now < at(1_000_000_000) {
        let frames = usize::from(arrival <= now);
        if frames > 0 {
            served += 1;
            arrival = now + Ns::from_us(3);
        }
        match p.next(frames, now) {
            Action::Poll => now += Ns::new(100),
            Action::Until(until) => {
                naps += 1;
                now = until + COSTS.nap_late;
            }
            Action::Arm => {
                now = now.max(arrival) + COSTS.wake_late;
                p.wake(now);
            }
        }
    }
    assert!(served > 320_000 * 98 / 100, "{served}");
    assert!(naps < 1_000, "{naps}");
}

#[test]
fn adaptive_keeps_polling_if_sleeping_cannot_meet_its_target() {
    let mut p = adaptive(2);
    assert_eq!((p.next(1, at(1000)), p.next(0, at(900_000))), (Action::Poll, Action::Poll));
    assert_eq!(p.next(0, at(1_001_000)), Action::Arm);
}

#[test]
fn notifier_notifies_at_once_or_after_its_policys_delay() {
    for policy in ["event", "spin", "napi", "adaptive:0"] {
        let policy = policy.parse().unwrap();
        assert!(!Notifier::delays(policy));
        assert_eq!(Notifier::new(policy).record_published(1, at(5)), Notify::Now);
    }
    let mut n = Notifier::new(Policy::Coalesce { usecs: 10, frames: 4 });
    assert_eq!(n.record_published(1, at(1_000)), Notify::At(at(11_000)));
    assert_eq!(n.record_published(2, at(5_000)), Notify::Later);
    assert_eq!(n.record_published(1, at(6_000)), Notify::Now);
    assert_eq!(
        n.record_published(1, at(7_000)),
        Notify::Later,
        "the returned time is not reached yet"
    );
    assert_eq!(
        n.due(at(11_000), at(11_000)),
        Some(Notify::At(at(17_000))),
        "not before its own time"
    );
    assert_eq!(n.due(at(17_000), at(17_500)), Some(Notify::Now));
    assert_eq!(n.record_published(1, at(20_000)), Notify::At(at(30_000)));
    n.record_notified(at(20_500));
    assert_eq!(n.due(at(30_000), at(30_000)), None, "it was notified since");
    assert_eq!(n.record_published(1, at(31_000)), Notify::At(at(41_000)));
    assert!(n.flush());
    assert!(!n.flush());
    assert_eq!(n.due(at(41_000), at(41_000)), None);
    let mut n = Notifier::new(Policy::CoalescePending { usecs: 12 });
    assert_eq!(n.record_published(1, at(0)), Notify::At(at(12_000)));
    assert_eq!(n.record_published(2, at(1_000)), Notify::At(at(4_000)));
    assert_eq!(n.record_published(9, at(1_500)), Notify::Now);
    assert_eq!(n.due(at(12_000), at(12_000)), None, "an earlier time was returned");
    let mut n = Notifier::new(Policy::Timer { hz: 1000 });
    assert_eq!(n.record_published(1, at(1_500_000)), Notify::At(at(2_000_000)));
}

#[test]
fn adaptive_gathers_at_high_rates_only() {
    // Request and reply at the highest rate: notified at once, every time.
    let mut n = Notifier::new(Policy::ADAPTIVE);
    for turn in 1..1000 {
        assert_eq!(n.record_published(1, at(turn * 8_000)), Notify::Now, "turn {turn}");
    }
    // A flood of a frame per us: one notification per 50 us, and per 64 frames.
    let mut n = Notifier::new(Policy::ADAPTIVE);
    let (mut calls, mut due) = (0, Instant::NEVER);
    for now in (0..1_000_000).step_by(1_000).map(at) {
        if due <= now {
            match n.due(std::mem::replace(&mut due, Instant::NEVER), now) {
                Some(Notify::Now) => calls += 1,
                Some(Notify::At(at)) => due = at,
                Some(Notify::Later) | None => {}
            }
        }
        match n.record_published(1, now) {
            Notify::Now => calls += 1,
            Notify::At(at) => due = at,
            Notify::Later => assert_ne!(due, Instant::NEVER, "a time must be set"),
        }
    }
    assert!((50 + 19..=50 + 22).contains(&calls), "{calls} calls in a ms, 50 in the first window");
    // After an idle time the first is notified at once.
    assert_eq!(n.record_published(1, at(3_000_000)), Notify::Now);
}

#[test]
fn names_and_words_round_trip_and_errors_list_the_forms() {
    for name in [
        "event",
        "spin",
        "napi:16",
        "timer:2500",
        "coalesce:50,32",
        "coalesce:5/pending",
        "adaptive:75",
    ] {
        let policy: Policy = name.parse().unwrap();
        assert_eq!(policy.to_string(), name);
        assert_eq!(Policy::from_bits(policy.to_bits()), policy);
    }
    assert_eq!("napi".parse(), Ok(Policy::Napi { budget: 64 }));
    assert_eq!("timer".parse(), Ok(Policy::Timer { hz: 1000 }));
    assert_eq!("adaptive".parse(), Ok(Policy::default()));
    for (bad, hint) in [
        ("napi2", "adaptive"),
        ("napi:0", "1 to 64"),
        ("timer:20001", "1 to 20000"),
        ("coalesce:5", "coalesce:USECS,FRAMES"),
        ("coalesce:5,0", "1 to 65535"),
        ("coalesce:x/pending", "0 to 1000000"),
        ("spin:3", "spin"),
        ("event:", "event"),
        ("adaptive:-1", "0 to"),
    ] {
        let error = bad.parse::<Policy>().unwrap_err();
        assert!(error.contains(hint), "{bad}: {error}");
    }
}

#[test]
fn adaptive_arms_at_once_with_one_cpu() {
    for latency_us in [0, 50, 200] {
        let mut p = Poller::new(Policy::Adaptive { latency_us }, Costs::ONE_CPU, Instant::START);
        let mut now = Instant::START;
        for n in 0..10_000_usize {
            now += Ns::new([100, 1_000, 20_000, 2_000_000][n % 4]);
            p.wake(now);
            assert_eq!(p.next(64, now), Action::Arm, "adaptive:{latency_us}");
            assert_eq!(p.next(n % 3, now + Ns::new(500)), Action::Arm, "adaptive:{latency_us}");
        }
    }
}
