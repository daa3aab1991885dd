//! The next step of a front end, from the states of both ends: a pure function, so that every pair
//! is tested.
//!
//! ```text
//!            back InitWait            back Closing, Closed      back has unmapped
//!   Initialising ──▶ Connected ───────────▶ Closing ─────────────▶ Closed
//!        ▲               └─ back Initialising: it restarted           │
//!        └────────────────┴───────────────────────────────────────────┘ back Closed, online
//! ```
//! Any other state of ours was left by another front end: it is closed first.

use crate::back::State::{self, *};

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Wait for a change.
    Wait,
    /// Create rings, name them, and write Connected.
    Connect,
    /// Frames pass.
    Up,
    /// Stop using the rings, and write Closing.
    Close,
    /// The back end has unmapped the rings: release them, and write Closed.
    Closed,
    /// Start: release old rings, if any, and write Initialising.
    Begin,
    /// Closed on our request.
    Over,
    /// The vif does not exist any more.
    Gone,
}

/// The next step of a front end in `ours` whose back end is in `back`. `rings`: rings were created;
/// `online`: the vif is online in xenstore; `leaving`: to be closed.
pub fn step(ours: State, back: State, rings: bool, online: bool, leaving: bool) -> Step {
    match (ours, back) {
        (Unknown, _) => Step::Gone,
        (Initialising, _) if leaving => Step::Closed,
        (Initialising, InitWait) => Step::Connect,
        // A back end that is still connected notices the restart, and restarts, too.
        (Initialising, _) => Step::Wait,
        (Connected, _) if leaving || !rings => Step::Close,
        (Connected, State::Connected) => Step::Up,
        // It restarted and waits for our state, or replied to another request.
        (Connected, InitWait | Initialised | Reconfiguring | Reconfigured) => Step::Wait,
        (Connected, Initialising) => Step::Begin,
        (Connected, State::Closing | State::Closed | Unknown) => Step::Close,
        (State::Closing, State::Closing | State::Closed | Unknown | Initialising) => Step::Closed,
        // A back end in InitWait has not mapped our rings.
        (State::Closing, InitWait) => Step::Closed,
        (State::Closing, _) => Step::Wait,
        (State::Closed, _) if leaving && matches!(back, State::Closed | Unknown) => Step::Over,
        (State::Closed, Unknown) => Step::Gone,
        // Some back ends continue to InitWait by themselves.
        (State::Closed, State::Closed | InitWait | Initialising) if online && !leaving => {
            Step::Begin
        }
        (State::Closed, _) => Step::Wait,
        (InitWait | Initialised | Reconfiguring | Reconfigured, _) => Step::Close,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn letter(step: Step) -> char {
        match step {
            Step::Wait => '.',
            Step::Connect => 'c',
            Step::Up => 'U',
            Step::Close => '5',
            Step::Closed => '6',
            Step::Begin => '1',
            Step::Over => 'O',
            Step::Gone => 'G',
        }
    }

    /// One row per state of ours, one column per state of the back end, by number.
    fn table(rings: bool, online: bool, leaving: bool) -> Vec<String> {
        let cell = |ours, back: &State| letter(step(ours, *back, rings, online, leaving));
        let row = |ours: &State| State::ALL.iter().map(|back| cell(*ours, back)).collect();
        State::ALL.iter().map(row).collect()
    }

    #[test]
    fn every_pair_of_states_has_a_step() {
        // Rows and columns: Unknown, Initialising, InitWait, Initialised, Connected, Closing,
        // Closed, Reconfiguring, Reconfigured.
        let with_rings = [
            "GGGGGGGGG",
            "..c......",
            "555555555",
            "555555555",
            "51..U55..",
            "666..66..",
            "G11...1..",
            "555555555",
            "555555555",
        ];
        assert_eq!(table(true, true, false), with_rings);
        let foreign = table(false, true, false);
        assert_eq!(foreign[4], "555555555", "rings of another front end are closed first");
        let offline = table(true, false, false);
        assert_eq!(offline[6], "G........", "a vif being removed is not started again");
    }

    #[test]
    fn leaving_ends_from_every_state_with_a_back_end_that_follows() {
        for start in State::ALL {
            let (mut ours, mut back) = (start, Connected);
            for _ in 0..8 {
                match step(ours, back, true, true, true) {
                    Step::Over | Step::Gone => break,
                    Step::Close => (ours, back) = (State::Closing, State::Closing),
                    Step::Closed => (ours, back) = (State::Closed, State::Closed),
                    Step::Wait => back = if ours == State::Closing { ours } else { State::Closed },
                    other => panic!("{other:?} while leaving from {start}"),
                }
            }
            let end = step(ours, back, true, true, true);
            assert!(matches!(end, Step::Over | Step::Gone), "{start} ends in {ours} {back}");
        }
    }
}
