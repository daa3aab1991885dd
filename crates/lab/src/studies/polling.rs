//! `polling`: savings of a timer in the front end over events.

use std::collections::BTreeMap;

use super::bulk::{Bulk, gigabit_tcp, gigabit_udp};
use crate::claims::Claim;
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::Part;
use crate::report::{Original, Verdict};
use crate::stage::{Link, NicOptions, Proto, SwitchOptions};
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

mod original;
mod tables;

/// Calls per second with events above which a reduction is judged. Low, because rates are low on a
/// busy machine, and each cell left out weakens the judgement.
const CALLS_MANY: f64 = 50.0;
/// Share of them that polling must avoid.
const CALLS_FALL: f64 = 0.9;
/// Minimum of bytes that arrive with polling, relative to events. Low, because runs of one repeat
/// differ by as much on a busy machine.
const BYTES_LEAST: f64 = 0.3;

/// "The performance is not impacted": its greatest change is that of nine guests which receive UDP
/// of 1500 bytes, 953.48 and 904.17 Mbit/s.
const THROUGHPUT_MARGIN: f64 = 1.055;

/// Smart poll's timer without the feature: the ring is not armed while it runs, and the back end
/// does not know of the polling. The difference to smart poll is the feature alone.
const NOT_ARMED: &str = "not-armed";

/// The study.
pub struct Polling;

const MEASURES: [Measure; 12] = [
    Measure::new("throughput", "Mbit/s", Better::More, "payload that arrived, all guests together"),
    Measure::new("backend_cpu", "%", Better::Less, "CPU time of the switch, of one CPU"),
    Measure::new("guests_cpu", "%", Better::Less, "CPU time of all guests: NIC, kernel and tools"),
    Measure::new(
        "host_cpu",
        "%",
        Better::Neither,
        "CPU time of the tools outside, which are no part",
    ),
    Measure::new(
        "events",
        "1/s",
        Better::Less,
        "notifications between guests and switch, both ways",
    ),
    Measure::new("calls", "1/s", Better::Less, "notifications from the switch to guests"),
    Measure::new("kicks", "1/s", Better::Less, "notifications from guests to the switch"),
    Measure::new(
        "frames",
        "1/s",
        Better::Neither,
        "frames to guests, or from them where they send",
    ),
    Measure::new(
        "guest_us_per_mb",
        "us/MB",
        Better::Less,
        "CPU time of guests for each million bytes of payload; frames are no measure with TSO",
    ),
    Measure::new("lost", "%", Better::Less, "datagrams that did not arrive"),
    Measure::new(
        "ping_p50",
        "us",
        Better::Less,
        "round trip of pings to a guest beside the bulk, median",
    ),
    Measure::new(
        "ping_p99",
        "us",
        Better::Less,
        "the round trip that 99 of 100 of them stay within",
    ),
];

/// Options of front end and port: poll policy and smart poll.
fn front_end(variant: &str, proto: Proto) -> Result<(NicOptions, &'static str), Fail> {
    let poll = match variant {
        "event" => "event",
        "smart-poll" | NOT_ARMED => "timer:1000",
        "timer" => "timer:5000",
        "adaptive" => "adaptive",
        _ => return Err(Fail::Cell(format!("unknown variant {variant}"))),
    };
    let mut nic = NicOptions::new(poll);
    // Virtqueues need no such feature: a queue that is not armed is not called.
    let smart = variant == "smart-poll" && proto == Proto::Xen;
    if smart {
        nic.connect = ",smart-poll=on".into();
    }
    Ok((nic, if smart { ",smart-poll=on" } else { "" }))
}

const FACTS: Facts = Facts {
    name: "polling",
    about: "how much CPU guests save when they poll by a timer instead of being called",
    original: Some(Original {
        source: "Dongxiao Xu, xen-devel, 10 September 2009: data polling in netfront in place \
                 of events; Intel Q9550, netperf",
        claim: "At the same throughput, a poll timer of 1 kHz in the guests reduces guest CPU \
                by about half from three guests on, and dom0 CPU by up to a quarter.",
    }),
    measures: &MEASURES,
    takes_proto: false,
    tools: &["iperf3", "ping", "ip", "tc", "ethtool", "nsenter"],
    together: None,
    // The smallest effect is dom0's CPU, less by a quarter: half of that.
    margin: 1.15,
    control: &[("guests", "3"), ("traffic", "tcp"), ("direction", "receive")],
};

