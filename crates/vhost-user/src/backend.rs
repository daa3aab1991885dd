//! The back-end's side of the protocol: messages in, calls to a [`Device`] and replies out.
//!
//! It has no socket and no clock: [`Backend::handle`] is called by
//! [`Connection`](crate::connection), by tests and by the fuzzer. It stores the front-end's
//! settings of each ring and starts a ring when size, address, base, kick and memory are all known.
//! (The specification starts it at the first kick; a ring without work does nothing, so the
//! difference is not visible.)

mod handover;
mod ledgers;
mod log;
mod memory;
mod vring;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use shm::{GuestMemory, MarkAll};
use switch::account::Account;

use crate::device::{BackendRequests, Device};
use crate::error::ProtocolError;
use crate::feature;
use crate::foreign::ForeignFd;
use crate::message::{
    CONFIG_MAX, ConfigWindow, FrontendReq, Message, ProtocolFeatures, VringAddr, VringState,
    parse_u64,
};
use ledgers::Ledgers;
use log::Log;
use os::FdKind;
use vring::{Vring, name};

pub use handover::{BackendState, Descriptors, Exported, ImportError, export_fd};
pub use memory::SLOTS_MAX;

/// Protocol features that are implemented.
pub const PROTOCOL_FEATURES: ProtocolFeatures = ProtocolFeatures::MQ
    .union(ProtocolFeatures::LOG_SHMFD)
    .union(ProtocolFeatures::RARP)
    .union(ProtocolFeatures::REPLY_ACK)
    .union(ProtocolFeatures::MTU)
    .union(ProtocolFeatures::BACKEND_REQ)
    .union(ProtocolFeatures::CONFIG)
    .union(ProtocolFeatures::RESET_DEVICE)
    .union(ProtocolFeatures::INBAND_NOTIFICATIONS)
    .union(ProtocolFeatures::CONFIGURE_MEM_SLOTS)
    .union(ProtocolFeatures::STATUS);

/// Protocol features that in-band notifications require.
const INBAND_NEEDS: ProtocolFeatures =
    ProtocolFeatures::BACKEND_REQ.union(ProtocolFeatures::REPLY_ACK);

/// Feature bits that belong to the protocol, not to the device.
const OURS: u64 = feature::PROTOCOL_FEATURES | feature::LOG_ALL;

/// Settings of a back-end.
#[derive(Clone, Debug)]
pub struct Options {
    /// Protocol features to offer; some of [`PROTOCOL_FEATURES`].
    pub protocol_features: ProtocolFeatures,
    /// Account charged for the front-end's use of resources.
    pub account: Arc<Account>,
}

/// Permissions that an operator gives a front-end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// Memory in any file, also on a file system whose server can block us; otherwise only memfds
    /// and files on tmpfs and hugetlbfs.
    pub any_memory: bool,
    /// Rings without a kick descriptor, which are polled permanently.
    pub polled: bool,
}

impl Default for Permissions {
    fn default() -> Self {
        Self { any_memory: false, polled: true }
    }
}

/// Result of a message.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Reply to send.
    pub reply: Option<Message>,
    /// Error of a message that was refused without closing the connection, for the log.
    pub refused: Option<ProtocolError>,
}

/// Reply to a message that succeeded.
enum Answer {
    Done,
    Payload(Vec<u8>),
}

use Answer::{Done, Payload};

type Handled = Result<Answer, ProtocolError>;

/// Protocol state of one connection.
pub struct Backend {
    device: Box<dyn Device>,
    account: Arc<Account>,
    permissions: Permissions,
    offered: ProtocolFeatures,
    /// Acknowledged, those of the protocol included.
    features: u64,
    protocol: ProtocolFeatures,
    slots: Vec<memory::Slot>,
    memory: Arc<GuestMemory>,
    log: Option<Log>,
    /// Pages to be marked in the log, all of them.
    marking: Option<MarkAll>,
    rings: Vec<Vring>,
    requests: Option<Arc<BackendRequests>>,
    status: u8,
    /// MTU that the front-end set.
    mtu: Option<u16>,
    /// Progress of packed rings, for a successor.
    ledgers: Option<Ledgers>,
    /// Whether there are to be any.
    keeps: bool,
}

impl Backend {
    /// Creates the state of a new connection.
    pub fn new(device: Box<dyn Device>, options: Options) -> Self {
        // One more than there are data rings: a front-end may register the control queue's vring
        // too (User-Mode Linux does). It is stored and never served.
        let rings = (0..=device.queues_max()).map(|_| Vring::default()).collect();
        Self {
            device,
            account: options.account,
            permissions: Permissions::default(),
            offered: options.protocol_features & PROTOCOL_FEATURES,
            features: 0,
            protocol: ProtocolFeatures::empty(),
            slots: Vec::new(),
            memory: Arc::new(GuestMemory::default()),
            log: None,
            marking: None,
            rings,
            requests: None,
            status: 0,
            mtu: None,
            ledgers: None,
            keeps: false,
        }
    }

