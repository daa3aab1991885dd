//! Counters of a switch's ports, removed ones included.

use std::collections::BTreeMap;

use serde_json::Value;
use switch::stats::IngressStats;

/// Sums of the counters of all queues, of ingress and of egress.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    ingress: BTreeMap<String, u64>,
    egress: BTreeMap<String, u64>,
}

impl Ledger {
    /// Adds the counters of a port, from the reply to `stats`.
    pub fn add_port(&mut self, port: &Value) {
        for (side, sums) in [("ingress", &mut self.ingress), ("egress", &mut self.egress)] {
            let queues = port[side].as_array().into_iter().flatten();
            for (name, value) in queues.flat_map(|queue| queue.as_object().into_iter().flatten()) {
                *sums.entry(name.clone()).or_default() += value.as_u64().unwrap_or(0);
            }
        }
    }

    /// Adds the counters of all ports in the reply to `stats`.
    #[must_use]
    pub fn with(&self, stats: &Value) -> Self {
        let mut all = self.clone();
        stats["ports"].as_array().into_iter().flatten().for_each(|port| all.add_port(port));
        all
    }

    /// Frames taken from guests.
    pub fn taken(&self) -> u64 {
        self.ingress.get("frames").copied().unwrap_or(0)
    }

    /// Frames delivered.
    pub fn delivered(&self) -> u64 {
        self.egress.get("frames").copied().unwrap_or(0)
    }

    /// Frames dropped, by cause. What senders lose at a full receiver is taken from the receiver's
    /// `lost_` counters: a sender's port may be removed before a frame of its guest is dropped.
    pub fn drops(&self) -> BTreeMap<&str, u64> {
        let of_senders = self.ingress.iter().filter(|(name, _)| {
            name.starts_with("drops_")
                && **name != "drops_no_room"
                && !IngressStats::NOT_TAKEN.contains(&name.as_str())
        });
        let lost = |name: &str| name.starts_with("drops_") || name.starts_with("lost_");
        let of_receivers = self.egress.iter().filter(|(name, _)| lost(name));
        let mut drops = BTreeMap::new();
        for (name, count) in of_senders.chain(of_receivers).filter(|(_, count)| **count > 0) {
            *drops.entry(name.as_str()).or_default() += count;
        }
        drops
    }

    /// Copies of flooded frames (guests announce their addresses), except one of each.
    pub fn copies(&self) -> u64 {
        self.ingress.get("copies").copied().unwrap_or(0)
    }

    /// Frames that segmentation in software made, without those that it replaced.
    fn segments(&self) -> i64 {
        let of = |name: &str| self.egress.get(name).copied().unwrap_or(0) as i64;
        of("segmented") - of("gso_segmented")
    }

    /// Frames that were taken, copied or made and are nowhere; negative: more than that.
    pub fn unaccounted(&self) -> i64 {
        let out = self.delivered() + self.drops().values().sum::<u64>();
        (self.taken() + self.copies()) as i64 + self.segments() - out as i64
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn port(taken: u64, no_room: u64, delivered: u64, aged: u64, down: u64) -> Value {
        json!({
            "ingress": [{"frames": taken, "drops_no_room": no_room, "worker": 1, "poll": "spin"}],
            "egress": [{"frames": delivered, "lost_aged": aged, "drops_down": down, "held": 0}],
            "account": {"served_ns": 7},
        })
    }

    #[test]
    fn a_frame_that_a_receiver_lost_is_dropped_once() {
        let mut removed = Ledger::default();
        // Its sender's port was removed before the frame was dropped.
        removed.add_port(&port(60, 0, 0, 0, 0));
        let all = removed.with(&json!({"ports": [port(40, 2, 0, 0, 0), port(0, 0, 90, 3, 7)]}));
        assert_eq!((all.taken(), all.delivered(), all.unaccounted()), (100, 90, 0));
        assert_eq!(all.drops(), [("drops_down", 7), ("lost_aged", 3)].into());
        let all = removed.with(&json!({"ports": [port(41, 2, 0, 0, 0), port(0, 0, 90, 3, 7)]}));
        assert_eq!(all.unaccounted(), 1);
    }

    #[test]
    fn what_a_peer_sent_that_is_no_frame_was_not_taken() {
        let mut hostile = port(5, 0, 0, 0, 0);
        hostile["ingress"][0]["drops_bad_addr"] = json!(900);
        hostile["ingress"][0]["drops_spoofed_mac"] = json!(4);
        let all = Ledger::default().with(&json!({"ports": [hostile, port(0, 0, 1, 0, 0)]}));
        assert_eq!((all.taken(), all.unaccounted()), (5, 0));
    }

    #[test]
    fn segments_replace_their_frame() {
        let mut receiver = port(0, 0, 45, 0, 0);
        receiver["egress"][0]["segmented"] = json!(45);
        receiver["egress"][0]["gso_segmented"] = json!(1);
        let all = Ledger::default().with(&json!({"ports": [port(1, 0, 0, 0, 0), receiver]}));
        assert_eq!(all.unaccounted(), 0);
    }

    #[test]
    fn copies_of_a_flooded_frame_are_frames() {
        let mut flooded = port(1, 0, 0, 0, 0);
        flooded["ingress"][0]["copies"] = json!(2);
        let others = [port(0, 0, 2, 0, 0), port(0, 0, 0, 0, 1)];
        let all = Ledger::default().with(&json!({"ports": [flooded, others[0], others[1]]}));
        assert_eq!((all.copies(), all.unaccounted()), (2, 0));
    }
}
