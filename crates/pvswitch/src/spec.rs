//! Ports as the daemon uses them: [`api::PortText`] converted to the types of the crates that serve
//! the ports.

use std::fmt;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use api::config::STANDBY_FOR;
use api::port::Given;
use api::schema::port::{self, LIMIT, vif};
use api::schema::{Change, Entry, Value};
use api::{PerQueue, PortError, PortText};
use os::{Group, Permissions as SocketPermissions};
use switch::account::{Account, NAMES};
use switch::poll::Policy;
use uplink::{XdpMode, XdpOptions};
use vhost_user::backend::Permissions;
use vhost_user::feature;
use xen_netif::back::{self, Offer, VifId};

use crate::tenant::Tenant;

/// Specification of one port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSpec {
    /// Unique name.
    pub name: String,
    /// Kind of port and its settings.
    pub kind: Kind,
    /// Options of every kind of port.
    pub tuning: PortTuning,
}

/// A policy for all queues, with exceptions for some.
pub type Policies = PerQueue<Policy>;

/// Options of every kind of port, where they differ from the switch's settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortTuning {
    /// Policy for polling its ingress queues.
    pub poll: Policies,
    /// Policy for notifying its peer of frames.
    pub call: Policies,
    /// Share of a worker's time, relative to other ports.
    pub weight: PerQueue<u32>,
    /// Maximum number of frames held for each full queue to its peer.
    pub hold: PerQueue<u16>,
    /// Limits on the resources that its peer may use.
    pub limits: Limits,
    /// Its rules, if its peer is a tenant.
    pub tenant: Tenant,
    /// The port in whose place it is put.
    pub standby: Standby,
}

/// The pair that a port on an interface is in, as the standby port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standby {
    /// The preferred port; `None`: it is in no pair, or that is the preferred one.
    pub of: Option<String>,
    /// Seconds for which that one must work before it is used again.
    return_after_s: Option<u64>,
}

impl Standby {
    fn set(&mut self, entry: &Entry, value: &Value) {
        match entry.name {
            STANDBY_FOR => self.of = value.text().filter(|of| *of != "none").map(Into::into),
            RETURN_AFTER => self.return_after_s = value.number(),
            _ => {}
        }
    }

    /// Applies those of these changes that concern it.
    pub fn change(&mut self, changes: &[Change]) {
        changes.iter().for_each(|change| self.set(change.entry, &change.value));
    }

    /// Time for which the preferred port must work before it is used again.
    pub fn return_after(&self) -> Duration {
        let entry = || port::Kind::AfPacket.options().find(|entry| entry.name == RETURN_AFTER);
        let default = || entry()?.default_value()?.number();
        Duration::from_secs(self.return_after_s.or_else(default).unwrap_or_default())
    }
}

const RETURN_AFTER: &str = "return-after";

/// Limits of a port's account that differ from the defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits([Option<u64>; NAMES.len()]);

impl Limits {
    /// Limits that are set: name of the account's entry, and its limit.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        NAMES.into_iter().zip(self.0).filter_map(|(name, limit)| Some((name, limit?)))
    }

    /// Applies the limits to an account; its other limits stay.
    pub fn apply(&self, account: &Account) {
        for (name, limit) in self.all() {
            account.set_limit(name, limit);
        }
    }
}

impl PortTuning {
    /// Sets an option. Options of a single kind of port are ignored.
    pub fn set(&mut self, entry: &Entry, queue: Option<usize>, value: &Value) {
        let limit = entry.name.strip_prefix(LIMIT);
        if let Some(at) = limit.and_then(|name| NAMES.iter().position(|known| *known == name)) {
            self.limits.0[at] = value.number();
            return;
        }
        if self.tenant.set(entry, value) {
            return;
        }
        self.standby.set(entry, value);
        match entry.name {
            "poll" => set(&mut self.poll, queue, value.text().map(policy)),
            "call" => set(&mut self.call, queue, value.text().map(policy)),
            "weight" => set(&mut self.weight, queue, value.number().map(|n| n as u32)),
            "hold" => set(&mut self.hold, queue, value.number().map(|n| n as u16)),
            _ => {}
        }
    }
}

/// Sets the value of one queue, or of all queues.
fn set<T: Copy>(values: &mut PerQueue<T>, queue: Option<usize>, value: Option<T>) {
    match (queue, value) {
        (_, None) => {}
        (Some(queue), Some(value)) => values.set_one(queue, value),
        (None, Some(value)) => values.extend(&value.into()),
    }
}

/// Parses a policy that the schema has validated.
pub fn policy(text: &str) -> Policy {
    text.parse().expect("the schema accepts policies only")
}

