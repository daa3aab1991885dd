//! Kinds of ports, and their options.

pub use super::check::{check_rules, vif};
use super::check::{directory, interface, interface_name, path, socket};
use super::{Choice, Entry, Live, Type};
use crate::queues::QUEUES_MAX;

/// Kind of peer or interface that a port attaches to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A guest's virtio-net device.
    VhostUser,
    /// A peer at a stream socket, in QEMU's framing.
    Stream,
    /// A peer at a datagram socket.
    Dgram,
    /// The host's network by passt.
    Passt,
    /// A TAP interface of the host.
    Tap,
    /// Any interface of the host, by packet sockets.
    AfPacket,
    /// Queues of an interface of the host, by AF_XDP sockets.
    AfXdp,
    /// A Xen guest's vif, or all of them.
    Xen,
    /// A vif without Xen.
    XenLocal,
    /// Nothing: drops everything.
    Null,
}

/// Name and argument of a kind of port.
#[derive(Clone, Copy, Debug)]
pub struct KindEntry {
    /// The kind.
    pub kind: Kind,
    /// Its name, before the colon and as `kind` in the file.
    pub name: &'static str,
    /// Forms of its argument as help shows them; empty: it has no argument.
    pub args: &'static [&'static str],
    /// The argument's key in the file.
    pub file: &'static str,
    /// Checks an argument; the error says what is wrong.
    pub check: fn(&str) -> Result<(), String>,
    /// One sentence that says what it attaches to, without a full stop.
    pub help: &'static str,
}

/// All kinds.
pub const KINDS: [KindEntry; 10] = [
    KindEntry {
        kind: Kind::VhostUser,
        name: "vhost-user",
        args: &["SOCKET", "fd=NAME"],
        file: "socket",
        check: socket,
        help: "a virtual machine's virtio-net device, by vhost-user; fd=NAME: a socket passed \
               by systemd",
    },
    KindEntry {
        kind: Kind::Stream,
        name: "stream",
        args: &["SOCKET", "fd=NAME"],
        file: "socket",
        check: socket,
        help: "a peer at a stream socket, in QEMU's framing: QEMU (`-netdev stream`), passt, \
               libkrun; fd=NAME: a socket passed by systemd",
    },
    KindEntry {
        kind: Kind::Dgram,
        name: "dgram",
        args: &["SOCKET"],
        file: "socket",
        check: path,
        help: "a peer at a datagram socket, one frame a datagram: QEMU (`-netdev dgram`); needs \
               peer=",
    },
    KindEntry {
        kind: Kind::Passt,
        name: "passt",
        args: &[],
        file: "",
        check: |_| Ok(()),
        help: "the host's network without privileges, through passt, which the switch starts",
    },
    KindEntry {
        kind: Kind::Tap,
        name: "tap",
        args: &["IFNAME", "fd=NAME"],
        file: "interface",
        check: interface,
        help: "a TAP interface of the host, existing or created; fd=NAME: one \
               whose open queues are inherited",
    },
    KindEntry {
        kind: Kind::AfPacket,
        name: "af-packet",
        args: &["IFNAME"],
        file: "interface",
        check: interface_name,
        help: "an existing Ethernet interface of the host, all of whose frames it receives and \
               sends",
    },
    KindEntry {
        kind: Kind::AfXdp,
        name: "af-xdp",
        args: &["IFNAME"],
        file: "interface",
        check: interface_name,
        help: "queues of an existing Ethernet interface of the host, whose frames do not reach the \
               kernel's stack",
    },
    KindEntry {
        kind: Kind::Xen,
        name: "xen",
        args: &["DOMID/DEVID", "auto"],
        file: "vif",
        check: |arg| vif(arg).map(drop),
        help: "a vif of a Xen guest; auto: every vif of this back-end domain",
    },
    KindEntry {
        kind: Kind::XenLocal,
        name: "xen-local",
        args: &["DIR"],
        file: "directory",
        check: directory,
        help: "a vif without Xen, for pvswitch nic and gen",
    },
    KindEntry {
        kind: Kind::Null,
        name: "null",
        args: &[],
        file: "",
        check: |_| Ok(()),
        help: "drops everything",
    },
];

