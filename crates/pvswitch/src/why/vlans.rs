//! VLANs of ports as options say them.

use std::ops::RangeInclusive;

use serde_json::Value;

/// VLANs of a port.
#[derive(Debug, PartialEq, Eq)]
pub enum Vlans {
    /// No VLAN options: all VLANs, tags as they are.
    Any,
    /// These.
    Some(Vec<RangeInclusive<u16>>),
}

impl Vlans {
    /// Those of a port of `show`.
    pub fn of(port: &Value) -> Self {
        let rule = |name: &str| port["rules"][name].as_str().unwrap_or_default();
        let all = ["vlan", "native", "trunk"].into_iter().flat_map(|name| rule(name).split('+'));
        let range = |text: &str| {
            let (first, last) = text.split_once('-').unwrap_or((text, text));
            Some(first.parse().ok()?..=last.parse().ok()?)
        };
        let all: Vec<_> = all.filter_map(range).collect();
        if all.is_empty() { Self::Any } else { Self::Some(all) }
    }

    /// Whether a frame can be in a VLAN of both.
    pub fn meet(&self, other: &Self) -> bool {
        let (Self::Some(ours), Self::Some(theirs)) = (self, other) else { return true };
        ours.iter().any(|a| theirs.iter().any(|b| a.start() <= b.end() && b.start() <= a.end()))
    }

    /// Returns the text of the option.
    pub fn text(&self) -> String {
        let Self::Some(all) = self else { return "any".into() };
        let range = |r: &RangeInclusive<u16>| match (r.start(), r.end()) {
            (first, last) if first == last => first.to_string(),
            (first, last) => format!("{first}-{last}"),
        };
        all.iter().map(range).collect::<Vec<_>>().join("+")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ports_meet_in_a_common_vlan() {
        let vlans = |rules: Value| Vlans::of(&json!({ "rules": rules }));
        let access = vlans(json!({ "vlan": "10" }));
        let trunk = vlans(json!({ "trunk": "5+20-30", "native": "7" }));
        assert_eq!((access.text(), trunk.text()), ("10".into(), "7+5+20-30".into()));
        assert_eq!(vlans(Value::Null), Vlans::Any);
        assert!(!access.meet(&trunk) && access.meet(&Vlans::Any) && access.meet(&access));
        assert!(trunk.meet(&vlans(json!({ "vlan": "25" }))));
        assert!(trunk.meet(&vlans(json!({ "vlan": "7" }))), "native");
        assert!(!trunk.meet(&vlans(json!({ "vlan": "31" }))));
    }
}
