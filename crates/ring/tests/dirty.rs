//! Dirty log of a ring: every page that the device half changes is marked, wherever the ring lies
//! in its pages and whenever the front-end takes the bits or replaces the log.
#![allow(clippy::as_conversions)]

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;
use ring::virtq::{Buf, Chain, DeviceQueue, DriverQueue, Features, Layout, RingLog, Taken};
use shm::{DirtyLog, GuestMemory, LOG_PAGE, Mapping, Region};

const BASE: u64 = 0x1000;
const MEMORY: u64 = 1 << 17;
/// Buffers are not written here: only the ring is checked.
const BUFFER: u64 = BASE + 0x1_8000;

#[derive(Clone, Debug)]
enum Op {
    /// The driver makes so many chains of so many descriptors available.
    Add(u8, u8),
    /// The device takes up to so many chains and returns the last few.
    Take(u8, u8),
    /// The device uses up to so many; whether at once, as transmitted frames are.
    Put(u8, bool),
    Publish,
    Arm,
    Disarm,
    Collect,
    /// The front-end takes the bits of the log.
    Pass,
    /// A new log.
    Replace,
    /// Logging ends, and begins again.
    OffAndOn,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (1_u8..20, 1_u8..3).prop_map(|(n, slots)| Op::Add(n, slots)),
        3 => (1_u8..40, 0_u8..3).prop_map(|(n, back)| Op::Take(n, back)),
        3 => (1_u8..40, any::<bool>()).prop_map(|(n, at_once)| Op::Put(n, at_once)),
        3 => Just(Op::Publish),
        1 => Just(Op::Arm),
        1 => Just(Op::Disarm),
        2 => Just(Op::Collect),
        1 => Just(Op::Pass),
        1 => Just(Op::Replace),
        1 => Just(Op::OffAndOn),
    ]
}

/// A log with the memory behind it.
struct Log(Arc<Mapping>, Arc<DirtyLog>);

impl Log {
    fn new() -> Self {
        let len = (BASE + MEMORY) / LOG_PAGE / 8 + 1;
        let mapping = Arc::new(Mapping::memfd("log", len).unwrap());
        let log = DirtyLog::new(&mapping, 0, len).unwrap();
        Self(mapping, Arc::new(log))
    }

    fn pages(&self) -> BTreeSet<u64> {
        let mut bytes = vec![0; (self.1.pages() / 8) as usize];
        self.0.seg(0, bytes.len() as u32).unwrap().read(&mut bytes);
        (0..self.1.pages()).filter(|p| bytes[(p / 8) as usize] >> (p % 8) & 1 != 0).collect()
    }

    fn take(&self) {
        self.0.seg_mut(0, (self.1.pages() / 8) as u32).unwrap().zero();
    }
}

struct Model {
    mapping: Arc<Mapping>,
    memory: GuestMemory,
    driver: DriverQueue,
    device: DeviceQueue,
    layout: Layout,
    /// Added to the addresses that are logged; not 0 in the canary.
    wrong: u64,
    log: Log,
    /// Pages changed and not yet checked.
    changed: BTreeSet<u64>,
    held: Vec<Chain>,
}

impl Model {
    fn new(features: Features, size: u16, start: u16, skew: u64, wrong: u64) -> Self {
        let mapping = Arc::new(Mapping::memfd("ring", MEMORY).unwrap());
        let region = Region {
            guest_addr: BASE,
            user_addr: 0,
            len: MEMORY,
            offset: 0,
            mapping: Arc::clone(&mapping),
        };
        let memory = GuestMemory::new(vec![region]).unwrap();
        // Each area crosses pages, or begins shortly before the end of one.
        let at = |n: u64| BASE + n * 0x8000 - 16 * skew;
        let layout = Layout { size, desc: at(1), driver: BASE, device: at(2) };
        let half = u32::from(start % size) | u32::from(start & 0x8000);
        let base = if features.packed { half | half << 16 } else { start.into() };
        let driver = DriverQueue::new(&memory, &layout, features, base, None).unwrap();
        let device = DeviceQueue::new(&memory, &layout, features, base).unwrap();
        let (log, changed) = (Log::new(), BTreeSet::new());
        let held = Vec::new();
        let mut model = Self { mapping, memory, driver, device, layout, wrong, log, changed, held };
        model.set_log();
        model
    }

