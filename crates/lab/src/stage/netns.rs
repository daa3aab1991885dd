//! Network namespaces. Each is unnamed and held by a child process: nothing is mounted for it, and
//! nothing of it remains when the process ends.

use std::collections::BTreeMap;

use rustix::process::{Pid, Signal, kill_process};

use super::process::output;
use super::vm::Vm;
use super::{NicOptions, Place, Port, Process, START_MAX_S, Stage, cpu_ns, wait_for};
use crate::error::Fail;

/// A network namespace; drop the processes in it first.
#[derive(Debug)]
pub struct Namespace {
    holder: Process,
    /// Link target of `/proc/PID/ns/net` of its processes: `net:[4026532...]`.
    id: String,
    /// The virtual machine that owns it, if any; commands then run inside of the machine.
    vm: Option<Vm>,
}

/// Returns the link target of `/proc/PID/ns/net`; `None` if the process has ended.
fn namespace_of(pid: &str) -> Option<String> {
    let link = std::fs::read_link(format!("/proc/{pid}/ns/net")).ok()?;
    Some(link.to_string_lossy().into_owned())
}

impl Namespace {
    /// Creates a namespace with its loopback up, TCP Reno, and without IPv6, whose neighbour
    /// discovery would add frames.
    pub fn new(stage: &Stage, name: &str) -> Result<Self, Fail> {
        let args = ["--net", "--", "sleep", "infinity"].map(String::from);
        let holder = stage.start(name, "unshare", &args, &Place::default())?;
        let namespace = Self::of(holder, None)?;
        namespace.run("ip", "link set lo up")?;
        for conf in ["all", "default"] {
            namespace.set_sysctl(&format!("net.ipv6.conf.{conf}.disable_ipv6"), "1")?;
        }
        // Reno is in every kernel and needs no privilege. Algorithms that measure the minimum
        // round-trip time (BBR) would take the delay of a poll timer for a longer path.
        namespace.set_sysctl("net.ipv4.tcp_congestion_control", "reno")?;
        Ok(namespace)
    }

    /// Creates the namespace of a virtual machine at a port, with an IP address and a MAC address.
    /// Commands run inside of the machine, which is set up like other namespaces.
    pub(super) fn of_vm(
        stage: &Stage,
        port: &Port,
        options: &NicOptions,
        address: &str,
        mac: &str,
    ) -> Result<Self, Fail> {
        let (vm, process) = Vm::start(stage, port, options, address, mac)?;
        Self::of(process, Some(vm))
    }

    /// Waits until `holder` has created its namespace.
    fn of(mut holder: Process, vm: Option<Vm>) -> Result<Self, Fail> {
        let ours = namespace_of("self");
        let mut id = None;
        wait_for("a network namespace", START_MAX_S, || {
            holder.check()?;
            id = namespace_of(&holder.id().to_string()).filter(|id| Some(id) != ours.as_ref());
            Ok(id.is_some())
        })?;
        Ok(Self { holder, id: id.unwrap_or_default(), vm })
    }

    /// The virtual machine in it.
    pub(super) fn vm(&self) -> Option<&Vm> {
        self.vm.as_ref()
    }

    /// Waits until commands can run in it.
    pub(super) fn wait_ready(&self) -> Result<(), Fail> {
        let ready = self.vm.as_ref().map_or(Ok(()), Vm::wait_ready);
        ready.map_err(|error| self.holder.fail(&error))
    }

    /// Fails, with the end of its log, if the process that holds it has ended.
    pub(super) fn check(&self) -> Result<(), Fail> {
        match namespace_of(&self.holder.id().to_string()) {
            Some(_) => Ok(()),
            None => Err(self.holder.fail("ended early")),
        }
    }

