//! Notifications of peers that call policies delay, and frames that rates delay.

use super::{EgressQueue, Findings, Forwarder};
use crate::port::QueueId;
use crate::time::Instant;

impl Forwarder {
    /// Schedules a delayed notification of a queue's peer.
    pub(super) fn schedule_notify(&mut self, at: Instant, queue: QueueId) {
        self.late.push((at, queue));
        self.late_at = self.late_at.min(at);
    }

    /// Time of the next call of [`notify_due`](Self::notify_due).
    pub fn next_notification(&self) -> Option<Instant> {
        let late = (!self.late.is_empty()).then_some(self.late_at);
        [late, self.paced.next()].into_iter().flatten().min()
    }

    /// Sends delayed notifications, at the end of a round: those whose time has come (all at
    /// [`Instant::NEVER`]). If the worker `rests` (found nothing, or goes to sleep), also those
    /// that only gather more frames. Before that, delivers held frames that rates permit by now.
    pub fn notify_due(&mut self, now: Instant, rests: bool) -> Findings {
        self.notify_due_with(now, rests, |_, _| {})
    }

    /// Notifies as [`notify_due`](Self::notify_due) does, and calls `done` after each destination
    /// to which held frames were [delivered](Self::delivers_due), so that the caller can charge
    /// its time.
    pub fn notify_due_with(
        &mut self,
        now: Instant,
        rests: bool,
        done: impl FnMut(QueueId, &EgressQueue),
    ) -> Findings {
        if self.delivers_due(now) {
            self.send_paced(now, done);
        }
        self.notify_late(now, rests);
        std::mem::take(&mut self.findings)
    }

    /// Whether [`notify_due`](Self::notify_due) delivers held frames at this time.
    pub fn delivers_due(&self, now: Instant) -> bool {
        now < Instant::NEVER && self.paced.next().is_some_and(|at| at <= now)
    }

    fn notify_late(&mut self, now: Instant, rests: bool) {
        if self.late.is_empty() || !rests && self.late_at > now {
            return;
        }
        let table = &self.table;
        let mut next = Instant::NEVER;
        self.late.retain_mut(|(at, QueueId { port, queue })| {
            let port = table.get(usize::from(port.0)).and_then(Option::as_ref);
            let egress = port.and_then(|port| port.egress.get(usize::from(*queue)));
            let Some(again) = egress.and_then(|e| e.notify_if_due(*at, rests, now)) else {
                return false;
            };
            *at = again;
            next = next.min(again);
            true
        });
        self.late_at = next;
    }
}
