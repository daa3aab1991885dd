//! The configuration file: the same settings as the command line, in TOML.
//!
//! ```toml
//! poll = "adaptive"
//! workers = 2
//! forward = "switch"
//!
//! [port.vm1]
//! kind = "vhost-user"
//! socket = "/run/pvswitch/vm1.sock"
//! queues = 4
//! "poll/3" = "timer:2000"
//! limit-mapped-bytes = "16G"
//!
//! [port.host]
//! kind = "tap"
//! interface = "tap0"
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use lab::near::nearest;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeSeed, Error as _, IntoDeserializer, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use switch::poll::Policy;

use crate::http;
use crate::pool::Placement;
use vhost_user::backend::Takes;

use crate::spec::limits::LIMITS;
use crate::spec::{self, Kind, PortSpec, PortTuning, Role, Tap, VhostUser, Xen, XenAt};

/// A parsed file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// `--poll`.
    #[serde(deserialize_with = "parsed")]
    pub poll: Option<Policy>,
    /// `--call`.
    #[serde(deserialize_with = "parsed")]
    pub call: Option<Policy>,
    /// `--workers`.
    pub workers: Option<u8>,
    /// `--forward`.
    pub forward: Option<String>,
    /// `--cpus`.
    pub cpus: Option<Vec<usize>>,
    /// `--placement`.
    #[serde(deserialize_with = "parsed")]
    pub placement: Option<Placement>,
    /// `--control`.
    pub control: Option<PathBuf>,
    /// `--http`.
    #[serde(deserialize_with = "parsed")]
    pub http: Option<http::Address>,
    /// Seconds after which an unseen address is forgotten.
    pub ageing: Option<u32>,
    /// Most addresses learned from one port.
    pub addresses_per_port: Option<u32>,
    /// Addresses that are never learned or aged: `"02:00:00:00:00:01" = "vm1"`.
    #[serde(rename = "static")]
    pub static_addresses: BTreeMap<String, String>,
    /// Ports by name, in the order of their names.
    port: BTreeMap<String, TunedTable>,
}

/// A port's table, and apart from it what ports of all kinds have alike: policies of their queues
/// (`"poll/0" = "event"`) and limits (`limit-mappings = 64`).
#[derive(Debug)]
struct TunedTable {
    table: PortTable,
    tuning: Vec<(String, String)>,
}

impl<'de> Deserialize<'de> for TunedTable {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = TunedTable;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a port's table")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<TunedTable, A::Error> {
                let mut tuning = Vec::new();
                let map = Untuned { map, tuning: &mut tuning };
                let table = PortTable::deserialize(MapAccessDeserializer::new(map))?;
                Ok(TunedTable { table, tuning })
            }
        }
        from.deserialize_map(Keys)
    }
}

/// Refuses a key that is nearly a limit's.
struct NoLimit<'a>(&'a str);

impl<'de> DeserializeSeed<'de> for NoLimit<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, _: D) -> Result<String, D::Error> {
        Err(D::Error::unknown_field(self.0, &LIMITS))
    }
}

/// The keys of a port's table but for those of single queues and limits, which are put aside.
struct Untuned<'a, A> {
    map: A,
    tuning: &'a mut Vec<(String, String)>,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Untuned<'_, A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        while let Some(key) = self.map.next_key::<String>()? {
            let value = if key.starts_with("poll/") || key.starts_with("call/") {
                self.map.next_value()?
            } else if LIMITS.contains(&key.as_str()) {
                // A number, or bytes with a unit; what else it may be is refused with the range.
                match self.map.next_value()? {
                    toml::Value::String(text) => text,
                    other => other.to_string(),
                }
            } else if key.starts_with("limit") || nearest(&key, LIMITS).is_some() {
                // As an error of the value, it has the line of the key.
                self.map.next_value_seed(NoLimit(&key))?
            } else {
                return seed.deserialize(key.into_deserializer()).map(Some);
            };
            self.tuning.push((key, value));
        }
        Ok(None)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.map.next_value_seed(seed)
    }
}

