//! Port specifications: `NAME=KIND:ARG[,key=value]...` on the command line, a table in the config.

pub mod limits;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use lab::near::did_you_mean;
use switch::fair::WEIGHT_MAX;
use switch::hold::HOLD_MAX;
use switch::poll::Policy;
use vhost_user::backend::Takes;
use vhost_user::feature;
use vhost_user::net::PAIRS_MAX;
use xen_netif::back::{self, Offer, QUEUES_MAX, VifId};

use self::limits::{LIMITS, Limits};

/// Longest port name; it must fit a Linux interface name, so that tools can reuse it.
const NAME_MAX: usize = 15;
/// Longest socket path that fits `sockaddr_un`.
const SOCKET_PATH_MAX: usize = 107;
/// Longest Linux interface name.
const IFNAME_MAX: usize = 15;

/// One port, as the operator wants it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortSpec {
    /// Unique name.
    pub name: String,
    /// What it attaches to.
    pub kind: Kind,
    /// How it is served.
    pub tuning: PortTuning,
}

/// How a port is served, where it differs from the switch's own settings. Any kind has these
/// options; all but `without` can be changed at run time (`ctl set`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortTuning {
    /// When its ingress queues are looked at.
    pub poll: Policies,
    /// When its peer is notified of frames.
    pub call: Policies,
    /// Its part of a worker's time, against other ports'.
    pub weight: Option<u32>,
    /// Most frames each of its ingress queues may have held for full destinations.
    pub hold: Option<u16>,
    /// What its peer may make the switch spend.
    pub limits: Limits,
}

/// Options of every kind of port, beside its [`LIMITS`].
const TUNING: [&str; 4] = ["poll", "call", "weight", "hold"];

/// Options of every kind of port.
pub fn tuning_options() -> Vec<&'static str> {
    [&TUNING[..], &LIMITS].concat()
}

/// Most queue pairs of any port.
const PAIRS: usize = if PAIRS_MAX > QUEUES_MAX { PAIRS_MAX as usize } else { QUEUES_MAX as usize };

/// A policy of all queues, where it is not the default, and of some of them, where it is another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policies {
    all: Option<Policy>,
    one: [Option<Policy>; PAIRS],
}

/// The same for all queues.
impl From<Policy> for Policies {
    fn from(policy: Policy) -> Self {
        Self { all: Some(policy), ..Self::default() }
    }
}

impl Policies {
    /// Sets that of one queue; there are [`PAIRS`] at most.
    pub fn set_one(&mut self, queue: usize, policy: Policy) {
        self.one[queue] = Some(policy);
    }

    /// That of all queues that have none of their own.
    pub fn all(&self) -> Option<Policy> {
        self.all
    }

    /// That of a queue; `None`: the default.
    pub fn of(&self, queue: usize) -> Option<Policy> {
        self.one.get(queue).copied().flatten().or(self.all)
    }

    /// Sets what `later` does; what that leaves open stays.
    pub fn extend(&mut self, later: &Self) {
        self.all = later.all.or(self.all);
        later.ones().for_each(|(queue, policy)| self.set_one(queue, policy));
    }

    /// The queues that have one of their own.
    pub fn ones(&self) -> impl Iterator<Item = (usize, Policy)> + '_ {
        self.one.iter().enumerate().filter_map(|(queue, policy)| Some((queue, (*policy)?)))
    }

    /// Sets what `KEY=POLICY` or `KEY/QUEUE=POLICY` says; errors name the option.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        let policy = value.parse().map_err(|error| format!("{key}={value}: {error}"))?;
        match key.split_once('/') {
            None => self.all = Some(policy),
            Some((word, queue)) => {
                let number = queue.parse::<usize>().ok().filter(|n| *n < PAIRS);
                let number = number.ok_or_else(|| {
                    let last = PAIRS - 1;
                    format!("{key}={value}: use {word}/QUEUE, a queue pair's number, 0 to {last}")
                })?;
                self.one[number] = Some(policy);
            }
        }
        Ok(())
    }

    /// Refuses policies of queues that are not there, `queues` being all.
    pub fn check(&self, key: &str, queues: u16) -> Result<(), String> {
        match self.ones().find(|(queue, _)| *queue >= usize::from(queues)) {
            None => Ok(()),
            Some((queue, _)) if queues == 1 => Err(format!(
                "{key}/{queue}: there is one queue pair, number 0, unless more are asked for"
            )),
            Some((queue, _)) => {
                let last = queues - 1;
                Err(format!("{key}/{queue}: there are {queues} queue pairs, 0 to {last}"))
            }
        }
    }
}

