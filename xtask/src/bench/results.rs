//! Runs of `bench forward` as a folder of results of the lab.

use std::path::Path;

use serde_json::{Value, json};

/// Words of a case's name, which become axes: `split cross plain 60`. Values of the last axis of a
/// plan are compared, so the feature comes last there.
const AXES: [&str; 4] = ["ring", "forward", "size", "feature"];

/// One run of one case.
#[derive(Debug, PartialEq)]
pub struct Run {
    /// Values of the axes.
    cell: [String; 4],
    round: usize,
    ns: f64,
}

impl Run {
    /// Of a case's name; `None`: it does not have that many words.
    pub fn of(name: &str, round: usize, ns: f64) -> Option<Self> {
        Some(Self { cell: cell(name)?, round, ns })
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
        json!({ "name": name, "values": values })
    });
    let of_run = |run: &Run| {
        let cell = AXES.iter().zip(&run.cell);
        let cell: serde_json::Map<_, _> =
            cell.map(|(name, value)| (name.to_string(), value.as_str().into())).collect();
        json!({ "cell": cell, "repeat": run.round, "figures": { "ns": run.ns } })
    };
    let place = arguments.iter().position(|word| word == "--results").map_or(0, |at| at + 1);
    let words = arguments.iter().enumerate();
    let words = words.map(|(at, word)| if at == place { "DIR" } else { word.as_str() });
    let command = words.fold("cargo xtask bench".to_string(), |all, word| all + " " + word);
    json!({
        "rig": "bench",
        "command": command,
        "seconds": 1.0,
        "program": program,
        "switch_cpus": [cpu.parse::<u32>().unwrap_or(0)],
        "guest_cpus": [],
        "facts": {
            "about": "time of a frame through the switch, both guests in the same thread",
            "measures": [{
                "name": "ns",
                "unit": "ns",
                "better": "less",
                "about": "time of a frame, guests' share included",
            }],
        },
        "axes": Vec::from_iter(axes),
        "runs": Vec::from_iter(runs.iter().map(of_run)),
    })
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
        let run = |name, round| Run::of(name, round, 50.0).unwrap();
        let runs = [run("split cross plain 60", 0), run("split cross logged 60", 0)];
        let words = ["--results", "/there", "cross"].map(String::from);
        let said = measured(&runs, Path::new("/bench"), "1", &words);
        assert_eq!(said["command"], "cargo xtask bench --results DIR cross");
        assert_eq!(said["axes"][3], json!({ "name": "feature", "values": ["plain", "logged"] }));
        assert_eq!(said["axes"][0]["values"], json!(["split"]));
        assert_eq!(said["runs"][1]["cell"]["feature"], "logged");
        assert_eq!(said["runs"][1]["figures"]["ns"], 50.0);
    }
}
