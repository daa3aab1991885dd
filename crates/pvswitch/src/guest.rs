//! A guest of our own: the driver half of one queue pair with its buffers. `nic`, `gen` and the
//! demo's guests are made of it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ring::virtq::{Armed, Buf, DriverQueue, Used};
use shm::{GuestMemory, Seg, SegMut};
use vhost_user::feature;
use vhost_user::frontend::{Frontend, FrontendError, PROTOCOL_FEATURES, Params, Queue};
use vhost_user::sys::{self, SocketError};

use crate::cli::ConnectArgs;
use crate::spec::Role;

/// Header before each frame: virtio 1.x, with `num_buffers`.
pub const HDR_LEN: usize = 12;
/// Size of a transmit buffer: a 64 KiB GSO frame with its headers, on a page of its own.
pub const TX_BUFFER: u64 = 17 * 4096;
/// Size of a receive buffer; longer frames take several (MRG_RXBUF).
pub const RX_BUFFER: u64 = 4096;
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
        let mut features = feature::BASE & !feature::RING_PACKED & !feature::IN_ORDER;
        if args.packed {
            features |= feature::RING_PACKED;
        }
        if args.in_order {
            features |= feature::IN_ORDER;
        }
        Ok(Self { socket: socket.into(), role, queue_size: size, features })
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
    let size = u64::from(to.queue_size);
    let params = Params {
        features: to.features,
        protocol_features: PROTOCOL_FEATURES,
        pairs: 1,
        queue_size: to.queue_size,
        base: None,
        indirect_entries: 0,
        buffer_bytes: size * (TX_BUFFER + RX_BUFFER),
        timeout: TIMEOUT,
    };
    let (frontend, mut queues) = Frontend::start(stream, &params)?;
    let memory = Arc::clone(frontend.memory());
    let buffers = frontend.buffers().start;
    let tx = queues.remove(1);
    let rx = queues.remove(0);
    let tx = Tx::new(tx, Arc::clone(&memory), buffers);
    let rx = Rx::new(rx, memory, buffers + size * TX_BUFFER);
    Ok(Guest { frontend, tx, rx })
}

/// The switch broke the ring protocol: the connection is to be given up.
pub type Malformed = ring::virtq::Malformed;

/// The transmit queue and its buffers.
pub struct Tx {
    driver: DriverQueue,
    kick: OwnedFd,
    /// Readable when the switch was asked to tell of used buffers, and did.
    pub call: OwnedFd,
    memory: Arc<GuestMemory>,
    base: u64,
    free: Vec<u16>,
    /// Which buffer is behind a chain id.
    buffer_of: Vec<u16>,
    used: Vec<Used>,
    /// Kicks made.
    pub kicks: u64,
}

impl Tx {
    fn new(queue: Queue, memory: Arc<GuestMemory>, base: u64) -> Self {
        let size = queue.driver.size();
        let mut driver = queue.driver;
        driver.disarm();
        Self {
            driver,
            kick: queue.kick,
            call: queue.call,
            memory,
            base,
            free: (0..size).rev().collect(),
            buffer_of: vec![0; usize::from(size)],
            used: Vec::with_capacity(usize::from(size)),
            kicks: 0,
        }
    }

    /// Number of buffers.
    pub fn size(&self) -> u16 {
        self.driver.size()
    }

    /// Takes back what the switch has used; returns how many buffers are free.
    pub fn reclaim(&mut self) -> Result<usize, Malformed> {
        self.used.clear();
        self.driver.take_used(usize::MAX, &mut self.used)?;
        for used in &self.used {
            self.free.push(self.buffer_of[usize::from(used.id)]);
        }
        Ok(self.free.len())
    }

    /// Free buffers, the next to be sent first.
    pub fn free(&self) -> impl Iterator<Item = u16> + '_ {
        self.free.iter().rev().copied()
    }

    /// The memory of buffer `i`, header first.
    pub fn memory(&self, i: u16) -> SegMut<'_> {
        let at = self.base + u64::from(i) * TX_BUFFER;
        let seg = self.memory.seg_mut(at, TX_BUFFER as u32, &mut 0);
        seg.expect("buffers lie in our own memory")
    }

    /// Sends free buffer `i`, which holds `len` bytes with its header.
    pub fn send(&mut self, i: u16, len: u32) {
        // Nearly always the last one: buffers are filled in the order they are offered.
        let at = self.free.iter().rposition(|free| *free == i).expect("a free buffer");
        self.free.remove(at);
        let addr = self.base + u64::from(i) * TX_BUFFER;
        let id = self.driver.add(&[Buf { addr, len, write: false }]);
        let id = id.expect("as many descriptors as buffers");
        self.buffer_of[usize::from(id)] = i;
    }

    /// Publishes what was sent, and kicks if the switch wants it.
    pub fn publish(&mut self) {
        self.driver.publish();
        if self.driver.kick_needed() {
            self.kicks += 1;
            sys::signal(self.kick.as_fd());
        }
    }

    /// Before sleeping for free buffers: asks for a call. False: there are some by now.
    pub fn arm(&mut self) -> bool {
        self.driver.arm() == Armed::Armed
    }

    /// Ends what [`arm`](Self::arm) began.
    pub fn disarm(&mut self) {
        self.driver.disarm();
    }
}

