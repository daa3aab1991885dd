//! A switch, and its counters over a window of time.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::PathBuf;

use api::Request;
use api::control::Client;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{
    Namespace, Negotiated, Place, Process, Proto, START_MAX_S, Stage, busy_ns, cpu_ns, wait_for,
    waited_ns,
};
use crate::error::Fail;

/// A port: its specification, and the argument with which a guest connects to it.
#[derive(Clone, Debug)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// Argument of the switch's `--port`: `NAME=KIND:ARG...`.
    pub spec: String,
    /// Argument of the guest's `--connect`: `KIND:ARG`; empty for a port without guest.
    pub connect: String,
}

impl Port {
    /// Returns a port for a guest. `options` is empty or starts with a comma:
    /// `,queues=2,poll=spin`.
    pub fn guest(stage: &Stage, name: &str, proto: Proto, options: &str) -> Self {
        let path = stage.folder().join(stage.unique(name));
        let connect = format!("{}:{}", proto.kind(), path.display());
        Self { name: name.into(), spec: format!("{name}={connect}{options}"), connect }
    }

    /// Returns `count` ports for guests, named from `NAME0`, and one whose `connect` is the pattern
    /// of all of them, for a process that acts as all guests (`gen --mode idle --count N`).
    pub fn many(
        stage: &Stage,
        name: &str,
        proto: Proto,
        count: usize,
    ) -> Result<(Vec<Self>, Self), Fail> {
        let folder = stage.subfolder(name)?;
        let port = |name: String, number: &str| {
            let connect = format!("{}:{}/{number}", proto.kind(), folder.display());
            Self { spec: format!("{name}={connect}"), name, connect }
        };
        let ports = (0..count).map(|i| port(format!("{name}{i}"), &i.to_string()));
        Ok((ports.collect(), port(name.into(), "{}")))
    }

    /// Returns a port with a TAP interface in a namespace, created by the switch.
    pub fn tap(name: &str, device: &str, netns: &Namespace, options: &str) -> Self {
        let spec = format!("{name}=tap:{device},netns={}{options}", netns.path());
        Self { name: name.into(), spec, connect: String::new() }
    }

    /// Returns a port that drops all frames.
    pub fn null(name: &str) -> Self {
        Self { name: name.into(), spec: format!("{name}=null"), connect: String::new() }
    }
}

/// Options of a switch. [`SwitchOptions::new`] suits most studies; others change single fields.
#[derive(Clone, Debug)]
pub struct SwitchOptions {
    /// `--poll`.
    pub poll: String,
    /// `--call`.
    pub call: String,
    /// `--workers`.
    pub workers: usize,
    /// `--placement`.
    pub placement: String,
    /// `--forward`.
    pub forward: String,
    /// CPUs of its workers, in this order; empty: not pinned.
    pub cpus: Vec<usize>,
    /// Further options of `pvswitch run`, passed unchanged.
    pub more: Vec<String>,
}

impl SwitchOptions {
    /// Returns options with one worker on the switch's first CPU, this poll policy, and calls
    /// without coalescing.
    pub fn new(stage: &Stage, poll: &str) -> Self {
        Self {
            poll: poll.into(),
            call: "event".into(),
            workers: 1,
            placement: "balanced".into(),
            forward: "switch".into(),
            cpus: stage.switch_cpus.iter().copied().take(1).collect(),
            more: Vec::new(),
        }
    }

    fn args(&self, ports: &[Port]) -> Vec<String> {
        let mut args = vec!["run".to_string(), "--quiet".into()];
        let workers = self.workers.to_string();
        for (key, value) in [
            ("--poll", &self.poll),
            ("--call", &self.call),
            ("--workers", &workers),
            ("--placement", &self.placement),
            ("--forward", &self.forward),
        ] {
            args.extend([key.into(), value.clone()]);
        }
        if !self.cpus.is_empty() {
            args.extend(["--cpus".into(), crate::machine::list(&self.cpus)]);
        }
        args.extend(ports.iter().flat_map(|port| ["--port".into(), port.spec.clone()]));
        args.extend(self.more.iter().cloned());
        args
    }
}

