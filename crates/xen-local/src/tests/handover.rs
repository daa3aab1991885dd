//! A directory and its rings handed to another process; both are this one.

use ring::xen::{FrontTx, TxRequest};
use switch::frame::Burst;
use switch::port::Ingress;
use switch::time::Instant as Now;
use xen_netif::back::{
    FrontFeatures, KeptRings, Plug, QueueKeys, Request, RingPositions, Settings, Socket, VifId,
};
use xen_netif::port::Pair;

use super::plug::Activity;
use super::*;

const ID: VifId = VifId { domid: 1, devid: 0 };
const UP: Settings = Settings { rate: None, mtu: None, multicast_control: false, link: true };
/// Offset of `rsp_prod` in a ring's page.
const RSP_PROD: usize = 8;

/// Hands a directory on, as through a file and a socket.
fn hand_over(dir: &Path, old: Back) -> Back {
    old.pause();
    let (state, fds) = old.export();
    let state = serde_json::to_vec(&state).unwrap();
    let fds = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    // The old process exits: nothing is removed.
    std::mem::forget(old);
    let new = Back::import(dir, serde_json::from_slice(&state).unwrap(), fds).unwrap();
    new.resume().unwrap();
    new
}

#[test]
fn front_end_keeps_its_domain_grants_and_channels() {
    let dir = dir();
    let old = Back::open(&dir, &os::Permissions::OWNER).unwrap();
    let front = Front::open(&dir).unwrap();
    let pages = front.alloc(2, 0, false).unwrap();
    let (port, ours) = front.channel(0).unwrap();
    let fs = front.store().unwrap();
    fs.write("device/vif/0/state", "4").unwrap();
    fs.write("device/vif/0/odd", "\u{e4}\n").unwrap();
    pages.area(1).unwrap().store_u32(64, 7);
    ours.notify();
    let new = hand_over(&dir, old);
    let host: &dyn host::Back = &new;
    let ring = host.map(1, pages.grefs[1]).unwrap();
    assert_eq!(ring.area().unwrap().load_u32(64), 7);
    // An event of before, and one of now.
    let theirs = host.bind(1, port).unwrap();
    assert!(theirs.ack());
    theirs.notify();
    assert!(ours.ack());
    // Its keys are there, with their permissions; its connection to the store is another one.
    let fs = front.store().unwrap();
    assert_eq!(fs.read("device/vif/0/state").unwrap().as_deref(), Some("4"));
    assert_eq!(fs.read("device/vif/0/odd").unwrap().as_deref(), Some("\u{e4}\n"));
    assert!(fs.write("/local/domain/0/backend/vif/1/0/state", "6").is_err());
    // New channels have new numbers.
    let (next, _channel) = front.channel(0).unwrap();
    assert!(next > port);
    // It is destroyed with its connection, and the directory with the last process.
    drop((front, pages, ours));
    let bs = host.store().unwrap();
    let back_dir = "/local/domain/0/backend/vif/1/0/state";
    bs.write(back_dir, "6").unwrap();
    eventually("the domain to end", || bs.read(back_dir).unwrap().is_none());
    drop((theirs, bs, ring));
    drop(new);
    assert!(!dir.exists());
}

#[test]
fn paused_directory_serves_what_came_meanwhile() {
    let dir = dir();
    let back = Back::open(&dir, &os::Permissions::OWNER).unwrap();
    for _ in 0..3 {
        back.pause();
        back.pause();
        let at = dir.clone();
        let front = std::thread::spawn(move || Front::open(&at).map(|front| front.store()));
        std::thread::sleep(Duration::from_millis(20));
        back.resume().unwrap();
        back.resume().unwrap();
        let store = front.join().unwrap().unwrap();
        drop(store);
        let bs = host::Back::store(&back).unwrap();
        eventually("the domain to end", || {
            bs.list("/local/domain/0/backend/vif/1").unwrap_or_default().is_empty()
        });
    }
}

