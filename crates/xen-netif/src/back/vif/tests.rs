mod handover;

use super::super::fake::{Counted, Fake, back, front};
use super::*;

const ID: VifId = VifId { domid: 1, devid: 0 };
const OFFER: Offer = Offer { queues: 4, without: 0 };

/// A vif, its xenstore, and a clock moved by tests.
struct Bench {
    store: Fake,
    vif: Handshake<Counted>,
    now: Instant,
    /// Number of states already read by the test.
    read: usize,
}

impl Bench {
    fn new() -> Self {
        Self::offering(OFFER)
    }

    fn offering(offer: Offer) -> Self {
        let now = Instant::now();
        let mut store = Fake::default();
        store.make_vif(1, 0);
        let vif = Handshake::new(ID, offer, Counted::default(), now);
        Self { store, vif, now, read: 0 }
    }

    fn connected() -> Self {
        let mut bench = Self::new();
        bench.start();
        bench.store.name_rings(&front(1, 0));
        assert_eq!(bench.front(4), [4]);
        assert_eq!(bench.held(), 2 - 1);
        bench
    }

    fn start(&mut self) -> Vec<u32> {
        self.vif.start(&mut self.store, self.now).unwrap();
        self.news()
    }

    fn poll(&mut self) -> Vec<u32> {
        self.now += Duration::from_secs(1);
        self.vif.poll(&mut self.store, self.now).unwrap();
        self.news()
    }

    fn news(&mut self) -> Vec<u32> {
        let news = self.store.states[self.read..].to_vec();
        self.read = self.store.states.len();
        news
    }

    /// The front end writes a state. Returns the states that the back end writes.
    fn front(&mut self, state: u32) -> Vec<u32> {
        self.store.set(&format!("{}/state", front(1, 0)), &state.to_string());
        self.poll()
    }

    fn toolstack(&mut self, key: &str, value: &str) -> Vec<u32> {
        self.store.set(&format!("{}/{key}", back(1, 0)), value);
        self.poll()
    }

    fn held(&mut self) -> usize {
        self.vif.plug().held
    }

    fn key(&self, key: &str) -> Option<&str> {
        self.store.get(&format!("{}/{key}", back(1, 0)))
    }

    fn error(&self) -> Option<&str> {
        self.store.get("error/backend/vif/1/0/error")
    }

    fn text(&self) -> String {
        self.vif.status().text
    }
}

/// A bench whose back end is in `state`, reached by valid transitions.
fn in_state(state: State) -> Bench {
    let mut bench = Bench::new();
    bench.store.name_rings(&front(1, 0));
    let ways: &[u32] = match state {
        State::Initialising => return bench,
        State::InitWait => &[1],
        State::Connected => &[1, 4],
        State::Closing => &[1, 4, 5],
        _ => &[1, 4, 6],
    };
    for front in ways {
        bench.front(*front);
    }
    assert_eq!(bench.vif.state, state);
    bench
}

#[test]
fn every_pair_of_states_takes_the_shortest_path() {
    // States written, by the front end's state (rows) and the back end's (columns).
    let table: [(u32, [&[u32]; 5]); 9] = [
        (0, [&[6], &[5, 6], &[5, 6], &[6], &[]]),
        (1, [&[2], &[], &[5, 6, 2], &[6, 2], &[2]]),
        (2, [&[2], &[], &[], &[], &[]]),
        (3, [&[2, 4], &[4], &[], &[6, 2, 4], &[2, 4]]),
        (4, [&[2, 4], &[4], &[], &[6, 2, 4], &[2, 4]]),
        (5, [&[2, 5], &[5], &[5], &[], &[5]]),
        (6, [&[6], &[5, 6], &[5, 6], &[6], &[]]),
        (7, [&[2], &[], &[8], &[], &[]]),
        (8, [&[2], &[], &[], &[], &[]]),
    ];
    for (front, row) in table {
        for (state, want) in State::BACK.into_iter().zip(row) {
            let mut bench = in_state(state);
            bench.news();
            assert_eq!(bench.front(front), want, "front {front}, back {state}");
            let connected = bench.vif.state == State::Connected;
            assert_eq!(bench.held(), usize::from(connected), "front {front}, back {state}");
            let written = want.last().is_none_or(|s| *s == bench.vif.state.number() || *s == 8);
            assert!(written, "front {front}, back {state}: at {}", bench.vif.state);
            // It has arrived: another poll writes nothing.
            assert_eq!(bench.poll(), [0; 0], "front {front}, back {state}");
        }
    }
}

