use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ring::xen::{BackCtrl, ctrl_status::*, ctrl_type::*};
use shm::{Access, Area, Mapping};

use super::*;
use crate::host::StaticPage;
use crate::store::{Store, StoreError};

/// First grant reference and event channel.
const RING_REF: u32 = 8;
const PORT: u32 = 1;

/// A guest with two pages and one event channel, whose back half is in this process, too.
struct Guest {
    memory: Arc<Mapping>,
    /// Both ends of the channel.
    ends: [Arc<OwnedFd>; 2],
}

impl Guest {
    fn new() -> Self {
        let memory = Mapping::memfd("guest", 2 * u64::from(PAGE_LEN)).unwrap();
        let ends = [0; 2].map(|_| Arc::new(os::eventfd().unwrap()));
        Self { memory: Arc::new(memory), ends }
    }

    /// Its page `i`, as mapped by the back half.
    fn page(&self, i: usize) -> StaticPage {
        StaticPage::new(Arc::clone(&self.memory), i * PAGE_LEN as usize, false)
    }
}

impl Front for Guest {
    fn store(&self) -> Result<Store, StoreError> {
        Err(StoreError::Gone("of a test".into()))
    }

    fn alloc(&self, pages: u32, _: u16, readonly: bool) -> Result<Pages, HostError> {
        assert!(pages == 2 && !readonly, "the ring and the list");
        let fd = self.memory.fd().unwrap();
        let mapping = Mapping::exact(fd, 0, 2 * u64::from(PAGE_LEN), Access::Write)?;
        Pages::new(mapping, vec![RING_REF, RING_REF + 1])
    }

    fn channel(&self, _: u16) -> Result<(u32, Channel), HostError> {
        let [ours, theirs] = self.ends.each_ref().map(Arc::clone);
        Ok((PORT, Channel::eventfds(ours, theirs)))
    }
}

/// A control ring and its back half, operated by the test.
struct Bench {
    ctrl: Ctrl,
    back: BackCtrl,
    /// The ring, writable by the test.
    raw: Area,
    guest: Guest,
    list_ref: u32,
}

/// A request: (type, queue, the list as (reference, readonly)).
type Order = (u16, u32, Vec<(u32, bool)>);

impl Bench {
    fn new(queues: Vec<Grants>) -> Self {
        let guest = Guest::new();
        let (ctrl, keys) = Ctrl::new(&guest, 0, queues).unwrap();
        assert_eq!((keys.ring_ref, keys.port), (RING_REF, PORT));
        let raw = Area::of(&guest.memory, 0, PAGE_LEN as usize).unwrap();
        let back = BackCtrl::attach(raw.clone()).unwrap();
        let list_ref = ctrl.pages.grefs[1];
        Self { ctrl, back, raw, guest, list_ref }
    }

    /// The next request, without a response.
    fn take(&mut self) -> Option<(CtrlRequest, Order)> {
        let request = self.back.take().unwrap()?;
        let [queue, gref, len] = request.data;
        let mut bytes = vec![[0; GREF_ENTRY_LEN]; len as usize];
        if len > 0 {
            assert_eq!(gref, self.list_ref);
            let page = self.guest.page(1);
            let flat = bytes.as_flattened_mut();
            let list_len = u16::try_from(flat.len()).unwrap();
            assert_eq!(page.seg(0, list_len).unwrap().read(flat), flat.len());
        }
        let entry = |bytes| {
            let GrefEntry { gref, readonly, status } = GrefEntry::decode(bytes);
            assert_eq!(status, 0);
            (gref, readonly)
        };
        Some((request, (request.kind, queue, bytes.into_iter().map(entry).collect())))
    }

    fn put(&mut self, id: u16, kind: u16, status: u32, data: u32) {
        self.back.put(CtrlResponse { id, kind, status, data });
        self.back.publish();
    }

    /// Responds to all requests by `answer`. Returns the requests.
    fn serve(&mut self, mut answer: impl FnMut(&Order) -> (u32, u32)) -> Vec<Order> {
        let mut orders = Vec::new();
        while !self.ctrl.step().unwrap() {
            assert!(!self.ctrl.step().unwrap(), "it waits for the response");
            let (request, order) = self.take().expect("it was published");
            assert!(self.take().is_none(), "one at a time");
            let (status, data) = answer(&order);
            self.put(request.id, request.kind, status, data);
            orders.push(order);
        }
        assert!(self.ctrl.step().unwrap() && self.take().is_none());
        orders
    }
}

