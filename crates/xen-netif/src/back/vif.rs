//! One vif's back end: follows its front end through the states of xenstore.
//!
//! [`Handshake::poll`] reads the current keys of both directories and acts on them. Events only
//! cause a poll, so any number of them may be merged. Keys written:
//!
//! | state | on entry | meaning |
//! |---|---|---|
//! | Initialising | none | a vif was found; its front end has not been read |
//! | InitWait | our offer, in one transaction | a front end may name its rings |
//! | Connected | rings mapped, channels bound, then `carrier`, `hotplug-status` | frames pass |
//! | Closing | rings are released before | |
//! | Closed | | the front end may start again; with `online` 0 the vif is finished |
//!
//! A front end with an invalid request gets an `error` node and Closing, once, and is not retried
//! until it leaves Connected. One that violates the ring protocol loses its rings and carrier, and
//! keeps its state until it closes.

mod handover;

use std::fmt;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use switch::serving::Serving;

use super::keys::{self, Offer, ReadError, Refused, Request};
use super::plug::RingPositions;
use super::state::{self, State};
use super::tree::{Failure, Tree};
use crate::port::Rate;

pub use handover::VifState;

/// Identifies a vif of our back-end domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VifId {
    /// The guest.
    pub domid: u16,
    /// Its device.
    pub devid: u32,
}

impl VifId {
    /// Its back-end directory, relative to our domain's.
    pub fn back(self) -> String {
        format!("backend/vif/{}/{}", self.domid, self.devid)
    }
}

impl fmt::Display for VifId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.domid, self.devid)
    }
}

/// Settings that can change while a vif is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Rate limit of the guest; `None`: no limit.
    pub rate: Option<Rate>,
    /// MTU set by the toolstack.
    pub mtu: Option<u16>,
    /// Whether only multicast frames to addresses listed by the guest are delivered.
    pub multicast_control: bool,
    /// Whether frames may pass (`disconnect`).
    pub link: bool,
}

/// Interface of the host for a vif, which the toolstack's hotplug scripts set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Interface {
    /// It has none: scripts have nothing to do.
    None,
    /// It exists. A front end is connected when the toolstack's script has finished.
    Exists,
    /// It cannot be created, with the reason. The vif is not served until it can.
    Missing(String),
}

/// Destination of a vif's rings.
pub trait Plug {
    /// The other back end that serves the vif, if any.
    fn claimed_by(&mut self) -> Option<String>;
    /// The vif's interface.
    fn interface(&mut self) -> Interface;
    /// Maps rings, binds channels and starts queues with the last settings: all of them, or none
    /// with a reason. Frames of the guest are taken from now on; none are delivered to it before
    /// `set`.
    fn connect(&mut self, request: &Request) -> Result<(), Refused>;
    /// Sets the settings of the next rings or, while connected, of the current ones; frames are
    /// then delivered to the guest.
    fn set(&mut self, settings: &Settings);
    /// Stops queues and releases all resources, if there are any.
    fn disconnect(&mut self);
    /// Releases what another process's rings still hold: they are not adopted.
    fn release_kept(&mut self);
    /// Notes which port is served while what its guest wrote is read, until the note is dropped.
    fn serving(&self) -> Option<Serving> {
        None
    }
    /// Maps and binds the rings of another process, which still serves them: all of them, or none
    /// with a reason.
    fn adopt(&mut self, request: &Request) -> Result<(), Refused>;
    /// Starts adopted rings as [`connect`](Self::connect) does, at these positions or where their
    /// responses end: all of them, or none with a reason.
    fn resume(&mut self, at: Option<&RingPositions>) -> Result<(), Refused>;
}

/// Token bucket for actions that a guest can cause.
#[derive(Debug)]
struct Bucket {
    tokens: u32,
    max: u32,
    every: Duration,
    filled: Instant,
}

impl Bucket {
    fn new(max: u32, every: Duration, now: Instant) -> Self {
        Self { tokens: max, max, every, filled: now }
    }