/// A running switch.
#[derive(Debug)]
pub struct Switch {
    process: RefCell<Process>,
    socket: PathBuf,
    control: RefCell<Client>,
    /// Process id: with `--keep`, not that of the process that was started.
    pid: Cell<u32>,
    negotiated: Negotiated,
    /// Boot time of a guest.
    boot_s: f64,
}

impl Drop for Switch {
    /// With `--keep`, the process that was started keeps the switch's connections: killed, it would
    /// leave the switch running.
    fn drop(&mut self) {
        let process = self.process.get_mut();
        if self.pid.get() != process.id() {
            // Its own drop kills what does not end.
            let _ = process.end();
        }
    }
}

impl Switch {
    /// Starts a switch and waits for its control socket.
    pub fn start(stage: &Stage, options: &SwitchOptions, ports: &[Port]) -> Result<Self, Fail> {
        let socket = stage.folder().join(stage.unique("ctl"));
        let mut args = options.args(ports);
        args.extend(["--control".into(), socket.display().to_string()]);
        // Not pinned: at start it measures the cost of a wake-up by another CPU.
        let mut process = stage.start_program("switch", &args, &Place::default())?;
        let mut control = None;
        wait_for("the switch's control socket", START_MAX_S, || {
            process.check()?;
            control = Client::connect(&socket).ok();
            Ok(control.is_some())
        })?;
        let Some(control) = control else { return Err(process.fail("has no control socket")) };
        let switch = Self {
            process: process.into(),
            socket,
            control: control.into(),
            pid: Cell::new(0),
            negotiated: stage.negotiated.clone(),
            boot_s: stage.guest.boot_s(),
        };
        switch.pid.set(pid_in(&switch.ask(&Request::Show)?)?);
        Ok(switch)
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.pid.get()
    }

    /// Hands the switch to a new process of the same program, like `ctl upgrade`. It must have been
    /// started with `--keep`. Returns the report of the new one (`taken_over` of `show`).
    pub fn upgrade(&self) -> Result<Value, Fail> {
        let old = self.id();
        self.ask(&Request::Upgrade { program: None })?;
        self.wait_for_next(old)
    }

