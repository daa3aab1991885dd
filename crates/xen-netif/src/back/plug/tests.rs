use std::path::PathBuf;
use std::sync::Mutex;

use ring::xen::{FrontRx, FrontTx, TxRequest};
use switch::frame::Burst;
use switch::port::Ingress;

use super::*;
use crate::host::{Front, Pages};
use crate::port::Rate;

const ID: VifId = VifId { domid: 1, devid: 0 };
const UP: Settings = Settings { rate: None, mtu: None, multicast_control: false, link: true };

/// How many queues frames may go to, each time that it was told.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<u16>>>);

impl Queues for Told {
    fn started(&mut self, _: u16, _: Arc<OwnedFd>, _: Arc<OwnedFd>) {}
    fn stopped(&mut self, _: u16) {}
    fn active(&mut self, queues: u16) {
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
    request: Request,
    _channels: Vec<Channel>,
    /// Last: memory and sockets.
    _front: Front,
}

impl Bench {
    fn new(name: &str) -> Self {
        let dir: PathBuf = std::env::temp_dir().join(format!("pvs-{name}-{}", std::process::id()));
        let host = Arc::new(host::Back::open_local(&dir).unwrap());
        let front = Front::open_local(&dir).unwrap();
        let pairs: Vec<Pair> = (0..2).map(|_| Pair::new()).collect();
        let told = Told::default();
        let socket = Socket::new(host, ID, pairs.clone(), told.clone());
        let (mut rings, mut queues, mut channels) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..2 {
            let pages = front.alloc(3, 0, false).unwrap();
            let tx = FrontTx::new(pages.area(0).unwrap());
            FrontRx::new(pages.area(1).unwrap());
            let (tx_port, channel) = front.channel(0).unwrap();
            let (tx_ref, rx_ref) = (pages.grefs[0], pages.grefs[1]);
            queues.push(QueueKeys { tx_ref, rx_ref, tx_port, rx_port: None });
            rings.push((tx, pages));
            channels.push(channel);
        }
        let request = Request { queues, ctrl: None, takes: Takes::default() };
        Self { socket, told, pairs, rings, request, _channels: channels, _front: front }
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

    fn told(&self) -> Vec<u16> {
        std::mem::take(&mut lock(&self.told.0))
    }
}

/// Each on its own the queues would send twice the bucket.
#[test]
fn queues_of_a_vif_share_the_rate_that_they_begin_with() {
    let mut bench = Bench::new("rate");
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
    let mut bench = Bench::new("link");
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
fn a_vif_that_the_kernel_serves_is_not_ours() {
    let devices = std::env::temp_dir().join(format!("pvs-claimed-{}", std::process::id()));
    let vif = devices.join("vif-3-0");
    std::fs::create_dir_all(&vif).unwrap();
    let id = VifId { domid: 3, devid: 0 };
    assert_eq!(claimed_by(&devices, id), None, "there, but no driver has it");
    std::os::unix::fs::symlink("../../drivers/vif", vif.join("driver")).unwrap();
    let why = claimed_by(&devices, id).unwrap();
    assert!(why.contains("driver 'vif'") && why.contains("docs/xen.md"), "{why}");
    assert_eq!(claimed_by(&devices, VifId { domid: 4, devid: 0 }), None);
    std::fs::remove_dir_all(devices).unwrap();
}