impl PortTuning {
    /// Sets an option; false: there is none of that name.
    pub fn set(&mut self, key: &str, value: &str) -> Result<bool, String> {
        match key.split_once('/').map_or(key, |(word, _)| word) {
            "poll" => self.poll.set(key, value)?,
            "call" => self.call.set(key, value)?,
            _ if key == "weight" => self.weight = Some(within(key, value, 1, WEIGHT_MAX)?),
            _ if key == "hold" => self.hold = Some(within(key, value, 0, HOLD_MAX.into())? as u16),
            _ => return self.limits.set(key, value),
        }
        Ok(true)
    }
}

fn within(key: &str, value: &str, min: u32, max: u32) -> Result<u32, String> {
    let n = value.parse().ok().filter(|n| (min..=max).contains(n));
    n.ok_or_else(|| format!("{key}={value}: use {min} to {max}"))
}

/// What a port attaches to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A guest's virtio-net device.
    VhostUser(VhostUser),
    /// A TAP interface of the host.
    Tap(Tap),
    /// A Xen guest's vif.
    Xen(Xen),
    /// Takes and drops everything.
    Null,
}

/// A vhost-user port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostUser {
    /// Socket path.
    pub socket: PathBuf,
    /// Who listens.
    pub role: Role,
    /// Queue pairs offered.
    pub queues: u16,
    /// MTU offered, in bytes.
    pub mtu: Option<u16>,
    /// MAC address offered.
    pub mac: Option<[u8; 6]>,
    /// Features not offered, as bits.
    pub without: u64,
    /// What its front-end may do.
    pub takes: Takes,
}

/// A TAP port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tap {
    /// Interface name.
    pub ifname: String,
    /// Network namespace of the interface, if not ours.
    pub netns: Option<String>,
    /// Queues.
    pub queues: u16,
    /// MTU to set, in bytes.
    pub mtu: Option<u16>,
}

/// A port for a vif, or for all vifs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Xen {
    /// Which.
    pub at: XenAt,
    /// What the back half offers.
    pub offer: Offer,
}

/// Which vif of which hypervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum XenAt {
    /// This one, of real Xen (`xen:DOMID/DEVID`).
    Vif(VifId),
    /// Every one of this back-end domain, each a port of its own named `vifD.N` (`xen:auto`).
    Auto,
    /// That of a directory, without Xen (`xen-local:DIR`).
    Local(PathBuf),
}

/// Queues that a vif is offered unless told otherwise. A guest takes no more than it has CPUs.
pub const XEN_QUEUES: u16 = 4;

/// Which end of a vhost-user socket we are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// We listen (`mode=server`).
    #[default]
    Server,
    /// The front-end listens (`mode=client`); we connect, for ever.
    Client,
}

/// What is wrong with a specification.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("port '{spec}': {what}")]
pub struct SpecError {
    spec: String,
    what: String,
}

/// Kinds that exist, for messages.
const KINDS: [&str; 5] = ["vhost-user", "tap", "xen", "xen-local", "null"];
/// Kinds of later versions: named so that the message can say so.
const KINDS_LATER: [&str; 3] = ["af-packet", "af-xdp", "pcap"];

impl FromStr for PortSpec {
    type Err = SpecError;

    fn from_str(s: &str) -> Result<Self, SpecError> {
        let error = |what: String| SpecError { spec: s.into(), what };
        let shape = "use NAME=KIND:ARG[,key=value]..., for example vm1=vhost-user:/tmp/vm1.sock";
        let (name, rest) = s.split_once('=').ok_or_else(|| error(shape.into()))?;
        // A kind without an argument may have options: null,weight=2.
        let end = rest.find([':', ',']).unwrap_or(rest.len());
        let (kind, rest) = rest.split_at(end);
        let rest = rest.strip_prefix(':').unwrap_or(rest);
        let mut parts = rest.split(',');
        let arg = parts.next().unwrap_or_default();
        let mut options: Vec<(&str, String)> = Vec::new();
        for part in parts {
            match (part.split_once('='), options.last_mut()) {
                (Some((key, value)), _) => options.push((key, value.into())),
                // A policy may have a comma in it: poll=coalesce:50,32.
                (None, Some((_, value))) if value.starts_with("coalesce:") => {
                    value.push(',');
                    value.push_str(part);
                }
                _ => return Err(error(format!("option '{part}' has no value: use key=value"))),
            }
        }
        let mut tuning = PortTuning::default();
        let mut own = Vec::new();
        for (key, value) in &options {
            if !tuning.set(key, value).map_err(&error)? {
                own.push((*key, value.as_str()));
            }
        }
        let kind = kind_of(kind, arg, &own).map_err(&error)?;
        let spec = Self { name: name.into(), kind, tuning };
        spec.check().map_err(error)?;
        Ok(spec)
    }
}