    /// Kills its process, and waits for the one that takes over, like [`upgrade`](Self::upgrade).
    pub fn kill(&self) -> Result<Value, Fail> {
        let old = self.id();
        let pid = i32::try_from(old).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| Fail::Cell("the switch has no process".into()))?;
        kill_process(pid, Signal::KILL).map_err(|error| Fail::Cell(error.to_string()))?;
        self.wait_for_next(old)
    }

    fn wait_for_next(&self, old: u32) -> Result<Value, Fail> {
        let mut taken_over = Value::Null;
        wait_for("the next process", START_MAX_S, || {
            self.check()?;
            // Connections to the control socket end with the process.
            let Ok(mut control) = Client::connect(&self.socket) else { return Ok(false) };
            let Ok(show) = control.call(&Request::Show) else { return Ok(false) };
            let pid = pid_in(&show)?;
            if pid != old {
                self.pid.set(pid);
                self.control.replace(control);
                taken_over = show["taken_over"].clone();
            }
            Ok(pid != old)
        })?;
        Ok(taken_over)
    }

    /// Fails, with the end of its log, if it has ended.
    pub fn check(&self) -> Result<(), Fail> {
        self.process.borrow_mut().check()
    }

    /// Returns its log so far.
    pub fn logged(&self) -> String {
        self.process.borrow().logged()
    }

    /// Sends a request to its control socket; returns the reply. The connection is kept: no process
    /// starts that would disturb a measurement.
    pub fn ask(&self, request: &Request) -> Result<Value, Fail> {
        let reply = self.control.borrow_mut().call(request);
        reply.map_err(|error| match self.check() {
            Err(ended) => ended,
            // Another process of the switch may have ended: its log is the same.
            Ok(()) => self.process.borrow().fail(&format!("does not answer: {error}")),
        })
    }

    /// Changes settings like `ctl set`: of a port, of a queue (`p0/0`), or of all (`None`).
    pub fn set(&self, target: Option<&str>, settings: &[&str]) -> Result<(), Fail> {
        let settings: Vec<_> = settings.iter().map(|setting| (*setting).to_string()).collect();
        let request = Request::set(target, &settings).map_err(Fail::Cell)?;
        self.ask(&request).map(|_| ())
    }

    /// Adds a static FDB entry, for a port whose guest does not announce its address.
    pub fn add_static_mac(&self, mac: &str, port: &str) -> Result<(), Fail> {
        let (mac, port) = (mac.into(), port.into());
        self.ask(&Request::FdbAdd { mac, port, vlan: 0 }).map(|_| ())
    }

    /// Returns a port as in the reply to `show`.
    pub fn port(&self, name: &str) -> Result<Value, Fail> {
        let show = self.ask(&Request::Show)?;
        let mut ports = show["ports"].as_array().into_iter().flatten();
        let found = ports.find(|port| port["name"] == name).cloned();
        found.ok_or_else(|| Fail::Cell(format!("the switch has no port {name}")))
    }

    /// Waits until `count` ports are up.
    pub fn wait_up(&self, count: usize) -> Result<(), Fail> {
        self.wait_up_while(count, || Ok(()))
    }

    /// Waits until `count` ports are up; fails as soon as `guests` does: a guest that has ended
    /// will not connect.
    pub fn wait_up_while(
        &self,
        count: usize,
        mut guests: impl FnMut() -> Result<(), Fail>,
    ) -> Result<(), Fail> {
        // 1000 guests take some seconds, more on a busy machine; virtual machines boot first.
        let seconds = START_MAX_S + count as f64 * (0.1 + 12.0 * self.boot_s);
        wait_for(&format!("{count} ports to be up"), seconds, || {
            guests()?;
            let stats = self.ask(&Request::Stats)?;
            let ports = stats["ports"].as_array().into_iter().flatten();
            Ok(ports.filter(|port| port["up"] == true).count() >= count)
        })?;
        self.negotiated.record(&self.ask(&Request::Show)?);
        Ok(())
    }

    /// Reads all counters, and the CPU time of each namespace in `roles`.
    pub fn snapshot(&self, roles: &[&Namespace]) -> Result<Snapshot, Fail> {
        Ok(Snapshot {
            switch_ns: cpu_ns(self.id()),
            waited_ns: waited_ns(self.id()),
            roles_ns: roles.iter().map(|role| role.cpu_ns()).collect(),
            stats: self.ask(&Request::Stats)?,
            busy_ns: busy_ns(),
        })
    }
}

/// The process id in the reply to `show`.
fn pid_in(show: &Value) -> Result<u32, Fail> {
    let pid = show["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
    pid.ok_or_else(|| Fail::Cell("the reply to show has no process id".into()))
}

/// Counters at one point in time.
#[derive(Clone, Debug)]
pub struct Snapshot {
    switch_ns: u64,
    waited_ns: u64,
    roles_ns: Vec<u64>,
    busy_ns: u64,
    /// Counters of the switch, as printed by `ctl stats --json`.
    pub stats: Value,
}

/// A measured window of time.
pub struct Window<'a> {
    switch: &'a Switch,
    roles: Vec<&'a Namespace>,
    before: Snapshot,
}

impl<'a> Window<'a> {
    /// Starts a window. CPU time is accounted to the switch and to each role: a guest is a
    /// namespace with the process of its NIC and all tools in it.
    pub fn open(switch: &'a Switch, roles: &[&'a Namespace]) -> Result<Self, Fail> {
        Ok(Self { switch, roles: roles.into(), before: switch.snapshot(roles)? })
    }

    /// Counts of a switch from its start up to now.
    pub fn since_start(switch: &'a Switch) -> Result<Count, Fail> {
        let now = switch.snapshot(&[])?;
        Ok(Count::between(&Snapshot { stats: Value::Null, ..now.clone() }, &now))
    }

    /// Egress counter at its start, summed over the ports whose names start with `ports`.
    pub fn total(&self, ports: &str, counter: &str) -> f64 {
        let zero = Snapshot { stats: Value::Null, ..self.before.clone() };
        Count::between(&zero, &self.before).egress(ports, counter)
    }

    /// Ends the window. The CPU time of processes that ended in it is not counted.
    pub fn close(self) -> Result<Count, Fail> {
        Ok(Count::between(&self.before, &self.switch.snapshot(&self.roles)?))
    }
}

