//! Rings connected to the queue pairs of a port.

use std::sync::{Mutex, MutexGuard};

use ring::xen::{Extra, FrontRx, FrontTx, RxPacket, RxRequest, TxRequest};
use switch::account::Account;
use switch::frame::Burst;
use switch::port::{Egress, Ingress};
use switch::time::Instant;
use switch::vnet::{Offloads, VnetHdr};
use xen_netif::back::{FrontFeatures, Plug, QueueKeys, Queues, Request, Settings, Socket, VifId};
use xen_netif::host::{Channel, Pages};
use xen_netif::port::{Pair, Rate};

use super::*;

const ID: VifId = VifId { domid: 1, devid: 0 };
const UP: Settings = Settings { rate: None, mtu: None, multicast_control: false, link: true };

/// Records the number of active queues at each change.
#[derive(Clone, Default)]
pub struct Activity {
    changes: Arc<Mutex<Vec<u16>>>,
    pairs: Vec<Pair>,
    /// How many of the pairs had a ring to read at the last change.
    served: Arc<Mutex<usize>>,
}

pub fn lock<T>(queue: &Mutex<T>) -> MutexGuard<'_, T> {
    queue.lock().unwrap()
}

impl Queues for Activity {
    fn start(&mut self, _: u16, _: Arc<OwnedFd>, _: Arc<OwnedFd>) {}
    fn stop(&mut self, _: u16) {}
    fn set_active(&mut self, queues: u16) {
        lock(&self.changes).push(queues);
        *lock(&self.served) = self.pairs.iter().filter(|pair| pair.ingress.lock().is_up()).count();
    }
    fn log(&self) -> Box<dyn FnMut(HostError) + Send> {
        Box::new(|error| panic!("{error}"))
    }
}

/// A guest with two queues, and the socket of its rings.
struct Bench {
    socket: Socket<Activity>,
    activity: Activity,
    pairs: Vec<Pair>,
    rings: Vec<(FrontTx, Pages)>,
    rx: Vec<FrontRx>,
    request: Request,
    _channels: Vec<Channel>,
    /// Last: memory and sockets.
    _front: Front,
}

impl Bench {
    fn new() -> Self {
        Self::charged(|socket| socket)
    }

    fn charged(charge: impl FnOnce(Socket<Activity>) -> Socket<Activity>) -> Self {
        let dir = dir();
        let host = back(&dir);
        let front = Front::open(&dir).unwrap();
        let pairs: Vec<Pair> = (0..2).map(|_| Pair::new()).collect();
        let activity = Activity { pairs: pairs.clone(), ..Activity::default() };
        let socket = charge(Socket::new(host, ID, pairs.clone(), activity.clone()));
        let (mut rings, mut rx) = (Vec::new(), Vec::new());
        let (mut queues, mut channels) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let pages = front.alloc(3, 0, false).unwrap();
            let tx = FrontTx::new(pages.area(0).unwrap());
            rx.push(FrontRx::new(pages.area(1).unwrap()));
            let (tx_port, channel) = front.channel(0).unwrap();
            let (tx_ref, rx_ref) = (pages.grefs[0], pages.grefs[1]);
            queues.push(QueueKeys { tx_ref, rx_ref, tx_port, rx_port: None });
            rings.push((tx, pages));
            channels.push(channel);
        }
        let request = Request { queues, ctrl: None, features: FrontFeatures::default() };
        Self { socket, activity, pairs, rings, rx, request, _channels: channels, _front: front }
    }

    /// Sends 200 frames of 1500 bytes on each queue without pending frames. Returns the bytes taken
    /// from each.
    fn send(&mut self) -> Vec<u64> {
        for (tx, pages) in &mut self.rings {
            while tx.take_response().unwrap().is_some() {}
            if tx.room() < tx.size() {
                continue;
            }
            let gref = pages.grefs[2];
            for id in 0..200 {
                assert!(tx.add(
                    TxRequest { gref, id, size: 1500, ..TxRequest::default() },
                    &[],
                    &[]
                ));
            }
            tx.publish();
        }
        let before: Vec<_> = self.pairs.iter().map(|p| p.ingress_stats.bytes.get()).collect();
        // Alternately, as in a worker; the clock does not advance.
        for pair in (0..8).flat_map(|_| &self.pairs) {
            pair.ingress
                .lock()
                .burst(64, Instant::START, &mut Burst::default(), &mut |_| ())
                .unwrap();
        }
        let after = self.pairs.iter().map(|p| p.ingress_stats.bytes.get());
        after.zip(before).map(|(after, before)| after - before).collect()
    }

    /// Whether the guest gets a frame of `len` bytes for `mac` sent to a queue.
    fn gets(&mut self, queue: usize, mac: [u8; 6], len: usize) -> bool {
        let (rx, gref) = (&mut self.rx[queue], self.rings[queue].1.grefs[2]);
        // Contents do not matter: all frames use one page.
        while rx.room() > 0 {
            assert!(rx.post(RxRequest { id: 0, gref }));
        }
        rx.publish();
        let mut frame = vec![0; len];
        frame[..6].copy_from_slice(&mac);
        let mut egress = self.pairs[queue].egress.lock();
        assert_eq!(egress.put_parts(&frame, &[], &VnetHdr::NONE), Ok(true));
        egress.flush();
        let mut packet = RxPacket::new();
        let got = rx.take(&mut packet).unwrap();
        assert!(got.is_none_or(|got| got.is_ok() && packet.len as usize == len));
        got.is_some()
    }

    fn changes(&self) -> Vec<u16> {
        std::mem::take(&mut lock(&self.activity.changes))
    }
}

