//! Cases on the control ring, event channels and multicast lists.

use std::time::Duration;

use ring::xen::{CtrlRequest, FrontCtrl, ctrl_type, tx_flag};

use super::guest::{CTRL, DATA, GREF, Guest, RX, SLOTS, TX};
use crate::{Attack, Error};

/// Sends these requests in turn, as many at a time as the ring holds.
fn request(
    attack: &mut Attack<'_>,
    requests: &[(u16, [u32; 3])],
    mut also: impl FnMut(&Attack<'_>, &mut Guest),
) -> Result<(), Error> {
    while let Some(mut guest) = attack.vif()? {
        let mut ring = FrontCtrl::new(guest.area(CTRL));
        let mut n = 0_usize;
        while attack.on() && !guest.is_disconnected() {
            loop {
                let (kind, data) = requests[n % requests.len()];
                if !ring.put(CtrlRequest { id: n as u16, kind, data }) {
                    break;
                }
                n += 1;
                attack.tally.attempts += 1;
            }
            ring.publish();
            guest.channels[CTRL].notify();
            also(attack, &mut guest);
            while let Ok(Some(_)) = ring.take() {}
        }
    }
    Ok(())
}

/// Invalid hash keys and tables: sizes, offsets, unknown queues.
pub fn hash_tables(attack: &mut Attack<'_>) -> Result<(), Error> {
    let page = GREF + DATA;
    let requests = [
        (ctrl_type::SET_HASH_ALGORITHM, [1, 0, 0]),
        (ctrl_type::SET_HASH_FLAGS, [u32::MAX, 0, 0]),
        (ctrl_type::SET_HASH_MAPPING_SIZE, [128, 0, 0]),
        (ctrl_type::SET_HASH_MAPPING_SIZE, [u32::MAX, 0, 0]),
        (ctrl_type::SET_HASH_KEY, [page, u32::MAX, 0]),
        (ctrl_type::SET_HASH_KEY, [u32::MAX, 40, 0]),
        (ctrl_type::SET_HASH_MAPPING, [page, 1024, u32::MAX]),
        (ctrl_type::SET_HASH_MAPPING, [page, u32::MAX, 1]),
        (ctrl_type::SET_HASH_MAPPING, [page, 128, 0]),
    ];
    // A page with unknown queues.
    request(attack, &requests, |_, guest| guest.area(DATA as usize).store_u32(0, u32::MAX))
}

/// A different hash with every frame.
pub fn hash_changes(attack: &mut Attack<'_>) -> Result<(), Error> {
    let page = GREF + DATA;
    let requests = [
        (ctrl_type::SET_HASH_ALGORITHM, [1, 0, 0]),
        (ctrl_type::SET_HASH_KEY, [page, 40, 0]),
        (ctrl_type::SET_HASH_ALGORITHM, [0, 0, 0]),
    ];
    request(attack, &requests, |attack, guest| {
        guest.frame(DATA, attack.peer, attack.mac);
        if guest.answered(Duration::ZERO) {
            (0..32).for_each(|_| guest.request(GREF + DATA, 0, 0, 60));
            guest.push();
        }
    })
}

/// Invalid lists of static grants: bad grants, bad queue, too long; and their removal.
pub fn static_grants(attack: &mut Attack<'_>) -> Result<(), Error> {
    let list = GREF + DATA;
    let requests = [
        (ctrl_type::GET_GREF_MAPPING_SIZE, [0, 0, 0]),
        (ctrl_type::ADD_GREF_MAPPING, [0, list, 512]),
        (ctrl_type::ADD_GREF_MAPPING, [17, list, u32::MAX]),
        (ctrl_type::DEL_GREF_MAPPING, [0, list, 512]),
        (ctrl_type::ADD_GREF_MAPPING, [0, u32::MAX, 1]),
        (u16::MAX, [0; 3]),
    ];
    request(attack, &requests, |_, guest| {
        // A valid grant in the first entry: mapped and unmapped.
        let area = guest.area(DATA as usize);
        area.store_u32(0, GREF + DATA + 1);
        area.store_u32(4, 0);
    })
}

/// Events without new requests, on every channel.
pub fn events(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.with_vifs(|attack, guest| {
        for channel in [TX, RX, CTRL] {
            (0..1000).for_each(|_| guest.channels[channel].notify());
        }
        attack.tally.attempts += 2999;
    })
}

/// Padding of responses: a slot is read again after its response.
pub fn padding(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.with_vifs(|attack, guest| {
        guest.frame(DATA, attack.peer, attack.mac);
        (0..64).for_each(|_| guest.request(GREF + DATA, 0, 0, 60));
        guest.push();
        guest.answered(Duration::from_millis(20));
        // The bytes after the status are what we wrote, not data of the switch.
        let area = guest.area(TX);
        let slots =
            (0..64).map(|i| SLOTS + 12 * (guest.tx_prod.wrapping_sub(1 + i) % 256) as usize);
        let others = slots.filter(|slot| area.load_u32(*slot + 4) & 0xffff != 0);
        attack.tally.refused += others.count() as u64;
    })
}

/// More groups than the list holds, and invalid groups.
pub fn groups(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.with_vifs(|_, guest| {
        for n in 0..100_u8 {
            // Adds multicast groups, and deletes unknown ones.
            guest.request(GREF + DATA, 0, tx_flag::EXTRA_INFO, 60);
            let kind = if n % 5 == 4 { 3 } else { 2 };
            let first = if n % 7 == 0 { 2 } else { 1 };
            guest.extra([kind, 0, first, 0, 0x5e, 0, n, n]);
        }
        guest.push();
        guest.answered(Duration::from_millis(20));
    })
}
