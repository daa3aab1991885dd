//! Bulk traffic between guests and the network outside, through one switch: what `polling` and
//! `fairness` have in common.

use crate::error::Fail;
use crate::stage::{
    Count, Iperf, Link, Namespace, Nic, NicOptions, Ping, Pings, Port, Process, Proto, Stage,
    Switch, SwitchOptions, Window, Wire, sleep, wait_for,
};

/// Traffic before a window, once all guests have some.
const WARM_S: f64 = 0.5;
/// Longest wait for that.
const START_MAX_S: f64 = 15.0;
/// Payload that is more than the tools' words to each other before they start, in bits.
const START_BITS: f64 = 160_000.0;
/// Time from ping to ping, in ms: `ping` sleeps between them, if an answer takes no longer than 10.
const PING_MS: f64 = 20.0;
/// Bytes of the headers of an IP packet with TCP, with its time stamps.
const TCP_HEADERS: f64 = 52.0;

/// What runs.
pub struct Bulk<'a> {
    /// What guests speak.
    pub proto: Proto,
    /// How many.
    pub guests: usize,
    /// Options of each guest's port of the switch, as [`Port::guest`] has them.
    pub port: &'a str,
    /// Options of the port that leads outside, likewise.
    pub outside: &'a str,
    /// How guests' NICs work. Offloads that they go without, the network outside goes without, too.
    pub nic: NicOptions,
    /// How the switch works.
    pub switch: SwitchOptions,
    /// How the network outside is attached.
    pub link: Link,
    /// From guests to outside, in place of to them.
    pub from_guests: bool,
    /// UDP in place of TCP.
    pub udp: bool,
    /// Bytes of payload of a datagram, and of a write with TCP; 0: the tool's own.
    pub len: u32,
    /// Payload of all guests together, in bits a second; 0: as much as passes.
    pub bits_per_s: f64,
    /// Streams to or from each guest.
    pub streams: u32,
    /// Whether the first guest is pinged meanwhile.
    pub ping: bool,
}

/// What came of it, in one window.
pub struct Done {
    /// Counters of the switch, and CPU time of the host's side and then of each guest.
    pub count: Count,
    /// Payload that each guest got, or sent, in bits a second.
    pub bits_per_s: Vec<f64>,
    /// Payload that arrived, in bits a second.
    pub arrived_bits_per_s: f64,
    /// Datagrams that were sent and did not arrive, in per cent.
    pub lost_percent: f64,
    /// TCP segments that were sent again.
    pub retransmits: f64,
    /// Pings beside it.
    pub pings: Option<Pings>,
}

impl Done {
    /// CPU of all guests together, in per cent of one CPU.
    pub fn guests_percent(&self) -> f64 {
        self.count.percent(self.count.roles_ns.iter().skip(1).sum())
    }

    /// CPU of the tools outside.
    pub fn host_percent(&self) -> f64 {
        self.count.percent(self.count.roles_ns.first().copied().unwrap_or(0))
    }
}

/// The kernel's counters of one namespace, at a moment.
type Counters = std::collections::BTreeMap<String, u64>;

/// How much more of a counter there is.
fn more(before: &Counters, after: &Counters, name: &str) -> f64 {
    let at = |counters: &Counters| counters.get(name).copied().unwrap_or(0);
    at(after).saturating_sub(at(before)) as f64
}

