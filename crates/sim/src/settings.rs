//! What operators set, and what machines cost: drawn by the seed, and changed while frames pass.

use switch::fair::WEIGHT_MAX;
use switch::frame::BURST_MAX;
use switch::poll::{Costs, Policy, TIMER_HZ_MAX};
use switch::tuning::Tuning;

use crate::random::Random;

/// Of a virtual machine in a virtual machine: each sleep costs as much as ten frames' delivery.
const NESTED: Costs =
    Costs { wake_ns: 60_000, wake_late_ns: 90_000, nap_ns: 25_000, nap_late_ns: 70_000 };

/// What the operators of a run are like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operators {
    /// They let nothing wait: then all must drain before any timer could save it.
    prompt: bool,
    /// They like long delays.
    patient: bool,
    /// They have everything done at once, and change nothing.
    plain: bool,
    /// Queues move between workers by load.
    balanced: bool,
    /// Some guests send dear frames without end.
    flooded: bool,
}

impl Operators {
    pub fn new(random: &mut Random) -> Self {
        let balanced = random.one_in(3);
        Self {
            prompt: random.one_in(3),
            patient: random.one_in(8),
            plain: false,
            balanced,
            flooded: balanced && random.one_in(5),
        }
    }

    pub fn is_balanced(self) -> bool {
        self.balanced
    }

    pub fn is_flooded(self) -> bool {
        self.flooded
    }

    /// Of a run that is long, and in which little happens.
    pub fn plain(self) -> Self {
        Self { plain: true, flooded: false, ..self }
    }

    /// A delay in us.
    fn usecs(self, random: &mut Random) -> u32 {
        let max = if self.patient { 3000 } else { 120 };
        random.within(0..max) as u32
    }

    fn hz(self, random: &mut Random) -> u32 {
        let least = if self.patient { 200 } else { 4000 };
        random.within(least..u64::from(TIMER_HZ_MAX) + 1) as u32
    }

    /// A policy: when to look, or when to call.
    pub fn policy(self, random: &mut Random) -> Policy {
        let budget = |random: &mut Random| {
            let max = if random.one_in(2) { 4 } else { BURST_MAX as u64 };
            Policy::Napi { budget: random.within(1..max + 1) as u16 }
        };
        if self.plain {
            return Policy::Event;
        }
        if self.flooded {
            // Less than a ring holds: it is not found empty.
            return Policy::Napi { budget: random.within(4..9) as u16 };
        }
        if self.prompt {
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

    /// Changes one of a queue's settings.
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

/// What sleeping costs on the machine.
pub(crate) fn costs(random: &mut Random) -> Costs {
    match random.within(0..3) {
        0 => Costs::TYPICAL,
        1 => NESTED,
        _ => Costs {
            wake_ns: random.within(500..100_000),
            wake_late_ns: random.within(500..100_000),
            nap_ns: random.within(500..50_000),
            nap_late_ns: random.within(500..50_000),
        },
    }
}

/// The longest that `policy` lets something wait, in ns.
pub(crate) fn delay_ns_max(policy: Policy) -> u64 {
    match policy {
        Policy::Timer { hz } => 1_000_000_000 / u64::from(hz),
        Policy::Coalesce { usecs, .. } | Policy::CoalescePending { usecs } => {
            u64::from(usecs) * 1000
        }
        Policy::Adaptive { latency_us } => u64::from(latency_us) * 1000,
        Policy::Event | Policy::Napi { .. } | Policy::Spin => 0,
    }
}
