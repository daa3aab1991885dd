//! A MAC address as text.

/// Parses a unicast MAC address, `02:00:00:00:00:01`.
///
/// # Errors
/// It is not one, or of a group; the error shows an example.
pub fn mac(text: &str) -> Result<[u8; 6], String> {
    let bad = || format!("'{text}' is not a MAC address like 02:00:00:00:00:01");
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        let part = parts.next().filter(|p| p.len() == 2).ok_or_else(bad)?;
        *byte = u8::from_str_radix(part, 16).map_err(|_| bad())?;
    }
    if parts.next().is_some() {
        return Err(bad());
    }
    if mac[0] & 1 != 0 {
        let which = if mac == [0xff; 6] { "the broadcast address" } else { "a multicast address" };
        return Err(format!(
            "'{text}' is {which}, not that of one interface: use one whose first byte is even, \
             like 02:00:00:00:00:01"
        ));
    }
    Ok(mac)
}

#[cfg(test)]
mod tests {
    use super::mac;

    /// Issue 16, row 6: a multicast address is an address.
    #[test]
    fn group_addresses_are_refused_as_such() {
        assert_eq!(mac("02:00:00:00:00:0a"), Ok([2, 0, 0, 0, 0, 10]));
        for (text, want) in [
            ("01:00:5e:00:00:01", "'01:00:5e:00:00:01' is a multicast address"),
            ("ff:ff:ff:ff:ff:ff", "'ff:ff:ff:ff:ff:ff' is the broadcast address"),
            ("02:00:00:00:00", "'02:00:00:00:00' is not a MAC address"),
            ("02:00:00:00:00:01:02", "is not a MAC address"),
            ("02:00:00:00:00:0x", "is not a MAC address"),
        ] {
            let error = mac(text).unwrap_err();
            assert!(error.contains(want) && error.contains("like 02:00:00:00:00:01"), "{error}");
        }
    }
}
