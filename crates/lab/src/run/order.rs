//! Checks a request before anything is started.

use std::fmt::Write as _;
use std::path::PathBuf;

use rustix::fs::{Access, access};
use serde_json::json;

use super::progress::length;
use super::this_program;
use crate::error::Error;
use crate::machine::allowed_cpus;
use crate::plan::{Axis, Plan, Scale, Turn};
use crate::stage::vm::newest_kernel;
use crate::stage::{GuestKind, Proto, need};
use crate::studies::named;
use crate::study::Studies;
use crate::study::Study;
use api::near::did_you_mean;

/// Name of the program measured, in this program's folder.
const PROGRAM: &str = "pvswitch";
/// Longest study that is started without `--full` or `--plan`, in seconds.
const LONG_S: f64 = 4.0 * 3600.0;
/// Overhead of each run beyond its study's: the probes before and after it.
const PROBE_S: f64 = 0.1;
/// Guests of a run whose study has no axis for their number.
const GUESTS_USUAL: f64 = 2.0;

/// `pvswitch lab run`, as on the command line.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Name of the study.
    pub study: String,
    /// The program measured; `pvswitch` beside this program if none is given.
    pub program: Option<PathBuf>,
    /// Its scale.
    pub scale: Scale,
    /// In place of the plan's repeats.
    pub repeats: Option<u32>,
    /// In place of the plan's seconds.
    pub seconds: Option<f64>,
    /// In place of the study's own plan.
    pub plan: Option<PathBuf>,
    /// `AXIS=V,V`, in place of the plan's values.
    pub only: Vec<String>,
    /// Protocol of guests: `virtio` or `xen`.
    pub proto: Option<String>,
    /// Kind of guests: `netns`, `uml` or `qemu`.
    pub guest: Option<String>,
    /// Folder of the unpacked kernel for guests in QEMU; by default the installed one.
    pub kernel: Option<PathBuf>,
    /// Folder of results; `pvswitch-lab-STUDY` if none is given.
    pub out: Option<PathBuf>,
    /// CPUs of the switch.
    pub switch_cpus: Vec<usize>,
    /// CPUs of guests.
    pub guest_cpus: Vec<usize>,
    /// Whether the exit status reports the judgement.
    pub judge: bool,
    /// Only print what would be measured.
    pub dry_run: bool,
    /// Print JSON.
    pub json: bool,
    /// The command line, to repeat the study.
    pub command: String,
}

/// A checked request.
pub struct Order {
    /// The study.
    pub study: &'static dyn Study,
    /// The program measured.
    pub program: PathBuf,
    /// Its matrix.
    pub plan: Plan,
    /// Folder of results.
    pub out: PathBuf,
    /// CPUs of the switch.
    pub switch_cpus: Vec<usize>,
    /// CPUs of guests.
    pub guest_cpus: Vec<usize>,
    /// Protocol of guests, unless it is an axis of the study.
    pub proto: Proto,
    /// Kind of guests.
    pub guest: GuestKind,
    /// Folder of the kernel for guests in QEMU.
    pub kernel: PathBuf,
    /// The command line.
    pub command: String,
}

/// Returns how long runs take, in seconds.
pub fn seconds(turns: &[Turn], plan: &Plan, study: &dyn Study, guest: GuestKind) -> f64 {
    let guests = |turn: &Turn| {
        let axis = turn.cell.0.iter().find(|(name, _)| name == "guests");
        axis.and_then(|(_, value)| value.parse().ok()).unwrap_or(GUESTS_USUAL)
    };
    let run = |turn: &Turn| {
        let boot_s = guest.boot_s() * guests(turn);
        plan.seconds + study.overhead_s(&turn.cell) + PROBE_S + boot_s
    };
    turns.iter().map(run).sum()
}

