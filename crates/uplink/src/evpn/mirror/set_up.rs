//! Settings of TAPs in their bridges.

use super::super::links::Kind;
use super::super::wire::Request;
use super::{Flight, Mirror, Vlans};

impl Mirror {
    /// Puts TAPs into their bridges, and sets what passes there.
    pub(super) fn set_up(&mut self, send: &mut dyn FnMut(u32, &Request)) {
        let mut wanted = Vec::new();
        for (place, tap) in self.taps.iter_mut().filter(|(_, tap)| !tap.is_set_up) {
            let links = &self.table.links;
            let link = links.named(&tap.member.interface);
            let bridge = links.named(&tap.member.bridge);
            let bridge = bridge.filter(|link| matches!(link.kind, Kind::Bridge { .. }));
            let (Some(link), Some(bridge)) = (link, bridge) else { continue };
            match tap.at {
                None if link.master.is_none() => {
                    let (link, bridge) = (link.index, bridge.index);
                    wanted.push((*place, Request::Join { link, bridge }));
                }
                None => continue,
                Some(at) => {
                    let link = at.link;
                    if self.table.links.get(link).is_some_and(|l| l.learns == Some(true)) {
                        wanted.push((*place, Request::StopLearning { link }));
                    }
                    let vlans = Vlans::of(&tap.member.vlan);
                    let former = std::mem::take(&mut tap.former).into_iter();
                    let leaving = foreign(&vlans, at.pvid).into_iter().chain(former);
                    let delete = |vlans| (*place, Request::DeleteVlans { link, vlans });
                    wanted.extend(leaving.filter(|_| at.is_aware).map(delete));
                    if at.is_aware && vlans != Vlans::default() {
                        wanted.push((*place, Request::AddVlans { link, vlans }));
                    }
                }
            }
            tap.is_set_up = true;
        }
        for (place, request) in wanted {
            self.request(send, &request, Flight::Setting(place));
        }
    }
}

/// The bridge's default VLAN, if it is not the port's. The kernel gives it to each interface that
/// joins, untagged: its frames would enter the port's VLAN of untagged frames.
fn foreign(own: &Vlans, pvid: u16) -> Option<Vlans> {
    let is_foreign = *own != Vlans::default() && pvid != 0 && own.untagged != Some(pvid);
    is_foreign.then(|| Vlans { tagged: Vec::new(), untagged: Some(pvid) })
}
