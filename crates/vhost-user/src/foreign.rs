//! Descriptors from a peer: their kind, and the threads that close them.
//!
//! A descriptor can be of any kind: a file on a file system whose server never replies, a TCP
//! socket whose close lingers. `fstat`, `write`, `mmap` and `close` on these block as long as the
//! peer likes. So the kind is found by calls that do not touch the file ([`os::fd_kind`]), and
//! every close happens on a thread for this purpose only.
//!
//! ```text
//!   received ── charged to `account.descriptors` ── ForeignFd ── dropped anywhere
//!                                                      └─ its port's lane: closed, then released
//! ```
//! A lane is a port's list of calls that may block. A lane is served by at most one thread, and
//! there is a thread for each lane with pending calls: a close that blocks delays the closes of its
//! own port only. Pending descriptors stay charged, so that the port reaches its limit.
//!
//! A confined thread of another kind may not start threads ([`os::confine`]). So one of this kind
//! is started with the process ([`start`]), and another before a call that may block. The thread
//! that became idle last is woken first: those that are not needed stay idle, and end.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use shm::sync::{Lock, StaticGuard, StaticMutex};
use switch::account::{Account, Charge, OverLimit};

use os::{FdKind, ThreadKind};

/// Idle time after which a thread ends, unless it is the last one.
const IDLE: Duration = Duration::from_secs(1);
/// A lane's calls need little stack.
const STACK_BYTES: usize = 128 << 10;

/// A descriptor from a peer. Closed on its port's lane.
#[derive(Debug)]
pub struct ForeignFd {
    /// `None` only during drop.
    fd: Option<OwnedFd>,
    kind: FdKind,
    charge: Option<Charge>,
    account: Arc<Account>,
    /// A pipe: a signal is queued on the lane.
    signals: AtomicBool,
}

/// Number of descriptors over their ports' limits, until they are closed.
static UNPAID: AtomicUsize = AtomicUsize::new(0);

impl ForeignFd {
    /// Charges `fd` to `account`, and finds its kind.
    ///
    /// # Errors
    /// [`OverLimit`]: it is closed, and counted by [`unpaid`] until then.
    pub fn new(fd: OwnedFd, account: &Arc<Account>) -> Result<Self, OverLimit> {
        match account.descriptors.charge(1) {
            Ok(charge) => Ok(Self::charged(fd, Some(charge), account)),
            Err(over) => {
                UNPAID.fetch_add(1, Ordering::AcqRel);
                later(account, move || {
                    drop(fd);
                    UNPAID.fetch_sub(1, Ordering::AcqRel);
                });
                Err(over)
            }
        }
    }

    /// Wraps a descriptor that was charged before it was received; `None`: not charged.
    pub fn charged(fd: OwnedFd, charge: Option<Charge>, account: &Arc<Account>) -> Self {
        let kind = os::fd_kind(fd.as_fd());
        let account = Arc::clone(account);
        Self { fd: Some(fd), kind, charge, account, signals: AtomicBool::new(false) }
    }

    /// Kind of the descriptor.
    pub fn kind(&self) -> FdKind {
        self.kind
    }

    /// Notifies the peer without blocking: an eventfd at once, a pipe on the port's lane (the
    /// reader of a pipe can hold its lock indefinitely). Other kinds are ignored.
    pub fn signal(self: &Arc<Self>) {
        match self.kind {
            FdKind::Event => os::signal_event(self.as_fd()),
            FdKind::Pipe if !self.signals.swap(true, Ordering::AcqRel) => {
                let pipe = Arc::clone(self);
                later(&self.account, move || {
                    pipe.signals.store(false, Ordering::Release);
                    os::signal(pipe.as_fd());
                });
            }
            _ => {}
        }
    }

    /// Queues `call` on the port's lane.
    pub(crate) fn later(&self, call: impl FnOnce() + Send + 'static) {
        later(&self.account, call);
    }
}

impl AsFd for ForeignFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("present until it is dropped").as_fd()
    }
}

impl Drop for ForeignFd {
    fn drop(&mut self) {
        let (fd, charge) = (self.fd.take(), self.charge.take());
        later(&self.account, move || {
            drop(fd);
            drop(charge);
        });
    }
}

/// Number of descriptors over their ports' limits that wait to be closed. While it is not 0,
/// receive no more: the process has room for those of one message only.
pub fn unpaid() -> usize {
    UNPAID.load(Ordering::Acquire)
}

