//! Invariants after each step, and when all is idle.

use switch::flow::rarp;
use switch::hold::{RATE_WAIT_MAX, RETRY_INTERVAL, WAIT_MAX};
use switch::poll::State;
use switch::port::QueueId;
use switch::time::Instant;
use switch::tuning::Drain;

use super::World;
use crate::finding::Finding;
use crate::guest::Ring;
use crate::rules::is_on;
use crate::settings::delay_max;
use crate::worker::{Name, Queue, Worker};

impl World {
    /// Checks that pages of honest guests were accessed only while granted.
    pub(super) fn check_grants(&self) -> Result<(), Finding> {
        let refused = self.hypervisor.take_refused().into_iter();
        let mut honest = refused.filter(|(port, _)| self.guests[usize::from(*port)].is_honest());
        honest.next().map_or(Ok(()), |(port, gref)| {
            Err(Finding::Corrupt(format!("grant {gref} of guest {port} was used after its end")))
        })
    }

    /// Whether a kick of a ring is due, in flight, or not yet handled.
    pub(super) fn is_kicked(&self, port: usize, queue: usize, ring: Ring) -> bool {
        let due = self.guests[port].apps[queue].kick_due[usize::from(ring == Ring::Rx)];
        let in_flight = self.kicks.get(&(port, queue, ring)).is_some_and(|n| *n > 0);
        due || in_flight
            || self
                .switch
                .kick_target(port, queue, ring)
                .is_some_and(|(worker, token)| self.switch.workers[worker].pending.contains(&token))
    }

    /// Checks that no queue with frames is cold, and no worker with work sleeps, unless a wake-up
    /// is in flight.
    pub(super) fn check_wakes(&self) -> Result<(), Finding> {
        for (w, worker) in self.switch.workers.iter().enumerate() {
            if worker.is_asleep() && !worker.commands.is_empty() && self.notifications[w] == 0 {
                return Err(Finding::LostWakeup(format!("worker {w} has commands")));
            }
            let notified = self.notifications[w] > 0
                || !worker.commands.is_empty()
                || self.switch.workers.iter().any(|other| other.will_wake(w));
            let is_honest = |q: &&Queue| self.guests[q.served.of.name.0].is_honest();
            for queue in worker.queues().iter().filter(is_honest) {
                let (port, index) = queue.served.of.name;
                if worker.will_drop((port, index)) {
                    continue;
                }
                if queue.state() == State::Warm && !queue.is_listed() {
                    self.check_nap(worker, queue)?;
                }
                let drained = queue.served.source.tuning.drain() != Drain::Off;
                let polled = drained || worker.will_poll((port, index));
                if queue.state() == State::Cold && !queue.is_paused() && !polled {
                    self.check_cold(port, index)?;
                }
                if worker.is_asleep()
                    && !notified
                    && queue.is_paused()
                    && let Some((QueueId { port: to, queue: q }, len)) =
                        queue.served.source.backpressure.blocked_on()
                    && self.switch.held_len(to.0.into(), q.into()).is_none()
                    && self.has_room(to.0.into(), q.into(), len.into())
                {
                    let what = format!("queue {index} of port {port} is paused for {to:?} {q}");
                    return Err(Finding::LostWakeup(what));
                }
            }
            if worker.is_asleep() && !notified {
                self.check_held(worker)?;
            }
        }
        self.check_retries()
    }

    /// Checks that a sleeping worker could not deliver held frames.
    pub(super) fn check_held(&self, worker: &Worker) -> Result<(), Finding> {
        for (to, queue) in self.queues() {
            if worker.waits_for((to, queue))
                && !self.waits_for_rate((to, queue))
                && let Some(len) = self.switch.held_len(to, queue)
                && self.has_room(to, queue, len.into())
            {
                let what = format!("a frame is held for queue {queue} of {to}, which has room");
                return Err(Finding::LostWakeup(what));
            }
        }
        Ok(())
    }

    /// Whether a worker has a time at which it delivers the frames held for a queue because of its
    /// port's rate, and did not miss it.
    fn waits_for_rate(&self, name: Name) -> bool {
        let mut times = self.switch.workers.iter().filter_map(|worker| worker.rate_wait(name));
        times.any(|at| self.now <= at + self.busy())
    }

    /// Checks that some worker retries each destination with held frames.
    pub(super) fn check_retries(&self) -> Result<(), Finding> {
        for (to, queue) in self.queues() {
            let egress = self.switch.ledger.egress_book(to, queue);
            if egress.oldest_wait(self.now).is_some()
                && !self.switch.workers.iter().any(|worker| worker.waits_for((to, queue)))
                && !self.waits_for_rate((to, queue))
            {
                let what = format!("a frame is held for queue {queue} of {to}, and not retried");
                return Err(Finding::LostWakeup(what));
            }
        }
        Ok(())
    }

    /// The queues of all guests.
    pub(super) fn queues(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let guests = self.guests.iter().enumerate();
        guests.flat_map(|(i, guest)| (0..guest.apps.len()).map(move |q| (i, q)))
    }

