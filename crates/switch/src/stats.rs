//! Counters. Each queue has its own, written only by whoever holds the queue, read by anyone.

use std::sync::atomic::{AtomicU64, Ordering};

/// One counter. Has one writer at a time (the holder of its queue), so adding is a load and a
/// store, not a locked instruction.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Raises it to `n`, if it is less: for a counter that keeps a maximum.
    pub fn raise(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).max(n), Ordering::Relaxed);
    }

    /// The value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A counter that several workers may add to at once: a locked instruction.
#[derive(Debug, Default)]
pub struct Shared(AtomicU64);

impl Shared {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// The value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! kind {
    () => {
        Counter
    };
    ($kind:ident) => {
        $kind
    };
}

macro_rules! counters {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $field:ident $(: $kind:ident)?,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub struct $name { $($(#[$doc])* pub $field: kind!($($kind)?),)* }

        impl $name {
            /// Every counter's name, as it appears in `ctl stats --json`, and value.
            pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
                [$((stringify!($field), self.$field.get()),)*].into_iter()
            }
        }
    };
}

counters! {
    /// Counters of one ingress queue: from the guest into the switch.
    IngressStats {
        /// Frames taken, and those made to announce an address of the peer.
        frames,
        /// Bytes of those, from the destination MAC on.
        bytes,
        /// Bursts that found something.
        bursts,
        /// Looks, whatever they found.
        polls,
        /// Those that found nothing.
        polls_empty,
        /// Times the queue was armed and left the poll set.
        sleeps,
        /// Times it was left alone for a time that was set.
        naps,
        /// Sleeps that a notification ended.
        wakes,
        /// Time its worker spent on it, looks in vain included, in ns.
        served_ns,
        /// Times from a wake-up to its first frame's delivery, added up, in ns.
        first_frame_ns,
        /// How many of those there were.
        first_frames,
        /// The longest of them, in ns.
        first_frame_ns_max,
        /// Notifications from the peer.
        kicks,
        /// Notifications to the peer: its buffers came back.
        calls,
        /// Frames of those that were read straight into their receiver's buffers.
        direct,
        /// Frames that were held because their destination was full.
        holds,
        /// Bursts not taken because the only destination was full.
        pauses,
        /// Shorter than an Ethernet header, or than the virtio-net header before it.
        drops_runt,
        /// Longer than any legal frame.
        drops_too_long,
        /// More segments than the switch takes.
        drops_too_many_segs,
        /// Offload request that makes no sense or was not negotiated (checksum outside the frame,
        /// GSO size zero, unknown type).
        drops_bad_hdr,
        /// Buffer outside guest memory.
        drops_bad_addr,
        /// The sender's grant could not be read.
        drops_bad_grant,
        /// The destination stayed full for too long, or too much was held for it already. Counted
        /// there, too, as `lost_no_room` or `lost_aged`.
        drops_no_room: Shared,
        /// Its port's link is down, by the toolstack.
        drops_down,
        /// No port to deliver to (cross mode without a partner, partner down).
        drops_no_port,
        /// The destination is the port the frame came from.
        drops_same_port,
        /// Link-local group address (01:80:c2:00:00:0x), which a bridge must not forward.
        drops_link_local,
        /// Software segmentation could not make sense of the headers.
        drops_bad_gso,
        /// Copies of a flooded frame that were not made: the burst's bound.
        drops_made_limit,
    }
}

counters! {
    /// Counters of one egress queue: from the switch to the guest.
    EgressStats {
        /// Frames delivered.
        frames,
        /// Bytes of those, from the destination MAC on.
        bytes,
        /// Groups of frames delivered under one lock.
        groups,
        /// Notifications to the peer.
        calls,
        /// Times a notification was put off, as the queue's call policy says.
        calls_late,
        /// Notifications from the peer: it made room.
        kicks,
        /// Times a frame did not fit at once.
        full,
        /// Frames that were held here because the queue was full.
        holds,
        /// Frames of senders that were lost because the queue was full, and too many were held.
        lost_no_room,
        /// Frames of senders that were held here for too long, and given up.
        lost_aged,
        /// Time that workers spent on delivering what was held here, once there was room, in ns.
        served_ns: Shared,
        /// Times the queue's lock was taken by another worker.
        contended,
        /// Frames made by software segmentation.
        segmented,
        /// Frames whose checksum was computed in software.
        checksummed,
        /// Frames the peer could never take: longer than its MTU or than all its buffers.
        drops_too_long,
        /// The peer's buffer lay outside its memory.
        drops_bad_addr,
        /// The peer's buffers lie in too many pieces.
        drops_too_many_segs,
        /// The peer's grant could not be written.
        drops_bad_grant,
        /// Multicast the peer did not ask for.
        drops_filtered,
        /// The queue is not started or not enabled.
        drops_down,
        /// Copies of flooded frames that did not fit.
        drops_no_room,
        /// Copies of flooded frames that were held for too long.
        drops_aged,
        /// Frames that were held when the queue's peer went away.
        drops_held_down,
    }
}
