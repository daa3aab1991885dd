//! Feature bits: virtio-net (virtio 1.3, 5.1.3), rings (6), and the protocol's bit 30.

/// VIRTIO_NET_F_CSUM: we accept partial checksums.
pub const CSUM: u64 = 1 << 0;
/// VIRTIO_NET_F_GUEST_CSUM.
pub const GUEST_CSUM: u64 = 1 << 1;
/// VIRTIO_NET_F_MTU.
pub const MTU: u64 = 1 << 3;
/// VIRTIO_NET_F_MAC.
pub const MAC: u64 = 1 << 5;
/// VIRTIO_NET_F_GUEST_TSO4.
pub const GUEST_TSO4: u64 = 1 << 7;
/// VIRTIO_NET_F_GUEST_TSO6.
pub const GUEST_TSO6: u64 = 1 << 8;
/// VIRTIO_NET_F_GUEST_ECN.
pub const GUEST_ECN: u64 = 1 << 9;
/// VIRTIO_NET_F_HOST_TSO4.
pub const HOST_TSO4: u64 = 1 << 11;
/// VIRTIO_NET_F_HOST_TSO6.
pub const HOST_TSO6: u64 = 1 << 12;
/// VIRTIO_NET_F_HOST_ECN.
pub const HOST_ECN: u64 = 1 << 13;
/// VIRTIO_NET_F_MRG_RXBUF.
pub const MRG_RXBUF: u64 = 1 << 15;
/// VIRTIO_NET_F_STATUS.
pub const STATUS: u64 = 1 << 16;
/// VIRTIO_NET_F_CTRL_VQ.
pub const CTRL_VQ: u64 = 1 << 17;
/// VIRTIO_NET_F_MQ.
pub const MQ: u64 = 1 << 22;
/// VIRTIO_F_ANY_LAYOUT (legacy).
pub const ANY_LAYOUT: u64 = 1 << 27;
/// VIRTIO_F_INDIRECT_DESC.
pub const INDIRECT_DESC: u64 = 1 << 28;
/// VIRTIO_F_EVENT_IDX.
pub const EVENT_IDX: u64 = 1 << 29;
/// VHOST_F_LOG_ALL: writes to the guest's memory are logged; not a virtio feature, and never the
/// guest's.
pub const LOG_ALL: u64 = 1 << 26;
/// VHOST_USER_F_PROTOCOL_FEATURES; not a virtio feature, seen on the socket only.
pub const PROTOCOL_FEATURES: u64 = 1 << 30;
/// VIRTIO_F_VERSION_1.
pub const VERSION_1: u64 = 1 << 32;
/// VIRTIO_F_RING_PACKED.
pub const RING_PACKED: u64 = 1 << 34;
/// VIRTIO_F_IN_ORDER.
pub const IN_ORDER: u64 = 1 << 35;
/// VIRTIO_NET_F_GUEST_USO4.
pub const GUEST_USO4: u64 = 1 << 54;
/// VIRTIO_NET_F_GUEST_USO6.
pub const GUEST_USO6: u64 = 1 << 55;
/// VIRTIO_NET_F_HOST_USO.
pub const HOST_USO: u64 = 1 << 56;

/// Offered by every port.
pub const BASE: u64 = CSUM
    | GUEST_CSUM
    | GUEST_TSO4
    | GUEST_TSO6
    | GUEST_ECN
    | HOST_TSO4
    | HOST_TSO6
    | HOST_ECN
    | MRG_RXBUF
    | STATUS
    | ANY_LAYOUT
    | INDIRECT_DESC
    | EVENT_IDX
    | VERSION_1
    | RING_PACKED
    | IN_ORDER
    | GUEST_USO4
    | GUEST_USO6
    | HOST_USO;

const NAMES: [(u64, &str); 23] = [
    (CSUM, "CSUM"),
    (GUEST_CSUM, "GUEST_CSUM"),
    (MTU, "MTU"),
    (MAC, "MAC"),
    (GUEST_TSO4, "GUEST_TSO4"),
    (GUEST_TSO6, "GUEST_TSO6"),
    (GUEST_ECN, "GUEST_ECN"),
    (HOST_TSO4, "HOST_TSO4"),
    (HOST_TSO6, "HOST_TSO6"),
    (HOST_ECN, "HOST_ECN"),
    (MRG_RXBUF, "MRG_RXBUF"),
    (STATUS, "STATUS"),
    (CTRL_VQ, "CTRL_VQ"),
    (MQ, "MQ"),
    (ANY_LAYOUT, "ANY_LAYOUT"),
    (INDIRECT_DESC, "INDIRECT_DESC"),
    (EVENT_IDX, "EVENT_IDX"),
    (VERSION_1, "VERSION_1"),
    (RING_PACKED, "RING_PACKED"),
    (IN_ORDER, "IN_ORDER"),
    (GUEST_USO4, "GUEST_USO4"),
    (GUEST_USO6, "GUEST_USO6"),
    (HOST_USO, "HOST_USO"),
];

/// Names of the features in `bits`, for display.
pub fn names(bits: u64) -> Vec<&'static str> {
    NAMES.iter().filter(|(bit, _)| bits & bit != 0).map(|(_, name)| *name).collect()
}

/// Parses `names`: names as in [`names`], in either case, `-` for `_`, separated by `+`.
///
/// # Errors
/// The first unknown name.
pub fn parse(names: &str) -> Result<u64, String> {
    names.split('+').try_fold(0, |bits, word| {
        let name = word.to_ascii_uppercase().replace('-', "_");
        let found = NAMES.iter().find(|(_, known)| *known == name);
        found.map(|(bit, _)| bits | bit).ok_or_else(|| word.to_string())
    })
}
