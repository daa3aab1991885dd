//! Every interleaving of workers with those who send to them, with loom:
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pvswitch-switch --lib --release models`

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::{Condvar, Mutex};
use loom::thread;

use super::*;

/// What the kernel does: an eventfd in an edge-triggered epoll set.
#[derive(Default)]
struct Wake {
    signals: Mutex<u32>,
    changed: Condvar,
}

impl Wake {
    fn signal(&self) {
        *self.signals.lock().unwrap() += 1;
        self.changed.notify_all();
    }

    /// Sleeps until a signal that was not `seen`.
    fn wait(&self, seen: &mut u32) {
        let mut signals = self.signals.lock().unwrap();
        while *signals == *seen {
            signals = self.changed.wait(signals).unwrap();
        }
        *seen = *signals;
    }
}

#[derive(Default)]
struct Worker {
    mailbox: Mailbox<Vec<u8>>,
    wake: Wake,
}

impl Worker {
    /// Rounds until it has `wanted` commands, of which it takes `batch` at a time. loom reports one
    /// that sleeps for good.
    fn run(&self, wanted: usize, batch: usize) -> Vec<u8> {
        let (mut seen, mut got) = (0, Vec::new());
        while got.len() < wanted {
            let taken = self.mailbox.take(|pending| {
                let taken: Vec<u8> = pending.drain(..batch.min(pending.len())).collect();
                (taken, !pending.is_empty())
            });
            got.extend(taken.into_iter().flatten());
            if got.len() < wanted && !self.mailbox.has_any() {
                self.wake.wait(&mut seen);
            }
        }
        got
    }

    fn send(&self, command: u8) {
        self.mailbox.add(|pending| pending.push(command), || self.wake.signal());
    }
}

/// Two threads send to a worker. `PVSWITCH_MODELS=all`: without a bound, for minutes.
fn mailbox(batch: usize, send: fn(&Worker, u8)) {
    let mut bounded = loom::model::Builder::new();
    let all = std::env::var("PVSWITCH_MODELS").is_ok_and(|value| value == "all");
    bounded.preemption_bound = (!all).then_some(3);
    bounded.check(move || {
        let worker = Arc::new(Worker::default());
        let other = {
            let worker = Arc::clone(&worker);
            thread::spawn(move || send(&worker, 1))
        };
        let runs = {
            let worker = Arc::clone(&worker);
            thread::spawn(move || worker.run(2, batch))
        };
        send(&worker, 2);
        other.join().unwrap();
        let mut got = runs.join().unwrap();
        got.sort_unstable();
        assert_eq!(got, [1, 2]);
    });
}

#[test]
fn no_command_is_lost() {
    mailbox(2, Worker::send);
}

#[test]
fn no_command_that_is_left_for_later_is_lost() {
    mailbox(1, Worker::send);
}

/// The model finds it: the wake-up comes before the command.
#[test]
fn canary_wake_up_before_the_command_is_found() {
    let found = catch_unwind(AssertUnwindSafe(|| {
        mailbox(2, |worker, command| {
            worker.wake.signal();
            worker.mailbox.add(|pending| pending.push(command), || {});
        });
    }));
    assert!(found.is_err());
}

/// Workers touch `rounds` in their rounds, and the control thread while they are frozen: loom
/// reports two at once.
fn gate(workers: usize, wait: fn(Arc<Gate>, usize) -> Option<Frozen>) {
    loom::model(move || {
        let gate = Arc::new(Gate::default());
        let rounds: Vec<_> = (0..workers).map(|_| Arc::new(UnsafeCell::new(0_u32))).collect();
        let threads = rounds.iter().map(|round| {
            let (gate, round) = (Arc::clone(&gate), Arc::clone(round));
            thread::spawn(move || {
                round.with_mut(|_| ());
                gate.pass();
                round.with_mut(|_| ());
            })
        });
        let threads: Vec<_> = threads.collect();
        if let Some(frozen) = wait(gate, workers) {
            rounds.iter().for_each(|round| round.with_mut(|_| ()));
            drop(frozen);
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

#[test]
fn no_worker_is_in_a_round_while_all_are_frozen_and_all_continue() {
    gate(2, |gate, workers| Frozen::wait(gate, workers, Duration::from_secs(3600)));
}

#[test]
fn workers_continue_if_one_of_them_was_too_late() {
    gate(2, |gate, workers| Frozen::wait(gate, workers, Duration::ZERO));
}

/// The model finds it: one worker is not waited for.
#[test]
fn canary_worker_that_is_not_frozen_is_found() {
    let found = catch_unwind(AssertUnwindSafe(|| {
        gate(2, |gate, workers| Frozen::wait(gate, workers - 1, Duration::from_secs(3600)));
    }));
    assert!(found.is_err());
}
