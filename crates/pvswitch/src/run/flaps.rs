//! Addresses that flap between ports, in the log and in `ctl fdb`.

use serde_json::{Value, json};
use switch::fdb::{FLAP_WINDOW_S, Flap, Mac, PortId};

use super::System;
use crate::limit::PortLog;

impl System {
    /// The name of a port; a number, if there is none with this id any more.
    pub(super) fn name_of(&self, id: PortId) -> String {
        let port = self.table.get(usize::from(id.0)).and_then(Option::as_ref);
        port.map_or_else(|| format!("#{id}"), |port| port.name.clone())
    }

    /// Logs that an address flaps to port `id`, at the expense of that port.
    pub(super) fn log_flap(&self, id: PortId, mac: Mac, vlan: u16, flap: Flap) {
        let Some(state) = self.ports.values().find(|state| state.port.id == id) else { return };
        let own = || PortLog::new(&state.spec.name, state.port.account.clone(), self.clock());
        let home = self.name_of(flap.home);
        let vlan = if vlan == 0 { String::new() } else { format!(" in VLAN {vlan}") };
        let then = match flap.blocked_s {
            0 => "see loop-guard=block".into(),
            s => format!("it stays at '{home}' for {s} s"),
        };
        let what = format_args!(
            "address {mac}{vlan} flaps between ports '{home}' and '{}': {} moves away from \
             '{home}' in {FLAP_WINDOW_S} s, caused by a loop or a forged address; {then}",
            state.spec.name, flap.moves
        );
        match state.log() {
            Some(log) => log.warn(what),
            None => own().warn(what),
        }
    }
}

/// An address that flaps, for `ctl fdb`.
pub(super) fn show(flap: Flap, home: &str) -> Value {
    json!({ "home": home, "moves": flap.moves, "blocked_s": flap.blocked_s })
}
