//! Table of all cases, and of the advisories that no peer can cause.

mod virtio;
mod xen;

use self::virtio::{FOREIGN, SOCKETS, VIRTQUEUES};
use self::xen::{STATICS, VIFS};
use crate::Ring::{Packed, Socket, Split, Xen};
use crate::{Attack, Case, Error, Ring, Who};

type Play = fn(&mut Attack<'_>) -> Result<(), Error>;

const BOTH: &[Ring] = &[Split, Packed];

const fn case(
    name: &'static str,
    who: Who,
    what: &'static str,
    source: &'static [&'static str],
    rings: &'static [Ring],
    play: Play,
) -> Case {
    Case { name, who, what, source, rings, ports: 1, receives: false, play }
}

const fn guest(
    name: &'static str,
    what: &'static str,
    source: &'static [&'static str],
    play: Play,
) -> Case {
    case(name, Who::Guest, what, source, BOTH, play)
}

const fn front(
    name: &'static str,
    what: &'static str,
    source: &'static [&'static str],
    play: Play,
) -> Case {
    case(name, Who::FrontEnd, what, source, &[Socket], play)
}

const fn domain(
    name: &'static str,
    what: &'static str,
    source: &'static [&'static str],
    play: Play,
) -> Case {
    case(name, Who::Domain, what, source, &[Xen], play)
}

impl Case {
    const fn receives(self) -> Self {
        Self { receives: true, ..self }
    }

    const fn ports(self, ports: u16) -> Self {
        Self { ports, ..self }
    }

    const fn only(self, rings: &'static [Ring]) -> Self {
        Self { rings, ..self }
    }
}

/// All cases, in order.
pub fn cases() -> impl Iterator<Item = &'static Case> {
    VIRTQUEUES.iter().chain(&SOCKETS).chain(&FOREIGN).chain(&VIFS).chain(&STATICS)
}

/// The cases for a ring, in order.
pub fn cases_of(ring: Ring) -> impl Iterator<Item = &'static Case> {
    cases().filter(move |case| case.rings.contains(&ring))
}

/// Advisories that no peer of a switch can cause, and why.
pub const NOT_A_PEERS: [(&str, &str); 8] = [
    ("XSA-376", "affects front-ends, by their back-end"),
    ("XSA-380", "affects the hypervisor's grant tables"),
    ("XSA-391", "affects guests, by events from a back-end"),
    ("XSA-403", "affects front-ends: data in pages beside a frame"),
    ("XSA-405", "affects front-ends: an error path"),
    ("XSA-424", "affects a kernel's locks when it frees a packet"),
    ("row 15", "concerns two workers of the switch; tests of `switch`"),
    ("row 16", "concerns equal floods, which are legal; the study `fairness`"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique_and_every_case_has_a_source() {
        let names: BTreeSet<_> = cases().map(|case| case.name).collect();
        assert_eq!(names.len(), cases().count());
        for case in cases() {
            assert!(!case.source.is_empty() && !case.rings.is_empty() && case.ports > 0);
            let is_plain = |c: char| c.is_ascii_lowercase() || c == '-';
            assert!(case.name.chars().all(is_plain), "{}", case.name);
            assert!(case.what.len() <= 100, "{}", case.name);
        }
        for ring in Ring::ALL {
            assert!(cases_of(ring).count() > 20, "{ring}");
            assert_eq!(ring.name().parse(), Ok(ring));
        }
    }

    /// Every advisory of the two references has a case, or a reason to have none; every row of
    /// issue 14's first table that a peer can cause has one.
    #[test]
    fn every_advisory_of_the_references_is_a_case_or_not_a_peers() {
        let advisories = [
            "CVE-2018-1059",
            "CVE-2019-14818",
            "CVE-2020-10722",
            "CVE-2020-10723",
            "CVE-2020-10724",
            "CVE-2020-10725",
            "CVE-2020-10726",
            "CVE-2020-14374",
            "CVE-2020-14375",
            "CVE-2020-14376",
            "CVE-2020-14377",
            "CVE-2020-14378",
            "CVE-2022-2132",
            "CVE-2024-11614",
            "SPDK #3860",
            "CVE-2021-3748",
            "CVE-2019-14835",
            "vm-virtio 0.6.1",
            "Firecracker PR 6201",
            "Cloud Hypervisor PR 8142",
            "passt 2025-01 (die and ASSERT)",
            "XSA-39",
            "XSA-90",
            "XSA-155",
            "XSA-216",
            "XSA-270",
            "XSA-332",
            "XSA-349",
            "XSA-362",
            "XSA-367",
            "XSA-374",
            "XSA-376",
            "XSA-380",
            "XSA-391",
            "XSA-392",
            "XSA-396",
            "XSA-403",
            "XSA-405",
            "XSA-423",
            "XSA-424",
            "XSA-432",
            "XSA-448",
            "XSA-465",
            "CVE-2024-49936",
            "CVE-2026-99286",
            "CVE-2026-99287",
            "CVE-2026-100080",
            "CVE-2026-100081",
        ];
        let rows = (1..=14).map(|row| format!("row {row}"));
        for wanted in advisories.iter().map(|name| name.to_string()).chain(rows) {
            let is_case = cases().any(|case| case.source.contains(&wanted.as_str()));
            let is_not = NOT_A_PEERS.iter().any(|(name, _)| *name == wanted);
            assert!(is_case != is_not, "{wanted}");
        }
    }
}
