//! Test device that records its calls and has real rings.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use ring::virtq::{DeviceQueue, DriverQueue, LayoutError, RingLog};
use shm::GuestMemory;

use crate::device::{Call, Device, Refused, RingSetup};
use crate::feature;

/// One call of the protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Did {
    Features(u64),
    Memory(usize),
    Start { ring: u16, size: u16, base: u32, desc: u64, packed: bool, kick: &'static str },
    Replace { ring: u16, base: u32, desc: u64 },
    Stop(u16),
    Enable(u16, bool),
    SetCall(u16, bool),
    SetLog(u16, bool),
    Kick(u16),
    Mtu(u16),
    Rarp([u8; 6]),
    Reset,
}

#[derive(Default)]
pub struct State {
    pub did: Vec<Did>,
    pub memory: Arc<GuestMemory>,
    pub queues: HashMap<u16, DeviceQueue>,
    pub setups: HashMap<u16, RingSetup>,
}

/// Clones share their state.
#[derive(Clone, Default)]
pub struct Fake(Arc<Mutex<State>>);

impl Fake {
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Returns the calls since the last query.
    pub fn did(&self) -> Vec<Did> {
        std::mem::take(&mut self.state().did)
    }

    fn note(&self, did: Did) {
        self.state().did.push(did);
    }
}

pub const FEATURES: u64 = feature::VERSION_1
    | feature::MQ
    | feature::CTRL_VQ
    | feature::MTU
    | feature::EVENT_IDX
    | feature::INDIRECT_DESC
    | feature::RING_PACKED
    | feature::IN_ORDER;

impl Device for Fake {
    fn features(&self) -> u64 {
        FEATURES
    }

    fn queues_max(&self) -> u16 {
        32
    }

    fn set_features(&mut self, acked: u64) {
        self.note(Did::Features(acked));
    }

    fn set_memory(&mut self, memory: Arc<GuestMemory>) {
        self.note(Did::Memory(memory.regions().len()));
        self.state().memory = memory;
    }

    fn start(&mut self, ring: u16, setup: RingSetup) -> Result<(), LayoutError> {
        let mut state = self.state();
        assert!(!state.queues.contains_key(&ring), "ring {ring} started twice");
        if !setup.features.packed {
            // A driver that stopped at the front-end's base.
            DriverQueue::new(&state.memory, &setup.layout, setup.features, setup.base, None)?;
        }
        let mut queue = DeviceQueue::new(&state.memory, &setup.layout, setup.features, setup.base)?;
        queue.set_log(setup.log.clone());
        let kick = match setup.kick {
            crate::device::Kick::Fd(_) => "fd",
            crate::device::Kick::InBand => "in band",
            crate::device::Kick::Poll => "poll",
        };
        state.did.push(Did::Start {
            ring,
            size: setup.layout.size,
            base: setup.base,
            desc: setup.layout.desc,
            packed: setup.features.packed,
            kick,
        });
        state.queues.insert(ring, queue);
        state.setups.insert(ring, setup);
        Ok(())
    }

    fn replace(&mut self, ring: u16, setup: RingSetup) -> Result<(), LayoutError> {
        let mut state = self.state();
        let base = state.queues[&ring].base();
        if !setup.features.packed {
            // The driver of the same ring, in its new place.
            DriverQueue::new(&state.memory, &setup.layout, setup.features, base, None)?;
        }
        let mut queue = DeviceQueue::new(&state.memory, &setup.layout, setup.features, base)?;
        queue.set_log(setup.log.clone());
        state.did.push(Did::Replace { ring, base, desc: setup.layout.desc });
        state.queues.insert(ring, queue);
        state.setups.insert(ring, setup);
        Ok(())
    }

    fn stop(&mut self, ring: u16) -> Option<u32> {
        self.note(Did::Stop(ring));
        let mut state = self.state();
        state.setups.remove(&ring);
        state.queues.remove(&ring).map(|queue| queue.base())
    }

    fn position(&mut self, ring: u16) -> Option<u32> {
        self.state().queues.get(&ring).map(DeviceQueue::base)
    }

    fn enable(&mut self, ring: u16, on: bool) {
        self.note(Did::Enable(ring, on));
    }

    fn set_log(&mut self, ring: u16, log: Option<RingLog>) {
        self.note(Did::SetLog(ring, log.is_some()));
        let mut state = self.state();
        state.queues.get_mut(&ring).expect("a running ring").set_log(log.clone());
        state.setups.get_mut(&ring).expect("a running ring").log = log;
    }

    fn set_call(&mut self, ring: u16, call: Option<Call>) {
        self.note(Did::SetCall(ring, call.is_some()));
        self.state().setups.get_mut(&ring).expect("a running ring").call = call;
    }

    fn kick(&mut self, ring: u16) {
        assert!(self.state().queues.contains_key(&ring), "ring {ring} does not run");
        self.note(Did::Kick(ring));
    }

    fn set_mtu(&mut self, mtu: u16) -> Result<(), Refused> {
        if mtu < 68 {
            return Err(Refused("at least 68"));
        }
        self.note(Did::Mtu(mtu));
        Ok(())
    }

    fn send_rarp(&mut self, mac: [u8; 6]) {
        self.note(Did::Rarp(mac));
    }

    fn config(&self) -> Vec<u8> {
        vec![2, 0, 0, 0, 0, 1, 1, 0, 16, 0, 220, 5]
    }

    fn reset(&mut self) {
        self.note(Did::Reset);
    }
}
