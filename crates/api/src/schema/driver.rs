//! Settings of the driver half: `--set KEY=VALUE` of `nic` and `gen`, and `ctl set` of their
//! control socket.

use super::{Choice, Entry, Given, Live, Type, Value, find};
use crate::near::did_you_mean;
use crate::queues::queue_number;

const HZ_MAX: u32 = 20_000;
const ON_OFF: Type = Type::Choice(&[Choice::word("on", ""), Choice::word("off", "")]);

/// When transmitted buffers are taken back.
const COMPLETION: &[Choice] = &[
    Choice::word(
        "orphan",
        "A frame is the ring's when it is sent (it was copied into the ring's own buffer) and \
         nobody waits for it. Buffers are taken back when a burst finds too few free; no calls \
         are asked for, but by a sender that is stopped.",
    ),
    Choice::word("before-tx", "Taken back before each burst; calls as above."),
    Choice::number(
        "timer",
        "HZ",
        1,
        HZ_MAX,
        "Taken back at ticks (1 to 20000 Hz) while any is in flight, and at no other time; no \
         calls. A full ring waits for the tick.",
    ),
    Choice::word(
        "on-empty",
        "Taken back when all in flight was used. The event index is set to the last one, so that \
         a sleeper is called once, then.",
    ),
    Choice::word(
        "on-half-empty",
        "Taken back when half are free again. While fewer than half are, the event index is set \
         to where that will be.",
    ),
];

/// What a sender without a free buffer does.
const FULL: &[Choice] = &[
    Choice::word(
        "stop-before-full",
        "A sender takes no frame that it has no buffer for; it sleeps until the completion \
         setting gives one.",
    ),
    Choice::word(
        "busy-retry",
        "It tries again at once, indefinitely. There is no third queue: the frame stays where it \
         is.",
    ),
];

/// When received buffers are given back.
const REFILL: &[Choice] = &[
    Choice::word("at-once", "Received buffers are given back after each poll that found frames."),
    Choice::word("below-half", "When fewer than half are with the switch."),
    Choice::number("batch", "N", 1, 32_768, "N at a time, at most half of them."),
];

/// Where the header lies.
const HEADER: &[Choice] = &[
    Choice::word("inline", "The virtio-net header lies before the frame."),
    Choice::word(
        "apart",
        "It has a descriptor of its own: two for each buffer, in a table of their own with \
         `indirect=on`, else half as many buffers.",
    ),
];

/// How notifications are suppressed.
const SUPPRESS: &[Choice] = &[
    Choice::word("event-index", "Notifications are suppressed by index."),
    Choice::word(
        "flags",
        "By flags: EVENT_IDX is not negotiated. A flag cannot name a later buffer: `on-empty` and \
         `on-half-empty` are called at each use, and take buffers back at the same points.",
    ),
    Choice::word(
        "none",
        "Xen's rings alone, which have no flags: not at all; the switch is notified of all that \
         is published, frames and buffers given back, whether it asks or not.",
    ),
];

/// What is checked.
const CHECKS: &[Choice] = &[
    Choice::word("on", "What the switch says it used is checked against what is in flight."),
    Choice::word(
        "off",
        "A split ring is not checked for chains that are not in flight, nor for lengths (they are \
         cut to the buffer); the marks for it are not written. Indices outside the ring and index \
         jumps are still faults, and nothing outside our own memory is ever touched. A packed \
         ring finds its place through these checks and keeps them.",
    ),
];

/// All of them. `poll` and `kick` of all queue pairs are options of their own (`--poll`, `--kick`).
pub const TABLE: &[Entry] = &[
    Entry::new(
        "tx-completion",
        Type::Choice(COMPLETION),
        "orphan",
        "when transmitted buffers are taken back",
    ),
    Entry::new(
        "tx-full",
        Type::Choice(FULL),
        "stop-before-full",
        "what a sender without a free buffer does",
    ),
    Entry::new(
        "rx-refill",
        Type::Choice(REFILL),
        "at-once",
        "when received buffers are given back",
    ),
    Entry::new(
        "header",
        Type::Choice(HEADER),
        "inline",
        "header before the frame, or in a descriptor of its own",
    ),
    Entry::new(
        "offset",
        Type::Number(0, 64),
        "0",
        "bytes left free at the start of each buffer, 0 to 64",
    )
    .more(
        " (`apart`: before the frame). The IP header is on a multiple of 16 with 6 inline, with 2 \
         apart.",
    ),
    Entry::new(
        "suppress",
        Type::Choice(SUPPRESS),
        "event-index",
        "how notifications are suppressed",
    ),
    Entry::new("indirect", ON_OFF, "on", "tables for chains of several descriptors")
        .more(": whether INDIRECT_DESC is negotiated."),
    Entry::new("checks", Type::Choice(CHECKS), "on", "checks of what the switch says it used"),
    Entry::new(
        "tx-burst",
        Type::Number(1, 64),
        "64",
        "most frames sent, and notified of, at once, 1 to 64",
    )
    .more(
        ". With 1 the switch is notified of each frame, if it asks to be: what batches are worth \
         (`pvswitch lab run copies`).",
    ),
    Entry::new("poll", Type::Policy, "`--poll`", "--poll of one queue pair, from 0 on")
        .given(Given::CommandLine)
        .per_queue()
        .live(Live::Queue),
    Entry::new("kick", Type::Policy, "`--kick`", "--kick of one queue pair, from 0 on")
        .given(Given::CommandLine)
        .per_queue()
        .live(Live::Queue),
];

/// The setting that `KEY=VALUE` or `KEY/QUEUE=VALUE` gives, the queue pair, and the value.
///
/// # Errors
/// There is no such setting, or the value is invalid; the error says what to write.
pub fn parse(text: &str) -> Result<(&'static Entry, Option<usize>, Value), String> {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    let Some((entry, queue)) = find(TABLE.iter(), key) else {
        let names = || TABLE.iter().filter(|entry| !entry.per_queue).map(|entry| entry.name);
        let hint = did_you_mean(key, names());
        let single = TABLE.iter().filter(|entry| entry.per_queue);
        let single = single.map(|entry| format!("{}/QUEUE", entry.name));
        let known: Vec<_> = names().map(Into::into).chain(single).collect();
        return Err(format!("unknown setting '{key}'{hint}; known: {}", known.join(", ")));
    };
    if entry.per_queue && queue.is_none() {
        let one = format!("--set {key}/QUEUE={value} for one queue pair");
        return Err(format!("{key} of all queues is an option: --{key} {value}, or {one}"));
    }
    let at = |error| format!("{key}={value}: {error}");
    let queue = queue.map(|queue| queue_number(entry.name, queue).map_err(at)).transpose()?;
    Ok((entry, queue, entry.parse_as(key, value)?))
}