    /// Path that refers to it, for `setns` and `nsenter --net`.
    pub fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.holder.id())
    }

    /// Process id of its holder, for `ip link ... netns PID`.
    pub fn pid(&self) -> u32 {
        self.holder.id()
    }

    /// Returns the place of a process in it on these CPUs.
    pub fn on<'a>(&'a self, cpus: &'a [usize]) -> Place<'a> {
        Place { netns: Some(self), cpus }
    }

    /// Runs a program in it and returns its output. No argument may contain a blank.
    pub fn run(&self, program: &str, args: &str) -> Result<String, Fail> {
        let args: Vec<_> = args.split_whitespace().map(String::from).collect();
        output(program, &args, &self.on(&[]))
    }

    /// Runs `ip` commands, one per line.
    pub fn ip(&self, lines: &str) -> Result<(), Fail> {
        let mut lines = lines.lines().map(str::trim).filter(|line| !line.is_empty());
        lines.try_for_each(|line| self.run("ip", line).map(|_| ()))
    }

    /// Sets a sysctl by its name (`net.ipv4.ip_forward`); ignored if this kernel lacks it.
    pub fn set_sysctl(&self, key: &str, value: &str) -> Result<(), Fail> {
        let path = format!("/proc/sys/{}", key.replace('.', "/"));
        let script = format!("test ! -e {path} || echo {value} > {path}");
        output("sh", &["-c".into(), script], &self.on(&[])).map(|_| ())
    }

    /// Enables threaded NAPI on a virtual interface: a kernel thread receives its packets, so the
    /// sender is not charged for the network stack behind it. TSO must be off at the other end, and
    /// the interface must be up. Without effect if the kernel does not permit it.
    pub fn enable_threaded_napi(&self, device: &str) -> Result<(), Fail> {
        // A veth interface has a NAPI instance only with GRO (or XDP).
        self.set_offloads(device, "gro", true)?;
        let threaded = format!("/sys/class/net/{device}/threaded");
        let script = format!("mount -t sysfs none /sys && echo 1 > {threaded} || true");
        let words = ["--mount", "sh", "-c", &script].map(String::from);
        output("unshare", &words, &self.on(&[])).map(|_| ())
    }

    /// Adds an address (`10.9.0.1/24`) to a device and brings it up.
    pub fn add_address(&self, device: &str, address: &str) -> Result<(), Fail> {
        self.ip(&format!("addr add {address} dev {device}\nlink set {device} up"))
    }

    /// Turns offloads of a device on or off; `names` are those of `ethtool -K`: `tso gso gro`.
    pub fn set_offloads(&self, device: &str, names: &str, on: bool) -> Result<(), Fail> {
        let value = if on { " on " } else { " off " };
        let words: String = names.split_whitespace().flat_map(|name| [name, value]).collect();
        self.run("ethtool", &format!("-K {device} {words}")).map(|_| ())
    }

    /// Whether it has a device of that name.
    pub fn has_device(&self, device: &str) -> bool {
        let text = self.read("dev");
        text.lines().any(|line| line.split(':').next().is_some_and(|name| name.trim() == device))
    }

    /// Returns a file of `/proc/net` (`dev`, `snmp`, `netstat`, `tcp`); empty if it is unreadable.
    pub fn read(&self, file: &str) -> String {
        if let Some(vm) = &self.vm {
            return vm.read(&format!("/proc/net/{file}")).unwrap_or_default();
        }
        let path = format!("/proc/{}/net/{file}", self.holder.id());
        std::fs::read_to_string(path).unwrap_or_default()
    }

    /// Returns the kernel's protocol counters by name: `Udp.InDatagrams`, `TcpExt.TCPTimeouts`.
    pub fn counters(&self) -> BTreeMap<String, u64> {
        let mut all = BTreeMap::new();
        for file in ["snmp", "netstat"] {
            let text = self.read(file);
            let lines: Vec<_> = text.lines().collect();
            for pair in lines.chunks_exact(2) {
                let (Some((group, names)), Some((_, values))) =
                    (pair[0].split_once(": "), pair[1].split_once(": "))
                else {
                    continue;
                };
                for (name, value) in names.split_whitespace().zip(values.split_whitespace()) {
                    all.insert(format!("{group}.{name}"), value.parse().unwrap_or(0));
                }
            }
        }
        all
    }

    /// Returns the ids of the processes in it.
    pub fn processes(&self) -> Vec<u32> {
        let Ok(all) = std::fs::read_dir("/proc") else { return Vec::new() };
        let names = all.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let here = names.filter(|name| namespace_of(name).as_ref() == Some(&self.id));
        here.filter_map(|name| name.parse().ok()).collect()
    }

    /// Returns the CPU time of all processes in it, in ns.
    pub fn cpu_ns(&self) -> u64 {
        self.processes().into_iter().map(cpu_ns).sum()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // User-Mode Linux starts a host process for each of its processes; some outlive it.
        let left = if self.vm.is_some() { self.processes() } else { Vec::new() };
        for pid in left.into_iter().filter_map(|pid| Pid::from_raw(i32::try_from(pid).ok()?)) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}
