//! Counters: one set per queue, written only by the queue's holder, read by any thread.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter with one writer at a time (the holder of its queue): an addition is a load and a
/// store, not a locked instruction.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    #[inline]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Raises it to `n`, if it is less: for a maximum.
    pub fn raise(&self, n: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).max(n), Ordering::Relaxed);
    }

    /// The value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A counter with concurrent writers: an addition is a locked instruction.
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

/// A counter whose value can be set.
trait Restore {
    fn restore(&self, value: u64);
}

impl Restore for Counter {
    fn restore(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }
}

impl Restore for Shared {
    fn restore(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
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
            /// Every counter's name, as in `ctl stats --json`, with its value.
            pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
                [$((stringify!($field), self.$field.get()),)*].into_iter()
            }

            /// Sets a counter by its name, before its queue is served: its value comes from another
            /// process. Returns whether there is such a counter.
            pub fn restore(&self, name: &str, value: u64) -> bool {
                match [$((stringify!($field), &self.$field as &dyn Restore),)*]
                    .into_iter()
                    .find(|(known, _)| *known == name)
                {
                    Some((_, counter)) => counter.restore(value),
                    None => return false,
                }
                true
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
        /// Bursts with frames.
        bursts,
        /// Polls, empty or not.
        polls,
        /// Empty polls.
        polls_empty,
        /// Times the queue was armed and left the poll set.
        sleeps,
        /// Times the queue was left until a set time (naps).
        naps,
        /// Sleeps ended by a notification.
        wakes,
        /// Time its worker spent on it, empty polls included, in ns.
        served_ns,
        /// Sum of the times from a wake-up to its first frame's delivery, in ns.
        first_frame_ns,
        /// Number of these times.
        first_frames,
        /// The longest of these times, in ns.
        first_frame_ns_max,
        /// Notifications from the peer.
        kicks,
        /// Notifications to the peer that buffers were returned.
        calls,
        /// Frames read directly into their receiver's buffers.
        direct,
        /// Copies made of flooded frames, one of each not counted; those dropped by a limit are.
        copies,
        /// Frames held because their destination was full.
        holds,
        /// Bursts not taken because the only destination was full.
        pauses,
        /// Times the queue was left until its port's `rate-in=` permits more.
        rate_waits,
        /// Addresses that moved here from another port, or would have without `loop-guard=block`.
        mac_moves,
        /// Times such an address began to flap: it moved away from the other port too often.
        mac_flaps,
        /// Frames from an address that stays another port's: a static one, or in its `mac=`.
        mac_elsewhere,
        /// Dropped by the kernel because a packet socket was full: this port's worker was late.
        drops_not_read: Shared,
        /// Shorter than an Ethernet header, or than the virtio-net header before it.
        drops_runt,
        /// Longer than any legal frame.
        drops_too_long,
        /// More segments than the switch accepts.
        drops_too_many_segs,
        /// Offload request that is invalid or was not negotiated (checksum outside the frame, GSO
        /// size zero, unknown type).
        drops_bad_hdr,
        /// Buffer outside guest memory.
        drops_bad_addr,
        /// Copies of frames whose grants could not be read.
        drops_bad_grant,
        /// The destination was full for too long, or its hold queue was full. Counted there, too,
        /// as `lost_no_room`, `lost_aged` or `lost_slow`.
        drops_no_room: Shared,
        /// The toolstack set the port's link down.
        drops_down,
        /// No port to deliver to (cross mode without a partner, partner down).
        drops_no_port,
        /// The destination is the port the frame came from.
        drops_same_port,
        /// The source address is a group address or zero.
        drops_bad_source,
        /// The source address is another port's, from which it is not taken: it flaps, or is in
        /// that port's `mac=`, and this port has `loop-guard=block`. Or another port refuses the
        /// address, and the frame, which was flooded, came back from a loop.
        drops_loop_guard,
        /// From a mirror port, or to one: it takes copies only.
        drops_mirror_port,
        /// Port security: a source MAC that is not one of `mac=`.
        drops_spoofed_mac,
        /// Port security: a source address in IPv4 or IPv6 that is not one of `ip=`.
        drops_spoofed_ip,
        /// Port security: a sender address in ARP that is not the port's.
        drops_spoofed_arp,
        /// Port security: an address in neighbour discovery that is not the port's.
        drops_spoofed_nd,
        /// Port security: a reply of a DHCP server, without `dhcp-server=on`.
        drops_dhcp_server,
        /// Port security: a router advertisement or redirect, without `ra=on`.
        drops_ra,
        /// Port security with `ip=`: a protocol whose addresses cannot be checked.
        drops_protocol,
        /// Headers that rules cannot check: malformed, fragmented, beyond the private bytes, or
        /// with a checksum to be written over them.
        drops_unchecked,
        /// The destination is isolated, as is this port.
        drops_isolated,
        /// A VLAN that this port, or the destination, does not carry.
        drops_vlan,
        /// Link-local group address (01:80:c2:00:00:0x), which a bridge must not forward.
        drops_link_local,
        /// Software segmentation found invalid headers.
        drops_bad_gso: Shared,
        /// Copies of a flooded frame not made, because of the burst's bound.
        drops_made_limit,
        /// Copies of frames not flooded, because of the port's limit of copies per second.
        drops_flood_limit,
        /// Broadcast frames beyond the port's storm limit.
        drops_storm_broadcast,
        /// Multicast frames beyond the port's storm limit.
        drops_storm_multicast,
        /// Frames to unknown addresses beyond the port's storm limit.
        drops_storm_unknown,
    }
}

