//! What each counter of lost frames says about a port, and what to do about it.

/// Direction of the frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the guest into the switch.
    From,
    /// From the switch to the guest.
    To,
}

impl Way {
    /// Name of its queues in `stats`.
    pub fn queues(self) -> &'static str {
        match self {
            Self::From => "ingress",
            Self::To => "egress",
        }
    }

    /// Name in the findings.
    pub fn name(self) -> &'static str {
        match self {
            Self::From => "from its guest",
            Self::To => "to its guest",
        }
    }
}

/// A counter of lost frames.
pub struct Cause {
    /// Its name in `stats`.
    pub name: &'static str,
    /// Which frames it counts.
    pub what: &'static str,
    /// Remedy: what to do.
    pub remedy: &'static str,
    /// Whether it counts frames on a healthy network, too.
    pub normal: bool,
}

const fn cause(name: &'static str, what: &'static str, remedy: &'static str) -> Cause {
    Cause { name, what, remedy, normal: false }
}

const fn normal(name: &'static str, what: &'static str, remedy: &'static str) -> Cause {
    Cause { name, what, remedy, normal: true }
}

const BROKEN: &str = "its driver is broken or hostile: update it, or remove the port";
const FULL: &str = "give the receiving guest more CPU time, or a longer receive ring (QEMU: \
     rx_queue_size=1024), or hold=";
const ABSENT: &str = "its memory is swapped out, not yet allocated, or freed by a hostile \
     front end: preallocate it";
const RULES: &str = "the guest uses another address, forwards for others, or spoofs: add it \
     to the rule (`pvswitch ctl set`), or ask its owner";
const STORM: &str = "look for a loop or a scan in the guest; if it is wanted, raise storm=";
const SIZES: &str = "use the same MTU everywhere; with long frames the guest needs MRG_RXBUF";

const FROM: [Cause; 31] = [
    cause(
        "drops_not_read",
        "arrived at its interface faster than they were read; the kernel dropped them",
        "add --workers and queues=; a switch without CAP_NET_ADMIN: raise net.core.rmem_max",
    ),
    cause("drops_runt", "are shorter than their headers", BROKEN),
    cause(
        "drops_too_long",
        "are longer than 9234 bytes, or 65,550 with GSO",
        "lower the guest's MTU",
    ),
    cause("drops_too_many_segs", "consist of more than 256 segments", BROKEN),
    cause("drops_bad_hdr", "have an offload request that is invalid or not negotiated", BROKEN),
    cause(
        "drops_bad_addr",
        "are in buffers outside the guest's memory",
        "after memory hot-plug: restart the guest; otherwise its driver is broken or hostile",
    ),
    cause("drops_bad_grant", "are in pages that could not be read", BROKEN),
    cause("drops_no_room", "found their receiver's queue full", FULL),
    cause(
        "drops_down",
        "were sent while the toolstack had set the link down",
        "set the link up in the toolstack",
    ),
    normal(
        "drops_no_port",
        "had no destination: the partner of a cross-connect, or each port that a flooded frame may \
         reach, is not up",
        "start the other guest, or see its VLAN and isolation; normal while a guest is alone",
    ),
    normal(
        "drops_same_port",
        "are for an address behind this same port",
        "normal behind a TAP in a bridge; otherwise look for a loop",
    ),
    cause("drops_bad_source", "have a group address or zero as source", BROKEN),
    cause(
        "drops_loop_guard",
        "have another port's address as source, which loop-guard=block refuses, or came back \
         from a loop",
        "look for a loop behind this port, or a guest that forges addresses: `pvswitch ctl fdb`",
    ),
    cause(
        "drops_mirror_port",
        "are from a mirror port or for one, which takes copies only",
        "end the mirror (`pvswitch ctl set PORT mirror-to=none`), or use another port",
    ),
    cause("drops_spoofed_mac", "have a source MAC address that is not in mac=", RULES),
    cause(
        "drops_spoofed_ip",
        "have a source IP address that is not in ip=",
        "as for MAC addresses; IPv6 privacy addresses must be listed in ip=, or off in the guest",
    ),
    cause("drops_spoofed_arp", "are ARP with a sender address that is not in mac= and ip=", RULES),
    cause("drops_spoofed_nd", "are neighbour discovery with an address not in mac= and ip=", RULES),
    cause(
        "drops_dhcp_server",
        "are replies of a DHCP server",
        "if the guest is meant to be one: `pvswitch ctl set PORT dhcp-server=on`",
    ),
    cause(
        "drops_ra",
        "are router advertisements or redirects",
        "if the guest is meant to be a router: `pvswitch ctl set PORT ra=on`",
    ),
    cause(
        "drops_protocol",
        "are of a protocol that ip= cannot check",
        "normal for LLDP and the like; otherwise remove ip= from the port",
    ),
    cause(
        "drops_unchecked",
        "have headers that rules cannot check: malformed, fragmented or too long",
        "lower the MTU of the guest, so that it does not fragment",
    ),
    cause(
        "drops_isolated",
        "are for another isolated port",
        "to connect them: `pvswitch ctl set PORT isolated=off` for one of them",
    ),
    cause(
        "drops_vlan",
        "are of a VLAN that this port or their destination does not carry",
        "compare vlan=, trunk= and native= (`pvswitch ctl show`) with the guest's VLANs",
    ),
    normal(
        "drops_link_local",
        "are spanning tree, LLDP and similar",
        "nothing to do: bridges drop them",
    ),
    cause("drops_bad_gso", "need segmentation, but have invalid headers", BROKEN),
    cause(
        "drops_made_limit",
        "are copies of flooded frames beyond the limit of a burst",
        "check why the destination is unknown (`pvswitch ctl fdb`)",
    ),
    cause(
        "drops_flood_limit",
        "are copies of flooded frames beyond the port's limit-flood-copies",
        "add a static address for a receiver that never sends; look for a loop",
    ),
    cause("drops_storm_broadcast", "are broadcasts beyond storm= of the port", STORM),
    cause("drops_storm_multicast", "are multicast beyond storm= of the port", STORM),
    cause("drops_storm_unknown", "are for unknown addresses, beyond storm= of the port", STORM),
];

