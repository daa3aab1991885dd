//! The command line. It is a contract: scripts rely on it.

mod settings;

use std::path::PathBuf;

use api::{PortText, help, schema};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, Subcommand};
use guest::generate::{Aside, Burst, OnOff, Size, parse_also, parse_rate};
use guest::{ConnectOptions, Setting};
use switch::poll::Policy;

use self::settings::Settings;
use crate::manual::ManualArgs;
use crate::pin_xdp::PinXdpArgs;
use crate::spec::PortSpec;
use crate::store_tap::StoreTapArgs;

/// Network back-end and virtual switch for virtual machines.
#[derive(Parser)]
#[command(name = "pvswitch", version = env!("PVSWITCH_VERSION"), about)]
#[command(long_version = concat!(env!("PVSWITCH_VERSION"), "\n", env!("PVSWITCH_BUILD")))]
#[command(max_term_width = 100, after_help = EXAMPLES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Parses the command line; on an error, prints what is wrong and what may be meant, and exits.
    pub fn parse_or_exit(args: impl IntoIterator<Item = std::ffi::OsString>) -> Self {
        Self::try_parse_from(args).unwrap_or_else(|error| with_hint(error).exit())
    }
}

/// Adds a hint where a port was written without `--port`.
fn with_hint(mut error: clap::Error) -> clap::Error {
    let of_run = |usage: &ContextValue| usage.to_string().contains("pvswitch run");
    let Some(ContextValue::String(arg)) = error.get(ContextKind::InvalidArg) else { return error };
    let kind = arg.split_once('=').and_then(|(_, kind)| kind.split([':', ',']).next());
    if error.kind() == ErrorKind::UnknownArgument
        && error.get(ContextKind::Usage).is_some_and(of_run)
        && schema::port::KINDS.iter().any(|entry| Some(entry.name) == kind)
    {
        let hint = format!("to add a port, use '--port {arg}'").into();
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint]));
    }
    error
}

const EXAMPLES: &str = "\
Examples:
  pvswitch demo
      Run a switch and embedded guests with a live view; needs neither root nor a VM.
  pvswitch run --port vm1=vhost-user:/run/pvswitch/vm1.sock \\
      --port vm2=vhost-user:/run/pvswitch/vm2.sock
      Connect two virtual machines; prints the QEMU options to paste.
  pvswitch ctl stats --json
      Print the counters of a running switch.
Log level: RUST_LOG=debug pvswitch ...";

/// Subcommands.
#[derive(Subcommand)]
pub enum Command {
    /// Run a switch
    #[command(after_help = format!("{}{RUN_EXAMPLES}", help::ports()))]
    Run(RunArgs),
    /// Check a configuration file as `run` does, without opening anything
    #[command(after_help = CHECK_HELP)]
    Check(CheckArgs),
    /// Watch a running switch, live
    #[command(after_help = TOP_HELP)]
    Top(TopArgs),
    /// Query or change a running switch
    #[command(after_help = CTL_EXAMPLES)]
    Ctl(CtlArgs),
    /// Capture a port's frames, in both directions, as pcapng
    #[command(after_help = "Examples:\n  pvswitch capture vm1 -w vm1.pcapng\n  \
        pvswitch capture vm1 | wireshark -k -i -")]
    Capture(CaptureArgs),
    /// Attach a NIC on a switch to a network namespace or container
    #[command(after_help = format!("{NIC_EXAMPLES}\n{}", help::driver()))]
    Nic(NicArgs),
    /// Generate, sink or echo traffic as a guest
    #[command(after_help = format!("{GEN_EXAMPLES}\n{}", help::driver()))]
    Gen(GenArgs),
    /// Attach a guest to a running switch, as the back-end program of its device
    #[command(after_help = BACKEND_HELP)]
    VhostUserNet(BackendArgs),
    /// Demonstrate a switch with guests, live, in under a minute
    Demo(DemoArgs),
    /// Run performance studies of polling, workers, notifications and copies, with reports
    #[command(disable_help_flag = true, after_help = LAB_HELP)]
    Lab(LabArgs),
    /// Open a TAP for a service without the privilege to do so: run in its unit, before the switch
    StoreTap(StoreTapArgs),
    /// Load and pin the XDP program of an af-xdp port, for a switch without the privilege to do so
    #[command(after_help = PIN_XDP_HELP)]
    PinXdp(PinXdpArgs),
    /// Write man pages and completions, for packages
    #[command(hide = true)]
    Manual(ManualArgs),
    /// Start programs on behalf of a confined switch (internal)
    #[command(hide = true)]
    Helper,
}

