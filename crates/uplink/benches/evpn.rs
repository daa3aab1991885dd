//! What the mirror of EVPN costs with large tables, on the bridge of this kernel:
//! `cargo bench -p pvswitch-uplink --bench evpn [-- REMOTE...]`, the numbers of addresses on other
//! hosts. The results are the inputs of `docs/scale.md`. Needs root and iproute2.

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

fn address(kind: u8, n: u32) -> Address {
    let [_, a, b, c] = n.to_be_bytes();
    Address { mac: Mac([2, kind, 0, a, b, c]), vlan: 0 }
}

fn locals(count: u32) -> Vec<(Address, Local)> {
    let local = Local { port: PortId(7), learned: true, starts: 0 };
    (0..count).map(|n| (address(0, n), local)).collect()
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

fn measure(remote: u32) -> Option<()> {
    let netns = Netns::new()?;
    let _tap = netns.tap(1, 1);
    netns.ip("link add br0 type bridge");
    netns.ip("link set br0 up");
    netns.ip("link add vx10 type vxlan id 10 dstport 4789 local 10.9.0.1 nolearning");
    netns.ip("link set vx10 master br0 up");
    println!("{remote} addresses on other hosts, {LOCAL} here");

    // As FRR installs them: in the bridge's table, and with their endpoint in that of the VXLAN.
    let mut lines = String::new();
    for n in 0..remote {
        let mac = address(1, n).mac;
        let vtep = n / LOCAL + 2;
        let _ = writeln!(lines, "fdb replace {mac} dev vx10 dst 10.9.0.{vtep} self extern_learn");
        let _ = writeln!(lines, "fdb replace {mac} dev vx10 master extern_learn");
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
    let vlan = Vlan::Transparent;
    evpn.set_members(vec![Member { interface: "t0".into(), bridge: "br0".into(), vlan }]);
    let synced = |evpn: &Evpn| {
        let status = evpn.status("t0", Instant::now());
        status.is_some_and(|status| status.remote == remote as usize)
    };
    until(&mut evpn, synced).print("first reading of the table", remote);
    let bytes = memory().0.saturating_sub(resident) / u64::from(remote);
    println!("  memory of the process: {bytes} bytes for each address on another host");
    let before = cpu();
    let _ = evpn.status("t0", Instant::now());
    println!("  `ctl show`: {:.2} ms", (cpu() - before).as_secs_f64() * 1e3);

    evpn.set_locals(locals(LOCAL));
    let announced = |count: u32| {
        move |evpn: &Evpn| {
            let status = evpn.status("t0", Instant::now()).unwrap_or_default();
            status.states.get("announced").copied().unwrap_or(0) == count as usize
        }
    };
    until(&mut evpn, announced(LOCAL)).print("all addresses here announced", LOCAL);
    let before = cpu();
    evpn.set_locals(locals(LOCAL + 1));
    let compared = cpu() - before;
    until(&mut evpn, announced(LOCAL + 1)).print("one more", 1);
    println!("  comparing all addresses here: {:.2} ms", compared.as_secs_f64() * 1e3);

    // A new VXLAN interface: the whole table is read again, and all addresses are announced again.
    netns.ip("link add vx11 type vxlan id 11 dstport 4790 local 10.9.0.1 nolearning");
    netns.ip("link set vx11 master br0 up");
    let has_both = |evpn: &Evpn| {
        let status = evpn.status("t0", Instant::now()).unwrap_or_default();
        status.vnis.len() == 2 && status.remote == remote as usize
    };
    // Not at once: interfaces change in groups.
    let begun = Instant::now();
    let read_again = |evpn: &Evpn| begun.elapsed() > Duration::from_millis(300) && has_both(evpn);
    until(&mut evpn, read_again).print("all read again for a new interface", remote);
    let (resident_after, _) = memory();
    println!("  memory of the process: {} MiB", resident_after >> 20);

    // Another host is cut off: FRR removes its entries.
    let gone = remote.min(LOCAL);
    let mut lines = String::new();
    for n in 0..gone {
        let _ = writeln!(lines, "fdb del {} dev vx10 master", address(1, n).mac);
    }
    batch(&netns, &lines);
    let fewer = |evpn: &Evpn| {
        let status = evpn.status("t0", Instant::now()).unwrap_or_default();
        status.remote == (remote - gone) as usize
    };
    until(&mut evpn, fewer).print("a host is gone", gone);
    Some(())
}

fn main() -> ExitCode {
    let numbers = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let mut wanted = Vec::new();
    for number in numbers {
        match number.parse() {
            Ok(number) if (1..=2_000_000).contains(&number) => wanted.push(number),
            _ => {
                eprintln!("evpn: '{number}' is not a number of addresses from 1 to 2000000");
                return ExitCode::from(2);
            }
        }
    }
    if wanted.is_empty() {
        wanted = vec![10_000, 100_000];
    }
    for remote in wanted {
        if measure(remote).is_none() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
