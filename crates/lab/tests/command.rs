//! The command line of `pvswitch-lab`, with all studies.

#[path = "common/measured.rs"]
mod measured;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

use self::measured::{Measured, Run};

const LAB: &str = env!("CARGO_BIN_EXE_pvswitch-lab");

/// A folder of its own, empty.
fn folder(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("command-{name}"));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

fn lab(args: &[&str]) -> Output {
    Command::new(LAB).args(args).stdin(Stdio::null()).output().unwrap()
}

/// Standard output of what must succeed.
fn output_of(args: &[&str]) -> String {
    let output = lab(args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {error}");
    String::from_utf8(output.stdout).unwrap()
}

fn fails(args: &[&str], status: i32, words: &[&str]) {
    let output = lab(args);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{args:?}: {error}");
    for word in words {
        assert!(error.contains(word), "{word:?} is not said by {args:?}: {error}");
    }
    assert!(!error.contains("panicked"), "{error}");
}

fn studies() -> Vec<Value> {
    serde_json::from_str(&output_of(&["list", "--json"])).unwrap()
}

#[test]
fn every_study_has_plans_that_suit_it_and_keep_their_time() {
    let dir = folder("plans");
    let four_hours_s = 4.0 * 3600.0;
    let most_s = [
        ("--smallest", 60.0),
        ("--quick", 300.0),
        ("--seconds=1", four_hours_s),
        ("--full", f64::INFINITY),
    ];
    for study in studies() {
        let name = study["name"].as_str().unwrap();
        assert!(output_of(&["list"]).contains(name));
        let axes = study["scales"][3]["axes"].as_array().unwrap().len();
        for (scale, most_s) in most_s {
            let out = dir.join(format!("{name}{scale}")).display().to_string();
            let run = ["run", name, scale, "--dry-run", "--json", "--out", &out];
            let plan: Value = serde_json::from_str(&output_of(&run)).unwrap();
            assert!(!plan["cells"].as_array().unwrap().is_empty(), "{name} {scale}");
            let (repeats, control) = (&plan["plan"]["repeats"], &plan["plan"]["control"]);
            // Nothing is compared in it.
            let compares = name != "soak";
            let least = match scale {
                _ if !compares => 1,
                "--smallest" => 1,
                "--quick" => 5,
                _ => 10,
            };
            assert!(repeats.as_u64().unwrap() >= least, "{name} {scale}: {repeats} repeats");
            assert_eq!(control.as_bool().unwrap_or(false), compares && scale != "--smallest");
            assert_eq!(plan["plan"]["axes"].as_array().unwrap().len(), axes, "{name} {scale}");
            let takes_s = plan["takes_s"].as_f64().unwrap();
            assert!(takes_s < most_s, "{name} {scale}: {takes_s} s, {most_s} s at most");
            // Nothing was made for it.
            assert!(!Path::new(&out).exists());
        }
        // No measure has the name of an axis or of what each run has: all are columns of one file.
        let axes = study["scales"][3]["axes"].as_array().unwrap().iter();
        let measures = study["measures"].as_array().unwrap().iter();
        let each = ["repeat", "again", "distance_ns", "others_percent", "void"].map(String::from);
        let mut names: Vec<String> =
            axes.chain(measures).map(|x| x["name"].as_str().unwrap().into()).chain(each).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), count, "{name}: {names:?}");
        let wrong = format!("{name}x");
        let meant = format!("did you mean '{name}'?");
        fails(&["run", &wrong, "--dry-run"], 2, &[&format!("no study '{wrong}'"), &meant]);
        fails(&["run", name, "--only", "no-axis=1", "--dry-run"], 2, &["no axis 'no-axis'"]);
        fails(&["run", name, "--plan", "/no/such", "--dry-run"], 2, &["/no/such"]);
    }
}

#[test]
fn words_that_mean_nothing() {
    fails(&["run", "no-such-study-at-all"], 2, &["no study 'no-such-study-at-all': use one of"]);
    fails(&["run"], 2, &["<STUDY>"]);
    fails(&["run", "x", "--quick", "--full"], 2, &["cannot be used with"]);
    fails(&["run", "x", "--switch-cpus", "zero"], 2, &["zero"]);
    fails(&["rnu"], 2, &["'rnu'"]);
}

