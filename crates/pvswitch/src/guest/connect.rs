//! Where a guest of our own connects, and the connection.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use vhost_user::feature;
use vhost_user::frontend::{Frontend, FrontendError, PROTOCOL_FEATURES, Params};
use vhost_user::sys::{self, SocketError};

use super::ring::{Buffers, Ring};
use super::{Guest, Settings};
use crate::cli::ConnectArgs;
use crate::spec::Role;

/// Size of a transmit buffer: a 64 KiB GSO frame with its headers, on a page of its own.
const TX_BUFFER: u64 = 17 * 4096;
/// Size of a receive buffer; longer frames take several (MRG_RXBUF).
pub(super) const RX_BUFFER: u64 = 4096;
/// Size of both where there are many guests and little traffic.
const SMALL_BUFFER: u64 = 2048;
/// Time between two looks whether the other end is there.
const RETRY_EVERY: Duration = Duration::from_millis(100);
/// Longest wait for the back-end to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Where to connect, and how.
#[derive(Clone, Debug)]
pub struct Connect {
    /// Where.
    pub target: Target,
    /// Ring size.
    pub queue_size: u16,
    /// Features to take if offered.
    pub features: u64,
    /// How the driver half works.
    pub settings: Settings,
    /// Size of the buffers: (transmit, receive).
    buffers: (u64, u64),
}

/// What to connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A vhost-user socket.
    VhostUser {
        /// Its path.
        socket: PathBuf,
        /// Who listens: `Server`: we do.
        role: Role,
    },
}

impl Target {
    /// The path of its socket or directory.
    pub fn path(&self) -> &Path {
        match self {
            Self::VhostUser { socket, .. } => socket,
        }
    }

    /// The same elsewhere.
    fn at(&self, path: PathBuf) -> Self {
        match self {
            Self::VhostUser { role, .. } => Self::VhostUser { socket: path, role: *role },
        }
    }
}

/// As messages name it.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::VhostUser { socket, .. } => write!(f, "{}", socket.display()),
        }
    }
}

impl Connect {
    /// The same elsewhere.
    pub fn at(&self, path: PathBuf) -> Self {
        Self { target: self.target.at(path), ..self.clone() }
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
        let target = Target::VhostUser { socket: socket.into(), role };
        let buffers = (TX_BUFFER, RX_BUFFER);
        Ok(Self { target, queue_size: size, features, settings, buffers })
    }
}

/// A guest's connection to the switch.
pub enum Link {
    /// A vhost-user socket.
    VhostUser(Frontend),
}

impl Link {
    /// Whether the switch has gone.
    pub fn is_gone(&mut self) -> bool {
        match self {
            // It sends nothing unasked.
            Self::VhostUser(frontend) => {
                sys::wait_readable(frontend.as_fd(), Duration::ZERO).unwrap_or(true)
            }
        }
    }

    /// The names of what was agreed on.
    pub fn features(&self) -> Vec<&'static str> {
        match self {
            Self::VhostUser(frontend) => feature::names(frontend.features()),
        }
    }
}

/// Readable when [`Link::is_gone`] is to be asked.
impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::VhostUser(frontend) => frontend.as_fd(),
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

impl ConnectError {
    /// Whether the other end is just not there yet.
    fn is_absence(&self) -> bool {
        matches!(self, Self::Socket(SocketError::NobodyListens(_) | SocketError::NobodyConnects(_)))
    }
}

/// Connects, waiting for the other end if it is not there yet and `wait` says so. Anything else
/// that stands in the way is told at once.
pub fn connect(to: &Connect, wait: Option<&dyn Fn() -> bool>) -> Result<Guest, ConnectError> {
    let mut listener = None;
    let mut told = false;
    loop {
        let error = match try_once(to, &mut listener) {
            Ok(guest) => return Ok(guest),
            Err(error) => error,
        };
        if !error.is_absence() || !wait.is_some_and(|go_on| go_on()) {
            return Err(error);
        }
        if !std::mem::replace(&mut told, true) {
            tracing::info!("waiting for the switch at {}", to.target);
        }
        if listener.is_none() {
            std::thread::sleep(RETRY_EVERY);
        }
    }
}

/// One attempt; a listener made for it is kept for the next.
fn try_once(to: &Connect, listener: &mut Option<sys::Listener>) -> Result<Guest, ConnectError> {
    let stream = match &to.target {
        Target::VhostUser { socket, role: Role::Client } => sys::connect(socket)?,
        Target::VhostUser { socket, role: Role::Server } => {
            let listener = match listener {
                Some(listener) => listener,
                None => listener.insert(sys::Listener::bind(socket)?),
            };
            listener.accept_within(RETRY_EVERY)?
        }
    };
    Ok(vhost_user(stream, to)?)
}

fn vhost_user(stream: UnixStream, to: &Connect) -> Result<Guest, FrontendError> {
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
    let tx = Ring::virtio(queues.remove(1), Arc::clone(&memory), tx_buffers);
    let rx_buffers = buffers(base + size * tx_stride, rx_stride);
    let rx = Ring::virtio(queues.remove(0), memory, rx_buffers);
    Ok(Guest::new(Link::VhostUser(frontend), tx, rx, &settings))
}
