//! Xenstore.