type Counters = BTreeMap<String, u64>;

/// Counts in a window.
#[derive(Clone, Debug)]
pub struct Count {
    /// Length of the window.
    pub seconds: f64,
    /// CPU time of the switch, all threads, in ns.
    pub switch_ns: u64,
    /// Time that its threads were runnable and waited for a CPU, in ns.
    pub waited_ns: u64,
    /// CPU time of each role, in ns, in the order of [`Window::open`].
    pub roles_ns: Vec<u64>,
    /// Sum of the busy time of all CPUs, in ns; in steps of 10 ms.
    pub busy_ns: u64,
    /// Sums over all workers: `sleeps`, `naps`, `rounds`, `moves`, `cpu_ns`.
    pub workers: Counters,
    /// Locks by name: `taken`, `contended`, `waited_ns`.
    pub locks: BTreeMap<String, Counters>,
    /// By port: ingress and egress, summed over queues.
    ports: BTreeMap<String, [Counters; 2]>,
}

/// Adds `after` - `before` to `sum`. The difference saturates at 0, because a gauge may decrease.
fn add_difference(after: &Value, before: &Value, sum: &mut Counters) {
    for (name, value) in after.as_object().into_iter().flatten() {
        let Some(value) = value.as_u64() else { continue };
        let more = value.saturating_sub(before[name].as_u64().unwrap_or(0));
        *sum.entry(name.clone()).or_default() += more;
    }
}

impl Count {
    fn between(before: &Snapshot, after: &Snapshot) -> Self {
        let uptime = |snapshot: &Snapshot| snapshot.stats["uptime_ns"].as_u64().unwrap_or(0);
        let by_name = |snapshot: &Snapshot, name: &Value| {
            let mut ports = snapshot.stats["ports"].as_array().into_iter().flatten();
            ports.find(|port| port["name"] == *name).cloned().unwrap_or(Value::Null)
        };
        let mut ports = BTreeMap::new();
        for port in after.stats["ports"].as_array().into_iter().flatten() {
            let old = by_name(before, &port["name"]);
            let mut sums = [Counters::new(), Counters::new()];
            for (side, sum) in ["ingress", "egress"].into_iter().zip(&mut sums) {
                for (i, queue) in port[side].as_array().into_iter().flatten().enumerate() {
                    add_difference(queue, &old[side][i], sum);
                }
            }
            ports.insert(port["name"].as_str().unwrap_or_default().into(), sums);
        }
        let mut workers = Counters::new();
        for (i, worker) in after.stats["workers"].as_array().into_iter().flatten().enumerate() {
            add_difference(worker, &before.stats["workers"][i], &mut workers);
        }
        let mut locks = BTreeMap::new();
        for (name, counts) in after.stats["lock_counts"].as_object().into_iter().flatten() {
            let sum = locks.entry(name.clone()).or_default();
            add_difference(counts, &before.stats["lock_counts"][name.as_str()], sum);
        }
        let roles = after.roles_ns.iter().zip(&before.roles_ns);
        Self {
            seconds: (uptime(after).saturating_sub(uptime(before)) as f64 / 1e9)
                .max(f64::MIN_POSITIVE),
            switch_ns: after.switch_ns.saturating_sub(before.switch_ns),
            waited_ns: after.waited_ns.saturating_sub(before.waited_ns),
            roles_ns: roles.map(|(after, before)| after.saturating_sub(*before)).collect(),
            busy_ns: after.busy_ns.saturating_sub(before.busy_ns),
            workers,
            locks,
            ports,
        }
    }

