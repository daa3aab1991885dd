//! Connection of our own guest: target, options, and the link itself.

use std::fmt;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::near::did_you_mean;
use os::{Carries, SocketError};
use switch::poll::{Costs, Policy};
use switch::vnet::Offloads;
use vhost_user::feature;
use vhost_user::frontend::{Frontend, FrontendError, PROTOCOL_FEATURES, Params, Queue};
use xen_netif::front::Agreed;

use crate::guest::Guest;
use crate::ring::{Buffers, FRAME_MAX, HDR_LEN, Ring};
use crate::settings::{RX_BUFFER, Setting, Settings, Suppress};
use crate::xen::{self, XenError, XenLink};

/// Size of a transmit buffer: a 64 KiB GSO frame with its headers, page aligned.
const TX_BUFFER: u64 = 17 * 4096;
/// Size of both for many guests with little traffic.
const SMALL_BUFFER: u64 = 2048;
/// Time between two attempts while the other end is absent.
const RETRY_EVERY: Duration = Duration::from_millis(100);
/// Longest wait for the back-end to answer.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Syntax of `--connect`, for messages.
const FORMS: &str = "vhost-user:SOCKET[,mode=client|server], or xen-local:DIR or xen:DEVID, both \
                     with [,split=on|off][,smart-poll=on|off][,static=on|off][,hash=on|off]\
                     [,multicast=MAC+MAC...]";
/// Minimum and maximum buffers of a Xen ring: it has 256 slots, and the longest frame takes 18.
const XEN_SIZES: RangeInclusive<u16> = 20..=256;
/// The poll policy with smart poll, unless another is requested.
const SMART_POLL: Policy = Policy::Timer { hz: 1000 };

/// Target and options of a connection, in the operator's syntax.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// `KIND:ARG[,key=value]...`
    pub connect: String,
    /// Queue pairs, 1 to 16.
    pub queues: u16,
    /// Ring size.
    pub queue_size: u16,
    /// The packed ring.
    pub packed: bool,
    /// In-order use.
    pub in_order: bool,
    /// Poll policy of the receive ring; `None`: the default of the target.
    pub poll: Option<Policy>,
    /// Policy of notifications of transmitted frames.
    pub kick: Policy,
    /// Driver settings; the last one of a key applies.
    pub set: Vec<Setting>,
    /// Measures the costs of sleeping on this machine; called if a queue pair uses `adaptive`.
    pub costs: fn() -> Costs,
}

/// Target and options of a connection, checked.
#[derive(Clone, Debug)]
pub struct Connect {
    /// Socket or directory to connect to.
    pub target: Target,
    /// Queue pairs.
    pub queues: u16,
    /// Ring size.
    pub queue_size: u16,
    /// Features to accept if offered.
    pub features: u64,
    /// Settings of the driver half.
    pub settings: Settings,
    /// Size of a virtio ring's buffers: (transmit, receive).
    buffers: (u64, u64),
    /// Longest frame that will be sent.
    frame_max: u32,
    /// The poll policy if smart poll is not negotiated.
    poll_plain: Policy,
    /// Measures the costs of sleeping.
    pub(crate) costs: fn() -> Costs,
}

/// Port that a guest connects to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A vhost-user socket.
    VhostUser {
        /// Its path.
        socket: PathBuf,
        /// Whether the guest listens and the switch connects.
        listens: bool,
    },
    /// A vif.
    Xen(xen::Target),
}

impl Target {
    /// Path of its socket or directory, if any.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::VhostUser { socket, .. } => Some(socket),
            Self::Xen(target) => match &target.vif {
                xen::Vif::Local(dir) => Some(dir),
                xen::Vif::Device(_) => None,
            },
        }
    }

    /// Returns the same kind of target with another path.
    fn at(&self, path: PathBuf) -> Self {
        match self {
            Self::VhostUser { listens, .. } => Self::VhostUser { socket: path, listens: *listens },
            Self::Xen(target) => {
                Self::Xen(xen::Target { vif: xen::Vif::Local(path), ..target.clone() })
            }
        }
    }
}

/// For messages.
impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::VhostUser { socket, .. } => write!(f, "{}", socket.display()),
            Self::Xen(target) => target.fmt(f),
        }
    }
}

