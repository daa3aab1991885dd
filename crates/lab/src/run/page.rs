//! The report of results: the study's tables and plots, machine and method.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::{beside, power};
use crate::error::Error;
use crate::machine::{Machine, list};
use crate::report::{self, Conclusion, Document, Part, Verdict, Warning};
use crate::stats::Summary;
use crate::store::Results;
use crate::study::Study;

/// Writes the page and its plots into a folder; several results, with one of `names` each, are
/// compared and joined on one page.
pub fn write(
    folder: &Path,
    names: &[String],
    all: &[Results],
    study: &dyn Study,
) -> Result<PathBuf, Error> {
    write_document(folder, &document(names, all, study))
}

/// Writes a page and its plots into a folder.
pub fn write_document(folder: &Path, document: &Document) -> Result<PathBuf, Error> {
    report::write(folder, document).map_err(|error| Error::failed(error.to_string()))
}

/// Makes the report of results, without writing it.
pub fn document(names: &[String], all: &[Results], study: &dyn Study) -> Document {
    let mut document = Document {
        title: study.facts().name.into(),
        question: study.facts().about.into(),
        original: study.facts().original,
        ..Document::default()
    };
    let several = all.len() > 1;
    if several {
        document.conclusions.extend(beside::concluded(names, all, study));
        document.parts.extend(beside::parts(names, all, study));
        document.parts.extend(study.facts().together.map(|parts| parts(all)).unwrap_or_default());
    }
    for (i, results) in all.iter().enumerate() {
        let which = match names.get(i) {
            Some(name) if several => format!("{name}: "),
            _ => String::new(),
        };
        let named = |pairs: Vec<(String, String)>| {
            pairs
                .into_iter()
                .map(|(name, value)| (format!("{which}{name}"), value))
                .collect::<Vec<_>>()
        };
        document.machine.extend(named(machine(&results.machine)));
        document.method.extend(named(method(results, study)));
        let cell = |what: String| match what.as_str() {
            "" => which.trim_end_matches([':', ' ']).to_string(),
            _ => format!("{which}{what}"),
        };
        let warnings = warnings(results, study).into_iter();
        document.warnings.extend(warnings.map(|w| Warning { what: cell(w.what), ..w }));
        let found = power::conclusions(results, study).into_iter();
        let found = found.map(|c| Conclusion { what: format!("{which}{}", c.what), ..c });
        document.conclusions.extend(found);
        let verdicts = study.judge(results).into_iter();
        let verdicts = verdicts.map(|v| Verdict { what: format!("{which}{}", v.what), ..v });
        document.verdicts.extend(verdicts);
        if several {
            document.parts.push(Part::Text {
                title: format!("Machine {}: {}", i + 1, names[i]),
                body: format!("{}, {} CPUs", results.machine.cpu, results.machine.cpus),
            });
        } else {
            document.command = repeat("", results, study);
        }
        document.parts.extend(parts(i, results, study, several));
    }
    document
}

/// Tables and plots of the results with index `i`, with the commands that repeat them.
fn parts(i: usize, results: &Results, study: &dyn Study, several: bool) -> Vec<Part> {
    let mut parts = Vec::from_iter(power::claims(results, study));
    parts.extend(study.report(results));
    parts.extend(power::comparisons(results, study));
    for part in &mut parts {
        let command = match part {
            Part::Table(table) => &mut table.command,
            Part::Plot(plot) => &mut plot.command,
            Part::Text { .. } => continue,
        };
        // The plans of several folders are not beside the page.
        let all = format!("pvswitch lab run {}", study.facts().name);
        *command = match command.strip_prefix(&all) {
            Some(_) if several => String::new(),
            Some(only) => repeat(only, results, study),
            None => command.clone(),
        };
        // Names of files are unique within one set of results only.
        if let (Part::Plot(plot), 1..) = (part, i) {
            plot.file = format!("{}-{}", plot.file, i + 1);
        }
    }
    parts
}

/// Command that repeats these results, or those that `only` selects, in their folder: with their
/// plan, and into a new folder, since their own would be resumed.
fn repeat(only: &str, results: &Results, study: &dyn Study) -> String {
    if results.plan.rig.is_some() {
        return results.command.clone();
    }
    let Machine { proto, guest, .. } = &results.machine;
    let has_axis = results.plan.axes.iter().any(|axis| axis.name == "proto");
    let proto = match study.facts().takes_proto && !has_axis && !proto.is_empty() {
        true => format!(" --proto {proto}"),
        false => String::new(),
    };
    let guest = match guest.as_str() {
        "" | "netns" => String::new(),
        guest => format!(" --guest {guest}"),
    };
    format!(
        "pvswitch lab run {} --plan plan.toml{only}{proto}{guest} --out again",
        study.facts().name
    )
}

