//! First program of a guest: brings its interface up, then runs what is asked for on its channels.
//!
//! Lines of JSON on each channel, one command at a time:
//! `{"run":[ARG...]}`, `{"read":FILE}`, `{"signal":N}`, `{"reset":N}` come;
//! `{"out":TEXT}`, `{"err":TEXT}`, `{"exit":N}`, and `{"done":N}` for a reset go.

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

/// A guest's interface.
pub const DEVICE: &str = "eth0";
/// Where files can be written: nothing that the lab needs is below it.
const FILES: &str = "/run";
/// Search path of tools; a kernel sets none for its first program.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Major number of a terminal.
const TTY: u32 = 4;
/// Ports of a virtio-serial device, where there is one.
const PORTS: &str = "/sys/class/virtio-ports";

/// Start parameters of a guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Setup {
    /// Of its interface: `10.9.0.10/16`.
    pub address: String,
    /// MAC address of its interface.
    pub mac: String,
    /// MTU of its interface.
    pub mtu: u16,
    /// Offloads to turn off.
    pub without: String,
    /// Modules of the kernel, in the order to load them.
    pub modules: Vec<String>,
}

impl Setup {
    /// As arguments without blanks.
    pub fn words(&self) -> Vec<String> {
        let list = |words: &mut dyn Iterator<Item = &str>| words.collect::<Vec<_>>().join(",");
        vec![
            format!("address={}", self.address),
            format!("mac={}", self.mac),
            format!("mtu={}", self.mtu),
            format!("without={}", list(&mut self.without.split_whitespace())),
            format!("modules={}", list(&mut self.modules.iter().map(String::as_str))),
        ]
    }

