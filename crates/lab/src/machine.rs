//! The machine: `machine.json`, and CPU use by other programs.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::provenance::Built;

/// A machine and its settings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// Model of its CPUs.
    pub cpu: String,
    /// Number of usable CPUs.
    pub cpus: usize,
    /// Kernel and its build.
    pub kernel: String,
    /// Mitigations of CPU vulnerabilities, by name.
    pub mitigations: BTreeMap<String, String>,
    /// Governor of CPU 0; empty where there is none, as in most virtual machines.
    pub governor: String,
    /// Name of the hypervisor, if known; empty: none.
    pub hypervisor: String,
    /// Huge pages that were free when it began, reserved ones included.
    #[serde(default)]
    pub huge_pages_free: u64,
    /// Huge pages of the default size, free or not; 0 in results of older versions.
    #[serde(default)]
    pub huge_pages_total: u64,
    /// Default size of huge pages, in KiB; 0: unknown.
    #[serde(default)]
    pub huge_page_kib: u64,
    /// When the kernel uses huge pages by itself: `always`, `madvise` or `never`.
    #[serde(default)]
    pub transparent_huge_pages: String,
    /// CPUs of the switch's workers.
    pub switch_cpus: Vec<usize>,
    /// CPUs of the guests.
    pub guest_cpus: Vec<usize>,
    /// Protocol of guests, unless it is an axis of the plan.
    #[serde(default)]
    pub proto: String,
    /// Kind of guests: `netns`, `uml` or `qemu`.
    #[serde(default)]
    pub guest: String,
    /// Versions of the program and of the tools used.
    pub versions: BTreeMap<String, String>,
    /// Features that guests negotiated: by kind of port, each distinct list.
    #[serde(default)]
    pub features: Features,
    /// The program measured, as built; empty in results of older versions.
    #[serde(default)]
    pub built: Built,
    /// Command lines of other switches measured, by name.
    #[serde(default, skip_serializing_if = "Rivals::is_empty")]
    pub rivals: Rivals,
    /// The command line that these results are of.
    pub command: String,
}

const VULNERABILITIES: &str = "/sys/devices/system/cpu/vulnerabilities";

fn line(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_string()
}

/// Features that guests negotiated so far: by kind of port, each list that was seen.
pub type Features = BTreeMap<String, BTreeSet<String>>;
/// Command lines of other switches: by name, each that was run.
pub type Rivals = BTreeMap<String, BTreeSet<String>>;

impl Machine {
    /// Describes this machine, with the versions of `tools`.
    pub fn here(tools: &[&str], switch_cpus: &[usize], guest_cpus: &[usize]) -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |names: &[&str]| {
            let fields = info.lines().filter_map(|line| line.split_once(':'));
            let found = fields.into_iter().find(|(name, _)| names.contains(&name.trim()));
            found.map_or(String::new(), |(_, value)| value.trim().to_string())
        };
        let vulnerabilities = fs::read_dir(VULNERABILITIES);
        let mitigations = vulnerabilities.into_iter().flatten().flatten().map(|entry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            (name, line(&entry.path().to_string_lossy()))
        });
        let mut versions = BTreeMap::from([("pvswitch".into(), version_of_itself())]);
        for tool in tools {
            if let Some(version) = version(tool) {
                versions.insert((*tool).into(), version);
            }
        }
        let hypervised = field(&["flags", "Features"]).split(' ').any(|flag| flag == "hypervisor");
        let hypervisor = match line("/sys/hypervisor/type") {
            name if name.is_empty() && hypervised => line("/sys/class/dmi/id/sys_vendor"),
            name => name,
        };
        Self {
            cpu: field(&["model name", "Hardware", "cpu"]),
            cpus: allowed_cpus().len(),
            kernel: format!(
                "{} {}",
                line("/proc/sys/kernel/osrelease"),
                line("/proc/sys/kernel/version")
            ),
            mitigations: mitigations.collect(),
            governor: line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            hypervisor: if hypervised && hypervisor.is_empty() { "yes".into() } else { hypervisor },
            huge_pages_free: huge_pages_free(),
            huge_pages_total: meminfo("HugePages_Total:"),
            huge_page_kib: huge_page_kib(),
            transparent_huge_pages: selected(&line("/sys/kernel/mm/transparent_hugepage/enabled")),
            switch_cpus: switch_cpus.into(),
            guest_cpus: guest_cpus.into(),
            proto: String::new(),
            guest: String::new(),
            versions,
            features: BTreeMap::new(),
            built: Built::default(),
            rivals: BTreeMap::new(),
            command: String::new(),
        }
    }

    /// The first difference that prevents a common table, if any.
    pub fn differs(&self, other: &Self) -> Option<String> {
        let pairs = [
            ("CPU", &self.cpu, &other.cpu),
            ("number of CPUs", &self.cpus.to_string(), &other.cpus.to_string()),
            ("kernel", &self.kernel, &other.kernel),
            ("switch's CPUs", &list(&self.switch_cpus), &list(&other.switch_cpus)),
            ("guests' CPUs", &list(&self.guest_cpus), &list(&other.guest_cpus)),
            ("protocol", &self.proto, &other.proto),
            ("guests", &self.guest, &other.guest),
        ];
        let (what, was, is) = pairs.into_iter().find(|(_, a, b)| a != b)?;
        Some(format!("{what} then '{was}', now '{is}'"))
    }

    /// Whether the same program was measured; results of older versions do not say.
    pub fn differs_in_program(&self, other: &Self) -> Option<String> {
        let digest = |machine: &Self| machine.built.digest().map(String::from);
        let (was, is) = digest(self).zip(digest(other)).filter(|(was, is)| was != is)?;
        let named = |machine: &Self, digest: String| {
            format!("{} (SHA-256 {}...)", machine.built.commit, &digest[..digest.len().min(12)])
        };
        Some(format!("program then {}, now {}", named(self, was), named(other, is)))
    }
}