impl Study for Polling {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let few = matches!(scale, Scale::Smallest);
        let quick = few || scale == Scale::Quick;
        let full = scale == Scale::Full;
        let pick = |few_of: usize, all: &[&'static str]| -> Vec<&'static str> {
            all[..if quick { few_of } else { all.len() }].to_vec()
        };
        let mut uplinks = vec!["1g"];
        let mut protos = vec!["xen"];
        if full {
            uplinks.push("unlimited");
            protos.push("virtio");
        }
        let variants = if quick {
            vec!["event", "smart-poll"]
        } else {
            vec!["event", "smart-poll", NOT_ARMED, "timer", "adaptive"]
        };
        let seconds = match scale {
            Scale::Smallest | Scale::Quick => 1.5,
            Scale::Usual => 2.0,
            Scale::Full => 10.0,
        };
        Plan::new(
            FACTS.name,
            1,
            seconds,
            vec![
                Axis::new("guests", pick(2, &["1", "3", "6", "9"])),
                Axis::new("size", pick(1, &["1472", "1500", "50"])),
                Axis::new("traffic", pick(2, &["udp", "tcp"])),
                Axis::new("direction", pick(1, &["receive", "send"])),
                Axis::new("uplink", uplinks),
                Axis::new("proto", protos),
                Axis::new("variant", variants),
            ],
        )
        .with_power(self, scale)
    }

    fn has(&self, cell: &Cell) -> bool {
        if cell.get("variant") == NOT_ARMED && cell.get("proto") != "xen" {
            // There it is the same as smart poll.
            return false;
        }
        cell.get("size") != "50" || cell.get("guests") == "1" && cell.get("direction") == "receive"
    }

    fn overhead_s(&self, cell: &Cell) -> f64 {
        1.2 + 0.2 * cell.number("guests")
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let cell = run.cell;
        let proto: Proto = cell.get("proto").parse().map_err(Fail::Cell)?;
        let (nic, port) = front_end(cell.get("variant"), proto)?;
        let size = cell.number("size") as u32;
        let limited = cell.get("uplink") == "1g";
        let (send, udp) = (cell.get("direction") == "send", cell.get("traffic") == "udp");
        let bulk = Bulk {
            proto,
            guests: cell.number("guests") as usize,
            port,
            outside: "",
            nic,
            // Like netback: woken by each event, and notifies at once.
            switch: SwitchOptions::new(run.stage, "event"),
            link: if limited { Link::Gigabit { to_guests: !send } } else { Link::Tap },
            from_guests: send,
            udp,
            len: size,
            bits_per_s: match (limited, udp) {
                (true, true) => gigabit_udp(size),
                (true, false) => gigabit_tcp(),
                (false, _) => 0.0,
            },
            streams: 1,
            ping: true,
        };
        let done = bulk.run(run.stage, run.seconds)?;
        let count = &done.count;
        let frames = if send { count.ingress("g", "frames") } else { count.egress("g", "frames") };
        let guests_ns: u64 = count.roles_ns.iter().skip(1).sum();
        let megabytes = done.arrived_bits_per_s * count.seconds / 8e6;
        let (calls, kicks) = (count.calls("g"), count.kicks("g"));
        let mut figures = BTreeMap::from([
            ("throughput", done.arrived_bits_per_s / 1e6),
            ("backend_cpu", count.percent(count.switch_ns)),
            ("guests_cpu", done.guests_percent()),
            ("host_cpu", done.host_percent()),
            ("events", count.per_second(calls + kicks)),
            ("calls", count.per_second(calls)),
            ("kicks", count.per_second(kicks)),
            ("frames", count.per_second(frames)),
            ("guest_us_per_mb", guests_ns as f64 / 1e3 / megabytes.max(1e-6)),
            ("lost", done.lost_percent),
        ]);
        let pings = done.pings.as_ref();
        for (name, part) in [("ping_p50", 0.5), ("ping_p99", 0.99)] {
            if let Some(us) = pings.and_then(|pings| pings.quantile_us(part)) {
                figures.insert(name, us);
            }
        }
        Ok(figures)
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        tables::parts(results)
    }

    fn claims(&self, plan: &Plan) -> Vec<Claim> {
        let cells = plan.cells(self);
        let rows = original::TABLE.iter().flat_map(|row| {
            let of = |cell: &&Cell| row.is_of(cell) && cell.get("variant") == "smart-poll";
            cells.iter().filter(of).map(move |cell| (row, cell))
        });
        rows.flat_map(|(row, cell)| {
            let pair = [cell.clone(), cell.with("variant", "event")];
            let ratio = |at: usize| row.with[at] / row.without[at];
            let (cpu, same) = (format!("{row}: guests' CPU"), format!("{row}: throughput"));
            [
                Claim::of_ratio(cpu, pair.clone(), "guests_cpu", ratio(2), FACTS.margin),
                Claim::of_ratio(same, pair, "throughput", ratio(0), THROUGHPUT_MARGIN),
            ]
        })
        .collect()
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        let mut fall = Fall::default();
        let of = |cell: &Cell, measure| results.summary(cell, measure).map(|found| found.median);
        for cell in results.cells() {
            if cell.get("variant") != "smart-poll" || cell.get("direction") != "receive" {
                continue;
            }
            let base = cell.with("variant", "event");
            let [Some(calls), Some(base_calls), Some(bits), Some(base_bits)] = [
                of(cell, "calls"),
                of(&base, "calls"),
                of(cell, "throughput"),
                of(&base, "throughput"),
            ] else {
                continue;
            };
            fall.add(cell, (base_calls, calls), (base_bits, bits));
        }
        fall.verdicts()
    }
}