#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
enum PortTable {
    VhostUser {
        socket: PathBuf,
        mode: Option<String>,
        queues: Option<u16>,
        mtu: Option<u16>,
        mac: Option<String>,
        without: Option<String>,
        memory: Option<String>,
        polled: Option<String>,
        poll: Option<String>,
        call: Option<String>,
        weight: Option<u32>,
        hold: Option<u16>,
    },
    Tap {
        interface: String,
        netns: Option<String>,
        queues: Option<u16>,
        mtu: Option<u16>,
        poll: Option<String>,
        call: Option<String>,
        weight: Option<u32>,
        hold: Option<u16>,
    },
    /// `vif = "1/0"` or `vif = "auto"`.
    Xen {
        vif: String,
        queues: Option<u16>,
        without: Option<String>,
        #[serde(default)]
        smart_poll: bool,
        poll: Option<String>,
        call: Option<String>,
        weight: Option<u32>,
        hold: Option<u16>,
    },
    XenLocal {
        directory: PathBuf,
        queues: Option<u16>,
        without: Option<String>,
        #[serde(default)]
        smart_poll: bool,
        poll: Option<String>,
        call: Option<String>,
        weight: Option<u32>,
        hold: Option<u16>,
    },
    Null {},
}

fn parsed<'de, D, T>(d: D) -> Result<Option<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: std::str::FromStr<Err = String>,
{
    String::deserialize(d)?.parse().map(Some).map_err(serde::de::Error::custom)
}

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// It cannot be read.
    #[error("cannot read configuration {path}: {error}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// It does not parse.
    #[error("{path}:{line}:{column}: {what}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// What is wrong there.
        what: String,
    },
    /// A port makes no sense.
    #[error("{path}: port '{name}': {what}")]
    Port {
        /// The file.
        path: PathBuf,
        /// The port's name.
        name: String,
        /// What is wrong.
        what: String,
    },
}

impl Config {
    /// Reads and parses `path`.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| ConfigError::Read { path: path.into(), error })?;
        Self::parse(path, &text)
    }

    fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start).min(text.len());
            let before = &text[..at];
            ConfigError::Parse {
                path: path.into(),
                line: before.matches('\n').count() + 1,
                column: before.len() - before.rfind('\n').map_or(0, |n| n + 1) + 1,
                what: with_suggestion(error.message()),
            }
        })
    }

    /// The ports of the file.
    pub fn ports(&self, path: &Path) -> Result<Vec<PortSpec>, ConfigError> {
        self.port
            .iter()
            .map(|(name, table)| {
                let error =
                    |what| ConfigError::Port { path: path.into(), name: name.clone(), what };
                let kind = table.table.kind().map_err(&error)?;
                let tuning = table.tuning().map_err(&error)?;
                let port = PortSpec { name: name.clone(), kind, tuning };
                port.check().map_err(error)?;
                Ok(port)
            })
            .collect()
    }
}

impl PortTable {
    fn kind(&self) -> Result<Kind, String> {
        Ok(match self {
            Self::VhostUser { socket, mode, queues, mtu, mac, without, memory, polled, .. } => {
                Kind::VhostUser(VhostUser {
                    socket: socket.clone(),
                    role: mode.as_deref().map_or(Ok(Role::default()), str::parse)?,
                    queues: queues.unwrap_or(1),
                    mtu: *mtu,
                    mac: mac.as_deref().map(spec::mac).transpose()?,
                    without: without.as_deref().map_or(Ok(0), spec::without)?,
                    takes: Takes {
                        any_memory: memory.as_deref().map_or(Ok(false), spec::any_memory)?,
                        polled: polled.as_deref().map_or(Ok(true), spec::polled)?,
                    },
                })
            }
            Self::Tap { interface, netns, queues, mtu, .. } => Kind::Tap(Tap {
                ifname: interface.clone(),
                netns: netns.clone(),
                queues: queues.unwrap_or(1),
                mtu: *mtu,
            }),
            Self::Xen { vif, queues, without, smart_poll, .. } => {
                let at = match vif.as_str() {
                    "auto" => XenAt::Auto,
                    _ => XenAt::Vif(spec::vif(vif)?),
                };
                xen(at, *queues, without.as_deref(), *smart_poll)?
            }
            Self::XenLocal { directory, queues, without, smart_poll, .. } => {
                let at = XenAt::Local(directory.clone());
                xen(at, *queues, without.as_deref(), *smart_poll)?
            }
            Self::Null {} => Kind::Null,
        })
    }
}

