//! The control ring, event channels and multicast lists.

use std::time::Duration;

use ring::xen::{CtrlRequest, FrontCtrl, ctrl_type, tx_flag};

use super::guest::{CTRL, DATA, GREF, Guest, RX, SLOTS, TX};
use crate::{Attack, Error};

/// Asks these in turn, as many at a time as the ring takes.
fn ask(
    attack: &mut Attack<'_>,
    orders: &[(u16, [u32; 3])],
    mut also: impl FnMut(&Attack<'_>, &mut Guest),
) -> Result<(), Error> {
    while let Some(mut guest) = attack.vif()? {
        let mut ring = FrontCtrl::new(guest.area(CTRL));
        let mut n = 0_usize;
        while attack.on() && !guest.is_cut() {
            loop {
                let (kind, data) = orders[n % orders.len()];
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

/// Hash keys and tables that cannot be: sizes, offsets, queues that there are not.
pub fn hash_tables(attack: &mut Attack<'_>) -> Result<(), Error> {
    let page = GREF + DATA;
    let orders = [
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
    // A page that says queues that there are not.
    ask(attack, &orders, |_, guest| guest.area(DATA as usize).store_u32(0, u32::MAX))
}

/// Another hash with every frame.
pub fn hash_changes(attack: &mut Attack<'_>) -> Result<(), Error> {
    let page = GREF + DATA;
    let orders = [
        (ctrl_type::SET_HASH_ALGORITHM, [1, 0, 0]),
        (ctrl_type::SET_HASH_KEY, [page, 40, 0]),
        (ctrl_type::SET_HASH_ALGORITHM, [0, 0, 0]),
    ];
    ask(attack, &orders, |attack, guest| {
        guest.frame(DATA, attack.peer, attack.mac);
        if guest.answered(Duration::ZERO) {
            (0..32).for_each(|_| guest.request(GREF + DATA, 0, 0, 60));
            guest.push();
        }
    })
}

/// Lists of pages to be kept mapped that are no grants, of no queue, too long; and given back.
pub fn static_grants(attack: &mut Attack<'_>) -> Result<(), Error> {
    let list = GREF + DATA;
    let orders = [
        (ctrl_type::GET_GREF_MAPPING_SIZE, [0, 0, 0]),
        (ctrl_type::ADD_GREF_MAPPING, [0, list, 512]),
        (ctrl_type::ADD_GREF_MAPPING, [17, list, u32::MAX]),
        (ctrl_type::DEL_GREF_MAPPING, [0, list, 512]),
        (ctrl_type::ADD_GREF_MAPPING, [0, u32::MAX, 1]),
        (u16::MAX, [0; 3]),
    ];
    ask(attack, &orders, |_, guest| {
        // One that is good, for the first entry: mapped, and let go.
        let area = guest.area(DATA as usize);
        area.store_u32(0, GREF + DATA + 1);
        area.store_u32(4, 0);
    })
}

/// Events without anything to see, on every channel.
pub fn events(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.with_vifs(|attack, guest| {
        for channel in [TX, RX, CTRL] {
            (0..1000).for_each(|_| guest.channels[channel].notify());
        }
        attack.tally.attempts += 2999;
    })
}

/// What answers hold behind their status: a slot is read again after it was answered.
pub fn padding(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.with_vifs(|attack, guest| {
        guest.frame(DATA, attack.peer, attack.mac);
        (0..64).for_each(|_| guest.request(GREF + DATA, 0, 0, 60));
        guest.push();
        guest.answered(Duration::from_millis(20));
        // The bytes behind the status are what we wrote, and nothing of the switch's.
        let area = guest.area(TX);
        let slots =
            (0..64).map(|i| SLOTS + 12 * (guest.tx_prod.wrapping_sub(1 + i) % 256) as usize);
        let others = slots.filter(|slot| area.load_u32(*slot + 4) & 0xffff != 0);
        attack.tally.refused += others.count() as u64;
    })
}

/// More groups than a list takes, and groups that are none.
pub fn groups(attack: &mut Attack<'_>) -> Result<(), Error> {
    attack.with_vifs(|_, guest| {
        for n in 0..100_u8 {
            // Multicast groups are added, and others deleted that were never there.
            guest.request(GREF + DATA, 0, tx_flag::EXTRA_INFO, 60);
            let kind = if n % 5 == 4 { 3 } else { 2 };
            let first = if n % 7 == 0 { 2 } else { 1 };
            guest.extra([kind, 0, first, 0, 0x5e, 0, n, n]);
        }
        guest.push();
        guest.answered(Duration::from_millis(20));
    })
}
