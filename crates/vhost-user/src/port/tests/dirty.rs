//! Dirty log of a queue: every page that changes while a queue is served is marked in the log, on
//! every way bytes reach the guest.

use std::collections::BTreeSet;

use proptest::prelude::*;
use shm::{DirtyLog, LOG_PAGE, SegMut};
use switch::direct::{DirectFrame, Lent};

use super::egress::{Rx, granted};
use super::*;

/// Memory that the tests use: rings, buffers, and buffers across the two regions.
const WATCHED: [(u64, u32); 3] =
    [(BASE, 0x1_0000), (BUFFERS, 0x10_0000), (EDGE - 0x1_0000, 0x2_0000)];

/// A log with the memory behind it.
pub(super) struct Log {
    mapping: Arc<Mapping>,
    dirty: Arc<DirtyLog>,
}

impl Log {
    pub(super) fn new() -> Self {
        let len = (BASE + 2 * HALF) / LOG_PAGE / 8;
        let mapping = Arc::new(Mapping::memfd("log", len).unwrap());
        let dirty = Arc::new(DirtyLog::new(&mapping, 0, len).unwrap());
        Self { mapping, dirty }
    }

    pub(super) fn ring(&self) -> Option<RingLog> {
        Some(RingLog { log: Arc::clone(&self.dirty), desc: LAYOUT.desc, device: LAYOUT.device })
    }

    /// Takes the marks, as the front-end does at each pass.
    pub(super) fn take(&self) -> BTreeSet<u64> {
        let mut bytes = vec![0; (self.dirty.pages() / 8) as usize];
        self.mapping.seg(0, bytes.len() as u32).unwrap().read(&mut bytes);
        self.mapping.seg_mut(0, bytes.len() as u32).unwrap().zero();
        (0..self.dirty.pages()).filter(|p| bytes[(p / 8) as usize] >> (p % 8) & 1 != 0).collect()
    }
}

fn image(memory: &GuestMemory) -> Vec<Vec<u8>> {
    WATCHED.iter().map(|(addr, len)| read(memory, *addr, *len)).collect()
}

/// Pages that differ between two images.
fn changed(before: &[Vec<u8>], after: &[Vec<u8>]) -> BTreeSet<u64> {
    let mut pages = BTreeSet::new();
    for ((addr, _), (before, after)) in WATCHED.iter().zip(before.iter().zip(after)) {
        let both = before.chunks(LOG_PAGE as usize).zip(after.chunks(LOG_PAGE as usize));
        let first = addr / LOG_PAGE;
        pages.extend((first..).zip(both).filter(|(_, (a, b))| a != b).map(|(page, _)| page));
    }
    pages
}

/// Changed pages that are not marked, after `act`; and their number in all.
fn unmarked(rx: &mut Rx, log: &Log, act: impl FnOnce(&mut Rx)) -> (Vec<u64>, usize) {
    log.take();
    let before = image(&rx.guest.memory);
    act(rx);
    let pages = changed(&before, &image(&rx.guest.memory));
    (pages.difference(&log.take()).copied().collect(), pages.len())
}

fn logged(features: Features, format: Format) -> (Rx, Log) {
    let (mut rx, log) = (Rx::with(features, format), Log::new());
    rx.egress.set_log(log.ring());
    (rx, log)
}

#[derive(Clone, Debug)]
enum Op {
    /// The guest posts a chain of these buffers, the first so many bytes before the end of a page.
    Post(Vec<u32>, u16),
    /// The same across two regions.
    Edge(u32),
    /// Frames from mapped memory, and whether their heads were copied.
    Put(Vec<u32>, bool),
    Held(u32),
    /// Frames read into lent buffers: their lengths, how many of them are accepted, and of the
    /// others, whether they are taken back or no frames.
    Direct(Vec<u32>, usize, bool),
    Arm,
    Disarm,
    /// The guest takes used chains.
    Collect,
}

