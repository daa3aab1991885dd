//! A domain under full control: its memory, its grant table, its rings, its keys.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use os::{Carries, Received, Until};
use ring::xen::{FrontCtrl, FrontRx, FrontTx};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use shm::{Area, Mapping};
use xen_netif::store::Store;

use crate::{Attack, Error};

/// Pages of a guest; page `n` is granted with reference `GREF + n`.
pub const PAGES: u32 = 64;
pub const GREF: u32 = 8;
/// Pages that hold the rings, and the first page of data.
pub const TX: usize = 0;
pub const RX: usize = 1;
pub const CTRL: usize = 2;
pub const DATA: u32 = 4;
/// Offsets of a ring's `req_prod`, its `rsp_prod` and its first slot.
pub const REQ_PROD: usize = 0;
pub const RSP_PROD: usize = 8;
pub const SLOTS: usize = 64;
pub const RING_SIZE: u32 = 256;

pub const FRONT: &str = "/local/domain/1/device/vif/0";
pub const BACK: &str = "/local/domain/0/backend/vif/1/0";

/// Longest wait for the peer.
const ANSWER_MAX: Duration = Duration::from_secs(2);
/// Interval between two checks.
const RETRY: Duration = Duration::from_millis(2);

/// Local end of an event channel.
pub struct Channel {
    pub port: u32,
    to_back: OwnedFd,
    /// Kept open, as a guest would.
    _to_front: OwnedFd,
}

impl Channel {
    pub fn notify(&self) {
        os::signal(self.to_back.as_fd());
    }
}

/// A domain with one vif.
pub struct Guest {
    pub memory: OwnedFd,
    pub table: OwnedFd,
    mapping: Arc<Mapping>,
    /// tx, rx, ctrl.
    pub channels: Vec<Channel>,
    pub store: Store,
    pub tx_prod: u32,
    /// Last field: dropping it ends the domain.
    socket: OwnedFd,
}

