//! What the mirror of EVPN costs with large tables, on the bridge of this kernel:
//! `cargo bench -p pvswitch-uplink --bench evpn [-- [--json] REMOTE[/SEGMENTS]...]`, the number of
//! addresses on other hosts, and in how many segments, each with a bridge, a VXLAN interface and a
//! TAP of its own; one that is named twice is measured twice. Needs root and iproute2.
//!
//! The results are the inputs of `docs/scale.md`: with `--json` they are on the standard output, as
//! `pvswitch-lab import` reads them.

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../../lab/tests/common/measured.rs"]
mod measured;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::fd::AsFd;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use common::Netns;
use measured::{Measured, Run};
use rustix::thread::ClockId;
use serde_json::{Value, json};
use switch::fdb::{Mac, PortId};
use switch::tenant::Vlan;
use uplink::evpn::{Address, Evpn, Local, Member};

/// Addresses at the switch: a hundred guests with a hundred each.
const LOCAL: u32 = 10_000;
const LIMIT: Duration = Duration::from_secs(600);
/// What is measured of each case: name, unit, and what it is. Of all, less is better.
const MEASURES: [(&str, &str, &str); 8] = [
    ("read_s", "s", "CPU time of the control thread to read the table"),
    ("read_longest_ms", "ms", "longest time of it for which that thread serves nothing else"),
    ("kernel_bytes", "B", "slab memory of the kernel for each address on another host"),
    ("process_bytes", "B", "resident memory of the process for each"),
    ("show_us", "us", "CPU time of `ctl show` for each"),
    ("announce_us", "us", "CPU time to announce an address here: request, reply, notification"),
    ("compare_ms", "ms", "CPU time to compare all addresses here"),
    ("gone_us", "us", "CPU time for each address that another host withdraws"),
];

/// Figures of a case, by the names of [`MEASURES`].
type Figures = BTreeMap<&'static str, f64>;

fn address(kind: u8, n: u32, segments: u16) -> Address {
    let [_, a, b, c] = n.to_be_bytes();
    Address { mac: Mac([2, kind, 0, a, b, c]), vlan: vlan(n, segments) }
}

/// The VLAN of the switch for the segment of an address; 0: untagged, where there is one segment.
fn vlan(n: u32, segments: u16) -> u16 {
    if segments == 1 { 0 } else { (n % u32::from(segments)) as u16 + 1 }
}

fn locals(count: u32, segments: u16) -> Vec<(Address, Local)> {
    let local = Local { port: PortId(7), learned: true, starts: 0 };
    let mut all: Vec<_> = (0..count).map(|n| (address(0, n, segments), local)).collect();
    all.sort_unstable_by_key(|(address, _)| *address);
    all
}

/// CPU time of this thread.
fn cpu() -> Duration {
    let now = rustix::time::clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs() as u32)
}

/// Resident memory of this process and slab memory of the system, in bytes.
fn memory() -> (u64, u64) {
    let kib = |file: &str, name: &str| {
        let text = std::fs::read_to_string(file).expect("procfs");
        let line = text.lines().find(|line| line.starts_with(name)).expect("a line");
        let words: Vec<_> = line.split_whitespace().collect();
        words[1].parse::<u64>().expect("a number") * 1024
    };
    (kib("/proc/self/status", "VmRSS:"), kib("/proc/meminfo", "Slab:"))
}

/// Work of the mirror until a condition holds.
#[derive(Default)]
struct Cost {
    wall: Duration,
    cpu: Duration,
    /// The longest call: for so long the control thread serves nothing else.
    longest: Duration,
    calls: u32,
}

impl Cost {
    /// Prints it; returns its CPU time for each of `per`, in us.
    fn print(&self, what: &str, per: u32) -> f64 {
        let each = self.cpu.as_secs_f64() * 1e6 / f64::from(per);
        eprintln!(
            "  {what:<40} {:>8.3} s, CPU {:>7.3} s ({each:.2} us each), {} calls, longest {:.2} ms",
            self.wall.as_secs_f64(),
            self.cpu.as_secs_f64(),
            self.calls,
            self.longest.as_secs_f64() * 1e3,
        );
        each
    }
}

