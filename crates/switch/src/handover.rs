//! What other threads hand to a worker: commands, by a [`Mailbox`], and a pause, by a [`Gate`].

mod gate;
mod mailbox;

pub use self::gate::{Frozen, Gate};
pub use self::mailbox::Mailbox;

#[cfg(all(test, loom))]
mod models;
