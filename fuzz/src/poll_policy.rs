//! Policies with any times, frames and costs: no panic, and no wait beyond the policy's limit.
//!
//! ```text
//!   policy (8 bytes)  costs (4 x 3 bytes)  step...
//! ```

use switch::poll::{Action, Costs, Notifier, Notify, Policy, Poller};
use switch::time::{Instant, Ns};

use crate::Bytes;

/// Events of a run.
#[derive(Debug, Default)]
pub struct Seen {
    /// Naps.
    pub naps: u64,
    /// Polls after which the queue was armed.
    pub arms: u64,
    /// Polls after which it was polled again.
    pub polls: u64,
    /// Delayed notifications.
    pub delayed: u64,
}

/// Must not fail for any bytes.
pub fn run(data: &[u8]) {
    let _ = explore(data);
}

/// Longest wait of a policy.
fn longest(policy: Policy) -> Ns {
    match policy {
        Policy::Event | Policy::Napi { .. } | Policy::Spin => Ns::ZERO,
        Policy::Timer { hz } => (Ns::from_secs(1) / u64::from(hz.max(1))).max(Ns::new(1)),
        Policy::Coalesce { usecs, .. } | Policy::CoalescePending { usecs } => {
            Ns::from_us(usecs.into())
        }
        Policy::Adaptive { latency_us } => Ns::from_us(latency_us.into()),
    }
}

fn word(bytes: &mut Bytes<'_>) -> u64 {
    (0..4).fold(0, |word, _| word << 16 | u64::from(bytes.u16()))
}

/// A policy in its text form, or any encoded word.
fn policy(bytes: &mut Bytes<'_>) -> Policy {
    let kind = bytes.u8();
    let (a, b) = (u32::from(bytes.u16()), bytes.u16());
    match kind % 9 {
        0 => Policy::Event,
        1 => Policy::Napi { budget: b % 64 + 1 },
        2 => Policy::Timer { hz: a % 20_000 + 1 },
        3 => Policy::Coalesce { usecs: a, frames: b % 256 + 1 },
        4 => Policy::CoalescePending { usecs: a },
        5 => Policy::Spin,
        6 | 7 => Policy::Adaptive { latency_us: a % 1000 },
        _ => Policy::from_bits(word(bytes)),
    }
}

fn after(time: Instant, now: Instant, longest: Ns) {
    assert!(time > now || time == Instant::NEVER, "{time} is not after {now}");
    assert!(time - now <= longest, "{time} is too long after {now}");
}

/// As [`run`]; returns what happened.
pub fn explore(data: &[u8]) -> Seen {
    let (mut bytes, mut seen) = (Bytes(data), Seen::default());
    let mut cost = || Ns::new(u64::from(bytes.u8()) << (bytes.u8() % 40));
    let costs =
        Costs { wake: cost(), wake_late: cost(), nap: cost(), nap_late: cost(), ..Costs::TYPICAL };
    let mut now = Instant::START;
    let mut of_poller = policy(&mut bytes);
    assert_eq!(Policy::from_bits(of_poller.to_bits()), of_poller);
    let mut poller = Poller::new(of_poller, costs, now);
    let (mut of_notifier, mut notifier) = (of_poller, Notifier::new(of_poller));
    // The longest wait of a policy under which a notification was delayed.
    let mut puts_off = longest(of_notifier);
    // Frames without a notification, and the time of the notifier's next call.
    let (mut pending, mut asked) = (false, None);
    while !bytes.0.is_empty() {
        let (what, amount) = (bytes.u8(), bytes.u8());
        let frames = usize::from(amount % 65) << (amount / 128 * (what / 64) * 20);
        match what % 16 {
            // Time passes, by little, by much, or to its end.
            0 | 1 => now += Ns::new(u64::from(amount)),
            2 | 3 => now += Ns::new(u64::from(amount) << 10),
            4 => now += Ns::new(u64::from(amount) << 18),
            5 => now += Ns::new(u64::from(amount) << (what / 4)),
            6 => poller.wake(now),
            7 if amount > 250 => {
                of_poller = policy(&mut bytes);
                poller = Poller::new(of_poller, costs, now);
            }
            8 if amount > 200 => {
                of_notifier = policy(&mut bytes);
                notifier.set_policy(of_notifier);
                puts_off = puts_off.max(longest(of_notifier));
            }
            9 if amount > 200 => {
                assert_eq!(notifier.flush(), pending);
                (pending, asked) = (false, None);
                puts_off = longest(of_notifier);
            }
            9 => {
                let Some(at) = asked.take() else { continue };
                now = now.max(at);
                match notifier.due(at, now) {
                    Some(Notify::Now) => {
                        assert!(pending, "notified without pending frames");
                        pending = false;
                        puts_off = longest(of_notifier);
                    }
                    Some(Notify::At(at)) => {
                        after(at, now, puts_off);
                        asked = Some(at);
                    }
                    Some(Notify::Later) => panic!("the returned time is reached"),
                    None => assert!(!pending, "frames are left without a notification"),
                }
            }
            10 | 11 => match notifier.record_published(frames.max(1), now) {
                Notify::Now => {
                    pending = false;
                    puts_off = longest(of_notifier);
                }
                Notify::At(at) => {
                    assert!(Notifier::delays(of_notifier));
                    after(at, now, puts_off);
                    assert!(asked.is_none_or(|before| at < before), "not earlier than before");
                    (pending, asked) = (true, Some(at));
                    seen.delayed += 1;
                }
                Notify::Later => {
                    assert!(asked.is_some(), "no time was returned");
                    pending = true;
                }
            },
            _ => {
                assert!((1..=64).contains(&poller.budget()));
                let frames = frames.min(poller.budget() << (amount / 255));
                match poller.next(frames, now) {
                    Action::Poll => seen.polls += 1,
                    Action::Until(at) => {
                        after(at, now, longest(of_poller));
                        seen.naps += 1;
                        now = now.max(if what > 127 { at } else { now });
                    }
                    Action::Arm => {
                        assert!(of_poller != Policy::Spin, "spin slept");
                        let took = match of_poller {
                            Policy::Event | Policy::Napi { .. } => true,
                            // On one CPU.
                            Policy::Adaptive { .. } => costs.wake == Ns::ZERO,
                            _ => false,
                        };
                        assert!(frames == 0 || took, "{of_poller} slept after {frames} frames");
                        seen.arms += 1;
                    }
                }
            }
        }
    }
    seen
}

/// A sequence for each policy: fast frames, slow ones, request and reply, and none.
pub fn seeds() -> Vec<Vec<u8>> {
    let life = |kind: u8| {
        let mut data: Vec<u8> = [6, 10, 5, 10, 4, 10, 5, 10].into();
        data.extend([kind, 50, 0, 31, 0]);
        for (passes, times) in [(10, 600), (0, 200), (255, 40)] {
            for _ in 0..times {
                // A frame, a poll that finds it, a whole nap, an empty poll, time, a wake-up.
                data.extend([10, 1, 140, 1, 12, 0, 2, passes, 6, 0]);
            }
        }
        data
    };
    (0..8).map(life).collect()
}
