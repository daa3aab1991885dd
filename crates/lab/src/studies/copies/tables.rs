//! The table of the original study beside ours, with counts and CPU of ours.

use super::{Copies, HALVES, HALVES_PAIR, PAIRS, Results, ipf, is_outside, original};
use crate::plan::Cell;
use crate::report::{Part, Plot, Point, Series, Table, Value};
use crate::stage::GuestKind;
use crate::stats::paired::Estimate;

const ABOUT: &str = "\
Guest A has virtqueues (vhost-user), guest B Xen rings; both are network namespaces whose NIC is \
`pvswitch nic`. The host is a network namespace, too, and has a TAP interface of a switch for \
each link. Both guests of the original study had Xen rings and differed in their systems; its \
netbsd-domU is compared with A, its linux-domU with B. MTU 1500 everywhere. Frames `mtu`: without \
segmentation offload, as in the original study; `gso`: with it, frames of up to 64 KiB. KB are \
1024 bytes.

Before: a switch for each guest, which writes each frame to the host's kernel through a TAP and \
reads from it; the kernel routes, or bridges with a Linux bridge. There are as many notifications \
as possible: a guest sends one frame at a time with one kick each (`--set tx-burst=1`), \
suppresses no calls (`--set suppress=flags`; on Xen rings `suppress=none`, poll policy event), \
and the switch reads one frame at a time from its TAP (`poll=napi:1`), so that each causes one \
call. Xen rings suppress calls only by index, so guest B is not called for each frame while it is \
awake.

After: up to 64 frames at once, one notification for each batch, none to a reader that is awake \
(event indices); both sides wait for events as before. As router, guest and TAP are \
cross-connected: the receiver of a frame is known beforehand, and long frames are read directly \
into its buffers. As bridge, one switch has both guests and the host's TAP: frames from guest to \
guest do not pass the host's kernel.";

const STOCK: &str = "\
Here both guests are virtual machines with a stock kernel's driver, and both have virtqueues. The \
descriptions of `nic` and of guest B's rings below do not apply: the variant before needs our own \
front end and cannot be measured. A stock driver does not count its kicks, and the switch sees \
several at once as one: kicks are left out.";

const COPIES: &str = "\
Copies are counted for each byte on its way from one end's kernel to the other's, excluding those \
of the ends' own sockets, NICs and drivers, which are the same before and after. From a guest's \
memory into another guest's: one. From a guest's memory to a TAP: one, by the kernel in `write`. \
From a TAP to a guest: two, one by the kernel in `read` and one by the switch; or one, if the \
switch counted the frame as read directly into the guest's buffers (`direct`). The kernel's \
bridge and router pass pages on and copy nothing.

Guest to host: one copy in both; before and after differ in notifications. Host to guest as \
router: two before, and after one for frames above 1518 bytes (so with `gso`, except frames that \
found too few buffers); smaller ones are read into private memory, because scattered reads cost \
more than the copy. As bridge, two in both: a switch that must read a frame to find its receiver \
cannot read it into the receiver's memory. Guest to guest as router: the frame passes the host's \
kernel in both, so after is the sum of both links, and with `mtu` differs in notifications only. \
Guest to guest as bridge: three before, and one after, with any rings.

Filter on: a table with a chain at each hook and no rule that matches a packet, with connection \
tracking (nftables); on the Linux bridge, packets pass it (bridge-nf-call-iptables). It copies \
nothing, while that of the original study copied each packet that came from its back end, to make \
it writable. Frames from guest to guest in one switch never pass the host's filter: filter in the \
guests, or let the host route.

Filter rewrite: the same table, and each packet from a guest is duplicated at its TAP, and then \
given another TTL, which its receiver sees. The two share their bytes until then, so the kernel \
copies them: the duplicate arrives at the end of a veth pair with the guest's TTL, and is counted \
and dropped there. A run in which one has the filter's TTL, or none arrives, fails. The copy is \
counted above, for data from guests; the host's own packets are not rewritten. Duplicate and veth \
pair cost more than the copy, before and after alike.";

const OUTSIDE: &str = "\
An external machine (box) is a namespace behind a veth pair at the host's bridge, with frames of \
the MTU. After, the TAP of the one switch is a port of that bridge. Its network stack receives in \
a thread of the kernel, and its CPU is not the host's; what it sends is processed up to the TAP in \
its own time. The original study reports dom0's CPU as shown by top, and no rates.";

const BUFFERS: &str = "\
In the original study a packet for a guest is in a cluster of dom0's, which was given to the guest \
as a page if it had a page of its own: \"to take full advantage\", clusters had to be of 4096 \
bytes in place of 2048. Here the switch copies into buffers that the guest provides, of either \
size; a frame of the MTU takes one. Buffers of 2048 bytes: `--set rx-buffer=2048` of guest A's \
NIC. Guest B's are pages, because it grants them.";