impl Connect {
    /// Returns the same settings with another path of the target.
    pub fn at(&self, path: PathBuf) -> Self {
        Self { target: self.target.at(path), ..self.clone() }
    }

    /// Uses small buffers, for a process with many guests.
    pub fn small(self) -> Self {
        let frame_max = SMALL_BUFFER as u32 - HDR_LEN as u32;
        Self { buffers: (SMALL_BUFFER, SMALL_BUFFER), frame_max, ..self }
    }

    /// Whether its rings are virtqueues.
    pub fn is_virtio(&self) -> bool {
        matches!(self.target, Target::VhostUser { .. })
    }

    /// Sizes buffers for frames of at most `len` bytes: more fit a ring where each page of a buffer
    /// takes a slot.
    pub fn frames_up_to(self, len: u32) -> Self {
        Self { frame_max: len, ..self }
    }
}

impl TryFrom<&ConnectOptions> for Connect {
    type Error = String;

    fn try_from(args: &ConnectOptions) -> Result<Self, String> {
        let (kind, rest) = args.connect.split_once(':').unwrap_or((&args.connect, ""));
        let named = |error: String| format!("--connect {}: {error}", args.connect);
        let target = match kind {
            "vhost-user" => vhost_user_target(rest).map_err(named)?,
            "xen-local" => Target::Xen(xen::Target::parse(rest, false).map_err(named)?),
            "xen" => Target::Xen(xen::Target::parse(rest, true).map_err(named)?),
            _ => {
                let hint = did_you_mean(kind, ["vhost-user", "xen-local", "xen"]);
                let what = format!("unknown kind '{kind}'{hint}; use {FORMS}");
                return Err(named(what));
            }
        };
        let poll_plain = args.poll.unwrap_or(Policy::ADAPTIVE);
        let poll = match &target {
            Target::Xen(target) if target.smart_poll => args.poll.unwrap_or(SMART_POLL),
            _ => poll_plain,
        };
        let settings = Settings::new(poll, args.kick, &args.set);
        settings.poll_one.check("--set poll", args.queues)?;
        settings.kick_one.check("--set kick", args.queues)?;
        match &target {
            Target::VhostUser { .. } => check_virtio(args, &settings)?,
            Target::Xen(_) => check_xen(args, &settings)?,
        }
        let mut features = feature::BASE;
        for (bit, on) in [
            (feature::RING_PACKED, args.packed),
            (feature::IN_ORDER, args.in_order),
            (feature::EVENT_IDX, settings.suppress == Suppress::EventIndex),
            (feature::INDIRECT_DESC, settings.indirect),
        ] {
            if !on {
                features &= !bit;
            }
        }
        let (buffers, frame_max) = ((TX_BUFFER, settings.rx_buffer.into()), FRAME_MAX);
        let (queues, queue_size) = (args.queues, args.queue_size);
        Ok(Self {
            target,
            queues,
            queue_size,
            features,
            settings,
            buffers,
            frame_max,
            poll_plain,
            costs: args.costs,
        })
    }
}

fn vhost_user_target(rest: &str) -> Result<Target, String> {
    let (socket, options) = rest.split_once(',').unwrap_or((rest, "mode=client"));
    let listens = match options {
        "mode=client" => false,
        "mode=server" => true,
        _ => return Err(format!("use {FORMS}")),
    };
    if socket.is_empty() || socket.len() > 107 {
        return Err(format!("use {FORMS}"));
    }
    Ok(Target::VhostUser { socket: socket.into(), listens })
}

fn check_virtio(args: &ConnectOptions, settings: &Settings) -> Result<(), String> {
    let size = args.queue_size;
    if size == 0 || size > 32768 || (!args.packed && !size.is_power_of_two()) {
        return Err(format!("--queue-size {size}: use 1 to 32768, a power of two unless --packed"));
    }
    if settings.apart && size < 2 {
        return Err("--queue-size 1: header=apart needs 2 descriptors per frame".into());
    }
    Ok(())
}

