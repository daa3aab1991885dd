//! Rules of ports whose peers are tenants, from options to [`switch::tenant::Rules`].

use std::collections::BTreeMap;

use api::schema::port::{TENANT, check_rules, common};
use api::schema::{Amounts, Entry, Value};
use switch::account::{Limit, RateLimits};
use switch::forward::StormLimits;
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
        check_rules(|name| all.0.get(name).cloned()).map_err(|invalid| invalid.what)?;
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

    /// All its MAC addresses, at most 64.
    pub fn macs(&self) -> &[[u8; 6]] {
        self.0.get("mac").map_or(&[], Value::macs)
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
        let ips = value("ip").and_then(Value::ips);
        let is_locked = !macs.is_empty() || ips.is_some();
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

    /// Limits of frames from the peer and to it.
    pub fn rates(&self) -> (RateLimits, RateLimits) {
        let amounts = |name| self.0.get(name).and_then(Value::amounts).unwrap_or_default();
        // A worker that wakes up later than a burst lasts does not keep the rate. Toward the peer
        // frames are lost, and TCP needs room for its own bursts.
        let from_peer = limits(amounts("rate-in"), amounts("burst-in"), 25, 2);
        (from_peer, limits(amounts("rate-out"), amounts("burst-out"), 10, 44))
    }

    /// Seconds for which the port does not take addresses that flap; 0: they are only reported.
    pub fn loop_guard_s(&self) -> u32 {
        if self.0.get("loop-guard").and_then(Value::word) != Some("block") {
            return 0;
        }
        let default = || common().find(|e| e.name == "loop-guard-time")?.default_value();
        let time = self.0.get("loop-guard-time").cloned().or_else(default);
        time.and_then(|time| time.number()).map_or(0, |s| u32::try_from(s).unwrap_or(u32::MAX))
    }

    /// The port that gets copies of its frames, and whether of those from its peer and to it.
    pub fn mirror(&self) -> Option<(&str, bool, bool)> {
        let to = self.0.get("mirror-to").and_then(Value::text).filter(|name| *name != "none")?;
        let way = self.0.get("mirror-direction").and_then(Value::word);
        Some((to, way != Some("out"), way != Some("in")))
    }

    /// Ends its mirror.
    pub fn end_mirror(&mut self) {
        self.0.remove("mirror-to");
    }

    /// Limits of what the peer floods.
    pub fn storm(&self) -> StormLimits {
        let amounts = |name| self.0.get(name).and_then(Value::amounts).unwrap_or_default();
        let (all, burst) = (amounts("storm"), amounts("burst-storm"));
        let kind = |name| match amounts(name) {
            own if own == Amounts::default() => limits(all, burst, 1, 1),
            own => limits(own, Amounts::default(), 1, 1),
        };
        StormLimits {
            broadcast: kind("storm-broadcast"),
            multicast: kind("storm-multicast"),
            unknown: kind("storm-unknown"),
        }
    }
}

/// Longest frame without tags and jumbo frames, in bits.
const FULL_FRAME_BITS: u64 = 1514 * 8;

/// Limits at `rate`. The default burst is a `part` of a second's, at least `frames` full frames.
fn limits(rate: Amounts, burst: Amounts, part: u64, frames: u64) -> RateLimits {
    let limit = |per_second: Option<u64>, burst: Option<u64>, least: u64| {
        per_second.map(|per_second| {
            let burst = burst.unwrap_or((per_second / part).max(least));
            Limit { per_second, burst }
        })
    };
    RateLimits {
        bits: limit(rate.data, burst.data.map(|bytes| bytes * 8), frames * FULL_FRAME_BITS),
        frames: limit(rate.frames, burst.frames, frames),
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
            ("ip", "locked", true),
            ("dhcp-server", "on", false),
            ("ra", "on", false),
            ("vlan", "5", true),
            ("trunk", "5+10-20", true),
            ("native", "7", false),
            ("isolated", "on", true),
            ("rate-in", "100Mbit", false),
            ("burst-in", "64K", false),
            ("rate-out", "20kframes", false),
            ("burst-out", "100frames", false),
            ("storm", "100frames", false),
            ("storm-broadcast", "10frames", false),
            ("storm-multicast", "10frames", false),
            ("storm-unknown", "1Mbit", false),
            ("burst-storm", "10frames", false),
            ("loop-guard", "block", false),
            ("loop-guard-time", "5", false),
            ("mirror-to", "vm2", false),
            ("mirror-direction", "in", false),
        ] {
            let tenant = tenant(&[(name, text)]);
            assert_eq!(tenant.rules().is_some(), alone, "{name}");
            assert_eq!(shown(&tenant), format!("{name}={text} "), "as it was given");
        }
        assert_eq!(TENANT.len(), 21);
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
    fn rates_have_a_default_burst_and_bursts_need_a_rate() {
        let (from, to) = tenant(&[("rate-in", "100Mbit"), ("rate-out", "1Mbit+20frames")]).rates();
        let limit = |per_second, burst| Some(Limit { per_second, burst });
        assert_eq!(from, RateLimits { bits: limit(100_000_000, 4_000_000), frames: None });
        let frames = limit(20, 44);
        assert_eq!(to, RateLimits { bits: limit(1_000_000, 532_928), frames });
        let (from, _) = tenant(&[("rate-in", "1Mbit"), ("burst-in", "64K")]).rates();
        assert_eq!(from.bits, limit(1_000_000, 524_288));
        assert_eq!(Tenant::default().rates(), Default::default());
        let bits = tenant(&[("rate-in", "1Mbit")]);
        let error = bits.changed(&tenant(&[("burst-in", "9frames")])).unwrap_err();
        let want = "burst-in= in frames needs a rate: add one like rate-in=20kframes";
        assert!(error.starts_with(want), "{error}");
        let error = bits.changed(&tenant(&[("burst-out", "9K")])).unwrap_err();
        assert!(error.starts_with("burst-out= in bytes needs a rate"), "{error}");
        let error = tenant(&[("rate-in", "1M"), ("burst-in", "9K")]);
        assert!(error.changed(&tenant(&[("rate-in", "none")])).is_err(), "the burst stays");
    }

    #[test]
    fn storm_limits_each_kind_and_one_may_have_its_own() {
        let frames = |per_second, burst| RateLimits {
            bits: None,
            frames: Some(Limit { per_second, burst }),
        };
        let all = tenant(&[
            ("storm", "100frames"),
            ("burst-storm", "7frames"),
            ("storm-broadcast", "20frames"),
        ]);
        let (broadcast, others) = (frames(20, 20), frames(100, 7));
        let want = StormLimits { broadcast, multicast: others, unknown: others };
        assert_eq!(all.storm(), want);
        let one = tenant(&[("storm-unknown", "20frames")]).storm();
        assert_eq!(one, StormLimits { unknown: frames(20, 20), ..StormLimits::default() });
        let error = one_error(&[("burst-storm", "7frames")]);
        assert!(error.starts_with("burst-storm= in frames needs a rate"), "{error}");
    }

    fn one_error(options: &[(&str, &str)]) -> String {
        Tenant::default().changed(&tenant(options)).unwrap_err()
    }

    #[test]
    fn first_mac_is_the_one_offered() {
        let macs = tenant(&[("mac", "02:00:00:00:00:07+02:00:00:00:00:01")]);
        assert_eq!(macs.mac(), Some([2, 0, 0, 0, 0, 7]));
    }
}