    /// Takes a token; the error is the time of the next one.
    fn take(&mut self, now: Instant) -> Result<(), Instant> {
        let passed = now.saturating_duration_since(self.filled).as_nanos() / self.every.as_nanos();
        let due = u32::try_from(passed).unwrap_or(u32::MAX).min(self.max);
        if due == self.max {
            self.filled = now;
        } else {
            self.filled += self.every * due;
        }
        self.tokens = (self.tokens + due).min(self.max);
        match self.tokens.checked_sub(1) {
            Some(left) => {
                self.tokens = left;
                Ok(())
            }
            None => Err(self.filled + self.every),
        }
    }
}

/// Polls in a burst, and the interval between later ones: a guest that rewrites its keys in a loop
/// (XSA-349) must not take the control thread from others.
const POLLS: (u32, Duration) = (64, Duration::from_millis(20));
/// First delay before a refused request to the store is retried; it doubles each time.
const RETRY: Duration = Duration::from_secs(1);
/// Maximum number of doublings.
const RETRY_DOUBLINGS: u32 = 6;
/// Connects in a burst, and the interval between later ones: each maps and unmaps pages.
const CONNECTS: (u32, Duration) = (8, Duration::from_secs(1));

/// State of a vif for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// State of the front end, as last read.
    pub front: State,
    /// State of the back end.
    pub back: State,
    /// Both states as text.
    pub text: String,
    /// The last error.
    pub error: Option<String>,
    /// Names of the front end's features.
    pub features: Vec<&'static str>,
    /// Number of its queues; 0 while not connected.
    pub queues: usize,
}

/// One vif's state machine.
pub struct Handshake<P> {
    id: VifId,
    offer: Offer,
    plug: P,
    back: String,
    /// Path of the front end's directory, while the back end's exists.
    front: Option<String>,
    state: State,
    front_state: State,
    online: bool,
    /// The request whose rings are connected.
    plugged: Option<Request>,
    settings: Option<Settings>,
    /// Multicast control as sampled at Connected.
    multicast: bool,
    /// Connecting failed: not retried until the front end leaves Connected.
    refused: bool,
    /// The front end violated the ring protocol: it has no rings until it starts again.
    broken: bool,
    claimed_by: Option<String>,
    waits: Option<&'static str>,
    error: Option<String>,
    /// Whether watches on the known directories are registered.
    watched: bool,
    /// The store's last refusal, and the number of retries.
    store_error: Option<(Failure, u32)>,
    /// Whether Reconfigured was written.
    reconfigured: bool,
    has_been_read: bool,
    /// Until then, nothing that the guest wrote is read.
    held_until: Option<Instant>,
    polls: Bucket,
    connects: Bucket,
    due: Option<Instant>,
}

fn pair(key: &str, value: impl ToString) -> (String, String) {
    (key.into(), value.to_string())
}

impl<P: Plug> Handshake<P> {
    /// Creates the handshake of a vif that may not exist yet. `now` is not later than any poll.
    pub fn new(id: VifId, offer: Offer, plug: P, now: Instant) -> Self {
        assert!((1..=keys::QUEUES_MAX).contains(&offer.queues));
        Self {
            id,
            offer,
            plug,
            back: id.back(),
            front: None,
            state: State::Initialising,
            front_state: State::Unknown,
            online: false,
            plugged: None,
            settings: None,
            multicast: false,
            refused: false,
            broken: false,
            claimed_by: None,
            waits: None,
            error: None,
            watched: false,
            store_error: None,
            reconfigured: false,
            has_been_read: false,
            held_until: None,
            polls: Bucket::new(POLLS.0, POLLS.1, now),
            connects: Bucket::new(CONNECTS.0, CONNECTS.1, now),
            due: None,
        }
    }

    /// Token of events in our directory.
    pub fn back_token(&self) -> String {
        format!("b{}", self.id)
    }

    /// Token of events in the front end's directory.
    pub fn front_token(&self) -> String {
        format!("f{}", self.id)
    }

    /// The destination of its rings.
    pub fn rings(&self) -> &P {
        &self.plug
    }

    /// The destination of its rings, to change it.
    pub fn plug(&mut self) -> &mut P {
        &mut self.plug
    }

    /// Has the vif not served before `until`: the rings of the process before are given up, and the
    /// next [`start`](Self::start) only withdraws the carrier.
    pub fn hold_down(&mut self, until: Instant) {
        self.plug.release_kept();
        self.held_until = Some(until);
    }

    fn is_held(&self, now: Instant) -> bool {
        self.held_until.is_some_and(|until| now < until)
    }

