//! A guest of our own: the driver half of one queue pair with its buffers. `nic`, `gen` and the
//! demo's guests are made of it.
//!
//! One thread serves both rings, in rounds: what is due ([`Guest::begin`]), a look at the receive
//! ring when the poll policy wants one, frames to send, and [`Guest::wait`], the one place where
//! it sleeps.

mod report;
mod ring;
mod rx;
mod settings;
#[cfg(test)]
mod tests;
mod tx;

pub use self::report::Report;
pub use self::rx::Rx;
pub use self::settings::{HELP, Setting, Settings};
pub use self::tx::Tx;

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use switch::poll::{Action, Costs, Policy, Poller};
use vhost_user::feature;
use vhost_user::frontend::{Frontend, FrontendError, PROTOCOL_FEATURES, Params};
use vhost_user::sys::{self, SocketError};

use self::ring::Buffers;
use self::tx::Rest;
use crate::cli::ConnectArgs;
use crate::spec::Role;

/// Header before each frame: virtio 1.x, with `num_buffers`.
pub const HDR_LEN: usize = 12;
/// Size of a transmit buffer: a 64 KiB GSO frame with its headers, on a page of its own.
const TX_BUFFER: u64 = 17 * 4096;
/// Size of a receive buffer; longer frames take several (MRG_RXBUF).
const RX_BUFFER: u64 = 4096;
/// Size of both where there are many guests and little traffic.
const SMALL_BUFFER: u64 = 2048;
/// Time between two looks whether the other end is there.
const RETRY_EVERY: Duration = Duration::from_millis(100);
/// Longest wait for the back-end to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Where to connect, and how.
#[derive(Clone, Debug)]
pub struct Connect {
    /// Socket path.
    pub socket: PathBuf,
    /// Who listens: `Server`: we do.
    pub role: Role,
    /// Ring size.
    pub queue_size: u16,
    /// Features to take if offered.
    pub features: u64,
    /// How the driver half works.
    pub settings: Settings,
    /// Size of the buffers: (transmit, receive).
    buffers: (u64, u64),
}

impl Connect {
    /// The same elsewhere.
    pub fn at(&self, socket: PathBuf) -> Self {
        Self { socket, ..self.clone() }
    }

    /// With small buffers, for a process that is many guests.
    pub fn small(self) -> Self {
        Self { buffers: (SMALL_BUFFER, SMALL_BUFFER), ..self }
    }
}

impl TryFrom<&ConnectArgs> for Connect {
    type Error = String;

    fn try_from(args: &ConnectArgs) -> Result<Self, String> {
        let error =
            || format!("--connect {}: use vhost-user:SOCKET[,mode=client|server]", args.connect);
        let rest = args.connect.strip_prefix("vhost-user:").ok_or_else(error)?;
        let (socket, role) = match rest.split_once(',') {
            None => (rest, Role::Client),
            Some((socket, "mode=client")) => (socket, Role::Client),
            Some((socket, "mode=server")) => (socket, Role::Server),
            Some(_) => return Err(error()),
        };
        if socket.is_empty() || socket.len() > 107 {
            return Err(error());
        }
        let size = args.queue_size;
        if size == 0 || size > 32768 || (!args.packed && !size.is_power_of_two()) {
            return Err(format!(
                "--queue-size {size}: use 1 to 32768, a power of two unless --packed"
            ));
        }
        let settings = Settings::new(args.poll, args.kick, &args.set);
        if settings.apart && size < 2 {
            return Err("--queue-size 1: header=apart takes 2 descriptors for a frame".into());
        }
        let mut features = feature::BASE;
        for (bit, on) in [
            (feature::RING_PACKED, args.packed),
            (feature::IN_ORDER, args.in_order),
            (feature::EVENT_IDX, settings.event_index),
            (feature::INDIRECT_DESC, settings.indirect),
        ] {
            if !on {
                features &= !bit;
            }
        }
        let socket = socket.into();
        let buffers = (TX_BUFFER, RX_BUFFER);
        Ok(Self { socket, role, queue_size: size, features, settings, buffers })
    }
}

/// A connected guest.
pub struct Guest {
    /// The connection; readable when the switch has gone.
    pub frontend: Frontend,
    /// Frames to the switch.
    pub tx: Tx,
    /// Frames from the switch.
    pub rx: Rx,
    poller: Poller,
    /// What the poll policy said last.
    resting: Action,
    /// What was counted.
    pub counts: SleepCounts,
}

/// What a guest's thread counts of its sleep.
#[derive(Clone, Copy, Debug, Default)]
pub struct SleepCounts {
    /// Sleeps that a notification could end.
    pub sleeps: u64,
    /// Sleeps with the receive ring not armed.
    pub naps: u64,
    /// Time in both, in ns.
    pub asleep_ns: u64,
}

