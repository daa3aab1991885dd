//! The studies.

use crate::study::Study;

/// All of them, in the order listed.
pub const ALL: &[&dyn Study] = &[];