impl TunedTable {
    fn tuning(&self) -> Result<PortTuning, String> {
        let mut tuning = PortTuning::default();
        for (key, value) in &self.tuning {
            tuning.set(key, value)?;
        }
        let (PortTable::VhostUser { poll, call, weight, hold, .. }
        | PortTable::Tap { poll, call, weight, hold, .. }
        | PortTable::Xen { poll, call, weight, hold, .. }
        | PortTable::XenLocal { poll, call, weight, hold, .. }) = &self.table
        else {
            return Ok(tuning);
        };
        let numbers = [("weight", *weight), ("hold", hold.map(u32::from))];
        let numbers = numbers.map(|(key, n)| (key, n.map(|n| n.to_string())));
        let policies = [("poll", poll.clone()), ("call", call.clone())];
        for (key, value) in policies.into_iter().chain(numbers) {
            if let Some(value) = value {
                tuning.set(key, &value)?;
            }
        }
        Ok(tuning)
    }
}

fn xen(
    at: XenAt,
    queues: Option<u16>,
    without: Option<&str>,
    smart_poll: bool,
) -> Result<Kind, String> {
    let queues = queues.unwrap_or(spec::XEN_QUEUES);
    Ok(Kind::Xen(Xen { at, offer: spec::xen_offer(queues, without, smart_poll)? }))
}