fn queue(first: u32, grants: u32) -> Grants {
    Grants {
        wanted: (first..first + grants).map(|g| (g, g % 2 == 0)).collect(),
        ..Grants::default()
    }
}

fn list(grants: std::ops::Range<u32>) -> Vec<(u32, bool)> {
    grants.map(|g| (g, g % 2 == 0)).collect()
}

#[test]
fn pages_used_by_every_frame_come_first() {
    let grants = Grants::new(&[10, 11, 12, 13, 14, 15], 3, &[90, 91, 92]);
    let (r, w) = (true, false);
    let all = [(10, r), (90, w), (13, r), (91, w), (92, w), (11, r), (14, r), (12, r), (15, r)];
    assert_eq!(grants.wanted, all);
}

#[test]
fn grants_up_to_the_back_ends_limit_are_kept_and_unmapped_in_lists() {
    let mut bench = Bench::new(vec![queue(1000, 1100), queue(5000, 600)]);
    assert!(bench.serve(|_| unreachable!()).is_empty(), "no request without a goal");
    bench.ctrl.keep();
    // Of the first queue all grants, below the limit; of the second, fewer.
    let orders = bench.serve(|(kind, queue, _)| match *kind {
        GET_GREF_MAPPING_SIZE => (SUCCESS, [u32::MAX, 3][*queue as usize]),
        _ => (SUCCESS, 0),
    });
    let want: [Order; 6] = [
        (GET_GREF_MAPPING_SIZE, 0, vec![]),
        (ADD_GREF_MAPPING, 0, list(1000..1512)),
        (ADD_GREF_MAPPING, 0, list(1512..2024)),
        (ADD_GREF_MAPPING, 0, list(2024..2100)),
        (GET_GREF_MAPPING_SIZE, 1, vec![]),
        (ADD_GREF_MAPPING, 1, list(5000..5003)),
    ];
    assert_eq!(orders, want);
    assert_eq!(bench.ctrl.kept(), Kept { grants: 1103, of: 1700, refusals: 0 });
    bench.ctrl.forget();
    // One response reports that nothing was mapped: it is not repeated.
    let orders = bench.serve(|(_, queue, _)| ([SUCCESS, INVALID_PARAMETER][*queue as usize], 0));
    let want: [Order; 4] = [
        (DEL_GREF_MAPPING, 0, list(1_588..2_100)),
        (DEL_GREF_MAPPING, 0, list(1_076..1_588)),
        (DEL_GREF_MAPPING, 0, list(1_000..1_076)),
        (DEL_GREF_MAPPING, 1, list(5000..5003)),
    ];
    assert_eq!(orders, want);
    assert_eq!(bench.ctrl.kept().grants, 0);
}

#[test]
fn a_refusal_ends_requests_and_keeps_earlier_grants() {
    for status in [NOT_SUPPORTED, INVALID_PARAMETER, BUFFER_OVERFLOW, 77] {
        let mut bench = Bench::new(vec![queue(8, 10), queue(100, 10)]);
        bench.ctrl.keep();
        assert_eq!(bench.serve(|_| (status, 10)).len(), 1);
        assert_eq!(bench.ctrl.kept(), Kept { grants: 0, of: 20, refusals: 1 });
        bench.ctrl.forget();
        assert!(bench.serve(|_| unreachable!()).is_empty());
    }
    let mut bench = Bench::new(vec![queue(8, 600), queue(1000, 10)]);
    bench.ctrl.keep();
    let mut lists = 0;
    let orders = bench.serve(|(kind, ..)| {
        lists += u32::from(*kind == ADD_GREF_MAPPING);
        if lists < 2 { (SUCCESS, 600) } else { (INVALID_PARAMETER, 0) }
    });
    assert_eq!(orders.len(), 3);
    assert_eq!(bench.ctrl.kept(), Kept { grants: 512, of: 610, refusals: 1 });
    bench.ctrl.forget();
    assert_eq!(bench.serve(|_| (SUCCESS, 512)), [(DEL_GREF_MAPPING, 0, list(8..520))]);
}

/// Where `rsp_prod` is (`io/ring.h`).
const RSP_PROD: usize = 8;

