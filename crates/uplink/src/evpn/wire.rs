//! Messages of rtnetlink, reduced to what the mirror needs.

use std::net::IpAddr;

use netlink_packet_core::{
    DoneMessage, NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REPLACE,
    NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    AfSpecBridge, BridgeVlanInfo, BridgeVlanInfoFlags, InfoBridge, InfoBridgePort, InfoData,
    InfoKind, InfoPortData, InfoPortKind, InfoVxlan, LinkAttribute, LinkFlags, LinkInfo,
    LinkMessage,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::links::{Kind, Link};
use super::{Mac, Vlans};
use crate::netlink;

/// Length of `struct nlmsghdr`; messages are aligned to four bytes.
const HEADER_LEN: usize = 16;

/// What a dump returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dump {
    /// Interfaces.
    Links,
    /// Their IP addresses.
    Addresses,
    /// Entries of bridges and VXLAN interfaces.
    Entries,
}

/// An entry of a bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key {
    pub(super) mac: Mac,
    /// VLAN of the bridge; 0: it has none.
    pub(super) vid: u16,
}

/// A request to the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Dump(Dump),
    /// Puts an entry of a bridge on one of its interfaces, in place of any earlier one. `fixed`: as
    /// `static`, it does not age; it may move.
    Put {
        link: u32,
        key: Key,
        fixed: bool,
    },
    Delete {
        link: u32,
        key: Key,
    },
    /// Puts an interface into a bridge.
    Join {
        link: u32,
        bridge: u32,
    },
    /// Has the bridge not learn addresses from an interface.
    StopLearning {
        link: u32,
    },
    /// Adds VLANs to an interface of a bridge.
    AddVlans {
        link: u32,
        vlans: Vlans,
    },
    /// Removes VLANs from an interface of a bridge; those that it does not carry are ignored.
    DeleteVlans {
        link: u32,
        vlans: Vlans,
    },
}

/// The kind of an entry of a bridge. The kernel keeps `is_extern` when an entry gets another
/// interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// `static`: NUD_NOARP. Otherwise it is learned, permanent, or local to the host.
    pub(super) is_static: bool,
    /// `extern_learn`: of a control protocol, FRR's.
    pub(super) is_extern: bool,
}

/// A message of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Link(Link),
    LinkGone(u32),
    /// An interface of a bridge has other settings.
    Port(u32),
    /// An IP address of an interface.
    Ip(u32, IpAddr),
    Entry {
        link: u32,
        key: Key,
        entry: Entry,
    },
    EntryGone {
        link: u32,
        key: Key,
    },
    /// An entry of a VXLAN interface itself: where it sends frames for an address. All zeros:
    /// broadcasts.
    Tunnel {
        link: u32,
        mac: Mac,
        vtep: IpAddr,
    },
    TunnelGone {
        link: u32,
        mac: Mac,
        vtep: Option<IpAddr>,
    },
    /// The end of a dump; whether it is inconsistent.
    Done {
        interrupted: bool,
    },
    /// The outcome of a request: an error number, or 0.
    Reply {
        error: i32,
    },
    /// Messages were lost.
    Lost,
}

// ---- requests ----

/// Appends a request, to be acknowledged.
pub(super) fn encode(seq: u32, request: &Request, bytes: &mut Vec<u8>) {
    let (message, flags) = message(request);
    netlink::append(seq, message, flags, bytes);
}

fn message(request: &Request) -> (RouteNetlinkMessage, u16) {
    use RouteNetlinkMessage as Message;
    match request {
        Request::Dump(Dump::Links) => (Message::GetLink(LinkMessage::default()), NLM_F_DUMP),
        Request::Dump(Dump::Addresses) => {
            (Message::GetAddress(AddressMessage::default()), NLM_F_DUMP)
        }
        Request::Dump(Dump::Entries) => {
            let mut all = NeighbourMessage::default();
            all.header.family = AddressFamily::Bridge;
            (Message::GetNeighbour(all), NLM_F_DUMP)
        }
        Request::Put { link, key, fixed } => {
            let state = if *fixed { NeighbourState::Noarp } else { NeighbourState::Reachable };
            let flags = NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE;
            (Message::NewNeighbour(entry(*link, *key, state)), flags)
        }
        Request::Delete { link, key } => {
            (Message::DelNeighbour(entry(*link, *key, NeighbourState::None)), NLM_F_ACK)
        }
        Request::Join { link, bridge } => {
            let master = LinkAttribute::Controller(*bridge);
            (Message::NewLink(interface(*link, AddressFamily::Unspec, master)), NLM_F_ACK)
        }
        Request::StopLearning { link } => {
            let info = LinkAttribute::LinkInfo(vec![
                LinkInfo::PortKind(InfoPortKind::Bridge),
                LinkInfo::PortData(InfoPortData::BridgePort(vec![InfoBridgePort::Learning(false)])),
            ]);
            (Message::NewLink(interface(*link, AddressFamily::Unspec, info)), NLM_F_ACK)
        }
        Request::AddVlans { link, vlans } => {
            let spec = LinkAttribute::AfSpecBridge(vlan_infos(vlans));
            (Message::SetLink(interface(*link, AddressFamily::Bridge, spec)), NLM_F_ACK)
        }
        Request::DeleteVlans { link, vlans } => {
            let spec = LinkAttribute::AfSpecBridge(vlan_infos(vlans));
            (Message::DelLink(interface(*link, AddressFamily::Bridge, spec)), NLM_F_ACK)
        }
    }
}

