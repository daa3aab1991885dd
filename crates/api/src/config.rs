//! The configuration of a switch as a whole: what a file, a command line or `ctl save` holds.
//!
//! ```text
//!   file ─┐                          ┌─ to_toml: `ctl save`
//!         ├─ File::with ──▶ Config ──┤
//!   command line ─┘   (checked)      └─ diff: `ctl reload`
//! ```

mod diff;
mod mirrors;
mod standbys;
mod text;
mod toml;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use serde::Serialize;

pub use self::diff::{Diff, PortDiff, SettingDiff};
pub use self::mirrors::{MIRROR_TO, Mirrors};
pub use self::standbys::{STANDBY_FOR, Standbys};
pub use self::text::ConfigText;
pub(crate) use self::toml::quoted;
use crate::near::did_you_mean;
use crate::port::{Given, PortText};
use crate::schema::port::Kind;
use crate::schema::{Change, Value};
use crate::{Settings, mac};

/// Most ports of one switch.
pub const PORTS_MAX: u16 = 4096;
/// Highest VLAN id.
const VLAN_MAX: u16 = 4094;

/// The configuration of a switch.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Settings of the switch as a whole.
    pub settings: Settings,
    /// Ports: those of the file ordered by name, then those of the command line.
    pub ports: Vec<PortText>,
    /// Static addresses.
    pub statics: Vec<Static>,
}

/// A static address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Static {
    /// The address, and its VLAN unless untagged: `02:00:00:00:00:01`, `02:00:00:00:00:01/5`.
    pub address: StaticAddress,
    /// Name of its port.
    pub port: String,
}

/// An address on a VLAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StaticAddress {
    /// The MAC address.
    pub mac: [u8; 6],
    /// VLAN id, 0 for untagged.
    pub vlan: u16,
}

impl std::str::FromStr for StaticAddress {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let (address, vlan) = s.split_once('/').map_or((s, None), |(mac, vlan)| (mac, Some(vlan)));
        let number = |text: &str| text.parse().ok().filter(|n| (1..=VLAN_MAX).contains(n));
        let vlan = match vlan.map(number) {
            None => 0,
            Some(Some(vlan)) => vlan,
            Some(None) => {
                return Err(format!("'{s}': use MAC or MAC/VLAN, with a VLAN ID of 1 to 4094"));
            }
        };
        Ok(Self { mac: mac(address)?, vlan })
    }
}

impl fmt::Display for StaticAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mac = Value::Macs(vec![self.mac]);
        match self.vlan {
            0 => write!(f, "{mac}"),
            vlan => write!(f, "{mac}/{vlan}"),
        }
    }
}

impl Serialize for StaticAddress {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A part of a configuration, to locate an error.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// A port, by name.
    Port(String),
    /// An option of a port, by their names.
    Option(String, &'static str),
    /// A static address.
    Static(StaticAddress),
    /// None in particular.
    Whole,
}

impl Config {
    /// The port of this name.
    pub fn port(&self, name: &str) -> Option<&PortText> {
        self.ports.iter().find(|port| port.name == name)
    }

    /// Removes a port and the static addresses on it, and ends the mirrors to it and standing by
    /// for it.
    pub fn remove_port(&mut self, name: &str) {
        self.ports.retain(|port| port.name != name);
        self.end_mirrors(name);
        self.end_standbys(name);
        self.statics.retain(|entry| entry.port != name);
    }

    /// Sets a static address; it replaces an earlier one.
    pub fn set_static(&mut self, address: StaticAddress, port: &str) {
        self.remove_static(address);
        self.statics.push(Static { address, port: port.into() });
    }

    /// Removes a static address, if it is one.
    pub fn remove_static(&mut self, address: StaticAddress) {
        self.statics.retain(|entry| entry.address != address);
    }

    /// Records a change by `ctl set` of the switch (no port), a port, or one of its queues.
    pub fn set(&mut self, port: Option<&str>, queue: Option<usize>, changes: &[Change]) {
        for Change { entry, value } in changes {
            let of_port = |port: &mut PortText| {
                port.set(Given { entry, queue, value: value.clone() });
            };
            match port {
                Some(name) => self.ports.iter_mut().filter(|p| p.name == name).for_each(of_port),
                None => {
                    self.settings.set(entry, value.clone());
                    // It was set on every port, too.
                    for port in &mut self.ports {
                        port.options.retain(|given| given.entry.name != entry.name);
                    }
                }
            }
        }
    }

    /// Checks that a port can be added.
    ///
    /// # Errors
    /// Its name or its peer is that of another one, or its mirror port or the port that it stands
    /// by for is invalid.
    pub fn check_new(&self, port: &PortText) -> Result<(), String> {
        let mut all = self.clone();
        all.ports.push(port.clone());
        let before = self.conflicts();
        match all.conflicts().into_iter().find(|conflict| !before.contains(conflict)) {
            Some((_, what)) => Err(what),
            None => Ok(()),
        }
    }