/// Closes, on the port's lane, what is not an [`ForeignFd`]: a listener with queued connections, a
/// socket that was not charged.
pub fn close<T: Send + 'static>(what: T, account: &Arc<Account>) {
    later(account, move || drop(what));
}

type Call = Box<dyn FnOnce() + Send>;

struct Lane {
    calls: VecDeque<Call>,
    /// Whether a thread serves it.
    busy: bool,
    /// Keeps the account alive, whose address is the lane's key.
    _account: Arc<Account>,
}

#[derive(Default)]
struct Lanes {
    all: HashMap<usize, Lane>,
    /// Lanes with calls but without a thread.
    ready: VecDeque<usize>,
    threads: usize,
    /// Threads without a call, those woken for one included.
    idle: usize,
    /// Idle threads that sleep, in the order in which they became idle.
    asleep: Vec<Thread>,
}

static LANES: StaticMutex<Option<Lanes>> = StaticMutex::new(Lock::ForeignFds, None);

fn lanes() -> StaticGuard<Option<Lanes>> {
    LANES.lock()
}

/// Queues `call` on the lane of `account`'s port.
fn later(account: &Arc<Account>, call: impl FnOnce() + Send + 'static) {
    let name = Arc::as_ptr(account) as usize;
    let mut guard = lanes();
    let lanes = guard.get_or_insert_default();
    let lane = lanes.all.entry(name).or_insert_with(|| Lane {
        calls: VecDeque::new(),
        busy: false,
        _account: Arc::clone(account),
    });
    lane.calls.push_back(Box::new(call));
    if !lane.busy && lane.calls.len() == 1 {
        lanes.ready.push_back(name);
    }
    // Closers start others themselves. This thread can if it is not confined to less.
    if lanes.threads == 0 || lanes.idle < lanes.ready.len() && os::may_spawn() {
        let _ = lanes.add_thread();
    }
    let woken = lanes.asleep.pop();
    // It needs the lock first.
    drop(guard);
    if let Some(thread) = woken {
        thread.unpark();
    }
}

impl Lanes {
    /// Starts a thread. If that is not possible, existing ones serve the lanes when they are free,
    /// and the next call tries again.
    fn add_thread(&mut self) -> io::Result<()> {
        let thread = std::thread::Builder::new().name("closer".into()).stack_size(STACK_BYTES);
        os::spawn(thread, ThreadKind::Closer, serve)?;
        self.threads += 1;
        Ok(())
    }
}

/// Starts the first thread, unless there is one.
///
/// # Errors
/// A thread cannot be started.
pub fn start() -> io::Result<()> {
    let mut guard = lanes();
    let lanes = guard.get_or_insert_default();
    if lanes.threads == 0 { lanes.add_thread() } else { Ok(()) }
}

/// Thread function: serves lanes, one call at a time.
fn serve() {
    let mut guard = lanes();
    loop {
        let lanes = guard.get_or_insert_default();
        let next = lanes.ready.pop_front();
        let Some((name, lane)) = next.and_then(|name| Some((name, lanes.all.get_mut(&name)?)))
        else {
            let is_needed;
            (guard, is_needed) = sleep(guard);
            if !is_needed {
                drop(guard);
                // Guests have ended some time ago; what their queues and regions took is in pieces.
                os::trim_heaps();
                return;
            }
            continue;
        };
        lane.busy = true;
        let call = lane.calls.pop_front();
        if lanes.idle == 0 {
            let _ = lanes.add_thread();
        }
        drop(guard);
        call.into_iter().for_each(|call| call());
        guard = self::lanes();
        let lanes = guard.get_or_insert_default();
        if let Some(lane) = lanes.all.get_mut(&name) {
            lane.busy = false;
            if lane.calls.is_empty() {
                lanes.all.remove(&name);
            } else {
                lanes.ready.push_back(name);
            }
        }
    }
}

