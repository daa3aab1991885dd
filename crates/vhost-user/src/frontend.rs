//! Front-end side: a NIC driver's connection to a vhost-user back-end.
//!
//! It blocks, with a time limit on every reply, because setup is not the fast path. Its "guest
//! memory" is one memfd:
//!
//! ```text
//!   GUEST_BASE                                                    GUEST_BASE + size
//!   ┌────────┬────────┬─────┬──────────────────┬──────────────────────────────────┐
//!   │ ring 0 │ ring 1 │ ... │ indirect tables  │ buffers, the caller's            │
//!   └────────┴────────┴─────┴──────────────────┴──────────────────────────────────┘
//! ```

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ring::virtq::{DriverQueue, IndirectPool, Layout, LayoutError};
use shm::{GuestMemory, MapError, Mapping, Region};

use crate::message::{
    ConfigWindow, FDS_MAX, FrontendReq, HEADER_LEN, Header, MemRegion, Message, PAYLOAD_MAX,
    ProtocolFeatures, VringAddr, VringState, parse_u64,
};
use crate::{feature, ring_features};
use os::Received;

/// First guest address. Not zero, so that an address used as an offset by mistake fails.
const GUEST_BASE: u64 = 0x1_0000_0000;
/// First address in the front-end's address space; differs from the guest's for the same reason.
const USER_BASE: u64 = 0x7f00_0000_0000;
/// Alignment of everything laid out in the memory: no two rings share a page.
const PAGE: u64 = 4096;

/// Protocol features used when the back-end offers them.
pub const PROTOCOL_FEATURES: ProtocolFeatures = ProtocolFeatures::MQ
    .union(ProtocolFeatures::REPLY_ACK)
    .union(ProtocolFeatures::MTU)
    .union(ProtocolFeatures::CONFIG)
    .union(ProtocolFeatures::RESET_DEVICE)
    .union(ProtocolFeatures::CONFIGURE_MEM_SLOTS)
    .union(ProtocolFeatures::STATUS);

/// Parameters of a front-end.
#[derive(Clone, Copy, Debug)]
pub struct Params {
    /// Feature bits to take if offered. VERSION_1 is always required, MQ for several pairs.
    pub features: u64,
    /// Protocol features to take if offered; see [`PROTOCOL_FEATURES`].
    pub protocol_features: ProtocolFeatures,
    /// Queue pairs.
    pub pairs: u16,
    /// Descriptors of each ring.
    pub queue_size: u16,
    /// Start position of the rings in the form of VRING_BASE; `None`: that of a fresh ring.
    pub base: Option<u32>,
    /// Descriptors of each indirect table; 0: none.
    pub indirect_entries: u16,
    /// Bytes of memory for the caller's buffers.
    pub buffer_bytes: u64,
    /// Longest wait for a reply.
    pub timeout: Duration,
}

/// Error of a front-end.
#[derive(Debug)]
pub enum FrontendError {
    /// The back-end closed the connection.
    Closed,
    /// The back-end did not reply in time.
    Timeout(FrontendReq),
    /// A malformed reply.
    BadReply {
        /// The request.
        request: FrontendReq,
        /// What is wrong with the reply.
        what: &'static str,
    },
    /// The back-end acknowledged with an error.
    Refused {
        /// The request it refused.
        request: FrontendReq,
        /// Its error number.
        value: u64,
    },
    /// The back-end does not offer features that are required.
    Lacks {
        /// The bits.
        features: u64,
    },
    /// The back-end has fewer queue pairs than wanted.
    Pairs {
        /// Pairs wanted.
        wanted: u16,
        /// Pairs it has.
        has: u64,
    },
    /// Our memory could not be allocated.
    Memory(MapError),
    /// Our rings could not be laid out: the queue size is invalid.
    Layout(LayoutError),
    /// A system call failed.
    Os(io::Error),
}

