use super::*;

const COSTS: Costs = Costs::TYPICAL;

fn adaptive(latency_us: u32) -> Poller {
    Poller::new(Policy::Adaptive { latency_us }, COSTS, 0)
}

/// Feeds `p` frames every `gap` ns for `until` ns as a worker would, with a poll every 100 ns while
/// hot; returns (time polled, wakes, naps).
fn feed(p: &mut Poller, gap: u64, until: u64) -> (u64, u64, u64) {
    let (mut now, mut arrival) = (0, gap);
    let (mut polled, mut wakes, mut naps) = (0, 0, 0);
    while now < until {
        let mut frames = 0;
        while arrival <= now && frames < p.budget() {
            frames += 1;
            arrival += gap;
        }
        match p.next(frames, now) {
            Action::Poll => {
                now += 100;
                polled += 100;
            }
            Action::Until(at) => {
                assert!(at > now);
                now = at + COSTS.nap_late_ns;
                naps += 1;
            }
            Action::Arm if arrival <= now => now += 100,
            Action::Arm => {
                now = arrival + COSTS.wake_late_ns;
                wakes += 1;
                p.wake(now);
            }
        }
    }
    (polled, wakes, naps)
}

#[test]
fn event_always_arms_and_spin_never_does() {
    let mut event = Poller::new(Policy::Event, COSTS, 0);
    assert!(!event.disarms());
    assert_eq!((event.next(9, 0), event.next(0, 1)), (Action::Arm, Action::Arm));
    let mut spin = Poller::new(Policy::Spin, COSTS, 0);
    assert_eq!((spin.next(0, 0), spin.next(0, u64::MAX)), (Action::Poll, Action::Poll));
}

#[test]
fn napi_polls_while_its_budget_is_used_up() {
    let mut p = Poller::new(Policy::Napi { budget: 16 }, COSTS, 0);
    assert_eq!(p.budget(), 16);
    assert_eq!((p.next(16, 0), p.next(15, 1)), (Action::Poll, Action::Arm));
}

#[test]
fn timer_polls_at_ticks_and_stops_a_tenth_of_a_second_after_the_last_frame() {
    let mut p = Poller::new(Policy::Timer { hz: 1000 }, COSTS, 0);
    p.wake(1_234_567);
    assert_eq!(p.next(1, 1_234_567), Action::Until(2_000_000));
    assert_eq!(p.next(0, 2_000_100), Action::Until(3_000_000));
    assert_eq!(p.next(64, 3_000_000), Action::Poll);
    assert_eq!(p.next(0, 3_000_100), Action::Until(4_000_000));
    assert_eq!(p.next(0, 103_000_000), Action::Arm);
}

#[test]
fn queues_of_one_frequency_share_their_ticks() {
    assert_eq!(tick_after(10, 20_000), 50_000);
    assert_eq!(tick_after(49_999, 20_000), 50_000);
    assert_eq!(tick_after(50_000, 20_000), 100_000);
}

