//! Standby ports of a switch as a whole: which of its ports may be standby of which.

use std::collections::BTreeMap;

use super::{Config, Part};
use crate::near::did_you_mean;
use crate::port::PortText;
use crate::schema::Value;
use crate::schema::port::Kind;

/// The option that names the active port.
pub const STANDBY_FOR: &str = "standby-for";

/// Ports, each with whether its interface has a carrier to watch, and X/// for.
#[derive(Clone, Debug, Default)]
pub struct Standbys<'a>(BTreeMap<&'a str, (bool, Option<&'a str>)>);

impl<'a> Standbys<'a> {
    /// Adds a port, or changes the one whose standby it is.
    pub fn set(&mut self, port: &'a str, kind: Kind, of: Option<&'a str>) {
        self.0.insert(port, (is_uplink(kind), of));
    }

    /// Finds ports that cannot be a standby: name and reason, which says what to write.
    pub fn conflicts(&self) -> Vec<(&'a str, String)> {
        let standbys = self.0.iter().filter_map(|(name, (_, of))| Some((*name, (*of)?)));
        standbys.filter_map(|(name, of)| Some((name, self.check(name, of).err()?))).collect()
    }

    /// Checks that a port of this switch may be the standby of another.
    ///
    /// # Errors
    /// It may not; the error says what to write.
    pub fn check(&self, name: &str, of: &str) -> Result<(), String> {
        let option = format!("{STANDBY_FOR}={}", of.escape_debug());
        let refuse = |why: String| Err(format!("port '{name}': {option}: {why}"));
        if of == name {
            return refuse("a port cannot be its own standby: name the other one".into());
        }
        let Some((is_uplink, next)) = self.0.get(of) else {
            let hint = did_you_mean(of, self.0.keys().copied());
            return refuse(format!("no such port{hint}: add it first"));
        };
        if !is_uplink {
            return refuse(format!(
                "'{of}' has no carrier to watch: name a port of kind af-packet or af-xdp"
            ));
        }
        if let Some(next) = next {
            return refuse(format!(
                "'{of}' is itself the standby of '{next}': a pair has one active port and one \
                 standby port; bond more interfaces in the kernel"
            ));
        }
        let users = self.0.iter().filter_map(|(name, (_, of))| Some((*name, (*of)?)));
        let mut users = users.filter(|(user, _)| *user != name);
        if let Some((user, _)) = users.clone().find(|(_, other)| *other == of) {
            return refuse(format!(
                "'{of}' has a standby port, '{user}': use {STANDBY_FOR}=none for one of them; \
                 bond more interfaces in the kernel"
            ));
        }
        match users.find(|(_, other)| *other == name) {
            None => Ok(()),
            Some((user, _)) => refuse(format!(
                "'{user}' is the standby of '{name}' already: use {STANDBY_FOR}=none for '{user}' \
                 first"
            )),
        }
    }
}

/// Whether ports of this kind are on an interface with a carrier.
fn is_uplink(kind: Kind) -> bool {
    matches!(kind, Kind::AfPacket | Kind::AfXdp)
}

/// The port whose standby a port is.
fn of(port: &PortText) -> Option<&str> {
    port.given(STANDBY_FOR, None).and_then(Value::text).filter(|of| *of != "none")
}

impl Config {
    /// The standby ports among its ports.
    pub fn standbys(&self) -> Standbys<'_> {
        let mut standbys = Standbys::default();
        for port in &self.ports {
            standbys.set(&port.name, port.kind, of(port));
        }
        standbys
    }

    /// Standby ports that cannot be used.
    pub(super) fn standby_conflicts(&self) -> Vec<(Part, String)> {
        let at = |port: &str| Part::Option(port.into(), STANDBY_FOR);
        let found = self.standbys().conflicts().into_iter();
        let mut found: Vec<_> = found.map(|(port, what)| (at(port), what)).collect();
        let standby = self.ports.iter().find(|port| of(port).is_some());
        if let Some(PortText { name, .. }) = standby
            && self.settings.word("forward") == Some("cross")
        {
            let what = format!(
                "port '{name}': {STANDBY_FOR}=: forward=cross connects ports by their numbers, and \
                 no port can take over from another: use forward=switch"
            );
            found.push((at(name), what));
        }
        found
    }

    /// Finds standby ports whose rules differ from those of the port that they take over from.
    pub(super) fn unlike_standbys(&self) -> Vec<(Part, String)> {
        const RULES: [&str; 4] = ["vlan", "trunk", "native", "isolated"];
        let mut found = Vec::new();
        for port in &self.ports {
            let Some(active) = of(port).and_then(|active| self.port(active)) else { continue };
            let value = |of: &PortText, rule: &str| of.given(rule, None).map(ToString::to_string);
            let differs = |rule: &&&str| value(port, rule) != value(active, rule);
            let Some(rule) = RULES.iter().find(differs) else { continue };
            let shown = |of| value(of, rule).unwrap_or_else(|| "none".into());
            let what = format!(
                "port '{}', the standby of '{}', has {rule}={} instead of {rule}={}: guests \
                 reach other networks after a failover: give both the same",
                port.name,
                active.name,
                shown(port),
                shown(active)
            );
            found.push((Part::Option(port.name.clone(), STANDBY_FOR), what));
        }
        found
    }

    /// Ends standing by for a port that is removed.
    pub(super) fn end_standbys(&mut self, active: &str) {
        for port in self.ports.iter_mut().filter(|port| of(port) == Some(active)) {
            port.options.retain(|given| given.entry.name != STANDBY_FOR);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(ports: &[&str]) -> Config {
        let ports = ports.iter().map(|port| port.parse().unwrap()).collect();
        Config { ports, ..Config::default() }
    }

    fn conflicts(ports: &[&str]) -> Vec<String> {
        config(ports).standbys().conflicts().into_iter().map(|(_, what)| what).collect()
    }

    #[test]
    fn standby_port_is_one_more_interface_for_a_port_with_one() {
        let valid = [
            "a=af-packet:e0",
            "b=af-xdp:e1,standby-for=a",
            "c=af-packet:e2,standby-for=none",
            "d=af-xdp:e3,standby-for=c,return-after=0",
        ];
        assert_eq!(conflicts(&valid), [""; 0]);
        for (ports, want) in [
            (&["a=af-packet:e0,standby-for=a"][..], "a port cannot be its own standby"),
            (&["up=af-packet:e0", "b=af-packet:e1,standby-for=upp"], "no such port (did you mean"),
            (&["a=tap:t0", "b=af-packet:e1,standby-for=a"], "'a' has no carrier to watch: name a"),
            (&["a=null", "b=af-xdp:e1,standby-for=a"], "of kind af-packet or af-xdp"),
        ] {
            let found = conflicts(ports);
            assert!(found.len() == 1 && found[0].contains(want), "{ports:?}: {found:?}");
            assert!(found[0].starts_with("port '") && found[0].contains(": standby-for="));
        }
    }

    #[test]
    fn pair_has_one_standby_port_which_has_none_itself() {
        let chain = conflicts(&[
            "a=af-packet:e0",
            "b=af-packet:e1,standby-for=a",
            "c=af-packet:e2,standby-for=b",
        ]);
        assert!(chain[0].contains("'c' is the standby of 'b' already"), "{chain:?}");
        assert!(chain[1].contains("'b' is itself the standby of 'a'"), "{chain:?}");
        let two = conflicts(&[
            "a=af-packet:e0",
            "b=af-packet:e1,standby-for=a",
            "c=af-packet:e2,standby-for=a",
        ]);
        assert!(two.len() == 2 && two[0].contains("'a' has a standby port, 'c'"), "{two:?}");
        let both = conflicts(&["a=af-packet:e0,standby-for=b", "b=af-packet:e1,standby-for=a"]);
        assert!(both.len() == 2 && both[0].contains("'b' is itself the standby"), "{both:?}");
    }

    #[test]
    fn ports_of_a_pair_have_different_interfaces_and_equal_rules() {
        let same = config(&["a=af-packet:e0", "b=af-xdp:e0,standby-for=a"]).conflicts();
        assert!(same[0].1.contains("interface e0 is already used by port 'a'"), "{same:?}");
        let mut cross = config(&["a=af-packet:e0", "b=af-packet:e1,standby-for=a"]);
        let entry = crate::schema::run::TABLE.iter().find(|e| e.name == "forward").unwrap();
        assert_eq!(cross.conflicts(), []);
        cross.settings.set(entry, entry.parse("cross").unwrap());
        assert!(cross.conflicts()[0].1.contains("use forward=switch"), "{:?}", cross.conflicts());
        let unlike = config(&["a=af-packet:e0,vlan=5", "b=af-packet:e1,standby-for=a"]);
        let warning = &unlike.unlike_standbys()[0].1;
        assert!(warning.contains("has vlan=none instead of vlan=5"), "{warning}");
    }

    #[test]
    fn standby_port_of_a_removed_one_is_a_port_like_any_other() {
        let mut config = config(&["a=af-packet:e0", "b=af-packet:e1,standby-for=a"]);
        config.remove_port("a");
        assert_eq!(config.conflicts(), []);
        assert_eq!(config.port("b").and_then(of), None);
    }
}
