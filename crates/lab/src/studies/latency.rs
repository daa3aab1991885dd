//! `latency`: the first frame after idle time, and traffic that alternates about as fast as a
//! policy adapts.

use super::grid::Grid;
use super::pair::{self, FEW, JUDGED, MEASURES, POLICIES, Pair};
use super::policies::tables;
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::{Part, Verdict};
use crate::store::Results;
use crate::study::{Facts, Figures, Run, Study};

/// Frames a second while traffic is on.
const RATE: u32 = 100_000;
/// Frames after a silence, at least: a window is longer where it has to be.
const SAMPLES_LEAST: f64 = 10.0;
/// After a silence: the receiver polls.
const POLLED: &str = "-polled";

const ABOUT: &str = "\
silence-N: one frame every N ms, so that each is the first after an idle time; with few frames, \
the 99th percentile is the slowest. After 200 ms the caches and translations of addresses are \
cold, after 2 ms hardly: most of the difference is the machine's. silence-N-polled: the receiver \
polls, so that the switch does not notify it. at-once: 50 frames every millisecond, back to back. \
on-off-N: 100 000 frames per second for N ms, then none for as long. Latency is from the sender's \
ring to the receiver's program. It includes the receiver's wake-up, which is the same for every \
policy: spin shows the minimum.";

/// The study.
pub struct Latency;

/// What is behind a word, as a number of ms.
fn ms(traffic: &str, word: &str) -> Option<f64> {
    traffic.strip_prefix(word)?.parse().ok()
}

/// How long a silence is, in ms.
fn silence_ms(traffic: &str) -> Option<f64> {
    ms(traffic.strip_suffix(POLLED).unwrap_or(traffic), "silence-")
}

/// How long a window is.
fn window_s(traffic: &str, seconds: f64) -> f64 {
    silence_ms(traffic).map_or(seconds, |gap| seconds.max(SAMPLES_LEAST * gap / 1e3))
}

/// Options of `gen`.
fn options(traffic: &str) -> Option<String> {
    if traffic == "at-once" {
        return Some("--burst 50,1000".into());
    }
    if let Some(gap) = silence_ms(traffic) {
        return Some(format!("--rate {}", 1e3 / gap));
    }
    ms(traffic, "on-off-").map(|ms| format!("--rate {RATE} --on-off {ms},{ms}"))
}

const FACTS: Facts = Facts {
    name: "latency",
    about: "how late a first frame comes after idle, and frames of bursts that come and go",
    original: None,
    measures: &MEASURES,
    takes_proto: true,
    tools: &[],
    together: None,
    // As of the policies.
    margin: 1.1,
    control: &[("traffic", "on-off-5")],
};

impl Study for Latency {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let all = [
            "silence-1000",
            "silence-200",
            "silence-200-polled",
            "silence-2",
            "at-once",
            "on-off-0.5",
            "on-off-1",
            "on-off-5",
            "on-off-20",
        ];
        let (traffic, policies, seconds, repeats): (&[&str], &[&str], f64, u32) = match scale {
            Scale::Smallest => (&["silence-50", "at-once", "on-off-5"], &JUDGED, 0.5, 1),
            Scale::Quick => (&["at-once", "on-off-1", "on-off-5"], &FEW, 1.0, 1),
            Scale::Usual => (&all[1..], &POLICIES, 2.0, 1),
            Scale::Full => (&all, &POLICIES, 50.0, 1),
        };
        Plan::new(
            FACTS.name,
            repeats,
            seconds,
            vec![Axis::new("traffic", traffic), Axis::new("policy", policies)],
        )
        .with_power(self, scale)
    }

    fn has(&self, _cell: &Cell) -> bool {
        true
    }

    fn overhead_s(&self, cell: &Cell) -> f64 {
        // As for a window of a second: its length is unknown here.
        pair::OVERHEAD_S + window_s(cell.get("traffic"), 1.0) - 1.0
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let (policy, traffic) = (run.cell.get("policy"), run.cell.get("traffic"));
        let Some(options) = options(traffic) else {
            return Err(Fail::Cell(format!(
                "traffic {traffic}: use silence-N, silence-N{POLLED}, at-once or on-off-N"
            )));
        };
        let seconds = window_s(traffic, run.seconds);
        let polled = traffic.ends_with(POLLED);
        Pair { polled, ..Pair::new(policy, &options) }.run(run.stage, seconds)
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let grid = Grid { results, fixed: &[], rows: "policy", columns: "traffic" };
        let mut parts = vec![Part::Text { title: "How to read this".into(), body: ABOUT.into() }];
        let y = "us from guest to guest";
        for (title, file, measure) in [
            ("Latency, half of the frames", "latency-p50", "p50"),
            ("Latency, 99th percentile", "latency-p99", "p99"),
        ] {
            parts.extend(grid.plot(title, file, "traffic", y, measure));
        }
        let note = "The switch's own part: from its wake-up to the frame's delivery, with the \
                    notification of a receiver that sleeps.";
        parts.extend(grid.table("First frame after idle, in the switch, us", note, "first_frame"));
        parts.extend(tables(&grid, "Columns: traffic, as described above."));
        parts
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        let all = [pair::accounted(results), sleeps_between(results)];
        all.into_iter().flatten().collect()
    }
}

/// Judges that the worker sleeps before each frame after a silence, with `event` at most once per
/// notification.
fn sleeps_between(results: &Results) -> Option<Verdict> {
    let wanted =
        |cell: &Cell| cell.get("traffic").starts_with("silence-") && cell.get("policy") == "event";
    let kicks = results.values(wanted, "kicks");
    let least = kicks.iter().copied().min_by(f64::total_cmp)?;
    Some(Verdict {
        what: format!(
            "event: each frame after a silence has its kick: {least:.2} or more for each frame in \
             {} runs",
            kicks.len()
        ),
        holds: Some(least >= 1.0),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_traffic_is_known_to_the_generator() {
        for scale in [Scale::Smallest, Scale::Quick, Scale::Usual, Scale::Full] {
            for traffic in &Latency.plan(scale).axes[0].values {
                assert!(options(traffic).is_some(), "{traffic}");
            }
        }
        assert_eq!(options("silence-200").as_deref(), Some("--rate 5"));
        assert_eq!(options("silence-200-polled").as_deref(), Some("--rate 5"));
        assert_eq!(options("on-off-0.5").as_deref(), Some("--rate 100000 --on-off 0.5,0.5"));
        assert_eq!(options("sometimes"), None);
    }

    #[test]
    fn a_window_has_frames_enough() {
        assert_eq!(window_s("silence-1000", 2.0), 10.0);
        assert_eq!(window_s("silence-1000-polled", 2.0), 10.0);
        assert_eq!(window_s("silence-50", 2.0), 2.0);
        assert_eq!(window_s("on-off-5", 2.0), 2.0);
    }
}
