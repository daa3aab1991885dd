//! Port specifications: `NAME=KIND:ARG[,key=value]...`, or a table of the file.

use std::fmt;
use std::str::FromStr;

use crate::inherited::INHERITED;
use crate::invalid::Invalid;
use crate::near::did_you_mean;
use crate::queues::{no_queue, queue_number};
use crate::schema::port::{KINDS, KINDS_LATER, Kind, check_rules};
use crate::schema::{Entry, Value, find, unknown_hint};

/// Longest port name: that of a Linux interface, so that tools can use the same name.
const NAME_MAX: usize = 15;

/// Prefix of options of the socket that a port listens at.
const SOCKET: &str = "socket-";

/// An option that was given, with its value.
#[derive(Clone, Debug)]
pub struct Given {
    /// The option.
    pub entry: &'static Entry,
    /// Its queue pair; `None`: all.
    pub queue: Option<usize>,
    /// The value.
    pub value: Value,
}

/// A valid port specification.
#[derive(Clone, Debug)]
pub struct PortText {
    /// Unique name.
    pub name: String,
    /// Kind of peer or interface that it attaches to.
    pub kind: Kind,
    /// The argument of its kind.
    pub arg: String,
    /// Its options in the order given; the last one of a key applies.
    pub options: Vec<Given>,
}

/// An invalid port specification.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("port '{spec}': {what}")]
pub struct PortError {
    spec: String,
    what: String,
}

impl FromStr for PortText {
    type Err = PortError;

    fn from_str(s: &str) -> Result<Self, PortError> {
        parse(s).map_err(|what| PortError { spec: s.into(), what })
    }
}

fn parse(s: &str) -> Result<PortText, String> {
    let shape =
        "use NAME=KIND:ARG[,key=value]..., for example vm1=vhost-user:/run/pvswitch/vm1.sock";
    let (name, rest) = s.split_once('=').ok_or(shape)?;
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
            _ => return Err(format!("option '{part}' has no value: use key=value")),
        }
    }
    let kind = self::kind(kind)?;
    let given = options.iter().map(|(key, value)| option(kind, key, value));
    let options = given.collect::<Result<_, _>>()?;
    let port = PortText { name: name.into(), kind, arg: arg.into(), options };
    port.check().map_err(|invalid| invalid.what)?;
    Ok(port)
}

/// Finds the kind of this name.
///
/// # Errors
/// The kind does not exist; the error lists all kinds.
pub fn kind(name: &str) -> Result<Kind, String> {
    let names = KINDS.map(|entry| entry.name);
    if let Some(entry) = KINDS.iter().find(|entry| entry.name == name) {
        return Ok(entry.kind);
    }
    if KINDS_LATER.contains(&name) {
        let names = names.join(", ");
        return Err(format!("kind '{name}' is not supported by this version: use one of {names}"));
    }
    let hint = did_you_mean(name, names);
    Err(format!("unknown kind '{name}'{hint}: use one of {}", names.join(", ")))
}

/// Parses `KEY=VALUE` or `KEY/QUEUE=VALUE` as an option of this kind of port.
///
/// # Errors
/// The kind has no such option, or the value is invalid; the error says what to write.
pub fn option(kind: Kind, key: &str, value: &str) -> Result<Given, String> {
    let Some((entry, queue)) = find(kind.options(), key) else {
        let known: Vec<_> = kind.options().map(|entry| entry.name).collect();
        let (name, known) = (kind.entry().name, known.join(", "));
        let others = KINDS.iter().filter(|other| find(other.kind.options(), key).is_some());
        let others: Vec<_> = others.map(|other| other.name).collect();
        if !others.is_empty() {
            let others = others.join(", ");
            return Err(format!(
                "option '{key}' belongs to {others}, not to kind {name}; known: {known}"
            ));
        }
        let hint = unknown_hint(key, kind.options());
        return Err(format!("unknown option '{key}' of kind {name}{hint}; known: {known}"));
    };
    let at = |error| format!("{key}={value}: {error}");
    let queue = queue.map(|queue| queue_number(entry.name, queue).map_err(at)).transpose()?;
    let value = entry.parse_as(key, value)?;
    Ok(Given { entry, queue, value })
}

