//! The original study's table, as published.

/// A row, for one state of the packet filter.
pub struct Row {
    /// Our name for the pair.
    pub pair: &'static str,
    /// Its name in the table.
    pub name: &'static str,
    /// Whether the packet filter was enabled.
    pub filter: bool,
    /// KB/s before the changes.
    pub before: f64,
    /// KB/s after them.
    pub after: f64,
}

const fn row(filter: bool, pair: &'static str, name: &'static str, before: f64, after: f64) -> Row {
    Row { pair, name, filter, before, after }
}

const ON: bool = true;
const OFF: bool = false;

/// All rows.
pub const TABLE: [Row; 12] = [
    row(ON, "a-host", "netbsd-domU -> dom0", 13130.0, 10972.0),
    row(ON, "host-a", "dom0 -> netbsd-domU", 10076.0, 11172.0),
    row(ON, "b-host", "linux-domU -> dom0", 12786.0, 12530.0),
    row(ON, "host-b", "dom0 -> linux-domU", 11978.0, 13817.0),
    row(ON, "a-b", "netbsd-domU -> linux-domU", 9712.0, 9722.0),
    row(ON, "b-a", "linux-domU -> netbsd-domU", 7710.0, 8160.0),
    row(OFF, "a-host", "netbsd-domU -> dom0", 14357.0, 17745.0),
    row(OFF, "host-a", "dom0 -> netbsd-domU", 13113.0, 15175.0),
    row(OFF, "b-host", "linux-domU -> dom0", 16239.0, 22179.0),
    row(OFF, "host-b", "dom0 -> linux-domU", 18839.0, 20005.0),
    row(OFF, "a-b", "netbsd-domU -> linux-domU", 11122.0, 12307.0),
    row(OFF, "b-a", "linux-domU -> netbsd-domU", 7369.0, 12647.0),
];