/// State with descriptors that are missing, or not the ones of a front end.
#[test]
fn front_end_with_invalid_state_is_disconnected() {
    for keep in [2, 3, 4, 5] {
        let dir = dir();
        let old = Back::open(&dir, &os::Permissions::OWNER).unwrap();
        let front = Front::open(&dir).unwrap();
        let (_port, _channel) = front.channel(0).unwrap();
        old.pause();
        let (state, fds) = old.export();
        assert_eq!(fds.len(), 7, "two listeners, socket, memory, table, channel");
        let fds = fds[..keep].iter().map(|fd| fd.try_clone().unwrap()).collect();
        std::mem::forget(old);
        let new = Back::import(&dir, state, fds).unwrap();
        new.resume().unwrap();
        assert!(host::Back::domain(&new, 1).is_err(), "{keep}");
        // The next front end is served.
        drop(front);
        let bs = host::Back::store(&new).unwrap();
        bs.write("/local/domain/0/backend/vif/1/0/state", "6").unwrap();
        eventually("the next front end", || Front::open(&dir).is_ok());
    }
    let dir = dir();
    assert!(Back::import(&dir, BackState::default(), Vec::new()).is_err());
}

#[test]
fn front_end_that_used_all_numbers_of_channels_is_disconnected() {
    let dir = dir();
    let old = Back::open(&dir, &os::Permissions::OWNER).unwrap();
    let front = Front::open(&dir).unwrap();
    old.pause();
    let (state, fds) = old.export();
    let mut state = serde_json::to_value(&state).unwrap();
    state["guest"]["next_port"] = (u32::MAX - 1).into();
    let fds = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    std::mem::forget(old);
    let new = Back::import(&dir, serde_json::from_value(state).unwrap(), fds).unwrap();
    new.resume().unwrap();
    let (port, _channel) = front.channel(0).unwrap();
    assert_eq!(port, u32::MAX - 1);
    assert!(front.channel(0).is_err());
    // It alone.
    drop(front);
    let bs = host::Back::store(&new).unwrap();
    bs.write("/local/domain/0/backend/vif/1/0/state", "6").unwrap();
    eventually("the next front end", || Front::open(&dir).is_ok());
}

/// A queue with its front half.
struct Guest {
    tx: FrontTx,
    pages: host::Pages,
    request: Request,
    _channel: host::Channel,
}

impl Guest {
    fn new(front: &Front) -> Self {
        let pages = front.alloc(3, 0, false).unwrap();
        let tx = FrontTx::new(pages.area(0).unwrap());
        let _rx = ring::xen::FrontRx::new(pages.area(1).unwrap());
        let (tx_port, channel) = front.channel(0).unwrap();
        let (tx_ref, rx_ref) = (pages.grefs[0], pages.grefs[1]);
        let queues = vec![QueueKeys { tx_ref, rx_ref, tx_port, rx_port: None }];
        let request = Request { queues, ctrl: None, features: FrontFeatures::default() };
        Self { tx, pages, request, _channel: channel }
    }

    fn send(&mut self, ids: std::ops::Range<u16>) {
        let gref = self.pages.grefs[2];
        for id in ids {
            let request = TxRequest { gref, id, size: 60, ..TxRequest::default() };
            assert!(self.tx.add(request, &[], &[]));
        }
        self.tx.publish();
    }
}

fn frames(pair: &Pair) -> u64 {
    let mut burst = Burst::default();
    pair.ingress.lock().burst(64, Now::START, &mut burst, &mut |_| ()).unwrap();
    pair.ingress_stats.frames.get()
}

fn socket(host: &Arc<dyn host::Back>, pair: &Pair) -> Socket<Activity> {
    Socket::new(Arc::clone(host), ID, vec![pair.clone()], Activity::default())
}

