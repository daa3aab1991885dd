//! The switch's side of a directory, driven by tests.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread::JoinHandle;

use ::ring::xen::{
    BackCtrl, BackRx, BackTx, CtrlResponse, Extra, Gso, Multicast, Packet, RxResponse, TxPacket,
    ctrl_status, ctrl_type, rx_flag, status,
};
use shm::{Domain, Seg, SegMut};
use switch::poll::{Costs, Policy};
use xen_netif::back::{self, Interface, Offer, Plug, Refused, Request, VifId, without};
use xen_netif::host::{self, Back};

use super::super::*;
use crate::connect::{Connect, ConnectOptions, connect};
use crate::guest::Guest;
use crate::settings::Setting;

/// The switch's ends of both rings, driven by tests.
pub struct Ends {
    pub tx: BackTx,
    pub rx: BackRx,
    pub tx_channel: host::Channel,
    pub rx_channel: Option<host::Channel>,
    pub domain: std::sync::Arc<Domain>,
    pub smart: bool,
    /// Packets taken but not answered.
    pub held: usize,
    pub ctrl: Option<CtrlEnd>,
}

/// The switch's end of a control ring.
pub struct CtrlEnd {
    ring: BackCtrl,
    channel: host::Channel,
    /// Types of requests received, in order.
    pub requests: Vec<u16>,
    /// Grants that it keeps mapped.
    pub kept: u32,
}

#[derive(Clone)]
pub struct Raw {
    pub host: std::sync::Arc<dyn Back>,
    pub ends: std::sync::Arc<Mutex<Option<Ends>>>,
    pub connects: std::sync::Arc<AtomicU32>,
    /// Grants of a queue that it would keep mapped; with 0, requests are not answered.
    pub keeps: std::sync::Arc<AtomicU32>,
    /// Multicast addresses that it would list; with 0, changes are not answered.
    pub lists: std::sync::Arc<AtomicU32>,
    /// Changes answered.
    changes: std::sync::Arc<Mutex<Vec<Multicast>>>,
}

impl Plug for Raw {
    fn interface(&mut self) -> Interface {
        Interface::None
    }

    fn claimed_by(&mut self) -> Option<String> {
        None
    }

    fn connect(&mut self, request: &Request) -> Result<(), Refused> {
        self.connects.fetch_add(1, Ordering::Relaxed);
        // A guest that is closing has none of them any more.
        let gone = |error: HostError| Refused::invalid(error.to_string());
        let keys = &request.queues[0];
        let page = |gref| self.host.map(1, gref).map(|page| page.area().unwrap()).map_err(gone);
        let bind = |port| self.host.bind(1, port).map_err(gone);
        *self.ends.lock().unwrap() = Some(Ends {
            tx: BackTx::attach(page(keys.tx_ref)?).unwrap(),
            rx: BackRx::attach(page(keys.rx_ref)?).unwrap(),
            tx_channel: bind(keys.tx_port)?,
            rx_channel: keys.rx_port.map(bind).transpose()?,
            domain: self.host.domain(1).map_err(gone)?,
            smart: request.features.smart_poll,
            held: 0,
            ctrl: match request.ctrl {
                Some(keys) => Some(CtrlEnd {
                    ring: BackCtrl::attach(page(keys.ring_ref)?).unwrap(),
                    channel: bind(keys.port)?,
                    requests: Vec::new(),
                    kept: 0,
                }),
                None => None,
            },
        });
        Ok(())
    }

    fn set(&mut self, _: &back::Settings) {}

    fn disconnect(&mut self) {
        *self.ends.lock().unwrap() = None;
    }

    fn release_kept(&mut self) {}

    fn adopt(&mut self, _: &Request) -> Result<(), Refused> {
        Err(Refused::invalid("tests start again".into()))
    }

    fn resume(&mut self, _: Option<&back::RingPositions>) -> Result<(), Refused> {
        Err(Refused::invalid("tests start again".into()))
    }
}

impl Raw {
    /// The changes of the multicast list since the last call.
    pub fn take_changes(&self) -> Vec<Multicast> {
        std::mem::take(&mut self.changes.lock().unwrap())
    }

    /// Answers changes of the multicast list that precede frames on the tx ring.
    fn serve_list(&self) {
        let mut ends = self.ends.lock().unwrap();
        let lists = self.lists.load(Ordering::Relaxed) as usize;
        let Some(ends) = ends.as_mut().filter(|_| lists > 0) else { return };
        let mut packet = TxPacket::new();
        while ends.held == 0
            && let Some(next) = ends.tx.take(&mut packet).unwrap()
        {
            let Packet::Multicast(change) = next else { return ends.tx.untake(1) };
            let mut changes = self.changes.lock().unwrap();
            ends.held += 1;
            ends.answer(if changes.len() < lists { status::OKAY } else { status::ERROR });
            changes.push(change);
        }
    }

