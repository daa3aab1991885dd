//! `features`: what the options of ports cost each frame.

use api::Request;

use super::grid::{shown, values};
use super::pair::{self, receiver_class, worker_percent};
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::{Part, Table, Value, Verdict};
use crate::stage::{
    Gen, NicOptions, Port, Proto, REPLAY_RING, Switch, SwitchOptions, Window, sleep,
};
use crate::stats::paired::Estimate;
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

/// Smallest part of the rate without rules that a port with rules must reach.
const KEPT_MIN: f64 = 0.9;
/// Windows of a run, each half with and half without the option, in an order in which a drift is
/// the same for both.
const WINDOWS: [bool; 8] = [false, true, true, false, false, true, true, false];
/// Time in which workers take a setting.
const SETTLE_S: f64 = 0.02;
/// VLAN of the rules.
const VLAN: u16 = 5;

const ABOUT: &str = "\
A guest sends frames of 60 bytes to another as fast as it can, through one worker with the policy \
spin; both are generators that do not touch their frames (gen --replay), so that the switch limits \
the rate. The option is set and taken back (ctl set) several times in each run, and a figure is of \
the windows with it over those without it, in the same run: whole runs of one cell differ by \
half, by where their memory lies. The option none sets nothing, and is the noise. rules: mac=, ip= \
and vlan= at the sender, vlan= at the receiver. rates: rate-in= at the sender and rate-out= at the \
receiver, beyond what they reach. storm: storm= at the sender, none of whose frames is flooded. \
loop-guard: loop-guard=block at both. mirror: mirror-to= at the sender, to a port that drops each \
copy.";

const MEASURES: [Measure; 4] = [
    Measure::new("kept", "", Better::More, "rate with the option over the rate without it"),
    Measure::new(
        "frame_time",
        "",
        Better::Less,
        "time of the worker for each frame with the option over that without it",
    ),
    Measure::new("delivered", "1/s", Better::More, "frames delivered without the option"),
    Measure::new("cpu", "%", Better::Neither, "CPU time of the worker, of one CPU"),
];

/// The study.
pub struct Features;

const FACTS: Facts = Facts {
    name: "features",
    about: "what rules, rates, mirrors and guards of ports cost each frame",
    original: None,
    measures: &MEASURES,
    takes_proto: false,
    tools: &[],
    together: None,
    margin: 1.0 / KEPT_MIN,
    control: &[("feature", "none")],
};

/// All of them, the base first.
const ALL: [&str; 6] = ["none", "rules", "rates", "storm", "loop-guard", "mirror"];

