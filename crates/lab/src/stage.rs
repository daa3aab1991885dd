//! The environment of processes: network namespaces, CPUs, and a private folder.
//!
//! ```text
//!   Switch ── port p0 ── Nic (namespace g0: TAP, iperf3, ping)      guests' CPUs
//!     │  ├─── port p1 ── Gen (frames of exact sizes and rates)
//!     │  └─── port up ── Wire (namespace w: TAP, or a link of 1 Gbit/s)
//!     └ control socket: Snapshot, Window
//! ```
//!
//! Everything runs in the namespaces of the lab's own process and lives as long as the values here:
//! dropping a [`Process`] kills it, and a namespace ends with its last process. Errors include the
//! end of the log of the process concerned.

mod cpu;
mod datagrams;
mod guest;
mod installed;
mod netns;
mod process;
mod switch;
mod tools;
pub(crate) mod vm;

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use tempfile::TempDir;

pub use self::cpu::{Switches, busy_ns, cpu_ns, is_traced, switches, waited_ns};
pub use self::datagrams::Datagrams;
pub use self::guest::{Class, Gen, Link, Nic, NicOptions, REPLAY_RING, Wire};
pub use self::installed::need;
pub use self::netns::Namespace;
pub use self::process::{Place, Process, START_MAX_S, folder, sleep, wait_for};
pub use self::switch::{Count, Port, Snapshot, Switch, SwitchOptions, Window};
pub use self::tools::{Flow, Iperf, Ping, PingPlan, Pings, Traffic};
pub use self::vm::GuestKind;

use self::process::output;
use crate::error::Fail;
use crate::machine::{Features, Rivals};

/// Protocol between a guest and the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proto {
    /// Virtqueues over vhost-user.
    Virtio,
    /// Xen's rings, on a machine without Xen.
    Xen,
}

impl Proto {
    /// Kind of port and of connection on the command line.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Virtio => "vhost-user",
            Self::Xen => "xen-local",
        }
    }
}

impl fmt::Display for Proto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Virtio => "virtio",
            Self::Xen => "xen",
        })
    }
}

impl FromStr for Proto {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "virtio" => Ok(Self::Virtio),
            "xen" => Ok(Self::Xen),
            _ => Err(format!("unknown protocol '{s}': use virtio or xen")),
        }
    }
}

/// Environment shared by all runs of a study.
#[derive(Debug)]
pub struct Stage {
    /// The program measured.
    pub program: PathBuf,
    /// `pvswitch-lab`, which runs commands in virtual machines (on the host and in the guest).
    pub agent: PathBuf,
    /// CPUs of the switch's workers, in this order.
    pub switch_cpus: Vec<usize>,
    /// CPUs of guests.
    pub guest_cpus: Vec<usize>,
    /// Protocol of guests, unless it is an axis of the study.
    pub proto: Proto,
    /// Kind of guest of each [`Nic`].
    pub guest: GuestKind,
    /// Folder with a stock kernel for guests: `boot/vmlinuz-VERSION`, `lib/modules/VERSION`.
    pub kernel: PathBuf,
    /// Folder of the results, for files that a run leaves there.
    pub results: PathBuf,
    image: OnceLock<vm::Image>,
    dir: TempDir,
    next: AtomicU32,
    machines: AtomicU32,
    negotiated: Negotiated,
    rivals: Mutex<Rivals>,
    real_time: OnceLock<bool>,
}

/// Features that guests negotiated; shared by a stage and its switches.
#[derive(Clone, Debug, Default)]
struct Negotiated(Arc<Mutex<Features>>);

impl Negotiated {
    /// Records the features in `show`, the reply of a switch whose ports are up.
    fn record(&self, show: &serde_json::Value) {
        let words = |list: &serde_json::Value| {
            let words = list.as_array()?.iter().filter_map(|word| word.as_str());
            Some(words.collect::<Vec<_>>().join(" "))
        };
        for port in show["ports"].as_array().into_iter().flatten() {
            let kind = port["kind"].as_str().and_then(|kind| kind.split(':').next());
            let features = words(&port["features"]).or_else(|| words(&port["xen"]["takes"]));
            if let (Some(kind), Some(features), Ok(mut all)) = (kind, features, self.0.lock()) {
                all.entry(kind.into()).or_default().insert(features);
            }
        }
    }
}

