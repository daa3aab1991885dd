//! What is between two guests: ours, or a rival.

use std::path::Path;

use crate::error::Fail;
use crate::machine::huge_pages_free;
use crate::stage::{
    Namespace, Nic, NicOptions, Place, Port, Process, Stage, Switch, SwitchOptions, cpu_ns, need,
    wait_for,
};

const OVS_DPDK: &str = "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk";
const OVS_SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";
/// The longest sleep that Open vSwitch's busy thread is allowed where it may sleep.
const OVS_SLEEP_US: u32 = 500;
/// `rust-vmm`'s crate as a program, one port to one TAP.
const RUST_VMM: &str = "vhost_user_net";
/// Huge pages of 2 MiB that a DPDK program takes.
const HUGE_PAGES: u64 = 300;

/// Two guests with a kernel's network, and what joins them.
pub struct Nets {
    nics: Vec<Nic>,
    spaces: Vec<Namespace>,
    /// Their addresses.
    pub addresses: [String; 2],
    /// Processes of the back end; none of a kernel's bridge.
    pub backs: Vec<u32>,
    _parts: Vec<Part>,
}

/// What has only to live.
enum Part {
    Process { _it: Process },
    Switch { _it: Switch },
    Middle { _it: Namespace },
}

impl Nets {
    /// Joins two namespaces by `peer`.
    pub fn build(stage: &Stage, peer: &str) -> Result<Self, Fail> {
        match peer {
            "pvswitch" => Self::ours(stage, peer),
            "bridge" => Self::bridge(stage),
            "vde" => Self::vde(stage),
            "rust-vmm" => Err(rust_vmm()),
            _ => Err(Fail::Cell(format!("peer {peer}: it joins no namespaces"))),
        }
    }

    /// Guest `i`.
    pub fn guest(&self, i: usize) -> &Namespace {
        self.nics.get(i).map_or_else(|| &self.spaces[i], |nic| &nic.netns)
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
        let backs = vec![switch.id()];
        let parts = vec![Part::Switch { _it: switch }];
        let (spaces, addresses) = (Vec::new(), Self::addresses());
        Ok(Self { nics, spaces, addresses, backs, _parts: parts })
    }

    fn bridge(stage: &Stage) -> Result<Self, Fail> {
        let middle = Namespace::new(stage, "bridge")?;
        let guests = Self::namespaces(stage)?;
        let addresses = Self::addresses();
        // As the host has it or not, the same everywhere: without a filter.
        middle.set("net.bridge.bridge-nf-call-iptables", "0")?;
        middle.ip("link add br0 type bridge\nlink set br0 up")?;
        for (i, (guest, address)) in guests.iter().zip(&addresses).enumerate() {
            let pid = guest.pid();
            middle.ip(&format!(
                "link add p{i} type veth peer name eth0 netns {pid}\nlink set p{i} master br0 up"
            ))?;
            guest.address("eth0", &format!("{address}/16"))?;
        }
        let parts = vec![Part::Middle { _it: middle }];
        let (nics, backs) = (Vec::new(), Vec::new());
        Ok(Self { nics, spaces: guests, addresses, backs, _parts: parts })
    }

    fn vde(stage: &Stage) -> Result<Self, Fail> {
        let control = stage.folder().join(stage.unique("vde")).display().to_string();
        let args = ["-s", &control].map(String::from);
        let place = Place { netns: None, cpus: &stage.switch_cpus };
        let mut switch = stage.start("vde_switch", "vde_switch", &args, &place)?;
        wait_for("vde_switch's socket", 10.0, || {
            switch.check()?;
            Ok(Path::new(&control).join("ctl").exists())
        })?;
        let guests = Self::namespaces(stage)?;
        let addresses = Self::addresses();
        let (mut backs, mut parts) = (vec![switch.id()], vec![Part::Process { _it: switch }]);
        for (guest, address) in guests.iter().zip(&addresses) {
            let args = ["-s", &control, "tap0"].map(String::from);
            let place = guest.on(&stage.guest_cpus);
            let mut plug = stage.start("vde_plug", "vde_plug2tap", &args, &place)?;
            wait_for("the interface of vde_plug2tap", 10.0, || {
                plug.check()?;
                Ok(guest.has("tap0"))
            })?;
            guest.address("tap0", &format!("{address}/16"))?;
            backs.push(plug.id());
            parts.push(Part::Process { _it: plug });
        }
        Ok(Self { nics: Vec::new(), spaces: guests, addresses, backs, _parts: parts })
    }
}