fn kind_of(kind: &str, arg: &str, options: &[(&str, &str)]) -> Result<Kind, String> {
    match kind {
        "vhost-user" => {
            let mut port = VhostUser {
                socket: arg.into(),
                role: Role::default(),
                queues: 1,
                mtu: None,
                mac: None,
                without: 0,
                takes: Takes::default(),
            };
            for (key, value) in options {
                match *key {
                    "memory" => port.takes.any_memory = any_memory(value)?,
                    "polled" => port.takes.polled = polled(value)?,
                    "mode" => port.role = value.parse()?,
                    "queues" => port.queues = number(key, value)?,
                    "mtu" => port.mtu = Some(number(key, value)?),
                    "mac" => port.mac = Some(mac(value)?),
                    "without" => port.without = without(value)?,
                    _ => {
                        let known = ["mode", "queues", "mtu", "mac", "without", "memory", "polled"];
                        return Err(unknown(key, kind, &known));
                    }
                }
            }
            Ok(Kind::VhostUser(port))
        }
        "tap" => {
            let mut port = Tap { ifname: arg.into(), netns: None, queues: 1, mtu: None };
            for (key, value) in options {
                match *key {
                    "netns" => port.netns = Some((*value).into()),
                    "queues" => port.queues = number(key, value)?,
                    "mtu" => port.mtu = Some(number(key, value)?),
                    _ => return Err(unknown(key, kind, &["netns", "queues", "mtu"])),
                }
            }
            Ok(Kind::Tap(port))
        }
        "xen" => {
            let at = match arg {
                "auto" => XenAt::Auto,
                _ => XenAt::Vif(vif(arg)?),
            };
            Ok(Kind::Xen(Xen { at, offer: offer(kind, options)? }))
        }
        "xen-local" => {
            Ok(Kind::Xen(Xen { at: XenAt::Local(arg.into()), offer: offer(kind, options)? }))
        }
        "null" => match options.first() {
            Some((key, _)) => Err(unknown(key, kind, &[])),
            None => Ok(Kind::Null),
        },
        _ if KINDS_LATER.contains(&kind) => {
            Err(format!("kind '{kind}' is not in this version; it has {}", KINDS.join(", ")))
        }
        _ => {
            let hint = did_you_mean(kind, KINDS);
            Err(format!("unknown kind '{kind}'{hint}: use one of {}", KINDS.join(", ")))
        }
    }
}

/// A vif by its numbers, `DOMID/DEVID`.
pub fn vif(arg: &str) -> Result<VifId, String> {
    let numbers = arg.split_once('/').and_then(|(domid, devid)| {
        Some(VifId { domid: domid.parse().ok()?, devid: devid.parse().ok()? })
    });
    numbers.ok_or_else(|| {
        format!("'{arg}' is no vif: use xen:DOMID/DEVID, for example xen:1/0, or xen:auto")
    })
}

/// What a vif is offered. Smart poll is for front halves of our own: off unless asked for.
fn offer(kind: &str, options: &[(&str, &str)]) -> Result<Offer, String> {
    let (mut queues, mut names, mut smart_poll) = (XEN_QUEUES, None, false);
    for (key, value) in options {
        match *key {
            "queues" => queues = number(key, value)?,
            "without" => names = Some(*value),
            "smart-poll" => smart_poll = on_off(key, value)?,
            _ => return Err(unknown(key, kind, &["queues", "without", "smart-poll"])),
        }
    }
    xen_offer(queues, names, smart_poll)
}

/// An offer, from options or from the configuration file.
pub fn xen_offer(queues: u16, without: Option<&str>, smart_poll: bool) -> Result<Offer, String> {
    let off = if smart_poll { 0 } else { back::without("smart-poll")? };
    let without = without.map_or(Ok(0), back::without).map_err(|word| {
        let hint = did_you_mean(&word, back::FEATURES);
        format!("without: unknown feature '{word}'{hint}; known: {}", back::FEATURES.join(" "))
    })?;
    Ok(Offer { queues, without: without | off })
}

