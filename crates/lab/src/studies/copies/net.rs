//! The host with its two guests: as router or as bridge, as it was before and as it is after.
//!
//! ```text
//!   router, before and after               bridge, before           bridge, after
//!   A ─ switch ─ tap ┐                     A ─ switch ─ tap ┐       A ─┐
//!                    ├ host's routes                        ├ br0      ├ switch ─ tap (host)
//!   B ─ switch ─ tap ┘                     B ─ switch ─ tap ┘       B ─┘
//! ```
//!
//! With an external machine, `box`, a veth pair leads to it from `br0`, which then also the one
//! switch's TAP is a port of.

use super::filter::Filter;
use crate::error::Fail;
use crate::plan::Cell;
use crate::stage::{
    Count, GuestKind, Namespace, Nic, NicOptions, Ping, Port, Proto, START_MAX_S, Stage, Switch,
    SwitchOptions, Window, sleep, wait_for,
};

/// Guest A and its interface of the host.
const A: (&str, &str) = ("a", "tap-a");
/// Guest B.
const B: (&str, &str) = ("b", "tap-b");
/// Both.
const GUESTS: [(&str, &str); 2] = [A, B];
/// The host's interface where the switch is the bridge.
const HOST_TAP: &str = "tap-host";
/// The host's bridge.
const BRIDGE: &str = "br0";
/// The veth pair to the external machine: the host's end, and its own.
const UP: (&str, &str) = ("to-box", "eth0");
/// The external machine's address.
const BOX_ADDRESS: &str = "10.9.0.9";
/// What segments and merges, by `ethtool`'s names.
const SEGMENTING: &str = "tso gso gro";

/// The rings of each: virtio's and Xen's, but where both have a stock driver, virtio's.
fn protos(guest: GuestKind) -> [Proto; 2] {
    match guest {
        GuestKind::Netns => [Proto::Virtio, Proto::Xen],
        GuestKind::Uml | GuestKind::Qemu => [Proto::Virtio; 2],
    }
}

/// Who sends, and who gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The host's own network.
    Host,
    /// Guest A or B: 0, 1.
    Guest(usize),
    /// The external machine.
    Box,
}

impl End {
    /// `a-host`: from, to. A guest is one of them.
    pub fn pair(text: &str) -> Option<(Self, Self)> {
        let end = |word| match word {
            "host" => Some(Self::Host),
            "a" => Some(Self::Guest(0)),
            "b" => Some(Self::Guest(1)),
            "box" => Some(Self::Box),
            _ => None,
        };
        let is_guest = |end: &Self| matches!(end, Self::Guest(_));
        let (from, to) = text.split_once('-')?;
        let pair = end(from).zip(end(to)).filter(|(from, to)| from != to);
        pair.filter(|(from, to)| is_guest(from) || is_guest(to))
    }
}

/// Network to be built.
pub struct Plan {
    router: bool,
    filter: Filter,
    /// Frames of the MTU only: as it was without segmentation by cards.
    plain: bool,
    before: bool,
    /// Guests' receive buffers of half a page.
    halves: bool,
    /// With an external machine.
    outside: bool,
}

impl Plan {
    /// Returns the network of a cell.
    pub fn of(cell: &Cell) -> Self {
        Self {
            router: cell.get("mode") == "router",
            filter: Filter::named(cell.get("filter")),
            plain: cell.get("frames") == "mtu",
            before: cell.get("variant") == "before",
            halves: cell.get("variant") == super::HALVES,
            outside: super::is_outside(cell),
        }
    }

    /// One process for both guests.
    fn is_one_switch(&self) -> bool {
        !self.router && !self.before
    }

    /// Before: one kick per frame, no suppressed notifications, and one frame at a time from the
    /// host's network. A guest on Xen rings still suppresses by index, by setting it late: the back
    /// half must not notify more often.
    fn nic(&self, proto: Proto) -> NicOptions {
        let mut nic = NicOptions::new("event");
        if self.before {
            nic.set.push("tx-burst=1".into());
            nic.set.push(match proto {
                Proto::Virtio => "suppress=flags".into(),
                Proto::Xen => "suppress=none".into(),
            });
        }
        if self.halves && proto == Proto::Virtio {
            nic.set.push("rx-buffer=2048".into());
        }
        nic
    }

