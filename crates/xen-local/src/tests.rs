//! Both halves of a host in one process; and those tests of `xen-netif` that need a host.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use os::{Carries, Until};
use shm::{Copies, Failed, Seg, SegMut};
use xen_netif::host::{self, Front as _, HostError, SharedChannel};

use super::*;

mod domain_store;
mod handover;
mod plug;
mod rings;

/// A unique directory, created and removed by the host.
fn dir() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("pvswitch-host-{}-{n}", std::process::id()))
}

/// Host interface of the back half.
fn back(dir: &Path) -> Arc<dyn host::Back> {
    Arc::new(Back::open(dir, &os::Permissions::OWNER).unwrap())
}

fn readable(fd: &OwnedFd) -> bool {
    let soon = Instant::now() + Duration::from_millis(50);
    os::wait(fd.as_fd(), Until::Readable, soon).unwrap()
}

fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < end, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn why<T, E: std::error::Error>(got: Result<T, E>) -> String {
    got.err().expect("refused").to_string()
}

#[test]
fn both_halves_connect_and_clean_up() {
    let dir = dir();
    let back = back(&dir);
    let front = Front::open(&dir).unwrap();
    assert_eq!(front.store().unwrap().vifs().unwrap(), [0]);
    let (fs, bs) = (front.store().unwrap(), back.store().unwrap());
    let peer = fs.read("device/vif/0/backend").unwrap().unwrap();
    assert_eq!(bs.list("/local/domain/0/backend/vif/1").unwrap(), ["0"]);
    assert_eq!(bs.read(&format!("{peer}/online")).unwrap().as_deref(), Some("1"));
    fs.write("device/vif/0/state", "4").unwrap();
    let theirs = bs.read(&format!("{peer}/frontend")).unwrap().unwrap();
    assert_eq!(bs.read(&format!("{theirs}/state")).unwrap().as_deref(), Some("4"));
    assert!(fs.write(&format!("{peer}/state"), "6").is_err(), "not permitted for a guest");
    let mac = fs.read("device/vif/0/mac").unwrap().unwrap();
    assert!(mac.starts_with("00:16:3e:") && mac.len() == 17, "{mac}");

    let pages = front.alloc(2, 0, false).unwrap();
    let ring = back.map(1, pages.grefs[1]).unwrap();
    pages.area(1).unwrap().store_u32(64, 7);
    assert_eq!(ring.area().unwrap().load_u32(64), 7);
    ring.area().unwrap().store_u32(0, 9);
    assert_eq!(pages.area(1).unwrap().load_u32(0), 9);

    let (port, ours) = front.channel(0).unwrap();
    let theirs = back.bind(1, port).unwrap();
    assert!(!readable(&ours.fd()) && !ours.ack());
    theirs.notify();
    theirs.notify();
    assert!(readable(&ours.fd()) && ours.ack() && !ours.ack());
    ours.notify();
    assert!(readable(&theirs.fd()) && theirs.ack() && !readable(&theirs.fd()));
    drop((ours, fs, bs));
    eventually("the port to close", || back.bind(1, port).is_err());
    drop((front, back));
    assert!(!dir.exists(), "removed");
}

