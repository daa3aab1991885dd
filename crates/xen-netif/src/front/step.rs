//! What a front end does next, by the states of both ends: pure, so that every pair is tested.
//!
//! ```text
//!            back InitWait            back Closing, Closed        back let go
//!   Initialising ──▶ Connected ───────────▶ Closing ─────────────▶ Closed
//!        ▲               └─ back Initialising: it began anew          │
//!        └────────────────┴───────────────────────────────────────────┘ back Closed, online
//! ```
//! A state of ours that is none of these was left by another front end: it is closed first.

use crate::back::State::{self, *};

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing, until something changes.
    Wait,
    /// Make rings, name them, and write Connected.
    Connect,
    /// Frames pass.
    Up,
    /// Stop using the rings, and write Closing.
    Close,
    /// The back end has let go: give the rings back, and write Closed.
    Closed,
    /// Begin: give back what there may be, and write Initialising.
    Begin,
    /// Closed for good, as we wanted.
    Over,
    /// There is no such vif any more.
    Gone,
}

/// The next step of a front end in `ours` whose back end is in `back`. `rings`: we have made
/// rings; `online`: the toolstack wants the vif to be; `leaving`: we want to close.
pub fn step(ours: State, back: State, rings: bool, online: bool, leaving: bool) -> Step {
    match (ours, back) {
        (Unknown, _) => Step::Gone,
        (Initialising, _) if leaving => Step::Closed,
        (Initialising, InitWait) => Step::Connect,
        // A back end that is still connected sees that we began anew, and does so itself.
        (Initialising, _) => Step::Wait,
        (Connected, _) if leaving || !rings => Step::Close,
        (Connected, State::Connected) => Step::Up,
        // Restarted, it waits for us to be what we are; or has answered a request of others.
        (Connected, InitWait | Initialised | Reconfiguring | Reconfigured) => Step::Wait,
        (Connected, Initialising) => Step::Begin,
        (Connected, State::Closing | State::Closed | Unknown) => Step::Close,
        (State::Closing, State::Closing | State::Closed | Unknown | Initialising) => Step::Closed,
        // A back end in InitWait never took our rings.
        (State::Closing, InitWait) => Step::Closed,
        (State::Closing, _) => Step::Wait,
        (State::Closed, _) if leaving && matches!(back, State::Closed | Unknown) => Step::Over,
        (State::Closed, Unknown) => Step::Gone,
        // Some back ends go on to InitWait by themselves.
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

    /// One row for each state of ours, one column for each of the back's, by number.
    fn table(rings: bool, online: bool, leaving: bool) -> Vec<String> {
        let cell = |ours, back: &State| letter(step(ours, *back, rings, online, leaving));
        let row = |ours: &State| State::ALL.iter().map(|back| cell(*ours, back)).collect();
        State::ALL.iter().map(row).collect()
    }

    #[test]
    fn every_pair_of_states_has_its_step() {
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
        assert_eq!(offline[6], "G........", "a vif being removed is not begun again");
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