fn op() -> impl Strategy<Value = Op> {
    let len = prop_oneof![60_u32..200, 1000_u32..1515, 2000_u32..9000, 20_000_u32..65_000];
    let lens = prop::collection::vec(len.clone(), 1..6);
    prop_oneof![
        6 => (prop::collection::vec(1_u32..3000, 1..4), 0_u16..200)
            .prop_map(|(lens, before)| Op::Post(lens, before)),
        1 => (1600_u32..5000).prop_map(Op::Edge),
        3 => (lens.clone(), any::<bool>()).prop_map(|(lens, heads)| Op::Put(lens, heads)),
        1 => len.prop_map(Op::Held),
        3 => (lens, 0_usize..6, any::<bool>()).prop_map(|(l, n, b)| Op::Direct(l, n, b)),
        1 => Just(Op::Arm),
        1 => Just(Op::Disarm),
        2 => Just(Op::Collect),
    ]
}

/// As an uplink reads frames into a guest's buffers.
fn direct(rx: &mut Rx, lens: &[u32], accepts: usize, back: bool) {
    let Some(to) = rx.egress.direct() else { return };
    let mut lent = Lent::default();
    to.lend(lens.len(), lens[0], &mut lent);
    let mut came = Vec::new();
    lent.for_each_frame(|segs, room| {
        let len = lens[came.len()].min(room);
        let bytes = frame(len as usize, len as u8 | 1);
        let mut rest = &bytes[..];
        segs.for_each(|mut seg: SegMut<'_>| {
            let n = seg.write(&rest[..rest.len().min(seg.len() as usize)]);
            rest = &rest[n as usize..];
        });
        came.push(DirectFrame { len, hdr: TSO });
    });
    let done = to.accept(&came[..accepts.min(came.len())]);
    for (i, frame) in came[done..].iter().enumerate() {
        match back {
            true => to.take_back(i, &mut vec![0; frame.len as usize]),
            false => to.discard(i, frame.len),
        }
    }
    rx.egress.flush();
}

fn run(rx: &mut Rx, log: &Log, ops: &[Op]) -> Result<usize, TestCaseError> {
    let mut all = 0;
    for op in ops {
        let act: Box<dyn FnOnce(&mut Rx)> = match op.clone() {
            Op::Post(lens, before) => {
                let at = rx.guest.at.next_multiple_of(LOG_PAGE) - u64::from(before);
                rx.guest.at = at.max(rx.guest.at);
                if rx.guest.at < BUFFERS + 0xf_0000 && rx.guest.driver.free() >= lens.len() as u16 {
                    rx.post(&lens);
                }
                continue;
            }
            Op::Edge(len) => {
                let taken = rx.posted.iter().any(|(_, bufs)| bufs[0].addr < EDGE - 0x100);
                if rx.guest.driver.free() > 0 && (rx.posted.is_empty() || !taken) {
                    rx.post_at(vec![Buf { addr: EDGE - 700, len, write: true }]);
                }
                continue;
            }
            Op::Collect => {
                let used = rx.guest.used();
                rx.posted.retain(|(id, _)| used.iter().all(|(used, _)| used != id));
                continue;
            }
            Op::Put(lens, heads) => Box::new(move |rx| {
                let hdr = |len| if len > 1514 { TSO } else { VnetHdr::NONE };
                let frames: Vec<_> =
                    lens.iter().map(|n| (hdr(*n), frame(*n as usize, *n as u8))).collect();
                rx.put(&frames, heads).unwrap();
            }),
            Op::Held(len) => Box::new(move |rx| {
                let bytes = frame(len as usize, 3);
                rx.egress.put_parts(&bytes[..20], &[Seg::of(&bytes[20..])], &TSO).unwrap();
                rx.egress.flush();
            }),
            Op::Direct(lens, accepts, back) => Box::new(move |rx| direct(rx, &lens, accepts, back)),
            Op::Arm => Box::new(|rx| _ = rx.egress.arm()),
            Op::Disarm => Box::new(|rx| rx.egress.disarm()),
        };
        let (missing, pages) = unmarked(rx, log, act);
        prop_assert!(missing.is_empty(), "{op:?}: pages {missing:x?} of {pages}");
        all += pages;
    }
    // The ring stops, and its last positions are in the log.
    let (missing, _) = unmarked(rx, log, |rx| _ = rx.egress.deactivate());
    prop_assert!(missing.is_empty(), "stopped: pages {missing:x?}");
    Ok(all)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]
    #[test]
    fn every_page_of_a_guest_that_changes_is_marked(
        kind in 0_usize..16,
        mergeable in prop_oneof![3 => Just(true), 1 => Just(false)],
        hdr_len in prop_oneof![3 => Just(12_u32), 1 => Just(10)],
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let features = kinds().nth(kind).unwrap();
        let hdr_len = if mergeable { 12 } else { hdr_len };
        let format = Format { mergeable, hdr_len, ..format() };
        let (mut rx, log) = logged(features, format);
        run(&mut rx, &log, &ops)?;
    }
}

