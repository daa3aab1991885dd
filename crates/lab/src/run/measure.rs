//! The runs of a plan, one after the other.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use serde_json::Value;

use super::order::{Order, seconds};
use super::progress::Progress;
use super::{on_terminal, page};
use crate::distance;
use crate::error::Error;
use crate::error::Fail;
use crate::isolate::Stop;
use crate::machine::{Machine, Others};
use crate::plan::{Cell, Turn};
use crate::provenance::Built;
use crate::report::Verdict;
use crate::stage::{GuestKind, Stage};
use crate::store::{Done, Folder, Results, summary, write_summary};
use crate::study::{Run, Study};

/// Interval of checks of a running measurement.
const TICK: Duration = Duration::from_millis(100);
/// Figures shown of each run; all are in the file.
const SHOWN: usize = 3;

/// CPU time of other programs, in per cent of one CPU, that is worth a remark while measuring.
const OTHERS_SHOWN: f64 = 25.0;

/// Result of a study.
#[derive(Debug, Default)]
pub struct Ended {
    /// Finished runs, including earlier ones.
    pub done: usize,
    /// Runs that failed this time.
    pub failed: usize,
    /// Runs skipped because something is missing.
    pub skipped: usize,
    /// `summary.json`.
    pub summary: Value,
    /// Results of the expectations.
    pub verdicts: Vec<Verdict>,
}

/// Makes all missing runs, until a stop is requested; writes summary and report of all results.
/// `proc` shows the processes of all users.
pub fn measure(
    order: &Order,
    stage: &Arc<Stage>,
    stop: &Stop,
    proc: &Path,
) -> Result<Ended, Error> {
    let (study, plan) = (order.study, &order.plan);
    let programs = [stage.program.as_path(), stage.agent.as_path()];
    let machine = Machine {
        command: order.command.clone(),
        proto: format!("{:?}", order.proto).to_lowercase(),
        guest: order.guest.to_string(),
        built: Built::of(&order.program, &programs),
        ..Machine::here(study.facts().tools, &order.switch_cpus, &order.guest_cpus)
    };
    let say = &mut |line: String| eprintln!("{line}");
    let (mut folder, there) = Folder::open(&order.out, plan, study, &machine, say)?;
    let left = order.left(&there);
    let mut progress =
        Progress::new(left.len(), seconds(&left, plan, study, order.guest), on_terminal());
    let pair = order.switch_cpus.first().zip(order.guest_cpus.last()).map(|(a, b)| (*a, *b));
    let probe = Probe::new(pair, proc, &progress);
    let count = plan.turns(study).len();
    if !there.is_empty() {
        progress.say(&format!(
            "{}: resuming, {} of {count} runs are done",
            order.out.display(),
            there.len()
        ));
    }
    let mut session = Session {
        ended: Ended::default(),
        missing: Vec::new(),
        reasons: HashSet::new(),
        over: None,
    };
    for turn in &left {
        if stop.asked().is_some() || session.over.is_some() {
            break;
        }
        let expected = seconds(std::slice::from_ref(turn), plan, study, order.guest);
        let again = if turn.again { " again" } else { "" };
        progress.begin(format!("{} repeat {}{again}", turn.cell, turn.repeat + 1), expected);
        if let Some((_, why)) = session.missing.iter().find(|(cell, _)| *cell == turn.cell) {
            session.ended.skipped += 1;
            folder.add(turn, &Err(why.clone()))?;
            progress.pass();
            continue;
        }
        let run = start(study, turn, plan.seconds, stage, probe.clone());
        match wait(&run, &progress, stop)? {
            Some(outcome) => session.note(turn, outcome, &mut folder, &mut progress, study)?,
            None => break,
        }
    }
    progress.finish();
    folder.add_seen(stage.features(), stage.rivals())?;
    let ended = session.close(order, stop, count);
    // Holds the lock until everything is written.
    drop(folder);
    ended
}

/// Result of one run.
type Outcome = Result<Done, Fail>;

/// Starts a run in its own thread, which is abandoned if a stop is requested.
fn start(
    study: &'static dyn Study,
    turn: &Turn,
    seconds: f64,
    stage: &Arc<Stage>,
    probe: Probe,
) -> mpsc::Receiver<Outcome> {
    let (sender, receiver) = mpsc::channel();
    let (turn, stage) = (turn.clone(), Arc::clone(stage));
    std::thread::spawn(move || {
        let before = probe.ns();
        let others = Others::sample(&probe.proc);
        let machines = stage.machines();
        let mut outcome = study.run(&Run { cell: &turn.cell, seconds, stage: &stage });
        if outcome.is_ok() && stage.guest != GuestKind::Netns && stage.machines() == machines {
            outcome = Err(Fail::Cell(format!(
                "--guest {}: no guest of this cell has a kernel's network stack: no effect",
                stage.guest
            )));
        }
        let others_percent = others.percent(&probe.proc);
        let done = outcome.map(|figures| Done {
            cell: turn.cell,
            repeat: turn.repeat,
            distance_ns: before.max(probe.ns()),
            others_percent,
            // Figures that are not finite are unknown.
            figures: figures
                .into_iter()
                .filter(|(_, value)| value.is_finite())
                .map(|(name, value)| (name.to_string(), value))
                .collect(),
        });
        let _ = sender.send(done);
    });
    receiver
}

