//! A guest's vif, with or without Xen: its connection, which is its xenstore handshake.
//!
//! The rings' halves are in `ring/xen.rs`. Dropping a link closes the vif and waits, up to a limit,
//! until the back end has unmapped the rings, so that grants are revoked and the port goes down.

mod groups;
#[cfg(test)]
mod tests;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use os::{SocketError, Until};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use xen_netif::back::{DomainStore, Failure, State, Tree};
use xen_netif::front::{
    Agreed, BACK, FrontOptions, FrontRings, Handshake, Kept, Queue, Sizes, Status,
};
use xen_netif::host::{self, Front, HostError};
use xen_netif::store::StoreError;

use self::groups::Groups;
use crate::ring::{Buffers, Channel, HDR_LEN, Half, Malformed, Ring, XenRx, XenTx};
use crate::settings::Settings;
use crate::tx::Tx;

/// Bytes of a page, and of a receive buffer.
const PAGE: u32 = 4096;
/// Pages of the largest buffer, with header and largest offset.
const PAGES_EACH_MAX: u32 = 17;
/// Longest wait for the back end at close.
const LEAVE_MAX: Duration = Duration::from_secs(2);
/// Longest wait for an answer about static grants, each way. Frames wait that long.
const KEEP_MAX: Duration = Duration::from_secs(5);
/// Folder in which the kernel lists vifs and their drivers.
const DEVICES: &str = "/sys/bus/xen/devices";

/// Token of the event that xenstore was connected again.
const RECONNECTED: &str = "reconnected";

/// Attempts to connect to xenstore again.
const RECONNECTS_MAX: u32 = 8;

/// Options of a target.
const OPTIONS: [&str; 5] = ["split", "smart-poll", "static", "hash", "multicast"];

/// Which vif.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vif {
    /// The one in this directory, without Xen.
    Local(PathBuf),
    /// A vif of this domain, by number.
    Device(u16),
}

/// A vif, and requested features.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The vif.
    pub vif: Vif,
    /// An event channel for each ring.
    pub split: bool,
    /// Smart poll.
    pub smart_poll: bool,
    /// Static grants.
    pub statics: bool,
    /// Received frames are distributed over the queues by a hash.
    pub hash: bool,
    /// Multicast groups to receive; empty: all.
    pub multicast: Vec<[u8; 6]>,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.vif {
            Vif::Local(dir) => write!(f, "xen-local:{}", dir.display()),
            Vif::Device(devid) => write!(f, "xen:{devid}"),
        }
    }
}

impl Target {
    /// Parses the rest of `--connect xen-local:` or, with `real`, `xen:`.
    pub fn parse(rest: &str, real: bool) -> Result<Self, String> {
        let mut parts = rest.split(',');
        let which = parts.next().unwrap_or_default();
        let vif = match which.parse() {
            Ok(devid) if real => Vif::Device(devid),
            _ if real => return Err(format!("'{which}' is not the number of a vif; use xen:0")),
            _ if which.is_empty() => return Err("use xen-local:DIR, a directory".into()),
            _ => Vif::Local(which.into()),
        };
        let (smart_poll, statics, hash) = (false, false, false);
        let multicast = Vec::new();
        let mut target = Self { vif, split: true, smart_poll, statics, hash, multicast };
        for option in parts {
            let (key, value) = option.split_once('=').unwrap_or((option, ""));
            let field = match key {
                "split" => &mut target.split,
                "smart-poll" => &mut target.smart_poll,
                "static" => &mut target.statics,
                "hash" => &mut target.hash,
                "multicast" => {
                    target.multicast = groups::parse(value)?;
                    continue;
                }
                _ => {
                    let hint = api::near::did_you_mean(key, OPTIONS);
                    let known = OPTIONS.join(", ");
                    return Err(format!("unknown option '{key}'{hint}; known: {known}"));
                }
            };
            *field = match value {
                "on" => true,
                "off" => false,
                _ => return Err(format!("{key}={value}: use {key}=on or {key}=off")),
            };
        }
        Ok(target)
    }
}

