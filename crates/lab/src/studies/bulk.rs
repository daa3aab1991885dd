//! Bulk traffic between guests and the external network through one switch; common to `polling`,
//! `fairness` and `coalescing`.

use crate::error::Fail;
use crate::stage::{
    Count, Iperf, Link, Namespace, Nic, NicOptions, Ping, PingPlan, Pings, Port, Process, Proto,
    START_MAX_S, Stage, Switch, SwitchOptions, Window, Wire, need, sleep, wait_for,
};

/// Warm-up before a window, once every guest has traffic, in seconds.
const WARM_S: f64 = 0.5;
/// Payload that exceeds the tools' control messages, in bits.
const START_BITS: f64 = 160_000.0;
/// Interval of pings, in ms: `ping` sleeps in between, except for the last 10 ms.
const PING_MS: f64 = 20.0;
/// Bytes of the IP and TCP headers, with the timestamp option.
const TCP_HEADERS: f64 = 52.0;

/// A bulk transfer.
pub struct Bulk<'a> {
    /// Protocol of guests.
    pub proto: Proto,
    /// Number of guests.
    pub guests: usize,
    /// Options of the guests' ports, as for [`Port::guest`].
    pub port: &'a str,
    /// Options of the ports of the external network, likewise.
    pub outside: &'a str,
    /// Options of the guests' NICs. Offloads in `without` are also turned off in the external
    /// network.
    pub nic: NicOptions,
    /// Options of the switch.
    pub switch: SwitchOptions,
    /// Attachment of the external network.
    pub link: Link,
    /// Whether guests send; otherwise they receive.
    pub from_guests: bool,
    /// UDP instead of TCP.
    pub udp: bool,
    /// Bytes of a datagram's payload, or of a TCP write; 0: the tool's default.
    pub len: u32,
    /// Offered load: payload of all guests, in bit/s; 0: unlimited.
    pub bits_per_s: f64,
    /// Number of streams per guest.
    pub streams: u32,
    /// Whether the first guest is pinged in the window.
    pub ping: bool,
}

/// Results of a transfer in one window.
pub struct Done {
    /// Counters of the switch, and CPU time of the external network and of each guest.
    pub count: Count,
    /// Payload that each guest received or sent, in bit/s.
    pub bits_per_s: Vec<f64>,
    /// Received payload of all streams, in bit/s.
    pub arrived_bits_per_s: f64,
    /// Lost datagrams, in per cent of those sent.
    pub lost_percent: f64,
    /// Retransmitted TCP segments.
    pub retransmits: f64,
    /// Results of the pings, if any.
    pub pings: Option<Pings>,
}

impl Done {
    /// CPU time of all guests, in per cent of one CPU.
    pub fn guests_percent(&self) -> f64 {
        self.count.percent(self.count.roles_ns.iter().skip(1).sum())
    }

    /// CPU time of the external network, in per cent of one CPU.
    pub fn host_percent(&self) -> f64 {
        self.count.percent(self.count.roles_ns.first().copied().unwrap_or(0))
    }
}

/// Protocol counters of a namespace.
type Counters = std::collections::BTreeMap<String, u64>;

/// Returns the increase of a counter.
fn increase(before: &Counters, after: &Counters, name: &str) -> f64 {
    let at = |counters: &Counters| counters.get(name).copied().unwrap_or(0);
    at(after).saturating_sub(at(before)) as f64
}

