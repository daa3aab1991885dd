//! A store of our own.
