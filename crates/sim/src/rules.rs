//! Rules and rates of ports, drawn from the seed: an operator's, set before the guests start.

use std::sync::Arc;

use switch::account::{Limit, RateLimits};
use switch::frame::HEAD_LEN;
use switch::tenant::{Rules, Security, Tenants, Vlan};
use switch::time::Ns;
use switch::vnet::VnetHdr;

use crate::frame::mac;
use crate::random::Random;

/// Longest wait for a rate: a burst of the longest frames, after one of the shortest, at the lowest
/// rate in bits.
pub(crate) const RATE_WAIT: Ns = Ns::from_ms(25);

/// Rules and rates of one port.
#[derive(Clone, Debug, Default)]
pub(crate) struct PortRules {
    /// Addresses that it is locked to; `None`: it may use any.
    security: Option<Security>,
    /// Whether it reaches only ports that are not isolated.
    isolated: bool,
    pub rate_in: RateLimits,
    pub rate_out: RateLimits,
}

/// Rules of all ports, by index.
#[derive(Clone, Debug, Default)]
pub(crate) struct AllRules(Vec<PortRules>);

impl AllRules {
    /// No port has any.
    pub fn none(ports: usize) -> Self {
        Self(vec![PortRules::default(); ports])
    }

    /// For guests of which some are `honest`. In some runs all others are locked to their
    /// addresses, and some ports are isolated; in some, the rates of ports are limited.
    pub fn new(honest: &[bool], random: &mut Random) -> Self {
        let (has_rules, has_rates) = (random.one_in(4), random.one_in(5));
        let rules = |(i, is_honest): (usize, &bool)| {
            let mut rules = PortRules::default();
            if has_rules && (!is_honest || random.one_in(2)) {
                rules.security = Some(Security::new(&[mac(i)], None, false, false));
            }
            rules.isolated = has_rules && random.one_in(3);
            if has_rates {
                (rules.rate_in, rules.rate_out) = (rate(random), rate(random));
            }
            rules
        };
        Self(honest.iter().enumerate().map(rules).collect())
    }

    /// As workers get them; `None`: no port has any.
    pub fn tenants(&self) -> Option<Arc<Tenants>> {
        let rules = |rules: &PortRules| {
            let PortRules { security, isolated, .. } = rules.clone();
            let has_any = security.is_some() || isolated;
            has_any.then(|| Arc::new(Rules { security, vlan: Vlan::Transparent, isolated }))
        };
        Tenants::new(self.0.iter().map(rules).collect())
    }

    pub fn of(&self, port: usize) -> &PortRules {
        &self.0[port]
    }

    /// Whether any port has a rate.
    pub fn has_rates(&self) -> bool {
        self.0.iter().any(|rules| is_on(&rules.rate_in) || is_on(&rules.rate_out))
    }

    /// Whether both ports are isolated.
    pub fn isolates(&self, from: usize, to: usize) -> bool {
        self.0[from].isolated && self.0[to].isolated
    }
}

impl PortRules {
    pub fn is_locked(&self) -> bool {
        self.security.is_some()
    }

    /// Whether the switch admits a frame from this port.
    pub fn admits(&self, frame: &[u8], hdr: &VnetHdr) -> bool {
        let head = &frame[..frame.len().min(HEAD_LEN)];
        let check = |s: &Security| s.check(head, frame.len() as u32, hdr).is_ok();
        self.security.as_ref().is_none_or(check)
    }
}

pub(crate) fn is_on(limits: &RateLimits) -> bool {
    limits.bits.is_some() || limits.frames.is_some()
}

/// Random limits of one direction: no, in half of the cases.
fn rate(random: &mut Random) -> RateLimits {
    let bits = |random: &mut Random| Limit {
        per_second: random.within(100_000_000..2_000_000_000),
        burst: 8 * random.within(1500..32_000),
    };
    let frames = |random: &mut Random| Limit {
        per_second: random.within(50_000..1_000_000),
        burst: random.within(1..100),
    };
    match random.within(0..6) {
        0 => RateLimits { bits: Some(bits(random)), frames: None },
        1 => RateLimits { bits: None, frames: Some(frames(random)) },
        2 => RateLimits { bits: Some(bits(random)), frames: Some(frames(random)) },
        _ => RateLimits::default(),
    }
}
