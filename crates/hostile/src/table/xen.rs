//! Cases on Xen's rings.

use super::domain;
use crate::Case;
use crate::xen::{control, packets, racing, states};

/// Cases on Xen's rings.
pub(super) static VIFS: [Case; 27] = [
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
        "vif-racing",
        "threads rewrite rings, grants, headers and payload while they are read",
        &["kept: races", "XSA-155"],
        racing::racing,
    )
    .receives()
    .ports(2),
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
    domain(
        "vif-silent",
        "a receiver that posts no page",
        &["XSA-392", "row 3"],
        packets::posts_none,
    )
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
pub(super) static STATICS: [Case; 1] = [domain(
    "static-grants",
    "invalid lists of static grants: bad grants, bad queue, too long",
    &["XSA-367"],
    control::static_grants,
)];
