//! Rings plugged into the queue pairs of a port.

use std::sync::{Mutex, MutexGuard};

use ring::xen::{Extra, FrontRx, FrontTx, RxPacket, RxRequest, TxRequest};
use switch::account::Account;
use switch::frame::Burst;
use switch::port::{Egress, Ingress};
use switch::vnet::{Offloads, VnetHdr};
use xen_netif::back::{Plug, QueueKeys, Queues, Request, Settings, Socket, Takes, VifId};
use xen_netif::host::{Channel, Pages};
use xen_netif::port::{Pair, Rate};

use super::*;

const ID: VifId = VifId { domid: 1, devid: 0 };
const UP: Settings = Settings { rate: None, mtu: None, multicast_control: false, link: true };

/// How many queues frames may go to, each time that it was told.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<u16>>>);

fn lock<T>(queue: &Mutex<T>) -> MutexGuard<'_, T> {
    queue.lock().unwrap()
}

impl Queues for Told {
    fn start(&mut self, _: u16, _: Arc<OwnedFd>, _: Arc<OwnedFd>) {}
    fn stop(&mut self, _: u16) {}
    fn set_active(&mut self, queues: u16) {
        lock(&self.0).push(queues);
    }
    fn log(&self) -> Box<dyn FnMut(HostError) + Send> {
        Box::new(|error| panic!("{error}"))
    }
}

/// A guest of two queues, and the socket that its rings are plugged into.
struct Bench {
    socket: Socket<Told>,
    told: Told,
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

    fn charged(charge: impl FnOnce(Socket<Told>) -> Socket<Told>) -> Self {
        let dir = dir();
        let host = back(&dir);
        let front = Front::open(&dir).unwrap();
        let pairs: Vec<Pair> = (0..2).map(|_| Pair::new()).collect();
        let told = Told::default();
        let socket = charge(Socket::new(host, ID, pairs.clone(), told.clone()));
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
        let request = Request { queues, ctrl: None, takes: Takes::default() };
        Self { socket, told, pairs, rings, rx, request, _channels: channels, _front: front }
    }

    /// Sends 200 frames of 1500 bytes over each queue that has none; how many bytes the switch took
    /// of each.
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
        // In turn, as a worker does; no time passes.
        for pair in (0..8).flat_map(|_| &self.pairs) {
            lock(&pair.ingress).burst(64, 0, &mut Burst::default(), &mut |_| ()).unwrap();
        }
        let after = self.pairs.iter().map(|p| p.ingress_stats.bytes.get());
        after.zip(before).map(|(after, before)| after - before).collect()
    }

    /// Whether the guest gets a frame of `len` bytes for `mac` that goes to a queue.
    fn gets(&mut self, queue: usize, mac: [u8; 6], len: usize) -> bool {
        let (rx, gref) = (&mut self.rx[queue], self.rings[queue].1.grefs[2]);
        // What is in it does not matter here: one page for all.
        while rx.room() > 0 {
            assert!(rx.post(RxRequest { id: 0, gref }));
        }
        rx.publish();
        let mut frame = vec![0; len];
        frame[..6].copy_from_slice(&mac);
        let mut egress = lock(&self.pairs[queue].egress);
        assert_eq!(egress.put_made(&frame, &[], &VnetHdr::NONE), Ok(true));
        egress.flush();
        let mut packet = RxPacket::new();
        let got = rx.take(&mut packet).unwrap();
        assert!(got.is_none_or(|got| got.is_ok() && packet.len as usize == len));
        got.is_some()
    }

    fn told(&self) -> Vec<u16> {
        std::mem::take(&mut lock(&self.told.0))
    }
}

/// Ring pages are the guest's to pay for, as long as it is connected.
#[test]
fn a_guests_rings_are_charged_to_its_port() {
    let account = Arc::new(Account::default());
    let mut bench = Bench::charged(|socket| socket.charged_to(Arc::clone(&account)));
    account.set_limit("mappings", 3);
    let refused = bench.socket.connect(&bench.request).unwrap_err();
    assert!(refused.text.contains("mappings: 4 more than the 0 in use"), "{}", refused.text);
    account.set_limit("mappings", 4);
    // Again, while the first rings are there.
    (0..2).for_each(|_| bench.socket.connect(&bench.request).unwrap());
    assert_eq!(account.mappings.used(), 4);
    bench.socket.disconnect();
    assert_eq!(account.mappings.used(), 0);
}

