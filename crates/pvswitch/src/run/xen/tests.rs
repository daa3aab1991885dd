use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread::JoinHandle;

use guest::{Connect, ConnectOptions, connect};
use shm::{Access, Domain, Mapping, Private};
use switch::poll::{Costs, Policy};
use xen_local::store::{Limits, Server};
use xen_netif::back::Tree;
use xen_netif::host::{Bound, Channel};
use xen_netif::store::wire::{Decoder, Message};
use xen_netif::store::{Store, StoreError, wire};

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
    let store = DomainStore::new(server.connect(0).unwrap()).unwrap();
    let bus = system.xen.get_mut(of).unwrap();
    let old = std::mem::replace(&mut bus.store, store);
    system.unwatch(old.as_fd(), &Event::Xenstore(of.clone()));
    system.watch_store(of).unwrap();
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
        assert!(system.xen[&of].store.is_gone() && system.xen[&of].reconnect.trouble.is_some());
        // No event is delivered for changes in this time: they are read after the reconnect.
        leave.send(()).unwrap();
        while front_state(&store).as_deref() == Some("4") {
            assert!(!thread.is_finished());
            std::thread::sleep(Duration::from_millis(1));
        }
        turn(&mut system, "connected", false);
        assert!(!system.xen[&of].store.is_gone());
        assert_eq!(system.xen[&of].reconnect.trouble, None);
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

/// A xenstored that accepts and reads. It replies to the two requests of a new connection unless
/// it is silent, and closes at the next one.
struct Peer {
    silent: AtomicBool,
    /// Reports a request that gets no reply yet.
    asked: mpsc::Sender<()>,
    /// The switch's control socket.
    control: PathBuf,
}

/// Ends a wait of the control thread: what another thread reported before is seen then.
fn wake(control: &Path) {
    let _ = UnixStream::connect(control);
}

impl Peer {
    /// Serves one connection. At a message of `resume`, it closes a silent one.
    fn serve(&self, mut stream: UnixStream, resume: &mpsc::Receiver<()>) {
        let (mut decoder, mut buf) = (Decoder::default(), [0; 4096]);
        loop {
            let Some(request) = decoder.take().unwrap() else {
                match stream.read(&mut buf) {
                    Ok(n) if n > 0 => decoder.push(&buf[..n]),
                    _ => return,
                }
                continue;
            };
            if self.silent.load(Ordering::SeqCst) {
                self.asked.send(()).unwrap();
                wake(&self.control);
                resume.recv().unwrap();
                if self.silent.load(Ordering::SeqCst) {
                    return;
                }
            }
            let (kind, payload) = match request.kind() {
                Some(wire::Kind::Read) => (wire::Kind::Error, b"ENOENT\0".as_slice()),
                Some(wire::Kind::GetDomainPath) => {
                    (wire::Kind::GetDomainPath, b"/local/domain/0\0".as_slice())
                }
                _ => return,
            };
            let mut reply = Vec::new();
            let header = request.header;
            Message::new(kind, header.req_id, header.tx_id, payload.into()).encode(&mut reply);
            stream.write_all(&reply).expect("the switch still waits for it");
        }
    }
}

/// A host that connects to a path in place of its own store, for as long as there is one.
struct Redirected {
    host: Arc<dyn Back>,
    path: Mutex<Option<PathBuf>>,
}

impl Back for Redirected {
    fn store(&self) -> Result<Store, StoreError> {
        match &*self.path.lock().unwrap() {
            Some(path) => Store::connect(path),
            None => self.host.store(),
        }
    }

    fn domain(&self, _: u16) -> Result<Arc<Domain>, HostError> {
        unreachable!("the vif has its own host")
    }

    fn private(&self, len: usize) -> Option<Private> {
        self.host.private(len)
    }

    fn map_page(&self, _: u16, _: u32, _: Access) -> Result<(Arc<Mapping>, usize), HostError> {
        unreachable!("the vif has its own host")
    }

    fn bind(&self, _: u16, _: u32) -> Result<Channel, HostError> {
        unreachable!("the vif has its own host")
    }

    fn rebind(&self, _: u16, _: u32, _: Bound) -> Result<Channel, HostError> {
        unreachable!("the vif has its own host")
    }

    fn unbind(&self, _: &Bound) {}

    fn claimed_by(&self, _: u16, _: u32) -> Option<String> {
        None
    }

    fn send_online(&self, _: u16, _: u32) -> std::io::Result<bool> {
        Ok(true)
    }
}

#[test]
fn xenstored_that_hangs_does_not_block_the_control_thread_and_vifs_continue_when_it_replies() {
    let dir = std::env::temp_dir().join(format!("pvs-hang-{}", std::process::id()));
    let (of, control) = (Hypervisor::Local(dir.clone()), dir.with_extension("ctl"));
    let mut system = system(control.clone());
    system.add_port(&format!("a=xen-local:{}", dir.display()).parse().unwrap()).unwrap();
    let (leave, thread) = guest(&dir);
    turn(&mut system, "connected", true);

    let path = dir.with_extension("hang");
    let listener = UnixListener::bind(&path).unwrap();
    let (asked, is_asked) = mpsc::channel();
    let (resume, resumed) = mpsc::channel();
    let peer = Arc::new(Peer { silent: AtomicBool::new(false), asked, control: control.clone() });
    let served = std::thread::spawn({
        let peer = Arc::clone(&peer);
        move || listener.incoming().take(2).for_each(|s| peer.serve(s.unwrap(), &resumed))
    });
    let host = Arc::clone(&system.xen[&of].host);
    let redirected = Arc::new(Redirected { host, path: Mutex::new(Some(path.clone())) });
    let bus = system.xen.get_mut(&of).unwrap();
    bus.host = redirected.clone();
    let store = DomainStore::new(bus.host.store().unwrap()).unwrap();
    store.set_reply_wait(REPLY_WAIT);
    let old = std::mem::replace(&mut bus.store, store);
    system.unwatch(old.as_fd(), &Event::Xenstore(of.clone()));
    system.watch_store(&of).unwrap();

    // A connected one: a single request is waited for, and not for long.
    peer.silent.store(true, Ordering::SeqCst);
    system.poll_vif("a");
    let why = system.xen[&of].reconnect.trouble.clone().unwrap();
    assert!(why.0.contains("no reply within 1 s"), "{}", why.0);
    is_asked.recv().unwrap();
    resume.send(()).unwrap();

    // The next connection: operators are served while it waits.
    while is_asked.try_recv().is_err() {
        assert!(!system.stop, "no further connection");
        system.round().unwrap();
    }
    let (replied, shown) = mpsc::channel();
    let asks = std::thread::spawn(move || {
        replied.send(api::control::call(&control, &api::Request::Show).unwrap()).unwrap();
        wake(&control);
    });
    let shown = loop {
        if let Ok(shown) = shown.try_recv() {
            break shown;
        }
        assert!(!system.stop, "no reply to an operator");
        system.round().unwrap();
    };
    asks.join().unwrap();
    assert_eq!(shown["ports"][0]["xen"]["xenstore"], "lost");
    turn(&mut system, "lost", true);
    // The same connection is used when it replies, until the peer closes it; then the real store.
    peer.silent.store(false, Ordering::SeqCst);
    *redirected.path.lock().unwrap() = None;
    resume.send(()).unwrap();
    turn(&mut system, "connected", true);
    served.join().unwrap();
    leave.send(()).unwrap();
    turn(&mut system, "connected", false);
    thread.join().unwrap();
    system.shutdown();
    std::fs::remove_file(path).unwrap();
}
