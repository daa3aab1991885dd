//! Rates of the last ten minutes, for the page's charts.

use std::collections::VecDeque;

use serde_json::{Map, Value, json};

/// Time that is kept, in seconds.
pub const KEPT_S: f64 = 600.0;
/// Most samples, at one every two seconds.
const SAMPLES_MAX: usize = 300;
/// Most ports of a sample; the totals have all ports.
const PORTS_MAX: usize = 256;

/// Rates of a port, or of all: frames and bits per second from guests, the same to guests, frames
/// lost per second, and share of a CPU.
type Rates = [f32; 6];

/// Rates between two samples.
struct Sample {
    /// The switch's clock at its end, in seconds.
    at: f64,
    /// Share of a CPU of each worker.
    workers: Vec<f32>,
    total: Rates,
    /// Ports with traffic or losses.
    ports: Vec<(String, Rates)>,
}

/// The last samples.
#[derive(Default)]
pub struct History {
    show: Value,
    stats: Value,
    events: Value,
    samples: VecDeque<Sample>,
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn sum(queues: &Value, is: impl Fn(&str) -> bool) -> u64 {
    let counters = list(queues).iter().filter_map(Value::as_object).flatten();
    counters.filter(|(name, _)| is(name)).filter_map(|(_, value)| value.as_u64()).sum()
}

/// Counters of a port in the order of [`Rates`], and drops alone: what a receiver made its senders
/// lose is among their drops.
fn counters(port: &Value) -> ([u64; 6], u64) {
    let (from, to) = (&port["ingress"], &port["egress"]);
    let named = |queues, name: &str| sum(queues, |counter| counter == name);
    let lost = |prefix: &str| [from, to].map(|q| sum(q, |name| name.starts_with(prefix)));
    let drops: u64 = lost("drops_").iter().sum();
    let counters = [
        named(from, "frames"),
        named(from, "bytes") * 8,
        named(to, "frames"),
        named(to, "bytes") * 8,
        drops + lost("lost_").iter().sum::<u64>(),
        port["account"]["served_ns"].as_u64().unwrap_or(0),
    ];
    (counters, drops)
}

impl History {
    /// Whether there is no sample yet.
    pub fn is_empty(&self) -> bool {
        self.stats.is_null()
    }

    /// Adds replies of the switch.
    pub fn add(&mut self, show: Value, stats: Value, events: Value) {
        let time = |stats: &Value| stats["uptime_ns"].as_f64().unwrap_or(0.0) / 1e9;
        let (at, before) = (time(&stats), time(&self.stats));
        // After a pause a rate over all of it would be no sample.
        if !self.is_empty() && at > before && at - before < KEPT_S {
            let sample = sample(&self.stats, &stats, at, at - before);
            self.samples.push_back(sample);
        }
        while self.samples.len() > SAMPLES_MAX
            || self.samples.front().is_some_and(|sample| sample.at < at - KEPT_S)
        {
            self.samples.pop_front();
        }
        (self.show, self.stats, self.events) = (show, stats, events);
    }