/// Each on its own the queues would send twice the bucket.
#[test]
fn queues_of_a_vif_share_the_rate_that_they_begin_with() {
    let mut bench = Bench::new();
    bench.socket.set(&Settings { rate: Some(Rate { bytes: 1000, usecs: 1_000_000 }), ..UP });
    bench.socket.connect(&bench.request).unwrap();
    assert_eq!(bench.told(), [0; 0], "nothing goes to it before it is told so");
    let sent = bench.send();
    assert_eq!(sent.iter().sum::<u64>(), 131_072 / 1500 * 1500, "{sent:?}: one bucket");
    assert!(sent.iter().all(|sent| *sent > 0), "{sent:?}");
    // The same again is no new bucket; another rate is.
    bench.socket.set(&Settings { rate: Some(Rate { bytes: 1000, usecs: 1_000_000 }), ..UP });
    assert_eq!((bench.told(), bench.send()), (vec![2], vec![0, 0]));
    bench.socket.set(&UP);
    assert!(bench.send().iter().sum::<u64>() > 131_072);
    assert_eq!(bench.told(), [0; 0]);
}

#[test]
fn a_guest_without_link_neither_gets_nor_sends() {
    let mut bench = Bench::new();
    for _ in 0..2 {
        bench.socket.set(&Settings { link: false, ..UP });
        bench.socket.connect(&bench.request).unwrap();
        assert_eq!(bench.send(), [0, 0], "not even at first");
        bench.socket.set(&UP);
        assert_eq!((bench.told(), bench.send()), (vec![2], vec![300_000; 2]));
        bench.socket.set(&Settings { link: false, ..UP });
        assert_eq!((bench.told(), bench.send()), (vec![0], vec![0, 0]));
        bench.socket.set(&Settings { link: false, mtu: Some(1400), ..UP });
        assert_eq!(bench.told(), [0; 0], "told of changes only");
        bench.socket.disconnect();
        bench.told();
        for (tx, pages) in &mut bench.rings {
            *tx = FrontTx::new(pages.area(0).unwrap());
        }
    }
    let dropped = bench.pairs.iter().map(|p| p.ingress_stats.drops_down.get());
    assert_eq!(dropped.collect::<Vec<_>>(), [800; 2]);
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
    lock(&bench.pairs[0].ingress).burst(64, 0, &mut Burst::default(), &mut |_| ()).unwrap();
    // It asked on one queue, and is asked for on both.
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
fn what_a_front_end_takes_is_what_its_port_takes_each_by_itself() {
    const NOTHING: Takes = Takes {
        sg: false,
        gso_tcpv4: false,
        gso_tcpv6: false,
        no_csum_offload: true,
        ipv6_csum_offload: false,
        rx_notify: false,
        smart_poll: false,
    };
    let none = Offloads { csum_v4_only: true, ..Offloads::default() };
    for (takes, offloads) in [
        (NOTHING, none),
        (Takes { sg: true, ..NOTHING }, none),
        (Takes { gso_tcpv4: true, gso_tcpv6: true, ..NOTHING }, none),
        (Takes { sg: true, gso_tcpv4: true, ..NOTHING }, Offloads { tso4: true, ..none }),
        (Takes { sg: true, gso_tcpv6: true, ..NOTHING }, Offloads { tso6: true, ..none }),
        (Takes { no_csum_offload: false, ..NOTHING }, Offloads { csum: true, ..none }),
        (Takes { ipv6_csum_offload: true, ..NOTHING }, Offloads { csum_v4_only: false, ..none }),
        (Takes { rx_notify: true, ..NOTHING }, none),
    ] {
        let mut bench = Bench::new();
        bench.request.takes = takes;
        bench.socket.connect(&bench.request).unwrap();
        for (queue, pair) in bench.pairs.clone().iter().enumerate() {
            let mut egress = lock(&pair.egress);
            assert_eq!(egress.offloads(), offloads, "{takes:?}");
            // It has offered no pages: without the feature nobody may sleep until it does.
            assert_eq!(egress.arm(), takes.rx_notify, "{takes:?}");
            drop(egress);
            assert!(bench.gets(queue, [2, 0, 0, 0, 0, 1], 4096));
            assert_eq!(bench.gets(queue, [2, 0, 0, 0, 0, 1], 5000), takes.sg, "{takes:?}");
            assert_eq!(pair.egress_stats.drops_too_long.get(), u64::from(!takes.sg));
        }
    }
}
