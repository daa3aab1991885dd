//! The front half of a vif.
