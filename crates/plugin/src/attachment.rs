//! A container's interface: a port of the switch, and the `pvswitch nic` process behind it.

use std::fs::File;
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use api::Request;
use api::control::{ControlError, call, default_path};
use rustix::process::{Pid, Signal, kill_process};

use crate::ports;
use serde_json::{Value, json};

/// Maximum time until the interface has its carrier, and until its process ends.
const READY_MAX: Duration = Duration::from_secs(15);
const INTERVAL: Duration = Duration::from_millis(20);

/// Keys that are settings.
pub const KEYS: [&str; 7] = ["control", "directory", "state", "ports", "program", "port", "mtu"];

/// Settings, the same for both protocols: keys of a network's configuration or options.
pub struct Settings {
    /// Control socket of the switch.
    pub control: Option<PathBuf>,
    /// Directory of sockets.
    pub directory: PathBuf,
    /// Directory of the plugin's own files: what is attached, logs.
    state: PathBuf,
    /// The switch's include directory, to which ports are written; `None`: ports are added at run
    /// time.
    pub ports: Option<PathBuf>,
    /// The program `pvswitch`.
    program: String,
    /// Options of each port, `key=value,...`.
    port: String,
    /// MTU of the interface.
    mtu: Option<u64>,
}

impl Settings {
    /// Reads the settings; other keys are ignored. Numbers may be strings, as in netavark.
    ///
    /// # Errors
    /// A value of another type; the text names it.
    pub fn read(from: &Value) -> Result<Self, String> {
        let text = |key: &str| match &from[key] {
            Value::Null => Ok(None),
            Value::String(text) if !text.is_empty() => Ok(Some(text.clone())),
            Value::Number(number) if key == "mtu" => Ok(Some(number.to_string())),
            other => Err(format!("'{key}' is {other}; use a string")),
        };
        let [control, directory, state, ports, program, port, mtu] = KEYS.map(text);
        let mtu = mtu?.map(|mtu| match mtu.parse() {
            Ok(mtu) if (68..=9216).contains(&mtu) => Ok(mtu),
            _ => Err(format!("'mtu' is {mtu}; use 68 to 9216")),
        });
        Ok(Self {
            control: control?.map(PathBuf::from),
            directory: directory?.map_or_else(|| "/run/pvswitch/containers".into(), PathBuf::from),
            state: state?.map_or_else(|| "/run/pvswitch-plugin".into(), PathBuf::from),
            ports: ports?.map(PathBuf::from),
            program: program?.unwrap_or_else(|| "pvswitch".into()),
            port: port?.unwrap_or_default(),
            mtu: mtu.transpose()?,
        })
    }

    /// Sends a request to the switch.
    pub fn call(&self, request: &Request) -> Result<Value, ControlError> {
        call(&self.control()?, request)
    }

    /// Path of the control socket.
    pub fn control(&self) -> Result<PathBuf, ControlError> {
        self.control.clone().map_or_else(default_path, Ok)
    }

    /// Attachments to a network: container and interface of each.
    pub fn attached(&self, network: &str) -> Vec<(String, String)> {
        let files = std::fs::read_dir(&self.state).into_iter().flatten().flatten();
        let states = files.filter(|file| file.path().extension().is_some_and(|e| e == "json"));
        let states = states.filter_map(|file| std::fs::read(file.path()).ok());
        let states = states.filter_map(|text| serde_json::from_slice::<Value>(&text).ok());
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let of_network = states.filter(|state| state["network"] == network);
        of_network.map(|state| (text(&state["container"]), text(&state["interface"]))).collect()
    }
}

/// An interface of a container.
pub struct Attachment<'a> {
    pub settings: &'a Settings,
    pub network: &'a str,
    pub container: &'a str,
    pub interface: &'a str,
}

