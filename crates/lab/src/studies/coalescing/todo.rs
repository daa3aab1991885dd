//! The original study's TODO list, item by item, in its order.

use super::setting::{DEFAULT, of_row};
use super::{MEASURES, TIMED, median};
use crate::report::{Table, Value};
use crate::store::Results;

/// One item.
pub struct Item {
    /// Quote, shortened.
    pub quote: &'static str,
    /// The setting or part of the program that implements it, or why it has no figure.
    pub why: &'static str,
    /// Its figures: kind of traffic, setting or row of the original's table, measure.
    pub figures: &'static [(&'static str, &'static str, &'static str)],
    /// Code that proves what has no figure: file and a line of it.
    pub proof: &'static [(&'static str, &'static str)],
}

const fn item(
    quote: &'static str,
    why: &'static str,
    figures: &'static [(&'static str, &'static str, &'static str)],
) -> Item {
    Item { quote, why, figures, proof: &[] }
}

impl Item {
    const fn proved(self, proof: &'static [(&'static str, &'static str)]) -> Self {
        Self { proof, ..self }
    }
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
        "The counter became the event index, our default; by flags, and without suppression of \
         calls:",
        &[
            ("bulk", "suppress=none", "calls_per_1000"),
            ("bulk", "suppress=none", "frames"),
            ("bulk", "suppress=flags", "kicks_per_1000"),
            ("bulk", "suppress=flags", "calls_per_1000"),
        ],
    ),
    item(
        "[mst: Full queue: what does it do to performance if we queue more packets?] Rusty: bad \
         idea, this is a third queue. Stop the queue before it gets full, or fix TX_BUSY",
        "tx-full=queue:N: frames that find the ring full wait in a queue of the driver, the \
         original's single one, and 256, as many as the ring has. Rusty's two ways: \
         tx-full=stop-before-full (default), and busy-retry:",
        &[
            ("bulk", "tx-full=queue:1", "frames"),
            ("bulk", "tx-full=queue:1", "latency_p50"),
            ("bulk", "tx-full=queue:256", "frames"),
            ("bulk", "tx-full=queue:256", "latency_p50"),
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
        "No second way to compare: an skb is an object of a kernel, and the driver half has none. \
         It passes a frame on as the segments of its buffers, which are made once, at the start.",
        &[],
    )
    .proved(&[
        ("crates/guest/src/rx.rs", "mut show: impl FnMut(&[Seg<'a>]),"),
        ("crates/guest/src/rx.rs", "done: (ring.offered()..ring.size()).collect(),"),
    ]),
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
        "A refill cannot fail, so a timer would have nothing to do: it returns buffers that exist, \
         and there is a descriptor for each.",
        &[],
    )
    .proved(&[("crates/guest/src/ring.rs", "assert_eq!(added, list.len(),")]),
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
        "in-order below. There is no map of a frame to optimise: memory is mapped when the guest \
         announces it (vhost-user, SET_MEM_TABLE and ADD_MEM_REG), and an address of a frame is \
         looked up in that table. Eventfds are the protocol's own (SET_VRING_KICK and _CALL); its \
         alternative, in-band notifications, is a message of the socket for each.",
        &[("bulk", "in-order", "frames"), ("bulk", "in-order", "guest_ns")],
    )
    .proved(&[("crates/shm/src/memory.rs", "pub fn seg(")]),
];

/// A figure with its base beside it.
pub fn figure(results: &Results, way: &str, setting: &str, name: &str) -> String {
    let timed = TIMED.contains(&way);
    let shown = if timed { format!("time-out {setting}") } else { setting.to_string() };
    let named = |setting: &str| {
        if timed { of_row(results.cells(), setting) } else { setting.to_string() }
    };
    let unit = MEASURES.iter().find(|measure| measure.name == name).map_or("", |found| found.unit);
    let words = name.replace("_per_1000", " a 1000 frames").replace('_', " ");
    let Some(value) = median(results, way, &named(setting), name) else {
        return format!("{way}, {shown}: {words} not measured");
    };
    let base = if timed { "before" } else { DEFAULT };
    let text = format!("{way}, {shown}: {words} {}", number(value, unit));
    match median(results, way, &named(base), name) {
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
        let proof = item.proof.iter().map(|(file, line)| format!("{file}: {line}"));
        let answer: Vec<_> = figures.into_iter().chain(proof).collect();
        let answer = Value::Text(answer.join("; "));
        let text = |words: &str| Value::Text(words.into());
        vec![Value::Number((i + 1) as f64, 0), text(item.quote), text(item.why), answer]
    });
    Table {
        title: "The TODO list itself".into(),
        note: "In the order of the original study, quotes shortened. bulk and paced refer to the \
               two previous tables; a figure without a base is that of the default. Where there is \
               nothing to measure, the last column has the code that shows why."
            .into(),
        columns: ["Item", "The list says", "Here", "Figures, or code"].map(String::from).into(),
        rows: rows.collect(),
        command: "pvswitch lab run coalescing".into(),
    }
}