/// Calls and payload over all pairs of cells.
#[derive(Default)]
struct Fall {
    cells: u32,
    calls: (f64, f64),
    /// In Mbit/s.
    payload: (f64, f64),
    /// The cell with the least reduction of calls, and the share.
    least: Option<(f64, String)>,
}

impl Fall {
    fn add(&mut self, cell: &Cell, calls: (f64, f64), payload: (f64, f64)) {
        if calls.0 < CALLS_MANY {
            return;
        }
        self.cells += 1;
        self.calls = (self.calls.0 + calls.0, self.calls.1 + calls.1);
        self.payload = (self.payload.0 + payload.0, self.payload.1 + payload.1);
        let fell = 1.0 - calls.1 / calls.0;
        if self.least.as_ref().is_none_or(|(least, _)| fell < *least) {
            self.least = Some((fell, cell.to_string()));
        }
    }

    fn verdicts(&self) -> Vec<Verdict> {
        let Some((least, cell)) = &self.least else { return Vec::new() };
        let fewer = format!(
            "smart poll avoids at least {:.0} % of the calls to receiving guests: {:.0} per \
             second with events and {:.0} with it, over {} cells with {CALLS_MANY} or more; \
             least in {cell}: {:.1} %",
            100.0 * CALLS_FALL,
            self.calls.0,
            self.calls.1,
            self.cells,
            100.0 * least,
        );
        let bytes = format!(
            "at least {:.0} % of the bytes arrive: {:.0} Mbit/s with events and {:.0} with \
             smart poll, all together",
            100.0 * BYTES_LEAST,
            self.payload.0,
            self.payload.1,
        );
        vec![
            Verdict { what: fewer, holds: Some(self.calls.1 <= (1.0 - CALLS_FALL) * self.calls.0) },
            Verdict { what: bytes, holds: Some(self.payload.1 >= BYTES_LEAST * self.payload.0) },
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_of_the_original_study_is_a_cell_of_the_full_matrix() {
        let cells = Polling.plan(Scale::Full).cells(&Polling);
        for row in &original::TABLE {
            let is = |cell: &&Cell| row.is_of(cell);
            // Two uplinks; five front ends with Xen's rings, four with virtqueues.
            assert_eq!(cells.iter().filter(is).count(), 2 * (5 + 4));
        }
    }

    #[test]
    fn smart_poll_has_a_counterpart_that_differs_by_the_feature_only() {
        let cells = Polling.plan(Scale::Usual).cells(&Polling);
        let of = |variant| {
            let is = |cell: &&Cell| cell.get("variant") == variant;
            cells.iter().filter(is).map(|cell| cell.with("variant", "")).collect::<Vec<_>>()
        };
        assert!(!of("smart-poll").is_empty() && of("smart-poll") == of(NOT_ARMED));
        let front = |variant| front_end(variant, Proto::Xen).unwrap();
        let (smart, plain, precise) = (front("smart-poll"), front(NOT_ARMED), front("timer"));
        assert_eq!((smart.0.poll.as_str(), precise.0.poll.as_str()), ("timer:1000", "timer:5000"));
        assert_eq!(plain.0.poll, smart.0.poll);
        let options = |(nic, port): &(NicOptions, &'static str)| (nic.connect.clone(), *port);
        assert_eq!(options(&smart), (",smart-poll=on".into(), ",smart-poll=on"));
        assert_eq!(
            [options(&plain), options(&precise)],
            [(String::new(), ""), (String::new(), "")]
        );
    }

    #[test]
    fn polling_that_saves_no_calls_or_loses_bytes_is_detected() {
        let cell = Cell(vec![("guests".into(), "1".into())]);
        let holds = |calls, payload| {
            let mut fall = Fall::default();
            fall.add(&cell, calls, payload);
            fall.verdicts().iter().map(|verdict| verdict.holds == Some(true)).collect::<Vec<_>>()
        };
        assert_eq!(holds((5000.0, 0.0), (950.0, 940.0)), [true, true]);
        assert_eq!(holds((5000.0, 600.0), (950.0, 940.0)), [false, true]);
        assert_eq!(holds((5000.0, 0.0), (950.0, 10.0)), [true, false]);
        // Too few events to judge.
        assert!(holds((10.0, 0.0), (950.0, 950.0)).is_empty());
    }
}