impl Bulk<'_> {
    /// Sets everything up, warms up, measures a window of `seconds`, and ends everything.
    pub fn run(&self, stage: &Stage, seconds: f64) -> Result<Done, Fail> {
        // Before anything is started: a missing program skips all cells at once.
        ["ping", "iperf3"].into_iter().try_for_each(need)?;
        let wire = Wire::new(stage, self.link)?;
        let guest = |i: usize| Port::guest(stage, &format!("g{i}"), self.proto, self.port);
        let ports: Vec<Port> = (0..self.guests).map(guest).collect();
        let all = wire.ports(&ports, self.outside);
        let switch = Switch::start(stage, &self.switch, &all)?;
        wire.up()?;
        let nics = ports.iter().enumerate();
        let nics = nics.map(|(i, port)| Nic::start(stage, i, port, &self.nic));
        let nics: Vec<Nic> = nics.collect::<Result<_, _>>()?;
        switch.wait_up(all.len())?;
        for nic in &nics {
            Ping::until_answered(&nic.netns, Wire::ADDRESS)?;
        }
        disable_offloads(&wire, &nics, &self.nic.without)?;
        let mut namespaces = vec![&wire.netns];
        namespaces.extend(nics.iter().map(|nic| &nic.netns));
        let counters = || namespaces.iter().map(|netns| netns.counters()).collect::<Vec<_>>();
        let initial = counters();
        // Longer than the window can be; it is killed at the end.
        let mut traffic = self.traffic(stage, &wire, &nics, seconds + 60.0)?;
        wait_for("traffic of every guest", START_MAX_S, || {
            traffic.iter_mut().try_for_each(Process::check)?;
            let now = counters();
            let enough = |i| self.payload(&initial[i], &now[i], !self.from_guests) > START_BITS;
            Ok((1..now.len()).all(enough))
        })?;
        sleep(WARM_S);
        let ping = self.ping.then(|| {
            let count = (seconds * 1e3 / PING_MS) as u32;
            let pings = PingPlan { interval_ms: PING_MS, count, size: 56 };
            let all_cpus = stage.all_cpus();
            Ping::start(stage, &wire.netns.on(&all_cpus), &nics[0].address, pings)
        });
        let ping = ping.transpose()?;
        let before = counters();
        let window = Window::open(&switch, &namespaces)?;
        sleep(seconds);
        let count = window.close()?;
        let after = counters();
        switch.check()?;
        nics.iter().try_for_each(Nic::check)?;
        let pings = ping.map(Ping::report).transpose()?;
        Ok(self.done(count, &before, &after, pings))
    }

    /// Starts an iperf3 server and client for each guest.
    fn traffic(
        &self,
        stage: &Stage,
        wire: &Wire,
        nics: &[Nic],
        seconds: f64,
    ) -> Result<Vec<Process>, Fail> {
        let all_cpus = stage.all_cpus();
        let host: (&Namespace, &[usize], &str) = (&wire.netns, &all_cpus, Wire::ADDRESS);
        let mut processes = Vec::new();
        let mut flows = Vec::new();
        for (i, nic) in nics.iter().enumerate() {
            let guest = (&nic.netns, &stage.guest_cpus[..], &nic.address[..]);
            let (from, to) = if self.from_guests { (guest, host) } else { (host, guest) };
            let port = 5201 + i as u16;
            processes.push(Iperf::server(stage, to.0, to.1, port)?);
            flows.push((self.flow(to.2, port, seconds), from));
        }
        for (flow, (netns, cpus, _)) in flows {
            processes.push(flow.start(stage, &netns.on(cpus))?.process);
        }
        Ok(processes)
    }

    fn flow(&self, to: &str, port: u16, seconds: f64) -> Iperf {
        let mut flow = Iperf::tcp(to, port, seconds);
        (flow.udp, flow.len, flow.streams) = (self.udp, self.len, self.streams);
        flow.rate = self.bits_per_s / self.guests as f64 / f64::from(self.streams);
        if flow.rate > 0.0 {
            // Paced at 5 kHz instead of 1 kHz.
            flow.more.extend(["--pacing-timer", "200"].map(String::from));
        }
        if self.udp {
            // Twice the default socket buffer: the maximum without changing sysctls.
            flow.more.extend(["-w", "208K"].map(String::from));
        }
        flow
    }

    /// Returns the payload that a namespace received or sent, in bits, by its IP counters.
    fn payload(&self, before: &Counters, after: &Counters, arrived: bool) -> f64 {
        let (datagrams, octets, packets) = if arrived {
            ("Udp.InDatagrams", "IpExt.InOctets", "Ip.InReceives")
        } else {
            ("Udp.OutDatagrams", "IpExt.OutOctets", "Ip.OutRequests")
        };
        let n = |name: &str| increase(before, after, name);
        8.0 * if self.udp {
            n(datagrams) * f64::from(self.len)
        } else {
            (n(octets) - TCP_HEADERS * n(packets)).max(0.0)
        }
    }

    fn done(
        &self,
        count: Count,
        before: &[Counters],
        after: &[Counters],
        pings: Option<Pings>,
    ) -> Done {
        let payload = |i: usize, arrived: bool| self.payload(&before[i], &after[i], arrived);
        let guests = 1..before.len();
        let side = |guests_side: bool, arrived: bool| -> f64 {
            if guests_side {
                guests.clone().map(|i| payload(i, arrived)).sum()
            } else {
                payload(0, arrived)
            }
        };
        let (sent, arrived) = (side(self.from_guests, false), side(!self.from_guests, true));
        let lost = if self.udp && sent > 0.0 { 1.0 - arrived / sent } else { 0.0 };
        let resent = (0..before.len()).map(|i| increase(&before[i], &after[i], "Tcp.RetransSegs"));
        let each = guests.clone().map(|i| count.per_second(payload(i, !self.from_guests)));
        Done {
            bits_per_s: each.collect(),
            arrived_bits_per_s: count.per_second(arrived),
            lost_percent: 100.0 * lost.max(0.0),
            retransmits: resent.sum(),
            pings,
            count,
        }
    }
}