const RUN_EXAMPLES: &str = "\
Examples:
  pvswitch run --port vm1=vhost-user:/run/pvswitch/vm1.sock --port host=tap:tap0
  pvswitch run --uplink passt --port a=stream:$XDG_RUNTIME_DIR/a.sock
      Without root: guests of QEMU (-netdev stream) reach the network of the host
  pvswitch run --port a=vhost-user:/run/pvswitch/a.sock,mode=client,queues=4 \\
      --poll adaptive --workers 2
  pvswitch run \\
      --port a=vhost-user:/run/pvswitch/a.sock,queues=2,poll/1=timer:2000,call/1=coalesce:50,32
  pvswitch run --port vm1=vhost-user:/run/pvswitch/vm1.sock,vlan=10 --evpn br10,vlan=10
      Guests on several hosts, by VXLAN and FRR: docs/many-hosts.md
  pvswitch run --config /etc/pvswitch.toml";

const NIC_EXAMPLES: &str = "\
Examples:
  pvswitch nic --connect vhost-user:/run/pvswitch/p1.sock --tap eth0 --netns blue
  pvswitch nic --connect vhost-user:/run/pvswitch/p1.sock --tap eth0 --poll timer:5000 \\
      --kick coalesce:20,16
  pvswitch nic --connect vhost-user:/run/pvswitch/p1.sock --tap eth0 --set rx-refill=below-half
  pvswitch nic --connect vhost-user:/run/pvswitch/p1.sock --tap eth0 --queues 2 \\
      --control /run/pvswitch/nic.sock
      pvswitch ctl --control /run/pvswitch/nic.sock set 1 poll=timer:5000 kick=coalesce:20,16
  pvswitch nic --connect xen-local:/run/pvswitch/p1 --tap eth0 --netns blue
      Xen rings on a machine without Xen; the switch has --port p1=xen-local:/run/pvswitch/p1
  pvswitch nic --connect xen:0,smart-poll=on --tap eth1
      In a Xen guest: its vif 0, which must not be bound to the kernel's driver";

const GEN_EXAMPLES: &str = "\
Examples:
  pvswitch gen --connect vhost-user:/run/pvswitch/p1.sock --mode sink
  pvswitch gen --connect vhost-user:/run/pvswitch/p2.sock --size imix --rate 100k \\
      --duration 10 --json
  pvswitch gen --connect vhost-user:/run/pvswitch/p{}.sock --mode trial --rate 2M --size imix \\
      --addresses 1000 --both-ways --duration 10 --hdr latency.hlog
      Between p0 and p1: loss of 2 x 2 M frames/s, and latency from the time each was due
  pvswitch gen --connect vhost-user:/run/pvswitch/p2.sock --burst 32,1000 \\
      --set tx-completion=on-half-empty
  pvswitch gen --connect xen-local:/run/pvswitch/p1,split=off --mode echo --poll event
  pvswitch gen --connect vhost-user:/run/pvswitch/p{}.sock --mode idle --count 1000 \\
      --queue-size 8
  pvswitch gen --connect vhost-user:/run/pvswitch/p3.sock --mode hostile=list
      List the hostile cases for that kind of port; --mode hostile runs all of them in turn
  pvswitch gen --connect vhost-user:/run/pvswitch/p3.sock --packed --mode hostile=wraps \\
      --duration 5";

const LAB_HELP: &str = "\
Runs pvswitch-lab, installed in the same folder: pvswitch lab --help";

const CTL_EXAMPLES: &str = "\
Examples:
  pvswitch ctl show
  pvswitch ctl show vm1
  pvswitch ctl stats --json
  pvswitch ctl add-port vm3=vhost-user:/run/pvswitch/vm3.sock
  pvswitch ctl fdb add 02:00:00:00:00:01 vm1
  pvswitch ctl set vm1 poll=timer:2000 weight=3
  pvswitch ctl set vm1/0 call=coalesce:50,32
  pvswitch ctl set vm1 limit-mapped-bytes=16G limit-messages=500
      Limit the resources that its peer may use; ctl show lists what was refused
  pvswitch ctl set placement=single
  pvswitch ctl reload --dry-run
  pvswitch ctl save /etc/pvswitch.toml
  pvswitch ctl --control /run/pvswitch/nic.sock set kick=coalesce:20,16
      Control a guest: nic and gen with --control PATH accept set and stats";

