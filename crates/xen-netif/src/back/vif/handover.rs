//! A vif handed to another process of the same back end.
//!
//! The other process reads xenstore while this one still serves the rings, and writes nothing. If
//! both directories are as this process left them, it continues from the same state, without a new
//! handshake; else it starts as any back end does whose predecessor ended.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::{Handshake, Plug, State, keys};
use crate::back::keys::{ReadError, Request};
use crate::back::plug::RingPositions;
use crate::back::tree::{Failure, Tree};

/// State of a vif for another process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VifState {
    /// The front end's directory.
    front: Option<String>,
    /// Number of our state.
    state: u32,
    /// The request whose rings run.
    request: Option<Request>,
    multicast: bool,
    refused: bool,
    broken: bool,
    reconfigured: bool,
    error: Option<String>,
}

fn differs(what: &str) -> Failure {
    Failure(format!("{what} changed meanwhile"))
}

impl<P: Plug> Handshake<P> {
    /// Returns its state for another process.
    pub fn export(&self) -> VifState {
        VifState {
            front: self.front.clone(),
            state: self.state.number(),
            request: self.plugged.clone(),
            multicast: self.multicast,
            refused: self.refused,
            broken: self.broken,
            reconfigured: self.reconfigured,
            error: self.error.clone(),
        }
    }

    /// Follows the vif from the state of another process, which still serves it. Its rings start
    /// with [`resume`](Self::resume).
    ///
    /// # Errors
    /// [`Failure`]: xenstore is not as the other process left it, cannot be read, or rings cannot
    /// be mapped. Then the handshake is a new one, to be [started](Self::start).
    pub fn adopt<T: Tree>(&mut self, store: &mut T, kept: &VifState) -> Result<(), Failure> {
        let adopted = self.adopt_state(store, kept);
        if adopted.is_err() {
            self.unplug();
            // Watches are left: `start` finds them registered.
            self.front = None;
            (self.state, self.front_state) = (State::Initialising, State::Unknown);
        }
        adopted
    }

    fn adopt_state<T: Tree>(&mut self, store: &mut T, kept: &VifState) -> Result<(), Failure> {
        // Before anything is read: later changes are events.
        store.watch(&self.back, &self.back_token())?;
        let front = store.read(&format!("{}/frontend", self.back))?;
        if front != kept.front {
            return Err(differs("the front end's directory"));
        }
        let Some(front) = front else { return Ok(()) };
        let _serving = self.plug.serving();
        store.watch(&front, &self.front_token())?;
        self.watched = true;
        let state = State::BACK.into_iter().find(|state| state.number() == kept.state);
        let state = state.ok_or_else(|| differs("the state"))?;
        let shown = if kept.reconfigured { State::Reconfigured } else { state };
        let own = store.read(&format!("{}/state", self.back))?;
        // Before its first write, the state is the toolstack's.
        if own.as_deref().and_then(State::parse) != Some(shown) {
            return Err(differs("our state"));
        }
        let domid = store.read(&format!("{}/frontend-id", self.back))?;
        if domid.as_deref().and_then(keys::decimal) != Some(self.id.domid.into()) {
            return Err(differs("the front end's domain"));
        }
        self.read_states(store, &front)?;
        self.state = state;
        (self.multicast, self.refused) = (kept.multicast, kept.refused);
        (self.broken, self.reconfigured) = (kept.broken, kept.reconfigured);
        self.error.clone_from(&kept.error);
        // One that is about to close gets no rings again.
        let leaves = super::state::target(state, self.front_state).is_some();
        if let Some(request) = kept.request.as_ref().filter(|_| !leaves) {
            self.adopt_rings(store, &front, request)?;
        }
        self.front = Some(front);
        self.has_been_read = true;
        Ok(())
    }

    fn adopt_rings<T: Tree>(
        &mut self,
        store: &mut T,
        front: &str,
        request: &Request,
    ) -> Result<(), Failure> {
        match keys::read(store, front, &self.offer) {
            Ok(now) if now == *request => {}
            Ok(_) => return Err(differs("what the front end requests")),
            Err(ReadError::Refused(refused)) => return Err(Failure(refused.text)),
            Err(ReadError::Store(failure)) => return Err(failure),
        }
        let settings = self.read_settings(store, front)?;
        // Before the rings: none is served without its limits.
        self.plug.set(&settings);
        self.plug.adopt(request).map_err(|refused| Failure(refused.text))?;
        self.plugged = Some(request.clone());
        self.settings = Some(settings);
        Ok(())
    }

    /// Starts adopted rings at these positions, or where their responses end. Rings that cannot be
    /// started are connected again, by the next [`start`](Self::start).
    ///
    /// # Errors
    /// [`Failure`]: why they cannot.
    pub fn resume(&mut self, at: Option<&RingPositions>) -> Result<(), Failure> {
        if self.plugged.is_none() {
            return Ok(());
        }
        let _serving = self.plug.serving();
        if let Err(refused) = self.plug.resume(at) {
            self.unplug();
            self.front = None;
            (self.state, self.front_state) = (State::Initialising, State::Unknown);
            return Err(Failure(refused.text));
        }
        if let Some(settings) = self.settings {
            self.plug.set(&settings);
        }
        Ok(())
    }

    /// Has an adopted vif polled at once: what changed since then may have caused no event.
    pub fn poll_soon(&mut self, now: Instant) {
        self.due = Some(now);
    }
}