/// The same without a log finds pages, or the test above proves nothing.
#[test]
fn pages_that_are_not_marked_are_found_on_every_way() {
    let posts = || (0..12).map(|_| Op::Post(vec![1600], 100));
    for way in [
        Op::Put(vec![60], true),
        Op::Put(vec![20_000 / 2], false),
        Op::Held(500),
        Op::Direct(vec![1500, 1500], 2, false),
        Op::Direct(vec![1500, 1500], 1, true),
        Op::Direct(vec![1500, 1500], 0, false),
    ] {
        let ops: Vec<Op> = posts().chain([way.clone()]).collect();
        let (mut rx, log) = logged(Features::default(), format());
        assert!(run(&mut rx, &log, &ops).unwrap() > 0, "{way:?}");
        let (mut rx, log) = logged(Features::default(), format());
        rx.egress.set_log(None);
        assert!(run(&mut rx, &log, &ops).is_err(), "{way:?}");
    }
}

#[test]
fn used_ring_of_a_sending_guest_is_marked() {
    for features in kinds() {
        let (mut tx, log) = (Tx::with(features, format()), Log::new());
        tx.ingress.set_log(log.ring());
        for n in 0..3 {
            (0..9).for_each(|_| tx.send(VnetHdr::NONE, &frame(60, n)));
            let before = image(&tx.guest.memory);
            log.take();
            assert_eq!(tx.all().len(), 9);
            let _ = tx.ingress.arm();
            tx.ingress.disarm();
            let pages = changed(&before, &image(&tx.guest.memory));
            assert!(!pages.is_empty() && pages.is_subset(&log.take()), "{features:?}");
            tx.guest.used();
        }
    }
}

/// Found by fuzzing: what did not go to a buffer outside memory went to the next one, beyond what
/// was marked there.
#[test]
fn buffers_after_one_outside_memory_are_not_written_to() {
    for features in kinds() {
        let (mut rx, log) = logged(features, format());
        let buf = |addr, len| Buf { addr, len, write: true };
        rx.post_at(vec![buf(EDGE + 2 * HALF, 3000), buf(BUFFERS, 12_000)]);
        let put = |rx: &mut Rx| {
            assert_eq!(rx.put(&[(VnetHdr::NONE, frame(9000, 1))], true).unwrap(), 1);
        };
        assert_eq!(unmarked(&mut rx, &log, put).0, Vec::<u64>::new(), "{features:?}");
        assert_eq!(read(&rx.guest.memory, BUFFERS, 12_000), vec![0; 12_000]);
        assert_eq!(rx.stats.drops_bad_addr.get(), 1);
    }
}

