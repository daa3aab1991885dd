//! All cases, and the advisories that are none of a peer's doing.

use crate::Ring::{Packed, Socket, Split, Xen};
use crate::virtio::{descriptors, flood, memory, messages, receive, rings};
use crate::xen::{control, packets, states};
use crate::{Attack, Case, Error, Ring, Who};

type Play = fn(&mut Attack<'_>) -> Result<(), Error>;

const BOTH: &[Ring] = &[Split, Packed];

const fn case(
    name: &'static str,
    who: Who,
    what: &'static str,
    source: &'static [&'static str],
    rings: &'static [Ring],
    play: Play,
) -> Case {
    Case { name, who, what, source, rings, ports: 1, receives: false, play }
}

const fn guest(
    name: &'static str,
    what: &'static str,
    source: &'static [&'static str],
    play: Play,
) -> Case {
    case(name, Who::Guest, what, source, BOTH, play)
}

const fn front(
    name: &'static str,
    what: &'static str,
    source: &'static [&'static str],
    play: Play,
) -> Case {
    case(name, Who::FrontEnd, what, source, &[Socket], play)
}

const fn domain(
    name: &'static str,
    what: &'static str,
    source: &'static [&'static str],
    play: Play,
) -> Case {
    case(name, Who::Domain, what, source, &[Xen], play)
}

impl Case {
    const fn receives(self) -> Self {
        Self { receives: true, ..self }
    }

    const fn ports(self, ports: u16) -> Self {
        Self { ports, ..self }
    }

    const fn only(self, rings: &'static [Ring]) -> Self {
        Self { rings, ..self }
    }
}

/// Of virtqueues.
static VIRTQUEUES: [Case; 24] = [
    guest(
        "loops",
        "descriptor chains that come back to where they were",
        &["passt 2025-01 (die and ASSERT)", "Cloud Hypervisor PR 8142"],
        rings::loops,
    )
    .only(&[Split]),
    guest(
        "outside",
        "descriptors, heads, tables and buffers outside of what there is",
        &["CVE-2020-10725", "CVE-2019-14835", "row 5"],
        rings::outside,
    ),
    guest(
        "indirect",
        "indirect tables that are nested, empty, endless or within a chain",
        &["Cloud Hypervisor PR 8142"],
        rings::indirect,
    ),
    guest(
        "index-jumps",
        "an available index that jumps, forward and back",
        &["vm-virtio 0.6.1"],
        rings::index_jumps,
    )
    .only(&[Split]),
    guest(
        "directions",
        "writable descriptors to be sent, readable ones to be received into",
        &["Cloud Hypervisor PR 8142"],
        rings::directions,
    ),
    guest(
        "wraps",
        "ids, wrap bits and event words of a packed ring that cannot be",
        &["SPDK #3860"],
        rings::wraps,
    )
    .only(&[Packed]),
    guest(
        "checksums",
        "checksums that start or lie outside of the frame",
        &["CVE-2024-11614"],
        rings::checksums,
    ),
    guest(
        "offloads",
        "segments of nothing, unknown kinds of GSO, header lengths that lie",
        &["virtio 1.3, 5.1.6.2"],
        rings::offloads,
    ),
    guest(
        "short-pieces",
        "headers over many descriptors, chains too short for one, pieces of no length",
        &["CVE-2022-2132"],
        rings::short_pieces,
    ),
    guest(
        "many-pieces",
        "chains of as many one-byte pieces as the ring has descriptors",
        &["row 9"],
        rings::many_pieces,
    ),
    guest(
        "rewritten",
        "a thread rewrites descriptors, indices and frames while they are used",
        &["kept: races", "CVE-2018-1059"],
        rings::rewritten,
    ),
    guest(
        "overlapping",
        "receive buffers that are the rings themselves, and pieces over each other",
        &["CVE-2021-3748"],
        memory::overlapping,
    )
    .receives(),
    guest(
        "across-regions",
        "frames over the border of regions that are not neighbours in the file",
        &["CVE-2018-1059"],
        memory::across_regions,
    ),
    guest(
        "dripping",
        "a receiver that posts one buffer every 45 ms",
        &["row 3"],
        receive::dripping,
    )
    .receives(),
    guest("silent", "a receiver that posts no buffer", &["row 3"], receive::silent).receives(),
    guest(
        "slow",
        "a receiver that posts a tenth of the buffers it needs",
        &["row 3"],
        receive::slow,
    )
    .receives(),
    guest(
        "tiny-buffers",
        "receive buffers of 1 to 13 bytes",
        &["CVE-2021-3748"],
        receive::tiny_buffers,
    )
    .receives(),
    guest(
        "long-chains",
        "chains of nearly twice the ring, direct and then an indirect table",
        &["row 5"],
        receive::long_sent,
    ),
    guest(
        "never-fit",
        "receive buffers of nearly twice the ring's descriptors that no frame fits",
        &["row 5"],
        receive::never_fit,
    )
    .receives(),
    guest("segments", "GSO frames of 64-byte segments to every port", &["row 8"], flood::segments),
    guest(
        "notifications",
        "kicks without anything to see",
        &["row 13", "XSA-332"],
        flood::notifications,
    ),
    guest("returns", "a fault, and back again at once", &["row 14"], flood::returns),
    guest(
        "restarts",
        "rings stopped and started as fast as that goes",
        &["Firecracker PR 6201"],
        flood::restarts,
    ),
    guest(
        "changed",
        "size, features and memory changed under rings that run",
        &["Firecracker PR 6201", "CVE-2019-14818"],
        messages::changed_while_running,
    ),
];

