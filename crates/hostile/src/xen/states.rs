//! Cases on xenstore: states, keys, watches and transactions.

use std::time::{Duration, Instant};

use xen_netif::store::Store;

use super::guest::{DATA, FRONT, GREF, Guest, REQ_PROD};
use crate::{Attack, Error};

/// Connections to xenstore of one domain.
const CONNECTIONS: usize = 64;
/// Watches of each connection.
const WATCHES: usize = 128;
/// Longest time in which they are made.
const SETUP_MAX: Duration = Duration::from_secs(10);
/// Nodes of one transaction: a domain may own a thousand.
const NODES: usize = 900;

/// Every state after every other, faster than the peer reads them, and then slowly.
pub fn states(attack: &mut Attack<'_>) -> Result<(), Error> {
    let states = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "", "four"];
    while let Some(guest) = attack.domain()? {
        for from in states {
            for to in states {
                if attack.on() {
                    guest.set("state", from);
                    guest.set("state", to);
                    attack.tally.attempts += 1;
                }
            }
            attack.rest(Duration::from_millis(2));
        }
    }
    Ok(())
}

/// Watched keys, rewritten in a loop.
pub fn watched_keys(attack: &mut Attack<'_>) -> Result<(), Error> {
    let mut n = 0_u64;
    attack.with_vifs(|_, guest| {
        for _ in 0..50 {
            n += 1;
            guest.set("feature-sg", n);
            guest.set("disconnect", n % 2);
        }
        guest.set("disconnect", 0);
        guest.wait_back(&["4"]);
    })
}

/// Keys without a valid page, channel or number.
pub fn bad_keys(attack: &mut Attack<'_>) -> Result<(), Error> {
    let keys: [&[(&str, &str)]; 12] = [
        &[("tx-ring-ref", "0")],
        &[("rx-ring-ref", "4294967295")],
        &[("ctrl-ring-ref", "72")],
        &[("event-channel-rx", "77")],
        &[("event-channel-tx", "2")],
        &[("event-channel-ctrl", "1")],
        &[("tx-ring-ref", "12")],
        &[("multi-queue-num-queues", "2")],
        &[("multi-queue-num-queues", "0")],
        &[("multi-queue-num-queues", "17")],
        &[("multi-queue-num-queues", "-1")],
        // All three rings in one page.
        &[("rx-ring-ref", "8"), ("ctrl-ring-ref", "8")],
    ];
    for wrong in keys.iter().cycle() {
        let Some(mut guest) = attack.domain()? else { return Ok(()) };
        guest.area(DATA as usize).store_u32(REQ_PROD, 1000);
        guest.offer_rings();
        wrong.iter().for_each(|(key, value)| {
            guest.set(key, value);
        });
        attack.tally.attempts += 1;
        if guest.connect() {
            use_it(&mut guest);
        } else {
            attack.tally.refused += 1;
        }
    }
    Ok(())
}

fn use_it(guest: &mut Guest) {
    for n in 0..5 {
        (0..20).for_each(|i| guest.request(GREF + (i + n) % 3, 0, 0, 60));
        guest.push();
        guest.channels.iter().for_each(super::guest::Channel::notify);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Vifs that connect and disconnect during traffic.
pub fn come_and_go(attack: &mut Attack<'_>) -> Result<(), Error> {
    while let Some(mut guest) = attack.vif()? {
        guest.frame(DATA, attack.peer, attack.mac);
        (0..200).for_each(|_| guest.request(GREF + DATA, 0, 0, 60));
        guest.push();
        attack.tally.attempts += 1;
        match attack.tally.attempts % 3 {
            // Closed in order, closed at once, and removed without a state.
            0 => {
                guest.set("state", 5);
                guest.set("state", 6);
                guest.wait_back(&["6"]);
            }
            1 => {
                guest.set("state", 6);
            }
            _ => {}
        }
    }
    Ok(())
}

/// Opens as many connections to xenstore as are allowed, each with all its watches, and commits
/// transactions that change as many nodes as a domain may have. A store that limits the CPU time of
/// a domain replies ever later: connections that are not ready in [`SETUP_MAX`] do without watches,
/// and the last transaction writes only the nodes it can until the end; the first one has
/// [`SETUP_MAX`] more.
pub fn commits(attack: &mut Attack<'_>) -> Result<(), Error> {
    let path = attack.target().join("xenstored");
    while let Some(_guest) = attack.domain()? {
        let from = Instant::now();
        let watching = |store: &Store| {
            let mut tokens = (0..WATCHES).take_while(|_| from.elapsed() < SETUP_MAX);
            let _refused = tokens.find(|n| store.watch(FRONT, &n.to_string()).is_err());
        };
        let connect = |_| Store::connect(&path).ok().inspect(watching);
        let stores: Vec<Store> = (0..CONNECTIONS - 4).filter_map(connect).collect();
        attack.exclude_setup(from);
        let Some(store) = stores.first() else { continue };
        while attack.on() {
            attack.tally.attempts += 1;
            let is_first = attack.tally.attempts == 1;
            let done = store.transaction(|transaction| {
                let on = || attack.on() || is_first && from.elapsed() < 2 * SETUP_MAX;
                let mut nodes = (0..NODES).take_while(|_| on());
                nodes.try_for_each(|n| transaction.write(&format!("{FRONT}/n{n}"), "x"))?;
                Ok(())
            });
            if done.is_err() {
                attack.tally.refused += 1;
                break;
            }
        }
    }
    Ok(())
}
