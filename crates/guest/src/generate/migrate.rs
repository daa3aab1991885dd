//! A receiver that migrates between two ports again and again, as a virtual machine does.
//!
//! It takes the part of the hypervisor too, in Cloud Hypervisor's order of messages: while the
//! guest receives, its memory is copied page by page, then pages that the dirty log marks, with a
//! new log for each pass; the rings are disabled, the last pages copied, and the rings started at
//! the other port from the copy. A page that differs then and was not marked is *missed*: a
//! hypervisor would have lost it.

use std::net::Shutdown;
use std::path::Path;
use std::time::Duration;

use serde_json::json;
use shm::{Mapping, Seg};
use switch::time::Ns;

use super::frame::is_whole;
use super::{HEADERS, head_of};
use crate::error::Error;
use crate::guest::now;
use crate::ring::HDR_LEN;
use crate::vm::{Vm, marked};

/// Passes over marked pages while the guest runs.
const PASSES: u32 = 3;
/// Longest sleep.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// Options of a migrating receiver.
#[derive(Clone, Debug)]
pub struct Migrate {
    /// Sockets of its two ports.
    pub targets: [String; 2],
    /// Its MAC address, announced at each start.
    pub mac: [u8; 6],
    /// Frames between two migrations, and received in each pass.
    pub every: u64,
    /// Compare each frame with its number.
    pub check: bool,
    /// Migrations; `None`: unlimited.
    pub migrations: Option<u64>,
    /// Duration; `None`: until `running` returns false.
    pub duration: Option<Duration>,
    /// Interval of reports.
    pub interval: Option<Duration>,
    /// Print totals as JSON.
    pub json: bool,
}

/// Counts of a run.
#[derive(Default)]
struct Totals {
    received: u64,
    corrupt: u64,
    migrations: u64,
    copied: usize,
    missed: usize,
    late: usize,
}

impl Totals {
    fn add(&mut self, frame: Seg<'_>, check: bool) {
        let (head, ours) = head_of(&[frame]);
        let seq = u64::from_le_bytes(std::array::from_fn(|i| head[HDR_LEN + HEADERS + 2 + i]));
        self.received += u64::from(ours);
        self.corrupt += u64::from(check && ours && !is_whole(&[frame], HDR_LEN, seq));
    }

    fn print(&self, json: bool) {
        let Self { received, corrupt, migrations, copied, missed, late } = self;
        let value = json!({
            "mode": "migrate",
            "received_frames": received,
            "corrupt_frames": corrupt,
            "migrations": migrations,
            "copied_pages": copied,
            "missed_pages": missed,
            "late_pages": late,
        });
        match json {
            true => println!("{value}"),
            false => println!(
                "{migrations} migrations, {received} frames received, {corrupt} corrupt; pages \
                 written and not marked: {missed}, written after the stop: {late}"
            ),
        }
    }
}

/// Receives, and migrates after each `every` frames, until `running` returns false.
///
/// # Errors
/// A port cannot be connected to, or ends the connection, or refuses a request.
pub fn run(options: &Migrate, running: &dyn Fn() -> bool) -> Result<(), Error> {
    let (started, mut totals) = (now(), Totals::default());
    let end = options.duration.map(|duration| started + Ns::from(duration));
    let mut due = options.interval.map(|interval| started + Ns::from(interval));
    let mut at = Vm::connect(Path::new(&options.targets[0]))?;
    at.post();
    at.start()?;
    at.announce(options.mac)?;
    if !options.json {
        eprintln!("connected to {}", options.targets[0]);
    }
    let mut migration: Option<Migration> = None;
    let mut until = options.every;
    while running() && end.is_none_or(|end| now() < end) {
        at.receive(|frame| totals.add(frame, options.check))?;
        if due.is_some_and(|due| now() >= due) {
            totals.print(options.json);
            due = options.interval.map(|interval| now() + Ns::from(interval));
        }
        if options.migrations.is_some_and(|most| totals.migrations >= most) {
            break;
        }
        if totals.received < until {
            at.wait(SLEEP_MAX)?;
            continue;
        }
        until = totals.received + options.every;
        match migration.take() {
            None => {
                let to = (totals.migrations + 1) % 2;
                let to = Vm::connect(Path::new(&options.targets[to as usize]))?;
                migration = Some(Migration::begin(&at, to, &mut totals)?);
            }
            Some(mut under_way) if under_way.passes < PASSES => {
                under_way.pass(&at, &mut totals)?;
                migration = Some(under_way);
            }
            Some(under_way) => {
                at = under_way.end(at, &mut totals)?;
                at.start()?;
                at.announce(options.mac)?;
                totals.migrations += 1;
            }
        }
    }
    totals.print(options.json);
    Ok(())
}

/// Copies of memory so far.
struct Migration {
    to: Vm,
    log: Mapping,
    passes: u32,
}

impl Migration {
    fn begin(from: &Vm, to: Vm, totals: &mut Totals) -> Result<Self, Error> {
        let log = from.new_log()?;
        from.log(true)?;
        totals.copied += from.copy_all(&to);
        Ok(Self { to, log, passes: 0 })
    }

    /// Copies the pages marked since the last pass.
    fn pass(&mut self, from: &Vm, totals: &mut Totals) -> Result<(), Error> {
        let log = std::mem::replace(&mut self.log, from.new_log()?);
        totals.copied += from.copy_marked(&log, &self.to);
        self.passes += 1;
        Ok(())
    }

    /// Stops the guest, and returns it as it is at its new place, not yet started there.
    fn end(mut self, from: Vm, totals: &mut Totals) -> Result<Vm, Error> {
        from.enable(false)?;
        self.pass(&from, totals)?;
        // Nothing may be written after the stop: that is in the last log, too late for the copy.
        let late = Vec::from_iter(marked(&self.log));
        let differ = from.differences(&self.to);
        let missed = differ.iter().filter(|page| !late.contains(page));
        totals.missed += missed.count();
        totals.late += late.len();
        from.copy_all(&self.to);
        self.to.restore(&from);
        from.front.shutdown(Shutdown::Both)?;
        Ok(self.to)
    }
}
