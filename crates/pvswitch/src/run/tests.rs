use std::path::Path;

use switch::port::Fault;

use super::*;

/// A directory, removed on drop.
pub(super) struct Dir(pub(super) PathBuf);

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Options of a switch without ports.
pub(super) fn options(control: PathBuf) -> Options {
    Options {
        config: Config::default(),
        origin: Origin::default(),
        include: None,
        policy: Policy::Event,
        call: Policy::Event,
        workers: 1,
        placement: Placement::Single,
        cpus: Vec::new(),
        priority: os::Priority::Normal,
        sandbox: os::Sandbox::Off,
        mode: Mode::Switch,
        control: Some(control),
        http: None,
        control_access: Access::default(),
        control_write: false,
        http_access: Access::default(),
        duration: None,
        ageing_s: 300,
        addresses_per_port: 16,
        hints: false,
    }
}

/// A switch whose control thread is driven by the test, and the directory of its sockets.
fn system(name: &str) -> (System, Dir) {
    let dir = std::env::temp_dir().join(format!("pvs-run-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let options = options(dir.join("ctl"));
    let system = System::new(options, Inherited::default(), None);
    (system.unwrap(), Dir(dir))
}

fn add(system: &mut System, dir: &Path, name: &str) {
    let spec = format!("{name}=vhost-user:{}", dir.join(name).display());
    system.add_port(&spec.parse().unwrap()).unwrap();
}

/// Connects a front-end to a port. Returns it and its epoch.
fn attach(system: &mut System, dir: &Path, name: &str) -> (UnixStream, u64) {
    let front = UnixStream::connect(dir.join(name)).unwrap();
    system.accept_peer(name);
    assert!(is_attached(system, name));
    (front, system.ports[name].port.epoch())
}

fn is_attached(system: &System, name: &str) -> bool {
    match &system.ports[name].attach {
        Attach::VhostUser(vhost) => vhost.connection.is_some(),
        _ => false,
    }
}

/// Reports this many faults of a port in an epoch.
fn report(system: &mut System, port: PortId, epoch: u64, times: usize) {
    for _ in 0..times {
        let fault = Fault("broken".into());
        system.pool.report(Report::Port(PortEvent::Fault { port, epoch, fault }));
    }
    system.read_reports();
}

/// Issue 14, row 14.
#[test]
fn fault_is_counted_once_per_connection() {
    let (mut system, dir) = system("once");
    add(&mut system, &dir.0, "a");
    let id = system.ports["a"].port.id;
    for n in 1..=3 {
        let (_front, epoch) = attach(&mut system, &dir.0, "a");
        // From both rings, by several workers, before and after the end of the connection.
        report(&mut system, id, epoch, 3);
        assert_eq!((system.ports["a"].faults, is_attached(&system, "a")), (n, false));
        report(&mut system, id, epoch, 1);
        let (_next, _) = attach(&mut system, &dir.0, "a");
        report(&mut system, id, epoch, 2);
        assert_eq!((system.ports["a"].faults, is_attached(&system, "a")), (n, true));
        system.disconnect("a", "front-end disconnected");
    }
    system.shutdown();
}

/// Issue 14, row 14.
#[test]
fn fault_of_a_removed_port_is_not_charged_to_the_next_port_with_its_id() {
    let (mut system, dir) = system("reused");
    add(&mut system, &dir.0, "a");
    let (_front, epoch) = attach(&mut system, &dir.0, "a");
    let id = system.ports["a"].port.id;
    system.del_port("a").unwrap();
    add(&mut system, &dir.0, "b");
    assert_eq!(system.ports["b"].port.id, id);
    let (_front, own) = attach(&mut system, &dir.0, "b");
    report(&mut system, id, epoch, 2);
    assert_eq!((system.ports["b"].faults, is_attached(&system, "b")), (0, true));
    report(&mut system, id, own, 1);
    assert_eq!((system.ports["b"].faults, is_attached(&system, "b")), (1, false));
    system.shutdown();
}
