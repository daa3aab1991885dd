//! `lab run --guest uml`: a study with a stock kernel's driver in its guests.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn lab(out: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pvswitch"));
    command.args(["lab", "run"]).args(args).arg("--out").arg(out);
    command.output().unwrap()
}

fn words(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A name for a folder of results that is not there.
fn fresh(name: &str) -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&out);
    out
}

fn runs(program: &str, args: &[&str]) -> bool {
    Command::new(program).args(args).output().is_ok_and(|output| output.status.success())
}

#[test]
fn traffic_passes_a_stock_driver() {
    let tools = [("linux.uml", "--version"), ("iperf3", "--version"), ("ping", "-V")];
    if let Some((tool, _)) = tools.iter().find(|(tool, version)| !runs(tool, &[version])) {
        println!("skipped: {tool} is not installed");
        return;
    }
    let user = ["--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "true"];
    if !runs("unshare", &user) && !runs("unshare", &user[2..]) {
        println!("skipped: no namespaces here");
        return;
    }
    let out = fresh("lab-uml");
    let output = lab(
        &out,
        &[
            "fairness",
            "--smallest",
            "--guest",
            "uml",
            "--repeats",
            "1",
            "--seconds",
            "0.5",
            "--only",
            "guests=2",
            "--only",
            "direction=to-guest",
            "--only",
            "variant=shared",
        ],
    );
    assert!(output.status.success(), "{}", words(&output));
    let runs = std::fs::read_to_string(out.join("runs.csv")).unwrap();
    let rows: Vec<Vec<&str>> = runs.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(rows.len(), 2, "{runs}");
    for name in ["throughput", "guests_cpu", "least_share"] {
        let column = rows[0].iter().position(|column| *column == name).unwrap();
        assert!(rows[1][column].parse::<f64>().unwrap() > 0.0, "{name}: {runs}");
    }
    let machine = std::fs::read_to_string(out.join("machine.json")).unwrap();
    assert!(machine.contains("\"guest\": \"uml\""), "{machine}");
}

#[test]
fn a_stock_driver_speaks_no_xen() {
    let out = fresh("lab-uml-xen");
    for study in [&["fairness", "--proto", "xen"][..], &["polling", "--smallest"]] {
        let output = lab(&out, &[study, &["--guest", "uml"]].concat());
        assert_eq!(output.status.code(), Some(2), "{}", words(&output));
        assert!(words(&output).contains("--proto virtio"), "{}", words(&output));
    }
    let output = lab(&out, &["fairness", "--guest", "vmx"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(words(&output).contains("netns, uml"), "{}", words(&output));
}
