//! The virtio-net device that a vhost-user connection drives: features and roles of rings.
//!
//! Ring `2 * i` is the guest's receive queue `i` (our egress), ring `2 * i + 1` its transmit queue
//! (our ingress); virtio 1.3, 5.1.2. Rings beyond the last pair (a control queue that a front-end
//! passes on) are accepted and not served.

use std::sync::Arc;

use ring::virtq::{DeviceQueue, LayoutError, RingLog};
use shm::GuestMemory;
use shm::sync::Mutex;
use switch::frame::FRAME_LEN_MAX;
use switch::vnet::Offloads;

use crate::device::{Call, Device, Kick, Refused, RingSetup};
use crate::feature;
use crate::port::{Format, GuestQueue, VirtioEgress, VirtioIngress};

/// Most queue pairs of one port.
pub const PAIRS_MAX: u16 = 16;

/// Callbacks to a port's owner, which has the threads and descriptors.
pub trait Host: Send {
    /// A ring was started; `queue` is the pair's index. Poll it, or wait for `kick`.
    fn start(&mut self, queue: u16, side: Side, kick: Kick);
    /// A ring is about to stop: no kick will come.
    fn stop(&mut self, queue: u16, side: Side);
    /// The guest kicked in band.
    fn kick(&mut self, queue: u16, side: Side);
    /// The first `queues` egress queues are running and enabled.
    fn set_active(&mut self, queues: u16);
    /// Features were negotiated.
    fn set_features(&mut self, features: u64);
    /// The guest moved here and cannot announce itself: announce `mac` to the other ports.
    fn announce(&mut self, mac: [u8; 6]);
}

/// Direction of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// From the guest (its transmit queue).
    Ingress,
    /// To the guest (its receive queue).
    Egress,
}

/// Settings of a port.
#[derive(Clone, Copy, Debug)]
pub struct NetOptions {
    /// Queue pairs offered, 1 to [`PAIRS_MAX`].
    pub pairs: u16,
    /// MTU offered to the guest, in bytes.
    pub mtu: Option<u16>,
    /// MAC address offered to the guest.
    pub mac: Option<[u8; 6]>,
    /// Feature bits not to offer.
    pub without: u64,
}

/// Offloads that a guest with `features` may request of us.
pub fn sends(features: u64) -> Offloads {
    let has = |bit: u64| features & bit != 0;
    Offloads {
        csum: has(feature::CSUM),
        csum_v4_only: false,
        tso4: has(feature::HOST_TSO4),
        tso6: has(feature::HOST_TSO6),
        ecn: has(feature::HOST_ECN),
        uso4: has(feature::HOST_USO),
        uso6: has(feature::HOST_USO),
    }
}

/// Offloads that a guest with `features` accepts.
pub fn takes(features: u64) -> Offloads {
    let has = |bit: u64| features & bit != 0;
    Offloads {
        csum: has(feature::GUEST_CSUM),
        csum_v4_only: false,
        tso4: has(feature::GUEST_TSO4),
        tso6: has(feature::GUEST_TSO6),
        ecn: has(feature::GUEST_ECN),
        uso4: has(feature::GUEST_USO4),
        uso6: has(feature::GUEST_USO6),
    }
}

/// The queues of a port; they outlive connections.
pub type Pair = switch::pair::Pair<VirtioIngress, VirtioEgress>;

/// One virtio-net device. Implements [`Device`] for the protocol; its pairs serve the switch.
pub struct NetDevice<H: Host> {
    options: NetOptions,
    pairs: Vec<Pair>,
    host: H,
    memory: Arc<GuestMemory>,
    acked: u64,
    mtu: Option<u16>,
}

/// The device half of a ring in `memory`, at the position `base`.
fn device_queue(
    memory: &GuestMemory,
    setup: &RingSetup,
    base: u32,
) -> Result<DeviceQueue, LayoutError> {
    let mut queue = DeviceQueue::new(memory, &setup.layout, setup.features, base)?;
    if let Some(ledger) = setup.ledger.clone() {
        queue.keep(ledger);
    }
    queue.set_log(setup.log.clone());
    Ok(queue)
}

impl<H: Host> NetDevice<H> {
    /// Creates a device with these pairs, at least as many as it offers.
    pub fn new(options: NetOptions, pairs: Vec<Pair>, host: H) -> Self {
        assert!(pairs.len() >= usize::from(options.pairs) && options.pairs <= PAIRS_MAX);
        let memory = Arc::new(GuestMemory::default());
        Self { options, pairs, host, memory, acked: 0, mtu: options.mtu }
    }

    /// The owner's callbacks.
    pub fn host(&mut self) -> &mut H {
        &mut self.host
    }

    /// The pair's index, the direction and the queue of a ring.
    fn queue(&self, ring: u16) -> Option<(u16, Side, &Mutex<dyn GuestQueue>)> {
        let index = ring / 2;
        let pair = self.pairs.get(usize::from(index))?;
        match ring.is_multiple_of(2) {
            true => Some((index, Side::Egress, &*pair.egress)),
            false => Some((index, Side::Ingress, &*pair.ingress)),
        }
    }

    fn format(&self) -> Format {
        let has = |bit: u64| self.acked & bit != 0;
        let mergeable = has(feature::MRG_RXBUF);
        // An MTU excludes the link header (14) and the tag (4).
        let frame_len_max = self.mtu.map_or(FRAME_LEN_MAX, |mtu| u32::from(mtu) + 18);
        Format {
            hdr_len: if mergeable || has(feature::VERSION_1) { 12 } else { 10 },
            mergeable,
            sends: sends(self.acked),
            takes: takes(self.acked),
            frame_len_max,
        }
    }

