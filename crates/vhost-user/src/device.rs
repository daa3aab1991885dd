//! What the vhost-user protocol drives: one virtio-net device of the back-end.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ring::virtq::{Features, Layout, LayoutError};
use shm::GuestMemory;

use crate::message::{BackendReq, Message, VringState};
use crate::outside::Outside;
use crate::sys::{self, FdKind};

/// One virtio-net device. Every call comes from the thread that drives the connection.
///
/// | state of a ring | what the device does with it |
/// |---|---|
/// | stopped | nothing at all |
/// | started, disabled | no side effect: no frame in, none out |
/// | started, enabled | traffic |
///
/// A ring is started before it is told whether it is enabled: every [`start`](Self::start) is
/// followed by one [`enable`](Self::enable). Ring indices are below
/// [`queues_max`](Self::queues_max), and never that of a control queue.
pub trait Device: Send {
    /// Device and ring feature bits offered. VHOST_USER_F_PROTOCOL_FEATURES is added by the
    /// protocol.
    fn features(&self) -> u64;

    /// Number of rings served: two for each queue pair, at most 32.
    fn queues_max(&self) -> u16;

    /// The bits the driver acknowledged; always some of those offered. May come again, also while
    /// rings run; a ring keeps the features it was started with.
    fn set_features(&mut self, acked: u64);

    /// A new memory table. Returns when no worker uses the old table any more. Rings that run are
    /// restarted right after, so that their areas come from the new table too.
    fn set_memory(&mut self, memory: Arc<GuestMemory>);

    /// Starts a stopped ring.
    ///
    /// # Errors
    /// [`LayoutError`] when the ring cannot lie where it is said to. It stays stopped.
    fn start(&mut self, ring: u16, setup: RingSetup) -> Result<(), LayoutError>;

    /// Stops a ring; nothing of it is in flight when this returns. Gives the ring's position as
    /// VRING_BASE carries it; `None` when it was not running. The kick descriptor of
    /// [`RingSetup`] is to be taken out of any epoll set here.
    fn stop(&mut self, ring: u16) -> Option<u32>;

    /// Enables or disables a ring, started or not. Returns when a worker respects it.
    fn enable(&mut self, ring: u16, on: bool);

    /// Replaces the call of a running ring. `None`: the driver polls.
    fn set_call(&mut self, ring: u16, call: Option<Call>);

    /// The driver kicked in band. Only for running rings.
    fn kick(&mut self, ring: u16);

    /// NET_SET_MTU.
    ///
    /// # Errors
    /// [`Refused`] when the value is not possible.
    fn set_mtu(&mut self, mtu: u16) -> Result<(), Refused>;

    /// SEND_RARP: announce `mac` on the network, the guest cannot do it itself.
    fn send_rarp(&mut self, mac: [u8; 6]);

    /// The bytes of `struct virtio_net_config`, from offset 0; read as zeroes beyond its end.
    fn config(&self) -> Vec<u8>;

    /// Back to the state before SET_FEATURES: RESET_DEVICE, status 0, or the connection is gone.
    /// Every ring was stopped and disabled before.
    fn reset(&mut self);
}

/// A device says no, with the reason.
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

/// All a ring needs to start.
#[derive(Clone, Debug)]
pub struct RingSetup {
    /// Where it lies, in guest addresses.
    pub layout: Layout,
    /// What was negotiated.
    pub features: Features,
    /// Where to go on, as VRING_BASE carries it.
    pub base: u32,
    /// How the driver says that there is work.
    pub kick: Kick,
    /// How to say that work is done; `None`: the driver polls.
    pub call: Option<Call>,
    /// How to say that the ring is broken.
    pub err: Option<Call>,
}

/// A kick descriptor, of a peer ([`Outside`]) or our own.
pub type KickFd = Arc<dyn AsFd + Send + Sync>;

/// How a driver tells a device.
#[derive(Clone)]
pub enum Kick {
    /// An eventfd or a pipe becomes readable.
    Fd(KickFd),
    /// [`Device::kick`] is called.
    InBand,
    /// Never: the ring is to be polled.
    Poll,
}

