//! What must be so after each step, and when all is quiet.

use switch::hold::{RETRY_NS, WAIT_NS_MAX};
use switch::poll::State;
use switch::tuning::Drain;

use super::World;
use crate::finding::Finding;
use crate::guest::Ring;
use crate::settings::delay_ns_max;
use crate::worker::{Queue, Worker};

impl World {
    /// No page of a guest that keeps the protocol was used while it was not granted.
    pub(super) fn check_grants(&self) -> Result<(), Finding> {
        let refused = self.hypervisor.take_refused().into_iter();
        let mut honest = refused.filter(|(port, _)| self.guests[usize::from(*port)].is_honest());
        honest.next().map_or(Ok(()), |(port, gref)| {
            Err(Finding::Corrupt(format!("grant {gref} of guest {port} was used, and is none")))
        })
    }

    /// Whether a kick of a ring is still to come, or to be looked at.
    pub(super) fn is_kicked(&self, port: usize, queue: usize, ring: Ring) -> bool {
        let due = self.guests[port].apps[queue].kick_due[usize::from(ring == Ring::Rx)];
        let under_way = self.kicks.get(&(port, queue, ring)).is_some_and(|n| *n > 0);
        due || under_way
            || self
                .switch
                .kicked(port, queue, ring)
                .is_some_and(|(worker, token)| self.switch.workers[worker].pending.contains(&token))
    }

    /// No queue may be cold that has something to do, and no worker sleep that could go on, unless
    /// a kick is on its way.
    pub(super) fn check_wakes(&self) -> Result<(), Finding> {
        for (w, worker) in self.switch.workers.iter().enumerate() {
            if worker.is_asleep() && !worker.commands.is_empty() && self.pokes[w] == 0 {
                return Err(Finding::Asleep(format!("worker {w} has commands")));
            }
            let poked = self.pokes[w] > 0
                || !worker.commands.is_empty()
                || self.switch.workers.iter().any(|other| other.will_wake(w));
            let is_honest = |q: &&Queue| self.guests[q.served.of.name.0].is_honest();
            for queue in worker.queues().iter().filter(is_honest) {
                let (port, index) = queue.served.of.name;
                if queue.state() == State::Warm && !queue.is_listed() {
                    self.check_nap(worker, queue)?;
                }
                let drained = queue.served.source.tuning.drain() != Drain::Off;
                let polled = drained || worker.will_poll((port, index));
                if queue.state() == State::Cold && !queue.is_paused() && !polled {
                    self.check_cold(port, index)?;
                }
                if worker.is_asleep()
                    && !poked
                    && queue.is_paused()
                    && let Some((to, q, len)) = queue.served.source.backpressure.waits_for()
                    && self.switch.held_len(to.0.into(), q.into()).is_none()
                    && self.has_room(to.0.into(), q.into(), len.into())
                {
                    let what = format!("queue {index} of port {port} waits for {to:?} {q}");
                    return Err(Finding::Asleep(what));
                }
            }
            if worker.is_asleep() && !poked {
                self.check_held(worker)?;
            }
        }
        self.check_waits()
    }

    /// No worker sleeps that could deliver what waits.
    pub(super) fn check_held(&self, worker: &Worker) -> Result<(), Finding> {
        for (to, queue) in self.queues() {
            if worker.waits_for(to, queue)
                && let Some(len) = self.switch.held_len(to, queue)
                && self.has_room(to, queue, len.into())
            {
                let what = format!("a frame waits for queue {queue} of {to}, which has room");
                return Err(Finding::Asleep(what));
            }
        }
        Ok(())
    }

    /// Whatever waits, some worker tries again.
    pub(super) fn check_waits(&self) -> Result<(), Finding> {
        for (to, queue) in self.queues() {
            let egress = self.switch.ledger.egress_book(to, queue);
            if egress.waits_ns(self.now_ns).is_some()
                && !self.switch.workers.iter().any(|worker| worker.waits_for(to, queue))
            {
                let what = format!("a frame waits for queue {queue} of {to}, and no worker does");
                return Err(Finding::Asleep(what));
            }
        }
        Ok(())
    }

    /// All queues of all guests.
    pub(super) fn queues(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let guests = self.guests.iter().enumerate();
        guests.flat_map(|(i, guest)| (0..guest.apps.len()).map(move |q| (i, q)))
    }

