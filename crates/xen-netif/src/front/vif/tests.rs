use std::time::{Duration, Instant};

use super::*;
use crate::back::fake::{Counted, Fake, back, front};
use crate::back::{Handshake as BackHalf, Offer, VifId, without};

const OPTIONS: FrontOptions = FrontOptions {
    queues: 2,
    fewest: 1,
    split: true,
    ctrl: true,
    smart_poll: true,
    hash: false,
    multicast: false,
};

/// A creator of rings that counts.
#[derive(Default)]
struct Made {
    used: bool,
    held: bool,
    prepared: usize,
}

impl Rings for Made {
    fn prepare(&mut self, agreed: &Agreed) -> Result<Named, Failure> {
        assert!(!self.held, "rings are released before others are created");
        (self.used, self.held) = (true, true);
        self.prepared += 1;
        let queue = |n: u16| {
            let n = u32::from(n) * 10;
            let rx_port = agreed.split.then_some(n + 4);
            QueueKeys { tx_ref: n + 1, rx_ref: n + 2, tx_port: n + 3, rx_port }
        };
        let ctrl = agreed.ctrl.then_some(CtrlKeys { ring_ref: 90, port: 91 });
        Ok(Named { queues: (0..agreed.queues).map(queue).collect(), ctrl })
    }

    fn stop(&mut self) {
        self.used = false;
    }

    fn release(&mut self) {
        assert!(!self.used, "rings in use are not released");
        self.held = false;
    }
}

/// Both halves over one xenstore, with the production back half.
struct Bench {
    store: Fake,
    front: Handshake<Made>,
    back: BackHalf<Counted>,
    now: Instant,
}

impl Bench {
    fn offering(offer: Offer) -> Self {
        let now = Instant::now();
        let mut store = Fake::default();
        store.make_vif(1, 0);
        store.set(&format!("{}/backend", front(1, 0)), &back(1, 0));
        let front = Handshake::new(front(1, 0), OPTIONS, Made::default());
        let mut bench = Self { store, front, back: back_half(offer, now), now };
        bench.back.start(&mut bench.store, now).unwrap();
        bench
    }

    fn up() -> Self {
        let mut bench = Self::offering(Offer { queues: 4, without: 0 });
        assert_eq!(bench.run(), Status::Up);
        bench
    }

    /// Polls both ends alternately until they are stable.
    fn run(&mut self) -> Status {
        let mut status = Status::Waiting;
        for _ in 0..8 {
            self.now += Duration::from_secs(1);
            status = self.front.poll(&mut self.store).unwrap();
            self.back.poll(&mut self.store, self.now).unwrap();
        }
        status
    }

    fn ours(&self, key: &str) -> Option<&str> {
        self.store.get(&format!("{}/{key}", front(1, 0)))
    }

    fn set_back(&mut self, key: &str, value: &str) {
        self.store.set(&format!("{}/{key}", back(1, 0)), value);
    }
}

fn back_half(offer: Offer, now: Instant) -> BackHalf<Counted> {
    BackHalf::new(VifId { domid: 1, devid: 0 }, offer, Counted::default(), now)
}

#[test]
fn both_halves_connect_with_all_common_features() {
    let mut bench = Bench::up();
    assert_eq!(bench.back.plug().held, 2 + 1, "two queues and a control ring");
    let agreed = *bench.front.agreed().unwrap();
    assert!(agreed.split && agreed.ctrl && agreed.smart_poll && agreed.sg && agreed.csum6);
    assert_eq!((agreed.queues, agreed.trusted), (2, true));
    assert_eq!(bench.ours("queue-1/event-channel-rx"), Some("14"));
    assert_eq!(bench.ours("tx-ring-ref"), None, "with two queues no key is flat");
}