/// Checks the name of a port.
///
/// # Errors
/// It is invalid; the error gives the rule.
pub fn check_name(name: &str) -> Result<(), String> {
    let legal = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    // Neither an option of a command (-x), nor a directory or a hidden file (.., .x).
    let begins = !name.starts_with(['-', '.']);
    if (1..=NAME_MAX).contains(&name.len()) && name.chars().all(legal) && begins {
        return Ok(());
    }
    Err(format!(
        "name '{}' must be 1 to {NAME_MAX} letters, digits, '-', '_' or '.', and not begin with \
         '-' or '.'",
        name.escape_debug()
    ))
}

/// Rejects control characters, which could forge a line of a log.
fn check_text(text: &str) -> Result<(), String> {
    if text.chars().any(char::is_control) {
        return Err(format!("'{}' must not have control characters", text.escape_debug()));
    }
    Ok(())
}

impl PortText {
    /// Checks the name, the argument, that queues named by options exist, and that its rules
    /// agree.
    ///
    /// # Errors
    /// One is invalid; the error names the option, as `poll/1`, and says what to write.
    pub fn check(&self) -> Result<(), Invalid> {
        check_name(&self.name).map_err(Invalid::whole)?;
        let of_arg = |what| Invalid::new(self.kind.entry().file, what);
        check_text(&self.arg).map_err(of_arg)?;
        (self.kind.entry().check)(&self.arg).map_err(of_arg)?;
        self.check_inherited()?;
        if self.word("mode") == Some("client")
            && let Some(given) =
                self.options.iter().find(|given| given.entry.name.starts_with(SOCKET))
        {
            let name = given.entry.name;
            let what = format!(
                "{name}: with mode=client the peer creates the socket: set its permissions \
                 there, or use mode=server"
            );
            return Err(Invalid::new(name, what));
        }
        self.check_peer()?;
        if let Some(bridge) = self.text("evpn") {
            let checked = (Kind::Tap.entry().check)(&bridge);
            checked.map_err(|error| Invalid::new("evpn", format!("evpn={bridge}: {error}")))?;
        }
        self.check_vif_tap()?;
        check_rules(|name| self.value(name))?;
        let queues = self.number("queues").unwrap_or(1) as u16;
        for Given { entry, queue, value } in &self.options {
            let name = entry.name;
            check_text(value.text().unwrap_or_default())
                .map_err(|error| Invalid::new(name, format!("{name}: {error}")))?;
            if let Some(queue) = queue.filter(|queue| *queue >= usize::from(queues)) {
                return Err(Invalid::new(
                    &format!("{name}/{queue}"),
                    no_queue(name, queue, queues),
                ));
            }
        }
        Ok(())
    }

    /// The interface of a vif comes and goes with the vif, which xen:auto adds and removes.
    fn check_vif_tap(&self) -> Result<(), Invalid> {
        let is_single = self.kind == Kind::Xen && self.arg != "auto";
        if self.word("tap") != Some("vif") || !is_single {
            return Ok(());
        }
        let what = format!(
            "tap=vif: xen:{} is a single vif: use xen:auto,tap=vif, which adds every vif with its \
             interface, or a tap: port",
            self.arg
        );
        Err(Invalid::new("tap", what))
    }

    /// A datagram socket has a peer, with a name of its own.
    fn check_peer(&self) -> Result<(), Invalid> {
        if self.kind != Kind::Dgram {
            return Ok(());
        }
        let wrong = |what: String| Err(Invalid::new("peer", what));
        match self.text("peer") {
            None => wrong("peer: a dgram port needs peer=SOCKET, the socket of its peer".into()),
            Some(peer) if peer == self.arg => {
                wrong(format!("peer={peer}: the peer needs a socket of its own: use another path"))
            }
            Some(peer) => match (self.kind.entry().check)(&peer) {
                Err(error) => wrong(format!("peer: {error}")),
                Ok(()) => Ok(()),
            },
        }
    }

