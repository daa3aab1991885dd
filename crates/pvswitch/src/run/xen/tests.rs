use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;

use guest::{Connect, ConnectOptions, connect};
use switch::poll::{Costs, Policy};
use xen_local::store::{Limits, Server};
use xen_netif::back::Tree;
use xen_netif::store::Store;

use super::*;
use crate::run::Inherited;
use crate::run::Options;
use crate::run::tests::options;

/// A switch whose control thread is driven by the tests.
fn system(control: PathBuf) -> System {
    // Limits the time to wait for an event.
    let duration = Some(Duration::from_secs(20));
    let options = Options { duration, ..options(control) };
    System::new(options, Inherited::default(), None).unwrap()
}

fn show(system: &System) -> Value {
    let state = &system.ports["a"];
    let Attach::Xen(port) = &state.attach else { panic!("the port is a vif") };
    system.show_xen(state, port)
}

#[test]
fn control_ring_takes_a_twentieth_of_the_control_thread() {
    assert_eq!(control_rest(Duration::ZERO), CONTROL_INTERVAL);
    assert_eq!(control_rest(Duration::from_millis(3)), Duration::from_millis(60));
}

/// Runs rounds until xenstore is in this state and the guest is connected or gone.
fn turn(system: &mut System, xenstore: &str, guest: bool) {
    let (queues, front) = if guest { (1, "Connected") } else { (0, "Unknown") };
    loop {
        let shown = show(system);
        if shown["xenstore"] == xenstore && shown["queues"] == queues && shown["front"] == front {
            return;
        }
        assert!(!system.stop, "timed out waiting for {xenstore}, {front}: {shown}");
        system.round().unwrap();
    }
}

/// A guest that connects, and disconnects on a message.
fn guest(dir: &Path) -> (mpsc::Sender<()>, JoinHandle<()>) {
    let args = ConnectOptions {
        connect: format!("xen-local:{}", dir.display()),
        queues: 1,
        queue_size: 32,
        packed: false,
        in_order: false,
        poll: None,
        kick: Policy::Event,
        set: Vec::new(),
        costs: || Costs::TYPICAL,
    };
    let to = Connect::try_from(&args).unwrap();
    let (leave, left) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let end = Instant::now() + Duration::from_secs(20);
        let _guest = connect(&to, Some(&|| Instant::now() < end)).unwrap();
        let _ = left.recv();
    });
    (leave, thread)
}

/// Replaces the switch's xenstore by one that ends at once. Its host keeps the original.
fn end_xenstore(system: &mut System, of: &Hypervisor) {
    let server = Server::start(Limits::XENSTORED).unwrap();
    let home = Home::new(server.connect(0).unwrap()).unwrap();
    let bus = system.xen.get_mut(of).unwrap();
    let old = std::mem::replace(&mut bus.home, home);
    system.unwatch(old.as_fd(), &Event::Xenstore(of.clone()));
    system.watch_home(of).unwrap();
}

fn front_state(store: &Store) -> Option<String> {
    store.read("/local/domain/1/device/vif/0/state").unwrap()
}

#[test]
fn rings_survive_a_restart_of_xenstore_and_changes_are_read_afterwards() {
    let dir = std::env::temp_dir().join(format!("pvs-gone-{}", std::process::id()));
    let of = Hypervisor::Local(dir.clone());
    let mut system = system(dir.with_extension("ctl"));
    system.add_port(&format!("a=xen-local:{}", dir.display()).parse().unwrap()).unwrap();
    let store = system.xen[&of].host.store().unwrap();
    // Twice, to cover a repeated loss.
    for _ in 0..2 {
        let (leave, thread) = guest(&dir);
        turn(&mut system, "connected", true);
        end_xenstore(&mut system, &of);
        turn(&mut system, "lost", true);
        assert!(system.xen[&of].home.is_gone() && system.xen[&of].trouble.is_some());
        // No event is delivered for changes in this time: they are read after the reconnect.
        leave.send(()).unwrap();
        while front_state(&store).as_deref() == Some("4") {
            assert!(!thread.is_finished());
            std::thread::sleep(Duration::from_millis(1));
        }
        turn(&mut system, "connected", false);
        assert!(!system.xen[&of].home.is_gone());
        assert_eq!(system.xen[&of].trouble, None);
        thread.join().unwrap();
    }
    let (leave, thread) = guest(&dir);
    turn(&mut system, "connected", true);
    leave.send(()).unwrap();
    turn(&mut system, "connected", false);
    thread.join().unwrap();
    system.shutdown();
}

#[test]
fn state_says_that_a_receiver_is_stalled() {
    let of = |stalled_s: &[u64], queues| state_text("connected".into(), stalled_s, queues);
    assert_eq!(of(&[], 1), "connected");
    let why = ": its driver posts no buffers";
    assert_eq!(of(&[75], 1), format!("connected, receiver stalled for 75 s{why}"));
    assert_eq!(of(&[75, 80], 2), format!("connected, receiver stalled for 80 s{why}"));
    assert_eq!(of(&[75, 61], 4), format!("connected, 2 of 4 queues stalled for 75 s{why}"));
}
