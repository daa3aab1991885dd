use std::collections::BTreeMap;

use serde_json::json;

use super::*;
use crate::claims::{self, State};
use crate::machine::Machine;
use crate::report::{Table, Value};
use crate::stats::paired::Estimate;
use crate::store::{Comparison, Done, Outcome};

/// Runs as a machine with so many CPUs of each kind would have made them.
struct Made {
    results: Results,
}

const LOADS: [(&str, &str); 3] = [("even", "60"), ("even", "1500"), ("converging", "60")];

impl Made {
    /// Throughput is a law's of sigma 0.05 and kappa 0.01, with a little noise.
    fn new(counts: &[usize], switch: usize, guests: usize) -> Self {
        let mut plan = Threads.plan(Scale::Usual);
        for axis in &mut plan.axes {
            match axis.name.as_str() {
                "workers" => *axis = Axis::new("workers", counts),
                "load" => *axis = Axis::new("load", ["even", "converging"]),
                _ => {}
            }
        }
        (plan.repeats, plan.control) = (12, false);
        let machine = Machine {
            cpu: "made up".into(),
            cpus: switch + guests,
            switch_cpus: (0..switch).collect(),
            guest_cpus: (switch..switch + guests).collect(),
            ..Machine::default()
        };
        let turns = plan.turns(&Threads);
        let runs = turns.into_iter().map(|turn| {
            let n = turn.cell.number("workers");
            let noise = 1.0 + 0.001 * f64::from(turn.repeat);
            let single = turn.cell.get("placement") == "single";
            let serving = if single { 1.0 } else { n };
            let law = |n: f64| n / (1.0 + 0.05 * (n - 1.0) + 0.01 * n * (n - 1.0));
            let frames = 1e6 * law(serving) * noise;
            let figures = [
                ("frames", frames),
                ("throughput", frames * 480.0 / 1e9),
                ("switch_cpu", 100.0 * serving),
                ("guests_cpu", 100.0 * guests as f64),
                ("frames_per_cpu_s", frames / serving),
                ("capacity", frames),
                ("waited", 0.0),
                ("contended", if n > 1.0 { 3.0 } else { 0.0 }),
                ("jain", 0.99),
                ("used", serving),
                ("moves", 0.0),
                ("drops", 5.0),
                ("uncounted", 0.0),
            ];
            let figures: BTreeMap<String, f64> =
                figures.into_iter().map(|(name, value)| (name.into(), value)).collect();
            let (distance_ns, others_percent) = (60.0, 0.0);
            Done { cell: turn.cell, repeat: turn.repeat, distance_ns, others_percent, figures }
        });
        let runs = runs.collect();
        Self {
            results: Results {
                plan,
                runs,
                command: String::new(),
                machine,
                controls: Vec::new(),
                void: Vec::new(),
            },
        }
    }

    fn set(&mut self, wanted: impl Fn(&Cell) -> bool, measure: &str, value: f64) {
        let runs = self.results.runs.iter_mut().filter(|run| wanted(&run.cell));
        runs.for_each(|run| *run.figures.get_mut(measure).unwrap() = value);
    }

    fn table(&self, title: &str) -> Table {
        table(&Threads.report(&self.results), title)
    }
}

fn table(parts: &[Part], title: &str) -> Table {
    let tables = parts.iter().filter_map(|part| match part {
        Part::Table(table) => Some(table),
        _ => None,
    });
    let mut found = tables.filter(|table| table.title.starts_with(title));
    found.next().unwrap_or_else(|| panic!("no table {title}")).clone()
}

fn row<'a>(table: &'a Table, begin: &[&str]) -> &'a [Value] {
    let is = |(value, wanted): (&Value, &&str)| match value {
        Value::Text(words) => words == wanted,
        Value::Number(number, _) => number.to_string() == **wanted,
        _ => false,
    };
    let mut rows = table.rows.iter();
    let found = rows.find(|row| row.iter().zip(begin).all(is));
    found.unwrap_or_else(|| panic!("no row {begin:?} in {:?}", table.rows))
}

fn column(table: &Table, name: &str) -> usize {
    table.columns.iter().position(|column| column == name).unwrap()
}