    /// Starts to follow the vif; also after a reconnect to xenstore, which has dropped all watches.
    /// Then as [`poll`](Self::poll).
    pub fn start<T: Tree>(&mut self, store: &mut T, now: Instant) -> Result<(), Failure> {
        self.watched = false;
        if self.is_held(now) {
            let withdrawn = self.write_keys(store, &[pair("carrier", 0)]).map(|_| ());
            self.retry_later(store, withdrawn, now)?;
        }
        self.poll(store, now)
    }

    /// Time of the next poll without an event.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Whether the toolstack or the guest has finished with the vif: its port can be removed.
    pub fn is_finished(&self) -> bool {
        let known = self.has_been_read && self.store_error.is_none();
        known && (self.front.is_none() || (self.state == State::Closed && !self.online))
    }

    /// Reads the keys of both ends and acts on them. A request that the store refuses is retried
    /// later.
    ///
    /// # Errors
    /// [`Failure`]: the store has disconnected, for all vifs.
    pub fn poll<T: Tree>(&mut self, store: &mut T, now: Instant) -> Result<(), Failure> {
        self.due = None;
        if self.is_held(now) {
            self.due = self.held_until;
            return Ok(());
        }
        if self.held_until.take().is_some() {
            // By the process before: if its directory is gone now, the vif is finished.
            self.has_been_read = true;
        }
        if let Err(at) = self.polls.take(now) {
            self.due = Some(at);
            return Ok(());
        }
        let done = self.update(store, now);
        self.retry_later(store, done, now)
    }

    /// Schedules a retry: a refusal affects only this vif.
    fn retry_later<T: Tree>(
        &mut self,
        store: &T,
        done: Result<(), Failure>,
        now: Instant,
    ) -> Result<(), Failure> {
        match done {
            Err(failure) if !store.is_gone() => {
                let times =
                    self.store_error.take().map_or(0, |(_, times)| times + 1).min(RETRY_DOUBLINGS);
                self.due = Some(now + RETRY * (1 << times));
                self.store_error = Some((failure, times));
                Ok(())
            }
            Err(gone) => Err(gone),
            Ok(()) => {
                self.store_error = None;
                Ok(())
            }
        }
    }

    fn update<T: Tree>(&mut self, store: &mut T, now: Instant) -> Result<(), Failure> {
        if !self.watched {
            store.watch(&self.back, &self.back_token())?;
            if let Some(front) = self.front.clone() {
                store.watch(&front, &self.front_token())?;
            }
            self.watched = true;
        }
        let Some(front) = store.read(&format!("{}/frontend", self.back))? else {
            return self.reset(store);
        };
        let _serving = self.plug.serving();
        if self.front.as_ref() != Some(&front) {
            self.set_front(store, &front)?;
        }
        if self.state == State::Initialising {
            self.claimed_by = self.plug.claimed_by();
            if self.claimed_by.is_some() || !self.check_domain(store)? {
                return Ok(());
            }
            if !self.check_interface(store)? {
                self.read_states(store, &front)?;
                return match self.is_detached(store)? {
                    true => self.close(store, State::Closed),
                    false => Ok(()),
                };
            }
        }
        self.read_states(store, &front)?;
        self.follow(store, &front, now)?;
        if self.plugged.is_some() && self.state == State::Connected {
            self.refresh(store, &front)?;
        }
        Ok(())
    }

    /// Follows the front end's directory, which is new or has changed.
    fn set_front<T: Tree>(&mut self, store: &mut T, front: &str) -> Result<(), Failure> {
        self.unplug();
        let token = self.front_token();
        if let Some(old) = self.front.take() {
            store.unwatch(&old, &token)?;
        }
        store.watch(front, &token)?;
        self.front = Some(front.into());
        self.state = State::Initialising;
        self.front_state = State::Unknown;
        (self.refused, self.broken, self.reconfigured) = (false, false, false);
        (self.error, self.waits) = (None, None);
        self.has_been_read = true;
        Ok(())
    }

    /// Resets the handshake: the toolstack removed our directory.
    fn reset<T: Tree>(&mut self, store: &mut T) -> Result<(), Failure> {
        self.unplug();
        self.state = State::Initialising;
        self.front_state = State::Unknown;
        self.claimed_by = None;
        (self.error, self.waits) = (None, None);
        if let Some(front) = self.front.take() {
            store.unwatch(&front, &self.front_token())?;
        }
        Ok(())
    }