impl Order {
    /// Checks a request as far as possible without starting anything.
    pub fn of(ask: &Ask, studies: Studies) -> Result<Self, Error> {
        let study = named(&ask.study, studies)?;
        let mut plan = match &ask.plan {
            Some(path) => Plan::read(path)?,
            None => study.plan(ask.scale),
        };
        plan.check(study)?;
        for only in &ask.only {
            plan.restrict(study, only)?;
        }
        let mut proto = Proto::Virtio;
        if let Some(name) = &ask.proto {
            let known = name.parse().map_err(|what| Error::usage(format!("--proto: {what}")))?;
            let has_axis = plan.axes.iter().any(|axis| axis.name == "proto");
            if study.facts().takes_proto && !has_axis {
                proto = known;
            } else {
                let why = "the protocol of its guests is part of what it measures";
                set_axis(&mut plan, study, "proto", name, why)?;
            }
        }
        let guest = guest_kind(ask, &plan, proto)?;
        plan.repeats = ask.repeats.unwrap_or(plan.repeats);
        plan.seconds = ask.seconds.unwrap_or(plan.seconds);
        plan.check(study)?;
        let (switch_cpus, guest_cpus) = cpus(ask)?;
        let out = ask
            .out
            .clone()
            .unwrap_or_else(|| format!("pvswitch-lab-{}", study.facts().name).into());
        let kernel = kernel(ask, guest)?;
        let command = ask.command.clone();
        let program = match &ask.program {
            Some(program) => program.clone(),
            None => this_program()?.with_file_name(PROGRAM),
        };
        Ok(Self {
            study,
            program,
            plan,
            out,
            switch_cpus,
            guest_cpus,
            proto,
            guest,
            kernel,
            command,
        })
    }

    /// The runs that are missing from `there`.
    pub fn left(&self, there: &[Turn]) -> Vec<Turn> {
        self.plan.turns(self.study).into_iter().filter(|turn| !there.contains(turn)).collect()
    }

    /// How long the rest takes, in seconds.
    fn seconds(&self, turns: &[Turn]) -> f64 {
        seconds(turns, &self.plan, self.study, self.guest)
    }

    /// Rejects studies that take very long, unless requested explicitly.
    pub fn check_length(&self, ask: &Ask, there: &[Turn]) -> Result<(), Error> {
        let left = self.left(there);
        let takes = self.seconds(&left);
        if takes > LONG_S && ask.scale != Scale::Full && ask.plan.is_none() {
            return Err(Error::usage(format!(
                "{} runs would take about {}: use fewer values (--only AXIS=V), --repeats or \
                 --seconds; or --full or --plan, if intended. --dry-run lists all cells",
                left.len(),
                length(takes)
            )));
        }
        Ok(())
    }

    /// Checks that the program to measure exists.
    pub fn check_program(&self) -> Result<(), Error> {
        if access(&self.program, Access::EXEC_OK).is_ok() {
            return Ok(());
        }
        Err(Error::failed(format!(
            "no program {}: pvswitch-lab measures the pvswitch that is installed beside it; build \
             both: cargo build --release --bin pvswitch --bin pvswitch-lab",
            self.program.display()
        )))
    }

    /// Describes what would be measured.
    pub fn described(&self, there: &[Turn], as_json: bool) -> String {
        let (cells, left) = (self.plan.cells(self.study), self.left(there));
        let takes = self.seconds(&left);
        if as_json {
            let axes = |cell: &crate::plan::Cell| {
                let pairs = cell.0.iter().map(|(axis, value)| (axis.clone(), json!(value)));
                pairs.collect::<serde_json::Map<_, _>>()
            };
            let all = json!({"study": self.study.facts().name, "out": self.out, "plan": self.plan,
                "cells": cells.iter().map(axes).collect::<Vec<_>>(), "runs_done": there.len(),
                "runs_left": left.len(), "takes_s": takes.round(),
                "switch_cpus": self.switch_cpus, "guest_cpus": self.guest_cpus});
            return format!("{all:#}\n");
        }
        let mut text = String::new();
        for cell in &cells {
            let _ = writeln!(text, "{cell}");
        }
        text + &self.in_short(there) + "\n"
    }

    /// Summarizes cells, runs and time.
    pub fn in_short(&self, there: &[Turn]) -> String {
        let left = self.left(there);
        format!(
            "{}: {} cells, {} repeats of {} s{}: {} runs left to do, about {}; into {}",
            self.study.facts().name,
            self.plan.cells(self.study).len(),
            self.plan.repeats,
            self.plan.seconds,
            if self.plan.control { ", and a control" } else { "" },
            left.len(),
            length(self.seconds(&left)),
            self.out.display()
        )
    }

