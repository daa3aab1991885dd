//! Settings of the driver half: `--set KEY=VALUE` of `nic` and `gen`, and `ctl set` of their
//! control socket.

use super::{Choice, Entry, Given, Live, Type, Value, find};
use crate::near::did_you_mean;
use crate::queues::queue_number;

const HZ_MAX: u32 = 20_000;
const QUEUE_MAX: u32 = 1024;
const ON_OFF: Type = Type::Choice(&[Choice::word("on", ""), Choice::word("off", "")]);

/// When transmitted buffers are reclaimed.
const COMPLETION: &[Choice] = &[
    Choice::word(
        "orphan",
        "A frame is copied into a buffer of the ring when it is sent, and no sender waits for its \
         completion. Buffers are reclaimed when a burst finds too few free; only a stopped sender \
         enables calls.",
    ),
    Choice::word("before-tx", "Buffers are reclaimed before each burst; calls as above."),
    Choice::number(
        "timer",
        "HZ",
        1,
        HZ_MAX,
        "Buffers are reclaimed only at timer ticks (1 to 20000 Hz), while any is in flight; no \
         calls. A full ring waits for the tick.",
    ),
    Choice::word(
        "on-empty",
        "Buffers are reclaimed when all in flight are used. The event index is set to the last \
         one, so that a sleeping driver is called once.",
    ),
    Choice::word(
        "on-half-empty",
        "Buffers are reclaimed when half are free. While fewer are free, the event index is set \
         to the buffer that completes the half.",
    ),
];

/// What a sender without a free buffer does.
const FULL: &[Choice] = &[
    Choice::word(
        "stop-before-full",
        "A sender accepts no frame without a free buffer; it sleeps until the completion setting \
         frees one.",
    ),
    Choice::word(
        "busy-retry",
        "The sender retries at once, indefinitely. The frame stays where it is.",
    ),
    Choice::number(
        "queue",
        "N",
        1,
        QUEUE_MAX,
        "Virtqueues only: up to N frames (1 to 1024) wait in a queue of the driver while the ring \
         is full, in buffers that the ring does not have; beyond that as `stop-before-full`. Shows \
         what a third queue does (`pvswitch lab run coalescing`).",
    ),
];

/// When received buffers are returned.
const REFILL: &[Choice] = &[
    Choice::word("at-once", "Received buffers are returned after each poll that found frames."),
    Choice::word("below-half", "They are returned when the switch has fewer than half."),
    Choice::number("batch", "N", 1, 32_768, "They are returned N at a time, at most half of them."),
];

/// Placement of the header.
const HEADER: &[Choice] = &[
    Choice::word("inline", "The virtio-net header precedes the frame in the same buffer."),
    Choice::word(
        "apart",
        "The header has its own descriptor: two per buffer, in an indirect table with \
         `indirect=on`, else half as many buffers.",
    ),
];

/// How notifications are suppressed.
const SUPPRESS: &[Choice] = &[
    Choice::word("event-index", "Notifications are suppressed by event index."),
    Choice::word(
        "flags",
        "Notifications are suppressed by flags: EVENT_IDX is not negotiated. A flag cannot name a \
         later buffer: with `on-empty` and `on-half-empty` the driver is called at each use, and \
         reclaims buffers at the same points.",
    ),
    Choice::word(
        "none",
        "The driver suppresses no calls. On virtqueues: EVENT_IDX is not negotiated, and the flag \
         that suppresses calls is never set, so that the driver is called at each use of buffers \
         on both rings; it kicks unless the switch's flag suppresses kicks. Xen rings have no such \
         flag, only an index of the next call, set before a sleep; the switch is notified of all \
         published frames and returned buffers, whether it asks or not.",
    ),
];

/// Checks of used elements.
const CHECKS: &[Choice] = &[
    Choice::word("on", "Used elements are checked against the chains in flight."),
    Choice::word(
        "off",
        "On a split ring, used elements are not checked for chains that are not in flight, nor \
         for lengths (they are truncated to the buffer), and chains in flight are not marked. \
         Indices outside the ring and index jumps are still faults, and memory outside the \
         driver's own is never accessed. A packed ring needs these checks to keep its position, \
         and keeps them.",
    ),
];

/// All entries. `poll` and `kick` of all queue pairs are separate options (`--poll`, `--kick`).
pub const TABLE: &[Entry] = &[
    Entry::new(
        "tx-completion",
        Type::Choice(COMPLETION),
        "orphan",
        "when transmitted buffers are reclaimed",
    ),
    Entry::new(
        "tx-full",
        Type::Choice(FULL),
        "stop-before-full",
        "what a sender without a free buffer does",
    ),
    Entry::new("rx-refill", Type::Choice(REFILL), "at-once", "when received buffers are returned"),
    Entry::new(
        "header",
        Type::Choice(HEADER),
        "inline",
        "header before the frame, or in its own descriptor",
    ),
    Entry::new(
        "offset",
        Type::Number(0, 64),
        "0",
        "bytes left unused at the start of each buffer, 0 to 64",
    )
    .more(
        " (`apart`: before the frame). The IP header is aligned to 16 bytes with 6 inline, with 2 \
         apart.",
    ),
    Entry::new(
        "suppress",
        Type::Choice(SUPPRESS),
        "event-index",
        "how notifications are suppressed",
    ),
    Entry::new("indirect", ON_OFF, "on", "indirect tables for chains of several descriptors")
        .more(": whether INDIRECT_DESC is negotiated."),
    Entry::new("checks", Type::Choice(CHECKS), "on", "checks of used elements from the switch"),
    Entry::new(
        "tx-burst",
        Type::Number(1, 64),
        "64",
        "maximum number of frames per transmit burst and notification, 1 to 64",
    )
    .more(
        ". With 1, the switch is notified of each frame if it enables kicks; this shows the \
         benefit of batching (`pvswitch lab run copies`).",
    ),
    Entry::new(
        "rx-buffer",
        Type::Number(2048, 4096),
        "4096",
        "bytes of a receive buffer, with its header, 2048 to 4096",
    )
    .more(". A longer frame takes several. On Xen rings a buffer is a page, which is granted."),
    Entry::new("poll", Type::Policy, "`--poll`", "--poll of one queue pair, from 0 on")
        .given(Given::CommandLine)
        .per_queue()
        .live(Live::Queue),
    Entry::new("kick", Type::Policy, "`--kick`", "--kick of one queue pair, from 0 on")
        .given(Given::CommandLine)
        .per_queue()
        .live(Live::Queue),
];

/// Parses `KEY=VALUE` or `KEY/QUEUE=VALUE` into the setting, the queue pair, and the value.
///
/// # Errors
/// The setting does not exist, or the value is invalid; the error says what to write.
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
        return Err(format!("for all queues use the option --{key} {value}, or {one}"));
    }
    let at = |error| format!("{key}={value}: {error}");
    let queue = queue.map(|queue| queue_number(entry.name, queue).map_err(at)).transpose()?;
    Ok((entry, queue, entry.parse_as(key, value)?))
}