    /// The directory's name and its key must name the same guest: its grants are mapped.
    fn check_domain<T: Tree>(&mut self, store: &mut T) -> Result<bool, Failure> {
        let path = format!("{}/frontend-id", self.back);
        let value = store.read(&path)?.unwrap_or_default();
        if keys::decimal(&value) == Some(self.id.domid.into()) {
            return Ok(true);
        }
        let text = format!("{path} is '{}', not {}", keys::printable(&value), self.id.domid);
        self.report_error(store, &Refused::invalid(text))?;
        Ok(false)
    }

    /// Scripts run when InitWait is written: the interface must exist before.
    fn check_interface<T: Tree>(&mut self, store: &mut T) -> Result<bool, Failure> {
        if let Interface::Missing(why) = self.plug.interface() {
            self.report_error(store, &Refused { errno: Errno::NODEV, text: why })?;
            return Ok(false);
        }
        if self.error.take().is_some() {
            store.remove(&self.error_dir())?;
        }
        Ok(true)
    }

    /// Whether the toolstack removes the vif before, or without, a driver in the guest: no front
    /// end will close.
    fn is_detached<T: Tree>(&self, store: &mut T) -> Result<bool, Failure> {
        if self.online || self.plugged.is_some() || self.state == State::Closed {
            return Ok(false);
        }
        let own = store.read(&format!("{}/state", self.back))?;
        Ok(own.as_deref().and_then(State::parse) == Some(State::Closing))
    }

    /// Reads the states of both ends.
    fn read_states<T: Tree>(&mut self, store: &mut T, front: &str) -> Result<(), Failure> {
        self.online = keys::flag(store, &format!("{}/online", self.back))?;
        let value = store.read(&format!("{front}/state"))?;
        self.front_state = match value.as_deref().map(State::parse) {
            None => State::Unknown,
            Some(Some(state)) => state,
            // Written by the guest: treated as closing.
            Some(None) => State::Closed,
        };
        if !matches!(self.front_state, State::Connected | State::Initialised) {
            self.refused = false;
        }
        Ok(())
    }

    /// The target state, from the states read.
    fn target<T: Tree>(&self, store: &mut T, front: &str) -> Result<Option<State>, Failure> {
        let to = state::target(self.state, self.front_state);
        if self.state != State::Closing && self.is_detached(store)? {
            return Ok(Some(State::Closed));
        }
        if to != Some(State::Connected) {
            return Ok(to);
        }
        if self.refused {
            // Closed already, unless the store refused that.
            return Ok((self.state == State::InitWait).then_some(State::Closing));
        }
        if self.front_state == State::Initialised && !keys::has_rings(store, front)? {
            return Ok((self.state != State::InitWait).then_some(State::InitWait));
        }
        Ok(to)
    }

    fn follow<T: Tree>(&mut self, store: &mut T, front: &str, now: Instant) -> Result<(), Failure> {
        self.waits = None;
        if let Some(to) = self.target(store, front)? {
            while self.state != to && self.front.is_some() {
                match state::next(self.state, to) {
                    State::InitWait => self.init_wait(store)?,
                    State::Connected if self.connect(store, front, now)? => {}
                    State::Connected => return Ok(()),
                    step => self.close(store, step)?,
                }
            }
        }
        self.reconfigure(store)
    }

    /// Writes keys to our directory, unless the toolstack removed it.
    fn write_keys<T: Tree>(
        &mut self,
        store: &mut T,
        keys: &[(String, String)],
    ) -> Result<bool, Failure> {
        if store.write(&self.back, "frontend", keys)? {
            return Ok(true);
        }
        self.reset(store)?;
        Ok(false)
    }

    fn init_wait<T: Tree>(&mut self, store: &mut T) -> Result<(), Failure> {
        let mut keys = self.offer.keys();
        keys.push(pair("carrier", 0));
        keys.push(pair("state", State::InitWait.number()));
        if self.write_keys(store, &keys)? {
            self.state = State::InitWait;
        }
        Ok(())
    }

