//! Device interface of the vhost-user protocol: one virtio-net device of the back-end.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ring::virtq::{Features, Layout, LayoutError, Ledger, RingLog};
use shm::GuestMemory;

use crate::foreign::ForeignFd;
use crate::message::{BackendReq, Message, VringState};
use os::FdKind;

/// One virtio-net device. Every call comes from the thread that drives the connection.
///
/// | state of a ring | what the device does with it |
/// |---|---|
/// | stopped | nothing at all |
/// | started, disabled | no side effect: no frame in, none out |
/// | started, enabled | traffic |
///
/// Whether a ring is enabled is set after its start: every [`start`](Self::start) is followed by
/// one [`enable`](Self::enable). Ring indices are below [`queues_max`](Self::queues_max), and never
/// that of a control queue.
pub trait Device: Send {
    /// Device and ring feature bits offered. VHOST_USER_F_PROTOCOL_FEATURES is added by the
    /// protocol.
    fn features(&self) -> u64;

    /// Number of rings served: two for each queue pair, at most 32.
    fn queues_max(&self) -> u16;

    /// The bits the driver acknowledged; always some of those offered. May be called again, also
    /// while rings run; a ring keeps the features it was started with.
    fn set_features(&mut self, acked: u64);

    /// Sets a new memory table, for rings that start after it. Running ones are
    /// [replaced](Self::replace) right after, or stopped: then no worker uses the old table any
    /// more.
    fn set_memory(&mut self, memory: Arc<GuestMemory>);

    /// Starts a stopped ring.
    ///
    /// # Errors
    /// [`LayoutError`] if the ring's layout is not valid. It stays stopped.
    fn start(&mut self, ring: u16, setup: RingSetup) -> Result<(), LayoutError>;

    /// Continues a running ring at its position (not at that of `setup`), with the kick descriptor
    /// that it has, and enabled or not as it was, but otherwise as `setup` says, in the memory set
    /// last. Between two bursts: the device is not down in between. When this returns, no worker
    /// uses the memory that the ring was in.
    ///
    /// # Errors
    /// [`LayoutError`] if the ring's layout is not valid. It runs as before, and must be stopped.
    fn replace(&mut self, ring: u16, setup: RingSetup) -> Result<(), LayoutError>;

    /// Stops a ring; nothing of it is in flight when this returns. Returns the ring's position in
    /// the form of VRING_BASE; `None` if it was not running. The kick descriptor of [`RingSetup`]
    /// must be removed from any epoll set here.
    fn stop(&mut self, ring: u16) -> Option<u32>;

    /// Returns the position of a running ring in the form of VRING_BASE, with nothing of it in
    /// flight; `None` if it does not run. It may continue afterwards.
    fn position(&mut self, ring: u16) -> Option<u32>;

    /// Enables or disables a ring, started or not. Returns when workers have applied it.
    fn enable(&mut self, ring: u16, on: bool);

    /// Logs the writes for a running ring, its buffers included, in another log, or no longer.
    /// When this returns, no worker uses the log that it had.
    fn set_log(&mut self, ring: u16, log: Option<RingLog>);

    /// Replaces the call descriptor of a running ring. `None`: the driver polls.
    fn set_call(&mut self, ring: u16, call: Option<Call>);

    /// Handles an in-band kick. Only for running rings.
    fn kick(&mut self, ring: u16);

    /// Sets the MTU (NET_SET_MTU).
    ///
    /// # Errors
    /// [`Refused`] if the value is not supported.
    fn set_mtu(&mut self, mtu: u16) -> Result<(), Refused>;

    /// Announces `mac` on the network, as the guest cannot do it itself (SEND_RARP).
    fn send_rarp(&mut self, mac: [u8; 6]);

    /// The bytes of `struct virtio_net_config` from offset 0. Reads beyond the end return zeroes.
    fn config(&self) -> Vec<u8>;

    /// Resets to the state before SET_FEATURES: on RESET_DEVICE, status 0, or the end of the
    /// connection. Every ring was stopped and disabled before.
    fn reset(&mut self);
}

/// Refusal by a device, with its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused(pub &'static str);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Refused {}

impl fmt::Debug for Kick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fd(_) => "Fd",
            Self::InBand => "InBand",
            Self::Poll => "Poll",
        })
    }
}

/// Parameters for the start of a ring.
#[derive(Clone, Debug)]
pub struct RingSetup {
    /// Layout, in guest addresses.
    pub layout: Layout,
    /// Negotiated features.
    pub features: Features,
    /// Start position in the form of VRING_BASE.
    pub base: u32,
    /// Ledger of a packed ring's progress, for a successor of a killed process.
    pub ledger: Option<Ledger>,
    /// Log of writes, while the guest migrates.
    pub log: Option<RingLog>,
    /// Notifications from the driver.
    pub kick: Kick,
    /// Notifications to the driver; `None`: the driver polls.
    pub call: Option<Call>,
    /// Notification that the ring is broken.
    pub err: Option<Call>,
}

/// A kick descriptor, of a peer ([`ForeignFd`]) or our own.
pub type KickFd = Arc<dyn AsFd + Send + Sync>;