#[test]
fn the_offer_is_written_in_one_transaction_with_the_state() {
    let mut bench = Bench::new();
    assert_eq!(bench.start(), [2]);
    let [keys] = bench.store.transactions.as_slice() else { panic!("one transaction") };
    for key in ["feature-sg", "feature-rx-copy", "multi-queue-max-queues", "state"] {
        assert!(keys.iter().any(|k| k == key), "{key}");
    }
    assert_eq!(bench.key("feature-rx-flip"), Some("0"));
    assert_eq!(bench.text(), "waiting for the guest's driver");
    let watches: Vec<_> = bench.store.watches.iter().map(|(path, _)| path.clone()).collect();
    assert_eq!(watches, [front(1, 0), back(1, 0)]);
}

#[test]
fn connected_is_reported_without_a_hotplug_script() {
    let bench = Bench::connected();
    assert_eq!(bench.key("hotplug-status"), Some("connected"));
    assert_eq!(bench.key("carrier"), Some("1"));
    let status = bench.vif.status();
    assert_eq!((status.text.as_str(), status.queues), ("connected", 1));
    assert_eq!(status.features, ["sg", "rx-notify"]);
    assert_eq!(bench.vif.plug.settings.len(), 1);
}

#[test]
fn a_failed_hotplug_script_is_waited_for() {
    let mut bench = Bench::new();
    bench.store.name_rings(&front(1, 0));
    bench.toolstack("hotplug-status", "error");
    bench.toolstack("hotplug-error", "no bridge");
    assert_eq!(bench.front(4), [0; 0]);
    assert_eq!(bench.text(), "waiting: the hotplug script failed");
    assert_eq!(bench.vif.status().error.unwrap(), "hotplug script: no bridge");
    assert_eq!(bench.held(), 0);
    assert_eq!(bench.toolstack("hotplug-status", "connected"), [4]);
    assert_eq!((bench.text().as_str(), bench.vif.status().error), ("connected", None));
}

#[test]
fn a_guest_reboots_and_reconnects() {
    let mut bench = Bench::connected();
    for _ in 0..3 {
        assert_eq!(bench.front(5), [5]);
        assert_eq!(bench.held(), 0);
        assert_eq!(bench.key("carrier"), Some("0"));
        assert_eq!(bench.front(6), [6]);
        assert!(!bench.vif.is_finished(), "online: it may reconnect");
        assert_eq!(bench.text(), "closed; the guest's driver may reconnect");
        assert_eq!(bench.front(1), [2]);
        assert_eq!(bench.front(4), [4]);
        assert_eq!(bench.held(), 1);
    }
}

#[test]
fn a_kexec_takes_its_front_end_through_the_states() {
    // The new kernel waits for each reply (xenbus_reset_frontend).
    let mut bench = Bench::connected();
    let answers: Vec<_> = [5, 6, 1].into_iter().flat_map(|s| bench.front(s)).collect();
    assert_eq!(answers, [5, 6, 2]);
    assert_eq!((bench.front(4), bench.held()), (vec![4], 1));
}

#[test]
fn a_guest_that_resumes_starts_from_initialising_at_once() {
    let mut bench = Bench::connected();
    // Linux writes Initialising while we are Connected; each state in between is written.
    assert_eq!(bench.front(1), [5, 6, 2]);
    assert_eq!(bench.held(), 0);
    bench.store.set(&format!("{}/tx-ring-ref", front(1, 0)), "77");
    assert_eq!(bench.front(4), [4]);
    assert_eq!(bench.vif.plugged.as_ref().unwrap().queues[0].tx_ref, 77);
    assert_eq!(bench.vif.plug.connects, 2);
}