const RELOAD_HELP: &str = "\
Afterwards the switch matches the file and the command line of `run`: changes by add-port, del-port,
set and fdb that are not in the file are undone (ctl save keeps them).
Options that `set` changes are changed at run time; other options of a port replace that port; other
settings of the switch need a restart, and the reload is refused.
Examples:
  pvswitch ctl reload --dry-run
  pvswitch ctl reload --json";

const UPGRADE_HELP: &str = "\
If the new process does not start or refuses the state, the old one keeps running and the error says
why. Only root and the switch's user may do this. The process id changes. Captures and other
connections to the control socket end. Guests stay connected, also those of Xen vifs.
Examples:
  pvswitch ctl upgrade
  pvswitch ctl upgrade /opt/pvswitch-1.3/pvswitch --json
      {\"ok\": true, \"pid\": ..., \"program\": ...}; ctl show --json has taken_over.outage_us";

const SAVE_HELP: &str = "\
The file is written beside FILE and renamed. Comments are lost. Without FILE, a configuration with
an include directory is refused, because the directory's files would no longer be read; so is one
with ports from the command line, because they would then be defined twice.
Examples:
  pvswitch ctl save
  pvswitch ctl save /etc/pvswitch.new.toml
  pvswitch ctl save - | diff /etc/pvswitch.toml -";

/// `run`.
#[derive(Args)]
pub struct RunArgs {
    /// Configuration file in TOML; the command line takes precedence
    #[arg(long, value_name = "FILE.toml")]
    pub config: Option<PathBuf>,
    /// A port: NAME=KIND:ARG[,key=value]... (see below); may be repeated
    #[arg(long = "port", value_name = "NAME=KIND:ARG")]
    pub ports: Vec<PortText>,
    /// An uplink without root: the port uplink=passt. Starts passt, which is the guests' gateway
    #[arg(long, value_name = "KIND", value_parser = ["passt"])]
    pub uplink: Option<String>,
    /// An uplink to other hosts: the port BRIDGE=tap:tap-BRIDGE,evpn=BRIDGE[,key=value]..., in a
    /// Linux bridge with VXLAN interfaces; FRR announces the addresses of the switch by BGP EVPN;
    /// may be repeated
    #[arg(long, value_name = "BRIDGE")]
    pub evpn: Vec<Bridge>,
    /// Start another process if this one is killed: guests stay connected. Under systemd, the
    /// state is kept in its file descriptor store (FileDescriptorStoreMax=)
    #[arg(long)]
    pub keep: bool,
    /// Run under the keeper that started this process, by `run --keep`
    #[arg(long, hide = true, conflicts_with = "keep")]
    pub kept: bool,
    /// Take over the switch of the process that started this one, by `ctl upgrade`
    #[arg(long, hide = true, exclusive = true)]
    pub takeover: bool,
    /// Settings of the switch as a whole.
    #[command(flatten)]
    pub settings: Settings,
}

/// `run --evpn`: a port in a bridge.
#[derive(Clone)]
pub struct Bridge(pub PortText);

impl std::str::FromStr for Bridge {
    type Err = api::PortError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let (bridge, options) = s.split_once(',').map_or((s, ""), |(bridge, rest)| (bridge, rest));
        let comma = if options.is_empty() { "" } else { "," };
        let port = format!("{bridge}=tap:tap-{bridge},evpn={bridge}{comma}{options}");
        port.parse().map(Self)
    }
}