/// What a guest waits for beside its rings.
#[derive(Default)]
pub struct Also<'a> {
    /// Readable when there are frames to send.
    pub source: Option<BorrowedFd<'a>>,
    /// There may be frames to send at once.
    pub more: bool,
    /// There are, but no buffer is free.
    pub blocked: bool,
    /// Frames received cannot be dealt with before a buffer is free.
    pub deaf: bool,
    /// When else to return, in ns.
    pub until: Option<u64>,
}

/// Connects, waiting for the other end if it is not there yet and `wait` says so. Anything else
/// that stands in the way is told at once.
pub fn connect(to: &Connect, wait: Option<&dyn Fn() -> bool>) -> Result<Guest, ConnectError> {
    let mut try_once: Box<dyn FnMut() -> Result<UnixStream, SocketError>> = match to.role {
        Role::Server => {
            let listener = sys::Listener::bind(&to.socket)?;
            Box::new(move || listener.accept_within(RETRY_EVERY))
        }
        Role::Client => Box::new(|| sys::connect(&to.socket)),
    };
    let mut told = false;
    loop {
        let error = match try_once() {
            Ok(stream) => return Ok(start(stream, to)?),
            Err(error) => error,
        };
        let absent =
            matches!(error, SocketError::NobodyListens(_) | SocketError::NobodyConnects(_));
        if !absent || !wait.is_some_and(|go_on| go_on()) {
            return Err(error.into());
        }
        if !std::mem::replace(&mut told, true) {
            tracing::info!("waiting for the switch at {}", to.socket.display());
        }
        if to.role == Role::Client {
            std::thread::sleep(RETRY_EVERY);
        }
    }
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No socket.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// No agreement.
    #[error(transparent)]
    Frontend(#[from] FrontendError),
}

fn start(stream: UnixStream, to: &Connect) -> Result<Guest, FrontendError> {
    let Connect { settings, buffers: (tx_stride, rx_stride), .. } = *to;
    let size = u64::from(to.queue_size);
    let params = Params {
        features: to.features,
        protocol_features: PROTOCOL_FEATURES,
        pairs: 1,
        queue_size: to.queue_size,
        base: None,
        indirect_entries: if settings.apart && settings.indirect { 2 } else { 0 },
        buffer_bytes: size * (tx_stride + rx_stride),
        timeout: TIMEOUT,
    };
    let (frontend, mut queues) = Frontend::start(stream, &params)?;
    let memory = Arc::clone(frontend.memory());
    let base = frontend.buffers().start;
    let two = settings.apart && frontend.features() & feature::INDIRECT_DESC == 0;
    let count = if two { to.queue_size / 2 } else { to.queue_size };
    let Settings { apart, offset, checks, .. } = settings;
    if !checks {
        queues.iter_mut().for_each(|queue| queue.driver.trust_device());
    }
    let buffers = |base, stride| Buffers { base, stride, count, apart, offset };
    let tx_buffers = buffers(base, tx_stride);
    let tx = Tx::new(queues.remove(1), Arc::clone(&memory), tx_buffers, &settings);
    let rx_buffers = buffers(base + size * tx_stride, rx_stride);
    let rx = Rx::new(queues.remove(0), memory, rx_buffers, &settings);
    let costs = match settings.poll {
        Policy::Adaptive { .. } => crate::cost::costs(),
        _ => Costs::TYPICAL,
    };
    let poller = Poller::new(settings.poll, costs, now_ns());
    let counts = SleepCounts::default();
    Ok(Guest { frontend, tx, rx, poller, resting: Action::Poll, counts })
}

/// The switch broke the ring protocol: the connection is to be given up.
pub type Malformed = ::ring::virtq::Malformed;

impl Guest {
    /// Begins a round: does what is due, and says whether the poll policy wants a look at the
    /// receive ring.
    pub fn begin(&mut self, now: u64) -> Result<bool, Malformed> {
        self.tx.tick(now)?;
        Ok(match self.resting {
            Action::Poll => true,
            Action::Until(at) => at <= now,
            Action::Arm => self.rx.ring.has_used(),
        })
    }

    /// Most used buffers to take in one look.
    pub fn budget(&self) -> usize {
        self.poller.budget()
    }

    /// Ends a round in which so many frames passed; `looked`: the receive ring was looked at.
    ///
    /// `adaptive` serves both directions with the latency it may trade; the other policies say
    /// when the receive ring is looked at, and leave what is sent to the kick policy.
    pub fn end(&mut self, looked: bool, received: usize, sent: usize, now: u64) {
        let frames = if self.serves_both() { received + sent } else { received };
        if looked || frames > 0 {
            self.resting = self.poller.next(frames, now);
        }
    }

    fn serves_both(&self) -> bool {
        matches!(self.poller.policy(), Policy::Adaptive { .. })
    }

    /// Sleeps until there is something to do, unless there is already; false when the switch is
    /// gone.
    pub fn wait(&mut self, also: &Also<'_>) -> Result<bool, Malformed> {
        let napping = matches!(self.resting, Action::Until(_));
        let stays = also.more && !(napping && self.serves_both());
        let retries = also.blocked && self.tx.stop();
        if self.resting == Action::Poll || stays || retries {
            return Ok(true);
        }
        let armed = self.resting == Action::Arm && !also.deaf;
        let ready = armed && !self.rx.ring.arm();
        let rest = if ready { Rest::Awake } else { self.tx.rest(also.blocked)? };
        let gone = rest != Rest::Awake && self.sleep(also, armed, rest == Rest::Armed);
        if self.poller.disarms() {
            self.rx.ring.driver.disarm();
        }
        self.tx.ring.driver.disarm();
        Ok(!gone)
    }

    /// True when the switch is gone.
    fn sleep(&mut self, also: &Also<'_>, armed: bool, tx_armed: bool) -> bool {
        let nap = match self.resting {
            Action::Until(at) if !also.deaf => Some(at),
            _ => None,
        };
        let until = [nap, also.until, self.tx.deadline()].into_iter().flatten().min();
        let before = now_ns();
        let timeout = until.map(|at| at.saturating_sub(before));
        if timeout == Some(0) {
            return false;
        }
        // What `adaptive` lets wait, waits in both directions.
        let source = also.source.filter(|_| nap.is_none() || !self.serves_both());
        let calls = [armed.then(|| self.rx.ring.call()), tx_armed.then(|| self.tx.ring.call())];
        let [gone, sent, called, _] =
            readable([Some(self.frontend.as_fd()), source, calls[0], calls[1]], timeout);
        let now = now_ns();
        *(if armed { &mut self.counts.sleeps } else { &mut self.counts.naps }) += 1;
        self.counts.asleep_ns += now.saturating_sub(before);
        if tx_armed {
            self.tx.ring.take_calls();
        }
        if called {
            self.rx.ring.take_calls();
        }
        if armed && (called || sent && self.serves_both()) {
            self.poller.wake(now);
            self.resting = Action::Poll;
        }
        gone
    }
}

/// Sleeps until one of many guests, whose receive rings are armed, was called, or for at most
/// `timeout_ns`; false when one's switch is gone.
pub fn wait_many(guests: &mut [Guest], timeout_ns: u64) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut all = Vec::with_capacity(2 * guests.len());
    for guest in &*guests {
        all.push(PollFd::new(&guest.frontend, PollFlags::IN));
        all.push(PollFd::from_borrowed_fd(guest.rx.ring.call(), PollFlags::IN));
    }
    let _ = poll(&mut all, Some(&timespec(timeout_ns)));
    let ready: Vec<_> = all.iter().map(|fd| !fd.revents().is_empty()).collect();
    for (guest, ready) in guests.iter_mut().zip(ready.chunks(2)) {
        if ready[1] {
            guest.rx.ring.take_calls();
        }
    }
    ready.chunks(2).all(|ready| !ready[0])
}

