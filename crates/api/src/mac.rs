//! A MAC address as text.

/// Parses a unicast MAC address, `02:00:00:00:00:01`.
///
/// # Errors
/// It is not one; the error shows an example.
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
        return Err(format!(
            "'{text}' is a group address, not a MAC address of an interface: use one like \
             02:00:00:00:00:01"
        ));
    }
    Ok(mac)
}