#[test]
fn too_few_queues_create_no_ring() {
    let mut bench = Bench::offering(Offer { queues: 1, without: 0 });
    bench.front.options.fewest = 2;
    assert_eq!(bench.run(), Status::Few(1));
    // As its toolstack created it: no keys were written.
    assert_eq!((bench.front.rings().prepared, bench.ours("state")), (0, Some("1")));
    assert_eq!(bench.ours("tx-ring-ref"), None);
    assert_eq!(bench.back.plug().connects, 0);
    for (said, more) in [("many", None), ("0", None), ("2", Some(Status::Up))] {
        bench.set_back("multi-queue-max-queues", said);
        let status = bench.front.poll(&mut bench.store).unwrap();
        assert_eq!(status == Status::Few(1), more.is_none(), "'{said}'");
    }
    assert_eq!((bench.front.rings().prepared, bench.ours("state")), (1, Some("4")));
}

#[test]
fn features_not_offered_are_not_used() {
    let none = without("split-event-channels+ctrl-ring+smart-poll+sg").unwrap();
    let mut bench = Bench::offering(Offer { queues: 1, without: none });
    assert_eq!(bench.run(), Status::Up);
    let agreed = bench.front.agreed().unwrap();
    assert!(!(agreed.split || agreed.ctrl || agreed.smart_poll));
    assert!(!(agreed.sg || agreed.gso_tcpv4 || agreed.gso_tcpv6), "GSO needs sg");
    assert_eq!(bench.ours("event-channel"), Some("3"));
    assert_eq!(bench.ours("feature-smart-poll"), Some("0"));
    assert_eq!(bench.back.plug().held, 1);
}

#[test]
fn a_front_end_that_does_not_want_smart_poll_gets_plain_events() {
    let mut bench = Bench::offering(Offer { queues: 1, without: 0 });
    bench.front.options.smart_poll = false;
    assert_eq!(bench.run(), Status::Up);
    assert!(!bench.front.agreed().unwrap().smart_poll);
    assert_eq!(bench.ours("feature-smart-poll"), Some("0"));
}

#[test]
fn multicast_control_is_requested_if_offered_and_removed_afterwards() {
    let key = "request-multicast-control";
    for (lacks, wanted, asked) in
        [("sg", true, "1"), ("multicast-control", true, "0"), ("sg", false, "0")]
    {
        let offer = Offer { queues: 1, without: without(lacks).unwrap() };
        let mut bench = Bench::offering(offer);
        // Left by a front end that did not close.
        bench.store.set(&format!("{}/{key}", front(1, 0)), "1");
        bench.front.options.multicast = wanted;
        assert_eq!(bench.run(), Status::Up);
        assert_eq!(bench.ours(key), Some(asked), "{lacks}, {wanted}");
        let agreed = bench.front.agreed().unwrap();
        assert_eq!(agreed.names().contains(&"multicast"), asked == "1");
        bench.front.leave();
        assert_eq!(bench.run(), Status::Over);
        assert_ne!(bench.ours(key), Some("1"));
    }
}

#[test]
fn a_back_end_that_closes_and_reconnects_is_followed() {
    let mut bench = Bench::up();
    bench.set_back("state", "5");
    assert_eq!(bench.front.poll(&mut bench.store).unwrap(), Status::Waiting);
    assert!(!bench.front.rings().held);
    assert_eq!(bench.ours("state"), Some("6"));
    bench.set_back("state", "6");
    bench.front.poll(&mut bench.store).unwrap();
    assert_eq!(bench.ours("state"), Some("1"));
    bench.set_back("state", "2");
    bench.front.poll(&mut bench.store).unwrap();
    bench.set_back("state", "4");
    assert_eq!(bench.front.poll(&mut bench.store).unwrap(), Status::Up);
    assert_eq!(bench.front.rings().prepared, 2);
}

#[test]
fn a_restarted_back_end_finds_the_same_rings() {
    let mut bench = Bench::up();
    bench.set_back("state", "2");
    assert_eq!(bench.front.poll(&mut bench.store).unwrap(), Status::Waiting);
    bench.set_back("state", "4");
    assert_eq!(bench.front.poll(&mut bench.store).unwrap(), Status::Up);
    assert_eq!(bench.front.rings().prepared, 1);
}