/// Turns offloads off at both ends. Guests must be connected: a new connection turns all negotiated
/// offloads of an interface on again.
pub fn disable_offloads(wire: &Wire, nics: &[Nic], offloads: &str) -> Result<(), Fail> {
    if offloads.is_empty() {
        return Ok(());
    }
    nics.iter().try_for_each(|nic| nic.netns.set_offloads(Nic::DEVICE, offloads, false))?;
    wire.netns.set_offloads(wire.device(), offloads, false)
}

/// Rate of a gigabit link, in bit/s.
const LINK_BITS_PER_S: f64 = 1e9;
/// Overhead of a frame on the wire, in bytes: check sequence, preamble and inter-frame gap.
const FRAME_OVERHEAD: u32 = 24;

/// Returns the maximum TCP payload on a gigabit link, in bit/s.
pub fn gigabit_tcp() -> f64 {
    LINK_BITS_PER_S * (1500.0 - TCP_HEADERS) / f64::from(14 + 1500 + FRAME_OVERHEAD)
}

/// Returns the maximum UDP payload on a gigabit link, in bit/s, for datagrams of `len` bytes,
/// which are fragmented above an MTU of 1500.
pub fn gigabit_udp(len: u32) -> f64 {
    let mut left = len + 8;
    let mut octets = 0;
    while left > 0 {
        let fragment = left.min(1480);
        octets += (14 + 20 + fragment).max(60) + FRAME_OVERHEAD;
        left -= fragment;
    }
    LINK_BITS_PER_S * f64::from(len) / f64::from(octets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gigabit_limits_agree_with_the_original_study() {
        // The original table has 949.32, 908.94 and, short of CPU, 83.25 Mbit/s; 928.23 of TCP.
        assert!((gigabit_udp(1472) / 1e6 - 957.0).abs() < 1.0);
        assert!((gigabit_udp(1500) / 1e6 - 924.0).abs() < 2.0);
        assert!((gigabit_udp(50) / 1e6 - 431.0).abs() < 1.0);
        assert!((gigabit_tcp() / 1e6 - 941.5).abs() < 1.0);
    }
}
