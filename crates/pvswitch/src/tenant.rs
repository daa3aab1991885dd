//! Rules of ports whose peers are tenants, from options to [`switch::tenant::Rules`].

use std::collections::BTreeMap;

use api::schema::port::{TENANT, check_vlans, common};
use api::schema::{Entry, Value};
use switch::tenant::{Rules, Security, Vlan};

/// Options of a port that make its rules; those with the default are left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tenant(BTreeMap<&'static str, Value>);

impl Tenant {
    /// Sets an option; false: it is not one of these.
    pub fn set(&mut self, entry: &Entry, value: &Value) -> bool {
        let known = TENANT.contains(&entry.name);
        if known {
            self.0.insert(entry.name, value.clone());
        }
        known
    }

    /// These options with `changes`.
    ///
    /// # Errors
    /// Together they are invalid; the error says what to write.
    pub fn changed(&self, changes: &Self) -> Result<Self, String> {
        let mut all = self.clone();
        all.0.extend(changes.0.clone());
        check_vlans(|name| all.0.get(name).cloned())?;
        Ok(all.without_defaults())
    }

    /// The same options without those that have the default.
    fn without_defaults(mut self) -> Self {
        let is_default = |name: &str, value: &Value| {
            let entry = common().find(|entry| entry.name == name);
            entry.and_then(Entry::default_value).as_ref() == Some(value)
        };
        self.0.retain(|name, value| !is_default(name, value));
        self
    }

    /// The first of its MAC addresses.
    pub fn mac(&self) -> Option<[u8; 6]> {
        self.0.get("mac")?.macs().first().copied()
    }

    /// Options that differ from the default, by name, with their values.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, String)> {
        self.clone().without_defaults().0.into_iter().map(|(name, value)| (name, value.to_string()))
    }

    /// The rules; `None`: the port has none.
    pub fn rules(&self) -> Option<Rules> {
        let value = |name| self.0.get(name);
        let is_on = |name| value(name).and_then(Value::word) == Some("on");
        let macs = value("mac").map_or(&[][..], Value::macs);
        let ips = value("ip").map_or(&[][..], Value::ips);
        let is_locked = !macs.is_empty() || !ips.is_empty();
        let security =
            is_locked.then(|| Security::new(macs, ips, is_on("dhcp-server"), is_on("ra")));
        let vids = value("trunk").map_or(&[][..], Value::vlans);
        let vlan = match value("vlan").and_then(Value::vlan) {
            Some(vid) => Vlan::Access(vid),
            None if vids.is_empty() => Vlan::Transparent,
            None => Vlan::Trunk {
                vids: vids.iter().copied().collect(),
                native: value("native").and_then(Value::vlan),
            },
        };
        let rules = Rules { security, vlan, isolated: is_on("isolated") };
        (rules != Rules::default()).then_some(rules)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(options: &[(&str, &str)]) -> Tenant {
        let mut tenant = Tenant::default();
        for (name, text) in options {
            let entry = common().find(|entry| entry.name == *name).unwrap();
            assert!(tenant.set(entry, &entry.parse(text).unwrap()));
        }
        tenant
    }

    fn shown(tenant: &Tenant) -> String {
        tenant.all().map(|(name, value)| format!("{name}={value} ")).collect()
    }

    #[test]
    fn every_option_makes_a_rule_or_qualifies_one() {
        for (name, text, alone) in [
            ("mac", "02:00:00:00:00:01", true),
            ("ip", "10.0.0.1+fd00::1", true),
            ("dhcp-server", "on", false),
            ("ra", "on", false),
            ("vlan", "5", true),
            ("trunk", "5+10-20", true),
            ("native", "7", false),
            ("isolated", "on", true),
        ] {
            let tenant = tenant(&[(name, text)]);
            assert_eq!(tenant.rules().is_some(), alone, "{name}");
            assert_eq!(shown(&tenant), format!("{name}={text} "), "as it was given");
        }
        assert_eq!(TENANT.len(), 8);
        assert!(Tenant::default().rules().is_none());
    }

    #[test]
    fn changes_are_checked_together_with_what_is_set() {
        let access = tenant(&[("vlan", "5"), ("isolated", "on")]);
        let error = access.changed(&tenant(&[("trunk", "7")])).unwrap_err();
        assert!(error.contains("vlan=5 and trunk= exclude each other"), "{error}");
        let error = access.changed(&tenant(&[("native", "7")])).unwrap_err();
        assert!(error.contains("native=7 needs a trunk: add trunk=N+M-K"), "{error}");
        let trunk = tenant(&[("vlan", "none"), ("trunk", "7-9"), ("native", "7")]);
        let trunk = access.changed(&trunk).unwrap();
        assert_eq!(shown(&trunk), "isolated=on native=7 trunk=7-9 ");
        let off = tenant(&[("trunk", "none"), ("native", "none"), ("isolated", "off")]);
        assert_eq!(trunk.changed(&off).unwrap(), Tenant::default());
        assert!(trunk.changed(&tenant(&[("trunk", "none")])).is_err(), "native stays");
    }

    #[test]
    fn first_mac_is_the_one_offered() {
        let macs = tenant(&[("mac", "02:00:00:00:00:07+02:00:00:00:00:01")]);
        assert_eq!(macs.mac(), Some([2, 0, 0, 0, 0, 7]));
    }
}
