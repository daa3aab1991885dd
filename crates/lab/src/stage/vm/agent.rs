//! Init of a guest: brings its interface up, then runs the commands that arrive on its channels.
//!
//! A channel carries lines of JSON and runs one command at a time.
//! Requests: `{"run":[ARG...]}`, `{"read":FILE}`, `{"signal":N}`, `{"reset":N}`.
//! Replies: `{"out":TEXT}`, `{"err":TEXT}`, `{"exit":N}`, and `{"done":N}` to a reset.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::mount::{MountFlags, mount};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use serde_json::{Value, json};

use super::channel::{self, CHANNELS};
use crate::error::Error;

/// Name of a guest's interface.
pub const DEVICE: &str = "eth0";
/// Mount point of a tmpfs for writable files; the lab needs nothing that it hides.
const TMPFS: &str = "/run";
/// Search path of tools; the kernel sets none for init.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Major number of terminals.
const TTY_MAJOR: u32 = 4;
/// Ports of the virtio-serial device, if there is one.
const PORTS: &str = "/sys/class/virtio-ports";

/// Start parameters of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Setup {
    /// Address of its interface: `10.9.0.10/16`.
    pub address: String,
    /// MAC address of its interface.
    pub mac: String,
    /// MTU of its interface.
    pub mtu: u16,
    /// Offloads to turn off.
    pub without: String,
    /// Kernel modules to load, in this order.
    pub modules: Vec<String>,
}

impl Setup {
    /// Returns the parameters as arguments for the kernel command line (no blanks).
    pub fn args(&self) -> Vec<String> {
        let list = |words: &mut dyn Iterator<Item = &str>| words.collect::<Vec<_>>().join(",");
        vec![
            format!("address={}", self.address),
            format!("mac={}", self.mac),
            format!("mtu={}", self.mtu),
            format!("without={}", list(&mut self.without.split_whitespace())),
            format!("modules={}", list(&mut self.modules.iter().map(String::as_str))),
        ]
    }

    /// Parses these arguments; ignores others that the kernel passes.
    pub fn parse(args: &[String]) -> Self {
        let mut setup = Self::default();
        for (key, value) in args.iter().filter_map(|arg| arg.split_once('=')) {
            match key {
                "address" => setup.address = value.into(),
                "mac" => setup.mac = value.into(),
                "mtu" => setup.mtu = value.parse().unwrap_or(1500),
                "without" => setup.without = value.replace(',', " "),
                "modules" => {
                    let names = value.split(',').filter(|name| !name.is_empty());
                    setup.modules = names.map(String::from).collect();
                }
                _ => {}
            }
        }
        setup
    }
}