impl Stage {
    /// Creates a stage that runs `program`. Its folder is removed when it is dropped.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub fn new(
        program: &Path,
        switch_cpus: &[usize],
        guest_cpus: &[usize],
        proto: Proto,
    ) -> Result<Self, Fail> {
        let dir = process::folder()
            .map_err(|error| Fail::Over(format!("no folder for sockets and logs: {error}")))?;
        Ok(Self {
            program: program.into(),
            agent: PathBuf::new(),
            switch_cpus: switch_cpus.into(),
            guest_cpus: guest_cpus.into(),
            proto,
            guest: GuestKind::Netns,
            kernel: "/".into(),
            results: dir.path().into(),
            image: OnceLock::new(),
            dir,
            next: AtomicU32::new(0),
            machines: AtomicU32::new(0),
            negotiated: Negotiated::default(),
            rivals: Mutex::default(),
            real_time: OnceLock::new(),
        })
    }

    /// Returns the features that guests negotiated with this stage's switches.
    pub fn features(&self) -> Features {
        self.negotiated.0.lock().map(|all| all.clone()).unwrap_or_default()
    }

    /// Returns the command lines of other switches so far, by name.
    pub fn rivals(&self) -> Rivals {
        self.rivals.lock().map(|all| all.clone()).unwrap_or_default()
    }

    /// Records a command line of another switch. Names of this stage's folder and numbers of its
    /// files are replaced, so that equal commands are equal.
    pub fn record_rival(&self, name: &str, words: &[&str]) {
        let folder = self.folder().display().to_string();
        let words: Vec<_> = words.iter().map(|word| word.replace(&folder, "DIR")).collect();
        let words = words.iter().map(|word| without_numbers(word)).collect::<Vec<_>>().join(" ");
        if let Ok(mut all) = self.rivals.lock() {
            all.entry(name.into()).or_default().insert(words);
        }
    }

    /// Number of virtual machines started so far.
    pub fn machines(&self) -> u32 {
        self.machines.load(Ordering::Relaxed)
    }

    /// Folder of the processes' logs and sockets.
    pub fn folder(&self) -> &Path {
        self.dir.path()
    }

    /// CPUs of switch and guests, for tools that are neither; sorted.
    pub fn all_cpus(&self) -> Vec<usize> {
        let mut all = [&self.switch_cpus[..], &self.guest_cpus].concat();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Whether processes may run in a real-time scheduling class.
    fn allows_real_time(&self) -> bool {
        let words = ["--rr", "1", "true"].map(String::from);
        *self.real_time.get_or_init(|| output("chrt", &words, &Place::default()).is_ok())
    }

    /// Returns a name that is unique within this stage.
    pub fn unique(&self, name: &str) -> String {
        format!("{name}-{}", self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Creates a folder of its own in [`folder`](Self::folder).
    pub fn subfolder(&self, name: &str) -> Result<PathBuf, Fail> {
        let dir = self.folder().join(self.unique(name));
        std::fs::create_dir(&dir)
            .map_err(|error| Fail::Over(format!("{}: {error}", dir.display())))?;
        Ok(dir)
    }

    /// Starts a process of the program measured.
    pub fn start_program(
        &self,
        name: &str,
        args: &[String],
        place: &Place,
    ) -> Result<Process, Fail> {
        let program = self.program.display().to_string();
        self.start(name, &program, args, place)
    }

    /// Starts a process; its output goes to files in the stage's folder.
    pub fn start(
        &self,
        name: &str,
        program: &str,
        args: &[String],
        place: &Place,
    ) -> Result<Process, Fail> {
        Process::start(self.dir.path(), &self.unique(name), program, args, place)
    }
}

/// Replaces the numbers of [`Stage::unique`] in a word: `DIR/v0-17` is `DIR/v0-N`, and `lab-17` is
/// `lab-N`.
fn without_numbers(word: &str) -> String {
    if word.strip_prefix("lab-").is_some_and(|n| n.parse::<u32>().is_ok()) {
        return "lab-N".into();
    }
    let Some((before, name)) = word.split_once("DIR/") else { return word.into() };
    let (name, rest) = name
        .split_once('/')
        .map_or((name, String::new()), |(name, rest)| (name, format!("/{rest}")));
    let name = name.rsplit_once('-').map_or(name.to_string(), |(name, _)| format!("{name}-N"));
    format!("{before}DIR/{name}{rest}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn equal_commands_of_other_switches_are_one() {
        let stage = Stage::new(Path::new("/bin/true"), &[0], &[0], Proto::Virtio).unwrap();
        for _ in 0..2 {
            let socket = stage.folder().join(stage.unique("v0")).join("db-1.sock");
            let option = format!("--vdev=net_vhost0,iface={}", socket.display());
            let prefix = stage.unique("lab");
            stage.record_rival("testpmd", &["dpdk-testpmd", "-l", "1-2", &prefix, &option]);
        }
        let words =
            "dpdk-testpmd -l 1-2 lab-N --vdev=net_vhost0,iface=DIR/v0-N/db-1.sock".to_string();
        assert_eq!(stage.rivals(), [("testpmd".to_string(), [words].into())].into());
    }

    #[test]
    fn features_are_kept_by_kind_of_port() {
        let negotiated = Negotiated::default();
        let port = |kind: &str, features: &[&str]| json!({"kind": kind, "features": features});
        let xen = json!({"kind": "xen-local:/x", "xen": {"takes": ["sg", "gso"]}});
        negotiated.record(&json!({"ports": [port("vhost-user:/a", &["CSUM", "TSO"]), xen]}));
        negotiated.record(&json!({"ports": [port("vhost-user:/b", &["CSUM"]), {"kind": "null"}]}));
        negotiated.record(&json!({"ports": [port("vhost-user:/a", &["CSUM", "TSO"])]}));
        let all = negotiated.0.lock().unwrap().clone();
        assert_eq!(
            json!(all),
            json!({"vhost-user": ["CSUM", "CSUM TSO"], "xen-local": ["sg gso"]})
        );
    }
}
