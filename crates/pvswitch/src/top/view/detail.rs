//! The page of one port.

use ratatui::text::{Line, Span};

use super::super::sample::Port;
use super::super::table::{self, Cell, Column, cut, number, word};
use super::{BAD, FAINT, GOOD, HEAD, PLAIN, amount, cell, link, queues, share, whole};

const DROPS: [Column; 4] = [
    word("DROPS", 16, 24, 0),
    word("WAY", 10, 10, 0),
    number("NOW/s", 8, 0),
    number("TOTAL", 8, 0),
];

const OUT: [Column; 11] = [
    number("Q", 2, 0),
    word("CALL", 8, 18, 2),
    number("FRAMES/s", 8, 0),
    number("CALLS/s", 7, 0),
    number("F/CALL", 6, 0),
    number("LATE/s", 6, 3),
    number("KICKS/s", 7, 1),
    number("FULL/s", 6, 0),
    number("HELD", 5, 0),
    number("CONTENDED/s", 11, 4),
    number("SW-OFFL/s", 9, 5),
];

const IN: [Column; 9] = [
    number("Q", 2, 0),
    number("WORKER", 6, 0),
    word("POLL", 8, 18, 0),
    number("FRAMES/s", 8, 0),
    number("F/BURST", 7, 0),
    number("CALLS/s", 7, 0),
    number("NAPS/s", 6, 0),
    number("WEIGHT", 6, 0),
    number("CPU", 5, 0),
];

/// Details of one port.
pub fn detail(port: &Port, width: usize) -> Vec<Line<'static>> {
    let mut lines = head(port, width);
    let section = |name: &str| [Line::raw(""), Line::styled(name.to_string(), HEAD)];
    if !port.ingress.is_empty() {
        lines.extend(section("From the guest"));
        lines.extend(queues(port, width));
        lines.extend(table::lines(&IN, &from_guest(port), width, 0, FAINT));
    }
    lines.extend(section("To the guest"));
    lines.extend(table::lines(&OUT, &to_guest(port), width, 0, FAINT));
    lines.push(Line::raw(""));
    if port.drops.is_empty() {
        lines.push(Line::styled("No drops", GOOD));
        return lines;
    }
    let rows = port.drops.iter().map(|drop| {
        let style = if drop.rate.is_some_and(|rate| rate > 0.0) { BAD } else { PLAIN };
        vec![
            (drop.cause.clone(), style),
            cell(if drop.ingress { "from guest" } else { "to guest" }),
            amount(drop.rate),
            amount(Some(drop.total as f64)),
        ]
    });
    lines.extend(table::lines(&DROPS, &rows.collect::<Vec<_>>(), width, 0, HEAD));
    lines
}

/// State, features and rates.
fn head(port: &Port, width: usize) -> Vec<Line<'static>> {
    let front_end = match port.connected {
        Some(true) => ", front-end connected",
        Some(false) => ", no front-end",
        None => "",
    };
    let about = format!(
        "{front_end}, {} of {} queues active, {} faults",
        port.queues_active, port.queues, port.faults
    );
    let mut lines = vec![
        Line::from(vec![
            Span::styled(format!("Port {}  ", port.name), HEAD),
            Span::styled(port.state.clone(), link(port)),
            Span::raw(about),
        ]),
        Line::raw(cut(&port.kind, width)),
    ];
    lines.extend(wrapped(&port.features, width).into_iter().map(|l| Line::styled(l, FAINT)));
    let rates = [("in", port.in_frames, port.in_bits), ("out", port.out_frames, port.out_bits)];
    let rates = rates.map(|(way, frames, bits)| {
        format!("{way} {} frames/s {} bit/s", amount(frames).0, amount(bits).0)
    });
    let (held, holds) = (port.held, amount(port.holds).0);
    lines.push(Line::raw(format!("{}   held {held}, newly {holds}/s", rates.join("   "))));
    lines
}

/// What the table of queues leaves out, of each queue from the guest.
fn from_guest(port: &Port) -> Vec<Vec<Cell>> {
    let queues = port.ingress.iter().enumerate().map(|(i, queue)| {
        vec![
            cell(i.to_string()),
            whole(queue.worker),
            cell(&queue.poll),
            amount(queue.frames),
            amount(queue.frames_per_burst),
            amount(queue.calls),
            amount(queue.naps),
            whole(queue.weight),
            share(queue.served),
        ]
    });
    queues.collect()
}

/// Each queue to the guest.
fn to_guest(port: &Port) -> Vec<Vec<Cell>> {
    let queues = port.egress.iter().enumerate().map(|(i, queue)| {
        let software = queue.segmented.zip(queue.checksummed).map(|(a, b)| a + b);
        vec![
            cell(i.to_string()),
            cell(queue.call.clone()),
            amount(queue.frames),
            amount(queue.calls),
            amount(queue.frames_per_call),
            amount(queue.calls_late),
            amount(queue.kicks),
            amount(queue.full),
            whole(queue.held),
            amount(queue.contended),
            amount(software),
        ]
    });
    queues.collect()
}

fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.into()),
        }
    }
    lines
}