#[test]
fn a_hostile_back_end_loses_the_control_ring() {
    let asking = || {
        let mut bench = Bench::new(vec![queue(8, 10)]);
        bench.ctrl.keep();
        assert_eq!(bench.ctrl.step(), Ok(false));
        let (request, _) = bench.take().unwrap();
        (bench, request)
    };
    let (mut bench, request) = asking();
    bench.put(request.id.wrapping_add(1), request.kind, SUCCESS, 10);
    assert_eq!(bench.ctrl.step(), Err(Malformed::ResponseId(request.id.wrapping_add(1))));
    let (mut bench, request) = asking();
    bench.put(request.id, ADD_GREF_MAPPING, SUCCESS, 10);
    assert!(bench.ctrl.finish(Duration::from_secs(5)).is_err(), "a response to another request");
    for rsp_prod in [2, 257, u32::MAX, 1 << 31] {
        let (mut bench, _) = asking();
        bench.raw.store_u32(RSP_PROD, rsp_prod);
        assert!(bench.ctrl.finish(Duration::from_secs(5)).is_err(), "{rsp_prod}");
        assert!(bench.ctrl.step().is_err(), "{rsp_prod}, permanently");
        assert_eq!(bench.ctrl.kept().grants, 0);
    }
}

#[test]
fn a_back_end_without_responses_is_waited_for_up_to_the_limit() {
    let mut bench = Bench::new(vec![queue(8, 10)]);
    let [to_front, to_back] = bench.guest.ends.each_ref().map(Arc::clone);
    let channel = Channel::eventfds(to_back, to_front);
    bench.ctrl.keep();
    let before = Instant::now();
    // Events without responses.
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let noise = std::thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            channel.notify();
        }
    });
    let done = bench.ctrl.finish(Duration::from_millis(50));
    let took = before.elapsed();
    stop.store(true, Ordering::Relaxed);
    noise.join().unwrap();
    assert_eq!(done, Ok(false));
    assert!(took >= Duration::from_millis(50) && took < Duration::from_secs(5), "{took:?}");
    // It responds while we leave: this is handled first, and its grants are unmapped.
    bench.ctrl.forget();
    assert_eq!(bench.ctrl.step(), Ok(false));
    let (request, _) = bench.take().unwrap();
    bench.put(request.id, request.kind, SUCCESS, 10);
    assert_eq!(bench.ctrl.step(), Ok(true));
    bench.ctrl.keep();
    assert_eq!(bench.ctrl.step(), Ok(false));
    let (request, _) = bench.take().unwrap();
    bench.ctrl.forget();
    bench.put(request.id, request.kind, SUCCESS, 0);
    assert_eq!(bench.serve(|_| (SUCCESS, 10)), [(DEL_GREF_MAPPING, 0, list(8..18))]);
}

impl Bench {
    /// Responds to all hash requests by `answer`, a function of their number and type. Returns the
    /// requests as (type, data, contents of the page).
    fn serve_hash(&mut self, answer: impl Fn(usize, u16) -> (u32, u32)) -> Vec<Decoded> {
        let mut orders = Vec::new();
        while !self.ctrl.step().unwrap() {
            let request = self.back.take().unwrap().expect("it was published");
            assert!(self.back.take().unwrap().is_none(), "one at a time");
            orders.push(self.decode(request));
            let (status, data) = answer(orders.len() - 1, request.kind);
            self.put(request.id, request.kind, status, data);
        }
        orders
    }

    fn decode(&self, request: CtrlRequest) -> Decoded {
        let [a, b, c] = request.data;
        assert_eq!(c, 0, "a table goes as one piece");
        let each = match request.kind {
            SET_HASH_KEY => 1,
            SET_HASH_MAPPING => 4,
            _ => {
                assert_eq!(b, 0);
                return (request.kind, a, Vec::new());
            }
        };
        assert_eq!(a, self.list_ref);
        let mut bytes = vec![0; b as usize * each];
        let page = self.guest.page(1);
        let len = u16::try_from(bytes.len()).unwrap();
        assert_eq!(page.seg(0, len).unwrap().read(&mut bytes), bytes.len());
        (request.kind, b, bytes)
    }
}

type Decoded = (u16, u32, Vec<u8>);

