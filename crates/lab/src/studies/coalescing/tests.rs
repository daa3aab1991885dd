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
        let same = |cell: &&Cell| cell.get("setting") == of_row(&cells, row.timeout);
        assert_eq!(cells.iter().filter(same).count(), TIMED.len(), "{}", row.timeout);
    }
    assert_eq!(cells.len(), TIMED.len() * TIMEOUTS.len() + SET.len() * SETTINGS.len());
}

#[test]
fn bases_come_first() {
    let cells = Coalescing.plan(Scale::Smallest).cells(&Coalescing);
    let first = |way: &str| cells.iter().find(|cell| cell.get("way") == way).unwrap();
    assert!(TIMED.iter().all(|way| first(way).last() == "suppress=none+before"));
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
        for (way, setting, measure) in item.figures {
            let named =
                if TIMED.contains(way) { of_row(&cells, setting) } else { (*setting).into() };
            assert!(cells.contains(&cell(way, &named)), "{way} {setting}");
            assert!(measures.contains(measure), "{measure}");
        }
    }
}

#[test]
fn every_idea_has_a_figure_or_code_that_proves_why_it_has_none() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    for item in &todo::LIST {
        assert!(!item.why.is_empty(), "{}", item.quote);
        assert!(!item.figures.is_empty() || !item.proof.is_empty(), "{}", item.quote);
        for (file, line) in item.proof {
            let text = std::fs::read_to_string(format!("{root}/{file}")).unwrap();
            assert!(text.contains(line), "{file}: {line}");
        }
    }
}

#[test]
fn the_unit_and_what_the_fit_leaves_are_printed() {
    let all = results(&[("pings", "suppress=none+before", &[("seconds_1m_pings", 98.0)])]);
    let mut unit = Coalescing.report(&all).into_iter().filter_map(|part| match part {
        Part::Table(table) if table.title.contains("unit") => Some(table),
        _ => None,
    });
    let note = unit.next().unwrap().note;
    let fit = unit::fitted();
    for words in [
        format!("One unit is {:.0} us, with a residual of {:.0} us", fit.us, fit.residual_us),
        "before: 0 units = 0 us, 0: 0 units = 6 us".into(),
    ] {
        assert!(note.contains(&words), "{words}: {note}");
    }
}

#[test]
fn the_documents_have_the_unit_and_its_residual() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/studies.md");
    let text = std::fs::read_to_string(path).unwrap();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let fit = unit::fitted();
    let words = format!("give {:.0} us, with residuals of {:.0} us", fit.us, fit.residual_us);
    assert!(text.contains(&words), "{words}");
}

/// As in `docs/results/lab-coalescing`.
#[test]
fn folders_of_guests_that_suppress_calls_are_still_reported_and_judged() {
    let of = |before: &'static str, one: &'static str| {
        results(&[
            ("host-to-guest", before, &[("frames_per_call", 4.0), ("seconds_1_gb", 6.0)]),
            ("host-to-guest", one, &[("frames_per_call", 8.0), ("seconds_1_gb", 9.0)]),
        ])
    };
    let text = |results: &Results| {
        let parts = Coalescing.report(results).into_iter();
        let bodies = parts.filter_map(|part| match part {
            Part::Text { body, .. } => Some(body),
            _ => None,
        });
        bodies.collect::<String>()
    };
    let (earlier, new) = (of("before", "1"), of("suppress=none+before", "suppress=none+1"));
    for all in [&earlier, &new] {
        assert_eq!(Coalescing.judge(all)[0].holds, Some(true));
        assert!(todo::figure(all, "host-to-guest", "1", "frames_per_call").contains("2.00 times"));
        let mut plan = all.plan.clone();
        plan.axes[1].values = all.cells().iter().map(|cell| cell.last().to_string()).collect();
        plan.check(&Coalescing).unwrap();
        let claims = Coalescing.claims(&plan);
        assert_eq!(claims[2].cell, *all.cells()[1], "host-to-guest, seconds");
        assert_eq!(claims[2].base, *all.cells()[0]);
    }
    assert!(text(&earlier).contains("coalesce:200,65535"));
    assert!(text(&earlier).contains("suppresses calls while it is awake"));
    assert!(text(&new).contains(&format!("coalesce:{},65535", unit::us())));
    assert!(text(&new).contains("never suppresses calls"));
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
    assert_eq!((tables.len(), tables[0], tables[3..].to_vec()), (5, 4, vec![1, list]));
    assert_eq!(plots, 2);
    assert_eq!(made(&[]), (vec![list], 0));
}
