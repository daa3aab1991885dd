//! Settings of the whole switch: options of `run`, and keys of the file.

use super::{Choice, Entry, Given, Live, Type};

/// Most workers: their number fits a queue's word in the tables of the pool.
pub const WORKERS_MAX: u64 = 63;

/// Which worker serves which queue.
pub const PLACEMENTS: &[Choice] = &[
    Choice::word("single", "worker 0 serves everything"),
    Choice::word("group", "a port joins the worker with the fewest ports")
        .more("; all its queues go there"),
    Choice::word("per-port", "each queue of a port goes to the next worker")
        .more(": queue *i* of port *p* to worker (*p* + *i*) modulo N"),
    Choice::word("balanced", "queues start on worker 0 and move by measured load").more(
        ": away from a worker above 70 % load, onto fewer workers when one is below 25 %; between \
         overloaded workers, so that ports with backlog get worker time in proportion to weight \
         ([0009](design/0009-workers.md))",
    ),
];

/// How the kernel schedules workers.
pub const PRIORITIES: &[Choice] = &[
    Choice::word("auto", "`high` if there are `xen:` ports at the start and it is permitted")
        .more(" (CAP_SYS_NICE, or RLIMIT_NICE 40; started with niceness 0); otherwise `normal`"),
    Choice::word("normal", "as the process was started"),
    Choice::word("high", "niceness -20: preferred to all other ordinary processes")
        .more(". Needs CAP_SYS_NICE, or RLIMIT_NICE 40 (`LimitNICE=-20`)"),
    Choice::word("realtime", "SCHED_RR, priority 1: ahead of all ordinary processes").more(
        ". A worker that always has work sleeps for 1/16 of the time, 60 µs at a time, or the \
         kernel would stop it for longer. Needs CAP_SYS_NICE, or RLIMIT_RTPRIO 1 \
         (`LimitRTPRIO=1`). On a CPU that other processes need, guests that send without pause \
         leave them that sixteenth; so does `poll=spin`",
    ),
];

/// All entries.
pub const TABLE: &[Entry] = &[
    Entry::new("poll", Type::Policy, "adaptive", "when guests' queues are polled, below")
        .live(Live::Whole),
    Entry::new("call", Type::Policy, "event", "when guests are notified of frames, below")
        .live(Live::Whole),
    Entry::new("workers", Type::Number(1, WORKERS_MAX), "1", "forwarding threads, 1 to 63"),
    Entry::new(
        "placement",
        Type::Choice(PLACEMENTS),
        "balanced",
        "which worker serves which queue, below",
    )
    .live(Live::Whole),
    Entry::new("cpus", Type::Cpus, "not pinned", "CPUs to pin workers to, in order: 1 or 1,2")
        .more("; repeated if there are more workers; in the file a list, `[1, 2]`"),
    Entry::new(
        "priority",
        Type::Choice(PRIORITIES),
        "auto",
        "how the kernel schedules workers relative to other processes, below",
    ),
    Entry::new(
        "sandbox",
        Type::Choice(&[
            Choice::word("on", "threads can make few system calls, and write no files"),
            Choice::word("seccomp", "the same without Landlock, which some kernels lack"),
            Choice::word("off", "threads keep all rights of the process"),
        ]),
        "on",
        "whether threads are confined to the system calls and files that they need",
    )
    .more(
        "; `seccomp`: without Landlock, for kernels that lack it ([0042](design/0042-sandbox.md))",
    ),
    Entry::new(
        "forward",
        Type::Choice(&[
            Choice::word("switch", "learning Ethernet switch"),
            Choice::word("cross", "connects ports 1 and 2, 3 and 4, ...; no look-up"),
        ]),
        "switch",
        "how frames are forwarded",
    )
    .more(": `switch` learns; `cross` connects ports 1 and 2, 3 and 4, ... without look-up"),
    Entry::new(
        "control",
        Type::Text("PATH"),
        "`/run/pvswitch/control.sock` or `$XDG_RUNTIME_DIR/pvswitch.sock`",
        "control socket, for ctl, top and capture",
    )
    .more(
        ", [below](#sockets-and-rights); if it is in use, the default causes a warning, a given \
         path an error. `fd=NAME`: a socket passed by systemd \
         ([installation](install.md#socket-activation))",
    ),
    Entry::new(
        "control-mode",
        Type::Mode,
        "0600; with a group 0660",
        "who may connect to the control socket: permissions in octal",
    ),
    Entry::new("control-group", Type::Text("GROUP"), "unchanged", "group of the control socket")
        .more(
            ", a name or number; its members may read: `show`, `stats`, `why`, `fdb`, `events`, \
             `top`",
        ),
    Entry::new(
        "control-write",
        Type::Choice(&[
            Choice::word("owner", "its user and root"),
            Choice::word("group", "members of control-group, too"),
        ]),
        "owner",
        "who may change the switch and capture frames",
    ),
    Entry::new(
        "http",
        Type::Address,
        "not served",
        "counters and state by HTTP, at HOST:PORT, PORT (on 127.0.0.1), unix:PATH or fd=NAME",
    )
    .more(
        "; no authentication ([observability](observability.md#http)). `fd=NAME`: a TCP or Unix \
         socket passed by systemd ([installation](install.md#socket-activation))",
    ),
    Entry::new(
        "http-mode",
        Type::Mode,
        "0600; with a group 0660",
        "who may connect to --http unix:PATH: permissions in octal",
    ),
    Entry::new("http-group", Type::Text("GROUP"), "unchanged", "group of --http unix:PATH")
        .more(", a name or number: that of a proxy, for example"),
    Entry::new(
        "log-format",
        Type::Choice(&[
            Choice::word("human", "human-readable lines"),
            Choice::word("json", "one JSON object per line"),
            Choice::word("journald", "journald's fields, sent to journald"),
        ]),
        "human",
        "log format",
    )
    .more(" ([observability](observability.md#log))"),
    Entry::new("duration", Type::Seconds, "indefinitely", "stop after this many seconds")
        .given(Given::CommandLine),
    Entry::new("quiet", Type::Flag, "off", "do not print how to attach guests")
        .given(Given::CommandLine),
    Entry::new(
        "ageing",
        Type::Number(0, u32::MAX as u64),
        "300",
        "seconds after which an idle address is removed; 0: never",
    )
    .given(Given::File),
    Entry::new(
        "addresses_per_port",
        Type::Number(0, u32::MAX as u64),
        "4096",
        "maximum number of addresses learned from one port",
    )
    .given(Given::File),
    Entry::new("include", Type::Text("DIR"), "none", "directory of further files: each `*.toml`")
        .given(Given::File)
        .more(
            ", in the order of their names, with `[port.NAME]` and `[static]`; relative to the \
             file ([configuration](configuration.md#include-directory))",
        ),
    Entry::new(
        "static",
        Type::Table("[static]"),
        "none",
        "static addresses, never learned or aged",
    )
    .given(Given::File)
    .more(
        ": `\"02:00:00:00:00:01\" = \"vm1\"`, on VLAN 5 `\"02:00:00:00:00:01/5\"` (`ctl fdb add` \
         at run time)",
    ),
    Entry::new("port", Type::Table("NAME=KIND:ARG"), "none", "a port").more("; may be repeated"),
];