/// Two sockets that generators connect to, and what joins them.
pub struct Sockets {
    /// For generators.
    pub ports: Vec<Port>,
    /// Its process.
    pub back: u32,
    _parts: Vec<Part>,
}

impl Sockets {
    /// Starts `peer` with two ports.
    pub fn build(stage: &Stage, peer: &str) -> Result<Self, Fail> {
        match peer {
            "pvswitch" | "pvswitch-spin" | "pvswitch-cross" => {
                let ports = guest_ports(stage);
                let switch = start_ours(stage, peer, &ports)?;
                let back = switch.id();
                Ok(Self { ports, back, _parts: vec![Part::Switch { _it: switch }] })
            }
            "testpmd" => Self::testpmd(stage),
            "ovs-dpdk" => Self::ovs(stage, 0),
            "ovs-dpdk-sleep" => Self::ovs(stage, OVS_SLEEP_US),
            "rust-vmm" => Err(rust_vmm()),
            _ => Err(Fail::Cell(format!("peer {peer}: it has no sockets for guests"))),
        }
    }

    /// Where a peer is to listen, and how a generator connects.
    fn ports(stage: &Stage) -> Vec<(String, Port)> {
        let port = |i: usize| {
            let path = stage.folder().join(stage.unique(&format!("v{i}"))).display().to_string();
            let connect = format!("vhost-user:{path}");
            (path, Port { name: format!("g{i}"), spec: String::new(), connect })
        };
        (0..2).map(port).collect()
    }

    fn testpmd(stage: &Stage) -> Result<Self, Fail> {
        need("dpdk-testpmd")?;
        let ports = Self::ports(stage);
        let (back, main) = (cpu(&stage.switch_cpus), cpu(&stage.guest_cpus));
        let mut words = format!(
            "-l {main},{back} --main-lcore {main} --no-pci --no-telemetry \
             --file-prefix {} {}",
            stage.unique("lab"),
            memory()
        );
        for (i, (path, _)) in ports.iter().enumerate() {
            words += &format!(" --vdev net_vhost{i},iface={path}");
        }
        words += " -- --forward-mode=io --auto-start --nb-cores=1 --total-num-mbufs=16384";
        let args: Vec<String> = words.split_whitespace().map(String::from).collect();
        let mut process = stage.start("testpmd", "dpdk-testpmd", &args, &Place::default())?;
        wait_for("testpmd's sockets", 30.0, || {
            process.check()?;
            Ok(ports.iter().all(|(path, _)| Path::new(path).exists()))
        })?;
        let back = process.id();
        let ports = ports.into_iter().map(|(_, port)| port).collect();
        Ok(Self { ports, back, _parts: vec![Part::Process { _it: process }] })
    }

