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
                    let former = std::mem::take(&mut tap.former).into_iter();
                    let delete = |vlans| (*place, Request::DeleteVlans { link, vlans });
                    wanted.extend(former.filter(|_| at.is_aware).map(delete));
                    let vlans = Vlans::of(&tap.member.vlan);
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
