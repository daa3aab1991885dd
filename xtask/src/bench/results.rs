//! Runs of `bench forward` as a folder of results of the lab.

#[path = "../../../crates/lab/tests/common/measured.rs"]
mod measured;

use std::path::Path;

use serde_json::{Value, json};

use self::measured::Measured;

/// Words of a case's name, which become axes: `split cross plain 60`. Values of the last axis of a
/// plan are compared, so the feature comes last there.
const AXES: [&str; 4] = ["ring", "forward", "size", "feature"];

/// One run of one case.
#[derive(Debug, PartialEq)]
pub struct Run {
    /// Values of the axes.
    cell: [String; 4],
    round: usize,
    /// Of the control.
    again: bool,
    ns: f64,
}

impl Run {
    /// Of a case's name; `None`: it does not have that many words.
    pub fn of(name: &str, round: usize, again: bool, ns: f64) -> Option<Self> {
        Some(Self { cell: cell(name)?, round, again, ns })
    }

    /// The name of its case, as words to choose it by.
    pub fn words(&self) -> [&str; 4] {
        let [ring, forward, size, feature] = &self.cell;
        [ring, forward, feature, size]
    }
}

/// The values of the axes, of a case's name; `None`: it has other words.
fn cell(name: &str) -> Option<[String; 4]> {
    let words: Vec<&str> = name.split_whitespace().collect();
    let [ring, forward, feature, size] = words[..] else { return None };
    size.parse::<u32>().ok()?;
    Some([ring, forward, size, feature].map(String::from))
}

/// What `pvswitch-lab import` reads.
pub fn measured(runs: &[Run], program: &Path, cpu: &str, arguments: &[String]) -> Value {
    let axes = AXES.iter().enumerate().map(|(at, name)| {
        let mut values: Vec<&str> = Vec::new();
        for run in runs {
            let value = &run.cell[at][..];
            if !values.contains(&value) {
                values.push(value);
            }
        }
        (*name, values.into_iter().map(String::from).collect())
    });
    let place = arguments.iter().position(|word| word == "--results").map_or(0, |at| at + 1);
    let words = arguments.iter().enumerate();
    let words = words.map(|(at, word)| if at == place { "DIR" } else { word.as_str() });
    let of_run = |run: &Run| {
        let figures = json!({ "ns": run.ns });
        measured::Run { cell: run.cell.to_vec(), repeat: run.round, again: run.again, figures }
    };
    let measured = Measured {
        rig: "bench",
        command: words.fold("cargo xtask bench".to_string(), |all, word| all + " " + word),
        seconds: 1.0,
        program,
        cpus: vec![cpu.parse().unwrap_or(0)],
        about: "time of a frame through the switch, both guests in the same thread".into(),
        measures: &[("ns", "ns", "time of a frame, guests' share included")],
        axes: axes.collect(),
        runs: runs.iter().map(of_run).collect(),
    };
    measured.json()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_four_words_are_cells() {
        let words = |name| cell(name).map(|cell| cell.join(" "));
        assert_eq!(words("split cross plain 60"), Some("split cross 60 plain".into()));
        assert_eq!(words("xen rings"), None);
        assert_eq!(words("worker idle switch queues"), None);
    }

    #[test]
    fn runs_are_written_with_their_axes_and_without_the_folder() {
        let run = |name, again| Run::of(name, 0, again, 50.0).unwrap();
        let names = ["split cross plain 60", "split cross logged 60", "split cross plain 60"];
        let runs = [run(names[0], false), run(names[1], false), run(names[2], true)];
        assert_eq!(runs[1].words().join(" "), names[1]);
        let words = ["--results", "/there", "cross"].map(String::from);
        let said = measured(&runs, Path::new("/bench"), "1", &words);
        assert_eq!(said["command"], "cargo xtask bench --results DIR cross");
        assert_eq!(said["axes"][3], json!({ "name": "feature", "values": ["plain", "logged"] }));
        assert_eq!(said["axes"][0]["values"], json!(["split"]));
        assert_eq!(said["runs"][1]["cell"]["feature"], "logged");
        assert_eq!(
            (&said["runs"][0]["again"], &said["runs"][2]["again"]),
            (&json!(false), &json!(true))
        );
        assert_eq!(said["runs"][1]["figures"]["ns"], 50.0);
    }
}