/// Kind of port and its settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A guest's virtio-net device.
    VhostUser(VhostUser),
    /// A peer at a stream socket, in QEMU's framing.
    Stream(Stream),
    /// A peer at a datagram socket.
    Dgram(Dgram),
    /// The host's network, by a passt that the switch starts.
    Passt(Passt),
    /// A TAP interface of the host.
    Tap(Tap),
    /// Packet sockets on an interface.
    AfPacket(AfPacket),
    /// AF_XDP sockets on an interface.
    AfXdp(XdpOptions),
    /// A Xen guest's vif.
    Xen(Xen),
    /// Accepts and drops all frames.
    Null,
}

/// A vhost-user port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUser {
    /// Socket path.
    pub socket: PathBuf,
    /// Which side listens.
    pub role: Role,
    /// Queue pairs offered.
    pub queues: u16,
    /// MTU offered, in bytes.
    pub mtu: Option<u16>,
    /// MAC address offered.
    pub mac: Option<[u8; 6]>,
    /// Feature bits not offered.
    pub without: u64,
    /// Permissions of its front-end.
    pub permissions: Permissions,
    /// Who may connect.
    pub access: Access,
}

/// A stream port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stream {
    /// Socket path.
    pub socket: PathBuf,
    /// Which side listens.
    pub role: Role,
    /// Who may connect.
    pub access: Access,
}

/// A datagram port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dgram {
    /// Socket path.
    pub socket: PathBuf,
    /// That of its peer.
    pub peer: PathBuf,
    /// Who may send.
    pub access: Access,
}

/// A port to a passt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Passt {
    /// MTU that it assigns to guests, in bytes.
    pub mtu: u16,
}

/// A TAP port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tap {
    /// Interface name.
    pub ifname: String,
    /// Network namespace of the interface, if not ours.
    pub netns: Option<String>,
    /// Number of queues.
    pub queues: u16,
    /// MTU to set, in bytes.
    pub mtu: Option<u16>,
    /// Whether it stays when the switch ends; `None`: unchanged.
    pub persist: Option<bool>,
    /// Bridge in which addresses at other ports are announced to other hosts.
    pub evpn: Option<String>,
    /// Whether it is the interface of a vif: new, and set up by the toolstack's scripts.
    pub of_vif: bool,
}

/// A port on an interface of the host, by packet sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AfPacket {
    /// Interface name.
    pub ifname: String,
    /// Network namespace of the interface, if not ours.
    pub netns: Option<String>,
    /// Number of sockets.
    pub queues: u16,
}

/// A port for a vif, or for all vifs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xen {
    /// Which vif.
    pub at: XenAt,
    /// Features and queues offered by the back half.
    pub offer: Offer,
    /// Whether each vif has a TAP of its own.
    pub tap: bool,
    /// Who may connect, without Xen.
    pub access: Access,
}

/// Who may connect to a socket, as given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// Permission bits.
    pub mode: Option<u32>,
    /// Name or number of a group.
    pub group: Option<String>,
}

/// Mode of a socket that only its owner may use, and of one with a group.
const MODE_OWNER: u32 = 0o600;
const MODE_GROUP: u32 = 0o660;

impl Access {
    /// Permissions of the socket. `what` names the socket in messages: the prefix of its settings.
    ///
    /// # Errors
    /// There is no such group; the error says what to write.
    pub fn permissions(&self, what: &str) -> Result<SocketPermissions, String> {
        let find = |name: &String| {
            Group::find(name).ok_or_else(|| {
                format!(
                    "{what}-group={name}: this machine has no such group; use a name or number \
                     that `getent group` lists"
                )
            })
        };
        let group = self.group.as_ref().map(find).transpose()?;
        let default = if group.is_some() { MODE_GROUP } else { MODE_OWNER };
        Ok(SocketPermissions { mode: self.mode.unwrap_or(default), group })
    }
}

/// Address of a vif.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum XenAt {
    /// This vif, of real Xen (`xen:DOMID/DEVID`).
    Vif(VifId),
    /// Every vif of this back-end domain, each as a port named `vifD.N` (`xen:auto`).
    Auto,
    /// The vif of a directory, without Xen (`xen-local:DIR`).
    Local(PathBuf),
}

/// Our end of a port's socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// We listen (`mode=server`).
    #[default]
    Server,
    /// The peer listens (`mode=client`); we connect, and retry indefinitely.
    Client,
}

impl FromStr for PortSpec {
    type Err = PortError;

    fn from_str(s: &str) -> Result<Self, PortError> {
        Ok(Self::from(&s.parse()?))
    }
}

impl From<&PortText> for PortSpec {
    fn from(text: &PortText) -> Self {
        let mut tuning = PortTuning::default();
        for Given { entry, queue, value } in &text.options {
            tuning.set(entry, *queue, value);
        }
        Self { name: text.name.clone(), kind: kind(text), tuning }
    }
}

