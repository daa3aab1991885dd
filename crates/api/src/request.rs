//! Requests to a switch, or to a guest (`nic`, `gen`).

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A request. Its names and fields are those of an [operation](crate::routes::Operation), which
/// says what each is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "operation", rename_all = "kebab-case")]
#[allow(missing_docs, reason = "the fields are explained by the table of operations")]
pub enum Request {
    Show,
    Stats,
    Ports,
    Port { name: String },
    PortStats { name: String },
    Why { name: String, seconds: f64 },
    AddPort { name: String, port: Map<String, Value> },
    DelPort { name: String },
    SetPort { name: String, settings: Map<String, Value> },
    SetQueue { name: String, queue: u16, settings: Map<String, Value> },
    Drain { name: String },
    Resume { name: String },
    Capture { name: String },
    Workers,
    Accounts,
    Fdb,
    FdbAdd { mac: String, port: String, vlan: u16 },
    FdbDel { mac: String, vlan: u16 },
    Set { settings: Map<String, Value> },
    SetPair { queue: u16, settings: Map<String, Value> },
    Config,
    Reload { dry_run: bool },
    Upgrade { program: Option<PathBuf> },
    Shutdown,
    Events,
    LastEvents,
    Openapi,
}

impl Request {
    /// The name of its operation.
    pub fn name(&self) -> String {
        let value = serde_json::to_value(self).unwrap_or_default();
        value["operation"].as_str().unwrap_or_default().into()
    }

    /// A port to add, from its parsed form.
    pub fn add_port(port: &crate::PortText) -> Self {
        Self::AddPort { name: port.name.clone(), port: port.to_json() }
    }

    /// Settings from `KEY=VALUE`, as on a command line, for `target`: `None`, `PORT` or
    /// `PORT/QUEUE`.
    ///
    /// # Errors
    /// A setting without a value, or an invalid queue; the error says what to write.
    pub fn set(target: Option<&str>, settings: &[String]) -> Result<Self, String> {
        let settings = settings_of(settings)?;
        Ok(match target.map(|target| target.split_once('/').ok_or(target)) {
            None => Self::Set { settings },
            Some(Err(name)) => Self::SetPort { name: name.into(), settings },
            Some(Ok((name, queue))) => {
                let number = queue.parse().map_err(|_| {
                    format!("'{name}/{queue}': use PORT/QUEUE, queues are numbered from 0")
                })?;
                Self::SetQueue { name: name.into(), queue: number, settings }
            }
        })
    }
}

/// Settings given as `KEY=VALUE`.
fn settings_of(settings: &[String]) -> Result<Map<String, Value>, String> {
    let one = |setting: &String| {
        let (key, value) = setting.split_once('=').ok_or(format!("'{setting}': use KEY=VALUE"))?;
        Ok((key.to_string(), Value::from(value)))
    };
    settings.iter().map(one).collect()
}