#[test]
fn grants_are_copied_as_permitted_by_the_table() {
    let dir = dir();
    let back = back(&dir);
    let front = Front::open(&dir).unwrap();
    let writable = front.alloc(1, 0, false).unwrap();
    let readonly = front.alloc(1, 0, true).unwrap();
    let others = front.alloc(1, 5, false).unwrap();
    let ended = front.alloc(1, 0, false).unwrap().grefs[0];
    let domain = back.domain(1).unwrap();
    writable.memory.seg_mut(100, 4, &mut 0).unwrap().write(b"abcd");
    readonly.memory.seg_mut(0, 4, &mut 0).unwrap().write(b"wxyz");
    let read = |gref: u32, offset: u16| {
        let mut out = *b"....";
        let mut copies = Copies::new();
        let mut bad = None;
        let mut to = SegMut::of(&mut out);
        copies.copy(&mut to, Seg::granted(&domain, gref, offset, 4).unwrap(), 0);
        copies.finish(|_, whose| bad = Some(whose));
        bad.map_or(Ok(out), Err)
    };
    assert_eq!(read(writable.grefs[0], 100), Ok(*b"abcd"));
    assert_eq!(read(readonly.grefs[0], 0), Ok(*b"wxyz"));
    for gref in [0, 7, others.grefs[0], ended, u32::MAX - 1] {
        assert_eq!(read(gref, 0), Err(Failed::Source), "{gref}");
    }
    let write = |gref: u32| {
        let mut copies = Copies::new();
        let mut bad = None;
        let mut to = SegMut::granted(&domain, gref, 4092, 4).unwrap();
        copies.copy(&mut to, Seg::granted(&domain, writable.grefs[0], 100, 4).unwrap(), 0);
        copies.finish(|_, whose| bad = Some(whose));
        bad
    };
    assert_eq!(write(writable.grefs[0]), None);
    assert_eq!(read(writable.grefs[0], 4092), Ok(*b"abcd"));
    assert_eq!(write(readonly.grefs[0]), Some(Failed::Destination));
    assert!(why(back.map(1, readonly.grefs[0])).contains("read-only"));
    assert!(why(back.map(1, ended)).contains("not in use"));
    assert!(why(back.map(1, others.grefs[0])).contains("another domain"));
    assert!(why(back.map(1, u32::MAX)).contains("no such entry"));
    assert!(why(back.map(2, 8)).contains("domain 2 does not exist"));
    assert!(why(back.bind(1, 77)).contains("no such port"));

    let grants = [(writable.grefs[0], false), (readonly.grefs[0], true)];
    let pages = back.map_static(1, &grants).unwrap();
    let mut out = [0; 4];
    pages[1].seg(0, 4).unwrap().read(&mut out);
    assert_eq!(&out, b"wxyz");
    assert!(pages[1].seg_mut(0, 4).is_none() && pages[0].seg_mut(4090, 6).is_some());
    assert!(pages[0].seg(4090, 7).is_none() && pages[0].seg(u16::MAX, u16::MAX).is_none());
    assert!(back.map_static(1, &[grants[0], (readonly.grefs[0], false)]).is_err());
    drop(front);
    eventually("the domain to be removed", || back.domain(1).is_err());
    assert_eq!(read(writable.grefs[0], 100), Err(Failed::Source), "removed with its domain");
}

#[test]
fn copies_between_two_directories_are_one_batch() {
    let (one, two) = (dir(), dir());
    let backs = [&one, &two].map(|dir| back(dir));
    let fronts = [&one, &two].map(|dir| Front::open(dir).unwrap());
    let pages = fronts.each_ref().map(|f| f.alloc(1, 0, false).unwrap());
    let domains = backs.each_ref().map(|b| b.domain(1).unwrap());
    assert_ne!(domains[0].id(), domains[1].id());
    pages[0].memory.seg_mut(0, 5, &mut 0).unwrap().write(b"hello");
    let mut copies = Copies::new();
    let mut to = SegMut::granted(&domains[1], pages[1].grefs[0], 10, 5).unwrap();
    copies.copy(&mut to, Seg::granted(&domains[0], pages[0].grefs[0], 0, 5).unwrap(), 3);
    copies.finish(|tag, whose| panic!("{tag} {whose:?}"));
    let mut out = [0; 5];
    pages[1].memory.seg(10, 5, &mut 0).unwrap().read(&mut out);
    assert_eq!(&out, b"hello");
}

#[test]
fn released_pages_are_zeroed_before_reuse() {
    let dir = dir();
    let _back = back(&dir);
    let front = Front::open(&dir).unwrap();
    let first = front.alloc(3, 0, false).unwrap();
    first.memory.seg_mut(4096, 6, &mut 0).unwrap().write(b"secret");
    let grefs = first.grefs.clone();
    drop(first);
    let again = front.alloc(3, 0, false).unwrap();
    assert_eq!(again.grefs, grefs);
    assert_eq!(again.memory.seg(4096, 6, &mut 0).unwrap().first::<6>(), Some([0; 6]));
    assert!(why(front.alloc(1 << 20, 0, false)).contains("use fewer queues"));
}

/// A front end that sends arbitrary messages.
fn hostile(dir: &Path, bytes: &[u8], fds: &[&OwnedFd]) -> OwnedFd {
    let socket = os::connect(&dir.join("hypervisor"), Carries::Messages).unwrap();
    let fds: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    os::send(socket.as_fd(), bytes, &fds).unwrap();
    socket
}

fn words(words: [u32; 3]) -> Vec<u8> {
    let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    bytes.resize(16, 0);
    bytes
}