    /// Connects. Returns whether it is connected; if not, it waits or closes.
    fn connect<T: Tree>(
        &mut self,
        store: &mut T,
        front: &str,
        now: Instant,
    ) -> Result<bool, Failure> {
        let hotplug = store.read(&format!("{}/hotplug-status", self.back))?;
        if matches!(hotplug.as_deref(), Some("error" | "busy")) {
            let why = store.read(&format!("{}/hotplug-error", self.back))?.unwrap_or_default();
            self.waits = Some("the hotplug script failed");
            self.error = Some(format!("hotplug script: {}", keys::printable(&why)));
            return Ok(false);
        }
        // The script puts the interface into a bridge; frames before that would be lost.
        let has_interface = self.plug.interface() != Interface::None;
        if has_interface && hotplug.as_deref().is_some_and(|status| status != "connected") {
            self.waits = Some("the toolstack's hotplug script has not written hotplug-status");
            return Ok(false);
        }
        if let Err(at) = self.connects.take(now) {
            self.waits = Some("the guest reconnects too often");
            self.due = Some(at);
            return Ok(false);
        }
        let request = match keys::read(store, front, &self.offer) {
            Ok(request) => request,
            Err(ReadError::Refused(refused)) => return self.refuse(store, &refused),
            Err(ReadError::Store(failure)) => return Err(failure),
        };
        self.multicast = keys::flag(store, &format!("{front}/request-multicast-control"))?;
        let settings = self.read_settings(store, front)?;
        // Before the rings: none is served without its limits.
        self.plug.set(&settings);
        if let Err(refused) = self.plug.connect(&request) {
            return self.refuse(store, &refused);
        }
        self.plugged = Some(request);
        let connected = self.publish(store, &settings, hotplug.as_deref());
        if !matches!(connected, Ok(true)) {
            self.unplug();
        }
        connected
    }

    /// Reports to both sides that the rings are served.
    fn publish<T: Tree>(
        &mut self,
        store: &mut T,
        settings: &Settings,
        hotplug: Option<&str>,
    ) -> Result<bool, Failure> {
        let mut keys = vec![pair("carrier", u8::from(settings.link))];
        if hotplug != Some("connected") && self.plug.interface() == Interface::None {
            // A hotplug script has nothing to set up: nothing waits for one.
            keys.push(pair("hotplug-status", "connected"));
        }
        keys.push(pair("state", State::Connected.number()));
        if !self.write_keys(store, &keys)? {
            return Ok(false);
        }
        self.state = State::Connected;
        (self.broken, self.reconfigured) = (false, false);
        if self.error.take().is_some() {
            store.remove(&self.error_dir())?;
        }
        self.plug.set(settings);
        self.settings = Some(*settings);
        Ok(true)
    }

    fn error_dir(&self) -> String {
        format!("error/{}", self.back)
    }

    /// Writes an error where a toolstack's users look for it.
    fn report_error<T: Tree>(&mut self, store: &mut T, refused: &Refused) -> Result<(), Failure> {
        if self.error.as_ref() != Some(&refused.text) {
            // Also kept here, in case the store refuses it.
            self.error = Some(refused.text.clone());
            store.write_key(&format!("{}/error", self.error_dir()), &refused.to_string())?;
        }
        Ok(())
    }

    /// Rejects the front end; none of its resources are held.
    fn refuse<T: Tree>(&mut self, store: &mut T, refused: &Refused) -> Result<bool, Failure> {
        self.refused = true;
        let reported = self.report_error(store, refused);
        self.close(store, State::Closing)?;
        reported.map(|()| false)
    }

    fn close<T: Tree>(&mut self, store: &mut T, to: State) -> Result<(), Failure> {
        // Before the state is written: the front end may then free its pages.
        self.unplug();
        if self.write_keys(store, &[pair("carrier", 0), pair("state", to.number())])? {
            self.state = to;
        }
        Ok(())
    }

    fn unplug(&mut self) {
        self.plug.disconnect();
        self.plugged = None;
        self.settings = None;
    }

    fn reconfigure<T: Tree>(&mut self, store: &mut T) -> Result<(), Failure> {
        let answer = match (self.front_state, self.reconfigured) {
            _ if self.state != State::Connected => return Ok(()),
            (State::Reconfiguring, false) => State::Reconfigured,
            (State::Connected, true) => State::Connected,
            _ => return Ok(()),
        };
        self.reconfigured = answer == State::Reconfigured;
        self.write_keys(store, &[pair("state", answer.number())]).map(|_| ())
    }