/// The front-end copies the last pages once SET_VRING_ENABLE is replied to.
#[test]
fn disabled_ring_is_not_written_to() {
    for features in kinds() {
        let (mut rx, log) = logged(features, format());
        (0..9).for_each(|_| rx.post(&[2000]));
        assert_eq!(rx.one(frame(60, 1)), 1);
        let _ = rx.egress.arm();
        rx.egress.enable(false);
        log.take();
        let before = image(&rx.guest.memory);
        rx.egress.disarm();
        rx.one(frame(60, 2));
        let _ = (rx.egress.room(60, 5), rx.egress.arm());
        rx.egress.disarm();
        rx.egress.notify();
        assert_eq!((log.take(), before), (BTreeSet::new(), image(&rx.guest.memory)));

        let mut tx = Tx::with(features, format());
        tx.ingress.set_log(log.ring());
        tx.send(VnetHdr::NONE, &frame(60, 1));
        assert_eq!((tx.all().len(), tx.ingress.arm()), (1, true));
        tx.ingress.enable(false);
        log.take();
        let before = image(&tx.guest.memory);
        tx.ingress.disarm();
        assert_eq!((tx.all().len(), tx.ingress.arm()), (0, true));
        tx.ingress.disarm();
        assert_eq!((log.take(), before), (BTreeSet::new(), image(&tx.guest.memory)));
    }
}

#[test]
fn granted_pages_are_copied_before_they_are_marked() {
    for features in kinds() {
        let (mut rx, log) = logged(features, format());
        (0..6).for_each(|_| rx.post(&[3000]));
        let (missing, pages) = unmarked(&mut rx, &log, |rx| {
            let (found, _, calls) = granted::put(rx, &[(1, 1), (2, 2), (3, 3)]);
            assert_eq!(found.len(), 3);
            // One for the heads, and one for each frame.
            assert_eq!(calls, 4);
        });
        assert!(missing.is_empty() && pages > 0, "{features:?}: {missing:?}");
    }
}

#[test]
fn log_that_is_replaced_is_left_at_once_and_has_all_earlier_marks() {
    let (mut rx, old) = logged(Features::default(), format());
    (0..4).for_each(|_| rx.post(&[2000]));
    let before = image(&rx.guest.memory);
    rx.one(frame(1500, 1));
    let new = Log::new();
    rx.egress.set_log(new.ring());
    let pages = changed(&before, &image(&rx.guest.memory));
    assert!(pages.is_subset(&old.take()));
    assert!(unmarked(&mut rx, &new, |rx| _ = rx.one(frame(1500, 2))).0.is_empty());
    assert!(old.take().is_empty());
    rx.egress.set_log(None);
    rx.one(frame(1500, 3));
    assert!(new.take().is_empty());
}

#[test]
#[cfg_attr(miri, ignore = "needs files in memory")]
fn truncated_log_stops_the_port() {
    let path = std::env::temp_dir().join(format!("pvswitch-log-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    let len = (BASE + 2 * HALF) / LOG_PAGE / 8;
    file.set_len(len).unwrap();
    let mapping = Arc::new(Mapping::new(file.as_fd(), 0, len).unwrap());
    let dirty = Arc::new(DirtyLog::new(&mapping, 0, len).unwrap());
    let mut rx = Rx::new();
    rx.egress.set_log(Some(RingLog { log: dirty, desc: LAYOUT.desc, device: LAYOUT.device }));
    (0..4).for_each(|_| rx.post(&[2000]));
    assert_eq!(rx.one(frame(60, 1)), 1);
    file.set_len(0).unwrap();
    // Its marks are lost from here on; that is found at the next burst.
    assert_eq!(rx.one(frame(60, 2)), 1);
    assert_eq!(rx.put(&[(VnetHdr::NONE, frame(60, 3))], true), Err(Fault(LOG_LOST.into())));
    // Another port, and this one after it has stopped, continue.
    assert!(rx.egress.deactivate().is_some());
    let mut other = Rx::new();
    other.post(&[2000]);
    assert_eq!(other.one(frame(60, 1)), 1);
}
