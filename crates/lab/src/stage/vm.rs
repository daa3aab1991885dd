//! Virtual machines: guests with a kernel of their own and its network driver.
//!
//! ```text
//!   lab ── Process ── `guest run FOLDER CMD` ══ two named pipes ══ `guest serve` ── CMD
//!                     (host: prints the output of CMD)              (init of the guest)
//! ```
//!
//! Both ends of the pipes are `pvswitch-lab`, with hidden subcommands.
//!
//! A virtual machine has a network namespace of its own on the host: the CPU time of that
//! namespace's processes is the machine's, with everything that runs in it. Its root is the host's
//! file system, read-only, so it has the same tools.

use std::cell::Cell;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::io::{FdFlags, fcntl_setfd};

use self::agent::Setup;
use self::channel::CHANNELS;
use self::plan::Plan;
use super::{NicOptions, Place, Port, Process, Stage};
use crate::error::Fail;

mod agent;
mod channel;
mod image;
mod plan;
mod qemu;
#[cfg(test)]
mod tests;
mod uml;

pub use self::agent::{DEVICE, serve};
pub use self::channel::relay;
pub(super) use self::image::Image;
pub use self::image::newest_kernel;
pub use self::uml::run as uml;

/// Longest boot time of a guest while others boot, too.
const BOOT_TIMEOUT: Duration = Duration::from_secs(300);

/// Kind of guest with a kernel's network stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GuestKind {
    /// A network namespace, with our own front-end and a TAP interface.
    #[default]
    Netns,
    /// User-Mode Linux with its virtio-net driver.
    Uml,
    /// A stock kernel with its virtio-net driver, in QEMU (software emulation).
    Qemu,
}

impl GuestKind {
    /// Names of all kinds.
    pub const NAMES: [&str; 3] = ["netns", "uml", "qemu"];

    /// Whether the kind of that name is a virtual machine, with a stock driver.
    pub fn is_machine(name: &str) -> bool {
        name.parse().is_ok_and(|kind: Self| kind != Self::Netns)
    }

    /// Boot time that each guest adds to a run, in seconds.
    pub fn boot_s(self) -> f64 {
        match self {
            Self::Netns => 0.0,
            Self::Uml => uml::BOOT_S,
            Self::Qemu => qemu::BOOT_S,
        }
    }
}

impl fmt::Display for GuestKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Netns => "netns",
            Self::Uml => "uml",
            Self::Qemu => "qemu",
        })
    }
}

impl FromStr for GuestKind {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "netns" => Ok(Self::Netns),
            "uml" => Ok(Self::Uml),
            "qemu" => Ok(Self::Qemu),
            _ => Err(format!("unknown kind of guest '{s}': use one of {}", Self::NAMES.join(", "))),
        }
    }
}

/// The host's end of a virtual machine, apart from its process.
#[derive(Debug)]
pub(super) struct Vm {
    /// Folder of its channels.
    folder: PathBuf,
    /// `pvswitch-lab`, which relays commands.
    agent: PathBuf,
    /// Whether it is known to have booted.
    ready: Cell<bool>,
}

impl Vm {
    /// Waits until it has booted.
    pub fn wait_ready(&self) -> Result<(), String> {
        if !self.ready.get() {
            channel::read(&self.folder, "/proc/version", BOOT_TIMEOUT)?;
            self.ready.set(true);
        }
        Ok(())
    }

    /// Returns a file in it.
    pub fn read(&self, file: &str) -> Result<String, String> {
        channel::read(&self.folder, file, channel::REPLY_TIMEOUT)
    }

    /// Returns the words that, put before a command, run it in the machine.
    pub fn command_prefix(&self) -> [String; 4] {
        let path = |path: &Path| path.display().to_string();
        [path(&self.agent), "guest".into(), "run".into(), path(&self.folder)]
    }

    /// Starts a machine with an IP address and a MAC address. It boots in the background.
    pub fn start(
        stage: &Stage,
        port: &Port,
        options: &NicOptions,
        address: &str,
        mac: &str,
    ) -> Result<(Self, Process), Fail> {
        unsupported(options).map_or(Ok(()), |what| {
            Err(Fail::Missing(format!("--guest {}: its driver lacks {what}", stage.guest)))
        })?;
        let Some(socket) = port.connect.strip_prefix("vhost-user:") else {
            let what = format!("--guest {}: its driver supports virtio only", stage.guest);
            return Err(Fail::Missing(what));
        };
        let folder = stage.folder().join(stage.unique(&format!("vm-{}", port.name)));
        let failed = |error: std::io::Error| Fail::Over(format!("{}: {error}", folder.display()));
        channel::create(&folder).map_err(failed)?;
        let (mut console, to_console) = std::io::pipe().map_err(failed)?;
        let to_console = File::from(std::os::fd::OwnedFd::from(to_console));
        let plan = Plan {
            agent: &stage.agent,
            image: match stage.guest {
                GuestKind::Qemu => Some(image_of(stage)?),
                GuestKind::Netns | GuestKind::Uml => None,
            },
            socket,
            folder: &folder,
            console: inheritable(to_console).map_err(failed)?,
            channels: (1..=CHANNELS)
                .map(|n| open_pipes(&folder, n))
                .collect::<std::io::Result<_>>()
                .map_err(failed)?,
            setup: Setup {
                address: address.into(),
                mac: mac.into(),
                mtu: options.mtu,
                without: options.without.clone(),
                modules: Vec::new(),
            },
        };
        let words = match stage.guest {
            GuestKind::Qemu => qemu::command_line(&plan),
            GuestKind::Netns | GuestKind::Uml => uml::command_line(&plan),
        }?;
        let mut args: Vec<String> = ["--net", "--"].map(String::from).into();
        args.extend(words);
        let place = Place { netns: None, cpus: &stage.guest_cpus };
        let process = stage.start(&format!("vm-{}", port.name), "unshare", &args, &place)?;
        drop(plan);
        // The console goes to the log of the machine's process.
        let mut log = OpenOptions::new().append(true).open(process.log()).map_err(failed)?;
        std::thread::spawn(move || std::io::copy(&mut console, &mut log));
        stage.machines.fetch_add(1, Ordering::Relaxed);
        let vm = Self { folder, agent: stage.agent.clone(), ready: Cell::new(false) };
        Ok((vm, process))
    }
}

/// Returns the image of a stage; it is made once.
fn image_of(stage: &Stage) -> Result<&Image, Fail> {
    if let Some(image) = stage.image.get() {
        return Ok(image);
    }
    let image = Image::make(&stage.kernel, stage.folder())?;
    Ok(stage.image.get_or_init(|| image))
}

/// Opens the pipes of a channel for the machine's process, each for reading and writing: opening
/// the other end then never blocks, and the machine never reads an end of file.
fn open_pipes(folder: &Path, n: u32) -> std::io::Result<[File; 2]> {
    let both = |path: &PathBuf| OpenOptions::new().read(true).write(true).open(path);
    let [to, from] = channel::pipes(folder, n);
    Ok([inheritable(both(&to)?)?, inheritable(both(&from)?)?])
}

/// Clears close-on-exec.
fn inheritable(file: File) -> std::io::Result<File> {
    fcntl_setfd(&file, FdFlags::empty())?;
    Ok(file)
}

/// Returns the first option that a stock driver does not support.
fn unsupported(options: &NicOptions) -> Option<String> {
    let NicOptions { poll, kick, set, connect, without: _, mtu: _, more } = options;
    // A stock driver uses NAPI: interrupts, then polling until the ring is empty.
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