/// Of the socket.
static SOCKETS: [Case; 24] = [
    front(
        "many-regions",
        "508 more regions on each of many ports, then files truncated",
        &["row 1"],
        memory::many_regions,
    )
    .ports(130),
    front(
        "blocking-descriptors",
        "TCP sockets that linger and take no byte, in place of each descriptor",
        &["row 2"],
        descriptors::blocking,
    ),
    front(
        "other-descriptors",
        "full pipes, devices, folders and sockets as kick, call and memory",
        &["row 2"],
        descriptors::other_kinds,
    ),
    front(
        "spanning-chains",
        "chains whose buffers each span 508 adjacent regions",
        &["row 4"],
        memory::spanning_chains,
    ),
    front(
        "truncated-receive",
        "the file of receive buffers truncated while the transmit ring sleeps",
        &["row 6"],
        memory::truncated_receive,
    )
    .receives(),
    front("truncated", "memory truncated under rings that run", &["row 1"], memory::truncated),
    front("sparse", "16 TiB of a sparse file on each port", &["row 7"], memory::sparse).ports(16),
    front(
        "punched",
        "frames of 128 one-byte pieces on pages that are made holes again and again",
        &["row 9"],
        memory::punched,
    ),
    front("kicks-set", "SET_VRING_KICK in a loop", &["row 10"], flood::kicks_set),
    front("tables", "SET_MEM_TABLE in a loop", &["row 10"], flood::tables),
    front("rarp", "SEND_RARP in a loop, a new address each time", &["row 10"], flood::rarp),
    front("toggles", "rings disabled and enabled in a loop", &["row 10"], flood::toggles),
    front("questions", "questions whose answers are not read", &["row 10"], flood::questions),
    front("connections", "connections that say nothing and go", &["row 10"], flood::connections),
    front(
        "map-races",
        "tables swapped on two ports while a thread truncates what they map",
        &["row 11"],
        memory::races,
    )
    .ports(2),
    front("polled", "rings without a kick, to be polled", &["row 13"], descriptors::polled),
    front(
        "many-descriptors",
        "32 descriptors beside every message, and in the middle of one that never ends",
        &["CVE-2020-10726", "CVE-2019-14818"],
        descriptors::many,
    ),
    front(
        "leaks",
        "SET_VRING_NUM, CALL and ERR of a running ring, a new descriptor each time",
        &["CVE-2019-14818"],
        descriptors::leaks,
    ),
    front(
        "garbage",
        "bytes that are no messages: sizes, versions, replies, noise",
        &["kept: 53 message sequences"],
        messages::garbage,
    ),
    front(
        "every-message",
        "every request in every state, with payloads of all lengths",
        &["kept: 53 message sequences", "CVE-2020-10723"],
        messages::every_message,
    ),
    front(
        "half-messages",
        "connections that end in the middle of a message",
        &["kept: 53 message sequences"],
        messages::half_messages,
    ),
    front("bad-tables", "memory tables that cannot be", &["row 7"], memory::bad_tables),
    front(
        "bad-places",
        "rings outside memory, over each other, unaligned; sizes and bases that are none",
        &["CVE-2020-10723", "CVE-2020-10724"],
        memory::bad_places,
    ),
    front(
        "bad-sizes",
        "ring sizes and bases that no ring has",
        &["CVE-2019-14818", "CVE-2020-10723"],
        messages::bad_sizes,
    ),
];