fn until(evpn: &mut Evpn, mut is_met: impl FnMut(&Evpn) -> bool) -> Cost {
    let (began, before) = (Instant::now(), cpu());
    let mut cost = Cost::default();
    let mut checks = Duration::ZERO;
    loop {
        let started = cpu();
        evpn.run(Instant::now(), |_| Ok(()));
        cost.longest = cost.longest.max(cpu() - started);
        cost.calls += 1;
        let now = Instant::now();
        // A condition that reads all addresses is asked when there is nothing else to do.
        let idle = os::wait_readable(evpn.as_fd(), Duration::ZERO).is_ok_and(|ready| !ready)
            && evpn.due().is_none_or(|due| due > now);
        if idle {
            let asked = cpu();
            let met = is_met(evpn);
            checks += cpu() - asked;
            if met {
                break;
            }
            let due = evpn.due().unwrap_or(now + LIMIT).saturating_duration_since(now);
            let _ = os::wait_readable(evpn.as_fd(), due.min(Duration::from_secs(1)));
        }
        assert!(now < began + LIMIT, "{:?}", evpn.status("t0", now));
    }
    (cost.wall, cost.cpu) = (began.elapsed(), cpu() - before - checks);
    cost
}

fn batch(netns: &Netns, lines: &str) {
    let file = std::env::temp_dir().join(format!("pvswitch-evpn-bench-{}", std::process::id()));
    std::fs::write(&file, lines).expect("a temporary file");
    let done = Command::new("bridge").args(["-n", &netns.0, "-b"]).arg(&file).status();
    let _ = std::fs::remove_file(&file);
    assert!(done.expect("bridge runs").success());
}

/// State of all TAPs: addresses on other hosts, and addresses here that are announced.
fn state(evpn: &Evpn, segments: u16) -> (usize, usize) {
    let all = (0..segments).filter_map(|n| evpn.status(&format!("t{n}"), Instant::now()));
    all.fold((0, 0), |(remote, announced), status| {
        let more = status.states.get("announced").copied().unwrap_or(0);
        (remote + status.remote, announced + more)
    })
}

fn measure(remote: u32, segments: u16) -> Option<Figures> {
    let netns = Netns::new()?;
    let mut figures = Figures::new();
    for n in 0..segments {
        netns.ip(&format!("tuntap add mode tap t{n}"));
        netns.ip(&format!("link add br{n} type bridge"));
        netns.ip(&format!("link set br{n} up"));
        let id = u32::from(n) + 10;
        netns.ip(&format!(
            "link add vx{n} type vxlan id {id} dstport 4789 local 10.9.0.1 nolearning"
        ));
        netns.ip(&format!("link set vx{n} master br{n} up"));
    }
    eprintln!("{remote} addresses on other hosts, {LOCAL} here, {segments} segments");

    // As FRR installs them: in the bridge's table, and with their endpoint in that of the VXLAN.
    let mut lines = String::new();
    for n in 0..remote {
        let (mac, dev, vtep) = (address(1, n, 1).mac, n % u32::from(segments), n / LOCAL + 2);
        let _ =
            writeln!(lines, "fdb replace {mac} dev vx{dev} dst 10.9.0.{vtep} self extern_learn");
        let _ = writeln!(lines, "fdb replace {mac} dev vx{dev} master extern_learn");
    }
    let (_, slab) = memory();
    let began = Instant::now();
    batch(&netns, &lines);
    drop(lines);
    let each = began.elapsed().as_secs_f64() * 1e6 / f64::from(remote);
    let bytes = memory().1.saturating_sub(slab) / u64::from(remote);
    eprintln!("  installed by `bridge -b`: {each:.2} us and {bytes} bytes of kernel memory each");
    figures.insert("kernel_bytes", bytes as f64);

    let (resident, _) = memory();
    let mut evpn = Evpn::open(Some(&netns.0), Instant::now()).expect("a netlink socket");
    let member = |n| Member {
        interface: format!("t{n}"),
        bridge: format!("br{n}"),
        vlan: if segments == 1 { Vlan::Transparent } else { Vlan::Access(n + 1) },
    };
    evpn.set_members((0..segments).map(member).collect());
    let synced = |evpn: &Evpn| state(evpn, segments).0 == remote as usize;
    let read = until(&mut evpn, synced);
    read.print("the table read", remote);
    figures.insert("read_s", read.cpu.as_secs_f64());
    figures.insert("read_longest_ms", read.longest.as_secs_f64() * 1e3);
    let bytes = memory().0.saturating_sub(resident) / u64::from(remote);
    eprintln!("  memory of the process: {bytes} bytes for each address on another host");
    figures.insert("process_bytes", bytes as f64);
    let before = cpu();
    state(&evpn, segments);
    let shown = (cpu() - before).as_secs_f64();
    eprintln!("  state for `ctl show`: {:.2} ms", shown * 1e3);
    figures.insert("show_us", shown * 1e6 / f64::from(remote));

    evpn.set_locals(locals(LOCAL, segments));
    let announced = |count: u32| move |evpn: &Evpn| state(evpn, segments).1 == count as usize;
    let each = until(&mut evpn, announced(LOCAL)).print("all addresses here announced", LOCAL);
    figures.insert("announce_us", each);
    let before = cpu();
    evpn.set_locals(locals(LOCAL + 1, segments));
    let compared = cpu() - before;
    until(&mut evpn, announced(LOCAL + 1)).print("one more", 1);
    let compared = compared.as_secs_f64() * 1e3;
    eprintln!("  comparing all addresses here: {compared:.2} ms");
    figures.insert("compare_ms", compared);

    // Another host is cut off: FRR removes its entries.
    let gone = remote.min(LOCAL);
    let mut lines = String::new();
    for n in 0..gone {
        let dev = n % u32::from(segments);
        let _ = writeln!(lines, "fdb del {} dev vx{dev} master", address(1, n, 1).mac);
    }
    batch(&netns, &lines);
    let fewer = |evpn: &Evpn| state(evpn, segments).0 == (remote - gone) as usize;
    let each = until(&mut evpn, fewer).print("a host is gone", gone);
    figures.insert("gone_us", each);
    Some(figures)
}