fn on_off(key: &str, value: &str) -> Result<bool, String> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("{key}={value}: use on or off")),
    }
}

/// `memory=shared|any`: whether a guest's memory may lie in any file.
pub fn any_memory(value: &str) -> Result<bool, String> {
    match value {
        "shared" => Ok(false),
        "any" => Ok(true),
        _ => Err(format!("memory={value}: use shared (memfd, tmpfs, hugetlbfs) or any (any file)")),
    }
}

/// `polled=on|off`: whether rings without a kick descriptor are served.
pub fn polled(value: &str) -> Result<bool, String> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("polled={value}: use on, or off to refuse rings without a kick")),
    }
}

fn unknown(key: &str, kind: &str, known: &[&str]) -> String {
    let known = [known, &tuning_options()].concat();
    let hint = match key.split_once('/') {
        Some((word, _)) if known.contains(&word) => "; only poll and call are of single queues",
        _ => "",
    };
    let hint = format!("{hint}{}", did_you_mean(key, known.iter().copied()));
    let known = known.join(", ");
    format!("unknown option '{key}' of kind {kind}{hint}; known: {known}")
}

/// Features not to be offered.
pub fn without(names: &str) -> Result<u64, String> {
    feature::parse(names).map_err(|word| {
        let all = feature::names(u64::MAX);
        let hint = did_you_mean(&word.to_ascii_uppercase(), all.iter().copied());
        format!("without: unknown feature '{word}'{hint}; known: {}", all.join(" "))
    })
}

fn number<T: FromStr>(key: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("option {key}={value}: not a number in range"))
}

/// A MAC address, `02:00:00:00:00:01`.
pub fn mac(value: &str) -> Result<[u8; 6], String> {
    let bad = || format!("'{value}' is not a MAC address like 02:00:00:00:00:01");
    let mut mac = [0; 6];
    let mut parts = value.split(':');
    for byte in &mut mac {
        let part = parts.next().filter(|p| p.len() == 2).ok_or_else(bad)?;
        *byte = u8::from_str_radix(part, 16).map_err(|_| bad())?;
    }
    if parts.next().is_some() || mac[0] & 1 != 0 {
        return Err(bad());
    }
    Ok(mac)
}

impl FromStr for Role {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "server" => Ok(Self::Server),
            "client" => Ok(Self::Client),
            _ => {
                let hint = did_you_mean(s, ["server", "client"]);
                Err(format!("mode={s}{hint}: use server (we listen) or client (we connect)"))
            }
        }
    }
}

impl PortSpec {
    /// Checks names, lengths and ranges.
    pub fn check(&self) -> Result<(), String> {
        let legal = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if self.name.is_empty() || self.name.len() > NAME_MAX || !self.name.chars().all(legal) {
            return Err(format!(
                "name '{}' must be 1 to {NAME_MAX} letters, digits, '-', '_' or '.'",
                self.name
            ));
        }
        self.check_kind()?;
        let queues = match &self.kind {
            Kind::VhostUser(port) => port.queues,
            Kind::Tap(port) => port.queues,
            Kind::Xen(port) => port.offer.queues,
            Kind::Null => 1,
        };
        self.tuning.poll.check("poll", queues)?;
        self.tuning.call.check("call", queues)
    }

    fn check_kind(&self) -> Result<(), String> {
        match &self.kind {
            Kind::VhostUser(port) => {
                let len = port.socket.as_os_str().len();
                if len == 0 {
                    return Err("no socket path: use vhost-user:PATH".into());
                }
                if len > SOCKET_PATH_MAX {
                    return Err(format!(
                        "socket path is {len} bytes long, the system takes {SOCKET_PATH_MAX}: \
                         use a shorter directory"
                    ));
                }
                if port.mtu.is_some_and(|mtu| !(68..=9216).contains(&mtu)) {
                    return Err("mtu must be 68 to 9216".into());
                }
                queues(port.queues)
            }
            Kind::Tap(port) => {
                if port.ifname.is_empty() || port.ifname.len() > IFNAME_MAX {
                    return Err(format!(
                        "interface name '{}' must have 1 to {IFNAME_MAX} characters",
                        port.ifname
                    ));
                }
                queues(port.queues)
            }
            Kind::Xen(port) => {
                if matches!(&port.at, XenAt::Local(dir) if dir.as_os_str().is_empty()) {
                    return Err("no directory: use xen-local:DIR".into());
                }
                match port.offer.queues {
                    1..=QUEUES_MAX => Ok(()),
                    n => Err(format!("queues={n}: use 1 to {QUEUES_MAX}")),
                }
            }
            Kind::Null => Ok(()),
        }
    }
}

