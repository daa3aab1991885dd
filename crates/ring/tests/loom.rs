//! Every interleaving of the two halves on a ring of size 2, with loom:
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pvswitch-ring --test loom --release`
//!
//! Three models for each layout. `publish_take`: what one side published is whole when the other
//! sees it. `arm_avail`: the device never sleeps on a chain without having been kicked. `arm_used`:
//! the driver never sleeps on a used chain without having been called. Then canaries: the same
//! models with a deliberately broken half must fail, or the models prove nothing.
#![cfg(loom)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use loom::thread;
use ring::virtq::{
    Armed, Buf, Chain, DeviceQueue, DriverQueue, Features, ModelledRing, Taken, Used,
};
use shm::GuestMemory;
use shm::sync::Ordering;

const SPLIT: Features =
    Features { packed: false, event_idx: false, indirect: false, in_order: false };
const SPLIT_EVENT: Features = Features { event_idx: true, ..SPLIT };
const PACKED: Features = Features { packed: true, ..SPLIT };
const PACKED_EVENT: Features = Features { event_idx: true, ..PACKED };

/// Split: near the wrap, and where the zeroed event words request no notification. Packed: the
/// second slot of the ring, so that the next chain wraps.
fn base(features: Features) -> u32 {
    if features.packed { 0x8001_8001 } else { 65534 }
}

fn halves(features: Features) -> (ModelledRing, DriverQueue, DeviceQueue) {
    let ring = ModelledRing::new(2, features.packed);
    let driver = DriverQueue::modelled(&ring, features, base(features)).unwrap();
    let device = DeviceQueue::modelled(&ring, features, base(features)).unwrap();
    (ring, driver, device)
}

/// A recognisable buffer.
fn buf(i: u32) -> Buf {
    Buf { addr: 1000 + u64::from(i), len: 100 + i, write: true }
}

/// Takes all available chains into `got`.
fn take(device: &mut DeviceQueue, got: &mut Vec<(Chain, Buf)>) -> usize {
    let mut taken = Taken::with_capacity(2, 2);
    let n = device.take(&GuestMemory::default(), 2, &mut taken).unwrap();
    got.extend(taken.chains.iter().map(|c| (*c, taken.writes(c)[0])));
    n
}

/// One chain in each direction before the model branches, so that the ring is not fresh.
fn one_round(driver: &mut DriverQueue, device: &mut DeviceQueue) {
    driver.add(&[buf(9)]).unwrap();
    driver.publish();
    let _ = driver.kick_needed();
    let mut got = Vec::new();
    assert_eq!(take(device, &mut got), 1);
    device.put(&got[0].0, 1);
    device.publish();
    let _ = device.call_needed();
    assert_eq!(driver.take_used(2, &mut Vec::new()), Ok(1));
}

// ---- what is published is whole ----

fn publish_take(features: Features) {
    loom::model(move || {
        let (_ring, mut driver, mut device) = halves(features);
        let peer = thread::spawn(move || {
            let mut got = Vec::new();
            take(&mut device, &mut got);
            take(&mut device, &mut got);
            for (i, (chain, b)) in (0..).zip(&got) {
                assert_eq!(*b, buf(i));
                device.put(chain, b.len);
                device.publish();
            }
            got.len()
        });
        let ids = [driver.add(&[buf(0)]).unwrap(), driver.add(&[buf(1)]).unwrap()];
        driver.publish();
        let mut used = Vec::new();
        driver.take_used(2, &mut used).unwrap();
        let served = peer.join().unwrap();
        driver.take_used(2, &mut used).unwrap();
        let all = [Used { id: ids[0], len: 100 }, Used { id: ids[1], len: 101 }];
        assert_eq!(used, all[..served]);
        assert!(served == 0 || served == 2, "a burst becomes visible as a whole");
    });
}

#[test]
fn split_publish_take() {
    publish_take(SPLIT);
}

#[test]
fn packed_publish_take() {
    publish_take(PACKED);
}

// ---- no wake-up is lost ----

/// How the device arms; the canaries substitute a broken version.
type DeviceArm = fn(&ModelledRing, &mut DeviceQueue) -> Armed;
/// How the driver arms.
type DriverArm = fn(&ModelledRing, &mut DriverQueue) -> Armed;

fn device_arm(_: &ModelledRing, device: &mut DeviceQueue) -> Armed {
    device.arm()
}

fn driver_arm(_: &ModelledRing, driver: &mut DriverQueue) -> Armed {
    driver.arm()
}

/// Sleeps until all that is in flight is used.
fn driver_arm_all(_: &ModelledRing, driver: &mut DriverQueue) -> Armed {
    driver.arm_after(2 - driver.free())
}

/// The driver publishes chain after chain and kicks when needed; the device takes until `arm` lets
/// it sleep. A device asleep with a chain left and no kick is a guest that hangs.
fn arm_avail(features: Features, chains: u32, arm: DeviceArm) {
    loom::model(move || {
        let (ring, mut driver, mut device) = halves(features);
        one_round(&mut driver, &mut device);
        device.disarm();
        let peer = thread::spawn(move || {
            let mut got = Vec::new();
            take(&mut device, &mut got);
            while arm(&ring, &mut device) == Armed::WorkPending {
                device.disarm();
                assert!(take(&mut device, &mut got) > 0, "pending work can be taken");
            }
            got.len()
        });
        let mut kicked = false;
        for i in 0..chains {
            driver.add(&[buf(i)]).unwrap();
            driver.publish();
            kicked |= driver.kick_needed();
        }
        let taken = peer.join().unwrap();
        assert!(kicked || taken == usize::try_from(chains).unwrap(), "asleep and not kicked");
    });
}

/// The mirror image: the device uses chain after chain, the driver collects until it may sleep.
fn arm_used(features: Features, chains: usize, arm: DriverArm) {
    loom::model(move || {
        let (ring, mut driver, mut device) = halves(features);
        one_round(&mut driver, &mut device);
        driver.disarm();
        let mut got = Vec::new();
        for i in 0..chains {
            driver.add(&[buf(u32::try_from(i).unwrap())]).unwrap();
        }
        driver.publish();
        let _ = driver.kick_needed();
        assert_eq!(take(&mut device, &mut got), chains);
        let peer = thread::spawn(move || {
            let mut used = Vec::new();
            driver.take_used(2, &mut used).unwrap();
            while arm(&ring, &mut driver) == Armed::WorkPending {
                driver.disarm();
                assert!(driver.take_used(2, &mut used).unwrap() > 0, "pending work can be taken");
            }
            used.len()
        });
        let mut called = false;
        for (chain, _) in &got {
            device.put(chain, 1);
            device.publish();
            called |= device.call_needed();
        }
        let collected = peer.join().unwrap();
        assert!(called || collected == chains, "asleep and not called");
    });
}

#[test]
fn split_arm_avail() {
    arm_avail(SPLIT, 1, device_arm);
    arm_avail(SPLIT, 2, device_arm);
}

#[test]
fn split_arm_avail_event_idx() {
    arm_avail(SPLIT_EVENT, 1, device_arm);
    arm_avail(SPLIT_EVENT, 2, device_arm);
}

#[test]
fn packed_arm_avail() {
    arm_avail(PACKED, 1, device_arm);
    arm_avail(PACKED, 2, device_arm);
}

#[test]
fn packed_arm_avail_event_idx() {
    arm_avail(PACKED_EVENT, 1, device_arm);
    arm_avail(PACKED_EVENT, 2, device_arm);
}

#[test]
fn split_arm_used() {
    arm_used(SPLIT, 1, driver_arm);
    arm_used(SPLIT, 2, driver_arm);
}

#[test]
fn split_arm_used_event_idx() {
    arm_used(SPLIT_EVENT, 1, driver_arm);
    arm_used(SPLIT_EVENT, 2, driver_arm);
}

#[test]
fn split_arm_used_later() {
    arm_used(SPLIT, 2, driver_arm_all);
    arm_used(SPLIT_EVENT, 2, driver_arm_all);
}

#[test]
fn packed_arm_used() {
    arm_used(PACKED, 1, driver_arm);
    arm_used(PACKED, 2, driver_arm);
}

#[test]
fn packed_arm_used_event_idx() {
    arm_used(PACKED_EVENT, 1, driver_arm);
    arm_used(PACKED_EVENT, 2, driver_arm);
}

#[test]
fn packed_arm_used_later() {
    arm_used(PACKED, 2, driver_arm_all);
    arm_used(PACKED_EVENT, 2, driver_arm_all);
}

// ---- canaries ----

/// Expects that the model fails because of a missed wake-up.
fn assert_finds(what: &str, model: impl FnOnce()) {
    let Err(panic) = catch_unwind(AssertUnwindSafe(model)) else {
        panic!("{what}: the model passed, so it proves nothing");
    };
    let message = panic.downcast_ref::<&str>().map(ToString::to_string);
    let message = message.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
    assert!(message.contains("asleep"), "{what}: failed for another reason: {message}");
}

/// Wrong order: checks the ring first, then arms.
fn checks_then_arms(_: &ModelledRing, device: &mut DeviceQueue) -> Armed {
    if device.has_work() {
        return Armed::WorkPending;
    }
    let _ = device.arm();
    Armed::Armed
}

fn driver_checks_then_arms(_: &ModelledRing, driver: &mut DriverQueue) -> Armed {
    if driver.has_used() {
        return Armed::WorkPending;
    }
    let _ = driver.arm();
    Armed::Armed
}

/// `arm` without its fence: program order is right, but a processor with a store buffer may reorder
/// the store and the load.
fn split_arms_without_fence(ring: &ModelledRing, device: &mut DeviceQueue) -> Armed {
    let next = u16::try_from(device.base()).unwrap();
    ring.device.sync_store(4 + 8 * usize::from(ring.size), next, Ordering::Relaxed);
    if device.has_work() { Armed::WorkPending } else { Armed::Armed }
}

fn packed_arms_without_fence(ring: &ModelledRing, device: &mut DeviceQueue) -> Armed {
    ring.device.sync_store(2, 0, Ordering::Release);
    if device.has_work() { Armed::WorkPending } else { Armed::Armed }
}

#[test]
fn canary_recheck_before_arm_is_found() {
    for features in [SPLIT, SPLIT_EVENT, PACKED, PACKED_EVENT] {
        let what = format!("{features:?}");
        assert_finds(&what, || arm_avail(features, 1, checks_then_arms));
        assert_finds(&what, || arm_used(features, 1, driver_checks_then_arms));
    }
}

#[test]
fn canary_missing_fence_is_found() {
    assert_finds("split", || arm_avail(SPLIT_EVENT, 1, split_arms_without_fence));
    assert_finds("packed", || arm_avail(PACKED, 1, packed_arms_without_fence));
}

#[test]
fn canary_publication_without_release_is_found() {
    let found = catch_unwind(|| {
        loom::model(|| {
            let (ring, mut driver, mut device) = halves(SPLIT);
            let driver_area = ring.driver.clone();
            let peer = thread::spawn(move || take(&mut device, &mut Vec::new()));
            driver.add(&[buf(0)]).unwrap();
            driver_area.sync_store(2, 65535, Ordering::Relaxed);
            peer.join().unwrap();
        });
    });
    assert!(found.is_err(), "descriptors may be read before they are written");
}
