//! A gate that holds all workers between two rounds, while the switch is handed to another process.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use shm::sync::{Condvar, Lock, Mutex};

#[derive(Default)]
struct State {
    /// Number of workers that came to the gate.
    waiting: usize,
    open: bool,
}

/// The gate as workers see it.
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

impl Default for Gate {
    fn default() -> Self {
        let state = Mutex::new(Lock::Gate, State::default());
        Self { state, changed: Condvar::new() }
    }
}

impl Gate {
    /// Waits until the gate opens.
    pub fn pass(&self) {
        let mut state = self.state.lock();
        state.waiting += 1;
        self.changed.notify_all();
        while !state.open {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn has(&self, workers: usize, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let mut state = self.state.lock();
        while state.waiting < workers {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// All workers are at the gate; it opens when this is dropped.
pub struct Frozen(Arc<Gate>);

impl Frozen {
    /// Waits until `workers` are at the gate; `None`: not within `limit`, and they continue.
    pub fn wait(gate: Arc<Gate>, workers: usize, limit: Duration) -> Option<Self> {
        let frozen = Self(gate);
        frozen.0.has(workers, limit).then_some(frozen)
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.0.state.lock().open = true;
        self.0.changed.notify_all();
    }
}
