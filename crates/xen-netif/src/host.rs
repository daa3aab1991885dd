//! Grants and event channels.