impl fmt::Display for FrontendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => write!(f, "the back-end closed the connection"),
            Self::Timeout(request) => {
                write!(f, "the back-end did not reply to {request:?} in time; is it running?")
            }
            Self::BadReply { request, what } => {
                write!(f, "malformed reply from the back-end to {request:?}: {what}")
            }
            Self::Refused { request, value } => {
                write!(f, "the back-end refused {request:?} (error {value})")
            }
            Self::Lacks { features } => write!(
                f,
                "the back-end does not offer features {features:#x}, without which this front-end \
                 cannot work"
            ),
            Self::Pairs { wanted, has } => {
                write!(f, "{wanted} queue pairs requested, the back-end has {has}: request fewer")
            }
            Self::Memory(error) => write!(f, "memory for the rings: {error}"),
            Self::Layout(error) => write!(f, "rings: {error}"),
            Self::Os(error) => write!(f, "the socket failed: {error}"),
        }
    }
}

impl std::error::Error for FrontendError {}

impl From<io::Error> for FrontendError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::Closed,
            _ => Self::Os(error),
        }
    }
}

impl From<LayoutError> for FrontendError {
    fn from(error: LayoutError) -> Self {
        Self::Layout(error)
    }
}

/// A connection to a back-end, with the negotiated features as its only state: one request at a
/// time.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    timeout: Duration,
    protocol: ProtocolFeatures,
}

impl Client {
    /// Creates a client on a stream just connected, or accepted from a back-end in client mode.
    pub fn new(stream: UnixStream, timeout: Duration) -> Self {
        Self { stream, timeout, protocol: ProtocolFeatures::empty() }
    }

    /// Sends a request without a reply body, with descriptors. With REPLY_ACK, waits until the
    /// back-end has completed it.
    ///
    /// # Errors
    /// [`FrontendError`]; without REPLY_ACK a refusal is detected only at a later request.
    pub fn set(
        &mut self,
        request: FrontendReq,
        payload: Vec<u8>,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), FrontendError> {
        let acked = self.protocol.contains(ProtocolFeatures::REPLY_ACK);
        self.send(&Message::request(request, payload, acked), fds)?;
        if !acked {
            return Ok(());
        }
        let reply = self.receive(request)?;
        match parse_u64(&reply) {
            Some(0) => Ok(()),
            Some(value) => Err(FrontendError::Refused { request, value }),
            None => Err(FrontendError::BadReply { request, what: "shorter than a number" }),
        }
    }

    /// Sends a request and waits for its reply body.
    ///
    /// # Errors
    /// [`FrontendError`].
    pub fn get(
        &mut self,
        request: FrontendReq,
        payload: Vec<u8>,
    ) -> Result<Vec<u8>, FrontendError> {
        self.send(&Message::request(request, payload, false), &[])?;
        self.receive(request)
    }

    /// Sends a request and waits for a number as its reply.
    ///
    /// # Errors
    /// [`FrontendError`].
    pub fn get_u64(&mut self, request: FrontendReq) -> Result<u64, FrontendError> {
        let reply = self.get(request, Vec::new())?;
        let what = "shorter than a number";
        parse_u64(&reply).ok_or(FrontendError::BadReply { request, what })
    }

    fn set_u64(&mut self, request: FrontendReq, value: u64) -> Result<(), FrontendError> {
        self.set(request, value.to_ne_bytes().to_vec(), &[])
    }

    fn set_state(
        &mut self,
        request: FrontendReq,
        ring: u16,
        num: u32,
    ) -> Result<(), FrontendError> {
        self.set(request, VringState { index: u32::from(ring), num }.to_bytes(), &[])
    }