fn machine(machine: &Machine) -> Vec<(String, String)> {
    let mut rows = vec![
        ("commit".to_string(), machine.built.commit.clone()),
        ("build".into(), machine.built.how.clone()),
        ("CPU".into(), machine.cpu.clone()),
        ("CPUs".into(), machine.cpus.to_string()),
        ("switch on CPU".into(), list(&machine.switch_cpus)),
        ("guests on CPU".into(), list(&machine.guest_cpus)),
        ("kernel".into(), machine.kernel.clone()),
        ("hypervisor".into(), machine.hypervisor.clone()),
        ("governor".into(), machine.governor.clone()),
        ("huge pages".into(), huge_pages(machine)),
        ("transparent huge pages".into(), machine.transparent_huge_pages.clone()),
    ];
    let digests = machine.built.sha256.iter();
    rows.extend(digests.map(|(name, digest)| (format!("SHA-256 of {name}"), digest.clone())));
    let versions = machine.versions.iter();
    rows.extend(versions.map(|(tool, version)| (format!("version of {tool}"), version.clone())));
    for (kind, lists) in &machine.features {
        rows.extend(lists.iter().map(|list| (format!("{kind} negotiated"), list.clone())));
    }
    for (name, commands) in &machine.rivals {
        rows.extend(commands.iter().map(|command| (format!("{name} was run as"), command.clone())));
    }
    let against = machine.mitigations.iter().filter(|(_, state)| *state != "Not affected");
    rows.extend(against.map(|(what, state)| (format!("against {what}"), state.clone())));
    rows.retain(|(_, value)| !value.is_empty());
    rows
}

/// Huge pages of the default size; results of older versions say only how many were free.
fn huge_pages(machine: &Machine) -> String {
    let free = machine.huge_pages_free;
    match (machine.huge_page_kib, machine.huge_pages_total) {
        (0, _) => format!("{free} free"),
        (kib, total) => format!("{free} free of {total}, {kib} KiB each"),
    }
}

fn method(results: &Results, study: &dyn Study) -> Vec<(String, String)> {
    let plan = &results.plan;
    let last = plan.axes.last().map_or("", |axis| &axis.name);
    let mut rows = vec![
        ("cells".to_string(), plan.cells(study).len().to_string()),
        ("repeats".into(), plan.repeats.to_string()),
        ("seconds of each run".into(), plan.seconds.to_string()),
        ("runs".into(), format!("{} of {}", results.runs.len(), plan.turns(study).len())),
        ("side by side".into(), format!("values of {last}, forwards and backwards in turn")),
        ("command".into(), results.command.clone()),
    ];
    if let Some(of) = Results::distances(results.runs.iter()) {
        let ns = format!(
            "{:.0} ns round trip, {:.0} to {:.0}; a covariate: no run is left out for it",
            of.median, of.low, of.high
        );
        rows.push(("distance of the CPUs".into(), ns));
    }
    let others = results.runs.iter().map(|run| run.others_percent).collect::<Vec<_>>();
    if let Some(of) = Summary::of(&others) {
        let percent = format!(
            "{:.0} % of a CPU, {:.0} to {:.0}; no run is left out for it",
            of.median, of.low, of.high
        );
        rows.push(("other programs used".into(), percent));
    }
    let repeated = results.void.iter().filter(|void| void.repeated).count();
    rows.push((
        "void".into(),
        format!(
            "{} attempts without a result, {repeated} of them repeated; runs.csv has the reasons",
            results.void.len()
        ),
    ));
    rows.push((
        "statistics".into(),
        "ratios: medians of pairs, two runs of one round, with 95 % bootstrap intervals; tests: \
         Wilcoxon's signed ranks, no change by two one-sided tests, corrected by Holm's method"
            .into(),
    ));
    rows
}

fn warnings(results: &Results, study: &dyn Study) -> Vec<Warning> {
    let warning = |what: String, why: &str| Warning { what, why: why.into() };
    let has: BTreeSet<_> = results.cells().into_iter().collect();
    let mut rows = Vec::new();
    for cell in results.plan.cells(study) {
        if !has.contains(&cell) {
            rows.push(warning(cell.to_string(), "not measured"));
        }
    }
    for cell in has.iter().filter(|_| results.plan.repeats > 1) {
        if results.runs.iter().filter(|run| run.cell == **cell).count() == 1 {
            rows.push(warning(cell.to_string(), "n = 1: of a single run, without spread"));
        }
    }
    if results.plan.repeats == 1 && !has.is_empty() {
        let why = "each cell was measured once: there is no spread, and a difference may be chance";
        rows.push(warning(String::new(), why));
    }
    let void = results.void.iter().filter(|void| !void.repeated);
    rows.extend(void.map(|void| warning(void.turn.cell.to_string(), &void.why)));
    let unique: BTreeSet<Warning> = rows.drain(..).collect();
    unique.into_iter().collect()
}
