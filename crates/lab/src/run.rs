//! Commands of `pvswitch lab`: list, run, report, index.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{ErrorKind, IsTerminal, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

mod beside;
mod import;
mod measure;
mod order;
mod page;
mod power;
mod progress;

pub use import::import;
pub use measure::{Ended, measure};
pub use order::{Ask, Order};
use serde_json::json;

use crate::error::Error;
use crate::hugepages::Reserved;
use crate::isolate::{self, Inside, Side};
use crate::plan::Scale;
use crate::report::{Entry, Verdict, write_index};
use crate::stage::{GuestKind, Stage};
use crate::store::{self, Results};
use crate::studies::of as study_of;
use crate::study::Studies;
use crate::study::Study;

/// Writes to standard output. A broken pipe ends the process with success.
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        let closed = error.kind() == ErrorKind::BrokenPipe;
        std::process::exit(i32::from(!closed));
    }
}

/// Lists all studies with their questions; as JSON, with axes and measures.
pub fn list(studies: Studies, as_json: bool) -> String {
    if as_json {
        let studies: Vec<_> = studies.iter().map(|study| described(*study)).collect();
        return serde_json::to_string_pretty(&studies).unwrap_or_default() + "\n";
    }
    let mut text = String::new();
    for study in studies {
        let _ = writeln!(text, "{:<12}{}", study.facts().name, study.facts().about);
        if let Some(original) = study.facts().original {
            let _ = writeln!(text, "{:<12}after {}", "", original.source);
        }
        let lengths = [Scale::Smallest, Scale::Quick, Scale::Usual, Scale::Full].map(|scale| {
            let plan = study.plan(scale);
            let length = progress::length(order::seconds(
                &plan.turns(*study),
                &plan,
                *study,
                GuestKind::Netns,
            ));
            format!("{} {length}", name_of(scale))
        });
        let _ = writeln!(text, "{:<12}{}", "", lengths.join(", "));
    }
    text
}

fn name_of(scale: Scale) -> &'static str {
    match scale {
        Scale::Smallest => "--smallest",
        Scale::Quick => "--quick",
        Scale::Usual => "default",
        Scale::Full => "--full",
    }
}

fn described(study: &dyn Study) -> serde_json::Value {
    let measures =
        study.facts().measures.iter().map(
            |measure| json!({"name": measure.name, "unit": measure.unit, "about": measure.about}),
        );
    let scales = [Scale::Smallest, Scale::Quick, Scale::Usual, Scale::Full].map(|scale| {
        let plan = study.plan(scale);
        let turns = plan.turns(study);
        let name = format!("{scale:?}").to_lowercase();
        let takes_s = order::seconds(&turns, &plan, study, GuestKind::Netns).round();
        json!({"scale": name, "repeats": plan.repeats, "seconds": plan.seconds, "axes": plan.axes,
            "runs": turns.len(), "takes_s": takes_s})
    });
    let original = study
        .facts()
        .original
        .map(|original| json!({"source": original.source, "claim": original.claim}));
    let (name, about) = (study.facts().name, study.facts().about);
    json!({"name": name, "about": about, "seed": original, "scales": scales,
        "measures": measures.collect::<Vec<_>>()})
}

/// Runs a study; returns the exit status.
pub fn run(ask: &Ask, studies: Studies) -> Result<u8, Error> {
    let side = isolate::side()?;
    let order = Order::of(ask, studies)?;
    let there = store::existing_runs(&order.out, &order.plan, order.study)?;
    if ask.dry_run {
        print(&order.described(&there, ask.json));
        return Ok(0);
    }
    order.check_length(ask, &there)?;
    order.check_program()?;
    match side {
        Side::Outside(outside) => {
            eprintln!("{}", order.in_short(&there));
            order.warn_of_missing_tools();
            // Here, as nothing can be restored inside, which may be killed.
            let _reserved = Reserved::free(order.study.huge_mib(&order.plan));
            outside.run(&order.keep()?)
        }
        Side::Inside => inside(ask, &order),
    }
}

/// Runs a study inside its namespaces.
fn inside(ask: &Ask, order: &Order) -> Result<u8, Error> {
    let here = Inside::settle()?;
    let stage = stage(order)?;
    let ended = measure(order, &Arc::new(stage), &here.stop, &here.everyone())?;
    if ask.json {
        print(&format!("{:#}\n", ended.summary));
    }
    let mut status = u8::from(ended.done == 0);
    if ask.judge {
        for Verdict { what, holds } in &ended.verdicts {
            let said = match holds {
                Some(true) => "holds",
                Some(false) => "DOES NOT HOLD",
                None => "not judged",
            };
            eprintln!("{said}: {what}");
        }
        if ended.verdicts.is_empty() {
            eprintln!("--assert: nothing could be judged");
        }
        let all = ended.verdicts.iter().all(|verdict| verdict.holds != Some(false));
        if !all || ended.verdicts.is_empty() || ended.failed > 0 {
            status = 1;
        }
    }
    if let Some(signal) = here.stop.asked() {
        status = 128 | u8::try_from(signal).unwrap_or(0);
    }
    Ok(status)
}