/// Returns CPUs as a list of the command line.
pub fn list(cpus: &[usize]) -> String {
    cpus.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn version_of_itself() -> String {
    // Of the workspace: all of its crates have one version.
    env!("CARGO_PKG_VERSION").into()
}

/// First line of what a tool says of its version.
fn version(tool: &str) -> Option<String> {
    let ask = |option: &str| {
        let output =
            Command::new(tool).arg(option).stdin(std::process::Stdio::null()).output().ok()?;
        let text = if output.stdout.is_empty() { output.stderr } else { output.stdout };
        let line = String::from_utf8_lossy(&text).lines().next()?.trim().to_string();
        (output.status.success() && !line.is_empty()).then_some(line)
    };
    ask("--version").or_else(|| ask("-V"))
}

/// Free huge pages of the default size.
pub fn huge_pages_free() -> u64 {
    meminfo("HugePages_Free:")
}

/// Default size of huge pages, in KiB; 0: the kernel has none.
pub fn huge_page_kib() -> u64 {
    meminfo("Hugepagesize:")
}

/// A number of `/proc/meminfo`; 0 if it is not there.
fn meminfo(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let value = text.lines().find_map(|line| line.strip_prefix(name));
    value.and_then(|value| value.trim().trim_end_matches(" kB").parse().ok()).unwrap_or(0)
}

/// The word in brackets: `always [madvise] never`.
fn selected(words: &str) -> String {
    let word = words.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    word.map_or(String::new(), |(word, _)| word.into())
}

/// The CPUs that this process may use.
pub fn allowed_cpus() -> Vec<usize> {
    let set = rustix::thread::sched_getaffinity(None).unwrap_or_default();
    let cpus: Vec<usize> =
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect();
    if cpus.is_empty() { vec![0] } else { cpus }
}

/// CPU time of other programs, at a moment.
pub struct Others {
    at: Instant,
    ticks: u64,
}

impl Others {
    /// Now. `proc` is a `/proc` that shows the processes of everyone.
    ///
    /// Times of processes are exact; many kernels sample the machine's total by the timer, which is
    /// wrong for programs that run on timers themselves.
    pub fn sample(proc: &Path) -> Self {
        Self { at: Instant::now(), ticks: stolen_ticks(proc) + others_ticks(proc) }
    }

    /// CPU time used since then, in per cent of one CPU.
    pub fn percent(&self, proc: &Path) -> f64 {
        let now = Self::sample(proc);
        let span = now.at.duration_since(self.at).as_secs_f64();
        let per_second = rustix::param::clock_ticks_per_second() as f64;
        let ticks = now.ticks.saturating_sub(self.ticks) as f64;
        if span > 0.0 { 100.0 * ticks / per_second / span } else { 0.0 }
    }
}

/// Time that the hypervisor gave to other machines.
fn stolen_ticks(proc: &Path) -> u64 {
    let stat = fs::read_to_string(proc.join("stat")).unwrap_or_default();
    let steal = stat.lines().next().and_then(|cpus| cpus.split_whitespace().nth(8));
    steal.and_then(|ticks| ticks.parse().ok()).unwrap_or(0)
}

/// Time of all processes except this one, its descendants and kernel threads, including their ended
/// children.
fn others_ticks(proc: &Path) -> u64 {
    const KTHREADD: u32 = 2;
    let mut times: HashMap<u32, u64> = HashMap::new();
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in fs::read_dir(proc).into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let stat = fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        if let Some((parent, ticks)) = parse_stat(&stat) {
            times.insert(pid, ticks);
            children.entry(parent).or_default().push(pid);
        }
    }
    // Our process id in the namespace where that /proc was mounted.
    let own = fs::read_link(proc.join("self")).ok().and_then(|pid| pid.to_str()?.parse().ok());
    let mut not_theirs: Vec<u32> = own.into_iter().collect();
    if line(&proc.join("2/comm").to_string_lossy()) == "kthreadd" {
        not_theirs.push(KTHREADD);
    }
    while let Some(pid) = not_theirs.pop() {
        times.remove(&pid);
        not_theirs.extend(children.remove(&pid).unwrap_or_default());
    }
    times.values().sum()
}