    /// Activates a ring in the memory and with the features of now.
    fn activate(
        &self,
        queue: &mut dyn GuestQueue,
        ring: DeviceQueue,
        call: Option<Call>,
        err: Option<Call>,
    ) {
        queue.activate(ring, Arc::clone(&self.memory), call, self.format());
        queue.set_err(err);
    }

    fn report_active(&mut self) {
        let up = self.pairs.iter().take_while(|p| p.egress.lock().is_up()).count();
        self.host.set_active(up as u16);
    }
}

impl<H: Host> Device for NetDevice<H> {
    fn features(&self) -> u64 {
        let mut bits = feature::BASE;
        // The control queue stays with the front-end. QEMU adds CTRL_VQ itself; Cloud Hypervisor
        // offers its guest only what we offer, and Linux refuses a device with MQ and without
        // CTRL_VQ. Where no one serves the queue, neither may be offered: so both only if the
        // operator configured several pairs (note 0007).
        if self.options.pairs > 1 && self.options.without & feature::MQ == 0 {
            bits |= feature::MQ | feature::CTRL_VQ;
        }
        if self.options.mtu.is_some() {
            bits |= feature::MTU;
        }
        if self.options.mac.is_some() {
            bits |= feature::MAC;
        }
        bits & !self.options.without
    }

    fn queues_max(&self) -> u16 {
        self.options.pairs * 2
    }

    fn set_features(&mut self, acked: u64) {
        self.acked = acked;
        self.host.set_features(acked);
    }

    fn set_memory(&mut self, memory: Arc<GuestMemory>) {
        self.memory = memory;
    }

    fn start(&mut self, ring: u16, setup: RingSetup) -> Result<(), LayoutError> {
        let Some((index, side, queue)) = self.queue(ring) else { return Ok(()) };
        let ring = device_queue(&self.memory, &setup, setup.base)?;
        self.activate(&mut *queue.lock(), ring, setup.call, setup.err);
        self.host.start(index, side, setup.kick);
        self.report_active();
        Ok(())
    }

    fn replace(&mut self, ring: u16, setup: RingSetup) -> Result<(), LayoutError> {
        let Some((index, side, queue)) = self.queue(ring) else { return Ok(()) };
        // One lock from the position to the new ring: no worker sees the queue without one.
        let mut queue = queue.lock();
        let Some(base) = queue.position() else { return Ok(()) };
        let (ring, on) = (device_queue(&self.memory, &setup, base)?, queue.is_up());
        queue.deactivate();
        self.activate(&mut *queue, ring, setup.call, setup.err);
        queue.enable(on);
        drop(queue);
        // Its worker may have armed the ring where it was before.
        self.host.kick(index, side);
        Ok(())
    }

    fn stop(&mut self, ring: u16) -> Option<u32> {
        let (index, side, _) = self.queue(ring)?;
        self.host.stop(index, side);
        let (_, _, queue) = self.queue(ring)?;
        let base = queue.lock().deactivate();
        self.report_active();
        base
    }

    fn position(&mut self, ring: u16) -> Option<u32> {
        let (_, _, queue) = self.queue(ring)?;
        queue.lock().position()
    }

    fn enable(&mut self, ring: u16, on: bool) {
        let Some((index, side, queue)) = self.queue(ring) else { return };
        queue.lock().enable(on);
        if on {
            // The kicks for buffers made available while the ring was disabled were lost.
            self.host.kick(index, side);
        }
        self.report_active();
    }

    fn set_log(&mut self, ring: u16, log: Option<RingLog>) {
        if let Some((_, _, queue)) = self.queue(ring) {
            queue.lock().set_log(log);
        }
    }

    fn set_call(&mut self, ring: u16, call: Option<Call>) {
        if let Some((_, _, queue)) = self.queue(ring) {
            queue.lock().set_call(call);
        }
    }

    fn kick(&mut self, ring: u16) {
        if let Some((index, side, _)) = self.queue(ring) {
            self.host.kick(index, side);
        }
    }

    fn set_mtu(&mut self, mtu: u16) -> Result<(), Refused> {
        //= virtio-v1.3 5.1.4: mtu is between 68 and 65535.
        if mtu < 68 {
            return Err(Refused("an MTU is at least 68"));
        }
        if u32::from(mtu) + 18 > FRAME_LEN_MAX {
            return Err(Refused("an MTU is at most 9216"));
        }
        self.mtu = Some(mtu);
        Ok(())
    }

    fn send_rarp(&mut self, mac: [u8; 6]) {
        self.host.announce(mac);
    }

    fn config(&self) -> Vec<u8> {
        // struct virtio_net_config: mac[6] status(2) max_virtqueue_pairs(2) mtu(2), and speed and
        // duplex, unknown.
        let mut config = Vec::with_capacity(20);
        config.extend(self.options.mac.unwrap_or_default());
        const LINK_UP: u16 = 1;
        config.extend(LINK_UP.to_le_bytes());
        config.extend(self.options.pairs.to_le_bytes());
        config.extend(self.options.mtu.unwrap_or(1500).to_le_bytes());
        config.extend(u32::MAX.to_le_bytes());
        config.push(0xff);
        config.resize(24, 0);
        config
    }

    fn reset(&mut self) {
        for ring in 0..(self.pairs.len() * 2) as u16 {
            self.stop(ring);
        }
        self.acked = 0;
        self.mtu = self.options.mtu;
    }
}

#[cfg(test)]
mod tests;
