//! The interface's carrier follows the link's: a toolstack can take a vif's cable out, and whoever
//! watches the interface is to know.

use std::os::fd::AsFd;

use crate::connect::Link;

/// What the kernel was told last.
#[derive(Debug, Default)]
pub struct Carrier {
    told: Option<bool>,
    /// It cannot be told: it is too old.
    deaf: bool,
}

impl Carrier {
    /// Tells the kernel, by a queue of the interface `name`, if anything changed.
    pub fn follow(&mut self, name: &str, queue: impl AsFd, link: &Link) {
        let on = link.carrier();
        // A fresh interface has one.
        if self.told.unwrap_or(true) == on || self.deaf {
            return;
        }
        self.told = Some(on);
        match uplink::set_carrier(queue, on) {
            Ok(()) => {
                let now = if on { "there again" } else { "taken away" };
                tracing::info!("{name}: the vif's carrier is {now}");
            }
            Err(error) => {
                self.deaf = true;
                tracing::warn!("{name}: its carrier cannot be set ({error}); it stays as it is");
            }
        }
    }
}

/// What to tell of an interface whose MTU is not its link's.
pub fn wrong_mtu(interface: u32, link: Option<u16>) -> Option<String> {
    let link = link.filter(|link| u32::from(*link) != interface)?;
    let then = if u32::from(link) < interface { "longer frames are dropped: " } else { "" };
    Some(format!(
        "its MTU is {interface}, the toolstack set {link} for the vif; {then}--mtu {link}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_mtu_that_differs_is_told() {
        assert_eq!(wrong_mtu(1500, None), None);
        assert_eq!(wrong_mtu(1500, Some(1500)), None);
        let told = |interface, link| wrong_mtu(interface, Some(link)).unwrap();
        assert!(told(1500, 1400).ends_with("longer frames are dropped: --mtu 1400"));
        assert!(told(1500, 9000).ends_with("set 9000 for the vif; --mtu 9000"));
    }
}
