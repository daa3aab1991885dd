use std::collections::BTreeMap;
use std::sync::{Mutex, Weak};

use ring::xen::{CTRL_SLOT_LEN, FrontCtrl};
use shm::sync::Ordering as Order;
use shm::{Area, Failed, Grants, Mapping, Piece, Side};

use super::*;

/// Pages granted by a guest, and whether they are writable.
#[derive(Default)]
struct Pages(Mutex<BTreeMap<u32, ([u8; 4096], bool)>>);

impl Grants for Pages {
    fn copy(&self, pieces: &mut [Piece<'_>]) {
        let mut pages = self.0.lock().unwrap();
        for piece in pieces {
            let len = piece.len() as usize;
            let result = if let Side::Granted { gref, offset, .. } = piece.src() {
                let Side::Mapped(mut to) = piece.dst() else { continue };
                pages.get(&gref).map(|(page, _)| {
                    to.write(&page[usize::from(offset)..][..len]);
                })
            } else {
                let Side::Mapped(from) = piece.src() else { continue };
                let Side::Granted { gref, offset, .. } = piece.dst() else { continue };
                pages.get_mut(&gref).filter(|(_, writable)| *writable).map(|(page, _)| {
                    from.read(&mut page[usize::from(offset)..][..len]);
                })
            };
            piece.set(result.ok_or(Failed::Source));
        }
    }
}

/// Maps grants 1000 to 3000; records released queues, and the pages of each call.
#[derive(Clone, Default)]
struct Mapper {
    settled: Arc<Mutex<Vec<usize>>>,
    mapped: Arc<Mutex<Vec<Weak<Mapping>>>>,
}

impl StaticHost for Mapper {
    fn map(&mut self, grants: &[(u32, bool)]) -> Option<Vec<StaticPage>> {
        if grants.iter().any(|(gref, _)| !(1000..=3000).contains(gref)) {
            return None;
        }
        let mapping = Arc::new(Mapping::memfd("static", 4096 * grants.len() as u64).unwrap());
        self.mapped.lock().unwrap().push(Arc::downgrade(&mapping));
        let page = |(i, (_, readonly)): (usize, &(u32, bool))| {
            StaticPage::new(Arc::clone(&mapping), 4096 * i, *readonly)
        };
        Some(grants.iter().enumerate().map(page).collect())
    }

    fn wait_released(&mut self, queue: usize) {
        self.settled.lock().unwrap().push(queue);
    }
}

const QUEUES: usize = 4;
/// A page of the guest, and a read-only one.
const PAGE: u32 = 8;
const READONLY: u32 = 9;
const NO_PAGE: u32 = 77;

struct Rig {
    front: FrontCtrl,
    control: Control,
    orders: Arc<Orders>,
    pages: Arc<Pages>,
    mapper: Mapper,
    area: Area,
    id: u16,
}

impl Rig {
    fn new(with_static: bool) -> Self {
        let mapping = Arc::new(Mapping::memfd("ctrl", 4096).unwrap());
        let area = Area::of(&mapping, 0, 64 + 128 * CTRL_SLOT_LEN).unwrap();
        let front = FrontCtrl::starting_at(area.clone(), u32::MAX - 3);
        let pages = Arc::new(Pages::default());
        for (gref, writable) in [(PAGE, true), (READONLY, false)] {
            pages.0.lock().unwrap().insert(gref, ([0; 4096], writable));
        }
        let domain = Arc::new(Domain::new(1, Arc::clone(&pages) as Arc<dyn Grants>));
        let orders = Arc::new(Orders::new(QUEUES));
        let mapper = Mapper::default();
        let host = with_static.then(|| Box::new(mapper.clone()) as Box<dyn StaticHost>);
        let ring = BackCtrl::attach(area.clone()).unwrap();
        let control = Control::new(ring, domain, Arc::clone(&orders), host);
        Self { front, control, orders, pages, mapper, area, id: 0 }
    }

    fn ask(&mut self, kind: u16, data: [u32; 3]) -> (u32, u32) {
        self.id = self.id.wrapping_add(7);
        assert!(self.front.put(CtrlRequest { id: self.id, kind, data }));
        self.front.publish();
        let _ = self.front.arm();
        assert!(self.control.serve().unwrap(), "the front half must be notified");
        let answer = self.front.take().unwrap().unwrap();
        assert_eq!((answer.id, answer.kind), (self.id, kind));
        (answer.status, answer.data)
    }

    /// Writes bytes to the guest's page.
    fn page(&self, gref: u32, bytes: &[u8]) {
        let mut pages = self.pages.0.lock().unwrap();
        pages.get_mut(&gref).unwrap().0[..bytes.len()].copy_from_slice(bytes);
    }

    fn words(&self, gref: u32, words: &[u32]) {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        self.page(gref, &bytes);
    }