fn entry(link: u32, key: Key, state: NeighbourState) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    message.header.ifindex = link;
    message.header.state = state;
    // Of the bridge, not of the interface itself.
    message.header.flags = NeighbourFlags::Controller;
    message.attributes.push(NeighbourAttribute::LinkLayerAddress(key.mac.0.to_vec()));
    if key.vid != 0 {
        message.attributes.push(NeighbourAttribute::Vlan(key.vid));
    }
    message
}

fn interface(link: u32, family: AddressFamily, attribute: LinkAttribute) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.interface_family = family;
    message.header.index = link;
    message.attributes.push(attribute);
    message
}

fn vlan_infos(vlans: &Vlans) -> Vec<AfSpecBridge> {
    let info = |flags, vid| AfSpecBridge::VlanInfo(BridgeVlanInfo { flags, vid });
    let mut infos = Vec::new();
    for (first, last) in &vlans.tagged {
        if first == last {
            infos.push(info(BridgeVlanInfoFlags::empty(), *first));
        } else {
            infos.push(info(BridgeVlanInfoFlags::RangeBegin, *first));
            infos.push(info(BridgeVlanInfoFlags::RangeEnd, *last));
        }
    }
    let untagged = BridgeVlanInfoFlags::Pvid | BridgeVlanInfoFlags::Untagged;
    infos.extend(vlans.untagged.map(|vid| info(untagged, vid)));
    infos
}

// ---- messages of the kernel ----

/// Appends the messages in a datagram. What concerns neither bridges nor interfaces is left out,
/// and so is what cannot be decoded: attributes of later kernels are of other lengths.
/// Each with the sequence number of the request that it answers; 0: of none.
pub(super) fn decode(datagram: &[u8], heard: &mut Vec<(u32, Heard)>) {
    let mut rest = datagram;
    while let Some(len) = rest.get(..4) {
        let len = u32::from_ne_bytes([len[0], len[1], len[2], len[3]]) as usize;
        let Some(bytes) = rest.get(..len).filter(|_| len >= HEADER_LEN) else { return };
        if let Ok(message) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(bytes) {
            let seq = message.header.sequence_number;
            heard.extend(reduce(message).map(|what| (seq, what)));
        }
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
}

fn reduce(message: NetlinkMessage<RouteNetlinkMessage>) -> Option<Heard> {
    let (header, payload) = message.into_parts();
    match payload {
        NetlinkPayload::Done(DoneMessage { .. }) => {
            let interrupted = header.flags & NLM_F_DUMP_INTR != 0;
            Some(Heard::Done { interrupted })
        }
        NetlinkPayload::Error(error) => {
            Some(Heard::Reply { error: error.raw_code().saturating_neg() })
        }
        NetlinkPayload::Overrun(_) => Some(Heard::Lost),
        NetlinkPayload::InnerMessage(inner) => match inner {
            RouteNetlinkMessage::NewLink(link) => new_link(&link),
            // Of a bridge: the interface left it, and exists still.
            RouteNetlinkMessage::DelLink(link) => match link.header.interface_family {
                AddressFamily::Unspec => Some(Heard::LinkGone(link.header.index)),
                _ => Some(Heard::Port(link.header.index)),
            },
            RouteNetlinkMessage::NewAddress(address) => {
                let ip = address.attributes.iter().find_map(|attribute| match attribute {
                    AddressAttribute::Local(ip) | AddressAttribute::Address(ip) => Some(*ip),
                    _ => None,
                });
                Some(Heard::Ip(address.header.index, ip?))
            }
            RouteNetlinkMessage::NewNeighbour(neighbour) => neighbour_heard(&neighbour, false),
            RouteNetlinkMessage::DelNeighbour(neighbour) => neighbour_heard(&neighbour, true),
            _ => None,
        },
        _ => None,
    }
}

fn new_link(message: &LinkMessage) -> Option<Heard> {
    let index = message.header.index;
    if message.header.interface_family != AddressFamily::Unspec {
        return Some(Heard::Port(index));
    }
    let up = message.header.flags.contains(LinkFlags::Up);
    let mut link = Link {
        index,
        name: String::new(),
        master: None,
        mtu: 0,
        up,
        learns: None,
        kind: Kind::Other,
    };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Controller(master) => link.master = Some(*master),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::LinkInfo(infos) => {
                infos.iter().for_each(|info| info_of(info, &mut link))
            }
            _ => {}
        }
    }
    Some(Heard::Link(link))
}