    /// The last replies, and the samples after the time `since`.
    pub fn reply(&self, since: f64) -> Value {
        let samples = self.samples.iter().filter(|sample| sample.at > since).map(Sample::json);
        json!({
            "ok": true,
            "show": self.show,
            "stats": self.stats,
            "events": self.events,
            "kept_s": KEPT_S,
            "samples": samples.collect::<Vec<_>>(),
        })
    }
}

fn sample(old: &Value, new: &Value, at: f64, secs: f64) -> Sample {
    let per_second = |new: u64, old: u64| {
        // A counter that decreased is of a new port of the same name.
        let more = if new >= old { new - old } else { new };
        (more as f64 / secs) as f32
    };
    let (mut total, mut ports) = ([0.0; 6], Vec::new());
    let mut olds = list(&old["ports"]).iter().peekable();
    for port in list(&new["ports"]) {
        let name = port["name"].as_str().unwrap_or_default();
        // Both are in the order in which ports were added.
        let mut at_old = olds.clone();
        let before = at_old.find(|old| old["name"] == name);
        if before.is_some() {
            olds = at_old;
        }
        let (now, drops) = counters(port);
        let (then, drops_then) = before.map(counters).unwrap_or_default();
        let mut rates: Rates = std::array::from_fn(|i| per_second(now[i], then[i]));
        rates[5] /= 1e9;
        for (sum, rate) in total.iter_mut().zip(rates) {
            *sum += rate;
        }
        total[4] += per_second(drops, drops_then) - rates[4];
        if rates.iter().any(|rate| *rate > 0.0) && ports.len() < PORTS_MAX {
            ports.push((name.to_string(), rates));
        }
    }
    let workers = list(&new["workers"]).iter().enumerate().map(|(i, worker)| {
        let cpu = |worker: &Value| worker["cpu_ns"].as_u64().unwrap_or(0);
        per_second(cpu(worker), cpu(&old["workers"][i])) / 1e9
    });
    Sample { at, workers: workers.collect(), total, ports }
}

impl Sample {
    fn json(&self) -> Value {
        let ports = self.ports.iter().map(|(name, rates)| (name.clone(), rounded(rates)));
        json!({
            "at": self.at,
            "workers": self.workers.iter().map(|cpu| short(*cpu)).collect::<Vec<_>>(),
            "total": rounded(&self.total),
            "ports": ports.collect::<Map<_, _>>(),
        })
    }
}

fn rounded(rates: &Rates) -> Value {
    let [counts @ .., cpu] = rates;
    counts.iter().map(|rate| Value::from(rate.round() as u64)).chain([short(*cpu)]).collect()
}

/// A share with four digits after the point.
fn short(share: f32) -> Value {
    ((f64::from(share) * 1e4).round() / 1e4).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(secs: u64, ports: &[(&str, u64)]) -> Value {
        let port = |(name, n): &(&str, u64)| {
            json!({ "name": name, "account": { "served_ns": n * 1_000_000 },
                    "ingress": [{ "frames": 10 * n, "bytes": 100 * n, "drops_runt": n }],
                    "egress": [{ "frames": 20 * n, "bytes": 200 * n, "lost_aged": 3 * n }] })
        };
        json!({ "uptime_ns": secs * 1_000_000_000, "workers": [{ "cpu_ns": secs * 500_000_000 }],
                "ports": ports.iter().map(port).collect::<Vec<_>>() })
    }

    fn history(samples: &[(u64, &[(&str, u64)])]) -> History {
        let mut history = History::default();
        samples
            .iter()
            .for_each(|(secs, ports)| history.add(json!({}), stats(*secs, ports), json!([])));
        history
    }

    #[test]
    fn samples_are_rates_of_each_port_and_of_all() {
        let history = history(&[(2, &[("a", 1), ("b", 5)]), (4, &[("a", 3), ("b", 5)])]);
        let reply = history.reply(0.0);
        let sample = &reply["samples"][0];
        assert_eq!((sample["at"].as_f64(), &sample["workers"]), (Some(4.0), &json!([0.5])));
        assert_eq!(sample["ports"], json!({ "a": [10, 800, 20, 1600, 4, 0.001] }), "b is idle");
        // Of all ports, frames lost at a full receiver are those that senders dropped.
        assert_eq!(sample["total"], json!([10, 800, 20, 1600, 1, 0.001]));
        assert_eq!(history.reply(4.0)["samples"], json!([]));
        assert_eq!(reply["stats"]["uptime_ns"], 4_000_000_000_u64);
    }

    #[test]
    fn ports_come_and_go_between_samples() {
        let history = history(&[(2, &[("a", 9), ("b", 5)]), (3, &[("b", 6), ("a", 2)])]);
        let ports = &history.reply(0.0)["samples"][0]["ports"];
        assert_eq!((&ports["b"][0], &ports["a"][0]), (&json!(10), &json!(20)));
    }

    #[test]
    fn history_is_bounded_in_samples_time_and_ports() {
        let names: Vec<_> = (0..300).map(|i| format!("p{i}")).collect();
        let ports = |n| names.iter().map(|name| (name.as_str(), n)).collect::<Vec<_>>();
        let mut history = History::default();
        for secs in 1..=400 {
            history.add(json!({}), stats(secs, &ports(secs)), json!([]));
        }
        let reply = history.reply(0.0);
        assert_eq!(list(&reply["samples"]).len(), SAMPLES_MAX);
        let last = &list(&reply["samples"])[SAMPLES_MAX - 1];
        assert_eq!(last["ports"].as_object().unwrap().len(), PORTS_MAX);
        assert_eq!(last["total"][0], 3_000);
        // Later, all of them are too old; the pause itself is no sample.
        history.add(json!({}), stats(2_000, &[]), json!([]));
        assert_eq!(history.reply(0.0)["samples"], json!([]));
    }
}