/// Ring pages are charged to the guest's port while it is connected.
#[test]
fn a_guests_rings_are_charged_to_its_port() {
    let account = Arc::new(Account::default());
    let mut bench = Bench::charged(|socket| socket.charged_to(Arc::clone(&account)));
    account.set_limit("mappings", 3);
    let refused = bench.socket.connect(&bench.request).unwrap_err();
    assert!(refused.text.contains("mappings: 4 more than the 0 in use"), "{}", refused.text);
    account.set_limit("mappings", 4);
    // Again, with the first rings connected.
    (0..2).for_each(|_| bench.socket.connect(&bench.request).unwrap());
    assert_eq!(account.mappings.used(), 4);
    bench.socket.disconnect();
    assert_eq!(account.mappings.used(), 0);
}

/// Separately, the queues would send twice the bucket.
#[test]
fn queues_of_a_vif_share_their_initial_rate() {
    let mut bench = Bench::new();
    bench.socket.set(&Settings { rate: Some(Rate { bytes: 1000, usecs: 1_000_000 }), ..UP });
    bench.socket.connect(&bench.request).unwrap();
    assert_eq!(bench.changes(), [0; 0], "not active before its settings");
    let sent = bench.send();
    assert_eq!(sent.iter().sum::<u64>(), 131_072 / 1500 * 1500, "{sent:?}: one bucket");
    assert!(sent.iter().all(|sent| *sent > 0), "{sent:?}");
    // Setting the same rate does not refill the bucket; another rate does.
    bench.socket.set(&Settings { rate: Some(Rate { bytes: 1000, usecs: 1_000_000 }), ..UP });
    assert_eq!((bench.changes(), bench.send()), (vec![2], vec![0, 0]));
    bench.socket.set(&UP);
    assert!(bench.send().iter().sum::<u64>() > 131_072);
    assert_eq!(bench.changes(), [0; 0]);
}

#[test]
fn a_guest_without_link_neither_receives_nor_sends() {
    let mut bench = Bench::new();
    for _ in 0..2 {
        bench.socket.set(&Settings { link: false, ..UP });
        bench.socket.connect(&bench.request).unwrap();
        assert_eq!(bench.send(), [0, 0], "not even at first");
        bench.socket.set(&UP);
        assert_eq!((bench.changes(), bench.send()), (vec![2], vec![300_000; 2]));
        bench.socket.set(&Settings { link: false, ..UP });
        assert_eq!((bench.changes(), bench.send()), (vec![0], vec![0, 0]));
        bench.socket.set(&Settings { link: false, mtu: Some(1400), ..UP });
        assert_eq!(bench.changes(), [0; 0], "only on changes");
        bench.socket.disconnect();
        bench.changes();
        for (tx, pages) in &mut bench.rings {
            *tx = FrontTx::new(pages.area(0).unwrap());
        }
    }
    let dropped = bench.pairs.iter().map(|p| p.ingress_stats.drops_down.get());
    assert_eq!(dropped.collect::<Vec<_>>(), [800; 2]);
}