/// Kinds of later versions, for the error message.
pub const KINDS_LATER: [&str; 1] = ["pcap"];

impl Kind {
    /// Its entry.
    pub fn entry(self) -> &'static KindEntry {
        let found = KINDS.iter().find(|entry| entry.kind == self);
        found.expect("every kind has an entry")
    }

    /// The options that it accepts: its own first, then those of every kind.
    pub fn options(self) -> impl Iterator<Item = &'static Entry> + Clone {
        let own = TABLE.iter().filter(move |entry| entry.kinds.contains(&self));
        own.chain(common())
    }
}

/// The options of every kind of port.
pub fn common() -> impl Iterator<Item = &'static Entry> + Clone {
    TABLE.iter().filter(|entry| entry.kinds.is_empty())
}

const VHOST_USER: &[Kind] = &[Kind::VhostUser];
const TAP: &[Kind] = &[Kind::Tap];
const AF_PACKET: &[Kind] = &[Kind::AfPacket];
const AF_XDP: &[Kind] = &[Kind::AfXdp];
/// Kinds on an interface whose carrier is that of a network.
const UPLINK: &[Kind] = &[Kind::AfPacket, Kind::AfXdp];
const XEN: &[Kind] = &[Kind::Xen, Kind::XenLocal];
/// Words of `tap=`.
const VIF_TAP: Type = Type::Choice(&[
    Choice::word("off", "its frames are switched"),
    Choice::word("vif", "its frames go to a TAP of its own"),
]);

/// Kinds with a Unix socket.
const SOCKET: &[Kind] = &[Kind::VhostUser, Kind::Stream, Kind::Dgram, Kind::XenLocal];
const DGRAM: &[Kind] = &[Kind::Dgram];
const PASST: &[Kind] = &[Kind::Passt];
/// Kinds that listen or connect.
const CONNECTED: &[Kind] = &[Kind::VhostUser, Kind::Stream];

const QUEUES: Type = Type::Number(1, QUEUES_MAX as u64);
const ON_OFF: Type = Type::Choice(&[Choice::word("on", ""), Choice::word("off", "")]);
const REPORT_BLOCK: Type = Type::Choice(&[Choice::word("report", ""), Choice::word("block", "")]);
const BOTH_IN_OUT: Type =
    Type::Choice(&[Choice::word("both", ""), Choice::word("in", ""), Choice::word("out", "")]);
const OFF_ON: Type = Type::Choice(&[Choice::word("off", ""), Choice::word("on", "")]);

/// Features of virtio-net that a port can leave out, as logs and `ctl show` name them.
pub const VIRTIO_FEATURES: &[&str] = &[
    "CSUM",
    "GUEST_CSUM",
    "MTU",
    "MAC",
    "GUEST_TSO4",
    "GUEST_TSO6",
    "GUEST_ECN",
    "HOST_TSO4",
    "HOST_TSO6",
    "HOST_ECN",
    "MRG_RXBUF",
    "STATUS",
    "CTRL_VQ",
    "MQ",
    "ANY_LAYOUT",
    "INDIRECT_DESC",
    "EVENT_IDX",
    "VERSION_1",
    "RING_PACKED",
    "IN_ORDER",
    "GUEST_USO4",
    "GUEST_USO6",
    "HOST_USO",
];

/// Features of Xen netif that a port can leave out: keys of xenstore without `feature-`.
pub const XEN_FEATURES: &[&str] = &[
    "sg",
    "gso-tcpv4",
    "gso-tcpv6",
    "ipv6-csum-offload",
    "multicast-control",
    "dynamic-multicast-control",
    "split-event-channels",
    "ctrl-ring",
    "smart-poll",
];