    /// An inherited socket listens, and has its permissions; an inherited interface its settings.
    fn check_inherited(&self) -> Result<(), Invalid> {
        if !self.arg.starts_with(INHERITED) {
            return Ok(());
        }
        if self.kind == Kind::Tap {
            let own =
                |given: &&Given| given.entry.kinds == [Kind::Tap] && given.entry.name != "queues";
            return match self.options.iter().find(own) {
                Some(Given { entry: Entry { name, .. }, .. }) => {
                    let what = format!(
                        "{name}: tap:{} is inherited, and the process that opened it has set up \
                         its interface: set it there, or use tap:IFNAME",
                        self.arg
                    );
                    Err(Invalid::new(name, what))
                }
                None => Ok(()),
            };
        }
        if !matches!(self.kind, Kind::VhostUser | Kind::Stream) {
            return Ok(());
        }
        if self.word("mode") == Some("client") {
            let what = format!(
                "mode=client connects to a path, not to an inherited socket: use mode=server, or \
                 {}:PATH",
                self.kind.entry().name
            );
            return Err(Invalid::new("mode", what));
        }
        let mut given = self.options.iter();
        match given.find(|given| given.entry.name.starts_with(SOCKET)) {
            Some(Given { entry: Entry { name, .. }, .. }) => {
                let what = format!(
                    "{name}: permissions of an inherited socket are set where it is created: \
                     SocketMode= and SocketGroup= of the socket unit"
                );
                Err(Invalid::new(name, what))
            }
            None => Ok(()),
        }
    }

    /// The value of an option: the last one given, or the default if it is a value.
    fn value(&self, name: &str) -> Option<Value> {
        self.given(name, None).cloned().or_else(|| {
            let entry = self.kind.options().find(|entry| entry.name == name)?;
            entry.default_value()
        })
    }

    /// The value given last for an option: of all queues, or of one.
    pub fn given(&self, name: &str, queue: Option<usize>) -> Option<&Value> {
        let mut given = self.options.iter().rev();
        let given = given.find(|given| given.entry.name == name && given.queue == queue)?;
        Some(&given.value)
    }

    /// Sets the value of an option, as `ctl set` does: that of all queues replaces those of single
    /// queues.
    pub fn set(&mut self, given: Given) {
        let name = given.entry.name;
        let replaced = |old: &Given| given.queue.is_none_or(|queue| old.queue == Some(queue));
        self.options.retain(|old| old.entry.name != name || !replaced(old));
        self.options.push(given);
    }

    /// Options that were given, without those that a later one replaces: of all queues first.
    pub fn effective(&self) -> Vec<&Given> {
        let last = |at: usize, given: &Given| {
            let later = &self.options[at + 1..];
            !later.iter().any(|l| l.entry.name == given.entry.name && l.queue == given.queue)
        };
        let options = self.options.iter().enumerate();
        let mut kept: Vec<_> =
            options.filter(|(at, given)| last(*at, given)).map(|(_, given)| given).collect();
        kept.sort_by_key(|given| (given.queue.is_some(), given.entry.name, given.queue));
        kept
    }

    /// The number of an option, given or default.
    pub fn number(&self, name: &str) -> Option<u64> {
        self.value(name)?.number()
    }

    /// The word of an option, given or default.
    pub fn word(&self, name: &str) -> Option<&'static str> {
        self.value(name)?.word()
    }

    /// The text of an option, if it was given.
    pub fn text(&self, name: &str) -> Option<String> {
        self.given(name, None)?.text().map(Into::into)
    }

    /// The MAC addresses of an option; empty unless given.
    pub fn macs(&self, name: &str) -> Vec<[u8; 6]> {
        self.value(name).map_or_else(Vec::new, |value| value.macs().to_vec())
    }

    /// Whether it carries all VLANs.
    pub fn is_transparent(&self) -> bool {
        let has_vlan = self.value("vlan").is_some_and(|value| value.vlan().is_some());
        !has_vlan && self.value("trunk").is_none_or(|value| value.vlans().is_empty())
    }

    /// VLANs whose frames it carries, 0 for untagged frames of ports without VLANs.
    pub fn vids(&self) -> Vec<u16> {
        if self.is_transparent() {
            return vec![0];
        }
        let untagged = ["vlan", "native"].into_iter().filter_map(|name| self.value(name)?.vlan());
        let mut vids: Vec<_> = untagged.collect();
        vids.extend(self.value("trunk").iter().flat_map(|value| value.vlans()));
        vids
    }

    /// The names of an option; empty unless given.
    pub fn names(&self, name: &str) -> Vec<&'static str> {
        match self.value(name) {
            Some(Value::Names(names)) => names,
            _ => Vec::new(),
        }
    }
}

/// Name, kind and argument, for messages.
impl fmt::Display for PortText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, kind, arg, .. } = self;
        write!(f, "{name}={}:{arg}", kind.entry().name)
    }
}
