//! The host's packet filter.

use crate::error::Fail;
use crate::stage::Namespace;

/// What the host's filter does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// There is none.
    Off,
    /// No rule matches a packet.
    On,
    /// It rewrites each packet from a guest, of which the kernel makes a copy.
    Rewrite,
}

/// A chain at each hook. The rule about connections, in a chain that nothing leads to, makes the
/// kernel track them.
const TABLE: &str = "table inet lab { \
    chain prerouting { type filter hook prerouting priority 0; RULE }; \
    chain input { type filter hook input priority 0; }; \
    chain forward { type filter hook forward priority 0; }; \
    chain output { type filter hook output priority 0; }; \
    chain postrouting { type filter hook postrouting priority 0; }; \
    chain tracked { ct state new accept; }; }";
/// TTL of packets that the filter has rewritten; a guest sends 64.
const TTL: u8 = 33;
/// An interface to which packets from guests are duplicated, and its other end, which drops them.
const VETH: [&str; 2] = ["mirror", "mirror-end"];
/// Duplicates with the guest's TTL, and with the filter's.
const COUNTERS: [&str; 2] = ["copied", "shared"];

impl Filter {
    /// Returns the filter of that name.
    pub fn named(name: &str) -> Self {
        match name {
            "on" => Self::On,
            "rewrite" => Self::Rewrite,
            _ => Self::Off,
        }
    }

    /// Loads it; the interfaces of guests exist.
    ///
    /// A duplicate shares its bytes with the packet until one of the two is written, and it is
    /// still queued while the packet passes the other hooks. So rewriting the packet forces a copy:
    /// a packet that a TAP received has no other owner, and would be rewritten in place.
    pub fn load(self, host: &Namespace, taps: &[&str]) -> Result<(), Fail> {
        let taps = taps.join(", ");
        let rule = match self {
            Self::Off => return Ok(()),
            Self::On => String::new(),
            Self::Rewrite => format!("iifname {{ {taps} }} ip ttl set {TTL};"),
        };
        host.run("nft", &TABLE.replace("RULE", &rule))?;
        if self == Self::On {
            return Ok(());
        }
        let [mirror, end] = VETH;
        let [copied, shared] = COUNTERS;
        host.ip(&format!(
            "link add {mirror} type veth peer name {end}
             link set {mirror} up
             link set {end} up"
        ))?;
        let hook = "type filter hook ingress";
        let table = format!(
            "table netdev lab {{ counter {copied} {{ }}; counter {shared} {{ }}; \
             chain duplicated {{ {hook} devices = {{ {taps} }} priority 0; \
             meta protocol ip dup to {mirror}; }}; \
             chain counted {{ {hook} device {end} priority 0; ip ttl {TTL} counter name {shared}; \
             ip ttl != {TTL} counter name {copied}; drop; }}; }}"
        );
        host.run("nft", &table).map(|_| ())
    }

    /// Checks that replies from an address have passed it.
    pub fn check(self, host: &Namespace, guest: &str) -> Result<(), Fail> {
        if self != Self::Rewrite {
            return Ok(());
        }
        let reply = host.run("ping", &format!("-n -c 1 -W 5 {guest}"))?;
        if ttl(&reply) == Some(TTL) {
            return Ok(());
        }
        Err(Fail::Cell(format!("the filter does not rewrite packets from {guest}: {reply}")))
    }

    /// Number of packets that were copied for it since it was loaded.
    ///
    /// # Errors
    /// A packet was rewritten without a copy: its duplicate was, too.
    pub fn copies(self, host: &Namespace) -> Result<f64, Fail> {
        if self != Self::Rewrite {
            return Ok(0.0);
        }
        let [copied, shared] = COUNTERS.map(|name| {
            let text = host.run("nft", &format!("list counter netdev lab {name}"))?;
            packets(&text).ok_or_else(|| Fail::Cell(format!("nft prints no counter: {text}")))
        });
        let (copied, shared) = (copied?, shared?);
        if shared > 0.0 || copied == 0.0 {
            let what = format!("the filter forced {copied} copies, and {shared} packets had none");
            return Err(Fail::Cell(what));
        }
        Ok(copied)
    }
}

/// The TTL in a line of `ping`.
fn ttl(text: &str) -> Option<u8> {
    text.split_once(" ttl=")?.1.split_whitespace().next()?.parse().ok()
}

/// The packets of a counter that `nft list` printed.
fn packets(text: &str) -> Option<f64> {
    text.split_once("packets ")?.1.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ttl_and_counters_are_read_from_what_the_tools_print() {
        let reply = "64 bytes from 10.9.1.2: icmp_seq=1 ttl=33 time=0.200 ms\n";
        assert_eq!(ttl(reply), Some(33));
        assert_eq!(ttl("PING 10.9.1.2 (10.9.1.2) 56(84) bytes of data."), None);
        let listed = "table netdev lab {\n\tcounter copied {\n\t\tpackets 7 bytes 588\n\t}\n}\n";
        assert_eq!(packets(listed), Some(7.0));
        assert_eq!(packets("table netdev lab {\n}\n"), None);
    }
}