fn middle(value: &Value) -> f64 {
    match value {
        Value::Number(value, _)
        | Value::Original(value, _)
        | Value::Spread(Estimate { median: value, .. }, _) => *value,
        other => panic!("{other:?} is no number"),
    }
}

#[test]
fn speed_up_is_shown_beside_the_original() {
    let made = Made::new(&[1, 2, 4, 12], 12, 12);
    let speed_ups = made.table("Speed-up over one worker");
    let two = row(&speed_ups, &["even", "60", "balanced", "2"]);
    let law = |n: f64| n / (1.0 + 0.05 * (n - 1.0) + 0.01 * n * (n - 1.0));
    assert!((middle(&two[column(&speed_ups, "Speed-up")]) - law(2.0)).abs() < 0.01);
    assert_eq!(two[column(&speed_ups, "Frames/s are")], Value::Text("more".into()));
    let original = column(&speed_ups, "Original: speed-up");
    assert!(matches!(two[original], Value::Missing(_)));
    assert_eq!(row(&speed_ups, &["even", "60", "group", "4"])[original], Value::Original(3.7, 1));
    assert_eq!(row(&speed_ups, &["even", "60", "group", "12"])[original], Value::Original(2.0, 1));
    let single = row(&speed_ups, &["even", "60", "single", "4"]);
    assert_eq!(middle(&single[column(&speed_ups, "Speed-up")]), 1.0);
    let claims = made.table("The original study's speed-up");
    let four = row(&claims, &["4 vcpus, pinned"]);
    assert!((middle(&four[column(&claims, "Group")]) - law(4.0)).abs() < 0.01);
}

#[test]
fn a_speed_up_of_unequal_guests_is_none() {
    let mut made = Made::new(&[1, 2], 1, 1);
    let is_uneven = |cell: &Cell| cell.get("placement") == "group" && cell.get("size") == "60";
    let runs = made.results.runs.iter_mut().filter(|run| is_uneven(&run.cell));
    runs.filter(|run| run.cell.get("workers") == "2")
        .for_each(|run| _ = run.figures.insert("jain".into(), 0.94));
    let speed_ups = made.table("Speed-up over one worker");
    let at = column(&speed_ups, "Speed-up");
    let shown = |size| row(&speed_ups, &["even", size, "group", "2"])[at].clone();
    assert_eq!(shown("60"), Value::Missing("uneven: Jain's index 0.94".into()));
    assert!(!matches!(shown("1500"), Value::Missing(_)));
    // The same in all comparisons, for measures of speed, and in claims.
    let compared = |measure, placement: &str, size: &str| {
        let all = made.results.compare(measure, &Threads).into_iter();
        let of =
            |c: &Comparison| (c.cell.get("placement"), c.cell.get("size")) == (placement, size);
        all.filter(|c| c.cell.get("load") == "even").find(of).unwrap()
    };
    for measure in ["frames", "throughput", "frames_per_cpu_s", "capacity"] {
        let found = compared(measure, "group", "60");
        assert_eq!((found.outcome, found.ratio), (Outcome::Uneven, None), "{measure}");
        assert_ne!(compared(measure, "group", "1500").outcome, Outcome::Uneven, "{measure}");
    }
    assert_eq!(compared("frames", "balanced", "60").outcome, Outcome::More);
    assert_ne!(compared("jain", "group", "60").outcome, Outcome::Uneven);
    let claim = |placement: &str| {
        let cells = made.results.cells().into_iter();
        let wanted = [("load", "even"), ("size", "60"), ("placement", placement), ("workers", "2")];
        let mut of_it = cells.filter(|c| wanted.iter().all(|(axis, value)| c.get(axis) == *value));
        let cell = of_it.next().unwrap().clone();
        let pair = [cell.clone(), cell.with("workers", "1")];
        Claim::of_ratio("it".into(), pair, "frames", 1.92, FACTS.margin)
    };
    let found = claims::judge(&made.results, &Threads, vec![claim("group"), claim("balanced")]);
    assert_eq!((found[0].state, found[0].ratio), (State::Uneven, None));
    assert_eq!(found[1].state, State::Confirmed);
}