    /// Warns of missing tools: cells that need them are skipped.
    pub fn warn_of_missing_tools(&self) {
        for missing in self.study.facts().tools.iter().filter_map(|tool| need(tool).err()) {
            eprintln!("{missing}: cells that need it are skipped");
        }
    }

    /// Folders that must stay visible inside the namespaces.
    pub fn keep(&self) -> Result<Vec<PathBuf>, Error> {
        let absolute = |path: &PathBuf| std::path::absolute(path);
        let (out, kernel) = (absolute(&self.out), absolute(&self.kernel));
        let program = absolute(&self.program);
        let all = [out, kernel, program, std::env::current_dir(), std::env::current_exe()];
        let all: std::io::Result<Vec<PathBuf>> = all.into_iter().collect();
        all.map_err(|error| Error::failed(format!("the current folder: {error}")))
    }
}

/// Sets an axis to one value; the error for a study without the axis includes `why`.
fn set_axis(
    plan: &mut Plan,
    study: &dyn Study,
    axis: &str,
    value: &str,
    why: &str,
) -> Result<(), Error> {
    if plan.axes.iter().any(|known| known.name == axis) {
        return plan.restrict(study, &format!("{axis}={value}"));
    }
    let names: Vec<&str> = plan.axes.iter().map(|axis: &Axis| axis.name.as_str()).collect();
    Err(Error::usage(format!(
        "--{axis} {value}: {} has no axis '{axis}': {why}; it has {}",
        study.facts().name,
        names.join(", ")
    )))
}

/// The kind of guests, if it supports the protocol.
fn guest_kind(ask: &Ask, plan: &Plan, proto: Proto) -> Result<GuestKind, Error> {
    let Some(name) = &ask.guest else { return Ok(GuestKind::Netns) };
    let Ok(guest) = name.parse::<GuestKind>() else {
        let hint = did_you_mean(name, GuestKind::NAMES);
        let all = GuestKind::NAMES.join(", ");
        return Err(Error::usage(format!("--guest {name}{hint}: use one of {all}")));
    };
    let axis = plan.axes.iter().find(|axis| axis.name == "proto");
    let xen = proto == Proto::Xen
        || axis.is_some_and(|axis| axis.values.iter().any(|value| value == "xen"));
    if guest != GuestKind::Netns && xen {
        return Err(Error::usage(format!(
            "--guest {guest}: its driver supports virtio only, not xen: add --proto virtio"
        )));
    }
    Ok(guest)
}

/// The folder of the guests' kernel, if it can be chosen.
fn kernel(ask: &Ask, guest: GuestKind) -> Result<PathBuf, Error> {
    let Some(folder) = &ask.kernel else { return Ok("/".into()) };
    let bad = |why: String| Error::usage(format!("--kernel {}: {why}", folder.display()));
    if guest != GuestKind::Qemu {
        return Err(bad(format!("guests are {guest}: it is for --guest qemu")));
    }
    let folder = std::path::absolute(folder).map_err(|error| bad(error.to_string()))?;
    newest_kernel(&folder).map_err(|error| bad(error.to_string()))?;
    Ok(folder)
}

/// CPUs of switch and guests: by default the first and the second half of all.
fn cpus(ask: &Ask) -> Result<(Vec<usize>, Vec<usize>), Error> {
    let allowed = allowed_cpus();
    let half = allowed.len() / 2;
    let pick = |name: &str, given: &[usize], usual: &[usize]| {
        if let Some(cpu) = given.iter().find(|cpu| !allowed.contains(cpu)) {
            let known: Vec<String> = allowed.iter().map(ToString::to_string).collect();
            let what = format!("{name} {cpu}: no such CPU here: use {}", known.join(","));
            return Err(Error::usage(what));
        }
        Ok(if given.is_empty() { usual.to_vec() } else { given.to_vec() })
    };
    let (first, second) =
        if half == 0 { (&allowed[..], &allowed[..]) } else { allowed.split_at(half) };
    let switch = pick("--switch-cpus", &ask.switch_cpus, first)?;
    Ok((switch, pick("--guest-cpus", &ask.guest_cpus, second)?))
}
