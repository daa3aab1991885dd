//! `outages`: how long frames wait while the next process takes over a switch.

use api::Request;

use super::grid::Grid;
use super::idle::private_kib;
use super::pair::{self, Idle, number};
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::{Part, Verdict};
use crate::stage::{Gen, Port, Switch, Window, sleep, wait_for};
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

/// Time in which a switch with `--keep` stores its ports for the next process.
const SETTLE_S: f64 = 2.0;
/// Frames of a guest that show that it is served.
const SERVED_MIN: f64 = 20.0;
/// Longest time until it is served again.
const SERVED_MAX_S: f64 = 30.0;
/// Time after which `gen --mode rr` counts a request as lost, in ms, and sends the next.
const LOST_AFTER_MS: f64 = 100.0;

const ABOUT: &str = "\
Two guests, of which one sends a request as soon as it has the last one's reply, beside idle \
guests; all are connected. upgrade: ctl upgrade hands the switch to a new process of the same \
program. kill: SIGKILL, after which the keeper (--keep) starts the next process. The outage is \
what the switch reports: from the moment in which the old process stops forwarding, or its end is \
noticed, until the new one forwards. The longest round trip is the guest's view, from the signal; \
a request without a reply counts as 100 ms, after which the next is sent.";

const MEASURES: [Measure; 5] = [
    Measure::new(
        "outage",
        "ms",
        Better::Less,
        "from the stop of the old process, or the notice of its end, until the next forwards",
    ),
    Measure::new(
        "longest",
        "ms",
        Better::Less,
        "longest round trip of a guest that waits for each reply",
    ),
    Measure::new("p50", "us", Better::Less, "its median round trip, before and after"),
    Measure::new("ended", "", Better::Less, "guests' connections that ended"),
    Measure::new("memory", "KiB", Better::Less, "private memory of the next process"),
];

/// The study.
pub struct Outages;

const FACTS: Facts = Facts {
    name: "outages",
    about: "how long frames wait while another process takes over: ctl upgrade, kill -9",
    original: None,
    measures: &MEASURES,
    takes_proto: true,
    tools: &[],
    together: None,
    // A quarter more or less is no other outage.
    margin: 1.25,
    control: &[("ports", "100")],
};

impl Study for Outages {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let (ports, seconds): (&[u32], f64) = match scale {
            Scale::Smallest => (&[10], 0.2),
            Scale::Quick => (&[10, 100], 0.5),
            Scale::Usual => (&[2, 10, 100, 1000], 0.5),
            Scale::Full => (&[2, 10, 100, 300, 1000, 3000], 2.0),
        };
        let axes = vec![Axis::new("ports", ports), Axis::new("way", ["upgrade", "kill"])];
        Plan::new(FACTS.name, 1, seconds, axes).with_power(self, scale)
    }

    fn has(&self, cell: &Cell) -> bool {
        // Two are the pair's.
        cell.number("ports") >= 2.0
    }

    fn overhead_s(&self, cell: &Cell) -> f64 {
        pair::OVERHEAD_S + SETTLE_S + cell.number("ports") / 300.0
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let (stage, ports) = (run.stage, run.cell.number("ports") as usize);
        let pair = ["g0", "g1"].map(|name| Port::guest(stage, name, stage.proto, ""));
        let idle = Idle::new(stage, ports.saturating_sub(pair.len()))?;
        let mut options = pair::switch_options(stage, "adaptive");
        options.more.push("--keep".into());
        let switch = Switch::start(stage, &options, &[&pair[..], &idle.ports].concat())?;
        let _idle = idle.start(stage)?;
        let guests = pair::guest_options();
        let mode = format!("echo --peer {}", Gen::mac(0));
        let mut echo = Gen::start(stage, 1, &pair[1], &guests, &mode)?;
        switch.wait_up_while(ports - 1, || echo.check())?;
        let mode = format!("rr --peer {}", Gen::mac(1));
        let mut asks = Gen::start(stage, 0, &pair[0], &guests, &mode)?;
        switch.wait_up_while(ports, || asks.check())?;
        sleep(SETTLE_S + run.seconds);
        let taken_over = match run.cell.get("way") {
            "upgrade" => switch.upgrade()?,
            _ => switch.kill()?,
        };
        serves(&switch)?;
        sleep(run.seconds);
        let ended = ended(&switch)?;
        let report = asks.end()?;
        let late = number(&report, "lost_frames") * LOST_AFTER_MS;
        let figures = Figures::from([
            ("outage", number(&taken_over, "outage_us") / 1e3),
            ("longest", late.max(number(&report, "latency_ns_max") / 1e6)),
            ("p50", number(&report, "latency_ns_p50") / 1e3),
            ("ended", ended),
            ("memory", private_kib(switch.id())),
        ]);
        echo.check()?;
        switch.check()?;
        Ok(figures)
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let mut parts = vec![Part::Text { title: "How to read this".into(), body: ABOUT.into() }];
        let grid = Grid { results, fixed: &[], rows: "way", columns: "ports" };
        parts.extend(grid.plot(
            "Longest round trip of a guest over an upgrade, or over a kill",
            "longest",
            "ports",
            "ms",
            "longest",
        ));
        for (title, measure) in [
            ("Longest round trip of a guest, ms", "longest"),
            ("Outage as the switch reports it, ms", "outage"),
            ("Private memory of the next process, KiB", "memory"),
        ] {
            parts.extend(grid.table(title, "Columns: connected ports.", measure));
        }
        parts
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        let ended = results.values(|_| true, "ended");
        let sum: f64 = ended.iter().sum();
        let what = format!(
            "no connection of a guest ends over an upgrade or a kill: {sum} in {} runs",
            ended.len()
        );
        if ended.is_empty() { Vec::new() } else { vec![Verdict { what, holds: Some(sum == 0.0) }] }
    }
}

/// Waits until the first guest's requests are forwarded again.
fn serves(switch: &Switch) -> Result<(), Fail> {
    let arrived = || Ok::<_, Fail>(Window::open(switch, &[])?.total("g1", "frames"));
    let before = arrived()?;
    let what = "frames that the next process forwards";
    wait_for(what, SERVED_MAX_S, || Ok(arrived()? - before >= SERVED_MIN))
}

/// Number of ports whose guest has connected again, or is not connected.
fn ended(switch: &Switch) -> Result<f64, Fail> {
    let show = switch.ask(&Request::Show)?;
    let ports = show["ports"].as_array().into_iter().flatten();
    Ok(ports.filter(|port| port["up"] != true || port["connections"] != 1).count() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upgrade_is_the_base_and_ports_include_the_pair() {
        for scale in [Scale::Smallest, Scale::Quick, Scale::Usual, Scale::Full] {
            for both in Outages.plan(scale).cells(&Outages).chunks(2) {
                let ways: Vec<_> = both.iter().map(|cell| cell.get("way")).collect();
                assert_eq!(ways, ["upgrade", "kill"]);
                assert_eq!(both[0].outer(), both[1].outer());
                assert!(both[0].number("ports") >= 2.0);
            }
        }
    }
}
