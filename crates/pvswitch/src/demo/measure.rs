//! Measurements: the switch's counters, and the kernel's accounting of each process.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::format::ratio;
use api::Request;
use api::control::call;

/// Resource usage of one process, as counted by the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// CPU time, in ns.
    pub cpu_ns: u64,
    /// Voluntary context switches of its threads.
    pub wakeups: u64,
}

impl Usage {
    /// Reads the usage of process `pid`, all threads; zero if the process does not exist.
    pub fn of(pid: u32) -> Self {
        let mut usage = Self::default();
        let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return usage };
        for thread in threads.flatten() {
            let read =
                |file: &str| std::fs::read_to_string(thread.path().join(file)).unwrap_or_default();
            let cpu_ns = schedstat_ns(&read("schedstat")).or_else(|| stat_ns(&read("stat")));
            usage.cpu_ns += cpu_ns.unwrap_or(0);
            usage.wakeups += voluntary_switches(&read("status")).unwrap_or(0);
        }
        usage
    }

    fn since(self, before: Self) -> Self {
        Self {
            cpu_ns: self.cpu_ns.saturating_sub(before.cpu_ns),
            wakeups: self.wakeups.saturating_sub(before.wakeups),
        }
    }
}

/// The first field of a schedstat: CPU time. A kernel built without it shows zeros.
fn schedstat_ns(text: &str) -> Option<u64> {
    let mut words = text.split_whitespace();
    let ns = words.next()?.parse().ok()?;
    let slices: u64 = words.nth(1)?.parse().ok()?;
    (slices > 0).then_some(ns)
}

/// User and system time from a stat file, in clock ticks; the process name may contain spaces.
fn stat_ns(text: &str) -> Option<u64> {
    let (_, rest) = text.rsplit_once(')')?;
    let mut words = rest.split_whitespace().skip(11);
    let user: u64 = words.next()?.parse().ok()?;
    let system: u64 = words.next()?.parse().ok()?;
    Some((user + system) * (1_000_000_000 / rustix::param::clock_ticks_per_second().max(1)))
}

fn voluntary_switches(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    line.trim().parse().ok()
}

/// Counters of one port of the switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortCount {
    /// Frames from the guest.
    pub sent: u64,
    /// Bytes of these frames.
    pub sent_bytes: u64,
    /// Frames to the guest.
    pub received: u64,
    /// Bytes of these frames.
    pub received_bytes: u64,
    /// Notifications from the guest.
    pub kicks: u64,
    /// Notifications to the guest.
    pub calls: u64,
    /// Frames dropped, for any reason.
    pub drops: u64,
    /// Protocol violations of the guest.
    pub faults: u64,
}

impl PortCount {
    /// Reads a port from the reply to `stats`.
    fn read(port: &Value) -> Self {
        let sum = |way: &str, counts: &dyn Fn(&str) -> bool| {
            let queues = port[way].as_array().map(Vec::as_slice).unwrap_or_default();
            let all = queues.iter().filter_map(Value::as_object).flatten();
            all.filter(|(name, _)| counts(name)).filter_map(|(_, n)| n.as_u64()).sum::<u64>()
        };
        let one = |way: &str, counter: &str| sum(way, &|name| name == counter);
        let both = |counter: &str| one("ingress", counter) + one("egress", counter);
        let drops = |name: &str| name.starts_with("drops_");
        Self {
            sent: one("ingress", "frames"),
            sent_bytes: one("ingress", "bytes"),
            received: one("egress", "frames"),
            received_bytes: one("egress", "bytes"),
            kicks: both("kicks"),
            calls: both("calls"),
            drops: sum("ingress", &drops) + sum("egress", &drops),
            faults: port["faults"].as_u64().unwrap_or(0),
        }
    }

    fn since(self, before: Self) -> Self {
        let d = u64::saturating_sub;
        Self {
            sent: d(self.sent, before.sent),
            sent_bytes: d(self.sent_bytes, before.sent_bytes),
            received: d(self.received, before.received),
            received_bytes: d(self.received_bytes, before.received_bytes),
            kicks: d(self.kicks, before.kicks),
            calls: d(self.calls, before.calls),
            drops: d(self.drops, before.drops),
            faults: d(self.faults, before.faults),
        }
    }
}

/// Counters of all ports, by name.
pub type Ports = BTreeMap<String, PortCount>;

/// Queries the switch at `control`.
pub fn ports(control: &Path) -> Result<Ports, String> {
    let answer = call(control, &Request::Stats).map_err(|error| error.to_string())?;
    let ports = answer["ports"].as_array().map(Vec::as_slice).unwrap_or_default();
    let named = |port: &Value| Some((port["name"].as_str()?.to_string(), PortCount::read(port)));
    Ok(ports.iter().filter_map(named).collect())
}

/// All counters at one time.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Time of the snapshot.
    pub at: Instant,
    /// The switch's counters.
    pub ports: Ports,
    /// The switch's process.
    pub switch: Usage,
    /// The guests' processes, by port.
    pub guests: BTreeMap<String, Usage>,
}