#[test]
fn a_suspend_that_is_cancelled_changes_nothing() {
    let mut bench = Bench::connected();
    assert_eq!(bench.poll(), [0; 0]);
    assert_eq!((bench.held(), bench.vif.plug.connects), (1, 1));
}

#[test]
fn a_restored_guest_has_a_new_directory() {
    let mut bench = Bench::connected();
    let other = "/local/domain/1/device/vif/0b";
    bench.store.set(&format!("{other}/state"), "1");
    assert_eq!(bench.toolstack("frontend", other), [2]);
    assert_eq!(bench.held(), 0);
    let fronts: Vec<_> = bench.store.watches.iter().filter(|(_, t)| t == "f1/0").collect();
    assert_eq!(fronts.len(), 1);
    assert_eq!(fronts[0].0, other);
}

#[test]
fn windows_closes_first_and_then_starts() {
    // xenvif finds a back end used by its emulated device's driver, or by itself before.
    let mut bench = Bench::connected();
    assert_eq!(bench.front(5), [5]);
    assert_eq!(bench.front(6), [6]);
    assert_eq!(bench.front(1), [2]);
    assert_eq!(bench.front(4), [4]);
    // And one that was only offered: also Closing, Closed, Initialising.
    let mut bench = Bench::new();
    assert_eq!(bench.start(), [2]);
    assert_eq!((bench.front(5), bench.front(6), bench.front(1)), (vec![5], vec![6], vec![2]));
}

#[test]
fn mirage_goes_straight_to_closed() {
    let mut bench = Bench::connected();
    assert_eq!(bench.front(6), [5, 6]);
    assert_eq!(bench.held(), 0);
    assert_eq!((bench.front(1), bench.front(4)), (vec![2], vec![4]));
}

#[test]
fn initialised_connects_once_the_rings_are_named() {
    let mut bench = Bench::new();
    assert_eq!(bench.front(3), [2]);
    assert_eq!(bench.poll(), [0; 0], "no rings, no error");
    assert_eq!(bench.error(), None);
    bench.store.name_rings(&front(1, 0));
    assert_eq!(bench.poll(), [4]);
    assert_eq!(bench.front(4), [0; 0]);
    assert_eq!(bench.vif.plug.connects, 1);
}

#[test]
fn reconfiguring_gets_one_reply() {
    let mut bench = Bench::connected();
    assert_eq!(bench.front(7), [8]);
    assert_eq!(bench.poll(), [0; 0]);
    assert_eq!(bench.front(4), [4]);
    assert_eq!((bench.held(), bench.vif.plug.connects), (1, 1), "the rings stay");
}

#[test]
fn a_toolstack_detaches_a_running_driver() {
    let mut bench = Bench::connected();
    bench.store.set(&format!("{}/online", back(1, 0)), "0");
    assert_eq!(bench.toolstack("state", "5"), [0; 0], "the guest closes first");
    assert_eq!(bench.held(), 1);
    assert_eq!(bench.front(5), [5]);
    assert!(!bench.vif.is_finished());
    assert_eq!(bench.front(6), [6]);
    assert!(bench.vif.is_finished());
    assert_eq!(bench.text(), "closed, being removed by the toolstack");
}

#[test]
fn a_toolstack_detaches_without_a_driver() {
    let mut bench = Bench::new();
    bench.start();
    bench.store.set(&format!("{}/online", back(1, 0)), "0");
    assert_eq!(bench.toolstack("state", "5"), [5, 6]);
    assert!(bench.vif.is_finished());
}

#[test]
fn removed_directories() {
    // The guest's: destroyed.
    let mut bench = Bench::connected();
    bench.store.rm(&front(1, 0));
    assert_eq!(bench.poll(), [5, 6]);
    assert_eq!(bench.held(), 0);
    // Ours: forced removal. No write may create it again.
    let mut bench = Bench::connected();
    bench.store.rm(&back(1, 0));
    assert_eq!(bench.poll(), [0; 0]);
    assert_eq!(bench.held(), 0);
    assert!(bench.vif.is_finished());
    assert!(bench.store.nodes.keys().all(|path| !path.starts_with("backend")));
    assert_eq!(bench.store.watches.len(), 1, "ours, for the next vif");
    assert_eq!(bench.text(), "waiting for the toolstack to create vif 1/0");
    // And the next vif.
    bench.store.make_vif(1, 0);
    assert_eq!(bench.poll(), [2]);
    assert!(!bench.vif.is_finished());
}