const CHECK_HELP: &str = "\
Exit status: 0 valid, 1 errors or a file that cannot be read, 2 wrong arguments. Ports given by
--port of `run` are unknown here.
Examples:
  pvswitch check /etc/pvswitch.toml
      Each error with file, line and column
  pvswitch check --json /etc/pvswitch.toml
      {\"ok\": false, \"file\": ..., \"problems\": [{\"file\", \"line\", \"column\", \"what\"}]}
  pvswitch check --schema > pvswitch.schema.json
      The JSON Schema of the file, for editors";

/// `check`.
#[derive(Args)]
pub struct CheckArgs {
    /// Configuration file in TOML
    #[arg(value_name = "FILE", required_unless_present = "schema", conflicts_with = "schema")]
    pub file: Option<PathBuf>,
    /// Print JSON
    #[arg(long, conflicts_with = "schema")]
    pub json: bool,
    /// Print the JSON Schema of the file
    #[arg(long)]
    pub schema: bool,
}

const PIN_XDP_HELP: &str = "\
Example:
  mkdir /run/xdp && mount -t bpf bpf /run/xdp && mkdir /run/xdp/eth1
  pvswitch pin-xdp eth1 /run/xdp/eth1
  pvswitch run --port up=af-xdp:eth1,map=/run/xdp/eth1/map --port vm1=vhost-user:/run/vm1

It needs CAP_BPF, CAP_NET_ADMIN and CAP_NET_RAW.
Exit status: 0 success; 1 not pinned; 2 bad usage.";

const BACKEND_HELP: &str = "\
For management software that starts a program for each device (QEMU: docs/interop/vhost-user.rst).
Installed or linked as vhost-user-net, the program is this command. It adds a port to the switch,
passes the guest's messages to it, and ends, removing the port, when the guest disconnects.
Examples:
  pvswitch vhost-user-net --socket-path=/run/vm1.sock --port vm1,vlan=42
  pvswitch vhost-user-net --fd=3
  pvswitch vhost-user-net --print-capabilities";

/// `vhost-user-net`.
#[derive(Args)]
#[command(group(clap::ArgGroup::new("front").args(["fd", "socket_path"]).required(true)))]
pub struct BackendArgs {
    /// Descriptor of the connected socket, inherited
    #[arg(long, value_name = "FDNUM")]
    pub fd: Option<i32>,
    /// Socket at which to listen for the guest
    #[arg(long, value_name = "PATH")]
    pub socket_path: Option<PathBuf>,
    /// Print {"type": "net"} and exit; other arguments are ignored
    #[arg(long)]
    pub print_capabilities: bool,
    /// The port: NAME[,key=value]... with options of a vhost-user port [default: vhu-PID]
    #[arg(long, value_name = "NAME")]
    pub port: Option<String>,
    /// Control socket of the switch [default: see ctl --help]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

const TOP_HELP: &str = "\
Keys: q quit, arrows or j and k choose a port, Enter its details, t queues of all ports, s sort,
      / filter, ? help";

/// `top`.
#[derive(Args)]
pub struct TopArgs {
    /// Control socket of the switch [default: see ctl --help]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Seconds between two samples
    #[arg(long, value_name = "SECS", default_value_t = 1.0)]
    pub interval: f64,
    /// Take two samples, print them as plain text, and exit; the default without a terminal
    #[arg(long)]
    pub once: bool,
}

/// `ctl`.
#[derive(Args)]
pub struct CtlArgs {
    /// Control socket [default: $XDG_RUNTIME_DIR/pvswitch.sock, else /run/pvswitch/control.sock]
    #[arg(long, value_name = "PATH", global = true)]
    pub control: Option<PathBuf>,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// Request.
    #[command(subcommand)]
    pub what: CtlCommand,
}

/// `ctl` subcommands.
#[derive(Subcommand)]
pub enum CtlCommand {
    /// Ports, their state, and what their guests negotiated
    Show {
        /// Only this port, and what its account holds [default: all]
        name: Option<String>,
    },
    /// Counters of every queue and worker
    Stats {
        /// Only this port [default: all]
        name: Option<String>,
    },
    /// Add a port: NAME=KIND:ARG[,key=value]...
    AddPort {
        /// As for `run --port`
        port: PortSpecText,
    },
    /// Remove a port
    DelPort {
        /// Its name
        name: String,
    },
    /// List, add or remove forwarding database entries
    Fdb {
        /// add MAC PORT, or del MAC; without arguments: list
        #[command(subcommand)]
        what: Option<FdbCommand>,
    },
    /// Change settings.
    #[command(about = api::set::help(), long_about = api::set::help())]
    Set {
        /// vm1 poll=spin, vm1/2 call=event or placement=balanced
        #[arg(required = true, value_name = "WHAT")]
        what: Vec<String>,
    },
    /// Stop taking frames from a port and wait until those taken are delivered, so that it can be
    /// removed or its guest restarted without loss. Frames to the port are still delivered
    Drain {
        /// Its name
        name: String,
        /// Take frames from the port again
        #[arg(long)]
        off: bool,
    },
    /// Read the file of `run --config` again, as SIGHUP does, and apply the difference, all
    /// or nothing, without touching other ports
    #[command(after_help = RELOAD_HELP)]
    Reload {
        /// Only show the difference
        #[arg(long)]
        dry_run: bool,
    },
    /// Write the running configuration to a file
    #[command(after_help = SAVE_HELP)]
    Save {
        /// File to write, - for standard output [default: that of `run --config`]
        file: Option<PathBuf>,
    },
    /// Explain why frames do not arrive at a port, or from it: causes, the most important first,
    /// each with a remedy
    Why {
        /// Port name
        name: String,
        /// Time between two samples of the counters, to separate current losses from earlier ones
        #[arg(long, value_name = "S", default_value_t = 1.0)]
        seconds: f64,
    },
    /// Print events as they happen: ports added, removed, up and down, faults, addresses that move,
    /// rates that limit, reloads
    Events,
    /// Replace the switch process with a new one: connections, rings, interfaces, learned addresses
    /// and counters are kept
    #[command(after_help = UPGRADE_HELP)]
    Upgrade {
        /// Program to start [default: that of the running switch, as it is on disk now]
        program: Option<PathBuf>,
    },
    /// Stop the switch
    Shutdown,
}

/// A port specification, checked here, as the switch checks it.
#[derive(Clone)]
pub struct PortSpecText(pub PortText);

impl std::str::FromStr for PortSpecText {
    type Err = api::PortError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        s.parse::<PortSpec>().and_then(|_| s.parse()).map(Self)
    }
}

/// `ctl fdb` subcommands.
#[derive(Subcommand)]
pub enum FdbCommand {
    /// Set a static address
    Add {
        /// 02:00:00:00:00:01
        mac: String,
        /// Port name
        port: String,
        /// VLAN id, 0 for untagged
        #[arg(long, default_value_t = 0)]
        vlan: u16,
    },
    /// Remove an address
    Del {
        /// 02:00:00:00:00:01
        mac: String,
        /// VLAN id, 0 for untagged
        #[arg(long, default_value_t = 0)]
        vlan: u16,
    },
}

/// `capture`.
#[derive(Args)]
pub struct CaptureArgs {
    /// Port name
    pub port: String,
    /// File to write; - for standard output
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub write: String,
    /// Control socket of the switch
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Maximum number of queue pairs of a front half, as of a port.
const QUEUES_MAX: i64 = vhost_user::net::PAIRS_MAX as i64;

/// Where a front half connects.
#[derive(Args, Clone)]
pub struct ConnectArgs {
    /// Switch port: vhost-user:SOCKET[,mode=server], xen-local:DIR or xen:DEVID (of this domain).
    /// Xen options: ,split=off ,smart-poll=on ,static=on ,hash=on ,multicast=MAC+MAC... (receive
    /// only these multicast groups)
    #[arg(long, value_name = "KIND:ARG")]
    pub connect: String,
    /// Queue pairs, served by one thread; fails if the port offers fewer
    #[arg(long, default_value_t = 1, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=QUEUES_MAX))]
    pub queues: u16,
    /// Ring size
    #[arg(long, default_value_t = 256, value_name = "N")]
    pub queue_size: u16,
    /// Use the packed ring
    #[arg(long)]
    pub packed: bool,
    /// Request in-order use of buffers (VIRTIO_F_IN_ORDER)
    #[arg(long)]
    pub in_order: bool,
    /// When to poll the receive ring: a policy, see below [default: adaptive, or timer:1000 with
    /// smart-poll=on]
    #[arg(long, value_name = "POLICY")]
    pub poll: Option<Policy>,
    /// When to notify the switch of transmitted frames: a policy, see below
    #[arg(long, value_name = "POLICY", default_value_t = Policy::Event)]
    pub kick: Policy,
    /// A driver setting, see below; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<Setting>,
}

impl ConnectArgs {
    /// Options of the driver half.
    pub fn options(&self) -> ConnectOptions {
        ConnectOptions {
            connect: self.connect.clone(),
            queues: self.queues,
            queue_size: self.queue_size,
            packed: self.packed,
            in_order: self.in_order,
            poll: self.poll,
            kick: self.kick,
            set: self.set.clone(),
            costs: crate::cost::costs,
        }
    }
}

/// `nic`.
#[derive(Args)]
pub struct NicArgs {
    /// Connection.
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// TAP interface, created if it does not exist
    #[arg(long, value_name = "IFNAME")]
    pub tap: String,
    /// Network namespace of the interface
    #[arg(long, value_name = "NAME")]
    pub netns: Option<String>,
    /// MTU of the interface
    #[arg(long)]
    pub mtu: Option<u16>,
    /// MAC address of the interface
    #[arg(long, value_parser = api::mac)]
    pub mac: Option<[u8; 6]>,
    /// Reports.
    #[command(flatten)]
    pub report: ReportArgs,
}

/// How long `nic` and `gen` run, and how they report.
#[derive(Args)]
pub struct ReportArgs {
    /// Stop after this many seconds [default: when interrupted]
    #[arg(long, value_name = "SECS")]
    pub duration: Option<f64>,
    /// Socket for `pvswitch ctl --control PATH`: reads counters (stats) and changes policies (set
    /// poll=POLICY kick=POLICY) while frames pass [default: none]
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
    /// Print JSON: counters at the end (nic: of each connection), and with --interval a line for
    /// each interval
    #[arg(long)]
    pub json: bool,
    /// Print counters at this interval, in seconds
    #[arg(long, value_name = "SECS")]
    pub interval: Option<f64>,
}

/// `gen`.
#[derive(Args)]
pub struct GenArgs {
    /// Connection.
    #[command(flatten)]
    pub connect: ConnectArgs,
    /// What to do with frames: send: send them; sink: count received frames; echo: send received
    /// frames back with addresses swapped; rr: send one, wait for its echo, measure, repeat; pass:
    /// connect to two ports, {} in the socket path replaced by 0 and 1, and pass frames from the
    /// first to the second in one thread that never sleeps; trial: the same at --rate, for
    /// --duration after --warm-up: frames due then but not received count as lost, latencies are
    /// measured from the time at which a frame was due; migrate: connect to the first of two ports,
    /// count received frames, and migrate to the other port and back after every 200, --frames
    /// times, with the memory copied by the dirty log; idle: connect and stay idle; hostile,
    /// hostile=RING, hostile=CASE: violate the protocol, to test the switch; hostile=list: list the
    /// cases
    #[arg(long, default_value = "send", value_name = "MODE", value_parser = GenMode::parse)]
    pub mode: GenMode,
    /// Frame size in bytes without FCS: N, MIN-MAX, imix (7 of 60, 4 of 590, 1 of 1514), or
    /// imix:LETTERS of RFC 6985: imix:aaag
    #[arg(long, default_value = "60")]
    pub size: Size,
    /// Frames per second (suffix k or M); unlimited by default. Gaps too short for a timer are
    /// busy-waited, which uses a core; with --tick 1000 it sleeps in between
    #[arg(long, value_name = "PPS", value_parser = parse_rate)]
    pub rate: Option<f64>,
    /// Send the same frames repeatedly and return receive buffers unread, at little CPU cost, so
    /// that the switch is the bottleneck. For --mode send and sink, at both ends, on split
    /// virtqueues
    #[arg(long, conflicts_with_all = ["rate", "burst", "on_off", "tick", "packed"])]
    pub replay: bool,
    /// Frames per burst and time between bursts [default: by --rate]
    #[arg(long, value_name = "N[,GAP_US]")]
    pub burst: Option<Burst>,
    /// On-off traffic: send for ON_MS, pause for OFF_MS, repeat
    #[arg(long, value_name = "ON_MS,OFF_MS")]
    pub on_off: Option<OnOff>,
    /// Wake every US microseconds only, and send what is due; in between, sleep
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub tick: Option<u64>,
    /// Flows (UDP source ports) to spread frames over; with --queues, each stays on one queue
    #[arg(long, default_value_t = 1)]
    pub flows: u16,
    /// With --mode send and trial: MAC addresses of each guest, from --mac and --peer upwards, in
    /// turn; with --mode send each flow has one of each, and --flows is as many unless given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub addresses: Option<u32>,
    /// With --mode trial: both guests send, each at --rate
    #[arg(long)]
    pub both_ways: bool,
    /// With --mode trial: seconds of traffic before those that count [default: 0.1]
    #[arg(long, value_name = "SECS")]
    pub warm_up: Option<f64>,
    /// Write a histogram of latencies, in ns, to this file: an HdrHistogram log (V2)
    #[arg(long, value_name = "FILE")]
    pub hdr: Option<PathBuf>,
    /// Our MAC address
    #[arg(long, value_parser = api::mac, default_value = "02:00:00:00:00:01")]
    pub mac: [u8; 6],
    /// Destination MAC address
    #[arg(long, value_parser = api::mac, default_value = "02:00:00:00:00:02")]
    pub peer: [u8; 6],
    /// Fill frames by sequence number and check every byte received; set it at both ends
    #[arg(long, conflicts_with = "replay")]
    pub check: bool,
    /// With --mode send and rr: after every N frames [default: 1], send one to this address, too;
    /// it counts towards --rate but not in any total
    #[arg(long, value_name = "MAC[,N]", value_parser = parse_also)]
    pub also: Option<Aside>,
    /// CPU to run on
    #[arg(long, value_name = "N")]
    pub cpu: Option<usize>,
    /// With --mode idle and hostile: number of ports; {} in the socket path is replaced by each
    /// port's number, from 0
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub count: Option<u32>,
    /// Stop after sending this many frames or requests, or receiving this many with --mode sink
    /// [default: unlimited]
    #[arg(long, value_name = "N", conflicts_with = "replay")]
    pub frames: Option<u64>,
    /// Reports.
    #[command(flatten)]
    pub report: ReportArgs,
}

/// `gen --mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GenMode {
    /// Send frames.
    Send,
    /// Count received frames.
    Sink,
    /// Send received frames back with addresses swapped.
    Echo,
    /// Send a frame, wait for its echo, measure, repeat.
    Rr,
    /// Pass frames from one port to another.
    Pass,
    /// Offer frames at a rate, and count those that arrive.
    Trial,
    /// Receive, and migrate between two ports.
    Migrate,
    /// Stay idle.
    Idle,
    /// Violate the protocol.
    Hostile(Cases),
}

/// Hostile cases to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cases {
    /// All that apply to the ring, in turn.
    All,
    /// None; list them.
    List,
    /// All of this ring.
    Of(hostile::Ring),
    /// This one.
    One(&'static str),
}

impl GenMode {
    /// Parses the command line's value.
    fn parse(s: &str) -> Result<Self, String> {
        let (word, case) = s.split_once('=').map_or((s, None), |(word, case)| (word, Some(case)));
        Ok(match (word, case) {
            ("send", None) => Self::Send,
            ("sink", None) => Self::Sink,
            ("echo", None) => Self::Echo,
            ("rr", None) => Self::Rr,
            ("migrate", None) => Self::Migrate,
            ("pass", None) => Self::Pass,
            ("trial", None) => Self::Trial,
            ("idle", None) => Self::Idle,
            ("hostile", None | Some("all")) => Self::Hostile(Cases::All),
            ("hostile", Some("list")) => Self::Hostile(Cases::List),
            ("hostile", Some(name)) => {
                if let Ok(ring) = name.parse() {
                    return Ok(Self::Hostile(Cases::Of(ring)));
                }
                let names = || hostile::cases().map(|case| case.name);
                let Some(known) = names().find(|known| *known == name) else {
                    let hint = api::near::did_you_mean(name, names());
                    return Err(format!("no case '{name}'{hint}; --mode hostile=list lists them"));
                };
                Self::Hostile(Cases::One(known))
            }
            _ => {
                let error = "possible values: send, sink, echo, rr, pass, trial, migrate, idle, \
                             hostile, hostile=list, hostile=RING, hostile=CASE";
                return Err(error.into());
            }
        })
    }
}

/// `demo`.
#[derive(Args)]
pub struct DemoArgs {
    /// Seconds per scene
    #[arg(long, default_value_t = 5.0, value_name = "SECS")]
    pub scene: f64,
    /// No colours and no redrawing, for logs
    #[arg(long)]
    pub plain: bool,
}

/// `lab`.
#[derive(Args)]
pub struct LabArgs {
    /// Arguments of pvswitch-lab
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub args: Vec<std::ffi::OsString>,
}
