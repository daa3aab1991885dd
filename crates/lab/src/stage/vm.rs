//! Guests with a kernel of their own, and the network driver that it comes with.
//!
//! ```text
//!   lab ── Process ── `guest run FOLDER CMD` ══ two named pipes ══ `guest serve` ── CMD
//!                     (host: prints what CMD prints)                (first program in it)
//! ```
//!
//! Both ends of the pipes are `pvswitch-lab`, with hidden subcommands.
//!
//! A virtual machine is the only thing in its network namespace on the host: what runs in it, and
//! the machine itself, is what that namespace's processes cost. Its root is the host's file system,
//! read-only, so all tools are there.

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
pub use self::image::kernel_below;

/// Longest time that a guest takes to start, beside others that do the same.
const BOOT_MAX: Duration = Duration::from_secs(300);

/// What a guest with a kernel's network is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GuestKind {
    /// A network namespace, and our own front end with a TAP interface.
    #[default]
    Netns,
    /// User-Mode Linux with its own virtio-net driver.
    Uml,
    /// A stock kernel with its own virtio-net driver, in QEMU's software emulation.
    Qemu,
}

impl GuestKind {
    /// All of them, by name.
    pub const NAMES: [&str; 3] = ["netns", "uml", "qemu"];

    /// Whether guests of that name are virtual machines, with a stock driver.
    pub fn is_machine(name: &str) -> bool {
        name.parse().is_ok_and(|kind: Self| kind != Self::Netns)
    }

    /// What a run takes longer for each of its guests, in seconds.
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
            _ => Err(format!("{s}: no such guests; there are {}", Self::NAMES.join(", "))),
        }
    }
}

/// What there is of a virtual machine beside its process.
#[derive(Debug)]
pub(super) struct Vm {
    /// Of its channels.
    folder: PathBuf,
    /// Starts commands in it.
    agent: PathBuf,
    /// Whether it has answered.
    ready: Cell<bool>,
}

impl Vm {
    /// Waits until it has booted.
    pub fn ready(&self) -> Result<(), String> {
        if !self.ready.get() {
            channel::read(&self.folder, "/proc/version", BOOT_MAX)?;
            self.ready.set(true);
        }
        Ok(())
    }

    /// A file of its.
    pub fn read(&self, file: &str) -> Result<String, String> {
        channel::read(&self.folder, file, channel::ANSWER_MAX)
    }

    /// The words that run what follows them in it.
    pub fn words(&self) -> [String; 4] {
        let path = |path: &Path| path.display().to_string();
        [path(&self.agent), "guest".into(), "run".into(), path(&self.folder)]
    }

    /// Starts one; it boots meanwhile.
    pub fn start(
        stage: &Stage,
        port: &Port,
        options: &NicOptions,
        (address, mac): (&str, &str),
    ) -> Result<(Self, Process), Fail> {
        has_no(options).map_or(Ok(()), |what| {
            Err(Fail::Missing(format!("stock driver: has no {what} (--guest {})", stage.guest)))
        })?;
        let Some(socket) = port.connect.strip_prefix("vhost-user:") else {
            let what = format!("stock driver: speaks virtio only (--guest {})", stage.guest);
            return Err(Fail::Missing(what));
        };
        let folder = stage.folder().join(stage.unique(&format!("vm-{}", port.name)));
        let failed = |error: std::io::Error| Fail::Over(format!("{}: {error}", folder.display()));
        channel::make(&folder).map_err(failed)?;
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
            console: inherited(to_console).map_err(failed)?,
            channels: (1..=CHANNELS)
                .map(|n| open(&folder, n))
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
            GuestKind::Qemu => qemu::words(&plan),
            GuestKind::Netns | GuestKind::Uml => uml::words(&plan),
        }?;
        let mut args: Vec<String> = ["--net", "--"].map(String::from).into();
        args.extend(words);
        let place = Place { netns: None, cpus: &stage.guest_cpus };
        let process = stage.start(&format!("vm-{}", port.name), "unshare", &args, &place)?;
        drop(plan);
        // What the kernel says goes to the log of its process.
        let mut log = OpenOptions::new().append(true).open(process.log()).map_err(failed)?;
        std::thread::spawn(move || std::io::copy(&mut console, &mut log));
        stage.machines.fetch_add(1, Ordering::Relaxed);
        let vm = Self { folder, agent: stage.agent.clone(), ready: Cell::new(false) };
        Ok((vm, process))
    }
}

/// The image of a stage, made once.
fn image_of(stage: &Stage) -> Result<&Image, Fail> {
    if let Some(image) = stage.image.get() {
        return Ok(image);
    }
    let image = Image::make(&stage.kernel, stage.folder())?;
    Ok(stage.image.get_or_init(|| image))
}

/// The pipes of a channel, kept open in the machine's process. For both ways each: so there is a
/// reader from the start and until it ends, and without a writer it would take a pipe for done.
fn open(folder: &Path, n: u32) -> std::io::Result<[File; 2]> {
    let both = |path: &PathBuf| OpenOptions::new().read(true).write(true).open(path);
    let [to, from] = channel::pipes(folder, n);
    Ok([inherited(both(&to)?)?, inherited(both(&from)?)?])
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
