//! Lists of addresses and VLANs: parsing, and their text.
//!
//! Members are separated by `+`, as `,` separates options; `none` is the empty list.

use std::net::IpAddr;

use crate::mac;

/// The empty list; of IP addresses: no restriction.
pub const NONE: &str = "none";
/// A restriction to no IP address at all.
const LOCKED: &str = "locked";
/// Most addresses of a list: each frame of its port is compared with them.
pub const ADDRESSES_MAX: usize = 64;
/// Highest VLAN id; 4095 is reserved (IEEE 802.1Q, table 9-2).
pub const VID_MAX: u16 = 4094;

fn members<T: PartialEq>(
    text: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    let mut all = Vec::new();
    if text == NONE {
        return Ok(all);
    }
    for member in text.split('+') {
        let value = parse(member)?;
        if !all.contains(&value) {
            all.push(value);
        }
        if all.len() > ADDRESSES_MAX {
            return Err(format!("at most {ADDRESSES_MAX} addresses"));
        }
    }
    Ok(all)
}

/// Parses MAC addresses of interfaces.
///
/// # Errors
/// One is invalid, or there are too many; the error says what to write.
pub(super) fn macs(text: &str) -> Result<Vec<[u8; 6]>, String> {
    members(text, |word| match mac(word)? {
        [0, 0, 0, 0, 0, 0] => Err(format!("'{word}' is not an address of an interface")),
        mac => Ok(mac),
    })
}

/// Parses IP addresses of interfaces; `None`: any address.
///
/// # Errors
/// As [`macs`].
pub(super) fn ips(text: &str) -> Result<Option<Vec<IpAddr>>, String> {
    if text == NONE {
        return Ok(None);
    }
    if text == LOCKED {
        return Ok(Some(Vec::new()));
    }
    let list = members(text, |word| {
        let ip: IpAddr = word.parse().map_err(|_| {
            let hint = match word {
                _ if word.contains('/') => "; list single addresses, not prefixes",
                "" | NONE | LOCKED => "; none: any address; locked: no address at all",
                _ => "",
            };
            format!("'{word}' is not an IP address like 10.0.0.1 or fd00::1{hint}")
        })?;
        let broadcast = matches!(ip, IpAddr::V4(v4) if v4.is_broadcast());
        if ip.is_unspecified() || ip.is_multicast() || ip.is_loopback() || broadcast {
            return Err(format!("'{word}' is not an address of an interface"));
        }
        Ok(ip)
    });
    list.map(Some)
}

/// Parses one VLAN id; `None`: `none`.
///
/// # Errors
/// It is neither.
pub(super) fn vlan(text: &str) -> Result<Option<u16>, String> {
    if text == NONE {
        return Ok(None);
    }
    vid(text).map(Some).ok_or_else(|| format!("use 1 to {VID_MAX}, or {NONE}"))
}

fn vid(text: &str) -> Option<u16> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|vid| digits && (1..=VID_MAX).contains(vid))
}

/// Parses VLAN ids and ranges of them, `5+10-20`; returns the ids in order.
///
/// # Errors
/// A member is invalid; the error names it.
pub(super) fn vlans(text: &str) -> Result<Vec<u16>, String> {
    if text == NONE {
        return Ok(Vec::new());
    }
    let mut vids = Vec::new();
    for member in text.split('+') {
        let (first, last) = member.split_once('-').unwrap_or((member, member));
        let range = vid(first).zip(vid(last)).filter(|(first, last)| first <= last);
        let (first, last) = range.ok_or_else(|| {
            format!(
                "'{member}' is not a VLAN or a range like 10-20: use 1 to {VID_MAX}, separated by \
                 '+', or {NONE}"
            )
        })?;
        vids.extend(first..=last);
        // A member may repeat others, but the list stays bounded.
        vids.sort_unstable();
        vids.dedup();
    }
    Ok(vids)
}

/// The text of MAC addresses.
pub fn macs_text(macs: &[[u8; 6]]) -> String {
    let text =
        |[a, b, c, d, e, f]: &[u8; 6]| format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}");
    joined(macs.iter().map(text))
}

/// The text of IP addresses; `None`: any address.
pub fn ips_text(ips: Option<&[IpAddr]>) -> String {
    match ips {
        Some([]) => LOCKED.into(),
        _ => joined(ips.unwrap_or_default().iter().map(IpAddr::to_string)),
    }
}

/// The text of VLAN ids in order, with ranges.
pub fn vlans_text(vids: &[u16]) -> String {
    let ranges = vids.chunk_by(|a, b| a.wrapping_add(1) == *b);
    joined(ranges.map(|range| match range {
        [first, .., last] => format!("{first}-{last}"),
        _ => range[0].to_string(),
    }))
}