/// Highest count: for a rate, one per nanosecond.
const COUNT: Type = Type::Number(0, 1_000_000_000);
/// Highest number of bytes: a 57-bit address space, the largest of any processor.
const BYTES: Type = Type::Bytes(1 << 57);

/// A limit of a port's account.
const fn limit(
    name: &'static str,
    value: Type,
    default: &'static str,
    help: &'static str,
    beyond: &'static str,
) -> Entry {
    Entry::new(name, value, default, help).live(Live::Whole).more(beyond)
}

/// A rule of ports whose peers are tenants.
const fn tenant(
    name: &'static str,
    value: Type,
    default: &'static str,
    help: &'static str,
) -> Entry {
    Entry::new(name, value, default, help).live(Live::Whole)
}

/// Names of the rules of ports whose peers are tenants.
pub const TENANT: [&str; 21] = [
    "mac",
    "ip",
    "dhcp-server",
    "ra",
    "vlan",
    "trunk",
    "native",
    "isolated",
    "rate-in",
    "burst-in",
    "rate-out",
    "burst-out",
    "storm",
    "storm-broadcast",
    "storm-multicast",
    "storm-unknown",
    "burst-storm",
    "loop-guard",
    "loop-guard-time",
    "mirror-to",
    "mirror-direction",
];

/// Prefix of the names of limits; the rest is the name of the account's entry.
pub const LIMIT: &str = "limit-";