/// The environment of all runs. They use copies of the programs, so that a build in the meantime
/// does not change what is measured.
fn stage(order: &Order) -> Result<Stage, Error> {
    let copy = |from: &Path, name: &str| {
        let to = std::env::temp_dir().join(name);
        match std::fs::copy(from, &to) {
            Ok(_) => Ok(to),
            Err(error) => Err(Error::failed(format!("copying {}: {error}", from.display()))),
        }
    };
    let program = copy(&order.program, "pvswitch")?;
    let mut stage = Stage::new(&program, &order.switch_cpus, &order.guest_cpus, order.proto)
        .map_err(|error| Error::failed(error.to_string()))?;
    stage.agent = copy(&this_program()?, "pvswitch-lab")?;
    stage.guest = order.guest;
    stage.kernel.clone_from(&order.kernel);
    stage.results.clone_from(&order.out);
    Ok(stage)
}

/// Writes the report of results of one study: of a single folder into that, with its summary; of
/// several, compared with the first, into `out`, and nothing into theirs. Returns the page.
pub fn show(folders: &[PathBuf], out: Option<PathBuf>, studies: Studies) -> Result<PathBuf, Error> {
    let Some(first) = folders.first() else {
        return Err(Error::usage("report: give a folder of results"));
    };
    let plan = store::plan_of(first)?;
    let study = study_of(&plan, studies)?;
    let several = folders.len() > 1;
    let into = match out {
        Some(out) => out,
        None if several => format!("pvswitch-lab-{}-all", study.facts().name).into(),
        None => first.clone(),
    };
    if several && store::has_plan(&into) {
        let what = "a folder of results, whose own report would be lost; use another --out";
        return Err(Error::usage(format!("report: --out {}: {what}", into.display())));
    }
    let mut all = Vec::new();
    for folder in folders {
        let plan = store::plan_of(folder)?;
        if plan.study != study.facts().name {
            let (at, name) = (folder.display(), study.facts().name);
            return Err(Error::usage(format!("{at}: results of {}, not of {name}", plan.study)));
        }
        plan.check(study)?;
        let results = Results::read(folder, plan, study, &mut |line| eprintln!("{line}"))?;
        if !several {
            store::write_summary(folder, &store::summary::of(&results, study))?;
        }
        all.push(results);
    }
    page::write(&into, &names_of(folders)?, &all, study)
}

/// Writes the report of each folder of results in `folder` into a folder of its name in `out`, and
/// an index page of them; nothing into theirs. Returns the page.
pub fn index(folder: &Path, out: &Path, studies: Studies) -> Result<PathBuf, Error> {
    let failed = |error| Error::failed(format!("{}: {error}", folder.display()));
    let entries = std::fs::read_dir(folder).map_err(failed)?;
    let mut folders: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    folders.retain(|path| store::has_plan(path));
    folders.sort();
    if folders.is_empty() {
        let what = "no folder of results in it: give the folder that they are in";
        return Err(Error::usage(format!("index: {}: {what}", folder.display())));
    }
    if store::has_plan(out) || out.canonicalize().ok() == folder.canonicalize().ok() {
        let what = "a folder of results, whose own reports would be lost; use another --out";
        return Err(Error::usage(format!("index: --out {}: {what}", out.display())));
    }
    let mut reports = Vec::new();
    for path in folders {
        let plan = store::plan_of(&path)?;
        let study = study_of(&plan, studies)?;
        let results = Results::read(&path, plan, study, &mut |line| eprintln!("{line}"))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let document = page::document(&[], std::slice::from_ref(&results), study);
        page::write_document(&out.join(&name), &document)?;
        reports.push(Entry { folder: name, document });
    }
    write_index(out, &reports).map_err(|error| Error::failed(error.to_string()))
}

/// Names of folders: their last parts, or their paths where those are not unique.
fn names_of(folders: &[PathBuf]) -> Result<Vec<String>, Error> {
    let whole: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
    let canonical = |folder: &PathBuf| folder.canonicalize().unwrap_or_else(|_| folder.clone());
    for (i, folder) in folders.iter().enumerate() {
        if folders[..i].iter().any(|other| canonical(other) == canonical(folder)) {
            return Err(Error::usage(format!("report: {} is given twice", whole[i])));
        }
    }
    let last =
        folders.iter().map(|folder| Some(folder.file_name()?.to_string_lossy().into_owned()));
    let last: Option<Vec<String>> = last.collect();
    let unique = last.filter(|last| last.iter().collect::<BTreeSet<_>>().len() == last.len());
    Ok(unique.unwrap_or(whole))
}

/// Path of this program.
fn this_program() -> Result<PathBuf, Error> {
    std::env::current_exe().map_err(|error| Error::failed(format!("/proc/self/exe: {error}")))
}

/// Whether standard error is a terminal.
fn on_terminal() -> bool {
    std::io::stderr().is_terminal()
}