#[test]
fn a_directory_removed_during_a_write_is_not_created_again() {
    for state in [State::Initialising, State::InitWait, State::Connected] {
        let mut bench = in_state(state);
        let to = if state == State::Connected { 5 } else { 4 };
        bench.store.race = Some(back(1, 0));
        bench.news();
        assert_eq!(bench.front(to), [0; 0], "{state}");
        assert_eq!(bench.held(), 0, "{state}");
        assert!(bench.store.nodes.keys().all(|path| !path.starts_with("backend")), "{state}");
    }
}

#[test]
fn bad_keys_are_reported_once_and_retried_when_the_front_restarts() {
    let mut bench = Bench::new();
    bench.start();
    assert_eq!(bench.front(4), [5]);
    let error = bench.error().unwrap().to_string();
    assert!(error.starts_with("95 ") && error.contains("request-rx-copy"), "{error}");
    assert_eq!(bench.text(), "rejected; waiting for the guest's driver to close");
    bench.store.name_rings(&front(1, 0));
    assert_eq!(bench.poll(), [0; 0], "not while it stays Connected");
    assert_eq!((bench.front(6), bench.front(1)), (vec![6], vec![2]));
    assert_eq!(bench.front(4), [4]);
    assert_eq!(bench.error(), None, "a resolved error is removed");
}

#[test]
fn rings_that_cannot_be_mapped_leave_no_resources_held() {
    let mut bench = Bench::new();
    bench.store.name_rings(&front(1, 0));
    bench.vif.plug().refuses = Some(Refused::invalid("queue 0: tx-ring-ref 8: bad grant".into()));
    assert_eq!(bench.front(4), [2, 5]);
    assert_eq!(bench.held(), 0);
    assert_eq!(bench.error(), Some("22 queue 0: tx-ring-ref 8: bad grant"));
    bench.vif.plug().refuses = None;
    assert_eq!((bench.front(1), bench.front(4)), (vec![6, 2], vec![4]));
}

#[test]
fn a_guest_that_violates_the_protocol_keeps_its_state_until_it_closes() {
    let mut bench = Bench::connected();
    bench.vif.fault(&mut bench.store, "tx: req_prod is beyond the ring", bench.now).unwrap();
    assert_eq!(bench.held(), 0);
    assert_eq!((bench.key("state"), bench.key("carrier")), (Some("4"), Some("0")));
    assert_eq!(bench.error(), Some("71 tx: req_prod is beyond the ring"));
    assert!(bench.text().starts_with("stopped: the guest's driver violated"));
    assert_eq!(bench.poll(), [0; 0]);
    // Later reports find it stopped.
    bench.vif.fault(&mut bench.store, "again", bench.now).unwrap();
    assert_eq!(bench.error(), Some("71 tx: req_prod is beyond the ring"));
    assert_eq!((bench.front(5), bench.front(6), bench.front(1)), (vec![5], vec![6], vec![2]));
    assert_eq!((bench.front(4), bench.held()), (vec![4], 1));
    assert_eq!(bench.text(), "connected");
}