/// Programs of this machine, all but some.
fn programs_without(missing: &[&str]) -> PathBuf {
    let dir = folder("programs");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let here = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    for program in here.filter_map(|folder| std::fs::read_dir(folder).ok()).flatten() {
        let program = program.unwrap().path();
        let name = program.file_name().unwrap();
        if !missing.iter().any(|missing| name == *missing) {
            // The first of a name counts.
            let _ = std::os::unix::fs::symlink(&program, dir.join(name));
        }
    }
    dir
}

#[test]
fn cells_whose_programs_are_not_installed_are_skipped_and_say_once_what_is_missing() {
    let dir = folder("skipped");
    std::os::unix::fs::symlink("/bin/true", dir.join("pvswitch")).unwrap();
    // A program finds the switch beside itself.
    std::fs::hard_link(LAB, dir.join("pvswitch-lab")).unwrap();
    let mut command = Command::new(dir.join("pvswitch-lab"));
    command.args(["run", "polling", "--smallest", "--out"]).arg(dir.join("out"));
    command.env("PATH", programs_without(&["ping", "iperf3"])).stdin(Stdio::null());
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    if text.contains("no namespaces for the guests") {
        println!("skipped: {text}");
        return;
    }
    assert_eq!(output.status.code(), Some(1), "nothing was measured: {text}");
    for (program, package) in [("iperf3", "iperf3"), ("ping", "iputils-ping")] {
        let what = format!("{program} is not installed (Debian package {package})");
        assert!(text.contains(&format!("{what}: cells that need it are skipped")), "{text}");
    }
    let reason = "skipped: ping is not installed (Debian package iputils-ping)";
    assert_eq!(text.matches(reason).count(), 1, "{text}");
    assert!(text.contains("8 runs skipped: they need something that is missing here"), "{text}");
    assert!(!text.contains("FAILED") && !dir.join("out/report.html").exists(), "{text}");
}

#[test]
fn reports_of_what_is_none() {
    let dir = folder("reports-of-none");
    let text = |name: &str| dir.join(name).display().to_string();
    fails(&["report", &text("nothing")], 1, &["nothing", "no plan.toml in it"]);
    let mine = text("plan.toml");
    std::fs::write(&mine, "format = 99\nstudy = \"x\"\n").unwrap();
    let there = dir.display().to_string();
    fails(&["report", &there], 1, &["another version", "format 99"]);
    std::fs::write(&mine, "format = 1\nstudy = \"x\"\nrepeats = 1\nseconds = 1.0\naxes = []\n")
        .unwrap();
    fails(&["report", &there], 2, &["no study 'x'"]);
}

#[test]
fn help_is_that_of_pvswitch_lab_with_a_blank() {
    let help = output_of(&["--help"]);
    for word in ["Usage: pvswitch lab <COMMAND>", "list", "run", "report", "pvswitch lab run"] {
        assert!(help.contains(word), "{word}: {help}");
    }
    assert!(!help.contains("guest "), "{help}");
    assert!(output_of(&["run", "--help"]).contains("Usage: pvswitch lab run [OPTIONS] <STUDY>"));
    assert_eq!(lab(&[]).status.code(), Some(2));
}

/// Issue 16, row 5: an example of the help that fails teaches nobody.
#[test]
fn every_example_of_the_help_is_accepted() {
    let dir = folder("examples").display().to_string();
    let help = output_of(&["--help"]);
    let examples = help.lines().filter_map(|line| line.trim().strip_prefix("pvswitch lab run "));
    let examples: Vec<Vec<_>> = examples.map(|args| args.split_whitespace().collect()).collect();
    assert!(examples.len() >= 3, "{help}");
    for example in examples {
        let own = example.iter().filter(|arg| **arg != "--dry-run").copied();
        // The folder of results need not exist, and its name is not ours.
        let own: Vec<_> = own.take_while(|arg| *arg != "--out").collect();
        let args = [&["run"], &own[..], &["--dry-run", "--out", &dir]].concat();
        assert!(!output_of(&args).is_empty(), "{example:?}");
    }
}