/// Failure to connect.
#[derive(Debug, thiserror::Error)]
pub enum XenError {
    /// The host returned an error.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The directory of a local vif cannot be used.
    #[error(transparent)]
    Local(#[from] xen_local::Error),
    /// The store returned an error.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The handshake failed.
    #[error("the vif's handshake failed: {0}")]
    Handshake(#[from] Failure),
    /// The switch violated the protocol of the control ring.
    #[error("the switch violated the protocol of the control ring: {0}; use static=off,hash=off")]
    Control(#[from] ring::xen::Malformed),
    /// The switch violated the protocol of a tx ring.
    #[error("the switch violated the ring protocol: {0}")]
    Ring(#[from] Malformed),
    /// The vif does not exist.
    #[error(
        "this domain has no vif {devid} (it has: {}); attach one (xl network-attach)",
        list(have)
    )]
    NoVif {
        /// The requested vif.
        devid: u16,
        /// Existing vifs.
        have: Vec<u16>,
    },
    /// Its keys are invalid.
    #[error("{key} is '{value}', not the number of a domain; was this vif created by a toolstack?")]
    BadKey {
        /// Which.
        key: String,
        /// Its value.
        value: String,
    },
    /// The vif is in use.
    #[error("vif {devid} is in use by {by}")]
    Claimed {
        /// Which.
        devid: u16,
        /// The user, and what to do.
        by: String,
    },
    /// Its back end has fewer queues than requested.
    #[error("{wanted} queues requested, the back end has {has}: request fewer (--queues {has})")]
    Queues {
        /// Requested.
        wanted: u16,
        /// Offered.
        has: u16,
    },
    /// Its back end does not answer yet.
    #[error("its back end {back} is in state {state}; is a switch running there that serves it?")]
    NotYet {
        /// The back end's directory.
        back: String,
        /// Its state.
        state: State,
    },
}

fn list(vifs: &[u16]) -> String {
    let vifs: Vec<_> = vifs.iter().map(u16::to_string).collect();
    if vifs.is_empty() { "none".into() } else { vifs.join(", ") }
}

impl XenError {
    /// Whether the other end is only absent.
    pub fn is_peer_absent(&self) -> bool {
        let is_absent =
            |e: &SocketError| matches!(e, SocketError::NoListener(_) | SocketError::NoDirectory(_));
        match self {
            Self::Local(xen_local::Error::Socket(e)) | Self::Store(StoreError::Socket(e)) => {
                is_absent(e)
            }
            Self::NoVif { .. } | Self::NotYet { .. } => true,
            _ => false,
        }
    }
}

/// The rings must not be used any more.
struct Lost;

/// A vif's connection, or an attempt.
pub struct XenLink {
    front: Arc<dyn Front>,
    handshake: Handshake<FrontRings>,
    store: DomainStore,
    /// Its directory.
    dir: String,
    agreed: Option<Agreed>,
    /// Number of queues requested.
    queues: u16,
    /// Static grants are requested.
    statics: bool,
    kept: Kept,
    /// A hash is requested.
    hash: bool,
    /// The back end accepted the hash.
    hashed: bool,
    groups: Groups,
    gone: bool,
    /// Dropped last.
    _claim: Option<OwnedFd>,
}

impl XenLink {
    /// Begins a handshake for this number of queues of `sizes`.
    pub fn begin(target: &Target, queues: u16, sizes: Sizes) -> Result<Self, XenError> {
        let (front, devid, claim): (Arc<dyn Front>, _, _) = match &target.vif {
            Vif::Local(dir) => (Arc::new(xen_local::Front::open(dir)?), 0, None),
            Vif::Device(devid) => {
                not_the_kernels(Path::new(DEVICES), *devid)?;
                (Arc::new(host::xen::Front::open()?), *devid, Some(claim(*devid)?))
            }
        };
        let dir = format!("device/vif/{devid}");
        let mut store = DomainStore::new(front.store()?)?;
        if store.read(&format!("{dir}/backend"))?.is_none() {
            return Err(XenError::NoVif { devid, have: front.store()?.vifs()? });
        }
        let key = format!("{dir}/backend-id");
        let value = store.read(&key)?.unwrap_or_default();
        let Ok(backend_domid) = value.trim().parse() else {
            return Err(XenError::BadKey { key, value });
        };
        let Target { split, smart_poll, statics, hash, .. } = *target;
        let groups = Groups::new(target);
        // Fewer queues than requested are an error: they would change what is measured. It is found
        // before rings are created, or the port would go up and down with each attempt.
        let (fewest, ctrl) = (queues, statics);
        let multicast = !groups.is_empty();
        let options = FrontOptions { queues, fewest, split, ctrl, smart_poll, hash, multicast };
        let rings = FrontRings::new(Arc::clone(&front), backend_domid, sizes);
        let handshake = Handshake::new(dir.clone(), options, rings);
        store.watch(&format!("{dir}/backend"), "front")?;
        let (agreed, kept) = (None, Kept::default());
        let hashed = false;
        Ok(Self {
            front,
            handshake,
            store,
            dir,
            agreed,
            queues,
            statics,
            kept,
            hash,
            hashed,
            groups,
            gone: false,
            _claim: claim,
        })
    }

    /// Waits for the back end, at most `limit`; may be called again.
    pub fn within(&mut self, limit: Duration) -> Result<Vec<Queue>, XenError> {
        let deadline = Instant::now() + limit;
        loop {
            let status = self.poll()?;
            if let Status::Few(has) = status {
                return Err(XenError::Queues { wanted: self.queues, has });
            }
            // Consumes the events that this check has covered.
            if status == Status::Up && !self.events()?.is_empty() {
                continue;
            }
            if status == Status::Up
                && let Some(queues) = self.handshake.rings().take()
            {
                self.agreed = self.handshake.agreed().copied();
                self.send_requests()?;
                return Ok(queues);
            }
            if !os::wait(self.store.as_fd(), Until::Readable, deadline).unwrap_or(false) {
                return Err(self.not_yet()?);
            }
            self.events()?;
        }
    }

    /// Takes the steps of the handshake that are due. If xenstore has disconnected, it continues
    /// with another connection: a switch without Xen has xenstore's, and may be another process.
    fn poll(&mut self) -> Result<Status, XenError> {
        let mut polled = self.handshake.poll(&mut self.store);
        for _ in 0..RECONNECTS_MAX {
            if polled.is_ok() || !self.store.is_gone() {
                break;
            }
            self.reconnect()?;
            polled = self.handshake.poll(&mut self.store);
        }
        Ok(polled?)
    }

    /// Events of xenstore, by their tokens. If it has disconnected, there is one.
    fn events(&mut self) -> Result<Vec<String>, XenError> {
        match self.store.events() {
            Err(_) if self.store.is_gone() => {
                self.reconnect()?;
                Ok(vec![RECONNECTED.into()])
            }
            events => Ok(events?),
        }
    }

    /// Connects to xenstore again. The next process may be replaced meanwhile, too.
    fn reconnect(&mut self) -> Result<(), XenError> {
        let mut store = self.store_again();
        for _ in 0..RECONNECTS_MAX {
            match &store {
                Err(XenError::Store(error)) if error.is_gone() => store = self.store_again(),
                _ => break,
            }
        }
        self.store = store?;
        self.handshake.forget_watches();
        Ok(())
    }

    fn store_again(&self) -> Result<DomainStore, XenError> {
        let mut store = DomainStore::new(self.front.store()?)?;
        // If this one is lost, so is the next request.
        let _ = store.watch(&format!("{}/backend", self.dir), "front");
        Ok(store)
    }

    /// Requests hash and static grants over the control ring; first withdraws grants that the back
    /// end may still keep. Stops at the first request without an answer. Makes the multicast list
    /// due.
    fn send_requests(&mut self) -> Result<(), XenError> {
        if self.agreed.is_some_and(|agreed| agreed.multicast) {
            self.groups.set_due();
        } else if !self.groups.is_empty() {
            tracing::info!("no multicast control: the back end has none; all multicast arrives");
        }
        let wanted = [(self.hash, "hash"), (self.statics, "static grants")];
        let wanted: Vec<_> = wanted.iter().filter(|(is, _)| *is).map(|(_, what)| *what).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let Some(ctrl) = self.handshake.rings().ctrl() else {
            tracing::info!("no {}: the back end has no control ring", wanted.join(", no "));
            return Ok(());
        };
        let mut answers = true;
        if self.hash {
            ctrl.hash();
            answers = ctrl.finish(KEEP_MAX)?;
            self.hashed = ctrl.is_hashed();
            if !self.hashed {
                let why = if answers { "refuses" } else { "did not reply in time" };
                tracing::info!("no hash: the back end {why}; it chooses queues itself");
            }
        }
        if self.statics && answers {
            self.keep_grants()?;
        }
        Ok(())
    }

    /// Requests that the back end keep our pages mapped; it copies other pages by grant.
    fn keep_grants(&mut self) -> Result<(), XenError> {
        let Some(ctrl) = self.handshake.rings().ctrl() else { return Ok(()) };
        let before = ctrl.kept().refusals;
        // Grants kept by an earlier back end, whether this one knows of them or not.
        ctrl.forget();
        let mut answered = ctrl.finish(KEEP_MAX)?;
        if answered {
            ctrl.keep();
            answered = ctrl.finish(KEEP_MAX)?;
        }
        self.kept = ctrl.kept();
        let Kept { grants, of, refusals } = self.kept;
        let why = match (answered, refusals - before) {
            (false, _) => "; it did not reply in time",
            (true, 0) => "",
            (true, _) => "; it refused more",
        };
        tracing::info!("static grants: the back end keeps {grants} of {of} pages mapped{why}");
        Ok(())
    }

    fn not_yet(&mut self) -> Result<XenError, XenError> {
        let back = self.store.read(&format!("{}/backend", self.dir))?.unwrap_or_default();
        let state = self.store.read(&format!("{back}/state"))?;
        let state = state.and_then(|state| State::parse(&state)).unwrap_or(State::Unknown);
        Ok(XenError::NotYet { back, state })
    }

    /// Sends the list of multicast groups on the first tx ring, if due: after the ring is in use,
    /// and after [`is_gone`](Self::is_gone) found a restarted back end.
    pub fn send_groups(&mut self, tx: &mut Tx) -> Result<(), Malformed> {
        self.groups.send(tx)
    }

    /// Negotiated features.
    pub fn agreed(&self) -> Option<&Agreed> {
        self.agreed.as_ref()
    }

    /// Names of negotiated features.
    pub fn names(&self) -> Vec<&'static str> {
        let mut names = self.agreed.as_ref().map(Agreed::names).unwrap_or_default();
        names.extend((self.kept.grants > 0).then_some("static-grants"));
        names.extend(self.hashed.then_some("hash"));
        names
    }

    /// The pages that the back end keeps mapped.
    pub fn kept(&self) -> Kept {
        self.kept
    }

    /// Whether there is a carrier, as of the last [`is_gone`](Self::is_gone).
    pub fn carrier(&self) -> bool {
        self.handshake.carrier()
    }

    /// The MTU set by the toolstack, if any.
    pub fn mtu(&self) -> Option<u16> {
        self.handshake.mtu()
    }

    /// Whether the back end is gone, closed, or reconnecting. A restarted one that continues with
    /// our rings gets the requests over the control ring again.
    pub fn is_gone(&mut self) -> bool {
        if !self.gone {
            self.gone = match self.events() {
                Ok(events) if events.is_empty() => false,
                Ok(events) => self.handle(&events).is_err(),
                Err(_) => true,
            };
        }
        self.gone
    }

    /// Handles events. `Err`: the rings must not be used any more.
    fn handle(&mut self, events: &[String]) -> Result<(), Lost> {
        let status = self.poll().map_err(|_| Lost)?;
        let reconnected = events.iter().any(|token| token == RECONNECTED);
        // The next back end of a kept switch may be in InitWait: it connects to the same rings.
        let continues = matches!(status, Status::Up | Status::Waiting);
        if self.handshake.rings().is_stopped() || reconnected && !continues {
            return Err(Lost);
        }
        // No state shows whether the back end is a new process: InitWait and Connected may arrive
        // as one event. So every Connected gets all requests.
        if status == Status::Up && events.iter().any(|token| token == BACK) {
            self.send_requests().map_err(|_| Lost)?;
        }
        Ok(())
    }

    /// Closes the vif; gives up if xenstore is lost or the back end does not close in time.
    fn close(&mut self) {
        // Without rings there is nothing to close: the vif stays unchanged for the next front end.
        if self.handshake.agreed().is_none() {
            return;
        }
        let deadline = Instant::now() + LEAVE_MAX;
        // The back end must unmap pages before they are freed. One that does not confirm that in
        // time, or answers with an error, unmaps them together with the rings.
        if self.kept != Kept::default()
            && !self.is_gone()
            && let Some(ctrl) = self.handshake.rings().ctrl()
        {
            ctrl.forget();
            let _ = ctrl.finish(KEEP_MAX);
        }
        self.handshake.leave();
        while let Ok(Status::Up | Status::Waiting) = self.poll()
            && os::wait(self.store.as_fd(), Until::Readable, deadline).unwrap_or(false)
            && self.events().is_ok()
        {}
    }
}

impl Drop for XenLink {
    fn drop(&mut self) {
        self.close();
    }
}

/// Readable when [`XenLink::is_gone`] must be called.
impl AsFd for XenLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.store.as_fd()
    }
}

