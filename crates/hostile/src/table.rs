//! Table of all cases, and of the advisories that no peer can cause.

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

/// Cases on virtqueues.
static VIRTQUEUES: [Case; 25] = [
    guest(
        "loops",
        "descriptor chains with loops",
        &["passt 2025-01 (die and ASSERT)", "Cloud Hypervisor PR 8142"],
        rings::loops,
    )
    .only(&[Split]),
    guest(
        "outside",
        "descriptors, heads, tables and buffers out of range",
        &["CVE-2020-10725", "CVE-2019-14835", "row 5"],
        rings::outside,
    ),
    guest(
        "indirect",
        "indirect tables that are nested, empty, endless or inside a chain",
        &["Cloud Hypervisor PR 8142"],
        rings::indirect,
    ),
    guest(
        "index-jumps",
        "an available index that jumps forward and back",
        &["vm-virtio 0.6.1"],
        rings::index_jumps,
    )
    .only(&[Split]),
    guest(
        "directions",
        "writable descriptors on the tx ring, readable ones on the rx ring",
        &["Cloud Hypervisor PR 8142"],
        rings::directions,
    ),
    guest(
        "wraps",
        "invalid ids, wrap bits and event words on a packed ring",
        &["SPDK #3860"],
        rings::wraps,
    )
    .only(&[Packed]),
    guest("checksums", "checksum offsets outside the frame", &["CVE-2024-11614"], rings::checksums),
    guest(
        "offloads",
        "GSO size 0, unknown GSO types, wrong header lengths",
        &["virtio 1.3, 5.1.6.2"],
        rings::offloads,
    ),
    guest(
        "short-pieces",
        "headers split over many descriptors, chains shorter than a header, empty descriptors",
        &["CVE-2022-2132"],
        rings::short_pieces,
    ),
    guest(
        "many-pieces",
        "chains of one-byte descriptors that fill the ring",
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
        "receive buffers that overlap the rings and each other",
        &["CVE-2021-3748"],
        memory::overlapping,
    )
    .receives(),
    guest(
        "across-regions",
        "frames across regions that are not adjacent in the file",
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
    case(
        "punched-receive",
        Who::FrontEnd,
        "receive buffers of 127 one-byte pieces on pages that are hole-punched repeatedly",
        &["row 9"],
        BOTH,
        receive::punched,
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
        "receive chains of nearly twice the ring's size that are too small for a frame",
        &["row 5"],
        receive::never_fit,
    )
    .receives(),
    guest("segments", "GSO frames of 64-byte segments to every port", &["row 8"], flood::segments),
    guest(
        "notifications",
        "kicks without new buffers",
        &["row 13", "XSA-332"],
        flood::notifications,
    ),
    guest("returns", "a fault, then an immediate reconnect", &["row 14"], flood::returns),
    guest(
        "restarts",
        "rings stopped and started at full speed",
        &["Firecracker PR 6201"],
        flood::restarts,
    ),
    guest(
        "changed",
        "size, features and memory changed while rings run",
        &["Firecracker PR 6201", "CVE-2019-14818"],
        messages::changed_while_running,
    ),
];

/// Cases on the vhost-user socket.
static SOCKETS: [Case; 24] = [
    front(
        "many-regions",
        "508 extra regions on each of many ports, then files truncated",
        &["row 1"],
        memory::many_regions,
    )
    .ports(130),
    front(
        "blocking-descriptors",
        "lingering TCP sockets with full buffers in place of each descriptor",
        &["row 2"],
        descriptors::blocking,
    ),
    front(
        "other-descriptors",
        "full pipes, devices, directories and sockets as kick, call and memory",
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
        "the file of receive buffers truncated while the tx ring is idle",
        &["row 6"],
        memory::truncated_receive,
    )
    .receives(),
    front("truncated", "memory truncated while rings run", &["row 1"], memory::truncated),
    front("sparse", "16 TiB of a sparse file on each port", &["row 7"], memory::sparse).ports(16),
    front(
        "punched",
        "frames of 128 one-byte pieces on pages that are hole-punched repeatedly",
        &["row 9"],
        memory::punched,
    ),
    front("kicks-set", "SET_VRING_KICK in a loop", &["row 10"], flood::kicks_set),
    front("tables", "SET_MEM_TABLE in a loop", &["row 10"], flood::tables),
    front("rarp", "SEND_RARP in a loop, a new address each time", &["row 10"], flood::rarp),
    front("toggles", "rings disabled and enabled in a loop", &["row 10"], flood::toggles),
    front("questions", "requests whose replies are not read", &["row 10"], flood::questions),
    front(
        "connections",
        "connections that close without a message",
        &["row 10"],
        flood::connections,
    ),
    front(
        "map-races",
        "tables swapped on two ports while a thread truncates what they map",
        &["row 11"],
        memory::races,
    )
    .ports(2),
    front(
        "polled",
        "rings without a kick fd, which must be polled",
        &["row 13"],
        descriptors::polled,
    ),
    front(
        "many-descriptors",
        "32 descriptors with every message, and inside a message that never ends",
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
        "malformed messages: sizes, versions, replies, noise",
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
    front("bad-tables", "invalid memory tables", &["row 7"], memory::bad_tables),
    front(
        "bad-places",
        "rings outside memory, overlapping, unaligned; invalid sizes and bases",
        &["CVE-2020-10723", "CVE-2020-10724"],
        memory::bad_places,
    ),
    front(
        "bad-sizes",
        "invalid ring sizes and bases",
        &["CVE-2019-14818", "CVE-2020-10723"],
        messages::bad_sizes,
    ),
];

/// Cases on the socket with requests that other back-ends serve and this one does not.
static FOREIGN: [Case; 4] = [
    front(
        "no-such-rings",
        "ring numbers that are valid only when truncated to 8 or 16 bits",
        &["CVE-2020-10723"],
        messages::no_such_rings,
    ),
    front(
        "dirty-log",
        "a dirty log whose size and offset overflow",
        &["CVE-2020-10722", "CVE-2019-14835"],
        messages::dirty_log,
    ),
    front(
        "in-flight",
        "in-flight regions of any size, repeatedly",
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

/// Cases on Xen's rings.
static VIFS: [Case; 26] = [
    domain(
        "ring-jumps",
        "req_prod that jumps, on all three rings",
        &["XSA-39"],
        packets::index_jumps,
    ),
    domain(
        "fatal-packets",
        "packets that stop a vif, and continued use of its ring",
        &["XSA-90", "XSA-374"],
        packets::fatal,
    ),
    domain("too-many-slots", "packets of too many slots", &["XSA-39"], packets::too_many_slots),
    domain(
        "extras",
        "extra infos that are unknown, missing, endless, or with GSO size 0",
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
        "padding of responses checked for leaked data",
        &["XSA-216"],
        control::padding,
    ),
    domain(
        "hash-tables",
        "hash keys and tables with invalid sizes, offsets and queues",
        &["XSA-270"],
        control::hash_tables,
    ),
    domain(
        "hash-changes",
        "a different hash with every frame",
        &["CVE-2024-49936"],
        control::hash_changes,
    ),
    domain(
        "events",
        "events without new requests, on every channel",
        &["XSA-332", "row 13"],
        control::events,
    ),
    domain(
        "watched-keys",
        "keys that the switch watches, rewritten in a loop",
        &["XSA-349"],
        states::watched_keys,
    ),
    domain("bad-grants", "invalid grants", &["XSA-362", "XSA-367"], packets::bad_grants),
    domain(
        "overlapping-grants",
        "all slots in one page, overlapping each other and the ring",
        &["XSA-155"],
        packets::overlapping_grants,
    ),
    domain(
        "receive-bad-grants",
        "invalid grants on the rx ring",
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
        "headers split over many slots, the first shorter than any header",
        &["XSA-423"],
        packets::split_headers,
    ),
    domain(
        "tiny-slots",
        "eighteen slots with fewer bytes in total than the headers",
        &["XSA-432"],
        packets::tiny_slots,
    ),
    domain("empty-slots", "empty slots", &["XSA-448"], packets::empty_slots),
    domain(
        "vif-truncated",
        "memory of rings and of the grant table truncated",
        &["row 1", "XSA-396"],
        packets::truncated,
    ),
    domain(
        "states",
        "every state after every other, faster than the peer reads them",
        &["XSA-465"],
        states::states,
    ),
    domain(
        "come-and-go",
        "vifs that connect and disconnect during traffic",
        &["XSA-374", "XSA-465", "CVE-2026-100080", "row 14"],
        states::come_and_go,
    ),
    domain(
        "bad-keys",
        "keys without a valid page, channel or number: connecting fails half way",
        &["CVE-2026-99286", "CVE-2026-99287"],
        states::bad_keys,
    ),
    domain(
        "groups",
        "more multicast groups than the list holds, and invalid groups",
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
    "invalid lists of static grants: bad grants, bad queue, too long",
    &["XSA-367"],
    control::static_grants,
)];

/// All cases, in order.
pub fn cases() -> impl Iterator<Item = &'static Case> {
    VIRTQUEUES.iter().chain(&SOCKETS).chain(&FOREIGN).chain(&VIFS).chain(&STATICS)
}

/// The cases for a ring, in order.
pub fn cases_of(ring: Ring) -> impl Iterator<Item = &'static Case> {
    cases().filter(move |case| case.rings.contains(&ring))
}

/// Advisories that no peer of a switch can cause, and why.
pub const NOT_A_PEERS: [(&str, &str); 8] = [
    ("XSA-376", "affects front-ends, by their back-end"),
    ("XSA-380", "affects the hypervisor's grant tables"),
    ("XSA-391", "affects guests, by events from a back-end"),
    ("XSA-403", "affects front-ends: data in pages beside a frame"),
    ("XSA-405", "affects front-ends: an error path"),
    ("XSA-424", "affects a kernel's locks when it frees a packet"),
    ("row 15", "concerns two workers of the switch; tests of `switch`"),
    ("row 16", "concerns equal floods, which are legal; the study `fairness`"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_every_case_has_a_source() {
        let names: BTreeSet<_> = cases().map(|case| case.name).collect();
        assert_eq!(names.len(), cases().count());
        for case in cases() {
            assert!(!case.source.is_empty() && !case.rings.is_empty() && case.ports > 0);
            let is_plain = |c: char| c.is_ascii_lowercase() || c == '-';
            assert!(case.name.chars().all(is_plain), "{}", case.name);
            assert!(case.what.len() <= 100, "{}", case.name);
        }
        for ring in Ring::ALL {
            assert!(cases_of(ring).count() > 20, "{ring}");
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