/// How a device tells a driver.
#[derive(Clone, Debug)]
pub enum Call {
    /// An eventfd or a pipe of our own: eight bytes are written.
    Fd(Arc<OwnedFd>),
    /// An eventfd or a pipe that a peer sent.
    Outside(Arc<Outside>),
    /// A message to the front-end.
    InBand {
        /// Where to.
        to: Arc<BackendRequests>,
        /// Which ring.
        ring: u16,
        /// Whether the ring is broken, or (usually) has used buffers.
        broken: bool,
    },
}

impl Call {
    /// Tells the driver; one system call. Nothing is reported: a full descriptor means that the
    /// driver was told before and has not looked, a closed one that it is gone, which the
    /// connection finds out by itself.
    pub fn signal(&self) {
        match self {
            Self::Fd(fd) => sys::signal(fd.as_fd()),
            Self::Outside(fd) => fd.signal(),
            Self::InBand { to, ring, broken } => to.notify(*ring, *broken),
        }
    }
}

/// The channel on which the back-end speaks first (vhost-user.rst, "Back-end communication").
///
/// It never waits for a reply and never blocks: notifications that find the channel full are kept,
/// one bit each, and go out before the next one or with [`flush`](Self::flush).
#[derive(Debug)]
pub struct BackendRequests {
    channel: Arc<Channel>,
}

#[derive(Debug)]
struct Channel {
    /// A Unix stream socket; User-Mode Linux hands a pipe in some versions.
    fd: Outside,
    calls: AtomicU64,
    faults: AtomicU64,
    config_changed: AtomicU64,
    /// A pipe: what is owed is about to be sent on the port's lane.
    sending: AtomicBool,
}

impl BackendRequests {
    /// Over `fd`, as SET_BACKEND_REQ_FD brought it: a Unix stream socket or a pipe.
    pub fn new(fd: Outside) -> Self {
        let none = || AtomicU64::new(0);
        let sending = AtomicBool::new(false);
        let channel =
            Channel { fd, calls: none(), faults: none(), config_changed: none(), sending };
        Self { channel: Arc::new(channel) }
    }

    /// Says that a ring has used buffers (VRING_CALL) or is broken (VRING_ERR).
    pub fn notify(&self, ring: u16, broken: bool) {
        let set = if broken { &self.channel.faults } else { &self.channel.calls };
        set.fetch_or(1 << (ring & 63), Ordering::AcqRel);
        self.flush();
    }

    /// Says that the configuration space changed: link state or MTU (CONFIG_CHANGE_MSG).
    pub fn config_changed(&self) {
        self.channel.config_changed.store(1, Ordering::Release);
        self.flush();
    }

    /// Sends what is owed; over a pipe, on the port's lane. Returns whether anything is still
    /// owed, because the channel is full.
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
        channel.owes()
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

    fn owes(&self) -> bool {
        self.sets().into_iter().any(|(owed, _)| owed.load(Ordering::Acquire) != 0)
    }

    fn flush(&self) -> bool {
        self.sets().into_iter().any(|(owed, request)| !self.send_set(owed, request))
    }

    /// Sends one message for each bit of `owed`; whether all went.
    fn send_set(&self, owed: &AtomicU64, request: BackendReq) -> bool {
        let mut bits = owed.swap(0, Ordering::AcqRel);
        while bits != 0 {
            let index = bits.trailing_zeros();
            let payload = match request {
                BackendReq::CONFIG_CHANGE_MSG => Vec::new(),
                _ => VringState { index, num: 0 }.to_bytes(),
            };
            let message = Message::request(request, payload, false).to_bytes();
            let sent = match self.fd.kind() {
                FdKind::Pipe => sys::write_whole(self.fd.as_fd(), &message),
                // A peer that is gone counts as notified.
                _ => sys::send(self.fd.as_fd(), &message, &[]).unwrap_or(true),
            };
            if !sent {
                owed.fetch_or(bits, Ordering::AcqRel);
                return false;
            }
            bits &= bits - 1;
        }
        true
    }
}
