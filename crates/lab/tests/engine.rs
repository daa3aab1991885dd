//! Plans, folders of results, and the runs between them, with a study that measures nothing.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{STUDIES, ask, folder};
use pvswitch_lab::isolate::Stop;
use pvswitch_lab::plan::{Cell, Plan, Scale};
use pvswitch_lab::run::{Ended, Order, measure};
use pvswitch_lab::stage::{Proto, Stage};
use pvswitch_lab::store::{self, Outcome, Results};
use pvswitch_lab::{Ask, Error};

/// Asks for cells that work, into a folder.
fn quick(out: &Path) -> Ask {
    Ask { only: vec!["poll=event".into()], ..ask(out) }
}

fn order(ask: &Ask) -> Order {
    Order::of(ask, STUDIES).unwrap()
}

fn go(ask: &Ask, stop: &Stop) -> Result<Ended, Error> {
    let stage = Stage::new(&program(), &[0], &[0], Proto::Virtio).unwrap();
    measure(&order(ask), &Arc::new(stage), stop, Path::new("/proc"))
}

/// A program with the name of the one that is measured.
fn program() -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("pvswitch");
    // It is there since an earlier test.
    let _ = std::os::unix::fs::symlink("/bin/true", &path);
    path
}

fn read(out: &Path) -> Results {
    let plan = store::plan_of(out).unwrap();
    Results::read(out, plan, STUDIES[0], &mut |_| ()).unwrap()
}

fn text(out: &Path, file: &str) -> String {
    fs::read_to_string(out.join(file)).unwrap()
}

fn usage(change: impl FnOnce(&mut Ask)) -> String {
    let mut ask = ask(Path::new("nowhere"));
    change(&mut ask);
    match Order::of(&ask, STUDIES) {
        Err(Error::Usage(what)) => what,
        Err(other) => panic!("not a mistake of usage: {other}"),
        Ok(_) => panic!("it is taken"),
    }
}

/// All words are in it.
fn says(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "no '{word}' in: {text}");
    }
}

// ---- plans ----

#[test]
fn an_unknown_name_comes_with_the_nearest_one() {
    says(&usage(|ask| ask.study = "fkae".into()), &["no study 'fkae'", "mean 'fake'"]);
    says(&usage(|ask| ask.only = vec!["lod=1".into()]), &["no axis 'lod'", "mean 'load'"]);
    says(&usage(|ask| ask.only = vec!["poll=evnt".into()]), &["'evnt'", "mean 'event'"]);
    says(&usage(|ask| ask.only = vec!["poll".into()]), &["AXIS=VALUE"]);
    says(&usage(|ask| ask.only = vec!["poll=".into()]), &["no value ''"]);
    says(&usage(|ask| ask.only = vec!["load=1,1".into()]), &["'1' is there twice"]);
    says(&usage(|ask| ask.only = vec!["load=-1".into()]), &["no value '-1'"]);
    says(&usage(|ask| ask.proto = Some("xenn".into())), &["--proto", "use virtio or xen"]);
    says(&usage(|ask| ask.guest = Some("umll".into())), &["mean 'uml'"]);
}

#[test]
fn invalid_requests_are_rejected() {
    says(&usage(|ask| ask.guest = Some("kvm".into())), &["--guest kvm", "netns, uml, qemu"]);
    says(&usage(|ask| ask.kernel = Some("/k".into())), &["--kernel /k", "--guest qemu"]);
    let xen = |ask: &mut Ask| (ask.guest, ask.proto) = (Some("uml".into()), Some("xen".into()));
    says(&usage(xen), &["--guest uml", "supports virtio", "--proto virtio"]);
    says(&usage(|ask| ask.switch_cpus = vec![1000]), &["--switch-cpus 1000", "no such CPU"]);
    says(&usage(|ask| ask.guest_cpus = vec![1000]), &["--guest-cpus 1000"]);
    says(&usage(|ask| ask.repeats = Some(0)), &["repeats = 0", "use 1 to"]);
    says(&usage(|ask| ask.seconds = Some(f64::NAN)), &["seconds = NaN"]);
    says(&usage(|ask| ask.seconds = Some(-1.0)), &["seconds = -1"]);
    let none = usage(|ask| ask.only = vec!["load=7".into(), "side=b".into()]);
    says(&none, &["not one combination"]);
}

