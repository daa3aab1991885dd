//! What other threads hand to a worker: commands, by a [`Mailbox`], and a pause, by a [`Gate`].

mod gate;
mod mailbox;

pub use self::gate::{Frozen, Gate};
pub use self::mailbox::Mailbox;

use std::sync::PoisonError;

use shm::sync::{Mutex, MutexGuard};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(all(test, loom))]
mod models;
