//! Samples of a switch, and the differences between two of them.

use std::path::Path;

use serde_json::Value;

use crate::demo::format::ratio;
use api::Request;
use api::control::{Client, ControlError};

/// Replies of a switch.
#[derive(Clone, Debug)]
pub struct Sample {
    show: Value,
    stats: Value,
}

impl Sample {
    /// Queries the switch.
    pub fn take(control: &Path) -> Result<Self, ControlError> {
        let mut client = Client::connect(control)?;
        let show = client.call(&Request::Show)?;
        let stats = client.call(&Request::Stats)?;
        Ok(Self { show, stats })
    }
}

/// Everything shown. Rates are per second; `None` until there are two samples.
#[derive(Clone, Debug, Default)]
pub struct Picture {
    /// Version, uptime and settings.
    pub about: String,
    /// Time between the samples, in seconds; 0: there is only one.
    pub secs: f64,
    pub workers: Vec<Worker>,
    pub ports: Vec<Port>,
}

#[derive(Clone, Debug, Default)]
pub struct Worker {
    /// Fraction of a CPU.
    pub cpu: Option<f64>,
    /// Fraction of its time spent on its current queues.
    pub load: Option<f64>,
    pub queues: u64,
    pub rounds: Option<f64>,
    pub sleeps: Option<f64>,
    pub naps: Option<f64>,
    /// Total number of queues given to other workers.
    pub moves: u64,
    pub asleep: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Port {
    pub name: String,
    pub kind: String,
    pub up: bool,
    /// State in one word.
    pub state: String,
    /// Whether its peer (a front-end, passt) is connected; `None`: this kind has none.
    pub connected: Option<bool>,
    pub queues_active: u64,
    pub queues: u64,
    /// Negotiated features, or offloads.
    pub features: String,
    pub faults: u64,
    pub in_frames: Option<f64>,
    pub in_bits: Option<f64>,
    pub out_frames: Option<f64>,
    pub out_bits: Option<f64>,
    /// Frames held because its queues are full.
    pub held: u64,
    /// Frames that became held for its queues.
    pub holds: Option<f64>,
    /// Attempts to lock its egress queues that found them locked.
    pub contended: Option<f64>,
    /// Causes with at least one frame.
    pub drops: Vec<Drop>,
    pub ingress: Vec<Queue>,
    pub egress: Vec<Egress>,
}

/// Frames dropped for one cause.
#[derive(Clone, Debug, Default)]
pub struct Drop {
    pub cause: String,
    /// Dropped on the way from the guest; otherwise, to it.
    pub ingress: bool,
    pub rate: Option<f64>,
    pub total: u64,
}

/// An ingress queue.
#[derive(Clone, Debug, Default)]
pub struct Queue {
    /// `hot`, `warm` or `cold`.
    pub state: String,
    pub worker: Option<u64>,
    pub poll: String,
    pub weight: Option<u64>,
    pub frames: Option<f64>,
    pub polls: Option<f64>,
    /// Fraction of polls that found no frames.
    pub empty: Option<f64>,
    pub sleeps: Option<f64>,
    pub naps: Option<f64>,
    pub kicks: Option<f64>,
    pub frames_per_kick: Option<f64>,
    /// Notifications to the guest about used transmit buffers.
    pub calls: Option<f64>,
    pub frames_per_burst: Option<f64>,
    /// Fraction of a CPU spent on it.
    pub served: Option<f64>,
    /// Latency of the first frame after a sleep, in ns: the mean since the last sample or, if there
    /// was none, since the start; and the maximum since the start.
    pub first_ns: Option<f64>,
    pub first_ns_max: Option<f64>,
}

#[derive(Clone, Debug, Default)]
pub struct Egress {
    pub call: String,
    pub frames: Option<f64>,
    pub calls: Option<f64>,
    pub frames_per_call: Option<f64>,
    pub calls_late: Option<f64>,
    pub kicks: Option<f64>,
    pub full: Option<f64>,
    /// Frames held for it.
    pub held: Option<u64>,
    pub contended: Option<f64>,
    pub segmented: Option<f64>,
    pub checksummed: Option<f64>,
}

impl Drop {
    /// The cause: `runt` on the way from the guest, `to:down` on the way to it.
    pub fn name(&self) -> String {
        format!("{}{}", if self.ingress { "" } else { "to:" }, self.cause)
    }
}

impl Port {
    /// Whether its name, state or kind contains `text`, which is in lower case.
    pub fn matches(&self, text: &str) -> bool {
        [&self.name, &self.state, &self.kind].iter().any(|of| of.to_lowercase().contains(text))
    }

