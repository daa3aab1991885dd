//! Logs of latencies that `ndr` leaves: HdrHistogram's code reads from them what `runs.csv` says.

use std::path::{Path, PathBuf};
use std::process::Command;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hdrhistogram::Histogram;
use hdrhistogram::serialization::Deserializer;
use hdrhistogram::serialization::interval_log::{IntervalLogIterator, LogEntry};
use pvswitch_lab::plan::Cell;
use pvswitch_lab::store::{Done, Results, plan_of};
use pvswitch_lab::studies;

const LAB: &str = env!("CARGO_BIN_EXE_pvswitch-lab");
const LOADS: [u32; 3] = [10, 50, 90];
const QUANTILES: [(&str, f64); 3] = [("p50", 0.5), ("p99", 0.99), ("p999", 0.999)];

/// The histograms of a log, in ns.
fn histograms(path: &Path) -> Vec<Histogram<u64>> {
    let text = std::fs::read(path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    let entries = IntervalLogIterator::new(&text).map(|entry| entry.unwrap());
    let histogram = |entry| match entry {
        LogEntry::Interval(interval) => {
            let bytes = STANDARD.decode(interval.encoded_histogram()).unwrap();
            Some(Deserializer::new().deserialize(&mut &bytes[..]).unwrap())
        }
        _ => None,
    };
    entries.filter_map(histogram).collect()
}

fn log_of(folder: &Path, cell: &Cell, load: u32) -> PathBuf {
    let values: Vec<&str> = cell.0.iter().map(|(_, value)| value.as_str()).collect();
    folder.join("latency").join(format!("{}-{load}.hlog", values.join("-")))
}

/// What a run is of a log's histogram: the percentiles, in us, as in `runs.csv`.
fn is_of(run: &Done, load: u32, histogram: &Histogram<u64>) -> bool {
    QUANTILES.iter().all(|(name, quantile)| {
        let us = histogram.value_at_quantile(*quantile) as f64 / 1e3;
        run.figures.get(format!("{name}_{load}").as_str()) == Some(&us)
    })
}

/// Checks that each run of a folder has its histograms; returns how many there are.
fn check(folder: &Path) -> usize {
    let plan = plan_of(folder).unwrap();
    let study = studies::of(&plan, studies::ALL).unwrap();
    let results = Results::read(folder, plan, study, &mut |line| panic!("{line}")).unwrap();
    let mut found = 0;
    for run in results.runs.iter().chain(&results.controls) {
        for load in LOADS.into_iter().filter(|_| run.figures.contains_key("p50_90")) {
            let path = log_of(folder, &run.cell, load);
            let all = histograms(&path);
            assert!(
                all.iter().any(|histogram| is_of(run, load, histogram)),
                "{}: no histogram of run {} with {:?}",
                path.display(),
                run.repeat + 1,
                run.figures
            );
            found += 1;
        }
    }
    found
}

#[test]
fn committed_histograms_are_those_of_the_runs() {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/results");
    for entry in std::fs::read_dir(all).unwrap().flatten() {
        if entry.path().join("latency").is_dir() {
            assert!(check(&entry.path()) > 0, "{}", entry.path().display());
        }
    }
}

#[test]
fn a_run_leaves_its_histograms() {
    if !Path::new(LAB).with_file_name("pvswitch").exists() {
        println!("skipped: no pvswitch beside pvswitch-lab (cargo build --bin pvswitch)");
        return;
    }
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("histograms");
    let _ = std::fs::remove_dir_all(&out);
    let mut lab = Command::new(LAB);
    lab.args(["run", "ndr", "--smallest", "--repeats", "2", "--out"]).arg(&out);
    let output = lab.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("no namespaces for the guests") || said.contains("two CPUs are needed") {
        println!("skipped: {said}");
        return;
    }
    assert!(output.status.success(), "{said}");
    if check(&out) == 0 {
        // No load was found at which latency is measured: other programs need the CPUs.
        println!("skipped: both searches were unstable: {said}");
    }
}
