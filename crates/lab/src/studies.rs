//! The studies.

mod bulk;
mod fairness;
mod polling;

use crate::study::Study;

/// All of them, in the order listed.
pub const ALL: &[&dyn Study] = &[&polling::Polling, &fairness::Fairness];