    /// Frames dropped per second, all causes.
    pub fn drop_rate(&self) -> Option<f64> {
        self.drops.iter().map(|drop| drop.rate).sum::<Option<f64>>().or(Some(0.0))
    }
}

/// Counters of one queue, port or worker, in both samples.
#[derive(Clone, Copy)]
struct Pair<'a> {
    new: &'a Value,
    /// Null: not in the old sample.
    old: &'a Value,
    /// 0: there is only one sample.
    secs: f64,
}

impl Pair<'_> {
    /// Increase of a counter. A counter that decreased belongs to a new object of the same name.
    fn increase(&self, counter: &str) -> f64 {
        let new = self.new[counter].as_u64().unwrap_or(0);
        let old = self.old[counter].as_u64().unwrap_or(0);
        (if new >= old { new - old } else { new }) as f64
    }

    /// Increase per second; `None`: unknown.
    fn rate(&self, counter: &str) -> Option<f64> {
        let known = self.secs > 0.0 && self.new[counter].is_u64();
        known.then(|| self.increase(counter) / self.secs)
    }

    /// Ratio of two increases; `None`: the second is 0.
    fn per(&self, part: &str, whole: &str) -> Option<f64> {
        let whole = self.increase(whole);
        (self.secs > 0.0 && whole > 0.0).then(|| ratio(self.increase(part), whole))
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().into()
}

/// Computes what is shown; `old` may be missing, or of a switch that has ended.
pub fn picture(old: Option<&Sample>, new: &Sample) -> Picture {
    let same = |old: &&Sample| old.show["pid"] == new.show["pid"];
    let uptime = |sample: &Sample| sample.stats["uptime_ns"].as_f64().unwrap_or(0.0) / 1e9;
    let old = old.filter(same).filter(|old| uptime(old) < uptime(new));
    let secs = old.map_or(0.0, |old| uptime(new) - uptime(old));
    let null = Value::Null;
    let old_stats = old.map_or(&null, |old| &old.stats);
    let workers = list(&new.stats["workers"])
        .iter()
        .enumerate()
        .map(|(i, now)| worker(Pair { new: now, old: &old_stats["workers"][i], secs }));
    let ports = list(&new.stats["ports"]).iter().map(|now| {
        let same = |port: &&Value| port["name"] == now["name"];
        let before = list(&old_stats["ports"]).iter().find(same).unwrap_or(&null);
        let shown = list(&new.show["ports"]).iter().find(same).unwrap_or(&null);
        port(Pair { new: now, old: before, secs }, shown)
    });
    let ports: Vec<_> = ports.collect();
    let mut workers: Vec<_> = workers.collect();
    for (i, worker) in workers.iter_mut().enumerate() {
        let queues = ports.iter().flat_map(|port| &port.ingress);
        let mine = queues.filter(|queue| queue.worker == Some(i as u64));
        worker.load = mine.map(|queue| queue.served).sum::<Option<f64>>().filter(|_| secs > 0.0);
    }
    Picture { about: about(&new.show), secs, workers, ports }
}

fn about(show: &Value) -> String {
    let up = show["uptime_s"].as_u64().unwrap_or(0);
    let (hours, minutes, seconds) = (up / 3600, up / 60 % 60, up % 60);
    let mut about = format!(
        "pvswitch {}  pid {}  up {hours}:{minutes:02}:{seconds:02}  {}",
        text(&show["version"]),
        show["pid"],
        text(&show["forward"]),
    );
    let words = [("  poll ", "poll"), ("  ", "placement")];
    for (before, word) in words.map(|(before, key)| (before, show[key].as_str())) {
        about.extend(word.into_iter().flat_map(|word| [before, word]));
    }
    about
}

