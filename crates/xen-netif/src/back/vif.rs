//! One vif's back end: follows its front end through the states of xenstore.
//!
//! [`Handshake::look`] reads what both directories say now and does what is due; events are hints
//! to look, no more, so any number of them may be lost in one. What is written:
//!
//! | state | on the way in | here |
//! |---|---|---|
//! | Initialising | nothing | a vif that was found; its front was not looked at |
//! | InitWait | what we offer, one transaction | a front may name its rings |
//! | Connected | rings mapped, channels bound, then `carrier`, `hotplug-status` | frames pass |
//! | Closing | rings given back first | |
//! | Closed | | the front may start anew; with `online` 0 we are done |
//!
//! A front end that asks for what cannot be gets an `error` node and Closing, once, and is not
//! tried again until it leaves Connected. One that breaks the ring protocol loses its rings and
//! carrier, and keeps its state until it closes.

use std::fmt;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::keys::{self, Offer, ReadError, Refused, Request};
use super::state::{self, State};
use super::tree::{Failure, Tree};
use crate::port::Rate;

/// Names a vif of our back-end domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VifId {
    /// The guest.
    pub domid: u16,
    /// Its device.
    pub devid: u32,
}

impl VifId {
    /// Its back-end directory, below our own domain's.
    pub fn back(self) -> String {
        format!("backend/vif/{}/{}", self.domid, self.devid)
    }
}

impl fmt::Display for VifId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.domid, self.devid)
    }
}

/// What can change while a vif is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How much the guest may send; `None`: no limit.
    pub rate: Option<Rate>,
    /// The MTU that the toolstack set.
    pub mtu: Option<u16>,
    /// Multicast frames only to addresses that the guest asked for.
    pub multicast_control: bool,
    /// Whether frames may pass at all (`disconnect`).
    pub link: bool,
}

/// What a vif's rings are plugged into.
pub trait Plug {
    /// Why the vif is not ours to serve: another back end has it.
    fn claimed(&mut self) -> Option<String>;
    /// Maps rings, binds channels, starts queues with the settings last told: all of them, or none
    /// and says why. What guests send is taken from here on; nothing goes to them before `set`.
    fn connect(&mut self, request: &Request) -> Result<(), Refused>;
    /// Says what the next rings begin with, or, while connected, what changes; frames may then go
    /// to the guest.
    fn set(&mut self, settings: &Settings);
    /// Stops queues and gives all back. Also when there is nothing to give back.
    fn disconnect(&mut self);
}

/// Times that something a guest can cause is done at once, and then how often.
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

    /// Takes one; if there is none, the time when there is.
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

/// Looks at once, and then every so often: a guest that rewrites its keys in a loop (XSA-349) must
/// not take the control thread from others.
const LOOKS: (u32, Duration) = (64, Duration::from_millis(20));
/// What the store refused is tried again after so long, then after twice as long, and so on.
const AGAIN: Duration = Duration::from_secs(1);
/// So often twice as long.
const AGAIN_MAX: u32 = 6;
/// Connects at once, and then every so often: each maps and unmaps pages.
const CONNECTS: (u32, Duration) = (8, Duration::from_secs(1));

/// A vif as people want to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// State of the front end, as last seen.
    pub front: State,
    /// State of ours.
    pub back: State,
    /// Both in plain words.
    pub text: String,
    /// What was last wrong.
    pub error: Option<String>,
    /// Names of what the front end takes.
    pub takes: Vec<&'static str>,
    /// Its queues; 0 when it is not connected.
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
    /// The rings of this request are plugged.
    plugged: Option<Request>,
    settings: Option<Settings>,
    /// Multicast control as sampled at Connected.
    multicast: bool,
    /// Connecting failed: not again until the front end leaves Connected.
    refused: bool,
    /// The front end broke the ring protocol: it has no rings until it starts anew.
    broken: bool,
    claimed: Option<String>,
    waits: Option<&'static str>,
    error: Option<String>,
    /// The store was asked to tell of the directories that are there.
    watched: bool,
    /// What it refused, and how often in a row.
    trouble: Option<(Failure, u32)>,
    /// Reconfigured was answered.
    reconfigured: bool,
    seen: bool,
    looks: Bucket,
    connects: Bucket,
    due: Option<Instant>,
}