    fn sum(&self, side: usize, ports: &str, counter: &str) -> f64 {
        let ports = self.ports.iter().filter(|(name, _)| name.starts_with(ports));
        ports.map(|(_, sides)| sides[side].get(counter).copied().unwrap_or(0) as f64).sum()
    }

    /// Ingress counter, summed over the ports whose names start with `ports`.
    pub fn ingress(&self, ports: &str, counter: &str) -> f64 {
        self.sum(0, ports, counter)
    }

    /// Egress counter, summed over the ports whose names start with `ports`.
    pub fn egress(&self, ports: &str, counter: &str) -> f64 {
        self.sum(1, ports, counter)
    }

    /// Kicks by guests, of ingress and egress queues.
    pub fn kicks(&self, ports: &str) -> f64 {
        self.ingress(ports, "kicks") + self.egress(ports, "kicks")
    }

    /// Calls to guests, of ingress and egress queues.
    pub fn calls(&self, ports: &str) -> f64 {
        self.ingress(ports, "calls") + self.egress(ports, "calls")
    }

    /// Frames dropped at ingress of ports `from` or at egress of ports `to` (prefixes). It does not
    /// include copies of a flooded frame that were dropped at other ports.
    pub fn drops(&self, from: &str, to: &str) -> f64 {
        let at = |side: usize, ports: &str| -> u64 {
            let ports = self.ports.iter().filter(|(name, _)| name.starts_with(ports));
            let counters = ports.flat_map(|(_, sides)| &sides[side]);
            counters.filter(|(name, _)| name.starts_with("drops_")).map(|(_, value)| value).sum()
        };
        (at(0, from) + at(1, to)) as f64
    }

    /// Converts a count in the window to a rate, in 1/s.
    pub fn per_second(&self, n: f64) -> f64 {
        n / self.seconds
    }

    /// Converts CPU time in the window to per cent of one CPU.
    pub fn percent(&self, ns: u64) -> f64 {
        ns as f64 / self.seconds / 1e7
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn snapshot(uptime_ns: u64, frames: u64, drops: u64) -> Snapshot {
        let queue = json!({"frames": frames, "calls": 1, "drops_no_room": drops, "poll": "spin"});
        let stats = json!({
            "uptime_ns": uptime_ns,
            "ports": [
                {"name": "g0", "ingress": [queue, queue], "egress": [queue]},
                {"name": "up", "ingress": [], "egress": [queue]},
            ],
            "workers": [{"sleeps": frames, "cpu_ns": 5}],
            "lock_counts": {"fdb": {"taken": frames, "contended": drops, "waited_ns": 5}},
        });
        let roles_ns = vec![uptime_ns];
        Snapshot { switch_ns: uptime_ns, waited_ns: 0, roles_ns, busy_ns: 0, stats }
    }

    #[test]
    fn counts_are_differences_summed_over_queues() {
        let count = Count::between(&snapshot(1_000, 10, 0), &snapshot(2_000_001_000, 40, 3));
        assert_eq!(count.seconds, 2.0);
        assert_eq!(count.ingress("g", "frames"), 60.0);
        assert_eq!(count.egress("", "frames"), 60.0);
        assert_eq!(count.egress("up", "frames"), 30.0);
        assert_eq!(count.calls(""), 0.0);
        assert_eq!([count.drops("g", "g"), count.drops("", "up")], [9.0, 9.0]);
        assert_eq!([count.drops("up", "up"), count.drops("up", "g")], [3.0, 3.0]);
        assert_eq!(count.workers["sleeps"], 30);
        let of = |name: &str| count.locks["fdb"][name];
        assert_eq!([of("taken"), of("contended"), of("waited_ns")], [30, 3, 0]);
        assert_eq!(count.percent(count.roles_ns[0]), 100.0);
        assert_eq!(count.per_second(10.0), 5.0);
    }

    #[test]
    fn a_port_added_in_the_window_counts_from_zero() {
        let mut before = snapshot(0, 0, 0);
        before.stats["ports"] = json!([]);
        let count = Count::between(&before, &snapshot(1, 7, 0));
        assert_eq!(count.egress("up", "frames"), 7.0);
    }
}