fn worker(pair: Pair<'_>) -> Worker {
    let now = pair.new;
    Worker {
        cpu: pair.rate("cpu_ns").map(|ns| ns / 1e9),
        load: None,
        queues: now["queues"].as_u64().unwrap_or(0),
        rounds: pair.rate("rounds"),
        sleeps: pair.rate("sleeps"),
        naps: pair.rate("naps"),
        moves: now["moves"].as_u64().unwrap_or(0),
        asleep: now["asleep"] == true,
    }
}

fn port(pair: Pair<'_>, shown: &Value) -> Port {
    let Pair { new, old, secs } = pair;
    let queues = |way: &'static str| {
        let queues = list(&new[way]).iter().enumerate();
        queues.map(move |(i, now)| Pair { new: now, old: &old[way][i], secs })
    };
    let total = |way: &'static str, counter: &str| {
        let rates = queues(way).map(|queue| queue.rate(counter));
        // A port without queues in one direction has no traffic in it.
        rates.sum::<Option<f64>>().filter(|_| secs > 0.0)
    };
    let mut all: Vec<_> = ["ingress", "egress"]
        .into_iter()
        .flat_map(|way| drops(&queues(way).collect::<Vec<_>>(), way == "ingress"))
        .collect();
    // Current drops first.
    all.sort_by(|a, b| b.rate.unwrap_or(0.0).total_cmp(&a.rate.unwrap_or(0.0)));
    let features: Vec<_> = list(&shown["features"]).iter().map(text).collect();
    Port {
        name: text(&new["name"]),
        kind: text(&shown["kind"]),
        up: new["up"] == true,
        state: shown["state"]
            .as_str()
            .unwrap_or(if new["up"] == true { "up" } else { "down" })
            .into(),
        connected: shown["connected"].as_bool(),
        queues_active: shown["queues_active"].as_u64().unwrap_or(0),
        queues: shown["queues"].as_u64().unwrap_or(0),
        features: if features.is_empty() { text(&shown["offloads"]) } else { features.join(" ") },
        faults: new["faults"].as_u64().unwrap_or(0),
        in_frames: total("ingress", "frames"),
        in_bits: total("ingress", "bytes").map(|bytes| bytes * 8.0),
        out_frames: total("egress", "frames"),
        out_bits: total("egress", "bytes").map(|bytes| bytes * 8.0),
        held: queues("egress").filter_map(|queue| queue.new["held"].as_u64()).sum(),
        holds: total("egress", "holds"),
        contended: total("egress", "contended"),
        drops: all,
        ingress: queues("ingress").map(ingress).collect(),
        egress: queues("egress").map(egress).collect(),
    }
}