const TO: [Cause; 17] = [
    cause(
        "lost_no_room",
        "from other ports found this guest's receive ring and hold queue full",
        FULL,
    ),
    cause(
        "lost_aged",
        "from other ports were held for 200 ms, and found no receive buffer",
        "the guest takes almost no frames: check that its driver runs and that it gets CPU time",
    ),
    cause("lost_slow", "from other ports hit absent pages in its receive buffers", ABSENT),
    cause(
        "drops_slow",
        "are copies of flooded frames that hit absent pages in its receive buffers",
        ABSENT,
    ),
    cause("drops_too_long", "are longer than its MTU, or than all its receive buffers", SIZES),
    cause("drops_bad_addr", "found receive buffers outside its memory", BROKEN),
    cause("drops_too_many_segs", "found receive buffers of too many segments", BROKEN),
    cause("drops_bad_grant", "found posted pages that could not be written", BROKEN),
    normal(
        "drops_filtered",
        "are multicast for groups that the guest did not join",
        "nothing to do, unless it should have joined",
    ),
    cause(
        "drops_down",
        "arrived while its queue was stopped, or its interface down",
        "normal at boot; a TAP: `ip link set IFNAME up`",
    ),
    cause("drops_no_room", "are copies of flooded frames for which there was no room", FULL),
    cause(
        "drops_aged",
        "are copies of flooded frames that were held for 200 ms without a receive buffer",
        FULL,
    ),
    cause(
        "drops_bad_gso",
        "are copies of flooded frames to be segmented, with invalid headers",
        "the driver of a sender is broken or hostile: `pvswitch capture` shows which",
    ),
    normal("drops_held_down", "were held when the guest disconnected", "none"),
    cause(
        "drops_mirror",
        "are copies for this mirror port, for which there was no room",
        "read it faster, give it a longer ring, or mirror fewer ports or one mirror-direction=",
    ),
    cause(
        "drops_rate",
        "are beyond its rate-out= and its hold queue",
        "raise it or its burst-out=, or use rate-in= of the senders, which loses nothing",
    ),
    cause(
        "drops_rate_aged",
        "were held for 2 s, because its rate-out= did not permit them",
        "raise it, or use rate-in= of the senders; a smaller hold= drops them at once",
    ),
];

/// The cause of this name; `None`: this program does not know it.
pub fn find(way: Way, name: &str) -> Option<&'static Cause> {
    let all = match way {
        Way::From => &FROM[..],
        Way::To => &TO[..],
    };
    all.iter().find(|cause| cause.name == name)
}

/// Whether a counter counts lost frames.
pub fn is_loss(name: &str) -> bool {
    name.starts_with("drops_") || name.starts_with("lost_")
}

#[cfg(test)]
mod tests {
    use switch::stats::{EgressStats, IngressStats};

    use super::*;

    #[test]
    fn every_counter_of_losses_has_a_sentence_and_a_remedy() {
        let (ingress, egress) = (IngressStats::default(), EgressStats::default());
        let from = ingress.all().map(|(name, _)| (Way::From, name));
        for (way, name) in from.chain(egress.all().map(|(name, _)| (Way::To, name))) {
            if is_loss(name) {
                let known = find(way, name).is_some_and(|cause| !cause.remedy.is_empty());
                assert!(known, "{way:?} {name}: add what it means, and what to do about it");
            }
        }
    }
}
