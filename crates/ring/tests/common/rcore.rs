//! `virtio-drivers` on our memory: its queue, a transport that stores the queue's addresses, and a
//! `Hal` that allocates guest memory and copies buffers through it.
#![allow(unsafe_code, clippy::as_conversions)]

use std::cell::RefCell;
use std::ptr::NonNull;
use std::sync::Arc;

use ring::virtq::Layout;
use shm::GuestMemory;
use virtio_drivers::queue::VirtQueue;
use virtio_drivers::transport::{DeviceStatus, DeviceType, InterruptStatus, Transport};
use virtio_drivers::{BufferDirection, Hal, PAGE_SIZE, PhysAddr};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::common::{BASE, LEN, memory_at};

/// Size of their queue, which is a constant of its type.
pub const SIZE: usize = 16;
/// A bounce buffer holds any buffer of the test and any indirect table.
const BOUNCE: u64 = 512;

/// Guest memory as an allocator: pages from the bottom, bounce buffers from the middle up.
struct Machine {
    memory: Arc<GuestMemory>,
    page: PhysAddr,
    bounces: Vec<PhysAddr>,
}

thread_local! {
    static MACHINE: RefCell<Option<Machine>> = const { RefCell::new(None) };
}

impl Machine {
    fn host(&self, addr: PhysAddr, len: usize) -> NonNull<u8> {
        let len = u32::try_from(len).unwrap();
        let seg = self.memory.seg_mut(addr, len, &mut 0).unwrap();
        NonNull::new(seg.as_iovec().iov_base.cast()).unwrap()
    }
}

fn with<R>(f: impl FnOnce(&mut Machine) -> R) -> R {
    MACHINE.with_borrow_mut(|machine| f(machine.as_mut().expect("a Rig is alive")))
}

pub struct TestHal;

// SAFETY: pages are given out once, zeroed (a fresh memfd) and page-aligned (a mapping's start
// plus whole pages); the mapping outlives the queue, which the Rig owns beside it.
unsafe impl Hal for TestHal {
    fn dma_alloc(pages: usize, _: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        with(|m| {
            let (addr, len) = (m.page, pages * PAGE_SIZE);
            m.page += len as u64;
            (addr, m.host(addr, len))
        })
    }

    unsafe fn dma_dealloc(_: PhysAddr, _: NonNull<u8>, _: usize) -> i32 {
        0
    }

    unsafe fn mmio_phys_to_virt(_: PhysAddr, _: usize) -> NonNull<u8> {
        unreachable!("no MMIO here")
    }

    unsafe fn share(buffer: NonNull<[u8]>, direction: BufferDirection) -> PhysAddr {
        assert!(buffer.len() as u64 <= BOUNCE);
        let (addr, host) = with(|m| {
            let addr = m.bounces.pop().expect("a bounce buffer for everything in flight");
            (addr, m.host(addr, buffer.len()))
        });
        if direction != BufferDirection::DeviceToDriver {
            // SAFETY: both hold `buffer.len()` bytes, and a fresh bounce buffer has no other user.
            unsafe {
                std::ptr::copy_nonoverlapping(buffer.cast().as_ptr(), host.as_ptr(), buffer.len())
            };
        }
        addr
    }

    unsafe fn unshare(addr: PhysAddr, buffer: NonNull<[u8]>, direction: BufferDirection) {
        let host = with(|m| {
            m.bounces.push(addr);
            m.host(addr, buffer.len())
        });
        if direction != BufferDirection::DriverToDevice {
            // SAFETY: as for `share`; the caller owns the buffer again.
            unsafe {
                std::ptr::copy_nonoverlapping(host.as_ptr(), buffer.cast().as_ptr(), buffer.len())
            };
        }
    }
}

/// Stores the queue's addresses; implements nothing else.
#[derive(Default)]
struct TestTransport {
    layout: Option<Layout>,
}