/// Causes of drops in these queues.
fn drops(queues: &[Pair<'_>], ingress: bool) -> Vec<Drop> {
    let first = queues.first().and_then(|queue| queue.new.as_object());
    let names = first.into_iter().flat_map(|counters| counters.keys());
    // Frames lost because the port was full are drops of their senders, but this port's doing.
    let cause = |name: &str| {
        name.strip_prefix("drops_")
            .or_else(|| name.starts_with("lost_").then_some(name))
            .map(String::from)
    };
    let causes = names.filter_map(|name| Some((name, cause(name)?)));
    let drops = causes.map(|(name, cause)| Drop {
        cause,
        ingress,
        rate: queues.iter().map(|queue| queue.rate(name)).sum(),
        total: queues.iter().filter_map(|queue| queue.new[name].as_u64()).sum(),
    });
    drops.filter(|drop| drop.total > 0).collect()
}

fn ingress(pair: Pair<'_>) -> Queue {
    let now = pair.new;
    let recent = pair.per("first_frame_ns", "first_frames");
    let ever = Pair { old: &Value::Null, secs: 1.0, ..pair }.per("first_frame_ns", "first_frames");
    Queue {
        state: text(&now["state"]),
        worker: now["worker"].as_u64(),
        poll: text(&now["poll"]),
        weight: now["weight"].as_u64(),
        frames: pair.rate("frames"),
        polls: pair.rate("polls"),
        empty: pair.per("polls_empty", "polls"),
        sleeps: pair.rate("sleeps"),
        naps: pair.rate("naps"),
        kicks: pair.rate("kicks"),
        frames_per_kick: pair.per("frames", "kicks"),
        calls: pair.rate("calls"),
        frames_per_burst: pair.per("frames", "bursts"),
        served: pair.rate("served_ns").map(|ns| ns / 1e9),
        first_ns: recent.or(ever),
        first_ns_max: now["first_frame_ns_max"].as_f64().filter(|ns| *ns > 0.0),
    }
}

fn egress(pair: Pair<'_>) -> Egress {
    Egress {
        call: text(&pair.new["call"]),
        frames: pair.rate("frames"),
        calls: pair.rate("calls"),
        frames_per_call: pair.per("frames", "calls"),
        calls_late: pair.rate("calls_late"),
        kicks: pair.rate("kicks"),
        full: pair.rate("full"),
        held: pair.new["held"].as_u64(),
        contended: pair.rate("contended"),
        segmented: pair.rate("segmented"),
        checksummed: pair.rate("checksummed"),
    }
}

#[cfg(test)]
pub mod tests {
    use serde_json::json;

    use super::*;

    /// A switch with `ports` ports of `queues` queues each, after `secs` seconds of traffic.
    pub fn sample(pid: u32, secs: u64, ports: usize, queues: usize) -> Sample {
        let name = |i: usize| match i {
            0 => "a-long-name-015".into(),
            _ => format!("vm{i}"),
        };
        let n = |per_second: u64| per_second * secs;
        let states = ["hot", "warm", "cold"];
        let ingress = |i: usize| {
            json!({
                "frames": n(1_234_567), "bytes": n(98_765_432), "bursts": n(40_000),
                "polls": n(200_000), "polls_empty": n(50_000), "sleeps": n(12), "naps": n(345),
                "kicks": n(1_000), "calls": n(0), "served_ns": n(250_000_000),
                "first_frame_ns": n(12_300 * 20), "first_frames": n(20),
                "first_frame_ns_max": 1_500_000, "drops_runt": 0, "drops_no_room": n(1_500),
                "drops_link_local": n(2),
                "state": states[i % 3], "worker": i % 2, "poll": "coalesce:1000,32", "weight": 1,
            })
        };
        let egress = json!({
            "frames": n(500_000), "bytes": n(40_000_000), "calls": n(2_000), "call": "event",
            "contended": n(40), "drops_down": 0, "holds": n(7), "held": 4,
        });
        let stats_of = |i: usize| {
            json!({
                "name": name(i), "up": i % 4 != 3, "faults": u64::from(i == 2),
                "ingress": (0..queues).map(|q| ingress(i + q)).collect::<Vec<_>>(),
                "egress": vec![egress.clone(); queues],
            })
        };
        let show_of = |i: usize| {
            json!({
                "name": name(i), "kind": format!("vhost-user:/run/some/long/folder/{i}.sock"),
                "connected": i % 4 != 3, "queues": queues, "queues_active": queues,
                "features": ["CSUM", "GUEST_CSUM", "MRG_RXBUF", "EVENT_IDX"],
            })
        };
        let worker = json!({
            "tid": 1, "cpu_ns": n(421_000_000), "load": 380, "queues": ports * queues,
            "rounds": n(1_100_000), "sleeps": n(15), "naps": n(900), "moves": 3, "asleep": false,
        });
        Sample {
            show: json!({
                "version": "0.1.0", "pid": pid, "uptime_s": secs, "forward": "switch",
                "poll": "adaptive", "placement": "balanced", "workers": 2,
                "ports": (0..ports).map(show_of).collect::<Vec<_>>(),
            }),
            stats: json!({
                "uptime_ns": secs * 1_000_000_000,
                "ports": (0..ports).map(stats_of).collect::<Vec<_>>(),
                "workers": [worker.clone(), worker],
            }),
        }
    }

    #[test]
    fn rates_are_differences_over_the_switchs_clock() {
        let picture = picture(Some(&sample(1, 10, 2, 2)), &sample(1, 12, 2, 2));
        assert_eq!(picture.secs, 2.0);
        let (port, worker) = (&picture.ports[1], &picture.workers[0]);
        assert_eq!(port.in_frames, Some(2.0 * 1_234_567.0));
        assert_eq!(port.in_bits, Some(2.0 * 8.0 * 98_765_432.0));
        assert_eq!(port.drop_rate(), Some(2.0 * 1_502.0));
        let causes: Vec<_> = port.drops.iter().map(|d| (d.cause.as_str(), d.ingress)).collect();
        assert_eq!(causes, [("no_room", true), ("link_local", true)]);
        assert_eq!(worker.cpu, Some(0.421));
        let queue = &port.ingress[0];
        assert_eq!((queue.empty, queue.frames_per_kick), (Some(0.25), Some(1234.567)));
        assert_eq!((queue.first_ns, queue.first_ns_max), (Some(12_300.0), Some(1.5e6)));
        assert_eq!(port.egress[0].frames_per_call, Some(250.0));
        // A gauge, and a rate summed over both queues.
        assert_eq!((port.held, port.contended), (4 + 4, Some(80.0)));
    }

    #[test]
    fn first_sample_and_a_restarted_switch_have_no_rates() {
        let new = sample(2, 3, 1, 1);
        let before = [None, Some(sample(1, 10, 1, 1)), Some(sample(2, 3, 1, 1))];
        for old in before {
            let picture = picture(old.as_ref(), &new);
            assert_eq!((picture.secs, picture.ports[0].in_frames), (0.0, None));
            assert_eq!(picture.workers[0].cpu, None);
            assert_eq!(picture.ports[0].ingress[0].state, "hot", "only rates are unknown");
        }
    }

    #[test]
    fn state_is_that_of_the_switch_or_for_an_older_one_up_or_down() {
        let mut sample = sample(1, 1, 4, 1);
        sample.show["ports"][1]["state"] = "draining".into();
        let states: Vec<_> =
            picture(None, &sample).ports.into_iter().map(|port| port.state).collect();
        assert_eq!(states, ["up", "draining", "up", "down"]);
    }

    /// Issue 16, row 8: what a full port makes its senders lose is shown at that port.
    #[test]
    fn losses_of_a_full_receiver_are_shown_at_the_receiver() {
        let (mut old, mut new) = (sample(1, 1, 2, 1), sample(1, 2, 2, 1));
        old.stats["ports"][1]["egress"][0]["lost_no_room"] = 10.into();
        new.stats["ports"][1]["egress"][0]["lost_no_room"] = 5_010.into();
        let port = &picture(Some(&old), &new).ports[1];
        assert_eq!(port.drops[0].name(), "to:lost_no_room");
        assert_eq!((port.drops[0].rate, port.drops[0].total), (Some(5_000.0), 5_010));
    }

    #[test]
    fn port_added_between_samples_counts_from_zero() {
        let picture = picture(Some(&sample(1, 1, 1, 1)), &sample(1, 2, 2, 1));
        assert_eq!(picture.ports[1].in_frames, Some(2.0 * 1_234_567.0));
    }

    #[test]
    fn empty_or_unknown_replies_are_accepted() {
        let empty = Sample { show: json!({}), stats: json!({"ports": [{}], "workers": [{}]}) };
        let picture = picture(Some(&empty), &empty);
        assert_eq!((picture.ports.len(), picture.workers.len()), (1, 1));
        assert_eq!(picture.ports[0].drop_rate(), Some(0.0));
    }
}
