use super::*;
use crate::machine::Machine;
use crate::store::Done;

/// A run: traffic, setting, and values of measures.
type Single<'a> = (&'a str, &'a str, &'a [(&'a str, f64)]);

fn results(runs: &[Single]) -> Results {
    let done = |(way, setting, figures): &Single| Done {
        cell: cell(way, setting),
        repeat: 0,
        distance_ns: 60.0,
        others_percent: 0.0,
        figures: figures.iter().map(|(name, value)| (name.to_string(), *value)).collect(),
    };
    Results {
        plan: Coalescing.plan(Scale::Full),
        runs: runs.iter().map(done).collect(),
        command: String::new(),
        machine: Machine::default(),
        controls: Vec::new(),
        void: Vec::new(),
    }
}

#[test]
fn every_row_of_the_seed_is_measured_in_all_three_ways() {
    let cells = Coalescing.plan(Scale::Full).cells(&Coalescing);
    for row in &original::TABLE {
        let same = |cell: &&Cell| cell.get("setting") == row.timeout;
        assert_eq!(cells.iter().filter(same).count(), TIMED.len(), "{}", row.timeout);
    }
    assert_eq!(cells.len(), TIMED.len() * TIMEOUTS.len() + SET.len() * SETTINGS.len());
}

#[test]
fn bases_come_first() {
    let cells = Coalescing.plan(Scale::Smallest).cells(&Coalescing);
    let first = |way: &str| cells.iter().find(|cell| cell.get("way") == way).unwrap();
    assert!(TIMED.iter().all(|way| first(way).last() == "before"));
    assert!(SET.iter().all(|way| first(way).last() == DEFAULT));
}

#[test]
fn a_time_out_that_gathers_nothing_is_seen() {
    let holds = |before: f64, with: f64| {
        let results = results(&[
            ("host-to-guest", "before", &[("frames_per_call", before)]),
            ("host-to-guest", "1", &[("frames_per_call", with)]),
        ]);
        Coalescing.judge(&results)[0].holds == Some(true)
    };
    assert!(holds(1.0, 26.0) && holds(200.0, 201.0));
    assert!(!holds(1.0, 1.0) && !holds(200.0, 199.0));
    // There is nothing left to gather.
    assert!(holds(1194.0, 1154.0));
}

#[test]
fn timers_that_save_nothing_and_frames_that_are_lost_are_seen() {
    let judged = |calls: f64, lost: f64| {
        let all = results(&[
            ("paced", DEFAULT, &[("calls_per_1000", 900.0), ("lost", 0.0)]),
            ("paced", "driver-poll=timer:1000", &[("calls_per_1000", calls), ("lost", lost)]),
        ]);
        Coalescing.judge(&all).iter().map(|verdict| verdict.holds == Some(true)).collect::<Vec<_>>()
    };
    assert_eq!(judged(1.0, 0.0), [true, true]);
    assert_eq!(judged(800.0, 0.0), [false, true]);
    assert_eq!(judged(1.0, 20.0), [true, false]);
}

#[test]
fn the_todo_list_names_settings_and_measures_that_there_are() {
    let measures: Vec<_> = MEASURES.iter().map(|measure| measure.name).collect();
    let cells = Coalescing.plan(Scale::Full).cells(&Coalescing);
    for item in &todo::LIST {
        assert!(!item.figures.is_empty() || !item.why.is_empty(), "{}", item.quote);
        for (way, setting, measure) in item.figures {
            assert!(cells.contains(&cell(way, setting)), "{way} {setting}");
            assert!(measures.contains(measure), "{measure}");
        }
    }
}

#[test]
fn answers_have_figures_beside_their_base() {
    let all = results(&[
        ("bulk", DEFAULT, &[("frames", 2e6), ("kicks_per_1000", 0.0)]),
        ("bulk", "checks=off", &[("frames", 2.1e6), ("kicks_per_1000", 3.0)]),
    ]);
    let of = |measure| todo::figure(&all, "bulk", "checks=off", measure);
    assert!(of("frames").contains("2100000") && of("frames").contains("1.05 times"));
    assert!(of("kicks_per_1000").contains("3.00 against 0"));
    assert!(of("guest_ns").contains("not measured"));
}

#[test]
fn the_report_has_what_was_measured_and_the_list() {
    // Rows of each table, and how many plots.
    let made = |cells: &[(&str, &str)]| {
        let figures: &[(&str, f64)] = &[("frames", 2e6), ("seconds_1_gb", 6.0)];
        let cells: Vec<_> = cells.iter().map(|(way, name)| (*way, *name, figures)).collect();
        let (mut rows, mut plots) = (Vec::new(), 0);
        for part in Coalescing.report(&results(&cells)) {
            match part {
                Part::Table(table) => {
                    let fits = table.rows.iter().all(|row| row.len() == table.columns.len());
                    assert!(fits, "{}", table.title);
                    rows.push(table.rows.len());
                }
                Part::Plot(_) => plots += 1,
                Part::Text { .. } => {}
            }
        }
        (rows, plots)
    };
    let list = todo::LIST.len();
    let set = [("bulk", DEFAULT), ("bulk", "checks=off")];
    assert_eq!(made(&set), (vec![2, list], 0));
    let timed = [("guest-to-host", "before"), ("guest-to-host", "1"), ("paced", DEFAULT)];
    let (tables, plots) = made(&timed);
    assert_eq!((tables.len(), tables[2..].to_vec(), plots), (4, vec![1, list], 2));
    assert_eq!(made(&[]), (vec![list], 0));
}
