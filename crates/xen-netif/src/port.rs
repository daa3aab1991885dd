//! The rings of a vif as ports of the switch.