    /// Sets the front-end's permissions, if not the default.
    #[must_use]
    pub fn with_permissions(self, permissions: Permissions) -> Self {
        Self { permissions, ..self }
    }

    /// Ends the connection's state: stops every ring, resets the device, and returns it.
    pub fn close(mut self) -> Box<dyn Device> {
        self.reset();
        self.device
    }

    /// Account charged for the front-end's use of resources.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// The device.
    pub fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// Feature bits acknowledged, without those of the protocol.
    pub fn features(&self) -> u64 {
        self.features & !OURS
    }

    /// Whether writes to the guest's memory are logged, because it migrates.
    pub fn is_logging(&self) -> bool {
        self.logs_all() && self.log.is_some()
    }

    /// Protocol features negotiated.
    pub fn protocol_features(&self) -> ProtocolFeatures {
        self.protocol
    }

    /// The back-end request channel, once the front-end has sent one.
    pub fn requests(&self) -> Option<&Arc<BackendRequests>> {
        self.requests.as_ref()
    }

    /// Handles one message and its descriptors.
    ///
    /// # Errors
    /// [`ProtocolError`] if the connection must be closed. A fault that can be returned to the
    /// front-end (REPLY_ACK and need_reply) is an [`Outcome`] with `refused`.
    pub fn handle(
        &mut self,
        message: &Message,
        fds: Vec<ForeignFd>,
    ) -> Result<Outcome, ProtocolError> {
        while self.mark_more() {}
        let request = FrontendReq::try_from(message.request).ok();
        let handled = match request {
            Some(request) => self.dispatch(request, &message.payload, fds),
            None => Err(ProtocolError::UnknownRequest(message.request)),
        };
        // After the message, because User-Mode Linux requests an acknowledgement of the
        // SET_PROTOCOL_FEATURES that negotiates it.
        let acked = message.needs_reply() && self.protocol.contains(ProtocolFeatures::REPLY_ACK);
        let reply = |payload| Some(Message::reply(message.request, payload));
        let ack = |value: u64| reply(value.to_ne_bytes().to_vec()).filter(|_| acked);
        match handled {
            Ok(Payload(payload)) => Ok(Outcome { reply: reply(payload), refused: None }),
            Ok(Done) => Ok(Outcome { reply: ack(0), refused: None }),
            Err(error) if request == Some(FrontendReq::GET_CONFIG) => {
                // "uses zero length of payload to indicate an error" (GET_CONFIG).
                Ok(Outcome { reply: reply(Vec::new()), refused: Some(error) })
            }
            Err(error) if error.is_harmless() => {
                Ok(Outcome { reply: ack(1), refused: Some(error) })
            }
            // A number in place of a reply body would be interpreted as the body.
            Err(error) if acked && !error.is_fatal() && !request.is_some_and(has_body) => {
                Ok(Outcome { reply: ack(1), refused: Some(error) })
            }
            Err(error) => Err(error),
        }
    }

    fn dispatch(&mut self, request: FrontendReq, payload: &[u8], fds: Vec<ForeignFd>) -> Handled {
        use FrontendReq as R;
        if let Some(needs) = needs(request) {
            self.require(request, needs)?;
        }
        match request {
            R::SET_MEM_TABLE => return self.set_mem_table(payload, fds),
            R::ADD_MEM_REG => return self.add_mem_reg(payload, fds),
            R::REM_MEM_REG => return self.rem_mem_reg(payload, fds),
            R::SET_VRING_KICK | R::SET_VRING_CALL | R::SET_VRING_ERR => {
                return self.set_vring_fd(request, payload, fds);
            }
            R::SET_BACKEND_REQ_FD => {
                return self.set_requests(one_fd(request, fds)?);
            }
            R::SET_LOG_BASE => return self.set_log_base(payload, fds),
            R::SET_LOG_FD => return self.set_log_fd(fds),
            _ => no_fd(request, &fds)?,
        }
        match request {
            R::GET_FEATURES
            | R::SET_FEATURES
            | R::SET_OWNER
            | R::RESET_OWNER
            | R::GET_PROTOCOL_FEATURES
            | R::SET_PROTOCOL_FEATURES
            | R::GET_QUEUE_NUM
            | R::GET_MAX_MEM_SLOTS => self.negotiation(request, payload),
            R::SET_VRING_NUM
            | R::SET_VRING_BASE
            | R::GET_VRING_BASE
            | R::SET_VRING_ENABLE
            | R::VRING_KICK => self.vring(request, state(request, payload)?),
            R::SET_VRING_ADDR => {
                let addr = VringAddr::parse(payload);
                self.set_vring_addr(addr.ok_or_else(|| short(request, payload))?)
            }
            _ => self.net(request, payload),
        }
    }

