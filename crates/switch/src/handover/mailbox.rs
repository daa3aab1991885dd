//! Commands for a thread that polls for them between rounds, and sleeps otherwise.

use shm::sync::{AtomicBool, Lock, Mutex, Ordering};

/// Pending commands `C` of a thread, from any thread. An empty mailbox costs that thread one
/// relaxed load.
///
/// The thread sleeps only if [`has_any`](Self::has_any) is false, and until it is woken: either it
/// sees the flag, or the wake-up comes after that check, and ends its sleep.
pub struct Mailbox<C> {
    pending: Mutex<C>,
    /// Whether commands may be pending. Set after they were added, and before the wake-up.
    waiting: AtomicBool,
}

impl<C: Default> Default for Mailbox<C> {
    fn default() -> Self {
        let pending = Mutex::new(Lock::Commands, C::default());
        Self { pending, waiting: AtomicBool::new(false) }
    }
}

impl<C> Mailbox<C> {
    /// Adds commands, then wakes the thread.
    pub fn add(&self, add: impl FnOnce(&mut C), wake: impl FnOnce()) {
        add(&mut self.pending.lock());
        // Pairs with the loads in `take` and `has_any`; loom test `no_command_is_lost`.
        self.waiting.store(true, Ordering::Release);
        wake();
    }

    /// Whether commands are pending. Before the thread sleeps.
    pub fn has_any(&self) -> bool {
        self.waiting.load(Ordering::Acquire)
    }

    /// Takes commands, if some may be pending: `take` returns them, and whether it left others,
    /// for the next call.
    #[inline]
    pub fn take<T>(&self, take: impl FnOnce(&mut C) -> (T, bool)) -> Option<T> {
        // In two steps: a swap in each round costs as much as a part of an empty poll.
        let any =
            self.waiting.load(Ordering::Relaxed) && self.waiting.swap(false, Ordering::Acquire);
        any.then(|| self.take_pending(take))
    }

    #[cold]
    fn take_pending<T>(&self, take: impl FnOnce(&mut C) -> (T, bool)) -> T {
        let (taken, left) = take(&mut self.pending.lock());
        if left {
            self.waiting.store(true, Ordering::Release);
        }
        taken
    }
}