    fn set_log(&mut self) {
        self.device.set_log(Some(RingLog {
            log: Arc::clone(&self.log.1),
            desc: self.layout.desc + self.wrong,
            device: self.layout.device + self.wrong,
        }));
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY as usize];
        self.mapping.seg(0, MEMORY as u32).unwrap().read(&mut bytes);
        bytes
    }

    /// Lets the device act, and records the pages that it changes.
    fn device(&mut self, act: impl FnOnce(&mut DeviceQueue)) {
        let before = self.bytes();
        act(&mut self.device);
        let after = self.bytes();
        let pages = before.chunks(LOG_PAGE as usize).zip(after.chunks(LOG_PAGE as usize));
        let changed = (0_u64..).zip(pages).filter(|(_, (a, b))| a != b);
        self.changed.extend(changed.map(|(page, _)| BASE / LOG_PAGE + page));
    }

    /// At the end of a burst: changed pages that are not marked.
    fn unmarked(&mut self) -> Vec<u64> {
        let marked = self.log.pages();
        std::mem::take(&mut self.changed).difference(&marked).copied().collect()
    }

    fn run(&mut self, ops: &[Op]) -> Vec<u64> {
        let mut unmarked = Vec::new();
        for op in ops {
            match *op {
                Op::Add(chains, slots) => {
                    let buf = Buf { addr: BUFFER, len: 64, write: true };
                    let chain = vec![buf; slots.into()];
                    (0..chains).for_each(|_| _ = self.driver.add(&chain));
                    self.driver.publish();
                }
                Op::Take(max, back) => {
                    let mut taken = Taken::with_capacity(64, 64);
                    let n = self.device.take(&self.memory, max.into(), &mut taken).unwrap();
                    let keep = n - usize::from(back).min(n);
                    self.device.untake(&taken.chains[keep..]);
                    self.held.extend(&taken.chains[..keep]);
                }
                Op::Put(max, at_once) => {
                    let n = usize::from(max).min(self.held.len());
                    let chains: Vec<Chain> = self.held.drain(..n).collect();
                    self.device(|device| {
                        if at_once {
                            return device.put_all(&chains);
                        }
                        chains.iter().for_each(|chain| device.put(chain, 60));
                    });
                }
                Op::Publish => {
                    self.device(DeviceQueue::publish);
                    unmarked.extend(self.unmarked());
                }
                Op::Arm => self.device(|device| _ = device.arm()),
                Op::Disarm => self.device(DeviceQueue::disarm),
                Op::Collect => {
                    self.driver.take_used(64, &mut Vec::new()).unwrap();
                }
                Op::Pass => {
                    self.log.take();
                    // These pages are sent after they were changed.
                    self.changed.clear();
                }
                Op::Replace => {
                    let old = std::mem::replace(&mut self.log, Log::new());
                    self.set_log();
                    // Nothing is marked in a log that the front-end reads once we have left it.
                    let left = old.pages();
                    self.device(DeviceQueue::publish);
                    assert_eq!(old.pages(), left);
                    self.changed = self.changed.difference(&left).copied().collect();
                    unmarked.extend(self.unmarked());
                }
                Op::OffAndOn => {
                    self.device.set_log(None);
                    self.device(|device| {
                        device.publish();
                        device.disarm();
                    });
                    self.changed.clear();
                    self.set_log();
                }
            }
        }
        self.device(DeviceQueue::publish);
        unmarked.extend(self.unmarked());
        unmarked
    }
}

fn features() -> impl Strategy<Value = Features> {
    (any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(packed, event_idx, in_order)| {
        Features { packed, event_idx, in_order, indirect: false }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
    #[test]
    fn every_page_of_the_ring_that_the_device_changes_is_marked(
        features in features(),
        bits in 0_u32..9,
        start in prop_oneof![any::<u16>(), 65_500_u16..=65_535, 32_750_u16..32_790],
        skew in 0_u64..40,
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let unmarked = Model::new(features, 1 << bits, start, skew, 0).run(&ops);
        prop_assert!(unmarked.is_empty(), "pages {unmarked:?}");
    }
}

/// The model finds marks that are missing.
#[test]
fn ring_that_is_logged_at_another_address_is_found() {
    for (packed, event_idx) in [(false, false), (false, true), (true, false), (true, true)] {
        let features = Features { packed, event_idx, ..Features::default() };
        let ops = [Op::Add(9, 1), Op::Take(9, 0), Op::Put(9, false), Op::Publish];
        let found = |wrong| Model::new(features, 16, 0x8000, 4, wrong).run(&ops);
        assert!(found(0).is_empty());
        assert!(!found(0x3000).is_empty(), "{features:?}");
    }
}
