//! A vif handed to another process.

use super::*;

/// The other process: it has the same xenstore.
fn next(bench: &Bench) -> Handshake<Counted> {
    Handshake::new(ID, OFFER, Counted::default(), bench.now)
}

/// Changes xenstore before the other process reads it, or while it serves the vif.
type Change = fn(&mut Bench);

/// Has another process take over. Returns whether it adopted the vif, and the states that it wrote.
fn take_over(bench: &mut Bench, change: Change) -> (bool, Vec<u32>) {
    let kept = bench.vif.export();
    let mut vif = next(bench);
    change(bench);
    bench.news();
    let written = bench.store.transactions.len();
    let adopted = vif.adopt(&mut bench.store, &kept).is_ok();
    let resumed = adopted && vif.resume(None).is_ok();
    assert_eq!(bench.store.transactions.len(), written, "nothing is written until then");
    bench.vif = vif;
    let mut states = if resumed { Vec::new() } else { bench.start() };
    states.extend(bench.poll());
    (resumed, states)
}

#[test]
fn vif_continues_from_every_state_without_a_write() {
    for state in State::BACK {
        let mut bench = in_state(state);
        let held = bench.held();
        let (text, written) = (bench.text(), bench.store.transactions.len());
        let watches = bench.store.watches.clone();
        bench.store.watches.clear();
        if state == State::Initialising {
            // Found a moment ago, and not read yet: nothing is known of it.
            continue;
        }
        assert_eq!(take_over(&mut bench, |_| {}), (true, vec![]), "{state}");
        assert_eq!(bench.store.transactions.len(), written, "{state}");
        assert_eq!((bench.text(), bench.held()), (text, held), "{state}");
        assert_eq!(bench.store.watches, watches, "{state}");
        let Counted { resumes, connects, .. } = bench.vif.plug;
        assert_eq!((resumes, connects), (held, 0), "{state}");
    }
}

#[test]
fn later_changes_are_followed() {
    let mut bench = Bench::connected();
    assert_eq!(take_over(&mut bench, |_| {}), (true, vec![]));
    // Limits are those of the toolstack from the start.
    assert!(bench.vif.plug().began.is_some());
    bench.toolstack("rate", "125000,50000");
    assert!(bench.vif.plug().settings.last().unwrap().rate.is_some());
    assert_eq!(bench.front(7), [8]);
    assert_eq!(take_over(&mut bench, |_| {}), (true, vec![]));
    assert_eq!(bench.front(4), [4]);
    assert_eq!(bench.front(5), [5]);
    assert_eq!((bench.front(6), bench.held()), (vec![6], 0));
}

#[test]
fn vif_that_is_not_as_it_was_starts_again() {
    let keys: [(Change, &[u32], usize); 6] = [
        // The front end restarted on other rings.
        (|b| b.store.set(&format!("{}/tx-ring-ref", front(1, 0)), "77"), &[2, 4], 1),
        (|b| b.store.set(&format!("{}/event-channel", front(1, 0)), "6"), &[2, 4], 1),
        // What it has is invalid.
        (|b| b.store.rm(&format!("{}/rx-ring-ref", front(1, 0))), &[2, 5], 0),
        // Another back end served it.
        (|b| b.store.set(&format!("{}/state", back(1, 0)), "2"), &[2, 4], 1),
        // A toolstack changed the domain, or removed the vif.
        (|b| b.store.set(&format!("{}/frontend-id", back(1, 0)), "2"), &[], 0),
        (|b| b.store.rm(&back(1, 0)), &[], 0),
    ];
    for (i, (change, states, held)) in keys.into_iter().enumerate() {
        let mut bench = Bench::connected();
        assert_eq!(take_over(&mut bench, change), (false, states.to_vec()), "{i}");
        assert_eq!(bench.held(), held, "{i}");
        assert_eq!((bench.vif.plug.resumes, bench.vif.plug.adopted), (0, 0), "{i}");
    }
}

#[test]
fn front_end_that_closes_meanwhile_is_closed() {
    for (state, want) in [("5", vec![5]), ("6", vec![5, 6]), ("1", vec![5, 6, 2])] {
        let mut bench = Bench::connected();
        let kept = bench.vif.export();
        let mut vif = next(&bench);
        bench.store.set(&format!("{}/state", front(1, 0)), state);
        bench.news();
        vif.adopt(&mut bench.store, &kept).unwrap();
        vif.resume(None).unwrap();
        bench.vif = vif;
        assert_eq!((bench.poll(), bench.held()), (want, 0), "{state}");
    }
}