    /// Handles session and feature messages.
    fn negotiation(&mut self, request: FrontendReq, payload: &[u8]) -> Handled {
        use FrontendReq as R;
        let answer = |value: u64| Ok(Payload(value.to_ne_bytes().to_vec()));
        match request {
            R::GET_FEATURES => answer(self.offered_features()),
            R::GET_PROTOCOL_FEATURES => answer(self.offered.bits()),
            // Virtqueues, as rust-vmm's front-ends compare it with; QEMU does with pairs, and
            // DPDK's back-end has a constant that exceeds both (note 0007).
            R::GET_QUEUE_NUM => answer(u64::from(self.device.queues_max())),
            R::GET_MAX_MEM_SLOTS => answer(SLOTS_MAX as u64),
            R::SET_FEATURES => self.set_features(number(request, payload)?),
            R::SET_PROTOCOL_FEATURES => self.set_protocol_features(number(request, payload)?),
            // "It is recommended that back-ends either ignore this message, or use it to disable
            // all rings." (RESET_OWNER)
            R::RESET_OWNER => {
                (0..self.rings.len()).for_each(|ring| self.enable(ring, false));
                Ok(Done)
            }
            _ => Ok(Done),
        }
    }

    fn offered_features(&self) -> u64 {
        self.device.features() | OURS
    }

    fn set_features(&mut self, acked: u64) -> Handled {
        let extra = acked & !self.offered_features();
        if extra != 0 {
            return Err(ProtocolError::Features { extra });
        }
        let ended = self.logs_all() && acked & feature::LOG_ALL == 0;
        self.features = acked;
        if ended {
            self.refresh_log_age();
        }
        self.device.set_features(acked & !OURS);
        self.refresh_enabled();
        self.refresh_log_all();
        Ok(Done)
    }

    fn set_protocol_features(&mut self, bits: u64) -> Handled {
        let acked = ProtocolFeatures::from_bits_retain(bits);
        let extra = acked.difference(self.offered).bits();
        if extra != 0 {
            return Err(ProtocolError::ProtocolFeatures { extra });
        }
        //= vhost-user.rst In-band notifications: the back-end should close the connection as a
        //= response to a message that sets the in-band notifications feature flag without the
        //= other two.
        if acked.contains(ProtocolFeatures::INBAND_NOTIFICATIONS) && !acked.contains(INBAND_NEEDS) {
            return Err(ProtocolError::InBand);
        }
        self.protocol = acked;
        Ok(Done)
    }

    fn set_requests(&mut self, fd: ForeignFd) -> Handled {
        if !matches!(fd.kind(), FdKind::UnixStream | FdKind::Pipe) {
            let (kind, want) = (fd.kind(), "use a Unix stream socket");
            let request = FrontendReq::SET_BACKEND_REQ_FD;
            return Err(ProtocolError::FdKind { request, kind, want });
        }
        self.requests = Some(Arc::new(BackendRequests::new(fd)));
        self.refresh_calls();
        Ok(Done)
    }

    fn set_mtu(&mut self, mtu: u16) -> Handled {
        let set = self.device.set_mtu(mtu);
        set.map_err(|why| ProtocolError::Mtu { mtu: mtu.into(), why })?;
        self.mtu = Some(mtu);
        Ok(Done)
    }

    /// Handles messages about the device as a whole.
    fn net(&mut self, request: FrontendReq, payload: &[u8]) -> Handled {
        use FrontendReq as R;
        match request {
            R::SEND_RARP => {
                let mac = payload.first_chunk().ok_or_else(|| short(request, payload))?;
                self.device.send_rarp(*mac);
                Ok(Done)
            }
            R::NET_SET_MTU => {
                let mtu = number(request, payload)?;
                self.set_mtu(u16::try_from(mtu).map_err(|_| bad_value(request, mtu))?)
            }
            R::GET_CONFIG => self.get_config(payload),
            R::SET_CONFIG => Err(ProtocolError::ConfigReadOnly),
            R::RESET_DEVICE => {
                self.reset();
                Ok(Done)
            }
            R::GET_STATUS => Ok(Payload(u64::from(self.status).to_ne_bytes().to_vec())),
            R::SET_STATUS => {
                let value = number(request, payload)?;
                let status = u8::try_from(value).map_err(|_| bad_value(request, value))?;
                if status == 0 {
                    self.reset();
                }
                self.status = status;
                Ok(Done)
            }
            _ => Err(ProtocolError::NotOffered(request)),
        }
    }