#[test]
fn a_machine_of_two_cpus_says_what_it_lacks() {
    let made = Made::new(&[1, 2], 1, 1);
    let claims = made.table("The original study's speed-up");
    let four = row(&claims, &["4 vcpus, pinned"]);
    assert_eq!(four[1], Value::Original(3.7, 1));
    let Value::Missing(why) = &four[column(&claims, "Group")] else { panic!("{four:?}") };
    assert!(why.contains("2 CPUs"), "{why}");
    let words = Threads.report(&made.results).into_iter().find_map(|part| match part {
        Part::Text { title, body } if title == "This machine" => Some(body),
        _ => None,
    });
    let words = words.unwrap();
    assert!(words.contains("More than 2 workers were not measured"), "{words}");
    assert!(words.contains("guests have no CPU of their own"), "{words}");
}

#[test]
fn each_load_has_its_frames_and_its_speed_up_drawn() {
    let made = Made::new(&[1, 2, 4, 8], 8, 8);
    let plots = Threads.report(&made.results).into_iter().filter_map(|part| match part {
        Part::Plot(plot) => Some(plot),
        _ => None,
    });
    let plots: Vec<_> = plots.collect();
    assert_eq!(plots.len(), 2 * LOADS.len());
    let series = |file: &str| {
        let plot = plots.iter().find(|plot| plot.file == file).unwrap();
        plot.series.iter().map(|series| series.points.len()).collect::<Vec<_>>()
    };
    // A series for each placement, with a point for each number of workers.
    assert_eq!(series("frames-even-60-10"), [4; 4]);
    // The same, the limit of CPU time, and the original study's two points.
    assert_eq!(series("speed-up-even-60-10"), [4, 4, 4, 4, 4, 2]);
}

#[test]
fn limits_are_of_the_cpus_there_are() {
    // Two CPUs: apart, a worker's 1000 ns and a CPU's 1000 ns for guests; then both share two.
    let made = Made::new(&[1, 2], 1, 1);
    let limits = made.table("Limits");
    let [at, by] = ["Limit, million frames/s", "Limit is of"].map(|name| column(&limits, name));
    let one = row(&limits, &["even", "60", "balanced", "1"]);
    assert!((middle(&one[at]) - 1.0).abs() < 0.01, "{one:?}");
    assert_eq!(one[by], Value::Text("workers".into()));
    let two = row(&limits, &["even", "60", "balanced", "2"]);
    // 2 / 1.07 = 1.87 M frames/s in two seconds of the switch and one of guests.
    assert!((middle(&two[at]) - 2.0 * 1.87 / 3.0).abs() < 0.01, "{two:?}");
    assert_eq!(two[by], Value::Text("all CPUs, workers' and guests'".into()));
    let mut slow = Made::new(&[1, 2], 2, 1);
    slow.set(|_| true, "switch_cpu", 10.0);
    let limits = slow.table("Limits");
    let one = row(&limits, &["even", "60", "balanced", "1"]);
    assert_eq!(one[by], Value::Text("guests' CPUs".into()));
}

#[test]
fn several_machines_are_in_one_table_and_one_plot() {
    let all = [Made::new(&[1, 2], 1, 1).results, Made::new(&[1, 2, 4, 8], 8, 8).results];
    let parts = tables::together(&all);
    let claims = table(&parts, "The original study's speed-up");
    let small = row(&claims, &["4 vcpus, pinned"]);
    assert!(matches!(small[column(&claims, "Balanced")], Value::Missing(_)));
    let large = claims.rows.iter().find(|row| row[2] == Value::Text("2: 16 CPUs".into()));
    assert!(middle(&large.unwrap()[column(&claims, "Balanced")]) > 3.0);
    let plot = parts.iter().find_map(|part| match part {
        Part::Plot(plot) => Some(plot),
        _ => None,
    });
    let series = &plot.unwrap().series;
    assert_eq!(series.iter().filter(|series| series.name.starts_with("machine 2")).count(), 2);
    assert!(series.iter().any(|series| series.name == "original" && series.loose));
}

