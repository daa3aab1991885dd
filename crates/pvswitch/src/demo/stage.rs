//! One switch and its guests: each a process, joined by sockets in the demo's directory.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::Value;
use switch::poll::Policy;

use super::Fail;
use super::measure::{self, Ports, Snapshot, Usage};
use api::control::{Request, call};

use super::process::Process;

/// Who lives at the ports; the place in this list makes the MAC address.
pub const NAMES: [&str; 4] = ["alice", "bob", "carol", "dave"];
/// Longest wait for a process to listen, or to connect.
const READY_MAX: Duration = Duration::from_secs(10);

/// What all stages of one demo have in common.
pub struct Setting {
    /// Our own program.
    pub exe: PathBuf,
    /// Private directory.
    pub dir: PathBuf,
    /// When guests poll and when they sleep.
    pub guest_poll: Policy,
    /// The switch's own CPU, and those left to the guests; `None`: all share all.
    pub cpus: Option<(usize, CpuSet)>,
    /// After so long every process ends by itself, should the demo be killed.
    pub life: Duration,
}

impl Setting {
    /// Starts a process of our own program.
    fn start(&self, name: &'static str, args: &[String]) -> Result<Process, Fail> {
        Process::start(&self.dir, name, &self.exe, args)
    }
}

/// What a guest does.
#[derive(Clone, Copy)]
pub struct Role {
    /// Whose port it is on.
    pub port: &'static str,
    /// `gen --mode`.
    pub mode: &'static str,
    /// Whom it sends to.
    pub peer: &'static str,
    /// Frame size in bytes.
    pub size: u32,
    /// Frames a second; `None`: all it can.
    pub rate: Option<u32>,
    /// When it polls; `None`: as the setting says.
    pub poll: Option<Policy>,
    /// For people.
    pub does: &'static str,
}

impl Role {
    /// A guest that takes what comes.
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
    /// Its policy.
    pub policy: Policy,
    ports: Vec<&'static str>,
    guests: Vec<Guest>,
    /// What was done to the guests at some ports.
    harms: BTreeMap<&'static str, &'static str>,
    switch: Process,
    control: PathBuf,
    /// As last told by the switch.
    known: Ports,
}

fn mac(name: &str) -> String {
    let place = NAMES.iter().position(|n| *n == name).unwrap_or(NAMES.len());
    format!("02:70:76:00:00:{:02x}", place + 1)
}

impl<'a> Stage<'a> {
    /// Starts a switch with these ports and waits until it answers.
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
            harms: BTreeMap::new(),
            switch,
            control,
            known: Ports::new(),
        };
        stage.wait(stop, "the switch to answer", |stage| {
            Ok(stage.control.exists() && stage.ask().is_ok())
        })?;
        Ok(stage)
    }

    /// Where a port listens.
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
                // If it cannot be, it runs elsewhere, and is slower at most.
                let pid = Pid::from_raw(process.id().cast_signed());
                let _ = sched_setaffinity(pid, cpus);
            }
            self.harms.remove(role.port);
            self.guests.push(Guest { role: *role, process });
        }
        self.wait(stop, "the guests to connect", |stage| {
            let (answer, _) =
                call(&stage.control, &Request::Show).map_err(|error| error.to_string())?;
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
                return Err(format!("waited {seconds} s in vain for {what}").into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// An error if a process has ended that should not have.
    pub fn check(&mut self) -> Result<(), Fail> {
        self.switch.check()?;
        self.guests.iter_mut().try_for_each(|guest| guest.process.check())
    }

    /// Asks the switch for its counters. Wakes its control thread, not its workers.
    pub fn ask(&mut self) -> Result<(), Fail> {
        self.known = measure::ports(&self.control)?;
        Ok(())
    }

    /// Counters now, the ports' as last asked for: looking does not disturb.
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

    /// What the guest at a port does.
    pub fn role(&self, port: &str) -> Option<&Role> {
        self.guests.iter().map(|g| &g.role).find(|role| role.port == port)
    }

    fn guest(&self, port: &str) -> Option<&Process> {
        self.guests.iter().find(|g| g.role.port == port).map(|g| &g.process)
    }

    /// What the guest at a port does, or what was done to it.
    pub fn does(&self, port: &str) -> &'static str {
        let does = self.role(port).map_or("not here yet", |role| role.does);
        self.harm(port).unwrap_or(does)
    }

    /// What was done to the guest at a port.
    pub fn harm(&self, port: &str) -> Option<&'static str> {
        self.harms.get(port).copied()
    }

    /// Stops the guest at `port` where it stands; its connection stays.
    pub fn freeze(&mut self, port: &'static str) {
        if let Some(guest) = self.guest(port) {
            guest.signal(Signal::STOP);
            self.harms.insert(port, "frozen");
        }
    }

    /// What the guest at `port` printed last.
    pub fn report(&self, port: &str) -> Option<Value> {
        self.guest(port)?.last_json().ok()
    }

    /// Kills the guest at `port`, without warning.
    pub fn kill(&mut self, port: &'static str) {
        self.guests.retain(|g| g.role.port != port);
        self.harms.insert(port, "killed");
    }

    /// Ends the guest at `port`; returns its totals.
    pub fn leave(&mut self, port: &str) -> Result<Value, Fail> {
        let Some(at) = self.guests.iter().position(|g| g.role.port == port) else {
            return Err(format!("nobody is at port {port}").into());
        };
        let mut guest = self.guests.remove(at).process;
        guest.end()?;
        guest.last_json()
    }

    /// Ends everything in order; an error if the switch does not like it.
    pub fn end(mut self) -> Result<(), Fail> {
        self.guests.clear();
        self.switch.end()
    }
}

fn socket(setting: &Setting, port: &str) -> String {
    setting.dir.join(format!("{port}.sock")).display().to_string()
}
