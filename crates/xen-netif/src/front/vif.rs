//! One vif's front end: follows its back end through the states of xenstore.
//!
//! [`Handshake::look`] reads what both directories say now and does what is due; events are hints
//! to look, no more.

use super::keys::{self, Agreed, Wishes};
use super::step::{Step, step};
use crate::back::{CtrlKeys, Failure, QueueKeys, State, Tree};

/// Steps of one look: no chain of ours is longer, and a back end that flaps is looked at again.
const STEPS_MAX: usize = 8;

/// Rings as they are named in xenstore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// One for each queue.
    pub queues: Vec<QueueKeys>,
    /// The control ring.
    pub ctrl: Option<CtrlKeys>,
}

/// What makes a vif's rings.
pub trait Rings {
    /// Makes rings, grants them, and makes channels: all of them, or none and says why.
    fn prepare(&mut self, agreed: &Agreed) -> Result<Named, Failure>;
    /// Ends their use. The back end may still have them mapped. Also when there are none.
    fn stop(&mut self);
    /// Gives them back: the back end has let go. Also when there are none.
    fn release(&mut self);
}

/// How a vif is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Waiting for its back end.
    Waiting,
    /// Frames pass.
    Up,
    /// Closed, as we wanted.
    Over,
    /// It does not exist any more.
    Gone,
}

/// One vif's state machine.
pub struct Handshake<R> {
    front: String,
    back: Option<String>,
    wishes: Wishes,
    rings: R,
    agreed: Option<Agreed>,
    leaving: bool,
}

impl<R: Rings> Handshake<R> {
    /// For the vif whose own directory is `front`.
    pub fn new(front: String, wishes: Wishes, rings: R) -> Self {
        Self { front, back: None, wishes, rings, agreed: None, leaving: false }
    }

    /// What makes the rings.
    pub fn rings(&mut self) -> &mut R {
        &mut self.rings
    }

    /// What was agreed on, while there are rings.
    pub fn agreed(&self) -> Option<&Agreed> {
        self.agreed.as_ref()
    }

    /// Closes from the next look on.
    pub fn leave(&mut self) {
        self.leaving = true;
    }

    /// Reads both states, and does what is due.
    ///
    /// # Errors
    /// [`Failure`]: xenstore is gone, or rings could not be made.
    pub fn look<T: Tree>(&mut self, store: &mut T) -> Result<Status, Failure> {
        for _ in 0..STEPS_MAX {
            let ours = state(store, &self.front)?;
            let (back, online) = self.see_back(store)?;
            match step(ours, back, self.agreed.is_some(), online, self.leaving) {
                Step::Wait => return Ok(Status::Waiting),
                Step::Up => return Ok(Status::Up),
                Step::Over => return Ok(Status::Over),
                Step::Gone => {
                    self.give_back();
                    return Ok(Status::Gone);
                }
                Step::Connect => self.connect(store)?,
                Step::Close => {
                    self.rings.stop();
                    self.say(store, State::Closing)?;
                }
                Step::Closed => {
                    self.give_back();
                    self.say(store, State::Closed)?;
                }
                Step::Begin => {
                    self.give_back();
                    self.say(store, State::Initialising)?;
                }
            }
        }
        Ok(Status::Waiting)
    }

    /// The back end's state, and whether it is to be. Our directory names its, anew after a
    /// migration.
    fn see_back<T: Tree>(&mut self, store: &mut T) -> Result<(State, bool), Failure> {
        let back = store.read(&format!("{}/backend", self.front))?;
        if back != self.back {
            if let Some(old) = self.back.take() {
                store.unwatch(&format!("{old}/state"), "back")?;
            }
            if let Some(new) = &back {
                store.watch(&format!("{new}/state"), "back")?;
            }
            self.back = back;
        }
        let Some(back) = &self.back else { return Ok((State::Unknown, false)) };
        let online = store.read(&format!("{back}/online"))?;
        Ok((state(store, back)?, online.is_none_or(|online| online.trim() != "0")))
    }

    fn connect<T: Tree>(&mut self, store: &mut T) -> Result<(), Failure> {
        let back = self.back.clone().unwrap_or_default();
        let Some(agreed) = Agreed::read(store, &self.front, &back, &self.wishes)? else {
            let text = format!("{back}/feature-rx-copy is not 1: pages are not flipped any more");
            return Err(Failure(text));
        };
        let named = self.rings.prepare(&agreed)?;
        for key in keys::STALE {
            store.remove(&format!("{}/{key}", self.front))?;
        }
        store.remove(&format!("{}/multi-queue-num-queues", self.front))?;
        self.agreed = Some(agreed);
        let keys = keys::written(&agreed, &named.queues, named.ctrl.as_ref());
        store.write(&self.front, "backend", &keys)?;
        self.say(store, State::Connected)
    }

    fn give_back(&mut self) {
        self.rings.stop();
        self.rings.release();
        self.agreed = None;
    }

    /// Writes our state, if our directory is still there.
    fn say<T: Tree>(&self, store: &mut T, state: State) -> Result<(), Failure> {
        let key = ("state".to_string(), state.number().to_string());
        store.write(&self.front, "backend", &[key])?;
        Ok(())
    }
}

fn state<T: Tree>(store: &mut T, dir: &str) -> Result<State, Failure> {
    let value = store.read(&format!("{dir}/state"))?;
    Ok(value.and_then(|value| State::parse(&value)).unwrap_or(State::Unknown))
}

#[cfg(test)]
mod tests;
