//! Sets the interface's carrier from the link's: a toolstack can unplug a vif, and programs that
//! monitor the interface must see it.

use std::os::fd::AsFd;

use crate::connect::Link;

/// State last set in the kernel.
#[derive(Debug, Default)]
pub struct Carrier {
    report: Option<bool>,
    /// The kernel is too old to set it.
    unsupported: bool,
}

impl Carrier {
    /// Sets the carrier of interface `name` through one of its queues, if it changed.
    pub fn update(&mut self, name: &str, queue: impl AsFd, link: &Link) {
        let on = link.carrier();
        // A new interface has a carrier.
        if self.report.unwrap_or(true) == on || self.unsupported {
            return;
        }
        self.report = Some(on);
        match uplink::set_carrier(queue, on) {
            Ok(()) => {
                let now = if on { "up" } else { "down" };
                tracing::info!("{name}: the vif's carrier is {now}");
            }
            Err(error) => {
                self.unsupported = true;
                tracing::warn!("{name}: cannot set its carrier ({error}); it stays unchanged");
            }
        }
    }
}

/// Message about an interface whose MTU differs from its link's.
pub fn mtu_mismatch(interface: u32, link: Option<u16>) -> Option<String> {
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
    fn an_mtu_that_differs_is_reported() {
        assert_eq!(mtu_mismatch(1500, None), None);
        assert_eq!(mtu_mismatch(1500, Some(1500)), None);
        let report = |interface, link| mtu_mismatch(interface, Some(link)).unwrap();
        assert!(report(1500, 1400).ends_with("longer frames are dropped: --mtu 1400"));
        assert!(report(1500, 9000).ends_with("set 9000 for the vif; --mtu 9000"));
    }
}
