//! A switch and its guests: processes connected by sockets in the demo's directory.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::Value;
use switch::poll::Policy;

use super::Fail;
use super::measure::{self, Ports, Snapshot, Usage};
use api::Request;
use api::control::call;

use super::process::Process;

/// Names of the ports; the index gives the MAC address.
pub const NAMES: [&str; 4] = ["alice", "bob", "carol", "dave"];
/// Maximum time to wait for a process to listen or connect.
const READY_MAX: Duration = Duration::from_secs(10);

/// Settings shared by all stages of a demo.
pub struct Setting {
    /// Path of this program.
    pub exe: PathBuf,
    /// Private directory.
    pub dir: PathBuf,
    /// Poll policy of the guests.
    pub guest_poll: Policy,
    /// The switch's CPU, and those of the guests; `None`: all share one.
    pub cpus: Option<(usize, CpuSet)>,
    /// Time after which each process exits by itself, in case the demo is killed.
    pub life: Duration,
}

impl Setting {
    /// Starts a process of this program.
    fn start(&self, name: &'static str, args: &[String]) -> Result<Process, Fail> {
        Process::start(&self.dir, name, &self.exe, args)
    }
}

/// Behaviour of a guest.
#[derive(Clone, Copy)]
pub struct Role {
    /// Its port.
    pub port: &'static str,
    /// `gen --mode`.
    pub mode: &'static str,
    /// Destination port of its frames.
    pub peer: &'static str,
    /// Frame size in bytes.
    pub size: u32,
    /// Frames per second; `None`: as many as possible.
    pub rate: Option<u32>,
    /// Poll policy; `None`: that of the setting.
    pub poll: Option<Policy>,
    /// Description on the screen.
    pub does: &'static str,
}

impl Role {
    /// A guest that receives frames and drops them.
    pub const fn sink(port: &'static str, does: &'static str) -> Self {
        Self { port, mode: "sink", peer: NAMES[0], size: 60, rate: None, poll: None, does }
    }
}

struct Guest {
    role: Role,
    process: Process,
}

/// A running switch with guests.
pub struct Stage<'a> {
    setting: &'a Setting,
    /// The switch's poll policy.
    pub policy: Policy,
    ports: Vec<&'static str>,
    guests: Vec<Guest>,
    /// Faults injected at ports.
    injected: BTreeMap<&'static str, &'static str>,
    switch: Process,
    control: PathBuf,
    /// Counters of the last query.
    known: Ports,
}

fn mac(name: &str) -> String {
    let place = NAMES.iter().position(|n| *n == name).unwrap_or(NAMES.len());
    format!("02:70:76:00:00:{:02x}", place + 1)
}