/// The receive queue and its buffers.
pub struct Rx {
    driver: DriverQueue,
    kick: OwnedFd,
    /// Readable when the switch was asked to tell of frames, and did.
    pub call: OwnedFd,
    memory: Arc<GuestMemory>,
    base: u64,
    /// Which buffer is behind a chain id.
    buffer_of: Vec<u16>,
    batch: Vec<Used>,
    /// Used buffers not yet shown, `id` being the buffer by now: the chain's id is free again, and
    /// the rest of a frame may not have been taken yet.
    used: VecDeque<Used>,
    /// Buffers to give back.
    done: Vec<u16>,
    /// Kicks made.
    pub kicks: u64,
}

impl Rx {
    fn new(queue: Queue, memory: Arc<GuestMemory>, base: u64) -> Self {
        let size = queue.driver.size();
        let mut rx = Self {
            driver: queue.driver,
            kick: queue.kick,
            call: queue.call,
            memory,
            base,
            buffer_of: vec![0; usize::from(size)],
            batch: Vec::with_capacity(usize::from(size)),
            used: VecDeque::with_capacity(usize::from(size)),
            done: (0..size).collect(),
            kicks: 0,
        };
        rx.driver.disarm();
        rx.refill();
        rx
    }

    /// Takes frames and shows each, as segments with the header first, to `show`; their buffers
    /// are given back afterwards by [`refill`](Self::refill). Returns how many.
    pub fn receive<'a>(
        &'a mut self,
        max: usize,
        mut show: impl FnMut(&[Seg<'a>]),
    ) -> Result<usize, Malformed> {
        self.batch.clear();
        self.driver.take_used(max, &mut self.batch)?;
        let Self { batch, used, buffer_of, .. } = self;
        used.extend(batch.iter().map(|u| Used { id: buffer_of[usize::from(u.id)], ..*u }));
        let mut frames = 0;
        let mut segs = [Seg::EMPTY; 64];
        while let Some(first) = self.used.front() {
            let mut header = [0; HDR_LEN];
            let head = seg(&self.memory, self.base, *first);
            head.read(&mut header);
            let count = usize::from(u16::from_le_bytes([header[10], header[11]])).max(1);
            if count > segs.len() {
                return Err(Malformed::ChainTooLong);
            }
            if count > self.used.len() {
                break;
            }
            for (to, used) in segs.iter_mut().zip(self.used.drain(..count)) {
                *to = seg(&self.memory, self.base, used);
                self.done.push(used.id);
            }
            show(&segs[..count]);
            frames += 1;
        }
        Ok(frames)
    }

    /// Gives buffers whose frames were dealt with back to the switch.
    pub fn refill(&mut self) {
        if self.done.is_empty() {
            return;
        }
        for i in self.done.drain(..) {
            let addr = self.base + u64::from(i) * RX_BUFFER;
            let id = self.driver.add(&[Buf { addr, len: RX_BUFFER as u32, write: true }]);
            let id = id.expect("as many descriptors as buffers");
            self.buffer_of[usize::from(id)] = i;
        }
        self.driver.publish();
        if self.driver.kick_needed() {
            self.kicks += 1;
            sys::signal(self.kick.as_fd());
        }
    }

    /// Before sleeping: asks for a call. False: there are frames by now.
    pub fn arm(&mut self) -> bool {
        self.driver.arm() == Armed::Armed
    }

    /// Ends what [`arm`](Self::arm) began.
    pub fn disarm(&mut self) {
        self.driver.disarm();
    }
}

/// What of a used buffer holds data.
fn seg(memory: &GuestMemory, base: u64, used: Used) -> Seg<'_> {
    let at = base + u64::from(used.id) * RX_BUFFER;
    let seg = memory.seg(at, used.len.min(RX_BUFFER as u32), &mut 0);
    seg.expect("buffers lie in our own memory")
}

/// Sleeps until one of `fds` is readable, at most `timeout`; reads the eventfds among `calls`
/// empty.
pub fn sleep(fds: &[BorrowedFd<'_>], calls: &[BorrowedFd<'_>], timeout: Option<Duration>) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut all: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    all.extend(calls.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
    let timeout = timeout.map(|t| Timespec {
        tv_sec: t.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    // An interrupted sleep is a sleep that ended.
    let _ = poll(&mut all, timeout.as_ref());
    for (polled, call) in all[fds.len()..].iter().zip(calls) {
        if polled.revents().contains(PollFlags::IN) {
            sys::drain(*call);
        }
    }
}

/// Whether the switch has closed the connection.
pub fn is_gone(frontend: &Frontend) -> bool {
    sys::wait_readable(frontend.as_fd(), Duration::ZERO).unwrap_or(true)
}

/// Names a socket for messages.
pub fn name(path: &Path) -> String {
    path.display().to_string()
}
