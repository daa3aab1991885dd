//! Arbitrary text as a configuration file.
//!
//! A valid configuration is the same when it is written as by `ctl save` and read again, when it is
//! handed to another process by an upgrade, and when its ports are sent to the API. An error is in
//! the text, and has no control character.

use std::path::Path;

use api::Config;
use api::config::ConfigText;
use api::file::{File, PROBLEMS_MAX, Problems};
use api::port::PortText;

/// Events of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Configurations that are valid as a whole.
    pub valid: usize,
    /// Ports in these.
    pub ports: usize,
    /// Files of which each part is valid, but not all together.
    pub conflicts: usize,
    /// Files that are not valid.
    pub invalid: usize,
}

/// Must not fail for any bytes.
pub fn run(data: &[u8]) {
    explore(data);
}

/// As [`run`]; returns what happened.
pub fn explore(data: &[u8]) -> Seen {
    let mut seen = Seen::default();
    let Ok(text) = std::str::from_utf8(data) else {
        return seen;
    };
    let file = match File::parse(Path::new("fuzz.toml"), text) {
        Ok(file) => file,
        Err(problems) => {
            check_problems(&problems, text);
            seen.invalid += 1;
            return seen;
        }
    };
    match file.with(Config::default()) {
        Ok(config) => {
            check_config(&config);
            seen.valid += 1;
            seen.ports += config.ports.len();
        }
        Err(problems) => {
            check_problems(&problems, text);
            seen.conflicts += 1;
        }
    }
    seen
}

fn check_problems(Problems(problems): &Problems, text: &str) {
    assert!((1..=PROBLEMS_MAX + 1).contains(&problems.len()));
    for problem in problems {
        assert!(!problem.what.is_empty() && !problem.what.contains(char::is_control));
        if let (Some(line), Some(column)) = (problem.line, problem.column) {
            // After the last line, if something is missing there.
            let lines = text.split('\n').count();
            assert!((1..=lines).contains(&line) && column >= 1, "{problem}");
        }
    }
}

fn check_config(config: &Config) {
    let written = ConfigText::from(config);
    let handed = written.parse().expect("an upgrade takes it over");
    assert_eq!(ConfigText::from(&handed), written);
    let saved = config.to_toml();
    let read = File::parse(Path::new("saved.toml"), &saved);
    let read = read.and_then(|file| file.with(Config::default()));
    let read = read.unwrap_or_else(|problems| panic!("{problems} in {saved}"));
    assert!(config.diff(&read).is_empty(), "{saved}");
    assert_eq!(read.to_toml(), saved);
    for port in &config.ports {
        let sent = PortText::from_json(&port.name, &port.to_json()).expect("the API takes it");
        let one = |port: &PortText| Config { ports: vec![port.clone()], ..Config::default() };
        assert_eq!(one(&sent).to_toml(), one(port).to_toml());
    }
}

/// Configurations that use every kind of value.
pub fn seeds() -> Vec<Vec<u8>> {
    let files = [
        include_str!("../../examples/two-guests.toml"),
        include_str!("../../examples/many-tenants.toml"),
        include_str!("../../examples/host-tap.toml"),
        include_str!("../../examples/xen.toml"),
        include_str!("../../packaging/pvswitch.toml"),
    ];
    let shorter = [
        "poll = \"timer:1000\"\ncpus = [0, 1]\nworkers = 2\nsandbox = \"off\"\nageing = 0\n",
        "[static]\n\"02:00:00:00:00:01/5\" = \"a\"\n[port.a]\nkind = \"null\"\nvlan = 5\n",
        "[port.a]\nkind = \"null\"\nmirror-to = \"b\"\n[port.b]\nkind = \"null\"\n",
        "[port.a]\nkind = \"null\"\nmirror-to = \"a\"\n",
        "[port.a]\nkind = \"vhost-user\"\nsocket = \"/a\"\nrate-in = \"1Gbit\"\n\
         mac = \"02:00:00:00:00:01\"\n",
        "[port.u]\nkind = \"af-packet\"\ninterface = \"e\"\nqueues = 2\ntrunk = \"1-5,7\"\n",
    ];
    files.iter().chain(&shorter).map(|text| text.as_bytes().to_vec()).collect()
}
