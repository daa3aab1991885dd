//! Lines of text with colours; a live terminal and `--once` show the same ones.

mod detail;

use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

pub use self::detail::detail;
use super::sample::{Picture, Port, Queue, Worker};
use super::table::{self, Cell, Column, cut, number, word};
use super::trend::Trends;
use crate::demo::format::{percent, si, time_ns};

const HEAD: Style = Style::new().add_modifier(Modifier::BOLD);
const FAINT: Style = Style::new().add_modifier(Modifier::DIM);
const PLAIN: Style = Style::new();
const BAD: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
const WARN: Style = Style::new().fg(Color::Yellow);
const GOOD: Style = Style::new().fg(Color::Green);
const BUSY: Style = Style::new().fg(Color::Cyan);
/// Share of a CPU from which a worker is near its limit.
const NEAR_LIMIT: f64 = 0.9;

/// Sort key of the list of ports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sort {
    /// In the order in which they were added.
    #[default]
    Added,
    Name,
    In,
    Out,
    Drops,
}

impl Sort {
    const ALL: [Self; 5] = [Self::Added, Self::Name, Self::In, Self::Out, Self::Drops];

    pub fn next(self) -> Self {
        let at = Self::ALL.iter().position(|sort| *sort == self).unwrap_or(0);
        Self::ALL[(at + 1) % Self::ALL.len()]
    }

    /// Name in the footer.
    pub fn name(self) -> &'static str {
        match self {
            Self::Added => "as added",
            Self::Name => "name",
            Self::In => "frames in",
            Self::Out => "frames out",
            Self::Drops => "drops",
        }
    }

    pub fn apply(self, ports: &mut [Port]) {
        let most = |key: &dyn Fn(&Port) -> Option<f64>, a: &Port, b: &Port| {
            key(b).unwrap_or(0.0).total_cmp(&key(a).unwrap_or(0.0))
        };
        match self {
            Self::Added => {}
            Self::Name => ports.sort_by(|a, b| a.name.cmp(&b.name)),
            Self::In => ports.sort_by(|a, b| most(&|p| p.in_frames, a, b)),
            Self::Out => ports.sort_by(|a, b| most(&|p| p.out_frames, a, b)),
            Self::Drops => ports.sort_by(|a, b| most(&Port::drop_rate, a, b)),
        }
    }
}

// ---- cells ----

fn cell(text: impl Into<String>) -> Cell {
    (text.into(), PLAIN)
}

/// A number without a space before its prefix; 0 is faint.
fn amount(n: Option<f64>) -> Cell {
    match n {
        None => ("-".into(), FAINT),
        Some(n) => {
            let text = si(n).replace(' ', "");
            let style = if text == "0" { FAINT } else { PLAIN };
            (text, style)
        }
    }
}

fn whole(n: Option<u64>) -> Cell {
    n.map_or(("-".into(), FAINT), |n| cell(n.to_string()))
}

fn share(part: Option<f64>) -> Cell {
    part.map_or(("-".into(), FAINT), |part| cell(percent(part).replace(' ', "")))
}

/// A share that is a warning near its limit.
fn limit(part: Option<f64>) -> Cell {
    let (text, style) = share(part);
    (text, if part.is_some_and(|part| part >= NEAR_LIMIT) { WARN } else { style })
}

fn time(ns: Option<f64>) -> Cell {
    ns.map_or(("-".into(), FAINT), |ns| cell(time_ns(ns).replace(' ', "")))
}

fn state(state: &str) -> Cell {
    let style = match state {
        "hot" => BUSY,
        "warm" => PLAIN,
        _ => FAINT,
    };
    (state.into(), style)
}

// ---- the switch and its workers ----

/// The first line: the switch, and the interval.
pub fn title(picture: &Picture, width: usize, right: &str) -> Line<'static> {
    let room = width.saturating_sub(right.len() + 1);
    let left = cut(&picture.about, room);
    Line::from(vec![
        Span::styled(format!("{left:room$} "), HEAD),
        Span::styled(right.to_string(), FAINT),
    ])
}

const WORKERS: [Column; 9] = [
    word("WORKER", 6, 6, 0),
    word("STATE", 6, 6, 1),
    number("CPU", 6, 1),
    number("LOAD", 6, 1),
    number("QUEUES", 6, 1),
    number("ROUNDS/s", 8, 1),
    number("SLEEPS/s", 8, 1),
    number("NAPS/s", 8, 1),
    number("MOVES", 7, 2),
];

fn worker(i: usize, worker: &Worker) -> Vec<Cell> {
    let state = if worker.asleep { ("asleep", FAINT) } else { ("awake", GOOD) };
    vec![
        cell(i.to_string()),
        (state.0.into(), state.1),
        share(worker.cpu),
        limit(worker.load),
        cell(worker.queues.to_string()),
        amount(worker.rounds),
        amount(worker.sleeps),
        amount(worker.naps),
        cell(worker.moves.to_string()),
    ]
}

