//! Peers of a switch: guests with a NIC, traffic generators, and the external network.

use std::cell::RefCell;

use serde_json::Value;

use super::switch::Port;
use super::{GuestKind, Namespace, Place, Process, Proto, START_MAX_S, Stage, wait_for};
use crate::error::Fail;

/// Options of a guest's NIC or generator. [`NicOptions::new`] has the defaults of the program;
/// studies change single fields.
#[derive(Clone, Debug)]
pub struct NicOptions {
    /// `--poll`; empty: the program's default.
    pub poll: String,
    /// `--kick`.
    pub kick: String,
    /// Arguments of `--set`, one for each.
    pub set: Vec<String>,
    /// Options of the connection, each after a comma: `,smart-poll=on,static=on`.
    pub connect: String,
    /// Offloads of the interface to turn off, by their names in `ethtool -K`: `tso gso gro tx`.
    pub without: String,
    /// MTU of the interface.
    pub mtu: u16,
    /// Further options, passed unchanged: `--queue-size`, `--packed`.
    pub more: Vec<String>,
}

/// Size of a replayed ring: so large that its guest polls only a few times per pass.
pub const REPLAY_RING: u16 = 8192;

impl NicOptions {
    /// Returns the defaults of the program with a poll policy; MTU 1500, all offloads.
    pub fn new(poll: &str) -> Self {
        Self {
            poll: poll.into(),
            kick: "event".into(),
            set: Vec::new(),
            connect: String::new(),
            without: String::new(),
            mtu: 1500,
            more: Vec::new(),
        }
    }

    /// Returns options of a generator that uses almost no CPU: `gen --replay`, with rings of `size`
    /// descriptors.
    ///
    /// # Errors
    /// Guests of the stage are not virtio.
    pub fn replay(stage: &Stage, size: u16) -> Result<Self, Fail> {
        if stage.proto != Proto::Virtio {
            return Err(Fail::Missing("--replay needs virtqueues: use --proto virtio".into()));
        }
        let more = ["--replay", "--queue-size", &size.to_string()].map(String::from);
        Ok(Self { more: more.into(), ..Self::new("") })
    }

    fn args(&self, command: &str, port: &Port) -> Vec<String> {
        let connect = format!("{}{}", port.connect, self.connect);
        let mut args: Vec<String> =
            [command, "--connect", &connect, "--kick", &self.kick].map(String::from).into();
        if !self.poll.is_empty() {
            args.extend(["--poll".into(), self.poll.clone()]);
        }
        args.extend(self.set.iter().flat_map(|pair| ["--set".into(), pair.clone()]));
        args.extend(self.more.iter().cloned());
        args
    }
}

/// Address of guest `i` on the link, from `10.9.0.10`; the wire has [`Wire::ADDRESS`].
fn address_of(i: usize) -> String {
    format!("10.9.{}.{}", i / 200, 10 + i % 200)
}

/// MAC address of guest `i`.
fn mac_of(i: usize) -> String {
    format!("02:00:00:09:{:02x}:{:02x}", i / 256, i % 256)
}

/// A guest with a kernel's network stack, of the kind in [`Stage::guest`]: a namespace with a TAP
/// interface served by `pvswitch nic`, or a virtual machine with its kernel's driver. A machine
/// boots in the background; commands in it wait until it is up.
#[derive(Debug)]
pub struct Nic {
    /// Its address on the link.
    pub address: String,
    /// Its MAC address.
    pub mac: String,
    /// `pvswitch nic`; `None` for a virtual machine.
    process: Option<RefCell<Process>>,
    /// Its namespace; tools that run in it are accounted to the guest.
    pub netns: Namespace,
}

impl Nic {
    /// Name of its interface.
    pub const DEVICE: &str = super::vm::DEVICE;

    /// Starts guest `i` at a port, on the guests' CPUs, with an address on the common link.
    pub fn start(stage: &Stage, i: usize, port: &Port, options: &NicOptions) -> Result<Self, Fail> {
        Self::start_at(stage, i, port, options, &format!("{}/16", address_of(i)))
    }