    fn get_config(&self, payload: &[u8]) -> Handled {
        let request = FrontendReq::GET_CONFIG;
        let window = ConfigWindow::parse(payload).ok_or_else(|| short(request, payload))?;
        let end = u64::from(window.offset) + u64::from(window.size);
        if window.size == 0 || end > CONFIG_MAX as u64 {
            return Err(bad_value(request, end));
        }
        let mut config = self.device.config();
        config.resize(CONFIG_MAX, 0);
        let bytes = config.drain(window.offset as usize..end as usize).collect();
        Ok(Payload(ConfigWindow { bytes, ..window }.to_bytes()))
    }

    /// Stops and disables every ring and resets the device. Memory, the call fds and the ownership
    /// stay ("The back-end retains ownership of the device throughout the reset operation").
    fn reset(&mut self) {
        for ring in 0..self.rings.len() {
            self.stop(ring);
            self.rings[ring].reset();
        }
        self.status = 0;
        self.mtu = None;
        self.features &= feature::PROTOCOL_FEATURES;
        self.refresh_log_age();
        self.device.reset();
    }

    fn require(&self, request: FrontendReq, needs: ProtocolFeatures) -> Result<(), ProtocolError> {
        if self.protocol.contains(needs) {
            return Ok(());
        }
        Err(ProtocolError::NotNegotiated { request, bit: needs.bits().trailing_zeros() })
    }

    fn in_band(&self) -> bool {
        self.protocol.contains(ProtocolFeatures::INBAND_NOTIFICATIONS)
    }
}

/// The protocol feature that a request belongs to.
fn needs(request: FrontendReq) -> Option<ProtocolFeatures> {
    use FrontendReq as R;
    Some(match request {
        R::GET_QUEUE_NUM => ProtocolFeatures::MQ,
        R::SET_LOG_BASE | R::SET_LOG_FD => ProtocolFeatures::LOG_SHMFD,
        R::SEND_RARP => ProtocolFeatures::RARP,
        R::NET_SET_MTU => ProtocolFeatures::MTU,
        R::SET_BACKEND_REQ_FD => ProtocolFeatures::BACKEND_REQ,
        R::GET_CONFIG | R::SET_CONFIG => ProtocolFeatures::CONFIG,
        R::RESET_DEVICE => ProtocolFeatures::RESET_DEVICE,
        R::VRING_KICK => ProtocolFeatures::INBAND_NOTIFICATIONS,
        R::GET_MAX_MEM_SLOTS | R::ADD_MEM_REG | R::REM_MEM_REG => {
            ProtocolFeatures::CONFIGURE_MEM_SLOTS
        }
        R::GET_STATUS | R::SET_STATUS => ProtocolFeatures::STATUS,
        _ => return None,
    })
}

/// Whether a request that we serve has a reply body of eight bytes.
fn has_body(request: FrontendReq) -> bool {
    use FrontendReq as R;
    matches!(
        request,
        R::GET_FEATURES
            | R::GET_PROTOCOL_FEATURES
            | R::GET_VRING_BASE
            | R::GET_QUEUE_NUM
            | R::GET_MAX_MEM_SLOTS
            | R::GET_STATUS
    )
}

fn short(request: FrontendReq, payload: &[u8]) -> ProtocolError {
    ProtocolError::Payload { request, got: payload.len() }
}

fn bad_value(request: FrontendReq, value: u64) -> ProtocolError {
    ProtocolError::Value { request, value }
}

fn number(request: FrontendReq, payload: &[u8]) -> Result<u64, ProtocolError> {
    parse_u64(payload).ok_or_else(|| short(request, payload))
}

fn state(request: FrontendReq, payload: &[u8]) -> Result<VringState, ProtocolError> {
    VringState::parse(payload).ok_or_else(|| short(request, payload))
}

fn no_fd(request: FrontendReq, fds: &[ForeignFd]) -> Result<(), ProtocolError> {
    if fds.is_empty() {
        return Ok(());
    }
    Err(ProtocolError::FdCount { request, want: 0, got: fds.len() })
}

fn one_fd(request: FrontendReq, fds: Vec<ForeignFd>) -> Result<ForeignFd, ProtocolError> {
    let [fd] = <[ForeignFd; 1]>::try_from(fds).map_err(|fds| ProtocolError::FdCount {
        request,
        want: 1,
        got: fds.len(),
    })?;
    Ok(fd)
}