/// All of it.
pub fn parts(results: &Results) -> Vec<Part> {
    let text = |title: &str, body: &str| Part::Text { title: title.into(), body: body.into() };
    let mut parts = Vec::new();
    if GuestKind::is_machine(&results.machine.guest) {
        parts.push(text("Guests with a kernel of their own", STOCK));
    }
    parts.extend([
        text("The variants before and after", ABOUT),
        text("Copies of each pair", COPIES),
    ]);
    let cells = results.plan.cells(&Copies);
    if cells.iter().any(is_outside) {
        parts.push(text("The external machine", OUTSIDE));
    }
    let values = |name: &str| -> Vec<&str> {
        let axis = results.plan.axes.iter().find(|axis| axis.name == name);
        axis.map_or_else(Vec::new, |axis| axis.values.iter().map(String::as_str).collect())
    };
    for mode in values("mode") {
        for frames in values("frames") {
            let filters = values("filter");
            let sides = filters.iter().map(|filter| Side { results, mode, frames, filter });
            let sides: Vec<_> = sides.filter(|side| side.pairs().next().is_some()).collect();
            if sides.is_empty() {
                continue;
            }
            for side in &sides {
                parts.push(Part::Table(side.table()));
            }
            parts.push(Part::Plot(ratio_plot(&sides)));
            for side in &sides {
                parts.push(Part::Table(side.counts()));
            }
        }
    }
    let halves = cells.iter().filter(|cell| cell.get("variant") == HALVES);
    let halves: Vec<_> = halves.map(|cell| buffers(results, cell)).collect();
    if !halves.is_empty() {
        parts.push(text("Receive buffers", BUFFERS));
        parts.extend(halves.into_iter().map(Part::Table));
    }
    parts
}

/// Buffers of half a page against those of a page.
fn buffers(results: &Results, halves: &Cell) -> Table {
    let pages = halves.with("variant", "after");
    let row = |measure: &str, unit: &str, digits| {
        let value = |cell| Value::estimate(results.estimate(cell, measure), digits, "not measured");
        let ratio = results.ratio(&pages, halves, measure);
        vec![
            Value::Text(unit.into()),
            value(halves),
            value(&pages),
            Value::estimate(ratio, 2, "not measured"),
        ]
    };
    let columns = ["After", "Buffers of 2048", "Buffers of 4096", "4096/2048"];
    Table {
        title: format!("Receive buffers, {}", words(halves.get("pair"))),
        note: "Host as router, packet filter off, frames up to 1514 bytes. Medians.".into(),
        columns: columns.map(String::from).into(),
        rows: vec![
            row("kb_per_s", "KB/s", 0),
            row("host_ns_per_kb", "Host CPU per KB, ns", 0),
            row("a_cpu", "A's CPU, %", 0),
            row("copies", "Copies of each byte", 2),
        ],
        command: format!(
            "pvswitch lab run copies --only mode=router --only frames=mtu --only filter=off \
             --only pair={HALVES_PAIR}"
        ),
    }
}

/// One state of the host.
struct Side<'a> {
    results: &'a Results,
    mode: &'a str,
    frames: &'a str,
    filter: &'a str,
}

/// As a person writes it.
fn words(pair: &str) -> String {
    let end = |word: &str| if word.len() > 1 { word.to_string() } else { word.to_uppercase() };
    pair.split_once('-').map_or_else(String::new, |(a, b)| format!("{} → {}", end(a), end(b)))
}

