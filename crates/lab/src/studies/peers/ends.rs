//! Back-ends that connect two guests: ours and other switches.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{built, memory};
use crate::error::Fail;
use crate::stage::{
    Namespace, Nic, NicOptions, Place, Port, Process, Proto, REPLAY_RING, START_MAX_S, Stage,
    Switch, SwitchOptions, cpu_ns, need, wait_for,
};

pub(super) const OVS_DPDK: &str = "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk";
const OVS_SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";
/// Commands of ovs-vsctl that make a bridge with two ports.
const BRIDGE: &str = "\
    add-br br0 -- set bridge br0 datapath_type=netdev fail-mode=standalone \
    -- add-port br0 v0 -- set interface v0 type=dpdkvhostuser \
    -- add-port br0 v1 -- set interface v1 type=dpdkvhostuser";
/// `pmd-maxsleep` of Open vSwitch where its poll thread may sleep, in us.
const OVS_SLEEP_US: u32 = 500;

/// Two guests with a kernel's network stack, connected by a peer.
pub struct Nets {
    nics: Vec<Nic>,
    namespaces: Vec<Namespace>,
    /// Addresses of the guests.
    pub addresses: [String; 2],
    /// Process ids of the back-end; empty for the kernel's bridge.
    pub backends: Vec<u32>,
    _parts: Vec<Part>,
}

/// Part of a set-up, which ends when it is dropped.
pub(super) enum Part {
    Process { _it: Process },
    Cache { _it: built::Cache },
    Switch { it: Switch },
    Bridge { _it: Namespace },
}

impl Nets {
    /// Connects two namespaces by `peer`.
    pub fn build(stage: &Stage, peer: &str) -> Result<Self, Fail> {
        match peer {
            "pvswitch" => Self::ours(stage, peer),
            "bridge" => Self::bridge(stage),
            "vde" => Self::vde(stage),
            "rust-vmm" => Err(built::rust_vmm()),
            _ => Err(Fail::Cell(format!("peer {peer} does not connect namespaces"))),
        }
    }

    /// Returns the namespace of guest `i`.
    pub fn guest(&self, i: usize) -> &Namespace {
        self.nics.get(i).map_or_else(|| &self.namespaces[i], |nic| &nic.netns)
    }

    fn addresses() -> [String; 2] {
        ["10.9.0.10".into(), "10.9.0.11".into()]
    }

    fn namespaces(stage: &Stage) -> Result<Vec<Namespace>, Fail> {
        (0..2).map(|i| Namespace::new(stage, &format!("g{i}"))).collect()
    }

    fn ours(stage: &Stage, peer: &str) -> Result<Self, Fail> {
        let ports = guest_ports(stage);
        let switch = start_ours(stage, peer, &ports)?;
        let nics = ports.iter().enumerate();
        let nics = nics.map(|(i, port)| Nic::start(stage, i, port, &NicOptions::new("")));
        let nics = nics.collect::<Result<Vec<_>, _>>()?;
        switch.wait_up(2)?;
        let backends = vec![switch.id()];
        let parts = vec![Part::Switch { it: switch }];
        let (namespaces, addresses) = (Vec::new(), Self::addresses());
        Ok(Self { nics, namespaces, addresses, backends, _parts: parts })
    }

    fn bridge(stage: &Stage) -> Result<Self, Fail> {
        let bridge = Namespace::new(stage, "bridge")?;
        let guests = Self::namespaces(stage)?;
        let addresses = Self::addresses();
        // No netfilter rules on the bridge, whatever the host's setting.
        bridge.set_sysctl("net.bridge.bridge-nf-call-iptables", "0")?;
        bridge.ip("link add br0 type bridge\nlink set br0 up")?;
        stage.record_rival("bridge", &["ip link add br0 type bridge; veth as its ports"]);
        for (i, (guest, address)) in guests.iter().zip(&addresses).enumerate() {
            let pid = guest.pid();
            bridge.ip(&format!(
                "link add p{i} type veth peer name eth0 netns {pid}\nlink set p{i} master br0 up"
            ))?;
            guest.add_address("eth0", &format!("{address}/16"))?;
        }
        let parts = vec![Part::Bridge { _it: bridge }];
        let (nics, backends) = (Vec::new(), Vec::new());
        Ok(Self { nics, namespaces: guests, addresses, backends, _parts: parts })
    }

