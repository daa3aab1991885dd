//! The original study's TODO list, item by item, in its order.

use super::setting::DEFAULT;
use super::{MEASURES, TIMED, TIMEOUTS, median};
use crate::report::{Table, Value};
use crate::store::Results;

/// One item.
pub struct Item {
    /// Quote, shortened.
    pub quote: &'static str,
    /// The setting or part of the program that implements it, or why it has no figure.
    pub why: &'static str,
    /// Its figures: kind of traffic, setting, measure.
    pub figures: &'static [(&'static str, &'static str, &'static str)],
}

const fn item(
    quote: &'static str,
    why: &'static str,
    figures: &'static [(&'static str, &'static str, &'static str)],
) -> Item {
    Item { quote, why, figures }
}

/// All of it.
pub const LIST: [Item; 23] = [
    item(
        "[mst: virtqueue already tracks posted buffers. Add flush/purge operation and use that \
         instead?] Rusty: not really an optimization",
        "There is no list beside the ring to compare with: the driver half marks chains in flight \
         with checks=on. The cost of these marks:",
        &[("bulk", "checks=off", "frames"), ("bulk", "checks=off", "guest_ns")],
    ),
    item(
        "[mst: this does a copy for skb head, costly for small/linear packets. Might need to tweak \
         virtio interface] Rusty: there's no copy",
        "The header before the frame in one descriptor (default), or in its own descriptor:",
        &[
            ("bulk", "header=apart", "frames"),
            ("bulk", "header=apart", "guest_ns"),
            ("bulk", "header=apart+indirect=off", "frames"),
        ],
    ),
    item(
        "[mst: any way to mitigate # of VM exits here? Possibly on host side] [markmc: all of our \
         efforts have been on the host side]",
        "Host: it polls while awake (default), or at ticks. Guest: the kick is delayed.",
        &[
            ("bulk", DEFAULT, "kicks_per_1000"),
            ("paced", DEFAULT, "kicks_per_1000"),
            ("paced", "poll=timer:1000", "kicks_per_1000"),
            ("paced", "kick=coalesce:50,32", "kicks_per_1000"),
        ],
    ),
    item(
        "Rusty: we can get a number of notifications in before it gets to that suppression. You \
         can use a counter to improve this",
        "The counter became the event index, our default; by flags:",
        &[
            ("bulk", "suppress=flags", "kicks_per_1000"),
            ("bulk", "suppress=flags", "calls_per_1000"),
        ],
    ),
    item(
        "[mst: Full queue: what does it do to performance if we queue more packets?] Rusty: bad \
         idea, this is a third queue. Stop the queue before it gets full, or fix TX_BUSY",
        "A third queue is not implemented, so it has no figure. Both of Rusty's ways are: \
         tx-full=stop-before-full (default), and busy-retry:",
        &[
            ("bulk", "tx-full=busy-retry", "frames"),
            ("bulk", "tx-full=busy-retry", "guest_ns"),
            ("bulk", "tx-full=busy-retry", "latency_p99"),
        ],
    ),
    item(
        "[mst: TX interrupts are enabled when it is originally created: we probably should disable \
         interrupts when device is created] Rusty: minor wart",
        "They are initially off, and on for a stopped sender. Calls to a sender that never stops, \
         and to one that always fills its ring:",
        &[("paced", DEFAULT, "tx_calls_per_1000"), ("bulk", DEFAULT, "tx_calls_per_1000")],
    ),
    item(
        "We poll for buffer completions: 1. Before each TX",
        "tx-completion=before-tx:",
        &[
            ("bulk", "tx-completion=before-tx", "frames"),
            ("bulk", "tx-completion=before-tx", "guest_ns"),
        ],
    ),
    item(
        "2. On a timer tasklet",
        "tx-completion=timer:1000, one ring per tick:",
        &[
            ("bulk", "tx-completion=timer:1000", "frames"),
            ("bulk", "tx-completion=timer:1000", "latency_p99"),
        ],
    ),
    item(
        "3. When host sends us interrupt [...] that the queue is empty; rusty: disabling \
         VIRTIO_F_NOTIFY_ON_EMPTY should help",
        "Only legacy devices have that feature. The event index at the last frame in flight does \
         the same, tx-completion=on-empty, which is not the default:",
        &[
            ("bulk", "tx-completion=on-empty", "frames"),
            ("paced", "tx-completion=on-empty", "tx_calls_per_1000"),
        ],
    ),
    item(
        "[mst: instead of empty, enable send interrupts when buffer is almost full (e.g. at least \
         half empty)]",
        "tx-completion=on-half-empty:",
        &[
            ("bulk", "tx-completion=on-half-empty", "frames"),
            ("paced", "tx-completion=on-half-empty", "tx_calls_per_1000"),
        ],
    ),
    item(
        "[Rusty proposing that we don't need (2) or (3) if the skbs are orphaned before \
         start_xmit()] Yes, that's more fruitful",
        "tx-completion=orphan is the default; the rows above are compared with it. Alone:",
        &[("bulk", DEFAULT, "frames"), ("bulk", DEFAULT, "guest_ns")],
    ),
    item(
        "[mst: managing the 128 head buffers is wasted effort. Try allocating skbs on rcv path; \
         allocate pages but not skbs]",
        "Concerns the guest's kernel: our driver half has no skbs. It allocates its buffers once, \
         and assembles frames from several of them without allocation.",
        &[],
    ),
    item(
        "Rusty: alignment: packets are misaligned (that 14 byte ethernet header). Add a feature to \
         allow the host to say \"I've skipped this many bytes\"",
        "The standard has no such feature; the driver leaves bytes unused itself. With offset=6 \
         the IP header is aligned to 16 bytes:",
        &[("bulk", "offset=6", "frames"), ("bulk", "offset=6", "guest_ns")],
    ),
    item(
        "[mst: buffers are replenished below 1/2 max: code might become simpler if we add buffers \
         immediately] Rusty: completely unscientific. Ditch it and benchmark",
        "rx-refill=at-once is the default; below-half and batch:32:",
        &[
            ("bulk", "rx-refill=below-half", "frames"),
            ("bulk", "rx-refill=batch:32", "frames"),
            ("bulk", "rx-refill=below-half", "rx_kicks_per_1000"),
        ],
    ),
    item(
        "[markmc: batching might be introducing more unpredictability: some packets randomly have \
         a higher overhead]",
        "The tail of latency with it:",
        &[
            ("paced", "rx-refill=below-half", "latency_p99"),
            ("paced", "rx-refill=batch:32", "latency_p99"),
        ],
    ),
    item(
        "[mst: there's a fixme that this fails if we completely run out of buffers, should be \
         handled by timer. Could be a thread as well. Might be good for performance anyway]",
        "Returning a buffer allocates nothing and cannot fail, so there is no such timer or thread \
         to measure.",
        &[],
    ),
    item(
        "[mst: test whether this optimization works: recv kicks should be rare] [mst: virtqueue \
         already tracks posted buffers] Rusty: don't understand this comment",
        "Kicks for returned buffers, in all rings of 256; the list as in the first item:",
        &[("bulk", DEFAULT, "rx_kicks_per_1000"), ("paced", DEFAULT, "rx_kicks_per_1000")],
    ),
    item(
        "[mst: napi: should get 1 interrupt per N packets. What is N?] Rusty: I had trouble \
         getting \
         above about 2:1; a silly 50 usec delay gives 47k irqs for 1M packets",
        "N, between generators and of TCP to a guest; and with calls that wait 50 us:",
        &[
            ("bulk", DEFAULT, "frames_per_call"),
            ("paced", DEFAULT, "frames_per_call"),
            ("host-to-guest", "0", "frames_per_call"),
            ("paced", "call=coalesce:50,32", "frames_per_call"),
            ("paced", "call=coalesce:50,32", "latency_p50"),
        ],
    ),
    item(
        "[mst: implement interrupt coalescing?] Rusty: lguest does this in the host, with mixed \
         results",
        "The table of time-outs above, and by frames outstanding:",
        &[
            ("guest-to-host", "1", "seconds_1_gb"),
            ("guest-to-host", "1/pending", "seconds_1_gb"),
            ("paced", "call=coalesce:50/pending", "calls_per_1000"),
            ("paced", "call=coalesce:50/pending", "latency_p50"),
        ],
    ),
    item(
        "[mst: NET_IP_ALIGN: we probably should use alignment of 2 always] Rusty: unclear: what if \
         the host is doing DMA? [mst: avoid modulus: isn't this & (num - 1)?] Exactly",
        "offset=2 below. The modulus is no setting: split rings mask, packed ones compare, as \
         their sizes need not be powers of two.",
        &[("bulk", "offset=2", "frames"), ("bulk", "offset=2", "guest_ns")],
    ),
    item(
        "[mst: clearing data is only needed for debugging. Try removing this write] Rusty: it's \
         our \
         only way of detecting issues with hosts",
        "checks=off writes no marks and believes the host:",
        &[("bulk", "checks=off", "guest_ns"), ("bulk", "checks=off", "latency_p99")],
    ),
    item(
        "TX: disable notifications and start a timer [markmc: tried removing the timer, no major \
         effect] Rusty: lguest went fully multithreaded, dropped timer hack. Nicer, and faster",
        "poll=timer:1000 is the timer, poll=event is without; by default a worker thread of its \
         own \
         polls while that is cheaper. More threads: study `threads`.",
        &[
            ("bulk", "poll=timer:1000", "frames"),
            ("bulk", "poll=event", "frames"),
            ("paced", "poll=timer:1000", "latency_p50"),
            ("paced", "poll=timer:1000", "switch_ns"),
        ],
    ),
    item(
        "[mst: optimize for completing in order?] [mst: cpu_physical_memory_map could be \
         optimized] \
         Interrupts and kicks by eventfd: definitely a win",
        "in-order below. The other two cannot be figures: a guest's memory is mapped once, when \
         it is announced, and an address is looked up, never mapped; and vhost-user has eventfds \
         and no other way.",
        &[("bulk", "in-order", "frames"), ("bulk", "in-order", "guest_ns")],
    ),
];

