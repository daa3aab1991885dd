//! Mirror ports of a switch as a whole: which of its ports may have which mirror port.

use std::collections::BTreeMap;

use super::Config;
use crate::near::did_you_mean;
use crate::port::PortText;
use crate::schema::Value;
use crate::schema::port::Kind;

/// The option that names a mirror port.
pub const MIRROR_TO: &str = "mirror-to";

/// Ports and their mirror ports, those found by `xen:auto` included.
#[derive(Clone, Debug, Default)]
pub struct Mirrors<'a> {
    ports: BTreeMap<&'a str, Option<&'a str>>,
    auto: Option<(&'a str, Option<&'a str>)>,
}

impl<'a> Mirrors<'a> {
    /// Adds a port, or changes its mirror port.
    pub fn set(&mut self, port: &'a str, to: Option<&'a str>) {
        self.ports.insert(port, to);
    }

    /// Adds the port that represents all vifs, each with its `mirror-to=`.
    pub fn set_auto(&mut self, port: &'a str, to: Option<&'a str>) {
        self.auto = Some((port, to));
    }

    /// Finds ports that cannot have their mirror port: name and reason, which says what to write.
    pub fn conflicts(&self) -> Vec<(&'a str, String)> {
        let all = self.ports.iter().map(|(name, to)| (*name, *to)).chain(self.auto);
        all.filter_map(|(name, to)| Some((name, self.check(name, to?).err()?))).collect()
    }

    /// Checks a change of a port's mirror port.
    ///
    /// # Errors
    /// The port cannot have it; the error says what to write.
    pub fn check_change(&self, name: &str, to: &str) -> Result<(), String> {
        self.check(name, to)?;
        let user = self.ports.iter().chain(self.auto.as_ref().map(|(name, to)| (name, to)));
        match user.into_iter().find(|(_, to)| **to == Some(name)) {
            Some((user, _)) => Err(format!(
                "port '{name}': {MIRROR_TO}={to}: '{name}' is itself a mirror port, of '{user}', \
                 and mirrored frames are not mirrored again: use {MIRROR_TO}=none for '{user}' \
                 first"
            )),
            None => Ok(()),
        }
    }

    fn check(&self, name: &str, to: &str) -> Result<(), String> {
        let refuse =
            |why: String| Err(format!("port '{name}': {MIRROR_TO}={}: {why}", to.escape_debug()));
        if to == name {
            return refuse("a port cannot be its own mirror port: use another, or none".into());
        }
        if self.auto.is_some_and(|(auto, _)| to == auto) {
            return refuse("it represents several vifs: use one port".into());
        }
        match self.mirror_of(to) {
            None => {
                let hint = did_you_mean(to, self.ports.keys().copied());
                refuse(format!("no such port{hint}: add it first, or use none"))
            }
            Some(Some(next)) => refuse(format!(
                "port '{to}' is mirrored to '{next}', and mirrored frames are not mirrored again: \
                 use another mirror port, or {MIRROR_TO}=none for '{to}'"
            )),
            Some(None) => Ok(()),
        }
    }

    /// The mirror port of a port; the outer `None`: there is no such port.
    fn mirror_of(&self, name: &str) -> Option<Option<&'a str>> {
        if let Some(to) = self.ports.get(name) {
            return Some(*to);
        }
        // It may come and go with its guest. One that all vifs are mirrored to is not mirrored.
        let (_, to) = self.auto.filter(|_| is_vif(name))?;
        Some(to.filter(|to| *to != name))
    }
}

/// Whether this is the name of a vif that `xen:auto` adds: `vif1.0`.
fn is_vif(name: &str) -> bool {
    let numbers = name.strip_prefix("vif").and_then(|numbers| numbers.split_once('.'));
    numbers
        .is_some_and(|(domid, devid)| domid.parse::<u16>().is_ok() && devid.parse::<u32>().is_ok())
}

/// The mirror port of a port.
fn mirror(port: &PortText) -> Option<&str> {
    port.given(MIRROR_TO, None).and_then(Value::text).filter(|to| *to != "none")
}

impl Config {
    /// The mirror ports of its ports.
    pub fn mirrors(&self) -> Mirrors<'_> {
        let mut mirrors = Mirrors::default();
        for port in &self.ports {
            match port.kind {
                Kind::Xen if port.arg == "auto" => mirrors.set_auto(&port.name, mirror(port)),
                _ => mirrors.set(&port.name, mirror(port)),
            }
        }
        mirrors
    }

    /// Ends the mirrors to a port that is removed.
    pub(super) fn end_mirrors(&mut self, to: &str) {
        for port in self.ports.iter_mut().filter(|port| mirror(port) == Some(to)) {
            port.options.retain(|given| given.entry.name != MIRROR_TO);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conflicts(ports: &[&str]) -> Vec<String> {
        let ports = ports.iter().map(|port| port.parse().unwrap()).collect();
        let config = Config { ports, ..Config::default() };
        config.mirrors().conflicts().into_iter().map(|(_, what)| what).collect()
    }

    #[test]
    fn a_mirror_port_is_another_port_that_is_not_mirrored() {
        let valid = ["a=null,mirror-to=m", "b=null,mirror-to=m", "m=null,mirror-to=none"];
        assert_eq!(conflicts(&valid), [""; 0]);
        let found = conflicts(&["a=null,mirror-to=a", "b=null,mirror-to=aa", "c=null,mirror-to=b"]);
        for (found, want) in found.iter().zip([
            "port 'a': mirror-to=a: a port cannot be its own mirror port",
            "port 'b': mirror-to=aa: no such port (did you mean 'a'?): add it first",
            "port 'c': mirror-to=b: port 'b' is mirrored to 'aa', and mirrored frames are not \
             mirrored again",
        ]) {
            assert!(found.starts_with(want), "{found}");
        }
        assert_eq!(found.len(), 3);
    }

    #[test]
    fn vifs_that_xen_auto_may_add_are_mirror_ports() {
        let auto = "auto=xen:auto";
        assert_eq!(conflicts(&["a=null,mirror-to=vif1.0", auto]), [""; 0]);
        assert_eq!(conflicts(&["auto=xen:auto,mirror-to=vif1.0"]), [""; 0]);
        assert_eq!(conflicts(&["auto=xen:auto,mirror-to=m", "m=null"]), [""; 0]);
        let both = ["a=null,mirror-to=vif1.0", "auto=xen:auto,mirror-to=m", "m=null"];
        for (ports, want) in [
            (&["a=null,mirror-to=vif1.0"][..], "no such port"),
            (&["a=null,mirror-to=vif1", auto], "no such port"),
            (&["a=null,mirror-to=auto", auto], "represents several vifs"),
            (&["auto=xen:auto,mirror-to=auto"], "its own mirror port"),
            (&both, "port 'vif1.0' is mirrored to 'm'"),
        ] {
            let found = conflicts(ports);
            assert!(found.len() == 1 && found[0].contains(want), "{ports:?}: {found:?}");
        }
    }
}