#[test]
fn rings_that_cannot_be_mapped_or_attached_are_connected_again() {
    let refused = || Some(Refused::invalid("bad grant".into()));
    for at_resume in [false, true] {
        let mut bench = Bench::connected();
        let kept = bench.vif.export();
        let mut vif = next(&bench);
        if at_resume {
            vif.adopt(&mut bench.store, &kept).unwrap();
            vif.plug().refuses = refused();
            assert!(vif.resume(None).unwrap_err().0.contains("bad grant"));
        } else {
            vif.plug().refuses = refused();
            assert!(vif.adopt(&mut bench.store, &kept).unwrap_err().0.contains("bad grant"));
        }
        assert_eq!((vif.plug.held, vif.plug.adopted), (0, 0));
        vif.plug().refuses = None;
        bench.vif = vif;
        assert_eq!(bench.start(), [2, 4]);
        assert_eq!(bench.held(), 1);
    }
}

#[test]
fn stopped_front_end_stays_stopped() {
    let mut bench = Bench::connected();
    bench.vif.fault(&mut bench.store, "req_prod", bench.now).unwrap();
    assert_eq!(take_over(&mut bench, |_| {}), (true, vec![]));
    assert!(bench.text().starts_with("stopped: "), "{}", bench.text());
    assert_eq!(bench.held(), 0);
    assert_eq!(bench.front(1), [5, 6, 2]);
    assert_eq!(bench.front(4), [4]);
}

/// A vif that another process served when it panicked, held down for a minute.
fn held_down() -> (Bench, Instant) {
    let mut bench = Bench::connected();
    let until = bench.now + Duration::from_secs(60);
    let mut vif = next(&bench);
    vif.hold_down(until);
    bench.vif = vif;
    (bench, until)
}

#[test]
fn vif_that_is_held_down_has_no_rings_and_is_not_read_until_then() {
    let (mut bench, until) = held_down();
    assert_eq!(bench.vif.plug.released, 1);
    let (reads, watches) = (bench.store.reads, bench.store.watches.clone());
    assert_eq!(bench.start(), [0; 0]);
    assert_eq!((bench.key("carrier"), bench.key("state")), (Some("0"), Some("4")));
    // Whatever the guest writes.
    for state in [5, 6, 1, 4] {
        assert_eq!((bench.front(state), bench.vif.due()), (vec![], Some(until)));
    }
    assert_eq!((bench.store.reads, bench.held(), bench.vif.plug.connects), (reads, 0, 0));
    assert_eq!(bench.store.watches, watches);
    assert_eq!(bench.text(), "held down after a panic of the switch");
    assert!(!bench.vif.is_finished());
    // Then it is set up again, as after a restart.
    bench.now = until;
    assert_eq!((bench.poll(), bench.key("carrier")), (vec![2, 4], Some("1")));
    assert_eq!((bench.held(), bench.text()), (1, "connected".to_string()));
    assert_eq!(bench.front(5), [5]);
}

#[test]
fn vif_that_is_removed_while_it_is_held_down_is_finished_then() {
    let (mut bench, until) = held_down();
    bench.store.rm(&back(1, 0));
    assert_eq!((bench.start(), bench.vif.is_finished()), (vec![], false));
    bench.now = until;
    assert_eq!((bench.poll(), bench.vif.is_finished()), (vec![], true));
}

#[test]
fn loss_of_xenstore_while_it_is_read_leaves_no_resources_held() {
    let mut failures = 0;
    for after in 1.. {
        let mut bench = Bench::connected();
        let kept = bench.vif.export();
        let mut vif = next(&bench);
        bench.store.fail_after = Some(after);
        if vif.adopt(&mut bench.store, &kept).is_ok() {
            break;
        }
        failures += 1;
        assert_eq!((vif.plug.held, vif.plug.adopted), (0, 0), "{after}");
        bench.store.fail_after = None;
        bench.vif = vif;
        bench.news();
        assert_eq!(bench.start(), [2, 4], "{after}");
    }
    assert!(failures > 10, "{failures}");
}