/// Sleeps until this thread is woken for a call, or has been idle for long beside another one that
/// is; false: it is to end.
fn sleep(mut guard: StaticGuard<Option<Lanes>>) -> (StaticGuard<Option<Lanes>>, bool) {
    let me = std::thread::current();
    let end = Instant::now() + IDLE;
    let lanes = guard.get_or_insert_default();
    lanes.idle += 1;
    lanes.asleep.push(me.clone());
    loop {
        // The last one waits indefinitely: an idle process makes no system call.
        let is_alone = guard.get_or_insert_default().idle == 1;
        drop(guard);
        if is_alone {
            std::thread::park();
        } else {
            std::thread::park_timeout(end.saturating_duration_since(Instant::now()));
        }
        guard = self::lanes();
        let lanes = guard.get_or_insert_default();
        let Some(at) = lanes.asleep.iter().position(|thread| thread.id() == me.id()) else {
            lanes.idle -= 1;
            return (guard, true);
        };
        if !is_alone && lanes.idle > 1 && Instant::now() >= end {
            lanes.asleep.remove(at);
            lanes.idle -= 1;
            lanes.threads -= 1;
            return (guard, false);
        }
    }
}

/// Waits until all closes are done; returns whether that took at most `timeout`.
pub fn settle(timeout: Duration) -> bool {
    let end = Instant::now() + timeout;
    loop {
        if lanes().as_ref().is_none_or(|lanes| lanes.all.is_empty()) {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn account(descriptors: u64) -> Arc<Account> {
        let account = Arc::new(Account::default());
        assert!(account.set_limit("descriptors", descriptors));
        account
    }

    #[test]
    fn close_that_blocks_delays_its_own_port_only_and_stays_charged() {
        let (stuck, others) = (account(2), account(2));
        let (end, blocks) = channel::<()>();
        close(Blocks(blocks), &stuck);
        let event = || os::eventfd().unwrap();
        for _ in 0..2 {
            drop(ForeignFd::new(event(), &stuck).unwrap());
        }
        assert_eq!(ForeignFd::new(event(), &stuck).unwrap_err().limit, 2);
        for _ in 0..100 {
            drop(ForeignFd::new(event(), &others).unwrap());
            wait(|| others.descriptors.used() == 0);
        }
        assert_eq!((stuck.descriptors.used(), stuck.descriptors.refused()), (2, 1));
        end.send(()).unwrap();
        wait(|| stuck.descriptors.used() == 0);
    }

    struct Blocks(std::sync::mpsc::Receiver<()>);

    impl Drop for Blocks {
        fn drop(&mut self) {
            self.0.recv().unwrap();
        }
    }

    fn wait(done: impl Fn() -> bool) {
        let end = Instant::now() + PATIENCE;
        while !done() {
            assert!(Instant::now() < end, "timed out");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Calls continue, fewer than a thread can serve: the others, started for lanes that blocked,
    /// end.
    #[test]
    fn threads_that_are_not_needed_end_while_calls_continue() {
        const STUCK: usize = 6;
        let threads = || lanes().as_ref().map_or(0, |lanes| lanes.threads);
        let ends: Vec<_> = (0..STUCK)
            .map(|_| {
                let (end, blocks) = channel::<()>();
                close(Blocks(blocks), &account(1));
                end
            })
            .collect();
        wait(|| threads() > STUCK);
        ends.iter().for_each(|end| end.send(()).unwrap());
        let (few, until) = (account(1), Instant::now() + PATIENCE);
        // One serves, one is ready, and one may serve the lane of another test.
        while threads() > 3 {
            drop(ForeignFd::new(os::eventfd().unwrap(), &few).unwrap());
            wait(|| few.descriptors.used() == 0);
            assert!(Instant::now() < until, "{} threads", threads());
            std::thread::sleep(IDLE / 20);
        }
    }

    #[test]
    fn full_blocking_eventfd_does_not_block_a_signal() {
        use rustix::event::{EventfdFlags, eventfd};
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        let outside = Arc::new(ForeignFd::new(event, &account(2)).unwrap());
        let (done, ends) = channel();
        std::thread::spawn(move || {
            // More than the queue of completions holds.
            (0..2000).for_each(|_| outside.signal());
            done.send(()).unwrap();
        });
        ends.recv_timeout(PATIENCE).expect("it blocked");
    }

    #[test]
    fn pipe_is_signalled_on_the_lane() {
        let (read, write) = os::pipe().unwrap();
        let pipe = Arc::new(ForeignFd::new(write, &account(2)).unwrap());
        assert_eq!(pipe.kind(), FdKind::Pipe);
        pipe.signal();
        assert!(os::wait_readable(read.as_fd(), PATIENCE).unwrap());
    }
}