fn message(words: [u32; 4]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// Reads a reply of the hypervisor.
fn answer(socket: &OwnedFd) -> Option<([u32; 4], Vec<OwnedFd>)> {
    let end = Instant::now() + ANSWER_MAX;
    if !os::wait(socket.as_fd(), Until::Readable, end).ok()? {
        return None;
    }
    let (mut bytes, mut fds) = ([0; 16], Vec::new());
    if os::recv(socket.as_fd(), &mut bytes, &mut fds, 4).ok()? != Received::Bytes(16) {
        return None;
    }
    let word = |i: usize| u32::from_le_bytes(std::array::from_fn(|b| bytes[4 * i + b]));
    Some(([word(0), word(1), word(2), word(3)], fds))
}

/// An entry of the grant table: in use, for domain 0.
pub fn entry(frame: u32) -> [u8; 8] {
    (1 | u64::from(frame) << 32).to_le_bytes()
}

impl Guest {
    /// Creates a domain whose toolstack has made its vif; `None` if the host does not accept it.
    fn new(dir: &Path) -> Option<Self> {
        let socket = os::connect(&dir.join("hypervisor"), Carries::Messages).ok()?;
        let memory = memfd_create("hostile", MemfdFlags::CLOEXEC).ok()?;
        let table = memfd_create("hostile-grants", MemfdFlags::CLOEXEC).ok()?;
        let len = u64::from(PAGES) * 4096;
        ftruncate(&memory, len).ok()?;
        ftruncate(&table, u64::from(PAGES + GREF) * 8).ok()?;
        let entries: Vec<u8> = (0..PAGES).flat_map(entry).collect();
        rustix::io::pwrite(&table, &entries, u64::from(GREF) * 8).ok()?;
        let hello = message([1, 1, PAGES, 0]);
        os::send(socket.as_fd(), &hello, &[memory.as_fd(), table.as_fd()]).ok()?;
        if answer(&socket)?.0[0] != 2 {
            return None;
        }
        let mapping = Arc::new(Mapping::new(memory.as_fd(), 0, len).ok()?);
        let store = Store::connect(&dir.join("xenstored")).ok()?;
        let (channels, tx_prod) = (Vec::new(), 0);
        let mut guest = Self { memory, table, mapping, channels, store, tx_prod, socket };
        guest.channels = (0..3).map(|_| guest.channel()).collect::<Option<_>>()?;
        Some(guest)
    }

    fn channel(&self) -> Option<Channel> {
        os::send(self.socket.as_fd(), &message([3, 0, 0, 0]), &[]).ok()?;
        let (words, fds) = answer(&self.socket)?;
        let [to_front, to_back] = <[OwnedFd; 2]>::try_from(fds).ok()?;
        Some(Channel { port: words[1], to_back, _to_front: to_front })
    }

    /// Creates a domain with a vif and all rings connected; `None` if that fails.
    pub fn connected(dir: &Path) -> Option<Self> {
        let mut guest = Self::new(dir)?;
        guest.start().then_some(guest)
    }

    /// Offers all rings and connects; returns whether the back end did.
    fn start(&mut self) -> bool {
        self.offer_rings() && self.connect()
    }

    /// Writes one of our keys; returns whether xenstore accepted it.
    pub fn set(&self, key: &str, value: impl ToString) -> bool {
        self.store.write(&format!("{FRONT}/{key}"), &value.to_string()).is_ok()
    }

    pub fn back_state(&self) -> String {
        self.store.read(&format!("{BACK}/state")).ok().flatten().unwrap_or_default()
    }

    /// Waits until the back end is in one of these states; returns the state.
    pub fn wait_back(&self, states: &[&str]) -> Option<String> {
        let end = Instant::now() + ANSWER_MAX;
        while Instant::now() < end {
            let state = self.back_state();
            if states.contains(&state.as_str()) {
                return Some(state);
            }
            std::thread::sleep(RETRY);
        }
        None
    }

    /// Writes empty rings and their keys.
    pub fn offer_rings(&mut self) -> bool {
        FrontTx::new(self.area(TX));
        FrontRx::new(self.area(RX));
        FrontCtrl::new(self.area(CTRL));
        self.tx_prod = 0;
        let names = [("tx-ring-ref", TX), ("rx-ring-ref", RX), ("ctrl-ring-ref", CTRL)];
        let mut done = names.iter().all(|(key, page)| self.set(key, GREF + *page as u32));
        for (key, channel) in ["tx", "rx", "ctrl"].iter().zip(&self.channels) {
            done = done && self.set(&format!("event-channel-{key}"), channel.port);
        }
        let wishes = ["request-rx-copy", "feature-rx-notify", "feature-sg"];
        done && wishes.iter().all(|key| self.set(key, 1))
    }

    /// Waits for the back end to connect; returns whether it did.
    pub fn connect(&self) -> bool {
        self.wait_back(&["2"]).is_some()
            && self.set("state", 4)
            && self.wait_back(&["4", "5", "6"]).as_deref() == Some("4")
    }

    pub fn area(&self, page: usize) -> Area {
        Area::of(&self.mapping, page * 4096, 4096).expect("inside the memory")
    }

    /// Puts words into the next tx slot.
    fn slot(&mut self, words: [u32; 3]) {
        let at = SLOTS + 12 * (self.tx_prod % RING_SIZE) as usize;
        let area = self.area(TX);
        (0..3).for_each(|i| area.store_u32(at + 4 * i, words[i]));
        self.tx_prod = self.tx_prod.wrapping_add(1);
    }

    /// Puts a request into the next tx slot.
    pub fn request(&mut self, gref: u32, offset: u16, flags: u16, size: u16) {
        let id = self.tx_prod % RING_SIZE;
        let pair = |low: u32, high: u16| low | u32::from(high) << 16;
        self.slot([gref, pair(offset.into(), flags), pair(id, size)]);
    }

    /// Puts an extra info into the next tx slot.
    pub fn extra(&mut self, bytes: [u8; 8]) {
        let word = u64::from_le_bytes(bytes);
        self.slot([word as u32, (word >> 32) as u32, 0]);
    }

    /// Publishes the tx ring's requests, and notifies.
    pub fn push(&self) {
        self.area(TX).sync_store_u32(REQ_PROD, self.tx_prod, Ordering::Release);
        self.channels[TX].notify();
    }

    /// Waits until all requests are answered; returns whether they are.
    pub fn answered(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        let area = self.area(TX);
        while area.sync_load_u32(RSP_PROD, Ordering::Acquire) != self.tx_prod {
            if Instant::now() > end {
                return false;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        true
    }

    /// Writes a frame of 60 bytes, from `from` to `to`, into a page of data.
    pub fn frame(&self, page: u32, to: [u8; 6], from: [u8; 6]) {
        let mut bytes = [to, from].concat();
        bytes.extend([8, 0, 0x45, 0, 0, 46, 0, 0, 0x40, 0, 64, 17]);
        bytes.resize(60, 0);
        self.write(page as usize * 4096, &bytes);
    }

    /// Writes bytes at an offset of its memory.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        if let Some(mut seg) = self.mapping.seg_mut(at, bytes.len() as u32) {
            seg.write(bytes);
        }
    }

    /// Whether the switch has disconnected us.
    pub fn is_disconnected(&self) -> bool {
        let carrier = self.store.read(&format!("{BACK}/carrier")).ok().flatten();
        carrier.as_deref() == Some("0") || self.back_state() != "4"
    }
}

impl Attack<'_> {
    /// Creates a domain with a vif, not connected; `None` when time is over.
    pub fn domain(&mut self) -> Result<Option<Guest>, Error> {
        let guest = self.any_domain()?;
        self.begin();
        Ok(guest)
    }

    fn any_domain(&mut self) -> Result<Option<Guest>, Error> {
        let dir = self.target();
        while self.may_wait() {
            if let Some(guest) = Guest::new(&dir) {
                self.tally.connections += 1;
                return Ok(Some(guest));
            }
            self.rest(RETRY);
        }
        if self.tally.connections == 0 {
            return Err(Error::NoConnection(dir));
        }
        Ok(None)
    }

    /// Creates a domain with a vif and all rings connected.
    pub fn vif(&mut self) -> Result<Option<Guest>, Error> {
        while let Some(mut guest) = self.any_domain()? {
            if guest.start() {
                self.begin();
                return Ok(Some(guest));
            }
            self.tally.turned_away += 1;
        }
        Ok(None)
    }

    /// Runs all `ways` in turn, each as a new domain, until time is over.
    pub fn break_vifs(&mut self, ways: &[fn(&mut Guest)]) -> Result<(), Error> {
        for way in ways.iter().cycle() {
            let Some(mut guest) = self.vif()? else { return Ok(()) };
            way(&mut guest);
            self.tally.attempts += 1;
            guest.answered(Duration::from_millis(20));
            // A broken vif stays broken.
            guest.channels.iter().for_each(Channel::notify);
            self.tally.ended += u64::from(guest.is_disconnected());
        }
        Ok(())
    }

    /// Runs `work` on one vif until it is disconnected, then on the next, until time is over.
    pub fn with_vifs(&mut self, mut work: impl FnMut(&mut Self, &mut Guest)) -> Result<(), Error> {
        while let Some(mut guest) = self.vif()? {
            while self.on() {
                work(self, &mut guest);
                self.tally.attempts += 1;
                if guest.is_disconnected() {
                    self.tally.ended += 1;
                    break;
                }
            }
        }
        Ok(())
    }
}