fn info_of(info: &LinkInfo, link: &mut Link) {
    match info {
        LinkInfo::Kind(InfoKind::Bridge) => link.kind = Kind::Bridge { is_aware: false, pvid: 0 },
        LinkInfo::Kind(InfoKind::Vxlan) => link.kind = Kind::vxlan(),
        LinkInfo::Data(InfoData::Bridge(all)) => {
            let (mut is_aware, mut pvid) = (false, 0);
            for info in all {
                match info {
                    InfoBridge::VlanFiltering(on) => is_aware = *on,
                    InfoBridge::VlanDefaultPvid(vid) => pvid = *vid,
                    _ => {}
                }
            }
            link.kind = Kind::Bridge { is_aware, pvid };
        }
        LinkInfo::Data(InfoData::Vxlan(all)) => {
            let mut kind = Kind::vxlan();
            if let Kind::Vxlan { vni, underlay, local, learns } = &mut kind {
                for info in all {
                    match info {
                        InfoVxlan::Id(id) => *vni = *id,
                        InfoVxlan::Link(index) => *underlay = Some(*index),
                        InfoVxlan::Local(ip) => *local = Some((*ip).into()),
                        InfoVxlan::Local6(ip) => *local = Some((*ip).into()),
                        InfoVxlan::Learning(on) => *learns = *on,
                        _ => {}
                    }
                }
            }
            link.kind = kind;
        }
        LinkInfo::PortData(InfoPortData::BridgePort(all)) => {
            link.learns = all.iter().find_map(|info| match info {
                InfoBridgePort::Learning(on) => Some(*on),
                _ => None,
            });
        }
        _ => {}
    }
}

fn neighbour_heard(message: &NeighbourMessage, gone: bool) -> Option<Heard> {
    let header = &message.header;
    if header.family != AddressFamily::Bridge {
        return None;
    }
    let (mut mac, mut vid, mut vtep, mut of_bridge) = (None, 0, None, false);
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::LinkLayerAddress(bytes) => {
                mac = <[u8; 6]>::try_from(&bytes[..]).ok().map(Mac);
            }
            NeighbourAttribute::Vlan(vlan) => vid = *vlan,
            NeighbourAttribute::Controller(_) => of_bridge = true,
            NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => {
                vtep = Some(IpAddr::from(*ip));
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => {
                vtep = Some(IpAddr::from(*ip));
            }
            NeighbourAttribute::Destination(NeighbourAddress::Other(bytes)) => {
                vtep = ip_of(bytes);
            }
            _ => {}
        }
    }
    let (link, mac) = (header.ifindex, mac?);
    if header.flags.contains(NeighbourFlags::Own) {
        return match (gone, vtep) {
            (true, vtep) => Some(Heard::TunnelGone { link, mac, vtep }),
            (false, Some(vtep)) => Some(Heard::Tunnel { link, mac, vtep }),
            (false, None) => None,
        };
    }
    let key = Key { mac, vid };
    let entry = Entry {
        is_static: header.state == NeighbourState::Noarp,
        is_extern: header.flags.contains(NeighbourFlags::ExtLearned),
    };
    of_bridge.then_some(match gone {
        true => Heard::EntryGone { link, key },
        false => Heard::Entry { link, key, entry },
    })
}

/// An address of a VXLAN interface's entry, whose family is that of bridges.
fn ip_of(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from);
    v4.or_else(|| <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from))
}