fn kind(text: &PortText) -> Kind {
    let queues = text.number("queues").unwrap_or(1) as u16;
    let mtu = || text.number("mtu").map(|mtu| mtu as u16);
    let access = Access {
        mode: text.number("socket-mode").map(|mode| mode as u32),
        group: text.text("socket-group"),
    };
    let role = || if text.word("mode") == Some("client") { Role::Client } else { Role::Server };
    match text.kind {
        port::Kind::VhostUser => Kind::VhostUser(VhostUser {
            socket: text.arg.clone().into(),
            role: role(),
            queues,
            mtu: mtu(),
            mac: text.macs("mac").first().copied(),
            without: bits(&text.names("without"), feature::parse),
            permissions: Permissions {
                any_memory: text.word("memory") == Some("any"),
                polled: text.word("polled") == Some("on"),
            },
            access,
        }),
        port::Kind::Stream => {
            Kind::Stream(Stream { socket: text.arg.clone().into(), role: role(), access })
        }
        port::Kind::Dgram => Kind::Dgram(Dgram {
            socket: text.arg.clone().into(),
            peer: text.text("peer").unwrap_or_default().into(),
            access,
        }),
        port::Kind::Passt => Kind::Passt(Passt { mtu: mtu().unwrap_or(1500) }),
        port::Kind::Tap => Kind::Tap(Tap {
            ifname: text.arg.clone(),
            netns: text.text("netns"),
            queues,
            mtu: mtu(),
            persist: match text.word("persist") {
                Some("on") => Some(true),
                Some("off") => Some(false),
                _ => None,
            },
            evpn: text.text("evpn"),
            of_vif: false,
        }),
        port::Kind::AfPacket => {
            let (ifname, netns) = (text.arg.clone(), text.text("netns"));
            Kind::AfPacket(AfPacket { ifname, netns, queues })
        }
        port::Kind::AfXdp => Kind::AfXdp(XdpOptions {
            name: text.arg.clone(),
            netns: text.text("netns"),
            queues: NonZeroU16::new(queues).unwrap_or(NonZeroU16::MIN),
            mode: match text.word("mode") {
                Some("copy") => XdpMode::Copy,
                Some("zero-copy") => XdpMode::ZeroCopy,
                _ => XdpMode::Auto,
            },
            map: text.text("map").map(Into::into),
        }),
        port::Kind::Xen | port::Kind::XenLocal => {
            let mut without = text.names("without");
            if text.word("smart-poll") != Some("on") {
                without.push("smart-poll");
            }
            let at = match vif(&text.arg) {
                _ if text.kind == port::Kind::XenLocal => XenAt::Local(text.arg.clone().into()),
                Ok(Some((domid, devid))) => XenAt::Vif(VifId { domid, devid }),
                Ok(None) | Err(_) => XenAt::Auto,
            };
            let offer = Offer { queues, without: bits(&without, back::without) };
            Kind::Xen(Xen { at, offer, tap: text.word("tap") == Some("vif"), access })
        }
        port::Kind::Null => Kind::Null,
    }
}

impl Kind {
    /// The kind's entry in the schema.
    pub fn schema(&self) -> port::Kind {
        match self {
            Self::VhostUser(_) => port::Kind::VhostUser,
            Self::Stream(_) => port::Kind::Stream,
            Self::Dgram(_) => port::Kind::Dgram,
            Self::Passt(_) => port::Kind::Passt,
            Self::Tap(_) => port::Kind::Tap,
            Self::AfPacket(_) => port::Kind::AfPacket,
            Self::AfXdp(_) => port::Kind::AfXdp,
            Self::Xen(Xen { at: XenAt::Local(_), .. }) => port::Kind::XenLocal,
            Self::Xen(_) => port::Kind::Xen,
            Self::Null => port::Kind::Null,
        }
    }
}

/// Bits of features by name, which the schema has validated.
fn bits<T: Default>(names: &[&str], parse: impl Fn(&str) -> Result<T, String>) -> T {
    if names.is_empty() {
        return T::default();
    }
    parse(&names.join("+")).expect("the schema accepts known features only")
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::VhostUser(port) => {
                let mode = if port.role == Role::Client { ",mode=client" } else { "" };
                write!(f, "vhost-user:{}{mode}", port.socket.display())
            }
            Self::Stream(port) => {
                let mode = if port.role == Role::Client { ",mode=client" } else { "" };
                write!(f, "stream:{}{mode}", port.socket.display())
            }
            Self::Dgram(port) => {
                write!(f, "dgram:{},peer={}", port.socket.display(), port.peer.display())
            }
            Self::Passt(_) => f.write_str("passt"),
            Self::Tap(port) => write!(f, "tap:{}", port.ifname),
            Self::AfPacket(port) => write!(f, "af-packet:{}", port.ifname),
            Self::AfXdp(port) => write!(f, "af-xdp:{}", port.name),
            Self::Xen(Xen { at: XenAt::Vif(id), .. }) => write!(f, "xen:{id}"),
            Self::Xen(Xen { at: XenAt::Auto, .. }) => f.write_str("xen:auto"),
            Self::Xen(Xen { at: XenAt::Local(dir), .. }) => {
                write!(f, "xen-local:{}", dir.display())
            }
            Self::Null => f.write_str("null"),
        }
    }
}

#[cfg(test)]
mod tests;
