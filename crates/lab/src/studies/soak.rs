//! `soak`: a switch whose ports, guests and settings change all the time. Every frame must be
//! accounted for, every guest must keep receiving, and nothing may grow.

pub(super) mod ledger;
mod rounds;

use self::rounds::Rounds;
use crate::error::Fail;
use crate::plan::{Axis, Cell, Plan, Scale};
use crate::report::{Part, Table, Value, Verdict};
use crate::store::Results;
use crate::study::{Better, Facts, Figures, Measure, Run, Study};

/// The study.
pub struct Soak;

const ABOUT: &str = "\
One switch with five guests (split, packed, in-order and Xen rings), each a generator whose \
frames have all sizes from 64 to 1514 bytes; receivers check every byte. A round: ctl add-port \
and a new guest, of another kind of ring each time; another poll policy, call policy, placement \
and other rules; a receiver is killed (SIGKILL) in the middle of its traffic or, every other \
round, reboots, and is started again; the same for a sender; a rule forbids that sender's \
address for a time; the added guest ends and its port is removed; the configuration file is \
rewritten and reloaded, which adds or removes a port and changes another, and undoes what ctl \
changed. Each step waits until the guest concerned gets frames again. Two guests continue through \
all of that. With beside=all, a hostile guest plays its cases (gen --mode hostile); after each \
minute, and once at least, a new process takes over the switch (ctl upgrade); and another guest \
migrates from port to port and back, its memory copied by the dirty log as Cloud Hypervisor does \
(gen --mode migrate), and compared.\n\n\
Frames: those that the switch took from rings are those that it delivered plus its drop \
counters, summed over all ports, removed and hostile ones as well; guests that ended by \
themselves sent and received what the switch counted. Frames for the added port while it is away \
go to a port that drops all. Resources of the switch's process are compared in the same state, \
after each kind of round was there once in that process (from ten minutes on with beside=all, \
each hostile case too) and before the next upgrade, and between processes that took over: \
private memory (without that of guests), descriptors, threads, and mappings of guests' memory \
and grants. The limit of memory is what logs and tables of bounded length, and the allocator, \
may add.";

const MEASURES: [Measure; 26] = [
    Measure::new("rounds", "", Better::Neither, "rounds"),
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
    Measure::new("drops_rules", "", Better::Neither, "dropped: a rule forbade their sender"),
    Measure::new("drops_other", "", Better::Neither, "dropped: other causes, the hostile guest's"),
    Measure::new("mismatch", "", Better::Less, "frames that guests and switch count differently"),
    Measure::new("corrupt", "", Better::Less, "frames not as sent, or not where looked up"),
    Measure::new("stuck", "", Better::Less, "guests without a frame at the end"),
    Measure::new("added", "", Better::Neither, "ports added and removed"),
    Measure::new("kills", "", Better::Neither, "guests killed and replaced"),
    Measure::new("reboots", "", Better::Neither, "guests that ended in order and started again"),
    Measure::new("attacks", "", Better::Neither, "cases that the hostile guest played"),
    Measure::new("switched", "", Better::Neither, "changes of policy, placement or rules"),
    Measure::new("reloads", "", Better::Neither, "reloads of the file"),
    Measure::new("upgrades", "", Better::Neither, "new processes that took over the switch"),
    Measure::new("migrations", "", Better::Neither, "live migrations of a receiver"),
    Measure::new(
        "missed",
        "",
        Better::Less,
        "pages written and not in the dirty log, or after the stop",
    ),
    Measure::new("memory", "KiB", Better::Neither, "private memory of the switch at the end"),
    Measure::new("memory_grown", "KiB", Better::Less, "most that it grew from warm-up to upgrade"),
    Measure::new("descriptors_grown", "", Better::Less, "the same of descriptors"),
    Measure::new("threads_grown", "", Better::Less, "the same of threads"),
    Measure::new("mappings_grown", "", Better::Less, "the same of guests' and grants' mappings"),
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

/// What runs beside the rounds.
const BESIDE: [&str; 2] = ["none", "all"];

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
        let beside: &[&str] = if scale == Scale::Smallest { &BESIDE[..1] } else { &BESIDE };
        let axes = vec![Axis::new("workers", [2]), Axis::new("beside", beside)];
        Plan::new(FACTS.name, 1, seconds, axes)
    }

    fn has(&self, _cell: &Cell) -> bool {
        true
    }

    fn overhead_s(&self, _cell: &Cell) -> f64 {
        12.0
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        let workers = run.cell.number("workers") as usize;
        let beside = run.cell.get("beside") == "all";
        Rounds::start(run.stage, workers.max(1), beside)?.run(run.seconds)
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let text = Part::Text { title: "How to read this".into(), body: ABOUT.into() };
        let cells: Vec<&Cell> = results.runs.iter().fold(Vec::new(), |mut cells, run| {
            if !cells.contains(&&run.cell) {
                cells.push(&run.cell);
            }
            cells
        });
        let row = |measure: &Measure| {
            let found = cells.iter().map(|cell| {
                Value::estimate(results.estimate(cell, measure.name), 0, "not measured")
            });
            [Value::Text(measure.name.replace('_', " ")), Value::Text(measure.about.into())]
                .into_iter()
                .chain(found)
                .collect()
        };
        let columns = cells.iter().map(ToString::to_string);
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
                     {} are corrupt; {} migrations missed {} pages",
                    sum("mismatch"),
                    sum("corrupt"),
                    sum("migrations"),
                    sum("missed")
                ),
                ["mismatch", "corrupt", "missed"].iter().all(|measure| sum(measure) == 0.0),
            ),
            verdict(
                format!(
                    "every guest still gets frames after {} kills, {} reboots, {} ports added and \
                     removed, {} changes of policy, placement or rules, {} reloads and {} \
                     upgrades, beside {} attacks: {} do not",
                    sum("kills"),
                    sum("reboots"),
                    sum("added"),
                    sum("switched"),
                    sum("reloads"),
                    sum("upgrades"),
                    sum("attacks"),
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
