//! A thread that changes memory while a target reads it. It is started once for each thread that
//! runs targets, and waits between two inputs: an input takes the same resources as any other.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Longest time to wait until the first pass begins.
const START_MAX: Duration = Duration::from_millis(1);
/// How long either thread looks for a change of the state before it sleeps: to wake a thread takes
/// longer than most inputs.
const SPIN: Duration = Duration::from_micros(500);
/// Passes between two yields.
const YIELD: u64 = 1000;

/// Makes one pass of changes.
type Job = Box<dyn FnMut() + Send>;

enum State {
    /// No input is running.
    Idle,
    /// A job that the thread has not begun.
    Given(Job),
    /// The thread makes passes, until it is stopped.
    Running,
}

/// The thread, and what it shares with its owner.
pub struct Racer(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    stop: AtomicBool,
    passes: AtomicU64,
}

thread_local! {
    static RACER: Racer = Racer::new();
}

/// Runs `act` while another thread makes passes of `job`; none, if it does not get a processor in
/// time. That thread is idle again when this returns or panics. Returns the result, and the number
/// of passes.
pub fn race<T>(job: impl FnMut() + Send + 'static, act: impl FnOnce() -> T) -> (T, u64) {
    RACER.with(|racer| {
        let running = racer.start(Box::new(job));
        let result = act();
        drop(running);
        (result, racer.0.passes.load(Ordering::Relaxed))
    })
}

/// Has this thread leave one of its processors to another thread: two that wake each other would
/// share one, and never run at the same time. `None`: it has no other.
fn leave_a_cpu() -> Option<CpuSet> {
    let mut own = sched_getaffinity(None).ok()?;
    let last = (0..CpuSet::MAX_CPU).rev().find(|cpu| own.is_set(*cpu))?;
    if own.count() < 2 {
        return None;
    }
    own.unset(last);
    pin(&own);
    let mut other = CpuSet::new();
    other.set(last);
    Some(other)
}

fn pin(to: &CpuSet) {
    // Without it, the target is slower to find anything, and not wrong.
    let _ = sched_setaffinity(None, to);
}

impl Racer {
    fn new() -> Self {
        let shared = Arc::new(Shared {
            state: Mutex::new(State::Idle),
            changed: Condvar::new(),
            stop: AtomicBool::new(false),
            passes: AtomicU64::new(0),
        });
        let (thread, cpu) = (Arc::clone(&shared), leave_a_cpu());
        std::thread::spawn(move || {
            cpu.iter().for_each(pin);
            thread.serve();
        });
        Self(shared)
    }

    fn start(&self, job: Job) -> Running<'_> {
        self.0.stop.store(false, Ordering::Relaxed);
        self.0.passes.store(0, Ordering::Relaxed);
        self.0.set(State::Given(job));
        let begun = |state: &State| !matches!(state, State::Given(_));
        if !self.0.spin(begun) {
            let rest = START_MAX.saturating_sub(SPIN);
            drop(self.0.changed.wait_timeout_while(self.0.lock(), rest, |state| !begun(state)));
        }
        Running(&self.0)
    }
}

/// While it exists, the thread makes passes, or will.
struct Running<'a>(&'a Shared);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
        let mut state = self.0.lock();
        if matches!(*state, State::Given(_)) {
            *state = State::Idle;
        }
        drop(state);
        self.0.wait(|state| matches!(state, State::Idle));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a state is reached while this thread spins.
    fn spin(&self, is_reached: impl Fn(&State) -> bool) -> bool {
        let end = Instant::now() + SPIN;
        while !is_reached(&self.lock()) {
            if Instant::now() > end {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    fn wait(&self, is_reached: impl Fn(&State) -> bool) {
        if self.spin(&is_reached) {
            return;
        }
        let wait = self.changed.wait_while(self.lock(), |state| !is_reached(state));
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }

    fn set(&self, state: State) {
        *self.lock() = state;
        self.changed.notify_all();
    }

    /// The thread's loop. It ends with the process.
    fn serve(&self) {
        loop {
            self.wait(|state| matches!(state, State::Given(_)));
            let mut state = self.lock();
            let given = std::mem::replace(&mut *state, State::Idle);
            // It may have been taken back meanwhile.
            let State::Given(mut job) = given else { continue };
            *state = State::Running;
            drop(state);
            self.changed.notify_all();
            while !self.stop.load(Ordering::Relaxed) {
                job();
                // The other thread may be waiting for this processor.
                if self.passes.fetch_add(1, Ordering::Relaxed) % YIELD == YIELD - 1 {
                    std::thread::yield_now();
                }
            }
            // Before the owner continues: the job holds memory of this input.
            drop(job);
            self.set(State::Idle);
        }
    }
}