/// Differences between two snapshots.
#[derive(Clone, Debug)]
pub struct Change {
    /// Time between them.
    pub span: Duration,
    ports: Ports,
    /// The switch's process.
    pub switch: Usage,
    guests: BTreeMap<String, Usage>,
}

impl Change {
    /// Computes the differences from `before` to `after`.
    pub fn between(before: &Snapshot, after: &Snapshot) -> Self {
        let was = |name: &String| before.ports.get(name).copied().unwrap_or_default();
        let ports = after.ports.iter().map(|(n, p)| (n.clone(), p.since(was(n)))).collect();
        // CPU time of a guest before its first snapshot does not count.
        let was = |name: &String, now: Usage| before.guests.get(name).copied().unwrap_or(now);
        let guests = after.guests.iter().map(|(n, u)| (n.clone(), u.since(was(n, *u)))).collect();
        Self {
            span: after.at.saturating_duration_since(before.at),
            ports,
            switch: after.switch.since(before.switch),
            guests,
        }
    }

    /// Counters of a port.
    pub fn port(&self, name: &str) -> PortCount {
        self.ports.get(name).copied().unwrap_or_default()
    }

    /// `count` per second.
    pub fn rate(&self, count: u64) -> f64 {
        ratio(count as f64, self.span.as_secs_f64())
    }

    /// Share of one core used by the switch.
    pub fn switch_cpu(&self) -> f64 {
        ratio(self.switch.cpu_ns as f64, self.span.as_nanos() as f64)
    }

    /// Share of one core used by a guest.
    pub fn guest_cpu(&self, port: &str) -> f64 {
        let ns = self.guests.get(port).map_or(0, |usage| usage.cpu_ns);
        ratio(ns as f64, self.span.as_nanos() as f64)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn proc_files_are_parsed() {
        assert_eq!(schedstat_ns("123456 789 42\n"), Some(123_456));
        assert_eq!(schedstat_ns("0 0 0\n"), None);
        assert_eq!(schedstat_ns(""), None);
        let stat = "7 (a b) c) S 1 2 3 4 5 6 7 8 9 10 30 12 0 0 20 0";
        let tick = 1_000_000_000 / rustix::param::clock_ticks_per_second();
        assert_eq!(stat_ns(stat), Some(42 * tick));
        assert_eq!(stat_ns("junk"), None);
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t5\n";
        assert_eq!(voluntary_switches(status), Some(17));
        assert_eq!(voluntary_switches("Name:\tx\n"), None);
    }

    #[test]
    fn usage_of_a_missing_process_is_zero() {
        let before = Usage::of(std::process::id());
        assert!(before.cpu_ns > 0);
        assert_eq!(Usage::of(u32::MAX), Usage::default());
    }

    #[test]
    fn counters_are_summed_over_queues() {
        let port = json!({
            "name": "a", "faults": 2,
            "ingress": [{"frames": 3, "bytes": 180, "kicks": 1, "drops_runt": 4}, {"frames": 5}],
            "egress": [{"frames": 7, "bytes": 420, "calls": 6, "kicks": 1, "drops_no_room": 1}],
        });
        let expected = PortCount {
            sent: 8,
            sent_bytes: 180,
            received: 7,
            received_bytes: 420,
            kicks: 2,
            calls: 6,
            drops: 5,
            faults: 2,
        };
        assert_eq!(PortCount::read(&port), expected);
        assert_eq!(PortCount::read(&json!({})), PortCount::default());
    }

    fn snapshot(at: Instant, received: u64, cpu_ns: u64) -> Snapshot {
        let count = PortCount { received, ..PortCount::default() };
        Snapshot {
            at,
            ports: [("a".into(), count)].into(),
            switch: Usage { cpu_ns, wakeups: 3 },
            guests: [("a".into(), Usage { cpu_ns, wakeups: 0 })].into(),
        }
    }

    #[test]
    fn rates_are_per_second_of_elapsed_time() {
        let start = Instant::now();
        let before = snapshot(start, 100, 1_000);
        let after = snapshot(start + Duration::from_millis(500), 1100, 250_001_000);
        let change = Change::between(&before, &after);
        assert_eq!(change.rate(change.port("a").received), 2000.0);
        assert_eq!((change.switch_cpu(), change.guest_cpu("a")), (0.5, 0.5));
        assert_eq!((change.switch.wakeups, change.guest_cpu("b")), (0, 0.0));
    }

    #[test]
    fn no_elapsed_time_or_falling_counters_give_rate_zero() {
        let start = Instant::now();
        let (early, late) = (snapshot(start, 100, 50), snapshot(start, 40, 20));
        let change = Change::between(&early, &late);
        assert_eq!((change.rate(change.port("a").received), change.switch_cpu()), (0.0, 0.0));
        assert_eq!(change.rate(5), 0.0);
    }
}