#[test]
fn settings_follow_their_keys() {
    let mut bench = Bench::connected();
    let last = |bench: &Bench| *bench.vif.plug.settings.last().unwrap();
    bench.toolstack("rate", "1000,50000");
    assert_eq!(last(&bench).rate, Some(Rate { bytes: 1000, usecs: 50_000 }));
    bench.toolstack("rate", "garbage");
    assert_eq!(last(&bench).rate, None);
    bench.toolstack("mtu", "9000");
    assert_eq!(last(&bench).mtu, Some(9000));
    bench.store.set(&format!("{}/request-multicast-control", front(1, 0)), "1");
    bench.poll();
    assert!(last(&bench).multicast_control);
    bench.store.set(&format!("{}/disconnect", front(1, 0)), "1");
    bench.poll();
    assert!(!last(&bench).link);
    assert_eq!(bench.key("carrier"), Some("0"));
    assert_eq!(bench.text(), "connected, link set down by the toolstack");
    bench.store.set(&format!("{}/disconnect", front(1, 0)), "0");
    bench.poll();
    assert_eq!(bench.key("carrier"), Some("1"));
    let count = bench.vif.plug.settings.len();
    bench.poll();
    assert_eq!(bench.vif.plug.settings.len(), count, "set on changes only");
}

/// A ring served before its settings are known would have no limits, each time the guest
/// reconnects.
#[test]
fn settings_are_set_before_the_rings() {
    let mut bench = Bench::new();
    bench.start();
    for (key, value) in [("rate", "1000,50000"), ("mtu", "1400")] {
        bench.store.set(&format!("{}/{key}", back(1, 0)), value);
    }
    for key in ["disconnect", "request-multicast-control"] {
        bench.store.set(&format!("{}/{key}", front(1, 0)), "1");
    }
    bench.store.name_rings(&front(1, 0));
    let want = Settings {
        rate: Some(Rate { bytes: 1000, usecs: 50_000 }),
        mtu: Some(1400),
        multicast_control: true,
        link: false,
    };
    for _ in 0..2 {
        assert_eq!(bench.front(4), [4]);
        assert_eq!(bench.vif.plug.began, Some(want));
        assert_eq!(bench.key("carrier"), Some("0"));
        bench.vif.plug.began = None;
        bench.front(1);
    }
    bench.store.rm(&format!("{}/disconnect", front(1, 0)));
    assert_eq!(bench.front(4), [4]);
    assert_eq!(bench.vif.plug.began, Some(Settings { link: true, ..want }));
}

#[test]
fn static_multicast_control_is_sampled_at_connected() {
    let without = keys::without("dynamic-multicast-control").unwrap();
    let mut bench = Bench::offering(Offer { without, ..OFFER });
    bench.store.name_rings(&front(1, 0));
    let key = format!("{}/request-multicast-control", front(1, 0));
    bench.store.set(&key, "1");
    assert_eq!(bench.front(4), [2, 4]);
    bench.store.set(&key, "0");
    bench.poll();
    assert!(bench.vif.settings.unwrap().multicast_control);
}

#[test]
fn a_vif_served_by_another_back_end_is_not_touched() {
    let mut bench = Bench::new();
    bench.vif.plug().claimed_by = Some("the kernel's xen-netback serves it".into());
    assert_eq!(bench.start(), [0; 0]);
    assert_eq!(bench.front(4), [0; 0]);
    assert_eq!(bench.text(), "not served: the kernel's xen-netback serves it");
    assert!(bench.store.transactions.is_empty());
    bench.vif.plug().claimed_by = None;
    assert_eq!(bench.front(1), [2]);
}

#[test]
fn vif_whose_interface_is_missing_waits_for_it_and_reports_why() {
    let mut bench = Bench::new();
    bench.store.name_rings(&front(1, 0));
    let missing = |why: &str| Some(Interface::Missing(why.into()));
    bench.vif.plug().interface = missing("`vif1.0` exists already");
    assert_eq!(bench.start(), [0; 0]);
    assert_eq!(bench.front(4), [0; 0]);
    assert_eq!(bench.error(), Some("19 `vif1.0` exists already"));
    assert_eq!(bench.vif.status().error.as_deref(), Some("`vif1.0` exists already"));
    bench.vif.plug().interface = missing("no permission");
    assert_eq!(bench.poll(), [0; 0]);
    assert_eq!(bench.error(), Some("19 no permission"));
    bench.vif.plug().interface = Some(Interface::Exists);
    // The toolstack waits for InitWait, then runs its script.
    assert_eq!(bench.poll(), [2]);
    assert_eq!((bench.error(), bench.vif.status().error), (None, None));
    assert_eq!(bench.toolstack("hotplug-status", "connected"), [4]);
}