    /// Starts guest `i` as [`start`](Self::start) does, with this address, such as `10.1.0.2/24`.
    pub fn start_at(
        stage: &Stage,
        i: usize,
        port: &Port,
        options: &NicOptions,
        address: &str,
    ) -> Result<Self, Fail> {
        let mac = mac_of(i);
        let ip = || address.split('/').next().unwrap_or_default().to_string();
        if stage.guest != GuestKind::Netns {
            let netns = Namespace::of_vm(stage, port, options, address, &mac)?;
            return Ok(Self { address: ip(), mac, process: None, netns });
        }
        let netns = Namespace::new(stage, &port.name)?;
        let mtu = options.mtu.to_string();
        let mut args = options.args("nic", port);
        for (key, value) in [("--tap", Self::DEVICE), ("--mac", &mac), ("--mtu", &mtu)] {
            args.extend([key.into(), value.into()]);
        }
        args.push("--json".into());
        let name = format!("nic-{}", port.name);
        let mut process = stage.start_program(&name, &args, &netns.on(&stage.guest_cpus))?;
        wait_for(&format!("the interface of {name}"), START_MAX_S, || {
            process.check()?;
            Ok(netns.has_device(Self::DEVICE))
        })?;
        netns.add_address(Self::DEVICE, address)?;
        if !options.without.is_empty() {
            netns.set_offloads(Self::DEVICE, &options.without, false)?;
        }
        Ok(Self { address: ip(), mac, process: Some(process.into()), netns })
    }

    /// Fails, with the end of its log, if the process of its NIC has ended.
    pub fn check(&self) -> Result<(), Fail> {
        match &self.process {
            Some(process) => process.borrow_mut().check(),
            None => self.netns.check(),
        }
    }

    /// Ends the process of its NIC; returns its counters as printed by `nic --json`. `None` for a
    /// stock driver.
    pub fn end(&self) -> Result<Option<Value>, Fail> {
        let Some(process) = &self.process else { return Ok(None) };
        let mut process = process.borrow_mut();
        process.end()?;
        process.last_json().map(Some)
    }
}

/// Scheduling class of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// `SCHED_OTHER`.
    Normal,
    /// `SCHED_RR`; `SCHED_OTHER` where real-time scheduling is not permitted (root in a user
    /// namespace lacks the privilege).
    RealTime,
    /// `SCHED_IDLE`.
    Idle,
}

impl Class {
    /// Arguments of `chrt` before the program; empty: `chrt` is not needed.
    fn chrt_args(self, stage: &Stage) -> &'static [&'static str] {
        match self {
            Self::Normal => &[],
            Self::RealTime if !stage.allows_real_time() => &[],
            Self::RealTime => &["--rr", "1"],
            Self::Idle => &["--idle", "0"],
        }
    }
}

/// A guest that sends or receives frames of exact sizes and rates: `pvswitch gen`.
#[derive(Debug)]
pub struct Gen {
    /// Its MAC address.
    pub mac: String,
    process: Process,
}

impl Gen {
    /// Starts guest `i` at a port, on the guests' CPUs. `mode` is the argument of `gen --mode` with
    /// further options: `send --size 60 --rate 10k --duration 3`.
    pub fn start(
        stage: &Stage,
        i: usize,
        port: &Port,
        options: &NicOptions,
        mode: &str,
    ) -> Result<Self, Fail> {
        Self::start_as(stage, i, port, options, mode, Class::Normal)
    }

    /// Starts a generator as [`start`](Self::start) does, in this scheduling class.
    pub fn start_as(
        stage: &Stage,
        i: usize,
        port: &Port,
        options: &NicOptions,
        mode: &str,
        class: Class,
    ) -> Result<Self, Fail> {
        Self::start_in(stage, &stage.guest_cpus, i, port, options, mode, class)
    }

    /// Like [`start`](Self::start), on other CPUs.
    pub fn start_on(
        stage: &Stage,
        cpus: &[usize],
        i: usize,
        port: &Port,
        options: &NicOptions,
        mode: &str,
    ) -> Result<Self, Fail> {
        Self::start_in(stage, cpus, i, port, options, mode, Class::Normal)
    }

