//! Automatic receive steering: frames to a flow use the queue on which the guest sends it, so that
//! one CPU handles both directions (virtio 1.2, "Automatic receive steering in multiqueue mode"; as
//! in Linux's tun).
//!
//! Order has priority. The first frame of a flow, in either direction, decides: if it is towards
//! the guest, the hash does. The queue is kept until the flow was idle for some seconds, even if
//! the guest continues on another queue.
//!
//! A port tracks [`FLOWS`] flows, each at one place of a table by its hash. A flow whose place is
//! taken uses its hash alone.

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of flows that a port tracks.
const FLOWS: usize = 4096;
/// Idle time after which a flow's place is free, in seconds.
const IDLE_S: u16 = 5;

/// Table of a port's flows and their queues. Shared by all workers.
pub(crate) struct Steering {
    /// Hash, queue plus one, and time in seconds; 0: free. `None` for a port with one queue.
    flows: Box<[AtomicU64]>,
}

impl Steering {
    /// Creates the table of a port with `queues` queues.
    pub fn new(queues: usize) -> Self {
        let flows = if queues > 1 { FLOWS } else { 0 };
        Self { flows: (0..flows).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Records a frame of the flow with `hash`; a new flow gets `queue`. Returns the flow's queue;
    /// `None`: its place is taken.
    #[inline]
    pub fn queue(&self, hash: u32, queue: u16, now_s: u32) -> Option<u16> {
        let place = self.flows.get(hash as usize % FLOWS)?;
        let now_s = now_s as u16;
        let mut old = place.load(Ordering::Relaxed);
        loop {
            let is_taken = old != 0 && !is_idle(old as u16, now_s);
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

    /// Flows that are not idle, for another process: of each the hash and the queue, big-endian.
    pub fn export(&self, now_s: u32) -> Vec<u8> {
        let all = self.flows.iter().map(|place| place.load(Ordering::Relaxed));
        let live = all.filter(|flow| *flow != 0 && !is_idle(*flow as u16, now_s as u16));
        let queue = |flow: u64| ((flow >> 16) as u16).wrapping_sub(1);
        live.flat_map(|flow| {
            let (hash, queue) = (((flow >> 32) as u32).to_be_bytes(), queue(flow).to_be_bytes());
            hash.into_iter().chain(queue)
        })
        .collect()
    }

    /// Takes over flows of another process, with the same key of hashes.
    pub fn import(&self, flows: &[u8], now_s: u32) {
        for flow in flows.as_chunks::<EXPORTED>().0 {
            let [a, b, c, d, e, f] = *flow;
            let (hash, queue) = (u32::from_be_bytes([a, b, c, d]), u16::from_be_bytes([e, f]));
            let _ = self.queue(hash, queue, now_s);
        }
    }
}

/// Bytes of an exported flow.
const EXPORTED: usize = 6;

/// Whether the idle time is over. Another worker's clock may be a second ahead.
fn is_idle(since_s: u16, now_s: u16) -> bool {
    let for_s = now_s.wrapping_sub(since_s);
    (IDLE_S..u16::MAX - IDLE_S).contains(&for_s)
}

fn entry(hash: u32, queue: u16, now_s: u16) -> u64 {
    u64::from(hash) << 32 | u64::from(queue.wrapping_add(1)) << 16 | u64::from(now_s)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hash of another flow at the same place as `hash`.
    fn beside(hash: u32) -> u32 {
        hash.wrapping_add(FLOWS as u32)
    }

    #[test]
    fn first_frame_of_a_flow_decides_until_it_is_idle() {
        // In one case the seconds wrap.
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
    fn flow_keeps_its_place_until_it_is_idle() {
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
    fn concurrent_workers_agree_on_a_flows_queue() {
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
    fn flows_keep_their_queues_in_another_process() {
        let (old, new) = (Steering::new(4), Steering::new(4));
        let flows = [(0, 3), (4094, 2), (4096 + 7, 1), (u32::MAX, 0)];
        for (hash, queue) in flows {
            assert_eq!(old.queue(hash, queue, 20), Some(queue));
        }
        assert_eq!(old.queue(9, 1, 10), Some(1), "it is idle soon");
        let exported = old.export(20);
        assert_eq!(exported.len(), flows.len() * EXPORTED);
        // Its clock began later; half a flow is none.
        new.import(&[&exported[..], &[1, 2, 3]].concat(), 1);
        for (hash, queue) in flows {
            assert_eq!(new.queue(hash, queue ^ 1, 2), Some(queue));
        }
        assert_eq!(new.queue(9, 2, 2), Some(2));
        Steering::new(1).import(&exported, 1);
        assert!(Steering::new(1).export(1).is_empty());
    }

    #[test]
    fn port_with_one_queue_has_no_table() {
        assert_eq!(Steering::new(1).queue(5, 0, 1), None);
    }
}
