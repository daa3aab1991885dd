//! `pvswitch demo`: shows the switch at work. No root, no virtual machine, under a minute.
//!
//! The switch and each guest are processes of this program (`run` and `gen`), connected by
//! vhost-user sockets and shared memory as virtual machines are, so all measurements are real. The
//! demo only starts the processes, reads counters and reports. It leaves no files or processes
//! behind.

pub mod format;
mod measure;
mod process;
mod scenes;
mod stage;
mod summary;
mod view;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity};
use switch::poll::Policy;

use crate::cli::DemoArgs;
use crate::{AnyError, Usage};
use process::Folder;
use scenes::Demo;
use stage::Setting;
use view::View;

/// Range of a scene's length, in seconds.
const SCENE_MIN: f64 = 0.2;
const SCENE_MAX: f64 = 600.0;
/// Number of steps of one scene's length in the whole demo.
const STEPS: u32 = 8;
/// Number of cores from which guests may poll without competing for a CPU.
const CORES_TO_POLL: usize = 4;

/// Reason for the early end of a scene.
#[derive(Debug)]
pub enum Fail {
    /// The user interrupted the demo.
    Interrupted,
    /// An error.
    Failed(String),
}

impl From<String> for Fail {
    fn from(what: String) -> Self {
        Self::Failed(what)
    }
}

/// Runs `pvswitch demo`.
pub fn command(args: DemoArgs) -> Result<(), AnyError> {
    if !(SCENE_MIN..=SCENE_MAX).contains(&args.scene) {
        let error = format!("--scene {}: use {SCENE_MIN} to {SCENE_MAX} seconds", args.scene);
        return Err(Usage(error).into());
    }
    let stop = Arc::new(AtomicBool::new(false));
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let scene = Duration::from_secs_f64(args.scene);
    let dir = Folder::new();
    let dir = dir.map_err(|error| format!("cannot create a directory for sockets: {error}"))?;
    let machine = Machine::detect();
    let setting = Setting {
        exe: std::env::current_exe()?,
        dir: dir.path().into(),
        guest_poll: machine.guest_poll(),
        cpus: machine.split(),
        life: scene * STEPS + Duration::from_secs(60),
    };
    let mut view = View::new(args.plain);
    view.write(&machine.greeting(&setting));
    let mut demo = Demo::new(&setting, scene, stop, view);
    demo.play();
    let failures = demo.results.failures.len();
    demo.view.close();
    let text = summary::text(&demo.results, &machine, &setting, &demo.view);
    demo.view.write(&text);
    match failures {
        0 => Ok(()),
        n => Err(format!("{} failed, see above", format::plural(n as u64, "scene")).into()),
    }
}

/// The machine that the demo runs on.
pub struct Machine {
    /// CPUs that this process may use.
    cpus: Vec<usize>,
    /// Load average of the last minute, including other programs.
    load: f64,
}

impl Machine {
    fn detect() -> Self {
        let set = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
        let mut cpus: Vec<_> = (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect();
        if cpus.is_empty() {
            cpus.push(0);
        }
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0.0);
        Self { cpus, load }
    }

    /// Number of cores.
    fn cores(&self) -> usize {
        self.cpus.len()
    }

    /// Whether other programs use enough CPU time to affect the results.
    fn is_busy(&self) -> bool {
        self.load > 0.5 * self.cores() as f64
    }

    fn guest_poll(&self) -> Policy {
        if self.cores() >= CORES_TO_POLL { Policy::ADAPTIVE } else { Policy::Event }
    }

    /// One CPU for the switch, the others for the guests: migration would slow both.
    fn split(&self) -> Option<(usize, CpuSet)> {
        let (switch, guests) = self.cpus.split_last().filter(|(_, rest)| !rest.is_empty())?;
        let mut set = CpuSet::new();
        guests.iter().for_each(|cpu| set.set(*cpu));
        Some((*switch, set))
    }

    fn greeting(&self, setting: &Setting) -> String {
        let cores = format::plural(self.cores() as u64, "core");
        let share = match &setting.cpus {
            Some((cpu, _)) => format!("CPU {cpu} for the switch, the others for its guests"),
            None => "one core for all of it".into(),
        };
        format!("pvswitch demo: {cores} to use, {share}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_switch_has_a_core_of_its_own_where_there_are_two() {
        let machine = |cpus: &[usize]| Machine { cpus: cpus.to_vec(), load: 0.0 };
        assert!(machine(&[3]).split().is_none());
        let (switch, guests) = machine(&[1, 4, 6]).split().unwrap();
        assert_eq!(switch, 6);
        assert!(guests.is_set(1) && guests.is_set(4) && !guests.is_set(6));
        assert_eq!(machine(&[0, 1]).guest_poll(), Policy::Event);
        assert_eq!(machine(&[0, 1, 2, 3]).guest_poll(), Policy::ADAPTIVE);
    }
}