#[test]
fn values_are_those_of_any_scale_and_any_number_where_all_are() {
    let cells = |only: &[&str]| {
        let only = only.iter().map(ToString::to_string).collect();
        let order = order(&Ask { only, ..ask(Path::new("nowhere")) });
        order.plan.cells(order.study).iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    // 6 is in the full plan only, 99 in none; a comma may be part of a value.
    assert_eq!(
        cells(&["load=6,99", "poll=coalesce:50,32,event", "side=b"]),
        [
            "load=6 poll=coalesce:50,32 side=b",
            "load=6 poll=event side=b",
            "load=99 poll=coalesce:50,32 side=b",
            "load=99 poll=event side=b"
        ]
    );
}

#[test]
fn what_is_set_beside_each_other_is_measured_side_by_side() {
    let order = order(&quick(Path::new("nowhere")));
    let turns: Vec<String> =
        order.left(&[]).iter().map(|t| format!("{} {}", t.cell, t.repeat)).collect();
    assert_eq!(
        turns,
        [
            "load=1 poll=event side=a 0",
            "load=1 poll=event side=b 0",
            "load=7 poll=event side=a 0",
            "load=1 poll=event side=b 1",
            "load=1 poll=event side=a 1",
            "load=7 poll=event side=a 1",
        ]
    );
}

#[test]
fn a_plan_is_read_as_it_was_written() {
    let path = folder("plan").join("plan.toml");
    for scale in [Scale::Smallest, Scale::Quick, Scale::Usual, Scale::Full] {
        let plan = STUDIES[0].plan(scale);
        fs::write(&path, plan.to_toml()).unwrap();
        assert_eq!(Plan::read(&path).unwrap(), plan);
    }
}

#[test]
fn plans_that_make_no_sense() {
    let path = folder("plans").join("mine.toml");
    let good = STUDIES[0].plan(Scale::Quick).to_toml();
    let refusal = |text: &str| {
        fs::write(&path, text).unwrap();
        usage(|ask| ask.plan = Some(path.clone()))
    };
    says(&refusal("format = = 1"), &["mine.toml", "not TOML", "line 1"]);
    says(&refusal("a = 1"), &["mine.toml", "no 'format = 1'"]);
    says(&refusal(&good.replace("format = 1", "format = 2")), &["another version", "format 2"]);
    says(&refusal(&good.replace("\"fake\"", "\"other\"")), &["no plan of fake"]);
    says(&refusal(&good.replace("\"load\"", "\"laod\"")), &["no axis 'laod'", "mean 'load'"]);
    says(&refusal(&good.replace("\"event\"", "\"evnt\"")), &["'evnt'", "mean 'event'"]);
    says(&refusal(&good.replace("[\"a\", \"b\"]", "[]")), &["'side' has no values"]);
    says(&refusal(&good.replace("repeats", "repaets")), &["mine.toml", "repaets"]);
    says(&refusal(&good.replace("repeats = 2", "repeats = \"two\"")), &["mine.toml", "two"]);
    let (head, axes) = good.split_at(good.find("[[axes]]").unwrap());
    let half = &axes[..axes[1..].find("[[axes]]").unwrap() + 1];
    says(&refusal(&format!("{head}{half}")), &["its axes are load, poll, side, in this order"]);
    let many: Vec<String> = (0..500_000).map(|i| format!("\"{i}\"")).collect();
    says(&refusal(&good.replace("[\"1\", \"7\"]", &format!("[{}]", many.join(",")))), &["at most"]);
    says(&usage(|ask| ask.plan = Some("no-such-file".into())), &["no-such-file", "No such file"]);
}

#[test]
fn a_matrix_too_large_says_how_long_it_would_take() {
    let ask = Ask { repeats: Some(1000), seconds: Some(60.0), ..quick(Path::new("nowhere")) };
    let message = order(&ask).check_length(&ask, &[]).unwrap_err().to_string();
    says(&message, &["3000 runs", "2 days", "--full", "--dry-run"]);
    let meant = Ask { scale: Scale::Full, ..ask };
    assert!(order(&meant).check_length(&meant, &[]).is_ok());
}

#[test]
fn a_dry_run_prints_cells_and_time() {
    let ask = quick(Path::new("nowhere"));
    says(&order(&ask).described(&[], false), &["load=7 poll=event side=a\n", "3 cells", "6 runs"]);
    let json: serde_json::Value = serde_json::from_str(&order(&ask).described(&[], true)).unwrap();
    assert_eq!((json["runs_left"].as_u64(), json["cells"].as_array().unwrap().len()), (Some(6), 3));
}

// ---- runs ----

#[test]
fn all_runs_are_made_and_kept() {
    let out = folder("all").join("out");
    let ended = go(&quick(&out), &Stop::default()).unwrap();
    assert_eq!((ended.done, ended.failed, ended.skipped), (6, 0, 0));
    let lines = text(&out, "runs.csv");
    let head =
        "load,poll,side,repeat,again,distance_ns,others_percent,void,mbps,events,cpu_percent";
    assert_eq!(lines.lines().next(), Some(head));
    assert_eq!(lines.lines().count(), 7);
    // What is no number is not there.
    assert!(lines.lines().skip(1).all(|line| line.ends_with(",7,")), "{lines}");
    let results = read(&out);
    let of_b = results.runs.iter().filter(|run| run.cell.get("side") == "b");
    assert_eq!(of_b.map(|run| run.figures["mbps"]).collect::<Vec<_>>(), [2.0, 2.0]);
    assert_eq!(results.machine.command, "pvswitch lab run fake");
    let digest = results.machine.built.digest().unwrap();
    says(&text(&out, "report.html"), &[digest, "transparent huge pages", "commit"]);
    let summary: serde_json::Value = serde_json::from_str(&text(&out, "summary.json")).unwrap();
    assert_eq!(summary["complete"], true);
    assert_eq!(summary["cells"][0]["measures"]["mbps"]["median"], 1.0);
    assert_eq!(summary["cells"][0]["measures"]["mbps"]["unit"], "Mbit/s");
    assert_eq!(summary["comparisons"][0]["ratio"], 2.0);
    assert_eq!(summary["comparisons"][0]["outcome"], "too few pairs to tell");
    assert_eq!(summary["verdicts"][0]["holds"], true);
    assert!(text(&out, "report.html").contains("load=7 poll=event side=a"));
}

#[test]
fn what_fails_does_not_end_the_study() {
    let out = folder("fails").join("out");
    let only = vec!["poll=event,never,absent".to_string(), "load=1".into()];
    let ended = go(&Ask { only, ..quick(&out) }, &Stop::default()).unwrap();
    // Two cells fail twice; two are missing something, and are skipped twice.
    assert_eq!((ended.done, ended.failed, ended.skipped), (4, 4, 4));
    // Each attempt is in the file, with its reason.
    let runs = text(&out, "runs.csv");
    assert_eq!(runs.lines().count(), 1 + 12);
    says(&runs, &["1,never,a,0,0,,,broken by design,,,\n"]);
    says(&runs, &["1,absent,b,1,0,,,no-such-tool: apt install no-such,,,\n"]);
    assert_eq!(read(&out).void.len(), 8);
    assert!(text(&out, "report.html").contains("broken by design"));
    // Asked again, it tries again, and keeps both attempts.
    let only = vec!["poll=event,never,absent".to_string(), "load=1".into()];
    let ended = go(&Ask { only, ..quick(&out) }, &Stop::default()).unwrap();
    assert_eq!((ended.done, ended.failed, ended.skipped), (4, 4, 4));
    let results = read(&out);
    assert_eq!((results.runs.len(), results.void.len()), (4, 16));
    assert!(results.void.iter().all(|void| !void.repeated));
}

#[test]
fn an_interrupted_study_continues() {
    let out = folder("goes-on").join("out");
    let ask = quick(&out);
    go(&ask, &Stop::default()).unwrap();
    let whole = text(&out, "runs.csv");
    let kept: String = whole.lines().take(4).map(|line| format!("{line}\n")).collect();
    fs::write(out.join("runs.csv"), &kept).unwrap();
    let stop = Stop::default();
    stop.ask(2);
    assert_eq!(go(&ask, &stop).unwrap().done, 3);
    assert_eq!(text(&out, "runs.csv"), kept);
    let summary: serde_json::Value = serde_json::from_str(&text(&out, "summary.json")).unwrap();
    assert_eq!(summary["complete"], false);
    assert_eq!(go(&ask, &Stop::default()).unwrap().done, 6);
    assert!(text(&out, "runs.csv").starts_with(&kept));
    let cells = |text: &str| {
        let lines = text.lines().skip(1);
        lines.map(|line| line.split(',').take(4).collect::<Vec<_>>().join(" ")).collect::<Vec<_>>()
    };
    assert_eq!(cells(&text(&out, "runs.csv")), cells(&whole));
    // And once more: nothing to do, nothing changed.
    let now = text(&out, "runs.csv");
    assert_eq!(go(&ask, &Stop::default()).unwrap().done, 6);
    assert_eq!(text(&out, "runs.csv"), now);
}

// ---- folders that are not as they should be ----

/// A folder with all runs of `quick`.
fn measured(name: &str) -> PathBuf {
    let out = folder(name).join("out");
    go(&quick(&out), &Stop::default()).unwrap();
    out
}

/// All files and their contents.
fn contents(out: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let files = fs::read_dir(out).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<_> = files
        .filter(|path| path.is_file())
        .map(|path| (path.clone(), fs::read(path).unwrap()))
        .collect();
    all.sort();
    all
}

/// What is message of a folder, in which nothing is changed.
fn refused(ask: &Ask) -> String {
    let out = ask.out.as_ref().unwrap();
    let before = contents(out);
    let message = match go(ask, &Stop::default()) {
        Err(Error::Failed(what)) => what,
        other => panic!("{other:?}"),
    };
    assert!(contents(out) == before, "changed: {message}");
    message
}

#[test]
fn a_half_written_line_is_dropped_and_its_file_kept() {
    let out = measured("torn");
    let whole = text(&out, "runs.csv");
    let torn = &whole[..whole.len() - 10];
    fs::write(out.join("runs.csv"), torn).unwrap();
    assert_eq!(read(&out).runs.len(), 5);
    assert_eq!(go(&quick(&out), &Stop::default()).unwrap().done, 6);
    assert_eq!(text(&out, "runs.csv.damaged-1"), torn);
    let lines: Vec<String> = text(&out, "runs.csv").lines().map(Into::into).collect();
    assert_eq!(lines.len(), 7);
    assert_eq!(lines[..6], whole.lines().collect::<Vec<_>>()[..6]);
    // Torn within its first line.
    fs::write(out.join("runs.csv"), "load,po").unwrap();
    assert_eq!(go(&quick(&out), &Stop::default()).unwrap().done, 6);
    assert_eq!(text(&out, "runs.csv.damaged-2"), "load,po");
}

#[test]
fn results_of_another_plan_version_or_machine_are_left_alone() {
    let out = measured("others");
    let ask = quick(&out);
    let repeats = Ask { repeats: Some(3), ..ask.clone() };
    says(&refused(&repeats), &["another plan", "repeats then 2, now 3", "--out"]);
    let axis = Ask { only: vec!["poll=never".into()], ..ask.clone() };
    says(&refused(&axis), &["axis then poll=event, now poll=never"]);
    let seconds = Ask { seconds: Some(0.02), ..ask.clone() };
    says(&refused(&seconds), &["seconds then 0.01, now 0.02"]);
    let change = |file: &str, from: &str, to: &str| {
        let was = text(&out, file);
        assert!(was.contains(from));
        fs::write(out.join(file), was.replace(from, to)).unwrap();
        let message = refused(&ask);
        let shown = pvswitch_lab::show(std::slice::from_ref(&out), None, STUDIES)
            .map_err(|e| e.to_string());
        fs::write(out.join(file), was).unwrap();
        (message, shown)
    };
    let (message, shown) = change("plan.toml", "format = 1", "format = 9");
    says(&message, &["plan.toml", "another version", "format 9"]);
    says(&shown.unwrap_err(), &["another version"]);
    let (message, shown) = change("runs.csv", "mbps,events", "mbps,wakes");
    says(&message, &["runs.csv", "columns", "nothing was changed"]);
    says(&shown.unwrap_err(), &["columns"]);
    let (message, shown) = change("runs.csv", "7,event", "7,event,more");
    says(&message, &["runs.csv", "line 4"]);
    says(&shown.unwrap_err(), &["line 4"]);
    let (message, shown) = change("machine.json", "\"cpus\": ", "\"cpus\": 9");
    says(&message, &["another machine", "number of CPUs then '9"]);
    assert!(shown.is_ok());
    let (message, shown) = change("machine.json", "\"pvswitch\": \"", "\"pvswitch\": \"0");
    says(&message, &["another program", "SHA-256", "Nothing was changed"]);
    assert!(shown.is_ok());
    assert_eq!(go(&ask, &Stop::default()).unwrap().done, 6);
}

#[test]
fn results_of_a_version_with_fewer_measures_are_read_and_not_added_to() {
    let out = measured("fewer");
    let text = text(&out, "runs.csv");
    // Without `events` and the one after it.
    let fewer = |line: &str| line.rsplitn(3, ',').nth(2).map(|rest| format!("{rest}\n"));
    let fewer: String = text.lines().filter_map(fewer).collect();
    fs::write(out.join("runs.csv"), fewer).unwrap();
    says(&refused(&quick(&out)), &["earlier version", "--out"]);
    let results = read(&out);
    assert_eq!(results.runs.len(), 6);
    let has = |name: &str| results.runs.iter().all(|run| run.figures.contains_key(name));
    assert!(has("mbps") && !results.runs.iter().any(|run| run.figures.contains_key("events")));
}

#[test]
fn a_folder_of_something_else_is_left_alone() {
    let out = folder("else");
    fs::write(out.join("thesis.tex"), "all my work").unwrap();
    says(&refused(&quick(&out)), &["no plan.toml", "--out"]);
    let file = out.join("thesis.tex");
    let message = match go(&quick(&file), &Stop::default()) {
        Err(Error::Failed(what)) => what,
        other => panic!("{other:?}"),
    };
    says(&message, &["thesis.tex", "Not a directory"]);
    let message = pvswitch_lab::show(&[out], None, STUDIES).unwrap_err().to_string();
    says(&message, &["no plan.toml", "not results of the lab"]);
}

#[test]
fn two_runs_at_once_do_not_share_a_folder() {
    let out = measured("twice");
    let lock = fs::File::open(out.join("plan.toml")).unwrap();
    lock.lock().unwrap();
    says(&refused(&quick(&out)), &["another run of the lab"]);
}

#[test]
fn reports_of_two_machines_are_one_page() {
    let (one, two) = (measured("one"), measured("two"));
    let derived = ["summary.json", "report.html", "report.md"];
    let before = derived.map(|file| text(&one, file));
    derived.iter().for_each(|file| fs::remove_file(one.join(file)).unwrap());
    // All that is derived is made again from what was measured.
    pvswitch_lab::show(std::slice::from_ref(&one), None, STUDIES).unwrap();
    assert_eq!(derived.map(|file| text(&one, file)), before);
    let both = folder("both");
    let page = pvswitch_lab::show(&[one, two], Some(both.clone()), STUDIES).unwrap();
    assert_eq!(page, both.join("report.html"));
    says(&text(&both, "report.html"), &["Machine 1", "Machine 2"]);
}

#[test]
fn all_reports_are_made_by_one_command() {
    let parent = folder("index");
    for name in ["one", "two"] {
        go(&quick(&parent.join(name)), &Stop::default()).unwrap();
        fs::remove_file(parent.join(name).join("report.html")).unwrap();
    }
    fs::create_dir(parent.join("of-something-else")).unwrap();
    let out = folder("index-out");
    let page = pvswitch_lab::index(&parent, &out, STUDIES).unwrap();
    assert_eq!(page, out.join("index.html"));
    let html = text(&out, "index.html");
    says(&html, &["href=\"one/report.html\"", "href=\"two/report.html\"", "2 pairs each"]);
    says(&html, &["cannot tell", "2 folders of results"]);
    for name in ["one", "two"] {
        assert!(out.join(name).join("report.html").is_file());
        assert!(!parent.join(name).join("report.html").exists());
    }
    let refusal =
        |from: &Path, out: &Path| pvswitch_lab::index(from, out, STUDIES).unwrap_err().to_string();
    says(&refusal(&parent, &parent.join("one")), &["--out", "would be lost"]);
    says(&refusal(&parent, &parent), &["--out", "would be lost"]);
    says(&refusal(&parent.join("of-something-else"), &out), &["no folder of results"]);
    says(&refusal(&parent.join("nowhere"), &out), &["nowhere"]);
}

#[test]
fn results_of_two_folders_are_compared_cell_by_cell() {
    let (one, two) = (measured("first"), measured("second"));
    let runs = |of: &[(u32, f64)]| {
        let head = "load,poll,side,repeat,distance_ns,others_percent,mbps,events,cpu_percent\n";
        let line = |(repeat, mbps): &(u32, f64)| {
            format!("1,event,a,{repeat},50,0,{mbps},7,\n1,event,b,{repeat},50,0,{mbps},7,\n")
        };
        let lone = |mbps: f64| format!("7,event,a,0,50,0,{mbps},7,\n");
        head.to_string() + &of.iter().map(line).collect::<String>() + &lone(of[0].1)
    };
    fs::write(one.join("runs.csv"), runs(&[(0, 8.0), (1, 10.0), (2, 12.0), (3, 16.0)])).unwrap();
    fs::write(two.join("runs.csv"), runs(&[(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)])).unwrap();
    let all = folder("compared");
    let files = |folder: &Path| {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let files = entries.filter(|path| path.is_file());
        files.map(|path| (path.clone(), fs::read(path).unwrap())).collect::<BTreeMap<_, _>>()
    };
    let before = [files(&one), files(&two)];
    let folders = [two.clone(), one.clone()];
    pvswitch_lab::show(&folders, Some(all.clone()), STUDIES).unwrap();
    assert_eq!([files(&one), files(&two)], before);

    let names = [&two, &one].map(|path| path.file_name().unwrap().to_str().unwrap());
    let report = text(&all, "report.md");
    says(&report, &["Folders that are compared", names[0], names[1]]);
    // The ratio of medians that do not overlap, with its interval, the exact p of 2 in 70, and the
    // runs; a single run is marked.
    let rows: Vec<&str> = report.lines().filter(|line| line.contains("4 and 4")).collect();
    assert_eq!(rows.len(), 2, "{report}");
    says(rows[0], &["4.500", "2.000 to 16.000", "0.0857", "too few"]);
    says(&report, &["1 and 1, n = 1", "too few pairs to tell"]);
    says(&report, &["One value in all runs of all folders: events"]);
    let first = report.lines().find(|line| line.starts_with("* ")).unwrap();
    says(first, &["CANNOT TELL", names[1], "beside", names[0], "of 6 figures of cells 0 differ"]);
    // One chart of both, by their names.
    let chart = text(&all, "plots/beside-mbps.svg");
    says(&chart, &names);
}

#[test]
fn a_comparison_overwrites_no_results() {
    let (one, two) = (measured("kept"), measured("other"));
    let refusal = |folders: &[PathBuf], out: &Path| {
        pvswitch_lab::show(folders, Some(out.into()), STUDIES).unwrap_err().to_string()
    };
    let before = text(&one, "report.html");
    says(&refusal(&[one.clone(), two.clone()], &one), &["--out", "report would be lost"]);
    let out = folder("never");
    says(&refusal(&[one.clone(), two, one.join(".")], &out), &["given twice"]);
    assert_eq!(text(&one, "report.html"), before);
    assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
}

// ---- results ----

#[test]
fn no_run_is_left_out_for_what_was_measured_in_it() {
    let mut results = read(&measured("quiet"));
    let cell = |cell: &Cell| cell.get("side") == "a" && cell.number("load") < 2.0;
    for (n, run) in results.runs.iter_mut().enumerate() {
        // Far from each other, and with other programs on both CPUs.
        (run.distance_ns, run.others_percent) = (60.0 + 400.0 * n as f64, 150.0);
    }
    assert_eq!(results.values(cell, "mbps").len(), 2);
    let of_a = results.runs.iter().find(|run| cell(&run.cell)).unwrap().cell.clone();
    assert_eq!(results.estimate(&of_a, "mbps").unwrap().count, 2);
    assert_eq!(results.compare("mbps", STUDIES[0])[0].pairs, 2);
    assert!(results.compare("mbps", STUDIES[0])[0].distance_ns.0 > 60.0);
}

#[test]
fn a_run_that_failed_and_was_repeated_counts_once() {
    let out = measured("repeated");
    let whole = text(&out, "runs.csv");
    let (head, rest) = whole.split_once('\n').unwrap();
    let first = rest.lines().next().unwrap();
    let mut void: Vec<&str> = first.split(',').collect();
    (void[5], void[6], void[7]) = ("", "", "the guest did not come up");
    (void[8], void[9], void[10]) = ("", "", "");
    let again = first.replace(",1,7,", ",99,7,");
    let text = format!("{head}\n{}\n{rest}{again}\n", void.join(","));
    fs::write(out.join("runs.csv"), text).unwrap();
    let results = read(&out);
    assert_eq!((results.runs.len(), results.void.len()), (6, 1));
    assert!(results.void[0].repeated);
    // The first result of a turn counts, so that none can be measured until it pleases.
    assert!(results.values(|_| true, "mbps").iter().all(|mbps| *mbps < 99.0));
}

#[test]
fn a_cell_is_compared_with_itself() {
    let out = folder("control").join("out");
    let plan = Plan { control: true, repeats: 3, ..order(&quick(&out)).plan };
    let path = out.with_file_name("plan.toml");
    fs::write(&path, plan.to_toml()).unwrap();
    assert_eq!(Plan::read(&path).unwrap(), plan);
    let ask = Ask { plan: Some(path), only: Vec::new(), ..ask(&out) };
    let turns: Vec<String> = order(&ask)
        .left(&[])
        .iter()
        .map(|t| {
            format!(
                "{}{} {}{}",
                t.cell.get("load"),
                t.cell.last(),
                t.repeat,
                if t.again { " again" } else { "" }
            )
        })
        .collect();
    // At the other end of its group, so that it is as far from itself as any from its base.
    assert_eq!(
        turns[..8],
        ["1a 0", "1b 0", "1a 0 again", "7a 0", "1a 1 again", "1b 1", "1a 1", "7a 1"]
    );
    let ended = go(&ask, &Stop::default()).unwrap();
    assert_eq!((ended.failed, ended.skipped), (0, 0));
    let results = read(&out);
    // Its second runs are no runs of the cell.
    assert_eq!((results.runs.len(), results.controls.len()), (9, 3));
    assert_eq!(results.values(|cell| cell.number("load") < 2.0, "mbps").len(), 6);
    let noise = results.noise("mbps").unwrap();
    assert_eq!((noise.count, noise.median), (3, 1.0));
    says(
        &text(&out, "report.md"),
        &["noise floor: load=1 poll=event side=a over itself, mbps 1.00"],
    );
    let summary: serde_json::Value = serde_json::from_str(&text(&out, "summary.json")).unwrap();
    assert_eq!((&summary["complete"], &summary["noise"][0]["pairs"]), (&true.into(), &3.into()));
    // Resumed, nothing is left to do.
    let before = text(&out, "runs.csv");
    go(&ask, &Stop::default()).unwrap();
    assert_eq!(text(&out, "runs.csv"), before);
}

#[test]
fn runs_of_an_earlier_version_are_read_and_not_continued() {
    let out = measured("earlier");
    let now = text(&out, "runs.csv");
    let lines = now.lines().take(4).map(|line| {
        let mut values: Vec<&str> = line.split(',').collect();
        values.remove(7);
        values.remove(4);
        values.join(",") + "\n"
    });
    let then: String = lines.collect();
    says(&then, &["side,repeat,distance_ns,others_percent,mbps"]);
    fs::write(out.join("runs.csv"), then).unwrap();
    assert_eq!(read(&out).runs.len(), 3);
    assert!(pvswitch_lab::show(std::slice::from_ref(&out), None, STUDIES).is_ok());
    says(&refused(&quick(&out)), &["earlier version", "lab report", "--out"]);
}

#[test]
fn comparisons_are_of_pairs_and_say_what_they_can_tell() {
    let mut results = read(&measured("compare"));
    let template = results.runs[0].clone();
    let mut set = |pairs: &[(f64, f64)]| {
        results.runs.clear();
        for (repeat, (a, b)) in pairs.iter().enumerate() {
            for (side, value) in [("a", a), ("b", b)] {
                let mut run = template.clone();
                run.cell.0[2].1 = side.into();
                run.repeat = u32::try_from(repeat).unwrap();
                run.figures.insert("mbps".into(), *value);
                results.runs.push(run);
            }
        }
        let found = results.compare("mbps", STUDIES[0]);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].base.as_str(), found[0].value.as_str()), ("a", "b"));
        found[0].clone()
    };
    // The machine gets faster by 10 times meanwhile: no matter to pairs.
    let drift = [1.0, 2.0, 4.0, 5.0, 8.0, 10.0];
    let times = |ratios: [f64; 6]| -> Vec<(f64, f64)> {
        drift.iter().zip(ratios).map(|(base, ratio)| (*base, base * ratio)).collect()
    };
    let more = set(&times([2.0, 2.1, 1.9, 2.2, 2.05, 1.95]));
    assert_eq!((more.outcome, more.pairs), (Outcome::More, 6));
    let ratio = more.ratio.unwrap();
    assert!((ratio.median - 2.025).abs() < 1e-9 && ratio.interval && ratio.low > 1.8);
    let less = set(&times([0.5, 0.52, 0.48, 0.55, 0.45, 0.5]));
    assert_eq!(less.outcome, Outcome::Less);
    let same = set(&times([1.01, 0.99, 1.02, 0.98, 1.03, 0.97]));
    assert_eq!(same.outcome, Outcome::NoChange);
    // No significant difference is not no change.
    let open = set(&times([1.3, 0.7, 1.2, 0.8, 1.25, 0.75]));
    assert_eq!((open.outcome, open.outcome.to_string()), (Outcome::Open, "cannot tell".into()));
    let few = set(&[(1.0, 10.0), (2.0, 20.0), (3.0, 30.0), (4.0, 40.0)]);
    assert_eq!(few.outcome, Outcome::TooFew);
    assert_eq!(few.outcome.to_string(), "too few pairs to tell");
    assert!(!few.ratio.unwrap().interval);
    assert_eq!(set(&[(0.0, 0.0)]).ratio, None);
}

#[test]
fn a_study_that_can_conclude_nothing_says_so_first() {
    let out = measured("first");
    let report = text(&out, "report.md");
    let first = report.lines().find(|line| line.starts_with("* ")).unwrap();
    says(first, &["CANNOT TELL", "2 pairs each", "too few pairs", "are needed"]);
    let page = text(&out, "report.html");
    let (first, expected) =
        (page.find("can tell").unwrap(), page.find("What was expected").unwrap());
    assert!(first < expected && !page[..first].contains("<details"));
}

#[test]
fn the_list_has_studies_and_times() {
    says(&pvswitch_lab::list(STUDIES, false), &["fake", "Does the lab work?", "--quick"]);
    let json: serde_json::Value = serde_json::from_str(&pvswitch_lab::list(STUDIES, true)).unwrap();
    assert_eq!(json[0]["name"], "fake");
    assert_eq!(json[0]["measures"][0]["unit"], "Mbit/s");
    assert_eq!(json[0]["scales"][3]["axes"][0]["values"][3], "7");
}