/// Waits for a run; `None`: a stop was requested first.
fn wait(
    run: &mpsc::Receiver<Outcome>,
    progress: &Progress,
    stop: &Stop,
) -> Result<Option<Outcome>, Error> {
    loop {
        match run.recv_timeout(TICK) {
            Ok(outcome) => return Ok(Some(outcome)),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::failed("the study panicked; finished runs are kept"));
            }
            Err(RecvTimeoutError::Timeout) if stop.asked().is_some() => return Ok(None),
            Err(RecvTimeoutError::Timeout) => progress.tick(),
        }
    }
}

/// State of a running study.
struct Session {
    ended: Ended,
    /// Cells that need something that is missing here, and what.
    missing: Vec<(Cell, String)>,
    /// The reasons already reported.
    reasons: HashSet<String>,
    /// Why no further cell can be measured.
    over: Option<String>,
}

impl Session {
    fn note(
        &mut self,
        turn: &Turn,
        outcome: Outcome,
        folder: &mut Folder,
        progress: &mut Progress,
        study: &dyn Study,
    ) -> Result<(), Error> {
        match outcome {
            Ok(done) => {
                let line = shown(&done, study);
                folder.add(turn, &Ok(done))?;
                progress.end(&line);
            }
            Err(Fail::Missing(why)) => {
                let why = one_line(&why);
                folder.add(turn, &Err(why.clone()))?;
                self.missing.push((turn.cell.clone(), why.clone()));
                self.ended.skipped += 1;
                // One line per reason: it is the same for most cells.
                if self.reasons.contains(&why) {
                    progress.pass();
                } else {
                    progress.end(&format!("skipped: {why}"));
                    self.reasons.insert(why);
                }
            }
            Err(Fail::Cell(why)) => {
                self.ended.failed += 1;
                folder.add(turn, &Err(one_line(&why)))?;
                progress.end(&format!("FAILED: {}", one_line(&why)));
            }
            Err(Fail::Over(why)) => {
                folder.add(turn, &Err(one_line(&why)))?;
                progress.end(&format!("FAILED: {}", one_line(&why)));
                self.over = Some(why);
            }
        }
        Ok(())
    }

    /// Writes all results.
    fn close(mut self, order: &Order, stop: &Stop, count: usize) -> Result<Ended, Error> {
        let say = &mut |line: String| eprintln!("{line}");
        let results = Results::read(&order.out, order.plan.clone(), order.study, say)?;
        let done = results.runs.len();
        let ended = &mut self.ended;
        ended.done = done;
        if done > 0 {
            ended.summary = summary::of(&results, order.study);
            ended.verdicts = order.study.judge(&results);
            write_summary(&order.out, &ended.summary)?;
            let page = page::write(&order.out, &[], std::slice::from_ref(&results), order.study)?;
            eprintln!("report: {}", page.display());
        }
        if ended.failed > 0 {
            eprintln!(
                "{} runs failed, see column 'void' of runs.csv; the same command retries them",
                ended.failed
            );
        }
        if ended.skipped > 0 {
            eprintln!("{} runs skipped: they need something that is missing here", ended.skipped);
        }
        if let Some(why) = self.over {
            return Err(Error::Failed(format!(
                "{why}\n{done} of {count} runs done; the same command resumes"
            )));
        }
        if stop.asked().is_some() {
            eprintln!("interrupted: {done} of {count} runs done; the same command resumes");
        }
        Ok(self.ended)
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The first figures of a run.
fn shown(done: &Done, study: &dyn Study) -> String {
    let figures = study.facts().measures.iter().filter_map(|measure| {
        let value = done.figures.get(measure.name)?;
        let digits = if value.abs() >= 100.0 { 0 } else { 2 };
        let unit = if measure.unit.is_empty() { measure.name } else { measure.unit };
        Some(format!("{value:.digits$} {unit}"))
    });
    let mut text = figures.take(SHOWN).collect::<Vec<_>>().join(", ");
    if done.others_percent > OTHERS_SHOWN {
        text += &format!(" (other programs used {:.0} % of a CPU)", done.others_percent);
    }
    text
}

/// Checks of the machine before and after each run.
#[derive(Clone)]
struct Probe {
    /// A CPU of the switch and one of the guests.
    pair: Option<(usize, usize)>,
    proc: PathBuf,
}

impl Probe {
    fn new(pair: Option<(usize, usize)>, proc: &Path, progress: &Progress) -> Self {
        let distance_ns = pair.and_then(|(a, b)| distance::between(a, b));
        if distance_ns.is_none() {
            progress.say("the distance of the CPUs is unknown: switch and guests share one");
        }
        Self { pair: pair.filter(|_| distance_ns.is_some()), proc: proc.into() }
    }

    /// The distance now, in ns; 0: unknown.
    fn ns(&self) -> f64 {
        self.pair.and_then(|(a, b)| distance::between(a, b)).unwrap_or(0.0)
    }
}