#[test]
fn vif_whose_interface_is_missing_can_be_detached() {
    let mut bench = Bench::new();
    bench.vif.plug().interface = Some(Interface::Missing("no".into()));
    assert_eq!(bench.start(), [0; 0]);
    assert_eq!(bench.toolstack("online", "0"), [0; 0]);
    assert!(!bench.vif.is_finished());
    assert_eq!(bench.toolstack("state", "5"), [6]);
    assert!(bench.vif.is_finished());
}

#[test]
fn front_end_is_connected_when_the_script_has_set_up_the_interface() {
    let mut bench = Bench::new();
    bench.vif.plug().interface = Some(Interface::Exists);
    bench.store.name_rings(&front(1, 0));
    assert_eq!(bench.front(4), [2]);
    assert_eq!(bench.held(), 0);
    assert!(bench.text().starts_with("waiting: the toolstack's hotplug script"));
    assert_eq!(bench.toolstack("hotplug-status", "busy"), [0; 0]);
    bench.store.set("backend/vif/1/0/hotplug-error", "no bridge");
    assert_eq!(bench.toolstack("hotplug-status", "error"), [0; 0]);
    assert_eq!(bench.text(), "waiting: the hotplug script failed");
    assert!(bench.vif.status().error.unwrap().contains("no bridge"));
    assert_eq!(bench.toolstack("hotplug-status", "connected"), [4]);
    assert_eq!((bench.text().as_str(), bench.held()), ("connected", 1));
    // The next driver of the guest does not wait: the interface is set up.
    assert_eq!(bench.front(6), [5, 6]);
    bench.front(1);
    assert_eq!(bench.front(4), [4]);
}

#[test]
fn toolstack_without_scripts_is_not_waited_for() {
    let mut bench = Bench::new();
    bench.vif.plug().interface = Some(Interface::Exists);
    bench.store.name_rings(&front(1, 0));
    bench.store.rm("backend/vif/1/0/hotplug-status");
    assert_eq!(bench.front(4), [2, 4]);
    assert_eq!(bench.key("hotplug-status"), None, "it is the scripts' key");
}

#[test]
fn grants_are_mapped_from_the_domain_that_the_toolstack_named() {
    for bad in ["2", "", "x", "65537"] {
        let mut bench = Bench::new();
        bench.store.name_rings(&front(1, 0));
        assert_eq!(bench.toolstack("frontend-id", bad), [0; 0]);
        assert_eq!(bench.front(4), [0; 0]);
        assert!(bench.error().unwrap().contains("frontend-id is"), "{bad:?}");
    }
}

#[test]
fn an_invalid_state_closes() {
    let mut bench = Bench::connected();
    bench.store.set(&format!("{}/state", front(1, 0)), "tomorrow");
    assert_eq!(bench.poll(), [5, 6]);
    assert_eq!(bench.held(), 0);
    assert!(!bench.vif.is_finished());
}

#[test]
fn a_flood_of_events_is_polled_at_a_limited_rate() {
    let mut bench = Bench::connected();
    bench.poll();
    let before = bench.store.reads;
    for _ in 0..10_000 {
        bench.vif.poll(&mut bench.store, bench.now).unwrap();
    }
    let once = 12;
    assert!(bench.store.reads - before <= 64 * once, "{}", bench.store.reads - before);
    let due = bench.vif.due().unwrap();
    assert!(due > bench.now && due <= bench.now + POLLS.1);
    // The last change of the flood is not lost.
    bench.store.set(&format!("{}/state", front(1, 0)), "5");
    bench.vif.poll(&mut bench.store, due).unwrap();
    assert_eq!(bench.news(), [5]);
}

