//! Cases on virtqueues, and on the vhost-user socket.

use super::{BOTH, case, front, guest};
use crate::Ring::{Packed, Split};
use crate::virtio::{descriptors, flood, memory, messages, racing, receive, rings};
use crate::{Case, Who};

/// Cases on virtqueues.
pub(super) static VIRTQUEUES: [Case; 27] = [
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
    guest(
        "flooding",
        "valid frames as fast as the ring takes them: a control for cases that send frames",
        &["row 3"],
        rings::flooding,
    ),
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
    case(
        "racing",
        Who::FrontEnd,
        "threads rewrite rings, headers, payload and the memory table while they are read",
        &["kept: races", "XSA-155", "CVE-2018-1059"],
        BOTH,
        racing::racing,
    )
    .receives()
    .ports(2),
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
    // Its name is that of committed runs.
    guest("silent", "a receiver that posts no buffer", &["row 3"], receive::posts_none).receives(),
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
pub(super) static SOCKETS: [Case; 25] = [
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
    front(
        "punching",
        "pages that are in no frame are hole-punched repeatedly: a control for punched",
        &["row 9"],
        memory::punching,
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
pub(super) static FOREIGN: [Case; 4] = [
    front(
        "no-such-rings",
        "ring numbers that are valid only when truncated to 8 or 16 bits",
        &["CVE-2020-10723"],
        messages::no_such_rings,
    ),
    front(
        "dirty-log",
        "dirty logs whose size and offset overflow, and logs truncated in use",
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