impl<'a> Stage<'a> {
    /// Starts a switch with these ports and waits until it replies.
    pub fn new(
        setting: &'a Setting,
        policy: Policy,
        ports: &[&'static str],
        stop: &dyn Fn() -> bool,
    ) -> Result<Self, Fail> {
        let control = setting.dir.join("control.sock");
        let mut args = vec!["run".into(), "--quiet".into()];
        args.extend(["--poll".into(), policy.to_string()]);
        args.extend(["--control".into(), control.display().to_string()]);
        args.extend(["--duration".into(), setting.life.as_secs_f64().to_string()]);
        if let Some((cpu, _)) = &setting.cpus {
            args.extend(["--cpus".into(), cpu.to_string()]);
        }
        for port in ports {
            args.extend(["--port".into(), format!("{port}=vhost-user:{}", socket(setting, port))]);
        }
        let switch = setting.start("switch", &args)?;
        let mut stage = Self {
            setting,
            policy,
            ports: ports.to_vec(),
            guests: Vec::new(),
            injected: BTreeMap::new(),
            switch,
            control,
            known: Ports::new(),
        };
        stage.wait(stop, "the switch to reply", |stage| {
            Ok(stage.control.exists() && stage.query().is_ok())
        })?;
        Ok(stage)
    }

    /// Socket path of a port.
    pub fn socket(&self, port: &str) -> String {
        socket(self.setting, port)
    }

    /// Starts guests and waits until the switch serves them.
    pub fn join(&mut self, roles: &[Role], stop: &dyn Fn() -> bool) -> Result<(), Fail> {
        for role in roles {
            let mut args = vec!["gen".into(), "--json".into()];
            let mut option = |name: &str, value: String| args.extend([format!("--{name}"), value]);
            option("connect", format!("vhost-user:{}", self.socket(role.port)));
            option("mode", role.mode.into());
            option("mac", mac(role.port));
            option("peer", mac(role.peer));
            option("size", role.size.to_string());
            option("poll", role.poll.unwrap_or(self.setting.guest_poll).to_string());
            option("interval", "0.25".into());
            option("duration", self.setting.life.as_secs_f64().to_string());
            if let Some(rate) = role.rate {
                option("rate", rate.to_string());
            }
            let process = self.setting.start(role.port, &args)?;
            if let Some((_, cpus)) = &self.setting.cpus {
                // Without affinity it is at most slower.
                let pid = Pid::from_raw(process.id().cast_signed());
                let _ = sched_setaffinity(pid, cpus);
            }
            self.injected.remove(role.port);
            self.guests.push(Guest { role: *role, process });
        }
        self.wait(stop, "the guests to connect", |stage| {
            let answer = call(&stage.control, &Request::Show).map_err(|error| error.to_string())?;
            let ports = answer["ports"].as_array().map(Vec::as_slice).unwrap_or_default();
            let up = |name: &str| ports.iter().any(|p| p["name"] == name && p["up"] == true);
            Ok(roles.iter().all(|role| up(role.port)))
        })
    }

    fn wait(
        &mut self,
        stop: &dyn Fn() -> bool,
        what: &str,
        mut ready: impl FnMut(&mut Self) -> Result<bool, Fail>,
    ) -> Result<(), Fail> {
        let by = Instant::now() + READY_MAX;
        loop {
            if stop() {
                return Err(Fail::Interrupted);
            }
            self.check()?;
            if ready(self)? {
                return Ok(());
            }
            if Instant::now() > by {
                let seconds = READY_MAX.as_secs();
                return Err(format!("timed out after {seconds} s waiting for {what}").into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns an error if a process has exited unexpectedly.
    pub fn check(&mut self) -> Result<(), Fail> {
        self.switch.check()?;
        self.guests.iter_mut().try_for_each(|guest| guest.process.check())
    }

    /// Queries the switch for its counters. Wakes its control thread, not its workers.
    pub fn query(&mut self) -> Result<(), Fail> {
        self.known = measure::ports(&self.control)?;
        Ok(())
    }

    /// Usage of the processes now, and the ports' counters of the last query; does not wake the
    /// switch.
    pub fn snapshot(&self) -> Snapshot {
        let of = |g: &Guest| (g.role.port.to_string(), Usage::of(g.process.id()));
        Snapshot {
            at: Instant::now(),
            ports: self.known.clone(),
            switch: Usage::of(self.switch.id()),
            guests: self.guests.iter().map(of).collect(),
        }
    }

    /// Names of the ports, in order.
    pub fn ports(&self) -> &[&'static str] {
        &self.ports
    }

    /// Behaviour of the guest at a port.
    pub fn role(&self, port: &str) -> Option<&Role> {
        self.guests.iter().map(|g| &g.role).find(|role| role.port == port)
    }

    fn guest(&self, port: &str) -> Option<&Process> {
        self.guests.iter().find(|g| g.role.port == port).map(|g| &g.process)
    }

    /// Description of the guest at a port, or of the injected fault.
    pub fn does(&self, port: &str) -> &'static str {
        let does = self.role(port).map_or("not started", |role| role.does);
        self.fault(port).unwrap_or(does)
    }

    /// Fault injected at a port.
    pub fn fault(&self, port: &str) -> Option<&'static str> {
        self.injected.get(port).copied()
    }

    /// Stops the guest at `port` with SIGSTOP; its connection stays open.
    pub fn freeze(&mut self, port: &'static str) {
        if let Some(guest) = self.guest(port) {
            guest.signal(Signal::STOP);
            self.injected.insert(port, "frozen");
        }
    }

    /// The last JSON that the guest at `port` printed.
    pub fn report(&self, port: &str) -> Option<Value> {
        self.guest(port)?.last_json().ok()
    }

    /// Kills the guest at `port` with SIGKILL.
    pub fn kill(&mut self, port: &'static str) {
        self.guests.retain(|g| g.role.port != port);
        self.injected.insert(port, "killed");
    }

    /// Stops the guest at `port` and returns its totals.
    pub fn leave(&mut self, port: &str) -> Result<Value, Fail> {
        let Some(at) = self.guests.iter().position(|g| g.role.port == port) else {
            return Err(format!("no guest at port {port}").into());
        };
        let mut guest = self.guests.remove(at).process;
        guest.end()?;
        guest.last_json()
    }

    /// Stops all processes in order; an error unless the switch exits with success.
    pub fn end(mut self) -> Result<(), Fail> {
        self.guests.clear();
        self.switch.end()
    }
}

fn socket(setting: &Setting, port: &str) -> String {
    setting.dir.join(format!("{port}.sock")).display().to_string()
}
