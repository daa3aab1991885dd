//! What the mirror of EVPN costs with large tables, on the bridge of this kernel:
//! `cargo bench -p pvswitch-uplink --bench evpn [-- REMOTE[/SEGMENTS]...]`, the number of addresses
//! on other hosts, and in how many segments, each with a bridge, a VXLAN interface and a TAP of its
//! own. The results are the inputs of `docs/scale.md`. Needs root and iproute2.

#[path = "../tests/common/mod.rs"]
mod common;

use std::fmt::Write as _;
use std::os::fd::AsFd;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use common::Netns;
use rustix::thread::ClockId;
use switch::fdb::{Mac, PortId};
use switch::tenant::Vlan;
use uplink::evpn::{Address, Evpn, Local, Member};

/// Addresses at the switch: a hundred guests with a hundred each.
const LOCAL: u32 = 10_000;
const LIMIT: Duration = Duration::from_secs(600);

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
    fn print(&self, what: &str, per: u32) {
        let each = self.cpu.as_secs_f64() * 1e6 / f64::from(per);
        println!(
            "  {what:<40} {:>8.3} s, CPU {:>7.3} s ({each:.2} us each), {} calls, longest {:.2} ms",
            self.wall.as_secs_f64(),
            self.cpu.as_secs_f64(),
            self.calls,
            self.longest.as_secs_f64() * 1e3,
        );
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

fn measure(remote: u32, segments: u16) -> Option<()> {
    let netns = Netns::new()?;
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
    println!("{remote} addresses on other hosts, {LOCAL} here, {segments} segments");

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
    println!("  installed by `bridge -b`: {each:.2} us and {bytes} bytes of kernel memory each");

    let (resident, _) = memory();
    let mut evpn = Evpn::open(Some(&netns.0), Instant::now()).expect("a netlink socket");
    let member = |n| Member {
        interface: format!("t{n}"),
        bridge: format!("br{n}"),
        vlan: if segments == 1 { Vlan::Transparent } else { Vlan::Access(n + 1) },
    };
    evpn.set_members((0..segments).map(member).collect());
    let synced = |evpn: &Evpn| state(evpn, segments).0 == remote as usize;
    until(&mut evpn, synced).print("the table read", remote);
    let bytes = memory().0.saturating_sub(resident) / u64::from(remote);
    println!("  memory of the process: {bytes} bytes for each address on another host");
    let before = cpu();
    state(&evpn, segments);
    println!("  state for `ctl show`: {:.2} ms", (cpu() - before).as_secs_f64() * 1e3);

    evpn.set_locals(locals(LOCAL, segments));
    let announced = |count: u32| move |evpn: &Evpn| state(evpn, segments).1 == count as usize;
    until(&mut evpn, announced(LOCAL)).print("all addresses here announced", LOCAL);
    let before = cpu();
    evpn.set_locals(locals(LOCAL + 1, segments));
    let compared = cpu() - before;
    until(&mut evpn, announced(LOCAL + 1)).print("one more", 1);
    println!("  comparing all addresses here: {:.2} ms", compared.as_secs_f64() * 1e3);

    // Another host is cut off: FRR removes its entries.
    let gone = remote.min(LOCAL);
    let mut lines = String::new();
    for n in 0..gone {
        let dev = n % u32::from(segments);
        let _ = writeln!(lines, "fdb del {} dev vx{dev} master", address(1, n, 1).mac);
    }
    batch(&netns, &lines);
    let fewer = |evpn: &Evpn| state(evpn, segments).0 == (remote - gone) as usize;
    until(&mut evpn, fewer).print("a host is gone", gone);
    Some(())
}

/// Numbers of addresses on other hosts, and of segments: `10000` or `100000/100`.
fn parse(word: &str) -> Option<(u32, u16)> {
    let (remote, segments) = word.split_once('/').unwrap_or((word, "1"));
    let (remote, segments) = (remote.parse().ok()?, segments.parse().ok()?);
    let is_possible = (1..=2_000_000).contains(&remote) && (1..=1000).contains(&segments);
    is_possible.then_some((remote, segments))
}

fn main() -> ExitCode {
    let mut wanted = Vec::new();
    for word in std::env::args().skip(1).filter(|arg| arg != "--bench") {
        let Some(case) = parse(&word) else {
            eprintln!("evpn: '{word}': use REMOTE or REMOTE/SEGMENTS, to 2000000 and 1000");
            return ExitCode::from(2);
        };
        wanted.push(case);
    }
    if wanted.is_empty() {
        wanted = vec![(10_000, 1), (100_000, 1), (100_000, 100)];
    }
    let measured = wanted.into_iter().all(|(remote, segments)| measure(remote, segments).is_some());
    if measured { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