    fn start_in(
        stage: &Stage,
        cpus: &[usize],
        i: usize,
        port: &Port,
        options: &NicOptions,
        mode: &str,
        class: Class,
    ) -> Result<Self, Fail> {
        let mac = mac_of(i);
        let mut args = options.args("gen", port);
        args.extend(["--json", "--mac", &mac, "--mode"].map(String::from));
        args.extend(mode.split_whitespace().map(String::from));
        let place = Place { netns: None, cpus };
        let name = format!("gen-{}", port.name);
        let process = match class.chrt_args(stage) {
            [] => stage.start_program(&name, &args, &place)?,
            words => {
                let program = stage.program.display().to_string();
                let words = words.iter().map(ToString::to_string).chain([program]);
                stage.start(&name, "chrt", &words.chain(args).collect::<Vec<_>>(), &place)?
            }
        };
        Ok(Self { mac, process })
    }

    /// MAC address of guest `i`, for `--peer`.
    pub fn mac(i: usize) -> String {
        mac_of(i)
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Fails, with the end of its log, if it has ended.
    pub fn check(&mut self) -> Result<(), Fail> {
        self.process.check()
    }

    /// Returns its latest counters; it must be connected and started with `--interval`.
    pub fn latest(&self) -> Result<Value, Fail> {
        self.process.last_json()
    }

    /// Waits at most `seconds` for it to end; returns its counters.
    pub fn report(mut self, seconds: f64) -> Result<Value, Fail> {
        self.process.finish(seconds)?;
        self.process.last_json()
    }

    /// Ends it; returns its counters.
    pub fn end(mut self) -> Result<Value, Fail> {
        self.process.end()?;
        self.process.last_json()
    }
}

/// Segments of the largest GSO packet on [`Link::Gigabit`].
const GSO_SEGS_MAX: u32 = 4;

/// Token bucket filter of [`Link::Gigabit`]: 2 ms of burst, so that traffic below the rate is not
/// delayed and arms no timer; a queue of 1 ms, which TCP fills.
const TBF: &str = "rate 1gbit burst 250000 limit 125000";

/// Attachment of the external network to the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Directly: the switch's TAP interface is in the namespace. No rate limit; the peer is the
    /// host's network stack (as dom0 in the original studies).
    Tap,
    /// As by xen-netback: each of so many guests has an interface of its own in the namespace, to
    /// which the switch cross-connects its port, and a bridge of these interfaces leads to the
    /// host's network stack. No rate limit.
    Interfaces(usize),
    /// By a link of 1 Gbit/s in each direction, with frames of at most the MTU, like those of a
    /// network card: the TAP interface is a port of a bridge in a namespace of its own, and a veth
    /// pair with a token bucket filter at each end (it shapes egress only) leads to the peer. The
    /// bridge separates the TAP interface from the queues of the filters.
    ///
    /// Senders should stay below the limit: an empty bucket sends from a timer interrupt, whose
    /// time is charged to the interrupted process.
    Gigabit {
        /// Traffic flows to guests: a kernel thread (threaded NAPI) receives their replies.
        /// Otherwise the switch would be charged for the peer's network stack, which sends when
        /// an acknowledgement arrives. Threaded NAPI needs TSO off, so it is not used for traffic
        /// from guests.
        to_guests: bool,
    },
}

/// The external network: a namespace behind TAP ports of the switch, one or one for each guest.
#[derive(Debug)]
pub struct Wire {
    /// Its namespace; tools that run in it are the peers of the guests.
    pub netns: Namespace,
    /// Namespace of the bridge of [`Link::Gigabit`].
    bridge: Option<Namespace>,
    link: Link,
}

/// Name of the interface of guest `i` of [`Link::Interfaces`].
fn vif(i: usize) -> String {
    format!("vif{i}")
}

impl Wire {
    /// Its address on the link.
    pub const ADDRESS: &str = "10.9.255.1";
    /// Name of the switch's port.
    pub const PORT: &str = "up";
    const TAP: &str = "up0";
    const BRIDGE: &str = "br0";

