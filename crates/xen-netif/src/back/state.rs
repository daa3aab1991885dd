//! The states of a vif's two ends, and the ways between them (`io/xenbus.h`; Linux netback's
//! `set_backend_state`).
//!
//! ```text
//!   Initialising ──▶ InitWait ──▶ Connected
//!        │           ▲     │          │
//!        ▼           │     ▼          │
//!      Closed ───────┘  Closing ◀─────┘
//!        ▲ └───────────▶ │
//!        └───────────────┘
//! ```
//! A state is reached by the shortest way, and each one on the way is written: the other end may
//! wait for any of them.

use std::fmt;

/// `XenbusState`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// 0, and any directory without a state: not there.
    Unknown,
    /// 1: made by the toolstack.
    Initialising,
    /// 2: the back end wrote what it offers, and waits for the front.
    InitWait,
    /// 3: some front ends write it before Connected.
    Initialised,
    /// 4
    Connected,
    /// 5
    Closing,
    /// 6
    Closed,
    /// 7: the front wants something changed while connected.
    Reconfiguring,
    /// 8: the back's answer.
    Reconfigured,
}

use State::*;

impl State {
    /// Every state, by number.
    pub const ALL: [Self; 9] = [
        Unknown,
        Initialising,
        InitWait,
        Initialised,
        Connected,
        Closing,
        Closed,
        Reconfiguring,
        Reconfigured,
    ];
    /// States that a back end of ours is in.
    pub const BACK: [Self; 5] = [Initialising, InitWait, Connected, Closing, Closed];

    /// What a `state` key says; `None`: nothing that is a state.
    pub fn parse(value: &str) -> Option<Self> {
        let n: usize = value.trim().parse().ok()?;
        Self::ALL.get(n).copied()
    }

    /// As the key has it.
    pub fn number(self) -> u32 {
        self as u32
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// Where a back end in `back` goes, once it has seen its front in `front`; `None`: it stays.
pub fn target(back: State, front: State) -> Option<State> {
    let to = match front {
        Unknown | Closed => Closed,
        Initialising => InitWait,
        // Written by fronts that have their rings ready; Linux ignores it, BSD connects.
        Initialised | Connected => Connected,
        Closing => Closing,
        // No front should be there. One that is waits for what we offer.
        InitWait | Reconfiguring | Reconfigured if back == Initialising => InitWait,
        InitWait | Reconfiguring | Reconfigured => return None,
    };
    (to != back).then_some(to)
}

/// The next state on the shortest way from `at` to `to`, both states of a back end.
pub fn next(at: State, to: State) -> State {
    match (at, to) {
        (Initialising, Closed) | (Closing, _) => Closed,
        (Initialising, _) | (Closed, InitWait | Connected) => InitWait,
        (InitWait, Connected) => Connected,
        (InitWait | Connected | Closed, _) => Closing,
        _ => unreachable!("a back end is never {at}"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, VecDeque};

    use super::*;

    /// Every step that exists.
    const STEPS: [(State, State); 8] = [
        (Initialising, InitWait),
        (Initialising, Closed),
        (InitWait, Connected),
        (InitWait, Closing),
        (Connected, Closing),
        (Closing, Closed),
        (Closed, InitWait),
        (Closed, Closing),
    ];

    fn distance(from: State, to: State) -> Option<usize> {
        let mut seen = HashMap::from([(from, 0)]);
        let mut queue = VecDeque::from([from]);
        while let Some(at) = queue.pop_front() {
            for (_, next) in STEPS.iter().filter(|(a, _)| *a == at) {
                if !seen.contains_key(next) {
                    seen.insert(*next, seen[&at] + 1);
                    queue.push_back(*next);
                }
            }
        }
        seen.get(&to).copied()
    }

    #[test]
    fn every_way_is_made_of_steps_and_is_the_shortest() {
        for from in State::BACK {
            for to in State::BACK.into_iter().filter(|to| *to != from && *to != Initialising) {
                let (mut at, mut steps) = (from, 0);
                while at != to {
                    let step = next(at, to);
                    assert!(STEPS.contains(&(at, step)), "{at} to {step} on the way to {to}");
                    (at, steps) = (step, steps + 1);
                }
                assert_eq!(Some(steps), distance(from, to), "{from} to {to}");
            }
        }
    }

    #[test]
    fn a_back_end_follows_its_front() {
        // Rows: the front's state. Columns: the back's, as in State::BACK. A dot stays.
        let table = "
            Unknown       6 6 6 6 .
            Initialising  2 . 2 2 2
            InitWait      2 . . . .
            Initialised   4 4 . 4 4
            Connected     4 4 . 4 4
            Closing       5 5 5 . 5
            Closed        6 6 6 6 .
            Reconfiguring 2 . . . .
            Reconfigured  2 . . . .
        ";
        let mut cells = 0;
        for row in table.lines().filter(|row| !row.trim().is_empty()) {
            let mut words = row.split_whitespace();
            let name = words.next().unwrap();
            let front = State::ALL.into_iter().find(|s| s.to_string() == name).unwrap();
            for (back, want) in State::BACK.into_iter().zip(words) {
                let got = target(back, front).map_or(".".into(), |s| s.number().to_string());
                assert_eq!(got, want, "front {front}, back {back}");
                cells += 1;
            }
        }
        assert_eq!(cells, State::ALL.len() * State::BACK.len());
    }

    #[test]
    fn keys_say_states_or_nothing() {
        for state in State::ALL {
            assert_eq!(State::parse(&state.number().to_string()), Some(state));
        }
        assert_eq!(State::parse(" 4\n"), Some(Connected));
        for bad in ["", "9", "-1", "four", "4 4", "4294967300", "0x4"] {
            assert_eq!(State::parse(bad), None, "{bad:?}");
        }
    }
}