    /// Answers requests on the control ring.
    fn serve_control(&self) {
        let keeps = self.keeps.load(Ordering::Relaxed);
        let mut ends = self.ends.lock().unwrap();
        let Some(ctrl) = ends.as_mut().and_then(|ends| ends.ctrl.as_mut()) else { return };
        while keeps > 0
            && let Some(request) = ctrl.ring.take().unwrap()
        {
            let [_, _, len] = request.data;
            ctrl.requests.push(request.kind);
            let (status, data) = match request.kind {
                ctrl_type::GET_GREF_MAPPING_SIZE => (ctrl_status::SUCCESS, keeps),
                ctrl_type::ADD_GREF_MAPPING if ctrl.kept + len <= keeps => {
                    ctrl.kept += len;
                    (ctrl_status::SUCCESS, 0)
                }
                // Like our back end, for unsupported requests.
                ctrl_type::DEL_GREF_MAPPING if len <= ctrl.kept => {
                    ctrl.kept -= len;
                    (ctrl_status::SUCCESS, len)
                }
                _ => (ctrl_status::INVALID_PARAMETER, 0),
            };
            let (id, kind) = (request.id, request.kind);
            ctrl.ring.put(CtrlResponse { id, kind, status, data });
            ctrl.ring.publish();
            if ctrl.ring.notify_needed() {
                ctrl.channel.notify();
            }
        }
    }
}

/// The switch's side of a directory, with the handshake in its own thread.
pub struct Peer {
    pub raw: Raw,
    pub dir: PathBuf,
    lacks: String,
    pub stop: std::sync::Arc<AtomicBool>,
    pub thread: Option<JoinHandle<()>>,
}

impl Peer {
    pub fn new(lacks: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        Self::at(std::env::temp_dir().join(format!("pvs-vif-{}-{n}", std::process::id())), lacks)
    }

    pub fn at(dir: PathBuf, lacks: &str) -> Self {
        let host =
            std::sync::Arc::new(xen_local::Back::open(&dir, &os::Permissions::OWNER).unwrap());
        let (ends, connects, keeps, lists, changes) = Default::default();
        let raw = Raw { host, ends, connects, keeps, lists, changes };
        let stop = std::sync::Arc::default();
        let mut peer = Self { raw, dir, lacks: lacks.into(), stop, thread: None };
        peer.start();
        peer
    }

    fn start(&mut self) {
        let raw = self.raw.clone();
        let mut store = DomainStore::new(raw.host.store().unwrap()).unwrap();
        let without = if self.lacks.is_empty() { 0 } else { without(&self.lacks).unwrap() };
        let (id, offer) = (VifId { domid: 1, devid: 0 }, Offer { queues: 1, without });
        let mut vif = back::Handshake::new(id, offer, raw.clone(), Instant::now());
        self.stop = std::sync::Arc::default();
        let stopped = std::sync::Arc::clone(&self.stop);
        let thread = std::thread::spawn(move || {
            vif.start(&mut store, Instant::now()).unwrap();
            while !stopped.load(Ordering::Relaxed) {
                let soon = Instant::now() + Duration::from_millis(5);
                let _ = os::wait(store.as_fd(), Until::Readable, soon);
                store.events().unwrap();
                vif.poll(&mut store, Instant::now()).unwrap();
                raw.serve_control();
                raw.serve_list();
            }
        });
        self.thread = Some(thread);
    }

    /// Replaces the back end by a new one, which continues with the same rings only.
    pub fn restart(&mut self) {
        self.stop();
        *self.ends() = None;
        self.start();
    }

    /// Types of requests received on the control ring, and the number of kept grants.
    pub fn requests(&self) -> (Vec<u16>, u32) {
        let ends = self.ends();
        let ctrl = ends.as_ref().and_then(|ends| ends.ctrl.as_ref());
        ctrl.map(|ctrl| (ctrl.requests.clone(), ctrl.kept)).unwrap_or_default()
    }

    pub fn ends(&self) -> MutexGuard<'_, Option<Ends>> {
        self.raw.ends.lock().unwrap()
    }

    pub fn with<R>(&self, f: impl FnOnce(&mut Ends) -> R) -> R {
        f(self.ends().as_mut().expect("connected"))
    }

    pub fn to(&self, options: &str, poll: Option<Policy>, kick: &str, sets: &[&str]) -> Connect {
        let connect = format!("xen-local:{}{options}", self.dir.display());
        Connect::try_from(&args(&connect, poll, kick, sets)).unwrap()
    }

    pub fn guest(&self, options: &str) -> Guest {
        let to = self.to(options, Some(Policy::Event), "event", &[]);
        reach(&to)
    }

    pub fn write_state(&self, state: &str) {
        let store = self.raw.host.store().unwrap();
        store.write("/local/domain/0/backend/vif/1/0/state", state).unwrap();
    }

    /// The guest's state.
    pub fn reads_state(&self) -> Option<String> {
        self.raw.host.store().unwrap().read("/local/domain/1/device/vif/0/state").unwrap()
    }

    /// Stops the handshake.
    pub fn stop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.stop();
    }
}

