//! The rings of a vif as ports of the switch.

pub mod control;
pub mod hash;