/// Runs as init of a guest; returns only on error.
pub fn serve(args: &[String]) -> Result<u8, Error> {
    if std::process::id() != 1 {
        return Err(Error::usage("guest serve: runs only as init (process 1) of a guest"));
    }
    let failed = |what: String| Error::failed(what);
    let setup = Setup::parse(args);
    set_up(&setup).map_err(failed)?;
    for n in 1..=CHANNELS {
        let path = format!("{TMPFS}/{}", channel::name(n));
        let device = open(&path, n).map_err(|error| failed(format!("{path}: {error}")))?;
        let writer = device.try_clone().map_err(|error| failed(format!("{path}: {error}")))?;
        std::thread::spawn(move || Channel::new(writer).serve(device));
    }
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// Opens a channel's device: the virtio-serial port of its name, else the terminal of its number.
fn open(path: &str, n: u32) -> std::io::Result<File> {
    let port = port_device(Path::new(PORTS), &channel::name(n));
    let (major, minor) = port.unwrap_or((TTY_MAJOR, n));
    let device = makedev(major, minor);
    mknodat(CWD, path, FileType::CharacterDevice, Mode::from_raw_mode(0o600), device)?;
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    if port.is_none() {
        set_raw(&file)?;
    }
    Ok(file)
}

/// Returns the device numbers of the virtio-serial port of that name.
pub(super) fn port_device(ports: &Path, name: &str) -> Option<(u32, u32)> {
    let mut folders = fs::read_dir(ports).ok()?.flatten().map(|entry| entry.path());
    let of = |folder: &Path, file: &str| fs::read_to_string(folder.join(file)).unwrap_or_default();
    let folder = folders.find(|folder| of(folder, "name").trim() == name)?;
    let numbers = of(&folder, "dev");
    let (major, minor) = numbers.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Sets a terminal to raw mode.
fn set_raw(tty: &File) -> rustix::io::Result<()> {
    let mut termios = tcgetattr(tty)?;
    termios.make_raw();
    tcsetattr(tty, OptionalActions::Now, &termios)
}

/// Mounts file systems, loads modules and configures the interface.
fn set_up(setup: &Setup) -> Result<(), String> {
    for (kind, at) in [("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", TMPFS)] {
        mount(kind, at, kind, MountFlags::empty(), None)
            .map_err(|error| format!("mount -t {kind} {at}: {error}"))?;
    }
    for module in &setup.modules {
        let file = File::open(module).map_err(|error| format!("{module}: {error}"))?;
        rustix::system::finit_module(&file, c"", 0)
            .map_err(|error| format!("{module}: {error}"))?;
    }
    // The same settings as in the namespaces of other guests.
    for (key, value) in [
        ("ipv6/conf/all/disable_ipv6", "1"),
        ("ipv6/conf/default/disable_ipv6", "1"),
        ("ipv4/tcp_congestion_control", "reno"),
    ] {
        let path = format!("/proc/sys/net/{key}");
        if Path::new(&path).exists() {
            fs::write(&path, value).map_err(|error| format!("{path}: {error}"))?;
        }
    }
    let Setup { address, mac, mtu, without, .. } = setup;
    let device = DEVICE;
    let features: String =
        without.split_whitespace().flat_map(|name| [" ", name, " off"]).collect();
    let offloads = format!("ethtool -K {device}{features}");
    for line in [
        "ip link set lo up",
        &format!("ip link set {device} address {mac} mtu {mtu}"),
        &format!("ip addr add {address} dev {device}"),
        if features.is_empty() { "" } else { &offloads },
        &format!("ip link set {device} up"),
    ] {
        let mut words = line.split_whitespace();
        let Some(program) = words.next() else { continue };
        let done = Command::new(program).args(words).env("PATH", PATH).output();
        let done = done.map_err(|error| format!("{line}: {error}"))?;
        if !done.status.success() {
            let error = String::from_utf8_lossy(&done.stderr);
            return Err(format!("{line}: {} ({})", error.trim(), done.status));
        }
    }
    Ok(())
}

/// Process id of a channel's command while it runs.
type Running = Arc<Mutex<Option<Pid>>>;

/// The guest's end of a channel, which runs one command at a time.
pub(super) struct Channel<W> {
    writer: Arc<Mutex<W>>,
    running: Running,
}

impl<W: Write + Send + 'static> Channel<W> {
    /// Creates a channel that writes its replies to `writer`.
    pub fn new(writer: W) -> Self {
        Self { writer: Arc::new(Mutex::new(writer)), running: Running::default() }
    }

    /// Serves requests until the end of `requests`.
    pub fn serve(&self, requests: impl Read) {
        let mut worker = None;
        for line in BufReader::new(requests).lines() {
            let Ok(line) = line else { return };
            // An incomplete request: its sender was killed.
            let Ok(request) = serde_json::from_str::<Value>(&line) else { continue };
            if let Some(n) = request["signal"].as_i64() {
                self.signal(i32::try_from(n).ok().and_then(Signal::from_named_raw));
            } else if let Some(path) = request["read"].as_str() {
                send(&self.writer, &json!({ "out": fs::read_to_string(path).unwrap_or_default() }));
                send(&self.writer, &json!({ "exit": 0 }));
            } else if let Some(words) = request["run"].as_array() {
                let words: Vec<String> =
                    words.iter().filter_map(|word| Some(word.as_str()?.into())).collect();
                worker = self.run(&words);
            } else if let Some(n) = request["reset"].as_u64() {
                self.signal(Some(Signal::KILL));
                if let Some(worker) = worker.take() {
                    let _: std::thread::Result<()> = worker.join();
                }
                send(&self.writer, &json!({ "done": n }));
            }
        }
    }

    fn signal(&self, signal: Option<Signal>) {
        let Ok(running) = self.running.lock() else { return };
        if let (Some(pid), Some(signal)) = (*running, signal) {
            let _ = kill_process(pid, signal);
        }
    }

    /// Starts a command. The returned thread sends its exit status, after its output.
    fn run(&self, words: &[String]) -> Option<std::thread::JoinHandle<()>> {
        let (program, args) = words.split_first()?;
        let mut command = Command::new(program);
        command.args(args).env("PATH", PATH).env("TMPDIR", TMPFS).stdin(Stdio::null());
        let mut child = match command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() {
            Ok(child) => child,
            Err(error) => {
                send(&self.writer, &json!({ "err": format!("{program}: {error}\n") }));
                send(&self.writer, &json!({ "exit": 127 }));
                return None;
            }
        };
        let pid = Pid::from_child(&child);
        if let Ok(mut running) = self.running.lock() {
            *running = Some(pid);
        }
        let out = child.stdout.take().map(|pipe| self.forward("out", pipe));
        let err = child.stderr.take().map(|pipe| self.forward("err", pipe));
        let (writer, running) = (Arc::clone(&self.writer), Arc::clone(&self.running));
        Some(std::thread::spawn(move || {
            // Not reaped before `running` is cleared: no signal can reach a reused id.
            let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
            for thread in [out, err].into_iter().flatten() {
                let _: std::thread::Result<()> = thread.join();
            }
            if let Ok(mut running) = running.lock() {
                *running = None;
            }
            let status = child.wait().ok();
            let code = status.and_then(|status| {
                status.code().or_else(|| status.signal().map(|signal| 128 + signal))
            });
            send(&writer, &json!({ "exit": code.unwrap_or(1) }));
        }))
    }

    /// Sends the output in a pipe until its end. It is expected to be ASCII: other characters are
    /// replaced if a read splits them.
    fn forward(
        &self,
        key: &'static str,
        mut pipe: impl Read + Send + 'static,
    ) -> std::thread::JoinHandle<()> {
        let writer = Arc::clone(&self.writer);
        std::thread::spawn(move || {
            let mut bytes = [0; 2048];
            while let Ok(n @ 1..) = pipe.read(&mut bytes) {
                send(&writer, &json!({ key: String::from_utf8_lossy(&bytes[..n]) }));
            }
        })
    }
}

/// Sends a reply as one line. Errors are ignored: the receiver has closed the channel.
fn send<W: Write>(writer: &Mutex<W>, reply: &Value) {
    if let Ok(mut writer) = writer.lock() {
        let _ = writer.write_all(format!("{reply}\n").as_bytes());
    }
}