counters! {
    /// Counters of one egress queue: from the switch to the guest.
    EgressStats {
        /// Frames delivered.
        frames,
        /// Bytes of those, from the destination MAC on.
        bytes,
        /// Groups of frames, each delivered under one lock.
        groups,
        /// Notifications to the peer.
        calls,
        /// Notifications delayed by the queue's call policy.
        calls_late,
        /// Notifications from the peer that it made room.
        kicks,
        /// Times a frame did not fit at once.
        full,
        /// Frames held here because the queue was full.
        holds,
        /// Frames dropped because the queue and its hold queue were full.
        lost_no_room,
        /// Frames held here for too long, and dropped.
        lost_aged,
        /// Frames dropped because page faults in the peer's memory make deliveries long, and its
        /// part of the worker's time was used up.
        lost_slow,
        /// Time workers spent on delivering held frames, and in slow deliveries, in ns.
        served_ns: Shared,
        /// Times the queue's lock was held by another worker.
        contended,
        /// Copies of other ports' frames, delivered to this mirror port.
        mirrored,
        /// Frames made by software segmentation.
        segmented,
        /// Frames that it replaced by those, all of which fit.
        gso_segmented,
        /// Frames whose checksum was computed in software.
        checksummed,
        /// Frames the peer could never accept: longer than its MTU or than all its buffers.
        drops_too_long,
        /// The peer's buffer was outside its memory.
        drops_bad_addr,
        /// The peer's buffers were in too many pieces.
        drops_too_many_segs,
        /// The peer's grant could not be written.
        drops_bad_grant,
        /// Multicast frames for groups that the peer did not join.
        drops_filtered,
        /// The queue was not started or not enabled.
        drops_down,
        /// Copies of flooded frames that did not fit.
        drops_no_room,
        /// Copies of flooded frames that were held for too long.
        drops_aged,
        /// Copies of flooded frames, as `lost_slow`.
        drops_slow,
        /// Copies of flooded frames that were held here, in which software segmentation found
        /// invalid headers.
        drops_bad_gso,
        /// Frames held when the queue's peer disconnected.
        drops_held_down,
        /// Frames beyond the port's `rate-out=` and its hold queue.
        drops_rate,
        /// Frames held for the port's `rate-out=` for too long.
        drops_rate_aged,
        /// Copies for this mirror port for which there was no room.
        drops_mirror,
    }
}

impl IngressStats {
    /// Causes for which nothing is counted in `frames`: what the peer sent was no frame, or was
    /// not taken. For sums: frames in, and frames out or dropped.
    pub const NOT_TAKEN: [&'static str; 7] = [
        "drops_not_read",
        "drops_runt",
        "drops_too_long",
        "drops_too_many_segs",
        "drops_bad_hdr",
        "drops_bad_addr",
        "drops_down",
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_another_process_are_restored_by_name() {
        let (old, new) = (IngressStats::default(), IngressStats::default());
        old.frames.add(3);
        old.drops_no_room.add(4);
        assert!(old.all().all(|(name, value)| new.restore(name, value)));
        assert_eq!((new.frames.get(), new.drops_no_room.get()), (3, 4));
        assert!(new.all().eq(old.all()));
        assert!(!new.restore("of_another_version", 1));
    }

    #[test]
    fn causes_for_which_no_frame_is_taken_are_counters() {
        let stats = IngressStats::default();
        let names: Vec<_> = stats.all().map(|(name, _)| name).collect();
        assert!(IngressStats::NOT_TAKEN.iter().all(|cause| names.contains(cause)), "{names:?}");
    }
}