/// Parent, and user and system time with those of the children waited for.
fn parse_stat(stat: &str) -> Option<(u32, u64)> {
    // The name in brackets may have spaces and brackets of its own.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = fields.get(11..15)?.iter().map(|field| field.parse::<i64>().unwrap_or(0).max(0));
    Some((fields.get(1)?.parse().ok()?, ticks.sum::<i64>().unsigned_abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_a_strange_name() {
        let stat = "17 (a) b ( c) S 4 17 17 0 -1 4194560 1 2 3 4 10 20 30 40 20 0 1 0 5 6 7";
        assert_eq!(parse_stat(stat), Some((4, 100)));
        assert_eq!(parse_stat(""), None);
        assert_eq!(parse_stat("17 (a) S 4"), None);
    }

    fn process(proc: &Path, pid: u32, parent: u32, name: &str, ticks: u32) {
        let folder = proc.join(pid.to_string());
        fs::create_dir_all(&folder).unwrap();
        let stat = format!("{pid} ({name}) S {parent} 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 5");
        fs::write(folder.join("stat"), stat).unwrap();
        fs::write(folder.join("comm"), format!("{name}\n")).unwrap();
    }

    #[test]
    fn work_of_others_is_neither_ours_nor_the_kernels() {
        let proc = std::env::temp_dir().join(format!("pvlab-proc-{}", std::process::id()));
        let _ = fs::remove_dir_all(&proc);
        for (pid, parent, name, ticks) in [
            (1, 0, "init", 1),
            (2, 0, "kthreadd", 1000),
            (3, 2, "ksoftirqd/0", 1000),
            (10, 1, "shell", 10),
            (11, 10, "compiler", 100),
            (20, 10, "lab", 1000),
            (21, 20, "guest", 1000),
            (22, 21, "iperf3", 1000),
        ] {
            process(&proc, pid, parent, name, ticks);
        }
        std::os::unix::fs::symlink("20", proc.join("self")).unwrap();
        fs::write(proc.join("stat"), "cpu  1 2 3 4 5 6 7 5000 9 10\n").unwrap();
        assert_eq!(others_ticks(&proc), 111);
        assert_eq!(stolen_ticks(&proc), 5000);
        fs::remove_dir_all(&proc).unwrap();
    }

    #[test]
    fn our_own_work_is_not_that_of_others() {
        let proc = Path::new("/proc");
        let ours = std::process::id().to_string();
        let ticks = || parse_stat(&line(&format!("/proc/{ours}/stat"))).unwrap().1;
        let (before, begin) = (ticks(), Instant::now());
        while begin.elapsed().as_millis() < 200 {
            std::hint::spin_loop();
        }
        assert!(ticks() > before);
        assert!(Others::sample(proc).percent(proc) >= 0.0);
    }

    #[test]
    fn this_machine_is_described() {
        let machine = Machine { cpu: "x".into(), ..Machine::default() };
        assert_eq!(machine.differs(&machine), None);
        let other = Machine { cpu: "y".into(), ..Machine::default() };
        assert_eq!(machine.differs(&other).as_deref(), Some("CPU then 'x', now 'y'"));
        assert!(!allowed_cpus().is_empty());
        let here = Machine::here(&[], &[0], &[0]);
        assert!(!here.mitigations.is_empty() || !Path::new(VULNERABILITIES).exists());
        assert!(here.huge_pages_free <= here.huge_pages_total);
        assert!(here.huge_page_kib > 0 || here.huge_pages_total == 0);
        assert_eq!(selected("always [madvise] never"), "madvise");
        assert_eq!(selected(""), "");
    }

    #[test]
    fn another_program_is_no_resumption() {
        let of = |digest: &str| {
            let sha256 = [("pvswitch".to_string(), digest.to_string())].into();
            let built = Built { commit: "abc".into(), sha256, ..Built::default() };
            Machine { built, ..Machine::default() }
        };
        assert_eq!(of("12").differs_in_program(&of("12")), None);
        let what = of("12").differs_in_program(&of("34")).unwrap();
        assert_eq!(what, "program then abc (SHA-256 12...), now abc (SHA-256 34...)");
        // Results of older versions do not say.
        assert_eq!(Machine::default().differs_in_program(&of("34")), None);
    }

    #[test]
    fn a_machine_of_an_older_version_is_read() {
        let now = serde_json::to_value(Machine::here(&[], &[0], &[1])).unwrap();
        let mut old = now.clone();
        let added = ["built", "huge_pages_total", "huge_page_kib", "transparent_huge_pages"];
        for field in added {
            old.as_object_mut().unwrap().remove(field).expect(field);
        }
        let read: Machine = serde_json::from_value(old).unwrap();
        assert_eq!((read.built, read.huge_pages_total), (Built::default(), 0));
        assert_eq!(read.kernel, now["kernel"]);
    }
}