fn queues(n: u16) -> Result<(), String> {
    if (1..=PAIRS_MAX).contains(&n) {
        return Ok(());
    }
    Err(format!("queues={n}: use 1 to {PAIRS_MAX}"))
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::VhostUser(port) => {
                let mode = if port.role == Role::Client { ",mode=client" } else { "" };
                write!(f, "vhost-user:{}{mode}", port.socket.display())
            }
            Self::Tap(port) => write!(f, "tap:{}", port.ifname),
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
mod tests {
    use super::*;

    fn error(s: &str) -> String {
        s.parse::<PortSpec>().unwrap_err().to_string()
    }

    #[test]
    fn every_kind_and_option() {
        let port: PortSpec =
            "vm1=vhost-user:/tmp/a=b.sock,mode=client,queues=4,mtu=9000,mac=02:00:00:00:00:0a,\
             without=event-idx+IN_ORDER,memory=any,polled=off,poll=coalesce:50,32,weight=4,\
             limit-mapped-bytes=8G,limit-messages=500"
                .parse()
                .unwrap();
        let want = VhostUser {
            socket: "/tmp/a=b.sock".into(),
            role: Role::Client,
            queues: 4,
            mtu: Some(9000),
            mac: Some([2, 0, 0, 0, 0, 10]),
            without: feature::EVENT_IDX | feature::IN_ORDER,
            takes: Takes { any_memory: true, polled: false },
        };
        assert_eq!(port.kind, Kind::VhostUser(want));
        let poll = Policy::Coalesce { usecs: 50, frames: 32 };
        assert_eq!((port.tuning.poll.all(), port.tuning.weight), (Some(poll), Some(4)));
        let limits: Vec<_> = port.tuning.limits.all().collect();
        assert_eq!(limits, [("mapped-bytes", 8 << 30), ("messages", 500)]);
        let port: PortSpec = "h=tap:tap0,netns=blue".parse().unwrap();
        assert!(matches!(port.kind, Kind::Tap(Tap { netns: Some(ns), .. }) if ns == "blue"));
        let port: PortSpec = "x=xen:3/1,queues=2,without=sg+ctrl-ring".parse().unwrap();
        assert_eq!(port.kind.to_string(), "xen:3/1");
        let Kind::Xen(xen) = &port.kind else { panic!("a Xen port") };
        assert_eq!((&xen.at, xen.offer.queues), (&XenAt::Vif(VifId { domid: 3, devid: 1 }), 2));
        assert!(!xen.offer.has("gso-tcpv4") && !xen.offer.has("smart-poll"));
        let port: PortSpec = "x=xen-local:/run/v,smart-poll=on".parse().unwrap();
        assert_eq!(port.kind.to_string(), "xen-local:/run/v");
        assert!(matches!(&port.kind, Kind::Xen(xen) if xen.offer.has("smart-poll")));
        assert_eq!("x=xen:auto".parse::<PortSpec>().unwrap().kind.to_string(), "xen:auto");
        assert_eq!("n=null".parse::<PortSpec>().unwrap().kind, Kind::Null);
    }

    #[test]
    fn queues_may_have_policies_of_their_own() {
        let port: PortSpec = "a=vhost-user:/tmp/a,queues=3,poll/2=coalesce:50,32,poll=spin,\
                              call/0=timer:500,poll/1=event"
            .parse()
            .unwrap();
        let polls = [0, 1, 2].map(|queue| port.tuning.poll.of(queue).unwrap().to_string());
        assert_eq!(polls, ["spin", "event", "coalesce:50,32"]);
        let calls = [0, 1, 2].map(|queue| port.tuning.call.of(queue));
        assert_eq!(calls, [Some(Policy::Timer { hz: 500 }), None, None]);
        assert!("x=xen:auto,poll/3=event".parse::<PortSpec>().is_ok(), "four are offered");
        assert!("n=null,call/0=event".parse::<PortSpec>().is_ok());
    }

    #[test]
    fn policies_of_queues_that_cannot_be_are_told() {
        assert!(error("a=vhost-user:/tmp/a,poll/1=spin").contains("poll/1: there is one queue"));
        let last = error("a=tap:t0,queues=2,call/2=spin");
        assert!(last.contains("call/2: there are 2 queue pairs, 0 to 1"), "{last}");
        for queue in ["16", "x", "-1", ""] {
            let what = error(&format!("a=tap:t0,queues=16,poll/{queue}=spin"));
            assert!(what.contains("use poll/QUEUE, a queue pair's number, 0 to 15"), "{what}");
        }
        let policy = error("a=tap:t0,call/0=spn");
        assert!(policy.contains("call/0=spn: unknown policy 'spn': use one of event"), "{policy}");
        let policy = error("a=tap:t0,call=spn");
        assert!(policy.contains("call=spn: unknown policy 'spn'"), "{policy}");
        let other = error("a=tap:t0,weight/0=2");
        assert!(other.contains("only poll and call are of single queues"), "{other}");
    }

    #[test]
    fn limits_that_cannot_be_are_refused_with_what_can() {
        for kind in ["vhost-user:/tmp/a", "tap:t0", "xen:auto", "xen-local:/tmp/a", "null"] {
            let near = error(&format!("a={kind},limit-mapings=4"));
            assert!(near.contains("(did you mean 'limit-mappings'?); known: "), "{near}");
            assert!(near.contains("hold, limit-mapped-bytes, limit-mappings,"), "{near}");
            let range = error(&format!("a={kind},limit-mappings=4K"));
            assert!(range.contains("limit-mappings=4K: use 0 to 1000000000"), "{range}");
            let queue = error(&format!("a={kind},limit-mappings/0=4"));
            assert!(queue.contains("only poll and call are of single queues"), "{queue}");
            assert!(format!("a={kind},limit-log-lines=1").parse::<PortSpec>().is_ok());
        }
        let bytes = error("a=null,limit-held-bytes=4X");
        assert!(bytes.contains("use 0 to 131072T bytes, or so many K, M, G or T"), "{bytes}");
    }

    #[test]
    fn what_is_wrong_is_told_with_what_to_do() {
        assert!(error("vhost-user:/tmp/a").contains("NAME=KIND:ARG"));
        assert!(error("a=vhost-usr:/tmp/a").contains("did you mean 'vhost-user'?"));
        assert!(error("a=pcap:x").contains("not in this version"));
        assert!(error("a=xen:1").contains("use xen:DOMID/DEVID"));
        assert!(error("a=xen:65536/0").contains("use xen:DOMID/DEVID"));
        assert!(error("a=xen-local:").contains("use xen-local:DIR"));
        assert!(error("a=xen:auto,queues=17").contains("use 1 to 16"));
        assert!(error("a=xen:auto,without=ctrl-rings").contains("did you mean 'ctrl-ring'?"));
        assert!(error("a=xen:auto,smart-poll=yes").contains("use on or off"));
        assert!(error("a=xen:auto,mtu=9000").contains("known: queues, without, smart-poll"));
        assert!(error("a=vhost-user:/tmp/a,queue=2").contains("did you mean 'queues'?"));
        assert!(error("a=vhost-user:/tmp/a,queues=0").contains("use 1 to 16"));
        assert!(error("a=vhost-user:/tmp/a,queues=many").contains("not a number"));
        assert!(error("a=vhost-user:/tmp/a,mode=sever").contains("did you mean 'server'?"));
        assert!(error("a=vhost-user:/tmp/a,mode").contains("has no value"));
        assert!(error("a=vhost-user:/tmp/a,mtu=20").contains("68 to 9216"));
        assert!(error("a=vhost-user:/tmp/a,mac=ff:ff:ff:ff:ff:ff").contains("not a MAC"));
        assert!(error("a=vhost-user:").contains("no socket path"));
        assert!(error(&format!("a=vhost-user:/{}", "x".repeat(107))).contains("108 bytes long"));
        assert!(error("a=null,weight=0").contains("use 1 to 100"));
        assert!(error("a=null,poll=evnt").contains("use one of event"));
        let feature = error("a=vhost-user:/tmp/a,without=event-id");
        assert!(feature.contains("did you mean 'EVENT_IDX'?"), "{feature}");
        assert!(error("a/b=null").contains("letters, digits"));
        assert!(error("a=tap:much-too-long-a-name").contains("1 to 15"));
    }
}