pub fn args(connect: &str, poll: Option<Policy>, kick: &str, sets: &[&str]) -> ConnectOptions {
    ConnectOptions {
        connect: connect.into(),
        queues: 1,
        queue_size: 256,
        packed: false,
        in_order: false,
        poll,
        kick: kick.parse().unwrap(),
        set: sets.iter().map(|set| set.parse::<Setting>().unwrap()).collect(),
        costs: || Costs::TYPICAL,
    }
}

/// Connects, or panics.
pub fn reach(to: &Connect) -> Guest {
    let end = Instant::now() + Duration::from_secs(20);
    connect(to, Some(&|| Instant::now() < end)).unwrap()
}

impl Ends {
    /// Takes the next packet, with its bytes.
    pub fn take(&mut self) -> Option<(TxPacket, Vec<u8>)> {
        let mut packet = TxPacket::new();
        assert_eq!(self.tx.take(&mut packet).unwrap()?, Packet::Frame);
        self.held += 1;
        let mut bytes = Vec::new();
        for slot in packet.slots() {
            let mut part = vec![0; slot.len.into()];
            let seg = Seg::granted(&self.domain, slot.gref, slot.offset, slot.len).unwrap();
            assert_eq!(seg.read(&mut part), part.len(), "the grant can be read");
            bytes.extend(part);
        }
        Some((packet, bytes))
    }

    /// Takes all packets; returns how many.
    pub fn take_all(&mut self) -> usize {
        let (mut packet, before) = (TxPacket::new(), self.held);
        while self.tx.take(&mut packet).unwrap().is_some() {
            self.held += 1;
        }
        self.held - before
    }

    /// Answers the oldest packet; returns whether it notified the guest.
    pub fn answer(&mut self, status: i16) -> bool {
        self.held -= 1;
        self.tx.put(status);
        self.tx.publish();
        let needed = self.tx.notify_needed();
        let notifies = if self.smart { self.rx.smart_poll().claim() } else { needed };
        if notifies {
            self.tx_channel.notify();
        }
        notifies
    }

    /// Takes what there is and answers up to `answers` packets; arms if there is nothing. Returns
    /// how many it took.
    pub fn step(&mut self, answers: usize, asleep: &mut bool) -> usize {
        let got = self.take_all();
        for _ in 0..answers.min(self.held) {
            self.answer(status::OKAY);
        }
        if got == 0 && self.held == 0 {
            *asleep = self.tx.arm() == ::ring::xen::Armed::Armed;
        }
        got
    }

    /// Takes what there is, and answers one packet, or arms if there is none. Returns how many it
    /// took.
    pub fn answer_or_arm(&mut self, asleep: &mut bool) -> usize {
        let got = self.take_all();
        if self.held == 0 {
            *asleep = self.tx.arm() == ::ring::xen::Armed::Armed;
        } else {
            self.answer(status::OKAY);
        }
        got
    }

    /// Puts a packet on the rx ring, with `each` bytes per page.
    pub fn give(&mut self, flags: u16, gso: Option<Gso>, bytes: &[u8], each: usize) -> bool {
        self.rx.available().unwrap();
        let parts: Vec<_> = bytes.chunks(each).collect();
        for (i, part) in parts.iter().enumerate() {
            let request = self.rx.take().unwrap();
            let len = u16::try_from(part.len()).unwrap();
            let mut to = SegMut::granted(&self.domain, request.gref, 0, len).unwrap();
            assert_eq!(to.write(part), u32::from(len), "the grant can be written");
            let more = if i + 1 < parts.len() { rx_flag::MORE_DATA } else { 0 };
            let extra = gso.filter(|_| i == 0);
            let with = if extra.is_some() { rx_flag::EXTRA_INFO } else { 0 };
            let first = if i == 0 { flags } else { 0 };
            let flags = more | with | first;
            let status = i16::try_from(len).unwrap();
            self.rx.put(RxResponse { id: request.id, offset: 0, flags, status });
            if let Some(gso) = extra {
                self.rx.take().unwrap();
                self.rx.put_extra(Extra::Gso(gso), false);
            }
        }
        self.rx.publish();
        let needed = self.rx.notify_needed();
        let notifies = if self.smart { self.rx.smart_poll().claim() } else { needed };
        if notifies {
            self.rx_channel.as_ref().unwrap_or(&self.tx_channel).notify();
        }
        notifies
    }
}