#[test]
fn invalid_front_ends_are_disconnected() {
    let dir = dir();
    let back = back(&dir);
    let memory = || rustix::fs::memfd_create("t", rustix::fs::MemfdFlags::empty()).unwrap();
    let (short, event) = (memory(), os::eventfd().unwrap());
    let path = dir.join("file");
    std::fs::write(&path, vec![0; 1 << 16]).unwrap();
    let file = OwnedFd::from(std::fs::File::open(&path).unwrap());
    std::fs::remove_file(&path).unwrap();
    let cases: [(Vec<u8>, Vec<&OwnedFd>); 11] = [
        (vec![1], vec![]),
        (vec![0xff; 16], vec![]),
        (vec![0; 64], vec![]),
        (vec![7; 5000], vec![]),
        (words([1, 1, 1]), vec![]),
        (words([1, 1, 1]), vec![&short]),
        (words([1, 1, 1]), vec![&short, &short]),
        (words([1, 1, 1]), vec![&event, &event]),
        (words([1, 1, 4]), vec![&file, &file]),
        (words([1, 1, u32::MAX]), vec![&short, &short]),
        (words([1, 1, 1]), vec![&short; 4]),
    ];
    for (bytes, fds) in &cases {
        let socket = hostile(&dir, bytes, fds);
        let deadline = Instant::now() + Duration::from_secs(10);
        assert!(os::wait(socket.as_fd(), Until::Readable, deadline).unwrap(), "{bytes:?}");
        let got = os::recv(socket.as_fd(), &mut [0; 64], &mut Vec::new(), 0).unwrap();
        assert_eq!(got, os::Received::Closed, "{bytes:?}");
    }
    // A request for a port before HELLO.
    let early = hostile(&dir, &words([3, 0, 0]), &[]);
    drop(early);
    let front = Front::open(&dir).unwrap();
    assert_eq!(front.store().unwrap().vifs().unwrap(), [0]);
    drop(front);
    drop(back);
    assert!(!dir.exists());
}

#[test]
fn a_front_end_that_truncates_its_memory_is_survived() {
    let dir = dir();
    let back = back(&dir);
    let [memory, table] = ["m", "t"].map(|name| {
        let fd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::empty()).unwrap();
        rustix::fs::ftruncate(&fd, 1 << 16).unwrap();
        fd
    });
    // Entry 8: in use, for domain 0, frame 2. Entry 9: a frame outside its memory.
    let entries = [[1_u16, 0, 2, 0], [1, 0, 16, 0]].concat();
    let bytes: Vec<u8> = entries.iter().flat_map(|w| w.to_le_bytes()).collect();
    rustix::io::pwrite(&table, &bytes, 8 * 8).unwrap();
    let _socket = hostile(&dir, &words([1, 1, 16]), &[&memory, &table]);
    eventually("the domain", || back.domain(1).is_ok());
    let ring = back.map(1, 8).unwrap();
    assert!(why(back.map(1, 9)).contains("outside the domain"));
    let area = ring.area().unwrap();
    area.store_u32(0, 5);
    assert!(!ring.is_lost());
    rustix::fs::ftruncate(&memory, 0).unwrap();
    rustix::fs::ftruncate(&table, 0).unwrap();
    assert_eq!(area.load_u32(0), 0);
    assert!(ring.is_lost());
    assert!(why(back.map(1, 8)).contains("not in use"));
}

#[test]
fn a_killed_front_end_makes_room_for_the_next() {
    let dir = dir();
    let back = back(&dir);
    let store = back.store().unwrap();
    let node = |key: &str| format!("/local/domain/0/backend/vif/1/0/{key}");
    let first = Front::open(&dir).unwrap();
    store.write(&node("state"), "4").unwrap();
    let old = first.store().unwrap();
    drop(first);
    // The back half notices, and closes before the directory is removed.
    eventually("online to fall", || store.read(&node("online")).unwrap().as_deref() == Some("0"));
    assert_eq!(store.read("/local/domain/1/device/vif/0/state").unwrap(), None);
    assert!(old.read("device/vif/0/state").unwrap_err().is_gone(), "its connection was closed");
    let next = std::thread::spawn({
        let dir = dir.clone();
        move || Front::open(&dir).map(|f| f.store().unwrap().vifs())
    });
    std::thread::sleep(Duration::from_millis(50));
    assert!(!next.is_finished(), "it waits for the back half");
    store.write(&node("state"), "6").unwrap();
    assert_eq!(next.join().unwrap().unwrap().unwrap(), [0]);
}

#[test]
fn invalid_directories() {
    let dir = dir();
    assert!(why(Front::open(&dir)).contains("start the other side first"));
    let back = back(&dir);
    assert!(
        why(Back::open(&dir, &os::Permissions::OWNER))
            .contains("this process listens there already")
    );
    assert!(dir.join("xenstored").exists(), "the first one still serves");
    drop(back);
    assert!(why(Back::open(&dir.join("a/b"), &os::Permissions::OWNER)).contains("cannot create"));
    // Files left by a killed process are replaced.
    std::fs::create_dir(&dir).unwrap();
    for name in ["xenstored", "hypervisor"] {
        drop(std::os::unix::net::UnixListener::bind(dir.join(name)).unwrap());
    }
    drop(Back::open(&dir, &os::Permissions::OWNER).unwrap());
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
    std::fs::remove_dir(&dir).unwrap();
}

