//! Who is attached to a switch: namespaces with a NIC, generators, and the network outside.

use std::cell::RefCell;

use serde_json::Value;

use super::switch::Port;
use super::{GuestKind, Namespace, Place, Process, Proto, Stage, wait_for};
use crate::error::Fail;

/// How a guest's NIC or generator works. [`NicOptions::new`] is the program's own way; fields are
/// changed from there.
#[derive(Clone, Debug)]
pub struct NicOptions {
    /// `--poll`; empty: the program's default.
    pub poll: String,
    /// `--kick`.
    pub kick: String,
    /// `--set` of each.
    pub set: Vec<String>,
    /// Options of the connection, each with its comma: `,smart-poll=on,static=on`.
    pub connect: String,
    /// Offloads of the interface to turn off, by `ethtool`'s short names: `tso gso gro tx`.
    pub without: String,
    /// MTU of the interface.
    pub mtu: u16,
    /// Further options, as they are: `--queue-size`, `--packed`.
    pub more: Vec<String>,
}

/// Frames in a ring that is replayed: its guest looks a few times in the time they take.
const REPLAY_RING: &str = "8192";

impl NicOptions {
    /// The program's defaults; MTU 1500 and all offloads.
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

    /// Of a generator that takes next to no CPU: `gen --replay`.
    pub fn replay(stage: &Stage) -> Result<Self, Fail> {
        if stage.proto != Proto::Virtio {
            return Err(Fail::Missing("only virtqueues can be replayed: --proto virtio".into()));
        }
        let more = ["--replay", "--queue-size", REPLAY_RING].map(String::from);
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

/// Address of guest `i` on the link: `10.9.0.10` and on; the wire has [`Wire::ADDRESS`].
fn address_of(i: usize) -> String {
    format!("10.9.{}.{}", i / 200, 10 + i % 200)
}

/// MAC address of guest `i`.
fn mac_of(i: usize) -> String {
    format!("02:00:00:09:{:02x}:{:02x}", i / 256, i % 256)
}

/// A guest with a kernel's network: a namespace with an interface that `pvswitch nic` serves from
/// within, or a virtual machine with a driver of its kernel's, as [`Stage::guest`] says. The
/// machine boots while others are started; whoever runs something in it waits for it.
#[derive(Debug)]
pub struct Nic {
    /// Its address on the link.
    pub address: String,
    /// Its MAC address.
    pub mac: String,
    /// What serves its interface; a virtual machine does that itself.
    process: Option<RefCell<Process>>,
    /// Where it is; the tools that run in it count as the guest's.
    pub netns: Namespace,
}

impl Nic {
    /// The interface.
    pub const DEVICE: &str = super::vm::DEVICE;

    /// Guest `i` at a port, on the guests' CPUs, all of them on one link.
    pub fn start(stage: &Stage, i: usize, port: &Port, options: &NicOptions) -> Result<Self, Fail> {
        Self::start_at(stage, i, port, options, &format!("{}/16", address_of(i)))
    }

    /// The same with an address of its own, `10.1.0.2/24`.
    pub fn start_at(
        stage: &Stage,
        i: usize,
        port: &Port,
        options: &NicOptions,
        address: &str,
    ) -> Result<Self, Fail> {
        let mac = mac_of(i);
        let bare = || address.split('/').next().unwrap_or_default().to_string();
        if stage.guest != GuestKind::Netns {
            let netns = Namespace::of_machine(stage, port, options, (address, &mac))?;
            return Ok(Self { address: bare(), mac, process: None, netns });
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
        wait_for(&format!("the interface of {name}"), 20.0, || {
            process.check()?;
            Ok(netns.has(Self::DEVICE))
        })?;
        netns.address(Self::DEVICE, address)?;
        if !options.without.is_empty() {
            netns.offloads(Self::DEVICE, &options.without, false)?;
        }
        Ok(Self { address: bare(), mac, process: Some(process.into()), netns })
    }

    /// An error, with the end of its log, if its NIC's process has ended.
    pub fn check(&self) -> Result<(), Fail> {
        match &self.process {
            Some(process) => process.borrow_mut().check(),
            None => self.netns.check(),
        }
    }

    /// Ends its NIC's process; what that counted, as `nic --json` prints it. A stock driver has no
    /// such counters.
    pub fn end(&self) -> Result<Option<Value>, Fail> {
        let Some(process) = &self.process else { return Ok(None) };
        let mut process = process.borrow_mut();
        process.end()?;
        process.last_json().map(Some)
    }
}

/// When a process runs, of those that want to run on its CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// In turn with others.
    Usual,
    /// Before them: in the real-time class. As usual where that is not allowed, as it is not for
    /// whoever is root of a user namespace only.
    First,
    /// When no other wants to.
    Last,
}

impl Class {
    /// Words for `chrt` before the program; none for none.
    fn words(self, stage: &Stage) -> &'static [&'static str] {
        match self {
            Self::Usual => &[],
            Self::First if !stage.has_real_time() => &[],
            Self::First => &["--rr", "1"],
            Self::Last => &["--idle", "0"],
        }
    }
}

/// A guest that makes or takes frames of exact sizes and rates: `pvswitch gen`.
#[derive(Debug)]
pub struct Gen {
    /// Its MAC address.
    pub mac: String,
    process: Process,
}

impl Gen {
    /// Guest `i` at a port, on the guests' CPUs. `mode` and the options behind it are `gen`'s own:
    /// `send --size 60 --rate 10k --duration 3`.
    pub fn start(
        stage: &Stage,
        i: usize,
        port: &Port,
        options: &NicOptions,
        mode: &str,
    ) -> Result<Self, Fail> {
        Self::start_as(stage, i, port, options, mode, Class::Usual)
    }

