//! The states of a vif's two ends, and the transitions between them (`io/xenbus.h`; Linux netback's
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
//! A state is reached by the shortest path, and each state on the path is written: the other end
//! may wait for any of them.

use std::fmt;

/// `XenbusState`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// 0, and any directory without a state: does not exist.
    Unknown,
    /// 1: created by the toolstack.
    Initialising,
    /// 2: the back end has written its offer, and waits for the front end.
    InitWait,
    /// 3: written by some front ends before Connected.
    Initialised,
    /// 4
    Connected,
    /// 5
    Closing,
    /// 6
    Closed,
    /// 7: the front end requests a change while connected.
    Reconfiguring,
    /// 8: the back end's reply.
    Reconfigured,
}

use State::*;

impl State {
    /// All states, by number.
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
    /// States of our back end.
    pub const BACK: [Self; 5] = [Initialising, InitWait, Connected, Closing, Closed];

    /// Parses a `state` key; `None`: not a state.
    pub fn parse(value: &str) -> Option<Self> {
        let n: usize = value.trim().parse().ok()?;
        Self::ALL.get(n).copied()
    }

    /// Number in the key.
    pub fn number(self) -> u32 {
        self as u32
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// Next target of a back end in `back` whose front end is in `front`; `None`: it stays.
pub fn target(back: State, front: State) -> Option<State> {
    let to = match front {
        Unknown | Closed => Closed,
        Initialising => InitWait,
        // Written by front ends whose rings are ready; Linux ignores it, BSD connects.
        Initialised | Connected => Connected,
        Closing => Closing,
        // Unexpected: a front end in this state waits for our offer.
        InitWait | Reconfiguring | Reconfigured if back == Initialising => InitWait,
        InitWait | Reconfiguring | Reconfigured => return None,
    };
    (to != back).then_some(to)
}

/// The next state on the shortest path from `at` to `to`, both states of a back end.
pub fn next(at: State, to: State) -> State {
    match (at, to) {
        (Initialising, Closed) | (Closing, _) => Closed,
        (Initialising, _) | (Closed, InitWait | Connected) => InitWait,
        (InitWait, Connected) => Connected,
        (InitWait | Connected | Closed, _) => Closing,
        _ => unreachable!("not a state of a back end: {at}"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashMap, VecDeque};

    use super::*;

    /// All transitions.
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
    fn every_path_is_made_of_transitions_and_is_the_shortest() {
        for from in State::BACK {
            for to in State::BACK.into_iter().filter(|to| *to != from && *to != Initialising) {
                let (mut at, mut steps) = (from, 0);
                while at != to {
                    let step = next(at, to);
                    assert!(STEPS.contains(&(at, step)), "{at} to {step} on the path to {to}");
                    (at, steps) = (step, steps + 1);
                }
                assert_eq!(Some(steps), distance(from, to), "{from} to {to}");
            }
        }
    }

    #[test]
    fn a_back_end_follows_its_front() {
        // Rows: the front end's state. Columns: the back end's, as in State::BACK. A dot: it stays.
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
    fn only_valid_states_are_parsed() {
        for state in State::ALL {
            assert_eq!(State::parse(&state.number().to_string()), Some(state));
        }
        assert_eq!(State::parse(" 4\n"), Some(Connected));
        for bad in ["", "9", "-1", "four", "4 4", "4294967300", "0x4"] {
            assert_eq!(State::parse(bad), None, "{bad:?}");
        }
    }
}
