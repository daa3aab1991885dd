//! Where processes run: network namespaces, CPUs, and a folder of their own.

/// What all runs of a study share.
pub struct Stage {}