impl Attachment<'_> {
    /// Name of its port: the same for the same interface of the same container.
    pub fn port(&self) -> String {
        // FNV-1a, 40 bits of it: the names of ports have 15 characters.
        let bytes = self.container.bytes().chain([0]).chain(self.interface.bytes());
        let sum = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)
        });
        format!("ctr-{:010x}", sum >> 24)
    }

    fn file(&self, ending: &str) -> PathBuf {
        self.settings.state.join(format!("{}.{ending}", self.port()))
    }

    fn socket(&self) -> PathBuf {
        self.settings.directory.join(format!("{}.sock", self.port()))
    }

    /// Makes the port and the interface, waits for its carrier, and returns its MAC address.
    ///
    /// # Errors
    /// What failed; nothing remains.
    pub fn attach(&self, netns: &str, mac: Option<&str>) -> Result<String, String> {
        self.check_new()?;
        let made = self.make(netns, mac);
        if made.is_err() {
            // The error that matters is the first one.
            let _ = self.detach();
        }
        made
    }

    /// Checks that the container does not have the interface.
    ///
    /// # Errors
    /// It does.
    pub fn check_new(&self) -> Result<(), String> {
        if !self.file("json").exists() {
            return Ok(());
        }
        let (container, interface) = (self.container, self.interface);
        Err(format!("container {container} has {interface} already: delete it first"))
    }

    fn make(&self, netns: &str, mac: Option<&str>) -> Result<String, String> {
        let state = &self.settings.state;
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(state)
            .map_err(|error| format!("{}: {error}", state.display()))?;
        ports::make_directory(self.settings)?;
        let (name, socket) = (self.port(), self.socket());
        let options = match &*self.settings.port {
            "" => String::new(),
            options => format!(",{options}"),
        };
        let port = format!("{name}=vhost-user:{}{options}", socket.display());
        ports::add(self.settings, &name, &port)?;
        let mut nic = self.start(netns, mac)?;
        let state = json!({
            "network": self.network, "container": self.container, "interface": self.interface,
            "pid": nic.id(),
        });
        std::fs::write(self.file("json"), state.to_string()).map_err(|error| error.to_string())?;
        let end = Instant::now() + READY_MAX;
        loop {
            let link = ip(netns, &["-j", "link", "show", "dev", self.interface]);
            let link = link.ok().and_then(|text| serde_json::from_str::<Value>(&text).ok());
            if let Some(link) = link.as_ref().map(|links| &links[0])
                && let Some(flags) = link["flags"].as_array()
                && flags.iter().any(|flag| flag == "LOWER_UP")
            {
                return Ok(link["address"].as_str().unwrap_or_default().into());
            }
            if let Ok(Some(status)) = nic.try_wait() {
                let log = std::fs::read_to_string(self.file("log")).unwrap_or_default();
                return Err(format!("pvswitch nic ended with {status}: {}", log.trim()));
            }
            if Instant::now() > end {
                return Err(format!("no carrier on {} within {READY_MAX:?}", self.interface));
            }
            std::thread::sleep(INTERVAL);
        }
    }

    fn start(&self, netns: &str, mac: Option<&str>) -> Result<Child, String> {
        let socket = format!("vhost-user:{}", self.socket().display());
        let mut log = File::options();
        let log = log.create(true).write(true).truncate(true).mode(0o600).open(self.file("log"));
        let mut command = Command::new(&self.settings.program);
        command.args(["nic", "--connect", &socket, "--tap", self.interface, "--netns", netns]);
        command.args(mac.into_iter().flat_map(|mac| ["--mac", mac]));
        command.args(self.settings.mtu.iter().flat_map(|mtu| ["--mtu".into(), mtu.to_string()]));
        // It outlives the plugin, and must not hold the runtime's pipes.
        command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(log.map_err(|error| error.to_string())?);
        command.spawn().map_err(|error| format!("{}: {error}", self.settings.program))
    }

    /// Its process, if it runs.
    fn process(&self) -> Option<Pid> {
        let state = std::fs::read(self.file("json")).ok()?;
        let state: Value = serde_json::from_slice(&state).ok()?;
        let pid = Pid::from_raw(i32::try_from(state["pid"].as_i64()?).ok()?)?;
        // Another process may have got its number.
        let socket = self.socket().display().to_string();
        let line = std::fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).ok()?;
        String::from_utf8_lossy(&line).contains(&socket).then_some(pid)
    }

    /// Removes the interface and the port; what is not there is skipped.
    ///
    /// # Errors
    /// The process does not end, or the switch does not remove the port.
    pub fn detach(&self) -> Result<(), String> {
        let end = Instant::now() + READY_MAX;
        let mut signal = Signal::TERM;
        while let Some(pid) = self.process() {
            let _ = kill_process(pid, signal);
            if Instant::now() > end {
                return Err(format!("process {} does not exit", pid.as_raw_nonzero()));
            }
            std::thread::sleep(INTERVAL);
            if Instant::now() + READY_MAX / 2 > end {
                signal = Signal::KILL;
            }
        }
        ports::remove(self.settings, &self.port())?;
        for ending in ["json", "log"] {
            let _ = std::fs::remove_file(self.file(ending));
        }
        Ok(())
    }

    /// Checks that the interface is there, with these addresses, and connected.
    ///
    /// # Errors
    /// What is missing.
    pub fn check(&self, netns: &str, addresses: &[&str]) -> Result<(), String> {
        if self.process().is_none() {
            return Err(format!("the process of {} is not running", self.interface));
        }
        let show = self.settings.call(&Request::Show).map_err(|error| error.to_string())?;
        let name = self.port();
        let mut ports = show["ports"].as_array().into_iter().flatten();
        if !ports.any(|port| port["name"] == *name && port["connected"] == true) {
            return Err(format!("port {name} of the switch is missing, or not connected"));
        }
        let shown = ip(netns, &["-o", "addr", "show", "dev", self.interface])?;
        let shown: Vec<_> = shown.split_whitespace().filter_map(parse).collect();
        let is_there = |address: &str| parse(address).is_some_and(|own| shown.contains(&own));
        match addresses.iter().find(|address| !is_there(address)) {
            Some(address) => Err(format!("{} lacks the address {address}", self.interface)),
            None => Ok(()),
        }
    }
}