/// The workers, at most `most` lines including the head.
pub fn workers(picture: &Picture, width: usize, most: usize) -> Vec<Line<'static>> {
    let all = picture.workers.iter().enumerate();
    let rows: Vec<_> = all.map(|(i, one)| worker(i, one)).collect();
    let mut lines = table::lines(&WORKERS, &rows, width, 0, HEAD);
    let hidden = lines.len().saturating_sub(most);
    if hidden > 0 {
        lines.truncate(most.saturating_sub(1));
        lines.push(Line::styled(format!("... {} more workers", hidden + 1), FAINT));
    }
    lines
}

// ---- ports ----

const PORTS: [Column; 11] = [
    word("PORT", 4, 15, 0),
    word("STATE", 5, 11, 0),
    number("IN/s", 5, 0),
    number("IN b/s", 6, 1),
    number("OUT/s", 5, 0),
    number("OUT b/s", 7, 1),
    number("HELD", 5, 3),
    number("CONT/s", 6, 4),
    number("FAULTS", 6, 2),
    word("DROPS/s WHY", 16, 24, 1),
    word("KIND", 8, 60, 6),
];
/// Rank of the history: before the kind, it is hidden last.
const HISTORY_RANK: u8 = 5;

/// Current drops and their cause; earlier drops are faint.
fn drops(port: &Port) -> Cell {
    let now = port.drops.iter().filter(|drop| drop.rate.is_some_and(|rate| rate > 0.0)).count();
    match port.drops.first() {
        Some(first) if now > 0 => {
            let more = if now > 1 { format!(" +{}", now - 1) } else { String::new() };
            let rate = amount(port.drop_rate()).0;
            (format!("{rate} {}{more}", first.name()), BAD)
        }
        _ => ("0".into(), FAINT),
    }
}

/// Style of a port's state.
fn link(port: &Port) -> Style {
    match port.state.as_str() {
        "stalled" => BAD,
        "no-driver" | "draining" | "drained" => WARN,
        _ if port.up => GOOD,
        _ => FAINT,
    }
}

fn port(port: &Port) -> Vec<Cell> {
    let up = link(port);
    let faults = if port.faults > 0 { BAD } else { FAINT };
    vec![
        cell(port.name.clone()),
        (port.state.clone(), up),
        amount(port.in_frames),
        amount(port.in_bits),
        amount(port.out_frames),
        amount(port.out_bits),
        amount(Some(port.held as f64)),
        amount(port.contended),
        (port.faults.to_string(), faults),
        drops(port),
        cell(port.kind.clone()),
    ]
}

const QUEUES: [Column; 15] = [
    number("Q", 2, 0),
    word("STATE", 5, 5, 0),
    number("WORKER", 6, 3),
    word("POLL", 8, 18, 4),
    number("POLLS/s", 7, 0),
    number("EMPTY", 5, 0),
    number("SLEEPS/s", 8, 0),
    number("NAPS/s", 6, 5),
    number("KICKS/s", 7, 0),
    number("CALLS/s", 7, 0),
    number("F/KICK", 6, 2),
    number("F/CALL", 6, 2),
    number("1ST", 6, 1),
    number("1ST MAX", 7, 1),
    number("CPU", 6, 6),
];

fn queue(i: usize, port: &Port, queue: &Queue) -> Vec<Cell> {
    let egress = port.egress.get(i).cloned().unwrap_or_default();
    vec![
        cell(i.to_string()),
        state(&queue.state),
        whole(queue.worker),
        cell(queue.poll.clone()),
        amount(queue.polls),
        share(queue.empty),
        amount(queue.sleeps),
        amount(queue.naps),
        amount(queue.kicks),
        amount(egress.calls),
        amount(queue.frames_per_kick),
        amount(egress.frames_per_call),
        time(queue.first_ns),
        time(queue.first_ns_max),
        share(queue.served),
    ]
}

/// The queues of one port.
fn queues(port: &Port, width: usize) -> Vec<Line<'static>> {
    let rows: Vec<_> = port.ingress.iter().enumerate().map(|(i, q)| queue(i, port, q)).collect();
    table::lines(&QUEUES, &rows, width, 0, FAINT)
}

/// The queues of all ports, one per line.
fn all_queues(ports: &[Port], width: usize) -> Vec<Line<'static>> {
    let columns: Vec<_> = [word("PORT", 4, 15, 0)].into_iter().chain(QUEUES).collect();
    let of = |port: &Port| {
        let numbered = port.ingress.iter().enumerate();
        let rows = numbered.map(|(i, one)| [vec![cell(&port.name)], queue(i, port, one)].concat());
        rows.collect::<Vec<_>>()
    };
    let rows: Vec<_> = ports.iter().flat_map(of).collect();
    table::lines(&columns, &rows, width, 0, HEAD)
}