/// Committed results of a study, copied: a folder with nothing but them, that no other test has.
fn results(name: &str, test: &str) -> PathBuf {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results").join(name);
    let to = folder(&format!("results-{name}-for-{test}"));
    for file in std::fs::read_dir(from).unwrap().flatten() {
        if file.path().is_file() {
            std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    }
    to
}

/// Commands on a page.
fn commands(page: &Path) -> Vec<String> {
    let html = std::fs::read_to_string(page).unwrap();
    let codes = html.split("<code>pvswitch lab ").skip(1);
    let codes = codes.map(|rest| rest.split_once("</code>").unwrap().0.replace("&amp;", "&"));
    codes.collect()
}

/// Issue 16, row 5: what a report says repeats it has the plan of what was run.
#[test]
fn commands_of_a_report_repeat_what_was_run() {
    for name in ["lab-idle", "lab-fairness", "lab-polling", "lab-copies", "lab-hostile"] {
        let dir = results(name, "commands");
        output_of(&["report", &dir.display().to_string()]);
        let commands = commands(&dir.join("report.html"));
        assert!(commands.len() > 1, "{name}: {commands:?}");
        for command in commands {
            assert!(command.contains(" --plan plan.toml"), "{name}: {command}");
            assert!(command.ends_with(" --out again"), "{name}: {command}");
            let args: Vec<_> = command.split_whitespace().chain(["--dry-run"]).collect();
            let output = Command::new(LAB).args(&args).current_dir(&dir).output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{name}: {command}: {error}");
        }
    }
}

/// Issue 16, row 5: a report of two folders leaves theirs as they are.
#[test]
fn a_report_of_several_folders_has_a_folder_of_its_own() {
    let (one, two) = (results("lab-idle", "several"), results("lab-idle-10s", "several"));
    let all = folder("several");
    let paths = [&one, &two, &all].map(|path| path.display().to_string());
    let [a, b, out] = paths.each_ref().map(String::as_str);
    output_of(&["report", a]);
    let before = std::fs::read(one.join("report.html")).unwrap();
    let page = output_of(&["report", a, b, "--out", out]);
    assert_eq!(Path::new(page.trim()), all.join("report.html"));
    assert_eq!(std::fs::read(one.join("report.html")).unwrap(), before);
    let output = Command::new(LAB).args(["report", a, b]).current_dir(&all).output().unwrap();
    let page = String::from_utf8(output.stdout).unwrap();
    assert_eq!(page.trim(), "pvswitch-lab-idle-all/report.html");
    assert!(all.join(page.trim()).exists());
}

/// What a rig hands over: six rounds of two kinds, the second of which is twice as fast, and of the
/// control, which is the first once more.
fn measured() -> Value {
    let runs = (0..6).flat_map(|repeat| {
        let kinds = [("tap", 100.0, false), ("new", 200.0, false), ("tap", 125.0, true)];
        kinds.map(|(kind, per_s, again)| {
            let per_s = per_s + f64::from(repeat);
            json!({"cell": {"size": "60", "kind": kind}, "repeat": repeat, "again": again,
                "distance_ns": 50, "others_percent": 1.5, "figures": {"per_s": per_s}})
        })
    });
    let measure = json!({"name": "per_s", "unit": "1/s", "better": "more", "about": "frames"});
    let axis = |name: &str, values: &[&str]| json!({"name": name, "values": values});
    json!({"rig": "test", "command": "rigs/test/run --pairs 6", "seconds": 2, "program": LAB,
        "switch_cpus": [0], "guest_cpus": [1], "versions": {"dpdk": "22.11"},
        "facts": {"about": "a test", "measures": [measure]},
        "axes": [axis("size", &["60"]), axis("kind", &["tap", "new"])],
        "runs": runs.collect::<Vec<_>>()})
}

#[test]
fn what_a_benchmark_measured_is_a_folder_of_results() {
    let dir = folder("import-bench");
    let run = |repeat, kind: &str, ns| Run {
        cell: vec!["60".into(), kind.into()],
        repeat,
        again: false,
        figures: json!({ "ns": ns }),
    };
    let measured = Measured {
        rig: "test",
        command: "cargo bench".into(),
        seconds: 1.0,
        program: Path::new(LAB),
        cpus: vec![1],
        about: "a test".into(),
        measures: &[("ns", "ns", "time of a frame")],
        axes: vec![("size", vec!["60".into()]), ("kind", vec!["split".into(), "packed".into()])],
        runs: vec![run(0, "split", 50.0), run(0, "packed", 40.0)],
    };
    let at = |name: &str| dir.join(name).display().to_string();
    std::fs::write(at("measured.json"), measured.json().to_string()).unwrap();
    output_of(&["import", &at("measured.json"), "--out", &at("bench")]);
    let runs = std::fs::read_to_string(at("bench/runs.csv")).unwrap();
    assert_eq!(runs.lines().count(), 3, "{runs}");
}

#[test]
fn what_a_rig_measured_is_a_folder_of_results() {
    let dir = folder("import");
    let at = |name: &str| dir.join(name).display().to_string();
    let import = |measured: &Value, out: &str| {
        std::fs::write(at("measured.json"), measured.to_string()).unwrap();
        lab(&["import", &at("measured.json"), "--out", &at(out)])
    };
    let said = import(&measured(), "rig");
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    assert!(String::from_utf8_lossy(&said.stdout).ends_with("rig: 18 runs\n"));
    output_of(&["report", &at("rig")]);
    let text = std::fs::read_to_string(at("rig/report.md")).unwrap();
    for words in ["rigs/test/run --pairs 6", "a test", "6 pairs", "1.976 (", "1.244 ("] {
        assert!(text.contains(words), "{words}: {text}");
    }
    output_of(&["index", &at(""), "--out", &at("index")]);
    // It is whole, or it is refused.
    let error = |change: &dyn Fn(&mut Value), out: &str| {
        let mut measured = measured();
        change(&mut measured);
        let done = import(&measured, out);
        assert!(!done.status.success());
        String::from_utf8(done.stderr).unwrap()
    };
    for (change, word) in [
        (&(|_: &mut Value| ()) as &dyn Fn(&mut Value), "holds results already"),
        (&|m| m["runs"][0]["cell"]["kind"] = "other".into(), "not a cell of its axes"),
        (&|m| m["runs"][0]["figures"]["sheep"] = 1.into(), "no measure 'sheep'"),
        (&|m| m["runs"][2]["again"] = false.into(), "round 0 has it already"),
        (&|m| m["runs"] = json!([]), "repeats = 0"),
        (&|m| m["more"] = 1.into(), "unknown field `more`"),
    ] {
        let out = if word.starts_with("holds") { "rig" } else { word };
        let error = error(change, out);
        assert!(error.contains(word), "{word}: {error}");
        assert!(out == "rig" || !dir.join(out).exists(), "{word}: it is all checked first");
    }
    fails(&["run", "rig-test"], 2, &["no study 'rig-test'"]);
    fails(&["import", &at("none.json"), "--out", &at("x")], 2, &["none.json"]);
}

/// It under a second name, in a folder of its own: nothing to measure is beside it.
#[test]
fn without_pvswitch_beside_it_a_run_is_refused_and_a_list_is_not() {
    let dir = folder("alone");
    let alone = dir.join("pvswitch-lab");
    std::fs::hard_link(LAB, &alone).unwrap();
    let run = |args: &[&str]| Command::new(&alone).args(args).output().unwrap();
    assert!(run(&["list"]).status.success());
    let out = dir.join("out").display().to_string();
    assert!(run(&["run", "idle", "--dry-run", "--out", &out]).status.success());
    let output = run(&["run", "idle", "--smallest", "--out", &out]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    let missing = dir.join("pvswitch").display().to_string();
    for word in [&missing, "cargo build --release"] {
        assert!(error.contains(word), "{word}: {error}");
    }
    assert!(!Path::new(&out).exists());
}

#[test]
fn a_reader_that_has_enough_is_no_failure() {
    let mut lab = Command::new(LAB).arg("list").stdout(Stdio::piped()).spawn().unwrap();
    drop(lab.stdout.take());
    assert!(lab.wait().unwrap().success());
}