#[test]
fn rings_left_by_another_front_end_are_closed_first() {
    let mut bench = Bench::up();
    bench.front = Handshake::new(front(1, 0), OPTIONS, Made::default());
    assert_eq!(bench.run(), Status::Up);
    assert_eq!(bench.front.rings().prepared, 1);
    assert_eq!(bench.back.plug().connects, 2, "the back half released the old ones");
}

#[test]
fn a_removed_vif_is_closed_and_not_started_again() {
    let mut bench = Bench::up();
    bench.set_back("online", "0");
    bench.set_back("state", "5");
    assert_eq!(bench.front.poll(&mut bench.store).unwrap(), Status::Waiting);
    bench.set_back("state", "6");
    assert_eq!(bench.front.poll(&mut bench.store).unwrap(), Status::Waiting);
    assert_eq!(bench.ours("state"), Some("6"));
    bench.store.rm(&front(1, 0));
    assert_eq!(bench.front.poll(&mut bench.store).unwrap(), Status::Gone);
    assert_eq!(bench.store.nodes.keys().filter(|k| k.starts_with(&front(1, 0))).count(), 0);
}

#[test]
fn leave_closes_both_halves_and_releases_all_resources() {
    let mut bench = Bench::up();
    bench.front.leave();
    assert_eq!(bench.run(), Status::Over);
    assert!(!bench.front.rings().held);
    assert_eq!(bench.back.plug().held, 0);
}

#[test]
fn a_back_end_that_flips_pages_is_rejected() {
    let mut bench = Bench::offering(Offer { queues: 1, without: 0 });
    bench.set_back("feature-rx-copy", "0");
    let failure = bench.front.poll(&mut bench.store).unwrap_err();
    assert!(failure.0.contains("feature-rx-copy"), "{failure}");
    assert_eq!(bench.front.rings().prepared, 0);
}

#[test]
fn an_untrusted_back_end_is_reported() {
    let mut bench = Bench::offering(Offer { queues: 1, without: 0 });
    bench.store.set(&format!("{}/trusted", front(1, 0)), "0");
    assert_eq!(bench.run(), Status::Up);
    assert!(!bench.front.agreed().unwrap().trusted);
}

#[test]
fn there_is_a_carrier_unless_either_end_denies_it() {
    let mut bench = Bench::up();
    assert!(bench.front.carrier(), "no key denies it");
    let watched = |bench: &Bench, path: String| bench.store.watches.contains(&(path, LINK.into()));
    assert!(watched(&bench, format!("{}/carrier", back(1, 0))));
    assert!(watched(&bench, format!("{}/disconnect", front(1, 0))));
    for (carrier, disconnect, there) in [
        ("0", "0", false),
        ("1", "0", true),
        ("1", "1", false),
        ("0", "1", false),
        ("?", "?", true),
    ] {
        bench.set_back("carrier", carrier);
        bench.store.set(&format!("{}/disconnect", front(1, 0)), disconnect);
        assert_eq!(bench.front.poll(&mut bench.store), Ok(Status::Up), "frames may pass");
        assert_eq!(bench.front.carrier(), there, "carrier {carrier}, disconnect {disconnect}");
    }
    // It moved to another back end, which has no such key.
    bench.set_back("carrier", "0");
    bench.front.poll(&mut bench.store).unwrap();
    bench.store.set(&format!("{}/backend", front(1, 0)), &back(1, 7));
    bench.front.poll(&mut bench.store).unwrap();
    assert!(bench.front.carrier() && watched(&bench, format!("{}/carrier", back(1, 7))));
    assert!(!watched(&bench, format!("{}/carrier", back(1, 0))));
    assert!(watched(&bench, format!("{}/disconnect", front(1, 0))), "our own watch stays");
}

#[test]
fn the_mtu_set_by_the_toolstack_is_read() {
    let mut bench = Bench::up();
    assert_eq!(bench.front.mtu(), None);
    for (said, mtu) in [("9000", Some(9000)), ("0", None), ("65536", None), ("big", None)] {
        bench.store.set(&format!("{}/mtu", front(1, 0)), said);
        bench.front.poll(&mut bench.store).unwrap();
        assert_eq!(bench.front.mtu(), mtu, "'{said}'");
    }
}