    fn vde(stage: &Stage) -> Result<Self, Fail> {
        let control = stage.folder().join(stage.unique("vde")).display().to_string();
        let args = ["-s", &control].map(String::from);
        let place = Place { netns: None, cpus: &stage.switch_cpus };
        let mut switch = start_rival(stage, ["vde", "vde_switch"], &args, &place)?;
        wait_for("vde_switch's socket", START_MAX_S, || {
            switch.check()?;
            Ok(Path::new(&control).join("ctl").exists())
        })?;
        let guests = Self::namespaces(stage)?;
        let addresses = Self::addresses();
        let (mut backends, mut parts) = (vec![switch.id()], vec![Part::Process { _it: switch }]);
        for (guest, address) in guests.iter().zip(&addresses) {
            let args = ["-s", &control, "tap0"].map(String::from);
            let place = guest.on(&stage.guest_cpus);
            let mut plug = start_rival(stage, ["vde", "vde_plug2tap"], &args, &place)?;
            wait_for("the interface of vde_plug2tap", START_MAX_S, || {
                plug.check()?;
                Ok(guest.has_device("tap0"))
            })?;
            guest.add_address("tap0", &format!("{address}/16"))?;
            backends.push(plug.id());
            parts.push(Part::Process { _it: plug });
        }
        Ok(Self { nics: Vec::new(), namespaces: guests, addresses, backends, _parts: parts })
    }
}

/// Two sockets for generators, connected by a peer.
pub struct Sockets {
    /// Ports for generators.
    pub ports: Vec<Port>,
    /// Both ports, for a process that is both guests.
    pub both: Port,
    /// Process id of the back-end.
    pub backend: u32,
    /// Size of rings that are replayed, at which the back-end does well.
    pub replay_ring: u16,
    pub(super) parts: Vec<Part>,
}

impl Sockets {
    /// Starts `peer` with two ports.
    pub fn build(stage: &Stage, peer: &str) -> Result<Self, Fail> {
        memory::need(peer)?;
        match peer {
            "pvswitch" | "pvswitch-spin" | "pvswitch-cross" => {
                let (ports, both) = Port::many(stage, "g", stage.proto, 2)?;
                let switch = start_ours(stage, peer, &ports)?;
                let backend = switch.id();
                let parts = vec![Part::Switch { it: switch }];
                Ok(Self { ports, both, backend, replay_ring: REPLAY_RING, parts })
            }
            "testpmd" => Self::testpmd(stage),
            "ovs-dpdk" => Self::ovs(stage, 0),
            "ovs-dpdk-sleep" => Self::ovs(stage, OVS_SLEEP_US),
            "vpp" | "vpp-cross" => built::vpp(stage, peer),
            "snabb" => built::snabb(stage),
            "grout" | "grout-cross" => built::grout(stage, peer),
            "rust-vmm" => Err(built::rust_vmm()),
            _ => Err(Fail::Cell(format!("peer {peer} has no vhost-user sockets"))),
        }
    }

    /// Returns our switch; `None`: another one.
    pub fn ours(&self) -> Option<&Switch> {
        self.parts.iter().find_map(|part| match part {
            Part::Switch { it } => Some(it),
            _ => None,
        })
    }

    /// Ports of a program that connects them.
    pub(super) fn of_rival(ports: Vec<Port>, both: Port, process: Process) -> Self {
        let backend = process.id();
        let parts = vec![Part::Process { _it: process }];
        Self { ports, both, backend, replay_ring: REPLAY_RING, parts }
    }

