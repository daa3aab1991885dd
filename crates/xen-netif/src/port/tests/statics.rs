//! Static grants: pages of a guest that are kept mapped.

use std::os::fd::AsFd;
use std::sync::mpsc;
use std::time::Duration;

use shm::{Access, Private};
use switch::account::Stock;

use super::*;
use crate::host::{self, HostError, StaticPage};
use crate::port::control::StaticHost;
use crate::store::{Store, StoreError};

/// A host for [`PageMapper`]: pages by grant reference.
impl host::Back for Host {
    fn store(&self) -> Result<Store, StoreError> {
        Err(StoreError::Gone("of a test".into()))
    }

    fn domain(&self, domid: u16) -> Result<Arc<Domain>, HostError> {
        Err(HostError::NoDomain(domid))
    }

    fn private(&self, _: usize) -> Option<Private> {
        None
    }

    fn map_page(
        &self,
        domid: u16,
        gref: u32,
        _: Access,
    ) -> Result<(Arc<Mapping>, usize), HostError> {
        let bad = || HostError::BadGrant { domid, gref, why: "no such entry".into() };
        Ok((self.page(domid, gref).ok_or_else(bad)?, 0))
    }

    fn bind(&self, domid: u16, port: u32) -> Result<host::Channel, HostError> {
        Err(HostError::BadPort { domid, port, why: "no such port".into() })
    }

    fn rebind(&self, domid: u16, port: u32, _: host::Bound) -> Result<host::Channel, HostError> {
        self.bind(domid, port)
    }

    fn unbind(&self, _: &host::Bound) {}

    fn claimed_by(&self, _: u16, _: u32) -> Option<String> {
        None
    }

    fn send_online(&self, _: u16, _: u32) -> std::io::Result<bool> {
        Ok(true)
    }
}

impl Guest {
    /// Adds static grants: (reference, readonly).
    fn keep(&self, grefs: impl IntoIterator<Item = (u32, bool)>) {
        let page = |(gref, readonly)| {
            let page = self.host.page(self.id, gref).unwrap();
            (gref, StaticPage::new(page, 0, readonly))
        };
        self.orders.set_grants(0, grefs.into_iter().map(page));
    }

    fn calls(&self) -> usize {
        self.host.calls.load(Ordering::Relaxed)
    }
}

#[test]
fn static_pages_need_no_hypercall() {
    let (mut a, mut b) = two();
    a.keep((8..208).map(|gref| (gref, true)));
    b.keep((100..200).map(|gref| (gref, false)));
    for round in 0..40 {
        b.post(100..104);
        a.send(&tcp(60 + round), &[60 + round], 0, &[]);
        a.send(&tcp(9000), &[4000, 4000, 1000], 0, &[]);
        assert_eq!(carry(&mut a, &mut b), 2);
        assert_eq!(a.responses(), [status::OKAY; 4]);
        assert_eq!(b.take().unwrap().unwrap().1, tcp(60 + round));
        assert_eq!(b.take().unwrap().unwrap().1, tcp(9000));
    }
    assert_eq!((a.calls(), b.pair.egress_stats.frames.get()), (0, 80));
}

#[test]
fn pages_not_mapped_are_copied_by_their_grants() {
    let (mut a, mut b) = two();
    // Some pages of each frame; of the receiver's, the first one read-only.
    a.keep([(8, true), (10, true)]);
    b.keep([(100, true), (READ_ONLY, true), (103, false)]);
    b.post([100, READ_ONLY, 102, 103]);
    for n in 0..4 {
        a.send(&tcp(800 + n), &[500, 300 + n], 0, &[]);
    }
    assert_eq!(carry(&mut a, &mut b), 4);
    assert_eq!(b.take().unwrap().unwrap().1, tcp(800), "the grant allows more than the mapping");
    assert_eq!(
        b.take().unwrap().unwrap_err(),
        RxRefusal::Status(status::ERROR),
        "the grant does not, either"
    );
    assert_eq!(b.take().unwrap().unwrap().1, tcp(802));
    assert_eq!(b.take().unwrap().unwrap().1, tcp(803));
    assert_eq!(a.responses(), [status::OKAY; 8]);
    assert_eq!(a.calls(), 2, "one for the heads, one for the rest");
}

#[test]
fn grants_are_released_when_the_guest_removes_them() {
    let (mut a, mut b) = two();
    a.keep([(8, true), (9, true)]);
    b.keep([(100, false), (101, false)]);
    let tables = [&a, &b].map(|guest| Arc::downgrade(&guest.orders.grants(0)));
    b.post(100..101);
    a.send(&tcp(200), &[200], 0, &[]);
    assert_eq!((carry(&mut a, &mut b), a.calls()), (1, 0));
    a.keep([(9, true)]);
    b.keep([]);
    assert!(tables.iter().all(|table| table.upgrade().is_some()), "held since the last burst");
    release_grants(&a.pair);
    release_grants(&b.pair);
    assert!(tables.iter().all(|table| table.upgrade().is_none()));
    a.keep([]);
    b.post(101..102);
    a.send(&tcp(201), &[201], 0, &[]);
    assert_eq!(carry(&mut a, &mut b), 1);
    assert_eq!(b.take().unwrap().unwrap().1, tcp(200));
    assert_eq!(b.take().unwrap().unwrap().1, tcp(201));
    assert_eq!((a.responses(), a.calls()), (vec![status::OKAY; 2], 2));
    assert!(a.pair.ingress.lock().deactivate());
    release_grants(&a.pair);
}

