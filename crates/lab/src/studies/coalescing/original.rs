//! The original study's table, as published.

/// A row of the table.
#[derive(Clone, Copy)]
pub struct Row {
    /// Its name in the table, in lower case.
    pub timeout: &'static str,
    /// Guest to host: seconds for 1 GB of TCP, and packets for each interrupt.
    pub from_guest: [f64; 2],
    /// Host to guest.
    pub to_guest: [f64; 2],
    /// Seconds for a million pings; the text gives them for two rows.
    pub pings: Option<f64>,
}

const fn row(
    timeout: &'static str,
    from_guest: [f64; 2],
    to_guest: [f64; 2],
    pings: Option<f64>,
) -> Row {
    Row { timeout, from_guest, to_guest, pings }
}

/// All rows.
pub const TABLE: [Row; 6] = [
    row("before", [11.3, 1.0], [6.3, 1.0], Some(98.0)),
    row("0", [11.7, 1.0], [6.6, 23.5], Some(104.0)),
    row("1", [17.1, 8.8], [8.6, 26.0], None),
    row("1/pending", [13.4, 1.9], [6.6, 23.8], None),
    row("2/pending", [13.6, 2.8], [6.6, 24.1], None),
    row("5/pending", [14.1, 5.0], [6.6, 24.4], None),
];