    fn testpmd(stage: &Stage) -> Result<Self, Fail> {
        need("dpdk-testpmd")?;
        let (ports, both) = Port::many(stage, "v", Proto::Virtio, 2)?;
        let (back, main) = (cpu(&stage.switch_cpus), cpu(&stage.guest_cpus));
        let mut words = format!(
            "-v -l {main},{back} --main-lcore {main} --no-pci --no-telemetry \
             --file-prefix {} {}",
            stage.unique("lab"),
            memory::DPDK
        );
        for (i, socket) in paths(&ports).iter().enumerate() {
            words += &format!(" --vdev net_vhost{i},iface={}", socket.display());
        }
        words += " -- --forward-mode=io --auto-start --nb-cores=1 --total-num-mbufs=16384";
        let args: Vec<String> = words.split_whitespace().map(String::from).collect();
        let mut process =
            start_rival(stage, ["testpmd", "dpdk-testpmd"], &args, &Place::default())?;
        wait_sockets(&ports, &mut process)?;
        // Because of `-v`; it has no option that prints only that.
        let said = process.logged() + &process.printed();
        if let Some((_, version)) = said.lines().find_map(|line| line.split_once("RTE Version: ")) {
            stage.record_rival("testpmd", &["version", version.trim()]);
        }
        Ok(Self::of_rival(ports, both, process))
    }

    /// Starts Open vSwitch; `sleep_us` is its `pmd-maxsleep`, the longest sleep of its poll thread.
    fn ovs(stage: &Stage, sleep_us: u32) -> Result<Self, Fail> {
        need(OVS_DPDK)?;
        let folder = stage.subfolder("ovs")?;
        let dir = folder.display().to_string();
        let environment =
            ["RUNDIR", "LOGDIR", "DBDIR"].map(|name| format!("OVS_{name}={dir}")).to_vec();
        let rival = if sleep_us == 0 { "ovs-dpdk" } else { "ovs-dpdk-sleep" };
        let run = |name: &str, words: &[&str]| {
            stage.record_rival(rival, words);
            let words = words.iter().map(ToString::to_string);
            let args: Vec<String> = environment.iter().cloned().chain(words).collect();
            stage.start(name, "env", &args, &Place::default())
        };
        // Two lines: its own version, and that of DPDK.
        if let Ok(version) = Command::new(OVS_DPDK).arg("--version").output() {
            let version = String::from_utf8_lossy(&version.stdout).trim().replace('\n', ", ");
            stage.record_rival(rival, &["version", &version]);
        }
        let (database, remote) = (format!("{dir}/conf.db"), format!("unix:{dir}/db.sock"));
        run("ovsdb-tool", &["ovsdb-tool", "create", &database, OVS_SCHEMA])?.finish(20.0)?;
        let (listen, control) = (format!("--remote=p{remote}"), format!("--unixctl={dir}/db.ctl"));
        let mut server = run("ovsdb", &["ovsdb-server", &database, &listen, &control])?;
        wait_for("ovsdb-server's socket", START_MAX_S, || {
            server.check()?;
            Ok(folder.join("db.sock").exists())
        })?;
        let to = format!("--db={remote}");
        let ctl = |words: &[&str]| {
            let words = [&["ovs-vsctl", &to, "--timeout=30"], words].concat();
            run("ovs-vsctl", &words)?.finish(40.0)
        };
        let settings = ovs_settings(stage, sleep_us);
        let mut set = vec!["--no-wait", "set", "Open_vSwitch", "."];
        set.extend(settings.iter().map(String::as_str));
        ctl(&["--no-wait", "init"])?;
        ctl(&set)?;
        let (control, log) = (format!("--unixctl={dir}/ovs.ctl"), format!("--log-file={dir}/log"));
        let mut daemon = run("ovs", &[OVS_DPDK, &remote, &control, &log])?;
        // Sockets are in its run folder, with the names of their ports.
        let paths = [0, 1].map(|i| folder.join(format!("v{i}")));
        let added = ctl(&BRIDGE.split_whitespace().collect::<Vec<_>>());
        // If the daemon has ended, report that error.
        daemon.check()?;
        added?;
        wait_for("Open vSwitch's sockets", START_MAX_S, || {
            daemon.check()?;
            Ok(paths.iter().all(|path| path.exists()))
        })?;
        let ports = paths.iter().enumerate().map(|(i, path)| Port {
            name: format!("g{i}"),
            spec: String::new(),
            connect: format!("vhost-user:{}", path.display()),
        });
        let ports = ports.collect();
        let connect = format!("vhost-user:{}", folder.join("v{}").display());
        let both = Port { name: "g".into(), spec: String::new(), connect };
        let backend = daemon.id();
        let parts = vec![Part::Process { _it: daemon }, Part::Process { _it: server }];
        Ok(Self { ports, both, backend, replay_ring: REPLAY_RING, parts })
    }
}

