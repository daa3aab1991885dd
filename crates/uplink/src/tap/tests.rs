use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::*;
use rustix::thread::{Gid, Uid, set_thread_res_gid, set_thread_res_uid};

/// A network namespace for one test, removed with it.
struct Netns(String);

impl Netns {
    /// `None`, with the reason printed, if this machine does not permit it.
    fn new() -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("pvs-unit-{}-{n}", std::process::id());
        let made = Command::new("ip").args(["netns", "add", &name]).output();
        match made {
            Ok(output) if output.status.success() => Some(Self(name)),
            Ok(output) => {
                println!("skipped: ip netns add: {}", String::from_utf8_lossy(&output.stderr));
                None
            }
            Err(error) => {
                println!("skipped: ip is not installed ({error})");
                None
            }
        }
    }

    fn ip(&self, args: &str) {
        let status = Command::new("ip").args(["-n", &self.0]).args(args.split(' ')).status();
        assert!(status.unwrap().success(), "ip {args}");
    }

    fn options(&self, name: &str) -> TapOptions {
        TapOptions { netns: Some(self.0.clone()), ..options(name) }
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

fn options(name: &str) -> TapOptions {
    TapOptions {
        name: name.into(),
        netns: None,
        queues: NonZeroU16::MIN,
        create: Create::IfMissing,
        up: false,
        mtu: None,
        mac: None,
        queue_len: None,
    }
}

fn queues(n: u16) -> NonZeroU16 {
    NonZeroU16::new(n).unwrap()
}

#[test]
fn invalid_names_are_refused_with_the_rule() {
    for name in ["", "sixteen-letters-", "a/b", "a b", "tap%d", "a:1", ".", "..", "a\nb"] {
        let error = open(&options(name)).unwrap_err();
        assert!(matches!(&error, TapError::BadName { name: n } if n == name), "{error}");
        assert!(error.to_string().contains("1 to 15 bytes"), "{error}");
    }
}

#[test]
fn missing_device_error_names_the_module_to_load() {
    let Some(netns) = Netns::new() else { return };
    let error = open_through(Path::new("/nonexistent/tun"), &netns.options("t0")).unwrap_err();
    assert!(matches!(error, TapError::NoDevice { .. }), "{error}");
    assert!(error.to_string().contains("modprobe tun"), "{error}");
}

#[test]
fn missing_interface_error_has_the_command_that_makes_it() {
    let Some(netns) = Netns::new() else { return };
    let error = open(&TapOptions { create: Create::Never, ..netns.options("t0") }).unwrap_err();
    assert!(matches!(error, TapError::NoInterface { .. }), "{error}");
    let command = format!("ip -n {} tuntap add dev t0 mode tap multi_queue", netns.0);
    assert!(error.to_string().contains(&command), "{error}");
}

#[test]
fn interface_that_must_be_new_is_created_once() {
    let Some(netns) = Netns::new() else { return };
    let new = TapOptions { create: Create::Always, queues: queues(3), ..netns.options("t0") };
    let tap = open(&new).unwrap();
    assert!(tap.created && tap.queues.len() == 3);
    netns.ip("link add t1 type bridge");
    for name in ["t0", "t1"] {
        let error = open(&TapOptions { name: name.into(), ..new.clone() }).unwrap_err();
        assert!(matches!(&error, TapError::Exists { name: n } if n == name), "{error}");
        assert!(error.to_string().contains(&format!("ip link del {name}")), "{error}");
    }
    drop(tap);
    open(&new).unwrap();
}

#[test]
fn permission_is_checked_without_an_interface() {
    let Some(netns) = Netns::new() else { return };
    let check = || {
        let checked = check_permission();
        let links = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
        assert!(!links.contains("pvswitch"), "{links}");
        checked
    };
    in_netns(&netns.0, check).unwrap().unwrap();
    let unprivileged = || {
        set_thread_res_uid(Uid::from_raw(65534), Uid::from_raw(65534), Uid::from_raw(65534))?;
        Ok::<_, io::Error>(check_permission())
    };
    let checked = std::thread::scope(|s| s.spawn(unprivileged).join().unwrap());
    let error = checked.unwrap().unwrap_err();
    // The device may be closed to this user, too.
    let refused = matches!(error, TapError::MayNotCreate | TapError::NoPermission { .. });
    assert!(refused && error.to_string().contains("CAP_NET_ADMIN"), "{error}");
    let error = check_permission_through(Path::new("/nonexistent/tun")).unwrap_err();
    assert!(matches!(error, TapError::NoDevice { .. }), "{error}");
}

#[test]
fn missing_and_invalid_namespaces() {
    let nowhere = TapOptions { netns: Some("pvs-nowhere".into()), ..options("t0") };
    let error = open(&nowhere).unwrap_err();
    assert!(matches!(error, TapError::NoNetns { .. }), "{error}");
    assert!(error.to_string().contains("/run/netns/pvs-nowhere"), "{error}");
    let file = TapOptions { netns: Some("/proc/self/status".into()), ..options("t0") };
    let error = open(&file).unwrap_err();
    assert!(matches!(error, TapError::NotNetns { .. }), "{error}");
}

#[test]
fn without_capability_the_message_names_it() {
    let Some(netns) = Netns::new() else { return };
    // A thread's own credentials: only this thread loses the capability.
    let unprivileged = || {
        set_thread_res_gid(Gid::from_raw(65534), Gid::from_raw(65534), Gid::from_raw(65534))?;
        set_thread_res_uid(Uid::from_raw(65534), Uid::from_raw(65534), Uid::from_raw(65534))?;
        Ok::<_, io::Error>((open(&options("t0")), open(&netns.options("t0"))))
    };
    let tried = std::thread::scope(|s| s.spawn(unprivileged).join().unwrap());
    let Ok((here, there)) = tried else {
        println!("skipped: cannot drop capabilities: {:?}", tried.err());
        return;
    };
    let error = here.unwrap_err();
    assert!(matches!(error, TapError::NoPermission { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("CAP_NET_ADMIN") && text.contains("cap_net_admin+ep"), "{text}");
    let error = there.unwrap_err();
    assert!(error.to_string().contains("CAP_SYS_ADMIN"), "{error}");
}

#[test]
fn interface_that_is_no_tap_is_refused() {
    let Some(netns) = Netns::new() else { return };
    netns.ip("link add br0 type bridge");
    netns.ip("tuntap add dev l3 mode tun");
    for name in ["lo", "br0", "l3"] {
        let error = open(&netns.options(name)).unwrap_err();
        assert!(matches!(error, TapError::NotTap { .. }), "{name}: {error}");
    }
}

#[test]
fn second_user_of_a_single_queue_finds_it_busy() {
    let Some(netns) = Netns::new() else { return };
    netns.ip("tuntap add dev t0 mode tap");
    let first = open(&TapOptions { queues: queues(4), ..netns.options("t0") }).unwrap();
    assert_eq!(first.queues.len(), 1, "falls back to the only queue");
    assert!(!first.created);
    let error = open(&netns.options("t0")).unwrap_err();
    assert!(matches!(error, TapError::Busy { .. }), "{error}");
    drop(first);
    // Processes that other tests start have the descriptor, too, until they execute their program.
    let end = Instant::now() + Duration::from_secs(10);
    while let Err(error) = open(&netns.options("t0")) {
        assert!(matches!(error, TapError::Busy { .. }) && Instant::now() < end, "{error}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn more_queues_than_the_kernel_provides() {
    let Some(netns) = Netns::new() else { return };
    let result = open(&TapOptions { queues: queues(300), ..netns.options("t0") });
    let error = result.unwrap_err();
    assert!(matches!(error, TapError::TooManyQueues { wanted: 300, given: 256, .. }), "{error}");
}

#[test]
fn system_errors_are_quoted() {
    let Some(netns) = Netns::new() else { return };
    let error = open(&TapOptions { mtu: Some(70_000), ..netns.options("t0") }).unwrap_err();
    assert!(matches!(error, TapError::Os { .. }), "{error}");
    assert!(error.to_string().starts_with("cannot set MTU 70000 on interface `t0`"), "{error}");
}

#[test]
fn created_interface_has_its_options_and_lives_as_long_as_its_queues() {
    let Some(netns) = Netns::new() else { return };
    let before = std::fs::read_link("/proc/thread-self/ns/net").unwrap();
    let mac = [2, 0, 0, 0, 0, 7];
    let wanted = TapOptions {
        queues: queues(4),
        up: true,
        mtu: Some(9000),
        mac: Some(mac),
        queue_len: Some(1500),
        ..netns.options("t0")
    };
    let tap = open(&wanted).unwrap();
    assert!(tap.created && tap.queues.len() == 4);
    assert_eq!((tap.mtu, tap.mac), (9000, mac));
    assert!(tap.offloads_read.tso4 && tap.offloads_write.csum);
    let show = || {
        let command = ["-n", &netns.0, "-d", "link", "show", "t0"];
        String::from_utf8(Command::new("ip").args(command).output().unwrap().stdout).unwrap()
    };
    let text = show();
    for word in ["UP", "mtu 9000", "qlen 1500", "02:00:00:00:00:07", "vnet_hdr", "multi_queue"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert_eq!(std::fs::read_link("/proc/thread-self/ns/net").unwrap(), before);
    let again = open(&TapOptions { create: Create::Never, ..netns.options("t0") }).unwrap();
    assert!(!again.created, "an existing one is opened");
    drop((tap, again));
    assert_eq!(show(), "", "it was removed with its last queue");
}

#[test]
fn the_carrier_is_the_last_one_set() {
    let Some(netns) = Netns::new() else { return };
    let tap = match open(&TapOptions { up: true, ..netns.options("sw0") }) {
        Ok(tap) => tap,
        Err(error) => {
            println!("skipped: {error}");
            return;
        }
    };
    let carrier = || {
        let args = ["netns", "exec", &netns.0, "cat", "/sys/class/net/sw0/carrier"];
        let output = Command::new("ip").args(args).output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().to_string()
    };
    assert_eq!(carrier(), "1");
    for on in [false, false, true, false, true] {
        set_carrier(&*tap.queues[0], on).unwrap();
        assert_eq!(carrier(), if on { "1" } else { "0" });
    }
}