/// As in Xen: two readers of one channel would consume each other's events.
#[test]
fn a_channel_is_bound_once_at_a_time() {
    let dir = dir();
    let back = back(&dir);
    let front = Front::open(&dir).unwrap();
    let (port, _ours) = front.channel(0).unwrap();
    let first = back.bind(1, port).unwrap();
    assert!(why(back.bind(1, port)).contains("cannot be bound: already bound"));
    assert!(why(back.bind(1, port + 1)).contains("no such port"));
    drop(first);
    drop(back.bind(1, port).unwrap());
    drop(back.bind(1, port).unwrap());
}

/// XSA-332 and XSA-391: any number of events from the other end wakes a sleeping reader once.
#[test]
fn a_storm_of_events_is_one_event() {
    let dir = dir();
    let back = back(&dir);
    let front = Front::open(&dir).unwrap();
    let (port, ours) = front.channel(0).unwrap();
    let theirs = back.bind(1, port).unwrap();
    for (from, to) in [(&ours, &theirs), (&theirs, &ours)] {
        (0..100_000).for_each(|_| from.notify());
        assert!(readable(&to.fd()) && to.ack());
        assert!(!to.ack() && !readable(&to.fd()));
    }
}

/// O_NONBLOCK of an eventfd is that of all who have it.
#[test]
fn front_end_that_makes_its_channel_blocking_blocks_neither_ack_nor_notify() {
    let dir = dir();
    let back = back(&dir);
    let memory = os::memfd("t", 1 << 16).unwrap();
    let socket = hostile(&dir, &words([1, 1, 1]), &[&memory, &memory]);
    let reply = |fds: &mut Vec<OwnedFd>| {
        let deadline = Instant::now() + Duration::from_secs(10);
        assert!(os::wait(socket.as_fd(), Until::Readable, deadline).unwrap());
        let mut bytes = [0; 64];
        os::recv(socket.as_fd(), &mut bytes, fds, 2).unwrap();
        u32::from_le_bytes(bytes[4..8].try_into().unwrap())
    };
    reply(&mut Vec::new());
    os::send(socket.as_fd(), &words([3, 0, 0]), &[]).unwrap();
    let mut fds = Vec::new();
    let port = reply(&mut fds);
    let [to_front, to_back] = <[OwnedFd; 2]>::try_from(fds).unwrap();
    for event in [&to_front, &to_back] {
        let flags = rustix::fs::fcntl_getfl(event).unwrap();
        rustix::fs::fcntl_setfl(event, flags - rustix::fs::OFlags::NONBLOCK).unwrap();
    }
    rustix::io::write(&to_front, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let channel = back.bind(1, port).unwrap();
    let (done, ends) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let acked = channel.ack();
        channel.notify();
        done.send(acked).unwrap();
    });
    assert_eq!(ends.recv_timeout(Duration::from_secs(20)), Ok(false), "it blocked");
}

#[test]
fn both_halves_of_a_shared_channel_get_every_event() {
    use rustix::event::epoll;
    let dir = dir();
    let back = back(&dir);
    let front = Front::open(&dir).unwrap();
    let (port, theirs) = front.channel(0).unwrap();
    let halves = SharedChannel::pair(back.bind(1, port).unwrap()).unwrap();
    // As in workers: edge-triggered, without reading the descriptor.
    let sets = halves.each_ref().map(|half| {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let edge = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&set, &*half.fd(), epoll::EventData::new_u64(0), edge).unwrap();
        set
    });
    let events = |set: &OwnedFd| {
        let mut events = Vec::with_capacity(4);
        let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        epoll::wait(set, rustix::buffer::spare_capacity(&mut events), Some(&none)).unwrap()
    };
    use xen_netif::port::Event as _;
    for round in 0..4 {
        theirs.notify();
        // One consumes it before the other has checked.
        let first = round % 2;
        assert_eq!(events(&sets[first]), 1, "round {round}");
        halves[first].ack();
        assert_eq!(events(&sets[1 - first]), 1, "round {round}: consumed by the other");
        halves[1 - first].ack();
        assert_eq!((events(&sets[0]), events(&sets[1])), (0, 0), "round {round}");
    }
    // Neither acks between two events: both are notified again.
    theirs.notify();
    assert_eq!((events(&sets[0]), events(&sets[1])), (1, 1));
    theirs.notify();
    assert_eq!((events(&sets[0]), events(&sets[1])), (1, 1));
    halves[0].notify();
    assert!(readable(&theirs.fd()));
}