    /// Creates the namespaces. Start the switch with [`Wire::port`] or [`Wire::ports`], then call
    /// [`Wire::up`].
    pub fn new(stage: &Stage, link: Link) -> Result<Self, Fail> {
        let netns = Namespace::new(stage, "wire")?;
        let bridge = match link {
            Link::Tap | Link::Interfaces(_) => None,
            Link::Gigabit { .. } => Some(Namespace::new(stage, "bridge")?),
        };
        Ok(Self { netns, bridge, link })
    }

    /// Returns the port of the switch that leads to it.
    pub fn port(&self, options: &str) -> Port {
        Port::tap(Self::PORT, Self::TAP, self.bridge.as_ref().unwrap_or(&self.netns), options)
    }

    /// Returns all ports of a switch with these guests, in the order in which `--forward cross`
    /// connects the guests with their interfaces; `options` are those of the TAP ports.
    pub fn ports(&self, guests: &[Port], options: &str) -> Vec<Port> {
        let Link::Interfaces(_) = self.link else {
            return [&[self.port(options)], guests].concat();
        };
        let pairs = guests.iter().enumerate().map(|(i, guest)| {
            let tap = Port::tap(&format!("{}{i}", Self::PORT), &vif(i), &self.netns, options);
            [guest.clone(), tap]
        });
        pairs.flatten().collect()
    }

    /// Name of the interface with [`Wire::ADDRESS`].
    pub fn device(&self) -> &'static str {
        match self.link {
            Link::Tap => Self::TAP,
            Link::Interfaces(_) => Self::BRIDGE,
            Link::Gigabit { .. } => "eth0",
        }
    }

    /// Configures the interfaces; the switch must be running.
    pub fn up(&self) -> Result<(), Fail> {
        let address = format!("{}/16", Self::ADDRESS);
        if let Link::Interfaces(count) = self.link {
            return self.bridge_interfaces(count, &address);
        }
        let of_tap = self.bridge.as_ref().unwrap_or(&self.netns);
        wait_for("the switch's interface", START_MAX_S, || Ok(of_tap.has_device(Self::TAP)))?;
        let Some(bridge) = &self.bridge else {
            return self.netns.add_address(Self::TAP, &address);
        };
        // No netfilter rules on the bridge, whatever the host's setting.
        bridge.set_sysctl("net.bridge.bridge-nf-call-iptables", "0")?;
        bridge.ip(&format!(
            "link add br0 type bridge
             link add far type veth peer name eth0 netns {}
             link set far master br0 up
             link set {} master br0 up
             link set br0 up",
            self.netns.pid(),
            Self::TAP,
        ))?;
        // The switch receives frames of at most the MTU, up to four at once.
        self.netns.ip(&format!("link set eth0 gso_max_segs {GSO_SEGS_MAX}"))?;
        bridge.set_offloads(Self::TAP, "tso gso", false)?;
        for (netns, device) in [(&self.netns, "eth0"), (bridge, "far")] {
            netns.run("tc", &format!("qdisc add dev {device} root tbf {TBF}"))?;
        }
        self.netns.add_address("eth0", &address)?;
        if self.link == (Link::Gigabit { to_guests: true }) {
            bridge.set_offloads("far", "tso", false)?;
            self.netns.enable_threaded_napi("eth0")?;
        }
        Ok(())
    }

    /// Joins the interfaces of [`Link::Interfaces`] by a bridge with this address.
    fn bridge_interfaces(&self, count: usize, address: &str) -> Result<(), Fail> {
        let netns = &self.netns;
        wait_for("the switch's interfaces", START_MAX_S, || {
            Ok((0..count).all(|i| netns.has_device(&vif(i))))
        })?;
        // No netfilter rules on the bridge, whatever the host's setting.
        netns.set_sysctl("net.bridge.bridge-nf-call-iptables", "0")?;
        netns.ip(&format!("link add {} type bridge", Self::BRIDGE))?;
        for device in (0..count).map(vif) {
            netns.ip(&format!("link set {device} master {} up", Self::BRIDGE))?;
        }
        netns.add_address(Self::BRIDGE, address)
    }
}