impl Transport for TestTransport {
    fn device_type(&self) -> DeviceType {
        DeviceType::Network
    }
    fn read_device_features(&mut self) -> u64 {
        0
    }
    fn write_driver_features(&mut self, _: u64) {}
    fn max_queue_size(&mut self, _: u16) -> u32 {
        SIZE as u32
    }
    fn notify(&mut self, _: u16) {}
    fn get_status(&self) -> DeviceStatus {
        DeviceStatus::empty()
    }
    fn set_status(&mut self, _: DeviceStatus) {}
    fn set_guest_page_size(&mut self, _: u32) {}
    fn requires_legacy_layout(&self) -> bool {
        false
    }
    fn queue_set(&mut self, _: u16, size: u32, desc: u64, driver: u64, device: u64) {
        let size = u16::try_from(size).unwrap();
        self.layout = Some(Layout { size, desc, driver, device });
    }
    fn queue_unset(&mut self, _: u16) {}
    fn queue_used(&mut self, _: u16) -> bool {
        false
    }
    fn ack_interrupt(&mut self) -> InterruptStatus {
        InterruptStatus::empty()
    }
    fn read_config_generation(&self) -> u32 {
        0
    }
    fn read_config_space<T: FromBytes + IntoBytes>(&self, _: usize) -> virtio_drivers::Result<T> {
        Err(virtio_drivers::Error::Unsupported)
    }
    fn write_config_space<T: IntoBytes + Immutable>(
        &mut self,
        _: usize,
        _: T,
    ) -> virtio_drivers::Result<()> {
        Err(virtio_drivers::Error::Unsupported)
    }
}

/// A chain of theirs in flight; owns its buffers.
pub struct Chain {
    pub serial: u32,
    pub token: u16,
    pub inputs: Vec<Vec<u8>>,
    pub outputs: Vec<Vec<u8>>,
}

/// Their driver queue and its memory. One at a time per thread.
pub struct Rig {
    queue: VirtQueue<TestHal, SIZE>,
    layout: Layout,
    memory: Arc<GuestMemory>,
}

impl Rig {
    pub fn new(event_idx: bool, indirect: bool) -> Self {
        let memory = Arc::new(memory_at(BASE, 0));
        let middle = BASE + LEN / 2;
        let bounces = (middle..BASE + LEN).step_by(BOUNCE as usize).collect();
        let machine = Machine { memory: Arc::clone(&memory), page: BASE, bounces };
        MACHINE.set(Some(machine));
        let mut transport = TestTransport::default();
        let queue = VirtQueue::new(&mut transport, 0, indirect, event_idx).unwrap();
        Self { queue, layout: transport.layout.unwrap(), memory }
    }

    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Adds and publishes (they do both at once); `None` when their queue is full.
    pub fn add(&mut self, serial: u32, inputs: Vec<Vec<u8>>, outputs: &[usize]) -> Option<Chain> {
        let mut outputs: Vec<Vec<u8>> = outputs.iter().map(|len| vec![0; *len]).collect();
        let ins: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
        let mut outs: Vec<&mut [u8]> = outputs.iter_mut().map(Vec::as_mut_slice).collect();
        // SAFETY: the chain owns its buffers, on the heap, and they are not accessed before `pop`.
        let token = unsafe { self.queue.add(&ins, &mut outs) }.ok()?;
        Some(Chain { serial, token, inputs, outputs })
    }

    pub fn should_notify(&self) -> bool {
        self.queue.should_notify()
    }

    pub fn peek(&self) -> Option<u16> {
        self.queue.peek_used()
    }

    /// Takes a used chain back: the length reported, and what the device wrote.
    pub fn pop(&mut self, mut chain: Chain) -> (u32, Vec<Vec<u8>>) {
        let ins: Vec<&[u8]> = chain.inputs.iter().map(Vec::as_slice).collect();
        let mut outs: Vec<&mut [u8]> = chain.outputs.iter_mut().map(Vec::as_mut_slice).collect();
        // SAFETY: the buffers are those that were added under this token.
        let len = unsafe { self.queue.pop_used(chain.token, &ins, &mut outs) }.unwrap();
        (len, chain.outputs)
    }
}