    fn read_settings<T: Tree>(&self, store: &mut T, front: &str) -> Result<Settings, Failure> {
        let rate = store.read(&format!("{}/rate", self.back))?;
        let mtu = store.read(&format!("{}/mtu", self.back))?;
        let multicast = match self.offer.has("dynamic-multicast-control") {
            true => keys::flag(store, &format!("{front}/request-multicast-control"))?,
            false => self.multicast,
        };
        Ok(Settings {
            rate: rate.as_deref().and_then(Rate::parse),
            mtu: mtu.as_deref().and_then(keys::mtu),
            multicast_control: multicast && self.offer.has("multicast-control"),
            link: !keys::flag(store, &format!("{front}/disconnect"))?,
        })
    }

    /// Applies settings that may change while connected.
    fn refresh<T: Tree>(&mut self, store: &mut T, front: &str) -> Result<(), Failure> {
        let settings = self.read_settings(store, front)?;
        let Some(old) = self.settings.replace(settings) else { return Ok(()) };
        if old.link != settings.link
            && !self.write_keys(store, &[pair("carrier", u8::from(settings.link))])?
        {
            return Ok(());
        }
        if old != settings {
            self.plug.set(&settings);
        }
        Ok(())
    }

    /// Handles a violation of the ring protocol: the front end loses its rings and its carrier.
    ///
    /// # Errors
    /// [`Failure`]: the store has disconnected.
    pub fn fault<T: Tree>(
        &mut self,
        store: &mut T,
        why: &str,
        now: Instant,
    ) -> Result<(), Failure> {
        if self.plugged.is_none() {
            return Ok(());
        }
        self.unplug();
        self.broken = true;
        let put = self.write_keys(store, &[pair("carrier", 0)]).map(|_| ());
        let reported = self.report_error(store, &Refused { errno: Errno::PROTO, text: why.into() });
        self.retry_later(store, put.and(reported), now)
    }

    /// Releases the rings and leaves the front end's state: the next back end of the vif continues
    /// from it.
    pub fn leave<T: Tree>(&mut self, store: &mut T) {
        self.unplug();
        // A disconnected store holds no watches.
        let _ = store.unwatch(&self.back, &self.back_token());
        if let Some(front) = &self.front {
            let _ = store.unwatch(front, &self.front_token());
        }
    }

    /// The current state, for operators.
    pub fn status(&self) -> Status {
        Status {
            front: self.front_state,
            back: self.state,
            text: self.text(),
            error: self.store_error.as_ref().map(|(why, _)| why.0.clone()).or(self.error.clone()),
            features: self.plugged.as_ref().map(|r| r.features.names()).unwrap_or_default(),
            queues: self.plugged.as_ref().map_or(0, |r| r.queues.len()),
        }
    }

    fn text(&self) -> String {
        let text = self.state_text();
        if self.store_error.is_none() {
            text
        } else {
            format!("{text}; xenstore refused a request, retrying")
        }
    }

    fn state_text(&self) -> String {
        if self.held_until.is_some() {
            return "held down after a panic of the switch".into();
        }
        if let Some(who) = &self.claimed_by {
            return format!("not served: {who}");
        }
        if self.front.is_none() {
            return format!("waiting for the toolstack to create vif {}", self.id);
        }
        match (self.state, self.waits) {
            (State::Initialising, _) => "found, not usable".into(),
            (State::InitWait, Some(why)) => format!("waiting: {why}"),
            (State::InitWait, None) => "waiting for the guest's driver".into(),
            (State::Connected, _) if self.broken => {
                "stopped: the guest's driver violated the protocol; waiting for it to close".into()
            }
            (State::Connected, _) if self.settings.is_some_and(|s| !s.link) => {
                "connected, link set down by the toolstack".into()
            }
            (State::Connected, _) => "connected".into(),
            (State::Closing, _) if self.refused => {
                "rejected; waiting for the guest's driver to close".into()
            }
            (State::Closing, _) => "the guest's driver is closing".into(),
            (_, _) if !self.online => "closed, being removed by the toolstack".into(),
            (_, _) => "closed; the guest's driver may reconnect".into(),
        }
    }
}

#[cfg(test)]
mod tests;