    /// Checks that a warm queue is polled at its time, which is within the delay of its policy.
    pub(super) fn check_nap(&self, worker: &Worker, queue: &Queue) -> Result<(), Finding> {
        let until = queue.nap_until();
        let pause = self.switch.pause(queue.served.of.name);
        let latest = self.now + delay_max(queue.poller().policy()).max(pause);
        let late = worker.began >= until || self.now > until + self.busy();
        if late || until > latest {
            let name = queue.served.of.name;
            let what = format!("queue {name:?} was due at {until}, now {}", self.now);
            return Err(Finding::PollMissed(what));
        }
        Ok(())
    }

    /// Checks that a cold queue has no frames, or a kick in flight.
    pub(super) fn check_cold(&self, port: usize, queue: usize) -> Result<(), Finding> {
        let sent = self.guests[port].apps[queue].sent;
        let book = self.switch.ledger.ingress(port, queue);
        if sent > book.shown && !self.is_kicked(port, queue, Ring::Tx) {
            let what = format!("queue {queue} of port {port}: {sent} sent, {} taken", book.shown);
            return Err(Finding::LostWakeup(what));
        }
        Ok(())
    }

    /// Checks that frames are not held for too long.
    pub(super) fn check_stalls(&self) -> Result<(), Finding> {
        let slack = 2 * RETRY_INTERVAL + self.busy() + self.switch.delay_max();
        for (to, queue) in self.queues() {
            let is_rated = is_on(&self.switch.rules(to).rate_out);
            let limit = slack + if is_rated { RATE_WAIT_MAX } else { WAIT_MAX };
            let oldest_wait = self.switch.ledger.egress_book(to, queue).oldest_wait(self.now);
            if let Some(ns) = oldest_wait.filter(|ns| *ns > limit) {
                let what = format!("a frame for queue {queue} of {to} was held for {ns} ns");
                return Err(Finding::Late(what));
            }
        }
        Ok(())
    }

    /// Whether guest `to` is honest, certainly has room for a frame on a queue, and has no kick in
    /// flight.
    pub(super) fn has_room(&self, to: usize, queue: usize, len: u64) -> bool {
        let guest = &self.guests[to];
        guest.is_honest() && guest.has_room(queue, len) && !self.is_kicked(to, queue, Ring::Rx)
    }

    /// Checks that sleeping guests are called in time for received frames.
    pub(super) fn check_calls(&mut self) -> Result<(), Finding> {
        let busy = self.busy();
        for (i, guest) in self.guests.iter().enumerate().filter(|(_, g)| g.is_honest()) {
            for q in 0..guest.apps.len() {
                let book = self.switch.ledger.egress(i, q);
                if book.call_by == Instant::NEVER {
                    continue;
                }
                if self.actors[i].awake || !guest.waits_for_call(q) {
                    // It re-checks before it sleeps.
                    book.call_by = Instant::NEVER;
                } else if self.now > book.call_by + busy {
                    let what = format!("guest {i} on queue {q}, by {}", book.call_by);
                    return Err(Finding::CallMissed(what));
                }
            }
        }
        Ok(())
    }

    /// Checks that guest `i` has nothing left, and that its counters agree with the switch's.
    pub(super) fn check_drained(&self, i: usize) -> Result<(), Finding> {
        let guest = &self.guests[i];
        if let Some(left) = guest.unfinished() {
            let books = (0..guest.apps.len()).filter_map(|q| self.switch.ledger.remaining(i, q));
            let books = books.collect::<Vec<_>>().join("; ");
            return Err(Finding::Hang(format!("guest {i} has {left} ({books})")));
        }
        for (q, pair) in guest.apps.iter().enumerate() {
            if let Some(left) = self.switch.ledger.remaining(i, q) {
                return Err(Finding::Hang(format!("queue {q} of port {i}: {left}")));
            }
            let (ingress, egress) = self.switch.stats(i, q);
            let announced = self.switch.ledger.ingress(i, q).announced;
            let announced_bytes = announced * rarp([0; 6]).len() as u64;
            let counted = [
                ("frames sent", pair.sent + announced, ingress.frames.get()),
                ("bytes sent", pair.sent_bytes + announced_bytes, ingress.bytes.get()),
                ("frames received", pair.received, egress.frames.get()),
                ("bytes received", pair.received_bytes, egress.bytes.get()),
            ];
            for (what, is, counted) in counted {
                if is != counted {
                    let what = format!("queue {q} of guest {i}: {is} {what}, {counted} counted");
                    return Err(Finding::Lost(what));
                }
            }
        }
        Ok(())
    }

    /// Describes what is not idle.
    pub(super) fn state(&self) -> String {
        let guests = self.guests.iter().enumerate().filter(|(_, g)| g.is_honest());
        let left = guests.filter_map(|(i, g)| Some(format!("guest {i} has {}", g.unfinished()?)));
        let workers = self.switch.workers.iter().enumerate();
        let awake = workers.filter(|(_, w)| !w.is_idle(self.now));
        let awake = awake.map(|(w, _)| format!("worker {w} is awake"));
        let held = self.queues().filter_map(|(to, queue)| {
            let ns = self.switch.ledger.egress_book(to, queue).oldest_wait(self.now)?;
            Some(format!("a frame for queue {queue} of {to} is held for {ns} ns"))
        });
        let all = left.chain(awake).chain(held).collect::<Vec<_>>().join("; ");
        format!("{all}; {} events scheduled, at {}", self.external, self.now)
    }
}