    fn tap_options(&self) -> &'static str {
        if self.before { ",poll=napi:1" } else { "" }
    }

    /// Addresses of the host and of guest `i`, with the length of their link's prefix.
    fn addresses(&self, i: usize) -> (String, String) {
        if self.router {
            (format!("10.9.{}.1/24", i + 1), format!("10.9.{}.2/24", i + 1))
        } else {
            ("10.9.0.1/24".into(), format!("10.9.0.{}/24", i + 2))
        }
    }
}

/// All of it, running; dropped in this order.
pub struct Net {
    one_switch: bool,
    switches: Vec<Switch>,
    nics: Vec<Nic>,
    /// The host's namespace.
    pub host: Namespace,
    filter: Filter,
    /// The external machine's.
    outside: Option<Namespace>,
}

impl Net {
    /// Builds it, and waits until every pair's packets arrive.
    pub fn build(stage: &Stage, plan: &Plan) -> Result<Self, Fail> {
        let host = Namespace::new(stage, "host")?;
        // No packet of the bridge meets the filter where there is none.
        let bridged = if plan.filter == Filter::Off { "0" } else { "1" };
        host.set_sysctl("net.bridge.bridge-nf-call-iptables", bridged)?;
        host.set_sysctl("net.ipv4.ip_forward", "1")?;
        let protos = protos(stage.guest);
        let ports = GUESTS.iter().zip(protos);
        let ports: Vec<Port> =
            ports.map(|((name, _), proto)| Port::guest(stage, name, proto, "")).collect();
        let switches = Self::switches(stage, plan, &host, &ports)?;
        plan.addresses_of_host(&host)?;
        plan.filter.load(&host, &plan.taps())?;
        let outside = plan.outside.then(|| outside(stage, &host)).transpose()?;
        let mut nics = Vec::new();
        for (i, (port, proto)) in ports.iter().zip(protos).enumerate() {
            let (gateway, address) = plan.addresses(i);
            let nic = Nic::start_at(stage, i, port, &plan.nic(proto), &address)?;
            if plan.router {
                let gateway = gateway.trim_end_matches("/24");
                nic.netns.ip(&format!("route add default via {gateway}"))?;
            }
            nics.push(nic);
        }
        let ports_each = if plan.is_one_switch() { 3 } else { 2 };
        for switch in &switches {
            switch.wait_up(ports_each)?;
        }
        let (one_switch, filter) = (plan.is_one_switch(), plan.filter);
        let net = Self { one_switch, switches, nics, host, filter, outside };
        let reached = [(&net.host, 0), (&net.host, 1), (&net.nics[0].netns, 1)];
        let from_outside = net.outside.iter().flat_map(|netns| [(netns, 0), (netns, 1)]);
        for (from, to) in reached.into_iter().chain(from_outside) {
            Ping::until_answered(from, &net.nics[to].address)?;
        }
        for nic in &net.nics {
            filter.check(&net.host, &nic.address)?;
        }
        if plan.plain {
            // Not before frames pass: interfaces get all that was negotiated back when their
            // guests connect, whatever was turned off by then.
            for tap in plan.taps() {
                net.host.set_offloads(tap, SEGMENTING, false)?;
            }
            for nic in &net.nics {
                nic.netns.set_offloads(Nic::DEVICE, SEGMENTING, false)?;
            }
        }
        Ok(net)
    }

    fn switches(
        stage: &Stage,
        plan: &Plan,
        host: &Namespace,
        ports: &[Port],
    ) -> Result<Vec<Switch>, Fail> {
        let options = plan.tap_options();
        let mut how = SwitchOptions::new(stage, "event");
        if plan.is_one_switch() {
            let tap = Port::tap("host", HOST_TAP, host, options);
            return Ok(vec![Switch::start(stage, &how, &[&[tap][..], ports].concat())?]);
        }
        if !plan.before {
            // Where the receiver is known before the frame, long ones are read into its buffers.
            how.forward = "cross".into();
        }
        let pairs = ports.iter().zip(GUESTS);
        let each = pairs.map(|(port, (_, device))| {
            let tap = Port::tap("host", device, host, options);
            Switch::start(stage, &how, &[port.clone(), tap])
        });
        each.collect()
    }