/// The memory of a queue: `buffers` of each direction, for frames of at most `frame_max` bytes.
pub fn sizes(buffers: u16, frame_max: u32, settings: &Settings) -> Sizes {
    let longest = HDR_LEN as u32 + u32::from(settings.offset) + frame_max;
    let pages = longest.div_ceil(PAGE).clamp(1, PAGES_EACH_MAX);
    Sizes { tx_buffers: buffers, tx_pages_each: pages as u16, rx_pages: buffers }
}

/// Both rings of a queue: (transmit, receive).
pub fn rings(queue: Queue, sizes: Sizes, settings: &Settings) -> (Ring, Ring) {
    let buffers = |pages: u16, count, offset| Buffers {
        base: 0,
        stride: u64::from(pages) * u64::from(PAGE),
        count,
        apart: false,
        offset,
    };
    let tx_buffers = buffers(sizes.tx_pages_each, queue.tx_buffers, settings.offset);
    // The back end chooses the offset of a frame in its page.
    let rx_buffers = buffers(1, sizes.rx_pages, 0);
    let tx = Half::XenTx(XenTx { queue: queue.tx, channel: Channel::new(queue.tx_channel) });
    let rx = Half::XenRx(XenRx::new(queue.rx, Channel::new(queue.rx_channel)));
    (Ring::xen(tx, queue.tx_memory, tx_buffers), Ring::xen(rx, queue.rx_memory, rx_buffers))
}

