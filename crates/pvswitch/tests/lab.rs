//! `pvswitch lab` as people call it. What it does behind that is tested in its own room.

mod common;

use std::process::{Command, Output};

use common::{Dir, Switch, pvswitch};
use serde_json::Value;

fn lab(args: &[&str]) -> Output {
    let mut command: Command = pvswitch();
    command.arg("lab").args(args).output().unwrap()
}

/// Standard output of what must succeed.
fn told(args: &[&str]) -> String {
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
    serde_json::from_str(&told(&["list", "--json"])).unwrap()
}

#[test]
fn every_study_has_plans_that_suit_it_and_keep_their_time() {
    let dir = Dir::new();
    let most_s = [("--smallest", 60.0), ("--quick", 300.0), ("--full", f64::INFINITY)];
    for study in studies() {
        let name = study["name"].as_str().unwrap();
        assert!(told(&["list"]).contains(name));
        let axes = study["scales"][3]["axes"].as_array().unwrap().len();
        for (scale, most_s) in most_s {
            let out = dir.text(&format!("{name}{scale}"));
            let run = ["run", name, scale, "--dry-run", "--json", "--out", &out];
            let plan: Value = serde_json::from_str(&told(&run)).unwrap();
            assert!(!plan["cells"].as_array().unwrap().is_empty(), "{name} {scale}");
            assert_eq!(plan["plan"]["axes"].as_array().unwrap().len(), axes, "{name} {scale}");
            let takes_s = plan["takes_s"].as_f64().unwrap();
            assert!(takes_s < most_s, "{name} {scale}: {takes_s} s, {most_s} s at most");
            // Nothing was made for it.
            assert!(!std::path::Path::new(&out).exists());
        }
        // No measure has the name of an axis or of what each run has: all are columns of one file.
        let axes = study["scales"][3]["axes"].as_array().unwrap().iter();
        let measures = study["measures"].as_array().unwrap().iter();
        let each = ["repeat", "distance_ns", "others_percent"].map(String::from);
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
    fails(&["run", "no-such-study-at-all"], 2, &["no study 'no-such-study-at-all': there are"]);
    fails(&["run"], 2, &["<STUDY>"]);
    fails(&["run", "x", "--quick", "--full"], 2, &["cannot be used with"]);
    fails(&["run", "x", "--switch-cpus", "zero"], 2, &["zero"]);
    fails(&["rnu"], 2, &["'rnu'"]);
}

#[test]
fn reports_of_what_is_none() {
    let dir = Dir::new();
    fails(&["report", &dir.text("nothing")], 1, &["nothing", "no plan.toml in it"]);
    std::fs::write(dir.path("plan.toml"), "format = 99\nstudy = \"x\"\n").unwrap();
    let folder = dir.text("");
    fails(&["report", &folder], 1, &["another version", "format is 99"]);
    let mine = dir.text("plan.toml");
    std::fs::write(&mine, "format = 1\nstudy = \"x\"\nrepeats = 1\nseconds = 1.0\naxes = []\n")
        .unwrap();
    fails(&["report", &folder], 2, &["no study 'x'"]);
}

/// Guests of a lab that is run without root: root only in a user namespace.
#[test]
fn a_nic_in_a_user_namespace() {
    let unshare = ["--user", "--map-root-user", "--net"];
    let possible = Command::new("unshare").args(unshare).arg("true").output();
    if !possible.is_ok_and(|output| output.status.success()) {
        println!("skipped: no user namespaces here");
        return;
    }
    let dir = Dir::new();
    let _switch = Switch::start(&dir, &[], &[dir.port("a", "")]);
    let connect = format!("vhost-user:{}", dir.text("a"));
    let nic = pvswitch();
    let mut command = Command::new("unshare");
    command.args(unshare).arg("--").arg(nic.get_program());
    command.args([
        "nic",
        "--connect",
        &connect,
        "--tap",
        "t0",
        "--mtu",
        "9000",
        "--duration",
        "0.3",
    ]);
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
}