    /// A namespace, and its address as the other end sees it.
    pub fn end(&self, end: End, seen_from: End) -> (&Namespace, String) {
        match (end, seen_from) {
            (End::Guest(i), _) => (&self.nics[i].netns, self.nics[i].address.clone()),
            (End::Host, End::Guest(i)) => {
                let link = self.nics[i].address.rsplit_once('.').map_or("", |(link, _)| link);
                (&self.host, format!("{link}.1"))
            }
            (End::Host, _) => (&self.host, "127.0.0.1".into()),
            (End::Box, _) => (self.outside.as_ref().unwrap_or(&self.host), BOX_ADDRESS.into()),
        }
    }

    /// Ends the guests; notifications that they sent, for each frame that they sent or got, from
    /// the beginning on. Their own counts: the switch sees several at once as one. None of guests
    /// whose driver does not count them.
    pub fn kicks_per_frame(&self) -> Result<Option<f64>, Fail> {
        let (mut kicks, mut frames) = (0.0, 0.0);
        for nic in &self.nics {
            let Some(report) = nic.end()? else { return Ok(None) };
            let sum = |names: [&str; 2]| -> f64 {
                names.iter().map(|name| report[*name].as_f64().unwrap_or(0.0)).sum()
            };
            kicks += sum(["kicks_tx", "kicks_rx"]);
            frames += sum(["sent_frames", "received_frames"]);
        }
        Ok(Some(kicks / f64::max(frames, 1.0)))
    }

    /// Copies by the filter for each frame from guests, from the beginning on.
    pub fn copies_by_filter(&self) -> Result<f64, Fail> {
        let counts = self.switches.iter().map(Window::since_start);
        let counts = counts.collect::<Result<Vec<_>, _>>()?;
        let counts = Counts { one_switch: self.one_switch, counts };
        let frames = counts.guests(|count, name| count.ingress(name, "frames"));
        // Afterwards: traffic continues, and each of these frames must be among the copies.
        let copies = self.filter.copies(&self.host)?;
        Ok((copies / frames.max(1.0)).min(1.0))
    }

    /// Lets it be for so long, and counts.
    pub fn watch(&self, seconds: f64) -> Result<Counts, Fail> {
        let roles = [&self.host, &self.nics[0].netns, &self.nics[1].netns];
        let windows = self.switches.iter().map(|switch| Window::open(switch, &roles));
        let windows = windows.collect::<Result<Vec<_>, _>>()?;
        sleep(seconds);
        let counts = windows.into_iter().map(Window::close).collect::<Result<Vec<_>, _>>()?;
        self.switches.iter().try_for_each(Switch::check)?;
        self.nics.iter().try_for_each(Nic::check)?;
        Ok(Counts { one_switch: self.one_switch, counts })
    }
}

impl Plan {
    /// Interfaces of the switches in the host.
    fn taps(&self) -> Vec<&'static str> {
        if self.is_one_switch() { vec![HOST_TAP] } else { vec![A.1, B.1] }
    }

    /// Sets the host's side up, once the switches have made their interfaces.
    fn addresses_of_host(&self, host: &Namespace) -> Result<(), Fail> {
        let taps = self.taps();
        for tap in &taps {
            wait_for("the switch's interface", START_MAX_S, || Ok(host.has_device(tap)))?;
        }
        if self.is_one_switch() && !self.outside || self.router {
            let mut all = taps.iter().enumerate();
            return all.try_for_each(|(i, tap)| host.add_address(tap, &self.addresses(i).0));
        }
        host.ip(&format!("link add {BRIDGE} type bridge"))?;
        for tap in &taps {
            host.ip(&format!("link set {tap} master {BRIDGE} up"))?;
        }
        host.add_address(BRIDGE, &self.addresses(0).0)
    }
}

/// An external machine at the host's bridge, with frames of the MTU. It receives in a thread of
/// the kernel: otherwise the host's switches would be charged for its network stack.
fn outside(stage: &Stage, host: &Namespace) -> Result<Namespace, Fail> {
    let netns = Namespace::new(stage, "box")?;
    let (up, device) = UP;
    host.ip(&format!(
        "link add {up} type veth peer name {device} netns {}
         link set {up} master {BRIDGE} up",
        netns.pid()
    ))?;
    netns.add_address(device, &format!("{BOX_ADDRESS}/24"))?;
    host.set_offloads(up, SEGMENTING, false)?;
    netns.set_offloads(device, "tso gso", false)?;
    netns.enable_threaded_napi(device)?;
    Ok(netns)
}