/// Rejects a vif that a driver of the kernel uses.
fn not_the_kernels(devices: &Path, devid: u16) -> Result<(), XenError> {
    let driver = devices.join(format!("vif-{devid}")).join("driver");
    let Ok(driver) = std::fs::read_link(driver) else { return Ok(()) };
    let name = driver.file_name().unwrap_or(driver.as_os_str()).to_string_lossy();
    let by = format!(
        "this kernel's driver '{name}'; unbind it: echo vif-{devid} > \
         /sys/bus/xen/drivers/{name}/unbind"
    );
    Err(XenError::Claimed { devid, by })
}

/// Claims a vif for this process, by an abstract socket name that exists until the descriptor is
/// closed.
fn claim(devid: u16) -> Result<OwnedFd, XenError> {
    let os = |error: rustix::io::Errno| HostError::Os {
        at: format!("vif {devid}").into(),
        what: "claim",
        error: error.into(),
    };
    let name = SocketAddrUnix::new_abstract_name(format!("pvswitch-vif-{devid}").as_bytes());
    let (family, kind) = (AddressFamily::UNIX, SocketType::DGRAM);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).map_err(os)?;
    match rustix::net::bind(&socket, &name.map_err(os)?) {
        Ok(()) => Ok(socket),
        Err(rustix::io::Errno::ADDRINUSE) => {
            let by = "another pvswitch (nic or gen); stop it, or use another vif".into();
            Err(XenError::Claimed { devid, by })
        }
        Err(error) => Err(os(error).into()),
    }
}
