//! What is wrong with a bridge, each with a remedy.

use std::io;

use switch::tenant::Vlan;

use super::Member;
use super::links::{Kind, Link, Links};

/// Bytes that VXLAN adds to a packet: the inner Ethernet header, VXLAN, UDP, and IPv4 or IPv6.
const OVER_IPV4: u32 = 50;
const OVER_IPV6: u32 = 70;

/// All problems of a TAP and its bridge. `refused`: an error number of the kernel.
pub(super) fn find(member: &Member, links: &Links, refused: Option<i32>) -> Vec<String> {
    let Member { interface, bridge: name, vlan } = member;
    let Some(tap) = links.named(interface) else {
        return vec![format!("interface `{interface}` does not exist in this network namespace")];
    };
    let Some(bridge) = links.named(name) else {
        return vec![format!(
            "there is no bridge `{name}`: create it (ip link add {name} type bridge; ip link set \
             {name} up), or correct evpn="
        )];
    };
    let Kind::Bridge { is_aware, .. } = bridge.kind else {
        return vec![format!(
            "interface `{name}` is not a bridge: name one of `ip link show type bridge`"
        )];
    };
    let mut found = Vec::new();
    found.extend(refused.map(|error| refusal(interface, name, error)));
    if let Some(other) = tap.master.filter(|master| *master != bridge.index) {
        let other = links.get(other).map_or("another", |link| &link.name);
        found.push(format!(
            "interface `{interface}` is in `{other}`, not in bridge `{name}`: remove it from \
             there (ip link set {interface} nomaster), or write evpn={other}"
        ));
    }
    if let (false, Vlan::Trunk { .. }) = (is_aware, vlan) {
        found.push(format!(
            "bridge `{name}` is not VLAN-aware, and the port is a trunk: addresses of tagged VLANs \
             are not announced: enable that (ip link set {name} type bridge vlan_filtering 1), or \
             use one TAP with vlan=N and one bridge for each VLAN"
        ));
    }
    if !bridge.up {
        found.push(format!("bridge `{name}` is down: ip link set {name} up"));
    }
    let mut vxlans: Vec<_> = links.vxlans(bridge.index).collect();
    vxlans.sort_by_key(|link| link.index);
    if vxlans.is_empty() {
        found.push(format!(
            "bridge `{name}` has no VXLAN interface: other hosts are unreachable until it has one \
             (ip link add vxlan10 type vxlan id 10 dstport 4789 local IP nolearning; ip link set \
             vxlan10 master {name} up)"
        ));
    }
    for vxlan in vxlans {
        of_vxlan(tap, name, vxlan, links, &mut found);
    }
    found
}

/// A VXLAN interface without a tunnel, as at every start; and as long as FRR is missing.
pub(super) fn alone(vxlan: &Link) -> String {
    format!(
        "`{}` has no remote VTEP yet: FRR adds them (zebra, and bgpd with advertise-all-vni), \
         on both hosts",
        vxlan.name
    )
}

fn of_vxlan(tap: &Link, bridge: &str, vxlan: &Link, links: &Links, found: &mut Vec<String>) {
    let Kind::Vxlan { learns, local, .. } = vxlan.kind else { return };
    let name = &vxlan.name;
    if !vxlan.up {
        found.push(format!("`{name}` is down: ip link set {name} up"));
    }
    if learns {
        found.push(format!(
            "`{name}` learns addresses from frames, in addition to FRR: addresses that moved come \
             back; disable that (ip link set {name} type vxlan nolearning)"
        ));
    }
    if vxlan.learns == Some(true) {
        found.push(format!(
            "bridge `{bridge}` learns addresses from `{name}`, in addition to FRR: disable that \
             (bridge link set dev {name} learning off)"
        ));
    }
    let over = if local.is_some_and(|ip| ip.is_ipv6()) { OVER_IPV6 } else { OVER_IPV4 };
    if let Some(underlay) = links.underlay(vxlan)
        && underlay.mtu < tap.mtu + over
    {
        let (under, most) = (&underlay.name, underlay.mtu.saturating_sub(over));
        found.push(format!(
            "packets of {} bytes (MTU of `{}`) do not fit `{under}` of MTU {} with {over} bytes of \
             VXLAN: set its MTU to {} or more, there and on the path, or that of guests and \
             `{}` to {most}",
            tap.mtu,
            tap.name,
            underlay.mtu,
            tap.mtu + over,
            tap.name,
        ));
    }
}

fn refusal(interface: &str, bridge: &str, error: i32) -> String {
    match error {
        libc::EPERM | libc::EACCES => format!(
            "no permission to change bridge `{bridge}`: CAP_NET_ADMIN is required; run as root or \
             grant it to the program (setcap cap_net_admin+ep)"
        ),
        error => {
            let error = io::Error::from_raw_os_error(error);
            format!("the kernel refuses a change of `{interface}` in bridge `{bridge}`: {error}")
        }
    }
}
