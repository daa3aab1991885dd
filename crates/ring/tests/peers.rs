//! Behaviour of real front-ends beyond the specification, each with its name.
#![allow(clippy::as_conversions)]

use std::sync::Arc;

use ring::virtq::{
    Buf, DeviceQueue, DriverQueue, Features, IndirectPool, Layout, Malformed, Taken,
};
use shm::{GuestMemory, Mapping, Region};

const SIZE: u16 = 8;
const LAYOUT: Layout = Layout { size: SIZE, desc: 0x1000, driver: 0x2000, device: 0x3000 };
const SPLIT: Features =
    Features { packed: false, event_idx: true, indirect: true, in_order: false };
const PACKED: Features = Features { packed: true, ..SPLIT };

fn memory() -> GuestMemory {
    let mapping = Arc::new(Mapping::memfd("peers", 0x8000).unwrap());
    let region = Region { guest_addr: 0x1000, user_addr: 0, len: 0x8000, offset: 0, mapping };
    GuestMemory::new(vec![region]).unwrap()
}

fn frames(driver: &mut DriverQueue, device: &mut DeviceQueue, memory: &GuestMemory, n: usize) {
    let mut taken = Taken::with_capacity(8, SIZE);
    let mut used = Vec::new();
    for i in 0..n {
        driver.add(&[Buf { addr: i as u64, len: 60, write: false }]).unwrap();
        driver.publish();
        assert_eq!(device.take(memory, 8, &mut taken), Ok(1), "frame {i}");
        assert_eq!(taken.bufs[0].addr, i as u64);
        device.put(&taken.chains[0], 0);
        device.publish();
        driver.take_used(8, &mut used).unwrap();
    }
    assert_eq!(used.len(), n);
}

#[test]
fn uml_starts_packed_rings_at_base_0() {
    let memory = memory();
    let mut driver = DriverQueue::new(&memory, &LAYOUT, PACKED, 0x8000_8000, None).unwrap();
    let mut device = DeviceQueue::new(&memory, &LAYOUT, PACKED, 0).unwrap();
    frames(&mut driver, &mut device, &memory, 20);
}

#[test]
fn virtio_user_sends_the_available_position_of_packed_rings_only() {
    for (base, whole) in [(0x8000, 0x8000_8000), (0x0003, 0x0003_0003), (0x8005, 0x8005_8005)] {
        let memory = memory();
        let mut driver = DriverQueue::new(&memory, &LAYOUT, PACKED, whole, None).unwrap();
        let mut device = DeviceQueue::new(&memory, &LAYOUT, PACKED, base).unwrap();
        assert_eq!(device.base(), whole);
        frames(&mut driver, &mut device, &memory, 20);
    }
}

#[test]
fn virtio_user_sends_base_0_to_a_restarted_back_end() {
    let memory = memory();
    let mut driver = DriverQueue::new(&memory, &LAYOUT, SPLIT, 0, None).unwrap();
    let mut device = DeviceQueue::new(&memory, &LAYOUT, SPLIT, 0).unwrap();
    frames(&mut driver, &mut device, &memory, 100);
    drop(device);
    let mut device = DeviceQueue::new(&memory, &LAYOUT, SPLIT, 0).unwrap();
    assert_eq!(device.base(), 100);
    frames(&mut driver, &mut device, &memory, 100);
}

#[test]
fn virtio_user_marks_transmit_headers_for_writing() {
    let memory = memory();
    let pool = IndirectPool::new(&memory, 0x4000, SIZE, 4);
    let mut driver = DriverQueue::new(&memory, &LAYOUT, PACKED, 0x8000_8000, pool).unwrap();
    let mut device = DeviceQueue::new(&memory, &LAYOUT, PACKED, 0x8000_8000).unwrap();
    let bufs = [(0x10, 12, true), (0x20, 60, false)];
    driver.add(&bufs.map(|(addr, len, write)| Buf { addr, len, write })).unwrap();
    driver.publish();
    let mut taken = Taken::with_capacity(8, SIZE).for_reading();
    assert_eq!(device.take(&memory, 8, &mut taken), Ok(1));
    assert_eq!(taken.reads(&taken.chains[0]).len(), 2);
    assert!(taken.writes(&taken.chains[0]).is_empty());
    // Any other queue honours the flag.
    device.untake(&taken.chains);
    let mut taken = Taken::with_capacity(8, SIZE);
    assert_eq!(device.take(&memory, 8, &mut taken), Err(Malformed::ReadAfterWrite));
}