/// All that was measured, as `pvswitch-lab import` reads it.
fn results(measured: &[((u32, u16), Figures)]) -> Value {
    let mut rounds = BTreeMap::new();
    let runs = measured.iter().map(|((remote, segments), figures)| {
        let round = rounds.entry((remote, segments)).or_insert(0);
        let repeat = *round;
        *round += 1;
        Run {
            cell: vec![remote.to_string(), segments.to_string()],
            repeat,
            again: false,
            figures: json!(figures),
        }
    });
    let runs = runs.collect();
    let values = |mut values: Vec<u32>| {
        values.sort_unstable();
        values.dedup();
        values.iter().map(u32::to_string).collect()
    };
    let addresses = measured.iter().map(|((remote, _), _)| *remote).collect();
    let segments = measured.iter().map(|((_, segments), _)| u32::from(*segments)).collect();
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let measured = Measured {
        rig: "evpn-bench",
        command: format!("cargo bench -p pvswitch-uplink --bench evpn -- {}", words.join(" ")),
        seconds: 1.0,
        program: &std::env::current_exe().unwrap_or_default(),
        cpus: Vec::new(),
        about: "costs of the mirror of EVPN with large tables".into(),
        measures: &MEASURES,
        axes: vec![("addresses", values(addresses)), ("segments", values(segments))],
        runs,
    };
    measured.json()
}

/// Numbers of addresses on other hosts, and of segments: `10000` or `100000/100`.
fn parse(word: &str) -> Option<(u32, u16)> {
    let (remote, segments) = word.split_once('/').unwrap_or((word, "1"));
    let (remote, segments) = (remote.parse().ok()?, segments.parse().ok()?);
    let is_possible = (1..=2_000_000).contains(&remote) && (1..=1000).contains(&segments);
    is_possible.then_some((remote, segments))
}

fn main() -> ExitCode {
    let (mut wanted, mut is_json) = (Vec::new(), false);
    for word in std::env::args().skip(1).filter(|arg| arg != "--bench") {
        if word == "--json" {
            is_json = true;
            continue;
        }
        let Some(case) = parse(&word) else {
            eprintln!("evpn: '{word}': use REMOTE or REMOTE/SEGMENTS, to 2000000 and 1000");
            return ExitCode::from(2);
        };
        wanted.push(case);
    }
    if wanted.is_empty() {
        wanted = vec![(10_000, 1), (30_000, 1), (100_000, 1), (100_000, 100)];
    }
    let measured = wanted
        .into_iter()
        .map(|(remote, segments)| Some(((remote, segments), measure(remote, segments)?)));
    let Some(measured) = measured.collect::<Option<Vec<_>>>() else { return ExitCode::FAILURE };
    if is_json {
        println!("{}", results(&measured));
    }
    ExitCode::SUCCESS
}
