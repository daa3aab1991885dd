//! `soak`: a switch whose ports, guests and settings change all the time. Every frame must be
//! accounted for, every guest must keep receiving, and nothing may grow.

pub(super) mod ledger;
mod rounds;

use self::rounds::Rounds;
use super::grid::values;
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::{Part, Table, Value, Verdict};
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

/// The study.
pub struct Soak;

const ABOUT: &str = "\
One switch with five guests (split, packed, in-order and Xen rings), each a generator whose frames \
have all sizes from 64 to 1514 bytes; receivers check every byte. A round: ctl add-port and a new \
guest, of another kind of ring each time; another poll policy, call policy and placement; SIGKILL \
for a receiver in the middle of its traffic, and a new one in its place; the same for a sender; \
the added guest ends and its port is removed; the configuration file is written anew and reloaded, \
which adds or removes a port and changes another, and undoes what ctl changed. Each step waits \
until the guest concerned gets frames again. Two guests go on through all of that.\n\n\
Frames: those that the switch took from rings are those that it delivered plus its drop counters, \
summed over all ports, removed ones as well; guests that ended by themselves sent and received \
what the switch counted. Frames for the added port while it is away go to a port that drops all. \
Resources of the switch's process are compared in the same state, after each kind of round was \
there once and at the end: private memory (without that of guests), descriptors, threads, and \
mappings of guests' memory and grants. The limit of memory is what logs and tables of bounded \
length, and the allocator, may add.";

const MEASURES: [Measure; 20] = [
    Measure::new("rounds", "", Better::Neither, "rounds, without those to warm up"),
    Measure::new("frames", "", Better::Neither, "frames taken from guests"),
    Measure::new("delivered", "", Better::Neither, "frames delivered, those to nowhere included"),
    Measure::new(
        "unaccounted",
        "",
        Better::Less,
        "frames neither delivered nor dropped with cause",
    ),
    Measure::new(
        "lost_full",
        "",
        Better::Neither,
        "dropped: held for a full receiver for too long",
    ),
    Measure::new("drops_down", "", Better::Neither, "dropped: the receiver was away"),
    Measure::new("drops_held_down", "", Better::Neither, "dropped: held when the receiver left"),
    Measure::new("drops_other", "", Better::Less, "dropped: other causes"),
    Measure::new("mismatch", "", Better::Less, "frames that guests and switch count differently"),
    Measure::new("corrupt", "", Better::Less, "frames whose payload was not as sent"),
    Measure::new("stuck", "", Better::Less, "guests without a frame at the end"),
    Measure::new("added", "", Better::Neither, "ports added and removed"),
    Measure::new("kills", "", Better::Neither, "guests killed and replaced"),
    Measure::new("switched", "", Better::Neither, "changes of policy or placement"),
    Measure::new("reloads", "", Better::Neither, "reloads of the file"),
    Measure::new("memory", "KiB", Better::Neither, "private memory of the switch at the end"),
    Measure::new("memory_grown", "KiB", Better::Less, "the same, since the end of the warm-up"),
    Measure::new("descriptors_grown", "", Better::Less, "descriptors since then"),
    Measure::new("threads_grown", "", Better::Less, "threads since then"),
    Measure::new("mappings_grown", "", Better::Less, "mappings since then, of guests and grants"),
];

const FACTS: Facts = Facts {
    name: "soak",
    about: "what is lost, stuck or grown while ports, guests and settings change all the time",
    original: None,
    measures: &MEASURES,
    takes_proto: false,
    tools: &[],
    together: None,
    // Judged by counts.
    margin: 1.05,
    control: &[],
};

/// Private memory that may be added, in KiB: what the allocator keeps differs between rounds.
const MEMORY_GROWN_MAX: f64 = 1024.0;

impl Study for Soak {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let seconds = match scale {
            Scale::Smallest => 2.0,
            Scale::Quick => 60.0,
            Scale::Usual => 600.0,
            Scale::Full => 3600.0,
        };
        // Nothing is compared with anything else, so one run is enough.
        Plan::new(FACTS.name, 1, seconds, vec![Axis::new("workers", [2])])
    }

    fn has(&self, _cell: &Cell) -> bool {
        true
    }

    fn overhead_s(&self, _cell: &Cell) -> f64 {
        12.0
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let workers = run.cell.number("workers") as usize;
        Rounds::start(run.stage, workers.max(1))?.run(run.seconds)
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let text = Part::Text { title: "How to read this".into(), body: ABOUT.into() };
        let workers = values(results, "workers");
        let cell = |workers: &str| Cell(vec![("workers".into(), workers.into())]);
        let row = |measure: &Measure| {
            let found = workers.iter().map(|workers| {
                Value::estimate(results.estimate(&cell(workers), measure.name), 0, "not measured")
            });
            [Value::Text(measure.name.replace('_', " ")), Value::Text(measure.about.into())]
                .into_iter()
                .chain(found)
                .collect()
        };
        let columns = workers.iter().map(|n| format!("{n} workers"));
        let table = Table {
            title: "All rounds".into(),
            note: String::new(),
            columns: ["figure".to_string(), "what it is".into()]
                .into_iter()
                .chain(columns)
                .collect(),
            rows: MEASURES.iter().map(row).collect(),
            command: "pvswitch lab run soak".into(),
        };
        vec![text, Part::Table(table)]
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        let sum = |measure| results.values(|_| true, measure).iter().sum::<f64>();
        let most = |measure| results.values(|_| true, measure).into_iter().fold(0.0, f64::max);
        if results.runs.is_empty() {
            return Vec::new();
        }
        let verdict = |what: String, holds: bool| Verdict { what, holds: Some(holds) };
        let wrong = results.values(|_| true, "unaccounted").iter().filter(|n| **n != 0.0).count();
        vec![
            verdict(
                format!(
                    "every frame is delivered or in one drop counter: {} frames, {} dropped, {} \
                     unaccounted",
                    sum("frames"),
                    sum("frames") - sum("delivered"),
                    sum("unaccounted")
                ),
                wrong == 0,
            ),
            verdict(
                format!(
                    "guests sent and received what the switch counted, as sent: {} frames differ, \
                     {} are corrupt",
                    sum("mismatch"),
                    sum("corrupt")
                ),
                sum("mismatch") == 0.0 && sum("corrupt") == 0.0,
            ),
            verdict(
                format!(
                    "every guest still gets frames after {} kills, {} ports added and removed, {} \
                     changes of policy or placement and {} reloads: {} do not",
                    sum("kills"),
                    sum("added"),
                    sum("switched"),
                    sum("reloads"),
                    sum("stuck")
                ),
                sum("stuck") == 0.0 && sum("rounds") > 0.0,
            ),
            verdict(
                format!(
                    "descriptors, threads and mappings are those after the warm-up: {}, {} and {} \
                     more",
                    most("descriptors_grown"),
                    most("threads_grown"),
                    most("mappings_grown")
                ),
                ["descriptors_grown", "threads_grown", "mappings_grown"]
                    .iter()
                    .all(|measure| most(measure) <= 0.0),
            ),
            verdict(
                format!(
                    "private memory grows by at most {MEMORY_GROWN_MAX} KiB in {} rounds: {} KiB",
                    sum("rounds"),
                    most("memory_grown")
                ),
                most("memory_grown") <= MEMORY_GROWN_MAX,
            ),
        ]
    }
}