#[test]
fn coalesce_waits_its_delay_but_not_after_enough_frames() {
    let mut p = Poller::new(Policy::Coalesce { usecs: 30, frames: 8 }, COSTS, 0);
    assert_eq!(p.next(7, 1000), Action::Until(31_000));
    assert_eq!(p.next(8, 31_000), Action::Poll);
    assert_eq!(p.next(0, 31_100), Action::Arm);
    let mut p = Poller::new(Policy::CoalescePending { usecs: 30 }, COSTS, 0);
    assert_eq!((p.next(1, 0), p.next(6, 0)), (Action::Until(30_000), Action::Until(5_000)));
    let mut p = Poller::new(Policy::CoalescePending { usecs: 0 }, COSTS, 0);
    assert_eq!((p.next(1, 0), p.next(0, 0)), (Action::Poll, Action::Arm));
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
    let (mut now, mut arrival, mut naps, mut served) = (0, 0, 0_u64, 0_u64);
    while now < 1_000_000_000 {
        let frames = usize::from(arrival <= now);
        if frames > 0 {
            served += 1;
            arrival = now + 3_000;
        }
        match p.next(frames, now) {
            Action::Poll => now += 100,
            Action::Until(at) => {
                naps += 1;
                now = at + COSTS.nap_late_ns;
            }
            Action::Arm => {
                now = now.max(arrival) + COSTS.wake_late_ns;
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
    assert_eq!((p.next(1, 1000), p.next(0, 900_000)), (Action::Poll, Action::Poll));
    assert_eq!(p.next(0, 1_001_000), Action::Arm);
}

#[test]
fn notifier_notifies_at_once_or_after_its_policys_delay() {
    for policy in ["event", "spin", "napi", "adaptive:0"] {
        let policy = policy.parse().unwrap();
        assert!(!Notifier::waits(policy));
        assert_eq!(Notifier::new(policy).published(1, 5), Notify::Now);
    }
    let mut n = Notifier::new(Policy::Coalesce { usecs: 10, frames: 4 });
    assert_eq!(n.published(1, 1_000), Notify::At(11_000));
    assert_eq!(n.published(2, 5_000), Notify::Later);
    assert_eq!(n.published(1, 6_000), Notify::Now);
    assert_eq!(n.published(1, 7_000), Notify::Later, "the returned time is not reached yet");
    assert_eq!(n.due(11_000, 11_000), Some(Notify::At(17_000)), "not before its own time");
    assert_eq!(n.due(17_000, 17_500), Some(Notify::Now));
    assert_eq!(n.published(1, 20_000), Notify::At(30_000));
    n.record_notified(20_500);
    assert_eq!(n.due(30_000, 30_000), None, "it was notified since");
    assert_eq!(n.published(1, 31_000), Notify::At(41_000));
    assert!(n.flush());
    assert!(!n.flush());
    assert_eq!(n.due(41_000, 41_000), None);
    let mut n = Notifier::new(Policy::CoalescePending { usecs: 12 });
    assert_eq!(n.published(1, 0), Notify::At(12_000));
    assert_eq!(n.published(2, 1_000), Notify::At(4_000));
    assert_eq!(n.published(9, 1_500), Notify::Now);
    assert_eq!(n.due(12_000, 12_000), None, "an earlier time was returned");
    let mut n = Notifier::new(Policy::Timer { hz: 1000 });
    assert_eq!(n.published(1, 1_500_000), Notify::At(2_000_000));
}

#[test]
fn adaptive_gathers_at_high_rates_only() {
    // Request and reply at the highest rate: notified at once, every time.
    let mut n = Notifier::new(Policy::ADAPTIVE);
    for turn in 1..1000 {
        assert_eq!(n.published(1, turn * 8_000), Notify::Now, "turn {turn}");
    }
    // A flood of a frame per us: one notification per 50 us, and per 64 frames.
    let mut n = Notifier::new(Policy::ADAPTIVE);
    let (mut calls, mut due) = (0, u64::MAX);
    for now in (0..1_000_000).step_by(1_000) {
        if due <= now {
            match n.due(std::mem::replace(&mut due, u64::MAX), now) {
                Some(Notify::Now) => calls += 1,
                Some(Notify::At(at)) => due = at,
                Some(Notify::Later) | None => {}
            }
        }
        match n.published(1, now) {
            Notify::Now => calls += 1,
            Notify::At(at) => due = at,
            Notify::Later => assert_ne!(due, u64::MAX, "a time must be set"),
        }
    }
    assert!((50 + 19..=50 + 22).contains(&calls), "{calls} calls in a ms, 50 in the first window");
    // After an idle time the first is notified at once.
    assert_eq!(n.published(1, 3_000_000), Notify::Now);
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
        let mut p = Poller::new(Policy::Adaptive { latency_us }, Costs::ONE_CPU, 0);
        let mut now = 0;
        for n in 0..10_000_usize {
            now += [100, 1_000, 20_000, 2_000_000][n % 4];
            p.wake(now);
            assert_eq!(p.next(64, now), Action::Arm, "adaptive:{latency_us}");
            assert_eq!(p.next(n % 3, now + 500), Action::Arm, "adaptive:{latency_us}");
        }
    }
}