/// Settings: of which guest's port, with the option, without it.
type Settings = Vec<(&'static str, Vec<String>, Vec<String>)>;

/// What a feature sets, guest 0 being the sender.
fn settings(feature: &str) -> Result<Settings, Fail> {
    let of = |guest, keys: &[(&str, &str, &str)]| {
        let on = keys.iter().map(|(key, on, _)| format!("{key}={on}")).collect();
        let off = keys.iter().map(|(key, _, off)| format!("{key}={off}")).collect();
        (guest, on, off)
    };
    let (mac, vlan) = (Gen::mac(0), VLAN.to_string());
    // The address of its frames.
    let rules = [("mac", &*mac, "none"), ("ip", "10.9.0.0", "none"), ("vlan", &*vlan, "none")];
    Ok(match feature {
        "none" => vec![],
        "rules" => vec![of("g0", &rules), of("g1", &rules[2..])],
        "rates" => vec![
            of("g0", &[("rate-in", "1000Gbit", "none")]),
            of("g1", &[("rate-out", "1000Gbit", "none")]),
        ],
        "storm" => vec![of("g0", &[("storm", "100Mframes", "none")])],
        "loop-guard" => {
            let guard = [("loop-guard", "block", "report")];
            vec![of("g0", &guard), of("g1", &guard)]
        }
        "mirror" => vec![of("g0", &[("mirror-to", "m", "none")])],
        _ => return Err(Fail::Cell(format!("unknown feature {feature}"))),
    })
}

/// Frames delivered, their time and that of the worker, in the windows of one kind.
#[derive(Default)]
struct Sum {
    frames: f64,
    seconds: f64,
    cpu: f64,
}

impl Sum {
    fn rate(&self) -> f64 {
        self.frames / self.seconds
    }

    fn frame_time(&self) -> f64 {
        self.cpu / self.frames
    }
}

impl Study for Features {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let seconds = match scale {
            Scale::Smallest => 0.4,
            Scale::Quick => 1.0,
            Scale::Usual => 2.0,
            Scale::Full => 10.0,
        };
        Plan::new(FACTS.name, 1, seconds, vec![Axis::new("feature", ALL)]).with_power(self, scale)
    }

    fn has(&self, _cell: &Cell) -> bool {
        true
    }

    fn overhead_s(&self, _cell: &Cell) -> f64 {
        pair::OVERHEAD_S + WINDOWS.len() as f64 * SETTLE_S
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let stage = run.stage;
        let settings = settings(run.cell.get("feature"))?;
        let guests = ["g0", "g1"].map(|name| Port::guest(stage, name, Proto::Virtio, ""));
        let ports = [&guests[..], &[Port::null("m")]].concat();
        let switch = Switch::start(stage, &SwitchOptions::new(stage, "spin"), &ports)?;
        let options = NicOptions::replay(stage, REPLAY_RING)?;
        let class = receiver_class(stage);
        let mut sink = Gen::start_as(stage, 1, &guests[1], &options, "sink", class)?;
        switch.wait_up_while(2, || sink.check())?;
        // Known in either VLAN: the receiver announces its address once.
        for vlan in [0, VLAN] {
            let (mac, port) = (Gen::mac(1), "g1".into());
            switch.ask(&Request::FdbAdd { mac, port, vlan })?;
        }
        let mode = format!("send --peer {}", Gen::mac(1));
        let mut sender = Gen::start(stage, 0, &guests[0], &options, &mode)?;
        switch.wait_up_while(3, || sender.check())?;
        let slice = run.seconds / WINDOWS.len() as f64;
        // The first frames are slower than all others.
        sleep(pair::WARM_S + slice);
        let mut sums = [Sum::default(), Sum::default()];
        for on in WINDOWS {
            for (guest, with, without) in &settings {
                let words = if on { with } else { without };
                let words: Vec<_> = words.iter().map(String::as_str).collect();
                switch.set(Some(guest), &words)?;
            }
            sleep(SETTLE_S);
            let window = Window::open(&switch, &[])?;
            sleep(slice);
            let count = window.close()?;
            let (sum, frames) = (&mut sums[usize::from(on)], count.egress("g1", "frames"));
            if frames == 0.0 {
                return Err(Fail::Cell(format!("no frame arrives; the option is set: {on}")));
            }
            sum.frames += frames;
            sum.seconds += count.seconds;
            sum.cpu += worker_percent(&count) * count.seconds;
        }
        sender.check()?;
        sink.check()?;
        switch.check()?;
        let [without, with] = sums;
        Ok(Figures::from([
            ("kept", with.rate() / without.rate()),
            ("frame_time", with.frame_time() / without.frame_time()),
            ("delivered", without.rate()),
            ("cpu", (with.cpu + without.cpu) / (with.seconds + without.seconds)),
        ]))
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let about = Part::Text { title: "How to read this".into(), body: ABOUT.into() };
        std::iter::once(about).chain(table(results)).collect()
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        kept(results).into_iter().collect()
    }
}

/// A measure of all runs with a feature.
fn of(results: &Results, feature: &str, measure: &str) -> Option<Estimate> {
    Estimate::of(&results.values(|cell| cell.get("feature") == feature, measure))
}

/// Judges the rate with rules; an interval with the least in it cannot tell.
fn kept(results: &Results) -> Option<Verdict> {
    let Estimate { median, low, high, interval, .. } = of(results, "rules", "kept")?;
    let holds = match interval {
        true if low >= KEPT_MIN => Some(true),
        true if high < KEPT_MIN => Some(false),
        _ => None,
    };
    let what = format!(
        "with rules {:.0} % or more of the rate without: {median:.3} ({low:.3}-{high:.3})",
        100.0 * KEPT_MIN,
    );
    Some(Verdict { what, holds })
}

fn table(results: &Results) -> Option<Part> {
    let ratio =
        |feature: &str, measure| Value::estimate(of(results, feature, measure), 3, "not measured");
    let rows: Vec<_> = values(results, "feature")
        .iter()
        .map(|feature| {
            vec![
                Value::Text(feature.clone()),
                ratio(feature, "kept"),
                ratio(feature, "frame_time"),
                shown(of(results, feature, "delivered")),
            ]
        })
        .collect();
    let columns =
        ["option", "rate, of that without", "time of a frame, of that without", "frames/s without"];
    (!rows.is_empty()).then(|| {
        Part::Table(Table {
            title: "What is left of the rate with each option".into(),
            note: "Medians over runs, each of which is with and without the option in turn.".into(),
            columns: columns.map(Into::into).to_vec(),
            rows,
            command: "pvswitch lab run features".into(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_feature_is_taken_back_and_none_sets_nothing() {
        for feature in ALL {
            let settings = settings(feature).unwrap();
            assert_eq!(settings.is_empty(), feature == "none");
            for (_, on, off) in settings {
                let keys = |of: &[String]| -> Vec<String> {
                    of.iter().map(|pair| pair.split('=').next().unwrap().into()).collect()
                };
                assert_eq!(keys(&on), keys(&off));
                assert!(on.iter().zip(&off).all(|(on, off)| on != off));
            }
        }
    }

    #[test]
    fn a_drift_is_the_same_with_and_without() {
        let mean = |on| {
            let at = WINDOWS.iter().enumerate().filter(|(_, window)| **window == on);
            at.map(|(i, _)| i).sum::<usize>()
        };
        assert_eq!(mean(true), mean(false));
    }
}
