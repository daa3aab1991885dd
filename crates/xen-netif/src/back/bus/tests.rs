use std::time::Duration;

use super::super::fake::{Counted, Fake, back, front};
use super::super::keys::Offer;
use super::*;

const OFFER: Offer = Offer { queues: 1, without: 0 };

fn id(domid: u16, devid: u32) -> VifId {
    VifId { domid, devid }
}

/// Serves the vifs found. Returns their ids.
fn serve(bus: &mut Bus<Counted>, store: &mut Fake, now: Instant) -> Vec<VifId> {
    let found = bus.take_found(store, now).unwrap();
    for id in &found {
        let vif = Handshake::new(*id, OFFER, Counted::default(), now);
        bus.add(store, *id, vif, now).unwrap();
    }
    found
}

#[test]
fn vifs_are_added_and_removed() {
    let (mut store, now) = (Fake::default(), Instant::now());
    let mut bus = Bus::default();
    bus.start(&mut store, now).unwrap();
    bus.set_auto(&mut store).unwrap();
    assert_eq!(serve(&mut bus, &mut store, now), []);
    store.make_vif(3, 1);
    store.make_vif(3, 0);
    store.make_vif(12, 0);
    // Invalid names are skipped.
    store.set("backend/vif/garbage/0/online", "1");
    store.set("backend/vif/70000/0/online", "1");
    assert_eq!(serve(&mut bus, &mut store, now), [], "no event");
    bus.on_events(&mut store, ["vifs"].into_iter(), now).unwrap();
    let later = now + SEARCH_INTERVAL;
    let mut found = serve(&mut bus, &mut store, later);
    found.sort_unstable();
    assert_eq!(found, [id(3, 0), id(3, 1), id(12, 0)]);
    assert_eq!(store.states, [2, 2, 2]);
    store.rm(&back(3, 0));
    store.set(&format!("{}/online", back(12, 0)), "0");
    store.set(&format!("{}/state", front(12, 0)), "6");
    bus.on_events(&mut store, ["b3/0", "f12/0", "vifs"].into_iter(), now).unwrap();
    assert_eq!(bus.finished(), [id(3, 0), id(12, 0)]);
    for gone in bus.finished() {
        bus.remove(&mut store, gone);
    }
    let later = later + SEARCH_INTERVAL;
    assert_eq!(serve(&mut bus, &mut store, later), [], "offline vifs are not added");
    assert_eq!(bus.vifs().map(|(id, _)| id).collect::<Vec<_>>(), [id(3, 1)]);
    let tokens: Vec<_> = store.watches.iter().map(|(_, token)| token.as_str()).collect();
    assert_eq!(tokens, ["f3/1", "release", "vifs", "b3/1"]);
}

/// A bus that serves one vif.
fn with_a_vif() -> (Bus<Counted>, Fake, Instant) {
    let (mut store, now) = (Fake::default(), Instant::now());
    store.make_vif(1, 0);
    let mut bus = Bus::default();
    bus.start(&mut store, now).unwrap();
    bus.set_auto(&mut store).unwrap();
    serve(&mut bus, &mut store, now);
    (bus, store, now)
}

#[test]
fn many_events_of_a_vif_cause_one_poll() {
    let (mut bus, mut store, now) = with_a_vif();
    let before = store.reads;
    let flood = ["f1/0", "b1/0"].into_iter().cycle().take(1000);
    bus.on_events(&mut store, flood, now).unwrap();
    assert!(store.reads - before < 10);
}

/// A guest changes its state: each of our writes reports a change of the directory.
#[test]
fn changes_of_served_vifs_cause_few_searches_and_a_new_vif_is_found_all_the_same() {
    let (mut bus, mut store, now) = with_a_vif();
    (2..50).for_each(|domid| store.make_vif(domid, 0));
    let now = now + SEARCH_INTERVAL;
    bus.on_events(&mut store, ["vifs"].into_iter(), now).unwrap();
    assert_eq!(serve(&mut bus, &mut store, now).len(), 48);
    let (reads, lists) = (store.reads, store.lists);
    for ms in 0..100 {
        let now = now + Duration::from_millis(ms);
        bus.on_events(&mut store, ["vifs"].into_iter(), now).unwrap();
        assert_eq!(bus.take_found(&mut store, now).unwrap(), []);
    }
    assert_eq!((store.reads, store.lists), (reads, lists), "not before the interval is over");
    store.make_vif(1, 1);
    let due = bus.due().unwrap();
    assert_eq!(due, now + SEARCH_INTERVAL);
    assert_eq!(bus.take_found(&mut store, due).unwrap(), [id(1, 1)]);
    assert_eq!(store.reads - reads, 1, "of the vif that is not served");
}