fn joined(members: impl Iterator<Item = String>) -> String {
    let members: Vec<_> = members.collect();
    if members.is_empty() { NONE.into() } else { members.join("+") }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists_are_parsed_and_repetitions_removed() {
        let mac = [2, 0, 0, 0, 0, 10];
        assert_eq!(macs("02:00:00:00:00:0A+02:00:00:00:00:0a"), Ok(vec![mac]));
        let list = ips("10.0.0.1+fd00::1+10.0.0.1").unwrap();
        assert_eq!(ips_text(list.as_deref()), "10.0.0.1+fd00::1");
        assert_eq!((ips("none"), ips("locked")), (Ok(None), Ok(Some(Vec::new()))));
        assert_eq!(ips_text(Some(&[])), "locked");
        assert_eq!(vlans("7+3-5+4"), Ok(vec![3, 4, 5, 7]));
        assert_eq!((vlan("4094"), vlan("none")), (Ok(Some(4094)), Ok(None)));
        assert_eq!((macs(NONE), vlans(NONE)), (Ok(vec![]), Ok(vec![])));
        assert_eq!(
            (macs_text(&[]), ips_text(None), vlans_text(&[])),
            (NONE.into(), NONE.into(), NONE.into())
        );
    }

    #[test]
    fn invalid_members_are_named_with_what_to_write() {
        for (text, want) in [
            ("", "'' is not a MAC address like"),
            ("02:00:00:00:00:01+", "'' is not a MAC address like"),
            ("01:00:5e:00:00:01", "is a multicast address, not that of one interface"),
            ("00:00:00:00:00:00", "is not an address of an interface"),
            ("none+02:00:00:00:00:01", "'none' is not a MAC address"),
        ] {
            let error = macs(text).unwrap_err();
            assert!(error.contains(want), "{text}: {error}");
        }
        for (text, want) in [
            ("10.0.0.0/24", "list single addresses, not prefixes"),
            ("10.0.0.256", "is not an IP address like 10.0.0.1 or fd00::1"),
            ("0.0.0.0", "is not an address of an interface"),
            ("255.255.255.255", "is not an address of an interface"),
            ("ff02::1", "is not an address of an interface"),
            ("::1", "is not an address of an interface"),
        ] {
            let error = ips(text).unwrap_err();
            assert!(error.contains(want), "{text}: {error}");
        }
        let many: Vec<_> = (0..=ADDRESSES_MAX).map(|n| format!("10.0.1.{n}")).collect();
        assert_eq!(ips(&many.join("+")).unwrap_err(), "at most 64 addresses");
        for text in ["", "0", "4095", "-1", "+5", "x", "5-", "5-3", "1-2-3", "1,2", " 1"] {
            assert!(vlans(text).unwrap_err().contains("use 1 to 4094, separated by '+'"), "{text}");
        }
        for text in ["", "0", "4095", "-1", "+5", "1-2"] {
            assert_eq!(vlan(text).unwrap_err(), "use 1 to 4094, or none", "{text}");
        }
    }

    proptest! {
        #[test]
        fn text_of_a_list_is_parsed_to_the_same_list(
            vids in prop::collection::btree_set(1..=VID_MAX, 0..40),
            mac_words in prop::collection::btree_set(any::<[u8; 6]>(), 0..8),
            v4 in prop::collection::btree_set(1_u32..0x7f00_0000, 0..8),
        ) {
            let vids: Vec<_> = vids.into_iter().collect();
            prop_assert_eq!(vlans(&vlans_text(&vids)), Ok(vids));
            let unicast = mac_words.into_iter().map(|[a, rest @ ..]| {
                let [b, c, d, e, f] = rest;
                [a & 0xfc | 2, b, c, d, e, f]
            });
            let mut unicast: Vec<_> = unicast.collect();
            unicast.dedup();
            let parsed = macs(&macs_text(&unicast)).unwrap();
            prop_assert_eq!(macs(&macs_text(&parsed)), Ok(parsed));
            let addresses = v4.into_iter().map(|ip| IpAddr::from(ip.to_be_bytes()));
            let addresses: Vec<_> = addresses.collect();
            prop_assert_eq!(ips(&ips_text(Some(&addresses))), Ok(Some(addresses)));
        }

        #[test]
        fn no_text_panics(text in "[0-9a-f:.+n,/-]{0,60}") {
            let _ = (macs(&text), ips(&text), vlan(&text), vlans(&text));
        }

        #[test]
        fn vlans_agree_with_a_set(ranges in prop::collection::vec((1..=VID_MAX, 0..9_u16), 1..20)) {
            let end = |first: u16, more: u16| (first + more).min(VID_MAX);
            let text = ranges.iter().map(|(first, more)| format!("{first}-{}", end(*first, *more)));
            let text: Vec<_> = text.collect();
            let set: std::collections::BTreeSet<u16> =
                ranges.iter().flat_map(|(first, more)| *first..=end(*first, *more)).collect();
            prop_assert_eq!(vlans(&text.join("+")), Ok(set.into_iter().collect()));
        }
    }
}