/// Rejects settings that only virtqueues have: a measurement must not list unused settings.
fn check_xen(args: &ConnectOptions, settings: &Settings) -> Result<(), String> {
    let size = args.queue_size;
    if !XEN_SIZES.contains(&size) {
        let (least, most) = (XEN_SIZES.start(), XEN_SIZES.end());
        return Err(format!("--queue-size {size}: use {least} to {most} with Xen rings"));
    }
    for (what, set) in [
        ("--packed", args.packed),
        ("--in-order", args.in_order),
        ("--set tx-full=queue", settings.full.queue() > 0),
        ("--set header=apart", settings.apart),
        ("--set suppress=flags", settings.suppress == Suppress::Flags),
        ("--set indirect=off", !settings.indirect),
        ("--set checks=off", !settings.checks),
        ("--set rx-buffer", settings.rx_buffer != RX_BUFFER),
    ] {
        if set {
            return Err(format!("{what}: not supported by Xen rings; omit it"));
        }
    }
    Ok(())
}

/// A guest's connection to the switch.
pub enum Link {
    /// A vhost-user socket.
    VhostUser(Frontend),
    /// A vif's handshake.
    Xen(Box<XenLink>),
}

impl Link {
    /// Whether the switch has gone.
    pub fn is_gone(&mut self) -> bool {
        match self {
            // The back-end sends no unsolicited messages.
            Self::VhostUser(frontend) => {
                os::wait_readable(frontend.as_fd(), Duration::ZERO).unwrap_or(true)
            }
            Self::Xen(link) => link.is_gone(),
        }
    }

    /// Whether there is a carrier; a vhost-user link always has one while it is connected.
    pub fn carrier(&self) -> bool {
        match self {
            Self::VhostUser(_) => true,
            Self::Xen(link) => link.carrier(),
        }
    }

    /// The MTU set for it, if any.
    pub fn mtu(&self) -> Option<u16> {
        match self {
            Self::VhostUser(_) => None,
            Self::Xen(link) => link.mtu(),
        }
    }

    /// Offloads that the switch does for frames from this guest.
    pub fn tx_offloads(&self) -> Offloads {
        match self {
            Self::VhostUser(frontend) => vhost_user::net::sends(frontend.features()),
            Self::Xen(link) => link.agreed().map(Agreed::offloads).unwrap_or_default(),
        }
    }

    /// Whether smart poll was negotiated.
    pub fn has_smart_poll(&self) -> bool {
        match self {
            Self::VhostUser(_) => false,
            Self::Xen(link) => link.agreed().is_some_and(|agreed| agreed.smart_poll),
        }
    }

    /// Names of the negotiated features.
    pub fn features(&self) -> Vec<&'static str> {
        match self {
            Self::VhostUser(frontend) => feature::names(frontend.features()),
            Self::Xen(link) => link.names(),
        }
    }

    /// Pages that the switch keeps mapped, and number of refused requests.
    pub fn static_grants(&self) -> (usize, u64) {
        match self {
            Self::VhostUser(_) => (0, 0),
            Self::Xen(link) => (link.kept().grants, link.kept().refusals),
        }
    }
}

/// Readable when [`Link::is_gone`] must be called.
impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::VhostUser(frontend) => frontend.as_fd(),
            Self::Xen(link) => link.as_fd(),
        }
    }
}