#[test]
fn rings_continue_at_their_positions_whatever_the_guest_writes_there() {
    let dir = dir();
    let old = Back::open(&dir, &os::Permissions::OWNER).unwrap();
    let front = Front::open(&dir).unwrap();
    let mut guest = Guest::new(&front);
    let old: Arc<Back> = Arc::new(old);
    let pair = Pair::new();
    let mut first = socket(&(Arc::clone(&old) as Arc<dyn host::Back>), &pair);
    first.set(&UP);
    first.connect(&guest.request).unwrap();
    guest.send(0..50);
    assert_eq!(frames(&pair), 50);
    guest.send(50..80);
    let (state, fds) = first.export().unwrap();
    assert!(fds.is_empty(), "a directory has the channels");
    let at = first.positions().unwrap();
    // The guest's own harm would be to send 50 frames again.
    guest.pages.area(0).unwrap().store_u32(RSP_PROD, 0);
    old.pause();
    let (kept, fds) = old.export();
    let fds = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let new = Back::import(&dir, kept, fds).unwrap();
    new.resume().unwrap();
    let pair = Pair::new();
    let new: Arc<dyn host::Back> = Arc::new(new);
    let rings = KeptRings { state, fds: Vec::new() };
    let mut second = socket(&new, &pair).with_kept(Some(rings));
    second.set(&UP);
    second.adopt(&guest.request).unwrap();
    assert_eq!(frames(&pair), 0, "the other process serves the ring");
    let json = serde_json::to_string(&at).unwrap();
    let at: RingPositions = serde_json::from_str(&json).unwrap();
    second.resume(Some(&at)).unwrap();
    assert_eq!(frames(&pair), 30);
    let mut answered = 0;
    while guest.tx.take_response().unwrap().is_some() {
        answered += 1;
    }
    assert_eq!(answered, 80);
    // Adopted once; a position that is not one of the ring is refused.
    assert!(second.adopt(&guest.request).is_err());
    drop((first, second));
    std::mem::forget(old);
}

#[test]
fn rings_with_wrong_references_or_positions_are_refused() {
    let dir = dir();
    let host = back(&dir);
    let front = Front::open(&dir).unwrap();
    let mut guest = Guest::new(&front);
    guest.send(0..20);
    let pair = Pair::new();
    let mut bad = guest.request.clone();
    bad.queues[0].rx_ref = 1;
    let kept = || Some(KeptRings::default());
    let mut next = socket(&host, &pair).with_kept(kept());
    let refused = next.adopt(&bad).unwrap_err();
    assert!(refused.text.contains("grant"), "{}", refused.text);
    assert!(next.resume(None).is_err(), "nothing was adopted");
    // The next start maps what the front end names now.
    next.connect(&guest.request).unwrap();
    next.disconnect();
    let mut next = socket(&host, &pair).with_kept(kept());
    next.adopt(&guest.request).unwrap();
    let at = r#"{"queues":[[1000,0]],"ctrl":null,"multicast":[]}"#;
    let at: RingPositions = serde_json::from_str(at).unwrap();
    let refused = next.resume(Some(&at)).unwrap_err();
    assert!(refused.text.contains("tx ring"), "{}", refused.text);
    assert!(!pair.ingress.lock().is_up() && !pair.egress.lock().is_up());
    next.connect(&guest.request).unwrap();
    assert_eq!(frames(&pair), 20);
}

/// What a record has of a killed process, which was not paused.
#[test]
fn killed_process_leaves_what_its_clients_wrote() {
    let dir = dir();
    let old = Arc::new(Back::open(&dir, &os::Permissions::OWNER).unwrap());
    old.keep().unwrap();
    let (keeper, stop) = (Arc::clone(&old), os::eventfd().unwrap());
    let ends = stop.try_clone().unwrap();
    let keeper = std::thread::spawn(move || {
        let mut records = 0;
        loop {
            let changed = keeper.changed().unwrap();
            let ready = os::poll_readable(&[ends.as_fd(), changed], None);
            if ready[0] {
                return records;
            }
            os::drain(changed);
            records += 1;
            keeper.confirm();
        }
    });
    let front = Front::open(&dir).unwrap();
    let (port, ours) = front.channel(0).unwrap();
    let fs = front.store().unwrap();
    let (state, fds) = old.export();
    let json = serde_json::to_string(&state).unwrap();
    assert!(!json.contains("device/vif"), "the nodes are in the file");
    // Later than the record.
    fs.write("device/vif/0/state", "4").unwrap();
    os::signal(stop.as_fd());
    assert_eq!(keeper.join().unwrap(), 2, "one for the domain, one for the channel");
    old.pause();
    std::mem::forget(old);
    let fds = fds.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let new = Back::import(&dir, state, fds).unwrap();
    new.resume().unwrap();
    let fs = front.store().unwrap();
    assert_eq!(fs.read("device/vif/0/state").unwrap().as_deref(), Some("4"));
    let theirs = host::Back::bind(&new, 1, port).unwrap();
    theirs.notify();
    assert!(ours.ack());
    // A request of now gets its own reply.
    let (next, _channel) = front.channel(0).unwrap();
    assert!(next > port);
}