impl Bulk<'_> {
    /// Sets it up, lets it run for `seconds` once it is warm, and takes it down.
    pub fn run(&self, stage: &Stage, seconds: f64) -> Result<Done, Fail> {
        let wire = Wire::new(stage, self.link)?;
        let guest = |i: usize| Port::guest(stage, &format!("g{i}"), self.proto, self.port);
        let ports: Vec<Port> = (0..self.guests).map(guest).collect();
        let all = [&[wire.port(self.outside)], &ports[..]].concat();
        let switch = Switch::start(stage, &self.switch, &all)?;
        wire.up()?;
        let nics = ports.iter().enumerate();
        let nics = nics.map(|(i, port)| Nic::start(stage, i, port, &self.nic));
        let nics: Vec<Nic> = nics.collect::<Result<_, _>>()?;
        switch.wait_up(all.len())?;
        for nic in &nics {
            Ping::until_answered(&nic.netns, Wire::ADDRESS)?;
        }
        go_without(&wire, &nics, &self.nic.without)?;
        let mut namespaces = vec![&wire.netns];
        namespaces.extend(nics.iter().map(|nic| &nic.netns));
        let counters = || namespaces.iter().map(|netns| netns.counters()).collect::<Vec<_>>();
        let quiet = counters();
        // Longer than the window may come to: it is ended with the rest.
        let mut traffic = self.traffic(stage, &wire, &nics, seconds + 60.0)?;
        wait_for("traffic of every guest", START_MAX_S, || {
            traffic.iter_mut().try_for_each(Process::check)?;
            let now = counters();
            let enough = |i| self.payload(&quiet[i], &now[i], !self.from_guests) > START_BITS;
            Ok((1..now.len()).all(enough))
        })?;
        sleep(WARM_S);
        let ping = self.ping.then(|| {
            let shape = (PING_MS, (seconds * 1e3 / PING_MS) as u32, 56);
            let all_cpus = stage.all_cpus();
            Ping::start(stage, &wire.netns.on(&all_cpus), &nics[0].address, shape)
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

    /// Starts a server and a client for each guest; they go with what is returned.
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
            // Sent in step with 5 kHz, not 1 kHz.
            flow.more.extend(["--pacing-timer", "200"].map(String::from));
        }
        if self.udp {
            // Twice the usual socket buffer: the most without changing the machine's settings.
            flow.more.extend(["-w", "208K"].map(String::from));
        }
        flow
    }

    /// What passed a namespace's IP layer in one direction, as payload in bits.
    fn payload(&self, before: &Counters, after: &Counters, arrived: bool) -> f64 {
        let (datagrams, octets, packets) = if arrived {
            ("Udp.InDatagrams", "IpExt.InOctets", "Ip.InReceives")
        } else {
            ("Udp.OutDatagrams", "IpExt.OutOctets", "Ip.OutRequests")
        };
        let n = |name: &str| more(before, after, name);
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
        let again = (0..before.len()).map(|i| more(&before[i], &after[i], "Tcp.RetransSegs"));
        let each = guests.clone().map(|i| count.per_second(payload(i, !self.from_guests)));
        Done {
            bits_per_s: each.collect(),
            arrived_bits_per_s: count.per_second(arrived),
            lost_percent: 100.0 * lost.max(0.0),
            retransmits: again.sum(),
            pings,
            count,
        }
    }
}

/// Turns offloads of both ends off. Once frames pass, and not before: interfaces get all that was
/// negotiated back when their guests connect, whatever was turned off by then.
pub fn go_without(wire: &Wire, nics: &[Nic], offloads: &str) -> Result<(), Fail> {
    if offloads.is_empty() {
        return Ok(());
    }
    nics.iter().try_for_each(|nic| nic.netns.offloads(Nic::DEVICE, offloads, false))?;
    wire.netns.offloads(wire.device(), offloads, false)
}

/// Bits a second of a link of 1 Gbit/s.
const LINK: f64 = 1e9;
/// Between frames on a wire, in bytes: check sequence, preamble, and the gap to the next.
const APART: u32 = 24;

/// Payload of TCP that such a link carries, in bits a second.
pub fn gigabit_tcp() -> f64 {
    LINK * (1500.0 - TCP_HEADERS) / f64::from(14 + 1500 + APART)
}

/// The same in datagrams of so many bytes, with fragments above the MTU of 1500.
pub fn gigabit_udp(len: u32) -> f64 {
    let mut left = len + 8;
    let mut octets = 0;
    while left > 0 {
        let fragment = left.min(1480);
        octets += (14 + 20 + fragment).max(60) + APART;
        left -= fragment;
    }
    LINK * f64::from(len) / f64::from(octets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gigabit_holds_what_it_did_for_the_seed() {
        // The original table has 949.32, 908.94 and, short of CPU, 83.25 Mbit/s; 928.23 of TCP.
        assert!((gigabit_udp(1472) / 1e6 - 957.0).abs() < 1.0);
        assert!((gigabit_udp(1500) / 1e6 - 924.0).abs() < 2.0);
        assert!((gigabit_udp(50) / 1e6 - 431.0).abs() < 1.0);
        assert!((gigabit_tcp() / 1e6 - 941.5).abs() < 1.0);
    }
}