/// A figure with its base beside it.
pub fn figure(results: &Results, way: &str, setting: &str, name: &str) -> String {
    let timeout = TIMEOUTS.iter().any(|timeout| timeout.name == setting);
    let shown = if timeout { format!("time-out {setting}") } else { setting.to_string() };
    let unit = MEASURES.iter().find(|measure| measure.name == name).map_or("", |found| found.unit);
    let words = name.replace("_per_1000", " a 1000 frames").replace('_', " ");
    let Some(value) = median(results, way, setting, name) else {
        return format!("{way}, {shown}: {words} not measured");
    };
    let base = if TIMED.contains(&way) { "before" } else { DEFAULT };
    let text = format!("{way}, {shown}: {words} {}", number(value, unit));
    match median(results, way, base, name) {
        Some(_) if setting == base => text,
        Some(from) if from > 0.0 && !name.contains("per_1000") => {
            format!("{text}, {:.2} times {base}", value / from)
        }
        Some(from) => format!("{text} against {}", number(from, "")),
        None => text,
    }
}

fn number(value: f64, unit: &str) -> String {
    let digits = if value == 0.0 || value >= 1000.0 { 0 } else { 2 };
    format!("{value:.digits$} {unit}").trim_end().to_string()
}

/// The list with its answers.
pub fn table(results: &Results) -> Table {
    let rows = LIST.iter().enumerate().map(|(i, item)| {
        let figures = item.figures.iter();
        let figures: Vec<_> =
            figures.map(|(way, setting, name)| figure(results, way, setting, name)).collect();
        let answer = if figures.is_empty() {
            Value::Missing("no figure: see the previous column".into())
        } else {
            Value::Text(figures.join("; "))
        };
        let text = |words: &str| Value::Text(words.into());
        vec![Value::Number((i + 1) as f64, 0), text(item.quote), text(item.why), answer]
    });
    Table {
        title: "The TODO list itself".into(),
        note: "In the order of the original study, quotes shortened. bulk and paced refer to the \
               two previous tables; a figure without a base is that of the default."
            .into(),
        columns: ["Item", "The list says", "Here", "Figures"].map(String::from).into(),
        rows: rows.collect(),
        command: "pvswitch lab run coalescing".into(),
    }
}