/// Of the socket: what other back-ends serve and this one does not.
static FOREIGN: [Case; 4] = [
    front(
        "no-such-rings",
        "rings that there are not, by numbers cut to 8 or 16 bits",
        &["CVE-2020-10723"],
        messages::no_such_rings,
    ),
    front(
        "dirty-log",
        "a log of dirty pages whose size and offset overflow",
        &["CVE-2020-10722", "CVE-2019-14835"],
        messages::dirty_log,
    ),
    front(
        "in-flight",
        "in-flight regions of any size, again and again",
        &["CVE-2020-10726"],
        messages::in_flight,
    ),
    front(
        "crypto",
        "sessions of a crypto device",
        &[
            "CVE-2020-10724",
            "CVE-2020-14374",
            "CVE-2020-14375",
            "CVE-2020-14376",
            "CVE-2020-14377",
            "CVE-2020-14378",
        ],
        messages::crypto,
    ),
];

/// Of Xen's rings.
static VIFS: [Case; 26] = [
    domain(
        "ring-jumps",
        "req_prod that jumps, on all three rings",
        &["XSA-39"],
        packets::index_jumps,
    ),
    domain(
        "fatal-packets",
        "packets that end a vif, and a ring that is used on",
        &["XSA-90", "XSA-374"],
        packets::fatal,
    ),
    domain("too-many-slots", "packets of too many slots", &["XSA-39"], packets::too_many_slots),
    domain(
        "extras",
        "extra infos that are unknown, missing, without end, or of segments of nothing",
        &["XSA-90"],
        packets::extras,
    ),
    domain(
        "double-fetch",
        "a thread rewrites slots and pages between two reads",
        &["XSA-155"],
        packets::double_fetch,
    ),
    domain(
        "padding",
        "slots read again for what answers hold behind their status",
        &["XSA-216"],
        control::padding,
    ),
    domain(
        "hash-tables",
        "hash keys and tables whose sizes, offsets and queues cannot be",
        &["XSA-270"],
        control::hash_tables,
    ),
    domain(
        "hash-changes",
        "another hash with every frame",
        &["CVE-2024-49936"],
        control::hash_changes,
    ),
    domain(
        "events",
        "events without anything to see, on every channel",
        &["XSA-332", "row 13"],
        control::events,
    ),
    domain(
        "watched-keys",
        "keys that the switch watches, rewritten in a loop",
        &["XSA-349"],
        states::watched_keys,
    ),
    domain("bad-grants", "grants that are none", &["XSA-362", "XSA-367"], packets::bad_grants),
    domain(
        "overlapping-grants",
        "all slots in one page, over each other and over the ring",
        &["XSA-155"],
        packets::overlapping_grants,
    ),
    domain(
        "receive-bad-grants",
        "pages to receive into that are no grants",
        &["XSA-362", "XSA-374"],
        packets::receive_bad_grants,
    )
    .receives(),
    domain(
        "vif-dripping",
        "a receiver that posts one page every 45 ms",
        &["XSA-392", "row 3"],
        packets::dripping,
    )
    .receives(),
    domain("vif-silent", "a receiver that posts no page", &["XSA-392", "row 3"], packets::silent)
        .receives(),
    domain(
        "vif-slow",
        "a receiver that posts a tenth of the pages it needs",
        &["XSA-392", "row 3"],
        packets::slow,
    )
    .receives(),
    domain(
        "revoked",
        "grants revoked and given again while they are copied from",
        &["XSA-396"],
        packets::revoked,
    ),
    domain(
        "split-headers",
        "headers over many slots, the first shorter than any header",
        &["XSA-423"],
        packets::split_headers,
    ),
    domain(
        "tiny-slots",
        "eighteen slots that are together shorter than the headers",
        &["XSA-432"],
        packets::tiny_slots,
    ),
    domain("empty-slots", "slots of no bytes", &["XSA-448"], packets::empty_slots),
    domain(
        "vif-truncated",
        "memory of rings and of the grant table taken away",
        &["row 1", "XSA-396"],
        packets::truncated,
    ),
    domain(
        "states",
        "every state after every other, faster than anyone looks",
        &["XSA-465"],
        states::states,
    ),
    domain(
        "come-and-go",
        "vifs that connect and go in the middle of traffic",
        &["XSA-374", "XSA-465", "CVE-2026-100080", "row 14"],
        states::come_and_go,
    ),
    domain(
        "bad-keys",
        "keys that name no page, channel or number: connecting fails half way",
        &["CVE-2026-99286", "CVE-2026-99287"],
        states::bad_keys,
    ),
    domain(
        "groups",
        "more multicast groups than a list takes, and groups that are none",
        &["CVE-2026-100081"],
        control::groups,
    ),
    domain(
        "commits",
        "60 connections to xenstore with 128 watches each, and commits of 900 nodes",
        &["row 12", "XSA-349"],
        states::commits,
    ),
];

