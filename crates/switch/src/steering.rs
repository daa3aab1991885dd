//! Automatic receive steering: what comes for a flow takes the queue that the guest sends it on,
//! whose processor then does both (virtio 1.2, "Automatic receive steering in multiqueue mode";
//! Linux' tun does the same).
//!
//! Order comes first. The first frame of a flow, in whichever direction, decides: of one that
//! comes before the guest sent any, the hash does. It stays so until the flow was silent for some
//! seconds, also if the guest goes on sending on another queue.
//!
//! A port remembers [`FLOWS`] flows, each at one place of a table by its hash. One that finds its
//! place taken goes by its hash alone.

use std::sync::atomic::{AtomicU64, Ordering};

/// Flows that a port remembers.
const FLOWS: usize = 4096;
/// A flow of which nothing passed for so long, in seconds, leaves its place to any.
const SILENT_S: u16 = 5;

/// Which queue of a port each flow takes. Any worker may ask and tell.
pub(crate) struct Steering {
    /// Hash, queue plus one, and when in seconds; 0: free. None where there is but one queue.
    flows: Box<[AtomicU64]>,
}

impl Steering {
    /// For a port with so many queues.
    pub fn new(queues: usize) -> Self {
        let flows = if queues > 1 { FLOWS } else { 0 };
        Self { flows: (0..flows).map(|_| AtomicU64::new(0)).collect() }
    }

    /// A frame of the flow with `hash` passes, on `queue` if it is up to that. The queue that the
    /// flow takes; `None`: another has its place.
    #[inline]
    pub fn queue(&self, hash: u32, queue: u16, now_s: u32) -> Option<u16> {
        let place = self.flows.get(hash as usize % FLOWS)?;
        let now_s = now_s as u16;
        let mut old = place.load(Ordering::Relaxed);
        loop {
            let is_taken = old != 0 && !is_silent(old as u16, now_s);
            let is_its = old != 0 && (old >> 32) as u32 == hash;
            let queue = match (is_taken, is_its) {
                (true, true) => ((old >> 16) as u16).wrapping_sub(1),
                (true, false) => return None,
                (false, _) => queue,
            };
            let new = entry(hash, queue, now_s);
            if old == new {
                return Some(queue);
            }
            match place.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(queue),
                Err(changed) => old = changed,
            }
        }
    }
}

/// Another worker may have been a second ahead.
fn is_silent(since_s: u16, now_s: u16) -> bool {
    let for_s = now_s.wrapping_sub(since_s);
    (SILENT_S..u16::MAX - SILENT_S).contains(&for_s)
}

fn entry(hash: u32, queue: u16, now_s: u16) -> u64 {
    u64::from(hash) << 32 | u64::from(queue.wrapping_add(1)) << 16 | u64::from(now_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A flow at the same place as that with `hash`.
    fn beside(hash: u32) -> u32 {
        hash.wrapping_add(FLOWS as u32)
    }

    #[test]
    fn first_frame_of_a_flow_decides_until_it_is_silent() {
        // Seconds wrap meanwhile, in one of them.
        for start_s in [0, 1, 100_000, u32::from(u16::MAX) - 2] {
            let steering = Steering::new(4);
            for hash in [0, 1, 4094, 4096 + 7, u32::MAX] {
                for at in 0..20 {
                    let asked = (at % 4) as u16;
                    assert_eq!(steering.queue(hash, asked.max(2), start_s + at), Some(2));
                }
                assert_eq!(steering.queue(hash, 1, start_s + 19 + 4), Some(2));
                assert_eq!(steering.queue(hash, 1, start_s + 23 + 5), Some(1));
                assert_eq!(steering.queue(hash, 0, start_s + 27), Some(1), "a worker is behind");
            }
        }
    }

    #[test]
    fn flow_keeps_its_place_until_it_is_silent() {
        let steering = Steering::new(2);
        for now_s in 0..8 {
            assert_eq!(steering.queue(5, 1, now_s), Some(1));
            assert_eq!(steering.queue(beside(5), 0, now_s + 4), None);
        }
        assert_eq!(steering.queue(beside(5), 0, 6), None, "a worker is behind");
        assert_eq!(steering.queue(beside(5), 0, 12), Some(0));
        assert_eq!(steering.queue(5, 1, 12), None);
    }

    #[test]
    fn workers_that_meet_at_a_flow_agree() {
        for hash in 0..200 {
            let steering = Steering::new(4);
            let ask = |queue| steering.queue(hash, queue, 9);
            let (a, b) = std::thread::scope(|scope| {
                let a = scope.spawn(|| [ask(0), ask(0)]);
                let b = scope.spawn(|| [ask(3), ask(3)]);
                (a.join().unwrap(), b.join().unwrap())
            });
            assert!(a[0].is_some() && a == b && a[0] == a[1], "{a:?} {b:?}");
        }
    }

    #[test]
    fn port_with_one_queue_remembers_nothing() {
        assert_eq!(Steering::new(1).queue(5, 0, 1), None);
    }
}