/// All options. Those of one kind come before those of every kind.
pub const TABLE: &[Entry] = &[
    Entry::new(
        "mode",
        Type::Choice(&[
            Choice::word("server", "the switch listens"),
            Choice::word("client", "the peer listens"),
        ]),
        "server",
        "which end of the socket listens",
    )
    .of(CONNECTED)
    .more(
        "; `client` reconnects indefinitely, first after 10 ms, backing off to 1 s (again from \
         10 ms after a connection that lasted 2 s)",
    ),
    Entry::new("peer", Type::Text("SOCKET"), "none", "socket of its peer, to which it sends")
        .of(DGRAM)
        .more("; required. The switch connects to it indefinitely, as with `mode=client`"),
    Entry::new("mtu", Type::Number(68, 9216), "1500", "MTU that passt assigns to guests by DHCP")
        .of(PASST)
        .more(" and router advertisements, 68 to 9216"),
    Entry::new("queues", QUEUES, "1", "queue pairs offered, 1 to 16")
        .of(VHOST_USER)
        .more("; MQ and CTRL_VQ are offered from 2 on"),
    Entry::new("mtu", Type::Number(68, 9216), "none", "MTU offered, 68 to 9216")
        .of(VHOST_USER)
        .more("; longer frames to this guest are dropped and counted"),
    Entry::new("without", Type::Names(VIRTIO_FEATURES), "none", "features not offered, by name")
        .of(VHOST_USER)
        .more(": `without=event-idx` makes guests use flags, `without=in-order+ring-packed`, ..."),
    Entry::new(
        "memory",
        Type::Choice(&[
            Choice::word("shared", "memfd, tmpfs or hugetlbfs"),
            Choice::word("any", "any file"),
        ]),
        "shared",
        "which files may hold guest memory",
    )
    .of(VHOST_USER)
    .more(
        "; `shared`: a memfd, or a file on tmpfs (`/dev/shm`) or hugetlbfs; `any`: any file, for \
         trusted front-ends only: a file system whose server does not respond blocks the switch",
    ),
    Entry::new("polled", ON_OFF, "on", "off refuses rings without a kick descriptor")
        .of(VHOST_USER)
        .more(", which are polled continuously"),
    Entry::new(
        "socket-mode",
        Type::Mode,
        "0600; with a group 0660",
        "who may connect to its socket: permissions in octal",
    )
    .of(SOCKET)
    .more(
        "; independent of the umask. `xen-local`: of its sockets, and of its directory if that is \
         created",
    ),
    Entry::new("socket-group", Type::Text("GROUP"), "unchanged", "group of its socket")
        .of(SOCKET)
        .more(
            ", a name or number: that of the hypervisor's user, for example `kvm`. Only root may \
             use a group that the switch's user is not in",
        ),
    Entry::new("netns", Type::Text("NAME"), "current", "network namespace, a name or a path")
        .of(TAP)
        .more("; like `mtu` and `persist` not for `fd=NAME`, which the process that opened it has \
               set"),
    Entry::new("queues", QUEUES, "1", "queues of the interface, 1 to 16").of(TAP).more(
        "; an existing interface needs `multi_queue` for more than one; with `fd=NAME`, as many \
             descriptors of that name",
    ),
    Entry::new("netns", Type::Text("NAME"), "current", "network namespace, a name or a path")
        .of(AF_PACKET),
    Entry::new("queues", QUEUES, "1", "sockets on the interface, 1 to 16")
        .of(AF_PACKET)
        .more("; the kernel sends all frames of a flow to the same"),
    Entry::new("netns", Type::Text("NAME"), "current", "network namespace, a name or a path")
        .of(AF_XDP),
    Entry::new("queues", QUEUES, "1", "queues of the interface to use, from the first, 1 to 16")
        .of(AF_XDP)
        .more("; frames of its other queues go to the host"),
    Entry::new(
        "mode",
        Type::Choice(&[
            Choice::word("auto", "without a copy if the driver offers that"),
            Choice::word("copy", "with a copy"),
            Choice::word("zero-copy", "without one, or not at all"),
        ]),
        "auto",
        "whether frames are copied between the driver and the switch",
    )
    .of(AF_XDP),
    Entry::new("map", Type::Text("PATH"), "none", "pinned XSKMAP of an attached XDP program")
        .of(AF_XDP)
        .more(
            "; without it the switch attaches a program of its own, which needs CAP_BPF and \
             CAP_NET_ADMIN ([uplinks](uplinks.md#af_xdp))",
        ),
    Entry::new("standby-for", Type::Text("PORT"), "none", "port whose standby it is")
        .of(UPLINK)
        .live(Live::Whole)
        .more(
            ", also `af-packet` or `af-xdp`: it takes over while that port's interface has no \
             carrier or is down; until then it sends and receives nothing \
             ([standby](uplinks.md#standby))",
        ),
    Entry::new(
        "return-after",
        Type::Number(0, 3600),
        "2",
        "seconds for which the port of `standby-for=` must work again",
    )
    .of(UPLINK)
    .live(Live::Whole)
    .more(", without a break, before it is preferred again"),
    Entry::new("mtu", Type::Number(68, 65_535), "unchanged", "MTU to set").of(TAP),
    Entry::new(
        "persist",
        Type::Choice(&[
            Choice::word("unchanged", "only if it did before"),
            Choice::word("on", "it keeps its addresses"),
            Choice::word("off", "it is removed"),
        ]),
        "unchanged",
        "whether the interface stays when the switch exits",
    )
    .of(TAP)
    .more(
        ": `unchanged`: one that the switch creates is removed, with its addresses, and another \
         one is not; `on`: it stays, and addresses, routes and bridges survive a restart; `off`: \
         it is removed",
    ),
    Entry::new("evpn", Type::Text("BRIDGE"), "none", "bridge to other hosts, by VXLAN and FRR")
        .of(TAP)
        .more(
            ": the interface is put into this bridge, which announces the addresses at other ports \
             by BGP EVPN ([many hosts](many-hosts.md)). Also `run --evpn BRIDGE`",
        ),
    Entry::new("queues", QUEUES, "4", "queues offered to a Xen guest, 1 to 16")
        .of(XEN)
        .more("; it uses at most one per CPU ([Xen](xen.md))"),
    Entry::new("without", Type::Names(XEN_FEATURES), "none", "features advertised as 0, by name")
        .of(XEN)
        .more(
            ": `sg`, `gso-tcpv4`, `gso-tcpv6`, `ipv6-csum-offload`, `multicast-control`, \
             `dynamic-multicast-control`, `split-event-channels`, `ctrl-ring`, `smart-poll` \
             (never offered without `smart-poll=on`)",
        ),
    Entry::new("tap", VIF_TAP, "off", "whether each vif has an interface of the host").of(XEN).more(
        "; with `vif`, of `xen:auto` and `xen-local`: each vif has a TAP `vifDOMID.DEVID`, as with \
         xen-netback, to which all its frames go and from which it gets all: for hotplug scripts, \
         bridges and routes of the host ([Xen](xen.md#hotplug-scripts))",
    ),
    Entry::new("smart-poll", ON_OFF, "off", "offer feature-smart-poll")
        .of(XEN)
        .file("smart_poll")
        .more("; stock front ends do not support it"),
    Entry::new("poll", Type::Policy, "`--poll`", "when its queues are polled")
        .per_queue()
        .live(Live::Queue),
    Entry::new("call", Type::Policy, "`--call`", "when its guest is notified of frames")
        .per_queue()
        .live(Live::Queue),
    Entry::new("weight", Type::Number(1, 100), "1", "share of a worker's time, 1 to 100")
        .per_queue()
        .live(Live::Queue)
        .more(", relative to other ports"),
    Entry::new(
        "hold",
        Type::Number(0, 1024),
        "256",
        "maximum number of frames held for each full queue to the guest, 0 to 1024",
    )
    .per_queue()
    .live(Live::Queue)
    .more(
        "; further frames are dropped, and counted at both ends. 0: frames that do not fit are \
         dropped, and senders never wait",
    ),
    tenant("mac", Type::Macs, "none", "source MAC addresses that its peer may use").more(
        ", with port security ([tenants](#ports-as-tenants)). The first is also offered to a \
         vhost-user guest in its configuration space, from its next connection on; QEMU uses its \
         own (`-device ...,mac=`). In the file also a list",
    ),
    tenant("ip", Type::Ips, "none", "source IP addresses that its peer may use").more(
        ", IPv4 and IPv6, in IP, ARP and neighbour discovery, with port security. `locked`: none, \
         until others are set: it may request one by DHCP. In the file also a list",
    ),
    tenant(
        "dhcp-server",
        OFF_ON,
        "off",
        "whether its peer may be a DHCP server, with port security",
    ),
    tenant("ra", OFF_ON, "off", "whether its peer may be an IPv6 router, with port security")
        .more(", which sends router advertisements and redirects"),
    tenant("vlan", Type::Vlan, "none", "VLAN of an access port, 1 to 4094")
        .more(": its frames have no tag on this port, and its tag on trunks ([VLANs](#vlans))"),
    tenant("trunk", Type::Vlans, "none", "VLANs that it carries with tags, like 5+10-20")
        .more(". In the file also a list"),
    tenant("native", Type::Vlan, "none", "VLAN of untagged frames of a trunk")
        .more("; without it they are dropped"),
    tenant("isolated", OFF_ON, "off", "whether it reaches only ports that are not isolated"),
    tenant("rate-in", Type::Rate, "none", "maximum bits and frames per second from its peer").more(
        ", like 100Mbit, 20kframes or both, 100Mbit+20kframes ([rates](#rates)). They wait in the \
         peer's ring",
    ),
    tenant("burst-in", Type::Burst, "none", "burst of bytes and frames from its peer, like 64K")
        .more(" or 64K+100frames; `none`: 40 ms of the rate, at least two full frames"),
    tenant("rate-out", Type::Rate, "none", "maximum bits and frames per second to its peer")
        .more("; further frames are held, then dropped"),
    tenant("burst-out", Type::Burst, "none", "burst of bytes and frames to its peer, like 256K")
        .more("; `none`: 100 ms of the rate, at least 64K or 44 frames"),
    tenant(
        "storm",
        Type::Rate,
        "none",
        "maximum rate of flooded frames from its peer, for each kind",
    )
    .more(
        ", like 100frames: broadcasts, multicast, and frames to unknown addresses each have this \
         limit ([storms](#storms))",
    ),
    tenant("storm-broadcast", Type::Rate, "none", "limit of broadcasts, in place of `storm=`"),
    tenant("storm-multicast", Type::Rate, "none", "limit of multicast, in place of `storm=`"),
    tenant("storm-unknown", Type::Rate, "none", "limit of frames to unknown addresses")
        .more(", in place of `storm=`"),
    tenant("burst-storm", Type::Burst, "none", "burst of `storm=`, in bytes and frames")
        .more("; `none`: one second of each limit"),
    tenant("loop-guard", REPORT_BLOCK, "report", "what happens to addresses that flap to it").more(
        ": `report`: they are logged and counted; `block`: also, an address is not taken from the \
         port that had it before if it is in that port's `mac=` or left it more than 5 times in \
         10 s; frames with such a source are dropped ([loops](#loops-and-forged-addresses))",
    ),
    tenant(
        "loop-guard-time",
        Type::Number(1, 3600),
        "60",
        "seconds for which `loop-guard=block` does not take an address that flaps",
    ),
    tenant("mirror-to", Type::Text("PORT"), "none", "mirror port that gets copies of its frames")
        .more(", and nothing else ([mirrors](#mirrors))"),
    tenant("mirror-direction", BOTH_IN_OUT, "both", "which frames `mirror-to=` copies")
        .more(": `in` from its peer, `out` to its peer, or both"),
    limit(
        "limit-mapped-bytes",
        BYTES,
        "4T",
        "memory that a front-end shares, including the part of its file before it: the port of \
         that front-end",
        "the region or table is refused, and the log gives the excess and the limit; memory \
         shared before stays mapped",
    ),
    limit(
        "limit-mappings",
        COUNT,
        "1018; `xen`, `xen-local`: the maximum of all queues, if that is more",
        "mappings of that memory, one per region; Xen: pages of rings, and pages that stay mapped",
        "as above; Xen: the vif does not connect, and `ctl show` gives the reason, or its list of \
         pages is refused",
    ),
    limit(
        "limit-descriptors",
        COUNT,
        "640",
        "the connection, and descriptors received on it, until they are closed: that port",
        "no connection is accepted for a second; a connection that sends more descriptors is \
         closed",
    ),
    limit(
        "limit-held-frames",
        COUNT,
        "1024",
        "frames held because the port is full, all queues together: the receiving port",
        "lost: `lost_no_room` of this port, `drops_no_room` of the sender",
    ),
    limit("limit-held-bytes", BYTES, "1M", "bytes of held frames", "as above"),
    limit(
        "limit-messages",
        COUNT,
        "4000 per second, burst 8000",
        "messages of the vhost-user socket; one that takes longer counts once per 25 µs",
        "messages are not read until the rate permits; the connection stays",
    ),
    limit(
        "limit-connections",
        COUNT,
        "10 per second, burst 50",
        "connections that the port accepts",
        "they wait at the socket",
    ),
    limit(
        "limit-announcements",
        COUNT,
        "10 per second, burst 20",
        "announcements of a guest's address (SEND_RARP), flooded on its behalf by the worker of \
         its first queue, in that queue's share of time; only the latest one waits",
        "not announced",
    ),
    limit(
        "limit-log-lines",
        COUNT,
        "2 per second, burst 16",
        "log lines caused by the port's peer",
        "not written; the next line gives the number of missing lines",
    ),
    limit(
        "limit-flood-copies",
        COUNT,
        "1000000 per second, burst 1000000",
        "copies of frames that the port's guest floods (broadcast, multicast, unknown addresses), \
         except one of each frame; a GSO frame counts once per segment",
        "not flooded: `drops_flood_limit` of this port, per copy",
    ),
    limit(
        "limit-evpn-addresses",
        COUNT,
        "100 per second, burst 4096",
        "addresses at this port that are announced to other hosts (`evpn=`): new ones, and those \
         that come back",
        "announced later",
    ),
];
