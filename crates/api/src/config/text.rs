//! A configuration as plain text values, for the process that takes over a switch. Unlike a file,
//! it has all settings, and ports in their order.

use serde::{Deserialize, Serialize};

use super::{Config, Static};
use crate::Settings;
use crate::port::{Given, PortText, option};
use crate::schema::port::KINDS;
use crate::schema::run;

/// A configuration as text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigText {
    /// Names and values.
    settings: Vec<(String, String)>,
    ports: Vec<Port>,
    /// Addresses and ports.
    statics: Vec<(String, String)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Port {
    name: String,
    kind: String,
    arg: String,
    /// Keys, as in a port specification, and values.
    options: Vec<(String, String)>,
}

impl From<&Config> for ConfigText {
    fn from(config: &Config) -> Self {
        let settings = config.settings.given();
        let settings = settings.map(|(entry, value)| (entry.name.into(), value.to_string()));
        let option = |Given { entry, queue, value }: &Given| {
            let key = match queue {
                None => entry.name.into(),
                Some(queue) => format!("{}/{queue}", entry.name),
            };
            (key, value.to_string())
        };
        let port = |port: &PortText| Port {
            name: port.name.clone(),
            kind: port.kind.entry().name.into(),
            arg: port.arg.clone(),
            options: port.options.iter().map(option).collect(),
        };
        let statics = config.statics.iter();
        Self {
            settings: settings.collect(),
            ports: config.ports.iter().map(port).collect(),
            statics: statics.map(|s| (s.address.to_string(), s.port.clone())).collect(),
        }
    }
}

impl ConfigText {
    /// Parses and checks it.
    ///
    /// # Errors
    /// A setting or option is unknown here, or has an invalid value.
    pub fn parse(&self) -> Result<Config, String> {
        let mut settings = Settings::default();
        for (name, value) in &self.settings {
            let entry = run::TABLE.iter().find(|entry| entry.name == name);
            let entry = entry.ok_or_else(|| format!("unknown setting '{name}'"))?;
            settings.set(entry, entry.parse(value)?);
        }
        let ports = self.ports.iter().map(Port::parse).collect::<Result<_, _>>()?;
        let parse = |(address, port): &(String, String)| {
            Ok::<_, String>(Static { address: address.parse()?, port: port.clone() })
        };
        let statics = self.statics.iter().map(parse).collect::<Result<_, _>>()?;
        Ok(Config { settings, ports, statics })
    }
}

impl Port {
    fn parse(&self) -> Result<PortText, String> {
        let at = |error: String| format!("port '{}': {error}", self.name);
        let kind = KINDS.iter().find(|kind| kind.name == self.kind);
        let kind = kind.ok_or_else(|| at(format!("unknown kind '{}'", self.kind)))?.kind;
        let options = self.options.iter().map(|(key, value)| option(kind, key, value));
        let options = options.collect::<Result<_, _>>().map_err(at)?;
        let (name, arg) = (self.name.clone(), self.arg.clone());
        let port = PortText { name, kind, arg, options };
        port.check().map_err(|invalid| at(invalid.what))?;
        Ok(port)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::file::File;

    fn config() -> Config {
        let text = "workers = 2\ncpus = [1, 2]\npoll = \"coalesce:50,32\"\nageing = 7\n\
            http = \"127.0.0.1:9\"\ncontrol-mode = \"0660\"\ncontrol-group = \"0\"\n\
            [static]\n\"02:00:00:00:00:01/5\" = \"vm1\"\n\
            [port.vm1]\nkind = \"vhost-user\"\nsocket = \"/tmp/a,b=c.sock\"\nqueues = 2\n\
            \"poll/1\" = \"timer:2000\"\nmac = \"02:00:00:00:00:0a+02:00:00:00:00:0b\"\n\
            limit-mapped-bytes = \"8G\"\ntrunk = \"1+3-5\"\nwithout = \"EVENT_IDX\"\n\
            ip = \"10.0.0.1+fe80::1\"\n[port.h]\nkind = \"tap\"\ninterface = \"tap0\"\n\
            [port.n]\nkind = \"null\"\n";
        let file = File::parse(Path::new("/x.toml"), text).unwrap();
        let mut config = file.with(Config::default()).unwrap();
        for (name, value) in [("quiet", ""), ("duration", "1.5")] {
            let entry = run::TABLE.iter().find(|entry| entry.name == name).unwrap();
            config.settings.set(entry, entry.parse(value).unwrap());
        }
        config.ports.reverse();
        config
    }

    #[test]
    fn every_value_is_read_as_it_was_written() {
        let config = config();
        let text = ConfigText::from(&config);
        let read = text.parse().unwrap();
        assert_eq!(ConfigText::from(&read), text);
        assert!(config.diff(&read).is_empty() && read.settings.flag("quiet"));
        assert_eq!(read.settings.seconds("duration").unwrap().as_millis(), 1500);
        let names = |of: &Config| of.ports.iter().map(|p| p.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&read), names(&config), "the order stays");
    }

    #[test]
    fn what_this_version_does_not_know_is_refused_by_name() {
        let good = ConfigText::from(&config());
        let error = |change: fn(&mut ConfigText)| {
            let mut bad = good.clone();
            change(&mut bad);
            bad.parse().unwrap_err()
        };
        assert_eq!(error(|t| t.settings[0].0 = "wings".into()), "unknown setting 'wings'");
        assert!(error(|t| t.settings[0].1 = "no number".into()).contains("no number"));
        assert!(error(|t| t.ports[0].kind = "wire".into()).contains("unknown kind 'wire'"));
        assert!(error(|t| t.ports[0].name = "a/b".into()).contains("letters, digits"));
        let option = error(|t| t.ports[0].options.push(("x".into(), "y".into())));
        assert!(option.contains("unknown option 'x'"), "{option}");
        assert!(error(|t| t.statics[0].0 = "1".into()).contains('1'));
    }
}