/// An address with its prefix, in whichever form it is written.
fn parse(text: &str) -> Option<(IpAddr, u8)> {
    let (address, prefix) = text.split_once('/')?;
    Some((address.parse().ok()?, prefix.parse().ok()?))
}

/// Adds addresses with their prefix, and routes as (destination, gateway), to an interface.
///
/// # Errors
/// What `ip` reports.
pub fn configure(
    netns: &str,
    interface: &str,
    addresses: &[&str],
    routes: &[(&str, Option<&str>)],
) -> Result<(), String> {
    let has_six = addresses.iter().any(|address| address.contains(':'));
    if has_six {
        enable_six(netns, interface)?;
    }
    for address in addresses {
        ip(netns, &["addr", "add", address, "dev", interface])?;
    }
    if has_six {
        wait_unique(netns, interface)?;
    }
    for (destination, gateway) in routes {
        let via = gateway.iter().flat_map(|gateway| ["via", gateway]);
        let args = ["route", "add", destination].into_iter().chain(via).chain(["dev", interface]);
        ip(netns, &args.collect::<Vec<_>>())?;
    }
    Ok(())
}

/// Enables IPv6 on an interface: runtimes disable it in namespaces that have no IPv6 address yet.
fn enable_six(netns: &str, interface: &str) -> Result<(), String> {
    let path = format!("/proc/sys/net/ipv6/conf/{interface}/disable_ipv6");
    let enter = format!("--net={netns}");
    let mut command = Command::new("nsenter");
    // The value that a process reads there is that of its own namespace.
    command.args([&*enter, "sh", "-c", "echo 0 >\"$0\"", &*path]).stdin(Stdio::null());
    let done = command.output().map_err(|error| format!("nsenter: {error}"))?;
    if done.status.success() {
        return Ok(());
    }
    let why = String::from_utf8_lossy(&done.stderr);
    Err(format!("IPv6 on {interface}: {}; is it disabled in the kernel?", why.trim()))
}

/// Waits until no other host has been found to have an IPv6 address of the interface (RFC 4862,
/// duplicate address detection): a program in the container could not bind to it before.
fn wait_unique(netns: &str, interface: &str) -> Result<(), String> {
    let end = Instant::now() + READY_MAX;
    loop {
        let shown = ip(netns, &["-6", "-o", "addr", "show", "dev", interface, "scope", "global"])?;
        if let Some(line) = shown.lines().find(|line| line.contains("dadfailed")) {
            let address = line.split_whitespace().find(|word| word.contains('/'));
            return Err(format!("another host has the address {}", address.unwrap_or_default()));
        }
        if !shown.contains("tentative") {
            return Ok(());
        }
        if Instant::now() > end {
            return Err(format!("IPv6 addresses of {interface}: tentative for {READY_MAX:?}"));
        }
        std::thread::sleep(INTERVAL);
    }
}

/// Runs `ip` in a network namespace and returns its output.
fn ip(netns: &str, args: &[&str]) -> Result<String, String> {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={netns}")).arg("ip").args(args).stdin(Stdio::null());
    let done = command.output().map_err(|error| format!("nsenter: {error}"))?;
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    let why = String::from_utf8_lossy(&done.stderr);
    Err(format!("ip {}: {}", args.join(" "), why.trim()))
}

/// Checks the name of an interface: it is an argument of `ip`, and of `pvswitch nic`.
///
/// # Errors
/// It is not one.
pub fn check_interface(name: &str) -> Result<(), String> {
    let is_name = (1..=15).contains(&name.len()) && !name.starts_with(['-', '.']);
    let bad = |c: char| !c.is_ascii_graphic() || "/:%".contains(c);
    if is_name && !name.contains(bad) {
        Ok(())
    } else {
        Err(format!("bad interface name '{name}'"))
    }
}

/// Checks that a network namespace exists.
///
/// # Errors
/// It does not.
pub fn check_netns(path: &str) -> Result<(), String> {
    if Path::new(path).is_absolute() && Path::new(path).exists() {
        return Ok(());
    }
    Err(format!("no network namespace '{path}'"))
}
