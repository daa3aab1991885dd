//! Xenstore as the handshakes use it, on the store of a host of ours.

use xen_netif::back::{Home, Tree};
use xen_netif::store::{Access, Perm};

use super::*;
use crate::store::{Limits, Server};

fn home() -> (Arc<dyn host::Back>, Home) {
    let back = back(&dir());
    let home = Home::new(back.store().unwrap()).unwrap();
    (back, home)
}

#[test]
fn own_directory_is_found_and_others_are_left_alone() {
    let (_back, mut home) = home();
    home.note("backend/vif/1/0/frontend", "/local/domain/1/device/vif/0").unwrap();
    let back = "/local/domain/0/backend/vif/1/0";
    assert!(home.read(&format!("{back}/frontend")).unwrap().is_some());
    let key = ("state".to_string(), "2".to_string());
    assert!(home.write("backend/vif/1/0", "frontend", std::slice::from_ref(&key)).unwrap());
    assert_eq!(home.read(&format!("{back}/state")).unwrap().as_deref(), Some("2"));
    assert!(!home.write("backend/vif/2/0", "frontend", &[key]).unwrap(), "it would be new");
    assert_eq!(home.list("backend/vif").unwrap(), ["1"]);
    assert_eq!(home.read("backend/vif/2/0/state").unwrap(), None);
}

/// In a driver domain, which xenstore does not let see everything as it does domain 0.
#[test]
fn what_a_guest_hides_is_not_there() {
    let server = Server::start(Limits::XENSTORED).unwrap();
    let dom0 = server.connect(0).unwrap();
    let (front, ours) = ("/local/domain/1/device/vif/0", "/local/domain/2");
    dom0.write(&format!("{front}/state"), "4").unwrap();
    let hidden = [Perm::new(Access::None, 1)];
    dom0.set_perms(&format!("{front}/state"), &hidden).unwrap();
    dom0.write(&format!("{ours}/domid"), "2").unwrap();
    let seen = [Perm::new(Access::None, 0), Perm::new(Access::Read, 2)];
    dom0.set_perms(&format!("{ours}/domid"), &seen).unwrap();
    let mut home = Home::new(server.connect(2).unwrap()).unwrap();
    assert_eq!(home.read("domid").unwrap().as_deref(), Some("2"), "it is below {ours}");
    assert_eq!(home.read(&format!("{front}/state")).unwrap(), None);
    home.note(&format!("{front}/state"), "1").unwrap();
    home.remove(&format!("{front}/state")).unwrap();
    assert_eq!(dom0.read(&format!("{front}/state")).unwrap().as_deref(), Some("4"));
    assert!(!home.is_gone(), "a refusal, no more");
}

/// The next `n` different tokens, in order of the alphabet.
fn told(home: &mut Home, n: usize) -> Vec<String> {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut told = Vec::new();
    while told.len() < n {
        assert!(os::wait(home.as_fd(), Until::Readable, deadline).unwrap(), "{told:?}");
        told.extend(home.events().unwrap());
        told.sort_unstable();
        told.dedup();
    }
    told
}

#[test]
fn events_are_told_by_token_and_a_store_that_ends_is_told() {
    let (back, mut home) = home();
    home.watch("backend/vif", "vifs").unwrap();
    home.watch("@releaseDomain", "release").unwrap();
    // The first event comes of the watch itself.
    assert_eq!(told(&mut home, 2), ["release", "vifs"]);
    home.note("backend/vif/7/0/online", "1").unwrap();
    assert_eq!(told(&mut home, 1), ["vifs"]);
    home.unwatch("backend/vif", "vifs").unwrap();
    home.note("backend/vif/7/0/online", "0").unwrap();
    home.watch("backend", "after").unwrap();
    assert_eq!(told(&mut home, 1), ["after"]);
    drop(back);
    assert!(home.read("backend").is_err() && home.is_gone());
}
