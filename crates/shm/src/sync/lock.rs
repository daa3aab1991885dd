//! Locks that count how often they were taken, how often a thread waited for them, and how long.

use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult};
use std::time::Instant;

#[cfg(loom)]
use loom::sync as raw;
#[cfg(not(loom))]
use std::sync as raw;

use super::tally::{record_taken, record_waited};
use super::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};

macro_rules! locks {
    ($($(#[doc = $what:literal])* $lock:ident = $name:literal,)*) => {
        /// What a lock guards. Locks of one name are counted together.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Lock { $($(#[doc = $what])* $lock,)* }

        impl Lock {
            /// All names.
            pub const ALL: &[Self] = &[$(Self::$lock,)*];
            pub(super) const COUNT: usize = Self::ALL.len();

            /// The name, as in `ctl stats --json`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$lock => $name,)* }
            }

            /// What it guards, in a few words.
            pub fn what(self) -> &'static str {
                match self { $(Self::$lock => concat!($($what,)*).trim_start(),)* }
            }
        }
    };
}

locks! {
    /// ingress queues
    Ingress = "ingress",
    /// egress queues
    Egress = "egress",
    /// frames held for an egress queue
    Hold = "hold",
    /// delayed notifications of an egress queue
    Notifier = "notifier",
    /// changes of the FDB
    Fdb = "fdb",
    /// which worker serves each queue
    Assignments = "assignments",
    /// accounts by which workers share the load
    Leveller = "leveller",
    /// pending commands of a worker
    Commands = "commands",
    /// the pause of all workers before an upgrade
    Gate = "gate",
    /// a worker's thread, to start and to end it
    WorkerThread = "worker_thread",
    /// where frames of a capture are sent
    Capture = "capture",
    /// addresses to announce for a queue's peer
    Announcements = "announcements",
    /// what a queue's worker knew of it, for the next one
    Standing = "standing",
    /// mappings of guest memory, for the handler of lost memory
    Mappings = "mappings",
    /// installation of that handler
    MappingsReady = "mappings_ready",
    /// what a vhost-user front-end has negotiated
    Guest = "guest",
    /// signals to descriptors of vhost-user front-ends that may block
    ForeignFds = "foreign_fds",
    /// connection to xenstore
    XenStore = "xenstore",
    /// rate of a Xen vif
    XenRate = "xen_rate",
    /// multicast addresses of a Xen vif
    XenMulticast = "xen_multicast",
    /// hash and mapping by which a Xen vif's queues are chosen
    XenSteering = "xen_steering",
    /// static grants of a Xen vif's queue
    XenStaticGrants = "xen_static_grants",
    /// grants mapped from Xen
    XenMapped = "xen_mapped",
    /// grants of all guests of `xen-local`
    LocalGrants = "local_grants",
    /// connection of a guest of `xen-local`
    LocalGuest = "local_guest",
    /// threads of `xen-local`
    LocalThreads = "local_threads",
    /// pending commands of the store of `xen-local`
    LocalCommands = "local_commands",
    /// socket of a front half of `xen-local`
    LocalSocket = "local_socket",
    /// pages of a front half of `xen-local`
    LocalPages = "local_pages",
    /// a TAP that is wired to a vif
    VifTap = "vif_tap",
    /// requests of HTTP connections
    HttpQueries = "http_queries",
    /// samples for HTTP pages
    HttpHistory = "http_history",
}

/// A mutex with a name. It is valid after a panic under it: whoever leaves something half done
/// reports it elsewhere.
#[derive(Debug)]
pub struct Mutex<T: ?Sized> {
    lock: Lock,
    mutex: raw::Mutex<T>,
}

macro_rules! new {
    ($($qualifier:tt)*) => {
        /// Creates one, unlocked.
        pub $($qualifier)* new(lock: Lock, value: T) -> Self {
            Self { lock, mutex: raw::Mutex::new(value) }
        }
    };
}

impl<T> Mutex<T> {
    #[cfg(loom)]
    new!(fn);
    #[cfg(not(loom))]
    new!(const fn);
}

impl<T: ?Sized> Mutex<T> {
    /// Locks it.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.lock_with(|| ())
    }

    /// Locks it; calls `waited`, with the lock held, if another thread had it.
    #[inline]
    pub fn lock_with(&self, waited: impl FnOnce()) -> MutexGuard<'_, T> {
        // A model has fewer steps without the attempt.
        let attempt = if cfg!(loom) { None } else { Some(self.mutex.try_lock()) };
        let guard = match attempt {
            Some(Ok(guard)) => guard,
            Some(Err(TryLockError::WouldBlock)) => {
                let guard = self.wait();
                waited();
                guard
            }
            Some(Err(TryLockError::Poisoned(poisoned))) => poisoned.into_inner(),
            None => self.mutex.lock().unwrap_or_else(PoisonError::into_inner),
        };
        record_taken(self.lock);
        guard
    }

    #[cold]
    fn wait(&self) -> MutexGuard<'_, T> {
        let began = Instant::now();
        let guard = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        record_waited(self.lock, began.elapsed());
        guard
    }

    /// Locks it, if no thread has it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let guard = match self.mutex.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                record_waited(self.lock, std::time::Duration::ZERO);
                return None;
            }
        };
        record_taken(self.lock);
        Some(guard)
    }

    /// The value, of the mutex's only user.
    #[cfg(not(loom))]
    pub fn get_mut(&mut self) -> &mut T {
        self.mutex.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A mutex for a static, and its guard.
#[cfg(not(loom))]
pub type StaticMutex<T> = Mutex<T>;
/// See [`StaticMutex`].
#[cfg(not(loom))]
pub type StaticGuard<T> = MutexGuard<'static, T>;

/// A mutex for a static, which is part of no model: loom's has no constant.
#[cfg(loom)]
#[derive(Debug)]
pub struct StaticMutex<T>(Lock, std::sync::Mutex<T>);
/// See [`StaticMutex`].
#[cfg(loom)]
pub type StaticGuard<T> = std::sync::MutexGuard<'static, T>;

#[cfg(loom)]
impl<T> StaticMutex<T> {
    /// Creates one, unlocked.
    pub const fn new(lock: Lock, value: T) -> Self {
        Self(lock, std::sync::Mutex::new(value))
    }

    /// Locks it.
    pub fn lock(&'static self) -> StaticGuard<T> {
        record_taken(self.0);
        self.1.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A lock for several readers or one writer, with a name. Valid after a panic under it.
#[derive(Debug)]
pub struct RwLock<T> {
    lock: Lock,
    inner: raw::RwLock<T>,
}

impl<T> RwLock<T> {
    /// Creates one, unlocked.
    pub fn new(lock: Lock, value: T) -> Self {
        Self { lock, inner: raw::RwLock::new(value) }
    }

    /// Locks it for reading.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.take(self.inner.try_read(), || self.inner.read())
    }

    /// Locks it for writing.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.take(self.inner.try_write(), || self.inner.write())
    }

    /// The guard of an attempt, or, if another thread had it, of a wait.
    fn take<G>(&self, attempt: TryLockResult<G>, wait: impl FnOnce() -> LockResult<G>) -> G {
        let guard = match attempt {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                let began = Instant::now();
                let guard = wait().unwrap_or_else(PoisonError::into_inner);
                record_waited(self.lock, began.elapsed());
                guard
            }
        };
        record_taken(self.lock);
        guard
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