#[test]
fn grants_are_not_released_during_a_burst() {
    let (mut a, _) = two();
    a.keep([(8, true)]);
    a.send(&tcp(200), &[200], 0, &[]);
    let (pair, orders) = (a.pair.clone(), a.orders.clone());
    let (said, heard) = mpsc::channel();
    let mut waiting = None;
    a.burst(at(0), |burst| {
        orders.set_grants(0, []);
        let (pair, said) = (pair.clone(), said.clone());
        waiting = Some(std::thread::spawn(move || {
            release_grants(&pair);
            said.send(()).unwrap();
        }));
        assert!(heard.recv_timeout(Duration::from_millis(50)).is_err(), "still in use");
        let mut bytes = [0; 200];
        assert_eq!(burst.segs[0].read(&mut bytes), 200);
        assert_eq!(bytes, *tcp(200));
    })
    .unwrap();
    heard.recv_timeout(Duration::from_secs(20)).unwrap();
    waiting.unwrap().join().unwrap();
}

#[test]
fn a_vifs_pages_are_mapped_by_its_host_or_the_error_is_logged() {
    const GREFS: [u32; 2] = [50, 51];
    let (mut a, _) = two();
    let (said, heard) = mpsc::channel();
    let failed = move |error: HostError| said.send(error.to_string()).unwrap();
    let paid = Arc::new(Stock::new("mappings", 3, None));
    let mapper = PageMapper::new(a.host.clone(), 1, vec![a.pair.clone()], failed);
    let mut mapper = mapper.charged_to(&paid);
    let grants = [(GREFS[0], true), (GREFS[1], false)];
    let mapped = mapper.map(&grants).unwrap();
    assert!(heard.try_recv().is_err() && paid.used() == 2);
    // Above its port's limit: none of them is mapped.
    assert!(mapper.map(&grants).is_none() && paid.used() == 2);
    assert!(heard.try_recv().unwrap().contains("mappings: 1 more than the 3 in use"));
    assert!(mapper.map(&[(NO_SUCH, false)]).is_none() && paid.used() == 2);
    assert!(heard.try_recv().unwrap().contains("no such entry"));

    let [gref, other] = GREFS;
    a.write(gref, 16, &tcp(200));
    a.orders.set_grants(0, [gref, other].into_iter().zip(mapped));
    let slot = |gref| TxRequest { gref, offset: 16, flags: 0, id: 1, size: 200 };
    a.raw(slot(gref), &[], &[]);
    assert_eq!(a.received().unwrap()[0].1, tcp(200));
    let table = Arc::downgrade(&a.orders.grants(0));
    a.orders.set_grants(0, []);
    mapper.wait_released(7);
    assert!(table.upgrade().is_some(), "of another queue");
    mapper.wait_released(0);
    assert!(table.upgrade().is_none() && paid.used() == 0);
}

#[test]
fn a_guest_that_truncates_its_mapped_pages_loses_only_its_own_frames() {
    let (mut a, mut b) = two();
    // Not sealed, unlike ours.
    let fd = rustix::fs::memfd_create("shrinks", rustix::fs::MemfdFlags::empty()).unwrap();
    rustix::fs::ftruncate(&fd, 4096 * 2).unwrap();
    let memory = Arc::new(Mapping::new(fd.as_fd(), 0, 4096 * 2).unwrap());
    let page = |i: usize| StaticPage::new(Arc::clone(&memory), 4096 * i, false);
    let (mut c, mut d) = (Guest::new(3, &a.host, ALL), Guest::new(4, &a.host, ALL));
    // Its tx page and, as a receiver, its rx page.
    a.orders.set_grants(0, [(8, page(0)), (100, page(1))]);
    rustix::fs::ftruncate(&fd, 0).unwrap();
    a.raw(TxRequest { gref: 8, offset: 0, flags: 0, id: 1, size: 500 }, &[], &[]);
    a.post(100..101);
    b.post(100..101);
    assert_eq!(carry(&mut a, &mut b), 1);
    assert_eq!(b.take().unwrap().unwrap().1, [0; 500]);
    c.send(&tcp(300), &[300], 0, &[]);
    assert_eq!(carry(&mut c, &mut a), 1);
    assert_eq!(c.responses(), [status::OKAY]);
    assert!(memory.is_lost());
    d.post(100..101);
    c.send(&tcp(301), &[301], 0, &[]);
    assert_eq!(carry(&mut c, &mut d), 1);
    assert_eq!(d.take().unwrap().unwrap().1, tcp(301));
}
