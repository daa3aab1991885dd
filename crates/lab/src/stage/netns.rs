//! Network namespaces. Each is held by a process of ours and has no name, so nothing has to be
//! mounted for it and nothing of it can stay behind.

use std::collections::BTreeMap;

use rustix::process::{Pid, Signal, kill_process};

use super::process::output;
use super::vm::Vm;
use super::{NicOptions, Place, Port, Process, Stage, cpu_ns, wait_for};
use crate::error::Fail;

/// A network namespace; what runs in it should be dropped before it.
#[derive(Debug)]
pub struct Namespace {
    holder: Process,
    /// `net:[4026532...]`: what its processes are known by.
    id: String,
    /// Its only inhabitant, where there is one: commands run in it.
    vm: Option<Vm>,
}

/// What `/proc/PID/ns/net` says; none of a process that has ended.
fn namespace_of(pid: &str) -> Option<String> {
    let link = std::fs::read_link(format!("/proc/{pid}/ns/net")).ok()?;
    Some(link.to_string_lossy().into_owned())
}

impl Namespace {
    /// Makes one, with its loopback up, plain TCP, whatever the machine prefers, and
    /// without IPv6, whose own frames nobody asked for.
    pub fn new(stage: &Stage, name: &str) -> Result<Self, Fail> {
        let args = ["--net", "--", "sleep", "infinity"].map(String::from);
        let holder = stage.start(name, "unshare", &args, &Place::default())?;
        let namespace = Self::of(holder, None)?;
        namespace.run("ip", "link set lo up")?;
        for conf in ["all", "default"] {
            namespace.set(&format!("net.ipv6.conf.{conf}.disable_ipv6"), "1")?;
        }
        // Every kernel has it, and lets anyone choose it. What measures the least round trip, as
        // bbr, takes the delay of a poll timer for that of a longer way.
        namespace.set("net.ipv4.tcp_congestion_control", "reno")?;
        Ok(namespace)
    }

    /// That of a virtual machine at a port, with its address there and its MAC address. All
    /// commands run within; it is set up as other namespaces are.
    pub(super) fn of_machine(
        stage: &Stage,
        port: &Port,
        options: &NicOptions,
        addresses: (&str, &str),
    ) -> Result<Self, Fail> {
        let (vm, process) = Vm::start(stage, port, options, addresses)?;
        Self::of(process, Some(vm))
    }

    /// The one that a process is about to make.
    fn of(mut holder: Process, vm: Option<Vm>) -> Result<Self, Fail> {
        let ours = namespace_of("self");
        let mut id = None;
        wait_for("a network namespace", 10.0, || {
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
    pub(super) fn ready(&self) -> Result<(), Fail> {
        let ready = self.vm.as_ref().map_or(Ok(()), Vm::ready);
        ready.map_err(|error| self.holder.fail(&error))
    }

    /// An error, with the end of its log, if what holds it has ended.
    pub(super) fn check(&self) -> Result<(), Fail> {
        match namespace_of(&self.holder.id().to_string()) {
            Some(_) => Ok(()),
            None => Err(self.holder.fail("ended early")),
        }
    }

    /// The file that stands for it.
    pub fn path(&self) -> String {
        format!("/proc/{}/ns/net", self.holder.id())
    }

    /// A process in it, for `ip link ... netns PID`.
    pub fn pid(&self) -> u32 {
        self.holder.id()
    }

    /// It, on these CPUs.
    pub fn on<'a>(&'a self, cpus: &'a [usize]) -> Place<'a> {
        Place { netns: Some(self), cpus }
    }

    /// Runs a program in it, with arguments that have no blanks in them; what it printed.
    pub fn run(&self, program: &str, args: &str) -> Result<String, Fail> {
        let args: Vec<_> = args.split_whitespace().map(String::from).collect();
        output(program, &args, &self.on(&[]))
    }

    /// Runs `ip` commands, one a line.
    pub fn ip(&self, lines: &str) -> Result<(), Fail> {
        let mut lines = lines.lines().map(str::trim).filter(|line| !line.is_empty());
        lines.try_for_each(|line| self.run("ip", line).map(|_| ()))
    }

    /// Sets a kernel setting of it; `.` may be written for `/`. One that this kernel lacks is left
    /// alone.
    pub fn set(&self, key: &str, value: &str) -> Result<(), Fail> {
        let path = format!("/proc/sys/{}", key.replace('.', "/"));
        let script = format!("test ! -e {path} || echo {value} > {path}");
        output("sh", &["-c".into(), script], &self.on(&[])).map(|_| ())
    }

    /// Lets a thread of the kernel's take in what comes to a virtual interface, in place of whoever
    /// sends it: what the network behind it costs is not the sender's then. The other end must not
    /// take TSO, and the interface must be up. Left as it is where the kernel does not let us.
    pub fn threaded(&self, device: &str) -> Result<(), Fail> {
        // Only with it the interface has a queue that a thread could serve.
        self.offloads(device, "gro", true)?;
        let threaded = format!("/sys/class/net/{device}/threaded");
        let script = format!("mount -t sysfs none /sys && echo 1 > {threaded} || true");
        let words = ["--mount", "sh", "-c", &script].map(String::from);
        output("unshare", &words, &self.on(&[])).map(|_| ())
    }

    /// Gives a device an address (`10.9.0.1/24`) and brings it up.
    pub fn address(&self, device: &str, address: &str) -> Result<(), Fail> {
        self.ip(&format!("addr add {address} dev {device}\nlink set {device} up"))
    }

    /// Turns features of a device on or off, by their short names for `ethtool -K`: `tso gso gro`.
    pub fn offloads(&self, device: &str, names: &str, on: bool) -> Result<(), Fail> {
        let value = if on { " on " } else { " off " };
        let words: String = names.split_whitespace().flat_map(|name| [name, value]).collect();
        self.run("ethtool", &format!("-K {device} {words}")).map(|_| ())
    }

    /// Whether it has a device.
    pub fn has(&self, device: &str) -> bool {
        let text = self.read("dev");
        text.lines().any(|line| line.split(':').next().is_some_and(|name| name.trim() == device))
    }

    /// A file of the network's counters: `dev`, `snmp`, `netstat`, `tcp`.
    pub fn read(&self, file: &str) -> String {
        if let Some(vm) = &self.vm {
            return vm.read(&format!("/proc/net/{file}")).unwrap_or_default();
        }
        let path = format!("/proc/{}/net/{file}", self.holder.id());
        std::fs::read_to_string(path).unwrap_or_default()
    }

    /// The kernel's counters of protocols, as in `Udp.InDatagrams` and `TcpExt.TCPTimeouts`.
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

    /// Ids of the processes in it.
    pub fn processes(&self) -> Vec<u32> {
        let Ok(all) = std::fs::read_dir("/proc") else { return Vec::new() };
        let names = all.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        let here = names.filter(|name| namespace_of(name).as_ref() == Some(&self.id));
        here.filter_map(|name| name.parse().ok()).collect()
    }

    /// CPU time of all processes in it, in ns.
    pub fn cpu_ns(&self) -> u64 {
        self.processes().into_iter().map(cpu_ns).sum()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // User-Mode Linux has a process for each of its own, which do not all end with it.
        let there = if self.vm.is_some() { self.processes() } else { Vec::new() };
        for pid in there.into_iter().filter_map(|pid| Pid::from_raw(i32::try_from(pid).ok()?)) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}
