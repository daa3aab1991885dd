//! A switch whose state a service manager keeps: a slow one, and one that does not read.

mod common;

use std::collections::BTreeSet;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use common::{Bystanders, Dir, Switch, pvswitch, upgrade, wait_for};
use os::{Received, Until};

/// What a manager received, and the barriers that it holds.
#[derive(Default)]
struct State {
    /// Lines, but `STATUS=`.
    lines: Vec<String>,
    /// Names of stored descriptors.
    stored: BTreeSet<String>,
    holds: bool,
    barriers: Vec<OwnedFd>,
    ends: bool,
}

/// A service manager, as far as a switch sees it: a socket whose messages a thread handles.
struct Manager {
    socket: Arc<UnixDatagram>,
    state: Arc<Mutex<State>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Manager {
    fn start(dir: &Dir) -> Self {
        let socket = Arc::new(UnixDatagram::bind(dir.path("notify")).unwrap());
        let state = Arc::default();
        let mut manager = Self { socket, state, thread: None };
        manager.read();
        manager
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Begins to read.
    fn read(&mut self) {
        self.state().ends = false;
        let (socket, state) = (Arc::clone(&self.socket), Arc::clone(&self.state));
        self.thread = Some(std::thread::spawn(move || {
            while !state.lock().unwrap().ends {
                let soon = Instant::now() + Duration::from_millis(20);
                if os::wait(socket.as_fd(), Until::Readable, soon).unwrap() {
                    state.lock().unwrap().handle(&socket);
                }
            }
        }));
    }

    /// Reads no more.
    fn stop(&mut self) {
        self.state().ends = true;
        self.thread.take().into_iter().for_each(|thread| thread.join().unwrap());
    }

    /// Reads no more, and has no room for another message.
    fn fill(&mut self, dir: &Dir) {
        self.stop();
        let socket = UnixDatagram::unbound().unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.send_to(b"filler", dir.path("notify")).is_ok() {}
    }

    /// Starts a switch that this manager keeps.
    fn switch(&self, dir: &Dir) -> Switch {
        let mut command = pvswitch();
        command.args(["run", "--quiet", "--keep", "--control", &dir.text("ctl")]);
        command.args(["--port", &dir.port("a", ""), "--port", &dir.port("b", "")]);
        command.env("NOTIFY_SOCKET", dir.path("notify"));
        Switch::spawn(dir, command)
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.stop();
    }
}

impl State {
    fn handle(&mut self, socket: &UnixDatagram) {
        let (mut bytes, mut fds) = ([0; 4096], Vec::new());
        let Ok(Received::Bytes(len)) = os::recv(socket.as_fd(), &mut bytes, &mut fds, 1) else {
            return;
        };
        let text = String::from_utf8(bytes[..len].to_vec()).unwrap();
        self.lines.extend(text.lines().filter(|l| !l.starts_with("STATUS=")).map(String::from));
        let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
        match text.lines().next() {
            Some("FDSTORE=1") => _ = self.stored.insert(name.unwrap().into()),
            Some("FDSTOREREMOVE=1") => _ = self.stored.remove(name.unwrap()),
            Some("BARRIER=1") if self.holds => self.barriers.append(&mut fds),
            _ => {}
        }
    }

    /// Names of records: what is between `pvswitch-` and the number of the version.
    fn records(&self) -> Vec<&str> {
        self.stored.iter().map(|name| name.split('-').nth(1).unwrap()).collect()
    }
}

#[test]
fn frames_pass_during_an_upgrade_while_the_manager_does_not_handle_it() {
    let dir = Dir::new();
    let manager = Manager::start(&dir);
    let mut switch = manager.switch(&dir);
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    manager.state().holds = true;
    let next = upgrade(&switch);
    wait_for("the barrier", || !manager.state().barriers.is_empty());
    pair.wait_for_replies(&switch);
    assert!(switch.process.lives(), "the manager finds it by its process");
    // Descriptors are taken from the main process only.
    let main = format!("MAINPID={}", next.0);
    let stored = |state: &State| {
        let at = state.lines.iter().position(|line| *line == main).unwrap();
        state.lines[at..].iter().any(|line| line.starts_with("FDNAME=pvswitch-switch-"))
    };
    wait_for("the records of the next process", || stored(&manager.state()));
    manager.state().barriers.clear();
    assert!(switch.process.wait().success());
    pair.wait_for_replies(&switch);
    pair.end();
    switch.shut_down(&dir);
}

#[test]
fn switch_continues_without_a_manager_that_reads_and_is_kept_again_once_it_does() {
    let dir = Dir::new();
    let mut manager = Manager::start(&dir);
    let switch = manager.switch(&dir);
    let pair = Bystanders::start(&switch, &dir, "a", "b");
    let keep = || switch.json(&["show"])["keep"].clone();
    let all = ["live", "p0", "p1", "switch"];
    wait_for("all records", || manager.state().records() == all);
    assert_eq!(keep(), "on");
    manager.fill(&dir);
    // Its record cannot be stored, the outdated one cannot be removed, and the status line, which
    // has the number of ports, cannot be sent.
    switch.json(&["add-port", "n=null"]);
    assert_eq!(keep(), "failed");
    assert!(switch.log().contains("cannot keep the switch's state"), "{}", switch.log());
    let before = switch.pid();
    let refused = switch.ctl(&["upgrade", env!("CARGO_BIN_EXE_pvswitch")]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && text.contains("manager or keeper does not read"),
        "{text}"
    );
    assert_eq!(switch.pid(), before);
    pair.wait_for_replies(&switch);
    assert_eq!(keep(), "failed");
    // What is outdated goes first, and nothing of it is left at the end.
    let stored = manager.state().stored.clone();
    manager.state().lines.clear();
    manager.read();
    wait_for("the state to be kept", || keep() == "on");
    let all = ["live", "p0", "p1", "p2", "switch"];
    wait_for("all records", || manager.state().records() == all);
    let state = manager.state();
    assert!(state.stored.is_disjoint(&stored), "{:?}", state.stored);
    let names = state.lines.iter().filter(|line| line.starts_with("FDNAME="));
    let first = names.clone().next().unwrap();
    assert!(first.starts_with("FDNAME=pvswitch-switch-"), "{:?}", names.collect::<Vec<_>>());
    assert!(state.lines.contains(&"FDSTOREREMOVE=1".into()));
    drop(state);
    pair.end();
    switch.shut_down(&dir);
    wait_for("an empty store", || manager.state().stored.is_empty());
}
