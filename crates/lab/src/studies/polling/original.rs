//! The original study's table, as published.

use std::fmt;

use crate::plan::Cell;

/// A pair of rows: one case without and with the patch.
pub struct Row {
    /// Receive, in place of send.
    pub receive: bool,
    /// UDP, in place of TCP.
    pub udp: bool,
    /// Number of virtual machines.
    pub guests: u32,
    /// Bytes of a packet.
    pub size: u32,
    /// Throughput in Mbit/s, CPU of dom0 and of all guests in per cent, without the patch.
    pub without: [f64; 3],
    /// Throughput in Mbit/s, CPU of dom0 and of all guests in per cent, with the patch.
    pub with: [f64; 3],
}

impl Row {
    /// Whether a cell of ours is of this case.
    pub fn is_of(&self, cell: &Cell) -> bool {
        cell.number("guests") == f64::from(self.guests)
            && cell.number("size") == f64::from(self.size)
            && (cell.get("traffic") == "udp") == self.udp
            && (cell.get("direction") == "receive") == self.receive
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = if self.receive { "receive" } else { "send" };
        let traffic = if self.udp { "UDP" } else { "TCP" };
        write!(f, "{way} {traffic}, {} bytes, {} guests", self.size, self.guests)
    }
}

const fn row(
    receive: bool,
    udp: bool,
    guests: u32,
    size: u32,
    without: [f64; 3],
    with: [f64; 3],
) -> Row {
    Row { receive, udp, guests, size, without, with }
}

const RECEIVE: bool = true;
const SEND: bool = false;
const UDP: bool = true;
const TCP: bool = false;

/// All rows.
pub const TABLE: [Row; 26] = [
    row(RECEIVE, UDP, 1, 50, [83.25, 100.0, 26.1], [79.56, 100.0, 23.8]),
    row(RECEIVE, UDP, 1, 1472, [950.30, 44.8, 22.4], [949.32, 46.0, 17.9]),
    row(RECEIVE, UDP, 1, 1500, [915.84, 84.7, 42.4], [908.94, 88.3, 28.7]),
    row(RECEIVE, TCP, 1, 50, [506.57, 43.3, 70.3], [521.52, 34.5, 57.7]),
    row(RECEIVE, TCP, 1, 1472, [926.19, 69.0, 32.9], [928.23, 63.0, 24.4]),
    row(RECEIVE, TCP, 1, 1500, [935.12, 68.6, 33.7], [926.11, 63.8, 24.8]),
    row(RECEIVE, UDP, 3, 1472, [963.43, 50.7, 41.1], [964.47, 51.0, 25.0]),
    row(RECEIVE, UDP, 3, 1500, [859.96, 99.5, 73.4], [861.19, 97.4, 39.9]),
    row(RECEIVE, TCP, 3, 1472, [939.68, 78.4, 64.0], [926.04, 65.9, 31.8]),
    row(RECEIVE, TCP, 3, 1500, [933.00, 78.1, 63.3], [927.14, 66.9, 31.9]),
    row(RECEIVE, UDP, 6, 1472, [978.85, 56.9, 59.2], [975.05, 53.8, 33.5]),
    row(RECEIVE, UDP, 6, 1500, [886.92, 100.0, 87.2], [902.02, 96.9, 46.0]),
    row(RECEIVE, TCP, 6, 1472, [962.04, 90.3, 104.0], [958.94, 69.4, 43.7]),
    row(RECEIVE, TCP, 6, 1500, [960.35, 90.1, 103.7], [957.75, 68.7, 42.8]),
    row(RECEIVE, UDP, 9, 1472, [987.91, 60.5, 70.0], [988.30, 56.6, 42.7]),
    row(RECEIVE, UDP, 9, 1500, [953.48, 100.0, 93.8], [904.17, 98.6, 53.5]),
    row(RECEIVE, TCP, 9, 1472, [974.89, 90.0, 110.6], [980.03, 73.7, 55.4]),
    row(RECEIVE, TCP, 9, 1500, [971.34, 89.8, 109.6], [973.63, 73.9, 54.7]),
    row(SEND, UDP, 1, 1472, [949.84, 56.5, 21.7], [946.25, 51.2, 20.1]),
    row(SEND, UDP, 1, 1500, [912.46, 87.0, 26.6], [899.29, 86.7, 26.2]),
    row(SEND, TCP, 1, 1472, [932.16, 71.5, 35.6], [932.09, 66.9, 29.5]),
    row(SEND, TCP, 1, 1500, [929.91, 72.6, 35.9], [931.63, 66.7, 29.5]),
    row(SEND, UDP, 3, 1472, [972.66, 57.6, 24.0], [970.07, 56.3, 23.3]),
    row(SEND, UDP, 3, 1500, [943.87, 93.5, 32.5], [933.61, 93.9, 30.0]),
    row(SEND, TCP, 3, 1472, [955.92, 70.4, 36.1], [946.39, 72.9, 32.9]),
    row(SEND, TCP, 3, 1500, [966.06, 73.0, 38.0], [947.23, 72.5, 33.6]),
];