    /// The same before or after others that want to run on its CPU.
    pub fn start_as(
        stage: &Stage,
        i: usize,
        port: &Port,
        options: &NicOptions,
        mode: &str,
        class: Class,
    ) -> Result<Self, Fail> {
        Self::start_there(stage, &stage.guest_cpus, i, port, options, mode, class)
    }

    /// The same as [`start`](Self::start) on other CPUs.
    pub fn start_on(
        stage: &Stage,
        cpus: &[usize],
        i: usize,
        port: &Port,
        options: &NicOptions,
        mode: &str,
    ) -> Result<Self, Fail> {
        Self::start_there(stage, cpus, i, port, options, mode, Class::Usual)
    }

    fn start_there(
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
        let process = match class.words(stage) {
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

    /// An error, with the end of its log, if it has ended.
    pub fn check(&mut self) -> Result<(), Fail> {
        self.process.check()
    }

    /// What it has counted so far, if it was started with `--interval` and is connected.
    pub fn latest(&self) -> Result<Value, Fail> {
        self.process.last_json()
    }

    /// What it counted, once it has come to its own end.
    pub fn report(mut self, seconds: f64) -> Result<Value, Fail> {
        self.process.finish(seconds)?;
        self.process.last_json()
    }

    /// Asks it to end; what it counted.
    pub fn end(mut self) -> Result<Value, Fail> {
        self.process.end()?;
        self.process.last_json()
    }
}

/// Frames that arrive at once behind [`Link::Gigabit`].
const CARD_FRAMES: u32 = 4;

/// The bucket of [`Link::Gigabit`]: what is sent at no more than this rate, in bursts of up to
/// 2 ms, does not wait, and needs no timer of the kernel's; a queue of 1 ms, which TCP fills.
const BUCKET: &str = "rate 1gbit burst 250000 limit 125000";

/// How the network outside is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// The switch's own TAP interface is there: as fast as the machine, and the peer is the host's
    /// own network, as dom0's was.
    Free,
    /// A link of 1 Gbit/s each way, with frames of at most the MTU, as from a network card: the
    /// switch's interface is on a bridge in a namespace between, and a pair of virtual interfaces
    /// with a token bucket at each end leads to the peer. Both ends are needed, as a bucket delays
    /// only what leaves. The bridge keeps what the switch sees apart from the buckets' queues.
    ///
    /// Whoever sends had better stay below the limit by itself: a bucket that is empty sends by a
    /// timer, at the expense of whom that interrupts.
    Gigabit {
        /// Traffic is to guests: what they answer is taken in by a thread of the kernel's. Else
        /// the switch would pay for the peer's network, which sends when an answer comes.
        /// Traffic from guests cannot have it without doing without TSO.
        to_guests: bool,
    },
}

/// The network outside: a namespace behind a TAP port of the switch.
#[derive(Debug)]
pub struct Wire {
    /// Where it is; the tools that run in it are the peers of the guests.
    pub netns: Namespace,
    middle: Option<Namespace>,
    link: Link,
}

impl Wire {
    /// Its address on the link.
    pub const ADDRESS: &str = "10.9.255.1";
    /// Its port of the switch.
    pub const PORT: &str = "up";
    const TAP: &str = "up0";

    /// Makes the namespaces; the switch is to be started with [`Wire::port`], then [`Wire::up`].
    pub fn new(stage: &Stage, link: Link) -> Result<Self, Fail> {
        let netns = Namespace::new(stage, "wire")?;
        let middle = match link {
            Link::Free => None,
            Link::Gigabit { .. } => Some(Namespace::new(stage, "middle")?),
        };
        Ok(Self { netns, middle, link })
    }

    /// The port that leads there.
    pub fn port(&self, options: &str) -> Port {
        Port::tap(Self::PORT, Self::TAP, self.middle.as_ref().unwrap_or(&self.netns), options)
    }

    /// The interface with the wire's address.
    pub fn device(&self) -> &'static str {
        if self.middle.is_some() { "eth0" } else { Self::TAP }
    }

    /// Sets it up, once the switch runs.
    pub fn up(&self) -> Result<(), Fail> {
        let address = format!("{}/16", Self::ADDRESS);
        let there = self.middle.as_ref().unwrap_or(&self.netns);
        wait_for("the switch's interface", 20.0, || Ok(there.has(Self::TAP)))?;
        let Some(middle) = &self.middle else {
            return self.netns.address(Self::TAP, &address);
        };
        // No rules are asked, whatever the host has set.
        middle.set("net.bridge.bridge-nf-call-iptables", "0")?;
        middle.ip(&format!(
            "link add br0 type bridge
             link add far type veth peer name eth0 netns {}
             link set far master br0 up
             link set {} master br0 up
             link set br0 up",
            self.netns.pid(),
            Self::TAP,
        ))?;
        // What the switch sees are frames of at most the MTU, up to four at a time.
        self.netns.ip(&format!("link set eth0 gso_max_segs {CARD_FRAMES}"))?;
        middle.offloads(Self::TAP, "tso gso", false)?;
        for (netns, device) in [(&self.netns, "eth0"), (middle, "far")] {
            netns.run("tc", &format!("qdisc add dev {device} root tbf {BUCKET}"))?;
        }
        self.netns.address("eth0", &address)?;
        if self.link == (Link::Gigabit { to_guests: true }) {
            middle.offloads("far", "tso", false)?;
            self.netns.threaded("eth0")?;
        }
        Ok(())
    }
}