/// Paths of ports' sockets.
pub(super) fn paths(ports: &[Port]) -> Vec<PathBuf> {
    ports.iter().map(|port| port.connect.replacen("vhost-user:", "", 1).into()).collect()
}

/// Waits until a program has made its ports' sockets.
pub(super) fn wait_sockets(ports: &[Port], process: &mut Process) -> Result<(), Fail> {
    let sockets = paths(ports);
    let what = format!("the sockets of {}", process.name);
    wait_for(&what, START_MAX_S, || {
        process.check()?;
        Ok(sockets.iter().all(|socket| socket.exists()))
    })
}

/// Starts a program of another switch and records its command line; `name` is that of the switch,
/// then that of the program.
pub(super) fn start_rival(
    stage: &Stage,
    [name, program]: [&str; 2],
    args: &[String],
    place: &Place,
) -> Result<Process, Fail> {
    let words: Vec<&str> =
        std::iter::once(program).chain(args.iter().map(String::as_str)).collect();
    stage.record_rival(name, &words);
    stage.start(program, program, args, place)
}

/// Settings of Open vSwitch's database; `sleep_us` is its `pmd-maxsleep`.
fn ovs_settings(stage: &Stage, sleep_us: u32) -> [String; 6] {
    let (back, main) = (cpu(&stage.switch_cpus), cpu(&stage.guest_cpus));
    let settings = [
        ("dpdk-init", "true".into()),
        // Otherwise it allocates 700 MiB at start, and again when a guest connects.
        ("per-port-memory", "true".into()),
        ("dpdk-lcore-mask", format!("{:#x}", 1_u64 << main)),
        ("pmd-cpu-mask", format!("{:#x}", 1_u64 << back)),
        ("pmd-maxsleep", sleep_us.to_string()),
        ("dpdk-extra", format!("--no-pci {}", memory::DPDK)),
    ];
    settings.map(|(key, value)| format!("other_config:{key}=\"{value}\""))
}

fn guest_ports(stage: &Stage) -> Vec<Port> {
    (0..2).map(|i| Port::guest(stage, &format!("g{i}"), stage.proto, "")).collect()
}

fn start_ours(stage: &Stage, peer: &str, ports: &[Port]) -> Result<Switch, Fail> {
    let poll = if peer == "pvswitch-spin" { "spin" } else { "adaptive" };
    let mut options = SwitchOptions::new(stage, poll);
    if peer == "pvswitch-cross" {
        options.forward = "cross".into();
    }
    Switch::start(stage, &options, ports)
}

pub(super) fn cpu(cpus: &[usize]) -> usize {
    cpus.first().copied().unwrap_or(0)
}

/// Returns CPU time, in ns, and voluntary context switches of all threads of some processes.
pub fn spent(processes: &[u32]) -> (u64, u64) {
    let switches = |pid: &u32| -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
        let of = |task: std::fs::DirEntry| {
            let text = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
            let line = text.lines().find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"));
            line.and_then(|n| n.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        tasks.into_iter().flatten().flatten().map(of).sum()
    };
    let cpu = processes.iter().map(|pid| cpu_ns(*pid)).sum();
    (cpu, processes.iter().map(switches).sum())
}