#[test]
fn judged_by_counts() {
    let made = || Made::new(&[1, 2], 1, 1);
    let verdicts = Threads.judge(&made().results);
    assert_eq!(verdicts.len(), 6);
    assert!(verdicts.iter().all(|verdict| verdict.holds != Some(false)), "{verdicts:?}");
    let broken = |wanted: &dyn Fn(&Cell) -> bool, measure: &str, value: f64| {
        let mut made = made();
        made.set(wanted, measure, value);
        let verdicts =
            Threads.judge(&made.results).into_iter().filter(|verdict| verdict.holds == Some(false));
        verdicts.map(|verdict| verdict.what).collect::<Vec<_>>()
    };
    let placed = |cell: &Cell, placement: &str| {
        cell.get("placement") == placement && cell.get("workers") == "2"
    };
    for (what, wrong) in [
        ("no frame is lost", broken(&|cell| cell.get("load") == "even", "uncounted", 1.0)),
        ("one worker never waits", broken(&|cell| cell.get("workers") == "1", "contended", 0.1)),
        ("placement single", broken(&|cell| placed(cell, "single"), "used", 2.0)),
        ("placement group", broken(&|cell| placed(cell, "group"), "used", 1.0)),
        ("placement per-port", broken(&|cell| placed(cell, "per-port"), "used", 1.0)),
    ] {
        assert!(wrong.len() == 1 && wrong[0].starts_with(what), "{what}: {wrong:?}");
    }
}

#[test]
fn balanced_is_judged_where_a_second_worker_can_help() {
    let verdict = |made: &Made| {
        let verdicts = Threads.judge(&made.results).into_iter();
        verdicts
            .filter(|verdict| verdict.what.starts_with("placement balanced"))
            .collect::<Vec<_>>()
    };
    let one = |made: &Made| {
        let [verdict] = &verdict(made)[..] else { panic!("{:?}", verdict(made)) };
        (verdict.holds, verdict.what.clone())
    };
    // Workers and guests on the same CPUs; guests that are as busy as they can be.
    let (holds, what) = one(&Made::new(&[1, 2], 1, 1));
    assert!(holds.is_none() && what.contains("share CPUs"), "{what}");
    let (holds, what) = one(&Made::new(&[1, 2, 4], 4, 4));
    assert!(holds.is_none() && what.contains("limit one worker"), "{what}");
    let mut apart = Made::new(&[1, 2, 4], 4, 4);
    apart.set(|_| true, "guests_cpu", 200.0);
    let (holds, what) = one(&apart);
    assert!(holds == Some(true) && what.contains("2 workers") && what.contains("1.87"), "{what}");
    // One load is enough; other placements, and more workers, are not judged here.
    let balanced = |cell: &Cell| {
        cell.get("placement") == "balanced"
            && [cell.get("load"), cell.get("size"), cell.get("workers")] == ["even", "1500", "2"]
    };
    apart.set(balanced, "frames", 1.1e6);
    let (holds, what) = one(&apart);
    assert!(holds == Some(false) && what.contains("1.09"), "{what}");
    assert!(verdict(&Made::new(&[1], 4, 4)).is_empty(), "one worker only");
}

#[test]
fn workers_beyond_the_cpus_are_left_out() {
    assert_eq!(worker_counts(Scale::Quick, 2), [1, 2]);
    assert_eq!(worker_counts(Scale::Quick, 6), [1, 2, 4, 6]);
    assert_eq!(worker_counts(Scale::Full, 3), [1, 2, 3]);
    assert_eq!(worker_counts(Scale::Full, 100).last(), Some(&63));
    assert_eq!(worker_counts(Scale::Smallest, 1), [1]);
    assert_eq!(worker_cpus(3, &[0, 1], &[1, 2, 3]), [0, 1, 2]);
}

#[test]
fn counters_of_all_queues_are_added_up() {
    let queue = |frames: u64, drops: u64| json!({"frames": frames, "drops_no_room": drops});
    let stats = json!({"ports": [
        {"ingress": [queue(1, 2)], "egress": [queue(3, 4), queue(5, 0)]},
        {"ingress": [], "egress": [queue(7, 8)]},
    ]});
    assert_eq!(total(&stats, &|name| name == "frames"), 16);
    assert_eq!(total(&stats, &|name| name.starts_with("drops_")), 14);
}
