//! Guests with a kernel of their own, and the network driver that it comes with.
//!
//! ```text
//!   lab ── Process ── `lab guest run FOLDER CMD` ══ two named pipes ══ `lab guest serve` ── CMD
//!                     (host: says what CMD says)                        (first program in it)
//! ```
//!
//! A virtual machine is the only thing in its network namespace on the host: what runs in it, and
//! the machine itself, is what that namespace's processes cost. Its root is the host's file system,
//! read-only, so all tools are there.

use std::cell::Cell;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::Ordering;

use rustix::io::{FdFlags, fcntl_setfd};

use self::agent::Setup;
use super::process::need;
use super::{NicOptions, Place, Port, Process, Stage};
use crate::study::Fail;

mod agent;
mod channel;
#[cfg(test)]
mod tests;

pub use self::agent::serve;
pub use self::channel::relay;

/// Commands that run in a guest at once.
const CHANNELS: u32 = 8;
/// Time that a guest in User-Mode Linux takes to start, in seconds of one CPU.
const UML_BOOT_S: f64 = 2.0;
const UML: &str = "linux.uml";
const UML_MODULES: &str = "/usr/lib/uml/modules";
const MODULES: [&str; 3] =
    ["net/core/failover.ko", "drivers/net/net_failover.ko", "drivers/net/virtio_net.ko"];

/// What a guest with a kernel's network is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GuestKind {
    /// A network namespace, and our own front end with a TAP interface.
    #[default]
    Netns,
    /// User-Mode Linux with its own virtio-net driver.
    Uml,
}

impl GuestKind {
    /// What a run takes longer for each of its guests, in seconds.
    pub fn boot_s(self) -> f64 {
        match self {
            Self::Netns => 0.0,
            Self::Uml => UML_BOOT_S,
        }
    }
}

impl fmt::Display for GuestKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Netns => "netns",
            Self::Uml => "uml",
        })
    }
}

impl FromStr for GuestKind {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "netns" => Ok(Self::Netns),
            "uml" => Ok(Self::Uml),
            _ => Err(format!("{s}: no such guests; there are netns and uml")),
        }
    }
}

/// What there is of a virtual machine beside its process.
#[derive(Debug)]
pub(super) struct Vm {
    /// Of its channels.
    folder: PathBuf,
    /// Starts commands in it.
    program: PathBuf,
    /// Whether it has answered.
    ready: Cell<bool>,
}

impl Vm {
    /// Waits until it has booted.
    pub fn ready(&self) -> Result<(), String> {
        if !self.ready.get() {
            self.read("/proc/version")?;
            self.ready.set(true);
        }
        Ok(())
    }

    /// A file of its.
    pub fn read(&self, file: &str) -> Result<String, String> {
        channel::read(&self.folder, file)
    }

    /// The words that run what follows them in it.
    pub fn words(&self) -> [String; 5] {
        let path = |path: &Path| path.display().to_string();
        [path(&self.program), "lab".into(), "guest".into(), "run".into(), path(&self.folder)]
    }

    /// Starts one; it boots meanwhile.
    pub fn start(
        stage: &Stage,
        port: &Port,
        options: &NicOptions,
        (address, mac): (&str, &str),
    ) -> Result<(Self, Process), Fail> {
        has_no(options).map_or(Ok(()), |what| {
            Err(Fail::Cell(format!("stock driver: has no {what} (--guest {})", stage.guest)))
        })?;
        let Some(socket) = port.connect.strip_prefix("vhost-user:") else {
            let what = "stock driver: guests in User-Mode Linux speak virtio only";
            return Err(Fail::Cell(what.into()));
        };
        need(UML)?;
        let folder = stage.folder().join(stage.unique(&format!("vm-{}", port.name)));
        let failed = |error: std::io::Error| Fail::Over(format!("{}: {error}", folder.display()));
        channel::make(&folder).map_err(failed)?;
        let setup = Setup {
            address: address.into(),
            mac: mac.into(),
            mtu: options.mtu,
            without: options.without.clone(),
            modules: modules()?,
        };
        let (mut console, to_console) = std::io::pipe().map_err(failed)?;
        let mut open: Vec<File> = Vec::new();
        let mut channels = Vec::new();
        for n in 1..=CHANNELS {
            let pair = channel::pipes(&folder, n);
            // For both ways each: without a writer the guest would take its terminal to be gone.
            let pair = pair.map(|path| OpenOptions::new().read(true).write(true).open(path));
            for file in pair {
                open.push(inherited(file.map_err(failed)?).map_err(failed)?);
            }
            let fds = open[open.len() - 2..].iter().map(|file| format!("fd:{}", file.as_raw_fd()));
            channels.push(format!("con{n}={}", fds.collect::<Vec<_>>().join(",")));
        }
        let to_console =
            inherited(File::from(std::os::fd::OwnedFd::from(to_console))).map_err(failed)?;
        let mut args: Vec<String> = ["--net", "--", UML].map(String::from).into();
        args.extend([
            "mem=256M".into(),
            "root=/dev/root rootfstype=hostfs rootflags=/ ro devtmpfs.mount=0".into(),
            format!("uml_dir={}/", folder.display()),
            format!("virtio_uml.device={socket}:1"),
            format!("loglevel=4 con=null con0=null,fd:{}", to_console.as_raw_fd()),
            format!("init={}", stage.program.display()),
        ]);
        let mut args: Vec<String> =
            args.iter().flat_map(|arg| arg.split(' ').map(String::from)).collect();
        args.extend(channels);
        args.extend(["--", "lab", "guest", "serve"].map(String::from));
        args.extend(setup.words());
        let place = Place { netns: None, cpus: &stage.guest_cpus };
        let process = stage.start(&format!("vm-{}", port.name), "unshare", &args, &place)?;
        drop((open, to_console));
        // What the kernel says goes to the log of its process.
        let mut log = OpenOptions::new().append(true).open(process.log()).map_err(failed)?;
        std::thread::spawn(move || std::io::copy(&mut console, &mut log));
        stage.machines.fetch_add(1, Ordering::Relaxed);
        let vm = Self { folder, program: stage.program.clone(), ready: Cell::new(false) };
        Ok((vm, process))
    }
}

/// The same, kept open in processes that are started.
fn inherited(file: File) -> std::io::Result<File> {
    fcntl_setfd(&file, FdFlags::empty())?;
    Ok(file)
}

/// What is asked of an interface that a stock driver cannot do.
fn has_no(options: &NicOptions) -> Option<String> {
    let NicOptions { poll, kick, set, connect, without: _, mtu: _, more } = options;
    // What it does is what event is: it takes interrupts, and polls while there is more.
    if !matches!(poll.as_str(), "" | "event" | "napi") {
        return Some(format!("poll policy '{poll}'"));
    }
    if kick != "event" {
        return Some(format!("kick policy '{kick}'"));
    }
    let other = [&set[..], more, std::slice::from_ref(connect)].concat();
    other
        .into_iter()
        .find(|word| !word.is_empty())
        .map(|word| format!("option '{}'", word.trim_start_matches(',')))
}

/// The driver's, from the package of the kernel.
fn modules() -> Result<Vec<String>, Fail> {
    let kernels = std::fs::read_dir(UML_MODULES).into_iter().flatten().flatten();
    for kernel in kernels {
        let all = MODULES.map(|module| kernel.path().join("kernel").join(module));
        if all.iter().all(|path| path.exists()) {
            return Ok(all.iter().map(|path| path.display().to_string()).collect());
        }
    }
    Err(Fail::Missing(format!(
        "{UML_MODULES}: no virtio_net there (Debian package user-mode-linux)"
    )))
}