/// Adds the nearest known word to serde's "unknown field `x`, expected one of `a`, `b`".
fn with_suggestion(message: &str) -> String {
    let mut quoted = message.split('`').skip(1).step_by(2);
    let unknown = message.starts_with("unknown");
    match quoted.next().filter(|_| unknown).and_then(|word| nearest(word, quoted)) {
        Some(near) => format!("{message} (did you mean `{near}`?)"),
        None => message.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        let path = Path::new("x.toml");
        match Config::parse(path, text) {
            Ok(config) => config.ports(path).unwrap_err().to_string(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_whole_file() {
        let text = r#"
            poll = "event"
            workers = 2
            cpus = [2, 3]
            placement = "per-port"
            [static]
            "02:00:00:00:00:01" = "vm1"
            [port.vm1]
            kind = "vhost-user"
            socket = "/tmp/vm1.sock"
            queues = 4
            "poll/3" = "spin"
            poll = "timer:2000"
            "call/0" = "coalesce:50,32"
            weight = 3
            limit-mapped-bytes = "16G"
            limit-mappings = 64
            [port.up]
            kind = "tap"
            interface = "tap0"
        "#;
        let path = Path::new("x.toml");
        let config = Config::parse(path, text).unwrap();
        assert_eq!((config.poll, config.workers), (Some(Policy::Event), Some(2)));
        let ports = config.ports(path).unwrap();
        let names: Vec<_> = ports.iter().map(|p| format!("{}={}", p.name, p.kind)).collect();
        assert_eq!(names, ["up=tap:tap0", "vm1=vhost-user:/tmp/vm1.sock"]);
        let tuning = ports[1].tuning;
        let limits: Vec<_> = tuning.limits.all().collect();
        assert_eq!(limits, [("mapped-bytes", 16 << 30), ("mappings", 64)]);
        let timer = Some(Policy::Timer { hz: 2000 });
        assert_eq!((tuning.poll.of(0), tuning.weight), (timer, Some(3)));
        assert_eq!(tuning.poll.of(3), Some(Policy::Spin));
        let call = Some(Policy::Coalesce { usecs: 50, frames: 32 });
        assert_eq!((tuning.call.of(0), tuning.call.of(1)), (call, None));
        assert_eq!((config.placement, config.cpus), (Some(Placement::PerPort), Some(vec![2, 3])));
    }

    #[test]
    fn policies_of_queues_that_cannot_be_are_told() {
        let port = |lines: &str| {
            error(&format!("[port.a]\nkind = \"tap\"\ninterface = \"t\"\nqueues = 2\n{lines}\n"))
        };
        let beyond = port("\"poll/2\" = \"spin\"");
        assert!(beyond.contains("port 'a': poll/2: there are 2 queue pairs, 0 to 1"), "{beyond}");
        let number = port("\"call/x\" = \"spin\"");
        assert!(number.contains("call/x=spin: use call/QUEUE"), "{number}");
        let policy = port("\"call/1\" = \"spn\"");
        assert!(policy.contains("call/1=spn: unknown policy 'spn': use one of"), "{policy}");
        let value = port("\"call/1\" = 3");
        assert!(value.starts_with("x.toml:5:") && value.contains("string"), "{value}");
        let other = port("\"weight/1\" = 3");
        assert!(other.contains("unknown field `weight/1`"), "{other}");
    }

    #[test]
    fn limits_that_cannot_be_are_refused_with_what_can() {
        let port =
            |line: &str| error(&format!("[port.a]\nkind = \"tap\"\ninterface = \"t\"\n{line}\n"));
        for typo in ["limit-mapings", "limt-mappings", "limit_mappings"] {
            let near = port(&format!("{typo} = 4"));
            assert!(near.contains(&format!("unknown field `{typo}`")), "{near}");
            assert!(near.contains("did you mean `limit-mappings`?"), "{near}");
            assert!(near.starts_with("x.toml:4:"), "{near}");
        }
        for value in ["-1", "1.5", "true", "\"4K\"", "1000000001"] {
            let range = port(&format!("limit-mappings = {value}"));
            let want = format!("limit-mappings={}: use 0 to 1000000000", value.trim_matches('"'));
            assert!(range.contains(&format!("port 'a': {want}")), "{range}");
        }
        let bytes = port("limit-held-bytes = \"4X\"");
        assert!(bytes.contains("use 0 to 131072T bytes, or so many K, M, G or T"), "{bytes}");
    }

    #[test]
    fn vifs_are_ports() {
        let text = r#"
            [port.all]
            kind = "xen"
            vif = "auto"
            queues = 2
            [port.one]
            kind = "xen"
            vif = "3/1"
            [port.zlocal]
            kind = "xen-local"
            directory = "/run/v"
            smart_poll = true
            weight = 2
        "#;
        let path = Path::new("x.toml");
        let ports = Config::parse(path, text).unwrap().ports(path).unwrap();
        let names: Vec<_> = ports.iter().map(|p| format!("{}={}", p.name, p.kind)).collect();
        assert_eq!(names, ["all=xen:auto", "one=xen:3/1", "zlocal=xen-local:/run/v"]);
        assert_eq!(ports[2].tuning.weight, Some(2));
        let vif = error("[port.a]\nkind = \"xen\"\nvif = \"x\"\n");
        assert!(vif.contains("port 'a'") && vif.contains("xen:DOMID/DEVID"), "{vif}");
    }

    #[test]
    fn a_typo_is_told_with_line_column_and_nearest_key() {
        let typo = error("workers = 1\n  pol = \"event\"\n");
        assert!(typo.starts_with("x.toml:2:3: "), "{typo}");
        assert!(typo.contains("did you mean `poll`?"), "{typo}");
        let port = error("[port.a]\nkind = \"vhost-user\"\nsockt = \"/tmp/a\"\n");
        assert!(port.contains("did you mean `socket`?"), "{port}");
        let kind = error("[port.a]\nkind = \"vhost-uzer\"\n");
        assert!(kind.contains("did you mean `vhost-user`?"), "{kind}");
    }

    #[test]
    fn bad_values_are_told() {
        assert!(error("poll = \"evnt\"").contains("use one of event"));
        assert!(error("[port.a]\nkind=\"tap\"\ninterface=\"\"\n").contains("port 'a'"));
        let placement = error("placement = \"balance\"");
        assert!(placement.contains("did you mean 'balanced'?"), "{placement}");
        assert!(error("workers = \n").contains("x.toml:1:"));
        let missing = Config::load(Path::new("/nonexistent/x.toml")).unwrap_err().to_string();
        assert!(missing.contains("cannot read configuration /nonexistent/x.toml"), "{missing}");
    }
}