    /// Open vSwitch; its busy thread may sleep so long, in us, when it finds nothing.
    fn ovs(stage: &Stage, sleep_us: u32) -> Result<Self, Fail> {
        need(OVS_DPDK)?;
        let folder = stage.folder().join(stage.unique("ovs"));
        let dir = folder.display().to_string();
        std::fs::create_dir(&folder).map_err(|error| Fail::Over(format!("{dir}: {error}")))?;
        let environment =
            ["RUNDIR", "LOGDIR", "DBDIR"].map(|name| format!("OVS_{name}={dir}")).to_vec();
        let run = |name: &str, words: &[&str]| {
            let words = words.iter().map(ToString::to_string);
            let args: Vec<String> = environment.iter().cloned().chain(words).collect();
            stage.start(name, "env", &args, &Place::default())
        };
        let (database, remote) = (format!("{dir}/conf.db"), format!("unix:{dir}/db.sock"));
        run("ovsdb-tool", &["ovsdb-tool", "create", &database, OVS_SCHEMA])?.finish(20.0)?;
        let (listen, control) = (format!("--remote=p{remote}"), format!("--unixctl={dir}/db.ctl"));
        let mut server = run("ovsdb", &["ovsdb-server", &database, &listen, &control])?;
        wait_for("ovsdb-server's socket", 20.0, || {
            server.check()?;
            Ok(folder.join("db.sock").exists())
        })?;
        let to = format!("--db={remote}");
        let ctl = |words: &[&str]| {
            let words = [&["ovs-vsctl", &to, "--timeout=30"], words].concat();
            run("ovs-vsctl", &words)?.finish(40.0)
        };
        let (back, main) = (cpu(&stage.switch_cpus), cpu(&stage.guest_cpus));
        let settings = [
            ("dpdk-init", "true".into()),
            // Else it asks for 700 MiB at once, and for as much again when a guest comes.
            ("per-port-memory", "true".into()),
            ("dpdk-lcore-mask", format!("{:#x}", 1_u64 << main)),
            ("pmd-cpu-mask", format!("{:#x}", 1_u64 << back)),
            ("pmd-maxsleep", sleep_us.to_string()),
            ("dpdk-extra", format!("--no-pci {}", memory())),
        ];
        let settings = settings.map(|(key, value)| format!("other_config:{key}=\"{value}\""));
        let mut set = vec!["--no-wait", "set", "Open_vSwitch", "."];
        set.extend(settings.iter().map(String::as_str));
        ctl(&["--no-wait", "init"])?;
        ctl(&set)?;
        let (control, log) = (format!("--unixctl={dir}/ovs.ctl"), format!("--log-file={dir}/log"));
        let mut daemon = run("ovs", &[OVS_DPDK, &remote, &control, &log])?;
        // Its sockets are in its folder, and have its ports' names.
        let paths = [0, 1].map(|i| folder.join(format!("v{i}")));
        let mut add: Vec<String> =
            "add-br br0 -- set bridge br0 datapath_type=netdev fail-mode=standalone"
                .split_whitespace()
                .map(String::from)
                .collect();
        for i in 0..paths.len() {
            let words = format!("-- add-port br0 v{i} -- set interface v{i} type=dpdkvhostuser");
            add.extend(words.split_whitespace().map(String::from));
        }
        let added = ctl(&add.iter().map(String::as_str).collect::<Vec<_>>());
        // If it has ended, its reason is the better one.
        daemon.check()?;
        added?;
        wait_for("Open vSwitch's sockets", 30.0, || {
            daemon.check()?;
            Ok(paths.iter().all(|path| path.exists()))
        })?;
        let ports = paths.iter().enumerate().map(|(i, path)| Port {
            name: format!("g{i}"),
            spec: String::new(),
            connect: format!("vhost-user:{}", path.display()),
        });
        let ports = ports.collect();
        let back = daemon.id();
        let parts = vec![Part::Process { _it: daemon }, Part::Process { _it: server }];
        Ok(Self { ports, back, _parts: parts })
    }
}

fn guest_ports(stage: &Stage) -> Vec<Port> {
    (0..2).map(|i| Port::guest(stage, &format!("g{i}"), stage.proto, "")).collect()
}

fn start_ours(stage: &Stage, peer: &str, ports: &[Port]) -> Result<Switch, Fail> {
    let poll = if peer == "pvswitch-spin" { "spin" } else { "adaptive" };
    let mut how = SwitchOptions::new(stage, poll);
    if peer == "pvswitch-cross" {
        how.forward = "cross".into();
    }
    Switch::start(stage, &how, ports)
}

fn cpu(cpus: &[usize]) -> usize {
    cpus.first().copied().unwrap_or(0)
}

/// Options for DPDK's memory: huge pages where enough are free. The machine's settings stay.
fn memory() -> &'static str {
    let huge = huge_pages_free() >= HUGE_PAGES && std::fs::metadata("/dev/hugepages").is_ok();
    if huge { "--in-memory -m 512" } else { "--no-huge --legacy-mem --no-shconf -m 512" }
}

/// It cannot join two guests by itself, and comes in no package.
fn rust_vmm() -> Fail {
    let there = need(RUST_VMM).is_ok();
    Fail::Missing(if there {
        format!("{RUST_VMM} has one guest and one TAP only: not two guests as the others")
    } else {
        format!(
            "{RUST_VMM}, rust-vmm's vhost-user-backend as a program, is not installed; it is in no \
             package: in the sources of cloud-hypervisor, `cargo build --release -p {RUST_VMM}`"
        )
    })
}

/// CPU time and voluntary switches of all threads of some processes.
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
