//! Xenstore as used by the handshakes, on the store of a host.

use xen_netif::back::{DomainStore, Tree};
use xen_netif::store::{Access, Perm};

use super::*;
use crate::store::{Limits, Server};

fn store() -> (Arc<dyn host::Back>, DomainStore) {
    let back = back(&dir());
    let store = DomainStore::new(back.store().unwrap()).unwrap();
    (back, store)
}

#[test]
fn own_directory_is_found_and_others_are_not_created() {
    let (_back, mut store) = store();
    store.write_key("backend/vif/1/0/frontend", "/local/domain/1/device/vif/0").unwrap();
    let back = "/local/domain/0/backend/vif/1/0";
    assert!(store.read(&format!("{back}/frontend")).unwrap().is_some());
    let key = ("state".to_string(), "2".to_string());
    assert!(store.write("backend/vif/1/0", "frontend", std::slice::from_ref(&key)).unwrap());
    assert_eq!(store.read(&format!("{back}/state")).unwrap().as_deref(), Some("2"));
    assert!(!store.write("backend/vif/2/0", "frontend", &[key]).unwrap(), "it does not exist");
    assert_eq!(store.list("backend/vif").unwrap(), ["1"]);
    assert_eq!(store.read("backend/vif/2/0/state").unwrap(), None);
}

/// In a driver domain, which is subject to permissions, unlike domain 0.
#[test]
fn nodes_hidden_by_a_guest_are_not_found() {
    let server = Server::start(Limits::XENSTORED).unwrap();
    let dom0 = server.connect(0).unwrap();
    let (front, ours) = ("/local/domain/1/device/vif/0", "/local/domain/2");
    dom0.write(&format!("{front}/state"), "4").unwrap();
    let hidden = [Perm::new(Access::None, 1)];
    dom0.set_perms(&format!("{front}/state"), &hidden).unwrap();
    dom0.write(&format!("{ours}/domid"), "2").unwrap();
    let seen = [Perm::new(Access::None, 0), Perm::new(Access::Read, 2)];
    dom0.set_perms(&format!("{ours}/domid"), &seen).unwrap();
    let mut store = DomainStore::new(server.connect(2).unwrap()).unwrap();
    assert_eq!(store.read("domid").unwrap().as_deref(), Some("2"), "it is below {ours}");
    assert_eq!(store.read(&format!("{front}/state")).unwrap(), None);
    store.write_key(&format!("{front}/state"), "1").unwrap();
    store.remove(&format!("{front}/state")).unwrap();
    assert_eq!(dom0.read(&format!("{front}/state")).unwrap().as_deref(), Some("4"));
    assert!(!store.is_gone(), "only refused");
}

/// The tokens of the next `n` different events, sorted.
fn next_tokens(store: &mut DomainStore, n: usize) -> Vec<String> {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut tokens = Vec::new();
    while tokens.len() < n {
        assert!(os::wait(store.as_fd(), Until::Readable, deadline).unwrap(), "{tokens:?}");
        tokens.extend(store.events().unwrap());
        tokens.sort_unstable();
        tokens.dedup();
    }
    tokens
}

#[test]
fn events_are_returned_by_token_and_the_end_of_a_store_is_reported() {
    let (back, mut store) = store();
    store.watch("backend/vif", "vifs").unwrap();
    store.watch("@releaseDomain", "release").unwrap();
    // The first event is caused by the watch itself.
    assert_eq!(next_tokens(&mut store, 2), ["release", "vifs"]);
    store.write_key("backend/vif/7/0/online", "1").unwrap();
    assert_eq!(next_tokens(&mut store, 1), ["vifs"]);
    store.unwatch("backend/vif", "vifs").unwrap();
    store.write_key("backend/vif/7/0/online", "0").unwrap();
    store.watch("backend", "after").unwrap();
    assert_eq!(next_tokens(&mut store, 1), ["after"]);
    drop(back);
    assert!(store.read("backend").is_err() && store.is_gone());
}