    /// Sends any message, valid or not; for tests and fuzzers.
    ///
    /// # Errors
    /// [`FrontendError`] if it is not sent completely.
    pub fn send(&mut self, message: &Message, fds: &[BorrowedFd<'_>]) -> Result<(), FrontendError> {
        if os::send(self.stream.as_fd(), &message.to_bytes(), fds)? {
            return Ok(());
        }
        let error = io::Error::new(io::ErrorKind::WouldBlock, "the back-end does not read");
        Err(FrontendError::Os(error))
    }

    /// Waits for the reply to `request`.
    fn receive(&mut self, request: FrontendReq) -> Result<Vec<u8>, FrontendError> {
        let bad = |what| Err(FrontendError::BadReply { request, what });
        let deadline = Instant::now() + self.timeout;
        let mut head = [0; HEADER_LEN];
        self.fill(&mut head, request, deadline)?;
        let header = Header::parse(&head);
        if !header.version_ok() || !header.is_reply() {
            return bad("not a reply of version 1");
        }
        if header.request != u32::from(request) {
            return bad("it is the reply to another request");
        }
        let len = usize::try_from(header.size).unwrap_or(usize::MAX);
        if len > PAYLOAD_MAX {
            return bad("longer than any in the protocol");
        }
        let mut payload = vec![0; len];
        self.fill(&mut payload, request, deadline)?;
        Ok(payload)
    }

    fn fill(
        &mut self,
        mut buf: &mut [u8],
        request: FrontendReq,
        deadline: Instant,
    ) -> Result<(), FrontendError> {
        while !buf.is_empty() {
            match os::recv(self.stream.as_fd(), buf, &mut Vec::new(), FDS_MAX)? {
                Received::Bytes(n) => buf = &mut buf[n..],
                Received::Closed => return Err(FrontendError::Closed),
                Received::Truncated => {
                    return Err(FrontendError::BadReply { request, what: "descriptors" });
                }
                Received::Nothing => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() || !os::wait_readable(self.stream.as_fd(), left)? {
                        return Err(FrontendError::Timeout(request));
                    }
                }
            }
        }
        Ok(())
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// One ring of a started front-end. Even rings receive, odd ones transmit, as the guest sees it.
pub struct Queue {
    /// Its index.
    pub ring: u16,
    /// The driver half.
    pub driver: DriverQueue,
    /// Signal it when [`DriverQueue::kick_needed`] returns true.
    pub kick: OwnedFd,
    /// Becomes readable when the device has used buffers and calls are enabled.
    pub call: OwnedFd,
}

/// A started front-end: features negotiated, memory shared, rings running and enabled.
pub struct Frontend {
    client: Client,
    features: u64,
    memory: Arc<GuestMemory>,
    buffers: Range<u64>,
    rings: u16,
    config: Vec<u8>,
}

/// Layout of the memfd, as offsets.
struct Plan {
    rings: Vec<Layout>,
    indirect: Vec<u64>,
    buffers: u64,
    size: u64,
}

impl Plan {
    fn new(params: &Params) -> Self {
        let n = u64::from(params.queue_size);
        let mut at = GUEST_BASE;
        let mut place = |bytes: u64| {
            let here = at;
            at += bytes.next_multiple_of(PAGE);
            here
        };
        let layout = |_| Layout {
            size: params.queue_size,
            desc: place(16 * n),
            driver: place(6 + 2 * n),
            device: place(6 + 8 * n),
        };
        let rings: Vec<Layout> = (0..2 * params.pairs).map(layout).collect();
        let table = 16 * n * u64::from(params.indirect_entries);
        let indirect = rings.iter().map(|_| place(table)).collect();
        let buffers = place(params.buffer_bytes.max(1));
        Self { rings, indirect, buffers, size: at - GUEST_BASE }
    }
}

impl Frontend {
    /// Negotiates, shares memory and starts the rings of `params` over `stream`.
    ///
    /// # Errors
    /// [`FrontendError`] with what the back-end lacks or refused.
    pub fn start(stream: UnixStream, params: &Params) -> Result<(Self, Vec<Queue>), FrontendError> {
        let mut client = Client::new(stream, params.timeout);
        let acked = negotiate(&mut client, params)?;
        let features = acked & !feature::PROTOCOL_FEATURES;
        let plan = Plan::new(params);
        let mapping = Mapping::memfd("pvswitch-front", plan.size).map_err(FrontendError::Memory)?;
        let mapping = Arc::new(mapping);
        let region = Region {
            guest_addr: GUEST_BASE,
            user_addr: USER_BASE,
            len: plan.size,
            offset: 0,
            mapping: Arc::clone(&mapping),
        };
        let memory = Arc::new(GuestMemory::new(vec![region]).expect("one region, well formed"));
        share_memory(&mut client, &mapping, plan.size)?;
        let config = read_config(&mut client)?;
        check_pairs(params.pairs, &config)?;
        let mut queues: Vec<Queue> = Vec::new();
        for (ring, layout) in (0..).zip(&plan.rings) {
            let at = plan.indirect[usize::from(ring)];
            let entries = params.indirect_entries;
            let pool = (entries > 0).then(|| IndirectPool::new(&memory, at, layout.size, entries));
            let base = params.base.unwrap_or_else(|| fresh_base(features));
            let driver =
                DriverQueue::new(&memory, layout, ring_features(features), base, pool.flatten())?;
            let (kick, call) = start_ring(&mut client, ring, layout, base)?;
            queues.push(Queue { ring, driver, kick, call });
        }
        // Without protocol features rings start enabled, and the request is not legal.
        if acked & feature::PROTOCOL_FEATURES != 0 {
            for queue in &queues {
                client.set_state(FrontendReq::SET_VRING_ENABLE, queue.ring, 1)?;
            }
        }
        set_driver_ok(&mut client)?;
        for queue in &queues {
            // A back-end may start a ring only at its first kick (vhost-user, "Ring states"), and
            // suppress kicks before that, as VPP does.
            os::signal(queue.kick.as_fd());
        }
        let buffers = plan.buffers..plan.buffers + params.buffer_bytes;
        let rings = 2 * params.pairs;
        Ok((Self { client, features, memory, buffers, rings, config }, queues))
    }

    /// Negotiated features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Negotiated protocol features.
    pub fn protocol_features(&self) -> ProtocolFeatures {
        self.client.protocol
    }

    /// The shared memory.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Guest addresses of the caller's part of the memory.
    pub fn buffers(&self) -> Range<u64> {
        self.buffers.clone()
    }

    /// The first bytes of `struct virtio_net_config`; empty if the back-end offers none.
    pub fn config(&self) -> &[u8] {
        &self.config
    }

    /// The connection, for further requests. It is readable when the back-end has closed it.
    pub fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// Enables or disables a ring.
    ///
    /// # Errors
    /// [`FrontendError`].
    pub fn enable(&mut self, ring: u16, on: bool) -> Result<(), FrontendError> {
        self.client.set_state(FrontendReq::SET_VRING_ENABLE, ring, u32::from(on))
    }

    /// Stops a ring; nothing of it is in flight in the back-end afterwards. Returns its position.
    ///
    /// # Errors
    /// [`FrontendError`].
    pub fn stop_ring(&mut self, ring: u16) -> Result<u32, FrontendError> {
        let request = FrontendReq::GET_VRING_BASE;
        let state = VringState { index: u32::from(ring), num: 0 };
        let reply = self.client.get(request, state.to_bytes())?;
        match VringState::parse(&reply) {
            Some(state) if state.index == u32::from(ring) => Ok(state.num),
            _ => Err(FrontendError::BadReply { request, what: "not this ring's state" }),
        }
    }

    /// Stops every ring and closes the connection. Returns the rings' positions.
    ///
    /// # Errors
    /// [`FrontendError`]; the connection is closed in any case.
    pub fn stop(mut self) -> Result<Vec<u32>, FrontendError> {
        (0..self.rings).map(|ring| self.stop_ring(ring)).collect()
    }
}

impl AsFd for Frontend {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.client.as_fd()
    }
}

/// Negotiates owner, features, protocol features and number of queues. Returns the bits
/// acknowledged.
fn negotiate(client: &mut Client, params: &Params) -> Result<u64, FrontendError> {
    use FrontendReq as R;
    client.set(R::SET_OWNER, Vec::new(), &[])?;
    let offered = client.get_u64(R::GET_FEATURES)?;
    let mut needed = feature::VERSION_1;
    if offered & needed != needed {
        return Err(FrontendError::Lacks { features: needed & !offered });
    }
    if params.pairs > 1 {
        if offered & feature::MQ == 0 {
            return Err(FrontendError::Pairs { wanted: params.pairs, has: 1 });
        }
        needed |= feature::MQ;
    }
    let features = offered & (params.features | needed | feature::PROTOCOL_FEATURES);
    if offered & feature::PROTOCOL_FEATURES != 0 {
        let offered = client.get_u64(R::GET_PROTOCOL_FEATURES)?;
        let taken = ProtocolFeatures::from_bits_retain(offered) & params.protocol_features;
        client.set_u64(R::SET_PROTOCOL_FEATURES, taken.bits())?;
        client.protocol = taken;
    }
    let mut has = 1;
    if client.protocol.contains(ProtocolFeatures::MQ) {
        has = client.get_u64(R::GET_QUEUE_NUM)?;
    }
    if has < u64::from(params.pairs) {
        return Err(FrontendError::Pairs { wanted: params.pairs, has });
    }
    client.set_u64(R::SET_FEATURES, features)?;
    Ok(features)
}

fn share_memory(client: &mut Client, mapping: &Mapping, size: u64) -> Result<(), FrontendError> {
    let region = MemRegion { guest_addr: GUEST_BASE, size, user_addr: USER_BASE, mmap_offset: 0 };
    let fd = mapping.fd().expect("a memfd has a descriptor");
    if client.protocol.contains(ProtocolFeatures::CONFIGURE_MEM_SLOTS) {
        client.set(FrontendReq::ADD_MEM_REG, region.to_single_bytes(), &[fd])
    } else {
        client.set(FrontendReq::SET_MEM_TABLE, MemRegion::table_to_bytes(&[region]), &[fd])
    }
}

/// Length of mac, status, max_virtqueue_pairs and mtu.
const CONFIG_LEN: usize = 12;

fn read_config(client: &mut Client) -> Result<Vec<u8>, FrontendError> {
    if !client.protocol.contains(ProtocolFeatures::CONFIG) {
        return Ok(Vec::new());
    }
    let bytes = vec![0; CONFIG_LEN];
    let window = ConfigWindow { offset: 0, size: CONFIG_LEN as u32, flags: 0, bytes };
    let reply = client.get(FrontendReq::GET_CONFIG, window.to_bytes())?;
    Ok(ConfigWindow::parse(&reply).map(|window| window.bytes).unwrap_or_default())
}

/// Compares with max_virtqueue_pairs, if the back-end has it: the reply to GET_QUEUE_NUM is a
/// number of pairs from some back-ends, and of virtqueues from others.
fn check_pairs(wanted: u16, config: &[u8]) -> Result<(), FrontendError> {
    let Some(&[low, high]) = config.get(8..10).and_then(<[u8]>::as_array) else { return Ok(()) };
    match u16::from_le_bytes([low, high]) {
        has if has > 0 && has < wanted => Err(FrontendError::Pairs { wanted, has: u64::from(has) }),
        _ => Ok(()),
    }
}

/// Sets up one ring in the back-end. Returns its kick and its call descriptor.
fn start_ring(
    client: &mut Client,
    ring: u16,
    layout: &Layout,
    base: u32,
) -> Result<(OwnedFd, OwnedFd), FrontendError> {
    use FrontendReq as R;
    let (kick, call) = (os::eventfd()?, os::eventfd()?);
    let index = u64::from(ring).to_ne_bytes().to_vec();
    let user = |guest_addr| guest_addr - GUEST_BASE + USER_BASE;
    let addr = VringAddr {
        index: u32::from(ring),
        flags: 0,
        desc: user(layout.desc),
        used: user(layout.device),
        avail: user(layout.driver),
        log: 0,
    };
    client.set_state(R::SET_VRING_NUM, ring, u32::from(layout.size))?;
    client.set_state(R::SET_VRING_BASE, ring, base)?;
    client.set(R::SET_VRING_ADDR, addr.to_bytes(), &[])?;
    client.set(R::SET_VRING_CALL, index.clone(), &[call.as_fd()])?;
    client.set(R::SET_VRING_KICK, index, &[kick.as_fd()])?;
    Ok((kick, call))
}

/// Sets ACKNOWLEDGE, DRIVER, FEATURES_OK and DRIVER_OK (virtio 1.3, 2.1).
fn set_driver_ok(client: &mut Client) -> Result<(), FrontendError> {
    if client.protocol.contains(ProtocolFeatures::STATUS) {
        client.set_u64(FrontendReq::SET_STATUS, 1 | 2 | 8 | 4)?;
    }
    Ok(())
}

/// Base of a fresh ring: split, index 0; packed, slot 0 with both wrap bits set.
fn fresh_base(features: u64) -> u32 {
    if features & feature::RING_PACKED != 0 { 0x8000_8000 } else { 0 }
}

#[cfg(test)]
mod tests;