/// A line of the list of ports, and the index of its port.
pub type PortLine = (usize, Line<'static>);

/// The table of ports, with their history if there is one.
fn port_table(ports: &[Port], width: usize, trends: Option<&Trends>) -> Vec<Line<'static>> {
    let (mut columns, mut rows) = (PORTS.to_vec(), ports.iter().map(port).collect::<Vec<_>>());
    if let Some(trends) = trends {
        // Wider where there is room.
        let bars = match width {
            ..140 => 10,
            140..170 => 20,
            _ => 40,
        };
        let at = columns.len() - 1;
        columns.insert(at, number("HISTORY", bars, HISTORY_RANK));
        for (row, port) in rows.iter_mut().zip(ports) {
            row.insert(at, (trends.line(&port.name, bars), BUSY));
        }
    }
    table::lines(&columns, &rows, width, 0, HEAD)
}

/// The heads and the lines of the list of ports; with `open`, including their queues.
pub fn ports(
    ports: &[Port],
    width: usize,
    open: bool,
    trends: Option<&Trends>,
) -> (Vec<Line<'static>>, Vec<PortLine>) {
    let mut lines = port_table(ports, width, trends).into_iter();
    let mut heads: Vec<_> = lines.next().into_iter().collect();
    // A single table, so that columns are aligned.
    let rows = ports
        .iter()
        .flat_map(|port| port.ingress.iter().enumerate().map(move |(i, one)| queue(i, port, one)));
    let rows: Vec<_> = if open { rows.collect() } else { Vec::new() };
    let mut queues = table::lines(&QUEUES, &rows, width, 2, FAINT).into_iter();
    let head = queues.next().filter(|_| open);
    heads.extend(head);
    let mut all = Vec::new();
    for ((i, line), port) in lines.enumerate().zip(ports) {
        all.push((i, line));
        all.extend(queues.by_ref().take(port.ingress.len()).map(|line| (i, line)));
    }
    (heads, all)
}

// ---- help, and plain text ----

/// Help page: keys and columns.
pub fn help() -> Vec<Line<'static>> {
    const TEXT: &str = "\
q         quit (Ctrl-C too); on this page and a port's page: back
up down   select a port (also k and j, PgUp, PgDn, Home, End)
Enter     open or close the port's page
t         show or hide the queues of all ports
s         next sort key: as added, name, frames in, frames out, drops
/         show only ports with a text in their name, state or kind; Esc: all
?         open or close this page

STATE     of a port: up; unconnected, no peer; no-driver, a front-end whose
          guest has no driver yet; stalled, posts no buffers; draining, drained;
          standby, the other port of its pair carries the frames
IN, OUT   from the guest into the switch, from the switch to the guest: frames
          and bits per second; drops with the prefix to: occurred on the way OUT,
          to:lost_ of senders because this port was full
HISTORY   frames per second of the last samples, both directions; the highest
          bar is the port's highest rate among them
HELD      frames held now because the port's queues are full
CONT/s    lock contentions per second between workers delivering to this port
STATE     of a queue: hot, polled in every round; warm, polled occasionally;
          cold, armed and asleep until its guest kicks
EMPTY     share of polls that found no frames
F/KICK    frames from the guest per kick
F/CALL    frames to the guest per call (interrupt)
1ST       time from wake-up to delivery of the first frame: mean, maximum
LOAD      share of the worker's time spent on its queues
CPU       share of one core
Colours   green: up; cyan: polled, and history; yellow: no driver, draining, a
          worker above 90 %; red: losses now, faults, stalled; faint: none";
    TEXT.lines().map(Line::raw).collect()
}

/// A sample as text, `width` columns wide: workers, ports and all queues.
pub fn plain(picture: &Picture, width: usize) -> String {
    let mut lines = vec![
        Line::raw(picture.about.clone()),
        Line::raw(format!("rates over {:.2} s", picture.secs)),
        Line::raw(""),
    ];
    lines.extend(workers(picture, width, usize::MAX));
    lines.push(Line::raw(""));
    let (heads, all) = ports(&picture.ports, width, false, None);
    lines.extend(heads);
    lines.extend(all.into_iter().map(|(_, line)| line));
    lines.push(Line::raw(""));
    lines.extend(all_queues(&picture.ports, width));
    let lines = lines.iter().map(|line| format!("{}\n", line.to_string().trim_end()));
    lines.collect()
}

#[cfg(test)]
mod tests;