/// Responds like a back end with tables of this length.
fn hashes(longest: u32) -> impl Fn(usize, u16) -> (u32, u32) {
    move |_, kind| match kind {
        // Includes an unknown type.
        GET_HASH_FLAGS => (SUCCESS, 0b11111),
        GET_HASH_MAPPING_SIZE => (SUCCESS, longest),
        _ => (SUCCESS, 0),
    }
}

#[test]
fn a_hash_is_configured_completely_before_its_types_are_set() {
    let three = || Bench::new((0..3).map(|n| queue(n * 100 + 8, 4)).collect());
    let mut bench = three();
    bench.ctrl.hash();
    assert!(!bench.ctrl.is_hashed());
    let orders = bench.serve_hash(hashes(1000));
    assert!(bench.ctrl.is_hashed() && bench.ctrl.step() == Ok(true));
    let key = orders[2].2.clone();
    let table: Vec<u8> = (0..126_u32).flat_map(|n| (n % 3).to_le_bytes()).collect();
    let want: [Decoded; 7] = [
        (SET_HASH_ALGORITHM, 1, vec![]),
        (GET_HASH_FLAGS, 0, vec![]),
        (SET_HASH_KEY, 40, key.clone()),
        (GET_HASH_MAPPING_SIZE, 0, vec![]),
        (SET_HASH_MAPPING_SIZE, 126, vec![]),
        (SET_HASH_MAPPING, 126, table),
        (SET_HASH_FLAGS, 0b1111, vec![]),
    ];
    assert_eq!(orders, want);
    // Each vif has its own key; a back end without tables uses the remainder.
    let mut other = three();
    other.ctrl.hash();
    let orders = other.serve_hash(hashes(0));
    assert_ne!(orders[2].2, key);
    let kinds: Vec<_> = orders.iter().map(|order| order.0).collect();
    assert_eq!(kinds[4..], [SET_HASH_MAPPING_SIZE, SET_HASH_FLAGS]);
    assert!(orders[4].1 == 0 && other.ctrl.is_hashed());
    assert_eq!(other.ctrl.kept().refusals, 0);
}

#[test]
fn a_refused_hash_is_reset_and_the_vif_continues_without() {
    for refused in 0..7 {
        for status in [NOT_SUPPORTED, INVALID_PARAMETER, BUFFER_OVERFLOW, 77] {
            let mut bench = Bench::new(vec![queue(8, 4), queue(100, 4)]);
            bench.ctrl.hash();
            let answer = hashes(128);
            let orders = bench.serve_hash(|n, kind| match n == refused {
                true => (status, 7),
                false => answer(n, kind),
            });
            assert!(!bench.ctrl.is_hashed(), "{refused}");
            // A refused algorithm is not reset.
            let undone: &[Decoded] =
                if refused == 0 { &[] } else { &[(SET_HASH_ALGORITHM, 0, vec![])] };
            assert_eq!(orders[refused + 1..], *undone, "{refused}");
            assert_eq!(bench.ctrl.kept().refusals, 1);
            bench.ctrl.keep();
            assert_eq!(bench.serve(|_| (SUCCESS, 4)).len(), 4);
            assert_eq!(bench.ctrl.kept().grants, 8, "static grants are not affected");
        }
    }
    // A back end without hash types, which also refuses the reset.
    let mut bench = Bench::new(vec![queue(8, 4)]);
    bench.ctrl.hash();
    let orders = bench.serve_hash(|n, _| ([SUCCESS, SUCCESS, NOT_SUPPORTED][n], 0));
    assert_eq!((orders.len(), bench.ctrl.is_hashed()), (3, false));
}

#[test]
fn a_late_response_to_an_earlier_configuration_is_ignored() {
    let mut bench = Bench::new(vec![queue(8, 4), queue(100, 4)]);
    bench.ctrl.hash();
    assert_eq!(bench.ctrl.step(), Ok(false));
    let request = bench.back.take().unwrap().unwrap();
    bench.ctrl.hash();
    bench.put(request.id, request.kind, NOT_SUPPORTED, 0);
    let kinds: Vec<_> = bench.serve_hash(hashes(128)).iter().map(|order| order.0).collect();
    assert_eq!((kinds.len(), kinds[0]), (7, SET_HASH_ALGORITHM));
    assert!(bench.ctrl.is_hashed());
    bench.ctrl.hash();
    assert_eq!(bench.serve_hash(hashes(128)).len(), 7, "and again, with the next back end");
}