/// Static grants of the control ring.
static STATICS: [Case; 1] = [domain(
    "static-grants",
    "lists of pages to be kept mapped that are no grants, of no queue, too long",
    &["XSA-367"],
    control::static_grants,
)];

/// All cases, in order.
pub fn cases() -> impl Iterator<Item = &'static Case> {
    VIRTQUEUES.iter().chain(&SOCKETS).chain(&FOREIGN).chain(&VIFS).chain(&STATICS)
}

/// Advisories of the references that no peer of a switch can cause, and why.
pub const NOT_A_PEERS: [(&str, &str); 8] = [
    ("XSA-376", "of front-ends: what a back-end does to them"),
    ("XSA-380", "of the hypervisor's grant tables"),
    ("XSA-391", "of guests: events that a back-end sends them"),
    ("XSA-403", "of front-ends: what pages hold beside a frame"),
    ("XSA-405", "of front-ends: an error path of theirs"),
    ("XSA-424", "of a kernel's locks when it frees a packet"),
    ("row 15", "of two workers of the switch's own; tests of `switch`"),
    ("row 16", "of equal floods, who do nothing that is not allowed; the study `fairness`"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_every_case_says_where_it_comes_from() {
        let names: BTreeSet<_> = cases().map(|case| case.name).collect();
        assert_eq!(names.len(), cases().count());
        for case in cases() {
            assert!(!case.source.is_empty() && !case.rings.is_empty() && case.ports > 0);
            let is_plain = |c: char| c.is_ascii_lowercase() || c == '-';
            assert!(case.name.chars().all(is_plain), "{}", case.name);
            assert!(case.what.len() <= 100, "{}", case.name);
        }
        for ring in Ring::ALL {
            assert!(crate::cases_of(ring).count() > 20, "{ring}");
            assert_eq!(ring.name().parse(), Ok(ring));
        }
    }

    /// Every advisory of the two references has a case, or a reason to have none; every row of
    /// issue 14's first table that a peer can cause has one.
    #[test]
    fn every_advisory_of_the_references_is_a_case_or_not_a_peers() {
        let advisories = [
            "CVE-2018-1059",
            "CVE-2019-14818",
            "CVE-2020-10722",
            "CVE-2020-10723",
            "CVE-2020-10724",
            "CVE-2020-10725",
            "CVE-2020-10726",
            "CVE-2020-14374",
            "CVE-2020-14375",
            "CVE-2020-14376",
            "CVE-2020-14377",
            "CVE-2020-14378",
            "CVE-2022-2132",
            "CVE-2024-11614",
            "SPDK #3860",
            "CVE-2021-3748",
            "CVE-2019-14835",
            "vm-virtio 0.6.1",
            "Firecracker PR 6201",
            "Cloud Hypervisor PR 8142",
            "passt 2025-01 (die and ASSERT)",
            "XSA-39",
            "XSA-90",
            "XSA-155",
            "XSA-216",
            "XSA-270",
            "XSA-332",
            "XSA-349",
            "XSA-362",
            "XSA-367",
            "XSA-374",
            "XSA-376",
            "XSA-380",
            "XSA-391",
            "XSA-392",
            "XSA-396",
            "XSA-403",
            "XSA-405",
            "XSA-423",
            "XSA-424",
            "XSA-432",
            "XSA-448",
            "XSA-465",
            "CVE-2024-49936",
            "CVE-2026-99286",
            "CVE-2026-99287",
            "CVE-2026-100080",
            "CVE-2026-100081",
        ];
        let rows = (1..=14).map(|row| format!("row {row}"));
        for wanted in advisories.iter().map(|name| name.to_string()).chain(rows) {
            let is_case = cases().any(|case| case.source.contains(&wanted.as_str()));
            let is_not = NOT_A_PEERS.iter().any(|(name, _)| *name == wanted);
            assert!(is_case != is_not, "{wanted}");
        }
    }
}