    /// A queue that naps is polled when its time has come, which is not far off.
    pub(super) fn check_nap(&self, worker: &Worker, queue: &Queue) -> Result<(), Finding> {
        let until = queue.nap_until_ns();
        let pause_ns = self.switch.pause_ns(queue.served.of.name);
        let latest = self.now_ns + delay_ns_max(queue.poller().policy()).max(pause_ns);
        let late = worker.began_ns >= until || self.now_ns > until.saturating_add(self.busy_ns());
        if late || until > latest {
            let name = queue.served.of.name;
            let what = format!("queue {name:?} until {until}, and it is {}", self.now_ns);
            return Err(Finding::Overslept(what));
        }
        Ok(())
    }

    /// A cold queue has nothing to do, or a kick is on its way.
    pub(super) fn check_cold(&self, port: usize, queue: usize) -> Result<(), Finding> {
        let sent = self.guests[port].apps[queue].sent;
        let book = self.switch.ledger.ingress(port, queue);
        if sent > book.shown && !self.is_kicked(port, queue, Ring::Tx) {
            let what = format!("queue {queue} of port {port}: {sent} sent, {} taken", book.shown);
            return Err(Finding::Asleep(what));
        }
        Ok(())
    }

    /// Frames for a guest that takes nothing are given up in time.
    pub(super) fn check_stalls(&self) -> Result<(), Finding> {
        let limit_ns = WAIT_NS_MAX + 2 * RETRY_NS + self.busy_ns() + self.switch.delay_ns_max();
        for (to, queue) in self.queues() {
            let waits_ns = self.switch.ledger.egress_book(to, queue).waits_ns(self.now_ns);
            if let Some(ns) = waits_ns.filter(|ns| *ns > limit_ns) {
                let what = format!("a frame for queue {queue} of {to} has waited for {ns} ns");
                return Err(Finding::Late(what));
            }
        }
        Ok(())
    }

    /// Whether guest `to`, which keeps the protocol, certainly has room for a frame on a queue, and
    /// has no kick on its way that says so.
    pub(super) fn has_room(&self, to: usize, queue: usize, len: u64) -> bool {
        let guest = &self.guests[to];
        guest.is_honest() && guest.has_room(queue, len) && !self.is_kicked(to, queue, Ring::Rx)
    }

    /// Guests that sleep are told in time of frames that arrived.
    pub(super) fn check_calls(&mut self) -> Result<(), Finding> {
        let busy_ns = self.busy_ns();
        for (i, guest) in self.guests.iter().enumerate().filter(|(_, g)| g.is_honest()) {
            for q in 0..guest.apps.len() {
                let book = self.switch.ledger.egress(i, q);
                if book.call_by_ns == u64::MAX {
                    continue;
                }
                if self.actors[i].awake || !guest.waits_for_call(q) {
                    // It looks before it sleeps.
                    book.call_by_ns = u64::MAX;
                } else if self.now_ns > book.call_by_ns + busy_ns {
                    let what = format!("guest {i} on queue {q}, by {}", book.call_by_ns);
                    return Err(Finding::Uncalled(what));
                }
            }
        }
        Ok(())
    }

    /// All is quiet. Is all well with guest `i`?
    pub(super) fn judge(&self, i: usize) -> Result<(), Finding> {
        let guest = &self.guests[i];
        if let Some(left) = guest.unfinished() {
            let books = (0..guest.apps.len()).filter_map(|q| self.switch.ledger.left(i, q));
            let books = books.collect::<Vec<_>>().join("; ");
            return Err(Finding::Hang(format!("guest {i} has {left} ({books})")));
        }
        for (q, pair) in guest.apps.iter().enumerate() {
            if let Some(left) = self.switch.ledger.left(i, q) {
                return Err(Finding::Hang(format!("of queue {q} of port {i} {left}")));
            }
            let (ingress, egress) = self.switch.stats(i, q);
            let counted = [
                ("frames sent", pair.sent, ingress.frames.get()),
                ("bytes sent", pair.sent_bytes, ingress.bytes.get()),
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

    /// Who is not done, for people.
    pub(super) fn state(&self) -> String {
        let guests = self.guests.iter().enumerate().filter(|(_, g)| g.is_honest());
        let left = guests.filter_map(|(i, g)| Some(format!("guest {i} has {}", g.unfinished()?)));
        let workers = self.switch.workers.iter().enumerate();
        let awake = workers.filter(|(_, w)| !w.is_idle(self.now_ns));
        let awake = awake.map(|(w, _)| format!("worker {w} is awake"));
        let held = self.queues().filter_map(|(to, queue)| {
            let ns = self.switch.ledger.egress_book(to, queue).waits_ns(self.now_ns)?;
            Some(format!("a frame has waited for queue {queue} of {to} for {ns} ns"))
        });
        let all = left.chain(awake).chain(held).collect::<Vec<_>>().join("; ");
        format!("{all}; {} events are to come, at {} ns", self.others, self.now_ns)
    }
}