/// Means by which a driver notifies a device.
#[derive(Clone)]
pub enum Kick {
    /// An eventfd or a pipe becomes readable.
    Fd(KickFd),
    /// [`Device::kick`] is called.
    InBand,
    /// Never: the ring must be polled.
    Poll,
}

/// Means by which a device notifies a driver.
#[derive(Clone, Debug)]
pub enum Call {
    /// An eventfd or a pipe of our own: eight bytes are written.
    Fd(Arc<OwnedFd>),
    /// An eventfd or a pipe that a peer sent.
    ForeignFd(Arc<ForeignFd>),
    /// A message to the front-end.
    InBand {
        /// Channel to the front-end.
        to: Arc<BackendRequests>,
        /// Which ring.
        ring: u16,
        /// Whether the ring is broken, or (usually) has used buffers.
        broken: bool,
    },
}

impl Call {
    /// Notifies the driver; one system call. Errors are ignored: a full descriptor means that an
    /// earlier notification is unread, a closed one that the driver has disconnected, which the
    /// connection detects.
    pub fn signal(&self) {
        match self {
            Self::Fd(fd) => os::signal(fd.as_fd()),
            Self::ForeignFd(fd) => fd.signal(),
            Self::InBand { to, ring, broken } => to.notify(*ring, *broken),
        }
    }
}

/// Channel for requests of the back-end (vhost-user.rst, "Back-end communication").
///
/// It never waits for a reply and never blocks: while the channel is full, notifications are kept
/// pending, one bit each, and are sent before the next one or by [`flush`](Self::flush).
#[derive(Debug)]
pub struct BackendRequests {
    channel: Arc<Channel>,
}

#[derive(Debug)]
struct Channel {
    /// A Unix stream socket; some versions of User-Mode Linux pass a pipe.
    fd: ForeignFd,
    calls: AtomicU64,
    faults: AtomicU64,
    config_changed: AtomicU64,
    /// A pipe: a flush is queued on the port's lane.
    sending: AtomicBool,
}

impl BackendRequests {
    /// Creates the channel on the `fd` of SET_BACKEND_REQ_FD: a Unix stream socket or a pipe.
    pub fn new(fd: ForeignFd) -> Self {
        let none = || AtomicU64::new(0);
        let sending = AtomicBool::new(false);
        let channel =
            Channel { fd, calls: none(), faults: none(), config_changed: none(), sending };
        Self { channel: Arc::new(channel) }
    }

    /// The channel's descriptor.
    pub(crate) fn channel_fd(&self) -> BorrowedFd<'_> {
        self.channel.fd.as_fd()
    }

    /// Notifies that a ring has used buffers (VRING_CALL) or is broken (VRING_ERR).
    pub fn notify(&self, ring: u16, broken: bool) {
        let set = if broken { &self.channel.faults } else { &self.channel.calls };
        set.fetch_or(1 << (ring & 63), Ordering::AcqRel);
        self.flush();
    }

    /// Notifies of a change of the configuration space: link state or MTU (CONFIG_CHANGE_MSG).
    pub fn notify_config_change(&self) {
        self.channel.config_changed.store(1, Ordering::Release);
        self.flush();
    }

    /// Sends pending notifications; on a pipe, on the port's lane. Returns whether any is still
    /// pending because the channel is full.
    pub fn flush(&self) -> bool {
        let channel = &self.channel;
        if channel.fd.kind() != FdKind::Pipe {
            return channel.flush();
        }
        if !channel.sending.swap(true, Ordering::AcqRel) {
            let mine = Arc::clone(channel);
            channel.fd.later(move || {
                mine.sending.store(false, Ordering::Release);
                mine.flush();
            });
        }
        channel.is_pending()
    }
}

impl Channel {
    fn sets(&self) -> [(&AtomicU64, BackendReq); 3] {
        [
            (&self.calls, BackendReq::VRING_CALL),
            (&self.faults, BackendReq::VRING_ERR),
            (&self.config_changed, BackendReq::CONFIG_CHANGE_MSG),
        ]
    }

    fn is_pending(&self) -> bool {
        self.sets().into_iter().any(|(pending, _)| pending.load(Ordering::Acquire) != 0)
    }

    fn flush(&self) -> bool {
        self.sets().into_iter().any(|(pending, request)| !self.send_set(pending, request))
    }

    /// Sends one message for each bit of `pending`; returns whether all were sent.
    fn send_set(&self, pending: &AtomicU64, request: BackendReq) -> bool {
        let mut bits = pending.swap(0, Ordering::AcqRel);
        while bits != 0 {
            let index = bits.trailing_zeros();
            let payload = match request {
                BackendReq::CONFIG_CHANGE_MSG => Vec::new(),
                _ => VringState { index, num: 0 }.to_bytes(),
            };
            let message = Message::request(request, payload, false).to_bytes();
            let sent = match self.fd.kind() {
                FdKind::Pipe => os::write_whole(self.fd.as_fd(), &message),
                // A disconnected peer counts as notified.
                _ => os::send(self.fd.as_fd(), &message, &[]).unwrap_or(true),
            };
            if !sent {
                pending.fetch_or(bits, Ordering::AcqRel);
                return false;
            }
            bits &= bits - 1;
        }
        true
    }
}