fn timespec(ns: u64) -> rustix::event::Timespec {
    rustix::event::Timespec {
        tv_sec: (ns / 1_000_000_000).try_into().unwrap_or(i64::MAX),
        tv_nsec: (ns % 1_000_000_000) as i64,
    }
}

/// Sleeps until one of `fds` is readable, at most `timeout_ns`; says which are.
pub fn readable<const N: usize>(
    fds: [Option<BorrowedFd<'_>>; N],
    timeout_ns: Option<u64>,
) -> [bool; N] {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut all: Vec<_> = fds.iter().flatten().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let timeout = timeout_ns.map(timespec);
    // An interrupted sleep is a sleep that ended.
    let _ = poll(&mut all, timeout.as_ref());
    let mut polled = all.iter();
    fds.map(|fd| fd.is_some() && polled.next().is_some_and(|p| !p.revents().is_empty()))
}

/// The machine's monotonic clock, in ns: comparable between processes.
pub fn now_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs()
}

/// Whether the switch has closed the connection.
pub fn is_gone(frontend: &Frontend) -> bool {
    sys::wait_readable(frontend.as_fd(), Duration::ZERO).unwrap_or(true)
}

/// Names a socket for messages.
pub fn name(path: &Path) -> String {
    path.display().to_string()
}
