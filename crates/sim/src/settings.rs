//! Settings of operators and costs of machines, drawn from the seed. Settings change under traffic.

use switch::fair::WEIGHT_MAX;
use switch::frame::BURST_MAX;
use switch::poll::{Costs, Policy, TIMER_HZ_MAX};
use switch::schedule::Placement;
use switch::time::Ns;
use switch::tuning::Tuning;

use crate::random::Random;

/// Costs in a nested virtual machine: a sleep costs as much as the delivery of ten frames.
const NESTED: Costs = Costs {
    wake: Ns::from_us(60),
    wake_late: Ns::from_us(90),
    nap: Ns::from_us(25),
    nap_late: Ns::from_us(70),
    ..Costs::TYPICAL
};

/// Kinds of settings used in a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operators {
    /// No polls or calls are delayed: all must drain before a timer could hide a lost wake-up.
    no_delays: bool,
    /// Delays are long.
    long_delays: bool,
    /// All poll and call policies are `event`.
    event_only: bool,
    /// Queues move between workers by load.
    balanced: bool,
    /// Some guests keep sending frames that are expensive to forward.
    flooded: bool,
    /// The frames of one guest are so expensive to forward that its queues are watched.
    expensive: bool,
}

impl Operators {
    pub fn new(random: &mut Random) -> Self {
        let balanced = random.one_in(3);
        Self {
            no_delays: random.one_in(3),
            long_delays: random.one_in(8),
            event_only: false,
            balanced,
            flooded: balanced && random.one_in(5),
            expensive: random.one_in(8),
        }
    }

    pub fn is_balanced(self) -> bool {
        self.balanced
    }

    /// The placement of queues at the start.
    pub fn placement(self, random: &mut Random) -> Placement {
        if self.balanced { Placement::Balanced } else { Placement::ALL[random.index(3)] }
    }

    pub fn is_flooded(self) -> bool {
        self.flooded
    }

    pub fn is_expensive(self) -> bool {
        self.expensive
    }

    /// Settings of a long run with little traffic.
    pub fn event_only(self) -> Self {
        Self { event_only: true, flooded: false, expensive: false, ..self }
    }

    /// A random delay in us.
    fn usecs(self, random: &mut Random) -> u32 {
        let max = if self.long_delays { 3000 } else { 120 };
        random.within(0..max) as u32
    }

    fn hz(self, random: &mut Random) -> u32 {
        let least = if self.long_delays { 200 } else { 4000 };
        random.within(least..u64::from(TIMER_HZ_MAX) + 1) as u32
    }

    /// A random poll or call policy.
    pub fn policy(self, random: &mut Random) -> Policy {
        let budget = |random: &mut Random| {
            let max = if random.one_in(2) { 4 } else { BURST_MAX as u64 };
            Policy::Napi { budget: random.within(1..max + 1) as u16 }
        };
        if self.event_only {
            return Policy::Event;
        }
        if self.flooded {
            // Less than a ring holds, so that polls do not find it empty.
            return Policy::Napi { budget: random.within(4..9) as u16 };
        }
        if self.no_delays {
            return match random.within(0..6) {
                0 | 1 => Policy::Event,
                2 => budget(random),
                3 => Policy::Coalesce { usecs: 0, frames: 1 },
                4 => Policy::Spin,
                _ => Policy::Adaptive { latency_us: 0 },
            };
        }
        match random.within(0..9) {
            0 | 1 => Policy::Event,
            2 => budget(random),
            3 => Policy::Timer { hz: self.hz(random) },
            4 => {
                let max = if random.one_in(2) { 5 } else { 100 };
                let frames = random.within(1..max) as u16;
                Policy::Coalesce { usecs: self.usecs(random), frames }
            }
            5 => Policy::CoalescePending { usecs: self.usecs(random) },
            6 => Policy::Spin,
            7 => Policy::default(),
            _ => Policy::Adaptive { latency_us: self.usecs(random) },
        }
    }

    /// Changes one setting of a queue.
    pub fn tune(self, tuning: &Tuning, random: &mut Random) {
        match random.within(0..8) {
            0 | 1 => tuning.set_weight(weight(random)),
            _ => tuning.set_poll(self.policy(random)),
        }
    }
}

pub(crate) fn weight(random: &mut Random) -> u32 {
    let max = if random.one_in(20) { u64::from(WEIGHT_MAX) / 10 } else { 4 };
    random.within(1..max) as u32
}

/// Random cost of sleeping on the machine.
pub(crate) fn costs(random: &mut Random) -> Costs {
    match random.within(0..3) {
        0 => Costs::TYPICAL,
        1 => NESTED,
        _ => Costs {
            wake: Ns::new(random.within(500..100_000)),
            wake_late: Ns::new(random.within(500..100_000)),
            nap: Ns::new(random.within(500..50_000)),
            nap_late: Ns::new(random.within(500..50_000)),
            ..Costs::TYPICAL
        },
    }
}

/// Longest delay of a poll or call under `policy`.
pub(crate) fn delay_max(policy: Policy) -> Ns {
    match policy {
        Policy::Timer { hz } => Ns::from_secs(1) / u64::from(hz),
        Policy::Coalesce { usecs, .. } | Policy::CoalescePending { usecs } => {
            Ns::from_us(usecs.into())
        }
        Policy::Adaptive { latency_us } => Ns::from_us(latency_us.into()),
        Policy::Event | Policy::Napi { .. } | Policy::Spin => Ns::ZERO,
    }
}