/// Failure to connect.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The socket cannot be used.
    #[error("{}{}", .0, vhost_user::advice(.0))]
    Socket(#[from] SocketError),
    /// The vhost-user handshake failed.
    #[error(transparent)]
    Frontend(#[from] FrontendError),
    /// The vif cannot be used.
    #[error(transparent)]
    Xen(#[from] XenError),
}

impl ConnectError {
    /// Whether the other end is only absent.
    fn is_peer_absent(&self) -> bool {
        match self {
            Self::Socket(error) => {
                matches!(error, SocketError::NoListener(_) | SocketError::NoPeer(_))
            }
            Self::Frontend(_) => false,
            Self::Xen(error) => error.is_peer_absent(),
        }
    }
}

/// Resources of an attempt that the next one reuses.
enum Retained {
    Listener(os::Listener),
    Vif(Box<XenLink>),
}

/// Connects; waits for an absent other end while `wait` returns true.
///
/// # Errors
/// The other end is absent and `wait` ended or is `None`, or any other failure, at once.
pub fn connect(to: &Connect, wait: Option<&dyn Fn() -> bool>) -> Result<Guest, ConnectError> {
    let mut kept = None;
    let mut logged = false;
    loop {
        let error = match try_once(to, &mut kept) {
            Ok(guest) => return Ok(guest),
            Err(error) => error,
        };
        if !error.is_peer_absent() || !wait.is_some_and(|keep_running| keep_running()) {
            return Err(error);
        }
        if !std::mem::replace(&mut logged, true) {
            tracing::info!("waiting for the switch at {}: {error}", to.target);
        }
        if kept.is_none() {
            std::thread::sleep(RETRY_EVERY);
        }
    }
}

/// One attempt.
fn try_once(to: &Connect, kept: &mut Option<Retained>) -> Result<Guest, ConnectError> {
    let stream = match &to.target {
        Target::VhostUser { socket, listens: false } => {
            os::connect(socket, Carries::Stream)?.into()
        }
        Target::VhostUser { socket, listens: true } => {
            let listener = match kept.take() {
                Some(Retained::Listener(listener)) => listener,
                _ => os::Listener::bind(socket, Carries::Stream, &os::Permissions::OWNER)?,
            };
            let accepted = listener.accept_within(RETRY_EVERY);
            *kept = Some(Retained::Listener(listener));
            accepted?.into()
        }
        Target::Xen(target) => return Ok(xen(target, to, kept)?),
    };
    Ok(vhost_user(stream, to)?)
}

fn xen(target: &xen::Target, to: &Connect, kept: &mut Option<Retained>) -> Result<Guest, XenError> {
    let sizes = xen::sizes(to.queue_size, to.frame_max, &to.settings);
    let mut link = match kept.take() {
        Some(Retained::Vif(link)) => link,
        _ => Box::new(XenLink::begin(target, to.queues, sizes)?),
    };
    match link.within(RETRY_EVERY) {
        Ok(queues) => {
            let rings = |queue| xen::rings(queue, sizes, &to.settings);
            let rings = queues.into_iter().map(rings).collect();
            let smart = link.agreed().is_some_and(|agreed| agreed.smart_poll);
            let poll = if smart { to.settings.poll } else { to.poll_plain };
            let settings = Settings { poll, ..to.settings };
            let mut guest = Guest::new(Link::Xen(link), rings, &settings, to.costs);
            guest.send_groups()?;
            Ok(guest)
        }
        Err(error) => {
            if error.is_peer_absent() {
                *kept = Some(Retained::Vif(link));
            }
            Err(error)
        }
    }
}

fn vhost_user(stream: UnixStream, to: &Connect) -> Result<Guest, FrontendError> {
    let Connect { settings, buffers: (tx_stride, rx_stride), .. } = *to;
    let (size, queued) = (u64::from(to.queue_size), u64::from(settings.full.queue()));
    let params = Params {
        features: to.features,
        protocol_features: PROTOCOL_FEATURES,
        pairs: to.queues,
        queue_size: to.queue_size,
        base: None,
        indirect_entries: if settings.apart && settings.indirect { 2 } else { 0 },
        buffer_bytes: u64::from(to.queues) * ((size + queued) * tx_stride + size * rx_stride),
        timeout: TIMEOUT,
    };
    let (frontend, queues) = Frontend::start(stream, &params)?;
    let memory = frontend.memory();
    let two = settings.apart && frontend.features() & feature::INDIRECT_DESC == 0;
    let count = if two { to.queue_size / 2 } else { to.queue_size };
    let Settings { apart, offset, checks, .. } = settings;
    let mut base = frontend.buffers().start;
    let mut ring = |mut queue: Queue, stride, more: u16| {
        if !checks {
            queue.driver.trust_device();
        }
        let buffers = Buffers { base, stride, count: count + more, apart, offset };
        base += (size + u64::from(more)) * stride;
        Ring::virtio(queue, Arc::clone(memory), buffers)
    };
    let mut rings = Vec::new();
    let mut queues = queues.into_iter();
    while let (Some(rx), Some(tx)) = (queues.next(), queues.next()) {
        let tx = ring(tx, tx_stride, settings.full.queue());
        rings.push((tx, ring(rx, rx_stride, 0)));
    }
    Ok(Guest::new(Link::VhostUser(frontend), rings, &settings, to.costs))
}