    /// From these arguments; what else the kernel hands over is left alone.
    pub fn read(words: &[String]) -> Self {
        let mut setup = Self::default();
        for (key, value) in words.iter().filter_map(|word| word.split_once('=')) {
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

/// Serves as a guest's first program; does not return while the guest lives.
pub fn serve(words: &[String]) -> Result<u8, Error> {
    if std::process::id() != 1 {
        return Err(Error::usage("this is the first program of a guest; nobody else needs it"));
    }
    let failed = |what: String| Error::failed(what);
    let setup = Setup::read(words);
    prepare(&setup).map_err(failed)?;
    for n in 1..=CHANNELS {
        let path = format!("{FILES}/{}", channel::name(n));
        let device = open(&path, n).map_err(|error| failed(format!("{path}: {error}")))?;
        let answers = device.try_clone().map_err(|error| failed(format!("{path}: {error}")))?;
        std::thread::spawn(move || Channel::new(answers).serve(device));
    }
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// A channel's device: the port of its name, else the terminal of its number.
fn open(path: &str, n: u32) -> std::io::Result<File> {
    let port = port(Path::new(PORTS), &channel::name(n));
    let (major, minor) = port.unwrap_or((TTY, n));
    let device = makedev(major, minor);
    mknodat(CWD, path, FileType::CharacterDevice, Mode::from_raw_mode(0o600), device)?;
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    if port.is_none() {
        raw(&file)?;
    }
    Ok(file)
}

/// Numbers of the device of a port, by its name.
pub(super) fn port(ports: &Path, name: &str) -> Option<(u32, u32)> {
    let mut folders = fs::read_dir(ports).ok()?.flatten().map(|entry| entry.path());
    let of = |folder: &Path, file: &str| fs::read_to_string(folder.join(file)).unwrap_or_default();
    let folder = folders.find(|folder| of(folder, "name").trim() == name)?;
    let numbers = of(&folder, "dev");
    let (major, minor) = numbers.trim().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Bytes as they are: no echo, no lines.
fn raw(tty: &File) -> rustix::io::Result<()> {
    let mut how = tcgetattr(tty)?;
    how.make_raw();
    tcsetattr(tty, OptionalActions::Now, &how)
}

fn prepare(setup: &Setup) -> Result<(), String> {
    for (kind, at) in [("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", FILES)] {
        mount(kind, at, kind, MountFlags::empty(), None)
            .map_err(|error| format!("mount -t {kind} {at}: {error}"))?;
    }
    for module in &setup.modules {
        let file = File::open(module).map_err(|error| format!("{module}: {error}"))?;
        rustix::system::finit_module(&file, c"", 0)
            .map_err(|error| format!("{module}: {error}"))?;
    }
    // As in the namespaces of other guests.
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
            let said = String::from_utf8_lossy(&done.stderr);
            return Err(format!("{line}: {} ({})", said.trim(), done.status));
        }
    }
    Ok(())
}

/// What a channel's command is known by, while it runs.
type Running = Arc<Mutex<Option<Pid>>>;

/// One command at a time.
pub(super) struct Channel<W> {
    answers: Arc<Mutex<W>>,
    running: Running,
}

impl<W: Write + Send + 'static> Channel<W> {
    /// One that answers there.
    pub fn new(answers: W) -> Self {
        Self { answers: Arc::new(Mutex::new(answers)), running: Running::default() }
    }

    /// Until there is nothing more to read.
    pub fn serve(&self, requests: impl Read) {
        let mut worker = None;
        for line in BufReader::new(requests).lines() {
            let Ok(line) = line else { return };
            // What is no request was cut off when its sender was killed.
            let Ok(request) = serde_json::from_str::<Value>(&line) else { continue };
            if let Some(n) = request["signal"].as_i64() {
                self.signal(i32::try_from(n).ok().and_then(Signal::from_named_raw));
            } else if let Some(path) = request["read"].as_str() {
                say(&self.answers, &json!({ "out": fs::read_to_string(path).unwrap_or_default() }));
                say(&self.answers, &json!({ "exit": 0 }));
            } else if let Some(words) = request["run"].as_array() {
                let words: Vec<String> =
                    words.iter().filter_map(|word| Some(word.as_str()?.into())).collect();
                worker = self.run(&words);
            } else if let Some(n) = request["reset"].as_u64() {
                self.signal(Some(Signal::KILL));
                if let Some(worker) = worker.take() {
                    let _: std::thread::Result<()> = worker.join();
                }
                say(&self.answers, &json!({ "done": n }));
            }
        }
    }

    fn signal(&self, signal: Option<Signal>) {
        let Ok(running) = self.running.lock() else { return };
        if let (Some(pid), Some(signal)) = (*running, signal) {
            let _ = kill_process(pid, signal);
        }
    }

    /// Starts a command; a thread sends its output and exit status.
    fn run(&self, words: &[String]) -> Option<std::thread::JoinHandle<()>> {
        let (program, args) = words.split_first()?;
        let mut command = Command::new(program);
        command.args(args).env("PATH", PATH).env("TMPDIR", FILES).stdin(Stdio::null());
        let mut child = match command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() {
            Ok(child) => child,
            Err(error) => {
                say(&self.answers, &json!({ "err": format!("{program}: {error}\n") }));
                say(&self.answers, &json!({ "exit": 127 }));
                return None;
            }
        };
        let pid = Pid::from_child(&child);
        if let Ok(mut running) = self.running.lock() {
            *running = Some(pid);
        }
        let out = child.stdout.take().map(|pipe| self.tell("out", pipe));
        let err = child.stderr.take().map(|pipe| self.tell("err", pipe));
        let (answers, running) = (Arc::clone(&self.answers), Arc::clone(&self.running));
        Some(std::thread::spawn(move || {
            // Its id is not free before it is waited for below: no other one gets a signal.
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
            say(&answers, &json!({ "exit": code.unwrap_or(1) }));
        }))
    }

    /// Sends the output of a pipe until its end. Tools write plain ASCII; of anything else a
    /// letter at the end of a piece is lost.
    fn tell(
        &self,
        key: &'static str,
        mut pipe: impl Read + Send + 'static,
    ) -> std::thread::JoinHandle<()> {
        let answers = Arc::clone(&self.answers);
        std::thread::spawn(move || {
            let mut bytes = [0; 2048];
            while let Ok(n @ 1..) = pipe.read(&mut bytes) {
                say(&answers, &json!({ key: String::from_utf8_lossy(&bytes[..n]) }));
            }
        })
    }
}

/// A whole line at once. Where nobody listens any more there is nobody to tell of it.
fn say<W: Write>(answers: &Mutex<W>, what: &Value) {
    if let Ok(mut answers) = answers.lock() {
        let _ = answers.write_all(format!("{what}\n").as_bytes());
    }
}