    /// Finds parts that are valid by themselves, but not together.
    pub fn conflicts(&self) -> Vec<(Part, String)> {
        let mut found = Vec::new();
        if self.ports.is_empty() && self.settings.text("control").is_none() {
            let what = "no ports: add --port NAME=KIND:ARG, or --control PATH to add them later; \
                        see pvswitch run --help";
            found.push((Part::Whole, what.into()));
        }
        if self.ports.len() > usize::from(PORTS_MAX) {
            let what = format!("{} ports: a switch has at most {PORTS_MAX}", self.ports.len());
            found.push((Part::Whole, what));
        }
        let (mut names, mut peers) = (BTreeMap::new(), BTreeMap::new());
        for port in &self.ports {
            let part = || Part::Port(port.name.clone());
            if names.insert(&port.name, ()).is_some() {
                let what =
                    format!("port '{}' exists already: give each port its own name", port.name);
                found.push((part(), what));
            }
            let Some(peer) = peer(port) else { continue };
            if let Some(other) = peers.insert(peer.clone(), &port.name) {
                let name = &port.name;
                let what = format!("port '{name}': {peer} is already used by port '{other}'");
                found.push((part(), what));
            }
        }
        let mirrors = self.mirrors().conflicts().into_iter();
        found.extend(mirrors.map(|(port, what)| (Part::Option(port.into(), MIRROR_TO), what)));
        found.extend(self.standby_conflicts());
        for Static { address, port } in &self.statics {
            if !names.contains_key(port) {
                let hint = did_you_mean(port, names.keys().map(|name| name.as_str()));
                let port = port.escape_debug();
                let what = format!("static address {address}: no port '{port}'{hint}");
                found.push((Part::Static(*address), what));
            }
        }
        found
    }

    /// Warnings about valid settings that are probably mistakes: transparent ports beside
    /// ports with VLANs, ports of one VLAN that own the same MAC address, and standby ports with
    /// other rules.
    pub fn warnings(&self) -> Vec<(Part, String)> {
        let mut found = self.transparent_beside_vlans();
        found.extend(self.shared_macs());
        found.extend(self.unlike_standbys());
        found
    }

    fn transparent_beside_vlans(&self) -> Vec<(Part, String)> {
        let mirror_ports: HashSet<_> =
            self.ports.iter().filter_map(|port| port.text(MIRROR_TO)).collect();
        let (transparent, others): (Vec<_>, Vec<_>) =
            self.ports.iter().partition(|port| port.is_transparent());
        let Some(other) = others.first() else { return Vec::new() };
        let warned = transparent.into_iter().filter(|port| !mirror_ports.contains(&port.name));
        let warning = |PortText { name, .. }: &PortText| {
            let what = format!(
                "port '{name}' carries all VLANs, but port '{}' is in one of its own: the peer of \
                 '{name}' can send into every VLAN with a tag, and receives the flooded frames of \
                 all: add vlan=N or trunk=N+M, unless that peer is trusted",
                other.name
            );
            (Part::Port(name.clone()), what)
        };
        warned.map(warning).collect()
    }

    fn shared_macs(&self) -> Vec<(Part, String)> {
        let mut owners: HashMap<_, Vec<&PortText>> = HashMap::new();
        let mut found = Vec::new();
        for port in &self.ports {
            let shares_vlan = |other: &PortText| {
                let vids: HashSet<u16> = port.vids().into_iter().collect();
                other.name != port.name && other.vids().iter().any(|vid| vids.contains(vid))
            };
            // One warning for an address, however many VLANs and ports share it.
            for mac in port.macs("mac") {
                let owners = owners.entry(mac).or_default();
                if let Some(other) = owners.iter().find(|other| shares_vlan(other)) {
                    let (name, other) = (&port.name, &other.name);
                    let address = Value::Macs(vec![mac]);
                    let what = format!(
                        "port '{name}': mac={address} is also set for port '{other}', in the same \
                         VLAN: frames for it go to the port that last sent from it, unless only \
                         one of them is up"
                    );
                    found.push((Part::Option(name.clone(), "mac"), what));
                }
                owners.push(port);
            }
        }
        found
    }
}

/// What only one port of a switch can use; `None`: nothing.
fn peer(port: &PortText) -> Option<String> {
    let key = port.kind.entry().file;
    match port.kind {
        // A front-end that listens may accept several connections.
        Kind::VhostUser | Kind::Stream if port.word("mode") == Some("client") => None,
        Kind::Tap | Kind::AfPacket | Kind::AfXdp => {
            let netns = port.text("netns").map(|netns| format!(" in {netns}"));
            Some(format!("{key} {}{}", port.arg, netns.unwrap_or_default()))
        }
        Kind::VhostUser | Kind::Stream | Kind::Dgram | Kind::Xen | Kind::XenLocal => {
            Some(format!("{key} {}", port.arg))
        }
        Kind::Passt | Kind::Null => None,
    }
}

#[cfg(test)]
mod tests;