#[test]
fn a_guest_that_reconnects_in_a_loop_waits() {
    let mut bench = Bench::new();
    bench.store.name_rings(&front(1, 0));
    let state = format!("{}/state", front(1, 0));
    let step = Duration::from_millis(20);
    for _ in 0..90 {
        for value in ["1", "4"] {
            bench.now += step;
            bench.store.set(&state, value);
            bench.vif.poll(&mut bench.store, bench.now).unwrap();
        }
    }
    let connects = bench.vif.plug.connects;
    assert!((8..=13).contains(&connects), "{connects} connects in 3.6 s");
    assert_eq!(bench.text(), "waiting: the guest reconnects too often");
    let due = bench.vif.due().unwrap();
    bench.vif.poll(&mut bench.store, due).unwrap();
    assert_eq!((bench.text().as_str(), bench.held()), ("connected", 1));
}

#[test]
fn leave_does_not_change_the_guests_state() {
    let mut bench = Bench::connected();
    bench.vif.leave(&mut bench.store);
    assert_eq!((bench.held(), bench.news()), (0, vec![]));
    assert_eq!(bench.key("state"), Some("4"));
    assert!(bench.store.watches.is_empty());
    // The next back end finds both ends Connected and continues.
    bench.vif = Handshake::new(ID, OFFER, Counted::default(), bench.now);
    assert_eq!(bench.start(), [2, 4]);
    assert_eq!(bench.held(), 1);
}

/// For example a driver domain's quota.
#[test]
fn refused_requests_are_retried_with_increasing_delay() {
    // Watches, the offer, connected rings, a reported error.
    for path in ["backend/vif/1/0", "/local/domain/1/device", "error"] {
        let mut bench = Bench::new();
        bench.store.refuse = Some(path.into());
        let refused_at = if path == "error" {
            bench.start();
            assert_eq!(bench.front(4), [5], "reported or not, it closes");
            bench.now
        } else {
            bench.store.name_rings(&front(1, 0));
            bench.store.set(&format!("{}/state", front(1, 0)), "4");
            assert_eq!(bench.start(), [0; 0]);
            bench.now
        };
        assert!(bench.text().ends_with("; xenstore refused a request, retrying"));
        assert!(bench.vif.status().error.unwrap().contains("over a quota"), "{path}");
        assert!(!bench.vif.is_finished());
        let mut waits = Vec::new();
        let mut last = refused_at;
        for _ in 0..8 {
            let due = bench.vif.due().unwrap();
            waits.push((due - last).as_secs());
            last = due;
            bench.vif.poll(&mut bench.store, due).unwrap();
            if path == "error" {
                break;
            }
        }
        bench.store.refuse = None;
        bench.now = last + Duration::from_secs(64);
        if path == "error" {
            assert_eq!((waits, bench.front(1)), (vec![1], vec![6, 2]));
            continue;
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 64, 64], "{path}");
        assert_eq!(bench.poll(), [2, 4], "{path}");
        assert_eq!((bench.text().as_str(), bench.vif.due()), ("connected", None));
        assert_eq!(bench.store.watches.len(), 2, "{path}");
    }
}

#[test]
fn loss_of_xenstore_at_any_moment_leaves_no_resources_held() {
    let run = |bench: &mut Bench| -> Result<(), Failure> {
        let state = format!("{}/state", front(1, 0));
        for value in ["1", "4", "5", "6", "1", "4"] {
            bench.store.set(&state, value);
            bench.now += Duration::from_secs(1);
            bench.vif.poll(&mut bench.store, bench.now)?;
        }
        Ok(())
    };
    let mut failures = 0;
    for after in 1.. {
        let mut bench = Bench::new();
        bench.store.name_rings(&front(1, 0));
        bench.store.fail_after = Some(after);
        if run(&mut bench).is_ok() {
            break;
        }
        failures += 1;
        let serves = bench.vif.state == State::Connected;
        assert_eq!(bench.held(), usize::from(serves && bench.vif.plugged.is_some()), "{after}");
        // It reconnects: the vif follows its front end again.
        bench.store.fail_after = None;
        bench.store.set(&format!("{}/state", front(1, 0)), "1");
        bench.start();
        bench.poll();
        assert_eq!(bench.front(4).last(), Some(&4), "{after}");
        assert_eq!(bench.held(), 1, "{after}");
    }
    assert!(failures > 40, "{failures}");
}