/// Counters of the switches of one host.
pub struct Counts {
    one_switch: bool,
    counts: Vec<Count>,
}

impl Counts {
    fn sum(&self, of: impl Fn(&Count) -> f64) -> f64 {
        self.counts.iter().map(of).sum()
    }

    fn guests(&self, of: impl Fn(&Count, &str) -> f64) -> f64 {
        self.sum(|count| GUESTS.iter().map(|(name, _)| of(count, name)).sum())
    }

    /// Frames between guests and switches, both ways.
    pub fn frames(&self) -> f64 {
        self.guests(|count, name| count.ingress(name, "frames") + count.egress(name, "frames"))
    }

    /// Notifications to guests.
    pub fn calls(&self) -> f64 {
        self.guests(Count::calls)
    }

    /// Payload a second that arrived, in bytes: without the headers of Ethernet, IP and TCP.
    pub fn payload_per_s(&self, from: End, to: End) -> f64 {
        const HEADERS: f64 = 14.0 + 20.0 + 32.0;
        let payload = self.sum(|count| match (from, to) {
            (_, End::Guest(i)) => {
                let name = GUESTS[i].0;
                count.egress(name, "bytes") - HEADERS * count.egress(name, "frames")
            }
            (End::Guest(i), _) => {
                let name = GUESTS[i].0;
                count.ingress(name, "bytes") - HEADERS * count.ingress(name, "frames")
            }
            (End::Host | End::Box, _) => 0.0,
        });
        payload / self.counts.first().map_or(1.0, |count| count.seconds)
    }

    /// Returns how often each byte was copied on its way, by the switches and by the kernel.
    ///
    /// What a guest sends is copied once: into another guest, or by the kernel as it is written to
    /// a TAP. What comes from a TAP is copied as it is read, and, unless that was straight into the
    /// receiver's buffers (`direct`), once more into them. The kernel's bridge and router copy
    /// nothing, and neither does a veth pair; for the filter's, see [`Net::copies_by_filter`].
    pub fn copies(&self, from: End, to: End) -> f64 {
        // A guest's TAP is at the switch that it has for itself.
        let from_tap = |i: usize| {
            let count = &self.counts[if self.one_switch { 0 } else { i }];
            let part = count.ingress("host", "direct") / count.ingress("host", "frames").max(1.0);
            2.0 - part.min(1.0)
        };
        match (from, to) {
            (End::Guest(_), End::Host | End::Box) => 1.0,
            (End::Guest(_), End::Guest(_)) if self.one_switch => 1.0,
            (End::Guest(_), End::Guest(i)) => 1.0 + from_tap(i),
            (End::Host | End::Box, End::Guest(i)) => from_tap(i),
            (End::Host | End::Box, _) => 0.0,
        }
    }

    /// CPU time of all switches, in per cent of one CPU.
    pub fn switch_percent(&self) -> f64 {
        self.sum(|count| count.percent(count.switch_ns))
    }

    /// CPU time of a role: 0 the host's tools, 1 and 2 the guests.
    pub fn role_percent(&self, i: usize) -> f64 {
        self.counts.first().map_or(0.0, |count| count.percent(count.roles_ns[i]))
    }

    /// Frames lost, by whatever cause.
    pub fn drops(&self) -> f64 {
        self.sum(|count| count.drops("", ""))
    }

    /// So many a second.
    pub fn per_second(&self, n: f64) -> f64 {
        self.counts.first().map_or(0.0, |count| count.per_second(n))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_of_two_ends() {
        assert_eq!(End::pair("a-host"), Some((End::Guest(0), End::Host)));
        assert_eq!(End::pair("b-a"), Some((End::Guest(1), End::Guest(0))));
        assert_eq!(End::pair("box-b"), Some((End::Box, End::Guest(1))));
        for bad in ["a", "a-a", "host-c", "host-box", ""] {
            assert_eq!(End::pair(bad), None, "{bad}");
        }
    }
}