#[test]
fn a_destroyed_domain_causes_a_poll_of_all_vifs() {
    let (mut bus, mut store, now) = with_a_vif();
    store.rm("/local/domain/1");
    bus.on_events(&mut store, ["release"].into_iter(), now).unwrap();
    assert_eq!(store.states, [2, 5, 6]);
}

#[test]
fn unknown_tokens_are_ignored() {
    let (mut store, now) = (Fake::default(), Instant::now());
    let mut bus = Bus::<Counted>::default();
    bus.start(&mut store, now).unwrap();
    let tokens = ["", "b", "b1", "x1/0", "b1/", "f9/9", "b99999/0", "vifs"];
    bus.on_events(&mut store, tokens.into_iter(), now).unwrap();
    assert_eq!(bus.take_found(&mut store, now).unwrap(), []);
    bus.set_auto(&mut store).unwrap();
    store.make_vif(1, 0);
    assert_eq!(serve(&mut bus, &mut store, now), [id(1, 0)]);
    assert_eq!(bus.due(), None);
}

#[test]
fn changes_during_a_flood_are_read_in_time() {
    let (mut bus, mut store, now) = with_a_vif();
    for _ in 0..1000 {
        bus.on_events(&mut store, ["f1/0"].into_iter(), now).unwrap();
    }
    store.set(&format!("{}/state", front(1, 0)), "6");
    let due = bus.due().unwrap();
    bus.tick(&mut store, due - Duration::from_millis(1)).unwrap();
    assert_eq!(store.states, [2]);
    bus.tick(&mut store, due).unwrap();
    assert_eq!(store.states, [2, 5, 6]);
}

#[test]
fn a_refusal_for_one_vif_affects_no_other() {
    let (mut store, now) = (Fake::default(), Instant::now());
    let mut bus = Bus::default();
    bus.set_auto(&mut store).unwrap();
    (1..=3).for_each(|domid| store.make_vif(domid, 0));
    // The first vif, from its watches on.
    store.refuse = Some(back(1, 0));
    let ids = [id(1, 0), id(2, 0), id(3, 0)];
    for id in ids {
        let vif = Handshake::new(id, OFFER, Counted::default(), now);
        bus.add(&mut store, id, vif, now).unwrap();
    }
    assert_eq!(store.states, [2, 2]);
    for domid in 1..=3 {
        store.name_rings(&front(domid, 0));
        store.set(&format!("{}/state", front(domid, 0)), "4");
    }
    let step = Duration::from_millis(100);
    bus.on_events(&mut store, ["f1/0", "f2/0", "release"].into_iter(), now + step).unwrap();
    assert_eq!(store.states, [2, 2, 4, 4]);
    // Xenstore is reconnected: all watches are registered again, and it refuses again.
    bus.start(&mut store, now + 2 * step).unwrap();
    let held = |bus: &mut Bus<Counted>| ids.map(|id| bus.vif(id).unwrap().plug().held);
    assert_eq!(held(&mut bus), [0, 1, 1]);
    assert!(bus.finished().is_empty());
    store.refuse = None;
    let due = bus.due().unwrap();
    bus.tick(&mut store, due).unwrap();
    assert_eq!(
        (held(&mut bus), bus.vifs().filter(|(_, v)| v.due().is_some()).count()),
        ([1; 3], 0)
    );
    // Watches for all vifs may be refused, too: this is reported, and vifs are still started.
    store.watches.clear();
    store.refuse = Some("@releaseDomain".into());
    bus.start(&mut store, due).unwrap_err();
    assert_eq!(store.watches.len(), 6);
    // A disconnect affects all vifs.
    store.fail_after = Some(1);
    bus.start(&mut store, due).unwrap_err();
    assert!(
        store.watches.len() == 6 && bus.on_events(&mut store, ["f2/0"].into_iter(), due).is_err()
    );
}