fn pair(key: &str, value: impl ToString) -> (String, String) {
    (key.into(), value.to_string())
}

impl<P: Plug> Handshake<P> {
    /// For a vif that may or may not exist yet. `now` is any time before those of looks.
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
            claimed: None,
            waits: None,
            error: None,
            watched: false,
            trouble: None,
            reconfigured: false,
            seen: false,
            looks: Bucket::new(LOOKS.0, LOOKS.1, now),
            connects: Bucket::new(CONNECTS.0, CONNECTS.1, now),
            due: None,
        }
    }

    /// Token of events in our own directory.
    pub fn back_token(&self) -> String {
        format!("b{}", self.id)
    }

    /// Token of events in the front end's directory.
    pub fn front_token(&self) -> String {
        format!("f{}", self.id)
    }

    /// What its rings are plugged into.
    pub fn plug(&mut self) -> &mut P {
        &mut self.plug
    }

    /// Starts to follow the vif; anew, if xenstore was away: it knows of no watch any more. As
    /// [`look`](Self::look).
    pub fn start<T: Tree>(&mut self, store: &mut T, now: Instant) -> Result<(), Failure> {
        self.watched = false;
        self.look(store, now)
    }

    /// When to look again though nothing is told.
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Whether the toolstack or the guest's end is done with the vif: its port may go.
    pub fn is_over(&self) -> bool {
        let known = self.seen && self.trouble.is_none();
        known && (self.front.is_none() || (self.state == State::Closed && !self.online))
    }

    /// Looks at both ends and does what is due. What the store refuses is tried again in time.
    ///
    /// # Errors
    /// [`Failure`]: the store is gone, for all vifs.
    pub fn look<T: Tree>(&mut self, store: &mut T, now: Instant) -> Result<(), Failure> {
        self.due = None;
        if let Err(at) = self.looks.take(now) {
            self.due = Some(at);
            return Ok(());
        }
        let done = self.attend(store, now);
        self.excuse(store, done, now)
    }

    /// A refusal is this vif's trouble alone.
    fn excuse<T: Tree>(
        &mut self,
        store: &T,
        done: Result<(), Failure>,
        now: Instant,
    ) -> Result<(), Failure> {
        match done {
            Err(failure) if !store.is_gone() => {
                let times = self.trouble.take().map_or(0, |(_, times)| times + 1).min(AGAIN_MAX);
                self.due = Some(now + AGAIN * (1 << times));
                self.trouble = Some((failure, times));
                Ok(())
            }
            Err(gone) => Err(gone),
            Ok(()) => {
                self.trouble = None;
                Ok(())
            }
        }
    }

    fn attend<T: Tree>(&mut self, store: &mut T, now: Instant) -> Result<(), Failure> {
        if !self.watched {
            store.watch(&self.back, &self.back_token())?;
            if let Some(front) = self.front.clone() {
                store.watch(&front, &self.front_token())?;
            }
            self.watched = true;
        }
        let Some(front) = store.read(&format!("{}/frontend", self.back))? else {
            return self.vanish(store);
        };
        if self.front.as_ref() != Some(&front) {
            self.adopt(store, &front)?;
        }
        if self.state == State::Initialising {
            self.claimed = self.plug.claimed();
            if self.claimed.is_some() || !self.check_domain(store)? {
                return Ok(());
            }
        }
        self.see(store, &front)?;
        self.follow(store, &front, now)?;
        if self.plugged.is_some() && self.state == State::Connected {
            self.refresh(store, &front)?;
        }
        Ok(())
    }

    /// The front end's directory is another than before, or the first.
    fn adopt<T: Tree>(&mut self, store: &mut T, front: &str) -> Result<(), Failure> {
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
        self.seen = true;
        Ok(())
    }

    /// The toolstack removed our directory.
    fn vanish<T: Tree>(&mut self, store: &mut T) -> Result<(), Failure> {
        self.unplug();
        self.state = State::Initialising;
        self.front_state = State::Unknown;
        self.claimed = None;
        (self.error, self.waits) = (None, None);
        if let Some(front) = self.front.take() {
            store.unwatch(&front, &self.front_token())?;
        }
        Ok(())
    }

    /// The directory's name and its key must name the same guest: grants are mapped from it.
    fn check_domain<T: Tree>(&mut self, store: &mut T) -> Result<bool, Failure> {
        let path = format!("{}/frontend-id", self.back);
        let value = store.read(&path)?.unwrap_or_default();
        if keys::decimal(&value) == Some(self.id.domid.into()) {
            return Ok(true);
        }
        let text = format!("{path} is '{}', not {}", keys::shown(&value), self.id.domid);
        self.tell(store, &Refused::invalid(text))?;
        Ok(false)
    }

    /// Reads the states of both ends.
    fn see<T: Tree>(&mut self, store: &mut T, front: &str) -> Result<(), Failure> {
        self.online = keys::flag(store, &format!("{}/online", self.back))?;
        let value = store.read(&format!("{front}/state"))?;
        self.front_state = match value.as_deref().map(State::parse) {
            None => State::Unknown,
            Some(Some(state)) => state,
            // Written by the guest: it ends what it had.
            Some(None) => State::Closed,
        };
        if !matches!(self.front_state, State::Connected | State::Initialised) {
            self.refused = false;
        }
        Ok(())
    }

    /// Where to go, by what was seen.
    fn target<T: Tree>(&self, store: &mut T, front: &str) -> Result<Option<State>, Failure> {
        let to = state::target(self.state, self.front_state);
        if !self.online && self.plugged.is_none() && self.state != State::Closed {
            // Detached before, or without, a driver in the guest: nobody there will close.
            let own = store.read(&format!("{}/state", self.back))?;
            if own.as_deref().and_then(State::parse) == Some(State::Closing)
                && self.state != State::Closing
            {
                return Ok(Some(State::Closed));
            }
        }
        if to != Some(State::Connected) {
            return Ok(to);
        }
        if self.refused {
            // It is there already, unless the store refused that.
            return Ok((self.state == State::InitWait).then_some(State::Closing));
        }
        if self.front_state == State::Initialised && !keys::named(store, front)? {
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

    /// Writes keys into our directory, unless its toolstack removed it.
    fn put<T: Tree>(&mut self, store: &mut T, keys: &[(String, String)]) -> Result<bool, Failure> {
        if store.write(&self.back, "frontend", keys)? {
            return Ok(true);
        }
        self.vanish(store)?;
        Ok(false)
    }

    fn init_wait<T: Tree>(&mut self, store: &mut T) -> Result<(), Failure> {
        let mut keys = self.offer.keys();
        keys.push(pair("carrier", 0));
        keys.push(pair("state", State::InitWait.number()));
        if self.put(store, &keys)? {
            self.state = State::InitWait;
        }
        Ok(())
    }

    /// Whether it is connected now. If not, it waits, or closes.
    fn connect<T: Tree>(
        &mut self,
        store: &mut T,
        front: &str,
        now: Instant,
    ) -> Result<bool, Failure> {
        let hotplug = store.read(&format!("{}/hotplug-status", self.back))?;
        if matches!(hotplug.as_deref(), Some("error" | "busy")) {
            let why = store.read(&format!("{}/hotplug-error", self.back))?.unwrap_or_default();
            self.waits = Some("its hotplug script failed");
            self.error = Some(format!("hotplug script: {}", keys::shown(&why)));
            return Ok(false);
        }
        if let Err(at) = self.connects.take(now) {
            self.waits = Some("it reconnects too often");
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

    /// Tells both sides that the rings are served.
    fn publish<T: Tree>(
        &mut self,
        store: &mut T,
        settings: &Settings,
        hotplug: Option<&str>,
    ) -> Result<bool, Failure> {
        let mut keys = vec![pair("carrier", u8::from(settings.link))];
        if hotplug != Some("connected") {
            // There is no interface for a script to set up: what waits for one need not.
            keys.push(pair("hotplug-status", "connected"));
        }
        keys.push(pair("state", State::Connected.number()));
        if !self.put(store, &keys)? {
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

    /// Says what is wrong where a toolstack's user looks for it.
    fn tell<T: Tree>(&mut self, store: &mut T, refused: &Refused) -> Result<(), Failure> {
        if self.error.as_ref() != Some(&refused.text) {
            // Known here also where the store does not take it.
            self.error = Some(refused.text.clone());
            store.note(&format!("{}/error", self.error_dir()), &refused.to_string())?;
        }
        Ok(())
    }

    /// The front end cannot be served; nothing of it is held.
    fn refuse<T: Tree>(&mut self, store: &mut T, refused: &Refused) -> Result<bool, Failure> {
        self.refused = true;
        let told = self.tell(store, refused);
        self.close(store, State::Closing)?;
        told.map(|()| false)
    }

    fn close<T: Tree>(&mut self, store: &mut T, to: State) -> Result<(), Failure> {
        // Before the state says so: the front may free its pages when it does.
        self.unplug();
        if self.put(store, &[pair("carrier", 0), pair("state", to.number())])? {
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
        self.put(store, &[pair("state", answer.number())]).map(|_| ())
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

    /// Follows what may change while connected.
    fn refresh<T: Tree>(&mut self, store: &mut T, front: &str) -> Result<(), Failure> {
        let settings = self.read_settings(store, front)?;
        let Some(old) = self.settings.replace(settings) else { return Ok(()) };
        if old.link != settings.link
            && !self.put(store, &[pair("carrier", u8::from(settings.link))])?
        {
            return Ok(());
        }
        if old != settings {
            self.plug.set(&settings);
        }
        Ok(())
    }

    /// The front end broke the ring protocol: it loses its rings, and is told by its carrier.
    ///
    /// # Errors
    /// [`Failure`]: the store is gone.
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
        let put = self.put(store, &[pair("carrier", 0)]).map(|_| ());
        let told = self.tell(store, &Refused { errno: Errno::PROTO, text: why.into() });
        self.excuse(store, put.and(told), now)
    }

    /// Gives the rings back and lets the front end be: whoever serves the vif next goes on with
    /// them where they stand.
    pub fn leave<T: Tree>(&mut self, store: &mut T) {
        self.unplug();
        // Xenstore that went away holds no watches.
        let _ = store.unwatch(&self.back, &self.back_token());
        if let Some(front) = &self.front {
            let _ = store.unwatch(front, &self.front_token());
        }
    }

    /// How it stands.
    pub fn status(&self) -> Status {
        Status {
            front: self.front_state,
            back: self.state,
            text: self.text(),
            error: self.trouble.as_ref().map(|(why, _)| why.0.clone()).or(self.error.clone()),
            takes: self.plugged.as_ref().map(|r| r.takes.names()).unwrap_or_default(),
            queues: self.plugged.as_ref().map_or(0, |r| r.queues.len()),
        }
    }

    fn text(&self) -> String {
        let text = self.stands();
        if self.trouble.is_none() {
            text
        } else {
            format!("{text}; xenstore refused what it needs, trying again")
        }
    }

    fn stands(&self) -> String {
        if let Some(who) = &self.claimed {
            return format!("not ours: {who}");
        }
        if self.front.is_none() {
            return format!("waiting for the toolstack to make vif {}", self.id);
        }
        match (self.state, self.waits) {
            (State::Initialising, _) => "found, not to be used".into(),
            (State::InitWait, Some(why)) => format!("waiting: {why}"),
            (State::InitWait, None) => "waiting for the guest's driver".into(),
            (State::Connected, _) if self.broken => {
                "stopped, the guest's driver broke the protocol; waiting for it to close".into()
            }
            (State::Connected, _) if self.settings.is_some_and(|s| !s.link) => {
                "connected, link down by the toolstack".into()
            }
            (State::Connected, _) => "connected".into(),
            (State::Closing, _) if self.refused => {
                "refused; waiting for the guest's driver to close".into()
            }
            (State::Closing, _) => "the guest's driver is closing".into(),
            (_, _) if !self.online => "closed, being removed by the toolstack".into(),
            (_, _) => "closed; the guest's driver may come back".into(),
        }
    }
}

#[cfg(test)]
mod tests;
