//! A study that measures nothing, for tests of what is around studies.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use pvswitch_lab::Ask;
use pvswitch_lab::error::Fail;
use pvswitch_lab::plan::{Axis, Cell, FORMAT, Plan, Scale};
use pvswitch_lab::report::{Part, Table, Value, Verdict};
use pvswitch_lab::store::Results;
use pvswitch_lab::study::{Better, Facts, Figures, Measure, Run, Study};

/// Axes `load` (numbers), `poll` (names, one with a comma) and last `side`, `a` or `b`. Value
/// `never` of `poll` fails, `absent` is missing, `hang` takes a minute and has processes, a TAP and
/// a namespace; `7` of load with `side=b` is no cell.
pub struct Fake;

/// All there are.
pub const STUDIES: &[&dyn Study] = &[&Fake];

/// Marks the processes that are to be gone.
pub const SLEEP: &str = "98765.4321";

const fn measure(name: &'static str, unit: &'static str) -> Measure {
    Measure { name, unit, better: Better::More, about: "Nothing." }
}

const MEASURES: [Measure; 3] =
    [measure("mbps", "Mbit/s"), measure("events", ""), measure("cpu_percent", "%")];

const FACTS: Facts = Facts {
    name: "fake",
    about: "Does the lab work?",
    original: None,
    measures: &MEASURES,
    takes_proto: true,
    tools: &["sh", "no-such-tool"],
    together: None,
    margin: 1.1,
    control: &[("load", "1")],
};

impl Study for Fake {
    fn facts(&self) -> &'static Facts {
        &FACTS
    }

    fn plan(&self, scale: Scale) -> Plan {
        let loads: &[u32] = if scale == Scale::Full { &[1, 3, 6, 7] } else { &[1, 7] };
        Plan {
            format: FORMAT,
            study: "fake".into(),
            repeats: 2,
            control: false,
            rig: None,
            seconds: if scale == Scale::Full { 120.0 } else { 0.01 },
            axes: vec![
                Axis::new("load", loads),
                Axis::new("poll", ["event", "coalesce:50,32", "never", "absent", "hang"]),
                Axis::new("side", ["a", "b"]),
            ],
        }
    }

    fn has(&self, cell: &Cell) -> bool {
        !(cell.get("load") == "7" && cell.get("side") == "b")
    }

    fn overhead_s(&self, _cell: &Cell) -> f64 {
        0.05
    }

    fn run(&self, run: &Run) -> Result<Figures, Fail> {
        match run.cell.get("poll") {
            "never" => return Err(Fail::Cell("broken\nby design".into())),
            "absent" => return Err(Fail::Missing("no-such-tool: apt install no-such".into())),
            "hang" => hang()?,
            _ => std::thread::sleep(Duration::from_secs_f64(run.seconds)),
        }
        let side = if run.cell.get("side") == "b" { 2.0 } else { 1.0 };
        let mbps = side * run.cell.number("load");
        Ok(BTreeMap::from([("mbps", mbps), ("events", 7.0), ("cpu_percent", f64::NAN)]))
    }

    fn report(&self, results: &Results) -> Vec<Part> {
        let row = |cell: &&Cell| vec![Value::Text(cell.to_string())];
        vec![Part::Table(Table {
            title: "Cells".into(),
            columns: vec!["cell".into()],
            rows: results.cells().iter().map(row).collect(),
            ..Table::default()
        })]
    }

    fn judge(&self, results: &Results) -> Vec<Verdict> {
        let events = results.values(|_| true, "events");
        let holds = events.iter().all(|events| *events == 7.0);
        vec![Verdict { what: format!("7 events: {events:?}"), holds: Some(holds) }]
    }
}

/// Leaves behind all that a guest can, and does not end.
fn hang() -> Result<(), Fail> {
    let fail = |error: std::io::Error| Fail::Cell(error.to_string());
    let script = format!(
        "set -e; ip netns add pvlabtest0; ip tuntap add dev pvlabtest1 mode tap; \
         setsid sleep {SLEEP} & sleep {SLEEP}"
    );
    Command::new("sh").args(["-c", &script]).spawn().map_err(fail)?;
    std::thread::sleep(Duration::from_secs(60));
    Ok(())
}

/// `lab run fake`, with nothing but that.
pub fn ask(out: &Path) -> Ask {
    Ask {
        study: "fake".into(),
        program: Some("/bin/true".into()),
        scale: Scale::Quick,
        repeats: None,
        seconds: None,
        plan: None,
        only: Vec::new(),
        proto: None,
        guest: None,
        kernel: None,
        out: Some(out.into()),
        switch_cpus: Vec::new(),
        guest_cpus: Vec::new(),
        judge: false,
        dry_run: false,
        json: false,
        command: "pvswitch lab run fake".into(),
    }
}

/// A folder of its own, empty.
pub fn folder(name: &str) -> PathBuf {
    // Programs of tests run side by side.
    let name = format!("{}-{name}", env!("CARGO_CRATE_NAME"));
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}