    fn list(&self, gref: u32, grefs: &[u32]) {
        let entry = |gref: &u32| GrefEntry { gref: *gref, readonly: gref % 2 == 1, status: 99 };
        let bytes: Vec<u8> = grefs.iter().map(entry).flat_map(GrefEntry::encode).collect();
        self.page(gref, &bytes);
    }

    fn statuses(&self, gref: u32, n: usize) -> Vec<u16> {
        let pages = self.pages.0.lock().unwrap();
        let entries = pages[&gref].0.as_chunks::<GREF_ENTRY_LEN>().0;
        entries[..n].iter().map(|e| GrefEntry::decode(*e).status).collect()
    }
}

const OK: (u32, u32) = (SUCCESS, 0);
const BAD: (u32, u32) = (INVALID, 0);
const NONE: (u32, u32) = (NOT_SUPPORTED, 0);
const OVERFLOW: (u32, u32) = (ctrl_status::BUFFER_OVERFLOW, 0);

#[test]
fn unknown_requests_are_not_supported() {
    let mut rig = Rig::new(false);
    for kind in [0, 8, 9, 10, 11, 0xffff] {
        assert_eq!(rig.ask(kind, [0, PAGE, 0]), NONE, "{kind}");
    }
    assert_eq!(rig.orders.changes(), 0);
}

#[test]
fn flags_need_an_algorithm() {
    let mut rig = Rig::new(false);
    assert_eq!(rig.ask(ctrl_type::GET_HASH_FLAGS, [0; 3]), NONE);
    assert_eq!(rig.ask(ctrl_type::SET_HASH_FLAGS, [1, 0, 0]), BAD);
    assert_eq!(rig.ask(ctrl_type::SET_HASH_ALGORITHM, [2, 0, 0]), BAD);
    assert_eq!(rig.ask(ctrl_type::SET_HASH_ALGORITHM, [0x101, 0, 0]), BAD);
    assert_eq!(rig.orders.changes(), 0, "a failed request changes nothing");
    assert_eq!(rig.ask(ctrl_type::SET_HASH_ALGORITHM, [1, 0, 0]), OK);
    assert_eq!(rig.ask(ctrl_type::GET_HASH_FLAGS, [0; 3]), (SUCCESS, 15));
    assert_eq!(rig.ask(ctrl_type::SET_HASH_FLAGS, [16, 0, 0]), BAD);
    assert!(!rig.orders.steering().is_set());
    assert_eq!(rig.ask(ctrl_type::SET_HASH_FLAGS, [15, 0, 0]), OK);
    assert!(rig.orders.steering().is_set());
    assert_eq!(rig.ask(ctrl_type::SET_HASH_FLAGS, [0, 0, 0]), OK);
    assert!(!rig.orders.steering().is_set());
    assert_eq!(rig.ask(ctrl_type::SET_HASH_ALGORITHM, [0, 0, 0]), OK);
    assert_eq!(rig.orders.changes(), 4);
}

#[test]
fn key_of_every_length() {
    let mut rig = Rig::new(false);
    rig.page(READONLY, &[0xab; 64]);
    assert_eq!(rig.ask(ctrl_type::SET_HASH_KEY, [READONLY, 40, 0]), OK);
    assert_eq!(rig.orders.steering().key, [0xab; 40]);
    for len in [41, 4096, 4097, u32::MAX] {
        assert_eq!(rig.ask(ctrl_type::SET_HASH_KEY, [READONLY, len, 0]), OVERFLOW);
    }
    assert_eq!(rig.ask(ctrl_type::SET_HASH_KEY, [NO_PAGE, 16, 0]), BAD);
    assert_eq!(rig.orders.steering().key, [0xab; 40], "a failed request changes nothing");
    assert_eq!(rig.ask(ctrl_type::SET_HASH_KEY, [READONLY, 3, 0]), OK);
    let mut short = [0; 40];
    short[..3].fill(0xab);
    assert_eq!(rig.orders.steering().key, short);
    // Cleared; the page is not read.
    assert_eq!(rig.ask(ctrl_type::SET_HASH_KEY, [NO_PAGE, 0, 0]), OK);
    assert_eq!(rig.orders.steering().key, [0; 40]);
}

#[test]
fn mapping_is_validated_before_use() {
    let mut rig = Rig::new(false);
    let set = ctrl_type::SET_HASH_MAPPING;
    assert_eq!(rig.ask(ctrl_type::GET_HASH_MAPPING_SIZE, [0; 3]), (SUCCESS, 128));
    assert_eq!(rig.ask(set, [PAGE, 1, 0]), BAD, "no table yet");
    for size in [129, u32::MAX] {
        assert_eq!(rig.ask(ctrl_type::SET_HASH_MAPPING_SIZE, [size, 0, 0]), BAD);
    }
    assert_eq!(rig.ask(ctrl_type::SET_HASH_MAPPING_SIZE, [4, 0, 0]), OK);
    rig.words(PAGE, &[3, 2, 1, 0]);
    assert_eq!(rig.ask(set, [PAGE, 4, 0]), OK);
    assert_eq!(rig.orders.steering().mapping, [3, 2, 1, 0]);
    // A part; the rest is unchanged.
    assert_eq!(rig.ask(set, [PAGE, 1, 3]), OK);
    assert_eq!(rig.orders.steering().mapping, [3, 2, 1, 3]);
    let before = rig.orders.changes();
    // Size and offset: XSA-270.
    for (len, offset) in [(5, 0), (4, 1), (1, 4), (1, u32::MAX), (u32::MAX, 1), (1025, 0)] {
        assert_eq!(rig.ask(set, [PAGE, len, offset]), BAD, "{len} {offset}");
    }
    assert_eq!(rig.ask(set, [PAGE, 129, 0]), OVERFLOW);
    assert_eq!(rig.ask(set, [PAGE, 1024, 0]), OVERFLOW);
    // An invalid queue, last in the list.
    rig.words(PAGE, &[0, 0, 0, QUEUES as u32]);
    assert_eq!(rig.ask(set, [PAGE, 4, 0]), BAD);
    assert_eq!(rig.ask(set, [NO_PAGE, 4, 0]), BAD);
    assert_eq!(rig.orders.steering().mapping, [3, 2, 1, 3], "a failed request changes nothing");
    assert_eq!(rig.orders.changes(), before);
    // A new size clears the table.
    assert_eq!(rig.ask(ctrl_type::SET_HASH_MAPPING_SIZE, [2, 0, 0]), OK);
    assert_eq!(rig.orders.steering().mapping, [0, 0]);
}

#[test]
fn static_grants_are_added_all_or_none() {
    let mut rig = Rig::new(true);
    let (get, add) = (ctrl_type::GET_GREF_MAPPING_SIZE, ctrl_type::ADD_GREF_MAPPING);
    assert_eq!(rig.ask(get, [3, 0, 0]), (SUCCESS, 1024));
    assert_eq!(rig.ask(get, [4, 0, 0]), BAD);
    rig.list(PAGE, &[1000, 1001, 1002]);
    assert_eq!(rig.ask(add, [4, PAGE, 3]), BAD);
    assert_eq!(rig.ask(add, [1, PAGE, 513]), BAD);
    assert_eq!(rig.ask(add, [1, PAGE, u32::MAX]), BAD);
    assert_eq!(rig.ask(add, [1, NO_PAGE, 3]), BAD);
    assert_eq!(rig.ask(add, [1, PAGE, 3]), OK);
    assert_eq!(rig.orders.grants(1).len(), 3);
    assert!(rig.orders.grants(0).is_empty() && rig.orders.grants(99).is_empty());
    // Existing, twice in the list, or not mappable.
    for bad in [&[1002, 1003], &[1003, 1003], &[1003, 999_u32]] {
        rig.list(PAGE, bad);
        assert_eq!(rig.ask(add, [1, PAGE, 2]), BAD, "{bad:?}");
    }
    assert_eq!(rig.orders.grants(1).len(), 3);
    // Up to the limit.
    let many: Vec<u32> = (1100..1612).collect();
    rig.list(PAGE, &many);
    assert_eq!(rig.ask(add, [1, PAGE, 512]), OK);
    rig.list(PAGE, &(1700..2212).collect::<Vec<u32>>());
    assert_eq!(rig.ask(add, [1, PAGE, 512]), BAD);
    assert_eq!(rig.ask(add, [1, PAGE, 509]), OK);
    assert_eq!(rig.orders.grants(1).len(), STATIC_GRANTS_MAX);
}

#[test]
fn static_grants_are_found_for_any_span() {
    let mapping = Arc::new(Mapping::memfd("static", 4096).unwrap());
    let page = || StaticPage::new(Arc::clone(&mapping), 0, true);
    let near: Vec<u32> = (8..40).step_by(3).collect();
    let max = u32::MAX;
    for grefs in [vec![], near, vec![0], vec![max], vec![0, max], vec![7, 4102], vec![7, 4103]] {
        let grants = StaticGrants::of(grefs.iter().map(|gref| (*gref, page())).collect());
        assert_eq!((grants.len(), grants.is_empty()), (grefs.len(), grefs.is_empty()));
        let probes = (0..5000).chain([1 << 31, max - 1, max]);
        assert!(probes.clone().all(|gref| grants.get(gref).is_some() == grefs.contains(&gref)));
    }
}

#[test]
fn static_pages_have_bounds_and_readonly_ones_are_not_written() {
    let mut rig = Rig::new(true);
    rig.list(PAGE, &[1000, 1001]);
    assert_eq!(rig.ask(ctrl_type::ADD_GREF_MAPPING, [0, PAGE, 2]), OK);
    let grants = rig.orders.grants(0);
    let (page, readonly) = (grants.get(1000).unwrap(), grants.get(1001).unwrap());
    page.seg_mut(4094, 2).unwrap().write(&[1, 2]);
    let mut bytes = [0; 3];
    assert_eq!(page.seg(4093, 3).unwrap().read(&mut bytes), 3);
    assert_eq!(bytes, [0, 1, 2]);
    assert!(page.seg(4094, 3).is_none() && page.seg(u16::MAX, u16::MAX).is_none());
    assert!(page.seg_mut(4094, 3).is_none());
    assert!(readonly.seg(0, 4096).is_some() && readonly.seg_mut(0, 1).is_none());
    assert!(grants.get(1002).is_none());
}

#[test]
fn static_grants_are_removed_one_by_one() {
    let mut rig = Rig::new(true);
    let (add, del) = (ctrl_type::ADD_GREF_MAPPING, ctrl_type::DEL_GREF_MAPPING);
    rig.list(PAGE, &[1000, 1001, 1002]);
    assert_eq!(rig.ask(add, [2, PAGE, 3]), OK);
    let kept = Weak::clone(&rig.mapper.mapped.lock().unwrap()[0]);
    // Missing, present, and removed before.
    rig.list(PAGE, &[5, 1001, 1001, 1000]);
    assert_eq!(rig.ask(del, [2, PAGE, 4]), (SUCCESS, 2));
    assert_eq!(rig.statuses(PAGE, 4), [2, 0, 2, 0]);
    assert_eq!(*rig.mapper.settled.lock().unwrap(), [2], "released before the response");
    // Of another queue.
    rig.list(PAGE, &[1002]);
    assert_eq!(rig.ask(del, [0, PAGE, 1]), OK);
    assert_eq!(rig.statuses(PAGE, 1), [2]);
    assert_eq!(rig.orders.grants(2).len(), 1);
    assert_eq!(rig.ask(del, [4, PAGE, 1]), BAD);
    assert_eq!(rig.ask(del, [2, PAGE, 513]), BAD);
    assert_eq!(rig.ask(del, [2, NO_PAGE, 1]), BAD);
    assert!(kept.upgrade().is_some());
    // Statuses that cannot be written: the grants are removed anyway.
    rig.list(READONLY, &[1002]);
    assert_eq!(rig.ask(del, [2, READONLY, 1]), BAD);
    assert!(rig.orders.grants(2).is_empty());
    assert!(kept.upgrade().is_none(), "unmapped");
}

#[test]
fn ring_full_of_requests_is_served_at_once_and_a_jump_stops_it() {
    let mut rig = Rig::new(false);
    for id in 0..128 {
        let kind = ctrl_type::GET_HASH_MAPPING_SIZE;
        assert!(rig.front.put(CtrlRequest { id, kind, data: [0; 3] }));
    }
    rig.front.publish();
    assert_eq!(rig.control.serve(), Ok(true));
    for id in 0..128 {
        assert_eq!(rig.front.take().unwrap().unwrap().id, id);
    }
    assert_eq!(rig.control.serve(), Ok(false));
    assert_eq!(rig.control.arm(), Armed::Armed);
    rig.area.sync_store_u32(0, 5000, Order::Release);
    assert!(rig.control.has_work());
    assert!(matches!(rig.control.serve(), Err(Malformed::ReqProd { seen: 5000, .. })));
    assert_eq!(rig.control.arm(), Armed::WorkPending);
}

#[test]
fn long_lists_of_grants_are_served_in_parts() {
    let mut rig = Rig::new(true);
    let grefs: Vec<u32> = (1000..1512).collect();
    rig.list(PAGE, &grefs);
    for id in 0..20 {
        let kind = [ctrl_type::ADD_GREF_MAPPING, ctrl_type::DEL_GREF_MAPPING][usize::from(id % 2)];
        assert!(rig.front.put(CtrlRequest { id, kind, data: [1, PAGE, 512] }));
    }
    rig.front.publish();
    for look in 1..=10 {
        rig.control.serve().unwrap();
        let mapped = rig.mapper.mapped.lock().unwrap().len();
        assert_eq!(mapped, look, "one list is mapped and unmapped per call");
        // The call does not wait for further requests.
        let more = if look < 10 { Armed::WorkPending } else { Armed::Armed };
        assert_eq!(rig.control.arm(), more, "{look}");
    }
    for _ in 0..20 {
        assert_eq!(rig.front.take().unwrap().unwrap().status, SUCCESS);
    }
}