/// Addresses are flushed as a vif goes down: a later burst would learn them again.
#[test]
fn a_disconnected_guests_rings_are_read_no_more_when_its_addresses_are_flushed() {
    let mut bench = Bench::new();
    bench.socket.set(&UP);
    bench.socket.connect(&bench.request).unwrap();
    bench.socket.set(&UP);
    assert_eq!((bench.changes(), *lock(&bench.activity.served)), (vec![2], 2));
    bench.socket.disconnect();
    assert_eq!((bench.changes(), *lock(&bench.activity.served)), (vec![0], 0));
}

#[test]
fn mtu_and_multicast_control_hold_from_the_first_frame_and_change_with_the_settings() {
    const ASKED: [u8; 6] = [1, 0, 0x5e, 0, 0, 7];
    const OTHER: [u8; 6] = [1, 0, 0x5e, 0, 0, 8];
    const GUEST: [u8; 6] = [2, 0, 0, 0, 0, 1];
    let mut bench = Bench::new();
    bench.socket.set(&Settings { mtu: Some(1000), multicast_control: true, ..UP });
    bench.socket.connect(&bench.request).unwrap();
    let (tx, pages) = &mut bench.rings[0];
    let gref = pages.grefs[2];
    assert!(tx.add(TxRequest { gref, ..TxRequest::default() }, &[Extra::McastAdd(ASKED)], &[]));
    tx.publish();
    bench.pairs[0]
        .ingress
        .lock()
        .burst(64, Instant::START, &mut Burst::default(), &mut |_| ())
        .unwrap();
    // Requested on one queue, delivered on both.
    for queue in 0..2 {
        assert!(bench.gets(queue, ASKED, 60) && !bench.gets(queue, OTHER, 60));
        // With link header and tag.
        assert!(bench.gets(queue, GUEST, 1018) && !bench.gets(queue, GUEST, 1019));
    }
    bench.socket.set(&Settings { mtu: Some(1400), ..UP });
    for queue in 0..2 {
        assert!(bench.gets(queue, OTHER, 60));
        assert!(bench.gets(queue, GUEST, 1418) && !bench.gets(queue, GUEST, 1419));
    }
    bench.socket.set(&Settings { multicast_control: true, ..UP });
    for queue in 0..2 {
        assert!(bench.gets(queue, ASKED, 60) && !bench.gets(queue, OTHER, 60));
        assert!(bench.gets(queue, GUEST, 1514), "none is set");
    }
    for stats in bench.pairs.iter().map(|pair| &pair.egress_stats) {
        assert_eq!((stats.drops_filtered.get(), stats.drops_too_long.get()), (2, 2));
    }
}

#[test]
fn each_front_end_feature_becomes_an_offload_of_its_port() {
    const NOTHING: FrontFeatures = FrontFeatures {
        sg: false,
        gso_tcpv4: false,
        gso_tcpv6: false,
        no_csum_offload: true,
        ipv6_csum_offload: false,
        rx_notify: false,
        smart_poll: false,
    };
    let none = Offloads { csum_v4_only: true, ..Offloads::default() };
    for (features, offloads) in [
        (NOTHING, none),
        (FrontFeatures { sg: true, ..NOTHING }, none),
        (FrontFeatures { gso_tcpv4: true, gso_tcpv6: true, ..NOTHING }, none),
        (FrontFeatures { sg: true, gso_tcpv4: true, ..NOTHING }, Offloads { tso4: true, ..none }),
        (FrontFeatures { sg: true, gso_tcpv6: true, ..NOTHING }, Offloads { tso6: true, ..none }),
        (FrontFeatures { no_csum_offload: false, ..NOTHING }, Offloads { csum: true, ..none }),
        (
            FrontFeatures { ipv6_csum_offload: true, ..NOTHING },
            Offloads { csum_v4_only: false, ..none },
        ),
        (FrontFeatures { rx_notify: true, ..NOTHING }, none),
    ] {
        let mut bench = Bench::new();
        bench.request.features = features;
        bench.socket.connect(&bench.request).unwrap();
        for (queue, pair) in bench.pairs.clone().iter().enumerate() {
            let mut egress = pair.egress.lock();
            assert_eq!(egress.offloads(), offloads, "{features:?}");
            // It has posted no pages: without the feature, sleep until it does is not allowed.
            assert_eq!(egress.arm(), features.rx_notify, "{features:?}");
            drop(egress);
            assert!(bench.gets(queue, [2, 0, 0, 0, 0, 1], 4096));
            assert_eq!(bench.gets(queue, [2, 0, 0, 0, 0, 1], 5000), features.sg, "{features:?}");
            assert_eq!(pair.egress_stats.drops_too_long.get(), u64::from(!features.sg));
        }
    }
}