impl Side<'_> {
    fn caption(&self) -> String {
        let frames =
            if self.frames == "gso" { "frames up to 64 KiB" } else { "frames up to 1514 bytes" };
        format!("Host as {}, packet filter {}, {frames}", self.mode, self.filter)
    }

    fn command(&self) -> String {
        let Self { mode, frames, filter, .. } = self;
        format!(
            "pvswitch lab run copies --only mode={mode} --only frames={frames} \
             --only filter={filter}"
        )
    }

    fn cell(&self, pair: &str, variant: &str) -> Cell {
        let pairs = [
            ("mode", self.mode),
            ("frames", self.frames),
            ("filter", self.filter),
            ("pair", pair),
            ("variant", variant),
        ];
        Cell(pairs.map(|(name, value)| (name.into(), value.into())).into())
    }

    fn pairs(&self) -> impl Iterator<Item = &'static str> + '_ {
        let cells = self.results.plan.cells(&Copies);
        let is = move |cell: &Cell, pair: &str| cell.outer() == self.cell(pair, "").outer();
        PAIRS.into_iter().filter(move |pair| cells.iter().any(|cell| is(cell, pair)))
    }

    /// The row of the original study, which measured rates with its host as router only.
    fn original(&self, pair: &str) -> Option<&'static original::Row> {
        let filter = |with: bool| if with { ipf(&self.results.plan) } else { "off" };
        let is = |row: &&original::Row| row.pair == pair && self.filter == filter(row.filter);
        original::TABLE.iter().find(is).filter(|_| self.mode == "router")
    }

    /// Why there is none.
    fn no_original(&self) -> Value {
        Value::Missing(
            if self.mode == "router" {
                "the original study's filter copied packets: see filter rewrite"
            } else {
                "the original study measured its host as router only"
            }
            .into(),
        )
    }

    fn value(&self, pair: &str, variant: &str, measure: &str, digits: usize) -> Value {
        let found = self.results.estimate(&self.cell(pair, variant), measure);
        Value::estimate(found, digits, "not measured")
    }

    /// After over before.
    fn ratio(&self, pair: &str, measure: &str) -> Option<Estimate> {
        self.results.ratio(&self.cell(pair, "after"), &self.cell(pair, "before"), measure)
    }

    fn ratio_value(&self, pair: &str, measure: &str) -> Value {
        Value::estimate(self.ratio(pair, measure), 2, "not measured")
    }

    /// The original study's layout, its figures beside ours.
    fn table(&self) -> Table {
        let rows = self.pairs().map(|pair| {
            let original = self.original(pair);
            let of_original = |of: fn(&original::Row) -> f64, digits| match original {
                Some(row) => Value::Original(of(row), digits),
                None => self.no_original(),
            };
            vec![
                Value::Text(words(pair)),
                original.map_or_else(
                    || self.no_original(),
                    |row| Value::Text(row.name.replace("->", "→")),
                ),
                of_original(|row| row.before, 0),
                of_original(|row| row.after, 0),
                of_original(|row| row.after / row.before, 2),
                self.value(pair, "before", "kb_per_s", 0),
                self.value(pair, "after", "kb_per_s", 0),
                self.ratio_value(pair, "kb_per_s"),
            ]
        });
        let rows = rows.collect();
        let columns = [
            "Pair",
            "Original: pair",
            "Original: before, KB/s",
            "Original: after, KB/s",
            "Original: after/before",
            "Before, KB/s",
            "After, KB/s",
            "After/before",
        ];
        Table {
            title: self.caption(),
            note: "Original: figures as published. Ours: medians.".into(),
            columns: columns.map(String::from).into(),
            rows,
            command: self.command(),
        }
    }

    /// Counts and CPU.
    fn counts(&self) -> Table {
        let mut rows = Vec::new();
        for pair in self.pairs() {
            for variant in ["before", "after"] {
                let value = |measure, digits| self.value(pair, variant, measure, digits);
                rows.push(vec![
                    Value::Text(words(pair)),
                    Value::Text(variant.into()),
                    value("copies", 2),
                    value("notifications_per_frame", 3),
                    value("kicks_per_frame", 3),
                    value("calls_per_frame", 3),
                    value("host_cpu", 0),
                    value("host_ns_per_kb", 0),
                    value("switch_cpu", 0),
                    value("a_cpu", 0),
                    value("b_cpu", 0),
                    value("drops", 0),
                ]);
            }
        }
        Table {
            title: format!("Counts and CPU: {}", self.caption()),
            note: "Frames are those between guests and switches, including acknowledgements. The \
                   host's CPU is that of its switches and tools, including the kernel's work for \
                   them."
                .into(),
            columns: [
                "Pair",
                "Variant",
                "Copies of each byte",
                "Notifications per frame",
                "Kicks per frame",
                "Calls per frame",
                "Host CPU, %",
                "Host CPU per KB, ns",
                "of it switches, %",
                "A's CPU, %",
                "B's CPU, %",
                "Frames lost, 1/s",
            ]
            .map(String::from)
            .into(),
            rows,
            command: self.command(),
        }
    }
}

/// After over before, ours and the original study's, with the filter on and off.
fn ratio_plot(sides: &[Side]) -> Plot {
    let Some(first) = sides.first() else { return Plot::default() };
    let has = |pair: &&str| sides.iter().any(|side| side.pairs().any(|of| of == *pair));
    let pairs: Vec<_> = PAIRS.into_iter().filter(has).collect();
    let mut series = Vec::new();
    for (colour, side) in sides.iter().enumerate() {
        let points = |of: &dyn Fn(f64, &str) -> Option<Point>| -> Vec<Point> {
            pairs.iter().enumerate().filter_map(|(x, pair)| of(x as f64, pair)).collect()
        };
        let line = |name: String, points, dashed| Series {
            name,
            points,
            colour,
            dashed,
            loose: true,
            ..Series::default()
        };
        let ours = points(&|x, pair| Some(Point::of(x, side.ratio(pair, "kb_per_s")?)));
        let original =
            points(&|x, pair| side.original(pair).map(|row| Point::at(x, row.after / row.before)));
        series.push(line(format!("filter {}", side.filter), ours, false));
        series.push(line(format!("original, filter {}", side.filter), original, true));
    }
    series.retain(|series| !series.points.is_empty());
    Plot {
        title: format!(
            "Throughput after over before, host as {}, frames {}",
            first.mode, first.frames
        ),
        file: format!("ratio-{}-{}", first.mode, first.frames),
        x: "pair".into(),
        categories: pairs.iter().map(|pair| words(pair)).collect(),
        y: "after / before".into(),
        level: Some(1.0),
        series,
        command: format!(
            "pvswitch lab run copies --only mode={} --only frames={}",
            first.mode, first.frames
        ),
        ..Plot::default()
    }
}
