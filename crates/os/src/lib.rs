//! System calls that several crates need: sockets, descriptors, eventfds, epoll, back-off.
//!
//! * `socket`: Unix sockets, and messages with descriptors (SCM_RIGHTS)
//! * `listen`: listening sockets with a group and a mode, made without a race
//! * `inherit`: descriptors that the parent process passed
//! * `users`: groups by name, and the user of a socket's peer
//! * `event`: eventfds and pipes as signals
//! * `poll`: waiting for one descriptor or a few, and [`Epoll`] for many
//! * `time`: clocks that processes share, CPU time, precise timers
//! * `priority`: how the kernel schedules a thread
//! * `confine`: the system calls that a thread may make
//! * `helper`: the process that starts programs for one that may not
//! * `fd`: the kind of a descriptor, and reads and writes that do not block
//! * `backoff`: when to retry a lost connection
//! * `sys`: the calls that need `unsafe`: notification of an eventfd shared with a peer, groups
//!
//! Every socket, eventfd and pipe made here is non-blocking and close-on-exec. Calls on a peer's
//! descriptor never block: socket calls carry MSG_DONTWAIT, and an eventfd that a peer shares is
//! signalled by [`signal_event`] and read by [`drain_event`].
//!
//! Not in this crate: ioctls of one crate's devices, which are in that crate's `sys.rs`.
#![deny(unsafe_code)]

mod backoff;
mod confine;
mod event;
mod fd;
mod handover;
mod helper;
mod inherit;
mod listen;
mod poll;
mod priority;
mod socket;
mod sys;
mod time;
mod users;

pub use backoff::{Backoff, delay};
pub use confine::{
    ConfineError, Sandbox, ThreadKind, confine, enable_confinement, may_spawn, spawn,
};
pub use event::{drain, drain_event, eventfd, pipe, signal, write_whole};
pub use fd::{FdKind, fd_kind, is_memory, memfd, open_device, read, set_nonblocking, write};
pub use handover::{HandoverError, StateFile, pack, receive_state, send_state, unpack};
pub use helper::{
    Program, end_process, end_program, open_net_namespace, serve, start_helper, start_program,
};
pub use inherit::{InheritError, inherited_by_name};
pub use listen::{Listener, Permissions, create_directory, is_tcp_listener};
pub use poll::{Epoll, Ready, Until, poll_readable, wait, wait_readable};
pub use priority::{Priority, set_thread_priority};
pub use socket::{
    Carries, PATH_MAX, Received, SCM_MAX_FD, SocketError, connect, recv, send, shutdown, socketpair,
};
pub use sys::{
    ThreadCounts, inherited, is_read, limit_heaps, refuse_descriptors, signal_event, thread_counts,
    trim_heaps,
};
pub use time::{monotonic, precise_timers, process_cpu_time, thread_cpu_time};
pub use users::{Group, Peer, peer};
