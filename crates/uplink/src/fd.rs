//! One queue of a TAP interface, or a packet socket, with batched reads and writes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::sys::{Engine, ReadBatch, WriteBatch};

/// Most frames one batch moves in one system call; a longer batch takes several.
pub(crate) const BATCH: usize = 64;

/// System calls that pass a batch to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batching {
    /// io_uring if the kernel permits it, otherwise one of the others. Decided once, when the queue
    /// is wrapped; [`TapFd::batching`] returns the choice.
    Auto,
    /// io_uring for writes only, as before Linux 6.4; else as `Plain`.
    Writes,
    /// One readv or writev for each frame.
    Plain,
}

/// One user of a TAP queue. A queue that is read and written by different threads has one for each
/// direction, both with the same descriptor.
pub struct TapFd {
    // Declared first, dropped first: it holds a reference to the file behind `fd`.
    engine: Engine,
    fd: Arc<OwnedFd>,
}

impl TapFd {
    /// Wraps a queue returned by [`crate::open`].
    pub fn new(fd: Arc<OwnedFd>, batching: Batching) -> Self {
        let engine = match batching {
            Batching::Auto => Engine::with_ring(fd.as_fd(), BATCH as u32),
            Batching::Writes => Engine::with_ring_for_writes(fd.as_fd(), BATCH as u32),
            Batching::Plain => Err(io::ErrorKind::Unsupported.into()),
        };
        Self { engine: engine.unwrap_or_else(|_| Engine::plain()), fd }
    }

    /// Wraps a packet socket returned by [`crate::open_packet`].
    pub fn packet(socket: Arc<OwnedFd>) -> Self {
        let engine = Engine::with_ring_for_socket(socket.as_fd(), BATCH as u32);
        Self { engine: engine.unwrap_or_else(|_| Engine::plain()).of_socket(), fd: socket }
    }

    /// Whether it is a packet socket.
    pub(crate) fn is_packet(&self) -> bool {
        self.engine.is_socket()
    }

    /// System calls for batches: `Auto` means io_uring for reads and writes.
    pub fn batching(&self) -> Batching {
        self.engine.batching()
    }

    /// Begins a batch of frames to read. Nothing is read before [`ReadBatch::run`].
    ///
    /// Through a ring, an empty read costs half of a successful one: read one frame first, and only
    /// if that succeeds a batch of about the recent number.
    pub fn reads<'m>(&mut self) -> ReadBatch<'_, 'm> {
        self.engine.reads(self.fd.as_fd())
    }

    /// Begins a batch of frames to write. Nothing is written before [`WriteBatch::run`].
    pub fn writes<'m>(&mut self) -> WriteBatch<'_, 'm> {
        self.engine.writes(self.fd.as_fd())
    }
}

impl AsFd for TapFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
